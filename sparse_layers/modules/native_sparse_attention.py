"""`NativeSparseAttention`: an attention layer whose gates merge compressed, selected and sliding-window branches."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from ..arguments.checks import strict_kwargs
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.selection import Selection
from ..scorers import NSA
from .attention_fn import AttentionFn
from .native_sparse_cache import NSACache
from .native_sparse_core import BRANCHES, NativeSparseCore, branch_plans, make_attributes
from .options import PrefillOptions, StepOptions
from .rope import Rope, resolve_rope
from .settings import PROJECTIONS, check_stream, projections_with_bias, query_features, with_checked_settings


class NativeSparseAttention(nnx.Module):
    """The layer of native sparse attention (2025): ``out[t] = sum_c g[c, t] * attention(q[t], K[c], V[c])``.

    The branches c share queries. Each branch has its own projections of keys and values and, for each query head, a
    gate g, the sigmoid of a projection of the input:

    * *compressed*: windows of keys, each compressed to one key by a learned MLP. A query attends to windows that end
      before it (`Compressed`), and gets 0 without any.
    * *selected*: the key blocks that `NSA` selects by the attention of the compressed branch, one selection for all
      query heads of a key head. The selection has no gradient; compressed keys learn from their own attention.
    * *sliding*: a window of the latest keys.

    Rotary position embeddings rotate queries, and keys of the last two branches, by their positions. A compressed key
    has the position of its window's first token. The layer is causal.

    Args:
      num_heads, in_features, qkv_features, out_features, head_dim: as in `SparseSelfAttention`.
      num_kv_heads: number of key and value heads of each branch, a divisor of num_heads; defaults to num_heads.
      pattern: the sizes of windows and blocks: `NSA`, or its name, ``"nsa:count=8"``.
      seq_len: the longest input, in tokens.
      rope, rope_theta, scale, implementation, fwd_params, bwd_params, query_sharding: as there.
      cache_dtype: None, or "int8" or "float8_e4m3fn" for caches of the selected branch, which keeps all keys.
      use_bias: True if projections have biases, or the names of those that do, including "gate"; phi always has biases.
      dtype: dtype of the computation; None for that of inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the projections and of phi.
      kernel_init, bias_init: initializers of the projections of queries, keys, values and gates.
      out_kernel_init: initializer of the last projection; None for kernel_init.
      rngs: random number generators of the initial parameters.

    Attributes:
      pattern: the `NSA`.
      plans: the plans of the branches, by name.

    Raises:
      ValueError, TypeError, NotImplementedError: errors of `SparseSelfAttention`; a pattern that is not `NSA`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.NativeSparseAttention(4, 8, num_kv_heads=1, seq_len=4096, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 100, 8))).shape
      (1, 100, 8)

    References:
      Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention" (arXiv
      2502.11089).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    in_features: int
    out_features: int
    pattern: NSA
    seq_len: int
    rope: Rope | None
    cache_dtype: str | None
    compressed: AttentionFn
    selected: AttentionFn
    sliding: AttentionFn

    @strict_kwargs
    @with_checked_settings()
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        pattern: NSA | str = "nsa",
        seq_len: int,
        head_dim: int | None = None,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        scale: float | None = None,
        implementation: str | None = None,
        fwd_params: FwdParams | None = None,
        bwd_params: BwdParams | None = None,
        query_sharding: jax.sharding.PartitionSpec | None = None,
        cache_dtype: str | None = None,
        use_bias: bool | Collection[str] = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = nnx.initializers.zeros,
        out_kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        check_stream(rngs, "params", "the parameters")
        biases = projections_with_bias(use_bias, (*PROJECTIONS, "gate"))
        head_dim = query_features(num_heads, in_features, qkv_features, head_dim) // num_heads
        rope = resolve_rope(rope, rope_theta)
        kernels = {"scale": scale, "implementation": implementation, "query_sharding": query_sharding}
        kernels |= {"fwd_params": fwd_params, "bwd_params": bwd_params}
        sizes = num_heads, num_kv_heads, head_dim, pattern, seq_len
        attributes = make_attributes(*sizes, rope, dtype, cache_dtype, **kernels)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.in_features, self.out_features = in_features, out_features or in_features
        compression: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        shared: dict[str, Any] = compression | {"bias_init": bias_init}

        def projection(name: str, out: tuple[int, ...]) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(in_features, out, kernel_init=kernel_init, use_bias=name in biases, **shared)

        size, kv_shape, window = self.head_dim, (3, self.num_kv_heads, self.head_dim), self.pattern.window
        self.query = projection("query", (num_heads, size))
        self.key, self.value = projection("key", kv_shape), projection("value", kv_shape)
        self.compress_key, self.compress_value = (Compression(window, size, **compression) for _ in range(2))
        self.gate = projection("gate", (3, num_heads))
        self.out = nnx.LinearGeneral(
            (num_heads, size),
            self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            use_bias="out" in biases,
            **shared,
        )

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans of the branches for the longest input (cached); `NSA` selects within that of "selected"."""
        return branch_plans(self.pattern, self.seq_len, **{name: getattr(self, name) for name in BRANCHES})

    def __nnx_repr__(self) -> Iterator[reprlib.Object | reprlib.Attr]:
        yield reprlib.Object(type(self), same_line=True)
        for name in ("num_heads", "num_kv_heads", "head_dim", "in_features", "pattern", "seq_len"):
            yield reprlib.Attr(name, getattr(self, name))

    @strict_kwargs
    def __call__(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        order_ids: None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Applies attention to the inputs.

        Args:
          inputs: [..., T, F] with T <= seq_len and any number of leading batch axes, including none.
          segment_ids: int [..., T]; tokens attend within their own id only (packed documents), and to windows of one
            document only. For the selection each document should be contiguous, see `Scorer`. Negative ids are
            padding, which attends to nothing.
          order_ids: must be None, as this layer is causal.
          selection: the key blocks of the selected branch, with the leading axes of the inputs; None for the selection
            of `NSA`.
          positions: int [..., T] or [T], see `SparseSelfAttention`.

        Returns:
          [..., T, out_features] in the layer's dtype.

        Raises:
          ValueError, TypeError: see `SparseSelfAttention`.
          NotImplementedError: order_ids.
        """
        return self._core.attend(inputs, segment_ids, selection, positions, order_ids)

    @strict_kwargs
    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, NSACache]:
        """Applies attention to prompts [B, T, F], as `SparseSelfAttention.prefill` does, and returns (out, cache).

        Raises:
          ValueError, TypeError: see there.
          NotImplementedError: a chunk of prompts, positions, a bias, or a max_step above 1.
        """
        return self._core.prefill(inputs, lengths, **options)

    @strict_kwargs
    def decode_step(
        self, inputs: jax.Array, cache: NSACache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, NSACache]:
        """Applies attention to one new token [B, F], as `SparseSelfAttention.decode_step` does; returns (out, cache).

        It reads all compressed keys, the selected blocks and the sliding window. Each step compresses the last full
        window again, at the cost of projecting a few tokens.

        Raises:
          ValueError, TypeError: see there.
          NotImplementedError: positions, or a bias.
        """
        return self._core.decode_step(inputs, cache, position, **options)

    @property
    def _core(self) -> NativeSparseCore:
        fields = dataclasses.fields(NativeSparseCore)
        return NativeSparseCore(**{field.name: getattr(self, field.name) for field in fields})


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
