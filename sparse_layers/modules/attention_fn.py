"""`make_attention_fn`: sparse attention as the ``attention_fn`` of somebody else's multi-head attention."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, Unpack, overload

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
from ..ops.decoding.ring_cache import join_pages
from ..ops.layouts import warn_of_heads
from ..ops.planning.causality import is_causal
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan, make_plan
from ..ops.planning.platforms import default_implementation
from ..ops.planning.selection import Selection
from ..ops.select import select_blocks
from ..scorers import Scorer, masks_and_scorer
from .settings import FnOptions, check_array, check_settings

# No model has so many: if the heads are as many as seq_len, and that is more, they are the tokens.
_MOST_HEADS = 256

# Who attends to whom in one layer; a sequence is taken in turn by its heads.
Pattern: TypeAlias = MaskLike | Scorer
# The same for the layers of a model, which take them in turn.
Patterns: TypeAlias = "Pattern | Sequence[Pattern]"


class Index(NamedTuple):
    """What a scorer like `MSA` scores, and where the loss goes by which it learns.

    Attributes:
      query: [..., T, K, size].
      key: [..., T, 1, size].
      losses: to which the loss of a call is added, a float32 scalar; None for no loss.
    """

    query: jax.Array
    key: jax.Array
    losses: list[jax.Array] | None = None

    def arrays(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """The arrays with one axis in the place of all leading ones."""
        return self.query.reshape(rows, *self.query.shape[-3:]), self.key.reshape(rows, *self.key.shape[-3:])


def _index_loss(query, key, index_query, index_key, plan, scale, options) -> jax.Array:
    """The loss of `MSA`: its two sums over keys are attention with index keys as values, and a log-sum-exp."""
    query, key = jax.lax.stop_gradient((query, key))
    (*_, heads, _), kv_heads, size = query.shape, key.shape[2], index_key.shape[3]
    values = jnp.broadcast_to(index_key, (*index_key.shape[:2], kv_heads, size))
    expected = block_sparse_attention(query, key, values, plan, scale=scale, **options)
    expected = expected.reshape(*expected.shape[:2], kv_heads, heads // kv_heads, size).mean(3)
    wanted = (expected.astype(jnp.float32) * index_query.astype(jnp.float32)).sum(-1) * size**-0.5
    options = options | {"logits_soft_cap": None}
    _, lse = block_sparse_attention(index_query, index_key, index_key[..., :8], plan, return_lse=True, **options)
    alive = lse > -jnp.inf
    return jnp.where(alive, lse - wanted, 0).sum() / jnp.maximum(alive.sum(dtype=lse.dtype), 1)


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """What `make_attention_fn` returns: attention over a pattern, with the parameters of Flax's own.

    A value and not a closure: equal settings are equal functions, so layers that hold them share one trace.

    Attributes:
      masks: the masks that the heads take in turn.
      seq_len: the longest input, in tokens; that of the queries, where keys are those of another sequence.
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

    def plan(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        causal: bool = False,
        dtype: Any = None,
        head_size: int | None = None,
    ) -> Plan:
        """The compiled pattern for so many queries and keys (cached), keys of another sequence if ``kv_len`` is given.

        With ``causal``, without what lies in the future; with ``dtype`` and ``head_size``, for such arrays.
        """
        masks = self.masks
        if causal:
            masks = tuple(mask if is_causal(mask, q_len) else mask & Causal() for mask in masks)
        return make_plan(
            masks,
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
        selection: Selection | None = None,
        sinks: jax.Array | None = None,
        index: Index | None = None,
        causal: bool = False,
    ) -> jax.Array:
        """The op on arrays [..., T, heads, size] with any leading axes.

        Args:
          query, key, value: of one dtype; as in `block_sparse_attention` but for the leading axes, which are equal.
          segment_ids: int [..., T] where keys are as many as queries, or a pair of those for queries and keys.
          selection: the key blocks that queries look at, with the leading axes of query; None for what the function's
            own scorer chooses, if it has one.
          sinks: [N] logits.
          index: what a scorer scores in place of query and key, with their leading axes.
          causal: also hide what lies in the future.

        Returns:
          An array like query, its last axis that of value.
        """
        batch = query.shape[:-3]
        rows = math.prod(batch)  # not -1: a batch may be empty
        query, key, value = (x.reshape(rows, *x.shape[-3:]) for x in (query, key, value))
        segment_ids = jax.tree.map(lambda ids: ids.reshape(rows, ids.shape[-1]), segment_ids)
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
            selection = select_blocks(self.selection, *scored, segment_ids, **shared)
        size = max(query.shape[-1], value.shape[-1])
        plan = self.plan(query.shape[1], key.shape[1], causal=causal, dtype=query.dtype, head_size=size)
        options: dict[str, Any] = {
            "segment_ids": segment_ids,
            "selection": selection,
            "logits_soft_cap": self.logits_soft_cap,
            "implementation": self.implementation,
            "query_sharding": self.query_sharding,
        }
        if index is not None and index.losses is not None:
            index.losses.append(_index_loss(query, key, *index.arrays(rows), plan, self.scale, options))

        # Without the ids as a parameter: jax.checkpoint would cut 64-bit ids off before the op could refuse them.
        def op(query, key, value, sinks):
            return block_sparse_attention(
                query,
                key,
                value,
                plan,
                scale=self.scale,
                sinks=sinks,
                **options,
            )

        out = (jax.checkpoint(op) if self.recompute else op)(query, key, value, sinks)
        return out.reshape(*batch, *out.shape[1:])

    def attend_chunk(
        self,
        caches: tuple[KVCache, KVCache],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        start: int,
        total: int,
        *,
        selection: Selection | None = None,
        sinks: jax.Array | None = None,
        index: Index | None = None,
    ) -> jax.Array:
        """`attend` for a piece of prompts.

        Args:
          caches: before and after it was filled in.
          query, key, value: [B, C, heads, size], of tokens start to start + C - 1.
          start: tokens before the piece.
          total: tokens of the prompts, which say whether a scorer chooses.
          selection, sinks, index: as of `attend`.
        """
        self._check_selection(selection)
        scorer, pooled, end = self.selection, caches[1].pooled, start + query.shape[1]
        # Where there are no more blocks than are chosen, everyone looks at all.
        if scorer is not None and pooled is not None and scorer.selects(total) and end > scorer.count * scorer.block:
            keys = join_pages(caches[1].keys[caches[1].layout.full_store_index()])
            shared: Any = {"scale": self.scale, "pooled": pooled[:, : scorer.windows(end)], "first": jnp.int32(start)}
            scored = query if index is None else index.query
            selection = scorer.select_blocks(scored, keys[:, :, :end].swapaxes(1, 2), **shared)
        query_sharding = self.query_sharding
        if query_sharding is not None:  # devices cannot share its tokens, whose rows are in another order
            query_sharding = jax.sharding.PartitionSpec(*query_sharding[:1], None, *query_sharding[2:])
        return attend_chunk(
            *caches,
            query,
            key,
            value,
            start,
            selection=selection,
            sinks=sinks,
            scale=self.scale,
            logits_soft_cap=self.logits_soft_cap,
            implementation=self.implementation,
            fwd_params=self.fwd_params,
            query_sharding=query_sharding,
        )

    def _check_selection(self, selection: Selection | None) -> None:
        if self.selection is not None and selection is not None:
            raise ValueError(f"selection must be None, for {self.selection} chooses the blocks, got {selection!r}")

    # Every parameter by its name: Linen hands over those that it finds in the signature and drops the others silently.
    @strict_kwargs
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
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
    ) -> jax.Array:
        """Attention as `flax.nnx.dot_product_attention` and Linen's compute it, over the pattern.

        Args:
          query: [..., T, N, H].
          key: [..., T, K, H], K dividing N.
          value: [..., T, K, Hv].
          mask: key padding, whose last axis is T and whose other axes broadcast to [..., 1, 1, T]: keys where it is
            False (or 0) are hidden. A query that is left without any key gets 0.
          dtype: of the computation; None for that of the arrays together.
          is_causal: also hide what lies in the future, whatever the pattern says.
          segment_ids: int [..., T], see `block_sparse_attention`.
          deterministic, dropout_rate: dropout is refused unless one of them switches it off.
          broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax: without effect: nothing is dropped, and
            logits, softmax and sums are float32 at least.
          bias, module, qk_attn_weights_einsum, attn_weights_value_einsum, input_positions: refused, see Raises.

        Returns:
          [..., T, N, Hv] in the dtype of the computation.

        Raises:
          ValueError: what cannot be honoured, with the reason: a bias, dropout while training, weights to be sown, an
            einsum of one's own, positions, a mask that differs by query or head, queries and keys of different
            lengths, more tokens than ``seq_len``, axes of tokens and heads that look swapped; and what
            `block_sparse_attention` refuses.
          TypeError: what is no array.
        """
        never = "block-sparse attention never forms the attention weights"
        if bias is not None:
            raise ValueError(
                f"bias must be None, got shape {jnp.shape(bias)}: the pattern's kernels add none to logits; relative "
                "positions are said by rotary embeddings, sl.Rope"
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
                "input_positions must be None: positions count from the first token, and this function turns nothing; "
                "for rotary embeddings, apply a Rope to query and key before, or use SparseSelfAttention(rope=)"
            )
        for name, array in (("query", query), ("key", key), ("value", value)):
            check_array(name, array, "[..., T, heads, size]")
        check_settings(is_causal=is_causal, dtype=dtype)
        if query.ndim < 3 or key.shape[:-2] != query.shape[:-2] or value.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                "query, key and value must have shapes [..., T, heads, size] with equal T (self-attention), got "
                f"{query.shape}, {key.shape} and {value.shape}; with decode=True of Flax's layers the position of the "
                "query is not known here: decode with sl.KVCache"
            )
        length = query.shape[-3]
        if query.shape[-2] == self.seq_len > _MOST_HEADS:
            raise ValueError(
                f"query must have shape [..., T, heads, size], got {query.shape}: its heads are as many as seq_len="
                f"{self.seq_len}, so the axes of tokens and heads look swapped; swap them by jnp.swapaxes(x, -2, -3)"
            )
        warn_of_heads("attention_fn", query.shape, key.shape[-3:-1], self.seq_len)
        if length > self.seq_len:
            raise ValueError(f"the input has {length} tokens, more than seq_len={self.seq_len} of make_attention_fn")
        ids: Any = segment_ids
        if ids is not None:
            check_array("segment_ids", ids, "[..., T]")
            if ids.shape != query.shape[:-2]:
                raise ValueError(f"segment_ids must have one id a token, {query.shape[:-2]}, got shape {ids.shape}")
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        ids = ids if mask is None else padded(mask, query.shape[:-2], ids)
        return self.attend(query, key, value, segment_ids=ids, causal=is_causal)


