"""The calls of one device under context parallelism: a call for each part of the masks, after its exchange of keys."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..masks.algebra import Mask
from . import collectives
from .kernels.call import Call
from .kernels.distance_bias import bias_by_distance, has_bias
from .kernels.numerics import merge_by_lse
from .kernels.operands import Operands, moved, rows_of
from .planning.context_parallel import MaskPart, gather_all_keys, padded_length, plan_exchanges
from .planning.exchanges import AllGather, AllToAll, Exchange, Halo
from .planning.plan import Plan
from .planning.row_orders import RowOrder
from .sharding import SequenceShards, Shard


class QueryHome(NamedTuple):
    """The device where queries live, for a call that another device may compute."""

    exchange: Exchange  # of the call's chunk of queries
    axes: tuple[str, ...]  # mesh axes that the sequence is sharded over

    def send(self, x: jax.Array) -> jax.Array:
        """Sends the chunk's rows of an array of all local queries to the device that computes them."""
        return collectives.send_queries(self.exchange, x, self.axes)

    def return_(self, x: jax.Array) -> jax.Array:
        """Returns rows of results to the device where their queries live."""
        return collectives.return_results(self.exchange, x, self.axes)


def split_call(
    call: Call, shard: Shard, operands: Operands, *, can_merge: bool
) -> Iterator[tuple[Call, QueryHome | None, Operands]]:
    """Yields the calls that a device computes, each with its operands: one, unless results of several ``can_merge``."""
    sequence = shard.sequence
    assert sequence is not None
    if not sequence.shards_keys:
        exchange = AllGather(sequence.length, sequence.devices, RowOrder(operands.key.shape[1]))
        local_call = call if call.plan is None else _local_call(call, exchange, call.plan.masks)
        local_call, operands = _with_local_bias(call, exchange, sequence.axes, local_call, operands)
        yield local_call, None, operands
        return
    mask_parts = _mask_parts(call, shard, sequence, can_merge and operands.selection is None, has_bias(operands))
    # In zigzag order, results return home while other parts are computed: these parts come first.
    mask_parts = sorted(mask_parts, key=lambda mask_part: len(mask_part.exchange.chunks), reverse=True)
    call = dataclasses.replace(
        call, exchanges_queries=any(isinstance(exchange, AllToAll) for exchange, _ in mask_parts)
    )
    for number, (exchange, masks) in enumerate(mask_parts):
        inputs = moved(operands, "s", functools.partial(collectives.exchange_keys, exchange, axes=sequence.axes))
        if number:
            inputs = inputs._replace(**{name: None for name, row in rows_of(inputs).items() if row.once})
        for chunk in exchange.chunks:
            home = QueryHome(chunk, sequence.axes)
            local = _local_call(call, chunk, masks), moved(inputs, "t", home.send)
            local_call, local_operands = _with_local_bias(call, chunk, sequence.axes, *local)
            yield local_call, home, local_operands


def merge_chunks(
    homes: Sequence[QueryHome | None], results: Sequence[tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of all local queries, merged from the results of several calls that are home again."""
    spans = [home.exchange.query_span for home in homes if home is not None]
    merged_ranges = []
    for first, stop in itertools.pairwise(sorted({end for span in spans for end in span})):
        covering = [(span, x) for span, x in zip(spans, results, strict=True) if span[0] <= first < span[1]]
        states = [[x[:, first - begin : stop - begin] for x in out_lse] for (begin, _), out_lse in covering]
        out, lse = functools.reduce(merge_by_lse, ((out.astype(lse.dtype), lse) for out, lse in states))
        merged_ranges.append((out.astype(states[0][0].dtype), lse))
    outs, lses = zip(*merged_ranges, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)


def computed_length(call: Call, can_merge: bool, length: int, devices: int, groups: int) -> int:
    """Returns the padded length at which a sequence is computed; ``can_merge`` as in `split_call`."""
    if call.plan is None or not can_merge:
        return length
    return padded_length(call.plan.masks, length, devices, call.plan.implementation, groups)


def _plan(call: Call) -> Plan:
    assert call.plan is not None
    return call.plan


def _mask_parts(
    call: Call, shard: Shard, sequence: SequenceShards, may_split: bool, with_bias: bool
) -> tuple[MaskPart, ...]:
    plan = _plan(call)
    if not may_split:
        return (gather_all_keys(plan.masks, sequence.length, sequence.devices),)
    groups = shard.heads // shard.kv_heads
    mask_parts = plan_exchanges(plan.masks, sequence.length, sequence.devices, plan.implementation, groups)
    if with_bias:  # a bias is by distance of rows, which gathered keys do not have
        natural = RowOrder(sequence.length)
        mask_parts = tuple(
            MaskPart(dataclasses.replace(x, order=natural) if isinstance(x, AllGather) else x, masks)
            for x, masks in mask_parts
        )
    return mask_parts or (MaskPart(Halo(sequence.length, sequence.devices, 0, 0), plan.masks),)  # the masks are empty


def _local_call(call: Call, exchange: Exchange, masks: tuple[Mask, ...]) -> Call:
    """Returns the call of one exchange, with the plans of all devices."""
    plan, ranks = _plan(call), range(exchange.devices)
    options = {"params": (plan.fwd_params, plan.bwd_params), "implementation": plan.implementation}
    plans = [exchange.local_plan(masks, rank, **options) for rank in ranks]
    return dataclasses.replace(call, plan=plans[-1], plans_by_rank=() if len({*plans}) == 1 else tuple(plans))


def _with_local_bias(
    call: Call, exchange: Exchange, axes: tuple[str, ...], local_call: Call, operands: Operands
) -> tuple[Call, Operands]:
    """Returns a local call and its operands, with a table by the distances of the device's rows, slopes included."""
    if not has_bias(operands):
        return local_call, operands
    if call.bias_orders is not None:
        raise NotImplementedError(
            "bias: distances on a grid need whole sequences on each device, but the sharding of query splits them; "
            "leave its axis of tokens whole"
        )
    q_rows, kv_rows = operands.query.shape[1], operands.key.shape[1]
    kv_len = kv_rows if isinstance(exchange, AllGather) else exchange.length
    bias = bias_by_distance(call, operands, (exchange.length, kv_len))  # [N, T + S - 1]
    if isinstance(exchange, AllToAll):
        # Only pairs of one residue attend. Their tokens are a multiple of the stride apart, and their rows as many
        # times the number of local residues.
        bias = jnp.pad(bias, [(0, 0), (1, 0)], mode="edge")[:, :: exchange.stride]
        table = jnp.repeat(bias, exchange.local_residues, axis=1)[:, 1:]
    else:
        orders = (exchange.row_orders(rank) for rank in range(exchange.devices))
        first_tokens = np.array([[order.offset - sum(order.phase) for order in pair] for pair in orders])
        starts = first_tokens[:, 1] - first_tokens[:, 0] + exchange.length - q_rows
        before, behind = max(0, -starts.min()), max(0, starts.max() + q_rows + kv_rows - 1 - bias.shape[1])
        bias = jnp.pad(bias, [(0, 0), (before, behind)], mode="edge")
        start = jnp.asarray(starts + before)[jax.lax.axis_index(axes)]
        table = jax.lax.dynamic_slice_in_dim(bias, start, q_rows + kv_rows - 1, axis=1)
    local_call = dataclasses.replace(local_call, bias_center=q_rows - 1)
    return local_call, operands._replace(bias_table=table, bias_slopes=None)
