"""Gradients of blocks that single queries chose, on Hopper: programs have blocks of keys, and gather who chose them.

In the place of what `triton_gpu.by_key` launches for it. What choices give is added to dq, dk and dv in float32, so
nothing is kept by choice, and queries take few turns, or one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..call import Call, Operands
from ..gpu import bridge
from ..gpu.lists import Side
from ..gpu.work import cut
from ..triton_gpu import kv_outer
from ..triton_gpu.link import Gradients, varying_like
from . import settings, views
from .link import scaled_neg_lse
from .query_gather_kernel import QueryGatherConstants, query_gather_kernel
from .tiles import Arrays, ListShapes

# Steps of a piece of a list at most, for some blocks are everybody's choice. With half and twice as many, passes of
# 8192 to 131072 tokens took as long on an H100.
MOST_STEPS = 64
# Bytes that a choice takes while lists are made.
LIST_BYTES = 40


def unserved(call: Call, operands: Operands) -> str | None:
    """Why these gradients are left to plain Triton, or None."""
    if call.selection is None or not kv_outer.serves(call, operands):
        return "queries are gathered that choose one by one, at least two tiles of them, without settings of kernels"
    sizes = operands.query.shape[-1], operands.value.shape[-1]
    block = call.selection[0] // kv_outer.finer(call, operands)
    if sizes not in [(size, size) for size in settings.HEAD_SIZES]:
        return f"queries are gathered with heads of {settings.HEAD_SIZES}, and these have {sizes}"
    if block not in settings.STEP_KEYS:
        return f"queries are gathered for blocks of {settings.STEP_KEYS} keys, and these have {block}"
    if operands.segments is not None:
        return "queries are gathered without segment ids"
    if call.params[1].deterministic:
        return "gathered queries are added to dq in the order in which they are done"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class HopperChoices(kv_outer.Choices):
    """The choices of some queries."""

    ordered = False
    always_pays = True

    @property
    def pack(self) -> int:
        """Heads are taken one by one: what several of them read and add to is more than the cache holds."""
        return 1

    @property
    def bytes_needed(self) -> int:
        assert self.operands.chosen is not None
        return self.operands.chosen.size * LIST_BYTES

    def gradients(self, gradients: Gradients, before: Any) -> tuple[jax.Array, Any]:
        query, key, value = self.operands.query, self.operands.key, self.operands.value
        assert self.call.selection is not None
        (batch, length, heads, size), block = query.shape, self.call.selection[0]
        q, kv = Side(self.q_order, 1, settings.GROUP_ROWS, gathered=True), Side(self.kv_order, block, block)
        lists = self.choice_lists(q, kv)
        found, work = lists.lists, self._pieces(q, kv, lists)
        # Behind the last query come the numbers of places where there is none: they weigh nothing.
        lse, delta = scaled_neg_lse(gradients.lse, self.call), gradients.delta * -self.call.scale
        scalars = [jnp.append(x.swapaxes(1, 2), jnp.float32(end)) for x, end in ((lse, -jnp.inf), (delta, 0.0))]
        dkv = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)] if before is None else before
        inputs = [
            query,
            gradients.dout,
            *(bridge.Tiles.of(x, (1, block, 1, size)) for x in (key, value)),
            *scalars,
            *(work, found.spans, found.block, found.tile, lists.bits),
            *(jnp.zeros(query.shape, jnp.float32), *dkv),
        ]
        results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (query, key, value)]
        outputs = [results[0], *(bridge.Tiles.of(x, (1, settings.GROUP_ROWS, 1, size // 2)) for x in results[1:])]
        (batches, kinds), stages = found.spans.shape[:2], settings.num_stages("query_gather", size, block)
        constants = {
            "A": Arrays(
                HEADS=heads,
                KV_HEADS=key.shape[2],
                D=size,
                SCALE=self.call.scale,
                CAP=self.call.soft_cap or 0.0,
                FIRST_HEAD=0,
                HEAD_STEP=1,
                PASS_HEADS=heads,
                SEGMENTED=False,
            ),
            "KV": views.rows_view(kv.order, block),
            "L": ListShapes(batches, kinds, found.group, kv.blocks, len(work), 0),
            "F": QueryGatherConstants(settings.GROUP_ROWS, stages, batch, length, self.each),
            "CONSUMER_REGISTERS": settings.GATHER_REGISTERS[0],
            "PRODUCER_REGISTERS": settings.GATHER_REGISTERS[1],
        }
        aliases = {len(inputs) - 3 + i: i for i in range(3)}
        dq, *dkv = bridge.call_gluon(query_gather_kernel, batch * len(work), inputs, outputs, constants, aliases)
        dq, *dkv = (varying_like(query, x) for x in (dq, *dkv))
        return dq.astype(query.dtype), tuple(dkv)

    def _pieces(self, q: Side, kv: Side, lists: Any) -> jax.Array:
        """The work of programs, int32 [pieces, LB, 3]: a head and a block, numbered, and the steps from and to."""
        steps, _ = self._steps([(q, lists)], False, 1)
        # A piece for each job, and more for jobs of more steps.
        most = steps.shape[1] + self.heads * q.steps(self.q_order.rows) // MOST_STEPS
        found = cut(steps, -(-steps // MOST_STEPS), most)
        assert found is not None
        return found.work
