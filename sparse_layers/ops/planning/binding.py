"""Binding: masks are values without lengths, and plans need both. Masks are checked against the lengths of a call."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arguments.checks import Length, Positive, checked
from ...masks.adapters import as_masks
from ...masks.algebra import Mask
from ...masks.lengths import check_lengths


@dataclasses.dataclass(frozen=True)
class HeadMasks:
    """Masks bound to heads and lengths by `bind`, as `process_mask` compiles them."""

    masks: tuple[Mask, ...]  # head h uses entry h % len(masks)
    shape: tuple[int, int, int]  # (H, Q, K)

    def __getitem__(self, index: tuple[int, slice, slice]) -> np.ndarray:
        """Returns the bool array [q, k] of one head, a slice of queries and a slice of keys."""
        head, q, k = index
        q, k = (np.arange(*s.indices(size)) for s, size in zip((q, k), self.shape[1:], strict=True))
        allowed = np.asarray(self.masks[head % len(self.masks)](q[:, None], k[None, :]), bool)
        return np.broadcast_to(allowed, (q.size, k.size))


def masks_for_lengths(mask: Any, q_len: int, kv_len: int | None = None, name: str | None = None) -> tuple[Mask, ...]:
    """Returns `as_masks` of a pattern, after a check that each mask covers these lengths.

    ``kv_len`` is None for a layer of one sequence, whose errors call both lengths seq_len. ``name`` is that of the
    argument in errors; None for "mask".
    """
    rule = f"seq_len={q_len} (queries, keys)" if kv_len is None else f"(q_len, kv_len) = {(q_len, kv_len)}"
    kv_len = q_len if kv_len is None else kv_len
    try:
        for entry in mask if isinstance(mask, Sequence) else [mask]:
            shape = None if isinstance(entry, Mask) else getattr(entry, "shape", None)
            if isinstance(shape, tuple) and tuple(shape[-2:]) != (q_len, kv_len):
                raise ValueError(f"mask: its last two axes must be {rule}, got {tuple(shape)}")
        masks = as_masks(mask)
        for entry in masks:
            check_lengths(entry, q_len, kv_len)
    except (ValueError, TypeError) as error:
        if name is None:
            raise
        text = str(error)
        names_mask = text.startswith(("mask must", "mask: "))
        raise type(error)(f"{name}{text.removeprefix('mask')}" if names_mask else f"{name}: {text}") from error
    return masks


def bind(mask: Any, heads: int, q_len: int, kv_len: int) -> HeadMasks:
    """Binds a mask, or masks that the heads take in turn, to a number of heads and to lengths.

    Args:
      mask: whatever `as_masks` takes.
      heads: H, number of query heads.
      q_len: Q, number of queries.
      kv_len: K, number of keys.

    Raises:
      ValueError: heads or a length is no integer >= 1, an array's shape differs from the lengths, or there are more
        masks than heads.
      TypeError: mask describes no mask.

    Example:
      >>> import sparse_layers as sl
      >>> info, function = sl.process_mask(sl.bind(sl.Causal() & sl.Window(1), 4, 8, 8), (2, 2))
      >>> info.block_mask[0].tolist(), info.data_next[0].tolist()
      ([[1, 0], [1, 1], [1, 1], [1, 1]], [[0, 0], [0, 1], [1, 2], [2, 3]])
    """
    heads = checked("bind: heads", heads, Positive)
    q_len, kv_len = checked("bind: q_len", q_len, Length), checked("bind: kv_len", kv_len, Length)
    masks = masks_for_lengths(mask, q_len, kv_len)
    if len(masks) > heads:
        raise ValueError(f"bind: there must be at most one mask a head, got {len(masks)} masks for heads={heads}")
    return HeadMasks(masks, (heads, q_len, kv_len))
