"""The ring buffers of a cache, which keep keys in the order in which a part of a pattern reads them.

A `RingLayout` keeps the last tokens of each residue class in a ring buffer: one ring for a window, one a residue for a
stride. A `GatheredLayout` keeps a few tokens for good: summary columns, a prefix. Arrays of both have shape [B, heads,
pages, page size, size]; a page is a range of rows that a step reads at once.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels.quantized import Rows, quantize_like
from ..planning.row_orders import RowOrder


@dataclasses.dataclass(frozen=True)
class KeyLayout(abc.ABC):
    """Maps the tokens of one part of a mask to rows of an array of a `KVCache`; holds no data."""

    order: RowOrder
    rows_per_residue: int  # rows of each residue class, the length of its ring
    page_size: int  # rows of a page

    @property
    @abc.abstractmethod
    def num_residues(self) -> int:
        """Residue classes, each with rows of its own."""

    @property
    def num_pages(self) -> int:
        return self.num_residues * self.rows_per_residue // self.page_size

    @property
    def num_rows(self) -> int:
        return self.num_pages * self.page_size

    @abc.abstractmethod
    def slot(self, token: jax.Array) -> jax.Array:
        """Returns the row of each token; `num_rows` or more if it has none."""

    @abc.abstractmethod
    def token(self, slot: jax.Array, last: jax.Array) -> jax.Array:
        """Returns the token in each row after token ``last`` is written; negative or above ``last`` if it has none."""

    @abc.abstractmethod
    def row_ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the ranges (first row, row behind the last) in which each class keeps tokens start to end - 1."""

    def keeps_all(self, length: int) -> bool:
        """True if no token of ``length`` is ever overwritten or left out."""
        return False


