"""Block lists and mask bits of a pass, as kernels read them, and the tiling of its rows.

The outer side is that of a program's result: queries for out and dq, keys for dk and dv (``transposed``).
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
    positions: RowOrder | None = None  # maps tokens to positions, by which a bias counts distances; None for tokens

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
        axes = () if self.positions is None else self.positions.axes
        first = 0 if self.positions is None else self.positions.offset - sum(x.phase * x.stride for x in axes)
        digits = tuple((rows, size, step * x.stride) for x in axes for rows, size, step in x.digits)
        return TilingConstants(
            self.order.rows,
            row_order_constants(self.order),
            self.block,
            self.tile,
            self.tiles_per_block,
            self.pack,
            self.gathers_rows,
            first,
            () if digits == ((1, 0, 1),) else digits,
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
    # int32 [1 + tiles, rows, words], by rows of the outer side. Bit c of word w is row 32 * w + c of the inner side.
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
        """True if the lists of each head partition the inner blocks: each is in one list."""
        if not self.block_lists.static:
            return False
        lists = self.block_lists
        by_head = (
            np.split(lists.inner_block, lists.spans[0, 1:, 0, 0]) if lists.spans.shape[1] > 1 else [lists.inner_block]
        )
        return all(bool((np.bincount(x, minlength=lists.num_inner_blocks) == 1).all()) for x in by_head)


@bounded_cache()
def _sorted_pairs(passes: tuple[Pass, ...], shape: tuple[int, int], transposed: bool) -> BlockPairs:
    """Returns the block pairs of static masks, sorted by the outer block."""
    return planned_block_pairs([one.mask for one in passes], shape, True)[0].sorted(transposed)


def build_pass_lists(
    call: Call,
    operands: Operands,
    passes: tuple[Pass, ...],
    outer: RowTiling,
    inner: RowTiling,
    transposed: bool,
    subblocks: int = 1,
    mark: int = 0,
) -> PassLists:
    """Builds the lists of a pass: at trace time, or on the device if selections, masks or segment ids are arrays.

    Heads take ``passes`` in turn, () for a run-time mask or a selection. With ``transposed``, lists are of key blocks,
    as the kernels of dk and dv read them. A planned inner block has several ``subblocks`` only where segment ids are
    all that is dynamic. ``mark`` is that of `BlockPairs.limit_by_ids`.
    """
    q, kv = (inner, outer) if transposed else (outer, inner)
    if operands.selection is not None or operands.mask is not None:
        pairs, tiles = run_time_blocks(operands, (q.block, kv.block), call.masks, True)
        mask_bits, starts = pack_mask_bits(tiles, outer, inner, transposed), pairs.starts(transposed)
    elif operands.segments is None:
        return _static_lists(passes, outer, inner, transposed)
    else:
        pairs, mask_bits, starts = _divided_pairs(passes, outer, inner, transposed, subblocks)
    orders, shape = (q.order, kv.order), (q.block, kv.block)
    pairs = pairs.limit_by_ids(operands.segments, operands.order_ids, orders, shape, mark)
    granularity = (
        0 if operands.selection is None or pairs.active_query_groups is None else operands.selection.granularity
    )
    pairs = mark_overhang_partial(pairs, inner)
    lists = pairs.lists(transposed) if starts is None else _compact_lists(pairs, starts, transposed)
    return PassLists(lists, mask_bits, pairs.longest(transposed), granularity)


def _divided_pairs(
    passes: tuple[Pass, ...], outer: RowTiling, inner: RowTiling, transposed: bool, subblocks: int
) -> tuple[BlockPairs, np.ndarray, np.ndarray | None]:
    """Returns sorted pairs of static masks, their mask bits, and the first pair of each list.

    The device divides each planned block of the inner side into ``subblocks``.
    """
    planned_inner = dataclasses.replace(inner, block=inner.block * subblocks, tile=inner.tile * subblocks)
    shape = (planned_inner.block, outer.block) if transposed else (outer.block, planned_inner.block)
    pairs = _sorted_pairs(passes, shape, transposed)
    starts = pairs.starts(transposed)
    if subblocks == 1:
        return pairs, _static_bits(passes, outer, inner, transposed), starts
    mask_bits, states = _divided_bits(passes, outer, planned_inner, transposed, subblocks)
    pairs = pairs.cut_inner_blocks(subblocks, transposed, states, inner.num_blocks)
    return pairs, mask_bits, None if starts is None else starts * subblocks


@bounded_cache()
def _divided_bits(
    passes: tuple[Pass, ...], outer: RowTiling, planned_inner: RowTiling, transposed: bool, subblocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns bits of divided mask tiles, those of a tile one after the other, and states for `cut_inner_blocks`."""
    mask_bits = _static_bits(passes, outer, planned_inner, transposed)
    # [1 + tiles, subblocks, rows, words]
    mask_bits = mask_bits.reshape(*mask_bits.shape[:2], subblocks, -1).swapaxes(1, 2)
    states = np.where((mask_bits == -1).all((2, 3)), FULL, np.where(mask_bits.any((2, 3)), PARTIAL, EMPTY))
    return np.concatenate([mask_bits[0, :1], mask_bits[1:].reshape(-1, *mask_bits.shape[2:])]), states


