"""Rectangles: a mask for some queries and keys, which counts them from their first ones."""

import dataclasses

import numpy as np

from ..arguments.checks import strict_kwargs
from .algebra import Mask, check_masks, set_integers
from .states import EMPTY, FULL, PARTIAL


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Rectangle(Mask):
    """``mask(q - q_start, k - kv_start)`` for some queries and keys, and False for all others.

    The queries are ``q_start <= q < q_start + q_len``, the keys ``kv_start <= k < kv_start + kv_len``. A union of
    rectangles combines halves of one sequence, or keys of two sources, by a mask for each pair of them.

    Args:
      mask: the mask of the rectangle; its positions count from the rectangle's first query and first key.
      q_start, kv_start: first query and first key, >= 0.
      q_len, kv_len: number of queries and of keys, >= 1; None for all that follow.

    Raises:
      ValueError: a number is not an integer, or is too small.
      TypeError: mask is not a mask.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Rectangle(sl.Causal(), kv_start=3, q_len=3), 5, 8))
      · · · ■ · · · ·
      · · · ■ ■ · · ·
      · · · ■ ■ ■ · ·
      · · · · · · · ·
      · · · · · · · ·
    """

    mask: Mask
    q_start: int = 0
    kv_start: int = 0
    q_len: int | None = None
    kv_len: int | None = None

    def __post_init__(self):
        check_masks(self, "mask")
        set_integers(self, "q_start", "kv_start", minimum=0)
        set_integers(self, "q_len", "kv_len", minimum=1, optional=True)

    def __call__(self, q, k):
        q, k = q - self.q_start, k - self.kv_start
        inside = (q >= 0) & (k >= 0)
        if self.q_len is not None:
            inside = inside & (q < self.q_len)
        if self.kv_len is not None:
            inside = inside & (k < self.kv_len)
        if not self.computable:  # tables have no entries outside, and are looked up in numpy alone
            q, k = (np.clip(x, 0, None if n is None else n - 1) for x, n in ((q, self.q_len), (k, self.kv_len)))
        return inside & self.mask(q, k)

    def block_state(self, q0, q1, k0, k1):
        q_first, q_last, q_cut = _clipped(q0 - self.q_start, q1 - self.q_start, self.q_len)
        k_first, k_last, k_cut = _clipped(k0 - self.kv_start, k1 - self.kv_start, self.kv_len)
        exists = (q_first <= q_last) & (k_first <= k_last)
        # Where nothing remains, one pair that is there stands in for it.
        states = self.mask.block_state(*(np.where(exists, x, 0) for x in (q_first, q_last, k_first, k_last)))
        states = np.where((q_cut | k_cut) & (states == FULL), np.int8(PARTIAL), states)
        return np.where(exists, states, np.int8(EMPTY))

    def _period(self) -> int:
        numbers = (self.q_start, self.kv_start, self.q_len or 0, self.kv_len or 0)
        return max(self.mask._period(), max(numbers) // 2)  # a picture has four periods: two of equal rectangles


def _clipped(first, last, length):
    """Returns the positions first .. last that lie in [0, length), and True where some of them do not."""
    low, high = np.maximum(first, 0), last if length is None else np.minimum(last, length - 1)
    return low, high, (low != first) | (high != last)
