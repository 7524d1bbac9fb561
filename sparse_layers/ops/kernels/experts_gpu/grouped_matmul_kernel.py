"""Products of rows with the kernels of their experts, and the gradient of these kernels.

**A work tile has rows of one expert.** They are neighbours. A tile of few rows is padded to that of a product.

**Kernels are read where they lie.** A program reads the columns of its expert that it needs, so no kernel is gathered.

**Gradients of kernels are sums over the rows of an expert.** A program has a tile of one expert's gradient.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportAssignmentType=false

from typing import NamedTuple

import triton
import triton.language as tl

from ..gpu.tiles import zeros


class GroupedMatmulConstants(NamedTuple):
    """Constants of the kernels' compilation; tiles are powers of two."""

    ROWS: int  # rows of x
    EXPERTS: int
    IN: int
    OUT: int
    ROW_TILE: int
    IN_TILE: int
    OUT_TILE: int
    TRANSPOSED: bool = False  # True if kernels are [E, OUT, IN]
    SINGLE_ROWS: bool = False  # True if each work tile is a row; else work tiles have rows of one expert


@triton.jit
def grouped_matmul_kernel(
    x,  # [ROWS, IN]
    kernels,  # [E, IN, OUT], or [E, OUT, IN] if TRANSPOSED
    tile_experts,  # int32 [tiles], the expert of each work tile; EXPERTS for none
    tile_starts,  # int32 [tiles], its first row; unused with SINGLE_ROWS, as is:
    tile_ends,  # int32 [tiles], its end
    y,  # [ROWS, OUT]; rows without an expert are not written
    C: tl.constexpr,
):
    """Computes y[row] = sum(x[row, i] * kernels[expert, i] for i < IN); grid (work tiles x tiles of OUT)."""
    COLUMN_TILES: tl.constexpr = (C.OUT + C.OUT_TILE - 1) // C.OUT_TILE
    IN_STRIDE: tl.constexpr = 1 if C.TRANSPOSED else C.OUT
    OUT_STRIDE: tl.constexpr = C.IN if C.TRANSPOSED else 1
    work_tile = tl.program_id(0) // COLUMN_TILES
    expert = tl.load(tile_experts + work_tile).to(tl.int64)
    if expert < C.EXPERTS:
        start, end = work_tile, work_tile + 1
        if not C.SINGLE_ROWS:
            start, end = tl.load(tile_starts + work_tile), tl.load(tile_ends + work_tile)
        row = start.to(tl.int64) + tl.arange(0, C.ROW_TILE)  # [ROW_TILE]
        has_row = row < end
        column = tl.program_id(0) % COLUMN_TILES * C.OUT_TILE + tl.arange(0, C.OUT_TILE)  # [OUT_TILE]
        has_column, offset = column < C.OUT, tl.arange(0, C.IN_TILE)  # [IN_TILE]
        x_rows = x + row[:, None] * C.IN
        kernel_columns = kernels + expert * C.IN * C.OUT + column[None, :] * OUT_STRIDE
        acc = zeros(C.ROW_TILE, C.OUT_TILE)
        for first in tl.range(0, C.IN, C.IN_TILE):
            feature = first + offset
            has_feature = feature < C.IN
            x_tile = tl.load(x_rows + feature[None, :], mask=has_row[:, None] & has_feature[None, :], other=0.0)
            mask = has_feature[:, None] & has_column[None, :]
            kernel_tile = tl.load(kernel_columns + feature[:, None] * IN_STRIDE, mask=mask, other=0.0)
            acc = tl.dot(x_tile, kernel_tile.to(x_tile.dtype), acc, input_precision="ieee")
        y_tile = y + row[:, None] * C.OUT + column[None, :]
        tl.store(y_tile, acc.to(y.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit
def kernel_gradient_kernel(
    x,  # [ROWS, IN]
    dy,  # [ROWS, OUT]
    group_ends,  # int32 [E], the end of each expert's rows, which begin at the end of the expert before
    dkernels,  # [E, IN, OUT]
    C: tl.constexpr,
):
    """Computes dkernels[expert] = sum(x[row] ⊗ dy[row] for rows of the expert); grid (columns, tiles of IN, E)."""
    expert = tl.program_id(2)
    start = tl.load(group_ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(group_ends + expert)
    feature = tl.program_id(1) * C.IN_TILE + tl.arange(0, C.IN_TILE)  # [IN_TILE]
    column = tl.program_id(0) * C.OUT_TILE + tl.arange(0, C.OUT_TILE)  # [OUT_TILE]
    has_feature, has_column = feature < C.IN, column < C.OUT
    acc, offset = zeros(C.IN_TILE, C.OUT_TILE), tl.arange(0, C.ROW_TILE)
    for first in tl.range(start, end, C.ROW_TILE):
        row = (first + offset).to(tl.int64)[:, None]  # [ROW_TILE, 1]
        has_row = row < end
        x_tile = tl.load(x + row * C.IN + feature[None, :], mask=has_row & has_feature[None, :], other=0.0)
        dy_tile = tl.load(dy + row * C.OUT + column[None, :], mask=has_row & has_column[None, :], other=0.0)
        acc = tl.dot(tl.trans(x_tile), dy_tile, acc, input_precision="ieee")
    gradient = dkernels + (expert.to(tl.int64) * C.IN + feature[:, None]) * C.OUT + column[None, :]
    tl.store(gradient, acc.to(dkernels.dtype.element_ty), mask=has_feature[:, None] & has_column[None, :])
