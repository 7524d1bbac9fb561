"""Masks say which query may attend to which key: frozen values that combine by ``&``, ``|`` and ``~``.

A mask knows nothing of lengths, heads, blocks or devices. It answers two questions:

* ``mask(q, k)``: may the query at position ``q`` attend to the key at position ``k``? The arguments are integer arrays
  that broadcast against each other (numpy or JAX); the answer is a bool array of the broadcast shape. A mask that is
  ``computable`` uses operators only, so the same expression runs inside a kernel.
* ``mask.block_state(q0, q1, k0, k1)``: is the inclusive rectangle of positions EMPTY, PARTIAL or FULL? Answered in
  closed form, so that a plan for a million tokens never looks at single pairs.

Block lists, the dense oracle, pictures and tests all derive from these two.
"""

import dataclasses
import functools
import hashlib
import math
import typing
from collections.abc import Callable
from typing import Any

import jax.errors
import jax.tree_util
import numpy as np

from ..arguments.checks import LONGEST, Positive, as_int, checked, strict_kwargs
from . import pictures
from .serialization import register_mask
from .states import AND_TABLE, EMPTY, NOT_TABLE, OR_TABLE, UNSURE, to_state

FARTHEST = 2**30  # tokens, the longest shift of a mask
BEYOND = LONGEST + 1  # longer than any sequence: no limit


def set_integers(
    mask: "Mask",
    *names: str,
    minimum: int | None,
    optional: bool = False,
    maximum: int | None = None,
    clip: bool = True,
) -> None:
    """Checks integer fields of a mask and makes them Python ints (numpy's would wrap around in arithmetic).

    Numbers that count tokens or blocks are clipped to `BEYOND`: those with a minimum, if ``clip``.
    """
    for name in names:
        value: Any = getattr(mask, name)
        if optional and value is None:
            continue
        number = as_int(value)
        if number is None or (minimum is not None and number < minimum):
            rule = "an integer" if minimum is None else f"an integer >= {minimum}"
            raise ValueError(f"{type(mask).__name__}: {name} must be {rule}{' or None' * optional}, got {value!r}")
        if maximum is not None and number > maximum:
            raise ValueError(f"{type(mask).__name__}: {name} must be at most {maximum}, got {number}")
        object.__setattr__(mask, name, min(number, BEYOND) if clip and minimum is not None else number)


def check_masks(mask: "Mask", *names: str) -> None:
    """Checks that fields of a mask are masks."""
    for name in names:
        if not isinstance(getattr(mask, name), Mask):
            raise TypeError(f"{type(mask).__name__}: {name} must be a mask, got {getattr(mask, name)!r}")


def evaluate_rule(what: str, rule: Callable[..., Any], *arguments: Any) -> Any:
    """Evaluates a mask's rule, often a user's, and refuses what is not bools; the last ``arguments`` are q and k."""
    try:
        allowed = rule(*arguments)
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError) as error:
        raise TypeError(
            f"{what}: it looks up a table that is no JAX array, so no kernel can compute it: leave traceable=True out "
            "of a mask_mod, write `computable = False` into a class of your own, and kernels read it block by block"
        ) from error
    except IndexError as error:
        raise ValueError(
            f"{what}: a table that it looks up must have an entry for each position of the sequence, got: {error}"
        ) from error
    except (jax.errors.TracerBoolConversionError, ValueError) as error:
        if isinstance(error, ValueError) and str(error).startswith("vmap "):
            raise TypeError(
                f"{what}: it is asked about arrays of positions q and k that broadcast, one h and no b, where jax.vmap "
                f"has nothing to map over: hand over the function itself; JAX says: {error}"
            ) from error
        if isinstance(error, ValueError) and "truth value" not in str(error):
            raise
        raise TypeError(
            f"{what}: it is asked about arrays of positions: write & for 'and', | for 'or', == False for 'not', "
            "(a <= b) & (b < c) for a <= b < c, and np.where or jnp.where for 'if'"
        ) from error
    dtype = allowed.dtype if hasattr(allowed, "dtype") else type(allowed).__name__
    if dtype not in (np.bool_, "bool"):
        raise TypeError(f"{what} must return bools (q >= k, not q - k), got {dtype}")
    shape, positions = np.shape(allowed), np.broadcast_shapes(*map(np.shape, arguments[-2:]))
    # A rule that ignores q or k answers in a smaller shape, a constant in none.
    if shape and (len(shape) != len(positions) or any(n not in (1, m) for n, m in zip(shape, positions, strict=True))):
        raise TypeError(f"{what} must return bools of the shape {positions} of the positions, got {shape}")
    return allowed