class RingLayout(KeyLayout):
    """A ring buffer for each residue class: maps tokens to rows of the arrays that a `KVCache` has.

    Token t is element ``t // num_residues`` of class ``t % num_residues``. Its row in the ring of the class is its
    element number modulo ``rows_per_residue``. A ring is as long as the farthest key that a query sees, and longer by
    the tokens that a step adds behind the query.
    """

    @property
    def num_residues(self) -> int:
        return math.prod(self.order.shape[1:])

    def keeps_all(self, length: int) -> bool:
        return self.num_residues * self.rows_per_residue >= length

    def slot(self, token: jax.Array) -> jax.Array:
        index, residue = jnp.divmod(token, self.num_residues)
        return residue * self.rows_per_residue + index % self.rows_per_residue

    def token(self, slot: jax.Array, last: jax.Array) -> jax.Array:
        residue, row = jnp.divmod(slot, self.rows_per_residue)
        newest = (last - residue) // self.num_residues
        index = newest - (newest - row) % self.rows_per_residue
        return jnp.where(index < 0, -1, index * self.num_residues + residue)

    def row_ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        end_index = -(-end // self.num_residues)
        count = min(end_index - start // self.num_residues, self.rows_per_residue)
        first = (end_index - count) % self.rows_per_residue
        # Rows at the beginning of the ring, where the range wraps around.
        wrapped = max(0, first + count - self.rows_per_residue)
        ranges = [(first, first + count - wrapped), (0, wrapped)]
        return [(first, end_index) for first, end_index in ranges if first < end_index]


class GatheredLayout(KeyLayout):
    """A row for each gathered token, which is never overwritten."""

    @property
    def num_residues(self) -> int:
        return 1

    def slot(self, token: jax.Array) -> jax.Array:
        row = self.order.row(token)
        return jnp.where(row < self.order.rows, row, self.num_rows)

    def token(self, slot: jax.Array, last: jax.Array) -> jax.Array:
        return self.order.token(slot)

    def row_ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        tokens = self.order.token(np.arange(self.order.rows))
        first, end = np.searchsorted(tokens, (start, end)).tolist()
        return [(first, end)] if first < end else []


def fill(store: KeyLayout, array: Rows, new: jax.Array, start: int, last: jax.Array) -> Rows:
    """Returns a store's array with tokens [B, P, n, size] from ``start`` on, up to token ``last`` [B, 1].

    Only the rows that tokens may take are read and written, in place if the array has no other user.
    """
    new_rows = quantize_like(array, new)
    return jax.tree.map(lambda array, new: _fill(store, array, new, start, last), array, new_rows)


def _fill(store: KeyLayout, array: jax.Array, new: jax.Array, start: int, last: jax.Array) -> jax.Array:
    rows = split_residues(store, array)
    for first, stop in store.row_ranges(start, start + new.shape[1]):
        slot = jnp.arange(store.num_residues)[:, None] * store.rows_per_residue + jnp.arange(first, stop)[None]
        token = store.token(slot.reshape(1, -1), last)
        is_new = jnp.broadcast_to((token >= start) & (token <= last), (len(last), slot.size))[:, None, :, None]
        index = jnp.where(is_new, token[..., None, :, None] - start, 0)
        new_rows = jnp.take_along_axis(new.swapaxes(1, 2), index, axis=2)
        current_rows = rows[:, :, :, first:stop]
        # Padding may hold anything, NaN too, and a weight of 0 times NaN is NaN.
        new_rows = jnp.where(is_new, new_rows, current_rows.reshape(new_rows.shape)).reshape(current_rows.shape)
        rows = jax.lax.dynamic_update_slice_in_dim(rows, new_rows, first, axis=3)
    return rows.reshape(array.shape)


def write(store: KeyLayout, array: Rows, new: jax.Array, tokens: jax.Array) -> Rows:
    """Returns a store's array with the tokens of a step, [B, S, n, size] at positions [B, S]."""
    page, row = jnp.divmod(store.slot(tokens), store.page_size)
    write_sequence = jax.vmap(lambda x, new, page, row: x.at[:, page, row].set(new, mode="drop"))
    new_rows = quantize_like(array, new.swapaxes(1, 2))
    return jax.tree.map(lambda array, new: write_sequence(array, new, page, row), array, new_rows)


def gather_pages(array: Rows, heads: Sequence[int], pages: jax.Array | None) -> Rows:
    """Returns pages [B, n] (None for all) of some heads of a store's array: [B, len(heads), n * page size, size]."""
    return jax.tree.map(lambda array: _gather_pages(array, heads, pages), array)


def _gather_pages(array: jax.Array, heads: Sequence[int], pages: jax.Array | None) -> jax.Array:
    if pages is None:
        array = select_heads(array, heads)
    elif list(heads) == list(range(array.shape[1])):
        array = jax.vmap(lambda x, i: x.at[:, i].get(mode="promise_in_bounds"))(array, pages)
    else:
        index = np.array(heads)[:, None]
        array = jax.vmap(lambda x, i: x.at[index, i].get(mode="promise_in_bounds"))(array, pages)
    return join_pages(array)


def join_pages(array: Rows) -> Any:
    """Returns the rows of all pages, like the array: [B, heads, pages, page size, size] -> [B, heads, rows, size]."""
    return jax.tree.map(lambda array: array.reshape(*array.shape[:2], -1, array.shape[-1]), array)


def split_residues(store: KeyLayout, array: jax.Array) -> jax.Array:
    """Returns a store's array by residue classes: [B, heads, num_residues, rows_per_residue, size]."""
    return array.reshape(*array.shape[:2], store.num_residues, -1, array.shape[-1])


def select_heads(x: jax.Array, heads: Sequence[int], axis: int = 1) -> jax.Array:
    """Returns some heads of an axis; x itself if these are all: an axis that is indexed could not stay sharded."""
    return x if tuple(heads) == tuple(range(x.shape[axis])) else x[(slice(None),) * axis + (np.array(heads),)]


def concat_heads(outs: Sequence[jax.Array], heads: Sequence[Sequence[int]], axis: int) -> jax.Array:
    """Returns the outputs of groups of heads in the order of all heads."""
    order = np.argsort([head for group in heads for head in group]).tolist()
    return select_heads(outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=axis), order, axis)
