"""Scores of key blocks for selections, from products of queries and pooled windows of keys.

**One tile of queries a program.** It has all query heads of a key head, and walks over the blocks that its queries see.

**Windows come in phases.** Phase m has window m of each block of a tile of STEP blocks. A block's maximum or sum over
its windows is then one over phases, elementwise, for any sizes of blocks and windows.

**Windows that meet two blocks are multiplied twice.** They are windows of both, in different phases.

**Weights need two passes.** The first computes the log-sum-exp of each query and head over all windows. The second
computes softmax weights, and sums them over heads and phases.

**Queries are columns of the products.** Columns are those of one head after the other, so that one thread has all heads
of a query.

Phases of the block of strides 4 .. 7, with windows of SIZE = 2 strides and BLOCK = 4 strides::

    stride       3     4     5     6     7     8
    phase 0      [ window 3 ]
    phase 1            [ window 4 ]
    phase 2                  [ window 5 ]
    phase 3                        [ window 6 ]
    phase 4                              [ window 7 ]   then scores of the block are stored
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu.tiles import addresses, full, load_rows, zeros


class ScoreConstants(NamedTuple):
    """Constants of the kernel's compilation."""

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
    WEIGHTS: bool  # True for softmax(SCALE * product), summed over the query heads of a key head
    TOTAL: bool  # True to sum a block's windows, each times its strides in the block; else their maximum
    SCALE: float  # of products, to base 2; above 0
    TILE: int  # queries of a tile, a power of two, as are:
    GROUP: int  # at least as many as query heads of a key head
    STEP: int  # blocks of a tile, and windows of one of the softmax's sum


class WindowRange(NamedTuple):
    """The windows that queries see, [columns]."""

    first: Any
    end: Any


@triton.jit
def _load_windows(pooled, window, exists, C: tl.constexpr):
    """Loads vectors [STEP, D] of windows."""
    return load_rows(addresses(pooled, window, C.KV_HEADS * C.H, C.D, True), exists, C.H, C.D, True)


