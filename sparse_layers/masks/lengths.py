"""Checks that a mask fits lengths: arrays and graphs cover all positions, grids without an offset all tokens."""

from collections.abc import Iterator

from .algebra import And, Array, Blocks, Mask, Not, Or, Shifted, Transposed
from .graphs import Graph
from .grids import Neighborhood, OnGrid
from .rectangles import Rectangle


def check_lengths(mask: Mask, q_len: int, kv_len: int) -> None:
    """Refuses a mask that contains an `Array`, a `Graph` or a grid for fewer positions."""
    for leaf, queries, keys in _leaves(mask, q_len, kv_len):
        length = max(queries, keys)
        if isinstance(leaf, Array) and not (queries <= leaf.array.shape[0] and keys <= leaf.array.shape[1]):
            raise ValueError(f"mask: an Array must cover {(queries, keys)} positions, got {leaf.array.shape}")
        if isinstance(leaf, Graph) and not (queries <= leaf.shape[0] and keys <= leaf.shape[1]):
            raise ValueError(
                f"mask: a Graph must cover {(queries, keys)} positions, got {leaf.shape}; padding has no edges"
            )
        if isinstance(leaf, OnGrid) and leaf.offset is None and leaf.size < length:
            grid = f"{type(leaf).__name__} of shape {leaf.shape}"
            raise ValueError(_no_offset(grid, leaf.size, length, "the grid", "offset={}"))
        if isinstance(leaf, Neighborhood) and leaf.length < length:
            example = f"Grid(({leaf.length},), {leaf!r}, offset={{}})"
            raise ValueError(_no_offset(repr(leaf), leaf.length, length, "the axis", example))


def grid_starts(mask: Mask) -> set[int]:
    """Returns the positions at which the grids in a mask begin.

    Example:
      >>> import sparse_layers as sl
      >>> grid_starts(sl.Grid((2, 3), sl.Window(1), offset=4) | sl.Global(4))
      {4}
    """
    # For lengths of 0, those of a leaf are what shifts add to them.
    leaves = [(leaf, shifts) for leaf, *shifts in _leaves(mask, 0, 0) if isinstance(leaf, OnGrid)]
    return {max(0, leaf.start - shift) for leaf, shifts in leaves for shift in shifts}


def _no_offset(mask: str, size: int, length: int, grid: str, example: str) -> str:
    """Returns the error about a grid without offset in a longer sequence; ``example`` shows where to write one."""
    rest = length - size
    return (
        f"mask: {mask} has {size} tokens, a sequence of {length} has {rest} more: write {example.format(rest)} if "
        f"these come before {grid} (a class token, a prompt), {example.format(0)} if they come after it (padding)"
    )


def _leaves(mask: Mask, q_len: int, kv_len: int) -> Iterator[tuple[Mask, int, int]]:
    """Yields the masks that a mask is combined from, with the numbers of queries and keys that each must cover."""
    if isinstance(mask, And | Or):
        yield from _leaves(mask.left, q_len, kv_len)
        yield from _leaves(mask.right, q_len, kv_len)
    elif isinstance(mask, Not):
        yield from _leaves(mask.mask, q_len, kv_len)
    elif isinstance(mask, Transposed):
        yield from _leaves(mask.mask, kv_len, q_len)
    elif isinstance(mask, Blocks):
        q_block, kv_block = mask.sizes
        yield from _leaves(mask.mask, -(-q_len // q_block), -(-kv_len // kv_block))
    elif isinstance(mask, Shifted):
        yield from _leaves(mask.mask, q_len + mask.by, kv_len + mask.by)
    elif isinstance(mask, Rectangle):
        lengths = (q_len - mask.q_start, mask.q_len), (kv_len - mask.kv_start, mask.kv_len)
        yield from _leaves(mask.mask, *(n if most is None else min(n, most) for n, most in lengths))
    else:
        yield mask, q_len, kv_len
