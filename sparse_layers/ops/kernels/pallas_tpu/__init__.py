"""The implementation "pallas_tpu": block-sparse flash attention kernels in Pallas. Other platforms interpret them.

A grid step computes one entry of a block list (`schedule.py`), so the time is proportional to the active blocks. The
kernels are `forward_kernel.py` and `backward_kernel.py`. Both use `launch.py` and, for masks, `kernel_masks.py`.
`chain.py` computes the passes of a chain.

Importing the package imports this file only; the first call imports Pallas, which takes a while.
"""

import jax
import jax.numpy as jnp

from ..call import Call
from ..operands import Gradients, Operands
from ..transforms import differentiable_once
from .bias_passes import notes as notes
from .bias_passes import planned as planned

# Rows of bfloat16 that a vector register holds.
MIN_GRANULARITY = 16
# Entries of the tables of query heads that share a key head. With their gradient and two buffers each, 16 MiB of vector
# memory.
MAX_TABLE_ENTRIES = 1 << 20


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns the reason why TPU kernels cannot compute the call, or None."""
    if operands.query.dtype == jnp.float64:
        return "it computes in float32 at most, and query is float64"
    if call.bias_orders is not None:
        return "it counts the distances of a bias by tokens, not on a grid"
    if operands.bias_table is not None:
        (_, q_len, heads, _), (_, kv_len, kv_heads, _) = operands.query.shape, operands.key.shape
        entries = heads // kv_heads * min(operands.bias_table.shape[1], q_len + kv_len)
        if entries > MAX_TABLE_ENTRIES:
            return (
                f"its vector memory holds {MAX_TABLE_ENTRIES} entries of a bias with a table for the query heads of a "
                f"key head, and they have {entries}"
            )
    selection = operands.selection
    if selection is not None and selection.granularity < MIN_GRANULARITY:
        return (
            f"it takes no selection of granularity {selection.granularity}, only of at least {MIN_GRANULARITY}: a "
            "TPU reads and multiplies whole blocks, and single queries select few key blocks in common"
        )
    return None


@differentiable_once("pallas_tpu")
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns out [B, T, N, Hv] in the dtype of the query, and lse [B, T, N] in float32."""
    from . import chain

    return chain.forward(call, operands)


@differentiable_once("pallas_tpu")
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Returns the gradients of query, key and value in their dtypes; see `call` for the arguments."""
    from . import chain

    return chain.backward(call, operands, lse, delta, dout)
