"""Row orders as views of the token axis, in which a tile of rows is a box that TMA loads."""

import math

import numpy as np

from ...planning.row_orders import RowOrder
from .tiles import RowsView


def rows_view(order: RowOrder, block: int) -> RowsView:
    """Returns the constants by which kernels map rows to TMA coordinates, for an order that has a `box_view`.

    ``block`` is that of the lists.
    """
    axes = () if order.natural else _axes(order)
    return RowsView(-(-order.rows // block) * block, block, axes)


def box_view(order: RowOrder, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Finds a view of the token axis in which every ``rows`` rows are a box, in the box's own order.

    Returns (lengths of the axes, lengths of a box), or None if there is no such view: tiles are no boxes, or the tokens
    do not fill the view.
    """
    if order.natural:
        return (order.length,), (rows,)
    shape, kept_lengths = list(order.shape), list(order.kept)
    inner = math.prod(shape[1:])
    # Tokens before the first row count as coordinates of the last axis.
    if len(shape) > 3 or order.length % inner or order.offset + kept_lengths[-1] > shape[-1]:
        return None
    lengths = min(order.length // inner, shape[0]), *shape[1:]
    # A box may reach beyond an axis, but not to tokens without a row.
    if any(m < n and m % tile for n, m, tile in zip(shape, kept_lengths, order.tile, strict=True)):
        return None
    box, rows_left, last_axis = [1] * len(lengths), rows, len(lengths)
    digits = [(*digit, i) for i, axis in enumerate(order.axes) for digit in axis.digits]
    for _, size, step, i in sorted(digits):  # the fastest first
        extent = math.gcd(size, rows_left) if size else rows_left
        if i > last_axis or step != box[i] or (extent < size and extent < rows_left):
            return None
        box[i], rows_left, last_axis = box[i] * extent, rows_left // extent, i
        if rows_left == 1:
            return lengths, tuple(box)
    return None


def box_offsets(order: RowOrder, rows: int) -> np.ndarray:
    """Returns the tokens from the first row of a box to each of its ``rows`` rows, which are those of every box."""
    view = box_view(order, rows)
    assert view is not None
    lengths, box = view
    strides = [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    return np.tensordot(strides, np.indices(box), 1).ravel()


def _axes(order: RowOrder) -> tuple[tuple[int, tuple[tuple[int, int, int], ...], int], ...]:
    # The first token with a row is at the coordinate `offset` of the last axis.
    last = len(order.axes) - 1
    return tuple(
        (axis.phase - order.offset * (i == last), axis.digits, axis.stride) for i, axis in enumerate(order.axes)
    )
