"""`generate`: decoding with a `SparseTransformer` or another `Decoder`, for a batch of prompts."""

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Positive, checked, strict_kwargs
from ..arguments.foreign import one_line
from ..masks.bounded_cache import PROGRAM_BYTES, bounded_cache
from ..ops.decoding.checks import checked_lengths
from .decoder import Decoder, merge, split
from .settings import check_array, check_ids, check_settings


@strict_kwargs
def generate(
    model: Decoder,
    prompts: jax.Array | np.ndarray | Sequence[Sequence[int] | np.ndarray | jax.Array],
    num_tokens: int,
    *,
    lengths: jax.Array | np.ndarray | Sequence[int] | None = None,
    padding_side: str = "right",
    chunk: int | None = None,
    order_ids: jax.Array | np.ndarray | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | Collection[int] | None = None,
    key: jax.Array | None = None,
    on_tokens: Callable[[np.ndarray], object] | None = None,
) -> jax.Array:
    """Generates tokens after prompts by decoding; each token costs one row of the patterns.

    The sparse kernels read the prompts, and a `KVCache` of each layer keeps their keys and values. It is compiled
    once for each model type, shape of prompts, number of tokens, ``chunk``, ``top_k``, number of stop tokens, and
    use of a temperature and a ``top_p``. Inside of jit, prompts, lengths and key may be traced, without
    ``on_tokens``.

    Args:
      model: a `SparseTransformer`, causal in all layers unless there are order_ids, or any other `Decoder`.
      prompts: int [B, P], or a sequence of B token sequences of any length >= 1. Text must be encoded first.
      num_tokens: number of tokens to generate for each prompt, >= 1; model.seq_len, if the model has one, limits the
        longest prompt plus num_tokens.
      lengths: int [B] in 1..P, the tokens of each prompt in a padded array; None for P, if padding_side is "right".
      padding_side: the side of the padding, "right" or "left"; the result is the same.
      chunk: number of prompt tokens to read at a time, >= 1, for less memory, if the model's ``prefill`` has this
        argument, see `SparseTransformer.prefill`. None for all.
      order_ids: int [B, P], what the tokens of prompts see, if the model's ``prefill`` has this argument, see
        `SparseTransformer.prefill`: ``prefix_order(lengths, P)`` for prompts that see themselves whole. Padding has
        any ids, on the same side. None for causal prompts.
      temperature: 0 takes the likeliest token; otherwise logits are divided by it and sampled.
      top_k: sample from the k likeliest tokens; among equally likely ones, lower token ids come first.
      top_p: sample from the smallest set of likeliest tokens whose probabilities, after the temperature and top_k, add
        up to at least top_p (nucleus sampling, Holtzman et al. 2020).
      stop_token: a token in 0..V-1, or several; each ends a sequence, whose remaining results repeat it. Once all
        sequences have ended, no more steps are computed, or one with on_tokens.
      key: a `jax.random.key`, needed when temperature > 0.
      on_tokens: called with the tokens of each step, numpy int32 [B], as soon as they are known, until all sequences
        have ended. Sequences that ended earlier repeat their stop token. Its exceptions are raised by `generate`.

    Returns:
      int32 [B, num_tokens], the tokens after each prompt.

    Raises:
      ValueError: an argument outside of its range, a pattern that is not causal, a method of the model that breaks the
        rules of `Decoder`, or on_tokens inside of jit.
      TypeError: a model that is not a `Decoder`, a method of it that does not return a pair, prompts that are text or
        not an array, or an on_tokens that is not callable.

    Example:
      >>> import sparse_layers as sl
      >>> from flax import nnx
      >>> model = sl.SparseTransformer(256, 2, 8, 2, patterns="local", seq_len=64, rngs=nnx.Rngs(0))
      >>> sl.generate(model, [list(b"def f("), list(b"x")], 5).shape
      (2, 5)
      >>> sl.generate(model, [list(b"x")], 3, on_tokens=lambda tokens: print(tokens)).tolist()
      [0]
      [0]
      [0]
      [[0, 0, 0]]
    """
    methods = (getattr(model, name, None) for name in ("prefill", "decode_step"))
    if isinstance(model, type) or not all(map(callable, methods)):
        raise TypeError(f"model must have prefill and decode_step (see sparse_layers.Decoder), got {one_line(model)}")
    check_settings(num_tokens=num_tokens, padding_side=padding_side, on_tokens=on_tokens)
    if chunk is not None:
        checked("chunk", chunk, Positive)
    for name, value in (("chunk", chunk), ("order_ids", order_ids)):
        _check_has_argument(model, name, value)
    if isinstance(prompts, Sequence):
        padding_side = "right"  # `_parse_prompts` pads them
    elif padding_side == "left" and lengths is None:
        raise ValueError("lengths must say how many tokens each prompt has where padding_side='left', got None")
    has_known_lengths = not isinstance(lengths, jax.core.Tracer)
    tokens, lengths, max_lengths = _parse_prompts(prompts, lengths)
    longest, seq_len = int(max_lengths.max()), getattr(model, "seq_len", None)
    if seq_len is not None and longest + num_tokens > seq_len:
        raise ValueError(
            f"prompts of up to {longest} tokens and num_tokens={num_tokens} exceed the model's seq_len={seq_len}"
        )
    if order_ids is not None:  # in their own dtype, as tokens below
        check_ids("order_ids", order_ids, [tokens.shape])
    unrolled = getattr(model, "unrolled", None)
    if on_tokens is not None and unrolled is not None:
        model = unrolled()  # here, as each step would do it again
    static_model, arrays = split(model)
    ids: Any = _on_device(order_ids)
    vocab_size = _vocab_size(static_model, chunk, arrays, _on_device(tokens), lengths, ids)
    # Checked in their own dtype: a wrong token could be a valid one in 32 bits.
    if has_known_lengths:
        _check_tokens(tokens, max_lengths, vocab_size, padding_side)
    tokens = _on_device(tokens)
    if top_k is not None:
        checked("top_k", top_k, Annotated[int, 1, vocab_size])
    stops = _stop_tokens(stop_token, vocab_size)
    sampling = _on_device(_sampling_options(temperature, top_p, key))
    if padding_side == "left":
        tokens = _pad_right(tokens, lengths)
        ids = None if ids is None else _pad_right(ids, lengths)
    static_args = _StaticArgs(static_model, chunk, vocab_size, int(num_tokens), top_k if sampling else None)
    inputs = _Inputs(arrays, tokens, lengths, ids, _on_device(stops), sampling)
    if on_tokens is None:
        return _generate(static_args, inputs)
    return _generate_streaming(static_args, inputs, stops, on_tokens)


