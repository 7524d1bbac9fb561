"""`SparseSelfAttention` and `SparseCrossAttention` for Linen."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..arguments.checks import strict_kwargs
from ..modules.attention import SparseSelfAttention as NNXSelfAttention
from ..modules.settings import Kernels, biased, check_array, check_features, query_features
from ..modules.step import CallInputs, attention_step, check_inputs
from ..ops.decoding.cache import KVCache
from ..ops.planning.selection import Selection
from .settings import OfOneSequence, OverPattern, around


@strict_kwargs
class SparseSelfAttention(OfOneSequence, OverPattern):
    """Self-attention over a sparsity pattern, for Linen; parameters are those of `sparse_layers.SparseSelfAttention`.

    Names, shapes and numbers are those of the NNX layer, so that ``nnx.to_pure_dict(nnx.state(layer, nnx.Param))`` is
    the ``"params"`` of this one, and the other way round. The features F of the input are those that it comes with. In
    half precision, Flax's own norms round in different places, by one unit or two (``normalize_qk``).

    Args:
      num_heads: number of query heads N.
      pattern: who attends to whom: a preset's name (``"sparse_transformer_strided:stride=64"``), a mask, a
        sequence of those that the heads take in turn (head h uses entry h % len; len must divide num_heads), or a numpy
        bool array [seq_len, seq_len] or [entries, seq_len, seq_len]. Sequences and arrays are kept as the tuple of
        masks that they stand for: the module stays hashable and comparable.
      seq_len: the longest input, in tokens.
      qkv_features: features of all query heads together, num_heads * head_dim; defaults to F.
      out_features: features of the output; defaults to F.
      num_kv_heads: number of key and value heads, a divisor of num_heads; defaults to num_heads.
      head_dim: features of a head, instead of qkv_features.
      rope: rotary position embeddings of q and k after QK norm, by position or by coordinates on a grid, see `Rope`;
        None for none.
      rope_theta: short for ``rope=Rope(rope_theta)``.
      use_sinks: give each head a learned logit (``sinks``, float param [N], zero at first) that joins every softmax
        and adds nothing to the output, so that a query may attend to nothing.
      scale: factor of the logits; None for head size ** -0.5.
      logits_soft_cap: None, or c > 0: logits become c * tanh(logits / c).
      implementation: None for the best that the platform offers, or the name of one.
      fwd_params, bwd_params: settings of the kernels; None for the library's choice.
      query_sharding: how queries [B, T, N, H] lie on a mesh of Auto axes, as in `block_sparse_attention`; B are all
        leading axes together.
      selection: how queries choose key blocks within a causal pattern, see `sparse_layers.SparseSelfAttention`.
      normalize_qk: norms of q and k (``query_ln``, ``key_ln``): True or "layer", "rms", or "rms_joint", see
        `sparse_layers.SparseSelfAttention`.
      norm_epsilon: added to the variance in these norms.
      use_bias: whether the four projections have biases, or the names of those that do.
      dtype: of the computation; None: from inputs and parameters.
      param_dtype: of the parameters.
      precision: of the four projections.
      kernel_init, bias_init: initial projections.
      out_kernel_init, out_bias_init: those of the last projection; None for kernel_init and bias_init.
      dropout_rate: must be 0, see Raises.
      decode: must be False or None, see Raises; decode by `prefill` and `decode_step`.

    Raises:
      ValueError: at construction: an unknown preset or option; an array whose lengths are not seq_len; sizes that are
        no integers >= 1, flags that are no bools, dtypes that are no floating ones. At ``init`` and ``apply``, before
        any work, since F is not known earlier: a number of patterns or key-value heads that does not divide num_heads;
        num_heads that does not divide qkv_features, or these that contradict head_dim; a rope whose axes cannot share
        the head size, or both rope and rope_theta; whatever `block_sparse_attention` refuses (an unknown
        implementation, a soft cap <= 0, ...); dropout_rate > 0 (probabilities are never formed, so there is nothing to
        drop: use dropout on the residual).
      NotImplementedError: decode=True (the cache is not Flax's dense one), or an implementation that cannot serve the
        layer.

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
    dropout_rate: float = dataclasses.field(default=0.0, kw_only=True)
    decode: bool | None = dataclasses.field(default=None, kw_only=True)

    @strict_kwargs
    def __call__(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Applies attention to the inputs.

        Args:
          inputs: [..., T, F] with T <= seq_len; any number of leading batch dimensions, also none.
          segment_ids: int [..., T]; tokens attend within their own id only (packed documents). Negative ids are
            padding, which attends to nothing.
          selection: the key blocks that queries look at, chosen at run time, within the pattern: a `Selection` with the
            leading axes of the inputs.
          positions: int [..., T] or [T] for the rotary embeddings, see `sparse_layers.SparseSelfAttention`.
          sow_weights: must be False, see Raises.

        Returns:
          [..., T, out_features] in the layer's dtype.

        Raises:
          ValueError: an input longer than seq_len or without a token axis; segment_ids of another shape than the
            tokens'; a selection of other axes or blocks than the inputs'; sow_weights=True (the probabilities are never
            formed); the settings, see the class.
          TypeError: a selection that is none.
          NotImplementedError: see the class.
        """
        return _attend(self, {"inputs": inputs}, segment_ids, selection, sow_weights, positions)

    def prefill(self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Any) -> tuple[jax.Array, KVCache]:
        """Applies attention to prompts, and keeps their keys and values: ``layer.apply(..., method="prefill")``.

        Args:
          inputs: [B, T, F] with T <= seq_len.
          lengths: int [B], tokens of each prompt, what follows is padding; None for T.
          **options: all other arguments of `sparse_layers.SparseSelfAttention.prefill`, ``selection=`` as of a call.

        Returns:
          (out [B, T, out_features] as of a call, the cache). The output of padding means nothing.

        Raises:
          ValueError, TypeError, NotImplementedError: as that of NNX; the settings, see the class.
        """
        return self._nnx_layer(inputs).prefill(inputs, lengths, **options)

    def decode_step(
        self, inputs: jax.Array, cache: KVCache, position: jax.Array, **options: Any
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to one more token of each sequence, or several: ``layer.apply(..., method="decode_step")``.

        Args:
          inputs: [B, F], or [B, S, F] with S at most the max_step of `prefill`.
          cache: of `prefill` or an earlier step.
          position: int [B], the position of each token, or of the first of S: the number of tokens before it.
          **options: all other arguments of `sparse_layers.SparseSelfAttention.decode_step`.

        Returns:
          (out [B, out_features] or [B, S, out_features], the new cache).

        Raises:
          ValueError, TypeError, NotImplementedError: as that of NNX; the settings, see the class.
        """
        return self._nnx_layer(inputs).decode_step(inputs, cache, position, **options)

    @nn.compact
    def _nnx_layer(self, inputs: jax.Array) -> NNXSelfAttention:
        if self.decode:
            raise NotImplementedError(
                "decode=True: a sparse pattern's cache is not Flax's dense one; apply the layer with method='prefill' "
                "to (prompt, lengths), then with method='decode_step' to (token, cache, position)"
            )
        return _nnx_layer(self, inputs, "inputs", rope=self.rope, rope_theta=self.rope_theta)


def _nnx_layer(layer: Any, inputs: jax.Array, name: str, **rope: Any) -> NNXSelfAttention:
    """The layer of NNX that ``layer`` is for these inputs, of queries."""
    features, num_heads = (0, *jnp.shape(inputs))[-1], layer.num_heads
    check_features(name, inputs, "[..., features]", features)
    num_kv_heads = num_heads if layer.num_kv_heads is None else layer.num_kv_heads
    head_size = query_features(num_heads, features, layer.qkv_features, layer.head_dim) // num_heads
    step = attention_step(
        layer.pattern,
        layer.lengths,
        num_heads,
        num_kv_heads,
        head_size,
        layer.dtype,
        dropout_rate=layer.dropout_rate,
        **{name: getattr(layer, name) for name in Kernels.__optional_keys__},
        **rope,
    )
    shared = {"dtype": layer.dtype, "param_dtype": layer.param_dtype}
    biases = biased(layer.use_bias)

    def projection(name: str, features: Any, **options: Any) -> nn.Module:
        options = {"kernel_init": layer.kernel_init, "bias_init": layer.bias_init} | shared | options
        return nn.DenseGeneral(features, name=name, use_bias=name in biases, precision=layer.precision, **options)

    def norm(name: str) -> nn.Module | None:
        kinds = {"rms": nn.RMSNorm, "rms_joint": _JointRMSNorm}
        kind = kinds.get(layer.normalize_qk, functools.partial(nn.LayerNorm, use_bias=False))
        return kind(epsilon=layer.norm_epsilon, name=name, **shared) if layer.normalize_qk else None

    scorer = step.fn.selection
    index_size = 0 if scorer is None else scorer.index_features(head_size)

    def index(name: str, heads: int) -> nn.Module | None:
        options = {"use_bias": False, "kernel_init": layer.kernel_init, **shared}
        return nn.DenseGeneral((heads, index_size), name=name, **options) if index_size else None

    return around(
        NNXSelfAttention,
        **layer.lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        in_features=features,
        dtype=layer.dtype,
        attention_fn=step,
        query=projection("query", (num_heads, head_size)),
        key=projection("key", (num_kv_heads, head_size)),
        value=projection("value", (num_kv_heads, head_size)),
        query_ln=norm("query_ln"),
        key_ln=norm("key_ln"),
        index_query=index("index_query", num_kv_heads),
        index_key=index("index_key", 1),
        sinks=layer.param("sinks", nn.initializers.zeros, (num_heads,), layer.param_dtype) if layer.use_sinks else None,
        out=projection(
            "out",
            features if layer.out_features is None else layer.out_features,
            axis=(-2, -1),
            kernel_init=layer.out_kernel_init or layer.kernel_init,
            bias_init=layer.out_bias_init or layer.bias_init,
        ),
    )


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
) -> jax.Array:
    """What `SparseSelfAttention` and `SparseCrossAttention` do, whose inputs are one or two, the queries' first."""
    for letter, (name, x) in zip("TS", inputs.items(), strict=False):
        check_array(name, x, f"[..., {letter}, features]")
    sizes = [(0, *x.shape)[-1] for x in inputs.values()]
    check_inputs(inputs, sizes, layer.lengths, segment_ids, selection, sow_weights, positions)
    of_queries, of_keys = (list(inputs.values())[i] for i in (0, -1))
    made = layer._nnx_layer(of_queries)
    query, key, value = made.query(of_queries), made.key(of_keys), made.value(of_keys)
    if layer.normalize_qk:
        query, key = made.query_ln(query), made.key_ln(key)
    losses = [] if layer.is_mutable_collection("losses") and not layer.is_initializing() else None
    index = made._index(of_queries, losses)
    attended = made.attention_fn(
        query, key, value, mask=CallInputs(segment_ids, made._sinks, selection, index, positions)
    )
    if losses:
        layer.sow("losses", "index", losses[0])
    return made.out(attended)


@strict_kwargs
class SparseCrossAttention(OverPattern):
    """Cross-attention over a sparsity pattern, for Linen; parameters are those of `sparse_layers.SparseCrossAttention`.

    Queries come from one sequence, keys and values from another, of its own length and features, and there are no
    rotary embeddings and no cache; all else is that of `SparseSelfAttention`. Features are those that the inputs come
    with.

    Args:
      num_heads: number of query heads N.
      pattern: who attends to whom, as in `SparseSelfAttention`; a numpy bool array is [q_len, kv_len] or
        [entries, q_len, kv_len].
      q_len, kv_len: the longest input of queries and of keys, in tokens; shorter ones see the pattern's upper left
        corner.
      out_features, qkv_features, num_kv_heads, head_dim: see `SparseSelfAttention`.
      dropout_rate, use_sinks, scale, logits_soft_cap, selection: see there.
      normalize_qk, norm_epsilon, use_bias, dtype, param_dtype, precision: see there.
      implementation, fwd_params, bwd_params, query_sharding: see there.
      kernel_init, bias_init, out_kernel_init, out_bias_init: see there.

    Raises:
      ValueError, NotImplementedError: as `SparseSelfAttention`.

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
        selection: Selection | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Applies attention of one input to the other, as `sparse_layers.SparseCrossAttention` does.

        Args:
          inputs_q: [..., T, F] with T <= q_len; any number of leading batch dimensions, also none.
          inputs_kv: [..., S, any features] with S <= kv_len and the same leading dimensions.
          segment_ids: a pair, int [..., T] of queries and int [..., S] of keys; negative ids are padding.
          selection: the key blocks that queries look at, chosen at run time, within the pattern.
          sow_weights: must be False.

        Returns:
          [..., T, out_features] in the layer's dtype.

        Raises:
          ValueError, TypeError, NotImplementedError: as the NNX layer; the settings, see the class.
        """
        inputs = {"inputs_q": inputs_q, "inputs_kv": inputs_kv}
        return _attend(self, inputs, segment_ids, selection, sow_weights)

    @nn.compact
    def _nnx_layer(self, inputs: jax.Array) -> NNXSelfAttention:
        return _nnx_layer(self, inputs, "inputs_q")
