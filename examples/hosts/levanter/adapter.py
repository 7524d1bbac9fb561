"""Sparse attention in levanter: `attn_backend: sparse`, once levanter has the lines that README.md names."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import sparse_layers as sl

DTYPES = {"segment_ids": jnp.integer, "prefix_lengths": jnp.integer, "prefix_mask": bool, "explicit_mask": bool}


def attend(positions: Any, query: Any, key: Any, value: Any, mask: Any, pspec: Any, **options: Any) -> Any:
    """Returns levanter's `dot_product_attention` of named arrays, as ``attn_backend: vanilla`` computes it.

    Args:
      positions, pspec: its QPos, KPos and Key, and haliax's `pspec_for_axis`.
      query, key, value, mask: its arguments. Segment ids below 0 are padding, whose result is 0.
      options: its scaling_factor, logits_soft_cap and attn_sink; others must be None or 0.
    """
    scale, cap, sinks = (options.pop(name, None) for name in ("scaling_factor", "logits_soft_cap", "attn_sink"))
    for name, x in {**options, "causal_offset": getattr(mask, "causal_offset", None)}.items():
        check(x is None or not (hasattr(x, "axes") or x), name, x, "must be None or 0")
    check(scale is None or isinstance(scale, float | int), "scaling_factor", scale, "must be a Python number or None")
    fields = {name: getattr(mask, name, None) for name in DTYPES}
    ids = fields.pop("segment_ids") or ()  # of queries and of keys
    explicit = fields.pop("explicit_mask") if hasattr(mask, "is_causal") else mask
    by_token = {axis for x in (*ids, *fields.values()) for axis in getattr(x, "axes", ())}
    q_pos, k_pos, size = (x.resolve_axis(y) for x, y in zip((query, key, query), positions, strict=True))
    value_size = next((axis for axis in value.axes if axis not in key.axes), size)
    shared = [axis for axis in query.axes if axis in key.axes and axis not in (k_pos, size)]
    in_sinks = shared[1:][-1:] if sinks is None else getattr(sinks, "axes", ())
    kv_heads = [axis for axis in shared if axis in in_sinks and axis not in by_token]
    batch = [axis for axis in shared if axis not in kv_heads]
    heads = kv_heads + [axis for axis in query.axes if axis not in (q_pos, size, *shared)]

    def flat(name: str, x: Any, *groups: list[Any]) -> jax.Array:  # one axis for each group of named axes
        axes, dtype = [axis for group in groups for axis in group], DTYPES.get(name, jnp.floating)
        x = x.rename({q_pos.name: k_pos.name}) if q_pos not in axes and hasattr(x, "rename") else x  # ids of both
        fits = hasattr(x, "axes") and {*x.axes} <= {*axes} and jnp.issubdtype(x.array.dtype, dtype)
        check(fits, name, x, f"must be a named {dtype.__name__} array, of axes among {[axis.name for axis in axes]}")
        x = x.broadcast_axis(tuple(axes)).rearrange(axes)
        return x.array.reshape([math.prod(axis.size for axis in group) for group in groups])

    prefixes = [flat(name, x, batch, [k_pos]) for name, x in fields.items() if x is not None]  # [B, S]
    pattern, order = pattern_of(mask, q_pos.size, k_pos.size, prefixes)
    if explicit is not None:
        pattern = pattern.dense(q_pos.size, k_pos.size) & flat("explicit_mask", explicit, [q_pos], [k_pos])
    q, k = flat("query", query, batch, [q_pos], heads, [size]), flat("key", key, batch, [k_pos], kv_heads, [size])
    v = flat("value", value, batch, [k_pos], kv_heads, [value_size])
    ids = [flat("segment_ids", x, batch, [axis]) for x, axis in zip(ids, (q_pos, k_pos), strict=False)]
    sink, axes = None if sinks is None else flat("attn_sink", sinks, heads), (*batch, q_pos, *heads, value_size)
    spec = (tuple(jax.tree.leaves([*pspec(tuple(x))])) or None for x in (batch, [q_pos], heads))
    more: Any = {"segment_ids": tuple(ids) or None, "scale": scale, "query_sharding": jax.sharding.PartitionSpec(*spec)}
    out = sl.block_sparse_attention(q, k, v, pattern, order_ids=order, sinks=sink, logits_soft_cap=cap, **more)
    return type(query)(out.reshape([axis.size for axis in axes]), axes)


def pattern_of(mask: Any, q_len: int, kv_len: int, prefixes: list[jax.Array]) -> tuple[Any, Any]:
    """Returns the pattern of a structured mask, and order ids that show keys of a prefix; windows count the query."""
    is_causal, window, length = (getattr(mask, name, None) for name in ("is_causal", "sliding_window", "prefix_length"))
    for name, x, least in (("sliding_window", window, 1), ("prefix_length", length, 0)):
        check(x is None or (isinstance(x, int) and x >= least), name, x, f"must be None or an integer >= {least}")
    check(is_causal or not (prefixes or length is not None), "is_causal", is_causal, "must be True beside a prefix")
    check(not prefixes or window is None, "sliding_window", window, "must be None beside prefix_lengths, prefix_mask")
    pattern: Any = sl.Window(window - 1) if window else sl.Causal() if is_causal else sl.Full()
    if not prefixes:
        return pattern if length is None else pattern | sl.Prefix(length), None
    k, prefix = jnp.arange(kv_len), jnp.arange(kv_len) < (length or 0)
    for x in prefixes:
        prefix = prefix | (x if x.dtype == bool else k < x)
    return sl.Full(), (jnp.broadcast_to(jnp.arange(q_len), (len(prefix), q_len)), jnp.where(prefix, -1, k))


def check(is_right: bool, name: str, value: Any, rule: str) -> None:
    """Raises an error that names the argument, its rule, its value, and what to write instead."""
    if not is_right:
        value = f"an array {value.axes} of {value.array.dtype}" if hasattr(value, "axes") else f"{value!r:.40}"
        raise NotImplementedError(f"attn_backend=sparse: {name} {rule}, got {value}; or write attn_backend=vanilla")
