"""Active blocks: the exact, sorted list of the blocks of a grid that are PARTIAL or FULL.

Closed forms (`Mask.block_state`) decide almost all blocks. Samples of the other ones decide most, then rectangles
within them; what stays UNSURE is evaluated element by element. A large grid starts from coarse cells, so that the work
follows the pattern and not the square of the length::

    coarse cells          UNSURE or PARTIAL ones cut in 4 x 4        again, down to blocks
    FULL  |  ?            FULL  |  E E ? F                            ...
    EMPTY | FULL          EMPTY |  ...
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.errors
import numpy as np

from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ...masks.states import EMPTY, FULL, PARTIAL, UNSURE

_CELLS = 1 << 20  # cells whose states are computed at a time, and the largest grid without coarse cells
_FINER = 4  # cells of one size along a side of the next larger
_SAMPLES = 16  # queries and keys of a cell that are evaluated first
_ELEMENTS = 1 << 20  # mask elements evaluated at a time; a larger chunk leaves the cache and is slower
_PART = 16  # side, in elements, of the rectangles within a block that are tried before its elements


class BlockGrid(NamedTuple):
    """The non-empty cells of a block grid, row by row, each row from left to right. Arrays are read-only."""

    rows: np.ndarray  # int32 [n], block index along the queries
    columns: np.ndarray  # int32 [n], block index along the keys
    states: np.ndarray  # int8 [n], 1 (PARTIAL: some pairs are allowed) or 2 (FULL: all are)
    num_rows: int
    num_columns: int


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Has a mask of the user's, which may compute with jax.numpy, answer now, also inside a traced function.

    Under a mesh, too: its answers are no arrays of that mesh, though inside `jax.shard_map` JAX would make them so.
    """
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


@bounded_cache()
@outside_trace()
def active_blocks(mask: Mask, num_rows: int, num_columns: int, block_q: int, block_kv: int) -> BlockGrid:
    """Lists the blocks in which the mask allows anything, with their exact states; cached.

    The mask is only asked about queries below ``num_rows * block_q`` and keys below ``num_columns * block_kv``.

    Example:
      >>> import sparse_layers as sl
      >>> from sparse_layers.ops.planning.blocks import active_blocks
      >>> grid = active_blocks(sl.Causal(), 3, 3, 128, 128)
      >>> grid.rows.tolist(), grid.columns.tolist(), grid.states.tolist()
      ([0, 1, 1, 2, 2, 2], [0, 0, 1, 0, 1, 2], [1, 2, 1, 2, 2, 1])
    """
    # Ways to decide an UNSURE block. The state of a rectangle takes as long as the rule of some ten elements.
    methods = functools.partial(_evaluated, samples=_SAMPLES), _states_by_rectangles, _evaluated
    arrays = []
    for first, states_of_rows in _stripes(mask, num_rows, num_columns, block_q, block_kv):
        rows, columns = _nonzero(states_of_rows != EMPTY)
        states, rows = states_of_rows[rows, columns], rows + first
        for decide in methods:
            unsure = np.flatnonzero(states == UNSURE)
            states[unsure] = decide(mask, rows[unsure], columns[unsure], block_q, block_kv)
        some = states != EMPTY
        arrays.append((rows[some].astype(np.int32), columns[some].astype(np.int32), states[some]))
    rows, columns, states = (np.concatenate(x) for x in zip(*arrays, strict=True))
    for array in (rows, columns, states):
        array.flags.writeable = False
    return BlockGrid(rows, columns, states, num_rows, num_columns)


def _evaluated(
    mask: Mask, rows: np.ndarray, columns: np.ndarray, block_q: int, block_kv: int, samples: int | None = None
) -> np.ndarray:
    """Returns the states of n blocks by their elements, int8 [n]; with samples, UNSURE where these agree."""
    states = np.empty(len(rows), np.int8)
    start = 0
    for tiles in masked_tiles(mask, rows, columns, block_q, block_kv, samples):
        some, every = tiles.any(axis=(1, 2)), tiles.all(axis=(1, 2))
        tile_states = np.add(some, every, dtype=np.int8)
        states[start : start + len(tiles)] = (
            tile_states if samples is None else np.where(some == every, UNSURE, tile_states)
        )
        start += len(tiles)
    return states


