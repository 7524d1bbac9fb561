"""The backward kernel of selections of single queries: a program has a block of keys and gathers who chose it.

A list has the choices of a block, each of them a query and one of its blocks. Of every 64, four warps copy the rows of
q and dout to shared memory, 16 bytes a thread at a time, for boxes of the copy engine are neighbours only. Products are
those of `backward_kernel.py`. dq, dk and dv are added to arrays in float32, rows of dq from registers.

Of blocks of 128 keys each of two groups of four warps has 64; of blocks of 64 both groups have all, and every other
step.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportAssignmentType=false

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_kernel import columns_of, score_gradients, weights_of
from .primitives import add_rows, add_tile, arrive_when_copied, copy, kept, late, reinterpret, together
from .tiles import ROWS, barriers, buffers_of, corner_of, factor, fetch, flat, logits, span_of


class Gathered(NamedTuple):
    """How the kernel is compiled, beside the bundles of `tiles.py`."""

    PART: int  # choices of a step
    STAGES: int  # steps whose q and dout are held or on their way
    B: int  # batch entries
    T: int  # queries
    EACH: int  # choices of a query


@gluon.jit
def _item(work, spans, L: gl.constexpr, F: gl.constexpr):
    """What a program has: (batch entry, query head, block, first entry, entries, free steps, steps from, to)."""
    b = gl.program_id(0) // L.PIECES
    line = work + (gl.program_id(0) % L.PIECES * L.BATCHES + b % L.BATCHES) * 3
    job, begin, end = gl.load(line), gl.load(line + 1), gl.load(line + 2)
    head, block = job // L.BLOCKS, job % L.BLOCKS
    first, masked_from, last = span_of(spans, b, head, block, L)
    return b, head, block, first, last - first, (masked_from - first) // F.PART, begin, end


@gluon.jit
def _vectors(entries, first, count, head, place, A: gl.constexpr, F: gl.constexpr):
    """The rows of q [T * HEADS] at places of a list of ``count`` entries; behind its end that of the last one."""
    return gl.load(entries + first + gl.minimum(place, count - 1)) // F.EACH * A.HEADS + head


@gluon.jit
def _producer(sources, descs, buffers, full, empty, work, lists, A: gl.constexpr, KV: gl.constexpr, L: gl.constexpr,
              F: gl.constexpr):  # fmt: skip
    """Fetches k and v, and q and dout, lse and delta of the queries that chose them."""
    D: gl.constexpr = A.D
    PART: gl.constexpr = F.PART
    WORDS: gl.constexpr = KV.TILE // 32
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    AT_ONCE: gl.constexpr = 1024 // D
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    BITS: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [4, 1], [1, 0])
    b, head, block, first, count, free, begin, end = _item(work, lists[0], L, F)
    if begin < end:
        kv_head = head // (A.HEADS // A.KV_HEADS)
        for j in gl.static_range(2):
            fetch(descs[j], b, block * KV.TILE, kv_head, full[1].index(j), buffers[2 + j].index(0), KV, D)
        at = (b * F.T * A.HEADS).to(gl.int64)
        column = gl.arange(0, D, layout=gl.SliceLayout(0, COPIED))
        for step in range(begin, end):
            n = step - begin
            slot = n % F.STAGES
            mbarrier.wait(empty.index(slot), (n // F.STAGES & 1) ^ 1)
            for i in gl.static_range(PART // AT_ONCE):
                place = step * PART + i * AT_ONCE + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, COPIED))
                row = (_vectors(lists[1], first, count, head, place, A, F) + at) * D
                for j in gl.static_range(2):
                    to = buffers[j].index(slot).slice(i * AT_ONCE, AT_ONCE, 0)
                    copy(to, sources[j] + row[:, None] + column[None, :])
            place = step * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, LINE))
            row = _vectors(lists[1], first, count, head, place, A, F) + at
            row = gl.where(place < count, row, F.B * F.T * A.HEADS)
            for j in gl.static_range(2):
                copy(buffers[4 + j].index(slot), sources[2 + j] + row[None, :])
            if step >= free:
                entry = step * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, BITS))
                tile = gl.load(lists[2] + first + gl.minimum(entry, count - 1)) + 1
                words = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BITS))
                copy(buffers[6].index(slot), lists[3] + tile[:, None] * WORDS + words[None, :])
            arrive_when_copied(full[0].index(slot))


@gluon.jit
def _limited(scores, words, GROUP: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of choices that are masked: -inf where the pair may not attend."""
    PART: gl.constexpr = F.PART
    s3 = gl.reshape(scores, [ROWS // 32, 32, PART])
    L3: gl.constexpr = s3.type.layout
    first: gl.constexpr = GROUP * ROWS // 32 if KV.TILE > ROWS else 0
    own = words.permute((1, 0)).slice(first, ROWS // 32, 0).load(gl.SliceLayout(1, L3))
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 2)
    s3 = kept(s3, gl.expand_dims(own, 1) >> (bit & 23), 1 << (bit & 8))
    return gl.convert_layout(gl.reshape(s3, [ROWS, PART]), LAYOUT, assert_trivial=True)


@gluon.jit
def _steps(first_step, end_step, begin, dk, dv, GROUP: gl.constexpr, buffers, full, empty, lists, item,
           A: gl.constexpr, KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr, MASKED: gl.constexpr,
           SCORES: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Goes on over steps first_step .. end_step - 1, or those of them that this group has."""
    PART: gl.constexpr = F.PART
    D: gl.constexpr = A.D
    SHARED: gl.constexpr = KV.TILE > ROWS  # whether both groups take part in each step
    WIDTH: gl.constexpr = D // 2
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    KEYS: gl.constexpr = GROUP * ROWS if SHARED else 0
    FIRST: gl.constexpr = GROUP if SHARED else 0
    dtype: gl.constexpr = buffers[0].dtype
    dq, head, first, count = item
    row = gl.arange(0, PART, layout=gl.SliceLayout(1, QUERIES))
    if not SHARED:  # every other one is the other group's
        first_step += (first_step - begin + GROUP) & 1
    for step in range(first_step, end_step, 1 if SHARED else 2):
        n = step - begin
        slot = n % F.STAGES
        zero = n >> 30  # 0, but the compiler must not keep, and spill, what it could compute from a constant
        queries, douts = buffers[0].index(slot), buffers[1].index(slot)
        keys, values = flat(buffers[2].index(zero), KV.TILE, D), flat(buffers[3].index(zero), KV.TILE, D)
        vectors = _vectors(lists[1], first, count, head, step * PART + row, A, F)
        mbarrier.wait(full[0].index(slot), n // F.STAGES & 1)
        fence_async_shared()  # threads wrote it, not the copy engine
        base = buffers[4].index(slot).load(SCORES)
        scores = gl.zeros([ROWS, PART], gl.float32, SCORES)
        if factor(A.SCALE, A.CAP) != 1.0:
            scores, _ = gl.broadcast(base, scores)
        scores = warpgroup_mma(keys.slice(KEYS, ROWS, 0), queries.permute((1, 0)), scores, is_async=True)
        dweights = gl.zeros([ROWS, PART], gl.float32, SCORES)
        dweights = warpgroup_mma(values.slice(KEYS, ROWS, 0), douts.permute((1, 0)), dweights, use_acc=False,
                                 is_async=True)  # fmt: skip
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = logits(scores, A)
        if MASKED:
            scores = _limited(scores, buffers[6].index(slot), GROUP, KV, F, SCORES)
        weights = weights_of(scores, base, A)
        # Long over; a branch, lest ptxas moves the next wait before the exponentials.
        mbarrier.wait(full[0].index(slot), n // F.STAGES & 1)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        delta = buffers[5].index(slot).load(SCORES)
        dscores = score_gradients(scores, weights, dweights, delta, A).to(dtype)
        again = late(n)
        slot = again % F.STAGES
        queries, douts = buffers[0].index(slot), buffers[1].index(slot)
        keys = flat(buffers[2].index(again >> 30), KV.TILE, D)
        dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT), douts, dv, is_async=True)
        together_at = buffers[7].index(again % 2 if SHARED else GROUP).slice(0, KV.TILE, 0)
        together_at.slice(KEYS, ROWS, 0).store(dscores)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(dscores, LEFT), queries, dk, is_async=True)
        together(8 if SHARED else 8 + GROUP, 256 if SHARED else 128)
        for i in gl.static_range(FIRST, GROUP + 1 if SHARED else 2):  # halves of the head size
            found = gl.zeros([PART, WIDTH], gl.float32, QUERIES)
            found = warpgroup_mma(together_at.permute((1, 0)), keys.slice(i * WIDTH, WIDTH, 1), found,
                                  use_acc=False, is_async=True)  # fmt: skip
            if i == FIRST:
                dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
                mbarrier.arrive(empty.index(slot), count=1)
            found = warpgroup_mma_wait(0, deps=[found])
            add_rows(dq + i * WIDTH, vectors, D, found, PART, WIDTH)
    return dk, dv


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, dq, buffers, full, empty, work, lists, A: gl.constexpr, KV: gl.constexpr,
              L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes half of the keys, or half of the steps."""
    D: gl.constexpr = A.D
    SHARED: gl.constexpr = KV.TILE > ROWS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.PART, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    WIDTH: gl.constexpr = descs[2].block_shape[-1]
    b, head, block, first, count, free, begin, end = _item(work, lists[0], L, F)
    if begin < end:
        dk = gl.zeros([ROWS, D], gl.float32, SUMS)
        dv = gl.zeros([ROWS, D], gl.float32, SUMS)
        for i in gl.static_range(2):
            mbarrier.wait(full[1].index(i), 0)
        free = gl.minimum(gl.maximum(free, begin), end)
        item = dq + (b * F.T * A.HEADS).to(gl.int64) * D, head, first, count
        dk, dv = _steps(begin, free, begin, dk, dv, GROUP, buffers, full, empty, lists, item, A, KV, L, F, False,
                        SCORES, SUMS)  # fmt: skip
        dk, dv = _steps(free, end, begin, dk, dv, GROUP, buffers, full, empty, lists, item, A, KV, L, F, True,
                        SCORES, SUMS)  # fmt: skip
        if SHARED:
            together(8, 256)  # the last products have read what is stored to now
        staged = reinterpret(buffers[7].index(GROUP), gl.float32, descs[2].block_shape, descs[2].layout)
        kv_head = head // (A.HEADS // A.KV_HEADS)
        row = block * KV.TILE + (GROUP * ROWS if SHARED else 0)
        for i in gl.static_range(2 * (D // WIDTH)):
            found = columns_of(dk if i < D // WIDTH else dv, i % (D // WIDTH), WIDTH)
            tma.store_wait(0)
            flat(staged, ROWS, WIDTH).store(found)
            fence_async_shared()
            corner = corner_of(b, row, kv_head, i % (D // WIDTH) * WIDTH, KV, D)
            add_tile(descs[2 + i // (D // WIDTH)], corner, staged)
        tma.store_wait(0)


@gluon.jit
def gathered_kernel(
    q,  # [B, T, HEADS, D]
    dout,  # [B, T, HEADS, D]
    k,  # descriptors: [B, S, KV_HEADS, D], a box has KV.TILE rows
    v,
    lse,  # float32 [B * T * HEADS + 1]: what products begin from, see `link`; -inf at last, for no query
    delta,  # float32 [B * T * HEADS + 1]: -SCALE * delta; 0 at last
    work,  # int32 [PIECES, BATCHES, 3]: of each piece its job, a head and a block, and its steps from, to
    spans,  # these three: `BlockLists` by blocks of keys
    entries,
    tiles,
    bits,  # int32 [1 + tiles, KV.TILE / 32]
    before_q,  # dq, dk and dv of earlier calls, whose places the results take
    before_k,
    before_v,
    dq,  # float32 [B, T, HEADS, D]; added to, as dk and dv are
    dk,  # descriptors: float32 [B, S, KV_HEADS, D], a box has 64 rows, and half of D
    dv,
    A: gl.constexpr,
    KV: gl.constexpr,
    L: gl.constexpr,
    F: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that computes, and of one that fetches
    FETCHING: gl.constexpr,
):
    """What this program's piece adds to dq, dk and dv."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    q_buffer = gl.allocate_shared_memory(dtype, [F.STAGES, F.PART, A.D], LAYOUT)
    dout_buffer = gl.allocate_shared_memory(dtype, [F.STAGES, F.PART, A.D], LAYOUT)
    k_buffer, v_buffer = buffers_of(k, 1), buffers_of(v, 1)
    lse_buffer = gl.allocate_shared_memory(gl.float32, [F.STAGES, 1, F.PART], PLAIN)
    delta_buffer = gl.allocate_shared_memory(gl.float32, [F.STAGES, 1, F.PART], PLAIN)
    words_buffer = gl.allocate_shared_memory(gl.int32, [F.STAGES, F.PART, KV.TILE // 32], PLAIN)
    ds_buffer = gl.allocate_shared_memory(dtype, [2, 2 * ROWS, F.PART], LAYOUT)
    q_full, empty = barriers(F.STAGES, 128), barriers(F.STAGES, KV.TILE // ROWS)
    kv_full = barriers(2, 1)
    fence_async_shared()
    descs, sources = (k, v, dk, dv), (q, dout, lse, delta)
    buffers = q_buffer, dout_buffer, k_buffer, v_buffer, lse_buffer, delta_buffer, words_buffer, ds_buffer
    full = q_full, kv_full
    lists = spans, entries, tiles, bits
    gl.warp_specialize(
        [
            (_consumer, (0, descs, dq, buffers, full, empty, work, lists, A, KV, L, F)),
            (_consumer, (1, descs, dq, buffers, full, empty, work, lists, A, KV, L, F)),
            (_producer, (sources, descs, buffers, full, empty, work, lists, A, KV, L, F)),
        ],
        [4, 4],
        [REGISTERS, FETCHING],
    )
