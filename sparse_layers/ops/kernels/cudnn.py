"""Dense, causal and sliding-window attention by cuDNN, through `jax.nn.dot_product_attention`.

Where nothing else is asked for, a vendor's dense kernel is the faster one on NVIDIA GPUs. Its gradients differ from run
to run in their last bits, those of Triton's kernels do not. JAX differentiates it, so there is `attend` in place of
forward and backward.
"""

import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ...masks.algebra import And, Mask
from ...masks.primitives import Causal, Full, Window
from ..planning.params import BwdParams, FwdParams
from ..planning.platforms import gpu, platform
from .call import Call
from .operands import Operands
from .transforms import differentiable_once


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why this implementation cannot serve the call, or None."""
    query, value = operands.query, operands.value
    if platform() != "gpu":
        return f"it needs an NVIDIA GPU, and JAX computes on {platform()}"
    device = gpu()
    if device is None:
        return "it needs an NVIDIA GPU at hand, and JAX finds none"
    capability = str(getattr(device, "compute_capability", ""))
    if "." not in capability or float(capability) < 8:
        return f"it needs an NVIDIA GPU of compute capability 8.0, and this is {capability or 'none of NVIDIA'}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, and query is {query.dtype}"
    extras = {
        "segment ids": operands.segments,
        "selections": operands.selection,
        "sinks": operands.sinks,
        "a soft cap": call.soft_cap,
    }
    for what, given in extras.items():
        if given is not None:
            return f"it does not know {what}"
    if call.params[1].deterministic:
        return "its gradients differ from run to run in their last bits"
    if call.params != (FwdParams(), BwdParams()):
        return "it takes no settings"
    if call.return_lse:
        return "it does not return the log-sum-exp"
    masks = call.plan.masks if call.plan is not None else ()
    if len(masks) != 1 or _band(masks[0]) is None:
        return "it knows dense, causal and sliding-window masks only, the same for all heads"
    if not query.size:
        return "it needs at least one batch entry"
    if query.shape[1] != operands.key.shape[1] or query.shape[1] % 2:
        return f"it needs as many keys as queries, and an even number, got {query.shape[1]} and {operands.key.shape[1]}"
    if capability == "10.3":
        return "it needs cuDNN 9.11 on GPUs of compute capability 10.3, and which one there is cannot be asked for"
    largest = 256 if float(capability) >= 9 else 128
    if query.shape[-1] != value.shape[-1] or query.shape[-1] % 8 or query.shape[-1] > largest:
        return f"it needs one head size, a multiple of 8 up to {largest}, got {query.shape[-1]} and {value.shape[-1]}"
    return None


def not_preferred(call: Call, operands: Operands) -> str | None:
    """Why another implementation is the better choice for a call that this one could serve, or None."""
    assert call.plan is not None
    left = (_band(call.plan.masks[0]) or (0, 0))[0]
    # Measured on an H200, forward and backward at T = 16384 (README).
    least = 1500 if operands.query.shape[-1] <= 64 else 400
    return f"Triton is faster on windows of less than {least} keys" if left < least else None


def attend(call: Call, operands: Operands) -> jax.Array:
    """Attention out [B, T, N, Hv] in the dtype of the query.

    Before jax 0.11, JAX cannot map the gradient alone, as `jax.jacrev` does.
    """
    assert call.plan is not None
    band = _band(call.plan.masks[0])
    assert band is not None
    causal = band[1] == 0
    window = None if band[0] >= operands.query.shape[1] - 1 else (int(band[0]), 0)
    out = jax.nn.dot_product_attention(
        *_together(operands.query, operands.key, operands.value),
        scale=call.scale,
        is_causal=causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return _with_gradient(out)


# --- under jax.vmap, whose rule for cuDNN wants all arrays mapped, along their first axis ----------------------------


@custom_vmap
def _mapped_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays; under `jax.vmap`, all of them mapped along axis 0 if any is."""
    return arrays


@_mapped_alike.def_vmap
def _mapped_alike_rule(size, mapped, *arrays):
    whole = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in zip(arrays, mapped, strict=True)]
    return _mapped_alike(*whole), (True,) * len(whole)


@jax.custom_vjp
def _together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return _mapped_alike(*arrays)


@differentiable_once("cudnn")
def _once(_: None, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


_together.defvjp(lambda *arrays: (_mapped_alike(*_once(None, arrays)), None), lambda _, gradients: gradients)


@jax.custom_vjp
def _with_gradient(out: jax.Array) -> jax.Array:
    """``out``, whose gradient comes back mapped if out is."""
    return out


_with_gradient.defvjp(lambda out: (out, out[:, :1, :1, :1]), lambda part, gradient: (_mapped_alike(gradient, part)[0],))


def _band(mask: Mask) -> tuple[float, float] | None:
    """(keys back, keys ahead) that a mask allows if it is a band that cuDNN knows, infinity for all; else None."""
    band = _reach(mask)
    return band if band is not None and (band[1] == 0 or band == (math.inf, math.inf)) else None


def _reach(mask: Mask) -> tuple[float, float] | None:
    if isinstance(mask, Full):
        return math.inf, math.inf
    if isinstance(mask, Causal):
        return math.inf, 0
    if isinstance(mask, Window):
        return (math.inf if mask.left is None else mask.left), (math.inf if mask.right is None else mask.right)
    if isinstance(mask, And):
        left, right = _reach(mask.left), _reach(mask.right)
        return None if left is None or right is None else (min(left[0], right[0]), min(left[1], right[1]))
    return None
