"""Advice on a plan: the reasons why it saves nothing, and changes that would save, each weighed by its own plan."""

import dataclasses
from collections.abc import Iterator

from ..masks.adapters import MaskMod
from ..masks.algebra import Array, Blocks, Mask
from ..masks.counting import Count
from ..masks.grids import ColumnMajor, Neighborhood, OnGrid
from ..masks.pictures import FORMULA, shortened
from ..masks.primitives import Causal, Full, Random
from ..masks.rectangles import Rectangle
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.planner import make_plan
from ..ops.planning.terms import decompositions
from .recognition import COMBINING, is_opaque, leaves, recognize

_MIN_SAVING = 1.1  # times less work; a plan that saves less saves nothing
_ADVISED_SAVING = 1.5  # times less work; a change that saves less is not advised
_LONGEST = 1 << 16  # tokens; more take seconds to plan
_DOUBLINGS = 6  # of a length
_BLOCK = 128  # tokens of the blocks that are advised for scattered keys
_SIZED = Array, OnGrid, ColumnMajor, Neighborhood, Rectangle  # masks with lengths of their own


def advice(plan: Plan, h: int, count: Count) -> Iterator[str]:
    """Yields lines on mask h: why nothing is saved and what to try, and a cheaper form of a mask that is a function."""
    mask, cost = plan.masks[h], _cost(plan, h)
    opaque = list(dict.fromkeys(mask_name(leaf) for leaf in leaves(mask) if is_opaque(leaf)))
    dense, kind = (_planned(plan, Causal()), "causal") if count.causal else (_planned(plan, Full()), "full")
    saves_nothing = cost > 0 and _cost(dense) < _MIN_SAVING * cost
    if saves_nothing:
        yield f"nothing is saved: {_reason(plan, h, count, dense, kind, opaque)}"
    rewritten = recognize(mask, plan.q_len) if opaque and plan.q_len == plan.kv_len else None
    if rewritten is not None:
        expression, pairs = rewritten
        times = cost / max(1, _cost(_planned(plan, expression)))
        gain = f"costs {times:.1f} times less" if times >= _MIN_SAVING else "costs the same and is planned faster"
        yield f"try {expression!r}: it answers the same for {pairs} compared pairs and {gain}"
    elif any(isinstance(leaf, MaskMod) for leaf in leaves(mask)):
        yield (
            f"try Causal, Window, Strided, ... with &, | and ~ for {' and '.join(opaque)}: planned from its answers "
            "alone, a function has no row orders"
        )
    if saves_nothing:
        changes = list(_changes(plan, mask, count, kind))
        yield from changes
        if not changes and rewritten is None and plan.q_len == plan.kv_len:
            allows_all = count.pairs == plan.dense_pairs(count.causal)
            rule = "allows fewer pairs" if allows_all else "lets neighbouring queries see the same blocks of keys"
            yield f"try a pattern that {rule}: presets() lists some"


def _reason(plan: Plan, h: int, count: Count, dense: Plan, kind: str, opaque: list[str]) -> str:
    """Returns why mask h saves nothing compared with ``dense``, the plan of causal or full attention."""
    every, blocks, shape = plan.dense_pairs(count.causal), dense.chains[0][0].fwd_blocks, dense.chains[0][0].fwd_shape
    if count.looked_at is None and count.pairs == every:
        return f"the pattern allows all {every} pairs of {kind} attention at this length"
    if blocks == 1:
        return f"{max(plan.q_len, plan.kv_len)} tokens are one block of {shape[0]} x {shape[1]}"
    orders = len(plan.candidates[h]) - 1
    costly = (
        f"; {orders} other row order{'s cost' if orders > 1 else ' costs'} no less at this length" if orders else ""
    )
    unknown = f"; no row order is known for {' and '.join(opaque)}" if opaque else ""
    if plan.density(h) < dense.density(0):
        shares = f"{dense.density(0):.2%} of all blocks, this plan {plan.density(h):.2%}"
        return f"{kind} attention computes {shares}{costly}{unknown}"
    share = f"{count.pairs / every:.2%} of its pairs"
    return f"all {blocks} blocks of {kind} attention hold allowed pairs, {share}{costly}{unknown}"


def _changes(plan: Plan, mask: Mask, count: Count, kind: str) -> Iterator[str]:
    """Yields changes that save: longer sequences, blocks in place of scattered keys, the library's block sizes."""

    def saving(changed: Plan) -> float:
        return changed.dense_cost(count.causal) / max(1, _cost(changed))

    masks = list(dict.fromkeys(leaves(mask)))
    square = plan.q_len == plan.kv_len
    endless = not any(is_opaque(leaf) or isinstance(leaf, (*_SIZED, Random)) for leaf in masks)
    if square and endless and not set(masks) <= {Causal(), Full()}:
        for length in (plan.q_len << i for i in range(1, _DOUBLINGS + 1)):
            if length <= _LONGEST and (times := saving(_planned(plan, mask, length))) >= _ADVISED_SAVING:
                yield f"try longer sequences: {length} tokens take {times:.1f} times less work than {kind} attention"
                break
    for leaf in masks:
        scattered = not is_opaque(leaf) and not isinstance(leaf, (*_SIZED, Blocks, Causal, Full))
        if square and scattered and len(list(decompositions(leaf, plan.q_len, plan.kv_len))) == 1:
            times = saving(_planned(plan, _replaced(mask, leaf, Blocks(leaf, _BLOCK))))
            if times >= _ADVISED_SAVING:
                yield f"try {Blocks(leaf, _BLOCK)!r} for {leaf!r}: {times:.1f} times less work than {kind} attention"
    if (plan.fwd_params, plan.bwd_params) != (FwdParams(), BwdParams()):
        default_blocks = make_plan(mask, plan.q_len, plan.kv_len, implementation=plan.implementation)
        if (times := saving(default_blocks)) >= _ADVISED_SAVING:
            yield f"try other block sizes: those of the library take {times:.1f} times less work than {kind} attention"


def _planned(plan: Plan, mask: Mask, length: int | None = None) -> Plan:
    """Returns the plan of another mask or length with the settings of ``plan``."""
    q_len, kv_len = (plan.q_len, plan.kv_len) if length is None else (length, length)
    params = {"fwd_params": plan.fwd_params, "bwd_params": plan.bwd_params}
    return make_plan(mask, q_len, kv_len, **params, implementation=plan.implementation)


def _cost(plan: Plan, h: int = 0) -> int:
    """Returns the estimated cost of mask h."""
    return plan.candidates[h][0].cost


def _replaced(mask: Mask, leaf: Mask, by: Mask) -> Mask:
    """Returns the expression with another mask for one of its leaves."""
    if mask == leaf:
        return by
    if not isinstance(mask, COMBINING):
        return mask
    values = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
    masks = {name: _replaced(value, leaf, by) for name, value in values.items() if isinstance(value, Mask)}
    return dataclasses.replace(mask, **masks)


def mask_name(mask: Mask) -> str:
    """Returns the name of a function, or the formula of any other mask."""
    if isinstance(mask, MaskMod):
        return f"mask_mod {getattr(mask.function, '__name__', repr(mask.function))}"
    return shortened(repr(mask), FORMULA)
