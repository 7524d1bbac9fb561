"""The collectives of context parallelism, which carry out the exchanges of `planning/exchanges.py`.

These are functions of a device's arrays [B, n, ...], inside `jax.shard_map`. JAX differentiates them: gradients return
the way that the arrays came, and received arrays are residuals of the backward pass.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .planning.exchanges import AllGather, AllToAll, Exchange, Halo, broadcast_steps

Axes = tuple[str, ...]


def exchange_keys(exchange: Exchange, x: jax.Array, axes: Axes) -> jax.Array:
    """Returns an array with a row for each key after an exchange of keys: [B, n, ...] -> [B, kv_rows, ...]."""
    if isinstance(exchange, AllToAll):
        return send_queries(exchange, x, axes)
    if isinstance(exchange, AllGather):
        return _all_gather_keys(exchange, x, axes)
    assert isinstance(exchange, Halo)
    before = [_shift(x[:, x.shape[1] - n :], hop, axes) for hop, n in enumerate(exchange.hops(exchange.left), 1)]
    behind = [_shift(x[:, :n], -hop, axes) for hop, n in enumerate(exchange.hops(exchange.right), 1)]
    return _concatenate([*reversed(before), x, *behind]) if before or behind else x


def send_queries(exchange: Exchange, x: jax.Array, axes: Axes) -> jax.Array:
    """Sends a chunk's rows of an array of queries to the devices that compute them: -> [B, q_rows, ...]."""
    batch, length, *rest = x.shape
    if isinstance(exchange, AllToAll):
        x = x.reshape(batch, length // exchange.stride, exchange.devices, exchange.local_residues, *rest)
        x = jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
        return x.reshape(batch, length, *rest)
    first, stop = exchange.query_span
    return _permute(x[:, first:stop], exchange.query_permutation, axes)


def return_results(exchange: Exchange, x: jax.Array, axes: Axes) -> jax.Array:
    """Returns rows [B, q_rows, ...] to the devices from which `send_queries` sent them."""
    batch, length, *rest = x.shape
    if isinstance(exchange, AllToAll):
        x = x.reshape(batch, exchange.length // exchange.stride, 1, exchange.local_residues, *rest)
        x = jax.lax.all_to_all(x, axes, split_axis=1, concat_axis=2, tiled=True)
        return x.reshape(batch, length, *rest)
    return _permute(x, [(compute, home) for home, compute in exchange.query_permutation], axes)


def _concatenate(arrays: list[jax.Array]) -> jax.Array:
    """Concatenates arrays [B, n, ...] along the tokens."""
    # With flat rows: for an odd number of arrays XLA copies element by element otherwise, which took 0.317 ms on an
    # H200 where this took 0.081.
    batch, _, *rest = arrays[0].shape
    flat = jnp.concatenate([x.reshape(batch, math.prod(x.shape[1:])) for x in arrays], axis=1)
    return flat.reshape(batch, sum(x.shape[1] for x in arrays), *rest)


def _permute(x: jax.Array, moves: list[tuple[int, int]], axes: Axes) -> jax.Array:
    """Sends x by moves (from, to); returns x itself if no device sends to another one."""
    return x if all(a == b for a, b in moves) else jax.lax.ppermute(x, axes, moves)


def _shift(x: jax.Array, hop: int, axes: Axes) -> jax.Array:
    """Returns x of the device ``hop`` ranks before this one; zeros where there is no such device."""
    devices = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(i, i + hop) for i in range(devices) if 0 <= i + hop < devices])


def _all_gather_keys(gather: AllGather, x: jax.Array, axes: Axes) -> jax.Array:
    """Returns the rows of the order of ``gather`` on every device."""
    if gather.order.natural:
        return _all_gather(x, axes)[:, : gather.length]
    tokens, counts, ends = gather.key_tokens, gather.key_counts, np.cumsum(gather.key_counts)
    # The local tokens that each device sends, in the order of rows; its first token fills up to the most of a device.
    max_count = int(counts.max())
    local_rows = [
        tokens[end - n : end] - rank * gather.local_len for rank, (n, end) in enumerate(zip(counts, ends, strict=True))
    ]
    table = np.stack([np.concatenate([rows, np.zeros(max_count - len(rows), rows.dtype)]) for rows in local_rows])
    sent = jnp.take(x, jnp.asarray(table.astype(np.int32))[jax.lax.axis_index(axes)], axis=1)
    if gather.is_broadcast:
        return jnp.concatenate([_broadcast(sent[:, :n], rank, axes) for rank, n in enumerate(counts) if n], axis=1)
    received = _all_gather(sent, axes)
    if len(tokens) == max_count * gather.devices:
        return received
    rows = np.concatenate([rank * max_count + np.arange(n) for rank, n in enumerate(counts)])
    return jnp.take(received, jnp.asarray(rows), axis=1)


def _all_gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Gathers the arrays of all devices along the tokens: [B, n, ...] -> [B, P n, ...]."""
    # Along the first axis, because the gradient is then a reduce-scatter along it, which compilers for TPUs know. A
    # reduce-scatter along tokens mostly becomes an all-reduce, of twice the bytes.
    batch, length, *rest = x.shape
    devices = jax.lax.axis_size(axes)
    if not batch:  # XLA gathers nothing along an axis of size 0
        return x.reshape(batch, devices * length, *rest)
    rows_of_all = jax.lax.all_gather(x, axes, axis=0, tiled=True).reshape(devices, batch, length, *rest)
    return jnp.moveaxis(rows_of_all, 0, 1).reshape(batch, devices * length, *rest)


def _broadcast(x: jax.Array, rank: int, axes: Axes) -> jax.Array:
    """Broadcasts x from one device to all."""
    devices = jax.lax.axis_size(axes)
    x = jnp.where(jax.lax.axis_index(axes) == rank, x, 0)
    for step in broadcast_steps(devices):
        x = x + jax.lax.ppermute(x, axes, [((rank + a) % devices, (rank + b) % devices) for a, b in step])
    return x
