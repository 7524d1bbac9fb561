"""`SparseTransformerBlock`: one pre-activation residual block."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from ..masks.options import own_keywords
from ..ops.decoding.cache import KVCache
from ..ops.planning.selection import Selection
from ..scorers import as_nsa
from .attention import SparseSelfAttention
from .attention_fn import Pattern
from .native_sparse_attention import NativeSparseAttention
from .rope import Rope
from .settings import AttentionOptions, check_features, check_order, check_settings, check_stream


class SparseTransformerBlock(nnx.Module):
    """The pre-activation residual block of the Sparse Transformer (Child et al. 2019, section 5).

    ``x + dropout(attention(norm(x)))``, then ``+ dropout(mlp(norm(.)))``. The last projections of both branches start
    1/sqrt(2 * num_layers) times smaller than Flax's default, so that the residual stream of the whole stack keeps its
    size; dropout acts at the two branches' ends only.

    The block is causal if its pattern is. With one that looks both ways, and `Rope` for coordinates, it is a block of
    an encoder, of images or videos, say; `prefill` refuses such a pattern, as tokens to come would change what is kept.

    Args:
      num_heads: number of query heads.
      features: features F of the residual stream.
      pattern, seq_len: see `SparseSelfAttention`; `NSA`, or its name, makes the attention `NativeSparseAttention`.
      num_layers: blocks in the whole stack (scales the initial output projections).
      mlp_features: hidden features of the MLP; defaults to 4 * features.
      mlp: "gelu" (the paper's x * sigmoid(1.702 x)), "gelu_tanh" (GPT-2's) or "swiglu" (silu(gate(x)) * in(x)).
      norm: "layer" or "rms".
      norm_epsilon: added to the variance in both norms.
      dropout_rate: share of values dropped at the branches' ends; uses the ``dropout`` stream of rngs.
      use_bias: whether attention and MLP projections have biases.
      remat: recompute the block in the backward pass instead of keeping its activations: same numbers, less memory.
      dtype: of the computation; None: from inputs and parameters.
      param_dtype: of the parameters.
      rngs: random number generators of parameters and dropout.
      rope, rope_theta: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention`: num_kv_heads, head_dim, normalize_qk, use_sinks, ...; but
        for those that the block sets itself (in_features, out_features, out_kernel_init, decode).

    Raises:
      ValueError: an unknown mlp or norm, sizes that are no integers >= 1, flags that are no bools, dropout_rate outside
        [0, 1), more heads than features without head_dim, and `SparseSelfAttention`'s.
      TypeError: an unknown argument, and `SparseSelfAttention`'s.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> block = sl.SparseTransformerBlock(2, 8, pattern=sl.Causal(), seq_len=16, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
      >>> near, rope = sl.Grid((4, 4), sl.Window(1, 1)), sl.Rope(theta=100.0, shape=(4, 4))  # 4 x 4 patches
      >>> encoder = sl.SparseTransformerBlock(2, 8, pattern=near, seq_len=16, rope=rope, rngs=nnx.Rngs(0))
      >>> patches = jnp.zeros((1, 16, 8)).at[0, 5].set(jnp.arange(8.0))  # what stands in row 1, column 1 ...
      >>> (encoder(patches) != 0).any(-1)[0].reshape(4, 4).astype(int).tolist()  # ... reaches its neighbours
      [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]

    References:
      Child, Gray, Radford, Sutskever: Generating Long Sequences with Sparse Transformers, 2019.
    """

    @own_keywords
    def __init__(
        self,
        num_heads: int,
        features: int,
        *,
        pattern: Pattern,
        seq_len: int,
        num_layers: int = 1,
        mlp_features: int | None = None,
        mlp: str = "gelu",
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        remat: bool = False,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
        **options: Unpack[AttentionOptions],
    ):
        check_settings(
            num_heads=num_heads,
            features=features,
            num_layers=num_layers,
            mlp_features=mlp_features,
            mlp=mlp,
            norm=norm,
            norm_epsilon=norm_epsilon,
            dropout_rate=dropout_rate,
            use_bias=use_bias,
            remat=remat,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
            **options,
        )
        check_order(num_heads, features, options.get("head_dim"))
        check_stream(rngs, "params", "the parameters")
        if dropout_rate:
            check_stream(rngs, "dropout", f"dropout_rate={dropout_rate}")
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        out_init = nnx.initializers.variance_scaling(1 / (2 * num_layers), "fan_in", "truncated_normal")
        hidden = 4 * features if mlp_features is None else mlp_features
        self.attention_norm = make_norm(norm, features, epsilon=norm_epsilon, **shared)
        # Which arguments a layer of attention has, it says itself.
        layer: Any = SparseSelfAttention if as_nsa(pattern) is None else NativeSparseAttention
        self.attention = layer(
            num_heads,
            features,
            pattern=pattern,
            seq_len=seq_len,
            rope=rope,
            rope_theta=rope_theta,
            use_bias=use_bias,
            out_kernel_init=out_init,
            **shared,
            **options,
        )
        self.mlp_norm = make_norm(norm, features, epsilon=norm_epsilon, **shared)
        self.mlp_in = nnx.Linear(features, hidden, use_bias=use_bias, **shared)
        self.mlp_gate = nnx.Linear(features, hidden, use_bias=use_bias, **shared) if mlp == "swiglu" else nnx.data(None)
        self.mlp_out = nnx.Linear(hidden, features, use_bias=use_bias, kernel_init=out_init, **shared)
        self.features = features
        # Without dropout the block keeps no random state, so that its whole state is parameters.
        self.mlp = mlp
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs if dropout_rate else None)
        self.remat = remat

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Applies the block.

        Args:
          x: [..., T, features] with T <= seq_len.
          segment_ids: int [..., T], see `SparseSelfAttention`.
          selection: a `Selection`, see `SparseSelfAttention`.
          deterministic: True switches dropout off, False on; None: as ``train()`` / ``eval()`` set it (on at first).

        Returns:
          [..., T, features].

        Raises:
          ValueError: as `SparseSelfAttention`'s, or deterministic is no bool.
          TypeError: what is no array.
        """
        check_input(self.features, x, deterministic)
        return (_rematerialized if self.remat else forward)(self, x, segment_ids, deterministic, selection)

    def prefill(
        self, x: jax.Array, lengths: jax.Array | None = None, *, selection: Selection | None = None
    ) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.prefill` for the block: [B, T, features] -> the same and the cache; no dropout."""
        check_input(self.features, x)
        attended, cache = self.attention.prefill(self.attention_norm(x), lengths, selection=selection)
        return _rest(self, x, attended, True), cache

    def decode_step(
        self, x: jax.Array, cache: KVCache, position: jax.Array, *, selection: Selection | None = None
    ) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.decode_step` for the block: [B, features] -> the same and the cache; no dropout."""
        check_input(self.features, x, shape="[B, {}]")
        attended, cache = self.attention.decode_step(self.attention_norm(x), cache, position, selection=selection)
        return _rest(self, x, attended, True), cache


