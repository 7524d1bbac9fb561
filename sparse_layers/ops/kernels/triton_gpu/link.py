"""One pass of a chain for a group of heads: its lists, its settings, and the launch of its kernels."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.lists import MOST_PARTS, planned_block_pairs
from ...planning.plan import Pass
from ...planning.views import RowOrder
from ..call import Call, Operands, row_orders
from ..gpu import bridge, hardware, tiles
from ..gpu.hardware import padded_size
from ..gpu.lists import Lists, Side, kernel_order, lists_of
from ..gpu.work import LEAST_STEPS, Cut, begin_order, cut, pieces_of
from .backward_kernel import dkv_kernel, dq_kernel
from .forward_kernel import forward_kernel
from .settings import Settings, choose, pieces_asked, rows_of

# Rows of a tile that keep tensor cores busy.
FULL_TILE = 64


class Rows(NamedTuple):
    """Results of some passes, by token if ``order`` is natural, else by row of it, where only its rows are defined.

    Forward: out [B, rows, heads, Hv] and lse [B, heads, rows]; backward: gradients [B, rows, heads, size].
    """

    order: RowOrder
    arrays: tuple[jax.Array, ...]

    def whole(self) -> tuple[jax.Array, ...]:
        """The arrays by token: out and gradients [B, length, heads, size], lse [B, length, heads]."""
        arrays = [x.swapaxes(1, 2) if x.ndim == 3 else x for x in self.arrays]
        if self.order.natural:
            return tuple(arrays)
        return tuple(self.order.scatter(x, -jnp.inf if x.ndim == 3 else 0.0) for x in arrays)


class Gradients(NamedTuple):
    """What the backward kernels read by query: lse and delta [B, N, T] in float32, dout [B, T, N, Hv]."""

    lse: jax.Array
    delta: jax.Array
    dout: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """One pass for the query heads first, first + step, ...

    Attributes:
      call: the call of the op.
      operands: its arrays; segment ids of padding are -2 for queries and -1 for keys.
      first, step: which heads.
      passes: the heads take them in turn; they differ in their masks only. () for a run-time mask, or a selection.
      also: a second pass with the same query rows, which the forward and dq kernels do together with this one.
    """

    call: Call
    operands: Operands
    first: int
    step: int
    passes: tuple[Pass, ...]
    also: "Link | None" = None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(range(self.first, self.operands.query.shape[2], self.step))

    @functools.cached_property
    def pack(self) -> int:
        """How many query heads of a key head a program takes together: all of them if they choose alike, else 1.

        What a few queries choose together is less than what many do, so tiles are filled with their heads.
        """
        if self.call.selection is None or self.operands.chosen is None:
            return 1
        heads, kv_heads, choices = (x.shape[2] for x in (self.operands.query, self.operands.key, self.operands.chosen))
        masks = self.operands.mask if self.call.plan is None else self.call.plan.masks
        group, alike = heads // kv_heads, choices <= kv_heads and (masks is None or len(masks) == 1)
        small = self.call.selection[1] <= 16 and group <= 64 and group & (group - 1) == 0
        return group if alike and small else 1

    @property
    def q_order(self) -> RowOrder:
        """Token of each query row."""
        return row_orders(self.operands, self.passes)[0]

    @property
    def kv_order(self) -> RowOrder:
        """Token of each key row."""
        return row_orders(self.operands, self.passes)[1]

    def goes_with(self, other: "Link", kernel: str) -> bool:
        """Whether one kernel can do both: they have the same query rows, and lists for as many heads.

        ``kernel`` is "forward", or "dkv" for those of the backward pass.
        """
        return self.q_order == other.q_order and len(self.passes) == len(other.passes)

    @property
    def gives_dkv(self) -> bool:
        """Whether the kernel for dq computes dk and dv as well."""
        return self.single_keys

    @property
    def adds_in_float32(self) -> bool:
        """Whether `dq` adds in place to what is there, which is in float32 then."""
        return False

    @functools.cached_property
    def single_keys(self) -> bool:
        """Whether each key is in one list, whose program then has all that adds to its dk and dv."""
        heads, kv_heads, rows = self.operands.query.shape[2], self.operands.key.shape[2], rows_of("fused", *self.sizes)
        complete = self.q_order.complete and self.kv_order.complete and self.step == 1 and heads == kv_heads
        if rows is None or not complete or not self.passes or self.also or self.operands.segments is not None:
            return False
        for one in self.passes:  # a quick look, before lists are made for the sake of the question
            columns = planned_block_pairs([one.mask], one.fwd_shape, False)[0].column
            if np.bincount(columns.ravel()).max(initial=0) > max(1, rows // one.fwd_shape[0]):
                return False
        prepared = self._prepared("fused")
        return prepared.walks[0][1].single and prepared.q.parts == 1 and prepared.cut is None

    @property
    def by_keys(self) -> list["Link"]:
        """The passes whose dk and dv take a kernel of their own."""
        if self.also is not None:
            return [dataclasses.replace(self, also=None), self.also]
        return [] if self.gives_dkv else [self]

    def forward(self, before: Rows | None, sinks: jax.Array | None, rounded: bool) -> Rows:
        """(out, lse) of this pass, going on from ``before`` and the float32 sinks [N], if given.

        ``rounded``: out of all tokens is kept in the dtype of the query, as in the other methods.
        """
        prepared, order = self._prepared("forward"), _destination(self.q_order)
        rows, size = order.rows, self.operands.value.shape[-1]
        outputs = (
            prepared.output((rows, self.heads, size), rounded and order.natural),
            prepared.output((self.heads, rows)),
        )
        earlier = [sinks, *_arrays(before, 2)]
        constants = prepared.more_constants | {"BEFORE": _rows(before)}
        out, lse = prepared.run(
            forward_kernel,
            [*prepared.more_arrays, *self._segments],
            [self.sizes[1][1], None],
            earlier,
            outputs,
            constants | {"SINKS": sinks is not None},
            constants | {"SINKS": False, "BEFORE": _rows(None)},
            order,
        )
        return Rows(order, (out, lse))

    def dq(
        self, gradients: Gradients, before: Rows | None, before_kv: Rows | None, rounded: bool, rounded_kv: bool
    ) -> tuple[Rows, Rows | None]:
        """(dq, (dk, dv) if `gives_dkv`) of this pass, added to what is there."""
        prepared, order = self._prepared("fused" if self.gives_dkv else "dq"), _destination(self.q_order)
        sizes = self.operands.query.shape[-1], self.operands.value.shape[-1]
        kv_rows, kv_heads = self.operands.key.shape[1:3]
        outputs = [prepared.output((order.rows, self.heads, sizes[0]), rounded and order.natural)]
        outputs += [prepared.output((kv_rows, kv_heads, x) if self.gives_dkv else (1,), rounded_kv) for x in sizes]
        earlier = [*gradients, *_arrays(before, 1), *_arrays(before_kv, 2)]
        constants = prepared.more_constants | {"BEFORE_KV": _rows(before_kv), "WITH_DKV": self.gives_dkv}
        dq, dk, dv = prepared.run(
            dq_kernel,
            [*prepared.more_arrays, *self._segments],
            [self.sizes[1][0]],
            earlier,
            outputs,
            constants | {"BEFORE": _rows(before)},
            constants | {"BEFORE": _rows(None)},
            order,
        )
        return Rows(order, (dq,)), Rows(RowOrder(kv_rows), (dk, dv)) if self.gives_dkv else None

    def dkv(self, gradients: Gradients, before: Rows | None, rounded: bool) -> Rows:
        """(dk, dv) of this pass, added to ``before``."""
        return self._dkv(gradients, before, rounded, None)[0]

    def _dkv(
        self, gradients: Gradients, before: Rows | None, rounded: bool, q_rows: int | None
    ) -> tuple[Rows, jax.Array]:
        """(dk, dv) as `dkv` gives them, and dq [B, q_rows, heads, H], if each of that many rows meets one key block."""
        prepared, order, with_dq = self._prepared("dkv"), _destination(self.kv_order), q_rows is not None
        dq_shape = (1,) if q_rows is None else (q_rows, self.heads, self.operands.query.shape[-1])
        kv_heads, sizes = self.operands.key.shape[2], (self.operands.key.shape[-1], self.operands.value.shape[-1])
        outputs = [prepared.output((order.rows, kv_heads, size), rounded and order.natural) for size in sizes]
        outputs.append(prepared.output(dq_shape, True))
        in_place = before is not None and before.order == order and not rounded
        whole = {"BEFORE": _rows(before), "WITH_DQ": with_dq and prepared.cut is None, "IN_PLACE": in_place}
        piece = {"BEFORE": _rows(None), "WITH_DQ": with_dq, "IN_PLACE": False}
        earlier = [*gradients, *_arrays(before, 2)]
        *dkv, dq = prepared.run(dkv_kernel, self._segments, self.sizes[1], earlier, outputs, whole, piece, order)
        return Rows(order, tuple(dkv)), dq

    @property
    def sizes(self) -> tuple[int, tuple[int, int]]:
        """(bytes of an element, padded head sizes of q and k, and of v)."""
        query, value = self.operands.query, self.operands.value
        return query.dtype.itemsize, (padded_size(query.shape[-1]), padded_size(value.shape[-1]))

    @property
    def _segments(self) -> tuple[jax.Array | None, ...]:
        return self.operands.segments or (None, None)

    def shape(self, kernel: str) -> tuple[int, int]:
        """(bq, bkv) of the lists."""
        if self.call.selection is not None:
            block, granularity = self.call.selection
            return max(granularity, min(FULL_TILE // self.pack, MOST_PARTS * granularity)), block
        if not self.passes:
            return self.call.bwd_shape if kernel == "dkv" else self.call.fwd_shape
        if kernel == "dkv":
            return self.passes[0].bwd_shape
        bq, bkv = self.passes[0].fwd_shape
        if self.also is not None:  # queries are cut as the pass with more to do has them
            other = self.also.passes[0]
            bq = max((self.passes[0], other), key=lambda one: one.fwd_blocks * math.prod(one.fwd_shape)).fwd_shape[0]
        tile = rows_of(kernel, *self.sizes)
        if tile and self.call.params[0].q_blocksize is None and (kernel == "fused" or tile < bq <= 2 * tile):
            bq = tile  # lists as fine as the tiles
        return bq, bkv

    def _lists(self, major: Side, minor: Side, dkv: bool, parts: int = 1) -> Lists:
        return lists_of(self.call, self.operands, self.passes, major, minor, dkv, parts)

    def _prepared(self, kernel: str) -> "_Prepared":
        """What the launch of a kernel needs."""
        device = hardware.local_device()
        assert isinstance(device, hardware.Device)
        dkv, shape, params = kernel == "dkv", self.shape(kernel), self.call.params[kernel != "forward"]
        rows = shape[0] * self.pack
        settings = choose(kernel, *self.sizes, (shape[1], rows) if dkv else (rows, shape[1]), params, device)
        held = (settings.minor, settings.major) if dkv else (settings.major, settings.minor)
        q, kv = Side(self.q_order, shape[0], held[0], self.pack), Side(self.kv_order, shape[1], held[1])
        major, minor = (kv, q) if dkv else (q, kv)
        walks = [(minor, self._lists(major, minor, dkv))]
        if self.also is not None and not dkv:
            second = Side(self.also.kv_order, self.also.shape(kernel)[1], settings.minor)
            walks.append((second, self.also._lists(q, second, dkv)))
        return self._launch(q, kv, major, walks, settings, pieces_asked(params, minor.order.rows), dkv)

    def _launch(
        self,
        q: Side,
        kv: Side,
        major: Side,
        walks: "Sequence[tuple[Side, Lists]]",
        settings: Settings,
        asked: int | None,
        dkv: bool,
    ) -> "_Prepared":
        """A launch over lists, for dk and dv if ``dkv``.

        ``asked`` is what `pieces_asked` says, the other arguments are fields of `_Prepared`.
        """
        device = hardware.local_device()
        assert isinstance(device, hardware.Device)
        steps, passed = self._steps(walks, dkv, self.pack)
        programs = major.parts * self.operands.query.shape[0] // len(steps)  # that do the same job
        most = None
        if asked is not None:
            number, most = np.full(steps.shape, asked, np.int32), asked * steps.shape[1]
        elif isinstance(steps, np.ndarray):
            number = pieces_of(steps, programs, 2 * device.processors)
        else:
            number, most = self._run_time_pieces(walks, steps, programs, device.processors, dkv)
        found = cut(steps, number, most)
        heads = self.operands.key.shape[2] if dkv else self.heads // self.pack
        rest = (np if isinstance(steps, np.ndarray) else jnp).where(number == 0, steps, 0)
        order = begin_order(rest.reshape(len(rest), heads, major.blocks), 8 * device.processors)
        return _Prepared(self, q, kv, major, walks, settings, order, found, passed, steps.shape[1])

    def _jobs(self, dkv: bool, pack: int) -> tuple[np.ndarray, np.ndarray]:
        """(the pass' query heads, bool [heads of a job's kind, query heads]: which of them a job walks for)."""
        heads = self.first + self.step * np.arange(0, self.heads, pack)
        if not dkv:
            return heads, np.eye(len(heads), dtype=bool)
        kv_heads = self.operands.key.shape[2]
        return heads, heads // (self.operands.query.shape[2] // kv_heads) == np.arange(kv_heads)[:, None]

    def _steps(self, walks: Sequence[tuple[Side, Lists]], dkv: bool, pack: int) -> tuple[Any, Any]:
        """(steps of each job [LB, jobs], those of a job before each query head [LB, heads, blocks]), if known numpy's.

        The latter are None where a job is for one query head.
        """
        heads, members = self._jobs(dkv, pack)
        own: Any = 0
        for minor, lists in walks:
            counts = lists.lists.counts[..., 1]
            own = own + minor.steps(counts[:, heads // lists.lists.group % counts.shape[1]])
        if not dkv:
            return own.reshape(len(own), own.shape[1] * own.shape[2]), None
        jobs = (own[:, None] * members.astype(np.int32)[None, :, :, None]).sum(2)
        passed = own.cumsum(1) - own
        first = members.argmax(1)[members.argmax(0)]  # of the query heads with the same job
        passed = (passed - passed[:, first]).astype(np.int32)
        return jobs.reshape(len(own), jobs.shape[1] * jobs.shape[2]), passed

    def _run_time_pieces(self, walks: Sequence[tuple[Side, Lists]], steps: Any, programs: int, slots: int, dkv: bool):
        """(pieces of each job, a bound of their sum), for lists of which only bounds are known."""
        heads, members = self._jobs(dkv, self.pack)
        total = longest = 0
        for minor, lists in walks:
            batches, kinds = lists.lists.spans.shape[:2]
            total += minor.steps(lists.lists.block.size // batches) * -(-len(heads) // kinds)
            longest += minor.steps(lists.longest) * int(members.sum(1).max())
        limit = max(LEAST_STEPS, -(-total * programs // slots))
        if longest <= limit:
            return np.zeros(steps.shape, np.int32), 0
        pieces = -(-steps // limit)
        if walks[0][0].gathered:  # what is stored by minor row comes from one launch: every job is cut
            jobs = steps.shape[1]
            return jnp.maximum(pieces, 1), (total + jobs * int(members.sum(1).max())) // limit + jobs
        return jnp.where(steps > limit, pieces, 0), 2 * total // limit


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
    """A launch but for the kernel.

    Attributes:
      link: whose it is.
      q, kv: how rows are cut.
      major: the one of them that programs hold.
      walks: the minor side and the blocks of this pass, and those of the second one, if there is one.
      settings: tile sizes are those of q and kv.
      order: in which order jobs are begun, or None.
      cut: how long jobs are cut into pieces, or None.
      passed: the steps of a job before those of each query head; see `dkv_kernel`.
      jobs: number of jobs of a batch entry.
    """

    link: Link
    q: Side
    kv: Side
    major: Side
    walks: Sequence[tuple[Side, Lists]]
    settings: Settings
    order: Any
    cut: Cut | None
    passed: Any
    jobs: int

    def output(self, shape: Sequence[int], rounded: bool = False) -> jax.ShapeDtypeStruct:
        """An output; in the dtype of the query if it may be rounded, else in float32."""
        query = self.link.operands.query
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
        of_pieces: dict[str, Any],
        order: RowOrder,
    ) -> list[jax.Array]:
        """Launches a kernel, if jobs are cut first for their pieces.

        Args:
          kernel: the kernel.
          others: its arrays between those of the first pass' lists and the results of pieces.
          sizes: of the results of a piece, by major row: None for a number.
          earlier: its arrays after these.
          outputs: its results by major row, as many as ``sizes``, and what it stores as it walks.
          constants: those that not all kernels have; ``of_pieces`` where they differ for pieces. With IN_PLACE, results
            by major row are written over the last of ``earlier``, which are alike.
          of_pieces: see there.
          order: the order of the results' rows.
        """
        operands, parts = self.link.operands, self.major.parts
        b, t, heads, h = operands.query.shape
        _, s, kv_heads, hv = operands.value.shape
        shared = {
            "A": tiles.Arrays(
                t,
                s,
                heads,
                kv_heads,
                h,
                hv,
                padded_size(h),
                padded_size(hv),
                self.link.call.scale,
                self.link.call.soft_cap or 0.0,
                b,
                self.link.first,
                self.link.step,
                self.link.heads,
                max(t * heads, s * kv_heads) * max(h, hv) >= 2**31,
                operands.segments is not None,
            ),
            "Q": self.q.axis,
            "KV": self.kv.axis,
            "L": _walk(self.walks[0][1]),
            "OUT": tiles.Rows(True, order.natural, order.rows, kernel_order(order)),
        }
        first = operands.query, operands.key, operands.value
        lists = [*_arrays_of(self.walks[0][1]), *others]
        by_row, blocks, nothing = len(sizes), self.major.blocks, [None] * len(sizes)
        batches = max([1, *(x.shape[1] for x in (self.order, self.cut and self.cut.work) if x is not None)])
        found: Sequence[Any] = nothing
        walked: Sequence[Any] | None = None
        if self.cut is not None:
            number = len(self.cut.work)
            rows = number, b, parts * self.major.tile
            results = [jax.ShapeDtypeStruct(rows if x is None else (*rows, x), jnp.float32) for x in sizes]
            work = {"W": tiles.Work(blocks, False, True, False, batches)}
            arrays = [*first, self.cut.work, self.passed, *lists, *nothing, *earlier]
            results = [*results, *outputs[by_row:]]
            found = self._call(kernel, number * parts, arrays, results, shared | constants | of_pieces | work)
            found, walked = found[:by_row], found[by_row:]
            outputs = [*outputs[:by_row], *(self.output((1,)) for _ in walked)]
            if not sizes:
                return list(walked)
        work = {"W": tiles.Work(blocks, self.order is not None, False, self.cut is not None, batches)}
        arrays = [*first, self.order, None if self.cut is None else self.cut.pieces, *lists, *found, *earlier]
        changed: Sequence[int] = ()
        if constants.get("IN_PLACE", False):
            changed = range(len(arrays) - by_row, len(arrays))
            outputs = [*(self.output((1,)) for _ in sizes), *outputs[by_row:]]
        results = self._call(kernel, self.jobs * parts, arrays, outputs, shared | constants | work, changed)
        if changed:
            results = [*results[-by_row:], *results[by_row:-by_row]]
        return [*results[:by_row], *(results[by_row:] if walked is None else walked)]

    def _call(self, kernel, programs, arrays, outputs, constants, in_place=()) -> list[jax.Array]:
        query = self.link.operands.query
        # A kernel does not look at arrays that its constants rule out: any array stands in for them.
        arrays = [query if x is None else jnp.asarray(x) for x in arrays]
        grid, settings = (programs, query.shape[0]), self.settings
        results = bridge.call_triton(
            kernel, grid, arrays, outputs, constants, settings.num_warps, settings.num_stages, in_place
        )
        return [varying_like(query, x) for x in results]


def varying_like(query: jax.Array, x: jax.Array) -> jax.Array:
    """x, known to differ by device as the query does: inside `shard_map` JAX cannot know it of a kernel's results."""
    missing = tuple(jax.typeof(query).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _destination(order: RowOrder) -> RowOrder:
    """The order in which a pass in some order keeps its results."""
    return RowOrder(order.length) if order.complete else order


def _arrays_of(lists: Lists) -> list[Any]:
    found = lists.lists
    return [found.spans, found.block, found.tile, found.chosen_by, lists.bits]


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
