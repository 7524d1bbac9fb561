"""Sparse attention in maxdiffusion: a kernel for its registry, at the commit that README.md names.

from maxdiffusion.models.attention_flax import register_kernel

register_kernel("sparse")(sparse_kernel((21, 45, 80), "sliding_tile:kernel=3,tile=4x8x8"))
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl


@dataclasses.dataclass(frozen=True)
class Cubes:
    """Each cube of queries attends to its own cube and those of the largest products of mean query and mean key."""

    count: int  # cubes of keys, its own among them
    cube: tuple[int, int, int] = (4, 4, 4)

    def __post_init__(self):
        if math.prod(self.cube) > 64:
            raise ValueError(f"Cubes: cube must have at most 64 tokens, got {self.cube}")

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, grid: tuple[int, int, int]) -> jax.Array:
        """Returns attention [B, T, N, H] of q, k and v [B, T, N, H]."""
        t, (a, b, c) = math.prod(grid), self.cube
        counts = [-(-n // side) for n, side in zip(grid, self.cube, strict=True)]  # of cubes; the last ones may be cut
        tokens = np.full((counts[0] * a, counts[1] * b, counts[2] * c), t)  # t where there is no token
        tokens[tuple(map(slice, grid))] = np.arange(t).reshape(grid)
        tokens = tokens.reshape(counts[0], a, counts[1], b, counts[2], c)
        cubes = tokens.transpose(0, 2, 4, 1, 3, 5).reshape(-1, a * b * c)
        slots = np.pad(cubes, ((0, 0), (0, 64 - a * b * c)), constant_values=t).ravel()
        q, k, v = (jnp.take(x, slots, axis=1, mode="fill", fill_value=0) for x in (q, k, v))
        mean_q, mean_k = (sl.mean_pool_blocks(x.astype(jnp.float32), 64) for x in (q, k))  # times tokens / 64
        scores = jnp.einsum("bqnh,bknh->bqnk", mean_q, mean_k, precision="highest") / (cubes < t).sum(1)
        selection = sl.top_k_blocks(scores, self.count, block=64, granularity=64, causal=False, forced=sl.Window(0))
        ids = jnp.where(slots < t, 0, -1)[None].repeat(len(q), 0)
        out = sl.block_sparse_attention(q, k, v, sl.Full(), segment_ids=ids, selection=selection, scale=scale)
        return jnp.take(out, np.argsort(slots, kind="stable")[:t], axis=1)


def sparse_kernel(grid: tuple[int, int, int], pattern: Any) -> Any:
    """Returns an attention kernel for `register_kernel`: self-attention is sparse, cross-attention sees all keys.

    Args:
      grid: frames, height and width of the video in tokens.
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
                raise NotImplementedError("sparse_kernel: Cubes need attention_mask=None; use a preset for padding")
            return pattern.attend(q, k, v, scale, grid).reshape(batch, t, -1)
        ids = (
            None if mask is None else (np.zeros((batch, t), int), jnp.where(mask, 0, -1).repeat(batch // len(mask), 0))
        )
        allowed: Any = sl.Full() if is_cross else pattern
        return sl.block_sparse_attention(q, k, v, allowed, segment_ids=ids, scale=scale).reshape(batch, t, -1)

    return kernel
