"""The model: a `sparse_layers.SparseTransformer` over bytes, its loss, and samples from it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparse_layers as sl
from sparse_layers.ops.platforms import platform

from .config import Config, Refusal


def build(config: Config) -> sl.SparseTransformer:
    """The model of ``config``, freshly initialised from its seed.

    Raises:
      Refusal: no such preset, a preset that takes other options, or one that cannot serve the length or the heads.
    """
    try:
        patterns = tuple(_causal(sl.preset(part)) for part in config.pattern.split("+"))
        return sl.SparseTransformer(
            256,
            config.features,
            config.heads,
            config.layers,
            patterns=patterns,
            seq_len=config.seq_len,
            positions=config.positions,
            # Measured on two million bytes: 0.3 bits per byte better than GELU, layer norm and a head of its own.
            mlp="swiglu",
            mlp_features=8 * round(config.features / 3),
            norm="rms",
            tie_embeddings=True,
            position_stride=config.position_stride if config.positions == "row_column" else None,
            dtype=_dtype(config),
            rngs=nnx.Rngs(config.seed),
        )
    except ValueError as error:
        raise Refusal(
            f"--pattern {config.pattern} --seq-len {config.seq_len}: {' '.join(str(error).split())}"
        ) from error


def _dtype(config: Config) -> Any:
    """The dtype of the computation; weights are float32 in any case."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.float32 if platform() == "cpu" else jnp.bfloat16


def _causal(pattern: Any) -> Any:
    """The pattern without what lies in the future, where a language model must not look."""
    return tuple(map(_causal, pattern)) if isinstance(pattern, tuple) else pattern & sl.Causal()


def mean_loss(model: nnx.Module, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of each next byte; windows int32 [B, T + 1], a float32 scalar."""
    logits = model(windows[:, :-1])  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), windows[:, 1:]).mean()


def sample(model: nnx.Module, seq_len: int, prompt: bytes, tokens: int, temperature: float, seed: int = 0) -> bytes:
    """``prompt`` and ``tokens`` sampled bytes after it.

    Args:
      model: tokens [1, T] -> logits [1, T, 256], causal.
      seq_len: T, how far the model sees back.
      prompt: at least one byte; the last ``seq_len`` count.
      tokens: number of bytes to sample.
      temperature: 0 takes the likeliest byte each time, 1 samples from the model as it is.
      seed: of the samples.

    Raises:
      Refusal: an empty prompt, or a negative number of tokens or temperature.
    """
    if not prompt:
        raise Refusal("--prompt must have at least one byte")
    if tokens < 0 or temperature < 0:
        raise Refusal(f"--tokens and --temperature must not be negative, got {tokens} and {temperature}")
    seen = np.frombuffer(prompt, np.uint8)[-seq_len:]
    window = jnp.zeros(seq_len, jnp.int32).at[: seen.size].set(seen)
    graph, state = nnx.split(model)
    sampled = _sample(graph, state, window, seen.size, tokens, temperature, jax.random.key(seed))
    return prompt + np.asarray(sampled, np.uint8).tobytes()


@functools.partial(jax.jit, static_argnums=(0, 4))
def _sample(graph, state, window, length, tokens, temperature, key):
    """One compiled loop. The tail of the window is filler: a causal model's answer at the last byte ignores it."""
    model = nnx.merge(graph, state)

    def step(carry, key):
        window, length = carry
        logits = model(window[None])[0, length - 1]
        noise = jnp.where(temperature > 0, temperature * jax.random.gumbel(key, logits.shape), 0.0)
        byte = jnp.argmax(logits + noise).astype(jnp.int32)
        full = length == window.size
        window = jnp.where(full, jnp.roll(window, -1), window)
        length = jnp.where(full, length, length + 1)
        return (window.at[length - 1].set(byte), length), byte

    return jax.lax.scan(step, (window, length), jax.random.split(key, tokens))[1]
