"""The implementation "hopper": Gluon kernels for compute capability 9.0; plain Triton computes the passes left over."""

import dataclasses

import jax
import jax.numpy as jnp

from ...planning.platforms import NARROW_HEAD_SIZE
from ..call import Call
from ..operands import Gradients, Operands
from ..transforms import differentiable_once
from . import triton
from .far_keys import planned as planned


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns why this implementation cannot compute the call, or None."""
    from ..gpu import bridge, hardware

    device = hardware.local_device()
    if isinstance(device, str):
        return device
    if device.capability != 90:
        return f"it needs compute capability 9.0, and this GPU has {device.compute_capability}"
    if operands.query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, and query is {operands.query.dtype}"
    return triton.unsupported(call, operands) or bridge.gluon_unsupported()


def not_preferred(call: Call, operands: Operands) -> str | None:
    """Returns the reason why another implementation is the better choice, or None.

    Plain Triton may compute the whole forward pass anyway, or fewer products.
    """
    from ..hopper_gpu import launch, settings
    from .route import query_gather_unsupported, route

    size = max(operands.query.shape[-1], operands.value.shape[-1])
    if size <= NARROW_HEAD_SIZE:
        return f"heads of {size} fill no more than half of a tile's {settings.HEAD_SIZES[0]} columns"
    selection = operands.selection
    if selection is not None and selection.granularity < settings.TILE_ROWS and not launch.has_one_group(operands):
        gather_reason = query_gather_unsupported(call, operands)
        if gather_reason is None:
            return None
        # Plain Triton's tiles have hardly more queries than choose together.
        granularity = selection.granularity
        selecting = "each query selects" if granularity == 1 else f"every {granularity} queries select"
        waste = f"{selecting} other blocks, and a tile of {settings.TILE_ROWS} queries computes the blocks of all"
        return f"{waste}; {gather_reason}" if granularity == 1 else waste
    reasons = route("hopper", _with_plan(call, operands), operands).forward_reasons
    if not reasons or not all(reasons):
        return None
    return f"Triton would run the whole forward pass, because {' and '.join(dict.fromkeys(map(str, reasons)))}"


def notes(call: Call, operands: Operands) -> list[str]:
    """Returns a sentence for each reason that leaves launches to plain Triton."""
    from .route import route

    return route("hopper", _with_plan(call, operands), operands).notes()


@differentiable_once("hopper")
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns attention out [B, T, N, Hv] in the dtype of the query, and lse [B, T, N] in float32."""
    from . import run

    return run.forward("hopper", _with_plan(call, operands), operands)


@differentiable_once("hopper")
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Returns gradients by name, in the operands' dtypes; see `xla.backward` for the arguments."""
    from . import run

    return run.backward("hopper", _with_plan(call, operands), operands, lse, delta, dout)


def _with_plan(call: Call, operands: Operands) -> Call:
    return dataclasses.replace(call, plan=planned(call, operands))
