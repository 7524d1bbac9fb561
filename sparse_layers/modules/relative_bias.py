"""Relative position biases of attention layers: values that say which bias a layer has, and which parameters."""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Natural, Positive, PositivePerAxis, as_int, checked, checked_by_axis, strict_kwargs
from ..arguments.foreign import one_line
from ..masks.grids import grid_shape
from ..ops.kernels.distance_bias import DistanceBias, alibi, check_bias, check_buckets, grid_bias, t5_bias
from ..ops.kernels.validation import transposed_hint


class RelativeBias(abc.ABC):
    """The base of `AlibiBias`, `T5Bias`, `LearnedBias` and `GridBias`: ``relative_bias=`` of layers, blocks and models.

    A layer makes the parameters of the bias, and each call adds it to the logits, as ``bias=`` of
    `block_sparse_attention` does. A bias has one table of parameters, or none. The table is the parameter
    ``bias_table`` of the attention layer, or of a model that shares it. It is initially zero, in ``param_dtype``; in
    Haiku, in the dtype of the inputs.

    For a bias of your own, write both methods in a frozen dataclass.

    Example:
      >>> import dataclasses, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> @dataclasses.dataclass(frozen=True)
      ... class LearnedSlopes(sl.RelativeBias):  # ALiBi with a learned slope for each head
      ...     length: int
      ...     def table_shape(self, num_heads):
      ...         return (num_heads, 1)
      ...     def make_bias(self, table, num_heads):
      ...         return sl.DistanceBias(-table * jnp.arange(self.length)[::-1], center=self.length - 1)
      >>> options = {"pattern": sl.Causal(), "seq_len": 64, "relative_bias": LearnedSlopes(64)}
      >>> layer = sl.SparseSelfAttention(4, 32, **options, rngs=nnx.Rngs(0))
      >>> layer.bias_table.shape, layer(jnp.ones((1, 64, 32))).shape
      ((4, 1), (1, 64, 32))
    """

    @abc.abstractmethod
    def table_shape(self, num_heads: int) -> tuple[int, ...] | None:
        """Returns the shape of the table of a layer with this number of query heads, or None for no table."""

    @abc.abstractmethod
    def make_bias(self, table: jax.Array | None, num_heads: int) -> DistanceBias:
        """Returns the bias that a table makes; the table is None if `table_shape` is."""

    def abstract_bias(self, num_heads: int, lengths: tuple[int, int] | None = None) -> DistanceBias:
        """Returns the bias with a `jax.ShapeDtypeStruct` as its table, in float32; ``lengths`` are (T, S), if known.

        Raises:
          TypeError: a method of a subclass returns something else than it must.
          ValueError: the bias is of another number of heads, or a grid of other lengths.
        """
        shape, name = self.table_shape(num_heads), type(self).__name__
        if shape is not None and not (isinstance(shape, tuple) and all((as_int(n) or 0) >= 1 for n in shape)):
            raise TypeError(f"{name}.table_shape must return a tuple of integers >= 1 or None, got {one_line(shape)}")
        table = None if shape is None else jax.ShapeDtypeStruct(shape, jnp.float32)
        bias = jax.eval_shape(lambda table: self.make_bias(table, num_heads), table)
        if not isinstance(bias, DistanceBias):
            raise TypeError(f"{name}.make_bias must return a DistanceBias, got {one_line(bias)}")
        check_bias(bias, num_heads, lengths, f"relative_bias={one_line(self)}")
        return bias


