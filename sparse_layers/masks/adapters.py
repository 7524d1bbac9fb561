"""Masks from outside: bool arrays, FlexAttention's ``mask_mod``s, and the mask objects of other libraries."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .algebra import Array, Mask


@dataclasses.dataclass(frozen=True)
class MaskMod(Mask):
    """A FlexAttention style ``mask_mod(b, h, q, k)`` for one head. It must not depend on the batch: b is always 0.

    Args:
      function: takes (b, h, q, k); b and h are integers, q and k integer arrays that broadcast. Returns bools.
      head: the value of h.
      traceable: promise that the function uses operators only, so that it may be traced into a kernel. Otherwise it
        is evaluated with numpy at plan time, block by block, and kernels read its tiles from a table. Plans are kept
        by function: one that answers differently later (a closure over what changes) is not asked again.

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
    head: int = 0
    traceable: bool = False

    @property
    def computable(self) -> bool:
        return self.traceable

    def __call__(self, q, k):
        # A function that ignores q or k answers in a smaller shape.
        return (q == q) & (k == k) & self.function(0, self.head, q, k)


def from_mask_mod(
    mask_mod: Callable[[Any, Any, Any, Any], Any], *, heads: int | None = None, traceable: bool = False
) -> Mask | tuple[Mask, ...]:
    """A mask, or a tuple with one mask a head, from a FlexAttention style ``mask_mod(b, h, q, k)``.

    Args:
      mask_mod: must not depend on b (documents and padding are ``segment_ids``, not masks).
      heads: number of heads if the function depends on h; None if it does not.
      traceable: see `MaskMod`.

    Returns:
      One `MaskMod`, or a tuple of ``heads`` of them.

    Raises:
      ValueError: heads is less than 1.

    Example:
      >>> import sparse_layers as sl
      >>> sl.from_mask_mod(lambda b, h, q, k: q - k <= h, heads=2)[1](5, 4)
      True
    """
    if heads is None:
        return MaskMod(mask_mod, 0, traceable)
    if heads < 1:
        raise ValueError(f"from_mask_mod: heads must be None or >= 1, got {heads}")
    return tuple(MaskMod(mask_mod, head, traceable) for head in range(heads))


def as_masks(mask: Any) -> tuple[Mask, ...]:
    """The masks that the heads take in turn, from whatever describes them.

    Args:
      mask: a `Mask`; a sequence of masks (head h takes entry h % len); a numpy bool array [T, S] or [H, T, S]; or any
        object with ``.shape`` (2 or 3 long) and slicing, such as JAX splash attention's masks.

    Returns:
      A tuple of masks; of length 1 when all heads share one.

    Raises:
      TypeError: none of these.
      ValueError: an array that is not bool or not 2- or 3-dimensional, or an empty sequence.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> sl.as_masks(sl.Causal())
      (Causal(),)
      >>> len(sl.as_masks(np.ones((4, 8, 8), bool)))
      1
    """
    if isinstance(mask, Mask):
        return (mask,)
    bound = getattr(mask, "masks", None)  # masks of this package bound to lengths: what they were before
    if isinstance(bound, tuple) and all(isinstance(entry, Mask) for entry in bound):
        return as_masks(bound)
    if isinstance(mask, Sequence) and not isinstance(mask, str):
        if not mask:
            raise ValueError("mask: a sequence of masks must not be empty")
        masks = tuple(m for entry in mask for m in as_masks(entry))
        return masks[:1] if len(set(masks)) == 1 else masks
    shape = getattr(mask, "shape", None)
    if shape is None or not hasattr(mask, "__getitem__"):
        raise TypeError(
            "mask must be a Mask, a sequence of masks, a bool array [T, S] or [H, T, S], or an object with .shape and "
            f"slicing; got {type(mask).__name__}: {mask!r}"
        )
    if len(shape) == 2:
        return (Array(np.asarray(mask[:, :])),)  # pyright: ignore
    if len(shape) == 3:
        return as_masks([Array(np.asarray(mask[h, :, :])) for h in range(shape[0])])  # pyright: ignore
    raise ValueError(f"mask: an array must have shape [T, S] or [H, T, S], got {tuple(shape)}")
