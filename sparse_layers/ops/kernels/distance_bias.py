"""Biases by distance: a number for each head and distance of key and query, added to their logit.

Backends add ``table[h, clip(j - i + center, 0, L - 1)] - slopes[h] * |j - i|`` for query token i and key token j, as
`Operands` has table and slopes, and `Call` the center. The table has a gradient; slopes are constants. So ALiBi costs
kernels a product for each logit, not a lookup, and T5's buckets are a table of as many entries as they tell apart.
"""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...arguments.checks import Positive, as_float, as_int, checked, strict_kwargs
from ...masks.grids import grid_shape
from ...masks.serialization import register_node
from ..planning.row_orders import RowOrder
from .call import Call
from .numerics import accumulator_dtype
from .operands import Operands
from .validation import as_array, checked_numbers, describe_value, transposed_hint


@strict_kwargs
@register_node
@jax.tree_util.register_pytree_with_keys_class
class DistanceBias:
    """A bias of logits by head and distance, learned or constant: ``bias=`` of the op, `block_sparse_attention`.

    The logit of query i and key j in head h, ``scale * q . k``, gets ``table[h, clip(j - i + center, 0, L - 1)]`` and
    ``-slopes[h] * |j - i|``, before the soft cap. Positions i and j count tokens. Distances beyond the table take its
    first or last entry. `alibi` makes slopes and `t5_bias` a table.

    A bias is an immutable pytree with the one leaf ``table``, which has a gradient. Slopes are constants: a table
    ``-slopes[:, None] * jnp.arange(T)[::-1]`` with ``center=T - 1`` learns them.

    Args:
      table: floats [N, L], or [1, L] for the same entries in all heads; None for no table. Entry ``center + d`` is for
        keys d tokens behind the query, and ``center - d`` for keys d tokens before it.
      center: the index of distance 0, from 0 to L - 1. None means the middle, of an odd L; under causal masks L - 1
        saves the entries of later keys.
      slopes: N numbers of at most 1e30 in absolute value, as a sequence or a numpy array; None for no slopes.

    Attributes:
      table: see the argument.
      center: an int; 0 without a table.
      slopes: a tuple of floats, or None.

    Raises:
      ValueError: there is neither a table nor slopes, or one of them is empty or of another shape, dtype or range; the
        center lies outside the table, or is None for an even L.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
      >>> def loss(table):  # two heads, and distances up to 8 on each side
      ...     return sl.block_sparse_attention(q, k, v, sl.Window(20, 20), bias=sl.DistanceBias(table)).sum()
      >>> jax.grad(loss)(jnp.zeros((2, 17))).shape
      (2, 17)
    """

    __slots__ = ("_orders", "center", "slopes", "table")

    table: Any
    center: int
    slopes: tuple[float, ...] | None
    _orders: tuple[RowOrder, RowOrder] | None  # of positions, see `Call`

    def __init__(
        self,
        table: ArrayLike | None = None,
        center: int | None = None,
        slopes: Sequence[float] | np.ndarray | None = None,
    ):
        if table is None and slopes is None:
            raise ValueError("a DistanceBias must have a table or slopes, got None for both")
        if table is not None:
            table = _checked_table("table", table, 2, "floats of shape [N, L], or [1, L] for all heads")
        self._set(table, _checked_center(table, center), None if slopes is None else _checked_slopes(slopes), None)

    def _set(self, table: Any, center: int, slopes: Any, orders: Any) -> None:
        for name, value in (("table", table), ("center", center), ("slopes", slopes), ("_orders", orders)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any):
        raise AttributeError(f"a DistanceBias is immutable: {name} cannot be set")

    def __delattr__(self, name: str):
        raise AttributeError(f"a DistanceBias is immutable: {name} cannot be deleted")

    def __reduce__(self):
        return _build_unchecked, (self.table, *self._static)

    def __repr__(self):
        table = f"{self.table.dtype}{list(self.table.shape)}" if hasattr(self.table, "shape") else repr(self.table)
        slopes = "" if self.slopes is None else f", slopes={reprlib.repr(self.slopes)}"
        orders = "" if self._orders is None else f", positions={', '.join(map(str, self._orders))}"
        return f"DistanceBias({table}, center={self.center}{slopes}{orders})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistanceBias) and self.table is other.table and self._static == other._static

    def __hash__(self) -> int:
        return hash((id(self.table), self._static))

    def of_heads(self, heads: Sequence[int]) -> "DistanceBias":
        """Returns the bias of some query heads."""
        bias, index = object.__new__(DistanceBias), np.array(heads)
        table = self.table if self.table is None or len(self.table) == 1 else self.table[index]
        bias._set(table, self.center, self.slopes and tuple(self.slopes[i] for i in heads), self._orders)
        return bias

    @property
    def on_grid(self) -> bool:
        """True if distances are counted on a grid, as in `grid_bias`, and not by tokens."""
        return self._orders is not None

    @property
    def _static(self) -> Any:
        orders = None if self._orders is None else tuple(map(dataclasses.astuple, self._orders))
        return self.center, self.slopes, orders

    def in_row_orders(self, q_order: RowOrder, kv_order: RowOrder) -> "DistanceBias":
        """Returns the bias for arrays in other orders: row r is the token, and so the position, ``order.token(r)``."""
        bias = object.__new__(DistanceBias)
        bias._set(self.table, self.center, self.slopes, (q_order, kv_order))
        return bias

    def of_distances(self, heads: np.ndarray, distances: jax.Array, dtype: Any) -> jax.Array:
        """Returns the bias [B, n, G, L] of query heads [n, G] at distances [B, n or 1, L]."""
        bias: Any = 0
        if self.table is not None:
            rows = jnp.asarray(self.table, dtype)[heads if len(self.table) > 1 else np.zeros_like(heads)]
            index = jnp.clip(distances + self.center, 0, rows.shape[-1] - 1)
            n, group = np.ogrid[: len(rows), : rows.shape[1]]
            bias = rows[n[..., None], group[..., None], index[:, :, None]]
        if self.slopes is not None:
            slopes = jnp.asarray(self.slopes, dtype)[heads][None, ..., None]
            bias = bias - slopes * abs(distances[:, :, None]).astype(dtype)
        return bias

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("table"), self.table),), self._static

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return _build_unchecked(*leaves, *static)  # leaves may be axes to map over, shardings or cotangents


