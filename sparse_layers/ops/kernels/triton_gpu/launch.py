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
from ..gpu.lists import PassLists, RowTiling, build_pass_lists, row_order_constants
from ..gpu.passes import BackwardInputs, GroupPass, PassResults, varying_like
from ..gpu.splits import MIN_STEPS, Splits, count_splits, longest_first_order, split_work_tiles
from .backward_kernel import dkv_kernel, dq_kernel
from .forward_kernel import triton_forward_kernel
from .settings import KernelInputs, Settings, choose_settings, outer_rows, requested_splits

# Rows of a tile that keep tensor cores busy.
FULL_TILE = 64


def forward(
    group_pass: GroupPass, earlier: PassResults | None, sinks: jax.Array | None, in_input_dtype: bool
) -> PassResults:
    """Launches the forward kernel: returns (out, lse) of a pass.

    The softmax goes on from ``earlier``, or starts from ``sinks``, float32 [N]. With ``in_input_dtype``,
    out of all tokens is stored in the dtype of the query, else in float32.
    """
    prepared, order = _prepare(group_pass, "forward"), _result_order(group_pass.q_order)
    rows, size = order.rows, group_pass.operands.value.shape[-1]
    outputs = (
        prepared.output((rows, group_pass.heads, size), in_input_dtype and order.natural),
        prepared.output((group_pass.heads, rows)),
    )
    bias_arrays, bias_constants = prepared.bias
    constants = prepared.second_list_constants | bias_constants | {"EARLIER": _result_rows(earlier)}
    out, lse = prepared.launch_kernel(
        triton_forward_kernel,
        [*prepared.second_list_arrays, *group_pass.ids, *bias_arrays],
        [head_sizes(group_pass)[1], None],
        [sinks, *_result_arrays(earlier, 2)],
        outputs,
        constants | {"SINKS": sinks is not None},
        constants | {"SINKS": False, "EARLIER": _result_rows(None)},
        order,
    )
    return PassResults(order, (out, lse))


def dq(
    group_pass: GroupPass,
    inputs: BackwardInputs,
    earlier: PassResults | None,
    earlier_kv: PassResults | None,
    in_input_dtype: bool,
    kv_in_input_dtype: bool,
    with_dkv: bool,
) -> tuple[PassResults, PassResults | None, jax.Array | None]:
    """Launches the dq kernel: returns (dq, (dk, dv) or None, dtable) of a pass.

    The first two are added to earlier gradients. ``dtable`` is the gradient of a bias's table, float32 [N, L], or None.

    With ``in_input_dtype`` and ``kv_in_input_dtype``, results of all tokens are stored in the dtype of the
    operand, else in float32. With ``with_dkv``, the same kernel computes dk and dv, see `each_key_once`.
    """
    prepared, order = _prepare(group_pass, "dq_with_dkv" if with_dkv else "dq"), _result_order(group_pass.q_order)
    sizes = group_pass.operands.query.shape[-1], group_pass.operands.value.shape[-1]
    kv_rows, kv_heads = group_pass.operands.key.shape[1:3]
    outputs = [prepared.output((order.rows, group_pass.heads, sizes[0]), in_input_dtype and order.natural)]
    outputs += [prepared.output((kv_rows, kv_heads, x) if with_dkv else (1,), kv_in_input_dtype) for x in sizes]
    bias_arrays, bias_constants = prepared.bias
    constants = prepared.second_list_constants | bias_constants
    constants |= {"EARLIER_KV": _result_rows(earlier_kv), "WITH_DKV": with_dkv}
    sums = prepared.zero_dtable
    constants |= {} if sums else {"dtable": None}
    scales = [prepared.dtable_scale(inputs)] if sums and prepared.deterministic else []
    constants |= {} if scales else {"dtable_scale": None}
    dq, dk, dv, *sums = prepared.launch_kernel(
        dq_kernel,
        [*prepared.second_list_arrays, *group_pass.ids, *bias_arrays],
        [head_sizes(group_pass)[0]],
        [*inputs, *_result_arrays(earlier, 1), *_result_arrays(earlier_kv, 2), *scales],
        outputs,
        constants | {"EARLIER": _result_rows(earlier)},
        constants | {"EARLIER": _result_rows(None)},
        order,
        sums,
    )
    dkv = PassResults(RowOrder(kv_rows), (dk, dv)) if with_dkv else None
    return PassResults(order, (dq,)), dkv, prepared.dtable(*sums, *scales) if sums else None


