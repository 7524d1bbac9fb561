"""Recognition of masks: the expression of `Window`, `Strided` and the like that a function or an array equals."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from ..masks.adapters import MaskMod
from ..masks.algebra import And, Array, Mask, Not, Or, Shifted, Transposed
from ..masks.primitives import BlockDiagonal, Causal, Columns, Full, Global, LogSparse, Prefix, Strided, Window
from ..ops.planning.blocks import outside_trace

_CORNER = 512  # tokens at either end of the sequence, whose pairs are all compared
_POINTS = 1 << 17  # pairs that are compared near the diagonal, and as many at random
_NEAR = 1024  # tokens from the diagonal that are near
_SAMPLE = 4096  # pairs compared first, which most wrong expressions fail
_TERMS = 3  # most terms of an expression
_PACKAGE = Mask.__module__.rpartition(".")[0]


COMBINING = And | Or | Not | Transposed | Shifted


def leaves(mask: Mask) -> Iterator[Mask]:
    """Yields the masks that an expression combines; `Blocks` and grids are not looked into."""
    if not isinstance(mask, COMBINING):
        yield mask
        return
    for field in dataclasses.fields(mask):
        if isinstance(inner := getattr(mask, field.name), Mask):
            yield from leaves(inner)


def is_opaque(mask: Mask) -> bool:
    """True if the planner knows a mask by its answers alone: a ``mask_mod``, an array or a class of a user's own."""
    return isinstance(mask, MaskMod | Array) or not type(mask).__module__.startswith(_PACKAGE)


@functools.lru_cache(maxsize=64)
@outside_trace()
def recognize(mask: Mask, length: int) -> tuple[Mask, int] | None:
    """Finds an expression of this package's masks with the same answers: returns it and the number of compared pairs.

    Sizes come from the first, middle and last query and the first key. Candidates are compared with the mask on all
    pairs of the first and last 512 of ``length`` tokens, and on random pairs near the diagonal and elsewhere.

    Example:
      >>> import sparse_layers as sl
      >>> mask = sl.from_mask_mod(lambda b, h, q, k: (q >= k) & ((q - k < 64) | (k < 4)))
      >>> recognize(mask, 1024)[0]
      Causal() & (Window(left=63, right=0) | Prefix(size=4))
    """
    q, k = _pairs(length)
    allowed = np.broadcast_to(mask(q, k), q.shape)
    is_causal = not bool((allowed & (k > q)).any())
    for expression in _expressions(_terms(mask, length, is_causal), is_causal):
        for sample in (slice(_SAMPLE), slice(None)):
            if not np.array_equal(np.broadcast_to(expression(q[sample], k[sample]), q[sample].shape), allowed[sample]):
                break
        else:
            return expression, len(q)
    return None


def _pairs(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions (q, k) to compare, int64 [n], in random order."""
    rng, corner = np.random.default_rng(0), min(length, _CORNER)
    square = np.indices((corner, corner)).reshape(2, -1)
    if length > corner:
        anywhere = rng.integers(0, length, (2, _POINTS))
        near_diagonal = anywhere[0], np.clip(anywhere[0] + rng.integers(-_NEAR, _NEAR, _POINTS), 0, length - 1)
        square = np.concatenate([square, square + length - corner, anywhere, near_diagonal], axis=1)
    q, k = rng.permutation(square, axis=1)
    return q, k


def _terms(mask: Mask, length: int, is_causal: bool) -> list[Mask]:
    """Returns masks of one rule whose sizes may be those of ``mask``."""
    positions = np.arange(length)
    first, middle, last = (
        np.broadcast_to(mask(np.full(1, q), positions), length) for q in (0, length // 2, length - 1)
    )
    column = np.broadcast_to(mask(positions, np.zeros(1, np.int64)), length)
    left, right = _run(last[::-1]), 0 if is_causal else _run(middle[length // 2 :]) - 1
    prefix, window_start = _run(last), max(0, length - left)
    terms: list[Mask] = [Causal(), LogSparse()] if is_causal else [Full(), Causal()]
    if left:
        terms.append(Window(left - 1, max(0, right)))
    for size in dict.fromkeys((prefix, _run(first))):
        terms += [Prefix(size), Global(size)] if 0 < size < length else []
    if 0 < _run(column) < length:
        terms.append(BlockDiagonal(_run(column)))
    for begin in {0, prefix}:  # a prefix may hide where a stride or columns begin
        far = np.flatnonzero(last[begin:window_start]) + begin
        strides = np.gcd.reduce(length - 1 - far) if len(far) else 0
        if strides > 1:
            terms += [Strided(int(strides)), Window(int(length - 1 - far[0])) & Strided(int(strides))]
        starts = far[np.diff(far, prepend=-2) > 1]
        if len(starts) > 1:
            period, start = int(starts[-1] - starts[-2]), int(starts[-2])
            size = _run(last[start:])
            if start % period + size <= period:
                terms.append(Columns(period, start % period, start % period + size))
    return list(dict.fromkeys(terms))


def _run(allowed: np.ndarray) -> int:
    """Returns the number of leading true entries."""
    return len(allowed) if allowed.all() else int(np.argmin(allowed))


def _expressions(terms: list[Mask], is_causal: bool) -> Iterator[Mask]:
    """Yields unions of terms and intersections of two, short ones first; also without the future if ``is_causal``."""
    for count in range(1, _TERMS + 1):
        for combination in itertools.combinations(terms, count):
            for combine in (Or, And) if count == 2 else (Or,):
                expression = functools.reduce(combine, combination)
                yield expression
                if is_causal:
                    yield Causal() & expression
