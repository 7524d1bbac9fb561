"""Sparse attention in MaxText: `attention=sparse`, once MaxText has the lines that README.md names."""

from typing import Any

import jax
import jax.numpy as jnp

import sparse_layers as sl

SIZES = {"local_sliding": "sliding_window_size", "chunk": "chunk_attn_window_size"}


def attend(
    op: Any, query: jax.Array, key: Any, value: Any, segment_ids: Any, kv_segment_ids: Any = None, **options: Any
) -> jax.Array:
    """Returns attention [B, T, N, H], as MaxText computes it with ``attention=dot_product``.

    Args:
      op: the `AttentionOp`: attention type, soft cap, mesh and configuration.
      query: [B, T, N, H], scaled already.
      key, value: [B, S, K, H], or quantized.
      segment_ids, kv_segment_ids: [B, T] and [B, S]; id 0 is padding, whose result is 0.
      options: bidirectional_mask, bool [B, T], in which each run of True, such as an image, sees itself; sinks [N],
        logits; longest_span, the tokens of the longest run, for sliding windows. Others must be None, 0 or False.
    """
    spans, sinks, longest = (options.pop(name, None) for name in ("bidirectional_mask", "sinks", "longest_span"))
    config, kind, cap = op.config, op.attention_type.value, op.attn_logits_soft_cap or None
    context = config.context_parallel_load_balance and op.mesh.shape.get(config.context_sharding, 1) > 1
    options |= {"dropout_rate": op.dropout_rate, "using_pipeline_parallelism": config.using_pipeline_parallelism}
    for name, x in options.items():
        check(x is None or not (hasattr(x, "shape") or x), name, x, "must be None, 0 or False")
    name = "context_parallel_load_balance"
    check(not context, name, True, "must be False with context parallelism", f"{name}=false")
    kinds, name = ("global", "mla", "full", "block_diffusion", *SIZES), SIZES.get(kind, "")
    check(kind in kinds, "attention_type", kind, f"must be one of {', '.join(kinds)}")
    size: Any = getattr(op, name) if name else 1
    check(isinstance(size, int) and size >= 1, name, size, "must be an integer >= 1", f"{name}=256")
    check(cap is None or cap > 0, "attn_logits_soft_cap", cap, "must be None, 0 or positive", "attn_logits_soft_cap=0")
    pattern: Any = sl.Full() if kind in ("full", "block_diffusion") else sl.Causal()
    order, selection = None, None
    if kind == "local_sliding":
        pattern = sl.Window(size - 1)  # size counts the query
    elif kind == "chunk":
        pattern = sl.preset("chunked", chunk=size)
    elif kind == "block_diffusion":
        order = jnp.broadcast_to(sl.block_order(op.causal_block_size, query.shape[1]), query.shape[:2])
    if spans is not None and kind != "full":
        rule = f"must be None for attention_type {kind}"
        check(kind in ("global", "local_sliding"), "bidirectional_mask", spans, rule)
        pattern, order = sl.Full(), sl.span_order(spans)
        if kind == "local_sliding":
            fits, rule = isinstance(longest, int) and 1 <= longest <= size, f"must be from 1 to {name}, {size}"
            check(fits, "longest_span", longest, rule, f"longest_span={size} in the call of attend")
            pattern = sl.Window(size - 1, longest - 1)
    key, value = (x.dequant() if hasattr(x, "dequant") else x for x in (key, value))
    if config.moba:
        rule = "needs attention_type global, without bidirectional_mask"
        check(kind == "global" and order is None, "moba", True, rule)
        block, rule = config.moba_chunk_size, "must be a multiple of 16 from 16 to 512"
        check(block in range(16, 513, 16), "moba_chunk_size", block, rule, "moba_chunk_size=512")
        check(config.moba_topk >= 1, "moba_topk", config.moba_topk, "must be an integer >= 1", "moba_topk=8")
        in_float32 = (x.astype(jnp.float32) for x in (query, key))  # MaxText averages keys in float32, too
        selection = sl.MoBA(block, config.moba_topk).select(*in_float32, scale=1.0)
    ids = None if segment_ids is None else (segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)
    ids = ids and (jnp.where(ids[0] == 0, -1, ids[0]), jnp.where(ids[1] == 0, -1, ids[1]))  # here, padding is negative
    batch, heads, length, _ = (*op._logical_to_mesh_axes(op.flash_axis_names_q), None, None, None, None)[:4]
    sharding = jax.sharding.PartitionSpec(batch, length, heads)
    operands: Any = {"segment_ids": ids, "order_ids": order, "selection": selection, "sinks": sinks}
    operands |= {"scale": 1.0, "logits_soft_cap": cap, "query_sharding": sharding}
    return sl.block_sparse_attention(query, key, value, pattern, **operands)


def check(is_right: bool, name: str, value: Any, rule: str, instead: str = "attention=dot_product") -> None:
    """Raises an error that names the argument, its rule, its value, and what to write instead."""
    if not is_right:
        value = f"an array {value.shape}" if hasattr(value, "shape") else repr(value)
        raise NotImplementedError(f"attention=sparse: {name} {rule}, got {value}; write {instead}")
