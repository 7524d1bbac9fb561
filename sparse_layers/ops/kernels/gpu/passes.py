"""One pass of a chain for a group of heads, as an engine computes it, and the results that engines hand on."""

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
from ..distance_bias import has_bias
from ..operands import Operands, stacked_ids
from ..pass_blocks import row_orders
from .lists import PassLists, RowTiling, mark_overhang_partial, pack_mask_bits


class PassResults(NamedTuple):
    """Results of some passes: by token if ``order`` is natural, else by row of it.

    Forward: out [B, rows, heads, Hv] and lse [B, heads, rows]. Backward: gradients [B, rows, heads, size].
    """

    order: RowOrder
    arrays: tuple[jax.Array, ...]

    def by_token(self) -> tuple[jax.Array, ...]:
        """Returns the arrays by token: out and gradients [B, length, heads, size], lse [B, length, heads]."""
        arrays = [x.swapaxes(1, 2) if x.ndim == 3 else x for x in self.arrays]
        if self.order.natural:
            return tuple(arrays)
        return tuple(self.order.scatter(x, -jnp.inf if x.ndim == 3 else 0.0) for x in arrays)

    def add(self, addend: "PassResults") -> "PassResults":
        """Returns the sum of two gradients, by token."""
        sums = tuple(a + b for a, b in zip(self.by_token(), addend.by_token(), strict=True))
        return PassResults(RowOrder(self.order.length), sums)


