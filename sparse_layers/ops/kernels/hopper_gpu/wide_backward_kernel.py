"""The backward kernel for Hopper of heads above 128, up to 256: a program computes dk and dv of 64 keys of a key head.

Work tiles, lists, the producer and the arithmetic are those of `backward_kernel.py`. This is different:

**A program has 64 keys.** Registers hold dk and dv [64, 256] of no more. A block of the lists has 128 keys, so two
programs follow each list.

**One group has dv, the other one dk.** `_value_consumer` computes scores = k q^T, p = exp(scores - lse) and
dv += p dout. `_key_consumer` computes dp = v dout^T, ds = p * (dp - delta) and dk += ds q. So each product of 64 keys
is computed once. p and ds go from registers, as they are, into the products of dv and dk.

**p goes from the one to the other.** It is in float32, in the order of registers, times the derivative of a soft cap.
ds comes back, rounded, for dq.

**Each group computes half of the columns of dq**, of all 64 keys.

**dq leaves through the tiles of q and dout.** When both groups have read them, dq in float32 takes their place. A stage
is free once TMA has read dq: groups wait for that in the next step, behind its first product.

M is F.M, the queries of a step, N = 64 the keys of a program. Time runs to the right, ^ is the wait for a product:

    dv group   wait ready.q                 bar 8          bar 9
    products   [-- scores --^               | [------- dv -|--------^
                                            |              | [-- dq --^
    registers                [ mask, p ]    |              |           [ dq ]
    shared                          [ p -> exchange ]      |           -> dout tile of the stage -> add
                                            |              |
    dk group   wait ready.dout              |              |
    products   [---- dp ----^               |        [- dk |--------^
                                            |              | [-- dq --^
    registers                               | [ p, ds ]    |           [ dq ]
    shared                                  |       [ ds ] |           -> q tile of the stage -> add

* ready.kv, 0 for k and 1 for v: groups wait for both once, before their first step.
* ready.q and ready.dout, by stage: all of q and lse has arrived, or of dout and delta.
* bar 8: p is in shared memory, and the first group has read q. bar 9: ds is, and the second group has read dout.
* One buffer is enough for p, and for ds: a group that passes a barrier has read what the other one stores behind it.
* free.q_dout, by stage: TMA has read both halves of dq.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportAssignmentType=false

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_kernel import (
    SplitSchedule,
    apply_mask,
    initial_scores,
    load_entry_range,
    load_work_tile,
    produce,
    recompute_p,
    store_gradient,
    swap_halves,
    swapped_layout,
    times_cap_derivative,
)
from .biases import load_slope
from .primitives import add_tile, named_barrier_sync, prevent_hoisting, reinterpret
from .tiles import (
    GROUP_ROWS,
    Buffers,
    Descriptors,
    Free,
    HopperBlockLists,
    Ready,
    allocate_barriers,
    allocate_buffers,
    apply_ids,
    as_matrix,
    load_ids,
    load_mask_words,
    mask_tile_index,
    multiply_transposed,
    tile_coordinates,
    to_logits,
    token_of,
)


def _exchange_layout() -> Any:
    """Shared layout of p [64, 64]: four numbers of a thread follow each other, and then those of the next thread."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    return gl.SharedLinearLayout(bases, [], 128)


exchange_layout = gluon.constexpr_function(_exchange_layout)


@gluon.jit
def _free_previous_stage(free, pipeline_step, F: gl.constexpr):
    """Frees the stage of the step before, once TMA has read this group's half of dq there."""
    tma.store_wait(0)
    mbarrier.arrive(free.q_dout.index((pipeline_step + F.STAGES - 1) % F.STAGES), count=1, pred=pipeline_step > 0)


@gluon.jit
def _add_dq(GROUP: gl.constexpr, dq, desc, buffer, batch, row, pass_head, A: gl.constexpr, Q: gl.constexpr,
            F: gl.constexpr):  # fmt: skip
    """Adds half of the columns of dq [M, D / 2] to memory, through shared memory that nobody reads any more."""
    HALF_D: gl.constexpr = A.D // 2
    reinterpret(buffer, gl.float32, [F.M, HALF_D], swapped_layout(F.M, HALF_D)).store(swap_halves(dq, F.M, HALF_D))
    fence_async_shared()
    tile = reinterpret(buffer, desc.dtype, desc.block_shape, desc.layout)
    add_tile(desc, tile_coordinates(batch, row, pass_head, GROUP * HALF_D, Q, A.D), tile)


