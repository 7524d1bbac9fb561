"""The attention layers `SparseSelfAttention` and `SparseCrossAttention` for Linen."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..arguments.checks import strict_kwargs
from ..modules.core import AttentionCore
from ..modules.options import KernelOptions, PrefillOptions, StepOptions
from ..modules.rope import Rope, resolve_rope
from ..modules.settings import check_array, check_features, gate_features, projections_with_bias, query_features
from ..modules.step import attention_step, check_inputs, refuse_dropout
from ..ops.decoding.cache import KVCache
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.selection import Selection
from .settings import PatternSettings, SelfAttentionSettings


@strict_kwargs
class SparseSelfAttention(SelfAttentionSettings, PatternSettings):
    """Self-attention over a sparsity pattern, for Linen; parameters are those of `sparse_layers.SparseSelfAttention`.

    Names, shapes and numbers are those of the NNX layer: ``nnx.to_pure_dict(nnx.state(layer, nnx.Param))`` is the
    ``"params"`` of this one, and vice versa. The input sets its features F. In half precision, Flax's norms of the two
    differ by one or two units of rounding (``normalize_qk``).

    Args:
      num_heads: number of query heads N.
      pattern: see `sparse_layers.SparseSelfAttention`. A sequence or an array becomes its tuple of masks, so that the
        module is hashable and comparable.
      seq_len, qkv_features, out_features, num_kv_heads, head_dim: see there.
      rope, rope_theta, relative_bias, use_sinks, gate_output, normalize_qk, norm_epsilon, use_bias: see there.
      scale, logits_soft_cap, selection, implementation, fwd_params, bwd_params, query_sharding, cache_dtype: see there.
      dtype: dtype of the computation; None for that of inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the four projections.
      kernel_init, bias_init: initializers of the projections.
      out_kernel_init, out_bias_init: those of the last projection; None for kernel_init and bias_init.
      dropout_rate: must be 0, see Raises.
      decode: must be False or None, see Raises; decode by `prefill` and `decode_step`.

    Raises:
      ValueError: at construction: an unknown preset or option; an array whose lengths are not seq_len; sizes that are
        not integers >= 1, flags that are not bools, dtypes that are not floating. At ``init`` and ``apply``, since F is
        unknown earlier: the other errors of `sparse_layers.SparseSelfAttention`.
      NotImplementedError: decode=True (the cache is not Flax's dense one), or an implementation that does not support
        the layer.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from sparse_layers import linen
      >>> layer = linen.SparseSelfAttention(2, pattern=sl.Causal() & sl.Window(3), seq_len=16)
      >>> x = jnp.ones((1, 16, 8))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> variables["params"]["query"]["kernel"].shape
      (8, 2, 4)
      >>> out = layer.apply(variables, x)
      >>> prompt, cache = layer.apply(variables, x[:, :15], method="prefill")
      >>> last, cache = layer.apply(variables, x[:, 15], cache, jnp.array([15]), method="decode_step")
      >>> bool(jnp.allclose(last, out[:, 15], atol=1e-6))
      True
    """

    num_heads: int
    out_features: int | None = dataclasses.field(default=None, kw_only=True)
    cache_dtype: str | None = dataclasses.field(default=None, kw_only=True)
    dropout_rate: float = dataclasses.field(default=0.0, kw_only=True)
    decode: bool | None = dataclasses.field(default=None, kw_only=True)

    @strict_kwargs
    def __call__(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        order_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        bias: DistanceBias | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Applies attention to inputs [..., T, F], and returns [..., T, out_features] in the layer's dtype.

        A call of `sparse_layers.SparseSelfAttention` documents the arguments.

        Raises:
          ValueError, TypeError, NotImplementedError: see a call of that layer; settings, see the class.
        """
        options: Any = {"positions": positions, "order_ids": order_ids, "bias": bias}
        return _attend(self, {"inputs": inputs}, segment_ids, selection, sow_weights, **options)

    @strict_kwargs
    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to prompts, and caches their keys and values: ``layer.apply(..., method="prefill")``.

        `sparse_layers.SparseSelfAttention.prefill` documents arguments, results and errors.
        """
        return self._core(inputs).prefill(inputs, lengths, **options)

    @strict_kwargs
    def decode_step(
        self, inputs: jax.Array, cache: KVCache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to one or more new tokens: ``layer.apply(..., method="decode_step")``.

        `sparse_layers.SparseSelfAttention.decode_step` documents arguments, results and errors.
        """
        return self._core(inputs).decode_step(inputs, cache, position, **options)

    @nn.compact
    def _core(self, inputs: jax.Array) -> AttentionCore:
        if self.decode:
            raise NotImplementedError(
                "decode=True: a sparse pattern's cache is not Flax's dense one; apply the layer with method='prefill' "
                "to (prompt, lengths), then with method='decode_step' to (token, cache, position)"
            )
        return _make_core(self, inputs, "inputs", resolve_rope(self.rope, self.rope_theta))


def _make_core(layer: Any, inputs: jax.Array, name: str, rope: Rope | None = None) -> AttentionCore:
    """Makes the core of a Linen layer, with its projections, for these inputs of queries."""
    features, num_heads = (0, *jnp.shape(inputs))[-1], layer.num_heads
    check_features(name, inputs, "[..., features]", features)
    num_kv_heads = num_heads if layer.num_kv_heads is None else layer.num_kv_heads
    head_size = query_features(num_heads, features, layer.qkv_features, layer.head_dim) // num_heads
    refuse_dropout(layer.dropout_rate)
    step = attention_step(
        layer.pattern,
        layer.lengths,
        num_heads,
        num_kv_heads,
        head_size,
        layer.dtype,
        rope=rope,
        relative_bias=layer.relative_bias,
        **{name: getattr(layer, name) for name in KernelOptions.__optional_keys__},
    )
    shared = {"dtype": layer.dtype, "param_dtype": layer.param_dtype}
    biases = projections_with_bias(layer.use_bias)

    def projection(name: str, features: Any, **options: Any) -> nn.Module:
        inits = {"kernel_init": layer.kernel_init, "bias_init": layer.bias_init}
        options = {"use_bias": name in biases, "precision": layer.precision} | inits | shared | options
        return nn.DenseGeneral(features, name=name, **options)

    gates, scorer = gate_features(layer.gate_output, head_size), step.fn.selection
    index_size = 0 if scorer is None else scorer.index_features(head_size)

    def index(name: str, heads: int) -> nn.Module | None:
        options = {"use_bias": False, "kernel_init": layer.kernel_init, **shared}
        return nn.DenseGeneral((heads, index_size), name=name, **options) if index_size else None

    return AttentionCore(
        step=step,
        lengths=layer.lengths,
        in_features=features,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        dtype=layer.dtype,
        cache_dtype=getattr(layer, "cache_dtype", None),  # cross-attention has no cache
        query=projection("query", (num_heads, head_size)),
        key=projection("key", (num_kv_heads, head_size)),
        value=projection("value", (num_kv_heads, head_size)),
        query_ln=_make_qk_norm(layer, "query_ln"),
        key_ln=_make_qk_norm(layer, "key_ln"),
        out_gate=projection("out_gate", (num_heads, gates), use_bias="query" in biases) if gates else None,
        index_query=index("index_query", num_kv_heads),
        index_key=index("index_key", 1),
        sinks=_zeros(layer, "sinks", (num_heads,) if layer.use_sinks else None),
        bias_table=_zeros(layer, "bias_table", step.table_shape(num_heads)),
        out=projection(
            "out",
            features if layer.out_features is None else layer.out_features,
            axis=(-2, -1),
            kernel_init=layer.out_kernel_init or layer.kernel_init,
            bias_init=layer.out_bias_init or layer.bias_init,
        ),
    )


def _zeros(layer: Any, name: str, shape: tuple[int, ...] | None) -> jax.Array | None:
    return None if shape is None else layer.param(name, nn.initializers.zeros, shape, layer.param_dtype)


def _make_qk_norm(layer: Any, name: str) -> nn.Module | None:
    if not layer.normalize_qk:
        return None
    rms_norms = {"rms": nn.RMSNorm, "rms_joint": _JointRMSNorm}
    make_norm = rms_norms.get(layer.normalize_qk, functools.partial(nn.LayerNorm, use_bias=False))
    return make_norm(epsilon=layer.norm_epsilon, name=name, dtype=layer.dtype, param_dtype=layer.param_dtype)


class _JointRMSNorm(nn.RMSNorm):
    """RMS norm of heads [..., N, H] over all features of a token together, N * H of them."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def _attend(
    layer: Any,
    inputs: dict[str, jax.Array],
    segment_ids: Any,
    selection: Any,
    sow_weights: bool,
    positions: Any = None,
    order_ids: Any = None,
    bias: DistanceBias | None = None,
) -> jax.Array:
    """Applies a self-attention or cross-attention layer to one or two inputs, that of queries first."""
    for letter, (name, x) in zip("TS", inputs.items(), strict=False):
        check_array(name, x, f"[..., {letter}, features]")
    sizes = [(0, *x.shape)[-1] for x in inputs.values()]
    check_inputs(inputs, sizes, layer.lengths, segment_ids, selection, sow_weights, positions, order_ids)
    of_queries, of_keys = (list(inputs.values())[i] for i in (0, -1))
    losses = [] if layer.is_mutable_collection("losses") and not layer.is_initializing() else None
    options = segment_ids, selection, positions, losses, order_ids, bias
    out = layer._core(of_queries).attend(of_queries, of_keys, of_keys, *options)
    if losses:
        layer.sow("losses", "index", losses[0])
    return out


@strict_kwargs
class SparseCrossAttention(PatternSettings):
    """Cross-attention over a sparsity pattern, for Linen; parameters are those of `sparse_layers.SparseCrossAttention`.

    Queries come from one sequence, keys and values from another with its own length and features. Rotary position
    embeddings and a cache are missing; all else is as in `SparseSelfAttention`. The inputs set their features.

    Args:
      num_heads: number of query heads N.
      pattern: as in `SparseSelfAttention`; a numpy bool array is [q_len, kv_len] or [entries, q_len, kv_len].
      q_len, kv_len: the longest inputs of queries and of keys, in tokens; shorter ones use the upper left corner of the
        pattern.
      out_features, qkv_features, num_kv_heads, head_dim: see `SparseSelfAttention`.
      dropout_rate, relative_bias, use_sinks, gate_output, scale, logits_soft_cap, selection: see there.
      normalize_qk, norm_epsilon, use_bias, dtype, param_dtype, precision: see there.
      implementation, fwd_params, bwd_params, query_sharding: see there.
      kernel_init, bias_init, out_kernel_init, out_bias_init: see there.

    Raises:
      ValueError, NotImplementedError: errors of `SparseSelfAttention`.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from sparse_layers import linen
      >>> layer = linen.SparseCrossAttention(2, pattern=sl.Window(3, 3), q_len=16, kv_len=20)
      >>> x, y = jnp.ones((1, 16, 8)), jnp.ones((1, 20, 12))
      >>> variables = layer.init(jax.random.key(0), x, y)
      >>> variables["params"]["key"]["kernel"].shape
      (12, 2, 4)
      >>> layer.apply(variables, x, y).shape
      (1, 16, 8)
    """

    num_heads: int
    q_len: int = dataclasses.field(kw_only=True)
    kv_len: int = dataclasses.field(kw_only=True)
    out_features: int | None = dataclasses.field(default=None, kw_only=True)
    dropout_rate: float = dataclasses.field(default=0.0, kw_only=True)

    @property
    def lengths(self) -> dict[str, int]:
        return {"q_len": self.q_len, "kv_len": self.kv_len}

    @strict_kwargs
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_kv: jax.Array,
        *,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        order_ids: tuple[jax.Array, jax.Array] | None = None,
        selection: Selection | None = None,
        bias: DistanceBias | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Applies attention of inputs [..., T, F] to others [..., S, F'], and returns [..., T, out_features].

        A call of `sparse_layers.SparseCrossAttention` documents the arguments.

        Raises:
          ValueError, TypeError, NotImplementedError: see a call of that layer; settings, see the class.
        """
        inputs = {"inputs_q": inputs_q, "inputs_kv": inputs_kv}
        return _attend(self, inputs, segment_ids, selection, sow_weights, order_ids=order_ids, bias=bias)

    @nn.compact
    def _core(self, inputs: jax.Array) -> AttentionCore:
        return _make_core(self, inputs, "inputs_q")
