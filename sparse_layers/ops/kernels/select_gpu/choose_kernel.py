"""Selection of key blocks: kernels that hold the scores of all blocks in registers, and select there.

**One tile of queries a program.** It is for one head, with the scores of all blocks up to the queries' own.

**Selection is a search for a threshold.** The COUNT-th largest score of a row is found by bisection. A round counts the
scores that reach a threshold, and keeps the side with the COUNT-th.

**Thresholds are sort keys: int32 in the order of floats.** Bisecting sort keys ends after 32 rounds. Every other round
bisects floats, which is faster where scores lie close together.

**The last scores are looked up.** Where hardly any is missing, a round tries the next lower score. Equal scores, as of
InfLLM's neighbours that share their best window, have no threshold between them, and bisection would take 32 rounds.

**Selected blocks are bits of words.** A round stores the lowest bit of each word, in any order, until no bit is left.

A program, with reach(x) the number of scores that are x or larger::

    scores     -inf where a block may not be selected, inf where it must be
    interval   reach(low) >= COUNT > reach(high)
    a round    middle = half of the keys, half of the numbers, or the next score below high
               low = middle if reach(middle) >= COUNT, else high = middle
    end        reach(low) == COUNT, or no key between low and high: equal scores, of which the first blocks count
    store      scores >= low -> bits -> ids, then -1
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu.tiles import zeros

# Up to this number, missing scores are found one by one.
FEW = tl.constexpr(2)


class SelectionConstants(NamedTuple):
    """Constants of the kernels' compilation."""

    ROWS: int  # queries of a batch entry
    FIRST_ROW: int  # the launch is for queries FIRST_ROW .. FIRST_ROW + NUM_ROWS - 1
    NUM_ROWS: int
    HEADS: int  # with a selection each
    BATCHES: int  # of the positions: 1 or B
    BLOCKS: int  # that have a score
    BLOCK: int  # keys in a block
    COUNT: int  # blocks to select
    FIRST: int  # blocks that are always selected: the first ones, and local ones
    LOCAL: int
    TILE: int  # queries of a tile, a power of two, as are:
    SPAN: int  # blocks of a tile, at least as many as lie up to any query's own
    WORDS: int  # SPAN / 32
    PADDED_COUNT: int  # at least COUNT


class Products(NamedTuple):
    """Sizes of queries and keys, for a kernel that computes the scores."""

    KV_HEADS: int
    H: int
    D: int  # H, rounded up to a multiple of STEP
    STEP: int  # of the products' sums; a power of two


class QueryRows(NamedTuple):
    """The queries of a program."""

    batch: Any
    head: Any
    row: Any  # [TILE]
    exists: Any  # [TILE]
    q_block: Any  # [TILE], the block of the query's position
    first_block: Any  # [TILE], the block of its document's first token


class Interval(NamedTuple):
    """Keys around the threshold of each row, [TILE]."""

    low: Any
    high: Any
    reach_low: Any  # number of scores that reach low, or a bound
    reach_high: Any  # number of scores that reach high


# --- keys, counts and bits -------------------------------------------------------------------------------------------


@triton.jit
def _reorder(x):
    """Turns bits of floats into integers in the order of floats, and back: flips all but the sign of negative ones."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """Returns the float of a key."""
    return _reorder(key).to(tl.float32, bitcast=True)


@triton.jit
def _sort_key(number):
    """Returns the key of a float."""
    return _reorder(number.to(tl.int32, bitcast=True))


@triton.jit
def _by_words(scores, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Reshapes scores to [row, bit, word]: column c of the tile is bit c // WORDS of word c % WORDS.

    A thread of a product's result has all bits of a few words, so that it packs them without any other thread.
    """
    return tl.reshape(scores, (ROWS, 32, WORDS))


@triton.jit
def _count_true(x):
    """Counts by row. Floats are added: of integers, Triton 3.6 makes twice as many instructions."""
    return tl.sum(tl.sum(tl.where(x, 1.0, 0.0), 1), 1).to(tl.int32)


