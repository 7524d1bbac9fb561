"""Which key blocks each query looks at: kernels that hold the scores of all blocks in registers, and choose there.

A program has a tile of queries of one head. The count-th largest score of a row is found by bisection: how many scores
reach a threshold is counted in registers, until as many do as are wanted. Thresholds are floats as integers in the same
order, so that a step that halves the integers ends in 32; every other step halves the numbers, which is faster where
these lie close together. Where hardly any score is missing, the next lower ones are looked up instead. Several blocks
may have the same score, as InfLLM's neighbours that share their best window: no threshold separates them, and halving
would go through all 32 bits.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import NamedTuple

import triton
import triton.language as tl

from ..gpu.tiles import zeros

# So many scores that are missing are found one by one.
FEW = tl.constexpr(2)


class Choice(NamedTuple):
    """What the kernels know of a choice; a constant of their compilation."""

    ROWS: int  # queries of a batch entry
    FIRST_ROW: int  # the launch is for queries FIRST_ROW .. FIRST_ROW + OWN_ROWS - 1
    OWN_ROWS: int
    HEADS: int  # that choose
    BATCHES: int  # of the positions: 1 or B
    BLOCKS: int  # that have a score
    BLOCK: int  # keys in a block
    COUNT: int  # blocks to choose
    FIRST: int  # blocks that are always chosen: the first ones, and local ones
    LOCAL: int
    TILE: int  # queries of a tile, a power of two, as are:
    SPAN: int  # blocks of a tile, at least as many as lie up to any query's own
    WORDS: int  # SPAN / 32
    PLACES: int  # at least COUNT


class Products(NamedTuple):
    """What a kernel that computes the scores knows of queries and keys."""

    KV_HEADS: int
    H: int
    D: int  # H, rounded up to a multiple of STEP
    STEP: int  # of the products' sums; a power of two


@triton.jit
def _ordered(x):
    """Integers in the order of floats, and back: the bits; of negative ones all but the sign's are turned."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    return _ordered(key).to(tl.float32, bitcast=True)


@triton.jit
def _key(number):
    return _ordered(number.to(tl.int32, bitcast=True))


