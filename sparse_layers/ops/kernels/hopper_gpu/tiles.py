"""What the forward and the backward kernel share: constants, items of work, boxes of rows, mask tiles, and scores."""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportAssignmentType=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .primitives import exp2, kept, load_tile

# Rows of a tile that one group of four warps has: as many as a product has.
ROWS = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)


class Arrays(NamedTuple):
    """What kernels know of the op's arrays; a constant of their compilation, as the other bundles here."""

    HEADS: int
    KV_HEADS: int
    D: int  # what head sizes are rounded up to, 64 or 128
    SCALE: float
    CAP: float  # 0 for no soft cap
    FIRST_HEAD: int  # the pass is for query heads FIRST_HEAD, FIRST_HEAD + HEAD_STEP, ...
    HEAD_STEP: int
    OWN_HEADS: int  # so many of them
    SEGMENTED: bool  # whether there are segment ids


class Side(NamedTuple):
    """One side of a pass: how its rows are cut, and where a tile of them lies in its view of the tokens."""

    ROWS: int  # rounded up to whole tiles
    TILE: int  # rows of a block of the lists
    AXES: tuple  # of each axis of the view: (phase, digits), as `planning.views.Axis` has them; none in natural order


class Walk(NamedTuple):
    """The lists of a pass."""

    BATCHES: int  # lists by batch entry, and by head
    HEADS: int
    GROUP: int  # neighbouring query heads that share a list
    BLOCKS: int  # of the major side
    PIECES: int  # of a batch entry; 0 if nothing is cut
    CHOSEN: int  # queries in a part of a block that chose for itself; 0 if none did


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
    earlier_lse: Any = None  # of an earlier pass
    lse: Any = None
    delta: Any = None
    dq: Any = None


class BlockListPointers(NamedTuple):
    """Pointers to `BlockLists`, and to the segment ids of rows; see `forward_kernel`."""

    spans: Any = None
    entries: Any = None
    mask_tiles: Any = None
    chosen_by: Any = None
    mask_bits: Any = None
    q_segments: Any = None
    kv_segments: Any = None


class Buffers(NamedTuple):
    """Tiles in shared memory. The first axis is that of `index`: by stage, unless a comment says otherwise."""

    q: Any = None
    k: Any = None
    v: Any = None
    dout: Any = None
    lse: Any = None
    delta: Any = None
    mask_words: Any = None
    out: Any = None  # by group; the tile of the earlier pass first, then the result
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
def item_of(item, HEADS: gl.constexpr, L: gl.constexpr):
    """An item of work: (batch entry, which of the heads of its kind, block)."""
    return item // L.BLOCKS // HEADS, item // L.BLOCKS % HEADS, item % L.BLOCKS


@gluon.jit
def span_of(spans, b, head, block, L: gl.constexpr):
    """The list of a query head and a major block: (first entry, first masked one, end)."""
    line = spans + (((b % L.BATCHES) * L.HEADS + head // L.GROUP % L.HEADS) * L.BLOCKS + block) * 3
    return gl.load(line), gl.load(line + 1), gl.load(line + 2)


@gluon.jit
def place_of(row, X: gl.constexpr, AXIS: gl.constexpr):
    """The coordinate on an axis of the view of the first token of a tile that begins at a row."""
    total = row * 0 - X.AXES[AXIS][0]
    for i in gl.static_range(len(X.AXES[AXIS][1])):
        digit = row // X.AXES[AXIS][1][i][0]
        if X.AXES[AXIS][1][i][1] > 0:
            digit = digit % X.AXES[AXIS][1][i][1]
        total += digit * X.AXES[AXIS][1][i][2]
    return total


@gluon.jit
def corner_of(b, row, head, column, X: gl.constexpr, SIZE: gl.constexpr):
    """Where a tile begins in the array [B, *axes, heads, size], or with three axes in [B, *axes, heads * SIZE]."""
    if len(X.AXES) == 0:
        return [b, row, head, column]
    elif len(X.AXES) == 2:
        return [b, place_of(row, X, 0), place_of(row, X, 1), head, column]
    else:
        return [b, place_of(row, X, 0), place_of(row, X, 1), place_of(row, X, 2), head * SIZE + column]


@gluon.jit
def fetch(desc, b, row, head, full, buffer, X: gl.constexpr, SIZE: gl.constexpr):
    """Begins to load a tile of rows of a head; ``full`` is told when it is there."""
    mbarrier.expect(full, desc.block_type.nbytes)
    load_tile(desc, corner_of(b, row, head, 0, X, SIZE), full, buffer)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, of which each waits for so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def buffers_of(desc, COUNT: gl.constexpr):
    """Shared memory for so many tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)  # noqa: RUF005


@gluon.jit
def flat(buffer, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """A tile in shared memory as [ROWS, SIZE]."""
    return buffer.reshape([ROWS, SIZE])


@gluon.jit
def words_of(tile, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, WORDS: gl.constexpr):
    """The words of a mask tile that a thread needs for its scores [ROWS, COLUMNS].

    ``tile`` points to the first word of the first row, of WORDS a row.
    """
    L3: gl.constexpr = gl.reshape(gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT), [ROWS, COLUMNS // 32, 32]).type.layout
    L2: gl.constexpr = gl.SliceLayout(2, L3)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L2))
    word = gl.arange(0, COLUMNS // 32, layout=gl.SliceLayout(0, L2))
    return gl.load(tile + row[:, None] * WORDS + word[None, :])


@gluon.jit
def masked(scores, words, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, A: gl.constexpr):
    """Scores with -inf where a bit is 0."""
    s3 = gl.reshape(scores, [ROWS, COLUMNS // 32, 32])
    L3: gl.constexpr = s3.type.layout
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 1)
    if A.CAP > 0:  # beside a hyperbolic tangent `kept` takes more registers than there are
        s3 = gl.where(((gl.expand_dims(words, 2) >> bit) & 1) != 0, s3, float("-inf"))
    else:  # of a column's number, two bits are a thread's own: it shifts words by these, and all test the same bits
        s3 = kept(s3, gl.expand_dims(words, 2) >> (bit & 6), 1 << (bit & 25))
    return gl.convert_layout(gl.reshape(s3, [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def tanh(x):
    """The hyperbolic tangent, to a few roundings also near 0."""
    square = x * x
    small = -0.05396825396825397 + square * 0.021869488536155203
    small = x * (1 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * small)))
    # exp2 of a large number is infinite, and 2 / infinity is 0, as it should be.
    large = 1 - 2 / (exp2(x * 2.8853900817779268) + 1)
    return gl.where(gl.abs(x) < 0.3, small, large)


@gluon.jit
def logits(products, A: gl.constexpr):
    """Logits to base 2 of q . k, but for a last factor: see `factor`."""
    if A.CAP > 0:
        return tanh(products * (A.SCALE / A.CAP)) * (A.CAP * LOG2_E)
    elif A.SCALE <= 1e-30:
        return products * (A.SCALE * LOG2_E)
    else:
        return products


def factor_of(scale: float, cap: float) -> float:
    """What `logits` are still to be multiplied by: as it is positive, the largest can be found before."""
    return scale * 1.4426950408889634 if cap == 0 and scale > 1e-30 else 1.0


factor = gluon.constexpr_function(factor_of)
