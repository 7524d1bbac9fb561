"""`make_attention_fn`: sparse attention as an attention function, the ``attention_fn=`` of another library's layer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype, PrecisionLike

from ..arguments.checks import strict_kwargs
from ..masks.adapters import MaskLike
from ..masks.algebra import Mask
from ..masks.bounded_cache import bounded_cache
from ..masks.primitives import Causal
from ..ops.attention import block_sparse_attention
from ..ops.chunked_prefill import attend_chunk
from ..ops.decoding.cache import KVCache
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.kernels.quantized import dequantize
from ..ops.layouts import warn_of_heads
from ..ops.planning.causality import is_causal
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.planner import make_plan
from ..ops.planning.platforms import default_implementation
from ..ops.planning.selection import Selection
from ..ops.recorded_calls import mark_call
from ..ops.select import select_blocks
from ..scorers import Scorer, masks_and_scorer
from .index import IndexProjections, index_loss
from .options import FnOptions
from .settings import check_array, check_ids, check_settings

# No model has more heads. An axis of heads that is as long as seq_len, and longer than this, holds the tokens.
_MAX_HEADS = 256

# The pattern of one layer. A sequence has one entry a head, and is repeated over the heads.
Pattern: TypeAlias = MaskLike | Scorer
# The patterns of a model. A sequence has one entry a layer, and is repeated over the layers.
Patterns: TypeAlias = "Pattern | Sequence[Pattern]"


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """An attention function over a pattern, with the arguments of Flax's own; `make_attention_fn` makes one.

    It is a value, not a closure: equal settings give equal functions, so layers with equal functions share a trace.

    Attributes:
      masks: one mask a head, repeated over the heads.
      seq_len: the longest input, in tokens; for cross-attention, the longest input of queries.
      recompute, implementation, scale, logits_soft_cap, fwd_params, bwd_params: see `make_attention_fn`.
      query_sharding, selection: see `make_attention_fn`.
    """

    masks: tuple[Mask, ...]
    seq_len: int
    recompute: bool = False
    implementation: str | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    query_sharding: jax.sharding.PartitionSpec | None = None
    selection: Scorer | None = None

    @functools.cached_property
    def causal_masks(self) -> tuple[Mask, ...]:
        """The masks, without the keys after each query."""
        return tuple(mask if is_causal(mask, self.seq_len) else mask & Causal() for mask in self.masks)

    @property
    def cache_implementation(self) -> str | None:
        """The implementation of decoding steps, an argument of `KVCache.empty`."""
        return "xla" if self.implementation in ("xla", "reference") else None

    def plan(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        causal: bool = False,
        dtype: Any = None,
        head_size: int | None = None,
    ) -> Plan:
        """Returns the plan of the pattern for these lengths (cached).

        Args:
          q_len: number of queries.
          kv_len: number of keys of another sequence; None for self-attention.
          causal: True also hides keys after the query.
          dtype, head_size: those of the arrays, where they decide the implementation.
        """
        return make_plan(
            self.causal_masks if causal else self.masks,
            q_len,
            kv_len,
            fwd_params=self.fwd_params,
            bwd_params=self.bwd_params,
            implementation=self.implementation or default_implementation(dtype, head_size),
        )

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        order_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        selection: Selection | None = None,
        sinks: jax.Array | None = None,
        index: IndexProjections | None = None,
        bias: DistanceBias | None = None,
        causal: bool = False,
    ) -> jax.Array:
        """Applies the op to arrays [..., T, heads, size] with any leading axes.

        Args:
          query, key, value: as in `block_sparse_attention`, of one dtype, with equal leading axes.
          segment_ids, order_ids: int [..., T] for self-attention, or a pair of arrays for queries and keys.
          selection: the key blocks of each query, with the leading axes of query; None for the selection of the
            function's own scorer, if it has one.
          sinks: [N] logits.
          index: projections that a scorer scores instead of query and key, with their leading axes.
          bias: a bias of logits, as in `block_sparse_attention`; scores of a scorer have none.
          causal: True also hides keys after the query.

        Returns:
          An array like query, its last axis that of value.
        """
        batch = query.shape[:-3]
        rows = math.prod(batch)  # not -1: a batch may be empty
        query, key, value = (x.reshape(rows, *x.shape[-3:]) for x in (query, key, value))
        ids = {"segment_ids": segment_ids, "order_ids": order_ids}
        ids = jax.tree.map(lambda ids: ids.reshape(rows, ids.shape[-1]), ids)
        selection = jax.tree.map(lambda ids: ids.reshape(rows, *ids.shape[-3:]), selection)
        self._check_selection(selection)
        if self.selection is not None:
            shared: Any = {"scale": self.scale, "query_sharding": self.query_sharding}
            if self.selection.indexed != (index is not None):
                raise ValueError(
                    f"selection: {self.selection} scores projections that SparseSelfAttention has, of NNX or Linen: it "
                    "must be given to one of these"
                )
            scored = (query, key) if index is None else index.arrays(rows)
            selection = select_blocks(self.selection, *scored, **ids, **shared)
        size = max(query.shape[-1], value.shape[-1])
        plan = self.plan(query.shape[1], key.shape[1], causal=causal, dtype=query.dtype, head_size=size)
        options: dict[str, Any] = {
            **ids,
            "selection": selection,
            "logits_soft_cap": self.logits_soft_cap,
            "implementation": self.implementation,
            "query_sharding": self.query_sharding,
        }
        if index is not None and index.losses is not None:
            index.losses.append(index_loss(query, key, *index.arrays(rows), plan, self.scale, options, bias))

        # Without the ids as a parameter: jax.checkpoint would cut 64-bit ids off before the op could refuse them.
        def op(query, key, value, sinks, bias):
            return block_sparse_attention(query, key, value, plan, scale=self.scale, sinks=sinks, bias=bias, **options)

        with mark_call(seq_len=self.seq_len):
            out = (jax.checkpoint(op) if self.recompute else op)(query, key, value, sinks, bias)
        return out.reshape(*batch, *out.shape[1:])

    def attend_chunk(
        self,
        caches: tuple[KVCache, KVCache],
        heads: tuple[jax.Array, jax.Array, jax.Array],
        start: int,
        total: int,
        *,
        selection: Selection | None = None,
        sinks: jax.Array | None = None,
        index: IndexProjections | None = None,
        bias: DistanceBias | None = None,
    ) -> jax.Array:
        """Applies the op to a chunk of prompts, whose earlier keys are in a cache.

        Args:
          caches: the caches before and after the chunk was written.
          heads: query, key and value [B, C, heads, size], of tokens start to start + C - 1.
          start: number of tokens before the chunk.
          total: number of tokens of the prompts, which decides whether a scorer selects.
          selection, sinks, index, bias: see `attend`.

        Returns:
          [B, C, N, Hv].
        """
        self._check_selection(selection)
        query = heads[0]
        scorer, pooled, end = self.selection, caches[1].pooled, start + query.shape[1]
        # With no more blocks than a scorer selects, every query attends to all.
        if scorer is not None and pooled is not None and scorer.selects(total) and end > scorer.count * scorer.block:
            keys = jax.tree.map(lambda x: x[:, :, :end], caches[1].layout.all_keys(caches[1].keys))
            shared: Any = {"scale": self.scale, "pooled": pooled[:, : scorer.windows(end)], "first": jnp.int32(start)}
            scored = query if index is None else index.query
            selection = scorer.select_blocks(scored, dequantize(keys, query.dtype).swapaxes(1, 2), **shared)
        query_sharding = self.query_sharding
        if query_sharding is not None:  # a chunk's tokens are not sharded: its row order differs from the sequence's
            query_sharding = jax.sharding.PartitionSpec(*query_sharding[:1], None, *query_sharding[2:])
        return attend_chunk(
            *caches,
            *heads,
            start,
            selection=selection,
            sinks=sinks,
            bias=bias,
            scale=self.scale,
            logits_soft_cap=self.logits_soft_cap,
            implementation=self.implementation,
            fwd_params=self.fwd_params,
            query_sharding=query_sharding,
        )

    def _check_selection(self, selection: Selection | None) -> None:
        if self.selection is not None and selection is not None:
            raise ValueError(f"selection must be None, as {self.selection} selects the blocks, got {selection!r}")

    # Each parameter is named: Linen passes those in the signature and drops all others silently.
    @strict_kwargs
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: DistanceBias | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        precision: PrecisionLike = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        segment_ids: jax.Array | np.ndarray | None = None,
        order_ids: jax.Array | np.ndarray | None = None,
    ) -> jax.Array:
        """Applies attention over the pattern, with the arguments of `flax.nnx.dot_product_attention` and Linen's.

        Args:
          query: [..., T, N, H].
          key: [..., T, K, H], K dividing N.
          value: [..., T, K, Hv].
          bias: a `DistanceBias`, as in `block_sparse_attention`; None for no bias.
          mask: key padding, whose last axis is T and whose other axes broadcast to [..., 1, 1, T]: keys where it is
            False (or 0) are hidden. A query that is left without any key gets 0.
          dtype: of the computation; None for `jax.numpy.result_type` of the three.
          is_causal: True also hides keys after the query.
          segment_ids, order_ids: int [..., T], see `block_sparse_attention`.
          deterministic, dropout_rate: one of them must switch dropout off.
          broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax: without effect: nothing is dropped, and
            logits, softmax and sums are float32 at least.
          module, qk_attn_weights_einsum, attn_weights_value_einsum, input_positions: refused, see Raises.

        Returns:
          [..., T, N, Hv] in the dtype of the computation.

        Raises:
          ValueError: an argument that the kernels cannot follow, with the reason: another bias, dropout while training,
            weights to sow, an einsum, positions, a mask that differs by query or head, queries and keys of different
            lengths, more tokens than ``seq_len``, axes of tokens and heads that look swapped; and errors of
            `block_sparse_attention`.
          TypeError: an argument that is not an array.
        """
        never = "block-sparse attention never forms the attention weights"
        if not isinstance(bias, DistanceBias | None):
            raise ValueError(
                f"bias must be a DistanceBias or None, got shape {jnp.shape(bias)}: the pattern's kernels add numbers "
                "by head and distance, such as sl.alibi(num_heads) and sl.t5_bias(buckets), and not by pair"
            )
        if dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"dropout_rate must be 0 while training, got {dropout_rate}: {never}, so none can be dropped; "
                "apply dropout to the output (the residual) instead"
            )
        if module is not None:
            raise ValueError(f"sow_weights must be False: {never}")
        for name, einsum in (
            ("qk_attn_weights", qk_attn_weights_einsum),
            ("attn_weights_value", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise ValueError(f"{name}_einsum must be None, got {einsum!r}: {never}, and kernels multiply by blocks")
        if input_positions is not None:
            raise ValueError(
                "input_positions must be None: positions count from the first token, and this function applies no "
                "rotary embedding; for one, apply a Rope to query and key before, or use SparseSelfAttention(rope=)"
            )
        check_settings(is_causal=is_causal, dtype=dtype)
        self._check_arrays(query, key, value)
        warn_of_heads("attention_fn", query.shape, key.shape[-3:-1], self.seq_len)
        for name, ids in (("segment_ids", segment_ids), ("order_ids", order_ids)):
            if ids is not None:
                check_ids(name, ids, [query.shape[:-2]])
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        segments: Any = segment_ids if mask is None else ids_from_padding(mask, query.shape[:-2], segment_ids)
        order: Any = order_ids
        with mark_call(dropout_rate=dropout_rate):
            return self.attend(query, key, value, segment_ids=segments, order_ids=order, bias=bias, causal=is_causal)

    def _check_arrays(self, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
        """Refuses arrays of wrong shapes, or with more than ``seq_len`` tokens."""
        for name, array in (("query", query), ("key", key), ("value", value)):
            check_array(name, array, "[..., T, heads, size]")
        if query.ndim < 3 or key.shape[:-2] != query.shape[:-2] or value.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                "query, key and value must have shapes [..., T, heads, size] with equal T (self-attention), got "
                f"{query.shape}, {key.shape} and {value.shape}; with decode=True of Flax's layers the position of the "
                "query is not known here: decode with sl.KVCache"
            )
        if query.shape[-2] == self.seq_len > _MAX_HEADS:
            raise ValueError(
                f"query must have shape [..., T, heads, size], got {query.shape}: its heads are as many as seq_len="
                f"{self.seq_len}, so the axes of tokens and heads look swapped; swap them by jnp.swapaxes(x, -2, -3)"
            )
        if query.shape[-3] > self.seq_len:
            raise ValueError(
                f"the input has {query.shape[-3]} tokens, more than seq_len={self.seq_len} of make_attention_fn"
            )


def ids_from_padding(mask: jax.Array, tokens: tuple[int, ...], segment_ids: Any) -> tuple[Any, jax.Array]:
    """Returns segment ids of queries and of keys [..., T] that follow a key padding mask [..., 1, 1, T].

    Raises:
      ValueError: a mask of another shape.
    """
    shape = jnp.shape(mask)
    shape = (1,) * (len(tokens) + 2 - len(shape)) + shape
    *batch, heads, queries, keys = shape
    fits = keys == tokens[-1] and len(batch) == len(tokens) - 1
    if not fits or (heads, queries) != (1, 1) or any(a not in (1, b) for a, b in zip(batch, tokens, strict=False)):
        raise ValueError(
            f"mask must be key padding of shape [..., 1, 1, T] that broadcasts to {(*tokens[:-1], 1, 1, tokens[-1])}, "
            f"got {jnp.shape(mask)}: the pattern masks pairs of tokens (causality too), segment_ids separate "
            "documents; for valid tokens [..., T], pass valid[..., None, None, :]"
        )
    valid = jnp.broadcast_to(jnp.asarray(mask).reshape(*batch, keys) != 0, tokens)
    ids = jnp.zeros(tokens, jnp.int32) if segment_ids is None else segment_ids
    # The ids of queries keep their dtype for the op to check: two documents could have equal ids in 32 bits.
    return ids, jnp.where(valid, jnp.asarray(ids).astype(jnp.int32), -1)


@overload
def make_attention_fn(
    pattern: Pattern,
    seq_len: int,
    *,
    segment_ids: None = None,
    **options: Unpack[FnOptions],
) -> AttentionFn: ...


@overload
def make_attention_fn(
    pattern: Pattern,
    seq_len: int,
    *,
    segment_ids: jax.Array | np.ndarray,
    **options: Unpack[FnOptions],
) -> functools.partial[jax.Array]: ...


@strict_kwargs
def make_attention_fn(
    pattern: Pattern,
    seq_len: int,
    *,
    recompute: bool = False,
    implementation: str | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    query_sharding: jax.sharding.PartitionSpec | None = None,
    selection: Scorer | str | None = None,
    segment_ids: jax.Array | np.ndarray | None = None,
) -> AttentionFn | functools.partial[jax.Array]:
    """Makes the attention function of a pattern, the ``attention_fn=`` of Flax's layers, NNX or Linen.

    The pattern is compiled here, for ``seq_len`` tokens; equal arguments return the same function. Shorter inputs use
    the upper left corner of the pattern. Models with attention of their own call it as ``attention_fn(q, k, v)`` on
    arrays [..., T, heads, size]. Its derivatives are those of `block_sparse_attention`.

    Args:
      pattern, selection: as in `SparseSelfAttention`; the number of masks must divide the number of heads.
      seq_len: the longest input, in tokens.
      recompute: True computes attention again in the backward pass (`jax.checkpoint`) instead of keeping its output and
        log-sum-exp. Inside Flax's layers this saves the log-sum-exp only, as the next projection keeps the output for
        its own gradient. `jax.checkpoint` around whole layers saves more. There leave recompute False, and keep the
        names "sparse_attention_out" and "sparse_attention_lse", which each implementation but "cudnn" gives, with
        ``policy=jax.checkpoint_policies.save_only_these_names(...)``. Without that policy attention is computed again,
        and with recompute a third time.
      implementation: None for the best on the platform, or a name.
      scale: factor of the logits; None for head size ** -0.5.
      logits_soft_cap: None, or c > 0: logits become c * tanh(logits / c).
      fwd_params, bwd_params: settings of the kernels; None for the library's choice.
      query_sharding: sharding of queries [B, T, N, H] on a mesh of Auto axes, as in `block_sparse_attention`; B stands
        for all leading axes together.
      segment_ids: int [..., T], documents and padding of one batch, see `block_sparse_attention`. The function is then
        for this batch alone: make it inside the model's ``__call__``, which costs a look-up. An NNX layer keeps its
        function, so set it on a copy (``copy = nnx.clone(layer)``); otherwise the layer would keep a traced array.

    Returns:
      An `AttentionFn`; with ``segment_ids``, a `functools.partial` of it.

    Raises:
      ValueError: an unknown preset, option or implementation; an array whose lengths are not seq_len; a seq_len that is
        not an integer >= 1, a recompute that is not a bool, a scale or cap that is not a finite Python number.
      TypeError: a pattern of another type; segment_ids that are not an array.
      NotImplementedError: the named implementation does not support the pattern here, with the reason.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> sparse = sl.make_attention_fn("local:local_attn_ctx=64", 256)
      >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=sparse, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 256, 8))).shape
      (1, 256, 8)

    References:
      openai/sparse_attention (the recompute decorator, which built and kept one function for each configuration).
    """
    check_settings(seq_len=seq_len, recompute=recompute, scale=scale, logits_soft_cap=logits_soft_cap)
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, "[..., T]")
    masks, scorer = masks_and_scorer(pattern, selection, [seq_len])
    settings = bool(recompute), implementation, scale, logits_soft_cap, fwd_params, bwd_params, query_sharding, scorer
    fn = _attention_fn(masks, int(seq_len), *settings)
    return fn if segment_ids is None else functools.partial(fn, segment_ids=segment_ids)


@bounded_cache()
def _attention_fn(masks, seq_len, *settings) -> AttentionFn:
    fn = AttentionFn(masks, seq_len, *settings)
    # An abstract trace reports a bad block size, soft cap or implementation now, not in the first step.
    array = jax.ShapeDtypeStruct((1, seq_len, len(masks), 64), jnp.bfloat16)
    jax.eval_shape(fn, array, array, array)
    return fn
