"""`Rope`: rotary position embeddings by position in a sequence or by coordinates on a grid, and their scalings."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Natural, Positive, as_float, as_int, checked, strict_kwargs
from ..masks.grids import grid_shape
from ..ops.kernels.numerics import accumulator_dtype
from ..ops.layouts import warn_of_heads


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: a rotary position embedding with all frequencies divided by ``factor``.

    Args:
      factor: a number > 0.

    Raises:
      ValueError: factor is not a number > 0.

    Example:
      >>> import sparse_layers as sl
      >>> sl.LinearScaling(8.0).frequencies(10000.0, 2).tolist()
      [0.125, 0.00125]

    References:
      Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation"; Gemma 3.
    """

    factor: float

    # The factor of cosines and sines.
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self):
        _check_numbers(self, factor=0.0)

    def frequencies(self, theta: float, pairs: int) -> np.ndarray:
        """Returns the radians per token of each pair, float64 [pairs]."""
        return _frequencies(theta, pairs) / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of a rotary position embedding: it divides low frequencies by ``factor``, not high ones.

    A pair that rotates n times within ``original_length`` tokens keeps a share ``(n - low) / (high - low)``, clipped to
    [0, 1], of its frequency. The rest is divided by the factor.

    Args:
      factor: a number > 0.
      original_length: longest sequence of the original training, in tokens, >= 1.
      low, high: numbers of rotations, low < high.

    Raises:
      ValueError: numbers outside of their range.

    Example:
      >>> import sparse_layers as sl
      >>> scaled = sl.Llama3Scaling(8.0).frequencies(500000.0, 64)  # Llama 3.1
      >>> [round(float(x), 4) for x in scaled[[0, 30, 63]] / sl.Rope(500000.0).frequencies(64)[[0, 30, 63]]]
      [1.0, 0.6437, 0.125]

    References:
      Grattafiori et al. 2024, "The Llama 3 Herd of Models", and the code released with Llama 3.1.
    """

    factor: float
    original_length: int = 8192
    low: float = 1.0
    high: float = 4.0

    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self):
        _check_numbers(self, factor=0.0, low=0.0, high=0.0)
        checked("Llama3Scaling: original_length", self.original_length, Positive)
        if self.low >= self.high:
            raise ValueError(f"Llama3Scaling: low must be less than high={self.high}, got {self.low}")

    def frequencies(self, theta: float, pairs: int) -> np.ndarray:
        """Returns the radians per token of each pair, float64 [pairs]."""
        plain = _frequencies(theta, pairs)
        rotations = self.original_length * plain / (2 * math.pi)
        share = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
        return plain * (share + (1 - share) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling of a rotary position embedding: it divides low frequencies by ``factor`` and raises the logits.

    Pairs that rotate more than ``fast`` times within ``original_length`` tokens keep their frequency. Pairs that rotate
    less than ``slow`` times have theirs divided by ``factor``. Between them the share falls linearly with the pair's
    index.

    Args:
      factor: a number > 0.
      original_length: longest sequence of the original training, in tokens, >= 1.
      fast, slow: numbers of rotations, slow < fast.
      attention_factor: factor of cosines and sines, whose square multiplies the logits; None for the paper's
        ``0.1 * log(factor) + 1``, and 1 for factors up to 1.
      rounded: True rounds the indices of the first and the last pair between the two outwards.

    Raises:
      ValueError: numbers outside of their range, flags that are not bools.

    Example:
      >>> import sparse_layers as sl
      >>> scaling = sl.YarnScaling(4.0, original_length=32768)  # Qwen 2.5 and Qwen 3 beyond 32k
      >>> scaled = scaling.frequencies(1e6, 64) / sl.Rope(1e6).frequencies(64)
      >>> [round(float(x), 4) for x in scaled[[0, 30, 63]]], round(scaling.attention_factor, 4)
      ([1.0, 0.6912, 0.25], 1.1386)

    References:
      Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models".
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float = None  # pyright: ignore[reportAssignmentType] (a number once the value is made)
    rounded: bool = True

    def __post_init__(self):
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", 0.1 * math.log(max(1.0, as_float(self.factor) or 1.0)) + 1)
        _check_numbers(self, factor=0.0, fast=0.0, slow=0.0, attention_factor=0.0)
        checked("YarnScaling: original_length", self.original_length, Positive)
        checked("YarnScaling: rounded", self.rounded, bool)
        if self.slow >= self.fast:
            raise ValueError(f"YarnScaling: slow must be less than fast={self.fast}, got {self.slow}")

    def frequencies(self, theta: float, pairs: int) -> np.ndarray:
        """Returns the radians per token of each pair, float64 [pairs]."""
        plain = _frequencies(theta, pairs)
        # The fractional index of the pair that rotates fast, or slow, times within original_length tokens.
        fast_pair, slow_pair = (
            pairs * math.log(self.original_length / (2 * math.pi * rotations), theta)
            for rotations in (self.fast, self.slow)
        )
        if self.rounded:
            fast_pair, slow_pair = math.floor(fast_pair), math.ceil(slow_pair)
        fast_pair, slow_pair = max(fast_pair, 0), min(slow_pair, 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - fast_pair) / max(slow_pair - fast_pair, 1e-3), 0, 1)
        return plain * (1 - ramp + ramp / self.factor)


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE's scaling of a rotary position embedding: it divides each frequency by a factor of its own.

    The short factors are for models of inputs up to ``original_length`` tokens, the long ones for longer inputs.

    Args:
      short_factors, long_factors: numbers > 0, one for each pair that rotates.
      original_length: longest sequence of the original training, in tokens, >= 1.
      length: longest input of the model, in tokens, >= 1. It decides on the factors, whatever the length of an input.
      attention_factor: factor of cosines and sines, whose square multiplies the logits; > 0.

    Raises:
      ValueError: numbers outside of their range; `frequencies` of another number of pairs.
      TypeError: factors that are not sequences.

    Example:
      >>> import sparse_layers as sl
      >>> scaling = sl.LongRopeScaling((1.0, 1.1), (2.0, 8.0), original_length=4096, length=131072)  # Phi 3
      >>> scaling.frequencies(10000.0, 2).tolist()
      [0.5, 0.00125]

    References:
      Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens"; Phi 3.
    """

    short_factors: Sequence[float]
    long_factors: Sequence[float]
    original_length: int
    length: int
    attention_factor: float = 1.0

    def __post_init__(self):
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if isinstance(factors, str | bytes) or not isinstance(factors, Sequence):
                raise TypeError(f"LongRopeScaling: {name} must be a sequence of numbers, got {factors!r}")
            wrong = [x for x in factors if (as_float(x) or 0) <= 0]
            if wrong:
                raise ValueError(f"LongRopeScaling: {name} must be numbers > 0, got {wrong[0]!r}")
            object.__setattr__(self, name, tuple(factors))
        _check_numbers(self, attention_factor=0.0)
        checked("LongRopeScaling: original_length", self.original_length, Positive)
        checked("LongRopeScaling: length", self.length, Positive)

    def frequencies(self, theta: float, pairs: int) -> np.ndarray:
        """Returns the radians per token of each pair, float64 [pairs]."""
        is_long = self.length > self.original_length
        name, factors = ("long_factors", self.long_factors) if is_long else ("short_factors", self.short_factors)
        if len(factors) != pairs:
            raise ValueError(f"LongRopeScaling: {name} must be one for each of the {pairs} pairs, got {len(factors)}")
        return _frequencies(theta, pairs) / np.array(factors)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


