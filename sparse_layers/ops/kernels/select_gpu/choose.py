"""Selection of key blocks by each query, on GPUs: the launches of `choose_kernel.py`."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Blocks of the longest tile: the scores of 16 queries for more do not fit the registers of one program.
MAX_BLOCKS = 2048
MIN_BLOCKS = 64
# Queries with up to this many blocks in their past share the first launch: there are few of them.
MIN_LAUNCH_BLOCKS = 256
# Scores of a tile, as many as four warps hold with room to compute; and the fewest and most of its queries.
TILE_SCORES, MIN_TILE, MAX_TILE = 16384, 16, 64
# Features of a product at a time: shared memory holds two stages of all blocks of a tile.
FEATURE_STEP = 16


class SelectionRule(NamedTuple):
    """The number of blocks to select, and the blocks that are always selected; see `Scorer`."""

    block: int  # keys in a block
    count: int  # blocks to select, including the next two
    first: int  # blocks at the beginning of the document that are always selected
    local: int  # blocks up to the query's own that are always selected


def unsupported(blocks: int, batch: int) -> str | None:
    """Returns why these kernels cannot select among ``blocks`` blocks in ``batch`` batch entries, or None."""
    from ..gpu import hardware

    device = hardware.local_device()
    if isinstance(device, str):
        return device
    if blocks > MAX_BLOCKS:
        return f"it holds the scores of {MAX_BLOCKS} blocks at most, got {blocks}"
    if batch > hardware.MAX_BATCH_ENTRIES:
        return f"it takes at most {hardware.MAX_BATCH_ENTRIES} batch entries, got {batch}"
    return None


def document_positions(positions: jax.Array, doc_starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns positions of queries and first tokens of their documents, int32 of one shape, [B or 1, R]."""
    positions, doc_starts = jnp.broadcast_arrays(positions.astype(jnp.int32), doc_starts.astype(jnp.int32))
    return positions, doc_starts


def select_by_scores(rule: SelectionRule, scores: jax.Array, positions: jax.Array, doc_starts: jax.Array) -> jax.Array:
    """Selects blocks by scores, float32 [B, R, G, blocks]: returns int32 [B, R, G, count], in any order, then -1.

    Positions of the queries, each within one of the blocks, and starts of their documents are int [B or 1, R].
    """
    from .choose_kernel import choose_kernel

    batch, rows, heads, blocks = scores.shape
    row_range, shape = (0, rows, _padded_blocks(blocks)), (batch, rows, heads, blocks)
    return _launch_range(choose_kernel, rule, row_range, shape, (scores, *document_positions(positions, doc_starts)))


def select_by_products(rule: SelectionRule, query: jax.Array, pooled: jax.Array, doc_starts: jax.Array) -> jax.Array:
    """Selects blocks for all queries by q . pooled key: returns int32 [B, T, N, count], in any order, then -1.

    Args:
      query: bfloat16 or float16 [B, T, N, H]; products of float32 would leave no room for the scores.
      pooled: pooled keys [B, W, K, H] of the first W blocks, in the same dtype.
      doc_starts: int [B or 1, T], first tokens of the queries' documents.
    """
    from .choose_kernel import Products, choose_products_kernel

    (batch, rows, heads, size), (_, blocks, kv_heads, _) = query.shape, pooled.shape
    products = Products(kv_heads, size, -(-size // FEATURE_STEP) * FEATURE_STEP, FEATURE_STEP)
    positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), doc_starts.shape)
    shape, arrays = (batch, rows, heads, blocks), (query, pooled, positions, doc_starts)
    results = [
        _launch_range(choose_products_kernel, rule, row_range, shape, arrays, P=products)
        for row_range in _launch_ranges(rows, rule.block)
    ]
    return jnp.concatenate(results, axis=1)


def _launch_ranges(rows: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first query, number of queries, blocks of a tile) of launches: early queries have few blocks."""
    first, span = 0, MIN_BLOCKS
    while first < rows:
        end = min(rows, span * block)
        if end == rows or span >= MIN_LAUNCH_BLOCKS:
            yield first, end - first, span
            first = end
        span *= 2


def _padded_blocks(blocks: int) -> int:
    """Returns the blocks of the smallest tile that holds ``blocks``."""
    return max(MIN_BLOCKS, 1 << (blocks - 1).bit_length())


def _launch_range(
    kernel: Any,
    rule: SelectionRule,
    row_range: tuple[int, int, int],
    shape: tuple[int, int, int, int],
    arrays: Sequence[jax.Array],
    **constants: Any,
) -> jax.Array:
    """Launches a kernel of `choose_kernel.py` for a range of queries.

    Args:
      row_range: first query, number of queries, and blocks of a tile.
      shape: batch entries, queries, heads with a selection, and blocks with a score.
      arrays: inputs of the kernel, the last two positions and document starts, int [B or 1, R].
    """
    from ..gpu import bridge
    from .choose_kernel import SelectionConstants

    (first, num_rows, span), (batch, rows, heads, blocks) = row_range, shape
    tile = max(MIN_TILE, min(MAX_TILE, TILE_SCORES // span))
    padded_count = max(16, 1 << (rule.count - 1).bit_length())
    choice = SelectionConstants(
        rows, first, num_rows, heads, len(arrays[-2]), blocks, *rule, tile, span, span // 32, padded_count
    )
    output = jax.ShapeDtypeStruct((batch, num_rows, heads, rule.count), jnp.int32)
    grid, warps = (heads * -(-num_rows // tile), batch), max(4, 4 * tile * span // TILE_SCORES)
    return bridge.call_triton(
        kernel, grid, arrays, [output], {"C": choice, **constants}, num_warps=warps, num_stages=2
    )[0]
