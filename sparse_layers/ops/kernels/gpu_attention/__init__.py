"""The implementations "hopper" and "triton": block-sparse flash attention for NVIDIA GPUs.

`route.py` says which kernels a call runs, of which engine, in which order, and why. `run.py` runs them. `hopper.py` and
`triton.py` are the two implementations: the first prefers the engine `hopper_gpu` and hands other passes to
`triton_gpu`, the second runs `triton_gpu` alone. `kv_outer.py` computes selections of single queries with key blocks in
the outer loop.

Engines are imported at the first call: Triton takes a while to import, and need not be installed.
"""

from typing import Literal

Engine = Literal["hopper", "triton"]
# Engines in order of preference, by the name of the implementation. The last one supports every pass.
ENGINES: dict[str, tuple[Engine, ...]] = {"hopper": ("hopper", "triton"), "triton": ("triton",)}
