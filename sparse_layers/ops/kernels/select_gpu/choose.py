"""Which key blocks each query looks at, on GPUs: the launches of `choose_kernel.py`."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Blocks of the longest tile: beyond, the scores of 16 queries do not fit the registers of one program.
MOST_BLOCKS = 2048
LEAST_BLOCKS = 64
# Queries with fewer blocks in their past have no launch of their own: there are few of them.
LEAST_PART = 256
# Scores of a tile, as many as four warps hold with room to compute; and the least and most of its queries.
SCORES, LEAST_TILE, MOST_TILE = 16384, 16, 64
# Values of a head that are multiplied at a time: all blocks of a tile lie in shared memory, twice.
STEP = 16


class Rule(NamedTuple):
    """What is chosen; see `Scorer`.

    Attributes:
      block: keys in a block.
      count: blocks to choose, those among them that are always chosen:
      first: at the beginning of the document, and
      local: up to the query's own.
    """

    block: int
    count: int
    first: int
    local: int


def unsupported(blocks: int, batch: int) -> str | None:
    """Why these kernels cannot choose among so many blocks in so many batch entries, or None."""
    from ..gpu import hardware

    device = hardware.local_device()
    if isinstance(device, str):
        return device
    if blocks > MOST_BLOCKS:
        return f"it holds the scores of {MOST_BLOCKS} blocks at most, got {blocks}"
    if batch > hardware.MAX_BATCH_ENTRIES:
        return f"it takes at most {hardware.MAX_BATCH_ENTRIES} batch entries, got {batch}"
    return None


def document_positions(at: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns positions of queries and first tokens of their documents, int32 of one shape, [B or 1, R]."""
    at, start = jnp.broadcast_arrays(at.astype(jnp.int32), start.astype(jnp.int32))
    return at, start


def by_scores(rule: Rule, scores: jax.Array, at: jax.Array, start: jax.Array) -> jax.Array:
    """The blocks that queries choose by scores that are given.

    Args:
      rule: what is chosen.
      scores: float32 [B, R, G, blocks].
      at: int [B or 1, R], positions of the queries, each within one of the blocks.
      start: int [B or 1, R], first tokens of their documents.

    Returns:
      int32 [B, R, G, count], in any order, -1 behind.
    """
    from .choose_kernel import choose_kernel

    batch, rows, heads, blocks = scores.shape
    part, shape = (0, rows, _span(blocks)), (batch, rows, heads, blocks)
    return _launched(choose_kernel, rule, part, shape, (scores, *document_positions(at, start)))


def by_products(rule: Rule, query: jax.Array, pooled: jax.Array, start: jax.Array) -> jax.Array:
    """The blocks that the queries of a whole sequence choose by their products with what is kept of blocks.

    Args:
      rule: what is chosen.
      query: bfloat16 or float16 [B, T, N, H]; products of float32 would not leave room for the scores.
      pooled: [B, W, K, H] in the same dtype, of the first W blocks.
      start: int [B or 1, T], first tokens of the queries' documents.

    Returns:
      int32 [B, T, N, count], in any order, -1 behind.
    """
    from .choose_kernel import Products, choose_products_kernel

    (batch, rows, heads, size), (_, blocks, kv_heads, _) = query.shape, pooled.shape
    products = Products(kv_heads, size, -(-size // STEP) * STEP, STEP)
    at = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), start.shape)
    shape, arrays = (batch, rows, heads, blocks), (query, pooled, at, start)
    parts = [
        _launched(choose_products_kernel, rule, part, shape, arrays, P=products) for part in _parts(rows, rule.block)
    ]
    return jnp.concatenate(parts, axis=1)


def _parts(rows: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Launches (first query, their number, blocks of a tile): early queries have few blocks to look at."""
    first, span = 0, LEAST_BLOCKS
    while first < rows:
        end = min(rows, span * block)
        if end == rows or span >= LEAST_PART:
            yield first, end - first, span
            first = end
        span *= 2


def _span(blocks: int) -> int:
    """The blocks of the tile that holds so many."""
    return max(LEAST_BLOCKS, 1 << (blocks - 1).bit_length())


def _launched(
    kernel: Any,
    rule: Rule,
    part: tuple[int, int, int],
    shape: tuple[int, int, int, int],
    arrays: Sequence[jax.Array],
    **constants: Any,
) -> jax.Array:
    """What the queries of one of `_parts` choose.

    Args:
      kernel: one of `choose_kernel.py`.
      rule: what is chosen.
      part: the first query, the number of queries, and blocks of a tile.
      shape: batch entries, queries, heads that choose, and blocks that have a score.
      arrays: of the kernel; the last but one are the positions, int [B or 1, R].
      **constants: further ones of the kernel.
    """
    from ..gpu import bridge
    from .choose_kernel import Choice

    (first, own, span), (batch, rows, heads, blocks) = part, shape
    tile = max(LEAST_TILE, min(MOST_TILE, SCORES // span))
    places = max(16, 1 << (rule.count - 1).bit_length())
    choice = Choice(rows, first, own, heads, len(arrays[-2]), blocks, *rule, tile, span, span // 32, places)
    output = jax.ShapeDtypeStruct((batch, own, heads, rule.count), jnp.int32)
    grid, warps = (heads * -(-own // tile), batch), max(4, 4 * tile * span // SCORES)
    return bridge.call_triton(
        kernel, grid, arrays, [output], {"C": choice, **constants}, num_warps=warps, num_stages=2
    )[0]
