"""Attention of a decoding step: a kernel that reads rows of a cache in place, and one that merges splits.

**One split a program.** It has the query heads of one key head, at one query token, and a split of their list.

**Lists name rows of the cache.** Rows that the query does not see are not read.

**Lists of several arrays are one.** A program walks over them as if they were, so that loads are on their way all the
time.

**Several query heads share matrix products.** Their softmax has a state for each head, as in the forward kernel.

**A single query head has a state in each lane of a tile.** Lanes are merged at the end. Within the loop no thread waits
for another warp's, which takes most of the time from one tile to the next.

A query with two arrays and two splits; STAGES tiles of keys are on their way::

    steps      0        1        2        3        4        5
    rows       array 0  array 0  array 0  array 1  array 1  array 1
    program    split 0  split 0  split 0  split 1  split 1  split 1

    begin      q_tile, then m_i, l_i, acc of sinks and of the new token, which split 0 writes to the arrays
    a step     rows -> k_tile, v_tile -> scores -> m_new, p, alpha -> acc = acc * alpha + p @ v_tile
    end        lanes are merged, out = acc / l_i, and lse of the split for `merge_kernel`
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu.tiles import LOG2_E, addresses, full, load_rows, logits, store_rows, zeros
from .eight_bits import quantize_row, split_queries, start_pairs, to_float32, update_pairs


class CacheArray(NamedTuple):
    """Sizes of one array of keys, and of the list of its rows that are read."""

    HEADS: int
    ROWS: int  # of a head
    FIRST: int  # where the list begins
    COUNT: int  # rows in the list
    STRIDE: int  # row i of the list is not seen before position i * STRIDE; 0 if that is unknown


class DecodeConstants(NamedTuple):
    """Constants of the kernels' compilation."""

    TOKENS: int  # queries in a row of a sequence, neighbouring batch entries
    HEADS: int  # key heads that are read, each with:
    GROUP: int  # query heads
    LIST_HEADS: int  # lists of rows of a query token: 1 or HEADS
    # Integers of a row of ``rows``: the position, with WRITES the flag and rows of the new token, then all lists.
    ROW_INTS: int
    H: int
    HV: int
    D: int  # H and HV, rounded up to powers of two
    DV: int
    ARRAYS: tuple  # of `CacheArray`
    SCALE: float
    CAP: float  # 0 for no soft cap
    SINKS: bool
    QUANTIZED: bool  # True if keys and values have 8 bits, and a scale for each row
    WRITES: bool  # True to write a token and attend to it; its flag is 0 if it is seen, else -1
    SPLITS: int  # programs that share a list
    STAGES: int  # tiles of keys that are on their way
    ROWS: int  # rows of a tile of queries, a power of two, 1 for a single query head; as are:
    TILE: int  # rows of a tile of keys
    PADDED_SPLITS: int  # SPLITS, rounded up


class NewToken(NamedTuple):
    """The token that is written; without one, any values."""

    k: Any  # [1, D]
    v: Any  # [1, DV]
    k_scale: Any  # if QUANTIZED
    v_scale: Any
    seen: Any  # 0 if the query sees it, else -1


class Reads(NamedTuple):
    """Tuples with an entry for each array that is read."""

    k: Any  # pointers to a head
    v: Any
    k_scale: Any  # pointers to the scales of a head's rows, if there are any
    v_scale: Any
    first_step: Any
    length: Any  # of the list


# --- states of a softmax: (m_i, l_i, acc), to base 2 -----------------------------------------------------------------


