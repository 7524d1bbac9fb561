"""How a sequence that is spread over devices meets its keys: which part of a mask takes which route, and what it moves.

Each of P devices has ``n = ceil(T / P)`` tokens in a row, where T may be more than the sequence has, see `filled_up`. A
part of a mask takes one of three routes:

* `Neighbors`: a device asks those beside it for the keys that its own queries reach, a halo;
* `Gathered`: all devices ask for the same few keys (summary columns, global tokens), or for all there are;
* `Residues`: tokens change places, until each device has all tokens of its share of the residues of a stride.

Along each of them a device's queries and keys are views of the sequence, `RowOrder`, so that what it computes is again
a mask with a plan. The parts of a mask are disjoint, and so are the `pieces` that some are computed in. Their results
are merged by lse where the queries live.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...masks.algebra import EMPTY, And, Mask, Not, Or
from ...masks.bounded_cache import bounded_cache
from ...masks.primitives import Causal, Empty, Full, Strided, Window
from .blocks import active_blocks, outside_trace
from .causality import is_causal
from .params import BwdParams, FwdParams
from .plan import PAIRS_PER_ROW, Plan, Wish, make_plan, split_costs, splits
from .platforms import TUNING
from .views import Reordered, RowOrder, period_of

# What it costs to receive a row from another device, and one more in the backward pass, in PAIRS_PER_ROW. Between two
# H200, rows of 32 heads of 128 came at 170 GB/s, two of them in the time of 800 pairs of each head, both ways.
RECEIVED_ROW = 4
# An exchange took 60 to 100 microseconds there, however little it was: as long as 500 such rows at the least. Folding
# queries adds fourteen, forward and backward: two halves of q, out, dout, dq, and of what belongs to a row. Over two
# devices it adds seven, which is not told apart.
ROWS_PER_FOLDING = 7000


class Token(NamedTuple):
    """Bytes of one token, of all heads: key and value together, the query (out takes as many), and lse."""

    keys: int
    query: int
    lse: int

    @staticmethod
    def of(heads: int, kv_heads: int, size: int, itemsize: int) -> "Token":
        """Those of heads of a size, with elements of so many bytes."""
        return Token(2 * kv_heads * size * itemsize, heads * size * itemsize, heads * max(4, itemsize))


# The first of a device's own tokens, and the one behind the last.
Span = tuple[int, int]


class Received(NamedTuple):
    """What a device receives along a route, in rows of all heads.

    Attributes:
      keys: rows of key and value in a forward pass.
      queries: rows of query in a forward pass; of dout, lse and delta in a backward pass.
      results: rows of out and lse in a forward pass, of queries that live here; of dq in a backward pass.
      gradients: rows of dk and dv in a backward pass.
    """

    keys: int
    queries: int = 0
    results: int = 0
    gradients: int = 0

    def volume(self, token: Token) -> tuple[int, int]:
        """Bytes in a forward and in a backward pass."""
        forward = self.keys * token.keys + self.queries * token.query + self.results * (token.query + token.lse)
        back = self.gradients * token.keys + self.queries * (token.query + 2 * token.lse) + self.results * token.query
        return forward, back


@dataclasses.dataclass(frozen=True)
class Route(abc.ABC):
    """The way of keys to queries, or of both to where they meet. A device's ``place`` is its number along the sequence.

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
    def pieces(self) -> "tuple[Route, ...]":
        """The same way for queries that are computed at once, in the order in which they are, forward and backward."""
        return (self,)

    @property
    def queries(self) -> Span:
        """Which of each device's own queries these are."""
        return 0, self.own

    @property
    def moves(self) -> list[tuple[int, int]]:
        """(home, there) of all devices, if these queries are folded: where they live, and where they are computed."""
        return []

    @property
    def q_rows(self) -> int:
        """Queries that a device computes."""
        first, stop = self.queries
        return stop - first

    @property
    @abc.abstractmethod
    def kv_rows(self) -> int:
        """Keys that a device has when all have come."""

    @abc.abstractmethod
    def received(self, place: int) -> Received:
        """What a device receives along this route."""

    @abc.abstractmethod
    def orders(self, place: int) -> Wish:
        """The tokens of a device's queries and keys."""

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
    """Keys up to ``left`` tokens before a device's own and up to ``right`` behind them come from where they are.

    Attributes:
      left: a multiple of ``stride``.
      right: any number.
      stride: that of parts whose queries see keys of their own residue: rows have the residues that tokens have. 1 if
        there are none.
    """

    left: int
    right: int
    stride: int = 1

    @property
    def kv_rows(self) -> int:
        return self.left + self.own + self.right

    def received(self, place: int) -> Received:
        before, behind = place * self.own, (self.devices - 1 - place) * self.own
        keys = min(self.left, before) + min(self.right, behind)
        return Received(keys, gradients=min(self.right, before) + min(self.left, behind))

    def hops(self, reach: int) -> list[int]:
        """Keys that come from each of the devices on one side, the next one first."""
        return [min(self.own, reach - first) for first in range(0, reach, self.own)]

    def orders(self, place: int) -> Wish:
        first = place * self.own
        queries = _tokens(self.length, first, self.own)
        return queries, _tokens(self.length, first - self.left, self.kv_rows)

    def __str__(self):
        sides = [f"{n} {side}" for n, side in ((self.left, "before"), (self.right, "behind")) if n]
        keys = f"keys of neighbors, {' and '.join(sides)}" if sides else "own keys only"
        return keys + _by_residue(self.stride)


