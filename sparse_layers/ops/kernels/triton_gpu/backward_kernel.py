"""The backward kernels: dq by tiles of queries (with dk and dv where each key is in one block), dk and dv by keys.

With p = exp(logits - lse): dv = p^T dout, ds = p * (dout v^T - delta), dq = ds k, dk = ds^T q. There are no atomic
additions: what the pieces of a list gave is added in their order, and results are the same from run to run.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

import triton
import triton.language as tl

from ..gpu.tiles import (
    addresses,
    chose,
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
def _score_gradient(scores, lse, dweights, delta, may, A: tl.constexpr, MASKED: tl.constexpr):
    """(p, ds) of logits to base 2; lse (to base 2) and delta already broadcast against them."""
    weights = tl.exp2(tl.minimum(scores - lse, 0.0))  # see `lowered` of call.py
    if MASKED:
        weights = tl.where(may, weights, 0.0)
    dscores = weights * (dweights - delta)
    if A.CAP != 0:
        squashed = scores / (A.CAP * 1.4426950408889634)
        dscores = dscores * (1 - squashed * squashed)
    return weights, dscores


@triton.jit
def _pieces_added(
    result, results, piece, last_piece, b, within, BATCH: tl.constexpr, SIZE: tl.constexpr, X: tl.constexpr
):
    """Adds to a tile [X.TILE, SIZE] what the pieces of its job gave: float32 [pieces, B, rows of a block, SIZE]."""
    for i in tl.range(piece, last_piece):
        at = (i.to(tl.int64) * BATCH + b) * (X.PARTS * X.TILE * SIZE)
        result += tl.load(addresses(results + at, within, SIZE, SIZE, True))
    return result


@triton.jit
def _store_piece(results, item, result, b, within, BATCH: tl.constexpr, SIZE: tl.constexpr, X: tl.constexpr):
    """Stores what a piece gives, where `_pieces_added` finds it."""
    at = (item.to(tl.int64) * BATCH + b) * (X.PARTS * X.TILE * SIZE)
    tl.store(addresses(results + at, within, SIZE, SIZE, True), result)


@triton.jit
def _walk(
    result,
    held,  # tiles of q and dout, and of lse and delta
    first,
    last,
    count,  # entries of the list
    sources,  # pointers to k and v of a head
    lists,  # pointers to block, tile, chosen_by of the first entry, and to the bits of tiles
    rows,  # places in the block, segment ids of the queries, pointer to those of the keys
    dkv,  # pointers to dk and dv, and to these of earlier passes
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    BEFORE_KV: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_DKV: tl.constexpr,
):
    """Adds to dq (not yet scaled) what steps first .. last - 1 give; stores their dk and dv if WITH_DKV."""
    queries, douts, base, deltas = held
    within, segment, segments = rows
    for step in tl.range(first, last):
        slot, part, _, row, exists_kv = rows_of(lists, step, count, KV)
        token = token_of(row, KV)
        exists_kv = exists_kv & (token < A.S)
        key = load_rows(addresses(sources[0], token, A.KV_HEADS * A.H, A.D, A.WIDE), exists_kv, A.H, A.D, MASKED)
        value = load_rows(addresses(sources[1], token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists_kv, A.HV, A.DV, MASKED)
        scores = logits(tl.dot(queries, tl.trans(key), input_precision="ieee"), A)
        may = 0
        if MASKED:
            may = may_attend(lists, slot, part, within, Q, KV)
            if L.CHOSEN > 0:
                may = may & chose(lists, slot, within, Q, L)[:, None]
            if A.SEGMENTED:
                other = tl.load(segments + token, mask=exists_kv, other=-1)
                may = may & (segment[:, None] == other[None, :])
        dweights = tl.dot(douts, tl.trans(value), input_precision="ieee")
        weights, dscores = _score_gradient(scores, base, dweights, deltas, may, A, MASKED)
        dscores = dscores.to(key.dtype)
        result = tl.dot(dscores, key, result, input_precision="ieee")
        if WITH_DKV:
            dvalues = tl.dot(tl.trans(weights.to(key.dtype)), douts, input_precision="ieee")
            dkeys = tl.dot(tl.trans(dscores), queries, input_precision="ieee") * A.SCALE
            if BEFORE_KV.GIVEN:
                early, known = row_of(token, exists_kv, BEFORE_KV)
                pointers = addresses(dkv[2], early, A.KV_HEADS * A.H, A.D, True)
                dkeys += load_rows(pointers, known, A.H, A.D, True).to(tl.float32)
                pointers = addresses(dkv[3], early, A.KV_HEADS * A.HV, A.DV, True)
                dvalues += load_rows(pointers, known, A.HV, A.DV, True).to(tl.float32)
            store_rows(addresses(dkv[0], token, A.KV_HEADS * A.H, A.D, True), dkeys, exists_kv, A.H, A.D)
            store_rows(addresses(dkv[1], token, A.KV_HEADS * A.HV, A.DV, True), dvalues, exists_kv, A.HV, A.DV)
    return result


@triton.jit
def _walk_pass(
    result,
    passed,  # steps of the pass before
    held,
    begin,
    end,
    sources,
    span,  # of `list_of`
    lists,
    rows,
    dkv,
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    BEFORE_KV: tl.constexpr,
    WITH_DKV: tl.constexpr,
):
    """Goes on over those of a pass' steps that lie from begin to end."""
    first, free, steps, count = span
    low, middle, high = share_of(begin, end, passed, free, steps)
    lists = lists[0] + first, lists[1] + first, lists[2] + first, lists[3]
    for MASKED in tl.static_range(2):
        if L.ANY_MASKED if MASKED else L.ANY_FREE:
            result = _walk(
                result,
                held,
                middle if MASKED else low,
                high if MASKED else middle,
                count,
                sources,
                lists,
                rows,
                dkv,
                A,
                Q,
                KV,
                L,
                BEFORE_KV,
                MASKED,
                WITH_DKV,
            )
    return result


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    work,  # this and all up to ``kv_segments``: as in `forward_kernel`
    pieces,
    spans,
    entries,
    tiles,
    chosen_by,
    bits,
    more_spans,
    more_entries,
    more_tiles,
    more_chosen_by,
    more_bits,
    q_segments,
    kv_segments,
    piece_dq,  # float32 [pieces, B, rows of a block, D], if MERGED
    lse,  # float32 [B, HEADS, T], of all passes together
    delta,  # float32 [B, HEADS, T]
    dout,  # [B, T, HEADS, HV]
    before,  # [B, BEFORE.ROWS, OWN_HEADS, H]: dq of earlier passes
    before_k,  # [B, BEFORE_KV.ROWS, KV_HEADS, H]: dk of earlier passes, if WITH_DKV
    before_v,  # [B, BEFORE_KV.ROWS, KV_HEADS, HV]
    dq,  # [B, OUT.ROWS, OWN_HEADS, H]; like ``piece_dq`` if PIECES
    dk,  # [B, S, KV_HEADS, H] if WITH_DKV
    dv,  # [B, S, KV_HEADS, HV]
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    KV2: tl.constexpr,
    L2: tl.constexpr,
    W: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_KV: tl.constexpr,
    OUT: tl.constexpr,
    WITH_DKV: tl.constexpr,  # every key is in one list of the first pass only, so its dk and dv are complete there
):
    """dq of one tile of queries of one head; grid as that of `forward_kernel`."""
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

    base = q + (b * A.T * A.HEADS + head) * A.H
    pointers = vectors_of(base, token, within, A.HEADS * A.H, A.H, Q, A.D, A.WIDE)
    queries = load_rows(pointers, exists, A.H, A.D, True)
    base = dout + (b * A.T * A.HEADS + head) * A.HV
    pointers = vectors_of(base, token, within, A.HEADS * A.HV, A.HV, Q, A.DV, A.WIDE)
    douts = load_rows(pointers, exists, A.HV, A.DV, True)
    scalars = of_heads((b * A.HEADS + head) * A.T, within, A.T, Q) + token
    # A row without keys has lse -inf; with +inf its weights are 0, as are those of rows that do not exist.
    base = tl.load(lse + scalars, mask=exists, other=float("inf")) * 1.4426950408889634
    base = tl.where(base == float("-inf"), float("inf"), base)[:, None]
    deltas = tl.load(delta + scalars, mask=exists, other=0.0)[:, None]
    segment = token
    if A.SEGMENTED:
        segment = tl.load(q_segments + b * A.T + token, mask=exists, other=-2)

    at = b * A.S * A.KV_HEADS + kv_head
    early_at = b * BEFORE_KV.ROWS * A.KV_HEADS + kv_head
    held, rows = (queries, douts, base, deltas), (within, segment, kv_segments + b * A.S)
    sources = k + at * A.H, v + at * A.HV
    dkv = dk + at * A.H, dv + at * A.HV, before_k + early_at * A.H, before_v + early_at * A.HV
    result = zeros(Q.TILE, A.D)
    lists = entries, tiles, chosen_by, bits
    span = list_of(spans, b, head, block, KV, L, W)
    result = _walk_pass(result, 0, held, begin, end, sources, span, lists, rows, dkv, A, Q, KV, L, BEFORE_KV, WITH_DKV)
    if KV2.ROWS > 0:
        passed = span[2]
        lists = more_entries, more_tiles, more_chosen_by, more_bits
        span = list_of(more_spans, b, head, block, KV2, L2, W)
        result = _walk_pass(
            result, passed, held, begin, end, sources, span, lists, rows, dkv, A, Q, KV2, L2, BEFORE_KV, False
        )

    if W.PIECES:
        _store_piece(dq, item, result, b, within, A.BATCH, A.D, Q)
    else:
        if W.MERGED:
            result = _pieces_added(result, piece_dq, piece, last_piece, b, within, A.BATCH, A.D, Q)
        result = result * A.SCALE
        if BEFORE.GIVEN:
            early, known = row_of(token, exists, BEFORE)
            pointers = addresses(
                before + (b * BEFORE.ROWS * A.OWN_HEADS + own) * A.H, early, A.OWN_HEADS * A.H, A.D, True
            )
            result += load_rows(pointers, known, A.H, A.D, True).to(tl.float32)
        place = token if OUT.BY_TOKEN else row
        base = dq + (b * OUT.ROWS * A.OWN_HEADS + own) * A.H
        pointers = vectors_of(base, place, within, A.OWN_HEADS * A.H, A.H, Q, A.D, True)
        store_rows(pointers, result, exists, A.H, A.D)


