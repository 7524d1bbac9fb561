"""`SparseTransformer`: a language model of sparse residual blocks."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer

from ..arguments.checks import Positive, checked, strict_kwargs
from ..arguments.foreign import one_line
from ..ops.decoding.cache import KVCache
from ..ops.decoding.checks import checked_lengths, checked_positions
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.causality import check_causal
from ..ops.sharding import check_sharding, constrained
from ..scorers import as_nsa, masks_and_scorer
from .attention_fn import Pattern, Patterns
from .block import SparseTransformerBlock, make_norm
from .cache_checks import checked_chunk
from .embedding import Embed
from .mixer import Mixer, MixerLayer
from .mixture import Mlp
from .options import BlockOptions
from .relative_bias import RelativeBias, bias_of_parameter
from .rope import Rope, resolve_rope
from .settings import check_array, check_ids, check_order, check_settings, check_stream, with_checked_settings
from .sparse_attention import make_zeros
from .step import check_positions, check_traces


def _layer_cycle(name: str, value: Any, num_layers: int, scan_layers: bool) -> tuple[Any, ...]:
    """Returns the patterns, ropes or MLPs of a cycle of layers."""
    entries = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (value,)
    if not 1 <= len(entries) <= num_layers:
        raise ValueError(
            f"{name}: a tuple is cycled over the layers, so it must have 1 to num_layers={num_layers} entries, "
            f"got {len(entries)}{'; for heads that differ, nest it: patterns=((head0, head1),)' * (name == 'patterns')}"
        )
    if scan_layers and num_layers % len(entries):
        raise ValueError(
            f"scan_layers: the number of {name} must divide num_layers={num_layers}, got {len(entries)} {name}"
        )
    for entry in entries:
        check_settings(**{name: entry})
    return entries


def _check_patterns(layer_patterns: tuple[Any, ...], selection: Any, seq_len: int, causal: bool) -> None:
    """Refuses patterns of another type and, with ``causal``, patterns that look ahead."""
    for layer, pattern in enumerate(layer_patterns):
        if not isinstance(pattern, Mixer) and as_nsa(pattern) is None:  # a Mixer's layer is the user's; NSA is causal
            name = "patterns" if len(layer_patterns) == 1 else f"patterns[{layer}]"
            masks, _ = masks_and_scorer(pattern, selection, [seq_len], "patterns")
            for mask in masks if causal else ():
                check_causal(
                    mask,
                    seq_len,
                    name,
                    "a language model must not look ahead",
                    ", or causal=False for an encoder or a prefix LM",
                )


def _check_positions(
    positions: str, seq_len: int, *, position_stride: int | None, rope: Any, rope_theta: float | None
) -> None:
    """Refuses settings of other positions than those of the model."""
    if position_stride is not None and positions != "row_column":
        raise ValueError(f"position_stride={position_stride} needs positions='row_column', got positions={positions!r}")
    if position_stride is not None and position_stride > seq_len:
        raise ValueError(f"position_stride must lie in 1..seq_len={seq_len}, got {position_stride}")
    for name, value in (("rope", rope), ("rope_theta", rope_theta)):
        if value is not None and positions != "rope":
            raise ValueError(f"{name}={value} needs positions='rope', got positions={positions!r}")


def _bias_option(block: SparseTransformerBlock, bias: DistanceBias | None) -> dict[str, Any]:
    """Returns the bias that layers share as an option of a block's calls; the layer of a `Mixer` gets none."""
    return {} if bias is None or isinstance(block.attention, MixerLayer) else {"bias": bias}


