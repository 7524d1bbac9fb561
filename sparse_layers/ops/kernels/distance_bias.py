"""Biases by distance: a number for each head and distance of key and query, added to their logit.

Backends add ``table[h, clip(j - i + center, 0, L - 1)] - slopes[h] * |j - i|`` for query token i and key token j, as
`Operands` has table and slopes, and `Call` the center. The table has a gradient; slopes are constants. So ALiBi costs
kernels a product for each logit, not a lookup, and T5's buckets are a table of as many entries as they tell apart.
"""

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...arguments.checks import Positive, as_float, as_int, checked, strict_kwargs
from ...masks.serialization import register_node
from .call import Call
from .numerics import accumulator_dtype
from .operands import Operands
from .validation import checked_numbers, describe_value


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
      slopes: N finite numbers, as a sequence or a numpy array; None for no slopes.

    Attributes:
      table: see the argument.
      center: an int; 0 without a table.
      slopes: a tuple of floats, or None.

    Raises:
      ValueError: there is neither a table nor slopes, or one of them is of another shape, dtype or range; the center
        lies outside the table, or is None for an even L.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
      >>> def loss(table):  # two heads, and distances up to 8 on each side
      ...     return sl.block_sparse_attention(q, k, v, sl.Window(20, 20), bias=sl.DistanceBias(table)).sum()
      >>> jax.grad(loss)(jnp.zeros((2, 17))).shape
      (2, 17)
    """

    __slots__ = ("center", "slopes", "table")

    table: Any
    center: int
    slopes: tuple[float, ...] | None

    def __init__(
        self,
        table: ArrayLike | None = None,
        center: int | None = None,
        slopes: Sequence[float] | np.ndarray | None = None,
    ):
        if table is None and slopes is None:
            raise ValueError("a DistanceBias must have a table or slopes, got None for both")
        if table is not None:
            rule = "floats of shape [N, L], or [1, L] for all heads"
            hint = "; for all heads write table[None]" if np.ndim(table) == 1 else ""
            table = jnp.asarray(checked_numbers("table", table, (None, None), jnp.floating, rule, hint))
        self._set(table, _checked_center(table, center), None if slopes is None else _checked_slopes(slopes))

    def _set(self, table: Any, center: int, slopes: tuple[float, ...] | None) -> None:
        for name, value in (("table", table), ("center", center), ("slopes", slopes)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any):
        raise AttributeError(f"a DistanceBias is immutable: {name} cannot be set")

    def __delattr__(self, name: str):
        raise AttributeError(f"a DistanceBias is immutable: {name} cannot be deleted")

    def __reduce__(self):
        return _build_unchecked, (self.table, self.center, self.slopes)

    def __repr__(self):
        table = f"{self.table.dtype}{list(self.table.shape)}" if hasattr(self.table, "shape") else repr(self.table)
        slopes = "" if self.slopes is None else f", slopes={reprlib.repr(self.slopes)}"
        return f"DistanceBias({table}, center={self.center}{slopes})"

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("table"), self.table),), (self.center, self.slopes)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return _build_unchecked(*leaves, *static)  # leaves may be axes to map over, shardings or cotangents


def _build_unchecked(table: Any, center: int, slopes: tuple[float, ...] | None) -> DistanceBias:
    bias = object.__new__(DistanceBias)
    bias._set(table, center, slopes)
    return bias


def _checked_center(table: Any, center: Any) -> int:
    if table is None:
        if center is not None:
            raise ValueError(f"center is an index of the table, and must be None without one, got {center!r}")
        return 0
    if 0 in table.shape:
        raise ValueError(f"table must not be empty, got shape {table.shape}")
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
        raise ValueError(f"center must be an integer from 0 to {length - 1}, an index of the table, got {center!r}")
    return index


def _checked_slopes(slopes: Any) -> tuple[float, ...]:
    hint = ""
    if isinstance(slopes, jax.Array):
        hint = "; slopes are constants, and learned ones go into the table: see DistanceBias"
    elif isinstance(slopes, Sequence | np.ndarray) and np.ndim(slopes) == 1 and len(slopes):
        numbers = [number for number in map(as_float, slopes) if number is not None]
        if len(numbers) == len(slopes):
            return tuple(numbers)
    raise ValueError(f"slopes must be finite Python numbers, one for each head, got {describe_value(slopes)}{hint}")


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
      ValueError: buckets have other axes or no floats; their number is below 4 (2 without ``bidirectional``), or odd
        with it; max_distance is not above the number of distances that have a bucket of their own.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> sl.t5_bias(jnp.arange(8.0)[None], max_distance=8).table.astype(int).ravel().tolist()
      [3, 3, 3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7, 7, 7]

    References:
      Raffel et al. 2020, "Exploring the Limits of Transfer Learning" (arXiv 1910.10683).
    """
    rule = "floats of shape [N, num_buckets], or [1, num_buckets] for all heads"
    buckets = jnp.asarray(checked_numbers("buckets", buckets, (None, None), jnp.floating, rule))
    bidirectional = bool(checked("bidirectional", bidirectional, bool))
    count, max_distance = buckets.shape[1], checked("max_distance", max_distance, Positive)
    sides = 2 if bidirectional else 1
    per_side = count // sides
    if count % sides or per_side < 2:
        raise ValueError(
            f"buckets must be an even number >= 4, or >= 2 without bidirectional, got {count} in shape {buckets.shape}"
        )
    if max_distance <= per_side // 2:
        raise ValueError(
            f"max_distance must be above {per_side // 2}, as nearer keys have buckets of their own, got {max_distance}"
        )
    by_distance = _t5_buckets(per_side, max_distance)
    numbers = by_distance[::-1]
    if bidirectional:
        numbers = np.concatenate([numbers, by_distance[1:] + per_side])
    return DistanceBias(buckets[:, numbers], max_distance)


