"""Biases by distance in TPU kernels: the table of a pass, its windows in the kernel, and the gradient of the table.

**Distances are diagonals.** Where a row further is always the same number of tokens further, all pairs on a diagonal of
a tile of logits [R, C] have one distance. A tile needs R + C - 1 entries of the table, one window of it.
**A window is skewed once.** Rows of the window are rotated by one lane more each: [128, W]. Each 128 rows of the tile
are a slice of that, which begins at a multiple of 128 lanes.
**Neighbouring tiles share windows.** Distances beyond the table take its first or last entry. So most windows are all
first or all last entries, and are the same: a window is skewed again only if it differs from that of the last step.
**The gradient goes the same way back.** ds is added up in [128, W] while the window stays. Then rows are rotated back,
and their sum is added to the gradient in VMEM. All sums have a fixed order.

The backward kernel's logits are [keys, queries], where distances fall along lanes: it reads the table in reverse.
Passes in other row orders run in natural order instead; see `bias_passes.py`. Slopes need tokens alone.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....masks.states import EMPTY
from ...planning.row_orders import RowOrderPair
from .kernel_masks import LANES

SUBLANES = 8  # of a vector register


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PassTable:
    """The table of a pass, by steps between rows: tile (i, j) reads a window, entry ``c - r + R - 1`` at (r, c)."""

    step: int  # tokens between neighbouring diagonals
    center: int  # index in the caller's table of pairs with equal rows
    rows: tuple[int, int]  # of queries and of keys
    shape: tuple[int, int]  # (R, C), of a tile of logits
    transposed: bool  # True if its rows are keys
    length: int  # L, entries of the caller's table

    @property
    def is_aligned(self) -> bool:
        """True if all windows begin at multiples of 128 entries."""
        return all(x % LANES == 0 for x in self.shape)

    @property
    def chunk(self) -> int:
        """Rows that are skewed together."""
        return LANES if self.shape[0] % LANES == 0 else self.shape[0]

    @property
    def window(self) -> int:
        """W, the entries of a window, whole lanes."""
        return _to_lanes(sum(self.shape) - 1 + (0 if self.is_aligned else LANES - 1))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of vector memory that the backward kernel needs for a query head, beside the table and its gradient."""
        return 2 * 4 * self.chunk * self.window

    @property
    def _kept(self) -> tuple[int, int, int]:
        """(first, last, index of distance 0) of entries every ``step`` tokens, of those that a pass may need."""
        zero = self.center // self.step + 1
        entries = -(-(self.length + 2 * self.step - self.center % self.step) // self.step)
        first, last = (min(max(zero + reach, 0), entries - 1) for reach in (1 - self.rows[0], self.rows[1] - 1))
        return first, last, zero - first

    @property
    def _padding(self) -> tuple[int, int]:
        """Copies of the first entry in front and of the last one behind, as many as a window holds."""
        entries, before = self._entries, sum(self.shape) - 2
        before += (self.shape[0] - 1 - self._zero - before) % LANES  # aligns windows
        return before, _to_lanes(before + entries - 1 + self.window) - before - entries

    @property
    def _entries(self) -> int:
        first, last, _ = self._kept
        return last - first + 1

    @property
    def _zero(self) -> int:
        """Index of distance 0, without padding; it may lie outside."""
        zero = self._kept[2]
        return self._entries - 1 - zero if self.transposed else zero

    @property
    def padded_length(self) -> int:
        """Entries with padding."""
        return self._entries + sum(self._padding)

    def start(self, row_block: Any, column_block: Any) -> Any:
        """Returns the first entry of the window of a tile; it is of equal entries if the true one lies outside."""
        (rows, columns), before = self.shape, self._padding[0]
        start = column_block * columns - row_block * rows + (before + self._zero - (rows - 1))
        start = jnp.clip(start, 0, self.padded_length - self.window)
        return pl.multiple_of(start, LANES) if self.is_aligned else start

    def build(self, table: jax.Array) -> jax.Array:
        """Returns [heads, 1, padded_length] from the caller's table [heads, L]; a linear function."""
        first, last, _ = self._kept
        table = jnp.pad(table, ((0, 0), (self.step, self.step)), mode="edge")[:, self.center % self.step :: self.step]
        table = table[:, first : last + 1]
        table = table[:, ::-1] if self.transposed else table
        return jnp.pad(table, ((0, 0), self._padding), mode="edge")[:, None]

    def gradient(self, table: jax.Array, dtable: jax.Array) -> jax.Array:
        """Returns the gradient [heads, L] of the caller's table from that [B, heads, 1, padded_length] of a pass."""
        _, transpose = jax.vjp(self.build, table)
        return transpose(dtable.sum(0))[0]


@dataclasses.dataclass(frozen=True)
class PassBias:
    """The static part of the bias of a pass."""

    orders: RowOrderPair  # of queries and of keys
    shape: tuple[int, int]  # of a tile of logits
    transposed: bool  # True if its rows are keys
    has_slopes: bool
    table: PassTable | None


def _to_lanes(n: int) -> int:
    return -(-n // LANES) * LANES


# --- inside kernels --------------------------------------------------------------------------------------------------


def bias_scratch(bias: PassBias | None, members: int, has_gradient: bool) -> dict[str, Any]:
    """Returns the memory of `TileBias` that lasts from step to step."""
    if bias is None or bias.table is None:
        return {}
    shape = members, bias.table.chunk, bias.table.window
    names = ("bias_tile", "bias_sums") if has_gradient else ("bias_tile",)
    return {name: pltpu.VMEM(shape, jnp.float32) for name in names} | {"bias_state": pltpu.SMEM((members,), jnp.int32)}


class TileBias:
    """The bias of a step's tile of logits, for one kernel; without a bias it does nothing.

    ``members`` are the query heads of a group. They take turns, and each keeps its window. ``bias_state`` has the first
    entry of each window, and -1 before there is one.
    """

    def __init__(self, bias: PassBias | None, refs: Any, position: Any, members: int = 1):
        self.bias, self.refs, self.position, self.members = bias, refs, position, members
        self.table = None if bias is None else bias.table

    def begin(self) -> None:
        """Skews the window of the step's tile, unless the last step had the same; every step calls it first."""
        table, refs = self.table, self.refs
        if table is None:
            return

        @pl.when(self.position.is_first_step)
        def _():
            for i in range(self.members):
                refs.bias_state[i] = jnp.int32(-1)
            if refs.dtable is not None:
                refs.dtable[...] = jnp.zeros_like(refs.dtable)

        start, member = table.start(*self._blocks), self._member

        @pl.when((refs.bias_state[member] != start) & (self.position.step.state != EMPTY))
        def _():
            self._flush(member)
            refs.bias_tile[member] = _skewed(refs.table[member, :, self._window(start)], table.chunk, self._rest(start))
            if refs.dtable is not None:
                refs.bias_sums[member] = jnp.zeros_like(refs.bias_sums[member])
            refs.bias_state[member] = start

    def add(self, x: jax.Array) -> jax.Array:
        """Returns a tile of logits with its bias."""
        if self.bias is None:
            return x
        if self.table is not None:
            tile, member = self.refs.bias_tile, self._member
            x = jnp.concatenate([x[rows] + tile[member, :, lanes] for rows, lanes in self._chunks()], axis=0)
        if self.bias.has_slopes:
            x = x - abs(self._tokens(1) - self._tokens(0)) * self.refs.slopes[:, :1]
        return x

    def add_gradient(self, ds: jax.Array) -> None:
        """Adds the gradients of a tile of logits to those of the table."""
        if self.table is not None:
            for rows, lanes in self._chunks():
                self.refs.bias_sums[self._member, :, lanes] += ds[rows]

    def end(self) -> None:
        """Completes the gradient of the table in the last step of a group of heads; every step calls it last."""
        if self.table is not None:
            flush_all = functools.partial(lax.fori_loop, 0, self.members, lambda member, _: self._flush(member), None)
            pl.when(self.position.is_last_step)(flush_all)

    @property
    def _blocks(self) -> tuple[Any, Any]:
        """The row block and the column block."""
        return self.position.step.outer, self.position.step.inner

    @property
    def _member(self) -> Any:
        return self.position.head % self.members if self.members > 1 else 0

    def _tokens(self, axis: int) -> jax.Array:
        """Returns the tokens of rows [R, 1] or of columns [1, C], in float32."""
        assert self.bias is not None
        shape = [1, 1]
        shape[axis] = size = self.bias.shape[axis]
        row = self._blocks[axis] * size + lax.broadcasted_iota(jnp.int32, shape, axis)
        return self.bias.orders[axis ^ self.bias.transposed].token(row).astype(jnp.float32)

    def _chunks(self) -> list[tuple[slice, slice]]:
        """Returns the rows of each chunk of a tile, and the lanes of the skewed window that are its entries."""
        assert self.table is not None
        (rows, columns), chunk = self.table.shape, self.table.chunk
        return [
            (slice(i, i + chunk), slice(rows - chunk - i, rows - chunk - i + columns)) for i in range(0, rows, chunk)
        ]

    def _window(self, start: Any) -> Any:
        assert self.table is not None
        return pl.ds(pl.multiple_of(start - self._rest(start), LANES), self.table.window)

    def _rest(self, start: Any) -> Any:
        """Returns the entries from the last multiple of 128 to the start of a window."""
        assert self.table is not None
        return 0 if self.table.is_aligned else start % LANES

    def _flush(self, member: Any) -> None:
        """Adds the sums of ds to the gradient of a member's table, unless there are none yet."""
        refs = self.refs
        if refs.dtable is None:
            return
        start = refs.bias_state[member]

        @pl.when(start >= 0)
        def _():
            sums = _diagonal_sums(refs.bias_sums[member], self._rest(start))
            refs.dtable[member, :, self._window(start)] += sums


def _skewed(window: jax.Array, rows: int, rest: Any) -> jax.Array:
    """Returns [rows, W] from [1, W], with entry ``rest + y - r + rows - 1`` at (r, y)."""
    width = window.shape[1]
    x = jnp.broadcast_to(window, (SUBLANES, width))
    x = pltpu.roll(x, width - (rows - 1) - rest, 1, stride=1, stride_axis=0)  # row r by r lanes more
    return jnp.concatenate([pltpu.roll(x, i, 1) if i else x for i in range(0, rows, SUBLANES)], axis=0)


def _diagonal_sums(x: jax.Array, rest: Any) -> jax.Array:
    """Returns [1, W], sums over the entries of [rows, W] that `_skewed` copies from the same entry: its transpose.

    Strides of a rotation cannot be negative, so the last eight rows are rotated one by one.
    """
    rows, width = x.shape
    by_sublane = x[:SUBLANES]
    for i in range(SUBLANES, rows, SUBLANES):
        by_sublane += pltpu.roll(x[i : i + SUBLANES], width - i, 1)
    sublane = lax.broadcasted_iota(jnp.int32, by_sublane.shape, 0)
    rotated = (jnp.where(sublane == i, pltpu.roll(by_sublane, rows - 1 - i + rest, 1), 0.0) for i in range(SUBLANES))
    return functools.reduce(jnp.add, rotated).sum(0, keepdims=True)