def _sampling_options(temperature: float, top_p: float | None, key: jax.Array | None) -> dict[str, Any] | None:
    """Returns the arguments of `sample` except top_k, None for the likeliest tokens."""
    check_settings(temperature=temperature, top_p=top_p)
    if temperature == 0:
        return None
    if key is None:
        raise ValueError(f"key must be a jax.random.key when temperature={temperature} > 0, got None")
    check_settings(key=key)
    options = {"key": key, "temperature": np.float32(temperature)}
    return options if top_p is None else options | {"top_p": np.float32(top_p)}


def _on_device(values: Any) -> Any:
    """Returns a tree with its numpy arrays on the device, by the explicit transfer that `jax.transfer_guard` allows."""
    return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else x, values)


def _check_has_argument(model: Decoder, name: str, value: Any) -> None:
    """Refuses an argument of prefill that the model's own does not have."""
    if value is None:
        return
    parameters = inspect.signature(model.prefill).parameters
    if name not in parameters and not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        raise ValueError(f"{name} must be None for a model whose prefill has no argument {name}, got {one_line(value)}")


def _parse_prompts(prompts: Any, lengths: Any) -> tuple[jax.Array | np.ndarray, jax.Array, np.ndarray]:
    """Returns prompts [B, P] in their own dtype, lengths, and numpy lengths (P where lengths are unknown)."""
    if any(isinstance(x, str | bytes) for x in (prompts if isinstance(prompts, list | tuple) else [prompts])):
        raise TypeError(
            f"prompts must be tokens, got the text {prompts!r}: encode it, for a model of bytes as [list(b'hello')]"
        )
    if isinstance(prompts, Sequence):
        if lengths is not None:
            raise ValueError("lengths must be None for a sequence of prompts: they have lengths of their own")
        rows = [np.asarray(prompt) for prompt in prompts]
        if not rows or any(row.ndim != 1 or row.size == 0 for row in rows):
            raise ValueError(
                "prompts must be one or more sequences of at least one token, one prompt too is a sequence in a "
                f"sequence, got shapes {[row.shape for row in rows]}"
            )
        lengths = np.array([row.size for row in rows])
        padded = np.zeros((len(rows), lengths.max()), np.result_type(*rows))
        for row, target in zip(rows, padded, strict=True):
            target[: row.size] = row
        prompts = padded
    check_array("prompts", prompts, "[B, P] of integers, or a sequence of prompts")
    tokens = prompts if isinstance(prompts, jax.Array) else np.asarray(prompts)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"prompts must be integers of shape [B, P], P >= 1, got {tokens.dtype} of shape {tokens.shape}"
        )
    count = checked_lengths(lengths, *tokens.shape)
    if lengths is None or isinstance(lengths, jax.core.Tracer):
        return tokens, count, np.full(len(tokens), tokens.shape[1])
    known_lengths = np.asarray(lengths)
    if known_lengths.min() < 1:
        raise ValueError(f"lengths must be >= 1, got {known_lengths}")
    return tokens, count, known_lengths


