"""How a sequence that is spread over devices meets its keys: which part of a mask takes which route, and what it moves.

Each of P devices has ``n = ceil(T / P)`` tokens in a row. A part of a mask takes one of three routes:

* `Neighbors`: a device asks those beside it for the keys that its own queries reach, a halo;
* `Gathered`: all devices ask for the same few keys (summary columns, global tokens), or for all there are;
* `Residues`: tokens change places, until each device has all tokens of its share of the residues of a stride.

Along each of them a device's queries and keys are views of the sequence, `RowOrder`, so that what it computes is again
a mask with a plan. The parts of a mask are disjoint, and their results are merged by lse where the queries live.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from ...masks.algebra import EMPTY, And, Blocks, Mask, Not, Or, Shifted, Transposed
from ...masks.primitives import BlockDiagonal, Causal, Columns, Empty, Full, LogSparse, Strided, Window
from .params import BwdParams, FwdParams
from .plan import PAIRS_PER_ROW, Plan, Wish, make_plan, split_costs
from .platforms import TUNING
from .views import Reordered, RowOrder

# Receiving a row from another device costs about as much as so many readings or writings of one: some 350 GB/s over
# links against some 4 TB/s of a device's own memory.
READS_PER_RECEIVED_ROW = 12


class Moved(NamedTuple):
    """What the device that receives most receives in a forward pass, in rows of all heads; the backward moves as many.

    Attributes:
      keys: rows of key and of value.
      queries: rows of query and of out; lse's are moved with them.
    """

    keys: int
    queries: int

    def bytes(self, key_row: int, query_row: int) -> int:
        """By the bytes of a row of key and value together, and of one of query, out and lse."""
        return self.keys * key_row + self.queries * query_row


@dataclasses.dataclass(frozen=True)
class Route(abc.ABC):
    """The way of keys to queries, or of both to where they meet.

    Attributes:
      length: tokens T of the sequence.
      devices: P, that it is spread over.
    """

    length: int
    devices: int

    @property
    def own(self) -> int:
        """Tokens of a device; on the last ones, some that do not exist."""
        return -(-self.length // self.devices)

    @property
    def q_rows(self) -> int:
        """Queries that a device computes."""
        return self.own

    @property
    @abc.abstractmethod
    def kv_rows(self) -> int:
        """Keys that a device has when all have come."""

    @property
    @abc.abstractmethod
    def moved(self) -> Moved:
        """What is moved along this route."""

    @abc.abstractmethod
    def orders(self, place: int) -> Wish:
        """The tokens of a device's queries and keys; ``place`` is its number along the sequence."""

    def mask(self, part: Mask, place: int) -> Mask:
        """A part of the mask, as the rows of a device see it; equal ones on as many devices as possible."""
        q_order, kv_order = self.orders(place)
        if (period := period_of(part)) is not None and not q_order.phase[0] and not kv_order.phase[0]:
            # Moved towards the first tokens, as far as it stays the same.
            by = min(q_order.offset, kv_order.offset) // period * period
            moved = [dataclasses.replace(x, offset=x.offset - by) for x in (q_order, kv_order)]
            if all(_last(x) < self.length for x in (q_order, kv_order)):
                q_order, kv_order = moved
        return _seen(part, q_order, kv_order)

    def plan(
        self,
        masks: Sequence[Mask],
        place: int,
        params: tuple[FwdParams, BwdParams] = (FwdParams(), BwdParams()),
        *,
        implementation: str | None = None,
    ) -> Plan:
        """What a device computes for the parts of the masks that heads take in turn."""
        found = [self.mask(mask, place) for mask in masks]
        options = {"fwd_params": params[0], "bwd_params": params[1], "implementation": implementation}
        return make_plan(found, self.q_rows, self.kv_rows, **options)


def _last(order: RowOrder) -> int:
    return int(order.token(order.rows - 1))


def _seen(part: Mask, q_order: RowOrder, kv_order: RowOrder) -> Mask:
    """A mask on the rows of two orders; itself where these are the first tokens one by one."""
    orders = q_order, kv_order
    first = all(x.offset == 0 and x.shape[:-1] in ((), (1,)) and not any(x.phase) for x in orders)
    return part if first and all(x.rows <= x.length for x in orders) else Reordered(part, q_order, kv_order)