def _frequencies(theta: float, pairs: int) -> np.ndarray:
    return float(theta) ** -(np.arange(pairs) / pairs)


def _check_numbers(scaling: Scaling, **above: float) -> None:
    for name, least in above.items():
        number = as_float(getattr(scaling, name))
        if number is None or number <= least:
            value = getattr(scaling, name)
            raise ValueError(f"{type(scaling).__name__}: {name} must be a number > {least:g}, got {value!r}")


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: pairs of features rotate with the position, so that logits depend on distances.

    Pair i of a head of H features is (i, i + H/2). Without a shape, it rotates by ``position * theta**(-2i/H)``
    radians. With a shape, the axes share the pairs in order, the first axis the first pairs (axial RoPE): pair i of an
    axis with s features rotates by ``coordinate * theta**(-2i/s)``. Token ``offset + p`` has the row-major coordinates
    of p in ``shape``, as in `Grid`. Tokens before ``offset`` and after the grid are not rotated.

    Equal shares need a head size that ``2 * len(shape)`` divides; ``sizes`` sets other shares. Models that pair
    neighbouring features (2i, 2i + 1), as most image and video models do, give the same logits after a permutation of
    their query and key features. Calling the value on an array rotates it, for layers of your own.

    Args:
      theta: base of the wavelengths, which run from 2*pi to about 2*pi*theta tokens, or steps on an axis.
      shape: lengths of the grid's axes, the slowest first; None for positions in the sequence.
      offset: position of the grid's first token.
      sizes: features of each axis, even numbers that add up to the head size; None for equal shares.
      rotary_dim: number of features to rotate, the first ones of a head; None for all.
      scaling: `LinearScaling`, `Llama3Scaling`, `YarnScaling` or `LongRopeScaling`, or None.

    Raises:
      ValueError: theta is not a number > 0, or > 1 with `YarnScaling`; lengths, an offset, sizes or rotary_dim are not
        integers in their range; sizes are odd or not one for each axis; offset or sizes are given without a shape.
      TypeError: shape or sizes are not sequences, or scaling has another type.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> second = sl.Rope()(jnp.ones((2, 1, 2)))[1].ravel()  # rotated by one radian
      >>> [round(float(x), 2) for x in second]
      [-0.3, 1.38]
      >>> pixels = sl.Rope(theta=100.0, shape=(3, 4))(jnp.ones((12, 1, 4)))
      >>> [round(float(x), 2) for x in pixels[4].ravel()]  # row 1, column 0: the first of two pairs rotated
      [-0.3, 1.0, 1.38, 1.0]
      >>> video = sl.Rope(theta=256.0, shape=(33, 45, 80), sizes=(16, 56, 56))  # HunyuanVideo's shares of 128 features
      >>> llama = sl.Rope(theta=500000.0, scaling=sl.Llama3Scaling(8.0))  # Llama 3.1
      >>> half = sl.Rope(rotary_dim=2)(jnp.ones((2, 1, 4)))[1].ravel()  # GPT-J and GPT-NeoX rotate a part of a head
      >>> [round(float(x), 2) for x in half]
      [-0.3, 1.38, 1.0, 1.0]

    References:
      Su et al. 2021, "RoFormer" (the rotation); GPT-NeoX (the pairs); Heo et al. 2024, "Rotary Position Embedding for
      Vision Transformer" (axial, with theta=100); Qwen2-VL's image encoder (axial with these pairs); Kong et al. 2024,
      "HunyuanVideo" (uneven shares, with theta=256); GPT-J (partial).
    """

    theta: float = 10000.0
    shape: tuple[int, ...] | None = None
    offset: int = 0
    sizes: tuple[int, ...] | None = None
    rotary_dim: int | None = None
    scaling: Scaling | None = None

    def __init__(
        self,
        theta: float = 10000.0,
        shape: Sequence[int] | None = None,
        offset: int = 0,
        sizes: Sequence[int] | None = None,
        rotary_dim: int | None = None,
        scaling: Scaling | None = None,
    ):
        base = as_float(theta)
        if base is None or base <= 0:
            raise ValueError(f"Rope: theta must be a number > 0, got {theta!r}")
        first_token = checked("Rope: offset", offset, Natural)
        if shape is None and (first_token != 0 or sizes is not None):
            raise ValueError(f"Rope: offset and sizes need a shape, got offset={offset!r}, sizes={sizes!r}")
        lengths = None if shape is None else grid_shape("Rope", shape)
        shares = None
        if sizes is not None and lengths is not None:
            if isinstance(sizes, str | bytes) or not (isinstance(sizes, Sequence) or np.ndim(sizes) == 1):
                raise TypeError(f"Rope: sizes must be a sequence of features, got {sizes!r}")
            shares = tuple(n for n in map(as_int, sizes) if n is not None and n > 0 and n % 2 == 0)
            if len(shares) != len(sizes) or len(shares) != len(lengths):
                raise ValueError(
                    f"Rope: sizes must be even integers >= 2, one for each of the {len(lengths)} axes, got {sizes!r}"
                )
        num_rotated = None if rotary_dim is None else checked("Rope: rotary_dim", rotary_dim, Positive)
        if not isinstance(scaling, Scaling | None):
            raise TypeError(f"Rope: scaling must be one, as sl.LinearScaling(8.0), or None, got {scaling!r}")
        if isinstance(scaling, YarnScaling) and base <= 1:
            raise ValueError(f"Rope: theta must be > 1 with YarnScaling, got {theta!r}")
        fields = {"theta": base, "shape": lengths, "offset": first_token, "sizes": shares}
        for name, value in (fields | {"rotary_dim": num_rotated, "scaling": scaling}).items():
            object.__setattr__(self, name, value)

    def pairs(self, head_size: int, name: str = "head size") -> tuple[int, ...]:
        """Returns the number of pairs of each axis, of a head with head_size features.

        Raises:
          ValueError: the axes cannot share the head size, which the error calls ``name``.
        """
        if self.rotary_dim is not None:
            if self.rotary_dim > head_size:
                raise ValueError(f"rope={self}: rotary_dim must be at most {name}={head_size}, got {self.rotary_dim}")
            head_size, name = self.rotary_dim, "rotary_dim"
        if self.sizes is not None:
            if sum(self.sizes) != head_size:
                raise ValueError(f"rope={self}: sizes must add up to {name}={head_size}, got {sum(self.sizes)}")
            return tuple(size // 2 for size in self.sizes)
        axes = 1 if self.shape is None else len(self.shape)
        if head_size % (2 * axes):
            raise ValueError(
                f"rope={self} rotates equally many pairs of features with each axis, so {2 * axes} must divide {name}, "
                f"got {head_size}; sizes= sets other shares"
            )
        return (head_size // (2 * axes),) * axes

    def frequencies(self, pairs: int) -> np.ndarray:
        """Returns the frequency of each pair of an axis, in radians per position, float64 [pairs]."""
        return _frequencies(self.theta, pairs) if self.scaling is None else self.scaling.frequencies(self.theta, pairs)

    def coordinates(self, positions: jax.Array) -> list[jax.Array]:
        """Returns the coordinates on each axis of tokens at these positions, arrays like positions."""
        if self.shape is None:
            return [positions]
        index, stride = positions - self.offset, math.prod(self.shape)
        index = jnp.where((index >= 0) & (index < stride), index, 0)
        coordinates = []
        for length in self.shape:
            stride //= length
            coordinates.append(index // stride % length)
        return coordinates

    @strict_kwargs
    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Rotates queries or keys.

        Args:
          x: [..., T, N, H].
          positions: int [..., T] or [T]; None for 0, 1, ...

        Returns:
          An array like x. Angles and products are float32 at least.

        Raises:
          ValueError: x has fewer than 3 axes, positions have another shape than tokens, or the axes cannot share H.
          TypeError: x are not floats, or positions not integers.
        """
        if x.ndim < 3 or (positions is not None and jnp.shape(positions) not in (x.shape[:-2], x.shape[-3:-2])):
            got = x.shape if positions is None else f"{x.shape} and {jnp.shape(positions)}"
            raise ValueError(f"Rope: x must have shape [..., T, N, H] and positions [..., T] or [T], got {got}")
        if positions is None:
            warn_of_heads("Rope", x.shape, x.shape[-3:-1], length=0)
        positions = jnp.arange(x.shape[-3]) if positions is None else jnp.asarray(positions)
        if not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(f"Rope: x must be floats and positions integers, got {x.dtype} and {positions.dtype}")
        dtype, pairs = accumulator_dtype(x.dtype), self.pairs(x.shape[-1])
        # Ranks and dtypes are made equal explicitly, for users who forbid JAX's promotion.
        positions = jnp.expand_dims(positions, tuple(range(x.ndim - 2 - positions.ndim)))

        def axis_angles(coordinate: jax.Array, pairs: int) -> jax.Array:
            frequencies = np.expand_dims(self.frequencies(pairs), tuple(range(x.ndim - 2)))
            return coordinate.astype(dtype)[..., None] * jnp.asarray(frequencies, dtype)

        angles = jnp.concatenate(list(map(axis_angles, self.coordinates(positions), pairs)), -1)[..., None, :]
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        cosines, sines = factor * jnp.cos(angles), factor * jnp.sin(angles)
        x1, x2, unrotated = jnp.split(x.astype(dtype), (sum(pairs), 2 * sum(pairs)), axis=-1)
        rotated = (x1 * cosines - x2 * sines, x2 * cosines + x1 * sines, unrotated)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def resolve_rope(rope: Any, rope_theta: float | None) -> Rope | None:
    """Returns the rotary position embeddings of a layer, whose ``rope_theta=x`` is short for ``rope=Rope(x)``.

    Raises:
      ValueError: both are given.
    """
    if rope is not None and rope_theta is not None:
        raise ValueError(f"rope_theta must be None where rope says the base, got rope_theta={rope_theta} and {rope}")
    return rope if rope_theta is None else Rope(rope_theta)
