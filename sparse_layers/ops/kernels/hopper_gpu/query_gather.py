"""Launches of the Hopper kernel that holds a block of keys and gathers the queries that selected it: gradients.

It replaces `triton_gpu.kv_outer.backward`. The kernel adds to dq, dk and dv in float32 and stores no results by
selection, so queries come in few chunks, or in one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..call import Call
from ..gpu import bridge
from ..gpu.lists import RowTiling
from ..gpu.passes import BackwardInputs, SelectedRows, varying_like
from ..gpu.splits import split_work_tiles
from ..operands import Operands
from . import settings, views
from .launch import array_shapes, scaled_neg_lse
from .query_gather_kernel import QueryGatherConstants, query_gather_kernel
from .tiles import ListShapes

# Steps of a split at most, as some blocks are selected by nearly all queries. With half and twice as many, passes of
# 8192 to 131072 tokens took as long on an H100.
MAX_STEPS = 64
# Bytes of a selection while lists are built.
LIST_BYTES = 40


def unsupported(call: Call, operands: Operands, block: int) -> str | None:
    """Returns why this kernel cannot compute the gradients of a call, or None; ``block`` is the keys of a work tile."""
    sizes = operands.query.shape[-1], operands.value.shape[-1]
    if sizes not in [(size, size) for size in settings.GATHER_HEAD_SIZES]:
        supported = " or ".join(map(str, settings.GATHER_HEAD_SIZES))
        return f"the Hopper kernel that gathers queries takes heads of {supported}, got {settings.size_text(*sizes)}"
    if block not in settings.STEP_KEYS:
        assert operands.selection is not None
        got = operands.selection.block
        return f"the Hopper kernel that gathers queries takes blocks of 64, 128, 256, 384 or 512 keys, got {got}"
    if operands.segments is not None:
        name = "segment ids" if operands.order_ids is None else "order ids"
        return f"the Hopper kernel that gathers queries takes no {name}"
    if call.params[1].deterministic:
        return "gathered queries are added to dq in any order, which BwdParams(deterministic=True) rules out"
    return None


def bytes_needed(rows: SelectedRows) -> int:
    """Returns the bytes of the lists of selections."""
    return rows.selection.ids.size * LIST_BYTES


def backward(rows: SelectedRows, inputs: BackwardInputs, earlier: Any) -> tuple[jax.Array, Any]:
    """Returns (dq [B, T, N, H] in the dtype of the query, (dk, dv) in float32); ``earlier`` are added to the latter."""
    query, key, value = rows.operands.query, rows.operands.key, rows.operands.value
    (batch, length, _, size), block = query.shape, rows.block
    q, kv = RowTiling(rows.q_order, 1, settings.GROUP_ROWS, gathers_rows=True), RowTiling(rows.kv_order, block, block)
    pass_lists = rows.lists_by_key(q, kv)
    lists, work_tiles = pass_lists.block_lists, _work_tiles(rows, q, pass_lists)
    # The last element is that of rows without a query: their weights are 0.
    lse, delta = scaled_neg_lse(inputs.lse, rows.call), inputs.delta * -rows.call.scale
    scalars = [jnp.append(x.swapaxes(1, 2), jnp.float32(end)) for x, end in ((lse, -jnp.inf), (delta, 0.0))]
    dkv = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)] if earlier is None else earlier
    arrays = [
        query,
        inputs.dout,
        *(bridge.TensorDescriptor.of(x, (1, block, 1, size)) for x in (key, value)),
        *scalars,
        *(work_tiles, lists.spans, lists.inner_block, lists.mask_tile, pass_lists.mask_bits),
        *(jnp.zeros(query.shape, jnp.float32), *dkv),
    ]
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (query, key, value)]
    outputs = [
        results[0],
        *(bridge.TensorDescriptor.of(x, (1, settings.GROUP_ROWS, 1, size // 2)) for x in results[1:]),
    ]
    sizes = settings.PaddedSizes(size, size, size)
    (batches, kinds), stages = lists.spans.shape[:2], settings.num_stages("query_gather", sizes, block)
    constants = {
        "A": array_shapes(rows, sizes),
        "KV": views.rows_view(kv.order, block),
        "L": ListShapes(batches, kinds, lists.heads_per_list, kv.num_blocks, len(work_tiles), 0),
        "F": QueryGatherConstants(settings.GROUP_ROWS, stages, batch, length, rows.per_query),
        "CONSUMER_REGISTERS": settings.GATHER_REGISTERS[0],
        "PRODUCER_REGISTERS": settings.GATHER_REGISTERS[1],
    }
    aliases = {len(arrays) - 3 + i: i for i in range(3)}
    gradients = bridge.call_gluon(query_gather_kernel, batch * len(work_tiles), arrays, outputs, constants, aliases)
    dq, *dkv = (varying_like(query, x) for x in gradients)
    return dq.astype(query.dtype), tuple(dkv)


def _work_tiles(rows: SelectedRows, q: RowTiling, lists: Any) -> jax.Array:
    """Returns the work tiles, int32 [work tiles, LB, 3]: the number of a head and block, first step, end of steps."""
    steps, _ = rows.count_steps([(q, lists)], transposed=False, pack=1)
    # One for each head and block, and one more for every MAX_STEPS steps.
    most = steps.shape[1] + rows.heads * q.num_steps(rows.q_order.rows) // MAX_STEPS
    splits = split_work_tiles(steps, -(-steps // MAX_STEPS), most)
    assert splits is not None
    return splits.steps
