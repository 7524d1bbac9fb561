"""One pass of a chain for a group of heads: its lists, its settings, and the launch of its kernels."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...planning.plan import Pass
from ...planning.views import RowOrder
from ..call import Call, Operands
from . import launch
from .backward_kernel import dkv_kernel, dq_kernel
from .forward_kernel import forward_kernel
from .lists import Lists, Side, begin_order, run_time_lists, static_lists, with_segments
from .settings import Settings, choose, rows_of, splits


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
      passes: the heads take them in turn; they differ in their masks only. () for a run-time mask.
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

    @property
    def q_order(self) -> RowOrder:
        """Token of each query row."""
        return self.passes[0].q_order if self.passes else RowOrder(self.operands.query.shape[1])

    @property
    def kv_order(self) -> RowOrder:
        """Token of each key row."""
        return self.passes[0].kv_order if self.passes else RowOrder(self.operands.key.shape[1])

    def goes_with(self, other: "Link") -> bool:
        """Whether one kernel can do both: they have the same query rows, and lists for as many heads."""
        return self.q_order == other.q_order and len(self.passes) == len(other.passes)

    @functools.cached_property
    def gives_dkv(self) -> bool:
        """Whether the dq kernel computes dk and dv as well: each key is in one list, so they are complete there."""
        heads, kv_heads, rows = self.operands.query.shape[2], self.operands.key.shape[2], rows_of("fused", *self._sizes)
        complete = self.q_order.complete and self.kv_order.complete and self.step == 1 and heads == kv_heads
        if rows is None or not complete or not self.passes or self.also or self.operands.segments is not None:
            return False
        for one in self.passes:  # a quick look, before lists are made for the sake of the question
            live = one.fwd.data_next[0][one.fwd.block_mask[0] > 0]
            if np.bincount(live).max(initial=0) > max(1, rows // one.fwd_shape[0]):
                return False
        prepared = self._prepared("fused")
        return prepared.lists.single and prepared.q.parts == prepared.splits == 1

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
            prepared.output((self.heads, rows), False),
        )
        extra = {"SINKS": sinks is not None} | prepared.more_constants | _source("BEFORE", before)
        arrays = [*prepared.more_arrays, *self._segments, sinks, *_arrays(before, 2)]
        out, lse = prepared.run(forward_kernel, arrays, outputs, extra, order)
        if prepared.splits == 1:
            return Rows(order, (out[0], lse[0]))
        total = jax.nn.logsumexp(lse, axis=0)
        share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total)))
        return Rows(order, ((out * share.swapaxes(-1, -2)[..., None]).sum(0), total))

    def dq(
        self, gradients: Gradients, before: Rows | None, before_kv: Rows | None, rounded: bool, rounded_kv: bool
    ) -> tuple[Rows, Rows | None]:
        """(dq, (dk, dv) if `gives_dkv`) of this pass, added to what is there."""
        prepared, order = self._prepared("fused" if self.gives_dkv else "dq"), _destination(self.q_order)
        sizes = self.operands.query.shape[-1], self.operands.value.shape[-1]
        kv_rows, kv_heads = self.operands.key.shape[1:3]
        outputs = [prepared.output((order.rows, self.heads, sizes[0]), rounded and order.natural)]
        outputs += [prepared.output((kv_rows, kv_heads, x) if self.gives_dkv else (1,), rounded_kv) for x in sizes]
        extra = {"WITH_DKV": self.gives_dkv} | prepared.more_constants
        extra |= _source("BEFORE", before) | _source("BEFORE_KV", before_kv)
        arrays = [*prepared.more_arrays, *self._segments, *gradients, *_arrays(before, 1), *_arrays(before_kv, 2)]
        dq, dk, dv = prepared.run(dq_kernel, arrays, outputs, extra, order)
        rows = Rows(order, (prepared.summed(dq),))
        return rows, Rows(RowOrder(kv_rows), (dk[0], dv[0])) if self.gives_dkv else None

    def dkv(self, gradients: Gradients, before: Rows | None, rounded: bool) -> Rows:
        """(dk, dv) of this pass, added to ``before``."""
        prepared, order = self._prepared("dkv"), _destination(self.kv_order)
        kv_heads, sizes = self.operands.key.shape[2], (self.operands.key.shape[-1], self.operands.value.shape[-1])
        outputs = [prepared.output((order.rows, kv_heads, size), rounded and order.natural) for size in sizes]
        arrays = [*self._segments, *gradients, *_arrays(before, 2)]
        dk, dv = prepared.run(dkv_kernel, arrays, outputs, _source("BEFORE", before), order)
        return Rows(order, (prepared.summed(dk), prepared.summed(dv)))

    @property
    def _sizes(self) -> tuple[int, tuple[int, int]]:
        """(bytes of an element, padded head sizes of q and k, and of v)."""
        query, value = self.operands.query, self.operands.value
        return query.dtype.itemsize, (launch.padded(query.shape[-1]), launch.padded(value.shape[-1]))

    @property
    def _segments(self) -> tuple[jax.Array | None, ...]:
        return self.operands.segments or (None, None)

    def _shape(self, kernel: str) -> tuple[int, int]:
        """(bq, bkv) of the lists."""
        if not self.passes:
            return self.call.bwd_shape if kernel == "dkv" else self.call.fwd_shape
        if kernel == "dkv":
            return self.passes[0].bwd_shape
        bq, bkv = self.passes[0].fwd_shape
        if self.also is not None:  # queries are cut as the pass with more to do has them
            other = self.also.passes[0]
            bq = max((self.passes[0], other), key=lambda one: one.fwd_blocks * math.prod(one.fwd_shape)).fwd_shape[0]
        tile = rows_of(kernel, *self._sizes)
        if tile and self.call.params[0].q_blocksize is None and (kernel == "fused" or tile < bq <= 2 * tile):
            bq = tile  # lists as fine as the tiles
        return bq, bkv

    def _lists(self, major: Side, minor: Side, dkv: bool) -> Lists:
        if self.passes:
            lists = static_lists(self.passes, major, minor, dkv)
        else:
            assert self.operands.mask is not None
            lists = run_time_lists(self.operands.mask, major, minor, dkv)
        if self.operands.segments is None:
            return lists
        return with_segments(lists, major, minor, *self.operands.segments[:: -1 if dkv else 1])

    def _prepared(self, kernel: str) -> "_Prepared":
        """What the launch of a kernel needs."""
        device = launch.device()
        assert isinstance(device, launch.Device)
        dkv, shape, params = kernel == "dkv", self._shape(kernel), self.call.params[kernel != "forward"]
        settings = choose(kernel, *self._sizes, (shape[1], shape[0]) if dkv else shape, params, device)
        tiles = (settings.minor, settings.major) if dkv else (settings.major, settings.minor)
        q, kv = (Side(*x) for x in zip((self.q_order, self.kv_order), shape, tiles, strict=True))
        major, minor = (kv, q) if dkv else (q, kv)
        lists, more, second = self._lists(major, minor, dkv), None, None
        steps = lists.most * minor.parts
        if self.also is not None and not dkv:
            second = Side(self.also.kv_order, self.also._shape(kernel)[1], settings.minor)
            more = self.also._lists(q, second, dkv)
            steps = steps + more.most * second.parts
        heads = self.operands.key.shape[2] if dkv else self.heads
        programs = heads * major.blocks * major.parts
        parts = splits(params, minor, int(steps.max()), programs * self.operands.query.shape[0], device)
        return _Prepared(
            self,
            q,
            kv,
            lists,
            second,
            more,
            settings,
            begin_order(steps, heads, 8 * device.processors),
            programs * parts,
            parts,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
    """A launch but for the kernel.

    Attributes:
      link: whose it is.
      q, kv: how rows are cut.
      lists: the blocks.
      second, more: the key side and the blocks of the second pass, or None.
      settings: tile sizes are those of q and kv.
      places: in which order blocks are begun, or None.
      programs: number of programs for a batch entry.
      splits: programs that share a list.
    """

    link: Link
    q: Side
    kv: Side
    lists: Lists
    second: Side | None
    more: Lists | None
    settings: Settings
    places: np.ndarray | None
    programs: int
    splits: int

    def output(self, shape: Sequence[int], rounded: bool) -> jax.ShapeDtypeStruct:
        """An output, a part for each of the splits; in the dtype of the query if it may be rounded, else in float32."""
        query = self.link.operands.query
        dtype = query.dtype if rounded and self.splits == 1 else jnp.float32
        return jax.ShapeDtypeStruct((self.splits, query.shape[0], *shape), dtype)

    def summed(self, parts: jax.Array) -> jax.Array:
        """The sum of the splits' parts."""
        return parts[0] if self.splits == 1 else parts.sum(0)

    @property
    def more_arrays(self) -> tuple[Any, Any]:
        """What the second pass reads."""
        return (None, None) if self.more is None else (self.more.entries, self.more.bits)

    @property
    def more_constants(self) -> dict[str, Any]:
        """The constants of the second pass."""
        side, lists = (self.kv, self.lists) if self.second is None or self.more is None else (self.second, self.more)
        return {
            "TWO": self.second is not None,
            **_order_constants("KV2", side.order),
            "WIDTH2": lists.entries.shape[-1] // 2 - 1,
            "BKV2": side.block,
            "KV2_PARTS": side.parts,
            "ANY_FREE2": lists.any_free,
            "ANY_MASKED2": lists.any_masked,
        }

    def run(
        self,
        kernel: Any,
        arrays: Sequence[Any],
        outputs: Sequence[jax.ShapeDtypeStruct],
        extra: dict[str, Any],
        order: RowOrder,
    ) -> Sequence[jax.Array]:
        """Launches a kernel; ``arrays`` are those that not all kernels have, ``order`` is that of its result."""
        call, (query, key, value, *_) = self.link.call, self.link.operands
        b, t, heads, h = query.shape
        _, s, kv_heads, hv = value.shape
        operands = [query, key, value, self.places, self.lists.entries, self.lists.bits, *arrays]
        # A kernel does not look at arrays that its constants rule out: any array stands in for them.
        operands = [query if x is None else jnp.asarray(x) for x in operands]
        lists_b, lists_h, blocks, entries = self.lists.entries.shape
        constants = {
            "T": t,
            "S": s,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "H": h,
            "HV": hv,
            "D": launch.padded(h),
            "DV": launch.padded(hv),
            "SCALE": call.scale,
            "CAP": call.soft_cap or 0.0,
            "FIRST_HEAD": self.link.first,
            "HEAD_STEP": self.link.step,
            "OWN_HEADS": self.link.heads,
            **_order_constants("Q", self.q.order),
            **_order_constants("KV", self.kv.order),
            "BY_TOKEN": order.natural,
            "OUT_ROWS": order.rows,
            "BATCH": b,
            "BLOCKS": blocks,
            "WIDTH": entries // 2 - 1,
            "LISTS_B": lists_b,
            "LISTS_H": lists_h,
            "BQ": self.q.block,
            "BKV": self.kv.block,
            "M": self.q.tile,
            "N": self.kv.tile,
            "Q_PARTS": self.q.parts,
            "KV_PARTS": self.kv.parts,
            "SPLITS": self.splits,
            "WIDE": max(t * heads, s * kv_heads) * max(h, hv) >= 2**31,
            "SEGMENTED": self.link.operands.segments is not None,
            "ORDERED": self.places is not None,
            "ANY_FREE": self.lists.any_free,
            "ANY_MASKED": self.lists.any_masked,
        }
        settings = self.settings
        results = launch.call(
            kernel, (self.programs, b), operands, outputs, constants | extra, settings.num_warps, settings.num_stages
        )
        # Inside `shard_map`, JAX cannot know of a kernel's results that they differ by device as its operands do.
        axes = jax.typeof(query).manual_axis_type.varying
        missing = [tuple(axes - jax.typeof(x).manual_axis_type.varying) for x in results]
        return [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(results, missing, strict=True)]


def _destination(order: RowOrder) -> RowOrder:
    """The order in which a pass in some order keeps its results."""
    return RowOrder(order.length) if order.complete else order


def _order_constants(name: str, order: RowOrder) -> dict[str, int]:
    names = [f"{name}_{x}" for x in ("ROWS", "COUNT", "STEP", "JUMP", "START")]
    return dict(zip(names, (order.rows, *order.numbers), strict=True))


def _source(name: str, rows: Rows | None) -> dict[str, Any]:
    """The constants by which a kernel finds earlier results."""
    if rows is None:
        return {name: False} | {f"{name}_{x}": 0 for x in ("ROWS", "COUNT", "JUMP", "START")}
    constants = _order_constants(name, rows.order)
    return {name: True} | {key: value for key, value in constants.items() if not key.endswith("STEP")}


def _arrays(rows: Rows | None, count: int) -> tuple[jax.Array | None, ...]:
    return (None,) * count if rows is None else rows.arrays
