"""The derivative of the op: a `jax.custom_vjp` around forward and backward of an implementation (a backend).

The forward pass saves out and the log-sum-exp (lse). The backward pass needs delta = sum(out * dout) besides, less the
gradient of lse, as d lse / d scores are the weights. With context parallelism a device computes several sub-calls, each
for some queries and some keys; results merge by lse, and every backward takes the lse of all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..masks.bounded_cache import PROGRAM_BYTES, bounded_cache
from . import lowering, shard_calls, sharding
from .implementations import IMPLEMENTATIONS, merges, pick_implementation
from .kernels.call import Call
from .kernels.numerics import reduced_lse, sinks_gradient
from .kernels.operands import Operands, by_name

# Names of out and lse for policies of `jax.checkpoint`: one that saves both does not compute the forward pass again.
CHECKPOINT_NAMES = ("sparse_attention_out", "sparse_attention_lse")


def jitted_attend(implementation: str, call: Call, query_sharding: Any, operands: Operands):
    """Computes `attend`, compiled once for each (implementation, call, sharding, shapes), also for eager callers."""
    return _program(implementation, call, query_sharding)(operands)


# A function of its own for each call: JAX forgets its traces and programs when the function is forgotten.
@bounded_cache(extra_bytes=PROGRAM_BYTES)
def _program(implementation: str, call: Call, query_sharding: Any) -> Callable[[Operands], Any]:
    return jax.jit(functools.partial(attend, implementation, call, query_sharding))


def attend(implementation: str, call: Call, query_sharding: Any, operands: Operands):
    """Computes (out, lse) of a call on all devices; lse is None for an implementation that JAX differentiates."""
    function = functools.partial(_attend_on_device, implementation, call)
    can_merge = _can_merge(implementation, call) and operands.selection is None
    computed_length = functools.partial(shard_calls.computed_length, call, can_merge)
    return sharding.over_known_axes(function, operands, query_sharding, computed_length)


class _SubCall(NamedTuple):
    """A call that a device computes: all of its own, or with context parallelism that of some queries and keys."""

    implementation: str
    call: Call
    home: shard_calls.QueryHome | None = None  # the device where its queries live, if that may be another one

    def send(self, x: jax.Array) -> jax.Array:
        """Sends an array by query to the device that computes."""
        return x if self.home is None else self.home.send(x)

    def return_(self, x: jax.Array) -> jax.Array:
        """Returns a result to the device where its queries live."""
        return x if self.home is None else self.home.return_(x)


def _attend_on_device(implementation: str, call: Call, shard: sharding.Shard | None, operands: Operands):
    operands = sharding.match_varying(operands, operands)
    if shard is None and implementation == "pallas_tpu":
        sharding.check_tpu_sharding(operands)
    sub_calls, sub_operands = [_SubCall(implementation, call)], [operands]
    if shard is not None and shard.sequence is not None:
        with_keys = [*shard_calls.split_call(call, shard, operands, can_merge=_can_merge(implementation, call))]
        name, is_whole = implementation if call.picked_for is None else None, len(with_keys) == 1
        sub_calls = [_SubCall(pick_implementation(name, x, arrays, is_whole), x, home) for x, home, arrays in with_keys]
        sub_operands = [arrays for *_, arrays in with_keys]
    backend = IMPLEMENTATIONS[sub_calls[0].implementation]
    if hasattr(backend, "attend"):  # JAX differentiates it
        args = sub_calls[0].call, sub_operands[0]
        return (backend.attend(*args) if shard is None else shard.call_backend(backend.attend, *args)), None
    # Entries of -inf of a table may hide all keys of a query.
    is_limited = any(x is not None for x in (operands.segments, operands.selection, operands.bias_table))
    has_no_empty_rows = not is_limited and call.plan is not None and call.plan.allows_diagonal
    return _attend(tuple(sub_calls), shard, has_no_empty_rows, tuple(sub_operands))


def _can_merge(implementation: str, call: Call) -> bool:
    """True if a device may compute several sub-calls; if no implementation was named, one that can merge is picked."""
    return merges(IMPLEMENTATIONS[implementation]) or call.picked_for is not None


def _run_backend(function: Callable[..., Any], call: Call, shard: sharding.Shard | None, *args: Any) -> Any:
    """Runs a backend's forward or backward on the device's shard if it is known, else by JAX's partitioner."""
    return (
        sharding.over_auto_axes(function, call, *args) if shard is None else shard.call_backend(function, call, *args)
    )


def _forward(
    sub_calls: tuple[_SubCall, ...],
    shard: sharding.Shard | None,
    has_no_empty_rows: bool,
    operands: tuple[Operands, ...],
):
    """Computes (out, lse) of a device's queries; ``has_no_empty_rows``: every query is known to see a key."""
    results: list[Any] = []
    for sub_call, arrays in zip(sub_calls, operands, strict=True):
        implementation, call, _ = sub_call
        if call.picked_for is not None:
            query = lowering.guard_platform(arrays.query, implementation, call.picked_for)
            arrays = arrays._replace(query=query)
        arrays = arrays._replace(query=_in_order(sub_calls, results, arrays.query))
        results.append(_run_backend(IMPLEMENTATIONS[implementation].forward, call, shard, arrays))
    results = [(x.return_(out), x.return_(lse)) for x, (out, lse) in zip(sub_calls, results, strict=True)]
    return results[0] if len(results) == 1 else shard_calls.merge_chunks([x.home for x in sub_calls], results)


def _in_order(sub_calls: tuple[_SubCall, ...], results: list[Any], x: jax.Array) -> jax.Array:
    """Returns an array of the next sub-call that is there once the last one is computed, if its queries travel.

    XLA would begin with a sub-call whose queries come from another device, or wait for results on their way home.
    """
    if results and (home := sub_calls[len(results) - 1].home) is not None and home.exchange.query_permutation:
        x, results[-1] = jax.lax.optimization_barrier((x, results[-1]))
    return x


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0, 1, 2))


def _attend_fwd(sub_calls, shard, has_no_empty_rows, operands):
    results = _forward(sub_calls, shard, has_no_empty_rows, operands)
    out, lse = (checkpoint_name(x, name) for x, name in zip(results, CHECKPOINT_NAMES, strict=True))
    return (out, lse), (operands, out, lse)


def _attend_bwd(sub_calls, shard, has_no_empty_rows, residuals, cotangents):
    operands, out, lse = residuals
    dout, dlse = cotangents
    sinks, is_dead = operands[0].sinks, lse == -jnp.inf
    if not has_no_empty_rows:
        # A query without keys is a constant: it has gradients 0 whatever its cotangents are, also NaN.
        dlse, dout = jnp.where(is_dead, 0, dlse), jnp.where(is_dead[..., None], 0, dout)
    lse = reduced_lse(lse)
    delta = (out.astype(lse.dtype) * dout.astype(lse.dtype)).sum(-1) - dlse
    results: list[Any] = []
    for sub_call, arrays in zip(sub_calls, operands, strict=True):
        *by_query, sent_dout = (sub_call.send(x) for x in (lse, delta, dout))
        by_query.append(_in_order(sub_calls, results, sent_dout))
        backward = IMPLEMENTATIONS[sub_call.implementation].backward
        results.append(_run_backend(backward, sub_call.call, shard, arrays, *by_query))
    gradients = [by_name(arrays, x._asdict()) for arrays, x in zip(operands, results, strict=True)]
    if sinks is not None:
        gradients[0] = gradients[0]._replace(sinks=sinks_gradient(sinks, lse, delta).astype(sinks.dtype))
    return (tuple(gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd)