def dkv(
    group_pass: GroupPass, inputs: BackwardInputs, earlier: PassResults | None, in_input_dtype: bool
) -> PassResults:
    """Launches the dkv kernel: returns (dk, dv) of a pass, added to ``earlier``; arguments as in `dq`."""
    return launch_dkv(_prepare(group_pass, "dkv"), inputs, earlier, in_input_dtype, None)[0]


def launch_dkv(
    prepared: "PreparedLaunch",
    inputs: BackwardInputs,
    earlier: PassResults | None,
    in_input_dtype: bool,
    q_rows: int | None,
) -> tuple[PassResults, jax.Array]:
    """Returns (dk, dv) as `dkv`, and dq [B, q_rows, heads, H] if each query row is in one list, else an unused array.

    ``q_rows`` is the number of these rows; None to compute no dq.
    """
    group_pass, with_dq = prepared.group_pass, q_rows is not None
    order, key, value = _result_order(group_pass.kv_order), group_pass.operands.key, group_pass.operands.value
    dq_shape = (1,) if q_rows is None else (q_rows, group_pass.heads, key.shape[-1])
    outputs = [prepared.output((order.rows, *x.shape[2:]), in_input_dtype and order.natural) for x in (key, value)]
    outputs.append(prepared.output(dq_shape, True))
    in_place = earlier is not None and earlier.order == order and not in_input_dtype
    bias_arrays, bias_constants = prepared.bias
    tile_constants = bias_constants | {
        "EARLIER": _result_rows(earlier),
        "WITH_DQ": with_dq and prepared.splits is None,
        "IN_PLACE": in_place,
    }
    split_constants = bias_constants | {"EARLIER": _result_rows(None), "WITH_DQ": with_dq, "IN_PLACE": False}
    earlier_arrays, sizes = [*inputs, *_result_arrays(earlier, 2)], head_sizes(group_pass)
    arrays = [*group_pass.ids, *bias_arrays]
    *dkv, dq = prepared.launch_kernel(
        dkv_kernel, arrays, sizes, earlier_arrays, outputs, tile_constants, split_constants, order
    )
    return PassResults(order, tuple(dkv)), dq


