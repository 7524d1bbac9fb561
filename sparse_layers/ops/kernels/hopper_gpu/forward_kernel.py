"""The Hopper forward kernel: block-sparse attention with an online softmax, written in Gluon.

**Persistent programs.** One program runs on each multiprocessor and works through a queue of work tiles: a query head
and a block of 128 queries each.
**Warp specialization.** One warp, the producer, loads tiles of q, k and v with TMA. Two groups of
four warps compute 64 queries each. Where 64 queries select blocks together, a work tile has these, a program has one
group, and two programs run on each multiprocessor.
**Lists, not patterns.** The producer walks the block list of a work tile. Full blocks come first, so that the loop over
them evaluates no mask.
**Two products in flight.** The tensor cores multiply the scores of one step and p @ v of the step before, while the
group computes the softmax in between.
**A stage of the ring holds the keys of a step and the values of the step before.** Both arrive at one barrier and leave
at two, since the keys are done earlier.

M is Q.BLOCK, the queries of a work tile, N is F.N, the keys of a step, D the head size, rounded up. A work tile of
three steps, whose stages follow each other in the ring; S, P, O are `scores`, `p` and `acc`::

    stage          0                1                     2                     3
    producer       K0               K1 V0                 K2 V1                    V2
      waits for    free.k free.v    free.k free.v         free.k free.v         free.k free.v
    group          S0 = q K0'       S1 = q K1'            S2 = q K2'            O += P2 V2
      tensor cores                  O += P0 V0            O += P1 V1
      waits for    ready.kv[0]      ready.kv[1]           ready.kv[2]           ready.kv[3]
      softmax      P0 of S0         P1 of S1, O *= alpha  P2 of S2, O *= alpha  O / l_i, lse
      arrives at   free.k free.v    free.k, then free.v   free.k, then free.v   free.k free.v

* ``ready.q``, ``ready.kv``, ``ready.earlier_out``: TMA has written the tile.
* ``free.q``, ``free.k``, ``free.v``: both groups have read the tile, so that the next one may overwrite it. ``free.k``
  protects the keys until the scores are done, ``free.v`` the values until p @ v is done.
* `WorkQueue` carries the work tile from the producer to the groups, one ahead.

Rules that ptxas does not state, each learnt from a wrong result or a slow program; `benchmarks/gluon_resources.py`
looks for what breaks them.

* Between a product whose left side is in registers and the wait for it there is no branch (waiting for a barrier is
  one), and no end of a loop: the registers would be used for something else.
* An accumulator that is in flight around a loop must be waited for with all others, or ptxas serializes all products.
* p goes around the loop packed, and is packed after the wait.
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

from .biases import adds_bias, allocate_key_offsets, load_bias, needs_key_offsets, scores_before_products
from .primitives import exp2, load_tile, pack, prevent_sinking, reinterpret, store_tile, unpack
from .tiles import (
    GROUP_ROWS,
    LOG2_E,
    Buffers,
    Descriptors,
    Free,
    HopperBlockLists,
    Ready,
    RowPointers,
    allocate_barriers,
    allocate_buffers,
    apply_ids,
    apply_mask_bits,
    as_matrix,
    expect_tile,
    first_key_row,
    load_ids,
    load_mask_words,
    load_span,
    mask_tile_index,
    multiply_transposed,
    scale_log2,
    select_columns,
    tile_coordinates,
    to_logits,
    token_of,
    unravel_work_tile,
)

LN_2 = gl.constexpr(0.6931471805599453)
# Integers of a work tile in the queue: its number, first step, first partial step, the end of its steps, and the
# mask tile of its first step. `_consumer` reads them by these indices.
QUEUE_INTS = gl.constexpr(5)
WORK_TILE, FIRST, FIRST_PARTIAL, END, MASK_TILE = (gl.constexpr(i) for i in range(5))


class ForwardConstants(NamedTuple):
    """Compile-time constants of the kernel, beside the bundles of `tiles.py`."""

    N: int  # keys of a step; a block of the lists has one or more steps
    Q_STAGES: int  # of the ring of q tiles
    KV_STAGES: int  # of the ring of k and v tiles
    OUT_REPLACES_Q: bool  # True if out leaves through the only tile of q; results of an earlier pass would overwrite it
    HAS_SINKS: bool  # True if there are sinks
    HAS_EARLIER: bool  # True if there are results of an earlier pass


class WorkQueue(NamedTuple):
    """Two work tiles in shared memory, which the producer writes and the groups read."""

    slots: Any  # int32 [2 * QUEUE_INTS, 1]; a field called values would hide one of Triton's tuples
    ready: Any  # [2]
    free: Any  # [2]


# --- the queue of work tiles -----------------------------------------------------------------------------------------


@gluon.jit
def _allocate_queue(GROUPS: gl.constexpr):
    """Allocates the queue and its barriers."""
    slots = gl.allocate_shared_memory(gl.int32, [2 * QUEUE_INTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return WorkQueue(slots, allocate_barriers(2, 1), allocate_barriers(2, GROUPS))


@gluon.jit
def _load_work_tile(schedule, iteration):
    """Loads the number of the work tile of this program in a round, -1 after its last one."""
    return gl.load(schedule + iteration * gl.num_programs(0) + gl.program_id(0))


@gluon.jit
def _write_queue(queue, iteration, values):
    """Writes a work tile to the queue; its number is -1 after the last one."""
    mbarrier.wait(queue.free.index(iteration % 2), (iteration // 2 & 1) ^ 1)
    for i in gl.static_range(QUEUE_INTS):
        slot = queue.slots.index(iteration % 2 * QUEUE_INTS + i)
        slot.store(gl.full([1], values[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(queue.ready.index(iteration % 2), count=1)


@gluon.jit
def _read_queue(queue, iteration, INDEX: gl.constexpr):
    """Reads one integer of a work tile, which is ready."""
    slot = queue.slots.index(iteration % 2 * QUEUE_INTS + INDEX)
    return gl.sum(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _next_work_tile(queue, iteration, lists, rows, row_in_tile, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
                    L: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Reads the next work tile, and starts the loads that its first step needs.

    Returns (number or -1, (first step, first partial step, end), mask words of the first step, initial m_i [64]). The
    initial m_i is the sink or the lse of an earlier pass, to base 2.
    """
    mbarrier.wait(queue.ready.index(iteration % 2), iteration // 2 & 1)
    work_tile = _read_queue(queue, iteration, WORK_TILE)
    span = (
        _read_queue(queue, iteration, FIRST),
        _read_queue(queue, iteration, FIRST_PARTIAL),
        _read_queue(queue, iteration, END),
    )
    mask_words = _load_mask_words(lists, _read_queue(queue, iteration, MASK_TILE), 0, row_in_tile, A, Q, KV, F, LAYOUT)
    mbarrier.arrive(queue.free.index(iteration % 2), count=1)
    m_i = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    batch, pass_head, q_block = unravel_work_tile(gl.maximum(work_tile, 0), A.PASS_HEADS, L)
    if F.HAS_SINKS:
        m_i = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
        m_i += gl.load(rows.sinks + A.FIRST_HEAD + pass_head * A.HEAD_STEP) * LOG2_E
    if F.HAS_EARLIER:
        row = q_block * Q.BLOCK + row_in_tile + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
        m_i = gl.load(rows.earlier_lse + (batch * A.PASS_HEADS + pass_head) * Q.ROWS + row) * LOG2_E
    return work_tile, span, mask_words, m_i


# --- the producer ----------------------------------------------------------------------------------------------------


@gluon.jit
def _load_kv(desc, desc2, batch, row, kv_head, ready, buffer, KV: gl.constexpr, KV2: gl.constexpr, SIZE: gl.constexpr):
    """Starts to load k or v of a step. Rows of a second pass are numbered after those of the first."""
    if KV2.ROWS == 0 or row < KV.ROWS:
        load_tile(desc, tile_coordinates(batch, row, kv_head, 0, KV, SIZE), ready, buffer)
    else:
        buffer2 = reinterpret(buffer, desc2.dtype, desc2.block_shape, desc2.layout)
        load_tile(desc2, tile_coordinates(batch, row - KV.ROWS, kv_head, 0, KV2, SIZE), ready, buffer2)


@gluon.jit
def _load_q(descs, buffers, ready, free, iteration, batch, q_block, head, A: gl.constexpr, Q: gl.constexpr,
            F: gl.constexpr):  # fmt: skip
    """Starts to load q of a work tile, one tile for each group."""
    for group in gl.static_range(Q.BLOCK // GROUP_ROWS):
        q_stage = iteration % F.Q_STAGES * (Q.BLOCK // GROUP_ROWS) + group
        mbarrier.wait(free.q.index(q_stage), (iteration // F.Q_STAGES & 1) ^ 1)
        q_row = q_block * Q.BLOCK + group * GROUP_ROWS
        expect_tile(descs.q, batch, q_row, head, ready.q.index(q_stage), buffers.q.index(q_stage), Q, A.D)


@gluon.jit
def _producer(descs, buffers, ready, free, queue, schedule, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
              KV2: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Loads q, k and v in the order in which the groups need them."""
    STEPS_PER_BLOCK: gl.constexpr = KV.BLOCK // F.N
    pipeline_step = 0  # steps of all work tiles
    iteration = 0
    work_tile = _load_work_tile(schedule, iteration)
    while work_tile >= 0:
        next_work_tile = _load_work_tile(schedule, iteration + 1)
        batch, pass_head, q_block = unravel_work_tile(work_tile, A.PASS_HEADS, L)
        head = A.FIRST_HEAD + pass_head * A.HEAD_STEP
        kv_head = head // (A.HEADS // A.KV_HEADS)
        first, first_partial, end = load_span(lists.spans, batch, head, q_block, L)
        if not F.OUT_REPLACES_Q:
            _load_q(descs, buffers, ready, free, iteration, batch, q_block, head, A, Q, F)
        mask_tile = gl.load(lists.mask_tiles + first, mask=end > first, other=-1)
        # Entries of the list -> steps.
        first, first_partial, end = first * STEPS_PER_BLOCK, first_partial * STEPS_PER_BLOCK, end * STEPS_PER_BLOCK
        _write_queue(queue, iteration, (work_tile, first, first_partial, end, mask_tile))
        if F.OUT_REPLACES_Q:  # groups read the queue before they free the tile
            _load_q(descs, buffers, ready, free, iteration, batch, q_block, head, A, Q, F)
        iteration += 1
        # A group needs values a step later than keys: with the keys of a step come the values of the step before.
        v_row = 0
        for step in range(first, end + gl.where(end > first, 1, 0)):
            stage = pipeline_step % F.KV_STAGES
            kv_ready = ready.kv.index(stage)
            k_row = v_row
            if step < end:
                k_row = gl.load(lists.entries + step // STEPS_PER_BLOCK) * KV.BLOCK + step % STEPS_PER_BLOCK * F.N
            mbarrier.wait(free.k.index(stage), (pipeline_step // F.KV_STAGES & 1) ^ 1)
            if step == first:  # it carries no values, and groups must not arrive at free.v before this phase is over
                mbarrier.wait(free.v.index(stage), (pipeline_step // F.KV_STAGES & 1) ^ 1)
            k_and_v = (step > first) & (step < end)
            if A.D == A.DV:
                mbarrier.expect(kv_ready, 2 * descs.k.block_type.nbytes, pred=k_and_v)
                mbarrier.expect(kv_ready, descs.k.block_type.nbytes, pred=k_and_v == 0)
            else:
                mbarrier.expect(kv_ready, descs.k.block_type.nbytes + descs.v.block_type.nbytes, pred=k_and_v)
                mbarrier.expect(kv_ready, descs.k.block_type.nbytes, pred=step == first)
                mbarrier.expect(kv_ready, descs.v.block_type.nbytes, pred=step == end)
            if step < end:
                _load_kv(descs.k, descs.k2, batch, k_row, kv_head, kv_ready, buffers.k.index(stage), KV, KV2, A.D)
            if step > first:
                mbarrier.wait(free.v.index(stage), (pipeline_step // F.KV_STAGES & 1) ^ 1)
                _load_kv(descs.v, descs.v2, batch, v_row, kv_head, kv_ready, buffers.v.index(stage), KV, KV2, A.DV)
            v_row = k_row
            pipeline_step += 1
        work_tile = next_work_tile
    _write_queue(queue, iteration, (-1, 0, 0, 0, -1))


# --- the groups that compute -----------------------------------------------------------------------------------------


@gluon.jit
def _load_mask_words(lists, mask_tile, step_in_block, row_in_tile, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
                     F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Loads the mask bits of a step, 32 keys a word."""
    WORDS: gl.constexpr = KV.BLOCK // 32
    index, _ = mask_tile_index(mask_tile, A)
    tile = lists.mask_bits + (index * Q.BLOCK + row_in_tile) * WORDS + step_in_block * (F.N // 32)
    return load_mask_words(tile, F.N, LAYOUT, WORDS)


@gluon.jit
def _compare_ids(mask_words, mask_tile, step, batch, q_ids, lists, A: gl.constexpr, KV: gl.constexpr,
                 F: gl.constexpr):  # fmt: skip
    """Clears the bits of pairs of a step that ids exclude, if they exclude any; before its products, as a branch."""
    _, compare_ids = mask_tile_index(mask_tile, A)
    if compare_ids:
        k_row = first_key_row(lists, step, KV, F.N)
        mask_words = apply_ids(mask_words, q_ids, lists.kv_ids, batch, k_row, KV, A, True)
    return mask_words


@gluon.jit
def _apply_mask(scores, mask_words, row_in_tile, step, lists, A: gl.constexpr, KV: gl.constexpr, L: gl.constexpr,
                F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Sets scores [64, N] of a partial step to -inf where mask words or the selection exclude the pair."""
    STEPS_PER_BLOCK: gl.constexpr = KV.BLOCK // F.N
    if L.GRANULARITY > 0:  # bit i is set if queries GRANULARITY * i and following of the block selected it
        selected_by = gl.load(lists.active_query_groups + step // STEPS_PER_BLOCK)
        row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, mask_words.type.layout)) + row_in_tile
        mask_words = gl.where(((selected_by >> (row // L.GRANULARITY)) & 1)[:, None] != 0, mask_words, 0)
    return apply_mask_bits(scores, mask_words, F.N, LAYOUT, A)


@gluon.jit
def _softmax(scores, m_i, l_i, SCALE_LOG2: gl.constexpr, MAY_BE_EMPTY: gl.constexpr, O_ROWS: gl.constexpr):
    """One step of the online softmax, to base 2. With MAY_BE_EMPTY, all scores of a row may be -inf.

    Returns (p [64, N], new m_i, new l_i, alpha): the weights, the largest logit and the sum of weights of each row,
    and the factor for earlier results, with the layout of the accumulator's rows.
    """
    m_new = gl.maximum(m_i, gl.max(scores, 1) * SCALE_LOG2)
    shift = m_new
    if MAY_BE_EMPTY:
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
    p = exp2(scores * SCALE_LOG2 - shift[:, None])
    alpha = exp2(m_i - shift)
    l_i = l_i * alpha + gl.sum(p, 1)
    return p, m_new, l_i, gl.convert_layout(alpha, O_ROWS)


@gluon.jit
def _attend_steps(first, end, pipeline_step, state, q_tile, buffers, ready, free, lists, row_in_tile, batch, q_ids,
                  bias, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr,
                  MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):  # fmt: skip
    """Computes steps first .. end - 1. On entry and on return p @ v of the last step is still to be added.

    ``state`` is (p as `pack` has it, m_i, l_i, acc). ``pipeline_step`` counts the steps of all work tiles.
    """
    packed_p, m_i, l_i, acc = state
    N: gl.constexpr = F.N
    STEPS_PER_BLOCK: gl.constexpr = KV.BLOCK // F.N
    MAY_BE_EMPTY: gl.constexpr = MASKED or A.TABLE_LENGTH > 0  # its entries may be -inf
    LHS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    for step in range(first, end):
        stage = pipeline_step % F.KV_STAGES
        mask_words = 0
        if MASKED:  # loaded first, for this takes long
            mask_tile = gl.load(lists.mask_tiles + step // STEPS_PER_BLOCK)
            step_in_block = step % STEPS_PER_BLOCK
            mask_words = _load_mask_words(lists, mask_tile, step_in_block, row_in_tile, A, Q, KV, F, S_LAYOUT)
            if A.NUM_IDS > 0:
                mask_words = _compare_ids(mask_words, mask_tile, step, batch, q_ids, lists, A, KV, F)
        scores = scores_before_products(step, bias, buffers.key_offsets, lists, A, Q, KV, N, S_LAYOUT)  # [64, N]
        mbarrier.wait(ready.kv.index(stage), pipeline_step // F.KV_STAGES & 1)
        k_tile = as_matrix(buffers.k.index(stage), N, A.D)  # [N, D]
        scores = multiply_transposed(q_tile, k_tile, scores, adds_bias(A), A.DEPTH)
        p = unpack(packed_p, q_tile.dtype, GROUP_ROWS, N, LHS_LAYOUT)
        acc = warpgroup_mma(p, as_matrix(buffers.v.index(stage), N, A.DV), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(free.k.index(stage), count=1)
        scores = to_logits(scores, A)
        if MASKED:
            scores = _apply_mask(scores, mask_words, row_in_tile, step, lists, A, KV, L, F, S_LAYOUT)
        new_p, m_i, l_i, alpha = _softmax(scores, m_i, l_i, scale_log2(A.SCALE, A.CAP), MAY_BE_EMPTY, O_ROWS)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.v.index(stage), count=1)
        packed_p = pack(new_p, q_tile.dtype, GROUP_ROWS, N)
        acc = acc * alpha[:, None]
        pipeline_step += 1
    return pipeline_step, (packed_p, m_i, l_i, acc)


@gluon.jit
def _scale_rows(x, factors):
    """Multiplies the rows of x [64, columns] by factors [64]."""
    return x * gl.convert_layout(factors, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _second_half_tile(GROUP: gl.constexpr, descs, buffers):
    """Returns shared memory for the second half of the columns of an earlier out: that of q, whose scores are done."""
    desc = descs.earlier_out
    return reinterpret(buffers.q.index(GROUP), desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def _reuse_q_tile(GROUP: gl.constexpr, descs, buffers, ready, free, batch, pass_head, q_block, A: gl.constexpr,
                  Q: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Frees the only tile of q after the last scores, or first loads the second half of an earlier out there."""
    WIDTH: gl.constexpr = descs.out.block_shape[-1]
    if F.HAS_EARLIER and WIDTH < A.DV:
        barrier = ready.earlier_out.index(2 + GROUP)
        mbarrier.expect(barrier, descs.earlier_out.block_type.nbytes)
        corner = tile_coordinates(batch, q_block * Q.BLOCK + GROUP * GROUP_ROWS, pass_head, WIDTH, Q, A.DV)
        load_tile(descs.earlier_out, corner, barrier, _second_half_tile(GROUP, descs, buffers))
    else:
        mbarrier.arrive(free.q.index(GROUP), count=1)


@gluon.jit
def _add_earlier_out(acc, tile, weight, IS_HALF: gl.constexpr):
    """Adds an earlier out in shared memory, times its weight, to acc: out, or half of its columns."""
    earlier_out = as_matrix(tile, GROUP_ROWS, acc.shape[1]).load(acc.type.layout).to(gl.float32)
    acc += _scale_rows(earlier_out, weight)
    return prevent_sinking(acc) if IS_HALF else acc


@gluon.jit
def _add_earlier_outs(GROUP: gl.constexpr, acc, m_i, initial_m_i, descs, buffers, ready, free, phase, A: gl.constexpr,
                      F: gl.constexpr):  # fmt: skip
    """Adds the out of an earlier pass, if there is one: returns (acc,), or its halves if out is stored by halves."""
    WIDTH: gl.constexpr = descs.out.block_shape[-1]
    accs = (acc,)
    if WIDTH < A.DV:
        accs = select_columns(acc, 0, WIDTH), select_columns(acc, 1, WIDTH)
    if F.HAS_EARLIER:
        mbarrier.wait(ready.earlier_out.index(GROUP), phase)
        weight = exp2(initial_m_i - gl.where(m_i == float("-inf"), 0.0, m_i))
        first_acc = _add_earlier_out(accs[0], buffers.out.index(GROUP), weight, WIDTH < A.DV)
        if WIDTH == A.DV:
            accs = (first_acc,)
        else:
            mbarrier.wait(ready.earlier_out.index(2 + GROUP), phase)
            accs = first_acc, _add_earlier_out(accs[1], _second_half_tile(GROUP, descs, buffers), weight, True)
            mbarrier.arrive(free.q.index(GROUP), count=1)
    return accs


@gluon.jit
def _store_out(GROUP: gl.constexpr, accs, factors, descs, out_tile, batch, pass_head, q_block, A: gl.constexpr,
               Q: gl.constexpr):  # fmt: skip
    """Stores accs, times a factor of each row: out, or its halves one after the other."""
    WIDTH: gl.constexpr = descs.out.block_shape[-1]
    for i in gl.static_range(A.DV // WIDTH):
        out = _scale_rows(accs[i], factors)
        tma.store_wait(0)
        as_matrix(out_tile, GROUP_ROWS, WIDTH).store(out.to(descs.out.dtype))
        fence_async_shared()
        corner = tile_coordinates(batch, q_block * Q.BLOCK + GROUP * GROUP_ROWS, pass_head, i * WIDTH, Q, A.DV)
        store_tile(descs.out, corner, out_tile)


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, buffers, ready, free, queue, lists, rows, A: gl.constexpr,
              Q: gl.constexpr, KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes out and lse of 64 queries of each work tile: one of the consumer warpgroups, which free q, k and v."""
    N: gl.constexpr = F.N
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.DV, 16])
    LHS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    DV: gl.constexpr = A.DV
    dtype: gl.constexpr = descs.q.dtype
    row_in_tile = GROUP * GROUP_ROWS
    out_tile = buffers.out.index(GROUP)
    pipeline_step = 0
    iteration = 0
    next_work_tile = _next_work_tile(queue, iteration, lists, rows, row_in_tile, A, Q, KV, L, F, S_LAYOUT)
    work_tile, span, mask_words, initial_m_i = next_work_tile
    while work_tile >= 0:
        first, first_partial, end = span
        batch, pass_head, q_block = unravel_work_tile(work_tile, A.PASS_HEADS, L)
        first_row = q_block * Q.BLOCK + row_in_tile
        row = first_row + gl.arange(0, GROUP_ROWS, layout=S_ROWS)
        lse_index = (batch * A.PASS_HEADS + pass_head) * Q.ROWS + row
        q_ids = load_ids(lists.q_ids, batch, row, Q, A)
        bias = load_bias(rows, pass_head, first_row, token_of(row, Q), A)
        m_i = initial_m_i  # [64]: the largest logit so far, to base 2
        l_i = gl.where(m_i == float("-inf"), 0.0, 1.0)  # [64]: the sum of 2 ** (logit - m_i)
        acc = gl.zeros([GROUP_ROWS, DV], gl.float32, O_LAYOUT)  # [64, DV]: the sum of p @ v

        q_stage = iteration % F.Q_STAGES * (Q.BLOCK // GROUP_ROWS) + GROUP
        q_tile = as_matrix(buffers.q.index(q_stage), GROUP_ROWS, A.D)  # [64, D]
        if F.HAS_EARLIER:  # it is needed last, and comes while the work tile is computed
            tma.store_wait(0)  # out_tile still holds the previous results
            expect_tile(descs.earlier_out, batch, q_block * Q.BLOCK + row_in_tile, pass_head,
                        ready.earlier_out.index(GROUP), out_tile, Q, DV)  # fmt: skip
        mbarrier.wait(ready.q.index(q_stage), iteration // F.Q_STAGES & 1)
        if end > first:
            stage = pipeline_step % F.KV_STAGES
            if A.NUM_IDS > 0 and first_partial == first:
                mask_tile = gl.load(lists.mask_tiles + first // (KV.BLOCK // N))
                mask_words = _compare_ids(mask_words, mask_tile, first, batch, q_ids, lists, A, KV, F)
            scores = scores_before_products(first, bias, buffers.key_offsets, lists, A, Q, KV, N, S_LAYOUT)  # [64, N]
            mbarrier.wait(ready.kv.index(stage), pipeline_step // F.KV_STAGES & 1)
            k_tile = as_matrix(buffers.k.index(stage), N, A.D)  # [N, D]
            scores = multiply_transposed(q_tile, k_tile, scores, adds_bias(A), A.DEPTH)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(free.k.index(stage), count=1)
            mbarrier.arrive(free.v.index(stage), count=1)
            scores = to_logits(scores, A)
            if first_partial == first:
                scores = _apply_mask(scores, mask_words, row_in_tile, first, lists, A, KV, L, F, S_LAYOUT)
            p, m_i, l_i, alpha = _softmax(scores, m_i, l_i, scale_log2(A.SCALE, A.CAP), True, O_ROWS)
            acc = acc * alpha[:, None]
            state = pack(p, dtype, GROUP_ROWS, N), m_i, l_i, acc
            pipeline_step += 1
            partial_from = gl.maximum(first_partial, first + 1)
            pipeline_step, state = _attend_steps(first + 1, partial_from, pipeline_step, state, q_tile, buffers, ready,
                                                 free, lists, row_in_tile, batch, q_ids, bias, A, Q, KV, L, F, False,
                                                 S_LAYOUT, O_LAYOUT)  # fmt: skip
            pipeline_step, state = _attend_steps(partial_from, end, pipeline_step, state, q_tile, buffers, ready,
                                                 free, lists, row_in_tile, batch, q_ids, bias, A, Q, KV, L, F, True,
                                                 S_LAYOUT, O_LAYOUT)  # fmt: skip
            packed_p, m_i, l_i, acc = state
            if F.Q_STAGES == 1 and not F.OUT_REPLACES_Q:
                _reuse_q_tile(GROUP, descs, buffers, ready, free, batch, pass_head, q_block, A, Q, F)
            stage = pipeline_step % F.KV_STAGES
            mbarrier.wait(ready.kv.index(stage), pipeline_step // F.KV_STAGES & 1)
            last_p = unpack(packed_p, dtype, GROUP_ROWS, N, LHS_LAYOUT)
            acc = warpgroup_mma(last_p, as_matrix(buffers.v.index(stage), N, A.DV), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.k.index(stage), count=1)
            mbarrier.arrive(free.v.index(stage), count=1)
            pipeline_step += 1
        if F.Q_STAGES > 1:
            mbarrier.arrive(free.q.index(q_stage), count=1)
        elif end <= first and not F.OUT_REPLACES_Q:
            _reuse_q_tile(GROUP, descs, buffers, ready, free, batch, pass_head, q_block, A, Q, F)
        accs = _add_earlier_outs(GROUP, acc, m_i, initial_m_i, descs, buffers, ready, free, iteration & 1, A, F)
        iteration += 1
        # Fetched now, so that its loads overlap the stores of this work tile.
        next_work_tile = _next_work_tile(queue, iteration, lists, rows, row_in_tile, A, Q, KV, L, F, S_LAYOUT)

        is_empty = l_i == 0
        l_i = gl.where(is_empty, 1.0, l_i)
        gl.store(rows.lse + lse_index, gl.where(is_empty, float("-inf"), (m_i + gl.log2(l_i)) * LN_2))
        _store_out(GROUP, accs, 1.0 / l_i, descs, out_tile, batch, pass_head, q_block, A, Q)
        if F.OUT_REPLACES_Q:
            tma.store_wait(0)
            mbarrier.arrive(free.q.index(q_stage), count=1)
        work_tile, span, mask_words, initial_m_i = next_work_tile
    tma.store_wait(0)


@gluon.jit
def hopper_forward_kernel(
    q,  # descriptors: [B, *axes of Q, HEADS, H], a box has 64 rows, those of a group, and D columns
    k,  # [B, *axes of KV, KV_HEADS, H]
    v,  # [B, *axes of KV, KV_HEADS, HV]
    k2,  # k and v by the axes of KV2, if there is a second pass
    v2,
    earlier_out,  # [B, *axes of Q, PASS_HEADS, HV]: out of an earlier pass, if HAS_EARLIER
    schedule,  # int32 [rounds + 1, programs]: the work tiles of each program, then -1
    spans,  # this and the next three: `BlockLists`
    entries,
    mask_tiles,
    active_query_groups,
    mask_bits,  # int32 [1 + tiles, Q.BLOCK, KV.BLOCK / 32]
    q_ids,  # int32 [B, NUM_IDS, Q.ROWS] by row: segment ids, -2 in padding; order ids
    kv_ids,  # int32 [B, NUM_IDS, KV.ROWS] by row: segment ids, -1 in padding; order ids
    slopes,  # float32 [HEADS], divided by SCALE, if ALIBI; else None
    bias_table,  # float32 [HEADS, TABLE_LENGTH], divided by SCALE; None for none
    sinks,  # float32 [HEADS], if HAS_SINKS
    earlier_lse,  # float32 [B, PASS_HEADS, Q.ROWS] by row, if HAS_EARLIER
    out,  # a descriptor like that of ``earlier_out``; boxes of both have all DV columns, or half of them
    lse,  # float32 [B, PASS_HEADS, Q.ROWS] by row
    A: gl.constexpr,
    Q: gl.constexpr,
    KV: gl.constexpr,
    KV2: gl.constexpr,  # keys of a second pass with the same query rows, in the same lists; no rows if there is none
    L: gl.constexpr,
    F: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,  # registers of a thread in a consumer, and in the producer
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Computes out, rounded, and lse of this program's work tiles."""
    GROUPS: gl.constexpr = Q.BLOCK // GROUP_ROWS
    descs = Descriptors(q=q, k=k, v=v, k2=k2, v2=v2, earlier_out=earlier_out, out=out)
    q_buffer = allocate_buffers(q, F.Q_STAGES * GROUPS)
    out_buffer = q_buffer
    if not F.OUT_REPLACES_Q:
        out_buffer = allocate_buffers(out, GROUPS)
    key_offsets = None
    if needs_key_offsets(A, Q, KV):
        key_offsets = allocate_key_offsets(F.N, KV)  # float32 [1, N]
    buffers = Buffers(
        q=q_buffer,  # [Q_STAGES * GROUPS, 64, D]
        k=allocate_buffers(k, F.KV_STAGES),  # [KV_STAGES, N, D]
        v=allocate_buffers(v, F.KV_STAGES),  # [KV_STAGES, N, DV]
        key_offsets=key_offsets,
        out=out_buffer,  # [GROUPS, 64, DV], or half of the columns
    )
    q_ready, q_free = allocate_barriers(F.Q_STAGES * GROUPS, 1), allocate_barriers(F.Q_STAGES * GROUPS, 1)
    kv_ready = allocate_barriers(F.KV_STAGES, 1)
    free = Free(q=q_free, k=allocate_barriers(F.KV_STAGES, GROUPS), v=allocate_barriers(F.KV_STAGES, GROUPS))
    earlier_out_ready = allocate_barriers(GROUPS * (A.DV // out.block_shape[-1]), 1)
    ready = Ready(q=q_ready, kv=kv_ready, earlier_out=earlier_out_ready)
    queue = _allocate_queue(GROUPS)
    fence_async_shared()
    lists = HopperBlockLists(spans, entries, mask_tiles, active_query_groups, mask_bits, q_ids, kv_ids)
    rows = RowPointers(slopes=slopes, bias_table=bias_table, sinks=sinks, earlier_lse=earlier_lse, lse=lse)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consumer, (0, descs, buffers, ready, free, queue, lists, rows, A, Q, KV, L, F)),
                (_producer, (descs, buffers, ready, free, queue, schedule, lists, A, Q, KV, KV2, L, F)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, descs, buffers, ready, free, queue, lists, rows, A, Q, KV, L, F)),
                (_consumer, (1, descs, buffers, ready, free, queue, lists, rows, A, Q, KV, L, F)),
                (_producer, (descs, buffers, ready, free, queue, schedule, lists, A, Q, KV, KV2, L, F)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