def _build_unchecked(table: Any, center: int, slopes: Any, orders: Any) -> DistanceBias:
    bias = object.__new__(DistanceBias)
    bias._set(table, center, slopes, orders and tuple(RowOrder(*fields) for fields in orders))
    return bias


def _checked_table(name: str, x: Any, axes: int, rule: str) -> jax.Array:
    """Returns the argument ``name`` as an array of floats with a number of axes; ``rule`` says this in errors."""
    array, is_list, hint = as_array(x), isinstance(x, Sequence), ""
    if isinstance(array, jax.Array | np.ndarray):
        if jnp.issubdtype(array.dtype, jnp.integer):
            hint = f"; write {f'jnp.array({name}, jnp.float32)' if is_list else f'{name}.astype(jnp.float32)'}"
        elif array.ndim == 1 and axes == 2:
            hint = f"; for all heads write {f'[{name}]' if is_list else f'{name}[None]'}"
    elif isinstance(x, jax.ShapeDtypeStruct):
        hint = "; to compute shapes alone, make the bias inside jax.eval_shape"
    elif any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
        hint = f"; it has traced numbers: write jnp.array({name})"
    array = checked_numbers(name, array, (None,) * axes, jnp.floating, rule, hint)
    if 0 in array.shape:
        raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    # JAX, even jnp.array, may share a numpy array's memory, or copy it only after the caller has written there again.
    return jnp.asarray(array.copy()) if isinstance(array, np.ndarray) else array


def _checked_center(table: Any, center: Any) -> int:
    if table is None:
        if center is not None:
            raise ValueError(f"center is an index of the table, and must be None without one, got {center!r}")
        return 0
    length = table.shape[1]
    if center is None:
        if length % 2 == 0:
            raise ValueError(
                f"table must have an odd number of entries where center is None, got {length}; "
                f"write center={length - 1} if distance 0 is the last entry"
            )
        return length // 2
    index = as_int(center)
    if index is None or not 0 <= index < length:
        hint = "; write a Python int, static under jit" if isinstance(center, jax.core.Tracer) else ""
        raise ValueError(
            f"center must be an integer from 0 to {length - 1}, an index of the table, got {center!r}{hint}"
        )
    return index


