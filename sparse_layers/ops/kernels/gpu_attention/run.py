"""Runs the launches of a route, and hands the results of one to the next.

Kernels read q, k and v by token, in place, whatever their row order. A pass over all tokens writes by token, too, and
starts from the results of earlier passes. So a chain of n such passes reads and writes each row n times, and copies
nothing. Passes over some queries (or keys) come first; their results are few, and stored by row.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...planning.head_groups import HeadGroup
from ...planning.row_orders import RowOrder
from ..call import Call
from ..gpu import bridge
from ..gpu.hardware import MAX_BATCH_ENTRIES
from ..gpu.passes import BackwardInputs, PassResults, varying_like
from ..numerics import limit_base_2, merge_by_lse
from ..operands import Gradients, Operands
from ..pass_blocks import join_heads
from ..transforms import vmap_as_batch
from ..triton_gpu import launch as triton
from . import far_keys, kv_outer
from .route import AGREE, DISAGREE, Launch, Route, route


def forward(implementation: str, call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, Hv] in the dtype of the query, lse [B, T, N] in float32)."""
    return vmap_as_batch(functools.partial(_forward, implementation, call), MAX_BATCH_ENTRIES, operands)


def backward(implementation: str, call: Call, operands: Operands, *by_query: jax.Array) -> Gradients:
    """Returns gradients by name, in the operands' dtypes; ``by_query`` are lse, delta and dout."""
    return vmap_as_batch(functools.partial(_backward, implementation, call), MAX_BATCH_ENTRIES, operands, *by_query)


