"""What the rooms of GPU kernels share: `triton_gpu`, `hopper_gpu`, `select_gpu` and `decode_gpu`.

`hardware.py` describes the GPU, `assembler.py` the ptxas that JAX will run, and `bridge.py` compiles and calls kernels.
`lists.py` makes block lists on the device, with `compact_kernel.py`. `work.py` cuts long lists, and says in which order
programs begin. `tiles.py` has what kernels in Triton share.
"""
