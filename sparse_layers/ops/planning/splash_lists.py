"""The arrays of `MaskInfo` for static masks: block lists of each head, packed into lines or laid out on the full grid.

Heads with equal masks share lists, and equal mask tiles are stored once::

    block states       forward: rows of blocks packed to the left      dkv: columns of blocks packed to the bottom
    P . .              block_mask  1 0    data_next  0 .               block_mask  1 1 0    data_next  0 1 .
    P P .                          1 1               0 1                           1 1 1               1 2 2
    . P P                          1 1               1 2
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ...masks.states import PARTIAL
from .blocks import BlockGrid, active_blocks, masked_tiles

# data_next, mask_next, block_mask, partial_mask_blocks and q_sequence of a `MaskInfo`.
Arrays = tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray | None, np.ndarray | None]


def index_dtype(maximum: int, downcast: bool) -> type[np.signedinteger]:
    """Returns the smallest of int8, int16 and int32 that holds a maximum; int32 without downcast."""
    if not downcast or maximum > np.iinfo(np.int16).max:
        return np.int32
    return np.int8 if maximum <= np.iinfo(np.int8).max else np.int16


class _SlicedHead:
    """One head of a mask that has only ``.shape`` and slicing; heads of equal contents are equal."""

    def __init__(self, mask: Any, head: int):
        self.mask, self.head = mask, head
        digest, (_, q_len, kv_len) = hashlib.sha256(), mask.shape
        step = max(1, (1 << 22) // max(1, kv_len))
        for start in range(0, q_len, step):
            digest.update(np.packbits(self[start : min(start + step, q_len), 0:kv_len], axis=1).tobytes())
        self.digest = digest.digest()

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return np.asarray(self.mask[(self.head, *index)], bool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SlicedHead) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def compile_mask(
    mask: Any,
    block_shape: tuple[int, int],
    is_dkv: bool,
    downcast: bool,
    head_shards: int,
    q_seq_shards: int,
    shrink: bool,
) -> tuple[Arrays, Callable[[Any, Any], Any] | None]:
    """Returns the five arrays of a `MaskInfo`, and the function that computes the mask in a kernel; else None."""
    heads, q_len, kv_len = mask.shape
    head_masks = getattr(mask, "masks", None) or [_SlicedHead(mask, head) for head in range(heads)]
    head_masks = [head_masks[head % len(head_masks)] for head in range(heads)]
    unique = {m: i for i, m in enumerate(dict.fromkeys(head_masks))}
    ids = [unique[m] for m in head_masks]
    shards = [tuple(shard_ids) for shard_ids in np.reshape(ids, (head_shards, -1)).tolist()]
    one_mask_a_shard = all(len(set(shard)) == 1 for shard in shards)
    if one_mask_a_shard:
        shards = [shard[:1] for shard in shards]

    grids = [_grid(m, q_len // block_shape[0], kv_len // block_shape[1], block_shape) for m in unique]
    function, q_sequence = _rule(next(iter(unique)), q_len) if len(unique) == 1 else (None, None)
    tiles, tile_ids = None, [np.zeros(len(grid.rows), np.int32) for grid in grids]
    if function is None:
        tiles = _distinct_tiles(unique, grids, tile_ids, block_shape)

    if shrink and one_mask_a_shard and len(unique) == 1:
        slices = [_pack_lines(grids[0], tile_ids[0], q_seq_shards, is_dkv)] * head_shards
    else:
        by_shard = {
            shard: _fill_grid([grids[i] for i in shard], [tile_ids[i] for i in shard], q_seq_shards, is_dkv)
            for shard in set(shards)
        }
        slices = [by_shard[shard] for shard in shards]
    block_mask, data_next, mask_next = (
        array.astype(index_dtype(array.max(initial=0), downcast)) for array in np.concatenate(slices, axis=1)
    )
    if tiles is not None and is_dkv:
        tiles = tiles.swapaxes(1, 2).copy()
    arrays = data_next, None if tiles is None else mask_next, block_mask, tiles, q_sequence
    for array in arrays:
        if array is not None:
            array.flags.writeable = False
    return arrays, function


def _rule(mask: Any, q_len: int) -> tuple[Callable[[Any, Any], Any] | None, np.ndarray | None]:
    """Returns the function that computes a mask inside a kernel, and each query's position; else None, None."""
    if isinstance(mask, Mask):
        return (mask, _positions(q_len)) if mask.computable else (None, None)
    if hasattr(mask, "q_sequence") and hasattr(mask, "mask_function"):
        return mask.mask_function, np.array(mask.q_sequence, np.int32)
    return None, None


