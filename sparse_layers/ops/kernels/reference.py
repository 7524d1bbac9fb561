"""The implementation "reference": dense attention in a few lines, with all scores in memory: the specification.

Its gradients are JAX's derivative of these lines, not a kernel's formula.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..planning.blocks import outside_trace
from ..planning.selection import Selection
from .call import Call
from .numerics import accumulator_dtype
from .operands import Gradients, Operands, differentiated

# Its backward pass computes a softmax of its own, from the keys that it has.
MERGES = False
MAX_SCORES = 1 << 31  # more score elements than this would fill any machine before an error could say so


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns a reason if the score matrix would not fit in memory, else None."""
    b, t, n, _ = operands.query.shape
    scores = b * n * t * operands.key.shape[1]
    if scores > MAX_SCORES:
        return f"it holds the whole score matrix [B, N, T, S], here {scores:.2e} elements, at most {MAX_SCORES:.2e}"
    return None


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns out [B, T, N, Hv] in the dtype of the query, and lse [B, T, N] in float32 (or float64)."""
    out, lse = _attention(call, operands, _cast_differentiated(operands, accumulator_dtype(operands.query.dtype)))
    return out.astype(operands.query.dtype), lse


def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Returns gradients by name, in the operands' dtypes; see `call` for the arguments."""
    (out, _), vjp = jax.vjp(functools.partial(_attention, call, operands), _cast_differentiated(operands, lse.dtype))
    dout = dout.astype(lse.dtype)
    (gradients,) = vjp((dout, (out * dout).sum(-1) - delta))
    return Gradients(**{name: x.astype(getattr(operands, name).dtype) for name, x in gradients.items()})


def _cast_differentiated(operands: Operands, dtype: Any) -> dict[str, jax.Array]:
    """Returns all operands that a backend differentiates, in a dtype."""
    return {name: getattr(operands, name).astype(dtype) for name in differentiated(operands)}


def _attention(call: Call, operands: Operands, cast_operands: dict[str, jax.Array]):
    query, key, value = cast_operands["query"], cast_operands["key"], cast_operands["value"]
    n, groups = query.shape[2], query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, groups, axis=2), jnp.repeat(value, groups, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * call.scale
    lengths = query.shape[1], key.shape[1]
    q_pos, kv_pos = (x.token(np.arange(n)) for x, n in zip(call.bias_positions(lengths), lengths, strict=True))
    distances = kv_pos - q_pos[:, None]
    if operands.bias_table is not None:
        table = cast_operands["bias_table"]
        scores += table[None, :, np.clip(distances + call.bias_center, 0, table.shape[1] - 1)]
    if operands.bias_slopes is not None:
        scores -= operands.bias_slopes[None, :, None, None] * abs(distances)[None, None].astype(scores.dtype)
    allowed = _allowed(call, operands)
    # Behind a barrier: XLA may compute any numbers for a product with weights that it knows to be 0.
    allowed = jax.lax.optimization_barrier(allowed)
    allowed = jnp.broadcast_to(jnp.tile(allowed, (1, n // allowed.shape[1], 1, 1)), scores.shape)
    scores = jnp.where(allowed, scores, 0)  # before the cap, whose slope at NaN is NaN
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    sink = jnp.full(1, -jnp.inf) if operands.sinks is None else operands.sinks
    sink = sink.astype(scores.dtype)[None, :, None, None]
    # The shift cancels in exact arithmetic; 0 stands in where nothing is allowed, so that no inf - inf arises.
    shift = jnp.maximum(jnp.where(allowed, scores, -jnp.inf).max(-1, keepdims=True), sink)
    shift = jax.lax.stop_gradient(jnp.where(shift == -jnp.inf, 0, shift))
    weights = jnp.where(allowed, jnp.exp(scores - shift), 0)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - shift)
    sees_keys = total > 0
    safe = jnp.where(sees_keys, total, 1)
    out = jnp.einsum("bnts,bsnh->btnh", weights / safe, value, precision="highest")
    lse = jnp.where(sees_keys, shift + jnp.log(safe), -jnp.inf)
    return out, lse[..., 0].swapaxes(1, 2)


def _allowed(call: Call, operands: Operands) -> jax.Array:
    """Returns bools [1 or B, heads or N, T, S]: the pairs that may attend; heads take the masks in turn."""
    if operands.mask is not None:
        allowed = operands.mask[None]
    else:
        assert call.plan is not None
        with outside_trace():
            heads = [np.asarray(m.dense(call.plan.q_len, call.plan.kv_len)) for m in call.plan.masks]
        allowed = jnp.asarray(np.stack(heads)[None])
    if operands.segments is not None:
        q, kv = operands.segments
        allowed = allowed & ((q[:, :, None] == kv[:, None, :]) & (q[:, :, None] >= 0))[:, None]
    if operands.order_ids is not None:
        q, kv = operands.order_ids
        allowed = allowed & (kv[:, None, :] <= q[:, :, None])[:, None]
    if operands.selection is not None:
        selected = _selected(operands.selection, operands)
        allowed = selected & jnp.tile(allowed, (1, selected.shape[1] // allowed.shape[1], 1, 1))
    return allowed


def _selected(selection: Selection, operands: Operands) -> jax.Array:
    """Returns bools [B, N, T, S]: True if the selection of a query has the block of a key."""
    ids, block, granularity = selection.ids, selection.block, selection.granularity
    t, s, n = operands.query.shape[1], operands.key.shape[1], operands.query.shape[2]
    block_ids = jax.lax.broadcasted_iota(ids.dtype, (1, 1, 1, 1, -(-s // block)), 4)
    blocks = (ids[..., None] == block_ids).any(-2)  # [B, Tq, G, blocks]
    pairs = blocks[:, np.arange(t) // granularity][..., np.arange(s) // block]
    return jnp.repeat(pairs, n // ids.shape[2], axis=2).swapaxes(1, 2)
