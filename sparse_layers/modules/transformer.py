"""`SparseTransformer`: a language model out of sparse blocks."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer

from ..arguments.checks import Natural, Positive, checked, strict_kwargs
from ..ops.decoding.cache import KVCache
from ..ops.decoding.checks import checked_lengths, checked_positions
from ..ops.planning.causality import check_causal
from ..ops.sharding import check_sharding, constrained
from ..scorers import as_nsa, masks_and_scorer
from .attention_fn import Patterns
from .block import SparseTransformerBlock, make_norm
from .embedding import Embed
from .rope import Rope, resolved
from .settings import BlockOptions, check_array, check_order, check_settings, check_stream
from .step import check_positions


def _in_turn(name: str, given: Any, num_layers: int, scan_layers: bool) -> tuple[Any, ...]:
    """The patterns or ropes that the layers take in turn."""
    layers = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else (given,)
    if not 1 <= len(layers) <= num_layers:
        raise ValueError(
            f"{name}: a tuple is cycled over the layers, so it must have 1 to num_layers={num_layers} entries, "
            f"got {len(layers)}{'; for heads that differ, nest it: patterns=((head0, head1),)' * (name == 'patterns')}"
        )
    if scan_layers and num_layers % len(layers):
        raise ValueError(
            f"scan_layers: the number of {name} must divide num_layers={num_layers}, got {len(layers)} {name}"
        )
    return layers


def _check_patterns(of_layers: tuple[Any, ...], selection: Any, seq_len: int, causal: bool) -> None:
    """Refuses patterns that are none, and with ``causal`` those that look ahead."""
    for layer, pattern in enumerate(of_layers):
        if as_nsa(pattern) is None:  # which is causal
            name = "patterns" if len(of_layers) == 1 else f"patterns[{layer}]"
            masks, _ = masks_and_scorer(pattern, selection, [seq_len], "patterns")
            for mask in masks if causal else ():
                check_causal(
                    mask,
                    seq_len,
                    name,
                    "a language model must not look ahead",
                    ", or causal=False for an encoder or a prefix LM",
                )


def _layer_state(stacked: nnx.State, index: int) -> nnx.State:
    """The state of one layer out of that of stacked layers; names of axes lose the first one, too."""

    def layer_variable(variable: nnx.Variable) -> nnx.Variable:
        variable = jax.tree.map(operator.itemgetter(index), variable)
        names = variable.get_metadata().get("out_sharding")
        if names:
            variable.set_metadata(out_sharding=tuple(names[1:]))
        variable.remove_axis(0, None)  # the hooks of a user's variable
        return variable

    return jax.tree.map(layer_variable, stacked, is_leaf=lambda x: isinstance(x, nnx.Variable))


class SparseTransformer(nnx.Module):
    """Tokens to logits: embedding, positions, a stack of `SparseTransformerBlock`, final norm, output head.

    ``patterns`` covers the three ways in which Child et al. 2019 (section 4.2) factorise attention: *interleaved*, a
    tuple that is cycled over the layers; *merged*, one mask that is a union; *per head*, an entry that is itself a
    tuple. A bare tuple always means layers: to give one per-head tuple to all of them, write ``(preset("fixed"),)``.

    Args:
      vocab_size: number of tokens V.
      num_heads: number of query heads.
      features: features F of the residual stream.
      num_layers: number of blocks.
      patterns: a pattern as in `SparseSelfAttention`, or a tuple of patterns: layer i uses entry i % len.
      seq_len: the longest input, in tokens.
      causal: True for a language model, whose patterns must not look ahead: it would learn to copy the next token.
        False for an encoder or a prefix LM, whose patterns may.
      positions: "row_column": two learned tables, added, for the row t // position_stride and the column
        t % position_stride of token t; "learned": one learned table (GPT-2); "rope": rotary embeddings in every layer;
        "none".
      position_stride: width of that matrix in tokens, normally the pattern's stride; defaults to ceil(sqrt(seq_len)).
      rope: the rotary embeddings, with positions="rope" only, see `Rope`; None for ``Rope()``. Of a tuple, layer i uses
        entry i % len: Gemma 3's ``(sl.Rope(1e4),) * 5 + (sl.Rope(1e6),)``; None in it for a layer without (Llama 4).
      rope_theta: short for ``rope=Rope(rope_theta)``.
      embedding_scale: what the tokens' embeddings are multiplied by (Gemma: the square root of features); None for 1.
        A tied head is not.
      final_soft_cap: None, or c > 0: the logits of tokens become c * tanh(logits / c) (Gemma 2).
      embedding_init, head_init: initializers of the tables, and of a head of its own; None for the defaults.
      tie_embeddings: use the token embedding as the output head. Otherwise the head is a matrix of its own that
        starts at zero (as in the paper), so that the first loss is log(V).
      norm: "layer" or "rms", of the blocks and before the head.
      norm_epsilon: added to the variance in all norms.
      scan_layers: compile one layer (one turn of ``patterns``) and scan over the others, whose parameters are stacked
        along a first axis: compile time and program size do not grow with the depth. The numbers of
        patterns and of ropes must divide num_layers. Partitioned initializers name the axes of one layer, as
        ("model", None); stacked parameters and their moments get (None, "model", None).
      residual_sharding: how the residual stream [..., T, features] lies on the mesh in force if its axes are Auto, told
        to the partitioner after the embedding and after each block; axes that do not divide are left out. Weights that
        are split along features (FSDP) need it, ``PartitionSpec("data")``, say: left alone, the partitioner may split
        and gather activations instead.
      dtype: of the computation; None: from the parameters.
      param_dtype: of the parameters.
      rngs: random number generators of parameters and dropout.
      **options: all other arguments of `SparseTransformerBlock` (dropout_rate, mlp, mlp_features, remat, ...) and of
        `SparseSelfAttention` (num_kv_heads, head_dim, use_sinks, ...).

    Raises:
      ValueError: an unknown value of positions; a position_stride outside 1..seq_len or without "row_column"; sizes
        that are no integers >= 1; a residual_sharding that is no PartitionSpec; an empty tuple of patterns or one
        longer than num_layers, or with scan_layers one whose length does not divide num_layers; with causal, a pattern
        that looks ahead; and the layers' own.
      TypeError: an unknown argument, patterns that are none, and the layers' own.

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
    def __init__(
        self,
        vocab_size: int,
        num_heads: int,
        features: int,
        num_layers: int,
        *,
        patterns: Patterns,
        seq_len: int,
        causal: bool = True,
        positions: str = "row_column",
        position_stride: int | None = None,
        rope: Rope | Sequence[Rope | None] | None = None,
        rope_theta: float | None = None,
        embedding_scale: float | None = None,
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
        check_settings(
            vocab_size=vocab_size,
            num_heads=num_heads,
            features=features,
            num_layers=num_layers,
            seq_len=seq_len,
            causal=causal,
            positions=positions,
            position_stride=position_stride,
            rope_theta=rope_theta,
            embedding_scale=embedding_scale,
            final_soft_cap=final_soft_cap,
            embedding_init=embedding_init,
            head_init=head_init,
            tie_embeddings=tie_embeddings,
            norm=norm,
            norm_epsilon=norm_epsilon,
            scan_layers=scan_layers,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
            **options,
        )
        check_order(num_heads, features, options.get("head_dim"))
        check_stream(rngs, "params", "the parameters")
        check_sharding(residual_sharding, "residual_sharding")
        of_layers = _in_turn("patterns", patterns, num_layers, scan_layers)
        _check_patterns(of_layers, options.get("selection"), seq_len, causal)
        ropes = _in_turn("rope", rope, num_layers, scan_layers)
        for each in ropes:
            check_settings(rope=each)
        if position_stride is not None and positions != "row_column":
            raise ValueError(
                f"position_stride={position_stride} needs positions='row_column', got positions={positions!r}"
            )
        if position_stride is not None and position_stride > seq_len:
            raise ValueError(f"position_stride must lie in 1..seq_len={seq_len}, got {position_stride}")
        for name, value in (("rope", rope), ("rope_theta", rope_theta)):
            if value is not None and positions != "rope":
                raise ValueError(f"{name}={value} needs positions='rope', got positions={positions!r}")
        if positions == "rope" and (rope is None or rope_theta is not None):
            ropes = (resolved(rope, rope_theta) or Rope(),)
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def table(size: int, variance: float) -> Embed:
            init = embedding_init or nnx.initializers.normal(variance**0.5)
            return Embed(size, features, embedding_init=init, **shared)

        self.token_embedding = table(vocab_size, 1 / features)
        self.position_embedding = table(seq_len, 1 / features) if positions == "learned" else nnx.data(None)
        self.row_embedding = self.column_embedding = nnx.data(None)
        if positions == "row_column":
            stride = math.ceil(math.sqrt(seq_len)) if position_stride is None else position_stride
            # Both tables together add as much variance as the tokens do.
            self.row_embedding = table(-(-seq_len // stride), 1 / (2 * features))
            self.column_embedding = table(stride, 1 / (2 * features))

        def block(pattern: Any, rope: Rope | None, rngs: nnx.Rngs) -> SparseTransformerBlock:
            return SparseTransformerBlock(
                num_heads,
                features,
                pattern=pattern,
                seq_len=seq_len,
                num_layers=num_layers,
                norm=norm,
                norm_epsilon=norm_epsilon,
                rope=rope,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
                **options,
            )

        self.num_layers, self.seq_len, self.scan_layers = num_layers, seq_len, scan_layers
        self.residual_sharding = residual_sharding
        self.embedding_scale, self.final_soft_cap = embedding_scale, final_soft_cap
        turn = math.lcm(len(of_layers), len(ropes))
        layers = tuple((of_layers[i % len(of_layers)], ropes[i % len(ropes)]) for i in range(turn))
        if scan_layers:
            turns = num_layers // len(layers)
            # The layers' axis goes before all names of a partitioned initializer.
            stacked = functools.partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: None})
            self.blocks = nnx.List(stacked(functools.partial(block, *each))(rngs.split(turns)) for each in layers)
        else:
            self.blocks = nnx.List(block(*layers[layer % len(layers)], rngs) for layer in range(num_layers))
        self.final_norm = make_norm(norm, features, epsilon=norm_epsilon, **shared)
        self.head = (
            nnx.data(None)
            if tie_embeddings
            else nnx.Linear(
                features, vocab_size, use_bias=False, kernel_init=head_init or nnx.initializers.zeros, **shared
            )
        )

    @strict_kwargs
    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Computes the logits of the next token at every position.

        Args:
          tokens: int [..., T] in 0..V-1 with T <= seq_len.
          segment_ids: int [..., T], see `SparseSelfAttention`. Positions still count from the input's first token.
          positions: int [..., T] or [T], where they shall count otherwise: what `Rope` turns by, and the rows of
            learned tables, 0..seq_len - 1 (beyond these is no row, and the result no number). The patterns go by the
            places of the tokens in the input all the same.
          deterministic: True switches dropout off, False on; None: as ``train()`` / ``eval()`` set it (on at first).

        Returns:
          Logits [..., T, V], float32.

        Raises:
          ValueError: tokens are no integers, more than seq_len of them, or numpy's and beyond what JAX keeps of them
            (int32); segment_ids or positions of another shape, or positions that are no integers.
          TypeError: what is no array.
        """
        self._check_tokens(tokens, "[..., T]")
        if positions is not None:
            check_positions(positions, tokens.shape)
        x = self._constrain(self._embed(tokens, jnp.arange(tokens.shape[-1]) if positions is None else positions))

        def turn(blocks: nnx.List, x: jax.Array) -> jax.Array:
            for block in blocks:
                made = block(x, segment_ids=segment_ids, positions=positions, deterministic=deterministic)
                x = self._constrain(made)
            return x

        if self.scan_layers:
            turn = nnx.scan(turn, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self._logits(turn(self.blocks, x))

    @property
    def layers(self) -> list[SparseTransformerBlock]:
        """The blocks one by one, also where they are scanned over (then as copies)."""
        if not self.scan_layers:
            return list(self.blocks)
        split = [nnx.split(block) for block in self.blocks]
        turns = range(self.num_layers // len(split))
        return [nnx.merge(graph, _layer_state(state, turn)) for turn in turns for graph, state in split]

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
    ) -> tuple[jax.Array, tuple[KVCache, ...]]:
        """Reads prompts, or a piece of them: the logits after each, and the caches for `decode_step`. No dropout.

        Args:
          tokens: int [B, T] with 1 <= T <= seq_len - start.
          lengths: int [B] in 0..start + T, tokens of each prompt so far, what follows is padding and not read; None for
            start + T.
          chunk: tokens that are read at a time, >= 1, or None for all. Beside the caches, and the keys and values that
            one layer reads, memory then grows with them and not with T; programs grow with the number of chunks. The
            result is the same. Call it under `jax.jit`; a program with chunks has no gradients.
          positions: int [B, T] or [T], as of a call; None for start, start + 1, ... The caches go by places in the
            sequence.
          max_step: the most tokens that a step will add, >= 1, see `KVCache.empty`; of later pieces, that of caches.
          caches: those of the piece before; None for the first one. Give them away to `jax.jit` (``donate_argnames``),
            and they are changed in place.
          start: an int, the tokens before the piece: those of the pieces before.
          total: an int, the tokens of all pieces; None for start + T. Only ``dense_below`` of a scorer asks for it.

        Returns:
          (logits [B, V], float32, of the token after each prompt, meaningless after one that does not end among these
          tokens; one cache for each layer).

        Raises:
          ValueError, TypeError: as `SparseSelfAttention.prefill`; a chunk that is no integer >= 1; caches that are not
            one for each layer.
          NotImplementedError: pieces or positions for `NSA`.
        """
        self._check_tokens(tokens, "[B, T]", 2)
        start = checked("start", start, Natural)
        end = start + tokens.shape[1]
        total = end if total is None else checked("total", total, Positive)
        if not end <= total <= self.seq_len:
            raise ValueError(
                f"start={start} and T={tokens.shape[1]} tokens must end by total={total}, and that by "
                f"seq_len={self.seq_len}"
            )
        chunk = end if chunk is None else checked("chunk", chunk, Positive)
        lengths = checked_lengths(lengths, len(tokens), end)
        if start and caches is None:
            raise TypeError(f"caches must be those of the piece before where start is above 0, got None, start={start}")
        earlier: Sequence[Any] = [None] * self.num_layers if caches is None else caches
        self._check_caches(earlier)
        if positions is not None:
            check_positions(positions, tokens.shape)
        blocks = self.layers

        def read(first: int, caches: Sequence[Any], last: jax.Array | float) -> tuple[tuple[KVCache, ...], jax.Array]:
            piece = slice(first - start, first - start + chunk)
            at = None if positions is None else positions[..., piece]
            x = self._embed(tokens[:, piece], jnp.arange(start, end)[piece] if at is None else at)
            so_far, new = jnp.minimum(lengths, first + x.shape[1]), []
            options: Any = {"positions": at, "start": first, "total": total, "max_step": max_step}
            for block, cache in zip(blocks, caches, strict=True):
                x, cache = block.prefill(x, so_far, cache=cache, **options)
                new.append(cache)
            row = (so_far - 1 - first)[:, None, None]
            picked = jnp.take_along_axis(x, jnp.maximum(row, 0), axis=1)[:, 0]
            return tuple(new), jnp.where(row[:, 0] < 0, last, picked)

        held, last = read(start, earlier, 0.0)
        for first in range(start + chunk, end, chunk):
            # In one program, a compiler does first what all pieces can do side by side, and keeps the results. It
            # cannot where it does not know whether any prompt is so long, nor, by the barrier, find out. A loop of one
            # turn changes the caches in place; a conditional, with two branches that return them, may copy them.
            reads = (jax.lax.optimization_barrier(lengths) > first).any()
            if isinstance(reads, jax.core.Tracer):

                def turn(state: Any, first: int = first) -> Any:
                    return False, *read(first, *state[1:])

                _, held, last = jax.lax.while_loop(lambda state: state[0], turn, (reads, held, last))
            elif reads:
                held, last = read(first, held, last)
        return self._logits(last), held

    @strict_kwargs
    def decode_step(
        self,
        tokens: jax.Array,
        caches: tuple[KVCache, ...],
        position: jax.Array,
        *,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KVCache, ...]]:
        """Reads one more token of each sequence, or several, at the cost of the patterns' rows. No dropout.

        Args:
          tokens: int [B], or [B, S] with S at most the max_step of `prefill`.
          caches: of `prefill` or an earlier step.
          position: int [B], the position of each token, or of the first of S: the number of tokens before it. To take
            tokens back, go on at an earlier one, see `KVCache.written`.
          positions: int [B], or [B, S] or [S], as of a call; None for the places from ``position`` on.

        Returns:
          (logits [B, V] or [B, S, V], float32, of the tokens after these; the new caches).

        Raises:
          ValueError, TypeError: as `SparseSelfAttention.decode_step`.
        """
        self._check_caches(caches)
        most = min(getattr(cache, "max_step", 0) for cache in caches)
        several = f", or [B, S] with S in 1..max_step = {most}" if most else ": NativeSparseAttention reads one a step"
        shape = f"[B], one a sequence{several}"
        self._check_tokens(tokens, shape, 1, *([2] if most else []))
        count = (*tokens.shape, 1)[1]
        if tokens.ndim == 2 and not 1 <= count <= most:
            raise ValueError(f"tokens must have shape {shape}, got {tokens.shape}")
        if positions is not None:
            check_positions(positions, tokens.shape)
        position = checked_positions(position, len(tokens), self.seq_len, count)
        places = position if tokens.ndim == 1 else position[:, None] + jnp.arange(count)[None]
        x, new = self._embed(tokens, places if positions is None else positions), []
        for block, cache in zip(self.layers, caches, strict=True):
            x, cache = block.decode_step(x, cache, position, positions=positions)
            new.append(cache)
        return self._logits(x), tuple(new)

    def unrolled(self) -> "SparseTransformer":
        """This model with its layers one by one, also where they are scanned over: decoding then copies none a step."""
        if not self.scan_layers:
            return self
        model = nnx.clone(self)
        model.blocks, model.scan_layers = nnx.List(self.layers), False
        return model

    def _check_caches(self, caches: Any) -> None:
        if not isinstance(caches, Sequence):
            raise TypeError(f"caches must be those of prefill or of the step before, got {type(caches).__name__}")
        if len(caches) != self.num_layers:
            raise ValueError(f"there must be caches one a layer, {self.num_layers}, got {len(caches)}")

    def _check_tokens(self, tokens: jax.Array, shape: str, *ndim: int) -> None:
        check_array("tokens", tokens, shape)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers {shape}, got {tokens.dtype}")
        if tokens.ndim < 1 or (ndim and tokens.ndim not in ndim):
            raise ValueError(f"tokens must have shape {shape}, got {tokens.shape}")
        if 1 not in ndim and not 1 <= tokens.shape[-1] <= self.seq_len:
            raise ValueError(f"tokens: got {tokens.shape[-1]} tokens, but T must lie in 1..seq_len={self.seq_len}")

        kept = jnp.iinfo(jax.dtypes.canonicalize_dtype(tokens.dtype))
        if isinstance(tokens, np.ndarray) and tokens.size and not kept.min <= tokens.min() <= tokens.max() <= kept.max:
            raise ValueError(f"tokens must fit into {kept.dtype}, got {tokens.min()} to {tokens.max()}")

    def _embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.token_embedding(tokens)
        if self.embedding_scale is not None:
            x = x * jnp.asarray(self.embedding_scale, x.dtype)
        if self.position_embedding is not None or self.row_embedding is not None:
            # A negative row would be counted from the end, and the last row of a table may have columns to spare.
            there = (positions >= 0) & (positions < self.seq_len)
            positions = jnp.where(there, positions, jnp.iinfo(jnp.int32).max).astype(jnp.int32)
            positions = jnp.expand_dims(positions, tuple(range(tokens.ndim - positions.ndim)))
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.row_embedding is not None and self.column_embedding is not None:
            row, column = jnp.divmod(positions, self.column_embedding.num_embeddings)
            x = x + self.row_embedding(row) + self.column_embedding(column)
        return x

    def _constrain(self, x: jax.Array) -> jax.Array:
        return constrained(x, self.residual_sharding, "residual_sharding")

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.final_norm(x)
        kernel = self.token_embedding.embedding[...].T if self.head is None else self.head.kernel[...]
        # Products in the compute dtype, sums and logits in float32: the loss needs the digits.
        logits = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        cap = self.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
