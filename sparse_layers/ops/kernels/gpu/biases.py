"""Functions and bundles of the Triton kernels for biases by distance: they are added to logits, and their gradient.

**Most tiles need no look-up.** Distances beyond the table take its first or last entry. A tile whose distances all do
adds one number to its logits, and the gradient is one sum.

**Other tiles look up each entry.** The table of a head stays in the caches. Loads keep the layout of the scores, which
the tensor cores choose, so that no entry passes through shared memory. The table is padded, so that in natural order
no index of such a tile lies outside.

**The gradient is summed along diagonals.** In natural order, all pairs on a diagonal of a tile have one distance. Rows
are rotated until diagonals are columns, and a column is one atomic addition. Other row orders, and positions on a grid,
add pair by pair.

**Deterministic gradients are summed in integers.** Programs add to the gradient in any order, which changes the
rounding of floats. With FIXED_POINT, they add multiples of one small unit, as integers of 64 bits: sums are exact.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import LOG2_E, full, tanh


class BiasOfHead(NamedTuple):
    """The bias of a query head, and the pointer to the gradient of its table."""

    table: Any
    slope: Any
    dtable: Any
    dtable_scale: Any  # units per 1.0, with FIXED_POINT


class TilePositions(NamedTuple):
    """The positions of a tile's tokens, by which a bias counts distances, and bounds of them."""

    position: Any  # [rows]
    first: Any
    last: Any


@triton.jit
def load_bias(table, slopes, dtable, dtable_scale, head, A: tl.constexpr):
    """Loads the `BiasOfHead` of a query head; 0 for what is None, which Triton 3.6 cannot return."""
    slope, scale = 0.0, 0.0
    if A.BIAS.SLOPES:
        slope = tl.load(slopes + head)
    if A.BIAS.LENGTH == 0:
        return BiasOfHead(0, slope, 0, scale)
    elif dtable is None:
        return BiasOfHead(table + head * A.BIAS.LENGTH, slope, 0, scale)
    else:
        if A.BIAS.FIXED_POINT:
            dtable = dtable.to(tl.pointer_type(tl.int64))
            scale = tl.load(dtable_scale)
        return BiasOfHead(table + head * A.BIAS.LENGTH, slope, dtable + head * A.BIAS.LENGTH, scale)


@triton.jit
def positions_of_tile(block, tile, token, X: tl.constexpr):
    """Returns the `TilePositions` of a tile of a block."""
    position = token + X.FIRST_POSITION
    if len(X.POSITION_DIGITS) > 0:
        position = token * 0 + X.FIRST_POSITION
        for i in tl.static_range(len(X.POSITION_DIGITS)):
            digit = token // X.POSITION_DIGITS[i][0]
            if X.POSITION_DIGITS[i][1] > 0:
                digit = digit % X.POSITION_DIGITS[i][1]
            position += digit * X.POSITION_DIGITS[i][2]
    if _are_rows(X):
        first = block * X.BLOCK + tile * X.TILE + X.FIRST_POSITION
        return TilePositions(position, first, first + (X.TILE - 1))
    else:
        return TilePositions(position, tl.min(position, 0), tl.max(position, 0))


@triton.jit
def _are_rows(X: tl.constexpr):
    """True if the positions of a side are its rows, moved by FIRST_POSITION."""
    return len(X.ORDER.AXES) == 0 and len(X.POSITION_DIGITS) == 0


@triton.jit
def _range_of_indices(queries, keys, A: tl.constexpr):
    """Returns the smallest and the largest index in the table of a tile's distances; equal if all are beyond an end."""
    FIRST: tl.constexpr = A.BIAS.PADDING
    LAST: tl.constexpr = A.BIAS.LENGTH - 1 - A.BIAS.PADDING
    lowest, highest = keys.first - queries.last + A.BIAS.CENTER, keys.last - queries.first + A.BIAS.CENTER
    return tl.minimum(tl.maximum(lowest, FIRST), LAST), tl.minimum(tl.maximum(highest, FIRST), LAST)


@triton.jit
def _indices(queries, keys, Q_AXIS: tl.constexpr, A: tl.constexpr):
    """Returns the indices in the table of all pairs, by their positions."""
    distance = tl.expand_dims(keys.position, Q_AXIS) - tl.expand_dims(queries.position, 1 - Q_AXIS)
    return tl.minimum(tl.maximum(distance + A.BIAS.CENTER, 0), A.BIAS.LENGTH - 1)


@triton.jit
def _load_elements(pointers):
    """Loads elements in the layout of their consumer; `tl.load` has one of its own, to which scores would convert."""
    return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], tl.float32, True, 1)


