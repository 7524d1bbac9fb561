"""The forward kernel by blocks of keys: one program holds a block and takes to it the queries that chose it.

For selections whose queries hardly agree: a tile of neighbouring queries would walk over blocks that few of them chose.
Every choice (a query and one of its blocks) is a row of its own here, with a result over the keys of that block alone;
`kv_outer.py` puts the results of a query together.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

import triton
import triton.language as tl

from ..gpu.tiles import (
    addresses,
    job_of,
    list_of,
    load_rows,
    logits,
    may_attend,
    of_heads,
    rows_of,
    share_of,
    store_rows,
    token_of,
    vectors_of,
)


@triton.jit
def _walk(
    keys,
    values,
    first,
    last,
    count,  # entries of the list
    source,  # pointer to q of a head
    lists,  # pointers to block, tile of the first entry, and to the bits of tiles
    rows,  # places in the block, segment ids of the keys, pointer to those of the queries
    results,  # pointers to out and lse of a head
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores what steps first .. last - 1 give."""
    within, segment, segments = rows
    for step in tl.range(first, last):
        slot, part, place, row, exists = rows_of(lists, step, count, Q)
        token = token_of(row, Q)
        pointers = vectors_of(source, token, place, A.HEADS * A.H, A.H, Q, A.D, A.WIDE)
        queries = load_rows(pointers, exists, A.H, A.D, MASKED)
        scores = logits(tl.dot(queries, tl.trans(keys), input_precision="ieee"), A)
        if MASKED:
            may = tl.trans(may_attend(lists, slot, part, within, KV, Q))
            if A.SEGMENTED:
                other = tl.load(segments + token, mask=exists, other=-2)
                may = may & (other[:, None] == segment[None, :])
            scores = tl.where(may, scores, float("-inf"))
        top = tl.max(scores, 1)
        shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - shift[:, None])
        total = tl.sum(weights, 1)
        nothing = total == 0
        total = tl.where(nothing, 1.0, total)
        result = tl.dot(weights.to(values.dtype), values, input_precision="ieee") / total[:, None]
        natural = tl.where(nothing, float("-inf"), (shift + tl.log2(total)) * 0.6931471805599453)
        pointers = vectors_of(results[0], row, place, A.OWN_HEADS * A.HV, A.HV, Q, A.DV, True)
        store_rows(pointers, result, exists, A.HV, A.DV)
        tl.store(of_heads(results[1], place, Q.ROWS, Q) + row, natural, mask=exists)


@triton.jit
def kv_outer_kernel(
    q,
    k,
    v,
    work,  # this and all up to ``kv_segments``: as in `forward_kernel`, with blocks of keys
    pieces,
    spans,
    entries,
    tiles,
    chosen_by,
    bits,
    q_segments,
    kv_segments,
    out,  # [B, Q.ROWS, OWN_HEADS, HV]
    lse,  # float32 [B, OWN_HEADS, Q.ROWS]
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
):
    """Attention of the rows that chose one block of keys, of one head; grid (jobs or pieces, B)."""
    b = tl.program_id(1).to(tl.int64)
    jobs: tl.constexpr = A.OWN_HEADS // Q.PACK * W.BLOCKS
    _, job, _, begin, end, _, _ = job_of(work, pieces, b, W, KV.PARTS, jobs)
    own, block = job // W.BLOCKS * Q.PACK, job % W.BLOCKS
    head = A.FIRST_HEAD + own * A.HEAD_STEP
    kv_head = head // (A.HEADS // A.KV_HEADS)
    within = tl.arange(0, KV.TILE)
    token = block * KV.BLOCK + within
    exists = (within < KV.BLOCK) & (token < A.S)

    first, free, steps, count = list_of(spans, b, head, block, Q, L, W)
    low, middle, high = share_of(begin, end, 0, free, steps)
    at = b * A.S * A.KV_HEADS + kv_head
    keys = load_rows(addresses(k + at * A.H, token, A.KV_HEADS * A.H, A.D, A.WIDE), exists, A.H, A.D, True)
    values = load_rows(addresses(v + at * A.HV, token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists, A.HV, A.DV, True)
    segment = token
    if A.SEGMENTED:
        segment = tl.load(kv_segments + b * A.S + token, mask=exists, other=-1)
    rows = within, segment, q_segments + b * A.T
    lists = entries + first, tiles + first, chosen_by, bits
    source = q + (b * A.T * A.HEADS + head) * A.H
    at = b * Q.ROWS * A.OWN_HEADS
    results = out + (at + own) * A.HV, lse + at + own * Q.ROWS
    _walk(keys, values, low, middle, count, source, lists, rows, results, A, Q, KV, False)
    _walk(keys, values, middle, high, count, source, lists, rows, results, A, Q, KV, True)
