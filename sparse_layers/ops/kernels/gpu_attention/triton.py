"""The implementation "triton": plain Triton kernels, for compute capability 8.0 and later."""

import jax
import jax.numpy as jnp

from ..call import Call
from ..operands import Gradients, Operands
from ..transforms import differentiable_once


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why this implementation cannot compute the call, or None."""
    from ..gpu import hardware
    from ..triton_gpu import settings

    device = hardware.local_device()
    if isinstance(device, str):
        return device
    if operands.query.dtype == jnp.float64:
        return "it computes in float32 at most, and query is float64"
    sizes = operands.query.shape[-1], operands.value.shape[-1]
    if max(sizes) > 256:
        return f"its tiles hold head sizes up to 256, got {sizes[0]} for query and key, {sizes[1]} for value"
    if operands.query.shape[0] > hardware.MAX_BATCH_ENTRIES:
        return f"it takes at most {hardware.MAX_BATCH_ENTRIES} batch entries, got {operands.query.shape[0]}"
    return settings.unsupported(settings.KernelInputs.of(operands), call.params, device)


@differentiable_once("triton")
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns attention out [B, T, N, Hv] in the dtype of the query, and lse [B, T, N] in float32."""
    from . import run

    return run.forward("triton", call, operands)


@differentiable_once("triton")
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Returns gradients by name, in the operands' dtypes; see `xla.backward` for the arguments."""
    from . import run

    return run.backward("triton", call, operands, lse, delta, dout)
