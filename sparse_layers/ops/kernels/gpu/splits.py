"""The work tiles of a launch: the order in which they begin, and the splits of those that would take too long.

A work tile is a head and a block of the outer side, with as many steps as its lists have tiles. Where a list is much
longer than others (global tokens, a popular block, a few queries over many keys) its work tile is split: a first launch
walks over the splits, each with a result of its own, and the launch of all work tiles then merges these in their order.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A program that walks less than 8 steps takes longer to start, and to be merged, than to walk.
MIN_STEPS = 8
# Each split has a result of its own.
MAX_SPLITS = 256


class Splits(NamedTuple):
    """Splits of the work tiles of a launch."""

    steps: Any  # int32 [splits, LB, 3], of each split its work tile, its first step, and the end of its steps
    # int32 [LB, work tiles, 2], of each work tile the first of its splits and their end; both are the same for one that
    # is not split.
    ranges: Any


def longest_first_order(steps: Any, few: int) -> Any:
    """Returns an order of work tiles, int32 [work tiles, LB], in which no long one starts last; None if all will do.

    Steps are integers [LB, heads, blocks]. Heads come one after the other, so that their keys stay in the cache. Within
    a head, long work tiles come first. If steps are static, very long work tiles come before all others. With at most
    ``few`` work tiles, the longest come first, whatever their head.
    """
    batches, heads, blocks = steps.shape
    if not isinstance(steps, np.ndarray):
        order = jnp.argsort(-steps, axis=-1) + blocks * np.arange(heads)[None, :, None]
        return order.reshape(batches, heads * blocks).T.astype(jnp.int32)
    if steps.max(initial=0) <= 1.5 * steps.mean():
        return None
    rank = steps.argsort(-1, kind="stable")[..., ::-1] + blocks * np.arange(heads)[:, None]
    order = rank.reshape(batches, heads * blocks)
    ordered = np.take_along_axis(steps.reshape(batches, heads * blocks), order, 1)
    is_long = ordered > (4 * steps.mean() if heads * blocks > few else -1)
    first = np.where(is_long, -ordered, 1).argsort(1, kind="stable")
    return np.take_along_axis(order, first, 1).T.astype(np.int32)


def count_splits(steps: np.ndarray, programs: int, slots: int) -> np.ndarray:
    """Returns the number of splits of each work tile, int [LB, work tiles]; 0 for one that is not split.

    A work tile has ``programs``, of which the device runs ``slots`` at a time. Steps are static.
    """
    limit = max(MIN_STEPS, steps.sum() * programs / slots)  # beyond, one takes longer than all together should
    long = np.where(steps > limit, steps, 0)
    # Short splits fill the device; to merge many takes long. The two balance at the root of the steps.
    length = np.maximum(max(MIN_STEPS, math.ceil(long.sum() * programs / slots)), np.ceil(np.sqrt(long)))
    return np.minimum(np.ceil(long / length), MAX_SPLITS).astype(np.int64)


def split_work_tiles(steps: Any, num_splits: Any, most: int | None = None) -> Splits | None:
    """Splits work tiles [LB, work tiles] into equal numbers of steps, the last one fewer; None if none is split.

    ``num_splits`` is 0 for a work tile that is not split. If steps are JAX arrays, ``most`` is a bound of its sum.
    """
    xp: Any = np if isinstance(steps, np.ndarray) else jnp
    ends = xp.cumsum(num_splits, axis=1)
    firsts = ends - num_splits
    if xp is np:
        most = int(ends[:, -1].max(initial=0))
    if not most:
        return None
    split = np.arange(most)
    # The work tile of each split: as many work tiles as have all of their splits before it.
    if xp is np:
        work_tile = np.stack([x.searchsorted(split, side="right") for x in ends])
    else:
        search = jax.vmap(lambda x: jnp.searchsorted(x, split, side="right", method="scan_unrolled"))
        work_tile = search(ends)
    exists, work_tile = work_tile < steps.shape[1], xp.minimum(work_tile, steps.shape[1] - 1)
    number, first, total = (xp.take_along_axis(x, work_tile, axis=1) for x in (num_splits, firsts, steps))
    length = -(-total // xp.maximum(number, 1))
    begin = xp.minimum((split[None] - first) * length, total)
    end = xp.minimum(begin + length, total)
    rows = xp.stack([xp.where(exists, x, 0) for x in (work_tile, begin, end)], axis=-1)
    return Splits(rows.swapaxes(0, 1).astype(np.int32), xp.stack([firsts, ends], axis=-1).astype(np.int32))
