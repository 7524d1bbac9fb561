"""Exchanges of keys and queries between devices, for context parallelism.

Each of P devices holds ``n = ceil(T / P)`` consecutive tokens; its rank is its number along the sequence. T may be
larger than the sequence, see `context_parallel.padded_length`. There are three exchanges:

* `Halo`: a device receives the keys next to its own that its queries reach;
* `AllGather`: every device receives the same keys: all of them, or a few (summary columns, global tokens);
* `AllToAll`: queries and keys are sent so that a device holds all tokens of its residues of a stride.

After each of them, the queries and keys of a device are views of the sequence, `RowOrder`. What the device computes is
again a mask with a plan.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...masks.algebra import And, Mask, Not, Or
from ...masks.primitives import Causal, Empty, Full, Strided, Window
from .params import BwdParams, FwdParams
from .plan import Plan
from .planner import make_plan
from .row_orders import Reordered, RowOrder, RowOrderPair, mask_period

# The first of a device's tokens, and the one behind the last.
Span = tuple[int, int]


class TokenBytes(NamedTuple):
    """Bytes of one token in all heads: of key and value together, of the query (and of out), of lse."""

    keys: int
    query: int
    lse: int

    @staticmethod
    def of(heads: int, kv_heads: int, size: int, itemsize: int) -> "TokenBytes":
        """Returns the bytes for heads of ``size`` elements, each of ``itemsize`` bytes."""
        return TokenBytes(2 * kv_heads * size * itemsize, heads * size * itemsize, heads * max(4, itemsize))


class Received(NamedTuple):
    """The rows that a device receives in an exchange, in all heads."""

    keys: int  # rows of key and value in a forward pass
    queries: int = 0  # rows of query in a forward pass; of dout, lse and delta in a backward pass
    results: int = 0  # rows of out and lse in a forward pass, for queries that live here; of dq in a backward pass
    gradients: int = 0  # rows of dk and dv in a backward pass

    def nbytes(self, token: TokenBytes) -> tuple[int, int]:
        """Returns the bytes of a forward and of a backward pass."""
        forward = self.keys * token.keys + self.queries * token.query + self.results * (token.query + token.lse)
        backward = self.queries * (token.query + 2 * token.lse) + self.results * token.query
        return forward, backward + self.gradients * token.keys


@dataclasses.dataclass(frozen=True)
class Exchange(abc.ABC):
    """A way to bring keys to queries, or both to a third device, in context parallelism."""

    length: int  # tokens T of the sequence
    devices: int  # P, the devices that share the sequence

    @property
    def local_len(self) -> int:
        """Tokens of a device; the last devices have some that do not exist."""
        return -(-self.length // self.devices)

    @property
    def chunks(self) -> "tuple[Exchange, ...]":
        """The exchange for each chunk of queries that is computed at once, in the order of forward and backward."""
        return (self,)

    @property
    def query_span(self) -> Span:
        """The local queries that belong to this chunk, on every device."""
        return 0, self.local_len

    @property
    def query_permutation(self) -> list[tuple[int, int]]:
        """(home, compute) ranks of all devices in zigzag order: where queries live, and where they are computed."""
        return []

    @property
    def q_rows(self) -> int:
        """Queries that a device computes."""
        first, stop = self.query_span
        return stop - first

    @property
    @abc.abstractmethod
    def kv_rows(self) -> int:
        """Keys that a device holds after the exchange."""

    @abc.abstractmethod
    def received(self, rank: int) -> Received:
        """Returns the rows that a device receives."""

    @abc.abstractmethod
    def row_orders(self, rank: int) -> RowOrderPair:
        """Returns the row orders of a device's queries and keys."""

    def local_mask(self, mask: Mask, rank: int) -> Mask:
        """Returns a mask on the rows of a device; equal masks on as many devices as possible."""
        q_order, kv_order = self.row_orders(rank)
        if (period := mask_period(mask)) is not None and not q_order.phase[0] and not kv_order.phase[0]:
            # Moved towards the first tokens by whole periods, which changes nothing.
            by = min(q_order.offset, kv_order.offset) // period * period
            moved = [dataclasses.replace(x, offset=x.offset - by) for x in (q_order, kv_order)]
            if all(int(x.token(x.rows - 1)) < self.length for x in (q_order, kv_order)):
                q_order, kv_order = moved
        return _reorder(mask, q_order, kv_order)

    def local_plan(
        self,
        masks: Sequence[Mask],
        rank: int,
        params: tuple[FwdParams, BwdParams] = (FwdParams(), BwdParams()),
        *,
        implementation: str | None = None,
    ) -> Plan:
        """Returns the plan of a device for the masks that heads take in turn."""
        local_masks = [self.local_mask(mask, rank) for mask in masks]
        options = {"fwd_params": params[0], "bwd_params": params[1], "implementation": implementation}
        return make_plan(local_masks, self.q_rows, self.kv_rows, **options)


