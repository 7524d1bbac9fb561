"""The backward kernel for Hopper: a program computes dk and dv of 128 keys of a key head, and adds to dq.

**One work tile a program.** It is a block of N keys of a key head, whose k and v stay in shared memory, for all query
heads of that key head. Where some lists are much longer than others, a work tile is a split of a list. Splits add to
dk and dv in float32.

**One warp loads, two groups of four warps multiply.** The producer drives TMA: k and v once, then for each
step a stage of q, lse, dout and delta. Each group has GROUP_ROWS = 64 of the keys, and their dk and dv in registers.

**Scores are transposed.** Scores, p, dp and ds are [keys, queries]. So p and ds go from registers, as they are, into
the products of dv and dk. Accumulators of scores start at -lse, see `scaled_neg_lse`, if logits are only scaled.

**Five products a step.** Of scores = k q^T and dp = v dout^T, the second runs on during p = exp(scores - lse). With
ds = p * (dp - delta), the other three run together: dv += p dout, dq = ds^T k and dk += ds q. The last one runs on
while dq is stored. Heads of 64 compute dk before dq.

**dq goes through shared memory.** Groups exchange ds there, and each multiplies ds of all N keys by half of the columns
of k. TMA adds dq to an array in float32, in the order in which programs get there.

M is F.M, the queries of a step, N is KV.BLOCK, the keys of a program, D the head size, rounded up. Time runs to the
right, step n uses the stage n % STAGES, and ^ is the wait for a product:

    producer   wait free.q_dout, load q, lse -> ready.q, dout, delta -> ready.dout; so on, up to STAGES steps ahead

    a group    wait      wait                                     bar 8                          arrive
               ready.q   ready.dout                               |                              free.q_dout
               |         |                                        |                              |
    products   [------- scores ------^                    [---- dv --------^             ^
                         [---------- dp ----------^                [--- dq ^             |
                                                                    [-------- dk --------^
    registers                         [ mask, p ]  [ ds ]                   [ dq ]
    shared     read q    read dout                         [ ds -> ds[n % 2] ]  -> dq[group] -> add

* ready.kv, 0 for k and 1 for v: groups wait for both once, before their first step.
* ready.q and ready.dout, by stage: all of q and lse has arrived, or of dout and delta.
* free.q_dout, by stage: both groups have read q, lse, dout and delta.
* bar 8: both groups have stored their rows of ds. Two buffers are enough: a group that passes it at step n + 1 knows
  that the other one has waited for dq of step n. So both may write to ds[n % 2] again.
* dq[group] is free once TMA has read the tile that it adds (`tma.store_wait`). dk and dv leave by it, too.

The rules that ptxas does not state, in `forward_kernel.py`, hold here, too. One more: a wait for a barrier that is over
is a branch, which keeps ptxas from moving the wait for dp before the exponentials.
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

from .biases import load_slope
from .primitives import add_tile, exp2, load_tile, named_barrier_sync, prevent_hoisting, reinterpret, store_tile
from .tiles import (
    GROUP_ROWS,
    LOG2_E,
    Buffers,
    Descriptors,
    Free,
    HopperBlockLists,
    Ready,
    allocate_barriers,
    allocate_buffers,
    apply_ids,
    apply_mask_bits,
    as_matrix,
    expect_tile,
    load_ids,
    load_mask_words,
    load_span,
    mask_tile_index,
    scale_log2,
    select_columns,
    tile_coordinates,
    to_logits,
    token_of,
    unravel_work_tile,
)


class BackwardConstants(NamedTuple):
    """Compile-time constants of the kernel, beside the bundles of `tiles.py`."""

    M: int  # queries of a step; a block of the lists has one or more steps
    N: int  # keys of a program; a block of the lists has one or two programs
    STAGES: int  # of the ring of q and dout tiles
    ADD_TO_DKV: bool  # True if results are added to earlier dk and dv
    SPLIT_HEADS: int  # query heads with the same splits, numbered for the first of them


class SplitSchedule(NamedTuple):
    """Pointers to the work tiles of all programs."""

    work_tiles: Any  # number of the work tile, by program, or by two programs
    splits: Any  # of the lists, if L.NUM_SPLITS > 0


class KVWorkTile(NamedTuple):
    """Work tile of one program; query heads are numbered within the pass."""

    batch: Any
    kv_head: Any
    kv_block: Any
    row: Any  # the program's first row of keys
    first_head: Any
    end_head: Any
    first_entry: Any  # of a split, in the list of its first head
    end_entry: Any  # of a split, in the list of its last head


@gluon.jit
def _query_heads(kv_head, A: gl.constexpr):
    """Query heads of a key head in the pass: FIRST_HEAD + i * HEAD_STEP for first <= i < end. Returns (first, end)."""
    if A.HEADS == A.KV_HEADS and A.HEAD_STEP == 1:
        return kv_head, kv_head + 1
    else:
        group: gl.constexpr = A.HEADS // A.KV_HEADS
        first = (kv_head * group - A.FIRST_HEAD + A.HEAD_STEP - 1) // A.HEAD_STEP
        return gl.maximum(first, 0), ((kv_head + 1) * group - A.FIRST_HEAD + A.HEAD_STEP - 1) // A.HEAD_STEP


@gluon.jit
def load_work_tile(schedule, A: gl.constexpr, KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):
    """Loads the work tile of this program."""
    PROGRAMS: gl.constexpr = KV.BLOCK // F.N  # of a work tile
    number = gl.load(schedule.work_tiles + gl.program_id(0) // PROGRAMS)
    row_in_block = gl.program_id(0) % PROGRAMS * F.N
    if L.NUM_SPLITS == 0:
        batch, kv_head, kv_block = unravel_work_tile(number, A.KV_HEADS, L)
        first_head, end_head = _query_heads(kv_head, A)
        row = kv_block * KV.BLOCK + row_in_block
        return KVWorkTile(batch, kv_head, kv_block, row, first_head, end_head, 0, 0)
    else:
        split = schedule.splits + number % L.NUM_SPLITS * 5
        head_offset = number // L.NUM_SPLITS % F.SPLIT_HEADS
        first_head, end_head = gl.load(split + 1) + head_offset, gl.load(split + 2) + head_offset
        kv_head = (A.FIRST_HEAD + first_head * A.HEAD_STEP) // (A.HEADS // A.KV_HEADS)
        first_entry, end_entry = gl.load(split + 3), gl.load(split + 4)
        batch, kv_block = number // L.NUM_SPLITS // F.SPLIT_HEADS, gl.load(split)
        row = kv_block * KV.BLOCK + row_in_block
        return KVWorkTile(batch, kv_head, kv_block, row, first_head, end_head, first_entry, end_entry)


@gluon.jit
def load_entry_range(spans, work_tile, pass_head, A: gl.constexpr, L: gl.constexpr):
    """Entries of a work tile in the list of a query head: (first entry, first partial one, end)."""
    head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
    first, first_partial, end = load_span(spans, work_tile.batch, head, work_tile.kv_block, L)
    if L.NUM_SPLITS > 0:
        end = gl.where(pass_head + 1 == work_tile.end_head, first + work_tile.end_entry, end)
        first = gl.where(pass_head == work_tile.first_head, first + work_tile.first_entry, first)
        first_partial = gl.minimum(gl.maximum(first_partial, first), end)
    return first, first_partial, end


def _swapped_layout(rows: int, columns: int) -> Any:
    """Shared layout of a float32 tile after `swap_halves`, which TMA then reads unswapped.

    TMA has rows in lines of 128 bytes, and chunk i of 16 bytes of row r at position i ^ (r % 8) of a line.
    Sixteen threads store at a time, two columns each: two chunks of each of four rows. The chunks of two of the rows
    would be at the same positions, in the same banks. Odd rows that store the second half of a line avoid that.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4 ^ 16], [2, 8], [4, 16]]
    bases += [[1 << i, 0] for i in range(3, rows.bit_length() - 1)]
    return gl.SharedLinearLayout(bases + [[0, 1 << i] for i in range(5, columns.bit_length() - 1)], [], 1024)


