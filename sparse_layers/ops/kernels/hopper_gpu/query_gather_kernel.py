"""The backward kernel of selections by single queries: a program holds a key block and gathers its queries.

**One work tile a program.** It is a block of N keys, 64 or 128, for one query head, and a range of steps. The list of a
block has its selections, each of them a query and one of its blocks.

**Four warps gather, two groups of four warps multiply.** TMA loads boxes of neighbours only: k and v. 128
threads copy rows of q and dout, 16 bytes at a time, with lse, delta and words of the mask.

**Groups share keys or steps.** Of 128 keys each group has 64, as in `backward_kernel.py`, and multiplies half of the
columns of dq. Of blocks of 64 keys both groups have all, every second step, and all columns of dq, half by half.

**Products are those of `backward_kernel.py`.** Scores are [keys, selections], so p and ds are read from registers.

**Gradients are added in float32.** Rows of dq go from registers to global memory, four numbers at a time. The copy
engine adds dk and dv after the last step, through the buffers of ds.

M is F.M, the selections of a step, N is KV.BLOCK, the keys of a program, D the head size. Time runs to the right, step
n uses the stage n % STAGES, and ^ is the wait for a product:

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
* ready.q_dout, by stage: all 128 threads have copied. A fence follows the wait, as threads wrote the tile.
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

from .backward_kernel import compute_ds, recompute_p
from .primitives import (
    add_rows,
    add_tile,
    arrive_when_copied,
    copy_async,
    mask_by_bits,
    named_barrier_sync,
    prevent_hoisting,
    reinterpret,
)
from .tiles import (
    GROUP_ROWS,
    Buffers,
    Descriptors,
    Free,
    HopperBlockLists,
    Ready,
    RowPointers,
    allocate_barriers,
    allocate_buffers,
    as_matrix,
    expect_tile,
    load_span,
    scale_log2,
    select_columns,
    tile_coordinates,
    to_logits,
)


class QueryGatherConstants(NamedTuple):
    """Compile-time constants of the kernel, beside the bundles of `tiles.py`."""

    M: int  # selections of a step
    STAGES: int  # of the ring of q and dout tiles
    B: int  # batch entries
    T: int  # queries
    BLOCKS_PER_QUERY: int  # selections of a query


class GatherWorkTile(NamedTuple):
    """Work tile of one program."""

    batch: Any
    head: Any
    kv_block: Any
    first_entry: Any  # of the list
    num_entries: Any
    first_partial_step: Any  # steps are counted from the first entry
    first_step: Any
    end_step: Any


@gluon.jit
def _load_work_tile(work_tiles, spans, L: gl.constexpr, F: gl.constexpr):
    """Loads the work tile of this program."""
    batch = gl.program_id(0) // L.NUM_SPLITS
    numbers = work_tiles + (gl.program_id(0) % L.NUM_SPLITS * L.BATCHES + batch % L.BATCHES) * 3
    head_and_block, first_step, end_step = gl.load(numbers), gl.load(numbers + 1), gl.load(numbers + 2)
    head, kv_block = head_and_block // L.NUM_BLOCKS, head_and_block % L.NUM_BLOCKS
    first, first_partial, end = load_span(spans, batch, head, kv_block, L)
    num_entries, first_partial_step = end - first, (first_partial - first) // F.M
    return GatherWorkTile(batch, head, kv_block, first, num_entries, first_partial_step, first_step, end_step)


@gluon.jit
def _query_rows(entries, work_tile, position, A: gl.constexpr, F: gl.constexpr):
    """Rows of q [T * HEADS] at positions of a list; positions beyond its end have the row of the last entry."""
    entry = entries + work_tile.first_entry + gl.minimum(position, work_tile.num_entries - 1)
    return gl.load(entry) // F.BLOCKS_PER_QUERY * A.HEADS + work_tile.head


@gluon.jit
def _copy_queries(rows, buffers, stage, step, lists, work_tile, A: gl.constexpr, F: gl.constexpr):
    """Starts to copy q, dout, lse and delta of a step; beyond the list's end, lse is -inf and delta 0."""
    D: gl.constexpr = A.D
    M: gl.constexpr = F.M
    COPY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROWS_PER_COPY: gl.constexpr = 1024 // D  # rows that 128 threads copy, 16 bytes each
    LSE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    first_row = (work_tile.batch * F.T * A.HEADS).to(gl.int64)  # of the batch entry
    column = gl.arange(0, D, layout=gl.SliceLayout(0, COPY_LAYOUT))
    for i in gl.static_range(M // ROWS_PER_COPY):
        position = step * M + i * ROWS_PER_COPY + gl.arange(0, ROWS_PER_COPY, layout=gl.SliceLayout(1, COPY_LAYOUT))
        row = (_query_rows(lists.entries, work_tile, position, A, F) + first_row) * D
        q_rows = buffers.q.index(stage).slice(i * ROWS_PER_COPY, ROWS_PER_COPY, 0)
        copy_async(q_rows, rows.q + row[:, None] + column[None, :])
        dout_rows = buffers.dout.index(stage).slice(i * ROWS_PER_COPY, ROWS_PER_COPY, 0)
        copy_async(dout_rows, rows.dout + row[:, None] + column[None, :])
    position = step * M + gl.arange(0, M, layout=gl.SliceLayout(0, LSE_LAYOUT))
    row = _query_rows(lists.entries, work_tile, position, A, F) + first_row
    row = gl.where(position < work_tile.num_entries, row, F.B * F.T * A.HEADS)
    copy_async(buffers.lse.index(stage), rows.lse + row[None, :])
    copy_async(buffers.delta.index(stage), rows.delta + row[None, :])


@gluon.jit
def _producer(rows, descs, buffers, ready, free, work_tiles, lists, A: gl.constexpr, KV: gl.constexpr,
              L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Loads k and v, and copies q and dout, lse and delta of the queries that selected them."""
    M: gl.constexpr = F.M
    WORDS: gl.constexpr = KV.BLOCK // 32
    MASK_LAYOUT: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [4, 1], [1, 0])
    work_tile = _load_work_tile(work_tiles, lists.spans, L, F)
    batch = work_tile.batch
    if work_tile.first_step < work_tile.end_step:
        kv_head = work_tile.head // (A.HEADS // A.KV_HEADS)
        row = work_tile.kv_block * KV.BLOCK
        expect_tile(descs.k, batch, row, kv_head, ready.kv.index(0), buffers.k.index(0), KV, A.D)
        expect_tile(descs.v, batch, row, kv_head, ready.kv.index(1), buffers.v.index(0), KV, A.D)
        for step in range(work_tile.first_step, work_tile.end_step):
            n = step - work_tile.first_step
            stage = n % F.STAGES
            mbarrier.wait(free.q_dout.index(stage), (n // F.STAGES & 1) ^ 1)
            _copy_queries(rows, buffers, stage, step, lists, work_tile, A, F)
            if step >= work_tile.first_partial_step:
                position = step * M + gl.arange(0, M, layout=gl.SliceLayout(1, MASK_LAYOUT))
                entry = lists.mask_tiles + work_tile.first_entry + gl.minimum(position, work_tile.num_entries - 1)
                mask_tile = gl.load(entry) + 1
                word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, MASK_LAYOUT))
                tile = buffers.mask_words.index(stage)
                copy_async(tile, lists.mask_bits + mask_tile[:, None] * WORDS + word[None, :])
            arrive_when_copied(ready.q_dout.index(stage))


@gluon.jit
def _apply_mask(scores, mask_words, GROUP: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):
    """Sets scores [64, M] of partial selections to -inf where the mask excludes the pair."""
    M: gl.constexpr = F.M
    s3 = gl.reshape(scores, [GROUP_ROWS // 32, 32, M])
    L3: gl.constexpr = s3.type.layout
    first: gl.constexpr = GROUP * GROUP_ROWS // 32 if KV.BLOCK > GROUP_ROWS else 0
    words = mask_words.permute((1, 0)).slice(first, GROUP_ROWS // 32, 0).load(gl.SliceLayout(1, L3))  # [2, M]
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 2)
    s3 = mask_by_bits(s3, gl.expand_dims(words, 1) >> (bit & 23), 1 << (bit & 8))
    return gl.convert_layout(gl.reshape(s3, [GROUP_ROWS, M]), LAYOUT, assert_trivial=True)


@gluon.jit
def _query_gather_steps(first_step, end_step, dk, dv, dq_rows, GROUP: gl.constexpr, buffers, ready, free, lists,
                        work_tile, A: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, MASKED: gl.constexpr,
                        S_LAYOUT: gl.constexpr, DKV_LAYOUT: gl.constexpr):  # fmt: skip
    """Adds the group's steps among first_step .. end_step - 1 to dk and dv [64, D], and to dq."""
    M: gl.constexpr = F.M
    D: gl.constexpr = A.D
    SPLIT_KEYS: gl.constexpr = KV.BLOCK > GROUP_ROWS  # True if both groups compute each step
    HALF_D: gl.constexpr = D // 2
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_D, 16])
    LHS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DKV_LAYOUT, 2)
    FIRST_KEY: gl.constexpr = GROUP * GROUP_ROWS if SPLIT_KEYS else 0
    FIRST_HALF: gl.constexpr = GROUP if SPLIT_KEYS else 0
    dtype: gl.constexpr = buffers.q.dtype
    row = gl.arange(0, M, layout=gl.SliceLayout(1, DQ_LAYOUT))
    if not SPLIT_KEYS:  # the groups alternate
        first_step += (first_step - work_tile.first_step + GROUP) & 1
    for step in range(first_step, end_step, 1 if SPLIT_KEYS else 2):
        n = step - work_tile.first_step
        stage = n % F.STAGES
        zero = n >> 30  # 0, computed: the compiler would keep, and spill, addresses that follow from a constant
        q_tile, dout_tile = buffers.q.index(stage), buffers.dout.index(stage)  # [M, D]
        k_tile = as_matrix(buffers.k.index(zero), KV.BLOCK, D)  # [N, D]
        v_tile = as_matrix(buffers.v.index(zero), KV.BLOCK, D)  # [N, D]
        query_rows = _query_rows(lists.entries, work_tile, step * M + row, A, F)  # [M]
        mbarrier.wait(ready.q_dout.index(stage), n // F.STAGES & 1)
        fence_async_shared()  # threads wrote it, not TMA
        neg_lse = buffers.lse.index(stage).load(S_LAYOUT)  # [1, M]
        scores = gl.zeros([GROUP_ROWS, M], gl.float32, S_LAYOUT)  # [64, M]
        if scale_log2(A.SCALE, A.CAP) != 1.0:
            scores, _ = gl.broadcast(neg_lse, scores)
        scores = warpgroup_mma(k_tile.slice(FIRST_KEY, GROUP_ROWS, 0), q_tile.permute((1, 0)), scores, is_async=True)
        dp = gl.zeros([GROUP_ROWS, M], gl.float32, S_LAYOUT)  # [64, M]
        dp = warpgroup_mma(
            v_tile.slice(FIRST_KEY, GROUP_ROWS, 0), dout_tile.permute((1, 0)), dp, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = to_logits(scores, A)
        if MASKED:
            scores = _apply_mask(scores, buffers.mask_words.index(stage), GROUP, KV, F, S_LAYOUT)
        p = recompute_p(scores, neg_lse, A)  # [64, M]
        # This phase is already complete. The wait is a branch: without it, ptxas moves the wait for dp before the
        # exponentials.
        mbarrier.wait(ready.q_dout.index(stage), n // F.STAGES & 1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        delta = buffers.delta.index(stage).load(S_LAYOUT)  # [1, M]
        ds = compute_ds(scores, p, dp, delta, A).to(dtype)  # [64, M]
        same_n = prevent_hoisting(n)
        stage = same_n % F.STAGES
        q_tile, dout_tile = buffers.q.index(stage), buffers.dout.index(stage)
        k_tile = as_matrix(buffers.k.index(same_n >> 30), KV.BLOCK, D)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LHS_LAYOUT), dout_tile, dv, is_async=True)
        ds_tile = buffers.ds.index(same_n % 2 if SPLIT_KEYS else GROUP).slice(0, KV.BLOCK, 0)  # [N, M]
        ds_tile.slice(FIRST_KEY, GROUP_ROWS, 0).store(ds)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds, LHS_LAYOUT), q_tile, dk, is_async=True)
        named_barrier_sync(8 if SPLIT_KEYS else 8 + GROUP, 256 if SPLIT_KEYS else 128)
        for i in gl.static_range(FIRST_HALF, GROUP + 1 if SPLIT_KEYS else 2):  # halves of the head size
            dq = gl.zeros([M, HALF_D], gl.float32, DQ_LAYOUT)  # [M, D / 2]
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile.slice(i * HALF_D, HALF_D, 1), dq, use_acc=False,
                               is_async=True)  # fmt: skip
            if i == FIRST_HALF:
                dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
                mbarrier.arrive(free.q_dout.index(stage), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
            add_rows(dq_rows + i * HALF_D, query_rows, D, dq, M, HALF_D)
    return dk, dv


@gluon.jit
def _add_gradient(x, desc, buffer, batch, row, kv_head, A: gl.constexpr, KV: gl.constexpr):
    """Adds dk or dv [64, D] through TMA, one box of ``desc`` after the other."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    tile = reinterpret(buffer, gl.float32, desc.block_shape, desc.layout)
    for i in gl.static_range(A.D // WIDTH):
        columns = select_columns(x, i, WIDTH)
        tma.store_wait(0)
        as_matrix(tile, GROUP_ROWS, WIDTH).store(columns)
        fence_async_shared()
        add_tile(desc, tile_coordinates(batch, row, kv_head, i * WIDTH, KV, A.D), tile)


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, rows, buffers, ready, free, work_tiles, lists, A: gl.constexpr,
              KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes 64 of the keys, or every second step."""
    D: gl.constexpr = A.D
    SPLIT_KEYS: gl.constexpr = KV.BLOCK > GROUP_ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.M, 16])
    DKV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    work_tile = _load_work_tile(work_tiles, lists.spans, L, F)
    batch, first_step, end_step = work_tile.batch, work_tile.first_step, work_tile.end_step
    if first_step < end_step:
        dk = gl.zeros([GROUP_ROWS, D], gl.float32, DKV_LAYOUT)  # [64, D]
        dv = gl.zeros([GROUP_ROWS, D], gl.float32, DKV_LAYOUT)  # [64, D]
        mbarrier.wait(ready.kv.index(0), 0)
        mbarrier.wait(ready.kv.index(1), 0)
        first_partial = gl.minimum(gl.maximum(work_tile.first_partial_step, first_step), end_step)
        dq_rows = rows.dq + (batch * F.T * A.HEADS).to(gl.int64) * D
        dk, dv = _query_gather_steps(first_step, first_partial, dk, dv, dq_rows, GROUP, buffers, ready, free, lists,
                                     work_tile, A, KV, F, False, S_LAYOUT, DKV_LAYOUT)  # fmt: skip
        dk, dv = _query_gather_steps(first_partial, end_step, dk, dv, dq_rows, GROUP, buffers, ready, free, lists,
                                     work_tile, A, KV, F, True, S_LAYOUT, DKV_LAYOUT)  # fmt: skip
        if SPLIT_KEYS:
            named_barrier_sync(8, 256)  # the last products have read ds, where dk and dv are stored to now
        kv_head = work_tile.head // (A.HEADS // A.KV_HEADS)
        row = work_tile.kv_block * KV.BLOCK + (GROUP * GROUP_ROWS if SPLIT_KEYS else 0)
        _add_gradient(dk, descs.dk, buffers.ds.index(GROUP), batch, row, kv_head, A, KV)
        _add_gradient(dv, descs.dv, buffers.ds.index(GROUP), batch, row, kv_head, A, KV)
        tma.store_wait(0)


