"""Axes in a jaxpr: which axes of its operands an equation's result has, and of which longer axes they are blocks."""

from collections.abc import Iterator, Sequence
from typing import Any

# The axes that were merged into one, each as (size, size of the longest axis it is a block of). The second number is 0
# if values do not differ along it.
Axis = tuple[tuple[int, int], ...]


def whole_axis(size: int) -> Axis:
    """Returns an axis that is no block of a longer one."""
    return ((size, size if size > 1 else 0),)


def differs(axis: Axis) -> bool:
    """True if values differ along an axis."""
    return longest(axis) > 0


def longest(axis: Axis) -> int:
    """Returns the size of the longest axis that an axis is a block of; 0 if values do not differ along it."""
    return max((whole for _, whole in axis), default=0)


def is_block(axis: Axis) -> bool:
    """True if an axis holds at most half of a longer one, as in attention that a user computes block by block.

    Example:
      >>> is_block(((128, 4096),)), is_block(((4095, 4096),))
      (True, False)
    """
    return any(whole >= 2 * size for size, whole in axis)


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
        axes = {j: group for group, made in _groups(shapes[0], shape) for j in made}
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


def reshaped(axes: Sequence[Axis], old: tuple[int, ...], new: tuple[int, ...]) -> list[Axis]:
    """Returns the axes of a reshaped array. An axis that is merged and split again is what it was.

    Example:
      >>> reshaped([((8, 8),), ((4096, 4096),)], (8, 4096), (8, 32, 128))
      [((8, 8),), ((32, 4096),), ((128, 4096),)]
    """
    result: list[Axis] = [((size, 0),) for size in new]
    for group, made in _groups(old, new):
        parts = [part for i in group for part in axes[i] if part[0] > 1]
        for j in made:
            size, taken = new[j], []
            while size > 1 and parts:
                part, whole = parts.pop(0)
                if size % part == 0:
                    taken.append((part, whole))
                    size //= part
                elif part % size == 0:
                    taken.append((size, whole))
                    parts.insert(0, (part // size, whole))
                    size = 1
                else:  # the boundaries of old and new axes cross
                    taken, size = [(new[j], max(w for _, w in [*taken, (part, whole)]))], 1
            result[j] = tuple(taken) or ((new[j], 0),)
    return result


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest runs of axes (old, new) that hold equally many elements."""
    group, made = [], []
    i, j, elements, new_elements = 0, 0, 1, 1
    while i < len(old) or j < len(new):
        if j == len(new) or (i < len(old) and elements <= new_elements):
            group.append(i)
            elements, i = elements * old[i], i + 1
        else:
            made.append(j)
            new_elements, j = new_elements * new[j], j + 1
        if group and made and elements == new_elements:
            yield group, made
            group, made, elements, new_elements = [], [], 1, 1
    yield group, made
