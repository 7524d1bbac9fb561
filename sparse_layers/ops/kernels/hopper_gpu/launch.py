"""Launches of the Hopper kernels: one pass of a head group, or two of them forward.

`unsupported` says why these kernels cannot compute a pass. `forward` and `dqkv` compute a `GroupPass`: each builds
block lists, schedules work tiles, and calls the bridge.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....masks.bounded_cache import bounded_cache
from ...planning.block_lists import MAX_QUERY_GROUPS, BlockLists, BlockPairs, planned_block_pairs
from ...planning.causality import is_causal
from ...planning.plan import Pass
from ...planning.row_orders import RowOrder
from ..call import Call
from ..gpu import bridge, hardware
from ..gpu.lists import PassLists, RowTiling, build_pass_lists, pack_mask_bits
from ..gpu.passes import BackwardInputs, GroupPass, PassResults, varying_like
from ..gpu.splits import MIN_STEPS
from ..numerics import merge_by_lse
from ..operands import Operands
from . import settings, views
from .backward_kernel import BackwardConstants, hopper_backward_kernel
from .forward_kernel import ForwardConstants, hopper_forward_kernel
from .schedule import (
    FLOAT32_STEPS,
    build_schedule,
    has_overlapping_neighbors,
    order_work_tiles,
    split_by_query_ranges,
    split_into_waves,
    split_long_lists,
)
from .tiles import HopperArrayShapes, ListShapes, softmax_scale_log2
from .wide_backward_kernel import hopper_wide_backward_kernel


class _PreparedLaunch(NamedTuple):
    """Lists, schedule and constants of a launch, without the arrays of the op."""

    # Tilings of query rows and of key rows.
    q: RowTiling
    kv: RowTiling
    tile_queries: int  # queries of a tile that TMA loads
    stages: int  # stages of the ring, see `settings`
    constants: dict[str, Any]  # compile-time constants without ``F``
    # Arrays of the kernel from ``schedule`` to ``kv_ids``, or from ``work_tiles`` to ``splits``.
    list_arrays: list[jax.Array]
    programs: int
    split_heads: int  # query heads with the same splits, which add to dk and dv; 0 if no work tile is split


def scaled_neg_lse(lse: jax.Array, call: Call) -> jax.Array:
    """Returns -lse in units of the accumulator, which starts there: adding q . k gives log p, unscaled; -inf stays."""
    return jnp.where(
        lse == -jnp.inf, lse, lse * (-math.log2(math.e) / softmax_scale_log2(call.scale, call.soft_cap or 0.0))
    )


@bounded_cache()
def _fused_lists(passes: tuple[Pass, ...], second_passes: tuple[Pass, ...], q: RowTiling, kv: RowTiling) -> PassLists:
    """Builds lists over the key blocks of two passes with the same query rows; the second's are numbered last."""
    shape = q.block, kv.block
    (pairs, tiles), (second_pairs, second_tiles) = (
        planned_block_pairs([x.mask for x in group], shape, True) for group in (passes, second_passes)
    )
    assert tiles is not None and second_tiles is not None
    tile = np.where(second_pairs.mask_tile < 0, second_pairs.mask_tile, second_pairs.mask_tile + len(tiles))
    joined = (
        (pairs.q_block, second_pairs.q_block),
        (pairs.kv_block, second_pairs.kv_block + pairs.num_blocks[1]),
        (pairs.state, second_pairs.state),
        (pairs.mask_tile, tile),
    )
    row, column, state, tile = (np.concatenate(pair, axis=-1) for pair in joined)
    fused = BlockPairs(
        row, column, state, tile, None, (pairs.num_blocks[0], pairs.num_blocks[1] + second_pairs.num_blocks[1])
    )
    mask_bits = pack_mask_bits(np.concatenate([tiles, second_tiles]), q, kv, transposed=False)
    return PassLists(fused.lists(transposed=False), mask_bits, fused.longest(transposed=False))


