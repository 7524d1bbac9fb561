"""The backward kernel: dk and dv by key block, dq along the way, from the final lse and delta."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .launch import LOG2E, Arrays, Block, Blocks, Link, Place, by_kind, dot, launch, masked_scores, scores
from .schedule import DEAD, Steps


def backward_pass(
    link: Link, steps: Steps, arrays: Arrays, lse: jax.Array, delta: jax.Array, dout: jax.Array, members: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients from one pass of a chain, all float32.

    Args:
      link: the pass.
      steps: its active blocks by key block.
      arrays: its operands; tiles are those of [bkv, bq].
      lse: [B, heads, blocks, 1, bq], of the whole chain; +inf in rows that attend to nothing.
      delta: the same shape: sum(out * dout) less the gradient of lse.
      dout: [B, heads, rows, Hv].
      members: neighbouring query heads, which share a key head, whose dk and dv are summed up.

    Returns:
      dq [B, heads, rows, H], yet to be scaled, dk [B, heads / members, columns, H] and dv [.., Hv].
    """
    blocks = Blocks(link, flipped=True)
    batch, heads = arrays.query.shape[:2]
    bq, bkv = link.shape
    dq = jnp.zeros_like(arrays.query, jnp.float32)
    outputs = {"dq": Block(jax.ShapeDtypeStruct(dq.shape, dq.dtype), None, None)}
    for name, like in (("dk", arrays.key), ("dv", arrays.value)):
        shape = jax.ShapeDtypeStruct((batch, heads // members, *like.shape[2:]), jnp.float32)
        block = None, None, bkv, like.shape[-1]
        outputs[name] = Block(shape, block, lambda b, h, step, _: (b, h // members, step.major, 0))
    by_row = {"lse": blocks.vector(lse), "delta": blocks.vector(delta), "dout": blocks.by_query(dout)}
    dq, dk, dv = launch(
        functools.partial(_kernel, link),
        "sparse_bwd",
        steps,
        (batch, heads // members, members),
        blocks.operands(arrays) | by_row | {"dq_start": Block(dq, None, None)},
        outputs,
        {
            "dk_sum": pltpu.VMEM((bkv, arrays.key.shape[-1]), jnp.float32),
            "dv_sum": pltpu.VMEM((bkv, arrays.value.shape[-1]), jnp.float32),
            "dq_blocks": pltpu.VMEM((2, bq, arrays.query.shape[-1]), jnp.float32),
            "arrived": pltpu.SemaphoreType.DMA((2,)),
            "left": pltpu.SemaphoreType.DMA,
            "state": pltpu.SMEM((3,), jnp.int32),
        },
        aliases={"dq_start": "dq"},
    )
    return dq, dk, dv


def _kernel(link: Link, refs: Any, place: Place) -> None:
    # Scores are [bkv, bq] here: what belongs to a query is a row, and only dq needs a transposed operand.
    step, dq = place.step, _Accumulator(link, refs, place)

    @pl.when(place.begins)
    def _():
        refs.dk_sum[...] = jnp.zeros_like(refs.dk_sum)
        refs.dv_sum[...] = jnp.zeros_like(refs.dv_sum)

    def compute(masked, limited):
        dq.fetch()
        query, key, dout = refs.query[...], refs.key[...], refs.dout[...]
        logits, slope = scores(link, dot(key, query, (1, 1)))
        logits = masked_scores(link, refs, place, logits, masked, limited, flipped=True)
        weights = jnp.exp2(jnp.minimum(logits - refs.lse[...] * LOG2E, 0.0))  # see `lowered`
        dlogits = weights * (dot(refs.value[...], dout, (1, 1)) - refs.delta[...])
        dlogits = (dlogits if slope is None else dlogits * slope).astype(query.dtype)
        refs.dv_sum[...] += dot(weights.astype(dout.dtype), dout, (1, 0))
        refs.dk_sum[...] += dot(dlogits, query, (1, 0))
        dq.add(dot(key, dlogits, (0, 0)).T)

    dq.begin()
    by_kind(step, link, compute)
    dq.end()

    @pl.when(place.ends)
    def _():
        refs.dk[...] = refs.dk_sum[...] * link.call.scale
        refs.dv[...] = refs.dv_sum[...]


class _Accumulator:
    """The sum of dq, kept in HBM: a query block meets its key blocks far apart, and all of dq may not fit VMEM.

    Two buffers take turns. While one block is worked on, that of the next step is read and that of the last one is
    written. A block is read ahead only if it is another one than that at hand, and only after the last write is over;
    so a sum is never read before it is complete.
    """

    def __init__(self, link: Link, refs: Any, place: Place):
        self.refs, self.place, self.rows = refs, place, link.shape[0]

    def begin(self) -> None:
        """To be called at the beginning of every step."""
        pl.when(self.place.starts)(lambda: self._set(0, 0, 0))

    def fetch(self) -> None:
        """Starts to read the block at hand if that was not done ahead."""
        slot, ahead, pending = self._state()

        @pl.when(ahead == 0)
        def _():
            pl.when(pending == 1)(self._write(1 - slot).wait)
            self._read(self.place.head, self.place.step, slot).start()
            self._set(slot, 0, 0)

    def add(self, update: jax.Array) -> None:
        """Adds to the block at hand and starts to write it, and to read the next one."""
        slot, _, pending = self._state()
        pl.when(pending == 1)(self._write(1 - slot).wait)
        head, step = self.place.following()
        other = (head != self.place.head) | (step.minor != self.place.step.minor)
        ahead = other & (step.kind != DEAD) & ~self.place.finishes
        pl.when(ahead)(self._read(head, step, 1 - slot).start)
        self._read(self.place.head, self.place.step, slot).wait()
        self.refs.dq_blocks[slot] += update
        self._write(slot).start()
        self._set(1 - slot, ahead.astype(jnp.int32), 1)

    def end(self) -> None:
        """To be called at the end of every step."""
        slot, _, pending = self._state()
        pl.when(self.place.finishes & (pending == 1))(self._write(1 - slot).wait)

    def _block(self, head, step):
        return self.refs.dq.at[self.place.batch, head, pl.ds(step.minor * self.rows, self.rows)]

    def _read(self, head, step, slot):
        kept, buffer = self._block(head, step), self.refs.dq_blocks.at[slot]
        return pltpu.make_async_copy(kept, buffer, self.refs.arrived.at[slot])

    def _write(self, slot):
        kept, buffer = self._block(self.place.head, self.place.step), self.refs.dq_blocks.at[slot]
        return pltpu.make_async_copy(buffer, kept, self.refs.left)

    def _state(self):
        """(buffer of the block at hand, whether it was read ahead, whether a write from the other one is under way)."""
        return [self.refs.state[i] for i in range(3)]

    def _set(self, *state):
        for i, value in enumerate(state):
            self.refs.state[i] = jnp.int32(value)
