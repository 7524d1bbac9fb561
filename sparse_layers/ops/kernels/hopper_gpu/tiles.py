"""Shared code of the Hopper kernels: compile-time constants, bundles, work tiles, boxes of rows, mask bits, logits."""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportAssignmentType=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ..gpu.tiles import TokenIds
from . import settings
from .primitives import exp2, load_tile, mask_by_bits

# Rows of a tile that one group of four warps computes: those of one wgmma.
GROUP_ROWS = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)
COMPARE_IDS = gl.constexpr(settings.COMPARE_IDS)


class HopperArrayShapes(NamedTuple):
    """Shapes and scalars of the op, a compile-time constant of the kernels."""

    HEADS: int
    KV_HEADS: int
    D: int  # head size of q and k, rounded up to 64, 128 or 256
    DV: int  # that of v
    DEPTH: int  # columns of q and k that products read: D, or 192 of 256
    SCALE: float
    CAP: float  # soft cap of the logits, 0 for none
    FIRST_HEAD: int  # the pass is for query heads FIRST_HEAD, FIRST_HEAD + HEAD_STEP, ...
    HEAD_STEP: int
    PASS_HEADS: int  # query heads of the pass
    NUM_IDS: int  # ids of a token: 0 for none, 1 for a segment id, 2 for an order id, too
    ALIBI: bool  # True if slopes times distances are added; then logits are only scaled, and no query sees a later key
    TABLE_LENGTH: int = 0  # entries of a head in the table of a bias, with slopes in them; 0 for none
    TABLE_CENTER: int = 0  # the index of distance 0


class RowsView(NamedTuple):
    """Rows of one side of a pass, and where a tile of them lies in the view of the tokens."""

    ROWS: int  # rounded up to whole blocks
    BLOCK: int  # rows of a block of the lists
    # (phase, digits, stride) of each axis of the view, see `planning.row_orders.Axis`; empty in natural order.
    AXES: tuple


class ListShapes(NamedTuple):
    """Shapes of a pass' block lists."""

    BATCHES: int  # lists by batch entry
    HEADS: int  # lists by head
    HEADS_PER_LIST: int  # neighbouring query heads that share a list
    NUM_BLOCKS: int  # blocks of the side that has the lists
    NUM_SPLITS: int  # splits of lists in a batch entry, 0 if no list is split
    GRANULARITY: int  # queries that selected blocks together, 0 without a selection


class Descriptors(NamedTuple):
    """TMA descriptors of arrays. In this and the bundles below, a field that a kernel does not use is None."""

    q: Any = None
    k: Any = None
    v: Any = None
    k2: Any = None  # of a second pass with the same query rows
    v2: Any = None
    dout: Any = None
    lse: Any = None
    delta: Any = None
    earlier_out: Any = None  # of an earlier pass
    out: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None


class RowPointers(NamedTuple):
    """Pointers to arrays that threads read and write by query rows, without descriptors."""

    q: Any = None
    dout: Any = None
    sinks: Any = None  # one number a head
    slopes: Any = None  # likewise
    bias_table: Any = None  # TABLE_LENGTH numbers a head
    earlier_lse: Any = None  # of an earlier pass
    lse: Any = None
    delta: Any = None
    dq: Any = None


class HopperBlockLists(NamedTuple):
    """Pointers to `BlockLists`, and to the ids of rows; see `hopper_forward_kernel`."""

    spans: Any = None
    entries: Any = None
    mask_tiles: Any = None
    active_query_groups: Any = None
    mask_bits: Any = None
    q_ids: Any = None
    kv_ids: Any = None


class Buffers(NamedTuple):
    """Tiles in shared memory. The first axis is that of `index`: by stage, unless a comment says otherwise."""

    q: Any = None
    k: Any = None
    v: Any = None
    dout: Any = None
    lse: Any = None
    delta: Any = None
    mask_words: Any = None
    key_offsets: Any = None  # without an axis before
    out: Any = None  # by group; the tile of the earlier pass first, then the result
    p: Any = None  # without an axis before
    ds: Any = None  # by step modulo 2, or by group
    dq: Any = None  # by group


class Ready(NamedTuple):
    """Barriers that say that a tile has arrived, by stage unless a comment says otherwise."""

    q: Any = None  # with lse backward
    dout: Any = None  # with delta
    q_dout: Any = None  # with lse, delta and mask words
    kv: Any = None  # forward, the keys of a step and the values of the step before; backward, 0 for k and 1 for v
    earlier_out: Any = None  # by group


class Free(NamedTuple):
    """Barriers that say that a tile has been read and may be overwritten, by stage."""

    q: Any = None
    k: Any = None
    v: Any = None
    q_dout: Any = None  # with all else that a stage has


@gluon.jit
def unravel_work_tile(work_tile, HEADS: gl.constexpr, L: gl.constexpr):
    """Splits the number of a work tile into (batch, head of HEADS, block)."""
    return work_tile // L.NUM_BLOCKS // HEADS, work_tile // L.NUM_BLOCKS % HEADS, work_tile % L.NUM_BLOCKS


