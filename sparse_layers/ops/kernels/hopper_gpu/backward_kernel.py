"""The backward kernel: a program has a key head and a block of 128 keys; it gives dk and dv, and adds to dq.

Where some of these would take much longer than others all are cut into pieces, which add to dk and dv in float32.

With p = exp(logits - lse): dv = p^T dout, ds = p * (dout v^T - delta), dk = ds^T q, dq = ds k: five products a block.
Each of two groups of four warps has 64 of the keys, and dk and dv of these in registers. Scores are transposed, keys by
queries, so that p and ds are left sides as they are; for dq, ds goes through shared memory, where each group multiplies
all keys, for half of the head size. The copy engine adds it to an array in float32, in the order in which it comes.

The rules of `forward_kernel.py` hold here, too.
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
    """How the kernel is compiled, beside the bundles of `tiles.py`."""

    PART: int  # queries of a step; a block of the lists has one or more such parts
    STAGES: int  # parts of q and dout that are held or on their way
    ADD: bool  # whether dk and dv are added to what is there
    TIMES: int  # query heads that have the same pieces, one after the other: these say those of the pass's first head


@gluon.jit
def _heads_of(kv_head, A: gl.constexpr):
    """The query heads of a key head that are of the pass: FIRST_HEAD + own * HEAD_STEP for own from first to end."""
    if A.HEADS == A.KV_HEADS and A.HEAD_STEP == 1:
        return kv_head, kv_head + 1
    else:
        group: gl.constexpr = A.HEADS // A.KV_HEADS
        first = (kv_head * group - A.FIRST_HEAD + A.HEAD_STEP - 1) // A.HEAD_STEP
        return gl.maximum(first, 0), ((kv_head + 1) * group - A.FIRST_HEAD + A.HEAD_STEP - 1) // A.HEAD_STEP


@gluon.jit
def _item(order, pieces, A: gl.constexpr, L: gl.constexpr, F: gl.constexpr):
    """What a program has: (batch entry, key head, block, query heads: the first, the end, and a part of their lists).

    That part begins so many entries into the list of the first one, and ends so many into that of the last one.
    """
    item = gl.load(order + gl.program_id(0))
    if L.PIECES == 0:
        b, kv_head, block = item_of(item, A.KV_HEADS, L)
        first_own, end_own = _heads_of(kv_head, A)
        return b, kv_head, block, first_own, end_own, (0, 0)
    else:
        line = pieces + item % L.PIECES * 5
        more = item // L.PIECES % F.TIMES
        first_own, end_own = gl.load(line + 1) + more, gl.load(line + 2) + more
        kv_head = (A.FIRST_HEAD + first_own * A.HEAD_STEP) // (A.HEADS // A.KV_HEADS)
        part = gl.load(line + 3), gl.load(line + 4)
        return item // L.PIECES // F.TIMES, kv_head, gl.load(line), first_own, end_own, part


@gluon.jit
def _entries(spans, b, own, block, first_own, end_own, part, A: gl.constexpr, L: gl.constexpr):
    """What an item has of the list of a query head: (first entry, first masked one, end)."""
    first, masked_from, end = span_of(spans, b, A.FIRST_HEAD + own * A.HEAD_STEP, block, L)
    if L.PIECES > 0:
        end = gl.where(own + 1 == end_own, first + part[1], end)
        first = gl.where(own == first_own, first + part[0], first)
        masked_from = gl.minimum(gl.maximum(masked_from, first), end)
    return first, masked_from, end


@gluon.jit
def columns_of(x, PART: gl.constexpr, SIZE: gl.constexpr):
    """All columns of a tile of registers, or the first half or the second one."""
    if x.shape[1] == SIZE:
        return x
    else:
        halves = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, SIZE]), (0, 2, 1)))
        return halves[PART]


def _layout_of_swapped(rows: int, columns: int) -> Any:
    """The layout of a float32 tile as `_swapped` has it, in which the copy engine finds the tile as it was.

    The copy engine has rows in lines of 128 bytes, and 16 bytes, part i of row r, at place i ^ (r % 8) of their line.
    Sixteen threads store at a time: two columns each, so two parts of each of four rows. The parts of two of the rows
    would be at the same places, in the same banks. Odd rows that store the other half of a line have other places.
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
    both = gl.join(gl.where(odd, high, low), gl.where(odd, low, high))
    return gl.reshape(gl.permute(both, (0, 1, 3, 2)), [ROWS, COLUMNS])


