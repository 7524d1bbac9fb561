"""The one place for what differs by platform: which implementations are tried, and what their block sizes cost."""

import dataclasses

import jax

# What `implementation=None` tries, in this order, before the fallback.
PREFERRED: dict[str, tuple[str, ...]] = {"tpu": ("pallas_tpu",)}
FALLBACK = ("xla",)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What the planner knows of an implementation when block sizes are left to it.

    Costs are in (query, key) pairs: the time that the implementation takes for as many pairs of a block.

    Attributes:
      blocks: block sizes to choose from, ascending.
      pairs_per_step: cost of one block whatever its size.
      max_steps: number of blocks that a pass may have; None for no limit. Where it is passed, blocks are doubled.
    """

    blocks: tuple[int, ...]
    pairs_per_step: int = 0
    max_steps: int | None = None


_UNTUNED = Tuning(blocks=(128,))
TUNING = {
    # By the compiler's cycle estimates for v5e and v6e (benchmarks/tpu.py), head size 128, a forward step costs about
    # 600 cycles and 300 pairs one cycle; larger heads shift both alike. A step takes 4 of the 2**20 bytes of scalar
    # memory.
    "pallas_tpu": Tuning(blocks=(256, 512, 1024), pairs_per_step=160_000, max_steps=240_000),
    "xla": _UNTUNED,
    "reference": _UNTUNED,
}


def first_choice() -> str:
    """The implementation that this platform tries first."""
    return (*PREFERRED.get(jax.default_backend(), ()), *FALLBACK)[0]
