"""The implementation "xla": block-sparse attention in plain XLA, the default on CPU and the fallback elsewhere.

A pass loops over its block lists, of query blocks in the forward pass and of key blocks in the backward pass: FULL
entries first, which need no mask, then PARTIAL ones. No array of size T x S exists, and the work is proportional to the
active blocks. Arithmetic is in float32 (float64 for float64 inputs).

Blocks are laid out [list and block, B, K, rows, H]: one index selects contiguous memory, and one batched matrix product
computes all batch entries and heads that share a list. K is the number of key heads; the rows of a query block hold all
query heads of a key head.
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
from .distance_bias import bias_by_distance, has_bias
from .numerics import accumulator_dtype, merge_by_lse, reduced_lse
from .operands import Gradients, Operands
from .pass_blocks import PassBlocks, blocks_of_pass, head_groups_of, join_heads
from .transforms import vmap_as_batch


def unsupported(call: Call, operands: Operands) -> str | None:
    """Returns None: XLA computes every valid call."""
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns out [B, T, N, Hv] in the dtype of the query, and lse [B, T, N] in float32 (or float64)."""
    return _with_batched_vmap(functools.partial(_forward, call), operands)


def _with_batched_vmap(function: Callable[..., Any], operands: Operands, *by_query: jax.Array) -> Any:
    """Computes function(operands, *by_query), under `jax.vmap` with more batch entries if lists are made at run time.

    A mapped loop would run as long as the longest of all lists, and copy its state at every step.
    """
    if operands.segments is None and operands.mask is None and operands.selection is None:
        return function(operands, *by_query)
    return vmap_as_batch(function, math.inf, operands, *by_query)


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    query, value, sinks = operands.query, operands.value, operands.sinks
    acc_dtype = accumulator_dtype(query.dtype)
    lse = jnp.full(query.shape[:3], -jnp.inf, acc_dtype)
    if sinks is not None:
        lse = jnp.broadcast_to(sinks.astype(acc_dtype)[None, None], lse.shape)
    state = jnp.zeros((*query.shape[:3], value.shape[-1]), acc_dtype), lse

    def run(passes, arrays, bias):
        q, k, v, *state = arrays
        for pass_blocks in passes:
            state = merge_by_lse(state, _forward_pass(call, pass_blocks, q, k, v, bias))
        return tuple(state)

    out, lse = _by_head_group(call, operands, run, (query, *state), dkv=False)
    return out.astype(query.dtype), lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array) -> Gradients:
    """Returns gradients by name, in the operands' dtypes; each pass reads the lse of the whole call."""
    return _with_batched_vmap(functools.partial(_backward, call), operands, lse, delta, dout)