@triton.jit
def biased_logits(products, bias, queries, keys, Q_AXIS: tl.constexpr, A: tl.constexpr, Q: tl.constexpr,
                  KV: tl.constexpr):  # fmt: skip
    """Turns q . k into logits to base 2, with a bias: [queries, keys], or Q_AXIS 1 transposes.

    ``queries`` and ``keys`` are `TilePositions`.
    """
    KV_AXIS: tl.constexpr = 1 - Q_AXIS
    x = products * (A.SCALE * A.BIAS.UNIT)
    if A.BIAS.SLOPES:
        q_position = tl.expand_dims(queries.position.to(tl.float32), KV_AXIS)
        x -= tl.abs(tl.expand_dims(keys.position.to(tl.float32), Q_AXIS) - q_position) * bias.slope
    if A.BIAS.LENGTH > 0:
        lowest, highest = _range_of_indices(queries, keys, A)
        if lowest == highest:
            x += tl.load(bias.table + lowest)
        elif _are_rows(Q) and _are_rows(KV):
            row, column = tl.arange(0, Q.TILE), tl.arange(0, KV.TILE)
            pointer = bias.table + (keys.first - queries.first + A.BIAS.CENTER)
            x += _load_elements(pointer + (tl.expand_dims(column, Q_AXIS) - tl.expand_dims(row, KV_AXIS)))
        else:
            x += _load_elements(bias.table + _indices(queries, keys, Q_AXIS, A))
    if A.CAP == 0:
        return x
    else:
        return tanh(x) * (A.CAP * LOG2_E)


# --- gradient of the table -------------------------------------------------------------------------------------------


@triton.jit
def _add_to_dtable(pointers, x, mask, bias, A: tl.constexpr):
    """Adds x to the gradient of the table, atomically."""
    if A.BIAS.FIXED_POINT:
        x = (x * bias.dtable_scale).to(tl.int64)
    tl.atomic_add(pointers, x, mask=mask, sem="relaxed")


@triton.jit
def zero_end_sums(Q: tl.constexpr):
    """Returns the sums of ds over pairs that take the first entry, and the last one, by query."""
    return full(Q.TILE, 0.0), full(Q.TILE, 0.0)


@triton.jit
def add_by_distance(ds, end_sums, bias, queries, keys, A: tl.constexpr, Q: tl.constexpr, KV: tl.constexpr):
    """Adds ds [Q.TILE, KV.TILE] to the gradient of the table, or to ``end_sums``, which it returns.

    ``queries`` and ``keys`` are `TilePositions`.
    """
    first_sum, last_sum = end_sums
    lowest, highest = _range_of_indices(queries, keys, A)
    if lowest == highest:
        by_query = tl.sum(ds, 1)
        first_sum += tl.where(lowest == A.BIAS.PADDING, by_query, 0.0)
        last_sum += tl.where(lowest == A.BIAS.PADDING, 0.0, by_query)
    elif _are_rows(Q) and _are_rows(KV):
        pointer = bias.dtable + (keys.first - queries.first + A.BIAS.CENTER)
        if Q.TILE <= KV.TILE:
            _add_diagonals(ds, pointer, 1, bias, A, Q.TILE, KV.TILE)
        else:
            _add_diagonals(tl.trans(ds), pointer, -1, bias, A, KV.TILE, Q.TILE)
    else:
        # Many pairs may take the first entry, or the last one: they would wait for each other.
        index = _indices(queries, keys, 0, A)
        is_first, is_last = index <= A.BIAS.PADDING, index >= A.BIAS.LENGTH - 1 - A.BIAS.PADDING
        first_sum += tl.sum(tl.where(is_first, ds, 0.0), 1)
        last_sum += tl.sum(tl.where(is_last, ds, 0.0), 1)
        _add_to_dtable(bias.dtable + index, ds, (is_first | is_last) == 0, bias, A)
    return first_sum, last_sum


@triton.jit
def _add_diagonals(x, pointer, SIGN: tl.constexpr, bias, A: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds x [ROWS, COLUMNS] to the gradient of the table; that of x[i, j] is at ``pointer + SIGN * (j - i)``."""
    diagonal = tl.arange(0, COLUMNS)
    column = tl.arange(0, ROWS)[:, None] + diagonal[None, :]
    rotated = tl.gather(x, column & (COLUMNS - 1), 1)  # [ROWS, COLUMNS]: element (i, d) is x[i, i + d]
    # Rotated columns go on with the diagonal d - COLUMNS. [COLUMNS, 2]: sums of both.
    sums = tl.sum(tl.join(tl.where(column < COLUMNS, rotated, 0.0), tl.where(column < COLUMNS, 0.0, rotated)), 0)
    offset = diagonal[:, None] - tl.arange(0, 2)[None, :] * COLUMNS
    _add_to_dtable(pointer + SIGN * offset, sums, None, bias, A)


@triton.jit
def store_end_sums(end_sums, bias, A: tl.constexpr):
    """Adds the sums of the first entry and of the last one to the gradient of the table."""
    _add_to_dtable(bias.dtable, tl.sum(end_sums[0], 0), None, bias, A)
    _add_to_dtable(bias.dtable + (A.BIAS.LENGTH - 1), tl.sum(end_sums[1], 0), None, bias, A)