def padded(mask: jax.Array, tokens: tuple[int, ...], segment_ids: Any) -> tuple[Any, jax.Array]:
    """Segment ids of queries and keys [..., T] from a key padding mask [..., 1, 1, T].

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
            f"got {jnp.shape(mask)}: who attends to whom is said by the pattern (causality, too), documents by "
            "segment_ids; of tokens that are valid [..., T], pass valid[..., None, None, :]"
        )
    keep = jnp.broadcast_to(jnp.asarray(mask).reshape(*batch, keys) != 0, tokens)
    ids = jnp.zeros(tokens, jnp.int32) if segment_ids is None else segment_ids
    # Those of the queries stay as they are, for the op to check: cut off to 32 bits, two documents could become one.
    return ids, jnp.where(keep, jnp.asarray(ids).astype(jnp.int32), -1)


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
    """Sparse attention for an existing model: the ``attention_fn=`` of Flax's layers, NNX or Linen.

    The pattern is compiled here, for ``seq_len`` tokens; equal arguments return the same function. Shorter inputs see
    the pattern's upper left corner. Models that write attention by hand call it as ``attention_fn(q, k, v)`` on arrays
    [..., T, heads, size]. Its derivatives are those of `block_sparse_attention`.

    Args:
      pattern: who attends to whom: a preset's name (``"sparse_transformer_strided:stride=64"``), a mask, a
        sequence of those that the heads take in turn (head h uses entry h % len; len must divide the heads), or a numpy
        bool array [seq_len, seq_len] or [entries, seq_len, seq_len].
      seq_len: the longest input, in tokens.
      recompute: compute the attention again in the backward pass (`jax.checkpoint`) instead of keeping its output and
        log-sum-exp. A projection that follows keeps the output for its own gradient, so inside Flax's layers this costs
        time and saves the log-sum-exp only. What saves memory is `jax.checkpoint` around whole layers, and there the
        attention need not be computed twice: whatever recompute is, the two are named "sparse_attention_out" and
        "sparse_attention_lse", and ``policy=jax.checkpoint_policies.save_only_these_names(...)`` keeps them (the
        implementation "cudnn" names nothing). Leave recompute False there: without that policy, the attention would
        be computed three times.
      implementation: None for the best that the platform offers, or the name of one.
      scale: factor of the logits; None for head size ** -0.5.
      logits_soft_cap: None, or c > 0: logits become c * tanh(logits / c).
      fwd_params, bwd_params: settings of the kernels; None for the library's choice.
      query_sharding: how queries [B, T, N, H] lie on a mesh of Auto axes, as in `block_sparse_attention`; B are all
        leading axes together.
      selection: how queries choose key blocks within a causal pattern: a scorer or its name, as `SparseSelfAttention`
        takes them; None for no choice. A scorer may also be the pattern.
      segment_ids: int [..., T]: documents and padding of the batch at hand, see `block_sparse_attention`. The function
        is then one for this batch: make it inside the model's ``__call__``, which costs a look-up. An NNX layer keeps
        its function, so give it to a copy of the layer (``copy = nnx.clone(layer)``), lest a traced array stay behind.

    Returns:
      An `AttentionFn`; with ``segment_ids``, a `functools.partial` of it.

    Raises:
      ValueError: an unknown preset, option or implementation; an array whose lengths are not seq_len; a seq_len that is
        no integer >= 1, a recompute that is no bool, a scale or cap that is no finite Python number.
      TypeError: pattern is none of the above; segment_ids are no array.
      NotImplementedError: the named implementation cannot serve the pattern here; says why.

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
    # Traced once, without data: a bad block size, soft cap or implementation shows up now, not in the first step.
    like = jax.ShapeDtypeStruct((1, seq_len, len(masks), 64), jnp.bfloat16)
    jax.eval_shape(fn, like, like, like)
    return fn
