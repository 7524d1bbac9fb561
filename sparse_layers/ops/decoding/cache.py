"""`KVCache`: keys and values of one layer, kept and read as its pattern needs them."""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ...arguments.checks import Length, Natural, Positive, checked, strict_kwargs
from ...masks.adapters import MaskLike, by_entry
from ...masks.algebra import Mask
from ...masks.serialization import register_node
from ...scorers import Scorer, masks_and_scorer
from ..kernels.validation import checked_array, checked_scalars, checked_selection, checked_sinks, is_floating
from ..planning.selection import Selection
from . import fused, stores, xla
from .checks import Integers, checked_lengths, checked_positions
from .layout import Layout, layout
from .stores import rows_of, some_heads

# Query, key and value of a step.
Token: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


@register_node
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "pooled"],
    meta_fields=["masks", "selection", "seq_len", "num_heads", "num_kv_heads", "max_step", "implementation"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class KVCache:
    """Keys and values of one attention layer, kept and read as its pattern needs them; a pytree.

    Made by `KVCache.empty`. `filled` takes those of a prompt, `step` adds a token and attends from it, or a few tokens
    at once. A window keeps as many rows as it is wide, a stride reads one residue class, summary columns keep nothing
    else: a step costs what the pattern's row costs, or with a selection what its blocks cost, and the result is that of
    `block_sparse_attention` in that row.

    Of the last tokens, up to ``max_step`` may be taken back, as speculative decoding rejects what it guessed: the next
    step begins at an earlier position, and what the cache holds of later ones, numbers that are finite, is not seen.

    Args:
      *given: none, see `KVCache.empty`.
      **fields: the attributes, as JAX hands them over.

    Attributes:
      keys, values: arrays [B, heads, pieces, rows, size], one for each way in which keys are kept.
      pooled: what a scorer keeps of the keys to choose by, [B, windows, K, H], or None.
      masks: the masks that the heads take in turn.
      selection: the scorer that chooses the blocks that a step reads, or None.
      seq_len: the most tokens.
      num_heads, num_kv_heads: of the queries and of the keys.
      max_step: the most tokens that a step adds.
      implementation: who attends in steps, "xla" or, where it can, "triton".

    Raises:
      ValueError: arrays that do not fit, in the methods that take them.
      TypeError: other arguments.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> mask, (q, k, v) = sl.Causal() & sl.Window(7), jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 16))
      >>> cache = sl.KVCache.empty(mask, 40, batch=1, num_heads=2, head_size=16)
      >>> cache.num_reads, cache.nbytes  # keys a step and head; 8 keys and values of 2 heads, 16 floats each
      (8, 2048)
      >>> cache = cache.filled(k[:, :39], v[:, :39], jnp.array([39]))
      >>> out, cache = cache.step(q[:, 39], k[:, 39], v[:, 39], jnp.array([39]))
      >>> bool(jnp.allclose(out, sl.block_sparse_attention(q, k, v, mask)[:, 39], atol=1e-5))
      True
      >>> cache = sl.KVCache.empty(mask, 40, batch=1, num_heads=2, head_size=16, max_step=4)
      >>> cache = cache.filled(k[:, :30], v[:, :30])
      >>> wrong, cache = cache.step(q[:, 1:5], k[:, 1:5], v[:, 1:5], jnp.array([30]))  # four guesses, and the first ...
      >>> right, cache = cache.step(q[:, 30:33], k[:, 30:33], v[:, 30:33], jnp.array([30]))  # ... was rejected
      >>> bool(jnp.allclose(right, sl.block_sparse_attention(q, k, v, mask)[:, 30:33], atol=1e-5))
      True
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    pooled: jax.Array | None
    masks: tuple[Mask, ...]
    selection: Scorer | None
    seq_len: int
    num_heads: int
    num_kv_heads: int
    max_step: int
    implementation: str

    def __init__(self, *given: Any, **fields: Any):
        if given or fields.keys() != self.__dataclass_fields__.keys():
            rule = "KVCache is made by KVCache.empty(pattern, seq_len, batch=, num_heads=, head_size=)"
            raise TypeError(f"{rule}, got arguments {', '.join([*map(reprlib.repr, given), *fields]) or 'none'}")
        vars(self).update(fields)

    def __repr__(self):
        def shown(arrays: Any) -> str:
            return ", ".join(f"{x.dtype}{[*x.shape]}" if hasattr(x, "dtype") else reprlib.repr(x) for x in arrays)

        masks = self.masks[0] if len(self.masks) == 1 else self.masks
        masks = f"{masks!r}" if self.selection is None else f"{masks!r}, {self.selection!r}"
        heads = f"{self.num_heads} heads on {self.num_kv_heads} key heads"
        arrays = f"keys: {shown(self.keys)}, values: {shown(self.values)}"
        return f"KVCache({masks}, {self.seq_len} tokens, {heads}, {arrays})"

    @classmethod
    @strict_kwargs
    def empty(
        cls,
        pattern: MaskLike,
        seq_len: int,
        *,
        batch: int,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        value_size: int | None = None,
        dtype: DTypeLike = jnp.float32,
        selection: Scorer | str | None = None,
        index_size: int | None = None,
        max_step: int = 1,
        implementation: str | None = None,
    ) -> "KVCache":
        """A cache without tokens.

        Args:
          pattern: whatever `as_masks` takes, causal, or a scorer.
          seq_len: the most tokens, >= 1.
          batch: number of sequences B.
          num_heads: of the queries, N.
          head_size: H of the keys.
          num_kv_heads: K, a divisor of N; defaults to N.
          value_size: Hv of the values; defaults to H.
          dtype: of keys and values.
          selection: how steps choose key blocks, see `SparseSelfAttention`.
          index_size: features of the index keys of a scorer like `MSA`; defaults to head_size.
          max_step: the most tokens that a step adds, 1..seq_len, and that may be taken back: a window keeps so many
            more, less one.
          implementation: who attends in steps: "xla", or "triton", a kernel for NVIDIA GPUs, where it serves the call
            and arrays are a device's own, and XLA elsewhere. None for "triton".

        Raises:
          ValueError: a pattern that is not causal; sizes that are no positive integers or do not divide; a max_step
            above seq_len; an unknown implementation.
          TypeError: the pattern is no mask.
        """
        if not is_floating(dtype):
            raise ValueError(f"dtype must be a floating one, got {dtype!r}")
        seq_len, batch = checked("seq_len", seq_len, Length), checked("batch", batch, Positive)
        num_heads, head_size = checked("num_heads", num_heads, Positive), checked("head_size", head_size, Positive)
        num_kv_heads = num_heads if num_kv_heads is None else checked("num_kv_heads", num_kv_heads, Positive)
        value_size = head_size if value_size is None else checked("value_size", value_size, Positive)
        max_step = checked("max_step", max_step, Positive)
        if max_step > seq_len:
            raise ValueError(f"max_step must be at most seq_len={seq_len}, got {max_step}")
        if implementation not in (None, "xla", "triton"):
            raise ValueError(f"implementation must be None, 'xla' or 'triton' for a cache, got {implementation!r}")
        masks, scorer = masks_and_scorer(pattern, selection, [seq_len])
        if num_heads % num_kv_heads or num_heads % len(masks):
            raise ValueError(
                f"num_kv_heads={num_kv_heads} and the number of masks, {len(masks)}, must divide num_heads={num_heads}"
                f"{by_entry(masks)}"
            )
        held = layout(masks, seq_len, num_heads, num_kv_heads, max_step).stores
        keys, values = (
            tuple(jnp.zeros((batch, len(heads), store.runs, store.run, size), dtype) for store, heads in held)
            for size in (head_size, value_size)
        )
        pooled = None
        if scorer is not None and scorer.selects(seq_len):
            index_size = head_size if index_size is None else checked("index_size", index_size, Positive)
            each = (1, index_size) if scorer.indexed else (num_kv_heads, head_size)
            pooled = jnp.zeros((batch, scorer.windows(seq_len), *each), dtype)
        sizes = {"seq_len": seq_len, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "max_step": max_step}
        arrays: dict[str, Any] = {"keys": keys, "values": values, "pooled": pooled}
        cache = cls(**arrays, masks=masks, selection=scorer, implementation=implementation or "triton", **sizes)
        if pooled is not None:
            cache.layout.whole()
        return cache

    @property
    def layout(self) -> Layout:
        """Who reads which of the arrays."""
        return layout(self.masks, self.seq_len, self.num_heads, self.num_kv_heads, self.max_step)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.keys[0])

    @property
    def num_reads(self) -> int:
        """Keys that a step without a selection reads for a query head, of the mask that reads the most."""
        if self.pooled is not None and self.selection is not None:
            return self.selection.count * self.selection.block
        return max(sum(part.reads for part in heads.parts) for heads in self.layout.heads)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, and of what a scorer keeps."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

    def filled(
        self,
        key: jax.Array,
        value: jax.Array,
        lengths: Integers | None = None,
        *,
        index_key: jax.Array | None = None,
        start: int = 0,
    ) -> "KVCache":
        """The cache after a prompt: it holds the tokens that `written`, one after the other, would have left in it.

        Or after a piece of one, when it holds the ``start`` tokens before. Sequences that had ended stay as they are.

        Args:
          key: [B, P, K, H], 1 <= P <= seq_len - start, of tokens start to start + P - 1.
          value: [B, P, K, Hv].
          lengths: int [B] in 0..start + P, tokens of each sequence so far, what follows is padding and not read; None
            for start + P.
          index_key: [B, P, 1, size], for a scorer like `MSA` alone.
          start: tokens before these.

        Returns:
          A new cache.

        Raises:
          ValueError: shapes that do not fit the cache, or lengths (outside of jit) that are not in 0..start + P.
          TypeError: key or value is no array.
        """
        key, value = checked_array("key", key), checked_array("value", value)
        start = checked("start", start, Natural)
        batch, length = len(self.keys[0]), key.shape[1] if key.ndim > 1 else 0
        if not 1 <= length <= self.seq_len - start:
            most = f"{self.seq_len - start}" + (f", from start={start} on" if start else "")
            raise ValueError(f"key must have shape [B, P, K, H] with P in 1..{most}, got {key.shape}")
        self._check(
            "B, P, K", length, key=(key, self.num_kv_heads, self.keys), value=(value, self.num_kv_heads, self.values)
        )
        last = checked_lengths(lengths, batch, start + length)[:, None] - 1

        def fill(arrays: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
            held = arrays if start else jax.tree.map(jnp.zeros_like, arrays)
            return tuple(
                stores.filled(store, array, some_heads(new, heads, axis=2), start, last)
                for array, (store, heads) in zip(held, self.layout.stores, strict=True)
            )

        pooled = None
        if self.pooled is not None and self.selection is not None:
            # Windows that are not full yet are written when they are; until then nobody sees them.
            inside = start + jnp.arange(length)[None, :, None, None] <= last[..., None, None]
            scored, (size, stride) = jnp.where(inside, self._scored(key, index_key), 0), self.selection.window
            number = max(0, -(-(start - size + 1) // stride))  # of the first window that ends here
            begin = number * stride
            if begin < start:
                earlier = rows_of(self.keys[self.layout.whole()])[:, :, begin:start].swapaxes(1, 2)
                scored = jnp.concatenate([earlier.astype(scored.dtype), scored], axis=1)
            new = self.selection.pool(scored[:, max(0, begin - start) :]).astype(self.pooled.dtype)
            pooled = jax.lax.dynamic_update_slice_in_dim(self.pooled, new, number, axis=1)
        return dataclasses.replace(self, keys=fill(self.keys, key), values=fill(self.values, value), pooled=pooled)

    @strict_kwargs
    def step(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        position: Integers,
        *,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: ArrayLike | None = None,
        selection: Selection | None = None,
        index: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, "KVCache"]:
        """Adds a token to each sequence, or several, and attends from it: `written`, then `attend` with its options.

        ``index`` are the index queries and keys of a scorer like `MSA`, see there.

        Returns:
          (out [B, N, Hv] or [B, S, N, Hv] in the dtype of query, the new cache).

        Raises:
          ValueError, TypeError, NotImplementedError: as these.
        """
        index_query, index_key = (None, None) if index is None else index
        options: Any = {"scale": scale, "logits_soft_cap": logits_soft_cap, "sinks": sinks, "selection": selection}
        options["index_query"] = index_query

        def plain(cache: KVCache, sinks: Any, position: Any, token: Token) -> tuple[jax.Array, KVCache]:
            query, key, value = token
            # Behind a barrier, or XLA writes the token a second time on the way to the products, into a copy of it all.
            cache = jax.lax.optimization_barrier(cache.written(key, value, position, index_key=index_key))
            if query.shape[:-2] != key.shape[:-2]:
                raise ValueError(f"query must have as many tokens as key, {key.shape[:-2]}, got shape {query.shape}")
            return cache.attend(query, position, **options | {"sinks": sinks}), cache

        token = checked_array("query", query), checked_array("key", key), checked_array("value", value)
        query, key, value = token
        one = index is None and selection is None and query.shape[:-2] == key.shape[:-2]
        if not one or not fused.steps(self, query):
            return plain(self, sinks, position, token)
        self._step("K", position, **self._of_keys(key, value))
        at, several = self._step("N", position, query=(query, self.num_heads, self.keys))
        of_logits = checked_scalars(scale, logits_soft_cap, query.shape[-1])

        def kernel(cache: KVCache, sinks: Any, position: jax.Array, token: Token) -> tuple[jax.Array, KVCache]:
            query, key, value = map(several, token)
            out, keys, values = fused.step(cache, query, key, value, position, sinks, of_logits)
            return out.reshape(*token[0].shape[:-1], -1), dataclasses.replace(cache, keys=keys, values=values)

        return fused.or_plain(kernel, plain, self, checked_sinks(sinks, self.num_heads), at[:, 0], token)

    def written(
        self, key: jax.Array, value: jax.Array, position: Integers, *, index_key: jax.Array | None = None
    ) -> "KVCache":
        """The cache with one more token in each sequence, or S of them.

        Args:
          key: [B, K, H], or [B, S, K, H] with S <= max_step.
          value: [B, K, Hv], or [B, S, K, Hv].
          position: int [B], that of the tokens, or of the first of S: one more than that of the sequence's last token,
            and the last one < seq_len. If it is less, tokens from there on are taken back: at most max_step of them,
            with those that were taken back before and have not been written anew.
          index_key: [B, 1, size] or [B, S, 1, size], for a scorer like `MSA` alone.

        Raises:
          ValueError: shapes that do not fit the cache, or positions (outside of jit) that are not in 0..seq_len - S.
          TypeError: key or value is no array.
        """
        key, value = checked_array("key", key), checked_array("value", value)
        tokens, several = self._step("K", position, **self._of_keys(key, value))

        def write(arrays: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(
                stores.written(store, array, some_heads(several(new), heads, axis=2), tokens)
                for array, (store, heads) in zip(arrays, self.layout.stores, strict=True)
            )

        keys, pooled = write(self.keys, key), None
        if self.pooled is not None and self.selection is not None:
            size, stride = self.selection.window
            first = tokens - size + 1
            if self.selection.indexed:
                window = several(self._scored(key, index_key))[..., None, :]
            else:
                cut = jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, size, axis=1), (None, 0))
                window = jax.vmap(cut)(rows_of(keys[self.layout.whole()]), first)
            ends = (first >= 0) & (first % stride == 0)
            at = jnp.where(ends, first // stride, self.pooled.shape[1])
            new = self.selection.pooled(window).astype(self.pooled.dtype)
            pooled = jax.vmap(lambda x, i, new: x.at[i].set(new, mode="drop"))(self.pooled, at, new)
        return dataclasses.replace(self, keys=keys, values=write(self.values, value), pooled=pooled)

    def attend(
        self,
        query: jax.Array,
        position: Integers,
        *,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: ArrayLike | None = None,
        selection: Selection | None = None,
        index_query: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of one query a sequence, or S, over the pattern's row, or over what it has of the blocks chosen.

        Args:
          query: [B, N, H], or [B, S, N, H] with S <= max_step.
          position: int [B], the queries' positions, or those of the first of S; of the tokens written last.
          scale, logits_soft_cap, sinks: as in `block_sparse_attention`.
          selection: the key blocks that the queries look at, a `Selection` of ids [B, 1, G, k], or [B, S, G, k]; of the
            keys, only those in its blocks are read. The cache must hold all: see Raises.
          index_query: [B, K, size] or [B, S, K, size], for a scorer like `MSA` alone.

        Returns:
          [B, N, Hv] or [B, S, N, Hv] in the dtype of query; 0 where a query may attend to nothing.

        Raises:
          ValueError: as `written`; a scale, soft cap, sinks or selection that `block_sparse_attention` refuses.
          TypeError: query is no array, or selection is none.
          NotImplementedError: a selection where the cache does not keep all keys in a row, as that of `Causal` does and
            that of a window does not, or where a mask is a table.

        Example:
          >>> import jax, jax.numpy as jnp, sparse_layers as sl
          >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
          >>> cache = sl.KVCache.empty(sl.Causal(), 64, batch=1, num_heads=2, head_size=16).filled(k, v)
          >>> chosen = sl.Selection(jnp.array([[[[0, 3]]]]), block=16)  # of the last token: keys 0 to 15 and 48 to 63
          >>> cache.attend(q[:, 63], jnp.array([63]), selection=chosen).shape
          (1, 2, 16)
        """
        query = checked_array("query", query)
        at, several = self._step("N", position, query=(query, self.num_heads, self.keys))
        given = checked_sinks(sinks, self.num_heads)
        scale, cap = checked_scalars(scale, logits_soft_cap, query.shape[-1])

        def chosen(ids: jax.Array | None, block: int | None) -> jax.Array:
            plain, args = functools.partial(xla.attend, block, (scale, cap)), (self, several(query), at, given, ids)
            if not fused.attends(self, query, ids is not None):
                return plain(*args)
            return fused.or_plain(functools.partial(fused.attend, block, (scale, cap)), plain, *args)

        def all_of_row() -> jax.Array:
            return chosen(None, None)

        scorer = self.selection
        if selection is not None:
            if scorer is not None:
                raise ValueError(f"selection must be None, for {scorer} chooses the blocks, got {selection!r}")
            lengths, heads = (at.shape[1], self.seq_len), (self.num_heads, self.num_kv_heads)
            ids = checked_selection(selection, (len(query),), lengths, heads)
            out = chosen(jnp.repeat(ids, selection.granularity, axis=1)[:, : at.shape[1]], selection.block)
        elif scorer is None or self.pooled is None:
            out = all_of_row()
        else:
            scoring, start = several(self._scored(query, index_query)), jnp.zeros((1, at.shape[1]), jnp.int32)
            out = chosen(scorer.select_rows(scoring, self.pooled, at, start, self.seq_len, scale), scorer.block)
            if scorer.dense_below > scorer.count * scorer.block:
                dense = at < scorer.dense_below
                whole = jax.lax.cond(dense.any(), all_of_row, lambda: out)
                out = jnp.where(dense[..., None, None], whole, out)
        return out.astype(query.dtype).reshape(*query.shape[:-1], -1)

    def _scored(self, array: jax.Array, index: jax.Array | None) -> jax.Array:
        """What the scorer scores: queries or keys, or what it has in their place.

        Raises:
          ValueError: it has nothing in their place, or something is given that it does not ask for.
        """
        assert self.selection is not None and self.pooled is not None
        if self.selection.indexed != (index is not None):
            raise ValueError(
                f"index queries and keys must be given for a scorer that has them, and for no other, got "
                f"{'none' if index is None else f'some of shape {index.shape}'} for {self.selection}"
            )
        if index is None:
            return array
        if index.shape[:-2] != array.shape[:-2] or index.shape[-1] != self.pooled.shape[-1]:
            shape = (*array.shape[:-2], "heads", self.pooled.shape[-1])
            raise ValueError(f"index queries and keys must have shape {shape} for this cache, got {index.shape}")
        return index

    def _check(self, axes: str, length: int | None, **arrays: tuple[jax.Array, int, tuple[jax.Array, ...]]) -> None:
        """Refuses arrays (x, heads, the cache's arrays of the same size) of another shape; length None: no axis."""
        for name, (x, heads, like) in arrays.items():
            shape = (len(like[0]), *([] if length is None else [length]), heads, like[0].shape[-1])
            if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(
                    f"{name} must be floats of shape {shape} for this cache, got {x.dtype} of {x.shape}; "
                    f"axes are [{axes}, {'Hv' if name == 'value' else 'H'}]"
                )

    def _of_keys(self, key: jax.Array, value: jax.Array) -> dict[str, tuple[jax.Array, int, tuple[jax.Array, ...]]]:
        """A token's arrays, as `_check` takes them."""
        return {"key": (key, self.num_kv_heads, self.keys), "value": (value, self.num_kv_heads, self.values)}

    def _step(
        self, axis: str, position: Any, **arrays: tuple[jax.Array, int, tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Checks arrays of a step, as `_check` takes them, [B, heads, size] or [B, S, heads, size].

        Returns:
          (the positions of its tokens, [B, S], S = 1 without such an axis; what gives an array this axis if it lacks).
        """
        (name, (x, *_)), *_ = arrays.items()
        count = x.shape[1] if x.ndim == 4 else None
        if count is not None and not 1 <= count <= self.max_step:
            shape = f"[B, {axis}, H], or [B, S, {axis}, H] with S in 1..max_step = {self.max_step}"
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
        self._check(f"B, {axis}" if count is None else f"B, S, {axis}", count, **arrays)
        first = checked_positions(position, len(self.keys[0]), self.seq_len, count or 1)
        tokens = first[:, None] + jnp.arange(count or 1)[None]
        return tokens, (lambda x: x[:, None]) if count is None else (lambda x: x)