def unsupported(group_pass: GroupPass, direction: str) -> str | None:
    """Returns the reason why these kernels cannot compute a pass, or None. "backward" computes dq, dk and dv."""
    if group_pass.fused_with is not None:  # a reason against one pass holds for both
        reasons = [unsupported(one, direction) for one in group_pass.unfused()]
        if any(reasons):
            return next(filter(None, reasons))
    operands, sizes = group_pass.operands, (group_pass.operands.query.shape[-1], group_pass.operands.value.shape[-1])
    if any(size % 8 for size in sizes):
        return f"the Hopper kernels take head sizes that are multiples of 8, got {settings.size_text(*sizes)}"
    params = group_pass.call.params[direction != "forward"]
    if params.has_kernel_settings:
        return f"the Hopper kernels have no setting but q_blocksize and kv_blocksize, got {params}"
    if direction == "backward" and group_pass.call.params[1].deterministic:
        return "the Hopper backward kernel adds to dq in any order, which BwdParams(deterministic=True) rules out"
    one_group = has_one_group(operands)
    if direction == "backward" and one_group:
        # 109,632 tokens, 64 blocks of 64 keys for 64 queries, 24 heads of 128, on an H200: 40.6 ms with one group a
        # program, 39.2 by Triton. Without the additions it took 15 ms less.
        return (
            "64 queries select together, and a kernel that adds 64 rows of dq in L2 for each selected block takes "
            "longer than two Triton kernels"
        )
    rows, block = _block_shape(group_pass, direction)
    rows_held, walked = (rows, block) if direction == "forward" else (block, rows)
    fills_tiles = walked % settings.TILE_ROWS == 0 or (direction == "forward" and walked in settings.STEP_KEYS)
    if rows_held != (settings.GROUP_ROWS if one_group else settings.TILE_ROWS) or not fills_tiles:
        needed = "forward kernel takes blocks of 128 queries and 64 or a multiple of 128 keys"
        if direction == "backward":
            needed = "backward kernel takes blocks of a multiple of 128 queries and 128 keys"
        return f"the Hopper {needed}, got {rows} queries and {block} keys"
    if (reason := _bias_unsupported(group_pass, direction)) is not None:
        return reason
    entries = sum(x.fwd_blocks if direction == "forward" else x.bwd_blocks for x in group_pass.passes)
    if entries * walked // settings.GROUP_ROWS >= 1 << 31:
        return "the Hopper kernels count steps in 32 bits, and this pass has more"
    if direction == "forward" and not group_pass.q_order.covers_all_tokens:
        return "the Hopper forward kernel takes passes over all queries, and this one is over some"
    for order, number in (
        (group_pass.q_order, _tile_queries(group_pass, direction)),
        (group_pass.kv_order, settings.tile_keys(block, _head_sizes(group_pass).query_key, one_group)),
    ):
        if _box_view(group_pass, order, number) is None:
            return f"a TMA descriptor cannot address the rows of {order}"
    is_static = all(x is None for x in (operands.segments, operands.mask, operands.selection))
    if direction == "forward" and is_static and _is_skewed(group_pass):
        return (
            "one block list has more than 1.5 times a multiprocessor's share of the work, and the Hopper forward "
            "kernel splits no lists"
        )
    return None


def _table_of_pairs(group_pass: GroupPass) -> jax.Array | None:
    """Returns the table of a bias if pairs of a pass get several of its entries, else None."""
    return group_pass.operands.bias_table if group_pass.bias_entry is None else None


def _has_table(group_pass: GroupPass) -> bool:
    """True if the bias of a pass needs an entry for each distance, in which slopes are included.

    Slopes alone need none under a static, causal mask for as many queries as keys.
    """
    plan = group_pass.call.plan
    if _table_of_pairs(group_pass) is not None:
        return True
    if group_pass.operands.bias_slopes is None:
        return False
    return plan is None or plan.q_len != plan.kv_len or not all(is_causal(mask, plan.q_len) for mask in plan.masks)


