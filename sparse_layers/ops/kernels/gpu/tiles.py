"""Functions and bundles of the Triton kernels: work tiles, rows and tokens, mask tiles, scores.

**A program holds a tile of its major side.** These are queries in the forward and dq kernels, keys in the others.

**It walks over the minor side.** `BlockLists` has a list of minor blocks for each head and major block. Entries without
masked pairs come first.

**A step is one minor tile.** A block has one or more tiles. If the minor side is gathered, an entry is a single row,
and a tile has many entries.

**Rows are those of the pass.** `Order` maps a row to its token, and a token to its row.

**Query heads of a key head may be packed.** Then PACK neighbouring rows of a query tile are heads of one token.

A block of 2 tiles of 4 rows, for queries with PACK = 2; row_in_block counts its vectors::

    tile                    0                         1
    row_in_block            0     1     2     3       4     5     6     7
    row                     r     r     r+1   r+1     r+2   r+2   r+3   r+3
    query head              h     h+1   h     h+1     h     h+1   h     h+1
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# --- constants of a kernel's compilation -----------------------------------------------------------------------------


class Arrays(NamedTuple):
    """Sizes of the op's arrays, and the scaling of scores."""

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
    OWN_HEADS: int  # number of these heads
    WIDE: bool  # whether offsets into an array need 64 bits
    SEGMENTED: bool  # whether there are segment ids


class Order(NamedTuple):
    """A row order: ``token = START + sum(coordinate * stride)`` over AXES, see `planning.row_orders.Axis`."""

    START: int
    AXES: tuple  # none in natural order
    NONE: int  # stands for no token; beyond all of them


class Axis(NamedTuple):
    """One side of a pass: its rows, and how they are cut into blocks and tiles."""

    ROWS: int
    ORDER: Order
    BLOCK: int  # rows of a block of the lists
    TILE: int  # vectors of a tile, a power of two
    TILES: int  # tiles in a block
    PACK: int  # query heads of a key head whose vectors at a token are neighbours in a tile; 1 on the key side
    GATHERED: bool  # whether an entry of the lists is a single row, so that a tile has many entries


class Walk(NamedTuple):
    """The lists of a pass."""

    BATCHES: int  # lists by batch entry, and by head
    HEADS: int
    GROUP: int  # neighbouring query heads that share a list
    ANY_FREE: bool
    ANY_MASKED: bool
    CHOSEN: int  # neighbouring queries of a block that select key blocks together; 0 without a selection


class Work(NamedTuple):
    """The schedule of a launch."""

    BLOCKS: int  # of the major side
    ORDERED: bool  # whether ``work_tiles`` is an order in which work tiles begin
    SPLITS: bool  # whether programs compute splits of lists, each with a result of its own
    MERGED: bool  # whether results of an earlier launch's splits are merged, as ``splits`` says
    BATCHES: int  # of ``work_tiles`` and ``splits``


class Rows(NamedTuple):
    """The rows of results: those of this launch, or of earlier passes."""

    EXISTS: bool
    BY_TOKEN: bool
    ROWS: int
    ORDER: Order  # if they lie by row


# --- pointers and integers of a program ------------------------------------------------------------------------------


class BlockListPointers(NamedTuple):
    """Pointers to `BlockLists`, to the bits of mask tiles, and to segment ids."""

    spans: Any
    entries: Any
    mask_tiles: Any
    active_rows_mask: Any
    mask_bits: Any
    q_segments: Any
    kv_segments: Any


class Schedule(NamedTuple):
    """Pointers to the work tiles of all programs, and to the splits of each; see `load_work_tile`."""

    work_tiles: Any
    splits: Any


class WorkTile(NamedTuple):
    """The work of one program: a tile of a block, and a range of steps."""

    split: Any  # its entry in the schedule; if lists are split, the number of its split
    head: Any  # the first one, of the pass' query heads or of the key heads
    block: Any
    tile: Any  # of the block
    first_step: Any
    end_step: Any
    first_split: Any  # splits whose results are merged
    end_split: Any


