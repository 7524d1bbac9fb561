"""WHO is looked at when the model chooses: scorers of key blocks, and their names."""

from collections.abc import Sequence
from typing import Any

from ..arguments.checks import suggest
from ..arguments.foreign import PRESETS
from ..masks.algebra import Mask
from ..masks.presets import presets
from ..masks.primitives import Causal
from ..ops.planning.causality import check_causal
from ..ops.planning.mask_info import masks_for_lengths
from .base import Scorer as Scorer
from .methods import MSA as MSA
from .methods import NSA as NSA
from .methods import InfLLM as InfLLM
from .methods import MoBA as MoBA


def as_scorer(scorer: Any, name: str = "selection") -> Scorer | None:
    """A scorer that is given by itself or by name; None for None.

    Raises:
      ValueError: no scorer has the name, or `Scorer.named`'s.
      TypeError: what is neither.
    """
    if scorer is None or isinstance(scorer, Scorer):
        return scorer
    if not isinstance(scorer, str):
        raise TypeError(
            f"{name} must be a scorer, as sl.MoBA(block=128, count=16), the name of one, or None, got {scorer!r}"
        )
    found = Scorer.named(scorer)
    if found is None:
        raise ValueError(f"{name}: unknown scorer {suggest(scorer.partition(':')[0], Scorer._named)}")
    return found


def scorer_of(pattern: Any) -> Scorer | None:
    """The scorer that a pattern is, by itself or by name; None for masks and whatever else.

    Raises:
      ValueError: see `Scorer.named`.
    """
    pattern = Scorer.named(pattern) if isinstance(pattern, str) else pattern
    return pattern if isinstance(pattern, Scorer) else None


def as_nsa(pattern: Any) -> NSA | None:
    """The sizes of native sparse attention, if a pattern is `NSA`, by itself or by name; None for all others.

    Raises:
      ValueError: an unknown option, or a value that is refused.

    Example:
      >>> as_nsa("nsa:count=8").count, as_nsa("causal")
      (8, None)
    """
    scorer = scorer_of(pattern)
    return scorer if isinstance(scorer, NSA) else None


def masks_and_scorer(
    pattern: Any, selection: Any, lengths: Sequence[int], name: str = "pattern"
) -> tuple[tuple[Mask, ...], Scorer | None]:
    """The masks and the scorer of a layer, whose pattern may be a scorer: it then stands for `Causal` with it.

    Args:
      pattern: a scorer, the name of one, or whatever `masks_for_lengths` takes.
      selection: whatever `as_scorer` takes.
      lengths: one of the sequence, or two of queries and keys.
      name: of the pattern, in errors.

    Raises:
      ValueError, TypeError: see `masks_for_lengths` and `as_scorer`; or two scorers, one for a pattern that is not
        causal, one where queries and keys are of different sequences, or `NSA`, which needs more than a mask and a
        scorer.
    """
    scorer, own = as_scorer(selection), scorer_of(pattern)
    if isinstance(pattern, str) and own is None:
        known, asked = (*presets(), *Scorer._named), pattern.partition(":")[0]
        if asked not in known and asked.lower() not in PRESETS:  # of which `preset` says what to write
            raise ValueError(f"{name}: unknown name {suggest(asked, known)}")
    if isinstance(pattern, list | tuple) and any(scorer_of(each) is not None for each in pattern):
        raise ValueError(f"{name} by head must be masks, and a scorer chooses for all heads, got {pattern!r}")
    if own is not None:
        if scorer is not None:
            raise ValueError(f"{name}={pattern!r} chooses blocks by itself: selection must be None, got {selection!r}")
        pattern, scorer = Causal(), own
    if isinstance(scorer, NSA):
        raise ValueError(
            f"{'selection' if own is None else name}: {scorer} chooses by keys that only a layer of its own has: give "
            "it to NativeSparseAttention, or as the pattern to SparseTransformerBlock or SparseTransformer"
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