@dataclasses.dataclass(frozen=True)
class Neighbors(Route):
    """Keys up to ``left`` tokens before a device's own and up to ``right`` behind them come from where they are."""

    left: int
    right: int

    @property
    def kv_rows(self) -> int:
        return self.left + self.own + self.right

    @property
    def moved(self) -> Moved:
        places = range(self.devices)
        sides = [(place * self.own, (self.devices - 1 - place) * self.own) for place in places]
        return Moved(max(min(self.left, before) + min(self.right, behind) for before, behind in sides), 0)

    def hops(self, reach: int) -> list[int]:
        """Keys that come from each of the devices on one side, the next one first."""
        return [min(self.own, reach - first) for first in range(0, reach, self.own)]

    def orders(self, place: int) -> Wish:
        first = place * self.own
        queries = _tokens(self.length, first, self.own)
        return queries, _tokens(self.length, first - self.left, self.kv_rows)

    def __str__(self):
        sides = [f"{n} {side}" for n, side in ((self.left, "before"), (self.right, "behind")) if n]
        return f"keys of neighbors, {' and '.join(sides)}" if sides else "own keys only"


def _tokens(length: int, first: int, rows: int) -> RowOrder:
    """Tokens in a row, the first of which may lie before the sequence and the last ones behind it."""
    if first < 0:
        return RowOrder(length, (length,), (rows,), (min(length, first + rows),), phase=(-first,))
    return RowOrder(length, (1, length), (1, rows), (1, rows), min(first, length))


