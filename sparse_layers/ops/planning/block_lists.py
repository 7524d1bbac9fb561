"""Block lists: for each block of one side, the blocks of the other that it meets, as arrays that kernels walk over.

Lists are data, not constants of a compilation: a longer list compiles nothing anew. All come from one builder, a stable
sort of `BlockPairs`, whether these were planned beforehand (then it is numpy's), looked up by document, or chosen by
the model a moment ago (then it is XLA's, under jit). The lists by key, for dk and dv, come from the same pairs.
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
    """The list of each block of the major side: its free entries first, then the masked ones.

    Arrays are numpy's if all was known when they were made. Batch entry b and query head h have list
    ``(b % LB, h // group % LH)``; a major block without entries has an empty list.

    Attributes:
      spans: int32 [LB, LH, blocks, 3], of each major block the first of its entries, the first masked one, and the end.
        Entries from first to masked are free: every pair of theirs may attend. Lists may lie anywhere, in any order.
      block: int32 [entries], the minor block of each.
      tile: int32 [entries], which mask tile a masked entry has; -1 for none, if only segment ids limit it.
      active_rows_mask: int32 [entries], or None: bit i is set if the i-th part of the query block selected this entry.
      minor_blocks: number of blocks on the minor side.
      group: how many neighbouring query heads share a list.
    """

    spans: Any
    block: Any
    tile: Any
    active_rows_mask: Any
    minor_blocks: int
    group: int = 1

    @property
    def counts(self) -> Any:
        """[LB, LH, blocks, 2], of the free entries and of all."""
        return self.spans[..., 1:] - self.spans[..., :1]

    @property
    def static(self) -> bool:
        """Whether they were known when they were made."""
        return isinstance(self.spans, np.ndarray)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPairs:
    """Pairs of blocks that may be active, in any order, each once.

    Attributes:
      row: int32 [LB, LH, n], the block of queries; this and the next two may have 1 in the place of LB.
      column: int32 [LB, LH, n], the block of keys.
      kind: integers [LB, LH, n], EMPTY, PARTIAL or FULL.
      tile: int32 [LB, LH, n], the mask tile of PARTIAL ones; -1 for none.
      active_rows_mask: int32 [LB, LH, n], or None; see `BlockLists`.
      blocks: number of query blocks and of key blocks.
      group: see `BlockLists`.
      max_in_row: where rows are known at run time only, how many pairs each has, one row after the other.
    """

    row: Any
    column: Any
    kind: Any
    tile: Any
    active_rows_mask: Any
    blocks: tuple[int, int]
    group: int = 1
    max_in_row: int | None = None

    def longest(self, kv_major: bool) -> int:
        """A bound, known beforehand, of the entries of a list."""
        major = self.column if kv_major else self.row
        if isinstance(major, np.ndarray):
            lines = major.reshape(-1, major.shape[-1])
            return max((int(np.bincount(line).max(initial=0)) for line in lines), default=0)
        bound = self.blocks[not kv_major]
        return bound if kv_major or self.max_in_row is None else min(bound, self.max_in_row)

    def sorted(self, kv_major: bool) -> "BlockPairs":
        """The same, known beforehand, in the order of query blocks; or of key blocks, the last query block first.

        Lists of key blocks often end at the same queries, and begin at others: so walked, these are in caches.
        """
        step = -1 if kv_major else 1
        major = np.where(self.kind == EMPTY, max(self.blocks), self.column if kv_major else self.row)[..., ::step]
        order = np.argsort(major, kind="stable")
        order = major.shape[-1] - 1 - order if kv_major else order
        row, column, kind, tile = (
            np.take_along_axis(x, order, -1) for x in (self.row, self.column, self.kind, self.tile)
        )
        # What only fills up shorter lists counts as the last block's.
        row, column = (np.where(kind == EMPTY, n - 1, x) for x, n in zip((row, column), self.blocks, strict=True))
        return dataclasses.replace(self, row=row, column=column, kind=kind, tile=tile)

    def starts(self, kv_major: bool) -> np.ndarray | None:
        """Where each block's pairs begin, int32 [LH, blocks + 1], if they are known to be sorted; else None."""
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
        """The lists of query blocks, or of key blocks; within a list, entries stay in the order of the pairs."""
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

    def cut_minor_blocks(self, parts: int, kv_major: bool, states: np.ndarray, minor_blocks: int) -> "BlockPairs":
        """The same pairs, where blocks of the minor side are cut; made on the device, for they may be millions.

        Args:
          parts: of a block; part p of a mask tile is the tile ``tile * parts + p``.
          kv_major: whether queries are the minor side; their last parts come first then, as in `sorted`.
          states: EMPTY, PARTIAL or FULL for each part, [1 + tiles, parts], first for a tile that lets everything pass.
          minor_blocks: number of parts that there are; of the last block not all need exist.
        """
        major, minor = (self.column, self.row) if kv_major else (self.row, self.column)
        major, minor, kind, tile = (jnp.repeat(x, parts, axis=-1) for x in (major, minor, self.kind, self.tile))
        part = jnp.tile(np.arange(parts, dtype=np.int32)[:: -1 if kv_major else 1], self.kind.shape[-1])
        minor = minor * parts + part
        kind = jnp.where((kind == EMPTY) | (minor >= minor_blocks), EMPTY, jnp.asarray(states)[tile + 1, part])
        tile = jnp.where(kind == PARTIAL, tile * parts + part, -1)
        sides, numbers = (major, jnp.minimum(minor, minor_blocks - 1)), (self.blocks[kv_major], minor_blocks)
        (row, column), blocks = (sides[::-1], numbers[::-1]) if kv_major else (sides, numbers)
        return dataclasses.replace(self, row=row, column=column, kind=kind, tile=tile, blocks=blocks)

    def with_segments(
        self, segments: tuple[jax.Array, jax.Array] | None, orders: tuple[RowOrder, RowOrder], shape: tuple[int, int]
    ) -> "BlockPairs":
        """Drops pairs whose segments cannot meet; a pair stays free if it lies in one segment only.

        Args:
          segments: int32 ids of queries [B, T] and of keys [B, S], negative ones for padding; None drops nothing.
          orders: row orders of queries and of keys.
          shape: (bq, bkv), rows of a block.
        """
        if segments is None:
            return self
        q_ids, kv_ids = (SegmentRanges.of(*side) for side in zip(orders, segments, shape, strict=True))
        a, b = q_ids.at(self.row), kv_ids.at(self.column)
        meet = (a.least <= b.largest) & (b.least <= a.largest)
        same = (a.smallest == a.largest) & (b.smallest == b.largest) & (a.smallest == b.smallest)
        kind = jnp.where((self.kind == FULL) & ~same, PARTIAL, self.kind)
        kind = jnp.where(meet, kind, EMPTY)
        return dataclasses.replace(self, kind=kind)


@dataclasses.dataclass(frozen=True)
class SegmentRanges:
    """The segment ids of blocks: int32 [B, blocks], or of pairs [B, LH, n].

    Attributes:
      least: the smallest id but for padding, which is negative; the largest int32 if there is nothing else.
      smallest: the smallest of all.
      largest: the largest.
    """

    least: Any
    smallest: Any
    largest: Any

    @staticmethod
    def of(order: RowOrder, ids: jax.Array, block: int) -> "SegmentRanges":
        """Of ids [B, tokens] in blocks of rows; rows without a token are padding."""
        blocks = -(-order.rows // block)
        rows = order.gather(ids, blocks * block, fill=-1)
        rows = rows.reshape(len(rows), blocks, block)
        least = jnp.where(rows >= 0, rows, np.iinfo(np.int32).max).min(-1)
        return SegmentRanges(least, rows.min(-1), rows.max(-1))

    def at(self, index: Any) -> "SegmentRanges":
        """Those of the blocks ``index`` [LB, LH, n]: [B, LH, n]."""
        found = []
        for x in (self.least, self.smallest, self.largest):
            if index.shape[0] == 1:
                found.append(x[:, jnp.asarray(index[0])])
            else:
                found.append(jax.vmap(lambda own, places: own[places])(x, index))
        return SegmentRanges(*found)


# --- masks known beforehand ------------------------------------------------------------------------------------------


def planned_block_pairs(
    masks: Sequence[Reordered], shape: tuple[int, int], with_tiles: bool
) -> tuple[BlockPairs, np.ndarray | None]:
    """The active blocks of masks in row space, one for each list head; cached.

    Args:
      masks: with the same row orders.
      shape: (bq, bkv), rows of a block.
      with_tiles: whether to make mask tiles; otherwise PARTIAL ones have the number 0, and rules compute them.

    Returns:
      The pairs, sorted by row and then by column, and the distinct tiles as `pack_tiles` has them.
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
        here = 0, head, slice(len(grid.rows))
        row[here], column[here], kind[here] = grid.rows, grid.columns, grid.states
        partial = np.flatnonzero(grid.states == PARTIAL)
        if with_tiles:
            rows, columns = grid.rows[partial], grid.columns[partial]
            first, kinds = _alike(mask, rows, columns, shape)
            tiles = masked_tiles(mask, rows[first], columns[first], *shape)
            packed = (bits for chunk in tiles for bits in pack_tiles(chunk))
            found = [distinct.setdefault(bits.tobytes(), len(distinct)) for bits in packed]
            tile[0, head, partial] = np.asarray(found, np.int32)[kinds]
        else:
            tile[0, head, partial] = 0
    tiles = None
    if with_tiles:
        tiles = np.frombuffer(b"".join(distinct), np.uint8).reshape(len(distinct), shape[0], -(-shape[1] // 8))
    return BlockPairs(row, column, kind, tile, None, blocks), tiles


def _alike(mask: Reordered, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> tuple[Any, Any]:
    """(The first block of each kind, the kind of each block), where those of a kind have the same tile for certain."""
    period = mask_period(mask.mask) if mask.q_order.natural and mask.kv_order.natural else None
    if period is None:
        return slice(None), slice(None)
    q, kv = rows.astype(np.int64) * shape[0], columns.astype(np.int64) * shape[1]
    last = (q + shape[0] > mask.q_order.rows) | (kv + shape[1] > mask.kv_order.rows)  # beyond are no tokens
    keys = np.stack([np.where(last, -1 - q, q % period), q - kv])
    _, first, kinds = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    return first, kinds.ravel()


def grid_shape(mask: Reordered, shape: tuple[int, int]) -> tuple[int, int]:
    """How many blocks of ``shape`` the rows of queries and of keys take."""
    return -(-mask.q_order.rows // shape[0]), -(-mask.kv_order.rows // shape[1])


def pack_tiles(tiles: np.ndarray) -> np.ndarray:
    """Bool tiles [n, bq, bkv] as bits, uint8 [n, bq, ceil(bkv / 8)]: bit c % 8 of byte c // 8 is key c."""
    return np.packbits(tiles, axis=-1, bitorder="little")


def unpack_tiles(tiles: np.ndarray, columns: int) -> np.ndarray:
    """The inverse of `pack_tiles`: bool [n, bq, columns]."""
    return np.unpackbits(tiles, axis=-1, count=columns, bitorder="little").astype(bool)


# --- masks known at run time -----------------------------------------------------------------------------------------


def run_time_block_pairs(mask: jax.Array, shape: tuple[int, int]) -> tuple[BlockPairs, jax.Array]:
    """All blocks of a run-time mask [C, T, S] in natural order, and their tiles, bool [C * rows * columns, bq, bkv]."""
    tiles, kind = tiled(mask, shape)
    heads, rows, columns = kind.shape
    row, column = (x.reshape(1, 1, -1).astype(np.int32) for x in np.indices((rows, columns)))
    tile = np.arange(heads * rows * columns, dtype=np.int32).reshape(1, heads, -1)
    row, column = (np.broadcast_to(x, tile.shape) for x in (row, column))
    return BlockPairs(row, column, kind.reshape(tile.shape), tile, None, (rows, columns)), tiles.reshape(-1, *shape)


def tiled(mask: jax.Array, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """A mask [C, T, S] in blocks, bool [C, rows, columns, bq, bkv], padded with False, and the int32 state of each."""
    ends = [(0, -length % block) for length, block in zip(mask.shape[1:], shape, strict=True)]
    mask = jnp.pad(mask, [(0, 0), *ends])
    heads, rows, columns = mask.shape
    tiles = mask.reshape(heads, rows // shape[0], shape[0], columns // shape[1], shape[1]).swapaxes(2, 3)
    return tiles, tiles.any((3, 4)).astype(jnp.int32) + tiles.all((3, 4)).astype(jnp.int32)


# --- blocks chosen at run time ---------------------------------------------------------------------------------------

# A block of queries is cut into at most so many parts that choose for themselves: they are the bits of one word.
MAX_QUERY_GROUPS = 32
# Blocks of a row up to which each is compared with all before it.
MAX_COMPARED = 32
# Cells of a table of states; where there are more, one cell stands for several blocks of queries.
_TABLE_CELLS = 1 << 20
# Entries of such a table that are no mask tile.
_NOTHING, _EVERYTHING = -2, -1


def selected_block_pairs(
    ids: jax.Array,
    granularity: int,
    shape: tuple[int, int],
    table: "StateTable",
    heads: int,
    start: Any = 0,
    ordered: bool = True,
) -> BlockPairs:
    """The blocks that queries chose and that a mask leaves something of.

    Args:
      ids: int32 [B, Tq, G, k], key blocks of shape[1] keys, of which each ``granularity`` queries chose k; what is no
        number of a block is left out, and what comes twice counts once.
      granularity: queries that choose together.
      shape: (bq, bkv) of the lists; bq is ``granularity`` times a number up to `MAX_QUERY_GROUPS`, or divides it.
      table: what the mask says of the blocks.
      heads: number of query heads N, of which G are 1, or a divisor.
      start: the block of queries in ``table`` that is the first one here.
      ordered: whether blocks of a row are to be in order. If not, those of up to `MAX_COMPARED` choices are as given.
    """
    bq, (rows, columns), classes = shape[0], table.blocks, table.states.shape[0]
    if classes > 1:  # lists differ by head in two ways
        ids = jnp.repeat(ids, heads // ids.shape[2], axis=2)
    if not ids.shape[-1]:
        ids = jnp.full((*ids.shape[:-1], 1), -1, jnp.int32)  # kernels want arrays that are not empty
    batch, tq, lists, k = ids.shape
    ids = jnp.where((ids >= 0) & (ids < columns), ids, columns)
    parts, finer = max(1, bq // granularity), max(1, granularity // bq)
    ids = jnp.pad(ids, [(0, 0), (0, -tq % parts), (0, 0), (0, 0)], constant_values=columns)
    together = -(-tq // parts)
    ids = jnp.moveaxis(ids.reshape(batch, together, parts, lists, k), 3, 1).reshape(batch, lists, together, parts * k)
    part = np.repeat(np.arange(parts, dtype=np.int32), k).reshape(1, 1, 1, parts * k)
    column: Any = ids
    live: Any
    if parts == 1 and not ordered and k <= MAX_COMPARED:
        live = ~_seen_before(column)
    else:
        codes = jnp.sort(ids * parts + part, axis=-1)
        column, part = jnp.divmod(codes, parts)
        live = differs(codes)
    live = live & (column < columns)
    active_rows_mask: Any = None
    everyone: Any = True
    if parts > 1:
        active_rows_mask = _sum_of_equals(column, jnp.where(live, 1 << part, 0))
        live = live & differs(column)
        # Only the last block may have fewer parts than others, those that come first.
        some = np.minimum(parts, tq - np.arange(together) * parts)
        all_of_them = np.array([(1 << int(n)) - 1 for n in some], np.uint32).view(np.int32)
        everyone = active_rows_mask == all_of_them.reshape(1, 1, together, 1)
    if finer > 1:  # there are no parts then
        live, column = (jnp.repeat(x, finer, axis=2)[:, :, :rows] for x in (live, column))
    row = jax.lax.broadcasted_iota(jnp.int32, column.shape, 2)
    column = jnp.minimum(column, columns - 1)
    states = table.at(np.arange(lists)[:, None, None] % classes, row + start, column)
    kind = jnp.where((states == _EVERYTHING) & everyone, FULL, PARTIAL)
    kind = jnp.where(live & (states != _NOTHING), kind, EMPTY)
    found = BlockPairs(
        row, column, kind, jnp.maximum(states, -1), active_rows_mask, table.blocks, heads // lists, parts * k
    )
    names = ("row", "column", "kind", "tile") + (("active_rows_mask",) if parts > 1 else ())
    n = column.shape[2] * column.shape[3]
    flat = {name: getattr(found, name).reshape(batch, lists, n) for name in names}
    return dataclasses.replace(found, **flat)


def differs(x: jax.Array) -> jax.Array:
    """Whether each entry of the last axis differs from the one before."""
    return jnp.concatenate([jnp.ones_like(x[..., :1], bool), x[..., 1:] != x[..., :-1]], axis=-1)


def _seen_before(x: jax.Array) -> jax.Array:
    """Whether each entry of the last axis equals one before it; for short rows in less time than a sort takes."""
    found = jnp.zeros(x.shape, bool)
    for i in range(1, x.shape[-1]):
        found = found | jnp.pad(x[..., i:] == x[..., :-i], [(0, 0)] * (x.ndim - 1) + [(i, 0)])
    return found


def _sum_of_equals(x: jax.Array, summands: jax.Array) -> jax.Array:
    """At the first of equal neighbours of x along the last axis the sum of their summands, modulo 2**32."""
    n = x.shape[-1]
    rest = jnp.cumsum(summands[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]
    rest = jnp.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    starts = jnp.where(differs(x), jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1), n)
    following = jax.lax.cummin(starts, axis=x.ndim - 1, reverse=True)
    following = jnp.concatenate([following[..., 1:], jnp.full_like(following[..., :1], n)], axis=-1)
    return rest[..., :-1] - jnp.take_along_axis(rest, following, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class StateTable:
    """What masks say of every block.

    Attributes:
      states: int32 [C, R, columns]: a mask tile, or one of the negative numbers above.
      blocks: number of query blocks and of key blocks.
      finer: query blocks in a row of ``states``; their mask tiles are parts of its tile, in order.
    """

    states: Any
    blocks: tuple[int, int]
    finer: int

    def at(self, head: Any, row: Any, column: Any) -> jax.Array:
        """The entries of blocks."""
        found = jnp.asarray(self.states)[head, row // self.finer, column]
        return found if self.finer == 1 else jnp.where(found < 0, found, found * self.finer + row % self.finer)


def state_table(masks: Sequence[Reordered], shape: tuple[int, int], with_tiles: bool) -> tuple[StateTable, Any]:
    """The table of masks known beforehand, in natural order, and their tiles as `planned_block_pairs` has them."""
    blocks, finer = grid_shape(masks[0], shape), 1
    while blocks[0] * blocks[1] * len(masks) > _TABLE_CELLS * finer and finer * shape[0] < masks[0].q_order.rows:
        finer *= 2
    found, tiles = planned_block_pairs(masks, (shape[0] * finer, shape[1]), with_tiles)
    states = np.full((len(masks), -(-blocks[0] // finer), blocks[1]), _NOTHING, np.int32)
    for head, own in enumerate(states):
        live = found.kind[0, head] != EMPTY
        entries = np.where(found.kind[0, head] == FULL, _EVERYTHING, found.tile[0, head])
        own[found.row[0, head][live], found.column[0, head][live]] = entries[live]
    if tiles is not None:
        tiles = tiles.reshape(-1, shape[0], tiles.shape[-1])
    return StateTable(states, blocks, finer), tiles


def run_time_state_table(mask: jax.Array, shape: tuple[int, int]) -> tuple[StateTable, jax.Array]:
    """The table of a run-time mask [C, T, S], and its tiles as `run_time_block_pairs` has them."""
    found, tiles = run_time_block_pairs(mask, shape)
    entries = jnp.where(found.kind == FULL, _EVERYTHING, jnp.where(found.kind == EMPTY, _NOTHING, found.tile))
    return StateTable(entries.reshape(len(mask), *found.blocks), found.blocks, 1), tiles
