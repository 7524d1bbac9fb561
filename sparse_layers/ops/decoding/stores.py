"""Where a cache keeps keys: arrays of rows in the order in which a part of a pattern reads them."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..planning.row_orders import RowOrder


@dataclasses.dataclass(frozen=True)
class Store:
    """Where a part keeps its keys: ``runs`` contiguous pieces of ``run`` rows.

    Attributes:
      order: of the rows. In natural and residue-major order each residue class is a ring of ``kept`` rows, the farthest
        token that a query sees and all since; of gathered tokens every one has a place.
      kept: rows of a class.
      run: rows of a piece.
    """

    order: RowOrder
    kept: int
    run: int

    @property
    def classes(self) -> int:
        return math.prod(self.order.shape[1:]) if self.order.complete else 1

    @property
    def runs(self) -> int:
        return self.classes * self.kept // self.run

    def slot(self, token: jax.Array) -> jax.Array:
        """The place of each token, `runs` * `run` for none."""
        if not self.order.complete:
            row = self.order.row(token)
            return jnp.where(row < self.order.rows, row, self.runs * self.run)
        index, residue = jnp.divmod(token, self.classes)
        return residue * self.kept + index % self.kept

    def token(self, slot: jax.Array, last: jax.Array) -> jax.Array:
        """The token at each place once token ``last`` was written; negative or beyond ``last`` for none."""
        if not self.order.complete:
            return self.order.token(slot)
        residue, place = jnp.divmod(slot, self.kept)
        newest = (last - residue) // self.classes
        index = newest - (newest - place) % self.kept
        return jnp.where(index < 0, -1, index * self.classes + residue)

    def spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """Where each class keeps tokens start to end - 1: the first row and the one behind the last, of each range."""
        if not self.order.complete:
            first, last = np.searchsorted(self.order.token(np.arange(self.order.rows)), (start, end)).tolist()
            found = [(first, last)]
        else:
            last = -(-end // self.classes)
            count = min(last - start // self.classes, self.kept)
            first = (last - count) % self.kept
            again = max(0, first + count - self.kept)  # rows after which a ring begins anew
            found = [(first, first + count - again), (0, again)]
        return [(first, last) for first, last in found if first < last]


def filled(store: Store, array: jax.Array, new: jax.Array, start: int, last: jax.Array) -> jax.Array:
    """A store's array [B, n, pieces, rows, size] with tokens [B, P, n, size] from ``start`` on, up to ``last`` [B, 1].

    Only the rows that tokens may take are read and written, in place where nobody else has the array.
    """
    rows = by_class(store, array)
    for first, stop in store.spans(start, start + new.shape[1]):
        slot = jnp.arange(store.classes)[:, None] * store.kept + jnp.arange(first, stop)[None]
        token = store.token(slot.reshape(1, -1), last)
        held = jnp.broadcast_to((token >= start) & (token <= last), (len(last), slot.size))[:, None, :, None]
        index = jnp.where(held, token[..., None, :, None] - start, 0)
        found = jnp.take_along_axis(new.swapaxes(1, 2), index, axis=2).astype(array.dtype)
        earlier = rows[:, :, :, first:stop]
        # Padding may hold anything, NaN too, and a weight of 0 times NaN is NaN.
        found = jnp.where(held, found, earlier.reshape(found.shape)).reshape(earlier.shape)
        rows = jax.lax.dynamic_update_slice_in_dim(rows, found, first, axis=3)
    return rows.reshape(array.shape)


def written(store: Store, array: jax.Array, new: jax.Array, tokens: jax.Array) -> jax.Array:
    """A store's array [B, n, pieces, rows, size] with the tokens of a step, [B, S, n, size] at positions [B, S]."""
    run, row = jnp.divmod(store.slot(tokens), store.run)
    put = jax.vmap(lambda x, new, run, row: x.at[:, run, row].set(new, mode="drop"))
    return put(array, new.swapaxes(1, 2).astype(array.dtype), run, row)


def taken(array: jax.Array, heads: Sequence[int], pieces: jax.Array | None) -> jax.Array:
    """Pieces [B, n] (None for all) of some heads of [B, heads, pieces, rows, size].

    Returns:
      [B, len(heads), n * rows, size].
    """
    if pieces is None:
        array = some_heads(array, heads)
    elif list(heads) == list(range(array.shape[1])):
        array = jax.vmap(lambda x, i: x.at[:, i].get(mode="promise_in_bounds"))(array, pieces)
    else:
        some = np.array(heads)[:, None]
        array = jax.vmap(lambda x, i: x.at[some, i].get(mode="promise_in_bounds"))(array, pieces)
    return rows_of(array)


def rows_of(array: jax.Array) -> jax.Array:
    """All rows of a store [B, heads, pieces, rows, size]: [B, heads, pieces * rows, size]."""
    return array.reshape(*array.shape[:2], -1, array.shape[-1])


def by_class(store: Store, array: jax.Array) -> jax.Array:
    """A store's array [B, heads, pieces, rows, size] by residue classes: [B, heads, classes, rows of each, size]."""
    return array.reshape(*array.shape[:2], store.classes, -1, array.shape[-1])


def some_heads(x: jax.Array, heads: Sequence[int], axis: int = 1) -> jax.Array:
    """Some heads of an axis; where these are all, x as it is: an axis that is indexed could not stay sharded."""
    return x if tuple(heads) == tuple(range(x.shape[axis])) else x[(slice(None),) * axis + (np.array(heads),)]


def all_heads(outs: Sequence[jax.Array], heads: Sequence[Sequence[int]], axis: int) -> jax.Array:
    """What was computed for some heads each, put together in the order of all heads."""
    order = np.argsort([head for some in heads for head in some]).tolist()
    return some_heads(outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=axis), order, axis)
