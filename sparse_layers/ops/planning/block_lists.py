"""Block lists: for each block of the major side, the blocks of the minor side that it meets, as arrays for kernels.

The major side is that of the outer loop: query blocks forward and for dq, key blocks for dk and dv (kv-major)::

    block pairs                 lists of query blocks         lists of key blocks (kv-major)
    row  column  state          0: 0*                         0: 1 0* 2*
     0     0     PARTIAL        1: 0 1*                       1: 1* 2*
     1     0     FULL           2: 0* 1*                      FULL entries come first, PARTIAL ones (*) after them
     ...

Lists are data, not constants of a compilation: a longer list compiles nothing anew. One builder makes them all, a
stable sort of `BlockPairs`: by numpy for planned pairs, by XLA under jit for pairs of documents and selections.
`BlockPairs.lists(kv_major=True)` returns the transposed lists. The pairs of selections are `selected_block_pairs`.
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
    data_fields=["spans", "block", "tile", "active_rows_mask"],
    meta_fields=["minor_blocks", "group"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BlockLists:
    """The lists of the major blocks: in each, FULL entries come first, then PARTIAL ones.

    Arrays are numpy's if the pairs are planned, JAX's otherwise. Batch entry b and query head h have list
    ``(b % LB, h // group % LH)``; a major block without entries has an empty list.
    """

    # int32 [LB, LH, blocks, 3], for each major block the index of its first entry, of its first PARTIAL entry, and its
    # end. Lists may lie anywhere in ``block``, in any order.
    spans: Any
    block: Any  # int32 [entries], the minor block of each entry
    tile: Any  # int32 [entries], the mask tile of a PARTIAL entry; -1 if segment ids alone limit it
    # int32 [entries], or None: bit i is set if the i-th part of the query block selected this entry.
    active_rows_mask: Any
    minor_blocks: int  # number of blocks on the minor side
    group: int = 1  # number of neighbouring query heads that share a list

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

    row: Any  # int32 [LB, LH, n], the block of queries; this and the next two may have 1 in the place of LB
    column: Any  # int32 [LB, LH, n], the block of keys
    kind: Any  # integers [LB, LH, n], EMPTY, PARTIAL or FULL
    tile: Any  # int32 [LB, LH, n], the mask tile of PARTIAL ones; -1 for none
    active_rows_mask: Any  # int32 [LB, LH, n], or None; see `BlockLists`
    blocks: tuple[int, int]  # number of query blocks and of key blocks
    group: int = 1  # see `BlockLists`
    # Number of pairs of each row, one row after the other, if rows are known at run time only; else None.
    max_in_row: int | None = None

    def longest(self, kv_major: bool) -> int:
        """Returns a static bound of the entries of a list."""
        major = self.column if kv_major else self.row
        if isinstance(major, np.ndarray):
            lines = major.reshape(-1, major.shape[-1])
            return max((int(np.bincount(line).max(initial=0)) for line in lines), default=0)
        bound = self.blocks[not kv_major]
        return bound if kv_major or self.max_in_row is None else min(bound, self.max_in_row)

    def sorted(self, kv_major: bool) -> "BlockPairs":
        """Returns the planned pairs sorted by query block, or by key block with the last query block first.

        Lists of key blocks often end at the same queries and start at different ones. In this order, neighbouring
        lists read the same queries first, while these are in caches.
        """
        step = -1 if kv_major else 1
        major = np.where(self.kind == EMPTY, max(self.blocks), self.column if kv_major else self.row)[..., ::step]
        order = np.argsort(major, kind="stable")
        order = major.shape[-1] - 1 - order if kv_major else order
        row, column, kind, tile = (
            np.take_along_axis(x, order, -1) for x in (self.row, self.column, self.kind, self.tile)
        )
        # Padding of shorter lists counts as the last block's.
        row, column = (np.where(kind == EMPTY, n - 1, x) for x, n in zip((row, column), self.blocks, strict=True))
        return dataclasses.replace(self, row=row, column=column, kind=kind, tile=tile)

    def starts(self, kv_major: bool) -> np.ndarray | None:
        """Returns the index of each block's first pair, int32 [LH, blocks + 1], if pairs are sorted; else None."""
        major, blocks = (self.column, self.blocks[1]) if kv_major else (self.row, self.blocks[0])
        if isinstance(major, np.ndarray):
            lines = major[0]
            if (np.diff(lines) < 0).any():
                return None
            return np.stack([np.searchsorted(line, np.arange(blocks + 1)) for line in lines]).astype(np.int32)
        if kv_major or self.max_in_row is None:
            return None
        heads = self.kind.shape[1]
        return np.tile(np.arange(blocks + 1, dtype=np.int32) * self.max_in_row, (heads, 1))

    def lists(self, kv_major: bool) -> BlockLists:
        """Returns the lists of query blocks, or of key blocks; entries of a list stay in the order of the pairs."""
        xp: Any = np if isinstance(self.kind, np.ndarray) else jnp
        major, minor = (self.column, self.row) if kv_major else (self.row, self.column)
        batches, heads, n = self.kind.shape
        blocks = self.blocks[kv_major]
        lines = batches * heads * blocks
        first = np.arange(batches * heads, dtype=np.int32).reshape(batches, heads, 1) * blocks
        key = xp.where(
            self.kind == EMPTY, 2 * lines, 2 * (first + major) + (self.kind == PARTIAL).astype(np.int32)
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
        spans = xp.stack([ends[:-1:2], ends[1::2], ends[2::2]], axis=-1).reshape(batches, heads, blocks, 3)

        def sorted_(x):
            return None if x is None else xp.broadcast_to(x, (batches, heads, n)).ravel()[order].astype(np.int32)

        block, tile, active_rows_mask = (sorted_(x) for x in (minor, self.tile, self.active_rows_mask))
        return BlockLists(spans, block, tile, active_rows_mask, self.blocks[not kv_major], self.group)

    def cut_minor_blocks(self, cuts: int, kv_major: bool, states: np.ndarray, minor_blocks: int) -> "BlockPairs":
        """Returns the pairs of smaller minor blocks; computed on the device, where there may be millions.

        Args:
          cuts: smaller blocks in a block; cut c of a mask tile becomes the tile ``tile * cuts + c``.
          kv_major: True if queries are the minor side; their last cuts come first then, as in `sorted`.
          states: EMPTY, PARTIAL or FULL of each cut, [1 + tiles, cuts]; row 0 is that of a FULL block.
          minor_blocks: number of smaller blocks; the last block may have fewer than ``cuts``.
        """
        major, minor = (self.column, self.row) if kv_major else (self.row, self.column)
        major, minor, kind, tile = (jnp.repeat(x, cuts, axis=-1) for x in (major, minor, self.kind, self.tile))
        cut = jnp.tile(np.arange(cuts, dtype=np.int32)[:: -1 if kv_major else 1], self.kind.shape[-1])
        minor = minor * cuts + cut
        kind = jnp.where((kind == EMPTY) | (minor >= minor_blocks), EMPTY, jnp.asarray(states)[tile + 1, cut])
        tile = jnp.where(kind == PARTIAL, tile * cuts + cut, -1)
        sides, numbers = (major, jnp.minimum(minor, minor_blocks - 1)), (self.blocks[kv_major], minor_blocks)
        (row, column), blocks = (sides[::-1], numbers[::-1]) if kv_major else (sides, numbers)
        return dataclasses.replace(self, row=row, column=column, kind=kind, tile=tile, blocks=blocks)

    def limit(
        self,
        segments: tuple[jax.Array, jax.Array] | None,
        order_ids: tuple[jax.Array, jax.Array] | None,
        orders: tuple[RowOrder, RowOrder],
        shape: tuple[int, int],
    ) -> "BlockPairs":
        """Returns the pairs that segment ids and order ids of queries and keys allow, as in `Operands`.

        A pair stays FULL only if it lies in one segment, and all its queries see all its keys.
        """
        if segments is None:
            return self
        q_ids, kv_ids = (IdRanges.of_blocks(*side) for side in zip(orders, segments, shape, strict=True))
        a, b = q_ids.take(self.row), kv_ids.take(self.column)
        meet = (a.min_valid <= b.max_id) & (b.min_valid <= a.max_id)
        all_meet = (a.min_id == a.max_id) & (b.min_id == b.max_id) & (a.min_id == b.min_id)
        if order_ids is not None:
            least, largest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
            sides = zip(orders, order_ids, shape, (least, largest), strict=True)
            q_ids, kv_ids = (IdRanges.of_blocks(*side) for side in sides)
            a, b = q_ids.take(self.row), kv_ids.take(self.column)
            meet, all_meet = meet & (b.min_id <= a.max_id), all_meet & (b.max_id <= a.min_id)
        kind = jnp.where((self.kind == FULL) & ~all_meet, PARTIAL, self.kind)
        kind = jnp.where(meet, kind, EMPTY)
        return dataclasses.replace(self, kind=kind)


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

        def taken(x):
            if blocks.shape[0] == 1:
                return x[:, jnp.asarray(blocks[0])]
            return jax.vmap(lambda ids, indices: ids[indices])(x, blocks)

        return IdRanges(taken(self.min_valid), taken(self.min_id), taken(self.max_id))


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
    row, column, kind = np.zeros((3, 1, len(masks), n), np.int32)
    tile = np.full((1, len(masks), n), -1, np.int32)
    distinct: dict[bytes, int] = {}
    for head, (mask, grid) in enumerate(zip(masks, grids, strict=True)):
        entries = 0, head, slice(len(grid.rows))
        row[entries], column[entries], kind[entries] = grid.rows, grid.columns, grid.states
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
    return BlockPairs(row, column, kind, tile, None, blocks), tiles


def _tile_classes(mask: Reordered, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Returns the first block of each class and the class of each block; blocks of a class have the same mask tile."""
    period = mask_period(mask.mask) if mask.q_order.natural and mask.kv_order.natural else None
    if period is None:
        return slice(None), slice(None)
    q, kv = rows.astype(np.int64) * shape[0], columns.astype(np.int64) * shape[1]
    last = (q + shape[0] > mask.q_order.rows) | (kv + shape[1] > mask.kv_order.rows)  # beyond are no tokens
    keys = np.stack([np.where(last, -1 - q, q % period), q - kv])
    _, first, kinds = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    return first, kinds.ravel()


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
    tiles, kind = tiled(mask, shape)
    heads, rows, columns = kind.shape
    row, column = (x.reshape(1, 1, -1).astype(np.int32) for x in np.indices((rows, columns)))
    tile = np.arange(heads * rows * columns, dtype=np.int32).reshape(1, heads, -1)
    row, column = (np.broadcast_to(x, tile.shape) for x in (row, column))
    return BlockPairs(row, column, kind.reshape(tile.shape), tile, None, (rows, columns)), tiles.reshape(-1, *shape)


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
    bq, (rows, columns), classes = shape[0], table.blocks, table.states.shape[0]
    if classes > 1:  # lists differ by head in two ways
        ids = jnp.repeat(ids, heads // ids.shape[2], axis=2)
    if not ids.shape[-1]:
        ids = jnp.full((*ids.shape[:-1], 1), -1, jnp.int32)  # kernels want arrays that are not empty
    batch, tq, lists, k = ids.shape
    ids = jnp.where((ids >= 0) & (ids < columns), ids, columns)
    num_groups, repeats = max(1, bq // granularity), max(1, granularity // bq)
    ids = jnp.pad(ids, [(0, 0), (0, -tq % num_groups), (0, 0), (0, 0)], constant_values=columns)
    num_blocks = -(-tq // num_groups)
    ids = jnp.moveaxis(ids.reshape(batch, num_blocks, num_groups, lists, k), 3, 1).reshape(
        batch, lists, num_blocks, num_groups * k
    )
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
    active_rows_mask: Any = None
    all_select: Any = True
    if num_groups > 1:
        active_rows_mask = _sum_of_equals(column, jnp.where(is_live, 1 << group, 0))
        is_live = is_live & differs(column)
        # Only the last block may have fewer parts than others, those that come first.
        groups_of_block = np.minimum(num_groups, tq - np.arange(num_blocks) * num_groups)
        full_word = np.array([(1 << int(n)) - 1 for n in groups_of_block], np.uint32).view(np.int32)
        all_select = active_rows_mask == full_word.reshape(1, 1, num_blocks, 1)
    if repeats > 1:  # there are no parts then
        is_live, column = (jnp.repeat(x, repeats, axis=2)[:, :, :rows] for x in (is_live, column))
    row = jax.lax.broadcasted_iota(jnp.int32, column.shape, 2)
    column = jnp.minimum(column, columns - 1)
    states = table.lookup(np.arange(lists)[:, None, None] % classes, row + start, column)
    kind = jnp.where((states == _IS_FULL) & all_select, FULL, PARTIAL)
    kind = jnp.where(is_live & (states != _IS_EMPTY), kind, EMPTY)
    pairs = BlockPairs(
        row, column, kind, jnp.maximum(states, -1), active_rows_mask, table.blocks, heads // lists, num_groups * k
    )
    names = ("row", "column", "kind", "tile") + (("active_rows_mask",) if num_groups > 1 else ())
    n = column.shape[2] * column.shape[3]
    flat = {name: getattr(pairs, name).reshape(batch, lists, n) for name in names}
    return dataclasses.replace(pairs, **flat)


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
        live = pairs.kind[0, head] != EMPTY
        entries = np.where(pairs.kind[0, head] == FULL, _IS_FULL, pairs.tile[0, head])
        cells[pairs.row[0, head][live], pairs.column[0, head][live]] = entries[live]
    if tiles is not None:
        tiles = tiles.reshape(-1, shape[0], tiles.shape[-1])
    return StateTable(states, blocks, blocks_per_row), tiles


def run_time_state_table(mask: jax.Array, shape: tuple[int, int]) -> tuple[StateTable, jax.Array]:
    """Returns the table of a run-time mask [C, T, S], and its tiles as `run_time_block_pairs` has them."""
    pairs, tiles = run_time_block_pairs(mask, shape)
    entries = jnp.where(pairs.kind == FULL, _IS_FULL, jnp.where(pairs.kind == EMPTY, _IS_EMPTY, pairs.tile))
    return StateTable(entries.reshape(len(mask), *pairs.blocks), pairs.blocks, 1), tiles
