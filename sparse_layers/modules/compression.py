"""`Compression`: windows of keys or values become one each, by a learnt MLP."""

from typing import Any

import jax
from flax import nnx


class Compression(nnx.Module):
    """The paper's phi, an MLP that makes one key (or value) of each window: ``V gelu(b + sum_s U[s] x[s])``.

    All key heads share it. A strided convolution is the smallest MLP of all keys of a window: a layer of H hidden
    features that knows the keys' places, and one of H features. An embedding e[s] of places within the window, added
    to the keys, would change nothing but b, by ``sum_s U[s] e[s]``: b is that embedding.

    Args:
      window: keys of a window, and keys between the beginnings of two.
      features: of a head, H.
      **options: dtype, param_dtype, precision and rngs of Flax's layers.
    """

    def __init__(self, window: tuple[int, int], features: int, **options: Any):
        size, stride = window
        self.size = size
        self.inner = nnx.Conv(features, features, size, stride, padding="VALID", **options)
        self.outer = nnx.Linear(features, features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, K, H], at least a window of tokens -> [B, windows, K, H]."""
        return self.outer(nnx.gelu(self.inner(x.swapaxes(1, 2)))).swapaxes(1, 2)
