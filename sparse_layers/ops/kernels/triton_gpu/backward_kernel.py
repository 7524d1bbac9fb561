"""The backward kernels: dq by tiles of queries (with dk and dv where each key is in one block), dk and dv by keys.

With p = exp(logits - lse): dv = p^T dout, ds = p * (dout v^T - delta), dq = ds k, dk = ds^T q. All sums stay within one
program, so there are no atomic additions, and results are the same from run to run.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false

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
def _walk(
    result,
    queries,
    douts,
    base,
    deltas,
    first,
    last,
    k,
    v,
    lists,
    bits,
    bit_row,
    segment,
    segments,
    before_k,
    before_v,
    dk,
    dv,
    S: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    KV_ROWS: tl.constexpr,
    KV_COUNT: tl.constexpr,
    KV_STEP: tl.constexpr,
    KV_JUMP: tl.constexpr,
    KV_START: tl.constexpr,
    BIT_ROWS: tl.constexpr,
    BKV: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_DKV: tl.constexpr,
    BEFORE_KV: tl.constexpr,
    BEFORE_KV_COUNT: tl.constexpr,
    BEFORE_KV_JUMP: tl.constexpr,
    BEFORE_KV_START: tl.constexpr,
):
    """Adds to dq (not yet scaled) what steps first .. last - 1 give; stores their dk and dv if WITH_DKV."""
    column = tl.arange(0, N)
    words: tl.constexpr = PARTS * N // 32
    for step in tl.range(first, last):
        slot, part = step // PARTS, step % PARTS
        row = tl.load(lists + 2 * slot) * BKV + part * N + column
        token = token_of(row, KV_COUNT, KV_STEP, KV_JUMP, KV_START)
        exists_kv = (row < KV_ROWS) & (token < S) & (part * N + column < BKV)
        keys = load_rows(addresses(k, token, KV_HEADS * H, D, WIDE), exists_kv, H, D, MASKED)
        values = load_rows(addresses(v, token, KV_HEADS * HV, DV, WIDE), exists_kv, HV, DV, MASKED)
        scores = logits(tl.dot(queries, tl.trans(keys), input_precision="ieee"), SCALE, CAP)
        may = 0
        if MASKED:
            first_word = tl.load(lists + 2 * slot + 1).to(tl.int64) * (BIT_ROWS * words) + part * (N // 32)
            may = allowed(bits + first_word, bit_row, words, N)
            if SEGMENTED:
                other = tl.load(segments + token, mask=exists_kv, other=-1)
                may = may & (segment[:, None] == other[None, :])
        dweights = tl.dot(douts, tl.trans(values), input_precision="ieee")
        weights, dscores = _score_gradient(scores, base, dweights, deltas, may, CAP * 1.4426950408889634, MASKED)
        dscores = dscores.to(keys.dtype)
        result = tl.dot(dscores, keys, result, input_precision="ieee")
        if WITH_DKV:
            dvalues = tl.dot(tl.trans(weights.to(keys.dtype)), douts, input_precision="ieee")
            dkeys = tl.dot(tl.trans(dscores), queries, input_precision="ieee") * SCALE
            if BEFORE_KV:
                early, known = row_of(token, exists_kv, BEFORE_KV_COUNT, BEFORE_KV_JUMP, BEFORE_KV_START)
                pointers = addresses(before_k, early, KV_HEADS * H, D, True)
                dkeys += load_rows(pointers, known, H, D, True).to(tl.float32)
                pointers = addresses(before_v, early, KV_HEADS * HV, DV, True)
                dvalues += load_rows(pointers, known, HV, DV, True).to(tl.float32)
            store_rows(addresses(dk, token, KV_HEADS * H, D, True), dkeys, exists_kv, H, D)
            store_rows(addresses(dv, token, KV_HEADS * HV, DV, True), dvalues, exists_kv, HV, DV)
    return result


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    order,
    lists,
    bits,
    more_lists,
    more_bits,
    q_segments,
    kv_segments,
    lse,  # float32 [B, HEADS, T], of all passes together
    delta,  # float32 [B, HEADS, T]
    dout,  # [B, T, HEADS, HV]
    before,  # [B, BEFORE_ROWS, OWN_HEADS, H]: dq of earlier passes
    before_k,  # [B, BEFORE_KV_ROWS, KV_HEADS, H]: dk of earlier passes, if WITH_DKV
    before_v,  # [B, BEFORE_KV_ROWS, KV_HEADS, HV]
    dq,  # [SPLITS, B, OUT_ROWS, OWN_HEADS, H]
    dk,  # [B, S, KV_HEADS, H] if WITH_DKV
    dv,  # [B, S, KV_HEADS, HV]
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
    TWO: tl.constexpr,
    KV2_ROWS: tl.constexpr,
    KV2_COUNT: tl.constexpr,
    KV2_STEP: tl.constexpr,
    KV2_JUMP: tl.constexpr,
    KV2_START: tl.constexpr,
    WIDTH2: tl.constexpr,
    BKV2: tl.constexpr,
    KV2_PARTS: tl.constexpr,
    ANY_FREE2: tl.constexpr,
    ANY_MASKED2: tl.constexpr,
    WITH_DKV: tl.constexpr,  # every key is in one list of the first pass only, so its dk and dv are complete there
    BEFORE_KV: tl.constexpr,
    BEFORE_KV_ROWS: tl.constexpr,
    BEFORE_KV_COUNT: tl.constexpr,
    BEFORE_KV_JUMP: tl.constexpr,
    BEFORE_KV_START: tl.constexpr,
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
    ORDERED: tl.constexpr,
    ANY_FREE: tl.constexpr,
    ANY_MASKED: tl.constexpr,
):
    """dq of one tile of queries of one head; grid and arguments as in `forward_kernel`."""
    split, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    b, job = tl.program_id(1).to(tl.int64), place // Q_PARTS
    if ORDERED:
        job = tl.load(order + job)
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
    at = b * S * KV_HEADS + kv_head
    early_at = b * BEFORE_KV_ROWS * KV_HEADS + kv_head
    result = tl.zeros((M, D), tl.float32)
    for SECOND in tl.static_range(2):
        if SECOND == 0 or TWO:
            entries = more_lists + line * (2 + 2 * WIDTH2) if SECOND else lists + line * (2 + 2 * WIDTH)
            full, count = tl.load(entries), tl.load(entries + 1)
            bounds = share_of(full, count, split, SPLITS, KV2_PARTS if SECOND else KV_PARTS)
            for MASKED in tl.static_range(2):
                if (ANY_MASKED2 if SECOND else ANY_MASKED) if MASKED else (ANY_FREE2 if SECOND else ANY_FREE):
                    result = _walk(
                        result,
                        queries,
                        douts,
                        base,
                        deltas,
                        bounds[2 * MASKED],
                        bounds[2 * MASKED + 1],
                        k + at * H,
                        v + at * HV,
                        entries + 2,
                        more_bits if SECOND else bits,
                        within,
                        segment,
                        kv_segments + b * S,
                        before_k + early_at * H,
                        before_v + early_at * HV,
                        dk + at * H,
                        dv + at * HV,
                        S,
                        KV_HEADS,
                        H,
                        HV,
                        D,
                        DV,
                        SCALE,
                        CAP,
                        KV2_ROWS if SECOND else KV_ROWS,
                        KV2_COUNT if SECOND else KV_COUNT,
                        KV2_STEP if SECOND else KV_STEP,
                        KV2_JUMP if SECOND else KV_JUMP,
                        KV2_START if SECOND else KV_START,
                        Q_PARTS * M,
                        BKV2 if SECOND else BKV,
                        N,
                        KV2_PARTS if SECOND else KV_PARTS,
                        WIDE,
                        SEGMENTED,
                        MASKED,
                        WITH_DKV and SECOND == 0,
                        BEFORE_KV,
                        BEFORE_KV_COUNT,
                        BEFORE_KV_JUMP,
                        BEFORE_KV_START,
                    )

    result = result * SCALE
    if BEFORE:
        early, known = row_of(token, exists, BEFORE_COUNT, BEFORE_JUMP, BEFORE_START)
        known = known & (split == 0)
        early_at = b * BEFORE_ROWS * OWN_HEADS + own
        pointers = addresses(before + early_at * H, early, OWN_HEADS * H, D, True)
        result += load_rows(pointers, known, H, D, True).to(tl.float32)
    place = token if BY_TOKEN else row
    at = (split * BATCH + b) * OUT_ROWS * OWN_HEADS + own
    store_rows(addresses(dq + at * H, place, OWN_HEADS * H, D, True), result, exists, H, D)


@triton.jit
def _walk_queries(
    dkeys,
    dvalues,
    keys,
    values,
    first,
    last,
    q,
    dout,
    lse,
    delta,
    lists,
    bits,
    bit_row,
    segment,
    segments,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    Q_ROWS: tl.constexpr,
    Q_COUNT: tl.constexpr,
    Q_STEP: tl.constexpr,
    Q_JUMP: tl.constexpr,
    Q_START: tl.constexpr,
    BIT_ROWS: tl.constexpr,
    BQ: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds to dk (not yet scaled) and dv what steps first .. last - 1 give."""
    column = tl.arange(0, M)
    words: tl.constexpr = PARTS * M // 32
    for step in tl.range(first, last):
        slot, part = step // PARTS, step % PARTS
        row = tl.load(lists + 2 * slot) * BQ + part * M + column
        token = token_of(row, Q_COUNT, Q_STEP, Q_JUMP, Q_START)
        exists = (row < Q_ROWS) & (token < T) & (part * M + column < BQ)
        queries = load_rows(addresses(q, token, HEADS * H, D, WIDE), exists, H, D, MASKED)
        if MASKED:
            base = tl.load(lse + token, mask=exists, other=float("inf"))
            deltas = tl.load(delta + token, mask=exists, other=0.0)
        else:
            base, deltas = tl.load(lse + token), tl.load(delta + token)
        base = tl.where(base == float("-inf"), float("inf"), base * 1.4426950408889634)
        scores = logits(tl.dot(keys, tl.trans(queries), input_precision="ieee"), SCALE, CAP)
        may = 0
        if MASKED:
            first_word = tl.load(lists + 2 * slot + 1).to(tl.int64) * (BIT_ROWS * words) + part * (M // 32)
            may = allowed(bits + first_word, bit_row, words, M)
            if SEGMENTED:
                other = tl.load(segments + token, mask=exists, other=-2)
                may = may & (segment[:, None] == other[None, :])
        douts = load_rows(addresses(dout, token, HEADS * HV, DV, WIDE), exists, HV, DV, MASKED)
        dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
        weights, dscores = _score_gradient(
            scores, base[None, :], dweights, deltas[None, :], may, CAP * 1.4426950408889634, MASKED
        )
        dvalues = tl.dot(weights.to(douts.dtype), douts, dvalues, input_precision="ieee")
        dkeys = tl.dot(dscores.to(queries.dtype), queries, dkeys, input_precision="ieee")
    return dkeys, dvalues


@triton.jit
def dkv_kernel(
    q,
    k,
    v,
    order,  # int32 [KV_HEADS * BLOCKS]: key head * BLOCKS + key block; the lists are those of key blocks
    lists,
    bits,
    q_segments,
    kv_segments,
    lse,
    delta,
    dout,
    before_k,  # [B, BEFORE_ROWS, KV_HEADS, H]: dk of earlier passes
    before_v,  # [B, BEFORE_ROWS, KV_HEADS, HV]
    dk,  # [SPLITS, B, OUT_ROWS, KV_HEADS, H]
    dv,  # [SPLITS, B, OUT_ROWS, KV_HEADS, HV]
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
    ORDERED: tl.constexpr,
    ANY_FREE: tl.constexpr,
    ANY_MASKED: tl.constexpr,
):
    """dk and dv of one tile of keys of one key head; grid (KV_HEADS * BLOCKS * KV_PARTS * SPLITS, B)."""
    split, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    b, job = tl.program_id(1).to(tl.int64), place // KV_PARTS
    if ORDERED:
        job = tl.load(order + job)
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
    dkeys = tl.zeros((N, D), tl.float32)
    dvalues = tl.zeros((N, DV), tl.float32)
    group: tl.constexpr = HEADS // KV_HEADS
    # The query heads of this group that are of the pass: FIRST_HEAD + own * HEAD_STEP within the group.
    first_own = tl.cdiv(kv_head * group - FIRST_HEAD, HEAD_STEP)
    last_own = tl.cdiv((kv_head + 1) * group - FIRST_HEAD, HEAD_STEP)
    for own in tl.range(first_own, last_own):
        head = FIRST_HEAD + own * HEAD_STEP
        line = ((b % LISTS_B) * LISTS_H + head % LISTS_H) * BLOCKS + block
        entries = lists + line * (2 + 2 * WIDTH)
        full, count = tl.load(entries), tl.load(entries + 1)
        bounds = share_of(full, count, split, SPLITS, Q_PARTS)
        for MASKED in tl.static_range(2):
            if ANY_MASKED if MASKED else ANY_FREE:
                dkeys, dvalues = _walk_queries(
                    dkeys,
                    dvalues,
                    keys,
                    values,
                    bounds[2 * MASKED],
                    bounds[2 * MASKED + 1],
                    q + (b * T * HEADS + head) * H,
                    dout + (b * T * HEADS + head) * HV,
                    lse + (b * HEADS + head) * T,
                    delta + (b * HEADS + head) * T,
                    entries + 2,
                    bits,
                    within,
                    segment,
                    q_segments + b * T,
                    T,
                    HEADS,
                    H,
                    HV,
                    D,
                    DV,
                    SCALE,
                    CAP,
                    Q_ROWS,
                    Q_COUNT,
                    Q_STEP,
                    Q_JUMP,
                    Q_START,
                    KV_PARTS * N,
                    BQ,
                    M,
                    Q_PARTS,
                    WIDE,
                    SEGMENTED,
                    MASKED,
                )

    dkeys = dkeys * SCALE
    if BEFORE:
        early, known = row_of(token, exists, BEFORE_COUNT, BEFORE_JUMP, BEFORE_START)
        known = known & (split == 0)
        at = b * BEFORE_ROWS * KV_HEADS + kv_head
        pointers = addresses(before_k + at * H, early, KV_HEADS * H, D, True)
        dkeys += load_rows(pointers, known, H, D, True).to(tl.float32)
        pointers = addresses(before_v + at * HV, early, KV_HEADS * HV, DV, True)
        dvalues += load_rows(pointers, known, HV, DV, True).to(tl.float32)
    place = token if BY_TOKEN else row
    at = (split * BATCH + b) * OUT_ROWS * KV_HEADS + kv_head
    store_rows(addresses(dk + at * H, place, KV_HEADS * H, D, True), dkeys, exists, H, D)
    store_rows(addresses(dv + at * HV, place, KV_HEADS * HV, DV, True), dvalues, exists, HV, DV)
