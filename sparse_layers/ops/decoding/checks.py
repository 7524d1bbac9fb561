"""Checks of the positions and lengths that caches and layers take."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..kernels.validation import checked_numbers

Integers: TypeAlias = ArrayLike | Sequence[int]


def checked_positions(position: Any, batch: int, seq_len: int, count: int = 1) -> jax.Array:
    """Returns the positions of a token in each sequence, or of the first of several, int32 [batch].

    Raises:
      ValueError: another shape or dtype, or (outside of jit) positions outside 0..seq_len - count.
    """
    most = seq_len - count
    return _checked("position", position, batch, most, f"seq_len - {count} = {most}")


def checked_lengths(lengths: Any, batch: int, longest: int) -> jax.Array:
    """Returns the lengths of prompts, int32 [batch]; ``longest`` for None.

    Raises:
      ValueError: another shape or dtype, or (outside of jit) lengths outside 0..longest.
    """
    lengths = np.full(batch, longest, np.int32) if lengths is None else lengths
    return _checked("lengths", lengths, batch, longest, f"{longest}, the tokens that are there")


def _checked(name: str, values: Any, batch: int, most: int, rule: str) -> jax.Array:
    hint = (
        "; of a mask [B, P], True for tokens, write mask.sum(-1)" if name == "lengths" and np.ndim(values) == 2 else ""
    )
    values = checked_numbers(name, values, (batch,), jnp.integer, f"integers of shape {(batch,)}", hint)
    if not isinstance(values, jax.core.Tracer) and not all(0 <= int(x) <= most for x in np.asarray(values)):
        raise ValueError(f"{name} must lie in 0..{rule}, got {np.asarray(values)}")
    # Numbers of the host are put on the device explicitly, which `jax.transfer_guard` allows.
    return jnp.asarray(values, jnp.int32) if isinstance(values, jax.Array) else jax.device_put(values.astype(np.int32))
