"""HOW to compute: the implementations of the op, one file or package each, none of which imports another.

An implementation knows block lists and row orders, never patterns. A new one is a file here (`call.py` has the
contract), a name in ``IMPLEMENTATIONS`` of `ops/implementations.py`, and its block sizes in `planning/platforms.py`.

GPUs have two implementations, "hopper" and "triton", both in `gpu_attention`. Their kernels are in two engines that do
not import each other, `hopper_gpu` and `triton_gpu`; `gpu` has the code that all packages for GPUs share.
"""
