"""A step of decoding by one kernel for each mask, which reads rows of the cache where they lie.

What is read is told by lists of rows, one fusion of XLA's; no keys are gathered. Where all heads have one mask, the
kernel writes the token, too.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ..kernels.decode_gpu import decode
from ..planning.platforms import has_local_arrays, implementation_order, platform
from .reads import Part
from .stores import all_heads, rows_of, some_heads

if TYPE_CHECKING:
    from .cache import KVCache
    from .layout import Heads


def attends(cache: "KVCache", query: jax.Array, chosen: bool) -> bool:
    """Whether `attend` serves queries [B, N, H] or [B, S, N, H], to blocks that are chosen or not."""
    if (
        cache.implementation != "triton"
        or not has_local_arrays()
        or "triton" not in implementation_order(platform())
        or (chosen and len(cache.masks) > 1)
    ):
        return False
    group, most = cache.num_heads // cache.num_kv_heads, max(len(heads.parts) for heads in cache.layout.heads)
    return decode.unsupported(query, cache.keys, cache.values, group, most) is None


def steps(cache: "KVCache", query: jax.Array) -> bool:
    """Whether `step` serves queries [B, N, H] or [B, S, N, H] and tokens as many."""
    layout = cache.layout
    stores, everyone = [part.store for part in layout.heads[0].parts], tuple(range(cache.num_kv_heads))
    return (
        (query.ndim == 3 or query.shape[1:2] == (1,))
        and cache.pooled is None
        and len(layout.heads) == 1
        and layout.heads[0].keys == everyone
        and len({*stores}) == len(stores)
        and cache.masks[0].computable
        and attends(cache, query, False)
    )


def attend(
    block: int | None,
    of_logits: tuple[float, float | None],
    cache: "KVCache",
    query: jax.Array,
    at: jax.Array,
    sinks: jax.Array | None,
    ids: jax.Array | None,
) -> jax.Array:
    """As `KVCache.attend`, of queries [B, S, N, H] at [B, S], to all of their rows or blocks ids [B, S, G, k].

    ``of_logits`` are scale and soft cap.
    """
    position = at.reshape(-1)
    if ids is None or block is None:
        found = [(heads, [_read(cache, heads, part, position) for part in heads.parts]) for heads in cache.layout.heads]
    else:
        heads, _, tokens, seen = cache.layout.listed(position, ids.reshape(len(position), *ids.shape[2:]), block)
        rows = jnp.where(seen[:, :, 0], tokens, -1)
        whole, lists = cache.layout.whole(), len(heads.keys)
        of_keys = tuple(i // (lists // cache.num_kv_heads) for i in range(lists))
        found = [(heads, [decode.CacheRead(rows_of(cache.keys[whole]), rows_of(cache.values[whole]), of_keys, rows)])]
    outs = [
        decode.attend(_grouped(query, heads), reads, position, decode.LogitOptions(*of_logits), _of_heads(sinks, heads))
        for heads, reads in found
    ]
    outs = [out.reshape(*query.shape[:2], -1, out.shape[-1]) for out in outs]
    return all_heads(outs, [heads.queries for heads, _ in found], axis=2)


def step(
    cache: "KVCache",
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    position: jax.Array,
    sinks: jax.Array | None,
    of_logits: tuple[float, float | None],
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """As `KVCache.step`, of a token of each sequence, [B, 1, heads, size] at [B]: (out, keys, values)."""
    (heads,) = cache.layout.heads
    reads, slots = [], [jnp.where(cache.masks[0](position, position), 0, -1)]
    for part in heads.parts:
        slot = part.store.slot(position)
        slots.append(jnp.where(slot < part.store.runs * part.store.run, slot, -1))
        reads.append(_read(cache, heads, part, position, slot))
    new, slots = (key[:, 0], value[:, 0]), jnp.stack(slots, axis=1).astype(jnp.int32)
    options, given = decode.LogitOptions(*of_logits), _of_heads(sinks, heads)
    out, *arrays = decode.step(_grouped(query, heads), new, reads, slots, position, options, given)
    held = [cache.layout.find(part.store)[0] for part in heads.parts]
    keys, values = (
        tuple(x.reshape(old[i].shape) for i, x in sorted(zip(held, each, strict=True), key=lambda found: found[0]))
        for each, old in zip(arrays, (cache.keys, cache.values), strict=True)
    )
    return out.reshape(*query.shape[:-1], -1), keys, values


def or_plain(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """kernel(*args); under `jax.vmap` and differentiation, which kernel calls do not know, ``plain`` with its rules."""
    mapped = custom_vmap(kernel)

    @mapped.def_vmap
    def rule(_, batched, *args):
        results = jax.vmap(plain, jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(batched)))(*args)
        return results, jax.tree.map(lambda _: True, results)

    differentiable = jax.custom_jvp(mapped)
    differentiable.defjvp(functools.partial(jax.jvp, plain))
    return differentiable(*args)


def _read(
    cache: "KVCache", heads: "Heads", part: Part, position: jax.Array, slot: jax.Array | None = None
) -> decode.CacheRead:
    """What queries at positions [B * S] read of a part, but for the row ``slot`` [B]."""
    index, held = cache.layout.find(part.store)
    pieces, allowed = part.places(position)
    row = jnp.arange(part.store.run, dtype=jnp.int32)[None]
    row = row if pieces is None else (pieces[..., None] * part.store.run + row[None]).reshape(len(position), -1)
    if slot is not None:
        allowed = allowed & (row != slot[:, None])
    rows = jnp.where(allowed, row, -1).astype(jnp.int32)[:, None]
    classes = part.store.classes if part.table is None and part.store.order.complete else 0
    of_keys = tuple(held.index(h) for h in heads.keys)
    return decode.CacheRead(rows_of(cache.keys[index]), rows_of(cache.values[index]), of_keys, rows, classes)


def _grouped(query: jax.Array, heads: "Heads") -> jax.Array:
    """The queries of some heads: [B, S, N, H] -> [B * S, key heads, query heads of each, H]."""
    query = some_heads(query, heads.queries, axis=2)
    return query.reshape(query.shape[0] * query.shape[1], len(heads.keys), -1, query.shape[-1])


def _of_heads(sinks: jax.Array | None, heads: "Heads") -> jax.Array | None:
    return None if sinks is None else sinks[np.array(heads.queries)].reshape(len(heads.keys), -1)
