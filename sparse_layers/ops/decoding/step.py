"""A decoding step: attends by the GPU kernel where it can, else by XLA. Only this file picks one of them."""

import functools

import jax

from ..kernels.distance_bias import DistanceBias
from . import fused, ring_cache, xla
from .layout import CacheLayout, KVArrays, LogitOptions
from .ring_cache import select_heads

# Query, key and value of a step, [B, S, heads, size].
Token = tuple[jax.Array, jax.Array, jax.Array]


def attend(
    layout: CacheLayout,
    implementation: str,
    logit_options: LogitOptions,
    arrays: KVArrays,
    query: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None,
    selected: tuple[jax.Array, int] | None = None,
    bias: DistanceBias | None = None,
) -> jax.Array:
    """Returns attention [B, S, N, Hv] of queries [B, S, N, H] at positions [B, S] over the keys of a cache.

    The implementation is "xla", or "triton" for the kernel where it can; it knows no bias. ``selected`` are ids [B, S,
    G, k] of the key blocks to read, and their size; None for the pattern's row.
    """
    ids, block = (None, None) if selected is None else selected
    args = arrays, query, positions, sinks, ids
    by_xla = functools.partial(xla.attend, layout, block, logit_options)
    can_attend = bias is None and fused.can_attend(layout, arrays, query, selected is not None)
    if implementation != "triton" or not can_attend:
        return by_xla(*args, bias)
    return fused.with_fallback(functools.partial(fused.attend, layout, block, logit_options), by_xla, *args)


def write(layout: CacheLayout, arrays: KVArrays, key: jax.Array, value: jax.Array, positions: jax.Array) -> KVArrays:
    """Returns the arrays of a cache with the tokens [B, S, K, size] of a step at positions [B, S]."""
    keys, values = (
        tuple(
            ring_cache.write(store, array, select_heads(new, heads, axis=2), positions)
            for array, (store, heads) in zip(side, layout.stores, strict=True)
        )
        for side, new in zip(arrays, (key, value), strict=True)
    )
    return keys, values


def write_and_attend(
    layout: CacheLayout,
    implementation: str,
    logit_options: LogitOptions,
    arrays: KVArrays,
    token: Token,
    positions: jax.Array,
    sinks: jax.Array | None,
    bias: DistanceBias | None = None,
) -> tuple[jax.Array, KVArrays]:
    """Writes the tokens of a step and attends from them, see `attend`: returns (out [B, S, N, Hv], the new arrays)."""

    def in_two_steps(
        arrays: KVArrays, token: Token, positions: jax.Array, sinks: jax.Array | None
    ) -> tuple[jax.Array, KVArrays]:
        query, key, value = token
        # Without a barrier, XLA writes the token a second time for the matrix products, into a copy of the cache.
        arrays = jax.lax.optimization_barrier(write(layout, arrays, key, value, positions))
        return attend(layout, implementation, logit_options, arrays, query, positions, sinks, bias=bias), arrays

    args = arrays, token, positions, sinks
    if implementation != "triton" or bias is not None or not fused.can_step(layout, arrays, token[0]):
        return in_two_steps(*args)
    return fused.with_fallback(functools.partial(fused.step, layout, logit_options), in_two_steps, *args)
