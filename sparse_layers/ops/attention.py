"""The op: it checks its arguments once, picks an implementation, and computes attention over a pattern."""

import dataclasses
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from ..arguments.checks import checked, strict_kwargs
from ..arguments.foreign import BY_ENTRY, REVERSE_ONLY
from ..masks.adapters import MaskLike, by_entry
from . import layouts, sharding
from .custom_vjp import jitted_attend
from .implementations import pick_implementation
from .kernels.call import Call
from .kernels.distance_bias import DistanceBias, checked_bias
from .kernels.operands import Operands
from .kernels.validation import (
    check_arrays,
    checked_array,
    checked_scalars,
    checked_selection,
    checked_sinks,
    checked_visibility,
    swapped_hint,
)
from .planning.binding import masks_for_lengths
from .planning.params import BwdParams, FwdParams, resolve_params
from .planning.plan import Plan
from .planning.planner import make_plan
from .planning.platforms import TUNING, check_implementation, default_implementation, platform
from .planning.selection import Selection
from .recorded_calls import mark_call

TokenIds: TypeAlias = ArrayLike | tuple[ArrayLike, ArrayLike]


class _Options(TypedDict, total=False):
    """The types of the arguments that do not change the type of the result."""

    segment_ids: TokenIds | None
    order_ids: TokenIds | None
    selection: Selection | None
    scale: float | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    bias: DistanceBias | None
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
    segment_ids: TokenIds | None = None,
    order_ids: TokenIds | None = None,
    selection: Selection | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    bias: DistanceBias | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    query_sharding: jax.sharding.PartitionSpec | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Computes exact attention under a mask, with exact gradients, in time proportional to the blocks of the mask.

    ``out[t] = sum_s softmax_s(scale * q[t] . k[s]) v[s]`` over the allowed s. A query without allowed keys has out 0,
    lse -inf (the logit of its sink, if there are sinks) and gradients 0. Letters as in `jax.nn.dot_product_attention`.

    On several devices, each computes the batch entries and heads of its shard of query. Nothing is gathered, and only
    gradients of what devices share are summed. With context parallelism, devices exchange the keys that the mask
    needs, or queries and results, and return their gradients. Key and value are sharded as query is. If the shards of
    heads do not divide K, each device holds all key heads. Masks and sinks follow their heads.

    Meshes with Explicit axes need no further argument. On GPUs and CPUs, meshes with Auto axes alone need none either;
    on TPUs, whose compiler cannot split kernels, they need ``query_sharding``. In a mesh of both kinds, Auto axes are
    left to JAX. Inside `jax.shard_map`, N and K count the local heads, and the local heads take the masks in turn.

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
      order_ids: int array [B, T] when T == S, or a pair ([B, T], [B, S]). A key is visible if its id is at most that of
        the query, within the segments and the mask; with `Full`, ids 0, 1, 2, ... are causal. So masks may differ by
        batch entry: prefixes by `prefix_order`, spans of images by `span_order`, blocks by `block_order`. Ids may be
        any integers, in any order. Blocks that no query sees are skipped at run time.
      selection: a `Selection`: the key blocks that queries attend to within the mask, made at run time. Block lists
        then have its blocks, not the block sizes and row orders of a plan.
      scale: factor on q . k; None means 1 / sqrt(H).
      logits_soft_cap: positive c: logits x become c * tanh(x / c).
      sinks: [N] logits, differentiable, of a key of each head that has value 0 (attention sinks).
      bias: a `DistanceBias`, which adds to each logit a number by head and distance, before the soft cap: `alibi`,
        `t5_bias` or a learned table, which gets its gradient. Not on ``cudnn``.
      fwd_params: block sizes and kernel settings of the forward pass; None leaves them to the library.
      bwd_params: the same for the backward pass.
      implementation: one of `implementations()`. None picks the best one that supports the call on the platform of the
        mesh in force, else of JAX's default device. A program that is then lowered for another platform, as by
        `jax.export`, is refused: trace it under a mesh of that platform's devices, also an abstract one, or name an
        implementation.
      return_lse: also return the log-sum-exp of the allowed logits and the sinks.
      query_sharding: the sharding of query on a mesh in force with Auto axes, such as ``PartitionSpec("data",
        "context", "heads")``, or ``PartitionSpec("context", "heads")`` for [T, N, H]; None stands for an axis that is
        not sharded. It never changes the result: arrays with another sharding are moved, and mesh axes that do not
        divide batch or heads are left out. With context parallelism, devices exchange the keys that the pattern needs:
        see `planning/exchanges.py`. Without the argument, JAX's partitioner finds the sharding and gathers sequences;
        such a program cannot be serialized, nor found in JAX's persistent cache. The argument has no effect without
        a mesh or on a mesh of other axes. Do not give it under `jax.vmap`: the mapped axis would be gathered.

    Returns:
      out [B, T, N, Hv] in the dtype of query; with ``return_lse`` the pair (out, lse), both differentiable, with lse
      [B, T, N] in float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes, lengths, heads, ids, block sizes or names that do not fit, with the value and rule;
        arrays sharded over Explicit axes other than batch, tokens and heads; a query_sharding with other axes, of
        query or of the mesh, or None where TPU kernels need it; context parallelism with queries on two devices that
        select together; on TPUs, block lists that exceed scalar memory, with their size.
      TypeError: ``plan_or_mask`` describes no mask; query, key or value is no array; selection is no `Selection`, bias
        no `DistanceBias`; forward-mode differentiation, for which JAX raises an error of its own inside of `jax.jit`.
      NotImplementedError: the named implementation does not support the call, or has no second derivatives.

    Warns:
      UserWarning: once a process, if axes look like [B, N, T, H], [B, T, features] or those of a mask [B, T, S].

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
    check_implementation(implementation)
    check_arrays(query, key, value)
    is_unbatched, query_sharding = query.ndim == 3, sharding.add_batch_axis(query_sharding, query)
    if is_unbatched:
        query, key, value = query[None], key[None], value[None]
    (b, t, n, h), s = query.shape, key.shape[1]
    scale, logits_soft_cap = checked_scalars(scale, logits_soft_cap, h)
    sinks = checked_sinks(sinks, n)
    bias_arrays, bias_options = checked_bias(bias, n, (t, s), query.dtype)
    tuned_for = implementation or default_implementation(query.dtype, max(h, value.shape[-1]))
    plan, mask = _plan(plan_or_mask, b, t, s, n, fwd_params, bwd_params, tuned_for)
    params = (plan.fwd_params, plan.bwd_params) if plan else resolve_params(fwd_params, bwd_params)
    batch = () if is_unbatched else (b,)
    segments, order_id_pair = checked_visibility(segment_ids, order_ids, batch, (t, s), n)
    selection = _checked_selection(selection, query, key, is_unbatched)
    if segments is None and not isinstance(plan_or_mask, Plan | jax.Array | np.ndarray):  # these say T
        layouts.warn_of_heads("block_sparse_attention", query.shape[is_unbatched:], key.shape[1:3])
    if not b:  # there would be no block lists
        segments = order_id_pair = selection = None
    call = Call(plan, *_block_shapes(params, tuned_for), params, scale, logits_soft_cap, return_lse, **bias_options)
    operands = Operands(query, key, value, sinks, segments, order_id_pair, mask, selection, *bias_arrays)
    if implementation is None:
        call = dataclasses.replace(call, picked_for=platform())
    lse: Any  # None if JAX differentiates the implementation
    name = pick_implementation(implementation, call, operands)
    try:
        with mark_call(implementation=name, call=call, operands=operands):
            out, lse = jitted_attend(name, call, query_sharding, operands)
    except TypeError as error:  # JAX raises it for any jax.custom_vjp
        if "forward-mode" in str(error):
            raise TypeError(REVERSE_ONLY) from error
        raise
    if is_unbatched:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out


