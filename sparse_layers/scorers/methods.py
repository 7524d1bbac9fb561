"""Scorers of published methods: each is a formula and a few lines of code. A new method is a class here."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..arguments.checks import Natural, Positive, checked, strict_kwargs
from ..ops.kernels.select_gpu.score import Formula
from .base import Scorer, products


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class MoBA(Scorer, name="moba"):
    """Mixture of block attention: a query head selects the blocks whose mean key has the largest product with it.

    The score of block j is ``q[t] . mean(k[s] for s in block j)``, for blocks that end before the query. Its own block
    is always selected, and counts. If a block holds keys of two packed documents, the mean is that of the query's
    document. Attention is one softmax over the keys of all selected blocks. There are no parameters.

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
    formula: ClassVar[Formula | None] = Formula.PRODUCT

    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        return products(query, pooled).reshape(*query.shape[:3], pooled.shape[1])


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class MSA(Scorer, name="msa"):
    """MiniMax sparse attention: the query heads of a key head select blocks by a learned index.

    A layer has two more projections of its input, rotated like queries and keys: index queries i[t], one for each key
    head, and index keys j[s], one for all. The score of a block is the largest ``i[t] . j[s]`` of its keys. The query's
    own block is always selected.

    No gradient flows through a selection, so the index has a loss of its own. For a query and a key head it is
    ``KL(p || softmax(i[t] . j / sqrt(size)))`` over the selected keys, without the entropy of p, which has no gradient.
    Here p is the mean of ``softmax(scale * q[h, t] . k)`` over the heads h of the key head. The loss of a layer is the
    mean; add it to the loss of the model. Its gradient changes index_query and index_key alone.

    Each call of an NNX layer stores the loss in `IndexLoss`, except after ``eval()``. Such calls need NNX's transforms
    (``nnx.jit``, ``nnx.grad``, ...), or JAX's around functions that build the model from its state; after ``eval()``
    JAX's transforms are enough. A Linen layer stores it in the collection "losses", if that is mutable.

    Args:
      block, count, first, local, dense_below: see `Scorer`. With a large dense_below, attention is dense and the index
        learns from all keys: the paper's warm-up.
      index_size: features of an index query, even if they are rotated; 0 for the size of a head.

    Raises:
      ValueError: see `Scorer`, or an index_size below 0.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.SparseSelfAttention(2, 8, pattern="msa:block=16,count=2", seq_len=64, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 64, 8))).shape, layer.index_query.kernel.shape, layer.index_key.kernel.shape
      ((1, 64, 8), (8, 2, 4), (8, 1, 4))
      >>> sum(jax.tree.leaves(nnx.state(layer, sl.IndexLoss))).shape
      ()

    References:
      Lai et al. 2026, "MiniMax Sparse Attention" (arXiv 2606.13392).
    """

    index_size: int = 0

    per_query_head: ClassVar[bool] = True  # of the index, which has one for each key head
    formula: ClassVar[Formula | None] = Formula.LARGEST_PRODUCT

    def __post_init__(self):
        super().__post_init__()
        checked("MSA: index_size", self.index_size, Natural)

    def index_features(self, head_size: int) -> int:
        return self.index_size or head_size

    @property
    def window(self) -> tuple[int, int]:
        return 1, 1

    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        logits = products(query, pooled).reshape(*query.shape[:3], pooled.shape[1])
        logits = jnp.where(seen[:, :, None], logits, -jnp.inf)
        logits = jnp.pad(logits, [(0, 0)] * 3 + [(0, -logits.shape[3] % self.block)], constant_values=-jnp.inf)
        return logits.reshape(*logits.shape[:3], -1, self.block).max(-1)


