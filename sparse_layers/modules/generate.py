"""`generate`: samples from a `SparseTransformer`, a batch of prompts at once."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..ops.decoding.cache import checked_lengths
from .transformer import SparseTransformer


def generate(
    model: SparseTransformer,
    prompts: Any,
    num_tokens: int,
    *,
    lengths: Any = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Goes on from prompts, token by token; each token costs what the patterns' rows cost.

    The prompts are read at once by the sparse kernels, whose keys and values go to a `KVCache` for each layer. Compiled
    once for a shape of prompts, a number of tokens, ``top_k``, and whether there is a temperature and a ``top_p``.
    Inside of jit, prompts, lengths and key may be traced.

    Args:
      model: causal in all layers.
      prompts: int [B, P], or a sequence of B sequences of tokens, of any lengths from 1 on.
      num_tokens: how many to generate for each prompt, >= 1; the longest prompt and they must fit model.seq_len.
      lengths: int [B] in 1..P, where an array of prompts is padded at its end.
      temperature: 0 takes the likeliest token each time; else logits are divided by it and sampled from.
      top_k: sample from the k likeliest tokens only; of equally likely ones, from those of lower number.
      top_p: sample from the fewest likeliest tokens only whose probabilities, after the temperature and top_k, add up
        to at least so much (nucleus sampling, Holtzman et al. 2020).
      stop_token: 0..V-1, ends a sequence; what follows it in the result are stop tokens.
      key: a `jax.random.key`, needed when temperature > 0.

    Returns:
      int32 [B, num_tokens], the tokens after each prompt.

    Raises:
      ValueError: one of the above does not hold, or a pattern is not causal.

    Example:
      >>> import sparse_layers as sl
      >>> from flax import nnx
      >>> model = sl.SparseTransformer(256, 2, 8, 2, patterns="local", seq_len=64, rngs=nnx.Rngs(0))
      >>> sl.generate(model, [list(b"def f("), list(b"x")], 5).shape
      (2, 5)
    """
    vocab_size = model.token_embedding.num_embeddings
    tokens, lengths, longest = _prompts(prompts, lengths, vocab_size)
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer) or num_tokens < 1:
        raise ValueError(f"num_tokens must be an integer >= 1, got {num_tokens!r}")
    if longest + num_tokens > model.seq_len:
        raise ValueError(
            f"prompts of up to {longest} tokens and num_tokens={num_tokens} exceed the model's seq_len={model.seq_len}"
        )
    for name, value, least in (("top_k", top_k, 1), ("stop_token", stop_token, 0)):
        most = vocab_size - 1 + least
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (whole and least <= value <= most):
            raise ValueError(f"{name} must be None or an integer in {least}..{most}, got {value!r}")
    if not isinstance(temperature, int | float | np.number) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a number >= 0 and finite, got {temperature!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be None or in (0, 1], got {top_p!r}")
    if temperature > 0 and not isinstance(key, jax.Array):
        raise ValueError(f"key must be a jax.random.key when temperature={temperature} > 0, got {key!r}")
    graph, state = nnx.split(model)
    how = None if temperature == 0 else {"key": key, "temperature": np.float32(temperature)}
    if how and top_p is not None:
        how["top_p"] = np.float32(top_p)
    stop = np.int32(-1 if stop_token is None else stop_token)
    return _generate(graph, int(num_tokens), top_k if how else None, state, tokens, lengths, stop, how)


def _prompts(prompts: Any, lengths: Any, vocab_size: int) -> tuple[jax.Array, jax.Array, int]:
    """Prompts as an array [B, P], their lengths, and the length of the longest as far as it is known."""
    if isinstance(prompts, Sequence):
        if lengths is not None:
            raise ValueError("lengths must be None for a sequence of prompts: they have lengths of their own")
        rows = [np.asarray(prompt) for prompt in prompts]
        if not rows or any(row.ndim != 1 or row.size == 0 for row in rows):
            raise ValueError(
                f"prompts must be one or more sequences of at least one token, got shapes {[row.shape for row in rows]}"
            )
        lengths = np.array([row.size for row in rows])
        padded = np.zeros((len(rows), lengths.max()), np.result_type(*rows))
        for row, target in zip(rows, padded, strict=True):
            target[: row.size] = row
        prompts = padded
    tokens = prompts if isinstance(prompts, jax.Array) else np.asarray(prompts)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"prompts must be integers of shape [B, P], P >= 1, got {tokens.dtype} of shape {tokens.shape}"
        )
    count = checked_lengths(lengths, *tokens.shape)
    if isinstance(lengths, jax.core.Tracer):
        return jnp.asarray(tokens), count, tokens.shape[1]
    known = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    if known.min() < 1:
        raise ValueError(f"lengths must be >= 1, got {known}")
    if not isinstance(tokens, jax.core.Tracer):
        read = np.asarray(tokens)[np.arange(tokens.shape[1]) < known[:, None]]
        if read.min() < 0 or read.max() >= vocab_size:
            raise ValueError(f"prompts must hold tokens in 0..{vocab_size - 1}, got {read.min()} to {read.max()}")
    return jnp.asarray(tokens), count, int(known.max())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(graph, num_tokens, top_k, state, tokens, lengths, stop, how):
    """``how`` to sample: the arguments of `sample` but top_k, or None for the likeliest tokens."""
    model = nnx.merge(graph, state)
    logits, caches = model.prefill(tokens, lengths)
    # Layers that are scanned over are taken apart once, and not in each step.
    blocks = nnx.List(model.layers)
    model.blocks, model.scan_layers = blocks, False
    keys = None if how is None else jax.random.split(how["key"], num_tokens)

    def choose(logits, done, key):
        token = logits.argmax(-1) if how is None else sample(logits, **{**how, "key": key}, top_k=top_k)
        token = jnp.where(done, stop, token).astype(jnp.int32)
        return token, done | (token == stop)

    def step(carry, key):
        token, caches, position, done = carry
        logits, caches = model.decode_step(token, caches, position)
        token, done = choose(logits, done, key)
        return (token, caches, position + 1, done), token

    first, done = choose(logits, jnp.zeros(len(tokens), bool), None if keys is None else keys[0])
    rest = None if keys is None else keys[1:]
    _, more = jax.lax.scan(step, (first, caches, lengths, done), rest, length=num_tokens - 1)
    return jnp.concatenate([first[None], more]).T


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
