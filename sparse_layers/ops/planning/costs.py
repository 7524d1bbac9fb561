"""Costs: the block shape of each pass, its blocks, and their cost, by which the planner compares chains.

A cost is a number of (query, key) pairs. `Tuning` of the implementation says how many pairs of full blocks an
implementation computes in the time of a step, of a partial block, of a rule with many operations::

    cost of a pass = pairs of its blocks + what masks add      blocks x rows x keys, and more for PARTIAL blocks
                   + a step for each block                      Tuning.step_cost
                   + reading and writing its rows               PAIRS_PER_ROW for each row of q and of k/v
                   + the cells of its block lists               PAIRS_PER_CELL for each
"""

import math

import jax
import numpy as np

from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ...masks.states import PARTIAL
from .block_lists import grid_shape
from .blocks import BlockGrid, active_blocks
from .params import BwdParams, FwdParams
from .platforms import Tuning
from .row_orders import Reordered

# A mask whose block lists would exceed this many cells gets larger blocks: metadata stays below some tens of MB.
MAX_CELLS = 1 << 21
# Reading or writing one row of q, k, v or out costs about as much as this many (q, k) pairs: 8 bytes x head size
# against 4 flops x head size a pair, on machines that do 100 to 300 flops in the time of one byte.
PAIRS_PER_ROW = 256
# One cell of a block list costs about as much as this many pairs (a step that looks at it and moves on).
PAIRS_PER_CELL = 16
# Mask tiles are made of up to this many pairs, which takes seconds; where there are more, rules are computed.
MAX_TILED = 1 << 29