@triton.jit
def _count_bits(word):
    """Counts the bits that are set: in pairs, fours, bytes, then the word."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _any(x):
    """True if an element of x [TILE] is."""
    return tl.max(x.to(tl.int32), 0) > 0


# --- selection -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_rows(positions, doc_starts, C: tl.constexpr):
    """Loads the `QueryRows` of this program."""
    TILES: tl.constexpr = (C.NUM_ROWS + C.TILE - 1) // C.TILE
    batch, head, tile = tl.program_id(1).to(tl.int64), tl.program_id(0) // TILES, tl.program_id(0) % TILES
    row_of_launch = tile * C.TILE + tl.arange(0, C.TILE)
    exists, row = row_of_launch < C.NUM_ROWS, C.FIRST_ROW + row_of_launch
    offset = (batch % C.BATCHES) * C.ROWS + row
    q_block = tl.load(positions + offset, mask=exists, other=0) // C.BLOCK
    first_block = tl.load(doc_starts + offset, mask=exists, other=0) // C.BLOCK
    return QueryRows(batch, head, row, exists, q_block, first_block)


@triton.jit
def _blocks_of_columns(C: tl.constexpr):
    """Returns the blocks of a tile's columns, by bit and word."""
    bit, word = tl.arange(0, 32), tl.arange(0, C.WORDS)
    return bit[None, :, None] * C.WORDS + word[None, None, :]


@triton.jit
def _bisect(scores, low, high, reach_low, reach_high, C: tl.constexpr):
    """Narrows an interval until COUNT scores reach low, or no key is between low and high."""
    step, is_open = 0, (reach_low > C.COUNT) & (reach_high < C.COUNT) & (low < high - 1)
    while _any(is_open):
        half = (low & high) + ((low ^ high) >> 1)
        if step % 2 == 0:
            half = _sort_key(_float_of(low) * 0.5 + _float_of(high) * 0.5)
        middle = tl.maximum(tl.minimum(half, high - 1), low + 1)
        # Where hardly any are missing, the next one below: of equal ones, bisection would take 32 rounds.
        few = tl.max((is_open & (C.COUNT - reach_high > FEW)).to(tl.int32), 0) == 0
        if few:
            below = tl.where(scores < _float_of(high)[:, None, None], scores, float("-inf"))
            middle = tl.maximum(_sort_key(tl.max(tl.max(below, 1), 1)), low)
        reach = _count_true(scores >= _float_of(middle)[:, None, None])
        up, down = is_open & (reach >= C.COUNT), is_open & (reach < C.COUNT)
        low, reach_low = tl.where(up, middle, low), tl.where(up, reach, reach_low)
        high, reach_high = tl.where(down, middle, high), tl.where(down, reach, reach_high)
        is_open = is_open & (reach_low > C.COUNT) & (low < high - 1) & ~(up & few)
        step += 1
    return Interval(low, high, reach_low, reach_high)


@triton.jit
def _drop_last_equals(scores, block, low, interval, C: tl.constexpr):
    """Drops the last of equal scores from low to high, where more than COUNT scores reach low."""
    tied = (interval.reach_low > C.COUNT) & (interval.reach_high < C.COUNT)
    if _any(tied):
        above, below = _float_of(interval.high)[:, None, None], _float_of(low)[:, None, None]
        equal = (scores >= below) & (scores < above)
        first, final = tl.where(equal, block, C.SPAN - 1), tl.where(equal, block, 0)
        # Blocks before which few enough lie, and too many: one is missing at least, and all may be few enough.
        least, most = tl.min(tl.min(first, 1), 1) + 1, tl.max(tl.max(final, 1), 1) + 2
        while tl.max((most - least).to(tl.int32), 0) > 1:
            middle = (least + most) // 2
            selected = (scores >= above) | ((scores >= below) & (block < middle[:, None, None]))
            fits = _count_true(selected) <= C.COUNT
            least, most = tl.where(fits, middle, least), tl.where(fits, most, middle)
        end = tl.where(interval.reach_low > C.COUNT, least, C.SPAN)[:, None, None]
        scores = tl.where((scores >= above) | (block < end), scores, float("-inf"))
    return scores


@triton.jit
def _store_ids(ids, selected, rows, C: tl.constexpr):
    """Stores the ids of selected blocks, then -1."""
    words = tl.sum(tl.where(selected, 1 << tl.arange(0, 32)[None, :, None], 0), 1)  # [TILE, WORDS]
    ones, word = _count_bits(words), tl.arange(0, C.WORDS)[None, :]
    total, position = tl.sum(ones, 1)[:, None], tl.cumsum(ones, 1) - ones
    base = ids + ((rows.batch * C.NUM_ROWS + rows.row - C.FIRST_ROW) * C.HEADS + rows.head)[:, None] * C.COUNT
    while tl.max(tl.max((words != 0).to(tl.int32), 1), 0) > 0:  # the lowest bit of each word, as long as any has one
        bit = _count_bits((words & -words) - 1)
        tl.store(base + position, bit * C.WORDS + word, mask=(words != 0) & rows.exists[:, None])
        words, position = words & (words - 1), position + 1
    rest = tl.arange(0, C.PADDED_COUNT)[None, :]
    tl.store(base + rest, (total + rest) * 0 - 1, mask=(rest >= total) & (rest < C.COUNT) & rows.exists[:, None])


