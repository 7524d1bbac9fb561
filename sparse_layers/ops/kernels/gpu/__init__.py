"""Shared code of the GPU kernels in `triton_gpu`, `hopper_gpu`, `select_gpu` and `decode_gpu`.

`hardware.py` describes the GPU, `assembler.py` the ptxas that JAX will run, and `bridge.py` compiles and calls kernels.
`passes.py` has the pass that an engine computes, and the results that engines hand to each other. `lists.py` makes
block lists on the device, with `compact_kernel.py`. `splits.py` splits long work tiles. `tiles.py` has the functions
and bundles that the Triton kernels share.
"""
