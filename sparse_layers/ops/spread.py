"""The op on a sequence that is spread over devices: the parts of a call, each with the keys that its route brings."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax

from . import exchange
from .kernels.call import Call, Operands
from .planning.communication import Gathered, Neighbors, Part, Residues, Route, filled_up, parts_of, whole
from .planning.plan import Plan
from .planning.views import RowOrder
from .sharding import Share, Spread


class Home(NamedTuple):
    """Where queries live, whose part of a call is computed elsewhere.

    Attributes:
      route: between the two.
      axes: mesh axes that the sequence is spread over.
    """

    route: Route
    axes: tuple[str, ...]

    def leave(self, x: jax.Array) -> jax.Array:
        """What belongs to queries, where it is computed."""
        return exchange.queries(self.route, x, self.axes)

    def back(self, x: jax.Array) -> jax.Array:
        """What was computed for queries, where they live."""
        return exchange.results(self.route, x, self.axes)


def parts(
    call: Call, share: Share, operands: Operands, *, merges: bool
) -> Iterator[tuple[Call, Home | None, Operands]]:
    """What a device computes of a call, and what it needs for that.

    Args:
      call: that of all devices.
      share: the device's.
      operands: what it has.
      merges: whether results of parts may be merged; if not, there is one part.
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
    call = dataclasses.replace(call, exchanging=any(isinstance(part.route, Residues) for part in found))
    for number, part in enumerate(found):
        home = Home(part.route, spread.axes)
        key, value = (exchange.keys(part.route, x, spread.axes) for x in (operands.key, operands.value))
        here = operands._replace(query=home.leave(operands.query), key=key, value=value)
        if operands.segments is not None:
            of_queries, of_keys = operands.segments
            here = here._replace(segments=(home.leave(of_queries), exchange.keys(part.route, of_keys, spread.axes)))
        if number:  # sinks count once
            here = here._replace(sinks=None)
        yield _placed(call, part), home, here


def length_of(call: Call, merges: bool, length: int, devices: int, groups: int) -> int:
    """As how many tokens a sequence is computed; ``merges`` as in `parts`."""
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
