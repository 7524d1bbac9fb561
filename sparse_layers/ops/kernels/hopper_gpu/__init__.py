"""An engine of `gpu_attention`: block-sparse flash attention for Hopper GPUs in Gluon, Triton's lower level.

The kernels are in `forward_kernel.py`, `backward_kernel.py` and, for blocks that single queries select,
`query_gather_kernel.py`. What they share is in `tiles.py` and `primitives.py`. `launch.py` and `query_gather.py` launch
them, `views.py` has row orders as boxes of descriptors, `schedule.py` assigns work tiles to programs, and `settings.py`
has tile sizes and budgets.
"""
