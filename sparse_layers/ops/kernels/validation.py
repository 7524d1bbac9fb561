"""The rules for the arguments of the op, of scorers and of caches: dtypes, shapes, heads, finite numbers."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ...arguments.checks import as_float
from ...arguments.foreign import BOOL_IDS, BOOL_ORDER, one_line, scorer_hint, shown
from ..planning.selection import Selection, concrete_value


def check_arrays(query: jax.Array, key: jax.Array, value: jax.Array | None = None) -> None:
    """Checks that query, key and, if given, value fit each other."""
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


def checked_array(name: str, x: Any) -> jax.Array:
    """Returns the argument ``name`` as a JAX array. A list is refused, as its numbers would be copied one by one."""
    if not (isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__")):
        raise TypeError(f"{name} must be a JAX or numpy array, got {describe_value(x)}")
    return jnp.asarray(x)


def checked_numbers(name: str, x: Any, shape: tuple[Any, ...], kind: Any, rule: str, hint: str = "") -> Any:
    """Returns the argument ``name``, which may be a list of numbers, as an array of a shape and a ``kind`` of dtype.

    In a shape, a first ``...`` stands for any axes and None for any length. ``kind`` may be a tuple of these. ``rule``
    says both in words, for the error, and ``hint`` is its end.
    """
    array = as_array(x)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    is_of_kind = isinstance(array, jax.Array | np.ndarray) and any(jnp.issubdtype(array.dtype, x) for x in kinds)
    if not is_of_kind or not _has_shape(array.shape, shape):
        raise ValueError(f"{name} must be {rule}, got {describe_value(array)}{hint}")
    return array


def as_array(x: Any) -> Any:
    """Returns an array, or a list of numbers, as a JAX or numpy array; anything else stays as it is."""
    if hasattr(x, "__jax_array__"):
        return jnp.asarray(x)
    if not isinstance(x, jax.Array | np.ndarray):
        with contextlib.suppress(TypeError, ValueError):  # rows of unequal lengths, tracers
            numbers = np.asarray(x)
            return numbers if numbers.dtype.kind in "biuf" else x
    return x


def _has_shape(shape: tuple[int, ...], wanted: tuple[Any, ...]) -> bool:
    if wanted[:1] == (...,):
        wanted = wanted[1:]
        shape = shape[max(len(shape) - len(wanted), 0) :]
    return len(shape) == len(wanted) and all(n in (None, m) for m, n in zip(shape, wanted, strict=True))


def checked_scalars(scale: Any, logits_soft_cap: Any, head_size: int) -> tuple[float, float | None]:
    """Returns the scale of the logits, head_size ** -0.5 for None, and their soft cap or None."""
    scale = 1 / math.sqrt(head_size) if scale is None else _number("scale", scale)
    if logits_soft_cap is not None:
        logits_soft_cap = _number("logits_soft_cap", logits_soft_cap)
        if not 0 < logits_soft_cap <= 1e30:
            raise ValueError(f"logits_soft_cap must be > 0 or None, and at most 1e30, got {logits_soft_cap}")
    return scale, logits_soft_cap


def _number(name: str, value: Any) -> float:
    number = as_float(value)
    if number is None:
        raise ValueError(f"{name} must be a finite Python number, got {one_line(value)}")
    return number


def checked_sinks(sinks: Any, heads: int) -> jax.Array | None:
    """Returns the sinks as an array [heads], or None."""
    if sinks is None:
        return None
    rule = f"floats of shape [N] = ({heads},)"
    return jnp.asarray(checked_numbers("sinks", sinks, (heads,), jnp.floating, rule))


def checked_ids(
    argument: str, token_ids: Any, batch: tuple[int, ...], lengths: tuple[int, int], heads: int
) -> tuple[jax.Array, jax.Array] | None:
    """Returns ids of queries [B, T] and of keys [B, S] in int32, or None; B is 1 without a batch.

    Args:
      argument: "segment_ids" or "order_ids", for errors.
      token_ids: integers [*batch, T] if T == S, a pair of those for queries and keys, or None.
      batch, lengths: the batch axes, and (T, S).
      heads: N, for a hint if query seems to be [B, N, T, H].
    """
    if token_ids is None:
        return None
    t, s = lengths
    if isinstance(token_ids, list) and len(token_ids) == 2 and all(hasattr(ids, "shape") for ids in token_ids):
        raise ValueError(f"{argument} must be an array or a pair, got a list of two: a pair is a tuple, write (a, b)")
    if not isinstance(token_ids, tuple):
        if t != s:
            raise ValueError(f"{argument} must be a pair (of queries, of keys) when T != S, got one; T = {t}, S = {s}")
        token_ids = (token_ids, token_ids)
    if len(token_ids) != 2:
        raise ValueError(f"{argument} must be an array or a pair (tuple) of arrays, got {len(token_ids)} entries")
    pair = []
    for name, ids, length in zip(("queries", "keys"), token_ids, lengths, strict=True):
        name = f"{argument} of {name}"
        shape, ids_shape = (*batch, length), getattr(ids, "shape", ())
        hint = swapped_hint(t, heads, ids_shape[-1:]) if len(ids_shape) == len(shape) else ""
        hint = hint or transposed_hint(ids_shape, shape) or shared_hint(ids_shape, shape)
        dtype = getattr(ids, "dtype", np.int32)
        of_bools = f"; {BOOL_IDS if argument == 'segment_ids' else BOOL_ORDER}"
        hint += of_bools if dtype == np.dtype(bool) else float_hint(argument, dtype)
        ids = checked_numbers(name, ids, shape, jnp.integer, f"integers of shape {shape}", hint)
        check_int32(name, ids)
        pair.append(jnp.asarray(ids, jnp.int32).reshape(*(batch or (1,)), length))
    return pair[0], pair[1]


def check_int32(name: str, ids: Any) -> None:
    """Refuses ids that do not fit into int32: truncated, two segments could become one, or padding."""
    if np.can_cast(ids.dtype, np.int32):
        return
    if isinstance(ids, jax.core.Tracer):
        raise ValueError(
            f"{name} must be int32 or smaller inside jit, where nobody sees which numbers fit: write "
            f".astype(jnp.int32) behind them, got {ids.dtype}"
        )
    if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ValueError(f"{name} must fit into int32, got {ids.min()} to {ids.max()}")


def checked_visibility(
    segment_ids: Any, order_ids: Any, batch: tuple[int, ...], lengths: tuple[int, int], heads: int
) -> tuple[tuple[jax.Array, jax.Array] | None, tuple[jax.Array, jax.Array] | None]:
    """Returns `checked_ids` of both: (segments, order ids), as in `Operands`; order ids alone are of one segment."""
    segments = checked_ids("segment_ids", segment_ids, batch, lengths, heads)
    ids = checked_ids("order_ids", order_ids, batch, lengths, heads)
    if segments is None and ids is not None:
        segments = jnp.zeros_like(ids[0]), jnp.zeros_like(ids[1])
    return segments, ids


def checked_selection(selection: Any, batch: tuple[int, ...], lengths: tuple[int, int], heads: tuple[int, int]) -> Any:
    """Returns the ids of a selection [*batch, Tq, G, k], for lengths (T, S) and heads (N, K)."""
    if not isinstance(selection, Selection):
        raise TypeError(
            f"selection must be a Selection or None, got {describe_value(selection)}{scorer_hint(selection)}"
        )
    ids, block, granularity = selection.ids, selection.block, selection.granularity
    (t, s), head_counts = lengths, sorted({1, *heads})
    rows = *batch, -(-t // granularity)
    if not hasattr(ids, "shape") or ids.shape[:-2] != rows or ids.shape[-2] not in head_counts:
        raise ValueError(
            f"selection: ids must have shape [{', '.join(map(str, rows))}, G, k], one row for each {granularity} of "
            f"T = {t} queries, with G one of {head_counts} (1, key heads or query heads), got {describe_value(ids)}"
        )
    blocks, numbers = -(-s // block), concrete_value(ids)
    if numbers is not None and numbers.size and (last := numbers.max()) >= blocks:
        raise ValueError(
            f"selection: ids must be below {blocks}, the number of blocks of {block} in S = {s} keys, got {last}"
        )
    return jnp.asarray(ids)


def is_floating(dtype: Any) -> bool:
    """True if ``dtype`` is a floating-point dtype or its name."""
    try:
        return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except (TypeError, ValueError):  # no dtype at all
        return False


def swapped_hint(t: int, n: int, lengths: Sequence[int]) -> str:
    """Returns a hint for an error: "" unless N is one of ``lengths``, as if axes were [B, N, T, H]."""
    hint = "; heads come after tokens: of axes [B, N, T, H], swapaxes(1, 2) makes these, for query, key and value"
    return hint if t != n and n in lengths else ""


def transposed_hint(shape: Any, wanted: Sequence[int]) -> str:
    """Returns a hint for an error: "" unless ``shape`` is the transpose of the shape that is ``wanted``.

    Example:
      >>> transposed_hint((8, 2), (2, 8))
      '; its axes come in the other order: write x.T'
    """
    is_transposed = len(wanted) == 2 and tuple(shape) == tuple(wanted)[::-1] != tuple(wanted)
    return "; its axes come in the other order: write x.T" if is_transposed else ""


def float_hint(name: str, dtype: Any) -> str:
    """Returns a hint for an error: "" unless the argument ``name``, of integers, has a floating dtype."""
    return f"; of floats, write {name}.astype(jnp.int32)" if is_floating(dtype) else ""


def shared_hint(shape: Any, wanted: Sequence[int]) -> str:
    """Returns a hint for an error: "" unless ``shape`` is ``wanted`` without its axes of the batch."""
    is_shared = len(wanted) > 1 and tuple(shape) == tuple(wanted)[-1:]
    return f"; the same for all, write jnp.broadcast_to(x, {tuple(wanted)})" if is_shared else ""


def describe_value(x: Any) -> str:
    """Returns an argument in words for an error: dtype and shape of an array; type and beginning of another value."""
    if isinstance(x, jax.Array | np.ndarray):
        return f"{x.dtype} of shape {x.shape}"
    return f"{type(x).__name__}: {shown(x)}"
