"""Row orders: the order in which a pass reads tokens, as arithmetic that kernels can do in their own loads.

A pass works in *row space*: row r of its queries is token ``q_order.token(r)``, row c of its keys is token
``kv_order.token(c)``::

    natural order                     0 1 2 3 4 5 6 7 8 9 10 11
    residue-major order, stride 4     0 4 8 | 1 5 9 | 2 6 10 | 3 7 11          a stride becomes block-diagonal
    tokens 3 of every 4               3 7 11                                   summary columns become contiguous
    tiles of 2 x 2 on a 3 x 4 grid    0 1 4 5 | 2 3 6 7 | 8 9 - - | 10 11 - -  neighbours on a grid stay neighbours

`Reordered` is a mask in row space. It is again a mask, so block lists, pictures and kernels need no second notion.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...masks.algebra import And, Blocks, Mask, Not, Or, Shifted, Transposed
from ...masks.grids import Grid, OnGrid
from ...masks.primitives import BlockDiagonal, Causal, Columns, Empty, Full, LogSparse, Strided, Window
from ...masks.states import (
    AND_TABLE,
    EMPTY,
    FULL,
    NOT_TABLE,
    OR_TABLE,
    PARTIAL,
    UNSURE,
    merge_states,
    product_state,
    split_range,
)


class Axis(NamedTuple):
    """One axis of a row order. It adds to the token of a row its coordinate on the axis, times ``stride``."""

    stride: int  # tokens between neighbouring coordinates
    length: int  # number of coordinates; 0 for the first axis, whose coordinate needs no remainder
    kept: int  # number of coordinates that have rows
    phase: int  # positions of the first tile that come before coordinate 0, and have no token
    checked: bool  # True if the last tiles have positions after ``kept`` coordinates, and no token there
    # The position, coordinate + phase, is the sum of ``row // rows % size * step`` over digits (rows, size, step),
    # without the remainder where size is 0.
    digits: tuple[tuple[int, int, int], ...]


class Box(NamedTuple):
    """A box of coordinates that holds the tokens of rows first .. last of a row order."""

    # First and last coordinate on each axis, of those that have rows.
    low: list[np.ndarray]
    high: list[np.ndarray]
    # First and last token of the box, of those that exist.
    first: np.ndarray
    last: np.ndarray
    covered: list[np.ndarray]  # for each axis, True if every coordinate from low to high is that of some row
    exact: np.ndarray  # True if every token of the box is that of some row
    exists: np.ndarray  # FULL if all rows have a token, PARTIAL if some have, EMPTY if none has

    @property
    def contiguous(self) -> np.ndarray:
        """True if the rows' tokens are ``first`` to ``last`` without a hole."""
        sizes = [high - low + 1 for low, high in zip(self.low, self.high, strict=True)]
        return self.exact & (self.last - self.first < math.prod(sizes))


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """A view of the token axis: reshaped to ``shape``, cut to the kept coordinates, and read tile by tile.

    Token ``offset + p`` has the row-major coordinates of p in ``shape``. The coordinates below ``kept`` are cut into
    tiles; tiles follow each other in row-major order, and so do the tokens of a tile. Where ``tile`` does not divide
    ``kept``, rows of the last tiles have no token. Natural order, ``RowOrder(length)``, is one axis and one tile.
    """

    length: int  # number of tokens of the sequence
    shape: tuple[int, ...] = ()  # lengths of the axes, the slowest first
    tile: tuple[int, ...] = ()  # coordinates of a tile on each axis
    kept: tuple[int, ...] = ()  # number of coordinates of each axis that have rows
    offset: int = 0  # the first token that has a row
    phase: tuple[int, ...] = ()  # number of coordinates by which the first tile begins before the axis

    def __post_init__(self):
        shape = self.shape or (self.length,)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "kept", self.kept or shape)
        object.__setattr__(self, "tile", self.tile or self.kept)
        object.__setattr__(self, "phase", self.phase or (0,) * len(shape))

    @classmethod
    def residue_major(cls, length: int, stride: int) -> "RowOrder":
        """Returns tokens sorted by ``token % stride``, then by position: tiles are columns of a grid."""
        tokens_per_residue = -(-length // stride)
        return cls(length, (tokens_per_residue, stride), (tokens_per_residue, 1))

    @classmethod
    def periodic(cls, length: int, period: int, start: int, stop: int) -> "RowOrder":
        """Returns the tokens with ``start <= token % period < stop`` alone, gathered."""
        # The last period is cut where the tokens end.
        periods = -(-max(length - start, 0) // period)
        return cls(length, (periods, period), (1, stop - start), (periods, stop - start), start)

    @classmethod
    def tiled(cls, length: int, grid: OnGrid, tile: tuple[int, ...], phase: tuple[int, ...]) -> "RowOrder":
        """Returns the tokens of a grid, tile by tile."""
        # The first axis is cut where the tokens end: a sequence may end within the grid.
        existing = -(-(length - grid.start) // math.prod(grid.shape[1:]))
        first = max(1, min(grid.shape[0], existing))
        tile = (min(tile[0], first + sum(phase[:1])), *tile[1:])
        return cls(length, (first, *grid.shape[1:]), tile, offset=grid.start, phase=phase)

    @property
    def rows(self) -> int:
        """Number of rows; row indices from there on are padding."""
        return math.prod(map(math.prod, self._tiles))

    @property
    def natural(self) -> bool:
        """True if every row is the token of the same index."""
        return self.shape == self.tile == self.kept == (self.length,) and self.offset == self.phase[0] == 0

    @property
    def covers_all_tokens(self) -> bool:
        """True if every token has a row."""
        return self.offset == 0 and self.kept == self.shape and math.prod(self.shape) >= self.length

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes by which ``token = offset + sum(coordinate * stride)`` follows from a row; () in natural order."""
        if self.natural:
            return ()
        outer = [tiles for tiles, _ in self._tiles]
        sizes, steps = [*outer, *self.tile], [*self.tile, *(1 for _ in self.tile)]
        slowest = next((i for i, size in enumerate(sizes) if size > 1), len(sizes) - 1)
        digits: list[list[tuple[int, int, int]]] = [[] for _ in self.shape]
        for i, (size, step) in enumerate(zip(sizes, steps, strict=True)):
            if size > 1 or i == slowest:
                rows = math.prod(max(1, n) for n in sizes[i + 1 :])
                digits[i % len(outer)].append((rows, 0 if i == slowest else size, step))
        axes = []
        for i, kept in enumerate(self.kept):
            stride = math.prod(self.shape[i + 1 :])
            # Beyond the first axis there are no tokens, if the sequence does not go on there.
            inside = i > 0 or kept < self.shape[0] or self.offset + kept * stride < self.length
            checked = outer[i] * self.tile[i] > kept + self.phase[i] and inside
            axes.append(Axis(stride, self.shape[i] if i else 0, kept, self.phase[i], checked, tuple(digits[i])))
        return tuple(axes)

    def shift(self, stride: int) -> int | None:
        """Returns ``token - row`` modulo a stride if it is the same for all rows, else None.

        Example:
          >>> RowOrder(12, (2, 8), (1, 4), (2, 4)).shift(4), RowOrder.residue_major(12, 4).shift(4)
          (0, None)
        """
        digits = ((axis.stride * step, rows) for axis in self.axes for rows, _, step in axis.digits)
        if any((tokens - rows) % stride for tokens, rows in digits):
            return None
        return (self.offset - sum(axis.phase * axis.stride for axis in self.axes)) % stride

    def token(self, row: Any) -> Any:
        """Returns the token of each row, a value >= length for rows without one, by operators on integer arrays."""
        if self.natural:
            return row
        token, is_padding = self.offset, row >= self.rows
        for axis in self.axes:
            position = sum((row // rows % size if size else row // rows) * step for rows, size, step in axis.digits)
            token = token + (position - axis.phase) * axis.stride
            if axis.checked:
                is_padding = is_padding | (position >= axis.phase + axis.kept)
            if axis.phase:
                is_padding = is_padding | (position < axis.phase)
        # Otherwise, padding rows would map to the first tokens, or to negative ones.
        is_padding = is_padding.astype(row.dtype) if hasattr(is_padding, "astype") else is_padding
        return token + is_padding * (self.length - token)

    def row(self, token: jax.Array) -> jax.Array:
        """Returns the row of each token, `rows` for tokens without one."""
        if self.natural:
            return token
        index = token - self.offset
        row, exists = jnp.zeros_like(index), index >= 0
        for axis in self.axes:
            coordinate = index // axis.stride % axis.length if axis.length else index // axis.stride
            exists &= coordinate < axis.kept
            position = coordinate + axis.phase
            for rows, size, step in axis.digits:
                row += (position // step % size if size else position // step) * rows
        return jnp.where(exists, row, self.rows)

    def box(self, first: np.ndarray, last: np.ndarray) -> Box:
        """Returns the box that holds the tokens of rows first .. last."""
        axes = [(axis.stride, axis.digits) for axis in self.axes] or [(1, ((1, 0, 1),))]
        low, high = ([np.zeros_like(first) for _ in axes] for _ in range(2))
        is_same, covered = np.ones_like(low[0], bool), [np.bool_(False) for _ in axes]
        exact = is_same
        digits = [(rows, size, step, i) for i, (_, axis_digits) in enumerate(axes) for rows, size, step in axis_digits]
        for rows, size, step, axis in sorted(digits, reverse=True):  # by rows: the slowest digit first
            ends = [x // rows % size if size else x // rows for x in (first, last)]
            low[axis] = low[axis] + np.where(is_same, ends[0], 0) * step
            high[axis] = high[axis] + np.where(is_same, ends[1], size - 1) * step
            differ = is_same & (ends[0] != ends[1])
            if step == 1:
                covered[axis] = covered[axis] | differ
            # Rows that begin and end with faster digits of which some are left out are no box.
            exact = exact & (~differ | ((first % rows == 0) & ((last + 1) % rows == 0)))
            is_same = is_same & ~differ
        covered = [exact | is_any | (a == b) for is_any, a, b in zip(covered, low, high, strict=True)]
        any_exist = all_exist = np.bool_(True)
        for i, (kept, phase) in enumerate(zip(self.kept, self.phase, strict=True)):
            low[i], high[i] = low[i] - phase, high[i] - phase
            any_exist, all_exist = (
                any_exist & (low[i] < kept) & (high[i] >= 0),
                all_exist & (high[i] < kept) & (low[i] >= 0),
            )
            low[i], high[i] = np.clip(low[i], 0, kept - 1), np.clip(high[i], 0, kept - 1)
        tokens = [self.offset + sum(c * stride for c, (stride, _) in zip(x, axes, strict=True)) for x in (low, high)]
        any_exist, all_exist = any_exist & (tokens[0] < self.length), all_exist & (tokens[1] < self.length)
        exists = np.where(
            all_exist, np.int8(FULL), np.where(any_exist, np.where(exact, PARTIAL, UNSURE), EMPTY).astype(np.int8)
        )
        begin, end = (np.minimum(x, self.length - 1) for x in tokens)
        return Box(low, high, begin, end, covered, exact, exists)

    def in_tiles(self, first: np.ndarray, last: np.ndarray) -> list[tuple[Any, Any, Any]]:
        """Returns (exists, first, last) of rows first .. last by tiles: the end of one, whole ones, a start of one."""
        if self.natural:
            return [(np.bool_(True), first, last)]
        return [tile_range for tile_range in split_range(first, last, math.prod(self.tile)) if tile_range[0].any()]

    def gather(self, x: jax.Array, padded: int, fill: float = 0.0) -> jax.Array:
        """Returns [B, padded, ...] in row order from [B, length, ...] in token order, ``fill`` in padding rows."""
        if not self.natural:
            batch, rest, rank = x.shape[0], x.shape[2:], len(self.shape)
            x = _resized(x[:, self.offset :], 1, math.prod(self.shape), fill=fill).reshape(batch, *self.shape, *rest)
            for i, (outer, tile) in enumerate(self._tiles):
                x = jax.lax.slice_in_dim(x, 0, self.kept[i], axis=i + 1)
                x = _resized(x, i + 1, outer * tile, self.phase[i], fill)
            x = x.reshape(batch, *itertools.chain(*self._tiles), *rest)
            x = jnp.moveaxis(x, range(1, 2 * rank, 2), range(1, rank + 1)).reshape(batch, self.rows, *rest)
        return _resized(x, 1, padded, fill=fill)

    def scatter(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """Returns [B, length, ...] in token order from [B, padded, ...] in row order, ``fill`` elsewhere."""
        if self.natural:
            return x[:, : self.length]
        batch, rest, rank = x.shape[0], x.shape[2:], len(self.shape)
        outer, tile = zip(*self._tiles, strict=True)
        x = jnp.moveaxis(
            x[:, : self.rows].reshape(batch, *outer, *tile, *rest), range(1, rank + 1), range(1, 2 * rank, 2)
        )
        x = x.reshape(batch, *(n * m for n, m in self._tiles), *rest)
        for i, (phase, kept, size) in enumerate(zip(self.phase, self.kept, self.shape, strict=True)):
            x = _resized(jax.lax.slice_in_dim(x, phase, phase + kept, axis=i + 1), i + 1, size, fill=fill)
        x = x.reshape(batch, math.prod(self.shape), *rest)
        return _resized(x[:, : max(self.length - self.offset, 0)], 1, self.length, self.offset, fill)

    @property
    def _tiles(self) -> list[tuple[int, int]]:
        """The number of tiles and the coordinates of a tile, for each axis."""
        axes = zip(self.kept, self.phase, self.tile, strict=True)
        return [(-(-(n + phase) // tile) if n else 0, tile) for n, phase, tile in axes]

    def __str__(self):
        if self.natural:
            return "natural order"
        if self.kept[1:] != self.shape[1:]:
            tokens = f"tokens {self.offset} to {self.offset + self.kept[-1] - 1}"
            return f"{tokens} only" if self.shape[-1] >= self.length else f"gathered {tokens} of every {self.shape[-1]}"
        if self.tile == (self.shape[0], 1):
            return f"residue-major order, stride {self.shape[1]}"
        tiles = f"tiles of {' x '.join(map(str, self.tile))}"
        return f"{tiles}, begun {' x '.join(map(str, self.phase))} before the grid" if any(self.phase) else tiles


def _resized(x: jax.Array, axis: int, size: int, before: int = 0, fill: float = 0.0) -> jax.Array:
    """Returns an array padded to a size along an axis, ``before`` entries in front, or cut at its end."""
    x = jax.lax.slice_in_dim(x, 0, min(size - before, x.shape[axis]), axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = before, size - before - x.shape[axis]
    return x if widths[axis] == (0, 0) else jnp.pad(x, widths, constant_values=fill)


@dataclasses.dataclass(frozen=True)
class Reordered(Mask):
    """``mask`` seen in row space: allowed iff both rows have a token and ``mask`` allows the pair of tokens."""

    mask: Mask
    q_order: RowOrder
    kv_order: RowOrder

    def __call__(self, q, k):
        q, k = self.q_order.token(q), self.kv_order.token(k)
        allowed = self.mask(_clipped(self.q_order, q), _clipped(self.kv_order, k))
        # One side after the other: for TPUs, both sides' bools together first would cost more.
        return allowed & (q < self.q_order.length) & (k < self.kv_order.length)

    def keeps_residues(self, stride: int) -> bool:
        """True if rows of query and key have one residue of a stride exactly when their tokens have."""
        shift = self.q_order.shift(stride)
        return shift is not None and shift == self.kv_order.shift(stride)

    def block_state(self, q0, q1, k0, k1):
        states = self._state_of_rows(q0, q1, k0, k1)
        unsure = states == UNSURE
        if (self.q_order.natural and self.kv_order.natural) or not unsure.any():
            return states
        # The end of one tile and the start of the next lie in no small box together, but each lies in one.
        q0, q1, k0, k1 = (np.broadcast_to(x, states.shape)[unsure] for x in (q0, q1, k0, k1))
        sides = self.q_order.in_tiles(q0, q1), self.kv_order.in_tiles(k0, k1)
        states = states.copy()
        states[unsure] = merge_states(
            (q_exists & k_exists, self._state_of_rows(*q, *kv))
            for (q_exists, *q), (k_exists, *kv) in itertools.product(*sides)
        )
        return states

    def _state_of_rows(self, q0, q1, k0, k1) -> np.ndarray:
        q, kv = self.q_order.box(q0, q1), self.kv_order.box(k0, k1)
        return AND_TABLE[AND_TABLE[q.exists, kv.exists], self._state_of_boxes(self.mask, q, kv)]

    def _state_of_boxes(self, mask: Mask, q: Box, kv: Box) -> np.ndarray:
        if isinstance(mask, And | Or):
            table = AND_TABLE if isinstance(mask, And) else OR_TABLE
            return table[self._state_of_boxes(mask.left, q, kv), self._state_of_boxes(mask.right, q, kv)]
        if isinstance(mask, Not):
            return NOT_TABLE[self._state_of_boxes(mask.mask, q, kv)]
        axes = self._axes(mask)
        if axes is None and isinstance(mask, OnGrid) and self._views_grid_of(mask):
            boxes = (list(zip(box.low, box.high, strict=True)) for box in (q, kv))
            states, exact = mask.box_state(*boxes), q.exact & kv.exact
        elif axes is None:
            states, exact = mask.block_state(q.first, q.last, kv.first, kv.last), q.contiguous & kv.contiguous
            if isinstance(mask, Strided) and (steps := self._stride_of_rows(mask)) is not None:
                # Tokens of one residue of another stride are whole steps of that apart.
                (q0, q1), (k0, k1) = ((box.low[-1], box.high[-1]) for box in (q, kv))
                is_one_column = (q0 == q1) & (k0 == k1) & (q0 == k0)
                step_states = steps.block_state(q.low[0], q.high[0], kv.low[0], kv.high[0])
                states, exact = (
                    np.where(is_one_column, step_states, states),
                    exact | (is_one_column & q.exact & kv.exact),
                )
        else:
            states_by_axis = [
                x.block_state(*ends) for x, *ends in zip(axes, q.low, q.high, kv.low, kv.high, strict=False)
            ]
            states, exact = product_state(states_by_axis), q.exact & kv.exact
            if states_by_axis:  # if one axis alone decides, rows need to cover only this one
                covered = [(x == FULL) | (a & b) for x, a, b in zip(states_by_axis, q.covered, kv.covered, strict=True)]
                exact = exact | (
                    functools.reduce(np.logical_and, covered) & (sum(x != FULL for x in states_by_axis) <= 1)
                )
        return np.where((states == PARTIAL) & ~exact, np.int8(UNSURE), states)  # the rows are a part of their box

    def _axes(self, mask: Mask) -> tuple[Mask, ...] | None:
        """Returns the masks of the axes if a mask is their product on the axes of both orders; () for all pairs."""
        q, kv = self.q_order, self.kv_order
        if isinstance(mask, Columns):  # whatever the queries
            same_columns = (mask.period, mask.start, mask.end) == (kv.shape[-1], kv.offset, kv.offset + kv.kept[-1])
            return () if same_columns else None
        if isinstance(mask, Grid) and self._views_grid_of(mask):
            return mask.axes
        if isinstance(mask, Strided) and q.shape[1:] == kv.shape[1:] == (mask.stride,):
            # Whole strides apart, tokens of one column have one residue.
            return None if (q.offset - kv.offset) % mask.stride else (Full(), Window(0))
        return None

    def _stride_of_rows(self, mask: Strided) -> Strided | None:
        """Returns the stride on the first axis of residue-major order of another stride, within a column; or None."""
        q, kv = self.q_order, self.kv_order
        if len(q.shape) != 2 or q.shape[1:] != kv.shape[1:] or (q.offset - kv.offset) % mask.stride:
            return None
        return Strided(mask.stride // math.gcd(mask.stride, q.shape[1]))

    def _views_grid_of(self, mask: OnGrid) -> bool:
        """True if both row orders are views of the grid of a mask."""
        of_grid, orders = (mask.start, mask.shape[1:]), (self.q_order, self.kv_order)
        return all((x.offset, x.shape[1:]) == of_grid and x.shape[0] <= mask.shape[0] for x in orders)


def _clipped(order: RowOrder, token: Any) -> Any:
    """Returns tokens cut to the last one, because the table of a mask may end at the lengths.

    JAX arrays stay: kernels look up no tables but JAX's, which answer for any index.
    """
    return token if isinstance(token, jax.Array) else np.minimum(token, order.length - 1)


# The row orders of queries and of keys.
RowOrderPair = tuple[RowOrder, RowOrder]


def describe_orders(orders: RowOrderPair) -> str:
    """Returns the row orders of queries and keys in words, once if they are the same."""
    q_order, kv_order = orders
    if q_order == kv_order or (q_order.natural and kv_order.natural):
        return str(q_order)
    sides = (("queries", q_order), ("keys", kv_order))
    return ", ".join(f"{side}: {order}" for side, order in sides if not order.natural)


def mask_period(mask: Mask) -> int | None:
    """Returns a number of tokens by which queries and keys can both move without a change of the mask, or None.

    Example:
      >>> import sparse_layers as sl
      >>> mask_period(sl.Causal() & (sl.Window(9) | sl.Columns(128, 96))), mask_period(sl.Prefix(4))
      (128, None)
    """
    if isinstance(mask, Full | Empty | Causal | Window | Strided | LogSparse):
        return 1
    if isinstance(mask, BlockDiagonal):
        return mask.size
    if isinstance(mask, Columns):
        return mask.period
    if isinstance(mask, And | Or):
        left, right = mask_period(mask.left), mask_period(mask.right)
        return None if left is None or right is None else math.lcm(left, right)
    if isinstance(mask, Not | Transposed | Shifted):
        return mask_period(mask.mask)
    if isinstance(mask, Blocks):
        inner, (q_block, kv_block) = mask_period(mask.mask), mask.sizes
        return None if inner is None or q_block != kv_block else inner * q_block
    return None