def each_key_once(group_pass: GroupPass) -> bool:
    """True if each key is in one list, so that one program computes all of its dk and dv."""
    heads, kv_heads, rows = (
        group_pass.operands.query.shape[2],
        group_pass.operands.key.shape[2],
        _tile_rows(group_pass, "dq_with_dkv"),
    )
    complete = (
        group_pass.q_order.covers_all_tokens
        and group_pass.kv_order.covers_all_tokens
        and group_pass.step == 1
        and heads == kv_heads
    )
    if (
        rows is None
        or not complete
        or not group_pass.passes
        or group_pass.fused_with
        or group_pass.operands.segments is not None
    ):
        return False
    for one in group_pass.passes:  # an early exit, before lists are built for this test alone
        columns = planned_block_pairs([one.mask], one.fwd_shape, False)[0].kv_block
        if np.bincount(columns.ravel()).max(initial=0) > max(1, rows // one.fwd_shape[0]):
            return False
    prepared = _prepare(group_pass, "dq_with_dkv")
    return prepared.walked_lists[0][1].is_partition and prepared.q.tiles_per_block == 1 and prepared.splits is None


def block_shape(group_pass: GroupPass, kernel: str) -> tuple[int, int]:
    """Returns (bq, bkv), the block shape of the lists that a kernel walks."""
    if (selection := group_pass.operands.selection) is not None:
        granularity = selection.granularity
        return max(granularity, min(FULL_TILE // group_pass.pack, MAX_QUERY_GROUPS * granularity)), selection.block
    bq, bkv = group_pass.block_shape(transposed=kernel == "dkv")
    if kernel == "dkv" or not group_pass.passes:
        return bq, bkv
    if group_pass.fused_with is not None:  # the pass with more pairs decides the block of queries
        pair = group_pass.passes[0], group_pass.fused_with.passes[0]
        bq = max(pair, key=lambda one: one.fwd_blocks * math.prod(one.fwd_shape)).fwd_shape[0]
    rows = _tile_rows(group_pass, kernel)
    if rows and group_pass.call.params[0].q_blocksize is None and (kernel == "dq_with_dkv" or rows < bq <= 2 * rows):
        bq = rows  # one tile a block
    return bq, bkv


def head_sizes(group_pass: GroupPass) -> tuple[int, int]:
    """Returns the padded head sizes of q and k, and of v."""
    return KernelInputs.of(group_pass.operands).head_sizes


def _tile_rows(group_pass: GroupPass, kernel: str) -> int | None:
    return outer_rows(kernel, KernelInputs.of(group_pass.operands))


def _lists(group_pass: GroupPass, outer: RowTiling, inner: RowTiling, transposed: bool) -> PassLists:
    return build_pass_lists(group_pass.call, group_pass.operands, group_pass.passes, outer, inner, transposed)


def _prepare(group_pass: GroupPass, kernel: str) -> "PreparedLaunch":
    """Prepares the launch of a kernel: tile sizes, lists and work tiles."""
    transposed, (bq, bkv), params = (
        kernel == "dkv",
        block_shape(group_pass, kernel),
        group_pass.call.params[kernel != "forward"],
    )
    rows = bq * group_pass.pack
    inputs, blocks = KernelInputs.of(group_pass.operands), (bkv, rows) if transposed else (rows, bkv)
    settings = choose_settings(kernel, inputs, blocks, params, hardware.local_gpu())
    q_tile, kv_tile = (settings.inner, settings.outer) if transposed else (settings.outer, settings.inner)
    q_positions, kv_positions = group_pass.call.bias_orders or (None, None)
    q = RowTiling(group_pass.q_order, bq, q_tile, group_pass.pack, positions=q_positions)
    kv = RowTiling(group_pass.kv_order, bkv, kv_tile, positions=kv_positions)
    outer, inner = (kv, q) if transposed else (q, kv)
    walked_lists = [(inner, _lists(group_pass, outer, inner, transposed))]
    second = group_pass.fused_with
    if second is not None and not transposed:
        second_kv = RowTiling(second.kv_order, block_shape(second, kernel)[1], settings.inner, positions=kv_positions)
        walked_lists.append((second_kv, _lists(second, q, second_kv, transposed)))
    return prepare(
        group_pass, q, kv, outer, walked_lists, settings, requested_splits(params, inner.order.rows), transposed
    )


def prepare(
    group_pass: GroupPass,
    q: RowTiling,
    kv: RowTiling,
    outer: RowTiling,
    walked_lists: Sequence[tuple[RowTiling, PassLists]],
    settings: Settings,
    requested: int | None,
    transposed: bool,
) -> "PreparedLaunch":
    """Prepares a launch: splits its work tiles, into ``requested`` ones each or as it chooses, and orders them."""
    multiprocessors = hardware.local_gpu().multiprocessors
    steps, steps_before = group_pass.count_steps(walked_lists, transposed=transposed, pack=group_pass.pack)
    programs = outer.tiles_per_block * group_pass.operands.query.shape[0] // len(steps)  # of a work tile
    most = None
    if requested is not None:
        num_splits, most = np.full(steps.shape, requested, np.int32), requested * steps.shape[1]
    elif isinstance(steps, np.ndarray):
        num_splits = count_splits(steps, programs, 2 * multiprocessors)
    else:
        num_splits, most = _run_time_splits(group_pass, walked_lists, steps, programs, multiprocessors, transposed)
    splits = split_work_tiles(steps, num_splits, most)
    heads = group_pass.operands.key.shape[2] if transposed else group_pass.heads // group_pass.pack
    rest = (np if isinstance(steps, np.ndarray) else jnp).where(num_splits == 0, steps, 0)
    order = longest_first_order(rest.reshape(len(rest), heads, outer.num_blocks), 8 * multiprocessors)
    return PreparedLaunch(group_pass, q, kv, outer, walked_lists, settings, order, splits, steps_before, steps.shape[1])


def _run_time_splits(
    group_pass: GroupPass,
    walked_lists: Sequence[tuple[RowTiling, PassLists]],
    steps: Any,
    programs: int,
    slots: int,
    transposed: bool,
):
    """Returns (number of splits of each work tile, bound of their sum) for lists that are built on the device."""
    heads, members = group_pass.heads_by_list(transposed=transposed, pack=group_pass.pack)
    total = longest = 0
    for inner, lists in walked_lists:
        batches, kinds = lists.block_lists.spans.shape[:2]
        total += inner.num_steps(lists.block_lists.inner_block.size // batches) * -(-len(heads) // kinds)
        longest += inner.num_steps(lists.longest) * int(members.sum(1).max())
    limit = max(MIN_STEPS, -(-total * programs // slots))
    if longest <= limit:
        return np.zeros(steps.shape, np.int32), 0
    splits = -(-steps // limit)
    if walked_lists[0][0].gathers_rows:  # results by inner row need one launch, so every work tile is split
        num_splits = steps.shape[1]
        return jnp.maximum(splits, 1), (total + num_splits * int(members.sum(1).max())) // limit + num_splits
    return jnp.where(steps > limit, splits, 0), 2 * total // limit


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """Tiles, lists and work tiles of a launch, for any kernel."""

    group_pass: GroupPass
    # Tilings of query rows and of key rows.
    q: RowTiling
    kv: RowTiling
    outer: RowTiling  # the tiling of the side that programs hold, one of the two
    # Inner tiling and lists of the pass, then those of a fused second one.
    walked_lists: Sequence[tuple[RowTiling, PassLists]]
    settings: Settings  # warps and pipeline stages; tile sizes are those of q and kv
    order: Any  # order of the work tiles, see `longest_first_order`; None for any
    splits: Splits | None  # splits of long work tiles; None for none
    steps_before: Any  # steps of a work tile before those of each query head, see `dkv_kernel`
    work_tiles: int  # number of work tiles of a batch entry

    def output(self, shape: Sequence[int], in_input_dtype: bool = False) -> jax.ShapeDtypeStruct:
        """Returns an output with a batch axis, in the dtype of the query if ``in_input_dtype``, else in float32."""
        query = self.group_pass.operands.query
        return jax.ShapeDtypeStruct((query.shape[0], *shape), query.dtype if in_input_dtype else jnp.float32)

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

    @property
    def bias(self) -> tuple[list[Any], dict[str, Any]]:
        """Arrays and constants of the bias, for the kernels' parameters; without one, constants alone."""
        table, slopes = self.group_pass.operands.bias_table, self.group_pass.operands.bias_slopes
        if table is None and slopes is None:
            return [], {"bias_table": None, "bias_slopes": None}
        arrays = None if table is None else self._pad_table(table), slopes
        return [None if x is None else x * np.float32(self._bias_constants.UNIT) for x in arrays], {}

    def _pad_table(self, table: jax.Array) -> jax.Array:
        padding = self._bias_constants.PADDING
        return jnp.pad(table, [(0, 0), (padding, padding)], mode="edge")

    @property
    def deterministic(self) -> bool:
        """True if gradients must be the same from run to run."""
        return self.group_pass.call.params[1].deterministic

    @property
    def zero_dtable(self) -> tuple[jax.Array, ...]:
        """The gradient of a padded table before any launch, zeros; () without a table.

        Deterministic ones are integers of 64 bits, which are pairs of 32 bits here: JAX may have none of 64.
        """
        operands = self.group_pass.operands
        if operands.bias_table is None:
            return ()
        shape = len(operands.bias_table), self._bias_constants.LENGTH
        zeros = jnp.zeros((*shape, 2), jnp.int32) if self.deterministic else jnp.zeros(shape, jnp.float32)
        return (varying_like(operands.query, zeros),)

    def dtable_scale(self, inputs: BackwardInputs) -> jax.Array:
        """Returns the units per 1.0 of a deterministic gradient of the table, float32 []. No sum has more than 2^62."""
        value, rows = self.group_pass.operands.value, inputs.delta.size // inputs.delta.shape[1]
        ds = value.shape[-1] * _largest(inputs.dout) * _largest(value) + _largest(inputs.delta)
        # The weights of a row sum up to 1. Without maximum, ds of 0 would be an infinity for jax_debug_infs.
        exponent = 61 - math.log2(rows) - jnp.log2(jnp.maximum(ds, jnp.finfo(jnp.float32).tiny))
        return jnp.exp2(jnp.minimum(exponent, 126))

    def dtable(self, padded: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        """Returns the gradient of the table [N, L] for that of the padded table."""
        table = self.group_pass.operands.bias_table
        if scale is not None:
            low, high = padded[..., 0], padded[..., 1]
            high += (low < 0).astype(jnp.int32)  # a negative low half is 2^32 less than its bits without a sign
            padded = (high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)) / scale
        return jax.linear_transpose(self._pad_table, table)(padded)[0]

    @property
    def _bias_constants(self) -> tiles.BiasConstants:
        call, operands = self.group_pass.call, self.group_pass.operands
        table, has_slopes = operands.bias_table, operands.bias_slopes is not None
        unit = 1 / math.log(2) if call.soft_cap is None else 1 / call.soft_cap
        if table is None:
            return tiles.BiasConstants(has_slopes, 0, 0, 0, has_slopes, unit if has_slopes else 1.0, False)
        padding = 2 * max(self.q.tile, self.kv.tile)
        length, center = table.shape[1] + 2 * padding, call.bias_center + padding
        return tiles.BiasConstants(True, length, center, padding, has_slopes, unit, self.deterministic)

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
        sums: Sequence[jax.Array] = (),
    ) -> list[jax.Array]:
        """Launches a kernel and returns its results: once for splits if there are any, then for all work tiles.

        Args:
          arrays_before_splits: arrays between the lists of the first pass and the results of splits.
          sizes: vector sizes of the results by outer row; None for one number a row.
          arrays_after_splits: arrays after the results of splits.
          outputs: results by outer row, as many as ``sizes``, then those that the kernel stores in each step.
          constants: constants that not all kernels have. With IN_PLACE, results by outer row overwrite the last of
            ``arrays_after_splits``, which have the same shapes.
          split_constants: constants that differ in the launch of splits.
          order: row order of the results.
          sums: arrays after all others, to which each launch adds in place; they are the last results.
        """
        operands, num_outer_results = self.group_pass.operands, len(sizes)
        tiles_per_block, blocks = self.outer.tiles_per_block, self.outer.num_blocks
        constants = self._constants(order) | constants
        qkv = operands.query, operands.key, operands.value
        lists = [*_list_arrays(self.walked_lists[0][1]), *arrays_before_splits]
        batches = max([1, *(x.shape[1] for x in (self.order, self.splits and self.splits.steps) if x is not None)])
        split_results: Sequence[Any] = [None] * num_outer_results
        step_results: Sequence[Any] | None = None  # stored in each step by the launch of splits
        if self.splits is not None:
            split_count = len(self.splits.steps)
            rows = split_count, operands.query.shape[0], tiles_per_block * self.outer.tile
            results = [jax.ShapeDtypeStruct(rows if x is None else (*rows, x), jnp.float32) for x in sizes]
            arrays = [*qkv, self.splits.steps, self.steps_before, *lists, *split_results, *arrays_after_splits, *sums]
            schedule = {"W": tiles.WorkSchedule(blocks, False, True, False, batches)}
            outputs_of_splits = [*results, *outputs[num_outer_results:]]
            results = self._launch_once(
                kernel,
                split_count * tiles_per_block,
                arrays,
                outputs_of_splits,
                constants | split_constants | schedule,
                range(len(arrays) - len(sums), len(arrays)),
            )
            results, sums = results[: len(outputs_of_splits)], results[len(outputs_of_splits) :]
            split_results, step_results = results[:num_outer_results], results[num_outer_results:]
            outputs = [*outputs[:num_outer_results], *(self.output((1,)) for _ in step_results)]
            if not sizes:
                return list(step_results)
        splits = None if self.splits is None else self.splits.ranges
        arrays = [*qkv, self.order, splits, *lists, *split_results, *arrays_after_splits, *sums]
        num_in_place = len(sums)
        if constants.get("IN_PLACE", False):
            num_in_place = num_outer_results
            outputs = [*(self.output((1,)) for _ in sizes), *outputs[num_outer_results:]]
        in_place = range(len(arrays) - num_in_place, len(arrays))
        schedule = {"W": tiles.WorkSchedule(blocks, self.order is not None, False, self.splits is not None, batches)}
        results = self._launch_once(
            kernel, self.work_tiles * tiles_per_block, arrays, outputs, constants | schedule, in_place
        )
        results, changed = results[: len(outputs)], results[len(outputs) :]
        if constants.get("IN_PLACE", False):
            results, changed = [*changed, *results[num_outer_results:]], []
        if step_results is not None:
            results = [*results[:num_outer_results], *step_results]
        return [*results, *changed]

    def _constants(self, order: RowOrder) -> dict[str, Any]:
        """Returns the constants that all kernels have, for results in a row order."""
        group_pass, operands = self.group_pass, self.group_pass.operands
        b, t, heads, h = operands.query.shape
        _, s, kv_heads, hv = operands.value.shape
        arrays = tiles.ArrayShapes(
            t,
            s,
            heads,
            kv_heads,
            h,
            hv,
            *head_sizes(group_pass),
            group_pass.call.scale,
            group_pass.call.soft_cap or 0.0,
            b,
            group_pass.first,
            group_pass.step,
            group_pass.heads,
            max(t * heads, s * kv_heads) * max(h, hv) >= 2**31,
            group_pass.num_ids,
            self._bias_constants,
        )
        destination = tiles.ResultRows(True, order.natural, order.rows, row_order_constants(order))
        list_shapes = _list_shapes(self.walked_lists[0][1])
        return {"A": arrays, "Q": self.q.constants, "KV": self.kv.constants, "L": list_shapes, "OUT": destination}

    def _launch_once(self, kernel, programs, arrays, outputs, constants, in_place=()) -> list[jax.Array]:
        query = self.group_pass.operands.query
        # A kernel does not read arrays that its constants switch off: any array stands in for them.
        arrays = [query if x is None else jnp.asarray(x) for x in arrays]
        grid, settings = (programs, query.shape[0]), self.settings
        results = bridge.call_triton(
            kernel, grid, arrays, outputs, constants, settings.num_warps, settings.num_stages, in_place
        )
        return [varying_like(query, x) for x in results]


def _largest(x: jax.Array) -> jax.Array:
    return abs(x).max().astype(jnp.float32)


def _result_order(order: RowOrder) -> RowOrder:
    """Returns the row order of a pass' results: by token if it has all tokens."""
    return RowOrder(order.length) if order.covers_all_tokens else order


def _list_arrays(lists: PassLists) -> list[Any]:
    block_lists = lists.block_lists
    return [
        block_lists.spans,
        block_lists.inner_block,
        block_lists.mask_tile,
        block_lists.active_query_groups,
        lists.mask_bits,
    ]


def _list_shapes(lists: PassLists) -> tiles.BlockListShapes:
    batches, heads = lists.block_lists.spans.shape[:2]
    return tiles.BlockListShapes(
        batches, heads, lists.block_lists.heads_per_list, lists.any_full, lists.any_partial, lists.granularity
    )


def _result_rows(rows: PassResults | None) -> tiles.ResultRows:
    """Returns the constants of earlier results: whether there are any, and in which order."""
    if rows is None:
        return tiles.ResultRows(False, True, 0, row_order_constants(RowOrder(0)))
    return tiles.ResultRows(True, rows.order.natural, rows.order.rows, row_order_constants(rows.order))


def _result_arrays(rows: PassResults | None, count: int) -> tuple[jax.Array | None, ...]:
    return (None,) * count if rows is None else rows.arrays