class PassCandidate:
    """A pass of a candidate chain: its blocks are counted, its backward blocks are not yet chosen.

    Attributes:
      mask: the mask in row space.
      tuning: block shapes and costs of the implementation.
      shape: (bq, bkv), block shape of the forward pass.
      blocks: number of blocks that the forward pass computes.
      cost: cost of the forward pass in pairs.
    """

    def __init__(self, mask: Reordered, params: FwdParams, tuning: Tuning):
        self.mask, self.tuning = mask, tuning
        if params.q_blocksize is None and params.kv_blocksize is None:
            self.shape = cheapest_shape(mask, tuning)
        else:
            self.shape = block_shape(mask, params, tuning.block_shapes[0])
        self.blocks = count_blocks(mask, self.shape)[0]
        self.cost = pass_cost(mask, self.shape, tuning)

    def bwd_shape(self, params: BwdParams) -> tuple[int, int]:
        """Returns (bq, bkv), the block shape of the backward pass."""
        tuning, (rows, keys), largest = self.tuning, self.shape, self.tuning.block_shapes[-1]
        explicit = params.q_blocksize is not None or params.kv_blocksize is not None
        tuned = (tuning.deterministic_bwd_block_shape if params.deterministic else None) or tuning.bwd_block_shape
        default = tuned or (tuning.block_shapes[0] if explicit else self.shape)
        growth = math.isqrt(rows * keys // math.prod(largest))
        if tuned and not explicit and growth > 1:  # the forward's blocks grew because lists would be too long
            default = tuned[0] * growth, tuned[1] * growth
        elif tuning.max_stretched_keys and not explicit and keys > largest[1]:
            default = keys, max(rows, largest[1])
        return block_shape(self.mask, params, default)


def block_shape(mask: Reordered, params: FwdParams | BwdParams, default: tuple[int, int]) -> tuple[int, int]:
    """Returns the explicit block sizes, or the default ones, cut to the power of two that holds all rows."""
    explicit = (params.q_blocksize, params.kv_blocksize)
    rows = (mask.q_order.rows, mask.kv_order.rows)
    enough = (max(16, 1 << (r - 1).bit_length()) for r in rows)
    sizes = [e or min(d, r) for e, d, r in zip(explicit, default, enough, strict=True)]
    return sizes[0], sizes[1]


def pass_cost(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> int:
    """Returns the cost of a forward pass in blocks of a shape, in pairs."""
    blocks, cells = count_blocks(mask, shape)
    extra = tuning.partial_cost - 1
    if tuning.max_operations is not None and not uses_mask_tiles(mask, shape, tuning):
        extra += tuning.operation_cost * max(0, count_operations(mask) - tuning.max_operations)
    factors = dict(zip(tuning.block_shapes, tuning.cost_factors, strict=False))
    pairs = shape[0] * shape[1] * (blocks + extra * _count_partial(mask, shape))
    pairs = (pairs + blocks * tuning.step_cost) * factors.get(shape, 1)
    rows = mask.q_order.rows + mask.kv_order.rows
    return round(pairs) + PAIRS_PER_ROW * rows + PAIRS_PER_CELL * cells


def cheapest_shape(mask: Reordered, tuning: Tuning) -> tuple[int, int]:
    """Returns the block shape of least cost. Finer ones are tried while they gain, so a dense mask never lists them."""
    *finer, largest = (block_shape(mask, FwdParams(), size) for size in tuning.block_shapes)
    best = _affordable_shape(mask, largest, tuning)
    for shape in reversed(finer):
        if shape == best:
            continue
        if best != largest or not _lists_fit(mask, shape, tuning):
            break
        if pass_cost(mask, shape, tuning) >= pass_cost(mask, best, tuning):
            break
        best = largest = shape
    return best


def _affordable_shape(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> tuple[int, int]:
    """Returns ``shape``, grown until its block lists fit.

    Goes from coarse to fine, so that the many fine blocks of a dense mask are never listed.
    """
    shapes = [shape]
    while math.prod(grid_shape(mask, shapes[-1])) > MAX_CELLS:
        shapes.append(_grown_shape(shapes[-1], tuning))
    coarse = shapes.pop()
    while shapes:
        at_most = len(_block_grid(mask, coarse).rows) * (math.prod(coarse) // math.prod(shape))
        if at_most <= 4 * MAX_CELLS and _lists_fit(mask, shape, tuning):
            return shape
        if not _lists_fit(mask, shapes[-1], tuning):
            break
        coarse = shapes.pop()
    while not _lists_fit(mask, coarse, tuning) and max(coarse) < (tuning.max_block or math.inf):
        coarse = _grown_shape(coarse, tuning)
    return coarse


def _grown_shape(shape: tuple[int, int], tuning: Tuning) -> tuple[int, int]:
    """Returns the next larger block shape."""
    rows, keys = shape
    return (rows, 2 * keys) if 2 * keys <= tuning.max_stretched_keys else (2 * rows, 2 * keys)


def _lists_fit(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> bool:
    """True if the block lists of a shape stay below `MAX_CELLS` and below the implementation's limit in bytes."""
    blocks, cells = count_blocks(mask, shape)
    size = (8 if uses_mask_tiles(mask, shape, tuning) else 4) * (blocks + max(grid_shape(mask, shape)))
    return cells <= MAX_CELLS and (tuning.max_list_bytes is None or size <= tuning.max_list_bytes)


def count_blocks(mask: Reordered, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of active blocks, and of cells in the lists by row and by column, padded to the longest."""
    grid = _block_grid(mask, shape)
    if not len(grid.rows):
        return 0, 0
    widest = [int(np.bincount(axis).max()) for axis in (grid.rows, grid.columns)]
    return len(grid.rows), grid.num_rows * widest[0] + grid.num_columns * widest[1]


def uses_mask_tiles(mask: Reordered, shape: tuple[int, int], tuning: Tuning) -> bool:
    """True if kernels read partial blocks of a shape as mask tiles made beforehand; False if they compute the rule."""
    if not mask.computable or tuning.max_operations is None:
        return not mask.computable
    if count_operations(mask) <= tuning.max_operations:
        return False
    while math.prod(grid_shape(mask, shape)) > MAX_CELLS:  # too many to list; larger ones hold no fewer pairs
        shape = 2 * shape[0], 2 * shape[1]
    return _count_partial(mask, shape) * math.prod(shape) <= MAX_TILED


@bounded_cache()
def count_operations(mask: Mask) -> int:
    """Returns the operations that a mask's rule takes for each pair, without those on queries or on keys alone."""
    sides, pairs = [jax.ShapeDtypeStruct(shape, np.int32) for shape in ((2, 1), (1, 3))], (2, 3)

    def count(jaxpr):
        inner = [x.params["jaxpr"].jaxpr for x in jaxpr.eqns if "jaxpr" in x.params]
        outer = sum(x.outvars[0].aval.shape == pairs for x in jaxpr.eqns if "jaxpr" not in x.params)
        return outer + sum(map(count, inner))

    # Without the mesh in force: inside `jax.shard_map`, positions would be traced as a device's own.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return count(jax.make_jaxpr(mask)(*sides).jaxpr)


def rows_of_blocks(candidate: PassCandidate) -> np.ndarray:
    """Returns the first query row of each active block of a candidate, int32 [blocks]."""
    return _block_grid(candidate.mask, candidate.shape).rows * candidate.shape[0]


def _count_partial(mask: Reordered, shape: tuple[int, int]) -> int:
    """Returns the number of PARTIAL blocks."""
    return int(np.count_nonzero(_block_grid(mask, shape).states == PARTIAL))


def _block_grid(mask: Reordered, shape: tuple[int, int]) -> BlockGrid:
    """Returns the active blocks of a shape."""
    return active_blocks(mask, *grid_shape(mask, shape), *shape)
