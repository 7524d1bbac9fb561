"""The op, and the rooms below it: `planning` (WHERE to compute), `kernels` (HOW), `decoding`."""
