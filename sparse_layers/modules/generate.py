"""`generate`: samples from a `SparseTransformer` or another `Decoder`, a batch of prompts at once."""

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
from .settings import check_array, check_settings


@strict_kwargs
def generate(
    model: Decoder,
    prompts: jax.Array | np.ndarray | Sequence[Sequence[int] | np.ndarray | jax.Array],
    num_tokens: int,
    *,
    lengths: jax.Array | np.ndarray | Sequence[int] | None = None,
    padding_side: str = "right",
    chunk: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | Collection[int] | None = None,
    key: jax.Array | None = None,
    on_tokens: Callable[[np.ndarray], object] | None = None,
) -> jax.Array:
    """Goes on from prompts, token by token; each token costs what the patterns' rows cost.

    The prompts are read at once by the sparse kernels, whose keys and values go to a `KVCache` for each layer. Compiled
    once for a kind of model, a shape of prompts, a number of tokens, ``chunk``, ``top_k``, the number of stop tokens,
    and whether there is a temperature and a ``top_p``. Inside of jit, prompts, lengths and key may be traced, without
    ``on_tokens``.

    Args:
      model: a `SparseTransformer`, causal in all layers, or any other `Decoder`.
      prompts: int [B, P], or a sequence of B sequences of tokens, of any lengths from 1 on. Text is encoded first.
      num_tokens: how many to generate for each prompt, >= 1; the longest prompt and they must fit model.seq_len, where
        the model has it.
      lengths: int [B] in 1..P, where an array of prompts is padded; None for P, if padding_side is "right".
      padding_side: at which end it is, "right" or "left"; what is generated is the same.
      chunk: tokens of the prompts that are read at a time, >= 1, for less memory, where the model's ``prefill`` has an
        argument of this name: see `SparseTransformer.prefill`. None for all.
      temperature: 0 takes the likeliest token each time; else logits are divided by it and sampled from.
      top_k: sample from the k likeliest tokens only; of equally likely ones, from those of lower number.
      top_p: sample from the fewest likeliest tokens only whose probabilities, after the temperature and top_k, add up
        to at least so much (nucleus sampling, Holtzman et al. 2020).
      stop_token: 0..V-1, or several of these; each ends a sequence, which goes on with this very token in the result.
        Once all sequences have ended, no more steps are computed, or one with on_tokens.
      key: a `jax.random.key`, needed when temperature > 0.
      on_tokens: called with the tokens of each step, numpy int32 [B], as soon as they are known and until all sequences
        have ended; those that have ended before others go on as in the result. What it raises comes out of `generate`.

    Returns:
      int32 [B, num_tokens], the tokens after each prompt.

    Raises:
      ValueError: one of the above does not hold, a pattern is not causal, or what the model's methods return is not as
        `Decoder` says; on_tokens inside of jit.
      TypeError: the model is no `Decoder`, one of its methods returns no pair, prompts are text or no array, or
        on_tokens cannot be called.

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
    _check_chunk(model, chunk)
    if isinstance(prompts, Sequence):
        padding_side = "right"  # they are padded here
    elif padding_side == "left" and lengths is None:
        raise ValueError("lengths must say how many tokens each prompt has where padding_side='left', got None")
    told = not isinstance(lengths, jax.core.Tracer)  # which tokens are padding, and may be anything
    tokens, lengths, known = _prompts(prompts, lengths)
    longest, seq_len = int(known.max()), getattr(model, "seq_len", None)
    if seq_len is not None and longest + num_tokens > seq_len:
        raise ValueError(
            f"prompts of up to {longest} tokens and num_tokens={num_tokens} exceed the model's seq_len={seq_len}"
        )
    unrolled = getattr(model, "unrolled", None)
    if on_tokens is not None and unrolled is not None:
        model = unrolled()  # once, and not in each step
    graph, arrays = split(model)
    vocab_size = _vocab_size(graph, chunk, arrays, _on_device(tokens), lengths)
    # As given: cut off to 32 bits, a wrong token could become a right one.
    if told:
        _check_tokens(tokens, known, vocab_size, padding_side)
    tokens = _on_device(tokens)
    if top_k is not None:
        checked("top_k", top_k, Annotated[int, 1, vocab_size])
    stops = _stops(stop_token, vocab_size)
    check_settings(temperature=temperature, top_p=top_p)
    if temperature > 0 and key is None:
        raise ValueError(f"key must be a jax.random.key when temperature={temperature} > 0, got None")
    if temperature > 0:
        check_settings(key=key)
    sampling = None if temperature == 0 else {"key": key, "temperature": np.float32(temperature)}
    if sampling and top_p is not None:
        sampling["top_p"] = np.float32(top_p)
    sampling = _on_device(sampling)
    if padding_side == "left":
        tokens = _to_the_left(tokens, lengths)
    how = _How(graph, chunk, vocab_size, int(num_tokens), top_k if sampling else None)
    if on_tokens is None:
        return _generate(how, arrays, tokens, lengths, _on_device(stops), sampling)
    return _streamed(how, arrays, tokens, lengths, stops, sampling, on_tokens)


def _on_device(values: Any) -> Any:
    """Arrays of numpy in a tree as JAX's, put on the device explicitly, which `jax.transfer_guard` allows."""
    return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else x, values)


