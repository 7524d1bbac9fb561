"""Chains of passes for all heads: in which order they run, and what goes from one to the next.

Kernels read q, k and v where they are, by token, whatever the order of their rows. A pass that holds all tokens writes
by token, too, and starts from what earlier passes left, so a chain of n such passes reads and writes each row n times
and copies nothing. Passes that hold only some queries (or keys) come first; their results are few and kept by row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...planning.head_groups import HeadGroup
from ...planning.views import RowOrder
from ..call import Call, Operands, base_2_sinks, groups_of, joined, merged, over_batches
from ..gpu.hardware import MAX_BATCH_ENTRIES
from . import kv_outer
from .link import Gradients, Link, Rows


def forward(call: Call, operands: Operands, link_type: type[Link] = Link) -> tuple[jax.Array, jax.Array]:
    """See `triton_gpu.forward`; ``link_type`` is of what does the passes."""
    return over_batches(functools.partial(_forward, call, link_type), MAX_BATCH_ENTRIES, operands)


def backward(
    call: Call,
    operands: Operands,
    *by_query: jax.Array,
    link_type: type[Link] = Link,
    choices_type: type[kv_outer.Choices] = kv_outer.Choices,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `triton_gpu.backward`; ``by_query`` are lse, delta and dout, and the types are of what does the work."""
    backward = functools.partial(_backward, call, link_type, choices_type)
    return over_batches(backward, MAX_BATCH_ENTRIES, operands, *by_query)


class _Group(NamedTuple):
    """Query heads whose chains differ in their masks only, and what does their passes."""

    heads: HeadGroup
    links: list[Link]


def _padding_apart(operands: Operands) -> Operands:
    """The operands, whose segment ids of padding are -2 for queries and -1 for keys."""
    if operands.segments is None:
        return operands
    q, kv = operands.segments
    return operands._replace(segments=(jnp.where(q < 0, -2, q), jnp.maximum(kv, -1)))


def groups(call: Call, operands: Operands, link_type: type[Link]) -> list[_Group]:
    """All query heads, by the chains that they take."""
    return [
        _Group(heads, [link_type(call, operands, heads.first, heads.step, passes) for passes in heads.passes])
        for heads in groups_of(call, operands, merge=True)
    ]


def _by_queries(links: Sequence[Link], kernel: str) -> list[Link]:
    """The links in the order of the forward and dq kernels, by twos where query rows are the same."""
    paired: list[Link] = []
    for link in sorted(links, key=lambda link: link.q_order.complete):
        place = next(
            (i for i, other in enumerate(paired) if other.also is None and other.goes_with(link, kernel)), None
        )
        if place is None:
            paired.append(link)
        else:
            paired[place] = dataclasses.replace(paired[place], also=link)
    return paired


def _forward(call: Call, link_type: type[Link], operands: Operands) -> tuple[jax.Array, jax.Array]:
    if not operands.query.size:  # no batch entries: there is nothing to launch
        query = operands.query
        out = jnp.zeros((*query.shape[:3], operands.value.shape[-1]), query.dtype)
        return out, jnp.zeros(query.shape[:3], jnp.float32)
    operands = operands._replace(sinks=None if operands.sinks is None else base_2_sinks(operands.sinks))
    operands = _padding_apart(operands)
    by_query = functools.partial(_forward_by_query, call, link_type)
    if not kv_outer.serves(call, operands):
        return by_query(operands)
    pays = kv_outer.pays(call, operands, "forward")
    return jax.lax.cond(pays, functools.partial(kv_outer.forward, call), by_query, operands)


def _forward_by_query(call: Call, link_type: type[Link], operands: Operands) -> tuple[jax.Array, jax.Array]:
    outs, lses = zip(*(_forward_of(group, operands) for group in groups(call, operands, link_type)), strict=True)
    return joined(outs).astype(operands.query.dtype), joined(lses)


