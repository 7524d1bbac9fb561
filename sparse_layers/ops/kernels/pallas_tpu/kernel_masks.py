"""Masks inside kernels: computed from positions, or read as bits.

A mask is called with positions [n, 1] and [1, m]. On a TPU, an [n, 1] array fills one lane in 128 of its registers, so
a draw of random numbers by query costs 16 times what it costs as [1, n]. A mask with many operations on rows alone
computes them on [1, n], and transposes only their results to combine them with columns.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 128  # of a vector register
# Operations on rows from which masks compute them on [1, n]. To transpose a result costs as much as some 20 operations
# on a column, by the compiler's estimates. Masks have either up to 40 of these (strides, groups, windows) or, if they
# draw random keys, hundreds.
MIN_ROW_OPERATIONS = 64


def allowed_pairs(
    mask: Callable[[Any, Any], Any], starts: tuple[Any, Any], shape: tuple[int, int], flipped: bool
) -> jax.Array:
    """Evaluates a mask for a block: bool ``shape`` (bq, bkv), or (bkv, bq) if ``flipped``.

    Args:
      mask: a function of positions, by elementwise operators.
      starts: first query row and first key row of the block.
      shape: (bq, bkv).
      flipped: True if queries run along lanes.
    """

    def function(a, b):
        return mask(b, a) if flipped else mask(a, b)

    (start, along_start), (n, m) = (starts[::-1], shape[::-1]) if flipped else (starts, shape)
    along = along_start + lax.broadcasted_iota(jnp.int32, (1, m), 1)
    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((n, 1), jnp.int32), along)
    if _operations(traced.jaxpr, (n, 1)) < MIN_ROW_OPERATIONS:
        return function(start + lax.broadcasted_iota(jnp.int32, (n, 1), 0), along)
    (allowed,) = _evaluate(traced, [_RowColumn(start + lax.broadcasted_iota(jnp.int32, (1, n), 1)), along], (n, 1))
    return _as_column(allowed)


def pack_bits(tiles: Any) -> Any:
    """Packs bools [n, rows, columns] into int32 [n, rows / p, columns].

    Bit i of row r is that of row i * rows / p + r. So a kernel unpacks words without moving rows across registers.
    """
    num_bits = math.gcd(tiles.shape[1] // 8, 32)
    tiles = tiles.reshape(len(tiles), num_bits, -1, tiles.shape[2])
    words = tiles[:, 0].astype(np.int32)
    for i in range(1, num_bits):
        words |= tiles[:, i].astype(np.int32) << i
    return words


def unpack_bits(words: jax.Array, rows: int) -> jax.Array:
    """Unpacks one tile of `pack_bits` in a kernel: bool [rows, columns]."""
    bits = np.left_shift(np.int32(1), np.arange(rows // words.shape[0], dtype=np.int32))
    return jnp.concatenate([words & bit for bit in bits], axis=0) != 0


def to_column(row: jax.Array) -> jax.Array:
    """Transposes [1, n] to [n, 1]."""
    return fill_lanes(row)[:, :1]


def fill_lanes(row: jax.Array) -> jax.Array:
    """Transposes [1, n] to [n, LANES], the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


class _RowColumn:
    """A column [n, 1] that is kept as a row [1, n] until it meets an array of another shape."""

    def __init__(self, row: jax.Array):
        self.row = row
        self.column: jax.Array | None = None


def _as_column(x: Any) -> Any:
    if not isinstance(x, _RowColumn):
        return x
    if x.column is None:
        x.column = to_column(x.row.astype(jnp.int32)) != 0 if x.row.dtype == bool else to_column(x.row)
    return x.column


def _evaluate(traced: Any, arguments: list[Any], column_shape: tuple[int, int]) -> list[Any]:
    """Evaluates a closed, elementwise jaxpr; every array of the column's shape is a `_RowColumn`."""
    jaxpr = traced.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *arguments], strict=True))

    def read(atom):
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr")
        if inner is not None:
            outputs = _evaluate(inner, inputs, column_shape)
        elif equation.primitive.name == "broadcast_in_dim" and equation.outvars[0].aval.shape == column_shape:
            outputs = [_RowColumn(jnp.broadcast_to(inputs[0], column_shape[::-1]))]  # a constant of the column's shape
        else:
            is_column = equation.outvars[0].aval.shape == column_shape
            operands = [x.row if is_column and isinstance(x, _RowColumn) else _as_column(x) for x in inputs]
            outputs = equation.primitive.bind(*operands, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            outputs = [_RowColumn(x) for x in outputs] if is_column else outputs
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operations(jaxpr: Any, shape: tuple[int, int]) -> int:
    """Counts the equations whose result has the shape."""
    inner = [x.params["jaxpr"].jaxpr for x in jaxpr.eqns if "jaxpr" in x.params]
    count = sum(x.outvars[0].aval.shape == shape for x in jaxpr.eqns if "jaxpr" not in x.params)
    return count + sum(_operations(x, shape) for x in inner)
