"""Block lists from block pairs that are sorted by their major block: live pairs first, free ones before masked ones.

**One list a program.** It reads the pairs of a major block in chunks, twice.

**The first pass counts.** Free and live pairs give the span of the list, which begins where its pairs began.

**The second pass moves.** The rank of a pair within its chunk and state is its offset in the list.

**This is what `BlockPairs.lists` does by a sort.** It takes a tenth of the time: documents leave some blocks of a
static list, and the blocks that a query selected are few.

A list of one chunk, with F free, M masked and . dead pairs::

    pairs        M0  .   F0  M1  .   F1
    rank         0       0   1       1
    list         F0  F1  M0  M1  undefined
    span         first   first_masked = first + 2   end = first + 4
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl

CHUNK = 64


class Sizes(NamedTuple):
    """Constants of the kernel's compilation."""

    N: int  # pairs of each list batch and list head
    HEADS: int
    BLOCKS: int  # major ones
    BATCHES: int  # of ``block``, and of ``tile``
    TILE_BATCHES: int
    CHUNK: int
    CHOSEN: bool  # whether there is ``active_rows_mask``
    FULL: int


@triton.jit
def _move(source, to, entry, exists, is_live):
    """Copies an integer of each live pair to its entry."""
    x = tl.load(source, mask=exists, other=0)
    tl.store(to + entry, x, mask=is_live)


@triton.jit
def compact_kernel(
    starts,  # int32 [HEADS, BLOCKS + 1]: where the pairs of each major block begin
    kind,  # int32 [LB, HEADS, N]: 0 for dead pairs
    block,  # int32 [BATCHES, HEADS, N]
    tile,  # int32 [TILE_BATCHES, HEADS, N]
    active_rows_mask,  # int32 [LB, HEADS, N]
    spans,  # int32 [LB, HEADS, BLOCKS, 3]
    out_block,  # int32 [LB, HEADS, N]; this and the next two are written where there are live pairs only
    out_tile,
    out_active_rows_mask,
    Z: tl.constexpr,
):
    """The list of one major block; grid (BLOCKS, HEADS, LB)."""
    major, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + head * (Z.BLOCKS + 1) + major)
    end = tl.load(starts + head * (Z.BLOCKS + 1) + major + 1)
    pairs = (batch * Z.HEADS + head) * Z.N
    block_pairs = (batch % Z.BATCHES * Z.HEADS + head) * Z.N
    tile_pairs = (batch % Z.TILE_BATCHES * Z.HEADS + head) * Z.N
    column = tl.arange(0, Z.CHUNK)
    num_free, num_live = begin * 0, begin * 0
    for chunk in tl.range(begin, end, Z.CHUNK):
        kinds = tl.load(kind + pairs + chunk + column, mask=chunk + column < end, other=0)
        num_free += tl.sum((kinds == Z.FULL).to(tl.int32), 0)
        num_live += tl.sum((kinds != 0).to(tl.int32), 0)
    line = spans + ((batch * Z.HEADS + head) * Z.BLOCKS + major) * 3
    tl.store(line, pairs + begin)
    tl.store(line + 1, pairs + begin + num_free)
    tl.store(line + 2, pairs + begin + num_live)
    next_free, next_masked = pairs + begin, pairs + begin + num_free
    before = column[None, :] < column[:, None]
    for chunk in tl.range(begin, end, Z.CHUNK):
        exists = chunk + column < end
        kinds = tl.load(kind + pairs + chunk + column, mask=exists, other=0)
        is_free, is_masked = (kinds == Z.FULL).to(tl.int32), ((kinds != Z.FULL) & (kinds != 0)).to(tl.int32)
        free_rank = tl.sum(tl.where(before, is_free[None, :], 0), 1)
        masked_rank = tl.sum(tl.where(before, is_masked[None, :], 0), 1)
        entry = tl.where(is_free != 0, next_free + free_rank, next_masked + masked_rank)
        _move(block + block_pairs + chunk + column, out_block, entry, exists, kinds != 0)
        _move(tile + tile_pairs + chunk + column, out_tile, entry, exists, kinds != 0)
        if Z.CHOSEN:
            _move(active_rows_mask + pairs + chunk + column, out_active_rows_mask, entry, exists, kinds != 0)
        next_free += tl.sum(is_free, 0)
        next_masked += tl.sum(is_masked, 0)
