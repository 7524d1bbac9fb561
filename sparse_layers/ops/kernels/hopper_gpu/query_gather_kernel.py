"""The backward kernel of selections by single queries: a program has a block of keys and gathers who selected it.

**One work tile a program.** It is a block of N keys, 64 or 128, for one query head, and a range of steps. The list of a
block has its selections, each of them a query and one of its blocks.

**Four warps gather, two groups of four warps multiply.** The copy engine loads boxes of neighbours only: k and v. 128
threads copy rows of q and dout, 16 bytes at a time, with lse, delta and words of the mask.

**Groups share keys or steps.** Of 128 keys each group has 64, as in `backward_kernel.py`, and multiplies half of the
columns of dq. Of blocks of 64 keys both groups have all, every second step, and all columns of dq, half by half.

**Products are those of `backward_kernel.py`.** Scores are [keys, selections], so p and ds are read from registers.

**Gradients are added in float32.** Rows of dq go from registers to global memory, four numbers at a time. The copy
engine adds dk and dv after the last step, through the buffers of ds.

M = F.PART selections of a step, D the head size. Time runs to the right, step n uses the stage n % STAGES, and ^ is the
wait for a product:

    producer   wait free.q_dout, copy q, dout, lse, delta, words -> ready.q_dout; so on, up to STAGES steps ahead

    a group    wait                                                      bar 8       arrive
               ready.q_dout                                              or bar 9    free.q_dout
               |                                                         |           |
    products   [----- scores ----^                    [------------- dv -------------^
                        [--------- dp --------^                  [-------- dk -------^
                                                                         [--------- dq ---------^
    registers                     [ mask, p ]  [ ds ]                                            [ add dq ]
    shared     read q, dout                           [ ds -> ds[i] ]

* ready.kv, 0 for k and 1 for v: groups wait for both once, before their first step.
* ready.q_dout, by stage: all 128 threads have copied. A fence follows the wait, as it was not the copy engine.
* free.q_dout, by stage: the groups that have the step have read q, dout, lse, delta and words.
* N = 128: both groups meet at bar 8, and ds[i] is ds[n % 2], see `backward_kernel.py`.
* N = 64: group g meets itself at bar 8 + g, and ds[i] is ds[g]. It is free once all dq of the step before is there.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportAssignmentType=false

from typing import Any, NamedTuple

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
    """Constants of the kernel's compilation, beside the bundles of `tiles.py`."""

    PART: int  # M, selections of a step
    STAGES: int  # steps whose q and dout are held or on their way
    B: int  # batch entries
    T: int  # queries
    EACH: int  # selections of a query


class Descriptors(NamedTuple):
    """TMA descriptors of the arrays, see `query_gather_kernel`."""

    k: Any
    v: Any
    dk: Any
    dv: Any


class RowPointers(NamedTuple):
    """Pointers to what queries have."""

    q: Any
    dout: Any
    lse: Any
    delta: Any
    dq: Any


class Buffers(NamedTuple):
    """Shared memory; the first axis is that of `index`."""

    q: Any  # [STAGES, M, D]
    k: Any  # [1, N, D]
    v: Any  # [1, N, D]
    dout: Any  # [STAGES, M, D]
    lse: Any  # float32 [STAGES, 1, M]
    delta: Any  # float32 [STAGES, 1, M]
    mask_words: Any  # int32 [STAGES, M, N / 32]
    ds: Any  # [2, 128, M], by steps or by groups; dk and dv leave by it at last


class Ready(NamedTuple):
    """Barriers that say that data arrived."""

    q_dout: Any  # by stage, with lse, delta and words of the mask
    kv: Any  # 0 for k and 1 for v


class Free(NamedTuple):
    """Barriers that say that a buffer may be overwritten."""

    q_dout: Any  # by stage, lse, delta and words of the mask, too


