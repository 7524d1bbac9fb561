"""Products of rows with the kernels of their experts, on GPUs: the launches of `grouped_matmul_kernel.py`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ...planning.platforms import has_local_arrays
from ..gpu import bridge, hardware

_DTYPES = "float32", "bfloat16", "float16"


class Tiling(NamedTuple):
    """Sizes of the products [m, k] @ [k, n] of a program, its warps, and the stages of its loads."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


FEW_ROWS = Tiling(16, 64, 128, 4, 4)  # limited by reading kernels
MANY_ROWS = Tiling(64, 128, 64, 4, 4)
# On an H200, 3.4 and not 3.9 ms a layer with 1,024 rows an expert; as fast with 128.
WIDE, WIDE_ROWS = Tiling(128, 256, 64, 8, 3), 512
GRADIENT = Tiling(128, 128, 64, 8, 3)
# Bytes of shared memory beside the stages of loads.
_SPARE = 2048


def unsupported(x: Any, kernels: Any) -> str | None:
    """Returns why `grouped_matmul` cannot multiply arrays, or None."""
    device, dtypes = hardware.local_device(), {x.dtype.name, kernels.dtype.name}
    if isinstance(device, str):
        return device
    if not has_local_arrays():
        return "it needs arrays on one device: name all axes of the mesh in expert_axis and token_axes"
    return None if dtypes <= {*_DTYPES} else f"it multiplies {', '.join(_DTYPES)}, got {', '.join(sorted(dtypes))}"


def grouped_matmul(x: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    """Multiplies each row by the kernel of its expert: y[i] = x[i] @ kernels[expert[i]].

    Args:
      x: [M, in].
      kernels: [E, in, out].
      expert: int [M], sorted if M > E. Rows of expert E have the result 0.

    Returns:
      [M, out] in the dtype of x.
    """
    return _multiply(False, x, kernels, expert) if len(x) else jnp.zeros((0, kernels.shape[2]), x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(transposed: bool, x: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    y = sequential_vmap(functools.partial(_launch_products, transposed))(x, kernels, expert)
    return jnp.where((expert < len(kernels))[:, None], y, 0)


def _multiply_vjp(transposed: bool, operands: tuple[jax.Array, ...], dy: jax.Array) -> tuple[Any, ...]:
    x, kernels, expert = operands
    sides = (dy, x) if transposed else (x, dy)
    like = jax.ShapeDtypeStruct(kernels.shape, kernels.dtype)
    return _multiply(not transposed, dy, kernels, expert), _kernel_gradient(like, *sides, expert), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel_gradient(like: jax.ShapeDtypeStruct, x: jax.Array, dy: jax.Array, expert: jax.Array) -> jax.Array:
    return sequential_vmap(functools.partial(_launch_gradient, like))(x, dy, expert)


def _kernel_gradient_vjp(like: Any, operands: tuple[jax.Array, ...], dkernels: jax.Array) -> tuple[Any, ...]:
    del like
    x, dy, expert = operands
    return _multiply(True, dy, dkernels, expert), _multiply(False, x, dkernels, expert), None


_multiply.defvjp(lambda transposed, *operands: (_multiply(transposed, *operands), operands), _multiply_vjp)
_kernel_gradient.defvjp(lambda like, *operands: (_kernel_gradient(like, *operands), operands), _kernel_gradient_vjp)


def _launch_products(transposed: bool, x: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    from .grouped_matmul_kernel import GroupedMatmulConstants, grouped_matmul_kernel

    (rows, features), num_experts, columns = x.shape, len(kernels), kernels.shape[1 if transposed else 2]
    is_few = rows <= num_experts
    tiling, tiles = _fit(FEW_ROWS, x, kernels), [expert.astype(jnp.int32)] * 3
    if not is_few:
        wide = _fit(WIDE, x, kernels)
        tiling = wide if wide == WIDE and rows >= WIDE_ROWS * num_experts else _fit(MANY_ROWS, x, kernels)
        tiles = _tiles_of_groups(expert, num_experts, tiling.m)
    sizes = (rows, num_experts, features, columns, tiling.m, tiling.k, tiling.n)
    constants = GroupedMatmulConstants(*sizes, TRANSPOSED=transposed, SINGLE_ROWS=is_few)
    grid = (len(tiles[0]) * -(-columns // tiling.n),)
    y = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    return _launch(grouped_matmul_kernel, grid, (x, kernels, *tiles), y, constants, tiling)


def _launch_gradient(like: jax.ShapeDtypeStruct, x: jax.Array, dy: jax.Array, expert: jax.Array) -> jax.Array:
    from .grouped_matmul_kernel import GroupedMatmulConstants, kernel_gradient_kernel

    num_experts, features, columns = like.shape
    if len(x) <= num_experts:
        order = jnp.argsort(expert)
        x, dy, expert = x[order], dy[order], expert[order]
    tiling = _fit(GRADIENT, x, dy)
    constants = GroupedMatmulConstants(len(x), num_experts, features, columns, tiling.k, tiling.m, tiling.n)
    grid = (-(-columns // tiling.n), -(-features // tiling.m), num_experts)
    arrays = (x, dy, _group_ends(expert, num_experts))
    return _launch(kernel_gradient_kernel, grid, arrays, like, constants, tiling)


def _launch(kernel: Any, grid: Any, arrays: Any, output: Any, constants: Any, tiling: Tiling) -> jax.Array:
    warps, stages = tiling.warps, tiling.stages
    return bridge.call_triton(kernel, grid, arrays, [output], {"C": constants}, num_warps=warps, num_stages=stages)[0]


def _fit(tiling: Tiling, *arrays: jax.Array) -> Tiling:
    """Returns a tiling whose stages fit in shared memory, and whose operands fit in registers."""
    if arrays[0].dtype == jnp.float32:  # tensor cores would round, and other units read operands from registers
        tiling = tiling._replace(k=max(16, 1024 // tiling.m), warps=8)
    size = (tiling.m + tiling.n) * tiling.k * max(x.dtype.itemsize for x in arrays)
    stages = (hardware.local_gpu().shared_memory - _SPARE) // size
    return tiling._replace(stages=max(1, min(tiling.stages, stages)))


def _tiles_of_groups(expert: jax.Array, num_experts: int, row_tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the expert, the first row and the end of work tiles of sorted rows: int32 [tiles], expert E for none."""
    ends = _group_ends(expert, num_experts)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    counts = -((starts - ends) // row_tile)  # tiles of each expert
    last_tiles = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(len(expert) // row_tile + num_experts, dtype=jnp.int32)  # as many as there can be
    experts = (last_tiles <= tile[:, None]).sum(1, dtype=jnp.int32)
    first_rows = starts - (last_tiles - counts) * row_tile  # those of tile 0, if all tiles were the expert's
    tile_starts = first_rows.at[experts].get(mode="clip") + tile * row_tile
    return experts, tile_starts, ends.at[experts].get(mode="clip")


def _group_ends(expert: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 [E], the end of each expert's rows in sorted ones."""
    return (expert[:, None] <= jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
