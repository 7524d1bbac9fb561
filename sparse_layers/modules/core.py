"""The core of attention layers, without a framework: NNX, Linen and Haiku make projections, and call it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.decoding.cache import KVCache, check_step_bias
from ..ops.decoding.checks import checked_positions
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.selection import Selection
from .cache_checks import check_cache, check_step, checked_chunk, checked_prompts
from .index import IndexProjections
from .step import AttentionStep, CallInputs, apply_gate, check_inputs, check_positions

Projection = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class AttentionCore:
    """An attention layer as its projections and its attention step.

    Attributes:
      step: the attention step.
      lengths: the longest length of each input, by the name of its argument.
      in_features, num_heads, num_kv_heads, head_dim: sizes of the layer.
      dtype: dtype of the attention step; None for that of query, key and value.
      cache_dtype: 8-bit dtype of caches, see `KVCache.empty`, or None.
      query, key, value: projections of [..., T, F] to heads [..., T, heads, size].
      out: the projection of heads to the output.
      query_ln, key_ln: norms of heads, or None.
      out_gate: projection of the inputs of queries to the gates of heads, or None.
      index_query, index_key: projections of a scorer's index, or None.
      sinks: [N] logits, or None.
      bias_table: the table of the step's `RelativeBias`, or None.
    """

    step: AttentionStep
    lengths: Mapping[str, int]
    in_features: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    cache_dtype: str | None
    query: Projection
    key: Projection
    value: Projection
    out: Projection
    query_ln: Projection | None = None
    key_ln: Projection | None = None
    out_gate: Projection | None = None
    index_query: Projection | None = None
    index_key: Projection | None = None
    sinks: jax.Array | None = None
    bias_table: jax.Array | None = None

    def attend(self, inputs_q: jax.Array, inputs_k: jax.Array, inputs_v: jax.Array, *args, **options) -> jax.Array:
        """Applies the layer to checked inputs; the other arguments are those of `call_inputs`."""
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        call_inputs = self.call_inputs(inputs_q, *args, **options)
        return self.out(self.step(query, key, value, mask=call_inputs, dtype=self.dtype))

    def call_inputs(
        self,
        inputs_q: jax.Array,
        segment_ids: Any = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        losses: list[jax.Array] | None = None,
        order_ids: Any = None,
        bias: DistanceBias | None = None,
    ) -> CallInputs:
        """Returns the inputs of a call besides query, key and value; ``losses`` receives that of a scorer's index."""
        shared = segment_ids, self.sinks, selection, self.index(inputs_q, losses), positions, order_ids
        return CallInputs(*shared, self.make_bias(bias), self.gate(inputs_q))

    def prefill(
        self,
        inputs: jax.Array,
        lengths: jax.Array | None = None,
        *,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        max_step: int = 1,
        cache: KVCache | None = None,
        start: int = 0,
        total: int | None = None,
        order_ids: jax.Array | None = None,
        bias: DistanceBias | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Applies self-attention to prompts; `SparseSelfAttention.prefill` documents the arguments."""
        ids: Any = {"positions": positions, "order_ids": order_ids}
        check_inputs({"inputs": inputs}, [self.in_features], self.lengths, None, selection, **ids)
        fn, length = self.step.fn, inputs.shape[-2]
        start, total = checked_chunk(start, length, total, fn.seq_len)
        if order_ids is not None and length != total:
            raise NotImplementedError(
                f"order_ids need whole prompts in one call of prefill, got a chunk of {length} of total={total} tokens "
                f"from start={start}: leave start, total and chunk out"
            )
        inputs, lengths = checked_prompts(inputs, lengths, start)
        if start or cache is not None:
            check_cache(cache, KVCache, self._cache_attributes | {"batch": len(inputs)})
            if cache is not None and max_step not in (1, cache.max_step):
                raise ValueError(f"max_step must be that of the cache, {cache.max_step}, got {max_step}")
            if not start:
                raise ValueError("start must be the number of tokens before the chunk where a cache is given, got 0")
        if positions is None and start:
            positions = start + jnp.arange(length)
        heads, index = self._project_and_rotate(inputs, positions)
        _, key, value = heads
        index_key = None if index is None else index.key
        # With order ids, prompts may look ahead, and steps see the tokens before them.
        masks = fn.masks if order_ids is None else fn.causal_masks
        previous = cache or self._empty_cache(masks, key, index_key, max_step)
        filled = previous.filled(key, value, lengths, index_key=index_key, start=start)
        bias = self.make_bias(bias)
        check_step_bias(bias, self.num_heads)
        operands: dict[str, Any] = {"sinks": self.sinks, "selection": selection, "index": index, "bias": bias}
        if length == total:
            if order_ids is not None:  # queries may look ahead, but not at padding
                is_padding = jnp.arange(length) >= lengths[:, None]
                operands |= {"order_ids": order_ids, "segment_ids": -is_padding.astype(jnp.int32)}
            out = fn.attend(*heads, **operands)
        else:
            # Attention reads the returned cache. Without this barrier XLA would fill a second one for it.
            filled = jax.lax.optimization_barrier(filled)
            out = fn.attend_chunk((previous, filled), heads, start, total, **operands)
        # Without this barrier XLA may fill the caches at the end of a program, and keep all layers' keys until then.
        out, filled = jax.lax.optimization_barrier((out, filled))
        return self.out(apply_gate(self.gate(inputs), out)), filled

    def decode_step(
        self,
        inputs: jax.Array,
        cache: KVCache,
        position: jax.Array,
        *,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        bias: DistanceBias | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Applies self-attention to new tokens; `SparseSelfAttention.decode_step` documents the arguments."""
        fn = self.step.fn
        check_step(inputs, self.in_features, cache, KVCache, self._cache_attributes)
        if positions is not None:
            check_positions(positions, inputs.shape[:-1])
        tokens = inputs[:, None] if inputs.ndim == 2 else inputs
        position = checked_positions(position, len(tokens), fn.seq_len, tokens.shape[1])
        if positions is None:
            positions = position[:, None] + jnp.arange(tokens.shape[1])[None]
        elif inputs.ndim == 2:
            positions = positions[:, None]

        def drop_token_axis(x: jax.Array) -> jax.Array:
            return x[:, 0] if inputs.ndim == 2 else x

        heads, index = self._project_and_rotate(tokens, positions)
        options = {"scale": fn.scale, "logits_soft_cap": fn.logits_soft_cap, "sinks": self.sinks}
        if index is not None:
            options["index"] = drop_token_axis(index.query), drop_token_axis(index.key)
        query, key, value = map(drop_token_axis, heads)
        options["bias"] = self.make_bias(bias)
        out, cache = cache.step(query, key, value, position, selection=selection, **options)
        out = apply_gate(self.gate(tokens), out.reshape(*tokens.shape[:2], *out.shape[-2:]))
        return drop_token_axis(self.out(out)), cache

    def make_bias(self, bias: DistanceBias | None) -> DistanceBias | None:
        """Returns the layer's bias, or that of a call; a layer that has one refuses another."""
        return self.step.make_bias(self.bias_table, self.num_heads, bias)

    def gate(self, inputs: jax.Array) -> jax.Array | None:
        """Returns the gates' logits for the inputs of queries, or None."""
        return None if self.out_gate is None else self.out_gate(inputs)

    def index(self, inputs: jax.Array, losses: list[jax.Array] | None = None) -> IndexProjections | None:
        """Returns the projections of a scorer that has an index. Its loss has gradients for these alone."""
        if self.index_query is None or self.index_key is None:
            return None
        inputs = jax.lax.stop_gradient(inputs)
        return IndexProjections(self.index_query(inputs), self.index_key(inputs), losses)

    def _project(self, inputs_q: jax.Array, inputs_k: jax.Array, inputs_v: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        return query, key, value

    def _project_and_rotate(
        self, inputs: jax.Array, positions: jax.Array | None
    ) -> tuple[Any, IndexProjections | None]:
        """Returns (query, key, value) of tokens [B, T, F] and their index, normalized and rotated."""
        query, key, value = self._project(inputs, inputs, inputs)
        heads = self.step.apply_rope(query, key, value, self.dtype, positions)
        index = self.index(inputs)
        return heads, None if index is None else self.step.apply_rope_to_index(index, self.dtype, positions)

    def _empty_cache(self, masks: Any, key: jax.Array, index_key: jax.Array | None, max_step: int) -> KVCache:
        fn = self.step.fn
        return KVCache.empty(
            masks,
            fn.seq_len,
            selection=fn.selection,
            batch=len(key),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=key.dtype,
            index_size=None if index_key is None else index_key.shape[-1],
            max_step=max_step,
            cache_dtype=self.cache_dtype,
            implementation=fn.cache_implementation,
        )

    @property
    def _cache_attributes(self) -> dict[str, Any]:
        """The attributes that a cache of this layer has."""
        fn, heads = self.step.fn, {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        shared = {"masks": fn.causal_masks, "selection": fn.selection, "seq_len": fn.seq_len}
        return shared | heads | {"cache_dtype": self.cache_dtype}
