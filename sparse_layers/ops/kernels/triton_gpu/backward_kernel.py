"""The Triton backward kernels: dq by tiles of queries, dk and dv by tiles of keys.

**Two kernels, each with lists of its own.** A program of `dq_kernel` holds queries and walks over key blocks. A program
of `dkv_kernel` holds keys and walks over query blocks, for all query heads of its key head.

**Products are recomputed.** With p = exp(logits - lse) and dp = dout v^T, ds = p * (dp - delta). Then dv = p^T dout,
dq = ds k and dk = ds^T q.

**One kernel is enough if blocks are in one list only.** WITH_DKV: `dq_kernel` stores dk and dv of each step, for they
are complete. WITH_DQ: `dkv_kernel` stores dq of each step.

**No atomic additions to dq, dk and dv.** A long list is split: one launch computes a result for each split. The launch
of all work tiles adds these in their order, so that results are the same from run to run.

**The gradient of a bias's table is that of `dq_kernel`.** It adds ds by distance, by atomic additions: all programs of
a head share the table. They are additions of integers if gradients must be deterministic.

**Scores are transposed in `dkv_kernel`.** Scores, p, dp and ds are [keys, queries], and so the left sides of the
products of dv and dk.

A step of each, with time to the right. Triton loads the tiles of num_stages steps ahead::

    dq_kernel    load k_tile, v_tile
    products     [-- scores --][---- dp ----]          [-- dq += ds k --] if WITH_DKV [-- dv --][-- dk --]
    registers                  [ mask ]     [ p, ds ]                                                     [ store ]

    dkv_kernel   load q_tile, lse, delta, dout_tile
    products     [-- scores --][---- dp ----]          [-- dv += p dout --][-- dk += ds q --] if WITH_DQ [-- dq --]
    registers                  [ mask ]     [ p, ds ]                                                     [ store ]
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu.biases import (
    add_by_distance,
    biased_logits,
    load_bias,
    positions_of_tile,
    store_end_sums,
    zero_end_sums,
)
from ..gpu.tiles import (
    LOG2_E,
    BlockListPointers,
    Schedule,
    addresses,
    clip_steps,
    has_selected,
    ids_allow,
    load_ids,
    load_mask,
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
from .forward_kernel import KVPointers


class BackwardQueryTile(NamedTuple):
    """The queries of a program."""

    q_tile: Any  # [Q.TILE, D]
    dout_tile: Any  # [Q.TILE, DV]
    lse: Any  # [Q.TILE, 1], to base 2
    delta: Any  # [Q.TILE, 1]
    row_in_block: Any  # [Q.TILE]
    ids: Any  # `TokenIds`
    positions: Any  # `TilePositions`
    bias: Any  # `BiasOfHead`


class KVTile(NamedTuple):
    """The keys of a program."""

    k_tile: Any  # [KV.TILE, D]
    v_tile: Any  # [KV.TILE, DV]
    row_in_block: Any  # [KV.TILE]
    ids: Any  # `TokenIds`
    positions: Any  # `TilePositions`


class QueryPointers(NamedTuple):
    """Pointers to a query head."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


class GradientPointers(NamedTuple):
    """Pointers to dk and dv of a key head, and to those of earlier passes."""

    dk: Any
    dv: Any
    earlier_dk: Any
    earlier_dv: Any


@triton.jit
def _p_and_ds(scores, lse, dp, delta, allowed, A: tl.constexpr, MASKED: tl.constexpr):
    """Returns (p, ds) of logits to base 2; lse, to base 2, and delta broadcast against them."""
    p = tl.exp2(tl.minimum(scores - lse, 0.0))  # see `reduced_lse`
    if MASKED:
        p = tl.where(allowed, p, 0.0)
    ds = p * (dp - delta)
    if A.CAP != 0:
        squashed = scores / (A.CAP * LOG2_E)
        ds = ds * tl.where(p > 0, 1 - squashed * squashed, 0.0)  # a bias of pairs that are not allowed may be NaN
    return p, ds


# --- gradients of splits and of earlier passes -----------------------------------------------------------------------


