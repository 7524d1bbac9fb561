"""Linen versions of the attention layers and of `SparseTransformerBlock`: same attributes, parameters and numbers."""

# Classes of their own, not `flax.nnx.bridge.to_linen` of the NNX ones: the bridge's module lacks the attributes that
# were not given, wants in_features, cannot be hashed or compared when the pattern is an array, wants a dropout key even
# to initialise a deterministic block, and draws new parameters at every apply only to replace them.

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from .masks.algebra import Mask
from .masks.options import own_keywords
from .modules.attention import SparseSelfAttention as NNXSelfAttention
from .modules.attention_fn import AttentionFn, Pattern
from .modules.block import IN_BLOCK, check_input, forward
from .modules.block import SparseTransformerBlock as NNXBlock
from .modules.rope import Rope
from .modules.settings import (
    GATED,
    PROJECTIONS,
    Kernels,
    biased,
    check_array,
    check_features,
    check_order,
    check_settings,
    query_features,
)
from .modules.step import Extras, attention_step, check_inputs
from .ops.decoding.cache import KVCache
from .ops.planning.params import BwdParams, FwdParams
from .ops.planning.plan import Plan
from .ops.planning.selection import Selection
from .scorers import Scorer, masks_and_scorer


class _Settings(nn.Module, kw_only=True):
    """What layers have in common; see `SparseSelfAttention`."""

    pattern: Pattern
    qkv_features: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    use_sinks: bool = False
    scale: float | None = None
    logits_soft_cap: float | None = None
    implementation: str | None = None
    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    query_sharding: jax.sharding.PartitionSpec | None = None
    selection: Scorer | str | None = None
    normalize_qk: bool | str = False
    norm_epsilon: float = 1e-6
    use_bias: bool | Collection[str] = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = nn.initializers.zeros
    out_kernel_init: Initializer | None = None
    out_bias_init: Initializer | None = None

    def __post_init__(self):
        check_settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        biases = biased(self.use_bias, self._with_biases)
        if not isinstance(self.use_bias, bool):  # in one order and hashable
            self.use_bias = tuple(name for name in self._with_biases if name in biases)
        masks, _ = masks_and_scorer(self.pattern, self.selection, list(self.lengths.values()))
        # An array is kept as masks: by itself it could be neither hashed nor compared, and so neither could the module.
        if not isinstance(self.pattern, str | Mask | Scorer):
            self.pattern = masks
        super().__post_init__()

    _with_biases = PROJECTIONS

    @property
    def lengths(self) -> dict[str, int]:
        """The most tokens of each input, by the names of the attributes that say them."""
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """The compiled pattern for the longest inputs (cached)."""
        settings = {"fwd_params": self.fwd_params, "bwd_params": self.bwd_params, "implementation": self.implementation}
        lengths = list(self.lengths.values())
        return AttentionFn(masks_and_scorer(self.pattern, None, lengths)[0], lengths[0], **settings).plan(*lengths)


class _OfOneSequence(_Settings, kw_only=True):
    """What self-attention and the block around it have in common; see `SparseSelfAttention`."""

    seq_len: int
    rope: Rope | None = None
    rope_theta: float | None = None

    @property
    def lengths(self) -> dict[str, int]:
        return {"seq_len": self.seq_len}


