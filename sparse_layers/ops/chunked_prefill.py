"""Chunked prefill: the op on a chunk of prompts, with the keys that a cache holds of the tokens before.

Each part of a pattern keeps its keys in its own row order, see `decoding/cache_parts.py`. Together with those of the
chunk they are a view of the sequence, `RowOrder`, and so are the queries. Attention of the chunk is again a mask with a
plan. The parts are disjoint, and their results are merged by lse.
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
from .decoding.layout import MaskHeads
from .decoding.ring_cache import GatheredLayout, KeyLayout, concat_heads, join_pages, select_heads, split_residues
from .kernels.distance_bias import DistanceBias
from .kernels.numerics import merge_by_lse
from .kernels.quantized import Rows, dequantize
from .planning.row_orders import Reordered, RowOrder
from .planning.selection import Selection


def attend_chunk(
    before: KVCache,
    after: KVCache,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    start: int,
    *,
    selection: Selection | None = None,
    sinks: jax.Array | None = None,
    bias: DistanceBias | None = None,
    **options: Any,
) -> jax.Array:
    """Returns attention [B, C, N, Hv] of a chunk's queries over the cache's pattern; rows of padding are meaningless.

    Args:
      before, after: the cache without and with the chunk.
      query, key, value: [B, C, heads, size], of tokens ``start`` to start + C - 1.
      selection: the key blocks of each query, over all tokens up to the chunk's end; the cache must hold all keys in
        natural order.
      sinks, bias, **options: as of `block_sparse_attention`.
    """
    layout = after.layout
    groups = [(heads, [((x.mask,), x.store) for x in heads.cache_parts]) for heads in layout.heads]
    if selection is not None:
        all_of_cache = MaskHeads(tuple(range(after.num_heads)), tuple(range(after.num_kv_heads)), ())
        groups = [(all_of_cache, [(after.masks, layout.stores[layout.full_store_index()][0])])]
    outs = []
    for heads, mask_stores in groups:
        results = []
        for masks, store in mask_stores:
            index, kv_heads = layout.find(store)
            rows = [kv_heads.index(head) for head in heads.kv_heads]
            chunk_key, chunk_value = (select_heads(x, heads.kv_heads, axis=2) for x in (key, value))
            k_order, k = _visible_rows(store, before.keys[index], after.keys[index], rows, chunk_key, start)
            _, v = _visible_rows(store, before.values[index], after.values[index], rows, chunk_value, start)
            # From the first token of a whole cycle of residues, so that queries and keys of a residue have one column.
            first = start // store.num_residues * store.num_residues
            order = RowOrder.residue_major(start + query.shape[1] - first, store.num_residues)
            q = jnp.pad(select_heads(query, heads.q_heads, axis=2), [(0, 0), (start - first, 0), (0, 0), (0, 0)])
            q_order = dataclasses.replace(order, length=first + order.length, offset=first)
            out, lse = block_sparse_attention(
                order.gather(q, order.rows),
                k,
                v,
                [Reordered(mask, q_order, k_order) for mask in masks],
                selection=selection,
                sinks=None if results or sinks is None else sinks[np.array(heads.q_heads)],  # counted once
                bias=None if bias is None else bias.of_heads(heads.q_heads).in_row_orders(q_order, k_order),
                return_lse=True,
                **options,
            )
            results.append([order.scatter(x)[:, start - first :] for x in (out.astype(lse.dtype), lse)])
        outs.append(functools.reduce(merge_by_lse, results)[0])
    return concat_heads(outs, [heads.q_heads for heads, _ in groups], axis=2).astype(query.dtype)


def _visible_rows(
    store: KeyLayout, before: Any, after: Rows, heads: Sequence[int], chunk: jax.Array, start: int
) -> tuple[RowOrder, jax.Array]:
    """Returns the order of the keys that a chunk's queries may see in a store, and these keys (or values) [B, L, n, H].

    ``before`` and ``after`` are the store's array without and with the chunk [B, C, n, H]; n of its heads are read.
    """
    end, kept_order, num_residues = start + chunk.shape[1], store.order, store.num_residues
    if isinstance(store, GatheredLayout):  # which drops no token
        last = kept_order.offset + kept_order.kept[-1]
        order = RowOrder.periodic(max(end, kept_order.offset + 1), kept_order.shape[-1], kept_order.offset, last)
        return order, _residue_rows(store, after, heads, 0, order.rows, chunk.dtype)
    first = max(0, start // num_residues - store.rows_per_residue + 1) * num_residues
    order = RowOrder.residue_major(end - first, num_residues)
    if end <= num_residues * store.rows_per_residue:  # the rings have not wrapped around
        rows = _residue_rows(store, after, heads, first // num_residues, -(-end // num_residues), chunk.dtype)
    else:
        slots = store.slot(jnp.arange(first, start))
        cached = select_heads(join_pages(before).at[:, :, slots].get(mode="promise_in_bounds"), heads)
        rows = jnp.concatenate([cached.swapaxes(1, 2).astype(chunk.dtype), chunk], axis=1)
        rows = order.gather(rows, order.rows)
    return dataclasses.replace(order, length=end, offset=first), rows


def _residue_rows(store: KeyLayout, array: Rows, heads: Sequence[int], first: int, stop: int, dtype: Any) -> jax.Array:
    """Returns rows ``first`` to ``stop`` - 1 of each residue class, for some heads of a store: [B, L, n, H]."""

    def of_leaf(array: jax.Array) -> jax.Array:
        rows = select_heads(split_residues(store, array), heads)[:, :, :, first:stop]
        return rows.reshape(*rows.shape[:2], -1, rows.shape[-1]).swapaxes(1, 2)

    return dequantize(jax.tree.map(of_leaf, array), dtype)
