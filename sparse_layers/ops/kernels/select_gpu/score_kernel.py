"""How much queries want each key block: the kernel that computes scores from products of queries and windows of keys.

A program has a tile of queries, each with all heads of a key head. Its windows come in *phases*: window m of every
block, those of a tile of blocks at a time. So a block's maximum or sum over its windows is one over phases, number by
number, whatever the sizes of blocks and windows; and a window that meets two blocks is multiplied twice. Where heads
are summed, queries are columns of the products, of one head after the other: then one thread has all heads of a query.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl

from ..gpu.tiles import addresses, full, load_rows, zeros


class Score(NamedTuple):
    """What the kernel knows of scores; a constant of its compilation."""

    ROWS: int  # queries of a batch entry
    HEADS: int
    KV_HEADS: int
    BATCHES: int  # of the positions: 1 or B
    H: int
    D: int  # H, rounded up to a power of two
    WINDOWS: int
    SIZE: int  # keys of a window
    STRIDE: int  # keys between the beginnings of two windows
    BLOCK: int  # keys of a block, as the other two in multiples of STRIDE
    BLOCKS: int
    WEIGHTS: bool  # whether windows count by softmax(SCALE * product), summed over the heads of a key head
    TOTAL: bool  # whether a block counts its windows by how much of them it holds, and not the largest one
    SCALE: float  # of products, to base 2; above 0
    TILE: int  # queries of a tile, a power of two, as are:
    GROUP: int  # at least as many as query heads of a key head
    STEP: int  # blocks of a tile, and windows of one of the softmax's sum


@triton.jit
def _windows(pooled, window, exists, C: tl.constexpr):
    """Vectors [STEP, D] of some windows."""
    return load_rows(addresses(pooled, window, C.KV_HEADS * C.H, C.D, True), exists, C.H, C.D, True)


@triton.jit
def _queries(column, rows, C: tl.constexpr):
    """(query, head, whether there is one) of columns of a tile with ``rows`` queries, the last one beyond these."""
    query, head = column % C.TILE, column // C.TILE
    return tl.minimum(query, rows - 1), head, (query < rows) & (head < C.HEADS // C.KV_HEADS)


@triton.jit
def _seen(own, begin, C: tl.constexpr):
    """The windows that positions see in documents that begin at some token: the first, and the end."""
    end = tl.maximum(own + 1 - C.SIZE + C.STRIDE, 0) // C.STRIDE
    return (begin + C.STRIDE - 1) // C.STRIDE, tl.minimum(end, C.WINDOWS)


@triton.jit
def _log_sums(queries, pooled, first, end, C: tl.constexpr):
    """The log-sum-exp to base 2 of each row's logits of the windows first .. end - 1; infinity where there are none."""
    begin, last = tl.min(first, 0) // C.STEP * C.STEP, tl.max(end, 0)
    all_from, all_to = tl.max(first, 0), tl.min(end, 0)  # windows that all rows see
    peak, total = full(C.GROUP * C.TILE, float("-inf")), full(C.GROUP * C.TILE, 0.0)
    for at in tl.range(begin, last, C.STEP):
        window = at + tl.arange(0, C.STEP)
        some = _windows(pooled, window, window < last, C)
        products = tl.dot(queries, tl.trans(some), input_precision="ieee")
        if (at < all_from) | (at + C.STEP > all_to):
            seen = (window[None, :] >= first[:, None]) & (window[None, :] < end[:, None])
            products = tl.where(seen, products, float("-inf"))
        highest = tl.maximum(peak, tl.max(products, 1) * C.SCALE)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(products * C.SCALE - base[:, None]), 1)
        peak = highest
    return tl.where(total > 0, peak + tl.log2(total), float("inf"))


@triton.jit
def _store(scores, found, block, column, rows, C: tl.constexpr):
    """Stores the scores [blocks, columns] of a tile."""
    query, head, exists = _queries(column, rows, C)
    place = (query * (C.KV_HEADS if C.WEIGHTS else C.HEADS) + head) * C.BLOCKS
    there = (block < C.BLOCKS)[:, None] & exists[None, :]
    tl.store(scores + place[None, :] + block[:, None], found, mask=there)


