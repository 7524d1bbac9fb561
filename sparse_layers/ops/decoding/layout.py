"""What a cache consists of, and who reads which part of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ..planning.row_orders import RowOrder
from .reads import Part, parts
from .stores import Store


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """The query heads of one mask, with its parts.

    Attributes:
      queries: query heads, those of one key head side by side and equally many of each.
      keys: their key heads; once for each query head where they are not equally many.
      parts: of the mask.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    parts: tuple[Part, ...]


class Layout:
    """The stores of a cache, and who reads them.

    Args:
      masks: the masks that the heads take in turn.
      length: the most tokens.
      num_heads, num_kv_heads: of the queries and of the keys.
      max_step: the most tokens that a step adds.

    Attributes:
      masks, length, num_heads, num_kv_heads: as given.
      heads: the query heads, by mask.
      stores: (store, key heads in it), for each array of keys.
    """

    def __init__(self, masks: tuple[Mask, ...], length: int, num_heads: int, num_kv_heads: int, max_step: int):
        self.masks, self.length, self.num_heads, self.num_kv_heads = masks, length, num_heads, num_kv_heads
        group = num_heads // num_kv_heads
        self.heads = []
        held: dict[Store, set[int]] = {}
        for mask in dict.fromkeys(masks):
            queries = tuple(h for h in range(num_heads) if masks[h % len(masks)] == mask)
            keys = tuple(h // group for h in queries)
            counts = {keys.count(k) for k in keys}
            some = tuple(dict.fromkeys(keys)) if len(counts) == 1 else keys
            self.heads.append(Heads(queries, some, parts(mask, length, max_step)))
            for part in self.heads[-1].parts:
                held.setdefault(part.store, set()).update(keys)
        self.stores = [(store, tuple(sorted(heads))) for store, heads in held.items()]

    def find(self, store: Store) -> tuple[int, tuple[int, ...]]:
        """The index of a store, and the key heads in it."""
        index = [s for s, _ in self.stores].index(store)
        return index, self.stores[index][1]

    def whole(self) -> int:
        """Which of the arrays has all keys in a row.

        Raises:
          NotImplementedError: none has, or a mask is a table.
        """
        whole = Store(RowOrder(self.length), self.length, self.length)
        everyone = tuple(range(self.num_kv_heads))
        if dict(self.stores).get(whole) != everyone or not all(mask.computable for mask in self.masks):
            raise NotImplementedError(
                "selection: a step takes one, of a caller or of a scorer, where the cache keeps all keys in a row, as "
                "that of Causal() does, and masks are computed from positions; that of "
                f"{self.masks} keeps what these read, or looks up tables"
            )
        return self.find(whole)[0]

    def listed(self, position: jax.Array, ids: jax.Array, block: int) -> tuple[Heads, jax.Array, jax.Array, jax.Array]:
        """All heads, by who chooses, and what they may read of the blocks ids [B, G, k], L keys for each list.

        Returns:
          (heads, first tokens of what is read for each entry [B, lists, k], tokens [B, lists, L], whether query heads
          see them, bool [B, lists, query heads of each or 1, L]).
        """
        length, kv_heads = self.length, self.num_kv_heads
        (batch, _, k), lists, width = ids.shape, max(kv_heads, ids.shape[1]), min(block, length)
        ids = jnp.broadcast_to(ids, (batch, lists, k))
        twice = ((ids[..., None] == ids[..., None, :]) & np.tri(k, k=-1, dtype=bool)[None, None]).any(-1)
        # The last block may be shorter: it is read with keys before it. Who chose none reads one, and sees none of it.
        start = jnp.minimum(jnp.clip(ids, 0, length // block) * block, length - width)
        tokens = start[..., None] + jnp.arange(width)[None, None, None]
        seen = ~twice[..., None] & (tokens // block == ids[..., None])
        tokens, seen = (x.reshape(batch, lists, k * width) for x in (tokens, seen))
        at, turn = position[:, None, None], (np.arange(self.num_heads) % len(self.masks)).reshape(1, lists, -1, 1)
        if len(self.masks) == 1:
            turn = turn[:, :, :1]
        rules = ((turn == i) & (seen & mask(at, tokens))[:, :, None] for i, mask in enumerate(self.masks))
        heads = Heads(tuple(range(self.num_heads)), tuple(range(lists)), ())
        return heads, start, tokens, functools.reduce(jnp.logical_or, rules)


@bounded_cache()
def layout(masks: tuple[Mask, ...], length: int, num_heads: int, num_kv_heads: int, max_step: int) -> Layout:
    """The layout of a cache, made once."""
    return Layout(masks, length, num_heads, num_kv_heads, max_step)
