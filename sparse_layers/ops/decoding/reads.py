"""Which keys a step of decoding reads, and where they are kept: only what the pattern allows for one position.

The planner's idea of a chain carries over: a union of patterns is a set of disjoint parts, each with the row order of
keys that suits it. Here every part keeps its keys in that order and reads one contiguous piece of them:

* natural order: a ring buffer as long as the part's reach, read as a whole (a window, the query's own group); or, where
  that would read more, the blocks that a table lists for the position (random blocks, an array);
* residue-major order: a ring for each residue class, of which the query's own is read (a stride);
* gathered order: the gathered rows alone are kept, and read as a whole or by a table (summary columns, a prefix).

Positions are arithmetic, so that every token of a batch may stand elsewhere. `KVCache` holds the arrays.

Steps may add several tokens at once, and take some of the last ones back. A ring is then so much longer that what a
query sees is still there when the tokens behind it are. In their rows, the query expects tokens that lie farther back
than it sees.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ...masks.primitives import Empty
from ...masks.states import FULL, PARTIAL
from ..planning.blocks import BlockGrid, active_blocks, masked_tiles
from ..planning.causality import check_causal
from ..planning.mask_info import bind, process_mask
from ..planning.plan import MAX_CELLS, splits
from ..planning.views import Reordered, RowOrder
from .stores import Store

# Elements of a mask that are evaluated, at most, to find out how far back a part reaches; beyond, its blocks tell.
_REACH_ELEMENTS = 1 << 25
# Queries and keys of a block at the least; active blocks and cells of a grid at the most, where there are larger ones.
_BLOCK, _BLOCKS, _CELLS = 16, 1 << 20, 1 << 26


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Which pieces a position reads, where it does not read them all.

    Attributes:
      block: positions that share a row of the table.
      runs: int32 [rows, width], pieces of row space; -1 fills up.
      kinds: int8 [rows, width], 1 where `tiles` tells which pairs are allowed, 2 where all are; None for a mask that is
        asked itself.
      tile: int32 [rows, width], index into `tiles`; None if all blocks are full.
      tiles: bool [n, block, run], or None.
    """

    block: int
    runs: np.ndarray
    kinds: np.ndarray | None = None
    tile: np.ndarray | None = None
    tiles: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One part of a mask, disjoint from the others.

    Attributes:
      mask: the part, on tokens.
      store: where its keys are.
      table: what to read of them; None: the query's residue class, or all.
    """

    mask: Mask
    store: Store
    table: Table | None

    @property
    def reads(self) -> int:
        """Keys that a step reads."""
        return self.store.kept if self.table is None else self.table.runs.shape[1] * self.store.run

    def places(self, position: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """What the query at each position [B] reads.

        Returns:
          (pieces [B, n], or None for all; whether each of their rows is allowed, bool [B, L]).
        """
        store, at, table = self.store, position[:, None], self.table
        if table is not None:
            rows = position // table.block
            runs = jnp.asarray(table.runs)[rows]
            inside = jnp.arange(store.run)[None, None]
            row = (runs[..., None] * store.run + inside).reshape(len(position), -1)
            tokens = store.order.token(row)
            allowed = (row >= 0) & (tokens > at - store.kept if store.order.natural else True)
            pieces = jnp.maximum(runs, 0) % store.runs
        elif store.classes > 1:
            pieces = at % store.classes
            tokens = store.token(pieces * store.kept + jnp.arange(store.kept)[None], at)
            allowed = True
        else:
            pieces, allowed = None, True
            tokens = jnp.broadcast_to(store.token(jnp.arange(store.kept)[None], at), (len(position), store.kept))
        allowed = allowed & (tokens >= 0) & (tokens <= at)
        if table is None or table.kinds is None:
            return pieces, allowed & self.mask(at, tokens)
        kinds = jnp.asarray(table.kinds)[rows][..., None]
        bits = jnp.broadcast_to(kinds == FULL, (*kinds.shape[:-1], store.run))
        if table.tiles is not None:
            tile = jnp.asarray(table.tile)[rows]
            bits = bits | ((kinds == PARTIAL) & jnp.asarray(table.tiles)[tile, at % table.block])
        return pieces, allowed & bits.reshape(allowed.shape)


@bounded_cache()
def parts(mask: Mask, length: int, max_step: int = 1) -> tuple[Part, ...]:
    """The parts of a causal mask that together read the fewest keys a step, over ``length`` tokens.

    A step adds up to ``max_step`` of them.

    Raises:
      ValueError: some query sees a later key.

    Example:
      >>> import sparse_layers as sl
      >>> mask = sl.Causal() & (sl.Window(127) | sl.Columns(256, 248))
      >>> [(str(part.store.order), part.reads) for part in parts(mask, 4096)]
      [('natural order', 128), ('gathered tokens 248 to 255 of every 256', 128)]
    """
    check_causal(mask, length, "pattern", "decoding needs a causal one")
    weighed = []
    for _, groups in splits(mask, length, length):
        if not mask.computable:  # its pairs are known in natural order only, from a table
            groups = [((RowOrder(length), RowOrder(length)), mask)]
        found = [part for (_, order), term in groups for part in _part(term, order, length, max_step)]
        cost = sum(part.reads for part in found), sum(part.store.runs * part.store.run for part in found)
        weighed.append((cost, len(weighed), found))
    # A mask that allows nothing still has a row to look at; by `Empty`, for a part without a table is traced.
    nothing = Part(Empty(), Store(RowOrder(length), 1, 1), None)
    return tuple(min(weighed, key=lambda entry: entry[:2])[2]) or (nothing,)


def _part(mask: Mask, order: RowOrder, length: int, max_step: int) -> list[Part]:
    """The part in a row order of its keys, or none if nothing is allowed in it."""
    view = Reordered(mask, order if order.complete else RowOrder(length), order)
    grid, block = _grid(view)
    if not len(grid.rows):
        return []
    kept = order.rows
    if order.complete:
        later = (max_step - 1) // math.prod(order.shape[1:])  # tokens of a class that a step adds behind a query
        kept = min(_reach(view, grid, block) + 1 + later, order.shape[0])
    widest = int(np.bincount(grid.rows).max())
    # Rows that are picked out are copied before they are multiplied: the whole is read as fast as half of it is picked.
    if mask.computable and ((order.complete and not order.natural) or kept <= 2 * widest * block):
        return [Part(mask, Store(order, kept, kept), None)]
    rows, columns = grid.num_rows * block, grid.num_columns * block
    info = process_mask(bind(view, 1, rows, columns), (block, block))[0]
    runs = np.where(info.block_mask[0] > 0, info.data_next[0], -1).astype(np.int32)
    store = Store(order, min(_round_up(kept, block), columns), block)
    if mask.computable:
        return [Part(mask, store, Table(block, runs))]
    tile = None if info.mask_next is None else info.mask_next[0].astype(np.int32)
    return [Part(mask, store, Table(block, runs, info.block_mask[0], tile, info.partial_mask_blocks))]


def _grid(view: Reordered) -> tuple[BlockGrid, int]:
    """The blocks in which anything is allowed, and their size: the finest of which there are not too many."""

    def grid(block: int) -> BlockGrid:
        return active_blocks(view, *(-(-order.rows // block) for order in (view.q_order, view.kv_order)), block, block)

    def cells(block: int) -> int:
        return (view.q_order.rows // block) * (view.kv_order.rows // block)

    block = _BLOCK
    while cells(block) > MAX_CELLS:
        block *= 2
    found = grid(block)
    while block > _BLOCK and 4 * len(found.rows) <= _BLOCKS and cells(block // 2) <= _CELLS:
        block //= 2
        found = grid(block)
    return found, block


def _reach(view: Reordered, grid: BlockGrid, block: int) -> int:
    """The largest distance in rows between a query and a key that it sees; an upper bound where that costs too much."""
    distance = grid.rows.astype(np.int64) - grid.columns
    farthest = int(distance.max())
    reach = -1
    for blocks in (farthest, farthest - 1):
        here = np.flatnonzero(distance == blocks)
        if (grid.states[here] == FULL).any() or len(here) * block * block > _REACH_ELEMENTS:
            return max(reach, blocks * block + block - 1)
        apart = np.arange(block)[:, None] - np.arange(block)
        for tiles in masked_tiles(view, grid.rows[here], grid.columns[here], block, block):
            seen = tiles.any(axis=0)
            if seen.any():
                reach = max(reach, blocks * block + int(apart[seen].max()))
        if reach >= blocks * block - 1:  # no nearer block reaches farther
            break
    return reach


def _round_up(n: int, block: int) -> int:
    return -(-n // block) * block
