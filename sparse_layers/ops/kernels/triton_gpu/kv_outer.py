"""Selections of single queries by blocks of keys, for queries that hardly agree with their neighbours.

A tile of neighbouring queries walks over all blocks that any of them chose: with little agreement, many times what each
of them did. Here a program holds a block of keys instead and takes to it those that chose it, wherever they are. Each
choice, a query and one of its blocks, is a row of its own, and what its rows give is put together for each query: out
and lse by their softmax, dq as a sum; dk and dv are complete where they are made. Queries are taken in as many turns as
keep the rows' results as small as the operands.

The same idea: Yan et al. 2025, "FSA: An Alternative Efficient Implementation of Native Sparse Attention Kernel".
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.lists import DEAD, BlockPairs, StateTable, differs, selected_block_pairs
from ...planning.params import BwdParams
from ...planning.views import Axis, RowOrder
from ..call import Call, Operands, table_of
from ..gpu import hardware
from ..gpu.hardware import padded_size
from ..gpu.lists import Lists, Side, bits_of, only_whole
from .kv_outer_kernel import kv_outer_kernel
from .link import FULL_TILE, Gradients, Link, Rows, varying_like
from .settings import choose, shared_memory

KERNELS = "kv_outer", "dqkv"  # as their settings are called
# How many times what its queries chose a full tile has to walk over, for rows of choices to take less time: in the
# forward pass with blocks of 128 keys, and in the backward pass. Measured on an H100 and an H200.
LEAST_WASTE = {"forward": 2.0, "backward": 2.0}
# Tiles that are looked at to find that out.
SAMPLE = 256
# Bytes that the results of choices may take where the operands are smaller.
LEAST_ROOM = 1 << 28


def serves(call: Call, operands: Operands) -> bool:
    """Whether a call may be computed this way."""
    if operands.chosen is None or call.selection is None or not operands.chosen.shape[-1]:
        return False
    # What the user asks of kernels is meant for those that hold queries.
    if any(params.for_kernels for params in call.params):
        return False
    together = _together(call, operands)
    if call.selection[1] > 1 or together == 1 or operands.query.shape[1] < 2 * together:
        return False
    device, choices = hardware.local_device(), Choices(call, operands, 0, 1, ())
    assert isinstance(device, hardware.Device)
    settings = {x: choices.settings(x) for x in KERNELS}
    needed = max(shared_memory(x, y, *choices.sizes, device.capability) for x, y in settings.items())
    # The mask of a row of queries is read by words, for as many keys at a time.
    return needed <= device.shared_memory and min(x.major for x in settings.values()) >= 32


def pays(call: Call, operands: Operands, direction: str) -> jax.Array:
    """bool []: whether neighbours agree so little that this way takes less time, judged by some of them.

    Args:
      call: one that this way serves.
      operands: its arrays.
      direction: "forward" or "backward".
    """
    assert operands.chosen is not None and call.selection is not None
    together, columns = _together(call, operands), -(-operands.key.shape[1] // call.selection[0])
    batch, queries, lists, k = operands.chosen.shape
    tiles = queries // together
    ids = operands.chosen[:, : tiles * together].reshape(batch, tiles, together, lists, k)
    ids = jnp.moveaxis(ids, 3, 1).reshape(-1, together, k)
    # Spread evenly over all of them and over those of each sequence, whatever their numbers, by the golden ratio.
    at = np.arange(SAMPLE) * ((math.sqrt(5) - 1) / 2) % 1
    ids = ids[np.unique((at * len(ids)).astype(np.int64))]
    # Forward, a tile of few rows takes as long as a full one.
    filled = max(together, FULL_TILE // Link(call, operands, 0, 1, ()).pack) if direction == "forward" else together
    walked = _different(ids.reshape(-1, together * k), columns) * filled
    block, number = call.selection[0], finer(call, operands)
    if direction == "forward":  # a row takes as long however few its keys are
        longer = min(2, max(1, 128 * number / block))
    else:  # tiles of keys take as long, too, where blocks do not fill them
        longer = number * max(32, padded_size(block // number)) / block
    return walked > LEAST_WASTE[direction] * longer * _different(ids, columns)


def _different(ids: jax.Array, columns: int) -> jax.Array:
    """How many blocks there are in the rows of ids, one that is in several rows as often."""
    ids = jnp.sort(ids, axis=-1)
    return (differs(ids) & (ids >= 0) & (ids < columns)).sum(dtype=jnp.float32)  # there may be more than 2 ** 31


def finer(call: Call, operands: Operands) -> int:
    """Into how many a block is cut, so that a program can hold one."""
    assert call.selection is not None
    block, choices = call.selection[0], Choices(call, operands, 0, 1, ())
    most = min(choices.settings(kernel).major for kernel in KERNELS)
    return next(n for n in range(1, block) if block % (16 * n) == 0 and block // n <= most)


def _together(call: Call, operands: Operands) -> int:
    """Queries in a tile of the other way."""
    assert call.selection is not None
    return Link(call, operands, 0, 1, ()).shape("forward")[0]


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, Hv] in the dtype of the query, lse [B, T, N] in float32)."""

    def some(_, x):
        choices, _ = x
        out, lse = choices.attend()
        live = choices.live
        lse = jnp.where(live, lse, -jnp.inf)
        sinks = -jnp.inf if operands.sinks is None else operands.sinks.astype(jnp.float32)
        total = jnp.logaddexp(jax.nn.logsumexp(lse, axis=2), sinks)
        weights = jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total)[:, :, None])
        out = jnp.where(live[..., None], out.astype(jnp.float32), 0) * weights[..., None]
        return None, (out.sum(2).astype(operands.query.dtype), total)

    return _in_turns(some, call, operands, (), Choices)[1]


