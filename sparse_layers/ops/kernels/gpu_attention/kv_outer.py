"""Selections of single queries by blocks of keys, for queries that hardly agree with their neighbours.

A tile of neighbouring queries walks over all blocks that any of them selected: with little agreement, many times what
each of them did. Here a program holds a block of keys instead and takes to it those that selected it, wherever they
are. Each selection, a query and one of its blocks, is a row of its own, and what its rows give is put together for each
query: out and lse by their softmax, dq as a sum; dk and dv are complete where they are made. Queries are taken in as
many chunks as keep the rows' results as small as the operands.

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
from ..operands import Operands
from ..pass_blocks import state_table_of
from ..triton_gpu import kv_outer
from ..triton_gpu.launch import FULL_TILE

# How many times what its queries selected a full tile has to walk over, for rows of selections to take less time: in
# the forward pass with blocks of 128 keys, and in the backward pass. Measured on an H100 and an H200.
LEAST_WASTE = {"forward": 2.0, "backward": 2.0}
# Tiles that are looked at to find that out.
SAMPLE = 256
# Bytes that the results of selections may take where the operands are smaller.
LEAST_ROOM = 1 << 28


def neighbours_disagree(call: Call, operands: Operands, direction: str) -> jax.Array:
    """bool []: whether neighbours agree so little that this way takes less time, judged by some of them.

    Args:
      call: one that `triton_gpu.kv_outer` supports.
      operands: its arrays.
      direction: "forward" or "backward".
    """
    assert operands.selection is not None
    ids, block = operands.selection.ids, operands.selection.block
    tile_queries, columns = kv_outer.queries_together(call, operands), -(-operands.key.shape[1] // block)
    batch, queries, lists, k = ids.shape
    tiles = queries // tile_queries
    ids = ids[:, : tiles * tile_queries].reshape(batch, tiles, tile_queries, lists, k)
    ids = jnp.moveaxis(ids, 3, 1).reshape(-1, tile_queries, k)
    # Spread evenly over all of them and over those of each sequence, whatever their numbers, by the golden ratio.
    sample = np.arange(SAMPLE) * ((math.sqrt(5) - 1) / 2) % 1
    ids = ids[np.unique((sample * len(ids)).astype(np.int64))]
    # Forward, a tile of few rows takes as long as a full one.
    forward = direction == "forward"
    filled = max(tile_queries, FULL_TILE // GroupPass(call, operands, 0, 1, ()).pack) if forward else tile_queries
    walked = _count_different(ids.reshape(-1, tile_queries * k), columns) * filled
    number = divisor(call, operands)
    # Forward, a row takes as long however few its keys are. So do tiles of keys backward that blocks do not fill.
    width = 128 if forward else max(32, padded_size(block // number))
    longer = min(2, max(1, number * width / block)) if forward else number * width / block
    return walked > LEAST_WASTE[direction] * longer * _count_different(ids, columns)


def _count_different(ids: jax.Array, columns: int) -> jax.Array:
    """How many blocks there are in the rows of ids, one that is in several rows as often."""
    ids = jnp.sort(ids, axis=-1)
    return (differs(ids) & (ids >= 0) & (ids < columns)).sum(dtype=jnp.float32)  # there may be more than 2 ** 31


def divisor(call: Call, operands: Operands) -> int:
    """Number of blocks into which a selected one is divided, so that a program can hold one."""
    assert operands.selection is not None
    block, most = operands.selection.block, kv_outer.most_keys(call, operands)
    return next(n for n in range(1, block) if block % (16 * n) == 0 and block // n <= most)


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, Hv] in the dtype of the query, lse [B, T, N] in float32)."""

    def merge(_, x):
        rows, _ = x
        out, lse = kv_outer.forward(rows)
        live = rows.live
        lse = jnp.where(live, lse, -jnp.inf)
        sinks = -jnp.inf if operands.sinks is None else operands.sinks.astype(jnp.float32)
        total = jnp.logaddexp(jax.nn.logsumexp(lse, axis=2), sinks)
        weights = jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total)[:, :, None])
        out = jnp.where(live[..., None], out.astype(jnp.float32), 0) * weights[..., None]
        return None, (out.sum(2).astype(operands.query.dtype), total)

    return _over_chunks(merge, call, operands, (), SelectedRows, kv_outer)[1]


