"""Chains of passes for all heads: what each kernel is given, and what becomes of its results."""

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
from .launch import Arrays, Link, by_rows, by_tokens, vector
from .schedule import Steps, TooLong
from .sides import as_bits

_TUNED = TUNING["pallas_tpu"]
# Rows of a block of queries that choose for themselves, in parts. By the compiler's estimates for v6e, a forward step
# of 1024 x 128 takes 1085 cycles, one of 128 x 128 takes 824: where neighbours agree, one does the work of eight; where
# each chooses 16 of 128 blocks on its own, 84 do that of 128, and backward, at 1611 and 1020, nothing is lost either.
_CHOOSING_ROWS = 1024


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """See `pallas_tpu.forward`."""
    function = functools.partial(_as_they_fit, functools.partial(_forward, call), call)
    return vmap_as_batch(function, math.inf, operands)


def backward(call: Call, operands: Operands, *by_query: jax.Array) -> Gradients:
    """See `pallas_tpu.backward`; ``by_query`` are lse, delta and dout."""
    function = functools.partial(_as_they_fit, functools.partial(_backward, call), call)
    return vmap_as_batch(function, math.inf, operands, *by_query)


def _as_they_fit(function: Callable[..., Any], call: Call, operands: Operands, *by_query: jax.Array) -> Any:
    """function(operands, *by_query); if scalar memory does not hold the lists of all, of one after the other.

    Lists made at run time differ by batch entry, those of a selection also by key head.
    """
    batch, selection = len(operands.query), operands.selection
    several_masks = len(call.chains if operands.mask is None else operands.mask) > 1
    parts = operands.key.shape[2] if selection is not None and selection.ids.shape[2] > 1 and not several_masks else 1
    try:
        return function(operands, *by_query)
    except TooLong:
        if batch * parts == 1:
            raise

    def apart(x):  # [B, T, heads, ..] -> [B * parts, 1, T, heads / parts, ..]
        x = jnp.moveaxis(x.reshape(*x.shape[:2], parts, -1, *x.shape[3:]), 2, 1)
        return x.reshape(batch * parts, 1, *x.shape[2:])

    def together(x):
        return jnp.moveaxis(x.reshape(batch, parts, *x.shape[2:]), 1, 2).reshape(batch, x.shape[2], -1, *x.shape[4:])

    segments, sinks = operands.segments, operands.sinks
    each = operands._replace(
        **{name: apart(getattr(operands, name)) for name in ("query", "key", "value")},
        segments=None if segments is None else tuple(x[:, None].repeat(parts, axis=0) for x in segments),
        sinks=None if sinks is None else jnp.tile(sinks.reshape(parts, -1), (batch, 1)),
        selection=jax.tree.map(apart, selection),
        mask=None,
    )

    def one(arguments):
        own, *rest = arguments
        return function(own._replace(mask=operands.mask), *rest)

    return jax.tree.map(together, jax.lax.map(one, (each, *map(apart, by_query))))


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    dtype, operands = operands.query.dtype, _no_float16(operands)
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
                own = heads.forward(passes, jnp.float32, None, None)
                if lse is not None:
                    own = merge_by_lse((jnp.zeros_like(own[0]) if out is None else out, lse), own)
                out, lse = own
        nothing = jnp.zeros_like(heads.query[..., 0], jnp.float32)
        if out is None:
            out = jnp.broadcast_to(nothing[..., None], (*nothing.shape, operands.value.shape[-1]))
        outs.append(out.astype(dtype))
        lses.append(nothing - jnp.inf if lse is None else lse)
    return join_heads(outs), join_heads(lses)


