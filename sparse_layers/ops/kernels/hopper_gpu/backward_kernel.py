"""The backward kernel for Hopper: a program computes dk and dv of 128 keys of a key head, and adds to dq.

**One work tile a program.** It is a block of N keys of a key head, whose k and v stay in shared memory, for all query
heads of that key head. Where some lists are much longer than others, a work tile is a split of a list. Splits add to
dk and dv in float32.

**One warp loads, two groups of four warps multiply.** The producer drives the copy engine: k and v once, then for each
step a stage of q, lse, dout and delta. Each group has ROWS = 64 of the keys, and their dk and dv in registers.

**Scores are transposed.** Scores, p, dp and ds are [keys, queries]. So p and ds go from registers, as they are, into
the products of dv and dk. Accumulators of scores start at -lse, see `products_begin_from`, if logits are only scaled.

**Five products a step.** Of scores = k q^T and dp = v dout^T, the second runs on during p = exp(scores - lse). With
ds = p * (dp - delta), the other three run together: dv += p dout, dk += ds q and dq = ds^T k.

**dq goes through shared memory.** Groups exchange ds there, and each multiplies ds of all N keys by half of the columns
of k. The copy engine adds dq to an array in float32, in the order in which programs get there.

M = F.PART queries of a step, N = KV.TILE keys of a program, D the head size, rounded up. Time runs to the right, step n
uses the stage n % STAGES, and ^ is the wait for a product:

    producer   wait free.q_dout, load q, lse -> ready.q, dout, delta -> ready.dout; so on, up to STAGES steps ahead

    a group    wait      wait                                            bar 8       arrive
               ready.q   ready.dout                                      |           free.q_dout
               |         |                                               |           |
    products   [------- scores ------^                    [----------- dv -----------^
                         [---------- dp ----------^                [------- dk ------^
                                                                         [--------- dq ---------^
    registers                         [ mask, p ]  [ ds ]                                        [ dq ]
    shared     read q    read dout                         [ ds -> ds[n % 2] ]                   -> dq[group] -> add

* ready.kv, 0 for k and 1 for v: groups wait for both once, before their first step.
* ready.q and ready.dout, by stage: all of q and lse has arrived, or of dout and delta.
* free.q_dout, by stage: both groups have read q, lse, dout and delta.
* bar 8: both groups have stored their rows of ds. Two buffers are enough: a group that passes it at step n + 1 knows
  that the other one has waited for dq of step n. So both may write to ds[n % 2] again.
* dq[group] is free once the copy engine has read the tile that it adds (`tma.store_wait`). dk and dv leave by it, too.

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

from .primitives import add_tile, exp2, late, load_tile, reinterpret, store_tile, together
from .tiles import (
    LOG2_E,
    ROWS,
    BlockListPointers,
    Buffers,
    Descriptors,
    Free,
    Ready,
    barriers,
    buffers_of,
    corner_of,
    factor,
    fetch,
    flat,
    item_of,
    logits,
    masked,
    span_of,
    words_of,
)


class Backward(NamedTuple):
    """Constants of the kernel's compilation, beside the bundles of `tiles.py`."""

    PART: int  # M, queries of a step; a block of the lists has one or more tiles of so many
    STAGES: int  # tiles of q and dout that are held or on their way
    ADD: bool  # whether dk and dv are added to what is there
    TIMES: int  # query heads that have the same splits, one after the other: these say those of the pass's first head


class Schedule(NamedTuple):
    """Pointers to the work of all programs."""

    work_tiles: Any  # which work tile each program has
    splits: Any  # those of the lists, if L.PIECES > 0


class WorkTile(NamedTuple):
    """The work of one program; query heads are numbered as the pass has them."""

    batch: Any
    kv_head: Any
    kv_block: Any
    first_head: Any
    end_head: Any
    first_entry: Any  # of a split: where it begins in the list of the first head, and ends in that of the last one
    end_entry: Any


@gluon.jit
def _query_heads(kv_head, A: gl.constexpr):
    """Query heads of a key head that are of the pass: FIRST_HEAD + i * HEAD_STEP for i from first to end."""
    if A.HEADS == A.KV_HEADS and A.HEAD_STEP == 1:
        return kv_head, kv_head + 1
    else:
        group: gl.constexpr = A.HEADS // A.KV_HEADS
        first = (kv_head * group - A.FIRST_HEAD + A.HEAD_STEP - 1) // A.HEAD_STEP
        return gl.maximum(first, 0), ((kv_head + 1) * group - A.FIRST_HEAD + A.HEAD_STEP - 1) // A.HEAD_STEP


