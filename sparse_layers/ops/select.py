"""Selections by a scorer on one device or several: each device selects for its batch entries, heads and tokens.

Devices exchange nothing, with two exceptions. If query heads that select together lie on several devices, these
all-gather the queries. With context parallelism, they all-gather the keys, as attention to a selection does.
"""

import functools

import jax
import jax.numpy as jnp

from ..scorers import Scorer
from . import sharding
from .kernels.operands import Operands
from .planning.selection import Selection


def select_blocks(
    scorer: Scorer,
    query: jax.Array,
    key: jax.Array,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    order_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    *,
    scale: float | None = None,
    query_sharding: jax.sharding.PartitionSpec | None = None,
    pooled: jax.Array | None = None,
) -> Selection | None:
    """Selects key blocks for the queries of a sequence; None where all queries attend to all blocks."""
    query_sharding = sharding.add_batch_axis(query_sharding, query)
    if not scorer.selects(query.shape[1]):
        return None

    def ids(shard: sharding.Shard | None, operands: Operands) -> jax.Array:
        query, key, scored = operands[:3]
        heads, scored, first = query.shape[2], None if pooled is None else scored, None
        pairs = operands.segments, operands.order_ids
        if shard is not None and shard.sequence is not None:
            first = shard.sequence.first_token
            key, pairs = jax.tree.map(shard.sequence.all_gather, (key, pairs))
        segments, orders = pairs
        select = functools.partial(scorer.select_blocks, segments=segments, order_ids=orders, scale=scale, first=first)
        if shard is None or shard.splits_kv_heads:
            return select(query, key, pooled=scored).ids
        kv_heads = shard.local_kv_heads()
        key, scored = jax.tree.map(lambda x: jnp.take(x, kv_heads, axis=2), (key, scored))
        if not scorer.per_query_head:  # the query heads of a key head select together, and lie on several devices
            query = jax.lax.all_gather(query, shard.axes, axis=2, tiled=True)
            q_heads = jnp.arange(shard.heads).reshape(shard.kv_heads, -1)
            query = jnp.take(query, q_heads[kv_heads].ravel(), axis=2)
        block_ids = select(query, key, pooled=scored).ids
        return jnp.repeat(block_ids, heads // block_ids.shape[2], axis=2)

    segments, orders = (x if x is None or isinstance(x, tuple) else (x, x) for x in (segment_ids, order_ids))
    orders = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.int32), orders)  # the op refuses what does not fit
    if pooled is not None and query_sharding is not None:  # devices cannot split windows as they split tokens
        query_sharding = jax.sharding.PartitionSpec(*query_sharding[:1], None, *query_sharding[2:])
    arrays = jax.lax.stop_gradient((query, key, key if pooled is None else pooled))
    operands = Operands(*arrays, segments=segments, order_ids=orders)
    return Selection(sharding.over_known_axes(ids, operands, query_sharding), block=scorer.block)
