"""Which query may attend to which key: small frozen values, closed under ``&``, ``|`` and ``~``.

A mask knows nothing of lengths, heads, blocks or devices. It answers two questions:

* ``mask(q, k)``: may the query at position ``q`` attend to the key at position ``k``? The arguments are integer arrays
  that broadcast against each other (numpy or JAX); the answer is a bool array of the broadcast shape. Every mask that
  is ``computable`` uses operators only, so the same expression runs inside a kernel.
* ``mask.bounds(q0, q1, k0, k1)``: is the inclusive rectangle of positions ``EMPTY``, ``PARTIAL`` or ``FULL``?
  Answered in closed form, so that a plan for a million tokens never looks at single elements.

Block lists, the dense oracle, pictures and tests all derive from these two.
"""

import dataclasses
import itertools
import operator
from typing import Any

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2
# Inside this package a grade has a fourth value: 'PARTIAL as far as the closed form can tell'. Whoever needs the exact
# answer evaluates just those rectangles (ops/blocks.py); `bounds` reports them as PARTIAL, which is always sound.
UNSURE = 3

AND_TABLE = np.array([[0, 0, 0, 0], [0, 3, 1, 3], [0, 1, 2, 3], [0, 3, 3, 3]], np.int8)
NOT_TABLE = np.array([2, 1, 0, 3], np.int8)
OR_TABLE = NOT_TABLE[AND_TABLE[np.ix_(NOT_TABLE, NOT_TABLE)]]


def graded(some: Any, every: Any) -> np.ndarray:
    """EMPTY, PARTIAL or FULL from 'some element is allowed' and 'every element is allowed'."""
    return np.add(some, every, dtype=np.int8)


def set_integers(mask: "Mask", least: int | None, *names: str, optional: bool = False) -> None:
    """Checks integer fields of a mask and makes them Python ints (numpy's would wrap around in arithmetic)."""
    for name in names:
        value: Any = getattr(mask, name)
        if optional and value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or (least is not None and value < least):
            rule = "an integer" if least is None else f"an integer >= {least}"
            raise ValueError(f"{type(mask).__name__}: {name} must be {rule}{' or None' * optional}, got {value!r}")
        object.__setattr__(mask, name, operator.index(value))


