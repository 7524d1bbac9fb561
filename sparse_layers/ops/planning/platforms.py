"""The one place for what differs by platform: which implementations are tried, and what their block sizes cost."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from ...arguments.checks import suggest

# What `implementation=None` tries, in this order, before the fallback.
PREFERRED: dict[str, tuple[str, ...]] = {"tpu": ("pallas_tpu",), "gpu": ("hopper", "cudnn", "triton")}
FALLBACK = ("xla",)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What the planner knows of an implementation when block sizes are left to it.

    Costs are in (query, key) pairs: the time that the implementation takes for as many pairs of a block.

    Attributes:
      blocks: block shapes (queries, keys) to choose from, ascending.
      factors: for each of the blocks, what its cost is multiplied by; () for 1.
      pairs_per_step: cost of one block whatever its size.
      partial: cost of a pair in a block that needs a mask.
      operations: how many operations on each pair a mask's rule may take to be computed in kernels; they read blocks of
        masks that take more, as tiles made beforehand. None: they compute what they can.
      operation: what each operation adds to ``partial`` where a rule that takes more has to be computed.
      list_bytes: what the block lists of a pass may take, at 4 bytes a block, 8 if its mask is given in tiles; None for
        no limit. Where it is passed, blocks grow, ...
      largest: ... but not beyond this size.
      stretch: up to so many keys blocks grow along keys alone, and along queries backward; then along both.
      backward: block shape of the backward pass; None for that of the forward pass.
      deterministic: the same of gradients that must not differ from run to run; None for ``backward``.
      capability: the compute capability that a GPU must have, as JAX says it; None for any device.
      itemsize: bytes of the elements that it computes with; None for any.
      head_sizes: those that it takes; None for all.
      jax: the first version of JAX that it runs with.
    """

    blocks: tuple[tuple[int, int], ...]
    factors: tuple[float, ...] = ()
    pairs_per_step: int = 0
    partial: float = 1.0
    operations: int | None = None
    operation: float = 0.0
    list_bytes: int | None = None
    largest: int | None = None
    stretch: int = 0
    backward: tuple[int, int] | None = None
    deterministic: tuple[int, int] | None = None
    capability: str | None = None
    itemsize: int | None = None
    head_sizes: range | None = None
    jax: tuple[int, ...] = ()


_UNTUNED = Tuning(blocks=((128, 128),))
# Measured on an H200 at head size 128: dense attention takes 1.17 times as long in blocks of 64 queries, and masks take
# 5 to 8 % where all blocks need them.
_TRITON = Tuning(blocks=((64, 64), (128, 64)), pairs_per_step=1700, partial=1.08, backward=(64, 64))
TUNING = {
    # By the compiler's cycle estimates for v5e and v6e (benchmarks/tpu.py), head size 128, a forward step costs about
    # 600 cycles, 300 pairs one cycle, masked 210; larger heads shift both alike. A tile of bits costs what a rule
    # of two or three operations does: causal's has 3, one to compare and two for the ends. Window 1024 takes 10 % fewer
    # forward cycles in tiles than by its 5, and bigbird at 8192 tokens 82 % fewer than by its 19. Lists are kept in
    # scalar memory, of which there are 2**20 bytes; larger blocks than 2048 do not fit vector memory.
    "pallas_tpu": Tuning(
        blocks=((256, 256), (512, 512), (1024, 1024)),
        pairs_per_step=160_000,
        partial=1.4,
        operations=3,
        operation=0.2,
        list_bytes=960_000,
        largest=2048,
    ),
    # Its kernels hold 128 rows, and walk over longer blocks in tiles. A pass with fewer than 2.55 times as many blocks
    # of 64 is left to plain Triton, which is as fast then: measured on an H200, neighbourhoods and windows on grids.
    "hopper": dataclasses.replace(
        _TRITON,
        blocks=((64, 64), (128, 128)),
        factors=(1.22, 1.0),
        stretch=8192,
        backward=None,
        deterministic=_TRITON.backward,
        capability="9.0",
        itemsize=2,
        head_sizes=range(8, 129, 8),
        jax=(0, 11, 1),
    ),
    "triton": _TRITON,
    "cudnn": _TRITON,  # it has no blocks; what it cannot serve goes to Triton
    "xla": _UNTUNED,
    "reference": _UNTUNED,
}


def checked_implementation(name: Any) -> None:
    """Refuses what is neither None nor the name of an implementation.

    Raises:
      ValueError: says which there are, and which of them is meant.
    """
    if name is not None and name not in tuple(TUNING):
        raise ValueError(f"implementation must be None or one of implementations(), got {suggest(name, TUNING)}")


_ASSUMED: contextvars.ContextVar[Any] = contextvars.ContextVar("assumed GPU", default=None)


@contextlib.contextmanager
def assuming(device: Any) -> Iterator[None]:
    """Makes `platform` and `gpu` answer as on a machine with this GPU; None changes nothing.

    Calls can be planned and traced for it. Nothing can be compiled or launched.
    """
    token = _ASSUMED.set(assumed() if device is None else device)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def assumed() -> Any:
    """Returns the GPU that `assuming` names, None outside of it."""
    return _ASSUMED.get()


def platform() -> str:
    """The platform that JAX computes on: "cpu", "gpu" or "tpu".

    "gpu" under `assuming`. Else that of the devices of the mesh in force; else that of `jax.default_device`, if it is
    set; else JAX's default.
    """
    if assumed() is not None:
        return "gpu"
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    device = device or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return generic(device if isinstance(device, str) else device.platform)


def generic(platform: str) -> str:
    """A platform's name here: "gpu" for those of any maker."""
    return "gpu" if platform in ("cuda", "rocm") else platform


def own_arrays() -> bool:
    """Whether arrays are a device's own, as kernels need them that nobody splits: inside `jax.shard_map` they are."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else mesh.size == 1 or {*mesh.axis_types} == {AxisType.Manual}


def candidates(platform: str) -> tuple[str, ...]:
    """What `implementation=None` tries on a platform, in this order."""
    return *PREFERRED.get(platform, ()), *FALLBACK


def gpu() -> Any:
    """Returns the GPU that `assuming` names, else the one at hand, None if JAX finds none."""
    if assumed() is not None:
        return assumed()
    try:
        return jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None


def first_choice(dtype: Any = None, head_size: int | None = None) -> str:
    """The first implementation that is tried on this device, of those that take a dtype and a head size, if given."""
    here, itemsize = platform(), dtype and np.dtype(dtype).itemsize
    capability = getattr(gpu(), "compute_capability", None) if here == "gpu" else None
    for name in candidates(here):
        tuned = TUNING[name]
        fits = tuned.capability in (None, capability) and (assumed() or tuned.jax <= jax.__version_info__)
        fits = fits and (not itemsize or tuned.itemsize in (None, itemsize))
        if fits and (not head_size or tuned.head_sizes is None or head_size in tuned.head_sizes):
            return name
    raise AssertionError("what is tried last takes everything")
