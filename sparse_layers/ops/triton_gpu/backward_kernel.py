"""The backward kernels: dq by tiles of queries; dk and dv by tiles of keys, and dq, too, where each query has one block.

With p = exp(logits - lse): dv = p^T dout, ds = p * (dout v^T - delta), dq = ds k, dk = ds^T q. All sums stay within one
program, so there are no atomic additions, and results are the same from run to run.
"""

import triton
import triton.language as tl

from .tiles import addresses, allowed, load_rows, logits, row_of, share_of, store_rows, token_of


@triton.jit
def _score_gradient(scores, lse, dweights, delta, may, SCALED_CAP: tl.constexpr, MASKED: tl.constexpr):
    """(p, ds) of logits to base 2; lse (to base 2) and delta already broadcast against them."""
    weights = tl.exp2(scores - lse)
    if MASKED:
        weights = tl.where(may, weights, 0.0)
    dscores = weights * (dweights - delta)
    if SCALED_CAP != 0:
        squashed = scores / SCALED_CAP
        dscores = dscores * (1 - squashed * squashed)
    return weights, dscores


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    order,
    counts,
    index,
    tile,
    bits,
    q_segments,
    kv_segments,
    lse,  # float32 [B, HEADS, T], of all passes together
    delta,  # float32 [B, HEADS, T]
    dout,  # [B, T, HEADS, HV]
    before,  # float32 [B, BEFORE_ROWS, OWN_HEADS, H]: dq of earlier passes
    dq,  # [SPLITS, B, OUT_ROWS, OWN_HEADS, H]
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    HEAD_STEP: tl.constexpr,
    OWN_HEADS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    Q_COUNT: tl.constexpr,
    Q_STEP: tl.constexpr,
    Q_JUMP: tl.constexpr,
    Q_START: tl.constexpr,
    KV_ROWS: tl.constexpr,
    KV_COUNT: tl.constexpr,
    KV_STEP: tl.constexpr,
    KV_JUMP: tl.constexpr,
    KV_START: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_ROWS: tl.constexpr,
    BEFORE_COUNT: tl.constexpr,
    BEFORE_JUMP: tl.constexpr,
    BEFORE_START: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTS_B: tl.constexpr,
    LISTS_H: tl.constexpr,
    BQ: tl.constexpr,
    BKV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    Q_PARTS: tl.constexpr,
    KV_PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    ANY_FREE: tl.constexpr,
    ANY_MASKED: tl.constexpr,
):
    """dq of one tile of queries of one head; grid and arguments as in `forward_kernel`."""
    split, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    b, job = tl.program_id(1).to(tl.int64), tl.load(order + place // Q_PARTS)
    own, block = job // BLOCKS, job % BLOCKS
    head = FIRST_HEAD + own * HEAD_STEP
    kv_head = head // (HEADS // KV_HEADS)
    within = place % Q_PARTS * M + tl.arange(0, M)
    row = block * BQ + within
    token = token_of(row, Q_COUNT, Q_STEP, Q_JUMP, Q_START)
    exists = (within < BQ) & (row < Q_ROWS) & (token < T)

    queries = load_rows(addresses(q + (b * T * HEADS + head) * H, token, HEADS * H, D, WIDE), exists, H, D, True)
    douts = load_rows(addresses(dout + (b * T * HEADS + head) * HV, token, HEADS * HV, DV, WIDE), exists, HV, DV, True)
    scalars = (b * HEADS + head) * T + token
    # A row without keys has lse -inf; with +inf its weights are 0, as are those of rows that do not exist.
    base = tl.load(lse + scalars, mask=exists, other=float("inf")) * 1.4426950408889634
    base = tl.where(base == float("-inf"), float("inf"), base)[:, None]
    deltas = tl.load(delta + scalars, mask=exists, other=0.0)[:, None]
    segment = tl.zeros((M,), tl.int32)
    if SEGMENTED:
        segment = tl.load(q_segments + b * T + token, mask=exists, other=-2)

    line = ((b % LISTS_B) * LISTS_H + head % LISTS_H) * BLOCKS + block
    index, tile = index + line * WIDTH, tile + line * WIDTH
    full, count = tl.load(counts + line * 2), tl.load(counts + line * 2 + 1)
    free_first, free_last, masked_first, masked_last = share_of(full, count, split, SPLITS, KV_PARTS)
    k += (b * S * KV_HEADS + kv_head) * H
    v += (b * S * KV_HEADS + kv_head) * HV
    kv_segments += b * S
    column = tl.arange(0, N)
    words: tl.constexpr = KV_PARTS * N // 32
    result = tl.zeros((M, D), tl.float32)
    for MASKED in tl.static_range(2):
        if (MASKED == 0 and ANY_FREE) or (MASKED == 1 and ANY_MASKED):
            for step in tl.range(
                masked_first if MASKED else free_first, masked_last if MASKED else free_last
            ):
                slot, part = step // KV_PARTS, step % KV_PARTS
                kv_row = tl.load(index + slot) * BKV + part * N + column
                kv_token = token_of(kv_row, KV_COUNT, KV_STEP, KV_JUMP, KV_START)
                kv_exists = (kv_row < KV_ROWS) & (kv_token < S) & (part * N + column < BKV)
                keys = load_rows(addresses(k, kv_token, KV_HEADS * H, D, WIDE), kv_exists, H, D, MASKED)
                values = load_rows(addresses(v, kv_token, KV_HEADS * HV, DV, WIDE), kv_exists, HV, DV, MASKED)
                scores = logits(tl.dot(queries, tl.trans(keys), input_precision="ieee"), SCALE, CAP)
                may = 0
                if MASKED:
                    first_word = tl.load(tile + slot).to(tl.int64) * (Q_PARTS * M * words) + part * (N // 32)
                    may = allowed(bits + first_word, within, words, N)
                    if SEGMENTED:
                        other = tl.load(kv_segments + kv_token, mask=kv_exists, other=-1)
                        may = may & (segment[:, None] == other[None, :])
                dweights = tl.dot(douts, tl.trans(values), input_precision="ieee")
                _, dscores = _score_gradient(
                    scores, base, dweights, deltas, may, CAP * 1.4426950408889634, MASKED
                )
                result = tl.dot(dscores.to(keys.dtype), keys, result, input_precision="ieee")

    result = result * SCALE
    if BEFORE:
        early, known = row_of(token, exists, BEFORE_COUNT, BEFORE_JUMP, BEFORE_START)
        known = known & (split == 0)
        at = b * BEFORE_ROWS * OWN_HEADS + own
        result += load_rows(addresses(before + at * H, early, OWN_HEADS * H, D, True), known, H, D, True)
    place = token if BY_TOKEN else row
    at = (split * BATCH + b) * OUT_ROWS * OWN_HEADS + own
    store_rows(addresses(dq + at * H, place, OWN_HEADS * H, D, True), result, exists, H, D)


@triton.jit
def dkv_kernel(
    q,
    k,
    v,
    order,  # int32 [KV_HEADS * BLOCKS]: key head * BLOCKS + key block; the lists are those of key blocks
    counts,
    index,
    tile,
    bits,
    q_segments,
    kv_segments,
    lse,
    delta,
    dout,
    before_k,  # float32 [B, BEFORE_ROWS, KV_HEADS, H]: dk of earlier passes
    before_v,  # float32 [B, BEFORE_ROWS, KV_HEADS, HV]
    before_q,  # float32 [B, BEFORE_Q_ROWS, OWN_HEADS, H]: dq of earlier passes
    dk,  # [SPLITS, B, OUT_ROWS, KV_HEADS, H]
    dv,  # [SPLITS, B, OUT_ROWS, KV_HEADS, HV]
    dq,  # [B, T, OWN_HEADS, H] if WITH_DQ
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    HEAD_STEP: tl.constexpr,
    OWN_HEADS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    Q_COUNT: tl.constexpr,
    Q_STEP: tl.constexpr,
    Q_JUMP: tl.constexpr,
    Q_START: tl.constexpr,
    KV_ROWS: tl.constexpr,
    KV_COUNT: tl.constexpr,
    KV_STEP: tl.constexpr,
    KV_JUMP: tl.constexpr,
    KV_START: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_ROWS: tl.constexpr,
    BEFORE_COUNT: tl.constexpr,
    BEFORE_JUMP: tl.constexpr,
    BEFORE_START: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    WITH_DQ: tl.constexpr,  # every query tile is in one list only, so its dq is complete; its earlier rows:
    BEFORE_Q: tl.constexpr,
    BEFORE_Q_ROWS: tl.constexpr,
    BEFORE_Q_COUNT: tl.constexpr,
    BEFORE_Q_JUMP: tl.constexpr,
    BEFORE_Q_START: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTS_B: tl.constexpr,
    LISTS_H: tl.constexpr,
    BQ: tl.constexpr,
    BKV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    Q_PARTS: tl.constexpr,
    KV_PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    ANY_FREE: tl.constexpr,
    ANY_MASKED: tl.constexpr,
):
    """dk and dv of one tile of keys of one key head; grid (KV_HEADS * BLOCKS * KV_PARTS * SPLITS, B)."""
    split, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    b, job = tl.program_id(1).to(tl.int64), tl.load(order + place // KV_PARTS)
    kv_head, block = job // BLOCKS, job % BLOCKS
    within = place % KV_PARTS * N + tl.arange(0, N)
    row = block * BKV + within
    token = token_of(row, KV_COUNT, KV_STEP, KV_JUMP, KV_START)
    exists = (within < BKV) & (row < KV_ROWS) & (token < S)

    at = b * S * KV_HEADS + kv_head
    keys = load_rows(addresses(k + at * H, token, KV_HEADS * H, D, WIDE), exists, H, D, True)
    values = load_rows(addresses(v + at * HV, token, KV_HEADS * HV, DV, WIDE), exists, HV, DV, True)
    segment = tl.zeros((N,), tl.int32)
    if SEGMENTED:
        segment = tl.load(kv_segments + b * S + token, mask=exists, other=-1)
    q_segments += b * T
    dkeys = tl.zeros((N, D), tl.float32)
    dvalues = tl.zeros((N, DV), tl.float32)
    column = tl.arange(0, M)
    words: tl.constexpr = Q_PARTS * M // 32
    group: tl.constexpr = HEADS // KV_HEADS
    # The query heads of this group that are of the pass: FIRST_HEAD + own * HEAD_STEP within the group.
    first_own = tl.cdiv(kv_head * group - FIRST_HEAD, HEAD_STEP)
    last_own = tl.cdiv((kv_head + 1) * group - FIRST_HEAD, HEAD_STEP)
    for own in tl.range(first_own, last_own):
        head = FIRST_HEAD + own * HEAD_STEP
        line = ((b % LISTS_B) * LISTS_H + head % LISTS_H) * BLOCKS + block
        full, count = tl.load(counts + line * 2), tl.load(counts + line * 2 + 1)
        free_first, free_last, masked_first, masked_last = share_of(full, count, split, SPLITS, Q_PARTS)
        head_q = q + (b * T * HEADS + head) * H
        head_dout = dout + (b * T * HEADS + head) * HV
        for MASKED in tl.static_range(2):
            if (MASKED == 0 and ANY_FREE) or (MASKED == 1 and ANY_MASKED):
                for step in tl.range(
                    masked_first if MASKED else free_first, masked_last if MASKED else free_last
                ):
                    slot, part = step // Q_PARTS, step % Q_PARTS
                    q_row = tl.load(index + line * WIDTH + slot) * BQ + part * M + column
                    q_token = token_of(q_row, Q_COUNT, Q_STEP, Q_JUMP, Q_START)
                    q_exists = (q_row < Q_ROWS) & (q_token < T) & (part * M + column < BQ)
                    queries = load_rows(addresses(head_q, q_token, HEADS * H, D, WIDE), q_exists, H, D, MASKED)
                    scalars = (b * HEADS + head) * T + q_token
                    if MASKED:
                        base = tl.load(lse + scalars, mask=q_exists, other=float("inf"))
                        deltas = tl.load(delta + scalars, mask=q_exists, other=0.0)
                    else:
                        base, deltas = tl.load(lse + scalars), tl.load(delta + scalars)
                    base = tl.where(base == float("-inf"), float("inf"), base * 1.4426950408889634)
                    scores = logits(tl.dot(keys, tl.trans(queries), input_precision="ieee"), SCALE, CAP)
                    may = 0
                    if MASKED:
                        first_word = tl.load(tile + line * WIDTH + slot).to(tl.int64) * (KV_PARTS * N * words)
                        may = allowed(bits + first_word + part * (M // 32), within, words, M)
                        if SEGMENTED:
                            other = tl.load(q_segments + q_token, mask=q_exists, other=-2)
                            may = may & (segment[:, None] == other[None, :])
                    douts = load_rows(addresses(head_dout, q_token, HEADS * HV, DV, WIDE), q_exists, HV, DV, MASKED)
                    dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
                    weights, dscores = _score_gradient(
                        scores, base[None, :], dweights, deltas[None, :], may, CAP * 1.4426950408889634, MASKED
                    )
                    dvalues = tl.dot(weights.to(douts.dtype), douts, dvalues, input_precision="ieee")
                    dscores = dscores.to(queries.dtype)
                    dkeys = tl.dot(dscores, queries, dkeys, input_precision="ieee")
                    if WITH_DQ:
                        dqueries = tl.dot(tl.trans(dscores), keys, input_precision="ieee") * SCALE
                        if BEFORE_Q:
                            early, known = row_of(q_token, q_exists, BEFORE_Q_COUNT, BEFORE_Q_JUMP, BEFORE_Q_START)
                            q_at = b * BEFORE_Q_ROWS * OWN_HEADS + own
                            pointers = addresses(before_q + q_at * H, early, OWN_HEADS * H, D, True)
                            dqueries += load_rows(pointers, known, H, D, True)
                        pointers = addresses(dq + (b * T * OWN_HEADS + own) * H, q_token, OWN_HEADS * H, D, True)
                        store_rows(pointers, dqueries, q_exists, H, D)

    dkeys = dkeys * SCALE
    if BEFORE:
        early, known = row_of(token, exists, BEFORE_COUNT, BEFORE_JUMP, BEFORE_START)
        known = known & (split == 0)
        at = b * BEFORE_ROWS * KV_HEADS + kv_head
        dkeys += load_rows(addresses(before_k + at * H, early, KV_HEADS * H, D, True), known, H, D, True)
        dvalues += load_rows(addresses(before_v + at * HV, early, KV_HEADS * HV, DV, True), known, HV, DV, True)
    place = token if BY_TOKEN else row
    at = (split * BATCH + b) * OUT_ROWS * KV_HEADS + kv_head
    store_rows(addresses(dk + at * H, place, KV_HEADS * H, D, True), dkeys, exists, H, D)
    store_rows(addresses(dv + at * HV, place, KV_HEADS * HV, DV, True), dvalues, exists, HV, DV)
