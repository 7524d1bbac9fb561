"""Sparse attention in maxdiffusion: a kernel for its registry, at the commit that README.md names.

from maxdiffusion.models.attention_flax import register_kernel

register_kernel("sparse")(sparse_kernel((21, 45, 80), "sliding_tile:kernel=3,tile=4x8x8"))
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl


@dataclasses.dataclass(frozen=True)
class Cubes:
    """A pattern chosen at run time: a cube of queries attends to ``count`` cubes of keys, its own among them.

    Each head selects the cubes with the largest product of mean query and mean key. A cube has at most 64 tokens.
    """

    count: int
    cube: tuple[int, int, int] = (4, 4, 4)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, grid: tuple[int, int, int]) -> jax.Array:
        """Returns attention [B, T, N, H] of q, k and v [B, T, N, H]."""
        axes = [-(-n // side) for n, side in zip(grid, self.cube, strict=True)]  # cubes on each axis; the last is cut
        tokens = np.full([n * side for n, side in zip(axes, self.cube, strict=True)], math.prod(grid))
        tokens[tuple(map(slice, grid))] = np.arange(math.prod(grid)).reshape(grid)
        tokens = tokens.reshape(axes[0], self.cube[0], axes[1], self.cube[1], axes[2], self.cube[2])
        cubes = tokens.transpose(0, 2, 4, 1, 3, 5).reshape(-1, math.prod(self.cube))
        slots = np.pad(cubes, ((0, 0), (0, 64 - cubes.shape[1])), constant_values=math.prod(grid))  # T in empty slots
        q, k, v = (jnp.take(x, slots.ravel(), axis=1, mode="fill", fill_value=0) for x in (q, k, v))
        mean_q, mean_k = (sl.mean_pool_blocks(x.astype(jnp.float32), 64) for x in (q, k))
        size = (cubes < math.prod(grid)).sum(1)
        scores = jnp.einsum("bqnh,bknh->bqnk", mean_q, mean_k, precision="highest") / size
        selection = sl.top_k_blocks(scores, self.count, block=64, granularity=64, causal=False, forced=sl.Window(0))
        ids = jnp.where(slots.ravel() < math.prod(grid), 0, -1)[None].repeat(len(q), 0)
        out = sl.block_sparse_attention(q, k, v, sl.Full(), segment_ids=ids, selection=selection, scale=scale)
        return jnp.take(out, np.argsort(slots.ravel(), kind="stable")[: math.prod(grid)], axis=1)


def sparse_kernel(grid: tuple[int, int, int], pattern: Any) -> Callable[..., jax.Array]:
    """Returns an attention kernel for `register_kernel`: self-attention is sparse, cross-attention sees all keys.

    Args:
      grid: frames, height and width of the video in tokens; self-attention has as many.
      pattern: a preset without its shape, such as ``"radial"``; a mask, or masks that heads take in turn; `Cubes`.
    """
    if isinstance(pattern, str):
        name, _, options = pattern.partition(":")
        pattern = sl.as_masks(f"{name}:shape={'x'.join(map(str, grid))}{options and ','}{options}")

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, context: dict[str, Any]) -> jax.Array:
        heads, scale, mask = context["heads"], context["scale"], context["attention_mask"]
        q, k, v = (x.swapaxes(1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
        (batch, t), s = q.shape[:2], k.shape[1]
        is_cross = s != t or any("cross_attn" in str(axis) for axis in context["axis_names_q"])
        if context.get("is_causal"):
            raise NotImplementedError("sparse_kernel: is_causal must be False, got True; use another attention kernel")
        if not is_cross and t != math.prod(grid):
            raise ValueError(f"sparse_kernel: grid must have the {t} tokens of self-attention, got {grid}")
        if mask is not None and mask.shape not in ((1, s), (batch, s)):
            raise ValueError(f"sparse_kernel: attention_mask must be [{batch}, {s}] or [1, {s}], got {mask.shape}")
        if isinstance(pattern, Cubes) and not is_cross:
            if mask is not None:
                raise NotImplementedError("sparse_kernel: Cubes need attention_mask=None; use a preset, or no padding")
            return pattern.attend(q, k, v, scale, grid).reshape(batch, t, -1)
        ids = (
            None if mask is None else (jnp.zeros((batch, t), int), jnp.broadcast_to(jnp.where(mask, 0, -1), (batch, s)))
        )
        allowed: Any = sl.Full() if is_cross else pattern
        return sl.block_sparse_attention(q, k, v, allowed, segment_ids=ids, scale=scale).reshape(batch, t, -1)

    return kernel
