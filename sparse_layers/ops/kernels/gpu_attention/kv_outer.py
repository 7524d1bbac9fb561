"""Selections of single queries with key blocks in the outer loop, for neighbouring queries that hardly agree.

A tile of neighbouring queries walks all blocks that any of them selected: with little agreement, many times the blocks
of one query. Here a program holds a block of keys instead, and gathers the queries that selected it. Each selection, a
query and one of its blocks, is a row with its own result. The results of a query are merged by their lse, and dq is
their sum; dk and dv of a block are complete in its program. Queries come in chunks, so that results by selection take
no more memory than the operands.

The same idea: Yan et al. 2025, "FSA: An Alternative Efficient Implementation of Native Sparse Attention Kernel".
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.block_lists import differs
from ...planning.selection import Selection
from ..call import Call
from ..gpu.hardware import padded_size
from ..gpu.passes import BackwardInputs, GroupPass, SelectedRows, varying_like
from ..operands import Gradients, Operands
from ..pass_blocks import state_table_of
from ..triton_gpu import kv_outer
from ..triton_gpu.launch import FULL_TILE

# Pairs of query and block that full tiles of queries compute, for each pair that is selected. From this ratio on, key
# blocks in the outer loop take less time (forward with blocks of 128 keys). Measured on an H100 and an H200.
MIN_WASTE = {"forward": 2.0, "backward": 2.0}
# Tiles from which the ratio is estimated.
SAMPLE = 256
# Bytes that results by selection may take, even if the operands are smaller.
MIN_WORKSPACE_BYTES = 1 << 28


def selections_disagree(call: Call, operands: Operands, direction: str) -> jax.Array:
    """Returns bool [], True if neighbouring queries agree so little that this takes less time, judged by a sample."""
    assert operands.selection is not None
    ids, block = operands.selection.ids, operands.selection.block
    tile_queries, columns = kv_outer.queries_per_tile(call, operands), -(-operands.key.shape[1] // block)
    batch, queries, lists, k = ids.shape
    tiles = queries // tile_queries
    ids = ids[:, : tiles * tile_queries].reshape(batch, tiles, tile_queries, lists, k)
    ids = jnp.moveaxis(ids, 3, 1).reshape(-1, tile_queries, k)
    # The golden ratio spreads the sample evenly over all tiles, and over those of each sequence.
    sample = np.arange(SAMPLE) * ((math.sqrt(5) - 1) / 2) % 1
    ids = ids[np.unique((sample * len(ids)).astype(np.int64))]
    # Forward, a tile of few rows takes as long as a full one.
    forward = direction == "forward"
    rows_computed = (
        max(tile_queries, FULL_TILE // GroupPass(call, operands, 0, 1, ()).pack) if forward else tile_queries
    )
    walked = _count_distinct(ids.reshape(-1, tile_queries * k), columns) * rows_computed
    subblocks = subblocks_per_block(call, operands)
    # Forward, a row takes as long with few keys. Backward, so does a tile of keys that its block does not fill.
    width = 128 if forward else max(32, padded_size(block // subblocks))
    longer = min(2, max(1, subblocks * width / block)) if forward else subblocks * width / block
    return walked > MIN_WASTE[direction] * longer * _count_distinct(ids, columns)


def _count_distinct(ids: jax.Array, columns: int) -> jax.Array:
    """Counts the distinct blocks of each row of ids, and returns the sum over rows."""
    ids = jnp.sort(ids, axis=-1)
    return (differs(ids) & (ids >= 0) & (ids < columns)).sum(dtype=jnp.float32)  # there may be more than 2 ** 31


def subblocks_per_block(call: Call, operands: Operands) -> int:
    """Returns the number of equal blocks into which a selected one is divided, so that a program can hold one."""
    assert operands.selection is not None
    block, most = operands.selection.block, kv_outer.max_keys(call, operands)
    return next(n for n in range(1, block) if block % (16 * n) == 0 and block // n <= most)


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, Hv] in the dtype of the query, lse [B, T, N] in float32)."""

    def merge(_, x):
        rows, _ = x
        out, lse = kv_outer.forward(rows)
        live = rows.live
        lse = jnp.where(live, lse, -jnp.inf)
        sinks = jnp.full(1, -jnp.inf) if operands.sinks is None else operands.sinks
        total = jnp.logaddexp(jax.nn.logsumexp(lse, axis=2), sinks.astype(jnp.float32)[None, None])
        weights = jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total)[:, :, None])
        out = jnp.where(live[..., None], out.astype(jnp.float32), 0) * weights[..., None]
        return None, (out.sum(2).astype(operands.query.dtype), total)

    return _scan_query_chunks(merge, call, operands, (), SelectedRows, kv_outer)[1]