@gluon.jit
def load_span(spans, batch, head, block, L: gl.constexpr):
    """Loads the list of a query head and a block: (first entry, first partial entry, end)."""
    span = spans + (((batch % L.BATCHES) * L.HEADS + head // L.HEADS_PER_LIST % L.HEADS) * L.NUM_BLOCKS + block) * 3
    return gl.load(span), gl.load(span + 1), gl.load(span + 2)


@gluon.jit
def view_coordinate(row, VIEW: gl.constexpr, AXIS: gl.constexpr):
    """Coordinate on an axis of the view, for the first token of a tile that begins at a row."""
    coordinate = row * 0 - VIEW.AXES[AXIS][0]
    for i in gl.static_range(len(VIEW.AXES[AXIS][1])):
        digit = row // VIEW.AXES[AXIS][1][i][0]
        if VIEW.AXES[AXIS][1][i][1] > 0:
            digit = digit % VIEW.AXES[AXIS][1][i][1]
        coordinate += digit * VIEW.AXES[AXIS][1][i][2]
    return coordinate


@gluon.jit
def token_of(row, VIEW: gl.constexpr):
    """Tokens of rows that have one."""
    if len(VIEW.AXES) == 0:
        return row
    else:
        token = view_coordinate(row, VIEW, 0) * VIEW.AXES[0][2]
        for i in gl.static_range(1, len(VIEW.AXES)):
            token += view_coordinate(row, VIEW, i) * VIEW.AXES[i][2]
        return token


@gluon.jit
def first_key_row(lists, step, KV: gl.constexpr, N: gl.constexpr):
    """Loads the row of the first key of a step."""
    STEPS_PER_BLOCK: gl.constexpr = KV.BLOCK // N
    return gl.load(lists.entries + step // STEPS_PER_BLOCK) * KV.BLOCK + step % STEPS_PER_BLOCK * N


@gluon.jit
def tile_coordinates(batch, row, head, column, VIEW: gl.constexpr, SIZE: gl.constexpr):
    """Coordinates of a tile in the array [B, *axes, heads, size], or with three axes in [B, *axes, heads * SIZE]."""
    if len(VIEW.AXES) == 0:
        return [batch, row, head, column]
    elif len(VIEW.AXES) == 2:
        return [batch, view_coordinate(row, VIEW, 0), view_coordinate(row, VIEW, 1), head, column]
    else:
        return [
            batch,
            view_coordinate(row, VIEW, 0),
            view_coordinate(row, VIEW, 1),
            view_coordinate(row, VIEW, 2),
            head * SIZE + column,
        ]


@gluon.jit
def expect_tile(desc, batch, row, head, ready, buffer, VIEW: gl.constexpr, SIZE: gl.constexpr):
    """Starts to load a tile of rows of a head, whose bytes the barrier ``ready`` then expects."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    load_tile(desc, tile_coordinates(batch, row, head, 0, VIEW, SIZE), ready, buffer)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocates COUNT barriers that wait for ARRIVALS arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def allocate_buffers(desc, COUNT: gl.constexpr):
    """Allocates shared memory for COUNT boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)  # noqa: RUF005


@gluon.jit
def as_matrix(buffer, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """Reshapes a tile in shared memory to [ROWS, SIZE]."""
    return buffer.reshape([ROWS, SIZE])


@gluon.jit
def select_columns(x, INDEX: gl.constexpr, WIDTH: gl.constexpr):
    """Selects WIDTH columns of a tile in registers [64, WIDTH] or [64, 2 * WIDTH]: all, or half INDEX."""
    if x.shape[1] == WIDTH:
        return x
    else:
        halves = gl.split(gl.permute(gl.reshape(x, [GROUP_ROWS, 2, WIDTH]), (0, 2, 1)))
        return halves[INDEX]


@gluon.jit
def multiply_transposed(left, right, acc, USE_ACC: gl.constexpr, DEPTH: gl.constexpr):
    """Starts left @ right^T, added to acc with USE_ACC: of tiles in shared memory, the first DEPTH columns."""
    if left.shape[1] == DEPTH:
        return warpgroup_mma(left, right.permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)
    else:  # three quarters of the columns: half of them, and a quarter
        HALF: gl.constexpr = left.shape[1] // 2
        acc = warpgroup_mma(left.slice(0, HALF, 1), right.slice(0, HALF, 1).permute((1, 0)), acc, use_acc=USE_ACC,
                            is_async=True)  # fmt: skip
        return warpgroup_mma(left.slice(HALF, HALF // 2, 1), right.slice(HALF, HALF // 2, 1).permute((1, 0)), acc,
                             is_async=True)  # fmt: skip


@gluon.jit
def mask_tile_index(mask_tile, A: gl.constexpr):
    """Returns (the index of a mask tile in the array, True if ids must be compared); the tile -1 lies first."""
    if A.NUM_IDS == 0:
        return mask_tile + 1, False
    else:
        return (mask_tile + 1) & (COMPARE_IDS - 1), mask_tile + 1 >= COMPARE_IDS


@gluon.jit
def load_mask_words(tile, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, WORDS: gl.constexpr):
    """Loads the words of a mask tile that a thread needs for its scores [64, COLUMNS].

    ``tile`` points to the first word of the first row. A row has WORDS words.
    """
    L3: gl.constexpr = gl.reshape(
        gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, LAYOUT), [GROUP_ROWS, COLUMNS // 32, 32]
    ).type.layout
    L2: gl.constexpr = gl.SliceLayout(2, L3)
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, L2))
    word = gl.arange(0, COLUMNS // 32, layout=gl.SliceLayout(0, L2))
    return gl.load(tile + row[:, None] * WORDS + word[None, :])


@gluon.jit
def load_ids(ids, batch, row, VIEW: gl.constexpr, A: gl.constexpr):
    """Loads the `TokenIds` of rows; without ids, rows stand in for them."""
    segment, order = row, row
    ids += batch * (A.NUM_IDS * VIEW.ROWS)
    if A.NUM_IDS > 0:
        segment = gl.load(ids + row)
    if A.NUM_IDS > 1:
        order = gl.load(ids + VIEW.ROWS + row)
    return TokenIds(segment, order)


@gluon.jit
def apply_ids(words, row_ids, ids, batch, first_column, VIEW: gl.constexpr, A: gl.constexpr,
              ROWS_ARE_QUERIES: gl.constexpr):  # fmt: skip
    """Clears the bits of mask words where a key has another segment than the query, or a larger order id.

    ``row_ids`` are those of the 64 rows, and ``ids`` points to those of the columns. Words are ready before the scores,
    beside which registers do not hold all ids.
    """
    L3: gl.constexpr = gl.expand_dims(words, 2).type.layout  # of bits: [64, words, 32]
    L2: gl.constexpr = gl.SliceLayout(0, L3)
    ROWS: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, L2))[None, :]
    word = gl.arange(0, words.shape[1], layout=gl.SliceLayout(1, L2))[:, None]
    column_ids = load_ids(ids, batch, first_column + word * 32 + bit, VIEW, A)  # [words, 32] each
    row_segment = gl.convert_layout(row_ids.segment, ROWS)[:, None]
    allowed = gl.expand_dims(row_segment, 2) == gl.expand_dims(column_ids.segment, 0)
    if A.NUM_IDS > 1:
        row_order = gl.expand_dims(gl.convert_layout(row_ids.order, ROWS)[:, None], 2)
        column_order = gl.expand_dims(column_ids.order, 0)
        allowed = allowed & (column_order <= row_order if ROWS_ARE_QUERIES else row_order <= column_order)
    return words & gl.sum(gl.where(allowed, gl.expand_dims(1 << bit, 0), 0), 2)


@gluon.jit
def apply_mask_bits(scores, words, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, A: gl.constexpr):
    """Sets scores [64, COLUMNS] to -inf where a bit of the mask words is 0."""
    s3 = gl.reshape(scores, [GROUP_ROWS, COLUMNS // 32, 32])
    L3: gl.constexpr = s3.type.layout
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 1)
    if A.CAP > 0:  # with a hyperbolic tangent, `mask_by_bits` would spill registers
        s3 = gl.where(((gl.expand_dims(words, 2) >> bit) & 1) != 0, s3, float("-inf"))
    else:  # two bits of a column's number depend on the thread: it shifts words by these, and all test the same bits
        s3 = mask_by_bits(s3, gl.expand_dims(words, 2) >> (bit & 6), 1 << (bit & 25))
    return gl.convert_layout(gl.reshape(s3, [GROUP_ROWS, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def tanh(x):
    """Computes tanh(x), accurate to a few roundings also near 0."""
    square = x * x
    small = -0.05396825396825397 + square * 0.021869488536155203
    small = x * (1 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * small)))
    # exp2 of a large number is infinite, and 2 / infinity is 0, as it should be.
    large = 1 - 2 / (exp2(x * 2.8853900817779268) + 1)
    return gl.where(gl.abs(x) < 0.3, small, large)


@gluon.jit
def to_logits(scores, A: gl.constexpr):
    """Turns q . k into logits to base 2, up to the factor `scale_log2`."""
    if A.CAP > 0:
        return tanh(scores * (A.SCALE / A.CAP)) * (A.CAP * LOG2_E)
    elif A.SCALE <= 1e-30:
        return scores * (A.SCALE * LOG2_E)
    else:
        return scores


def softmax_scale_log2(scale: float, cap: float) -> float:
    """Factor from the results of `to_logits` to logits. It is positive, so that maxima may be taken before."""
    return scale * 1.4426950408889634 if cap == 0 and scale > 1e-30 else 1.0


scale_log2 = gluon.constexpr_function(softmax_scale_log2)