@triton.jit
def _add_splits(x, results, work_tile, batch, row_in_block, BATCH: tl.constexpr, SIZE: tl.constexpr, X: tl.constexpr):
    """Adds to x [X.TILE, SIZE] the results of its splits, float32 [splits, B, rows of a block, SIZE]."""
    for split in tl.range(work_tile.first_split, work_tile.end_split):
        offset = (split.to(tl.int64) * BATCH + batch) * (X.TILES * X.TILE * SIZE)
        x += tl.load(addresses(results + offset, row_in_block, SIZE, SIZE, True))
    return x


@triton.jit
def _store_split(results, x, work_tile, batch, row_in_block, BATCH: tl.constexpr, SIZE: tl.constexpr, X: tl.constexpr):
    """Stores the result of a split for `_add_splits`."""
    offset = (work_tile.split.to(tl.int64) * BATCH + batch) * (X.TILES * X.TILE * SIZE)
    tl.store(addresses(results + offset, row_in_block, SIZE, SIZE, True), x)


@triton.jit
def _load_earlier(base, row, exists, STRIDE: tl.constexpr, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """Loads rows of a gradient of earlier passes, STRIDE elements apart, in float32."""
    return load_rows(addresses(base, row, STRIDE, SIZE, True), exists, LENGTH, SIZE, True).to(tl.float32)


# --- dq --------------------------------------------------------------------------------------------------------------


@triton.jit
def _dq_steps(first, end, num_entries, state, queries, kv, lists, gradients, A: tl.constexpr, Q: tl.constexpr,
              KV: tl.constexpr, L: tl.constexpr, EARLIER_KV: tl.constexpr, MASKED: tl.constexpr,
              WITH_DKV: tl.constexpr):  # fmt: skip
    """Adds steps first .. end - 1 to ``state``; stores their dk and dv if WITH_DKV.

    The state is dq, not yet scaled, and `zero_end_sums` of the gradient of a bias.
    """
    dq, end_sums = state
    q_tile, dout_tile = queries.q_tile, queries.dout_tile
    for step in tl.range(first, end):
        kv_rows = load_step_rows(lists, step, num_entries, KV)
        token = token_of(kv_rows.row, KV)  # [KV.TILE]
        exists = kv_rows.exists & (token < A.S)
        k_tile = load_rows(addresses(kv.k, token, A.KV_HEADS * A.H, A.D, A.WIDE), exists, A.H, A.D, MASKED)
        v_tile = load_rows(addresses(kv.v, token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists, A.HV, A.DV, MASKED)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [Q.TILE, KV.TILE]
        if A.BIAS.EXISTS:
            keys = positions_of_tile(kv_rows.block, kv_rows.tile, token, KV)
            scores = biased_logits(scores, queries.bias, queries.positions, keys, 0, A, Q, KV)
        else:
            scores = logits(scores, A)
        allowed = 0
        if MASKED:
            allowed = may_attend(lists, kv_rows, token, exists, queries.row_in_block, queries.ids, A, Q, KV, L)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")  # [Q.TILE, KV.TILE]
        p, ds = _p_and_ds(scores, queries.lse, dp, queries.delta, allowed, A, MASKED)
        if A.BIAS.LENGTH > 0:
            end_sums = add_by_distance(ds, end_sums, queries.bias, queries.positions, keys, A, Q, KV)
        ds = ds.to(k_tile.dtype)
        dq = tl.dot(ds, k_tile, dq, input_precision="ieee")
        if WITH_DKV:
            dv = tl.dot(tl.trans(p.to(k_tile.dtype)), dout_tile, input_precision="ieee")  # [KV.TILE, DV]
            dk = tl.dot(tl.trans(ds), q_tile, input_precision="ieee") * A.SCALE  # [KV.TILE, D]
            if EARLIER_KV.EXISTS:
                row, has_earlier = row_of(token, exists, EARLIER_KV)
                dk += _load_earlier(gradients.earlier_dk, row, has_earlier, A.KV_HEADS * A.H, A.H, A.D)
                dv += _load_earlier(gradients.earlier_dv, row, has_earlier, A.KV_HEADS * A.HV, A.HV, A.DV)
            store_rows(addresses(gradients.dk, token, A.KV_HEADS * A.H, A.D, True), dk, exists, A.H, A.D)
            store_rows(addresses(gradients.dv, token, A.KV_HEADS * A.HV, A.DV, True), dv, exists, A.HV, A.DV)
    return dq, end_sums


@triton.jit
def _dq_pass(work_tile, steps_before, span, state, queries, kv, lists, gradients, A: tl.constexpr, Q: tl.constexpr,
             KV: tl.constexpr, L: tl.constexpr, EARLIER_KV: tl.constexpr, WITH_DKV: tl.constexpr):  # fmt: skip
    """Adds the steps of one pass that are the work tile's; ``steps_before`` are those of the pass before."""
    first, first_partial, end = clip_steps(work_tile, steps_before, span)
    lists = move_to_list(lists, span)
    if L.ANY_FULL:
        state = _dq_steps(first, first_partial, span.num_entries, state, queries, kv, lists, gradients, A, Q, KV, L,
                          EARLIER_KV, False, WITH_DKV)  # fmt: skip
    if L.ANY_PARTIAL:
        state = _dq_steps(first_partial, end, span.num_entries, state, queries, kv, lists, gradients, A, Q, KV, L,
                          EARLIER_KV, True, WITH_DKV)  # fmt: skip
    return state


@triton.jit
def _load_queries(pointers, q_ids, bias, batch, head, work_tile, q_rows, A: tl.constexpr, Q: tl.constexpr):
    """Loads the `BackwardQueryTile` of a program; ``pointers`` point to whole arrays, not to a head."""
    token, row_in_block, exists = q_rows.token, q_rows.row_in_block, q_rows.exists
    base = pointers.q + (batch * A.T * A.HEADS + head) * A.H
    vectors = query_addresses(base, token, row_in_block, A.HEADS * A.H, A.H, Q, A.D, A.WIDE)
    q_tile = load_rows(vectors, exists, A.H, A.D, True)
    base = pointers.dout + (batch * A.T * A.HEADS + head) * A.HV
    vectors = query_addresses(base, token, row_in_block, A.HEADS * A.HV, A.HV, Q, A.DV, A.WIDE)
    dout_tile = load_rows(vectors, exists, A.HV, A.DV, True)
    index = offset_of_head((batch * A.HEADS + head) * A.T, row_in_block, A.T, Q) + token
    # A row without keys has lse -inf; with +inf its weights are 0, as are those of rows that do not exist.
    lse = tl.load(pointers.lse + index, mask=exists, other=float("inf")) * LOG2_E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)[:, None]
    delta = tl.load(pointers.delta + index, mask=exists, other=0.0)[:, None]
    ids = load_ids(q_ids + batch * (A.NUM_IDS * A.T), token, exists, A.T, -2, A)
    positions = positions_of_tile(work_tile.block, work_tile.tile, token, Q)
    return BackwardQueryTile(q_tile, dout_tile, lse, delta, row_in_block, ids, positions, bias)


@triton.jit
def _store_dq(dq, out, earlier_dq, batch, pass_head, q_rows, A: tl.constexpr, Q: tl.constexpr, EARLIER: tl.constexpr,
              OUT: tl.constexpr):  # fmt: skip
    """Scales dq, adds that of earlier passes, and stores it to ``out``."""
    dq = dq * A.SCALE
    if EARLIER.EXISTS:
        row, has_earlier = row_of(q_rows.token, q_rows.exists, EARLIER)
        base = earlier_dq + (batch * EARLIER.ROWS * A.PASS_HEADS + pass_head) * A.H
        dq += _load_earlier(base, row, has_earlier, A.PASS_HEADS * A.H, A.H, A.D)
    row = q_rows.token if OUT.BY_TOKEN else q_rows.row
    base = out + (batch * OUT.ROWS * A.PASS_HEADS + pass_head) * A.H
    pointers = query_addresses(base, row, q_rows.row_in_block, A.PASS_HEADS * A.H, A.H, Q, A.D, True)
    store_rows(pointers, dq, q_rows.exists, A.H, A.D)


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    work_tiles,  # this and all up to ``kv_ids``: as in `triton_forward_kernel`
    splits,
    spans,
    entries,
    mask_tiles,
    active_query_groups,
    mask_bits,
    spans2,
    entries2,
    mask_tiles2,
    active_query_groups2,
    mask_bits2,
    q_ids,
    kv_ids,
    bias_table,
    bias_slopes,
    split_dq,  # float32 [splits, B, rows of a block, D], if MERGED
    lse,  # float32 [B, HEADS, T], of all passes
    delta,  # float32 [B, HEADS, T]
    dout,  # [B, T, HEADS, HV]
    earlier_dq,  # [B, EARLIER.ROWS, PASS_HEADS, H]: dq of earlier passes
    earlier_dk,  # [B, EARLIER_KV.ROWS, KV_HEADS, H]: dk of earlier passes, if WITH_DKV
    earlier_dv,  # [B, EARLIER_KV.ROWS, KV_HEADS, HV]
    dtable_scale,  # float32 []: units per 1.0 in ``dtable``; None without BIAS.FIXED_POINT
    dtable,  # float32 or int64 [HEADS, BIAS.LENGTH]: the gradient of the table, added to in place; None without a table
    dq,  # [B, OUT.ROWS, PASS_HEADS, H]; like ``split_dq`` if SPLITS
    dk,  # [B, S, KV_HEADS, H] if WITH_DKV
    dv,  # [B, S, KV_HEADS, HV]
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    KV2: tl.constexpr,
    L2: tl.constexpr,
    W: tl.constexpr,
    EARLIER: tl.constexpr,
    EARLIER_KV: tl.constexpr,
    OUT: tl.constexpr,
    WITH_DKV: tl.constexpr,  # each key is in one list, so one step completes its dk and dv; never with a second pass
):
    """Computes dq of one work tile; grid as that of `triton_forward_kernel`."""
    batch = tl.program_id(1).to(tl.int64)
    work_tile = load_work_tile(Schedule(work_tiles, splits), batch, Q, A.PASS_HEADS, Q.PACK, W)
    pass_head, q_block = work_tile.head, work_tile.block
    head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
    kv_head = head // (A.HEADS // A.KV_HEADS)
    q_rows = rows_of_tile(work_tile, Q, A.T)
    row_in_block = q_rows.row_in_block

    bias = load_bias(bias_table, bias_slopes, dtable, dtable_scale, head, A)
    queries = _load_queries(QueryPointers(q, dout, lse, delta), q_ids, bias, batch, head, work_tile, q_rows, A, Q)
    vector, earlier = batch * A.S * A.KV_HEADS + kv_head, batch * EARLIER_KV.ROWS * A.KV_HEADS + kv_head
    kv_ids += batch * (A.NUM_IDS * A.S)
    kv = KVPointers(k + vector * A.H, v + vector * A.HV)
    dk, dv = dk + vector * A.H, dv + vector * A.HV
    dkv = GradientPointers(dk, dv, earlier_dk + earlier * A.H, earlier_dv + earlier * A.HV)
    lists = BlockListPointers(spans, entries, mask_tiles, active_query_groups, mask_bits, q_ids, kv_ids)
    state = zeros(Q.TILE, A.D), zero_end_sums(Q)  # dq [Q.TILE, D], not yet scaled
    span = load_span(spans, batch, head, q_block, KV, L, W)
    state = _dq_pass(work_tile, 0, span, state, queries, kv, lists, dkv, A, Q, KV, L, EARLIER_KV, WITH_DKV)
    if KV2.ROWS > 0:
        lists = BlockListPointers(spans2, entries2, mask_tiles2, active_query_groups2, mask_bits2, q_ids, kv_ids)
        span2 = load_span(spans2, batch, head, q_block, KV2, L2, W)
        state = _dq_pass(work_tile, span.num_steps, span2, state, queries, kv, lists, dkv, A, Q, KV2, L2, EARLIER_KV,
                         False)  # fmt: skip
    acc, end_sums = state
    if A.BIAS.LENGTH > 0:
        store_end_sums(end_sums, bias, A)

    if W.SPLITS:
        _store_split(dq, acc, work_tile, batch, row_in_block, A.BATCH, A.D, Q)
    else:
        if W.MERGED:
            acc = _add_splits(acc, split_dq, work_tile, batch, row_in_block, A.BATCH, A.D, Q)
        _store_dq(acc, dq, earlier_dq, batch, pass_head, q_rows, A, Q, EARLIER, OUT)


