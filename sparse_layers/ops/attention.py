"""The op: validates once, picks an implementation, owns the only `jax.custom_vjp`."""

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from ..arguments.checks import checked, strict_kwargs
from ..arguments.foreign import BY_ENTRY, REVERSE_ONLY
from ..masks.adapters import MaskLike, by_entry
from ..masks.bounded_cache import PROGRAM_BYTES, bounded_cache
from . import layouts, lowering, shard_calls, sharding
from .kernels import cudnn, pallas_tpu, reference, xla
from .kernels.call import (
    Call,
    Operands,
    check_arrays,
    checked_array,
    checked_scalars,
    checked_segments,
    checked_selection,
    checked_sinks,
    lowered,
    swapped_hint,
)
from .kernels.gpu_attention import hopper, triton
from .kernels.operands import by_name, rows_of
from .planning.mask_info import masks_for
from .planning.params import BwdParams, FwdParams, checked_params
from .planning.plan import Plan, make_plan
from .planning.platforms import (
    FALLBACK,
    TUNING,
    candidates,
    checked_implementation,
    first_choice,
    platform,
)
from .planning.selection import Selection

_log = logging.getLogger(__name__)

# Names of out and lse for policies of `jax.checkpoint`: whoever keeps these two does not compute the forward twice.
SAVED = ("sparse_attention_out", "sparse_attention_lse")

# A new backend is one name here, and in platforms.py what it is tried for and how its block sizes are chosen.
IMPLEMENTATIONS = {
    "pallas_tpu": pallas_tpu,
    "hopper": hopper,
    "triton": triton,
    "cudnn": cudnn,
    "xla": xla,
    "reference": reference,
}


SegmentIds: TypeAlias = ArrayLike | tuple[ArrayLike, ArrayLike]


class _Options(TypedDict, total=False):
    """Types of what does not change the type of the result."""

    segment_ids: SegmentIds | None
    selection: Selection | None
    scale: float | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    fwd_params: FwdParams | None
    bwd_params: BwdParams | None
    implementation: str | None
    query_sharding: jax.sharding.PartitionSpec | None


