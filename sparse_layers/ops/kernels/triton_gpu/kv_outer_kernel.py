"""The Triton forward kernel with keys in the outer loop: a program holds a key block and gathers its queries.

**For selections whose queries hardly agree.** A tile of neighbouring queries would walk many blocks, each selected by
few of them.

**One work tile a program.** It is a block of keys, for one query head or PACK heads of a key head. The list of a block
has its selections, each of them a query and one of its blocks.

**Each selection is a row of its own.** Its out and lse are those of attention to the keys of one block. Softmax needs
no state from step to step.

**Results are merged later.** `kv_outer.py` merges the rows of a query by their lse.

**Masks are read by words.** The mask tile of a selection has a bit for each key of the block.

A step, with time to the right. Triton loads q_tile of num_stages steps ahead::

    begin    list, k_tile, v_tile, ids
    a step   load rows of q_tile
    products [-- scores --]                         [-- p @ v_tile --]
    softmax                [ mask ][ m_i, p, l_i ]                    [ out / l_i, lse ][ store rows ]
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

import triton
import triton.language as tl

from ..gpu.biases import positions_of_tile
from ..gpu.tiles import (
    LN_2,
    BlockListPointers,
    Schedule,
    addresses,
    clip_steps,
    ids_allow,
    load_ids,
    load_mask,
    load_rows,
    load_span,
    load_step_rows,
    load_work_tile,
    logits,
    move_to_list,
    offset_of_head,
    query_addresses,
    store_rows,
    token_of,
)
from .backward_kernel import KVTile
from .forward_kernel import ResultPointers


@triton.jit
def _attend_steps(first, end, num_entries, keys, q, lists, results, A: tl.constexpr, Q: tl.constexpr, KV: tl.constexpr,
                  MASKED: tl.constexpr):  # fmt: skip
    """Stores out and lse of steps first .. end - 1; ``q`` and ``results`` point to a head."""
    for step in tl.range(first, end):
        q_rows = load_step_rows(lists, step, num_entries, Q)
        row, row_in_block, exists = q_rows.row, q_rows.row_in_block, q_rows.exists
        token = token_of(row, Q)  # [Q.TILE]
        vectors = query_addresses(q, token, row_in_block, A.HEADS * A.H, A.H, Q, A.D, A.WIDE)
        q_tile = load_rows(vectors, exists, A.H, A.D, MASKED)  # [Q.TILE, D]
        scores = logits(tl.dot(q_tile, tl.trans(keys.k_tile), input_precision="ieee"), A)  # [Q.TILE, KV.TILE]
        if MASKED:
            allowed = tl.trans(load_mask(lists, q_rows.entry, q_rows.tile, keys.row_in_block, KV, Q))
            if A.NUM_IDS > 0:
                q_ids = load_ids(lists.q_ids, token, exists, A.T, -2, A)
                allowed = allowed & ids_allow(q_ids, keys.ids, 0, A)
            scores = tl.where(allowed, scores, float("-inf"))
        m_i = tl.max(scores, 1)  # [Q.TILE]
        shift = tl.where(m_i == float("-inf"), 0.0, m_i)
        p = tl.exp2(scores - shift[:, None])  # [Q.TILE, KV.TILE]
        l_i = tl.sum(p, 1)  # [Q.TILE]
        is_empty = l_i == 0
        l_i = tl.where(is_empty, 1.0, l_i)
        out = tl.dot(p.to(keys.v_tile.dtype), keys.v_tile, input_precision="ieee") / l_i[:, None]  # [Q.TILE, DV]
        lse = tl.where(is_empty, float("-inf"), (shift + tl.log2(l_i)) * LN_2)
        vectors = query_addresses(results.out, row, row_in_block, A.PASS_HEADS * A.HV, A.HV, Q, A.DV, True)
        store_rows(vectors, out, exists, A.HV, A.DV)
        tl.store(offset_of_head(results.lse, row_in_block, Q.ROWS, Q) + row, lse, mask=exists)


@triton.jit
def kv_outer_kernel(
    q,
    k,
    v,
    work_tiles,  # this and all up to ``kv_ids``: as in `triton_forward_kernel`, with key blocks
    splits,
    spans,
    entries,
    mask_tiles,
    active_query_groups,
    mask_bits,
    q_ids,
    kv_ids,
    out,  # [B, Q.ROWS, PASS_HEADS, HV]
    lse,  # float32 [B, PASS_HEADS, Q.ROWS]
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
):
    """Computes attention of selections to one block of keys; grid (work tiles or splits, B)."""
    batch = tl.program_id(1).to(tl.int64)
    work_tile = load_work_tile(Schedule(work_tiles, splits), batch, KV, A.PASS_HEADS, Q.PACK, W)
    pass_head, kv_block = work_tile.head, work_tile.block
    head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
    kv_head = head // (A.HEADS // A.KV_HEADS)
    row_in_block = tl.arange(0, KV.TILE)
    token = kv_block * KV.BLOCK + row_in_block  # [KV.TILE]
    exists = (row_in_block < KV.BLOCK) & (token < A.S)

    span = load_span(spans, batch, head, kv_block, Q, L, W)
    first, first_partial, end = clip_steps(work_tile, 0, span)
    vector = batch * A.S * A.KV_HEADS + kv_head
    k_tile = load_rows(addresses(k + vector * A.H, token, A.KV_HEADS * A.H, A.D, A.WIDE), exists, A.H, A.D, True)
    v_tile = load_rows(addresses(v + vector * A.HV, token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists, A.HV, A.DV, True)
    ids = load_ids(kv_ids + batch * (A.NUM_IDS * A.S), token, exists, A.S, -1, A)
    keys = KVTile(k_tile, v_tile, row_in_block, ids, positions_of_tile(kv_block, 0, token, KV))
    q_ids += batch * (A.NUM_IDS * A.T)
    lists = BlockListPointers(spans, entries, mask_tiles, active_query_groups, mask_bits, q_ids, kv_ids)
    lists = move_to_list(lists, span)
    q += (batch * A.T * A.HEADS + head) * A.H
    row = batch * Q.ROWS * A.PASS_HEADS
    results = ResultPointers(out + (row + pass_head) * A.HV, lse + row + pass_head * Q.ROWS)
    _attend_steps(first, first_partial, span.num_entries, keys, q, lists, results, A, Q, KV, False)
    _attend_steps(first_partial, end, span.num_entries, keys, q, lists, results, A, Q, KV, True)
