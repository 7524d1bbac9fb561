"""Lists from block pairs, sorted by their major block already: the live ones brought together, free ones first.

This is what `BlockPairs.lists` does by a sort, for a tenth of its time: documents leave some blocks of a static list,
and the blocks that a query chose are few.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl

CHUNK = 64


class Sizes(NamedTuple):
    """What the kernel knows of the pairs."""

    N: int  # of each list batch and list head
    HEADS: int
    BLOCKS: int  # major ones
    BATCHES: int  # of ``block``, and of ``tile``
    TILE_BATCHES: int
    CHUNK: int
    CHOSEN: bool  # whether there is ``chosen_by``
    FREE: int


@triton.jit
def compact_kernel(
    starts,  # int32 [HEADS, BLOCKS + 1]: where the pairs of each major block begin
    kind,  # int32 [LB, HEADS, N]
    block,  # int32 [BATCHES, HEADS, N]
    tile,  # int32 [TILE_BATCHES, HEADS, N]
    chosen_by,  # int32 [LB, HEADS, N]
    spans,  # int32 [LB, HEADS, BLOCKS, 3]
    out_block,  # int32 [LB, HEADS, N]; this and the next two are written where there are live ones only
    out_tile,
    out_chosen_by,
    Z: tl.constexpr,
):
    """The list of one major block; grid (BLOCKS, HEADS, LB)."""
    major, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + head * (Z.BLOCKS + 1) + major)
    end = tl.load(starts + head * (Z.BLOCKS + 1) + major + 1)
    at = (b * Z.HEADS + head) * Z.N
    shared, shared_tile = (b % Z.BATCHES * Z.HEADS + head) * Z.N, (b % Z.TILE_BATCHES * Z.HEADS + head) * Z.N
    place = tl.arange(0, Z.CHUNK)
    free, live = first * 0, first * 0
    for start in tl.range(first, end, Z.CHUNK):
        kinds = tl.load(kind + at + start + place, mask=start + place < end, other=0)
        free += tl.sum((kinds == Z.FREE).to(tl.int32), 0)
        live += tl.sum((kinds != 0).to(tl.int32), 0)
    line = spans + ((b * Z.HEADS + head) * Z.BLOCKS + major) * 3
    tl.store(line, at + first)
    tl.store(line + 1, at + first + free)
    tl.store(line + 2, at + first + live)
    next_free, next_masked = at + first, at + first + free
    before = place[None, :] < place[:, None]
    for start in tl.range(first, end, Z.CHUNK):
        exists = start + place < end
        kinds = tl.load(kind + at + start + place, mask=exists, other=0)
        is_free, is_masked = (kinds == Z.FREE).to(tl.int32), ((kinds != Z.FREE) & (kinds != 0)).to(tl.int32)
        ranks = tl.sum(tl.where(before, is_free[None, :], 0), 1), tl.sum(tl.where(before, is_masked[None, :], 0), 1)
        to = tl.where(is_free != 0, next_free + ranks[0], next_masked + ranks[1])
        found = tl.load(block + shared + start + place, mask=exists, other=0)
        tl.store(out_block + to, found, mask=kinds != 0)
        found = tl.load(tile + shared_tile + start + place, mask=exists, other=0)
        tl.store(out_tile + to, found, mask=kinds != 0)
        if Z.CHOSEN:
            found = tl.load(chosen_by + at + start + place, mask=exists, other=0)
            tl.store(out_chosen_by + to, found, mask=kinds != 0)
        next_free += tl.sum(is_free, 0)
        next_masked += tl.sum(is_masked, 0)
