"""Products of rows with the kernels of their experts, on GPUs: the launches of `grouped_matmul_kernel.py`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_DTYPES = "float32", "bfloat16", "float16"
# Rows, columns and features of a tile, warps and stages. Few rows read kernels as fast as memory allows.
FEW_ROWS = (16, 64, 128, 4, 4)
MANY_ROWS = {16: (16, 128, 128, 4, 4), 32: (32, 128, 64, 4, 4), 64: (64, 128, 64, 4, 4), 128: (128, 128, 64, 8, 4)}
GRADIENT = (64, 128, 128, 8, 3)


class Tiling(NamedTuple):
    """Tiles of a launch."""

    rows: int
    columns: int
    features: int
    warps: int
    stages: int


class WorkTiles(NamedTuple):
    """The rows of each work tile, which have one expert: int32 [tiles] each; expert E for none."""

    experts: jax.Array
    starts: jax.Array
    ends: jax.Array


def unsupported(*arrays: Any) -> str | None:
    """Returns why `grouped_matmul` cannot multiply arrays, or None."""
    from ...planning.platforms import has_local_arrays
    from ..gpu import hardware

    device, dtypes = hardware.local_device(), {x.dtype.name for x in arrays}
    if isinstance(device, str):
        return device
    if not has_local_arrays():
        return "it needs arrays on one device, or `jax.shard_map` over all axes of the mesh"
    return None if dtypes <= {*_DTYPES} else f"it multiplies {_DTYPES}, got {sorted(dtypes)}"


def grouped_matmul(x: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    """Multiplies each row by the kernel of its expert: y[i] = x[i] @ kernels[expert[i]], in the dtype of x.

    Args:
      x: [M, in].
      kernels: [E, in, out].
      expert: int32 [M], sorted if M > E. A row of expert E or above has an undefined result, and gradient 0.
    """
    return _grouped_matmul(x, kernels, expert)


@jax.custom_vjp
def _grouped_matmul(x: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    return _multiply(x, kernels, expert, transposed=False)


def _forward(x: jax.Array, kernels: jax.Array, expert: jax.Array) -> tuple[jax.Array, Any]:
    return _grouped_matmul(x, kernels, expert), (x, kernels, expert)


def _backward(residuals: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    x, kernels, expert = residuals
    dx = _multiply(dy, kernels, expert, transposed=True)
    dx = jnp.where((expert < len(kernels))[:, None], dx, 0)
    if len(x) <= len(kernels):
        order = jnp.argsort(expert)
        x, dy, expert = x[order], dy[order], expert[order]
    return dx, _kernel_gradient(x, dy, expert, kernels), np.zeros(expert.shape, jax.dtypes.float0)


_grouped_matmul.defvjp(_forward, _backward)


def _multiply(
    x: jax.Array, kernels: jax.Array, expert: jax.Array, transposed: bool, tiling: Tiling | None = None, splits: int = 0
) -> jax.Array:
    from ..gpu import bridge
    from .grouped_matmul_kernel import GroupedMatmulConstants, grouped_matmul_kernel

    (rows, features), (num_experts, *sizes) = x.shape, kernels.shape
    columns = sizes[0] if transposed else sizes[1]
    is_few = rows <= num_experts
    if tiling is None:
        tiling = Tiling(*(FEW_ROWS if is_few else MANY_ROWS[_row_tile(rows, num_experts)]))
    tiles = WorkTiles(*[expert.astype(jnp.int32)] * 3) if is_few else _tiles_of_groups(expert, num_experts, tiling.rows)
    if not splits:
        splits = _splits(len(tiles.experts) * -(-columns // tiling.columns), features // tiling.features) if is_few else 1
    constants = GroupedMatmulConstants(
        rows, num_experts, features, columns, transposed, is_few, tiling.rows, tiling.features, tiling.columns, splits
    )
    output = jax.ShapeDtypeStruct((splits, rows, columns), x.dtype if splits == 1 else jnp.float32)
    grid = (len(tiles.experts) * -(-columns // tiling.columns), splits)
    arrays = (x, kernels, *tiles)
    (y,) = bridge.call_triton(
        grouped_matmul_kernel, grid, arrays, [output], {"C": constants}, num_warps=tiling.warps, num_stages=tiling.stages
    )
    return y[0] if splits == 1 else y.sum(0).astype(x.dtype)


def _kernel_gradient(
    x: jax.Array, dy: jax.Array, expert: jax.Array, kernels: jax.Array, tiling: Tiling | None = None
) -> jax.Array:
    from ..gpu import bridge
    from .grouped_matmul_kernel import GroupedMatmulConstants, kernel_gradient_kernel

    tiling = tiling or Tiling(*GRADIENT)
    (rows, features), (num_experts, _, columns) = x.shape, kernels.shape
    constants = GroupedMatmulConstants(
        rows, num_experts, features, columns, False, False, tiling.rows, tiling.features, tiling.columns, 1
    )
    grid = (-(-columns // tiling.columns), -(-features // tiling.features), num_experts)
    arrays = (x, dy, _group_ends(expert, num_experts))
    (gradient,) = bridge.call_triton(
        kernel_gradient_kernel,
        grid,
        arrays,
        [jax.ShapeDtypeStruct(kernels.shape, kernels.dtype)],
        {"C": constants},
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return gradient


def _splits(programs: int, steps: int) -> int:
    """Returns the splits of a sum that fill a GPU with some 4 programs a multiprocessor."""
    from ..gpu import hardware

    wanted = 4 * hardware.local_gpu().multiprocessors // max(1, programs)
    return max(1, min(1 << wanted.bit_length() - 1 if wanted else 1, steps))


def _row_tile(rows: int, num_experts: int) -> int:
    """Returns the rows of a tile, by those that an expert has on average."""
    return min(128, max(16, 1 << (rows // num_experts - 1).bit_length()))


def _tiles_of_groups(expert: jax.Array, num_experts: int, row_tile: int) -> WorkTiles:
    """Returns the tiles of sorted rows, as many as there can be."""
    ends = _group_ends(expert, num_experts)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    counts = -((starts - ends) // row_tile)  # tiles of each expert
    last_tiles = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(len(expert) // row_tile + num_experts, dtype=jnp.int32)
    experts = (last_tiles <= tile[:, None]).sum(1, dtype=jnp.int32)
    first_rows = starts - (last_tiles - counts) * row_tile  # those of tile 0, if all tiles were the expert's
    tile_starts = first_rows.at[experts].get(mode="clip") + tile * row_tile
    return WorkTiles(experts, tile_starts, ends.at[experts].get(mode="clip"))


def _group_ends(expert: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 [E], the end of each expert's rows in sorted ones."""
    return (expert[:, None] <= jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
