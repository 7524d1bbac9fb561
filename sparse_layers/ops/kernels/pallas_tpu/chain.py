"""Chains of passes for all heads: the inputs of each kernel, and the merge of results."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.block_lists import MAX_QUERY_GROUPS
from ...planning.head_groups import HeadGroup, head_groups
from ...planning.plan import Pass, uses_mask_tiles
from ...planning.platforms import TUNING
from ...planning.row_orders import Reordered
from ...planning.selection import Selection
from ..call import Call
from ..numerics import base_2_sinks, merge_by_lse
from ..operands import Gradients, Operands
from ..pass_blocks import blocks_of_pass, head_groups_of, join_heads, row_orders
from ..transforms import vmap_as_batch
from .backward_kernel import backward_pass
from .forward_kernel import forward_pass
from .kernel_masks import pack_bits
from .launch import PassArrays, PassRun, by_rows, by_tokens, vector
from .schedule import Steps, TooLong

_TUNED = TUNING["pallas_tpu"]
# Rows of a block of queries, of which groups have selections of their own. By the compiler's estimates for v6e, a
# forward step of 1024 x 128 takes 1085 cycles, one of 128 x 128 takes 824: if neighbours agree, one step does the work
# of eight. If each group selects 16 of 128 blocks at random, 84 steps do the work of 128. Backward, at 1611 and 1020
# cycles, nothing is lost either.
_SELECTING_ROWS = 1024


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns out and lse, see `pallas_tpu.forward`."""
    function = functools.partial(_split_unless_it_fits, functools.partial(_forward, call), call)
    return vmap_as_batch(function, math.inf, operands)


def backward(call: Call, operands: Operands, *by_query: jax.Array) -> Gradients:
    """Returns gradients, see `pallas_tpu.backward`; ``by_query`` are lse, delta and dout."""
    function = functools.partial(_split_unless_it_fits, functools.partial(_backward, call), call)
    return vmap_as_batch(function, math.inf, operands, *by_query)


def _split_unless_it_fits(function: Callable[..., Any], call: Call, operands: Operands, *by_query: jax.Array) -> Any:
    """Calls the function once, or, if scalar memory cannot hold all lists, once for each batch entry or key head.

    Lists that the device builds differ by batch entry, those of a selection also by key head.
    """
    batch, selection = len(operands.query), operands.selection
    several_masks = len(call.chains if operands.mask is None else operands.mask) > 1
    several_lists = selection is not None and selection.ids.shape[2] > 1
    num_splits = operands.key.shape[2] if several_lists and not several_masks else 1
    try:
        return function(operands, *by_query)
    except TooLong:
        if batch * num_splits == 1:
            raise

    def slice_heads(x):  # [B, T, heads, ..] -> [B * num_splits, 1, T, heads / num_splits, ..]
        x = jnp.moveaxis(x.reshape(*x.shape[:2], num_splits, -1, *x.shape[3:]), 2, 1)
        return x.reshape(batch * num_splits, 1, *x.shape[2:])

    def join_slices(x):
        return jnp.moveaxis(x.reshape(batch, num_splits, *x.shape[2:]), 1, 2).reshape(
            batch, x.shape[2], -1, *x.shape[4:]
        )

    segments, sinks = operands.segments, operands.sinks
    slices = operands._replace(
        **{name: slice_heads(getattr(operands, name)) for name in ("query", "key", "value")},
        segments=None if segments is None else tuple(x[:, None].repeat(num_splits, axis=0) for x in segments),
        sinks=None if sinks is None else jnp.tile(sinks.reshape(num_splits, -1), (batch, 1)),
        selection=jax.tree.map(slice_heads, selection),
        mask=None,
    )

    def run_slice(arguments):
        slice_operands, *rest = arguments
        return function(slice_operands._replace(mask=operands.mask), *rest)

    return jax.tree.map(join_slices, jax.lax.map(run_slice, (slices, *map(slice_heads, by_query))))


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    dtype, operands = operands.query.dtype, _without_float16(operands)
    outs, lses = [], []
    for heads in _groups(call, operands):
        out, lse = None, None
        if operands.sinks is not None:
            lse = jnp.broadcast_to(heads.group.select(base_2_sinks(operands.sinks), 0), heads.query.shape[:3])
        for passes in heads.group.passes:
            if row_orders(operands, passes)[0].natural:
                final = passes is heads.group.passes[-1]
                out, lse = heads.forward(passes, operands.query.dtype if final else jnp.float32, out, lse)
            else:
                # A start state in the order of this pass would be one more copy; merging afterwards moves fewer bytes.
                result = heads.forward(passes, jnp.float32, None, None)
                if lse is not None:
                    result = merge_by_lse((jnp.zeros_like(result[0]) if out is None else out, lse), result)
                out, lse = result
        zeros = jnp.zeros_like(heads.query[..., 0], jnp.float32)
        if out is None:
            out = jnp.broadcast_to(zeros[..., None], (*zeros.shape, operands.value.shape[-1]))
        outs.append(out.astype(dtype))
        lses.append(zeros - jnp.inf if lse is None else lse)
    return join_heads(outs), join_heads(lses)


