"""One pass of a chain for a group of heads, as an engine takes it, and what engines hand to each other."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....masks.states import EMPTY
from ...planning.block_lists import BlockPairs, StateTable, selected_block_pairs
from ...planning.plan import Pass
from ...planning.row_orders import Axis, RowOrder
from ...planning.selection import Selection
from ..call import Call
from ..operands import Operands
from ..pass_blocks import row_orders
from .lists import Lists, Side, bits_of, only_whole


class Rows(NamedTuple):
    """Results of some passes, by token if ``order`` is natural, else by row of it, where only its rows are defined.

    Forward: out [B, rows, heads, Hv] and lse [B, heads, rows]; backward: gradients [B, rows, heads, size].
    """

    order: RowOrder
    arrays: tuple[jax.Array, ...]

    def by_token(self) -> tuple[jax.Array, ...]:
        """The arrays by token: out and gradients [B, length, heads, size], lse [B, length, heads]."""
        arrays = [x.swapaxes(1, 2) if x.ndim == 3 else x for x in self.arrays]
        if self.order.natural:
            return tuple(arrays)
        return tuple(self.order.scatter(x, -jnp.inf if x.ndim == 3 else 0.0) for x in arrays)

    def plus(self, other: "Rows") -> "Rows":
        """The sum of two gradients, by token."""
        sums = tuple(a + b for a, b in zip(self.by_token(), other.by_token(), strict=True))
        return Rows(RowOrder(self.order.length), sums)


class BackwardInputs(NamedTuple):
    """Arrays that backward kernels read by query: lse and delta [B, N, T] in float32, dout [B, T, N, Hv]."""

    lse: jax.Array
    delta: jax.Array
    dout: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class GroupPass:
    """One pass for the query heads first, first + step, ...

    Attributes:
      call: the call of the op.
      operands: its arrays, or their shapes; segment ids of padding are -2 for queries and -1 for keys.
      first: the first head.
      step: from one head to the next.
      passes: the heads take them in turn; they differ in their masks only. () for a run-time mask, or a selection.
      fused_with: a second pass with the same query rows, which a kernel does together with this one.
    """

    call: Call
    operands: Operands
    first: int
    step: int
    passes: tuple[Pass, ...]
    fused_with: "GroupPass | None" = None

    def bind(self, operands: Operands) -> "GroupPass":
        """The same pass with other arrays of the same shapes."""
        second = None if self.fused_with is None else self.fused_with.bind(operands)
        return dataclasses.replace(self, operands=operands, fused_with=second)

    def fuse(self, other: "GroupPass") -> "GroupPass":
        """Both passes as one."""
        return dataclasses.replace(self, fused_with=other)

    def unfused(self) -> "list[GroupPass]":
        """The one or two passes."""
        alone = dataclasses.replace(self, fused_with=None)
        return [alone] if self.fused_with is None else [alone, self.fused_with]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(range(self.first, self.operands.query.shape[2], self.step))

    @functools.cached_property
    def pack(self) -> int:
        """How many query heads of a key head a program takes together: all of them if they select alike, else 1.

        What a few queries select together is less than what many do, so tiles are filled with their heads.
        """
        selection = self.operands.selection
        if selection is None:
            return 1
        heads, kv_heads, lists = (x.shape[2] for x in (self.operands.query, self.operands.key, selection.ids))
        masks = self.operands.mask if self.call.plan is None else self.call.plan.masks
        group, select_alike = heads // kv_heads, lists <= kv_heads and (masks is None or len(masks) == 1)
        small = selection.granularity <= 16 and group <= 64 and group & (group - 1) == 0
        return group if select_alike and small else 1

    @property
    def q_order(self) -> RowOrder:
        """Token of each query row."""
        return row_orders(self.operands, self.passes)[0]

    @property
    def kv_order(self) -> RowOrder:
        """Token of each key row."""
        return row_orders(self.operands, self.passes)[1]

    @property
    def orders(self) -> str:
        """Both row orders in words."""
        return self.passes[0].order_text if self.passes else "natural order"

    def block_shape(self, *, dkv: bool) -> tuple[int, int]:
        """(bq, bkv) of the plan's lists, or of those of a run-time mask."""
        sizes = self.passes[0] if self.passes else self.call
        return sizes.bwd_shape if dkv else sizes.fwd_shape

    def same_rows(self, other: "GroupPass") -> bool:
        """True if one kernel can do both: they have the same query rows, and lists for as many heads."""
        return self.q_order == other.q_order and len(self.passes) == len(other.passes)

    def heads_of_lists(self, *, dkv: bool, pack: int) -> tuple[np.ndarray, np.ndarray]:
        """The pass' query heads, and bool [lists, query heads]: which of them a program walks for.

        Programs for dk and dv walk for all query heads of a key head.
        """
        heads = self.first + self.step * np.arange(0, self.heads, pack)
        if not dkv:
            return heads, np.eye(len(heads), dtype=bool)
        kv_heads = self.operands.key.shape[2]
        return heads, heads // (self.operands.query.shape[2] // kv_heads) == np.arange(kv_heads)[:, None]

    def count_steps(self, walks: Sequence[tuple[Side, Lists]], *, dkv: bool, pack: int) -> tuple[Any, Any]:
        """Steps of each work tile [LB, work tiles], and those in it before each query head [LB, heads, blocks].

        They are numpy's if lists are known beforehand. The latter are None where a work tile is for one query head.

        Args:
          walks: the minor side and the lists of each pass that is walked.
          dkv: whether programs hold keys.
          pack: query heads that a program takes together.
        """
        heads, members = self.heads_of_lists(dkv=dkv, pack=pack)
        steps: Any = 0
        for minor, lists in walks:
            counts = lists.lists.counts[..., 1]
            steps = steps + minor.steps(counts[:, heads // lists.lists.group % counts.shape[1]])
        if not dkv:
            return steps.reshape(len(steps), steps.shape[1] * steps.shape[2]), None
        sums = (steps[:, None] * members.astype(np.int32)[None, :, :, None]).sum(2)
        before = steps.cumsum(1) - steps
        first = members.argmax(1)[members.argmax(0)]  # of the query heads with the same work tile
        before = (before - before[:, first]).astype(np.int32)
        return sums.reshape(len(steps), sums.shape[1] * sums.shape[2]), before


@dataclasses.dataclass(frozen=True)
class _BySelection(RowOrder):
    """Rows of selections: of each token as many as it has.

    Attributes:
      per_query: selections of a token.
    """

    per_query: int = 1

    @property
    def natural(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return self.length * self.per_query

    @property
    def complete(self) -> bool:
        return False

    @property
    def axes(self):
        return (Axis(1, 0, self.length, 0, False, ((self.per_query, 0, 1),)),)


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedRows(GroupPass):
    """The selections of some single queries: each of them, a query and one of its blocks, is a row of its own.

    Attributes:
      table: what the mask says of the blocks of single queries, and its tiles.
      start: the first query, in the table.
      ordered: whether the selections of a query are brought in order, for results that do not depend on theirs.
      packed: whether programs may take several heads together.
    """

    table: tuple[StateTable, Any] | None = None
    start: Any = 0
    ordered: bool = True
    packed: bool = True

    @property
    def selection(self) -> Selection:
        """The selection of the operands."""
        assert self.operands.selection is not None
        return self.operands.selection

    @property
    def per_query(self) -> int:
        """Selections of a query."""
        return self.selection.ids.shape[-1]

    @functools.cached_property
    def pack(self) -> int:
        """As in `GroupPass`, or 1."""
        return super().pack if self.packed else 1

    @property
    def q_order(self) -> RowOrder:
        """The token of each selection."""
        return _BySelection(self.operands.query.shape[1], per_query=self.per_query)

    @property
    def block(self) -> int:
        """Keys of a selected block."""
        return self.selection.block

    @functools.cached_property
    def live(self) -> jax.Array:
        """bool [B, T, k, N]: which selections are there to be looked at."""
        kind, group = self._pairs.kind, self._pairs.group
        live = jnp.repeat(kind != EMPTY, group, axis=1)
        return jnp.moveaxis(live.reshape(*live.shape[:2], self.q_order.length, -1), 1, -1)

    def by_token(self, x: jax.Array) -> jax.Array:
        """[B, T, k, ...] from results by row [B, T * k, ...]."""
        return x.reshape(x.shape[0], self.q_order.length, -1, *x.shape[2:])

    def lists_by_key(self, q: Side, kv: Side) -> Lists:
        """For each block of keys the rows that selected it."""
        assert self.table is not None
        rows = jax.lax.broadcasted_iota(jnp.int32, self._pairs.kind.shape, 2)
        pairs = only_whole(self._pairs, kv)
        pairs = dataclasses.replace(pairs, row=rows, blocks=(self.q_order.rows, pairs.blocks[1]))
        return Lists(pairs.lists(True), bits_of(self.table[1], q, kv, False), self.q_order.length)

    @functools.cached_property
    def _pairs(self) -> BlockPairs:
        assert self.table is not None
        operands, ids, block, granularity = self.operands, self.selection.ids, self.block, self.selection.granularity
        table, start = self.table[0], self.start
        pairs = selected_block_pairs(ids, granularity, (1, block), table, operands.query.shape[2], start, self.ordered)
        return pairs.with_segments(operands.segments, (RowOrder(operands.query.shape[1]), self.kv_order), (1, block))


def varying_like(query: jax.Array, x: jax.Array) -> jax.Array:
    """x, known to differ by device as the query does: inside `shard_map` JAX cannot know it of a kernel's results."""
    missing = tuple(jax.typeof(query).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x
