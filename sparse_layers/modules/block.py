"""`SparseTransformerBlock`: one residual block of attention and an MLP."""

from collections.abc import Callable, Collection
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer

from ..arguments.checks import strict_kwargs
from ..arguments.foreign import one_line
from ..ops.decoding.cache import KVCache
from ..ops.planning.selection import Selection
from ..scorers import as_nsa
from .attention import PrefillOptions, SparseSelfAttention
from .attention_fn import Pattern
from .native_sparse_attention import NativeSparseAttention
from .rope import Rope
from .settings import (
    ACTIVATIONS,
    GATED,
    PROJECTIONS,
    AttentionOptions,
    biased,
    check_features,
    check_order,
    check_settings,
    check_stream,
)

IN_BLOCK = (*PROJECTIONS, "mlp")  # what of a block may have biases


class SparseTransformerBlock(nnx.Module):
    """A residual block of attention and an MLP, at first that of the Sparse Transformer (Child et al. 2019, section 5).

    ``x + dropout(attention(norm(x)))``, then ``+ dropout(mlp(norm(.)))``; ``norm_placement`` and ``parallel`` say where
    later models have their norms, and what the MLP reads. The last projections of both branches start
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
      mlp: the function between the MLP's matrices, an array -> an array like it, or a name: "gelu" (the paper's
        x * sigmoid(1.702 x)), "gelu_tanh" (GPT-2), "gelu_exact" (GPT-NeoX), "relu" (OPT), "relu2" (its square,
        Nemotron); or of an MLP with a gate, f(gate(x)) * in(x): "swiglu" (f = silu, Llama) or "geglu" (f = GPT-2's
        gelu, Gemma).
      make_mlp: makes another MLP from rngs, ``lambda rngs: Experts(..., rngs=rngs)``: a module that maps [..., F] to
        [..., F]. mlp, mlp_features and biases of the MLP then mean nothing. Dropout of its own follows ``eval()``
        alone, not ``deterministic``.
      norm: "layer" or "rms".
      norm_epsilon: added to the variance in all norms, those of q and k among them.
      norm_placement: "pre", of what a branch reads (GPT-2, Llama); "post", of what it adds (OLMo 2), whose parameters
        are ``attention_out_norm`` and ``mlp_out_norm``; "sandwich", both (Gemma 2 and 3).
      parallel: whether the MLP reads what attention reads, x, and not its sum with attention's output (GPT-NeoX;
        GPT-J and PaLM, whose one norm is both of these).
      normalize_qk: see `SparseSelfAttention`; True stands for norms as the block's own, "layer" or "rms".
      dropout_rate: share of values dropped at the branches' ends; uses the ``dropout`` stream of rngs.
      use_bias: whether the projections of attention and MLP have biases, or the names of those that do: "query", "key",
        "value", "out" and "mlp".
      kernel_init, bias_init: initializers of all projections but the last ones of both branches.
      out_kernel_init: that of the last ones; None for the scaled default.
      remat: recompute the block in the backward pass instead of keeping its activations: same numbers, less memory.
      dtype: of the computation; None: from inputs and parameters.
      param_dtype: of the parameters.
      rngs: random number generators of parameters and dropout.
      rope, rope_theta: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention`: num_kv_heads, head_dim, use_sinks, ...; but for those
        that the block sets itself (in_features, out_features, decode).

    Raises:
      ValueError: an unknown mlp, norm or norm_placement, sizes that are no integers >= 1, flags that are no bools,
        dropout_rate outside [0, 1), more heads than features without head_dim, and `SparseSelfAttention`'s.
      TypeError: an unknown argument, and `SparseSelfAttention`'s.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> block = sl.SparseTransformerBlock(2, 8, pattern=sl.Causal(), seq_len=16, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
      >>> gemma = {"norm": "rms", "norm_placement": "sandwich", "normalize_qk": True, "mlp": "geglu", "use_bias": False}
      >>> gemma |= {"pattern": sl.Causal() & sl.Window(3), "seq_len": 16, "rope": sl.Rope(1e4)}
      >>> block = sl.SparseTransformerBlock(2, 8, **gemma, rngs=nnx.Rngs(0))  # a layer of Gemma 3 that has a window
      >>> block(jnp.ones((1, 16, 8)), positions=jnp.arange(16) % 8).shape  # two documents of 8 tokens
      (1, 16, 8)
      >>> near, rope = sl.Grid((4, 4), sl.Window(1, 1)), sl.Rope(theta=100.0, shape=(4, 4))  # 4 x 4 patches
      >>> encoder = sl.SparseTransformerBlock(2, 8, pattern=near, seq_len=16, rope=rope, rngs=nnx.Rngs(0))
      >>> patches = jnp.zeros((1, 16, 8)).at[0, 5].set(jnp.arange(8.0))  # what stands in row 1, column 1 ...
      >>> (encoder(patches) != 0).any(-1)[0].reshape(4, 4).astype(int).tolist()  # ... reaches its neighbours
      [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]

    References:
      Child, Gray, Radford, Sutskever: Generating Long Sequences with Sparse Transformers, 2019.
    """

    @strict_kwargs
    def __init__(
        self,
        num_heads: int,
        features: int,
        *,
        pattern: Pattern,
        seq_len: int,
        num_layers: int = 1,
        mlp_features: int | None = None,
        mlp: str | Callable[[jax.Array], jax.Array] = "gelu",
        make_mlp: Callable[[nnx.Rngs], Callable[[jax.Array], jax.Array]] | None = None,
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        norm_placement: str = "pre",
        parallel: bool = False,
        normalize_qk: bool | str = False,
        dropout_rate: float = 0.0,
        use_bias: bool | Collection[str] = True,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = nnx.initializers.zeros,
        out_kernel_init: Initializer | None = None,
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
            make_mlp=make_mlp,
            norm=norm,
            norm_epsilon=norm_epsilon,
            norm_placement=norm_placement,
            parallel=parallel,
            normalize_qk=normalize_qk,
            dropout_rate=dropout_rate,
            kernel_init=kernel_init,
            bias_init=bias_init,
            out_kernel_init=out_kernel_init,
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
        biases = biased(use_bias, IN_BLOCK)
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        if out_kernel_init is None:
            out_kernel_init = nnx.initializers.variance_scaling(1 / (2 * num_layers), "fan_in", "truncated_normal")
        # Which arguments a layer of attention has, it says itself.
        layer: Any = SparseSelfAttention
        qk_norm: dict[str, Any] = {"normalize_qk": normalize_qk} if normalize_qk else {}
        if as_nsa(pattern) is not None:
            layer = NativeSparseAttention
            biases |= {"gate"} if use_bias is True else set()
        elif normalize_qk:
            qk_norm = {"normalize_qk": norm if normalize_qk is True else normalize_qk, "norm_epsilon": norm_epsilon}

        def norm_of(placement: str) -> Any:
            has_norm = norm_placement in (placement, "sandwich")
            return make_norm(norm, features, epsilon=norm_epsilon, **shared) if has_norm else nnx.data(None)

        self.attention_norm, self.attention_out_norm = norm_of("pre"), norm_of("post")
        self.attention = layer(
            num_heads,
            features,
            pattern=pattern,
            seq_len=seq_len,
            rope=rope,
            rope_theta=rope_theta,
            use_bias=biases - {"mlp"},
            kernel_init=kernel_init,
            bias_init=bias_init,
            out_kernel_init=out_kernel_init,
            **shared,
            **qk_norm,
            **options,
        )
        self.mlp_norm, self.mlp_out_norm = norm_of("pre"), norm_of("post")
        self.mlp_in = self.mlp_gate = self.mlp_out = self.mlp_module = nnx.data(None)
        if make_mlp is None:
            hidden = 4 * features if mlp_features is None else mlp_features
            of_mlp = {"use_bias": "mlp" in biases, "bias_init": bias_init, **shared}
            self.mlp_in = nnx.Linear(features, hidden, kernel_init=kernel_init, **of_mlp)
            if mlp in GATED:
                self.mlp_gate = nnx.Linear(features, hidden, kernel_init=kernel_init, **of_mlp)
            self.mlp_out = nnx.Linear(hidden, features, kernel_init=out_kernel_init, **of_mlp)
        else:
            made = make_mlp(rngs)
            if not callable(made):
                raise TypeError(
                    f"make_mlp must make a module that maps [..., F] to the same, got {one_line(made)} of it"
                )
            self.mlp_module = nnx.data(made)
        self.features, self.mlp, self.parallel, self.remat = features, mlp, parallel, remat
        # Without dropout the block keeps no random state, so that its whole state is parameters.
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs if dropout_rate else None)

    @strict_kwargs
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Applies the block.

        Args:
          x: [..., T, features] with T <= seq_len.
          segment_ids: int [..., T], see `SparseSelfAttention`.
          selection: a `Selection`, see `SparseSelfAttention`.
          positions: int [..., T] or [T], see `SparseSelfAttention`.
          deterministic: True switches dropout off, False on; None: as ``train()`` / ``eval()`` set it (on at first).

        Returns:
          [..., T, features].

        Raises:
          ValueError: as `SparseSelfAttention`'s, or deterministic is no bool.
          TypeError: what is no array.
        """
        check_input(self.features, x, deterministic)
        return (_rematerialized if self.remat else forward)(self, x, segment_ids, deterministic, selection, positions)

    @strict_kwargs
    def prefill(
        self, x: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.prefill` for the block: [B, T, features] -> the same and the cache; no dropout."""
        check_input(self.features, x)
        attended, cache = self.attention.prefill(_normed(self.attention_norm, x), lengths, **options)
        return _rest(self, x, attended, True), cache

    @strict_kwargs
    def decode_step(
        self,
        x: jax.Array,
        cache: KVCache,
        position: jax.Array,
        *,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.decode_step` for the block: [B, features] -> the same and the cache; no dropout."""
        check_input(self.features, x, shape="[B, {}]")
        given: Any = {"selection": selection, "positions": positions}
        attended, cache = self.attention.decode_step(_normed(self.attention_norm, x), cache, position, **given)
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
    positions: jax.Array | None = None,
) -> jax.Array:
    """What a block computes, NNX, Linen or Haiku: its layers have the same names."""
    given: Any = {"segment_ids": segment_ids, "selection": selection, "positions": positions}
    attended = block.attention(_normed(block.attention_norm, x), **given)
    return _rest(block, x, attended, deterministic)


def _rest(block, x, attended, deterministic):
    """What comes after attention, token by token."""
    added = x + block.dropout(_normed(block.attention_out_norm, attended), deterministic=deterministic)
    normed = _normed(block.mlp_norm, x if block.parallel else added)
    if block.mlp_module is not None:
        made = block.mlp_module(normed)
    else:
        hidden = block.mlp_in(normed)
        gate = None if block.mlp_gate is None else block.mlp_gate(normed)
        made = block.mlp_out(activate(block.mlp, hidden, gate))
    return added + block.dropout(_normed(block.mlp_out_norm, made), deterministic=deterministic)


def _normed(norm, x):
    return x if norm is None else norm(x)


def activate(
    mlp: str | Callable[[jax.Array], jax.Array], hidden: jax.Array, gate: jax.Array | None = None
) -> jax.Array:
    """The hidden layer of an MLP of `SparseTransformerBlock`; ``gate`` is an array like hidden, of MLPs with a gate.

    Example:
      >>> import jax.numpy as jnp
      >>> activate("gelu", jnp.zeros(2)).tolist()
      [0.0, 0.0]
    """
    if isinstance(mlp, str):
        return ACTIVATIONS[mlp](hidden) if gate is None else GATED[mlp](gate) * hidden
    return mlp(hidden)


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
