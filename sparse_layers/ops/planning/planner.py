"""The planner: `make_plan` compares chains for a mask and two lengths, and returns the cheapest as a `Plan`.

Each union of patterns can be computed in several ways, and the result is exact in all of them::

    Causal() & (Window(128) | Strided(128))
      natural order                                            one pass over both patterns
      natural order + residue-major order, stride 128          a chain: the window, then the stride without the window

`decompositions` (terms.py) lists these ways, `PassCandidate` (costs.py) says what each pass costs.
"""

import numpy as np

from ...arguments.checks import Length, checked, strict_kwargs
from ...masks.adapters import MaskLike
from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from .binding import masks_for_lengths
from .changing_masks import note_masks
from .costs import PassCandidate, count_blocks, rows_of_blocks
from .params import BwdParams, FwdParams, resolve_params
from .plan import Candidate, Pass, Plan
from .platforms import TUNING, Tuning, check_implementation, default_implementation
from .row_orders import Reordered, RowOrderPair
from .terms import decompositions


@strict_kwargs
def make_plan(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    implementation: str | None = None,
) -> Plan:
    """Plans attention under a mask: its passes, their row orders and their blocks. Cached by content.

    Args:
      mask: whatever `as_masks` takes: a mask, a preset's name, a numpy bool array, or a sequence of these (head h takes
        entry h % len).
      q_len: number of queries T, >= 1.
      kv_len: number of keys S; defaults to q_len.
      fwd_params: block sizes of the forward pass; None leaves the choice to the library.
      bwd_params: block sizes of the backward pass; None means those of the forward pass.
      implementation: one of `implementations()`, whose block sizes are used where the parameters leave them open;
        None means the default of this platform. Every implementation computes every plan.

    Returns:
      The `Plan`; pass it to `block_sparse_attention` in place of the mask.

    Raises:
      ValueError: a length is no integer from 1 to 2**31 - 2, an array's shape differs from the lengths, or
        implementation is unknown.
      TypeError: mask is none of the above.

    Example:
      >>> import sparse_layers as sl
      >>> plan = sl.make_plan(sl.Causal() & (sl.Window(128) | sl.Strided(128)), 4096)
      >>> [str(p.q_order) for p in plan.chains[0]]
      ['natural order', 'residue-major order, stride 128']
    """
    kv_len = q_len if kv_len is None else kv_len
    q_len, kv_len = checked("q_len", q_len, Length), checked("kv_len", kv_len, Length)
    masks = masks_for_lengths(mask, q_len, kv_len)
    fwd_params, bwd_params = resolve_params(fwd_params, bwd_params)
    check_implementation(implementation)
    note_masks(masks)
    name = implementation or default_implementation()
    return _make_plan(masks, q_len, kv_len, fwd_params, bwd_params, name, TUNING[name])


@bounded_cache()
def _make_plan(masks, q_len, kv_len, fwd_params, bwd_params, implementation, tuning) -> Plan:
    """Returns the plan of checked arguments."""
    # By tuning, not by name: implementations that are tuned alike share their chains.
    options = fwd_params, bwd_params, tuning
    chains, candidates = zip(*(_make_chain(mask, q_len, kv_len, *options) for mask in masks), strict=True)
    return Plan(masks, q_len, kv_len, fwd_params, bwd_params, implementation, chains, candidates)


@bounded_cache()
def _make_chain(
    mask: Mask, q_len: int, kv_len: int, fwd_params: FwdParams, bwd_params: BwdParams, tuning: Tuning
) -> tuple[tuple[Pass, ...], tuple[Candidate, ...]]:
    """Returns the cheapest chain for one mask, and all candidates, the cheapest first."""
    weighed = []
    for number, (name, terms) in enumerate(decompositions(mask, q_len, kv_len, tuning)):
        passes = [PassCandidate(Reordered(term, *orders), fwd_params, tuning) for orders, term in terms]
        passes = [one for one in passes if one.blocks]
        weighed.append((sum(one.cost for one in passes), number, name, passes))
    weighed.sort(key=lambda entry: entry[:2])
    chain = tuple(finish_pass(one, bwd_params) for one in weighed[0][3])
    return chain, tuple(Candidate(name, cost) for cost, _, name, _ in weighed)


def finish_pass(candidate: PassCandidate, params: BwdParams) -> Pass:
    """Returns the pass of a candidate, with the blocks of its backward pass."""
    mask, bwd_shape = candidate.mask, candidate.bwd_shape(params)
    bwd_blocks = count_blocks(mask, bwd_shape)[0]
    return Pass(mask.q_order, mask.kv_order, mask, candidate.shape, bwd_shape, candidate.blocks, bwd_blocks)


@bounded_cache()
def decomposition_costs(
    mask: Mask, length: int, tuning: Tuning, num_chunks: int
) -> list[list[tuple[RowOrderPair, Mask, np.ndarray]]]:
    """Returns, of each of the `decompositions`, the terms that allow any pair: (row orders, term, cost of each chunk).

    Queries are cut into ``num_chunks`` of equal length; costs are in pairs. Grids are not cut into tiles.
    """
    costs = []
    for _, terms in decompositions(mask, length, length):
        costs_of_terms = []
        for orders, term in terms:
            candidate = PassCandidate(Reordered(term, *orders), FwdParams(), tuning)
            if candidate.blocks:
                token = np.minimum(orders[0].token(rows_of_blocks(candidate)), length - 1)
                fraction = np.bincount(token * num_chunks // length, minlength=num_chunks) / candidate.blocks
                costs_of_terms.append((orders, term, candidate.cost * fraction))
        costs.append(costs_of_terms)
    return costs
