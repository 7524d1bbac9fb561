"""The chain of passes of each head group: the operands of its kernels, and the merge of their results by lse."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.block_lists import MAX_QUERY_GROUPS
from ...planning.costs import uses_mask_tiles
from ...planning.head_groups import HeadGroup, head_groups
from ...planning.plan import Pass
from ...planning.platforms import TUNING
from ...planning.row_orders import Reordered
from ...planning.selection import Selection
from ..call import Call
from ..numerics import limit_base_2, merge_by_lse
from ..operands import Gradients, Operands, stacked_ids
from ..pass_blocks import PassBlocks, blocks_of_pass, head_groups_of, join_heads, row_orders
from ..transforms import vmap_as_batch
from .backward_kernel import backward_pass
from .bias_passes import distance_step, planned
from .biases import PassBias, PassTable
from .forward_kernel import forward_pass
from .kernel_masks import LANES, as_bits
from .launch import PassArrays, PassConfig, bias_unit, to_rows, to_tokens, vector
from .schedule import ScalarMemoryExceeded, Steps

_TUNED = TUNING["pallas_tpu"]
# Queries of a block with a selection. By the compiler's estimates for v6e, a forward step of 1024 x 128 takes 1085
# cycles, one of 128 x 128 takes 824: where neighbours agree, one step replaces eight. Where each group of 128 queries
# selects 16 of 128 blocks on its own, 84 steps replace 128. The backward pass, at 1611 and 1020, loses nothing either.
_SELECTING_ROWS = 1024
# Vector memory for the windows of query heads that are summed inside the kernel; a third of what launches ask for.
_BIAS_BYTES = 16 << 20


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes `pallas_tpu.forward`."""
    function = functools.partial(_split_to_fit, functools.partial(_forward, call), call)
    return vmap_as_batch(function, math.inf, operands)


def backward(call: Call, operands: Operands, *by_query: jax.Array) -> Gradients:
    """Computes `pallas_tpu.backward`; ``by_query`` are lse, delta and dout."""
    function = functools.partial(_split_to_fit, functools.partial(_backward, call), call)
    return vmap_as_batch(function, math.inf, operands, *by_query)


def _split_to_fit(function: Callable[..., Any], call: Call, operands: Operands, *by_query: jax.Array) -> Any:
    """Computes function(operands, *by_query), one batch entry and key head at a time if lists exceed scalar memory.

    Lists made at run time differ by batch entry, those of a selection also by key head.
    """
    batch, selection = len(operands.query), operands.selection
    several_masks = len(call.chains if operands.mask is None else operands.mask) > 1
    splits = operands.key.shape[2] if selection is not None and selection.ids.shape[2] > 1 and not several_masks else 1
    try:
        return function(operands, *by_query)
    except ScalarMemoryExceeded:
        if batch * splits == 1:
            raise

    def split(x):  # [B, T, heads, ..] -> [B * splits, 1, T, heads / splits, ..]
        x = jnp.moveaxis(x.reshape(*x.shape[:2], splits, -1, *x.shape[3:]), 2, 1)
        return x.reshape(batch * splits, 1, *x.shape[2:])

    def merge(x):
        if x.ndim == 3:  # the gradient of a table, [B * splits, heads / splits, L]
            return x.reshape(batch, -1, x.shape[-1]).sum(0)
        return jnp.moveaxis(x.reshape(batch, splits, *x.shape[2:]), 1, 2).reshape(batch, x.shape[2], -1, *x.shape[4:])

    def split_heads(x):  # [heads, ..] -> [B * splits, heads / splits, ..]
        return None if x is None else jnp.tile(x.reshape(splits, -1, *x.shape[1:]), (batch, *[1] * x.ndim))

    by_token = operands.segments, operands.order_ids
    segments, order_ids = jax.tree.map(lambda x: x[:, None].repeat(splits, axis=0), by_token)
    split_operands = operands._replace(
        **{name: split(getattr(operands, name)) for name in ("query", "key", "value")},
        segments=segments,
        order_ids=order_ids,
        **{name: split_heads(getattr(operands, name)) for name in ("sinks", "bias_table", "bias_slopes")},
        selection=jax.tree.map(split, selection),
        mask=None,
    )

    def compute_split(arguments):
        operands_of_split, *by_query = arguments
        return function(operands_of_split._replace(mask=operands.mask), *by_query)  # every split has the same mask

    return jax.tree.map(merge, jax.lax.map(compute_split, (split_operands, *map(split, by_query))))


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    dtype, operands = operands.query.dtype, _no_float16(operands)
    outs, lses = [], []
    for heads in _heads_by_group(call, operands):
        out, lse = None, None
        if operands.sinks is not None:
            lse = jnp.broadcast_to(heads.group.select(limit_base_2(operands.sinks), 0), heads.query.shape[:3])
        for passes in heads.group.passes:
            if row_orders(operands, passes)[0].natural:
                is_last = passes is heads.group.passes[-1]
                out, lse = heads.forward(passes, operands.query.dtype if is_last else jnp.float32, out, lse)
            else:
                # A start state in the order of this pass would be one more copy; merging afterwards moves fewer bytes.
                update = heads.forward(passes, jnp.float32, None, None)
                if lse is not None:
                    update = merge_by_lse((jnp.zeros_like(update[0]) if out is None else out, lse), update)
                out, lse = update
        zeros = jnp.zeros_like(heads.query[..., 0], jnp.float32)
        if out is None:
            out = jnp.broadcast_to(zeros[..., None], (*zeros.shape, operands.value.shape[-1]))
        outs.append(out.astype(dtype))
        lses.append(zeros - jnp.inf if lse is None else lse)
    return join_heads(outs), join_heads(lses)