@dataclasses.dataclass(frozen=True)
class _Windowed(Scorer):
    """Base of methods that score overlapping windows of keys by the attention weights of a key head's query heads."""

    block: int = 64
    first: int = 1
    pool_size: int = 32
    pool_stride: int = 16

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        for field in ("pool_size", "pool_stride"):
            checked(f"{name}: {field}", getattr(self, field), Positive)
        if self.pool_size > self.block:
            raise ValueError(f"{name}: pool_size must be at most block={self.block}, got {self.pool_size}")
        for field in ("pool_size", "block"):
            if getattr(self, field) % self.pool_stride:
                raise ValueError(
                    f"{name}: pool_stride must divide {field}={getattr(self, field)}, got {self.pool_stride}"
                )

    @property
    def window(self) -> tuple[int, int]:
        return self.pool_size, self.pool_stride

    @property
    def strides(self) -> tuple[int, int]:
        """Number of windows that begin before a block and end in it, and of windows that begin in it."""
        return self.pool_size // self.pool_stride - 1, self.block // self.pool_stride

    def weights(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        """Returns ``sum(softmax(scale * q[h] . pooled) for h)`` over the query heads h of a key head: [B, R, K, W]."""
        logits = products(query, pooled) * scale
        return jax.nn.softmax(logits, axis=-1, where=seen[:, :, None, None]).sum(3)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class InfLLM(_Windowed, name="infllm"):
    """InfLLM-V2: the query heads of a key head select the blocks whose pooled keys get the most attention.

    Keys are pooled: ``c[w] = mean(k[16 w : 16 w + 32])``. Each query head h of a key head attends to windows in its
    past, ``p[h] = softmax(scale * q[h, t] . c)``. The score of a block is the largest ``sum(p[h, w] for h)`` of all
    windows w that overlap it. The first block and the local ones are always selected. There are no parameters, and
    attention is dense up to ``dense_below`` tokens, so weights of a dense model can be loaded unchanged.

    Args:
      block, count, first, local, dense_below: see `Scorer`; in the paper 64 keys a block.
      pool_size: keys in a window, at most block.
      pool_stride: keys between the beginnings of two windows; divides pool_size and block.

    Raises:
      ValueError: see `Scorer`; pool_size is too large, or pool_stride does not divide it and block.

    Example:
      >>> import jax, sparse_layers as sl
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 256, 2, 16))
      >>> sl.InfLLM(count=4, local=2, dense_below=0).select(q, k).ids[0, 255, 0, :3].tolist()  # the forced ones
      [0, 2, 3]

    References:
      Zhao et al. 2025, "InfLLM-V2: Dense-Sparse Switchable Attention" (arXiv 2509.24663).
    """

    count: int = 64
    local: int = 32
    dense_below: int = 8192

    formula: ClassVar[Formula | None] = Formula.LARGEST_WEIGHT

    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        before, inside = self.strides
        weights, ends = self.weights(query, pooled, seen, scale), [(0, 0)] * 3 + [(before, inside - 1)]
        return jax.lax.reduce_window(
            weights, -jnp.inf, jax.lax.max, (1, 1, 1, before + inside), (1, 1, 1, inside), ends
        )


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class NSA(_Windowed, name="nsa"):
    """Native sparse attention: the query heads of a key head select blocks by the weights of compressed keys.

    It is the pattern of `NativeSparseAttention`, with all its sizes. That layer compresses keys to c[w], one for each
    window ``16 w .. 16 w + 31``. Each query head h of a key head attends to windows in its past,
    ``p[h] = softmax(scale * q[h, t] . c)``. The score of block j of 64 keys is
    ``sum(p[h, 4 j + m - n] for h, m in 0..3, n in 0..1)``: for each 16 keys in the block, the weights of the windows
    that hold them. So a window counts by its overlap with the block. (The paper's equation 9 counts blocks and windows
    from 1, hence its ``- m``.) The first block and two local ones are always selected.

    Args:
      block, count, first, local, dense_below: see `Scorer`.
      pool_size: keys in a window, at most block.
      pool_stride: keys between the beginnings of two windows; divides pool_size and block.
      sliding: keys in the sliding window of the third branch, the query's own included.

    Raises:
      ValueError: see `Scorer`; pool_size is too large, pool_stride does not divide it and block, or sliding is below 1.

    Example:
      >>> import sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.NativeSparseAttention(2, 8, pattern=sl.NSA(count=8), seq_len=1024, rngs=nnx.Rngs(0))
      >>> layer.pattern.window, layer.pattern.selects(512), layer.pattern.selects(1024)
      ((32, 16), False, True)

    References:
      Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention" (arXiv
      2502.11089).
    """

    local: int = 2
    sliding: int = 512

    formula: ClassVar[Formula | None] = Formula.TOTAL_WEIGHT

    def __post_init__(self):
        super().__post_init__()
        checked("NSA: sliding", self.sliding, Positive)

    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        before, inside = self.strides

        def sums(x: jax.Array, size: int, step: int, ends: tuple[int, int]) -> jax.Array:
            shape, strides = (1, 1, 1, size), (1, 1, 1, step)
            return jax.lax.reduce_window(x, 0.0, jax.lax.add, shape, strides, [(0, 0)] * 3 + [ends])

        stride_scores = sums(self.weights(query, pooled, seen, scale), before + 1, 1, (before, before))
        return sums(stride_scores, inside, inside, (0, inside - 1))
