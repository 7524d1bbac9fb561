"""Launches of the Hopper kernel that holds a block of keys and gathers the queries that selected it: gradients.

It takes the place of `triton_gpu.kv_outer.backward`. What selections give is added to dq, dk and dv in float32, so
nothing is kept by selection, and queries take few chunks, or one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..call import Call
from ..gpu import bridge
from ..gpu.lists import Side
from ..gpu.passes import BackwardInputs, SelectedRows, varying_like
from ..gpu.splits import split_work_tiles
from ..operands import Operands
from . import settings, views
from .launch import arrays_of, scaled_neg_lse, size_text
from .query_gather_kernel import QueryGatherConstants, query_gather_kernel
from .tiles import ListShapes

# Steps of a split of a list at most, for some blocks are everybody's choice. With half and twice as many, passes of
# 8192 to 131072 tokens took as long on an H100.
MOST_STEPS = 64
# Bytes that a selection takes while lists are made.
LIST_BYTES = 40


def unsupported(call: Call, operands: Operands, block: int) -> str | None:
    """Why this kernel does not compute the gradients of a call, or None; ``block`` is the keys of a work tile."""
    sizes = operands.query.shape[-1], operands.value.shape[-1]
    if sizes not in [(size, size) for size in settings.HEAD_SIZES]:
        supported = " or ".join(map(str, settings.HEAD_SIZES))
        return f"the Hopper kernel that gathers queries takes heads of {supported}, got {size_text(*sizes)}"
    if block not in settings.STEP_KEYS:
        supported = " or ".join(map(str, settings.STEP_KEYS))
        return f"the Hopper kernel that gathers queries takes tiles of {supported} keys, got {block}"
    if operands.segments is not None:
        return "the Hopper kernel that gathers queries takes no segment ids"
    if call.params[1].deterministic:
        return "gathered queries are added to dq in any order, which BwdParams(deterministic=True) rules out"
    return None


def bytes_needed(rows: SelectedRows) -> int:
    """Bytes of the lists of selections."""
    return rows.selection.ids.size * LIST_BYTES


def backward(rows: SelectedRows, inputs: BackwardInputs, before: Any) -> tuple[jax.Array, Any]:
    """(dq [B, T, N, H] in the dtype of the query, (dk, dv) in float32), the latter added to those ``before``."""
    query, key, value = rows.operands.query, rows.operands.key, rows.operands.value
    (batch, length, _, size), block = query.shape, rows.block
    q, kv = Side(rows.q_order, 1, settings.GROUP_ROWS, gathered=True), Side(rows.kv_order, block, block)
    by_key = rows.lists_by_key(q, kv)
    lists, work = by_key.lists, _work_tiles(rows, q, by_key)
    # Behind the last query come the numbers of rows where there is none: they weigh nothing.
    lse, delta = scaled_neg_lse(inputs.lse, rows.call), inputs.delta * -rows.call.scale
    scalars = [jnp.append(x.swapaxes(1, 2), jnp.float32(end)) for x, end in ((lse, -jnp.inf), (delta, 0.0))]
    dkv = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)] if before is None else before
    arrays = [
        query,
        inputs.dout,
        *(bridge.Tiles.of(x, (1, block, 1, size)) for x in (key, value)),
        *scalars,
        *(work, lists.spans, lists.block, lists.tile, by_key.bits),
        *(jnp.zeros(query.shape, jnp.float32), *dkv),
    ]
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (query, key, value)]
    outputs = [results[0], *(bridge.Tiles.of(x, (1, settings.GROUP_ROWS, 1, size // 2)) for x in results[1:])]
    (batches, kinds), stages = lists.spans.shape[:2], settings.num_stages("query_gather", size, block)
    constants = {
        "A": arrays_of(rows, size),
        "KV": views.rows_view(kv.order, block),
        "L": ListShapes(batches, kinds, lists.group, kv.blocks, len(work), 0),
        "F": QueryGatherConstants(settings.GROUP_ROWS, stages, batch, length, rows.per_query),
        "CONSUMER_REGISTERS": settings.GATHER_REGISTERS[0],
        "PRODUCER_REGISTERS": settings.GATHER_REGISTERS[1],
    }
    aliases = {len(arrays) - 3 + i: i for i in range(3)}
    gradients = bridge.call_gluon(query_gather_kernel, batch * len(work), arrays, outputs, constants, aliases)
    dq, *dkv = (varying_like(query, x) for x in gradients)
    return dq.astype(query.dtype), tuple(dkv)


def _work_tiles(rows: SelectedRows, q: Side, lists: Any) -> jax.Array:
    """The work of programs, int32 [work tiles, LB, 3]: a head and a block, numbered, and the steps from and to."""
    steps, _ = rows.count_steps([(q, lists)], dkv=False, pack=1)
    # One for each head and block, and more for lists of more steps.
    most = steps.shape[1] + rows.heads * q.steps(rows.q_order.rows) // MOST_STEPS
    splits = split_work_tiles(steps, -(-steps // MOST_STEPS), most)
    assert splits is not None
    return splits.steps
