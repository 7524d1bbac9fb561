"""Lengths that a mask fits: arrays cover all positions, grids all tokens unless they say where they begin."""

from collections.abc import Iterator

from .algebra import And, Array, Blocks, Mask, Not, Or, Shifted, Transposed
from .grids import Neighborhood, OnGrid


def check_lengths(mask: Mask, q_len: int, kv_len: int) -> None:
    """Refuses a mask that is, or is combined from, one that is made for fewer positions.

    Raises:
      ValueError: an `Array` is smaller; or a grid has fewer tokens, without an offset that says which ones these are.
    """
    for part, queries, keys in _leaves(mask, q_len, kv_len):
        length = max(queries, keys)
        if isinstance(part, Array) and not (queries <= part.array.shape[0] and keys <= part.array.shape[1]):
            raise ValueError(f"mask: an Array must cover {(queries, keys)} positions, got {part.array.shape}")
        if isinstance(part, OnGrid) and part.offset is None and part.size < length:
            grid = f"{type(part).__name__} of shape {part.shape}"
            raise ValueError(_unplaced(grid, part.size, length, "the grid", "offset={}"))
        if isinstance(part, Neighborhood) and part.length < length:
            placed = f"Grid(({part.length},), {part!r}, offset={{}})"
            raise ValueError(_unplaced(repr(part), part.length, length, "the axis", placed))


def grid_starts(mask: Mask) -> set[int]:
    """Returns the positions at which the grids of a mask begin; none without grids.

    Example:
      >>> import sparse_layers as sl
      >>> grid_starts(sl.Grid((2, 3), sl.Window(1), offset=4) | sl.Global(4))
      {4}
    """
    # Asked about no positions, a grid is asked about as many as it is shifted by.
    return {max(0, part.start - shift) for part, shift, _ in _leaves(mask, 0, 0) if isinstance(part, OnGrid)}


def _unplaced(mask: str, size: int, length: int, grid: str, placed: str) -> str:
    """The error of a grid that is shorter than the sequence and does not say where it lies."""
    others = length - size
    return (
        f"mask: {mask} has {size} tokens, a sequence of {length} has {others} more: write {placed.format(others)} if "
        f"these come before {grid} (a class token, a prompt), {placed.format(0)} if they come after it (padding)"
    )


def _leaves(mask: Mask, q_len: int, kv_len: int) -> Iterator[tuple[Mask, int, int]]:
    """The masks that a mask is combined from, and the numbers of queries and keys that these are asked about."""
    if isinstance(mask, And | Or):
        yield from _leaves(mask.left, q_len, kv_len)
        yield from _leaves(mask.right, q_len, kv_len)
    elif isinstance(mask, Not):
        yield from _leaves(mask.mask, q_len, kv_len)
    elif isinstance(mask, Transposed):
        yield from _leaves(mask.mask, kv_len, q_len)
    elif isinstance(mask, Blocks):
        yield from _leaves(mask.mask, -(-q_len // mask.block), -(-kv_len // mask.block))
    elif isinstance(mask, Shifted):
        yield from _leaves(mask.mask, q_len + mask.by, kv_len + mask.by)
    else:
        yield mask, q_len, kv_len
