"""Launches of the Hopper kernels: one pass of a head group, or two of them forward.

`unsupported` says why these kernels do not do a pass. `forward` and `dqkv` compute a `GroupPass`: each makes block
lists, deals work tiles out to programs, and calls the bridge.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....masks.bounded_cache import bounded_cache
from ...planning.block_lists import MAX_QUERY_GROUPS, BlockLists, BlockPairs, planned_block_pairs
from ...planning.plan import Pass
from ...planning.row_orders import RowOrder
from ..call import Call
from ..gpu import bridge, hardware
from ..gpu.lists import Lists, Side, bits_of, lists_of
from ..gpu.passes import BackwardInputs, GroupPass, Rows, varying_like
from ..gpu.splits import MIN_STEPS
from ..numerics import merge_by_lse
from . import settings, views
from .backward_kernel import BackwardConstants, backward_kernel
from .forward_kernel import ForwardConstants, forward_kernel
from .schedule import (
    FLOAT32_STEPS,
    build_schedule,
    has_overlapping_neighbors,
    order_work_tiles,
    split_by_query_ranges,
    split_into_waves,
    split_long_lists,
)
from .tiles import Arrays, ListShapes, softmax_scale_log2


class _Prepared(NamedTuple):
    """A launch but for the op's arrays.

    Attributes:
      q, kv: how rows are cut.
      part: queries of a tile that is fetched.
      stages: how many tiles it holds, see `settings`.
      constants: what it is compiled with, but for ``F``.
      read: its arrays from ``schedule`` or ``order`` to ``kv_segments`` or ``pieces``.
      programs: how many are started.
      times: 0 if items are whole; else how many query heads have the same pieces, which add to dk and dv.
    """

    q: Side
    kv: Side
    part: int
    stages: int
    constants: dict[str, Any]
    read: list[jax.Array]
    programs: int
    times: int


def scaled_neg_lse(lse: jax.Array, call: Call) -> jax.Array:
    """Backward accumulators start at -lse, scaled, so that q.k sums to log-weights; -inf for queries without keys."""
    return jnp.where(
        lse == -jnp.inf, lse, lse * (-math.log2(math.e) / softmax_scale_log2(call.scale, call.soft_cap or 0.0))
    )


@bounded_cache()
def _fused_lists(passes: tuple[Pass, ...], more: tuple[Pass, ...], q: Side, kv: Side) -> Lists:
    """Lists over the key blocks of two passes with the same query rows; those of the second one are numbered last."""
    shape = q.block, kv.block
    (a, tiles), (b, more_tiles) = (planned_block_pairs([x.mask for x in each], shape, True) for each in (passes, more))
    assert tiles is not None and more_tiles is not None
    tile = np.where(b.tile < 0, b.tile, b.tile + len(tiles))
    pairs = (a.row, b.row), (a.column, b.column + a.blocks[1]), (a.kind, b.kind), (a.tile, tile)
    row, column, kind, tile = (np.concatenate(pair, axis=-1) for pair in pairs)
    both = BlockPairs(row, column, kind, tile, None, (a.blocks[0], a.blocks[1] + b.blocks[1]))
    bits = bits_of(np.concatenate([tiles, more_tiles]), q, kv, dkv=False)
    return Lists(both.lists(kv_major=False), bits, both.longest(kv_major=False))


def unsupported(work: GroupPass, kernel: str) -> str | None:
    """Why these kernels do not do a pass, "forward" or "dkv", or None; the latter computes dq, dk and dv."""
    if work.fused_with is not None:  # what keeps either of them out does not go away by doing both
        reasons = [unsupported(one, kernel) for one in work.unfused()]
        if any(reasons):
            return next(filter(None, reasons))
    operands, sizes = work.operands, (work.operands.query.shape[-1], work.operands.value.shape[-1])
    if _padded(work) is None or any(size % 8 for size in sizes):
        largest = settings.HEAD_SIZES[-1]
        return f"the Hopper kernels take head sizes that are multiples of 8 up to {largest}, got {size_text(*sizes)}"
    params = work.call.params[kernel != "forward"]
    if params.has_kernel_settings:
        return f"the Hopper kernels have no setting but q_blocksize and kv_blocksize, got {params}"
    if kernel == "dkv" and work.call.params[1].deterministic:
        return "the Hopper backward kernel adds to dq in any order, which BwdParams(deterministic=True) rules out"
    rows, block = _block_shape(work, kernel)
    rows_held, walked = (rows, block) if kernel == "forward" else (block, rows)
    fills_tiles = walked % settings.TILE_ROWS == 0 or (kernel == "forward" and walked in settings.STEP_KEYS)
    if rows_held != settings.TILE_ROWS or not fills_tiles:
        needed = "forward kernel takes blocks of 128 queries and 64 or a multiple of 128 keys"
        if kernel == "dkv":
            needed = "backward kernel takes blocks of a multiple of 128 queries and 128 keys"
        return f"the Hopper {needed}, got {rows} queries and {block} keys"
    entries = sum(x.fwd_blocks if kernel == "forward" else x.bwd_blocks for x in work.passes)
    if entries * walked // settings.GROUP_ROWS >= 1 << 31:
        return "the Hopper kernels count steps in 32 bits, and this pass has more"
    if kernel == "forward" and not work.q_order.complete:
        return "the Hopper forward kernel takes passes over all queries, and this one is over some"
    for order, number in ((work.q_order, _part(work, kernel)), (work.kv_order, settings.tile_keys(block))):
        if _view(work, order, number) is None:
            return f"a TMA descriptor cannot address the rows of {order}"
    known = all(x is None for x in (operands.segments, operands.mask, operands.selection))
    if kernel == "forward" and known and _is_skewed(work):
        return (
            "one block list has more than 1.5 times a multiprocessor's share of the work, and the Hopper forward "
            "kernel splits no lists"
        )
    return None


def size_text(query_key: int, value: int) -> str:
    """The head sizes in words, of an error."""
    return str(query_key) if query_key == value else f"{query_key} of q and k, {value} of v"


def can_fuse(work: GroupPass, other: GroupPass, kernel: str) -> bool:
    """True if one kernel can do two passes that these kernels support: by lists that are known beforehand."""
    known = work.operands.segments is None and work.passes[0].fwd_shape == other.passes[0].fwd_shape
    return kernel == "forward" and known and work.same_rows(other)


def forward(work: GroupPass, before: Rows | None, sinks: jax.Array | None, rounded: bool) -> Rows:
    """(out, lse) of a pass, or of two; arguments as in `triton_gpu.launch.forward`."""
    query, value = work.operands.query, work.operands.value
    natural = RowOrder(query.shape[1])
    if before is not None and not (rounded and before.order.natural and before.arrays[0].dtype == query.dtype):
        out, lse = before.by_token()
        if sinks is not None:  # where queries have no row there, they begin here; the others began from theirs
            lse = jnp.where(lse == -jnp.inf, sinks[work.first :: work.step], lse)
        out, lse = merge_by_lse((out, lse), forward(work, None, None, True).by_token())
        return Rows(natural, (out, lse.swapaxes(1, 2)))
    prepared = _prepare(work, "forward")
    order, keys = prepared.q.order, settings.tile_keys(prepared.kv.tile)
    kv_order = (work.fused_with or work).kv_order  # of the second pass
    second = views.rows_view(kv_order, prepared.kv.tile)
    second = second._replace(ROWS=0) if work.fused_with is None else second
    out = jax.ShapeDtypeStruct((*query.shape[:2], work.heads, value.shape[-1]), query.dtype)
    lse = jax.ShapeDtypeStruct((query.shape[0], work.heads, prepared.constants["Q"].ROWS), jnp.float32)
    unused = jnp.zeros((1,), jnp.float32)
    inputs = [
        _tiles(work, query, order, prepared.part),
        _tiles(work, work.operands.key, prepared.kv.order, keys),
        _tiles(work, value, prepared.kv.order, keys),
        *(_tiles(work, x, kv_order, keys) for x in (work.operands.key, value)),
        _tiles(work, query if before is None else before.arrays[0], order, prepared.part),
        *prepared.read,
        unused if sinks is None else sinks,
        unused if before is None else _by_row(before.arrays[1], prepared.q, 0.0),
    ]
    compiled = ForwardConstants(keys, settings.Q_STAGES, prepared.stages, sinks is not None, before is not None)
    results, fixed = [_tiles(work, out, order, prepared.part), lse], {"KV2": second, "F": compiled}
    out, lse = _run(work, forward_kernel, prepared, inputs, results, fixed, {})
    lse = lse.swapaxes(1, 2)
    lse = lse[:, : query.shape[1]] if order.natural else order.scatter(lse, -jnp.inf)
    return Rows(natural, (out, lse.swapaxes(1, 2)))


def dqkv(
    work: GroupPass, inputs: BackwardInputs, before: Rows | None, before_kv: Rows | None, rounded_kv: bool
) -> tuple[Rows, Rows]:
    """(dq in float32, (dk, dv)) of a pass, added to gradients that are there.

    Args:
      work: the pass.
      inputs: arrays by query.
      before: dq that is added to; None for none.
      before_kv: dk and dv that are added to; None for none.
      rounded_kv: whether dk and dv of all tokens may be kept in their dtype; else in float32.
    """
    query, key, value = work.operands.query, work.operands.key, work.operands.value
    prepared = _prepare(work, "dkv")
    q, kv, part = prepared.q, prepared.kv, prepared.part
    lse, delta = (x[:, work.first :: work.step] for x in (inputs.lse, inputs.delta))
    lse = scaled_neg_lse(lse, work.call)
    scalars = _by_row(lse, q, -jnp.inf), _by_row(delta * -work.call.scale, q, 0.0)
    # Results are added in place to what is there: dq in float32; dk and dv of all keys if these may be rounded in
    # between, or come in splits.
    dq = jnp.zeros((*query.shape[:2], work.heads, query.shape[-1]), jnp.float32)
    earlier = [dq if before is None else before.by_token()[0].astype(jnp.float32), None, None]
    # Splits are added in float32: to what is there or to zeros. dk and dv of only some keys are by row.
    all_keys = kv.order.complete
    to = kv.order if all_keys else RowOrder(kv.order.rows)
    exact = jnp.float32 if prepared.times else key.dtype
    shapes = dq.shape, *((x.shape[0], to.length, *x.shape[2:]) for x in (key, value))
    in_place = before_kv is not None and all_keys and (prepared.times > 0 or rounded_kv)
    if in_place:
        assert before_kv is not None
        earlier[1:] = [x.astype(exact) for x in before_kv.by_token()]
    elif prepared.times:
        earlier[1:] = [jnp.zeros(shape, exact) for shape in shapes[1:]]
    arrays = [
        _tiles(work, query, q.order, part),
        _tiles(work, inputs.dout, q.order, part),
        _tiles(work, key, kv.order, kv.tile),
        _tiles(work, value, kv.order, kv.tile),
        *(bridge.Tiles.of(x.reshape(-1, x.shape[-1]), (1, part)) for x in scalars),
        *prepared.read,
    ]
    aliases = {len(arrays) + i: i for i, x in enumerate(earlier) if x is not None}
    arrays += [jnp.zeros((1,), jnp.float32) if x is None else x for x in earlier]
    results = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, (dq.dtype, exact, exact), strict=True)]
    outputs = [
        _tiles(work, results[0], q.order, part, 2),
        *(_tiles(work, x, to, settings.GROUP_ROWS, 1 + bool(prepared.times)) for x in results[1:]),
    ]
    fixed = {
        "DKV": views.rows_view(to, kv.tile),
        "F": BackwardConstants(part, prepared.stages, prepared.times > 0 or in_place, max(1, prepared.times)),
    }
    dq, *dkv = _run(work, backward_kernel, prepared, arrays, outputs, fixed, aliases)
    keys = Rows(RowOrder(key.shape[1]) if all_keys else kv.order, tuple(dkv))
    if before_kv is not None and not in_place:
        sums = (a.astype(jnp.float32) + b for a, b in zip(keys.by_token(), before_kv.by_token(), strict=True))
        keys = Rows(RowOrder(key.shape[1]), tuple(sums))
    return Rows(RowOrder(query.shape[1]), (dq,)), keys


# --- blocks and tiles ------------------------------------------------------------------------------------------------


def _block_shape(work: GroupPass, kernel: str) -> tuple[int, int]:
    """(bq, bkv) of the lists that these kernels walk over."""
    if (selection := work.operands.selection) is not None:
        return min(settings.TILE_ROWS, MAX_QUERY_GROUPS * selection.granularity), selection.block
    return work.block_shape(dkv=kernel == "dkv")


def _parts_of_blocks(work: GroupPass, kernel: str) -> int:
    """Into how many parts blocks of several tiles are cut, for documents may begin and end within a block.

    Lists of so many tiles would be too long to be made beforehand. With segment ids they are made on the device.
    """
    if work.operands.segments is None or not work.passes:
        return 1
    forward = kernel == "forward"
    tiles = max(1, _block_shape(work, kernel)[forward] // settings.TILE_ROWS)
    blocks = len(work.passes) * max(x.fwd_blocks if forward else x.bwd_blocks for x in work.passes)
    # Three numbers of each are kept once, and three for each batch entry.
    most = settings.MAX_LIST_BYTES // max(1, 12 * (1 + work.operands.query.shape[0]) * blocks)
    return next(n for n in range(tiles, 0, -1) if n == 1 or (n <= most and tiles % n == 0))


def _padded(work: GroupPass) -> int | None:
    """What head sizes are rounded up to, those of values, too; None if one is too large."""
    return settings.padded_head_size(max(work.operands.query.shape[-1], work.operands.value.shape[-1]))


def _part(work: GroupPass, kernel: str) -> int:
    """Queries of a tile: those of a group of warps forward, and of a step backward."""
    size = _padded(work)
    assert size is not None
    part = settings.STEP_QUERIES[size]
    # Logits that are not just products (soft caps, negative scales) take registers: hundreds would be spilled.
    of_products = softmax_scale_log2(work.call.scale, work.call.soft_cap or 0.0) != 1.0
    larger = kernel == "dkv" and of_products and _view(work, work.q_order, part) is not None
    return part if larger else settings.GROUP_ROWS


def _view(work: GroupPass, order: RowOrder, rows: int) -> Any:
    """As `box_view` has it, if descriptors have enough axes: with three, that of heads is also that of sizes."""
    view, sizes = views.box_view(order, rows), (work.operands.query.shape[-1], work.operands.value.shape[-1])
    return view if view is None or len(view[0]) < 3 or sizes == (_padded(work),) * 2 else None


def _tiles(work: GroupPass, array: Any, order: RowOrder, rows: int, parts: int = 1) -> bridge.Tiles:
    """Tiles of rows of an array [B, length, heads, size]: so many of one head, and the size or a part of it."""
    view, padded = views.box_view(order, rows), _padded(work)
    assert view is not None and padded is not None
    (lengths, box), (batch, length, heads, size) = view, array.shape
    vector, width = heads * size, padded // parts
    shape, last, box = (heads, size), (size, 1), (*box, 1, width)
    if len(lengths) == 3:
        shape, last, box = (vector,), (1,), (*box[:3], width)
    strides = (math.prod(lengths[i + 1 :]) * vector for i in range(len(lengths)))
    return bridge.Tiles(array, (batch, *lengths, *shape), (length * vector, *strides, *last), (1, *box))


def _by_row(x: jax.Array, side: Side, fill: float) -> jax.Array:
    """[B, heads, length] by token -> [B, heads, rows of whole tiles] by row, ``fill`` where there is no token."""
    return side.order.gather(x.swapaxes(1, 2), side.blocks * side.block, fill).swapaxes(1, 2)


# --- lists and work tiles --------------------------------------------------------------------------------------------


def _lists(work: GroupPass, kernel: str) -> tuple[Side, Side, Lists, Any, Any]:
    """(cut of queries, cut of keys, lists, what `count_steps` says by them, with work tiles [LB, heads, blocks])."""
    dkv, (rows, block), parts = kernel == "dkv", _block_shape(work, kernel), _parts_of_blocks(work, kernel)
    rows, block = (rows // parts, block) if dkv else (rows, block // parts)
    q, kv = Side(work.q_order, rows, rows), Side(work.kv_order, block, block)
    major, minor = (kv, q) if dkv else (q, kv)
    if work.fused_with is None:
        lists = lists_of(work.call, work.operands, work.passes, major, minor, dkv, parts)
    else:
        lists = _fused_lists(work.passes, work.fused_with.passes, q, kv)
    steps, before = work.count_steps([(minor, lists)], dkv=dkv, pack=1)
    return q, kv, lists, steps.reshape(len(steps), -1, major.blocks), before


def _is_skewed(work: GroupPass) -> bool:
    """True if the longest work tile forward takes much longer than a processor's share of all."""
    steps = _lists(work, "forward")[3]
    share = steps.sum() / len(steps) * work.operands.query.shape[0] / hardware.local_gpu().processors
    return steps.max(initial=0) > max(MIN_STEPS, 1.5 * share)