@triton.jit
def _query_and_head(column, num_queries, C: tl.constexpr):
    """Returns (query, head, True where both exist) of columns of a tile; queries beyond the last are clipped to it."""
    query, head = column % C.TILE, column // C.TILE
    clipped = tl.minimum(query, num_queries - 1)
    return clipped, head, (query < num_queries) & (head < C.HEADS // C.KV_HEADS)


@triton.jit
def _window_range(position, doc_start, C: tl.constexpr):
    """Returns the windows of a query's document that end at its position or before."""
    end = tl.maximum(position + 1 - C.SIZE + C.STRIDE, 0) // C.STRIDE
    return WindowRange((doc_start + C.STRIDE - 1) // C.STRIDE, tl.minimum(end, C.WINDOWS))


@triton.jit
def _log_sums(q_tile, pooled, windows, C: tl.constexpr):
    """Computes the log-sum-exp to base 2 of each column's logits; +inf for columns that see no window."""
    begin, end = tl.min(windows.first, 0) // C.STEP * C.STEP, tl.max(windows.end, 0)
    seen_from, seen_to = tl.max(windows.first, 0), tl.min(windows.end, 0)  # windows that all columns see
    m_i, l_i = full(C.GROUP * C.TILE, float("-inf")), full(C.GROUP * C.TILE, 0.0)
    for first in tl.range(begin, end, C.STEP):
        window = first + tl.arange(0, C.STEP)
        window_tile = _load_windows(pooled, window, window < end, C)  # [STEP, D]
        scores = tl.dot(q_tile, tl.trans(window_tile), input_precision="ieee")  # [GROUP * TILE, STEP]
        if (first < seen_from) | (first + C.STEP > seen_to):
            seen = (window[None, :] >= windows.first[:, None]) & (window[None, :] < windows.end[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * C.SCALE)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_i = l_i * tl.exp2(m_i - shift) + tl.sum(tl.exp2(scores * C.SCALE - shift[:, None]), 1)
        m_i = m_new
    return tl.where(l_i > 0, m_i + tl.log2(l_i), float("inf"))


@triton.jit
def _score_windows(q_tile, pooled, window, exists, log_sums, C: tl.constexpr):
    """Computes products [STEP, columns] of windows and queries; if WEIGHTS weights [STEP, TILE], summed over heads."""
    window_tile = _load_windows(pooled, window, exists, C)  # [STEP, D]
    x = tl.dot(window_tile, tl.trans(q_tile), input_precision="ieee")  # [STEP, columns]
    if C.WEIGHTS:
        x = tl.exp2(tl.minimum(x * C.SCALE - log_sums[None, :], 0.0))  # as a huge logit is rounded
        x = tl.sum(tl.reshape(x, (C.STEP, C.GROUP, C.TILE)), 1)
    return x


@triton.jit
def _store_scores(scores, block_scores, block, column, num_queries, C: tl.constexpr):
    """Stores the scores [blocks, columns] of a tile."""
    query, head, exists = _query_and_head(column, num_queries, C)
    row = (query * (C.KV_HEADS if C.WEIGHTS else C.HEADS) + head) * C.BLOCKS
    mask = (block < C.BLOCKS)[:, None] & exists[None, :]
    tl.store(scores + row[None, :] + block[:, None], block_scores, mask=mask)


@triton.jit
def score_kernel(
    q,  # [B, ROWS, HEADS, H]
    pooled,  # [B, WINDOWS, KV_HEADS, H]
    positions,  # int32 [BATCHES, ROWS], positions of the queries
    doc_starts,  # int32 [BATCHES, ROWS], first tokens of their documents
    scores,  # float32 [B, ROWS, KV_HEADS or HEADS, BLOCKS]
    C: tl.constexpr,
):
    """Computes scores of blocks from the beginning of a query's document to its own; grid (key heads of tiles, B).

    Scores of other blocks are undefined.
    """
    TILES: tl.constexpr = (C.ROWS + C.TILE - 1) // C.TILE
    HEADS: tl.constexpr = C.HEADS // C.KV_HEADS
    INSIDE: tl.constexpr = C.BLOCK // C.STRIDE
    BEFORE: tl.constexpr = C.SIZE // C.STRIDE - 1  # windows that begin before a block and end in it
    PHASES: tl.constexpr = BEFORE + INSIDE
    kv_head, first_row = tl.program_id(0) // TILES, tl.program_id(0) % TILES * C.TILE
    batch, num_queries = tl.program_id(1).to(tl.int64), tl.minimum(C.ROWS - first_row, C.TILE)
    positions += (batch % C.BATCHES) * C.ROWS + first_row
    doc_starts += (batch % C.BATCHES) * C.ROWS + first_row
    q += ((batch * C.ROWS + first_row) * C.HEADS + kv_head * HEADS) * C.H
    pooled += (batch * C.WINDOWS * C.KV_HEADS + kv_head) * C.H

    column = tl.arange(0, C.GROUP * C.TILE)
    query, head, exists = _query_and_head(column, num_queries, C)
    q_tile = load_rows(addresses(q, query * C.HEADS + head, C.H, C.D, False), exists, C.H, C.D, True)  # [columns, D]
    position, doc_start = tl.load(positions + query), tl.load(doc_starts + query)
    windows = _window_range(position, doc_start, C)
    lowest, last = tl.min(windows.first, 0), tl.max(windows.end, 0)
    seen_from, seen_to = tl.max(windows.first, 0), tl.min(windows.end, 0)  # windows that all columns see
    first_block = tl.min(doc_start, 0) // C.BLOCK // C.STEP * C.STEP
    steps = tl.cdiv(tl.max(position, 0) // C.BLOCK + 1 - first_block, C.STEP) * PHASES
    log_sums = full(C.GROUP * C.TILE, 0.0)
    if C.WEIGHTS:
        log_sums = _log_sums(q_tile, pooled, windows, C)
        log_sums = tl.where(exists, log_sums, float("inf"))  # columns without a head have no weight
        column, neutral = tl.arange(0, C.TILE), zeros(C.STEP, C.TILE)  # weights are summed over heads
        query, _, _ = _query_and_head(column, num_queries, C)
        windows = _window_range(tl.load(positions + query), tl.load(doc_starts + query), C)
        scores += ((batch * C.ROWS + first_row) * C.KV_HEADS + kv_head) * C.BLOCKS
    else:
        neutral = zeros(C.STEP, C.GROUP * C.TILE) + float("-inf")
        scores += ((batch * C.ROWS + first_row) * C.HEADS + kv_head * HEADS) * C.BLOCKS
    block_scores, offset = neutral, tl.arange(0, C.STEP)
    for step in tl.range(0, steps):
        block, phase = first_block + step // PHASES * C.STEP, step % PHASES
        first_window = block * INSIDE + phase - BEFORE
        window = first_window + offset * INSIDE  # [STEP]
        x = _score_windows(q_tile, pooled, window, (window >= lowest) & (window < last), log_sums, C)
        is_partial = first_window < seen_from
        if BEFORE > 0:  # else windows that begin before a query's own block end there, too
            is_partial = is_partial | (first_window + (C.STEP - 1) * INSIDE >= seen_to)
        if is_partial:
            seen = (window[:, None] >= windows.first[None, :]) & (window[:, None] < windows.end[None, :])
            x = tl.where(seen, x, neutral)
        if C.TOTAL:  # strides of the window that lie in the block
            strides = tl.minimum(phase, INSIDE - 1) - tl.maximum(phase - BEFORE, 0) + 1
            block_scores += x * strides.to(tl.float32)
        else:
            block_scores = tl.maximum(block_scores, x)
        if phase == PHASES - 1:
            _store_scores(scores, block_scores, block + offset, column, num_queries, C)
            block_scores = neutral
