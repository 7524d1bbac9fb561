"""Block-sparse flash attention for Hopper GPUs in Gluon, Triton's lower level: forward and backward over block lists.

The kernels are in `forward_kernel.py` and `backward_kernel.py`, and of blocks that single queries chose the backward
one in `query_gather_kernel.py`, launched by `query_gather.py`. What they share is in `tiles.py` and `primitives.py`.
`views.py` says row orders as boxes of descriptors, `schedule.py` who does what, and `settings.py` what fits. `link.py`
does one pass of a chain. Chains are those of `triton_gpu`, whose kernels also do the passes that these cannot: this
package stands on that one.

This file alone is imported with the package; Triton is at the first call, for it takes a while and need not be there.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ....masks.bounded_cache import bounded_cache
from .. import triton_gpu
from ..call import Call, Operands, differentiable_once


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why this implementation cannot serve the call, or None."""
    from ..gpu import bridge, hardware

    reason = triton_gpu.unsupported(call, operands)
    if reason is not None:
        return reason
    device = hardware.local_device()
    assert isinstance(device, hardware.Device)
    if device.capability != 90:
        return f"it needs compute capability 9.0, and this GPU has {device.capability / 10}"
    if operands.query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, and query is {operands.query.dtype}"
    return bridge.gluon_unsupported()


def outdone(call: Call, operands: Operands) -> str | None:
    """Why another is the better choice, or None: plain Triton would do the whole forward pass, or fewer products."""
    from ..gpu import hardware
    from . import query_gather, settings

    if call.selection is not None and call.selection[1] < settings.TILE_ROWS:
        if query_gather.unserved(call, operands) is None:
            return None
        # Plain Triton's tiles have hardly more queries than choose together.
        return f"its tiles of {settings.TILE_ROWS} queries take all that any {call.selection[1]} of them chose"
    reasons = [forward for _, forward, _ in _left(call, _shapes(operands), hardware.local_device())]
    return reasons[0] if reasons and all(reasons) else None


def notes(call: Call, operands: Operands) -> list[str]:
    """What of a call is left to plain Triton, and why, in words."""
    from ..gpu import hardware

    found = _left(call, _shapes(operands), hardware.local_device())
    return [
        f"{orders}, {direction}: plain Triton, for {reason}"
        for orders, *reasons in found
        for direction, reason in zip(("forward", "backward"), reasons, strict=True)
        if reason
    ]


def _shapes(operands: Operands) -> Operands:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)


@bounded_cache()
def _left(call: Call, shapes: Operands, device: Any) -> tuple[tuple[str, str | None, str | None], ...]:
    """Of each pass the row orders, and why these kernels leave it to plain Triton, forward and backward, or None.

    ``device`` is the one at hand: reasons depend on it, and are kept.
    """
    from ..triton_gpu import chain
    from . import query_gather
    from .link import HopperLink

    links: list[Any] = [link for group in chain.groups(call, shapes, HopperLink) for link in group.links]
    by_choice = shapes.chosen is not None and query_gather.unserved(call, shapes) is None
    return tuple(
        (
            link.passes[0].orders if link.passes else "natural order",
            link.unserved("forward"),
            None if by_choice else link.unserved("dkv"),
        )
        for link in links
    )


@differentiable_once("hopper")
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention out [B, T, N, Hv] in the dtype of the query, and its lse [B, T, N] in float32."""
    from ..triton_gpu import chain
    from .link import HopperLink

    return chain.forward(call, operands, HopperLink)


@differentiable_once("hopper")
def backward(
    call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value, in their dtypes; see `xla.backward` for the arguments."""
    from ..triton_gpu import chain, kv_outer
    from . import query_gather
    from .link import HopperLink

    choices = kv_outer.Choices if query_gather.unserved(call, operands) else query_gather.HopperChoices
    return chain.backward(call, operands, lse, delta, dout, link_type=HopperLink, choices_type=choices)