@triton.jit
def _update(m_i, l_i, acc, scores, v_tile, dtype: tl.constexpr):
    """Adds scores [ROWS, TILE] and values [TILE, DV] to a state for each row."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p, alpha = tl.exp2(scores - shift[:, None]), tl.exp2(m_i - shift)
    acc = tl.dot(p.to(dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def _update_lanes(m_i, l_i, acc, q_row, k_tile, v_tile, k_scale, v_scale, has_key, dtype: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """Adds keys [TILE, D] and values [TILE, DV], with scales [TILE] or 1, to a state for each lane."""
    products = tl.sum(to_float32(k_tile, dtype) * q_row, 1)  # [TILE]
    if C.QUANTIZED:
        products *= k_scale
    scores, values = tl.where(has_key, logits(products, C), float("-inf")), to_float32(v_tile, dtype)
    m_new = tl.maximum(m_i, scores)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p, alpha = tl.exp2(scores - shift), tl.exp2(m_i - shift)
    return m_new, l_i * alpha + p, acc * alpha[:, None] + (p * v_scale)[:, None] * values


@triton.jit
def _merge_lanes(m_i, l_i, acc, lane_m, lane_l, lane_acc):
    """Adds the states of all lanes to the state of one row."""
    m_new = tl.maximum(m_i, tl.max(lane_m, 0))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, weights = tl.exp2(m_i - shift), tl.exp2(lane_m - shift)
    l_i = l_i * alpha + tl.sum(lane_l * weights, 0)
    return m_new, l_i, acc * alpha[:, None] + tl.sum(lane_acc * weights[:, None], 0)[None, :]


@triton.jit
def _new_row(row, scale, dtype: tl.constexpr, C: tl.constexpr):
    """Returns keys or values of the new token in float32, as queries see them."""
    row = to_float32(row, dtype)
    return row * scale if C.QUANTIZED else row


@triton.jit
def _initial_state(q_tile, new, sinks, head, split, C: tl.constexpr):
    """Returns the state of sinks and of the new token, each if there is one, in the first split."""
    row = tl.arange(0, C.ROWS)
    m_i, l_i, acc = full(C.ROWS, float("-inf")), full(C.ROWS, 0.0), zeros(C.ROWS, C.DV)
    if C.SINKS:
        m_i = tl.load(sinks + head * C.GROUP + row, mask=row < C.GROUP, other=0.0) * LOG2_E
        l_i += 1.0
    if C.WRITES:
        scores = logits(tl.sum(q_tile.to(tl.float32) * _new_row(new.k, new.k_scale, q_tile.dtype, C), 1), C)  # [ROWS]
        scores = tl.where(new.seen >= 0, scores, float("-inf"))
        m_new = tl.maximum(m_i, scores)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, l_i = tl.exp2(scores - shift), l_i * tl.exp2(m_i - shift)
        acc = p[:, None] * tl.where(new.seen >= 0, _new_row(new.v, new.v_scale, q_tile.dtype, C), 0.0)
        m_i, l_i = m_new, l_i + p
    if C.SPLITS > 1:
        m_i, l_i = tl.where(split > 0, float("-inf"), m_i), tl.where(split > 0, 0.0, l_i)
        acc = tl.where(split > 0, 0.0, acc)
    return m_i, l_i, acc


# --- rows of the cache -----------------------------------------------------------------------------------------------


@triton.jit
def _load_new_row(pointer, dtype: tl.constexpr, LENGTH: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr):
    """Loads a row [1, SIZE] in the dtype of an array, and its scale if QUANTIZED."""
    column = tl.arange(0, SIZE)
    row = tl.load(pointer + column, mask=column < LENGTH, other=0.0)
    if C.QUANTIZED:
        row, scale = quantize_row(row, dtype)
    else:
        row, scale = row.to(dtype), 1.0
    return row[None, :], scale


@triton.jit
def _load_new_token(q_tile, new_k, new_v, k_dtype: tl.constexpr, v_dtype: tl.constexpr, rows, position, vector,
                    C: tl.constexpr):  # fmt: skip
    """Loads the `NewToken` of a key head, in the dtypes of the arrays."""
    k, v, k_row_scale, v_row_scale, seen = q_tile, q_tile, position, position, position
    if C.WRITES:
        seen, new_k, new_v = tl.load(rows + 1), new_k + vector * C.H, new_v + vector * C.HV
        k, k_row_scale = _load_new_row(new_k, k_dtype, C.H, C.D, C)
        v, v_row_scale = _load_new_row(new_v, v_dtype, C.HV, C.DV, C)
    return NewToken(k, v, k_row_scale, v_row_scale, seen)


@triton.jit
def _open_arrays(k_arrays, v_arrays, k_scales, v_scales, heads, rows, new, position, sequence, head, split,
                 C: tl.constexpr):  # fmt: skip
    """Returns (`Reads` of a key head, number of steps of all lists as one); split 0 writes the new token."""
    column, column_v = tl.arange(0, C.D), tl.arange(0, C.DV)
    ks, vs, first_steps, lengths, steps = (), (), (), (), position * 0
    k_scale, v_scale = (), ()
    for i in tl.static_range(len(C.ARRAYS)):
        row = (sequence * C.ARRAYS[i].HEADS + tl.load(heads + i * C.HEADS + head)) * C.ARRAYS[i].ROWS
        k, v, length = k_arrays[i] + row * C.H, v_arrays[i] + row * C.HV, position * 0 + C.ARRAYS[i].COUNT
        if C.WRITES:
            new_row = tl.load(rows + 2 + i).to(tl.int64)
            writes = (new_row >= 0) & (split == 0)
            tl.store(k + new_row * C.H + column[None, :], new.k, mask=(column < C.H)[None, :] & writes)
            tl.store(v + new_row * C.HV + column_v[None, :], new.v, mask=(column_v < C.HV)[None, :] & writes)
            if C.QUANTIZED:
                tl.store(k_scales[i] + row + new_row, new.k_scale, mask=writes)
                tl.store(v_scales[i] + row + new_row, new.v_scale, mask=writes)
        if C.ARRAYS[i].STRIDE > 0:
            length = tl.minimum(length, position // C.ARRAYS[i].STRIDE + 1)
        # Triton knows no stars.
        ks, vs = ks + (k,), vs + (v,)  # noqa: RUF005
        k_scale, v_scale = k_scale + (k_scales[i] + row,), v_scale + (v_scales[i] + row,)  # noqa: RUF005
        first_steps, lengths = first_steps + (steps,), lengths + (length,)  # noqa: RUF005
        steps += tl.cdiv(length, C.TILE)
    return Reads(ks, vs, k_scale, v_scale, first_steps, lengths), steps


@triton.jit
def _load_step_rows(step, reads, rows, C: tl.constexpr):
    """Returns (k, v, k_scale, v_scale, rows) of a step: pointers to the array that it reads, and its rows [TILE].

    Rows are negative where there is none.
    """
    k, v, first_step, length = reads.k[0], reads.v[0], reads.first_step[0], reads.length[0]
    k_scale, v_scale = reads.k_scale[0], reads.v_scale[0]
    first = 0 * step + C.ARRAYS[0].FIRST
    for i in tl.static_range(1, len(C.ARRAYS)):
        is_later = step >= reads.first_step[i]
        k, v = tl.where(is_later, reads.k[i], k), tl.where(is_later, reads.v[i], v)
        if C.QUANTIZED:
            k_scale = tl.where(is_later, reads.k_scale[i], k_scale)
            v_scale = tl.where(is_later, reads.v_scale[i], v_scale)
        first = tl.where(is_later, C.ARRAYS[i].FIRST, first)
        first_step = tl.where(is_later, reads.first_step[i], first_step)
        length = tl.where(is_later, reads.length[i], length)
    position = (step - first_step) * C.TILE + tl.arange(0, C.TILE)  # in the list
    return k, v, k_scale, v_scale, tl.load(rows + first + position, mask=position < length, other=-1)


# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def decode_kernel(
    q,  # [B * TOKENS, HEADS, GROUP, H]
    new_k,  # [B, HEADS, H] if WRITES
    new_v,  # [B, HEADS, HV]
    k0,  # [B, ARRAYS[0].HEADS, ARRAYS[0].ROWS, H] and so on, as many as ARRAYS has
    v0,
    k1,
    v1,
    k2,
    v2,
    k3,
    v3,
    k_scale0,  # float32 [B, ARRAYS[0].HEADS, ARRAYS[0].ROWS] and so on if QUANTIZED
    v_scale0,
    k_scale1,
    v_scale1,
    k_scale2,
    v_scale2,
    k_scale3,
    v_scale3,
    heads,  # int32 [arrays, HEADS], heads of the arrays
    rows,  # int32 [B * TOKENS, LIST_HEADS, ROW_INTS], see `DecodeConstants`; row -1 is none
    sinks,  # float32 [HEADS, GROUP] if SINKS
    out,  # [B * TOKENS, HEADS, GROUP, HV], or with splits float32 [B * TOKENS, HEADS, SPLITS, GROUP, HV]
    lse,  # float32 [B * TOKENS, HEADS, SPLITS, GROUP], to base 2
    C: tl.constexpr,
):
    """Computes attention of each query, or of each of its splits; grid (HEADS * SPLITS, B * TOKENS)."""
    split, head, query = tl.program_id(0) % C.SPLITS, tl.program_id(0) // C.SPLITS, tl.program_id(1).to(tl.int64)
    row, sequence = tl.arange(0, C.ROWS), query // C.TOKENS
    kv_head_index = sequence * C.HEADS + head
    rows += (query * C.LIST_HEADS + head % C.LIST_HEADS) * C.ROW_INTS
    position = tl.load(rows)
    exists = row < C.GROUP
    q_head = q + (query * C.HEADS + head) * C.GROUP * C.H
    q_tile = load_rows(addresses(q_head, row, C.H, C.D, False), exists, C.H, C.D, True)  # [ROWS, D]
    dtype: tl.constexpr = q.dtype.element_ty

    new = _load_new_token(
        q_tile, new_k, new_v, k0.dtype.element_ty, v0.dtype.element_ty, rows, position, kv_head_index, C
    )
    m_i, l_i, acc = _initial_state(q_tile, new, sinks, head, split, C)  # [ROWS], [ROWS], [ROWS, DV]
    if C.ROWS == 1:
        q_row = q_tile.to(tl.float32)
        if C.QUANTIZED:  # Triton gives tiles the layout of a load [1, 128], in which sums of a row wait for all warps
            q_row = tl.load(q_head + tl.arange(0, C.D), mask=tl.arange(0, C.D) < C.H, other=0.0).to(tl.float32)[None, :]
        lane_m, lane_l, lane_acc = full(C.TILE, float("-inf")), full(C.TILE, 0.0), zeros(C.TILE, C.DV)
    k_arrays, v_arrays = (k0, k1, k2, k3), (v0, v1, v2, v3)
    k_scales, v_scales = (k_scale0, k_scale1, k_scale2, k_scale3), (v_scale0, v_scale1, v_scale2, v_scale3)
    reads, steps = _open_arrays(
        k_arrays, v_arrays, k_scales, v_scales, heads, rows, new, position, sequence, head, split, C
    )
    split_steps = tl.cdiv(steps, C.SPLITS)
    first_step, end_step = split * split_steps, tl.minimum(split * split_steps + split_steps, steps)
    PAIRS: tl.constexpr = C.QUANTIZED and C.ROWS > 1
    if PAIRS:
        q_pairs = split_queries(q_tile)
        m_i, l_i, acc_even, acc_odd = start_pairs(m_i, l_i, acc)
    for step in tl.range(first_step, end_step, num_stages=C.STAGES):
        k, v, k_scale, v_scale, kv_row = _load_step_rows(step, reads, rows, C)
        has_key = kv_row >= 0
        k_row_scale, v_row_scale = 1.0, 1.0
        if C.QUANTIZED:
            k_row_scale = tl.load(k_scale + kv_row, mask=has_key, other=0.0)  # [TILE]
            v_row_scale = tl.load(v_scale + kv_row, mask=has_key, other=0.0)
        if PAIRS:
            m_i, l_i, acc_even, acc_odd = update_pairs(
                m_i, l_i, acc_even, acc_odd, q_pairs, k, v, k_row_scale, v_row_scale, kv_row, dtype, C
            )
        else:
            k_tile = load_rows(addresses(k, kv_row, C.H, C.D, True), has_key, C.H, C.D, True)  # [TILE, D]
            v_tile = load_rows(addresses(v, kv_row, C.HV, C.DV, True), has_key, C.HV, C.DV, True)  # [TILE, DV]
            if C.ROWS == 1:
                lane_m, lane_l, lane_acc = _update_lanes(
                    lane_m, lane_l, lane_acc, q_row, k_tile, v_tile, k_row_scale, v_row_scale, has_key, dtype, C
                )
            else:
                products = tl.dot(q_tile, tl.trans(k_tile.to(dtype)), input_precision="ieee")  # [ROWS, TILE]
                scores = tl.where(has_key[None, :], logits(products, C), float("-inf"))
                m_i, l_i, acc = _update(m_i, l_i, acc, scores, v_tile.to(dtype), dtype)
    if PAIRS:
        acc = tl.reshape(tl.join(acc_even, acc_odd), (C.ROWS, C.DV))
    if C.ROWS == 1:
        m_i, l_i, acc = _merge_lanes(m_i, l_i, acc, lane_m, lane_l, lane_acc)
    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    number = (query * C.HEADS + head) * C.SPLITS + split
    store_rows(addresses(out + number * C.GROUP * C.HV, row, C.HV, C.DV, False), acc, exists, C.HV, C.DV)
    if C.SPLITS > 1:
        pointers = lse + number * C.GROUP + row
        tl.store(pointers, tl.where(l_i > 0, m_i + tl.log2(l_i), float("-inf")), mask=exists)


@triton.jit
def merge_kernel(
    split_out,  # float32 [B * TOKENS, HEADS, SPLITS, GROUP, HV]
    lse,  # float32 [B * TOKENS, HEADS, SPLITS, GROUP], to base 2
    out,  # [B * TOKENS, HEADS, GROUP, HV]
    C: tl.constexpr,
):
    """Merges the splits of a query head; grid (B * TOKENS * HEADS * GROUP,)."""
    vector = tl.program_id(0).to(tl.int64)
    head_in_group, kv_vector = vector % C.GROUP, vector // C.GROUP
    split = tl.arange(0, C.PADDED_SPLITS)
    row, exists = (kv_vector * C.SPLITS + split) * C.GROUP + head_in_group, split < C.SPLITS
    split_lse = tl.load(lse + row, mask=exists, other=float("-inf"))  # [PADDED_SPLITS]
    m_i = tl.max(split_lse, 0)
    weights = tl.exp2(split_lse - tl.where(m_i == float("-inf"), 0.0, m_i))
    split_tile = load_rows(addresses(split_out, row, C.HV, C.DV, True), exists, C.HV, C.DV, True)  # [PADDED_SPLITS, DV]
    l_i = tl.sum(weights, 0)
    merged = tl.sum(weights[:, None] * split_tile, 0) / tl.where(l_i > 0, l_i, 1.0)
    column = tl.arange(0, C.DV)
    tl.store(out + vector * C.HV + column, merged.to(out.dtype.element_ty), mask=column < C.HV)
