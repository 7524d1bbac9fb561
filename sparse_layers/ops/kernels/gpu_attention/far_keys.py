"""Keys that are farther than the table of a bias reaches: there the bias is one number a head.

A number that is added to all logits of a pass is a factor of its weights. So the Hopper kernels leave it out, and lse
gets it. They compute the gradients of these passes, and Triton those of nearer keys, where the table has an entry for
each distance.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from ....masks.algebra import And, Not
from ....masks.bounded_cache import bounded_cache
from ....masks.primitives import Window
from ...planning.plan import Plan
from ...planning.planner import make_plan
from ..call import Call
from ..numerics import sinks_gradient
from ..operands import Operands

# Far keys per query, in blocks, from which a separate pass pays: it reads and writes results once more. On an H200,
# `fixed` with 512 takes 12 % longer with it, forward and backward, and causal attention with 1,200 takes 5 % less.
MIN_FAR_KEYS = 768


def planned(call: Call, operands: Operands) -> Plan | None:
    """Returns the plan that runs: if a bias has a table, with passes of their own for the far earlier keys.

    The gradient of their entry follows from the sum of all gradients of logits, which is 0 but for the sink. So lse
    must have no gradient, and the keys must all be on the device.
    """
    is_whole = call.plan is not None and not call.plans_by_rank and not call.return_lse
    is_planned = operands.mask is None and operands.selection is None
    counts_tokens = call.bias_orders is None and call.soft_cap is None and call.bias_center > 0
    if operands.bias_table is None or not (is_whole and is_planned and counts_tokens):
        return call.plan
    assert call.plan is not None
    return _split(call.plan, call.bias_center, MIN_FAR_KEYS)


@bounded_cache()
def _split(plan: Plan, center: int, min_far_keys: int) -> Plan:
    """Splits chains at the distance ``center``, from which all earlier keys get entry 0.

    Chains with few far keys, or more near ones, stay as they are.
    """
    near_keys = Window(center - 1, None)
    near_plan, far_plan = (
        make_plan(
            tuple(And(mask, keys) for mask in plan.masks),
            plan.q_len,
            plan.kv_len,
            fwd_params=plan.fwd_params,
            bwd_params=plan.bwd_params,
            implementation=plan.implementation,
        )
        for keys in (near_keys, Not(near_keys))
    )
    chains = []
    for chain, near_chain, far_chain in zip(plan.chains, near_plan.chains, far_plan.chains, strict=True):
        far_pairs, near_pairs = (
            sum(x.fwd_blocks * math.prod(x.fwd_shape) for x in one) for one in (far_chain, near_chain)
        )
        if far_pairs > max(near_pairs, min_far_keys * plan.q_len):
            chain = (*(dataclasses.replace(x, bias_entry=0) for x in far_chain), *near_chain)
        chains.append(chain)
    return dataclasses.replace(plan, chains=tuple(chains))


def add_gradient(
    dtable: jax.Array,
    table: jax.Array,
    entry: int,
    heads: slice,
    sinks: jax.Array | None,
    lse: jax.Array,
    delta: jax.Array,
) -> jax.Array:
    """Returns dtable [N, L] with the part of ``entry`` that kernels left out, for some heads; 0 of an entry of -inf.

    The gradients of the logits of a query sum to that of its sink with the opposite sign. lse and delta are [B, T, N].
    """
    missing = -dtable.sum(1)
    if sinks is not None:
        missing -= sinks_gradient(sinks, lse, delta)
    return dtable.at[heads, entry].add(jnp.where(table[:, entry] == -jnp.inf, 0, missing)[heads])
