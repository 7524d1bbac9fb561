"""Axes in a jaxpr: which axes of its operands an equation's result has, and of which longer axes they are blocks."""

from collections.abc import Iterator, Sequence
from typing import Any

# The factors of an axis, of which it was merged: each is (size, size of the longest axis that it is a block of), and
# (size, 0) if values do not differ along it.
Axis = tuple[tuple[int, int], ...]


def full_axis(size: int) -> Axis:
    """Returns an axis that is no block of a longer one."""
    return ((size, size if size > 1 else 0),)


def differs(axis: Axis) -> bool:
    """True if values differ along an axis."""
    return longest(axis) > 0


def longest(axis: Axis) -> int:
    """Returns the size of the longest axis that an axis is a block of; 0 if values do not differ along it."""
    return max((extent for _, extent in axis), default=0)


def is_block(axis: Axis) -> bool:
    """True if an axis holds at most half of a longer one, as in attention that a user computes block by block.

    Example:
      >>> is_block(((128, 4096),)), is_block(((4095, 4096),))
      (True, False)
    """
    return any(extent >= 2 * size for size, extent in axis)


def sources(equation: Any, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Returns for each axis of an equation's result the axes that it comes from, as (operand, axis).

    Operands of the result's rank have its axes, where the primitive does not say otherwise.
    """
    name, params = equation.primitive.name, equation.params
    if name == "transpose":
        return [[(0, i)] for i in params["permutation"]]
    if name == "broadcast_in_dim":
        of_axis = {j: i for i, j in enumerate(params["broadcast_dimensions"])}
        return [[(0, of_axis[j])] if j in of_axis and shapes[0][of_axis[j]] == n else [] for j, n in enumerate(shape)]
    if name == "reshape":
        axes = {j: in_axes for in_axes, out_axes in _groups(shapes[0], shape) for j in out_axes}
        return [[(0, i) for i in axes[j] if shapes[0][i] > 1] for j in range(len(shape))]
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        free = [[[(k, i)] for i in range(len(shapes[k])) if i not in (*contracted[k], *batch[k])] for k in range(2)]
        return [*([(0, i), (1, j)] for i, j in zip(*batch, strict=True)), *free[0], *free[1]]
    if name == "gather":
        numbers = params["dimension_numbers"]
        hidden = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        of_offset = dict(zip(numbers.offset_dims, (i for i in range(len(shapes[0])) if i not in hidden), strict=True))
        return [[(0, of_offset[j])] if j in of_offset else [] for j in range(len(shape))]
    removed = params.get("dimensions", ()) if name == "squeeze" else params.get("axes", ())
    if name == "squeeze" or (name.startswith(("reduce_", "arg")) and "axes" in params):
        return [[(0, i)] for i in range(len(shapes[0])) if i not in removed]
    same_rank = [k for k, operand in enumerate(shapes) if len(operand) == len(shape)]
    return [[(k, j) for k in same_rank if shapes[k][j] > 1 or n == 1] for j, n in enumerate(shape)]


def reshaped(axes: Sequence[Axis], shape: tuple[int, ...], new_shape: tuple[int, ...]) -> list[Axis]:
    """Returns the axes of a reshaped array. An axis that is merged and split again is what it was.

    Example:
      >>> reshaped([((8, 8),), ((4096, 4096),)], (8, 4096), (8, 32, 128))
      [((8, 8),), ((32, 4096),), ((128, 4096),)]
    """
    result: list[Axis] = [((size, 0),) for size in new_shape]
    for in_axes, out_axes in _groups(shape, new_shape):
        factors = [factor for i in in_axes for factor in axes[i] if factor[0] > 1]
        for j in out_axes:
            size, taken = new_shape[j], []
            while size > 1 and factors:
                n, extent = factors.pop(0)
                if size % n == 0:
                    taken.append((n, extent))
                    size //= n
                elif n % size == 0:
                    taken.append((size, extent))
                    factors.insert(0, (n // size, extent))
                    size = 1
                else:  # the boundaries of the axes cross
                    taken, size = [(new_shape[j], longest((*taken, (n, extent))))], 1
            result[j] = tuple(taken) or ((new_shape[j], 0),)
    return result


def _groups(shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest runs of axes, of a shape and of a new one, that hold equally many elements."""
    in_axes, out_axes = [], []
    i, j, elements, new_elements = 0, 0, 1, 1
    while i < len(shape) or j < len(new_shape):
        if j == len(new_shape) or (i < len(shape) and elements <= new_elements):
            in_axes.append(i)
            elements, i = elements * shape[i], i + 1
        else:
            out_axes.append(j)
            new_elements, j = new_elements * new_shape[j], j + 1
        if in_axes and out_axes and elements == new_elements:
            yield in_axes, out_axes
            in_axes, out_axes, elements, new_elements = [], [], 1, 1
    yield in_axes, out_axes