@own_keywords
class SparseSelfAttention(_OfOneSequence):
    """Self-attention over a sparsity pattern, for Linen; parameters are those of `sparse_layers.SparseSelfAttention`.

    Names, shapes and numbers are those of the NNX layer, so that ``nnx.to_pure_dict(nnx.state(layer, nnx.Param))`` is
    the ``"params"`` of this one, and the other way round. The features F of the input are those that it comes with. In
    half precision, Flax's own norms round in different places, by one unit or two (``normalize_qk``).

    Args:
      num_heads: number of query heads N.
      pattern: who attends to whom: a preset's name (``"strided"``, ``"strided:local_attn_ctx=64"``), a mask, a
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

    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, *, selection: Selection | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to prompts, and keeps their keys and values: ``layer.apply(..., method="prefill")``.

        Args:
          inputs: [B, T, F] with T <= seq_len.
          lengths: int [B], tokens of each prompt, what follows is padding; None for T.
          selection: as of a call.

        Returns:
          (out [B, T, out_features] as of a call, the cache). The output of padding means nothing.

        Raises:
          ValueError, TypeError, NotImplementedError: as `sparse_layers.SparseSelfAttention.prefill`; the settings, see
            the class.
        """
        return self._nnx_layer(inputs).prefill(inputs, lengths, selection=selection)

    def decode_step(
        self, inputs: jax.Array, cache: KVCache, position: jax.Array, *, selection: Selection | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to one more token of each sequence: ``layer.apply(..., method="decode_step")``.

        Args:
          inputs: [B, F].
          cache: of `prefill` or an earlier step.
          position: int [B], the position of each token: the number of tokens before it.
          selection: the key blocks that the tokens look at, see `sparse_layers.SparseSelfAttention.decode_step`.

        Returns:
          (out [B, out_features], the new cache).

        Raises:
          ValueError, TypeError, NotImplementedError: as `sparse_layers.SparseSelfAttention.decode_step`; the settings,
            see the class.
        """
        return self._nnx_layer(inputs).decode_step(inputs, cache, position, selection=selection)

    @nn.compact
    def _nnx_layer(self, inputs: jax.Array) -> NNXSelfAttention:
        if self.decode:
            raise NotImplementedError(
                "decode=True: a sparse pattern's cache is not Flax's dense one; apply the layer with method='prefill' "
                "to (prompt, lengths), then with method='decode_step' to (token, cache, position)"
            )
        return _nnx_layer(self, inputs, "inputs", rope=self.rope, rope_theta=self.rope_theta)


def _nnx_layer(layer: Any, inputs: jax.Array, name: str, **rope: Any) -> NNXSelfAttention:
    """The layer of NNX that ``layer`` is for these inputs, of queries, with layers of Linen in the place of its own.

    It lives as long as a call: what a layer does with projections and norms is written once, with NNX.
    """
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
        return nn.DenseGeneral((heads, index_size), name=name, use_bias=False, **shared) if index_size else None

    made = object.__new__(NNXSelfAttention)
    vars(made).update(
        layer.lengths,
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
    return made


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
    attended = made.attention_fn(query, key, value, mask=Extras(segment_ids, made._sinks, selection, index, positions))
    if losses:
        layer.sow("losses", "index", losses[0])
    return made.out(attended)


@own_keywords
class SparseCrossAttention(_Settings):
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
      out_features, dropout_rate, qkv_features, num_kv_heads, head_dim, use_sinks, scale, logits_soft_cap,
        implementation, fwd_params, bwd_params, query_sharding, selection, normalize_qk, norm_epsilon, use_bias, dtype,
        param_dtype, precision, kernel_init, bias_init, out_kernel_init, out_bias_init: see `SparseSelfAttention`.

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


@own_keywords
class SparseTransformerBlock(_OfOneSequence):
    """The residual block, for Linen; parameters are those of `sparse_layers.SparseTransformerBlock`.

    ``x + dropout(attention(norm(x)))``, then ``+ dropout(mlp(norm(.)))``. The last projections of both branches start
    1/sqrt(2 * num_layers) times smaller than Flax's default. Names, shapes and numbers are those of the NNX block, but
    for the roundings of Flax's norms in half precision.

    Args:
      num_heads: number of query heads.
      features: features F of the residual stream.
      num_layers: blocks in the whole stack (scales the initial output projections).
      mlp_features: hidden features of the MLP; defaults to 4 * features.
      mlp: the function between the MLP's matrices, or the name of one, see `sparse_layers.SparseTransformerBlock`.
      make_mlp: makes another MLP, ``lambda: Experts(...)``: a Linen module that maps [..., F] to [..., F].
      norm: "layer" or "rms".
      norm_epsilon: added to the variance in all norms.
      norm_placement: "pre", "post" or "sandwich", see there.
      parallel: whether the MLP reads what attention reads.
      dropout_rate: share of values dropped at the branches' ends; uses the ``"dropout"`` rng collection.
      deterministic: True switches dropout off, False on; here or in the call. Needed with a dropout_rate only. The
        call takes it by keyword only, so a ``flax.linen.remat`` of your own would trace it, and dropout cannot be
        switched by a traced value: set the attribute there, or use remat=True, which takes both.
      remat: recompute the block in the backward pass instead of keeping its activations: same numbers, less memory.
      use_bias: whether the projections of attention and MLP have biases, or the names of those that do: "query", "key",
        "value", "out" and "mlp".
      kernel_init, bias_init: initializers of all projections but the last ones of both branches.
      out_kernel_init: that of the last ones; None for the scaled default.
      normalize_qk: see `SparseSelfAttention`; True stands for norms as the block's own, "layer" or "rms".
      pattern, seq_len, qkv_features, num_kv_heads, head_dim, rope, rope_theta, use_sinks, scale,
        logits_soft_cap, implementation, fwd_params, bwd_params, query_sharding, selection, dtype, param_dtype,
        precision, out_bias_init: see `SparseSelfAttention`; dtype and param_dtype are those of the whole block, the
        last two only attention's.

    Raises:
      ValueError: at construction: an unknown mlp or norm, sizes that are no integers >= 1, flags that are no bools,
        dropout_rate outside [0, 1), more heads than features without head_dim, a bad pattern; at ``init`` and
        ``apply``: `SparseSelfAttention`'s.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import linen as nn
      >>> from sparse_layers import linen
      >>> class Stack(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         block = linen.SparseTransformerBlock(2, 8, pattern=sl.Causal(), seq_len=16, num_layers=3)
      ...         step = lambda block, x, _: (block(x), None)
      ...         stack = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
      ...         return stack(block, x, None)[0]
      >>> x = jnp.ones((1, 16, 8))
      >>> variables = Stack().init(jax.random.key(0), x)
      >>> variables["params"]["SparseTransformerBlock_0"]["mlp_in"]["kernel"].shape
      (3, 8, 32)
      >>> Stack().apply(variables, x).shape
      (1, 16, 8)

    References:
      Child, Gray, Radford, Sutskever: Generating Long Sequences with Sparse Transformers, 2019.
    """

    num_heads: int
    features: int
    num_layers: int = dataclasses.field(default=1, kw_only=True)
    mlp_features: int | None = dataclasses.field(default=None, kw_only=True)
    mlp: str | Callable[[jax.Array], jax.Array] = dataclasses.field(default="gelu", kw_only=True)
    make_mlp: Callable[[], Callable[[jax.Array], jax.Array]] | None = dataclasses.field(default=None, kw_only=True)
    norm: str = dataclasses.field(default="layer", kw_only=True)
    norm_placement: str = dataclasses.field(default="pre", kw_only=True)
    parallel: bool = dataclasses.field(default=False, kw_only=True)
    dropout_rate: float = dataclasses.field(default=0.0, kw_only=True)
    deterministic: bool | None = dataclasses.field(default=None, kw_only=True)
    remat: bool = dataclasses.field(default=False, kw_only=True)

    _with_biases = IN_BLOCK

    def __post_init__(self):
        super().__post_init__()
        check_order(self.num_heads, self.features, self.head_dim)

    def setup(self):
        shared = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = functools.partial(
            nn.LayerNorm if self.norm == "layer" else nn.RMSNorm, epsilon=self.norm_epsilon, **shared
        )
        out_init = self.out_kernel_init
        if out_init is None:
            out_init = nn.initializers.variance_scaling(1 / (2 * self.num_layers), "fan_in", "truncated_normal")
        biases = biased(self.use_bias, IN_BLOCK)
        names = {field.name for field in dataclasses.fields(_OfOneSequence)} - {"parent", "name"}  # these are Linen's
        settings: dict[str, Any] = {name: getattr(self, name) for name in names} | {"out_kernel_init": out_init}
        if not isinstance(self.use_bias, bool):
            settings["use_bias"] = tuple(name for name in PROJECTIONS if name in biases)
        if self.normalize_qk is True:
            settings["normalize_qk"] = self.norm
        pre, post = (self.norm_placement in (name, "sandwich") for name in ("pre", "post"))
        # The names are those of the NNX block: its forward function, which both share, and its parameters go by them.
        self.attention_norm, self.attention_out_norm = norm() if pre else None, norm() if post else None
        self.attention = SparseSelfAttention(self.num_heads, **settings)
        self.mlp_norm, self.mlp_out_norm = norm() if pre else None, norm() if post else None
        own = self.make_mlp is None
        hidden = 4 * self.features if self.mlp_features is None else self.mlp_features
        dense = functools.partial(nn.Dense, use_bias="mlp" in biases, bias_init=self.bias_init, **shared)
        self.mlp_in = dense(hidden, kernel_init=self.kernel_init) if own else None
        self.mlp_gate = dense(hidden, kernel_init=self.kernel_init) if own and self.mlp in GATED else None
        self.mlp_out = dense(self.features, kernel_init=out_init) if own else None
        self.mlp_module = None if self.make_mlp is None else self.make_mlp()
        self.dropout = nn.Dropout(self.dropout_rate)

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
          deterministic: True switches dropout off, False on; None: as the module's attribute says.

        Returns:
          [..., T, features].

        Raises:
          TypeError: what is no array.
          ValueError: x of other features, or dropout that is neither switched on nor off; `SparseSelfAttention`'s.
        """
        check_input(self.features, x, deterministic)
        # Without dropout there is nothing to switch, and Flax's layer would ask all the same.
        off = not self.dropout_rate or nn.merge_param("deterministic", self.deterministic, deterministic)
        return (_rematerialized if self.remat else forward)(self, x, segment_ids, off, selection, positions)

    def prefill(
        self, x: jax.Array, lengths: jax.Array | None = None, *, selection: Selection | None = None
    ) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.prefill` for the block: [B, T, features] -> the same and the cache; no dropout."""
        return _NNX_BLOCK.prefill(self, x, lengths, selection=selection)

    def decode_step(
        self, x: jax.Array, cache: KVCache, position: jax.Array, *, selection: Selection | None = None
    ) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.decode_step` for the block: [B, features] -> the same and the cache; no dropout."""
        return _NNX_BLOCK.decode_step(self, x, cache, position, selection=selection)


_NNX_BLOCK: Any = NNXBlock  # its methods need no more of a block than its layers, which have the same names
_rematerialized: Any = nn.remat(forward, static_argnums=(3,))
