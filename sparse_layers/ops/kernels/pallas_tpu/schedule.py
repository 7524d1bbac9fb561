"""The schedule of a TPU kernel: block lists as one list of steps without holes, packed for scalar memory.

`BlockLists` have one list for each outer block. A TPU kernel's grid takes one flat list instead, as long as the number
of entries. Each step says which blocks to read, whether a mask applies, and whether it is the first or the last of its
outer block. The outer block is the block of the output: queries for the forward pass, keys for dk and dv.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ....masks.states import EMPTY, FULL, PARTIAL
from ...planning.block_lists import BlockLists

# The fourth kind of a step: masked, but without a mask tile. Segment ids or a selection limit it.
LIMITED = 3
# Scalar memory of a TPU core is 1 MiB on every generation; the compiler keeps some of it.
SMEM_BYTES = (1 << 20) - (24 << 10)
FLAG_BITS = 4


class Step(NamedTuple):
    """One step of a schedule, as scalars."""

    outer: Any  # block of the output
    inner: Any  # block of the other operands
    state: Any  # EMPTY, PARTIAL, FULL or LIMITED
    is_first: Any  # 1 in the first step of the outer block, else 0
    is_last: Any  # 1 in its last step, else 0


class ScalarMemoryExceeded(ValueError):
    """The error of step lists that do not fit scalar memory."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """The step lists of all batch entries and heads of one launch, padded to the longest."""

    # int32 [LB, LH, steps]; batch entry b and head h have list (b, h // group % LH). Each word holds the fields of a
    # `Step`.
    words: Any
    tiles: Any  # int32 of the same shape, the mask tile of a step; None if there are no tiles
    # int32 of the same shape, the groups of queries that selected the key block, bit by bit; or None.
    active_query_groups: Any
    count: Any  # number of steps of the longest list: the grid's size, a traced scalar for lists made at run time
    inner_bits: int  # the bits of a word that hold the inner block
    heads_per_list: int  # the number of neighbouring heads that share a list

    @staticmethod
    def of(lists: BlockLists, has_tiles: bool, name: str) -> "Steps":
        """Returns the steps of block lists, numpy arrays for static lists; errors ``name`` the pass."""
        batches, heads, blocks, _ = lists.spans.shape
        inner_bits = max(1, (lists.num_inner_blocks - 1).bit_length())
        if (blocks - 1).bit_length() + inner_bits + FLAG_BITS > 32:
            raise ValueError(
                f"pallas_tpu: {name} has {blocks} x {lists.num_inner_blocks} blocks, more than a 32-bit word can "
                "number; choose larger q_blocksize and kv_blocksize"
            )
        xp: Any = np if lists.static else jnp
        # An outer block without entries has one empty step, for its output has to be written.
        counts = lists.counts[..., 1]
        ends = xp.cumsum(xp.maximum(counts, 1), axis=-1, dtype=np.int32)
        starts, total = xp.pad(ends[..., :-1], [(0, 0), (0, 0), (1, 0)]), ends[..., -1:]
        if lists.static:
            count = steps = int(total.max())
        else:
            entries = len(lists.inner_block) // (batches * heads)
            count, steps = total.max(), min(entries + blocks, blocks * lists.num_inner_blocks)
        fields = 1 + has_tiles + (lists.active_query_groups is not None)
        if (size := 4 * batches * heads * steps * fields) > SMEM_BYTES:
            raise ScalarMemoryExceeded(
                f"pallas_tpu: {name} has {batches * heads} lists of {steps} steps, which take {size} bytes of scalar "
                f"memory, and {SMEM_BYTES} are there; choose larger q_blocksize and kv_blocksize"
            )
        position = np.arange(steps, dtype=np.int32)[None, None]
        outer = _outer_of_steps(starts, steps)
        # Shorter lists end in empty steps that repeat the last blocks, so nothing is loaded for them.
        live, step = position < total, xp.minimum(position, total - 1)

        def of_outer(x):
            return xp.take_along_axis(x, outer, axis=-1)

        step_in_outer = step - of_outer(starts)
        entry = xp.minimum(of_outer(lists.spans[..., 0]) + step_in_outer, len(lists.inner_block))

        def of_entry(x):
            return xp.append(x, np.zeros(1, np.int32))[entry]

        tile, empty = of_entry(lists.mask_tile), of_outer(counts) == 0
        state = xp.where(step_in_outer < of_outer(lists.counts[..., 0]), FULL, xp.where(tile < 0, LIMITED, PARTIAL))
        state = xp.where(live & ~empty, state, EMPTY)
        ends_of_outer = 0, of_outer(ends - starts) - 1
        is_first, is_last = ((live & (step_in_outer == x)).astype(np.int32) for x in ends_of_outer)
        flags = state + 4 * is_first + 8 * is_last
        inner = xp.where(empty, 0, of_entry(lists.inner_block))
        words = (((outer << inner_bits) | inner) << FLAG_BITS) | flags
        tiles = None
        if has_tiles:  # steps without a tile keep the last one, so nothing is loaded for them, too
            cummax = np.maximum.accumulate if lists.static else lax.cummax
            last_with_tile = cummax(xp.where(state == PARTIAL, position, 0), axis=2)
            tiles = xp.maximum(xp.take_along_axis(tile, last_with_tile, axis=-1), 0)
        active_query_groups = None if lists.active_query_groups is None else of_entry(lists.active_query_groups)
        return Steps(words.astype(np.int32), tiles, active_query_groups, count, inner_bits, lists.heads_per_list)

    @property
    def scalars(self) -> list[Any]:
        """The scalars that the kernel prefetches."""
        fields = self.words, self.tiles, self.active_query_groups
        return [jnp.asarray(x, np.int32).reshape(-1) for x in fields if x is not None]

    def read(self, scalars: Any, batch: Any, head: Any, step: Any) -> Step:
        """Reads one step, in an index map or in a kernel; ``scalars`` are the references to `scalars`."""
        word = scalars[0][self._index(batch, head, step)]
        inner = (word >> FLAG_BITS) & ((1 << self.inner_bits) - 1)
        outer = (word >> (FLAG_BITS + self.inner_bits)) & ((1 << (32 - FLAG_BITS - self.inner_bits)) - 1)
        return Step(outer, inner, word & 3, (word >> 2) & 1, (word >> 3) & 1)

    def mask_tile(self, scalars: Any, batch: Any, head: Any, step: Any) -> Any:
        """Reads the number of the mask tile of one step; None if there are no tiles."""
        return None if self.tiles is None else scalars[1][self._index(batch, head, step)]

    def read_active_query_groups(self, scalars: Any, batch: Any, head: Any, step: Any) -> Any:
        """Reads, bit by bit, the groups of queries that selected the key block; None if a block selects as one."""
        if self.active_query_groups is None:
            return None
        return scalars[1 if self.tiles is None else 2][self._index(batch, head, step)]

    def _index(self, batch, head, step):
        batches, heads, steps = self.words.shape
        row = (batch if batches > 1 else 0) * heads + (head // self.heads_per_list % heads if heads > 1 else 0)
        return row * steps + step


def _outer_of_steps(starts: Any, steps: int) -> Any:
    """Returns the outer block of each step [LB, LH, steps] from the first steps of the outer blocks [LB, LH, n]."""
    lists = np.indices(starts.shape, sparse=True)[:2]
    if isinstance(starts, np.ndarray):
        marks = np.zeros((*starts.shape[:2], steps), np.int32)
        marks[(*lists, starts)] = 1
        return marks.cumsum(-1, dtype=np.int32) - 1
    marks = jnp.zeros((*starts.shape[:2], steps), jnp.int32).at[(*lists, starts)].set(1)
    return jnp.cumsum(marks, axis=-1) - 1
