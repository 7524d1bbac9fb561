"""`SparseSelfAttention`: Flax's own multi-head attention whose attention step follows a sparsity pattern."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib

from ..arguments.checks import Natural, Positive, checked, strict_kwargs
from ..arguments.foreign import one_line
from ..masks.algebra import Mask
from ..ops.decoding.cache import KVCache
from ..ops.decoding.checks import checked_lengths, checked_positions
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.selection import Selection
from ..scorers import Scorer, scorer_of
from .attention_fn import Index, Pattern
from .rope import Rope
from .settings import (
    PROJECTIONS,
    CrossOptions,
    Kernels,
    LayerOptions,
    biased,
    check_features,
    check_settings,
    check_stream,
    query_features,
)
from .step import CallInputs, attention_step, check_inputs, check_positions


class PrefillOptions(TypedDict, total=False):
    """Arguments of `SparseSelfAttention.prefill` that a block hands on; see there."""

    selection: Selection | None
    positions: jax.Array | None
    max_step: int
    cache: Any
    start: int
    total: int | None


def check_step(inputs: Any, features: int, cache: Any, kind: type[Any], ours: Mapping[str, Any]) -> None:
    """Refuses a step of decoding with other inputs than [B, features], or with the cache of another layer.

    Caches with a ``max_step`` take up to so many tokens a sequence, [B, S, features].

    Args:
      inputs, cache: of the step.
      features: of the layer's input.
      kind: the class of the layer's caches, which have ``batch``, the number of sequences.
      ours: what the cache's attributes must be.

    Raises:
      ValueError, TypeError: see `SparseSelfAttention.decode_step`.
    """
    shape, most = f"[B, {features}], one token a sequence", getattr(cache, "max_step", 0)
    check_features("inputs", inputs, shape, features)
    check_cache(cache, kind, ours)
    several = inputs.ndim == 3 and 1 <= inputs.shape[1] <= most
    if not (inputs.ndim == 2 or several) or len(inputs) != cache.batch:
        shape += f", or [B, S, {features}] with S in 1..max_step = {most}," if most else ""
        raise ValueError(f"inputs must have shape {shape} of the cache's {cache.batch}, got {inputs.shape}")


def check_cache(cache: Any, kind: type[Any], ours: Mapping[str, Any]) -> None:
    """Refuses the cache of another layer; arguments as of `check_step`."""
    if not isinstance(cache, kind):
        raise TypeError(
            f"cache must be the {kind.__name__} of prefill or of the step before, got {type(cache).__name__}: "
            f"{one_line(cache)}"
        )
    for name, value in ours.items():
        if getattr(cache, name) != value:
            raise ValueError(f"cache is that of another layer: {name} is {getattr(cache, name)}, not {value}")


def checked_prompts(inputs: jax.Array, lengths: Any, start: int = 0) -> tuple[jax.Array, jax.Array]:
    """Prompts, from token ``start`` on, without what stands in their padding, and their lengths, int32 [B].

    Raises:
      ValueError: see `SparseSelfAttention.prefill`.
    """
    if inputs.ndim != 3:
        raise ValueError(f"inputs must have shape [B, T, {inputs.shape[-1]}], got {inputs.shape}")
    lengths = checked_lengths(lengths, len(inputs), start + inputs.shape[1])
    # Padding may hold anything, NaN too, and a weight of 0 times NaN is NaN.
    place = start + jnp.arange(inputs.shape[1])[None, :, None]
    return jnp.where(place < lengths[:, None, None], inputs, 0), lengths


class JointRMSNorm(nnx.RMSNorm):
    """RMS norm of heads [..., N, H] over all features of a token together, N * H of them."""

    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The same, normed."""
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def _refuse_decode(decode: bool | None) -> None:
    if decode:
        raise NotImplementedError(
            "decode=True: a sparse pattern's cache is not Flax's dense one; call prefill(prompt, lengths), then "
            "decode_step(token, cache, position)"
        )