def _prepare(work: GroupPass, kernel: str) -> _Prepared:
    processors, size = hardware.local_gpu().processors, _padded(work)
    assert size is not None
    dkv, operands, (q, kv, pass_lists, steps, before) = kernel == "dkv", work.operands, _lists(work, kernel)
    lists, batch = pass_lists.lists, operands.query.shape[0]
    if dkv:
        schedule, splits = _order(work, kv, lists, steps, before)
    else:
        schedule, splits = build_schedule(steps, batch, processors), None
        schedule = split_into_waves(schedule) if work.call.exchanges_queries else schedule
    segments: list[Any] = [lists.spans] * 2
    if operands.segments is not None:
        pairs = zip(operands.segments, (q, kv), (-2, -1), strict=True)
        segments = [side.order.gather(ids, side.blocks * side.block, fill) for ids, side, fill in pairs]
    active_rows_mask = lists.block if lists.active_rows_mask is None else lists.active_rows_mask
    read: list[Any] = [schedule, lists.spans, lists.block, lists.tile, active_rows_mask, pass_lists.bits, *segments]
    read += [lists.spans if splits is None else splits] if dkv else []
    batches, kinds = lists.spans.shape[:2]
    number = 0 if splits is None else len(splits)
    times = 0 if splits is None else schedule.shape[0] // (batch * number)
    walk = ListShapes(batches, kinds, lists.group, steps.shape[2], number, pass_lists.chosen)
    sides = {"Q": views.rows_view(q.order, q.tile), "KV": views.rows_view(kv.order, kv.tile)}
    part = _part(work, kernel)
    stages = settings.num_stages("backward" if dkv else "forward", size, settings.tile_keys(kv.tile), part)
    constants = {"A": arrays_of(work, size), **sides, "L": walk}
    constants |= {"CONSUMER_REGISTERS": settings.CONSUMER_REGISTERS, "PRODUCER_REGISTERS": settings.PRODUCER_REGISTERS}
    return _Prepared(q, kv, part, stages, constants, [jnp.asarray(x) for x in read], schedule.shape[-1], times)


