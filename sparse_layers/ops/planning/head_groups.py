"""Head groups: the query heads that a backend computes together, and the passes that they take."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .plan import Pass


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """The query heads first, first + step, first + 2 * step, ..., up to the last of all N."""

    first: int  # the first of these heads
    step: int  # from one of them to the next
    # For each pass of the chain, the `Pass` values that these heads take in turn: head i of the group takes entry ``i %
    # len``. They differ in their masks only. () if the blocks of the pass are known at run time only.
    passes: tuple[tuple[Pass, ...], ...]

    def select(self, x: Any, axis: int = 2) -> Any:
        """The heads of the group, [.., heads, ..], from x [.., N, ..] with all query heads along ``axis``."""
        return x[(slice(None),) * axis + (slice(self.first, None, self.step),)]


def head_groups(chains: Sequence[Sequence[Pass | None]], *, merge: bool) -> tuple[HeadGroup, ...]:
    """Groups query heads by the chains that they take in turn: head h takes chain ``h % len(chains)``.

    With ``merge``, for backends that take several masks in one pass, chains that differ in their masks alone are one
    group of all heads. A pass is None if its blocks are known at run time only.

    Example:
      >>> import sparse_layers as sl
      >>> chains = sl.make_plan([sl.Causal(), sl.Full()], 64).chains
      >>> [(group.first, group.step, len(group.passes[0])) for group in head_groups(chains, merge=False)]
      [(0, 2, 1), (1, 2, 1)]
      >>> [(group.first, group.step, len(group.passes[0])) for group in head_groups(chains, merge=True)]
      [(0, 1, 2)]
    """
    layouts = {tuple(one and _layout(one) for one in x) for x in chains}
    members = [chains] if merge and len(layouts) == 1 else [(chain,) for chain in chains]
    return tuple(
        HeadGroup(
            first, len(members), tuple(tuple(filter(None, turns)) for turns in zip(*members_of_group, strict=True))
        )
        for first, members_of_group in enumerate(members)
    )


def _layout(block_pass: Pass) -> tuple[Any, ...]:
    """Returns what passes have in common that a backend computes as one."""
    orders, shapes = (block_pass.q_order, block_pass.kv_order), (block_pass.fwd_shape, block_pass.bwd_shape)
    return *orders, *shapes, block_pass.bias_entry
