"""`SparseSelfAttention`: Flax's multi-head attention whose attention step follows a sparsity pattern."""

from collections.abc import Collection
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from ..arguments.checks import strict_kwargs
from ..ops.decoding.cache import KVCache
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.selection import Selection
from ..scorers import Scorer
from .attention_fn import Pattern
from .index import IndexLoss
from .options import PrefillOptions, SelfAttentionOptions, StepOptions
from .relative_bias import RelativeBias
from .rope import Rope
from .sparse_attention import SparseAttention
from .step import check_inputs


def _refuse_decode(decode: bool | None) -> None:
    if decode:
        raise NotImplementedError(
            "decode=True: a sparse pattern's cache is not Flax's dense one; call prefill(prompt, lengths), then "
            "decode_step(token, cache, position)"
        )


class SparseSelfAttention(SparseAttention):
    """Self-attention over a sparsity pattern, with the parameters of ``flax.nnx.MultiHeadAttention``.

    Projections, grouped-query heads, QK norm, initializers and dtypes are Flax's own, and so are the parameter names:
    the state of a dense layer loads unchanged (``nnx.update(sparse, nnx.state(dense, nnx.Param))``). Only the attention
    step differs. The pattern is compiled to block lists at construction, for ``seq_len`` tokens. Shorter inputs use the
    upper left corner of the pattern, whose plan is made at their first trace and cached by pattern and length.

    Args:
      num_heads: number of query heads N.
      in_features: features F of the input.
      qkv_features: features of all query heads together, num_heads * head_dim; defaults to in_features.
      out_features: features of the output; defaults to in_features.
      num_kv_heads: number of key and value heads, a divisor of num_heads; defaults to num_heads.
      head_dim: features of a head, instead of qkv_features.
      pattern: which query attends to which key: a preset's name (``"sparse_transformer_strided:stride=64"``), a mask,
        a sequence of masks for the heads (head h uses entry h % len; len must divide num_heads), or a numpy bool array
        [seq_len, seq_len] or [entries, seq_len, seq_len].
      seq_len: the longest input, in tokens.
      rope: rotary position embeddings of q and k after QK norm, by position or by grid coordinates, see `Rope`.
      rope_theta: short for ``rope=Rope(rope_theta)``.
      relative_bias: a bias of logits by head and distance, as ``sl.AlibiBias()``, see `RelativeBias`. Its table, if it
        has one, is the param ``bias_table``, initially zero.
      normalize_qk: norms of q and k before the rotation (``query_ln``, ``key_ln``), with scales and no biases. True or
        "layer" is Flax's layer norm of each head, "rms" the RMS norm of each head (Qwen 3, Gemma 3), "rms_joint" the
        RMS norm over all heads of a token together (OLMo 2).
      norm_epsilon: added to the variance in these norms.
      use_bias: True if the four projections have biases, or the names of those that do: ("query", "key", "value") in
        Qwen 2.5, ("query", "value", "out") in Whisper.
      use_sinks: True gives each head a learned logit (``sinks``, float param [N], initially zero). It joins every
        softmax and adds nothing to the output, so that a query may attend to nothing.
      gate_output: True or "elementwise" multiplies the output of each head by the sigmoid of a projection of the inputs
        (``out_gate``, kernel [F, N, H]; Qwen3-Next), "headwise" by one number for the head (kernel [F, N, 1]). The
        projection has a bias if that of queries has.
      scale: factor of the logits; None for head size ** -0.5.
      logits_soft_cap: None, or c > 0: logits become c * tanh(logits / c).
      implementation: None for the best on the platform, or a name. With "xla" or "reference", decoding steps use XLA
        too, see `KVCache.empty`.
      fwd_params, bwd_params: settings of the kernels; None for the library's choice.
      query_sharding: sharding of queries [B, T, N, H] on a mesh of Auto axes, as in `block_sparse_attention`; B stands
        for all leading axes together.
      selection: a scorer that selects key blocks within a causal pattern at run time, as
        ``sl.MoBA(block=128, count=16)``, or its name, ``"moba:block=128,count=16"``. As the pattern, a scorer selects
        among all earlier keys. Inputs whose blocks would all be selected follow the pattern alone. None for no
        selection, or one for each call.
      cache_dtype: None, or "int8" or "float8_e4m3fn" for caches of `prefill` in 8 bits, see `KVCache.empty`.
      dropout_rate: must be 0, see Raises.
      decode: must be False or None, see Raises; decode with `prefill` and `decode_step`.
      rngs: random number generators of the initial parameters.
      **options: all other arguments of ``flax.nnx.MultiHeadAttention`` except ``in_kv_features`` and
        ``attention_fn``: ``dtype``, ``param_dtype``, ``kernel_init``, ``out_kernel_init``, ...; ``precision`` is for
        the four projections.

    Attributes:
      pattern: the name or mask; a sequence or an array becomes its tuple of masks.
      plan: the plan of the pattern for seq_len tokens.

    Raises:
      ValueError: an unknown preset or option of it; a number of patterns that does not divide num_heads; an array
        whose lengths are not seq_len; sizes that are not integers >= 1, flags that are not bools, dtypes that are not
        floating; qkv_features that num_heads does not divide, or that contradict head_dim; a rope whose axes cannot
        share the head size, or both rope and rope_theta; whatever `block_sparse_attention` refuses (an unknown
        implementation, a soft cap <= 0, ...); dropout_rate > 0 (probabilities are never formed, so they cannot be
        dropped: use dropout on the residual, as the Sparse Transformer does).
      TypeError: an unknown argument; a pattern, rope, relative_bias or rngs of another type.
      NotImplementedError: decode=True (the cache is not Flax's dense one), or an implementation that does not support
        the layer.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.SparseSelfAttention(2, 8, pattern=sl.Causal() & sl.Window(3), seq_len=16, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
    """

    _limits = ("seq_len",)
    seq_len: int

    @strict_kwargs
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        pattern: Pattern,
        seq_len: int,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        relative_bias: RelativeBias | None = None,
        normalize_qk: bool | str = False,
        norm_epsilon: float = 1e-6,
        use_bias: bool | Collection[str] = True,
        use_sinks: bool = False,
        gate_output: bool | str = False,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        implementation: str | None = None,
        fwd_params: FwdParams | None = None,
        bwd_params: BwdParams | None = None,
        query_sharding: jax.sharding.PartitionSpec | None = None,
        selection: Scorer | str | None = None,
        dropout_rate: float = 0.0,
        decode: bool | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[SelfAttentionOptions],
    ):
        _refuse_decode(decode)
        positional: Any = {"rope": rope, "rope_theta": rope_theta, "relative_bias": relative_bias}
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            lengths={"seq_len": seq_len},
            head_dim=head_dim,
            pattern=pattern,
            dropout_rate=dropout_rate,
            **positional,
            normalize_qk=normalize_qk,
            norm_epsilon=norm_epsilon,
            use_bias=use_bias,
            use_sinks=use_sinks,
            gate_output=gate_output,
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            implementation=implementation,
            fwd_params=fwd_params,
            bwd_params=bwd_params,
            query_sharding=query_sharding,
            selection=selection,
            rngs=rngs,
            **options,
        )
        self._make_index(rngs, {"kernel_init": options["kernel_init"]} if "kernel_init" in options else {})

    def _make_index(self, rngs: nnx.Rngs, options: dict[str, Any]) -> None:
        """Makes the projections of a scorer with an index of its own, which have no bias; ``options`` are Flax's."""
        self.index_query = self.index_key = self.index_loss = nnx.data(None)
        scorer = self.attention_fn.fn.selection
        if scorer is not None and scorer.indexed:
            size = scorer.index_features(self.head_dim)
            options |= {"use_bias": False, "dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
            self.index_query = nnx.LinearGeneral(self.in_features, (self.num_kv_heads, size), **options)
            self.index_key = nnx.LinearGeneral(self.in_features, (1, size), **options)
            self.index_loss = IndexLoss(jnp.zeros((), jnp.float32))

    @strict_kwargs
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] (self-attention only, and no dense mask)
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        order_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        bias: DistanceBias | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> jax.Array:
        """Applies attention to the inputs.

        Args:
          inputs: [..., T, F] with T <= seq_len and any number of leading batch axes, including none.
          segment_ids: int [..., T]; tokens attend within their own id only (packed documents). Negative ids are
            padding, which attends to nothing.
          order_ids: int [..., T]; a token sees those whose id is at most its own, within the pattern and segment. So
            prefixes, spans and blocks may differ by batch entry: see `prefix_order`, `span_order` and `block_order`.
          selection: the key blocks of each query within the pattern, selected at run time: a `Selection` with the
            leading axes of the inputs.
          positions: int [..., T] or [T], the positions for `Rope`; None for 0, 1, ... They differ from these in packed
            documents that each begin at 0, prompts padded on the left, and chunks of a longer text. The pattern
            always counts from the first token of the input.
          bias: a bias of logits, as in `block_sparse_attention`, for layers without a relative_bias: a table that
            several layers share, or one that the model computes. Distances count tokens, whatever the positions.
          sow_weights: must be False, see Raises.
          decode: must be False or None, see Raises.
          out_sharding, qkv_sharding: passed to Flax's projections.

        Returns:
          [..., T, out_features] in the layer's dtype.

        Raises:
          ValueError: inputs that are not floats, are longer than seq_len or have another shape; ids or positions
            whose shape is not that of the tokens; a selection whose axes or blocks do not fit the inputs; a bias of
            other heads, or beside a relative_bias; sow_weights=True (the probabilities are never formed).
          TypeError: an argument that is not an array, or a selection or bias of another type.
          NotImplementedError: decode=True.
        """
        _refuse_decode(decode or self.decode)
        options = segment_ids, selection, sow_weights, positions, order_ids
        check_inputs({"inputs": inputs}, [self.in_features], self.lengths, *options)
        losses = None if self.deterministic else []
        call_inputs = self._core.call_inputs(inputs, segment_ids, selection, positions, losses, order_ids, bias)
        out = super().__call__(
            inputs,
            mask=call_inputs,  # pyright: ignore[reportArgumentType] (Flax hands it to attention_fn as it is)
            decode=False,
            out_sharding=out_sharding,
            qkv_sharding=qkv_sharding,
        )
        if self.index_loss is not None and losses:
            self.index_loss[...] = losses[0]
        return out

    @strict_kwargs
    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to prompts, or to a chunk of them, and caches their keys and values for `decode_step`.

        Args:
          inputs: [B, T, F] with start + T <= seq_len.
          lengths: int [B], tokens of each prompt so far, followed by padding; None for start + T.
          selection: as in a call; for a chunk, that of its queries, over all blocks so far.
          bias: as in a call, for each chunk and each step alike.
          positions: int [B, T] or [T], as in a call; None for start, start + 1, ...
          max_step: the most tokens that a step will add, 1 by default, see `KVCache.empty`; for later chunks, that of
            their cache.
          cache: the cache of the previous chunk; None for the first chunk.
          start: an int, the number of tokens in previous chunks, 0 by default.
          total: an int, the number of tokens in all chunks; None for start + T. Only ``dense_below`` of a scorer
            reads it.
          order_ids: int [B, T], as in a call, for whole prompts. The pattern need not be causal then: prompts see what
            the ids allow, and each new token sees what the pattern allows of the tokens before it.

        Returns:
          (out [B, T, out_features] as of a call, the cache). The output of padding is undefined. A sequence that
          ended before this chunk keeps its cache.

        Raises:
          ValueError: see a call; inputs that are not [B, T, F]; lengths (outside of jit) outside of 0..start + T; a
            pattern that is not causal, without order_ids; a start or total that does not fit; the cache of another
            layer.
          TypeError: see a call; a cache of another type.
          NotImplementedError: order_ids for a chunk; a bias on a grid; a scorer, or a selection in a chunk, where the
            pattern's cache does not keep all keys, see `KVCache.attend`.

        Example:
          >>> import jax, jax.numpy as jnp, sparse_layers as sl
          >>> from flax import nnx
          >>> layer = sl.SparseSelfAttention(2, 8, pattern=sl.Causal() & sl.Window(9), seq_len=64, rngs=nnx.Rngs(0))
          >>> x, cache = jax.random.normal(jax.random.key(0), (1, 48, 8)), None
          >>> for start in range(0, 48, 16):
          ...     out, cache = layer.prefill(x[:, start : start + 16], cache=cache, start=start)
          >>> bool(jnp.allclose(out, layer(x)[:, 32:], atol=1e-5))
          True
        """
        return self._core.prefill(inputs, lengths, **options)

    @strict_kwargs
    def decode_step(
        self, inputs: jax.Array, cache: KVCache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to one or more new tokens of each sequence, at the cost of the pattern's rows.

        Args:
          inputs: [B, F], or [B, S, F] with S at most the max_step of `prefill`.
          cache: the cache of `prefill` or of the previous step.
          position: int [B], the number of tokens before each token, or before the first of S. An earlier position
            rolls tokens back, see `KVCache.written`.
          selection: the key blocks of the tokens, a `Selection` of ids [B, 1, G, k], or [B, S, G, k], see
            `KVCache.attend`.
          bias: as in a call.
          positions: int [B], or [B, S] or [S], the positions for `Rope`; None for ``position``, ``position + 1``, ...

        Returns:
          (out [B, out_features] or [B, S, out_features], the new cache).

        Raises:
          ValueError: shapes that do not fit, positions (outside of jit) that are not below seq_len, or the cache of
            a layer with another pattern, length or number of heads.
          TypeError: inputs that are not an array, or a cache or selection of another type.
          NotImplementedError: a selection where the pattern's cache does not keep all keys, see `KVCache.attend`.
        """
        return self._core.decode_step(inputs, cache, position, **options)
