"""The GPU at hand, and the bridge from JAX to a kernel: shared by `triton_gpu` and `hopper_gpu`.

`hardware.py` describes the GPU, `assembler.py` the ptxas that JAX will run, and `bridge.py` compiles and calls kernels.
"""