class IndexLoss(nnx.Variable):
    """The loss by which a layer's index learns, a float32 scalar that each call sets: that of `MSA`.

    Args:
      *args: the scalar.
      **kwargs: as of every ``nnx.Variable``.

    Raises:
      TypeError: as ``nnx.Variable``.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.SparseSelfAttention(2, 8, pattern="msa:block=16,count=2", seq_len=64, rngs=nnx.Rngs(0))
      >>> def loss(layer, x):
      ...     found = (layer(x) ** 2).mean()
      ...     return found + sum(jax.tree.leaves(nnx.state(layer, sl.IndexLoss)))
      >>> gradients = nnx.jit(nnx.grad(loss))(layer, jax.random.normal(jax.random.key(0), (1, 64, 8)))
      >>> bool((gradients["index_query"]["kernel"][...] != 0).any())
      True
    """


class SparseAttention(nnx.MultiHeadAttention):
    """What `SparseSelfAttention` and `SparseCrossAttention` share: parameters, the pattern and its step.

    Args:
      lengths: see `attention_step`.
      rope, rope_theta: see `SparseSelfAttention`.
      **options: those of `SparseCrossAttention`, where all other arguments are described.

    Raises:
      ValueError, TypeError, NotImplementedError: see there.
    """

    _limits: ClassVar[tuple[str, ...]]  # names of lengths

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None,
        out_features: int | None,
        num_kv_heads: int | None,
        in_kv_features: int | None = None,
        *,
        lengths: Mapping[str, int],
        head_dim: int | None,
        pattern: Pattern,
        dropout_rate: float,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[CrossOptions],
    ):
        check_settings(
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            out_features=out_features,
            num_kv_heads=num_kv_heads,
            in_kv_features=in_kv_features,
            head_dim=head_dim,
            rope=rope,
            rope_theta=rope_theta,
            rngs=rngs,
            **options,
        )
        check_stream(rngs, "params", "the parameters")
        qkv_features = query_features(num_heads, in_features, qkv_features, head_dim)
        flax: dict[str, Any] = dict(options)
        use_sinks, epsilon = flax.pop("use_sinks", False), flax.pop("norm_epsilon", 1e-6)
        biases, norm = biased(flax.pop("use_bias", True)), flax.pop("normalize_qk", False)
        kernels = {name: flax.pop(name) for name in options.keys() & Kernels.__optional_keys__}
        step = attention_step(
            pattern,
            lengths,
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            qkv_features // num_heads,
            options.get("dtype"),
            rope=rope,
            rope_theta=rope_theta,
            dropout_rate=dropout_rate,
            **kernels,
        )
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=step,
            decode=False,
            use_bias=bool(biases),
            normalize_qk=bool(norm),
            rngs=rngs,
            **flax,
        )
        for name in PROJECTIONS if biases else ():
            if name not in biases:
                projection = getattr(self, name)
                projection.use_bias, projection.bias = False, nnx.data(None)
        for name, heads in (("query_ln", self.num_heads), ("key_ln", self.num_kv_heads)) if norm else ():
            if norm in ("rms", "rms_joint"):
                make, size = (nnx.RMSNorm, 1) if norm == "rms" else (JointRMSNorm, heads)
                shared: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
                shared |= {"promote_dtype": self.ln_promote_dtype}
                shared["scale_metadata"] = flax.get(f"{name}_scale_metadata", {})
                setattr(self, name, make(size * self.head_dim, epsilon=epsilon, **shared))
            else:
                getattr(self, name).epsilon = epsilon
        # An array is kept as masks: by itself it would count as state, not as part of the layer's definition.
        self.pattern = pattern if isinstance(pattern, str | Mask | Scorer) else step.fn.masks
        for name, length in lengths.items():
            setattr(self, name, length)
        self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype)) if use_sinks else nnx.data(None)

    def __nnx_repr__(self) -> Iterator[reprlib.Object | reprlib.Attr]:
        yield reprlib.Object(type(self), same_line=True)
        for name in ("num_heads", "num_kv_heads", "head_dim", "in_features", "pattern"):
            yield reprlib.Attr(name, getattr(self, name))
        scorer = self.attention_fn.fn.selection
        if scorer is not None and scorer_of(self.pattern) is None:
            yield reprlib.Attr("selection", scorer)
        for name, length in self.lengths.items():
            yield reprlib.Attr(name, length)

    @property
    def lengths(self) -> dict[str, int]:
        """The most tokens of each input, by the names of the arguments that say them."""
        return {name: getattr(self, name) for name in self._limits}

    @property
    def plan(self) -> Plan:
        """The compiled pattern for the longest inputs (cached)."""
        return self.attention_fn.fn.plan(*self.lengths.values())

    @property
    def _sinks(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]