@overload
def block_sparse_attention(
    query: jax.Array | np.ndarray,
    key: jax.Array | np.ndarray,
    value: jax.Array | np.ndarray,
    plan_or_mask: Plan | MaskLike,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def block_sparse_attention(
    query: jax.Array | np.ndarray,
    key: jax.Array | np.ndarray,
    value: jax.Array | np.ndarray,
    plan_or_mask: Plan | MaskLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def block_sparse_attention(
    query: jax.Array | np.ndarray,
    key: jax.Array | np.ndarray,
    value: jax.Array | np.ndarray,
    plan_or_mask: Plan | MaskLike,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@strict_kwargs
def block_sparse_attention(
    query: jax.Array | np.ndarray,
    key: jax.Array | np.ndarray,
    value: jax.Array | np.ndarray,
    plan_or_mask: Plan | MaskLike,
    *,
    segment_ids: SegmentIds | None = None,
    selection: Selection | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    query_sharding: jax.sharding.PartitionSpec | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Attention restricted to a mask, exact, with exact gradients, at the cost of the blocks that the mask touches.

    ``out[t] = sum_s softmax_s(scale * q[t] . k[s]) v[s]`` over the allowed s. A query with no allowed key has out 0,
    lse -inf (its sink's logit, if there are sinks) and gradients 0. Letters as in `jax.nn.dot_product_attention`.

    On several devices each computes its own batch entries and heads, as query is sharded; nothing is gathered, and
    only gradients of what devices share are summed. Devices that share a sequence exchange the keys that the mask
    needs, or queries and results, and give gradients back. Key and value are sharded alike; if the shards of heads do
    not divide K, each device holds all key heads. Masks and sinks go with their heads. Of meshes whose axes are
    Explicit this needs nothing; of those whose axes are all Auto neither on GPUs and CPUs, but on TPUs, whose
    compiler splits no kernels, ``query_sharding``. Auto axes beside others are left to JAX. Inside `jax.shard_map` N,
    K and the turn of masks are those of the heads at hand.

    Args:
      query: [B, T, N, H], float32, bfloat16 or float16 (float64 where enabled); or [T, N, H] without a batch.
      key: [B, S, K, H], same dtype. K divides N: query head n uses key head n // (N / K) (MHA, GQA, MQA).
      value: [B, S, K, Hv], same dtype; Hv may differ from H.
      plan_or_mask: a `Plan` of `make_plan`; a mask; a preset's name (``"sliding_window:window=64"``); a sequence of
        these that the heads take in turn (its length divides N); a numpy bool array [T, S], [1, T, S] or [N, T, S]; or
        a JAX bool array of the latter shapes, known at run time only. Query t and key s are at positions t and s: for
        S > T, `Causal` is aligned at the top left. Where the queries are the last of S, write ``Window(None, S - T)``.
      segment_ids: int array [B, T] when T == S, or a pair ([B, T], [B, S]). Tokens see only their own segment, and a
        negative id is padding: it attends to nothing. Blocks whose segments cannot meet are skipped at run time.
      selection: the key blocks that queries look at, chosen at run time, within the mask: a `Selection`. Lists then
        follow its blocks, not the block sizes and row orders of a plan.
      scale: factor on q . k; None means 1 / sqrt(H).
      logits_soft_cap: positive c: logits x become c * tanh(x / c).
      sinks: [N] logits of an imaginary key per head with value 0 (attention sinks), differentiable.
      fwd_params: block sizes and kernel settings of the forward pass; None leaves them to the library.
      bwd_params: the same for the backward pass.
      implementation: one of `implementations()`; None takes the best that serves the call on the platform of the mesh
        in force, else of JAX's default device. A program that is then lowered for another one, as by `jax.export`, is
        refused: trace it under a mesh of that platform's devices, also an abstract one, or name an implementation.
      return_lse: also return the log-sum-exp of the allowed logits, the sinks' among them.
      query_sharding: how query lies on the mesh in force if its axes are Auto, say ``PartitionSpec("data", "context",
        "heads")``, or of [T, N, H] ``PartitionSpec("context", "heads")``, with None where it is whole. It never
        changes the result; what does not lie so is moved, and axes that do not divide batch or heads are left out.
        With context parallelism, devices exchange the keys that the pattern needs: see `planning/exchanges.py`. None:
        JAX's partitioner finds out, in a program that cannot be serialized nor be found in JAX's persistent cache, and
        gathers sequences. Without effect where there is no mesh, or one of other axes. Under `jax.vmap`, leave it out:
        the axis that is mapped over would be gathered.

    Returns:
      out [B, T, N, Hv] in the dtype of query; with ``return_lse`` the pair (out, lse), both differentiable, with lse
      [B, T, N] in float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes, lengths, heads, ids, block sizes or names that do not fit, with the value and rule;
        arrays sharded over Explicit axes otherwise than by batch, tokens and heads; a query_sharding of other axes, of
        query or of the mesh, or none where TPU kernels need it; a spread sequence in which devices would share queries
        that choose together; on TPUs, block lists that exceed scalar memory, with their size.
      TypeError: ``plan_or_mask`` describes no mask; query, key or value is no array; selection is none; forward-mode
        differentiation, which JAX refuses in words of its own inside of `jax.jit`.
      NotImplementedError: the named implementation cannot serve the call, or has no second derivatives; says why.

    Warns:
      UserWarning: once a process, where axes look like [B, N, T, H], [B, T, features] or those of a mask [B, T, S].

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 300, 2, 16))
      >>> sl.block_sparse_attention(q, k, v, sl.Causal() & sl.Window(63)).shape
      (1, 300, 2, 16)

    References:
      Child et al. 2019, "Generating Long Sequences with Sparse Transformers" (the patterns); Dao 2023,
      "FlashAttention-2" (online softmax and its backward by blocks).
    """
    sharding.check_sharding(query_sharding, "query_sharding")
    query, key, value = (checked_array(*x) for x in (("query", query), ("key", key), ("value", value)))
    checked("return_lse", return_lse, bool)
    checked_implementation(implementation)
    check_arrays(query, key, value)
    unbatched, query_sharding = query.ndim == 3, sharding.add_batch_axis(query_sharding, query)
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    b, t, n, h = query.shape
    s = key.shape[1]
    scale, logits_soft_cap = checked_scalars(scale, logits_soft_cap, h)
    sinks = checked_sinks(sinks, n)
    tuned_for = implementation or first_choice(query.dtype, max(h, value.shape[-1]))
    plan, mask = _plan(plan_or_mask, b, t, s, n, fwd_params, bwd_params, tuned_for)
    params = (plan.fwd_params, plan.bwd_params) if plan else checked_params(fwd_params, bwd_params)
    tuned = TUNING[tuned_for]
    fwd, bwd = (
        (p.q_blocksize or default[0], p.kv_blocksize or default[1])
        for p, default in zip(params, (tuned.blocks[0], tuned.backward or tuned.blocks[0]), strict=True)
    )
    segments = checked_segments(segment_ids, () if unbatched else (b,), (t, s), n)
    chosen, sizes = _chosen(selection, query, key, unbatched)
    if segments is None and not isinstance(plan_or_mask, Plan | jax.Array | np.ndarray):  # nothing else says T
        layouts.warn_of_heads("block_sparse_attention", query.shape[unbatched:], key.shape[1:3])
    if not b:  # nothing is limited, and lists of each batch entry would be none
        segments = chosen = sizes = None
    call = Call(plan, fwd, bwd, params, scale, logits_soft_cap, return_lse, selection=sizes)
    operands = Operands(query, key, value, sinks, segments, mask, chosen)
    if implementation is None:
        call = dataclasses.replace(call, chosen_for=platform())
    lse: Any  # None if nobody asked for it
    name = pick_implementation(implementation, call, operands)
    try:
        out, lse = _jitted_attend(name, call, query_sharding, operands)
    except TypeError as error:  # JAX's, of any jax.custom_vjp
        if "forward-mode" in str(error):
            raise TypeError(REVERSE_ONLY) from error
        raise
    if unbatched:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out


def implementations() -> tuple[str, ...]:
    """The names that ``block_sparse_attention(implementation=)`` takes.

    Example:
      >>> import sparse_layers as sl
      >>> sl.implementations()
      ('pallas_tpu', 'hopper', 'triton', 'cudnn', 'xla', 'reference')
    """
    return tuple(IMPLEMENTATIONS)


# --- the derivative --------------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """What a device computes of a call: all of it, or of a sequence that is spread over devices a piece.

    Attributes:
      implementation: that computes it.
      call: the piece's, or the device's.
      home: where its queries live, if that may be elsewhere.
    """

    implementation: str
    call: Call
    home: shard_calls.QueryHome | None = None

    def send(self, x: jax.Array) -> jax.Array:
        return x if self.home is None else self.home.send(x)

    def return_(self, x: jax.Array) -> jax.Array:
        return x if self.home is None else self.home.return_(x)


def _run(implementation: str, call: Call, query_sharding: Any, operands: Operands):
    """(out, lse), or (out, None) of an implementation that JAX differentiates."""
    function, together = functools.partial(_on_device, implementation, call), (call.selection or (0, 1))[1]
    computed_length = functools.partial(shard_calls.computed_length, call, _can_merge(implementation, call))
    return sharding.over_known_axes(function, operands, query_sharding, together, computed_length)


def _on_device(implementation: str, call: Call, shard: sharding.Shard | None, operands: Operands):
    operands = sharding.match_varying(operands, operands)
    if shard is None and implementation == "pallas_tpu":
        sharding.check_tpu_sharding(operands)
    work, of_work = [_Work(implementation, call)], [operands]
    if shard is not None and shard.sequence is not None:
        found = [*shard_calls.split_call(call, shard, operands, can_merge=_can_merge(implementation, call))]
        named = implementation if call.chosen_for is None else None
        work = [_Work(pick_implementation(named, each, own, len(found) == 1), each, home) for each, home, own in found]
        of_work = [own for *_, own in found]
    if hasattr(IMPLEMENTATIONS[work[0].implementation], "attend"):
        attend, call, own = IMPLEMENTATIONS[work[0].implementation].attend, work[0].call, of_work[0]
        return (attend(call, own) if shard is None else shard.call_backend(attend, call, own)), None
    given = operands.segments is not None or operands.chosen is not None
    all_see = not given and call.plan is not None and call.plan.sees_itself
    return _attend(tuple(work), shard, all_see, tuple(of_work))


def _can_merge(implementation: str, call: Call) -> bool:
    """Whether parts of a call are computed each by its own; by whatever implementation, if none was named."""
    return _computes_parts(IMPLEMENTATIONS[implementation]) or call.chosen_for is not None


def _computes_parts(backend: Any) -> bool:
    """Whether results of parts of a call may be merged: there is lse, and a backward pass that takes that of all."""
    return getattr(backend, "COMPUTES_PARTS", not hasattr(backend, "attend"))


def _shared(function: Callable[..., Any], call: Call, shard: sharding.Shard | None, *args: Any) -> Any:
    """A backend's forward or backward: of this device's share, if one is known, otherwise for the partitioner."""
    return (
        sharding.over_auto_axes(function, call, *args) if shard is None else shard.call_backend(function, call, *args)
    )


def _forward(work: tuple[_Work, ...], shard: sharding.Shard | None, all_see: bool, operands: tuple[Operands, ...]):
    """(out, lse) of the pieces together; ``all_see``: whether it is known that every query sees a key."""
    found: list[Any] = []
    for each, own in zip(work, operands, strict=True):
        if each.call.chosen_for is not None:
            own = own._replace(query=lowering.chosen(own.query, each.implementation, each.call.chosen_for))
        own = own._replace(query=_in_turn(work, found, own.query))
        found.append(_shared(IMPLEMENTATIONS[each.implementation].forward, each.call, shard, own))
    found = [(each.return_(out), each.return_(lse)) for each, (out, lse) in zip(work, found, strict=True)]
    if len(found) == 1:
        return found[0]
    return shard_calls.merge_chunks([each.home for each in work], found)


def _in_turn(work: tuple[_Work, ...], found: list[Any], x: jax.Array) -> jax.Array:
    """x of the work after what was found; if queries of the last of that travel, x is there when they are computed.

    XLA would begin with a piece whose queries come from elsewhere, or wait for results that are on their way home.
    """
    if found and (before := work[len(found) - 1].home) is not None and before.exchange.query_moves:
        x, found[-1] = jax.lax.optimization_barrier((x, found[-1]))
    return x


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0, 1, 2))


def _attend_fwd(work, shard, all_see, operands):
    results = _forward(work, shard, all_see, operands)
    out, lse = (checkpoint_name(x, name) for x, name in zip(results, SAVED, strict=True))
    return (out, lse), (operands, out, lse)


def _attend_bwd(work, shard, all_see, residuals, cotangents):
    operands, out, lse = residuals
    dout, dlse = cotangents
    first, dead = operands[0], lse == -jnp.inf
    if not all_see:
        # A row that attends to nothing is a constant: whatever its cotangents are, also NaN, nothing may come of them.
        dlse, dout = jnp.where(dead, 0, dlse), jnp.where(dead[..., None], 0, dout)
    lse = lowered(lse)
    # d lse / d scores are the weights themselves, so the gradient of lse only shifts delta.
    delta = (out.astype(lse.dtype) * dout.astype(lse.dtype)).sum(-1) - dlse
    found: list[Any] = []
    for each, own in zip(work, operands, strict=True):
        *scalars, dout_there = (each.send(x) for x in (lse, delta, dout))
        by_query = *scalars, _in_turn(work, found, dout_there)
        found.append(_shared(IMPLEMENTATIONS[each.implementation].backward, each.call, shard, own, *by_query))
    gradients = [by_name(own, x._asdict()) for own, x in zip(operands, found, strict=True)]
    if first.sinks is not None:
        weight = jnp.exp(jnp.minimum(first.sinks.astype(lse.dtype)[None, None] - jnp.where(dead, 0, lse), 0))
        dsinks = -(weight * delta).sum((0, 1)).astype(first.sinks.dtype)
        gradients[0] = gradients[0]._replace(sinks=dsinks)
    return (tuple(gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _jitted_attend(implementation: str, call: Call, query_sharding: Any, operands: Operands):
    """`_run`, compiled once for each (implementation, call, sharding, shapes), also for eager callers."""
    return _program(implementation, call, query_sharding)(operands)


# A function of its own for each call: JAX forgets what it traced and compiled of a function when that is forgotten.
@bounded_cache(extra_bytes=PROGRAM_BYTES)
def _program(implementation: str, call: Call, query_sharding: Any) -> Callable[[Operands], Any]:
    return jax.jit(functools.partial(_run, implementation, call, query_sharding))


# --- validation ------------------------------------------------------------------------------------------------------


def pick_implementation(implementation: str | None, call: Call, operands: Operands, alone: bool = True) -> str:
    """The name of the implementation that will serve a call: the given one, or the first that can.

    One that computes no parts serves what is computed ``alone``.

    Raises:
      NotImplementedError: the given one cannot; says why.
    """
    if implementation is not None:
        reason = _unsupported(implementation, call, operands)
        if reason is not None:
            raise NotImplementedError(f"{implementation}: {reason}; implementation=None or 'xla' serves this call")
        return implementation
    here, (name, reasons) = platform(), ranked(call, operands, alone)
    _log.debug("block_sparse_attention runs %r%s", name, "".join(f"; {x}: {reason}" for x, reason in reasons.items()))
    if _log.isEnabledFor(logging.DEBUG) and hasattr(IMPLEMENTATIONS[name], "notes"):
        for note in IMPLEMENTATIONS[name].notes(call, operands):
            _log.debug("%r: %s", name, note)
    if name in FALLBACK and here != "cpu":
        told = [f"{other}: {reason}" for other, reason in reasons.items()] or [f"no kernels for {here} yet"]
        _warn_once(f"block_sparse_attention runs {name!r}, which is slow on {here}: {'; '.join(told)}")
    return name


def ranked(call: Call, operands: Operands, alone: bool = True) -> tuple[str, dict[str, str]]:
    """The implementation that ``implementation=None`` picks, and for each that comes before it the reason against it.

    It logs nothing, so that tools may ask, too.

    Raises:
      NotImplementedError: none can serve the call; says why.
    """
    reasons: dict[str, str] = {}
    for name in candidates(platform()):
        backend = IMPLEMENTATIONS[name]
        reason = _unsupported(name, call, operands)
        if reason is None and not alone and not _computes_parts(backend):
            reason = "it computes no part of a call"
        if reason is None and hasattr(backend, "outdone"):
            reason = backend.outdone(call, operands)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"no implementation can serve this call; {told}")


def _unsupported(implementation: str, call: Call, operands: Operands) -> str | None:
    """Returns why an implementation cannot serve a call, or None."""
    for row in rows_of(operands).values():
        if row.backends is not None and implementation not in row.backends:
            return f"it does not know {row.label}"
    return IMPLEMENTATIONS[implementation].unsupported(call, operands)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def _plan(plan_or_mask, b, t, s, n, fwd_params, bwd_params, implementation) -> tuple[Plan | None, jax.Array | None]:
    """The plan, or the run-time mask [heads, T, S]."""
    if isinstance(plan_or_mask, Plan):
        plan = plan_or_mask
        if fwd_params is not None or bwd_params is not None:
            raise ValueError(
                f"fwd_params and bwd_params belong to make_plan when a Plan is given, got {fwd_params} and {bwd_params}"
            )
    else:
        if isinstance(plan_or_mask, jax.Array | np.ndarray):
            shape = plan_or_mask.shape
            if plan_or_mask.dtype != bool or shape[-2:] != (t, s) or shape[:-2] not in ((), (1,), (n,)):
                by_batch = len(shape) > 2 and shape[0] == b and shape[-2:] == (t, s)
                raise ValueError(
                    f"mask must be a bool array [T, S], [1, T, S] or [N, T, S] with (T, S) = {(t, s)} and N = {n}, "
                    f"got {plan_or_mask.dtype} of shape {shape}{swapped_hint(t, n, shape[-2:][:1])}"
                    + f"; masks that differ by batch entry are {BY_ENTRY}"
                    * by_batch
                )
            layouts.warn_of_mask(shape, b, n)
        if isinstance(plan_or_mask, jax.Array):
            return None, plan_or_mask.reshape(-1, t, s)
        options = {"fwd_params": fwd_params, "bwd_params": bwd_params, "implementation": implementation}
        plan = make_plan(masks_for(plan_or_mask, t, s, "plan_or_mask"), t, s, **options)
    if (plan.q_len, plan.kv_len) != (t, s):
        raise ValueError(
            f"the plan is for q_len {plan.q_len} and kv_len {plan.kv_len}, but query and key have T = {t} and S = {s}; "
            f"axes are [B, T, N, H] and [B, S, K, H]{swapped_hint(t, n, (plan.q_len,))}"
        )
    if n % len(plan.masks):
        raise ValueError(
            f"the number of masks must divide the query heads, got {len(plan.masks)} masks and N = {n}"
            + by_entry(plan.masks)
        )
    layouts.warn_of_entries(plan.masks, b)
    return plan, None


def _chosen(selection, query, key, unbatched) -> tuple[jax.Array | None, tuple[int, int] | None]:
    """The ids of a selection [B, Tq, G, k], and its sizes."""
    if selection is None:
        return None, None
    (b, t, n, _), (s, k) = query.shape, key.shape[1:3]
    ids = checked_selection(selection, () if unbatched else (b,), (t, s), (n, k))
    return ids.reshape(b, *ids.shape[-3:]), (selection.block, selection.granularity)
