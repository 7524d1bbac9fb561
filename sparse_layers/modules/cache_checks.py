"""Checks of prompts, decoding steps and caches, which all attention layers share."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..arguments.checks import Natural, Positive, checked
from ..arguments.foreign import one_line
from ..ops.decoding.checks import checked_lengths
from .settings import check_features


def check_step(inputs: Any, features: int, cache: Any, cache_type: type[Any], expected: Mapping[str, Any]) -> None:
    """Refuses a decoding step whose inputs are not [B, features], or whose cache is another layer's.

    A cache with a ``max_step`` accepts [B, S, features] too, with S up to max_step.

    Args:
      inputs, cache: arguments of the step.
      features: features of the layer's input.
      cache_type: class of the layer's caches, which have ``batch``, the number of sequences.
      expected: the attributes that the layer's cache has, by name.
    """
    shape, max_step = f"[B, {features}], one token a sequence", getattr(cache, "max_step", 0)
    check_features("inputs", inputs, shape, features)
    check_cache(cache, cache_type, expected)
    is_block = inputs.ndim == 3 and 1 <= inputs.shape[1] <= max_step
    if not (inputs.ndim == 2 or is_block) or len(inputs) != cache.batch:
        shape += f", or [B, S, {features}] with S in 1..max_step = {max_step}," if max_step else ""
        raise ValueError(f"inputs must have shape {shape} of the cache's {cache.batch}, got {inputs.shape}")


def check_cache(cache: Any, cache_type: type[Any], expected: Mapping[str, Any]) -> None:
    """Refuses the cache of another layer; `check_step` documents the arguments."""
    if not isinstance(cache, cache_type):
        raise TypeError(
            f"cache must be the {cache_type.__name__} of prefill or of the step before, got {type(cache).__name__}: "
            f"{one_line(cache)}"
        )
    for name, value in expected.items():
        if getattr(cache, name) != value:
            raise ValueError(f"cache is that of another layer: {name} is {getattr(cache, name)}, not {value}")


def checked_chunk(start: Any, length: int, total: Any, seq_len: int) -> tuple[int, int]:
    """Returns (start, total) of a chunk of ``length`` tokens, as integers; total None stands for the chunk's end.

    Raises:
      ValueError: they are not integers, or the chunk does not end by total, or total exceeds seq_len.
    """
    start = checked("start", start, Natural)
    total = start + length if total is None else checked("total", total, Positive)
    if not start + length <= total <= seq_len:
        raise ValueError(
            f"start={start} and T={length} tokens must end by total={total}, and that by seq_len={seq_len}"
        )
    return start, total


def checked_prompts(inputs: jax.Array, lengths: Any, start: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns prompts from token ``start`` on, with zeros in their padding, and their lengths, int32 [B]."""
    if inputs.ndim != 3:
        raise ValueError(f"inputs must have shape [B, T, {inputs.shape[-1]}], got {inputs.shape}")
    lengths = checked_lengths(lengths, len(inputs), start + inputs.shape[1])
    # Padding may hold NaN, and a weight of 0 times NaN is NaN.
    position = start + jnp.arange(inputs.shape[1])[None, :, None]
    return jnp.where(position < lengths[:, None, None], inputs, 0), lengths
