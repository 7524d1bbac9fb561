"""A decoding step by one GPU kernel for each mask, which reads rows of the cache in place.

XLA computes lists of the rows to read, in one fusion; no keys are gathered. Where all heads have one mask, the kernel
writes the token, too.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ..kernels.decode_gpu import decode
from ..planning.platforms import has_local_arrays, implementation_order, platform
from .cache_parts import CachePart
from .layout import CacheLayout, KVArrays, LogitOptions, MaskHeads
from .ring_cache import RingLayout, concat_heads, join_pages, select_heads


def can_attend(layout: CacheLayout, arrays: KVArrays, query: jax.Array, has_selection: bool) -> bool:
    """True if `attend` supports queries [B, N, H] or [B, S, N, H], with or without selected blocks."""
    if (
        not has_local_arrays()
        or "triton" not in implementation_order(platform())
        or (has_selection and len(layout.masks) > 1)
    ):
        return False
    group, most = layout.num_heads // layout.num_kv_heads, max(len(heads.cache_parts) for heads in layout.heads)
    return decode.unsupported(query, *arrays, group, most) is None


def can_step(layout: CacheLayout, arrays: KVArrays, query: jax.Array) -> bool:
    """True if `step` supports queries [B, N, H] or [B, S, N, H], and as many tokens."""
    stores = [cache_part.store for cache_part in layout.heads[0].cache_parts]
    return (
        (query.ndim == 3 or query.shape[1:2] == (1,))
        and len(layout.heads) == 1
        and layout.heads[0].kv_heads == tuple(range(layout.num_kv_heads))
        and len({*stores}) == len(stores)
        and layout.masks[0].computable
        and can_attend(layout, arrays, query, False)
    )


def attend(
    layout: CacheLayout,
    block: int | None,
    logit_options: LogitOptions,
    arrays: KVArrays,
    query: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None,
    ids: jax.Array | None,
) -> jax.Array:
    """Returns attention [B, S, N, Hv] of queries [B, S, N, H] at [B, S], over their rows or blocks ids [B, S, G, k]."""
    position, (keys, values) = positions.reshape(-1), arrays
    if ids is None or block is None:
        reads = [
            (heads, [_read(layout, arrays, heads, cache_part, position) for cache_part in heads.cache_parts])
            for heads in layout.heads
        ]
    else:
        heads, _, tokens, seen = layout.selected_tokens(position, ids.reshape(len(position), *ids.shape[2:]), block)
        rows = jnp.where(seen[:, :, 0], tokens, -1)
        index, lists = layout.full_store_index(), len(heads.kv_heads)
        kv_heads = tuple(i // (lists // layout.num_kv_heads) for i in range(lists))
        reads = [(heads, [decode.CacheRead(join_pages(keys[index]), join_pages(values[index]), kv_heads, rows)])]
    options = decode.LogitScaling(*logit_options)
    outs = [
        decode.attend(_group_queries(query, heads), of_heads, position, options, _group_sinks(sinks, heads))
        for heads, of_heads in reads
    ]
    outs = [out.reshape(*query.shape[:2], -1, out.shape[-1]) for out in outs]
    return concat_heads(outs, [heads.q_heads for heads, _ in reads], axis=2)


def step(
    layout: CacheLayout,
    logit_options: LogitOptions,
    arrays: KVArrays,
    token: tuple[jax.Array, jax.Array, jax.Array],
    positions: jax.Array,
    sinks: jax.Array | None,
) -> tuple[jax.Array, KVArrays]:
    """Writes a token [B, 1, heads, size] of each sequence and attends from it; other arguments as of `attend`.

    Returns (out [B, 1, N, Hv], the arrays with the token).
    """
    (query, key, value), position, (heads,) = token, positions[:, 0], layout.heads
    reads, slots = [], [jnp.where(layout.masks[0](position, position), 0, -1)]
    for cache_part in heads.cache_parts:
        slot = cache_part.store.slot(position)
        slots.append(jnp.where(slot < cache_part.store.num_rows, slot, -1))
        reads.append(_read(layout, arrays, heads, cache_part, position, slot))
    new, slots = (key[:, 0], value[:, 0]), jnp.stack(slots, axis=1).astype(jnp.int32)
    options, grouped_sinks = decode.LogitScaling(*logit_options), _group_sinks(sinks, heads)
    out, *written = decode.step(_group_queries(query, heads), new, reads, slots, position, options, grouped_sinks)
    indices = [layout.find(cache_part.store)[0] for cache_part in heads.cache_parts]
    keys, values = (
        tuple(
            jax.tree.map(lambda x, array: x.reshape(array.shape), x, like[i])
            for i, x in sorted(zip(indices, side, strict=True), key=lambda pair: pair[0])
        )
        for side, like in zip(written, arrays, strict=True)
    )
    return out.reshape(*query.shape[:-1], -1), (keys, values)


def with_fallback(kernel: Callable[..., Any], fallback: Callable[..., Any], *args: Any) -> Any:
    """Returns kernel(*args); under `jax.vmap` and differentiation, which kernel calls lack, ``fallback(*args)``."""
    mapped = custom_vmap(kernel)

    @mapped.def_vmap
    def rule(_, batched, *args):
        results = jax.vmap(fallback, jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(batched)))(*args)
        return results, jax.tree.map(lambda _: True, results)

    differentiable = jax.custom_jvp(mapped)
    differentiable.defjvp(functools.partial(jax.jvp, fallback))
    return differentiable(*args)


def _read(
    layout: CacheLayout,
    arrays: KVArrays,
    heads: MaskHeads,
    cache_part: CachePart,
    position: jax.Array,
    slot: jax.Array | None = None,
) -> decode.CacheRead:
    """Returns the rows that queries at positions [B * S] read in a part, without the row ``slot`` [B]."""
    (index, stored_heads), store = layout.find(cache_part.store), cache_part.store
    pages, _, allowed = cache_part.visible_pages(position)
    row = jnp.arange(store.page_size, dtype=jnp.int32)[None]
    row = row if pages is None else (pages[..., None] * store.page_size + row[None]).reshape(len(position), -1)
    if slot is not None:
        allowed = allowed & (row != slot[:, None])
    rows = jnp.where(allowed, row, -1).astype(jnp.int32)[:, None]
    num_residues = store.num_residues if cache_part.page_table is None and isinstance(store, RingLayout) else 0
    kv_heads = tuple(stored_heads.index(head) for head in heads.kv_heads)
    keys, values = (join_pages(side[index]) for side in arrays)
    return decode.CacheRead(keys, values, kv_heads, rows, num_residues)


def _group_queries(query: jax.Array, heads: MaskHeads) -> jax.Array:
    """Returns the queries of some heads: [B, S, N, H] -> [B * S, key heads, query heads of each, H]."""
    query = select_heads(query, heads.q_heads, axis=2)
    return query.reshape(query.shape[0] * query.shape[1], len(heads.kv_heads), -1, query.shape[-1])


def _group_sinks(sinks: jax.Array | None, heads: MaskHeads) -> jax.Array | None:
    return None if sinks is None else sinks[np.array(heads.q_heads)].reshape(len(heads.kv_heads), -1)
