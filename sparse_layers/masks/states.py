"""Block states EMPTY, PARTIAL and FULL, and how the states of combined masks follow from those of their operands.

UNSURE is a fourth answer of closed forms: any of the three may hold. The planner then looks at the pairs themselves
(`sparse_layers.ops.planning.blocks`).
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

EMPTY, PARTIAL, FULL, UNSURE = 0, 1, 2, 3

# States of left & right, ~mask and left | right by the states of the operands. Some pairs of each of two masks may or
# may not be the same pairs: PARTIAL & PARTIAL is UNSURE.
AND_TABLE = np.array([[0, 0, 0, 0], [0, 3, 1, 3], [0, 1, 2, 3], [0, 3, 3, 3]], np.int8)
NOT_TABLE = np.array([2, 1, 0, 3], np.int8)
OR_TABLE = NOT_TABLE[AND_TABLE[np.ix_(NOT_TABLE, NOT_TABLE)]]
# Axes of a grid are independent: if each allows something and one not everything, so does the grid.
_PRODUCT_TABLE = AND_TABLE.copy()
_PRODUCT_TABLE[PARTIAL, PARTIAL] = PARTIAL


def to_state(any_allowed: Any, all_allowed: Any) -> np.ndarray:
    """Returns EMPTY, PARTIAL or FULL, int8, from 'a pair is allowed' and 'every pair is allowed'."""
    return np.add(any_allowed, all_allowed, dtype=np.int8)


def product_state(states: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the state of a box of pairs on a grid from the states on its axes."""
    return functools.reduce(lambda a, b: _PRODUCT_TABLE[a, b], states, np.array(FULL, np.int8))


def merge_states(rectangles: Iterable[tuple[Any, Any]]) -> np.ndarray:
    """Returns the state of a rectangle that disjoint rectangles (exists, state), bools and int8, make up."""
    some = maybe_some = not_all = maybe_not_all = np.bool_(False)
    for exists, state in rectangles:
        some = some | (exists & ((state == PARTIAL) | (state == FULL)))
        maybe_some = maybe_some | (exists & (state != EMPTY))
        not_all = not_all | (exists & ((state == PARTIAL) | (state == EMPTY)))
        maybe_not_all = maybe_not_all | (exists & (state != FULL))
    states = np.where(some & not_all, np.int8(PARTIAL), np.int8(UNSURE))
    states = np.where(maybe_not_all, states, np.int8(FULL))
    return np.where(maybe_some, states, np.int8(EMPTY))


def split_range(first: Any, last: Any, size: int) -> list[tuple[Any, Any, Any]]:
    """Splits positions first .. last into the end of a unit of ``size``, whole units, and the beginning of a unit.

    Returns:
      (exists, first, last) of the three; 0 .. 0 where one does not exist.
    """
    begin, end = -(-first // size) * size, (last + 1) // size * size
    ends = (first, np.minimum(last, begin - 1)), (begin, end - 1), (np.maximum(begin, end), last)
    return [(low <= high, np.where(low <= high, low, 0), np.where(low <= high, high, 0)) for low, high in ends]
