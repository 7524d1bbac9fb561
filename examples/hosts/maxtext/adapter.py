"""Sparse attention in MaxText: `attention=sparse`, once hook.patch is applied at the commit that README.md names."""

from typing import Any

import jax
import jax.numpy as jnp

import sparse_layers as sl


def attend(
    op: Any,
    query: jax.Array,
    key: Any,
    value: Any,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None = None,
    *,
    bidirectional_mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    longest_span: int | None = None,
    **others: Any,
) -> jax.Array:
    """Returns attention [B, T, N, H], as MaxText computes it with ``attention=dot_product``.

    Args:
      op: the `AttentionOp`: attention type, soft cap, mesh and configuration.
      query: [B, T, N, H], scaled already.
      key, value: [B, S, K, H], or quantized.
      segment_ids, kv_segment_ids: [B, T] and [B, S]; id 0 is padding, whose result is 0.
      bidirectional_mask: bool [B, T]; each run of True, such as an image, sees itself.
      sinks: [N] logits.
      longest_span: tokens of the longest such run, for sliding windows.
      others: arguments that must be None or False.
    """
    config, kind, size = op.config, op.attention_type.value, op.sliding_window_size
    context = config.context_parallel_load_balance and op.mesh.shape.get(config.context_sharding, 1) > 1
    others |= {"dropout_rate": op.dropout_rate, "using_pipeline_parallelism": config.using_pipeline_parallelism}
    for name, x in {**others, "context_parallel_load_balance": context}.items():
        if hasattr(x, "shape") or x:
            refuse(name, x, "must be None, 0 or False")
    if kind not in ("global", "mla", "full", "local_sliding", "chunk", "block_diffusion"):
        refuse("attention_type", kind, "must be global, mla, full, local_sliding, chunk or block_diffusion")
    if kind == "local_sliding" and not size:
        refuse("sliding_window_size", size, "must be an integer >= 1")
    pattern: Any = sl.Full() if kind in ("full", "block_diffusion") else sl.Causal()
    order, selection = None, None
    if kind == "local_sliding":
        pattern = sl.Window(size - 1)  # size counts the query
    elif kind == "chunk":
        pattern = sl.preset("chunked", chunk=op.chunk_attn_window_size)
    elif kind == "block_diffusion":
        order = jnp.broadcast_to(sl.block_order(op.causal_block_size, query.shape[1]), query.shape[:2])
    if bidirectional_mask is not None and kind != "full":
        if kind not in ("global", "local_sliding"):
            refuse("bidirectional_mask", bidirectional_mask, f"must be None for attention_type {kind}")
        if kind == "local_sliding" and not 1 <= (longest_span or 0) <= size:
            refuse("longest_span", longest_span, f"must be from 1 to sliding_window_size, {size}")
        pattern = sl.Window(size - 1, longest_span - 1) if kind == "local_sliding" and longest_span else sl.Full()
        order = sl.span_order(bidirectional_mask)
    if config.moba:
        if kind != "global" or order is not None:
            refuse("moba", True, "needs attention_type global, without bidirectional_mask")
        selection = sl.MoBA(block=config.moba_chunk_size, count=config.moba_topk).select(query, key, scale=1.0)
    key, value = (x.dequant() if hasattr(x, "dequant") else x for x in (key, value))
    ids = None if segment_ids is None else (segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)
    ids = ids and (jnp.where(ids[0] == 0, -1, ids[0]), jnp.where(ids[1] == 0, -1, ids[1]))  # here, padding is negative
    batch, heads, length, _ = (*op._logical_to_mesh_axes(op.flash_axis_names_q), None, None, None, None)[:4]
    sharding, cap = jax.sharding.PartitionSpec(batch, length, heads), op.attn_logits_soft_cap or None
    options: Any = {"segment_ids": ids, "order_ids": order, "selection": selection, "sinks": sinks}
    options |= {"scale": 1.0, "logits_soft_cap": cap, "query_sharding": sharding}
    return sl.block_sparse_attention(query, key, value, pattern, **options)


def refuse(name: str, value: Any, rule: str) -> None:
    """Raises an error that names the argument, its value, the rule, and what to write."""
    value = f"an array {value.shape}" if hasattr(value, "shape") else repr(value)
    raise NotImplementedError(f"attention=sparse: {name} {rule}, got {value}; or write attention=dot_product")
