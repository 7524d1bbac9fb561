"""Rows of 8 bits: conversions to float32, and matrix products of pairs of columns in float16.

**Matrix products take registers of two numbers.** A register of keys has neighbouring columns of a row, one of values
has a column of neighbouring rows. No GPU before Blackwell transposes tiles of 8 bits on the way to them.

**Pairs of columns are transposed like numbers of 16 bits.** A register then has two pairs, here of columns 0 and 1::

    loaded     row 0, column 0 | row 0, column 1 | row 1, column 0 | row 1, column 1
    even       row 0, column 0                   | row 1, column 0
    odd        row 0, column 1                   | row 1, column 1

**Even and odd columns are products of their own.** Those of keys are summed; those of values are joined at the end.

**Conversions are exact.** Those of 4 numbers to float16 cost 5 instructions of int8, or 4 of float8. Scales of rows
multiply scores and weights, in float32.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

import triton
import triton.language as tl

from ..gpu.tiles import addresses, load_rows, logits, zeros

# Weights of a tile are at most 2 ** 15, and the largest is at least 2 ** 13: float16 ends at 65504, and has 24 bits
# below one. Scales of values below 2 ** -96 are treated like that: weights without scales are at most 2 ** (96 + 15).
LARGEST_EXPONENT, LEAST_EXPONENT = tl.constexpr(14), tl.constexpr(-96)
# Sinks and the new token start this far below 2 ** 15, for values of a scale of about one.
HEADROOM = tl.constexpr(40.0)

# The bytes 0x4B, 0, 0 above a byte b make 2 ** 23 + b in float32, and the byte 0x64 makes 1024 + b in float16; b is a
# number of int8 plus 128.
INT8_TO_FLOAT32 = tl.constexpr("""{
    .reg .b32 %x;
    xor.b32 %x, $4, 0x80808080;
    prmt.b32 $0, %x, 0x4B000000, 0x7440;
    prmt.b32 $1, %x, 0x4B000000, 0x7441;
    prmt.b32 $2, %x, 0x4B000000, 0x7442;
    prmt.b32 $3, %x, 0x4B000000, 0x7443;
    sub.f32 $0, $0, 0f4B000080;
    sub.f32 $1, $1, 0f4B000080;
    sub.f32 $2, $2, 0f4B000080;
    sub.f32 $3, $3, 0f4B000080;
}""")
UNPACK_INT8 = tl.constexpr("""{
    .reg .b32 %odd, %bias;
    mov.b32 %bias, 0x64806480;
    prmt.b32 %odd, $2, 0x64646464, 0x4341;
    lop3.b32 $0, $2, 0x00FF00FF, %bias, 0x6A;
    xor.b32 %odd, %odd, 0x00800080;
    sub.f16x2 $0, $0, %bias;
    sub.f16x2 $1, %odd, %bias;
}""")
UNPACK_FLOAT8 = tl.constexpr("""{
    .reg .b16 %low, %high;
    .reg .b32 %first, %second;
    mov.b32 {%low, %high}, $2;
    cvt.rn.f16x2.e4m3x2 %first, %low;
    cvt.rn.f16x2.e4m3x2 %second, %high;
    prmt.b32 $0, %first, %second, 0x5410;
    prmt.b32 $1, %first, %second, 0x7632;
}""")


@triton.jit
def to_float32(x, dtype: tl.constexpr):
    """Returns numbers in float32, of 8 bits or rounded to a dtype first."""
    if x.dtype.is_fp8():
        return x.to(tl.float16).to(tl.float32)
    elif x.dtype.primitive_bitwidth == 8:
        return tl.inline_asm_elementwise(
            INT8_TO_FLOAT32, "=&r,=&r,=&r,=&r,r", [x], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def quantize_row(row, dtype: tl.constexpr):
    """Returns a row in 8 bits and its scale, see `quantized.quantize`."""
    LARGEST: tl.constexpr = 448.0 if dtype.is_fp8() else 127.0
    row = row.to(tl.float32)
    scale = (tl.max(tl.abs(row), 0) + tl.sum(row * 0.0, 0)) / LARGEST  # NaN if an element is not finite
    row = row / tl.where(scale == 0.0, 1.0, scale)
    if not dtype.is_fp8():
        row = (row + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: rounds to the nearest integer
    return row.to(dtype), scale


@triton.jit
def load_pairs(head, row, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """Returns the even and the odd columns of rows, [rows, SIZE / 2] each, in float16; 0 for negative rows."""
    pairs = addresses(head.to(tl.pointer_type(tl.int16)), row, LENGTH // 2, SIZE // 2, True)
    tile = load_rows(pairs, row >= 0, LENGTH // 2, SIZE // 2, True)
    unpack: tl.constexpr = UNPACK_FLOAT8 if head.dtype.element_ty.is_fp8() else UNPACK_INT8
    return tl.inline_asm_elementwise(unpack, "=&r,=r,r", [tile], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def split_columns(x):
    """Returns the even and the odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def split_queries(q_tile):
    """Returns the even and the odd columns of queries, divided by a power of two, and that power."""
    wide = q_tile.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(wide), 1), 0).to(tl.int32, bitcast=True)
    q_scale = (largest & 0x7F800000).to(tl.float32, bitcast=True)
    q_scale = tl.where(q_scale == 0, 1.0, q_scale)
    even, odd = split_columns(wide / q_scale)
    return even, odd, q_scale


@triton.jit
def multiply(a, b, acc, dtype: tl.constexpr):
    """Returns acc + a @ b of float32 and float16; a is rounded to float16, or for queries in float32 to two of them."""
    high = a.to(tl.float16)
    if dtype == tl.float32:
        acc = tl.dot((a - high.to(tl.float32)).to(tl.float16), b, acc)
    return tl.dot(high, b, acc)


@triton.jit
def start_pairs(m_i, l_i, acc):
    """Returns a state (m_i, l_i, even and odd columns of acc)."""
    weight = tl.exp2(HEADROOM)
    even, odd = split_columns(acc * weight)
    return m_i - HEADROOM, l_i * weight, even, odd


@triton.jit
def update_pairs(m_i, l_i, acc_even, acc_odd, q_pairs, k, v, k_scale, v_scale, row, dtype: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """Adds rows [TILE] of keys k and values v, with a scale for each row, to a state for each query row.

    ``m_i`` is about the largest logarithm of a weight times the scale of its value.
    """
    q_even, q_odd, q_scale = q_pairs
    k_even, k_odd = load_pairs(k, row, C.H, C.D)  # [TILE, D / 2]
    v_even, v_odd = load_pairs(v, row, C.HV, C.DV)  # [TILE, DV / 2]
    products = multiply(q_even, tl.trans(k_even), zeros(C.ROWS, C.TILE), dtype)  # [ROWS, TILE]
    products = multiply(q_odd, tl.trans(k_odd), products, dtype) * (q_scale * k_scale)[None, :]
    scores = tl.where(row[None, :] >= 0, logits(products, C), float("-inf"))
    exponent = tl.maximum((v_scale.to(tl.int32, bitcast=True) >> 23) - 127, LEAST_EXPONENT) - LARGEST_EXPONENT
    m_new = tl.maximum(m_i, tl.max(scores + exponent.to(tl.float32)[None, :], 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p, alpha = tl.exp2(scores - shift[:, None]), tl.exp2(m_i - shift)
    weights = p * v_scale[None, :]
    acc_even = multiply(weights, v_even, acc_even * alpha[:, None], dtype)
    acc_odd = multiply(weights, v_odd, acc_odd * alpha[:, None], dtype)
    return m_new, l_i * alpha + tl.sum(p, 1), acc_even, acc_odd