# --- dk and dv -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_lse_and_delta(pointers, index, exists, MASKED: tl.constexpr):
    """Loads (lse to base 2, delta) of queries; lse is +inf for queries without keys, so their weights are 0."""
    if MASKED:
        lse = tl.load(pointers.lse + index, mask=exists, other=float("inf"))
        delta = tl.load(pointers.delta + index, mask=exists, other=0.0)
    else:
        lse, delta = tl.load(pointers.lse + index), tl.load(pointers.delta + index)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E), delta


@triton.jit
def _dkv_steps(first, end, num_entries, dk, dv, keys, pointers, lists, bias, dq, A: tl.constexpr, Q: tl.constexpr,
               KV: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr, WITH_DQ: tl.constexpr):  # fmt: skip
    """Adds steps first .. end - 1 to dk, which is not yet scaled, and dv; stores their dq if WITH_DQ."""
    for step in tl.range(first, end):
        q_rows = load_step_rows(lists, step, num_entries, Q)
        row_in_block = q_rows.row_in_block
        token = token_of(q_rows.row, Q)  # [Q.TILE]
        exists = q_rows.exists & (token < A.T)
        vectors = query_addresses(pointers.q, token, row_in_block, A.HEADS * A.H, A.H, Q, A.D, A.WIDE)
        q_tile = load_rows(vectors, exists, A.H, A.D, MASKED)
        lse, delta = _load_lse_and_delta(pointers, offset_of_head(token, row_in_block, A.T, Q), exists, MASKED)
        scores = tl.dot(keys.k_tile, tl.trans(q_tile), input_precision="ieee")  # [KV.TILE, Q.TILE]
        if A.BIAS.EXISTS:
            positions = positions_of_tile(q_rows.block, q_rows.tile, token, Q)
            scores = biased_logits(scores, bias, positions, keys.positions, 1, A, Q, KV)
        else:
            scores = logits(scores, A)
        allowed = 0
        if MASKED:
            allowed = load_mask(lists, q_rows.entry, q_rows.tile, keys.row_in_block, KV, Q)
            if L.GRANULARITY > 0:
                allowed = allowed & has_selected(lists, q_rows.entry, row_in_block, Q, L)[None, :]
            if A.NUM_IDS > 0:
                q_ids = load_ids(lists.q_ids, token, exists, A.T, -2, A)
                allowed = allowed & ids_allow(q_ids, keys.ids, 1, A)
        vectors = query_addresses(pointers.dout, token, row_in_block, A.HEADS * A.HV, A.HV, Q, A.DV, A.WIDE)
        dout_tile = load_rows(vectors, exists, A.HV, A.DV, MASKED)
        dp = tl.dot(keys.v_tile, tl.trans(dout_tile), input_precision="ieee")  # [KV.TILE, Q.TILE]
        p, ds = _p_and_ds(scores, lse[None, :], dp, delta[None, :], allowed, A, MASKED)
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        ds = ds.to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk, input_precision="ieee")
        if WITH_DQ:
            dq_tile = tl.dot(tl.trans(ds), keys.k_tile, input_precision="ieee") * A.SCALE  # [Q.TILE, D]
            vectors = query_addresses(dq, q_rows.row, row_in_block, A.PASS_HEADS * A.H, A.H, Q, A.D, True)
            store_rows(vectors, dq_tile, exists, A.H, A.D)
    return dk, dv


