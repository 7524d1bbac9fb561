"""Functions and bundles of the Triton kernels: work tiles, rows and tokens, mask tiles, scores.

**A program holds a tile of its outer side.** These are queries in the forward and dq kernels, keys in the others.

**It walks a list of the inner side.** `BlockLists` has a list of inner blocks for each head and outer block. Full
blocks come first.

**A step is one inner tile.** A block has one or more tiles. If the inner side is gathered, an entry is a single row,
and a tile has many entries.

**Rows are those of the pass.** A row order maps a row to its token, and a token to its row.

**Query heads of a key head may be packed (PackGQA).** Then PACK neighbouring vectors of a query tile are heads of one
token.

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


class BiasConstants(NamedTuple):
    """The static part of a bias by distance."""

    EXISTS: bool
    LENGTH: int  # entries of the table of a head, with PADDING; 0 for no table
    CENTER: int  # the index of distance 0
    PADDING: int  # copies of the first entry before it, and of the last one behind it; twice the rows of a tile
    SLOPES: bool  # True if there are slopes
    UNIT: float  # factor by which table and slopes are multiplied: logits to base 2, or what a soft cap takes
    FIXED_POINT: bool  # True if the gradient of the table is summed in integers of 64 bits


class ArrayShapes(NamedTuple):
    """Shapes of the op's arrays, heads of the pass, and the scaling of scores."""

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
    PASS_HEADS: int  # number of these heads
    WIDE: bool  # True if offsets into an array need 64 bits
    NUM_IDS: int  # ids of a token: 0 for none, 1 for a segment id, 2 for an order id, too
    BIAS: BiasConstants


class RowOrderConstants(NamedTuple):
    """A row order: ``token = START + sum(coordinate * stride)`` over AXES, see `planning.row_orders.Axis`."""

    START: int
    AXES: tuple  # none in natural order
    NONE: int  # the token of rows without one; beyond all tokens


class TilingConstants(NamedTuple):
    """The rows of one side of a pass, and how blocks and tiles divide them; see `RowTiling`."""

    ROWS: int
    ORDER: RowOrderConstants
    BLOCK: int  # rows of a block of the lists
    TILE: int  # vectors of a tile, a power of two
    TILES: int  # tiles in a block
    PACK: int  # query heads of a key head whose vectors are neighbours in a tile; 1 for keys
    GATHERED: bool  # True if an entry of the lists is a single row, so that a tile has many entries
    # A bias counts distances by positions: FIRST_POSITION + sum(token // tokens % size * step) over POSITION_DIGITS
    # (tokens, size, step), without the remainder where size is 0. There are none if FIRST_POSITION + token is meant.
    FIRST_POSITION: int
    POSITION_DIGITS: tuple


class BlockListShapes(NamedTuple):
    """Shapes of the block lists of a pass."""

    BATCHES: int  # batch entries and heads with lists
    HEADS: int
    HEADS_PER_LIST: int  # neighbouring query heads that share a list
    ANY_FULL: bool
    ANY_PARTIAL: bool
    GRANULARITY: int  # neighbouring queries that select blocks together; 0 without a selection


class WorkSchedule(NamedTuple):
    """Work tiles of a launch: their number, order and splits."""

    BLOCKS: int  # of the outer side
    ORDERED: bool  # True if ``work_tiles`` orders the work tiles
    SPLITS: bool  # True if each program computes a split and stores its own result
    MERGED: bool  # True if programs merge the results of splits of an earlier launch, see ``splits``
    BATCHES: int  # of ``work_tiles`` and ``splits``


class ResultRows(NamedTuple):
    """Rows and order of results, those of this launch or of earlier passes."""

    EXISTS: bool  # False if there are no earlier results
    BY_TOKEN: bool  # True if they lie by token, else by row
    ROWS: int  # length of their axis of tokens or rows
    ORDER: RowOrderConstants  # if they lie by row


# --- pointers and integers of a program ------------------------------------------------------------------------------


class BlockListPointers(NamedTuple):
    """Pointers to `BlockLists`, to the bits of mask tiles, and to ids."""

    spans: Any
    entries: Any
    mask_tiles: Any
    active_query_groups: Any
    mask_bits: Any
    q_ids: Any
    kv_ids: Any


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
    """The outer rows of a program, [TILE] each."""

    row_in_block: Any
    row: Any
    token: Any
    exists: Any


class TokenIds(NamedTuple):
    """The ids of the tokens of a tile, one vector each."""

    segment: Any
    order: Any  # a key is visible if its order id is at most that of the query


class Span(NamedTuple):
    """The span of a list."""

    first_entry: Any
    num_full_steps: Any  # steps of full blocks, which come first
    num_steps: Any
    num_entries: Any


class StepRows(NamedTuple):
    """The inner rows of a step, [TILE] each; of gathered rows ``entry``, too."""

    entry: Any  # index of the entry in the list
    block: Any  # number of the block; of gathered rows 0
    tile: Any  # index of the tile in the block
    row_in_block: Any  # of gathered rows: from the beginning of the list
    row: Any
    exists: Any