@triton.jit
def score_kernel(
    q,  # [B, ROWS, HEADS, H]
    pooled,  # [B, WINDOWS, KV_HEADS, H]
    at,  # int32 [BATCHES, ROWS], positions of the queries
    start,  # int32 [BATCHES, ROWS], first tokens of their documents
    scores,  # float32 [B, ROWS, KV_HEADS or HEADS, BLOCKS]
    C: tl.constexpr,
):
    """Scores of blocks between the beginning of a query's document and its own block; grid (key heads of tiles, B).

    Those of other blocks may be anything.
    """
    tiles: tl.constexpr = (C.ROWS + C.TILE - 1) // C.TILE
    each: tl.constexpr = C.HEADS // C.KV_HEADS
    inside: tl.constexpr = C.BLOCK // C.STRIDE
    before: tl.constexpr = C.SIZE // C.STRIDE - 1  # windows that begin before a block and end in it
    phases: tl.constexpr = before + inside
    kv_head, first_row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C.TILE
    b, rows = tl.program_id(1).to(tl.int64), tl.minimum(C.ROWS - first_row, C.TILE)
    at += (b % C.BATCHES) * C.ROWS + first_row
    start += (b % C.BATCHES) * C.ROWS + first_row
    q += ((b * C.ROWS + first_row) * C.HEADS + kv_head * each) * C.H
    pooled += (b * C.WINDOWS * C.KV_HEADS + kv_head) * C.H

    column = tl.arange(0, C.GROUP * C.TILE)
    query, head, exists = _queries(column, rows, C)
    queries = load_rows(addresses(q, query * C.HEADS + head, C.H, C.D, False), exists, C.H, C.D, True)
    own, begin = tl.load(at + query), tl.load(start + query)
    first, end = _seen(own, begin, C)
    lowest, last, all_from, all_to = tl.min(first, 0), tl.max(end, 0), tl.max(first, 0), tl.min(end, 0)
    first_block = tl.min(begin, 0) // C.BLOCK // C.STEP * C.STEP
    steps = tl.cdiv(tl.max(own, 0) // C.BLOCK + 1 - first_block, C.STEP) * phases
    log_sums = full(C.GROUP * C.TILE, 0.0)
    if C.WEIGHTS:
        log_sums = _log_sums(queries, pooled, first, end, C)
        log_sums = tl.where(exists, log_sums, float("inf"))  # what is no head has no weight
        column, nothing = tl.arange(0, C.TILE), zeros(C.STEP, C.TILE)  # weights are summed over heads
        query, _, _ = _queries(column, rows, C)
        first, end = _seen(tl.load(at + query), tl.load(start + query), C)
        scores += ((b * C.ROWS + first_row) * C.KV_HEADS + kv_head) * C.BLOCKS
    else:
        nothing = zeros(C.STEP, C.GROUP * C.TILE) + float("-inf")
        scores += ((b * C.ROWS + first_row) * C.HEADS + kv_head * each) * C.BLOCKS
    found, blocks = nothing, tl.arange(0, C.STEP)
    for step in tl.range(0, steps):
        block, phase = first_block + step // phases * C.STEP, step % phases
        lower = block * inside + phase - before
        window = lower + blocks * inside
        some = _windows(pooled, window, (window >= lowest) & (window < last), C)
        value = tl.dot(some, tl.trans(queries), input_precision="ieee")
        if C.WEIGHTS:
            value = tl.exp2(tl.minimum(value * C.SCALE - log_sums[None, :], 0.0))  # as a huge logit is rounded
            value = tl.sum(tl.reshape(value, (C.STEP, C.GROUP, C.TILE)), 1)
        partly = lower < all_from
        if before > 0:  # else what begins before a query's own block ends there, too
            partly = partly | (lower + (C.STEP - 1) * inside >= all_to)
        if partly:
            seen = (window[:, None] >= first[None, :]) & (window[:, None] < end[None, :])
            value = tl.where(seen, value, nothing)
        if C.TOTAL:  # strides of the window that lie in the block
            share = tl.minimum(phase, inside - 1) - tl.maximum(phase - before, 0) + 1
            found += value * share.to(tl.float32)
        else:
            found = tl.maximum(found, value)
        if phase == phases - 1:
            _store(scores, found, block + blocks, column, rows, C)
            found = nothing
