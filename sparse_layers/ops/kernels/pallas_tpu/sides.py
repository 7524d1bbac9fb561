"""Masks inside kernels: computed from positions, or read as bits.

A mask is called with positions [n, 1] and [1, m]. On a TPU, an [n, 1] array fills one lane in 128 of its registers, so
a draw of random numbers by query costs 16 times what it costs as [1, n]. A mask with many operations that concern one
side only does them along lanes, and stands only their results up to meet the other side.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 128  # of a vector register
# Standing one result up costs as much as some 20 operations on a column, by the compiler's estimates. Masks have either
# up to 40 of these (strides, groups, windows) or, where they draw random keys, hundreds.
WORTH_LYING = 64


def allowed_pairs(
    mask: Callable[[Any, Any], Any], starts: tuple[Any, Any], shape: tuple[int, int], flipped: bool
) -> jax.Array:
    """Which pairs of a block a mask allows: bool ``shape`` (bq, bkv), or (bkv, bq) if ``flipped``.

    Args:
      mask: a function of positions, by elementwise operators.
      starts: first query row and first key row of the block.
      shape: (bq, bkv).
      flipped: whether queries run along lanes.
    """

    def function(a, b):
        return mask(b, a) if flipped else mask(a, b)

    (start, along_start), (n, m) = (starts[::-1], shape[::-1]) if flipped else (starts, shape)
    along = along_start + lax.broadcasted_iota(jnp.int32, (1, m), 1)
    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((n, 1), jnp.int32), along)
    if _operations(traced.jaxpr, (n, 1)) < WORTH_LYING:
        return function(start + lax.broadcasted_iota(jnp.int32, (n, 1), 0), along)
    (allowed,) = _evaluate(traced, [_Lying(start + lax.broadcasted_iota(jnp.int32, (1, n), 1)), along], (n, 1))
    return _standing(allowed)


def as_bits(tiles: Any) -> Any:
    """Bools [n, rows, columns] as int32 [n, rows / p, columns] whose bit i is of the i-th of p parts of the rows.

    A part is as many rows as a kernel's word has, so that it reads all bits of a word where they stand.
    """
    parts = math.gcd(tiles.shape[1] // 8, 32)
    tiles = tiles.reshape(len(tiles), parts, -1, tiles.shape[2])
    words = tiles[:, 0].astype(np.int32)
    for i in range(1, parts):
        words |= tiles[:, i].astype(np.int32) << i
    return words


def from_bits(words: jax.Array, rows: int) -> jax.Array:
    """The inverse of `as_bits`, of one tile in a kernel: bool [rows, columns]."""
    bits = np.left_shift(np.int32(1), np.arange(rows // words.shape[0], dtype=np.int32))
    return jnp.concatenate([words & bit for bit in bits], axis=0) != 0


def column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    return spread(row)[:, :1]


def spread(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, LANES], the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


class _Lying:
    """A column [n, 1], kept as a row [1, n] until it meets the other side."""

    def __init__(self, row: jax.Array):
        self.row = row
        self.standing: jax.Array | None = None


def _standing(x: Any) -> Any:
    if not isinstance(x, _Lying):
        return x
    if x.standing is None:
        x.standing = column(x.row.astype(jnp.int32)) != 0 if x.row.dtype == bool else column(x.row)
    return x.standing


def _evaluate(traced: Any, arguments: list[Any], column_shape: tuple[int, int]) -> list[Any]:
    """Evaluates a closed jaxpr, whose operations are elementwise, with every array of the column's shape `_Lying`."""
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
            outputs = [_Lying(jnp.broadcast_to(inputs[0], column_shape[::-1]))]  # a constant of the column's shape
        else:
            lying = equation.outvars[0].aval.shape == column_shape
            operands = [x.row if lying and isinstance(x, _Lying) else _standing(x) for x in inputs]
            outputs = equation.primitive.bind(*operands, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            outputs = [_Lying(x) for x in outputs] if lying else outputs
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operations(jaxpr: Any, shape: tuple[int, int]) -> int:
    """Number of equations whose result has the shape."""
    inner = [x.params["jaxpr"].jaxpr for x in jaxpr.eqns if "jaxpr" in x.params]
    own = sum(x.outvars[0].aval.shape == shape for x in jaxpr.eqns if "jaxpr" not in x.params)
    return own + sum(_operations(x, shape) for x in inner)
