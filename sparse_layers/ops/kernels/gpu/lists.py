"""What kernels read of `BlockLists`: these, and mask tiles as bits in the order in which kernels test them.

The major side is that of a program's result: queries for out and dq, keys for dk and dv.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....masks.bounded_cache import bounded_cache
from ....masks.states import EMPTY, FULL, PARTIAL
from ...planning.block_lists import BlockLists, BlockPairs, planned_block_pairs, unpack_tiles
from ...planning.plan import Pass
from ...planning.row_orders import RowOrder
from ..call import Call
from ..operands import Operands
from ..pass_blocks import run_time_blocks
from . import bridge
from .compact_kernel import CHUNK, Sizes, compact_kernel
from .tiles import Axis, Order


def kernel_order(order: RowOrder) -> Order:
    """What kernels know of a row order."""
    return Order(order.offset, order.axes, order.length)


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a pass: how its rows are cut.

    Attributes:
      order: token of each row.
      block: rows in a block of the lists.
      tile: rows in a tile of a kernel, a power of two; a block is walked in ``parts`` tiles.
      pack: query heads whose vectors at a token are rows of one tile; a power of two. Blocks are as long in tokens.
      gathered: blocks are single rows, and a tile is made of many of them.
    """

    order: RowOrder
    block: int
    tile: int
    pack: int = 1
    gathered: bool = False

    @property
    def parts(self) -> int:
        """Tiles in a block."""
        return -(-self.block * self.pack // self.tile)

    @property
    def blocks(self) -> int:
        """Blocks in a sequence."""
        return -(-self.order.rows // self.block)

    @property
    def axis(self) -> Axis:
        """What kernels know of it."""
        return Axis(
            self.order.rows, kernel_order(self.order), self.block, self.tile, self.parts, self.pack, self.gathered
        )

    def steps(self, entries: Any) -> Any:
        """How many steps so many entries of a list take."""
        return -(-entries * self.pack // self.tile) if self.gathered else entries * self.parts

    @property
    def exact(self) -> bool:
        """Whether tiles fill a block, so that no row of a tile has to be left out."""
        return self.block * self.pack % self.tile == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Lists:
    """Lists of one pass.

    Attributes:
      lists: of the blocks.
      bits: int32 [1 + tiles, rows, words], of the major side's rows; bit c of word w is row 32 * w + c of the minor
        side. The first tile lets everything pass, the others are those that ``lists`` number from 0 on.
      longest: a bound, known beforehand, of the entries of a list.
      chosen: queries in a part of a block that chose for itself; 0 if none did.
    """

    lists: BlockLists
    bits: Any
    longest: int
    chosen: int = 0

    @functools.cached_property
    def any_free(self) -> bool:
        """Whether there may be free entries."""
        return not self.lists.static or bool(self.lists.counts[..., 0].any())

    @functools.cached_property
    def any_masked(self) -> bool:
        """Whether there may be masked entries."""
        return not self.lists.static or bool((self.lists.counts[..., 1] > self.lists.counts[..., 0]).any())

    @functools.cached_property
    def single(self) -> bool:
        """Whether every minor block is in one list only, whatever the head."""
        if not self.lists.static:
            return False
        heads = self.lists.spans.shape[1]
        found = np.split(self.lists.block, self.lists.spans[0, 1:, 0, 0]) if heads > 1 else [self.lists.block]
        return all(bool((np.bincount(x, minlength=self.lists.minor_blocks) == 1).all()) for x in found)


@bounded_cache()
def _sorted(passes: tuple[Pass, ...], shape: tuple[int, int], dkv: bool) -> BlockPairs:
    """The pairs of masks known beforehand, sorted by the major block."""
    return planned_block_pairs([one.mask for one in passes], shape, True)[0].sorted(dkv)


def lists_of(
    call: Call, operands: Operands, passes: tuple[Pass, ...], major: Side, minor: Side, dkv: bool, parts: int = 1
) -> Lists:
    """The lists of a pass.

    With segment ids, and all else known beforehand, a block of the passes may be ``parts`` blocks of the minor side.
    """
    q, kv = (minor, major) if dkv else (major, minor)
    if operands.selection is not None or operands.mask is not None:
        pairs, tiles = run_time_blocks(operands, (q.block, kv.block), call.masks, True)
        bits, starts = bits_of(tiles, major, minor, dkv), pairs.starts(dkv)
    elif operands.segments is None:
        return _static_lists(passes, major, minor, dkv)
    else:
        pairs, bits, starts = _in_parts(passes, major, minor, dkv, parts)
    pairs = pairs.with_segments(operands.segments, (q.order, kv.order), (q.block, kv.block))
    chosen = 0 if operands.selection is None or pairs.active_rows_mask is None else operands.selection.granularity
    pairs = only_whole(pairs, minor)
    lists = pairs.lists(dkv) if starts is None else _compacted(pairs, starts, dkv)
    return Lists(lists, bits, pairs.longest(dkv), chosen)


def _in_parts(
    passes: tuple[Pass, ...], major: Side, minor: Side, dkv: bool, parts: int
) -> tuple[BlockPairs, np.ndarray, np.ndarray | None]:
    """The pairs of masks known beforehand, sorted by the major block, their bits, and where lists begin.

    Blocks of the masks are ``parts`` of the minor side: they are cut on the device.
    """
    whole = dataclasses.replace(minor, block=minor.block * parts, tile=minor.tile * parts)
    pairs = _sorted(passes, (whole.block, major.block) if dkv else (major.block, whole.block), dkv)
    starts = pairs.starts(dkv)
    if parts == 1:
        return pairs, _static_bits(passes, major, minor, dkv), starts
    bits, states = _bits_in_parts(passes, major, whole, dkv, parts)
    return pairs.cut_minor_blocks(parts, dkv, states, minor.blocks), bits, None if starts is None else starts * parts


@bounded_cache()
def _bits_in_parts(
    passes: tuple[Pass, ...], major: Side, whole: Side, dkv: bool, parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """The bits of parts of tiles, those of a tile one after the other, and the states that `cut_minor_blocks` takes."""
    bits = _static_bits(passes, major, whole, dkv)
    bits = bits.reshape(*bits.shape[:2], parts, -1).swapaxes(1, 2)  # [1 + tiles, parts, rows, words]
    states = np.where((bits == -1).all((2, 3)), FULL, np.where(bits.any((2, 3)), PARTIAL, EMPTY))
    return np.concatenate([bits[0, :1], bits[1:].reshape(-1, *bits.shape[2:])]), states


def _compacted(pairs: BlockPairs, starts: np.ndarray, dkv: bool) -> BlockLists:
    """`BlockPairs.lists` of pairs that are sorted by their major block, of which ``starts`` says where they begin.

    Lists lie where their pairs lay, with gaps between them.
    """
    batches, heads, n = pairs.kind.shape
    minor, blocks = pairs.row if dkv else pairs.column, pairs.blocks[dkv]
    tile, active_rows_mask = pairs.tile, pairs.active_rows_mask
    arrays = starts, pairs.kind, minor, tile, starts if active_rows_mask is None else active_rows_mask
    entries = jax.ShapeDtypeStruct((batches * heads * n,), jnp.int32)
    outputs = [jax.ShapeDtypeStruct((batches, heads, blocks, 3), jnp.int32), entries, entries, entries]
    outputs[3] = outputs[3] if active_rows_mask is not None else jax.ShapeDtypeStruct((1,), jnp.int32)
    sizes = Sizes(n, heads, blocks, len(minor), len(tile), CHUNK, active_rows_mask is not None, FULL)
    arrays = [jnp.asarray(x, jnp.int32) for x in arrays]
    spans, block, tile, by = bridge.call_triton(
        compact_kernel, (blocks, heads, batches), arrays, outputs, {"Z": sizes}, 1, 1
    )
    by = None if active_rows_mask is None else by
    return BlockLists(spans, block, tile, by, pairs.blocks[not dkv], pairs.group)


@bounded_cache()
def _static_lists(passes: tuple[Pass, ...], major: Side, minor: Side, dkv: bool) -> Lists:
    shape = (minor.block, major.block) if dkv else (major.block, minor.block)
    lists = only_whole(_sorted(passes, shape, dkv), minor).lists(dkv)
    longest = int(lists.counts[..., 1].max(initial=0))
    return Lists(lists, _static_bits(passes, major, minor, dkv), longest)


@bounded_cache()
def _static_bits(passes: tuple[Pass, ...], major: Side, minor: Side, dkv: bool) -> np.ndarray:
    shape = (minor.block, major.block) if dkv else (major.block, minor.block)
    return bits_of(planned_block_pairs([one.mask for one in passes], shape, True)[1], major, minor, dkv)


def only_whole(pairs: BlockPairs, minor: Side) -> BlockPairs:
    """The pairs, none of them free if tiles reach beyond the blocks of the minor side."""
    if minor.exact:
        return pairs
    xp: Any = np if isinstance(pairs.kind, np.ndarray) else jnp
    return dataclasses.replace(pairs, kind=xp.where(pairs.kind == FULL, PARTIAL, pairs.kind))


def bits_of(tiles: Any, major: Side, minor: Side, dkv: bool) -> Any:
    """Tiles, bool [n, bq, bkv] of JAX or as `pack_tiles` has them, as the bits of `Lists`."""
    # Heads that are packed have a bit in common, and those of a block of queries then fit a word.
    rows = 1 if major.gathered else major.parts * major.tile // major.pack
    words = minor.parts * minor.tile if minor.pack == 1 else 32
    ends = [(0, rows - major.block), (0, words - minor.block)]
    if isinstance(tiles, np.ndarray):
        everything = np.ones((1, major.block, minor.block), bool)
        columns, parts = (major if dkv else minor).block, [everything]
        for start in range(0, len(tiles), 256):
            part = unpack_tiles(tiles[start : start + 256], columns)
            parts.append(part.swapaxes(1, 2) if dkv else part)
        words = [np.packbits(np.pad(x, [(0, 0), *ends]), axis=2, bitorder="little") for x in parts]
        return np.concatenate(words).view(np.int32)
    tiles = tiles.swapaxes(1, 2) if dkv else tiles
    tiles = jnp.concatenate([jnp.ones((1, *tiles.shape[1:]), bool), tiles])
    words = jnp.pad(tiles, [(0, 0), *ends]).reshape(len(tiles), rows, -1, 32)
    return jax.lax.bitcast_convert_type(
        (words.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32), jnp.int32
    )
