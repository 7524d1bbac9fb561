"""Masks and biases that join the scores of dense attention: the pairs that they allow, and patterns of these."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..masks.algebra import Array, Mask
from ..ops.planning.blocks import outside_trace
from .recognition import recognize

JOINING = {"add", "sub", "mul", "div", "select_n", "and", "or", "min", "max"}
RESHAPING = {"broadcast_in_dim", "reshape", "squeeze"}
_ELEMENTWISE = JOINING | {"not", "xor", "eq", "ne", "lt", "le", "gt", "ge", "neg", "convert_element_type"}
_HIDDEN = -1e4  # a bias below it hides a pair
_ROWS = 256  # of queries that are compared at once


@dataclasses.dataclass(eq=False)
class DenseMask:
    """An array of pairs of queries and keys that joins scores."""

    shape: tuple[int, ...]  # without axes along which it is repeated
    dtype: str
    line: str  # that built it, or "an input", "a parameter", "a constant"
    is_partial: bool  # True if inputs hide more pairs than ``allowed`` does
    is_large: bool  # True if it is constant, and too large to compute it
    # Computes the bool array of allowed pairs, [T, S], or [N, T, S] if it differs by head or batch entry; keys may come
    # first. Returns None if inputs decide it, or it is a bias.
    allowed: Callable[[], np.ndarray | None]
    keys_first: bool = False  # True if the scores are the product of keys and queries, in this order

    @functools.cached_property
    def _pairs(self) -> np.ndarray | None:
        pairs = self.allowed()
        return pairs.swapaxes(-1, -2) if pairs is not None and self.keys_first else pairs

    @property
    def differs_by_head(self) -> bool:
        """True if it is constant, and heads or batch entries have masks of their own."""
        return self._pairs is not None and self._pairs.ndim == 3

    @functools.cached_property
    def pattern(self) -> Mask | None:
        """Masks that allow the same pairs: an `Array` if no expression is known; None if there is no array [T, S]."""
        pairs = self._pairs
        if pairs is None or pairs.ndim == 3:
            return None
        array = Array(pairs)
        rewritten = recognize(array, len(pairs)) if pairs.shape[0] == pairs.shape[1] else None
        return rewritten[0] if rewritten is not None and _allows(rewritten[0], pairs) else array


def _allows(expression: Mask, pairs: np.ndarray) -> bool:
    """True if a mask allows these pairs and no others."""
    q, k = (np.arange(n) for n in pairs.shape)
    blocks = (slice(i, i + _ROWS) for i in range(0, len(q), _ROWS))
    return all(np.array_equal(np.broadcast_to(expression(q[x, None], k), pairs[x].shape), pairs[x]) for x in blocks)


def allowed_pairs(x: Any, name: str, operand: int, pair: tuple[int, int]) -> np.ndarray | None:
    """Returns the pairs that a mask allows, by the axes ``pair``; ``operand`` is the number of the scores."""
    if x.evaluate is None:
        return None
    with outside_trace():
        array = np.moveaxis(np.asarray(x.evaluate()), pair, (-2, -1))
    heads = array.reshape(-1, *array.shape[-2:])
    pairs = heads[0] if all(np.array_equal(heads[0], x) for x in heads[1:]) else heads
    if name == "select_n" and x.dtype == "bool":
        return pairs if operand == 2 else ~pairs
    is_mask = name == "add" and bool(np.all((pairs == 0) | (pairs < _HIDDEN)))
    return pairs == 0 if is_mask else None


def evaluation(equation: Any, values: list[Any], result: Any) -> Callable[[], Any] | None:
    """Returns what computes a result without the axes along which it does not differ; None if inputs decide it."""
    if any(x.evaluate is None for x in values):
        return None
    name, shape = equation.primitive.name, result.distinct_shape

    def compute():
        arrays = [jnp.asarray(x.evaluate()) for x in values if x.evaluate is not None]
        if name in RESHAPING and arrays[0].size == math.prod(shape):
            return arrays[0].reshape(shape)
        if name in _ELEMENTWISE:
            arrays = jnp.broadcast_arrays(*arrays)
        elif name != "transpose":
            arrays = [jnp.broadcast_to(array, x.shape) for array, x in zip(arrays, values, strict=True)]
        array = equation.primitive.bind(*arrays, **equation.params)
        return array if array.shape == shape else array[tuple(slice(n) for n in shape)]

    return functools.cache(compute)
