"""`KVCache`: the cache of one layer, which keeps the keys and values that its pattern reads."""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ...arguments.checks import Length, Natural, Positive, checked, strict_kwargs
from ...masks.adapters import MaskLike, by_entry
from ...masks.algebra import Mask
from ...masks.serialization import register_node
from ...scorers import Scorer, masks_and_scorer
from ..kernels.distance_bias import DistanceBias, check_bias
from ..kernels.quantized import Rows, check_cache_dtype, dequantize, quantize
from ..kernels.validation import checked_array, checked_scalars, checked_selection, checked_sinks, is_floating
from ..planning.selection import Selection
from . import ring_cache, step
from .checks import Integers, checked_lengths, checked_positions
from .layout import CacheLayout, cache_layout
from .ring_cache import KeyLayout, select_heads


@register_node
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "pooled"],
    meta_fields=[
        "masks",
        "selection",
        "seq_len",
        "num_heads",
        "num_kv_heads",
        "max_step",
        "cache_dtype",
        "implementation",
    ],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class KVCache:
    """The cache of one attention layer: the keys and values that its pattern reads; a pytree.

    `KVCache.empty` creates it. `filled` adds a prompt; `step` adds a token, or a few tokens, and attends from them. A
    window keeps a ring buffer of its width, a stride reads one residue class, summary columns keep only their tokens. A
    step costs as much as the pattern's row, or with a selection as much as its blocks. The result is that of
    `block_sparse_attention` in that row.

    Up to ``max_step`` of the last tokens may be rolled back, as in speculative decoding: the next step starts at an
    earlier position, and later rows of the cache, which are finite, are masked.

    Args:
      *args: none, see `KVCache.empty`.
      **fields: the attributes, as JAX passes them.

    Attributes:
      keys, values: arrays [B, heads, pages, page size, size], one for each store, or `QuantizedRows`.
      pooled: the scorer's pooled keys [B, windows, K, H], or None.
      masks: the masks that the heads take in turn.
      selection: the scorer that selects the blocks that a step reads, or None.
      seq_len: the most tokens.
      num_heads, num_kv_heads: of the queries and of the keys.
      max_step: the most tokens that a step adds.
      cache_dtype: the 8-bit dtype of stores that keep all keys, or None.
      implementation: of steps, "xla", or "triton" where it can.

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
      >>> wrong, cache = cache.step(q[:, 1:5], k[:, 1:5], v[:, 1:5], jnp.array([30]))  # four drafts, and the first ...
      >>> right, cache = cache.step(q[:, 30:33], k[:, 30:33], v[:, 30:33], jnp.array([30]))  # ... was rejected
      >>> bool(jnp.allclose(right, sl.block_sparse_attention(q, k, v, mask)[:, 30:33], atol=1e-5))
      True
    """

    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]
    pooled: jax.Array | None
    masks: tuple[Mask, ...]
    selection: Scorer | None
    seq_len: int
    num_heads: int
    num_kv_heads: int
    max_step: int
    cache_dtype: str | None
    implementation: str

    def __init__(self, *args: Any, **fields: Any):
        if args or fields.keys() != self.__dataclass_fields__.keys():
            rule = "KVCache is made by KVCache.empty(pattern, seq_len, batch=, num_heads=, head_size=)"
            raise TypeError(f"{rule}, got arguments {', '.join([*map(reprlib.repr, args), *fields]) or 'none'}")
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
        cache_dtype: str | None = None,
        implementation: str | None = None,
    ) -> "KVCache":
        """Returns a cache without tokens.

        Args:
          pattern: an argument of `as_masks`, causal, or a scorer.
          seq_len: the most tokens, >= 1.
          batch: number of sequences B.
          num_heads: of the queries, N.
          head_size: H of the keys.
          num_kv_heads: K, a divisor of N; defaults to N.
          value_size: Hv of the values; defaults to H.
          dtype: of keys and values.
          selection: the scorer that selects key blocks, see `SparseSelfAttention`.
          index_size: features of the index keys of a scorer like `MSA`; defaults to head_size.
          max_step: the most tokens that a step adds, 1..seq_len, and that may be rolled back. Ring buffers are longer
            by ``max_step - 1`` rows.
          cache_dtype: "int8" or "float8_e4m3fn" for stores that keep all keys, with a float32 scale for each row and
            head, about half the bytes of bfloat16. Ring buffers and summary columns keep ``dtype``. None
            for ``dtype`` everywhere.
          implementation: of steps: "xla", or "triton", a kernel for NVIDIA GPUs. XLA computes calls that the
            kernel does not support, and arrays that are sharded. None for "triton".

        Raises:
          ValueError: a pattern that is not causal; sizes that are no positive integers or do not divide; a max_step
            above seq_len; an unknown implementation or cache_dtype.
          TypeError: the pattern is no mask.
        """
        if not is_floating(dtype):
            raise ValueError(f"dtype must be a floating one, got {dtype!r}; for 8 bits write cache_dtype='int8'")
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
        check_cache_dtype("cache_dtype", cache_dtype)
        if num_heads % num_kv_heads or num_heads % len(masks):
            raise ValueError(
                f"num_kv_heads={num_kv_heads} and the number of masks, {len(masks)}, must divide num_heads={num_heads}"
                f"{by_entry(masks)}"
            )
        layout = cache_layout(masks, seq_len, num_heads, num_kv_heads, max_step)

        def zeros(store: KeyLayout, heads: tuple[int, ...], size: int) -> Rows:
            array = jnp.zeros((batch, len(heads), store.num_pages, store.page_size, size), dtype)
            return quantize(array, cache_dtype) if cache_dtype and store.keeps_all(seq_len) else array

        keys, values = (
            tuple(zeros(store, heads, size) for store, heads in layout.stores) for size in (head_size, value_size)
        )
        pooled = None
        if scorer is not None and scorer.selects(seq_len):
            index_size = head_size if index_size is None else checked("index_size", index_size, Positive)
            pooled_shape = (1, index_size) if scorer.indexed else (num_kv_heads, head_size)
            pooled = jnp.zeros((batch, scorer.windows(seq_len), *pooled_shape), dtype)
        sizes = {"seq_len": seq_len, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "max_step": max_step}
        sizes |= {"cache_dtype": cache_dtype}
        arrays: dict[str, Any] = {"keys": keys, "values": values, "pooled": pooled}
        cache = cls(**arrays, masks=masks, selection=scorer, implementation=implementation or "triton", **sizes)
        if pooled is not None:
            layout.full_store_index()
        return cache

    @property
    def layout(self) -> CacheLayout:
        """The stores of the arrays, and the heads that read them."""
        return cache_layout(self.masks, self.seq_len, self.num_heads, self.num_kv_heads, self.max_step)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.keys[0])

    @property
    def num_reads(self) -> int:
        """Keys that a step reads for a query head: by its selection, or in the row of the mask that reads the most."""
        if self.pooled is not None and self.selection is not None:
            return self.selection.count * self.selection.block
        return max(sum(x.num_reads for x in heads.cache_parts) for heads in self.layout.heads)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, and of pooled keys."""
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
        """Returns the cache after a prompt, as if `written` had added its tokens one by one.

        With ``start``, key and value are a chunk of a prompt, and the cache holds the ``start`` tokens before it.
        Sequences that end before the chunk do not change.

        Args:
          key: [B, P, K, H], 1 <= P <= seq_len - start, of tokens start to start + P - 1.
          value: [B, P, K, Hv].
          lengths: int [B] in 0..start + P, tokens of each sequence so far; later rows are padding and not read. None
            for start + P.
          index_key: [B, P, 1, size], only for a scorer like `MSA`.
          start: tokens before the chunk.

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
        self._check("B, P, K", length, **self._key_arrays(key, value))
        last = checked_lengths(lengths, batch, start + length)[:, None] - 1

        def fill(arrays: tuple[Rows, ...], new: jax.Array) -> tuple[Rows, ...]:
            arrays = arrays if start else jax.tree.map(jnp.zeros_like, arrays)
            return tuple(
                ring_cache.fill(store, array, select_heads(new, heads, axis=2), start, last)
                for array, (store, heads) in zip(arrays, self.layout.stores, strict=True)
            )

        pooled = None
        if self.pooled is not None and self.selection is not None:
            # A window is pooled again when it is full; until then no query sees it.
            inside = start + jnp.arange(length)[None, :, None, None] <= last[..., None, None]
            scored, (size, stride) = jnp.where(inside, self._scored(key, index_key), 0), self.selection.window
            number = max(0, -(-(start - size + 1) // stride))  # of the first window that ends in the chunk
            begin = number * stride
            if begin < start:
                cached = jax.tree.map(lambda x: x[:, :, begin:start], self.layout.all_keys(self.keys))
                scored = jnp.concatenate([dequantize(cached, scored.dtype).swapaxes(1, 2), scored], axis=1)
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
        bias: DistanceBias | None = None,
        selection: Selection | None = None,
        index: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, "KVCache"]:
        """Adds a token to each sequence, or several, and attends from it: `written`, then `attend` with its options.

        ``index`` holds the index queries and keys of a scorer like `MSA`, see there.

        Returns:
          (out [B, N, Hv] or [B, S, N, Hv] in the dtype of query, the new cache).

        Raises:
          ValueError, TypeError, NotImplementedError: as these.
        """
        query, key, value = checked_array("query", query), checked_array("key", key), checked_array("value", value)
        index_query, index_key = (None, None) if index is None else index
        positions, add_axis = self._check_step("K", position, **self._key_arrays(key, value))
        if query.shape[:-2] != key.shape[:-2]:
            raise ValueError(f"query must have as many tokens as key, {key.shape[:-2]}, got shape {query.shape}")
        if index is not None or selection is not None or self.pooled is not None:
            # Without a barrier, XLA writes the token a second time for the matrix products, into a copy of the cache.
            cache = jax.lax.optimization_barrier(self.written(key, value, position, index_key=index_key))
            options: Any = {"scale": scale, "logits_soft_cap": logits_soft_cap, "sinks": sinks, "bias": bias}
            return cache.attend(query, position, selection=selection, index_query=index_query, **options), cache
        self._check_step("N", position, query=(query, self.num_heads, self.keys))
        options = checked_scalars(scale, logits_soft_cap, query.shape[-1])
        arrays, token = (self.keys, self.values), (add_axis(query), add_axis(key), add_axis(value))
        check_step_bias(bias, self.num_heads)
        args = options, arrays, token, positions, checked_sinks(sinks, self.num_heads), bias
        out, (keys, values) = step.write_and_attend(self.layout, self.implementation, *args)
        out = out.astype(query.dtype).reshape(*query.shape[:-1], -1)
        return out, dataclasses.replace(self, keys=keys, values=values)

    def written(
        self, key: jax.Array, value: jax.Array, position: Integers, *, index_key: jax.Array | None = None
    ) -> "KVCache":
        """Returns the cache with one more token in each sequence, or S of them.

        Args:
          key: [B, K, H], or [B, S, K, H] with S <= max_step.
          value: [B, K, Hv], or [B, S, K, Hv].
          position: int [B], of the tokens, or of the first of S: usually that behind the sequence's last token. A
            smaller one rolls tokens back: at most max_step positions, including earlier rollbacks that were not
            overwritten. Positions must be below seq_len.
          index_key: [B, 1, size] or [B, S, 1, size], only for a scorer like `MSA`.

        Raises:
          ValueError: shapes that do not fit the cache, or positions (outside of jit) that are not in 0..seq_len - S.
          TypeError: key or value is no array.
        """
        key, value = checked_array("key", key), checked_array("value", value)
        positions, add_axis = self._check_step("K", position, **self._key_arrays(key, value))
        keys, values = step.write(self.layout, (self.keys, self.values), add_axis(key), add_axis(value), positions)
        pooled = None
        if self.pooled is not None and self.selection is not None:
            size, stride = self.selection.window
            first = positions - size + 1
            if self.selection.indexed:
                window = add_axis(self._scored(key, index_key))[..., None, :]
            else:
                cut = jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, size, axis=1), (None, 0))
                window = jax.tree.map(lambda x: jax.vmap(cut)(x, first), self.layout.all_keys(keys))
                window = dequantize(window, self.pooled.dtype)
            ends_window = (first >= 0) & (first % stride == 0)
            row = jnp.where(ends_window, first // stride, self.pooled.shape[1])
            new = self.selection.pooled(window).astype(self.pooled.dtype)
            pooled = jax.vmap(lambda x, i, new: x.at[i].set(new, mode="drop"))(self.pooled, row, new)
        return dataclasses.replace(self, keys=keys, values=values, pooled=pooled)

    def attend(
        self,
        query: jax.Array,
        position: Integers,
        *,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: ArrayLike | None = None,
        bias: DistanceBias | None = None,
        selection: Selection | None = None,
        index_query: jax.Array | None = None,
    ) -> jax.Array:
        """Returns attention of one query a sequence, or S, over the pattern's row or its part in selected blocks.

        Args:
          query: [B, N, H], or [B, S, N, H] with S <= max_step.
          position: int [B], of the queries, or of the first of S; these tokens were written last.
          scale, logits_soft_cap, sinks, bias: as in `block_sparse_attention`. Steps with a bias use XLA.
          selection: key blocks of the queries, a `Selection` of ids [B, 1, G, k] or [B, S, G, k]; only keys in these
            blocks are read. The cache must keep all keys, see Raises.
          index_query: [B, K, size] or [B, S, K, size], only for a scorer like `MSA`.

        Returns:
          [B, N, Hv] or [B, S, N, Hv] in the dtype of query; 0 where a query sees no key.

        Raises:
          ValueError: as `written`; a scale, soft cap, sinks or selection that `block_sparse_attention` refuses.
          TypeError: query is no array, or selection is none.
          NotImplementedError: a selection where the cache does not keep all keys in natural order, or where a mask is
            a table. The cache of `Causal` keeps all keys, that of a window does not.

        Example:
          >>> import jax, jax.numpy as jnp, sparse_layers as sl
          >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
          >>> cache = sl.KVCache.empty(sl.Causal(), 64, batch=1, num_heads=2, head_size=16).filled(k, v)
          >>> chosen = sl.Selection(jnp.array([[[[0, 3]]]]), block=16)  # of the last token: keys 0 to 15 and 48 to 63
          >>> cache.attend(q[:, 63], jnp.array([63]), selection=chosen).shape
          (1, 2, 16)
        """
        query = checked_array("query", query)
        positions, add_axis = self._check_step("N", position, query=(query, self.num_heads, self.keys))
        logit_sinks = checked_sinks(sinks, self.num_heads)
        check_step_bias(bias, self.num_heads)
        options = checked_scalars(scale, logits_soft_cap, query.shape[-1])
        args = options, (self.keys, self.values), add_axis(query), positions, logit_sinks

        def attend(selected: tuple[jax.Array, int] | None = None) -> jax.Array:
            return step.attend(self.layout, self.implementation, *args, selected, bias)

        scorer = self.selection
        if selection is not None:
            if scorer is not None:
                raise ValueError(f"selection must be None, for {scorer} chooses the blocks, got {selection!r}")
            lengths, heads = (positions.shape[1], self.seq_len), (self.num_heads, self.num_kv_heads)
            ids = checked_selection(selection, (len(query),), lengths, heads)
            ids = jnp.repeat(ids, selection.granularity, axis=1)[:, : positions.shape[1]]
            out = attend((ids, selection.block))
        elif scorer is None or self.pooled is None:
            out = attend()
        else:
            scoring = add_axis(self._scored(query, index_query))
            start = jnp.zeros((1, positions.shape[1]), jnp.int32)
            ids = scorer.select_rows(scoring, self.pooled, positions, start, self.seq_len, options[0])
            out = attend((ids, scorer.block))
            if scorer.dense_below > scorer.count * scorer.block:
                dense = positions < scorer.dense_below
                dense_out = jax.lax.cond(dense.any(), attend, lambda: out)
                out = jnp.where(dense[..., None, None], dense_out, out)
        return out.astype(query.dtype).reshape(*query.shape[:-1], -1)

    def _scored(self, array: jax.Array, index: jax.Array | None) -> jax.Array:
        """Returns the array that the scorer scores: queries or keys, or its index queries or keys."""
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

    def _check(self, axes: str, length: int | None, **arrays: tuple[jax.Array, int, tuple[Rows, ...]]) -> None:
        """Refuses arrays (x, heads, the cache's arrays of equal size) of another shape; None if they lack the axis."""
        for name, (x, heads, like) in arrays.items():
            shape = (len(like[0]), *([] if length is None else [length]), heads, like[0].shape[-1])
            if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(
                    f"{name} must be floats of shape {shape} for this cache, got {x.dtype} of {x.shape}; "
                    f"axes are [{axes}, {'Hv' if name == 'value' else 'H'}]"
                )

    def _key_arrays(self, key: jax.Array, value: jax.Array) -> dict[str, tuple[jax.Array, int, tuple[Rows, ...]]]:
        """Returns key and value as `_check` takes them."""
        return {"key": (key, self.num_kv_heads, self.keys), "value": (value, self.num_kv_heads, self.values)}

    def _check_step(
        self, axis: str, position: Any, **arrays: tuple[jax.Array, int, tuple[Rows, ...]]
    ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Checks the arrays of a step, as `_check` takes them: [B, heads, size] or [B, S, heads, size].

        Returns (positions [B, S], a function that adds the axis S = 1 to arrays if these lack it).
        """
        (name, (x, *_)), *_ = arrays.items()
        count = x.shape[1] if x.ndim == 4 else None
        if count is not None and not 1 <= count <= self.max_step:
            shape = f"[B, {axis}, H], or [B, S, {axis}, H] with S in 1..max_step = {self.max_step}"
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
        self._check(f"B, {axis}" if count is None else f"B, S, {axis}", count, **arrays)
        first = checked_positions(position, len(self.keys[0]), self.seq_len, count or 1)
        positions = first[:, None] + jnp.arange(count or 1)[None]
        return positions, (lambda x: x[:, None]) if count is None else (lambda x: x)


def check_step_bias(bias: DistanceBias | None, heads: int) -> None:
    """Refuses a bias that steps of decoding cannot add, or one of other heads."""
    check_bias(bias, heads)
    if bias is not None and bias.on_grid:
        raise NotImplementedError(
            "bias: decoding counts distances by tokens, and not on a grid; write sl.DistanceBias(table), or "
            "relative_bias=sl.LearnedBias(left) of a layer"
        )
