"""The implementations "hopper" and "triton": block-sparse flash attention for NVIDIA GPUs.

`route.py` says which kernels a call runs, of which engine, in which order, and why. `run.py` runs them. `hopper.py` and
`triton.py` are the two implementations. They differ in the engines that they ask, in order of preference: the kernels
of `hopper_gpu` and those of `triton_gpu`, or the latter alone. `kv_outer.py` takes single queries to the blocks of keys
that they selected.

These files and those of the engines are imported at the first call, for Triton takes a while and need not be there.
"""

from typing import Literal

Engine = Literal["hopper", "triton"]
# Engines in order of preference, by the name of the implementation. The last one supports every pass.
ENGINES: dict[str, tuple[Engine, ...]] = {"hopper": ("hopper", "triton"), "triton": ("triton",)}