def _checked_slopes(slopes: Any) -> tuple[float, ...]:
    entries = slopes.tolist() if isinstance(slopes, np.ndarray) else slopes
    if isinstance(entries, Sequence) and len(entries):
        # In float32 a slope of 1e30 times a distance is finite up to 3e8 tokens.
        numbers = [x for x in map(as_float, entries) if x is not None and abs(x) <= 1e30]
        if len(numbers) == len(entries):
            return tuple(numbers)
    hint = ""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(slopes)):
        hint = "; slopes are constants: write Python numbers or a numpy array; learned ones go into the table"
    raise ValueError(
        f"slopes must be numbers of at most 1e30 in absolute value, one for each head, got {describe_value(slopes)}"
        f"{hint}"
    )


@strict_kwargs
def alibi(num_heads: int) -> DistanceBias:
    """Returns the bias of ALiBi: ``-slopes[h] * |j - i|``, with the paper's slopes 2^(-8 / N), 2^(-16 / N), ..., 2^-8.

    Under a causal mask it is that of the paper, ``slopes[h] * (j - i)``; under others it is symmetric. For N other than
    a power of two, slopes are those of the authors' code: of the largest power of two P below N, then every second one
    of 2 P. BLOOM has the same. They are constants, without parameters or gradients.

    Args:
      num_heads: N, the number of query heads.

    Raises:
      ValueError: num_heads is no integer >= 1.

    Example:
      >>> import sparse_layers as sl
      >>> sl.alibi(4).slopes, sl.alibi(3).slopes
      ((0.25, 0.0625, 0.015625, 0.00390625), (0.0625, 0.00390625, 0.25))

    References:
      Press et al. 2021, "Train Short, Test Long" (arXiv 2108.12409).
    """
    num_heads = checked("num_heads", num_heads, Positive)
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)]
    return DistanceBias(slopes=slopes[:num_heads])


@strict_kwargs
def t5_bias(buckets: ArrayLike, *, bidirectional: bool = True, max_distance: int = 128) -> DistanceBias:
    """Returns the bias of T5: learned entries for buckets of distances, which grow with the distance.

    One half of the buckets are distances one by one. The others grow logarithmically up to ``max_distance``; the last
    one has all beyond. T5 has no scale: its layers take ``scale=1``.

    Args:
      buckets: floats [N, num_buckets], or [1, num_buckets]; ``relative_attention_bias.weight.T`` of Hugging Face's T5.
      bidirectional: True if keys behind the query have a half of the buckets of their own, as in T5's encoder; False if
        they share bucket 0, for causal masks, as in its decoder.
      max_distance: the distance from which all keys are in the last bucket.

    Returns:
      A `DistanceBias` with a table [N, 2 * max_distance + 1], or [N, max_distance + 1] without ``bidirectional``; its
      gradient flows into buckets.

    Raises:
      ValueError: buckets have other axes, no floats or no entries; their number is below 4 (2 without
        ``bidirectional``), or odd with it; max_distance is not above the number of distances that have a bucket of
        their own.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> sl.t5_bias(jnp.arange(8.0)[None], max_distance=8).table.astype(int).ravel().tolist()
      [3, 3, 3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7, 7, 7]

    References:
      Raffel et al. 2020, "Exploring the Limits of Transfer Learning" (arXiv 1910.10683).
    """
    rule = "floats of shape [N, num_buckets], or [1, num_buckets] for all heads"
    buckets = _checked_table("buckets", buckets, 2, rule)
    bidirectional = bool(checked("bidirectional", bidirectional, bool))
    max_distance = checked("max_distance", max_distance, Positive)
    per_side = check_buckets("t5_bias", "buckets.shape[1]", buckets.shape[1], bidirectional, max_distance)
    by_distance = _t5_buckets(per_side, max_distance)
    numbers = by_distance[::-1]
    if bidirectional:
        numbers = np.concatenate([numbers, by_distance[1:] + per_side])
    # A sum, as the gradient of a look-up adds in any order on GPUs.
    is_of_bucket = np.arange(buckets.shape[1])[:, None] == numbers
    table = jnp.where(is_of_bucket[None], _widen(buckets)[:, :, None], 0).sum(1)
    return DistanceBias(table, max_distance)


def _widen(table: jax.Array) -> jax.Array:
    """Returns a table in float32, or in its wider dtype: entries of many distances get sums as gradients."""
    return table.astype(jnp.promote_types(table.dtype, jnp.float32))