def backward(engine: str, call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    """Returns gradients in the dtypes of query, key and value; lse and delta are [B, T, N], dout [B, T, N, Hv]."""
    key, value = operands.key, operands.value
    kernels, make_rows = kv_outer, SelectedRows
    if engine == "hopper":
        from ..hopper_gpu import query_gather

        # It adds in float32, in any order. Packed heads would read and add to more than the cache holds.
        kernels, make_rows = query_gather, functools.partial(SelectedRows, sort_ids=False, may_pack=False)

    def add(earlier, x):
        rows, (lse, delta, dout) = x
        inputs = BackwardInputs(lse.swapaxes(1, 2), delta.swapaxes(1, 2), dout.astype(key.dtype))
        dq, dkv = kernels.backward(rows, inputs, earlier)
        return dkv, (dq,)

    (dk, dv), (dq,) = _scan_query_chunks(add, call, operands, (lse, delta, dout), make_rows, kernels)
    return Gradients(dq, dk.astype(key.dtype), dv.astype(value.dtype))


def _scan_query_chunks(
    function: Callable[..., Any],
    call: Call,
    operands: Operands,
    by_query: tuple[jax.Array, ...],
    make_rows: Callable[..., SelectedRows],
    kernels: Any,
) -> Any:
    """Scans function(carry, (rows, by_query)) over chunks of queries: returns the last carry and results [B, T, ...].

    The first carry is None if there is one chunk, else zeros [B, S, K, H] and [B, S, K, Hv].
    """
    assert operands.selection is not None
    block, query, subblocks = operands.selection.block, operands.query, subblocks_per_block(call, operands)
    select = functools.partial(Selection, block=block // subblocks, granularity=operands.selection.granularity)
    # Invalid ids become -1 first: multiplied by `subblocks`, a large one may overflow to a valid block.
    ids, columns = operands.selection.ids[..., None], -(-operands.key.shape[1] // block)
    subblock = np.arange(subblocks, dtype=np.int32).reshape(1, 1, 1, 1, -1)
    ids = jnp.where((ids >= 0) & (ids < columns), ids * subblocks + subblock, -1)
    ids = ids.reshape(*ids.shape[:3], -1)
    table = state_table_of(operands, (1, block // subblocks), call.masks, True)
    tokens = query.shape[1]
    # As many bytes as the operands and out, which is as large as q. With half of them, MoBA's passes over 131,072
    # tokens need a tenth less memory and 29 % more time, as keys are read more often: 174 ms, not 135, on an H100
    # with gradients by plain Triton.
    max_bytes = max(MIN_WORKSPACE_BYTES, sum(x.nbytes for x in (query, operands.key, operands.value, query)))
    needed_bytes = kernels.bytes_needed(make_rows(call, operands._replace(selection=select(ids)), 0, 1, ()))
    chunks = min(tokens, max(1, -(-needed_bytes // max_bytes)))
    # Prefer a number that divides the queries: padding copies them.
    chunks = next((n for n in range(chunks, 2 * chunks) if tokens % n == 0), chunks)
    length = -(-tokens // chunks)

    def padded(x, fill=0):
        ends = [(0, 0), (0, chunks * length - tokens)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, ends, constant_values=fill)

    by_token = {"segments": -2, "order_ids": 0}  # and the ids of rows without a query
    q_ids = {name: padded(pair[0], fill) for name, fill in by_token.items() if (pair := getattr(operands, name))}
    inputs = padded(query), padded(ids, -1), q_ids, tuple(map(padded, by_query))

    def chunk(carry, start):
        slice_chunk = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=1)
        query, ids, q_ids, by_query = jax.tree.map(slice_chunk, inputs)
        pairs = {name: (x, getattr(operands, name)[1]) for name, x in q_ids.items()}
        chunk_operands = operands._replace(query=query, selection=select(ids), **pairs)
        return function(carry, (make_rows(call, chunk_operands, 0, 1, (), table=table, first_query=start), by_query))

    if chunks == 1:
        return chunk(None, jnp.int32(0))
    zeros = tuple(varying_like(query, jnp.zeros(x.shape, jnp.float32)) for x in (operands.key, operands.value))
    starts = np.arange(chunks, dtype=np.int32) * length
    carry, results = jax.lax.scan(chunk, zeros if by_query else None, starts)

    def concatenated(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), chunks * length, *x.shape[3:])[:, :tokens]

    return carry, jax.tree.map(concatenated, results)
