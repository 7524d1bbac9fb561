"""What the op hands to a backend: the static part of a call, and its arrays; and what backends do alike with them."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ...arguments.checks import as_float
from ...arguments.foreign import BOOL_IDS, FLOAT_IDS, one_line, scorer_hint, shown
from ..planning.head_groups import HeadGroup, head_groups
from ..planning.lists import (
    BlockPairs,
    StateTable,
    planned_block_pairs,
    run_time_block_pairs,
    run_time_table,
    selected_block_pairs,
    state_table,
    unpacked_tiles,
)
from ..planning.params import BwdParams, FwdParams
from ..planning.plan import Pass, Plan
from ..planning.selection import Selection, known
from ..planning.views import Reordered, RowOrder
from .operands import OPERANDS, Operands, differentiated


def accumulator(dtype: Any) -> Any:
    """The dtype that scores, sums and lse are kept in: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def is_floating(dtype: Any) -> bool:
    """Whether something is the name of a floating-point dtype, or one; None is none."""
    try:
        return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except (TypeError, ValueError):  # no dtype at all
        return False


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of one call of the op.

    Attributes:
      plan: what to compute; None if the mask is a run-time array.
      fwd_shape: (bq, bkv), block shape of the forward lists of a run-time mask.
      bwd_shape: (bq, bkv), that of its backward lists.
      params: the forward and the backward parameters.
      scale: factor on q . k.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap); None for none.
      return_lse: whether the caller wants the log-sum-exp, too.
      chosen_for: the platform that the implementation was chosen for; None if the caller named it.
      selection: (keys in a block, queries that choose together) of the operands' ``chosen``; None without these.
      plans_by_rank: with context parallelism, the plan of each device; ``plan`` is that of the last one.
      exchanging: True if an all-to-all of queries runs meanwhile, which takes some multiprocessors of a device.
    """

    plan: Plan | None
    fwd_shape: tuple[int, int]
    bwd_shape: tuple[int, int]
    params: tuple[FwdParams, BwdParams]
    scale: float
    soft_cap: float | None
    return_lse: bool = False
    chosen_for: str | None = None
    selection: tuple[int, int] | None = None
    plans_by_rank: tuple[Plan, ...] = ()
    exchanging: bool = False

    @property
    def chains(self) -> tuple[tuple[Pass, ...], ...]:
        """The plan's chains; there is a plan wherever there is no run-time mask."""
        assert self.plan is not None
        return self.plan.chains

    @property
    def masks(self) -> tuple[Reordered, ...]:
        """The plan's masks in natural row order; none if the mask is a run-time array."""
        if self.plan is None:
            return ()
        orders = RowOrder(self.plan.q_len), RowOrder(self.plan.kv_len)
        return tuple(Reordered(mask, *orders) for mask in self.plan.masks)


def checked_scalars(scale: Any, logits_soft_cap: Any, head_size: int) -> tuple[float, float | None]:
    """The factor of the logits, None for head_size ** -0.5, and their soft cap, None for none.

    Raises:
      ValueError: no finite number, or a soft cap outside (0, 1e30].
    """
    scale = 1 / math.sqrt(head_size) if scale is None else _number("scale", scale)
    if logits_soft_cap is not None:
        logits_soft_cap = _number("logits_soft_cap", logits_soft_cap)
        if not 0 < logits_soft_cap <= 1e30:
            raise ValueError(f"logits_soft_cap must be > 0 or None, and at most 1e30, got {logits_soft_cap}")
    return scale, logits_soft_cap


def checked_sinks(sinks: Any, heads: int) -> jax.Array | None:
    """The sinks as an array [heads], or None.

    Raises:
      ValueError: another shape, or no floats.
    """
    if sinks is None:
        return None
    rule = f"floats of shape [N] = ({heads},)"
    return jnp.asarray(checked_numbers("sinks", sinks, (heads,), jnp.floating, rule))


