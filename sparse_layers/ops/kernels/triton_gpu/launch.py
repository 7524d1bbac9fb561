"""Launches of the plain Triton kernels: one pass of a head group, or two of them by one kernel.

`forward`, `dq` and `dkv` compute a `GroupPass`. Each builds block lists, looks up tile sizes, splits long work tiles,
and calls the bridge.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.block_lists import MAX_QUERY_GROUPS, planned_block_pairs
from ...planning.row_orders import RowOrder
from ..gpu import bridge, hardware, tiles
from ..gpu.hardware import padded_size
from ..gpu.lists import PassLists, RowTiling, build_pass_lists, row_order_constants
from ..gpu.passes import BackwardInputs, GroupPass, PassResults, varying_like
from ..gpu.splits import MIN_STEPS, Splits, count_splits, longest_first_order, split_work_tiles
from .backward_kernel import dkv_kernel, dq_kernel
from .forward_kernel import triton_forward_kernel
from .settings import Settings, choose_settings, major_rows, requested_splits

# Rows of a tile that keep tensor cores busy.
FULL_TILE = 64


def forward(work: GroupPass, earlier: PassResults | None, sinks: jax.Array | None, rounded: bool) -> PassResults:
    """Launches the forward kernel: returns (out, lse) of a pass.

    The softmax goes on from ``earlier``, or starts from ``sinks``, float32 [N]. With ``rounded``, out of all tokens is
    stored in the dtype of the query, else in float32.
    """
    prepared, order = _prepare(work, "forward"), _result_order(work.q_order)
    rows, size = order.rows, work.operands.value.shape[-1]
    outputs = (
        prepared.output((rows, work.heads, size), rounded and order.natural),
        prepared.output((work.heads, rows)),
    )
    constants = prepared.second_list_constants | {"EARLIER": _result_rows(earlier)}
    out, lse = prepared.launch_kernel(
        triton_forward_kernel,
        [*prepared.second_list_arrays, *work.ids],
        [head_sizes(work)[1], None],
        [sinks, *_result_arrays(earlier, 2)],
        outputs,
        constants | {"SINKS": sinks is not None},
        constants | {"SINKS": False, "EARLIER": _result_rows(None)},
        order,
    )
    return PassResults(order, (out, lse))


def dq(
    work: GroupPass,
    inputs: BackwardInputs,
    earlier: PassResults | None,
    earlier_kv: PassResults | None,
    rounded: bool,
    rounded_kv: bool,
    with_dkv: bool,
) -> tuple[PassResults, PassResults | None]:
    """Launches the dq kernel: returns (dq, (dk, dv) or None) of a pass, added to earlier gradients.

    With ``rounded`` and ``rounded_kv``, results of all tokens are stored in the dtype of the operand, else in float32.
    With ``with_dkv``, the same kernel computes dk and dv, see `each_key_once`.
    """
    prepared, order = _prepare(work, "dq_with_dkv" if with_dkv else "dq"), _result_order(work.q_order)
    sizes = work.operands.query.shape[-1], work.operands.value.shape[-1]
    kv_rows, kv_heads = work.operands.key.shape[1:3]
    outputs = [prepared.output((order.rows, work.heads, sizes[0]), rounded and order.natural)]
    outputs += [prepared.output((kv_rows, kv_heads, x) if with_dkv else (1,), rounded_kv) for x in sizes]
    constants = prepared.second_list_constants | {"EARLIER_KV": _result_rows(earlier_kv), "WITH_DKV": with_dkv}
    dq, dk, dv = prepared.launch_kernel(
        dq_kernel,
        [*prepared.second_list_arrays, *work.ids],
        [head_sizes(work)[0]],
        [*inputs, *_result_arrays(earlier, 1), *_result_arrays(earlier_kv, 2)],
        outputs,
        constants | {"EARLIER": _result_rows(earlier)},
        constants | {"EARLIER": _result_rows(None)},
        order,
    )
    return PassResults(order, (dq,)), PassResults(RowOrder(kv_rows), (dk, dv)) if with_dkv else None


def dkv(work: GroupPass, inputs: BackwardInputs, earlier: PassResults | None, rounded: bool) -> PassResults:
    """Launches the dkv kernel: returns (dk, dv) of a pass, added to ``earlier``; arguments as in `dq`."""
    return launch_dkv(_prepare(work, "dkv"), inputs, earlier, rounded, None)[0]


def launch_dkv(
    prepared: "PreparedLaunch", inputs: BackwardInputs, earlier: PassResults | None, rounded: bool, q_rows: int | None
) -> tuple[PassResults, jax.Array]:
    """Returns (dk, dv) as `dkv`, and dq [B, q_rows, heads, H] if each query row is in one list, else an unused array.

    ``q_rows`` is the number of these rows; None to compute no dq.
    """
    work, with_dq = prepared.work, q_rows is not None
    order, key, value = _result_order(work.kv_order), work.operands.key, work.operands.value
    dq_shape = (1,) if q_rows is None else (q_rows, work.heads, key.shape[-1])
    outputs = [prepared.output((order.rows, *x.shape[2:]), rounded and order.natural) for x in (key, value)]
    outputs.append(prepared.output(dq_shape, True))
    in_place = earlier is not None and earlier.order == order and not rounded
    tile_constants = {
        "EARLIER": _result_rows(earlier),
        "WITH_DQ": with_dq and prepared.splits is None,
        "IN_PLACE": in_place,
    }
    split_constants = {"EARLIER": _result_rows(None), "WITH_DQ": with_dq, "IN_PLACE": False}
    earlier_arrays, sizes = [*inputs, *_result_arrays(earlier, 2)], head_sizes(work)
    *dkv, dq = prepared.launch_kernel(
        dkv_kernel, work.ids, sizes, earlier_arrays, outputs, tile_constants, split_constants, order
    )
    return PassResults(order, tuple(dkv)), dq


def each_key_once(work: GroupPass) -> bool:
    """True if each key is in one list, so that one program computes all of its dk and dv."""
    heads, kv_heads, rows = work.operands.query.shape[2], work.operands.key.shape[2], _tile_rows(work, "dq_with_dkv")
    complete = (
        work.q_order.covers_all_tokens and work.kv_order.covers_all_tokens and work.step == 1 and heads == kv_heads
    )
    if rows is None or not complete or not work.passes or work.fused_with or work.operands.segments is not None:
        return False
    for one in work.passes:  # an early exit, before lists are built for this test alone
        columns = planned_block_pairs([one.mask], one.fwd_shape, False)[0].column
        if np.bincount(columns.ravel()).max(initial=0) > max(1, rows // one.fwd_shape[0]):
            return False
    prepared = _prepare(work, "dq_with_dkv")
    return prepared.walked_lists[0][1].is_partition and prepared.q.tiles_per_block == 1 and prepared.splits is None


def block_shape(work: GroupPass, kernel: str) -> tuple[int, int]:
    """Returns (bq, bkv), the block shape of the lists that a kernel walks."""
    if (selection := work.operands.selection) is not None:
        granularity = selection.granularity
        return max(granularity, min(FULL_TILE // work.pack, MAX_QUERY_GROUPS * granularity)), selection.block
    bq, bkv = work.block_shape(kv_major=kernel == "dkv")
    if kernel == "dkv" or not work.passes:
        return bq, bkv
    if work.fused_with is not None:  # the pass with more pairs decides the block of queries
        pair = work.passes[0], work.fused_with.passes[0]
        bq = max(pair, key=lambda one: one.fwd_blocks * math.prod(one.fwd_shape)).fwd_shape[0]
    rows = _tile_rows(work, kernel)
    if rows and work.call.params[0].q_blocksize is None and (kernel == "dq_with_dkv" or rows < bq <= 2 * rows):
        bq = rows  # one tile a block
    return bq, bkv


def head_sizes(work: GroupPass) -> tuple[int, int]:
    """Returns the padded head sizes of q and k, and of v."""
    return padded_size(work.operands.query.shape[-1]), padded_size(work.operands.value.shape[-1])


def _tile_rows(work: GroupPass, kernel: str) -> int | None:
    return major_rows(kernel, work.operands.query.dtype.itemsize, head_sizes(work))


def _lists(work: GroupPass, major: RowTiling, minor: RowTiling, kv_major: bool) -> PassLists:
    return build_pass_lists(work.call, work.operands, work.passes, major, minor, kv_major)


def _prepare(work: GroupPass, kernel: str) -> "PreparedLaunch":
    """Prepares the launch of a kernel: tile sizes, lists and work tiles."""
    kv_major, (bq, bkv), params = kernel == "dkv", block_shape(work, kernel), work.call.params[kernel != "forward"]
    rows = bq * work.pack
    itemsize, blocks = work.operands.query.dtype.itemsize, (bkv, rows) if kv_major else (rows, bkv)
    settings = choose_settings(kernel, itemsize, head_sizes(work), blocks, params, hardware.local_gpu())
    q_tile, kv_tile = (settings.minor, settings.major) if kv_major else (settings.major, settings.minor)
    q, kv = RowTiling(work.q_order, bq, q_tile, work.pack), RowTiling(work.kv_order, bkv, kv_tile)
    major, minor = (kv, q) if kv_major else (q, kv)
    walked_lists = [(minor, _lists(work, major, minor, kv_major))]
    second = work.fused_with
    if second is not None and not kv_major:
        second_kv = RowTiling(second.kv_order, block_shape(second, kernel)[1], settings.minor)
        walked_lists.append((second_kv, _lists(second, q, second_kv, kv_major)))
    return prepare(work, q, kv, major, walked_lists, settings, requested_splits(params, minor.order.rows), kv_major)


def prepare(
    work: GroupPass,
    q: RowTiling,
    kv: RowTiling,
    major: RowTiling,
    walked_lists: Sequence[tuple[RowTiling, PassLists]],
    settings: Settings,
    requested: int | None,
    kv_major: bool,
) -> "PreparedLaunch":
    """Prepares a launch: splits its work tiles, into ``requested`` ones each or as it chooses, and orders them."""
    multiprocessors = hardware.local_gpu().multiprocessors
    steps, steps_before = work.count_steps(walked_lists, kv_major=kv_major, pack=work.pack)
    programs = major.tiles_per_block * work.operands.query.shape[0] // len(steps)  # of a work tile
    most = None
    if requested is not None:
        num_splits, most = np.full(steps.shape, requested, np.int32), requested * steps.shape[1]
    elif isinstance(steps, np.ndarray):
        num_splits = count_splits(steps, programs, 2 * multiprocessors)
    else:
        num_splits, most = _run_time_splits(work, walked_lists, steps, programs, multiprocessors, kv_major)
    splits = split_work_tiles(steps, num_splits, most)
    heads = work.operands.key.shape[2] if kv_major else work.heads // work.pack
    rest = (np if isinstance(steps, np.ndarray) else jnp).where(num_splits == 0, steps, 0)
    order = longest_first_order(rest.reshape(len(rest), heads, major.num_blocks), 8 * multiprocessors)
    return PreparedLaunch(work, q, kv, major, walked_lists, settings, order, splits, steps_before, steps.shape[1])


def _run_time_splits(
    work: GroupPass,
    walked_lists: Sequence[tuple[RowTiling, PassLists]],
    steps: Any,
    programs: int,
    slots: int,
    kv_major: bool,
):
    """Returns (number of splits of each work tile, bound of their sum) for lists that are built on the device."""
    heads, members = work.heads_by_list(kv_major=kv_major, pack=work.pack)
    total = longest = 0
    for minor, lists in walked_lists:
        batches, kinds = lists.block_lists.spans.shape[:2]
        total += minor.num_steps(lists.block_lists.block.size // batches) * -(-len(heads) // kinds)
        longest += minor.num_steps(lists.longest) * int(members.sum(1).max())
    limit = max(MIN_STEPS, -(-total * programs // slots))
    if longest <= limit:
        return np.zeros(steps.shape, np.int32), 0
    splits = -(-steps // limit)
    if walked_lists[0][0].gathers_rows:  # results by minor row need one launch, so every work tile is split
        num_splits = steps.shape[1]
        return jnp.maximum(splits, 1), (total + num_splits * int(members.sum(1).max())) // limit + num_splits
    return jnp.where(steps > limit, splits, 0), 2 * total // limit


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """Tiles, lists and work tiles of a launch, for any kernel."""

    work: GroupPass
    # Tilings of query rows and of key rows.
    q: RowTiling
    kv: RowTiling
    major: RowTiling  # the tiling of the side that programs hold, one of the two
    # Minor tiling and lists of the pass, then those of a fused second one.
    walked_lists: Sequence[tuple[RowTiling, PassLists]]
    settings: Settings  # warps and pipeline stages; tile sizes are those of q and kv
    order: Any  # order of the work tiles, see `longest_first_order`; None for any
    splits: Splits | None  # splits of long work tiles; None for none
    steps_before: Any  # steps of a work tile before those of each query head, see `dkv_kernel`
    work_tiles: int  # number of work tiles of a batch entry

    def output(self, shape: Sequence[int], rounded: bool = False) -> jax.ShapeDtypeStruct:
        """Returns an output with a batch axis, in the dtype of the query if ``rounded``, else in float32."""
        query = self.work.operands.query
        return jax.ShapeDtypeStruct((query.shape[0], *shape), query.dtype if rounded else jnp.float32)

    @property
    def second_list_arrays(self) -> list[Any]:
        """Arrays of the second pass' lists; None each if there is none."""
        return _list_arrays(self.walked_lists[1][1]) if len(self.walked_lists) > 1 else [None] * 5

    @property
    def second_list_constants(self) -> dict[str, Any]:
        """Constants KV2 and L2 of the second pass; KV2 has no rows if there is none."""
        kv, lists = self.walked_lists[-1]
        tiling = kv.constants if len(self.walked_lists) > 1 else kv.constants._replace(ROWS=0)
        return {"KV2": tiling, "L2": _list_shapes(lists)}

    def launch_kernel(
        self,
        kernel: Any,
        arrays_before_splits: Sequence[Any],
        sizes: Sequence[int | None],
        arrays_after_splits: Sequence[Any],
        outputs: Sequence[jax.ShapeDtypeStruct],
        constants: dict[str, Any],
        split_constants: dict[str, Any],
        order: RowOrder,
    ) -> list[jax.Array]:
        """Launches a kernel and returns its results: once for splits if there are any, then for all work tiles.

        Args:
          arrays_before_splits: arrays between the lists of the first pass and the results of splits.
          sizes: vector sizes of the results by major row; None for one number a row.
          arrays_after_splits: arrays after the results of splits.
          outputs: results by major row, as many as ``sizes``, then those that the kernel stores in each step.
          constants: constants that not all kernels have. With IN_PLACE, results by major row overwrite the last of
            ``arrays_after_splits``, which have the same shapes.
          split_constants: constants that differ in the launch of splits.
          order: row order of the results.
        """
        operands, num_major_results = self.work.operands, len(sizes)
        tiles_per_block, blocks = self.major.tiles_per_block, self.major.num_blocks
        constants = self._constants(order) | constants
        qkv = operands.query, operands.key, operands.value
        lists = [*_list_arrays(self.walked_lists[0][1]), *arrays_before_splits]
        batches = max([1, *(x.shape[1] for x in (self.order, self.splits and self.splits.steps) if x is not None)])
        split_results: Sequence[Any] = [None] * num_major_results
        step_results: Sequence[Any] | None = None  # stored in each step by the launch of splits
        if self.splits is not None:
            split_count = len(self.splits.steps)
            rows = split_count, operands.query.shape[0], tiles_per_block * self.major.tile
            results = [jax.ShapeDtypeStruct(rows if x is None else (*rows, x), jnp.float32) for x in sizes]
            arrays = [*qkv, self.splits.steps, self.steps_before, *lists, *split_results, *arrays_after_splits]
            work = {"W": tiles.WorkSchedule(blocks, False, True, False, batches)}
            results = self._launch_once(
                kernel,
                split_count * tiles_per_block,
                arrays,
                [*results, *outputs[num_major_results:]],
                constants | split_constants | work,
            )
            split_results, step_results = results[:num_major_results], results[num_major_results:]
            outputs = [*outputs[:num_major_results], *(self.output((1,)) for _ in step_results)]
            if not sizes:
                return list(step_results)
        splits = None if self.splits is None else self.splits.ranges
        arrays = [*qkv, self.order, splits, *lists, *split_results, *arrays_after_splits]
        in_place: Sequence[int] = ()
        if constants.get("IN_PLACE", False):
            in_place = range(len(arrays) - num_major_results, len(arrays))
            outputs = [*(self.output((1,)) for _ in sizes), *outputs[num_major_results:]]
        work = {"W": tiles.WorkSchedule(blocks, self.order is not None, False, self.splits is not None, batches)}
        results = self._launch_once(
            kernel, self.work_tiles * tiles_per_block, arrays, outputs, constants | work, in_place
        )
        if in_place:
            results = [*results[-num_major_results:], *results[num_major_results:-num_major_results]]
        return [*results[:num_major_results], *(results[num_major_results:] if step_results is None else step_results)]

    def _constants(self, order: RowOrder) -> dict[str, Any]:
        """Returns the constants that all kernels have, for results in a row order."""
        work, operands = self.work, self.work.operands
        b, t, heads, h = operands.query.shape
        _, s, kv_heads, hv = operands.value.shape
        arrays = tiles.ArrayShapes(
            t,
            s,
            heads,
            kv_heads,
            h,
            hv,
            *head_sizes(work),
            work.call.scale,
            work.call.soft_cap or 0.0,
            b,
            work.first,
            work.step,
            work.heads,
            max(t * heads, s * kv_heads) * max(h, hv) >= 2**31,
            work.num_ids,
        )
        destination = tiles.ResultRows(True, order.natural, order.rows, row_order_constants(order))
        list_shapes = _list_shapes(self.walked_lists[0][1])
        return {"A": arrays, "Q": self.q.constants, "KV": self.kv.constants, "L": list_shapes, "OUT": destination}

    def _launch_once(self, kernel, programs, arrays, outputs, constants, in_place=()) -> list[jax.Array]:
        query = self.work.operands.query
        # A kernel does not read arrays that its constants switch off: any array stands in for them.
        arrays = [query if x is None else jnp.asarray(x) for x in arrays]
        grid, settings = (programs, query.shape[0]), self.settings
        results = bridge.call_triton(
            kernel, grid, arrays, outputs, constants, settings.num_warps, settings.num_stages, in_place
        )
        return [varying_like(query, x) for x in results]


def _result_order(order: RowOrder) -> RowOrder:
    """Returns the row order of a pass' results: by token if it has all tokens."""
    return RowOrder(order.length) if order.covers_all_tokens else order


def _list_arrays(lists: PassLists) -> list[Any]:
    block_lists = lists.block_lists
    return [block_lists.spans, block_lists.block, block_lists.tile, block_lists.active_rows_mask, lists.mask_bits]


def _list_shapes(lists: PassLists) -> tiles.BlockListShapes:
    batches, heads = lists.block_lists.spans.shape[:2]
    return tiles.BlockListShapes(
        batches, heads, lists.block_lists.group, lists.any_full, lists.any_partial, lists.granularity
    )


def _result_rows(rows: PassResults | None) -> tiles.ResultRows:
    """Returns the constants of earlier results: whether there are any, and in which order."""
    if rows is None:
        return tiles.ResultRows(False, True, 0, row_order_constants(RowOrder(0)))
    return tiles.ResultRows(True, rows.order.natural, rows.order.rows, row_order_constants(rows.order))


def _result_arrays(rows: PassResults | None, count: int) -> tuple[jax.Array | None, ...]:
    return (None,) * count if rows is None else rows.arrays
