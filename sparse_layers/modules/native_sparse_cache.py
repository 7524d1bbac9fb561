"""`NSACache`: the cache of `NativeSparseAttention`, keys and values of its three branches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..masks.primitives import Causal, Window
from ..masks.serialization import register_node
from ..ops.decoding.cache import KVCache
from ..ops.decoding.ring_cache import join_pages
from ..ops.planning.selection import Selection
from ..scorers import NSA


@register_node
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["recent", "windows", "blocks", "sliding"],
    meta_fields=["pattern"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class NSACache:
    """The cache of `NativeSparseAttention`, a pytree.

    Attributes:
      recent: keys and values of the compressed branch for the latest tokens, [B, R, K, H] each, whose windows may
        change; a ring with token t in row t % R.
      windows: compressed keys and values; a position is the index of a window.
      blocks, sliding: keys and values of the selected branch and of the sliding window.
      pattern: the `NSA` of the layer.
    """

    recent: tuple[jax.Array, ...]
    windows: KVCache
    blocks: KVCache
    sliding: KVCache
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

    @property
    def cache_dtype(self) -> str | None:
        return self.blocks.cache_dtype

    @classmethod
    def filled(
        cls, nsa: NSA, seq_len: int, lengths: jax.Array, keys: Any, values: Any, key: Any, value: Any, **options: Any
    ) -> "NSACache":
        """Returns the cache after prompts of these lengths, from keys and values of each branch and of windows.

        ``options`` are those of `KVCache.empty`. Windows keep their dtype, as they select blocks.
        """
        size, stride = nsa.window

        def fill_cache(
            mask: Any, max_len: int, key: jax.Array, value: jax.Array, lengths: jax.Array, **settings: Any
        ) -> KVCache:
            settings |= {"batch": len(key), "head_size": key.shape[-1], "dtype": key.dtype}
            return KVCache.empty(mask, max_len, **(options | settings)).filled(key, value, lengths)

        rows, last = size + stride - 1, lengths[:, None] - 1  # so many rows hold the last full window, wherever it ends
        token_ids = (last - (last - jnp.arange(rows)[None]) % rows)[..., None, None]
        latest = (jnp.take_along_axis(x, jnp.maximum(token_ids, 0), axis=1) for x in (keys[0], values[0]))
        num_windows = jnp.maximum((lengths - size) // stride + 1, 0)
        return cls(
            tuple(jnp.where(token_ids < 0, 0, x) for x in latest),
            fill_cache(Causal(), max(1, nsa.windows(seq_len)), key, value, num_windows, cache_dtype=None),
            fill_cache(Causal(), seq_len, keys[1], values[1], lengths),
            fill_cache(Causal() & Window(nsa.sliding - 1), seq_len, keys[2], values[2], lengths),
            nsa,
        )

    def written(self, keys: Any, values: Any, position: jax.Array) -> tuple["NSACache", Any, jax.Array]:
        """Writes one more token, keys and values [B, K, H] of each branch; `compressed` writes windows.

        Returns:
          (the cache; keys and values [B, size, K, H] of the last full window's tokens; the position [B] of its first
          token). Without a full window the position is 0, and no query attends to that window.
        """
        size, stride = self.pattern.window
        rows = self.recent[0].shape[1]
        set_row = jax.vmap(lambda x, row, new: x.at[row].set(new))
        recent = tuple(
            set_row(x, position % rows, new) for x, new in zip(self.recent, (keys[0], values[0]), strict=True)
        )
        start = jnp.maximum(position - size + 1, 0) // stride * stride
        tokens = ((start[:, None] + jnp.arange(size)[None]) % rows)[..., None, None]
        cache = dataclasses.replace(
            self,
            recent=recent,
            blocks=self.blocks.written(keys[1], values[1], position),
            sliding=self.sliding.written(keys[2], values[2], position),
        )
        return cache, tuple(jnp.take_along_axis(x, tokens, axis=1) for x in recent), start

    def compressed(self, key: jax.Array, value: jax.Array, start: jax.Array) -> "NSACache":
        """Writes a window, key and value [B, K, H], whose first token has position ``start``."""
        windows = self.windows.written(key, value, start // self.pattern.pool_stride)
        return dataclasses.replace(self, windows=windows)

    def attend(
        self, query: jax.Array, position: jax.Array, scale: float | None, selection: Selection | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the outputs [B, N, H] of the compressed, selected and sliding branches for queries [B, N, H]."""
        nsa, (size, stride) = self.pattern, self.pattern.window
        window = (position - size + 1) // stride
        compressed_output = self.windows.attend(query, jnp.maximum(window, 0), scale=scale)
        compressed = jnp.where((position >= size - 1)[:, None, None], compressed_output, 0)
        blocks = self.blocks
        if selection is None and nsa.selects(self.seq_len):
            pooled = join_pages(self.windows.keys[0]).swapaxes(1, 2)
            blocks = dataclasses.replace(blocks, selection=nsa, pooled=pooled)
        selected = blocks.attend(query, position, scale=scale, selection=selection)
        return compressed, selected, self.sliding.attend(query, position, scale=scale)
