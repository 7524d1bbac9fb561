"""Masks made of bool arrays, of FlexAttention's ``mask_mod``s, and of mask objects of other libraries."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax.tree_util
import numpy as np

from ..arguments.checks import Positive, checked, strict_kwargs
from ..arguments.foreign import BY_ENTRY, one_line, scorer_hint
from .algebra import Array, Mask, PerHead, evaluate_rule, set_integers
from .graphs import from_slices
from .presets import preset


class _Withheld:
    """An argument that a mask_mod must not use: any use raises an error that says why."""

    def __init__(self, why: str):
        self.why = why

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(self.why)

    __getattr__ = _refuse


# All operations on numbers and sequences are refused. Passing the argument to another function is none of them.
_ALLOWED = {"__class_getitem__", "__doc__", "__getattribute__", "__init__", "__new__", "__repr__"}
for _name in ({*vars(int), *vars(list), "__array__", "__call__"}) - _ALLOWED:
    setattr(_Withheld, _name, _Withheld._refuse)
# A pytree without leaves passes through jax.jit and jax.vmap, which may wrap a mask_mod.
jax.tree_util.register_pytree_node(_Withheld, lambda x: ((), x.why), lambda why, _: _Withheld(why))


class Sliceable(Protocol):
    """An array [T, S] or [H, T, S], or an object that slices like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Returns the slice of each axis, as bools."""
        ...


# All types that functions take as a mask: see `as_masks`.
MaskLike: TypeAlias = Mask | str | Sliceable | Sequence[Mask | str | Sliceable]


@dataclasses.dataclass(frozen=True)
class MaskMod(Mask):
    """A FlexAttention ``mask_mod(b, h, q, k)`` decides for one head. It must not use b: a mask knows no batch.

    It is called once when the mask is made, at position 0, so that errors show at once.

    Args:
      function: takes (b, h, q, k): h an integer, q and k integer arrays that broadcast. Returns bools. It is never
        called beyond the lengths, so it may look up tables as long as the sequence. Shorter numpy tables are refused;
        JAX arrays repeat their last entry beyond their end. Any use of b raises.
      head: the value of h; None for a function that does not use h.
      traceable: True promises that the function uses operators only, so that kernels may trace it. Otherwise numpy
        evaluates it at plan time, block by block, and kernels read its tiles from a table. Plans are cached by
        function: one that answers differently later (a closure over changing values) is not called again.

    Raises:
      ValueError: the function uses b, or h without a head; head is negative; traceable is not a bool; later, at plan
        time, a numpy table that ends before the sequence.
      TypeError: function does not take (b, h, q, k), does not return bools, or branches by ``and``, ``or``, ``if``.

    Example:
      >>> import sparse_layers as sl
      >>> mask = sl.MaskMod(lambda b, h, q, k: (q >= k) & (q - k < 2))
      >>> print(sl.picture(mask, 4))
      ■ · · ·
      ■ ■ · ·
      · ■ ■ ·
      · · ■ ■
    """

    function: Callable[[Any, Any, Any, Any], Any]
    head: int | None = None
    traceable: bool = False

    def __post_init__(self):
        if not callable(self.function):
            raise TypeError(f"MaskMod: function must be a mask_mod(b, h, q, k), got {self.function!r}")
        try:
            inspect.signature(self.function).bind(0, 0, 0, 0)
        except TypeError as error:
            raise TypeError(
                f"MaskMod: function must take (b, h, q, k), got {self._name}{inspect.signature(self.function)}"
            ) from error
        except ValueError:  # some functions written in C have no signature
            pass
        set_integers(self, "head", minimum=0, optional=True)
        checked("MaskMod: traceable", self.traceable, bool)
        self(np.zeros((2, 1), np.int64), np.zeros((1, 3), np.int64))

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    @property
    def computable(self) -> bool:
        return self.traceable

    def __call__(self, q, k):
        what = f"mask_mod {self._name}"
        batch = _Withheld(
            f"{what} uses b, but a mask is the same for the whole batch: documents and padding are segment_ids of "
            "block_sparse_attention, any other mask that differs by entry is a JAX bool array, known at run time only, "
            "under jax.vmap"
        )
        head = self.head
        if head is None:
            head = _Withheld(
                f"{what} uses h, so it needs to know the heads: from_mask_mod(mask_mod, heads=number of query heads)"
            )
        # A function that ignores q or k answers in a smaller shape.
        return (q == q) & (k == k) & evaluate_rule(what, self.function, batch, head, q, k)


@strict_kwargs
def from_mask_mod(
    mask_mod: Callable[[Any, Any, Any, Any], Any], *, heads: int | None = None, traceable: bool = False
) -> Mask | PerHead:
    """Makes a mask, or a tuple with one mask for each head, from a FlexAttention ``mask_mod(b, h, q, k)``.

    Args:
      mask_mod: must not use b (documents and padding are ``segment_ids``, not masks). It may look up tables that are as
        long as the sequence.
      heads: number of query heads if the function uses h; None if it does not.
      traceable: see `MaskMod`.

    Returns:
      One `MaskMod`, or a tuple of ``heads`` of them.

    Raises:
      ValueError: heads is not an integer >= 1, or the function uses b, or h where heads is None.
      TypeError: mask_mod is not a function of (b, h, q, k) that returns bools.

    Example:
      >>> import sparse_layers as sl
      >>> sl.from_mask_mod(lambda b, h, q, k: q - k <= h, heads=2)[1](5, 4)
      True
      >>> sl.from_mask_mod(lambda b, h, q, k: q >= k + b)
      Traceback (most recent call last):
      ValueError: mask_mod <lambda> uses b, but a mask is the same for the whole batch: documents and padding are ...
    """
    if heads is None:
        return MaskMod(mask_mod, None, traceable)
    heads = checked("from_mask_mod: heads", heads, Positive)
    return PerHead(MaskMod(mask_mod, head, traceable) for head in range(heads))


def as_masks(mask: Any) -> tuple[Mask, ...]:
    """Returns the masks of the heads, from any argument that functions take as a mask.

    Args:
      mask: a `Mask`; the name of a preset, with options if any (``"sliding_window:window=64"``); a numpy bool array
        [T, S] or [H, T, S]; any object with ``.shape`` (2 or 3 long) and slicing, such as JAX splash attention's masks;
        or a sequence of these (head h takes entry h % len).

    Returns:
      A tuple of masks, of length 1 if all heads share one.

    Raises:
      TypeError: another type, a traced array, or a mask of a user's class with a field that cannot be hashed.
      ValueError: an unknown name or option, an array that is not bool or not 2- or 3-dimensional, or an empty sequence.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> sl.as_masks(sl.Causal())
      (Causal(),)
      >>> sl.as_masks(["causal", sl.Window(3), "sliding_window:window=4"])
      (Causal(), Window(left=3, right=0), Window(left=3, right=0))
      >>> len(sl.as_masks(np.ones((4, 8, 8), bool)))
      1
    """
    if isinstance(mask, Mask):
        _check_fields(mask)
        return (mask,)
    if isinstance(mask, str):
        return as_masks(preset(mask))
    bound = getattr(mask, "masks", None)  # a mask of this package that was bound to lengths
    if isinstance(bound, tuple) and hasattr(mask, "shape") and all(isinstance(entry, Mask) for entry in bound):
        return as_masks(bound)
    if isinstance(mask, Sequence) and not isinstance(mask, bytes):
        if not mask:
            raise ValueError(f"mask: a sequence of masks must not be empty, got {one_line(mask)}")
        masks = tuple(m for entry in mask for m in as_masks(entry))
        return masks[:1] if len(set(masks)) == 1 else masks
    shape = getattr(mask, "shape", None)
    if isinstance(mask, type) or shape is None or not hasattr(mask, "__getitem__"):
        raise TypeError(
            "mask must be a Mask (from_mask_mod makes one of a function), a preset's name, a numpy bool array [T, S] "
            "or [H, T, S], an object with .shape and slicing, or a sequence of these; "
            f"got {type(mask).__name__}: {one_line(mask)}{_instead(mask)}"
        )
    slices: Any = mask
    if len(shape) == 2:
        return (Array(slices[:, :]) if hasattr(mask, "__array__") else from_slices(slices),)
    if len(shape) == 3 and shape[0]:
        return as_masks([Array(slices[h, :, :]) for h in range(shape[0])])
    raise ValueError(f"mask: an array must have shape [T, S] or [H, T, S], got {tuple(shape)}")


def _instead(value: Any) -> str:
    """Returns the end of an error about a value that is no mask: the mask to write."""
    if value is None:
        return "; if all keys are seen, write sl.Full()"
    if isinstance(value, type) and issubclass(value, Mask):
        fields = any(field.default is field.default_factory for field in dataclasses.fields(value))
        name = f"sl.{value.__name__}" if value.__module__.startswith("sparse_layers.") else value.__name__
        return f"; a class is no mask yet: write {name}({'...' * fields})"
    if type(value).__name__ == "Mixer":  # of the modules, which are not imported here
        return "; a Mixer is the pattern of an NNX SparseTransformerBlock, or one of SparseTransformer(patterns=...)"
    hint = scorer_hint(value)
    return "; of a function f(b, h, q, k), write sl.from_mask_mod(f)" if callable(value) and not hint else hint


def by_entry(masks: Sequence[Mask]) -> str:
    """Returns the end of an error about masks by head, empty unless they are arrays."""
    arrays = len(masks) > 1 and all(isinstance(mask, Array) for mask in masks)
    return f"; masks that differ by batch entry are {BY_ENTRY}" if arrays else ""


def _check_fields(mask: Mask) -> None:
    """Refuses masks whose fields cannot be hashed and compared: equal masks share one plan."""
    kind = type(mask)
    owner = next(cls for cls in kind.__mro__ if "__eq__" in vars(cls))
    generated = owner is not object and not vars(owner)["_writes_eq"]
    for field in dataclasses.fields(mask):
        value = getattr(mask, field.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Mask):
                _check_fields(inner)
        unusable = not isinstance(value, Mask) and field.compare and not _is_hashable(value)
        if unusable and (generated or not _is_hashable(mask)):
            raise TypeError(
                f"{kind.__qualname__}: field {field.name!r} must be hashable, since equal masks share one plan, got "
                f"{type(value).__name__}: keep a tuple and write np.asarray(self.{field.name}) in the rule, or use "
                "sl.Array for a bool array [T, S], or decorate the class with @dataclasses.dataclass(frozen=True, "
                "eq=False), so that a mask equals itself only"
            )
    if kind.__hash__ is None:
        raise TypeError(f"{kind.__qualname__}: a mask must be hashable: write __hash__ beside __eq__, got __eq__ alone")


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
