"""`QuantizedRows`: keys or values of a cache in 8 bits, with a scale for each row of each head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...arguments.checks import suggest
from ...masks.serialization import register_node

# The largest number of each dtype, to which the largest element of a row is scaled.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@register_node
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rows of keys or values in 8 bits; a pytree, whose row i is ``data[i] * scale[i]``.

    Attributes:
      data: int8 or float8_e4m3fn [..., size].
      scale: float32 [..., 1], the largest element of each row, divided by the dtype's largest number.
    """

    data: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    def __len__(self) -> int:
        return len(self.data)


Rows = jax.Array | QuantizedRows


def check_cache_dtype(name: str, value: Any) -> None:
    """Raises ValueError unless the value is None or the name of a dtype of `QuantizedRows`."""
    if value is not None and (not isinstance(value, str) or value not in _LARGEST):
        raise ValueError(f"{name} must be None or the name of an 8-bit dtype, got {suggest(value, _LARGEST)}")


def quantize(rows: jax.Array, dtype: str) -> QuantizedRows:
    """Returns rows [..., size] in 8 bits, each scaled by its largest element.

    Errors are at most 1/254 of this element in int8, and 1/16 of each element in float8_e4m3fn.

    Example:
      >>> import jax.numpy as jnp
      >>> dequantize(quantize(jnp.array([[-2.54, 1.0, 0.0]]), "int8"), jnp.float32).round(2).tolist()
      [[-2.5399999618530273, 1.0, 0.0]]
    """
    rows = rows.astype(jnp.float32)
    scale = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) / _LARGEST[dtype]
    scaled = rows / jnp.where(scale == 0, 1, scale)
    if dtype == "int8":
        scaled = jnp.round(scaled)
    return QuantizedRows(scaled.astype(dtype), scale)


def quantize_like(array: Rows, rows: jax.Array) -> Rows:
    """Returns rows in the form and dtype of ``array``."""
    return quantize(rows, array.dtype.name) if isinstance(array, QuantizedRows) else rows.astype(array.dtype)


def dequantize(rows: Rows, dtype: Any) -> jax.Array:
    """Returns rows as one array."""
    if isinstance(rows, QuantizedRows):
        return (rows.data.astype(jnp.float32) * rows.scale).astype(dtype)
    return rows.astype(dtype)


def data_and_scale(rows: Rows) -> tuple[jax.Array, jax.Array | None]:
    """Returns rows [B, n, L, size] without their scales, and these as [B, n, 1, L], or None."""
    return (rows.data, rows.scale.swapaxes(-1, -2)) if isinstance(rows, QuantizedRows) else (rows, None)
