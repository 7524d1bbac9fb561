"""How many pairs a mask allows, at any length in bounded time."""

from typing import NamedTuple

import numpy as np

from .algebra import Mask
from .bounded_cache import bounded_cache
from .pictures import cell_size, cells
from .states import FULL, PARTIAL

_SIDE = 512  # cells on a side of the grid that is counted
_ELEMENTS = 1 << 22  # pairs looked at at a time
_POINTS = 1 << 24  # pairs that an estimate looks at


class Count(NamedTuple):
    """What `count` finds.

    Attributes:
      pairs: (query, key) pairs allowed.
      causal: whether none of those looked at lies in the future (key > query).
      looked_at: pairs that the number was estimated from; None if it is exact.
    """

    pairs: int
    causal: bool
    looked_at: int | None


@bounded_cache()
def count(mask: Mask, q_len: int, kv_len: int, most: int = 1 << 28) -> Count:
    """Counts what a mask allows: by closed form where that is enough, by its pairs elsewhere.

    Squares of tokens, at most 512 on a side of the whole, count as a whole if nothing or all of them is allowed. The
    others are looked at pair by pair, or, if these are more than ``most``, at 2**24 random pairs of them in all.

    Args:
      mask: any mask.
      q_len, kv_len: numbers of queries and keys.
      most: pairs that may be looked at, at least 2**18.

    Returns:
      A `Count`, cached by the arguments; with the default ``most``, exact up to 16384 tokens.

    Example:
      >>> import sparse_layers as sl
      >>> count(sl.Causal(), 100_000, 100_000)
      Count(pairs=5000050000, causal=True, looked_at=None)
    """
    states, cell = cells(mask, q_len, kv_len, _SIDE), cell_size(q_len, kv_len, _SIDE)
    rows, columns = (axis * cell for axis in np.nonzero(states == FULL))
    heights, widths = np.minimum(cell, q_len - rows), np.minimum(cell, kv_len - columns)
    pairs, future = int((heights * widths).sum()), bool((columns + widths - 1 > rows).any())

    rows, columns = (axis[:, None, None] * cell for axis in np.nonzero(states == PARTIAL))
    heights, widths = np.minimum(cell, q_len - rows), np.minimum(cell, kv_len - columns)
    exact = rows.size * cell * cell <= most
    each = cell * cell if exact else max(1, min(most, _POINTS) // rows.size)
    rng, estimate = np.random.default_rng(0), 0.0
    step = max(1, _ELEMENTS // each)
    for start in range(0, rows.size, step):
        q0, k0, high, wide = (x[start : start + step] for x in (rows, columns, heights, widths))
        if exact:
            q, k = np.arange(cell)[:, None], np.arange(cell)
            there = (q < high) & (k < wide)
            q, k = q0 + np.minimum(q, high - 1), k0 + np.minimum(k, wide - 1)  # a table of the user's ends there
        else:
            there = True
            q, k = (x + (rng.random((len(x), 1, each)) * n).astype(np.int64) for x, n in ((q0, high), (k0, wide)))
        allowed = mask(q, k) & there
        future = future or bool((allowed & (k > q)).any())
        found = np.broadcast_to(allowed, np.broadcast_shapes(q.shape, k.shape)).sum(axis=(1, 2))
        estimate += float((found if exact else found * (high * wide)[:, 0, 0] / each).sum())
    return Count(pairs + round(estimate), not future, None if exact else rows.size * each)