def _t5_buckets(count: int, max_distance: int) -> np.ndarray:
    """Returns the bucket of each distance 0 .. max_distance on one side; in float32, as T5's code rounds."""
    exact = count // 2
    distances = np.arange(max_distance + 1)
    logs = np.log(np.maximum(distances, 1).astype(np.float32) / exact) / np.float32(math.log(max_distance / exact))
    large = exact + (logs * np.float32(count - exact)).astype(int)
    return np.where(distances < exact, distances, np.minimum(large, count - 1))


# --- for the op and its implementations ------------------------------------------------------------------------------


def checked_bias(bias: Any, heads: int, dtype: Any) -> tuple[jax.Array | None, jax.Array | None, int]:
    """Returns table [N, L] or None, slopes [N] or None, in the accumulators' dtype for that of query, and center."""
    if bias is None:
        return None, None, 0
    if not isinstance(bias, DistanceBias):
        raise TypeError(
            f"bias must be a DistanceBias or None, got {describe_value(bias)}; a bias by head and distance is "
            "sl.DistanceBias(table), sl.alibi(num_heads) or sl.t5_bias(buckets), and one of 0 and -inf is a mask"
        )
    table, slopes, acc_dtype = bias.table, bias.slopes, accumulator_dtype(dtype)
    if table is not None and table.shape[:-1] not in ((1,), (heads,)):
        raise ValueError(f"bias: table must have shape [N, L] or [1, L] with N = {heads}, got {table.shape}")
    if slopes is not None and len(slopes) != heads:
        raise ValueError(f"bias: slopes must be N = {heads} numbers, got {len(slopes)}")
    return (
        None if table is None else jnp.broadcast_to(table.astype(acc_dtype), (heads, table.shape[1])),
        None if slopes is None else jnp.asarray(slopes, acc_dtype),
        bias.center,
    )


def bias_by_distance(call: Call, operands: Operands, lengths: tuple[int, int]) -> jax.Array:
    """Returns the bias [N, T + S - 1] of each distance from 1 - T to S - 1, for (T, S) = ``lengths``.

    Entries beyond the table are copies of its ends, so that their gradients are sums, in the same order each time.
    """
    (t, s), table, slopes = lengths, operands.bias_table, operands.bias_slopes
    bias = None
    if table is not None:
        first, last = call.bias_center - (t - 1), call.bias_center + s - 1
        before, behind = max(0, -first), max(0, last - (table.shape[1] - 1))
        bias = jnp.pad(table, [(0, 0), (before, behind)], mode="edge")[:, first + before : last + before + 1]
    if slopes is not None:
        linear = -slopes[:, None] * abs(np.arange(1 - t, s)).astype(slopes.dtype)
        bias = linear if bias is None else bias + linear
    assert bias is not None
    return bias


def has_bias(operands: Operands) -> bool:
    """True if the call has a bias."""
    return operands.bias_table is not None or operands.bias_slopes is not None
