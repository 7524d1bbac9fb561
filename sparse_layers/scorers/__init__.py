"""Scorers: rules that select key blocks for each query at run time, and their names."""

from collections.abc import Sequence
from typing import Any

from ..arguments.checks import suggest
from ..arguments.foreign import PRESETS
from ..masks.algebra import Mask
from ..masks.presets import presets
from ..masks.primitives import Causal
from ..ops.planning.binding import masks_for_lengths
from ..ops.planning.causality import check_causal
from .base import Scorer as Scorer
from .methods import MSA as MSA
from .methods import NSA as NSA
from .methods import InfLLM as InfLLM
from .methods import MoBA as MoBA


def as_scorer(scorer: Any, name: str = "selection") -> Scorer | None:
    """Returns a scorer from a scorer, its name or None."""
    if scorer is None or isinstance(scorer, Scorer):
        return scorer
    if not isinstance(scorer, str):
        raise TypeError(
            f"{name} must be a scorer, as sl.MoBA(block=128, count=16), the name of one, or None, got {scorer!r}"
        )
    named = Scorer.named(scorer)
    if named is None:
        raise ValueError(f"{name}: unknown scorer {suggest(scorer.partition(':')[0], Scorer._named)}")
    return named


def scorer_of(pattern: Any) -> Scorer | None:
    """Returns the scorer of a pattern that is a scorer or its name, else None."""
    pattern = Scorer.named(pattern) if isinstance(pattern, str) else pattern
    return pattern if isinstance(pattern, Scorer) else None


def as_nsa(pattern: Any) -> NSA | None:
    """Returns the scorer of a pattern that is `NSA` or its name, else None."""
    scorer = scorer_of(pattern)
    return scorer if isinstance(scorer, NSA) else None


def masks_and_scorer(
    pattern: Any, selection: Any, lengths: Sequence[int], name: str = "pattern"
) -> tuple[tuple[Mask, ...], Scorer | None]:
    """Returns the masks and the scorer of a layer. A scorer as the pattern means `Causal` with this scorer.

    A pattern is a scorer, its name, or any argument of `masks_for_lengths`; a selection any argument of `as_scorer`.
    ``lengths`` are that of the sequence, or those of queries and keys. Errors call the pattern ``name``.
    """
    scorer, pattern_scorer = as_scorer(selection), scorer_of(pattern)
    if isinstance(pattern, str) and pattern_scorer is None:
        known, pattern_name = (*presets(), *Scorer._named), pattern.partition(":")[0]
        if pattern_name not in known and pattern_name.lower() not in PRESETS:  # for which `preset` has a hint
            raise ValueError(f"{name}: unknown name {suggest(pattern_name, known)}")
    if isinstance(pattern, list | tuple) and any(scorer_of(entry) is not None for entry in pattern):
        raise ValueError(f"{name} by head must be masks, and a scorer chooses for all heads, got {pattern!r}")
    if pattern_scorer is not None:
        if scorer is not None:
            raise ValueError(f"{name}={pattern!r} chooses blocks by itself: selection must be None, got {selection!r}")
        pattern, scorer = Causal(), pattern_scorer
    if isinstance(scorer, NSA):
        raise ValueError(
            f"{'selection' if pattern_scorer is None else name}: {scorer} chooses by keys that only a layer of its own "
            "has: give it to NativeSparseAttention, or as the pattern to SparseTransformerBlock or SparseTransformer"
        )
    masks = masks_for_lengths(pattern, *lengths, name=name)
    if scorer is None:
        return masks, None
    if len(lengths) == 2:
        raise ValueError(
            f"selection must be None where queries and keys are of two sequences, for {scorer} chooses among blocks of "
            "the past of one"
        )
    for mask in masks:
        check_causal(mask, lengths[0], name, f"{scorer} chooses among blocks of the past, so it must be causal")
    if scorer.indexed and len({*masks}) > 1:
        raise ValueError(
            f"{name} must be one for all heads, for the index of {scorer} learns for all heads of a key head, got "
            f"{pattern!r}"
        )
    return masks, scorer
