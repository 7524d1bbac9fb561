"""Sparse attention in maxdiffusion: a kernel for its registry, at the commit that README.md names."""

import dataclasses
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
        fits = isinstance(self.count, int) and self.count >= 1 and is_grid(self.cube) and np.prod(self.cube) <= 64
        check(fits, "pattern", self, "must have integers >= 1, three in cube, of product <= 64", "Cubes(count=126)")

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, grid: tuple[int, int, int]) -> jax.Array:
        """Returns attention [B, T, N, H] of q, k and v [B, T, N, H]."""
        (x, y, z), (a, b, c), t = grid, self.cube, int(np.prod(grid))
        tokens = np.pad(np.arange(t).reshape(grid), ((0, -x % a), (0, -y % b), (0, -z % c)), constant_values=t)
        cubes = tokens.reshape(-(-x // a), a, -(-y // b), b, -1, c).transpose(0, 2, 4, 1, 3, 5)  # t: no token
        slots = np.pad(cubes.reshape(-1, a * b * c), ((0, 0), (0, 64 - a * b * c)), constant_values=t).ravel()
        q, k, v = (jnp.take(x, slots, axis=1, mode="fill", fill_value=0) for x in (q, k, v))
        mean_q, mean_k = (sl.mean_pool_blocks(x.astype(jnp.float32), 64) for x in (q, k))  # times tokens / 64
        scores = jnp.einsum("bqnh,bknh->bqnk", mean_q, mean_k, precision="highest") / (slots < t).reshape(-1, 64).sum(1)
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
    check(is_grid(grid), "grid", grid, "must be frames, height and width, integers >= 1", "grid=(21, 45, 80)")
    if isinstance(pattern, str):
        fits = "shape" in sl.preset_options(pattern.partition(":")[0]) and "shape=" not in pattern
        check(fits, "pattern", pattern, "must name a preset of grids, without its shape (see grid)", 'pattern="radial"')
        pattern += f"{',' if ':' in pattern else ':'}shape={'x'.join(map(str, grid))}"
    pattern = pattern if isinstance(pattern, Cubes) else sl.as_masks(pattern)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, context: dict[str, Any]) -> jax.Array:
        heads, scale, mask = context["heads"], context["scale"], context["attention_mask"]
        q, k, v = (x.swapaxes(1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
        batch, t, s = *q.shape[:2], k.shape[1]
        is_cross = s != t or any("cross_attn" in str(axis) for axis in context["axis_names_q"])
        check(not context.get("is_causal"), "is_causal", True, "must be False")
        check(is_cross or t == np.prod(grid), "grid", grid, f"must have the {t} tokens of self-attention")
        is_right = mask is None or mask.shape in ((1, s), (batch, s))
        check(is_right, "attention_mask", mask, f"must be [{batch}, {s}] or [1, {s}]")
        if isinstance(pattern, Cubes) and not is_cross:
            check(mask is None, "attention_mask", mask, "must be None with Cubes", "a preset, which takes it")
            return pattern.attend(q, k, v, scale, grid).reshape(batch, t, -1)
        ids = mask if mask is None else (np.zeros((batch, t), int), jnp.where(mask, 0, -1) + np.zeros((batch, 1), int))
        masks: Any = sl.Full() if is_cross else pattern
        return sl.block_sparse_attention(q, k, v, masks, segment_ids=ids, scale=scale).reshape(batch, t, -1)

    return kernel


def is_grid(sizes: Any) -> bool:
    """Returns True if these are three integers >= 1."""
    return isinstance(sizes, tuple | list) and len(sizes) == 3 and all(isinstance(n, int) and n >= 1 for n in sizes)


def check(is_right: Any, name: str, value: Any, rule: str, instead: str = "attention=dot_product") -> None:
    """Raises an error that names the argument, its rule, its value or shape, and what to write instead."""
    if not is_right:
        raise ValueError(f"sparse_kernel: {name} {rule}, got {getattr(value, 'shape', value)!r}; write {instead}")
