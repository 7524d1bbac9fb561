"""`Scorer`: which key blocks each query looks at, by what is in them; what all methods share."""

import abc
import dataclasses
from typing import Any, ClassVar

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
    checked_segments,
    describe_value,
)
from ..ops.planning.platforms import has_local_arrays, implementation_order, platform
from ..ops.planning.selection import Selection, checked_position, checked_sizes, top_k_blocks

# Bytes of the scores that are there at a time: queries take turns, so that no more are.
_SCORE_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Scorer(abc.ABC):
    """A rule by which queries choose key blocks: ``selection=`` of `SparseSelfAttention`, or its ``pattern=``.

    A value: equal settings are equal scorers. A method is a subclass that says what of the keys is kept (`pooled`), and
    how queries score it (`scores`); everything else is here. One that is derived as ``class MoBA(Scorer, name="moba")``
    has a name, by which layers take it.

    A query chooses ``count`` blocks among its own and those before: its own and the ``local - 1`` before it, the
    ``first`` ones of the sequence, and then those of the highest score, of equal ones those that come first. Of a block
    of the future nothing is ever seen. Of packed documents, the first block is where the query's document begins, and
    no block before it is chosen. So each should lie in one piece: where others lie between parts of a document, their
    keys are scored as if they were its own, and blocks of theirs may be chosen, of which nothing is seen then. Lengths
    are those of the arrays, padding included.

    No gradient flows through a choice: keys learn by being attended to.

    Args:
      block: keys in a block, a multiple of 16 from 16 to 512.
      count: blocks that a query looks at, forced ones among them.
      first: blocks at the beginning that everyone looks at.
      local: blocks up to a query's own that it looks at, >= 1.
      dense_below: up to so many tokens, everyone looks at all blocks.

    Attributes:
      per_query_head: whether each query head chooses for itself, or those of a key head together.
      formula: what `scores` computes, if it is a `Formula` that kernels know; None for any other, as in a class that
        has ``scores`` of its own and does not say.

    Raises:
      ValueError: sizes out of range, or more forced blocks than ``count``.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, sparse_layers as sl
      >>> @dataclasses.dataclass(frozen=True)
      ... class Longest(sl.Scorer):  # everyone looks at the blocks whose mean key is the longest
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
        other = Scorer._named.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"name must be one that no other scorer has, got {name!r}, that of {other.__qualname__}")
        Scorer._named[name] = cls

    @staticmethod
    def named(text: str) -> "Scorer | None":
        """The scorer of a name and its options, ``"moba:block=128,count=16"``; None if no scorer has the name.

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
        made, given = Scorer._named[name], parsed_options(f"scorer {name!r}", options)
        fields = [field.name for field in dataclasses.fields(made)]
        for option in given:
            if option not in fields:
                raise ValueError(f"scorer {name!r}: unknown option {suggest(option, fields)}")
        return made(**given)

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

    # --- what a method says ---------------------------------------------------------------------------------------

    @property
    def window(self) -> tuple[int, int]:
        """Keys that are pooled into one, and how far apart such windows begin; whole blocks unless a method says so."""
        return self.block, self.block

    def pooled(self, keys: jax.Array) -> jax.Array:
        """What is scored of a window: keys [..., window, H] -> [..., H]; their mean unless a method says otherwise."""
        return keys.mean(-2, dtype=accumulator_dtype(keys.dtype)).astype(keys.dtype)

    def index_features(self, head_size: int) -> int:
        """Features of an index query of a layer with heads of a size; 0 without an index."""
        return 0

    @abc.abstractmethod
    def scores(self, query: jax.Array, pooled: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
        """How much each query wants each block.

        Args:
          query: [B, R, N, H].
          pooled: [B, W, K, H], of all windows that are full.
          seen: bool [B or 1, R, W]: whether all of a window lies in the query's past, and none before its document.
          scale: factor of the logits of the attention.

        Returns:
          Floats [B, R, G, blocks], at least as many blocks as windows begin in, with G = N if `per_query_head`, else
          K; what it says of blocks that may not be chosen, or have to be, does not matter.
        """

    @property
    def indexed(self) -> bool:
        """Whether it scores projections of its own in place of queries and keys, see `MSA`."""
        return self.index_features(1) > 0

    # --- what all methods share -----------------------------------------------------------------------------------

    def selects(self, length: int) -> bool:
        """Whether there is anything to choose among so many tokens: not all blocks are looked at."""
        return length > max(self.count * self.block, self.dense_below)

    def pairs(self, length: int) -> int:
        """(query, key) pairs that a head attends to in so many tokens, under a causal mask."""
        position = np.arange(length)
        if not self.selects(length):
            return int((position + 1).sum())
        own = position % self.block + 1
        return int(np.minimum(position + 1, (self.count - 1) * self.block + own).sum())

    def work(self, length: int, groups: int = 1, head_size: int = 128) -> float:
        """To how many pairs, as of `pairs`, a head's attention takes as much work as its scores take.

        That is one product of a query with each window in its past, unless a method says otherwise, where a pair of
        attention takes two, of a head's size. What pools keys and finds the highest scores is not in it.

        Args:
          length: tokens of the sequence.
          groups: query heads of a key head, which share the queries of an index.
          head_size: features of a head.
        """
        size, stride = self.window
        scored = int(np.maximum(0, (np.arange(1, length + 1) - size) // stride + 1).sum())
        return scored * (self.index_features(head_size) / (head_size * groups) if self.indexed else 1) / 2

    def windows(self, length: int) -> int:
        """The number of full windows in so many tokens."""
        size, stride = self.window
        return max(0, (length - size) // stride + 1)

    def pool(self, key: jax.Array) -> jax.Array:
        """What is scored of the keys [B, S, K, H]: [B, windows, K, H]."""
        size, stride = self.window
        if (size, stride) == (1, 1):
            return key
        at = np.arange(self.windows(key.shape[1]))[:, None] * stride + np.arange(size)
        # Blocks side by side are not copied.
        rows = key[:, : at.size].reshape(len(key), *at.shape, *key.shape[2:]) if size == stride else key[:, at]
        return self.pooled(jnp.moveaxis(rows, 2, -2))

    @strict_kwargs
    def select(
        self,
        query: jax.Array,
        key: jax.Array,
        segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        scale: float | None = None,
        *,
        pooled: jax.Array | None = None,
        first: jax.Array | int | None = None,
    ) -> Selection:
        """The blocks that each query of a sequence chooses.

        Args:
          query: [B, T, N, H], or [T, N, H] without a batch: then nothing below has a batch axis.
          key: [B, T, K, H], in the dtype of query.
          segment_ids: int [B, T], or a pair of those for queries and keys, as of `block_sparse_attention`.
          scale: as there.
          pooled: [B, windows, K, H], what is scored of the windows, where a layer has learnt it; None for `pool`.
          first: the position of the first query, where the queries are some of the sequence in a row, T' of them.
            Segment ids are those of the whole sequence still.

        Returns:
          A `Selection` of ids [B, T, N or K, count], or [B, T', ...].

        Raises:
          ValueError: shapes, dtypes, heads, lengths or ids that do not fit, or a scale that is no finite number.
          TypeError: query or key is no array, or an argument is unknown.

        Example:
          >>> import jax, sparse_layers as sl
          >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
          >>> chosen = sl.MoBA(block=16, count=2).select(q, k)
          >>> sl.block_sparse_attention(q, k, v, sl.Causal(), selection=chosen).shape
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
        segments = checked_segments(segment_ids, batch, (tokens[1], tokens[1]), query.shape[-2])
        if pooled is not None:
            shape = (*batch, self.windows(tokens[1]), *key.shape[-2:])
            rule = f"floats of shape {shape}, of the windows of {self.window[0]} keys in {tokens[1]}"
            pooled = jnp.asarray(checked_numbers("pooled", pooled, shape, jnp.floating, rule))
        if not unbatched:
            return self.select_blocks(query, key, segments, scale, pooled=pooled, first=first)
        pooled = None if pooled is None else pooled[None]
        selection = self.select_blocks(query[None], key[None], segments, scale, pooled=pooled, first=first)
        return Selection(selection.ids[0], block=self.block)

    def select_blocks(
        self,
        query: jax.Array,
        key: jax.Array,
        segments: tuple[jax.Array, jax.Array] | None = None,
        scale: float | None = None,
        *,
        pooled: jax.Array | None = None,
        first: jax.Array | int | None = None,
    ) -> Selection:
        """`select` without its checks: of a batch, ids as a pair, and keys of which only the length counts if pooled.

        Args:
          query, key, scale, pooled, first: see `select`.
          segments: int [B, T] of queries and of keys, or None.

        Returns:
          A `Selection`, see `select`.
        """
        query, key = jax.lax.stop_gradient((query, key))
        (batch, asking, heads, _), (length, kv_heads) = query.shape, key.shape[1:3]
        start, at = jnp.zeros((1, length), jnp.int32), jnp.arange(asking)
        if segments is not None:
            of_queries, of_keys = segments
            # Padding may hold anything, NaN too, and one makes a mean of it.
            padding = of_keys < 0
            start = jnp.where(padding, jax.vmap(_first_tokens)(of_queries), jax.vmap(_first_tokens)(of_keys))
            key = jnp.where(padding[..., None, None], 0, key)
            size, stride = self.window
            if pooled is None and 1 < size == stride:
                key = _of_one_document(key, of_keys, size)
        pooled = self.pool(key) if pooled is None else jax.lax.stop_gradient(pooled)
        blocks, groups = -(-length // self.block), heads if self.per_query_head else kv_heads
        fused, half = _has_kernels(batch, blocks), query.dtype == pooled.dtype and query.dtype.itemsize == 2
        if first is not None:  # those behind the last token ask as that does
            at = jnp.minimum(at + first, length - 1)
            start = jnp.take(start, at, axis=1)
        elif fused and half and self.formula is score.Formula.PRODUCT:
            return Selection(choose.by_products(self._rule, query, pooled, start), block=self.block)
        kernel = fused and score.unsupported(self._scored, query, pooled, scale) is None
        each = 4 * max(1, batch) * (groups * blocks if kernel else heads * max(pooled.shape[1], blocks))
        rows = min(asking, max(16, 1 << max(0, (_SCORE_BYTES // each).bit_length() - 1)))

        def turn(number: jax.Array, ids: jax.Array) -> jax.Array:
            begin = jnp.minimum(number * rows, asking - rows)  # the last ones are done with some before them
            args = (jax.lax.dynamic_slice_in_dim(x, begin, rows, axis=1) for x in (query, at[None], start))
            some, places, starts = args
            found = self.select_rows(some, pooled, places, starts, length, scale, fused)
            return jax.lax.dynamic_update_slice_in_dim(ids, found, begin, axis=1)

        empty = jnp.zeros((batch, asking, groups, self.count), jnp.int32)
        # The first turn by itself: what it gives differs by device inside `jax.shard_map`, as a loop has to know.
        ids = jax.lax.fori_loop(1, -(-asking // rows), turn, turn(jnp.int32(0), empty))
        return Selection(ids, block=self.block)

    def select_rows(
        self,
        query: jax.Array,
        pooled: jax.Array,
        at: jax.Array,
        start: jax.Array,
        length: int,
        scale: float | None,
        fused: bool = False,
    ) -> jax.Array:
        """The blocks that some queries choose.

        Args:
          query: [B, R, N, H].
          pooled: [B, W, K, H], as of `pool`.
          at: int [B or 1, R], the queries' positions.
          start: int [B or 1, R], the first tokens of their documents.
          length: tokens of the sequence.
          scale: as of `block_sparse_attention`.
          fused: whether a kernel chooses, and one computes the scores if there is such a one.

        Returns:
          ids [B, R, G, count].
        """
        blocks, (size, stride), places = -(-length // self.block), self.window, (at, start)
        begin, at, start = (jnp.arange(pooled.shape[1]) * stride)[None, None], at[..., None], start[..., None]
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if fused and score.unsupported(self._scored, query, pooled, scale) is None:
            scores = score.by_windows(self._scored, blocks, query, pooled, *places, factor)
        else:
            scores = self.scores(query, pooled, (begin + size - 1 <= at) & (begin >= start), factor)[..., :blocks]
        heads = (query if self.per_query_head else pooled).shape[2]
        if scores.shape[:3] != (*query.shape[:2], heads) or not jnp.issubdtype(scores.dtype, jnp.floating):
            raise ValueError(
                f"{type(self).__name__}: scores must be floats {(*query.shape[:2], heads, 'blocks')}, for "
                f"per_query_head is {self.per_query_head}, got {scores.dtype} of shape {scores.shape}"
            )
        missing = [(0, 0)] * (scores.ndim - 1) + [(0, blocks - scores.shape[-1])]
        scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
        if fused and scores.dtype == jnp.float32:
            return choose.by_scores(self._rule, scores, *places)
        own, lowest, block = at // self.block, start // self.block, np.arange(blocks)[None, None]
        may = (lowest <= block) & (block <= own)
        must = may & ((block < lowest + self.first) | (block > own - self.local))
        # A score of infinity, or that is no number, must not stand above the blocks that are always chosen.
        most = np.nextafter(jnp.finfo(scores.dtype).max, 0, dtype=scores.dtype)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.minimum(scores, most))
        scores = jnp.where(must[:, :, None], jnp.inf, jnp.where(may[:, :, None], scores, -jnp.inf))
        return top_k_blocks(scores, self.count, block=self.block, causal=False).ids

    @property
    def _rule(self) -> choose.Rule:
        return choose.Rule(self.block, self.count, self.first, self.local)

    @property
    def _scored(self) -> score.Scored:
        return score.Scored(self.formula, self.block, *self.window)


def _has_kernels(batch: int, blocks: int) -> bool:
    """Whether there are kernels that choose among so many blocks, and arrays are a device's own, as these need."""
    return (
        has_local_arrays()
        and "triton" in implementation_order(platform())
        and choose.unsupported(blocks, batch) is None
    )


def products(query: jax.Array, key: jax.Array) -> jax.Array:
    """q . k of query heads with their key heads in float32: [B, R, N, H] and [B, W, K, H] -> [B, R, K, N / K, W]."""
    batch, rows, heads, size = query.shape
    grouped = query.reshape(batch, rows, key.shape[2], heads // key.shape[2], size)
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None  # or choices differ by platform
    return jnp.einsum("brkgh,bwkh->brkgw", grouped, key, precision=precision, preferred_element_type=jnp.float32)


def _of_one_document(key: jax.Array, ids: jax.Array, size: int) -> jax.Array:
    """Keys of full windows side by side, where those of the last document in a window stand alone.

    Later queries of that document may choose the window, and nobody else's may. In the place of all other keys is the
    mean of its own, which changes neither their mean nor their maximum.

    Args:
      key: [B, T, K, H], 0 in padding.
      ids: int [B, T], the documents; negative in padding.
      size: keys of a window.

    Returns:
      [B, T rounded down to full windows, K, H]; nobody scores what is left.
    """
    batch, windows = len(ids), ids.shape[1] // size
    full, shape = windows * size, (batch, windows, size)
    ids, keys = ids[:, :full].reshape(shape), key[:, :full].reshape(*shape, *key.shape[2:])
    last = jnp.where(ids >= 0, np.arange(size)[None, None], 0).max(-1, keepdims=True)
    own = (ids == jnp.take_along_axis(ids, last, -1))[..., None, None]
    number = own.sum(2, keepdims=True, dtype=jnp.float32)
    mean = jnp.where(own, keys.astype(jnp.float32), 0).sum(2, keepdims=True) / number
    return jnp.where(own, keys, mean.astype(keys.dtype)).reshape(batch, full, *key.shape[2:])


def _first_tokens(ids: jax.Array) -> jax.Array:
    """The first token of each one's document: int [T] -> int32 [T]."""
    order = jnp.argsort(ids, stable=True)
    new = jnp.concatenate([jnp.ones(1, bool), jnp.diff(ids[order]) != 0])
    begins = jax.lax.cummax(jnp.where(new, jnp.arange(len(ids)), 0))
    return jnp.zeros(len(ids), jnp.int32).at[order].set(order[begins].astype(jnp.int32))
