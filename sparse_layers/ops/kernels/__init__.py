"""HOW to compute: one file or package for each implementation, of which none imports another.

An implementation knows block lists and row orders, never patterns. A new one is a file here with ``unsupported``,
``forward`` and ``backward`` (see `call.py` for what they are given), one name in ``IMPLEMENTATIONS`` of
`ops/attention.py`, and in `planning/platforms.py` what it is tried for and how its block sizes are chosen.

On GPUs there are two implementations, both of `gpu_attention`: "hopper" and "triton". They ask engines, which know
nothing of each other: `hopper_gpu` and `triton_gpu`. What all rooms for GPUs share is in `gpu`.
"""