class BlockListPointers(NamedTuple):
    """The lists of selections, by blocks of keys."""

    spans: Any
    entries: Any
    mask_tiles: Any
    mask_bits: Any


class WorkTile(NamedTuple):
    """The work of one program."""

    batch: Any
    head: Any
    kv_block: Any
    first_entry: Any  # of the list
    num_entries: Any
    first_masked_step: Any  # steps are counted from the first entry
    first_step: Any
    end_step: Any


@gluon.jit
def _load_work_tile(work_tiles, spans, L: gl.constexpr, F: gl.constexpr):
    """The work tile of this program."""
    batch = gl.program_id(0) // L.PIECES
    numbers = work_tiles + (gl.program_id(0) % L.PIECES * L.BATCHES + batch % L.BATCHES) * 3
    head_and_block, first_step, end_step = gl.load(numbers), gl.load(numbers + 1), gl.load(numbers + 2)
    head, kv_block = head_and_block // L.BLOCKS, head_and_block % L.BLOCKS
    first, first_masked, end = span_of(spans, batch, head, kv_block, L)
    num_entries, first_masked_step = end - first, (first_masked - first) // F.PART
    return WorkTile(batch, head, kv_block, first, num_entries, first_masked_step, first_step, end_step)


@gluon.jit
def _query_rows(entries, work_tile, position, A: gl.constexpr, F: gl.constexpr):
    """Rows of q [T * HEADS] at positions of a list; behind its end that of the last entry."""
    entry = entries + work_tile.first_entry + gl.minimum(position, work_tile.num_entries - 1)
    return gl.load(entry) // F.EACH * A.HEADS + work_tile.head


@gluon.jit
def _copy_queries(rows, buffers, stage, step, lists, work_tile, A: gl.constexpr, F: gl.constexpr):
    """Begins to copy q, dout, lse and delta of a step: -inf and 0 for lse and delta behind the end of the list."""
    D: gl.constexpr = A.D
    M: gl.constexpr = F.PART
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    AT_ONCE: gl.constexpr = 1024 // D  # rows that 128 threads copy, 16 bytes each
    LINE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    first_row = (work_tile.batch * F.T * A.HEADS).to(gl.int64)  # of the batch entry
    column = gl.arange(0, D, layout=gl.SliceLayout(0, COPIED))
    for i in gl.static_range(M // AT_ONCE):
        position = step * M + i * AT_ONCE + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, COPIED))
        row = (_query_rows(lists.entries, work_tile, position, A, F) + first_row) * D
        q_rows = buffers.q.index(stage).slice(i * AT_ONCE, AT_ONCE, 0)
        copy(q_rows, rows.q + row[:, None] + column[None, :])
        dout_rows = buffers.dout.index(stage).slice(i * AT_ONCE, AT_ONCE, 0)
        copy(dout_rows, rows.dout + row[:, None] + column[None, :])
    position = step * M + gl.arange(0, M, layout=gl.SliceLayout(0, LINE))
    row = _query_rows(lists.entries, work_tile, position, A, F) + first_row
    row = gl.where(position < work_tile.num_entries, row, F.B * F.T * A.HEADS)
    copy(buffers.lse.index(stage), rows.lse + row[None, :])
    copy(buffers.delta.index(stage), rows.delta + row[None, :])


