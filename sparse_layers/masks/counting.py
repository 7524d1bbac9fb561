"""Counts the pairs that a mask allows, at any length in bounded time."""

from typing import NamedTuple

import numpy as np

from .algebra import Mask
from .bounded_cache import bounded_cache
from .pictures import cell_size, cells
from .states import FULL, PARTIAL

_SIDE = 512  # cells on a side of the counted grid
_ELEMENTS = 1 << 22  # pairs evaluated at a time
_POINTS = 1 << 24  # pairs that an estimate evaluates


class Count(NamedTuple):
    """The result of `count`."""

    pairs: int  # number of allowed (query, key) pairs
    causal: bool  # True if no evaluated pair with key > query is allowed
    looked_at: int | None  # number of random pairs that ``pairs`` was estimated from; None if it is exact


@bounded_cache()
def count(mask: Mask, q_len: int, kv_len: int, most: int = 1 << 28) -> Count:
    """Counts the pairs that a mask allows, exactly up to 16384 tokens with the default ``most``; cached.

    A grid of at most 512 x 512 cells covers all pairs. EMPTY and FULL cells count by their size. PARTIAL ones are
    evaluated pair by pair or, if they hold more than ``most`` pairs, at 2**24 random pairs in all.

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
    samples = cell * cell if exact else max(1, min(most, _POINTS) // rows.size)  # of a cell
    rng, estimate = np.random.default_rng(0), 0.0
    step = max(1, _ELEMENTS // samples)
    for start in range(0, rows.size, step):
        q0, k0, height, width = (x[start : start + step] for x in (rows, columns, heights, widths))
        if exact:
            q, k = np.arange(cell)[:, None], np.arange(cell)
            inside = (q < height) & (k < width)
            q, k = q0 + np.minimum(q, height - 1), k0 + np.minimum(k, width - 1)  # tables of users end with the lengths
        else:
            inside = True
            q, k = (x + (rng.random((len(x), 1, samples)) * n).astype(np.int64) for x, n in ((q0, height), (k0, width)))
        allowed = mask(q, k) & inside
        future = future or bool((allowed & (k > q)).any())
        counts = np.broadcast_to(allowed, np.broadcast_shapes(q.shape, k.shape)).sum(axis=(1, 2))
        estimate += float((counts if exact else counts * (height * width)[:, 0, 0] / samples).sum())
    return Count(pairs + round(estimate), not future, None if exact else rows.size * samples)
