"""A decoding step in plain XLA, which gathers the keys that a query reads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels.distance_bias import DistanceBias
from ..kernels.numerics import accumulator_dtype
from ..kernels.quantized import Rows, data_and_scale
from .layout import CacheLayout, KVArrays, LogitOptions, MaskHeads
from .ring_cache import concat_heads, gather_pages, select_heads

# Keys, values, distances from the query and a mask, see `_attend`.
Read = tuple[Rows, Rows, jax.Array, jax.Array]


def attend(
    layout: CacheLayout,
    block: int | None,
    logit_options: LogitOptions,
    arrays: KVArrays,
    query: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None,
    ids: jax.Array | None,
    bias: DistanceBias | None = None,
) -> jax.Array:
    """Returns attention [B, S, N, Hv] of queries [B, S, N, H] at [B, S], over their rows or blocks ids [B, S, G, k]."""

    def attend_one(query: jax.Array, position: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """Returns attention of one query in each sequence."""
        if ids is None or block is None:
            reads = [(heads, _gather_rows(layout, arrays, heads, position)) for heads in layout.heads]
        else:
            reads = [_gather_selected(layout, arrays, position, ids, block)]
        outs = [_attend(heads, query, of_heads, *logit_options, sinks, bias) for heads, of_heads in reads]
        return concat_heads(outs, [heads.q_heads for heads, _ in reads], axis=1)

    args = (query, positions) if ids is None else (query, positions, ids)
    # Under vmap, rows that all queries of a sequence read are gathered once.
    out = jax.vmap(attend_one, 1, 1)(*args) if query.shape[1] > 1 else attend_one(*(x[:, 0] for x in args))[:, None]
    return out.astype(query.dtype)


def _gather_rows(layout: CacheLayout, arrays: KVArrays, heads: MaskHeads, position: jax.Array) -> list[Read]:
    """Returns what the heads of one mask read in each part; see `_attend`."""
    reads = []
    for cache_part in heads.cache_parts:
        index, stored_heads = layout.find(cache_part.store)
        pages, tokens, allowed = cache_part.visible_pages(position)
        kv_heads = [stored_heads.index(head) for head in heads.kv_heads]
        k, v = (gather_pages(side[index], kv_heads, pages) for side in arrays)
        reads.append((k, v, (tokens - position[:, None])[:, None], allowed[:, None, None]))
    return reads


def _gather_selected(
    layout: CacheLayout, arrays: KVArrays, position: jax.Array, ids: jax.Array, block: int
) -> tuple[MaskHeads, list[Read]]:
    """Returns all heads, and what they read in the selected blocks ids [B, G, k]; see `_attend`."""
    heads, start, tokens, seen = layout.selected_tokens(position, ids, block)
    index, kv_heads, width = layout.full_store_index(), layout.num_kv_heads, min(block, layout.length)

    def blocks(array: jax.Array) -> jax.Array:
        def one_block(x, first):
            return jax.lax.dynamic_slice_in_dim(x, first, width, axis=1)

        slices = jax.vmap(jax.vmap(jax.vmap(one_block, (None, 0))))(array, start.reshape(len(start), kv_heads, -1))
        return slices.reshape(*tokens.shape, array.shape[-1])

    keys, values = (jax.tree.map(blocks, side[index]) for side in arrays)
    # Rows outside of the selection may hold anything, NaN too, and a weight of 0 times NaN is NaN.
    values = jax.tree.map(lambda x: jnp.where(seen.any(2)[..., None], x, 0), values)
    return heads, [(keys, values, tokens - position[:, None, None], seen)]


def _attend(
    heads: MaskHeads,
    query: jax.Array,
    reads: list[Read],
    scale: float,
    cap: float | None,
    sinks: jax.Array | None,
    bias: DistanceBias | None,
) -> jax.Array:
    """Returns attention of the query heads of one mask, [B, len(heads.q_heads), Hv], at least in float32.

    Each of ``reads`` has keys [B, n, L, H], values [B, n, L, Hv], n = len(heads.kv_heads), distances of keys from the
    query [B, n or 1, L], and a mask [B, n or 1, query heads of each or 1, L]. Scales of rows multiply scores and
    weights, so that products have the rows of 8 bits.
    """
    dtype = accumulator_dtype(query.dtype)
    query = select_heads(query, heads.q_heads)
    query = query.reshape(len(query), len(heads.kv_heads), -1, query.shape[-1])
    scores, values = [], []
    for k, v, distances, allowed in reads:
        k, k_scale = data_and_scale(k)
        x = jnp.einsum("bngh,bnlh->bngl", query, k.astype(query.dtype), preferred_element_type=dtype) * scale
        x = x if k_scale is None else x * k_scale
        if bias is not None:
            x = x + bias.of_distances(np.reshape(heads.q_heads, query.shape[1:3]), distances, dtype)
        x = x if cap is None else cap * jnp.tanh(x / cap)
        scores.append(jnp.where(allowed, x, -jnp.inf))
        values.append(v)
    sink = jnp.full((*query.shape[:3], 1), -jnp.inf, dtype)
    if sinks is not None:
        grouped = sinks.astype(dtype)[jnp.array(heads.q_heads)].reshape(1, *query.shape[1:3], 1)
        sink = jnp.broadcast_to(grouped, sink.shape)
    m_i = functools.reduce(jnp.maximum, (x.max(-1, keepdims=True, initial=-jnp.inf) for x in scores), sink)
    m_i = jnp.where(m_i == -jnp.inf, 0, m_i)  # a query without keys has weights of 0, not NaN
    p = [jnp.exp(x - m_i) for x in scores]
    l_i = sum((x.sum(-1, keepdims=True) for x in p), jnp.exp(sink - m_i))
    acc = sum(_weighted_values(x, v, query.dtype, dtype) for x, v in zip(p, values, strict=True))
    out = acc / jnp.where(l_i == 0, 1, l_i)
    return out.reshape(len(out), len(heads.q_heads), -1)


def _weighted_values(p: jax.Array, values: Rows, compute_dtype: Any, dtype: Any) -> jax.Array:
    """Returns sums of values by weights p [B, n, query heads of each, L]."""
    v, v_scale = data_and_scale(values)
    p = p if v_scale is None else p * v_scale
    v, p = v.astype(compute_dtype), p.astype(compute_dtype)
    return jnp.einsum("bngl,bnlh->bngh", p, v, preferred_element_type=dtype)