@gluon.jit
def query_gather_kernel(
    q,  # [B, T, HEADS, D]
    dout,  # [B, T, HEADS, D]
    k,  # descriptors: [B, S, KV_HEADS, D], a box has N = KV.BLOCK rows
    v,
    lse,  # float32 [B * T * HEADS + 1]: see `scaled_neg_lse`; -inf at last, for no query
    delta,  # float32 [B * T * HEADS + 1]: -SCALE * delta; 0 at last
    work_tiles,  # int32 [NUM_SPLITS, BATCHES, 3]: head * NUM_BLOCKS + block, first step, end
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
    CONSUMER_REGISTERS: gl.constexpr,  # registers of a thread in a consumer, and in the producer
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Adds this program's work tile to dq, dk and dv."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    buffers = Buffers(
        q=gl.allocate_shared_memory(dtype, [F.STAGES, F.M, A.D], LAYOUT),
        dout=gl.allocate_shared_memory(dtype, [F.STAGES, F.M, A.D], LAYOUT),
        k=allocate_buffers(k, 1),  # [1, N, D]
        v=allocate_buffers(v, 1),  # [1, N, D]
        lse=gl.allocate_shared_memory(gl.float32, [F.STAGES, 1, F.M], PLAIN_LAYOUT),
        delta=gl.allocate_shared_memory(gl.float32, [F.STAGES, 1, F.M], PLAIN_LAYOUT),
        mask_words=gl.allocate_shared_memory(gl.int32, [F.STAGES, F.M, KV.BLOCK // 32], PLAIN_LAYOUT),
        ds=gl.allocate_shared_memory(dtype, [2, 2 * GROUP_ROWS, F.M], LAYOUT),  # at last dk and dv
    )
    q_dout_ready = allocate_barriers(F.STAGES, 128)
    free = Free(q_dout=allocate_barriers(F.STAGES, KV.BLOCK // GROUP_ROWS))
    ready = Ready(q_dout=q_dout_ready, kv=allocate_barriers(2, 1))
    fence_async_shared()
    descs = Descriptors(k=k, v=v, dk=dk, dv=dv)
    rows = RowPointers(q=q, dout=dout, lse=lse, delta=delta, dq=dq)
    lists = HopperBlockLists(spans=spans, entries=entries, mask_tiles=mask_tiles, mask_bits=mask_bits)
    gl.warp_specialize(
        [
            (_consumer, (0, descs, rows, buffers, ready, free, work_tiles, lists, A, KV, L, F)),
            (_consumer, (1, descs, rows, buffers, ready, free, work_tiles, lists, A, KV, L, F)),
            (_producer, (rows, descs, buffers, ready, free, work_tiles, lists, A, KV, L, F)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