def check_input(features: int, x: jax.Array, deterministic: bool | None = None, shape: str = "[..., T, {}]") -> None:
    """Refuses what a block, NNX, Linen or Haiku, is not made for, in its own words and before its norm fails on it.

    Raises:
      ValueError, TypeError: see `SparseTransformerBlock.__call__`.
    """
    check_features("x", x, shape.format(features), features)
    check_settings(deterministic=deterministic)


def forward(
    block: Any,
    x: jax.Array,
    segment_ids: jax.Array | None,
    deterministic: bool | None,
    selection: Selection | None = None,
) -> jax.Array:
    """What a block computes, NNX, Linen or Haiku: its layers have the same names."""
    attended = block.attention(block.attention_norm(x), segment_ids=segment_ids, selection=selection)
    return _rest(block, x, attended, deterministic)


def _rest(block, x, attended, deterministic):
    """What comes after attention, token by token."""
    x = x + block.dropout(attended, deterministic=deterministic)
    normed = block.mlp_norm(x)
    hidden = block.mlp_in(normed)
    gate = None if block.mlp_gate is None else block.mlp_gate(normed)
    return x + block.dropout(block.mlp_out(activate(block.mlp, hidden, gate)), deterministic=deterministic)


def activate(mlp: str, hidden: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """The hidden layer of an MLP of `SparseTransformerBlock`; ``gate`` is an array like hidden, for "swiglu" only.

    Example:
      >>> import jax.numpy as jnp
      >>> activate("gelu", jnp.zeros(2)).tolist()
      [0.0, 0.0]
    """
    if gate is not None:
        return nnx.silu(gate) * hidden
    return nnx.gelu(hidden, approximate=True) if mlp == "gelu_tanh" else hidden * nnx.sigmoid(1.702 * hidden)


_rematerialized = nnx.remat(forward, static_argnums=(3,))


def make_norm(norm: str, features: int, **options: Any) -> nnx.LayerNorm | nnx.RMSNorm:
    """The normalisation called "layer" or "rms" over ``features`` features; options are Flax's.

    Raises:
      ValueError: an unknown name.

    Example:
      >>> from flax import nnx
      >>> type(make_norm("rms", 8, rngs=nnx.Rngs(0))).__name__
      'RMSNorm'
    """
    check_settings(norm=norm)
    return (nnx.LayerNorm if norm == "layer" else nnx.RMSNorm)(features, **options)
