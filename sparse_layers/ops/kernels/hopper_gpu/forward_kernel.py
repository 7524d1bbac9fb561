"""The forward kernel: programs stay, and take one item of work after the other: a head and a block of queries.

One warp fetches tiles of q, k and v with the copy engine. Groups of four warps have 64 queries each: while the
tensor cores multiply the scores of one block of keys, and the weights of the block before with its values, a group
computes the softmax of what is there.

Rules that ptxas does not state, each learnt from a wrong result or a slow program; `benchmarks/gluon_resources.py`
looks for what breaks them.

* Between a product whose left side is in registers and the wait for it there is no branch (waiting for a barrier is
  one), and no end of a loop: the registers would be used for something else.
* An accumulator that is in flight around a loop must be waited for with all others, or everything is done in turn.
* Weights go around the loop packed, and are packed after the wait.
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

from .primitives import exp2, load_tile, pack, reinterpret, store_tile, unpack
from .tiles import (
    LOG2_E,
    ROWS,
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

# What groups are told of an item: itself, its first step, first masked one and end, and the first one's mask tile.
NUMBERS = gl.constexpr(5)


class Forward(NamedTuple):
    """How the kernel is compiled, beside the bundles of `tiles.py`."""

    PART: int  # keys of a step; a block of the lists has one or more such parts
    Q_STAGES: int  # tiles of q, and tiles of k and of v, that are held or on their way
    KV_STAGES: int
    SINKS: bool  # whether there are sinks
    BEFORE: bool  # whether there are results of an earlier pass


@gluon.jit
def _queue(GROUPS: gl.constexpr):
    """How the one who fetches tells the groups that compute what comes: (numbers, full, empty), of two items."""
    numbers = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return numbers, barriers(2, 1), barriers(2, GROUPS)


@gluon.jit
def _scheduled(schedule, turn):
    """The item of this program in a round, -1 after its last one."""
    return gl.load(schedule + turn * gl.num_programs(0) + gl.program_id(0))


@gluon.jit
def _tell(work, turn, found):
    """Tells the groups that compute the numbers of an item, of which the first is -1 after the last item."""
    numbers, full, empty = work
    mbarrier.wait(empty.index(turn % 2), (turn // 2 & 1) ^ 1)
    for i in gl.static_range(NUMBERS):
        place = numbers.index(turn % 2 * NUMBERS + i)
        place.store(gl.full([1], found[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full.index(turn % 2), count=1)


@gluon.jit
def _told(work, turn, NUMBER: gl.constexpr):
    """One of the numbers of an item that a group computes, when it has waited for them."""
    place = work[0].index(turn % 2 * NUMBERS + NUMBER)
    return gl.sum(place.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _fetch_keys(desc, more, b, row, head, full, buffer, A: gl.constexpr, KV: gl.constexpr, KV2: gl.constexpr):
    """Begins to load k or v of a step: rows of a second pass are numbered after those of the first."""
    if KV2.ROWS == 0 or row < KV.ROWS:
        load_tile(desc, corner_of(b, row, head, 0, KV, A.D), full, buffer)
    else:
        other = reinterpret(buffer, more.dtype, more.block_shape, more.layout)
        load_tile(more, corner_of(b, row - KV.ROWS, head, 0, KV2, A.D), full, other)


@gluon.jit
def _producer(descs, buffers, full, empty, work, schedule, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
              KV2: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Fetches q, k and v in the order in which they will be needed, and says where lists are."""
    PARTS: gl.constexpr = KV.TILE // F.PART
    n = 0
    turn = 0
    item = _scheduled(schedule, turn)
    while item >= 0:
        coming = _scheduled(schedule, turn + 1)
        b, own, block = item_of(item, A.OWN_HEADS, L)
        head = A.FIRST_HEAD + own * A.HEAD_STEP
        kv_head = head // (A.HEADS // A.KV_HEADS)
        first, first_masked, end = span_of(lists[0], b, head, block, L)
        for group in gl.static_range(Q.TILE // ROWS):
            slot = turn % F.Q_STAGES * (Q.TILE // ROWS) + group
            mbarrier.wait(empty[0].index(slot), (turn // F.Q_STAGES & 1) ^ 1)
            row = block * Q.TILE + group * ROWS
            fetch(descs[0], b, row, head, full[0].index(slot), buffers[0].index(slot), Q, A.D)
        tile = gl.load(lists[2] + first, mask=end > first, other=-1)
        first, first_masked, end = first * PARTS, first_masked * PARTS, end * PARTS  # steps
        _tell(work, turn, (item, first, first_masked, end, tile))
        turn += 1
        # Values are needed a step later than keys: with the keys of step n come the values of the step before.
        before = 0
        for i in range(first, end + gl.where(end > first, 1, 0)):
            slot = n % F.KV_STAGES
            at = full[1].index(slot)
            row = before
            if i < end:
                row = gl.load(lists[1] + i // PARTS) * KV.TILE + i % PARTS * F.PART
            mbarrier.wait(empty[1].index(slot), (n // F.KV_STAGES & 1) ^ 1)
            if i == first:  # no values will wait for it, and groups must not arrive there before it is over
                mbarrier.wait(empty[2].index(slot), (n // F.KV_STAGES & 1) ^ 1)
            both = (i > first) & (i < end)
            mbarrier.expect(at, 2 * descs[1].block_type.nbytes, pred=both)
            mbarrier.expect(at, descs[1].block_type.nbytes, pred=both == 0)
            if i < end:
                _fetch_keys(descs[1], descs[5], b, row, kv_head, at, buffers[1].index(slot), A, KV, KV2)
            if i > first:
                mbarrier.wait(empty[2].index(slot), (n // F.KV_STAGES & 1) ^ 1)
                _fetch_keys(descs[2], descs[6], b, before, kv_head, at, buffers[2].index(slot), A, KV, KV2)
            before = row
            n += 1
        item = coming
    _tell(work, turn, (-1, 0, 0, 0, -1))


@gluon.jit
def _limited(scores, words, within, i, b, segment, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
             L: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Scores of a step that is masked: -inf where the pair may not attend."""
    PARTS: gl.constexpr = KV.TILE // F.PART
    if L.CHOSEN > 0:
        by = gl.load(lists[3] + i // PARTS)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, words.type.layout)) + within
        words = gl.where(((by >> (row // L.CHOSEN)) & 1)[:, None] != 0, words, 0)
    scores = masked(scores, words, F.PART, LAYOUT, A)
    if A.SEGMENTED:
        first = gl.load(lists[1] + i // PARTS) * KV.TILE + i % PARTS * F.PART
        column = first + gl.arange(0, F.PART, layout=gl.SliceLayout(0, LAYOUT))
        other = gl.load(lists[6] + b * KV.ROWS + column)
        scores = gl.where(segment[:, None] == other[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _softmax(scores, top, total, FACTOR: gl.constexpr, MASKED: gl.constexpr, OUT_ROWS: gl.constexpr):
    """(weights, largest logit, sum of weights, what earlier results are multiplied by)."""
    raised = gl.maximum(top, gl.max(scores, 1) * FACTOR)
    shift = raised
    if MASKED:
        shift = gl.where(raised == float("-inf"), 0.0, raised)  # a row that has seen no key yet
    weights = exp2(scores * FACTOR - shift[:, None])
    old = exp2(top - shift)
    total = total * old + gl.sum(weights, 1)
    return weights, raised, total, gl.convert_layout(old, OUT_ROWS)


@gluon.jit
def _words(lists, number, part, within, Q: gl.constexpr, KV: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of a part of a mask tile; number -1 lets everything pass, and is the first one."""
    WORDS: gl.constexpr = KV.TILE // 32
    tile = lists[4] + ((number + 1) * Q.TILE + within) * WORDS + part * (F.PART // 32)
    return words_of(tile, F.PART, LAYOUT, WORDS)


@gluon.jit
def _next(work, turn, lists, rows, within, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, L: gl.constexpr,
          F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """What a group needs of its next item before it begins.

    (item or -1, its steps: the first, the first masked one and the end, the first one's mask tile, what rows begin
    with: the logits to base 2 of sinks or of an earlier pass.)
    """
    _, full, empty = work
    mbarrier.wait(full.index(turn % 2), turn // 2 & 1)
    item = _told(work, turn, 0)
    span = _told(work, turn, 1), _told(work, turn, 2), _told(work, turn, 3)
    words = _words(lists, _told(work, turn, 4), 0, within, Q, KV, F, LAYOUT)
    mbarrier.arrive(empty.index(turn % 2), count=1)
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    b, own, block = item_of(gl.maximum(item, 0), A.OWN_HEADS, L)
    if F.SINKS:
        top = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
        top += gl.load(rows[0] + A.FIRST_HEAD + own * A.HEAD_STEP) * LOG2_E
    if F.BEFORE:
        row = block * Q.TILE + within + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        top = gl.load(rows[1] + (b * A.OWN_HEADS + own) * Q.ROWS + row) * LOG2_E
    return item, span, words, top


@gluon.jit
def _steps(first, last, n, state, q, buffers, full, empty, lists, within, b, segment, A: gl.constexpr, Q: gl.constexpr,
           KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr,
           OUT: gl.constexpr):  # fmt: skip
    """Goes on over steps first .. last - 1; the weights of the step before are still to be multiplied."""
    weights, top, total, out = state
    COLUMNS: gl.constexpr = F.PART
    PARTS: gl.constexpr = KV.TILE // F.PART
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    for i in range(first, last):
        slot = n % F.KV_STAGES
        words = 0
        if MASKED:  # early, for this takes long
            words = _words(lists, gl.load(lists[2] + i // PARTS), i % PARTS, within, Q, KV, F, SCORES)
        mbarrier.wait(full[1].index(slot), n // F.KV_STAGES & 1)
        keys = flat(buffers[1].index(slot), COLUMNS, A.D)
        scores = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
        scores = warpgroup_mma(q, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
        left = unpack(weights, q.dtype, ROWS, COLUMNS, LEFT)
        out = warpgroup_mma(left, flat(buffers[2].index(slot), COLUMNS, A.D), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(empty[1].index(slot), count=1)
        scores = logits(scores, A)
        if MASKED:
            scores = _limited(scores, words, within, i, b, segment, lists, A, Q, KV, L, F, SCORES)
        found, top, total, old = _softmax(scores, top, total, factor(A.SCALE, A.CAP), MASKED, gl.SliceLayout(1, OUT))
        out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(empty[2].index(slot), count=1)
        weights = pack(found, q.dtype, ROWS, COLUMNS)
        out = out * old[:, None]
        n += 1
    return n, (weights, top, total, out)


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, buffers, full, empty, work, lists, rows, A: gl.constexpr,
               Q: gl.constexpr, KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes 64 of the rows of each item."""
    COLUMNS: gl.constexpr = F.PART
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.PART, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    D: gl.constexpr = A.D
    dtype: gl.constexpr = descs[0].dtype
    within = GROUP * ROWS
    staged = buffers[3].index(GROUP)
    n = 0
    turn = 0
    item, span, words, begun = _next(work, turn, lists, rows, within, A, Q, KV, L, F, SCORES)
    while item >= 0:
        first, first_masked, end = span
        b, own, block = item_of(item, A.OWN_HEADS, L)
        row = block * Q.TILE + within + gl.arange(0, ROWS, layout=BY_ROW)
        at = (b * A.OWN_HEADS + own) * Q.ROWS + row
        segment = row
        if A.SEGMENTED:
            segment = gl.load(lists[5] + b * Q.ROWS + row)
        top = begun
        total = gl.where(top == float("-inf"), 0.0, 1.0)
        out = gl.zeros([ROWS, D], gl.float32, OUT)

        slot = turn % F.Q_STAGES * (Q.TILE // ROWS) + GROUP
        q = flat(buffers[0].index(slot), ROWS, A.D)
        if F.BEFORE:  # it is needed last, and comes while the item is computed
            tma.store_wait(0)  # where the results of the item before were staged
            fetch(descs[4], b, block * Q.TILE + within, own, full[2].index(GROUP), staged, Q, A.D)
        mbarrier.wait(full[0].index(slot), turn // F.Q_STAGES & 1)
        if end > first:
            step = n % F.KV_STAGES
            mbarrier.wait(full[1].index(step), n // F.KV_STAGES & 1)
            scores = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
            keys = flat(buffers[1].index(step), COLUMNS, A.D)
            scores = warpgroup_mma(q, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(empty[1].index(step), count=1)
            mbarrier.arrive(empty[2].index(step), count=1)
            scores = logits(scores, A)
            if first_masked == first:
                scores = _limited(scores, words, within, first, b, segment, lists, A, Q, KV, L, F, SCORES)
            found, top, total, old = _softmax(scores, top, total, factor(A.SCALE, A.CAP), True, OUT_ROWS)
            out = out * old[:, None]
            state = pack(found, dtype, ROWS, COLUMNS), top, total, out
            n += 1
            middle = gl.maximum(first_masked, first + 1)
            n, state = _steps(first + 1, middle, n, state, q, buffers, full, empty, lists, within, b, segment,
                              A, Q, KV, L, F, False, SCORES, OUT)  # fmt: skip
            n, state = _steps(middle, end, n, state, q, buffers, full, empty, lists, within, b, segment,
                              A, Q, KV, L, F, True, SCORES, OUT)  # fmt: skip
            weights, top, total, out = state
            step = n % F.KV_STAGES
            mbarrier.wait(full[1].index(step), n // F.KV_STAGES & 1)
            left = unpack(weights, dtype, ROWS, COLUMNS, LEFT)
            out = warpgroup_mma(left, flat(buffers[2].index(step), COLUMNS, A.D), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=[out])
            mbarrier.arrive(empty[1].index(step), count=1)
            mbarrier.arrive(empty[2].index(step), count=1)
            n += 1
        mbarrier.arrive(empty[0].index(slot), count=1)
        if F.BEFORE:
            mbarrier.wait(full[2].index(GROUP), turn & 1)
            kept = exp2(begun - gl.where(top == float("-inf"), 0.0, top))
            out += flat(staged, ROWS, D).load(OUT).to(gl.float32) * gl.convert_layout(kept, OUT_ROWS)[:, None]
        turn += 1
        # Its loads are on their way while the results of this item go out.
        coming = _next(work, turn, lists, rows, within, A, Q, KV, L, F, SCORES)

        nothing = total == 0
        total = gl.where(nothing, 1.0, total)
        gl.store(rows[2] + at, gl.where(nothing, float("-inf"), (top + gl.log2(total)) * 0.6931471805599453))
        result = out * gl.convert_layout(1.0 / total, OUT_ROWS)[:, None]
        tma.store_wait(0)
        flat(staged, ROWS, D).store(result.to(dtype))
        fence_async_shared()
        store_tile(descs[3], corner_of(b, block * Q.TILE + within, own, 0, Q, A.D), staged)
        item, span, words, begun = coming
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q,  # descriptors: [B, *axes of Q, HEADS, H], a box has 64 rows, those of a group, and D columns
    k,  # [B, *axes of KV, KV_HEADS, H]
    v,  # [B, *axes of KV, KV_HEADS, HV]
    more_k,  # k and v by the axes of KV2, if there is a second pass
    more_v,
    before,  # [B, *axes of Q, OWN_HEADS, HV]: out of an earlier pass, if BEFORE
    schedule,  # int32 [rounds + 1, programs]: the items of each program, and -1 behind them
    spans,  # this and the next three: `BlockLists`
    entries,
    tiles,
    chosen_by,
    bits,  # int32 [1 + tiles, Q.TILE, KV.TILE / 32]
    q_segments,  # int32 [B, Q.ROWS] by row, -2 in padding, if SEGMENTED
    kv_segments,  # int32 [B, KV.ROWS] by row, -1 in padding
    sinks,  # float32 [HEADS], if SINKS
    before_lse,  # float32 [B, OWN_HEADS, Q.ROWS] by row, if BEFORE
    out,  # a descriptor as that of ``before``
    lse,  # float32 [B, OWN_HEADS, Q.ROWS] by row
    A: gl.constexpr,
    Q: gl.constexpr,
    KV: gl.constexpr,
    KV2: gl.constexpr,  # keys of a second pass with the same query rows, in the same lists; no rows if there is none
    L: gl.constexpr,
    F: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that computes, and of one that fetches
    FETCHING: gl.constexpr,
):
    """Attention of the items that this program takes: rounded out, and lse."""
    GROUPS: gl.constexpr = Q.TILE // ROWS
    q_buffer, out_buffer = buffers_of(q, F.Q_STAGES * GROUPS), buffers_of(out, GROUPS)
    k_buffer, v_buffer = buffers_of(k, F.KV_STAGES), buffers_of(v, F.KV_STAGES)
    q_full, q_empty = barriers(F.Q_STAGES * GROUPS, 1), barriers(F.Q_STAGES * GROUPS, 1)
    kv_full = barriers(F.KV_STAGES, 1)
    k_empty, v_empty = barriers(F.KV_STAGES, GROUPS), barriers(F.KV_STAGES, GROUPS)
    before_full, work = barriers(GROUPS, 1), _queue(GROUPS)
    fence_async_shared()
    descs = q, k, v, out, before, more_k, more_v
    buffers = q_buffer, k_buffer, v_buffer, out_buffer
    full, empty = (q_full, kv_full, before_full), (q_empty, k_empty, v_empty)
    lists = spans, entries, tiles, chosen_by, bits, q_segments, kv_segments
    rows = sinks, before_lse, lse
    gl.warp_specialize(
        [
            (_consumer, (0, descs, buffers, full, empty, work, lists, rows, A, Q, KV, L, F)),
            (_consumer, (1, descs, buffers, full, empty, work, lists, rows, A, Q, KV, L, F)),
            (_producer, (descs, buffers, full, empty, work, schedule, lists, A, Q, KV, KV2, L, F)),
        ],
        [4, 1],
        [REGISTERS, FETCHING],
    )
