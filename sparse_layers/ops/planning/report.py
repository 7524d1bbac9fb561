"""What a plan computes, in words and as HTML for notebooks: its passes, the blocks that they keep, and the saving."""

import html

import numpy as np

from ...masks.counting import count
from ...masks.pictures import FORMULA, shortened, svg
from ...masks.primitives import Causal, Full
from ...masks.states import FULL, PARTIAL
from .block_lists import planned_block_pairs
from .plan import Pass, Plan, make_plan

# Of a plan in a notebook: most masks, most cells on a side of a picture, and most pairs looked at to find out whether a
# mask is causal.
_MASKS, _SIDE, _LOOKS = 8, 48, 1 << 22


def heads(h: int, period: int) -> str:
    """Which heads take mask h of so many."""
    return "all heads" if period == 1 else f"heads {h}, {h + period}, ..."


def dense_plan(plan: Plan, is_causal: bool) -> tuple[Plan, str]:
    """The plan of causal or full attention at a plan's lengths, with its settings; and which, "causal" or "full"."""
    options = {"fwd_params": plan.fwd_params, "bwd_params": plan.bwd_params, "implementation": plan.implementation}
    mask, kind = (Causal(), "causal") if is_causal else (Full(), "full")
    return make_plan(mask, plan.q_len, plan.kv_len, **options), kind


def dense_pairs(plan: Plan, is_causal: bool) -> int:
    """The pairs that causal or full attention allows at a plan's lengths."""
    square = min(plan.q_len, plan.kv_len)
    later = (plan.q_len - square) * plan.kv_len  # of queries beyond the last key
    return square * (square + 1) // 2 + later if is_causal else plan.q_len * plan.kv_len


def saving(plan: Plan, h: int, is_causal: bool) -> str:
    """Returns the saving of a mask's chain over attention to all keys, or over causal attention if it is causal."""
    reference, kind = dense_plan(plan, is_causal)
    dense, cost = reference.candidates[0][0][1], plan.candidates[h][0][1]
    text = f"{dense / cost:.1f} times less work than {kind} attention" if cost else "nothing to compute"
    return f"{text} (cost {cost:.3g} against {dense:.3g} pairs)"


def kept(block_pass: Pass) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, column and state of each block that the forward of a pass computes."""
    found, _ = planned_block_pairs([block_pass.mask], block_pass.fwd_shape, False)
    return found.row[0, 0], found.column[0, 0], found.kind[0, 0]


# --- in notebooks ----------------------------------------------------------------------------------------------------


def as_html(plan: Plan) -> str:
    """A table of a plan's passes with pictures of the blocks that they keep, and for each mask the saving.

    Example:
      >>> import sparse_layers as sl
      >>> as_html(sl.make_plan(sl.Causal(), 256))[:57]
      '<table><caption>Plan of 256 queries and 256 keys</caption'
    """
    lines = []
    for h, mask in enumerate(plan.masks[:_MASKS]):
        formula = html.escape(shortened(repr(mask), FORMULA))
        causal = count(mask, plan.q_len, plan.kv_len, _LOOKS).causal
        title = f"{heads(h, len(plan.masks))}: <code>{formula}</code><br>{saving(plan, h, causal)}"
        lines.append(f'<tr><th colspan="4" style="text-align: left">{title}</th></tr>')
        for number, block_pass in enumerate(plan.chains[h], 1):
            row = (f"pass {number}", html.escape(block_pass.order_text), block_pass.block_text, svg(_cells(block_pass)))
            lines.append(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>")
    if more := len(plan.masks) - _MASKS:
        lines += [f'<tr><td colspan="4">and {more} masks more</td></tr>'] * (more > 0)
    return f"<table><caption>Plan of {plan.q_len} queries and {plan.kv_len} keys</caption>{''.join(lines)}</table>"


def _cells(block_pass: Pass) -> np.ndarray:
    """The grid of blocks in row space, its cells FULL, PARTIAL or EMPTY, or a smaller one whose cells hold several."""
    shape = [n // side for n, side in zip(block_pass.padded(block_pass.fwd_shape), block_pass.fwd_shape, strict=True)]
    step = -(-max(shape) // _SIDE)
    rows, columns, states = kept(block_pass)
    full, some = np.zeros((2, *(-(-n // step) for n in shape)), int)
    np.add.at(some, (rows // step, columns // step), 1)
    np.add.at(full, (rows // step, columns // step), states == FULL)
    sizes = [np.bincount(np.arange(n) // step) for n in shape]
    return np.where(full == np.outer(*sizes), FULL, np.where(some > 0, PARTIAL, 0)).astype(np.int8)