@triton.jit
def zeros(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Returns a tile of zeros."""
    return tl.zeros((ROWS, SIZE), tl.float32)


@triton.jit
def full(ROWS: tl.constexpr, VALUE: tl.constexpr):
    """Returns a vector that repeats one number."""
    return tl.full((ROWS,), VALUE, tl.float32)


# --- work tiles and steps --------------------------------------------------------------------------------------------


@triton.jit
def load_work_tile(schedule, batch, X: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr, W: tl.constexpr):
    """Loads the `WorkTile` of this program: a block of X, for PACK of HEADS heads.

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
    """Loads the `Span` of the list of a query head and an outer block."""
    line = ((batch % L.BATCHES) * L.HEADS + head // L.HEADS_PER_LIST % L.HEADS) * W.BLOCKS + block
    first = tl.load(spans + line * 3)
    num_full, num_entries = tl.load(spans + line * 3 + 1) - first, tl.load(spans + line * 3 + 2) - first
    if X.GATHERED:  # a tile with any partial entry is partial
        return Span(first, num_full * X.PACK // X.TILE, tl.cdiv(num_entries * X.PACK, X.TILE), num_entries)
    else:
        return Span(first, num_full * X.TILES, num_entries * X.TILES, num_entries)


@triton.jit
def clip_steps(work_tile, steps_before, span):
    """Returns the steps of a list that belong to a work tile: (first, first partial, end).

    ``steps_before`` is the number of steps in the earlier lists of the work tile.
    """
    first = tl.minimum(tl.maximum(work_tile.first_step - steps_before, 0), span.num_steps)
    end = tl.minimum(tl.maximum(work_tile.end_step - steps_before, 0), span.num_steps)
    return first, tl.minimum(tl.maximum(span.num_full_steps, first), end), end


@triton.jit
def move_to_list(lists, span):
    """Moves pointers of entries to the first entry of a list."""
    first = span.first_entry
    return BlockListPointers(
        lists.spans,
        lists.entries + first,
        lists.mask_tiles + first,
        lists.active_query_groups + first,
        lists.mask_bits,
        lists.q_ids,
        lists.kv_ids,
    )


@triton.jit
def load_step_rows(lists, step, num_entries, X: tl.constexpr):
    """Loads the `StepRows` of a step."""
    column = tl.arange(0, X.TILE)
    if X.GATHERED:
        position = step * X.TILE + column
        entry = tl.minimum(position // X.PACK, num_entries - 1)
        return StepRows(entry, 0, 0, position, tl.load(lists.entries + entry), position < num_entries * X.PACK)
    else:
        entry, tile = step // X.TILES, step % X.TILES
        row_in_block = tile * X.TILE + column
        block = tl.load(lists.entries + entry)
        row = block * X.BLOCK + row_in_block // X.PACK
        exists = (row < X.ROWS) & (row_in_block < X.BLOCK * X.PACK)
        return StepRows(entry, block, tile, row_in_block, row, exists)


# --- rows and tokens -------------------------------------------------------------------------------------------------


@triton.jit
def rows_of_tile(work_tile, X: tl.constexpr, LENGTH: tl.constexpr):
    """Returns the `TileRows` of a work tile; the sequence has LENGTH tokens."""
    row_in_block = work_tile.tile * X.TILE + tl.arange(0, X.TILE)
    row = work_tile.block * X.BLOCK + row_in_block // X.PACK
    token = token_of(row, X)
    exists = (row_in_block < X.BLOCK * X.PACK) & (row < X.ROWS) & (token < LENGTH)
    return TileRows(row_in_block, row, token, exists)


@triton.jit
def token_of(row, X: tl.constexpr):
    """Returns the token of each row of a side X."""
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
    """Returns (row of each token in results R, True where it exists)."""
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
    """Returns coordinates of rows on an axis, by its digits (rows, size, step); rows of coordinates if TO_ROW."""
    # AXES[AXIS] is looked up here: Triton 3.6 takes tuples as constants in the arguments of a kernel only.
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
    """Returns pointers [rows, SIZE] to the vectors of tokens, STRIDE elements apart."""
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
    """Adds STRIDE to ``base`` for each query head after a program's first one; [rows] if heads are packed."""
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
    """Returns `addresses` of query vectors of LENGTH elements; heads of a token are neighbours."""
    if Q.PACK == 1:
        return addresses(base, token, STRIDE, SIZE, WIDE)
    else:
        return addresses(base + (row_in_block % Q.PACK * LENGTH)[:, None], token, STRIDE, SIZE, WIDE)


# --- masks -----------------------------------------------------------------------------------------------------------


@triton.jit
def load_mask(lists, entry, tile, row_in_block, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Loads the mask [rows, INNER.TILE] of an entry; a row of a mask tile has the bits of all inner rows."""
    if INNER.GATHERED:
        return _load_gathered_mask(lists, entry, row_in_block, OUTER)
    else:
        return _load_block_mask(lists, entry, tile, row_in_block, OUTER, INNER)


@triton.jit
def _load_gathered_mask(lists, entry, row_in_block, OUTER: tl.constexpr):
    """Loads the mask of gathered rows; each has a mask tile of words with the bits of all outer rows."""
    bits = lists.mask_bits + (tl.load(lists.mask_tiles + entry).to(tl.int64) + 1) * (OUTER.TILES * OUTER.TILE // 32)
    word = tl.load(bits)[None, :]
    for i in tl.static_range(1, OUTER.TILE // 32):
        word = tl.where(row_in_block[:, None] < i * 32, word, tl.load(bits + i)[None, :])
    return ((word >> (row_in_block & 31)[:, None]) & 1) != 0


@triton.jit
def _load_block_mask(lists, entry, tile, row_in_block, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Loads the mask of a tile of an inner block."""
    words: tl.constexpr = tl.constexpr(1) if INNER.PACK > 1 else INNER.TILES * INNER.TILE // 32
    mask_tile = tl.load(lists.mask_tiles + entry).to(tl.int64) + 1  # the first one allows every pair
    rows: tl.constexpr = OUTER.TILES * OUTER.TILE // OUTER.PACK
    bits = lists.mask_bits + mask_tile * (rows * words) + row_in_block // OUTER.PACK * words
    column = tl.arange(0, INNER.TILE)
    if INNER.PACK > 1:
        query = (tile * INNER.TILE + column) // INNER.PACK & 31  # the bits of rows beyond the block do not matter
        return ((tl.load(bits)[:, None] >> query[None, :]) & 1) != 0
    bits += tile * (INNER.TILE // 32)
    word = tl.load(bits)[:, None]
    if INNER.TILE > 32:
        word = tl.where(column[None, :] < 32, word, tl.load(bits + 1)[:, None])
    if INNER.TILE > 64:
        third, fourth = tl.load(bits + 2)[:, None], tl.load(bits + 3)[:, None]
        word = tl.where(column[None, :] < 64, word, tl.where(column[None, :] < 96, third, fourth))
    return ((word >> (column & 31)[None, :]) & 1) != 0


@triton.jit
def has_selected(lists, entry, row_in_block, Q: tl.constexpr, L: tl.constexpr):
    """True where the queries of rows selected an entry; bit i is that of queries GRANULARITY * i and following."""
    return ((tl.load(lists.active_query_groups + entry) >> (row_in_block // Q.PACK // L.GRANULARITY)) & 1) != 0


@triton.jit
def load_ids(ids, token, exists, LENGTH: tl.constexpr, PADDING: tl.constexpr, A: tl.constexpr):
    """Loads the `TokenIds` of a batch entry's tokens, [rows]; the segment of rows that do not exist is PADDING.

    ``ids`` points to the segment ids of LENGTH tokens, then to their order ids. Without ids, tokens stand in for them.
    """
    segment, order = token, token
    if A.NUM_IDS > 0:
        segment = tl.load(ids + token, mask=exists, other=PADDING)
    if A.NUM_IDS > 1:
        order = tl.load(ids + LENGTH + token, mask=exists, other=0)
    return TokenIds(segment, order)


@triton.jit
def ids_allow(q_ids, kv_ids, Q_AXIS: tl.constexpr, A: tl.constexpr):
    """True where a key has the query's segment, and at most its order id: [queries, keys], or Q_AXIS 1 transposes."""
    KV_AXIS: tl.constexpr = 1 - Q_AXIS
    allowed = tl.expand_dims(q_ids.segment, KV_AXIS) == tl.expand_dims(kv_ids.segment, Q_AXIS)
    if A.NUM_IDS > 1:
        allowed = allowed & (tl.expand_dims(kv_ids.order, Q_AXIS) <= tl.expand_dims(q_ids.order, KV_AXIS))
    return allowed


@triton.jit
def may_attend(
    lists,
    kv_rows,  # `StepRows`
    kv_token,
    kv_exists,
    q_row_in_block,
    q_ids,  # `TokenIds`
    A: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    L: tl.constexpr,
):
    """True where a query of a program's tile may attend to a key of a partial step, [Q.TILE, KV.TILE]."""
    allowed = load_mask(lists, kv_rows.entry, kv_rows.tile, q_row_in_block, Q, KV)
    if L.GRANULARITY > 0:
        allowed = allowed & has_selected(lists, kv_rows.entry, q_row_in_block, Q, L)[:, None]
    if A.NUM_IDS > 0:
        kv_ids = load_ids(lists.kv_ids, kv_token, kv_exists, A.S, -1, A)
        allowed = allowed & ids_allow(q_ids, kv_ids, 0, A)
    return allowed


# --- scores ----------------------------------------------------------------------------------------------------------


@triton.jit
def tanh(x):
    """Computes tanh(x), accurate to a few roundings also near 0."""
    square = x * x
    small = -0.05396825396825397 + square * 0.021869488536155203
    small = x * (1 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * small)))
    # exp2 of a large number is infinite, and 2 / infinity is 0, as it should be.
    large = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
    return tl.where(tl.abs(x) < 0.3, small, large)


@triton.jit
def logits(products, A: tl.constexpr):
    """Turns q . k into logits to base 2."""
    if A.CAP == 0:
        return products * (A.SCALE * LOG2_E)
    else:
        return tanh(products * (A.SCALE / A.CAP)) * (A.CAP * LOG2_E)
