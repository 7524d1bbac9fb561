"""Where to compute, and how: block grids, `MaskInfo`, plans, the attention op and its backends."""
