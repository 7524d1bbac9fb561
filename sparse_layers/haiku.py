"""An attention layer and the residual block for Haiku: Haiku's parameters, the same results as the NNX layers."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

try:
    import haiku as hk
except ImportError as error:
    raise ImportError("sparse_layers.haiku needs dm-haiku: pip install 'sparse-layers[haiku]'") from error

from .arguments.checks import strict_kwargs
from .arguments.foreign import one_line
from .masks.algebra import Mask
from .modules.activations import GATED_ACTIVATIONS
from .modules.attention_fn import Pattern, ids_from_padding
from .modules.block_core import BlockCore, apply_block, check_block_input, norm_positions
from .modules.core import AttentionCore
from .modules.mixture import MixtureOfExperts
from .modules.options import GatedOptions, PrefillOptions, StepOptions
from .modules.relative_bias import RelativeBias
from .modules.rope import Rope, resolve_rope
from .modules.settings import check_array, check_order, gate_features, resolve_qk_norm, with_checked_settings
from .modules.step import attention_step, check_inputs
from .ops.decoding.cache import KVCache
from .ops.kernels.distance_bias import DistanceBias
from .ops.planning.plan import Plan
from .ops.planning.selection import Selection
from .scorers import Scorer

_Initializer = hk.initializers.Initializer
_NORMS = {
    "layer": (hk.LayerNorm, -1, True, True),
    "layer_no_bias": (hk.LayerNorm, -1, True, False),
    "rms": (hk.RMSNorm, -1),
}


class _AttentionOptions(GatedOptions, total=False):
    """Options that the block passes to its attention layer."""

    num_kv_heads: int | None
    value_size: int | None
    cache_dtype: str | None
    rope: Rope | None
    rope_theta: float | None
    relative_bias: RelativeBias | None
    w_init: _Initializer | None
    b_init: _Initializer | None


class SparseSelfAttention(hk.MultiHeadAttention):
    """Self-attention over a sparsity pattern, with the parameters of ``hk.MultiHeadAttention``.

    The linear maps and their names (query, key, value, linear) are Haiku's: parameters of a dense
    ``hk.MultiHeadAttention`` with the same ``name`` apply unchanged. Only the attention step differs: a softmax over
    the keys that the pattern allows. As everywhere in Haiku, the dtype is that of the input unless
    ``hk.mixed_precision`` sets another; logits and sums are float32 at least.

    Args:
      num_heads: number of query heads N.
      key_size: features of one head of queries and keys.
      w_init_scale: deprecated by Haiku, use w_init.
      w_init: initial weights of the four linear maps; defaults to ``hk.initializers.VarianceScaling(1.0)``.
      with_bias: True if the linear maps have biases.
      b_init: initial biases; defaults to zeros.
      value_size: features of one head of values; defaults to key_size.
      model_size: features of the output; defaults to key_size * num_heads.
      name: name of the module.
      pattern, seq_len, num_kv_heads: see `sparse_layers.SparseSelfAttention`.
      rope, rope_theta, normalize_qk, norm_epsilon: see there.
      relative_bias: see there; its table is the parameter ``bias_table``.
      out_w_init: initial weights of the last linear map; None for w_init.
      cache_dtype: see `sparse_layers.SparseSelfAttention`.
      **options: use_sinks (parameter ``sinks`` [N]), gate_output (linear map ``out_gate``), scale, logits_soft_cap,
        implementation, fwd_params, bwd_params, query_sharding, selection: see there.

    Attributes:
      pattern: the name or mask; a sequence or an array becomes its tuple of masks.
      plan: the plan of the pattern for seq_len tokens.

    Raises:
      TypeError: an unknown argument, an initializer that is not callable, a pattern of another type.
      ValueError: a w_init_scale that is not a number > 0, and other errors of `sparse_layers.SparseSelfAttention`.
      NotImplementedError: an implementation that does not support the layer.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, sparse_layers as sl
      >>> from sparse_layers.haiku import SparseSelfAttention
      >>> pattern = sl.Causal() & sl.Window(3)
      >>> model = hk.transform(lambda x: SparseSelfAttention(2, 4, pattern=pattern, seq_len=16)(x))
      >>> x = jnp.ones((1, 16, 8))
      >>> params = model.init(jax.random.key(0), x)
      >>> params["sparse_self_attention/query"]["w"].shape
      (8, 8)
      >>> model.apply(params, None, x).shape
      (1, 16, 8)
    """

    @strict_kwargs
    @with_checked_settings()
    def __init__(
        self,
        num_heads: int,
        key_size: int,
        w_init_scale: float | None = None,
        *,
        w_init: _Initializer | None = None,
        with_bias: bool = True,
        b_init: _Initializer | None = None,
        value_size: int | None = None,
        model_size: int | None = None,
        name: str | None = None,
        pattern: Pattern,
        seq_len: int,
        num_kv_heads: int | None = None,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        relative_bias: RelativeBias | None = None,
        normalize_qk: bool | str = False,
        norm_epsilon: float = 1e-6,
        out_w_init: _Initializer | None = None,
        cache_dtype: str | None = None,
        **options: Unpack[GatedOptions],
    ):
        if w_init is None and w_init_scale is None:
            w_init = hk.initializers.VarianceScaling(1.0)
        super().__init__(
            num_heads,
            key_size,
            w_init_scale,
            w_init=w_init,
            with_bias=with_bias,
            b_init=b_init,
            value_size=value_size,
            model_size=model_size,
            name=name,
        )
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.use_sinks, self.normalize_qk = options.pop("use_sinks", False), normalize_qk
        self.norm_epsilon, self.gate_output = norm_epsilon, options.pop("gate_output", False)
        # The inputs set the dtype later. All implementations support bfloat16; the op checks again in the call.
        self.attention_step = attention_step(
            pattern,
            {"seq_len": seq_len},
            num_heads,
            self.num_kv_heads,
            key_size,
            jnp.bfloat16,
            rope=resolve_rope(rope, rope_theta),
            relative_bias=relative_bias,
            size_name="key_size",
            **options,
        )
        self.pattern = pattern if isinstance(pattern, str | Mask | Scorer) else self.attention_step.fn.masks
        self.seq_len, self.out_w_init, self.cache_dtype = seq_len, out_w_init or self.w_init, cache_dtype

    @property
    def relative_bias(self) -> RelativeBias | None:
        """The bias of logits by head and distance."""
        return self.attention_step.relative_bias

    @property
    def plan(self) -> Plan:
        """The plan of the pattern for ``seq_len`` tokens (cached)."""
        return self.attention_step.fn.plan(self.seq_len)

    @strict_kwargs
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        segment_ids: jax.Array | None = None,
        order_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        bias: DistanceBias | None = None,
    ) -> jax.Array:
        """Applies attention; ``layer(x)`` is ``layer(x, x, x)``.

        Args:
          query: [..., T, F] with T <= seq_len and any number of leading batch axes, including none.
          key, value: inputs for the same tokens, [..., T, any features]; key None for query, value None for key.
          mask: key padding, bool [..., 1, 1, T]: keys where it is False (or 0) are hidden. A query without any key gets
            0, where ``hk.MultiHeadAttention`` gives the mean of all values.
          segment_ids, order_ids, selection, positions, bias: see a call of `sparse_layers.SparseSelfAttention`.

        Returns:
          [..., T, model_size].

        Raises:
          TypeError: an argument that is not an array, or a selection of another type.
          ValueError: inputs that are not floats, without a token axis or longer than seq_len; keys or values of another
            sequence (cross-attention); a mask that differs by query or head; ids whose shape is not that of the
            tokens; a selection whose axes or blocks do not fit the query.
          NotImplementedError: the named implementation does not support the dtype.
        """
        key = query if key is None else key
        value = key if value is None else value
        check_array("query", query, "[..., T, features]")
        size = (0, *query.shape)[-1]
        call_ids: Any = {"positions": positions, "order_ids": order_ids}
        check_inputs({"query": query}, [size], {"seq_len": self.seq_len}, segment_ids, selection, **call_ids)
        tokens = query.shape[:-1]
        for what, x in (("key", key), ("value", value)):
            check_array(what, x, f"{(*tokens, 'features')}")
            if x.shape[:-1] != tokens:
                raise ValueError(
                    f"{what} must be of the query's tokens, {(*tokens, 'features')}, got shape {x.shape}: the pattern "
                    "says which tokens of one sequence attend to each other, so there is no cross-attention; NNX and "
                    "Linen have a SparseCrossAttention"
                )
        ids = segment_ids if mask is None else ids_from_padding(mask, tokens, segment_ids)
        return self._core(query).attend(query, key, value, ids, selection, positions, order_ids=order_ids, bias=bias)

    @hk.name_like("__call__")
    @strict_kwargs
    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to prompts, or to a chunk of them, and keeps their keys and values for `decode_step`.

        `sparse_layers.SparseSelfAttention.prefill` documents arguments, results and errors. Transform a function that
        calls it, as for ``__call__``: the parameters have the same names.

        Raises:
          NotImplementedError: also for a value_size other than key_size, which the cache does not support.

        Example:
          >>> import haiku as hk, jax, jax.numpy as jnp, sparse_layers as sl
          >>> from sparse_layers.haiku import SparseSelfAttention
          >>> layer = lambda: SparseSelfAttention(2, 4, pattern=sl.Causal() & sl.Window(3), seq_len=16)
          >>> call = hk.transform(lambda x: layer()(x))
          >>> prefill = hk.transform(lambda x: layer().prefill(x))
          >>> step = hk.transform(lambda x, cache, position: layer().decode_step(x, cache, position))
          >>> x = jax.random.normal(jax.random.key(0), (1, 16, 8))
          >>> params = call.init(jax.random.key(1), x)
          >>> _, cache = prefill.apply(params, None, x[:, :15])
          >>> last, cache = step.apply(params, None, x[:, 15], cache, jnp.array([15]))
          >>> bool(jnp.allclose(last, call.apply(params, None, x)[:, 15], atol=1e-5))
          True
        """
        self._check_value_size("prefill")
        check_array("inputs", inputs, "[B, T, features]")
        return self._core(inputs).prefill(inputs, lengths, **options)

    @hk.name_like("__call__")
    @strict_kwargs
    def decode_step(
        self, inputs: jax.Array, cache: KVCache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to one or more new tokens of each sequence, at the cost of the pattern's rows.

        `sparse_layers.SparseSelfAttention.decode_step` documents arguments, results and errors; for value_size, see
        `prefill`.
        """
        self._check_value_size("decode_step")
        check_array("inputs", inputs, "[B, features]")
        return self._core(inputs).decode_step(inputs, cache, position, **options)

    def _check_value_size(self, method: str) -> None:
        if self.value_size != self.key_size:
            raise NotImplementedError(
                f"{method}: a cache has keys and values of one size, got key_size={self.key_size} and "
                f"value_size={self.value_size}: leave value_size out"
            )

    @hk.transparent
    def _core(self, inputs: jax.Array) -> AttentionCore:
        """Returns the core of this layer for inputs [..., F], whose dtype sinks have."""
        linear = functools.partial(hk.Linear, with_bias=self.with_bias, b_init=self.b_init)

        def projection(name: str, count: int, size: int) -> Callable[[jax.Array], jax.Array]:
            project = linear(count * size, w_init=self.w_init, name=name)
            return lambda x: project(x).reshape(*x.shape[:-1], count, size)

        def norm(name: str) -> Callable[[jax.Array], jax.Array] | None:
            if not self.normalize_qk:
                return None
            if self.normalize_qk in (True, "layer"):
                return hk.LayerNorm(-1, True, False, self.norm_epsilon, name=name)
            normalize = hk.RMSNorm(-1, self.norm_epsilon, name=name)
            if self.normalize_qk == "rms":
                return normalize
            return lambda x: normalize(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)

        def zeros(name: str, shape: tuple[int, ...] | None) -> jax.Array | None:
            return None if shape is None else hk.get_parameter(name, list(shape), inputs.dtype, jnp.zeros)

        gates = gate_features(self.gate_output, self.value_size)
        out = linear(self.model_size, w_init=self.out_w_init, name="linear")
        return AttentionCore(
            step=self.attention_step,
            lengths={"seq_len": self.seq_len},
            in_features=(0, *inputs.shape)[-1],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.key_size,
            dtype=None,
            cache_dtype=self.cache_dtype,
            query=projection("query", self.num_heads, self.key_size),
            key=projection("key", self.num_kv_heads, self.key_size),
            value=projection("value", self.num_kv_heads, self.value_size),
            out=lambda x: out(x.reshape(*x.shape[:-2], -1)),
            query_ln=norm("query_ln"),
            key_ln=norm("key_ln"),
            out_gate=projection("out_gate", self.num_heads, gates) if gates else None,
            sinks=zeros("sinks", (self.num_heads,) if self.use_sinks else None),
            bias_table=zeros("bias_table", self.attention_step.table_shape(self.num_heads)),
        )


def _refuse_experts(mlp: Any) -> None:
    """Raises NotImplementedError for a mixture of experts."""
    if isinstance(mlp, MixtureOfExperts):
        raise NotImplementedError(
            f"mlp must not be a mixture of experts in Haiku, got {one_line(mlp)}: use NNX or Linen, or make_mlp"
        )


class SparseTransformerBlock(hk.Module):
    """The residual block of `sparse_layers.SparseTransformerBlock`, for Haiku.

    ``x + dropout(attention(norm(x)))``, then ``+ dropout(mlp(norm(.)))``. The last linear maps of both branches start
    1/sqrt(2 * num_layers) times smaller than the others. Norms compute in the dtype of their input, as Haiku's do.

    Args:
      num_heads: number of query heads.
      features: features F of the residual stream.
      pattern, seq_len: see `SparseSelfAttention`.
      num_layers, mlp_features, mlp, norm, norm_epsilon: see `sparse_layers.SparseTransformerBlock`.
      norm_placement, parallel, residual_scale, remat, normalize_qk: see there.
      make_mlp: a function that makes another MLP, ``lambda: Experts(...)``, a module or function that maps [..., F] to
        [..., F].
      dropout_rate: share of values to drop at the ends of the branches; needs a key in ``apply``.
      with_bias: True if attention and MLP have biases.
      key_size: features of one head; defaults to features / num_heads.
      name: name of the module.
      **options: arguments of `SparseSelfAttention`: num_kv_heads, value_size, rope, rope_theta,
        relative_bias, w_init and b_init (for attention only), use_sinks, gate_output, scale, ...

    Raises:
      TypeError: an unknown argument, and errors of `SparseSelfAttention`.
      ValueError: an unknown mlp or norm, sizes that are not integers >= 1, flags that are not bools, dropout_rate
        outside [0, 1), features that num_heads does not divide, and errors of `SparseSelfAttention`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, sparse_layers as sl
      >>> from sparse_layers.haiku import SparseTransformerBlock
      >>> block = lambda x: SparseTransformerBlock(2, 8, pattern=sl.Causal(), seq_len=16, num_layers=3)(x)
      >>> model = hk.without_apply_rng(hk.transform(hk.layer_stack(3)(block)))
      >>> x = jnp.ones((1, 16, 8))
      >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
      >>> next(maps["w"].shape for name, maps in params.items() if name.endswith("sparse_transformer_block/~/mlp_in"))
      (3, 8, 32)
      >>> jax.eval_shape(model.apply, params, x).shape
      (1, 16, 8)
    """

    @strict_kwargs
    @with_checked_settings()
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
        make_mlp: Callable[[], Callable[[jax.Array], jax.Array]] | None = None,
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        norm_placement: str = "pre",
        parallel: bool | str = False,
        residual_scale: float | None = None,
        normalize_qk: bool | str = False,
        dropout_rate: float = 0.0,
        with_bias: bool = True,
        remat: bool = False,
        key_size: int | None = None,
        name: str | None = None,
        **options: Unpack[_AttentionOptions],
    ):
        super().__init__(name=name)
        check_order(num_heads, features, key_size)
        if key_size is None and features % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide features={features}, or say key_size")
        init, out_init = (hk.initializers.VarianceScaling(scale) for scale in (1.0, 1 / (2 * num_layers)))
        make_norm: Any = functools.partial(*_NORMS[norm], norm_epsilon)
        attention, mlp_input, post = norm_positions(norm_placement, parallel)
        self.attention_norm = make_norm(name="attention_norm") if attention else None
        self.attention_out_norm = make_norm(name="attention_out_norm") if post else None
        self.attention = SparseSelfAttention(
            num_heads,
            features // num_heads if key_size is None else key_size,
            model_size=features,
            with_bias=with_bias,
            pattern=pattern,
            seq_len=seq_len,
            normalize_qk=resolve_qk_norm(normalize_qk, norm),
            norm_epsilon=norm_epsilon,
            out_w_init=out_init,
            name="attention",
            **options,
        )
        self.mlp_norm = make_norm(name="mlp_norm") if mlp_input else None
        self.mlp_out_norm = make_norm(name="mlp_out_norm") if post else None
        self.mlp_in = self.mlp_gate = self.mlp_out = self.experts = None
        self.mlp_module = _refuse_experts(mlp) if make_mlp is None else make_mlp()
        if make_mlp is None:
            hidden = mlp_features or 4 * features
            self.mlp_in = hk.Linear(hidden, with_bias, init, name="mlp_in")
            self.mlp_gate = hk.Linear(hidden, with_bias, init, name="mlp_gate") if mlp in GATED_ACTIVATIONS else None
            self.mlp_out = hk.Linear(features, with_bias, out_init, name="mlp_out")
        self.features, self.mlp, self.parallel, self.residual_scale = features, mlp, parallel, residual_scale
        self.dropout_rate, self.remat = dropout_rate, remat
        # Not a method: Haiku would apply a policy of mixed precision to its result, inside the block.
        self.dropout = functools.partial(_dropout, dropout_rate)

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
          deterministic: True switches dropout off, False on; needed with a dropout_rate only.

        Returns:
          [..., T, features].

        Raises:
          TypeError: an x that is not an array.
          ValueError: x of other features, dropout that is neither switched on nor off, or without a key in ``apply``;
            errors of `SparseSelfAttention`.
        """
        ids = {"segment_ids": segment_ids, "order_ids": order_ids}
        check_block_input(self.features, x, deterministic, ids=ids)
        if self.dropout_rate and deterministic is None:
            raise ValueError(
                f"deterministic must be True or False, got None: with dropout_rate={self.dropout_rate}, each call says "
                "whether to drop"
            )
        options = {**ids, "selection": selection, "positions": positions, "bias": bias}
        apply = functools.partial(apply_block, self, deterministic=deterministic, call_options=options)
        return (hk.remat(apply) if self.remat else apply)(x)

    @hk.name_like("__call__")
    @strict_kwargs
    def prefill(
        self, x: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies `SparseSelfAttention.prefill` and the MLP to [B, T, features]; returns (out, cache). No dropout."""
        return BlockCore.of(self).prefill(x, lengths, **options)

    @hk.name_like("__call__")
    @strict_kwargs
    def decode_step(
        self, x: jax.Array, cache: KVCache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies `SparseSelfAttention.decode_step` and the MLP to [B, features]; returns (out, cache). No dropout."""
        return BlockCore.of(self).decode_step(x, cache, position, **options)


def _dropout(rate: float, x: jax.Array, deterministic: bool | None) -> jax.Array:
    return hk.dropout(hk.next_rng_key(), rate, x) if rate and not deterministic else x
