"""The backward kernels: dq by query block, dk and dv by key block, from the final lse and delta."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import LOG2E, Arrays, Block, Blocks, Link, by_kind, dot, lanes, launch, masked_scores, scores, spread
from .schedule import Step, Steps


def dq_pass(link: Link, steps: Steps, arrays: Arrays, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> jax.Array:
    """The gradient of the queries from one pass, float32 [B, heads, rows, H].

    Args:
      link: the pass.
      steps: its active blocks by query block.
      arrays: its operands.
      lse: float32 [B, heads, blocks, 1, bq], of the whole chain; +inf in rows that attend to nothing.
      delta: the same shape: sum(out * dout) less the gradient of lse.
      dout: [B, heads, rows, Hv].
    """
    blocks = Blocks(link, flipped=False)
    batch, heads, _, size = arrays.query.shape
    (dq,) = launch(
        functools.partial(_dq_kernel, link),
        "sparse_dq",
        steps,
        (batch, heads, 1),
        blocks.operands(arrays) | _by_row(blocks, lse, delta, dout),
        {"dq": blocks.by_query(jax.ShapeDtypeStruct(arrays.query.shape, jnp.float32))},
        {"sum": (link.shape[0], size)},
    )
    return dq


def dkv_pass(
    link: Link, steps: Steps, arrays: Arrays, lse: jax.Array, delta: jax.Array, dout: jax.Array, members: int
) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys and values from one pass, float32 [B, heads / members, columns, H or Hv].

    Args:
      link, arrays, lse, delta, dout: as in `dq_pass`; tiles are [tiles, bkv, bq].
      steps: the active blocks by key block.
      members: neighbouring query heads, which share a key head, that are summed up.
    """
    blocks = Blocks(link, flipped=True)
    batch, heads = arrays.query.shape[:2]
    groups, bkv = heads // members, link.shape[1]
    outputs = {}
    for name, like in (("dk", arrays.key), ("dv", arrays.value)):
        shape = jax.ShapeDtypeStruct((batch, groups, *like.shape[2:]), jnp.float32)
        block = None, None, bkv, like.shape[-1]
        outputs[name] = Block(shape, block, lambda b, h, step, _: (b, h // members, step.major, 0))
    dk, dv = launch(
        functools.partial(_dkv_kernel, link),
        "sparse_dkv",
        steps,
        (batch, groups, members),
        blocks.operands(arrays) | _by_row(blocks, lse, delta, dout),
        outputs,
        {"dk_sum": (bkv, arrays.key.shape[-1]), "dv_sum": (bkv, arrays.value.shape[-1])},
    )
    return dk, dv


def _by_row(blocks: Blocks, lse, delta, dout):
    return {"lse": blocks.vector(lse), "delta": blocks.vector(delta), "dout": blocks.by_query(dout)}


def _dq_kernel(link: Link, refs: Any, step: Step, begins: Any, ends: Any) -> None:
    @pl.when(begins)
    def _():
        refs.sum[...] = jnp.zeros_like(refs.sum)

    def compute(masked, segmented):
        bkv = link.shape[1]
        logits, slope = scores(link, dot(refs.query[...], refs.key[...], (1, 1)))
        logits = masked_scores(link, refs, step.major, step.minor, logits, masked, segmented, False)
        weights = jnp.exp2(logits - lanes(spread(refs.lse[...] * LOG2E), bkv))
        dweights = dot(refs.dout[...], refs.value[...], (1, 1))
        dlogits = weights * (dweights - lanes(spread(refs.delta[...]), bkv))
        dlogits = dlogits if slope is None else dlogits * slope
        refs.sum[...] += dot(dlogits.astype(refs.key.dtype), refs.key[...], (1, 0))

    by_kind(step, link, compute)

    @pl.when(ends)
    def _():
        refs.dq[...] = refs.sum[...] * link.call.scale


def _dkv_kernel(link: Link, refs: Any, step: Step, begins: Any, ends: Any) -> None:
    # Scores are [bkv, bq] here: what belongs to a query is a row, and no product needs a transposed operand.
    @pl.when(begins)
    def _():
        refs.dk_sum[...] = jnp.zeros_like(refs.dk_sum)
        refs.dv_sum[...] = jnp.zeros_like(refs.dv_sum)

    def compute(masked, segmented):
        query, dout = refs.query[...], refs.dout[...]
        logits, slope = scores(link, dot(refs.key[...], query, (1, 1)))
        logits = masked_scores(link, refs, step.minor, step.major, logits, masked, segmented, True)
        weights = jnp.exp2(logits - refs.lse[...] * LOG2E)
        refs.dv_sum[...] += dot(weights.astype(dout.dtype), dout, (1, 0))
        dlogits = weights * (dot(refs.value[...], dout, (1, 1)) - refs.delta[...])
        dlogits = dlogits if slope is None else dlogits * slope
        refs.dk_sum[...] += dot(dlogits.astype(query.dtype), query, (1, 0))

    by_kind(step, link, compute)

    @pl.when(ends)
    def _():
        refs.dk[...] = refs.dk_sum[...] * link.call.scale
        refs.dv[...] = refs.dv_sum[...]
