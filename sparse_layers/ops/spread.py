"""The op on a sequence that is spread over devices: the pieces of a call, each with the keys that its route brings."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import exchange
from .kernels.call import Call, Operands, merged
from .kernels.operands import moved, rows_of
from .planning.communication import Gathered, Neighbors, Part, Residues, Route, filled_up, parts_of, whole
from .planning.plan import Plan
from .planning.views import RowOrder
from .sharding import Share, Spread


class Home(NamedTuple):
    """Where queries live, whose piece of a call may be computed elsewhere.

    Attributes:
      route: between the two; that of the piece.
      axes: mesh axes that the sequence is spread over.
    """

    route: Route
    axes: tuple[str, ...]

    def leave(self, x: jax.Array) -> jax.Array:
        """What belongs to the queries of the piece, of what belongs to all own ones, where it is computed."""
        return exchange.queries(self.route, x, self.axes)

    def back(self, x: jax.Array) -> jax.Array:
        """What was computed for queries, where they live."""
        return exchange.results(self.route, x, self.axes)


def pieces(
    call: Call, share: Share, operands: Operands, *, merges: bool
) -> Iterator[tuple[Call, Home | None, Operands]]:
    """What a device computes of a call, and what it needs for that.

    Args:
      call: that of all devices.
      share: the device's.
      operands: what it has.
      merges: whether results of pieces may be merged; if not, there is one.
    """
    spread = share.spread
    assert spread is not None
    if call.plan is None and not spread.keys:
        yield call, None, operands
        return
    if not spread.keys:
        route = Gathered(spread.length, spread.devices, RowOrder(operands.key.shape[1]))
        yield _placed(call, Part(route, _plan(call).masks)), None, operands
        return
    found = _parts(call, share, spread, merges and operands.chosen is None)
    # The results of queries that are folded travel home while other parts are computed.
    found = sorted(found, key=lambda part: len(part.route.pieces), reverse=True)
    call = dataclasses.replace(call, exchanging=any(isinstance(part.route, Residues) for part in found))
    for number, part in enumerate(found):
        here = moved(operands, "s", functools.partial(exchange.keys, part.route, axes=spread.axes))
        if number:
            here = here._replace(**{name: None for name, row in rows_of(here).items() if row.once})
        for piece in part.route.pieces:
            home = Home(piece, spread.axes)
            yield _placed(call, Part(piece, part.masks)), home, moved(here, "t", home.leave)


def together(homes: Sequence[Home | None], found: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of all of a device's queries, from those of several pieces that are back at home."""
    spans = [home.route.queries for home in homes if home is not None]
    stretches = []
    for first, stop in itertools.pairwise(sorted({end for span in spans for end in span})):
        here = [(span, state) for span, state in zip(spans, found, strict=True) if span[0] <= first < span[1]]
        states = [[x[:, first - begin : stop - begin] for x in state] for (begin, _), state in here]
        out, lse = functools.reduce(merged, ((out.astype(lse.dtype), lse) for out, lse in states))
        stretches.append((out.astype(states[0][0].dtype), lse))
    outs, lses = zip(*stretches, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)


def length_of(call: Call, merges: bool, length: int, devices: int, groups: int) -> int:
    """As how many tokens a sequence is computed; ``merges`` as in `pieces`."""
    if call.plan is None or call.selection is not None or not merges:
        return length
    return filled_up(call.plan.masks, length, devices, call.plan.implementation, groups)


def _plan(call: Call) -> Plan:
    assert call.plan is not None
    return call.plan


def _parts(call: Call, share: Share, spread: Spread, several: bool) -> tuple[Part, ...]:
    if not several:
        return (whole(_plan(call).masks, spread.length, spread.devices),)
    groups = share.heads // share.kv_heads
    plan = _plan(call)
    found = parts_of(plan.masks, spread.length, spread.devices, plan.implementation, groups)
    return found or (Part(Neighbors(spread.length, spread.devices, 0, 0), plan.masks),)  # nobody attends to anything


def _placed(call: Call, part: Part) -> Call:
    """The call of a part, with the plans of all places."""
    plan = _plan(call)
    options = (plan.fwd_params, plan.bwd_params)
    places = range(part.route.devices)
    plans = [part.route.plan(part.masks, place, options, implementation=plan.implementation) for place in places]
    return dataclasses.replace(call, plan=plans[-1], places=() if len({*plans}) == 1 else tuple(plans))