@bounded_cache()
def _positions(q_len: int) -> np.ndarray:
    """Returns 0 .. q_len - 1, one array for all infos of a length: at a million tokens it outweighs the lists."""
    positions = np.arange(q_len, dtype=np.int32)
    positions.flags.writeable = False
    return positions


def _grid(mask: Any, num_q: int, num_kv: int, block_shape: tuple[int, int]) -> BlockGrid:
    """Returns the active blocks of one head."""
    if isinstance(mask, Mask):
        return active_blocks(mask, num_q, num_kv, *block_shape)
    states = np.zeros((num_q, num_kv), np.int8)
    for row in range(num_q):
        tiles = _row_of_tiles(mask, row, num_kv, block_shape)
        np.add(tiles.any(axis=(1, 2)), tiles.all(axis=(1, 2)), out=states[row], dtype=np.int8)
    rows, columns = np.nonzero(states)
    return BlockGrid(rows.astype(np.int32), columns.astype(np.int32), states[rows, columns], num_q, num_kv)


def _row_of_tiles(mask: Any, row: int, num_kv: int, block_shape: tuple[int, int]) -> np.ndarray:
    """Returns all tiles of one row of blocks of a sliceable head, bool [num_kv, bq, bkv]."""
    block_q, block_kv = block_shape
    stripe = np.asarray(mask[row * block_q : (row + 1) * block_q, 0 : num_kv * block_kv], bool)
    return stripe.reshape(block_q, num_kv, block_kv).swapaxes(0, 1)