@triton.jit
def _select_blocks(scores, ids, rows, C: tl.constexpr):
    """Selects blocks by scores [TILE, 32, WORDS], and stores their ids in any order, then -1."""
    q_block, first_block = rows.q_block, rows.first_block
    block, last, lowest = _blocks_of_columns(C), q_block[:, None, None], first_block[:, None, None]
    may = (block >= lowest) & (block <= last)
    must = block > last - C.LOCAL
    if C.FIRST > 0:
        must = must | (block < lowest + C.FIRST)
    # NaN counts as -inf. An infinite score must not stand above the blocks that are always selected.
    scores = tl.where(may & (scores > float("-inf")), tl.minimum(scores, 3.4028232635611926e38), float("-inf"))
    largest = tl.max(scores, 1)  # [TILE, WORDS], of each word
    scores = tl.where(may & must, float("inf"), scores)

    low, top = q_block * 0 - 2139095040, tl.max(largest, 1)  # nothing below the smallest number is selected
    high = tl.where(
        top == 0, 1 << 23, _sort_key(top) + 1
    )  # zeros are equal, and smaller numbers than 2 ** -126 may be, too
    if C.WORDS >= C.COUNT:  # as many scores as there are words reach the smallest of the largest ones
        low = tl.maximum(low, _sort_key(tl.min(largest, 1)))
    reach_low = q_block - first_block + 1  # a bound; the number that reaches high is exact
    reach_high = tl.minimum(reach_low, C.FIRST + C.LOCAL)
    interval = _bisect(scores, low, high, reach_low, reach_high, C)
    # Scores from low to high are not missing, or all selected, or equal: then the first ones are.
    low = tl.where(interval.reach_high < C.COUNT, interval.low, interval.high)
    scores = _drop_last_equals(scores, block, low, interval, C)
    _store_ids(ids, scores >= _float_of(low)[:, None, None], rows, C)


# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def choose_kernel(
    scores,  # float32 [B, ROWS, HEADS, BLOCKS]
    positions,  # int32 [BATCHES, ROWS], positions of the queries
    doc_starts,  # int32 [BATCHES, ROWS], first tokens of their documents
    ids,  # int32 [B, NUM_ROWS, HEADS, COUNT]
    C: tl.constexpr,
):
    """Selects blocks by the scores of an array; grid (heads of tiles, B)."""
    rows = _load_rows(positions, doc_starts, C)
    block = _blocks_of_columns(C)
    has_score = rows.exists[:, None, None] & (block <= rows.q_block[:, None, None]) & (block < C.BLOCKS)
    base = scores + ((rows.batch * C.ROWS + rows.row) * C.HEADS + rows.head)[:, None, None] * C.BLOCKS
    score_tile = tl.load(base + block, mask=has_score, other=float("-inf"))  # [TILE, 32, WORDS]
    _select_blocks(score_tile, ids, rows, C)


@triton.jit
def choose_products_kernel(
    q,  # [B, ROWS, HEADS, H]
    pooled,  # [B, BLOCKS, KV_HEADS, H]
    positions,  # this and all further ones: as in `choose_kernel`
    doc_starts,
    ids,
    C: tl.constexpr,
    P: tl.constexpr,
):
    """Selects blocks by the products of queries and pooled keys; grid as that of `choose_kernel`."""
    rows = _load_rows(positions, doc_starts, C)
    batch, head = rows.batch, rows.head
    block, column = tl.arange(0, C.SPAN), tl.arange(0, P.STEP)
    has_score = block < tl.minimum(tl.max(rows.q_block, 0) + 1, C.BLOCKS)
    queries = q + ((batch * C.ROWS + rows.row) * C.HEADS + head)[:, None] * P.H + column[None, :]
    keys = pooled + (batch * C.BLOCKS * P.KV_HEADS + head // (C.HEADS // P.KV_HEADS)) * P.H
    keys += block[None, :] * (P.KV_HEADS * P.H) + column[:, None]
    scores = zeros(C.TILE, C.SPAN)
    for first in tl.range(0, P.D, P.STEP):
        has_column = first + column < P.H
        q_tile = tl.load(queries + first, mask=rows.exists[:, None] & has_column[None, :], other=0.0)  # [TILE, STEP]
        k_tile = tl.load(keys + first, mask=has_score[None, :] & has_column[:, None], other=0.0)  # [STEP, SPAN]
        scores = tl.dot(q_tile, k_tile, scores, input_precision="ieee")
    scores = tl.where(has_score[None, :], scores, float("-inf"))
    _select_blocks(_by_words(scores, C.TILE, C.WORDS), ids, rows, C)
