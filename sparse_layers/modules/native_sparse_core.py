"""The core of native sparse attention, without a framework: NNX and Linen layers make projections, and call it."""

import dataclasses
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from ..masks.primitives import Causal, Compressed, Window
from ..ops.decoding.checks import checked_positions
from ..ops.planning.plan import Plan
from ..ops.planning.selection import Selection
from ..ops.select import select_blocks
from ..scorers import NSA, as_nsa
from .attention_fn import AttentionFn
from .cache_checks import check_step, checked_prompts
from .core import Projection
from .native_sparse_cache import NSACache
from .options import PrefillOptions
from .rope import Rope
from .step import check_inputs

BRANCHES = "compressed", "selected", "sliding"


def make_attributes(
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int,
    pattern: NSA | str,
    seq_len: int,
    rope: Rope | None,
    dtype: Dtype | None,
    cache_dtype: str | None,
    **kernels: Any,
) -> dict[str, Any]:
    """Checks the settings of `NativeSparseAttention`, NNX or Linen, and returns its attributes by name.

    Parameters and the features of input and output are missing; ``kernels`` are options of `AttentionFn`.
    """
    nsa, seq_len = checked_nsa(pattern), int(seq_len)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    if rope is not None:
        rope.pairs(head_dim, "head_dim")
    fns = make_branches(nsa, seq_len, **kernels)
    # An abstract trace reports a bad block size or implementation now, not in the first step.
    for name, fn in fns.items():
        length = max(1, nsa.windows(seq_len)) if name == "compressed" else seq_len
        query, key = (
            jax.ShapeDtypeStruct((1, rows, heads, head_dim), dtype or jnp.float32)
            for rows, heads in ((seq_len, num_heads), (length, num_kv_heads))
        )
        jax.eval_shape(fn.attend, query, key, key)
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "pattern": nsa,
        "seq_len": seq_len,
        "rope": rope,
        "cache_dtype": cache_dtype,
        **fns,
    }


def make_branches(nsa: NSA, seq_len: int, **kernels: Any) -> dict[str, AttentionFn]:
    """Returns the attention function of each branch of `NativeSparseAttention`, by name."""
    masks = {
        "compressed": Compressed(*nsa.window),
        "selected": Causal(),
        "sliding": Causal() & Window(nsa.sliding - 1),
    }
    return {name: AttentionFn((mask,), seq_len, **kernels) for name, mask in masks.items()}


def branch_plans(nsa: NSA, seq_len: int, **branches: AttentionFn) -> dict[str, Plan]:
    """Returns the plan of each branch for the longest input (cached)."""
    lengths = {"compressed": max(1, nsa.windows(seq_len))}
    return {name: fn.plan(seq_len, lengths.get(name, seq_len)) for name, fn in branches.items()}


def checked_nsa(pattern: Any) -> NSA:
    """Returns the `NSA` of a pattern.

    Raises:
      ValueError: the pattern is neither `NSA` nor a name of it.
    """
    nsa = as_nsa(pattern)
    if nsa is None:
        raise ValueError(f"pattern must be NSA, as sl.NSA(count=8), or its name, 'nsa:count=8', got {pattern!r}")
    return nsa


