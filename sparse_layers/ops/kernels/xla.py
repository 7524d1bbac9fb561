"""Block-sparse attention in plain XLA: the default on CPU, and what every other platform can fall back to.

A pass walks over the lists of its blocks of queries (forward) or of keys (backward), one after the other: free entries
first, without any mask, then masked ones. Nothing of size T x S exists at any time, and the work is proportional to the
active blocks. Arithmetic is in float32 (float64 for float64 inputs).

Blocks are laid out [list and block, B, K, rows, H]: one index selects contiguous memory, and one batched matrix product
serves all batch entries and heads that share a list. K counts key heads; the query heads of a group are folded into the
rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..planning.block_lists import BlockLists
from ..planning.row_orders import Reordered
from .call import Call
from .numerics import accumulator_dtype, lowered_lse, merge_by_lse
from .operands import Gradients, Operands
from .pass_blocks import PassBlocks, blocks_of_pass, head_groups_of, join_heads
from .transforms import vmap_as_batch


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why this implementation cannot serve the call: it serves every call that is right."""
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention out [B, T, N, Hv] in the dtype of the query, and its lse [B, T, N] in float32 (or float64)."""
    return _mapped(functools.partial(_forward, call), operands)


def _mapped(function: Callable[..., Any], operands: Operands, *by_query: jax.Array) -> Any:
    """function(operands, *by_query). Under `jax.vmap`, lists of run time become those of more batch entries.

    Mapped one by one, their loops would run as long as the longest of all, and copy what they have at every step.
    """
    if operands.segments is None and operands.mask is None and operands.selection is None:
        return function(operands, *by_query)
    return vmap_as_batch(function, math.inf, operands, *by_query)


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    query, value, sinks = operands.query, operands.value, operands.sinks
    wide = accumulator_dtype(query.dtype)
    lse = jnp.full(query.shape[:3], -jnp.inf, wide)
    if sinks is not None:
        lse = jnp.broadcast_to(sinks.astype(wide)[None, None], lse.shape)
    state = jnp.zeros((*query.shape[:3], value.shape[-1]), wide), lse

    def run(links, arrays):
        q, k, v, *state = arrays
        for link in links:
            state = merge_by_lse(state, _forward_pass(call, link, q, k, v))
        return tuple(state)

    out, lse = _by_head_group(call, operands, run, (query, *state), dkv=False)
    return out.astype(query.dtype), lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Gradients of query, key and value, in their dtypes.

    Every pass uses the final ``lse`` [B, T, N]; ``delta`` [B, T, N] is sum(out * dout) less the gradient of lse.
    """
    return _mapped(functools.partial(_backward, call), operands, lse, delta, dout)


def _backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    def run(links, arrays):
        q, k, v, *rest = arrays
        grads = [_backward_pass(call, link, q, k, v, *rest) for link in links]
        empty = [jnp.zeros(x.shape, lse.dtype) for x in (q, k, v)]
        return tuple(sum(parts, start) for start, *parts in zip(empty, *grads, strict=True))

    return _of_operands(operands, *_by_head_group(call, operands, run, (operands.query, lse, delta, dout), dkv=True))


