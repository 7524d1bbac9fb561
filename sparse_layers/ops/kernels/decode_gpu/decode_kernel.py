"""Attention of a decoding step: the kernel that reads rows of a cache where they lie, and the one that merges splits.

A program has the query heads of one key head of one query token, and walks over its share of the rows that are listed
for it, part by part. Rows that are not seen are not read. What a program computes of its share is merged by lse.

Several query heads share a softmax state of one row each, and matrix products. A single one has a state in each place
of a tile instead, and the places are put together at the end: within the loop no thread waits for another warp's, which
is what a step from tile to tile takes most of its time for.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl

from ..gpu.tiles import addresses, full, load_rows, logits, store_rows, zeros


class Kept(NamedTuple):
    """What the kernel knows of one of the arrays that keep keys, and of the list of rows that are read of it."""

    HEADS: int
    ROWS: int  # of a head
    FIRST: int  # where the list begins
    COUNT: int  # rows in the list
    CLASSES: int  # row i of the list holds nothing before position i * CLASSES; 0 where that is not known


class Step(NamedTuple):
    """What the kernels know of a step; a constant of their compilation."""

    TOKENS: int  # queries in a row of a sequence, neighbouring batch entries
    HEADS: int  # key heads that are read, each with:
    GROUP: int  # query heads
    LISTS: int  # lists of rows of a query token: 1 or HEADS
    LENGTH: int  # of the lists of all arrays together, and of what is before them
    H: int
    HV: int
    D: int  # H and HV, rounded up to powers of two
    DV: int
    KEPT: tuple  # of `Kept`
    SCALE: float
    CAP: float  # 0 for no soft cap
    SINKS: bool
    WRITES: bool  # whether a token is written, and attended to: before lists, whether it is seen (0, -1), and its rows
    SPLITS: int  # programs that share a list
    STAGES: int  # tiles of keys that are on their way, and where their rows are told
    ROWS: int  # rows of a tile of queries, a power of two, 1 for a single query head; as are:
    TILE: int  # rows of a tile of keys
    PARTIAL: int  # SPLITS, rounded up


@triton.jit
def _added(peak, total, out, x, values, dtype: tl.constexpr):
    """The state of a softmax (peak, sum, weighted values) with logits [rows, keys] to base 2, and values, of more."""
    highest = tl.maximum(peak, tl.max(x, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights, shrink = tl.exp2(x - base[:, None]), tl.exp2(peak - base)
    out = tl.dot(weights.to(dtype), values, out * shrink[:, None], input_precision="ieee")
    return highest, total * shrink + tl.sum(weights, 1), out


@triton.jit
def _added_by_place(peak, total, out, x, values):
    """As `_added`, of states of their own in the places of a tile: logits [places], values [places, size]."""
    highest = tl.maximum(peak, x)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights, shrink = tl.exp2(x - base), tl.exp2(peak - base)
    return highest, total * shrink + weights, out * shrink[:, None] + weights[:, None] * values


@triton.jit
def _together(peak, total, out, each_peak, each_total, each_out):
    """The state of one row, and the states of places, as one state of one row."""
    highest = tl.maximum(peak, tl.max(each_peak, 0))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink, weights = tl.exp2(peak - base), tl.exp2(each_peak - base)
    total = total * shrink + tl.sum(each_total * weights, 0)
    return highest, total, out * shrink[:, None] + tl.sum(each_out * weights[:, None], 0)[None, :]


@triton.jit
def _started(queries, new_k, new_v, seen, sinks, head, C: tl.constexpr):
    """The state of a softmax over sinks and the new token, of which neither has to be there."""
    row = tl.arange(0, C.ROWS)
    peak, total, out = full(C.ROWS, float("-inf")), full(C.ROWS, 0.0), zeros(C.ROWS, C.DV)
    if C.SINKS:
        peak = tl.load(sinks + head * C.GROUP + row, mask=row < C.GROUP, other=0.0) * 1.4426950408889634
        total += 1.0
    if C.WRITES:
        x = logits(tl.sum(queries.to(tl.float32) * new_k.to(queries.dtype).to(tl.float32), 1), C)
        x = tl.where(seen >= 0, x, float("-inf"))
        highest = tl.maximum(peak, x)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight, total = tl.exp2(x - base), total * tl.exp2(peak - base)
        out = weight[:, None] * tl.where(seen >= 0, new_v.to(queries.dtype).to(tl.float32), 0.0)
        peak, total = highest, total + weight
    return peak, total, out


@triton.jit
def _rows_of_step(step, ks, vs, starts, ends, rows, C: tl.constexpr):
    """Keys and values of the array that a step reads, and its rows of them [TILE], negative for none.

    ``starts`` are the first steps of the arrays, ``ends`` the lengths of their lists.
    """
    k, v, start, end, first = ks[0], vs[0], starts[0], ends[0], 0 * step + C.KEPT[0].FIRST
    for i in tl.static_range(1, len(C.KEPT)):
        here = step >= starts[i]
        k, v, first = tl.where(here, ks[i], k), tl.where(here, vs[i], v), tl.where(here, C.KEPT[i].FIRST, first)
        start, end = tl.where(here, starts[i], start), tl.where(here, ends[i], end)
    place = (step - start) * C.TILE + tl.arange(0, C.TILE)
    return k, v, tl.load(rows + first + place, mask=place < end, other=-1)


@triton.jit
def decode_kernel(
    q,  # [B * TOKENS, HEADS, GROUP, H]
    new_k,  # [B, HEADS, H] if WRITES, as
    new_v,  # [B, HEADS, HV]
    k0,  # [B, KEPT[0].HEADS, KEPT[0].ROWS, H] and so on, as many as KEPT has
    v0,
    k1,
    v1,
    k2,
    v2,
    k3,
    v3,
    heads,  # int32 [arrays, HEADS], heads of the arrays
    rows,  # int32 [B * TOKENS, LISTS, LENGTH]: the position, what WRITES needs, and rows of heads, negative for none
    sinks,  # float32 [HEADS, GROUP] if SINKS
    out,  # [B * TOKENS, HEADS, GROUP, HV], or with splits float32 [B * TOKENS, HEADS, SPLITS, GROUP, HV], as
    lse,  # float32 [B * TOKENS, HEADS, SPLITS, GROUP], to base 2
    C: tl.constexpr,
):
    """Attention of each query, or what each split has of it; grid (SPLITS of HEADS, B * TOKENS)."""
    split, head, b = tl.program_id(0) % C.SPLITS, tl.program_id(0) // C.SPLITS, tl.program_id(1).to(tl.int64)
    keys, values = (k0, k1, k2, k3), (v0, v1, v2, v3)
    row, sequence = tl.arange(0, C.ROWS), b // C.TOKENS
    vector = sequence * C.HEADS + head
    rows += (b * C.LISTS + head % C.LISTS) * C.LENGTH
    own = tl.load(rows)
    exists = row < C.GROUP
    queries = load_rows(
        addresses(q + (b * C.HEADS + head) * C.GROUP * C.H, row, C.H, C.D, False), exists, C.H, C.D, True
    )
    dtype: tl.constexpr = q.dtype.element_ty

    new_key, new_value, seen, column, column_v = queries, queries, own, tl.arange(0, C.D), tl.arange(0, C.DV)
    if C.WRITES:
        seen, new_k, new_v = tl.load(rows + 1), new_k + vector * C.H, new_v + vector * C.HV
        new_key = tl.load(new_k + column, mask=column < C.H, other=0.0).to(k0.dtype.element_ty)[None, :]
        new_value = tl.load(new_v + column_v, mask=column_v < C.HV, other=0.0)
        new_value = new_value.to(v0.dtype.element_ty)[None, :]
    peak, total, result = _started(queries, new_key, new_value, seen, sinks, head, C)
    if C.SPLITS > 1:  # what is there but once is the first one's
        peak, total = tl.where(split > 0, float("-inf"), peak), tl.where(split > 0, 0.0, total)
        result = tl.where(split > 0, 0.0, result)
    if C.ROWS == 1:
        one_query = queries.to(tl.float32)
        each_peak, each_total, each_result = full(C.TILE, float("-inf")), full(C.TILE, 0.0), zeros(C.TILE, C.DV)
    # The lists are walked over as if they were one, so that loads are on their way all the time.
    ks, vs, starts, ends, steps = (), (), (), (), own * 0
    for i in tl.static_range(len(C.KEPT)):
        first = (sequence * C.KEPT[i].HEADS + tl.load(heads + i * C.HEADS + head)) * C.KEPT[i].ROWS
        k, v, end = keys[i] + first * C.H, values[i] + first * C.HV, own * 0 + C.KEPT[i].COUNT
        if C.WRITES:
            slot = tl.load(rows + 2 + i).to(tl.int64)
            writes = (slot >= 0) & (split == 0)
            tl.store(k + slot * C.H + column[None, :], new_key, mask=(column < C.H)[None, :] & writes)
            tl.store(v + slot * C.HV + column_v[None, :], new_value, mask=(column_v < C.HV)[None, :] & writes)
        if C.KEPT[i].CLASSES > 0:
            end = tl.minimum(end, own // C.KEPT[i].CLASSES + 1)
        # Triton knows no stars.
        ks, vs, starts, ends = ks + (k,), vs + (v,), starts + (steps,), ends + (end,)  # noqa: RUF005
        steps += tl.cdiv(end, C.TILE)
    each = tl.cdiv(steps, C.SPLITS)
    for step in tl.range(split * each, tl.minimum(split * each + each, steps), num_stages=C.STAGES):
        k, v, taken = _rows_of_step(step, ks, vs, starts, ends, rows, C)
        there = taken >= 0
        some = load_rows(addresses(k, taken, C.H, C.D, True), there, C.H, C.D, True).to(dtype)
        some_v = load_rows(addresses(v, taken, C.HV, C.DV, True), there, C.HV, C.DV, True).to(dtype)
        if C.ROWS == 1:
            x = logits(tl.sum(some.to(tl.float32) * one_query, 1), C)
            x = tl.where(there, x, float("-inf"))
            each_peak, each_total, each_result = _added_by_place(
                each_peak, each_total, each_result, x, some_v.to(tl.float32)
            )
        else:
            x = logits(tl.dot(queries, tl.trans(some), input_precision="ieee"), C)
            x = tl.where(there[None, :], x, float("-inf"))
            peak, total, result = _added(peak, total, result, x, some_v, dtype)
    if C.ROWS == 1:
        peak, total, result = _together(peak, total, result, each_peak, each_total, each_result)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    result_of = (b * C.HEADS + head) * C.SPLITS + split
    store_rows(addresses(out + result_of * C.GROUP * C.HV, row, C.HV, C.DV, False), result, exists, C.HV, C.DV)
    if C.SPLITS > 1:
        tl.store(
            lse + result_of * C.GROUP + row, tl.where(total > 0, peak + tl.log2(total), float("-inf")), mask=exists
        )


@triton.jit
def merge_kernel(
    partial,  # float32 [B * TOKENS, HEADS, SPLITS, GROUP, HV]
    lse,  # float32 [B * TOKENS, HEADS, SPLITS, GROUP], to base 2
    out,  # [B * TOKENS, HEADS, GROUP, HV]
    C: tl.constexpr,
):
    """The splits of a query put together; grid (B * TOKENS * HEADS * GROUP,)."""
    query = tl.program_id(0).to(tl.int64)
    group, entry = query % C.GROUP, query // C.GROUP
    split = tl.arange(0, C.PARTIAL)
    place, exists = (entry * C.SPLITS + split) * C.GROUP + group, split < C.SPLITS
    logs = tl.load(lse + place, mask=exists, other=float("-inf"))
    highest = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(highest == float("-inf"), 0.0, highest))
    values = load_rows(addresses(partial, place, C.HV, C.DV, True), exists, C.HV, C.DV, True)
    total = tl.sum(weights, 0)
    result = tl.sum(weights[:, None] * values, 0) / tl.where(total > 0, total, 1.0)
    column = tl.arange(0, C.DV)
    tl.store(out + query * C.HV + column, result.to(out.dtype.element_ty), mask=column < C.HV)
