"""`generate`: samples from a `SparseTransformer`, a batch of prompts at once."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .attention import checked_lengths
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
    once for a shape of prompts, a number of tokens and ``top_k``.

    Args:
      model: causal in all layers.
      prompts: int [B, P], or a sequence of B sequences of tokens, of any lengths from 1 on.
      num_tokens: how many to generate for each prompt, >= 1; the longest prompt and they must fit model.seq_len.
      lengths: int [B] in 1..P, where an array of prompts is padded at its end.
      temperature: 0 takes the likeliest token each time; else logits are divided by it and sampled from.
      top_k: sample from the k likeliest tokens only.
      top_p: sample from the fewest likeliest tokens only whose probabilities, after the temperature and top_k, add up
        to at least so much (nucleus sampling, Holtzman et al. 2020).
      stop_token: ends a sequence; what follows it in the result are stop tokens.
      key: a `jax.random.key`, needed when temperature > 0.

    Returns:
      int32 [B, num_tokens], the tokens after each prompt.

    Raises:
      ValueError: one of the above does not hold, or a pattern is not causal.

    Example:
      >>> import sparse_layers as sl
      >>> from flax import nnx
      >>> model = sl.SparseTransformer(256, 8, 2, 2, patterns="local", seq_len=64, rngs=nnx.Rngs(0))
      >>> sl.generate(model, [list(b"def f("), list(b"x")], 5).shape
      (2, 5)
    """
    tokens, lengths = _prompts(prompts, lengths)
    vocab_size = model.token_embedding.num_embeddings
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer) or num_tokens < 1:
        raise ValueError(f"num_tokens must be an integer >= 1, got {num_tokens!r}")
    longest = tokens.shape[1] if isinstance(lengths, jax.core.Tracer) else int(np.max(lengths))
    if longest + num_tokens > model.seq_len:
        raise ValueError(
            f"prompts of up to {longest} tokens and num_tokens={num_tokens} exceed the model's seq_len={model.seq_len}"
        )
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be >= 0 and finite, got {temperature!r}")
    if top_k is not None and not (isinstance(top_k, int | np.integer) and 1 <= top_k <= vocab_size):
        raise ValueError(f"top_k must be None or an integer from 1 to the vocabulary's {vocab_size}, got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be None or in (0, 1], got {top_p!r}")
    if temperature > 0 and key is None:
        raise ValueError(f"key must be a jax.random.key when temperature > 0, got None with temperature={temperature}")
    graph, state = nnx.split(model)
    key = jax.random.key(0) if key is None else key
    stop = -1 if stop_token is None else stop_token
    greedy = temperature == 0
    settings = 1.0 if greedy else temperature, 1.0 if top_p is None else top_p, stop
    return _generate(graph, num_tokens, top_k, greedy, state, tokens, lengths, settings, key)


def _prompts(prompts: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """Prompts as an array [B, P], and their lengths."""
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
    tokens = jnp.asarray(prompts)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"prompts must be integers of shape [B, P], P >= 1, got {tokens.dtype} of shape {tokens.shape}"
        )
    if not isinstance(lengths, jax.core.Tracer | None) and np.min(lengths, initial=1) < 1:
        raise ValueError(f"lengths must be >= 1, got {lengths}")
    return tokens, checked_lengths(lengths, *tokens.shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(graph, num_tokens, top_k, greedy, state, tokens, lengths, settings, key):
    model = nnx.merge(graph, state)
    temperature, top_p, stop = settings
    logits, caches = model.prefill(tokens, lengths)
    # Layers that are scanned over are taken apart once, and not in each step.
    blocks = nnx.List(model.layers)
    model.blocks, model.scan_layers = blocks, False

    def step(carry, key):
        logits, caches, position, done = carry
        token = logits.argmax(-1) if greedy else sample(logits, key, temperature, top_k, top_p)
        token = jnp.where(done, stop, token).astype(jnp.int32)
        done = done | (token == stop)
        logits, caches = model.decode_step(token, caches, position)
        return (logits, caches, position + 1, done), token

    start = logits, caches, lengths, jnp.zeros(len(tokens), bool)
    return jax.lax.scan(step, start, jax.random.split(key, num_tokens))[1].T


def sample(
    logits: jax.Array, key: jax.Array, temperature: Any, top_k: int | None = None, top_p: Any = 1.0
) -> jax.Array:
    """Samples tokens from logits [..., V]: int [...]; see `generate` for the other arguments, temperature > 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> sample(jnp.array([0.0, 3.0, 1.0]), jax.random.key(0), 1.0, top_k=1).item()
      1
    """
    logits = logits / temperature
    if top_k is not None:
        logits = jnp.where(logits < jax.lax.top_k(logits, top_k)[0][..., -1:], -jnp.inf, logits)
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # A token stays if those before it do not add up to top_p yet; the first one always does.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    least = jnp.where(before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(logits < least, -jnp.inf, logits), axis=-1)