def _check_chunk(model: Decoder, chunk: Any) -> None:
    if chunk is None:
        return
    checked("chunk", chunk, Positive)
    taken = inspect.signature(model.prefill).parameters
    if "chunk" not in taken and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        raise ValueError(f"chunk must be None for a model whose prefill has no argument chunk, got {chunk}")


def _prompts(prompts: Any, lengths: Any) -> tuple[jax.Array | np.ndarray, jax.Array, np.ndarray]:
    """Prompts as an array [B, P] of the type that was given, their lengths, and these as far as they are known."""
    texts = prompts if isinstance(prompts, list | tuple) else [prompts]
    if any(isinstance(text, str | bytes) for text in texts):
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
    known = np.asarray(lengths)
    if known.min() < 1:
        raise ValueError(f"lengths must be >= 1, got {known}")
    return tokens, count, known


def _check_tokens(tokens: jax.Array | np.ndarray, lengths: np.ndarray, vocab_size: int, padding_side: str) -> None:
    if not isinstance(tokens, jax.core.Tracer):
        places = np.arange(tokens.shape[1])[:: 1 if padding_side == "right" else -1]
        read = np.asarray(tokens)[places < lengths[:, None]]
        if read.min() < 0 or read.max() >= vocab_size:
            raise ValueError(f"prompts must hold tokens in 0..{vocab_size - 1}, got {read.min()} to {read.max()}")


def _stops(stop_token: Any, vocab_size: int) -> np.ndarray | None:
    """The stop tokens, int32 [n], or None for none."""
    one = isinstance(stop_token, str | bytes) or getattr(stop_token, "ndim", 1) == 0  # an array may be a number, too
    several = isinstance(stop_token, Collection) and not one
    given = list(stop_token) if several else [] if stop_token is None else [stop_token]
    stops = [checked("stop_token", token, Annotated[int, 0, vocab_size - 1]) for token in given]
    return np.array(stops, np.int32) if stops else None