def _partial_tiles(mask: Any, grid: BlockGrid, block_shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Yields the tiles of the PARTIAL blocks in their order, in chunks of bool [n, bq, bkv]."""
    partial = grid.states == PARTIAL
    rows, columns = grid.rows[partial], grid.columns[partial]
    if isinstance(mask, Mask):
        yield from masked_tiles(mask, rows, columns, *block_shape)
        return
    for row in np.unique(rows):
        yield _row_of_tiles(mask, row, grid.num_columns, block_shape)[columns[rows == row]]


def _distinct_tiles(
    masks: Iterable[Any], grids: list[BlockGrid], tile_ids: list[np.ndarray], block_shape: tuple[int, int]
) -> np.ndarray | None:
    """Returns the distinct tiles, bool [P, bq, bkv]; writes each PARTIAL block's index of its tile to tile_ids."""
    seen: dict[bytes, int] = {}
    for mask, grid, ids in zip(masks, grids, tile_ids, strict=True):
        ids_of_tiles = [
            seen.setdefault(bits.tobytes(), len(seen))
            for tiles in _partial_tiles(mask, grid, block_shape)
            for bits in np.packbits(tiles.reshape(len(tiles), -1), axis=1)
        ]
        ids[grid.states == PARTIAL] = ids_of_tiles
    if not seen:
        return None
    bits = np.frombuffer(b"".join(seen), np.uint8).reshape(len(seen), -1)
    return np.unpackbits(bits, axis=1, count=math.prod(block_shape)).astype(bool).reshape(len(seen), *block_shape)


def _look_ahead(active: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Returns for each of `size` steps the value of the next active step, wrapping round; 0 if none is active."""
    result = np.zeros(size, np.int32)
    if len(active):
        ahead = np.repeat(values, np.diff(active, prepend=-1))
        result[: len(ahead)], result[len(ahead) :] = ahead, values[0]
    return result


def _pack_lines(grid: BlockGrid, tile_ids: np.ndarray, q_seq_shards: int, is_dkv: bool) -> np.ndarray:
    """Returns block_mask, data_next, mask_next of the shrunk grid, int32 [3, 1, nq, w] (dkv: [3, 1, shards * w, nk]).

    A line is a row of blocks, or for dkv a column. Its active blocks lie side by side, at its start or for dkv at its
    end. No array [nq, nk] is made.
    """
    shard_rows = grid.num_rows // q_seq_shards
    num_lines = grid.num_columns if is_dkv else shard_rows
    shards = []
    for shard in range(q_seq_shards):
        first = shard * shard_rows
        entries = slice(*np.searchsorted(grid.rows, (first, first + shard_rows)))
        row, column, state, tile = (
            grid.rows[entries] - first,
            grid.columns[entries],
            grid.states[entries],
            tile_ids[entries],
        )
        if is_dkv:
            order = np.argsort(column, kind="stable")
            row, column, state, tile = row[order], column[order], state[order], tile[order]
        partial = np.flatnonzero(state == PARTIAL)
        mask_next = _look_ahead(partial, tile[partial], len(tile))
        line, data = (column, row) if is_dkv else (row, column)
        count = np.bincount(line, minlength=num_lines)
        width = count.max(initial=0)
        before = np.cumsum(count) - count
        slot = np.arange(len(line)) - np.repeat(before - (width - count) if is_dkv else before, count)
        shards.append((width, line, slot, (state, data, mask_next)))

    # An empty mask keeps one empty step a line: without any, a kernel would leave its output unwritten.
    widest = max(1, *(width for width, *_ in shards))
    arrays = np.zeros((3, len(shards), num_lines, widest), np.int32)
    for j, (width, line, slot, values) in enumerate(shards):
        arrays[:, j, line, slot] = values
        if width:  # steps that only fill up to the widest shard fetch nothing new
            arrays[1:, j, :, width:] = arrays[1:, j, :, width - 1 : width]
    if is_dkv:
        arrays = arrays.swapaxes(2, 3)
    return arrays.reshape(3, 1, -1, arrays.shape[-1])


def _fill_grid(grids: list[BlockGrid], tile_ids: list[np.ndarray], q_seq_shards: int, is_dkv: bool) -> np.ndarray:
    """Returns block_mask, data_next and mask_next of one head shard on the full grid, int32 [3, heads, nq, nk]."""
    heads, num_q, num_kv = len(grids), grids[0].num_rows, grids[0].num_columns
    block_mask, tile = np.zeros((2, heads, num_q, num_kv), np.int32)
    for head, (grid, ids) in enumerate(zip(grids, tile_ids, strict=True)):
        block_mask[head, grid.rows, grid.columns] = grid.states
        tile[head, grid.rows, grid.columns] = ids

    shards = []
    for states, ids in zip(np.split(block_mask, q_seq_shards, 1), np.split(tile, q_seq_shards, 1), strict=True):
        if is_dkv:  # the kernel visits kv, head, q
            states, ids = states.transpose(2, 0, 1), ids.transpose(2, 0, 1)
        active, partial = np.flatnonzero(states), np.flatnonzero(states == PARTIAL)
        data_next = _look_ahead(active, active % states.shape[2], states.size)
        mask_next = _look_ahead(partial, ids.ravel()[partial], states.size)
        arrays = np.stack([states, data_next.reshape(states.shape), mask_next.reshape(states.shape)])
        shards.append(arrays.transpose(0, 2, 3, 1) if is_dkv else arrays)
    return np.concatenate(shards, axis=2)