def _forward(implementation: str, call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    if not operands.query.size:  # no batch entries: there is nothing to launch
        query = operands.query
        out = jnp.zeros((*query.shape[:3], operands.value.shape[-1]), query.dtype)
        return out, jnp.zeros(query.shape[:3], jnp.float32)
    operands, call_route = _prepare_operands(call, operands), route(implementation, call, operands)
    run_q_outer = functools.partial(_run_forward, call_route)
    if call_route.kv_outer_forward is None:
        return run_q_outer(operands)
    return _run_if_selections_disagree(call, functools.partial(kv_outer.forward, call), run_q_outer, operands)


def _backward(
    implementation: str, call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array
) -> Gradients:
    if not operands.query.size:
        query, key, value = map(jnp.zeros_like, operands[:3])
        return Gradients(query, key, value, jax.tree.map(jnp.zeros_like, operands.bias_table))
    args, call_route = (_prepare_operands(call, operands), lse, delta, dout), route(implementation, call, operands)
    run_q_outer, kv_outer_launch = functools.partial(_run_backward, call_route), call_route.kv_outer_backward
    if kv_outer_launch is None:
        return run_q_outer(*args)
    run_kv_outer = functools.partial(kv_outer.backward, kv_outer_launch.engine, call)
    if kv_outer_launch.always:
        return run_kv_outer(*args)
    return _run_if_selections_disagree(call, run_kv_outer, run_q_outer, *args)


def _run_if_selections_disagree(
    call: Call, run_kv_outer: Callable[..., Any], run_q_outer: Callable[..., Any], operands: Operands, *args: jax.Array
) -> Any:
    """Calls one of two functions of the operands and other arrays, by a predicate at run time."""
    disagree = kv_outer.selections_disagree(call, operands, "backward" if args else "forward")
    run_kv_outer = bridge.record_condition(DISAGREE, run_kv_outer)
    run_q_outer = bridge.record_condition(AGREE, run_q_outer)
    return jax.lax.cond(disagree, run_kv_outer, run_q_outer, operands, *args)


def _prepare_operands(call: Call, operands: Operands) -> Operands:
    """Returns the operands as kernels take them.

    `limit_base_2` limits sinks and biases; the Hopper kernels divide biases by the scale. Segment ids of padding are -2
    for queries and -1 for keys.
    """
    sinks, table = operands.sinks, operands.bias_table
    operands = operands._replace(
        sinks=None if sinks is None else limit_base_2(sinks),
        bias_table=None if table is None else limit_base_2(table, call.scale),
    )
    if operands.segments is None:
        return operands
    q, kv = operands.segments
    return operands._replace(segments=(jnp.where(q < 0, -2, q), jnp.maximum(kv, -1)))


def _run_forward(planned: Route, operands: Operands) -> tuple[jax.Array, jax.Array]:
    results = [
        _run_group(heads, [launch for launch in planned.forward if launch.head_group == head_group], operands)
        for head_group, heads in enumerate(planned.groups)
    ]
    outs, lses = zip(*results, strict=True)
    return join_heads([x.astype(operands.query.dtype) for x in outs]), join_heads(lses)


def _run_group(heads: HeadGroup, launches: list[Launch], operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, heads, Hv], lse [B, T, heads]) of a head group."""
    sinks = operands.sinks
    # Kernels start from the sinks if only one pass starts each query; otherwise sinks are merged at the end.
    # Nor if Hopper kernels leave a bias out: their lse lacks it.
    omits_bias = any(x.engine == "hopper" and x.group_pass.bias_entry is not None for x in launches)
    starts_once = sum(not x.group_pass.q_order.covers_all_tokens for x in launches) < min(2, len(launches))
    in_kernels = starts_once and not omits_bias
    state = None
    for launch in launches:
        if launch.accumulates:
            has_started = state is not None and state.order.natural
            state = _launch_forward(launch, operands, state, sinks if in_kernels and not has_started else None)
        else:
            assert state is not None
            update = _launch_forward(launch, operands, None, None)
            out, lse = merge_by_lse(state.by_token(), update.by_token())
            state = PassResults(RowOrder(launch.group_pass.q_order.length), (out, lse.swapaxes(1, 2)))
    if state is None:
        zeros = jnp.zeros_like(heads.select(operands.query)[..., 0], jnp.float32)
        out, lse = zeros[..., None] * jnp.zeros(operands.value.shape[-1]), zeros - jnp.inf
    else:
        out, lse = state.by_token()
        plan = launches[0].group_pass.call.plan
        if omits_bias and plan is not None and not plan.allows_diagonal:
            # An entry of -inf may hide all keys of a query, and no later pass clears what their kernel returned.
            out = jnp.where((lse == -jnp.inf)[..., None], 0, out)
    if sinks is not None and not in_kernels:
        sinks, out = jnp.broadcast_to(heads.select(sinks, 0), lse.shape), out.astype(lse.dtype)
        out, lse = merge_by_lse((out, lse), (jnp.zeros_like(out), sinks))
    return out, lse


def _launch_forward(
    launch: Launch, operands: Operands, earlier: PassResults | None, sinks: jax.Array | None
) -> PassResults:
    group_pass = launch.group_pass.bind(operands)
    if launch.engine == "triton":
        return triton.forward(group_pass, earlier, sinks, launch.in_input_dtype)
    from ..hopper_gpu import launch as hopper

    return hopper.forward(group_pass, earlier, sinks, launch.in_input_dtype)


def _run_backward(planned: Route, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    query, key, value, table = operands.query, operands.key, operands.value, operands.bias_table
    inputs = BackwardInputs(lse.swapaxes(1, 2), delta.swapaxes(1, 2), dout.astype(query.dtype))
    dqs: list[PassResults | None] = [None] * len(planned.groups)
    dkv: PassResults | None = None
    dtable = None if table is None else varying_like(query, jnp.zeros_like(table))
    far_heads = dict[tuple[int, int], int]()  # heads of which Hopper kernels left an entry out
    for launch in planned.backward:
        group_pass, head_group = launch.group_pass.bind(operands), launch.head_group
        if launch.kernel == "dkv":
            dkv_of_launch = triton.dkv(group_pass, inputs, dkv if launch.accumulates else None, launch.in_input_dtype)
            dkv = dkv_of_launch if dkv is None or launch.accumulates else dkv.add(dkv_of_launch)
            continue
        earlier = dqs[head_group]
        earlier_dq = earlier if launch.accumulates else None
        dq, dkv_of_launch, dtable_of_launch = _launch_dq(launch, group_pass, inputs, earlier_dq, dkv)
        if dtable is not None and dtable_of_launch is not None:
            dtable = dtable + dtable_of_launch
        dqs[head_group] = dq if earlier is None or launch.accumulates else earlier.add(dq)
        if launch.engine == "hopper" and group_pass.bias_entry is not None:
            far_heads[group_pass.first, group_pass.step] = group_pass.bias_entry
        dkv = dkv if dkv_of_launch is None else dkv_of_launch
    if table is not None:
        assert dtable is not None
        for (first, step), entry in far_heads.items():
            heads = slice(first, None, step)
            dtable = far_keys.add_gradient(dtable, table, entry, heads, operands.sinks, lse, delta)
    dq_groups = [
        jnp.zeros_like(heads.select(query)) if dq is None else dq.by_token()[0].astype(query.dtype)
        for heads, dq in zip(planned.groups, dqs, strict=True)
    ]
    dk, dv = (jnp.zeros_like(key), jnp.zeros_like(value)) if dkv is None else dkv.by_token()
    return Gradients(join_heads(dq_groups), dk.astype(key.dtype), dv.astype(value.dtype), dtable)


def _launch_dq(
    launch: Launch, group_pass, inputs: BackwardInputs, earlier: PassResults | None, dkv: PassResults | None
) -> tuple[PassResults, PassResults | None, jax.Array | None]:
    with_dkv = launch.kernel == "dqkv"
    earlier_kv = dkv if with_dkv else None
    if launch.engine == "triton":
        return triton.dq(
            group_pass, inputs, earlier, earlier_kv, launch.in_input_dtype, launch.kv_in_input_dtype, with_dkv
        )
    from ..hopper_gpu import launch as hopper

    return *hopper.dqkv(group_pass, inputs, earlier, earlier_kv, launch.kv_in_input_dtype), None
