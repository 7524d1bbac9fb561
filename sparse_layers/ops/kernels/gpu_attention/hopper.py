"""The implementation "hopper": Gluon kernels for compute capability 9.0; plain Triton computes the passes left over."""

import jax
import jax.numpy as jnp

from ..call import Call
from ..operands import Gradients, Operands
from ..transforms import differentiable_once
from . import triton


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why this implementation cannot compute the call, or None."""
    from ..gpu import bridge, hardware

    reason = triton.unsupported(call, operands)
    if reason is not None:
        return reason
    device = hardware.local_gpu()
    if device.capability != 90:
        return f"it needs compute capability 9.0, and this GPU has {device.compute_capability}"
    if operands.query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, and query is {operands.query.dtype}"
    return bridge.gluon_unsupported()


def not_preferred(call: Call, operands: Operands) -> str | None:
    """Why another is the better choice, or None: plain Triton would do the whole forward pass, or fewer products."""
    from ..hopper_gpu import settings
    from .route import query_gather_unsupported, route

    selection = operands.selection
    if selection is not None and selection.granularity < settings.TILE_ROWS:
        if query_gather_unsupported(call, operands) is None:
            return None
        # Plain Triton's tiles have hardly more queries than choose together.
        return f"its tiles of {settings.TILE_ROWS} queries take all that any {selection.granularity} of them chose"
    reasons = [one.forward for one in route("hopper", call, operands).passes]
    return reasons[0] if reasons and all(reasons) else None


def notes(call: Call, operands: Operands) -> list[str]:
    """The passes that are left to plain Triton, and why, in words."""
    from .route import route

    return [
        f"{one.orders}, {direction}: plain Triton, for {reason}"
        for one in route("hopper", call, operands).passes
        for direction, reason in (("forward", one.forward), ("backward", one.backward))
        if reason
    ]


@differentiable_once("hopper")
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns attention out [B, T, N, Hv] in the dtype of the query, and lse [B, T, N] in float32."""
    from . import run

    return run.forward("hopper", call, operands)


@differentiable_once("hopper")
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Returns gradients of query, key and value, in their dtypes; see `xla.backward` for the arguments."""
    from . import run

    return Gradients(*run.backward("hopper", call, operands, lse, delta, dout))
