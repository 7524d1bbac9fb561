"""Chains of passes for all heads: what each kernel is given, and what becomes of its results."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.mask_info import process_dynamic_mask
from ...planning.plan import Pass
from ...planning.views import RowOrder
from ..call import Call, Operands, joined, merged, over_batches
from .backward_kernel import backward_pass
from .forward_kernel import forward_pass
from .launch import Arrays, Link, by_rows, by_tokens, padded, vector
from .schedule import Candidates, Steps


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """See `pallas_tpu.forward`."""
    return over_batches(functools.partial(_forward, call), math.inf, operands)


def backward(call: Call, operands: Operands, *by_query: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_tpu.backward`; ``by_query`` are lse, delta and dout."""
    return over_batches(functools.partial(_backward, call), math.inf, operands, *by_query)


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    dtype, operands = operands.query.dtype, _no_float16(operands)
    outs, lses = [], []
    for heads in _classes(call, operands):
        out, lse = None, None
        if operands.sinks is not None:
            lse = jnp.broadcast_to(heads.of(operands.sinks.astype(jnp.float32), 0), heads.query.shape[:3])
        for one in heads.passes:
            if one is None or one.q_order.natural:
                final = one is heads.passes[-1]
                out, lse = heads.forward(one, operands.query.dtype if final else jnp.float32, out, lse)
            else:
                # A start state in the order of this pass would be one more copy; merging afterwards moves fewer bytes.
                own = heads.forward(one, jnp.float32, None, None)
                if lse is not None:
                    own = merged((jnp.zeros_like(own[0]) if out is None else out, lse), own)
                out, lse = own
        nothing = jnp.zeros_like(heads.query[..., 0], jnp.float32)
        if out is None:
            out = jnp.broadcast_to(nothing[..., None], (*nothing.shape, operands.value.shape[-1]))
        outs.append(out.astype(dtype))
        lses.append(nothing - jnp.inf if lse is None else lse)
    return joined(outs), joined(lses)