def _backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    dtype, operands = operands.query.dtype, _no_float16(operands)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # p = 2^(logit - inf) = 0 in rows without keys
    by_query = lse, delta, dout.astype(operands.query.dtype)
    dqs, dtables, dk, dv = [], [], *(jnp.zeros_like(x, jnp.float32) for x in (operands.key, operands.value))
    for heads in _heads_by_group(call, operands):
        dq, dtable = jnp.zeros_like(heads.query, jnp.float32), jax.tree.map(jnp.zeros_like, heads.bias_table)
        for passes in heads.group.passes:
            pass_dq, pass_dk, pass_dv, pass_dtable = heads.backward(passes, *map(heads.group.select, by_query))
            dq, dk, dv = dq + pass_dq, dk + pass_dk, dv + pass_dv
            dtable = jax.tree.map(jnp.add, dtable, pass_dtable)
        dqs.append(dq)
        dtables.append(dtable)
    dtable = None
    if operands.bias_table is not None:
        dtable = jnp.stack(dtables, axis=1).reshape(operands.bias_table.shape)
    return Gradients(join_heads(dqs).astype(dtype), dk.astype(dtype), dv.astype(dtype), dtable)


@dataclasses.dataclass(frozen=True, eq=False)
class _Heads:
    """The query heads of a head group, which share a chain. With a run-time mask they need not share a mask."""

    call: Call
    operands: Operands
    group: HeadGroup
    query: jax.Array  # [B, T, heads, H]
    bias_table: jax.Array | None  # [heads, L], or None

    def forward(self, passes: tuple[Pass, ...], out_dtype, out: jax.Array | None, lse: jax.Array | None):
        """Returns (out, lse) of one pass by token, which continues from ``out`` (None for zeros) and ``lse``."""
        config, steps, arrays = self._prepare(passes, backward=False)
        q_order, bq = row_orders(self.operands, passes)[0], config.shape[0]
        start = None if out is None else to_rows(q_order, out, bq), None if lse is None else vector(q_order, lse, bq)
        out, lse = forward_pass(config, steps, arrays, out_dtype, *start)
        lse = lse.reshape(*lse.shape[:2], -1)
        return to_tokens(q_order, out), to_tokens(q_order, lse, -jnp.inf)

    def backward(self, passes: tuple[Pass, ...], lse: jax.Array, delta: jax.Array, dout: jax.Array):
        """Returns (dq, dk, dv, gradient of the table or None) of one pass by token; dk and dv for all key heads."""
        q_order, kv_order = row_orders(self.operands, passes)
        config, steps, arrays = self._prepare(passes, backward=True)
        bq = config.shape[0]
        by_query = vector(q_order, lse, bq), vector(q_order, delta, bq), to_rows(q_order, dout, bq)
        # Query heads of one key head are summed inside the kernel if the group has all of them and they share a list.
        members = config.heads_per_kv_head // config.stride if config.heads_per_kv_head % config.stride == 0 else 1
        if steps.words.shape[1] > 1 and steps.heads_per_list % members:
            members = 1
        layout = config.bias and config.bias.table
        if layout is not None and members * layout.scratch_bytes > _BIAS_BYTES:
            members = 1
        dq, dk, dv, dtable = backward_pass(config, steps, arrays, *by_query, members)
        dk, dv = to_tokens(kv_order, dk), to_tokens(kv_order, dv)
        key, value = self.operands.key, self.operands.value
        if dk.shape[2] != key.shape[2] or config.stride > 1:
            kv_heads = config.kv_head(np.arange(0, config.heads, members))
            dk, dv = (jnp.zeros_like(x, jnp.float32).at[:, :, kv_heads].add(dx) for dx, x in ((dk, key), (dv, value)))
        if dtable is not None:
            assert layout is not None and self.bias_table is not None
            dtable = layout.gradient(self.bias_table, dtable)
        return to_tokens(q_order, dq) * self.call.scale, dk, dv, dtable

    def _prepare(self, passes: tuple[Pass, ...], *, backward: bool) -> tuple[PassConfig, Steps, PassArrays]:
        """Returns the static arguments, the steps and the operands of the kernel of one direction."""
        operands, rows = self.operands, 0
        if operands.selection is not None:
            rows = _selecting_rows(self.call, operands.selection, backward)
            operands = operands._replace(query=self.query, selection=jax.tree.map(self._ids, operands.selection))
        blocks = blocks_of_pass(self.call, operands, self.group, passes, rows, _uses_mask_tiles, dkv=backward)
        (bq, bkv), pairs, tiles = blocks.shape, blocks.pairs, blocks.tiles
        by_side = zip((blocks.q_order, blocks.kv_order), stacked_ids(operands), blocks.shape, strict=True)
        ids = [
            None if x is None else vector(order, x.swapaxes(1, 2), block).swapaxes(1, 3) for order, x, block in by_side
        ]
        steps = Steps.of(
            pairs.lists(backward),
            tiles is not None,
            f"a pass over {pairs.num_blocks[0]} x {pairs.num_blocks[1]} blocks of {bq} x {bkv}",
        )
        if tiles is not None:
            tiles = jnp.asarray(as_bits(tiles.swapaxes(1, 2) if backward else tiles))
        key, value = (to_rows(blocks.kv_order, x, bkv) for x in (operands.key, operands.value))
        bias, *bias_arrays = self._bias(passes, blocks, backward)
        arrays = PassArrays(to_rows(blocks.q_order, self.query, bq), key, value, tiles, *ids, *bias_arrays)
        limited = blocks.segments is not None or pairs.active_query_groups is not None
        queries_per_key = self.operands.query.shape[2] // operands.key.shape[2]
        heads = self.query.shape[2], self.group.first, self.group.step, queries_per_key
        config = PassConfig(self.call, *heads, blocks.shape, blocks.granularity, blocks.rule, limited, bias)
        return config, steps, arrays

    def _bias(self, passes: tuple[Pass, ...], blocks: PassBlocks, backward: bool):
        """Returns (the static part of the bias of a pass, its table, its slopes), None each without them."""
        slopes, unit = self.operands.bias_slopes, bias_unit(self.call)
        if self.bias_table is None and slopes is None:
            return None, None, None
        orders, (bq, bkv) = (blocks.q_order, blocks.kv_order), blocks.shape
        shape = (bkv, bq) if backward else (bq, bkv)
        layout, table = None, None
        if self.bias_table is not None:
            distances = distance_step(*passes)
            assert distances is not None  # see `planned`
            step, offset = distances
            rows = orders[0].rows, orders[1].rows
            center = self.call.bias_center + offset
            layout = PassTable(step, center, rows, shape, backward, self.bias_table.shape[1])
            table = layout.build(limit_base_2(self.bias_table)) * unit
        if slopes is not None:
            slopes = self.group.select(slopes, 0) * unit
            slopes = jnp.broadcast_to(slopes[:, None, None], (*slopes.shape, 1, LANES))
        return PassBias(orders, shape, backward, slopes is not None, layout), table, slopes

    def _ids(self, ids: jax.Array) -> jax.Array:
        """Returns the ids that these heads selected, [B, Tq, G, k], where G divides their number."""
        query_heads = self.operands.query.shape[2] // ids.shape[2]
        if ids.shape[2] == 1 or query_heads % self.group.step == 0:
            return ids
        return self.group.select(jnp.repeat(ids, query_heads, axis=2))