def check_buckets(owner: str, name: str, count: int, bidirectional: bool, max_distance: int) -> int:
    """Returns the number of T5's buckets on one side of ``count`` in all, which errors of ``owner`` call ``name``."""
    sides = 2 if bidirectional else 1
    per_side = count // sides
    if count % sides or per_side < 2:
        raise ValueError(f"{owner}: {name} must be an even number >= 4, or >= 2 without bidirectional, got {count}")
    if max_distance <= per_side // 2:
        raise ValueError(
            f"{owner}: max_distance must be above {per_side // 2}, as nearer keys have buckets of their own, "
            f"got {max_distance}"
        )
    return per_side


def _t5_buckets(count: int, max_distance: int) -> np.ndarray:
    """Returns the bucket of each distance 0 .. max_distance on one side; in float32, as T5's code rounds."""
    exact = count // 2
    distances = np.arange(max_distance + 1)
    logs = np.log(np.maximum(distances, 1).astype(np.float32) / exact) / np.float32(math.log(max_distance / exact))
    large = exact + (logs * np.float32(count - exact)).astype(int)
    return np.where(distances < exact, distances, np.minimum(large, count - 1))


@strict_kwargs
def grid_bias(shape: Sequence[int], tables: ArrayLike | Sequence[ArrayLike]) -> DistanceBias:
    """Returns a bias by distances on a grid. Sequences have all tokens of the grid, in row-major order.

    The logit of query i and key j gets the entry of their distances on all axes: of one joint table, or the sum of the
    entries of one table for each axis. Distances beyond a table take its first or last entries.

    Args:
      shape: lengths of the grid's axes, the slowest first; their product is T and S.
      tables: floats [N, L1, ..., Ln] with one axis of entries for each of the grid's; or a sequence of [N, L], one for
        each axis. N may be 1 for all heads. Lengths are odd, with distance 0 in the middle. Swin's table of windows of
        h x w tokens counts from key to query: it is ``table[::-1].T.reshape(N, 2 * h - 1, 2 * w - 1)`` here.

    Returns:
      A `DistanceBias` with a table of all distances on the grid, about 2^n entries for each token; its gradient flows
      into tables.

    Raises:
      ValueError: a shape that is not of integers >= 1; a number of tables that is not that of the grid's axes; tables
        of other axes, of different N, without floats, empty or of an even length.
      TypeError: shape is no sequence.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 56 * 56, 2, 16))
      >>> windows = sl.preset("windows", shape=(56, 56), size=7)
      >>> table = jnp.zeros((13 * 13, 2))  # of Swin
      >>> bias = sl.grid_bias((56, 56), table[::-1].T.reshape(2, 13, 13))
      >>> sl.block_sparse_attention(q, k, v, windows, bias=bias).shape
      (1, 3136, 2, 16)

    References:
      Liu et al. 2021, "Swin Transformer" (arXiv 2103.14030).
    """
    sizes = grid_shape("grid_bias", shape)
    if isinstance(tables, Sequence):
        if len(tables) != len(sizes):
            raise ValueError(f"tables must be one for each axis of shape {sizes}, got {len(tables)}")
        rule = "floats of shape [N, L], or [1, L] for all heads"
        by_axis = [_checked_table(f"tables[{i}]", x, 2, rule) for i, x in enumerate(tables)]
        spread = [_to_reach(f"tables[{i}]", x, sizes[i : i + 1]) for i, x in enumerate(by_axis)]
        if len(heads := {len(x) for x in by_axis} - {1}) > 1:
            raise ValueError(f"tables must have the same N, or 1 for all heads, got N of {sorted(heads)}")
        axes = range(1, len(sizes) + 1)
        expanded = (jnp.expand_dims(x, [a for a in axes if a != axis]) for axis, x in zip(axes, spread, strict=True))
        table = functools.reduce(jnp.add, expanded)
    else:
        rule = f"floats of shape [N, {', '.join(f'L{i + 1}' for i in range(len(sizes)))}], or one [N, L] for each axis"
        table = _to_reach("tables", _checked_table("tables", tables, 1 + len(sizes), rule), sizes)
    spans = tuple(2 * n - 1 for n in sizes)
    # Positions whose differences tell all distances apart: coordinates on a grid of spans.
    axes = (sizes[0], *spans[1:])
    order = RowOrder(math.prod(axes), axes, sizes, sizes)
    return DistanceBias(table.reshape(table.shape[0], -1)).in_row_orders(order, order)