def _compact_lists(pairs: BlockPairs, starts: np.ndarray, transposed: bool) -> BlockLists:
    """Builds the lists of sorted pairs on the device, by `compact_kernel`; ``starts`` are those of `BlockPairs.starts`.

    A list begins where its pairs began, so there are gaps between lists.
    """
    batches, heads, n = pairs.state.shape
    inner, blocks = pairs.q_block if transposed else pairs.kv_block, pairs.num_blocks[transposed]
    tile, active_query_groups = pairs.mask_tile, pairs.active_query_groups
    arrays = starts, pairs.state, inner, tile, starts if active_query_groups is None else active_query_groups
    entries = jax.ShapeDtypeStruct((batches * heads * n,), jnp.int32)
    outputs = [jax.ShapeDtypeStruct((batches, heads, blocks, 3), jnp.int32), entries, entries, entries]
    outputs[3] = outputs[3] if active_query_groups is not None else jax.ShapeDtypeStruct((1,), jnp.int32)
    sizes = CompactSizes(n, heads, blocks, len(inner), len(tile), CHUNK, active_query_groups is not None, FULL)
    arrays = [jnp.asarray(x, jnp.int32) for x in arrays]
    spans, block, tile, out_active_query_groups = bridge.call_triton(
        compact_kernel, (blocks, heads, batches), arrays, outputs, {"Z": sizes}, 1, 1
    )
    active_query_groups = None if active_query_groups is None else out_active_query_groups
    return BlockLists(spans, block, tile, active_query_groups, pairs.num_blocks[not transposed], pairs.heads_per_list)


@bounded_cache()
def _static_lists(passes: tuple[Pass, ...], outer: RowTiling, inner: RowTiling, transposed: bool) -> PassLists:
    """Builds the lists of planned masks as numpy arrays, at trace time; cached."""
    shape = (inner.block, outer.block) if transposed else (outer.block, inner.block)
    lists = mark_overhang_partial(_sorted_pairs(passes, shape, transposed), inner).lists(transposed)
    longest = int(lists.counts[..., 1].max(initial=0))
    return PassLists(lists, _static_bits(passes, outer, inner, transposed), longest)


@bounded_cache()
def _static_bits(passes: tuple[Pass, ...], outer: RowTiling, inner: RowTiling, transposed: bool) -> np.ndarray:
    """Packs the mask tiles of planned masks as numpy arrays, at trace time; cached."""
    shape = (inner.block, outer.block) if transposed else (outer.block, inner.block)
    return pack_mask_bits(planned_block_pairs([one.mask for one in passes], shape, True)[1], outer, inner, transposed)


def mark_overhang_partial(pairs: BlockPairs, inner: RowTiling) -> BlockPairs:
    """Returns the pairs, full ones as partial ones if tiles of the inner side reach beyond their block."""
    if inner.tiles_fill_block:
        return pairs
    xp: Any = np if isinstance(pairs.state, np.ndarray) else jnp
    return dataclasses.replace(pairs, state=xp.where(pairs.state == FULL, PARTIAL, pairs.state))


def pack_mask_bits(tiles: Any, outer: RowTiling, inner: RowTiling, transposed: bool) -> Any:
    """Packs mask tiles, bool [n, bq, bkv] of JAX or numpy's `pack_tiles`, into `PassLists.mask_bits`."""
    # Packed heads share a bit, so the bits of a block of queries fit a word.
    rows = 1 if outer.gathers_rows else outer.tiles_per_block * outer.tile // outer.pack
    words = inner.tiles_per_block * inner.tile if inner.pack == 1 else 32
    padding = [(0, rows - outer.block), (0, words - inner.block)]
    if isinstance(tiles, np.ndarray):
        full_tile = np.ones((1, outer.block, inner.block), bool)
        columns, chunks = (outer if transposed else inner).block, [full_tile]
        for start in range(0, len(tiles), 256):
            chunk = unpack_tiles(tiles[start : start + 256], columns)
            chunks.append(chunk.swapaxes(1, 2) if transposed else chunk)
        words = [np.packbits(np.pad(x, [(0, 0), *padding]), axis=2, bitorder="little") for x in chunks]
        return np.concatenate(words).view(np.int32)
    tiles = tiles.swapaxes(1, 2) if transposed else tiles
    tiles = jnp.concatenate([jnp.ones((1, *tiles.shape[1:]), bool), tiles])
    words = jnp.pad(tiles, [(0, 0), *padding]).reshape(len(tiles), rows, -1, 32)
    bits = np.arange(32, dtype=np.uint32)[None, None, None]
    return jax.lax.bitcast_convert_type((words.astype(np.uint32) << bits).sum(-1, dtype=np.uint32), jnp.int32)
