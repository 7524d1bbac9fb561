"""The core of layers of experts, without a framework: routing, and the products with the selected experts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jax.sharding import AxisType, PartitionSpec

from ..ops.implementations import warn_once
from ..ops.kernels.experts_gpu import grouped_matmul
from ..ops.planning.platforms import platform
from ..ops.sharding import match_varying
from .activations import activate
from .core import Projection
from .mixture import MixtureOfExperts


class ExpertParams(NamedTuple):
    """The parameters of all experts: kernels [E, F, H], [E, F, H] and [E, H, F], and biases [E, H] or [E, F].

    The gate is None without a gated activation, and biases are None without biases.
    """

    in_kernel: jax.Array
    gate_kernel: jax.Array | None
    out_kernel: jax.Array
    in_bias: jax.Array | None = None
    gate_bias: jax.Array | None = None
    out_bias: jax.Array | None = None


def apply_mixture(
    mixture: MixtureOfExperts,
    router: Projection,
    params: ExpertParams,
    shared: tuple[Projection | None, Projection | None, Projection | None],
    x: jax.Array,
    dtype: Dtype | None,
) -> tuple[jax.Array, jax.Array]:
    """Routes tokens, and applies the selected and the shared experts.

    Args:
      mixture: the settings.
      router: the projection to logits [..., E].
      params: parameters of all experts.
      shared: projections of the shared expert, its input, gate and output; None for those that it lacks.
      x: [..., F].
      dtype: dtype of the computation; None for that of x and the parameters.

    Returns:
      (out [..., F], the load-balancing loss).
    """
    dtype = jnp.result_type(x, params.in_kernel) if dtype is None else dtype
    logits = router(x)
    weights, ids = mixture.route(logits)
    out = apply_experts(mixture, params, x, weights, ids, dtype)
    shared_in, shared_gate, shared_out = shared
    if shared_in is not None and shared_out is not None:
        gate = None if shared_gate is None else shared_gate(x)
        out = out + shared_out(activate(mixture.activation, shared_in(x), gate))
    return out, load_balancing_loss(logits, ids)


def load_balancing_loss(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns ``E * sum(f[e] * p[e])``, a float32 scalar: 1 if all experts are selected equally often.

    Args:
      logits: [..., E], whose softmax over all tokens has the mean p.
      ids: int [..., top_k], the selected experts; f is the share of each among all selections.
    """
    num_experts, token_axes = logits.shape[-1], tuple(range(logits.ndim - 1))
    p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).mean(token_axes)
    # Comparisons and sums, which Explicit axes of a mesh take; scatters they do not.
    is_selected = ids[..., None] == jnp.arange(num_experts)  # [..., top_k, E]
    f = is_selected.sum((*token_axes, ids.ndim - 1), dtype=jnp.int32).astype(jnp.float32) / ids.size
    return num_experts * (f * p).sum()


