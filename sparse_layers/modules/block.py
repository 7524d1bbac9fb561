"""`SparseTransformerBlock`: a residual block of attention and an MLP."""

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
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.selection import Selection
from ..scorers import as_nsa
from .activations import GATED_ACTIVATIONS
from .attention import SparseSelfAttention
from .attention_fn import Pattern
from .block_core import BlockCore, apply_block, check_block_input, norm_positions
from .experts import Experts
from .mixer import Mixer, MixerLayer
from .mixture import MixtureOfExperts, Mlp
from .native_sparse_attention import NativeSparseAttention
from .options import AttentionOptions, PrefillOptions, StepOptions
from .relative_bias import RelativeBias
from .rope import Rope
from .settings import (
    BLOCK_PROJECTIONS,
    check_order,
    check_stream,
    projections_with_bias,
    resolve_qk_norm,
    with_checked_settings,
)


class SparseTransformerBlock(nnx.Module):
    """A residual block of attention and an MLP; the default is that of the Sparse Transformer (Child et al. 2019).

    ``x + dropout(attention(norm(x)))``, then ``+ dropout(mlp(norm(.)))``. ``norm_placement`` and ``parallel`` select
    the norms and the MLP's input of later models. The last projections of both branches start at 1/sqrt(2 * num_layers)
    of Flax's default, so that the residual stream of the whole stack keeps its size. Dropout acts at the ends of the
    two branches.

    The block is causal if its pattern is. With a bidirectional pattern, and `Rope` for coordinates, it is a block of an
    encoder, of images or videos for example. `prefill` refuses such a pattern, as later tokens would change the cache.

    Args:
      num_heads: number of query heads.
      features: features F of the residual stream.
      pattern, seq_len: see `SparseSelfAttention`; `NSA`, or its name, selects `NativeSparseAttention`,
        and a `Mixer` a layer of your own.
      num_layers: number of blocks in the whole stack, which scales the initial output projections.
      mlp_features: hidden features of the MLP; defaults to 4 * features.
      mlp: the activation, a function of an array, or a name: "gelu" (the paper's x * sigmoid(1.702 x)), "gelu_tanh"
        (GPT-2), "gelu_exact" (GPT-NeoX), "relu" (OPT), "relu2" (its square, Nemotron); or of a gated MLP,
        f(gate(x)) * in(x): "swiglu" (f = silu, Llama), "geglu" (f = GPT-2's gelu, Gemma) or "clamped_swiglu" (gpt-oss);
        or a `MixtureOfExperts`.
      make_mlp: a function that makes another MLP from rngs, ``lambda rngs: Experts(..., rngs=rngs)``: a module that
        maps [..., F] to [..., F]. mlp, mlp_features and biases of the MLP then have no effect. Its own dropout follows
        ``eval()`` alone, not ``deterministic``.
      norm: "layer", "layer_no_bias" (Command R) or "rms".
      norm_epsilon: added to the variance in all norms, including those of q and k.
      norm_placement: "pre", norms of branch inputs (GPT-2, Llama); "post", norms of branch outputs (OLMo 2), with
        parameters ``attention_out_norm`` and ``mlp_out_norm``; "sandwich", both (Gemma 2 and 3).
      parallel: True if the MLP reads x, as attention does, and not its sum with attention's output (GPT-NeoX);
        "shared_norm" if it reads attention's norm of x, without a norm of its own (GPT-J, PaLM, Command R).
      residual_scale: factor of the outputs of attention and MLP before they are added (Granite); None for 1.
      normalize_qk: see `SparseSelfAttention`; True stands for the kind of the block's norms, "layer" or "rms".
      dropout_rate: share of values to drop at the ends of the branches, with the ``dropout`` stream of rngs.
      use_bias: True if the projections of attention and MLP have biases, or the names of those that do: "query", "key",
        "value", "out" and "mlp".
      kernel_init, bias_init: initializers of all projections except the last ones of both branches.
      out_kernel_init: initializer of the last ones; None for the scaled default.
      remat: True recomputes the block in the backward pass instead of keeping its activations.
      dtype: dtype of the computation; None for that of inputs and parameters.
      param_dtype: dtype of the parameters.
      rngs: random number generators of parameters and dropout.
      rope, rope_theta, relative_bias: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention`: num_kv_heads, head_dim, use_sinks, gate_output,
        ...; except those that the block sets itself (in_features, out_features, decode).

    Raises:
      ValueError: an unknown mlp, norm or norm_placement, sizes that are not integers >= 1, flags that are not bools,
        dropout_rate outside [0, 1), more heads than features without head_dim, and errors of `SparseSelfAttention`.
      TypeError: an unknown argument, and errors of `SparseSelfAttention`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> block = sl.SparseTransformerBlock(2, 8, pattern=sl.Causal(), seq_len=16, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
      >>> gemma = {"norm": "rms", "norm_placement": "sandwich", "normalize_qk": True, "mlp": "geglu", "use_bias": False}
      >>> gemma |= {"pattern": sl.Causal() & sl.Window(3), "seq_len": 16, "rope": sl.Rope(1e4)}
      >>> block = sl.SparseTransformerBlock(2, 8, **gemma, rngs=nnx.Rngs(0))  # a layer of Gemma 3 with a window
      >>> block(jnp.ones((1, 16, 8)), positions=jnp.arange(16) % 8).shape  # two documents of 8 tokens
      (1, 16, 8)
      >>> window, rope = sl.Grid((4, 4), sl.Window(1, 1)), sl.Rope(theta=100.0, shape=(4, 4))  # 4 x 4 patches
      >>> encoder = sl.SparseTransformerBlock(2, 8, pattern=window, seq_len=16, rope=rope, rngs=nnx.Rngs(0))
      >>> patches = jnp.zeros((1, 16, 8)).at[0, 5].set(jnp.arange(8.0))  # the patch in row 1, column 1 ...
      >>> (encoder(patches) != 0).any(-1)[0].reshape(4, 4).astype(int).tolist()  # ... reaches its neighbours
      [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]

    References:
      Child, Gray, Radford, Sutskever: Generating Long Sequences with Sparse Transformers, 2019.
    """

    @strict_kwargs
    @with_checked_settings()
    def __init__(
        self,
        num_heads: int,
        features: int,
        *,
        pattern: Pattern | Mixer,
        seq_len: int,
        num_layers: int = 1,
        mlp_features: int | None = None,
        mlp: Mlp = "gelu",
        make_mlp: Callable[[nnx.Rngs], Callable[[jax.Array], jax.Array]] | None = None,
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        norm_placement: str = "pre",
        parallel: bool | str = False,
        residual_scale: float | None = None,
        normalize_qk: bool | str = False,
        dropout_rate: float = 0.0,
        use_bias: bool | Collection[str] = True,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = nnx.initializers.zeros,
        out_kernel_init: Initializer | None = None,
        remat: bool = False,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        relative_bias: RelativeBias | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
        **options: Unpack[AttentionOptions],
    ):
        check_order(num_heads, features, options.get("head_dim"))
        check_stream(rngs, "params", "the parameters")
        if dropout_rate:
            check_stream(rngs, "dropout", f"dropout_rate={dropout_rate}")
        biases = projections_with_bias(use_bias, BLOCK_PROJECTIONS)
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        out_init = out_kernel_init or nnx.initializers.variance_scaling(0.5 / num_layers, "fan_in", "truncated_normal")
        is_nsa = as_nsa(pattern) is not None
        inits = {"kernel_init": kernel_init, "bias_init": bias_init, "out_kernel_init": out_init}
        qk_norm = _qk_norm_options(is_nsa, normalize_qk, norm, norm_epsilon)

        def branch_norm(is_present: bool) -> Any:
            return make_norm(norm, features, epsilon=norm_epsilon, **shared) if is_present else nnx.data(None)

        attention, mlp_input, post = norm_positions(norm_placement, parallel)
        self.attention_norm, self.attention_out_norm = branch_norm(attention), branch_norm(post)
        with_bias = biases - {"mlp"} | ({"gate"} if is_nsa and use_bias is True else set())
        settings = {"rope": rope, "rope_theta": rope_theta, "use_bias": with_bias, "seq_len": seq_len}
        settings |= inits | shared | qk_norm | ({} if relative_bias is None else {"relative_bias": relative_bias})
        self.attention = _make_attention(pattern, num_heads, features, **settings, **options)
        self.mlp_norm, self.mlp_out_norm = branch_norm(mlp_input), branch_norm(post)
        self.features, self.mlp, self.parallel, self.remat = features, mlp, parallel, remat
        self.residual_scale = residual_scale
        module = None if make_mlp is None else _checked_module(make_mlp(rngs))
        mlp_options = {"use_bias": "mlp" in biases, "bias_init": bias_init, **shared}
        self._make_mlp(module, mlp_features or 4 * features, mlp_options, kernel_init, out_init)
        # Without dropout the block has no random state: its whole state is parameters.
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs if dropout_rate else None)

    def _make_mlp(
        self, module: Any, hidden: int, options: dict[str, Any], init: Initializer, out_init: Initializer
    ) -> None:
        """Sets the user's module for the MLP, or makes its experts, or its projections; ``options`` are Flax's."""
        self.mlp_in = self.mlp_gate = self.mlp_out = self.experts = nnx.data(None)
        self.mlp_module = nnx.data(module)
        if module is None and isinstance(self.mlp, MixtureOfExperts):
            sizes = self.features, self.mlp.features or hidden
            self.experts = Experts(self.mlp, *sizes, kernel_init=init, out_kernel_init=out_init, **options)
        elif module is None:
            self.mlp_in = nnx.Linear(self.features, hidden, kernel_init=init, **options)
            if self.mlp in GATED_ACTIVATIONS:
                self.mlp_gate = nnx.Linear(self.features, hidden, kernel_init=init, **options)
            self.mlp_out = nnx.Linear(hidden, self.features, kernel_init=out_init, **options)

    @strict_kwargs
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        order_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        bias: DistanceBias | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Applies the block.

        Args:
          x: [..., T, features] with T <= seq_len.
          segment_ids, order_ids, selection, positions, bias: see `SparseSelfAttention`.
          deterministic: True switches dropout off, False on; None follows ``train()`` and ``eval()`` (initially on).

        Returns:
          [..., T, features].

        Raises:
          ValueError: see `SparseSelfAttention`; a deterministic that is not a bool.
          TypeError: an argument that is not an array.
        """
        ids = {"segment_ids": segment_ids, "order_ids": order_ids}
        check_block_input(self.features, x, deterministic, ids=ids)
        options = {**ids, "selection": selection, "positions": positions, "bias": bias}
        return (_apply_with_remat if self.remat else apply_block)(self, x, deterministic, options)

    @strict_kwargs
    def prefill(
        self, x: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies `SparseSelfAttention.prefill` and the MLP to [B, T, features]; returns (out, cache). No dropout."""
        return BlockCore.of(self).prefill(x, lengths, **options)

    @strict_kwargs
    def decode_step(
        self, x: jax.Array, cache: KVCache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies `SparseSelfAttention.decode_step` and the MLP to [B, features]; returns (out, cache). No dropout."""
        return BlockCore.of(self).decode_step(x, cache, position, **options)


_apply_with_remat = nnx.remat(apply_block, static_argnums=(2,))


def _make_attention(pattern: Any, num_heads: int, features: int, **settings: Any) -> Any:
    """Makes the layer of a pattern. It refuses settings that it does not have, except that of a `Mixer`."""
    if isinstance(pattern, Mixer):
        return MixerLayer(pattern, settings["rngs"])
    layer = SparseSelfAttention if as_nsa(pattern) is None else NativeSparseAttention
    return layer(num_heads, features, pattern=pattern, **settings)


def _qk_norm_options(is_nsa: bool, normalize_qk: bool | str, norm: str, norm_epsilon: float) -> dict[str, Any]:
    """Returns the attention layer's options of the norms of q and k; `NativeSparseAttention` refuses them."""
    if not normalize_qk:
        return {}
    if is_nsa:
        return {"normalize_qk": normalize_qk}
    return {"normalize_qk": resolve_qk_norm(normalize_qk, norm), "norm_epsilon": norm_epsilon}


def _checked_module(module: Any) -> Any:
    """Returns what ``make_mlp`` made, if it can be called."""
    if not callable(module):
        raise TypeError(f"make_mlp must make a module that maps [..., F] to the same, got {one_line(module)} of it")
    return module


def make_norm(norm: str, features: int, **options: Any) -> nnx.LayerNorm | nnx.RMSNorm:
    """Makes the norm named "layer", "layer_no_bias" or "rms" over ``features`` features; options are Flax's."""
    if norm == "rms":
        return nnx.RMSNorm(features, **options)
    return nnx.LayerNorm(features, use_bias=norm == "layer", **options)