@gluon.jit
def _producer(rows, descs, buffers, ready, free, work_tiles, lists, A: gl.constexpr, KV: gl.constexpr,
              L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Loads k and v, and copies q and dout, lse and delta of the queries that selected them."""
    M: gl.constexpr = F.PART
    WORDS: gl.constexpr = KV.TILE // 32
    BITS: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [4, 1], [1, 0])
    work_tile = _load_work_tile(work_tiles, lists.spans, L, F)
    batch = work_tile.batch
    if work_tile.first_step < work_tile.end_step:
        kv_head = work_tile.head // (A.HEADS // A.KV_HEADS)
        row = work_tile.kv_block * KV.TILE
        fetch(descs.k, batch, row, kv_head, ready.kv.index(0), buffers.k.index(0), KV, A.D)
        fetch(descs.v, batch, row, kv_head, ready.kv.index(1), buffers.v.index(0), KV, A.D)
        for step in range(work_tile.first_step, work_tile.end_step):
            n = step - work_tile.first_step
            stage = n % F.STAGES
            mbarrier.wait(free.q_dout.index(stage), (n // F.STAGES & 1) ^ 1)
            _copy_queries(rows, buffers, stage, step, lists, work_tile, A, F)
            if step >= work_tile.first_masked_step:
                position = step * M + gl.arange(0, M, layout=gl.SliceLayout(1, BITS))
                entry = lists.mask_tiles + work_tile.first_entry + gl.minimum(position, work_tile.num_entries - 1)
                mask_tile = gl.load(entry) + 1
                word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BITS))
                tile = buffers.mask_words.index(stage)
                copy(tile, lists.mask_bits + mask_tile[:, None] * WORDS + word[None, :])
            arrive_when_copied(ready.q_dout.index(stage))


@gluon.jit
def _apply_mask(scores, mask_words, GROUP: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores [ROWS, M] of selections that are masked: -inf where the pair may not attend."""
    M: gl.constexpr = F.PART
    s3 = gl.reshape(scores, [ROWS // 32, 32, M])
    L3: gl.constexpr = s3.type.layout
    first: gl.constexpr = GROUP * ROWS // 32 if KV.TILE > ROWS else 0
    words = mask_words.permute((1, 0)).slice(first, ROWS // 32, 0).load(gl.SliceLayout(1, L3))  # [ROWS / 32, M]
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 2)
    s3 = kept(s3, gl.expand_dims(words, 1) >> (bit & 23), 1 << (bit & 8))
    return gl.convert_layout(gl.reshape(s3, [ROWS, M]), LAYOUT, assert_trivial=True)


@gluon.jit
def _gathered_steps(first_step, end_step, dk, dv, dq_rows, GROUP: gl.constexpr, buffers, ready, free, lists, work_tile,
                    A: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr,
                    SUMS: gl.constexpr):  # fmt: skip
    """Adds steps first_step .. end_step - 1, or those of them that this group has, to dk and dv [ROWS, D] and to dq."""
    M: gl.constexpr = F.PART
    D: gl.constexpr = A.D
    SPLIT_KEYS: gl.constexpr = KV.TILE > ROWS  # whether both groups take part in each step
    WIDTH: gl.constexpr = D // 2
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    KEYS: gl.constexpr = GROUP * ROWS if SPLIT_KEYS else 0
    FIRST: gl.constexpr = GROUP if SPLIT_KEYS else 0
    dtype: gl.constexpr = buffers.q.dtype
    row = gl.arange(0, M, layout=gl.SliceLayout(1, DQ))
    if not SPLIT_KEYS:  # the groups alternate
        first_step += (first_step - work_tile.first_step + GROUP) & 1
    for step in range(first_step, end_step, 1 if SPLIT_KEYS else 2):
        n = step - work_tile.first_step
        stage = n % F.STAGES
        zero = n >> 30  # 0, but the compiler must not keep, and spill, what it could compute from a constant
        q_tile, dout_tile = buffers.q.index(stage), buffers.dout.index(stage)  # [M, D]
        k_tile = flat(buffers.k.index(zero), KV.TILE, D)  # [N, D]
        v_tile = flat(buffers.v.index(zero), KV.TILE, D)  # [N, D]
        query_rows = _query_rows(lists.entries, work_tile, step * M + row, A, F)  # [M]
        mbarrier.wait(ready.q_dout.index(stage), n // F.STAGES & 1)
        fence_async_shared()  # threads wrote it, not the copy engine
        neg_lse = buffers.lse.index(stage).load(SCORES)  # [1, M]
        scores = gl.zeros([ROWS, M], gl.float32, SCORES)  # [ROWS, M]
        if factor(A.SCALE, A.CAP) != 1.0:
            scores, _ = gl.broadcast(neg_lse, scores)
        scores = warpgroup_mma(k_tile.slice(KEYS, ROWS, 0), q_tile.permute((1, 0)), scores, is_async=True)
        dp = gl.zeros([ROWS, M], gl.float32, SCORES)  # [ROWS, M]
        dp = warpgroup_mma(v_tile.slice(KEYS, ROWS, 0), dout_tile.permute((1, 0)), dp, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = logits(scores, A)
        if MASKED:
            scores = _apply_mask(scores, buffers.mask_words.index(stage), GROUP, KV, F, SCORES)
        p = weights_of(scores, neg_lse, A)  # [ROWS, M]
        # It is over, but a branch: ptxas would move the next wait before the exponentials.
        mbarrier.wait(ready.q_dout.index(stage), n // F.STAGES & 1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        delta = buffers.delta.index(stage).load(SCORES)  # [1, M]
        ds = score_gradients(scores, p, dp, delta, A).to(dtype)  # [ROWS, M]
        same_n = late(n)
        stage = same_n % F.STAGES
        q_tile, dout_tile = buffers.q.index(stage), buffers.dout.index(stage)
        k_tile = flat(buffers.k.index(same_n >> 30), KV.TILE, D)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), dout_tile, dv, is_async=True)
        ds_tile = buffers.ds.index(same_n % 2 if SPLIT_KEYS else GROUP).slice(0, KV.TILE, 0)  # [N, M]
        ds_tile.slice(KEYS, ROWS, 0).store(ds)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q_tile, dk, is_async=True)
        together(8 if SPLIT_KEYS else 8 + GROUP, 256 if SPLIT_KEYS else 128)
        for i in gl.static_range(FIRST, GROUP + 1 if SPLIT_KEYS else 2):  # halves of the head size
            dq = gl.zeros([M, WIDTH], gl.float32, DQ)  # [M, D / 2]
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile.slice(i * WIDTH, WIDTH, 1), dq, use_acc=False,
                               is_async=True)  # fmt: skip
            if i == FIRST:
                dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
                mbarrier.arrive(free.q_dout.index(stage), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
            add_rows(dq_rows + i * WIDTH, query_rows, D, dq, M, WIDTH)
    return dk, dv


@gluon.jit
def _add_gradient(x, desc, buffer, batch, row, kv_head, A: gl.constexpr, KV: gl.constexpr):
    """Has the copy engine add dk or dv [ROWS, D], by as many columns as a box of ``desc`` has."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    tile = reinterpret(buffer, gl.float32, desc.block_shape, desc.layout)
    for i in gl.static_range(A.D // WIDTH):
        columns = columns_of(x, i, WIDTH)
        tma.store_wait(0)
        flat(tile, ROWS, WIDTH).store(columns)
        fence_async_shared()
        add_tile(desc, corner_of(batch, row, kv_head, i * WIDTH, KV, A.D), tile)


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, rows, buffers, ready, free, work_tiles, lists, A: gl.constexpr,
              KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes half of the keys, or half of the steps."""
    D: gl.constexpr = A.D
    SPLIT_KEYS: gl.constexpr = KV.TILE > ROWS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.PART, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    work_tile = _load_work_tile(work_tiles, lists.spans, L, F)
    batch, first_step, end_step = work_tile.batch, work_tile.first_step, work_tile.end_step
    if first_step < end_step:
        dk = gl.zeros([ROWS, D], gl.float32, SUMS)  # [ROWS, D]
        dv = gl.zeros([ROWS, D], gl.float32, SUMS)  # [ROWS, D]
        mbarrier.wait(ready.kv.index(0), 0)
        mbarrier.wait(ready.kv.index(1), 0)
        first_masked = gl.minimum(gl.maximum(work_tile.first_masked_step, first_step), end_step)
        dq_rows = rows.dq + (batch * F.T * A.HEADS).to(gl.int64) * D
        dk, dv = _gathered_steps(first_step, first_masked, dk, dv, dq_rows, GROUP, buffers, ready, free, lists,
                                 work_tile, A, KV, F, False, SCORES, SUMS)  # fmt: skip
        dk, dv = _gathered_steps(first_masked, end_step, dk, dv, dq_rows, GROUP, buffers, ready, free, lists,
                                 work_tile, A, KV, F, True, SCORES, SUMS)  # fmt: skip
        if SPLIT_KEYS:
            together(8, 256)  # the last products have read ds, where dk and dv are stored to now
        kv_head = work_tile.head // (A.HEADS // A.KV_HEADS)
        row = work_tile.kv_block * KV.TILE + (GROUP * ROWS if SPLIT_KEYS else 0)
        _add_gradient(dk, descs.dk, buffers.ds.index(GROUP), batch, row, kv_head, A, KV)
        _add_gradient(dv, descs.dv, buffers.ds.index(GROUP), batch, row, kv_head, A, KV)
        tma.store_wait(0)


@gluon.jit
def query_gather_kernel(
    q,  # [B, T, HEADS, D]
    dout,  # [B, T, HEADS, D]
    k,  # descriptors: [B, S, KV_HEADS, D], a box has N = KV.TILE rows
    v,
    lse,  # float32 [B * T * HEADS + 1]: see `products_begin_from`; -inf at last, for no query
    delta,  # float32 [B * T * HEADS + 1]: -SCALE * delta; 0 at last
    work_tiles,  # int32 [PIECES, BATCHES, 3]: a head and a block, numbered, and the steps from, to
    spans,  # these three: `BlockLists` by blocks of keys
    entries,
    mask_tiles,
    mask_bits,  # int32 [1 + tiles, N / 32]
    earlier_dq,  # dq, dk and dv of earlier calls, to which results are added in place
    earlier_dk,
    earlier_dv,
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
    """Adds this program's work tile to dq, dk and dv."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    buffers = Buffers(
        q=gl.allocate_shared_memory(dtype, [F.STAGES, F.PART, A.D], LAYOUT),
        dout=gl.allocate_shared_memory(dtype, [F.STAGES, F.PART, A.D], LAYOUT),
        k=buffers_of(k, 1),
        v=buffers_of(v, 1),
        lse=gl.allocate_shared_memory(gl.float32, [F.STAGES, 1, F.PART], PLAIN),
        delta=gl.allocate_shared_memory(gl.float32, [F.STAGES, 1, F.PART], PLAIN),
        mask_words=gl.allocate_shared_memory(gl.int32, [F.STAGES, F.PART, KV.TILE // 32], PLAIN),
        ds=gl.allocate_shared_memory(dtype, [2, 2 * ROWS, F.PART], LAYOUT),
    )
    q_dout_ready = barriers(F.STAGES, 128)
    free = Free(q_dout=barriers(F.STAGES, KV.TILE // ROWS))
    ready = Ready(q_dout=q_dout_ready, kv=barriers(2, 1))
    fence_async_shared()
    descs, rows = Descriptors(k, v, dk, dv), RowPointers(q, dout, lse, delta, dq)
    lists = BlockListPointers(spans, entries, mask_tiles, mask_bits)
    gl.warp_specialize(
        [
            (_consumer, (0, descs, rows, buffers, ready, free, work_tiles, lists, A, KV, L, F)),
            (_consumer, (1, descs, rows, buffers, ready, free, work_tiles, lists, A, KV, L, F)),
            (_producer, (rows, descs, buffers, ready, free, work_tiles, lists, A, KV, L, F)),
        ],
        [4, 4],
        [REGISTERS, FETCHING],
    )
