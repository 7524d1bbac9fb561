"""`MaskInfo`: block lists with the meaning that JAX's splash attention gives them; kernels here read `BlockLists`.

`process_mask` and `process_mask_dkv` compile a static mask to numpy arrays; `process_dynamic_mask` and
`process_dynamic_mask_dkv` do it inside a traced function. Masks of this package are compiled from closed-form block
lists, so the cost follows the pattern; anything else with ``.shape`` and slicing is read one row of blocks at a time.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np

from ...arguments.checks import checked
from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ...masks.states import FULL, PARTIAL
from .block_lists import tiled
from .blocks import BlockGrid, active_blocks, masked_tiles


@functools.partial(jax.export.register_namedtuple_serialization, serialized_name="sparse_layers.MaskInfo")
class MaskInfo(NamedTuple):
    """Block lists of a mask [H, Q, K] cut into nq x nk blocks of bq x bkv; R is H, or the head shards if heads agree.

    A kernel's forward grid is (H, nq, data_next.shape[2]), its dkv grid (nk, H, data_next.shape[1]). A step runs iff
    ``block_mask > 0``; where it is 2, no element is masked. Dead steps repeat the index of the next live one, so that
    a pipeline prefetches nothing in vain.

    Attributes:
      data_next: integer [R, nq, nk], or narrower if the grid is shrunk: the key block to read (dkv: the query block,
        counted within its query shard).
      mask_next: integer, same shape: the tile of ``partial_mask_blocks`` to read; None without tiles.
      block_mask: integer, same shape: 0 nothing allowed, 1 some pairs, 2 all.
      partial_mask_blocks: bool [P, bq, bkv] (dkv: [P, bkv, bq]), the distinct tiles of the blocks in state 1; None if
        there are none or the mask is computed. Dynamic: [H, nq, nk, bq, bkv], every block.
      q_sequence: int32 [Q], the position of each query if the mask is computed; else None.
      is_dynamic_mask: True if ``partial_mask_blocks`` holds every block; else None.
    """

    data_next: Any
    mask_next: Any
    block_mask: Any
    partial_mask_blocks: Any
    q_sequence: Any
    is_dynamic_mask: bool | None = None

    def __repr__(self):
        fields: Any = zip(self._fields, self, strict=True)
        shown = (f"{name}={x.dtype}{[*x.shape]}" if hasattr(x, "dtype") else f"{name}={x}" for name, x in fields)
        return f"MaskInfo({', '.join(shown)})"


def process_mask(
    mask: Any,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = False,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, Callable[[Any, Any], Any] | None]:
    """Compiles a static mask to block lists.

    Args:
      mask: [H, Q, K]: a `HeadMasks`, a bool array, or any object with ``.shape`` and ``mask[h, q_slice, kv_slice]``,
        such as splash attention's ``MultiHeadMask``.
      block_shape: (bq, bkv), queries and keys in a block.
      is_dkv: lists for the gradient of keys and values, which walks each key block's query blocks.
      downcast_smem_data: store each index array in the smallest of int8, int16 and int32 that fits; else int32.
      head_shards: number of equal parts of the heads that devices hold.
      q_seq_shards: number of equal parts of the queries that devices hold; dkv indices count within a part.
      shrink_grid: leave out dead steps if one mask serves all heads.

    Returns:
      The `MaskInfo` of read-only numpy arrays, and, if one computable mask serves all heads, the function
      ``f(q_ids, kv_ids)`` that computes it inside a kernel (then there are no tiles); else None. Cached by content for
      `HeadMasks` and ``MultiHeadMask``.

    Raises:
      TypeError: the mask has no shape, or is a traced array.
      ValueError: the mask is not 3-dimensional or not bool, or a block or shard count does not divide what it divides.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> info, function = sl.process_mask(np.tril(np.ones((1, 4, 4), bool)), (2, 2))
      >>> info.block_mask.tolist(), info.partial_mask_blocks.tolist(), function
      ([[[1, 0], [2, 1]]], [[[True, False], [True, True]]], None)
    """
    if isinstance(mask, Mask) or not hasattr(mask, "shape"):
        raise TypeError(f"mask: expected lengths, bind(mask, heads, q_len, kv_len) gives them; got {mask!r}")
    if isinstance(mask, jax.core.Tracer):
        raise TypeError(f"mask: of an array known at run time only, process_dynamic_mask makes the lists; got {mask!r}")
    _check_array(mask)
    _check_division(mask.shape, block_shape, head_shards, q_seq_shards)
    for name, flag in {"is_dkv": is_dkv, "downcast_smem_data": downcast_smem_data, "shrink_grid": shrink_grid}.items():
        checked(name, flag, bool)
    # A mask that lists its heads compares and hashes by content; of other objects that is not known.
    compile_mask = _compile if hasattr(mask, "masks") else _compile.__wrapped__
    return compile_mask(mask, tuple(block_shape), is_dkv, downcast_smem_data, head_shards, q_seq_shards, shrink_grid)


# The same for the gradient of keys and values.
def process_mask_dkv(
    mask: Any,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = True,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, Callable[[Any, Any], Any] | None]:
    """`process_mask` for the backward pass of k and v: block lists by key column, tiles [P, bkv, bq].

    Args:
      mask, block_shape, is_dkv, downcast_smem_data, head_shards, q_seq_shards, shrink_grid: as in `process_mask`.

    Returns:
      What `process_mask` returns with ``is_dkv=True``.

    Raises:
      ValueError: as `process_mask`.

    Example:
      >>> import sparse_layers as sl
      >>> info, _ = sl.process_mask_dkv(sl.bind(sl.Causal() & sl.Window(2), 1, 8, 8), (4, 4))
      >>> info.block_mask.tolist()  # by key column, packed to the bottom
      [[[1, 0], [1, 1]]]
    """
    return process_mask(
        mask,
        block_shape,
        is_dkv=is_dkv,
        downcast_smem_data=downcast_smem_data,
        head_shards=head_shards,
        q_seq_shards=q_seq_shards,
        shrink_grid=shrink_grid,
    )


def process_dynamic_mask(
    mask: jax.Array,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = False,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, None]:
    """Compiles a mask that is known at run time only; works under jit with all arguments but the mask static.

    Args:
      mask: bool [H, Q, K].
      block_shape: (bq, bkv), queries and keys in a block.
      is_dkv: lists for the gradient of keys and values.
      downcast_smem_data: store each index array in the smallest integer type that fits any mask of this shape.
      head_shards: number of equal parts of the heads that devices hold; tile indices count within a part.
      q_seq_shards: number of equal parts of the queries that devices hold; tile indices count within a part.
      shrink_grid: has no effect, for the number of live blocks is not known; kept so that calls look alike.

    Returns:
      The `MaskInfo` of JAX arrays, its ``partial_mask_blocks`` holding every block, and None.

    Raises:
      TypeError: the mask is no array.
      ValueError: the mask is not 3-dimensional or not bool, or a block or shard count does not divide what it divides.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> info, _ = sl.process_dynamic_mask(jnp.tril(jnp.ones((1, 4, 4), bool)), (2, 2))
      >>> info.block_mask.tolist(), info.mask_next.tolist()
      ([[[1, 0], [2, 1]]], [[[0, 0], [0, 3]]])
    """
    del shrink_grid
    if not hasattr(mask, "dtype"):
        raise TypeError(f"mask: expected a bool array [H, Q, K] (of others process_mask makes the lists), got {mask!r}")
    _check_array(mask)
    _check_division(mask.shape, block_shape, head_shards, q_seq_shards)
    tiles, block_mask = tiled(mask, block_shape)
    heads, num_q, num_kv = block_mask.shape
    shard_heads, shard_rows = heads // head_shards, num_q // q_seq_shards
    head = (jnp.arange(heads, dtype=np.int32) % shard_heads)[:, None, None]
    q = (jnp.arange(num_q, dtype=np.int32) % shard_rows)[None, :, None]
    kv = jnp.arange(num_kv, dtype=np.int32)[None, None, :]
    data_next = jnp.where(block_mask > 0, q if is_dkv else kv, 0)
    mask_next = jnp.where(block_mask == PARTIAL, (head * shard_rows + q) * num_kv + kv, 0)
    return MaskInfo(
        data_next.astype(_index_dtype(shard_rows if is_dkv else num_kv, downcast_smem_data)),
        mask_next.astype(_index_dtype(shard_heads * shard_rows * num_kv, downcast_smem_data)),
        block_mask.astype(_index_dtype(FULL, downcast_smem_data)),
        tiles.swapaxes(3, 4) if is_dkv else tiles,
        q_sequence=None,
        is_dynamic_mask=True,
    ), None


# The same for the gradient of keys and values.
def process_dynamic_mask_dkv(
    mask: jax.Array,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = True,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, None]:
    """`process_dynamic_mask` for the backward pass of k and v: query blocks by key column, tiles [.., bkv, bq].

    Args:
      mask, block_shape, is_dkv, downcast_smem_data, head_shards, q_seq_shards, shrink_grid: as there.

    Returns:
      What `process_dynamic_mask` returns with ``is_dkv=True``.

    Raises:
      ValueError: as `process_dynamic_mask`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> info, _ = sl.process_dynamic_mask_dkv(jnp.tril(jnp.ones((1, 8, 8), bool)), (4, 2))
      >>> info.partial_mask_blocks.shape
      (1, 2, 4, 2, 4)
    """
    return process_dynamic_mask(
        mask,
        block_shape,
        is_dkv=is_dkv,
        downcast_smem_data=downcast_smem_data,
        head_shards=head_shards,
        q_seq_shards=q_seq_shards,
        shrink_grid=shrink_grid,
    )


def _check_array(mask: Any) -> None:
    """Raises the ValueErrors about the mask itself that static and dynamic masks share."""
    if len(mask.shape) != 3:
        raise ValueError(f"Expected a 3-dim mask, instead got: {mask.shape=}")
    if 0 in mask.shape:
        raise ValueError(f"Expected a mask with heads, queries and keys, instead got: {mask.shape=}")
    if getattr(mask, "dtype", np.bool_) != np.bool_:
        raise ValueError(f"Expected a bool mask, instead got: {mask.dtype=}")


def _check_division(shape: Sequence[int], block_shape: Sequence[int], head_shards: int, q_seq_shards: int) -> None:
    """Raises the ValueErrors about sizes that static and dynamic masks share, in splash attention's order."""
    if not isinstance(block_shape, Sequence) or len(block_shape) != 2:
        raise ValueError(f"block_shape must be a pair (queries, keys), got {block_shape!r}")
    sizes = {"block_shape": block_shape, "head_shards": [head_shards], "q_seq_shards": [q_seq_shards]}
    for name, values in sizes.items():
        for value in values:
            checked(name, value, int)
    (head_count, q_seq_len, kv_seq_len), (q_block_size, kv_block_size) = shape, block_shape
    if not _divides(q_block_size, q_seq_len):
        raise ValueError(f"{q_block_size=} should divide {q_seq_len=}.")
    if not _divides(kv_block_size, kv_seq_len):
        raise ValueError(f"{kv_block_size=} should divide {kv_seq_len=}.")
    if not _divides(q_seq_shards, q_seq_len):
        raise ValueError(f"{q_seq_shards=} should divide {q_seq_len=}.")
    q_seq_len_per_shard = q_seq_len // q_seq_shards
    if not _divides(q_block_size, q_seq_len_per_shard):
        raise ValueError(f"{q_block_size=} should divide {q_seq_len_per_shard=}.")
    if not _divides(head_shards, head_count):
        raise ValueError(f"{head_shards=} should divide {head_count=}.")