def _backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    dtype, operands = operands.query.dtype, _no_float16(operands)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # 2^(logit - inf) = 0: a row without keys gives nothing
    by_query = lse, delta, dout.astype(operands.query.dtype)
    dqs, dk, dv = [], *(jnp.zeros_like(x, jnp.float32) for x in (operands.key, operands.value))
    for heads in _classes(call, operands):
        dq = jnp.zeros_like(heads.query, jnp.float32)
        for one in heads.passes:
            more_q, more_k, more_v = heads.backward(one, *(heads.of(x, 2) for x in by_query))
            dq, dk, dv = dq + more_q, dk + more_k, dv + more_v
        dqs.append(dq)
    return joined(dqs).astype(dtype), dk.astype(dtype), dv.astype(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Heads:
    """The query heads first, first + stride, ..., which share a chain.

    Attributes:
      call: the call of the op.
      operands: its arrays.
      first, stride: which heads.
      passes: the chain; (None,) for a run-time mask, whose heads need not share a mask.
      query: [B, T, heads, H].
    """

    call: Call
    operands: Operands
    first: int
    stride: int
    passes: tuple[Pass | None, ...]
    query: jax.Array

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an array with all N query heads along an axis."""
        return jax.lax.slice_in_dim(x, self.first, None, self.stride, axis)

    def forward(self, one: Pass | None, out_dtype, out: jax.Array | None, lse: jax.Array | None):
        """(out, lse) of one pass in token order, going on from the given ones (out None: zeros)."""
        link, steps, arrays = self._prepare(one, backward=False)
        q_order, bq = self._orders(one)[0], link.shape[0]
        start = None if out is None else by_rows(q_order, out, bq), None if lse is None else vector(q_order, lse, bq)
        out, lse = forward_pass(link, steps, arrays, out_dtype, *start)
        lse = lse.reshape(*lse.shape[:2], -1)
        return by_tokens(q_order, out), by_tokens(q_order, lse, -jnp.inf)

    def backward(self, one: Pass | None, lse: jax.Array, delta: jax.Array, dout: jax.Array):
        """(dq, dk, dv) of one pass in token order; dk and dv for all key heads."""
        q_order, kv_order = self._orders(one)
        link, steps, arrays = self._prepare(one, backward=True)
        bq = link.shape[0]
        by_query = vector(q_order, lse, bq), vector(q_order, delta, bq), by_rows(q_order, dout, bq)
        # Query heads of one key head are summed inside the kernel if all are here and share their lists.
        members = link.group // self.stride if link.group % self.stride == 0 and steps.words.shape[1] == 1 else 1
        dq, dk, dv = backward_pass(link, steps, arrays, *by_query, members)
        dk, dv = by_tokens(kv_order, dk), by_tokens(kv_order, dv)
        key, value = self.operands.key, self.operands.value
        if dk.shape[2] != key.shape[2] or self.stride > 1:
            kv_heads = link.kv_head(np.arange(0, link.heads, members))
            dk, dv = (
                jnp.zeros_like(like, jnp.float32).at[:, :, kv_heads].add(x) for x, like in ((dk, key), (dv, value))
            )
        return by_tokens(q_order, dq) * self.call.scale, dk, dv

    def _orders(self, one: Pass | None) -> tuple[RowOrder, RowOrder]:
        if one is None:
            return RowOrder(self.query.shape[1]), RowOrder(self.operands.key.shape[1])
        return one.q_order, one.kv_order

    def _prepare(self, one: Pass | None, *, backward: bool) -> tuple[Link, Steps, Arrays]:
        """What the kernel of a direction needs."""
        q_order, kv_order = self._orders(one)
        if one is None:
            assert self.operands.mask is not None
            shape, mask = self.call.bwd_shape if backward else self.call.fwd_shape, None
            candidates, tiles = _run_time_lists(self.operands.mask, shape, backward)
        else:
            shape, mask = one.bwd_shape if backward else one.fwd_shape, one.mask if one.mask.computable else None
            info, side = (one.dkv, 1) if backward else (one.fwd, 0)
            rows = (q_order, kv_order)[side].rows
            candidates = Candidates.of(info, backward, padded(rows, shape[side]) // shape[side])
            tiles = info.partial_mask_blocks
        ids = None, None
        blocks = [padded(order.rows, block) // block for order, block in zip((q_order, kv_order), shape, strict=True)]
        if self.operands.segments is not None:
            sides = zip((q_order, kv_order), self.operands.segments, shape, strict=True)
            ids = [vector(order, x[..., None], block) for order, x, block in sides]
            by_block = [x[:, 0, :, 0] for x in ids]
            candidates = candidates.with_segments(*(by_block[::-1] if backward else by_block))
        steps = candidates.steps(
            blocks[0 if backward else 1], f"a pass over {blocks[0]} x {blocks[1]} blocks of {shape[0]} x {shape[1]}"
        )
        arrays = Arrays(
            by_rows(q_order, self.query, shape[0]),
            by_rows(kv_order, self.operands.key, shape[1]),
            by_rows(kv_order, self.operands.value, shape[1]),
            None if tiles is None else jnp.asarray(tiles, jnp.int8),
            *ids,
        )
        group = self.operands.query.shape[2] // self.operands.key.shape[2]
        segmented = self.operands.segments is not None
        link = Link(self.call, self.query.shape[2], self.first, self.stride, group, shape, mask, segmented)
        return link, steps, arrays


def _classes(call: Call, operands: Operands) -> list[_Heads]:
    """The heads by chain: heads h, h + C, h + 2C, ... share chain h of C."""
    chains = ((None,),) if operands.mask is not None else call.chains
    if not operands.query.size:
        chains = ((),)  # no batch entries: nothing to compute
    stride = len(chains)
    return [
        _Heads(call, operands, first, stride, chain, operands.query[:, :, first::stride])
        for first, chain in enumerate(chains)
    ]


def _run_time_lists(mask: jax.Array, shape: tuple[int, int], flipped: bool):
    """(blocks, tiles) of a run-time mask [C, T, S]."""
    ends = [(0, -length % block) for length, block in zip(mask.shape[1:], shape, strict=True)]
    info, _ = process_dynamic_mask(jnp.pad(mask, [(0, 0), *ends]), shape, downcast_smem_data=False)
    tiles = info.partial_mask_blocks.reshape(-1, *shape)
    return Candidates.every(info.block_mask, info.mask_next, flipped), tiles.swapaxes(1, 2) if flipped else tiles


def _no_float16(operands: Operands) -> Operands:
    """TPUs multiply bfloat16 and float32; float16 fits into the latter only."""
    if operands.query.dtype != jnp.float16:
        return operands
    wide = {name: getattr(operands, name).astype(jnp.float32) for name in ("query", "key", "value")}
    return operands._replace(**wide)
