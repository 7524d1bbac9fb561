"""The arithmetic that backends share: the dtype of accumulators, and log-sum-exp (lse), by which passes are merged."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype of scores, sums and lse: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def merge_by_lse(state: Sequence[jax.Array], update: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of the softmax over two disjoint key sets from (out, lse) over each."""
    (out, lse), (update_out, update_lse) = state, update
    merged_lse = jnp.logaddexp(lse, update_lse)
    shift = jnp.where(merged_lse == -jnp.inf, 0, merged_lse)
    alpha, update_alpha = jnp.exp(lse - shift), jnp.exp(update_lse - shift)
    return out * alpha[..., None] + update_out * update_alpha[..., None], merged_lse


def reduced_lse(lse: jax.Array) -> jax.Array:
    """Returns lse as backward passes read it: lowered, where it is huge, by more than logits are rounded.

    A backward pass computes p = ``exp(min(logit - lse, 0))``. Above 1e6 both are rounded by more than 0.1, so a p of 1
    would be e to the rounding error. With the lowered lse it is 1, as in the forward pass.
    """
    return lse - jnp.maximum(16 * jnp.finfo(lse.dtype).eps * abs(lse) - 2, 0)


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns the gradient [N] of sinks [N], in the dtype of lse, from lse and delta [B, T, N] of a backward pass."""
    p = jnp.exp(jnp.minimum(sinks.astype(lse.dtype)[None, None] - jnp.where(lse == -jnp.inf, 0, lse), 0))
    return -(p * delta).sum((0, 1))


def limit_base_2(logits: jax.Array, scale: float = 1.0) -> jax.Array:
    """Returns sinks or biases in float32 for kernels that multiply by log2(e): finite ones do not overflow.

    Nor do they if kernels divide by a positive ``scale`` before. Infinities stay.
    """
    logits, largest = logits.astype(jnp.float32), 2.3e38 * (scale if 0 < scale < 1 else 1)
    return jnp.where(jnp.isinf(logits), logits, jnp.clip(logits, -largest, largest))
