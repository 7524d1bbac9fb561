"""Block lists: for each outer block, the inner blocks that it meets, as arrays for kernels.

The outer blocks are those of the outer loop: query blocks forward and for dq, key blocks for dk and dv (transposed)::

    block pairs                 lists of query blocks         lists of key blocks (transposed)
    row  column  state          0: 0*                         0: 1 0* 2*
     0     0     PARTIAL        1: 0 1*                       1: 1* 2*
     1     0     FULL           2: 0* 1*                      FULL entries come first, PARTIAL ones (*) after them
     ...

Lists are data, not constants of a compilation: a longer list compiles nothing anew. One builder makes them all, a
stable sort of `BlockPairs`: by numpy for planned pairs, by XLA under jit for pairs of documents and selections.
`BlockPairs.lists(transposed=True)` returns the transposed lists. The pairs of selections are `selected_block_pairs`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...masks.bounded_cache import bounded_cache
from ...masks.states import EMPTY, FULL, PARTIAL
from .blocks import active_blocks, masked_tiles
from .row_orders import Reordered, RowOrder, mask_period


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["spans", "inner_block", "mask_tile", "active_query_groups"],
    meta_fields=["num_inner_blocks", "heads_per_list"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BlockLists:
    """The lists of the outer blocks: in each, FULL entries come first, then PARTIAL ones.

    Arrays are numpy's if the pairs are planned, JAX's otherwise. Batch entry b and query head h have list
    ``(b % LB, h // heads_per_list % LH)``; an outer block without entries has an empty list.
    """

    # int32 [LB, LH, blocks, 3], for each outer block the index of its first entry, of its first PARTIAL entry, and its
    # end. Lists may lie anywhere in ``inner_block``, in any order.
    spans: Any
    inner_block: Any  # int32 [entries], the inner block of each entry
    mask_tile: Any  # int32 [entries], the mask tile of a PARTIAL entry; -1 if segment ids alone limit it
    # int32 [entries], or None: bit i is set if query group i of the query block selected this entry.
    active_query_groups: Any
    num_inner_blocks: int  # number of blocks on the inner side
    heads_per_list: int = 1  # number of neighbouring query heads that share a list

    @property
    def counts(self) -> Any:
        """The number of FULL entries and of all entries of each list, int32 [LB, LH, blocks, 2]."""
        return self.spans[..., 1:] - self.spans[..., :1]

    @property
    def static(self) -> bool:
        """True if the pairs were planned, so that the arrays are numpy's."""
        return isinstance(self.spans, np.ndarray)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPairs:
    """Pairs of blocks that may be active, in any order, each once."""

    q_block: Any  # int32 [LB, LH, n], the block of queries; this and the next two may have 1 in the place of LB
    kv_block: Any  # int32 [LB, LH, n], the block of keys
    state: Any  # integers [LB, LH, n], EMPTY, PARTIAL or FULL
    mask_tile: Any  # int32 [LB, LH, n], the mask tile of PARTIAL ones, see `limit_by_ids`; -1 for none
    active_query_groups: Any  # int32 [LB, LH, n], or None; see `BlockLists`
    num_blocks: tuple[int, int]  # number of query blocks and of key blocks
    heads_per_list: int = 1  # see `BlockLists`
    # Number of pairs of each row, one row after the other, if rows are known at run time only; else None.
    max_in_row: int | None = None

    def longest(self, transposed: bool) -> int:
        """Returns a static bound of the entries of a list."""
        outer = self.kv_block if transposed else self.q_block
        if isinstance(outer, np.ndarray):
            lines = outer.reshape(-1, outer.shape[-1])
            return max((int(np.bincount(line).max(initial=0)) for line in lines), default=0)
        bound = self.num_blocks[not transposed]
        return bound if transposed or self.max_in_row is None else min(bound, self.max_in_row)

    def sorted(self, transposed: bool) -> "BlockPairs":
        """Returns the planned pairs sorted by query block, or by key block with the last query block first.

        Lists of key blocks often end at the same queries and start at different ones. In this order, neighbouring
        lists read the same queries first, while these are in caches.
        """
        step = -1 if transposed else 1
        outer = np.where(self.state == EMPTY, max(self.num_blocks), self.kv_block if transposed else self.q_block)[
            ..., ::step
        ]
        order = np.argsort(outer, kind="stable")
        order = outer.shape[-1] - 1 - order if transposed else order
        q_block, kv_block, state, mask_tile = (
            np.take_along_axis(x, order, -1) for x in (self.q_block, self.kv_block, self.state, self.mask_tile)
        )
        # Padding of shorter lists counts as the last block's.
        q_block, kv_block = (
            np.where(state == EMPTY, n - 1, x) for x, n in zip((q_block, kv_block), self.num_blocks, strict=True)
        )
        return dataclasses.replace(self, q_block=q_block, kv_block=kv_block, state=state, mask_tile=mask_tile)

    def starts(self, transposed: bool) -> np.ndarray | None:
        """Returns the index of each block's first pair, int32 [LH, blocks + 1], if pairs are sorted; else None."""
        outer, num_blocks = (self.kv_block, self.num_blocks[1]) if transposed else (self.q_block, self.num_blocks[0])
        if isinstance(outer, np.ndarray):
            lines = outer[0]
            if (np.diff(lines) < 0).any():
                return None
            return np.stack([np.searchsorted(line, np.arange(num_blocks + 1)) for line in lines]).astype(np.int32)
        if transposed or self.max_in_row is None:
            return None
        heads = self.state.shape[1]
        return np.tile(np.arange(num_blocks + 1, dtype=np.int32) * self.max_in_row, (heads, 1))

    def lists(self, transposed: bool) -> BlockLists:
        """Returns the lists of query blocks, or of key blocks; entries of a list stay in the order of the pairs."""
        xp: Any = np if isinstance(self.state, np.ndarray) else jnp
        outer, inner = (self.kv_block, self.q_block) if transposed else (self.q_block, self.kv_block)
        batches, heads, n = self.state.shape
        num_blocks = self.num_blocks[transposed]
        lines = batches * heads * num_blocks
        first = np.arange(batches * heads, dtype=np.int32).reshape(batches, heads, 1) * num_blocks
        key = xp.where(
            self.state == EMPTY, 2 * lines, 2 * (first + outer) + (self.state == PARTIAL).astype(np.int32)
        ).ravel()
        bounds = np.arange(2 * lines + 1, dtype=np.int32)
        if xp is np:
            order = key.argsort(kind="stable")
            ends = key[order].searchsorted(bounds).astype(np.int32)
            order = order[: ends[-1]]
        else:
            places = jax.lax.iota(jnp.int32, len(key))
            key, order = jax.lax.sort((key, places), num_keys=1, is_stable=True)
            ends = jnp.searchsorted(key, bounds, method="scan_unrolled").astype(jnp.int32)
        spans = xp.stack([ends[:-1:2], ends[1::2], ends[2::2]], axis=-1).reshape(batches, heads, num_blocks, 3)

        def sorted_(x):
            return None if x is None else xp.broadcast_to(x, (batches, heads, n)).ravel()[order].astype(np.int32)

        inner_block, mask_tile, active_query_groups = (
            sorted_(x) for x in (inner, self.mask_tile, self.active_query_groups)
        )
        return BlockLists(
            spans, inner_block, mask_tile, active_query_groups, self.num_blocks[not transposed], self.heads_per_list
        )

    def cut_inner_blocks(self, cuts: int, transposed: bool, states: np.ndarray, num_inner_blocks: int) -> "BlockPairs":
        """Returns the pairs of smaller inner blocks; computed on the device, where there may be millions.

        Args:
          cuts: smaller blocks in a block; cut c of a mask tile becomes the tile ``mask_tile * cuts + c``.
          transposed: True if queries are the inner side; their last cuts come first then, as in `sorted`.
          states: EMPTY, PARTIAL or FULL of each cut, [1 + tiles, cuts]; row 0 is that of a FULL block.
          num_inner_blocks: number of smaller blocks; the last block may have fewer than ``cuts``.
        """
        outer, inner = (self.kv_block, self.q_block) if transposed else (self.q_block, self.kv_block)
        outer, inner, state, mask_tile = (
            jnp.repeat(x, cuts, axis=-1) for x in (outer, inner, self.state, self.mask_tile)
        )
        cut = jnp.tile(np.arange(cuts, dtype=np.int32)[:: -1 if transposed else 1], self.state.shape[-1])
        inner = inner * cuts + cut
        state = jnp.where(
            (state == EMPTY) | (inner >= num_inner_blocks), EMPTY, jnp.asarray(states)[mask_tile + 1, cut]
        )
        mask_tile = jnp.where(state == PARTIAL, mask_tile * cuts + cut, -1)
        sides, numbers = (
            (outer, jnp.minimum(inner, num_inner_blocks - 1)),
            (self.num_blocks[transposed], num_inner_blocks),
        )
        (q_block, kv_block), num_blocks = (sides[::-1], numbers[::-1]) if transposed else (sides, numbers)
        return dataclasses.replace(
            self, q_block=q_block, kv_block=kv_block, state=state, mask_tile=mask_tile, num_blocks=num_blocks
        )

    def limit_by_ids(
        self,
        segments: tuple[jax.Array, jax.Array] | None,
        order_ids: tuple[jax.Array, jax.Array] | None,
        orders: tuple[RowOrder, RowOrder],
        shape: tuple[int, int],
        mark: int = 0,
    ) -> "BlockPairs":
        """Returns the pairs that segment ids and order ids of queries and keys allow, as in `Operands`.

        A pair stays FULL only if it lies in one segment, and all its queries see all its keys. In other pairs ids may
        exclude keys: ``mark`` is added to their mask tiles.
        """
        if segments is None:
            return self
        q_ids, kv_ids = (IdRanges.of_blocks(*side) for side in zip(orders, segments, shape, strict=True))
        q_range, kv_range = q_ids.take(self.q_block), kv_ids.take(self.kv_block)
        meet = (q_range.min_valid <= kv_range.max_id) & (kv_range.min_valid <= q_range.max_id)
        all_meet = (
            (q_range.min_id == q_range.max_id)
            & (kv_range.min_id == kv_range.max_id)
            & (q_range.min_id == kv_range.min_id)
        )
        if order_ids is not None:
            least, largest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
            sides = zip(orders, order_ids, shape, (least, largest), strict=True)
            q_ids, kv_ids = (IdRanges.of_blocks(*side) for side in sides)
            q_range, kv_range = q_ids.take(self.q_block), kv_ids.take(self.kv_block)
            meet, all_meet = meet & (kv_range.min_id <= q_range.max_id), all_meet & (kv_range.max_id <= q_range.min_id)
        state = jnp.where((self.state == FULL) & ~all_meet, PARTIAL, self.state)
        state = jnp.where(meet, state, EMPTY)
        mask_tile = jnp.where(all_meet, self.mask_tile, self.mask_tile + mark) if mark else self.mask_tile
        return dataclasses.replace(self, state=state, mask_tile=mask_tile)


@dataclasses.dataclass(frozen=True)
class IdRanges:
    """The ranges of segment ids or order ids of blocks: int32 [B, blocks], or of pairs [B, LH, n]."""

    min_valid: Any  # the smallest id >= 0; the largest int32 if a block is all padding
    min_id: Any  # the smallest id, negative if a block has padding
    max_id: Any  # the largest id

    @staticmethod
    def of_blocks(order: RowOrder, ids: jax.Array, block: int, fill: int = -1) -> "IdRanges":
        """Returns the ranges of ids [B, tokens] in blocks of rows; rows without a token have the id ``fill``."""
        blocks = -(-order.rows // block)
        rows = order.gather(ids, blocks * block, fill=fill)
        rows = rows.reshape(len(rows), blocks, block)
        min_valid = jnp.where(rows >= 0, rows, np.iinfo(np.int32).max).min(-1)
        return IdRanges(min_valid, rows.min(-1), rows.max(-1))

    def take(self, blocks: Any) -> "IdRanges":
        """Returns the ranges [B, LH, n] of the blocks [LB, LH, n]."""

        def take_blocks(x):
            if blocks.shape[0] == 1:
                return x[:, jnp.asarray(blocks[0])]
            return jax.vmap(lambda ids, indices: ids[indices])(x, blocks)

        return IdRanges(take_blocks(self.min_valid), take_blocks(self.min_id), take_blocks(self.max_id))


# --- planned masks ---------------------------------------------------------------------------------------------------


def planned_block_pairs(
    masks: Sequence[Reordered], shape: tuple[int, int], with_tiles: bool
) -> tuple[BlockPairs, np.ndarray | None]:
    """Returns the active blocks of masks in the same row orders, sorted, and their distinct tiles, packed; cached.

    Without ``with_tiles``, PARTIAL pairs get the tile 0, and kernels compute the rule.
    """
    return _planned_block_pairs(tuple(masks), shape, with_tiles)


@bounded_cache()
def _planned_block_pairs(masks: tuple[Reordered, ...], shape: tuple[int, int], with_tiles: bool):
    blocks = grid_shape(masks[0], shape)
    grids = [active_blocks(mask, *blocks, *shape) for mask in masks]
    n = max(len(grid.rows) for grid in grids)
    row, column, state = np.zeros((3, 1, len(masks), n), np.int32)
    tile = np.full((1, len(masks), n), -1, np.int32)
    distinct: dict[bytes, int] = {}
    for head, (mask, grid) in enumerate(zip(masks, grids, strict=True)):
        entries = 0, head, slice(len(grid.rows))
        row[entries], column[entries], state[entries] = grid.rows, grid.columns, grid.states
        partial = np.flatnonzero(grid.states == PARTIAL)
        if with_tiles:
            rows, columns = grid.rows[partial], grid.columns[partial]
            first, tile_class = _tile_classes(mask, rows, columns, shape)
            tiles = masked_tiles(mask, rows[first], columns[first], *shape)
            packed = (bits for chunk in tiles for bits in pack_tiles(chunk))
            tile_ids = [distinct.setdefault(bits.tobytes(), len(distinct)) for bits in packed]
            tile[0, head, partial] = np.asarray(tile_ids, np.int32)[tile_class]
        else:
            tile[0, head, partial] = 0
    tiles = None
    if with_tiles:
        tiles = np.frombuffer(b"".join(distinct), np.uint8).reshape(len(distinct), shape[0], -(-shape[1] // 8))
    return BlockPairs(row, column, state, tile, None, blocks), tiles


def _tile_classes(mask: Reordered, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Returns the first block of each class and the class of each block; blocks of a class have the same mask tile."""
    period = mask_period(mask.mask) if mask.q_order.natural and mask.kv_order.natural else None
    if period is None:
        return slice(None), slice(None)
    q, kv = rows.astype(np.int64) * shape[0], columns.astype(np.int64) * shape[1]
    last = (q + shape[0] > mask.q_order.rows) | (kv + shape[1] > mask.kv_order.rows)  # beyond are no tokens
    keys = np.stack([np.where(last, -1 - q, q % period), q - kv])
    _, first, tile_class = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    return first, tile_class.ravel()


def grid_shape(mask: Reordered, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of query blocks and of key blocks of ``shape``."""
    return -(-mask.q_order.rows // shape[0]), -(-mask.kv_order.rows // shape[1])


def pack_tiles(tiles: np.ndarray) -> np.ndarray:
    """Returns bool tiles [n, bq, bkv] as bits, uint8 [n, bq, ceil(bkv / 8)]: bit c % 8 of byte c // 8 is key c."""
    return np.packbits(tiles, axis=-1, bitorder="little")


def unpack_tiles(tiles: np.ndarray, columns: int) -> np.ndarray:
    """Returns the tiles of `pack_tiles`, bool [n, bq, columns]."""
    return np.unpackbits(tiles, axis=-1, count=columns, bitorder="little").astype(bool)


# --- masks known at run time -----------------------------------------------------------------------------------------


def run_time_block_pairs(mask: jax.Array, shape: tuple[int, int]) -> tuple[BlockPairs, jax.Array]:
    """Returns all blocks of a run-time mask [C, T, S] in natural order, and their tiles, bool [C * blocks, bq, bkv]."""
    tiles, state = tiled(mask, shape)
    heads, rows, columns = state.shape
    row, column = (x.reshape(1, 1, -1).astype(np.int32) for x in np.indices((rows, columns)))
    tile = np.arange(heads * rows * columns, dtype=np.int32).reshape(1, heads, -1)
    row, column = (np.broadcast_to(x, tile.shape) for x in (row, column))
    return BlockPairs(row, column, state.reshape(tile.shape), tile, None, (rows, columns)), tiles.reshape(-1, *shape)


def tiled(mask: jax.Array, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Returns a mask [C, T, S] in blocks, bool [C, rows, columns, bq, bkv], padded with False, and the int32 states."""
    ends = [(0, -length % block) for length, block in zip(mask.shape[1:], shape, strict=True)]
    mask = jnp.pad(mask, [(0, 0), *ends])
    heads, rows, columns = mask.shape
    tiles = mask.reshape(heads, rows // shape[0], shape[0], columns // shape[1], shape[1]).swapaxes(2, 3)
    return tiles, tiles.any((3, 4)).astype(jnp.int32) + tiles.all((3, 4)).astype(jnp.int32)


# --- blocks chosen at run time ---------------------------------------------------------------------------------------

# Most query groups of a block: each selects for itself, and is one bit of an int32.
MAX_QUERY_GROUPS = 32
# Most selected blocks of a row that are compared pairwise to find repeated ones; longer rows are sorted.
MAX_COMPARED = 32
# Most cells of a state table; in a larger one, a cell stands for several query blocks.
_TABLE_CELLS = 1 << 20
# Entries of a state table that are no mask tile.
_IS_EMPTY, _IS_FULL = -2, -1


def selected_block_pairs(
    ids: jax.Array,
    granularity: int,
    shape: tuple[int, int],
    table: "StateTable",
    heads: int,
    start: Any = 0,
    ordered: bool = True,
) -> BlockPairs:
    """Returns the blocks that queries selected, without those in which the mask allows no pair.

    Args:
      ids: int32 [B, Tq, G, k], the k key blocks of shape[1] keys that each query group selected. Numbers of no block
        are left out, repeated ones count once.
      granularity: queries in a query group, which selects as one.
      shape: (bq, bkv) of the lists; bq is ``granularity`` times a number up to `MAX_QUERY_GROUPS`, or divides it.
      table: the states of all blocks of the mask.
      heads: number of query heads N, of which G are 1, or a divisor.
      start: the query block of ``table`` that is the first of these queries.
      ordered: True sorts the blocks of a row. False keeps the order of ``ids`` in rows of up to `MAX_COMPARED` blocks.
    """
    bq, (rows, columns), num_masks = shape[0], table.blocks, table.states.shape[0]
    if num_masks > 1:  # lists differ by head in two ways
        ids = jnp.repeat(ids, heads // ids.shape[2], axis=2)
    if not ids.shape[-1]:
        ids = jnp.full((*ids.shape[:-1], 1), -1, jnp.int32)  # kernels want arrays that are not empty
    batch, tq, lists, k = ids.shape
    ids = jnp.where((ids >= 0) & (ids < columns), ids, columns)
    num_groups, repeats = max(1, bq // granularity), max(1, granularity // bq)
    num_blocks = -(-tq // num_groups)
    ids = _by_query_block(ids, num_groups, columns)
    group = np.repeat(np.arange(num_groups, dtype=np.int32), k).reshape(1, 1, 1, num_groups * k)
    column: Any = ids
    is_live: Any
    if num_groups == 1 and not ordered and k <= MAX_COMPARED:
        is_live = ~_seen_before(column)
    else:
        codes = jnp.sort(ids * num_groups + group, axis=-1)
        column, group = jnp.divmod(codes, num_groups)
        is_live = differs(codes)
    is_live = is_live & (column < columns)
    active_query_groups: Any = None
    all_select: Any = True
    if num_groups > 1:
        active_query_groups = _sum_of_equals(column, jnp.where(is_live, 1 << group, 0))
        is_live = is_live & differs(column)
        # Only the last block may have fewer query groups than others.
        groups_of_block = np.minimum(num_groups, tq - np.arange(num_blocks) * num_groups)
        all_groups = np.array([(1 << int(n)) - 1 for n in groups_of_block], np.uint32).view(np.int32)
        all_select = active_query_groups == all_groups.reshape(1, 1, num_blocks, 1)
    if repeats > 1:  # a block is no larger than a query group then
        is_live, column = (jnp.repeat(x, repeats, axis=2)[:, :, :rows] for x in (is_live, column))
    row = jax.lax.broadcasted_iota(jnp.int32, column.shape, 2)
    column = jnp.minimum(column, columns - 1)
    table_entries = table.lookup(np.arange(lists)[:, None, None] % num_masks, row + start, column)
    state = jnp.where((table_entries == _IS_FULL) & all_select, FULL, PARTIAL)
    state = jnp.where(is_live & (table_entries != _IS_EMPTY), state, EMPTY)
    pairs = BlockPairs(
        row,
        column,
        state,
        jnp.maximum(table_entries, -1),
        active_query_groups,
        table.blocks,
        heads // lists,
        num_groups * k,
    )
    names = ("q_block", "kv_block", "state", "mask_tile") + (("active_query_groups",) if num_groups > 1 else ())
    n = column.shape[2] * column.shape[3]
    flat = {name: getattr(pairs, name).reshape(batch, lists, n) for name in names}
    return dataclasses.replace(pairs, **flat)


def _by_query_block(ids: jax.Array, num_groups: int, fill: int) -> jax.Array:
    """Returns ids [B, Tq, G, k] as [B, G, ceil(Tq / num_groups), num_groups * k], padded with ``fill``."""
    batch, tq, lists, k = ids.shape
    ids = jnp.pad(ids, [(0, 0), (0, -tq % num_groups), (0, 0), (0, 0)], constant_values=fill)
    ids = ids.reshape(batch, -1, num_groups, lists, k)
    return jnp.moveaxis(ids, 3, 1).reshape(batch, lists, ids.shape[1], num_groups * k)


def differs(x: jax.Array) -> jax.Array:
    """Returns True for each entry of the last axis that differs from the one before."""
    return jnp.concatenate([jnp.ones_like(x[..., :1], bool), x[..., 1:] != x[..., :-1]], axis=-1)


def _seen_before(x: jax.Array) -> jax.Array:
    """Returns True for each entry of the last axis that equals an earlier one; faster than a sort for short rows."""
    is_repeated = jnp.zeros(x.shape, bool)
    for i in range(1, x.shape[-1]):
        is_repeated = is_repeated | jnp.pad(x[..., i:] == x[..., :-i], [(0, 0)] * (x.ndim - 1) + [(i, 0)])
    return is_repeated


def _sum_of_equals(x: jax.Array, summands: jax.Array) -> jax.Array:
    """Returns the sum of the summands of equal neighbours along the last axis, at the first of them, modulo 2**32."""
    n = x.shape[-1]
    rest = jnp.cumsum(summands[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]
    rest = jnp.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    starts = jnp.where(differs(x), jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1), n)
    following = jax.lax.cummin(starts, axis=x.ndim - 1, reverse=True)
    following = jnp.concatenate([following[..., 1:], jnp.full_like(following[..., :1], n)], axis=-1)
    return rest[..., :-1] - jnp.take_along_axis(rest, following, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class StateTable:
    """The states of all blocks of masks, looked up for the blocks that a selection names."""

    states: Any  # int32 [C, R, columns], the mask tile of a PARTIAL block, or `_IS_EMPTY` or `_IS_FULL`
    blocks: tuple[int, int]  # number of query blocks and of key blocks
    blocks_per_row: int  # query blocks in a row of ``states``; their mask tiles are consecutive cuts of its tile

    def lookup(self, head: Any, row: Any, column: Any) -> jax.Array:
        """Returns the entries of blocks: a mask tile, `_IS_EMPTY` or `_IS_FULL`."""
        n = self.blocks_per_row
        entries = jnp.asarray(self.states)[head, row // n, column]
        return entries if n == 1 else jnp.where(entries < 0, entries, entries * n + row % n)


def state_table(masks: Sequence[Reordered], shape: tuple[int, int], with_tiles: bool) -> tuple[StateTable, Any]:
    """Returns the table of planned masks in natural order, and their tiles as `planned_block_pairs` has them."""
    blocks, blocks_per_row = grid_shape(masks[0], shape), 1
    while (
        blocks[0] * blocks[1] * len(masks) > _TABLE_CELLS * blocks_per_row
        and blocks_per_row * shape[0] < masks[0].q_order.rows
    ):
        blocks_per_row *= 2
    pairs, tiles = planned_block_pairs(masks, (shape[0] * blocks_per_row, shape[1]), with_tiles)
    states = np.full((len(masks), -(-blocks[0] // blocks_per_row), blocks[1]), _IS_EMPTY, np.int32)
    for head, cells in enumerate(states):
        live = pairs.state[0, head] != EMPTY
        entries = np.where(pairs.state[0, head] == FULL, _IS_FULL, pairs.mask_tile[0, head])
        cells[pairs.q_block[0, head][live], pairs.kv_block[0, head][live]] = entries[live]
    if tiles is not None:
        tiles = tiles.reshape(-1, shape[0], tiles.shape[-1])
    return StateTable(states, blocks, blocks_per_row), tiles


def run_time_state_table(mask: jax.Array, shape: tuple[int, int]) -> tuple[StateTable, jax.Array]:
    """Returns the table of a run-time mask [C, T, S], and its tiles as `run_time_block_pairs` has them."""
    pairs, tiles = run_time_block_pairs(mask, shape)
    entries = jnp.where(pairs.state == FULL, _IS_FULL, jnp.where(pairs.state == EMPTY, _IS_EMPTY, pairs.mask_tile))
    return StateTable(entries.reshape(len(mask), *pairs.num_blocks), pairs.num_blocks, 1), tiles
