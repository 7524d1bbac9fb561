"""What `describe` and `draw` are asked about: a mask with its lengths, or what has plans."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..masks.adapters import as_masks
from ..masks.options import Length, checked
from ..ops.planning.communication import Token
from ..ops.planning.plan import Plan
from ..scorers import Scorer, as_scorer, scorer_of

LONGEST = 1 << 20  # tokens that are planned in seconds, whatever the pattern


class Planned(NamedTuple):
    """A layer's plan, and what is known of the layer.

    Attributes:
      plan: the plan.
      scorer: that chooses blocks within it, if one does.
      groups: how many query heads share a key head.
      token: bytes of one token, if heads and their size are known.
      head_size: features of a head, if they are known.
    """

    plan: Plan
    scorer: Scorer | None = None
    groups: int = 1
    token: Token | None = None
    head_size: int | None = None


def plans_of(subject: Any) -> dict[str, Planned] | None:
    """The plans of what has some, by what is to be said of each: '', layers or branches; None of anything else."""
    if not (hasattr(subject, "blocks") and hasattr(subject, "num_layers")):
        return _planned(subject)
    turns: dict[tuple[tuple[str, Planned], ...], list[int]] = {}
    for layer in range(subject.num_layers):
        found = _planned(subject.blocks[layer % len(subject.blocks)])
        if found is None:
            return None
        turns.setdefault(tuple(found.items()), []).append(layer)
    plans = {}
    for found, layers in turns.items():
        which = f"all {subject.num_layers} layers"
        if len(turns) > 1:
            which = f"layers {', '.join(map(str, layers))} of {subject.num_layers}"
        plans |= {", ".join(filter(None, (which, branch))): planned for branch, planned in found}
    return plans


def _planned(subject: Any) -> dict[str, Planned] | None:
    """Those of a layer by branch, '' if it has but one, of a block, an attention function or a plan; or None."""
    if isinstance(subject, functools.partial):  # of `make_attention_fn`, with segment ids
        subject = subject.func
    subject = getattr(subject, "attention", subject)  # that of a block
    if isinstance(subject, Plan):
        return {"": Planned(subject)}
    pattern, key_heads = (getattr(subject, name, None) for name in ("pattern", "num_kv_heads"))
    groups = subject.num_heads // key_heads if key_heads else 1
    head_size = _head_size(subject)
    token = _token(subject, head_size)
    if hasattr(subject, "plans"):  # a `NativeSparseAttention`
        scorers = {"selected": pattern}
        return {name: Planned(x, scorers.get(name), groups, token, head_size) for name, x in subject.plans.items()}
    plan = getattr(subject, "plan", None)
    if callable(plan) and hasattr(subject, "seq_len"):  # an `AttentionFn`
        plan = plan(subject.seq_len)
    # A layer's function knows its scorer; of a Linen layer, the attributes say it.
    fn = getattr(getattr(subject, "attention_fn", None), "fn", subject)
    scorer = as_scorer(getattr(fn, "selection", None)) or scorer_of(pattern)
    return {"": Planned(plan, scorer, groups, token, head_size)} if isinstance(plan, Plan) else None


def _head_size(layer: Any) -> int | None:
    """Features of a layer's heads; None where these are not known before it has seen inputs."""
    heads, size, features = (getattr(layer, name, None) for name in ("num_heads", "head_dim", "qkv_features"))
    return size or (features // heads if heads and features else None)


def _token(layer: Any, size: int | None) -> Token | None:
    """Bytes of one token of a layer's heads of a size, if both are known."""
    heads = getattr(layer, "num_heads", None)
    if not heads or not size:
        return None
    dtype = getattr(layer, "dtype", None) or getattr(layer, "param_dtype", None) or jnp.float32
    return Token.of(heads, getattr(layer, "num_kv_heads", None) or heads, size, jnp.dtype(dtype).itemsize)


def lengths_of(mask: Any, q_len: Any, kv_len: Any, most: int | None = None) -> tuple[int, int]:
    """The lengths that a mask is to be looked at with.

    Raises:
      ValueError: q_len is missing, or a length is out of its range.
      TypeError: q_len is missing where there is no mask.
    """
    if q_len is None:
        try:
            as_masks(mask)
        except TypeError:
            kind = type(mask).__name__
            raise TypeError(f"subject must be a mask, or what has a Plan (a layer, a model), got {kind}") from None
        raise ValueError("q_len must be an integer >= 1 with a mask, which has no length of its own, got None")
    lengths = {"q_len": q_len, "kv_len": q_len if kv_len is None else kv_len}
    for name, length in lengths.items():
        lengths[name] = checked(name, length, Length)
        if most is not None and lengths[name] > most:
            raise ValueError(
                f"{name} must be at most {most}, got {length}: to plan more may take minutes; `picture`, and `draw` "
                "without blocks, show any length, and fewer tokens the same pattern"
            )
    return lengths["q_len"], lengths["kv_len"]


def refuse_given(subject: Any, values: dict[str, Any]) -> None:
    """Raises ValueError for what may be given with a mask only."""
    for name, value in values.items():
        if value is not None:
            kind = type(subject).__name__
            raise ValueError(f"{name} must be None where a plan says it, as that of this {kind} does, got {value!r}")
