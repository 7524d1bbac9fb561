"""A step of decoding in plain XLA: what a query reads is gathered, then multiplied."""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..kernels.numerics import accumulator_dtype
from .layout import Heads
from .stores import all_heads, some_heads, taken

if TYPE_CHECKING:
    from .cache import KVCache


def attend(
    block: int | None,
    of_logits: tuple[float, float | None],
    cache: "KVCache",
    query: jax.Array,
    at: jax.Array,
    sinks: jax.Array | None,
    ids: jax.Array | None,
) -> jax.Array:
    """As `fused.attend`."""

    def one(query: jax.Array, at: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """That of one query a sequence."""
        if ids is None or block is None:
            found = [(heads, _row(cache, heads, at)) for heads in cache.layout.heads]
        else:
            found = [_chosen(cache, at, ids, block)]
        outs = [_attend(heads, query, reads, *of_logits, sinks) for heads, reads in found]
        return all_heads(outs, [heads.queries for heads, _ in found], axis=1)

    args = (query, at) if ids is None else (query, at, ids)
    # Mapped, for what queries read as a whole is then read once.
    out = jax.vmap(one, 1, 1)(*args) if query.shape[1] > 1 else one(*(x[:, 0] for x in args))[:, None]
    return out.astype(query.dtype)


def _row(cache: "KVCache", heads: Heads, position: jax.Array) -> list[tuple[jax.Array, ...]]:
    """What the heads of one mask read, by part: keys, values, and which of them they see; see `_attend`."""
    reads = []
    for part in heads.parts:
        index, held = cache.layout.find(part.store)
        pieces, allowed = part.places(position)
        chosen = [held.index(h) for h in heads.keys]
        k, v = (taken(arrays[index], chosen, pieces) for arrays in (cache.keys, cache.values))
        reads.append((k, v, allowed[:, None, None]))
    return reads


def _chosen(
    cache: "KVCache", position: jax.Array, ids: jax.Array, block: int
) -> tuple[Heads, list[tuple[jax.Array, ...]]]:
    """All heads, by who chooses, and what they read of the blocks ids [B, G, k]; see `_attend`."""
    heads, start, tokens, seen = cache.layout.listed(position, ids, block)
    index, kv_heads, width = cache.layout.whole(), cache.num_kv_heads, min(block, cache.seq_len)

    def blocks(array: jax.Array) -> jax.Array:
        def one(x, first):
            return jax.lax.dynamic_slice_in_dim(x, first, width, axis=1)

        found = jax.vmap(jax.vmap(jax.vmap(one, (None, 0))))(array, start.reshape(len(start), kv_heads, -1))
        return found.reshape(*tokens.shape, array.shape[-1])

    # What nobody chose may hold anything, NaN too, and a weight of 0 times NaN is NaN.
    values = jnp.where(seen.any(2)[..., None], blocks(cache.values[index]), 0)
    return heads, [(blocks(cache.keys[index]), values, seen)]


def _attend(
    heads: Heads,
    query: jax.Array,
    reads: list[tuple[jax.Array, ...]],
    scale: float,
    cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """The query heads of one mask, [B, len(heads.queries), Hv], float32 at least.

    Each of ``reads`` has keys [B, n, L, H], values [B, n, L, Hv], n = len(heads.keys), and bools [B, n or 1, query
    heads of each or 1, L].
    """
    dtype = accumulator_dtype(query.dtype)
    query = some_heads(query, heads.queries)
    query = query.reshape(len(query), len(heads.keys), -1, query.shape[-1])
    logits, gathered = [], []
    for k, v, allowed in reads:
        x = jnp.einsum("bngh,bnlh->bngl", query, k.astype(query.dtype), preferred_element_type=dtype) * scale
        x = x if cap is None else cap * jnp.tanh(x / cap)
        logits.append(jnp.where(allowed, x, -jnp.inf))
        gathered.append(v)
    start = jnp.full((*query.shape[:3], 1), -jnp.inf, dtype)
    if sinks is not None:
        of_heads = sinks.astype(dtype)[jnp.array(heads.queries)].reshape(1, *query.shape[1:3], 1)
        start = jnp.broadcast_to(of_heads, start.shape)
    highest = functools.reduce(jnp.maximum, (x.max(-1, keepdims=True, initial=-jnp.inf) for x in logits), start)
    highest = jnp.where(highest == -jnp.inf, 0, highest)  # nothing is allowed: weights of 0, and not NaN
    weights = [jnp.exp(x - highest) for x in logits]
    total = sum((w.sum(-1, keepdims=True) for w in weights), jnp.exp(start - highest))
    out = sum(
        jnp.einsum("bngl,bnlh->bngh", w.astype(query.dtype), v.astype(query.dtype), preferred_element_type=dtype)
        for w, v in zip(weights, gathered, strict=True)
    )
    out = out / jnp.where(total == 0, 1, total)
    return out.reshape(len(out), len(heads.queries), -1)
