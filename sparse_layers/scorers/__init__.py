"""WHO is looked at when the model chooses: scorers of key blocks, and their names."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..masks.algebra import Mask
from ..masks.options import near, parsed_options
from ..masks.primitives import Causal
from ..ops.planning.mask_info import masks_for
from ..ops.planning.plan import is_causal
from .methods import InfLLM as InfLLM
from .methods import MoBA as MoBA
from .scorer import Scorer as Scorer

_SCORERS: dict[str, type[Scorer]] = {"infllm": InfLLM, "moba": MoBA}


def as_scorer(scorer: Any, name: str = "selection") -> Scorer | None:
    """A scorer that is given by itself or by name, ``"moba:block=128,count=16"``; None for None.

    Raises:
      ValueError: an unknown name or option, or a value that the scorer refuses.
      TypeError: what is neither.
    """
    if scorer is None or isinstance(scorer, Scorer):
        return scorer
    if not isinstance(scorer, str):
        raise TypeError(
            f"{name} must be a scorer, as sl.MoBA(block=128, count=16), the name of one, or None, got {scorer!r}"
        )
    known, _, text = scorer.partition(":")
    if known not in _SCORERS:
        raise ValueError(f"{name}: unknown scorer {near(known, _SCORERS)}")
    options, fields = parsed_options(f"scorer {known!r}", text), [x.name for x in dataclasses.fields(_SCORERS[known])]
    for option in options:
        if option not in fields:
            raise ValueError(f"scorer {known!r}: unknown option {near(option, fields)}")
    return _SCORERS[known](**options)


def masks_and_scorer(
    pattern: Any, selection: Any, lengths: Sequence[int], name: str = "pattern"
) -> tuple[tuple[Mask, ...], Scorer | None]:
    """The masks and the scorer of a layer, whose pattern may be a scorer: it then stands for `Causal` with it.

    Args:
      pattern: a scorer, the name of one, or whatever `masks_for` takes.
      selection: whatever `as_scorer` takes.
      lengths: one of the sequence, or two of queries and keys.
      name: of the pattern, in errors.

    Raises:
      ValueError, TypeError: see `masks_for` and `as_scorer`; or two scorers, one for a pattern that is not causal, or
        one where queries and keys are of different sequences.
    """
    scorer = as_scorer(selection)
    if isinstance(pattern, Scorer) or (isinstance(pattern, str) and pattern.partition(":")[0] in _SCORERS):
        if scorer is not None:
            raise ValueError(f"{name}={pattern!r} chooses blocks by itself: selection must be None, got {selection!r}")
        pattern, scorer = Causal(), as_scorer(pattern, name)
    masks = masks_for(pattern, *lengths, name=name)
    if scorer is not None and not (len(lengths) == 1 and all(is_causal(mask, lengths[0]) for mask in masks)):
        raise ValueError(f"{name}: {scorer} chooses among blocks of the past, so it must be causal, got {pattern!r}")
    return masks, scorer
