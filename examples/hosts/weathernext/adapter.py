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
    nodes = None if vertices is None else sl.spatial_order(vertices)
    planned: dict[str, Any] = {"mask": None}  # the last mask and its plan: all layers of a model share one mask

    def order(length: int) -> np.ndarray:  # padding, which has no edges, follows the nodes
        return np.arange(length) if nodes is None else np.r_[nodes, len(nodes) : length]

    def plan_of(mask: Any, shape: tuple[int, int]) -> sl.Plan:
        if planned["mask"] is not mask:
            heads = [getattr(head, "mask", None) for head in getattr(mask, "masks", [])]
            if heads and any(head is None or head is not heads[0] for head in heads):
                raise NotImplementedError(f"mesh_attention: mask must be one WeatherMeshMask for all heads, got {mask}")
            edges: Any = scipy.sparse.csr_array(heads[0] if heads else np.asarray(mask)) != 0
            if edges.shape != shape:
                raise ValueError(f"mesh_attention: mask must have {shape} queries and keys, got {edges.shape}")
            if nodes is not None:
                if len(nodes) > min(shape):
                    raise ValueError(
                        f"mesh_attention: vertices must be those of the mask, got {len(nodes)} for {shape}"
                    )
                edges = edges[order(shape[0])][:, order(shape[1])]
            planned.update(mask=mask, plan=sl.make_plan(sl.from_csr(edges), *shape))
        return planned["plan"]

    def make_splash_mha(mask: Any, *_: Any, tanh_soft_cap: float | None = None, **__: Any) -> Callable[..., jax.Array]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:  # [N, T, H] and [N, S, H]; q is scaled
            plan = plan_of(mask, (q.shape[1], k.shape[1]))
            if nodes is not None:
                q, k, v = q[:, order(q.shape[1])], k[:, order(k.shape[1])], v[:, order(k.shape[1])]
            q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
            out = sl.block_sparse_attention(q, k, v, plan, scale=1.0, logits_soft_cap=tanh_soft_cap).swapaxes(0, 1)
            return out if nodes is None else out[:, np.argsort(order(q.shape[0]))]

        return attend

    return make_splash_mha
