"""What devices tell each other of a sequence that is spread over them: the routes of `planning/communication.py`.

Functions of arrays [B, n, ...] of a device, inside `jax.shard_map`. JAX differentiates them: gradients go back the way
that the arrays came, and what a device got is kept for that.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .planning.communication import Gathered, Neighbors, Residues, Route, relays

Axes = tuple[str, ...]


def keys(route: Route, x: jax.Array, axes: Axes) -> jax.Array:
    """The keys of a route, or what belongs to them: [B, n, ...] -> [B, kv_rows, ...].

    Args:
      route: of all that comes.
      x: what the device has.
      axes: mesh axes that the sequence is spread over.
    """
    if isinstance(route, Residues):
        return queries(route, x, axes)
    if isinstance(route, Gathered):
        return _gathered(route, x, axes)
    assert isinstance(route, Neighbors)
    before = [_from(x[:, x.shape[1] - n :], hop, axes) for hop, n in enumerate(route.hops(route.left), 1)]
    behind = [_from(x[:, :n], -hop, axes) for hop, n in enumerate(route.hops(route.right), 1)]
    return _in_a_row([*reversed(before), x, *behind]) if before or behind else x


def queries(route: Route, x: jax.Array, axes: Axes) -> jax.Array:
    """A piece's queries, or what belongs to them, where they meet their keys: [B, n, ...] -> [B, q_rows, ...]."""
    batch, own, *rest = x.shape
    if isinstance(route, Residues):
        x = x.reshape(batch, own // route.stride, route.devices, route.own_residues, *rest)
        x = jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
        return x.reshape(batch, own, *rest)
    first, stop = route.queries
    return _moved(x[:, first:stop], route.moves, axes)


def results(route: Route, x: jax.Array, axes: Axes) -> jax.Array:
    """What belongs to a piece's queries, back to where they live: [B, q_rows, ...], which `queries` took away."""
    batch, own, *rest = x.shape
    if isinstance(route, Residues):
        x = x.reshape(batch, route.length // route.stride, 1, route.own_residues, *rest)
        x = jax.lax.all_to_all(x, axes, split_axis=1, concat_axis=2, tiled=True)
        return x.reshape(batch, own, *rest)
    return _moved(x, [(there, home) for home, there in route.moves], axes)


def _in_a_row(parts: list[jax.Array]) -> jax.Array:
    """Arrays [B, n, ...], one after the other: [B, sum of n, ...]."""
    # As numbers, not as rows: with an odd number of these XLA copies number by number, which took 0.317 ms on an H200
    # where this took 0.081.
    batch, _, *rest = parts[0].shape
    joined = jnp.concatenate([x.reshape(batch, math.prod(x.shape[1:])) for x in parts], axis=1)
    return joined.reshape(batch, sum(x.shape[1] for x in parts), *rest)


def _moved(x: jax.Array, moves: list[tuple[int, int]], axes: Axes) -> jax.Array:
    """x of the devices that send theirs, by moves (from, to); a device's own if none sends to another."""
    return x if all(a == b for a, b in moves) else jax.lax.ppermute(x, axes, moves)


def _from(x: jax.Array, hop: int, axes: Axes) -> jax.Array:
    """x of the device ``hop`` places before this one; zeros on devices that have none there."""
    devices = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(i, i + hop) for i in range(devices) if 0 <= i + hop < devices])


def _gathered(route: Gathered, x: jax.Array, axes: Axes) -> jax.Array:
    """The rows of a route's order, on every device."""
    if route.order.natural:
        return _all(x, axes)[:, : route.length]
    tokens, counts, ends = route.tokens, route.counts, np.cumsum(route.counts)
    # Which of its own tokens each device gives, in the order of rows; of the last token as often as others have more.
    most = int(counts.max())
    given = [tokens[end - n : end] - place * route.own for place, (n, end) in enumerate(zip(counts, ends, strict=True))]
    table = np.stack([np.concatenate([rows, np.zeros(most - len(rows), rows.dtype)]) for rows in given])
    own = jnp.take(x, jnp.asarray(table.astype(np.int32))[jax.lax.axis_index(axes)], axis=1)
    if route.sent_one_by_one:
        return jnp.concatenate([_sent(own[:, :n], place, axes) for place, n in enumerate(counts) if n], axis=1)
    found = _all(own, axes)
    if len(tokens) == most * route.devices:
        return found
    rows = np.concatenate([place * most + np.arange(n) for place, n in enumerate(counts)])
    return jnp.take(found, jnp.asarray(rows), axis=1)


def _all(x: jax.Array, axes: Axes) -> jax.Array:
    """What all devices have, one after the other: [B, n, ...] -> [B, P n, ...]."""
    # Along the first axis, for the sake of gradients: a sum that is scattered along it is known to compilers for TPUs.
    # One that is scattered along tokens they mostly make a sum of all on all devices, of twice the bytes.
    batch, own, *rest = x.shape
    devices = jax.lax.axis_size(axes)
    if not batch:  # XLA gathers nothing along such an axis
        return x.reshape(batch, devices * own, *rest)
    found = jax.lax.all_gather(x, axes, axis=0, tiled=True).reshape(devices, batch, own, *rest)
    return jnp.moveaxis(found, 0, 1).reshape(batch, devices * own, *rest)


def _sent(x: jax.Array, place: int, axes: Axes) -> jax.Array:
    """x of one device, on all."""
    devices = jax.lax.axis_size(axes)
    x = jnp.where(jax.lax.axis_index(axes) == place, x, 0)
    for step in relays(devices):
        x = x + jax.lax.ppermute(x, axes, [((place + a) % devices, (place + b) % devices) for a, b in step])
    return x