def _backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    dtype, operands = operands.query.dtype, _without_float16(operands)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # 2^(logit - inf) = 0: no gradients of a row without keys
    by_query = lse, delta, dout.astype(operands.query.dtype)
    dqs, dk, dv = [], *(jnp.zeros_like(x, jnp.float32) for x in (operands.key, operands.value))
    for heads in _groups(call, operands):
        dq = jnp.zeros_like(heads.query, jnp.float32)
        for passes in heads.group.passes:
            pass_dq, pass_dk, pass_dv = heads.backward(passes, *map(heads.group.select, by_query))
            dq, dk, dv = dq + pass_dq, dk + pass_dk, dv + pass_dv
        dqs.append(dq)
    return Gradients(join_heads(dqs).astype(dtype), dk.astype(dtype), dv.astype(dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class _Heads:
    """The query heads of a group, which share a chain. With a run-time mask they need not share a mask.

    Attributes:
      call: the call of the op.
      operands: its arrays.
      group: which heads, and their chain.
      query: [B, T, heads, H].
    """

    call: Call
    operands: Operands
    group: HeadGroup
    query: jax.Array

    def forward(self, passes: tuple[Pass, ...], out_dtype, out: jax.Array | None, lse: jax.Array | None):
        """Returns (out, lse) of one pass by token, starting from out and lse of earlier passes (None: none)."""
        pass_run, steps, arrays = self._prepare(passes, backward=False)
        q_order, bq = row_orders(self.operands, passes)[0], pass_run.shape[0]
        start = None if out is None else by_rows(q_order, out, bq), None if lse is None else vector(q_order, lse, bq)
        out, lse = forward_pass(pass_run, steps, arrays, out_dtype, *start)
        lse = lse.reshape(*lse.shape[:2], -1)
        return by_tokens(q_order, out), by_tokens(q_order, lse, -jnp.inf)

    def backward(self, passes: tuple[Pass, ...], lse: jax.Array, delta: jax.Array, dout: jax.Array):
        """Returns (dq, dk, dv) of one pass by token; dk and dv for all key heads."""
        q_order, kv_order = row_orders(self.operands, passes)
        pass_run, steps, arrays = self._prepare(passes, backward=True)
        bq = pass_run.shape[0]
        by_query = vector(q_order, lse, bq), vector(q_order, delta, bq), by_rows(q_order, dout, bq)
        # The kernel sums over the query heads of a key head if the group has them all and they share their list.
        members = pass_run.group // pass_run.head_step if pass_run.group % pass_run.head_step == 0 else 1
        if steps.words.shape[1] > 1 and steps.group % members:
            members = 1
        dq, dk, dv = backward_pass(pass_run, steps, arrays, *by_query, members)
        dk, dv = by_tokens(kv_order, dk), by_tokens(kv_order, dv)
        key, value = self.operands.key, self.operands.value
        if dk.shape[2] != key.shape[2] or pass_run.head_step > 1:
            kv_heads = pass_run.kv_head(np.arange(0, pass_run.heads, members))
            dk, dv = (
                jnp.zeros_like(like, jnp.float32).at[:, :, kv_heads].add(x) for x, like in ((dk, key), (dv, value))
            )
        return by_tokens(q_order, dq) * self.call.scale, dk, dv

    def _prepare(self, passes: tuple[Pass, ...], *, backward: bool) -> tuple[PassRun, Steps, PassArrays]:
        """Builds the arguments of a kernel, forward or backward."""
        operands, rows = self.operands, 0
        if operands.selection is not None:
            rows = _selecting_rows(self.call, operands.selection, backward)
            operands = operands._replace(query=self.query, selection=jax.tree.map(self._ids, operands.selection))
        blocks = blocks_of_pass(self.call, operands, self.group, passes, rows, _uses_mask_tiles, dkv=backward)
        (bq, bkv), pairs, tiles = blocks.shape, blocks.pairs, blocks.tiles
        ids = (None, None)
        if blocks.segments is not None:
            segments_by_order = zip((blocks.q_order, blocks.kv_order), blocks.segments, blocks.shape, strict=True)
            ids = [vector(order, x[..., None], block) for order, x, block in segments_by_order]
        steps = Steps.of(
            pairs.lists(kv_major=backward),
            tiles is not None,
            f"a pass over {pairs.blocks[0]} x {pairs.blocks[1]} blocks of {bq} x {bkv}",
        )
        if tiles is not None:
            tiles = jnp.asarray(pack_bits(tiles.swapaxes(1, 2) if backward else tiles))
        key, value = (by_rows(blocks.kv_order, x, bkv) for x in (operands.key, operands.value))
        arrays = PassArrays(by_rows(blocks.q_order, self.query, bq), key, value, tiles, *ids)
        limited = blocks.segments is not None or pairs.active_rows_mask is not None
        queries_per_key = self.operands.query.shape[2] // operands.key.shape[2]
        heads = self.query.shape[2], self.group.first, self.group.step, queries_per_key
        return PassRun(self.call, *heads, blocks.shape, blocks.granularity, blocks.rule, limited), steps, arrays

    def _ids(self, ids: jax.Array) -> jax.Array:
        """Returns the selections of these heads, int32 [B, Tq, G, k], where G divides the number of heads."""
        heads_per_list = self.operands.query.shape[2] // ids.shape[2]
        if ids.shape[2] == 1 or heads_per_list % self.group.step == 0:
            return ids
        return self.group.select(jnp.repeat(ids, heads_per_list, axis=2))


def _uses_mask_tiles(masks: Sequence[Reordered], shape: tuple[int, int]) -> bool:
    """True if the kernels read the partial blocks of a group's mask as tiles, by the tuning of this backend."""
    return uses_mask_tiles(masks[0], shape, _TUNED)


def _selecting_rows(call: Call, selection: Selection, backward: bool) -> int:
    """Returns the queries of a block with a selection: the requested number or `_SELECTING_ROWS`, in whole groups."""
    granularity, requested = selection.granularity, call.params[backward].q_blocksize or _SELECTING_ROWS
    return granularity * min(
        max(1, requested // granularity), MAX_QUERY_GROUPS, 1 << (selection.ids.shape[1] - 1).bit_length()
    )


def _groups(call: Call, operands: Operands) -> list[_Heads]:
    """Returns the heads by chain; without batch entries they have no passes."""
    groups = head_groups_of(call, operands, merge=False) if operands.query.size else head_groups([()], merge=False)
    return [_Heads(call, operands, group, group.select(operands.query)) for group in groups]


def _without_float16(operands: Operands) -> Operands:
    """Converts float16 operands to float32; TPUs multiply bfloat16 and float32 only."""
    if operands.query.dtype != jnp.float16:
        return operands
    wide = {name: getattr(operands, name).astype(jnp.float32) for name in ("query", "key", "value")}
    return operands._replace(**wide)
