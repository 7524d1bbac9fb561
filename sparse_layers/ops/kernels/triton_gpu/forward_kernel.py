"""The forward kernel: one program holds a tile of queries and walks over the key blocks listed for it."""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

import triton
import triton.language as tl

from ..gpu.tiles import (
    addresses,
    chose,
    full,
    job_of,
    list_of,
    load_rows,
    logits,
    may_attend,
    of_heads,
    row_of,
    rows_of,
    share_of,
    store_rows,
    token_of,
    vectors_of,
    zeros,
)


@triton.jit
def _walk(
    state,
    queries,
    sources,  # pointers to k and v of a head
    first,
    last,
    count,  # entries of the list
    lists,  # pointers to block, tile, chosen_by of the first entry, and to the bits of tiles
    rows,  # places in the block, segment ids of the queries, pointer to those of the keys
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Goes on from state = (out before division, largest logit, sum of weights) over steps first .. last - 1."""
    out, top, total = state
    within, segment, segments = rows
    for step in tl.range(first, last):
        slot, part, _, row, exists = rows_of(lists, step, count, KV)
        token = token_of(row, KV)
        exists = exists & (token < A.S)
        key = load_rows(addresses(sources[0], token, A.KV_HEADS * A.H, A.D, A.WIDE), exists, A.H, A.D, MASKED)
        products = tl.dot(queries, tl.trans(key), input_precision="ieee")
        if MASKED:
            may = may_attend(lists, slot, part, within, Q, KV)
            if L.CHOSEN > 0:
                may = may & chose(lists, slot, within, Q, L)[:, None]
            if A.SEGMENTED:
                other = tl.load(segments + token, mask=exists, other=-1)
                may = may & (segment[:, None] == other[None, :])
        if A.CAP == 0 and A.SCALE > 1e-30:
            # The largest logit is that of the largest product: no multiplication before the maximum.
            if MASKED:
                products = tl.where(may, products, float("-inf"))
            raised = tl.maximum(top, tl.max(products, 1) * (A.SCALE * 1.4426950408889634))
            scores = products * (A.SCALE * 1.4426950408889634)
        else:
            scores = logits(products, A)
            if MASKED:
                scores = tl.where(may, scores, float("-inf"))
            raised = tl.maximum(top, tl.max(scores, 1))
        shift = raised
        if MASKED:
            shift = tl.where(raised == float("-inf"), 0.0, raised)  # a row that has seen no key yet
        weights = tl.exp2(scores - shift[:, None])
        old = tl.exp2(top - shift)
        total = total * old + tl.sum(weights, 1)
        value = load_rows(addresses(sources[1], token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists, A.HV, A.DV, MASKED)
        out = tl.dot(weights.to(value.dtype), value, out * old[:, None], input_precision="ieee")
        top = raised
    return out, top, total


@triton.jit
def _walk_pass(
    state,
    passed,  # steps of the pass before
    queries,
    sources,
    begin,
    end,
    span,  # of `list_of`
    lists,
    rows,
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
):
    """Goes on over those of a pass' steps that lie from begin to end."""
    first, free, steps, count = span
    low, middle, high = share_of(begin, end, passed, free, steps)
    lists = lists[0] + first, lists[1] + first, lists[2] + first, lists[3]
    if L.ANY_FREE:
        state = _walk(state, queries, sources, low, middle, count, lists, rows, A, Q, KV, L, False)
    if L.ANY_MASKED:
        state = _walk(state, queries, sources, middle, high, count, lists, rows, A, Q, KV, L, True)
    return state


@triton.jit
def forward_kernel(
    q,  # [B, T, HEADS, H]
    k,  # [B, S, KV_HEADS, H]
    v,  # [B, S, KV_HEADS, HV]
    work,  # see `job_of`; int32 [OWN_HEADS * BLOCKS, BATCHES] if ORDERED, int32 [pieces, BATCHES, 3] if PIECES
    pieces,  # int32 [BATCHES, OWN_HEADS * BLOCKS, 2], first piece and end of each job's, if MERGED
    spans,  # this and the next three: `BlockLists`
    entries,
    tiles,
    chosen_by,
    bits,  # int32 [1 + tiles, rows, words] of a block
    more_spans,  # the same of a second pass with the same query rows, if KV2 has any
    more_entries,
    more_tiles,
    more_chosen_by,
    more_bits,
    q_segments,  # int32 [B, T], -2 in padding
    kv_segments,  # int32 [B, S], -1 in padding
    piece_out,  # float32 [pieces, B, rows of a block, DV], if MERGED
    piece_lse,  # float32 [pieces, B, rows of a block]
    sinks,  # float32 [HEADS]
    before,  # [B, BEFORE.ROWS, OWN_HEADS, HV]: out of earlier passes
    before_lse,  # float32 [B, OWN_HEADS, BEFORE.ROWS]
    out,  # [B, OUT.ROWS, OWN_HEADS, HV]; like ``piece_out`` if PIECES
    lse,  # float32 [B, OWN_HEADS, OUT.ROWS]; like ``piece_lse`` if PIECES
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    KV2: tl.constexpr,
    L2: tl.constexpr,
    W: tl.constexpr,
    BEFORE: tl.constexpr,
    OUT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attention of one tile of queries of one head; grid (jobs or pieces, times tiles of a block, B)."""
    b = tl.program_id(1).to(tl.int64)
    jobs: tl.constexpr = A.OWN_HEADS // Q.PACK * W.BLOCKS
    item, job, part, begin, end, piece, last_piece = job_of(work, pieces, b, W, Q.PARTS, jobs)
    own, block = job // W.BLOCKS * Q.PACK, job % W.BLOCKS
    head = A.FIRST_HEAD + own * A.HEAD_STEP
    kv_head = head // (A.HEADS // A.KV_HEADS)
    within = part * Q.TILE + tl.arange(0, Q.TILE)
    row = block * Q.BLOCK + within // Q.PACK
    token = token_of(row, Q)
    exists = (within < Q.BLOCK * Q.PACK) & (row < Q.ROWS) & (token < A.T)

    # The list first, which the first keys wait for: 1.6 % of a window of 1024.
    span = list_of(spans, b, head, block, KV, L, W)
    base = q + (b * A.T * A.HEADS + head) * A.H
    queries = load_rows(vectors_of(base, token, within, A.HEADS * A.H, A.H, Q, A.D, A.WIDE), exists, A.H, A.D, True)
    segment = token
    if A.SEGMENTED:
        segment = tl.load(q_segments + b * A.T + token, mask=exists, other=-2)

    result = zeros(Q.TILE, A.DV)
    top = full(Q.TILE, float("-inf"))
    if SINKS:
        top = full(Q.TILE, 0.0) + tl.load(of_heads(sinks + head, within, 1, Q)) * 1.4426950408889634
    if BEFORE.GIVEN:
        early, known = row_of(token, exists, BEFORE)
        at = b * A.OWN_HEADS + own
        early_lse = tl.load(before_lse + at * BEFORE.ROWS + early, mask=known, other=float("-inf"))
        top = tl.where(known, early_lse * 1.4426950408889634, top)
        base = before + (b * BEFORE.ROWS * A.OWN_HEADS + own) * A.HV
        pointers = addresses(base, early, A.OWN_HEADS * A.HV, A.DV, True)
        result = load_rows(pointers, known, A.HV, A.DV, True).to(tl.float32)
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    if W.MERGED:
        for i in tl.range(piece, last_piece):
            at = (i.to(tl.int64) * A.BATCH + b) * (Q.PARTS * Q.TILE)
            piece_top = tl.load(piece_lse + at + within) * 1.4426950408889634
            raised = tl.maximum(top, piece_top)
            shift = tl.where(raised == float("-inf"), 0.0, raised)
            old, new = tl.exp2(top - shift), tl.exp2(piece_top - shift)
            own_result = tl.load(addresses(piece_out + at * A.DV, within, A.DV, A.DV, True))
            result = result * old[:, None] + own_result * new[:, None]
            total = total * old + new
            top = raised

    at = b * A.S * A.KV_HEADS + kv_head
    sources, rows = (k + at * A.H, v + at * A.HV), (within, segment, kv_segments + b * A.S)
    state = result, top, total
    lists = entries, tiles, chosen_by, bits
    state = _walk_pass(state, 0, queries, sources, begin, end, span, lists, rows, A, Q, KV, L)
    if KV2.ROWS > 0:
        passed = span[2]
        lists = more_entries, more_tiles, more_chosen_by, more_bits
        span = list_of(more_spans, b, head, block, KV2, L2, W)
        state = _walk_pass(state, passed, queries, sources, begin, end, span, lists, rows, A, Q, KV2, L2)
    result, top, total = state

    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    result = result / total[:, None]
    natural = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    if W.PIECES:
        at = (item.to(tl.int64) * A.BATCH + b) * (Q.PARTS * Q.TILE)
        tl.store(addresses(out + at * A.DV, within, A.DV, A.DV, True), result)
        tl.store(lse + at + within, natural)
    else:
        place = token if OUT.BY_TOKEN else row
        base = out + (b * OUT.ROWS * A.OWN_HEADS + own) * A.HV
        store_rows(vectors_of(base, place, within, A.OWN_HEADS * A.HV, A.HV, Q, A.DV, True), result, exists, A.HV, A.DV)
        at = of_heads((b * A.OWN_HEADS + own) * OUT.ROWS, within, OUT.ROWS, Q)
        tl.store(lse + at + place, natural, mask=exists)
