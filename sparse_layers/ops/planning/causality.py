"""Causality of a mask: its formula shows it, or the blocks of ``mask & ~Causal()``, never an array of T x T."""

import re

import numpy as np

from ... import masks
from ...masks.algebra import And, Mask, Not, Or
from ...masks.bounded_cache import bounded_cache
from ...masks.primitives import Causal, Empty, LogSparse, Random, Window
from .blocks import active_blocks, outside_trace
from .plan import Pass
from .planner import make_plan


def is_causal(mask: Mask, length: int) -> bool:
    """True if no query of a mask sees a later key, in a sequence of ``length`` tokens; exact."""
    return look_ahead(mask, length) is None


@bounded_cache()
def look_ahead(mask: Mask, length: int) -> tuple[int, int] | None:
    """Returns a query and a later key that it sees, in a sequence of ``length`` tokens; None if there is no such pair.

    Example:
      >>> import sparse_layers as sl
      >>> look_ahead(sl.Window(7) | sl.Global(2), 64), look_ahead(sl.Causal() & sl.Global(2), 64)
      ((0, 1), None)
    """
    if _causal_by_formula(mask):
        return None
    chain = make_plan(mask & Not(Causal()), length).chains[0]
    return _first_pair(chain[0]) if chain else None


def check_causal(mask: Mask, length: int, name: str, rule: str, otherwise: str = "") -> None:
    """Refuses a mask in which a query sees a later key; the error names the pair, and the causal mask to write.

    ``rule`` is the reason why the argument ``name`` must be causal, ``otherwise`` what else may be written.
    """
    pair = look_ahead(mask, length)
    if pair is not None:
        raise ValueError(
            f"{name}: {rule}, got {mask!r}, where query {pair[0]} sees the later key {pair[1]}: write "
            f"{_pasteable(Causal() & mask)}{otherwise}"
        )


def _pasteable(mask: Mask) -> str:
    """Returns a mask as code with ``sl.``, ``sl.Causal() & ...`` if it has parts without code, such as arrays."""
    text = repr(mask)
    if not re.fullmatch(r"[\w\s(),&|~.=-]*", text):
        return "sl.Causal() & ..."
    return re.sub(r"\b[A-Z]\w*(?=\()", lambda name: "sl." * hasattr(masks, name[0]) + name[0], text)


def _causal_by_formula(mask: Mask) -> bool:
    """True if the operators of a mask show that it is causal at any length; False if they leave it open."""
    if isinstance(mask, And):
        return _causal_by_formula(mask.left) or _causal_by_formula(mask.right)
    if isinstance(mask, Or):
        return _causal_by_formula(mask.left) and _causal_by_formula(mask.right)
    if isinstance(mask, Window):
        return mask.right == 0
    if isinstance(mask, Random):
        return mask.size is None
    return isinstance(mask, Causal | Empty | LogSparse)


@outside_trace()
def _first_pair(block_pass: Pass) -> tuple[int, int]:
    """Returns the first query in the first block of a pass that sees a key, and that key, as tokens."""
    height, width = block_pass.fwd_shape
    rows, columns = block_pass.padded(block_pass.fwd_shape)
    grid = active_blocks(block_pass.mask, rows // height, columns // width, height, width)
    q, k = np.arange(height) + int(grid.rows[0]) * height, np.arange(width) + int(grid.columns[0]) * width
    by_row = (np.flatnonzero(np.broadcast_to(np.asarray(block_pass.mask(row, k)), k.shape)) for row in q[:, None])
    row, column = next((row, keys[0]) for row, keys in enumerate(by_row) if keys.size)
    return int(block_pass.q_order.token(q[row])), int(block_pass.kv_order.token(k[column]))