def _forward_of(group: _Group, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, heads, Hv], lse [B, T, heads]) of a group."""
    sinks, links = operands.sinks, _by_queries(group.links, "forward")
    # Kernels start from the sinks if each query is begun by one pass only; otherwise sinks are merged in the end.
    in_kernels = sum(not link.q_order.complete for link in links) < min(2, len(links))
    rounded = _may_round([link for link in links if link.q_order.complete])
    state = None
    for link in links:
        if state is None or link.q_order.complete:
            begun = state is not None and state.order.natural
            state = link.forward(state, sinks if in_kernels and not begun else None, rounded(link))
        else:
            both = merged(state.whole(), link.forward(None, None, False).whole())
            state = Rows(RowOrder(link.q_order.length), (both[0], both[1].swapaxes(1, 2)))
    if state is None:
        nothing = jnp.zeros_like(group.heads.select(operands.query)[..., 0], jnp.float32)
        out, lse = nothing[..., None] * jnp.zeros(operands.value.shape[-1]), nothing - jnp.inf
    else:
        out, lse = state.whole()
    if sinks is not None and not in_kernels:
        sinks = jnp.broadcast_to(group.heads.select(sinks, 0), lse.shape)
        out, lse = merged((out, lse), (jnp.zeros_like(out), sinks))
    return out, lse


def _backward(
    call: Call,
    link_type: type[Link],
    choices_type: type[kv_outer.Choices],
    operands: Operands,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
):
    query, key, value = operands.query, operands.key, operands.value
    if not query.size:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    args = _padding_apart(operands), lse, delta, dout
    by_query = functools.partial(_backward_by_query, call, link_type)
    if not kv_outer.serves(call, args[0]):
        return by_query(*args)
    by_choice = functools.partial(kv_outer.backward, call, choices_type)
    if choices_type.always_pays:
        return by_choice(*args)
    return jax.lax.cond(kv_outer.pays(call, args[0], "backward"), by_choice, by_query, *args)


def _backward_by_query(
    call: Call, link_type: type[Link], operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array
):
    query, key, value = operands.query, operands.key, operands.value
    gradients = Gradients(lse.swapaxes(1, 2), delta.swapaxes(1, 2), dout.astype(query.dtype))
    parts = groups(call, operands, link_type)
    # In a group, and of the passes with all queries, those that hold some keys only come before those that write dk and
    # dv of all. Of the latter those with each key in one list come first: their kernel does more than others, and had
    # better not read earlier results, too.
    by_queries = [
        sorted(
            _by_queries(group.links, "dkv"),
            key=lambda x: (x.q_order.complete, x.kv_order.complete or not x.gives_dkv, not x.single_keys),
        )
        for group in parts
    ]
    by_keys = [link for links in by_queries for pair in links for link in pair.by_keys]
    giving = [link for links in by_queries for link in links if link.gives_dkv]
    rounded_keys = _may_round([*giving, *(link for link in by_keys if link.kv_order.complete)])
    keys: Rows | None = None
    for link in by_keys:
        if not link.kv_order.complete:
            own = link.dkv(gradients, None, False)
            keys = own if keys is None else _added(keys, own)
    dqs = []
    for group, links in zip(parts, by_queries, strict=True):
        rounded = _may_round([link for link in links if link.q_order.complete])
        queries: Rows | None = None
        for place, link in enumerate(links):
            goes_on = queries is None or link.q_order.complete
            before = queries if goes_on else None, keys if link.gives_dkv else None
            may_round = rounded(link) and not any(later.adds_in_float32 for later in links[place + 1 :])
            dq, dkv = link.dq(gradients, *before, may_round, rounded_keys(link))
            queries = dq if queries is None or goes_on else _added(queries, dq)
            keys = keys if dkv is None else dkv
        none = jnp.zeros_like(group.heads.select(query))
        dqs.append(none if queries is None else queries.whole()[0])
    for link in by_keys:
        if link.kv_order.complete:
            keys = link.dkv(gradients, keys, rounded_keys(link))
    dk, dv = (jnp.zeros_like(key), jnp.zeros_like(value)) if keys is None else keys.whole()
    return joined(dqs).astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)


def _may_round(passes: Sequence[Link]) -> Callable[[Link], bool]:
    """Which of the passes over all tokens may keep their result in the dtype of the query: of many, only the last."""
    return lambda link: len(passes) <= 2 or link is passes[-1]


def _added(state: Rows, more: Rows) -> Rows:
    arrays = tuple(a + b for a, b in zip(state.whole(), more.whole(), strict=True))
    return Rows(RowOrder(state.order.length), arrays)
