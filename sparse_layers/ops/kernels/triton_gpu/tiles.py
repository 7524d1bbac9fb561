"""What the kernels share: rows and tokens, mask tiles, and scores. Functions for other Triton functions to call.

A program of any of the kernels holds a tile of one side (its *major* side: queries in the forward and dq kernels, keys
in the dk and dv kernel) and walks over the blocks of the other, *minor* side that `lists.py` lists for it. Rows are
those of the pass; a row order turns a row into a token by four integers, of which COUNT == 0 stands for natural order:
``token = row % COUNT * STEP + row // COUNT * JUMP + START``.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def token_of(row, COUNT: tl.constexpr, STEP: tl.constexpr, JUMP: tl.constexpr, START: tl.constexpr):
    """The token of each row."""
    if COUNT == 0:
        return row
    else:
        return row % COUNT * STEP + row // COUNT * JUMP + START


@triton.jit
def row_of(token, exists, COUNT: tl.constexpr, JUMP: tl.constexpr, START: tl.constexpr):
    """(row, whether there is one) of each token in an order of gathered tokens, or in natural order."""
    if COUNT == 0:
        return token, exists
    else:
        place = token - START
        inside = place % JUMP
        return place // JUMP * COUNT + inside, exists & (place >= 0) & (inside < COUNT)


@triton.jit
def addresses(base, token, STRIDE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Pointers [rows, SIZE] to the vectors of tokens, STRIDE elements apart."""
    if WIDE:
        token = token.to(tl.int64)
    return base + token[:, None] * STRIDE + tl.arange(0, SIZE)[None, :]


@triton.jit
def load_rows(pointers, exists, LENGTH: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Loads vectors of LENGTH elements, padded with zeros to SIZE; rows that do not exist are 0 if MASKED."""
    if MASKED:
        if LENGTH == SIZE:
            return tl.load(pointers, mask=exists[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=exists[:, None] & (tl.arange(0, SIZE) < LENGTH)[None, :], other=0.0)
    elif LENGTH == SIZE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(tl.arange(0, SIZE) < LENGTH)[None, :], other=0.0)


@triton.jit
def store_rows(pointers, values, exists, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """Stores vectors of LENGTH elements in the dtype of their destination."""
    mask = exists[:, None] & (tl.arange(0, SIZE) < LENGTH)[None, :]
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def allowed(bits, row, WORDS: tl.constexpr, WIDTH: tl.constexpr):
    """The tile [rows, WIDTH] of a bit-packed mask: ``bits`` points at its first word, each row has WORDS of them."""
    column = tl.arange(0, WIDTH)
    words = tl.load(bits + row * WORDS)[:, None]
    if WIDTH > 32:
        words = tl.where(column[None, :] < 32, words, tl.load(bits + row * WORDS + 1)[:, None])
    if WIDTH > 64:
        third, fourth = tl.load(bits + row * WORDS + 2)[:, None], tl.load(bits + row * WORDS + 3)[:, None]
        words = tl.where(column[None, :] < 64, words, tl.where(column[None, :] < 96, third, fourth))
    return ((words >> (column & 31)[None, :]) & 1) != 0


@triton.jit
def tanh(x):
    """The hyperbolic tangent, to a few roundings also near 0."""
    square = x * x
    small = -0.05396825396825397 + square * 0.021869488536155203
    small = x * (1 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * small)))
    # exp2 of a large number is infinite, and 2 / infinity is 0, as it should be.
    large = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
    return tl.where(tl.abs(x) < 0.3, small, large)


@triton.jit
def logits(products, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Logits to base 2 of q . k; CAP == 0 stands for no soft cap."""
    if CAP == 0:
        return products * (SCALE * 1.4426950408889634)
    else:
        return tanh(products * (SCALE / CAP)) * (CAP * 1.4426950408889634)


@triton.jit
def share_of(full, total, split, SPLITS: tl.constexpr, PARTS: tl.constexpr):
    """The loop bounds of this program: (first full step, end of full steps, first masked step, end of masked steps).

    Steps are blocks times the PARTS that a block is walked in; SPLITS programs share them; this is number ``split``.
    """
    full, total = full * PARTS, total * PARTS
    if SPLITS == 1:
        return full * 0, full, full, total
    else:
        each = tl.cdiv(total, SPLITS)
        begin = tl.minimum(split * each, total)
        end = tl.minimum(begin + each, total)
        return begin, tl.minimum(end, full), tl.maximum(begin, full), end