@triton.jit
def _by_words(scores, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Scores by row, bit and word: the tile's columns are bits of words, column c is bit c // WORDS of word c % WORDS.

    A thread of a product's result has bits of the same few words: to put these together it asks no other.
    """
    return tl.reshape(scores, (ROWS, 32, WORDS))


@triton.jit
def _total(x):
    """How many are true of each row. Floats are added: of integers, Triton 3.6 makes twice as many instructions."""
    return tl.sum(tl.sum(tl.where(x, 1.0, 0.0), 1), 1).to(tl.int32)


@triton.jit
def _ones(word):
    """The number of bits that are set: of pairs, of fours, of bytes, of all."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _rows_of(at, start, C: tl.constexpr):
    """What this program chooses for: (batch entry, head, queries, whether they exist, own block, lowest block)."""
    tiles: tl.constexpr = (C.OWN_ROWS + C.TILE - 1) // C.TILE
    b, head, tile = tl.program_id(1).to(tl.int64), tl.program_id(0) // tiles, tl.program_id(0) % tiles
    within = tile * C.TILE + tl.arange(0, C.TILE)
    exists, row = within < C.OWN_ROWS, C.FIRST_ROW + within
    place = (b % C.BATCHES) * C.ROWS + row
    own = tl.load(at + place, mask=exists, other=0) // C.BLOCK
    return b, head, row, exists, own, tl.load(start + place, mask=exists, other=0) // C.BLOCK


@triton.jit
def _columns(C: tl.constexpr):
    """The blocks of a tile's columns, by bit and word."""
    bit, word = tl.arange(0, 32), tl.arange(0, C.WORDS)
    return bit[None, :, None] * C.WORDS + word[None, None, :]


@triton.jit
def _choose(scores, ids, b, head, row, exists, own, lowest, C: tl.constexpr):
    """Stores the blocks that rows [TILE] choose by scores [TILE, 32, WORDS], in any order, and -1 behind them."""
    block, own_block, lowest_block = _columns(C), own[:, None, None], lowest[:, None, None]
    may = (block >= lowest_block) & (block <= own_block)
    must = block > own_block - C.LOCAL
    if C.FIRST > 0:
        must = must | (block < lowest_block + C.FIRST)
    # No number is not above -inf either. What is infinite must not stand above the blocks that are always chosen.
    scores = tl.where(may & (scores > float("-inf")), tl.minimum(scores, 3.4028232635611926e38), float("-inf"))
    largest = tl.max(scores, 1)  # of each word
    scores = tl.where(may & must, float("inf"), scores)

    low, top = own * 0 - 2139095040, tl.max(largest, 1)  # nothing below the smallest number is chosen
    high = tl.where(top == 0, 1 << 23, _key(top) + 1)  # zeros are equal, and smaller numbers than 2 ** -126 may be, too
    if C.WORDS >= C.COUNT:  # as many scores as there are words reach the smallest of the largest ones
        low = tl.maximum(low, _key(tl.min(largest, 1)))
    reach_low = own - lowest + 1  # at most so many scores reach low, and exactly reach_high reach high
    reach_high = tl.minimum(reach_low, C.FIRST + C.LOCAL)
    step, open = 0, (reach_low > C.COUNT) & (reach_high < C.COUNT) & (low < high - 1)
    while tl.max(open.to(tl.int32), 0) > 0:
        half = (low & high) + ((low ^ high) >> 1)
        if step % 2 == 0:
            half = _key(_number(low) * 0.5 + _number(high) * 0.5)
        middle = tl.maximum(tl.minimum(half, high - 1), low + 1)
        # Where hardly any are missing, the next one below: of equal ones, halving would ask all 32 bits.
        few = tl.max((open & (C.COUNT - reach_high > FEW)).to(tl.int32), 0) == 0
        if few:
            below = tl.where(scores < _number(high)[:, None, None], scores, float("-inf"))
            middle = tl.maximum(_key(tl.max(tl.max(below, 1), 1)), low)
        reach = _total(scores >= _number(middle)[:, None, None])
        up, down = open & (reach >= C.COUNT), open & (reach < C.COUNT)
        low, reach_low = tl.where(up, middle, low), tl.where(up, reach, reach_low)
        high, reach_high = tl.where(down, middle, high), tl.where(down, reach, reach_high)
        open = open & (reach_low > C.COUNT) & (low < high - 1) & ~(up & few)
        step += 1

    # Those from low to high are not missing, or all chosen, or equal: then the first ones are.
    low = tl.where(reach_high < C.COUNT, low, high)
    tied = (reach_low > C.COUNT) & (reach_high < C.COUNT)
    if tl.max(tied.to(tl.int32), 0) > 0:
        above, below = _number(high)[:, None, None], _number(low)[:, None, None]
        equal = (scores >= below) & (scores < above)
        first, final = tl.where(equal, block, C.SPAN - 1), tl.where(equal, block, 0)
        # Blocks before which few enough lie, and too many: one is missing at least, and all may be few enough.
        least, most = tl.min(tl.min(first, 1), 1) + 1, tl.max(tl.max(final, 1), 1) + 2
        while tl.max((most - least).to(tl.int32), 0) > 1:
            middle = (least + most) // 2
            fits = _total((scores >= above) | ((scores >= below) & (block < middle[:, None, None]))) <= C.COUNT
            least, most = tl.where(fits, middle, least), tl.where(fits, most, middle)
        last = tl.where(reach_low > C.COUNT, least, C.SPAN)[:, None, None]
        scores = tl.where((scores >= above) | (block < last), scores, float("-inf"))
    chosen = scores >= _number(low)[:, None, None]
    words = tl.sum(tl.where(chosen, 1 << tl.arange(0, 32)[None, :, None], 0), 1)

    ones, word = _ones(words), tl.arange(0, C.WORDS)[None, :]
    number, place = tl.sum(ones, 1)[:, None], tl.cumsum(ones, 1) - ones
    base = ids + ((b * C.OWN_ROWS + row - C.FIRST_ROW) * C.HEADS + head)[:, None] * C.COUNT
    while tl.max(tl.max((words != 0).to(tl.int32), 1), 0) > 0:  # the lowest bit of each word, as long as any has one
        bit = _ones((words & -words) - 1)
        tl.store(base + place, bit * C.WORDS + word, mask=(words != 0) & exists[:, None])
        words, place = words & (words - 1), place + 1
    rest = tl.arange(0, C.PLACES)[None, :]
    tl.store(base + rest, (number + rest) * 0 - 1, mask=(rest >= number) & (rest < C.COUNT) & exists[:, None])


@triton.jit
def choose_kernel(
    scores,  # float32 [B, ROWS, HEADS, BLOCKS]
    at,  # int32 [BATCHES, ROWS], positions of the queries
    start,  # int32 [BATCHES, ROWS], first tokens of their documents
    ids,  # int32 [B, OWN_ROWS, HEADS, COUNT]
    C: tl.constexpr,
):
    """Chooses by scores that are given; grid (heads of tiles each, B)."""
    b, head, row, exists, own, lowest = _rows_of(at, start, C)
    block = _columns(C)
    wanted = exists[:, None, None] & (block <= own[:, None, None]) & (block < C.BLOCKS)
    base = scores + ((b * C.ROWS + row) * C.HEADS + head)[:, None, None] * C.BLOCKS
    found = tl.load(base + block, mask=wanted, other=float("-inf"))
    _choose(found, ids, b, head, row, exists, own, lowest, C)


@triton.jit
def choose_products_kernel(
    q,  # [B, ROWS, HEADS, H]
    pooled,  # [B, BLOCKS, KV_HEADS, H]
    at,  # this and all further ones: as in `choose_kernel`
    start,
    ids,
    C: tl.constexpr,
    P: tl.constexpr,
):
    """Chooses by the products of queries and what is kept of blocks; grid as there."""
    b, head, row, exists, own, lowest = _rows_of(at, start, C)
    block, within = tl.arange(0, C.SPAN), tl.arange(0, P.STEP)
    there = block < tl.minimum(tl.max(own, 0) + 1, C.BLOCKS)
    queries = q + ((b * C.ROWS + row) * C.HEADS + head)[:, None] * P.H + within[None, :]
    keys = pooled + (b * C.BLOCKS * P.KV_HEADS + head // (C.HEADS // P.KV_HEADS)) * P.H
    keys += block[None, :] * (P.KV_HEADS * P.H) + within[:, None]
    scores = zeros(C.TILE, C.SPAN)
    for first in tl.range(0, P.D, P.STEP):
        inside = first + within < P.H
        some = tl.load(queries + first, mask=exists[:, None] & inside[None, :], other=0.0)
        kept = tl.load(keys + first, mask=there[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(some, kept, scores, input_precision="ieee")
    scores = tl.where(there[None, :], scores, float("-inf"))
    _choose(_by_words(scores, C.TILE, C.WORDS), ids, b, head, row, exists, own, lowest, C)