def _check_tokens(tokens: jax.Array | np.ndarray, lengths: np.ndarray, vocab_size: int, padding_side: str) -> None:
    if not isinstance(tokens, jax.core.Tracer):
        positions = np.arange(tokens.shape[1])[:: 1 if padding_side == "right" else -1]
        valid = np.asarray(tokens)[positions < lengths[:, None]]
        if valid.min() < 0 or valid.max() >= vocab_size:
            raise ValueError(f"prompts must hold tokens in 0..{vocab_size - 1}, got {valid.min()} to {valid.max()}")


def _stop_tokens(stop_token: Any, vocab_size: int) -> np.ndarray | None:
    """Returns the stop tokens, int32 [n], or None without any."""
    is_scalar = isinstance(stop_token, str | bytes) or getattr(stop_token, "ndim", 1) == 0  # an array may be one
    is_list = isinstance(stop_token, Collection) and not is_scalar
    tokens = list(stop_token) if is_list else [] if stop_token is None else [stop_token]
    stops = [checked("stop_token", token, Annotated[int, 0, vocab_size - 1]) for token in tokens]
    return np.array(stops, np.int32) if stops else None


@jax.jit
def _pad_right(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Moves the padding of left-padded prompts to the right."""
    return jax.vmap(jnp.roll)(tokens, lengths)


def _vocab_size(
    static_model: Hashable,
    chunk: int | None,
    arrays: list[Any],
    tokens: jax.Array,
    lengths: jax.Array,
    order_ids: jax.Array | None,
) -> int:
    """Returns the number of logits, by an abstract trace that the program then reuses."""
    result = _prefill.eval_shape(static_model, chunk, arrays, tokens, lengths, order_ids)
    return _check_result("prefill", result, len(tokens))[0].shape[1]


def _check_result(
    method: str, result: Any, batch: int, vocab_size: int | None = None, caches: Any = None
) -> tuple[Any, Any]:
    """Returns the (logits, caches) of a model's method if they follow the rules of `Decoder`.

    For `decode_step`, ``vocab_size`` and ``caches`` are those of `prefill`.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"model: {method} must return (logits, caches), got {type(result).__name__}: {one_line(result)}"
        )
    shape, dtype = jnp.shape(result[0]), jnp.result_type(result[0])
    is_valid = len(shape) == 2 and shape[0] == batch and vocab_size in (None, shape[1])
    if not is_valid or not jnp.issubdtype(dtype, jnp.floating):
        rule = f"logits [{batch}, {vocab_size or 'V'}], floats"
        raise ValueError(f"model: {method} must return {rule}, got {dtype} of shape {shape}")
    if vocab_size is not None:
        for before, after in zip(_array_types(caches), _array_types(result[1]), strict=False):
            if before != after:
                raise ValueError(f"model: {method} must return caches like those it takes, {before}, got {after}")
    return result


def _array_types(caches: Any) -> list[str]:
    """Returns the structure of caches, then dtype and shape of each array, as text."""
    arrays = jax.tree_util.tree_leaves_with_path(caches)
    named = [f"caches{jax.tree_util.keystr(path)}: {jax.typeof(x).str_short()}" for path, x in arrays]
    return [str(jax.tree.structure(caches)), *named]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(static_model, chunk, arrays, tokens, lengths, order_ids):
    options = {"chunk": chunk, "order_ids": order_ids}
    options = {name: value for name, value in options.items() if value is not None}
    return merge(static_model, arrays).prefill(tokens, lengths, **options)


class _StaticArgs(NamedTuple):
    """The static arguments of a program."""

    model: Hashable  # the static part of `split`
    chunk: int | None
    vocab_size: int
    num_tokens: int
    top_k: int | None


class _Inputs(NamedTuple):
    """The arrays of a program."""

    arrays: list[Any]  # those of the model, of `split`
    tokens: jax.Array  # [B, P]
    lengths: jax.Array  # [B]
    order_ids: jax.Array | None  # [B, P]
    stops: jax.Array | None  # stop tokens [n]
    sampling: dict[str, Any] | None  # of `_sampling_options`