@gluon.jit
def _load_work_tile(schedule, A: gl.constexpr, L: gl.constexpr, F: gl.constexpr):
    """The work tile of this program."""
    number = gl.load(schedule.work_tiles + gl.program_id(0))
    if L.PIECES == 0:
        batch, kv_head, kv_block = item_of(number, A.KV_HEADS, L)
        first_head, end_head = _query_heads(kv_head, A)
        return WorkTile(batch, kv_head, kv_block, first_head, end_head, 0, 0)
    else:
        split = schedule.splits + number % L.PIECES * 5
        head_offset = number // L.PIECES % F.TIMES
        first_head, end_head = gl.load(split + 1) + head_offset, gl.load(split + 2) + head_offset
        kv_head = (A.FIRST_HEAD + first_head * A.HEAD_STEP) // (A.HEADS // A.KV_HEADS)
        first_entry, end_entry = gl.load(split + 3), gl.load(split + 4)
        batch, kv_block = number // L.PIECES // F.TIMES, gl.load(split)
        return WorkTile(batch, kv_head, kv_block, first_head, end_head, first_entry, end_entry)


@gluon.jit
def _entries(spans, work_tile, pass_head, A: gl.constexpr, L: gl.constexpr):
    """Entries of a work tile in the list of a query head: (first entry, first masked one, end)."""
    head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
    first, first_masked, end = span_of(spans, work_tile.batch, head, work_tile.kv_block, L)
    if L.PIECES > 0:
        end = gl.where(pass_head + 1 == work_tile.end_head, first + work_tile.end_entry, end)
        first = gl.where(pass_head == work_tile.first_head, first + work_tile.first_entry, first)
        first_masked = gl.minimum(gl.maximum(first_masked, first), end)
    return first, first_masked, end


@gluon.jit
def columns_of(x, PART: gl.constexpr, SIZE: gl.constexpr):
    """All columns of a tile of registers, or the first half or the second one."""
    if x.shape[1] == SIZE:
        return x
    else:
        halves = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, SIZE]), (0, 2, 1)))
        return halves[PART]


