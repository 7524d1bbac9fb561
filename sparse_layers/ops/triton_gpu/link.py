"""One pass of a chain for a group of heads: its lists, its settings, and the launch of its kernels."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..call import Call, Operands
from ..layout import RowOrder
from ..plan import Pass
from . import launch
from .backward_kernel import dkv_kernel, dq_kernel
from .forward_kernel import forward_kernel
from .lists import Lists, Side, run_time_lists, static_lists, with_segments
from .settings import Settings, choose, splits


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
    """

    call: Call
    operands: Operands
    first: int
    step: int
    passes: tuple[Pass, ...]

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

    @functools.cached_property
    def gives_dq(self) -> bool:
        """Whether `dkv` computes dq as well: each query is in one block only, so its gradient is complete there."""
        prepared = self._prepared("dkv")
        whole = prepared.kv.parts == prepared.splits == 1  # one program for all keys of a block
        return prepared.lists.single and whole and self.q_order.complete

    def forward(self, before: Rows | None, sinks: jax.Array | None, *, final: bool) -> Rows:
        """(out, lse) of this pass, going on from ``before`` and the sinks [N], if given.

        ``final``: the result is kept in the dtype of the query if it can, else in float32.
        """
        prepared, order = self._prepared("forward"), _destination(self.q_order)
        rows, size = order.rows, self.operands.value.shape[-1]
        outputs = (
            prepared.output((rows, self.heads, size), final and order.natural),
            prepared.output((self.heads, rows), False),
        )
        extra = {"SINKS": sinks is not None} | _source("BEFORE", before)
        out, lse = prepared.run(forward_kernel, [sinks, *_arrays(before, 2)], outputs, extra, order)
        if prepared.splits == 1:
            return Rows(order, (out[0], lse[0]))
        total = jax.nn.logsumexp(lse, axis=0)
        share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total)))
        # Rows that are not defined may hold NaN; that stays where it is.
        return Rows(order, ((out * share.swapaxes(-1, -2)[..., None]).sum(0), total))

    def dq(self, gradients: Gradients, before: Rows | None, *, final: bool) -> Rows:
        """dq of this pass, added to ``before``."""
        prepared, order = self._prepared("dq"), _destination(self.q_order)
        outputs = [prepared.output((order.rows, self.heads, self.operands.query.shape[-1]), final and order.natural)]
        arrays = [*gradients, *_arrays(before, 1)]
        (dq,) = prepared.run(dq_kernel, arrays, outputs, _source("BEFORE", before), order)
        return Rows(order, (prepared.summed(dq),))

    def dkv(
        self, gradients: Gradients, before: Rows | None, before_q: Rows | None, *, final: bool, final_q: bool
    ) -> tuple[Rows, Rows | None]:
        """((dk, dv), dq if `gives_dq`) of this pass, added to what is there."""
        prepared, order = self._prepared("dkv"), _destination(self.kv_order)
        kv_heads, sizes = self.operands.key.shape[2], (self.operands.key.shape[-1], self.operands.value.shape[-1])
        outputs = [prepared.output((order.rows, kv_heads, size), final and order.natural) for size in sizes]
        q_shape = (self.q_order.length, self.heads, sizes[0]) if self.gives_dq else (1,)
        outputs.append(prepared.output(q_shape, final_q))
        extra = {"WITH_DQ": self.gives_dq} | _source("BEFORE", before) | _source("BEFORE_Q", before_q)
        arrays = [*gradients, *_arrays(before, 2), *_arrays(before_q, 1)]
        dk, dv, dq = prepared.run(dkv_kernel, arrays, outputs, extra, order)
        rows = Rows(order, (prepared.summed(dk), prepared.summed(dv)))
        return rows, Rows(RowOrder(self.q_order.length), (dq[0],)) if self.gives_dq else None

    def _prepared(self, kernel: str) -> "_Prepared":
        """What the launch of a kernel needs."""
        device = launch.device()
        assert isinstance(device, launch.Device)
        dkv = kernel == "dkv"
        if self.passes:
            shape = self.passes[0].bwd_shape if dkv else self.passes[0].fwd_shape
        else:
            shape = self.call.bwd_shape if dkv else self.call.fwd_shape
        params = self.call.params[kernel != "forward"]
        sizes = launch.padded(self.operands.query.shape[-1]), launch.padded(self.operands.value.shape[-1])
        itemsize = self.operands.query.dtype.itemsize
        settings = choose(kernel, itemsize, sizes, shape[::-1] if dkv else shape, params, device)
        tiles = (settings.minor, settings.major) if dkv else (settings.major, settings.minor)
        q, kv = (Side(*x) for x in zip((self.q_order, self.kv_order), shape, tiles, strict=True))
        major, minor = (kv, q) if dkv else (q, kv)
        if self.passes:
            lists = static_lists(self.passes, major, minor, dkv)
        else:
            lists = run_time_lists(self.operands.mask, major, minor, dkv)
        if self.operands.segments is not None:
            lists = with_segments(lists, major, minor, *(self.operands.segments[:: -1 if dkv else 1]))
        heads = self.operands.key.shape[2] if dkv else self.heads
        programs = heads * major.blocks * major.parts * self.operands.query.shape[0]
        parts = splits(params, minor, int(lists.most.max()) * minor.parts, programs, device)
        return _Prepared(self, q, kv, lists, settings, heads, programs * parts // self.operands.query.shape[0], parts)


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
    """A launch but for the kernel.

    Attributes:
      link: whose it is.
      q, kv: how rows are cut.
      lists: the blocks.
      settings: tile sizes are those of q and kv.
      heads: number of heads of programs, query or key heads.
      programs: number of programs for a batch entry.
      splits: programs that share a list.
    """

    link: Link
    q: Side
    kv: Side
    lists: Lists
    settings: Settings
    heads: int
    programs: int
    splits: int

    def output(self, shape: Sequence[int], final: bool) -> jax.ShapeDtypeStruct:
        """An output, a part for each of the splits; ``final``: in the dtype of the query if there is but one."""
        query = self.link.operands.query
        dtype = query.dtype if final and self.splits == 1 else jnp.float32
        return jax.ShapeDtypeStruct((self.splits, query.shape[0], *shape), dtype)

    def summed(self, parts: jax.Array) -> jax.Array:
        """The sum of the splits' parts."""
        return parts[0] if self.splits == 1 else parts.sum(0)

    def run(
        self,
        kernel: Any,
        arrays: Sequence[jax.Array | None],
        outputs: Sequence[jax.ShapeDtypeStruct],
        extra: dict[str, Any],
        order: RowOrder,
    ) -> Sequence[jax.Array]:
        """Launches a kernel; ``arrays`` are those that not all kernels have, ``order`` is that of its result."""
        call, (query, key, value, _, segments, _) = self.link.call, self.link.operands
        b, t, heads, h = query.shape
        _, s, kv_heads, hv = value.shape
        counts, index, tile, bits = (
            jnp.asarray(x, jnp.int32) for x in (self.lists.counts, self.lists.index, self.lists.tile, self.lists.bits)
        )
        places = jnp.asarray(self.lists.order(self.heads))
        # A kernel does not look at arrays that its constants rule out: any array stands in for them.
        operands = [query, key, value, places, counts, index, tile, bits, *(segments or (None, None)), *arrays]
        operands = [places if x is None else x for x in operands]
        lists_b, lists_h, blocks, width = index.shape
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
            "WIDTH": width,
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
            "SEGMENTED": segments is not None,
            "ANY_FREE": self.lists.any_free,
            "ANY_MASKED": self.lists.any_masked,
        }
        settings = self.settings
        return launch.call(
            kernel, (self.programs, b), operands, outputs, constants | extra, settings.num_warps, settings.num_stages
        )


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