@functools.partial(jax.jit, static_argnums=0)
def _generate(static, inputs):
    """Generates tokens in one program."""
    stops = inputs.stops
    token, caches, keys = _prefill_and_pick(static, inputs)
    model = merge(static.model, inputs.arrays)
    if hasattr(model, "unrolled"):
        model = model.unrolled()

    def is_running(state):
        count, token, *_ = state
        if stops is None:  # a fixed number of steps, so that a GPU does not wait for the host in each
            return count < static.num_tokens
        return (count < static.num_tokens) & ~_has_ended(token, stops).all()

    def step(state):
        count, token, caches, generated = state
        token, caches = _decode_and_pick(static, model, inputs, count, token, caches, keys)
        return count + 1, token, caches, generated.at[count].set(token)

    generated = jnp.zeros((static.num_tokens, len(token)), jnp.int32).at[0].set(token)
    count, token, _, generated = jax.lax.while_loop(is_running, step, (1, token, caches, generated))
    return jnp.where(jnp.arange(static.num_tokens)[:, None] < count, generated, token[None]).T


def _generate_streaming(static, inputs, stops, on_tokens):
    """Generates tokens in a Python loop, which passes the tokens of each step to ``on_tokens``."""
    # An ordered callback in the compiled loop would work under jit too. But each function would need a program of its
    # own, for one device only, and its exceptions, and Ctrl-C, would arrive as errors of JAX after the last step.
    token, caches, keys = _prefill_and_pick(static, inputs)
    if isinstance(token, jax.core.Tracer):
        raise ValueError(f"on_tokens must be None inside of jit, which computes nothing yet, got {one_line(on_tokens)}")
    step, generated = _compiled_step(static), []
    for count in range(1, static.num_tokens + 1):
        current = token
        if count < static.num_tokens:  # the device computes the next step while the host handles this one
            number = _on_device(np.int32(count))
            token, caches = step(inputs, number, token, caches, keys)
        generated.append(jax.device_get(current))
        on_tokens(generated[-1])
        if stops is not None and np.isin(generated[-1], stops).all():
            break
    return jax.device_put(np.pad(generated, ((0, static.num_tokens - len(generated)), (0, 0)), mode="edge").T)


@functools.partial(jax.jit, static_argnums=0)
def _prefill_and_pick(static, inputs):
    """Returns (the first token of each sequence; the caches; the random keys of all steps)."""
    arrays = inputs.arrays, inputs.tokens, inputs.lengths, inputs.order_ids
    logits, caches = _prefill(static.model, static.chunk, *arrays)
    keys = None if inputs.sampling is None else jax.random.split(inputs.sampling["key"], static.num_tokens)
    return _pick_token(static, logits, 0, inputs.sampling, keys), caches, keys


@bounded_cache(extra_bytes=PROGRAM_BYTES)
def _compiled_step(static):
    """Returns the compiled `_decode_and_pick`, so that one look-up, which hashes the model, serves all steps."""

    @functools.partial(jax.jit, donate_argnames="caches")
    def step(inputs, count, token, caches, keys):
        return _decode_and_pick(static, merge(static.model, inputs.arrays), inputs, count, token, caches, keys)

    return step


def _decode_and_pick(static, model, inputs, count, token, caches, keys):
    """Returns (the tokens after ``token``, number ``count`` of each sequence; the caches)."""
    result = model.decode_step(token, caches, inputs.lengths + count - 1)
    logits, caches = _check_result("decode_step", result, len(token), static.vocab_size, caches)
    next_token, stops = _pick_token(static, logits, count, inputs.sampling, keys), inputs.stops
    return next_token if stops is None else jnp.where(_has_ended(token, stops), token, next_token), caches


def _pick_token(static, logits, count, sampling, keys):
    if sampling is None:
        return logits.argmax(-1).astype(jnp.int32)
    return sample(logits, **{**sampling, "key": keys[count]}, top_k=static.top_k).astype(jnp.int32)


def _has_ended(token, stops):
    return (token[:, None] == stops[None]).any(-1)


def sample(
    logits: jax.Array, key: jax.Array, temperature: Any, top_k: int | None = None, top_p: Any = None
) -> jax.Array:
    """Samples tokens, int [...], from logits [..., V]; `generate` documents the other arguments, temperature > 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> sample(jnp.array([0.0, 3.0, 1.0]), jax.random.key(0), 1.0, top_k=1).item()
      1
    """
    # The largest logit becomes 0, so that no temperature makes it infinite.
    logits = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, 1e-30)
    if top_k is None and top_p is None:
        return jax.random.categorical(key, logits, axis=-1)
    # Sorted by likelihood, ties by token id, so that exactly top_k remain.
    ordered, tokens = jax.lax.top_k(logits, logits.shape[-1] if top_k is None else top_k)
    if top_p is not None:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # A token stays if those before it do not add up to top_p yet; the first one always does.
        ordered = jnp.where(jnp.cumsum(probabilities, axis=-1) - probabilities < top_p, ordered, -jnp.inf)
    rank = jax.random.categorical(key, ordered, axis=-1)
    return jnp.take_along_axis(tokens, rank[..., None], axis=-1)[..., 0]
