"""Masks of tokens with coordinates: pixels of an image, patches of a video, any row-major grid."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..arguments.checks import LONGEST, as_int, checked, strict_kwargs
from .algebra import Array, Mask, check_masks, set_integers
from .states import EMPTY, FULL, PARTIAL, UNSURE, merge_states, product_state, split_range, to_state

_Box = list[tuple[Any, Any]]  # the first and the last coordinate on each axis


class OnGrid(Mask):
    """Base of masks on a row-major grid of ``shape`` at ``offset``. Tokens off the grid are in no allowed pair."""

    shape: tuple[int, ...]
    offset: int | None

    @property
    def start(self) -> int:
        """Position of the grid's first token: the offset, or 0."""
        return self.offset or 0

    @property
    def size(self) -> int:
        """Number of tokens of the grid."""
        return math.prod(self.shape)

    def _set_lengths(self, *names: str) -> None:
        """Checks the fields that give the lengths of the axes, and the offset."""
        set_integers(self, *names, minimum=1)
        set_integers(self, "offset", minimum=0, optional=True)
        if self.size > LONGEST:
            what, product = " * ".join(names), " * ".join(map(str, self.shape))
            raise ValueError(f"{type(self).__name__}: {what} must be at most {LONGEST}, got {product}")

    def box_state(self, q: _Box, k: _Box) -> np.ndarray:
        """Returns the states of pairs of boxes of tokens, as `Mask.block_state` does of rectangles of positions."""
        raise NotImplementedError

    def _period(self) -> int:
        return max(8, -(-(self.start + self.size) // 4))  # pictures end with the grid

    def _inside(self, q: Any, k: Any) -> Any:
        """True where both positions, relative to the grid's first token, lie on the grid."""
        return (q >= 0) & (q < self.size) & ((k >= 0) & (k < self.size))

    def block_state(self, q0, q1, k0, k1):
        sides = [list(_boxes(*self._clipped(*ends), self.shape)) for ends in ((q0, q1), (k0, k1))]
        beyond = (q0 < self.start) | (q1 >= self.start + self.size)
        beyond = beyond | (k0 < self.start) | (k1 >= self.start + self.size)
        inside = (
            (exists, self.box_state(q_box, k_box))
            for (q_exists, q_box), (k_exists, k_box) in itertools.product(*sides)
            if (exists := q_exists & k_exists).any()
        )
        return merge_states(itertools.chain([(beyond, EMPTY)], inside))

    def _clipped(self, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Clips positions first .. last to the grid, relative to its first token; last < first if none lies on it."""
        return np.maximum(first - self.start, 0), np.minimum(last - self.start, self.size - 1)


def grid_shape(owner: str, shape: Any) -> tuple[int, ...]:
    """Returns the lengths of a grid's axes, checked; ``owner`` names the caller in errors."""
    if isinstance(shape, str | bytes) or not isinstance(shape, Sequence | np.ndarray) or not np.ndim(shape):
        raise TypeError(f"{owner}: shape must be a sequence of lengths, got {shape!r}")
    lengths = tuple(n for n in map(as_int, shape) if n is not None and n > 0)
    if len(lengths) != len(shape) or not lengths:
        raise ValueError(f"{owner}: shape must be integers >= 1, one for each axis, got {shape!r}")
    if math.prod(lengths) > LONGEST:
        raise ValueError(f"{owner}: shape must hold at most {LONGEST} tokens, got {shape!r}")
    return lengths


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Grid(OnGrid):
    """A grid allows a pair if the mask of every axis allows the coordinates on it.

    Token ``offset + p`` has the row-major coordinates of p in ``shape``: the last axis runs fastest, as in
    ``image.reshape(height * width, channels)``. An axis may have any mask: windows, strides, blocks, causality. Its
    positions are coordinates. ``Grid(...) & Causal()`` is causal in raster order; ``|`` joins neighbourhoods.

    Tokens off the grid attend to nothing and nothing attends to them. ``Grid(..., offset=n) | Global(n)`` adds a prompt
    of n tokens: all pixels see it, and it sees all pixels. A sequence may end inside the grid. A longer sequence needs
    an offset that says where the grid lies: 1 after a class token, 0 before padding.

    Args:
      shape: lengths of the axes, the slowest first.
      axes: one mask for each axis, or one for all.
      offset: position of the grid's first token; None for 0 in a sequence that is the grid alone.

    Raises:
      ValueError: shape has no axes, lengths that are not positive integers, or more tokens than a sequence can have;
        axes has another number of masks, or a `Neighborhood` or `Array` of another length than its axis; or offset
        is negative or not an integer.
      TypeError: shape is not a sequence, or axes are not masks.

    Example:
      >>> import sparse_layers as sl
      >>> near = sl.Grid((3, 4), sl.Window(1, 1))  # the 3 x 3 pixels around each pixel of 3 rows of 4
      >>> print(sl.picture(near, 12))
      ■ ■ · · ■ ■ · · · · · ·
      ■ ■ ■ · ■ ■ ■ · · · · ·
      · ■ ■ ■ · ■ ■ ■ · · · ·
      · · ■ ■ · · ■ ■ · · · ·
      ■ ■ · · ■ ■ · · ■ ■ · ·
      ■ ■ ■ · ■ ■ ■ · ■ ■ ■ ·
      · ■ ■ ■ · ■ ■ ■ · ■ ■ ■
      · · ■ ■ · · ■ ■ · · ■ ■
      · · · · ■ ■ · · ■ ■ · ·
      · · · · ■ ■ ■ · ■ ■ ■ ·
      · · · · · ■ ■ ■ · ■ ■ ■
      · · · · · · ■ ■ · · ■ ■
      >>> column = sl.Grid((3, 4), (sl.Causal(), sl.Window(0)))  # the pixel itself, and those above it
      >>> column.dense(12)[9].nonzero()[0].tolist()
      [1, 5, 9]
    """

    shape: tuple[int, ...]
    axes: tuple[Mask, ...]
    offset: int | None = None

    def __init__(self, shape: Sequence[int], axes: Mask | Sequence[Mask], offset: int | None = None):
        lengths = grid_shape("Grid", shape)
        masks = (axes,) * len(lengths) if isinstance(axes, Mask) else axes
        if not isinstance(masks, Sequence) or not all(isinstance(mask, Mask) for mask in masks):
            raise TypeError(
                "Grid: axes must be masks, one for each axis or one for all; preset makes one of a name, Array of an "
                f"array; got {axes!r}"
            )
        if len(masks) != len(lengths):
            raise ValueError(f"Grid: axes must be one mask for each of the {len(lengths)} axes, got {len(masks)}")
        for axis, (length, mask) in enumerate(zip(lengths, masks, strict=True)):
            _check_covers(f"Grid: axes[{axis}]", mask, length)
        for name, value in (("shape", lengths), ("axes", tuple(masks)), ("offset", offset)):
            object.__setattr__(self, name, value)
        set_integers(self, "offset", minimum=0, optional=True)

    def __call__(self, q, k):
        q, k = q - self.start, k - self.start
        allowed, stride = self._inside(q, k), self.size
        for length, mask in zip(self.shape, self.axes, strict=True):
            stride //= length
            allowed = allowed & mask(q // stride % length, k // stride % length)
        return allowed

    def box_state(self, q, k):
        return product_state(mask.block_state(*a, *b) for mask, a, b in zip(self.axes, q, k, strict=True))


def _check_covers(what: str, mask: Mask, length: int) -> None:
    """Refuses a `Neighborhood` or an `Array` of another length."""
    if isinstance(mask, Neighborhood) and mask.length != length:
        raise ValueError(f"{what} must have the length of its axis, {length}, got {mask!r}")
    if isinstance(mask, Array) and min(mask.array.shape) < length:
        raise ValueError(f"{what} must cover its axis of {length}, got shape {mask.array.shape}")


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class ColumnMajor(OnGrid):
    """A mask counts the tokens of a grid column by column: its positions are ``column * rows + row``.

    Token ``offset + p`` has the row-major coordinates of p, ``divmod(p, columns)``. With frames as rows and the places
    of a frame as columns, neighbours in this order are the same place in other frames, and then the next places.

    Args:
      rows: length of the first axis, which the mask counts fastest.
      columns: length of the last axis, which the tokens count fastest.
      mask: any mask; it is evaluated at positions below rows * columns.
      offset: position of the grid's first token, None as in `Grid`. Tokens off the grid are in no allowed pair.

    Raises:
      ValueError: rows or columns is not a positive integer, their product exceeds the longest sequence, offset is
        negative or not an integer, or mask is a `Neighborhood` or an `Array` of another length.
      TypeError: mask is not a mask.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.ColumnMajor(2, 4, sl.Window(2)), 8))  # 2 frames of 4 places: the last 3 in this order
      ■ · · · · · · ·
      ■ ■ · · ■ · · ·
      · ■ ■ · · ■ · ·
      · · ■ ■ · · ■ ·
      ■ · · · ■ · · ·
      · ■ · · ■ ■ · ·
      · · ■ · · ■ ■ ·
      · · · ■ · · ■ ■
    """

    rows: int
    columns: int
    mask: Mask
    offset: int | None = None

    def __post_init__(self):
        check_masks(self, "mask")
        self._set_lengths("rows", "columns")
        _check_covers("ColumnMajor: mask", self.mask, self.size)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def __call__(self, q, k):
        q, k = q - self.start, k - self.start
        return self._inside(q, k) & self.mask(
            *(x % self.columns * self.rows + x // self.columns % self.rows for x in (q, k))
        )

    def box_state(self, q, k):
        ends = [[column * self.rows + row for row, column in zip(*box, strict=True)] for box in (q, k)]
        state = self.mask.block_state(*ends[0], *ends[1])
        # A box holds some of the positions between its ends, and both ends.
        pairs = [self.mask.block_state(a, a, b, b) for a, b in itertools.product(*ends)]
        any_full, any_empty = (functools.reduce(np.logical_or, [pair == x for pair in pairs]) for x in (FULL, EMPTY))
        return np.where((state == PARTIAL) & ~(any_full & any_empty), np.int8(UNSURE), state)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Radial(OnGrid):
    """A query sees a window of places that halves as the distance in frames doubles (Radial Attention).

    A query at place x sees the key at place y of a frame d frames away if ``(abs(x - y) + 1) * m <= places``: m is the
    largest power of two up to ``max(d, 1)``. It also sees ``x == y`` where ``d % ceil(m / places) == 0``, which holds
    for all m up to places (Li et al. 2025).

    Args:
      frames: number of frames.
      places: tokens in a frame.
      offset: position of the first frame's first token, None as in `Grid`. Tokens off the grid are in no allowed
        pair.

    Raises:
      ValueError: frames or places is not a positive integer, their product exceeds the longest sequence, or offset is
        negative or not an integer.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.grid_picture(sl.Radial(5, 8), (5, 8), query=(0, 2)))
      ■ ■ ● ■ ■ ■ ■ ■
      ■ ■ ■ ■ ■ ■ ■ ■
      ■ ■ ■ ■ ■ ■ · ·
      ■ ■ ■ ■ ■ ■ · ·
      · ■ ■ ■ · · · ·
    """

    frames: int
    places: int
    offset: int | None = None

    def __post_init__(self):
        self._set_lengths("frames", "places")

    @property
    def shape(self) -> tuple[int, int]:
        return self.frames, self.places

    def __call__(self, q, k):
        q, k = q - self.start, k - self.start
        distances = abs(q // self.places - k // self.places), abs(q % self.places - k % self.places)
        return self._inside(q, k) & self._allowed(*distances)

    def _scale(self, frames: Any) -> Any:
        """Returns the largest power of two up to a distance in frames, at least 1, by operators of all arrays."""
        frames, bits = frames | 1, 1
        while bits < self.frames.bit_length():  # sets all bits below the highest
            frames, bits = frames | frames >> bits, 2 * bits
        return frames - (frames >> 1)

    def _allowed(self, frames: Any, places: Any) -> Any:
        """True where pairs at these distances, in frames and places, are allowed."""
        scale = self._scale(frames)
        in_window = (places + 1) * scale <= self.places
        if self.frames <= self.places:  # the window holds the same place of all frames
            return in_window
        return in_window | ((places == 0) & (frames % -(-scale // self.places) == 0))

    def box_state(self, q, k):
        min_distance = [np.maximum(np.maximum(a0 - b1, b0 - a1), 0) for (a0, a1), (b0, b1) in zip(q, k, strict=True)]
        max_distance = [np.maximum(a1 - b0, b1 - a0) for (a0, a1), (b0, b1) in zip(q, k, strict=True)]
        some, every = self._allowed(*min_distance), self._allowed(*max_distance)
        # Fewer pairs are allowed the farther apart they are, except at the strides of far frames.
        strided = (min_distance[0] < max_distance[0]) & (self._scale(max_distance[0]) > self.places)
        return np.where(strided, np.int8(UNSURE), to_state(some, some & every))


def _boxes(first: Any, last: Any, shape: tuple[int, ...]) -> Iterator[tuple[Any, _Box]]:
    """Yields disjoint boxes that hold the positions first .. last, each with True where it exists.

    These are the end of a row, full rows and the beginning of a row, of which the first and the last are split again.
    No box exists where last < first.
    """
    if len(shape) == 1:
        exists = first <= last
        yield exists, [(np.where(exists, first, 0), np.where(exists, last, 0))]
        return
    size = math.prod(shape[1:])
    head, (exists, low, high), tail = split_range(first, last, size)
    if exists.any():
        full_axes = [(np.zeros_like(low), np.full_like(low, n - 1)) for n in shape[1:]]
        yield exists, [(low // size, high // size), *full_axes]
    for exists, low, high in (head, tail):
        if exists.any():
            row = low // size
            for inner, box in _boxes(low - row * size, high - row * size, shape[1:]):
                yield exists & inner, [(row, row), *box]


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Neighborhood(Mask):
    """A query sees the ``kernel`` nearest keys on an axis of ``length``: near an edge the window slides inward.

    The query at i on an axis of n sees ``start <= k < start + kernel`` with ``start = clip(i - kernel // 2, 0, n -
    kernel)``: exactly ``kernel`` keys. With a dilation, that holds among the positions of one ``position % dilation``.
    On a causal axis a query sees the last ``kernel`` keys up to itself, and fewer at the beginning. An even kernel has
    one key more before the query than after it. Positions beyond the axis attend to nothing and nothing attends to
    them. It is usually an axis of a `Grid`, with the same length. The definition is that of NATTEN (Hassani et al.
    2023, "Neighborhood Attention Transformer"; 2024, "Faster Neighborhood Attention").

    Args:
      length: positions of the axis.
      kernel: keys of a query.
      dilation: distance of neighbouring keys.
      causal: True if keys after the query are hidden.

    Raises:
      ValueError: a number is not a positive integer, kernel * dilation > length, or causal is not a bool.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Neighborhood(7, 3), 7))
      ■ ■ ■ · · · ·
      ■ ■ ■ · · · ·
      · ■ ■ ■ · · ·
      · · ■ ■ ■ · ·
      · · · ■ ■ ■ ·
      · · · · ■ ■ ■
      · · · · ■ ■ ■
      >>> image = sl.Grid((64, 64), sl.Neighborhood(64, 7))  # 7 x 7 pixels of 64 x 64
      >>> int(image.dense(64 * 64)[0].sum())
      49
    """

    length: int
    kernel: int
    dilation: int = 1
    causal: bool = False

    def __post_init__(self):
        set_integers(self, "length", "kernel", "dilation", minimum=1)
        checked("Neighborhood: causal", self.causal, bool)
        if self.kernel * self.dilation > self.length:
            raise ValueError(
                f"Neighborhood: kernel * dilation must be at most length, got {self.kernel} * {self.dilation} > "
                f"{self.length}"
            )

    def __call__(self, q, k):
        residue, i, j = q % self.dilation, q // self.dilation, k // self.dilation
        first = i - (self.kernel - 1 if self.causal else self.kernel // 2)
        if self.causal:
            in_window = (first <= j) & (j <= i)
        else:  # clips by operators that numbers and all arrays have: x >> 31 is -1 where x is negative
            overshoot = first - (self._count(residue) - self.kernel)
            first = first - (overshoot & ~(overshoot >> 31))
            first = first & ~(first >> 31)
            in_window = (first <= j) & (j - self.kernel < first)
        if self.dilation > 1:
            in_window = in_window & (k % self.dilation == residue)
        return in_window & ((q < self.length) & (k < self.length))

    def _period(self) -> int:
        return max(8, -(-self.length // 4))  # pictures end with the axis

    def _count(self, residue: Any) -> Any:
        """Returns the number of positions of a residue."""
        return (self.length - 1 - residue) // self.dilation + 1

    def block_state(self, q0, q1, k0, k1):
        q_last, k_last = np.minimum(q1, self.length - 1), np.minimum(k1, self.length - 1)
        some, every, d = np.bool_(False), np.bool_(True), self.dilation
        # All residues from one of these to the next have the same indices in the rectangle and equally many positions.
        residues = [0] if d == 1 else [0, self.length % d, q0 % d, (q_last + 1) % d, k0 % d, (k_last + 1) % d]
        for residue in residues:
            # The first and last index in the rectangle among the positions of the residue, and their windows.
            i0, j0 = -((residue - q0) // d), -((residue - k0) // d)
            i1, j1 = (q_last - residue) // d, (k_last - residue) // d
            if self.causal:
                begins, ends = [i - self.kernel + 1 for i in (i0, i1)], [i0, i1]
            else:
                begins = [np.clip(i - self.kernel // 2, 0, self._count(residue) - self.kernel) for i in (i0, i1)]
                ends = [begin + self.kernel - 1 for begin in begins]
            exists = (i0 <= i1) & (j0 <= j1)
            # Windows of neighbouring queries leave no gap between them.
            some = some | (exists & (begins[0] <= j1) & (j0 <= ends[1]))
            every = every & (~exists | ((begins[1] <= j0) & (j1 <= ends[0])))
        if d > 1:  # with two residues on a side there are pairs of different ones
            every = every & (q0 == q_last) & (k0 == k_last)
        return to_state(some, some & every & (q1 == q_last) & (k1 == k_last))
