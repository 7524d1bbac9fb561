"""Block-sparse flash attention for TPUs in Pallas. On other platforms the same kernels run interpreted, for tests.

Grid steps follow compacted lists of active blocks (`schedule.py`), so only these take time. The kernels are in
`forward_kernel.py` and `backward_kernel.py`. `launch.py` has their operands and the launch, `kernel_masks.py` masks
inside kernels. `chain.py` runs the passes of a chain.

Only this file is imported with the package. Pallas, which takes a while to import, is imported at the first call.
"""

import jax
import jax.numpy as jnp

from ..call import Call
from ..operands import Gradients, Operands
from ..transforms import differentiable_once

# Rows of bfloat16 that a vector register holds.
LEAST_GRANULARITY = 16


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why this implementation cannot compute the call, or None."""
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
    """Returns attention out [B, T, N, Hv] in the dtype of the query, and lse [B, T, N] in float32."""
    from . import chain

    return chain.forward(call, operands)


@differentiable_once("pallas_tpu")
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Returns gradients of query, key and value, in their dtypes; see `xla.backward` for the arguments."""
    from . import chain

    return chain.backward(call, operands, lse, delta, dout)