@dataclasses.dataclass(frozen=True)
class Halo(Exchange):
    """Devices receive ``left`` keys before their own tokens and ``right`` keys behind them."""

    left: int  # a multiple of ``stride``
    right: int  # any number
    # Of masks whose queries see keys of their own residue only: a row has the residue of its token. Else 1.
    stride: int = 1

    @property
    def kv_rows(self) -> int:
        return self.left + self.local_len + self.right

    def received(self, rank: int) -> Received:
        before, behind = rank * self.local_len, (self.devices - 1 - rank) * self.local_len
        keys = min(self.left, before) + min(self.right, behind)
        return Received(keys, gradients=min(self.right, before) + min(self.left, behind))

    def hops(self, reach: int) -> list[int]:
        """Returns the keys that come from each of the devices on one side, the nearest first."""
        return [min(self.local_len, reach - first) for first in range(0, reach, self.local_len)]

    def row_orders(self, rank: int) -> RowOrderPair:
        first = rank * self.local_len
        queries = _consecutive(self.length, first, self.local_len)
        return queries, _consecutive(self.length, first - self.left, self.kv_rows)

    def __str__(self):
        sides = [f"{n} {side}" for n, side in ((self.left, "before"), (self.right, "behind")) if n]
        keys = f"keys of neighbors, {' and '.join(sides)}" if sides else "own keys only"
        return keys + _residue_words(self.stride)


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """All devices receive the same keys.

    Under a causal mask the last queries see the most keys. In zigzag order, device i computes the i-th chunk of 2 P
    chunks of the sequence and the i-th from the end, and sends the results to where the queries live. Each chunk is a
    call of its own: while one is computed, queries and results of the other one travel.
    """

    order: RowOrder  # of the keys; all of them in natural order
    stride: int = 1  # as of `Halo`; it divides a device's tokens, and those of a chunk in zigzag order
    zigzag: bool = False  # True if queries are computed in zigzag order
    # Of a chunk in zigzag order, 0 or 1 for the first or second half of each device's queries; else None.
    half: int | None = None

    @property
    def chunks(self) -> tuple[Exchange, ...]:
        # Over two devices first halves are computed where they live, while second ones travel.
        return tuple(dataclasses.replace(self, half=half) for half in (0, 1)) if self.zigzag else (self,)

    @property
    def query_span(self) -> Span:
        middle = self.local_len // 2
        return (0, self.local_len) if self.half is None else [(0, middle), (middle, self.local_len)][self.half]

    @property
    def query_permutation(self) -> list[tuple[int, int]]:
        return [] if self.half is None else self.zigzag_moves[self.half]

    @property
    def kv_rows(self) -> int:
        return self.order.rows

    @functools.cached_property
    def key_tokens(self) -> np.ndarray:
        """The token of each key: int [kv_rows]; the last token for rows without one."""
        return np.minimum(self.order.token(np.arange(self.kv_rows)), self.length - 1)

    @functools.cached_property
    def key_counts(self) -> np.ndarray:
        """The number of these keys that each device holds before the exchange: int [P]."""
        return np.bincount(self.key_tokens // self.local_len, minlength=self.devices)

    @property
    def can_zigzag(self) -> bool:
        """True if all chunks have the same length and as many tokens of each residue."""
        return self.length % (2 * self.devices * self.stride) == 0

    @property
    def is_broadcast(self) -> bool:
        """True if each device with such keys broadcasts them; else all devices send as many as the largest sender."""
        return int(self.key_counts.sum()) <= (self.devices - 1) * int(self.key_counts.max())

    def received(self, rank: int) -> Received:
        keys = gradients = (self.devices - 1) * int(self.key_counts.max())
        if self.is_broadcast:
            keys = int(self.key_counts.sum() - self.key_counts[rank])
            sends = _broadcast_sends(self.devices)
            gradients = sum(
                sends[rank - owner] * int(self.key_counts[owner]) for owner in np.flatnonzero(self.key_counts)
            )
        moves = [pair for pairs in self.zigzag_moves for pair in pairs if self.zigzag and pair[0] != pair[1]]
        queries, results = (sum(pair[i] == rank for pair in moves) * (self.local_len // 2) for i in (1, 0))
        return Received(keys, queries, results, gradients)

    @property
    def zigzag_moves(self) -> list[list[tuple[int, int]]]:
        """(home, compute) ranks of the first half of each device's queries, and of the second half."""
        chunks = [range(half, 2 * self.devices, 2) for half in (0, 1)]
        return [[(c // 2, min(c, 2 * self.devices - 1 - c)) for c in half] for half in chunks]

    def row_orders(self, rank: int) -> RowOrderPair:
        home = next((home for home, compute in self.query_permutation if compute == rank), rank)
        return _consecutive(self.length, home * self.local_len + self.query_span[0], self.q_rows), self.order

    def __str__(self):
        keys = "all keys" if self.order.natural else f"keys of all devices: {self.order}"
        keys += _residue_words(self.stride)
        return f"{keys}; queries in zigzag order" if self.zigzag else keys


@dataclasses.dataclass(frozen=True)
class AllToAll(Exchange):
    """Queries and keys go to the device that has their residue of ``stride``, and results return."""

    stride: int

    @property
    def local_residues(self) -> int:
        """Residues of a device."""
        return self.stride // self.devices

    @property
    def kv_rows(self) -> int:
        return self.local_len

    def received(self, rank: int) -> Received:
        return Received(*[self.local_len - self.local_len // self.devices] * 4)

    def row_orders(self, rank: int) -> RowOrderPair:
        order = RowOrder.periodic(
            self.length, self.stride, rank * self.local_residues, (rank + 1) * self.local_residues
        )
        return order, order

    def local_mask(self, mask: Mask, rank: int) -> Mask:
        order, _ = self.row_orders(rank)
        on_rows = self._on_rows(mask)
        if on_rows is None:
            on_rows = Reordered(mask, order, order)
        # The mask allows pairs of one residue only. Written as a stride of rows, the planner can use that.
        return And(Strided(self.local_residues), on_rows) if self.local_residues > 1 else on_rows

    def _on_rows(self, mask: Mask) -> Mask | None:
        """Returns the mask on a device's rows, for pairs of one residue; None if it has no such form."""
        if isinstance(mask, Full | Empty | Causal):
            return mask
        if isinstance(mask, Strided):
            steps = mask.stride // math.gcd(mask.stride, self.stride)
            return Strided(steps * self.local_residues) if steps > 1 else Full()
        if isinstance(mask, Window):
            reach = (x if x is None else x // self.stride * self.local_residues for x in (mask.left, mask.right))
            return Window(*reach)
        if isinstance(mask, Not):
            inner = self._on_rows(mask.mask)
            return None if inner is None else Not(inner)
        if isinstance(mask, And | Or):
            left, right = self._on_rows(mask.left), self._on_rows(mask.right)
            return None if left is None or right is None else type(mask)(left, right)
        return None

    def __str__(self):
        return f"queries and keys, by residue of {self.stride}"


def broadcast_steps(devices: int) -> list[list[tuple[int, int]]]:
    """Returns the steps of a broadcast from device 0, each a list of (sender, receiver)."""
    steps, num_holders = [], 1
    while num_holders < devices:
        steps.append([(i, i + num_holders) for i in range(min(num_holders, devices - num_holders))])
        num_holders *= 2
    return steps


@functools.cache
def _broadcast_sends(devices: int) -> list[int]:
    """Returns the sends of each device in `broadcast_steps`: as many gradients return to it."""
    senders = [sender for step in broadcast_steps(devices) for sender, _ in step]
    return [int(n) for n in np.bincount(senders, minlength=devices)]


def _reorder(mask: Mask, q_order: RowOrder, kv_order: RowOrder) -> Mask:
    """Returns a mask on the rows of two orders; the mask itself where these are the first tokens one by one."""
    orders = q_order, kv_order
    first = all(x.offset == 0 and x.shape[:-1] in ((), (1,)) and not any(x.phase) for x in orders)
    return mask if first and all(x.rows <= x.length for x in orders) else Reordered(mask, q_order, kv_order)


def _consecutive(length: int, first: int, rows: int) -> RowOrder:
    """Returns the order of consecutive tokens; some may lie before or behind the sequence."""
    if first < 0:
        return RowOrder(length, (length,), (rows,), (min(length, first + rows),), phase=(-first,))
    return RowOrder(length, (1, length), (1, rows), (1, rows), min(first, length))


def _residue_words(stride: int) -> str:
    return f", by residue of {stride}" if stride > 1 else ""
