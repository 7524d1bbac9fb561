"""Text sampled from a model of bytes."""

import jax
import numpy as np

import sparse_layers as sl

from ..training.config import Refusal


def sample(
    model: sl.SparseTransformer,
    prompt: bytes,
    tokens: int,
    temperature: float,
    top_p: float | None = None,
    seed: int = 0,
    is_prefix: bool = False,
) -> bytes:
    """``prompt`` and ``tokens`` sampled bytes after it.

    A text longer than the model's sequence goes on from its last half, again and again.

    Args:
      model: of `build`.
      prompt: at least one byte.
      tokens: number of bytes to sample.
      temperature: 0 takes the likeliest byte each time, 1 samples from the model as it is.
      top_p: sample from the fewest likeliest bytes only that have this probability together.
      seed: of the samples.
      is_prefix: True if what the model reads sees itself whole, as its prefixes in training.

    Raises:
      Refusal: an empty prompt, a negative number of tokens or temperature, top_p outside (0, 1].
    """
    if not prompt:
        raise Refusal("--prompt must have at least one byte")
    if tokens < 0 or not 0 <= temperature < float("inf"):
        raise Refusal(f"--tokens and --temperature must not be negative, got {tokens} and {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise Refusal(f"--top-p must be in (0, 1], got {top_p}")
    if model.seq_len == 1:
        raise Refusal("a model of --seq-len 1 has no room for a byte after the prompt")
    text, key = prompt, jax.random.key(seed)
    while tokens:
        # No more than half the sequence, so that the rest is room for what comes.
        seen = text[-(model.seq_len // 2) :] if len(text) + tokens > model.seq_len else text
        count = min(tokens, model.seq_len - len(seen))
        key, now = jax.random.split(key)
        order = np.zeros((1, len(seen)), np.int32) if is_prefix else None
        sampling = {"temperature": temperature, "top_p": top_p, "key": now}
        new = sl.generate(model, [list(seen)], count, order_ids=order, **sampling)
        text, tokens = text + np.asarray(new[0], np.uint8).tobytes(), tokens - count
    return text
