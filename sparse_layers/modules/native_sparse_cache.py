"""`NSACache`: what `NativeSparseAttention` keeps of the tokens that it has read."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..masks.primitives import Causal, Window
from ..masks.serialization import register_node
from ..ops.decoding.cache import KVCache
from ..ops.planning.selection import Selection
from ..scorers import NSA


@register_node
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["recent", "windows", "blocks", "near"],
    meta_fields=["pattern"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class NSACache:
    """Keys and values of the three branches of `NativeSparseAttention`; a pytree.

    Attributes:
      recent: keys and values of the first branch that are not compressed for good yet, [B, R, K, H] each: those of the
        last tokens, token t in row t % R.
      windows: compressed keys and values; a position is the number of a window.
      blocks, near: keys and values of the selected branch and of the sliding window.
      pattern: the sizes.
    """

    recent: tuple[jax.Array, ...]
    windows: KVCache
    blocks: KVCache
    near: KVCache
    pattern: NSA

    @property
    def seq_len(self) -> int:
        return self.blocks.seq_len

    @property
    def batch(self) -> int:
        return self.blocks.batch

    @property
    def num_heads(self) -> int:
        return self.blocks.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.blocks.num_kv_heads

    @classmethod
    def filled(
        cls, nsa: NSA, seq_len: int, lengths: jax.Array, keys: Any, values: Any, key: Any, value: Any, **heads: Any
    ) -> "NSACache":
        """The cache after prompts of these lengths: keys and values of each branch, and those of windows."""
        size, stride = nsa.window

        def kept(mask: Any, most: int, key: jax.Array, value: jax.Array, lengths: jax.Array) -> KVCache:
            sizes: dict[str, Any] = {"batch": len(key), "head_size": key.shape[-1], "dtype": key.dtype}
            return KVCache.empty(mask, most, **sizes, **heads).filled(key, value, lengths)

        rows, last = size + stride - 1, lengths[:, None] - 1  # so many hold the last full window, whenever it ended
        token = (last - (last - jnp.arange(rows)[None]) % rows)[..., None, None]
        found = (jnp.take_along_axis(x, jnp.maximum(token, 0), axis=1) for x in (keys[0], values[0]))
        full = jnp.maximum((lengths - size) // stride + 1, 0)
        return cls(
            tuple(jnp.where(token < 0, 0, x) for x in found),
            kept(Causal(), max(1, nsa.windows(seq_len)), key, value, full),
            kept(Causal(), seq_len, keys[1], values[1], lengths),
            kept(Causal() & Window(nsa.sliding - 1), seq_len, keys[2], values[2], lengths),
            nsa,
        )

    def written(self, keys: Any, values: Any, position: jax.Array) -> tuple["NSACache", Any, jax.Array]:
        """The cache with one more token, keys and values [B, K, H] of each branch; windows are for `compressed`.

        Returns:
          (the cache; keys and values [B, size, K, H] of the last full window's tokens; the position of its first
          token, [B], 0 where there is none yet, and nobody looks at what is written there until there is).
        """
        size, stride = self.pattern.window
        rows = self.recent[0].shape[1]
        put = jax.vmap(lambda x, row, new: x.at[row].set(new))
        recent = tuple(put(x, position % rows, new) for x, new in zip(self.recent, (keys[0], values[0]), strict=True))
        first = jnp.maximum(position - size + 1, 0) // stride * stride
        tokens = ((first[:, None] + jnp.arange(size)[None]) % rows)[..., None, None]
        cache = dataclasses.replace(
            self,
            recent=recent,
            blocks=self.blocks.written(keys[1], values[1], position),
            near=self.near.written(keys[2], values[2], position),
        )
        return cache, tuple(jnp.take_along_axis(x, tokens, axis=1) for x in recent), first

    def compressed(self, key: jax.Array, value: jax.Array, first: jax.Array) -> "NSACache":
        """The cache with a window, [B, K, H] each, whose first token stands at ``first``."""
        windows = self.windows.written(key, value, first // self.pattern.pool_stride)
        return dataclasses.replace(self, windows=windows)

    def attend(
        self, query: jax.Array, position: jax.Array, scale: float | None, selection: Selection | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the branches find for queries [B, N, H]: compressed, selected and near, [B, N, H] each."""
        nsa, (size, stride) = self.pattern, self.pattern.window
        window = (position - size + 1) // stride
        found = self.windows.attend(query, jnp.maximum(window, 0), scale=scale)
        compressed = jnp.where((position >= size - 1)[:, None, None], found, 0)
        blocks = self.blocks
        if selection is None and nsa.selects(self.seq_len):
            pooled = self.windows.keys[0][:, :, 0].swapaxes(1, 2)
            blocks = dataclasses.replace(blocks, selection=nsa, pooled=pooled)
        selected = blocks.attend(query, position, scale=scale, selection=selection)
        return compressed, selected, self.near.attend(query, position, scale=scale)
