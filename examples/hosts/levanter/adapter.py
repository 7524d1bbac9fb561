"""Sparse attention in levanter: `attn_backend: sparse`, once hook.patch is applied as README.md says."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import sparse_layers as sl


def attend(
    positions: tuple[Any, Any, Any], query: Any, key: Any, value: Any, mask: Any, pspec: Any, **options: Any
) -> Any:
    """Returns levanter's `dot_product_attention` of named arrays, as ``attn_backend: vanilla`` computes it.

    Args:
      positions: its QPos, KPos and Key.
      query, key, value, mask: its arguments. Segment ids below 0 are padding, whose result is 0.
      pspec: haliax's `pspec_for_axis`.
      options: its scaling_factor, logits_soft_cap and attn_sink; others must be None or 0.
    """
    scale, cap, sinks = (options.pop(name, None) for name in ("scaling_factor", "logits_soft_cap", "attn_sink"))
    for name, x in options.items():
        if x is not None and (hasattr(x, "axes") or x):
            refuse(name, x, "must be None or 0")
    q_pos, k_pos, size = (x.resolve_axis(y) for x, y in zip((query, key, query), positions, strict=True))
    value_size = next((axis for axis in value.axes if axis not in key.axes), size)
    batch = [axis for axis in query.axes if axis in key.axes and axis not in (k_pos, size)]
    kv_heads = [batch.pop()] if batch and batch[-1] != query.axes[0] else []
    heads = kv_heads + [axis for axis in query.axes if axis not in (q_pos, size, *batch, *kv_heads)]

    def flat(x: Any, *groups: list[Any]) -> jax.Array:  # one axis for each group of named axes
        axes = tuple(axis for group in groups for axis in group)
        for axis in axes:
            x = x if axis.name in x.axis_names else x.broadcast_axis(axis)
        return x.rearrange(axes).array.reshape([math.prod(axis.size for axis in group) for group in groups])

    def ids_of(x: Any, axis: Any) -> jax.Array:  # [B, T]
        names = {} if axis.name in x.axis_names or q_pos.name not in x.axis_names else {q_pos.name: axis.name}
        return flat(x.rename(names), batch, [axis])

    def mesh_axes(group: list[Any]) -> tuple[str, ...] | None:
        return tuple(name for x in pspec(tuple(group)) for name in ((x,) if isinstance(x, str) else x or ())) or None

    explicit = mask if hasattr(mask, "axes") else getattr(mask, "explicit_mask", None)
    pattern, order = pattern_of(mask, q_pos.size, k_pos.size, lambda x: ids_of(x, k_pos))
    if explicit is not None:
        if {*explicit.axes} != {q_pos, k_pos}:
            refuse("explicit_mask", explicit, f"must have the axes {q_pos.name} and {k_pos.name} alone")
        pattern = pattern.dense(q_pos.size, k_pos.size) & flat(explicit, [q_pos], [k_pos])
    segments = getattr(mask, "segment_ids", None)
    arrays = (flat(query, batch, [q_pos], heads, [size]), flat(key, batch, [k_pos], kv_heads, [size]))
    more: Any = {"segment_ids": segments and (ids_of(segments[0], q_pos), ids_of(segments[1], k_pos))}
    more |= {"order_ids": order, "sinks": None if sinks is None else flat(sinks, heads)}
    more |= {"scale": scale, "logits_soft_cap": cap}
    more |= {"query_sharding": jax.sharding.PartitionSpec(*(mesh_axes(group) for group in (batch, [q_pos], heads)))}
    out = sl.block_sparse_attention(*arrays, flat(value, batch, [k_pos], kv_heads, [value_size]), pattern, **more)
    axes = (*batch, q_pos, *heads, value_size)
    return type(query)(out.reshape([axis.size for axis in axes]), axes)


def pattern_of(mask: Any, q_len: int, kv_len: int, ids_of: Any) -> tuple[Any, Any]:
    """Returns the pattern of a structured mask, and order ids that show keys of a prefix to all queries."""
    window, is_causal = getattr(mask, "sliding_window", None), getattr(mask, "is_causal", False)
    length, *shown = (getattr(mask, f"prefix_{name}", None) for name in ("length", "lengths", "mask"))
    shown = [x for x in shown if x is not None]
    if getattr(mask, "causal_offset", None) is not None:
        refuse("causal_offset", mask.causal_offset, "must be None")
    if (shown or length is not None) and not is_causal:
        refuse("is_causal", is_causal, "must be True beside a prefix")
    if shown and window is not None:
        refuse("sliding_window", window, "must be None beside prefix_lengths and prefix_mask")
    pattern: Any = sl.Full() if window is None else sl.Window(window - 1)  # window counts the query, and is causal
    pattern = pattern & sl.Causal() if is_causal else pattern
    if not shown:
        return pattern if length is None else pattern | sl.Prefix(length), None
    q, k = jnp.arange(q_len), jnp.arange(kv_len)
    prefix = k < (length or 0)
    for x in map(ids_of, shown):  # [B, S]
        prefix = prefix | (x if x.dtype == bool else k < x)
    return sl.Full(), (jnp.broadcast_to(q, (len(prefix), q_len)), jnp.where(prefix, -1, k))


def refuse(name: str, value: Any, rule: str) -> None:
    """Raises an error that names the argument, its value, the rule, and what to write."""
    value = f"an array of {value.axes}" if hasattr(value, "axes") else repr(value)
    raise NotImplementedError(f"attn_backend=sparse: {name} {rule}, got {value}; or write attn_backend=vanilla")