def _layer_state(stacked: nnx.State, index: int) -> nnx.State:
    """Returns the state of one of several stacked layers, without the layer axis and its name."""

    def layer_variable(variable: nnx.Variable) -> nnx.Variable:
        variable = jax.tree.map(operator.itemgetter(index), variable)
        names = variable.get_metadata().get("out_sharding")
        if names:
            variable.set_metadata(out_sharding=tuple(names[1:]))
        variable.remove_axis(0, None)  # calls the hooks of a user's variable
        return variable

    return jax.tree.map(layer_variable, stacked, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _make_head(features: int, vocab_size: int, init: Initializer | None, rngs: nnx.Rngs, **dtypes: Any) -> nnx.Linear:
    init = init or nnx.initializers.zeros
    return nnx.Linear(features, vocab_size, use_bias=False, kernel_init=init, rngs=rngs, **dtypes)


class SparseTransformer(nnx.Module):
    """A language model: token embedding, positions, a stack of `SparseTransformerBlock`, final norm, output head.

    ``patterns`` covers the three ways in which Child et al. 2019 (section 4.2) factorize attention: *interleaved*, a
    tuple that is repeated over the layers; *merged*, one mask that is a union; *per head*, an entry that is itself a
    tuple. A bare tuple always has one entry a layer: for one per-head tuple in all layers, write
    ``(preset("fixed"),)``.

    Args:
      vocab_size: number of tokens V.
      num_heads: number of query heads.
      features: features F of the residual stream.
      num_layers: number of blocks.
      patterns: a pattern as in `SparseSelfAttention`, `NSA` or a `Mixer`, or a tuple of these: layer i uses entry
        i % len.
      seq_len: the longest input, in tokens.
      causal: True for a language model, whose patterns must not look ahead: it would learn to copy the next token.
        False for an encoder or a prefix LM.
      positions: "row_column", the sum of two learned tables, for the row t // position_stride and the column
        t % position_stride of token t; "learned", one learned table (GPT-2); "rope", rotary position embeddings in
        every layer; or "none".
      position_stride: tokens in a row, usually the pattern's stride; defaults to ceil(sqrt(seq_len)).
      rope: the rotary position embeddings, with positions="rope" only, see `Rope`; None for ``Rope()``. With a tuple,
        layer i uses entry i % len: Gemma 3's ``(sl.Rope(1e4),) * 5 + (sl.Rope(1e6),)``. An entry None is a layer
        without (Llama 4).
      rope_theta: short for ``rope=Rope(rope_theta)``.
      relative_bias: a bias of logits, as in `SparseSelfAttention`, whatever positions says. With a tuple, layer i uses
        entry i % len, and an entry None is a layer without.
      share_relative_bias: True gives all layers one table, the model's param ``bias_table``, as T5 has it. Otherwise
        each layer has a table.
      mlp: see `SparseTransformerBlock`. With a tuple, layer i uses entry i % len, such as
        ``("swiglu", sl.MixtureOfExperts(8, 2))``.
      embedding_scale: factor of the token embeddings, not of a tied head (Gemma: the square root of features); None
        for 1.
      embedding_norm: True applies a norm of the kind ``norm`` to the embeddings, before the first block (BLOOM).
      logits_scale: factor of the logits of tokens, before their soft cap (Granite); None for 1.
      final_soft_cap: None, or c > 0: the logits of tokens become c * tanh(logits / c) (Gemma 2).
      embedding_init, head_init: initializers of the tables, and of a separate head; None for the defaults.
      tie_embeddings: True uses the token embedding as the output head. Otherwise the head is a separate matrix,
        initially zero (as in the paper), so that the first loss is log(V).
      norm: "layer", "layer_no_bias" or "rms", in the blocks and before the head.
      norm_epsilon: added to the variance in all norms.
      scan_layers: True compiles one cycle of ``patterns`` and scans over the others, whose parameters are stacked along
        a first axis: compile time and program size do not grow with the depth. The numbers of patterns, of ropes
        and of MLPs must divide num_layers. Partitioned initializers name the axes of one layer, as ("model", None);
        stacked parameters and their moments get (None, "model", None).
      residual_sharding: sharding of the residual stream [..., T, features] on the current mesh, if its axes are Auto,
        as a constraint after the embedding and after each block. Axes that do not divide are left out. Weights that
        are sharded along features (FSDP) need it, for example ``PartitionSpec("data")``: the partitioner may otherwise
        shard and gather activations.
      dtype: dtype of the computation; None for that of the parameters.
      param_dtype: dtype of the parameters.
      rngs: random number generators of parameters and dropout.
      **options: all other arguments of `SparseTransformerBlock` (dropout_rate, mlp_features, remat, ...) and of
        `SparseSelfAttention` (num_kv_heads, head_dim, use_sinks, ...).

    Raises:
      ValueError: an unknown value of positions; a position_stride outside 1..seq_len or without "row_column"; sizes
        that are not integers >= 1; a residual_sharding that is not a PartitionSpec; an empty tuple of patterns or one
        longer than num_layers, or with scan_layers one whose length does not divide num_layers; with causal, a pattern
        that looks ahead; share_relative_bias without one relative_bias for all layers; and errors of the layers.
      TypeError: an unknown argument, patterns of another type, and errors of the layers.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> patterns = (sl.Window(3), sl.Causal() & sl.Strided(4))
      >>> model = sl.SparseTransformer(256, 2, 8, 2, patterns=patterns, seq_len=16, rngs=nnx.Rngs(0))
      >>> logits = model(jnp.zeros((1, 16), int))
      >>> logits.shape, logits.dtype.name
      ((1, 16, 256), 'float32')
    """

    @strict_kwargs
    @with_checked_settings("rope", "mlp", "relative_bias")
    def __init__(
        self,
        vocab_size: int,
        num_heads: int,
        features: int,
        num_layers: int,
        *,
        patterns: "Patterns | Mixer | Sequence[Pattern | Mixer]",
        seq_len: int,
        causal: bool = True,
        positions: str = "row_column",
        position_stride: int | None = None,
        rope: Rope | Sequence[Rope | None] | None = None,
        rope_theta: float | None = None,
        relative_bias: RelativeBias | Sequence[RelativeBias | None] | None = None,
        share_relative_bias: bool = False,
        mlp: Mlp | Sequence[Mlp] = "gelu",
        embedding_scale: float | None = None,
        embedding_norm: bool = False,
        logits_scale: float | None = None,
        final_soft_cap: float | None = None,
        embedding_init: Initializer | None = None,
        head_init: Initializer | None = None,
        tie_embeddings: bool = False,
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        scan_layers: bool = False,
        residual_sharding: jax.sharding.PartitionSpec | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
        **options: Unpack[BlockOptions],
    ):
        check_order(num_heads, features, options.get("head_dim"))
        check_stream(rngs, "params", "the parameters")
        check_sharding(residual_sharding, "residual_sharding")
        layer_patterns = _layer_cycle("patterns", patterns, num_layers, scan_layers)
        _check_patterns(layer_patterns, options.get("selection"), seq_len, causal)
        _check_positions(positions, seq_len, position_stride=position_stride, rope=rope, rope_theta=rope_theta)
        settings: dict[str, Any] = {"mlp": mlp, "rope": rope, "relative_bias": relative_bias}
        self.shared_relative_bias, self.bias_table = None, nnx.data(None)
        if share_relative_bias:
            self._share_bias(settings.pop("relative_bias"), num_heads, seq_len, layer_patterns, param_dtype)
        cycles = {name: _layer_cycle(name, value, num_layers, scan_layers) for name, value in settings.items()}
        cycles["pattern"] = layer_patterns
        if positions == "rope" and (rope is None or rope_theta is not None):
            cycles["rope"] = (resolve_rope(rope, rope_theta) or Rope(),)
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.num_layers, self.seq_len, self.scan_layers = num_layers, seq_len, scan_layers
        self.residual_sharding, self.embedding_scale = residual_sharding, embedding_scale
        self.logits_scale, self.final_soft_cap = logits_scale, final_soft_cap
        self._make_embeddings(positions, vocab_size, features, position_stride, embedding_init, rngs=rngs, **shared)
        make_model_norm = functools.partial(make_norm, norm, features, epsilon=norm_epsilon, rngs=rngs, **shared)
        self.embedding_norm = make_model_norm() if embedding_norm else nnx.data(None)
        settings = {"norm": norm, "norm_epsilon": norm_epsilon, "seq_len": seq_len, **shared, **options}
        make_block = functools.partial(SparseTransformerBlock, num_heads, features, num_layers=num_layers, **settings)
        self.blocks = self._make_blocks(make_block, cycles, rngs)
        self._check_shared_bias()
        self.final_norm = make_model_norm()
        self.head = nnx.data(None) if tie_embeddings else _make_head(features, vocab_size, head_init, rngs, **shared)

    def _share_bias(
        self, relative_bias: Any, num_heads: int, seq_len: int, patterns: tuple[Any, ...], param_dtype: Dtype
    ) -> None:
        """Makes the one table of all layers, which each call passes on to their attention."""
        got = f"got {one_line(relative_bias)}"
        if not isinstance(relative_bias, RelativeBias):
            raise ValueError(
                f"share_relative_bias=True needs one relative_bias for all layers, as sl.T5Bias(bidirectional=False), "
                f"{got}"
            )
        if any(as_nsa(pattern) is not None for pattern in patterns):
            raise ValueError(f"relative_bias must be None where patterns have NSA, whose layer knows no bias, {got}")
        relative_bias.abstract_bias(num_heads, (seq_len, seq_len))  # refuses what does not fit, now
        self.shared_relative_bias, self._num_heads = relative_bias, num_heads
        self.bias_table = make_zeros(relative_bias.table_shape(num_heads), param_dtype)

    def _check_shared_bias(self) -> None:
        """Refuses a shared bias that the implementation of a layer cannot compute."""
        if self.shared_relative_bias is None:
            return
        layers = [block.attention for block in self.blocks if not isinstance(block.attention, MixerLayer)]
        for step, x in {layer.attention_fn: layer for layer in layers}.items():
            sizes = x.num_heads, x.num_kv_heads, x.head_dim
            check_traces(step, [*x.lengths.values()], *sizes, x.dtype, self.shared_relative_bias)

    def _shared_bias(self) -> DistanceBias | None:
        if self.shared_relative_bias is None:
            return None
        table = None if self.bias_table is None else self.bias_table[...]
        return bias_of_parameter(self.shared_relative_bias, table, self._num_heads)

    def _make_embeddings(
        self,
        positions: str,
        vocab_size: int,
        features: int,
        stride: int | None,
        init: Initializer | None,
        **options: Any,
    ) -> None:
        """Makes the tables of tokens and of positions; ``options`` are those of `Embed`."""

        def table(size: int, variance: float) -> Embed:
            return Embed(size, features, embedding_init=init or nnx.initializers.normal(variance**0.5), **options)

        variance = 1 / features
        self.token_embedding = table(vocab_size, variance)
        self.position_embedding = table(self.seq_len, variance) if positions == "learned" else nnx.data(None)
        self.row_embedding = self.column_embedding = nnx.data(None)
        if positions == "row_column":
            stride = math.ceil(math.sqrt(self.seq_len)) if stride is None else stride
            # Both tables together have the variance of the token embedding.
            self.row_embedding = table(-(-self.seq_len // stride), variance / 2)
            self.column_embedding = table(stride, variance / 2)

    def _make_blocks(
        self,
        make_block: Callable[..., SparseTransformerBlock],
        cycles: Mapping[str, Sequence[Any]],
        rngs: nnx.Rngs,
    ) -> nnx.List:
        """Makes a block for each layer, or a stack of blocks for each layer of a cycle."""
        makers = [
            functools.partial(make_block, **{name: values[layer % len(values)] for name, values in cycles.items()})
            for layer in range(math.lcm(*map(len, cycles.values())))
        ]
        if not self.scan_layers:
            return nnx.List(makers[layer % len(makers)](rngs=rngs) for layer in range(self.num_layers))
        num_cycles = self.num_layers // len(makers)

        def make_stack(maker: Callable[..., SparseTransformerBlock]) -> SparseTransformerBlock:
            # The layer axis goes before all axis names of a partitioned initializer.
            stacked = nnx.vmap(lambda rngs: maker(rngs=rngs), transform_metadata={nnx.PARTITION_NAME: None})
            return stacked(rngs.split(num_cycles))

        return nnx.List(map(make_stack, makers))

    @strict_kwargs
    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        order_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Computes the logits of the next token at every position.

        Args:
          tokens: int [..., T] in 0..V-1 with T <= seq_len.
          segment_ids, order_ids: int [..., T], see `SparseSelfAttention`. They do not change positions.
          positions: int [..., T] or [T], the positions for `Rope` and for learned tables; None for 0, 1, ... Learned
            tables have rows 0..seq_len - 1, and other positions give NaN. The patterns always count from the first
            token of the input.
          deterministic: True switches dropout off, False on; None follows ``train()`` and ``eval()`` (initially on).

        Returns:
          Logits [..., T, V], float32.

        Raises:
          ValueError: tokens that are not integers, more than seq_len of them, or numpy's outside of JAX's integers
            (int32); ids or positions of another shape, or positions that are not integers.
          TypeError: an argument that is not an array.
        """
        self._check_tokens(tokens, "[..., T]")
        if positions is not None:
            check_positions(positions, tokens.shape)
        x = self._constrain(self._embed(tokens, jnp.arange(tokens.shape[-1]) if positions is None else positions))

        options: Any = {"segment_ids": segment_ids, "order_ids": order_ids, "positions": positions}
        bias = self._shared_bias()

        def apply_blocks(blocks: nnx.List, x: jax.Array) -> jax.Array:
            for block in blocks:
                x = self._constrain(block(x, deterministic=deterministic, **options, **_bias_option(block, bias)))
            return x

        if self.scan_layers:
            apply_blocks = nnx.scan(apply_blocks, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self._logits(apply_blocks(self.blocks, x))

    @property
    def layers(self) -> list[SparseTransformerBlock]:
        """The blocks, one a layer; with scan_layers, copies of them."""
        if not self.scan_layers:
            return list(self.blocks)
        split = [nnx.split(block) for block in self.blocks]
        cycles = range(self.num_layers // len(split))
        return [nnx.merge(graph, _layer_state(state, cycle)) for cycle in cycles for graph, state in split]

    @strict_kwargs
    def prefill(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        *,
        chunk: int | None = None,
        positions: jax.Array | None = None,
        max_step: int = 1,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
        total: int | None = None,
        order_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KVCache, ...]]:
        """Reads prompts, or a chunk of them, and returns the next logits and the caches for decoding. No dropout.

        Args:
          tokens: int [B, T] with 1 <= T <= seq_len - start.
          lengths: int [B] in 0..start + T, tokens of each prompt so far, followed by padding; None for start + T.
          chunk: number of tokens to read at a time, >= 1, or None for all. Activations then need memory for a chunk
            instead of T tokens; caches, and the keys and values of one layer, stay. Programs grow with the number of
            chunks. The result is the same. Call it under `jax.jit`; a program with chunks has no gradients.
          positions: int [B, T] or [T], as in a call; None for start, start + 1, ... The caches do not depend on them.
          max_step, start, total, order_ids: as in `SparseSelfAttention.prefill`.
          caches: the caches of the previous chunk; None for the first chunk. Donated to `jax.jit`
            (``donate_argnames``), they are updated in place.

        Returns:
          (logits [B, V], float32, of the token after each prompt, undefined after one that does not end in this chunk;
          one cache for each layer).

        Raises:
          ValueError, TypeError: see `SparseSelfAttention.prefill`; a chunk that is not an integer >= 1; caches that are
            not one for each layer.
          NotImplementedError: chunks, positions or order_ids for `NSA`; chunks with order_ids.
        """
        self._check_tokens(tokens, "[B, T]", 2)
        start, total = checked_chunk(start, tokens.shape[1], total, self.seq_len)
        end = start + tokens.shape[1]
        chunk = end if chunk is None else checked("chunk", chunk, Positive)
        lengths = checked_lengths(lengths, len(tokens), end)
        if start and caches is None:
            raise TypeError(
                f"caches must be those of the previous chunk where start is above 0, got None, start={start}"
            )
        previous: Sequence[Any] = self._checked_caches([None] * self.num_layers if caches is None else caches)
        if positions is not None:
            check_positions(positions, tokens.shape)
        if order_ids is not None:
            check_ids("order_ids", order_ids, [tokens.shape])
        blocks, bias = self.layers, self._shared_bias()

        def read(begin: int, caches: Sequence[Any], last: jax.Array | float) -> tuple[tuple[KVCache, ...], jax.Array]:
            """Returns the caches after the chunk from token ``begin`` on, and features of each prompt's last token."""
            chunk_slice = slice(begin - start, begin - start + chunk)
            chunk_positions = None if positions is None else positions[..., chunk_slice]
            token_positions = jnp.arange(start, end)[chunk_slice] if chunk_positions is None else chunk_positions
            x = self._embed(tokens[:, chunk_slice], token_positions)
            lengths_so_far, new_caches = jnp.minimum(lengths, begin + x.shape[1]), []
            options: Any = {"positions": chunk_positions, "start": begin, "total": total, "max_step": max_step}
            options |= {} if order_ids is None else {"order_ids": order_ids[:, chunk_slice]}
            for block, cache in zip(blocks, caches, strict=True):
                x, cache = block.prefill(x, lengths_so_far, cache=cache, **options, **_bias_option(block, bias))
                new_caches.append(cache)
            row = (lengths_so_far - 1 - begin)[:, None, None]
            features = jnp.take_along_axis(x, jnp.maximum(row, 0), axis=1)[:, 0]
            return tuple(new_caches), jnp.where(row[:, 0] < 0, last, features)

        filled, last = read(start, previous, 0.0)
        for begin in range(start + chunk, end, chunk):
            # A compiler would first compute for all chunks whatever does not depend on caches, and keep the results.
            # A loop that runs only if a prompt is that long prevents this; the barrier hides its condition. A loop of
            # one iteration updates the caches in place, where the branches of a conditional may copy them.
            is_needed = (jax.lax.optimization_barrier(lengths) > begin).any()
            if isinstance(is_needed, jax.core.Tracer):

                def read_once(state: Any, begin: int = begin) -> Any:
                    return False, *read(begin, *state[1:])

                _, filled, last = jax.lax.while_loop(lambda state: state[0], read_once, (is_needed, filled, last))
            elif is_needed:
                filled, last = read(begin, filled, last)
        return self._logits(last), filled

    @strict_kwargs
    def decode_step(
        self,
        tokens: jax.Array,
        caches: tuple[KVCache, ...],
        position: jax.Array,
        *,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KVCache, ...]]:
        """Reads one or more new tokens of each sequence, at the cost of the patterns' rows. No dropout.

        Args:
          tokens: int [B], or [B, S] with S at most the max_step of `prefill`.
          caches: the caches of `prefill` or of the previous step.
          position: int [B], the number of tokens before each token, or before the first of S. An earlier position
            rolls tokens back, see `KVCache.written`.
          positions: int [B], or [B, S] or [S], as in a call; None for ``position``, ``position + 1``, ...

        Returns:
          (logits [B, V] or [B, S, V], float32, of the next tokens; the new caches).

        Raises:
          ValueError, TypeError: see `SparseSelfAttention.decode_step`.
        """
        self._checked_caches(caches)
        max_step = min(getattr(cache, "max_step", 0) for cache in caches)
        block_rule = (
            f", or [B, S] with S in 1..max_step = {max_step}"
            if max_step
            else ": NativeSparseAttention and layers of a Mixer read one a step"
        )
        shape = f"[B], one a sequence{block_rule}"
        self._check_tokens(tokens, shape, 1, *([2] if max_step else []))
        count = (*tokens.shape, 1)[1]
        if tokens.ndim == 2 and not 1 <= count <= max_step:
            raise ValueError(f"tokens must have shape {shape}, got {tokens.shape}")
        if positions is not None:
            check_positions(positions, tokens.shape)
        position = checked_positions(position, len(tokens), self.seq_len, count)
        token_positions = position if tokens.ndim == 1 else position[:, None] + jnp.arange(count)[None]
        x, new_caches = self._embed(tokens, token_positions if positions is None else positions), []
        bias = self._shared_bias()
        for block, cache in zip(self.layers, caches, strict=True):
            x, cache = block.decode_step(x, cache, position, positions=positions, **_bias_option(block, bias))
            new_caches.append(cache)
        return self._logits(x), tuple(new_caches)

    def unrolled(self) -> "SparseTransformer":
        """Returns this model without the scan over layers, so that decoding copies no layer in each step."""
        if not self.scan_layers:
            return self
        model = nnx.clone(self)
        model.blocks, model.scan_layers = nnx.List(self.layers), False
        return model

    def _checked_caches(self, caches: Any) -> Any:
        if not isinstance(caches, Sequence):
            raise TypeError(f"caches must be those of prefill or of the step before, got {type(caches).__name__}")
        if len(caches) != self.num_layers:
            raise ValueError(f"there must be caches one a layer, {self.num_layers}, got {len(caches)}")
        return caches

    def _check_tokens(self, tokens: jax.Array, shape: str, *ndim: int) -> None:
        check_array("tokens", tokens, shape)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers {shape}, got {tokens.dtype}")
        if tokens.ndim < 1 or (ndim and tokens.ndim not in ndim):
            raise ValueError(f"tokens must have shape {shape}, got {tokens.shape}")
        if 1 not in ndim and not 1 <= tokens.shape[-1] <= self.seq_len:
            raise ValueError(f"tokens: got {tokens.shape[-1]} tokens, but T must lie in 1..seq_len={self.seq_len}")
        info = jnp.iinfo(jax.dtypes.canonicalize_dtype(tokens.dtype))
        if isinstance(tokens, np.ndarray) and tokens.size and not info.min <= tokens.min() <= tokens.max() <= info.max:
            raise ValueError(f"tokens must fit into {info.dtype}, got {tokens.min()} to {tokens.max()}")

    def _embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.token_embedding(tokens)
        if self.embedding_scale is not None:
            x = x * jnp.asarray(self.embedding_scale, x.dtype)
        if self.position_embedding is not None or self.row_embedding is not None:
            # A negative row would count from the end, and the last row of the table may have unused columns.
            in_table = (positions >= 0) & (positions < self.seq_len)
            positions = jnp.where(in_table, positions, jnp.iinfo(jnp.int32).max).astype(jnp.int32)
            positions = jnp.expand_dims(positions, tuple(range(tokens.ndim - positions.ndim)))
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.row_embedding is not None and self.column_embedding is not None:
            row, column = jnp.divmod(positions, self.column_embedding.num_embeddings)
            x = x + self.row_embedding(row) + self.column_embedding(column)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _constrain(self, x: jax.Array) -> jax.Array:
        return constrained(x, self.residual_sharding, "residual_sharding")

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.final_norm(x)
        kernel = self.token_embedding.embedding[...].T if self.head is None else self.head.kernel[...]
        # Products in the compute dtype, sums and logits in float32, which the loss needs.
        logits = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        logits = logits if self.logits_scale is None else logits * self.logits_scale
        cap = self.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
