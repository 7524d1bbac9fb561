"""The passes of a call with a bias that has a table: distances must be diagonals of tiles, see `biases.py`."""

import dataclasses

from ....masks.algebra import And, Mask, Or
from ....masks.primitives import Strided
from ...planning.costs import PassCandidate
from ...planning.plan import Candidate, Pass, Plan
from ...planning.planner import finish_pass
from ...planning.platforms import TUNING
from ...planning.row_orders import RowOrder
from ..call import Call
from ..operands import Operands


def planned(call: Call, operands: Operands) -> Plan | None:
    """Returns the plan that runs: chains whose distances are no diagonals give way to one pass in natural order."""
    plan, (fwd_params, bwd_params) = call.plan, call.params
    is_planned = operands.mask is None and operands.selection is None
    if plan is None or operands.bias_table is None or not is_planned:
        return plan
    chains, candidates = [*plan.chains], [*plan.candidates]
    for h, mask in enumerate(call.masks):
        if any(distance_step(block_pass) is None for block_pass in chains[h]):
            natural = PassCandidate(mask, fwd_params, TUNING["pallas_tpu"])
            chains[h] = (finish_pass(natural, bwd_params),)
            name = str(mask.q_order)
            others = (x for x in candidates[h] if x.orders != name)
            candidates[h] = (Candidate(name, natural.cost), *others)
    return dataclasses.replace(plan, chains=tuple(chains), candidates=tuple(candidates))


def notes(call: Call, operands: Operands) -> list[str]:
    """Returns a sentence if chains give way to natural order, and the reason."""
    plan = planned(call, operands)
    if plan is None or plan.chains == call.chains:
        return []
    return [
        "natural order runs in the place of cheaper chains, because a bias with a table needs rows in natural order, a "
        "range of tokens, or the residues of a stride"
    ]


def distance_step(block_pass: Pass | None = None) -> tuple[int, int] | None:
    """Returns (step, offset) if all pairs of a pass are ``step * (column - row) + offset`` tokens apart, else None."""
    if block_pass is None:  # its blocks are known at run time only, in natural order
        return 1, 0
    orders = block_pass.q_order, block_pass.kv_order
    first_q, first_k = map(_first_of_contiguous, orders)
    if first_q is not None and first_k is not None:
        return 1, first_k - first_q
    stride = orders[0].shape[-1]
    is_residue_major = all(x == RowOrder.residue_major(x.length, stride) for x in orders)
    if is_residue_major and orders[0].shape == orders[1].shape and _keeps_residue(block_pass.mask.mask, stride):
        return stride, 0
    return None


def _first_of_contiguous(order: RowOrder) -> int | None:
    """Returns the token of row 0 if row r is r tokens further, else None."""
    if order.natural:
        return 0
    is_one_range = order == RowOrder.periodic(order.length, order.shape[-1], order.offset, order.offset + order.rows)
    return order.offset if is_one_range and order.shape[0] == 1 else None


def _keeps_residue(mask: Mask, stride: int) -> bool:
    """True if a mask certainly allows no pairs of tokens of different residues of a stride."""
    if isinstance(mask, And | Or):
        sides = _keeps_residue(mask.left, stride), _keeps_residue(mask.right, stride)
        return any(sides) if isinstance(mask, And) else all(sides)
    return isinstance(mask, Strided) and mask.stride % stride == 0