def _backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    dtype, operands = operands.query.dtype, _no_float16(operands)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # 2^(logit - inf) = 0: a row without keys gives nothing
    by_query = lse, delta, dout.astype(operands.query.dtype)
    dqs, dk, dv = [], *(jnp.zeros_like(x, jnp.float32) for x in (operands.key, operands.value))
    for heads in _groups(call, operands):
        dq = jnp.zeros_like(heads.query, jnp.float32)
        for passes in heads.group.passes:
            more_q, more_k, more_v = heads.backward(passes, *map(heads.group.select, by_query))
            dq, dk, dv = dq + more_q, dk + more_k, dv + more_v
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
        """(out, lse) of one pass in token order, going on from the given ones (out None: zeros)."""
        link, steps, arrays = self._prepare(passes, backward=False)
        q_order, bq = row_orders(self.operands, passes)[0], link.shape[0]
        start = None if out is None else by_rows(q_order, out, bq), None if lse is None else vector(q_order, lse, bq)
        out, lse = forward_pass(link, steps, arrays, out_dtype, *start)
        lse = lse.reshape(*lse.shape[:2], -1)
        return by_tokens(q_order, out), by_tokens(q_order, lse, -jnp.inf)

    def backward(self, passes: tuple[Pass, ...], lse: jax.Array, delta: jax.Array, dout: jax.Array):
        """(dq, dk, dv) of one pass in token order; dk and dv for all key heads."""
        q_order, kv_order = row_orders(self.operands, passes)
        link, steps, arrays = self._prepare(passes, backward=True)
        bq = link.shape[0]
        by_query = vector(q_order, lse, bq), vector(q_order, delta, bq), by_rows(q_order, dout, bq)
        # Query heads of one key head are summed inside the kernel if all are here and share their list.
        members = link.group // link.stride if link.group % link.stride == 0 else 1
        if steps.words.shape[1] > 1 and steps.group % members:
            members = 1
        dq, dk, dv = backward_pass(link, steps, arrays, *by_query, members)
        dk, dv = by_tokens(kv_order, dk), by_tokens(kv_order, dv)
        key, value = self.operands.key, self.operands.value
        if dk.shape[2] != key.shape[2] or link.stride > 1:
            kv_heads = link.kv_head(np.arange(0, link.heads, members))
            dk, dv = (
                jnp.zeros_like(like, jnp.float32).at[:, :, kv_heads].add(x) for x, like in ((dk, key), (dv, value))
            )
        return by_tokens(q_order, dq) * self.call.scale, dk, dv

    def _prepare(self, passes: tuple[Pass, ...], *, backward: bool) -> tuple[Link, Steps, Arrays]:
        """What the kernel of a direction needs."""
        operands, rows = self.operands, 0
        if operands.selection is not None:
            rows = _selecting_rows(self.call, operands.selection, backward)
            operands = operands._replace(query=self.query, selection=jax.tree.map(self._ids, operands.selection))
        blocks = blocks_of_pass(self.call, operands, self.group, passes, rows, _uses_mask_tiles, dkv=backward)
        (bq, bkv), pairs, tiles = blocks.shape, blocks.pairs, blocks.tiles
        ids = (None, None)
        if blocks.segments is not None:
            sides = zip((blocks.q_order, blocks.kv_order), blocks.segments, blocks.shape, strict=True)
            ids = [vector(order, x[..., None], block) for order, x, block in sides]
        steps = Steps.of(
            pairs.lists(kv_major=backward),
            tiles is not None,
            f"a pass over {pairs.blocks[0]} x {pairs.blocks[1]} blocks of {bq} x {bkv}",
        )
        if tiles is not None:
            tiles = jnp.asarray(as_bits(tiles.swapaxes(1, 2) if backward else tiles))
        key, value = (by_rows(blocks.kv_order, x, bkv) for x in (operands.key, operands.value))
        arrays = Arrays(by_rows(blocks.q_order, self.query, bq), key, value, tiles, *ids)
        limited = blocks.segments is not None or pairs.active_rows_mask is not None
        queries_per_key = self.operands.query.shape[2] // operands.key.shape[2]
        which = self.query.shape[2], self.group.first, self.group.step, queries_per_key
        return Link(self.call, *which, blocks.shape, blocks.granularity, blocks.rule, limited), steps, arrays

    def _ids(self, ids: jax.Array) -> jax.Array:
        """What these heads chose, of what all did: int32 [B, Tq, G, k], where G divides their number."""
        each = self.operands.query.shape[2] // ids.shape[2]
        if ids.shape[2] == 1 or each % self.group.step == 0:
            return ids
        return self.group.select(jnp.repeat(ids, each, axis=2))


def _uses_mask_tiles(masks: Sequence[Reordered], shape: tuple[int, int]) -> bool:
    """True if the kernels read the partial blocks of a group's mask as tiles, by the tuning of this backend."""
    return uses_mask_tiles(masks[0], shape, _TUNED)


def _selecting_rows(call: Call, selection: Selection, backward: bool) -> int:
    """Queries in a block of a selection: as many as asked for or `_CHOOSING_ROWS`, in parts that choose together."""
    granularity, wanted = selection.granularity, call.params[backward].q_blocksize or _CHOOSING_ROWS
    return granularity * min(
        max(1, wanted // granularity), MAX_QUERY_GROUPS, 1 << (selection.ids.shape[1] - 1).bit_length()
    )


def _groups(call: Call, operands: Operands) -> list[_Heads]:
    """The heads by chain; without batch entries no passes, as there is nothing to compute."""
    groups = head_groups_of(call, operands, merge=False) if operands.query.size else head_groups([()], merge=False)
    return [_Heads(call, operands, group, group.select(operands.query)) for group in groups]


def _no_float16(operands: Operands) -> Operands:
    """TPUs multiply bfloat16 and float32; float16 fits into the latter only."""
    if operands.query.dtype != jnp.float16:
        return operands
    wide = {name: getattr(operands, name).astype(jnp.float32) for name in ("query", "key", "value")}
    return operands._replace(**wide)
