"""`Embed`: the token embedding of a model, Flax's with a gradient that is fast and exact for small tables."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..ops.kernels.numerics import accumulator_dtype

# With more embeddings, a product with one-hot rows costs more than a scatter.
_MAX_ONE_HOT = 1024


class Embed(nnx.Embed):
    """``flax.nnx.Embed`` whose gradient, with up to 1024 embeddings, is a matrix product and not a scatter.

    With few distinct tokens, such as bytes, the scatter of a GPU adds many gradients into one row, one by one, in
    undefined order, and rounds each sum to bfloat16. That took 50 of 120 ms of a training step of 65,536 bytes on an
    H200, and results differed between runs. The product sums in float32 at least, and needs memory for tokens x
    embeddings.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> Embed(256, 8, rngs=nnx.Rngs(0))(jnp.zeros((2, 5), int)).shape
      (2, 5, 8)
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns embeddings [..., features] of inputs, int [...], in the layer's dtype, sharded like inputs."""
        axes = jax.typeof(inputs).sharding.spec
        # On a mesh with explicit axes, JAX asks for the sharding of a look-up by sharded indices.
        out = jax.sharding.PartitionSpec(*axes, None) if any(axes) else None
        if not (1 < self.num_embeddings <= _MAX_ONE_HOT and jnp.issubdtype(inputs.dtype, jnp.integer)):
            return super().__call__(inputs, out_sharding=out)
        look_up: Any = functools.partial(_look_up, self.dtype)
        if out is not None:
            look_up = jax.sharding.auto_axes(look_up, out_sharding=out)
        return look_up(self.embedding[...], inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(dtype: Any, table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(table.astype(dtype), tokens, axis=0)


def _look_up_fwd(dtype, table, tokens):
    # `_look_up` itself has no forward derivative.
    return jnp.take(table.astype(dtype), tokens, axis=0), (table, tokens)


def _look_up_bwd(dtype, residuals, gradient):
    table, tokens = residuals
    # Negative tokens count from the end, as in `jnp.take`. Small dtypes cannot hold the number of rows.
    tokens = tokens if tokens.dtype.itemsize >= 4 else tokens.astype(jnp.int32)
    one_hot = jax.nn.one_hot(jnp.where(tokens < 0, tokens + len(table), tokens), len(table), dtype=gradient.dtype)
    token_axes = tuple(range(tokens.ndim))
    # Products of zeros and ones are exact with bfloat16, and with float32 at the highest precision.
    sums = jax.lax.dot_general(
        one_hot,
        gradient,
        ((token_axes, token_axes), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=accumulator_dtype(gradient.dtype),
    )
    return sums.astype(table.dtype), None


_look_up.defvjp(_look_up_fwd, _look_up_bwd)
