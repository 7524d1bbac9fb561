"""An engine of `gpu_attention`: block-sparse flash attention in plain Triton.

Programs follow lists of active blocks, full ones without any mask. The kernels are in `forward_kernel.py`,
`backward_kernel.py` and `kv_outer_kernel.py`, `launch.py` and `kv_outer.py` launch them, and `settings.py` has the tile
sizes.
"""
