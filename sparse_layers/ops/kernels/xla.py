"""Block-sparse attention in plain XLA: the default on CPU, and what every other platform can fall back to.

A pass walks over block rows (forward) or block columns (backward) and, inside, over the active blocks of each, read
from its MaskInfo: full blocks first, without any mask, then partial ones. Nothing of size T x S exists at any time,
and the work is proportional to the active blocks. Arithmetic is in float32 (float64 for float64 inputs).

Blocks are laid out [block, B, K, rows, H]: one block index selects contiguous memory, and one batched matrix product
serves all batches and heads. K counts key heads; the G = N / K query heads of a group are folded into the rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..planning.mask_info import process_dynamic_mask
from ..planning.plan import Pass
from ..planning.views import RowOrder
from .call import Call, Operands, accumulator, joined, merged


def unsupported(call: Call, operands: Operands) -> str | None:
    """Why this implementation cannot serve the call: it serves every call that is right."""
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention out [B, T, N, Hv] in the dtype of the query, and its lse [B, T, N] in float32 (or float64)."""
    query, value, sinks = operands.query, operands.value, operands.sinks
    wide = accumulator(query.dtype)
    lse = jnp.full(query.shape[:3], -jnp.inf, wide)
    if sinks is not None:
        lse = jnp.broadcast_to(sinks.astype(wide)[None, None], lse.shape)
    state = jnp.zeros((*query.shape[:3], value.shape[-1]), wide), lse

    def run(links, arrays):
        q, k, v, *state = arrays
        for link in links:
            state = merged(state, _forward_pass(call, link, q, k, v, operands.segments))
        return tuple(state)

    out, lse = _by_head_class(call, operands, run, (query, *state), dkv=False)
    return out.astype(query.dtype), lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def backward(
    call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value, in their dtypes.

    Every pass uses the final ``lse`` [B, T, N]; ``delta`` [B, T, N] is sum(out * dout) less the gradient of lse.
    """

    def run(links, arrays):
        q, k, v, *rest = arrays
        grads = [_backward_pass(call, link, q, k, v, operands.segments, *rest) for link in links]
        empty = [jnp.zeros(x.shape, lse.dtype) for x in (q, k, v)]
        return tuple(sum(parts, start) for start, *parts in zip(empty, *grads, strict=True))

    return _of_operands(operands, *_by_head_class(call, operands, run, (operands.query, lse, delta, dout), dkv=True))


def _of_operands(operands: Operands, dq, dk, dv) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients in the dtypes of query, key and value, those of repeated key heads summed up."""
    dk, dv = (
        x.reshape(*like.shape[:3], x.shape[2] // like.shape[2], x.shape[3]).sum(3)
        for x, like in ((dk, operands.key), (dv, operands.value))
    )
    return dq.astype(operands.query.dtype), dk.astype(operands.key.dtype), dv.astype(operands.value.dtype)


# --- heads -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Link:
    """One pass with the block lists of the direction at hand."""

    q_order: RowOrder
    kv_order: RowOrder
    shape: tuple[int, int]
    mask: Callable[[jax.Array, jax.Array], jax.Array] | None  # computes a partial block from row indices ...
    tiles: jax.Array | np.ndarray | None  # ... or else it is looked up here, [tiles, bq, bkv]
    block_mask: Any  # this and the next two: numpy or JAX integers [rows or columns, width]
    data_next: Any
    mask_next: Any  # None without tiles

    def partial_loop(self, full: Any, total: Any, step: Callable, state: Any) -> Any:
        """The loop over partial blocks, left out where there can be none: a mask without rule and tiles has none."""
        return state if self.mask is None and self.tiles is None else lax.fori_loop(full, total, step, state)

    @staticmethod
    def of(link: Pass, dkv: bool) -> "_Link":
        info, shape = (link.dkv, link.bwd_shape) if dkv else (link.fwd, link.fwd_shape)
        lists = [x if x is None else x[0].T if dkv else x[0] for x in (info.block_mask, info.data_next, info.mask_next)]
        tiles = info.partial_mask_blocks
        tiles = tiles if tiles is None or not dkv else tiles.swapaxes(1, 2)
        return _Link(link.q_order, link.kv_order, shape, link.mask if link.mask.computable else None, tiles, *lists)


def _by_head_class(call: Call, operands: Operands, run: Callable, by_query: Sequence[jax.Array], *, dkv: bool):
    """Calls run(links, (q, k, v, ...)) once for each mask, with the heads that use it; joins the heads again.

    Heads h, h + C, h + 2C, ... share mask h of C. With C > 1 the key heads are repeated to one a query head, since a
    group of query heads then need not share a mask; gradients of keys come back repeated, too.
    """
    key, value = operands.key, operands.value
    query, *others = by_query
    classes = len(call.chains) if operands.mask is None else operands.mask.shape[0]
    if classes > 1:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    arrays = [[x[:, :, c::classes] for c in range(classes)] for x in (query, key, value, *others)]
    if operands.mask is None:
        links = [[_Link.of(link, dkv) for link in chain] for chain in call.chains]
        results = [run(*args) for args in zip(links, zip(*arrays, strict=True), strict=True)]
        return [joined(parts) for parts in zip(*results, strict=True)]

    shape = call.bwd_shape if dkv else call.fwd_shape
    ends = [(0, -length % block) for length, block in zip(operands.mask.shape[1:], shape, strict=True)]
    info, _ = process_dynamic_mask(jnp.pad(operands.mask, [(0, 0), *ends]), shape, is_dkv=dkv)
    tiles = info.partial_mask_blocks.reshape(-1, *info.partial_mask_blocks.shape[-2:])
    tiles = tiles.swapaxes(1, 2) if dkv else tiles
    orders = RowOrder(query.shape[1]), RowOrder(key.shape[1])

    def one(slices):
        lists = [x.T if dkv else x for x in slices[0]]
        return run([_Link(*orders, shape, None, tiles, *lists)], slices[1])

    lists = info.block_mask, info.data_next, info.mask_next
    results = lax.map(one, (lists, tuple(jnp.stack(parts) for parts in arrays)))
    return [joined(list(parts)) for parts in results]


# --- passes ----------------------------------------------------------------------------------------------------------


def _forward_pass(call: Call, link: _Link, query, key, value, segments):
    """(out, lse) of one pass in token order; rows that the pass does not hold have out 0 and lse -inf."""
    blocks, lists = _prepare(link, query, key, value, segments)
    wide, precision = _arithmetic(query)

    def row(_, inputs):
        i, q, index, tile, full, total = inputs
        q = q.astype(wide) * call.scale

        def step(partial, slot, state):
            best, total, out = state
            j = index[slot]
            scores = _capped(jnp.einsum("bkqd,bksd->bkqs", q, blocks.at(blocks.key, j), precision=precision), call)[0]
            allowed = blocks.allowed(i, j, tile[slot] if partial else None)
            if allowed is not None:
                scores = jnp.where(allowed, scores, -jnp.inf)
            raised = jnp.maximum(best, scores.max(-1))
            shift = jnp.where(raised == -jnp.inf, 0, raised)
            weights, old = jnp.exp(scores - shift[..., None]), jnp.exp(best - shift)
            update = jnp.einsum("bkqs,bksd->bkqd", weights, blocks.at(blocks.value, j), precision=precision)
            return raised, total * old + weights.sum(-1), out * old[..., None] + update

        none = jnp.zeros_like(q[..., 0])
        state = none - jnp.inf, none, jnp.broadcast_to(none[..., None], (*none.shape, value.shape[-1]))
        state = lax.fori_loop(0, full, functools.partial(step, False), state)
        best, total, out = link.partial_loop(full, total, functools.partial(step, True), state)
        return None, (out / jnp.where(total == 0, 1, total)[..., None], best + jnp.log(total))

    _, (out, lse) = lax.scan(row, None, (jnp.arange(len(lists.full)), blocks.query, *lists))
    out, lse = _unblocked(out, blocks.group), _unblocked(lse, blocks.group)
    return link.q_order.scatter(out), link.q_order.scatter(lse, -jnp.inf)


def _backward_pass(call: Call, link: _Link, query, key, value, segments, lse, delta, dout):
    """(dq, dk, dv) of one pass in token order, in the accumulator's dtype."""
    blocks, lists = _prepare(link, query, key, value, segments, columns=True)
    wide, precision = _arithmetic(query)
    # A row that attends to nothing has no weights to differentiate: any finite shift gives exp(-inf) = 0.
    by_row = [jnp.where(lse == -jnp.inf, 0, lse), delta, dout]
    lse, delta, dout = (blocks.rows(link.q_order, x) for x in by_row)
    product = functools.partial(jnp.einsum, precision=precision)

    def column(dq, inputs):
        j, k, v, index, tile, full, total = inputs
        k, v = k.astype(wide) * call.scale, v.astype(wide)

        def step(partial, slot, state):
            dk, dv, dq = state
            i = index[slot]
            q, do = blocks.at(blocks.query, i), blocks.at(dout, i)
            scores, slope = _capped(product("bkqd,bksd->bkqs", q, k), call)
            weights = jnp.exp(scores - blocks.at(lse, i)[..., None])
            allowed = blocks.allowed(i, j, tile[slot] if partial else None)
            if allowed is not None:
                weights = jnp.where(allowed, weights, 0)
            dscores = weights * (product("bkqd,bksd->bkqs", do, v) - blocks.at(delta, i)[..., None])
            if slope is not None:
                dscores = dscores * slope
            dv = dv + product("bkqs,bkqd->bksd", weights, do)
            dk = dk + product("bkqs,bkqd->bksd", dscores, q)
            dq_block = lax.dynamic_index_in_dim(dq, i, keepdims=False) + product("bkqs,bksd->bkqd", dscores, k)
            return dk, dv, lax.dynamic_update_index_in_dim(dq, dq_block, i, 0)

        state = jnp.zeros_like(k), jnp.zeros_like(v), dq
        state = lax.fori_loop(0, full, functools.partial(step, False), state)
        dk, dv, dq = link.partial_loop(full, total, functools.partial(step, True), state)
        return dq, (dk * call.scale, dv)

    dq = jnp.zeros_like(blocks.query, wide)
    dq, (dk, dv) = lax.scan(column, dq, (jnp.arange(len(lists.full)), blocks.key, blocks.value, *lists))
    dq, dk, dv = _unblocked(dq, blocks.group), _unblocked(dk), _unblocked(dv)
    return link.q_order.scatter(dq), link.kv_order.scatter(dk), link.kv_order.scatter(dv)


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
    shift = forward(call, jax.lax.stop_gradient(operands))[1]
    shift = jnp.where(shift == -jnp.inf, 0, shift)

    def pair(rows, columns, allowed):
        (q, shift), (k, v) = rows, columns
        weights = jnp.exp(_pair_of_scores(call, q, k, allowed)[0] - shift[..., None])
        return (weights.sum(-1), jnp.einsum("bkqs,bksd->bkqd", weights, v, precision=_arithmetic(v)[1])), ()

    def run(links, arrays):
        q, k, v, shift = arrays
        parts = [_by_pairs(link, pair, (q, shift), (k, v), operands.segments)[0] for link in links]
        start = jnp.zeros_like(shift), jnp.zeros((*shift.shape, v.shape[-1]), shift.dtype)
        return tuple(sum(column, zero) for zero, *column in zip(start, *parts, strict=True))

    total, out = _by_head_class(call, operands, run, (operands.query, shift), dkv=False)
    if operands.sinks is not None:
        total = total + jnp.exp(operands.sinks.astype(shift.dtype)[None, None] - shift)
    some = total > 0
    safe = jnp.where(some, total, 1)
    return (out / safe[..., None]).astype(operands.query.dtype), jnp.where(some, shift + jnp.log(safe), -jnp.inf)


def _backward_by_pairs(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    lse = jnp.where(lse == -jnp.inf, 0, lse)

    def pair(rows, columns, allowed):
        (q, lse, delta, dout), (k, v) = rows, columns
        product = functools.partial(jnp.einsum, precision=_arithmetic(q)[1])
        scores, slope = _pair_of_scores(call, q, k, allowed)
        weights = jnp.exp(scores - lse[..., None])
        dscores = weights * (product("bkqd,bksd->bkqs", dout, v) - delta[..., None]) * call.scale
        dscores = dscores if slope is None else dscores * slope
        dk, dv = product("bkqs,bkqd->bksd", dscores, q), product("bkqs,bkqd->bksd", weights, dout)
        return (product("bkqs,bksd->bkqd", dscores, k),), (dk, dv)

    def run(links, arrays):
        q, k, v, *rest = arrays
        parts = [sum(_by_pairs(link, pair, (q, *rest), (k, v), operands.segments), ()) for link in links]
        start = [jnp.zeros(x.shape, lse.dtype) for x in (q, k, v)]
        return tuple(sum(column, zero) for zero, *column in zip(start, *parts, strict=True))

    by_query = operands.query, lse, delta, dout
    return _of_operands(operands, *_by_head_class(call, operands, run, by_query, dkv=False))


def _pair_of_scores(call: Call, q: jax.Array, k: jax.Array, allowed: jax.Array):
    """Scores of a pair of blocks, -inf where it may not attend, and the slope of the soft cap at them."""
    scores = jnp.einsum("bkqd,bksd->bkqs", q, k, precision=_arithmetic(q)[1]) * call.scale
    scores, slope = _capped(scores, call)
    return jnp.where(allowed, scores, -jnp.inf), slope


def _by_pairs(link: _Link, pair: Callable[..., Any], rows: Sequence[Any], columns: tuple[Any, Any], segments: Any):
    """The sums, in token order, of what pair(row blocks, column blocks, allowed) gives to its rows and to its columns.

    Args:
      link: the pass, with lists by row.
      pair: takes blocks [B, K, G * bq, ..] and [B, K, bkv, ..] in the accumulator's dtype, gives tuples of such.
      rows: the query and further arrays [B, T, N, ..], in token order.
      columns: key and value.
      segments: of the operands.
    """
    blocks, lists = _prepare(link, rows[0], columns[0], columns[1], segments)
    of_rows = tuple(blocks.rows(link.q_order, x) for x in rows)
    of_columns = blocks.key, blocks.value
    width = lists.index.shape[1]
    lists = jax.tree.map(jnp.asarray, lists)

    @jax.checkpoint
    def of_cell(of_rows, of_columns, i, slot):
        j = lists.index[i, slot]
        allowed, in_segments = slot < lists.total[i], blocks.allowed(i, j, None)
        if in_segments is not None:
            allowed = allowed & in_segments
        if link.mask is not None or link.tiles is not None:
            allowed = allowed & ((slot < lists.full[i]) | blocks.allowed(i, j, lists.tile[i, slot]))
        at = [tuple(blocks.at(x, place) for x in side) for side, place in ((of_rows, i), (of_columns, j))]
        return j, *pair(*at, allowed)

    def step(sums, cell):
        i, slot = jnp.divmod(cell, width)
        j, *found = of_cell(of_rows, of_columns, i, slot)
        sides = zip((i, j), sums, found, strict=True)
        return tuple(tuple(map(lambda sum, x, at=at: sum.at[at].add(x), *xs)) for at, *xs in sides), None

    _, *shapes = jax.eval_shape(of_cell, of_rows, of_columns, 0, 0)
    start = [
        tuple(jnp.zeros_like(side[0], x.dtype, (len(side[0]), *x.shape)) for x in own)
        for side, own in zip((of_rows, of_columns), shapes, strict=True)
    ]
    (by_row, by_column), _ = lax.scan(step, (*start,), jnp.arange(len(lists.full) * width))
    return (
        tuple(link.q_order.scatter(_unblocked(x, blocks.group)) for x in by_row),
        tuple(link.kv_order.scatter(_unblocked(x)) for x in by_column),
    )


def _capped(scores: jax.Array, call: Call) -> tuple[jax.Array, jax.Array | None]:
    """Soft-capped scores and the slope of the cap at them."""
    if call.soft_cap is None:
        return scores, None
    squashed = jnp.tanh(scores / call.soft_cap)
    return squashed * call.soft_cap, 1 - squashed * squashed


def _arithmetic(query: jax.Array):
    """The dtype that sums are kept in, and the precision of products: no TF32 or bf16 passes for float32 inputs."""
    full = query.dtype in (jnp.float32, jnp.float64)
    return accumulator(query.dtype), lax.Precision.HIGHEST if full else lax.Precision.DEFAULT


# --- blocks ----------------------------------------------------------------------------------------------------------


class _Lists(NamedTuple):
    """Active blocks of each row (or column): full ones first, then partial ones, then padding."""

    index: Any  # [rows, width]: the other side's block
    tile: Any  # [rows, width]: index into the link's tiles (0 where it has none)
    full: Any  # [rows]: number of full blocks
    total: Any  # [rows]: number of active blocks


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The operands of a pass in blocks and row order, and the mask of any pair of blocks."""

    link: _Link
    group: int
    query: jax.Array  # [blocks, B, K, G * bq, H]
    key: jax.Array  # [blocks, B, K, bkv, H]
    value: jax.Array  # [blocks, B, K, bkv, Hv]
    segments: tuple[jax.Array, jax.Array] | None  # [blocks, B, 1, rows] each

    def rows(self, order: RowOrder, x: jax.Array) -> jax.Array:
        """[B, T, N, ...] in token order -> [blocks, B, K, G * bq, ...]."""
        return _blocked(order.gather(x, len(self.query) * self.link.shape[0]), self.link.shape[0], self.group)

    def at(self, x: jax.Array, i: jax.Array) -> jax.Array:
        """Block i, in the accumulator's dtype."""
        return lax.dynamic_index_in_dim(x, i, keepdims=False).astype(accumulator(x.dtype))

    def allowed(self, i: jax.Array, j: jax.Array, tile: jax.Array | None) -> jax.Array | None:
        """Which pairs of blocks (i, j) may attend, [.., G * bq, bkv]; None for all. ``tile`` None: a full block."""
        bq, bkv = self.link.shape
        allowed = None
        if tile is not None:
            if self.link.mask is not None:
                q, k = i * bq + jnp.arange(bq)[:, None], j * bkv + jnp.arange(bkv)[None, :]
                allowed = self.link.mask(q, k)
            else:
                allowed = lax.dynamic_index_in_dim(jnp.asarray(self.link.tiles), tile, keepdims=False)
            allowed = jnp.tile(allowed, (self.group, 1))[None, None]
        if self.segments is not None:
            q, k = (lax.dynamic_index_in_dim(s, x, keepdims=False) for s, x in zip(self.segments, (i, j), strict=True))
            same = (q[..., :, None] == k[..., None, :]) & (q[..., :, None] >= 0)
            same = jnp.tile(same, (1, 1, self.group, 1))  # [B, 1, G * bq, bkv]
            allowed = same if allowed is None else allowed & same
        return allowed


def _prepare(link: _Link, query, key, value, segments, *, columns: bool = False) -> tuple[_Blocks, _Lists]:
    bq, bkv = link.shape
    rows, cols = -(-link.q_order.rows // bq) * bq, -(-link.kv_order.rows // bkv) * bkv
    group = query.shape[2] // key.shape[2]
    if segments is not None:
        q_ids, kv_ids = (s[:, :, None] for s in segments)
        segments = _blocked(link.q_order.gather(q_ids, rows), bq), _blocked(link.kv_order.gather(kv_ids, cols), bkv)
    blocks = _Blocks(
        link,
        group,
        _blocked(link.q_order.gather(query, rows), bq, group),
        _blocked(link.kv_order.gather(key, cols), bkv),
        _blocked(link.kv_order.gather(value, cols), bkv),
        segments,
    )
    xp: Any = np if segments is None and isinstance(link.block_mask, np.ndarray) else jnp
    state, index = xp.asarray(link.block_mask), xp.asarray(link.data_next, np.int32)
    if segments is not None:
        state = jnp.where(_may_meet(segments[::-1] if columns else segments, index), state, 0)
    order = xp.argsort(xp.where(state == 0, 3, 3 - state), axis=1, stable=True)
    tile = xp.zeros_like(index) if link.mask_next is None else xp.asarray(link.mask_next, np.int32)
    index, tile = xp.take_along_axis(index, order, axis=1), xp.take_along_axis(tile, order, axis=1)
    counts = [(state == 2).sum(1), (state != 0).sum(1)]
    return blocks, _Lists(index, tile, *(xp.asarray(c, np.int32) for c in counts))


def _may_meet(segments: Sequence[jax.Array], index: jax.Array) -> jax.Array:
    """Whether block row i and block index[i, w] hold segment ids in overlapping ranges, in any batch entry."""
    largest = np.iinfo(np.int32).max
    low, high = zip(*((jnp.where(s >= 0, s, largest).min((-2, -1)), s.max((-2, -1))) for s in segments), strict=True)
    return ((low[0][:, None] <= high[1][index]) & (low[1][index] <= high[0][:, None])).any(-1)


def _blocked(x: jax.Array, block: int, group: int = 1) -> jax.Array:
    """[B, rows, K * G, ...] -> [rows / block, B, K, G * block, ...]."""
    b, rows, heads, *rest = x.shape
    x = x.reshape(b, rows // block, block, heads // group, group, *rest)
    x = jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))
    return x.reshape(rows // block, b, heads // group, group * block, *rest)


def _unblocked(x: jax.Array, group: int = 1) -> jax.Array:
    """The inverse of `_blocked`."""
    blocks, b, kv_heads, rows, *rest = x.shape
    x = x.reshape(blocks, b, kv_heads, group, rows // group, *rest)
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    return x.reshape(b, blocks * (rows // group), kv_heads * group, *rest)
