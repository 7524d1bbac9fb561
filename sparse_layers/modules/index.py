"""The index of a scorer such as `MSA`: projections that score key blocks, and the loss that trains them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..ops.attention import block_sparse_attention


class IndexProjections(NamedTuple):
    """The projections that a scorer such as `MSA` scores instead of query and key.

    Attributes:
      query: [..., T, K, size].
      key: [..., T, 1, size].
      losses: a list that receives the loss of a call, a float32 scalar; None for no loss.
    """

    query: jax.Array
    key: jax.Array
    losses: list[jax.Array] | None = None

    def arrays(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """Returns query and key with their leading axes merged into one of size ``rows``."""
        return self.query.reshape(rows, *self.query.shape[-3:]), self.key.reshape(rows, *self.key.shape[-3:])


class IndexLoss(nnx.Variable):
    """The loss that trains the index of an attention layer with `MSA`, a float32 scalar that each call sets.

    Args:
      *args: the scalar.
      **kwargs: see ``nnx.Variable``.

    Raises:
      TypeError: as ``nnx.Variable``.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.SparseSelfAttention(2, 8, pattern="msa:block=16,count=2", seq_len=64, rngs=nnx.Rngs(0))
      >>> def total_loss(layer, x):
      ...     loss = (layer(x) ** 2).mean()
      ...     return loss + sum(jax.tree.leaves(nnx.state(layer, sl.IndexLoss)))
      >>> gradients = nnx.jit(nnx.grad(total_loss))(layer, jax.random.normal(jax.random.key(0), (1, 64, 8)))
      >>> bool((gradients["index_query"]["kernel"][...] != 0).any())
      True
    """


def index_loss(query, key, index_query, index_key, plan, scale, options, bias) -> jax.Array:
    """Returns the loss of `MSA`. Attention with index keys as values, and a log-sum-exp, are its two sums over keys."""
    query, key, bias = jax.lax.stop_gradient((query, key, bias))
    (*_, heads, _), kv_heads, size = query.shape, key.shape[2], index_key.shape[3]
    values = jnp.broadcast_to(index_key, (*index_key.shape[:2], kv_heads, size))
    expected_key = block_sparse_attention(query, key, values, plan, scale=scale, bias=bias, **options)
    expected_key = expected_key.reshape(*expected_key.shape[:2], kv_heads, heads // kv_heads, size).mean(3)
    expected_score = (expected_key.astype(jnp.float32) * index_query.astype(jnp.float32)).sum(-1) * size**-0.5
    options = options | {"logits_soft_cap": None}
    _, lse = block_sparse_attention(index_query, index_key, index_key[..., :8], plan, return_lse=True, **options)
    has_keys = lse > -jnp.inf
    return jnp.where(has_keys, lse - expected_score, 0).sum() / jnp.maximum(has_keys.sum(dtype=lse.dtype), 1)
