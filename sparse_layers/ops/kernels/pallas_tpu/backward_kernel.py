"""The TPU backward kernel: dk and dv by key block, and dq along the way, from the final lse and delta, in Pallas.

**One grid step, one entry of a block list.** The grid is (batch entries, groups of heads, steps, members). Lists are by
key block, and all query heads of a group add to the same dk and dv.
**Scores are transposed.** s, p, dp and ds are [N, M], keys by queries. lse and delta of a query are then a row that
broadcasts, and only dq needs a transposed operand.
**Five products a step.** s = k q' and dp = v dout'; with ds = p * (dp - delta), dv += p dout, dk += ds q and
dq += (k' ds)'.
**dk and dv stay in VMEM.** They are zeroed in the first step of a key block, and stored in its last step.
**dq stays in HBM.** A query block meets its key blocks far apart. So the kernel loads, adds to and stores blocks of dq
by copies of its own, through two buffers; see `_Accumulator`.

M is bq, the queries of a block, N is bkv, the keys of a block. Steps n - 1, n and n + 1 with different query blocks;
time runs to the right::

    step           n - 1                         n                             n + 1
    Pallas loads   q, lse, dout, delta of n      q, lse, dout, delta of n + 1  q, lse, dout, delta of n + 2
    products       s, dp, dv, dk, dq             s, dp, dv, dk, dq             s, dp, dv, dk, dq
    dq buffer 0    wait for store, load n        wait for load, += dq, store   wait for store, load n + 2
    dq buffer 1    wait for load, += dq, store   wait for store, load n + 1    wait for load, += dq, store
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....masks.states import EMPTY
from .biases import TileBias, bias_scratch
from .launch import (
    LOG2E,
    BlockOperand,
    BlockOperands,
    GridPosition,
    PassArrays,
    PassConfig,
    compute_by_state,
    dot,
    launch,
    mask_logits,
    to_logits,
)
from .schedule import Steps


def backward_pass(
    config: PassConfig,
    steps: Steps,
    arrays: PassArrays,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    members: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes the gradients of one pass of a chain in float32.

    Args:
      steps: the active blocks by key block.
      arrays: the operands; tiles are those of [bkv, bq].
      lse: [B, heads, blocks, 1, bq], of the whole chain; +inf in rows without keys.
      delta: the same shape, sum(out * dout) less the gradient of lse.
      dout: [B, heads, rows, Hv].
      members: neighbouring query heads of one key head, whose dk and dv are summed up.

    Returns:
      dq [B, heads, rows, H] without the scale, dk [B, heads / members, columns, H], dv [.., Hv], and the gradient
      of the table [B, heads, 1, entries], or None.
    """
    blocks = BlockOperands(config, transposed=True, members=members)
    batch, heads = arrays.query.shape[:2]
    bq, bkv = config.shape
    dq = jnp.zeros_like(arrays.query, jnp.float32)
    outputs = {"dq": BlockOperand(jax.ShapeDtypeStruct(dq.shape, dq.dtype), None, None)}
    for name, like in (("dk", arrays.key), ("dv", arrays.value)):
        shape = jax.ShapeDtypeStruct((batch, heads // members, *like.shape[2:]), jnp.float32)
        block = None, None, bkv, like.shape[-1]
        outputs[name] = BlockOperand(shape, block, lambda b, h, step, _: (b, h // members, step.outer, 0))
    if arrays.table is not None:
        dtable = jax.ShapeDtypeStruct((batch, *arrays.table.shape), jnp.float32)
        outputs["dtable"] = blocks.table(dtable, None)
    by_query = {"lse": blocks.vector(lse), "delta": blocks.vector(delta), "dout": blocks.by_query(dout)}
    dq, dk, dv, *dtable = launch(
        functools.partial(_kernel, config, members),
        "sparse_bwd",
        steps,
        (batch, heads // members, members),
        blocks.operands(arrays) | by_query | {"dq_start": BlockOperand(dq, None, None)},
        outputs,
        {
            "dk_acc": pltpu.VMEM((bkv, arrays.key.shape[-1]), jnp.float32),
            "dv_acc": pltpu.VMEM((bkv, arrays.value.shape[-1]), jnp.float32),
            "dq_tiles": pltpu.VMEM((2, bq, arrays.query.shape[-1]), jnp.float32),
            "loaded": pltpu.SemaphoreType.DMA((2,)),
            "stored": pltpu.SemaphoreType.DMA,
            "state": pltpu.SMEM((3,), jnp.int32),
        }
        | bias_scratch(config.bias, members, has_gradient=True),
        aliases={"dq_start": "dq"},
    )
    return dq, dk, dv, dtable[0] if dtable else None


def _kernel(config: PassConfig, members: int, refs: Any, position: GridPosition) -> None:
    # s, p, ds: [N, M]. dk_acc: [N, H]. dv_acc: [N, Hv].
    step, dq = position.step, _Accumulator(config, refs, position)
    bias = TileBias(config.bias, refs, position, members)

    @pl.when(position.is_first_visit)
    def _():
        refs.dk_acc[...] = jnp.zeros_like(refs.dk_acc)
        refs.dv_acc[...] = jnp.zeros_like(refs.dv_acc)

    def compute(masked, limited):
        dq.start_load()
        q, k, dout = refs.query[...], refs.key[...], refs.dout[...]
        s, slope = to_logits(config, dot(k, q, (1, 1)), bias)
        s = mask_logits(config, refs, position, s, masked, limited, transposed=True)
        p = jnp.exp2(jnp.minimum(s - refs.lse[...] * LOG2E, 0.0))  # see `reduced_lse`
        dp = dot(refs.value[...], dout, (1, 1))
        ds = p * (dp - refs.delta[...])
        if slope is not None:
            ds = ds * jnp.where(p > 0, slope, 0.0)  # a bias of pairs that are not allowed may be NaN
        bias.add_gradient(ds)
        ds = ds.astype(q.dtype)
        refs.dv_acc[...] += dot(p.astype(dout.dtype), dout, (1, 0))
        refs.dk_acc[...] += dot(ds, q, (1, 0))
        dq.add(dot(k, ds, (0, 0)).T)

    dq.begin()
    bias.begin()
    compute_by_state(step, config, compute)
    bias.end()
    dq.end()

    @pl.when(position.is_last_visit)
    def _():
        refs.dk[...] = refs.dk_acc[...] * config.call.scale
        refs.dv[...] = refs.dv_acc[...]


class _Accumulator:
    """Adds to dq in HBM, as all of dq may not fit VMEM, through two buffers [M, H] in VMEM that alternate.

    While a step computes, the block of the next step is loaded, and that of the step before is stored. A block is
    loaded ahead only if it differs from this step's, and only after the last store. So a sum is never loaded before it
    is complete.
    """

    def __init__(self, config: PassConfig, refs: Any, position: GridPosition):
        self.refs, self.position, self.rows = refs, position, config.shape[0]

    def begin(self) -> None:
        """Resets the state in the first step of a batch entry and group of heads; every step calls it first."""
        pl.when(self.position.is_first_step)(lambda: self._set(0, 0, 0))

    def start_load(self) -> None:
        """Starts to load this step's block, unless the step before did."""
        slot, ahead, pending = self._state()

        @pl.when(ahead == 0)
        def _():
            pl.when(pending == 1)(self._store(1 - slot).wait)
            self._load(self.position.head, self.position.step, slot).start()
            self._set(slot, 0, 0)

    def add(self, update: jax.Array) -> None:
        """Adds to this step's block, and starts to store it and to load that of the next step."""
        slot, _, pending = self._state()
        pl.when(pending == 1)(self._store(1 - slot).wait)
        head, step = self.position.next_step()
        next_differs = (head != self.position.head) | (step.inner != self.position.step.inner)
        ahead = next_differs & (step.state != EMPTY) & ~self.position.is_last_step
        pl.when(ahead)(self._load(head, step, 1 - slot).start)
        self._load(self.position.head, self.position.step, slot).wait()
        self.refs.dq_tiles[slot] += update
        self._store(slot).start()
        self._set(1 - slot, ahead.astype(jnp.int32), 1)

    def end(self) -> None:
        """Waits for the store in the last step of a batch entry and group of heads; every step calls it last."""
        slot, _, pending = self._state()
        pl.when(self.position.is_last_step & (pending == 1))(self._store(1 - slot).wait)

    def _block(self, head, step):
        return self.refs.dq.at[self.position.batch, head, pl.ds(step.inner * self.rows, self.rows)]

    def _load(self, head, step, slot):
        dq_block, buffer = self._block(head, step), self.refs.dq_tiles.at[slot]
        return pltpu.make_async_copy(dq_block, buffer, self.refs.loaded.at[slot])

    def _store(self, slot):
        dq_block, buffer = self._block(self.position.head, self.position.step), self.refs.dq_tiles.at[slot]
        return pltpu.make_async_copy(buffer, dq_block, self.refs.stored)

    def _state(self):
        """Reads (buffer of this step's block, 1 if it was loaded ahead, 1 if the other buffer is being stored)."""
        return [self.refs.state[i] for i in range(3)]

    def _set(self, *state):
        for i, value in enumerate(state):
            self.refs.state[i] = jnp.int32(value)