def _divides(part: int, whole: int) -> bool:
    return part > 0 and whole % part == 0


def _index_dtype(maximum: int, downcast: bool) -> type[np.signedinteger]:
    if not downcast or maximum > np.iinfo(np.int16).max:
        return np.int32
    return np.int8 if maximum <= np.iinfo(np.int8).max else np.int16


# --- static masks ----------------------------------------------------------------------------------------------------


class _SlicedHead:
    """One head of an object of which only ``.shape`` and slicing are known; equal contents are equal heads."""

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


@bounded_cache()
def _compile(
    mask: Any,
    block_shape: tuple[int, int],
    is_dkv: bool,
    downcast: bool,
    head_shards: int,
    q_seq_shards: int,
    shrink: bool,
) -> tuple[MaskInfo, Callable[[Any, Any], Any] | None]:
    """`process_mask` after its checks."""
    heads, q_len, kv_len = mask.shape
    head_masks = getattr(mask, "masks", None) or [_SlicedHead(mask, head) for head in range(heads)]
    head_masks = [head_masks[head % len(head_masks)] for head in range(heads)]
    unique = {m: i for i, m in enumerate(dict.fromkeys(head_masks))}
    ids = [unique[m] for m in head_masks]
    shards = [tuple(part) for part in np.reshape(ids, (head_shards, -1)).tolist()]
    one_mask_a_shard = all(len(set(shard)) == 1 for shard in shards)
    if one_mask_a_shard:
        shards = [shard[:1] for shard in shards]

    grids = [_grid(m, q_len // block_shape[0], kv_len // block_shape[1], block_shape) for m in unique]
    function, q_sequence = _computed(next(iter(unique)), q_len) if len(unique) == 1 else (None, None)
    tiles, tile_ids = None, [np.zeros(len(grid.rows), np.int32) for grid in grids]
    if function is None:
        tiles = _distinct_tiles(unique, grids, tile_ids, block_shape)

    if shrink and one_mask_a_shard and len(unique) == 1:
        slices = [_packed(grids[0], tile_ids[0], q_seq_shards, is_dkv)] * head_shards
    else:
        by_shard = {
            shard: _placed([grids[i] for i in shard], [tile_ids[i] for i in shard], q_seq_shards, is_dkv)
            for shard in set(shards)
        }
        slices = [by_shard[shard] for shard in shards]
    block_mask, data_next, mask_next = (
        array.astype(_index_dtype(array.max(initial=0), downcast)) for array in np.concatenate(slices, axis=1)
    )
    if tiles is not None and is_dkv:
        tiles = tiles.swapaxes(1, 2).copy()
    info = MaskInfo(data_next, None if tiles is None else mask_next, block_mask, tiles, q_sequence)
    for array in info[:5]:
        if array is not None:
            array.flags.writeable = False
    return info, function


def _computed(mask: Any, q_len: int) -> tuple[Callable[[Any, Any], Any] | None, np.ndarray | None]:
    """The function that computes a mask inside a kernel, and each query's position; None, None if there is none."""
    if isinstance(mask, Mask):
        return (mask, _positions(q_len)) if mask.computable else (None, None)
    if hasattr(mask, "q_sequence") and hasattr(mask, "mask_function"):
        return mask.mask_function, np.array(mask.q_sequence, np.int32)
    return None, None


@bounded_cache()
def _positions(q_len: int) -> np.ndarray:
    """0 .. q_len - 1, one array for all infos of a length: at a million tokens it outweighs the block lists."""
    positions = np.arange(q_len, dtype=np.int32)
    positions.flags.writeable = False
    return positions


def _grid(mask: Any, num_q: int, num_kv: int, block_shape: tuple[int, int]) -> BlockGrid:
    """The live blocks of one head."""
    if isinstance(mask, Mask):
        return active_blocks(mask, num_q, num_kv, *block_shape)
    states = np.zeros((num_q, num_kv), np.int8)
    for row in range(num_q):
        tiles = _row_of_tiles(mask, row, num_kv, block_shape)
        np.add(tiles.any(axis=(1, 2)), tiles.all(axis=(1, 2)), out=states[row], dtype=np.int8)
    rows, columns = np.nonzero(states)
    return BlockGrid(rows.astype(np.int32), columns.astype(np.int32), states[rows, columns], num_q, num_kv)


def _row_of_tiles(mask: Any, row: int, num_kv: int, block_shape: tuple[int, int]) -> np.ndarray:
    """All tiles of one row of blocks of a sliceable head, bool [num_kv, bq, bkv]."""
    block_q, block_kv = block_shape
    stripe = np.asarray(mask[row * block_q : (row + 1) * block_q, 0 : num_kv * block_kv], bool)
    return stripe.reshape(block_q, num_kv, block_kv).swapaxes(0, 1)


def _partial_tiles(mask: Any, grid: BlockGrid, block_shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """The tiles of the PARTIAL blocks in their order, in chunks of bool [n, bq, bkv]."""
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
    """The distinct tiles, bool [P, bq, bkv], in order of first sight; writes each PARTIAL block's index to tile_ids."""
    seen: dict[bytes, int] = {}
    for mask, grid, ids in zip(masks, grids, tile_ids, strict=True):
        found = [
            seen.setdefault(bits.tobytes(), len(seen))
            for tiles in _partial_tiles(mask, grid, block_shape)
            for bits in np.packbits(tiles.reshape(len(tiles), -1), axis=1)
        ]
        ids[grid.states == PARTIAL] = found
    if not seen:
        return None
    bits = np.frombuffer(b"".join(seen), np.uint8).reshape(len(seen), -1)
    return np.unpackbits(bits, axis=1, count=math.prod(block_shape)).astype(bool).reshape(len(seen), *block_shape)


def _look_ahead(live: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """At each of `size` steps the value of the nearest live step at or after it, wrapping round; 0 if none is live."""
    result = np.zeros(size, np.int32)
    if len(live):
        ahead = np.repeat(values, np.diff(live, prepend=-1))
        result[: len(ahead)], result[len(ahead) :] = ahead, values[0]
    return result


def _packed(grid: BlockGrid, tile_ids: np.ndarray, q_seq_shards: int, is_dkv: bool) -> np.ndarray:
    """block_mask, data_next and mask_next of the shrunk grid, int32 [3, 1, nq, w] (dkv: [3, 1, shards * w, nk]).

    A line is what a kernel keeps in its accumulator: a row of blocks, or for dkv a column. Each line's live blocks lie
    side by side, at its start or for dkv at its end. Built from the lists, without any [nq, nk] array.
    """
    shard_rows = grid.num_rows // q_seq_shards
    num_lines = grid.num_columns if is_dkv else shard_rows
    shards = []
    for shard in range(q_seq_shards):
        first = shard * shard_rows
        here = slice(*np.searchsorted(grid.rows, (first, first + shard_rows)))
        row, column, state, tile = grid.rows[here] - first, grid.columns[here], grid.states[here], tile_ids[here]
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

    # An empty mask keeps one dead step a line: without any, a kernel would leave its output unwritten.
    widest = max(1, *(width for width, *_ in shards))
    arrays = np.zeros((3, len(shards), num_lines, widest), np.int32)
    for j, (width, line, slot, values) in enumerate(shards):
        arrays[:, j, line, slot] = values
        if width:  # steps that only fill up to the widest shard fetch nothing new
            arrays[1:, j, :, width:] = arrays[1:, j, :, width - 1 : width]
    if is_dkv:
        arrays = arrays.swapaxes(2, 3)
    return arrays.reshape(3, 1, -1, arrays.shape[-1])


def _placed(grids: list[BlockGrid], tile_ids: list[np.ndarray], q_seq_shards: int, is_dkv: bool) -> np.ndarray:
    """block_mask, data_next and mask_next of one head shard on the whole grid, int32 [3, heads, nq, nk]."""
    heads, num_q, num_kv = len(grids), grids[0].num_rows, grids[0].num_columns
    block_mask, tile = np.zeros((2, heads, num_q, num_kv), np.int32)
    for head, (grid, ids) in enumerate(zip(grids, tile_ids, strict=True)):
        block_mask[head, grid.rows, grid.columns] = grid.states
        tile[head, grid.rows, grid.columns] = ids

    shards = []
    for states, ids in zip(np.split(block_mask, q_seq_shards, 1), np.split(tile, q_seq_shards, 1), strict=True):
        if is_dkv:  # the kernel visits kv, head, q
            states, ids = states.transpose(2, 0, 1), ids.transpose(2, 0, 1)
        live, partial = np.flatnonzero(states), np.flatnonzero(states == PARTIAL)
        data_next = _look_ahead(live, live % states.shape[2], states.size)
        mask_next = _look_ahead(partial, ids.ravel()[partial], states.size)
        arrays = np.stack([states, data_next.reshape(states.shape), mask_next.reshape(states.shape)])
        shards.append(arrays.transpose(0, 2, 3, 1) if is_dkv else arrays)
    return np.concatenate(shards, axis=2)