def _backward(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    def run(passes, arrays, bias):
        q, k, v, *rest = arrays
        by_pass = [_backward_pass(call, pass_blocks, q, k, v, bias, *rest) for pass_blocks in passes]
        return _sum_over_passes([jnp.zeros(x.shape, lse.dtype) for x in (q, k, v, *bias)], by_pass)

    by_query = operands.query, lse, delta, dout
    return _to_gradients(call, operands, *_by_head_group(call, operands, run, by_query, dkv=True))


def _sum_over_passes(zeros: Sequence[jax.Array], by_pass: Sequence[Sequence[jax.Array]]) -> tuple[jax.Array, ...]:
    return tuple(functools.reduce(jnp.add, summands) for summands in zip(zeros, *by_pass, strict=True))


def _to_gradients(call: Call, operands: Operands, dq, dk, dv, dbias: Any = None) -> Gradients:
    """Returns gradients in the dtypes of the operands, those of repeated key heads summed."""
    dtable = None
    if operands.bias_table is not None:
        bias, transpose = jax.vjp(lambda x: _bias(call, operands._replace(bias_table=x))[0], operands.bias_table)
        # Without passes, dbias is a constant: inside `shard_map` its type must vary over the axes of the bias.
        (dtable,) = transpose(jnp.where(False, bias, dbias))
    dk, dv = (
        dx.reshape(*x.shape[:3], dx.shape[2] // x.shape[2], dx.shape[3]).sum(3)
        for dx, x in ((dk, operands.key), (dv, operands.value))
    )
    dq, dk, dv = (dx.astype(x.dtype) for dx, x in zip((dq, dk, dv), operands[:3], strict=True))
    return Gradients(dq, dk, dv, dtable)


def _bias(call: Call, operands: Operands) -> tuple[jax.Array, ...]:
    """Returns the bias by distance as [1, distances, N], with heads on the axis that query has; () without a bias."""
    if not has_bias(operands):
        return ()
    positions = call.bias_positions((operands.query.shape[1], operands.key.shape[1]))
    return (bias_by_distance(call, operands, (positions[0].length, positions[1].length)).T[None],)


# --- heads -----------------------------------------------------------------------------------------------------------


# Queries of a block if each query selects. Fewer are no faster; more meet more blocks that few of them selected.
_MIN_SELECTING_ROWS = 16


def _uses_mask_tiles(masks: Sequence[Reordered], shape: tuple[int, int]) -> bool:
    """True if partial blocks are read as tiles: a pass computes the rule of one mask at most, and not of every mask."""
    return len(masks) > 1 or not masks[0].computable


def _by_head_group(call: Call, operands: Operands, run: Callable, by_query: Sequence[jax.Array], *, dkv: bool):
    """Calls run(passes, (q, k, v, ...), bias) once for each head group, and joins the heads of the results.

    With several groups, key heads are repeated to one for each query head, since the query heads of a key head may be
    in several groups. Gradients of keys come back repeated, too.
    """
    key, value = operands.key, operands.value
    query, *rest = by_query
    groups = head_groups_of(call, operands, merge=operands.selection is not None)
    rows = (
        _MIN_SELECTING_ROWS if operands.selection is None else max(_MIN_SELECTING_ROWS, operands.selection.granularity)
    )
    if len(groups) > 1:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    results = []
    for group in groups:
        passes = [blocks_of_pass(call, operands, group, x, rows, _uses_mask_tiles, dkv=dkv) for x in group.passes]
        bias = [group.select(x) for x in _bias(call, operands)]
        results.append(run(passes, [group.select(x) for x in (query, key, value, *rest)], bias))
    return [join_heads(by_group) for by_group in zip(*results, strict=True)]


# --- passes ----------------------------------------------------------------------------------------------------------


def _forward_pass(call: Call, pass_blocks: PassBlocks, query, key, value, bias):
    """Returns (out, lse) of one pass by token; tokens without a row in the pass have out 0 and lse -inf."""
    blocks = _Blocks.of(pass_blocks, False, query, key, value, bias)
    acc_dtype, precision = _arithmetic(query)

    def attend_q_block(_, inputs):
        outer, q, span = inputs  # q [B, K, G * bq, H]
        q = q.astype(acc_dtype) * call.scale

        def step(masked, entry, state):
            m_i, l_i, acc = state  # [B, K, G * bq], the same, [B, K, G * bq, Hv]
            kv_block = blocks.inner_block(entry)
            k, v = (blocks.load(x, outer.first_kv + kv_block) for x in (blocks.key, blocks.value))
            scores = jnp.einsum("bkqd,bksd->bkqs", q, k, precision=precision)
            scores = _soft_cap(blocks.add_bias(scores, outer, outer.number, kv_block), call)[0]
            if masked:
                scores = jnp.where(blocks.allowed(outer, outer.number, kv_block, entry), scores, -jnp.inf)
            m_new = jnp.maximum(m_i, scores.max(-1))
            shift = jnp.where(m_new == -jnp.inf, 0, m_new)
            p, alpha = jnp.exp(scores - shift[..., None]), jnp.exp(m_i - shift)
            update = jnp.einsum("bkqs,bksd->bkqd", p, v, precision=precision)
            return m_new, l_i * alpha + p.sum(-1), acc * alpha[..., None] + update

        zeros = jnp.zeros_like(q[..., 0])
        state = zeros - jnp.inf, zeros, jnp.broadcast_to(zeros[..., None], (*zeros.shape, value.shape[-1]))
        m_i, l_i, acc = blocks.loop(span, step, state)
        return None, (acc / jnp.where(l_i == 0, 1, l_i)[..., None], m_i + jnp.log(l_i))

    _, (out, lse) = lax.scan(attend_q_block, None, (blocks.outer_blocks, blocks.query, blocks.spans))
    return blocks.by_token(out), blocks.by_token(lse, -jnp.inf)


def _backward_pass(call: Call, pass_blocks: PassBlocks, query, key, value, bias, lse, delta, dout):
    """Returns (dq, dk, dv) of one pass by token, and the gradient of its bias, in the accumulator's dtype."""
    blocks = _Blocks.of(pass_blocks, True, query, key, value, bias)
    acc_dtype, precision = _arithmetic(query)
    # A query without keys has p = exp(-inf - lse) = 0 with any finite lse.
    by_query = jnp.where(lse == -jnp.inf, 0, lse), delta, dout
    lse, delta, dout = map(blocks.q_blocks, by_query)
    product = functools.partial(jnp.einsum, precision=precision)

    def attend_kv_block(sums, inputs):
        outer, span = inputs
        kv_block = outer.number
        k, v = (blocks.load(x, outer.first_kv + kv_block) for x in (blocks.key, blocks.value))

        def step(masked, entry, state):
            dk, dv, dq, *dbias = state
            q_block = blocks.inner_block(entry)
            index = outer.first_q + q_block
            # Scaled as in the forward pass: rounded otherwise, huge scores would fall below their lse.
            q, do = blocks.load(blocks.query, index) * call.scale, blocks.load(dout, index)
            scores = blocks.add_bias(product("bkqd,bksd->bkqs", q, k), outer, q_block, kv_block)
            scores, slope = _soft_cap(scores, call)
            p = _exp_below_lse(scores, blocks.load(lse, index)[..., None])
            if masked:
                p = jnp.where(blocks.allowed(outer, q_block, kv_block, entry), p, 0)
            ds = p * (product("bkqd,bksd->bkqs", do, v) - blocks.load(delta, index)[..., None])
            if slope is not None:
                ds = ds * jnp.where(p > 0, slope, 0)  # a bias of pairs that are not allowed may be NaN
            dv = dv + product("bkqs,bkqd->bksd", p, do)
            dk = dk + product("bkqs,bkqd->bksd", ds, q)
            dq_block = lax.dynamic_index_in_dim(dq, index, keepdims=False) + product("bkqs,bksd->bkqd", ds, k)
            dq = lax.dynamic_update_index_in_dim(dq, dq_block, index, 0)
            return dk, dv, dq, *(blocks.add_by_distance(x, ds, outer, q_block, kv_block, in_order) for x in dbias)

        dk, dv, *sums = blocks.loop(span, step, (jnp.zeros_like(k), jnp.zeros_like(v), *sums))
        return sums, (dk, dv)

    in_order = call.params[1].deterministic
    sums = [jnp.zeros_like(x, acc_dtype) for x in (blocks.query, *blocks.bias)]
    (dq, *dbias), dkv = lax.scan(attend_kv_block, sums, (blocks.outer_blocks, blocks.spans))
    dk, dv = (blocks.by_key_token(x, blocks.layout.lists) for x in dkv)
    return blocks.by_token(dq * call.scale), dk, dv, *map(blocks.layout.bias_by_head, dbias)


# --- second derivatives ----------------------------------------------------------------------------------------------
#
# Loops whose length is known at run time only have no derivative in reverse mode. Forward and backward are therefore
# written a second time, as sums over a fixed number of pairs of blocks, which JAX differentiates in either mode and to
# any order. The scores of a pair are recomputed wherever they are needed, never saved.


@forward.defjvp
def _forward_along(call, primals, tangents):
    return jax.jvp(functools.partial(_forward_by_pairs, call), primals, tangents)


@backward.defjvp
def _backward_along(call, primals, tangents):
    return jax.jvp(functools.partial(_backward_by_pairs, call), primals, tangents)


def _forward_by_pairs(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    # Any shift of the scores cancels; with lse, the sum of p is about 1.
    shift = reduced_lse(forward(call, jax.lax.stop_gradient(operands))[1])
    shift = jnp.where(shift == -jnp.inf, 0, shift)

    def attend_pair(by_query, kv, allowed, add_bias):
        """Returns (sum of p, p @ v) of one pair of blocks, with p = exp(scores - shift), and no other sums."""
        (q, shift), (k, v) = by_query, kv
        p = _exp_below_lse(_masked_scores(call, q, k, allowed, add_bias)[0], shift[..., None])
        return (p.sum(-1), jnp.einsum("bkqs,bksd->bkqd", p, v, precision=_arithmetic(v)[1])), (), None

    def run(passes, arrays, bias):
        q, k, v, shift = arrays
        by_pass = [_sum_over_pairs(pass_blocks, attend_pair, (q, shift), (k, v), bias)[0] for pass_blocks in passes]
        return _sum_over_passes((jnp.zeros_like(shift), jnp.zeros((*shift.shape, v.shape[-1]), shift.dtype)), by_pass)

    l_i, acc = _by_head_group(call, operands, run, (operands.query, shift), dkv=False)
    if operands.sinks is not None:
        l_i = l_i + _exp_below_lse(operands.sinks.astype(shift.dtype)[None, None], shift)
    sees_keys = l_i > 0
    l_i = jnp.where(sees_keys, l_i, 1)
    return (acc / l_i[..., None]).astype(operands.query.dtype), jnp.where(sees_keys, shift + jnp.log(l_i), -jnp.inf)


def _backward_by_pairs(call: Call, operands: Operands, lse: jax.Array, delta: jax.Array, dout: jax.Array):
    lse = jnp.where(lse == -jnp.inf, 0, lse)

    def attend_pair(by_query, kv, allowed, add_bias):
        (q, lse, delta, dout), (k, v) = by_query, kv
        product = functools.partial(jnp.einsum, precision=_arithmetic(q)[1])
        scores, slope = _masked_scores(call, q, k, allowed, add_bias)
        p = _exp_below_lse(scores, lse[..., None])
        ds = p * (product("bkqd,bksd->bkqs", dout, v) - delta[..., None])
        ds = ds if slope is None else ds * slope
        scaled_ds = ds * call.scale
        dk, dv = product("bkqs,bkqd->bksd", scaled_ds, q), product("bkqs,bkqd->bksd", p, dout)
        return (product("bkqs,bksd->bkqd", scaled_ds, k),), (dk, dv), ds

    def run(passes, arrays, bias):
        q, k, v, *rest = arrays
        options = attend_pair, (q, *rest), (k, v), bias
        by_pass = [sum(_sum_over_pairs(pass_blocks, *options), ()) for pass_blocks in passes]
        return _sum_over_passes([jnp.zeros(x.shape, lse.dtype) for x in (q, k, v, *bias)], by_pass)

    by_query = operands.query, lse, delta, dout
    return _to_gradients(call, operands, *_by_head_group(call, operands, run, by_query, dkv=False))


def _masked_scores(call: Call, q: jax.Array, k: jax.Array, allowed: jax.Array, add_bias: Callable[..., jax.Array]):
    """Returns the scores of a pair of blocks, -inf where a query may not see a key, and the slope of the soft cap."""
    scores = jnp.einsum("bkqd,bksd->bkqs", q, k, precision=_arithmetic(q)[1]) * call.scale
    scores = add_bias(scores)
    if call.soft_cap is not None:  # a NaN in the bias of a pair that is not allowed would make the slope NaN
        scores = jnp.where(allowed, scores, 0)
    scores, slope = _soft_cap(scores, call)
    return jnp.where(allowed, scores, -jnp.inf), slope


def _sum_over_pairs(
    pass_blocks: PassBlocks,
    attend_pair: Callable[..., Any],
    by_query: Sequence[Any],
    kv: tuple[Any, Any],
    bias: Sequence[jax.Array],
):
    """Returns the sums, by token, of attend_pair(query blocks, key blocks, allowed, add_bias) over all pairs of blocks.

    It takes blocks [B, K, G * bq, ..] and [B, K, bkv, ..] in the accumulator's dtype. It returns a tuple of summands
    like the former, one like the latter, and gradients of scores or None. These are summed by distance.
    """
    blocks = _Blocks.of(pass_blocks, False, by_query[0], *kv, bias)
    operands = tuple(map(blocks.q_blocks, by_query)), (blocks.key, blocks.value)
    # Lists are contiguous. Entries behind the last one repeat it, so that no block is read that no query selected.
    spans, outer_blocks = jnp.asarray(blocks.spans), jax.tree.map(jnp.asarray, blocks.outer_blocks)
    entries = jnp.arange(len(blocks.lists.inner_block))
    live = entries < spans[-1, 2]
    entries = jnp.minimum(entries, jnp.maximum(spans[-1, 2] - 1, 0))
    list_numbers = jnp.minimum(jnp.searchsorted(spans[:, 2], entries, side="right"), len(spans) - 1)

    @jax.checkpoint
    def attend_entry(operands, list_number, entry, live):
        outer, kv_block = jax.tree.map(lambda x: x[list_number], outer_blocks), blocks.inner_block(entry)
        free = entry < spans[list_number, 1]
        allowed = live
        if blocks.has_entries(masked=True):
            allowed = live & (free | blocks.allowed(outer, outer.number, kv_block, entry))
        indices = outer.first_q + outer.number, outer.first_kv + kv_block
        loaded = [tuple(blocks.load(x, i) for x in arrays) for arrays, i in zip(operands, indices, strict=True)]
        pair = outer, outer.number, kv_block
        *summands, ds = attend_pair(*loaded, allowed, lambda scores: blocks.add_bias(scores, *pair))
        if ds is None:
            return indices, *summands, ()
        return indices, *summands, tuple(blocks.add_by_distance(jnp.zeros_like(x), ds, *pair) for x in blocks.bias)

    def step(sums, inputs):
        indices, *summands, dbias = attend_entry(operands, *inputs)
        *by_block, dbias_sums = sums
        sides = zip(indices, by_block, summands, strict=True)
        added = tuple(tuple(map(lambda sum, x, i=i: sum.at[i].add(x), *xs)) for i, *xs in sides)
        return (*added, tuple(map(jnp.add, dbias_sums, dbias))), None

    _, *shapes, dbias_shapes = jax.eval_shape(attend_entry, operands, list_numbers[0], entries[0], live[0])
    zeros = [
        tuple(jnp.zeros_like(arrays[0], x.dtype, (len(arrays[0]), *x.shape)) for x in summands)
        for arrays, summands in zip(operands, shapes, strict=True)
    ]
    zeros.append(tuple(jnp.zeros(x.shape, x.dtype) for x in dbias_shapes))
    (q_sums, kv_sums, dbias), _ = lax.scan(step, (*zeros,), (list_numbers, entries, live))
    by_key_token = functools.partial(blocks.by_key_token, lists=blocks.layout.kv_lists)
    functions = blocks.by_token, by_key_token, blocks.layout.bias_by_head
    return tuple(tuple(map(f, sums)) for f, sums in zip(functions, (q_sums, kv_sums, dbias), strict=True))


def _exp_below_lse(scores: jax.Array, lse: jax.Array) -> jax.Array:
    """Returns exp(scores - lse), at most 1 as `reduced_lse` requires, with the derivatives of the exponential."""
    logs = scores - lse
    return jnp.exp(logs - lax.stop_gradient(jnp.maximum(logs, 0)))


def _soft_cap(scores: jax.Array, call: Call) -> tuple[jax.Array, jax.Array | None]:
    """Returns soft-capped scores, and the slope of the cap at them or None."""
    if call.soft_cap is None:
        return scores, None
    squashed = jnp.tanh(scores / call.soft_cap)
    return squashed * call.soft_cap, 1 - squashed * squashed


def _arithmetic(query: jax.Array):
    """Returns the accumulators' dtype, and the precision of products: no TF32 or bf16 passes for float32 inputs."""
    full = query.dtype in (jnp.float32, jnp.float64)
    return accumulator_dtype(query.dtype), lax.Precision.HIGHEST if full else lax.Precision.DEFAULT


# --- blocks ----------------------------------------------------------------------------------------------------------


class _OuterBlock(NamedTuple):
    """The outer block of a list, and the blocks of its operands; or the arrays of all outer blocks."""

    number: Any  # number of the block
    first_q: Any  # index of the list's first query block
    first_kv: Any  # index of its first key block
    batch: Any  # batch entry of the list, or 0 if all entries share it


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """The layout of batch entries and heads in blocks, by the block lists that they share.

    Query head (k * lists + list) * group + g has the given list, and key head k of those in the list's key blocks.
    If there are several lists, each has one key head, which several of them may share.
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

    def to_blocks(self, x: jax.Array, block: int, lists: int, group: int = 1) -> jax.Array:
        """Returns [batches * lists * rows / block, B / batches, K, group * block, ...] from [B, rows, heads, ...]."""
        b, rows, heads, *rest = x.shape
        shared = b // max(self.batches, 1)
        x = x.reshape(self.batches, shared, rows // block, block, heads // (lists * group), lists, group, *rest)
        x = x.transpose(0, 5, 2, 1, 4, 6, 3, *range(7, x.ndim))
        return x.reshape(self.batches * lists * (rows // block), shared, x.shape[4], group * block, *rest)

    def bias_by_list(self, x: jax.Array) -> jax.Array:
        """Returns [lists * distances, K, G] from [1, distances, heads]."""
        x = x.reshape(-1, self.kv_heads, self.lists, self.group).transpose(2, 0, 1, 3)
        return x.reshape(-1, self.kv_heads, self.group)

    def bias_by_head(self, x: jax.Array) -> jax.Array:
        """Returns [1, distances, heads]: the inverse of `bias_by_list`."""
        x = x.reshape(self.lists, -1, self.kv_heads, self.group).transpose(1, 2, 0, 3)
        return x.reshape(1, len(x), -1)

    def from_blocks(self, x: jax.Array, lists: int, group: int = 1) -> jax.Array:
        """Returns [B, rows, heads, ...]: the inverse of `to_blocks`."""
        blocks, shared, kv_heads, rows, *rest = x.shape
        num_lists = self.batches * lists
        sizes = self.batches, lists, blocks // max(num_lists, 1), shared, kv_heads, group, rows // group
        x = x.reshape(*sizes, *rest).transpose(0, 3, 2, 6, 4, 1, 5, *range(7, x.ndim + 3))
        return x.reshape(self.batches * shared, sizes[2] * sizes[6], kv_heads * lists * group, *rest)


@dataclasses.dataclass(frozen=True, eq=False)
class _Blocks:
    """The operands of a pass in blocks and row order, its lists, and the mask of any pair of blocks."""

    pass_blocks: PassBlocks
    layout: _Layout
    lists: BlockLists
    query: jax.Array  # [lists' blocks, B, K, G * bq, H]
    key: jax.Array  # [lists' blocks, B, K, bkv, H]
    value: jax.Array  # [lists' blocks, B, K, bkv, Hv]
    # Of queries and of keys, [lists' blocks, B, 1, rows] each, with one list for all heads; or None.
    segments: list[jax.Array] | None
    order_ids: list[jax.Array] | None
    bias: list[jax.Array]  # [lists * distances, K, G], the bias of each distance; none without a bias

    @staticmethod
    def of(pass_blocks: PassBlocks, dkv: bool, query, key, value, bias: Sequence[jax.Array]) -> "_Blocks":
        """Returns the operands in blocks, with lists of key blocks if ``dkv``, else of query blocks."""
        lists = pass_blocks.pairs.lists(dkv)
        layout = _Layout.of(lists, query.shape[2], key.shape[2])
        orders, shape = (pass_blocks.q_order, pass_blocks.kv_order), pass_blocks.shape
        rows = tuple(n * size for n, size in zip(pass_blocks.pairs.num_blocks, shape, strict=True))

        def in_blocks(ids):
            if ids is None:
                return None
            sides = zip(orders, ids, rows, shape, strict=True)
            return [layout.to_blocks(order.gather(x[..., None], n), size, 1) for order, x, n, size in sides]

        ids = in_blocks(pass_blocks.segments), in_blocks(pass_blocks.order_ids)
        q = layout.to_blocks(orders[0].gather(query, rows[0]), shape[0], layout.lists, layout.group)
        k, v = (layout.to_blocks(orders[1].gather(x, rows[1]), shape[1], layout.kv_lists) for x in (key, value))
        by_list = [layout.bias_by_list(x) for x in bias]
        return _Blocks(pass_blocks, layout, lists, q, k, v, *ids, by_list)

    @property
    def spans(self) -> Any:
        """[outer blocks of all lists, 3], see `BlockLists`."""
        return self.lists.spans.reshape(-1, 3)

    @property
    def outer_blocks(self) -> _OuterBlock:
        """The outer blocks of all lists, in the order of the spans."""
        batches, lists, outer = self.lists.spans.shape[:3]
        batch, list_number, number = (x.ravel().astype(np.int32) for x in np.indices((batches, lists, outer)))
        queries, keys = self.pass_blocks.pairs.num_blocks
        kv_list = batch * self.layout.kv_lists + list_number * self.layout.kv_lists // lists
        return _OuterBlock(number, (batch * lists + list_number) * queries, kv_list * keys, batch)

    def q_blocks(self, x: jax.Array) -> jax.Array:
        """Returns [lists' blocks, B, K, G * bq, ...] from [B, T, N, ...] by token."""
        blocks, rows = self.pass_blocks.pairs.num_blocks[0], self.pass_blocks.shape[0]
        x = self.pass_blocks.q_order.gather(x, blocks * rows)
        return self.layout.to_blocks(x, rows, self.layout.lists, self.layout.group)

    def by_token(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """Returns [B, T, N, ...] by token: the inverse of `q_blocks`, ``fill`` for tokens without a row."""
        rows = self.layout.from_blocks(x, self.layout.lists, self.layout.group)
        return self.pass_blocks.q_order.scatter(rows, fill)

    def by_key_token(self, x: jax.Array, lists: int) -> jax.Array:
        """Returns key blocks of all lists as [B, S, K, ...] by token, summed over the lists of one key head."""
        x = self.pass_blocks.kv_order.scatter(self.layout.from_blocks(x, lists))
        b, s, heads, size = x.shape
        group = lists // self.layout.kv_lists
        return x if group == 1 else x.reshape(b, s, heads // group, group, size).sum(3)

    def inner_block(self, entry: jax.Array) -> jax.Array:
        """Returns the inner block of an entry."""
        return lax.dynamic_index_in_dim(jnp.asarray(self.lists.inner_block), entry, keepdims=False)

    def load(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Returns one block in the accumulator's dtype."""
        return lax.dynamic_index_in_dim(x, index, keepdims=False).astype(accumulator_dtype(x.dtype))

    def add_bias(self, scores: jax.Array, outer: _OuterBlock, q_block: jax.Array, kv_block: jax.Array) -> jax.Array:
        """Returns scores [B, K, G * bq, bkv] of a pair of blocks with their bias."""
        for bias in self.bias:
            of_pair = jnp.moveaxis(bias[self._distance_indices(outer, q_block, kv_block)], (2, 3), (0, 1))
            scores = scores + of_pair.reshape(1, *scores.shape[1:])
        return scores

    def add_by_distance(
        self,
        sums: jax.Array,
        ds: jax.Array,
        outer: _OuterBlock,
        q_block: jax.Array,
        kv_block: jax.Array,
        in_order: bool = False,
    ) -> jax.Array:
        """Adds gradients of scores [B, K, G * bq, bkv] of a pair of blocks to the sums by distance, like `bias`.

        With ``in_order``, they are added query by query, whose keys are at different distances: also GPUs, which add
        to equal indices in any order, then sum in the same order each time.
        """
        indices = self._distance_indices(outer, q_block, kv_block)
        ds = jnp.moveaxis(ds.sum(0).reshape(*sums.shape[1:], *indices.shape), (0, 1), (2, 3))
        if not in_order:
            return sums.at[indices].add(ds)
        return lax.scan(lambda x, row: (x.at[row[0]].add(row[1], unique_indices=True), None), sums, (indices, ds))[0]

    def _distance_indices(self, outer: _OuterBlock, q_block: jax.Array, kv_block: jax.Array) -> jax.Array:
        """Returns the indices [bq, bkv] of a pair's distances in `bias`; rows without a token have any of them."""
        (bq, bkv), pass_blocks = self.pass_blocks.shape, self.pass_blocks
        tokens = q_block * bq + jnp.arange(bq), kv_block * bkv + jnp.arange(bkv)
        tokens = [order.token(x) for order, x in zip((pass_blocks.q_order, pass_blocks.kv_order), tokens, strict=True)]
        (q_positions, kv_positions), list_number = (
            pass_blocks.positions,
            outer.first_q // pass_blocks.pairs.num_blocks[0],
        )
        q, k = q_positions.token(tokens[0]), kv_positions.token(tokens[1])
        distances = jnp.maximum(k[None] - q[:, None] + (q_positions.length - 1), 0)
        num_distances = q_positions.length + kv_positions.length - 1
        return list_number % self.layout.lists * num_distances + distances

    def has_entries(self, masked: bool) -> bool:
        """True if the lists may have FULL entries, or PARTIAL ones if ``masked``."""
        spans, start = self.spans, int(masked)
        return not self.lists.static or bool((spans[:, start] < spans[:, start + 1]).any())

    def loop(self, span: Any, step: Callable[..., Any], state: Any) -> Any:
        """Returns the state after step(masked, entry, state) for the FULL entries of a list, then the PARTIAL ones."""
        for start, masked in ((0, False), (1, True)):
            if self.has_entries(masked):
                state = lax.fori_loop(span[start], span[start + 1], functools.partial(step, masked), state)
        return state

    def allowed(self, outer: _OuterBlock, q_block: jax.Array, kv_block: jax.Array, entry: jax.Array) -> jax.Array:
        """Returns bools [.., G * bq, bkv]: the pairs of a PARTIAL entry that may attend."""
        (bq, bkv), pass_blocks, lists = self.pass_blocks.shape, self.pass_blocks, self.lists
        limits = [jnp.ones((bq, bkv), bool)]
        if pass_blocks.rule is not None:
            q_rows, kv_rows = q_block * bq + jnp.arange(bq)[:, None], kv_block * bkv + jnp.arange(bkv)[None, :]
            limits.append(pass_blocks.rule(q_rows, kv_rows))
        elif pass_blocks.tiles is not None:
            number = lax.dynamic_index_in_dim(jnp.asarray(lists.mask_tile), entry, keepdims=False)
            tile = lax.dynamic_index_in_dim(jnp.asarray(pass_blocks.tiles), jnp.maximum(number, 0), keepdims=False)
            limits.append(tile | (number < 0))
        if lists.active_query_groups is not None:
            bits = lax.dynamic_index_in_dim(lists.active_query_groups, entry, keepdims=False)
            q_group = np.arange(bq, dtype=np.int32) // pass_blocks.granularity
            limits.append(((bits >> q_group) & 1).astype(bool)[:, None])
        if self.segments is not None:
            q, k = self._ids_of_pair(self.segments, outer, q_block, kv_block)
            limits.append((q == k) & (q >= 0))  # [B, 1, bq, bkv]
        if self.order_ids is not None:
            q, k = self._ids_of_pair(self.order_ids, outer, q_block, kv_block)
            limits.append(k <= q)
        allowed = functools.reduce(jnp.logical_and, (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in limits))
        return jnp.tile(allowed, (1, 1, self.layout.group, 1))

    def _ids_of_pair(self, ids: list[jax.Array], outer: _OuterBlock, q_block: jax.Array, kv_block: jax.Array):
        """Returns the ids of a query block [B, 1, bq, 1] and of a key block [B, 1, 1, bkv]."""
        sides = zip(ids, self.pass_blocks.pairs.num_blocks, (q_block, kv_block), strict=True)
        q, k = (lax.dynamic_index_in_dim(x, outer.batch * n + i, keepdims=False) for x, n, i in sides)
        return q[..., :, None], k[..., None, :]