@dataclasses.dataclass(frozen=True)
class NativeSparseCore:
    """A native sparse attention layer as its projections and the attention functions of its branches.

    Attributes:
      num_heads, num_kv_heads, head_dim, in_features, out_features, seq_len: sizes of the layer.
      pattern: the `NSA`.
      rope: rotary position embeddings, or None.
      cache_dtype: the 8-bit dtype of caches of the selected branch, see `KVCache.empty`, or None.
      compressed, selected, sliding: the attention function of each branch.
      query: the projection of [B, T, F] to queries [B, T, N, H].
      key, value: projections of [B, T, F] to [B, T, 3, K, H], one for each branch.
      compress_key, compress_value: see `Compression`.
      gate: the projection of [B, T, F] to logits of gates, [B, T, 3, N].
      out: the projection of heads to the output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    in_features: int
    out_features: int
    pattern: NSA
    seq_len: int
    rope: Rope | None
    cache_dtype: str | None
    compressed: AttentionFn
    selected: AttentionFn
    sliding: AttentionFn
    query: Projection
    key: Projection
    value: Projection
    compress_key: Projection
    compress_value: Projection
    gate: Projection
    out: Projection

    def attend(
        self,
        inputs: jax.Array,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        order_ids: None = None,
    ) -> jax.Array:
        """Applies the layer; `NativeSparseAttention.__call__` documents the arguments."""
        _refuse_order_ids(order_ids)
        options = segment_ids, selection, False, positions
        check_inputs({"inputs": inputs}, [self.in_features], {"seq_len": self.seq_len}, *options)
        *batch, length, _ = inputs.shape
        rows = math.prod(batch)  # not -1: a batch may be empty
        inputs = inputs.reshape(rows, *inputs.shape[-2:])
        ids: Any = None if segment_ids is None else segment_ids.reshape(rows, length)
        selection = jax.tree.map(lambda x: x.reshape(rows, *x.shape[-3:]), selection)
        if positions is not None and positions.ndim > 1:
            positions = positions.reshape(rows, length)
        out, *_ = self._forward(inputs, ids, selection, positions)
        return out.reshape(*batch, length, self.out_features)

    def prefill(
        self, inputs: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, NSACache]:
        """Applies the layer to prompts; `NativeSparseAttention.prefill` documents the arguments."""
        selection, total = options.pop("selection", None), options.pop("total", None)
        check_inputs({"inputs": inputs}, [self.in_features], {"seq_len": self.seq_len}, None, selection)
        if total is not None and total != inputs.shape[-2]:
            raise NotImplementedError(
                "NativeSparseAttention reads prompts as a whole, so chunk must be left out, got a chunk of "
                f"{inputs.shape[-2]} of total={total} tokens"
            )
        _refuse_order_ids(options.pop("order_ids", None))
        _refuse_options(**options)
        inputs, lengths = checked_prompts(inputs, lengths)
        out, *keys_and_values = self._forward(inputs, None, selection)
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        settings: Any = {"implementation": self.sliding.cache_implementation, "cache_dtype": self.cache_dtype}
        return out, NSACache.filled(self.pattern, self.seq_len, lengths, *keys_and_values, **heads, **settings)

    def decode_step(
        self,
        inputs: jax.Array,
        cache: NSACache,
        position: jax.Array,
        *,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        bias: Any = None,
    ) -> tuple[jax.Array, NSACache]:
        """Applies the layer to one new token; `NativeSparseAttention.decode_step` documents the arguments."""
        _refuse_options(positions=positions, bias=bias)
        names = "pattern", "seq_len", "num_heads", "num_kv_heads", "cache_dtype"
        check_step(inputs, self.in_features, cache, NSACache, {name: getattr(self, name) for name in names})
        position = checked_positions(position, len(inputs), self.seq_len)
        inputs = inputs[:, None]
        query, keys, values = jax.tree.map(lambda x: x[:, 0], self._project(inputs, position[:, None]))
        cache, (key, value), start = cache.written(keys, values, position)
        key, value = self._compress_windows(key, value, start[:, None])
        # Behind a barrier, as in `KVCache.step`.
        cache = jax.lax.optimization_barrier(cache.compressed(key[:, 0], value[:, 0], start))
        compressed, selected, sliding = cache.attend(query, position, self.selected.scale, selection)
        return self._merge_branches(inputs, compressed[:, None], selected[:, None], sliding[:, None])[:, 0], cache

    def _forward(
        self, inputs: jax.Array, ids: Any, selection: Selection | None, positions: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        """Returns outputs [B, T, out_features], keys and values [B, T, K, H] of each branch, and those of windows."""
        (query, keys, values), nsa = self._project(inputs, positions), self.pattern
        starts = jnp.arange(max(1, nsa.windows(inputs.shape[1]))) * nsa.pool_stride
        starts = starts if positions is None else positions[..., starts]
        pooled, value = self._compress_windows(self._pad_to_window(keys[0]), self._pad_to_window(values[0]), starts)
        if selection is None:
            shared: Any = {"scale": self.selected.scale, "query_sharding": self.selected.query_sharding}
            selection = select_blocks(nsa, query, keys[1], ids, pooled=pooled, **shared)
        compressed_ids = None if ids is None else (ids, self._window_ids(ids))
        compressed = self.compressed.attend(query, pooled, value, segment_ids=compressed_ids)
        selected = self.selected.attend(query, keys[1], values[1], segment_ids=ids, selection=selection)
        sliding = self.sliding.attend(query, keys[2], values[2], segment_ids=ids)
        return self._merge_branches(inputs, compressed, selected, sliding), keys, values, pooled, value

    def _project(self, inputs: jax.Array, positions: jax.Array | None = None) -> tuple[Any, ...]:
        """Returns queries of tokens [B, T, F], and the keys and values of each branch."""
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        (unrotated, *keys), values = ([x[:, :, c] for c in range(3)] for x in (key, value))
        if self.rope is not None:
            query, *keys = (self.rope(x, positions) for x in (query, *keys))
        return query, [unrotated, *keys], values

    def _compress_windows(self, key: jax.Array, value: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of windows; ``starts`` has the positions of their first tokens."""
        key, value = self.compress_key(key), self.compress_value(value)
        return key if self.rope is None else self.rope(key, starts), value

    def _merge_branches(self, inputs: jax.Array, compressed: Any, selected: Any, sliding: Any) -> jax.Array:
        gates = jax.nn.sigmoid(self.gate(inputs))[..., None]
        return self.out(gates[:, :, 0] * compressed + gates[:, :, 1] * selected + gates[:, :, 2] * sliding)

    def _pad_to_window(self, x: jax.Array) -> jax.Array:
        """Pads [B, T, ...] to the size of a window, which no query attends to if it is padding."""
        padding = max(0, self.pattern.pool_size - x.shape[1])
        return jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])

    def _window_ids(self, ids: Any) -> jax.Array:
        """Returns ids [B, windows] from ids [B, T]: -1 for windows with tokens of several documents."""
        ids, (size, stride) = self._pad_to_window(ids), self.pattern.window
        ids_in_windows = ids[:, np.arange(self.pattern.windows(ids.shape[1]))[:, None] * stride + np.arange(size)]
        return jnp.where((ids_in_windows == ids_in_windows[..., :1]).all(-1), ids_in_windows[..., 0], -1)


def _refuse_order_ids(order_ids: Any) -> None:
    if order_ids is not None:
        raise NotImplementedError(
            "NativeSparseAttention is causal, and compresses windows of consecutive keys: order_ids must be left out; "
            "SparseSelfAttention takes them"
        )


def _refuse_options(**options: Any) -> None:
    """Refuses options of prefill and decoding that this layer lacks.

    Raises:
      NotImplementedError: an option that is not its default.
    """
    for name, value in options.items():
        if value is not None and (name, value) not in (("max_step", 1), ("start", 0)):
            raise NotImplementedError(
                "NativeSparseAttention reads prompts as a whole and then a token a step, by their places: "
                f"start, cache, max_step, positions and bias must be left out, got {name}={value!r}"
            )
