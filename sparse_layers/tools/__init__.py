"""Tools that look at patterns, plans and machines: `describe` and `draw`, `tune`, the doctor."""
