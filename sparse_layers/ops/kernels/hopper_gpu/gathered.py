"""The gradients of selections of single queries on Hopper: blocks of keys take to them the queries that chose them.

In the place of what `triton_gpu.by_key` launches for it. What choices give is added in float32 to dq, dk and dv, so
there are no results by choice to be kept, and queries take fewer turns.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..call import Call, Operands
from ..triton_gpu import by_key
from ..triton_gpu.link import Gradients, varying_like
from ..triton_gpu.lists import Side
from ..triton_gpu.work import cut
from . import bridge, settings, views
from .gathered_kernel import Gathered, gathered_kernel
from .link import products_begin_from
from .tiles import Arrays, Walk

# Steps of a piece of a list at most, for some blocks are everybody's choice. Programs take two or three of them each.
MOST_STEPS = 64
# Bytes that the lists of a choice take while they are made.
LIST_BYTES = 40


def unserved(call: Call, operands: Operands) -> str | None:
    """Why these gradients are left to plain Triton, or None."""
    if not by_key.serves(call, operands):
        return "it takes no choices of single queries to blocks of keys there, either"
    sizes = operands.query.shape[-1], operands.value.shape[-1]
    block = call.selection[0] // by_key.finer(call, operands)
    if sizes not in [(size, size) for size in settings.SIZES]:
        return f"choices of single queries take heads of {settings.SIZES} there, and these have {sizes}"
    if block not in settings.BLOCKS:
        return f"choices of single queries take blocks of {settings.BLOCKS} keys there, and these have {block}"
    if operands.segments is not None:
        return "choices of single queries take no segment ids there"
    if call.params[1].deterministic:
        return "choices of single queries are added to dq there in the order in which they are done"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class HopperChoices(by_key.Choices):
    """The choices of some queries."""

    always_pays = True
    pack = 1  # what the rows of many heads would read and add to is more than the cache holds
    ordered = False

    @property
    def bytes_needed(self) -> int:
        return self.operands.chosen.size * LIST_BYTES

    def gradients(self, gradients: Gradients, before: Any) -> tuple[jax.Array, Any]:
        query, key, value = self.operands.query, self.operands.key, self.operands.value
        (batch, length, heads, size), block = query.shape, self.call.selection[0]
        q = Side(self.q_order, 1, settings.GROUP, gathered=True)
        kv = Side(self.kv_order, block, block)
        lists = self.choice_lists(q, kv)
        found = lists.lists
        steps, _ = self._steps([(q, lists)], False, 1)
        most = steps.shape[1] + heads * q.steps(length * self.q_order.each) // MOST_STEPS
        work = cut(steps, -(-steps // MOST_STEPS), most).work
        lse = products_begin_from(gradients.lse, self.call)
        scalars = (lse, -jnp.inf), (gradients.delta * -self.call.scale, 0.0)
        scalars = [jnp.append(x.swapaxes(1, 2), jnp.float32(fill)) for x, fill in scalars]
        box, to = (1, block, 1, size), (1, settings.GROUP, 1, size // 2)
        inputs = [
            query,
            gradients.dout,
            *(bridge.Tiles.of(x, box) for x in (key, value)),
            *scalars,
            jnp.full((1,), scalars[0].size - 1, jnp.int32),
            *(work, found.spans, found.block, found.tile, lists.bits),
        ]
        before = before or tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
        zeros = jnp.zeros(query.shape, jnp.float32)
        aliases = {len(inputs) + i: i for i in range(3)}
        shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (query, key, value)]
        batches, kinds = found.spans.shape[:2]
        constants = {
            "A": Arrays(heads, key.shape[2], size, self.call.scale, self.call.soft_cap or 0.0, 0, 1, heads, False),
            "KV": views.side_of(kv.order, block),
            "L": Walk(batches, kinds, found.group, kv.blocks, 0, 0),
            "F": Gathered(
                settings.GROUP,
                settings.stages_of("gathered", size, block),
                length,
                self.q_order.each,
                len(work),
                work.shape[1],
            ),
            "REGISTERS": settings.GATHERING[0],
            "FETCHING": settings.GATHERING[1],
        }
        outputs = [shapes[0], *(bridge.Tiles.of(x, to) for x in shapes[1:])]
        inputs = [x if isinstance(x, bridge.Tiles) else jnp.asarray(x) for x in (*inputs, zeros, *before)]
        dq, *dkv = bridge.call(gathered_kernel, batch * len(work), inputs, outputs, constants, aliases)
        dq, *dkv = (varying_like(query, x) for x in (dq, *dkv))
        return dq.astype(query.dtype), tuple(dkv)
