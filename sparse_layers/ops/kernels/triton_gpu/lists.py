"""Which blocks a kernel walks over: for each block of its major side the active ones of the other, and their masks.

The major side is that of a program's result: queries for out and dq, keys for dk and dv. A list holds its *free* blocks
first, of which every pair may attend, then the *masked* ones, each with a tile of bits; kernels run a loop over either
kind. Static masks are listed in numpy and cached, segment ids and run-time masks are looked at on the device.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....masks.algebra import FULL, PARTIAL
from ...planning.blocks import masked_tiles
from ...planning.mask_info import process_dynamic_mask
from ...planning.plan import Pass
from ...planning.views import RowOrder


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a pass: how its rows are cut.

    Attributes:
      order: token of each row.
      block: rows in a block of the lists.
      tile: rows in a tile of a kernel, a power of two; a block is walked in ``parts`` tiles.
    """

    order: RowOrder
    block: int
    tile: int

    @property
    def parts(self) -> int:
        """Tiles in a block."""
        return -(-self.block // self.tile)

    @property
    def blocks(self) -> int:
        """Blocks in a sequence."""
        return -(-self.order.rows // self.block)

    @property
    def exact(self) -> bool:
        """Whether tiles fill a block, so that no row of a tile has to be left out."""
        return self.block % self.tile == 0


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists of one pass: numpy arrays, or JAX arrays if they depend on run-time values.

    Attributes:
      entries: int32 [LB, LH, blocks, 2 + 2 * width]: for each major block the number of its free ones and of all, then
        (minor block, tile of bits) of each; batch entry b and head h read list (b % LB, h % LH).
      bits: int32 [tiles, rows, words], rows of the major side; bit c of word w is column 32 * w + c.
      most: an upper bound of the work of each major block, numpy [blocks].
      any_free: whether there may be free blocks.
      any_masked: whether there may be masked blocks.
      single: whether every minor block is in one list only, whatever the head.
    """

    entries: Any
    bits: Any
    most: np.ndarray
    any_free: bool
    any_masked: bool
    single: bool

    @property
    def counts(self) -> Any:
        """[LB, LH, blocks, 2], of the free blocks and of all."""
        return self.entries[..., :2]

    @property
    def index(self) -> Any:
        """[LB, LH, blocks, width], the minor blocks."""
        return self.entries[..., 2::2]

    @property
    def tile(self) -> Any:
        """[LB, LH, blocks, width], the tiles of bits."""
        return self.entries[..., 3::2]


def begin_order(most: np.ndarray, heads: int, few: int) -> np.ndarray | None:
    """int32 [heads * blocks]: in which order to begin head * blocks + block, so that no long one is left to the end.

    Heads come one after the other, for their keys stay in the cache then; only blocks with far more work than others
    come before all else, for every head, and so do all if there are ``few`` programs at most. None for the order of
    numbers, if all blocks take about as long.

    Args:
      most: upper bound of the work of each major block.
      heads: number of heads, each with as many blocks.
      few: up to how many programs the order matters more than the cache.
    """
    if most.max(initial=0) <= 1.5 * most.mean():
        return None
    by_work = np.argsort(-most, kind="stable")
    jobs = np.arange(heads) * len(most)
    first = len(most) if heads * len(most) <= few else np.count_nonzero(most > 4 * most.mean())
    parts = (by_work[:first, None] + jobs).ravel(), (jobs[:, None] + by_work[first:]).ravel()
    return np.concatenate(parts).astype(np.int32)


@functools.lru_cache(maxsize=64)
def static_lists(passes: tuple[Pass, ...], major: Side, minor: Side, dkv: bool) -> Lists:
    """The lists of passes that differ in their masks only: heads take them in turn."""
    # A mask of the user's may compute with jax.numpy: its answers are needed now, also inside a traced function.
    with jax.ensure_compile_time_eval():
        return _static_lists(passes, major, minor, dkv)


def _static_lists(passes: tuple[Pass, ...], major: Side, minor: Side, dkv: bool) -> Lists:
    distinct: dict[bytes, int] = {}
    _number(distinct, np.ones((1, major.block, minor.block), bool), major, minor)  # tile 0: everything
    found = [_listed(one, major, minor, dkv, distinct) for one in passes]
    width = max(state.shape[1] for state, *_ in found)
    state, index, tile = (
        np.stack([np.pad(array, [(0, 0), (0, width - array.shape[1])]) for array in arrays])[None]
        for arrays in zip(*found, strict=True)
    )
    bits = np.frombuffer(b"".join(distinct), np.int32).reshape(len(distinct), major.parts * major.tile, -1)
    lists = Lists(
        _arranged(state > 0, (state == FULL) & minor.exact, index, tile), bits, np.zeros(0), False, False, False
    )
    counts = lists.counts
    live = np.arange(width) < counts[..., 1:]
    once = [np.bincount(i[x], minlength=minor.blocks) == 1 for i, x in zip(lists.index[0], live[0], strict=True)]
    return dataclasses.replace(
        lists,
        most=counts[0, :, :, 1].max(0),
        any_free=bool(counts[..., 0].any()),
        any_masked=bool((counts[..., 1] > counts[..., 0]).any()),
        single=bool(np.all(once)),
    )


def _listed(one: Pass, major: Side, minor: Side, dkv: bool, distinct: dict[bytes, int]):
    """(state, minor block, tile) of the active blocks of each major block: int32 [blocks, width] each."""
    shape = (minor.block, major.block) if dkv else (major.block, minor.block)
    info = one.lists(shape, dkv)
    state, index = (np.asarray(x[0].T if dkv else x[0]).astype(np.int32) for x in (info.block_mask, info.data_next))
    tile = np.zeros_like(index)
    lines, slots = np.nonzero(state == PARTIAL)
    if info.partial_mask_blocks is not None:
        numbers = _number(distinct, info.partial_mask_blocks, major, minor)
        tile[lines, slots] = numbers[np.asarray(info.mask_next[0].T if dkv else info.mask_next[0])[lines, slots]]
    else:
        blocks = (index[lines, slots], lines) if dkv else (lines, index[lines, slots])
        tiles = masked_tiles(one.mask, *blocks, *shape)
        numbers = [_number(distinct, x.swapaxes(1, 2) if dkv else x, major, minor) for x in tiles]
        tile[lines, slots] = np.concatenate([np.zeros(0, np.int32), *numbers])
    return state, index, tile


def _number(distinct: dict[bytes, int], tiles: np.ndarray, major: Side, minor: Side) -> np.ndarray:
    """The numbers of bool tiles [n, rows, columns] among the distinct ones, to which new ones are added."""
    ends = [(0, side.parts * side.tile - side.block) for side in (major, minor)]
    bits = np.packbits(np.pad(tiles, [(0, 0), *ends]), axis=2, bitorder="little")
    return np.array([distinct.setdefault(x.tobytes(), len(distinct)) for x in bits], np.int32)


def _arranged(live: Any, free: Any, index: Any, tile: Any):
    """The entries of `Lists`: of the live blocks, the free ones first. Arguments are [.., blocks, width]."""
    xp: Any = np if isinstance(live, np.ndarray) else jnp
    free = free & live
    counts = [kind.sum(-1)[..., None] for kind in (free, live)]
    # Each entry's place by counting those of its kind before it: a sort would take a GPU several times as long.
    before = [xp.cumsum(kind, axis=-1) - 1 for kind in (free, live & ~free, ~live)]
    place = xp.where(free, before[0], xp.where(live, counts[0] + before[1], counts[1] + before[2]))
    pairs = xp.stack([xp.broadcast_to(x, live.shape) for x in (index, tile)], axis=-1).astype(np.int32)
    lines = np.ix_(*map(np.arange, live.shape))[:-1]
    if xp is np:
        sorted_pairs = np.empty_like(pairs)
        sorted_pairs[(*lines, place)] = pairs
    else:
        sorted_pairs = jnp.zeros_like(pairs).at[(*lines, place)].set(pairs, unique_indices=True)
    pairs = sorted_pairs.reshape(*live.shape[:-1], -1)
    return xp.concatenate([*counts, pairs], axis=-1).astype(np.int32)


def with_segments(lists: Lists, major: Side, minor: Side, major_ids: jax.Array, minor_ids: jax.Array) -> Lists:
    """Drops blocks whose segments cannot meet; a block stays free if it lies in one segment only. Ids: [B, tokens]."""
    a, b = (_extent(side, ids) for side, ids in ((major, major_ids), (minor, minor_ids)))
    a = [x[:, None, :, None] for x in a]
    b = [x[:, lists.index[0]] for x in b]  # static lists, which do not differ by batch entry
    place = np.arange(lists.index.shape[-1])
    live = (place < lists.counts[..., 1:]) & (a[0] <= b[2]) & (b[0] <= a[2])
    free = (place < lists.counts[..., :1]) & (a[1] == a[2]) & (b[1] == b[2]) & (a[1] == b[1])
    entries = _arranged(live, free, jnp.asarray(lists.index), jnp.asarray(lists.tile))
    return dataclasses.replace(lists, entries=entries, any_masked=True, single=False)


def _extent(side: Side, ids: jax.Array) -> list[jax.Array]:
    """For each block the smallest id but for padding, the smallest, and the largest: [B, blocks] each."""
    rows = side.order.gather(ids[..., None] + 1, side.blocks * side.block)[..., 0] - 1  # rows without a token: padding
    rows = rows.reshape(len(rows), side.blocks, side.block)
    return [jnp.where(rows >= 0, rows, np.iinfo(np.int32).max).min(-1), rows.min(-1), rows.max(-1)]


def run_time_lists(mask: jax.Array, major: Side, minor: Side, dkv: bool) -> Lists:
    """The lists of a run-time mask [C, T, S], natural order on both sides; every block has a tile of its own."""
    sides = (minor, major) if dkv else (major, minor)
    ends = [(0, -length % side.block) for length, side in zip(mask.shape[1:], sides, strict=True)]
    shape = sides[0].block, sides[1].block
    info, _ = process_dynamic_mask(jnp.pad(mask, [(0, 0), *ends]), shape, downcast_smem_data=False)
    state, tiles = info.block_mask, info.partial_mask_blocks
    if dkv:
        state, tiles = state.swapaxes(1, 2), tiles.transpose(0, 2, 1, 4, 3)
    index = np.arange(minor.blocks, dtype=np.int32)
    tile = np.arange(state.size, dtype=np.int32).reshape(state.shape)
    entries = _arranged(state > 0, (state == FULL) & minor.exact, index, tile)[None]
    most = np.full(major.blocks, minor.blocks)
    return Lists(entries, _packed(tiles, major, minor), most, minor.exact, True, False)


def _packed(tiles: jax.Array, major: Side, minor: Side) -> jax.Array:
    """Bool tiles [.., rows, columns] as bits [tiles, rows, words]."""
    tiles = tiles.reshape(-1, major.block, minor.block)
    ends = [(0, side.parts * side.tile - side.block) for side in (major, minor)]
    words = jnp.pad(tiles, [(0, 0), *ends]).reshape(len(tiles), major.parts * major.tile, -1, 32)
    return jax.lax.bitcast_convert_type(
        (words.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32), jnp.int32
    )