# eq=False: a subclass that is not decorated as a dataclass equals itself only.
@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Base of all masks. A subclass defines ``__call__`` and, for cheap plans, `block_state`.

    Masks are frozen dataclasses. Masks with equal fields are equal and share one plan and one trace. An instance of a
    subclass that is not decorated as a dataclass equals itself only.

    Raises:
      TypeError: when used as a truth value (``and``, ``or``, ``not``, ``if``): write ``&``, ``|``, ``~``.

    Example:
      >>> import sparse_layers as sl
      >>> mask = sl.Causal() & (sl.Window(1) | sl.Prefix(1))
      >>> print(sl.picture(mask, 6))
      ■ · · · · ·
      ■ ■ · · · ·
      ■ ■ ■ · · ·
      ■ · ■ ■ · ·
      ■ · · ■ ■ ·
      ■ · · · ■ ■
      >>> bool(mask(5, 0)), bool(mask(5, 1))
      (True, False)
    """

    __array_ufunc__ = None  # numpy leaves ``array & mask`` to the mask

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_static(cls)  # a value, not a container of arrays, wherever JAX meets it
        register_mask(cls)
        if "__call__" in vars(cls):
            cls.__call__ = _checked_rule(vars(cls)["__call__"])
        if "block_state" in vars(cls):
            cls.block_state = _checked_state(vars(cls)["block_state"])
        if cls.__repr__ is Mask.__repr__:
            cls.__repr__ = Mask.__repr__  # in the class itself, where dataclasses leave it alone
        cls._writes_eq = "__eq__" in vars(cls)  # before the decorator of dataclasses adds one

    def __repr__(self) -> str:
        fields = (field.name for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(f'{name}={_shown(getattr(self, name))}' for name in fields)})"

    @property
    def computable(self) -> bool:
        """True if kernels may trace ``mask(q, k)``: it uses operators only, and looks up no numpy table.

        A class that looks up a table says ``computable = False``. It is evaluated at plan time, never beyond the
        lengths. By default it is that of all masks among the fields.
        """
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        entries = (entry for value in values for entry in (value if isinstance(value, tuple) else (value,)))
        return all(entry.computable for entry in entries if isinstance(entry, Mask))

    def __call__(self, q: Any, k: Any) -> Any:
        """Returns True where query position q may attend to key position k: signed integer arrays that broadcast."""
        raise TypeError(f"{type(self).__name__} is no concrete mask: it has no rule of its own")

    def block_state(self, q0: Any, q1: Any, k0: Any, k1: Any) -> np.ndarray:
        """Returns the block states of rectangles of positions; a subclass answers in closed form.

        Its arguments are then int64 arrays, whatever the caller's are, and its answer may have any shape that
        broadcasts to theirs.

        Args:
          q0, q1: first and last query position of each rectangle: integers or integer arrays (numpy).
          k0, k1: first and last key position; all four broadcast against each other.

        Returns:
          int8 array of the broadcast shape: 0 (EMPTY) if no pair is allowed, 2 (FULL) if every pair is, 1 (PARTIAL) if
          some are; 3 (UNSURE) where the closed form cannot tell, and a plan looks at the pairs. Primitives are exact;
          compositions, `Random` and `MaskMod` may be unsure. A wrong 1 makes a plan slower, a wrong 0 or 2 wrong.
        """
        return np.full(np.broadcast_shapes(*map(np.shape, (q0, q1, k0, k1))), UNSURE, np.int8)

    def dense(self, q_len: int, kv_len: int | None = None) -> np.ndarray:
        """Returns the mask as a bool array [q_len, kv_len], for tests and small pictures; kv_len defaults to q_len."""
        q_len, kv_len = (checked("dense: length", n, Positive) for n in (q_len, q_len if kv_len is None else kv_len))
        q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
        return np.broadcast_to(self(q, k), (q.size, k.size))

    @property
    def T(self) -> "Mask":
        """The transpose: ``mask.T(q, k) == mask(k, q)``."""
        return self.mask if isinstance(self, Transposed) else Transposed(self)

    @typing.overload
    def __and__(self, other: "Mask | np.ndarray") -> "Mask": ...
    @typing.overload
    def __and__(self, other: "tuple[Mask, ...]") -> "PerHead": ...
    def __and__(self, other: Any) -> Any:
        return _combined(And, self, other)

    def __rand__(self, other: Any) -> Any:
        return _combined(And, other, self)

    @typing.overload
    def __or__(self, other: "Mask | np.ndarray") -> "Mask": ...
    @typing.overload
    def __or__(self, other: "tuple[Mask, ...]") -> "PerHead": ...
    def __or__(self, other: Any) -> Any:
        return _combined(Or, self, other)

    def __ror__(self, other: Any) -> Any:
        return _combined(Or, other, self)

    def __invert__(self) -> "Mask":
        return self.mask if isinstance(self, Not) else Not(self)

    def _period(self) -> int:
        """Estimates the tokens after which the pattern repeats, for pictures: the largest number in its formula."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields.pop("seed", None)
        inner = [value._period() for value in fields.values() if isinstance(value, Mask)]
        numbers = [value for value in fields.values() if isinstance(value, int) and value < pictures.LONGEST]
        return max([8, *inner, *numbers])

    def _picture_lengths(self) -> tuple[int, int]:
        """Returns the queries and keys that show the pattern."""
        length = min(4 * self._period(), pictures.LONGEST)
        return length, length

    def _repr_html_(self) -> str:
        return pictures.as_html(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with &, | and ~, not with 'and', 'or', 'not'")


jax.tree_util.register_static(Mask)


def _checked_rule(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a mask's rule so that its answer is checked, wherever and in whatever mask it is evaluated."""

    @functools.wraps(call)
    def checked_call(self: Mask, q: Any, k: Any) -> Any:
        return evaluate_rule(type(self).__name__, call, self, q, k)

    return checked_call


def _checked_state(block_state: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Wraps a mask's closed form so that it gets int64 arrays, and its states are checked and broadcast."""

    @functools.wraps(block_state)
    def checked_block_state(self: Mask, q0: Any, q1: Any, k0: Any, k1: Any) -> np.ndarray:
        corners = [np.asarray(x, np.int64) for x in (q0, q1, k0, k1)]
        states = np.asarray(block_state(self, *corners))
        if states.dtype.kind not in "iu" or (states.size and not EMPTY <= states.min() <= states.max() <= UNSURE):
            raise TypeError(f"{type(self).__name__}.block_state must return integers 0, 1, 2 or 3, got {states!r}")
        return np.broadcast_to(states.astype(np.int8, copy=False), np.broadcast_shapes(*(x.shape for x in corners)))

    return checked_block_state


def _shown(value: Any) -> str:
    """Returns a field for a mask's repr: arrays by dtype and shape, all others by their repr."""
    if hasattr(value, "dtype") and np.ndim(value):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _operand_mask(operand: Any) -> Mask:
    if isinstance(operand, Mask):
        return operand
    if isinstance(operand, np.ndarray):
        return Array(operand)
    raise TypeError(
        f"unsupported operand: a mask combines with masks, tuples of masks by head and numpy bool arrays [T, S], got "
        f"{type(operand).__name__}; preset makes one of a name; a JAX array is known at run time only, and goes to "
        "block_sparse_attention alone"
    )


def _combined(operator: Callable[[Mask, Mask], Mask], left: Any, right: Any) -> Any:
    """Combines two masks to one, or head by head to `PerHead` if an operand is a tuple of masks by head."""
    if not isinstance(left, tuple) and not isinstance(right, tuple):
        return operator(_operand_mask(left), _operand_mask(right))
    lefts, rights = ([_operand_mask(mask) for mask in (x if isinstance(x, tuple) else (x,))] for x in (left, right))
    if not lefts or not rights:
        raise ValueError("unsupported operand: a tuple of masks by head must not be empty, got ()")
    period = math.lcm(len(lefts), len(rights))
    return PerHead(operator(lefts[h % len(lefts)], rights[h % len(rights)]) for h in range(period))


@jax.tree_util.register_static
class PerHead(tuple[Mask, ...]):
    """Masks by head: a tuple that combines head by head with ``&``, ``|`` and ``~``.

    Head h takes entry h % len. Equality and hash are those of the tuple. The length of a combination is the least
    common multiple of the operands' lengths.

    Example:
      >>> import sparse_layers as sl
      >>> (sl.preset("fixed", local_attn_ctx=4, num_verts=2, blocksize=1) | sl.Global(2))[1]
      (Causal() & (BlockDiagonal(size=4) | Columns(period=4, start=2, stop=3))) | Global(size=2)
    """

    __array_ufunc__ = None  # numpy leaves ``array & masks`` to the masks

    def __and__(self, other: Any) -> "PerHead":
        return _combined(And, self, other)

    def __rand__(self, other: Any) -> "PerHead":
        return _combined(And, other, self)

    def __or__(self, other: Any) -> "PerHead":
        return _combined(Or, self, other)

    def __ror__(self, other: Any) -> "PerHead":
        return _combined(Or, other, self)

    def __invert__(self) -> "PerHead":
        return PerHead(~mask for mask in self)

    T = property(lambda self: PerHead(mask.T for mask in self), doc="The transpose of each mask.")


# --- the algebra -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Both masks allow the pair: ``left & right``."""

    left: Mask
    right: Mask

    def __post_init__(self):
        check_masks(self, "left", "right")

    def __call__(self, q, k):
        return self.left(q, k) & self.right(q, k)

    def block_state(self, q0, q1, k0, k1):
        return AND_TABLE[self.left.block_state(q0, q1, k0, k1), self.right.block_state(q0, q1, k0, k1)]

    def __repr__(self):
        return f"{_operand(self.left, And)} & {_operand(self.right, And)}"


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """At least one of the masks allows the pair: ``left | right``."""

    left: Mask
    right: Mask

    def __post_init__(self):
        check_masks(self, "left", "right")

    def __call__(self, q, k):
        return self.left(q, k) | self.right(q, k)

    def block_state(self, q0, q1, k0, k1):
        return OR_TABLE[self.left.block_state(q0, q1, k0, k1), self.right.block_state(q0, q1, k0, k1)]

    def __repr__(self):
        return f"{_operand(self.left, Or)} | {_operand(self.right, Or)}"


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """The mask does not allow the pair: ``~mask``."""

    mask: Mask

    def __post_init__(self):
        check_masks(self, "mask")

    def __call__(self, q, k):
        # `== False` and not `~`: on a Python bool `~` is arithmetic.
        return self.mask(q, k) == False  # noqa: E712

    def block_state(self, q0, q1, k0, k1):
        return NOT_TABLE[self.mask.block_state(q0, q1, k0, k1)]

    def __repr__(self):
        return f"~{_operand(self.mask, Not)}"


def _operand(mask: Mask, parent: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, And | Or) and not isinstance(mask, parent) else repr(mask)


@dataclasses.dataclass(frozen=True)
class Transposed(Mask):
    """Queries and keys exchange their roles, ``mask.T``: global columns become global rows."""

    mask: Mask

    def __post_init__(self):
        check_masks(self, "mask")

    def __call__(self, q, k):
        return self.mask(k, q)

    def block_state(self, q0, q1, k0, k1):
        return self.mask.block_state(k0, k1, q0, q1)

    def __repr__(self):
        return f"{_operand(self.mask, Not)}.T"


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Blocks(Mask):
    """``mask(q // block, k // block)``: the mask decides for whole blocks of ``block`` tokens.

    Args:
      mask: says which block of queries sees which block of keys.
      block: block size in tokens, or a pair (queries in a block, keys in a block).

    Raises:
      ValueError: block is neither a positive integer nor a pair of them.
      TypeError: mask is not a mask.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Blocks(sl.Causal(), block=2), 6))
      ■ ■ · · · ·
      ■ ■ · · · ·
      ■ ■ ■ ■ · ·
      ■ ■ ■ ■ · ·
      ■ ■ ■ ■ ■ ■
      ■ ■ ■ ■ ■ ■
      >>> print(sl.picture(sl.Blocks(sl.Causal(), block=(1, 3)), 3, 9))
      ■ ■ ■ · · · · · ·
      ■ ■ ■ ■ ■ ■ · · ·
      ■ ■ ■ ■ ■ ■ ■ ■ ■
    """

    mask: Mask
    block: int | tuple[int, int]

    def __post_init__(self):
        check_masks(self, "mask")
        sizes = self.block if isinstance(self.block, tuple) else (self.block,)
        numbers = [as_int(size) for size in sizes]
        if not 1 <= len(numbers) <= 2 or any(number is None or number < 1 for number in numbers):
            raise ValueError(f"Blocks: block must be an integer >= 1 or a pair of these, got {self.block!r}")
        q_block, kv_block = (min(number, BEYOND) for number in (numbers * 2)[:2] if number is not None)
        # One number for equal sizes, so that equal masks have equal fields.
        object.__setattr__(self, "block", q_block if q_block == kv_block else (q_block, kv_block))

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of queries and of keys in a block."""
        return self.block if isinstance(self.block, tuple) else (self.block, self.block)

    def __call__(self, q, k):
        q_block, kv_block = self.sizes
        return self.mask(q // q_block, k // kv_block)

    def block_state(self, q0, q1, k0, k1):
        q_block, kv_block = self.sizes
        return self.mask.block_state(q0 // q_block, q1 // q_block, k0 // kv_block, k1 // kv_block)

    def _period(self) -> int:
        return max(self.sizes) * self.mask._period()


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Shifted(Mask):
    """``mask(q + by, k + by)``: the mask moves along the diagonal, toward the first token.

    Args:
      mask: the mask to move.
      by: distance in tokens, >= 0.

    Raises:
      ValueError: by is negative, above 2**30 or not an integer.
      TypeError: mask is not a mask.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Shifted(sl.BlockDiagonal(3), by=1), 6))
      ■ ■ · · · ·
      ■ ■ · · · ·
      · · ■ ■ ■ ·
      · · ■ ■ ■ ·
      · · ■ ■ ■ ·
      · · · · · ■
    """

    mask: Mask
    by: int

    def __post_init__(self):
        check_masks(self, "mask")
        set_integers(self, "by", minimum=0, maximum=FARTHEST)  # q + by is computed in int32

    def __call__(self, q, k):
        return self.mask(q + self.by, k + self.by)

    def block_state(self, q0, q1, k0, k1):
        return self.mask.block_state(*(x + self.by for x in (q0, q1, k0, k1)))


def shifted(mask: Mask, by: int) -> Mask:
    """Returns `Shifted`, or the mask itself for a shift of 0, which keeps the masks of plans small."""
    return Shifted(mask, by) if by else mask


@dataclasses.dataclass(frozen=True, eq=False)
class Array(Mask):
    """A bool array [q_len, kv_len] allows pairs, none outside of it. Equal contents make equal masks.

    Args:
      array: bool, 2-dimensional.

    Raises:
      ValueError: not a 2-dimensional bool array.
      TypeError: a traced JAX array, whose values are not known yet.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> print(sl.picture(sl.Array(np.eye(3, dtype=bool)) | sl.Prefix(1), 3))
      ■ · ·
      ■ ■ ·
      ■ · ■
    """

    array: np.ndarray

    def __post_init__(self):
        try:
            array = np.asarray(self.array)
        except jax.errors.TracerArrayConversionError as error:
            raise TypeError(
                "mask: the values of a traced array are known at run time only: give it to block_sparse_attention "
                f"alone, as it is, got {self.array!r}"
            ) from error
        if array.ndim != 2 or array.dtype != np.bool_:
            raise ValueError(f"Array: must be a 2-dimensional bool array, got {array.dtype} of shape {array.shape}")
        array = array.copy()
        array.flags.writeable = False
        object.__setattr__(self, "array", array)

    def __reduce__(self):  # copies and unpickled arrays are read-only again
        return Array, (self.array,)

    def _picture_lengths(self) -> tuple[int, int]:
        return self.array.shape

    @functools.cached_property
    def _digest(self) -> tuple[tuple[int, ...], bytes]:
        return self.array.shape, hashlib.sha256(np.packbits(self.array).tobytes()).digest()

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        """Summed-area table: four look-ups give the number of True in any rectangle."""
        rows, columns = self.array.shape
        dtype = np.int32 if self.array.size < 2**31 else np.int64
        counts = np.zeros((rows + 1, columns + 1), dtype)
        np.cumsum(np.cumsum(self.array, axis=0, dtype=dtype), axis=1, out=counts[1:, 1:])
        return counts

    @property
    def computable(self) -> bool:
        return False

    def __eq__(self, other):
        return isinstance(other, Array) and self._digest == other._digest

    def __hash__(self):
        return hash(self._digest)

    def __call__(self, q, k):
        q, k = np.asarray(q), np.asarray(k)
        inside = (q >= 0) & (q < self.array.shape[0]) & (k >= 0) & (k < self.array.shape[1])
        return inside & self.array[np.where(inside, q, 0), np.where(inside, k, 0)] if self.array.size else inside

    def block_state(self, q0, q1, k0, k1):
        rows, columns = self.array.shape
        a0, a1 = np.minimum(q0, rows), np.minimum(q1 + 1, rows)
        b0, b1 = np.minimum(k0, columns), np.minimum(k1 + 1, columns)
        c = self._counts
        count = c[a1, b1] - c[a0, b1] - c[a1, b0] + c[a0, b0]
        return to_state(count > 0, count == (q1 - q0 + 1) * (k1 - k0 + 1))
