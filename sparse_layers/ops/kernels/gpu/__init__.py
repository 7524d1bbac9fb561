"""What the rooms of GPU kernels share: the engines `triton_gpu` and `hopper_gpu`, `select_gpu` and `decode_gpu`.

`hardware.py` describes the GPU, `assembler.py` the ptxas that JAX will run, and `bridge.py` compiles and calls kernels.
`passes.py` has the pass that an engine computes, and what engines hand to each other. `lists.py` makes block lists on
the device, with `compact_kernel.py`. `splits.py` splits work tiles that take long. `tiles.py` has what kernels in
Triton share.
"""
