"""Random arrays by numpy: JAX would compile a program for each shape that it draws, converts, adds or slices."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32, of a normal distribution."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@contextlib.contextmanager
def strict_promotion() -> Iterator[None]:
    """JAX promotes no dtype and no rank implicitly."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def perturbed(params: Any, seed: int = 1) -> Any:
    """Parameters, or their shapes, away from initial zeros and ones."""
    rng = np.random.default_rng(seed)

    def moved(p):
        start = 0 if isinstance(p, jax.ShapeDtypeStruct) else np.asarray(p)
        return jnp.asarray((start + 0.3 * rng.normal(size=p.shape)).astype(p.dtype))

    return jax.tree.map(moved, params)
