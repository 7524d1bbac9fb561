"""The methods by their names: each is its formula and a few lines of code. A new one is a class here."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..masks.options import Positive, checked
from .base import Scorer, products


@dataclasses.dataclass(frozen=True)
class MoBA(Scorer, name="moba"):
    """Mixture of block attention: a query head looks at the blocks whose mean key it likes best.

    The score of block j is ``q[t] . mean(k[s] for s in block j)``, of blocks that lie in the past as a whole; its own
    block is always chosen, and counts. Attention is one softmax over all keys of the blocks. Nothing is learnt beside
    the keys.

    Args:
      block, count, first, local, dense_below: see `Scorer`.

    Raises:
      ValueError: see `Scorer`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> moba = sl.MoBA(block=16, count=2)
      >>> layer = sl.SparseSelfAttention(2, 8, pattern="causal", selection=moba, seq_len=64, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 64, 8))).shape
      (1, 64, 8)

    References:
      Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs" (arXiv 2502.13189).
    """

    per_query_head: ClassVar[bool] = True
    products: ClassVar[bool] = True

    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        found = products(query, pooled)
        return found.reshape(*found.shape[:2], -1, found.shape[-1])


@dataclasses.dataclass(frozen=True)
class InfLLM(Scorer, name="infllm"):
    """InfLLM-V2: the query heads of a key head look at the blocks with the keys that they would attend to most.

    Keys are pooled: ``c[w] = mean(k[16 w : 16 w + 32])``. Each query head h of a key head attends to what is in its
    past, ``p[h] = softmax(scale * q[h, t] . c)``; the score of a block is the largest ``sum(p[h, w] for h)`` of all
    windows w that meet it. The first block and the local ones are always chosen. No parameters are added, and up to
    ``dense_below`` tokens attention is dense: the weights of a dense model go in as they are.

    Args:
      block, count, first, local, dense_below: see `Scorer`; in the paper 64 keys a block.
      pool_size: keys in a window, at most count * block.
      pool_stride: keys between the beginnings of two windows; divides pool_size and block.

    Raises:
      ValueError: see `Scorer`; a pool_size that is too large, or a pool_stride that does not divide.

    Example:
      >>> import jax, sparse_layers as sl
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 256, 2, 16))
      >>> sl.InfLLM(count=4, local=2, dense_below=0).select(q, k).ids[0, 255, 0, :3].tolist()  # the forced ones
      [0, 2, 3]

    References:
      Zhao et al. 2025, "InfLLM-V2: Dense-Sparse Switchable Attention" (arXiv 2509.24663).
    """

    block: int = 64
    count: int = 64
    first: int = 1
    local: int = 32
    dense_below: int = 8192
    pool_size: int = 32
    pool_stride: int = 16

    def __post_init__(self):
        super().__post_init__()
        for field in ("pool_size", "pool_stride"):
            checked(f"InfLLM: {field}", getattr(self, field), Positive)
        if self.pool_size > self.count * self.block:
            raise ValueError(f"InfLLM: pool_size must be at most count * block, got {self.pool_size}")
        for field in ("pool_size", "block"):
            if getattr(self, field) % self.pool_stride:
                raise ValueError(
                    f"InfLLM: pool_stride must divide {field}={getattr(self, field)}, got {self.pool_stride}"
                )

    @property
    def window(self) -> tuple[int, int]:
        return self.pool_size, self.pool_stride

    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        logits = products(query, pooled) * scale
        weights = jax.nn.softmax(logits, axis=-1, where=seen[:, :, None, None]).sum(3)
        # Windows that meet a block begin in it, or before it and end in it.
        before, inside = self.pool_size // self.pool_stride - 1, self.block // self.pool_stride
        ends = [(0, 0)] * 3 + [(before, inside - 1)]
        return jax.lax.reduce_window(
            weights, -jnp.inf, jax.lax.max, (1, 1, 1, before + inside), (1, 1, 1, inside), ends
        )
