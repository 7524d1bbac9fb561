"""Launches of the plain Triton kernels: one pass of a head group, or two of them by one kernel.

`forward`, `dq` and `dkv` compute a `GroupPass`. Each makes block lists, looks up tile sizes, cuts lists that are much
longer than others into splits, and calls the bridge.
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
from ..gpu.lists import Lists, Side, kernel_order, lists_of
from ..gpu.passes import BackwardInputs, GroupPass, Rows, varying_like
from ..gpu.splits import MIN_STEPS, Splits, count_splits, longest_first_order, split_work_tiles
from .backward_kernel import dkv_kernel, dq_kernel
from .forward_kernel import forward_kernel
from .settings import Settings, choose, pieces_asked, rows_of

# Rows of a tile that keep tensor cores busy.
FULL_TILE = 64


def forward(work: GroupPass, before: Rows | None, sinks: jax.Array | None, rounded: bool) -> Rows:
    """(out, lse) of a pass.

    Args:
      work: the pass, or two.
      before: results that the kernel goes on from; None for none.
      sinks: float32 [N] that it starts from; None for none.
      rounded: whether out of all tokens is kept in the dtype of the query; else in float32.
    """
    prepared, order = _prepare(work, "forward"), _destination(work.q_order)
    rows, size = order.rows, work.operands.value.shape[-1]
    outputs = (
        prepared.output((rows, work.heads, size), rounded and order.natural),
        prepared.output((work.heads, rows)),
    )
    constants = prepared.more_constants | {"BEFORE": _rows(before)}
    out, lse = prepared.run(
        forward_kernel,
        [*prepared.more_arrays, *_segments(work)],
        [head_sizes(work)[1], None],
        [sinks, *_arrays(before, 2)],
        outputs,
        constants | {"SINKS": sinks is not None},
        constants | {"SINKS": False, "BEFORE": _rows(None)},
        order,
    )
    return Rows(order, (out, lse))


def dq(
    work: GroupPass,
    inputs: BackwardInputs,
    before: Rows | None,
    before_kv: Rows | None,
    rounded: bool,
    rounded_kv: bool,
    with_dkv: bool,
) -> tuple[Rows, Rows | None]:
    """(dq, (dk, dv) or None) of a pass, added to gradients that are there.

    Args:
      work: the pass, or two.
      inputs: arrays by query.
      before: dq that the kernel adds to; None for none.
      before_kv: dk and dv that it adds to; None for none.
      rounded: whether dq of all tokens is kept in the dtype of the query; else in float32.
      rounded_kv: the same of dk and dv.
      with_dkv: whether the kernel computes dk and dv as well; see `each_key_once`.
    """
    prepared, order = _prepare(work, "fused" if with_dkv else "dq"), _destination(work.q_order)
    sizes = work.operands.query.shape[-1], work.operands.value.shape[-1]
    kv_rows, kv_heads = work.operands.key.shape[1:3]
    outputs = [prepared.output((order.rows, work.heads, sizes[0]), rounded and order.natural)]
    outputs += [prepared.output((kv_rows, kv_heads, x) if with_dkv else (1,), rounded_kv) for x in sizes]
    constants = prepared.more_constants | {"BEFORE_KV": _rows(before_kv), "WITH_DKV": with_dkv}
    dq, dk, dv = prepared.run(
        dq_kernel,
        [*prepared.more_arrays, *_segments(work)],
        [head_sizes(work)[0]],
        [*inputs, *_arrays(before, 1), *_arrays(before_kv, 2)],
        outputs,
        constants | {"BEFORE": _rows(before)},
        constants | {"BEFORE": _rows(None)},
        order,
    )
    return Rows(order, (dq,)), Rows(RowOrder(kv_rows), (dk, dv)) if with_dkv else None


def dkv(work: GroupPass, inputs: BackwardInputs, before: Rows | None, rounded: bool) -> Rows:
    """(dk, dv) of a pass, added to ``before``; arguments as in `dq`."""
    return dkv_of(_prepare(work, "dkv"), inputs, before, rounded, None)[0]


def dkv_of(
    prepared: "Prepared", inputs: BackwardInputs, before: Rows | None, rounded: bool, q_rows: int | None
) -> tuple[Rows, jax.Array]:
    """(dk, dv) as `dkv` has them, and dq [B, q_rows, heads, H], if each of that many rows meets one key block."""
    work, with_dq = prepared.work, q_rows is not None
    order, key, value = _destination(work.kv_order), work.operands.key, work.operands.value
    dq_shape = (1,) if q_rows is None else (q_rows, work.heads, key.shape[-1])
    outputs = [prepared.output((order.rows, *x.shape[2:]), rounded and order.natural) for x in (key, value)]
    outputs.append(prepared.output(dq_shape, True))
    in_place = before is not None and before.order == order and not rounded
    of_tiles = {"BEFORE": _rows(before), "WITH_DQ": with_dq and prepared.splits is None, "IN_PLACE": in_place}
    of_splits = {"BEFORE": _rows(None), "WITH_DQ": with_dq, "IN_PLACE": False}
    earlier, sizes = [*inputs, *_arrays(before, 2)], head_sizes(work)
    *dkv, dq = prepared.run(dkv_kernel, _segments(work), sizes, earlier, outputs, of_tiles, of_splits, order)
    return Rows(order, tuple(dkv)), dq


def each_key_once(work: GroupPass) -> bool:
    """True if each key is in one list, whose program then has all that adds to its dk and dv."""
    heads, kv_heads, rows = work.operands.query.shape[2], work.operands.key.shape[2], _rows_held(work, "fused")
    complete = work.q_order.complete and work.kv_order.complete and work.step == 1 and heads == kv_heads
    if rows is None or not complete or not work.passes or work.fused_with or work.operands.segments is not None:
        return False
    for one in work.passes:  # a quick look, before lists are made for the sake of the question
        columns = planned_block_pairs([one.mask], one.fwd_shape, False)[0].column
        if np.bincount(columns.ravel()).max(initial=0) > max(1, rows // one.fwd_shape[0]):
            return False
    prepared = _prepare(work, "fused")
    return prepared.walks[0][1].single and prepared.q.parts == 1 and prepared.splits is None


def block_shape(work: GroupPass, kernel: str) -> tuple[int, int]:
    """(bq, bkv) of the lists that a kernel walks over."""
    if (selection := work.operands.selection) is not None:
        granularity = selection.granularity
        return max(granularity, min(FULL_TILE // work.pack, MAX_QUERY_GROUPS * granularity)), selection.block
    bq, bkv = work.block_shape(dkv=kernel == "dkv")
    if kernel == "dkv" or not work.passes:
        return bq, bkv
    if work.fused_with is not None:  # queries are cut as the pass with more to do has them
        pair = work.passes[0], work.fused_with.passes[0]
        bq = max(pair, key=lambda one: one.fwd_blocks * math.prod(one.fwd_shape)).fwd_shape[0]
    rows = _rows_held(work, kernel)
    if rows and work.call.params[0].q_blocksize is None and (kernel == "fused" or rows < bq <= 2 * rows):
        bq = rows  # lists as fine as the tiles
    return bq, bkv


def head_sizes(work: GroupPass) -> tuple[int, int]:
    """Padded head sizes of q and k, and of v."""
    return padded_size(work.operands.query.shape[-1]), padded_size(work.operands.value.shape[-1])


def _rows_held(work: GroupPass, kernel: str) -> int | None:
    return rows_of(kernel, work.operands.query.dtype.itemsize, head_sizes(work))


def _segments(work: GroupPass) -> tuple[jax.Array | None, ...]:
    return work.operands.segments or (None, None)


def _lists(work: GroupPass, major: Side, minor: Side, dkv: bool) -> Lists:
    return lists_of(work.call, work.operands, work.passes, major, minor, dkv)


def _prepare(work: GroupPass, kernel: str) -> "Prepared":
    """The launch of a kernel, but for its earlier results."""
    dkv, shape, params = kernel == "dkv", block_shape(work, kernel), work.call.params[kernel != "forward"]
    rows = shape[0] * work.pack
    itemsize, blocks = work.operands.query.dtype.itemsize, (shape[1], rows) if dkv else (rows, shape[1])
    settings = choose(kernel, itemsize, head_sizes(work), blocks, params, hardware.local_gpu())
    rows_held = (settings.minor, settings.major) if dkv else (settings.major, settings.minor)
    q, kv = Side(work.q_order, shape[0], rows_held[0], work.pack), Side(work.kv_order, shape[1], rows_held[1])
    major, minor = (kv, q) if dkv else (q, kv)
    walks = [(minor, _lists(work, major, minor, dkv))]
    second = work.fused_with
    if second is not None and not dkv:
        side = Side(second.kv_order, block_shape(second, kernel)[1], settings.minor)
        walks.append((side, _lists(second, q, side, dkv)))
    return prepare(work, q, kv, major, walks, settings, pieces_asked(params, minor.order.rows), dkv)


def prepare(
    work: GroupPass,
    q: Side,
    kv: Side,
    major: Side,
    walks: Sequence[tuple[Side, Lists]],
    settings: Settings,
    asked: int | None,
    dkv: bool,
) -> "Prepared":
    """A launch over lists, for dk and dv if ``dkv``.

    ``asked`` is what `pieces_asked` says, the other arguments are fields of `Prepared`.
    """
    processors = hardware.local_gpu().processors
    steps, steps_before = work.count_steps(walks, dkv=dkv, pack=work.pack)
    programs = major.parts * work.operands.query.shape[0] // len(steps)  # that do the same work tile
    most = None
    if asked is not None:
        number, most = np.full(steps.shape, asked, np.int32), asked * steps.shape[1]
    elif isinstance(steps, np.ndarray):
        number = count_splits(steps, programs, 2 * processors)
    else:
        number, most = _run_time_splits(work, walks, steps, programs, processors, dkv)
    splits = split_work_tiles(steps, number, most)
    heads = work.operands.key.shape[2] if dkv else work.heads // work.pack
    rest = (np if isinstance(steps, np.ndarray) else jnp).where(number == 0, steps, 0)
    order = longest_first_order(rest.reshape(len(rest), heads, major.blocks), 8 * processors)
    return Prepared(work, q, kv, major, walks, settings, order, splits, steps_before, steps.shape[1])


def _run_time_splits(
    work: GroupPass, walks: Sequence[tuple[Side, Lists]], steps: Any, programs: int, slots: int, dkv: bool
):
    """(splits of each work tile, a bound of their sum), for lists of which only bounds are known."""
    heads, members = work.heads_of_lists(dkv=dkv, pack=work.pack)
    total = longest = 0
    for minor, lists in walks:
        batches, kinds = lists.lists.spans.shape[:2]
        total += minor.steps(lists.lists.block.size // batches) * -(-len(heads) // kinds)
        longest += minor.steps(lists.longest) * int(members.sum(1).max())
    limit = max(MIN_STEPS, -(-total * programs // slots))
    if longest <= limit:
        return np.zeros(steps.shape, np.int32), 0
    splits = -(-steps // limit)
    if walks[0][0].gathered:  # what is stored by minor row comes from one launch: every work tile is cut
        number = steps.shape[1]
        return jnp.maximum(splits, 1), (total + number * int(members.sum(1).max())) // limit + number
    return jnp.where(steps > limit, splits, 0), 2 * total // limit


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A launch but for the kernel.

    Attributes:
      work: the pass, or two.
      q, kv: how rows are cut.
      major: the one of them that programs hold.
      walks: the minor side and the blocks of this pass, and those of the second one, if there is one.
      settings: tile sizes are those of q and kv.
      order: in which order work tiles are begun, or None.
      splits: how long work tiles are split, or None.
      steps_before: the steps of a work tile before those of each query head; see `dkv_kernel`.
      work_tiles: number of work tiles of a batch entry.
    """

    work: GroupPass
    q: Side
    kv: Side
    major: Side
    walks: Sequence[tuple[Side, Lists]]
    settings: Settings
    order: Any
    splits: Splits | None
    steps_before: Any
    work_tiles: int

    def output(self, shape: Sequence[int], rounded: bool = False) -> jax.ShapeDtypeStruct:
        """An output; in the dtype of the query if it may be rounded, else in float32."""
        query = self.work.operands.query
        return jax.ShapeDtypeStruct((query.shape[0], *shape), query.dtype if rounded else jnp.float32)

    @property
    def more_arrays(self) -> list[Any]:
        """What the second pass reads."""
        return _arrays_of(self.walks[1][1]) if len(self.walks) > 1 else [None] * 5

    @property
    def more_constants(self) -> dict[str, Any]:
        """The constants of the second pass; it has no rows if there is none."""
        side, lists = self.walks[-1]
        axis = side.axis if len(self.walks) > 1 else side.axis._replace(ROWS=0)
        return {"KV2": axis, "L2": _walk(lists)}

    def run(
        self,
        kernel: Any,
        others: Sequence[Any],
        sizes: Sequence[int | None],
        earlier: Sequence[Any],
        outputs: Sequence[jax.ShapeDtypeStruct],
        constants: dict[str, Any],
        of_splits: dict[str, Any],
        order: RowOrder,
    ) -> list[jax.Array]:
        """Returns the results of a kernel. It is launched twice if work tiles are cut: for splits, then for all.

        Args:
          kernel: the kernel.
          others: its arrays between those of the first pass' lists and the results of splits.
          sizes: of the results of a split, by major row: None for a number.
          earlier: its arrays after these.
          outputs: its results by major row, as many as ``sizes``, and what it stores as it walks.
          constants: those that not all kernels have. With IN_PLACE, results by major row are written over the last of
            ``earlier``, which are alike.
          of_splits: those of ``constants`` that differ for splits.
          order: the order of the results' rows.
        """
        operands, parts, by_row, blocks = self.work.operands, self.major.parts, len(sizes), self.major.blocks
        constants = self._constants(order) | constants
        first = operands.query, operands.key, operands.value
        lists = [*_arrays_of(self.walks[0][1]), *others]
        batches = max([1, *(x.shape[1] for x in (self.order, self.splits and self.splits.steps) if x is not None)])
        of_rows: Sequence[Any] = [None] * by_row  # results of splits
        stored: Sequence[Any] | None = None  # by splits, as they walked
        if self.splits is not None:
            number = len(self.splits.steps)
            rows = number, operands.query.shape[0], parts * self.major.tile
            results = [jax.ShapeDtypeStruct(rows if x is None else (*rows, x), jnp.float32) for x in sizes]
            arrays = [*first, self.splits.steps, self.steps_before, *lists, *of_rows, *earlier]
            work = {"W": tiles.Work(blocks, False, True, False, batches)}
            results = self._call(
                kernel, number * parts, arrays, [*results, *outputs[by_row:]], constants | of_splits | work
            )
            of_rows, stored = results[:by_row], results[by_row:]
            outputs = [*outputs[:by_row], *(self.output((1,)) for _ in stored)]
            if not sizes:
                return list(stored)
        splits = None if self.splits is None else self.splits.ranges
        arrays = [*first, self.order, splits, *lists, *of_rows, *earlier]
        in_place: Sequence[int] = ()
        if constants.get("IN_PLACE", False):
            in_place = range(len(arrays) - by_row, len(arrays))
            outputs = [*(self.output((1,)) for _ in sizes), *outputs[by_row:]]
        work = {"W": tiles.Work(blocks, self.order is not None, False, self.splits is not None, batches)}
        results = self._call(kernel, self.work_tiles * parts, arrays, outputs, constants | work, in_place)
        if in_place:
            results = [*results[-by_row:], *results[by_row:-by_row]]
        return [*results[:by_row], *(results[by_row:] if stored is None else stored)]

    def _constants(self, order: RowOrder) -> dict[str, Any]:
        """The constants of all kernels, for results in a row order."""
        work, operands = self.work, self.work.operands
        b, t, heads, h = operands.query.shape
        _, s, kv_heads, hv = operands.value.shape
        arrays = tiles.Arrays(
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
            operands.segments is not None,
        )
        destination = tiles.Rows(True, order.natural, order.rows, kernel_order(order))
        walk = _walk(self.walks[0][1])
        return {"A": arrays, "Q": self.q.axis, "KV": self.kv.axis, "L": walk, "OUT": destination}

    def _call(self, kernel, programs, arrays, outputs, constants, in_place=()) -> list[jax.Array]:
        query = self.work.operands.query
        # A kernel does not look at arrays that its constants rule out: any array stands in for them.
        arrays = [query if x is None else jnp.asarray(x) for x in arrays]
        grid, settings = (programs, query.shape[0]), self.settings
        results = bridge.call_triton(
            kernel, grid, arrays, outputs, constants, settings.num_warps, settings.num_stages, in_place
        )
        return [varying_like(query, x) for x in results]


def _destination(order: RowOrder) -> RowOrder:
    """The order in which a pass in some order keeps its results."""
    return RowOrder(order.length) if order.complete else order


def _arrays_of(lists: Lists) -> list[Any]:
    of_blocks = lists.lists
    return [of_blocks.spans, of_blocks.block, of_blocks.tile, of_blocks.active_rows_mask, lists.bits]


def _walk(lists: Lists) -> tiles.Walk:
    batches, heads = lists.lists.spans.shape[:2]
    return tiles.Walk(batches, heads, lists.lists.group, lists.any_free, lists.any_masked, lists.chosen)


def _rows(rows: Rows | None) -> tiles.Rows:
    """By which a kernel finds earlier results."""
    if rows is None:
        return tiles.Rows(False, True, 0, kernel_order(RowOrder(0)))
    return tiles.Rows(True, rows.order.natural, rows.order.rows, kernel_order(rows.order))


def _arrays(rows: Rows | None, count: int) -> tuple[jax.Array | None, ...]:
    return (None,) * count if rows is None else rows.arrays
