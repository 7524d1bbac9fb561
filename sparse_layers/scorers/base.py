"""`Scorer`, the base of all methods: a rule that scores key blocks for each query and selects the highest."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Natural, Positive, checked, parsed_options, strict_kwargs, suggest
from ..masks.presets import presets
from ..masks.serialization import register_value
from ..ops.kernels.numerics import accumulator_dtype
from ..ops.kernels.select_gpu import choose, score
from ..ops.kernels.validation import (
    check_arrays,
    checked_array,
    checked_numbers,
    checked_scalars,
    checked_visibility,
    describe_value,
)
from ..ops.planning.platforms import has_local_arrays, implementation_order, platform
from ..ops.planning.selection import Selection, checked_position, checked_sizes, top_k_blocks

# Bytes of scores that exist at a time: queries are scored in chunks of this size.
_SCORE_BYTES = 1 << 28


class _OrderLimits(NamedTuple):
    """The least order ids of queries that see keys."""

    window: jax.Array  # int32 [B, W]: that see all keys of a window
    block: jax.Array  # int32 [B, blocks]: that see a key of a block
    has_keys: jax.Array  # bool [B, blocks]: False if a block is all padding


@dataclasses.dataclass(frozen=True)
class Scorer(abc.ABC):
    """A scorer selects key blocks for each query: ``selection=`` of `SparseSelfAttention`, or its ``pattern=``.

    A scorer is a value: equal settings are equal scorers. A method is a subclass that pools the keys of a window to one
    (`pooled`) and scores these (`scores`). A subclass with a name, ``class MoBA(Scorer, name="moba")``, is also a
    pattern's name.

    A query selects ``count`` blocks among its own and earlier ones:

    1. its own block and the ``local - 1`` before it,
    2. the ``first`` blocks of the sequence,
    3. the blocks of the highest score, of equal scores the earlier ones.

    In packed documents, the first block is the one in which the query's document begins, and no block before it is
    selected. Tokens of a document should be contiguous. If other documents lie between them, their keys are scored,
    too, and selections may be wasted on their blocks, which attention then masks. Lengths include padding.

    No gradient flows through a selection: keys learn by being attended to.

    Args:
      block: keys in a block, a multiple of 16 from 16 to 512.
      count: blocks that a query selects, forced ones included.
      first: blocks at the beginning of the sequence that all queries select.
      local: blocks that a query selects up to its own, >= 1.
      dense_below: all queries attend to all blocks in sequences of up to this many tokens.

    Attributes:
      per_query_head: True if each query head selects blocks, False if the query heads of a key head select together.
      formula: the `Formula` of `scores` that kernels compute; None if they do not know it. A subclass that defines
        ``scores`` has None unless it says otherwise.

    Raises:
      ValueError: sizes out of range, or more forced blocks than ``count``.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, sparse_layers as sl
      >>> @dataclasses.dataclass(frozen=True)
      ... class Longest(sl.Scorer):  # all queries select the blocks with the longest mean key
      ...     def scores(self, query, pooled, seen, scale):
      ...         length = jnp.linalg.norm(pooled, axis=-1).swapaxes(1, 2)[:, None]
      ...         return jnp.broadcast_to(length, (len(query), query.shape[1], *length.shape[2:]))
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
      >>> sl.make_attention_fn(Longest(block=16, count=2), 64)(q, k.at[:, 16:32].mul(9.0), v).shape
      (1, 64, 2, 16)
    """

    block: int = 128
    count: int = 16
    first: int = 0
    local: int = 1
    dense_below: int = 0

    per_query_head: ClassVar[bool] = False
    formula: ClassVar[score.Formula | None] = None
    _named: ClassVar[dict[str, type["Scorer"]]] = {}

    def __init_subclass__(cls, name: str | None = None, **options: Any):
        super().__init_subclass__(**options)
        register_value(cls)
        if "scores" in vars(cls):
            cls.formula = vars(cls).get("formula")
        if name is None:
            return
        if not isinstance(name, str) or not name.isidentifier() or name in presets():
            raise ValueError(f"name must be a word, and that of no preset, got {name!r}")
        owner = Scorer._named.setdefault(name, cls)
        if (owner.__module__, owner.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"name must be one that no other scorer has, got {name!r}, that of {owner.__qualname__}")
        Scorer._named[name] = cls

    @staticmethod
    def named(text: str) -> "Scorer | None":
        """Returns the scorer of a name and its options, ``"moba:block=128,count=16"``; None for an unknown name.

        Raises:
          ValueError: an unknown option, or a value that the scorer refuses.

        Example:
          >>> import sparse_layers as sl
          >>> sl.Scorer.named("moba:block=64")
          MoBA(block=64, count=16, first=0, local=1, dense_below=0)
        """
        name, _, options = text.partition(":")
        if name not in Scorer._named:
            return None
        cls, values = Scorer._named[name], parsed_options(f"scorer {name!r}", options)
        fields = [field.name for field in dataclasses.fields(cls)]
        for option in values:
            if option not in fields:
                raise ValueError(f"scorer {name!r}: unknown option {suggest(option, fields)}")
        return cls(**values)

    def __post_init__(self):
        checked_sizes(self.block, 1)
        name = type(self).__name__
        for field, hint in (("count", Positive), ("first", Natural), ("local", Positive), ("dense_below", Natural)):
            checked(f"{name}: {field}", getattr(self, field), hint)
        if self.first + self.local > self.count:
            raise ValueError(
                f"{name}: count must be at least first + local, the blocks that are always chosen, "
                f"got count={self.count}, first={self.first} and local={self.local}"
            )

    # --- methods define these -------------------------------------------------------------------------------------

    @property
    def window(self) -> tuple[int, int]:
        """Keys in a window that is pooled to one, and its stride in keys; by default windows are blocks."""
        return self.block, self.block

    def pooled(self, keys: jax.Array) -> jax.Array:
        """Pools the keys of a window, [..., window, H] -> [..., H]: by default to their mean."""
        return keys.mean(-2, dtype=accumulator_dtype(keys.dtype)).astype(keys.dtype)

    def index_features(self, head_size: int) -> int:
        """Returns the features of an index query in a layer with this head size; 0 without an index."""
        return 0

    @abc.abstractmethod
    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        """Scores blocks for queries: the blocks with the highest scores are selected.

        Args:
          query: [B, R, N, H].
          pooled: [B, W, K, H], one row for each full window.
          seen: bool [B or 1, R, W]: True if a window lies in the query's past and does not begin before its document.
          scale: factor of the logits of the attention.

        Returns:
          Floats [B, R, G, blocks], for all blocks in which windows begin or more. G is N if `per_query_head`, else K.
          Scores of forced blocks and of blocks that may not be selected are ignored.
        """

    @property
    def indexed(self) -> bool:
        """True if it scores an index, two projections beside queries and keys, see `MSA`."""
        return self.index_features(1) > 0

    # --- shared by all methods ------------------------------------------------------------------------------------

    def selects(self, length: int) -> bool:
        """Returns True if queries of a sequence of this length select blocks, False if they attend to all."""
        return length > max(self.count * self.block, self.dense_below)

    def pairs(self, length: int) -> int:
        """Returns the (query, key) pairs that a head attends to in a sequence of this length under a causal mask."""
        position = np.arange(length)
        if not self.selects(length):
            return int((position + 1).sum())
        in_own_block = position % self.block + 1
        return int(np.minimum(position + 1, (self.count - 1) * self.block + in_own_block).sum())

    def work(self, length: int, groups: int = 1, head_size: int = 128) -> float:
        """Returns the cost of a head's scores, in (query, key) pairs of attention.

        Scores take one product of a query with each window in its past; a pair of attention takes two. Pooling and the
        search for the highest scores are not counted. With an index, the ``groups`` query heads of a key head share the
        cost.
        """
        size, stride = self.window
        scored = int(np.maximum(0, (np.arange(1, length + 1) - size) // stride + 1).sum())
        return scored * (self.index_features(head_size) / (head_size * groups) if self.indexed else 1) / 2

    def windows(self, length: int) -> int:
        """Returns the number of full windows in a sequence of this length."""
        size, stride = self.window
        return max(0, (length - size) // stride + 1)

    def pool(self, key: jax.Array) -> jax.Array:
        """Pools the keys of all full windows: [B, S, K, H] -> [B, windows, K, H]."""
        size, stride = self.window
        if (size, stride) == (1, 1):
            return key
        tokens = np.arange(self.windows(key.shape[1]))[:, None] * stride + np.arange(size)
        if size == stride:  # windows side by side need no copy
            rows = key[:, : tokens.size].reshape(len(key), *tokens.shape, *key.shape[2:])
        else:
            rows = key[:, tokens]
        return self.pooled(jnp.moveaxis(rows, 2, -2))

    @strict_kwargs
    def select(
        self,
        query: jax.Array,
        key: jax.Array,
        segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        scale: float | None = None,
        *,
        order_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        pooled: jax.Array | None = None,
        first: jax.Array | int | None = None,
    ) -> Selection:
        """Selects key blocks for each query of a sequence.

        Args:
          query: [B, T, N, H], or [T, N, H] without a batch: then no argument has a batch axis.
          key: [B, T, K, H], in the dtype of query.
          segment_ids: int [B, T], or a pair for queries and keys, as of `block_sparse_attention`.
          scale: as there.
          order_ids: likewise. Blocks whose keys all have larger ids than the query are not selected. They never make a
            later block selectable.
          pooled: [B, windows, K, H], windows that a layer has pooled; None for `pool`.
          first: position of the first query, if query holds T' consecutive queries of the sequence. Ids are those
            of the whole sequence.

        Returns:
          A `Selection` of ids [B, T, N or K, count], or [B, T', ...].

        Raises:
          ValueError: shapes, dtypes, heads, lengths or ids do not fit, or scale is not a finite number.
          TypeError: query or key is not an array, or an argument is unknown.

        Example:
          >>> import jax, sparse_layers as sl
          >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
          >>> selection = sl.MoBA(block=16, count=2).select(q, k)
          >>> sl.block_sparse_attention(q, k, v, sl.Causal(), selection=selection).shape
          (1, 64, 2, 16)
        """
        query, key = checked_array("query", query), checked_array("key", key)
        check_arrays(query, key)
        unbatched, batch, tokens = query.ndim == 3, query.shape[:-3], (query.shape[-3], key.shape[-3])
        if first is None and tokens[0] != tokens[1]:
            raise ValueError(
                f"query and key must be of one sequence, got T = {tokens[0]} queries and {tokens[1]} keys; first= says "
                "where queries begin that are some of it"
            )
        first = None if first is None else checked_position("first", first)
        scale = None if scale is None else checked_scalars(scale, None, 1)[0]
        if getattr(segment_ids, "ndim", 0) >= query.ndim:
            raise ValueError(
                f"segment_ids must be integers of shape {(*batch, tokens[1])}, got {describe_value(segment_ids)}; a "
                "value goes to attention alone: write "
                "sl.block_sparse_attention(q, k, v, mask, selection=scorer.select(q, k))"
            )
        ids = checked_visibility(segment_ids, order_ids, batch, (tokens[1], tokens[1]), query.shape[-2])
        options = {"segments": ids[0], "order_ids": ids[1], "scale": scale, "first": first}
        if pooled is not None:
            shape = (*batch, self.windows(tokens[1]), *key.shape[-2:])
            rule = f"floats of shape {shape}, of the windows of {self.window[0]} keys in {tokens[1]}"
            pooled = jnp.asarray(checked_numbers("pooled", pooled, shape, jnp.floating, rule))
        if not unbatched:
            return self.select_blocks(query, key, pooled=pooled, **options)
        pooled = None if pooled is None else pooled[None]
        selection = self.select_blocks(query[None], key[None], pooled=pooled, **options)
        return Selection(selection.ids[0], block=self.block)

    def select_blocks(
        self,
        query: jax.Array,
        key: jax.Array,
        segments: tuple[jax.Array, jax.Array] | None = None,
        scale: float | None = None,
        *,
        order_ids: tuple[jax.Array, jax.Array] | None = None,
        pooled: jax.Array | None = None,
        first: jax.Array | int | None = None,
    ) -> Selection:
        """Computes `select` without its checks, for a batch; ids are int [B, T] of queries and of keys, or None.

        Of a key, only the length counts if there is ``pooled``.
        """
        query, key = jax.lax.stop_gradient((query, key))
        (batch, num_queries, heads, _), (length, kv_heads) = query.shape, key.shape[1:3]
        start, position = jnp.zeros((1, length), jnp.int32), jnp.arange(num_queries)
        if segments is not None:
            q_segments, kv_segments = segments
            # Padding may hold any number, NaN too, and one NaN makes a mean NaN.
            padding = kv_segments < 0
            start = jnp.where(padding, jax.vmap(_first_tokens)(q_segments), jax.vmap(_first_tokens)(kv_segments))
            key = jnp.where(padding[..., None, None], 0, key)
            size, stride = self.window
            if pooled is None and 1 < size == stride:
                key = _last_document(key, kv_segments, size)
        pooled = self.pool(key) if pooled is None else jax.lax.stop_gradient(pooled)
        blocks, groups = -(-length // self.block), heads if self.per_query_head else kv_heads
        fused, half = _has_kernels(batch, blocks), query.dtype == pooled.dtype and query.dtype.itemsize == 2
        limits, q_order = None, start
        if order_ids is not None:
            q_order, limits = order_ids[0], self._order_limits(order_ids[1], segments, pooled.shape[1])
            fused = False  # kernels know positions alone
        if first is not None:  # queries behind the last token get its position
            position = jnp.minimum(position + first, length - 1)
            start, q_order = (jnp.take(x, position, axis=1) for x in (start, q_order))
        elif fused and half and self.formula is score.Formula.PRODUCT:
            return Selection(choose.select_by_products(self._rule, query, pooled, start), block=self.block)
        score_kernel = fused and score.unsupported(self._scored, query, pooled, scale) is None
        row_bytes = 4 * max(1, batch) * (groups * blocks if score_kernel else heads * max(pooled.shape[1], blocks))
        rows = min(num_queries, max(16, 1 << max(0, (_SCORE_BYTES // row_bytes).bit_length() - 1)))

        def select_chunk(number: jax.Array, ids: jax.Array) -> jax.Array:
            begin = jnp.minimum(number * rows, num_queries - rows)  # the last chunk overlaps the one before
            by_query = query, position[None], start, q_order
            chunk = (jax.lax.dynamic_slice_in_dim(x, begin, rows, axis=1) for x in by_query)
            q_rows, positions, starts, orders = chunk
            order_of_rows = None if limits is None else (orders, limits)
            chunk_ids = self.select_rows(q_rows, pooled, positions, starts, length, scale, fused, order_of_rows)
            return jax.lax.dynamic_update_slice_in_dim(ids, chunk_ids, begin, axis=1)

        ids = jnp.zeros((batch, num_queries, groups, self.count), jnp.int32)
        # The first chunk runs before the loop: inside `jax.shard_map` its result varies by device, and so must the
        # carry of the loop.
        ids = jax.lax.fori_loop(1, -(-num_queries // rows), select_chunk, select_chunk(jnp.int32(0), ids))
        return Selection(ids, block=self.block)

    def select_rows(
        self,
        query: jax.Array,
        pooled: jax.Array,
        position: jax.Array,
        start: jax.Array,
        length: int,
        scale: float | None,
        fused: bool = False,
        order: "tuple[jax.Array, _OrderLimits] | None" = None,
    ) -> jax.Array:
        """Selects key blocks for R queries: returns ids [B, R, G, count].

        Args:
          query: [B, R, N, H].
          pooled: [B, W, K, H], as of `pool`.
          position, start: int [B or 1, R], the queries' positions, and the first tokens of their documents.
          length: tokens of the sequence.
          scale: as of `block_sparse_attention`.
          fused: True to select by a GPU kernel, and to score by one if it has this scorer's formula.
          order: order ids of the queries [B, R], and the limits of the keys; or None.
        """
        blocks, (size, stride), places = -(-length // self.block), self.window, (position, start)
        begin = (jnp.arange(pooled.shape[1]) * stride)[None, None]
        position, start = position[..., None], start[..., None]
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        sees_window = None if order is None else order[1].window[:, None] <= order[0][..., None]  # [B, R, W]
        if fused and score.unsupported(self._scored, query, pooled, scale) is None:
            scores = score.score_windows(self._scored, blocks, query, pooled, *places, factor)
        else:
            seen = (begin + size - 1 <= position) & (begin >= start)
            if sees_window is not None:
                seen = seen & sees_window
            scores = self.scores(query, pooled, seen, factor)[..., :blocks]
        if sees_window is not None and self.window == (self.block, self.block):
            # A method may score windows that are not seen. Hidden keys must not count, so these blocks come last.
            sees_all_keys = sees_window[:, :, None, : scores.shape[-1]]
            scores = jnp.where(sees_all_keys, scores, jnp.finfo(scores.dtype).min)
        heads = (query if self.per_query_head else pooled).shape[2]
        if scores.shape[:3] != (*query.shape[:2], heads) or not jnp.issubdtype(scores.dtype, jnp.floating):
            raise ValueError(
                f"{type(self).__name__}: scores must be floats {(*query.shape[:2], heads, 'blocks')}, for "
                f"per_query_head is {self.per_query_head}, got {scores.dtype} of shape {scores.shape}"
            )
        padding = [(0, 0)] * (scores.ndim - 1) + [(0, blocks - scores.shape[-1])]
        scores = jnp.pad(scores, padding, constant_values=-jnp.inf)
        if fused and scores.dtype == jnp.float32:
            return choose.select_by_scores(self._rule, scores, *places)
        own_block, first_block, block = position // self.block, start // self.block, np.arange(blocks)[None, None]
        allowed = (first_block <= block) & (block <= own_block)
        if order is not None:
            q_order, limits = order[0][..., None], order[1]
            sees_block = (limits.block[:, None] <= q_order) & limits.has_keys[:, None]
            allowed = allowed & (sees_block | (block == own_block))
        forced = allowed & ((block < first_block + self.first) | (block > own_block - self.local))
        # Scores of infinity and NaN must not come before forced blocks.
        largest = np.nextafter(jnp.finfo(scores.dtype).max, 0, dtype=scores.dtype)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.minimum(scores, largest))
        scores = jnp.where(forced[:, :, None], jnp.inf, jnp.where(allowed[:, :, None], scores, -jnp.inf))
        return top_k_blocks(scores, self.count, block=self.block, causal=False).ids

    def _order_limits(
        self, order: jax.Array, segments: tuple[jax.Array, jax.Array] | None, windows: int
    ) -> "_OrderLimits":
        """Returns the limits of keys with order ids [B, T]. Of a block's documents, later queries may see the last."""
        (size, stride), (batch, length) = self.window, order.shape
        blocks, largest = -(-length // self.block), np.iinfo(np.int32).max

        def by_block(x, fill):
            ends = [(0, 0), (0, blocks * self.block - length)]
            return jnp.pad(x, ends, constant_values=fill).reshape(batch, blocks, self.block)

        ids = by_block(jnp.zeros_like(order) if segments is None else segments[1], -1)
        counted, order_by_block = _in_last_document(ids) & (ids >= 0), by_block(order, 0)
        least = jnp.where(counted, order_by_block, largest).min(-1)
        if (size, stride) == (self.block, self.block):
            greatest = jnp.where(counted, order_by_block, -largest - 1).max(-1)[:, :windows]
        else:
            greatest = order[:, np.arange(windows)[:, None] * stride + np.arange(size)].max(-1)
        return _OrderLimits(greatest, least, counted.any(-1))

    @property
    def _rule(self) -> choose.SelectionRule:
        return choose.SelectionRule(self.block, self.count, self.first, self.local)

    @property
    def _scored(self) -> score.ScoreSpec:
        return score.ScoreSpec(self.formula, self.block, *self.window)


def _has_kernels(batch: int, blocks: int) -> bool:
    """Returns True if kernels can select among this many blocks, and arrays lie on one device, as these need."""
    return (
        has_local_arrays()
        and "triton" in implementation_order(platform())
        and choose.unsupported(blocks, batch) is None
    )


def products(query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns q . k of query heads with their key heads in float32: [B, R, N, H], [B, W, K, H] -> [B, R, K, N/K, W]."""
    batch, rows, heads, size = query.shape
    grouped = query.reshape(batch, rows, key.shape[2], heads // key.shape[2], size)
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None  # else selections differ by platform
    return jnp.einsum("brkgh,bwkh->brkgw", grouped, key, precision=precision, preferred_element_type=jnp.float32)


def _last_document(key: jax.Array, ids: jax.Array, size: int) -> jax.Array:
    """Returns keys in which each window holds keys of its last document alone.

    Only later queries of that document may select the window. The mean of the document's keys replaces all other keys
    of the window, which changes neither their mean nor their maximum. Keys [B, T, K, H] are 0 in padding, where ids
    [B, T] are negative; those behind the last full window are cut off, as they are not scored.
    """
    batch, windows = len(ids), ids.shape[1] // size
    full, shape = windows * size, (batch, windows, size)
    ids, keys = ids[:, :full].reshape(shape), key[:, :full].reshape(*shape, *key.shape[2:])
    in_last = _in_last_document(ids)[..., None, None]
    number = in_last.sum(2, keepdims=True, dtype=jnp.float32)
    mean = jnp.where(in_last, keys.astype(jnp.float32), 0).sum(2, keepdims=True) / number
    return jnp.where(in_last, keys, mean.astype(keys.dtype)).reshape(batch, full, *key.shape[2:])


def _in_last_document(ids: jax.Array) -> jax.Array:
    """Returns True for the ids of each row [.., size] that equal its last id >= 0; of padding alone, its first id."""
    last = jnp.where(ids >= 0, np.arange(ids.shape[-1]), 0).max(-1, keepdims=True)
    return ids == jnp.take_along_axis(ids, last, -1)


def _first_tokens(ids: jax.Array) -> jax.Array:
    """Returns the first token of each token's document: int [T] -> int32 [T]."""
    order = jnp.argsort(ids, stable=True)
    new = jnp.concatenate([jnp.ones(1, bool), jnp.diff(ids[order]) != 0])
    begins = jax.lax.cummax(jnp.where(new, jnp.arange(len(ids)), 0))
    return jnp.zeros(len(ids), jnp.int32).at[order].set(order[begins].astype(jnp.int32))