def apply_experts(
    mixture: MixtureOfExperts, params: ExpertParams, x: jax.Array, weights: jax.Array, ids: jax.Array, dtype: Dtype
) -> jax.Array:
    """Returns the weighted sum of the selected experts' outputs.

    Args:
      mixture: the settings.
      params: parameters of all experts.
      x: [..., F].
      weights: float32 [..., top_k].
      ids: int [..., top_k].
      dtype: dtype of the products and of the result.

    Returns:
      [..., F].

    Raises:
      ValueError: the current mesh has no axis of mixture's names, or more devices along expert_axis than divide E.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axis = mixture.expert_axis
    if axis is None or mesh.empty:
        return _apply(mixture, params, x, weights, ids, dtype)
    axes = (axis, *mixture.token_axes)
    missing = [name for name in axes if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"expert_axis and token_axes must be axes of the mesh, {tuple(mesh.shape)}, got {missing[0]!r}"
        )
    if mixture.num_experts % mesh.shape[axis]:
        raise ValueError(
            f"num_experts={mixture.num_experts} must be a multiple of the {mesh.shape[axis]} devices along "
            f"expert_axis={axis!r}"
        )

    def apply_local(params: ExpertParams, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        first_expert = jax.lax.axis_index(axis) * params.in_kernel.shape[0]
        return jax.lax.psum(_apply(mixture, params, x, weights, ids - first_expert, dtype), axis)

    divides = x.ndim > 1 and x.shape[0] % math.prod(mesh.shape[name] for name in mixture.token_axes) == 0
    tokens = PartitionSpec(mixture.token_axes if divides else None)
    specs = PartitionSpec(axis), tokens, tokens, tokens
    if AxisType.Explicit in mesh.axis_types:  # arrays are moved there as on Auto axes, if they lie elsewhere
        params = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, specs[0]), params)
        x, weights, ids = (jax.sharding.reshard(array, tokens) for array in (x, weights, ids))
    return jax.shard_map(apply_local, in_specs=specs, out_specs=tokens, axis_names={*axes})(params, x, weights, ids)


def _apply(
    mixture: MixtureOfExperts, params: ExpertParams, x: jax.Array, weights: jax.Array, ids: jax.Array, dtype: Dtype
) -> jax.Array:
    """Computes the experts in ``params``; ids outside of 0..E-1 are experts of other devices, which add 0."""
    # JAX loses the sum over devices in the gradient of a gather that varies over them, of rows that do not.
    params, x, weights, ids = match_varying((params, x, weights, ids), (params, x, weights, ids))
    num_experts = params.in_kernel.shape[0]
    rows = jnp.repeat(x.reshape(-1, x.shape[-1]).astype(dtype), mixture.top_k, axis=0)  # a row for each selection
    expert = ids.reshape(-1)
    has_expert = (expert >= 0) & (expert < num_experts)
    expert = jnp.where(has_expert, expert, num_experts)
    out = _compute_rows(mixture, params, rows, expert)
    out = jnp.where(has_expert[:, None], out.astype(jnp.float32), 0) * weights.reshape(-1, 1)
    return out.reshape(-1, mixture.top_k, x.shape[-1]).sum(1).astype(dtype).reshape(x.shape)


def _compute_rows(mixture: MixtureOfExperts, params: ExpertParams, rows: jax.Array, expert: jax.Array) -> jax.Array:
    """Applies the expert of each row to rows [M, F]; rows of expert E have an undefined result."""
    is_few = len(rows) <= params.in_kernel.shape[0]
    # ragged_dot reads the kernels of all experts, so few rows gather those of their experts instead.
    matmul = _gathered_matmul if is_few else _ragged_matmul
    if platform() == "gpu":
        reason = grouped_matmul.unsupported(rows, params.in_kernel)
        if reason is None:
            matmul = grouped_matmul.grouped_matmul
        else:
            warn_once(f"experts run without their kernel, which is slow on gpu: {reason}")

    def compute(rows: jax.Array, expert: jax.Array) -> jax.Array:
        def project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
            x = matmul(x, kernel, expert)
            return x if bias is None else x + bias.astype(x.dtype).at[expert].get(mode="clip")

        hidden = project(rows, params.in_kernel, params.in_bias)
        gate = None if params.gate_kernel is None else project(rows, params.gate_kernel, params.gate_bias)
        return project(activate(mixture.activation, hidden, gate), params.out_kernel, params.out_bias)

    def permuted(x: jax.Array, indices: jax.Array) -> jax.Array:
        return x.at[indices].get(mode="promise_in_bounds", unique_indices=True)

    if is_few:
        return compute(rows, expert)
    order = jnp.argsort(expert)
    return permuted(compute(permuted(rows, order), expert[order]), jnp.argsort(order))


def _ragged_matmul(x: jax.Array, kernel: jax.Array, expert: jax.Array) -> jax.Array:
    """Multiplies rows [M, in], sorted by expert, by the kernels of their experts; those of expert E come last."""
    # A row behind the last group may hold anything, and so may its gradient.
    is_grouped = (expert < len(kernel))[:, None]
    return jax.lax.ragged_dot(jnp.where(is_grouped, x, 0), kernel.astype(x.dtype), _count(expert, len(kernel)))


def _gathered_matmul(x: jax.Array, kernel: jax.Array, expert: jax.Array) -> jax.Array:
    """Multiplies rows [M, in] by copies of the kernels of their experts, which are never stored.

    XLA fuses the gather, the product and the sum, and so reads M kernels. It would store the operand of a dot.
    """
    kernels = kernel.at[expert].get(mode="clip").astype(x.dtype).astype(jnp.float32)  # [M, in, out]
    return (x.astype(jnp.float32)[:, :, None] * kernels).sum(1).astype(x.dtype)


def _count(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 [E], the number of times that each expert is in ids; ids >= E are not counted."""
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")