# --- arguments -------------------------------------------------------------------------------------------------------


def _plan(plan_or_mask, b, t, s, n, fwd_params, bwd_params, implementation) -> tuple[Plan | None, jax.Array | None]:
    """Returns (plan, None), or (None, mask [heads, T, S]) for a run-time mask."""
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
        plan = make_plan(masks_for_lengths(plan_or_mask, t, s, "plan_or_mask"), t, s, **options)
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


def _block_shapes(params: tuple[FwdParams, BwdParams], implementation: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the block shapes of forward and backward lists, where no plan has them."""
    tuned = TUNING[implementation]
    (q_size, kv_size), (bwd_q_size, bwd_kv_size) = tuned.block_shapes[0], tuned.bwd_block_shape or tuned.block_shapes[0]
    fwd, bwd = params
    bwd_shape = bwd.q_blocksize or bwd_q_size, bwd.kv_blocksize or bwd_kv_size
    return (fwd.q_blocksize or q_size, fwd.kv_blocksize or kv_size), bwd_shape


def _checked_selection(selection: Any, query: jax.Array, key: jax.Array, is_unbatched: bool) -> Selection | None:
    """Returns a checked selection with ids [B, Tq, G, k]."""
    if selection is None:
        return None
    (b, t, n, _), (s, k) = query.shape, key.shape[1:3]
    ids = checked_selection(selection, () if is_unbatched else (b,), (t, s), (n, k))
    return jax.tree.map(lambda _: ids.reshape(b, *ids.shape[-3:]), selection)