def bias_of_parameter(relative_bias: RelativeBias, bias_table: jax.Array | None, num_heads: int) -> DistanceBias:
    """Returns the bias that the parameter ``bias_table`` of a layer or model makes.

    Raises:
      ValueError: the parameter has another shape, as from the checkpoint of another relative_bias.
    """
    shape, table_shape = getattr(bias_table, "shape", None), relative_bias.table_shape(num_heads)
    if shape != table_shape:
        hint = transposed_hint(shape or (), table_shape or ())
        raise ValueError(
            f"bias_table must have shape {table_shape}, that of relative_bias={one_line(relative_bias)}, "
            f"got {shape}{hint}"
        )
    return relative_bias.make_bias(bias_table, num_heads)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class AlibiBias(RelativeBias):
    """The bias of ALiBi as a setting of layers: `alibi`, without parameters.

    Args:
      slopes: a number for each query head; None for those of the paper, which BLOOM has. MPT orders them differently
        if the number of heads is not a power of two.

    Raises:
      ValueError: slopes are not numbers of at most 1e30 in absolute value; when a layer is made, their number is not
        that of query heads.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> options = {"pattern": "all", "seq_len": 64, "relative_bias": sl.AlibiBias()}
      >>> layer = sl.SparseSelfAttention(4, 32, **options, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 64, 32))).shape
      (1, 64, 32)

    References:
      Press et al. 2021, "Train Short, Test Long" (arXiv 2108.12409).
    """

    slopes: tuple[float, ...] | None = None

    def __init__(self, slopes: Sequence[float] | np.ndarray | None = None):
        object.__setattr__(self, "slopes", None if slopes is None else DistanceBias(slopes=slopes).slopes)

    def table_shape(self, num_heads: int) -> None:
        """Returns None: the bias has no parameters."""
        return None

    def make_bias(self, table: None, num_heads: int) -> DistanceBias:
        """Returns the slopes as a bias."""
        return alibi(num_heads) if self.slopes is None else DistanceBias(slopes=self.slopes)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class T5Bias(RelativeBias):
    """The bias of T5 as a setting of layers: `t5_bias`, whose table [N, num_buckets] is a parameter.

    T5 has one table for all layers of a model, ``SparseTransformer(share_relative_bias=True)``, and no scale of logits,
    ``scale=1.0``. The table is ``relative_attention_bias.weight.T`` of Hugging Face's T5.

    Args:
      bidirectional: True for T5's encoder, False for its decoder, whose pattern is causal.
      num_buckets: number of entries of each head.
      max_distance: the distance from which all keys are in the last bucket.

    Raises:
      ValueError: as `t5_bias`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> t5 = {"relative_bias": sl.T5Bias(bidirectional=False), "share_relative_bias": True, "scale": 1.0}
      >>> sizes = {"patterns": "causal", "seq_len": 64, "positions": "none"}
      >>> model = sl.SparseTransformer(50, 4, 32, 2, **sizes, **t5, rngs=nnx.Rngs(0))
      >>> model.bias_table.shape, model(jnp.zeros((1, 64), int)).shape
      ((4, 32), (1, 64, 50))

    References:
      Raffel et al. 2020, "Exploring the Limits of Transfer Learning" (arXiv 1910.10683).
    """

    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self):
        for name, hint in (("bidirectional", bool), ("num_buckets", Positive), ("max_distance", Positive)):
            object.__setattr__(self, name, checked(f"T5Bias: {name}", getattr(self, name), hint))
        check_buckets("T5Bias", "num_buckets", self.num_buckets, bool(self.bidirectional), self.max_distance)

    def table_shape(self, num_heads: int) -> tuple[int, ...]:
        """Returns (num_heads, num_buckets)."""
        return num_heads, self.num_buckets

    def make_bias(self, table: jax.Array, num_heads: int) -> DistanceBias:
        """Returns the bias of buckets [N, num_buckets]."""
        return t5_bias(table, bidirectional=bool(self.bidirectional), max_distance=self.max_distance)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class LearnedBias(RelativeBias):
    """A learned number for each head and distance as a setting of layers: a table [N, left + 1 + right].

    Entry ``left + d`` is for keys d tokens behind the query. Keys that are farther take the first or the last entry.

    Args:
      left: the longest distance with an entry, of keys before the query, >= 0.
      right: likewise, of keys behind the query.

    Raises:
      ValueError: left or right is no integer >= 0.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> options = {"pattern": sl.Window(63), "seq_len": 256, "relative_bias": sl.LearnedBias(63)}
      >>> layer = sl.SparseSelfAttention(4, 32, **options, rngs=nnx.Rngs(0))
      >>> layer.bias_table.shape
      (4, 64)
    """

    left: int
    right: int = 0

    def __post_init__(self):
        for name in ("left", "right"):
            object.__setattr__(self, name, checked(f"LearnedBias: {name}", getattr(self, name), Natural))

    def table_shape(self, num_heads: int) -> tuple[int, ...]:
        """Returns (num_heads, left + 1 + right)."""
        return num_heads, self.left + 1 + self.right

    def make_bias(self, table: jax.Array, num_heads: int) -> DistanceBias:
        """Returns the bias of a table [N, left + 1 + right]."""
        return DistanceBias(table, self.left)


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class GridBias(RelativeBias):
    """A learned number for each head and distance on a grid as a setting of layers: `grid_bias` with a joint table.

    With an image of 28 x 28 tokens and windows of 7 x 7, the table is [N, 13, 13]. It is Swin's
    ``relative_position_bias_table[::-1].T.reshape(N, 13, 13)``, as Swin counts distances from key to query. All inputs
    have the tokens of the whole grid, so the layer does not decode.

    Args:
      shape: lengths of the grid's axes, the slowest first; their product is seq_len.
      size: tokens of a window on an axis, as in the preset "windows": distances below it have entries. One integer for
        all axes, or a tuple; None for the whole grid.

    Raises:
      ValueError: shape or size are no integers >= 1, or not one for each axis; when a layer is made, the grid does not
        have seq_len tokens.
      TypeError: shape is no sequence.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> swin = {"pattern": sl.preset("windows", shape=(28, 28), size=7), "seq_len": 784}
      >>> swin["relative_bias"] = sl.GridBias((28, 28), size=7)
      >>> layer = sl.SparseSelfAttention(4, 32, **swin, rngs=nnx.Rngs(0))
      >>> layer.bias_table.shape, layer(jnp.ones((1, 784, 32))).shape
      ((4, 13, 13), (1, 784, 32))

    References:
      Liu et al. 2021, "Swin Transformer" (arXiv 2103.14030).
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]

    def __init__(self, shape: Sequence[int], size: int | Sequence[int] | None = None):
        lengths = grid_shape("GridBias", shape)
        sizes = checked_by_axis("GridBias: size", lengths if size is None else size, PositivePerAxis)
        sizes = sizes if isinstance(sizes, tuple) else (sizes,) * len(lengths)
        if len(sizes) != len(lengths):
            raise ValueError(f"GridBias: size must have one entry for each axis of shape={lengths}, got {size!r}")
        for name, value in (("shape", lengths), ("size", sizes)):
            object.__setattr__(self, name, value)

    def table_shape(self, num_heads: int) -> tuple[int, ...]:
        """Returns num_heads, then 2 * size - 1 of each axis."""
        return num_heads, *(2 * n - 1 for n in self.size)

    def make_bias(self, table: jax.Array, num_heads: int) -> DistanceBias:
        """Returns the bias of a joint table."""
        return grid_bias(self.shape, table)