def _bias_unsupported(group_pass: GroupPass, direction: str) -> str | None:
    """Returns why these kernels cannot add the bias of a pass to logits, or None."""
    call, has_table, has_slopes = group_pass.call, _has_table(group_pass), group_pass.operands.bias_slopes is not None
    if not (has_table or has_slopes):
        return None
    if call.bias_orders is not None:
        return "the Hopper kernels count the distances of a bias by tokens"
    if softmax_scale_log2(call.scale, call.soft_cap or 0.0) == 1.0:
        return "the Hopper kernels add a bias before the scale, which must be positive, and know no soft cap of it"
    if not has_table or direction == "forward":
        return None
    if _table_of_pairs(group_pass) is not None:
        return "the Hopper backward kernels have no table of a bias"
    return "the Hopper backward kernels take slopes with a static, causal mask for as many queries as keys"


def has_one_group(operands: Operands) -> bool:
    """True if a program of the forward kernel has one group: 64 queries select blocks, and heads are 128 at most."""
    selection, size = operands.selection, max(operands.query.shape[-1], operands.value.shape[-1])
    return selection is not None and selection.granularity == settings.GROUP_ROWS and size <= settings.OUT_COLUMNS


def can_fuse(group_pass: GroupPass, second: GroupPass, direction: str) -> bool:
    """True if one kernel can compute two supported passes: forward, with static lists and no bias by pair."""
    operands, shapes = group_pass.operands, [x.passes[0].fwd_shape for x in (group_pass, second)]
    has_bias = operands.bias_slopes is not None or _has_table(group_pass) or _has_table(second)
    fits = operands.segments is None and not has_bias and shapes[0] == shapes[1]
    return direction == "forward" and fits and group_pass.same_rows(second)


def forward(
    group_pass: GroupPass, earlier: PassResults | None, sinks: jax.Array | None, in_input_dtype: bool
) -> PassResults:
    """Launches the forward kernel: returns (out, lse) of a pass, or of two; see `triton_gpu.launch.forward`."""
    query, value = group_pass.operands.query, group_pass.operands.value
    natural = RowOrder(query.shape[1])
    if earlier is not None and not (
        in_input_dtype and earlier.order.natural and earlier.arrays[0].dtype == query.dtype
    ):
        out, lse = earlier.by_token()
        if sinks is not None:  # queries that earlier passes lack start from their sink here
            lse = jnp.where(lse == -jnp.inf, sinks[group_pass.first :: group_pass.step], lse)
        out, lse = merge_by_lse((out, lse), forward(group_pass, None, None, True).by_token())
        return PassResults(natural, (out, lse.swapaxes(1, 2)))
    prepared, sizes = _prepare(group_pass, "forward"), _head_sizes(group_pass)
    one_group = has_one_group(group_pass.operands)
    order, keys = prepared.q.order, settings.tile_keys(prepared.kv.tile, sizes.query_key, one_group)
    kv_order = (group_pass.fused_with or group_pass).kv_order  # of the second pass
    kv_view2 = views.rows_view(kv_order, prepared.kv.tile)
    kv_view2 = kv_view2._replace(ROWS=0) if group_pass.fused_with is None else kv_view2
    out = jax.ShapeDtypeStruct((*query.shape[:2], group_pass.heads, value.shape[-1]), query.dtype)
    lse = jax.ShapeDtypeStruct((query.shape[0], group_pass.heads, prepared.constants["Q"].ROWS), jnp.float32)
    unused = jnp.zeros((1,), jnp.float32)
    out_columns = min(sizes.value, settings.OUT_COLUMNS)
    inputs = [
        _descriptor(query, order, prepared.tile_queries, sizes.query_key),
        *(
            _descriptor(x, rows, keys, columns)
            for rows in (prepared.kv.order, kv_order)
            for x, columns in ((group_pass.operands.key, sizes.query_key), (value, sizes.value))
        ),
        _descriptor(query if earlier is None else earlier.arrays[0], order, prepared.tile_queries, out_columns),
        *prepared.list_arrays,
        *(_table(group_pass, prepared.constants["A"]) or _slopes(group_pass)),
        unused if sinks is None else sinks,
        unused if earlier is None else _by_row(_without_bias(earlier.arrays[1], group_pass), prepared.q, 0.0),
    ]
    forward_constants = ForwardConstants(
        keys,
        1 if one_group else settings.Q_STAGES[sizes.query_key],
        prepared.stages,
        one_group,
        sinks is not None,
        earlier is not None,
    )
    results, constants = (
        [_descriptor(out, order, prepared.tile_queries, out_columns), lse],
        {"KV2": kv_view2, "F": forward_constants},
    )
    registers = settings.ONE_GROUP_REGISTERS if one_group else None
    out, lse = _launch(group_pass, hopper_forward_kernel, prepared, inputs, results, constants, {}, registers)
    lse = lse.swapaxes(1, 2)
    lse = lse[:, : query.shape[1]] if order.natural else order.scatter(lse, -jnp.inf)
    return PassResults(natural, (out, _with_bias(lse.swapaxes(1, 2), group_pass)))


