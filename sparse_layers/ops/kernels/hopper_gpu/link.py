"""One pass of a chain for a group of heads on Hopper; what its kernels cannot do goes to those in plain Triton."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....masks.bounded_cache import bounded_cache
from ...planning.lists import MOST_PARTS, BlockLists, BlockPairs, planned_block_pairs
from ...planning.plan import Pass
from ...planning.views import RowOrder
from ..call import Call, merged
from ..gpu import bridge, hardware
from ..gpu.lists import Lists, Side, bits_of
from ..gpu.work import LEAST_STEPS
from ..triton_gpu.link import Gradients, Link, Rows, varying_like
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
    """What is in the place of lse in the backward kernels: -inf, for weights of 0, where a query has no keys."""
    return jnp.where(
        lse == -jnp.inf, lse, lse * (-math.log2(math.e) / softmax_scale_log2(call.scale, call.soft_cap or 0.0))
    )


@bounded_cache()
def _of_both(passes: tuple[Pass, ...], more: tuple[Pass, ...], q: Side, kv: Side) -> Lists:
    """Lists over the key blocks of two passes with the same query rows; those of the second one are numbered last."""
    shape = q.block, kv.block
    (a, tiles), (b, more_tiles) = (planned_block_pairs([x.mask for x in each], shape, True) for each in (passes, more))
    assert tiles is not None and more_tiles is not None
    tile = np.where(b.tile < 0, b.tile, b.tile + len(tiles))
    pairs = (a.row, b.row), (a.column, b.column + a.blocks[1]), (a.kind, b.kind), (a.tile, tile)
    row, column, kind, tile = (np.concatenate(pair, axis=-1) for pair in pairs)
    both = BlockPairs(row, column, kind, tile, None, (a.blocks[0], a.blocks[1] + b.blocks[1]))
    bits = bits_of(np.concatenate([tiles, more_tiles]), q, kv, dkv=False)
    return Lists(both.lists(by_key=False), bits, both.longest(by_key=False))


@dataclasses.dataclass(frozen=True, eq=False)
class HopperLink(Link):
    """One pass for the query heads first, first + step, ...; see `Link`."""

    also: "HopperLink | None" = None

    def goes_with(self, other: "HopperLink", kernel: str) -> bool:
        here = [link.unserved(kernel) is None for link in (self, other)]
        if kernel == "forward" and all(here):  # in lists that are known beforehand
            known = self.operands.segments is None and self.passes[0].fwd_shape == other.passes[0].fwd_shape
            return known and super().goes_with(other, kernel)
        return not any(here) and super().goes_with(other, kernel)

    @property
    def gives_dkv(self) -> bool:
        return self.adds_in_float32 or self.single_keys

    @property
    def adds_in_float32(self) -> bool:
        return self.unserved("dkv") is None

    def _blocks(self, kernel: str) -> tuple[int, int]:
        """(bq, bkv) of the lists that these kernels walk over."""
        if self.call.selection is not None:
            block, granularity = self.call.selection
            return min(settings.TILE_ROWS, MOST_PARTS * granularity), block
        return self.passes[0].fwd_shape if self.passes and kernel == "forward" else self.shape(kernel)

    def _cuts(self, kernel: str) -> int:
        """Into how many parts blocks of several tiles are cut, for documents may begin and end within a block.

        Lists of so many tiles would be too long to be made beforehand. With segment ids they are made on the device.
        """
        if self.operands.segments is None or not self.passes:
            return 1
        forward = kernel == "forward"
        tiles = max(1, self._blocks(kernel)[forward] // settings.TILE_ROWS)
        blocks = len(self.passes) * max(x.fwd_blocks if forward else x.bwd_blocks for x in self.passes)
        # Three numbers of each are kept once, and three for each batch entry.
        most = settings.MAX_LIST_BYTES // max(1, 12 * (1 + self.operands.query.shape[0]) * blocks)
        return next(n for n in range(tiles, 0, -1) if n == 1 or (n <= most and tiles % n == 0))

    def unserved(self, kernel: str) -> str | None:
        """Why these kernels do not do this pass, "forward" or "dkv", or None."""
        if self.also is not None:  # what keeps either of them out does not go away by doing both
            reason = dataclasses.replace(self, also=None).unserved(kernel) or self.also.unserved(kernel)
            if reason is not None:
                return reason
        sizes = self.operands.query.shape[-1], self.operands.value.shape[-1]
        if self._size is None or any(size % 8 for size in sizes):
            return f"head sizes are multiples of 8 up to {settings.HEAD_SIZES[-1]} there, and these are {sizes}"
        if self.call.params[kernel != "forward"].for_kernels:
            return "they take no settings"
        if kernel == "dkv" and self.call.params[1].deterministic:
            return "they add to dq in the order in which blocks are done"
        if kernel == "dkv" and self.single_keys:
            return "each key is in one list, and plain Triton's kernel then writes each gradient once"
        rows, block = self._blocks(kernel)
        held, walked = (rows, block) if kernel == "forward" else (block, rows)
        whole = walked % settings.TILE_ROWS == 0 or (kernel == "forward" and walked in settings.STEP_KEYS)
        if held != settings.TILE_ROWS or not whole:
            keys = "64 or a multiple of 128" if kernel == "forward" else "128"
            queries = "128" if kernel == "forward" else "a multiple of 128"
            return f"blocks have {queries} queries there and {keys} keys, and these {rows} and {block}"
        entries = sum(x.fwd_blocks if kernel == "forward" else x.bwd_blocks for x in self.passes)
        if entries * walked // settings.GROUP_ROWS >= 1 << 31:
            return "there are more steps than 32 bits count"
        if kernel == "forward" and not self.q_order.complete:
            return "some queries have no row"
        for order, number in ((self.q_order, self._part(kernel)), (self.kv_order, settings.tile_keys(block))):
            if self._view(order, number) is None:
                return f"{order} is no view of the tokens that a descriptor can say"
        if kernel == "forward" and self._skewed():
            return "one list is much longer than a processor's share of all, and lists are not cut there"
        return None

    def forward(self, before: Rows | None, sinks: jax.Array | None, rounded: bool) -> Rows:
        if self.unserved("forward"):
            return super().forward(before, sinks, rounded)
        query, value = self.operands.query, self.operands.value
        natural = RowOrder(query.shape[1])
        if before is not None and not (rounded and before.order.natural and before.arrays[0].dtype == query.dtype):
            out, lse = before.whole()
            if sinks is not None:  # where queries have no row there, they begin here; the others began from theirs
                lse = jnp.where(lse == -jnp.inf, sinks[self.first :: self.step], lse)
            out, lse = merged((out, lse), self.forward(None, None, True).whole())
            return Rows(natural, (out, lse.swapaxes(1, 2)))
        own = self._prepared_for("forward")
        order, more, keys = own.q.order, self.also or self, settings.tile_keys(own.kv.tile)
        second = views.rows_view(more.kv_order, own.kv.tile)
        second = second._replace(ROWS=0) if self.also is None else second
        out = jax.ShapeDtypeStruct((*query.shape[:2], self.heads, value.shape[-1]), query.dtype)
        lse = jax.ShapeDtypeStruct((query.shape[0], self.heads, own.constants["Q"].ROWS), jnp.float32)
        nothing = jnp.zeros((1,), jnp.float32)
        inputs = [
            self._tiles(query, order, own.part),
            self._tiles(self.operands.key, own.kv.order, keys),
            self._tiles(value, own.kv.order, keys),
            *(self._tiles(x, more.kv_order, keys) for x in (self.operands.key, value)),
            self._tiles(query if before is None else before.arrays[0], order, own.part),
            *own.read,
            nothing if sinks is None else sinks,
            nothing if before is None else self._by_row(before.arrays[1], own.q, 0.0),
        ]
        compiled = ForwardConstants(keys, settings.Q_STAGES, own.stages, sinks is not None, before is not None)
        results, fixed = [self._tiles(out, order, own.part), lse], {"KV2": second, "F": compiled}
        out, lse = self._run(forward_kernel, own, inputs, results, fixed, {})
        lse = lse.swapaxes(1, 2)
        lse = lse[:, : query.shape[1]] if order.natural else order.scatter(lse, -jnp.inf)
        return Rows(natural, (out, lse.swapaxes(1, 2)))

    def dq(
        self, gradients: Gradients, before: Rows | None, before_kv: Rows | None, rounded: bool, rounded_kv: bool
    ) -> tuple[Rows, Rows | None]:
        if self.unserved("dkv"):
            return super().dq(gradients, before, before_kv, rounded, rounded_kv)
        query, key, value = self.operands.query, self.operands.key, self.operands.value
        own = self._prepared_for("dkv")
        q, kv = own.q, own.kv
        lse, delta = (x[:, self.first :: self.step] for x in (gradients.lse, gradients.delta))
        lse = scaled_neg_lse(lse, self.call)
        scalars = self._by_row(lse, q, -jnp.inf), self._by_row(delta * -self.call.scale, q, 0.0)
        # Results are added in place to what is there: dq in float32; dk and dv of all keys if these may be rounded in
        # between, or come in pieces.
        dq = jnp.zeros((*query.shape[:2], self.heads, query.shape[-1]), jnp.float32)
        earlier = [dq if before is None else before.whole()[0].astype(jnp.float32), None, None]
        # Pieces are added in float32: to what is there or to zeros. dk and dv of only some keys are by row.
        all_keys = kv.order.complete
        to, exact = (kv.order if all_keys else RowOrder(kv.order.rows)), jnp.float32 if own.times else key.dtype
        shapes = dq.shape, *((x.shape[0], to.length, *x.shape[2:]) for x in (key, value))
        there = before_kv.whole() if before_kv is not None and all_keys and (own.times or rounded_kv) else None
        if there is not None:
            earlier[1:] = [x.astype(exact) for x in there]
        elif own.times:
            earlier[1:] = [jnp.zeros(shape, exact) for shape in shapes[1:]]
        inputs = [
            self._tiles(query, q.order, own.part),
            self._tiles(gradients.dout, q.order, own.part),
            self._tiles(key, kv.order, kv.tile),
            self._tiles(value, kv.order, kv.tile),
            *(bridge.Tiles.of(x.reshape(-1, x.shape[-1]), (1, own.part)) for x in scalars),
            *own.read,
        ]
        aliases = {len(inputs) + i: i for i, x in enumerate(earlier) if x is not None}
        inputs += [jnp.zeros((1,), jnp.float32) if x is None else x for x in earlier]
        results = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, (dq.dtype, exact, exact), strict=True)]
        outputs = [
            self._tiles(results[0], q.order, own.part, 2),
            *(self._tiles(x, to, settings.GROUP_ROWS, 1 + bool(own.times)) for x in results[1:]),
        ]
        fixed = {
            "DKV": views.rows_view(to, kv.tile),
            "F": BackwardConstants(own.part, own.stages, own.times > 0 or there is not None, max(1, own.times)),
        }
        dq, *dkv = self._run(backward_kernel, own, inputs, outputs, fixed, aliases)
        keys = Rows(RowOrder(key.shape[1]) if all_keys else kv.order, tuple(dkv))
        if before_kv is not None and there is None:
            sums = (a.astype(jnp.float32) + b for a, b in zip(keys.whole(), before_kv.whole(), strict=True))
            keys = Rows(RowOrder(key.shape[1]), tuple(sums))
        return Rows(RowOrder(query.shape[1]), (dq,)), keys

    @functools.cached_property
    def _size(self) -> int | None:
        """What head sizes are rounded up to, those of values, too."""
        return settings.padded_head_size(max(self.operands.query.shape[-1], self.operands.value.shape[-1]))

    def _part(self, kernel: str) -> int:
        """Queries of a tile: those of a group of warps forward, and of a step backward."""
        assert self._size is not None
        part = settings.STEP_QUERIES[self._size]
        # Logits that are not just products (soft caps, negative scales) take registers: hundreds would be spilled.
        of_products = softmax_scale_log2(self.call.scale, self.call.soft_cap or 0.0) != 1.0
        larger = kernel == "dkv" and of_products and self._view(self.q_order, part) is not None
        return part if larger else settings.GROUP_ROWS

    def _view(self, order: RowOrder, rows: int) -> Any:
        """As `box_view` has it, if descriptors have enough axes: with three, that of heads is also that of sizes."""
        found = views.box_view(order, rows)
        whole = self.operands.query.shape[-1] == self.operands.value.shape[-1] == self._size
        return found if found is None or len(found[0]) < 3 or whole else None

    def _tiles(self, array: Any, order: RowOrder, rows: int, parts: int = 1) -> bridge.Tiles:
        """Tiles of rows of an array [B, length, heads, size]: so many of one head, and the size or a part of it."""
        found = views.box_view(order, rows)
        assert found is not None and self._size is not None
        (lengths, box), (batch, length, heads, size) = found, array.shape
        vector, width = heads * size, self._size // parts
        shape, last, box = (heads, size), (size, 1), (*box, 1, width)
        if len(lengths) == 3:
            shape, last, box = (vector,), (1,), (*box[:3], width)
        strides = (math.prod(lengths[i + 1 :]) * vector for i in range(len(lengths)))
        return bridge.Tiles(array, (batch, *lengths, *shape), (length * vector, *strides, *last), (1, *box))

    def _by_row(self, x: jax.Array, side: Side, fill: float) -> jax.Array:
        """[B, heads, length] by token -> [B, heads, rows of whole tiles] by row, ``fill`` where there is no token."""
        return side.order.gather(x.swapaxes(1, 2), side.blocks * side.block, fill).swapaxes(1, 2)

    def _work(self, kernel: str) -> tuple[Side, Side, Lists, Any, Any]:
        """(how queries are cut, and keys, the lists, and by them what `_steps` says, for items [LB, heads, blocks])."""
        dkv, (rows, block), parts = kernel == "dkv", self._blocks(kernel), self._cuts(kernel)
        rows, block = (rows // parts, block) if dkv else (rows, block // parts)
        q, kv = Side(self.q_order, rows, rows), Side(self.kv_order, block, block)
        major, minor = (kv, q) if dkv else (q, kv)
        if self.also is None:
            lists = self._lists(major, minor, dkv, parts)
        else:
            lists = _of_both(self.passes, self.also.passes, q, kv)
        steps, before = self._steps([(minor, lists)], dkv, 1)
        return q, kv, lists, steps.reshape(len(steps), -1, major.blocks), before

    def _skewed(self) -> bool:
        """Whether the longest item forward takes much longer than a processor's share of all, if known beforehand."""
        device, operands = hardware.local_device(), self.operands
        assert isinstance(device, hardware.Device)
        if not all(x is None for x in (operands.segments, operands.mask, operands.chosen)):
            return False
        steps = self._work("forward")[3]
        share = steps.sum() / len(steps) * operands.query.shape[0] / device.processors
        return steps.max(initial=0) > max(LEAST_STEPS, 1.5 * share)

    def _prepared_for(self, kernel: str) -> _Prepared:
        device = hardware.local_device()
        assert isinstance(device, hardware.Device) and self._size is not None
        dkv, operands, (q, kv, lists, steps, before) = kernel == "dkv", self.operands, self._work(kernel)
        found, batch = lists.lists, operands.query.shape[0]
        if dkv:
            who, pieces = self._order(kv, found, steps, before, device.processors)
        else:
            who, pieces = build_schedule(steps, batch, device.processors), None
            who = split_into_waves(who) if self.call.exchanging else who
        segments: list[Any] = [found.spans] * 2
        if operands.segments is not None:
            pairs = zip(operands.segments, (q, kv), (-2, -1), strict=True)
            segments = [side.order.gather(ids, side.blocks * side.block, fill) for ids, side, fill in pairs]
        chosen_by = found.block if found.chosen_by is None else found.chosen_by
        read: list[Any] = [who, found.spans, found.block, found.tile, chosen_by, lists.bits, *segments]
        read += [found.spans if pieces is None else pieces] if dkv else []
        arrays = Arrays(
            HEADS=operands.query.shape[2],
            KV_HEADS=operands.key.shape[2],
            D=self._size,
            SCALE=self.call.scale,
            CAP=self.call.soft_cap or 0.0,
            FIRST_HEAD=self.first,
            HEAD_STEP=self.step,
            PASS_HEADS=self.heads,
            SEGMENTED=operands.segments is not None,
        )
        batches, kinds = found.spans.shape[:2]
        number = 0 if pieces is None else len(pieces)
        times = 0 if pieces is None else who.shape[0] // (batch * number)
        walk = ListShapes(batches, kinds, found.group, steps.shape[2], number, lists.chosen)
        sides = {"Q": views.rows_view(q.order, q.tile), "KV": views.rows_view(kv.order, kv.tile)}
        part = self._part(kernel)
        stages = settings.num_stages("backward" if dkv else "forward", self._size, settings.tile_keys(kv.tile), part)
        constants = {
            "A": arrays,
            **sides,
            "L": walk,
            "CONSUMER_REGISTERS": settings.CONSUMER_REGISTERS,
            "PRODUCER_REGISTERS": settings.PRODUCER_REGISTERS,
        }
        return _Prepared(q, kv, part, stages, constants, [jnp.asarray(x) for x in read], who.shape[-1], times)

    def _order(self, kv: Side, lists: BlockLists, steps: Any, before: Any, programs: int) -> tuple[Any, Any]:
        """The order of the backward pass's items, and pieces, if work is cut."""
        batch = self.operands.query.shape[0]
        if not isinstance(steps, np.ndarray):
            return order_work_tiles(steps, batch, programs, False), None
        if len(steps) == 1:
            heads, members = self._jobs(True, 1)
            key_heads, kinds = members.argmax(0), heads // lists.group % lists.spans.shape[1]
            assert self._size is not None
            held = self._size * 8  # q, dout, and dq in float32
            order, pieces = split_by_query_ranges(
                lists, kinds, key_heads, batch, programs, self._blocks("dkv")[0], held
            )
            if pieces is not None:
                return order, pieces
            keys = self.operands.key.shape[1] * self.operands.key.shape[2]
            lost = FLOAT32_STEPS[kv.order.complete] * batch * keys / settings.TILE_ROWS / programs
            order, pieces = split_long_lists(steps[0], before[0], key_heads, batch, programs, lost)
            if pieces is not None:
                return order, pieces
        # Neighbours find in the cache what both read and add to. With several query heads they would soon be at
        # different ones; items that are equally long stay at the same head for longer.
        alike = self.heads == steps.shape[1] and has_overlapping_neighbors(lists.spans, lists.block, lists.minor_blocks)
        return order_work_tiles(steps, batch, programs, alike), None

    def _run(self, kernel, own: _Prepared, inputs, outputs, fixed, aliases) -> list[jax.Array]:
        found = bridge.call_gluon(kernel, own.programs, inputs, outputs, own.constants | fixed, aliases)
        return [varying_like(self.operands.query, x) for x in found]