def _to_reach(name: str, table: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Returns a table [N, L1, ...] with entries for all distances on axes of ``sizes``: [N, 2 * size - 1, ...]."""
    if not all(length % 2 for length in table.shape[1:]):
        raise ValueError(f"{name} must have odd lengths, with distance 0 in the middle, got shape {table.shape}")
    table = _widen(table)
    for axis, size in enumerate(sizes, 1):
        length = table.shape[axis]
        missing = size - 1 - length // 2
        if missing > 0:
            table = jnp.pad(
                table, [(missing, missing) if i == axis else (0, 0) for i in range(table.ndim)], mode="edge"
            )
        else:
            table = jax.lax.slice_in_dim(table, -missing, length + missing, axis=axis)
    return table


# --- for the op and its implementations ------------------------------------------------------------------------------


def check_bias(bias: Any, heads: int, lengths: tuple[int, int] | None = None, name: str = "bias") -> None:
    """Raises TypeError or ValueError unless a bias, in errors ``name``, is None or one for query heads and (T, S)."""
    if bias is None:
        return
    if not isinstance(bias, DistanceBias):
        raise TypeError(
            f"{name} must be a DistanceBias or None, got {describe_value(bias)}; a bias by head and distance is "
            "sl.DistanceBias(table), sl.alibi(num_heads) or sl.t5_bias(buckets), or relative_bias=sl.AlibiBias() of a "
            "layer; one of 0 and -inf is a mask"
        )
    if bias.table is not None and bias.table.shape[:-1] not in ((1,), (heads,)):
        hint = transposed_hint(bias.table.shape, (heads, len(bias.table)))
        hint = hint or "; heads are the first axis of tables, and of the buckets [N, num_buckets] of t5_bias"
        raise ValueError(
            f"{name}: table must have shape [N, L] or [1, L] with N = {heads}, got {bias.table.shape}{hint}"
        )
    if bias.slopes is not None and len(bias.slopes) != heads:
        raise ValueError(f"{name}: slopes must be N = {heads} numbers, got {len(bias.slopes)}")
    if lengths is None or bias._orders is None:
        return
    tokens = tuple(order.rows for order in bias._orders)
    if tokens != lengths:
        raise ValueError(
            f"{name}: counts distances on a grid, so calls must have all its {tokens[0]} query and {tokens[1]} key "
            f"tokens, got (T, S) = {lengths}"
        )


def checked_bias(
    bias: Any, heads: int, lengths: tuple[int, int], dtype: Any
) -> tuple[tuple[jax.Array | None, jax.Array | None], dict[str, Any]]:
    """Returns (table [N, L] or None, slopes [N] or None) as in `Operands`, and the fields of a `Call`.

    Arrays are in the accumulators' dtype for queries of ``dtype``; lengths are (T, S).
    """
    check_bias(bias, heads, lengths)
    if bias is None:
        return (None, None), {}
    table, slopes, acc_dtype = bias.table, bias.slopes, accumulator_dtype(dtype)
    if table is not None:
        table = jnp.broadcast_to(table.astype(acc_dtype), (heads, table.shape[1]))
    arrays = table, None if slopes is None else jnp.asarray(slopes, acc_dtype)
    return arrays, {"bias_center": bias.center, "bias_orders": bias._orders}


def bias_by_distance(call: Call, operands: Operands, lengths: tuple[int, int]) -> jax.Array:
    """Returns the bias [N, T + S - 1] of each distance from 1 - T to S - 1, for T and S positions: ``lengths``.

    Entries beyond the table are copies of its ends, so that their gradients are sums, in the same order each time.
    """
    (t, s), table, slopes = lengths, operands.bias_table, operands.bias_slopes
    bias = None
    if table is not None:
        first, last = call.bias_center - (t - 1), call.bias_center + s - 1
        before, behind = max(0, -first), max(0, last - (table.shape[1] - 1))
        bias = jnp.pad(table, [(0, 0), (before, behind)], mode="edge")[:, first + before : last + before + 1]
    if slopes is not None:
        linear = -slopes[:, None] * abs(np.arange(1 - t, s))[None].astype(slopes.dtype)
        bias = linear if bias is None else bias + linear
    assert bias is not None
    return bias


def has_bias(operands: Operands) -> bool:
    """True if the call has a bias."""
    return operands.bias_table is not None or operands.bias_slopes is not None
