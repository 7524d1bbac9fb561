"""Traced calls: which implementation serves a call, by which kernels, and why not by a preferred one.

The call is traced as on the device, where launches are recorded in place of being made. So what is said cannot
differ from what runs, and the GPU need not be there. Triton has to be installed, for its kernels are what is recorded.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..scorers import Scorer
from .implementations import IMPLEMENTATIONS, rank_implementations
from .kernels.call import Call
from .kernels.gpu import bridge, hardware
from .kernels.gpu_attention import ENGINES
from .kernels.operands import Operands
from .planning.plan import Plan
from .planning.platforms import assuming
from .planning.selection import Selection


class TracedCall(NamedTuple):
    """The implementation of a call, and its launches.

    Attributes:
      implementation: one of `implementations`.
      reasons: for each implementation that is preferred to it, why that one does not serve the call.
      forward: the launches of the forward pass in their order; () for implementations that launch no kernels of ours.
      backward: those of the backward pass.
      notes: for each pass that the implementation hands to another one, the reason.
    """

    implementation: str
    reasons: dict[str, str]
    forward: tuple[bridge.RecordedLaunch, ...]
    backward: tuple[bridge.RecordedLaunch, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """The implementation, and below it its launches, what it hands on, and why no preferred one serves the call."""
        lines = [repr(self.implementation)]
        for direction, launches in (("forward", self.forward), ("backward", self.backward)):
            if launches:
                lines.append(f"{direction}: {', then '.join(map(str, launches))}")
        lines += [*self.notes, *(f"not {name!r}: {reason}" for name, reason in self.reasons.items())]
        return "\n  ".join(lines)


def trace_call(
    plan: Plan,
    dtype: Any = jnp.bfloat16,
    head_size: int = 128,
    *,
    groups: int = 1,
    scorer: Scorer | None = None,
    segment_ids: bool = False,
    device: hardware.Device | None = None,
) -> TracedCall:
    """Traces a call with a plan, ``implementation=None``, one batch entry and 32 key heads of each mask.

    Args:
      plan: the plan, made for the device.
      dtype: of query, key and value.
      head_size: of query, key and value.
      groups: query heads of a key head.
      scorer: that selects blocks within the plan's masks, if one does.
      segment_ids: whether the calls have segment ids.
      device: the GPU, which need not be there; None for the device at hand.

    Raises:
      ModuleNotFoundError: a GPU is given, and Triton is not installed.
    """
    lengths, kv_heads, shaped = (plan.q_len, plan.kv_len), 32 * len(plan.masks), jax.ShapeDtypeStruct
    query, key = (
        shaped((1, t, n, head_size), dtype) for t, n in zip(lengths, (kv_heads * groups, kv_heads), strict=True)
    )
    arrays: dict[str, Any] = {"query": query, "key": key, "value": key}
    if segment_ids:
        arrays["segments"] = tuple(shaped((1, length), jnp.int32) for length in lengths)
    if scorer is not None and scorer.selects(plan.q_len):
        ids = shaped((1, plan.q_len, (query if scorer.per_query_head else key).shape[2], scorer.count), jnp.int32)
        arrays["selection"] = jax.eval_shape(functools.partial(Selection, block=scorer.block), ids)
    operands, params = Operands(**arrays), (plan.fwd_params, plan.bwd_params)
    call = Call(plan, (128, 128), (128, 128), params, 1.0, None)
    with assuming(device):
        name, reasons = rank_implementations(call, operands)
        notes = tuple(getattr(IMPLEMENTATIONS[name], "notes", lambda *_: [])(call, operands))
        return TracedCall(name, reasons, *trace_launches(name, call, operands), notes)


def trace_launches(
    implementation: str, call: Call, operands: Operands
) -> tuple[tuple[bridge.RecordedLaunch, ...], tuple[bridge.RecordedLaunch, ...]]:
    """Returns the launches of the forward and of the backward pass of a call, in their order.

    Where the device decides at run time between two ways, as for selections of single queries, both are there, with
    their conditions. The operands may be shapes.
    """
    backend, recorded = IMPLEMENTATIONS[implementation], []
    if implementation not in ENGINES:
        return (), ()

    def trace(operands):
        with bridge.record_launches() as forward:
            out, lse = backend.forward(call, operands)
        with bridge.record_launches() as backward:
            backend.backward(call, operands, lse, lse, out)
        recorded.extend((tuple(forward), tuple(backward)))

    jax.eval_shape(trace, operands)
    return recorded[0], recorded[1]
