"""Block lists and mask bits of a pass, as kernels read them, and the tiling of its rows.

The major side is that of a program's result: queries for out and dq, keys for dk and dv (``kv_major``).
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
from .compact_kernel import CHUNK, CompactSizes, compact_kernel
from .tiles import RowOrderConstants, TilingConstants


def row_order_constants(order: RowOrder) -> RowOrderConstants:
    """Returns a row order as a compile-time constant."""
    return RowOrderConstants(order.offset, order.axes, order.length)


@dataclasses.dataclass(frozen=True)
class RowTiling:
    """The rows of one side of a pass, and how blocks and tiles divide them."""

    order: RowOrder  # maps rows to tokens
    block: int  # rows in a block of the lists
    tile: int  # vectors in a tile of a kernel, a power of two
    pack: int = 1  # query heads of a key head whose vectors share a tile, a power of two; FlashAttention's PackGQA
    gathers_rows: bool = False  # True if a block is a single row, and a tile gathers many of them

    @property
    def tiles_per_block(self) -> int:
        """Number of tiles in a block."""
        return -(-self.block * self.pack // self.tile)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in a sequence."""
        return -(-self.order.rows // self.block)

    @property
    def constants(self) -> TilingConstants:
        """The tiling as a compile-time constant."""
        return TilingConstants(
            self.order.rows,
            row_order_constants(self.order),
            self.block,
            self.tile,
            self.tiles_per_block,
            self.pack,
            self.gathers_rows,
        )

    def num_steps(self, num_entries: Any) -> Any:
        """Number of steps that entries of a list take."""
        return -(-num_entries * self.pack // self.tile) if self.gathers_rows else num_entries * self.tiles_per_block

    @property
    def tiles_fill_block(self) -> bool:
        """True if tiles do not reach beyond their block."""
        return self.block * self.pack % self.tile == 0


@dataclasses.dataclass(frozen=True, eq=False)
class PassLists:
    """Block lists and mask tiles of one pass."""

    block_lists: BlockLists
    # int32 [1 + tiles, rows, words], by rows of the major side. Bit c of word w is row 32 * w + c of the minor side.
    # The first tile allows every pair. The others are the tiles that ``block_lists`` number from 0 on.
    mask_bits: Any
    longest: int  # bound of the entries of a list, known at trace time
    granularity: int = 0  # neighbouring queries that select blocks together; 0 without a selection

    @functools.cached_property
    def any_full(self) -> bool:
        """True if there may be full entries."""
        return not self.block_lists.static or bool(self.block_lists.counts[..., 0].any())

    @functools.cached_property
    def any_partial(self) -> bool:
        """True if there may be partial entries."""
        counts = self.block_lists.counts
        return not self.block_lists.static or bool((counts[..., 1] > counts[..., 0]).any())

    @functools.cached_property
    def is_partition(self) -> bool:
        """True if the lists of each head partition the minor blocks: each is in one list."""
        if not self.block_lists.static:
            return False
        lists = self.block_lists
        by_head = np.split(lists.block, lists.spans[0, 1:, 0, 0]) if lists.spans.shape[1] > 1 else [lists.block]
        return all(bool((np.bincount(x, minlength=lists.minor_blocks) == 1).all()) for x in by_head)


@bounded_cache()
def _sorted_pairs(passes: tuple[Pass, ...], shape: tuple[int, int], kv_major: bool) -> BlockPairs:
    """Returns the block pairs of static masks, sorted by the major block."""
    return planned_block_pairs([one.mask for one in passes], shape, True)[0].sorted(kv_major)


def build_pass_lists(
    call: Call,
    operands: Operands,
    passes: tuple[Pass, ...],
    major: RowTiling,
    minor: RowTiling,
    kv_major: bool,
    subblocks: int = 1,
) -> PassLists:
    """Builds the lists of a pass: at trace time, or on the device if selections, masks or segment ids are arrays.

    Heads take ``passes`` in turn, () for a run-time mask or a selection. With ``kv_major``, lists are of key blocks, as
    the kernels of dk and dv read them. A planned block of the minor side has several ``subblocks`` only where segment
    ids are all that is dynamic.
    """
    q, kv = (minor, major) if kv_major else (major, minor)
    if operands.selection is not None or operands.mask is not None:
        pairs, tiles = run_time_blocks(operands, (q.block, kv.block), call.masks, True)
        mask_bits, starts = pack_mask_bits(tiles, major, minor, kv_major), pairs.starts(kv_major)
    elif operands.segments is None:
        return _static_lists(passes, major, minor, kv_major)
    else:
        pairs, mask_bits, starts = _divided_pairs(passes, major, minor, kv_major, subblocks)
    pairs = pairs.limit(operands.segments, operands.order_ids, (q.order, kv.order), (q.block, kv.block))
    granularity = 0 if operands.selection is None or pairs.active_rows_mask is None else operands.selection.granularity
    pairs = mask_overhang(pairs, minor)
    lists = pairs.lists(kv_major) if starts is None else _compact_lists(pairs, starts, kv_major)
    return PassLists(lists, mask_bits, pairs.longest(kv_major), granularity)


def _divided_pairs(
    passes: tuple[Pass, ...], major: RowTiling, minor: RowTiling, kv_major: bool, subblocks: int
) -> tuple[BlockPairs, np.ndarray, np.ndarray | None]:
    """Returns sorted pairs of static masks, their mask bits, and the first pair of each list.

    The device divides each planned block of the minor side into ``subblocks``.
    """
    planned_minor = dataclasses.replace(minor, block=minor.block * subblocks, tile=minor.tile * subblocks)
    shape = (planned_minor.block, major.block) if kv_major else (major.block, planned_minor.block)
    pairs = _sorted_pairs(passes, shape, kv_major)
    starts = pairs.starts(kv_major)
    if subblocks == 1:
        return pairs, _static_bits(passes, major, minor, kv_major), starts
    mask_bits, states = _divided_bits(passes, major, planned_minor, kv_major, subblocks)
    pairs = pairs.cut_minor_blocks(subblocks, kv_major, states, minor.num_blocks)
    return pairs, mask_bits, None if starts is None else starts * subblocks


@bounded_cache()
def _divided_bits(
    passes: tuple[Pass, ...], major: RowTiling, planned_minor: RowTiling, kv_major: bool, subblocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns bits of divided mask tiles, those of a tile one after the other, and states for `cut_minor_blocks`."""
    mask_bits = _static_bits(passes, major, planned_minor, kv_major)
    # [1 + tiles, subblocks, rows, words]
    mask_bits = mask_bits.reshape(*mask_bits.shape[:2], subblocks, -1).swapaxes(1, 2)
    states = np.where((mask_bits == -1).all((2, 3)), FULL, np.where(mask_bits.any((2, 3)), PARTIAL, EMPTY))
    return np.concatenate([mask_bits[0, :1], mask_bits[1:].reshape(-1, *mask_bits.shape[2:])]), states


def _compact_lists(pairs: BlockPairs, starts: np.ndarray, kv_major: bool) -> BlockLists:
    """Builds the lists of sorted pairs on the device, by `compact_kernel`; ``starts`` are those of `BlockPairs.starts`.

    A list begins where its pairs began, so there are gaps between lists.
    """
    batches, heads, n = pairs.kind.shape
    minor, blocks = pairs.row if kv_major else pairs.column, pairs.blocks[kv_major]
    tile, active_rows_mask = pairs.tile, pairs.active_rows_mask
    arrays = starts, pairs.kind, minor, tile, starts if active_rows_mask is None else active_rows_mask
    entries = jax.ShapeDtypeStruct((batches * heads * n,), jnp.int32)
    outputs = [jax.ShapeDtypeStruct((batches, heads, blocks, 3), jnp.int32), entries, entries, entries]
    outputs[3] = outputs[3] if active_rows_mask is not None else jax.ShapeDtypeStruct((1,), jnp.int32)
    sizes = CompactSizes(n, heads, blocks, len(minor), len(tile), CHUNK, active_rows_mask is not None, FULL)
    arrays = [jnp.asarray(x, jnp.int32) for x in arrays]
    spans, block, tile, selected_by = bridge.call_triton(
        compact_kernel, (blocks, heads, batches), arrays, outputs, {"Z": sizes}, 1, 1
    )
    selected_by = None if active_rows_mask is None else selected_by
    return BlockLists(spans, block, tile, selected_by, pairs.blocks[not kv_major], pairs.group)


@bounded_cache()
def _static_lists(passes: tuple[Pass, ...], major: RowTiling, minor: RowTiling, kv_major: bool) -> PassLists:
    shape = (minor.block, major.block) if kv_major else (major.block, minor.block)
    lists = mask_overhang(_sorted_pairs(passes, shape, kv_major), minor).lists(kv_major)
    longest = int(lists.counts[..., 1].max(initial=0))
    return PassLists(lists, _static_bits(passes, major, minor, kv_major), longest)


@bounded_cache()
def _static_bits(passes: tuple[Pass, ...], major: RowTiling, minor: RowTiling, kv_major: bool) -> np.ndarray:
    shape = (minor.block, major.block) if kv_major else (major.block, minor.block)
    return pack_mask_bits(planned_block_pairs([one.mask for one in passes], shape, True)[1], major, minor, kv_major)


def mask_overhang(pairs: BlockPairs, minor: RowTiling) -> BlockPairs:
    """Returns the pairs, full ones as partial ones if tiles of the minor side reach beyond their block."""
    if minor.tiles_fill_block:
        return pairs
    xp: Any = np if isinstance(pairs.kind, np.ndarray) else jnp
    return dataclasses.replace(pairs, kind=xp.where(pairs.kind == FULL, PARTIAL, pairs.kind))


def pack_mask_bits(tiles: Any, major: RowTiling, minor: RowTiling, kv_major: bool) -> Any:
    """Packs mask tiles, bool [n, bq, bkv] of JAX or numpy's `pack_tiles`, into `PassLists.mask_bits`."""
    # Packed heads share a bit, so the bits of a block of queries fit a word.
    rows = 1 if major.gathers_rows else major.tiles_per_block * major.tile // major.pack
    words = minor.tiles_per_block * minor.tile if minor.pack == 1 else 32
    padding = [(0, rows - major.block), (0, words - minor.block)]
    if isinstance(tiles, np.ndarray):
        everything = np.ones((1, major.block, minor.block), bool)
        columns, chunks = (major if kv_major else minor).block, [everything]
        for start in range(0, len(tiles), 256):
            chunk = unpack_tiles(tiles[start : start + 256], columns)
            chunks.append(chunk.swapaxes(1, 2) if kv_major else chunk)
        words = [np.packbits(np.pad(x, [(0, 0), *padding]), axis=2, bitorder="little") for x in chunks]
        return np.concatenate(words).view(np.int32)
    tiles = tiles.swapaxes(1, 2) if kv_major else tiles
    tiles = jnp.concatenate([jnp.ones((1, *tiles.shape[1:]), bool), tiles])
    words = jnp.pad(tiles, [(0, 0), *padding]).reshape(len(tiles), rows, -1, 32)
    return jax.lax.bitcast_convert_type(
        (words.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32), jnp.int32
    )
