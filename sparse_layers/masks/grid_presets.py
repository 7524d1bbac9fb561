"""Presets of images and videos: patterns on a grid, by the names of the systems that published them.

Token ``offset + p`` has the row-major coordinates of p in ``shape``: (height, width), (frames, height, width) or any
other axes, of which the last runs fastest. Below, i and j are a query's and a key's coordinate on one axis of length n;
a formula of one axis must hold on each. An option that may differ by axis takes one value for all, or a tuple. Queries
look both ways unless a preset says otherwise; ``preset(...) & Causal()`` is causal in raster order.

Tokens off the grid attend to nothing and nothing attends to them. ``preset(..., offset=n) | Global(n)`` is a grid after
n tokens that see all and that all see, such as the text before a video. A sequence with more tokens than the grid needs
an offset: 1 after a class token, 0 before padding.
"""

import functools
import math
import operator
from typing import Any

from ..arguments.checks import Axes, BoolPerAxis, NaturalOrNone, NaturalPerAxis, Positive, PositivePerAxis, Shape
from .algebra import Blocks, Mask, shifted
from .grids import ColumnMajor, Grid, Neighborhood, Radial
from .primitives import BlockDiagonal, Causal, Columns, Full, Strided, Window


def neighborhood(
    shape: Shape,
    kernel: PositivePerAxis = 7,
    dilation: PositivePerAxis = 1,
    causal: BoolPerAxis = False,
    offset: NaturalOrNone = None,
) -> Mask:
    """A query sees the ``kernel`` nearest keys on each axis, also at an edge (NATTEN, Hassani et al. 2023).

    At an edge the window slides inward.

    ``0 <= j - clip(i - kernel // 2, 0, n - kernel) < kernel``. With a dilation (Hassani and Shi 2022), that holds among
    the coordinates of the same ``i % dilation``. On a causal axis (Hassani et al. 2024): ``i - kernel < j <= i``.

    Args:
      shape: lengths of the axes.
      kernel: keys that a query sees on an axis, NATTEN's kernel_size.
      dilation: distance of neighbouring keys on an axis.
      causal: True if keys after the query are hidden on an axis, NATTEN's is_causal.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Raises:
      ValueError: kernel * dilation exceeds the length of an axis.

    Example:
      >>> import sparse_layers as sl
      >>> near = sl.preset("neighborhood", shape=(5, 8), kernel=3)
      >>> print(sl.grid_picture(near, (5, 8), query=(2, 4)))
      · · · · · · · ·
      · · · ■ ■ ■ · ·
      · · · ■ ● ■ · ·
      · · · ■ ■ ■ · ·
      · · · · · · · ·
      >>> print(sl.grid_picture(near, (5, 8), query=(0, 7)))
      · · · · · ■ ■ ●
      · · · · · ■ ■ ■
      · · · · · ■ ■ ■
      · · · · · · · ·
      · · · · · · · ·
    """
    axes = _by_axis("neighborhood", shape, kernel=kernel, dilation=dilation, causal=causal)
    return Grid(shape, [Neighborhood(*axis) for axis in axes], offset)