class BackwardInputs(NamedTuple):
    """Arrays that backward kernels read by query: lse and delta [B, N, T] in float32, dout [B, T, N, Hv]."""

    lse: jax.Array
    delta: jax.Array
    dout: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class GroupPass:
    """One pass for the query heads first, first + step, ..."""

    call: Call
    operands: Operands  # its arrays, or their shapes; segment ids of padding are -2 for queries and -1 for keys
    first: int
    step: int  # from one head to the next
    # Head i takes pass i modulo their number; they differ in their masks only. () for a run-time mask, or a selection.
    passes: tuple[Pass, ...]
    # A second pass with the same query rows, which one kernel computes with this one; or None.
    fused_with: "GroupPass | None" = None

    def bind(self, operands: Operands) -> "GroupPass":
        """Returns the pass with arrays in place of their shapes."""
        second = None if self.fused_with is None else self.fused_with.bind(operands)
        return dataclasses.replace(self, operands=operands, fused_with=second)

    def fuse(self, second: "GroupPass") -> "GroupPass":
        """Returns this pass and a second one, for one kernel."""
        return dataclasses.replace(self, fused_with=second)

    def unfused(self) -> "list[GroupPass]":
        """Returns the passes that one kernel computes, one or two."""
        first = dataclasses.replace(self, fused_with=None)
        return [first] if self.fused_with is None else [first, self.fused_with]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(range(self.first, self.operands.query.shape[2], self.step))

    @property
    def num_ids(self) -> int:
        """Number of ids of a token: 0 for none, 1 for a segment id, 2 for an order id, too."""
        return (self.operands.segments is not None) + (self.operands.order_ids is not None)

    @property
    def ids(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Ids of queries and of keys as kernels read them, int32 [B, num_ids, tokens]; None each if there are none."""
        return stacked_ids(self.operands)

    @functools.cached_property
    def pack(self) -> int:
        """Query heads of a key head that share a tile: all of them if they have the same selections, else 1.

        A few queries select fewer blocks than many do, so tiles are filled with their heads (PackGQA).
        """
        selection = self.operands.selection
        if selection is None or has_bias(self.operands):  # a bias differs by head
            return 1
        heads, kv_heads, lists = (x.shape[2] for x in (self.operands.query, self.operands.key, selection.ids))
        masks = self.operands.mask if self.call.plan is None else self.call.plan.masks
        group, same_lists = heads // kv_heads, lists <= kv_heads and (masks is None or len(masks) == 1)
        small = selection.granularity <= 16 and group <= 64 and group & (group - 1) == 0
        return group if same_lists and small else 1

    @property
    def q_order(self) -> RowOrder:
        """Token of each query row."""
        return row_orders(self.operands, self.passes)[0]

    @property
    def kv_order(self) -> RowOrder:
        """Token of each key row."""
        return row_orders(self.operands, self.passes)[1]

    @property
    def bias_entry(self) -> int | None:
        """The only entry of a bias table that pairs of the pass get; None if they may get several."""
        return self.passes[0].bias_entry if self.passes else None

    @property
    def orders(self) -> str:
        """Both row orders in words."""
        return self.passes[0].order_text if self.passes else "natural order"

    def block_shape(self, *, transposed: bool) -> tuple[int, int]:
        """Returns (bq, bkv) of the planned lists, or of a run-time mask's; those of key blocks with ``transposed``."""
        sizes = self.passes[0] if self.passes else self.call
        return sizes.bwd_shape if transposed else sizes.fwd_shape

    def same_rows(self, second: "GroupPass") -> bool:
        """True if one kernel can compute both passes: query rows are the same, and the number of masks."""
        return self.q_order == second.q_order and len(self.passes) == len(second.passes)

    def heads_by_list(self, *, transposed: bool, pack: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the query heads of the pass, and bool [list heads, query heads]: those whose lists a program walks.

        A program for dk and dv walks the lists of all query heads of its key head.
        """
        heads = self.first + self.step * np.arange(0, self.heads, pack)
        if not transposed:
            return heads, np.eye(len(heads), dtype=bool)
        kv_heads = self.operands.key.shape[2]
        return heads, heads // (self.operands.query.shape[2] // kv_heads) == np.arange(kv_heads)[:, None]

    def count_steps(
        self, walked_lists: Sequence[tuple[RowTiling, PassLists]], *, transposed: bool, pack: int
    ) -> tuple[Any, Any]:
        """Counts the steps of each work tile [LB, work tiles], and those of earlier heads of it [LB, heads, blocks].

        LB is 1 or the batch, as in `BlockLists`. Both are numpy arrays if the lists are static. The second is None
        unless ``transposed``, where a work tile has all query heads of a key head.
        """
        heads, members = self.heads_by_list(transposed=transposed, pack=pack)
        steps: Any = 0
        for inner, lists in walked_lists:
            counts = lists.block_lists.counts[..., 1]
            steps = steps + inner.num_steps(counts[:, heads // lists.block_lists.heads_per_list % counts.shape[1]])
        if not transposed:
            return steps.reshape(len(steps), steps.shape[1] * steps.shape[2]), None
        sums = (steps[:, None] * members.astype(np.int32)[None, :, :, None]).sum(2)
        before = steps.cumsum(1) - steps
        first = members.argmax(1)[members.argmax(0)]  # of the query heads with the same work tile
        before = (before - before[:, first]).astype(np.int32)
        return sums.reshape(len(steps), sums.shape[1] * sums.shape[2]), before


@dataclasses.dataclass(frozen=True)
class _SelectionOrder(RowOrder):
    """Rows that are selections: ``per_query`` of each token."""

    per_query: int = 1  # selections of a token

    @property
    def natural(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return self.length * self.per_query

    @property
    def covers_all_tokens(self) -> bool:
        return False

    @property
    def axes(self):
        return (Axis(1, 0, self.length, 0, False, ((self.per_query, 0, 1),)),)


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedRows(GroupPass):
    """A pass whose rows are selections of single queries: a row is a query and one of the blocks that it selected."""

    table: tuple[StateTable, Any] | None = None  # states of the mask for blocks of single queries, and its mask tiles
    first_query: Any = 0  # row of the first query in the table
    sort_ids: bool = True  # True to sort the selections of a query, so that results do not depend on their order
    may_pack: bool = True  # True if heads may share a tile

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
        """Query heads that share a tile, see `GroupPass.pack`; 1 unless ``may_pack``."""
        return super().pack if self.may_pack else 1

    @property
    def q_order(self) -> RowOrder:
        """The token of each selection."""
        return _SelectionOrder(self.operands.query.shape[1], per_query=self.per_query)

    @property
    def block(self) -> int:
        """Keys of a selected block."""
        return self.selection.block

    @functools.cached_property
    def live(self) -> jax.Array:
        """Selections that attend to a block, bool [B, T, k, N]; the others are -1, masked or repeated."""
        state, group = self._pairs.state, self._pairs.heads_per_list
        live = jnp.repeat(state != EMPTY, group, axis=1)
        return jnp.moveaxis(live.reshape(*live.shape[:2], self.q_order.length, -1), 1, -1)

    def by_token(self, x: jax.Array) -> jax.Array:
        """Reshapes results by row [B, T * k, ...] to [B, T, k, ...]."""
        return x.reshape(x.shape[0], self.q_order.length, -1, *x.shape[2:])

    def lists_by_key(self, q: RowTiling, kv: RowTiling) -> PassLists:
        """Builds the list of each key block: the rows that selected it."""
        assert self.table is not None
        rows = jax.lax.broadcasted_iota(jnp.int32, self._pairs.state.shape, 2)
        pairs = mark_overhang_partial(self._pairs, kv)
        pairs = dataclasses.replace(pairs, q_block=rows, num_blocks=(self.q_order.rows, pairs.num_blocks[1]))
        return PassLists(pairs.lists(True), pack_mask_bits(self.table[1], q, kv, False), self.q_order.length)

    @functools.cached_property
    def _pairs(self) -> BlockPairs:
        assert self.table is not None
        operands, ids, block, granularity = self.operands, self.selection.ids, self.block, self.selection.granularity
        table, heads, first_query = self.table[0], operands.query.shape[2], self.first_query
        pairs = selected_block_pairs(ids, granularity, (1, block), table, heads, first_query, self.sort_ids)
        orders = RowOrder(operands.query.shape[1]), self.kv_order
        return pairs.limit_by_ids(operands.segments, operands.order_ids, orders, (1, block))


def varying_like(query: jax.Array, x: jax.Array) -> jax.Array:
    """Marks x as varying over the mesh axes of the query; `shard_map` cannot infer that for a kernel's results."""
    missing = tuple(jax.typeof(query).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x