def arrays_of(work: GroupPass, size: int) -> Arrays:
    """What kernels know of the arrays of a pass; ``size`` is what head sizes are rounded up to."""
    return Arrays(
        HEADS=work.operands.query.shape[2],
        KV_HEADS=work.operands.key.shape[2],
        D=size,
        SCALE=work.call.scale,
        CAP=work.call.soft_cap or 0.0,
        FIRST_HEAD=work.first,
        HEAD_STEP=work.step,
        PASS_HEADS=work.heads,
        SEGMENTED=work.operands.segments is not None,
    )


def _order(work: GroupPass, kv: Side, lists: BlockLists, steps: Any, before: Any) -> tuple[Any, Any]:
    """The order of the backward pass's work tiles, and splits, if they are cut."""
    batch, programs = work.operands.query.shape[0], hardware.local_gpu().processors
    if not isinstance(steps, np.ndarray):
        return order_work_tiles(steps, batch, programs, False), None
    if len(steps) == 1:
        heads, members = work.heads_of_lists(dkv=True, pack=1)
        key_heads, kinds, size = members.argmax(0), heads // lists.group % lists.spans.shape[1], _padded(work)
        assert size is not None
        row_bytes = size * 8  # q, dout, and dq in float32
        order, splits = split_by_query_ranges(
            lists, kinds, key_heads, batch, programs, _block_shape(work, "dkv")[0], row_bytes
        )
        if splits is not None:
            return order, splits
        keys = work.operands.key.shape[1] * work.operands.key.shape[2]
        lost = FLOAT32_STEPS[kv.order.complete] * batch * keys / settings.TILE_ROWS / programs
        order, splits = split_long_lists(steps[0], before[0], key_heads, batch, programs, lost)
        if splits is not None:
            return order, splits
    # Neighbours find in the cache what both read and add to. With several query heads they would soon be at
    # different ones; work tiles that are equally long stay at the same head for longer.
    as_numbered = work.heads == steps.shape[1] and has_overlapping_neighbors(
        lists.spans, lists.block, lists.minor_blocks
    )
    return order_work_tiles(steps, batch, programs, as_numbered), None


def _run(work: GroupPass, kernel, prepared: _Prepared, inputs, outputs, fixed, aliases) -> list[jax.Array]:
    results = bridge.call_gluon(kernel, prepared.programs, inputs, outputs, prepared.constants | fixed, aliases)
    return [varying_like(work.operands.query, x) for x in results]