def sliding_tile(
    shape: Shape, kernel: PositivePerAxis = 3, tile: PositivePerAxis = 8, offset: NaturalOrNone = None
) -> Mask:
    """A query sees the ``kernel`` nearest tiles on each axis, also at an edge (STA, Zhang et al. 2025).

    Tiles are seen whole. At an edge they slide inward.

    ``0 <= j // tile - clip(i // tile - kernel // 2, 0, m - kernel) < kernel`` with ``m = ceil(n / tile)``. All queries
    of a tile see the same tiles. Where tile does not divide n, which STA refuses, the last tile is smaller.

    Args:
      shape: lengths of the axes.
      kernel: tiles that a query sees on an axis, its own included: odd, or all.
      tile: tokens in a tile on an axis.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Raises:
      ValueError: kernel exceeds the tiles of an axis, or is even and not all of them: STA's has a centre.

    Example:
      >>> import sparse_layers as sl
      >>> tiles = sl.preset("sliding_tile", shape=(6, 10), kernel=(3, 3), tile=2)
      >>> print(sl.grid_picture(tiles, (6, 10), query=(2, 5)))
      · · ■ ■ ■ ■ ■ ■ · ·
      · · ■ ■ ■ ■ ■ ■ · ·
      · · ■ ■ ■ ● ■ ■ · ·
      · · ■ ■ ■ ■ ■ ■ · ·
      · · ■ ■ ■ ■ ■ ■ · ·
      · · ■ ■ ■ ■ ■ ■ · ·
    """
    axes = []
    for n, size, side in _by_axis("sliding_tile", shape, kernel=kernel, tile=tile):
        tiles = -(-n // side)
        if size > tiles or (size % 2 == 0 and size < tiles):
            rule = f"at most the {tiles} tiles of an axis, and odd unless it is all of them"
            raise ValueError(f"sliding_tile: kernel must be {rule}, got {size}")
        axes.append(Blocks(Neighborhood(tiles, size), side))
    return Grid(shape, axes, offset)


def windows(shape: Shape, size: PositivePerAxis = 7, shift: NaturalPerAxis = 0, offset: NaturalOrNone = None) -> Mask:
    """A query sees its own window of ``size`` tokens on each axis (Swin Transformer, Liu et al. 2021).

    ``(i - shift) // size == (j - shift) // size``. Swin's cyclic shift and its mask have the same effect: windows at
    the edges are cut, not joined. Where size does not divide n, which Swin pads, the last window is smaller.

    Args:
      shape: lengths of the axes.
      size: tokens in a window on an axis, Swin's window_size.
      shift: where the first whole window begins on an axis, less than size; in Swin ``size // 2`` in every other layer.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Raises:
      ValueError: shift is not less than size.

    Example:
      >>> import sparse_layers as sl
      >>> shifted = sl.preset("windows", shape=(6, 9), size=3, shift=1)
      >>> print(sl.grid_picture(shifted, (6, 9), query=(2, 4)))
      · · · · · · · · ·
      · · · · ■ ■ ■ · ·
      · · · · ● ■ ■ · ·
      · · · · ■ ■ ■ · ·
      · · · · · · · · ·
      · · · · · · · · ·
      >>> print(sl.grid_picture(shifted, (6, 9), query=(0, 8)))
      · · · · · · · ■ ●
      · · · · · · · · ·
      · · · · · · · · ·
      · · · · · · · · ·
      · · · · · · · · ·
      · · · · · · · · ·
    """
    axes = _by_axis("windows", shape, size=size, shift=shift)
    for _, side, first in axes:
        if first >= side:
            raise ValueError(f"windows: shift must be less than size, got {first} and {side}")
    return Grid(shape, [shifted(BlockDiagonal(side), -first % side) for _, side, first in axes], offset)


def axial(shape: Shape, axes: Axes = (-2, -1), offset: NaturalOrNone = None) -> Mask:
    """A query sees its row, its column, or both: all keys along ``axes`` (Axial Transformers, Ho et al. 2019).

    ``i == j`` on all axes but one, which is any of axes.

    Args:
      shape: lengths of the axes.
      axes: the axes along which a query sees all; negative ones count from the end. Of an image -1 is the query's row,
        -2 its column; of a video -3 is its place in all frames. Masks of several axes are joined.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Raises:
      ValueError: the grid has no such axis.

    Example:
      >>> import sparse_layers as sl
      >>> cross = sl.preset("axial", shape=(4, 7))
      >>> print(sl.grid_picture(cross, (4, 7), query=(1, 2)))
      · · ■ · · · ·
      ■ ■ ● ■ ■ ■ ■
      · · ■ · · · ·
      · · ■ · · · ·
      >>> rows = sl.preset("axial", shape=(4, 7), axes=-1)
      >>> print(sl.grid_picture(rows, (4, 7), query=(1, 2)))
      · · · · · · ·
      ■ ■ ● ■ ■ ■ ■
      · · · · · · ·
      · · · · · · ·
    """
    lines = axes if isinstance(axes, tuple) else (axes,)
    if not lines or not all(-len(shape) <= axis < len(shape) for axis in lines):
        raise ValueError(f"axial: axes must be some of the {len(shape)} axes of shape={shape}, got {axes}")
    same = (Window(0),) * len(shape)
    free = ((*same[:axis], Full(), *same[axis + 1 :]) for axis in sorted({axis % len(shape) for axis in lines}))
    return functools.reduce(operator.or_, (Grid(shape, one, offset) for one in free))


def image_strided(shape: Shape, offset: NaturalOrNone = None) -> Mask:
    """A query sees as many last keys as a row has, and its column (Child et al. 2019, 'strided' for images).

    ``k <= q and (q - k <= row or (q - k) % row == 0)``: `sparse_transformer_strided` with the tokens of a row as
    stride. That is 96 in OpenAI's models of images of 32 pixels of 3 bytes (openai/distribution_augmentation).

    Args:
      shape: lengths of the axes: height, width and, if any, the bytes of a pixel, which belong to the row.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Raises:
      ValueError: the grid has no rows.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.grid_picture(sl.preset("image_strided", shape=(5, 7)), (5, 7), query=(3, 2)))
      · · ■ · · · ·
      · · ■ · · · ·
      · · ■ ■ ■ ■ ■
      ■ ■ ● · · · ·
      · · · · · · ·
    """
    height, row = _two("image_strided", shape)
    return Causal() & (Window(row) | Strided(row)) & Grid((height * row,), Full(), offset)


def image_fixed(shape: Shape, summary: Positive = 8, offset: NaturalOrNone = None) -> Mask:
    """A query sees its row and the last ``summary`` keys of earlier rows (Child et al. 2019, 'fixed' for images).

    ``k <= q and (q // row == k // row or k % row >= row - summary)``, as `sparse_transformer_fixed` with
    the length of a row as stride; q and k count from offset.

    Args:
      shape: lengths of the axes: height, width and, if any, the bytes of a pixel, which belong to the row.
      summary: summary tokens at the end of each row, at most all; 8, 16 or 32 in the paper.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Raises:
      ValueError: the grid has no rows, or these are shorter than summary.

    Example:
      >>> import sparse_layers as sl
      >>> fixed = sl.preset("image_fixed", shape=(5, 7), summary=2)
      >>> print(sl.grid_picture(fixed, (5, 7), query=(3, 2)))
      · · · · · ■ ■
      · · · · · ■ ■
      · · · · · ■ ■
      ■ ■ ● · · · ·
      · · · · · · ·
    """
    height, row = _two("image_fixed", shape)
    if summary > row:
        raise ValueError(f"image_fixed: summary={summary} must not exceed the {row} tokens of a row")
    groups, columns = (shifted(one, -(offset or 0) % row) for one in (BlockDiagonal(row), Columns(row, row - summary)))
    return Causal() & (groups | columns) & Grid((height * row,), Full(), offset)


def spatial_temporal(
    shape: Shape, multiplier: Positive = 2, block: Positive = 128, offset: NaturalOrNone = None
) -> tuple[Mask, ...]:
    """Even heads see near frames, odd heads near places of all frames (Sparse VideoGen, Xi et al. 2025).

    ``abs(q - k) < reach``. In spatial heads, the even ones, q and k count tokens frame by frame; in temporal heads they
    count place by place, ``x * frames + f`` for place x of frame f. The reach is ``multiplier * height * width``
    tokens, rounded down to a multiple of block. Sparse VideoGen picks one of the two masks for each input and head. In
    some of its models all queries also see the first frame: ``mask | Prefix(height * width)``.

    Args:
      shape: lengths of the axes: frames first, then those of a frame.
      multiplier: the reach to each side, in frames.
      block: tokens in a block, 1 for a reach that is not rounded.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Returns:
      Two masks, for spatial and for temporal heads, that the heads take in turn.

    Raises:
      ValueError: shape has one axis only, or the reach holds no block.

    Example:
      >>> import sparse_layers as sl
      >>> masks = sl.preset("spatial_temporal", shape=(3, 3, 4), multiplier=1, block=4)
      >>> print(sl.grid_picture(masks, (3, 3, 4), query=(1, 1, 1)))
      heads 0, 2, ...:
      · · · ·   ■ ■ ■ ■   ■ ■ ■ ■
      · · ■ ■   ■ ● ■ ■   ■ · · ·
      ■ ■ ■ ■   ■ ■ ■ ■   · · · ·
      heads 1, 3, ...:
      · · ■ ■   · · ■ ■   · ■ ■ ■
      ■ ■ ■ ■   ■ ● ■ ■   ■ ■ ■ ■
      ■ ■ · ·   ■ · · ·   ■ · · ·
    """
    frames, places = _two("spatial_temporal", shape)
    reach = multiplier * places // block * block
    if not reach:
        raise ValueError(
            f"spatial_temporal: block={block} must not exceed multiplier * height * width = {multiplier * places}"
        )
    window = Window(reach - 1, reach - 1)
    return Grid((frames * places,), window, offset), ColumnMajor(frames, places, window, offset)


def radial(shape: Shape, offset: NaturalOrNone = None) -> Mask:
    """A query sees a window of places, half as wide at twice the distance in frames (Radial Attention, Li et al. 2025).

    ``(abs(x - y) + 1) * m <= s``, or ``x == y and d % ceil(m / s) == 0``, for a query at place x and the key at place y
    of a frame d frames away: s places are in a frame, m is the largest power of two up to ``max(d, 1)``. This is the
    paper's mask; its code rounds it to blocks of 128 tokens. In some of its models all queries also see the first
    frame: ``mask | Prefix(height * width)``.

    Args:
      shape: lengths of the axes: frames first, then those of a frame.
      offset: tokens before the grid; None for a sequence that is the grid alone.

    Raises:
      ValueError: shape has one axis only.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.grid_picture(sl.preset("radial", shape=(5, 3, 4)), (5, 3, 4), query=(0, 1, 1)))
      ■ ■ ■ ■   ■ ■ ■ ■   ■ ■ ■ ■   ■ ■ ■ ■   · · · ■
      ■ ● ■ ■   ■ ■ ■ ■   ■ ■ ■ ■   ■ ■ ■ ■   ■ ■ ■ ■
      ■ ■ ■ ■   ■ ■ ■ ■   ■ ■ ■ ·   ■ ■ ■ ·   · · · ·
    """
    return Radial(*_two("radial", shape), offset)


def _by_axis(name: str, shape: tuple[int, ...], **options: Any) -> list[tuple[Any, ...]]:
    """Returns each axis' length and options; an option has one value for all axes, or a tuple with one for each."""
    columns = [shape]
    for option, value in options.items():
        values = value if isinstance(value, tuple) else (value,) * len(shape)
        if len(values) != len(shape):
            raise ValueError(f"{name}: {option} must be one for all or one for each axis of shape={shape}, got {value}")
        columns.append(values)
    return list(zip(*columns, strict=True))


def _two(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of a grid's rows, or frames, and the tokens in one."""
    if len(shape) < 2:
        raise ValueError(f"{name}: shape must have two axes at least, got {shape}")
    return shape[0], math.prod(shape[1:])