@gluon.jit
def _value_steps(first, end, pipeline_step, dv, descs, buffers, ready, free, lists, work_tile, pass_head, kv_ids,
                 slope, key_tokens, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, L: gl.constexpr,
                 F: gl.constexpr, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, DV_LAYOUT: gl.constexpr):  # fmt: skip
    """Adds the products of entries first .. end - 1 of a list to dv [64, DV] and to the first half of dq.

    Returns the number of the next pipeline step, and dv.
    """
    M: gl.constexpr = F.M
    STEPS_PER_BLOCK: gl.constexpr = Q.BLOCK // M
    WORDS: gl.constexpr = Q.BLOCK // 32
    HALF_D: gl.constexpr = A.D // 2
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D // 2, 16])
    LHS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DV_LAYOUT, 2)
    dtype: gl.constexpr = descs.q.dtype
    for step in range(first * STEPS_PER_BLOCK, end * STEPS_PER_BLOCK):
        entry = step // STEPS_PER_BLOCK
        q_tile_in_block = step % STEPS_PER_BLOCK
        row = gl.load(lists.entries + entry) * Q.BLOCK + q_tile_in_block * M
        stage = pipeline_step % F.STAGES
        # 0, computed: the compiler would keep, and spill, addresses that follow from a constant.
        k_tile = as_matrix(buffers.k.index(pipeline_step >> 30), GROUP_ROWS, A.D)  # [N, D]
        q_tile = as_matrix(buffers.q.index(stage), M, A.D)  # [M, D]
        mask_words = 0
        if MASKED:  # loaded first, as this takes long
            index, compare_ids = mask_tile_index(gl.load(lists.mask_tiles + entry), A)
            mask_row = index * KV.BLOCK + work_tile.row % KV.BLOCK
            mask_tile = lists.mask_bits + mask_row * WORDS + q_tile_in_block * (M // 32)
            mask_words = load_mask_words(mask_tile, M, S_LAYOUT, WORDS)
            if A.NUM_IDS > 0 and compare_ids:
                mask_words = apply_ids(mask_words, kv_ids, lists.q_ids, work_tile.batch, row, Q, A, False)
        mbarrier.wait(ready.q.index(stage), pipeline_step // F.STAGES & 1)
        neg_lse = buffers.lse.index(stage).load(S_LAYOUT)  # [1, M]
        scores = initial_scores(neg_lse, row, slope, key_tokens, A, Q, F, S_LAYOUT)  # [64, M]
        scores = multiply_transposed(k_tile, q_tile, scores, True, A.DEPTH)
        _free_previous_stage(free, pipeline_step, F)
        scores = to_logits(warpgroup_mma_wait(0, deps=[scores]), A)
        if MASKED:
            scores = apply_mask(scores, mask_words, entry, q_tile_in_block, lists, A, L, F, S_LAYOUT)
        p = recompute_p(scores, neg_lse, A)  # [64, M]
        buffers.p.store(times_cap_derivative(p, scores, A))
        mbarrier.wait(ready.dout.index(stage), pipeline_step // F.STAGES & 1)
        named_barrier_sync(8, 256)
        dout_tile = as_matrix(buffers.dout.index(stage), M, A.DV)  # [M, DV]
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LHS_LAYOUT), dout_tile, dv, is_async=True)
        named_barrier_sync(9, 256)
        dq = gl.zeros([M, HALF_D], gl.float32, DQ_LAYOUT)  # [M, D / 2]
        dq = warpgroup_mma(buffers.ds.index(0).permute((1, 0)), k_tile.slice(0, HALF_D, 1), dq, use_acc=False,
                           is_async=True)  # fmt: skip
        dv, dq = warpgroup_mma_wait(0, deps=[dv, dq])
        buffer = buffers.dq.index(0) if A.DV < A.D else buffers.dout.index(stage)
        _add_dq(0, dq, descs.dq, buffer, work_tile.batch, row, pass_head, A, Q, F)
        pipeline_step += 1
    return pipeline_step, dv


@gluon.jit
def _key_steps(first, end, pipeline_step, dk, descs, buffers, ready, free, lists, work_tile, pass_head,
               A: gl.constexpr, Q: gl.constexpr, L: gl.constexpr, F: gl.constexpr, S_LAYOUT: gl.constexpr,
               DK_LAYOUT: gl.constexpr):  # fmt: skip
    """Adds the products of entries first .. end - 1 of a list to dk [64, D] and to the second half of dq.

    Returns the number of the next pipeline step, and dk.
    """
    M: gl.constexpr = F.M
    STEPS_PER_BLOCK: gl.constexpr = Q.BLOCK // M
    HALF_D: gl.constexpr = A.D // 2
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D // 2, 16])
    LHS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    dtype: gl.constexpr = descs.q.dtype
    for step in range(first * STEPS_PER_BLOCK, end * STEPS_PER_BLOCK):
        row = gl.load(lists.entries + step // STEPS_PER_BLOCK) * Q.BLOCK + step % STEPS_PER_BLOCK * M
        stage = pipeline_step % F.STAGES
        zero = pipeline_step >> 30  # 0, see above
        v_tile = as_matrix(buffers.v.index(zero), GROUP_ROWS, A.DV)  # [N, DV]
        dout_tile = as_matrix(buffers.dout.index(stage), M, A.DV)  # [M, DV]
        mbarrier.wait(ready.dout.index(stage), pipeline_step // F.STAGES & 1)
        dp = gl.zeros([GROUP_ROWS, M], gl.float32, S_LAYOUT)  # [64, M]
        dp = multiply_transposed(v_tile, dout_tile, dp, False, A.DV)
        _free_previous_stage(free, pipeline_step, F)
        delta = buffers.delta.index(stage).load(S_LAYOUT)  # [1, M]
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.wait(ready.q.index(stage), pipeline_step // F.STAGES & 1)
        named_barrier_sync(8, 256)
        ds = (buffers.p.load(S_LAYOUT) * (dp * A.SCALE + delta)).to(dtype)  # [64, M]
        ds_tile = buffers.ds.index(zero)  # [N, M]
        ds_tile.store(ds)
        fence_async_shared()
        q_tile = as_matrix(buffers.q.index(stage), M, A.D)  # [M, D]
        dk = warpgroup_mma(gl.convert_layout(ds, LHS_LAYOUT), q_tile, dk, is_async=True)
        named_barrier_sync(9, 256)
        k_tile = as_matrix(buffers.k.index(zero), GROUP_ROWS, A.D)  # [N, D]
        dq = gl.zeros([M, HALF_D], gl.float32, DQ_LAYOUT)  # [M, D / 2]
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile.slice(HALF_D, HALF_D, 1), dq, use_acc=False,
                           is_async=True)  # fmt: skip
        dk, dq = warpgroup_mma_wait(0, deps=[dk, dq])
        _add_dq(1, dq, descs.dq, buffers.q.index(stage), work_tile.batch, row, pass_head, A, Q, F)
        pipeline_step += 1
    return pipeline_step, dk


@gluon.jit
def _value_consumer(descs, buffers, ready, free, schedule, lists, slopes, A: gl.constexpr, Q: gl.constexpr,
                    KV: gl.constexpr, DKV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes dv, and the first half of the columns of dq."""
    DV: gl.constexpr = A.DV
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.M, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.DV, 16])
    work_tile = load_work_tile(schedule, A, KV, L, F)
    batch, row = work_tile.batch, work_tile.row
    key_rows = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    kv_ids, key_tokens = load_ids(lists.kv_ids, batch, key_rows, KV, A), token_of(key_rows, KV)  # [64] each
    dv = gl.zeros([GROUP_ROWS, DV], gl.float32, DV_LAYOUT)  # [64, DV]
    pipeline_step = 0
    mbarrier.wait(ready.kv.index(0), 0)
    mbarrier.wait(ready.kv.index(1), 0)
    for pass_head in range(work_tile.first_head, work_tile.end_head):
        first, first_partial, end = load_entry_range(lists.spans, work_tile, pass_head, A, L)
        slope = load_slope(slopes, pass_head, A)
        pipeline_step, dv = _value_steps(first, first_partial, pipeline_step, dv, descs, buffers, ready, free, lists,
                                         work_tile, pass_head, kv_ids, slope, key_tokens, A, Q, KV, L, F, False,
                                         S_LAYOUT, DV_LAYOUT)  # fmt: skip
        _, first_partial, end = load_entry_range(lists.spans, work_tile, prevent_hoisting(pass_head), A, L)
        pipeline_step, dv = _value_steps(first_partial, end, pipeline_step, dv, descs, buffers, ready, free, lists,
                                         work_tile, pass_head, kv_ids, slope, key_tokens, A, Q, KV, L, F, True,
                                         S_LAYOUT, DV_LAYOUT)  # fmt: skip
    store_gradient(dv, descs.dv, buffers.dout.index(0), batch, row, work_tile.kv_head, A.DV, DKV, F)
    tma.store_wait(0)


@gluon.jit
def _key_consumer(descs, buffers, ready, free, schedule, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
                  DKV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes dk, and the second half of the columns of dq."""
    D: gl.constexpr = A.D
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.M, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    work_tile = load_work_tile(schedule, A, KV, L, F)
    dk = gl.zeros([GROUP_ROWS, D], gl.float32, DK_LAYOUT)  # [64, D]
    pipeline_step = 0
    mbarrier.wait(ready.kv.index(0), 0)
    mbarrier.wait(ready.kv.index(1), 0)
    for pass_head in range(work_tile.first_head, work_tile.end_head):
        first, _, end = load_entry_range(lists.spans, work_tile, pass_head, A, L)
        pipeline_step, dk = _key_steps(first, end, pipeline_step, dk, descs, buffers, ready, free, lists, work_tile,
                                       pass_head, A, Q, L, F, S_LAYOUT, DK_LAYOUT)  # fmt: skip
    store_gradient(dk, descs.dk, buffers.q.index(0), work_tile.batch, work_tile.row, work_tile.kv_head, A.D, DKV, F)
    tma.store_wait(0)


@gluon.jit
def hopper_wide_backward_kernel(
    q,  # all parameters are those of `hopper_backward_kernel`; a box of k, v, dk and dv has N = F.N rows
    dout,
    k,
    v,
    lse,
    delta,
    work_tiles,
    spans,
    entries,
    mask_tiles,
    active_query_groups,
    mask_bits,
    q_ids,
    kv_ids,
    splits,
    slopes,
    earlier_dq,
    earlier_dk,
    earlier_dv,
    dq,
    dk,
    dv,
    A: gl.constexpr,
    Q: gl.constexpr,
    KV: gl.constexpr,
    DKV: gl.constexpr,
    L: gl.constexpr,
    F: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Computes dk and dv of this program's 64 keys, and adds to dq."""
    dq_buffer = None
    if A.DV < A.D:
        dq_buffer = allocate_buffers(dq, 1)  # float32 [1, M, D / 2]: tiles of dout are too small
    buffers = Buffers(
        q=allocate_buffers(q, F.STAGES),  # [STAGES, M, D]
        dout=allocate_buffers(dout, F.STAGES),  # [STAGES, M, DV]
        lse=allocate_buffers(lse, F.STAGES),  # float32 [STAGES, 1, M]
        delta=allocate_buffers(delta, F.STAGES),  # float32 [STAGES, 1, M]
        k=allocate_buffers(k, 1),  # [1, N, D]
        v=allocate_buffers(v, 1),  # [1, N, DV]
        dq=dq_buffer,
        ds=gl.allocate_shared_memory(q.dtype, [1, F.N, F.M], gl.NVMMASharedLayout(128, 16, 2)),  # [1, N, M]
        p=gl.allocate_shared_memory(gl.float32, [F.N, F.M], exchange_layout()),  # [N, M]
    )
    q_ready, dout_ready = allocate_barriers(F.STAGES, 1), allocate_barriers(F.STAGES, 1)
    free = Free(q_dout=allocate_barriers(F.STAGES, 2))
    ready = Ready(q=q_ready, dout=dout_ready, kv=allocate_barriers(2, 1))
    fence_async_shared()
    descs = Descriptors(q=q, k=k, v=v, dout=dout, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv)
    lists = HopperBlockLists(spans, entries, mask_tiles, active_query_groups, mask_bits, q_ids, kv_ids)
    schedule = SplitSchedule(work_tiles, splits)
    gl.warp_specialize(
        [
            (_value_consumer, (descs, buffers, ready, free, schedule, lists, slopes, A, Q, KV, DKV, L, F)),
            (_key_consumer, (descs, buffers, ready, free, schedule, lists, A, Q, KV, DKV, L, F)),
            (produce, (descs, buffers, ready, free, schedule, lists, A, Q, KV, L, F)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
