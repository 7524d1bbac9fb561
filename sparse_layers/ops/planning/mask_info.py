"""`MaskInfo`: block lists in the format of JAX's splash attention, for kernels written for it.

The kernels of this package read `BlockLists`. `process_mask` and `process_mask_dkv` compile a static mask to numpy
arrays, `process_dynamic_mask` and `process_dynamic_mask_dkv` a traced one. Masks of this package are compiled from
closed-form block states, so the cost follows the pattern; other masks are read by slices, a row of blocks at a time::

    mask      blocks      block_mask    data_next     forward grid, shrunk: rows packed to the left
    ■ · · ·   P E         [1 0]         [0 0]
    ■ ■ · ·
    ■ ■ ■ ·   F P         [2 1]         [0 1]
    ■ ■ ■ ■
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np

from ...arguments.checks import checked
from ...masks.algebra import Mask
from ...masks.bounded_cache import bounded_cache
from ...masks.states import FULL, PARTIAL
from .block_lists import tiled
from .splash_lists import compile_mask, index_dtype


@functools.partial(jax.export.register_namedtuple_serialization, serialized_name="sparse_layers.MaskInfo")
class MaskInfo(NamedTuple):
    """Block lists of a mask [H, Q, K] cut into nq x nk blocks of bq x bkv; R is H, or the head shards if heads agree.

    A kernel's forward grid is (H, nq, data_next.shape[2]), its dkv grid (nk, H, data_next.shape[1]). A step runs iff
    ``block_mask > 0``; where it is 2, no element is masked. Empty steps repeat the index of the next active one, so
    that a pipeline prefetches no unused block.

    Attributes:
      data_next: integer [R, nq, nk], or narrower if the grid is shrunk: the key block to read (dkv: the query block,
        counted within its query shard).
      mask_next: integer, same shape: the tile of ``partial_mask_blocks`` to read; None without tiles.
      block_mask: integer, same shape: 0 nothing allowed, 1 some pairs, 2 all.
      partial_mask_blocks: bool [P, bq, bkv] (dkv: [P, bkv, bq]), the distinct tiles of the blocks in state 1; None
        without such blocks, or if the mask is computed. Dynamic: [H, nq, nk, bq, bkv], every block.
      q_sequence: int32 [Q], the position of each query if the mask is computed; else None.
      is_dynamic_mask: True if ``partial_mask_blocks`` holds every block; else None.
    """

    data_next: Any
    mask_next: Any
    block_mask: Any
    partial_mask_blocks: Any
    q_sequence: Any
    is_dynamic_mask: bool | None = None

    def __repr__(self):
        fields: Any = zip(self._fields, self, strict=True)
        shown = (f"{name}={x.dtype}{[*x.shape]}" if hasattr(x, "dtype") else f"{name}={x}" for name, x in fields)
        return f"MaskInfo({', '.join(shown)})"


def process_mask(
    mask: Any,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = False,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, Callable[[Any, Any], Any] | None]:
    """Compiles a static mask to block lists.

    Args:
      mask: [H, Q, K]: a `HeadMasks`, a bool array, or any object with ``.shape`` and ``mask[h, q_slice, kv_slice]``,
        such as splash attention's ``MultiHeadMask``.
      block_shape: (bq, bkv), queries and keys in a block.
      is_dkv: lists for the gradient of keys and values, which walks each key block's query blocks.
      downcast_smem_data: store each index array in the smallest of int8, int16 and int32 that fits; else int32.
      head_shards: number of equal parts of the heads that devices hold.
      q_seq_shards: number of equal parts of the queries that devices hold; dkv indices count within a part.
      shrink_grid: leave out empty steps if all heads have one mask.

    Returns:
      The `MaskInfo` of read-only numpy arrays, and, if all heads have one computable mask, the function
      ``f(q_ids, kv_ids)`` that computes it inside a kernel (then there are no tiles); else None. Cached by content for
      `HeadMasks` and ``MultiHeadMask``.

    Raises:
      TypeError: the mask has no shape, or is a traced array.
      ValueError: the mask is not 3-dimensional or not bool, or a block or shard count does not divide what it divides.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> info, function = sl.process_mask(np.tril(np.ones((1, 4, 4), bool)), (2, 2))
      >>> info.block_mask.tolist(), info.partial_mask_blocks.tolist(), function
      ([[[1, 0], [2, 1]]], [[[True, False], [True, True]]], None)
    """
    if isinstance(mask, Mask) or not hasattr(mask, "shape"):
        raise TypeError(f"mask: expected lengths, bind(mask, heads, q_len, kv_len) gives them; got {mask!r}")
    if isinstance(mask, jax.core.Tracer):
        raise TypeError(f"mask: of an array known at run time only, process_dynamic_mask makes the lists; got {mask!r}")
    _check_array(mask)
    _check_division(mask.shape, block_shape, head_shards, q_seq_shards)
    for name, flag in {"is_dkv": is_dkv, "downcast_smem_data": downcast_smem_data, "shrink_grid": shrink_grid}.items():
        checked(name, flag, bool)
    # A mask that lists its heads compares and hashes by content; of other objects that is not known.
    compiled = _compile if hasattr(mask, "masks") else _compile.__wrapped__
    return compiled(mask, tuple(block_shape), is_dkv, downcast_smem_data, head_shards, q_seq_shards, shrink_grid)


def process_mask_dkv(
    mask: Any,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = True,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, Callable[[Any, Any], Any] | None]:
    """`process_mask` for the backward pass of k and v: block lists by key column, tiles [P, bkv, bq].

    Args:
      mask, block_shape, is_dkv, downcast_smem_data, head_shards, q_seq_shards, shrink_grid: as in `process_mask`.

    Returns:
      What `process_mask` returns with ``is_dkv=True``.

    Raises:
      ValueError: as `process_mask`.

    Example:
      >>> import sparse_layers as sl
      >>> info, _ = sl.process_mask_dkv(sl.bind(sl.Causal() & sl.Window(2), 1, 8, 8), (4, 4))
      >>> info.block_mask.tolist()  # by key column, packed to the bottom
      [[[1, 0], [1, 1]]]
    """
    return process_mask(
        mask,
        block_shape,
        is_dkv=is_dkv,
        downcast_smem_data=downcast_smem_data,
        head_shards=head_shards,
        q_seq_shards=q_seq_shards,
        shrink_grid=shrink_grid,
    )


def process_dynamic_mask(
    mask: jax.Array,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = False,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, None]:
    """Compiles a mask that is known at run time only; works under jit with all arguments but the mask static.

    Args:
      mask: bool [H, Q, K].
      block_shape: (bq, bkv), queries and keys in a block.
      is_dkv: lists for the gradient of keys and values.
      downcast_smem_data: store each index array in the smallest integer type that fits any mask of this shape.
      head_shards: number of equal parts of the heads that devices hold; tile indices count within a part.
      q_seq_shards: number of equal parts of the queries that devices hold; tile indices count within a part.
      shrink_grid: has no effect, because the number of active blocks is not known; kept for equal signatures.

    Returns:
      The `MaskInfo` of JAX arrays, its ``partial_mask_blocks`` holding every block, and None.

    Raises:
      TypeError: the mask is no array.
      ValueError: the mask is not 3-dimensional or not bool, or a block or shard count does not divide what it divides.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> info, _ = sl.process_dynamic_mask(jnp.tril(jnp.ones((1, 4, 4), bool)), (2, 2))
      >>> info.block_mask.tolist(), info.mask_next.tolist()
      ([[[1, 0], [2, 1]]], [[[0, 0], [0, 3]]])
    """
    del shrink_grid
    if not hasattr(mask, "dtype"):
        raise TypeError(f"mask: expected a bool array [H, Q, K] (of others process_mask makes the lists), got {mask!r}")
    _check_array(mask)
    _check_division(mask.shape, block_shape, head_shards, q_seq_shards)
    tiles, block_mask = tiled(mask, block_shape)
    heads, num_q, num_kv = block_mask.shape
    shard_heads, shard_rows = heads // head_shards, num_q // q_seq_shards
    head = (jnp.arange(heads, dtype=np.int32) % shard_heads)[:, None, None]
    q = (jnp.arange(num_q, dtype=np.int32) % shard_rows)[None, :, None]
    kv = jnp.arange(num_kv, dtype=np.int32)[None, None, :]
    data_next = jnp.where(block_mask > 0, q if is_dkv else kv, 0)
    mask_next = jnp.where(block_mask == PARTIAL, (head * shard_rows + q) * num_kv + kv, 0)
    return MaskInfo(
        data_next.astype(index_dtype(shard_rows if is_dkv else num_kv, downcast_smem_data)),
        mask_next.astype(index_dtype(shard_heads * shard_rows * num_kv, downcast_smem_data)),
        block_mask.astype(index_dtype(FULL, downcast_smem_data)),
        tiles.swapaxes(3, 4) if is_dkv else tiles,
        q_sequence=None,
        is_dynamic_mask=True,
    ), None


def process_dynamic_mask_dkv(
    mask: jax.Array,
    block_shape: tuple[int, int],
    *,
    is_dkv: bool = True,
    downcast_smem_data: bool = True,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    shrink_grid: bool = True,
) -> tuple[MaskInfo, None]:
    """`process_dynamic_mask` for the backward pass of k and v: query blocks by key column, tiles [.., bkv, bq].

    Args:
      mask, block_shape, is_dkv, downcast_smem_data, head_shards, q_seq_shards, shrink_grid: as there.

    Returns:
      What `process_dynamic_mask` returns with ``is_dkv=True``.

    Raises:
      ValueError: as `process_dynamic_mask`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> info, _ = sl.process_dynamic_mask_dkv(jnp.tril(jnp.ones((1, 8, 8), bool)), (4, 2))
      >>> info.partial_mask_blocks.shape
      (1, 2, 4, 2, 4)
    """
    return process_dynamic_mask(
        mask,
        block_shape,
        is_dkv=is_dkv,
        downcast_smem_data=downcast_smem_data,
        head_shards=head_shards,
        q_seq_shards=q_seq_shards,
        shrink_grid=shrink_grid,
    )


def _check_array(mask: Any) -> None:
    """Raises the ValueErrors about the mask itself that static and dynamic masks share."""
    if len(mask.shape) != 3:
        raise ValueError(f"Expected a 3-dim mask, instead got: {mask.shape=}")
    if 0 in mask.shape:
        raise ValueError(f"Expected a mask with heads, queries and keys, instead got: {mask.shape=}")
    if getattr(mask, "dtype", np.bool_) != np.bool_:
        raise ValueError(f"Expected a bool mask, instead got: {mask.dtype=}")


def _check_division(shape: Sequence[int], block_shape: Sequence[int], head_shards: int, q_seq_shards: int) -> None:
    """Raises the ValueErrors about sizes that static and dynamic masks share, in splash attention's order."""
    if not isinstance(block_shape, Sequence) or len(block_shape) != 2:
        raise ValueError(f"block_shape must be a pair (queries, keys), got {block_shape!r}")
    sizes = {"block_shape": block_shape, "head_shards": [head_shards], "q_seq_shards": [q_seq_shards]}
    for name, values in sizes.items():
        for value in values:
            checked(name, value, int)
    (head_count, q_seq_len, kv_seq_len), (q_block_size, kv_block_size) = shape, block_shape
    if not _divides(q_block_size, q_seq_len):
        raise ValueError(f"{q_block_size=} should divide {q_seq_len=}.")
    if not _divides(kv_block_size, kv_seq_len):
        raise ValueError(f"{kv_block_size=} should divide {kv_seq_len=}.")
    if not _divides(q_seq_shards, q_seq_len):
        raise ValueError(f"{q_seq_shards=} should divide {q_seq_len=}.")
    q_seq_len_per_shard = q_seq_len // q_seq_shards
    if not _divides(q_block_size, q_seq_len_per_shard):
        raise ValueError(f"{q_block_size=} should divide {q_seq_len_per_shard=}.")
    if not _divides(head_shards, head_count):
        raise ValueError(f"{head_shards=} should divide {head_count=}.")


def _divides(divisor: int, size: int) -> bool:
    return divisor > 0 and size % divisor == 0


@bounded_cache()
def _compile(
    mask: Any,
    block_shape: tuple[int, int],
    is_dkv: bool,
    downcast: bool,
    head_shards: int,
    q_seq_shards: int,
    shrink: bool,
) -> tuple[MaskInfo, Callable[[Any, Any], Any] | None]:
    """Returns what `process_mask` returns, of checked arguments."""
    arrays, function = compile_mask(mask, block_shape, is_dkv, downcast, head_shards, q_seq_shards, shrink)
    return MaskInfo(*arrays), function