def checked_selection(selection: Any, batch: tuple[int, ...], lengths: tuple[int, int], heads: tuple[int, int]) -> Any:
    """The ids of a selection [*batch, Tq, G, k], for lengths (T, S) and heads (N, K).

    Raises:
      TypeError: it is no `Selection`.
      ValueError: ids of other axes, or (outside of jit) of blocks that there are not.
    """
    if not isinstance(selection, Selection):
        raise TypeError(f"selection must be a Selection or None, got {described(selection)}{scorer_hint(selection)}")
    ids, block, granularity = selection.ids, selection.block, selection.granularity
    (t, s), choosing = lengths, sorted({1, *heads})
    rows = *batch, -(-t // granularity)
    if not hasattr(ids, "shape") or ids.shape[:-2] != rows or ids.shape[-2] not in choosing:
        raise ValueError(
            f"selection: ids must have shape [{', '.join(map(str, rows))}, G, k], one row for each {granularity} of "
            f"T = {t} queries, with G one of {choosing} (1, key heads or query heads), got {described(ids)}"
        )
    blocks, seen = -(-s // block), known(ids)
    if seen is not None and seen.size and seen.max() >= blocks:
        raise ValueError(
            f"selection: ids must be below {blocks}, the number of blocks of {block} in S = {s} keys, got {seen.max()}"
        )
    return jnp.asarray(ids)


def check_arrays(query: jax.Array, key: jax.Array, value: jax.Array | None = None) -> None:
    """Refuses query, key and value that do not fit each other; without a value, the first two.

    Raises:
      ValueError: other axes, dtypes, batch sizes, heads or sizes than `block_sparse_attention` takes.
    """
    if query.ndim not in (3, 4):
        raise ValueError(f"query must have shape [B, T, N, H] or [T, N, H], got {query.shape}")
    arrays = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, x in arrays.items():
        if x.ndim != query.ndim:
            raise ValueError(f"{name} must have as many axes as query, {query.ndim}, got shape {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} must have the dtype of query, {query.dtype}, got {x.dtype}")
        if 0 in x.shape[-3:]:
            raise ValueError(f"{name} must not be empty along length, heads or size, got shape {x.shape}")
    hint = "axes are [B, length, heads, size]"
    if len({x.shape[:-3] for x in arrays.values()}) > 1:
        shapes = ", ".join(str(x.shape) for x in arrays.values())
        raise ValueError(f"batch sizes of {', '.join(arrays)} must agree, got {shapes}")
    if value is not None and key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(f"key and value must agree in length and heads ({hint}), got {key.shape} and {value.shape}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must agree in size H ({hint}), got {query.shape} and {key.shape}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"the key heads must divide the query heads, got {key.shape[-2]} and {query.shape[-2]} "
            f"from shapes {key.shape} and {query.shape}; {hint}"
        )


def checked_segments(
    segment_ids: Any, batch: tuple[int, ...], lengths: tuple[int, int], heads: int
) -> tuple[jax.Array, jax.Array] | None:
    """The segment ids of queries [B, T] and of keys [B, S] in int32, or None; B is 1 without a batch.

    Args:
      segment_ids: integers [*batch, T] if T == S, a pair of those for queries and keys, or None.
      batch: (B,), or () for arrays without this axis.
      lengths: (T, S).
      heads: N, by which errors recognise [B, N, T, H].

    Raises:
      ValueError: another shape or dtype, or ids that do not fit into int32.
    """
    if segment_ids is None:
        return None
    t, s = lengths
    if not isinstance(segment_ids, tuple):
        if t != s:
            raise ValueError(f"segment_ids must be a pair (of queries, of keys) when T != S, got one; T = {t}, S = {s}")
        segment_ids = (segment_ids, segment_ids)
    if len(segment_ids) != 2:
        raise ValueError(f"segment_ids must be an array or a pair (tuple) of arrays, got {len(segment_ids)} entries")
    pair = []
    for name, ids, length in zip(("queries", "keys"), segment_ids, lengths, strict=True):
        shape, got = (*batch, length), getattr(ids, "shape", ())
        hint = swapped_hint(t, heads, got[-1:]) if len(got) == len(shape) else ""
        hint = hint or transposed(got, shape)
        dtype = getattr(ids, "dtype", np.int32)
        hint += f"; {BOOL_IDS}" * (dtype == np.dtype(bool)) + FLOAT_IDS * jnp.issubdtype(dtype, jnp.floating)
        ids = checked_numbers(f"segment_ids of {name}", ids, shape, jnp.integer, f"integers of shape {shape}", hint)
        if not np.can_cast(ids.dtype, np.int32):
            # Cut off to 32 bits, two documents could become one, or padding.
            if isinstance(ids, jax.core.Tracer):
                raise ValueError(
                    f"segment_ids of {name} must be int32 or smaller inside jit, where nobody sees which numbers fit: "
                    f"write .astype(jnp.int32) behind them, got {ids.dtype}"
                )
            if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
                raise ValueError(f"segment_ids of {name} must fit into int32, got {ids.min()} to {ids.max()}")
        pair.append(jnp.asarray(ids, jnp.int32).reshape(*(batch or (1,)), length))
    return pair[0], pair[1]


def swapped_hint(t: int, n: int, lengths: Sequence[int]) -> str:
    """A hint, for the end of an error, if the heads of query are as many as what is said to be its length."""
    hint = "; heads come after tokens: of axes [B, N, T, H], swapaxes(1, 2) makes these, for query, key and value"
    return hint if t != n and n in lengths else ""


def transposed(shape: Any, wanted: Sequence[int]) -> str:
    """A hint, for the end of an error, if axes that should have lengths ``wanted`` come in the opposite order.

    Example:
      >>> transposed((8, 2), (2, 8))
      '; its axes come in the other order: write x.T'
    """
    is_turned = len(wanted) == 2 and tuple(shape) == tuple(wanted)[::-1] != tuple(wanted)
    return "; its axes come in the other order: write x.T" if is_turned else ""


def checked_array(name: str, x: Any) -> jax.Array:
    """The argument ``name`` as a JAX array.

    Raises:
      TypeError: it is no array: a list is none, its numbers would be copied one by one.
    """
    if not (isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__")):
        raise TypeError(f"{name} must be a JAX or numpy array, got {described(x)}")
    return jnp.asarray(x)


def checked_numbers(name: str, x: Any, shape: tuple[int, ...], kind: Any, rule: str, hint: str = "") -> Any:
    """The argument ``name`` as an array of JAX or numpy; a list of numbers is one, too.

    Args:
      name: of the argument.
      x: its value.
      shape: what its shape must be.
      kind: what its dtype must be a kind of, such as ``jnp.integer``.
      rule: both in words.
      hint: the end of the error.

    Raises:
      ValueError: another shape or dtype, or no numbers.
    """
    found = x
    if hasattr(x, "__jax_array__"):
        found = jnp.asarray(x)
    elif not isinstance(x, jax.Array | np.ndarray):
        with contextlib.suppress(TypeError, ValueError):  # rows of unequal lengths
            array = np.asarray(x)
            found = array if array.dtype.kind in "biuf" else x
    if not hasattr(found, "dtype") or found.shape != shape or not jnp.issubdtype(found.dtype, kind):
        raise ValueError(f"{name} must be {rule}, got {described(found)}{hint}")
    return found


def described(x: Any) -> str:
    """What an error says of a wrong array: dtype and shape, or of what is none the type and the beginning."""
    if isinstance(x, jax.Array | np.ndarray):
        return f"{x.dtype} of shape {x.shape}"
    return f"{type(x).__name__}: {shown(x)}"


def _number(name: str, value: Any) -> float:
    number = as_float(value)
    if number is None:
        raise ValueError(f"{name} must be a finite Python number, got {one_line(value)}")
    return number


def differentiable_once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks what implementation ``name`` computes for a call: function(call, ...), of which nobody takes a derivative.

    Forward and backward make up the first derivative of the op; their own are its second.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        marked = jax.custom_jvp(function, nondiff_argnums=(0,))

        @marked.defjvp
        def refuse(call, primals, tangents):
            raise NotImplementedError(
                f'{name} has first derivatives only; for second ones name implementation="xla" or "reference", '
                "which have them"
            )

        return marked

    return mark


def groups_of(call: Call, operands: Operands, *, merge: bool) -> tuple[HeadGroup, ...]:
    """The query heads of a call, by the chains that they take in turn; ``merge`` as in `head_groups`.

    With a run-time mask or a selection, chains have one pass, whose blocks are known at run time only.
    """
    if operands.mask is not None:
        return head_groups([(None,)], merge=merge)
    chains = call.chains if operands.chosen is None else [(None,)] * len(call.chains)
    return head_groups(chains, merge=merge)


class PassBlocks(NamedTuple):
    """The blocks that one pass of a head group computes.

    Attributes:
      q_order: token of each query row.
      kv_order: token of each key row.
      shape: (bq, bkv), rows of a block.
      pairs: [LB, LH, n], those that the mask, a selection and segment ids leave.
      rule: computes a partial block of the mask from row indices; None if ``tiles`` hold it, or there are none.
      tiles: bool [tiles, bq, bkv], the partial blocks of the mask; or None.
      granularity: queries of a block that choose together; 1 without a selection.
      segments: as in the operands.
    """

    q_order: RowOrder
    kv_order: RowOrder
    shape: tuple[int, int]
    pairs: BlockPairs
    rule: Reordered | None
    tiles: jax.Array | np.ndarray | None
    granularity: int
    segments: tuple[jax.Array, jax.Array] | None


def pass_blocks(
    call: Call,
    operands: Operands,
    group: HeadGroup,
    passes: tuple[Pass, ...],
    rows: int,
    in_tiles: Callable[..., bool],
    *,
    dkv: bool,
) -> PassBlocks:
    """The blocks of a pass, for kernels that read bool tiles or compute rules.

    Args:
      call: the call of the op.
      operands: its arrays, with the queries and the selected blocks of the group.
      group: the heads.
      passes: one of ``group.passes``.
      rows: queries of a block with a selection; its blocks of keys are those of the lists.
      in_tiles: in_tiles(masks, shape) is True if masks known beforehand are read as tiles, not computed by a rule.
      dkv: whether the lists are those of the backward pass.
    """
    sizes, granularity, orders = passes[0] if passes else call, 1, row_orders(operands, passes)
    shape = sizes.bwd_shape if dkv else sizes.fwd_shape
    masks = tuple(one.mask for one in passes) if passes else call.masks[group.first :: group.step]
    if call.selection is not None:
        block, granularity = call.selection
        shape = rows, block
    with_tiles = bool(masks) and in_tiles(masks, shape)
    if passes:
        pairs, tiles = planned_block_pairs(masks, shape, with_tiles)
    else:
        pairs, tiles = run_time_blocks(call, operands, shape, masks, with_tiles)
    if isinstance(tiles, np.ndarray):  # packed
        tiles = unpacked_tiles(tiles, shape[1]) if len(tiles) else None
    pairs = pairs.with_segments(operands.segments, orders, shape)
    rule = masks[0] if masks and not with_tiles else None
    return PassBlocks(*orders, shape, pairs, rule, tiles, granularity, operands.segments)


def row_orders(operands: Operands, passes: tuple[Pass, ...]) -> tuple[RowOrder, RowOrder]:
    """Row orders of queries and of keys in a pass of a head group: natural ones if its blocks are known at run time."""
    if passes:
        return passes[0].q_order, passes[0].kv_order
    return RowOrder(operands.query.shape[1]), RowOrder(operands.key.shape[1])


def run_time_blocks(
    call: Call, operands: Operands, shape: tuple[int, int], masks: Sequence[Reordered], with_tiles: bool
) -> tuple[BlockPairs, Any]:
    """The pairs of blocks that a run-time mask or a selection leaves, in natural row order, and their mask tiles.

    Args:
      call: the call of the op.
      operands: its arrays, or those of some heads; with a mask or with ``chosen``.
      shape: (bq, bkv), rows of a block.
      masks: those of ``call.masks`` that limit a selection, if the mask is no run-time array.
      with_tiles: whether to make tiles of these; otherwise rules compute them.

    Returns:
      The pairs, and their tiles: of a run-time mask as `run_time_block_pairs` has them, else `planned_block_pairs`.
    """
    if operands.chosen is None:
        assert operands.mask is not None
        return run_time_block_pairs(operands.mask, shape)
    assert call.selection is not None
    table, tiles = table_of(operands, shape, masks, with_tiles)
    return selected_block_pairs(operands.chosen, call.selection[1], shape, table, operands.query.shape[2]), tiles


def table_of(
    operands: Operands, shape: tuple[int, int], masks: Sequence[Reordered], with_tiles: bool
) -> tuple[StateTable, Any]:
    """What the mask beside a selection says of every block, and its tiles; arguments as in `run_time_blocks`."""
    if operands.mask is None:
        return state_table(masks, shape, with_tiles)
    return run_time_table(operands.mask, shape)


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """The inverse of x[:, :, c::C] for c in range(C)."""
    together = jnp.stack(parts, axis=3)
    return together.reshape(*together.shape[:2], together.shape[2] * together.shape[3], *together.shape[4:])


def merged(state: Sequence[jax.Array], update: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the softmax over two disjoint key sets from those over each."""
    (out, lse), (more, more_lse) = state, update
    both = jnp.logaddexp(lse, more_lse)
    base = jnp.where(both == -jnp.inf, 0, both)
    return out * jnp.exp(lse - base)[..., None] + more * jnp.exp(more_lse - base)[..., None], both


def lowered(lse: jax.Array) -> jax.Array:
    """Returns lse as backward passes read it: lowered, where it is huge, by more than logits are rounded.

    A backward pass computes weights ``exp(min(logit - lse, 0))``. Above 1e6 both are rounded by more than 0.1, so a
    weight of 1 would be e to the rounding error. With the lowered lse it is 1, as in the forward pass.
    """
    return lse - jnp.maximum(16 * jnp.finfo(lse.dtype).eps * abs(lse) - 2, 0)


def base_2_sinks(sinks: jax.Array) -> jax.Array:
    """Returns sinks in float32 for kernels that multiply by log2(e), at most 2.3e38, so that no finite one overflows.

    -inf, for no sink, stays.
    """
    sinks = sinks.astype(jnp.float32)
    return jnp.where(jnp.isinf(sinks), sinks, jnp.clip(sinks, -2.3e38, 2.3e38))


def over_batches(function: Callable[..., Any], most: float, *args: Any) -> Any:
    """function(*args) of an `Operands` and arrays by query, also under `jax.vmap`, which kernel calls do not know.

    Args:
      function: may be called with any number of batch entries up to ``most``.
      most: batch entries that it can take.
      *args: the arrays.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, operands, *by_query):
        args, flags = (operands, *by_query), (batched[0], *batched[1:])
        entries = operands.query.shape[1 if flags[0].query else 0]
        unbatched = [name for name in operands._fields if not OPERANDS[name].batched]
        backward = differentiated(operands) if by_query else ()
        if size * entries > most or any(getattr(flags[0], name) or name in backward for name in unbatched):
            # Arrays without a batch axis, and their gradients, cannot join the new one; a grid takes so many entries.
            one = functools.partial(_chosen, function, most, flags, args)
            results = jax.lax.map(one, jnp.arange(size))
        else:
            absent, kept = dict.fromkeys(unbatched), {name: getattr(operands, name) for name in unbatched}
            apart, apart_flags = ((x._replace(**absent), *rest) for x, *rest in (args, flags))

            def join(x, is_mapped):
                x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(size * x.shape[1], *x.shape[2:])

            first, *rest = jax.tree.map(join, apart, apart_flags)
            results = over_batches(function, most, first._replace(**kept), *rest)
            results = jax.tree.map(lambda x: x.reshape(size, entries, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped(*args)


def _chosen(function, most, flags, args, i):
    return over_batches(function, most, *jax.tree.map(lambda x, mapped: x[i] if mapped else x, args, flags))
