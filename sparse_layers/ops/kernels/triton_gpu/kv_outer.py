"""Launches of the plain Triton kernels that hold a block of keys and gather the queries that selected it.

They compute `SelectedRows`: each selection of a single query has a result of its own. `gpu_attention/kv_outer.py` puts
the results of a query together.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ...planning.params import BwdParams
from ..call import Call
from ..gpu import hardware
from ..gpu.lists import Side
from ..gpu.passes import BackwardInputs, GroupPass, Rows, SelectedRows
from ..operands import Operands
from .kv_outer_kernel import kv_outer_kernel
from .launch import Prepared, block_shape, dkv_of, head_sizes, prepare
from .settings import Settings, choose, shared_memory

KERNELS = "kv_outer", "dqkv"  # as their settings are called


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why the selections of a call cannot be computed this way, or None."""
    selection = operands.selection
    if selection is None or not selection.ids.shape[-1]:
        return "the call has no selection"
    # What the user asks of kernels is meant for those that hold queries.
    if any(params.has_kernel_settings for params in call.params):
        return "kernels that gather queries have no setting but q_blocksize and kv_blocksize"
    queries = queries_together(call, operands)
    if selection.granularity > 1 or queries == 1 or operands.query.shape[1] < 2 * queries:
        return "kernels that gather queries need single queries that select, at least two tiles of them"
    device, rows = hardware.local_gpu(), SelectedRows(call, operands, 0, 1, ())
    settings, itemsize = {x: settings_of(rows, x) for x in KERNELS}, operands.query.dtype.itemsize
    needed = max(shared_memory(x, y, itemsize, head_sizes(rows), device.capability) for x, y in settings.items())
    # The mask of a row of queries is read by words, for as many keys at a time.
    if needed > device.shared_memory or min(x.major for x in settings.values()) < 32:
        return "the tiles of kernels that gather queries do not fit shared memory"
    return None


def queries_together(call: Call, operands: Operands) -> int:
    """Queries in a tile of the kernels that hold queries."""
    return block_shape(GroupPass(call, operands, 0, 1, ()), "forward")[0]


def most_keys(call: Call, operands: Operands) -> int:
    """Keys that a program can hold."""
    rows = SelectedRows(call, operands, 0, 1, ())
    return min(settings_of(rows, kernel).major for kernel in KERNELS)


def bytes_needed(rows: SelectedRows) -> int:
    """Bytes of the results by selection."""
    query, value = rows.operands.query, rows.operands.value
    return rows.per_query * query.nbytes // query.shape[-1] * max(query.shape[-1], value.shape[-1])


def forward(rows: SelectedRows) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, k, N, Hv] in the dtype of the query, lse [B, T, k, N]) of each selection; undefined unless live."""
    prepared, number = _prepare(rows, "kv_outer"), rows.q_order.rows
    outputs = (
        prepared.output((number, rows.heads, rows.operands.value.shape[-1]), True),
        prepared.output((rows.heads, number)),
    )
    segments = rows.operands.segments or (None, None)
    out, lse = prepared.run(kv_outer_kernel, segments, [], [], outputs, {}, {}, rows.q_order)
    return rows.by_token(out), rows.by_token(lse.swapaxes(1, 2))


def backward(rows: SelectedRows, inputs: BackwardInputs, before: Any) -> tuple[jax.Array, Any]:
    """(dq [B, T, N, H] in the dtype of the query, (dk, dv)), the latter added to those ``before``."""
    before = None if before is None else Rows(rows.kv_order, before)
    dkv, dq = dkv_of(_prepare(rows, "dqkv"), inputs, before, before is None, rows.q_order.rows)
    dq = jnp.where(rows.live[..., None], rows.by_token(dq), 0).sum(2, dtype=jnp.float32)
    return dq.astype(rows.operands.query.dtype), dkv.arrays


def settings_of(rows: SelectedRows, kernel: str) -> Settings:
    """The settings of a kernel, whatever the block."""
    itemsize, blocks = rows.operands.query.dtype.itemsize, (max(32, rows.block), 1 << 16)
    return choose(kernel, itemsize, head_sizes(rows), blocks, BwdParams(), hardware.local_gpu())


def _prepare(rows: SelectedRows, kernel: str) -> Prepared:
    settings = settings_of(rows, kernel)
    q = Side(rows.q_order, 1, settings.minor, rows.pack, gathered=True)
    kv = Side(rows.kv_order, rows.block, settings.major)
    return prepare(rows, q, kv, kv, [(q, rows.lists_by_key(q, kv))], settings, None, kernel == "dqkv")
