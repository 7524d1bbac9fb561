"""Row orders as the copy engine sees them: views of the token axis, of which a tile of rows is a box."""

import math

from ...planning.views import RowOrder
from .tiles import Side


def side_of(order: RowOrder, tile: int) -> Side:
    """What kernels know of one side of a pass that `view_of` has."""
    axes = () if order.natural else _axes(order)
    return Side(-(-order.rows // tile) * tile, tile, axes)


def view_of(order: RowOrder, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(lengths of the axes, coordinates of a box on each), such that every ``rows`` rows are a box, in its order.

    None if there is no such view: tiles that a box does not hold, or tokens that do not fill it.
    """
    if order.natural:
        return (order.length,), (rows,)
    shape, kept = list(order.shape), list(order.kept)
    inner = math.prod(shape[1:])
    # Tokens before those that have rows are taken for coordinates of the last axis.
    if len(shape) > 3 or order.length % inner or order.offset + kept[-1] > shape[-1]:
        return None
    lengths = min(order.length // inner, shape[0]), *shape[1:]
    # A box may reach beyond an axis, but not to tokens that have no row.
    if any(m < n and m % tile for n, m, tile in zip(shape, kept, order.tile, strict=True)):
        return None
    box, left, last = [1] * len(lengths), rows, len(lengths)
    digits = [(*digit, i) for i, axis in enumerate(order.axes) for digit in axis.digits]
    for _, size, step, i in sorted(digits):  # the fastest first
        taken = math.gcd(size, left) if size else left
        if i > last or step != box[i] or (taken < size and taken < left):
            return None
        box[i], left, last = box[i] * taken, left // taken, i
        if left == 1:
            return lengths, tuple(box)
    return None


def _axes(order: RowOrder) -> tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]:
    # The first token that has a row is at the coordinate `offset` of the last axis.
    last = len(order.axes) - 1
    return tuple((axis.phase - order.offset * (i == last), axis.digits) for i, axis in enumerate(order.axes))
