"""Primitive masks: each one rule about two positions, and its closed form for rectangles of positions."""

import dataclasses
import itertools
from typing import Annotated, Any

import numpy as np

from ..arguments.checks import strict_kwargs
from .algebra import BEYOND, FARTHEST, Mask, set_integers
from .states import EMPTY, FULL, UNSURE, to_state

MAX_DRAWS = 1 << 15  # in a row of `Random`
Draws = Annotated[int, 0, MAX_DRAWS]


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Full(), 3))
      ■ ■ ■
      ■ ■ ■
      ■ ■ ■
    """

    def __call__(self, q, k):
        return (q == q) & (k == k)

    def block_state(self, q0, q1, k0, k1):
        return np.int8(FULL)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Empty(Mask):
    """No query sees any key: output 0 and log-sum-exp -inf in every row.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Empty(), 3))
      · · ·
      · · ·
      · · ·
    """

    def __call__(self, q, k):
        return (q != q) & (k != k)

    def block_state(self, q0, q1, k0, k1):
        return np.int8(EMPTY)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """``k <= q``: a query sees itself and all earlier keys.

    Both count from the start: with more keys S than queries T the diagonal begins at the top left. Where the queries
    are the last T of S positions it ends at the bottom right, ``k <= q + (S - T)``: that is ``Window(None, S - T)``.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Causal(), 5))
      ■ · · · ·
      ■ ■ · · ·
      ■ ■ ■ · ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■
      >>> T, S = 3, 5
      >>> print(sl.picture(sl.Causal(), T, S))
      ■ · · · ·
      ■ ■ · · ·
      ■ ■ ■ · ·
      >>> print(sl.picture(sl.Window(None, S - T), T, S))
      ■ ■ ■ · ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■
    """

    def __call__(self, q, k):
        return k <= q

    def block_state(self, q0, q1, k0, k1):
        return to_state(k0 <= q1, k1 <= q0)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Compressed(Mask):
    """``k * stride + size <= q + 1``: a query sees the compressed keys whose tokens all lie in its past.

    Key k stands for ``size`` tokens from token ``k * stride`` on. T queries have ``(T - size) // stride + 1`` such
    keys. The first ``size - 1`` queries see nothing.

    Args:
      size: tokens in a window.
      stride: tokens between the beginnings of two windows.

    Raises:
      ValueError: a number is not an integer from 1 to 2**30.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Compressed(size=4, stride=2), 8, 3))
      · · ·
      · · ·
      · · ·
      ■ · ·
      ■ · ·
      ■ ■ ·
      ■ ■ ·
      ■ ■ ■

    References:
      Yuan et al. 2025, "Native Sparse Attention" (arXiv 2502.11089), equation 7.
    """

    size: int
    stride: int

    def __post_init__(self):
        set_integers(self, "size", "stride", minimum=1, maximum=FARTHEST)  # q + stride is computed in int32

    def __call__(self, q, k):
        return k < self._seen(q)

    def block_state(self, q0, q1, k0, k1):
        return to_state(k0 < self._seen(q1), k1 < self._seen(q0))

    def _seen(self, q):
        """Returns the number of keys that a query sees, or a number below 0, by one division of a number >= 0."""
        strides = -(-self.size // self.stride)  # of a window, rounded up
        return (q + 1 + strides * self.stride - self.size) // self.stride - (strides - 1)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """``q - left <= k <= q + right``: a query sees ``left`` keys before it, itself and ``right`` keys after it.

    The convention is that of ``jax.nn.dot_product_attention(local_window_size=(left, right))``. A window of w keys, as
    Mistral and Gemma count them, is ``Window(w - 1)``.

    Args:
      left: number of keys before the query that it sees; None for all.
      right: number of keys after the query that it sees; None for all.

    Raises:
      ValueError: left or right is negative or not an integer.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Window(2, 1), 6))
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      ■ ■ ■ ■ · ·
      · ■ ■ ■ ■ ·
      · · ■ ■ ■ ■
      · · · ■ ■ ■
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self):
        set_integers(self, "left", "right", minimum=0, optional=True)

    def __call__(self, q, k):
        # One difference a position and one comparison a pair; positions are not negative, so nothing wraps around.
        after = (q == q) & (k == k) if self.left is None else q - self.left <= k
        return after if self.right is None else after & (k - self.right <= q)

    def block_state(self, q0, q1, k0, k1):
        lowest, highest = q0 - k1, q1 - k0  # q - k takes every value in between
        some, every = np.bool_(True), np.bool_(True)
        if self.left is not None:
            some, every = some & (lowest <= self.left), every & (highest <= self.left)
        if self.right is not None:
            some, every = some & (highest >= -self.right), every & (lowest >= -self.right)
        return to_state(some, every)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Strided(Mask):
    """``(q - k) % stride == 0``: a query sees every stride-th key on both sides (Child et al. 2019, A2 of 'strided').

    Args:
      stride: distance of the keys in tokens.

    Raises:
      ValueError: stride is not a positive integer.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Strided(3), 6))
      ■ · · ■ · ·
      · ■ · · ■ ·
      · · ■ · · ■
      ■ · · ■ · ·
      · ■ · · ■ ·
      · · ■ · · ■
    """

    stride: int

    def __post_init__(self):
        set_integers(self, "stride", minimum=1)

    def __call__(self, q, k):
        # One remainder a position and one comparison a pair, instead of a remainder a pair.
        return q % self.stride == k % self.stride

    def block_state(self, q0, q1, k0, k1):
        lowest, highest = q0 - k1, q1 - k0
        some = highest // self.stride > (lowest - 1) // self.stride
        return to_state(some, some & ((lowest == highest) | (self.stride == 1)))


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class BlockDiagonal(Mask):
    """``q // size == k // size``: a query sees the keys of its own group of ``size`` tokens.

    Args:
      size: tokens in a group.

    Raises:
      ValueError: size is not a positive integer.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.BlockDiagonal(2), 6))
      ■ ■ · · · ·
      ■ ■ · · · ·
      · · ■ ■ · ·
      · · ■ ■ · ·
      · · · · ■ ■
      · · · · ■ ■
    """

    size: int

    def __post_init__(self):
        set_integers(self, "size", minimum=1)

    def __call__(self, q, k):
        return q // self.size == k // self.size

    def block_state(self, q0, q1, k0, k1):
        a0, a1, b0, b1 = (x // self.size for x in (q0, q1, k0, k1))
        some = (a0 <= b1) & (b0 <= a1)
        return to_state(some, some & (a0 == a1) & (b0 == b1))


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Columns(Mask):
    """``start <= k % period < stop``: all queries see the summary keys of all periods (Child et al. 2019, 'fixed').

    Args:
      period: tokens in a period.
      start: first summary key within the period.
      stop: one past the last summary key; defaults to the period's end.

    Raises:
      ValueError: unless 0 <= start < stop <= period.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Columns(3, 2), 6))
      · · ■ · · ■
      · · ■ · · ■
      · · ■ · · ■
      · · ■ · · ■
      · · ■ · · ■
      · · ■ · · ■
    """

    period: int
    start: int
    stop: int | None = None

    def __post_init__(self):
        set_integers(self, "period", minimum=1, clip=False)
        if self.stop is None:
            object.__setattr__(self, "stop", self.period)
        set_integers(self, "start", "stop", minimum=0, clip=False)
        if not 0 <= self.start < self.end <= self.period:
            raise ValueError(
                "Columns: must hold 0 <= start < stop <= period, "
                f"got start={self.start!r}, stop={self.stop!r}, period={self.period!r}"
            )
        # A start beyond any length selects nothing, and still lies before the stop.
        for name, most in (("period", BEYOND), ("stop", BEYOND), ("start", BEYOND - 1)):
            object.__setattr__(self, name, min(getattr(self, name), most))

    @property
    def end(self) -> int:
        return self.period if self.stop is None else self.stop

    def __call__(self, q, k):
        offset = k % self.period
        return (offset >= self.start) & (offset < self.end) & (q == q)

    def block_state(self, q0, q1, k0, k1):
        def before(x):  # summary keys in [0, x)
            return x // self.period * (self.end - self.start) + np.clip(
                x % self.period - self.start, 0, self.end - self.start
            )

        count = before(k1 + 1) - before(k0)
        return to_state(count > 0, count == k1 - k0 + 1)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """``k < size``: all queries see the first ``size`` keys (prefix LM, attention-sink tokens, global columns).

    Args:
      size: number of keys, >= 0.

    Raises:
      ValueError: size is negative or not an integer.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Prefix(2), 4))
      ■ ■ · ·
      ■ ■ · ·
      ■ ■ · ·
      ■ ■ · ·
    """

    size: int

    def __post_init__(self):
        set_integers(self, "size", minimum=0)

    def __call__(self, q, k):
        return (k < self.size) & (q == q)

    def block_state(self, q0, q1, k0, k1):
        return to_state(k0 < self.size, k1 < self.size)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Global(Mask):
    """``k < size or q < size``: the first ``size`` tokens see all keys, and all queries see them (Longformer, BigBird).

    Args:
      size: number of global tokens, >= 0.

    Raises:
      ValueError: size is negative or not an integer.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Global(1), 4))
      ■ ■ ■ ■
      ■ · · ·
      ■ · · ·
      ■ · · ·
    """

    size: int

    def __post_init__(self):
        set_integers(self, "size", minimum=0)

    def __call__(self, q, k):
        return (k < self.size) | (q < self.size)

    def block_state(self, q0, q1, k0, k1):
        return to_state((k0 < self.size) | (q0 < self.size), (k1 < self.size) | (q1 < self.size))


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class LogSparse(Mask):
    """``q - k`` is 0 or a power of two: a query sees itself and about log2(T) earlier keys (Li et al. 2019).

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.LogSparse(), 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      · ■ ■ ■ · ·
      ■ · ■ ■ ■ ·
      · ■ · ■ ■ ■
    """

    def __call__(self, q, k):
        distance = q - k
        return (distance >= 0) & ((distance & (distance - 1)) == 0)

    def block_state(self, q0, q1, k0, k1):
        def up_to(x):  # allowed distances in [0, x]; frexp's exponent is the bit length, exact below 2**53
            return np.where(x < 0, 0, 1 + np.frexp(np.maximum(x, 0).astype(np.float64))[1])

        lowest, highest = q0 - k1, q1 - k0
        count = up_to(highest) - up_to(lowest - 1)
        return to_state(count > 0, count == highest - lowest + 1)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Random(Mask):
    """Each query draws ``count`` of the positions before it, by a counter-based hash (BigBird's random blocks).

    Row ``q`` splits ``[0, q)`` into ``count`` ranges of equal length and draws one position from each. So its draws are
    distinct and depend on ``(q, seed)`` only, not on a length. Rows with at most ``count`` earlier positions see them
    all. Lift it with `Blocks` for random blocks; ``mask | mask.T`` gives both directions.

    Args:
      count: draws a row, >= 1.
      seed: any integer; equal seeds make equal masks, on every backend.
      size: draw from ``[0, size)`` in every row, before and after the query, instead of from ``[0, q)``.

    Raises:
      ValueError: count or size is not a positive integer or too large (2**15, 2**31 - 2), or seed is not an
        integer.

    Example:
      >>> import sparse_layers as sl
      >>> sl.Random(3, seed=1).dense(64).sum(axis=1)[[0, 1, 2, 3, 4, 63]]
      array([0, 1, 2, 3, 3, 3])
    """

    count: int
    seed: int = 0
    size: int | None = None

    def __post_init__(self):
        set_integers(self, "count", minimum=1, maximum=MAX_DRAWS)
        set_integers(self, "size", minimum=1, optional=True, maximum=BEYOND - 1)
        set_integers(self, "seed", minimum=None)

    def draw(self, q: Any, i: int) -> Any:
        """Returns the i-th draw of row q: a position in the i-th of ``count`` ranges."""
        end = self._end(q)
        # end * i // count by numbers below 2**31: kernels count in int32.
        first, last = (end // self.count * j + end % self.count * j // self.count for j in (i, i + 1))
        width = last - first + (last == first).astype(q.dtype)  # an empty range repeats a neighbour's position
        return first + (_hash(q, self.seed * self.count + i) % width.astype(np.uint32)).astype(q.dtype)

    def _end(self, q: Any) -> Any:
        """Returns one past the last position that row q may draw."""
        return q if self.size is None else q * 0 + self.size

    def __call__(self, q, k):
        q = np.asarray(q) if isinstance(q, int) else q
        hit = (q < 0) & (k < 0)
        for i in range(self.count):
            hit = hit | (self.draw(q, i) == k)
        return hit & (k < self._end(q))

    def block_state(self, q0, q1, k0, k1):
        rows = int(np.max(q1 - q0, initial=0)) + 1
        if rows > 32 or not np.size(q0):  # draws of many rows take too long, and no rectangles have no first row
            return np.where(k0 < self._end(q1), np.int8(UNSURE), np.int8(EMPTY))
        # One table of draws for all rows, -1 where a row repeats a draw. Draws ascend, so in rows with fewer than
        # `count` positions a repeated draw follows its twin.
        lowest = int(np.min(q0, initial=np.iinfo(np.int64).max))
        q = np.arange(lowest, int(np.max(q1, initial=lowest)) + 1)
        drawn, end = [self.draw(q, i) for i in range(self.count)], self._end(q)
        draws = [np.where(draw < end, draw, -1) for draw in drawn]
        draws = draws[:1] + [np.where(a == b, -1, b) for a, b in itertools.pairwise(draws)]
        # Unsigned differences: positions before k0 wrap around to numbers above any width. int32 if all positions fit.
        fits = max(lowest + len(q), int(np.max(k1, initial=0))) < 1 << 31
        signed, unsigned = (np.int32, np.uint32) if fits else (np.int64, np.uint64)
        first, width = k0.astype(signed), (k1 - k0).astype(unsigned)
        count = np.zeros(np.broadcast(q0, k0).shape, np.int32)
        for row in range(rows):
            exists, table_row = q0 + row <= q1, np.minimum(q0 + row, q1) - lowest
            for table in draws:
                draw = np.where(exists, table[table_row], -1).astype(signed)
                count += (draw - first).view(unsigned) <= width
        return to_state(count > 0, count == (q1 - q0 + 1) * (k1 - k0 + 1))


def _hash(x: Any, salt: int) -> Any:
    """Mixes positions and a salt to 32 bits (finaliser with the constants of lowbias32), alike in numpy and JAX."""
    x = x.astype(np.uint32) ^ np.uint32((salt * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):  # numpy warns of wrap-around in scalars
        for multiplier, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
            x = (x ^ (x >> np.uint32(16))) * np.uint32(multiplier)
            x = x ^ (x >> np.uint32(shift))
    return x
