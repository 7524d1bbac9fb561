"""Builds block lists from block pairs that are sorted by their outer block: full pairs, then partial ones.

**One list a program.** It reads the pairs of an outer block in chunks, twice.

**The first pass counts.** Full and nonempty pairs give the span of the list, which begins where its pairs began.

**The second pass moves.** The rank of a pair within its chunk and state is its offset in the list.

**A faster `BlockPairs.lists`.** That sorts all pairs, and takes ten times as long: documents keep some blocks of a
static list, and the blocks that a query selected are few.

A list of one chunk, with F full, P partial and . empty pairs::

    pairs        P0  .   F0  P1  .   F1
    rank         0       0   1       1
    list         F0  F1  P0  P1  undefined
    span         first   first_partial = first + 2   end = first + 4
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl

CHUNK = 64


class CompactSizes(NamedTuple):
    """Constants of the kernel's compilation."""

    N: int  # pairs of each batch entry and head with lists
    HEADS: int
    BLOCKS: int  # outer ones
    BATCHES: int  # of ``block``, and of ``tile``
    TILE_BATCHES: int
    CHUNK: int
    HAS_SELECTION: bool  # True if there is ``active_query_groups``
    FULL: int


@triton.jit
def _move(source, to, entry, exists, is_live):
    """Copies an integer of each nonempty pair to its entry."""
    x = tl.load(source, mask=exists, other=0)
    tl.store(to + entry, x, mask=is_live)


@triton.jit
def compact_kernel(
    starts,  # int32 [HEADS, BLOCKS + 1]: where the pairs of each outer block begin
    state,  # int32 [LB, HEADS, N]: 0 for empty pairs
    block,  # int32 [BATCHES, HEADS, N]
    tile,  # int32 [TILE_BATCHES, HEADS, N]
    active_query_groups,  # int32 [LB, HEADS, N]
    spans,  # int32 [LB, HEADS, BLOCKS, 3]
    out_block,  # int32 [LB, HEADS, N]; this and the next two are written for nonempty pairs only
    out_tile,
    out_active_query_groups,
    Z: tl.constexpr,
):
    """Builds the list of one outer block; grid (BLOCKS, HEADS, LB)."""
    outer, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + head * (Z.BLOCKS + 1) + outer)
    end = tl.load(starts + head * (Z.BLOCKS + 1) + outer + 1)
    pairs = (batch * Z.HEADS + head) * Z.N
    block_pairs = (batch % Z.BATCHES * Z.HEADS + head) * Z.N
    tile_pairs = (batch % Z.TILE_BATCHES * Z.HEADS + head) * Z.N
    column = tl.arange(0, Z.CHUNK)
    num_full, num_live = begin * 0, begin * 0
    for chunk in tl.range(begin, end, Z.CHUNK):
        states = tl.load(state + pairs + chunk + column, mask=chunk + column < end, other=0)
        num_full += tl.sum((states == Z.FULL).to(tl.int32), 0)
        num_live += tl.sum((states != 0).to(tl.int32), 0)
    line = spans + ((batch * Z.HEADS + head) * Z.BLOCKS + outer) * 3
    tl.store(line, pairs + begin)
    tl.store(line + 1, pairs + begin + num_full)
    tl.store(line + 2, pairs + begin + num_live)
    next_full, next_partial = pairs + begin, pairs + begin + num_full
    before = column[None, :] < column[:, None]
    for chunk in tl.range(begin, end, Z.CHUNK):
        exists = chunk + column < end
        states = tl.load(state + pairs + chunk + column, mask=exists, other=0)
        is_full, is_partial = (states == Z.FULL).to(tl.int32), ((states != Z.FULL) & (states != 0)).to(tl.int32)
        full_rank = tl.sum(tl.where(before, is_full[None, :], 0), 1)
        partial_rank = tl.sum(tl.where(before, is_partial[None, :], 0), 1)
        entry = tl.where(is_full != 0, next_full + full_rank, next_partial + partial_rank)
        _move(block + block_pairs + chunk + column, out_block, entry, exists, states != 0)
        _move(tile + tile_pairs + chunk + column, out_tile, entry, exists, states != 0)
        if Z.HAS_SELECTION:
            _move(active_query_groups + pairs + chunk + column, out_active_query_groups, entry, exists, states != 0)
        next_full += tl.sum(is_full, 0)
        next_partial += tl.sum(is_partial, 0)
