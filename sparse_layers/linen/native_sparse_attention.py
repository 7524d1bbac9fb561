"""`NativeSparseAttention` for Linen."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, PrecisionLike

from ..arguments.checks import strict_kwargs
from ..modules.native_sparse_attention import NativeSparseAttention as NNXNativeSparseAttention
from ..modules.native_sparse_attention import branches, checked_nsa, fixed_parts
from ..modules.native_sparse_cache import NSACache
from ..modules.settings import PROJECTIONS, biased, check_features
from ..ops.planning.plan import Plan
from ..ops.planning.selection import Selection
from ..scorers import NSA
from .settings import OfOneSequence, around


class Compression(nn.Module):
    """The MLP that makes one key (or value) of each window, see that of NNX."""

    window: tuple[int, int]
    features: int
    dtype: Dtype | None
    param_dtype: Dtype
    precision: PrecisionLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, K, H], at least a window of tokens -> [B, windows, K, H]."""
        size, stride = self.window
        shared: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "precision": self.precision}
        inner = nn.Conv(self.features, (size,), stride, padding="VALID", name="inner", **shared)(x.swapaxes(1, 2))
        return nn.Dense(self.features, name="outer", **shared)(nn.gelu(inner)).swapaxes(1, 2)


@strict_kwargs
class NativeSparseAttention(OfOneSequence):
    """Native sparse attention, for Linen; parameters are those of `sparse_layers.NativeSparseAttention`.

    Compressed, selected and near keys, in three branches that gates merge. Names, shapes and numbers are those of the
    NNX layer; the features F of the input are those that it comes with.

    Args:
      num_heads: number of query heads N.
      pattern: the sizes of windows and blocks: `NSA`, or its name, ``"nsa:count=8"``; it is kept as `NSA`.
      seq_len: the longest input, in tokens.
      use_bias: whether projections have biases, or the names of those that do, "gate" among them.
      out_features, qkv_features, num_kv_heads, head_dim: see `sparse_layers.NativeSparseAttention`.
      rope, rope_theta, scale, dtype, param_dtype, precision: see there.
      implementation, fwd_params, bwd_params, query_sharding: see there.
      kernel_init, bias_init, out_kernel_init: see there.

    Raises:
      ValueError, TypeError, NotImplementedError: as `SparseSelfAttention`; a pattern that is not `NSA`.

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

    References:
      Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention" (arXiv
      2502.11089).
    """

    num_heads: int
    pattern: NSA | str = dataclasses.field(default="nsa", kw_only=True)
    out_features: int | None = dataclasses.field(default=None, kw_only=True)

    _with_biases = (*PROJECTIONS, "gate")

    @nn.nowrap
    def _resolve_pattern(self) -> None:
        self.pattern = checked_nsa(self.pattern)

    @property
    def plans(self) -> dict[str, Plan]:
        """The compiled patterns of the branches for the longest input (cached); within "selected", `NSA` chooses."""
        pattern = checked_nsa(self.pattern)
        fns: dict[str, Any] = branches(pattern, self.seq_len, **self._of(_KERNELS))
        return around(NNXNativeSparseAttention, pattern=pattern, seq_len=self.seq_len, **fns).plans

    @strict_kwargs
    def __call__(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Applies attention to the inputs, see `sparse_layers.NativeSparseAttention`.

        Args:
          inputs: [..., T, F] with T <= seq_len; any number of leading batch dimensions, also none.
          segment_ids: int [..., T]; tokens attend within their own id only. Negative ids are padding.
          selection: the key blocks of the selected branch; None for the choice of `NSA`.
          positions: int [..., T] or [T], see `sparse_layers.SparseSelfAttention`.

        Returns:
          [..., T, out_features] in the layer's dtype.

        Raises:
          ValueError, TypeError: as `SparseSelfAttention`'s.
        """
        return self._nnx_layer(inputs)(inputs, segment_ids=segment_ids, selection=selection, positions=positions)

    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Any
    ) -> tuple[jax.Array, NSACache]:
        """`SparseSelfAttention.prefill`: [B, T, F] -> ([B, T, out_features], the cache); lengths int [B]."""
        return self._nnx_layer(inputs).prefill(inputs, lengths, **options)

    def decode_step(
        self, inputs: jax.Array, cache: NSACache, position: jax.Array, **options: Any
    ) -> tuple[jax.Array, NSACache]:
        """`SparseSelfAttention.decode_step`: [B, F] -> ([B, out_features], the cache); position int [B]."""
        return self._nnx_layer(inputs).decode_step(inputs, cache, position, **options)

    @nn.nowrap
    def _of(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @nn.compact
    def _nnx_layer(self, inputs: jax.Array) -> NNXNativeSparseAttention:
        features = (0, *jnp.shape(inputs))[-1]
        check_features("inputs", inputs, "[..., T, features]", features)
        fixed = fixed_parts(in_features=features, **self._of(_SIZES + _KERNELS))
        heads, size, window = fixed["num_heads"], fixed["head_dim"], fixed["pattern"].window
        of_keys, biases = (3, fixed["num_kv_heads"], size), biased(self.use_bias, self._with_biases)
        shared = self._of(("dtype", "param_dtype", "precision"))

        def projection(name: str, out: Any, **options: Any) -> nn.Module:
            options = {"kernel_init": self.kernel_init, "bias_init": self.bias_init} | shared | options
            return nn.DenseGeneral(out, name=name, use_bias=name in biases, **options)

        return around(
            NNXNativeSparseAttention,
            **fixed,
            query=projection("query", (heads, size)),
            key=projection("key", of_keys),
            value=projection("value", of_keys),
            compress_key=Compression(window, size, name="compress_key", **shared),
            compress_value=Compression(window, size, name="compress_value", **shared),
            gate=projection("gate", (3, heads)),
            out=projection(
                "out", fixed["out_features"], axis=(-2, -1), kernel_init=self.out_kernel_init or self.kernel_init
            ),
        )


_SIZES = (
    *("num_heads", "num_kv_heads", "qkv_features", "head_dim", "out_features"),
    *("pattern", "seq_len", "rope", "rope_theta", "dtype"),
)
_KERNELS = "scale", "implementation", "fwd_params", "bwd_params", "query_sharding"
