"""The TPU forward kernel: block-sparse attention with an online softmax, written in Pallas.

**One grid step, one entry of a block list.** The grid is (batch entries, heads, steps, 1). A step reads a packed word
from scalar memory: its query block, its key block, and its kind.
**Pallas loads one step ahead.** The index maps read the word of the next step, so that its q, k and v arrive while this
step computes. A block that the step before had, too, is not loaded again.
**m_i, l_i and acc stay in VMEM.** They are initialized in the first step of a query block, and out and lse are written
in the last one.
**m_i and l_i fill all 128 lanes.** m_i is the same in all of them, which spares broadcasts. l_i holds sums by lane,
which are added up in the last step only.
**Masks in masked steps only.** A step of kind FULL evaluates no mask. Logits are to base 2: one product scales them by
the scale and by log2(e).

M is bq, the queries of a block, N is bkv, the keys of a block. A query block of three steps, the last one masked; time
runs to the right::

    step       0                     1                       2
    loads      K1 V1                 K2 V2, mask tile        Q, K0 V0 of the next query block
    products   S = Q K0'   P0 V0     S = Q K1'   P1 V1       S = Q K2'          P2 V2
    softmax    m_i, l_i    P0        alpha       P1          mask, alpha        P2
    acc        = P0 V0               * alpha + P1 V1         * alpha + P2 V2, / l_i
    stores                                                   out, lse
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .biases import TileBias, bias_scratch
from .kernel_masks import LANES, to_lanes
from .launch import (
    LOG2E,
    BlockOperands,
    GridPosition,
    PassArrays,
    PassConfig,
    across_lanes,
    compute_by_state,
    dot,
    launch,
    mask_logits,
    to_logits,
)
from .schedule import Steps


def forward_pass(
    config: PassConfig,
    steps: Steps,
    arrays: PassArrays,
    out_dtype: Any,
    start: jax.Array | None,
    start_lse: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes one pass of a chain: out [B, heads, rows, Hv] in out_dtype, lse float32 [B, heads, blocks, 1, bq].

    The pass continues ``start`` and ``start_lse``, out and lse in float32 of an earlier pass over other keys, or None;
    an lse alone is that of keys whose values are 0. Steps are the active blocks by query block.
    """
    blocks = BlockOperands(config, transposed=False)
    batch, heads, rows, _ = arrays.query.shape
    bq, value_size = config.shape[0], arrays.value.shape[-1]
    earlier = {
        "start": None if start is None else blocks.by_query(start),
        "start_lse": None if start_lse is None else blocks.vector(start_lse),
    }
    out, lse = launch(
        functools.partial(_kernel, config),
        "sparse_fwd",
        steps,
        (batch, heads, 1),
        blocks.operands(arrays) | earlier,
        {
            "out": blocks.by_query(jax.ShapeDtypeStruct((batch, heads, rows, value_size), out_dtype)),
            "lse": blocks.vector(jax.ShapeDtypeStruct((batch, heads, rows // bq, 1, bq), jnp.float32)),
        },
        {
            "m_i": pltpu.VMEM((bq, LANES), jnp.float32),
            "l_i": pltpu.VMEM((bq, LANES), jnp.float32),
            "acc": pltpu.VMEM((bq, value_size), jnp.float32),
        }
        | bias_scratch(config.bias, 1, has_gradient=False),
    )
    return out, lse


def _kernel(config: PassConfig, refs: Any, position: GridPosition) -> None:
    # m_i [M, 128]: the largest logit so far, to base 2. l_i [M, 128]: by lane, the sum of p = 2 ** (s - m_i).
    # acc [M, Hv]: the sum of p @ v.
    bkv, value_size = config.shape[1], refs.value.shape[-1]
    bias = TileBias(config.bias, refs, position)

    @pl.when(position.is_first_visit)
    def _():
        lse = jnp.full_like(refs.m_i, -jnp.inf) if refs.start_lse is None else to_lanes(refs.start_lse[...])
        refs.m_i[...] = lse * LOG2E
        refs.l_i[...] = jnp.where(lse == -jnp.inf, 0.0, 1 / LANES)
        refs.acc[...] = jnp.zeros_like(refs.acc) if refs.start is None else refs.start[...]

    def compute(masked, limited):
        s, _ = to_logits(config, dot(refs.query[...], refs.key[...], (1, 1)), bias)
        s = mask_logits(config, refs, position, s, masked, limited, transposed=False)
        m_i = refs.m_i[...]
        m_new = jnp.maximum(m_i, s.max(1, keepdims=True))
        # For a row without a key so far, a finite shift gives 2 ** -inf = 0, where -inf - -inf would be NaN.
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked or limited else m_new
        p = jnp.exp2(s - across_lanes(shift, bkv))
        alpha = jnp.exp2(m_i - shift)
        refs.m_i[...] = m_new
        refs.l_i[...] = alpha * refs.l_i[...] + _lane_sums(p)
        pv = dot(p.astype(refs.value.dtype), refs.value[...], (1, 0))
        refs.acc[...] = across_lanes(alpha, value_size) * refs.acc[...] + pv

    bias.begin()
    compute_by_state(position.step, config, compute)

    @pl.when(position.is_last_visit)
    def _():
        l_i = refs.l_i[...].sum(1, keepdims=True)
        inverse = jnp.where(l_i == 0.0, 0.0, 1.0 / l_i)
        refs.out[...] = (refs.acc[...] * inverse).astype(refs.out.dtype)
        refs.lse[...] = ((refs.m_i[...] + jnp.log2(l_i)) * (1 / LOG2E)).T[:1]


def _lane_sums(p: jax.Array) -> jax.Array:
    """Returns [n, LANES] from [n, width]: its lanes add up to the sums of the rows."""
    width = p.shape[1]
    if width % LANES:
        return jnp.broadcast_to(p.sum(1, keepdims=True) / LANES, (p.shape[0], LANES))
    return functools.reduce(jnp.add, (p[:, i : i + LANES] for i in range(0, width, LANES)))
