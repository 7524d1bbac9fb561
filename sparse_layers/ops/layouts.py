"""Warnings about arrays that the op accepts, but whose axes seem to have another order; each once a process.

An array is read in one order only. That another one was meant is a guess, so it is no error.
"""

import warnings
from collections.abc import Sequence

from ..arguments.foreign import BY_ENTRY
from ..masks.adapters import by_entry
from ..masks.algebra import Mask

# Prompts and tests may have fewer tokens than heads. With one token, only more heads than any model has are a sign.
_FEW_HEADS, _MAX_HEADS = 16, 128
_warned: set[str] = set()


def warn_of_heads(name: str, query: Sequence[int], keys: Sequence[int], length: int | None = None) -> None:
    """Warns if heads outnumber tokens: arrays probably are [B, N, T, H], or [B, T, F] without heads.

    ``keys`` is (length, heads) of key and value. ``length`` is what a function was made for; None for any number.
    """
    tokens, heads, _ = query[-3:]
    few = _FEW_HEADS if tokens > 1 and (length is None or heads == length) else _MAX_HEADS
    if keys[1] <= max(tokens, keys[0], few):
        return
    shape = tuple(query)
    if len(shape) == 3:
        order = f"[T, N, H], T = {tokens} tokens and N = {heads} heads, without a batch"
        split = f"x.reshape({tokens}, {heads}, N, {query[-1]} // N)"
        cure = f"If axes are [B, T, F], split the features into heads, {split}. If [N, T, H], write x.swapaxes(0, 1)"
    else:
        order = f"[B, T, N, H], T = {tokens} tokens and N = {heads} heads"
        cure = "If axes are [B, N, T, H], as in PyTorch, write x.swapaxes(1, 2)"
    _warn("heads", f"{name} reads query of shape {shape} as {order}. {cure}, for query, key and value.", 5)


def warn_of_mask(shape: Sequence[int], batch: int, heads: int) -> None:
    """Warns if the leading axis of a mask [N, T, S] is as long as the batch, too."""
    if len(shape) == 3 and shape[0] == batch == heads > 1:
        _warn(
            "mask",
            f"block_sparse_attention reads mask of shape {tuple(shape)} as [N, T, S], one for each of {heads} heads, "
            f"but there are as many batch entries. If it differs by batch entry, write {BY_ENTRY}.",
            6,
        )


def warn_of_entries(masks: Sequence[Mask], batch: int) -> None:
    """Warns if a pattern of arrays, which heads take in turn, has as many arrays as the batch has entries."""
    if len(masks) == batch and by_entry(masks):
        _warn(
            "mask",
            f"A pattern of {batch} arrays is read by heads, head h takes entry h % {batch}, but there are as many "
            f"batch entries. If it differs by batch entry, write {BY_ENTRY}.",
            6,
        )


def warn_of_batch(name: str, shape: Sequence[int], length: int) -> None:
    """Warns if inputs [B, T, F] have as many sequences as the layer takes tokens, and fewer tokens."""
    if len(shape) == 3 and shape[1] < shape[0] == length > _FEW_HEADS:
        _warn(
            "batch",
            f"{name} are read as {shape[0]} sequences of {shape[1]} tokens, shape {tuple(shape)}, by a layer that is "
            f"made for {length} tokens. If axes are [T, B, F], as in PyTorch without batch_first, write "
            "x.swapaxes(0, 1).",
            6,
        )


def _warn(kind: str, message: str, stacklevel: int) -> None:
    if kind not in _warned:
        _warned.add(kind)
        beginning = " ".join(message.split()[:3])
        silence = f"If the axes are right, warnings.filterwarnings('ignore', '{beginning}') silences this."
        warnings.warn(f"{message} {silence}", stacklevel=stacklevel)
