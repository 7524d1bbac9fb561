"""Platforms: the order in which implementations are tried on each, and the costs of their block shapes."""

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
# Head sizes up to this one are plain Triton's on Hopper GPUs. On an H200, patterns and causal attention of 4,096 tokens
# with heads of 32 take 11 to 22 % less forward than in the Hopper kernels, 4 to 12 % less forward and backward.
NARROW_HEAD_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The block shapes of an implementation and their costs, by which the planner chooses.

    A cost is a number of (query, key) pairs: the time that the implementation takes for as many pairs of a block.
    """

    block_shapes: tuple[tuple[int, int], ...]  # block shapes (queries, keys) to choose from, ascending
    cost_factors: tuple[float, ...] = ()  # one factor for the cost of each block shape; () for 1
    step_cost: int = 0  # cost of one block of any size
    partial_cost: float = 1.0  # cost of a pair in a PARTIAL block
    # Kernels compute a mask's rule if it takes at most this number of operations for each pair, and read mask tiles
    # otherwise. None: they compute every computable mask.
    max_operations: int | None = None
    # Added to ``partial_cost`` for each operation above ``max_operations`` if the rule is computed nonetheless.
    operation_cost: float = 0.0
    # Limit of the block lists of a pass, at 4 bytes a block, or 8 with mask tiles; None for no limit. Above it, blocks
    # grow.
    max_list_bytes: int | None = None
    max_block: int | None = None  # largest side of a block that grows
    # Blocks grow along the keys alone up to this length, and backward along the queries; then along both.
    max_stretched_keys: int = 0
    # Block shape of the backward pass; None for that of the forward pass.
    bwd_block_shape: tuple[int, int] | None = None
    # The same under ``BwdParams(deterministic=True)``; None for ``bwd_block_shape``.
    deterministic_bwd_block_shape: tuple[int, int] | None = None
    capability: str | None = None  # compute capability that a GPU must have, as JAX writes it; None for any device
    itemsize: int | None = None  # bytes of an element that it computes with; None for any
    head_sizes: range | None = None  # head sizes that it takes; None for all
    min_jax: tuple[int, ...] = ()  # the first version of JAX that it runs with


_UNTUNED = Tuning(block_shapes=((128, 128),))
# Measured on an H200 at head size 128: dense attention takes 1.17 times as long in blocks of 64 queries, and masks take
# 5 to 8 % where all blocks need them.
_TRITON = Tuning(block_shapes=((64, 64), (128, 64)), step_cost=1700, partial_cost=1.08, bwd_block_shape=(64, 64))
TUNING = {
    # By the compiler's cycle estimates for v5e and v6e (benchmarks/tpu.py), head size 128, a forward step costs about
    # 600 cycles, 300 pairs one cycle, masked 210; larger heads shift both alike. A tile of bits costs what a rule
    # of two or three operations does: causal's has 3, one to compare and two for the ends. Window 1024 takes 10 % fewer
    # forward cycles in tiles than by its 5, and bigbird at 8192 tokens 82 % fewer than by its 19. Lists are kept in
    # scalar memory, of which there are 2**20 bytes; larger blocks than 2048 do not fit vector memory.
    "pallas_tpu": Tuning(
        block_shapes=((256, 256), (512, 512), (1024, 1024)),
        step_cost=160_000,
        partial_cost=1.4,
        max_operations=3,
        operation_cost=0.2,
        max_list_bytes=960_000,
        max_block=2048,
    ),
    # Its kernels hold 128 rows, and walk over longer blocks in tiles. A pass with fewer than 2.55 times as many blocks
    # of 64 is left to plain Triton, which is as fast then: measured on an H200, neighbourhoods and windows on grids.
    "hopper": dataclasses.replace(
        _TRITON,
        block_shapes=((64, 64), (128, 128)),
        cost_factors=(1.22, 1.0),
        max_stretched_keys=8192,
        bwd_block_shape=None,
        deterministic_bwd_block_shape=_TRITON.bwd_block_shape,
        capability="9.0",
        itemsize=2,
        head_sizes=range(NARROW_HEAD_SIZE + 8, 257, 8),
        min_jax=(0, 11, 1),
    ),
    "triton": _TRITON,
    "cudnn": _TRITON,  # it has no blocks; what it does not support goes to Triton
    "xla": _UNTUNED,
    "reference": _UNTUNED,
}


def check_implementation(name: Any) -> None:
    """Raises an error if a name is neither None nor that of an implementation."""
    if name is not None and name not in tuple(TUNING):
        raise ValueError(f"implementation must be None or one of implementations(), got {suggest(name, TUNING)}")


_ASSUMED: contextvars.ContextVar[Any] = contextvars.ContextVar("assumed GPU", default=None)


@contextlib.contextmanager
def assume_gpu(device: Any) -> Iterator[None]:
    """Makes `platform` and `gpu` answer as on a machine with this GPU; None changes nothing.

    Calls can be planned and traced for it. Nothing can be compiled or launched.
    """
    token = _ASSUMED.set(assumed_gpu() if device is None else device)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def assumed_gpu() -> Any:
    """Returns the GPU that `assume_gpu` names, None outside of it."""
    return _ASSUMED.get()


def platform() -> str:
    """Returns the platform that JAX computes on: "cpu", "gpu" or "tpu".

    "gpu" under `assume_gpu`. Else that of the devices of the mesh in force; else that of `jax.default_device`, if it is
    set; else JAX's default.
    """
    if assumed_gpu() is not None:
        return "gpu"
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    device = device or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return platform_family(device if isinstance(device, str) else device.platform)


def platform_family(platform: str) -> str:
    """Returns "gpu" for the platforms of any maker of GPUs, else the platform's name."""
    return "gpu" if platform in ("cuda", "rocm") else platform


def has_local_arrays() -> bool:
    """True if arrays lie on one device, as kernels need them: on a single device, or inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else mesh.size == 1 or {*mesh.axis_types} == {AxisType.Manual}


def implementation_order(platform: str) -> tuple[str, ...]:
    """Returns the implementations that `implementation=None` tries on a platform, in this order."""
    return *PREFERRED.get(platform, ()), *FALLBACK


def gpu() -> Any:
    """Returns the GPU that `assume_gpu` names, else the one at hand, None if JAX finds none."""
    if assumed_gpu() is not None:
        return assumed_gpu()
    try:
        return jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None


def default_implementation(dtype: Any = None, head_size: int | None = None) -> str:
    """Returns the first implementation of this device's order that takes a dtype and a head size."""
    current, itemsize = platform(), dtype and np.dtype(dtype).itemsize
    capability = getattr(gpu(), "compute_capability", None) if current == "gpu" else None
    for name in implementation_order(current):
        tuning = TUNING[name]
        fits = tuning.capability in (None, capability) and (assumed_gpu() or tuning.min_jax <= jax.__version_info__)
        fits = fits and (not itemsize or tuning.itemsize in (None, itemsize))
        if fits and (not head_size or tuning.head_sizes is None or head_size in tuning.head_sizes):
            return name
    raise AssertionError("what is tried last takes everything")
