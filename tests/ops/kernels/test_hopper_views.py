"""Row orders as views of the token axis, in which the Hopper kernels' tiles of rows are boxes."""

import math

import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.kernels.hopper_gpu.views import box_view, rows_view
from sparse_layers.ops.planning.row_orders import RowOrder


def orders():
    """Orders of rows, and of how many rows each tile is a box, if it is."""
    yield RowOrder(300), 128, True
    yield RowOrder.residue_major(512, 4), 128, True
    yield RowOrder.residue_major(512, 8), 128, False  # a tile would go on in the next residue
    yield RowOrder.residue_major(512, 8), 64, True
    yield RowOrder.residue_major(510, 4), 64, False  # the last tokens do not fill the view
    yield RowOrder.periodic(512, 32, 24, 32), 64, True
    yield RowOrder.periodic(512, 32, 20, 26), 64, False
    yield RowOrder.periodic(512, 512, 0, 64), 64, True
    for shape, tile, phase, rows, fits in (
        ((32, 16), (8, 8), (0, 0), 64, True),
        ((32, 16), (8, 8), (0, 0), 32, True),
        ((32, 16), (8, 8), (0, 0), 128, False),  # two tiles
        ((30, 14), (8, 8), (3, 2), 64, True),  # begun before the grid, and cut at its end
        ((8, 16, 16), (4, 4, 8), (0, 0, 0), 128, True),
        ((8, 16, 16), (4, 4, 8), (0, 0, 0), 64, True),
        ((6, 15, 16), (4, 4, 8), (1, 0, 3), 64, True),
        ((16, 16), (7, 7), (0, 0), 64, False),
        ((4, 4, 8, 8), (2, 2, 4, 4), (0, 0, 0, 0), 64, False),  # too many axes
    ):
        grid = sl.Grid(shape, sl.Full())
        yield RowOrder.tiled(math.prod(shape), grid, tile, phase), rows, fits
        if fits and not any(phase):
            yield RowOrder.tiled(math.prod(shape) - math.prod(shape[1:]), grid, tile, phase), rows, True
            yield RowOrder.tiled(math.prod(shape) + math.prod(shape[1:]), grid, tile, phase), rows, True
            yield RowOrder.tiled(math.prod(shape) - 1, grid, tile, phase), rows, False


def view_coordinate(row, axis):
    """As `tiles.view_coordinate` has it."""
    return sum((row // n % size if size else row // n) * step for n, size, step in axis[1]) - axis[0]


@pytest.mark.parametrize(("order", "rows", "fits"), list(orders()), ids=str)
def test_a_tile_of_rows_is_a_box(order, rows, fits):
    actual = box_view(order, rows)
    assert (actual is not None) == fits
    if actual is None:
        return
    lengths, box = actual
    assert math.prod(box) == rows and math.prod(lengths) <= order.length
    side, strides = rows_view(order, rows), [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    for first in range(0, side.ROWS, rows):
        corner = [view_coordinate(first, axis) for axis in side.AXES] or [first]
        inside, tokens = np.ones(box, bool), np.zeros(box, int)
        for i, (begin, n, size, stride) in enumerate(zip(corner, lengths, box, strides, strict=True)):
            coordinate = (begin + np.arange(size)).reshape([-1 if j == i else 1 for j in range(len(box))])
            inside, tokens = inside & (coordinate >= 0) & (coordinate < n), tokens + coordinate * stride
        wanted = np.minimum(order.token(np.arange(first, first + rows)), order.length)
        np.testing.assert_array_equal(np.where(inside, tokens, order.length).ravel(), wanted)