def backward(
    call: Call,
    choices_type: type["Choices"],
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
):
    """(dq, dk, dv) in the dtypes of query, key and value; lse and delta [B, T, N], dout [B, T, N, Hv]."""
    key, value = operands.key, operands.value

    def some(before, x):
        choices, (lse, delta, dout) = x
        gradients = Gradients(lse.swapaxes(1, 2), delta.swapaxes(1, 2), dout.astype(key.dtype))
        dq, dkv = choices.gradients(gradients, before)
        return dkv, (dq,)

    (dk, dv), (dq,) = _in_turns(some, call, operands, (lse, delta, dout), choices_type)
    return dq, dk.astype(key.dtype), dv.astype(value.dtype)


def _in_turns(
    some: Callable[..., Any],
    call: Call,
    operands: Operands,
    by_query: tuple[jax.Array, ...],
    choices_type: type["Choices"],
) -> Any:
    """`jax.lax.scan` of some(carry, (choices, by_query)) over turns of queries: the last carry, results [B, T, ...].

    The first carry is None where all are taken in one turn, and zeros [B, S, K, H] and [B, S, K, Hv] otherwise.
    """
    assert call.selection is not None and operands.chosen is not None
    (block, granularity), query = call.selection, operands.query
    number = finer(call, operands)
    # What is no block stays none: times `number`, a large number may become that of a block.
    ids, columns = operands.chosen[..., None], -(-operands.key.shape[1] // block)
    chosen = jnp.where((ids >= 0) & (ids < columns), ids * number + np.arange(number, dtype=np.int32), -1)
    chosen = chosen.reshape(*operands.chosen.shape[:3], -1)
    call = dataclasses.replace(call, selection=(block // number, granularity))
    table = table_of(operands, (1, block // number), call.masks, True)
    tokens = query.shape[1]
    # As much as the operands and out, which is like q. Half of it takes a tenth off what MoBA's passes over 131,072
    # tokens need in all, and adds 29 % to their time, for keys are read more often: 174 ms, not 135, on an H100 with
    # gradients by plain Triton.
    room = max(LEAST_ROOM, sum(x.nbytes for x in (query, operands.key, operands.value, query)))
    needed = choices_type(call, operands._replace(chosen=chosen), 0, 1, ()).bytes_needed
    turns = min(tokens, max(1, -(-needed // room)))
    # A number that divides the queries, for what is filled up is copied.
    turns = next((n for n in range(turns, 2 * turns) if tokens % n == 0), turns)
    length = -(-tokens // turns)

    def filled(x, fill=0):
        ends = [(0, 0), (0, turns * length - tokens)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, ends, constant_values=fill)

    q_segments = None if operands.segments is None else filled(operands.segments[0], -2)
    inputs = filled(query), filled(chosen, -1), q_segments, tuple(map(filled, by_query))

    def turn(carry, start):
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=1)
        query, chosen, segments, by_query = jax.tree.map(cut, inputs)
        own = operands._replace(query=query, chosen=chosen)
        if operands.segments is not None:
            own = own._replace(segments=(segments, operands.segments[1]))
        return some(carry, (choices_type(call, own, 0, 1, (), None, table, start), by_query))

    if turns == 1:
        return turn(None, jnp.int32(0))
    zeros = tuple(varying_like(query, jnp.zeros(x.shape, jnp.float32)) for x in (operands.key, operands.value))
    starts = np.arange(turns, dtype=np.int32) * length
    carry, found = jax.lax.scan(turn, zeros if by_query else None, starts)

    def joined(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), turns * length, *x.shape[3:])[:, :tokens]

    return carry, jax.tree.map(joined, found)


@dataclasses.dataclass(frozen=True)
class _ByChoice(RowOrder):
    """Rows of choices: of each token as many as it has.

    Attributes:
      each: choices of a token.
    """

    each: int = 1

    @property
    def natural(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return self.length * self.each

    @property
    def complete(self) -> bool:
        return False

    @property
    def axes(self):
        return (Axis(1, 0, self.length, 0, False, ((self.each, 0, 1),)),)


@dataclasses.dataclass(frozen=True, eq=False)
class Choices(Link):
    """The choices of some queries.

    Attributes:
      table: what the mask says of the blocks of single queries, and its tiles.
      start: the first query, in the table.
      ordered: whether the choices of a query are brought in order, for results that do not depend on theirs.
      always_pays: whether gradients are computed this way even where neighbours agree.
    """

    ordered: ClassVar[bool] = True
    always_pays: ClassVar[bool] = False
    table: tuple[StateTable, Any] | None = None
    start: Any = 0

    @property
    def each(self) -> int:
        """Choices of a query."""
        assert self.operands.chosen is not None
        return self.operands.chosen.shape[-1]

    @property
    def q_order(self) -> RowOrder:
        """The token of each choice."""
        return _ByChoice(self.operands.query.shape[1], each=self.each)

    @functools.cached_property
    def live(self) -> jax.Array:
        """bool [B, T, k, N]: which choices are there to be looked at."""
        kind, group = self._pairs.kind, self._pairs.group
        live = jnp.repeat(kind != DEAD, group, axis=1)
        return jnp.moveaxis(live.reshape(*live.shape[:2], self.q_order.length, -1), 1, -1)

    def attend(self) -> tuple[jax.Array, jax.Array]:
        """(out [B, T, k, N, Hv] in the dtype of the query, lse [B, T, k, N]) of each choice; undefined unless live."""
        prepared, rows = self._prepared("kv_outer"), self.q_order.rows
        outputs = (
            prepared.output((rows, self.heads, self.operands.value.shape[-1]), True),
            prepared.output((self.heads, rows)),
        )
        out, lse = prepared.run(kv_outer_kernel, self._segments, [], [], outputs, {}, {}, self.q_order)
        return self._by_token(out), self._by_token(lse.swapaxes(1, 2))

    @property
    def bytes_needed(self) -> int:
        """Of what choices give by themselves."""
        query, value = self.operands.query, self.operands.value
        return self.each * query.nbytes // query.shape[-1] * max(query.shape[-1], value.shape[-1])

    def gradients(self, gradients: Gradients, before: Any) -> tuple[jax.Array, Any]:
        """(dq [B, T, N, H] in the dtype of the query, (dk, dv)), the latter added to those ``before``."""
        before = None if before is None else Rows(self.kv_order, before)
        rows, dq = self._dkv(gradients, before, before is None, self.q_order.rows)
        dq = jnp.where(self.live[..., None], self._by_token(dq), 0).sum(2, dtype=jnp.float32)
        return dq.astype(self.operands.query.dtype), rows.arrays

    def _by_token(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], self.q_order.length, -1, *x.shape[2:])

    def settings(self, kernel: str):
        """The settings of a kernel, whatever the block."""
        assert self.call.selection is not None
        device = hardware.local_device()
        assert isinstance(device, hardware.Device)
        block = max(32, self.call.selection[0])
        return choose(kernel, *self.sizes, (block, 1 << 16), BwdParams(), device)

    def _prepared(self, kernel: str):
        assert self.call.selection is not None
        settings = self.settings("dqkv" if kernel == "dkv" else kernel)
        q = Side(self.q_order, 1, settings.minor, self.pack, gathered=True)
        kv = Side(self.kv_order, self.call.selection[0], settings.major)
        return self._launch(q, kv, kv, [(q, self.choice_lists(q, kv))], settings, None, kernel == "dkv")

    @functools.cached_property
    def _pairs(self) -> BlockPairs:
        operands = self.operands
        assert self.call.selection is not None and operands.chosen is not None and self.table is not None
        (block, granularity), heads = self.call.selection, operands.query.shape[2]
        table, start = self.table[0], self.start
        found = selected_block_pairs(operands.chosen, granularity, (1, block), table, heads, start, self.ordered)
        return found.with_segments(operands.segments, (RowOrder(operands.query.shape[1]), self.kv_order), (1, block))

    def choice_lists(self, q: Side, kv: Side) -> Lists:
        found = self._pairs
        assert self.table is not None
        rows = jax.lax.broadcasted_iota(jnp.int32, found.kind.shape, 2)
        found = dataclasses.replace(only_whole(found, kv), row=rows, blocks=(self.q_order.rows, found.blocks[1]))
        return Lists(found.lists(True), bits_of(self.table[1], q, kv, False), self.q_order.length)
