"""Traced calls: which implementation computes a call, by which kernels, and why not by a preferred one.

The call is traced as on the device, where launches are recorded in place of being made. So what is said cannot
differ from what runs, and the GPU need not be there. Triton has to be installed, for its kernels are what is recorded.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..scorers import Scorer
from .implementations import IMPLEMENTATIONS, pick_implementation, rank_implementations
from .kernels.call import Call
from .kernels.distance_bias import DistanceBias, checked_bias
from .kernels.gpu import bridge, hardware
from .kernels.gpu_attention import ENGINES
from .kernels.operands import Operands
from .kernels.validation import checked_scalars
from .planning.plan import Plan
from .planning.platforms import assume_gpu
from .planning.selection import Selection

# Heads of a call whose heads are not known.
ASSUMED_HEADS = 32


class TracedCall(NamedTuple):
    """The implementation of a call, and its launches."""

    implementation: str  # one of `implementations`
    # For each implementation that is preferred to it, why that one does not support the call; {} if the call names its
    # implementation.
    reasons: dict[str, str]
    # The launches of the forward pass in their order; () for implementations that launch no kernels of ours.
    forward: tuple[bridge.RecordedLaunch, ...]
    backward: tuple[bridge.RecordedLaunch, ...]  # those of the backward pass
    # Sentences about the launches: why some are not the implementation's own, and which ones are not listed.
    notes: tuple[str, ...]
    # The message of the NotImplementedError that the call raises if the implementation that it names is unsupported.
    error: str | None = None
    plan: Plan | None = None  # the plan that runs, if the implementation may plan anew; None for that of the call

    def __str__(self) -> str:
        """The implementation, then its launches, what it hands on, and why no preferred one supports the call."""
        if self.error is not None:
            return f"NotImplementedError, {self.error}"
        lines = [repr(self.implementation)]
        for direction, launches in (("forward", self.forward), ("backward", self.backward)):
            if launches:
                lines.append(f"{direction}: {', then '.join(map(str, launches))}")
        lines += [*self.notes, *(f"not {name!r}: {reason}" for name, reason in self.reasons.items())]
        return "\n  ".join(lines)


def assumed_heads(plan: Plan) -> int:
    """Returns the query and key heads of a call whose heads are not known: a multiple of the plan's masks.

    Example:
      >>> import sparse_layers as sl
      >>> window = [sl.Causal() & sl.Window(left) for left in range(5)]
      >>> assumed_heads(sl.make_plan(sl.Causal(), 64)), assumed_heads(sl.make_plan(window, 64))
      (32, 35)
    """
    period = len(plan.masks)
    return period * -(-ASSUMED_HEADS // period)


def trace_call(
    plan: Plan,
    dtype: Any = jnp.bfloat16,
    head_size: int = 128,
    *,
    heads: tuple[int, int] | None = None,
    scorer: Scorer | None = None,
    segment_ids: bool = False,
    sinks: bool = False,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    recompute: bool = False,
    bias: DistanceBias | None = None,
    device: hardware.Device | None = None,
) -> TracedCall:
    """Traces a call with a plan, which was made for the device, and one batch entry.

    ``heads`` are query heads and key heads; None for `assumed_heads` of both. With ``recompute``, the backward pass
    computes the forward pass again. The table of ``bias`` may be a shape. The GPU ``device`` need not be there; None
    for the device at hand.
    """
    if device is not None:
        bridge.check_triton()
    lengths, (num_heads, kv_heads) = (plan.q_len, plan.kv_len), heads or (assumed_heads(plan),) * 2
    shaped = jax.ShapeDtypeStruct
    query, key = (
        shaped((1, length, n, head_size), dtype) for length, n in zip(lengths, (num_heads, kv_heads), strict=True)
    )
    arrays: dict[str, Any] = {"query": query, "key": key, "value": key}
    if segment_ids:
        arrays["segments"] = tuple(shaped((1, length), jnp.int32) for length in lengths)
    if sinks:
        arrays["sinks"] = shaped((num_heads,), jnp.float32)
    if scorer is not None and scorer.selects(plan.q_len):
        ids = shaped((1, plan.q_len, (query if scorer.per_query_head else key).shape[2], scorer.count), jnp.int32)
        arrays["selection"] = jax.eval_shape(functools.partial(Selection, block=scorer.block), ids)
    bias_options: dict[str, Any] = {}

    def bias_arrays(bias: DistanceBias | None) -> tuple[jax.Array | None, jax.Array | None]:
        arrays, options = checked_bias(bias, num_heads, lengths, dtype)
        bias_options.update(options)
        return arrays

    arrays["bias_table"], arrays["bias_slopes"] = jax.eval_shape(bias_arrays, bias)
    operands, params = Operands(**arrays), (plan.fwd_params, plan.bwd_params)
    scalars = checked_scalars(scale, logits_soft_cap, head_size)
    call = Call(plan, (128, 128), (128, 128), params, *scalars, **bias_options)
    with assume_gpu(device):
        name, reasons = implementation, {}
        if name is None:
            name, reasons = rank_implementations(call, operands)
        else:
            try:
                pick_implementation(name, call, operands)
            except NotImplementedError as error:
                return TracedCall(name, {}, (), (), (), str(error))
        backend = IMPLEMENTATIONS[name]
        notes = list(backend.notes(call, operands)) if hasattr(backend, "notes") else []
        run_plan = backend.planned(call, operands) if hasattr(backend, "planned") else None
        if scorer is not None and operands.selection is not None:
            notes += _notes_of(scorer)
        if recompute:
            notes.append("the forward pass runs once more before the backward pass, which recomputes it")
        return TracedCall(name, reasons, *trace_launches(name, call, operands), tuple(notes), plan=run_plan)


def _notes_of(scorer: Scorer) -> list[str]:
    """Sentences about the launches of a layer that are not those of its call of the op."""
    notes = ["the launches that score and choose blocks come before these and are not listed"]
    if scorer.indexed:
        notes.append("the launches of the index loss, in training, are not listed either")
    return notes


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