def _by_residue(stride: int) -> str:
    return f", by residue of {stride}" if stride > 1 else ""


def _tokens(length: int, first: int, rows: int) -> RowOrder:
    """Tokens in a row, the first of which may lie before the sequence and the last ones behind it."""
    if first < 0:
        return RowOrder(length, (length,), (rows,), (min(length, first + rows),), phase=(-first,))
    return RowOrder(length, (1, length), (1, rows), (1, rows), min(first, length))


@dataclasses.dataclass(frozen=True)
class Gathered(Route):
    """All devices get the same keys.

    Under a causal mask the last queries see most of them. Therefore queries may be ``folded``: of 2 P chunks of the
    sequence device i computes the i-th and the i-th from the end, and sends the results to where the queries live. Each
    chunk is a piece: while one is computed, queries and results of the other one travel.

    Attributes:
      order: which keys; all of them in natural order.
      stride: as of `Neighbors`; it divides a device's tokens, and a chunk if queries are folded.
      folded: whether queries are.
      half: of a piece of folded queries, which half of each device's own ones it has; else None.
    """

    order: RowOrder
    stride: int = 1
    folded: bool = False
    half: int | None = None

    @property
    def pieces(self) -> tuple[Route, ...]:
        # Over two devices first halves are computed where they live, while second ones travel.
        return tuple(dataclasses.replace(self, half=half) for half in (0, 1)) if self.folded else (self,)

    @property
    def queries(self) -> Span:
        middle = self.own // 2
        return (0, self.own) if self.half is None else [(0, middle), (middle, self.own)][self.half]

    @property
    def moves(self) -> list[tuple[int, int]]:
        return [] if self.half is None else self.folds[self.half]

    @property
    def kv_rows(self) -> int:
        return self.order.rows

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """The token of each of the keys: int [kv_rows]; the last one where there is none."""
        return np.minimum(self.order.token(np.arange(self.kv_rows)), self.length - 1)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """How many of the keys each device has: int [P]."""
        return np.bincount(self.tokens // self.own, minlength=self.devices)

    @property
    def may_fold(self) -> bool:
        """Whether queries may be folded: chunks are as long, and hold as many tokens of each residue."""
        return self.length % (2 * self.devices * self.stride) == 0

    @property
    def sent_one_by_one(self) -> bool:
        """Whether each device that has some sends them to all; otherwise all send as many as any of them has."""
        return int(self.counts.sum()) <= (self.devices - 1) * int(self.counts.max())

    def received(self, place: int) -> Received:
        keys = gradients = (self.devices - 1) * int(self.counts.max())
        if self.sent_one_by_one:
            keys = int(self.counts.sum() - self.counts[place])
            asked = _asked(self.devices)
            gradients = sum(asked[place - owner] * int(self.counts[owner]) for owner in np.flatnonzero(self.counts))
        moved = [pair for pairs in self.folds for pair in pairs if self.folded and pair[0] != pair[1]]
        queries, results = (sum(pair[i] == place for pair in moved) * (self.own // 2) for i in (1, 0))
        return Received(keys, queries, results, gradients)

    @property
    def folds(self) -> list[list[tuple[int, int]]]:
        """(from, to): where the first half of each device's queries is computed, and the second half."""
        chunks = [range(half, 2 * self.devices, 2) for half in (0, 1)]
        return [[(c // 2, min(c, 2 * self.devices - 1 - c)) for c in half] for half in chunks]

    def orders(self, place: int) -> Wish:
        place = next((home for home, there in self.moves if there == place), place)  # whose queries it computes
        return _tokens(self.length, place * self.own + self.queries[0], self.q_rows), self.order

    def __str__(self):
        keys = "all keys" if self.order.natural else f"keys of all devices: {self.order}"
        keys += _by_residue(self.stride)
        return f"{keys}; queries folded" if self.folded else keys


@functools.cache
def _asked(devices: int) -> list[int]:
    """How many others each device gives something in `relays`, and so gets back gradients from."""
    return [int(n) for n in np.bincount([a for step in relays(devices) for a, _ in step], minlength=devices)]


def relays(devices: int) -> list[list[tuple[int, int]]]:
    """The steps in which what device 0 has comes to all: (from, to), whoever has it gives it to another one."""
    steps, have = [], 1
    while have < devices:
        steps.append([(i, i + have) for i in range(min(have, devices - have))])
        have *= 2
    return steps


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

    def received(self, place: int) -> Received:
        return Received(*[self.own - self.own // self.devices] * 4)

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
        if isinstance(part, Strided):
            steps = part.stride // math.gcd(part.stride, self.stride)
            return Strided(steps * self.own_residues) if steps > 1 else Full()
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


@bounded_cache()
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
      >>> for route, _ in parts_of((sl.Causal() & sl.Strided(128),), 4096, 4, "xla"):
      ...     print(route)
      queries and keys, by residue of 128
    """
    by_mask = [_cheapest(mask, length, length, devices, implementation, groups)[1] for mask in masks]
    joined = _joined(route for found in by_mask for route in found)
    of_masks: dict[Route, list[Mask]] = {route: [Empty()] * len(masks) for route in joined.values()}
    for number, found in enumerate(by_mask):
        for route, part in found.items():  # several of a mask may become one for the sake of another mask's
            already = of_masks[joined[route]][number]
            of_masks[joined[route]][number] = part if isinstance(already, Empty) else Or(already, part)
    return tuple(Part(route, tuple(parts)) for route, parts in of_masks.items())


def _joined(routes: Iterable[Route]) -> dict[Route, Route]:
    """Of each route the one that it becomes, for halos to be one, and for the same gathered keys to come once.

    That is not weighed: parts have chosen by then.
    """
    joined: dict[Route, Route] = {route: route for route in routes}
    halos = [route for route in joined if isinstance(route, Neighbors)]
    together = [[x for x in halos if x.stride == stride] for stride in dict.fromkeys(x.stride for x in halos)]
    if halos and _halo_of(halos).left <= sum(x.left for x in halos):  # else a common multiple of strides is too far
        together = [halos]
    for alike in together:
        joined.update(dict.fromkeys(alike, _halo_of(alike)))
    gathered = [route for route in joined if isinstance(route, Gathered)]
    for order in dict.fromkeys(x.order for x in gathered):
        alike = [x for x in gathered if x.order == order]
        one = dataclasses.replace(alike[0], stride=math.lcm(*(x.stride for x in alike)))
        folded = one.may_fold and any(x.folded for x in alike)
        joined.update(dict.fromkeys(alike, dataclasses.replace(one, folded=folded)))
    return joined


def _halo_of(halos: Sequence[Neighbors]) -> Neighbors:
    """One that holds all of some."""
    stride = math.lcm(*(x.stride for x in halos))
    left = -(-max(x.left for x in halos) // stride) * stride
    return dataclasses.replace(halos[0], left=left, right=max(x.right for x in halos), stride=stride)


@bounded_cache()
def filled_up(masks: tuple[Mask, ...], length: int, devices: int, implementation: str, groups: int = 1) -> int:
    """To how many tokens a sequence is filled up, for its devices to share the residues of a stride, or fold queries.

    Tokens behind the last change nothing under causal masks that say the same of any length; others stay as they are.

    Args:
      masks, length, devices, implementation, groups: as of `parts_of`.

    Example:
      >>> import sparse_layers as sl
      >>> filled_up((sl.Causal() & sl.Strided(128),), 5000, 4, "xla"), filled_up((sl.Window(1023),), 5000, 4, "xla")
      (5120, 5000)
    """
    if any(period_of(mask) is None for mask in masks):
        return length
    wishes = {wish for mask in masks for _, parts in splits(mask, length, length) for wish, _ in parts}
    strides = {_stride_of(wish) for wish in wishes}
    strides = {*strides, math.lcm(*strides)} - {1}
    # Chunks are equally long; or devices, or chunks, have as many tokens of each residue of one stride, or of all.
    shared = {2 * devices} | {times * devices * stride for stride in strides for times in (1, 2)}
    longer = sorted({length + -length % multiple for multiple in shared} - {length})
    longer = [n for n in longer if n < 2 * length and all(is_causal(mask, n) for mask in masks)]

    def cost(n: int) -> float:
        moved = 2 * (n - length) * (1 + 1 / groups)  # of q and out, k and v, to other devices than without it
        computed = sum(_cheapest(mask, length, n, devices, implementation, groups)[0] for mask in masks)
        return computed + RECEIVED_ROW * PAIRS_PER_ROW * moved

    return min([length, *longer], key=cost) if longer else length


def whole(masks: tuple[Mask, ...], length: int, devices: int) -> Part:
    """All of the masks by one route: every device gets all keys."""
    return Part(Gathered(length, devices, RowOrder(length)), masks)


def needed(masks: Sequence[Mask], length: int, devices: int) -> list[int]:
    """For each device, how many keys of others its own queries see: what it has to receive if queries stay.

    Counted in blocks of keys, the largest power of two up to 16 that divides a device's tokens.
    """
    own = -(-length // devices)
    block = math.gcd(own, 16)
    seen = np.zeros((devices, -(-length // block)), bool)
    for mask in masks:
        grid = active_blocks(Reordered(mask, RowOrder(length), RowOrder(length)), *seen.shape, own, block)
        seen[grid.rows, grid.columns] = True
    others = np.arange(seen.shape[1]) // (own // block) != np.arange(devices)[:, None]
    return [int(n) * block for n in (seen & others).sum(1)]


def bound(part: Part) -> Received:
    """What the device at least receives that receives most: the keys that its queries see, or what changes places.

    Gradients go back the same way, and are as many.
    """
    route = part.route
    if isinstance(route, Residues):
        return route.received(0)
    most = max(route.received(place).keys for place in range(route.devices))
    keys = min(most, max(needed(part.masks, route.length, route.devices)))  # needed ones are counted in blocks
    return Received(keys, gradients=keys)


def _cheapest(
    mask: Mask, length: int, filled: int, devices: int, implementation: str, groups: int
) -> tuple[float, dict[Route, Mask]]:
    """What one mask costs by `_cost`, and its parts by their routes; estimated if it is filled up to more tokens."""
    weighed = []
    for number, parts in enumerate(split_costs(mask, length, TUNING[implementation], 2 * devices)):
        parts = [(wish, part, _stretched(costs, filled / length)) for wish, part, costs in parts]
        found = _by_route(parts, filled, devices, groups)
        if found is not None:
            total = sum(_cost(route, costs, groups) for route, (_, costs) in found.items())
            weighed.append((total, number, {route: part for route, (part, _) in found.items()}))
    cost, _, found = min(weighed, key=lambda entry: entry[:2])
    return cost, found


def _stretched(costs: np.ndarray, factor: float) -> np.ndarray:
    """What pieces cost that are longer by a factor, if tokens behind the last cost what the last ones do."""
    ends = np.arange(len(costs) + 1)
    total = np.interp(ends * factor, ends, np.concatenate([[0], costs.cumsum()]))
    return np.diff(total + np.maximum(ends * factor - len(costs), 0) * costs[-1])


def _by_route(
    parts: Iterable[tuple[Wish, Mask, np.ndarray]], length: int, devices: int, groups: int
) -> dict[Route, tuple[Mask, np.ndarray]] | None:
    """For each route that is taken, what takes it, and what it costs to compute; None if a part has no route."""
    by_wish: dict[Wish | None, tuple[Mask, np.ndarray]] = {}
    for wish, part, costs in parts:  # what is computed in natural order takes one route
        _add(by_wish, wish if _stride_of(wish) > 1 or _gathers(wish) else None, part, costs)
    cheapest: dict[Route, tuple[Mask, np.ndarray]] = {}
    for wish, (part, costs) in by_wish.items():
        options = _routes(wish, part, length, devices)
        if not options:
            return None
        _, _, route = min((_cost(route, costs, groups), i, route) for i, route in enumerate(options))
        _add(cheapest, route, part, costs)
    joined, found = _joined(cheapest), {}
    for route, (part, costs) in cheapest.items():
        _add(found, joined[route], part, costs)
    return found


def _add(found: dict[Any, tuple[Mask, np.ndarray]], key: Any, part: Mask, costs: np.ndarray) -> None:
    """Adds a part, and what it costs, to those of a key."""
    if key in found:
        before, already = found[key]
        part, costs = Or(before, part), already + costs
    found[key] = part, costs


def _cost(route: Route, costs: np.ndarray, groups: int) -> float:
    """What a part costs by a route, in pairs of a head: the device that computes most, and the one that receives most.

    Args:
      route: the part's.
      costs: of computing each of 2 P chunks of the queries.
      groups: query heads of a key head.
    """
    first, second = costs[: route.devices], costs[: route.devices - 1 : -1]
    received = map(route.received, range(route.devices))
    rows = max(2 * x.keys / groups + x.queries + x.results for x in received)
    computed = costs.reshape(-1, 2).sum(1)
    if isinstance(route, Gathered) and route.folded:
        computed = first + second
        rows += ROWS_PER_FOLDING
    elif isinstance(route, Residues):
        computed = costs.sum(keepdims=True) / route.devices
    return float(computed.max()) + RECEIVED_ROW * PAIRS_PER_ROW * rows


def _routes(wish: Wish | None, part: Mask, length: int, devices: int) -> list[Route]:
    """The routes that a part may take, which is computed in the row orders of a wish; in natural order without one."""
    routes: list[Route] = []
    if wish is not None and _gathers(wish):
        routes.append(Gathered(length, devices, wish[1]))
    else:
        stride = 1 if wish is None else _stride_of(wish)
        divides = length % (stride * devices) == 0  # devices have as many tokens of each residue
        if divides and stride > 1 and stride % devices == 0:
            routes.append(Residues(length, devices, stride))
        halo = _halo(part, length, devices, stride)
        most = max(halo.received(place).keys for place in range(devices))
        # Keys of nearly all devices are gathered at once, not one device after the other.
        if halo.kv_rows <= 2 * halo.own or most <= (devices - 2) * halo.own:
            routes.append(halo)
        if divides or stride == 1:
            routes.append(Gathered(length, devices, RowOrder(length), stride))
    foldable = [route for route in routes if isinstance(route, Gathered) and route.may_fold]
    return [*routes, *(dataclasses.replace(route, folded=True) for route in foldable)]


def _stride_of(wish: Wish) -> int:
    """The stride of residue-major order, if queries and keys are wanted in that; 1 if not."""
    q_order, kv_order = wish
    stride = q_order.shape[-1]
    return stride if q_order == kv_order == RowOrder.residue_major(q_order.length, stride) else 1


def _gathers(wish: Wish) -> bool:
    """Whether a few keys are wanted by queries in natural order."""
    return wish[0].natural and not wish[1].natural


@outside_trace()
def _halo(part: Mask, length: int, devices: int, stride: int) -> Neighbors:
    """The keys of neighbors that a part reaches; ``left`` is rounded up to a multiple of a stride."""
    own = -(-length // devices)
    first = np.arange(0, length, own)
    last = np.minimum(first + own, length) - 1

    def reach(empty: Callable[[np.ndarray], np.ndarray], most: np.ndarray) -> int:
        """The least reach beyond which nothing lies, of the device that has the largest."""
        low, high = np.zeros_like(most), most
        while (low < high).any():
            middle = (low + high) // 2
            fits = empty(middle) | (middle >= most)
            low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
        return int(high.max(initial=0))

    def before(n: np.ndarray) -> np.ndarray:
        return part.grade(first, last, np.zeros_like(first), np.maximum(first - n - 1, 0)) == EMPTY

    def behind(n: np.ndarray) -> np.ndarray:
        return part.grade(first, last, np.minimum(last + n + 1, length - 1), np.full_like(first, length - 1)) == EMPTY

    left = -(-reach(before, first) // stride) * stride
    return Neighbors(length, devices, left, reach(behind, length - 1 - last), stride)
