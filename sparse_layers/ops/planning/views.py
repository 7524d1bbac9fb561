"""Row orders: the order in which a pass walks over tokens, as arithmetic that kernels can do in their own loads.

A pass of a plan works in *row space*: row r of its queries is token ``q_order.token(r)``, row c of its keys is token
``kv_order.token(c)``. A stride becomes block-diagonal in residue-major order, summary columns become contiguous when
they are gathered; nothing else of a pattern has to be known to skip blocks. `Reordered` is the pattern seen in row
space, again a mask, so block lists, drawing and kernels need no second notion.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...masks.algebra import AND_TABLE, EMPTY, FULL, NOT_TABLE, OR_TABLE, PARTIAL, UNSURE, And, Mask, Not, Or
from ...masks.primitives import BlockDiagonal, Columns, Strided


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Tokens 0 .. length - 1 in their natural order; base of the other orders.

    Attributes:
      length: number of tokens of the sequence.
    """

    length: int

    @property
    def rows(self) -> int:
        """Number of rows; row indices from there on are padding."""
        return self.length

    @property
    def natural(self) -> bool:
        """Whether every row is the token of the same index."""
        return type(self) is RowOrder

    @property
    def complete(self) -> bool:
        """Whether every token has a row."""
        return True

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """(count, step, jump, start), for kernels: token = row % count * step + row // count * jump + start.

        It holds for rows below `rows`; count is 0 in natural order, where token = row.
        """
        return 0, 0, 0, 0

    def token(self, row: Any) -> Any:
        """The token of each row, by operators on integer arrays; a value >= length where there is none."""
        return row

    def hull(self, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The smallest known token interval (inclusive) that holds the tokens of rows first .. last."""
        return self.token(first), self.token(last)

    def gather(self, x: jax.Array, padded: int) -> jax.Array:
        """[B, length, ...] in token order -> [B, padded, ...] in row order, 0 in padding rows."""
        return _pad(x, padded)

    def scatter(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """[B, padded, ...] in row order -> [B, length, ...] in token order, ``fill`` in tokens without a row."""
        return x[:, : self.length]

    def known(self, mask: Mask, q_order: "RowOrder", rows: tuple[np.ndarray, ...]) -> np.ndarray | None:
        """Grades of a mask that hold by the making of these orders, though token hulls could not show it, or None."""
        return None

    def __str__(self):
        return "natural order"


@dataclasses.dataclass(frozen=True)
class ResidueMajor(RowOrder):
    """Tokens sorted by ``token % stride``, then by position: [length / stride, stride] transposed.

    Attributes:
      stride: number of residue classes.
    """

    stride: int

    @property
    def class_rows(self) -> int:
        """Rows of one residue class; the last row of a class has no token where stride does not divide length."""
        return -(-self.length // self.stride)

    @property
    def rows(self) -> int:
        return self.class_rows * self.stride

    @property
    def numbers(self):
        return self.class_rows, self.stride, 1, 0

    def token(self, row):
        n, beyond = self.class_rows, row >= self.rows
        beyond = beyond.astype(row.dtype) if hasattr(row, "astype") else beyond
        # Padding rows would start over at token `stride`: the last summand takes them out of the sequence.
        return row % n * self.stride + row // n + beyond * self.length

    def hull(self, first, last):
        n = self.class_rows
        c0, c1 = first // n, last // n
        low = np.where(c0 == c1, self.token(first), np.minimum(self.token(first), c0 + 1))
        high = np.where(c0 == c1, self.token(last), np.maximum(self.token(last), (n - 1) * self.stride + c1 - 1))
        return low, high

    def gather(self, x, padded):
        x = _pad(x, self.rows).reshape(x.shape[0], self.class_rows, self.stride, *x.shape[2:])
        return _pad(x.swapaxes(1, 2).reshape(x.shape[0], self.rows, *x.shape[3:]), padded)

    def scatter(self, x, fill=0.0):
        x = x[:, : self.rows].reshape(x.shape[0], self.stride, self.class_rows, *x.shape[2:])
        return x.swapaxes(1, 2).reshape(x.shape[0], self.rows, *x.shape[3:])[:, : self.length]

    def known(self, mask, q_order, rows):
        if not (isinstance(mask, Strided) and isinstance(q_order, ResidueMajor)):
            return None
        if not mask.stride == self.stride == q_order.stride:
            return None
        sizes = (q_order.class_rows,) * 2 + (self.class_rows,) * 2
        return BlockDiagonal(1).grade(*(row // size for row, size in zip(rows, sizes, strict=True)))

    def __str__(self):
        return f"residue-major order, stride {self.stride}"


@dataclasses.dataclass(frozen=True)
class Gathered(RowOrder):
    """Only the tokens with ``start <= token % period < stop``, contiguous.

    Attributes:
      period: length of the repeated stretch in tokens.
      start: first token taken of each period.
      stop: one past the last token taken.
    """

    period: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Tokens taken of each period."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        # The last period is taken only as far as some of its tokens exist.
        return -(-max(self.length - self.start, 0) // self.period) * self.width

    @property
    def complete(self):
        return False

    @property
    def numbers(self):
        return self.width, 1, self.period, self.start

    def token(self, row):
        return row // self.width * self.period + self.start + row % self.width

    def gather(self, x, padded):
        periods = self.rows // self.width
        x = _pad(x, max(periods * self.period, x.shape[1]))[:, : periods * self.period]
        x = x.reshape(x.shape[0], periods, self.period, *x.shape[2:])[:, :, self.start : self.stop]
        return _pad(x.reshape(x.shape[0], self.rows, *x.shape[3:]), padded)

    def scatter(self, x, fill=0.0):
        periods = self.rows // self.width
        x = x[:, : self.rows].reshape(x.shape[0], periods, self.width, *x.shape[2:])
        ends = (self.start, self.period - self.stop)
        x = jnp.pad(x, [(0, 0), (0, 0), ends] + [(0, 0)] * (x.ndim - 3), constant_values=fill)
        x = x.reshape(x.shape[0], periods * self.period, *x.shape[3:])[:, : self.length]
        return _pad(x, self.length, fill)

    def known(self, mask, q_order, rows):
        made_for = isinstance(mask, Columns) and (mask.period, mask.start, mask.end) == (
            self.period,
            self.start,
            self.stop,
        )
        return np.array(FULL, np.int8) if made_for else None

    def __str__(self):
        if self.period >= self.length:
            return f"tokens {self.start} to {self.stop - 1} only"
        return f"gathered tokens {self.start} to {self.stop - 1} of every {self.period}"


def _pad(x: jax.Array, rows: int, fill: float = 0.0) -> jax.Array:
    if x.shape[1] == rows:
        return x
    return jnp.pad(x, [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


@dataclasses.dataclass(frozen=True)
class Reordered(Mask):
    """``mask`` seen in row space: allowed iff both rows have a token and ``mask`` allows the pair of tokens.

    Attributes:
      mask: the mask on tokens.
      q_order: row order of the queries.
      kv_order: row order of the keys.
    """

    mask: Mask
    q_order: RowOrder
    kv_order: RowOrder

    @property
    def computable(self) -> bool:
        return self.mask.computable

    def __call__(self, q, k):
        q, k = self.q_order.token(q), self.kv_order.token(k)
        allowed = self.mask(_clipped(self.q_order, q), _clipped(self.kv_order, k))
        # One side after the other: for TPUs, both sides' bools together first would cost more.
        return allowed & (q < self.q_order.length) & (k < self.kv_order.length)

    def grade(self, q0, q1, k0, k1):
        rows = (q0, q1, k0, k1)
        hulls = tuple(
            _clipped(order, token)
            for order, ends in ((self.q_order, (q0, q1)), (self.kv_order, (k0, k1)))
            for token in order.hull(*ends)
        )
        exists = AND_TABLE[_exists(self.q_order, q0, q1), _exists(self.kv_order, k0, k1)]
        return AND_TABLE[exists, self._grade(self.mask, rows, hulls)]

    def _grade(self, mask: Mask, rows, hulls) -> np.ndarray:
        if isinstance(mask, And | Or):
            table = AND_TABLE if isinstance(mask, And) else OR_TABLE
            return table[self._grade(mask.left, rows, hulls), self._grade(mask.right, rows, hulls)]
        if isinstance(mask, Not):
            return NOT_TABLE[self._grade(mask.mask, rows, hulls)]
        known = self.kv_order.known(mask, self.q_order, rows)
        if known is not None:
            return known
        states = mask.grade(*hulls)
        if self.q_order.natural and self.kv_order.natural:
            return states
        return np.where(states == PARTIAL, np.int8(UNSURE), states)  # the rows are a part of their hull


def _clipped(order: RowOrder, token: Any) -> Any:
    """Tokens, the last one where there is none: a mask is never asked beyond the lengths, its tables may end there.

    Not in kernels, which look up no tables but JAX's, and these answer for any index.
    """
    return token if isinstance(token, jax.Array) else np.minimum(token, order.length - 1)


def _exists(order: RowOrder, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    low, high = order.hull(first, last)
    every = (last < order.rows) & (high < order.length)
    some = (first < order.rows) & (low < order.length)
    return np.where(every, np.int8(FULL), np.where(some, np.int8(PARTIAL if order.natural else UNSURE), np.int8(EMPTY)))