@triton.jit
def _walk_queries(
    dkeys,
    dvalues,
    keys,
    values,
    first,
    last,
    count,  # entries of the list
    sources,  # pointers to q and dout, lse and delta, of a head
    lists,
    rows,  # places in the block, segment ids of the keys, pointer to those of the queries
    dq,  # pointer to dq of a head
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_DQ: tl.constexpr,
):
    """Adds to dk (not yet scaled) and dv what steps first .. last - 1 give; stores their dq if WITH_DQ."""
    within, segment, segments = rows
    for step in tl.range(first, last):
        slot, part, place, row, exists = rows_of(lists, step, count, Q)
        token = token_of(row, Q)
        exists = exists & (token < A.T)
        pointers = vectors_of(sources[0], token, place, A.HEADS * A.H, A.H, Q, A.D, A.WIDE)
        queries = load_rows(pointers, exists, A.H, A.D, MASKED)
        scalars = of_heads(token, place, A.T, Q)
        if MASKED:
            base = tl.load(sources[2] + scalars, mask=exists, other=float("inf"))
            deltas = tl.load(sources[3] + scalars, mask=exists, other=0.0)
        else:
            base, deltas = tl.load(sources[2] + scalars), tl.load(sources[3] + scalars)
        base = tl.where(base == float("-inf"), float("inf"), base * 1.4426950408889634)
        scores = logits(tl.dot(keys, tl.trans(queries), input_precision="ieee"), A)
        may = 0
        if MASKED:
            may = may_attend(lists, slot, part, within, KV, Q)
            if L.CHOSEN > 0:
                may = may & chose(lists, slot, place, Q, L)[None, :]
            if A.SEGMENTED:
                other = tl.load(segments + token, mask=exists, other=-2)
                may = may & (segment[:, None] == other[None, :])
        pointers = vectors_of(sources[1], token, place, A.HEADS * A.HV, A.HV, Q, A.DV, A.WIDE)
        douts = load_rows(pointers, exists, A.HV, A.DV, MASKED)
        dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
        weights, dscores = _score_gradient(scores, base[None, :], dweights, deltas[None, :], may, A, MASKED)
        dvalues = tl.dot(weights.to(douts.dtype), douts, dvalues, input_precision="ieee")
        dscores = dscores.to(queries.dtype)
        dkeys = tl.dot(dscores, queries, dkeys, input_precision="ieee")
        if WITH_DQ:
            dqueries = tl.dot(tl.trans(dscores), keys, input_precision="ieee") * A.SCALE
            pointers = vectors_of(dq, row, place, A.OWN_HEADS * A.H, A.H, Q, A.D, True)
            store_rows(pointers, dqueries, exists, A.H, A.D)
    return dkeys, dvalues