@gluon.jit
def _producer(descs, buffers, full, empty, order, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
              L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Fetches k and v, and q and dout, lse and delta of the queries that see them."""
    PARTS: gl.constexpr = Q.TILE // F.PART
    b, kv_head, block, first_own, end_own, part = _item(order, lists[7], A, L, F)
    for j in gl.static_range(2):
        fetch(descs[2 + j], b, block * KV.TILE, kv_head, full[2].index(j), buffers[2 + j].index(0), KV, A.D)
    n = 0
    for own in range(first_own, end_own):
        head = A.FIRST_HEAD + own * A.HEAD_STEP
        first, _, end = _entries(lists[0], b, own, block, first_own, end_own, part, A, L)
        line = b * A.OWN_HEADS + own
        for i in range(first * PARTS, end * PARTS):
            row = gl.load(lists[1] + i // PARTS) * Q.TILE + i % PARTS * F.PART
            slot = n % F.STAGES
            mbarrier.wait(empty.index(slot), (n // F.STAGES & 1) ^ 1)
            for j in gl.static_range(2):  # q with lse, dout with delta
                ready = full[j].index(slot)
                mbarrier.expect(ready, descs[j].block_type.nbytes + descs[4 + j].block_type.nbytes)
                load_tile(descs[j], corner_of(b, row, head, 0, Q, A.D), ready, buffers[j].index(slot))
                load_tile(descs[4 + j], [line, row], ready, buffers[4 + j].index(slot))
            n += 1


@gluon.jit
def _limited(scores, words, i, part, b, segment, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
             L: gl.constexpr, F: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Scores of an entry that is masked: -inf where the pair may not attend."""
    PART: gl.constexpr = F.PART
    scores = masked(scores, words, PART, LAYOUT, A)
    column = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, LAYOUT))
    if L.CHOSEN > 0:
        chosen = (gl.load(lists[3] + i) >> (column // L.CHOSEN)) & 1
        scores = gl.where((chosen != 0)[None, :], scores, float("-inf"))
    if A.SEGMENTED:
        other = gl.load(lists[6] + b * Q.ROWS + gl.load(lists[1] + i) * Q.TILE + column)
        scores = gl.where(segment[:, None] == other[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def weights_of(scores, base, A: gl.constexpr):
    """p = exp(logit - lse), at most 1, see `lowered` of call.py; ``scores`` as of `logits`, ``base`` as in `link`."""
    logs = scores + base if factor(A.SCALE, A.CAP) == 1.0 else scores * factor(A.SCALE, A.CAP)
    return exp2(gl.minimum(logs, 0.0))


@gluon.jit
def score_gradients(scores, weights, dweights, delta, A: gl.constexpr):
    """ds = p * (dout v^T - delta), times the scale; ``scores`` as of `logits`."""
    dscores = weights * (dweights * A.SCALE + delta)
    if A.CAP > 0:
        squashed = gl.maximum(scores, -A.CAP * LOG2_E) / (A.CAP * LOG2_E)
        dscores = dscores * (1 - squashed * squashed)
    return dscores


@gluon.jit
def _steps(first, last, n, dk, dv, GROUP: gl.constexpr, descs, buffers, full, empty, lists, b, own, segment,
           A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, L: gl.constexpr, F: gl.constexpr, MASKED: gl.constexpr,
           SCORES: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Goes on over entries first .. last - 1."""
    PART: gl.constexpr = F.PART
    PARTS: gl.constexpr = Q.TILE // F.PART
    WORDS: gl.constexpr = Q.TILE // 32
    D: gl.constexpr = A.D
    HALF: gl.constexpr = A.D // 2
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D // 2, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = descs[0].dtype
    for i in range(first * PARTS, last * PARTS):
        entry = i // PARTS
        part = i % PARTS
        index = gl.load(lists[1] + entry)
        slot = n % F.STAGES
        zero = n >> 30  # 0, but the compiler must not keep, and spill, what it could compute from a constant
        keys = flat(buffers[2].index(zero), KV.TILE, D)
        values = flat(buffers[3].index(zero), KV.TILE, D)
        queries = flat(buffers[0].index(slot), PART, D)
        douts = flat(buffers[1].index(slot), PART, D)
        words = 0
        if MASKED:  # early, for this takes long
            tile = lists[4] + ((gl.load(lists[2] + entry) + 1) * KV.TILE + GROUP * ROWS) * WORDS + part * (PART // 32)
            words = words_of(tile, PART, SCORES, WORDS)
        mbarrier.wait(full[0].index(slot), n // F.STAGES & 1)
        base = buffers[4].index(slot).load(SCORES)
        scores = gl.zeros([ROWS, PART], gl.float32, SCORES)
        if factor(A.SCALE, A.CAP) != 1.0:
            scores, _ = gl.broadcast(base, scores)
        scores = warpgroup_mma(keys.slice(GROUP * ROWS, ROWS, 0), queries.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(full[1].index(slot), n // F.STAGES & 1)
        dweights = gl.zeros([ROWS, PART], gl.float32, SCORES)
        dweights = warpgroup_mma(values.slice(GROUP * ROWS, ROWS, 0), douts.permute((1, 0)), dweights, use_acc=False,
                                 is_async=True)  # fmt: skip
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = logits(scores, A)
        if MASKED:
            scores = _limited(scores, words, entry, part, b, segment, lists, A, Q, KV, L, F, SCORES)
        weights = weights_of(scores, base, A)
        # Long over; a branch, lest ptxas moves the next wait before the exponentials.
        mbarrier.wait(full[1].index(slot), n // F.STAGES & 1)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        delta = buffers[5].index(slot).load(SCORES)
        dscores = score_gradients(scores, weights, dweights, delta, A).to(dtype)
        again = late(n)
        slot = again % F.STAGES
        queries = flat(buffers[0].index(slot), PART, D)
        douts = flat(buffers[1].index(slot), PART, D)
        keys = flat(buffers[2].index(again >> 30), KV.TILE, D)
        dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), LEFT), douts, dv, is_async=True)
        together_at = buffers[6].index(again % 2)
        together_at.slice(GROUP * ROWS, ROWS, 0).store(dscores)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(dscores, LEFT), queries, dk, is_async=True)
        together(8, 256)
        dq = gl.zeros([PART, HALF], gl.float32, QUERIES)
        dq = warpgroup_mma(together_at.permute((1, 0)), keys.slice(GROUP * HALF, HALF, 1), dq, use_acc=False,
                           is_async=True)  # fmt: skip
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
        mbarrier.arrive(empty.index(slot), count=1)
        dq = warpgroup_mma_wait(0, deps=[dq])
        tma.store_wait(0)
        staged = buffers[7].index(GROUP)
        reinterpret(staged, gl.float32, [PART, HALF], layout_of_swapped(PART, HALF)).store(_swapped(dq, PART, HALF))
        fence_async_shared()
        add_tile(descs[6], corner_of(b, index * Q.TILE + part * PART, own, GROUP * HALF, Q, D), staged)
        n += 1
    return n, dk, dv


@gluon.jit
def _consumer(GROUP: gl.constexpr, descs, buffers, full, empty, order, lists, A: gl.constexpr, Q: gl.constexpr,
              KV: gl.constexpr, DKV: gl.constexpr, L: gl.constexpr, F: gl.constexpr):  # fmt: skip
    """Computes half of the keys."""
    D: gl.constexpr = A.D
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.PART, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A.D, 16])
    WIDTH: gl.constexpr = descs[7].block_shape[-1]
    b, kv_head, block, first_own, end_own, part = _item(order, lists[7], A, L, F)
    row = block * KV.TILE + GROUP * ROWS
    segment = 0
    if A.SEGMENTED:
        segment = gl.load(lists[5] + b * KV.ROWS + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)))
    dk = gl.zeros([ROWS, D], gl.float32, SUMS)
    dv = gl.zeros([ROWS, D], gl.float32, SUMS)
    n = 0
    for i in gl.static_range(2):
        mbarrier.wait(full[2].index(i), 0)
    for own in range(first_own, end_own):
        first, masked_from, end = _entries(lists[0], b, own, block, first_own, end_own, part, A, L)
        n, dk, dv = _steps(first, masked_from, n, dk, dv, GROUP, descs, buffers, full, empty, lists, b, own,
                           segment, A, Q, KV, L, F, False, SCORES, SUMS)  # fmt: skip
        _, masked_from, end = _entries(lists[0], b, late(own), block, first_own, end_own, part, A, L)
        n, dk, dv = _steps(masked_from, end, n, dk, dv, GROUP, descs, buffers, full, empty, lists, b, own,
                           segment, A, Q, KV, L, F, True, SCORES, SUMS)  # fmt: skip
    staged = reinterpret(buffers[7].index(GROUP), descs[7].dtype, descs[7].block_shape, descs[7].layout)
    for i in gl.static_range(2 * (D // WIDTH)):
        found = columns_of(dk if i < D // WIDTH else dv, i % (D // WIDTH), WIDTH)
        tma.store_wait(0)
        flat(staged, ROWS, WIDTH).store(found.to(descs[7].dtype))
        fence_async_shared()
        corner = corner_of(b, row, kv_head, i % (D // WIDTH) * WIDTH, DKV, D)
        if F.ADD:
            add_tile(descs[7 + i // (D // WIDTH)], corner, staged)
        else:
            store_tile(descs[7 + i // (D // WIDTH)], corner, staged)
    tma.store_wait(0)


@gluon.jit
def backward_kernel(
    q,  # descriptors: [B, *axes of Q, HEADS, H], a box has PART rows and D columns
    dout,  # [B, *axes of Q, HEADS, HV], likewise
    k,  # [B, *axes of KV, KV_HEADS, H], a box has KV.TILE rows
    v,  # [B, *axes of KV, KV_HEADS, HV]
    lse,  # float32 [B * OWN_HEADS, Q.ROWS] by row, a box has PART of a row: what products begin from, see `Link`
    delta,  # float32 [B * OWN_HEADS, Q.ROWS] by row: -SCALE * delta
    order,  # int32 [programs]: which item each has
    spans,  # this and all up to ``bits``: as in `forward_kernel`, by blocks of keys
    entries,
    tiles,
    chosen_by,
    bits,  # int32 [1 + tiles, KV.TILE, Q.TILE / 32]
    q_segments,
    kv_segments,
    pieces,  # int32 [PIECES, 5], as `schedule.cut_if_it_pays` makes them; any array if there are none
    before_q,  # dq, dk and dv of earlier passes, whose places the results take; any array where there are none
    before_k,
    before_v,
    dq,  # float32 [B, *axes of Q, OWN_HEADS, H], a box has PART rows and half of D; added to
    dk,  # [B, *axes of DKV, KV_HEADS, H], a box has half of KV.TILE rows, and of D if it is float32; added to if ADD
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
    """dk and dv of this program's item, and what it adds to dq."""
    q_buffer, dout_buffer = buffers_of(q, F.STAGES), buffers_of(dout, F.STAGES)
    lse_buffer, delta_buffer = buffers_of(lse, F.STAGES), buffers_of(delta, F.STAGES)
    k_buffer, v_buffer, dq_buffer = buffers_of(k, 1), buffers_of(v, 1), buffers_of(dq, 2)
    ds_buffer = gl.allocate_shared_memory(q.dtype, [2, KV.TILE, F.PART], gl.NVMMASharedLayout(128, 16, 2))
    q_full, dout_full, empty = barriers(F.STAGES, 1), barriers(F.STAGES, 1), barriers(F.STAGES, 2)
    kv_full = barriers(2, 1)
    fence_async_shared()
    descs = q, dout, k, v, lse, delta, dq, dk, dv
    buffers = q_buffer, dout_buffer, k_buffer, v_buffer, lse_buffer, delta_buffer, ds_buffer, dq_buffer
    full = q_full, dout_full, kv_full
    lists = spans, entries, tiles, chosen_by, bits, kv_segments, q_segments, pieces
    gl.warp_specialize(
        [
            (_consumer, (0, descs, buffers, full, empty, order, lists, A, Q, KV, DKV, L, F)),
            (_consumer, (1, descs, buffers, full, empty, order, lists, A, Q, KV, DKV, L, F)),
            (_producer, (descs, buffers, full, empty, order, lists, A, Q, KV, L, F)),
        ],
        [4, 1],
        [REGISTERS, FETCHING],
    )
