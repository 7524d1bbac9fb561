"""`Compression`: the MLP of native sparse attention layers that compresses each window of keys or values to one."""

from typing import Any

import jax
from flax import nnx


class Compression(nnx.Module):
    """The paper's phi, an MLP that compresses each window of keys (or values) to one: ``V gelu(b + sum_s U[s] x[s])``.

    All key heads share it. The first layer, a strided convolution, has one matrix U[s] for each position s of the
    window. An embedding e[s] of positions, added to the keys, would only add ``sum_s U[s] e[s]`` to b.

    Args:
      window: (size, stride) of windows, in keys.
      features: features H of a head.
      **options: dtype, param_dtype, precision and rngs, as in Flax's layers.
    """

    def __init__(self, window: tuple[int, int], features: int, **options: Any):
        size, stride = window
        self.inner = nnx.Conv(features, features, size, stride, padding="VALID", **options)
        self.outer = nnx.Linear(features, features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns compressed windows, [B, windows, K, H], of keys [B, T, K, H] with T >= size."""
        return self.outer(nnx.gelu(self.inner(x.swapaxes(1, 2)))).swapaxes(1, 2)