@triton.jit
def _dkv_head(work_tile, batch, pass_head, dk, dv, keys, pointers, lists, splits, bias_pointers, dq, A: tl.constexpr,
              Q: tl.constexpr, KV: tl.constexpr, L: tl.constexpr, W: tl.constexpr, WITH_DQ: tl.constexpr):  # fmt: skip
    """Adds the steps of a query head that are the work tile's; ``pointers`` and ``dq`` are those to the arrays."""
    head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
    span = load_span(lists.spans, batch, head, work_tile.block, Q, L, W)
    # Read, not summed up from head to head: Triton 3.6 takes such a sum in this loop for 0.
    steps_before = 0
    if W.SPLITS:
        pack = ((batch % W.BATCHES) * A.PASS_HEADS + pass_head) // Q.PACK
        steps_before = tl.load(splits + pack * W.BLOCKS + work_tile.block)
    first, first_partial, end = clip_steps(work_tile, steps_before, span)
    vector, number = batch * A.T * A.HEADS + head, (batch * A.HEADS + head) * A.T
    q, dout = pointers.q + vector * A.H, pointers.dout + vector * A.HV
    pointers = QueryPointers(q, dout, pointers.lse + number, pointers.delta + number)
    lists = move_to_list(lists, span)
    dq += (batch * Q.ROWS * A.PASS_HEADS + pass_head) * A.H
    bias = load_bias(bias_pointers[0], bias_pointers[1], None, None, head, A)
    if L.ANY_FULL:
        dk, dv = _dkv_steps(first, first_partial, span.num_entries, dk, dv, keys, pointers, lists, bias, dq, A, Q, KV,
                            L, False, WITH_DQ)  # fmt: skip
    if L.ANY_PARTIAL:
        dk, dv = _dkv_steps(first_partial, end, span.num_entries, dk, dv, keys, pointers, lists, bias, dq, A, Q, KV,
                            L, True, WITH_DQ)  # fmt: skip
    return dk, dv


