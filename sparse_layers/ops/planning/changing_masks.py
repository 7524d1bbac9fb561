"""Warns of masks that change from call to call: each table, a mask without a computable rule, compiles anew."""

import warnings

from ...masks.algebra import Mask

# Different tables planned one after the other before the hint: more than the layers of most models have.
MAX_TABLES = 64

_recent: dict[int, None] = {}  # hashes of tables, since one of them was last asked for again; the latest at the end


def note_masks(masks: tuple[Mask, ...]) -> None:
    """Warns once if more than `MAX_TABLES` masks without a computable rule are planned, and none is planned again."""
    if len(_recent) > MAX_TABLES or all(mask.computable for mask in masks):
        return
    number = hash(masks)
    if number == next(reversed(_recent), None):  # layers share it
        return
    if number in _recent:  # a model runs again: masks do not change from call to call
        _recent.clear()
    _recent[number] = None
    if len(_recent) > MAX_TABLES:
        warnings.warn(
            f"the last {MAX_TABLES} masks were different numpy arrays, or functions without traceable=True, and each "
            "was planned and compiled anew: a mask that changes from call to call is better a JAX array, which is "
            "known at run time only, as in block_sparse_attention(q, k, v, jnp.asarray(mask)); a mask_mod is better "
            "made once, outside of what is called again and again",
            stacklevel=4,
        )