def _of_operands(operands: Operands, dq, dk, dv) -> Gradients:
    """Gradients in the dtypes of query, key and value, those of repeated key heads summed up."""
    dk, dv = (
        x.reshape(*like.shape[:3], x.shape[2] // like.shape[2], x.shape[3]).sum(3)
        for x, like in ((dk, operands.key), (dv, operands.value))
    )
    return Gradients(dq.astype(operands.query.dtype), dk.astype(operands.key.dtype), dv.astype(operands.value.dtype))


# --- heads -----------------------------------------------------------------------------------------------------------


# Queries of a block where each chooses by itself. Fewer are no faster, more meet more blocks that few of them chose.
_LEAST_ROWS = 16


def _uses_mask_tiles(masks: Sequence[Reordered], shape: tuple[int, int]) -> bool:
    """True if partial blocks are looked up: several masks are not computed in one pass, and some not at all."""
    return len(masks) > 1 or not masks[0].computable


def _by_head_group(call: Call, operands: Operands, run: Callable, by_query: Sequence[jax.Array], *, dkv: bool):
    """Calls run(links, (q, k, v, ...)) once for each head group, and joins the heads again.

    With several groups the key heads are repeated to one a query head: the query heads of one key head then need not
    be in one group. Gradients of keys come back repeated, too.
    """
    key, value = operands.key, operands.value
    query, *others = by_query
    groups = head_groups_of(call, operands, merge=operands.selection is not None)
    rows = _LEAST_ROWS if operands.selection is None else max(_LEAST_ROWS, operands.selection.granularity)
    if len(groups) > 1:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    results = []
    for group in groups:
        links = [
            blocks_of_pass(call, operands, group, passes, rows, _uses_mask_tiles, dkv=dkv) for passes in group.passes
        ]
        results.append(run(links, [group.select(x) for x in (query, key, value, *others)]))
    return [join_heads(parts) for parts in zip(*results, strict=True)]


# --- passes ----------------------------------------------------------------------------------------------------------


def _forward_pass(call: Call, link: PassBlocks, query, key, value):
    """(out, lse) of one pass in token order; rows that the pass does not hold have out 0 and lse -inf."""
    blocks = _Blocks.of(link, False, query, key, value)
    wide, precision = _arithmetic(query)

    def row(_, inputs):
        line, q, (first, masked, end) = inputs
        q = q.astype(wide) * call.scale

        def step(in_part, entry, state):
            best, total, out = state
            j = blocks.minor(entry)
            k, v = blocks.at(blocks.key, line.key + j), blocks.at(blocks.value, line.key + j)
            scores = _capped(jnp.einsum("bkqd,bksd->bkqs", q, k, precision=precision), call)[0]
            if in_part:
                scores = jnp.where(blocks.allowed(line, line.block, j, entry), scores, -jnp.inf)
            raised = jnp.maximum(best, scores.max(-1))
            shift = jnp.where(raised == -jnp.inf, 0, raised)
            weights, old = jnp.exp(scores - shift[..., None]), jnp.exp(best - shift)
            update = jnp.einsum("bkqs,bksd->bkqd", weights, v, precision=precision)
            return raised, total * old + weights.sum(-1), out * old[..., None] + update

        none = jnp.zeros_like(q[..., 0])
        state = none - jnp.inf, none, jnp.broadcast_to(none[..., None], (*none.shape, value.shape[-1]))
        best, total, out = blocks.walk((first, masked, end), step, state)
        return None, (out / jnp.where(total == 0, 1, total)[..., None], best + jnp.log(total))

    _, (out, lse) = lax.scan(row, None, (blocks.lines, blocks.query, blocks.spans))
    return blocks.of_rows(out), blocks.of_rows(lse, -jnp.inf)


def _backward_pass(call: Call, link: PassBlocks, query, key, value, lse, delta, dout):
    """(dq, dk, dv) of one pass in token order, in the accumulator's dtype."""
    blocks = _Blocks.of(link, True, query, key, value)
    wide, precision = _arithmetic(query)
    # A row that attends to nothing has no weights to differentiate: any finite shift gives exp(-inf) = 0.
    by_row = [jnp.where(lse == -jnp.inf, 0, lse), delta, dout]
    lse, delta, dout = map(blocks.rows, by_row)
    product = functools.partial(jnp.einsum, precision=precision)

    def column(dq, inputs):
        line, span = inputs
        j = line.block
        k, v = blocks.at(blocks.key, line.key + j), blocks.at(blocks.value, line.key + j)

        def step(in_part, entry, state):
            dk, dv, dq = state
            i = blocks.minor(entry)
            place = line.query + i
            # Scaled as in the forward pass: rounded otherwise, huge scores would fall below their lse.
            q, do = blocks.at(blocks.query, place) * call.scale, blocks.at(dout, place)
            scores, slope = _capped(product("bkqd,bksd->bkqs", q, k), call)
            weights = _weights(scores, blocks.at(lse, place)[..., None])
            if in_part:
                weights = jnp.where(blocks.allowed(line, i, j, entry), weights, 0)
            dscores = weights * (product("bkqd,bksd->bkqs", do, v) - blocks.at(delta, place)[..., None])
            if slope is not None:
                dscores = dscores * slope
            dv = dv + product("bkqs,bkqd->bksd", weights, do)
            dk = dk + product("bkqs,bkqd->bksd", dscores, q)
            dq_block = lax.dynamic_index_in_dim(dq, place, keepdims=False) + product("bkqs,bksd->bkqd", dscores, k)
            return dk, dv, lax.dynamic_update_index_in_dim(dq, dq_block, place, 0)

        dk, dv, dq = blocks.walk(span, step, (jnp.zeros_like(k), jnp.zeros_like(v), dq))
        return dq, (dk, dv)

    dq = jnp.zeros_like(blocks.query, wide)
    dq, grads = lax.scan(column, dq, (blocks.lines, blocks.spans))
    dk, dv = (blocks.of_columns(x, blocks.layout.lists) for x in grads)
    return blocks.of_rows(dq * call.scale), dk, dv


# --- second derivatives ----------------------------------------------------------------------------------------------
#
# Loops whose length is known at run time only have no derivative in reverse mode. What the op computes beside its
# derivative is therefore said once more, as sums over a fixed number of pairs of blocks, which JAX differentiates in
# either mode and to any order. The scores of a pair are computed again wherever they are needed, never kept.


@forward.defjvp
def _forward_along(call, primals, tangents):
    return jax.jvp(functools.partial(_forward_by_pairs, call), primals, tangents)


@backward.defjvp
def _backward_along(call, primals, tangents):
    return jax.jvp(functools.partial(_backward_by_pairs, call), primals, tangents)


def _forward_by_pairs(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    # Any shift of the scores cancels; by lse, sums of weights are about 1.
    shift = lowered_lse(forward(call, jax.lax.stop_gradient(operands))[1])
    shift = jnp.where(shift == -jnp.inf, 0, shift)

    def pair(rows, columns, allowed):
        (q, shift), (k, v) = rows, columns
        weights = _weights(_pair_of_scores(call, q, k, allowed)[0], shift[..., None])
        return (weights.sum(-1), jnp.einsum("bkqs,bksd->bkqd", weights, v, precision=_arithmetic(v)[1])), ()

    def run(links, arrays):
        q, k, v, shift = arrays
        parts = [_by_pairs(link, pair, (q, shift), (k, v))[0] for link in links]
        start = jnp.zeros_like(shift), jnp.zeros((*shift.shape, v.shape[-1]), shift.dtype)
        return tuple(sum(column, zero) for zero, *column in zip(start, *parts, strict=True))

    total, out = _by_head_group(call, operands, run, (operands.query, shift), dkv=False)
    if operands.sinks is not None:
        total = total + _weights(operands.sinks.astype(shift.dtype)[None, None], shift)
    some = total > 0
    safe = jnp.where(some, total, 1)
    return (out / safe[..., None]).astype(operands.query.dtype), jnp.where(some, shift + jnp.log(safe), -jnp.inf)


def _backward_by_pairs(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    lse = jnp.where(lse == -jnp.inf, 0, lse)

    def pair(rows, columns, allowed):
        (q, lse, delta, dout), (k, v) = rows, columns
        product = functools.partial(jnp.einsum, precision=_arithmetic(q)[1])
        scores, slope = _pair_of_scores(call, q, k, allowed)
        weights = _weights(scores, lse[..., None])
        dscores = weights * (product("bkqd,bksd->bkqs", dout, v) - delta[..., None]) * call.scale
        dscores = dscores if slope is None else dscores * slope
        dk, dv = product("bkqs,bkqd->bksd", dscores, q), product("bkqs,bkqd->bksd", weights, dout)
        return (product("bkqs,bksd->bkqd", dscores, k),), (dk, dv)

    def run(links, arrays):
        q, k, v, *rest = arrays
        parts = [sum(_by_pairs(link, pair, (q, *rest), (k, v)), ()) for link in links]
        start = [jnp.zeros(x.shape, lse.dtype) for x in (q, k, v)]
        return tuple(sum(column, zero) for zero, *column in zip(start, *parts, strict=True))

    by_query = operands.query, lse, delta, dout
    return _of_operands(operands, *_by_head_group(call, operands, run, by_query, dkv=False))


def _pair_of_scores(call: Call, q: jax.Array, k: jax.Array, allowed: jax.Array):
    """Scores of a pair of blocks, -inf where it may not attend, and the slope of the soft cap at them."""
    scores = jnp.einsum("bkqd,bksd->bkqs", q, k, precision=_arithmetic(q)[1]) * call.scale
    scores, slope = _capped(scores, call)
    return jnp.where(allowed, scores, -jnp.inf), slope


def _by_pairs(link: PassBlocks, pair: Callable[..., Any], rows: Sequence[Any], columns: tuple[Any, Any]):
    """The sums, in token order, of what pair(row blocks, column blocks, allowed) gives to its rows and to its columns.

    Args:
      link: the pass.
      pair: takes blocks [B, K, G * bq, ..] and [B, K, bkv, ..] in the accumulator's dtype, gives tuples of such.
      rows: the query and further arrays [B, T, N, ..], in token order.
      columns: key and value.
    """
    blocks = _Blocks.of(link, False, rows[0], *columns)
    of_rows = tuple(map(blocks.rows, rows))
    of_columns = blocks.key, blocks.value
    # Lists follow each other. Entries behind the last one stand for the last, lest blocks that nobody chose be read.
    spans, lines = jnp.asarray(blocks.spans), jax.tree.map(jnp.asarray, blocks.lines)
    entries = jnp.arange(len(blocks.lists.block))
    live = entries < spans[-1, 2]
    entries = jnp.minimum(entries, jnp.maximum(spans[-1, 2] - 1, 0))
    numbers = jnp.minimum(jnp.searchsorted(spans[:, 2], entries, side="right"), len(spans) - 1)

    @jax.checkpoint
    def of_cell(of_rows, of_columns, number, entry, live):
        line, j = jax.tree.map(lambda x: x[number], lines), blocks.minor(entry)
        free = entry < spans[number, 1]
        allowed = live & (free | blocks.allowed(line, line.block, j, entry)) if blocks.some(1) else live
        places = line.query + line.block, line.key + j
        at = [
            tuple(blocks.at(x, place) for x in side) for side, place in zip((of_rows, of_columns), places, strict=True)
        ]
        return places, *pair(*at, allowed)

    def step(sums, cell):
        places, *found = of_cell(of_rows, of_columns, *cell)
        sides = zip(places, sums, found, strict=True)
        return tuple(tuple(map(lambda sum, x, at=at: sum.at[at].add(x), *xs)) for at, *xs in sides), None

    _, *shapes = jax.eval_shape(of_cell, of_rows, of_columns, numbers[0], entries[0], live[0])
    start = [
        tuple(jnp.zeros_like(side[0], x.dtype, (len(side[0]), *x.shape)) for x in own)
        for side, own in zip((of_rows, of_columns), shapes, strict=True)
    ]
    (by_row, by_column), _ = lax.scan(step, (*start,), (numbers, entries, live))
    return tuple(map(blocks.of_rows, by_row)), tuple(blocks.of_columns(x, blocks.layout.kv_lists) for x in by_column)


def _weights(scores: jax.Array, lse: jax.Array) -> jax.Array:
    """Computes exp(scores - lse), at most 1 as `lowered_lse` asks for, with the derivatives of the exponential."""
    logs = scores - lse
    return jnp.exp(logs - lax.stop_gradient(jnp.maximum(logs, 0)))


def _capped(scores: jax.Array, call: Call) -> tuple[jax.Array, jax.Array | None]:
    """Soft-capped scores and the slope of the cap at them."""
    if call.soft_cap is None:
        return scores, None
    squashed = jnp.tanh(scores / call.soft_cap)
    return squashed * call.soft_cap, 1 - squashed * squashed


def _arithmetic(query: jax.Array):
    """The dtype that sums are kept in, and the precision of products: no TF32 or bf16 passes for float32 inputs."""
    full = query.dtype in (jnp.float32, jnp.float64)
    return accumulator_dtype(query.dtype), lax.Precision.HIGHEST if full else lax.Precision.DEFAULT


# --- blocks ----------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A block of the major side and where its list's blocks lie; or the arrays of all of them."""

    block: Any  # the number of the block
    query: Any  # where the list's blocks of queries begin
    key: Any  # where its blocks of keys begin
    batch: Any  # which batch entry it is of, or 0 if lists are those of all


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """How batch entries and heads are laid out: by the lists that they have in common.

    Query head (k * lists + list) * group + g has the given list, and key head k of those in the list's blocks of keys.
    If there are several lists, these have one key head only, which several of them may share.
    """

    batches: int  # lists by batch entry, or 1
    lists: int  # lists by head
    kv_heads: int  # key heads in a block
    kv_lists: int  # lists of different key heads
    group: int  # query heads in a block, for each of its key heads

    @staticmethod
    def of(lists: BlockLists, heads: int, kv_heads: int) -> "_Layout":
        batches, by_head = lists.spans.shape[:2]
        if by_head == 1:
            return _Layout(batches, 1, kv_heads, 1, heads // kv_heads)
        return _Layout(batches, by_head, 1, kv_heads, heads // by_head)

    def blocked(self, x: jax.Array, block: int, lists: int, group: int = 1) -> jax.Array:
        """[B, rows, heads, ...] -> [batches * lists * rows / block, B / batches, K, group * block, ...]."""
        b, rows, heads, *rest = x.shape
        shared = b // max(self.batches, 1)
        x = x.reshape(self.batches, shared, rows // block, block, heads // (lists * group), lists, group, *rest)
        x = x.transpose(0, 5, 2, 1, 4, 6, 3, *range(7, x.ndim))
        return x.reshape(self.batches * lists * (rows // block), shared, x.shape[4], group * block, *rest)

    def unblocked(self, x: jax.Array, lists: int, group: int = 1) -> jax.Array:
        """The inverse of `blocked`."""
        blocks, shared, kv_heads, rows, *rest = x.shape
        each = self.batches * lists
        sizes = self.batches, lists, blocks // max(each, 1), shared, kv_heads, group, rows // group
        x = x.reshape(*sizes, *rest).transpose(0, 3, 2, 6, 4, 1, 5, *range(7, x.ndim + 3))
        return x.reshape(self.batches * shared, sizes[2] * sizes[6], kv_heads * lists * group, *rest)


@dataclasses.dataclass(frozen=True, eq=False)
class _Blocks:
    """The operands of a pass in blocks and row order, its lists, and the mask of any pair of blocks."""

    link: PassBlocks
    layout: _Layout
    lists: BlockLists
    query: jax.Array  # [lists' blocks, B, K, G * bq, H]
    key: jax.Array  # [lists' blocks, B, K, bkv, H]
    value: jax.Array  # [lists' blocks, B, K, bkv, Hv]
    segments: list[jax.Array] | None  # [lists' blocks, B, 1, rows] each, but one list for all heads

    @staticmethod
    def of(link: PassBlocks, kv_major: bool, query, key, value) -> "_Blocks":
        lists = link.pairs.lists(kv_major)
        layout = _Layout.of(lists, query.shape[2], key.shape[2])
        rows, cols = (n * side for n, side in zip(link.pairs.blocks, link.shape, strict=True))
        segments = link.segments
        if segments is not None:
            sides = zip((link.q_order, link.kv_order), segments, (rows, cols), link.shape, strict=True)
            segments = [layout.blocked(order.gather(ids[..., None], n), side, 1) for order, ids, n, side in sides]
        q = layout.blocked(link.q_order.gather(query, rows), link.shape[0], layout.lists, layout.group)
        k, v = (layout.blocked(link.kv_order.gather(x, cols), link.shape[1], layout.kv_lists) for x in (key, value))
        return _Blocks(link, layout, lists, q, k, v, segments)

    @property
    def spans(self) -> Any:
        """[lines, 3], see `BlockLists`."""
        return self.lists.spans.reshape(-1, 3)

    @property
    def lines(self) -> _Line:
        """Those of all blocks of the major side, in the order of the spans."""
        batches, lists, major = self.lists.spans.shape[:3]
        batch, own, block = (x.ravel().astype(np.int32) for x in np.indices((batches, lists, major)))
        queries, keys = self.link.pairs.blocks
        kv = batch * self.layout.kv_lists + own * self.layout.kv_lists // lists
        return _Line(block, (batch * lists + own) * queries, kv * keys, batch)

    def rows(self, x: jax.Array) -> jax.Array:
        """[B, T, N, ...] in token order -> [lists' blocks, B, K, G * bq, ...]."""
        (rows, _), (bq, _) = self.link.pairs.blocks, self.link.shape
        return self.layout.blocked(self.link.q_order.gather(x, rows * bq), bq, self.layout.lists, self.layout.group)

    def of_rows(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """The inverse of `rows`, ``fill`` in tokens without a row."""
        return self.link.q_order.scatter(self.layout.unblocked(x, self.layout.lists, self.layout.group), fill)

    def of_columns(self, x: jax.Array, lists: int) -> jax.Array:
        """Blocks of keys of so many lists in token order, summed up over the lists of one key head."""
        x = self.link.kv_order.scatter(self.layout.unblocked(x, lists))
        b, s, heads, size = x.shape
        each = lists // self.layout.kv_lists
        return x if each == 1 else x.reshape(b, s, heads // each, each, size).sum(3)

    def minor(self, entry: jax.Array) -> jax.Array:
        """The block of the minor side of an entry."""
        return lax.dynamic_index_in_dim(jnp.asarray(self.lists.block), entry, keepdims=False)

    def at(self, x: jax.Array, place: jax.Array) -> jax.Array:
        """The block at a place, in the accumulator's dtype."""
        return lax.dynamic_index_in_dim(x, place, keepdims=False).astype(accumulator_dtype(x.dtype))

    def some(self, part: int) -> bool:
        """Whether there may be free entries (part 0), or masked ones (part 1)."""
        spans = self.spans
        return not self.lists.static or bool((spans[:, part] < spans[:, part + 1]).any())

    def walk(self, span: Any, step: Callable[..., Any], state: Any) -> Any:
        """step(is it masked, entry, state) over the free entries of a list, and then over the masked ones."""
        for part in (0, 1):
            if self.some(part):
                state = lax.fori_loop(span[part], span[part + 1], functools.partial(step, bool(part)), state)
        return state

    def allowed(self, line: _Line, i: jax.Array, j: jax.Array, entry: jax.Array) -> jax.Array:
        """Which pairs of a masked entry, blocks (i, j), may attend: [.., G * bq, bkv]."""
        (bq, bkv), link, lists = self.link.shape, self.link, self.lists
        found = [jnp.ones(self.link.shape, bool)]
        if link.rule is not None:
            found.append(link.rule(i * bq + jnp.arange(bq)[:, None], j * bkv + jnp.arange(bkv)[None, :]))
        elif link.tiles is not None:
            tile = lax.dynamic_index_in_dim(jnp.asarray(lists.tile), entry, keepdims=False)
            own = lax.dynamic_index_in_dim(jnp.asarray(link.tiles), jnp.maximum(tile, 0), keepdims=False)
            found.append(own | (tile < 0))
        if lists.active_rows_mask is not None:
            bits = lax.dynamic_index_in_dim(lists.active_rows_mask, entry, keepdims=False)
            part = np.arange(bq, dtype=np.int32) // link.granularity
            found.append(((bits >> part) & 1).astype(bool)[:, None])
        if self.segments is not None:
            places = (line.batch * n + x for n, x in zip(link.pairs.blocks, (i, j), strict=True))
            q, k = (lax.dynamic_index_in_dim(s, x, keepdims=False) for s, x in zip(self.segments, places, strict=True))
            found.append((q[..., :, None] == k[..., None, :]) & (q[..., :, None] >= 0))  # [B, 1, bq, bkv]
        allowed = functools.reduce(jnp.logical_and, (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in found))
        return jnp.tile(allowed, (1, 1, self.layout.group, 1))
