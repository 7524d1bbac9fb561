"""The blocks of a pass, for kernels that read bool tiles or compute rules: planned, masked at run time, or selected."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..planning.block_lists import (
    BlockPairs,
    StateTable,
    planned_block_pairs,
    run_time_block_pairs,
    run_time_state_table,
    selected_block_pairs,
    state_table,
    unpack_tiles,
)
from ..planning.head_groups import HeadGroup, head_groups
from ..planning.plan import Pass
from ..planning.row_orders import Reordered, RowOrder
from .call import Call
from .operands import Operands


def head_groups_of(call: Call, operands: Operands, *, merge: bool) -> tuple[HeadGroup, ...]:
    """Returns the head groups of a call; ``merge`` as in `head_groups`.

    With a run-time mask or a selection, a chain is one pass, whose blocks are known at run time only.
    """
    if operands.mask is not None:
        return head_groups([(None,)], merge=merge)
    chains = call.chains if operands.selection is None else [(None,)] * len(call.chains)
    return head_groups(chains, merge=merge)


def join_heads(by_group: Sequence[jax.Array]) -> jax.Array:
    """Returns [B, T, N, ...] from the heads of C groups: the inverse of x[:, :, c::C] for c in range(C)."""
    x = jnp.stack(by_group, axis=3)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


class PassBlocks(NamedTuple):
    """The blocks that one pass computes for a head group."""

    q_order: RowOrder  # token of each query row
    kv_order: RowOrder  # token of each key row
    shape: tuple[int, int]  # (bq, bkv), rows of a block
    pairs: BlockPairs  # [LB, LH, n], the pairs of blocks that the mask, a selection and ids allow
    # Computes a partial block of the mask from row indices; None if ``tiles`` hold them or no block is partial.
    rule: Reordered | None
    tiles: jax.Array | np.ndarray | None  # bool [tiles, bq, bkv], the partial blocks of the mask; or None
    granularity: int  # queries of a block that select together; 1 without a selection
    # As in `Operands`.
    segments: tuple[jax.Array, jax.Array] | None
    order_ids: tuple[jax.Array, jax.Array] | None
    positions: tuple[RowOrder, RowOrder]  # of query and key tokens, for a bias by distance


def blocks_of_pass(
    call: Call,
    operands: Operands,
    group: HeadGroup,
    passes: tuple[Pass, ...],
    rows: int,
    reads_tiles: Callable[..., bool],
    *,
    dkv: bool,
) -> PassBlocks:
    """Returns the blocks of a pass of a head group, with ``dkv`` in the block shape of the backward pass.

    Args:
      operands: arrays of the call, with the queries and the selection of the group.
      rows: queries of a block if there is a selection; its key blocks are those of the selection.
      reads_tiles: reads_tiles(masks, shape) is True if planned masks are read as tiles, not computed by a rule.
    """
    shapes, granularity, orders = passes[0] if passes else call, 1, row_orders(operands, passes)
    shape = shapes.bwd_shape if dkv else shapes.fwd_shape
    masks = tuple(x.mask for x in passes) if passes else call.masks[group.first :: group.step]
    if operands.selection is not None:
        shape, granularity = (rows, operands.selection.block), operands.selection.granularity
    with_tiles = bool(masks) and reads_tiles(masks, shape)
    if passes:
        pairs, tiles = planned_block_pairs(masks, shape, with_tiles)
    else:
        pairs, tiles = run_time_blocks(operands, shape, masks, with_tiles)
    if isinstance(tiles, np.ndarray):  # packed
        tiles = unpack_tiles(tiles, shape[1]) if len(tiles) else None
    pairs = pairs.limit_by_ids(operands.segments, operands.order_ids, orders, shape)
    rule = masks[0] if masks and not with_tiles else None
    ids, lengths = (operands.segments, operands.order_ids), (operands.query.shape[1], operands.key.shape[1])
    return PassBlocks(*orders, shape, pairs, rule, tiles, granularity, *ids, call.bias_positions(lengths))


def row_orders(operands: Operands, passes: tuple[Pass, ...]) -> tuple[RowOrder, RowOrder]:
    """Returns the row orders of queries and of keys in a pass; natural if its blocks are known at run time only."""
    if passes:
        return passes[0].q_order, passes[0].kv_order
    return RowOrder(operands.query.shape[1]), RowOrder(operands.key.shape[1])


def run_time_blocks(
    operands: Operands, shape: tuple[int, int], masks: Sequence[Reordered], with_tiles: bool
) -> tuple[BlockPairs, Any]:
    """Returns the pairs of blocks that a run-time mask or a selection allows, in natural row order, and their tiles.

    A selection is within the planned ``masks``, of which tiles are made if ``with_tiles``, else a rule computes them.
    """
    selection = operands.selection
    if selection is None:
        assert operands.mask is not None
        return run_time_block_pairs(operands.mask, shape)
    table, tiles = state_table_of(operands, shape, masks, with_tiles)
    return selected_block_pairs(selection.ids, selection.granularity, shape, table, operands.query.shape[2]), tiles


def state_table_of(
    operands: Operands, shape: tuple[int, int], masks: Sequence[Reordered], with_tiles: bool
) -> tuple[StateTable, Any]:
    """Returns the block states of the mask that limits a selection, and its tiles; see `run_time_blocks`."""
    if operands.mask is None:
        return state_table(masks, shape, with_tiles)
    return run_time_state_table(operands.mask, shape)
