"""Terms: the ways to cut a mask into disjoint terms, each in the row order that turns it into dense blocks.

A union is cut by the row orders that its terms ask for, and made disjoint: each term leaves out the ones before it::

    Causal() & (Window(128) | Strided(128))                         the mask
    Causal() & Window(128)  |  Causal() & Strided(128)              terms, each an intersection of factors
    natural order              residue-major order, stride 128      the row order of each
    Causal() & Window(128)     Causal() & Strided(128)              one pass for each,
                                 & ~(Causal() & Window(128))        over disjoint pairs

The row orders of factors:

* ``Strided(l)`` asks for residue-major order of queries and keys, where it is block-diagonal;
* ``Columns(l, c)`` and ``Prefix(n)`` ask for their keys alone, gathered; their transposes for their queries alone;
* a ``Grid`` asks for its tokens tile by tile, in tiles of the shape that costs least, ``ColumnMajor`` for columns;
* everything else stays in natural order.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from ...masks.algebra import And, Blocks, Mask, Not, Or, Shifted, Transposed
from ...masks.bounded_cache import bounded_cache
from ...masks.grids import ColumnMajor, Grid
from ...masks.primitives import BlockDiagonal, Columns, Full, Global, Prefix, Strided
from ...masks.states import FULL
from .blocks import active_blocks
from .costs import MAX_CELLS
from .platforms import Tuning
from .row_orders import Reordered, RowOrder, RowOrderPair, describe_orders

MAX_TERMS = 16


def decompositions(
    mask: Mask, q_len: int, kv_len: int, tuning: Tuning | None = None
) -> Iterator[tuple[str, list[tuple[RowOrderPair, Mask]]]]:
    """Yields the ways to cut a mask into disjoint terms, first the mask as one term in natural order.

    Each is the row orders in words, and for each term its row orders of queries and keys, and its mask. By the costs of
    ``tuning``, grids are cut into tiles; None leaves them in natural order.
    """
    natural: RowOrderPair = (RowOrder(q_len), RowOrder(kv_len))
    yield str(natural[0]), [(natural, mask)]
    terms = [
        (_row_orders(factors, q_len, kv_len, tuning) or natural, functools.reduce(And, factors))
        for factors in _union_terms(mask)
    ]
    pairs = list(dict.fromkeys(orders for orders, _ in terms if orders != natural))
    if len(terms) > MAX_TERMS or not pairs:
        return
    sizes = range(1, len(pairs) + 1) if len(pairs) <= 2 else sorted({1, len(pairs)})
    for subset in itertools.chain.from_iterable(itertools.combinations(pairs, n) for n in sizes):
        groups: dict[RowOrderPair, list[Mask]] = {natural: []} | {orders: [] for orders in subset}
        for orders, term in terms:
            groups[orders if orders in subset else natural].append(term)
        disjoint, earlier = [], []
        for orders, group in groups.items():
            if group:
                union = functools.reduce(Or, group)
                disjoint.append((orders, functools.reduce(And, (Not(e) for e in earlier), union)))
                earlier.append(union)
        yield " + ".join(describe_orders(orders) for orders, _ in disjoint), disjoint


def _union_terms(mask: Mask) -> list[list[Mask]]:
    """Returns the terms whose union is the mask, each as its factors (disjunctive normal form)."""
    mask = _push_inward(mask)
    if isinstance(mask, Or):
        return _union_terms(mask.left) + _union_terms(mask.right)
    if isinstance(mask, And):
        left, right = _union_terms(mask.left), _union_terms(mask.right)
        if len(left) * len(right) > MAX_TERMS:
            return [[mask]]
        return [a + b for a in left for b in right]
    return [[mask]]


def _push_inward(mask: Mask) -> Mask:
    """Moves Not, Blocks and Transposed one level below And and Or; exposes columns in blocks, and strides of rows."""
    if isinstance(mask, Global):
        return Or(Prefix(mask.size), Transposed(Prefix(mask.size)))
    if isinstance(mask, Not):
        inner = _push_inward(mask.mask)
        if isinstance(inner, Not):
            return _push_inward(inner.mask)
        if isinstance(inner, And | Or):
            return (Or if isinstance(inner, And) else And)(Not(inner.left), Not(inner.right))
    if isinstance(mask, Reordered):
        return _expose_stride(mask)
    if isinstance(mask, Blocks | Transposed):
        inner, rewrap = _push_inward(mask.mask), functools.partial(dataclasses.replace, mask)
        if isinstance(inner, And | Or):
            return type(inner)(rewrap(mask=inner.left), rewrap(mask=inner.right))
        if isinstance(mask, Transposed) and isinstance(inner, Transposed):
            return _push_inward(inner.mask)
        if isinstance(mask, Blocks):
            q_block, kv_block = mask.sizes
            if isinstance(inner, Transposed):
                return Transposed(_push_inward(Blocks(inner.mask, (kv_block, q_block))))
            if isinstance(inner, Prefix):
                return Prefix(inner.size * kv_block)
            if isinstance(inner, Columns):
                return Columns(*(x * kv_block for x in (inner.period, inner.start, inner.end)))
    if isinstance(mask, Shifted) and isinstance(mask.mask, Columns):
        period = mask.mask.period
        start, last = ((x - mask.by) % period for x in (mask.mask.start, mask.mask.end - 1))
        if start <= last:
            return Columns(period, start, last + 1)
        return Or(Columns(period, start), Columns(period, 0, last + 1))  # they go on where the next period begins
    return mask


def _expose_stride(mask: Reordered) -> Mask:
    """Returns the same mask with a stride as a factor, if rows keep the residues of tokens.

    Only the union that holds a stride is taken apart: terms that all repeat the other factors are long to compute.
    """
    factors = _factors(mask.mask)
    for factor in factors:
        rest = [x for x in factors if x is not factor]
        if isinstance(factor, Strided) and mask.keeps_residues(factor.stride):
            # Without other factors, `Full` in row space still excludes rows without a token.
            return And(factor, dataclasses.replace(mask, mask=functools.reduce(And, rest) if rest else Full()))
    for factor in factors:
        if isinstance(factor, Or) and _has_stride(factor, mask):
            rest = [x for x in factors if x is not factor]
            sides = (functools.reduce(And, [*rest, side]) for side in (factor.left, factor.right))
            left, right = (dataclasses.replace(mask, mask=side) for side in sides)
            return Or(left, right)
    return mask


def _factors(mask: Mask) -> list[Mask]:
    """Returns the masks whose intersection is the mask."""
    return _factors(mask.left) + _factors(mask.right) if isinstance(mask, And) else [mask]


def _has_stride(mask: Mask, rows: Reordered) -> bool:
    """True if a mask has a stride whose residues the row orders keep."""
    if isinstance(mask, And | Or):
        return _has_stride(mask.left, rows) or _has_stride(mask.right, rows)
    return isinstance(mask, Strided) and rows.keeps_residues(mask.stride)


def _row_orders(factors: list[Mask], q_len: int, kv_len: int, tuning: Tuning | None) -> RowOrderPair | None:
    """Returns the row orders of queries and keys that a term asks for; None for natural order."""
    for factor in factors:
        if isinstance(factor, Strided) and 1 < factor.stride < min(q_len, kv_len):
            return RowOrder.residue_major(q_len, factor.stride), RowOrder.residue_major(kv_len, factor.stride)
        if (
            tuning
            and isinstance(factor, Grid | ColumnMajor)
            and (tiles := _cheapest_tile(factor, max(q_len, kv_len), tuning))
        ):
            return RowOrder.tiled(q_len, factor, *tiles), RowOrder.tiled(kv_len, factor, *tiles)
    q_order, kv_order = RowOrder(q_len), RowOrder(kv_len)
    for factor in factors:
        if kv_order.natural:
            kv_order = _gathered_order(factor, kv_len)
        if q_order.natural and isinstance(factor, Transposed):
            q_order = _gathered_order(factor.mask, q_len)
    return None if q_order.natural and kv_order.natural else (q_order, kv_order)


@bounded_cache()
def _cheapest_tile(
    grid: Grid | ColumnMajor, length: int, tuning: Tuning
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the cheapest tile, no smaller than a block, and its phase; None if it lies within one row of the grid."""
    if isinstance(grid, ColumnMajor):
        return (grid.rows, 1), (0, 0)
    shape = RowOrder.tiled(length, grid, grid.shape, ()).shape
    axes = [_count_tile_pairs(*axis) for axis in zip(grid.axes, shape, strict=True)]
    least, largest = max(tuning.block_shapes[0]), max(tuning.block_shapes[-1])
    tiles = [x for x in itertools.product(*axes) if least // 2 < math.prod(x) <= 4 * largest]

    def spanned(tokens: int, block: int) -> int:
        """Returns the tokens of all blocks that a tile meets, at the worst place where it may begin."""
        return tokens + block - math.gcd(tokens, block)

    def cost(tile):  # pairs of tiles on the grid are pairs on each axis; of equals, those with the longest rows
        _, counts, full = map(math.prod, zip(*(axis[n] for axis, n in zip(axes, tile, strict=True)), strict=True))
        sides = [[spanned(math.prod(tile), block) for block in shape] for shape in tuning.block_shapes]
        steps = [math.prod(n) / math.prod(shape) for n, shape in zip(sides, tuning.block_shapes, strict=True)]
        pairs = counts + (tuning.partial_cost - 1) * (counts - full)
        return min(
            pairs * math.prod(n) + counts * step * tuning.step_cost for n, step in zip(sides, steps, strict=True)
        ), tile

    best = min(tiles, key=cost, default=(1,))
    return (best, tuple(axis[n][0] for axis, n in zip(axes, best, strict=True))) if math.prod(best[:-1]) > 1 else None


def _count_tile_pairs(mask: Mask, length: int) -> dict[int, tuple[int, int, int]]:
    """Returns for each tile size of an axis its phase and the number of active and of full pairs of tiles.

    Sizes are the powers of two, and the mask's block size. Tiles of a shifted mask begin where its blocks begin.
    """
    inner, by = (mask.mask, mask.by) if isinstance(mask, Shifted) else (mask, 0)
    sizes = {1 << i for i in range(length.bit_length() + 1) if 1 << i < 2 * length}
    sizes |= (
        {*inner.sizes} if isinstance(inner, Blocks) else {inner.size} if isinstance(inner, BlockDiagonal) else set()
    )
    counts = {}
    for size in sorted(sizes):
        order = RowOrder(length, (length,), (size,), phase=(by % size,))
        cells = order.rows // size
        if cells * cells <= MAX_CELLS:
            states = active_blocks(Reordered(mask, order, order), cells, cells, size, size).states
            counts[size] = order.phase[0], len(states), int(np.count_nonzero(states == FULL))
    return counts


def _gathered_order(factor: Mask, length: int) -> RowOrder:
    """Returns the row order of the positions that a factor selects; natural order if it selects none by position."""
    if isinstance(factor, Prefix) and 0 < factor.size < length:
        return RowOrder.periodic(length, length, 0, factor.size)
    if isinstance(factor, Columns) and factor.start < length:
        period, stop = min(factor.period, length), min(factor.end, length)
        if stop - factor.start < period:
            return RowOrder.periodic(length, period, factor.start, stop)
    return RowOrder(length)