class TileRows(NamedTuple):
    """The major rows of a program, [TILE] each."""

    row_in_block: Any
    row: Any
    token: Any
    exists: Any


class Span(NamedTuple):
    """A list."""

    first_entry: Any
    num_free_steps: Any  # steps without masked pairs, which come first
    num_steps: Any
    num_entries: Any


class StepRows(NamedTuple):
    """The minor rows of a step, [TILE] each; of gathered rows ``entry``, too."""

    entry: Any  # which entry of the list
    tile: Any  # which tile of the block
    row_in_block: Any  # of gathered rows: from the beginning of the list
    row: Any
    exists: Any


@triton.jit
def zeros(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """A tile of zeros."""
    return tl.zeros((ROWS, SIZE), tl.float32)


@triton.jit
def full(ROWS: tl.constexpr, VALUE: tl.constexpr):
    """A vector of one number."""
    return tl.full((ROWS,), VALUE, tl.float32)


# --- work tiles and steps --------------------------------------------------------------------------------------------


@triton.jit
def load_work_tile(schedule, batch, X: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr, W: tl.constexpr):
    """The `WorkTile` of this program, of a block of X and of PACK of the HEADS heads.

    Programs for the tiles of a block share an entry of ``work_tiles``: a number, which is a pack of heads times BLOCKS
    plus a block, and with SPLITS a range of steps. Steps count through all lists of a work tile.
    """
    split, tile = tl.program_id(0) // X.TILES, tl.program_id(0) % X.TILES
    number, first_step, end_step = split, split * 0, split * 0 + 2147483647
    first_split, end_split = split * 0, split * 0
    if W.SPLITS:
        pointer = schedule.work_tiles + (split * W.BATCHES + batch % W.BATCHES) * 3
        number, first_step, end_step = tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2)
    elif W.ORDERED:
        number = tl.load(schedule.work_tiles + split * W.BATCHES + batch % W.BATCHES)
    if W.MERGED:
        pointer = schedule.splits + ((batch % W.BATCHES) * (HEADS // PACK * W.BLOCKS) + number) * 2
        first_split, end_split = tl.load(pointer), tl.load(pointer + 1)
        end_step = tl.where(end_split > first_split, 0, end_step)
    head, block = number // W.BLOCKS * PACK, number % W.BLOCKS
    return WorkTile(split, head, block, tile, first_step, end_step, first_split, end_split)


@triton.jit
def load_span(spans, batch, head, block, X: tl.constexpr, L: tl.constexpr, W: tl.constexpr):
    """The list of a query head and a major block."""
    line = ((batch % L.BATCHES) * L.HEADS + head // L.GROUP % L.HEADS) * W.BLOCKS + block
    first = tl.load(spans + line * 3)
    num_free, num_entries = tl.load(spans + line * 3 + 1) - first, tl.load(spans + line * 3 + 2) - first
    if X.GATHERED:  # a tile of which only some entries are free is masked
        return Span(first, num_free * X.PACK // X.TILE, tl.cdiv(num_entries * X.PACK, X.TILE), num_entries)
    else:
        return Span(first, num_free * X.TILES, num_entries * X.TILES, num_entries)


@triton.jit
def clip_steps(work_tile, steps_before, span):
    """The steps of a list that are a work tile's: (first, first masked, end).

    ``steps_before`` are those of the work tile's lists before this one.
    """
    first = tl.minimum(tl.maximum(work_tile.first_step - steps_before, 0), span.num_steps)
    end = tl.minimum(tl.maximum(work_tile.end_step - steps_before, 0), span.num_steps)
    return first, tl.minimum(tl.maximum(span.num_free_steps, first), end), end


@triton.jit
def move_to_list(lists, span):
    """Moves the pointers to entries to the first one of a list."""
    first = span.first_entry
    return BlockListPointers(
        lists.spans,
        lists.entries + first,
        lists.mask_tiles + first,
        lists.active_rows_mask + first,
        lists.mask_bits,
        lists.q_segments,
        lists.kv_segments,
    )


@triton.jit
def load_step_rows(lists, step, num_entries, X: tl.constexpr):
    """The minor rows of a step."""
    column = tl.arange(0, X.TILE)
    if X.GATHERED:
        position = step * X.TILE + column
        entry = tl.minimum(position // X.PACK, num_entries - 1)
        return StepRows(entry, 0, position, tl.load(lists.entries + entry), position < num_entries * X.PACK)
    else:
        entry, tile = step // X.TILES, step % X.TILES
        row_in_block = tile * X.TILE + column
        row = tl.load(lists.entries + entry) * X.BLOCK + row_in_block // X.PACK
        exists = (row < X.ROWS) & (row_in_block < X.BLOCK * X.PACK)
        return StepRows(entry, tile, row_in_block, row, exists)


# --- rows and tokens -------------------------------------------------------------------------------------------------


@triton.jit
def rows_of_tile(work_tile, X: tl.constexpr, LENGTH: tl.constexpr):
    """The major rows of a work tile, of LENGTH tokens."""
    row_in_block = work_tile.tile * X.TILE + tl.arange(0, X.TILE)
    row = work_tile.block * X.BLOCK + row_in_block // X.PACK
    token = token_of(row, X)
    exists = (row_in_block < X.BLOCK * X.PACK) & (row < X.ROWS) & (token < LENGTH)
    return TileRows(row_in_block, row, token, exists)


@triton.jit
def token_of(row, X: tl.constexpr):
    """The token of each row of an `Axis`."""
    if len(X.ORDER.AXES) == 0:
        return row
    else:
        token = row * 0
        for i in tl.static_range(len(X.ORDER.AXES)):
            coordinate = _coordinate_or_row(row, X, i, False) - X.ORDER.AXES[i].phase
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
        offset, row, exists = token - R.ORDER.START, token * 0, exists & (token >= R.ORDER.START)
        for i in tl.static_range(len(R.ORDER.AXES)):
            coordinate = offset // R.ORDER.AXES[i].stride
            if R.ORDER.AXES[i].length > 0:
                coordinate = coordinate % R.ORDER.AXES[i].length
            exists = exists & (coordinate < R.ORDER.AXES[i].kept)
            row += _coordinate_or_row(coordinate + R.ORDER.AXES[i].phase, R, i, True)
        return row, exists


@triton.jit
def _coordinate_or_row(x, X: tl.constexpr, AXIS: tl.constexpr, TO_ROW: tl.constexpr):
    """The coordinates of rows on an axis, by its digits (rows, size, step), or the rows of coordinates if TO_ROW."""
    # Looked up from the outermost bundle: Triton 3.6 takes tuples for constants in the arguments of a kernel only.
    total = x * 0
    for i in tl.static_range(len(X.ORDER.AXES[AXIS].digits)):
        digit = x // X.ORDER.AXES[AXIS].digits[i][2 if TO_ROW else 0]
        if X.ORDER.AXES[AXIS].digits[i][1] > 0:
            digit = digit % X.ORDER.AXES[AXIS].digits[i][1]
        total += digit * X.ORDER.AXES[AXIS].digits[i][0 if TO_ROW else 2]
    return total


# --- loads and stores ------------------------------------------------------------------------------------------------


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
def store_rows(pointers, x, exists, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """Stores vectors of LENGTH elements in the dtype of their destination."""
    mask = exists[:, None] & (tl.arange(0, SIZE) < LENGTH)[None, :]
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def offset_of_head(base, row_in_block, STRIDE: tl.constexpr, Q: tl.constexpr):
    """``base`` of a program's first query head, plus STRIDE for each head after it, [rows] if heads are packed."""
    if Q.PACK == 1:
        return base
    else:
        return base + row_in_block % Q.PACK * STRIDE


@triton.jit
def query_addresses(
    base,
    token,
    row_in_block,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    Q: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`addresses` of query vectors of LENGTH elements, where the heads of a token are neighbours."""
    if Q.PACK == 1:
        return addresses(base, token, STRIDE, SIZE, WIDE)
    else:
        return addresses(base + (row_in_block % Q.PACK * LENGTH)[:, None], token, STRIDE, SIZE, WIDE)


# --- masks -----------------------------------------------------------------------------------------------------------


@triton.jit
def load_mask(lists, entry, tile, row_in_block, MAJOR: tl.constexpr, MINOR: tl.constexpr):
    """The mask [rows, MINOR.TILE] of an entry: mask tiles have for each major row the bits of all minor rows."""
    if MINOR.GATHERED:
        return _load_gathered_mask(lists, entry, row_in_block, MAJOR)
    else:
        return _load_block_mask(lists, entry, tile, row_in_block, MAJOR, MINOR)


@triton.jit
def _load_gathered_mask(lists, entry, row_in_block, MAJOR: tl.constexpr):
    """The mask of minor rows with an entry each: their mask tiles are words with the bits of all major rows."""
    bits = lists.mask_bits + (tl.load(lists.mask_tiles + entry).to(tl.int64) + 1) * (MAJOR.TILES * MAJOR.TILE // 32)
    word = tl.load(bits)[None, :]
    for i in tl.static_range(1, MAJOR.TILE // 32):
        word = tl.where(row_in_block[:, None] < i * 32, word, tl.load(bits + i)[None, :])
    return ((word >> (row_in_block & 31)[:, None]) & 1) != 0


@triton.jit
def _load_block_mask(lists, entry, tile, row_in_block, MAJOR: tl.constexpr, MINOR: tl.constexpr):
    """The mask of a tile of a minor block."""
    words: tl.constexpr = tl.constexpr(1) if MINOR.PACK > 1 else MINOR.TILES * MINOR.TILE // 32
    mask_tile = tl.load(lists.mask_tiles + entry).to(tl.int64) + 1  # the first one allows every pair
    rows: tl.constexpr = MAJOR.TILES * MAJOR.TILE // MAJOR.PACK
    bits = lists.mask_bits + mask_tile * (rows * words) + row_in_block // MAJOR.PACK * words
    column = tl.arange(0, MINOR.TILE)
    if MINOR.PACK > 1:
        query = (tile * MINOR.TILE + column) // MINOR.PACK & 31  # rows beyond the block have any bit
        return ((tl.load(bits)[:, None] >> query[None, :]) & 1) != 0
    bits += tile * (MINOR.TILE // 32)
    word = tl.load(bits)[:, None]
    if MINOR.TILE > 32:
        word = tl.where(column[None, :] < 32, word, tl.load(bits + 1)[:, None])
    if MINOR.TILE > 64:
        third, fourth = tl.load(bits + 2)[:, None], tl.load(bits + 3)[:, None]
        word = tl.where(column[None, :] < 64, word, tl.where(column[None, :] < 96, third, fourth))
    return ((word >> (column & 31)[None, :]) & 1) != 0


@triton.jit
def has_selected(lists, entry, row_in_block, Q: tl.constexpr, L: tl.constexpr):
    """True where the queries of rows selected an entry: bit i is that of queries CHOSEN * i and so on."""
    return ((tl.load(lists.active_rows_mask + entry) >> (row_in_block // Q.PACK // L.CHOSEN)) & 1) != 0


@triton.jit
def may_attend(
    lists,
    kv_rows,  # `StepRows`
    kv_token,
    kv_exists,
    q_row_in_block,
    q_segment,
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
):
    """True where a query of a program's tile may attend to a key of a masked step, [Q.TILE, KV.TILE]."""
    may = load_mask(lists, kv_rows.entry, kv_rows.tile, q_row_in_block, Q, KV)
    if L.CHOSEN > 0:
        may = may & has_selected(lists, kv_rows.entry, q_row_in_block, Q, L)[:, None]
    if A.SEGMENTED:
        kv_segment = tl.load(lists.kv_segments + kv_token, mask=kv_exists, other=-1)
        may = may & (q_segment[:, None] == kv_segment[None, :])
    return may


# --- scores ----------------------------------------------------------------------------------------------------------


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
        return products * (A.SCALE * LOG2_E)
    else:
        return tanh(products * (A.SCALE / A.CAP)) * (A.CAP * LOG2_E)
