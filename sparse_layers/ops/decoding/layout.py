"""The layout of a cache: its arrays of keys, and the query heads that read each of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ..kernels.quantized import Rows
from ..planning.row_orders import RowOrder
from .cache_parts import CachePart, plan_cache_parts
from .ring_cache import KeyLayout, RingLayout, join_pages

# The arrays of keys and of values of a cache, one for each store.
KVArrays = tuple[tuple[Rows, ...], tuple[Rows, ...]]
# Scale and soft cap of the logits.
LogitOptions = tuple[float, float | None]


@dataclasses.dataclass(frozen=True, eq=False)
class MaskHeads:
    """The query heads of one mask, with its parts."""

    q_heads: tuple[int, ...]  # query heads; those of one key head are neighbours, and equally many for each
    kv_heads: tuple[int, ...]  # their key heads; once for each query head where they are not equally many
    cache_parts: tuple[CachePart, ...]


class CacheLayout:
    """The stores of a cache, and the query heads that read them.

    Attributes:
      masks, length, num_heads, num_kv_heads: the arguments: masks that heads take in turn, and the most tokens.
      heads: the query heads of each distinct mask.
      stores: (store, key heads in it), for each array of keys.
    """

    def __init__(self, masks: tuple[Mask, ...], length: int, num_heads: int, num_kv_heads: int, max_step: int):
        self.masks, self.length, self.num_heads, self.num_kv_heads = masks, length, num_heads, num_kv_heads
        group = num_heads // num_kv_heads
        self.heads: list[MaskHeads] = []
        readers: dict[KeyLayout, set[int]] = {}
        for mask in dict.fromkeys(masks):
            q_heads = tuple(h for h in range(num_heads) if masks[h % len(masks)] == mask)
            kv_heads = tuple(h // group for h in q_heads)
            counts = {kv_heads.count(k) for k in kv_heads}
            distinct = tuple(dict.fromkeys(kv_heads)) if len(counts) == 1 else kv_heads
            self.heads.append(MaskHeads(q_heads, distinct, plan_cache_parts(mask, length, max_step)))
            for cache_part in self.heads[-1].cache_parts:
                readers.setdefault(cache_part.store, set()).update(kv_heads)
        self.stores = [(store, tuple(sorted(kv_heads))) for store, kv_heads in readers.items()]

    def find(self, store: KeyLayout) -> tuple[int, tuple[int, ...]]:
        """Returns the index of a store, and the key heads in it."""
        index = [s for s, _ in self.stores].index(store)
        return index, self.stores[index][1]

    def full_store_index(self) -> int:
        """Returns the index of the array that keeps all keys of all heads in natural order, or raises an error."""
        full = RingLayout(RowOrder(self.length), self.length, self.length)
        every_head = tuple(range(self.num_kv_heads))
        if dict(self.stores).get(full) != every_head or not all(mask.computable for mask in self.masks):
            raise NotImplementedError(
                "selection: a step takes one, of a caller or of a scorer, where the cache keeps all keys in a row, as "
                "that of Causal() does, and masks are computed from positions; that of "
                f"{self.masks} keeps what these read, or looks up tables"
            )
        return self.find(full)[0]

    def all_keys(self, keys: tuple[Rows, ...]) -> Rows:
        """Returns the keys of all tokens [B, K, length, H], or raises the error of `full_store_index`."""
        return join_pages(keys[self.full_store_index()])

    def selected_tokens(
        self, position: jax.Array, ids: jax.Array, block: int
    ) -> tuple[MaskHeads, jax.Array, jax.Array, jax.Array]:
        """Returns the keys in the selected blocks ids [B, G, k], L of them in each list, and which heads see them.

        These are (all heads, one list for each selection; the first token of each block [B, lists, k]; tokens
        [B, lists, L]; True where query heads see them, bool [B, lists, query heads of each or 1, L]).
        """
        length, kv_heads = self.length, self.num_kv_heads
        (batch, _, k), lists, width = ids.shape, max(kv_heads, ids.shape[1]), min(block, length)
        ids = jnp.broadcast_to(ids, (batch, lists, k))
        repeated = ((ids[..., None] == ids[..., None, :]) & np.tri(k, k=-1, dtype=bool)[None, None]).any(-1)
        # The last block may be shorter: it is read with keys before it. An id of -1 reads a block and sees none of it.
        start = jnp.minimum(jnp.clip(ids, 0, length // block) * block, length - width)
        tokens = start[..., None] + jnp.arange(width)[None, None, None]
        seen = ~repeated[..., None] & (tokens // block == ids[..., None])
        tokens, seen = (x.reshape(batch, lists, k * width) for x in (tokens, seen))
        mask_of_head = (np.arange(self.num_heads) % len(self.masks)).reshape(1, lists, -1, 1)
        if len(self.masks) == 1:
            mask_of_head = mask_of_head[:, :, :1]
        query = position[:, None, None]
        allowed = ((mask_of_head == i) & (seen & mask(query, tokens))[:, :, None] for i, mask in enumerate(self.masks))
        heads = MaskHeads(tuple(range(self.num_heads)), tuple(range(lists)), ())
        return heads, start, tokens, functools.reduce(jnp.logical_or, allowed)


@bounded_cache()
def cache_layout(masks: tuple[Mask, ...], length: int, num_heads: int, num_kv_heads: int, max_step: int) -> CacheLayout:
    """Returns the layout of a cache, which equal arguments share."""
    return CacheLayout(masks, length, num_heads, num_kv_heads, max_step)
