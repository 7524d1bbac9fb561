"""The forward kernel: one program holds a tile of queries and walks over the key blocks listed for it."""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from .tiles import addresses, allowed, load_rows, logits, row_of, share_of, store_rows, token_of


@triton.jit
def _walk(
    state,
    q,
    first,
    last,
    k,
    v,
    lists,
    bits,
    bit_row,
    segment,
    segments,
    S: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
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
):
    """Goes on from state = (out before division, largest logit, sum of weights) over steps first .. last - 1."""
    out, top, total = state
    column = tl.arange(0, N)
    for step in tl.range(first, last):
        slot, part = step // PARTS, step % PARTS
        row = tl.load(lists + 2 * slot) * BKV + part * N + column
        token = token_of(row, KV_COUNT, KV_STEP, KV_JUMP, KV_START)
        exists = (row < KV_ROWS) & (token < S) & (part * N + column < BKV)
        keys = load_rows(addresses(k, token, KV_STRIDE, D, WIDE), exists, H, D, MASKED)
        products = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            words: tl.constexpr = PARTS * N // 32
            first_word = tl.load(lists + 2 * slot + 1).to(tl.int64) * (BIT_ROWS * words) + part * (N // 32)
            may = allowed(bits + first_word, bit_row, words, N)
            if SEGMENTED:
                other = tl.load(segments + token, mask=exists, other=-1)
                may = may & (segment[:, None] == other[None, :])
        if CAP == 0 and SCALE > 1e-30:
            # The largest logit is that of the largest product: no multiplication before the maximum.
            if MASKED:
                products = tl.where(may, products, float("-inf"))
            raised = tl.maximum(top, tl.max(products, 1) * (SCALE * 1.4426950408889634))
            scores = products * (SCALE * 1.4426950408889634)
        else:
            scores = logits(products, SCALE, CAP)
            if MASKED:
                scores = tl.where(may, scores, float("-inf"))
            raised = tl.maximum(top, tl.max(scores, 1))
        shift = raised
        if MASKED:
            shift = tl.where(raised == float("-inf"), 0.0, raised)  # a row that has seen no key yet
        weights = tl.exp2(scores - shift[:, None])
        old = tl.exp2(top - shift)
        total = total * old + tl.sum(weights, 1)
        values = load_rows(addresses(v, token, V_STRIDE, DV, WIDE), exists, HV, DV, MASKED)
        out = tl.dot(weights.to(values.dtype), values, out * old[:, None], input_precision="ieee")
        top = raised
    return out, top, total


@triton.jit
def forward_kernel(
    q,  # [B, T, HEADS, H]
    k,  # [B, S, KV_HEADS, H]
    v,  # [B, S, KV_HEADS, HV]
    order,  # int32 [OWN_HEADS * BLOCKS]: own head * BLOCKS + query block, in the order to begin them
    lists,  # int32 [LISTS_B, LISTS_H, BLOCKS, 2 + 2 * WIDTH]: for each query block the numbers of free and of all,
    # then (key block, tile of `bits`) of each, free ones first
    bits,  # int32 [tiles, rows, words]
    more_lists,  # the same of a second pass with the same query rows, if TWO
    more_bits,
    q_segments,  # int32 [B, T], -2 in padding
    kv_segments,  # int32 [B, S], -1 in padding
    sinks,  # float32 [HEADS]
    before,  # [B, BEFORE_ROWS, OWN_HEADS, HV]: out of earlier passes
    before_lse,  # float32 [B, OWN_HEADS, BEFORE_ROWS]
    out,  # [SPLITS, B, OUT_ROWS, OWN_HEADS, HV]
    lse,  # float32 [SPLITS, B, OWN_HEADS, OUT_ROWS]
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,  # H and HV, rounded up to powers of two
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    FIRST_HEAD: tl.constexpr,  # the program's heads are FIRST_HEAD, FIRST_HEAD + HEAD_STEP, ...
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
    TWO: tl.constexpr,  # whether there is a second pass; its key rows and lists:
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
    BEFORE: tl.constexpr,  # whether there are earlier passes; their rows:
    BEFORE_ROWS: tl.constexpr,
    BEFORE_COUNT: tl.constexpr,
    BEFORE_JUMP: tl.constexpr,
    BEFORE_START: tl.constexpr,
    SINKS: tl.constexpr,
    BY_TOKEN: tl.constexpr,  # out by token, else by row
    OUT_ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTS_B: tl.constexpr,
    LISTS_H: tl.constexpr,
    BQ: tl.constexpr,
    BKV: tl.constexpr,
    M: tl.constexpr,  # rows of a tile of queries, and of keys
    N: tl.constexpr,
    Q_PARTS: tl.constexpr,  # tiles in a block
    KV_PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    ORDERED: tl.constexpr,  # whether `order` is to be looked at
    ANY_FREE: tl.constexpr,
    ANY_MASKED: tl.constexpr,
):
    """Attention of one tile of queries of one head; grid (OWN_HEADS * BLOCKS * Q_PARTS * SPLITS, B)."""
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
    segment = tl.zeros((M,), tl.int32)
    if SEGMENTED:
        segment = tl.load(q_segments + b * T + token, mask=exists, other=-2)

    result = tl.zeros((M, DV), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    if SINKS:
        top = tl.zeros((M,), tl.float32) + tl.load(sinks + head) * 1.4426950408889634
    if BEFORE:
        early, known = row_of(token, exists, BEFORE_COUNT, BEFORE_JUMP, BEFORE_START)
        at = b * OWN_HEADS + own
        early_lse = tl.load(before_lse + at * BEFORE_ROWS + early, mask=known, other=float("-inf"))
        top = tl.where(known, early_lse * 1.4426950408889634, top)
        at = b * BEFORE_ROWS * OWN_HEADS + own
        result = load_rows(addresses(before + at * HV, early, OWN_HEADS * HV, DV, True), known, HV, DV, True).to(
            tl.float32
        )
    if SPLITS > 1:
        top = tl.where(split == 0, top, float("-inf"))  # the first of several programs goes on, the others begin anew
    total = tl.where(top == float("-inf"), 0.0, 1.0)

    line = ((b % LISTS_B) * LISTS_H + head % LISTS_H) * BLOCKS + block
    keys = k + (b * S * KV_HEADS + kv_head) * H
    values = v + (b * S * KV_HEADS + kv_head) * HV
    state = result, top, total
    for SECOND in tl.static_range(2):
        if SECOND == 0 or TWO:
            entries = more_lists + line * (2 + 2 * WIDTH2) if SECOND else lists + line * (2 + 2 * WIDTH)
            full, count = tl.load(entries), tl.load(entries + 1)
            bounds = share_of(full, count, split, SPLITS, KV2_PARTS if SECOND else KV_PARTS)
            for MASKED in tl.static_range(2):
                if (ANY_MASKED2 if SECOND else ANY_MASKED) if MASKED else (ANY_FREE2 if SECOND else ANY_FREE):
                    state = _walk(
                        state,
                        queries,
                        bounds[2 * MASKED],
                        bounds[2 * MASKED + 1],
                        keys,
                        values,
                        entries + 2,
                        more_bits if SECOND else bits,
                        within,
                        segment,
                        kv_segments + b * S,
                        S,
                        KV_HEADS * H,
                        KV_HEADS * HV,
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
                    )
    result, top, total = state

    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    result = result / total[:, None]
    natural = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    place = token if BY_TOKEN else row
    at = split * BATCH + b
    pointers = addresses(out + (at * OUT_ROWS * OWN_HEADS + own) * HV, place, OWN_HEADS * HV, DV, True)
    store_rows(pointers, result, exists, HV, DV)
    tl.store(lse + (at * OWN_HEADS + own) * OUT_ROWS + place, natural, mask=exists)
