"""`NativeSparseAttention` for Linen: an attention layer whose gates merge three branches."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, PrecisionLike

from ..arguments.checks import strict_kwargs
from ..modules.native_sparse_cache import NSACache
from ..modules.native_sparse_core import NativeSparseCore, branch_plans, checked_nsa, make_attributes, make_branches
from ..modules.options import PrefillOptions, StepOptions
from ..modules.rope import resolve_rope
from ..modules.settings import PROJECTIONS, check_features, projections_with_bias, query_features
from ..ops.planning.plan import Plan
from ..ops.planning.selection import Selection
from ..scorers import NSA
from .settings import SelfAttentionSettings


class Compression(nn.Module):
    """The MLP that compresses each window of keys (or values) to one; that of NNX documents it."""

    window: tuple[int, int]
    features: int
    dtype: Dtype | None
    param_dtype: Dtype
    precision: PrecisionLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns compressed windows, [B, windows, K, H], of keys [B, T, K, H] with T >= size."""
        size, stride = self.window
        shared: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "precision": self.precision}
        inner = nn.Conv(self.features, (size,), stride, padding="VALID", name="inner", **shared)(x.swapaxes(1, 2))
        return nn.Dense(self.features, name="outer", **shared)(nn.gelu(inner)).swapaxes(1, 2)


@strict_kwargs
class NativeSparseAttention(SelfAttentionSettings):
    """The layer of native sparse attention, for Linen; parameters are those of `sparse_layers.NativeSparseAttention`.

    Gates merge three branches: compressed keys, selected keys and a sliding window. Names, shapes and numbers are those
    of the NNX layer; the input sets its features F.

    Args:
      num_heads: number of query heads N.
      pattern: the sizes of windows and blocks: `NSA`, or its name, ``"nsa:count=8"``, which becomes `NSA`.
      seq_len: the longest input, in tokens.
      use_bias: True if projections have biases, or the names of those that do, including "gate".
      out_features, qkv_features, num_kv_heads, head_dim: see `sparse_layers.NativeSparseAttention`.
      rope, rope_theta, scale, dtype, param_dtype, precision: see there.
      implementation, fwd_params, bwd_params, query_sharding, cache_dtype: see there.
      kernel_init, bias_init, out_kernel_init: see there.

    Raises:
      ValueError, TypeError, NotImplementedError: errors of `SparseSelfAttention`; a pattern that is not `NSA`.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from sparse_layers import linen
      >>> layer = linen.NativeSparseAttention(4, num_kv_heads=1, seq_len=4096)
      >>> x = jnp.ones((1, 100, 8))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> variables["params"]["key"]["kernel"].shape
      (8, 3, 1, 2)
      >>> layer.apply(variables, x).shape
      (1, 100, 8)
    """

    num_heads: int
    pattern: NSA | str = dataclasses.field(default="nsa", kw_only=True)
    out_features: int | None = dataclasses.field(default=None, kw_only=True)
    cache_dtype: str | None = dataclasses.field(default=None, kw_only=True)

    _bias_names = (*PROJECTIONS, "gate")

    @nn.nowrap
    def _resolve_pattern(self) -> None:
        self.pattern = checked_nsa(self.pattern)

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans of the branches for the longest input (cached); `NSA` selects within that of "selected"."""
        pattern = checked_nsa(self.pattern)
        fns: dict[str, Any] = make_branches(pattern, self.seq_len, **self._attributes(*_KERNELS))
        return branch_plans(pattern, self.seq_len, **fns)

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
        """Applies attention to inputs [..., T, F], and returns [..., T, out_features] in the layer's dtype.

        A call of `sparse_layers.NativeSparseAttention` documents arguments and errors.
        """
        return self._core(inputs).attend(inputs, segment_ids, selection, positions, order_ids)

    @strict_kwargs
    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, NSACache]:
        """Applies attention to prompts [B, T, F] of these lengths, and returns (out, cache)."""
        return self._core(inputs).prefill(inputs, lengths, **options)

    @strict_kwargs
    def decode_step(
        self, inputs: jax.Array, cache: NSACache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, NSACache]:
        """Applies attention to one new token [B, F] of each sequence, and returns (out, cache)."""
        return self._core(inputs).decode_step(inputs, cache, position, **options)

    @nn.nowrap
    def _attributes(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @nn.compact
    def _core(self, inputs: jax.Array) -> NativeSparseCore:
        features, heads = (0, *jnp.shape(inputs))[-1], self.num_heads
        check_features("inputs", inputs, "[..., T, features]", features)
        size = query_features(heads, features, self.qkv_features, self.head_dim) // heads
        rope = resolve_rope(self.rope, self.rope_theta)
        pattern, kernels = checked_nsa(self.pattern), self._attributes(*_KERNELS)
        sizes = heads, self.num_kv_heads, size, pattern, self.seq_len
        attributes = make_attributes(*sizes, rope, self.dtype, self.cache_dtype, **kernels)
        kv_shape = 3, attributes["num_kv_heads"], size
        out_features = features if self.out_features is None else self.out_features
        biases = projections_with_bias(self.use_bias, self._bias_names)
        shared = self._attributes("dtype", "param_dtype", "precision")

        def projection(name: str, out: Any, **options: Any) -> nn.Module:
            options = {"kernel_init": self.kernel_init, "bias_init": self.bias_init} | shared | options
            return nn.DenseGeneral(out, name=name, use_bias=name in biases, **options)

        return NativeSparseCore(
            **attributes,
            in_features=features,
            out_features=out_features,
            query=projection("query", (heads, size)),
            key=projection("key", kv_shape),
            value=projection("value", kv_shape),
            compress_key=Compression(pattern.window, size, name="compress_key", **shared),
            compress_value=Compression(pattern.window, size, name="compress_value", **shared),
            gate=projection("gate", (3, heads)),
            out=projection("out", out_features, axis=(-2, -1), kernel_init=self.out_kernel_init or self.kernel_init),
        )


_KERNELS = "scale", "implementation", "fwd_params", "bwd_params", "query_sharding"
