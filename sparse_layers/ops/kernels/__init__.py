"""HOW to compute: one file or package for each implementation, of which none imports another.

An implementation knows block lists and row orders, never patterns. A new one is a file here with ``unsupported``,
``forward`` and ``backward`` (see `call.py` for what they are given), one name in ``IMPLEMENTATIONS`` of
`ops/attention.py`, and in `planning/platforms.py` what it is tried for and how its block sizes are chosen.

One exception: `hopper_gpu` does what it can of a call, and leaves the rest to `triton_gpu`, whose chains it takes.
"""
