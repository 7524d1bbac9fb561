"""The blocks that a kernel visits, one after the other: a list of steps without holes, packed for scalar memory.

A `MaskInfo` has one list a row, each as wide as the widest. A TPU kernel's grid takes one flat list instead: its length
is the number of active blocks, and each step says which blocks to read, whether a mask applies, and whether it is the
first or the last of its row. All kernels number blocks as (major, minor): the major one is the block of the output,
queries for the forward pass and dq, keys for dk and dv.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....masks.algebra import FULL, PARTIAL
from ...planning.mask_info import MaskInfo

# What a step computes. Without segment ids there are only the first three, which are the states of a `MaskInfo`.
DEAD, MASKED, FREE, SEGMENTED = 0, PARTIAL, FULL, 3
# Scalar memory of a TPU core is 1 MiB on every generation; the compiler keeps some of it.
SMEM_BYTES = (1 << 20) - (24 << 10)
FLAG_BITS = 4


class Step(NamedTuple):
    """One step of a list, as scalars."""

    major: Any  # block of the output
    minor: Any  # block of the other side
    kind: Any  # DEAD, MASKED, FREE or SEGMENTED
    first: Any  # whether it is the first of its major block, 0 or 1
    last: Any  # whether it is the last


@dataclasses.dataclass(frozen=True)
class Steps:
    """Step lists for all batch entries and heads of one launch.

    Attributes:
      words: int32 [B or 1, C or 1, steps]; batch entry b and head h read list (b, h % C). Each word holds the fields of
        a `Step`.
      tiles: int32 of the same shape, the mask tile of a step; None if there are no tiles.
      count: number of steps of the longest list: the grid's size, a traced scalar for lists made at run time.
      minor_bits: how many bits of a word hold the minor block.
    """

    words: Any
    tiles: Any
    count: Any
    minor_bits: int

    @property
    def scalars(self) -> list[Any]:
        """What the kernel prefetches."""
        return [jnp.asarray(x, np.int32).reshape(-1) for x in (self.words, self.tiles) if x is not None]

    def at(self, scalars: Any, batch: Any, head: Any, step: Any) -> Step:
        """Reads one step, in an index map or in a kernel; ``scalars`` are the references to `scalars`."""
        word = scalars[0][self._index(batch, head, step)]
        minor = (word >> FLAG_BITS) & ((1 << self.minor_bits) - 1)
        major = (word >> (FLAG_BITS + self.minor_bits)) & ((1 << (32 - FLAG_BITS - self.minor_bits)) - 1)
        return Step(major, minor, word & 3, (word >> 2) & 1, (word >> 3) & 1)

    def tile(self, scalars: Any, batch: Any, head: Any, step: Any) -> Any:
        """The mask tile of one step."""
        return scalars[1][self._index(batch, head, step)]

    def _index(self, batch, head, step):
        batches, classes, steps = self.words.shape
        row = (batch if batches > 1 else 0) * classes + (head % classes if classes > 1 else 0)
        return row * steps + step


class Candidates(NamedTuple):
    """Blocks that may be active, by major block; every major block has at least one."""

    major: np.ndarray  # int32 [n], ascending
    minor: np.ndarray  # int32 [n]
    kind: Any  # [.., n] state of a `MaskInfo`; also 0 for a major block without active blocks
    tile: Any  # [.., n], or None

    @staticmethod
    def of(info: MaskInfo, dkv: bool, num_major: int) -> "Candidates":
        """The active blocks of a static list."""
        state = info.block_mask[0].T if dkv else info.block_mask[0]
        major, slot = np.nonzero(state)
        missing = np.setdiff1d(np.arange(num_major), major)
        order = np.argsort(np.concatenate([major, missing]), kind="stable")

        def listed(array):
            found = (array[0].T if dkv else array[0])[major, slot]
            return np.concatenate([found, np.zeros_like(missing)]).astype(np.int32)[order]

        tile = None if info.mask_next is None else listed(info.mask_next)
        rows = np.concatenate([major, missing]).astype(np.int32)[order]
        return Candidates(rows, listed(info.data_next), listed(info.block_mask), tile)

    @staticmethod
    def every(state: jax.Array, tile: jax.Array, dkv: bool) -> "Candidates":
        """All blocks of a mask known at run time: state and tile are [C, q blocks, kv blocks]."""
        state, tile = (x.swapaxes(1, 2) if dkv else x for x in (state, tile))
        major, minor = (x.ravel().astype(np.int32) for x in np.indices(state.shape[1:]))
        return Candidates(major, minor, *(x.reshape(1, len(state), -1) for x in (state, tile)))

    def with_segments(self, major_ids: jax.Array, minor_ids: jax.Array) -> "Candidates":
        """Drops blocks whose segments cannot meet, and says where segments need no mask; ids are [B, blocks, rows]."""
        a, b = (
            [x[:, None, block] for x in (_smallest(ids), ids.min(-1), ids.max(-1))]
            for ids, block in ((major_ids, self.major), (minor_ids, self.minor))
        )
        meet = (a[0] <= b[2]) & (b[0] <= a[2])
        same = (a[1] == a[2]) & (b[1] == b[2]) & (a[1] == b[1])  # one segment, and no padding in it
        kind = jnp.where((self.kind == FREE) & ~same, SEGMENTED, self.kind)
        return self._replace(kind=jnp.where(meet, kind, DEAD))

    def steps(self, num_minor: int, what: str) -> Steps:
        """Packs the live blocks; ``what`` names the list in the error.

        Raises:
          ValueError: the lists do not fit a word or scalar memory.
        """
        minor_bits = max(1, (num_minor - 1).bit_length())
        if (int(self.major[-1])).bit_length() + minor_bits + FLAG_BITS > 32:
            raise ValueError(
                f"pallas_tpu: {what} has {int(self.major[-1]) + 1} x {num_minor} blocks, more than a 32-bit word can "
                "number; choose larger q_blocksize and kv_blocksize"
            )
        xp: Any = np if isinstance(self.kind, np.ndarray) else jnp
        kind, n = xp.asarray(self.kind).reshape(*(self.kind.shape[:-1] or (1, 1)), -1), len(self.major)
        starts = np.flatnonzero(np.diff(self.major, prepend=-1))
        ends = np.append(starts[1:], n)
        before = xp.pad(xp.cumsum(kind > 0, axis=-1), [(0, 0), (0, 0), (1, 0)])
        # A major block without live ones keeps its first step: its output has to be written.
        lone = np.zeros(n, bool)
        lone[starts] = True
        nothing = (before[..., ends] == before[..., starts])[..., np.cumsum(lone) - 1]
        keep = (kind > 0) | (nothing & lone)
        counts = keep.sum(-1)
        count = counts.max()
        if xp is np:
            count = int(count)
        order = xp.argsort(~keep, axis=-1, stable=True)[..., : n if xp is jnp else count]
        # Shorter lists end in dead steps that repeat the last blocks, so nothing is loaded for them.
        place = np.arange(order.shape[-1])
        order = xp.take_along_axis(order, xp.minimum(place, counts[..., None] - 1), axis=-1)
        live = place < counts[..., None]
        major, minor = (xp.asarray(x)[order] for x in (self.major, self.minor))
        other = xp.pad(major, [(0, 0), (0, 0), (1, 1)], constant_values=-1)
        first, last = major != other[..., :-2], (major != other[..., 2:]) | (place == counts[..., None] - 1)
        kind = xp.where(live, xp.take_along_axis(kind, order, axis=-1), DEAD)
        flags = kind + 4 * first.astype(np.int32) + 8 * (last & live).astype(np.int32)
        words = (((major.astype(np.uint32) << minor_bits) | minor.astype(np.uint32)) << FLAG_BITS) | flags.astype(
            np.uint32
        )
        tiles = None
        if self.tile is not None:
            tiles = xp.take_along_axis(xp.broadcast_to(self.tile, keep.shape), order, axis=-1)
        steps = Steps(words.astype(np.int32), tiles, count, minor_bits)
        size = 4 * sum(math.prod(x.shape) for x in (words, tiles) if x is not None)
        if size > SMEM_BYTES:
            raise ValueError(
                f"pallas_tpu: {what} has {math.prod(words.shape[:2])} lists of {words.shape[2]} steps, which take "
                f"{size} bytes of scalar memory, and {SMEM_BYTES} are there; choose larger q_blocksize and kv_blocksize"
            )
        return steps


def _smallest(ids: jax.Array) -> jax.Array:
    """Smallest segment id of each block, leaving out padding; the largest int32 where there is nothing else."""
    return jnp.where(ids >= 0, ids, np.iinfo(np.int32).max).min(-1)
