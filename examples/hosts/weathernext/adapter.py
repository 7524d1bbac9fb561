"""Sparse attention in WeatherNext (GenCast): its `splash_mha` on GPUs, at the commit that README.md names.

from weathernext.utils import sparse_transformer

sparse_transformer._make_splash_mha = mesh_attention()
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import scipy.sparse

import sparse_layers as sl


def mesh_attention(vertices: np.ndarray | None = None) -> Callable[..., Callable[..., jax.Array]]:
    """Returns a substitute for `_make_splash_mha`: attention over the edges of the mesh mask, the same in all heads.

    Args:
      vertices: [nodes, 3], the mesh's nodes in the model's order. Attention then sorts nodes by their places on the
        sphere, and its result back, so that fewer blocks are computed.
    """
    fits = vertices is None or (np.ndim(vertices) == 2 and np.shape(vertices)[1] == 3)
    check(fits, "vertices", vertices, "must be positions [nodes, 3]", "mesh.vertices[order], as README.md has it")
    nodes = None if vertices is None else sl.spatial_order(vertices)
    planned: dict[str, Any] = {"mask": ()}  # the last mask and its plan: all layers of a model share one mask

    def order(length: int) -> np.ndarray:  # padding, which has no edges, follows the nodes
        return np.arange(length) if nodes is None else np.r_[nodes, len(nodes) : length]

    def plan_of(mask: Any, shape: tuple[int, int]) -> sl.Plan:
        if planned["mask"] is not mask:
            heads = [getattr(head, "mask", None) for head in getattr(mask, "masks", [])] or [mask]
            rule = "must be one WeatherMeshMask for all heads"
            check(all(head is heads[0] for head in heads) and heads[0] is not None, "mask", mask, rule)
            edges: Any = heads[0] if scipy.sparse.issparse(heads[0]) else np.asarray(heads[0])
            check(edges.shape == shape, "mask", edges, f"must have {shape} queries and keys, the same for all heads")
            edges = scipy.sparse.csr_array(edges) != 0
            if nodes is not None:
                is_of_mask = len(nodes) <= min(shape)
                check(is_of_mask, "vertices", vertices, f"must be those of the mask, {shape}", "mesh.vertices[order]")
                edges = edges[order(shape[0])][:, order(shape[1])]
            planned.update(mask=mask, plan=sl.make_plan(sl.from_csr(edges), *shape))
        return planned["plan"]

    def make_splash_mha(mask: Any, *_: Any, tanh_soft_cap: float | None = None, **__: Any) -> Callable[..., jax.Array]:
        fits = tanh_soft_cap is None or tanh_soft_cap > 0
        check(fits, "tanh_soft_cap", tanh_soft_cap, "must be None or positive", "tanh_soft_cap=None")

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:  # [N, T, H] and [N, S, H]; q is scaled
            plan = plan_of(mask, (q.shape[1], k.shape[1]))
            if nodes is not None:
                q, k, v = q[:, order(q.shape[1])], k[:, order(k.shape[1])], v[:, order(k.shape[1])]
            q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
            out = sl.block_sparse_attention(q, k, v, plan, scale=1.0, logits_soft_cap=tanh_soft_cap).swapaxes(0, 1)
            return out if nodes is None else out[:, np.argsort(order(q.shape[0]))]

        return attend

    return make_splash_mha


def check(is_right: bool, name: str, value: Any, rule: str, instead: str = 'attention_type="mha"') -> None:
    """Raises an error that names the argument, its rule, its value or shape, and what to write instead."""
    if not is_right:
        got = getattr(value, "shape", None) or f"{value!r:.80}"
        raise ValueError(f"mesh_attention: {name} {rule}, got {got}; write {instead}")
