"""Masks inside TPU kernels: computed from positions, or read as the bits of a mask tile.

A mask is called with positions [n, 1] and [1, m]. On a TPU an [n, 1] array, a column, fills one lane in 128 of its
registers, so random numbers by query cost 16 times what they cost as [1, n]. A mask with many operations on the column
alone therefore computes them along lanes, as a row, and only the results become columns, to broadcast against [1, m].
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 128  # of a vector register
# Turning a row into a column takes as long as 20 operations on a column, by the compiler's estimates. Masks have either
# up to 40 of these (strides, groups, windows) or, where they draw random keys, hundreds.
MIN_COLUMN_OPERATIONS = 64


def allowed_pairs(
    mask: Callable[[Any, Any], Any], first_rows: tuple[Any, Any], shape: tuple[int, int], transposed: bool
) -> jax.Array:
    """Returns bools [bq, bkv], or [bkv, bq] if ``transposed``: the pairs of a block that a mask allows."""

    def function(column, row):
        return mask(row, column) if transposed else mask(column, row)

    (column_start, row_start), (n, m) = (first_rows[::-1], shape[::-1]) if transposed else (first_rows, shape)
    row = row_start + lax.broadcasted_iota(jnp.int32, (1, m), 1)
    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((n, 1), jnp.int32), row)
    if _operations(traced.jaxpr, (n, 1)) < MIN_COLUMN_OPERATIONS:
        return function(column_start + lax.broadcasted_iota(jnp.int32, (n, 1), 0), row)
    column = _ColumnAsRow(column_start + lax.broadcasted_iota(jnp.int32, (1, n), 1))
    (allowed,) = _evaluate(traced, [column, row], (n, 1))
    return _as_column(allowed)


def as_bits(tiles: Any) -> Any:
    """Returns bools [n, rows, columns] as int32 [n, rows / p, columns]: bit i is from the i-th of p ranges of the rows.

    So a kernel reads all bits of a word in their place, without shuffles.
    """
    ranges = math.gcd(tiles.shape[1] // 8, 32)
    tiles = tiles.reshape(len(tiles), ranges, -1, tiles.shape[2])
    words = tiles[:, 0].astype(np.int32)
    for i in range(1, ranges):
        words |= tiles[:, i].astype(np.int32) << i
    return words


def from_bits(words: jax.Array, rows: int) -> jax.Array:
    """Returns the bools [rows, columns] of one tile in a kernel: the inverse of `as_bits`."""
    bits = np.left_shift(np.int32(1), np.arange(rows // words.shape[0], dtype=np.int32))
    return jnp.concatenate([words & bit for bit in bits], axis=0) != 0


def to_column(row: jax.Array) -> jax.Array:
    """Returns [n, 1] from [1, n]."""
    return to_lanes(row)[:, :1]


def to_lanes(row: jax.Array) -> jax.Array:
    """Returns [n, LANES], equal in every lane, from [1, n]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


class _ColumnAsRow:
    """A column [n, 1] as a row [1, n], until an operation needs it as a column."""

    def __init__(self, row: jax.Array):
        self.row = row
        self.column: jax.Array | None = None


def _as_column(x: Any) -> Any:
    if not isinstance(x, _ColumnAsRow):
        return x
    if x.column is None:
        x.column = to_column(x.row.astype(jnp.int32)) != 0 if x.row.dtype == bool else to_column(x.row)
    return x.column


def _evaluate(traced: Any, arguments: list[Any], column_shape: tuple[int, int]) -> list[Any]:
    """Evaluates a closed jaxpr of elementwise operations, with every array of the column's shape as a row."""
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
            outputs = [_ColumnAsRow(jnp.broadcast_to(inputs[0], column_shape[::-1]))]  # a constant
        else:
            is_column = equation.outvars[0].aval.shape == column_shape
            operands = [x.row if is_column and isinstance(x, _ColumnAsRow) else _as_column(x) for x in inputs]
            outputs = equation.primitive.bind(*operands, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            outputs = [_ColumnAsRow(x) for x in outputs] if is_column else outputs
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operations(jaxpr: Any, shape: tuple[int, int]) -> int:
    """Returns the number of equations whose result has a shape."""
    inner = [x.params["jaxpr"].jaxpr for x in jaxpr.eqns if "jaxpr" in x.params]
    outer = sum(x.outvars[0].aval.shape == shape for x in jaxpr.eqns if "jaxpr" not in x.params)
    return outer + sum(_operations(x, shape) for x in inner)
