"""Context parallelism: the exchange that each part of a mask takes, and what it costs.

The parts of a mask are disjoint, and so are the chunks of an exchange. Their results are merged by lse where the
queries live.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...masks.algebra import Mask, Or
from ...masks.bounded_cache import bounded_cache
from ...masks.primitives import Empty
from ...masks.states import EMPTY
from .blocks import active_blocks, outside_trace
from .causality import is_causal
from .costs import PAIRS_PER_ROW
from .exchanges import AllGather, AllToAll, Exchange, Halo, Received
from .planner import decomposition_costs
from .platforms import TUNING
from .row_orders import Reordered, RowOrder, RowOrderPair, mask_period
from .terms import decompositions

# The cost of a row received from another device, and of one more in the backward pass, in PAIRS_PER_ROW. Between two
# H200, rows of 32 heads of 128 came at 170 GB/s, two of them in the time of 800 pairs of each head, both ways.
RECEIVED_ROW = 4
# An exchange took 60 to 100 microseconds there, however small: as long as at least 500 such rows. Zigzag order adds
# fourteen exchanges, forward and backward: two halves of q, out, dout, dq, and of lse and delta. Over two devices it
# adds seven; the estimate does not distinguish that.
ZIGZAG_ROWS = 7000


class MaskPart(NamedTuple):
    """A part of the masks, and its exchange."""

    exchange: Exchange  # how keys come to the queries of the part
    # For each of the masks that heads take in turn, the part of it that takes this exchange; `Empty` if none.
    masks: tuple[Mask, ...]


@bounded_cache()
def plan_exchanges(
    masks: tuple[Mask, ...], length: int, devices: int, implementation: str, groups: int = 1
) -> tuple[MaskPart, ...]:
    """Returns the disjoint parts of masks, each with its exchange, at the least cost.

    Example:
      >>> import sparse_layers as sl
      >>> for exchange, _ in plan_exchanges((sl.Causal() & sl.Strided(128),), 4096, 4, "xla"):
      ...     print(exchange)
      queries and keys, by residue of 128
    """
    of_masks = [_cheapest_exchanges(mask, length, length, devices, implementation, groups)[1] for mask in masks]
    merged = _merge_exchanges(exchange for by_exchange in of_masks for exchange in by_exchange)
    masks_by_exchange: dict[Exchange, list[Mask]] = {exchange: [Empty()] * len(masks) for exchange in merged.values()}
    for number, by_exchange in enumerate(of_masks):
        for exchange, mask in by_exchange.items():  # two exchanges of a mask may merge for the sake of another mask
            before = masks_by_exchange[merged[exchange]][number]
            masks_by_exchange[merged[exchange]][number] = mask if isinstance(before, Empty) else Or(before, mask)
    return tuple(MaskPart(exchange, tuple(of_heads)) for exchange, of_heads in masks_by_exchange.items())


@bounded_cache()
def padded_length(masks: tuple[Mask, ...], length: int, devices: int, implementation: str, groups: int = 1) -> int:
    """Returns the padded length at which devices share a stride's residues evenly, or zigzag order applies.

    Tokens behind the last one change nothing under causal masks that are the same rule at any length. For other masks
    the length is returned.

    Example:
      >>> import sparse_layers as sl
      >>> window, strided = (sl.Window(1023),), (sl.Causal() & sl.Strided(128),)
      >>> padded_length(strided, 5000, 4, "xla"), padded_length(window, 5000, 4, "xla")
      (5120, 5000)
    """
    if any(mask_period(mask) is None for mask in masks):
        return length
    wishes = {
        wish for mask in masks for _, mask_parts in decompositions(mask, length, length) for wish, _ in mask_parts
    }
    strides = {_stride_of(wish) for wish in wishes}
    strides = {*strides, math.lcm(*strides)} - {1}
    # Chunks are equally long; or devices, or chunks, have as many tokens of each residue of one stride, or of all.
    multiples = {2 * devices} | {times * devices * stride for stride in strides for times in (1, 2)}
    longer = sorted({length + -length % multiple for multiple in multiples} - {length})
    longer = [n for n in longer if n < 2 * length and all(is_causal(mask, n) for mask in masks)]

    def cost(n: int) -> float:
        moved = 2 * (n - length) * (1 + 1 / groups)  # rows of q, out, k and v that padding moves to other devices
        computed = sum(_cheapest_exchanges(mask, length, n, devices, implementation, groups)[0] for mask in masks)
        return computed + RECEIVED_ROW * PAIRS_PER_ROW * moved

    return min([length, *longer], key=cost) if longer else length


def gather_all_keys(masks: tuple[Mask, ...], length: int, devices: int) -> MaskPart:
    """Returns all of the masks as one part, for which every device gathers all keys."""
    return MaskPart(AllGather(length, devices, RowOrder(length)), masks)


def count_remote_keys(masks: Sequence[Mask], length: int, devices: int) -> list[int]:
    """Returns, for each device, the keys of other devices that its queries see.

    These are counted in blocks of keys: the largest power of two up to 16 that divides a device's tokens.
    """
    local_len = -(-length // devices)
    block = math.gcd(local_len, 16)
    seen = np.zeros((devices, -(-length // block)), bool)
    for mask in masks:
        grid = active_blocks(Reordered(mask, RowOrder(length), RowOrder(length)), *seen.shape, local_len, block)
        seen[grid.rows, grid.columns] = True
    is_remote = np.arange(seen.shape[1]) // (local_len // block) != np.arange(devices)[:, None]
    return [int(n) * block for n in (seen & is_remote).sum(1)]


def min_received(mask_part: MaskPart) -> Received:
    """Returns a lower bound of what the busiest receiver receives: the keys that its queries see, or an all-to-all.

    As many gradients return the same way.
    """
    exchange = mask_part.exchange
    if isinstance(exchange, AllToAll):
        return exchange.received(0)
    max_keys = max(exchange.received(rank).keys for rank in range(exchange.devices))
    # Remote keys are counted in blocks, which may be more than what the exchange receives.
    keys = min(max_keys, max(count_remote_keys(mask_part.masks, exchange.length, exchange.devices)))
    return Received(keys, gradients=keys)


# --- the cheapest exchanges ------------------------------------------------------------------------------------------


def _cheapest_exchanges(
    mask: Mask, length: int, padded: int, devices: int, implementation: str, groups: int
) -> tuple[float, dict[Exchange, Mask]]:
    """Returns the cost of one mask by `_cost`, and its parts by exchange; an estimate if it is padded."""
    options = []
    for number, mask_parts in enumerate(decomposition_costs(mask, length, TUNING[implementation], 2 * devices)):
        mask_parts = [(wish, mask_part, _stretch(costs, padded / length)) for wish, mask_part, costs in mask_parts]
        by_exchange = _assign_exchanges(mask_parts, padded, devices, groups)
        if by_exchange is not None:
            total = sum(_cost(exchange, costs, groups) for exchange, (_, costs) in by_exchange.items())
            options.append((total, number, {exchange: mask_part for exchange, (mask_part, _) in by_exchange.items()}))
    cost, _, cheapest = min(options, key=lambda option: option[:2])
    return cost, cheapest


def _stretch(costs: np.ndarray, factor: float) -> np.ndarray:
    """Returns the costs of chunks that are longer by a factor, if padding costs what the last tokens cost."""
    ends = np.arange(len(costs) + 1)
    total = np.interp(ends * factor, ends, np.concatenate([[0], costs.cumsum()]))
    return np.diff(total + np.maximum(ends * factor - len(costs), 0) * costs[-1])


def _assign_exchanges(
    mask_parts: Iterable[tuple[RowOrderPair, Mask, np.ndarray]], length: int, devices: int, groups: int
) -> dict[Exchange, tuple[Mask, np.ndarray]] | None:
    """Returns, for each exchange, its part and the costs of computing it; None if a part has no exchange."""
    by_wish: dict[RowOrderPair | None, tuple[Mask, np.ndarray]] = {}
    for wish, mask, costs in mask_parts:  # all that is computed in natural order takes one exchange
        _add_part(by_wish, wish if _stride_of(wish) > 1 or _gathers_keys(wish) else None, mask, costs)
    cheapest: dict[Exchange, tuple[Mask, np.ndarray]] = {}
    for wish, (mask, costs) in by_wish.items():
        options = _possible_exchanges(wish, mask, length, devices)
        if not options:
            return None
        _, _, exchange = min((_cost(exchange, costs, groups), i, exchange) for i, exchange in enumerate(options))
        _add_part(cheapest, exchange, mask, costs)
    merged, by_exchange = _merge_exchanges(cheapest), {}
    for exchange, (mask, costs) in cheapest.items():
        _add_part(by_exchange, merged[exchange], mask, costs)
    return by_exchange


def _add_part(mask_parts: dict[Any, tuple[Mask, np.ndarray]], key: Any, mask: Mask, costs: np.ndarray) -> None:
    """Adds a part and its costs to those of a key."""
    if key in mask_parts:
        mask_before, costs_before = mask_parts[key]
        mask, costs = Or(mask_before, mask), costs_before + costs
    mask_parts[key] = mask, costs


def _merge_exchanges(exchanges: Iterable[Exchange]) -> dict[Exchange, Exchange]:
    """Returns the merged exchange of each: halos become one, and the same gathered keys come once.

    The cost of that is not weighed: the parts have chosen their exchanges before.
    """
    merged: dict[Exchange, Exchange] = {exchange: exchange for exchange in exchanges}
    halos = [exchange for exchange in merged if isinstance(exchange, Halo)]
    halo_groups = [[x for x in halos if x.stride == stride] for stride in dict.fromkeys(x.stride for x in halos)]
    if halos and _merge_halos(halos).left <= sum(x.left for x in halos):  # else a common multiple of strides is too far
        halo_groups = [halos]
    for group in halo_groups:
        merged.update(dict.fromkeys(group, _merge_halos(group)))
    gathers = [exchange for exchange in merged if isinstance(exchange, AllGather)]
    for order in dict.fromkeys(x.order for x in gathers):
        group = [x for x in gathers if x.order == order]
        gather = dataclasses.replace(group[0], stride=math.lcm(*(x.stride for x in group)))
        zigzag = gather.can_zigzag and any(x.zigzag for x in group)
        merged.update(dict.fromkeys(group, dataclasses.replace(gather, zigzag=zigzag)))
    return merged


def _merge_halos(halos: Sequence[Halo]) -> Halo:
    """Returns the smallest halo that contains all of them."""
    stride = math.lcm(*(x.stride for x in halos))
    left = -(-max(x.left for x in halos) // stride) * stride
    return dataclasses.replace(halos[0], left=left, right=max(x.right for x in halos), stride=stride)


def _cost(exchange: Exchange, costs: np.ndarray, groups: int) -> float:
    """Returns the cost of a part, in pairs of a head: of the busiest device, and of the busiest receiver.

    ``costs`` are those of computing each of 2 P chunks of the queries.
    """
    first, second = costs[: exchange.devices], costs[: exchange.devices - 1 : -1]
    received = map(exchange.received, range(exchange.devices))
    rows = max(2 * x.keys / groups + x.queries + x.results for x in received)
    computed = costs.reshape(-1, 2).sum(1)
    if isinstance(exchange, AllGather) and exchange.zigzag:
        computed = first + second
        rows += ZIGZAG_ROWS
    elif isinstance(exchange, AllToAll):
        computed = costs.sum(keepdims=True) / exchange.devices
    return float(computed.max()) + RECEIVED_ROW * PAIRS_PER_ROW * rows


def _possible_exchanges(wish: RowOrderPair | None, mask: Mask, length: int, devices: int) -> list[Exchange]:
    """Returns the exchanges that a part may take; it is computed in the row orders of ``wish``, or in natural order."""
    exchanges: list[Exchange] = []
    if wish is not None and _gathers_keys(wish):
        exchanges.append(AllGather(length, devices, wish[1]))
    else:
        stride = 1 if wish is None else _stride_of(wish)
        divides = length % (stride * devices) == 0  # devices have as many tokens of each residue
        if divides and stride > 1 and stride % devices == 0:
            exchanges.append(AllToAll(length, devices, stride))
        halo = _find_halo(mask, length, devices, stride)
        max_keys = max(halo.received(rank).keys for rank in range(devices))
        # A halo that reaches nearly all devices would take a hop for each; then one all-gather is better.
        if halo.kv_rows <= 2 * halo.local_len or max_keys <= (devices - 2) * halo.local_len:
            exchanges.append(halo)
        if divides or stride == 1:
            exchanges.append(AllGather(length, devices, RowOrder(length), stride))
    gathers = [exchange for exchange in exchanges if isinstance(exchange, AllGather) and exchange.can_zigzag]
    return [*exchanges, *(dataclasses.replace(exchange, zigzag=True) for exchange in gathers)]


def _stride_of(wish: RowOrderPair) -> int:
    """Returns the stride if queries and keys are both in residue-major order; else 1."""
    q_order, kv_order = wish
    stride = q_order.shape[-1]
    return stride if q_order == kv_order == RowOrder.residue_major(q_order.length, stride) else 1


def _gathers_keys(wish: RowOrderPair) -> bool:
    """True if queries in natural order attend to a few gathered keys."""
    return wish[0].natural and not wish[1].natural


@outside_trace()
def _find_halo(mask: Mask, length: int, devices: int, stride: int) -> Halo:
    """Returns the halo that a part reaches; ``left`` is rounded up to a multiple of a stride."""
    local_len = -(-length // devices)
    first = np.arange(0, length, local_len)
    last = np.minimum(first + local_len, length) - 1

    def reach(is_empty: Callable[[np.ndarray], np.ndarray], max_keys: np.ndarray) -> int:
        """Returns the least reach that suffices for all devices, by bisection."""
        low, high = np.zeros_like(max_keys), max_keys
        while (low < high).any():
            middle = (low + high) // 2
            suffices = is_empty(middle) | (middle >= max_keys)
            low, high = np.where(suffices, low, middle + 1), np.where(suffices, middle, high)
        return int(high.max(initial=0))

    def empty_before(n: np.ndarray) -> np.ndarray:
        return mask.block_state(first, last, np.zeros_like(first), np.maximum(first - n - 1, 0)) == EMPTY

    def empty_behind(n: np.ndarray) -> np.ndarray:
        begin = np.minimum(last + n + 1, length - 1)
        return mask.block_state(first, last, begin, np.full_like(first, length - 1)) == EMPTY

    left = -(-reach(empty_before, first) // stride) * stride
    return Halo(length, devices, left, reach(empty_behind, length - 1 - last), stride)
