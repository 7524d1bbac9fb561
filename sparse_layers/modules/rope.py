"""`Rope`: rotary position embeddings, of positions in a sequence or of coordinates on a grid."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..masks.grids import grid_shape
from ..masks.options import Natural, checked, real, whole
from ..ops.kernels.call import accumulator


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: pairs of features turn with the position, so that logits know distances only.

    Pair i of a head of H features is (i, i + H/2). Without a shape, it turns by ``position * theta**(-2i/H)`` radians.
    With a shape, the pairs are divided among the axes in order, the first pairs to the first axis, and each axis turns
    its own by its coordinate as if they were a whole head (axial RoPE): pair i of an axis with s features by
    ``coordinate * theta**(-2i/s)``. Token ``offset + p`` has the row-major coordinates of p in ``shape``, as in `Grid`.
    Tokens before ``offset`` and beyond the grid are not turned, as if all their coordinates were 0.

    Equal shares ask for a head size that ``2 * len(shape)`` divides; ``sizes`` says others. Projects that pair
    neighbouring features (2i, 2i + 1), as most image and video models do, have the same logits once the features of
    their query and key heads are put in this order. Called on an array, the value turns it, for layers of your own.

    Args:
      theta: base of the wavelengths, which run from 2*pi to about 2*pi*theta tokens, or steps on an axis.
      shape: lengths of the grid's axes, the slowest first; None for positions in the sequence.
      offset: position of the grid's first token.
      sizes: features of a head for each axis, even numbers that add up to the head size; None for equal shares.

    Raises:
      ValueError: theta is no number > 0; lengths, an offset or sizes that are no integers of their range; sizes that
        are odd or not one for each axis; offset or sizes without a shape.
      TypeError: shape or sizes are no sequences.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> turned = sl.Rope()(jnp.ones((2, 1, 2)))[1].ravel()  # the second token: turned by one radian
      >>> [round(float(x), 2) for x in turned]
      [-0.3, 1.38]
      >>> pixels = sl.Rope(theta=100.0, shape=(3, 4))(jnp.ones((12, 1, 4)))
      >>> [round(float(x), 2) for x in pixels[4].ravel()]  # row 1, column 0: the first of two pairs turned
      [-0.3, 1.0, 1.38, 1.0]
      >>> video = sl.Rope(theta=256.0, shape=(33, 45, 80), sizes=(16, 56, 56))  # HunyuanVideo's shares of 128 features

    References:
      Su et al. 2021, "RoFormer" (the rotation); GPT-NeoX (the pairs); Heo et al. 2024, "Rotary Position Embedding for
      Vision Transformer" (axial, with theta=100); Qwen2-VL's image encoder (axial with these pairs); Kong et al. 2024,
      "HunyuanVideo" (uneven shares, with theta=256).
    """

    theta: float = 10000.0
    shape: tuple[int, ...] | None = None
    offset: int = 0
    sizes: tuple[int, ...] | None = None

    def __init__(
        self,
        theta: float = 10000.0,
        shape: Sequence[int] | None = None,
        offset: int = 0,
        sizes: Sequence[int] | None = None,
    ):
        base = real(theta)
        if base is None or base <= 0:
            raise ValueError(f"Rope: theta must be a number > 0, got {theta!r}")
        place = checked("Rope: offset", offset, Natural)
        if shape is None and (place != 0 or sizes is not None):
            raise ValueError(f"Rope: offset and sizes need a shape, got offset={offset!r}, sizes={sizes!r}")
        lengths = None if shape is None else grid_shape("Rope", shape)
        shares = None
        if sizes is not None and lengths is not None:
            if isinstance(sizes, str | bytes) or not (isinstance(sizes, Sequence) or np.ndim(sizes) == 1):
                raise TypeError(f"Rope: sizes must be a sequence of features, got {sizes!r}")
            shares = tuple(n for n in map(whole, sizes) if n is not None and n > 0 and n % 2 == 0)
            if len(shares) != len(sizes) or len(shares) != len(lengths):
                raise ValueError(
                    f"Rope: sizes must be even integers >= 2, one for each of the {len(lengths)} axes, got {sizes!r}"
                )
        for name, value in (("theta", base), ("shape", lengths), ("offset", place), ("sizes", shares)):
            object.__setattr__(self, name, value)

    def pairs(self, head_size: int, name: str = "head size") -> tuple[int, ...]:
        """Pairs of features that turn with each axis, of a head with so many features.

        Raises:
          ValueError: they cannot be divided so; ``name`` is what the error calls the head size.
        """
        if self.sizes is not None:
            if sum(self.sizes) != head_size:
                raise ValueError(f"rope={self}: sizes must add up to {name}={head_size}, got {sum(self.sizes)}")
            return tuple(size // 2 for size in self.sizes)
        axes = 1 if self.shape is None else len(self.shape)
        if head_size % (2 * axes):
            raise ValueError(
                f"rope={self} turns equally many pairs of features with each axis, so {2 * axes} must divide {name}, "
                f"got {head_size}; sizes= says other shares"
            )
        return (head_size // (2 * axes),) * axes

    def coordinates(self, positions: jax.Array) -> list[jax.Array]:
        """The coordinate of each token on each axis, arrays like ``positions``, integers of any shape."""
        if self.shape is None:
            return [positions]
        place, stride = positions - self.offset, math.prod(self.shape)
        place = jnp.where((place >= 0) & (place < stride), place, 0)
        found = []
        for length in self.shape:
            stride //= length
            found.append(place // stride % length)
        return found

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Queries or keys, turned.

        Args:
          x: [..., T, N, H].
          positions: int [..., T] or [T] of the tokens in their sequence; None for the index along T.

        Returns:
          An array like x. Angles and products are float32 at least.

        Raises:
          ValueError: x has fewer than 3 axes, positions have another shape than x without its last two, or H cannot be
            divided among the axes.
          TypeError: x is not of floats, or positions not of integers.
        """
        if x.ndim < 3 or (positions is not None and jnp.shape(positions) not in (x.shape[:-2], x.shape[-3:-2])):
            got = x.shape if positions is None else f"{x.shape} and {jnp.shape(positions)}"
            raise ValueError(f"Rope: x must have shape [..., T, N, H] and positions [..., T] or [T], got {got}")
        positions = jnp.arange(x.shape[-3]) if positions is None else jnp.asarray(positions)
        if not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(f"Rope: x must be floats and positions integers, got {x.dtype} and {positions.dtype}")
        half, dtype = x.shape[-1] // 2, accumulator(x.dtype)
        of_axes = zip(self.coordinates(positions), self.pairs(x.shape[-1]), strict=True)
        angles = jnp.concatenate(
            [at.astype(dtype)[..., None] * self.theta ** (-jnp.arange(n, dtype=dtype) / n) for at, n in of_axes], -1
        )[..., None, :]
        first, second = x[..., :half], x[..., half:]
        turned = (
            first * jnp.cos(angles) - second * jnp.sin(angles),
            second * jnp.cos(angles) + first * jnp.sin(angles),
        )
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def resolved(rope: Rope | None, rope_theta: float | None) -> Rope | None:
    """The embeddings that two arguments of a layer say: ``rope_theta=x`` is short for ``rope=Rope(x)``.

    Raises:
      ValueError: both are given.
    """
    if rope is not None and rope_theta is not None:
        raise ValueError(f"rope_theta must be None where rope says the base, got rope_theta={rope_theta} and {rope}")
    return rope if rope_theta is None else Rope(rope_theta)
