"""The Triton forward kernel: block-sparse attention with an online softmax.

**One work tile a program.** It is a tile of a block of queries, for one query head or PACK heads of a key head.

**Lists, not patterns.** A program walks over the list of key blocks of its queries. Full blocks come first, so that
the loop over them evaluates no mask.

**Two passes share a softmax.** A second pass with the same query rows has lists of its own. Its steps follow those of
the first pass.

**Long lists are split.** One launch computes the splits, each with its own out and lse. The launch of all work tiles
merges them in their order, so that results are the same from run to run.

**The softmax starts from earlier results.** These are the sink, or out and lse of earlier passes.

A work tile, with time to the right. Triton loads k_tile and v_tile of num_stages steps ahead::

    begin    list, q_tile, ids, then acc, m_i, l_i of sinks, earlier passes and splits
    steps    full ones of pass 1, partial ones of pass 1, full ones of pass 2, partial ones of pass 2
    end      out = acc / l_i, lse = (m_i + log2(l_i)) * ln 2

    a step   load k_tile    load v_tile
             |              |
    products [-- scores --] |                              [-- acc += p @ v_tile --]
    softmax                 [ mask ][ m_new, p, alpha, l_i ][ acc * alpha ]
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu.biases import biased_logits, load_bias, positions_of_tile
from ..gpu.tiles import (
    LN_2,
    LOG2_E,
    BlockListPointers,
    Schedule,
    addresses,
    clip_steps,
    full,
    load_ids,
    load_rows,
    load_span,
    load_step_rows,
    load_work_tile,
    logits,
    may_attend,
    move_to_list,
    offset_of_head,
    query_addresses,
    row_of,
    rows_of_tile,
    store_rows,
    token_of,
    zeros,
)


class QueryTile(NamedTuple):
    """The queries of a program."""

    q_tile: Any  # [Q.TILE, D]
    row_in_block: Any  # [Q.TILE]
    ids: Any  # `TokenIds`
    positions: Any  # `TilePositions`
    bias: Any  # `BiasOfHead`


class KVPointers(NamedTuple):
    """Pointers to a head of k and v."""

    k: Any
    v: Any


class ResultPointers(NamedTuple):
    """Pointers to results: of splits, of earlier passes, or of this launch."""

    out: Any
    lse: Any


@triton.jit
def _attend_steps(first, end, num_entries, state, queries, kv, lists, A: tl.constexpr, Q: tl.constexpr,
                  KV: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Computes steps first .. end - 1; ``state`` is (acc before division, m_i to base 2, l_i)."""
    acc, m_i, l_i = state
    for step in tl.range(first, end):
        kv_rows = load_step_rows(lists, step, num_entries, KV)
        token = token_of(kv_rows.row, KV)  # [KV.TILE]
        exists = kv_rows.exists & (token < A.S)
        k_tile = load_rows(addresses(kv.k, token, A.KV_HEADS * A.H, A.D, A.WIDE), exists, A.H, A.D, MASKED)
        scores = tl.dot(queries.q_tile, tl.trans(k_tile), input_precision="ieee")  # [Q.TILE, KV.TILE]
        if MASKED:
            allowed = may_attend(lists, kv_rows, token, exists, queries.row_in_block, queries.ids, A, Q, KV, L)
        if not A.BIAS.EXISTS and A.CAP == 0 and A.SCALE > 1e-30:
            # The largest logit is that of the largest product: no multiplication before the maximum.
            if MASKED:
                scores = tl.where(allowed, scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, 1) * (A.SCALE * LOG2_E))  # [Q.TILE]
            scores = scores * (A.SCALE * LOG2_E)
        else:
            if A.BIAS.EXISTS:
                keys = positions_of_tile(kv_rows.block, kv_rows.tile, token, KV)
                scores = biased_logits(scores, queries.bias, queries.positions, keys, 0, A, Q, KV)
            else:
                scores = logits(scores, A)
            if MASKED:
                scores = tl.where(allowed, scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, 1))
        shift = m_new
        if MASKED or A.BIAS.LENGTH > 0:  # entries of a table may be -inf
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        p = tl.exp2(scores - shift[:, None])  # [Q.TILE, KV.TILE]
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_tile = load_rows(addresses(kv.v, token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists, A.HV, A.DV, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def _attend_pass(work_tile, steps_before, span, state, queries, kv, lists, A: tl.constexpr, Q: tl.constexpr,
                 KV: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Computes the steps of one pass that are the work tile's; ``steps_before`` are those of the pass before."""
    first, first_partial, end = clip_steps(work_tile, steps_before, span)
    lists = move_to_list(lists, span)
    if L.ANY_FULL:
        state = _attend_steps(first, first_partial, span.num_entries, state, queries, kv, lists, A, Q, KV, L, False)
    if L.ANY_PARTIAL:
        state = _attend_steps(first_partial, end, span.num_entries, state, queries, kv, lists, A, Q, KV, L, True)
    return state


@triton.jit
def _initial_state(sinks, earlier, batch, pass_head, q_rows, A: tl.constexpr, Q: tl.constexpr, EARLIER: tl.constexpr,
                   SINKS: tl.constexpr):  # fmt: skip
    """Returns (acc, m_i, l_i) of sinks and of earlier passes."""
    acc = zeros(Q.TILE, A.DV)  # [Q.TILE, DV]: the sum of p @ v
    m_i = full(Q.TILE, float("-inf"))  # [Q.TILE]: the largest logit so far, to base 2
    if SINKS:
        head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
        m_i = full(Q.TILE, 0.0) + tl.load(offset_of_head(sinks + head, q_rows.row_in_block, 1, Q)) * LOG2_E
    if EARLIER.EXISTS:
        row, has_earlier = row_of(q_rows.token, q_rows.exists, EARLIER)
        lse_index = (batch * A.PASS_HEADS + pass_head) * EARLIER.ROWS
        lse = tl.load(earlier.lse + lse_index + row, mask=has_earlier, other=float("-inf"))
        m_i = tl.where(has_earlier, lse * LOG2_E, m_i)
        base = earlier.out + (batch * EARLIER.ROWS * A.PASS_HEADS + pass_head) * A.HV
        pointers = addresses(base, row, A.PASS_HEADS * A.HV, A.DV, True)
        acc = load_rows(pointers, has_earlier, A.HV, A.DV, True).to(tl.float32)
    l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)  # [Q.TILE]: the sum of 2 ** (logit - m_i)
    return acc, m_i, l_i


@triton.jit
def _merge_splits(work_tile, state, splits, batch, row_in_block, A: tl.constexpr, Q: tl.constexpr):
    """Merges the results of a work tile's splits into the state."""
    acc, m_i, l_i = state
    for split in tl.range(work_tile.first_split, work_tile.end_split):
        row = (split.to(tl.int64) * A.BATCH + batch) * (Q.TILES * Q.TILE)
        split_lse = tl.load(splits.lse + row + row_in_block) * LOG2_E  # [Q.TILE]
        m_new = tl.maximum(m_i, split_lse)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m_i - shift), tl.exp2(split_lse - shift)
        split_out = tl.load(addresses(splits.out + row * A.DV, row_in_block, A.DV, A.DV, True))  # [Q.TILE, DV]
        acc = acc * alpha[:, None] + split_out * weight[:, None]
        l_i = l_i * alpha + weight
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def _store_results(state, results, work_tile, batch, pass_head, q_rows, A: tl.constexpr, Q: tl.constexpr,
                   W: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    """Stores out and lse."""
    acc, m_i, l_i = state
    is_empty = l_i == 0
    l_i = tl.where(is_empty, 1.0, l_i)
    out = acc / l_i[:, None]  # [Q.TILE, DV]
    lse = tl.where(is_empty, float("-inf"), (m_i + tl.log2(l_i)) * LN_2)  # [Q.TILE]
    if W.SPLITS:
        row = (work_tile.split.to(tl.int64) * A.BATCH + batch) * (Q.TILES * Q.TILE)
        tl.store(addresses(results.out + row * A.DV, q_rows.row_in_block, A.DV, A.DV, True), out)
        tl.store(results.lse + row + q_rows.row_in_block, lse)
    else:
        row = q_rows.token if OUT.BY_TOKEN else q_rows.row
        base = results.out + (batch * OUT.ROWS * A.PASS_HEADS + pass_head) * A.HV
        pointers = query_addresses(base, row, q_rows.row_in_block, A.PASS_HEADS * A.HV, A.HV, Q, A.DV, True)
        store_rows(pointers, out, q_rows.exists, A.HV, A.DV)
        lse_index = offset_of_head((batch * A.PASS_HEADS + pass_head) * OUT.ROWS, q_rows.row_in_block, OUT.ROWS, Q)
        tl.store(results.lse + lse_index + row, lse, mask=q_rows.exists)


@triton.jit
def triton_forward_kernel(
    q,  # [B, T, HEADS, H]
    k,  # [B, S, KV_HEADS, H]
    v,  # [B, S, KV_HEADS, HV]
    work_tiles,  # int32 [PASS_HEADS * BLOCKS, BATCHES] if ORDERED, [splits, BATCHES, 3] if SPLITS; see `load_work_tile`
    splits,  # int32 [BATCHES, PASS_HEADS * BLOCKS, 2] if MERGED: first split and end of the splits of each work tile
    spans,  # this and the next three: `BlockLists`
    entries,
    mask_tiles,
    active_query_groups,
    mask_bits,  # int32 [1 + tiles, rows, words] of a block
    spans2,  # the same of a second pass with the same query rows, if KV2 has any
    entries2,
    mask_tiles2,
    active_query_groups2,
    mask_bits2,
    q_ids,  # int32 [B, NUM_IDS, T]: segment ids, -2 in padding; order ids
    kv_ids,  # int32 [B, NUM_IDS, S]: segment ids, -1 in padding; order ids
    bias_table,  # float32 [HEADS, BIAS.LENGTH]; None without a bias
    bias_slopes,  # float32 [HEADS]; None without a bias
    split_out,  # float32 [splits, B, rows of a block, DV], if MERGED
    split_lse,  # float32 [splits, B, rows of a block]
    sinks,  # float32 [HEADS]
    earlier_out,  # [B, EARLIER.ROWS, PASS_HEADS, HV]: out of earlier passes
    earlier_lse,  # float32 [B, PASS_HEADS, EARLIER.ROWS]
    out,  # [B, OUT.ROWS, PASS_HEADS, HV]; like ``split_out`` if SPLITS
    lse,  # float32 [B, PASS_HEADS, OUT.ROWS]; like ``split_lse`` if SPLITS
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    KV2: tl.constexpr,
    L2: tl.constexpr,
    W: tl.constexpr,
    EARLIER: tl.constexpr,
    OUT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Computes attention of one work tile; grid ((work tiles or splits) * tiles of a block, B)."""
    batch = tl.program_id(1).to(tl.int64)
    work_tile = load_work_tile(Schedule(work_tiles, splits), batch, Q, A.PASS_HEADS, Q.PACK, W)
    pass_head, q_block = work_tile.head, work_tile.block
    head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
    kv_head = head // (A.HEADS // A.KV_HEADS)
    q_rows = rows_of_tile(work_tile, Q, A.T)
    token, row_in_block = q_rows.token, q_rows.row_in_block

    # The list first, which the first keys wait for: 1.6 % of a window of 1024.
    span = load_span(spans, batch, head, q_block, KV, L, W)
    q_head = q + (batch * A.T * A.HEADS + head) * A.H
    pointers = query_addresses(q_head, token, row_in_block, A.HEADS * A.H, A.H, Q, A.D, A.WIDE)
    q_tile = load_rows(pointers, q_rows.exists, A.H, A.D, True)
    ids = load_ids(q_ids + batch * (A.NUM_IDS * A.T), token, q_rows.exists, A.T, -2, A)

    earlier = ResultPointers(earlier_out, earlier_lse)
    state = _initial_state(sinks, earlier, batch, pass_head, q_rows, A, Q, EARLIER, SINKS)
    if W.MERGED:
        state = _merge_splits(work_tile, state, ResultPointers(split_out, split_lse), batch, row_in_block, A, Q)

    positions = positions_of_tile(q_block, work_tile.tile, token, Q)
    queries = QueryTile(q_tile, row_in_block, ids, positions, load_bias(bias_table, bias_slopes, None, None, head, A))
    vector = batch * A.S * A.KV_HEADS + kv_head
    kv, kv_ids = KVPointers(k + vector * A.H, v + vector * A.HV), kv_ids + batch * (A.NUM_IDS * A.S)
    lists = BlockListPointers(spans, entries, mask_tiles, active_query_groups, mask_bits, q_ids, kv_ids)
    state = _attend_pass(work_tile, 0, span, state, queries, kv, lists, A, Q, KV, L)
    if KV2.ROWS > 0:
        span2 = load_span(spans2, batch, head, q_block, KV2, L2, W)
        lists = BlockListPointers(spans2, entries2, mask_tiles2, active_query_groups2, mask_bits2, q_ids, kv_ids)
        state = _attend_pass(work_tile, span.num_steps, span2, state, queries, kv, lists, A, Q, KV2, L2)
    _store_results(state, ResultPointers(out, lse), work_tile, batch, pass_head, q_rows, A, Q, W, OUT)
