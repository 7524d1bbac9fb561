"""Block-sparse flash attention for TPUs in Pallas. On other platforms the same kernels run interpreted, for tests.

Grid steps follow compacted lists of active blocks (`schedule.py`), so the time is that of the blocks kept. The kernels
are in `forward_kernel.py` and `backward_kernel.py`, what they share in `launch.py` and, for masks, in `sides.py`;
`chain.py` strings passes together.

This file alone is imported with the package; Pallas is at the first call, for it takes a while.
"""

import jax
import jax.numpy as jnp

from ..call import Call
from ..operands import Gradients, Operands
from ..transforms import differentiable_once

# Rows of bfloat16 that a vector register holds.
LEAST_GRANULARITY = 16


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why this implementation cannot serve the call, or None."""
    if operands.query.dtype == jnp.float64:
        return "it computes in float32 at most, and query is float64"
    selection = operands.selection
    if selection is not None and selection.granularity < LEAST_GRANULARITY:
        return (
            f"it takes no selection of granularity {selection.granularity}, only of at least {LEAST_GRANULARITY}: a "
            "TPU reads and multiplies whole blocks, and queries that choose for themselves agree on hardly a block of "
            "keys"
        )
    return None


@differentiable_once("pallas_tpu")
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention out [B, T, N, Hv] in the dtype of the query, and its lse [B, T, N] in float32."""
    from . import chain

    return chain.forward(call, operands)


@differentiable_once("pallas_tpu")
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Gradients of query, key and value, in their dtypes; see `xla.backward` for the arguments."""
    from . import chain

    return chain.backward(call, operands, lse, delta, dout)
