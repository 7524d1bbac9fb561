"""Selections: the key blocks that each query attends to, chosen at run time by scores, a router or another layer."""

import reprlib
from typing import Any, Literal, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ...arguments.checks import Natural, Positive, as_int, checked, strict_kwargs
from ...masks.algebra import Mask
from ...masks.primitives import Empty
from ...masks.serialization import register_node

GRANULARITIES = (1, 16, 64, 128)


@strict_kwargs
@register_node
@jax.tree_util.register_pytree_with_keys_class
class Selection:
    """The key blocks that queries attend to, chosen at run time: ``selection=`` of `block_sparse_attention`.

    A query attends to the keys of its blocks that the mask and the segment ids allow, in one exact softmax. A selection
    is an immutable pytree with the one leaf ``ids``: layers may share it, and `jax.jit`, `jax.vmap`, `jax.lax.scan` and
    `jax.checkpoint` take it. No gradient flows into ids.

    Args:
      ids: integers [..., ceil(T / granularity), G, k]. Leading axes are a batch or none in the op, and those of the
        input in layers. A row holds numbers of key blocks in any order: -1 is no block, duplicates count once, and k
        may be 0. G is 1 (one selection for all heads), K (one for each key head) or N (one for each query head).
        Numbers beyond the last block are refused, or ignored inside jit.
      block: keys in a block, a multiple of 16 from 16 to 512: block j holds keys j * block to (j + 1) * block - 1.
      granularity: neighbouring queries that share a row: 1, 16, 64 or 128.

    Attributes:
      ids: int32, of the argument's shape.
      block: see the argument.
      granularity: see the argument.

    Raises:
      ValueError: another block or granularity; ids have less than three axes, are no integers, are below -1, or do not
        fit into int32.
      TypeError: ids are no array.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 2, 16))
      >>> ids = jnp.tile(jnp.array([0, 2, -1]), (1, 8, 1, 1))  # all queries see keys 0 to 31 and 64 to 95 ...
      >>> selection = sl.Selection(ids, block=32, granularity=16)
      >>> sl.block_sparse_attention(q, k, v, sl.Causal(), selection=selection).shape  # ... of the past
      (1, 128, 2, 16)
    """

    __slots__ = ("block", "granularity", "ids")

    ids: Any
    block: int
    granularity: int

    def __init__(self, ids: Any, *, block: int, granularity: int = 1):
        block, granularity = checked_sizes(block, granularity)
        if not (isinstance(ids, jax.Array | np.ndarray) or hasattr(ids, "__jax_array__")):
            raise TypeError(f"ids must be a JAX or numpy array, got {type(ids).__name__}: {reprlib.repr(ids):.60}")
        ids = jnp.asarray(ids) if hasattr(ids, "__jax_array__") else ids
        if ids.ndim < 3 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                "ids must be integers of shape [..., ceil(T / granularity), G, k], "
                f"got {ids.dtype} of shape {ids.shape}"
            )
        seen = concrete_value(ids)
        if seen is not None and seen.size and not -1 <= int(seen.min()) <= int(seen.max()) < 2**31:
            raise ValueError(f"ids must be numbers of blocks, or -1 for none, got {seen.min()} to {seen.max()}")
        if seen is None and not np.can_cast(ids.dtype, np.int32):
            # No sequence has a block of the largest number, so clipped ids are still ignored.
            ids = jnp.clip(ids, None if ids.dtype.kind == "u" else -1, 2**31 - 1)
        self._set(jnp.asarray(ids, jnp.int32), block, granularity)

    def _set(self, ids: Any, block: int, granularity: int) -> None:
        for name, value in (("ids", ids), ("block", block), ("granularity", granularity)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any):
        raise AttributeError(f"a Selection is immutable: {name} cannot be set")

    def __delattr__(self, name: str):
        raise AttributeError(f"a Selection is immutable: {name} cannot be deleted")

    def __reduce__(self):
        return _build_unchecked, (self.ids, self.block, self.granularity)

    def __repr__(self):
        ids = f"{self.ids.dtype}{list(self.ids.shape)}" if hasattr(self.ids, "shape") else repr(self.ids)
        return f"Selection({ids}, block={self.block}, granularity={self.granularity})"

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("ids"), self.ids),), (self.block, self.granularity)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return _build_unchecked(*leaves, *static)  # leaves may be axes to map over, shardings or cotangents


