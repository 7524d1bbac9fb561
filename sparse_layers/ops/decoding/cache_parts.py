"""The parts of a mask in a cache: the keys that a decoding step reads, and the stores that keep them.

As in a chain, a union of patterns becomes disjoint parts, each with the row order of keys that suits it. Here every
part keeps its keys in that order, and reads a few contiguous pages of them:

* natural order: a ring buffer as long as the part's reach, which a step reads whole (a window, the query's own group).
  Where that would read more, a step reads the pages that a table lists for the position (random blocks, an array);
* residue-major order: a ring for each residue class; a step reads the ring of the query's residue (a stride);
* gathered order: only the gathered rows, read whole or by a table (summary columns, a prefix).

Positions are traced, so sequences of a batch may have different lengths. `KVCache` holds the arrays.

A step may add several tokens, and a later step may roll some of them back. Rings are longer by as many rows, so that
the keys of a query remain there when the tokens behind it are written. A query masks the additional rows.
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
from ..planning.binding import bind
from ..planning.blocks import BlockGrid, active_blocks, masked_tiles
from ..planning.causality import check_causal
from ..planning.costs import MAX_CELLS
from ..planning.mask_info import process_mask
from ..planning.row_orders import Reordered, RowOrder
from ..planning.terms import decompositions
from .ring_cache import GatheredLayout, KeyLayout, RingLayout

# The most elements of a mask that are evaluated to find the reach of a part; above, its blocks give an upper bound.
_REACH_ELEMENTS = 1 << 25
# The smallest block; the most active blocks and the most cells of a grid, where a larger block would do.
_BLOCK, _BLOCKS, _CELLS = 16, 1 << 20, 1 << 26


@dataclasses.dataclass(frozen=True, eq=False)
class PageTable:
    """The pages that each position reads, where it does not read them all."""

    q_block: int  # positions that share a row of the table
    pages: np.ndarray  # int32 [rows, width], pages in row space; -1 fills up
    # int8 [rows, width], `PARTIAL` where a tile has the allowed pairs, `FULL` where all are; None if the mask is
    # computed from positions.
    states: np.ndarray | None = None
    tile_ids: np.ndarray | None = None  # int32 [rows, width], index into `tiles`; None if no block is partial
    tiles: np.ndarray | None = None  # bool [n, q_block, page size], or None


@dataclasses.dataclass(frozen=True, eq=False)
class CachePart:
    """One part of a mask, disjoint from the others, and the store of its keys."""

    mask: Mask  # the part, on tokens
    store: KeyLayout
    page_table: PageTable | None  # the pages to read; None for the ring of the query's residue class, or for all rows

    @property
    def num_reads(self) -> int:
        """Keys that a step reads."""
        return (
            self.store.rows_per_residue
            if self.page_table is None
            else self.page_table.pages.shape[1] * self.store.page_size
        )

    def visible_pages(self, position: jax.Array) -> tuple[jax.Array | None, jax.Array, jax.Array]:
        """Returns the pages [B, n] that queries at [B] read, None for all; their rows' tokens, int [B, L]; and which of
        these the queries see, bool [B, L].
        """
        store, query, table = self.store, position[:, None], self.page_table
        if table is not None:
            rows = position // table.q_block
            row_pages = jnp.asarray(table.pages)[rows]
            in_page = jnp.arange(store.page_size)[None, None]
            row = (row_pages[..., None] * store.page_size + in_page).reshape(len(position), -1)
            tokens = store.order.token(row)
            allowed = (row >= 0) & (tokens > query - store.rows_per_residue if store.order.natural else True)
            pages = jnp.maximum(row_pages, 0) % store.num_pages
        elif store.num_residues > 1:
            pages = query % store.num_residues
            tokens = store.token(pages * store.rows_per_residue + jnp.arange(store.rows_per_residue)[None], query)
            allowed = True
        else:
            pages, allowed = None, True
            tokens = jnp.broadcast_to(
                store.token(jnp.arange(store.rows_per_residue)[None], query), (len(position), store.rows_per_residue)
            )
        allowed = allowed & (tokens >= 0) & (tokens <= query)
        if table is None or table.states is None:
            return pages, tokens, allowed & self.mask(query, tokens)
        states = jnp.asarray(table.states)[rows][..., None]
        bits = jnp.broadcast_to(states == FULL, (*states.shape[:-1], store.page_size))
        if table.tiles is not None:
            tile = jnp.asarray(table.tile_ids)[rows]
            bits = bits | ((states == PARTIAL) & jnp.asarray(table.tiles)[tile, query % table.q_block])
        return pages, tokens, allowed & bits.reshape(allowed.shape)


@bounded_cache()
def plan_cache_parts(mask: Mask, length: int, max_step: int = 1) -> tuple[CachePart, ...]:
    """Returns the parts of a causal mask that together read the fewest keys a step, over ``length`` tokens.

    A step adds up to ``max_step`` of them.

    Example:
      >>> import sparse_layers as sl
      >>> mask = sl.Causal() & (sl.Window(127) | sl.Columns(256, 248))
      >>> [(str(part.store.order), part.num_reads) for part in plan_cache_parts(mask, 4096)]
      [('natural order', 128), ('gathered tokens 248 to 255 of every 256', 128)]
    """
    check_causal(mask, length, "pattern", "decoding needs a causal one")
    options = []
    for _, split in decompositions(mask, length, length):
        if not mask.computable:  # a table has its pairs in natural order only
            split = [((RowOrder(length), RowOrder(length)), mask)]
        cache_parts = [x for (_, order), term in split for x in _part_in_order(term, order, length, max_step)]
        cost = sum(x.num_reads for x in cache_parts), sum(x.store.num_rows for x in cache_parts)
        options.append((cost, len(options), cache_parts))
    # A mask that allows nothing still needs a row to read; with `Empty`, as a mask without a table is traced.
    empty = CachePart(Empty(), RingLayout(RowOrder(length), 1, 1), None)
    return tuple(min(options, key=lambda option: option[:2])[2]) or (empty,)


def _part_in_order(mask: Mask, order: RowOrder, length: int, max_step: int) -> list[CachePart]:
    """Returns the part of a mask whose keys are in a row order; an empty list if the mask allows nothing."""
    view = Reordered(mask, order if order.covers_all_tokens else RowOrder(length), order)
    grid, block = _finest_grid(view)
    if not len(grid.rows):
        return []
    rows_per_residue, store_type = order.rows, GatheredLayout
    if order.covers_all_tokens:
        store_type = RingLayout
        # Tokens of a residue class that a step adds behind a query.
        later = (max_step - 1) // math.prod(order.shape[1:])
        rows_per_residue = min(_reach(view, grid, block) + 1 + later, order.shape[0])
    widest = int(np.bincount(grid.rows).max())
    # Rows of a table are copied before they are multiplied: reading half of the rows by a table takes as long as all.
    if mask.computable and ((order.covers_all_tokens and not order.natural) or rows_per_residue <= 2 * widest * block):
        return [CachePart(mask, store_type(order, rows_per_residue, rows_per_residue), None)]
    rows, columns = grid.num_rows * block, grid.num_columns * block
    info = process_mask(bind(view, 1, rows, columns), (block, block))[0]
    pages = np.where(info.block_mask[0] > 0, info.data_next[0], -1).astype(np.int32)
    store = store_type(order, min(_round_up(rows_per_residue, block), columns), block)
    if mask.computable:
        return [CachePart(mask, store, PageTable(block, pages))]
    tile_ids = None if info.mask_next is None else info.mask_next[0].astype(np.int32)
    table = PageTable(block, pages, info.block_mask[0], tile_ids, info.partial_mask_blocks)
    return [CachePart(mask, store, table)]


def _finest_grid(view: Reordered) -> tuple[BlockGrid, int]:
    """Returns the active blocks and their size: the smallest size at which there are not too many."""

    def grid_of(block: int) -> BlockGrid:
        return active_blocks(view, *(-(-order.rows // block) for order in (view.q_order, view.kv_order)), block, block)

    def cells(block: int) -> int:
        return (view.q_order.rows // block) * (view.kv_order.rows // block)

    block = _BLOCK
    while cells(block) > MAX_CELLS:
        block *= 2
    grid = grid_of(block)
    while block > _BLOCK and 4 * len(grid.rows) <= _BLOCKS and cells(block // 2) <= _CELLS:
        block //= 2
        grid = grid_of(block)
    return grid, block


def _reach(view: Reordered, grid: BlockGrid, block: int) -> int:
    """Returns the largest distance in rows from a query to a key that it sees, or an upper bound that costs less."""
    distance = grid.rows.astype(np.int64) - grid.columns
    farthest = int(distance.max())
    reach = -1
    for blocks in (farthest, farthest - 1):
        index = np.flatnonzero(distance == blocks)
        if (grid.states[index] == FULL).any() or len(index) * block * block > _REACH_ELEMENTS:
            return max(reach, blocks * block + block - 1)
        row_distance = np.arange(block)[:, None] - np.arange(block)
        for tiles in masked_tiles(view, grid.rows[index], grid.columns[index], block, block):
            seen = tiles.any(axis=0)
            if seen.any():
                reach = max(reach, blocks * block + int(row_distance[seen].max()))
        if reach >= blocks * block - 1:  # no nearer block reaches farther
            break
    return reach


def _round_up(n: int, block: int) -> int:
    return -(-n // block) * block