# eq=False: a subclass that is no dataclass of its own, with fields to compare, equals nothing but itself.
@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Base of all masks. A subclass defines ``__call__`` and, to make plans cheap, ``bounds`` (or ``grade``).

    Masks are frozen dataclasses: equal fields make equal, equally hashed masks, which share one plan and one trace. A
    subclass that is no dataclass of its own is equal to itself only.

    Raises:
      TypeError: when used as a truth value (``and``, ``or``, ``not``, ``if``): write ``&``, ``|``, ``~``.

    Example:
      >>> import sparse_layers as sl
      >>> mask = sl.Causal() & (sl.Window(1) | sl.Prefix(1))
      >>> print(sl.picture(mask, 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      ■ · ■ ■ · ·
      ■ · · ■ ■ ·
      ■ · · · ■ ■
      >>> bool(mask(5, 0)), bool(mask(5, 1))
      (True, False)
    """

    @property
    def computable(self) -> bool:
        """Whether ``mask(q, k)`` may be traced into a kernel (operators only, no table of its own)."""
        return True

    def __call__(self, q: Any, k: Any) -> Any:
        """Whether query position q may attend to key position k: signed integer arrays that broadcast -> bools."""
        raise TypeError(f"{type(self).__name__} is no concrete mask: it has no rule of its own")

    def grade(self, q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray) -> np.ndarray:
        """`bounds` with the fourth answer UNSURE; int8, of a shape that broadcasts to the arguments' shape."""
        if type(self).bounds is Mask.bounds:
            return np.full(np.broadcast(q0, q1, k0, k1).shape, UNSURE, np.int8)
        states = self.bounds(q0, q1, k0, k1)  # a subclass's own, whose PARTIAL may mean anything
        return np.where(states == PARTIAL, np.int8(UNSURE), states)

    def bounds(self, q0: Any, q1: Any, k0: Any, k1: Any) -> np.ndarray:
        """Grades inclusive rectangles of positions.

        Args:
          q0, q1: first and last query position of each rectangle, integer arrays (numpy).
          k0, k1: first and last key position; all four broadcast against each other.

        Returns:
          int8 array of the broadcast shape: 0 (``EMPTY``) only if no pair is allowed, 2 (``FULL``) only if every pair
          is, 1 (``PARTIAL``) otherwise. Primitives with a closed form are exact; a composition, `Random` and
          `MaskMod` may say 1 where 0 or 2 would be right.
        """
        corners = [np.asarray(x, np.int64) for x in (q0, q1, k0, k1)]
        states = self.grade(*corners)
        shape = np.broadcast_shapes(*(c.shape for c in corners))
        return np.broadcast_to(np.where(states == UNSURE, np.int8(PARTIAL), states), shape)

    def dense(self, q_len: int, kv_len: int | None = None) -> np.ndarray:
        """The mask as a bool array [q_len, kv_len] (kv_len defaults to q_len): for tests and small pictures only."""
        q, k = np.arange(q_len)[:, None], np.arange(q_len if kv_len is None else kv_len)[None, :]
        return np.broadcast_to(self(q, k), (q.size, k.size))

    @property
    def T(self) -> "Mask":
        """The transpose: ``mask.T(q, k) == mask(k, q)``."""
        return self.mask if isinstance(self, Transposed) else Transposed(self)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return self.mask if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with &, | and ~, not with 'and', 'or', 'not'")


# --- the algebra -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Both masks allow the pair: ``left & right``."""

    left: Mask
    right: Mask

    @property
    def computable(self) -> bool:
        return self.left.computable and self.right.computable

    def __call__(self, q, k):
        return self.left(q, k) & self.right(q, k)

    def grade(self, q0, q1, k0, k1):
        return AND_TABLE[self.left.grade(q0, q1, k0, k1), self.right.grade(q0, q1, k0, k1)]

    def __repr__(self):
        return f"{_operand(self.left, And)} & {_operand(self.right, And)}"


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """At least one of the masks allows the pair: ``left | right``."""

    left: Mask
    right: Mask

    @property
    def computable(self) -> bool:
        return self.left.computable and self.right.computable

    def __call__(self, q, k):
        return self.left(q, k) | self.right(q, k)

    def grade(self, q0, q1, k0, k1):
        return OR_TABLE[self.left.grade(q0, q1, k0, k1), self.right.grade(q0, q1, k0, k1)]

    def __repr__(self):
        return f"{_operand(self.left, Or)} | {_operand(self.right, Or)}"


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """The mask does not allow the pair: ``~mask``."""

    mask: Mask

    @property
    def computable(self) -> bool:
        return self.mask.computable

    def __call__(self, q, k):
        # `== False` and not `~`: on a Python bool `~` is arithmetic.
        return self.mask(q, k) == False  # noqa: E712

    def grade(self, q0, q1, k0, k1):
        return NOT_TABLE[self.mask.grade(q0, q1, k0, k1)]

    def __repr__(self):
        return f"~{_operand(self.mask, Not)}"


def _operand(mask: Mask, parent: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, And | Or) and not isinstance(mask, parent) else repr(mask)


@dataclasses.dataclass(frozen=True)
class Transposed(Mask):
    """Queries and keys change places: ``mask.T``. Turns global columns into global rows."""

    mask: Mask

    @property
    def computable(self) -> bool:
        return self.mask.computable

    def __call__(self, q, k):
        return self.mask(k, q)

    def grade(self, q0, q1, k0, k1):
        return self.mask.grade(k0, k1, q0, q1)

    def __repr__(self):
        return f"{_operand(self.mask, Not)}.T"


@dataclasses.dataclass(frozen=True)
class Blocks(Mask):
    """Lifts a mask to blocks: positions ``q // block`` and ``k // block`` are asked instead of ``q`` and ``k``.

    Args:
      mask: what one block of queries may see of one block of keys.
      block: block size in tokens.

    Raises:
      ValueError: block is not a positive integer.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Blocks(sl.Causal(), block=2), 6))
      ■ ■ · · · ·
      ■ ■ · · · ·
      ■ ■ ■ ■ · ·
      ■ ■ ■ ■ · ·
      ■ ■ ■ ■ ■ ■
      ■ ■ ■ ■ ■ ■
    """

    mask: Mask
    block: int

    def __post_init__(self):
        set_integers(self, 1, "block")

    @property
    def computable(self) -> bool:
        return self.mask.computable

    def __call__(self, q, k):
        return self.mask(q // self.block, k // self.block)

    def grade(self, q0, q1, k0, k1):
        return self.mask.grade(*(x // self.block for x in (q0, q1, k0, k1)))


# --- primitives ------------------------------------------------------------------------------------------------------


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

    def grade(self, q0, q1, k0, k1):
        return np.int8(FULL)


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

    def grade(self, q0, q1, k0, k1):
        return np.int8(EMPTY)


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """``k <= q``: a query sees itself and all earlier keys.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Causal(), 5))
      ■ · · · ·
      ■ ■ · · ·
      ■ ■ ■ · ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■
    """

    def __call__(self, q, k):
        return k <= q

    def grade(self, q0, q1, k0, k1):
        return graded(k0 <= q1, k1 <= q0)


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """``q - left <= k <= q + right``: inclusive reach to each side; the query itself always counts.

    The convention of ``jax.nn.dot_product_attention(local_window_size=(left, right))``. 'A window of w keys' in the
    sense of Mistral or Gemma is ``Window(w - 1)``.

    Args:
      left: how many keys before the query are seen; None for all.
      right: how many keys after the query are seen; None for all.

    Raises:
      ValueError: a reach is negative or no integer.

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
        set_integers(self, 0, "left", "right", optional=True)

    def __call__(self, q, k):
        # One difference a position and one comparison a pair; positions are not negative, so nothing wraps around.
        after = (q == q) & (k == k) if self.left is None else q - self.left <= k
        return after if self.right is None else after & (k - self.right <= q)

    def grade(self, q0, q1, k0, k1):
        lowest, highest = q0 - k1, q1 - k0  # q - k takes every value in between
        some, every = np.bool_(True), np.bool_(True)
        if self.left is not None:
            some, every = some & (lowest <= self.left), every & (highest <= self.left)
        if self.right is not None:
            some, every = some & (highest >= -self.right), every & (lowest >= -self.right)
        return graded(some, every)


@dataclasses.dataclass(frozen=True)
class Strided(Mask):
    """``(q - k) % stride == 0``: every stride-th key, in both directions (Child et al. 2019, A2 of 'strided').

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
        set_integers(self, 1, "stride")

    def __call__(self, q, k):
        # One remainder a position and one comparison a pair, instead of a remainder a pair.
        return q % self.stride == k % self.stride

    def grade(self, q0, q1, k0, k1):
        lowest, highest = q0 - k1, q1 - k0
        some = highest // self.stride > (lowest - 1) // self.stride
        return graded(some, some & ((lowest == highest) | (self.stride == 1)))


@dataclasses.dataclass(frozen=True)
class BlockDiagonal(Mask):
    """``q // size == k // size``: attention within groups of ``size`` neighbours.

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
        set_integers(self, 1, "size")

    def __call__(self, q, k):
        return q // self.size == k // self.size

    def grade(self, q0, q1, k0, k1):
        a0, a1, b0, b1 = (x // self.size for x in (q0, q1, k0, k1))
        some = (a0 <= b1) & (b0 <= a1)
        return graded(some, some & (a0 == a1) & (b0 == b1))


@dataclasses.dataclass(frozen=True)
class Columns(Mask):
    """``start <= k % period < stop``: the same summary keys of every period, seen by all (Child et al. 2019, 'fixed').

    Args:
      period: length of the repeated stretch in tokens.
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
        set_integers(self, 1, "period")
        if self.stop is None:
            object.__setattr__(self, "stop", self.period)
        set_integers(self, 0, "start", "stop")
        if not 0 <= self.start < self.end <= self.period:
            raise ValueError(
                "Columns: must hold 0 <= start < stop <= period, "
                f"got start={self.start!r}, stop={self.stop!r}, period={self.period!r}"
            )

    @property
    def end(self) -> int:
        return self.period if self.stop is None else self.stop

    def __call__(self, q, k):
        offset = k % self.period
        return (offset >= self.start) & (offset < self.end) & (q == q)

    def grade(self, q0, q1, k0, k1):
        def before(x):  # summary keys in [0, x)
            return x // self.period * (self.end - self.start) + np.clip(
                x % self.period - self.start, 0, self.end - self.start
            )

        count = before(k1 + 1) - before(k0)
        return graded(count > 0, count == k1 - k0 + 1)


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """``k < size``: all see the first ``size`` keys (prefix LM, attention-sink tokens, global columns).

    Args:
      size: number of keys, >= 0.

    Raises:
      ValueError: size is negative or no integer.

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
        set_integers(self, 0, "size")

    def __call__(self, q, k):
        return (k < self.size) & (q == q)

    def grade(self, q0, q1, k0, k1):
        return graded(k0 < self.size, k1 < self.size)


@dataclasses.dataclass(frozen=True)
class Global(Mask):
    """``k < size or q < size``: the first ``size`` tokens see all and are seen by all (Longformer, BigBird).

    Args:
      size: number of global tokens, >= 0.

    Raises:
      ValueError: size is negative or no integer.

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
        set_integers(self, 0, "size")

    def __call__(self, q, k):
        return (k < self.size) | (q < self.size)

    def grade(self, q0, q1, k0, k1):
        return graded((k0 < self.size) | (q0 < self.size), (k1 < self.size) | (q1 < self.size))


@dataclasses.dataclass(frozen=True)
class LogSparse(Mask):
    """``q - k`` is 0 or a power of two (Li et al. 2019): log2(T) + 1 keys a query, causal by itself.

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

    def grade(self, q0, q1, k0, k1):
        def up_to(x):  # allowed distances in [0, x]; frexp's exponent is the bit length, exact below 2**53
            return np.where(x < 0, 0, 1 + np.frexp(np.maximum(x, 0).astype(np.float64))[1])

        lowest, highest = q0 - k1, q1 - k0
        count = up_to(highest) - up_to(lowest - 1)
        return graded(count > 0, count == highest - lowest + 1)


@dataclasses.dataclass(frozen=True)
class Random(Mask):
    """Each query draws ``count`` of the positions before it, by a counter-based hash (BigBird's random blocks).

    Row ``q`` splits ``[0, q)`` into ``count`` stretches of equal length and draws one position from each, so its
    draws are distinct and depend on ``(q, seed)`` only: no length is needed, and no state. Rows with at most ``count``
    earlier positions see them all. Lift it with `Blocks` for random blocks; ``mask | mask.T`` gives both directions.

    Args:
      count: draws a row, >= 1.
      seed: any integer; equal seeds make equal masks, on every backend.
      size: draw from ``[0, size)`` in every row, before and after the query, instead of from ``[0, q)``.

    Raises:
      ValueError: count or size is not a positive integer, or seed no integer.

    Example:
      >>> import sparse_layers as sl
      >>> sl.Random(3, seed=1).dense(64).sum(axis=1)[[0, 1, 2, 3, 4, 63]]
      array([0, 1, 2, 3, 3, 3])
    """

    count: int
    seed: int = 0
    size: int | None = None

    def __post_init__(self):
        set_integers(self, 1, "count")
        set_integers(self, 1, "size", optional=True)
        set_integers(self, None, "seed")
        if self.count > 1 << 15:
            raise ValueError(f"Random: count must be at most {1 << 15}, got {self.count}")

    def draw(self, q: Any, i: int) -> Any:
        """The i-th draw of row q: one position of the i-th of ``count`` stretches of the row's range."""
        end = self._end(q)
        # end * i // count in parts that stay below 2**31: kernels count in int32.
        first, last = (end // self.count * j + end % self.count * j // self.count for j in (i, i + 1))
        width = (last - first) + (last == first)  # an empty stretch (end < count) repeats a neighbour's position
        return first + (_hash(q, self.seed * self.count + i) % width.astype(np.uint32)).astype(q.dtype)

    def _end(self, q: Any) -> Any:
        """One past the last position that row q may draw."""
        return q if self.size is None else q * 0 + self.size

    def __call__(self, q, k):
        q = np.asarray(q) if isinstance(q, int) else q
        hit = (q < 0) & (k < 0)
        for i in range(self.count):
            hit = hit | (self.draw(q, i) == k)
        return hit & (k < self._end(q))

    def grade(self, q0, q1, k0, k1):
        rows = int(np.max(q1 - q0, initial=0)) + 1
        if rows > 32 or not np.size(q0):  # a coarse rectangle is not worth the draws; nothing has no first row
            return np.where(k0 < self._end(q1), np.int8(UNSURE), np.int8(EMPTY))
        # One table of draws for all rows at hand, -1 where a row has no i-th position of its own: draws ascend, so a
        # repeated one (rows with fewer than `count` positions) follows its twin.
        lowest = int(np.min(q0, initial=np.iinfo(np.int64).max))
        q = np.arange(lowest, int(np.max(q1, initial=lowest)) + 1)
        drawn, end = [self.draw(q, i) for i in range(self.count)], self._end(q)
        draws = [np.where(draw < end, draw, -1) for draw in drawn]
        draws = draws[:1] + [np.where(a == b, -1, b) for a, b in itertools.pairwise(draws)]
        count = np.int64(0)
        for row in range(rows):
            exists = q0 + row <= q1
            for table in draws:
                draw = table[np.minimum(q0 + row, q1) - lowest]
                count = count + (exists & (draw >= k0) & (draw <= k1))
        return graded(count > 0, count == (q1 - q0 + 1) * (k1 - k0 + 1))


def _hash(x: Any, salt: int) -> Any:
    """A 32-bit mix of positions and a salt (finaliser with the constants of lowbias32); the same in numpy and JAX."""
    x = x.astype(np.uint32) ^ np.uint32((salt * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):  # numpy warns of wrap-around in scalars, though not in arrays
        for multiplier, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
            x = (x ^ (x >> np.uint32(16))) * np.uint32(multiplier)
            x = x ^ (x >> np.uint32(shift))
    return x