@triton.jit
def _load_keys(k, v, kv_ids, batch, work_tile, kv_rows, A: tl.constexpr, KV: tl.constexpr):
    """Loads the `KVTile` of a program."""
    token, exists = kv_rows.token, kv_rows.exists
    vector = batch * A.S * A.KV_HEADS + work_tile.head
    k_tile = load_rows(addresses(k + vector * A.H, token, A.KV_HEADS * A.H, A.D, A.WIDE), exists, A.H, A.D, True)
    v_tile = load_rows(addresses(v + vector * A.HV, token, A.KV_HEADS * A.HV, A.DV, A.WIDE), exists, A.HV, A.DV, True)
    ids = load_ids(kv_ids + batch * (A.NUM_IDS * A.S), token, exists, A.S, -1, A)
    positions = positions_of_tile(work_tile.block, work_tile.tile, token, KV)
    return KVTile(k_tile, v_tile, kv_rows.row_in_block, ids, positions)


@triton.jit
def _store_dkv(dk, dv, gradients, batch, kv_head, kv_rows, A: tl.constexpr, EARLIER: tl.constexpr, OUT: tl.constexpr,
               IN_PLACE: tl.constexpr):  # fmt: skip
    """Scales dk, adds dk and dv of earlier passes, and stores both; ``gradients`` point to the arrays."""
    dk = dk * A.SCALE
    if EARLIER.EXISTS:
        row, has_earlier = row_of(kv_rows.token, kv_rows.exists, EARLIER)
        vector = batch * EARLIER.ROWS * A.KV_HEADS + kv_head
        dk += _load_earlier(gradients.earlier_dk + vector * A.H, row, has_earlier, A.KV_HEADS * A.H, A.H, A.D)
        dv += _load_earlier(gradients.earlier_dv + vector * A.HV, row, has_earlier, A.KV_HEADS * A.HV, A.HV, A.DV)
    to_dk, to_dv = gradients.dk, gradients.dv
    if IN_PLACE:
        to_dk, to_dv = gradients.earlier_dk, gradients.earlier_dv
    row = kv_rows.token if OUT.BY_TOKEN else kv_rows.row
    vector = batch * OUT.ROWS * A.KV_HEADS + kv_head
    vectors = addresses(to_dk + vector * A.H, row, A.KV_HEADS * A.H, A.D, True)
    store_rows(vectors, dk, kv_rows.exists, A.H, A.D)
    vectors = addresses(to_dv + vector * A.HV, row, A.KV_HEADS * A.HV, A.DV, True)
    store_rows(vectors, dv, kv_rows.exists, A.HV, A.DV)