def dqkv(
    group_pass: GroupPass,
    inputs: BackwardInputs,
    earlier: PassResults | None,
    earlier_kv: PassResults | None,
    kv_in_input_dtype: bool,
) -> tuple[PassResults, PassResults]:
    """Launches the backward kernel: returns (dq in float32, (dk, dv)) of a pass, added to earlier gradients.

    With ``kv_in_input_dtype``, dk and dv of all tokens are stored in their dtype, else in float32.
    """
    query, key, value = group_pass.operands.query, group_pass.operands.key, group_pass.operands.value
    prepared, sizes = _prepare(group_pass, "backward"), _head_sizes(group_pass)
    q, kv, tile_queries = prepared.q, prepared.kv, prepared.tile_queries
    keys = settings.tile_keys(kv.tile, sizes.query_key)
    lse, delta = (x[:, group_pass.first :: group_pass.step] for x in (inputs.lse, inputs.delta))
    lse = _by_row(scaled_neg_lse(_without_bias(lse, group_pass), group_pass.call), q, -jnp.inf)
    if slopes := _slopes(group_pass):
        offsets = views.box_offsets(q.order, tile_queries).astype(np.float32)  # of queries from the first one of a step
        shift = np.tile(offsets, lse.shape[-1] // tile_queries)[None, None]
        lse -= slopes[0][None, group_pass.first :: group_pass.step, None] * shift
    scalars = lse, _by_row(delta * -group_pass.call.scale, q, 0.0)
    # The kernel adds in place to earlier gradients: to dq in float32, and to dk and dv of all keys if these may be
    # rounded from pass to pass, or are sums over splits.
    dq = jnp.zeros((*query.shape[:2], group_pass.heads, query.shape[-1]), jnp.float32)
    initial = [dq if earlier is None else earlier.by_token()[0].astype(jnp.float32), None, None]
    # Splits add in float32, to earlier gradients or to zeros. dk and dv of only some keys are by row.
    all_keys = kv.order.covers_all_tokens
    dkv_order = kv.order if all_keys else RowOrder(kv.order.rows)
    dkv_dtype = jnp.float32 if prepared.split_heads else key.dtype
    shapes = dq.shape, *((x.shape[0], dkv_order.length, *x.shape[2:]) for x in (key, value))
    in_place = earlier_kv is not None and all_keys and (prepared.split_heads > 0 or kv_in_input_dtype)
    if in_place:
        assert earlier_kv is not None
        initial[1:] = [x.astype(dkv_dtype) for x in earlier_kv.by_token()]
    elif prepared.split_heads:
        initial[1:] = [jnp.zeros(shape, dkv_dtype) for shape in shapes[1:]]
    arrays = [
        _descriptor(query, q.order, tile_queries, sizes.query_key),
        _descriptor(inputs.dout, q.order, tile_queries, sizes.value),
        _descriptor(key, kv.order, keys, sizes.query_key),
        _descriptor(value, kv.order, keys, sizes.value),
        *(bridge.TensorDescriptor.of(x.reshape(-1, x.shape[-1]), (1, tile_queries)) for x in scalars),
        *prepared.list_arrays,
        *_slopes(group_pass),
    ]
    aliases = {len(arrays) + i: i for i, x in enumerate(initial) if x is not None}
    arrays += [jnp.zeros((1,), jnp.float32) if x is None else x for x in initial]
    results = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, (dq.dtype, dkv_dtype, dkv_dtype), strict=True)]
    outputs = [
        _descriptor(results[0], q.order, tile_queries, sizes.query_key // 2),
        *(
            _descriptor(x, dkv_order, settings.GROUP_ROWS, columns // (1 + bool(prepared.split_heads)))
            for x, columns in zip(results[1:], sizes, strict=False)
        ),
    ]
    constants = {
        "DKV": views.rows_view(dkv_order, kv.tile),
        "F": BackwardConstants(
            tile_queries, keys, prepared.stages, prepared.split_heads > 0 or in_place, max(1, prepared.split_heads)
        ),
    }
    kernel = hopper_wide_backward_kernel if settings.is_wide(sizes) else hopper_backward_kernel
    dq, *dkv = _launch(group_pass, kernel, prepared, arrays, outputs, constants, aliases)
    dkv = PassResults(RowOrder(key.shape[1]) if all_keys else kv.order, tuple(dkv))
    if earlier_kv is not None and not in_place:
        sums = (a.astype(jnp.float32) + b for a, b in zip(dkv.by_token(), earlier_kv.by_token(), strict=True))
        dkv = PassResults(RowOrder(key.shape[1]), tuple(sums))
    return PassResults(RowOrder(query.shape[1]), (dq,)), dkv


# --- blocks and tiles ------------------------------------------------------------------------------------------------


def _block_shape(group_pass: GroupPass, direction: str) -> tuple[int, int]:
    """Returns (bq, bkv), the block shape of the lists that these kernels walk."""
    if (selection := group_pass.operands.selection) is not None:
        rows = settings.GROUP_ROWS if has_one_group(group_pass.operands) else settings.TILE_ROWS
        return min(rows, MAX_QUERY_GROUPS * selection.granularity), selection.block
    return group_pass.block_shape(transposed=direction == "backward")


def _subblocks_per_block(group_pass: GroupPass, direction: str) -> int:
    """Returns the number of subblocks into which the device divides a planned block of several tiles.

    Documents may begin and end within a block. Static lists of single tiles would be too long, so the plan has longer
    blocks, and the device lists their tiles if there are segment ids.
    """
    if group_pass.operands.segments is None or not group_pass.passes:
        return 1
    is_forward = direction == "forward"
    tiles = max(1, _block_shape(group_pass, direction)[is_forward] // settings.TILE_ROWS)
    blocks = len(group_pass.passes) * max(x.fwd_blocks if is_forward else x.bwd_blocks for x in group_pass.passes)
    # Each subblock takes three numbers once, and four for each batch entry.
    most = settings.MAX_LIST_BYTES // max(1, (12 + 16 * group_pass.operands.query.shape[0]) * blocks)
    return next(n for n in range(tiles, 0, -1) if n == 1 or (n <= most and tiles % n == 0))


def _head_sizes(group_pass: GroupPass) -> settings.PaddedSizes:
    """Returns the padded head sizes of a supported pass."""
    return settings.padded_head_sizes(group_pass.operands.query.shape[-1], group_pass.operands.value.shape[-1])


def _tile_queries(group_pass: GroupPass, direction: str) -> int:
    """Returns the queries of a tile: those of a group of warps forward, and of a step backward."""
    tile_queries = settings.STEP_QUERIES[_head_sizes(group_pass).query_key]
    # Logits that are not only scaled products (soft caps, negative scales) take registers: hundreds would be spilled.
    only_scaled = softmax_scale_log2(group_pass.call.scale, group_pass.call.soft_cap or 0.0) != 1.0
    use_step_queries = (
        direction == "backward" and only_scaled and _box_view(group_pass, group_pass.q_order, tile_queries) is not None
    )
    return tile_queries if use_step_queries else settings.GROUP_ROWS


def _box_view(group_pass: GroupPass, order: RowOrder, rows: int) -> Any:
    """Returns `views.box_view` if a descriptor has enough axes; with three, heads and sizes share one axis."""
    view, operands = views.box_view(order, rows), group_pass.operands
    if view is None or len(view[0]) < 3:
        return view
    return view if (operands.query.shape[-1], operands.value.shape[-1]) == _head_sizes(group_pass)[:2] else None


def _descriptor(array: Any, order: RowOrder, rows: int, columns: int) -> bridge.TensorDescriptor:
    """Returns the descriptor of an array [B, length, heads, size] for boxes of ``rows`` rows of a head.

    A box has ``columns``: the padded head size, or a part of it.
    """
    view = views.box_view(order, rows)
    assert view is not None
    (lengths, box), (batch, length, heads, size) = view, array.shape
    vector = heads * size
    shape, last, box = (heads, size), (size, 1), (*box, 1, columns)
    if len(lengths) == 3:
        shape, last, box = (vector,), (1,), (*box[:3], columns)
    strides = (math.prod(lengths[i + 1 :]) * vector for i in range(len(lengths)))
    return bridge.TensorDescriptor(array, (batch, *lengths, *shape), (length * vector, *strides, *last), (1, *box))


def _slopes(group_pass: GroupPass) -> list[jax.Array]:
    """Returns the slopes of a bias by query head, in units of q . k; no array where there are none."""
    slopes = group_pass.operands.bias_slopes
    return [] if slopes is None else [slopes / np.float32(group_pass.call.scale)]


def _table(group_pass: GroupPass, shapes: HopperArrayShapes) -> list[jax.Array]:
    """Returns the bias of all distances of a pass by query head, in units of q . k; no array where it has no table."""
    if not shapes.TABLE_LENGTH:
        return []
    call, table, slopes = group_pass.call, _table_of_pairs(group_pass), group_pass.operands.bias_slopes
    distance = jnp.arange(shapes.TABLE_LENGTH) - shapes.TABLE_CENTER
    bias = jnp.zeros((shapes.HEADS, 1), jnp.float32)
    if table is not None:
        bias = table[:, jnp.clip(distance + call.bias_center, 0, table.shape[1] - 1)]
    if slopes is not None:
        bias -= slopes[:, None] * abs(distance)[None].astype(jnp.float32)
    return [bias / np.float32(call.scale)]


def _bias_of_pairs(group_pass: GroupPass) -> jax.Array | None:
    """Returns the bias of all pairs of a pass by query head [1, heads, 1], which kernels leave out; None for none."""
    table, entry = group_pass.operands.bias_table, group_pass.bias_entry
    return None if table is None or entry is None else table[None, group_pass.first :: group_pass.step, entry, None]


def _with_bias(lse: jax.Array, group_pass: GroupPass) -> jax.Array:
    """Returns lse [B, heads, T] of a kernel with the bias of the pass; -inf stays."""
    bias = _bias_of_pairs(group_pass)
    return lse if bias is None else jnp.where(lse == -jnp.inf, lse, lse + bias)


def _without_bias(lse: jax.Array, group_pass: GroupPass) -> jax.Array:
    """Returns lse [B, heads, T] without the bias of the pass; -inf for no key, also where a bias of -inf hides all."""
    bias = _bias_of_pairs(group_pass)
    if bias is None:
        return lse
    return jnp.where((lse == -jnp.inf) | (bias == -jnp.inf), -jnp.inf, lse - bias)


def _by_row(x: jax.Array, side: RowTiling, fill: float) -> jax.Array:
    """Gathers [B, heads, length] by token to [B, heads, rows of all blocks]; ``fill`` where a row has no token."""
    return side.order.gather(x.swapaxes(1, 2), side.num_blocks * side.block, fill).swapaxes(1, 2)


# --- lists and work tiles --------------------------------------------------------------------------------------------


def _lists(group_pass: GroupPass, direction: str) -> tuple[RowTiling, RowTiling, PassLists, Any, Any]:
    """Returns (q tiling, kv tiling, lists, steps [LB, heads, blocks] of work tiles, steps of earlier heads)."""
    transposed, (bq, bkv) = direction == "backward", _block_shape(group_pass, direction)
    subblocks = _subblocks_per_block(group_pass, direction)
    bq, bkv = (bq // subblocks, bkv) if transposed else (bq, bkv // subblocks)
    q, kv = RowTiling(group_pass.q_order, bq, bq), RowTiling(group_pass.kv_order, bkv, bkv)
    outer, inner = (kv, q) if transposed else (q, kv)
    if group_pass.fused_with is None:
        call, operands, mark = group_pass.call, group_pass.operands, settings.COMPARE_IDS
        lists = build_pass_lists(call, operands, group_pass.passes, outer, inner, transposed, subblocks, mark)
    else:
        lists = _fused_lists(group_pass.passes, group_pass.fused_with.passes, q, kv)
    steps, steps_before = group_pass.count_steps([(inner, lists)], transposed=transposed, pack=1)
    return q, kv, lists, steps.reshape(len(steps), -1, outer.num_blocks), steps_before


def _is_skewed(group_pass: GroupPass) -> bool:
    """True if the longest work tile forward takes much longer than a multiprocessor's share of all."""
    steps = _lists(group_pass, "forward")[3]
    share = steps.sum() / len(steps) * group_pass.operands.query.shape[0] / hardware.local_gpu().multiprocessors
    return steps.max(initial=0) > max(MIN_STEPS, 1.5 * share)


def _prepare(group_pass: GroupPass, direction: str) -> _PreparedLaunch:
    multiprocessors, sizes = hardware.local_gpu().multiprocessors, _head_sizes(group_pass)
    one_group = has_one_group(group_pass.operands)
    transposed, batch = direction == "backward", group_pass.operands.query.shape[0]
    q, kv, pass_lists, steps, steps_before = _lists(group_pass, direction)
    lists = pass_lists.block_lists
    if transposed:
        schedule, splits = _order_backward_tiles(group_pass, kv, lists, steps, steps_before)
    else:
        schedule, splits = build_schedule(steps, batch, multiprocessors * (1 + one_group)), None
        schedule = split_into_waves(schedule) if group_pass.call.exchanges_queries else schedule
    sides = zip(group_pass.ids, (q, kv), (-2, -1), strict=True)
    ids = [lists.spans if x is None else _by_row(x, side, padding) for x, side, padding in sides]
    active_query_groups = lists.inner_block if lists.active_query_groups is None else lists.active_query_groups
    list_arrays: list[Any] = [
        schedule,
        lists.spans,
        lists.inner_block,
        lists.mask_tile,
        active_query_groups,
        pass_lists.mask_bits,
    ]
    list_arrays += ids
    list_arrays += [lists.spans if splits is None else splits] if transposed else []
    batches, list_heads = lists.spans.shape[:2]
    num_splits = 0 if splits is None else len(splits)
    split_heads = 0 if splits is None else schedule.shape[0] // (batch * num_splits)
    list_shapes = ListShapes(
        batches, list_heads, lists.heads_per_list, steps.shape[2], num_splits, pass_lists.granularity
    )
    row_views = {"Q": views.rows_view(q.order, q.tile), "KV": views.rows_view(kv.order, kv.tile)}
    tile_queries = _tile_queries(group_pass, direction)
    keys = settings.tile_keys(kv.tile, sizes.query_key, one_group)
    kernel = "backward" if transposed else "forward_one_group" if one_group else "forward"
    stages = settings.num_stages(kernel, sizes, keys, tile_queries)
    shapes = array_shapes(group_pass, sizes)
    if _has_table(group_pass):
        q_rows, kv_rows = (max(side.num_blocks * side.block, side.order.length) for side in (q, kv))
        shapes = shapes._replace(TABLE_LENGTH=q_rows + kv_rows - 1, TABLE_CENTER=q_rows - 1)
    constants = {"A": shapes, **row_views, "L": list_shapes}
    constants |= {} if shapes.ALIBI else {"slopes": None}
    constants |= {} if shapes.TABLE_LENGTH or transposed else {"bias_table": None}
    constants |= {"CONSUMER_REGISTERS": settings.CONSUMER_REGISTERS, "PRODUCER_REGISTERS": settings.PRODUCER_REGISTERS}
    programs = schedule.shape[-1] * (_programs_per_tile(kv, sizes) if transposed else 1)
    return _PreparedLaunch(
        q, kv, tile_queries, stages, constants, [jnp.asarray(x) for x in list_arrays], programs, split_heads
    )


def _programs_per_tile(kv: RowTiling, sizes: settings.PaddedSizes) -> int:
    """Returns the programs of the backward kernel that compute a work tile: each has some of its keys."""
    return kv.tile // settings.tile_keys(kv.tile, sizes.query_key)


def array_shapes(group_pass: GroupPass, sizes: settings.PaddedSizes) -> HopperArrayShapes:
    """Returns the constant A of the kernels."""
    return HopperArrayShapes(
        HEADS=group_pass.operands.query.shape[2],
        KV_HEADS=group_pass.operands.key.shape[2],
        D=sizes.query_key,
        DV=sizes.value,
        DEPTH=sizes.depth,
        SCALE=group_pass.call.scale,
        CAP=group_pass.call.soft_cap or 0.0,
        FIRST_HEAD=group_pass.first,
        HEAD_STEP=group_pass.step,
        PASS_HEADS=group_pass.heads,
        NUM_IDS=group_pass.num_ids,
        ALIBI=group_pass.operands.bias_slopes is not None and not _has_table(group_pass),
    )


def _order_backward_tiles(
    group_pass: GroupPass, kv: RowTiling, lists: BlockLists, steps: Any, steps_before: Any
) -> tuple[Any, Any]:
    """Returns the order of the backward work tiles, and their splits, None if there are none."""
    batch, sizes = group_pass.operands.query.shape[0], _head_sizes(group_pass)
    programs = hardware.local_gpu().multiprocessors // _programs_per_tile(kv, sizes)
    if not isinstance(steps, np.ndarray):
        return order_work_tiles(steps, batch, programs, False), None
    if len(steps) == 1:
        heads, members = group_pass.heads_by_list(transposed=True, pack=1)
        key_heads, list_of_head = members.argmax(0), heads // lists.heads_per_list % lists.spans.shape[1]
        row_bytes = sizes.query_key * 6 + sizes.value * 2  # q, dout, and dq in float32
        order, splits = split_by_query_ranges(
            lists, list_of_head, key_heads, batch, programs, _block_shape(group_pass, "backward")[0], row_bytes
        )
        if splits is not None:
            return order, splits
        keys = group_pass.operands.key.shape[1] * group_pass.operands.key.shape[2]
        lost_steps = FLOAT32_STEPS[kv.order.covers_all_tokens] * batch * keys / settings.TILE_ROWS / programs
        order, splits = split_long_lists(steps[0], steps_before[0], key_heads, batch, programs, lost_steps)
        if splits is not None:
            return order, splits
    # Neighbouring work tiles share cached q, dout and dq. With several query heads they would soon be at different
    # heads; work tiles of equal length stay at the same head for longer.
    as_numbered = group_pass.heads == steps.shape[1] and has_overlapping_neighbors(
        lists.spans, lists.inner_block, lists.num_inner_blocks
    )
    return order_work_tiles(steps, batch, programs, as_numbered), None


def _launch(
    group_pass: GroupPass, kernel, prepared: _PreparedLaunch, inputs, outputs, constants, aliases, registers=None
) -> list[jax.Array]:
    constants = prepared.constants | constants
    results = bridge.call_gluon(kernel, prepared.programs, inputs, outputs, constants, aliases, registers)
    return [varying_like(group_pass.operands.query, x) for x in results]