def _nonzero(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns np.nonzero of a 2-dimensional array, several times faster on bools."""
    rows, columns = np.divmod(np.flatnonzero(states), states.shape[1])
    return rows, columns


def masked_tiles(
    mask: Mask, rows: np.ndarray, columns: np.ndarray, block_q: int, block_kv: int, samples: int | None = None
) -> Iterator[np.ndarray]:
    """Yields the elements of n blocks, at ``rows`` and ``columns`` [n], in chunks: bool [<= n, block_q, block_kv].

    With ``samples``, this many queries and keys of a block are evaluated, its first and last among them.
    """
    q, k = (
        np.arange(n) if samples is None else np.linspace(0, n - 1, samples).astype(np.int64)
        for n in (block_q, block_kv)
    )
    step = max(1, _ELEMENTS // (q.size * k.size))
    for start in range(0, len(rows), step):
        q0 = rows[start : start + step, None, None].astype(np.int64) * block_q
        k0 = columns[start : start + step, None, None].astype(np.int64) * block_kv
        try:
            with outside_trace():
                tiles = np.asarray(mask(q0 + q[:, None], k0 + k), bool)
        except jax.errors.TracerArrayConversionError as error:
            raise TypeError(
                "mask: its rule depends on values that are traced, known at run time only: documents and padding are "
                "segment_ids of block_sparse_attention, any other such mask is a JAX bool array"
            ) from error
        yield np.broadcast_to(tiles, (len(q0), q.size, k.size))


def _stripes(
    mask: Mask, num_rows: int, num_columns: int, block_q: int, block_kv: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the first of some rows of the grid, and their states, int8 [rows, num_columns], UNSURE included."""

    def state_of(rows: np.ndarray, columns: np.ndarray, scale: int) -> np.ndarray:
        q0, k0 = rows * (block_q * scale), columns * (block_kv * scale)
        q1 = np.minimum(q0 + block_q * scale, num_rows * block_q) - 1  # a mask need not be defined beyond the grid
        k1 = np.minimum(k0 + block_kv * scale, num_columns * block_kv) - 1
        return mask.block_state(q0, q1, k0, k1)

    cells = num_rows * num_columns
    if cells <= _CELLS:
        yield 0, state_of(np.arange(num_rows)[:, None], np.arange(num_columns)[None, :], 1).copy()
        return
    # Powers of _FINER, so that cells of one size are made of whole cells of the next. Few coarse cells hold anything of
    # a sparse pattern, and few of their parts do: a step from coarse to fine would compute all that lies between.
    scale = _FINER**2
    while scale * scale * _CELLS < cells:
        scale *= _FINER
    coarse = state_of(np.arange(-(-num_rows // scale))[:, None], np.arange(-(-num_columns // scale))[None, :], scale)
    step = max(1, _CELLS // (scale * num_columns))
    offsets = np.arange(_FINER)
    for start in range(0, len(coarse), step):
        first, states, size = start, coarse[start : start + step], scale
        while size > 1:
            rows, columns = _nonzero((states != EMPTY) & (states != FULL))
            first, size = first * _FINER, size // _FINER
            states = states.repeat(_FINER, axis=0).repeat(_FINER, axis=1)
            states = states[: -(-num_rows // size) - first, : -(-num_columns // size)]
            # Parts beyond the grid's edge are its last cells, computed again.
            rows = np.minimum(rows[:, None, None] * _FINER + offsets[:, None], states.shape[0] - 1)
            columns = np.minimum(columns[:, None, None] * _FINER + offsets, states.shape[1] - 1)
            states[rows, columns] = state_of(rows + first, columns, size)
        yield first, states


def _states_by_rectangles(mask: Mask, rows: np.ndarray, columns: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """Returns the states of n blocks by those of rectangles within them, int8 [n]; UNSURE if these do not decide."""
    states = np.empty(len(rows), np.int8)
    q, k = np.arange(0, block_q, _PART)[:, None], np.arange(0, block_kv, _PART)
    step = max(1, _ELEMENTS // (q.size * k.size))
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        q0, k0 = rows[chunk, None, None] * block_q, columns[chunk, None, None] * block_kv
        q1, k1 = np.minimum(q + _PART, block_q) - 1, np.minimum(k + _PART, block_kv) - 1
        states_within = mask.block_state(q0 + q, q0 + q1, k0 + k, k0 + k1)
        some = ((states_within == PARTIAL) | (states_within == FULL)).any(axis=(1, 2))
        lacking = ((states_within == EMPTY) | (states_within == PARTIAL)).any(axis=(1, 2))
        decided = (some & lacking) | (states_within != UNSURE).all(axis=(1, 2))
        states[chunk] = np.where(decided, np.add(some, ~lacking, dtype=np.int8), np.int8(UNSURE))
    return states
