"""Launches of the plain Triton kernels that hold a block of keys and gather the queries that selected it.

They compute `SelectedRows`: each selection of a single query has its own result. `gpu_attention/kv_outer.py` merges the
results of a query.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ...planning.params import BwdParams
from ..call import Call
from ..distance_bias import has_bias
from ..gpu import hardware
from ..gpu.lists import RowTiling
from ..gpu.passes import BackwardInputs, GroupPass, PassResults, SelectedRows
from ..operands import Operands
from .kv_outer_kernel import kv_outer_kernel
from .launch import PreparedLaunch, block_shape, launch_dkv, prepare
from .settings import KernelInputs, Settings, choose_settings, shared_memory

KERNELS = "kv_outer", "dkv_with_dq"  # names of their settings


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns the reason why the selections of a call cannot be computed this way, or None."""
    selection = operands.selection
    if selection is None or not selection.ids.shape[-1]:
        return "the call has no selection"
    if has_bias(operands):
        return "kernels that gather queries know no bias"
    # What the user asks of kernels is meant for those that hold queries.
    if any(params.has_kernel_settings for params in call.params):
        return "kernels that gather queries have no setting but q_blocksize and kv_blocksize"
    queries = queries_per_tile(call, operands)
    if selection.granularity > 1 or queries == 1 or operands.query.shape[1] < 2 * queries:
        return "kernels that gather queries need single queries that select, at least two tiles of them"
    device, inputs = hardware.local_gpu(), KernelInputs.of(operands)
    settings = {x: settings_of(SelectedRows(call, operands, 0, 1, ()), x) for x in KERNELS}
    needed = max(shared_memory(x, y, inputs, device.capability) for x, y in settings.items())
    # The mask of a row of queries is read by words, for as many keys at a time.
    if needed > device.shared_memory or min(x.outer for x in settings.values()) < 32:
        return "the tiles of kernels that gather queries do not fit shared memory"
    return None


def queries_per_tile(call: Call, operands: Operands) -> int:
    """Returns the number of queries in a tile of the kernels that hold queries."""
    return block_shape(GroupPass(call, operands, 0, 1, ()), "forward")[0]


def max_keys(call: Call, operands: Operands) -> int:
    """Returns the number of keys that a program can hold."""
    rows = SelectedRows(call, operands, 0, 1, ())
    return min(settings_of(rows, kernel).outer for kernel in KERNELS)


def bytes_needed(rows: SelectedRows) -> int:
    """Returns the bytes of the results by selection."""
    query, value = rows.operands.query, rows.operands.value
    return rows.per_query * query.nbytes // query.shape[-1] * max(query.shape[-1], value.shape[-1])


def forward(rows: SelectedRows) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, k, N, Hv] in the query dtype, lse [B, T, k, N]) of selections; undefined unless live."""
    prepared, num_rows = _prepare(rows, "kv_outer"), rows.q_order.rows
    outputs = (
        prepared.output((num_rows, rows.heads, rows.operands.value.shape[-1]), True),
        prepared.output((rows.heads, num_rows)),
    )
    out, lse = prepared.launch_kernel(kv_outer_kernel, rows.ids, [], [], outputs, {}, {}, rows.q_order)
    return rows.by_token(out), rows.by_token(lse.swapaxes(1, 2))


def backward(rows: SelectedRows, inputs: BackwardInputs, earlier: Any) -> tuple[jax.Array, Any]:
    """Returns (dq [B, T, N, H] in the dtype of the query, (dk, dv)); ``earlier`` are added to the latter."""
    earlier = None if earlier is None else PassResults(rows.kv_order, earlier)
    dkv, dq = launch_dkv(_prepare(rows, "dkv_with_dq"), inputs, earlier, earlier is None, rows.q_order.rows)
    dq = jnp.where(rows.live[..., None], rows.by_token(dq), 0).sum(2, dtype=jnp.float32)
    return dq.astype(rows.operands.query.dtype), dkv.arrays


def settings_of(rows: SelectedRows, kernel: str) -> Settings:
    """Returns the settings of a kernel, as for long blocks."""
    inputs, blocks = KernelInputs.of(rows.operands), (max(32, rows.block), 1 << 16)
    return choose_settings(kernel, inputs, blocks, BwdParams(), hardware.local_gpu())


def _prepare(rows: SelectedRows, kernel: str) -> PreparedLaunch:
    settings = settings_of(rows, kernel)
    q = RowTiling(rows.q_order, 1, settings.inner, rows.pack, gathers_rows=True)
    kv = RowTiling(rows.kv_order, rows.block, settings.outer)
    return prepare(rows, q, kv, kv, [(q, rows.lists_by_key(q, kv))], settings, None, kernel == "dkv_with_dq")