@dataclasses.dataclass(frozen=True)
class Gathered(Route):
    """All devices get the same keys.

    Attributes:
      order: which; all of them in natural order.
    """

    order: RowOrder

    @property
    def kv_rows(self) -> int:
        return self.order.rows

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """How many of the keys each device has: int [P]."""
        owners = np.minimum(self.order.token(np.arange(self.kv_rows)) // self.own, self.devices - 1)
        return np.bincount(owners, minlength=self.devices)

    @property
    def sent_one_by_one(self) -> bool:
        """Whether each device that has some sends them to all; otherwise all send as many as any of them has."""
        return int(self.counts.sum()) <= (self.devices - 1) * int(self.counts.max())

    @property
    def moved(self) -> Moved:
        if self.sent_one_by_one:
            return Moved(int(self.counts.sum() - self.counts.min()), 0)
        return Moved((self.devices - 1) * int(self.counts.max()), 0)

    def orders(self, place: int) -> Wish:
        return _tokens(self.length, place * self.own, self.own), self.order

    def mask(self, part: Mask, place: int) -> Mask:
        return _seen(part, *self.orders(place))

    def __str__(self):
        return "all keys" if self.order.natural else f"keys of all devices: {self.order}"


@dataclasses.dataclass(frozen=True)
class Residues(Route):
    """Queries and keys go to the device that has their residue of ``stride``, and results go back."""

    stride: int

    @property
    def own_residues(self) -> int:
        """Residues of a device."""
        return self.stride // self.devices

    @property
    def kv_rows(self) -> int:
        return self.own

    @property
    def moved(self) -> Moved:
        rows = self.own - self.own // self.devices
        return Moved(rows, rows)

    def orders(self, place: int) -> Wish:
        order = RowOrder.gathered(self.length, self.stride, place * self.own_residues, (place + 1) * self.own_residues)
        return order, order

    def mask(self, part: Mask, place: int) -> Mask:
        order, _ = self.orders(place)
        by_step = self._by_step(part)
        if by_step is None:
            by_step = Reordered(part, order, order)
        # That rows have one residue is what the part says already; said of rows, the planner sees it.
        return And(Strided(self.own_residues), by_step) if self.own_residues > 1 else by_step

    def _by_step(self, part: Mask) -> Mask | None:
        """What a part says of pairs of one residue, on a device's rows, if it is known: as far apart by steps."""
        if isinstance(part, Full | Empty | Causal):
            return part
        if isinstance(part, Strided) and part.stride == self.stride:
            return Full()
        if isinstance(part, Window):
            reach = (x if x is None else x // self.stride * self.own_residues for x in (part.left, part.right))
            return Window(*reach)
        if isinstance(part, Not):
            inner = self._by_step(part.mask)
            return None if inner is None else Not(inner)
        if isinstance(part, And | Or):
            left, right = self._by_step(part.left), self._by_step(part.right)
            return None if left is None or right is None else type(part)(left, right)
        return None

    def __str__(self):
        return f"queries and keys, by residue of {self.stride}"


class Part(NamedTuple):
    """A part of the masks, and its route.

    Attributes:
      route: how its keys come.
      masks: for each of the masks that heads take in turn, what of it takes this route; `Empty` for nothing.
    """

    route: Route
    masks: tuple[Mask, ...]


@functools.lru_cache(maxsize=256)
def parts_of(
    masks: tuple[Mask, ...], length: int, devices: int, implementation: str, groups: int = 1
) -> tuple[Part, ...]:
    """The disjoint parts of masks, each with its route, as they cost least.

    Args:
      masks: that heads take in turn.
      length: tokens of the sequence.
      devices: that it is spread over.
      implementation: whose block sizes say what computing costs.
      groups: query heads of a key head.

    Example:
      >>> import sparse_layers as sl
      >>> for route, _ in parts_of(sl.as_masks("strided"), 4096, 4, "xla"):
      ...     print(route)
      queries and keys, by residue of 128
    """
    with jax.ensure_compile_time_eval():  # a mask of the user's may compute with jax.numpy
        by_mask = [_cheapest(mask, length, devices, implementation, groups) for mask in masks]
        routes = list(dict.fromkeys(route for found in by_mask for route in found))
        return tuple(Part(route, tuple(found.get(route, Empty()) for found in by_mask)) for route in routes)


def whole(masks: tuple[Mask, ...], length: int, devices: int) -> Part:
    """All of the masks by one route: every device gets all keys."""
    return Part(Gathered(length, devices, RowOrder(length)), masks)


def _cheapest(mask: Mask, length: int, devices: int, implementation: str, groups: int) -> dict[Route, Mask]:
    """The parts of one mask by their routes."""
    weighed = []
    for number, (cost, split) in enumerate(split_costs(mask, length, TUNING[implementation])):
        found: dict[Route, Mask] = {}
        natural = [part for wish, part in split if _route(wish, length, devices) is None]
        if natural:
            part = functools.reduce(Or, natural)
            found[_halo(part, length, devices)] = part
        for wish, part in split:
            if (route := _route(wish, length, devices)) is not None:
                found[route] = part
        rows = sum(2 * (keys / groups + queries) for keys, queries in (route.moved for route in found))
        weighed.append((cost / devices + READS_PER_RECEIVED_ROW * PAIRS_PER_ROW * rows, number, found))
    return min(weighed, key=lambda entry: entry[:2])[2]


def _route(wish: Wish, length: int, devices: int) -> Route | None:
    """The route that serves the row orders of a part, if it is not just that of a halo."""
    q_order, kv_order = wish
    stride = q_order.shape[-1]
    if q_order == kv_order == RowOrder.residue_major(length, stride):
        if stride % devices or length % (stride * devices):
            return None
        return Residues(length, devices, stride)
    if q_order.natural and not kv_order.natural:
        return Gathered(length, devices, kv_order)
    return None


def _halo(part: Mask, length: int, devices: int) -> Route:
    """The keys of neighbors that a part reaches, or all keys if it reaches nearly all devices."""
    own = -(-length // devices)
    first = np.arange(0, length, own)
    last = np.minimum(first + own, length) - 1

    def reach(empty, most):
        """For each device, the least reach such that nothing lies beyond."""
        low, high = np.zeros_like(most), most
        while (low < high).any():
            middle = (low + high) // 2
            fits = empty(middle) | (middle >= most)
            low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
        return int(high.max(initial=0))

    def before(n):
        stop = np.maximum(first - n - 1, 0)
        return part.grade(first, last, np.zeros_like(first), stop) == EMPTY

    def behind(n):
        begin = np.minimum(last + n + 1, length - 1)
        return part.grade(first, last, begin, np.full_like(first, length - 1)) == EMPTY

    found = Neighbors(length, devices, reach(before, first), reach(behind, length - 1 - last))
    everything = Gathered(length, devices, RowOrder(length))
    return everything if found.moved.keys > (devices - 2) * own and found.kv_rows > 2 * own else found


def period_of(mask: Mask) -> int | None:
    """A number of tokens by which queries and keys may both be moved, and the mask says the same; None if not known.

    Example:
      >>> import sparse_layers as sl
      >>> period_of(sl.Causal() & (sl.Window(9) | sl.Columns(128, 96))), period_of(sl.Prefix(4))
      (128, None)
    """
    if isinstance(mask, Full | Empty | Causal | Window | Strided | LogSparse):
        return 1
    if isinstance(mask, BlockDiagonal):
        return mask.size
    if isinstance(mask, Columns):
        return mask.period
    if isinstance(mask, And | Or):
        left, right = period_of(mask.left), period_of(mask.right)
        return None if left is None or right is None else math.lcm(left, right)
    if isinstance(mask, Not | Transposed | Shifted):
        return period_of(mask.mask)
    if isinstance(mask, Blocks):
        inner = period_of(mask.mask)
        return None if inner is None else inner * mask.block
    return None
