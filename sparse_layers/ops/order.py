"""Order ids and segment ids from lengths of documents and prefixes, spans and blocks, in O(T)."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..arguments.checks import Length, Positive, checked, strict_kwargs
from ..arguments.foreign import BOOL_IDS
from .kernels.validation import checked_numbers, float_hint
from .planning.block_lists import differs
from .planning.selection import concrete_value

Integers: TypeAlias = ArrayLike | Sequence[Any]


@strict_kwargs
def segment_ids_from_lengths(lengths: Integers, num_tokens: int) -> jax.Array:
    """Returns the segment ids of documents that are packed one behind the other.

    Args:
      lengths: integers [..., D] >= 0, the tokens of each document. 0 is a document without tokens.
      num_tokens: T, an integer and not an array: the documents and the padding behind them.

    Returns:
      int32 [..., T]: the index of a token's document in ``lengths``, and -1 for padding.

    Raises:
      ValueError: lengths are no integers, or have no axis of documents; num_tokens is no integer >= 1. Outside jit
        also: a length is negative, or their sum exceeds num_tokens. Inside jit, negative lengths count as 0, and
        documents are cut at num_tokens.

    Example:
      >>> import sparse_layers as sl
      >>> sl.segment_ids_from_lengths([[3, 2], [1, 5]], 6).tolist()
      [[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 1, 1]]

    References:
      Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination" (arXiv 2107.02027).
    """
    tokens = checked("num_tokens", num_tokens, Length)
    rule = "integers of shape [..., D], one for each document"
    document_lengths = _checked_integers("lengths", lengths, (..., None), rule)
    values = concrete_value(document_lengths)
    if values is not None and values.size:
        if values.min() < 0:
            raise ValueError(f"lengths must be >= 0, got {values.min()}; padding has no length: leave it out")
        if (longest := values.sum(-1).max()) > tokens:
            raise ValueError(
                f"lengths must sum to at most num_tokens = {tokens}, got {longest}; of cumulative lengths, write "
                "jnp.diff(cu_seqlens)"
            )

    def ids_of_row(ends):
        return jnp.cumsum(jnp.zeros(tokens, jnp.int32).at[ends].add(1, mode="drop"))

    def add(x, y):  # at most `tokens`, and no sum beyond int32
        return jnp.minimum(x, tokens - y) + y

    ends = jax.lax.associative_scan(add, _clipped(document_lengths, tokens), axis=-1)
    ids = jnp.vectorize(ids_of_row, signature="(d)->(t)")(ends)
    return jnp.where(ids < document_lengths.shape[-1], ids, -1)  # all documents end before padding


@strict_kwargs
def prefix_order(prefix_lengths: Integers, num_tokens: int, segment_ids: Integers | None = None) -> jax.Array:
    """Returns the order ids of prefix LMs: a prefix sees itself whole, and what follows is causal.

    ``order[t] = max(t, p - 1)`` for a prefix of p tokens: key k is visible to query q if ``order[k] <= order[q]``.

    Args:
      prefix_lengths: integers [...], the tokens p of each row's prefix, clipped to 0..T; 0 and 1 are causal. With
        segment_ids, [..., D]: one for each document, counted from its first token.
      num_tokens: T, an integer and not an array.
      segment_ids: integers [..., T] of packed documents, or None. Entry n of prefix_lengths is that of the n-th run of
        equal ids >= 0. Entries beyond the last run have no effect: those of documents without tokens must come last.
        Negative ids are padding.

    Returns:
      int32 [..., T], from 0 to T - 1.

    Raises:
      ValueError: prefix_lengths or segment_ids are no integers, or do not have these shapes; num_tokens is no integer
        >= 1. Outside jit also: a row has more documents than D. Inside jit, documents without an entry are causal.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> sl.prefix_order([3, 0], 6).tolist()
      [[2, 2, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
      >>> order = np.asarray(sl.prefix_order(3, 5))
      >>> print(sl.picture(order[None] <= order[:, None], 5))
      ■ ■ ■ · ·
      ■ ■ ■ · ·
      ■ ■ ■ · ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■
      >>> documents = sl.segment_ids_from_lengths([3, 4], 8)
      >>> sl.prefix_order([2, 3], 8, documents).tolist()
      [1, 1, 2, 5, 5, 5, 6, 7]

    References:
      Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
      (arXiv 1910.10683), section 3.2.1.
    """
    tokens = checked("num_tokens", num_tokens, Length)
    position = jnp.arange(tokens, dtype=jnp.int32)
    if segment_ids is None:
        of_bools = "; of bools that are True in the prefix, write prefix_lengths.sum(-1)"
        prefix = _checked_integers("prefix_lengths", prefix_lengths, (...,), "integers, one for each row", of_bools)
        return jnp.maximum(position, _clipped(prefix, tokens)[..., None] - 1)
    rule = f"integers of shape [..., {tokens}]"
    ids = _checked_integers("segment_ids", segment_ids, (..., tokens), rule, f"; {BOOL_IDS}")
    rows = ids.shape[:-1]
    axes = "".join(f"{n}, " for n in rows)
    rule = f"integers of shape [{axes}D], one for each document of segment_ids, or [{axes}1] for one in each row"
    prefix = _checked_integers("prefix_lengths", prefix_lengths, (*rows, None), rule)
    begins = differs(ids)
    document = jnp.cumsum(begins & (ids >= 0), axis=-1, dtype=jnp.int32) - 1
    documents, values = prefix.shape[-1], concrete_value(document)
    if values is not None and values.size and (last := values.max()) >= documents:
        raise ValueError(
            f"prefix_lengths must have one entry for each document, got {documents} in a row with {last + 1} documents "
            "of segment_ids; write 0 for a document without a prefix"
        )
    prefix = jnp.pad(_clipped(prefix, tokens), [(0, 0)] * len(rows) + [(0, 1)])  # an entry for tokens without any
    has_prefix = (ids >= 0) & (document < documents)
    prefix = jnp.take_along_axis(prefix, jnp.where(has_prefix, document, documents), axis=-1)
    begin = jax.lax.cummax(jnp.where(begins, position, 0), axis=len(rows))
    return jnp.maximum(position, begin + jnp.minimum(prefix, tokens - begin) - 1)


@strict_kwargs
def span_order(spans: Integers) -> jax.Array:
    """Returns the order ids of causal text with spans that see themselves whole, such as images.

    The order of a token is the last position of its span, and its own position outside of spans: key k is visible to
    query q if ``order[k] <= order[q]``.

    Args:
      spans: bools [..., T], each run of True a span; or integers [..., T], each run of one id > 0 a span, so that
        spans may touch.

    Returns:
      int32 [..., T], from 0 to T - 1.

    Raises:
      ValueError: spans are neither bools nor integers, or have no axis of tokens.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> sl.span_order([0, 1, 1, 2, 2, 0]).tolist()
      [0, 2, 2, 4, 4, 5]
      >>> order = np.asarray(sl.span_order([False, True, True, True, False]))
      >>> print(sl.picture(order[None] <= order[:, None], 5))
      ■ · · · ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■

    References:
      Zhou et al. 2024, "Transfusion: Predict the Next Token and Diffuse Images with One Multi-Modal Model"
      (arXiv 2408.11039).
    """
    ids = _checked_integers("spans", spans, (..., None), "bools or integers of shape [..., T]", kinds=(np.bool_,))
    position = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    ends = differs(ids[..., ::-1])[..., ::-1]
    # The next position that ends a span, or lies outside of spans.
    return jax.lax.cummin(jnp.where(ends | (ids <= 0), position, position.size), axis=ids.ndim - 1, reverse=True)


@strict_kwargs
def block_order(block: int, num_tokens: int) -> jax.Array:
    """Returns the order ids of block-causal attention: a block sees itself whole, and all blocks before it.

    ``order[t] = t // block``: key k is visible to query q if ``order[k] <= order[q]``.

    Args:
      block: tokens in a block, an integer and not an array. The last block may be shorter.
      num_tokens: T, an integer and not an array.

    Returns:
      int32 [T].

    Raises:
      ValueError: a number is no integer >= 1.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> order = np.asarray(sl.block_order(2, 5))
      >>> order.tolist()
      [0, 0, 1, 1, 2]
      >>> print(sl.picture(order[None] <= order[:, None], 5))
      ■ ■ · · ·
      ■ ■ · · ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ·
      ■ ■ ■ ■ ■

    References:
      Arriola et al. 2025, "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models"
      (arXiv 2503.09573).
    """
    block, tokens = checked("block", block, Positive), checked("num_tokens", num_tokens, Length)
    return jnp.arange(tokens, dtype=jnp.int32) // min(block, tokens)


def _checked_integers(name: str, x: Any, shape: Any, rule: str, of_bools: str = "", kinds: tuple[Any, ...] = ()) -> Any:
    """Returns `checked_numbers` that are integers, or of one of ``kinds``; floats and bools have hints."""
    dtype = getattr(x, "dtype", None)
    hint = of_bools if dtype == np.dtype(bool) else float_hint(name, dtype)
    return checked_numbers(name, x, shape, (jnp.integer, *kinds), rule, hint)


def _clipped(x: Any, most: int) -> jax.Array:
    """Returns integers of any dtype as int32 from 0 to ``most``."""
    x = x if np.can_cast(x.dtype, np.int32) else x.clip(0, most)  # small dtypes may not hold `most`
    return jnp.clip(jnp.asarray(x, jnp.int32), 0, most)