def _build_unchecked(ids: Any, block: int, granularity: int) -> Selection:
    """Returns a selection without checks, for ids that were checked before or are no arrays."""
    selection = object.__new__(Selection)
    selection._set(ids, block, granularity)
    return selection


def concrete_value(x: Any) -> np.ndarray | None:
    """Returns the values of an array, or None if they are not here: inside jit, or with shards on other hosts."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def checked_sizes(block: Any, granularity: Any) -> tuple[int, int]:
    """Returns the block and the granularity of a selection."""
    size = as_int(block)
    if size is None or size % 16 or not 16 <= size <= 512:
        raise ValueError(f"block must be a multiple of 16 from 16 to 512, got {block!r}")
    if as_int(granularity) not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {GRANULARITIES}, got {granularity!r}")
    return size, int(granularity)


# --- helpers of scorers ----------------------------------------------------------------------------------------------


@overload
def top_k_blocks(
    scores: jax.Array,
    k: int,
    *,
    block: int,
    granularity: int = 1,
    causal: bool = True,
    forced: Mask | None = None,
    start: Any = 0,
    return_scores: Literal[False] = False,
) -> Selection: ...
@overload
def top_k_blocks(
    scores: jax.Array,
    k: int,
    *,
    block: int,
    granularity: int = 1,
    causal: bool = True,
    forced: Mask | None = None,
    start: Any = 0,
    return_scores: Literal[True],
) -> tuple[Selection, jax.Array]: ...
@strict_kwargs
def top_k_blocks(
    scores: jax.Array,
    k: int,
    *,
    block: int,
    granularity: int = 1,
    causal: bool = True,
    forced: Mask | None = None,
    start: Any = 0,
    return_scores: bool = False,
) -> Selection | tuple[Selection, jax.Array]:
    """Selects the k key blocks of the highest scores for each row of queries, of equal scores the earlier ones.

    Row r holds queries r * granularity to (r + 1) * granularity - 1. Its own block is that of its last query. Forced
    blocks come before all others, and count among the k. Scores of -inf and NaN are selected only if forced. Ids are -1
    where fewer than k blocks can be selected. No gradient flows through the selection, but returned scores have one.

    In published methods, ``forced=Window(0)`` is the own block of MoBA and MSA, ``Prefix(1) | Window(1)`` the first
    and the last two blocks of NSA, ``Prefix(1) | Window(n - 1)`` the first and n local blocks of InfLLM-v2.

    Args:
      scores: floats [..., ceil(T / granularity), G, blocks]; axes as in `Selection`.
      k: blocks to select, >= 0.
      block: keys in a block.
      granularity: queries in a row.
      causal: True to select only a row's own block and those before it. The mask of the attention must still hide later
        keys of the own block.
      forced: a mask in units of blocks, where a row is at the position of its own block: it forces the blocks that it
        allows. None for none.
      start: position of the first query among the keys, an integer or an integer JAX array []: for scores of a chunk of
        queries, and for queries that are the last of the keys.
      return_scores: True to return the scores of the selected blocks, too, -inf where the id is -1.

    Returns:
      The `Selection` with k ids in a row; with ``return_scores`` the pair of it and the scores [..., Tq, G, k].

    Raises:
      ValueError: scores are no floats or have other axes; k or start is below 0, or k below a row's number of forced
        blocks; `Selection` refuses the sizes; a flag is no bool.
      TypeError: scores are no array, or forced is no mask.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> scores = jnp.array([0.5, 2.0, 2.0, 9.0, 1.0]) * jnp.ones((1, 5, 1, 1))  # rows of 64 queries, 5 blocks of 64
      >>> sl.top_k_blocks(scores, 3, block=64, granularity=64, forced=sl.Window(0)).ids[0, :, 0].tolist()
      [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 1, 2], [4, 3, 1]]

    References:
      Lu et al. 2025, "MoBA: Mixture of Block Attention"; Yuan et al. 2025, "Native Sparse Attention"; Zhao et al. 2025,
      "InfLLM-V2".
    """
    block, granularity = checked_sizes(block, granularity)
    k = checked("k", k, Natural)
    checked("causal", causal, bool)
    checked("return_scores", return_scores, bool)
    _check_floats("scores", scores, "[..., ceil(T / granularity), G, blocks]")
    forced = Empty() if forced is None else forced
    if not isinstance(forced, Mask):
        raise TypeError(f"forced must be a mask in units of blocks, got {type(forced).__name__}: {forced!r}")
    rows, _, blocks = scores.shape[-3:]
    allowed, is_forced = _allowed_and_forced(rows, blocks, block, granularity, causal, forced, start)
    if isinstance(is_forced, np.ndarray) and is_forced.size and is_forced.sum(1).max() > k:
        raise ValueError(
            f"k must be at least the number of forced blocks, here up to {is_forced.sum(1).max()}, got {k}"
        )
    # Bools [..., rows, 1, blocks], with as many axes as the scores.
    allowed, is_forced = (jnp.expand_dims(x, (*range(scores.ndim - 3), -2)) for x in (allowed, is_forced))
    # A forced block comes before one with a score of infinity.
    rank = jnp.minimum(jax.lax.stop_gradient(scores), jnp.finfo(scores.dtype).max)
    rank = jnp.where(rank == 0, 0, rank)  # -0 equals 0, but top_k takes it for less
    rank = jnp.where(is_forced, jnp.inf, jnp.where(allowed & (rank > -jnp.inf), rank, -jnp.inf))
    top_scores, ids = jax.lax.top_k(rank, min(k, blocks))
    ends = [(0, 0)] * (scores.ndim - 1) + [(0, k - ids.shape[-1])]
    ids = jnp.pad(jnp.where(top_scores > -jnp.inf, ids, -1).astype(jnp.int32), ends, constant_values=-1)
    selection = _build_unchecked(ids, block, granularity)
    if not return_scores:
        return selection
    selected_scores = jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1)
    return selection, jnp.where(ids >= 0, selected_scores, -jnp.inf)


def _allowed_and_forced(rows, blocks, block, granularity, causal, forced, start) -> tuple[Any, Any]:
    """Returns bools [rows, blocks]: the blocks that may be selected, and of these the forced ones."""
    xp: Any = jnp if isinstance(start, jax.Array) else np  # numpy's bools can be checked before any work starts
    last = checked_position("start", start) + (xp.arange(rows) + 1) * granularity - 1
    own_block, kv_block = xp.minimum(last // block, blocks - 1)[:, None], xp.arange(blocks)[None]
    allowed = kv_block <= own_block if causal else xp.ones((rows, blocks), bool)
    return allowed, allowed & xp.broadcast_to(forced(own_block, kv_block), allowed.shape)


def checked_position(name: str, position: Any) -> Any:
    """Returns the argument ``name``, a position among the keys: an integer or an integer JAX array []."""
    if not isinstance(position, jax.Array):
        return checked(name, position, Natural)
    if position.shape or not jnp.issubdtype(position.dtype, jnp.integer):
        got = f"{position.dtype} of shape {position.shape}"
        raise ValueError(f"{name} must be an integer >= 0 or an array [] of one, got {got}")
    return position


@strict_kwargs
def mean_pool_blocks(x: jax.Array, block: int) -> jax.Array:
    """Returns the mean of each block of tokens: ``out[j] = mean(x[j * block : (j + 1) * block])``.

    Args:
      x: floats [..., S, K, H].
      block: tokens in a block, >= 1. The last block may be shorter: its mean is that of its tokens.

    Returns:
      [..., ceil(S / block), K, H] in the dtype of x, summed up in float32 (float64 for float64); differentiable.

    Raises:
      ValueError: x has other axes or no floats; block is no integer >= 1.
      TypeError: x is no array.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> sl.mean_pool_blocks(jnp.arange(5.0)[:, None, None], 2).ravel().tolist()
      [0.5, 2.5, 4.0]
    """
    _check_floats("x", x, "[..., S, K, H]")
    block = checked("block", block, Positive)
    *batch, tokens, heads, size = x.shape
    blocks = -(-tokens // block)
    x_blocks = jnp.pad(x, [(0, 0)] * len(batch) + [(0, blocks * block - tokens), (0, 0), (0, 0)])
    x_blocks = x_blocks.reshape(*batch, blocks, block, heads, size)
    total = x_blocks.sum(-3, dtype=jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    number = np.minimum(block, tokens - np.arange(blocks) * block)
    return (total / jnp.asarray(number.reshape(*(1,) * len(batch), blocks, 1, 1), total.dtype)).astype(x.dtype)


def _check_floats(name: str, x: Any, shape: str) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be a JAX or numpy array, got {type(x).__name__}: {reprlib.repr(x):.60}")
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floats of shape {shape}, got {x.dtype} of shape {x.shape}")
