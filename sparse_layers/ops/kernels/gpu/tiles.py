"""What the kernels share: rows and tokens, mask tiles, and scores. Functions for other Triton functions to call.

A program of any of the kernels holds a tile of one side (its *major* side: queries in the forward and dq kernels, keys
in the dk and dv kernel) and walks over the blocks of the other, *minor* side that `lists.py` lists for it. Rows are
those of the pass; `Order` turns a row into a token, and a token into a row.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl


class Arrays(NamedTuple):
    """What kernels know of the op's arrays; a constant of their compilation, as the other bundles here."""

    T: int
    S: int
    HEADS: int
    KV_HEADS: int
    H: int
    HV: int
    D: int  # H and HV, rounded up to powers of two
    DV: int
    SCALE: float
    CAP: float  # 0 for no soft cap
    BATCH: int
    FIRST_HEAD: int  # the pass is for query heads FIRST_HEAD, FIRST_HEAD + HEAD_STEP, ...
    HEAD_STEP: int
    OWN_HEADS: int  # so many of them
    WIDE: bool  # whether places in an array need 64 bits
    SEGMENTED: bool  # whether there are segment ids


class Order(NamedTuple):
    """A row order: ``token = START + sum(coordinate * stride)`` over AXES, as `planning.views.Axis` says."""

    START: int
    AXES: tuple  # none in natural order
    NONE: int  # stands for no token; beyond all of them


class Axis(NamedTuple):
    """One side of a pass: its rows, and how they are cut."""

    ROWS: int
    ORDER: Order
    BLOCK: int  # rows of a block of the lists
    TILE: int  # rows of a tile, a power of two
    PARTS: int  # tiles in a block
    PACK: int  # query heads of a key head whose vectors at a token are neighbouring rows of one tile; 1 on the key side
    GATHERED: bool  # whether an entry of the lists is a single row, so that a tile is made of many entries


class Walk(NamedTuple):
    """The lists of a pass."""

    BATCHES: int  # lists by batch entry, and by head
    HEADS: int
    GROUP: int  # neighbouring query heads that share a list
    ANY_FREE: bool
    ANY_MASKED: bool
    CHOSEN: int  # queries in a part of a block that chose for itself; 0 if none did


class Work(NamedTuple):
    """What the programs of a launch do."""

    BLOCKS: int  # of the major side
    ORDERED: bool  # whether ``work`` says in which order to begin jobs
    PIECES: bool  # whether programs walk over pieces of lists, each with a result of its own, and not over whole ones
    MERGED: bool  # whether ``pieces`` says whose pieces are to be put together
    BATCHES: int  # of ``work`` and ``pieces``, if there are pieces


class Rows(NamedTuple):
    """Where results are: those of a launch, or those of earlier passes."""

    GIVEN: bool
    BY_TOKEN: bool
    ROWS: int
    ORDER: Order  # if they lie by row


