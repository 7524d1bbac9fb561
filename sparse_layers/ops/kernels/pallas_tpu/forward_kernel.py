"""The forward kernel: online softmax over the active key blocks of each query block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .launch import LOG2E, Arrays, Blocks, Link, Place, by_kind, dot, lanes, launch, masked_scores, scores
from .schedule import Steps
from .sides import LANES, spread


def forward_pass(
    link: Link, steps: Steps, arrays: Arrays, out_dtype: Any, start: jax.Array | None, start_lse: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """One pass of a chain: out [B, heads, rows, Hv] in out_dtype and lse float32 [B, heads, blocks, 1, bq].

    Args:
      link: the pass.
      steps: its active blocks by query block.
      arrays: its operands.
      out_dtype: of out.
      start, start_lse: the same two, both float32, of the softmax over other keys that this pass goes on from, or
        None; a lse alone is that of keys whose values are 0.
    """
    blocks = Blocks(link, flipped=False)
    batch, heads, rows, _ = arrays.query.shape
    bq, value_size = link.shape[0], arrays.value.shape[-1]
    optional = {
        "start": None if start is None else blocks.by_query(start),
        "start_lse": None if start_lse is None else blocks.vector(start_lse),
    }
    out, lse = launch(
        functools.partial(_kernel, link),
        "sparse_fwd",
        steps,
        (batch, heads, 1),
        blocks.operands(arrays) | optional,
        {
            "out": blocks.by_query(jax.ShapeDtypeStruct((batch, heads, rows, value_size), out_dtype)),
            "lse": blocks.vector(jax.ShapeDtypeStruct((batch, heads, rows // bq, 1, bq), jnp.float32)),
        },
        {
            "best": pltpu.VMEM((bq, LANES), jnp.float32),
            "total": pltpu.VMEM((bq, LANES), jnp.float32),
            "sum": pltpu.VMEM((bq, value_size), jnp.float32),
        },
    )
    return out, lse


def _kernel(link: Link, refs: Any, place: Place) -> None:
    # Per query: best = the largest logit so far, total = sum of 2^(logit - best), sum = the same of 2^(..) * value.
    # Logits are in base 2. best is kept in every lane of a register, which spares broadcasts; the lanes of total are
    # added up at the end only.
    bkv, value_size = link.shape[1], refs.value.shape[-1]

    @pl.when(place.begins)
    def _():
        lse = jnp.full_like(refs.best, -jnp.inf) if refs.start_lse is None else spread(refs.start_lse[...])
        refs.best[...] = lse * LOG2E
        refs.total[...] = jnp.where(lse == -jnp.inf, 0.0, 1 / LANES)
        refs.sum[...] = jnp.zeros_like(refs.sum) if refs.start is None else refs.start[...]

    def compute(masked, limited):
        logits, _ = scores(link, dot(refs.query[...], refs.key[...], (1, 1)))
        logits = masked_scores(link, refs, place, logits, masked, limited, flipped=False)
        old = refs.best[...]
        best = jnp.maximum(old, logits.max(1, keepdims=True))
        # Where nothing was allowed so far, any finite shift gives 2^-inf = 0, and no -inf - -inf.
        shift = jnp.where(best == -jnp.inf, 0.0, best) if masked or limited else best
        weights = jnp.exp2(logits - lanes(shift, bkv))
        decay = jnp.exp2(old - shift)
        refs.best[...] = best
        refs.total[...] = decay * refs.total[...] + _by_lane(weights)
        update = dot(weights.astype(refs.value.dtype), refs.value[...], (1, 0))
        refs.sum[...] = lanes(decay, value_size) * refs.sum[...] + update

    by_kind(place.step, link, compute)

    @pl.when(place.ends)
    def _():
        total = refs.total[...].sum(1, keepdims=True)
        scale = jnp.where(total == 0.0, 0.0, 1.0 / total)
        refs.out[...] = (refs.sum[...] * scale).astype(refs.out.dtype)
        refs.lse[...] = ((refs.best[...] + jnp.log2(total)) * (1 / LOG2E)).T[:1]


def _by_lane(weights: jax.Array) -> jax.Array:
    """[n, LANES] whose lanes add up to the sums of the rows."""
    width = weights.shape[1]
    if width % LANES:
        return jnp.broadcast_to(weights.sum(1, keepdims=True) / LANES, (weights.shape[0], LANES))
    return functools.reduce(jnp.add, (weights[:, i : i + LANES] for i in range(0, width, LANES)))