@triton.jit
def dkv_kernel(
    q,
    k,
    v,
    work_tiles,  # this and all up to ``kv_ids``: as in `triton_forward_kernel`, with key heads and key blocks
    splits,  # if SPLITS int32 [BATCHES, PASS_HEADS, BLOCKS]: steps of a work tile before those of a query head
    spans,
    entries,
    mask_tiles,
    active_query_groups,
    mask_bits,
    q_ids,
    kv_ids,
    bias_table,
    bias_slopes,
    split_dk,  # float32 [splits, B, rows of a block, D], if MERGED
    split_dv,  # float32 [splits, B, rows of a block, DV]
    lse,
    delta,
    dout,
    earlier_dk,  # [B, EARLIER.ROWS, KV_HEADS, H]: dk of earlier passes
    earlier_dv,  # [B, EARLIER.ROWS, KV_HEADS, HV]
    dk,  # [B, OUT.ROWS, KV_HEADS, H]; like ``split_dk`` if SPLITS
    dv,  # [B, OUT.ROWS, KV_HEADS, HV]
    dq,  # [B, Q.ROWS, PASS_HEADS, H] if WITH_DQ
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    EARLIER: tl.constexpr,
    OUT: tl.constexpr,
    WITH_DQ: tl.constexpr,  # every row of queries is in one list only, so its dq is complete there
    IN_PLACE: tl.constexpr,  # dk and dv are written over those of earlier passes
):
    """Computes dk and dv of one work tile; grid ((work tiles or splits) * tiles of a block, B)."""
    batch = tl.program_id(1).to(tl.int64)
    work_tile = load_work_tile(Schedule(work_tiles, splits), batch, KV, A.KV_HEADS, KV.PACK, W)
    kv_head = work_tile.head
    kv_rows = rows_of_tile(work_tile, KV, A.S)
    row_in_block = kv_rows.row_in_block
    keys = _load_keys(k, v, kv_ids, batch, work_tile, kv_rows, A, KV)
    q_ids += batch * (A.NUM_IDS * A.T)
    queries = QueryPointers(q, dout, lse, delta)
    lists = BlockListPointers(spans, entries, mask_tiles, active_query_groups, mask_bits, q_ids, kv_ids)
    dk_tile, dv_tile = zeros(KV.TILE, A.D), zeros(KV.TILE, A.DV)  # [KV.TILE, D], not yet scaled, [KV.TILE, DV]
    GROUP: tl.constexpr = A.HEADS // A.KV_HEADS
    # The query heads of this group that are of the pass: FIRST_HEAD + pass_head * HEAD_STEP within the group.
    first_head = tl.cdiv(kv_head * GROUP - A.FIRST_HEAD, A.HEAD_STEP)
    end_head = tl.cdiv((kv_head + 1) * GROUP - A.FIRST_HEAD, A.HEAD_STEP)
    for pass_head in tl.range(first_head, end_head, Q.PACK):
        dk_tile, dv_tile = _dkv_head(work_tile, batch, pass_head, dk_tile, dv_tile, keys, queries, lists, splits,
                                     (bias_table, bias_slopes), dq, A, Q, KV, L, W, WITH_DQ)  # fmt: skip
    if W.SPLITS:
        _store_split(dk, dk_tile, work_tile, batch, row_in_block, A.BATCH, A.D, KV)
        _store_split(dv, dv_tile, work_tile, batch, row_in_block, A.BATCH, A.DV, KV)
    else:
        if W.MERGED:
            dk_tile = _add_splits(dk_tile, split_dk, work_tile, batch, row_in_block, A.BATCH, A.D, KV)
            dv_tile = _add_splits(dv_tile, split_dv, work_tile, batch, row_in_block, A.BATCH, A.DV, KV)
        gradients = GradientPointers(dk, dv, earlier_dk, earlier_dv)
        _store_dkv(dk_tile, dv_tile, gradients, batch, kv_head, kv_rows, A, EARLIER, OUT, IN_PLACE)
