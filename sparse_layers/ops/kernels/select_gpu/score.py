"""Scores of key blocks by windows of pooled keys, on GPUs: the launch of `score_kernel.py`."""

import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Columns and rows of a product. Columns are queries times query heads of a key head; rows are blocks, or windows of a
# softmax.
COLUMNS, STEP = 128, 64
# Stages of tiles of windows. With weights, exponentials take as long as products: more programs at a time gain more.
STAGES, STAGES_OF_WEIGHTS = 3, 2
MAX_FEATURES = 256


class Formula(enum.Enum):
    """Formulas of a block's score, from products of queries with pooled windows of keys.

    All but `PRODUCT` count windows that lie in a query's past and document as a whole. The weight of a window is
    ``softmax(scale * product)``, summed over the query heads of a key head.
    """

    PRODUCT = enum.auto()  # by query head, the product with the block's only window, which may be of two documents
    LARGEST_PRODUCT = enum.auto()  # by query head, the largest product with a window that meets the block
    LARGEST_WEIGHT = enum.auto()  # by key head, the largest weight of a window that meets the block
    TOTAL_WEIGHT = enum.auto()  # by key head, the sum of these weights, each times the strides of its window in it


class ScoreSpec(NamedTuple):
    """The formula of scores, and the sizes of blocks and windows; see `Scorer`."""

    formula: Formula | None  # the formula; None for one that no kernel computes
    block: int  # keys in a block
    size: int  # keys in a window
    stride: int  # keys between the beginnings of two windows


def unsupported(spec: ScoreSpec, query: jax.Array, pooled: jax.Array, scale: float | None) -> str | None:
    """Returns why `score_windows` cannot compute scores, or None; a scale of None is any positive one."""
    from ..gpu import hardware
    from ..gpu.hardware import padded_size

    formula, block, size, stride = spec
    (*_, heads, features), kv_heads, device = query.shape, pooled.shape[2], hardware.local_device()
    if isinstance(device, str):
        return device
    if formula in (None, Formula.PRODUCT):
        return f"it computes scores of windows, got {formula}"
    if query.dtype != pooled.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 or float16, got {query.dtype} and {pooled.dtype}"
    if size > block or size % stride or block % stride:
        return f"windows must fit into blocks, and strides divide both, got {spec}"
    if scale is not None and not scale > 0:
        return f"it takes largest products for largest logits, got scale={scale}"
    if heads > COLUMNS * kv_heads or features > MAX_FEATURES:
        return f"it takes {COLUMNS} query heads of a key head with {MAX_FEATURES} features at most, got {query.shape}"
    needed_bytes = shared_memory(padded_size(features), 1)
    return None if needed_bytes <= device.shared_memory else f"it needs {needed_bytes} bytes of shared memory"


def shared_memory(size: int, stages: int) -> int:
    """Returns an upper bound of the bytes of shared memory, by the padded head size."""
    return 2 * size * (COLUMNS + stages * STEP) + 4 * STEP * COLUMNS


def score_windows(
    spec: ScoreSpec,
    blocks: int,
    query: jax.Array,
    pooled: jax.Array,
    positions: jax.Array,
    doc_starts: jax.Array,
    scale: float,
) -> jax.Array:
    """Computes scores of the blocks from the beginning of a query's document to before its own; others are undefined.

    Args:
      query: bfloat16 or float16 [B, R, N, H].
      pooled: pooled windows of keys, [B, W, K, H] in the same dtype.
      positions, doc_starts: int [B or 1, R], of the queries, and the first tokens of their documents.
      scale: factor of products before the softmax, above 0.

    Returns:
      float32 [B, R, K, blocks] for formulas of weights, [B, R, N, blocks] for products.
    """
    from ..gpu import bridge, hardware
    from ..gpu.hardware import padded_size
    from .choose import document_positions
    from .score_kernel import ScoreConstants, score_kernel

    formula, block, size, stride = spec
    (batch, rows, heads, features), (_, windows, kv_heads, _) = query.shape, pooled.shape
    weights, device = formula is not Formula.LARGEST_PRODUCT, hardware.local_device()
    positions, doc_starts = document_positions(positions, doc_starts)
    assert isinstance(device, hardware.Device)
    group, padded = 1 << (heads // kv_heads - 1).bit_length(), padded_size(features)
    constants = ScoreConstants(
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BATCHES=len(positions),
        H=features,
        D=padded,
        WINDOWS=windows,
        SIZE=size,
        STRIDE=stride,
        BLOCK=block,
        BLOCKS=blocks,
        WEIGHTS=weights,
        TOTAL=formula is Formula.TOTAL_WEIGHT,
        SCALE=float(scale) * math.log2(math.e) if weights else 1.0,
        TILE=COLUMNS // group,
        GROUP=group,
        STEP=STEP,
    )
    max_stages = STAGES_OF_WEIGHTS if weights else STAGES
    stages = next(n for n in range(max_stages, 0, -1) if n == 1 or shared_memory(padded, n) <= device.shared_memory)
    output = jax.ShapeDtypeStruct((batch, rows, kv_heads if weights else heads, blocks), jnp.float32)
    grid, arrays = (kv_heads * -(-rows // constants.TILE), batch), (query, pooled, positions, doc_starts)
    return bridge.call_triton(score_kernel, grid, arrays, [output], {"C": constants}, num_warps=4, num_stages=stages)[0]