def _layout_of_swapped(rows: int, columns: int) -> Any:
    """The layout of a float32 tile as `_swapped` has it, in which the copy engine finds the tile unswapped.

    The copy engine has rows in lines of 128 bytes, and chunk i of 16 bytes of row r at position i ^ (r % 8) of a line.
    Sixteen threads store at a time, two columns each: two chunks of each of four rows. The chunks of two of the rows
    would be at the same positions, in the same banks. Odd rows that store the second half of a line avoid that.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4 ^ 16], [2, 8], [4, 16]]
    bases += [[1 << i, 0] for i in range(3, rows.bit_length() - 1)]
    return gl.SharedLinearLayout(bases + [[0, 1 << i] for i in range(5, columns.bit_length() - 1)], [], 1024)


layout_of_swapped = gluon.constexpr_function(_layout_of_swapped)


@gluon.jit
def _swapped(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile whose odd rows have the halves of every 32 columns swapped."""
    low, high = gl.split(gl.permute(gl.reshape(x, [ROWS, COLUMNS // 32, 2, 16]), (0, 1, 3, 2)))
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, low.type.layout))
    odd = (gl.arange(0, ROWS, layout=LAYOUT) & 1) != 0
    odd = gl.expand_dims(gl.expand_dims(odd, 1), 2)
    halves = gl.join(gl.where(odd, high, low), gl.where(odd, low, high))
    return gl.reshape(gl.permute(halves, (0, 1, 3, 2)), [ROWS, COLUMNS])


@gluon.jit
def _producer(descs, buffers, ready, free, schedule, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
              L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Loads k and v, then q with lse and dout with delta of the queries that attend to them."""
    M: gl.constexpr = F.PART
    TILES: gl.constexpr = Q.TILE // M  # of a block of queries
    work_tile = _load_work_tile(schedule, A, L, F)
    batch, row = work_tile.batch, work_tile.kv_block * KV.TILE
    fetch(descs.k, batch, row, work_tile.kv_head, ready.kv.index(0), buffers.k.index(0), KV, A.D)
    fetch(descs.v, batch, row, work_tile.kv_head, ready.kv.index(1), buffers.v.index(0), KV, A.D)
    step = 0
    for pass_head in range(work_tile.first_head, work_tile.end_head):
        head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
        first, _, end = _entries(lists.spans, work_tile, pass_head, A, L)
        scalars_row = batch * A.OWN_HEADS + pass_head
        for i in range(first * TILES, end * TILES):
            q_block = gl.load(lists.entries + i // TILES)
            row = q_block * Q.TILE + i % TILES * M
            stage = step % F.STAGES
            mbarrier.wait(free.q_dout.index(stage), (step // F.STAGES & 1) ^ 1)
            mbarrier.expect(ready.q.index(stage), descs.q.block_type.nbytes + descs.lse.block_type.nbytes)
            corner = corner_of(batch, row, head, 0, Q, A.D)
            load_tile(descs.q, corner, ready.q.index(stage), buffers.q.index(stage))
            load_tile(descs.lse, [scalars_row, row], ready.q.index(stage), buffers.lse.index(stage))
            mbarrier.expect(ready.dout.index(stage), descs.dout.block_type.nbytes + descs.delta.block_type.nbytes)
            load_tile(descs.dout, corner, ready.dout.index(stage), buffers.dout.index(stage))
            load_tile(descs.delta, [scalars_row, row], ready.dout.index(stage), buffers.delta.index(stage))
            step += 1


@gluon.jit
def _apply_mask(scores, words, entry, q_tile_in_block, batch, kv_segment, lists, A: gl.constexpr, Q: gl.constexpr,
                L: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Scores [ROWS, M] of an entry that is masked: -inf where the pair may not attend."""
    M: gl.constexpr = F.PART
    scores = masked(scores, words, M, LAYOUT, A)
    column = q_tile_in_block * M + gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUT))  # of the block of queries
    if L.CHOSEN > 0:
        chosen = (gl.load(lists.chosen_by + entry) >> (column // L.CHOSEN)) & 1
        scores = gl.where((chosen != 0)[None, :], scores, float("-inf"))
    if A.SEGMENTED:
        q_segment = gl.load(lists.q_segments + batch * Q.ROWS + gl.load(lists.entries + entry) * Q.TILE + column)
        scores = gl.where(kv_segment[:, None] == q_segment[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def weights_of(scores, neg_lse, A: gl.constexpr):
    """p = exp(logit - lse), at most 1, see `lowered`; ``scores`` of `logits`, ``neg_lse`` of `products_begin_from`."""
    logs = scores + neg_lse if factor(A.SCALE, A.CAP) == 1.0 else scores * factor(A.SCALE, A.CAP)
    return exp2(gl.minimum(logs, 0.0))


@gluon.jit
def score_gradients(scores, p, dp, delta, A: gl.constexpr):
    """ds = p * (dp - delta), times the scale; ``scores`` as of `logits`, ``delta`` times -scale."""
    ds = p * (dp * A.SCALE + delta)
    if A.CAP > 0:
        squashed = gl.maximum(scores, -A.CAP * LOG2_E) / (A.CAP * LOG2_E)
        ds = ds * (1 - squashed * squashed)
    return ds


@gluon.jit
def _backward_steps(first, end, step, dk, dv, GROUP: gl.constexpr, descs, buffers, ready, free, lists, batch,
                    pass_head, kv_segment, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, L: gl.constexpr,
                    F: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Adds entries first .. end - 1 of a list to dk and dv [ROWS, D] and to dq; returns the next step, dk and dv."""
    M: gl.constexpr = F.PART
    D: gl.constexpr = A.D
    TILES: gl.constexpr = Q.TILE // M  # of a block of queries
    WORDS: gl.constexpr = Q.TILE // 32
    HALF: gl.constexpr = A.D // 2
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D // 2, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = descs.q.dtype
    for i in range(first * TILES, end * TILES):
        entry = i // TILES
        q_tile_in_block = i % TILES
        q_block = gl.load(lists.entries + entry)
        stage = step % F.STAGES
        zero = step >> 30  # 0, but the compiler must not keep, and spill, what it could compute from a constant
        k_tile = flat(buffers.k.index(zero), KV.TILE, D)  # [N, D]
        v_tile = flat(buffers.v.index(zero), KV.TILE, D)  # [N, D]
        q_tile = flat(buffers.q.index(stage), M, D)  # [M, D]
        dout_tile = flat(buffers.dout.index(stage), M, D)  # [M, D]
        words = 0
        if MASKED:  # loaded first, as this takes long
            mask_row = (gl.load(lists.mask_tiles + entry) + 1) * KV.TILE + GROUP * ROWS
            mask_tile = lists.mask_bits + mask_row * WORDS + q_tile_in_block * (M // 32)
            words = words_of(mask_tile, M, SCORES, WORDS)
        mbarrier.wait(ready.q.index(stage), step // F.STAGES & 1)
        neg_lse = buffers.lse.index(stage).load(SCORES)  # [1, M]
        scores = gl.zeros([ROWS, M], gl.float32, SCORES)  # [ROWS, M]
        if factor(A.SCALE, A.CAP) != 1.0:
            scores, _ = gl.broadcast(neg_lse, scores)
        scores = warpgroup_mma(k_tile.slice(GROUP * ROWS, ROWS, 0), q_tile.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(ready.dout.index(stage), step // F.STAGES & 1)
        dp = gl.zeros([ROWS, M], gl.float32, SCORES)  # [ROWS, M]
        dp = warpgroup_mma(v_tile.slice(GROUP * ROWS, ROWS, 0), dout_tile.permute((1, 0)), dp, use_acc=False,
                           is_async=True)  # fmt: skip
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = logits(scores, A)
        if MASKED:
            scores = _apply_mask(scores, words, entry, q_tile_in_block, batch, kv_segment, lists, A, Q, L, F, SCORES)
        p = weights_of(scores, neg_lse, A)  # [ROWS, M]
        # It is over, but a branch: ptxas would move the next wait before the exponentials.
        mbarrier.wait(ready.dout.index(stage), step // F.STAGES & 1)
        dp = warpgroup_mma_wait(0, deps=[dp])
        delta = buffers.delta.index(stage).load(SCORES)  # [1, M]
        ds = score_gradients(scores, p, dp, delta, A).to(dtype)  # [ROWS, M]
        same_step = late(step)
        stage = same_step % F.STAGES
        q_tile = flat(buffers.q.index(stage), M, D)
        dout_tile = flat(buffers.dout.index(stage), M, D)
        k_tile = flat(buffers.k.index(same_step >> 30), KV.TILE, D)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), dout_tile, dv, is_async=True)
        ds_tile = buffers.ds.index(same_step % 2)  # [N, M], of both groups
        ds_tile.slice(GROUP * ROWS, ROWS, 0).store(ds)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q_tile, dk, is_async=True)
        together(8, 256)
        dq = gl.zeros([M, HALF], gl.float32, DQ)  # [M, D / 2]
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile.slice(GROUP * HALF, HALF, 1), dq, use_acc=False,
                           is_async=True)  # fmt: skip
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
        mbarrier.arrive(free.q_dout.index(stage), count=1)
        dq = warpgroup_mma_wait(0, deps=[dq])
        tma.store_wait(0)
        dq_tile = buffers.dq.index(GROUP)
        reinterpret(dq_tile, gl.float32, [M, HALF], layout_of_swapped(M, HALF)).store(_swapped(dq, M, HALF))
        fence_async_shared()
        row = q_block * Q.TILE + q_tile_in_block * M
        add_tile(descs.dq, corner_of(batch, row, pass_head, GROUP * HALF, Q, D), dq_tile)
        step += 1
    return step, dk, dv


@gluon.jit
def _store_gradient(x, desc, buffer, batch, row, kv_head, A: gl.constexpr, DKV: gl.constexpr, F: gl.constexpr):
    """Has the copy engine store dk or dv [ROWS, D], or add it, by as many columns as a box of ``desc`` has."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    tile = reinterpret(buffer, desc.dtype, desc.block_shape, desc.layout)
    for i in gl.static_range(A.D // WIDTH):
        columns = columns_of(x, i, WIDTH)
        tma.store_wait(0)
        flat(tile, ROWS, WIDTH).store(columns.to(desc.dtype))
        fence_async_shared()
        corner = corner_of(batch, row, kv_head, i * WIDTH, DKV, A.D)
        if F.ADD:
            add_tile(desc, corner, tile)
        else:
            store_tile(desc, corner, tile)


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, buffers, ready, free, schedule, lists, A: gl.constexpr, Q: gl.constexpr,
              KV: gl.constexpr, DKV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes dk and dv of half of the keys, and half of the columns of dq."""
    D: gl.constexpr = A.D
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.PART, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    work_tile = _load_work_tile(schedule, A, L, F)
    batch = work_tile.batch
    row = work_tile.kv_block * KV.TILE + GROUP * ROWS
    kv_segment = 0
    if A.SEGMENTED:
        first_key = lists.kv_segments + batch * KV.ROWS + row
        kv_segment = gl.load(first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)))  # [ROWS]
    dk = gl.zeros([ROWS, D], gl.float32, SUMS)  # [ROWS, D]
    dv = gl.zeros([ROWS, D], gl.float32, SUMS)  # [ROWS, D]
    step = 0
    mbarrier.wait(ready.kv.index(0), 0)
    mbarrier.wait(ready.kv.index(1), 0)
    for pass_head in range(work_tile.first_head, work_tile.end_head):
        first, first_masked, end = _entries(lists.spans, work_tile, pass_head, A, L)
        step, dk, dv = _backward_steps(first, first_masked, step, dk, dv, GROUP, descs, buffers, ready, free, lists,
                                       batch, pass_head, kv_segment, A, Q, KV, L, F, False, SCORES, SUMS)  # fmt: skip
        _, first_masked, end = _entries(lists.spans, work_tile, late(pass_head), A, L)
        step, dk, dv = _backward_steps(first_masked, end, step, dk, dv, GROUP, descs, buffers, ready, free, lists,
                                       batch, pass_head, kv_segment, A, Q, KV, L, F, True, SCORES, SUMS)  # fmt: skip
    _store_gradient(dk, descs.dk, buffers.dq.index(GROUP), batch, row, work_tile.kv_head, A, DKV, F)
    _store_gradient(dv, descs.dv, buffers.dq.index(GROUP), batch, row, work_tile.kv_head, A, DKV, F)
    tma.store_wait(0)


@gluon.jit
def backward_kernel(
    q,  # descriptors: [B, *axes of Q, HEADS, H], a box has M = PART rows and D columns
    dout,  # [B, *axes of Q, HEADS, HV], likewise
    k,  # [B, *axes of KV, KV_HEADS, H], a box has N = KV.TILE rows
    v,  # [B, *axes of KV, KV_HEADS, HV]
    lse,  # float32 [B * OWN_HEADS, Q.ROWS] by row, a box has M of a row; see `products_begin_from`
    delta,  # float32 [B * OWN_HEADS, Q.ROWS] by row: -SCALE * delta
    work_tiles,  # int32 [programs]: the number of the work tile of each program
    spans,  # this and all up to ``mask_bits``: as in `forward_kernel`, by blocks of keys
    entries,
    mask_tiles,
    chosen_by,
    mask_bits,  # int32 [1 + tiles, N, Q.TILE / 32]
    q_segments,
    kv_segments,
    splits,  # int32 [PIECES, 5], as `schedule.cut_if_it_pays` makes them; any array if there are none
    earlier_dq,  # dq, dk and dv of earlier passes, to which results are added in place; any array where there are none
    earlier_dk,
    earlier_dv,
    dq,  # float32 [B, *axes of Q, OWN_HEADS, H], a box has M rows and half of D; added to
    dk,  # [B, *axes of DKV, KV_HEADS, H], a box has half of N rows, and of D if it is float32; added to if ADD
    dv,  # [B, *axes of DKV, KV_HEADS, HV], likewise
    A: gl.constexpr,
    Q: gl.constexpr,
    KV: gl.constexpr,
    DKV: gl.constexpr,  # of dk and dv: KV, or by row
    L: gl.constexpr,
    F: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that computes, and of one that fetches
    FETCHING: gl.constexpr,
):
    """Computes dk and dv of this program's work tile, and adds to dq."""
    buffers = Buffers(
        q=buffers_of(q, F.STAGES),  # [STAGES, M, D]
        dout=buffers_of(dout, F.STAGES),  # [STAGES, M, D]
        lse=buffers_of(lse, F.STAGES),  # float32 [STAGES, 1, M]
        delta=buffers_of(delta, F.STAGES),  # float32 [STAGES, 1, M]
        k=buffers_of(k, 1),  # [1, N, D]
        v=buffers_of(v, 1),  # [1, N, D]
        dq=buffers_of(dq, 2),  # float32 [2, M, D / 2], by group; at last dk and dv
        ds=gl.allocate_shared_memory(q.dtype, [2, KV.TILE, F.PART], gl.NVMMASharedLayout(128, 16, 2)),  # [2, N, M]
    )
    q_ready, dout_ready = barriers(F.STAGES, 1), barriers(F.STAGES, 1)
    free = Free(q_dout=barriers(F.STAGES, 2))
    ready = Ready(q=q_ready, dout=dout_ready, kv=barriers(2, 1))
    fence_async_shared()
    descs = Descriptors(q=q, k=k, v=v, dout=dout, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv)
    lists = BlockListPointers(spans, entries, mask_tiles, chosen_by, mask_bits, q_segments, kv_segments)
    schedule = Schedule(work_tiles, splits)
    gl.warp_specialize(
        [
            (_consumer, (0, descs, buffers, ready, free, schedule, lists, A, Q, KV, DKV, L, F)),
            (_consumer, (1, descs, buffers, ready, free, schedule, lists, A, Q, KV, DKV, L, F)),
            (_producer, (descs, buffers, ready, free, schedule, lists, A, Q, KV, L, F)),
        ],
        [4, 1],
        [REGISTERS, FETCHING],
    )