@triton.jit
def zeros(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """A tile of zeros."""
    return tl.zeros((ROWS, SIZE), tl.float32)


@triton.jit
def full(ROWS: tl.constexpr, VALUE: tl.constexpr):
    """A row of a number."""
    return tl.full((ROWS,), VALUE, tl.float32)


@triton.jit
def job_of(work, pieces, b, W: tl.constexpr, PARTS: tl.constexpr, JOBS: tl.constexpr):
    """What this program does: (item, job, tile of its block, first step, end of the steps, first piece, their end).

    A job is a head of the pass times BLOCKS plus a block. Steps count through its lists one after the other.
    """
    item, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    job, begin, end, piece, last_piece = item, item * 0, item * 0 + 2147483647, item * 0, item * 0
    if W.PIECES:
        at = work + (item * W.BATCHES + b % W.BATCHES) * 3
        job, begin, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    elif W.ORDERED:
        job = tl.load(work + item * W.BATCHES + b % W.BATCHES)
    if W.MERGED:
        at = pieces + ((b % W.BATCHES) * JOBS + job) * 2
        piece, last_piece = tl.load(at), tl.load(at + 1)
        end = tl.where(last_piece > piece, 0, end)
    return item, job, part, begin, end, piece, last_piece


@triton.jit
def list_of(spans, b, head, block, X: tl.constexpr, L: tl.constexpr, W: tl.constexpr):
    """The list of a query head and a major block: (first entry, steps over free ones, all steps, number of entries)."""
    line = ((b % L.BATCHES) * L.HEADS + head // L.GROUP % L.HEADS) * W.BLOCKS + block
    first = tl.load(spans + line * 3)
    free, count = tl.load(spans + line * 3 + 1) - first, tl.load(spans + line * 3 + 2) - first
    if X.GATHERED:  # a tile of which only some entries are free is not
        return first, free * X.PACK // X.TILE, tl.cdiv(count * X.PACK, X.TILE), count
    else:
        return first, free * X.PARTS, count * X.PARTS, count


@triton.jit
def share_of(begin, end, passed, free, count):
    """The steps from begin to end that fall among ``count`` ones which come after ``passed`` others.

    (The first of them, the first that is not among the ``free`` ones, their end).
    """
    low, high = tl.minimum(tl.maximum(begin - passed, 0), count), tl.minimum(tl.maximum(end - passed, 0), count)
    return low, tl.minimum(tl.maximum(free, low), high), high


@triton.jit
def rows_of(lists, step, count, X: tl.constexpr):
    """The minor rows of a step: (entry, tile of its block, places in the block, rows, whether there are such).

    Of gathered rows each has an entry, and places count from the begin of the list, which has ``count`` entries.
    """
    column = tl.arange(0, X.TILE)
    if X.GATHERED:
        place = step * X.TILE + column
        entry = tl.minimum(place // X.PACK, count - 1)
        return entry, 0, place, tl.load(lists[0] + entry), place < count * X.PACK
    else:
        entry, part = step // X.PARTS, step % X.PARTS
        place = part * X.TILE + column
        row = tl.load(lists[0] + entry) * X.BLOCK + place // X.PACK
        return entry, part, place, row, (row < X.ROWS) & (place < X.BLOCK * X.PACK)


@triton.jit
def token_of(row, X: tl.constexpr):
    """The token of each row of an `Axis`."""
    if len(X.ORDER.AXES) == 0:
        return row
    else:
        token = row * 0
        for i in tl.static_range(len(X.ORDER.AXES)):
            coordinate = _digits(row, X, i, False) - X.ORDER.AXES[i].phase
            token += coordinate * X.ORDER.AXES[i].stride
            if X.ORDER.AXES[i].checked:
                token = tl.where(coordinate < X.ORDER.AXES[i].kept, token, X.ORDER.NONE)
            if X.ORDER.AXES[i].phase > 0:
                token = tl.where(coordinate >= 0, token, X.ORDER.NONE)
        return token + X.ORDER.START


@triton.jit
def row_of(token, exists, R: tl.constexpr):
    """(row, whether there is one) of each token in `Rows`."""
    if R.BY_TOKEN:
        return token, exists
    else:
        place, row, exists = token - R.ORDER.START, token * 0, exists & (token >= R.ORDER.START)
        for i in tl.static_range(len(R.ORDER.AXES)):
            coordinate = place // R.ORDER.AXES[i].stride
            if R.ORDER.AXES[i].length > 0:
                coordinate = coordinate % R.ORDER.AXES[i].length
            exists = exists & (coordinate < R.ORDER.AXES[i].kept)
            row += _digits(coordinate + R.ORDER.AXES[i].phase, R, i, True)
        return row, exists


@triton.jit
def _digits(x, X: tl.constexpr, AXIS: tl.constexpr, TO_ROW: tl.constexpr):
    """What the digits (rows, size, step) of an axis make of rows: its place; or of places: rows."""
    # Looked up from the outermost bundle: Triton 3.6 takes tuples for constants in the arguments of a kernel only.
    total = x * 0
    for i in tl.static_range(len(X.ORDER.AXES[AXIS].digits)):
        digit = x // X.ORDER.AXES[AXIS].digits[i][2 if TO_ROW else 0]
        if X.ORDER.AXES[AXIS].digits[i][1] > 0:
            digit = digit % X.ORDER.AXES[AXIS].digits[i][1]
        total += digit * X.ORDER.AXES[AXIS].digits[i][0 if TO_ROW else 2]
    return total


@triton.jit
def addresses(base, token, STRIDE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Pointers [rows, SIZE] to the vectors of tokens, STRIDE elements apart."""
    if WIDE:
        token = token.to(tl.int64)
    return base + token[:, None] * STRIDE + tl.arange(0, SIZE)[None, :]


@triton.jit
def load_rows(pointers, exists, LENGTH: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Loads vectors of LENGTH elements, padded with zeros to SIZE; rows that do not exist are 0 if MASKED."""
    if MASKED:
        if LENGTH == SIZE:
            return tl.load(pointers, mask=exists[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=exists[:, None] & (tl.arange(0, SIZE) < LENGTH)[None, :], other=0.0)
    elif LENGTH == SIZE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(tl.arange(0, SIZE) < LENGTH)[None, :], other=0.0)


@triton.jit
def store_rows(pointers, values, exists, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """Stores vectors of LENGTH elements in the dtype of their destination."""
    mask = exists[:, None] & (tl.arange(0, SIZE) < LENGTH)[None, :]
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def may_attend(lists, slot, part, row, MAJOR: tl.constexpr, MINOR: tl.constexpr):
    """The mask tile [rows, MINOR.TILE] of an entry: bits of words, which hold the minor rows of each major one."""
    if MINOR.GATHERED:
        return _may_attend_gathered(lists, slot, row, MAJOR)
    else:
        return _may_attend_block(lists, slot, part, row, MAJOR, MINOR)


@triton.jit
def _may_attend_gathered(lists, slot, row, MAJOR: tl.constexpr):
    """Of minor rows with an entry each: the tile of an entry is a row of words, for the major rows."""
    bits = lists[3] + (tl.load(lists[1] + slot).to(tl.int64) + 1) * (MAJOR.PARTS * MAJOR.TILE // 32)
    word = tl.load(bits)[None, :]
    for i in tl.static_range(1, MAJOR.TILE // 32):
        word = tl.where(row[:, None] < i * 32, word, tl.load(bits + i)[None, :])
    return ((word >> (row & 31)[:, None]) & 1) != 0


@triton.jit
def _may_attend_block(lists, slot, part, row, MAJOR: tl.constexpr, MINOR: tl.constexpr):
    words: tl.constexpr = tl.constexpr(1) if MINOR.PACK > 1 else MINOR.PARTS * MINOR.TILE // 32
    tile = tl.load(lists[1] + slot).to(tl.int64) + 1  # the first lets everything pass
    bits = lists[3] + tile * (MAJOR.PARTS * MAJOR.TILE // MAJOR.PACK * words) + row // MAJOR.PACK * words
    column = tl.arange(0, MINOR.TILE)
    if MINOR.PACK > 1:
        query = (part * MINOR.TILE + column) // MINOR.PACK & 31  # rows beyond the block have any bit
        return ((tl.load(bits)[:, None] >> query[None, :]) & 1) != 0
    bits += part * (MINOR.TILE // 32)
    word = tl.load(bits)[:, None]
    if MINOR.TILE > 32:
        word = tl.where(column[None, :] < 32, word, tl.load(bits + 1)[:, None])
    if MINOR.TILE > 64:
        third, fourth = tl.load(bits + 2)[:, None], tl.load(bits + 3)[:, None]
        word = tl.where(column[None, :] < 64, word, tl.where(column[None, :] < 96, third, fourth))
    return ((word >> (column & 31)[None, :]) & 1) != 0


@triton.jit
def chose(lists, slot, row, Q: tl.constexpr, L: tl.constexpr):
    """Whether the queries of rows, counted within their block, chose an entry."""
    return ((tl.load(lists[2] + slot) >> (row // Q.PACK // L.CHOSEN)) & 1) != 0


@triton.jit
def of_heads(base, row, STRIDE: tl.constexpr, Q: tl.constexpr):
    """``base`` of a program's first query head, or for each row that of its head, each STRIDE elements further."""
    if Q.PACK == 1:
        return base
    else:
        return base + row % Q.PACK * STRIDE


@triton.jit
def vectors_of(
    base,
    token,
    row,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    Q: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`addresses` of the vectors of query rows, LENGTH elements each, which lie by token and by head."""
    if Q.PACK == 1:
        return addresses(base, token, STRIDE, SIZE, WIDE)
    else:
        return addresses(base + (row % Q.PACK * LENGTH)[:, None], token, STRIDE, SIZE, WIDE)


@triton.jit
def tanh(x):
    """The hyperbolic tangent, to a few roundings also near 0."""
    square = x * x
    small = -0.05396825396825397 + square * 0.021869488536155203
    small = x * (1 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * small)))
    # exp2 of a large number is infinite, and 2 / infinity is 0, as it should be.
    large = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
    return tl.where(tl.abs(x) < 0.3, small, large)


@triton.jit
def logits(products, A: tl.constexpr):
    """Logits to base 2 of q . k."""
    if A.CAP == 0:
        return products * (A.SCALE * 1.4426950408889634)
    else:
        return tanh(products * (A.SCALE / A.CAP)) * (A.CAP * 1.4426950408889634)