@triton.jit
def dkv_kernel(
    q,
    k,
    v,
    work,  # this and all up to ``kv_segments``: as in `forward_kernel`, with key heads and key blocks
    pieces,  # also int32 [BATCHES, OWN_HEADS, BLOCKS], the steps of a job before those of a query head, if PIECES
    spans,
    entries,
    tiles,
    chosen_by,
    bits,
    q_segments,
    kv_segments,
    piece_dk,  # float32 [pieces, B, rows of a block, D], if MERGED
    piece_dv,  # float32 [pieces, B, rows of a block, DV]
    lse,
    delta,
    dout,
    before_k,  # [B, BEFORE.ROWS, KV_HEADS, H]: dk of earlier passes
    before_v,  # [B, BEFORE.ROWS, KV_HEADS, HV]
    dk,  # [B, OUT.ROWS, KV_HEADS, H]; like ``piece_dk`` if PIECES
    dv,  # [B, OUT.ROWS, KV_HEADS, HV]
    dq,  # [B, Q.ROWS, OWN_HEADS, H] if WITH_DQ
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    BEFORE: tl.constexpr,
    OUT: tl.constexpr,
    WITH_DQ: tl.constexpr,  # every row of queries meets one block of keys only, so its dq is complete there
    IN_PLACE: tl.constexpr,  # dk and dv are written over those of earlier passes
):
    """dk and dv of one tile of keys of one key head; grid (jobs or pieces, times tiles of a block, B)."""
    b = tl.program_id(1).to(tl.int64)
    item, job, part, begin, end, piece, last_piece = job_of(work, pieces, b, W, KV.PARTS, A.KV_HEADS * W.BLOCKS)
    kv_head, block = job // W.BLOCKS, job % W.BLOCKS
    within = part * KV.TILE + tl.arange(0, KV.TILE)
    row = block * KV.BLOCK + within
    token = token_of(row, KV)
    exists = (within < KV.BLOCK) & (row < KV.ROWS) & (token < A.S)

    at = b * A.S * A.KV_HEADS + kv_head
    keys = load_rows(addresses(k + at * A.H, token, A.KV_HEADS * A.H, A.D, A.WIDE), exists, A.H, A.D, True)
    values = load_rows(addresses(v + at * A.HV, token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists, A.HV, A.DV, True)
    segment = token
    if A.SEGMENTED:
        segment = tl.load(kv_segments + b * A.S + token, mask=exists, other=-1)
    rows = within, segment, q_segments + b * A.T
    dkeys, dvalues = zeros(KV.TILE, A.D), zeros(KV.TILE, A.DV)
    group: tl.constexpr = A.HEADS // A.KV_HEADS
    # The query heads of this group that are of the pass: FIRST_HEAD + own * HEAD_STEP within the group.
    first_own = tl.cdiv(kv_head * group - A.FIRST_HEAD, A.HEAD_STEP)
    last_own = tl.cdiv((kv_head + 1) * group - A.FIRST_HEAD, A.HEAD_STEP)
    for own in tl.range(first_own, last_own, Q.PACK):
        head = A.FIRST_HEAD + own * A.HEAD_STEP
        first, free, steps, count = list_of(spans, b, head, block, Q, L, W)
        # Read, not summed up from head to head: Triton 3.6 takes such a sum in this loop for 0.
        passed = 0
        if W.PIECES:
            passed = tl.load(pieces + ((b % W.BATCHES) * A.OWN_HEADS + own) // Q.PACK * W.BLOCKS + block)
        low, middle, high = share_of(begin, end, passed, free, steps)
        at = b * A.T * A.HEADS + head
        scalars = (b * A.HEADS + head) * A.T
        sources = q + at * A.H, dout + at * A.HV, lse + scalars, delta + scalars
        lists = entries + first, tiles + first, chosen_by + first, bits
        for MASKED in tl.static_range(2):
            if L.ANY_MASKED if MASKED else L.ANY_FREE:
                dkeys, dvalues = _walk_queries(
                    dkeys,
                    dvalues,
                    keys,
                    values,
                    middle if MASKED else low,
                    high if MASKED else middle,
                    count,
                    sources,
                    lists,
                    rows,
                    dq + (b * Q.ROWS * A.OWN_HEADS + own) * A.H,
                    A,
                    Q,
                    KV,
                    L,
                    MASKED,
                    WITH_DQ,
                )

    if W.PIECES:
        _store_piece(dk, item, dkeys, b, within, A.BATCH, A.D, KV)
        _store_piece(dv, item, dvalues, b, within, A.BATCH, A.DV, KV)
    else:
        if W.MERGED:
            dkeys = _pieces_added(dkeys, piece_dk, piece, last_piece, b, within, A.BATCH, A.D, KV)
            dvalues = _pieces_added(dvalues, piece_dv, piece, last_piece, b, within, A.BATCH, A.DV, KV)
        dkeys = dkeys * A.SCALE
        if BEFORE.GIVEN:
            early, known = row_of(token, exists, BEFORE)
            at = b * BEFORE.ROWS * A.KV_HEADS + kv_head
            pointers = addresses(before_k + at * A.H, early, A.KV_HEADS * A.H, A.D, True)
            dkeys += load_rows(pointers, known, A.H, A.D, True).to(tl.float32)
            pointers = addresses(before_v + at * A.HV, early, A.KV_HEADS * A.HV, A.DV, True)
            dvalues += load_rows(pointers, known, A.HV, A.DV, True).to(tl.float32)
        if IN_PLACE:
            dk, dv = before_k, before_v
        place = token if OUT.BY_TOKEN else row
        at = b * OUT.ROWS * A.KV_HEADS + kv_head
        store_rows(addresses(dk + at * A.H, place, A.KV_HEADS * A.H, A.D, True), dkeys, exists, A.H, A.D)
        store_rows(addresses(dv + at * A.HV, place, A.KV_HEADS * A.HV, A.DV, True), dvalues, exists, A.HV, A.DV)
