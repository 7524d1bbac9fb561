"""The implementation "cudnn": dense, causal and sliding-window attention, by `jax.nn.dot_product_attention`.

For these masks alone, cuDNN's dense kernel is the faster one on NVIDIA GPUs. Its gradients differ from run to run in
their last bits, those of the Triton kernels do not. JAX differentiates it, so the backend has `attend` in the place of
forward and backward.
"""

import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ...masks.algebra import And, Mask
from ...masks.primitives import Causal, Full, Window
from ..planning.params import BwdParams, FwdParams
from ..planning.platforms import NARROW_HEAD_SIZE, gpu, platform
from .call import Call
from .operands import Operands
from .transforms import differentiable_once


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns the reason why cuDNN cannot compute the call, or None."""
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
    optional = {
        "order ids": operands.order_ids,
        "segment ids": operands.segments,
        "selections": operands.selection,
        "sinks": operands.sinks,
        "a soft cap": call.soft_cap,
    }
    for name, x in optional.items():
        if x is not None:
            return f"it does not know {name}"
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
    """Returns the reason why another implementation is the better choice, or None."""
    assert call.plan is not None
    band = _band(call.plan.masks[0])
    assert band is not None
    size = operands.query.shape[-1]
    if size <= NARROW_HEAD_SIZE and getattr(gpu(), "compute_capability", None) == "9.0":
        return f"Triton is faster with heads of {size} on Hopper GPUs"
    # Measured on an H200, forward and backward at T = 16384.
    min_keys_back = 1500 if size <= 64 else 400
    return f"Triton is faster on windows of at most {min_keys_back} keys" if band[0] < min_keys_back else None


def attend(call: Call, operands: Operands) -> jax.Array:
    """Returns out [B, T, N, Hv] in the dtype of the query.

    Before jax 0.11, JAX cannot map the gradient alone, as `jax.jacrev` does.
    """
    assert call.plan is not None
    band = _band(call.plan.masks[0])
    assert band is not None
    causal = band[1] == 0
    window = None if band[0] >= operands.query.shape[1] - 1 else (int(band[0]), 0)
    out = jax.nn.dot_product_attention(
        *_map_all_gradients(operands.query, operands.key, operands.value),
        scale=call.scale,
        is_causal=causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return _map_dout(out)


# --- jax.vmap: its rule for cuDNN requires all arrays mapped along their first axis ----------------------------------


@custom_vmap
def _map_all(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays; under `jax.vmap`, all of them mapped along axis 0 if one is."""
    return arrays


@_map_all.def_vmap
def _map_all_rule(size, is_mapped, *arrays):
    mapped = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in zip(arrays, is_mapped, strict=True)]
    return _map_all(*mapped), (True,) * len(mapped)


@jax.custom_vjp
def _map_all_gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return _map_all(*arrays)


@differentiable_once("cudnn")
def _once(_: None, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


_map_all_gradients.defvjp(lambda *arrays: (_map_all(*_once(None, arrays)), None), lambda _, gradients: gradients)


@jax.custom_vjp
def _map_dout(out: jax.Array) -> jax.Array:
    """Returns out; its gradient is mapped if out is."""
    return out


_map_dout.defvjp(lambda out: (out, out[:, :1, :1, :1]), lambda corner, dout: (_map_all(dout, corner)[0],))


def _band(mask: Mask) -> tuple[float, float] | None:
    """Returns (keys back, keys ahead) of a band that cuDNN supports, infinity for all keys; None for another mask."""
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