class SparseSelfAttention(SparseAttention):
    """Self-attention over a sparsity pattern, with the parameters of ``flax.nnx.MultiHeadAttention``.

    Projections, grouped-query heads, QK norm, initialisers and dtypes are Flax's own, and so are the parameter names:
    the state of a dense layer loads unchanged (``nnx.update(sparse, nnx.state(dense, nnx.Param))``). Only the attention
    step differs. The pattern is compiled to block lists at construction, for ``seq_len`` tokens; shorter inputs see the
    pattern's upper left corner, whose plan is made at their first trace and cached by pattern and length.

    Args:
      num_heads: number of query heads N.
      in_features: features F of the input.
      qkv_features: features of all query heads together, num_heads * head_dim; defaults to in_features.
      out_features: features of the output; defaults to in_features.
      num_kv_heads: number of key and value heads, a divisor of num_heads; defaults to num_heads.
      head_dim: features of a head, instead of qkv_features.
      pattern: who attends to whom: a preset's name (``"sparse_transformer_strided:stride=64"``), a mask, a
        sequence of those that the heads take in turn (head h uses entry h % len; len must divide num_heads), or a numpy
        bool array [seq_len, seq_len] or [entries, seq_len, seq_len].
      seq_len: the longest input, in tokens.
      rope: rotary position embeddings of q and k after QK norm, by position or by coordinates on a grid, see `Rope`;
        None for none.
      rope_theta: short for ``rope=Rope(rope_theta)``.
      normalize_qk: norms of q and k before they turn (``query_ln``, ``key_ln``), with scales and no biases: True, or
        "layer", is Flax's layer norm of each head, "rms" the RMS norm of each head (Qwen 3, Gemma 3), "rms_joint" that
        over all heads of a token together (OLMo 2).
      norm_epsilon: added to the variance in these norms.
      use_bias: whether the four projections have biases, or the names of those that do: ("query", "key", "value") in
        Qwen 2.5, ("query", "value", "out") in Whisper.
      use_sinks: give each head a learned logit (``sinks``, float param [N], zero at first) that joins every softmax
        and adds nothing to the output, so that a query may attend to nothing.
      scale: factor of the logits; None for head size ** -0.5.
      logits_soft_cap: None, or c > 0: logits become c * tanh(logits / c).
      implementation: None for the best that the platform offers, or the name of one; with "xla" or "reference" XLA
        attends in steps of decoding, too, see `KVCache.empty`.
      fwd_params, bwd_params: settings of the kernels; None for the library's choice.
      query_sharding: how queries [B, T, N, H] lie on a mesh of Auto axes, as in `block_sparse_attention`; B are all
        leading axes together.
      selection: how queries choose key blocks within a causal pattern, by what is in them: a scorer, as
        ``sl.MoBA(block=128, count=16)``, or its name, ``"moba:block=128,count=16"``. A scorer may also be the
        pattern: it then chooses among all keys of the past. Inputs so short that all blocks would be chosen are
        attended to as the pattern says. None for no choice, or one for each call.
      dropout_rate: must be 0, see Raises.
      decode: must be False or None, see Raises; decode by `prefill` and `decode_step`.
      rngs: random number generators of the initial parameters.
      **options: all other arguments of ``flax.nnx.MultiHeadAttention``: ``dtype``, ``param_dtype``, ``kernel_init``,
        ``out_kernel_init``, ... (``precision`` is that of the four projections), but for ``in_kv_features`` and
        ``attention_fn``, which self-attention over a pattern has no use for.

    Attributes:
      pattern: the name or mask as given; sequences and arrays as the tuple of masks that they stand for.
      plan: the compiled block lists for seq_len tokens.

    Raises:
      ValueError: an unknown preset or option of it; a number of patterns that does not divide num_heads; an array
        whose lengths are not seq_len; sizes that are no integers >= 1, flags that are no bools, dtypes that are no
        floating ones; qkv_features that num_heads does not divide, or that contradict head_dim; a rope whose axes
        cannot share the head size, or both rope and rope_theta; whatever `block_sparse_attention` refuses (an unknown
        implementation, a soft cap <= 0, ...);
        dropout_rate > 0 (probabilities are never formed, so there is nothing to drop: use dropout on the residual, as
        the Sparse Transformer does).
      TypeError: an unknown argument; a pattern or rope that is none; rngs that are no ``nnx.Rngs``.
      NotImplementedError: decode=True (the cache is not Flax's dense one), or an implementation that cannot serve the
        layer.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> layer = sl.SparseSelfAttention(2, 8, pattern=sl.Causal() & sl.Window(3), seq_len=16, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
    """

    _limits = ("seq_len",)
    seq_len: int

    @strict_kwargs
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        pattern: Pattern,
        seq_len: int,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        normalize_qk: bool | str = False,
        norm_epsilon: float = 1e-6,
        use_bias: bool | Collection[str] = True,
        use_sinks: bool = False,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        implementation: str | None = None,
        fwd_params: FwdParams | None = None,
        bwd_params: BwdParams | None = None,
        query_sharding: jax.sharding.PartitionSpec | None = None,
        selection: Scorer | str | None = None,
        dropout_rate: float = 0.0,
        decode: bool | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LayerOptions],
    ):
        _refuse_decode(decode)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            lengths={"seq_len": seq_len},
            head_dim=head_dim,
            pattern=pattern,
            dropout_rate=dropout_rate,
            rope=rope,
            rope_theta=rope_theta,
            normalize_qk=normalize_qk,
            norm_epsilon=norm_epsilon,
            use_bias=use_bias,
            use_sinks=use_sinks,
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            implementation=implementation,
            fwd_params=fwd_params,
            bwd_params=bwd_params,
            query_sharding=query_sharding,
            selection=selection,
            rngs=rngs,
            **options,
        )
        self.index_query = self.index_key = self.index_loss = nnx.data(None)
        scorer = self.attention_fn.fn.selection
        if scorer is not None and scorer.indexed:
            size = scorer.index_features(self.head_dim)
            shared: dict[str, Any] = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.param_dtype}
            if "kernel_init" in options:
                shared["kernel_init"] = options["kernel_init"]
            self.index_query = nnx.LinearGeneral(in_features, (self.num_kv_heads, size), rngs=rngs, **shared)
            self.index_key = nnx.LinearGeneral(in_features, (1, size), rngs=rngs, **shared)
            self.index_loss = IndexLoss(jnp.zeros((), jnp.float32))

    @strict_kwargs
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] (self-attention only, and no dense mask)
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> jax.Array:
        """Applies attention to the inputs.

        Args:
          inputs: [..., T, F] with T <= seq_len; any number of leading batch dimensions, also none.
          segment_ids: int [..., T]; tokens attend within their own id only (packed documents). Negative ids are
            padding, which attends to nothing.
          selection: the key blocks that queries look at, chosen at run time, within the pattern: a `Selection` with the
            leading axes of the inputs.
          positions: int [..., T] or [T], by which `Rope` turns the tokens, where they do not count from the input's
            first one: packed documents that each begin at 0, prompts padded on the left, pieces of a longer text. The
            pattern goes by the places of the tokens in the input all the same.
          sow_weights: must be False, see Raises.
          decode: must be False or None, see Raises.
          out_sharding, qkv_sharding: handed to Flax's projections.

        Returns:
          [..., T, out_features] in the layer's dtype.

        Raises:
          ValueError: inputs that are no floats or of another shape, longer than seq_len among them; segment_ids of
            another shape than the tokens', positions too; a selection of other axes or blocks than the inputs';
            sow_weights=True (the probabilities are never formed).
          TypeError: what is no array, or a selection that is none.
          NotImplementedError: decode=True.
        """
        _refuse_decode(decode or self.decode)
        given = segment_ids, selection, sow_weights, positions
        check_inputs({"inputs": inputs}, [self.in_features], self.lengths, *given)
        index = self._index(inputs, None if self.deterministic else [])
        call_inputs = CallInputs(segment_ids, self._sinks, selection, index, positions)
        out = super().__call__(
            inputs,
            mask=call_inputs,  # pyright: ignore[reportArgumentType] (Flax hands it to attention_fn as it is)
            decode=False,
            out_sharding=out_sharding,
            qkv_sharding=qkv_sharding,
        )
        if index is not None and self.index_loss is not None and index.losses:
            self.index_loss[...] = index.losses[0]
        return out

    @strict_kwargs
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
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to prompts, or to a piece of them, and keeps their keys and values for `decode_step`.

        Args:
          inputs: [B, T, F] with start + T <= seq_len.
          lengths: int [B], tokens of each prompt so far, what follows is padding; None for start + T.
          selection: as of a call; in a piece, of its queries, over all blocks so far.
          positions: int [B, T] or [T], as of a call; None for start, start + 1, ...
          max_step: the most tokens that a step will add, see `KVCache.empty`; of later pieces, that of their cache.
          cache: that of the piece before; None for the first one.
          start: an int, the tokens before the piece: those of the pieces before.
          total: an int, the tokens of all pieces; None for start + T. Only ``dense_below`` of a scorer asks for it.

        Returns:
          (out [B, T, out_features] as of a call, the cache). The output of padding means nothing. In a piece, a
          sequence that has ended keeps its cache as it is.

        Raises:
          ValueError: as a call's, inputs that are not three-dimensional, lengths (outside of jit) that are not in
            0..start + T, a pattern that is not causal, and a start or total that does not fit, or the cache of
            another layer.
          TypeError: as a call's, or a cache that is none.
          NotImplementedError: a scorer, or a selection in a piece, where the pattern's cache does not keep all keys,
            see `KVCache.attend`.

        Example:
          >>> import jax, jax.numpy as jnp, sparse_layers as sl
          >>> from flax import nnx
          >>> layer = sl.SparseSelfAttention(2, 8, pattern=sl.Causal() & sl.Window(9), seq_len=64, rngs=nnx.Rngs(0))
          >>> x, cache = jax.random.normal(jax.random.key(0), (1, 48, 8)), None
          >>> for start in range(0, 48, 16):
          ...     out, cache = layer.prefill(x[:, start : start + 16], cache=cache, start=start)
          >>> bool(jnp.allclose(out, layer(x)[:, 32:], atol=1e-5))
          True
        """
        check_inputs({"inputs": inputs}, [self.in_features], self.lengths, None, selection, positions=positions)
        start, length = checked("start", start, Natural), inputs.shape[-2]
        total = start + length if total is None else checked("total", total, Positive)
        if not start + length <= total <= self.seq_len:
            raise ValueError(
                f"start={start} and T={length} tokens must end by total={total}, and that by seq_len={self.seq_len}"
            )
        inputs, lengths = checked_prompts(inputs, lengths, start)
        if start or cache is not None:
            check_cache(cache, KVCache, self._ours | {"batch": len(inputs)})
            if cache is not None and max_step not in (1, cache.max_step):
                raise ValueError(f"max_step must be that of the cache, {cache.max_step}, got {max_step}")
            if not start:
                raise ValueError("start must be the number of tokens before the piece where a cache is given, got 0")
        if positions is None and start:
            positions = start + jnp.arange(length)
        query, key, value = self._heads(inputs, positions)
        index = self._index(inputs)
        if index is not None:
            index = self.attention_fn.apply_rope_to_index(index, self.dtype, positions)
        before = cache or KVCache.empty(
            self.attention_fn.fn.masks,
            self.seq_len,
            selection=self.attention_fn.fn.selection,
            batch=inputs.shape[0],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=key.dtype,
            index_size=None if index is None else index.key.shape[-1],
            max_step=max_step,
            implementation="xla" if self.attention_fn.fn.implementation in ("xla", "reference") else None,
        )
        after = before.filled(key, value, lengths, index_key=None if index is None else index.key, start=start)
        fn, operands = self.attention_fn.fn, {"sinks": self._sinks, "selection": selection, "index": index}
        if length == total:
            out = fn.attend(query, key, value, **operands)
        else:
            # Attention reads the cache that is returned: without a barrier XLA would fill a second one for it.
            after = jax.lax.optimization_barrier(after)
            out = fn.attend_chunk((before, after), query, key, value, start, total, **operands)
        # The cache is filled now: XLA may do that at the end of a program, and keep the keys of all layers until then.
        out, after = jax.lax.optimization_barrier((out, after))
        return self.out(out), after

    @strict_kwargs
    def decode_step(
        self,
        inputs: jax.Array,
        cache: KVCache,
        position: jax.Array,
        *,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Applies attention to one more token of each sequence, or several, at the cost of the pattern's row.

        Args:
          inputs: [B, F], or [B, S, F] with S at most the max_step of `prefill`.
          cache: of `prefill` or an earlier step.
          position: int [B], the position of each token, or of the first of S: the number of tokens before it. To take
            tokens back, go on at an earlier one, see `KVCache.written`.
          selection: the key blocks that the tokens look at, a `Selection` of ids [B, 1, G, k], or [B, S, G, k], see
            `KVCache.attend`.
          positions: int [B], or [B, S] or [S], by which `Rope` turns the tokens, as of a call; None for their places
            from ``position`` on.

        Returns:
          (out [B, out_features] or [B, S, out_features], the new cache).

        Raises:
          ValueError: shapes that do not fit, positions (outside of jit) that are not below seq_len, or the cache of
            a layer with another pattern, length or number of heads.
          TypeError: inputs that are no array, or a cache or selection that is none.
          NotImplementedError: a selection where the pattern's cache does not keep all keys, see `KVCache.attend`.
        """
        fn = self.attention_fn.fn
        check_step(inputs, self.in_features, cache, KVCache, self._ours)
        if positions is not None:
            check_positions(positions, inputs.shape[:-1])
        tokens = inputs[:, None] if inputs.ndim == 2 else inputs
        position = checked_positions(position, len(tokens), self.seq_len, tokens.shape[1])
        if positions is None:
            positions = position[:, None] + jnp.arange(tokens.shape[1])[None]
        elif inputs.ndim == 2:
            positions = positions[:, None]

        def stepped(x: jax.Array) -> jax.Array:
            return x[:, 0] if inputs.ndim == 2 else x

        query, key, value = map(stepped, self._heads(tokens, positions))
        options = {"scale": fn.scale, "logits_soft_cap": fn.logits_soft_cap, "sinks": self._sinks}
        index = self._index(tokens)
        if index is not None:
            index = self.attention_fn.apply_rope_to_index(index, self.dtype, positions)
            options["index"] = stepped(index.query), stepped(index.key)
        out, cache = cache.step(query, key, value, position, selection=selection, **options)
        return stepped(self.out(out.reshape(*tokens.shape[:2], *out.shape[-2:]))), cache

    @property
    def _ours(self) -> dict[str, Any]:
        """What a cache of this layer says."""
        fn, names = self.attention_fn.fn, ("seq_len", "num_heads", "num_kv_heads")
        return {"masks": fn.masks, "selection": fn.selection} | {name: getattr(self, name) for name in names}

    def _index(self, inputs: jax.Array, losses: list[jax.Array] | None = None) -> Index | None:
        """What a scorer scores that has projections of its own; its loss changes these alone."""
        if self.index_query is None or self.index_key is None:
            return None
        inputs = jax.lax.stop_gradient(inputs)
        return Index(self.index_query(inputs), self.index_key(inputs), losses)

    def _heads(self, inputs, positions=None):
        """Query, key and value of tokens [B, T, F], as attention takes them."""
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        return self.attention_fn.apply_rope(query, key, value, self.dtype, positions)