@jax.jit
def _to_the_left(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Prompts that are padded at their beginning, padded at their end."""
    return jax.vmap(jnp.roll)(tokens, lengths)


def _vocab_size(graph: Hashable, chunk: int | None, arrays: list[Any], tokens: jax.Array, lengths: jax.Array) -> int:
    """Number of logits, by a trace that the program then shares."""
    return _checked("prefill", _prefill.eval_shape(graph, chunk, arrays, tokens, lengths), len(tokens))[0].shape[1]


def _checked(method: str, made: Any, batch: int, vocab_size: int | None = None, caches: Any = None) -> tuple[Any, Any]:
    """What a method of the model has returned, (logits, caches), if these are what they must be; see `Decoder`.

    ``vocab_size`` and ``caches`` are those of `prefill`, for `decode_step`.
    """
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"model: {method} must return (logits, caches), got {type(made).__name__}: {one_line(made)}")
    shape, dtype = jnp.shape(made[0]), jnp.result_type(made[0])
    right = len(shape) == 2 and shape[0] == batch and vocab_size in (None, shape[1])
    if not right or not jnp.issubdtype(dtype, jnp.floating):
        rule = f"logits [{batch}, {vocab_size or 'V'}], floats"
        raise ValueError(f"model: {method} must return {rule}, got {dtype} of shape {shape}")
    if vocab_size is not None:
        for before, after in zip(_looks(caches), _looks(made[1]), strict=False):
            if before != after:
                raise ValueError(f"model: {method} must return caches like those it takes, {before}, got {after}")
    return made


def _looks(caches: Any) -> list[str]:
    """The structure of caches, then dtype and shape of each array in it."""
    arrays = jax.tree_util.tree_leaves_with_path(caches)
    named = [f"caches{jax.tree_util.keystr(path)}: {jax.typeof(x).str_short()}" for path, x in arrays]
    return [str(jax.tree.structure(caches)), *named]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(graph, chunk, arrays, tokens, lengths):
    return merge(graph, arrays).prefill(tokens, lengths, **({} if chunk is None else {"chunk": chunk}))


class _How(NamedTuple):
    """What programs are compiled for, beside shapes."""

    graph: Hashable  # of the model, without its arrays
    chunk: int | None
    vocab_size: int
    num_tokens: int
    top_k: int | None


@functools.partial(jax.jit, static_argnums=0)
def _generate(how, arrays, tokens, lengths, stops, sampling):
    """``sampling``: the arguments of `sample` but top_k, or None for the likeliest tokens."""
    token, caches, keys = _first(how, arrays, tokens, lengths, sampling)
    model = merge(how.graph, arrays)
    if hasattr(model, "unrolled"):
        model = model.unrolled()

    def goes_on(state):
        count, token, *_ = state
        if stops is None:  # so that the compiler knows how often, and a GPU does not wait for the host in each step
            return count < how.num_tokens
        return (count < how.num_tokens) & ~_ended(token, stops).all()

    def step(state):
        count, token, caches, made = state
        token, caches = _next(how, model, count, token, caches, lengths, stops, sampling, keys)
        return count + 1, token, caches, made.at[count].set(token)

    made = jnp.zeros((how.num_tokens, len(tokens)), jnp.int32).at[0].set(token)
    count, token, _, made = jax.lax.while_loop(goes_on, step, (1, token, caches, made))
    return jnp.where(jnp.arange(how.num_tokens)[:, None] < count, made, token[None]).T


def _streamed(how, arrays, tokens, lengths, stops, sampling, on_tokens):
    """`_generate` by a loop of Python, which hands over the tokens of each step."""
    # An ordered callback of JAX's within the compiled loop would work under jit, too. But each function would have a
    # program compiled, for one device only; what it raises would come out as an error of JAX's, after the last step,
    # and so would Ctrl-C.
    token, caches, keys = _first(how, arrays, tokens, lengths, sampling)
    if isinstance(token, jax.core.Tracer):
        raise ValueError(f"on_tokens must be None inside of jit, which computes nothing yet, got {one_line(on_tokens)}")
    step, made, stops_on_device = _step(how), [], _on_device(stops)
    for count in range(1, how.num_tokens + 1):
        now = token
        if count < how.num_tokens:  # the device computes the next step while the host deals with this one
            number = _on_device(np.int32(count))
            token, caches = step(arrays, number, token, caches, lengths, stops_on_device, sampling, keys)
        made.append(jax.device_get(now))
        on_tokens(made[-1])
        if stops is not None and np.isin(made[-1], stops).all():
            break
    return jax.device_put(np.pad(made, ((0, how.num_tokens - len(made)), (0, 0)), mode="edge").T)


@functools.partial(jax.jit, static_argnums=0)
def _first(how, arrays, tokens, lengths, sampling):
    """(the first token of each sequence; the caches; the keys of all steps)."""
    logits, caches = _prefill(how.graph, how.chunk, arrays, tokens, lengths)
    keys = None if sampling is None else jax.random.split(sampling["key"], how.num_tokens)
    return _chosen(how, logits, 0, sampling, keys), caches, keys


@bounded_cache(extra_bytes=PROGRAM_BYTES)
def _step(how):
    """`_next` compiled: looked up once, since a model's graph takes as long to hash as a step to compute."""

    @functools.partial(jax.jit, donate_argnames="caches")
    def step(arrays, count, token, caches, lengths, stops, sampling, keys):
        return _next(how, merge(how.graph, arrays), count, token, caches, lengths, stops, sampling, keys)

    return step


def _next(how, model, count, token, caches, lengths, stops, sampling, keys):
    """(the tokens after ``token``, which are the ``count``-th ones; the caches)."""
    made = model.decode_step(token, caches, lengths + count - 1)
    logits, caches = _checked("decode_step", made, len(token), how.vocab_size, caches)
    new = _chosen(how, logits, count, sampling, keys)
    return new if stops is None else jnp.where(_ended(token, stops), token, new), caches


def _chosen(how, logits, count, sampling, keys):
    if sampling is None:
        return logits.argmax(-1).astype(jnp.int32)
    return sample(logits, **{**sampling, "key": keys[count]}, top_k=how.top_k).astype(jnp.int32)


def _ended(token, stops):
    return (token[:, None] == stops[None]).any(-1)


def sample(
    logits: jax.Array, key: jax.Array, temperature: Any, top_k: int | None = None, top_p: Any = None
) -> jax.Array:
    """Samples tokens from logits [..., V]: int [...]; see `generate` for the other arguments, temperature > 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> sample(jnp.array([0.0, 3.0, 1.0]), jax.random.key(0), 1.0, top_k=1).item()
      1
    """
    # The likeliest becomes 0, so that no temperature makes it infinite.
    logits = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, 1e-30)
    if top_k is None and top_p is None:
        return jax.random.categorical(key, logits, axis=-1)
    # In order of likelihood, equal ones by their number: exactly so many are left as were asked for.
    ordered, tokens = jax.lax.top_k(logits, logits.shape[-1] if top_k is None else top_k)
    if top_p is not None:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # A token stays if those before it do not add up to top_p yet; the first one always does.
        ordered = jnp.where(jnp.cumsum(probabilities, axis=-1) - probabilities < top_p, ordered, -jnp.inf)
    rank = jax.random.categorical(key, ordered, axis=-1)
    return jnp.take_along_axis(tokens, rank[..., None], axis=-1)[..., 0]
