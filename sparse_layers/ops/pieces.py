"""The op on a piece of prompts: queries of tokens in a row, with keys that a cache holds of the tokens before them.

Each part of a pattern keeps its keys in an order of its own, see `decoding/reads.py`. With those of the piece they are
a view of the sequence, `RowOrder`, and so are the queries: what is computed is again a mask with a plan. The parts are
disjoint, and their results are merged by lse.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .attention import block_sparse_attention
from .decoding.cache import KVCache
from .decoding.layout import Heads
from .decoding.stores import Store, all_heads, by_class, rows_of, some_heads
from .kernels.call import merged
from .planning.selection import Selection
from .planning.views import Reordered, RowOrder


def attend_piece(
    before: KVCache,
    after: KVCache,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    start: int,
    *,
    selection: Selection | None = None,
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Attention of the queries of a piece over the cache's pattern; what it gives for padding means nothing.

    Args:
      before, after: the cache, before and after the piece was filled in.
      query: [B, C, N, H], of tokens start to start + C - 1.
      key, value: [B, C, K, H] and [B, C, K, Hv], the piece's.
      start: tokens before the piece.
      selection: the key blocks that the queries look at, of all tokens so far; the cache must hold these in a row.
      sinks: [N] logits.
      **options: others of `block_sparse_attention`.

    Returns:
      [B, C, N, Hv] in the dtype of query.

    Raises:
      NotImplementedError: as `KVCache.attend`.
    """
    layout = after.layout
    groups = [(heads, [((part.mask,), part.store) for part in heads.parts]) for heads in layout.heads]
    if selection is not None:
        everyone = Heads(tuple(range(after.num_heads)), tuple(range(after.num_kv_heads)), ())
        groups = [(everyone, [(after.masks, layout.stores[layout.whole()][0])])]
    outs = []
    for heads, parts in groups:
        found = []
        for masks, store in parts:
            index, held = layout.find(store)
            place = [held.index(head) for head in heads.keys]
            own_key, own_value = (some_heads(x, heads.keys, axis=2) for x in (key, value))
            k_order, k = _read(store, before.keys[index], after.keys[index], place, own_key, start)
            _, v = _read(store, before.values[index], after.values[index], place, own_value, start)
            # From the first token of a whole turn of residues, so that queries and keys of one have a column each.
            first = start // store.classes * store.classes
            order = RowOrder.residue_major(start + query.shape[1] - first, store.classes)
            q = jnp.pad(some_heads(query, heads.queries, axis=2), [(0, 0), (start - first, 0), (0, 0), (0, 0)])
            q_order = dataclasses.replace(order, length=first + order.length, offset=first)
            out, lse = block_sparse_attention(
                order.gather(q, order.rows),
                k,
                v,
                [Reordered(mask, q_order, k_order) for mask in masks],
                selection=selection,
                sinks=None if found or sinks is None else sinks[np.array(heads.queries)],  # they count once
                return_lse=True,
                **options,
            )
            found.append([order.scatter(x)[:, start - first :] for x in (out.astype(lse.dtype), lse)])
        outs.append(functools.reduce(merged, found)[0])
    return all_heads(outs, [heads.queries for heads, _ in groups], axis=2).astype(query.dtype)


def _read(
    store: Store, before: jax.Array, after: jax.Array, heads: Sequence[int], own: jax.Array, start: int
) -> tuple[RowOrder, jax.Array]:
    """The keys of a store that a piece's queries may see, or values: their order, and these, [B, L, n, H].

    Args:
      store: where they are kept.
      before, after: the cache's array for it, without and with the piece.
      heads: n of the array's.
      own: [B, C, n, H], the piece's.
      start: tokens before the piece.
    """
    end, of, classes = start + own.shape[1], store.order, store.classes
    if not of.complete:  # none of these is ever left out
        order = RowOrder.gathered(max(end, of.offset + 1), of.shape[-1], of.offset, of.offset + of.kept[-1])
        return order, _rows(store, after, heads, 0, order.rows).astype(own.dtype)
    first = max(0, start // classes - store.kept + 1) * classes
    order = RowOrder.residue_major(end - first, classes)
    if end <= classes * store.kept:  # none is left out so far, and all lie where they were first written
        rows = _rows(store, after, heads, first // classes, -(-end // classes)).astype(own.dtype)
    else:
        earlier = some_heads(
            rows_of(before).at[:, :, store.slot(jnp.arange(first, start))].get(mode="promise_in_bounds"), heads
        )
        rows = order.gather(jnp.concatenate([earlier.swapaxes(1, 2).astype(own.dtype), own], axis=1), order.rows)
    return dataclasses.replace(order, length=end, offset=first), rows


def _rows(store: Store, array: jax.Array, heads: Sequence[int], first: int, stop: int) -> jax.Array:
    """Rows ``first`` to ``stop`` - 1 of each class, of some heads of a cache's array: [B, L, n, H]."""
    rows = some_heads(by_class(store, array), heads)[:, :, :, first:stop]
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1]).swapaxes(1, 2)
