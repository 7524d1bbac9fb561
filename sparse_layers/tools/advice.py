"""Reasons why a plan saves nothing, and changes under which one would, each weighed by a plan of its own."""

import dataclasses
from collections.abc import Iterator

from ..masks.adapters import MaskMod
from ..masks.algebra import Array, Blocks, Mask
from ..masks.counting import Count
from ..masks.grids import ColumnMajor, Neighborhood, OnGrid
from ..masks.pictures import FORMULA, shortened
from ..masks.primitives import Causal, Full, Random
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import BLOCK, Plan, decompositions, make_plan
from ..ops.planning.report import dense_pairs, dense_plan
from .recognition import COMBINING, is_opaque, leaves, recognize

_NOTHING = 1.1  # a smaller saving is none
_GAIN = 1.5  # the least saving that a change is advised for
_LONGEST = 1 << 16  # tokens; more take seconds to plan
_LENGTHS = 6  # how often a length is doubled
_SIZED = Array, OnGrid, ColumnMajor, Neighborhood  # masks that end where their array or grid ends


def advice(plan: Plan, h: int, found: Count) -> Iterator[str]:
    """Yields lines on mask h: why nothing is saved and what to try, and a cheaper form of a mask that is a function."""
    mask, cost = plan.masks[h], _cost(plan, h)
    opaque = list(dict.fromkeys(_name(leaf) for leaf in leaves(mask) if is_opaque(leaf)))
    dense, kind = dense_plan(plan, found.causal)
    saves_nothing = cost > 0 and _cost(dense) < _NOTHING * cost
    if saves_nothing:
        yield f"nothing is saved: {_reason(plan, h, found, dense, kind, opaque)}"
    rewritten = recognize(mask, plan.q_len) if opaque and plan.q_len == plan.kv_len else None
    if rewritten is not None:
        expression, pairs = rewritten
        times = cost / max(1, _cost(_planned(plan, expression)))
        gain = f"costs {times:.1f} times less" if times >= _NOTHING else "costs the same and is planned faster"
        yield f"try {expression!r}: it answers the same for {pairs} compared pairs and {gain}"
    elif any(isinstance(leaf, MaskMod) for leaf in leaves(mask)):
        yield (
            f"try Causal, Window, Strided, ... with &, | and ~ for {' and '.join(opaque)}: planned from its answers "
            "alone, a function has no row orders"
        )
    if saves_nothing:
        changes = list(_changes(plan, mask, found, kind))
        yield from changes
        if not changes and rewritten is None and plan.q_len == plan.kv_len:
            allows_all = found.pairs == dense_pairs(plan, found.causal)
            rule = "allows fewer pairs" if allows_all else "lets neighbouring queries see the same blocks of keys"
            yield f"try a pattern that {rule}: presets() lists some"


def _reason(plan: Plan, h: int, found: Count, dense: Plan, kind: str, opaque: list[str]) -> str:
    every, blocks, shape = dense_pairs(plan, found.causal), dense.chains[0][0].fwd_blocks, dense.chains[0][0].fwd_shape
    if found.looked_at is None and found.pairs == every:
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
    share = f"{found.pairs / every:.2%} of its pairs"
    return f"all {blocks} blocks of {kind} attention hold allowed pairs, {share}{costly}{unknown}"


def _changes(plan: Plan, mask: Mask, found: Count, kind: str) -> Iterator[str]:
    """Yields changes that save: longer sequences, blocks in place of scattered keys, the library's block sizes."""

    def saving(changed: Plan) -> float:
        return _cost(dense_plan(changed, found.causal)[0]) / max(1, _cost(changed))

    masks = list(dict.fromkeys(leaves(mask)))
    square = plan.q_len == plan.kv_len
    endless = not any(is_opaque(leaf) or isinstance(leaf, (*_SIZED, Random)) for leaf in masks)
    if square and endless and not set(masks) <= {Causal(), Full()}:
        for length in (plan.q_len << i for i in range(1, _LENGTHS + 1)):
            if length <= _LONGEST and (times := saving(_planned(plan, mask, length))) >= _GAIN:
                yield f"try longer sequences: {length} tokens take {times:.1f} times less work than {kind} attention"
                break
    for leaf in masks:
        scattered = not is_opaque(leaf) and not isinstance(leaf, (*_SIZED, Blocks, Causal, Full))
        if square and scattered and len(list(decompositions(leaf, plan.q_len, plan.kv_len))) == 1:
            times = saving(_planned(plan, _replaced(mask, leaf, Blocks(leaf, BLOCK))))
            if times >= _GAIN:
                yield f"try {Blocks(leaf, BLOCK)!r} for {leaf!r}: {times:.1f} times less work than {kind} attention"
    if (plan.fwd_params, plan.bwd_params) != (FwdParams(), BwdParams()):
        chosen = make_plan(mask, plan.q_len, plan.kv_len, implementation=plan.implementation)
        if (times := saving(chosen)) >= _GAIN:
            yield f"try other block sizes: those of the library take {times:.1f} times less work than {kind} attention"


def _planned(plan: Plan, mask: Mask, length: int | None = None) -> Plan:
    """The plan of another mask or length with the settings of ``plan``."""
    q_len, kv_len = (plan.q_len, plan.kv_len) if length is None else (length, length)
    params = {"fwd_params": plan.fwd_params, "bwd_params": plan.bwd_params}
    return make_plan(mask, q_len, kv_len, **params, implementation=plan.implementation)


def _cost(plan: Plan, h: int = 0) -> int:
    return plan.candidates[h][0][1]


def _replaced(mask: Mask, leaf: Mask, by: Mask) -> Mask:
    """The expression with another mask for one of its leaves."""
    if mask == leaf:
        return by
    if not isinstance(mask, COMBINING):
        return mask
    values = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
    masks = {name: _replaced(value, leaf, by) for name, value in values.items() if isinstance(value, Mask)}
    return dataclasses.replace(mask, **masks)


def _name(mask: Mask) -> str:
    """A function by its name, any other mask by its formula."""
    if isinstance(mask, MaskMod):
        return f"mask_mod {getattr(mask.function, '__name__', repr(mask.function))}"
    return shortened(repr(mask), FORMULA)