def backward(engine: str, call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    """(dq, dk, dv) in the dtypes of query, key and value; lse and delta [B, T, N], dout [B, T, N, Hv]."""
    key, value = operands.key, operands.value
    kernels, make = kv_outer, SelectedRows
    if engine == "hopper":
        from ..hopper_gpu import query_gather

        # It adds in float32, in any order. What several heads read and add to is more than the cache holds.
        kernels, make = query_gather, functools.partial(SelectedRows, ordered=False, packed=False)

    def add(before, x):
        rows, (lse, delta, dout) = x
        inputs = BackwardInputs(lse.swapaxes(1, 2), delta.swapaxes(1, 2), dout.astype(key.dtype))
        dq, dkv = kernels.backward(rows, inputs, before)
        return dkv, (dq,)

    (dk, dv), (dq,) = _over_chunks(add, call, operands, (lse, delta, dout), make, kernels)
    return dq, dk.astype(key.dtype), dv.astype(value.dtype)


def _over_chunks(
    function: Callable[..., Any],
    call: Call,
    operands: Operands,
    by_query: tuple[jax.Array, ...],
    make: Callable[..., SelectedRows],
    kernels: Any,
) -> Any:
    """`jax.lax.scan` of function(carry, (rows, by_query)) over chunks of queries: the last carry, results [B, T, ...].

    The first carry is None where there is one chunk, and zeros [B, S, K, H] and [B, S, K, Hv] otherwise.
    """
    assert operands.selection is not None
    block, query, number = operands.selection.block, operands.query, divisor(call, operands)
    select = functools.partial(Selection, block=block // number, granularity=operands.selection.granularity)
    # What is no block stays none: times `number`, a large number may become that of a block.
    ids, columns = operands.selection.ids[..., None], -(-operands.key.shape[1] // block)
    ids = jnp.where((ids >= 0) & (ids < columns), ids * number + np.arange(number, dtype=np.int32), -1)
    ids = ids.reshape(*ids.shape[:3], -1)
    table = state_table_of(operands, (1, block // number), call.masks, True)
    tokens = query.shape[1]
    # As much as the operands and out, which is like q. Half of it takes a tenth off what MoBA's passes over 131,072
    # tokens need in all, and adds 29 % to their time, for keys are read more often: 174 ms, not 135, on an H100 with
    # gradients by plain Triton.
    room = max(LEAST_ROOM, sum(x.nbytes for x in (query, operands.key, operands.value, query)))
    needed = kernels.bytes_needed(make(call, operands._replace(selection=select(ids)), 0, 1, ()))
    chunks = min(tokens, max(1, -(-needed // room)))
    # A number that divides the queries, for what is filled up is copied.
    chunks = next((n for n in range(chunks, 2 * chunks) if tokens % n == 0), chunks)
    length = -(-tokens // chunks)

    def filled(x, fill=0):
        ends = [(0, 0), (0, chunks * length - tokens)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, ends, constant_values=fill)

    q_segments = None if operands.segments is None else filled(operands.segments[0], -2)
    inputs = filled(query), filled(ids, -1), q_segments, tuple(map(filled, by_query))

    def chunk(carry, start):
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=1)
        query, ids, segments, by_query = jax.tree.map(cut, inputs)
        some = operands._replace(query=query, selection=select(ids))
        if operands.segments is not None:
            some = some._replace(segments=(segments, operands.segments[1]))
        return function(carry, (make(call, some, 0, 1, (), table=table, start=start), by_query))

    if chunks == 1:
        return chunk(None, jnp.int32(0))
    zeros = tuple(varying_like(query, jnp.zeros(x.shape, jnp.float32)) for x in (operands.key, operands.value))
    starts = np.arange(chunks, dtype=np.int32) * length
    carry, results = jax.lax.scan(chunk, zeros if by_query else None, starts)

    def joined(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), chunks * length, *x.shape[3:])[:, :tokens]

    return carry, jax.tree.map(joined, results)