swapped_layout = gluon.constexpr_function(_swapped_layout)


@gluon.jit
def swap_halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Swaps the halves of every 32 columns in the odd rows of a tile."""
    low, high = gl.split(gl.permute(gl.reshape(x, [ROWS, COLUMNS // 32, 2, 16]), (0, 1, 3, 2)))
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, low.type.layout))
    odd = (gl.arange(0, ROWS, layout=LAYOUT) & 1) != 0
    odd = gl.expand_dims(gl.expand_dims(odd, 1), 2)
    halves = gl.join(gl.where(odd, high, low), gl.where(odd, low, high))
    return gl.reshape(gl.permute(halves, (0, 1, 3, 2)), [ROWS, COLUMNS])


@gluon.jit
def produce(descs, buffers, ready, free, schedule, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
              L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Loads k and v, then for each step q with lse, and dout with delta."""
    M: gl.constexpr = F.M
    STEPS_PER_BLOCK: gl.constexpr = Q.BLOCK // M
    work_tile = load_work_tile(schedule, A, KV, L, F)
    batch, row = work_tile.batch, work_tile.row
    expect_tile(descs.k, batch, row, work_tile.kv_head, ready.kv.index(0), buffers.k.index(0), KV, A.D)
    expect_tile(descs.v, batch, row, work_tile.kv_head, ready.kv.index(1), buffers.v.index(0), KV, A.DV)
    pipeline_step = 0
    for pass_head in range(work_tile.first_head, work_tile.end_head):
        head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
        first, _, end = load_entry_range(lists.spans, work_tile, pass_head, A, L)
        scalars_row = batch * A.PASS_HEADS + pass_head
        for step in range(first * STEPS_PER_BLOCK, end * STEPS_PER_BLOCK):
            q_block = gl.load(lists.entries + step // STEPS_PER_BLOCK)
            row = q_block * Q.BLOCK + step % STEPS_PER_BLOCK * M
            stage = pipeline_step % F.STAGES
            mbarrier.wait(free.q_dout.index(stage), (pipeline_step // F.STAGES & 1) ^ 1)
            mbarrier.expect(ready.q.index(stage), descs.q.block_type.nbytes + descs.lse.block_type.nbytes)
            coordinates = tile_coordinates(batch, row, head, 0, Q, A.D)
            load_tile(descs.q, coordinates, ready.q.index(stage), buffers.q.index(stage))
            load_tile(descs.lse, [scalars_row, row], ready.q.index(stage), buffers.lse.index(stage))
            mbarrier.expect(ready.dout.index(stage), descs.dout.block_type.nbytes + descs.delta.block_type.nbytes)
            if A.D != A.DV:
                coordinates = tile_coordinates(batch, row, head, 0, Q, A.DV)
            load_tile(descs.dout, coordinates, ready.dout.index(stage), buffers.dout.index(stage))
            load_tile(descs.delta, [scalars_row, row], ready.dout.index(stage), buffers.delta.index(stage))
            pipeline_step += 1


@gluon.jit
def apply_mask(scores, mask_words, entry, q_tile_in_block, lists, A: gl.constexpr, L: gl.constexpr,
                F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Sets scores [64, M] of a partial entry to -inf where mask words or the selection exclude the pair."""
    M: gl.constexpr = F.M
    scores = apply_mask_bits(scores, mask_words, M, LAYOUT, A)
    column = q_tile_in_block * M + gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUT))  # of the block of queries
    if L.GRANULARITY > 0:
        is_selected = (gl.load(lists.active_query_groups + entry) >> (column // L.GRANULARITY)) & 1
        scores = gl.where((is_selected != 0)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def initial_scores(neg_lse, q_row, slope, key_tokens, A: gl.constexpr, Q: gl.constexpr, F: gl.constexpr,
                   LAYOUT: gl.constexpr):  # fmt: skip
    """Returns scores [64, M] to which k . q is added: 0, or -lse if logits are only scaled, plus the bias of ALiBi.

    The bias counts from the first query of the step, at ``q_row``. ``neg_lse`` has what it is for the others besides.
    """
    M: gl.constexpr = F.M  # in a list, Triton 3.6 takes constants under a name of their own only
    scores = gl.zeros([GROUP_ROWS, M], gl.float32, LAYOUT)
    if A.ALIBI:
        distance = key_tokens - token_of(q_row, Q)  # [64]
        scores = neg_lse + (distance.to(gl.float32) * slope)[:, None]
    elif scale_log2(A.SCALE, A.CAP) != 1.0:
        scores, _ = gl.broadcast(neg_lse, scores)
    return scores


@gluon.jit
def recompute_p(scores, neg_lse, A: gl.constexpr):
    """Recomputes p = exp(logits - lse) <= 1, see `reduced_lse`, from ``scores`` after `to_logits` and scaled -lse.

    ``neg_lse`` is that of `scaled_neg_lse`; ``scores`` already include it if logits are only scaled.
    """
    logits = scores + neg_lse if scale_log2(A.SCALE, A.CAP) == 1.0 else scores * scale_log2(A.SCALE, A.CAP)
    return exp2(gl.minimum(logits, 0.0))


@gluon.jit
def compute_ds(scores, p, dp, delta, A: gl.constexpr):
    """Computes ds = scale * p * (dp - delta) from ``scores`` after `to_logits`; ``delta`` comes times -scale."""
    return times_cap_derivative(p * (dp * A.SCALE + delta), scores, A)


@gluon.jit
def times_cap_derivative(x, scores, A: gl.constexpr):
    """Multiplies x by the derivative of the soft cap at ``scores`` after `to_logits`."""
    if A.CAP > 0:
        tanh_logits = gl.maximum(scores, -A.CAP * LOG2_E) / (A.CAP * LOG2_E)
        x = x * (1 - tanh_logits * tanh_logits)
    return x


@gluon.jit
def _backward_steps(first, end, pipeline_step, dk, dv, GROUP: gl.constexpr, descs, buffers, ready, free, lists, batch,
                    pass_head, kv_ids, slope, key_tokens, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
                    L: gl.constexpr, F: gl.constexpr, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr,
                    DKV_LAYOUT: gl.constexpr):  # fmt: skip
    """Adds the products of entries first .. end - 1 of a list to dk, dv [64, D] in registers and dq in memory.

    Returns the number of the next pipeline step, dk and dv.
    """
    M: gl.constexpr = F.M
    D: gl.constexpr = A.D
    STEPS_PER_BLOCK: gl.constexpr = Q.BLOCK // M
    WORDS: gl.constexpr = Q.BLOCK // 32
    HALF_D: gl.constexpr = A.D // 2
    FIRST_KEY: gl.constexpr = GROUP * GROUP_ROWS  # of the group, in the block
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D // 2, 16])
    LHS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DKV_LAYOUT, 2)
    # dq leaves while dk is computed: documents and `fixed` take 2 % less on an H200. Causal takes 3 % more at 64.
    DQ_BEFORE_DK: gl.constexpr = D > 64
    dtype: gl.constexpr = descs.q.dtype
    for step in range(first * STEPS_PER_BLOCK, end * STEPS_PER_BLOCK):
        entry = step // STEPS_PER_BLOCK
        q_tile_in_block = step % STEPS_PER_BLOCK
        q_block = gl.load(lists.entries + entry)
        stage = pipeline_step % F.STAGES
        # 0, computed: the compiler would keep, and spill, addresses that follow from a constant.
        zero = pipeline_step >> 30
        k_tile = as_matrix(buffers.k.index(zero), KV.BLOCK, D)  # [N, D]
        v_tile = as_matrix(buffers.v.index(zero), KV.BLOCK, D)  # [N, D]
        q_tile = as_matrix(buffers.q.index(stage), M, D)  # [M, D]
        dout_tile = as_matrix(buffers.dout.index(stage), M, D)  # [M, D]
        mask_words = 0
        if MASKED:  # loaded first, as this takes long
            index, compare_ids = mask_tile_index(gl.load(lists.mask_tiles + entry), A)
            mask_row = index * KV.BLOCK + FIRST_KEY
            mask_tile = lists.mask_bits + mask_row * WORDS + q_tile_in_block * (M // 32)
            mask_words = load_mask_words(mask_tile, M, S_LAYOUT, WORDS)
            if A.NUM_IDS > 0 and compare_ids:
                first_row = q_block * Q.BLOCK + q_tile_in_block * M
                mask_words = apply_ids(mask_words, kv_ids, lists.q_ids, batch, first_row, Q, A, False)
        mbarrier.wait(ready.q.index(stage), pipeline_step // F.STAGES & 1)
        neg_lse = buffers.lse.index(stage).load(S_LAYOUT)  # [1, M]
        q_row = q_block * Q.BLOCK + q_tile_in_block * M
        scores = initial_scores(neg_lse, q_row, slope, key_tokens, A, Q, F, S_LAYOUT)  # [64, M]
        scores = warpgroup_mma(k_tile.slice(FIRST_KEY, GROUP_ROWS, 0), q_tile.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(ready.dout.index(stage), pipeline_step // F.STAGES & 1)
        dp = gl.zeros([GROUP_ROWS, M], gl.float32, S_LAYOUT)  # [64, M]
        dp = warpgroup_mma(v_tile.slice(FIRST_KEY, GROUP_ROWS, 0), dout_tile.permute((1, 0)), dp, use_acc=False,
                           is_async=True)  # fmt: skip
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = to_logits(scores, A)
        if MASKED:
            scores = apply_mask(scores, mask_words, entry, q_tile_in_block, lists, A, L, F, S_LAYOUT)
        p = recompute_p(scores, neg_lse, A)  # [64, M]
        # This phase is already complete. The wait is a branch: without it, ptxas moves the wait for dp before the
        # exponentials.
        mbarrier.wait(ready.dout.index(stage), pipeline_step // F.STAGES & 1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        delta = buffers.delta.index(stage).load(S_LAYOUT)  # [1, M]
        ds = compute_ds(scores, p, dp, delta, A).to(dtype)  # [64, M]
        same_pipeline_step = prevent_hoisting(pipeline_step)
        stage = same_pipeline_step % F.STAGES
        q_tile = as_matrix(buffers.q.index(stage), M, D)
        dout_tile = as_matrix(buffers.dout.index(stage), M, D)
        k_tile = as_matrix(buffers.k.index(same_pipeline_step >> 30), KV.BLOCK, D)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LHS_LAYOUT), dout_tile, dv, is_async=True)
        ds_tile = buffers.ds.index(same_pipeline_step % 2)  # [N, M], of both groups
        ds_tile.slice(FIRST_KEY, GROUP_ROWS, 0).store(ds)
        fence_async_shared()
        if not DQ_BEFORE_DK:
            dk = warpgroup_mma(gl.convert_layout(ds, LHS_LAYOUT), q_tile, dk, is_async=True)
        named_barrier_sync(8, 256)
        dq = gl.zeros([M, HALF_D], gl.float32, DQ_LAYOUT)  # [M, D / 2]
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile.slice(GROUP * HALF_D, HALF_D, 1), dq, use_acc=False,
                           is_async=True)  # fmt: skip
        if DQ_BEFORE_DK:
            dk = warpgroup_mma(gl.convert_layout(ds, LHS_LAYOUT), q_tile, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
        else:
            dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
            mbarrier.arrive(free.q_dout.index(stage), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
        tma.store_wait(0)
        dq_tile = buffers.dq.index(GROUP)
        reinterpret(dq_tile, gl.float32, [M, HALF_D], swapped_layout(M, HALF_D)).store(swap_halves(dq, M, HALF_D))
        fence_async_shared()
        row = q_block * Q.BLOCK + q_tile_in_block * M
        add_tile(descs.dq, tile_coordinates(batch, row, pass_head, GROUP * HALF_D, Q, D), dq_tile)
        if DQ_BEFORE_DK:
            dk = warpgroup_mma_wait(0, deps=[dk])
            mbarrier.arrive(free.q_dout.index(stage), count=1)
        pipeline_step += 1
    return pipeline_step, dk, dv


@gluon.jit
def store_gradient(x, desc, buffer, batch, row, kv_head, SIZE: gl.constexpr, DKV: gl.constexpr, F: gl.constexpr):
    """Stores or adds dk or dv [64, SIZE] through TMA, one box of ``desc`` after the other."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    tile = reinterpret(buffer, desc.dtype, desc.block_shape, desc.layout)
    for i in gl.static_range(SIZE // WIDTH):
        columns = select_columns(x, i, WIDTH)
        tma.store_wait(0)
        as_matrix(tile, GROUP_ROWS, WIDTH).store(columns.to(desc.dtype))
        fence_async_shared()
        corner = tile_coordinates(batch, row, kv_head, i * WIDTH, DKV, SIZE)
        if F.ADD_TO_DKV:
            add_tile(desc, corner, tile)
        else:
            store_tile(desc, corner, tile)


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, buffers, ready, free, schedule, lists, slopes, A: gl.constexpr,
              Q: gl.constexpr, KV: gl.constexpr, DKV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes dk and dv of 64 of the keys, and half of the columns of dq."""
    D: gl.constexpr = A.D
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.M, 16])
    DKV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    work_tile = load_work_tile(schedule, A, KV, L, F)
    batch = work_tile.batch
    row = work_tile.row + GROUP * GROUP_ROWS
    key_rows = row + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    kv_ids = load_ids(lists.kv_ids, batch, key_rows, KV, A)  # [64] each
    key_tokens = token_of(key_rows, KV)  # [64]
    dk = gl.zeros([GROUP_ROWS, D], gl.float32, DKV_LAYOUT)  # [64, D]
    dv = gl.zeros([GROUP_ROWS, D], gl.float32, DKV_LAYOUT)  # [64, D]
    pipeline_step = 0
    mbarrier.wait(ready.kv.index(0), 0)
    mbarrier.wait(ready.kv.index(1), 0)
    for pass_head in range(work_tile.first_head, work_tile.end_head):
        first, first_partial, end = load_entry_range(lists.spans, work_tile, pass_head, A, L)
        slope = load_slope(slopes, pass_head, A)
        pipeline_step, dk, dv = _backward_steps(first, first_partial, pipeline_step, dk, dv, GROUP, descs, buffers,
                                                ready, free, lists, batch, pass_head, kv_ids, slope, key_tokens, A, Q,
                                                KV, L, F, False, S_LAYOUT, DKV_LAYOUT)  # fmt: skip
        _, first_partial, end = load_entry_range(lists.spans, work_tile, prevent_hoisting(pass_head), A, L)
        pipeline_step, dk, dv = _backward_steps(first_partial, end, pipeline_step, dk, dv, GROUP, descs, buffers,
                                                ready, free, lists, batch, pass_head, kv_ids, slope, key_tokens, A, Q,
                                                KV, L, F, True, S_LAYOUT, DKV_LAYOUT)  # fmt: skip
    store_gradient(dk, descs.dk, buffers.dq.index(GROUP), batch, row, work_tile.kv_head, D, DKV, F)
    store_gradient(dv, descs.dv, buffers.dq.index(GROUP), batch, row, work_tile.kv_head, D, DKV, F)
    tma.store_wait(0)


@gluon.jit
def hopper_backward_kernel(
    q,  # descriptors: [B, *axes of Q, HEADS, H], a box has M rows and D columns
    dout,  # [B, *axes of Q, HEADS, HV], likewise
    k,  # [B, *axes of KV, KV_HEADS, H], a box has N = KV.BLOCK rows
    v,  # [B, *axes of KV, KV_HEADS, HV]
    lse,  # float32 [B * PASS_HEADS, Q.ROWS] by row, a box has M of a row; see `scaled_neg_lse`, `initial_scores`
    delta,  # float32 [B * PASS_HEADS, Q.ROWS] by row: -SCALE * delta
    work_tiles,  # int32 [programs]: the number of the work tile of each program
    spans,  # this and all up to ``mask_bits``: as in `hopper_forward_kernel`, by blocks of keys
    entries,
    mask_tiles,
    active_query_groups,
    mask_bits,  # int32 [1 + tiles, N, Q.BLOCK / 32]
    q_ids,
    kv_ids,
    splits,  # int32 [NUM_SPLITS, 5], see `schedule.split_long_lists`; any array if there are none
    slopes,  # float32 [HEADS], divided by SCALE, if ALIBI; else None
    earlier_dq,  # dq, dk and dv of earlier passes, to which results are added in place; any array where there are none
    earlier_dk,
    earlier_dv,
    dq,  # float32 [B, *axes of Q, PASS_HEADS, H], a box has M rows and half of D; added to
    dk,  # [B, *axes of DKV, KV_HEADS, H], a box has half of N rows, and of D if it is float32; added to if ADD_TO_DKV
    dv,  # [B, *axes of DKV, KV_HEADS, HV], likewise
    A: gl.constexpr,
    Q: gl.constexpr,
    KV: gl.constexpr,
    DKV: gl.constexpr,  # of dk and dv: KV, or by row
    L: gl.constexpr,
    F: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,  # registers of a thread in a consumer, and in the producer
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Computes dk and dv of this program's work tile, and adds to dq."""
    buffers = Buffers(
        q=allocate_buffers(q, F.STAGES),  # [STAGES, M, D]
        dout=allocate_buffers(dout, F.STAGES),  # [STAGES, M, D]
        lse=allocate_buffers(lse, F.STAGES),  # float32 [STAGES, 1, M]
        delta=allocate_buffers(delta, F.STAGES),  # float32 [STAGES, 1, M]
        k=allocate_buffers(k, 1),  # [1, N, D]
        v=allocate_buffers(v, 1),  # [1, N, D]
        dq=allocate_buffers(dq, 2),  # float32 [2, M, D / 2], by group; at last dk and dv
        ds=gl.allocate_shared_memory(q.dtype, [2, KV.BLOCK, F.M], gl.NVMMASharedLayout(128, 16, 2)),  # [2, N, M]
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
            (_consumer, (0, descs, buffers, ready, free, schedule, lists, slopes, A, Q, KV, DKV, L, F)),
            (_consumer, (1, descs, buffers, ready, free, schedule, lists, slopes, A, Q, KV, DKV, L, F)),
            (produce, (descs, buffers, ready, free, schedule, lists, A, Q, KV, L, F)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
