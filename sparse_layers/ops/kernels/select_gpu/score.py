"""How much queries want each key block, on GPUs: the launch of `score_kernel.py`."""

import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Of a product: columns are the query heads of a key head, times queries; rows are blocks, or windows of a softmax.
COLUMNS, STEP = 128, 64
# Tiles of windows that are held. Exponentials take as long as products: there, more programs at a time are worth more.
STAGES, STAGES_OF_WEIGHTS = 3, 2
MOST_FEATURES = 256


class Formula(enum.Enum):
    """How the score of a block comes from products of queries with what is kept of windows of keys.

    But for the first formula, windows count that lie in a query's past as a whole, and begin no earlier than its
    document. The weight of a window is ``softmax(scale * product)``, summed over the query heads of a key head.

    Attributes:
      PRODUCT: of each query head: the product with the block's only window, which may be of two documents.
      LARGEST_PRODUCT: of each query head: the largest product with a window that meets the block.
      LARGEST_WEIGHT: of each key head: the largest weight of a window that meets the block.
      TOTAL_WEIGHT: of each key head: the sum of these weights, times the strides of the window that lie in the block.
    """

    PRODUCT = enum.auto()
    LARGEST_PRODUCT = enum.auto()
    LARGEST_WEIGHT = enum.auto()
    TOTAL_WEIGHT = enum.auto()


class Scored(NamedTuple):
    """What is scored, and how; see `Scorer`.

    Attributes:
      formula: None for one that no kernel has.
      block: keys in a block.
      size: keys in a window.
      stride: keys between the beginnings of two windows.
    """

    formula: Formula | None
    block: int
    size: int
    stride: int


def unsupported(scored: Scored, query: jax.Array, pooled: jax.Array, scale: float | None) -> str | None:
    """Why `by_windows` cannot compute such scores, or None; see there for the arguments. None is a positive scale."""
    from ..gpu import hardware
    from ..gpu.hardware import padded_size

    formula, block, size, stride = scored
    (*_, heads, features), kv_heads, device = query.shape, pooled.shape[2], hardware.local_device()
    if isinstance(device, str):
        return device
    if formula in (None, Formula.PRODUCT):
        return f"it computes scores of windows, got {formula}"
    if query.dtype != pooled.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 or float16, got {query.dtype} and {pooled.dtype}"
    if size > block or size % stride or block % stride:
        return f"windows must fit into blocks, and strides divide both, got {scored}"
    if scale is not None and not scale > 0:
        return f"it takes largest products for largest logits, got scale={scale}"
    if heads > COLUMNS * kv_heads or features > MOST_FEATURES:
        return f"it takes {COLUMNS} query heads of a key head with {MOST_FEATURES} features at most, got {query.shape}"
    needed = shared_memory(padded_size(features), 1)
    return None if needed <= device.shared_memory else f"it needs {needed} bytes of shared memory"


def shared_memory(size: int, stages: int) -> int:
    """An upper estimate of the bytes of shared memory, by the head size rounded up to a power of two."""
    return 2 * size * (COLUMNS + stages * STEP) + 4 * STEP * COLUMNS


def by_windows(
    scored: Scored,
    blocks: int,
    query: jax.Array,
    pooled: jax.Array,
    at: jax.Array,
    start: jax.Array,
    scale: float,
) -> jax.Array:
    """Scores of the blocks from the beginning of each query's document to before its own; others may be anything.

    Args:
      scored: what, and how.
      blocks: of the sequence.
      query: bfloat16 or float16 [B, R, N, H].
      pooled: [B, W, K, H] in the same dtype.
      at: int [B or 1, R], positions of the queries.
      start: int [B or 1, R], first tokens of their documents.
      scale: of products, where these are weights; above 0.

    Returns:
      float32 [B, R, K, blocks] of weights, [B, R, N, blocks] of products.
    """
    from ..gpu import bridge, hardware
    from ..gpu.hardware import padded_size
    from .choose import document_positions
    from .score_kernel import Score, score_kernel

    formula, block, size, stride = scored
    (batch, rows, heads, features), (_, windows, kv_heads, _) = query.shape, pooled.shape
    weights, device = formula is not Formula.LARGEST_PRODUCT, hardware.local_device()
    at, start = document_positions(at, start)
    assert isinstance(device, hardware.Device)
    group, padded = 1 << (heads // kv_heads - 1).bit_length(), padded_size(features)
    constants = Score(
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BATCHES=len(at),
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
    most = STAGES_OF_WEIGHTS if weights else STAGES
    stages = next(n for n in range(most, 0, -1) if n == 1 or shared_memory(padded, n) <= device.shared_memory)
    output = jax.ShapeDtypeStruct((batch, rows, kv_heads if weights else heads, blocks), jnp.float32)
    grid, arrays = (kv_heads * -(-rows // constants.TILE), batch), (query, pooled, at, start)
    return bridge.call_triton(score_kernel, grid, arrays, [output], {"C": constants}, num_warps=4, num_stages=stages)[0]