def _uses_mask_tiles(masks: Sequence[Reordered], shape: tuple[int, int]) -> bool:
    """True if the kernels read partial blocks of the mask as tiles, by the tuning of this backend."""
    return uses_mask_tiles(masks[0], shape, _TUNED)


def _selecting_rows(call: Call, selection: Selection, backward: bool) -> int:
    """Returns the queries of a block with a selection: ``q_blocksize`` or `_SELECTING_ROWS`, as groups that select."""
    granularity, target = selection.granularity, call.params[backward].q_blocksize or _SELECTING_ROWS
    groups = min(max(1, target // granularity), MAX_QUERY_GROUPS)
    return granularity * min(groups, 1 << (selection.ids.shape[1] - 1).bit_length())


def _heads_by_group(call: Call, operands: Operands) -> list[_Heads]:
    """Returns the heads by chain; without batch entries they have no passes."""
    call, table = dataclasses.replace(call, plan=planned(call, operands)), operands.bias_table
    groups = head_groups_of(call, operands, merge=False) if operands.query.size else head_groups([()], merge=False)
    return [
        _Heads(call, operands, group, group.select(operands.query), None if table is None else group.select(table, 0))
        for group in groups
    ]


def _no_float16(operands: Operands) -> Operands:
    """Returns operands in float32 for float16: TPUs multiply bfloat16 and float32 only."""
    if operands.query.dtype != jnp.float16:
        return operands
    in_float32 = {name: getattr(operands, name).astype(jnp.float32) for name in ("query", "key", "value")}
    return operands._replace(**in_float32)
