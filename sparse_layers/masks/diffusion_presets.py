"""Presets of block diffusion: masks that train models which denoise a block of tokens at once.

Their sequences have two parts, and a union of rectangles says which part sees which. The lengths of the parts have no
default: a mask cannot know where the second one begins.
"""

from ..arguments.checks import Positive
from .algebra import Blocks, Mask
from .primitives import BlockDiagonal, Causal
from .rectangles import Rectangle


def block_diffusion(n: Positive, block_size: Positive = 16) -> Mask:
    """A noisy query sees its own noisy block and the clean blocks before it, a clean query its own and earlier ones.

    The sequence is ``concatenate([x_t, x_0])``: n noisy tokens, then the same n tokens clean. With b(x) = x //
    block_size for noisy tokens, and (x - n) // block_size for clean ones: noisy to noisy ``b(q) == b(k)``, noisy to
    clean ``b(k) < b(q)``, clean to clean ``b(k) <= b(q)``. No clean query sees a noisy key. This is
    ``block_diff_mask`` of kuleshov-group/bd3lms.

    Training: the loss is that of the n noisy queries, whose logits at position i predict token i, without a shift. Both
    halves have the same positions, so `Rope` takes ``arange(2 * n) % n``. Sampling denoises one block after another,
    with the clean ones in a cache.

    Args:
      n: tokens in each half, so that the sequence has 2 n.
      block_size: tokens that are denoised at once.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("block_diffusion", n=6, block_size=2), 12))
      ■ ■ · · · · · · · · · ·
      ■ ■ · · · · · · · · · ·
      · · ■ ■ · · ■ ■ · · · ·
      · · ■ ■ · · ■ ■ · · · ·
      · · · · ■ ■ ■ ■ ■ ■ · ·
      · · · · ■ ■ ■ ■ ■ ■ · ·
      · · · · · · ■ ■ · · · ·
      · · · · · · ■ ■ · · · ·
      · · · · · · ■ ■ ■ ■ · ·
      · · · · · · ■ ■ ■ ■ · ·
      · · · · · · ■ ■ ■ ■ ■ ■
      · · · · · · ■ ■ ■ ■ ■ ■

    References:
      Arriola et al. 2025, "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models" (arXiv
      2503.09573).
    """
    return (
        Rectangle(BlockDiagonal(block_size), q_len=n, kv_len=n)
        | Rectangle(Blocks(_EARLIER, block_size), kv_start=n, q_len=n)
        | Rectangle(Blocks(Causal(), block_size), q_start=n, kv_start=n)
    )


def draft_blocks(total_seq_len: Positive, block_size: Positive = 16, stride: Positive = 16) -> Mask:
    """A draft query sees the context before the anchor of its block, and its own draft block (DFlash).

    Queries are draft blocks of block_size tokens. Block j = q // block_size drafts the tokens from its anchor on,
    position ``j * stride`` of the context. Keys are the total_seq_len tokens of the context, then the draft blocks:
    ``k < min(j * stride, total_seq_len)`` or ``(k - total_seq_len) // block_size == j`` with ``k >= total_seq_len``.
    With A anchors there are ``A * block_size`` queries and ``total_seq_len + A * block_size`` keys. This is the mask
    of ``create_anchor_block_mask_mod`` in vllm-project/speculators, whose anchors are drawn at random in each step.

    Anchors that are known at run time only are the op's ``order_ids=``, with the rule order[key] <= order[query]. The
    mask is then ``Prefix(total_seq_len) | Rectangle(BlockDiagonal(block_size), kv_start=total_seq_len)``. A query has
    the position of its anchor as its id, a context key at position p has p + 1, and a draft key has 0.

    Training: token i of block j has position ``j * stride + i``. The first token of a block is its anchor, which is
    known and has no loss. In packed documents, ``segment_ids=`` gives the tokens of a draft block the document of
    their anchor.

    Args:
      total_seq_len: tokens in the context.
      block_size: tokens in a draft block, its anchor included.
      stride: tokens of the context from one anchor to the next.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.preset("draft_blocks", total_seq_len=9, block_size=2, stride=3), 6, 15))
      · · · · · · · · · ■ ■ · · · ·
      · · · · · · · · · ■ ■ · · · ·
      ■ ■ ■ · · · · · · · · ■ ■ · ·
      ■ ■ ■ · · · · · · · · ■ ■ · ·
      ■ ■ ■ ■ ■ ■ · · · · · · · ■ ■
      ■ ■ ■ ■ ■ ■ · · · · · · · ■ ■

    References:
      Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036).
    """
    context = Rectangle(Blocks(_EARLIER, (block_size, stride)), kv_len=total_seq_len)
    return context | Rectangle(BlockDiagonal(block_size), kv_start=total_seq_len)


_EARLIER = ~Causal().T  # k < q
