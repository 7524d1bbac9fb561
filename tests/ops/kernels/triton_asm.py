"""Inline PTX of Triton kernels, computed with numpy: the few instructions that kernels of this project use."""

import re

import ml_dtypes
import numpy as np


def elementwise(asm, arrays, dtypes, pack):
    """Outputs of `tl.inline_asm_elementwise` in numpy's dtypes; ``asm`` gets ``pack`` elements of an array at once."""
    outputs = [max(1, pack * np.dtype(dtype).itemsize // 4) for dtype in dtypes]
    registers, inputs = {}, sum(outputs)
    for i, array in enumerate(arrays):
        packed = np.ascontiguousarray(array).reshape(-1, pack)
        assert packed.itemsize * pack == 4, "an input is a register of 32 bits"
        registers[f"${inputs + i}"] = packed.view(np.uint32)[:, 0]
    for statement in asm.strip(" {}\n").split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            run(statement.strip(), registers)
    results, first = [], 0
    for number, dtype in zip(outputs, dtypes, strict=True):
        packed = np.stack([registers[f"${first + i}"] for i in range(number)], axis=1)
        results.append(packed.view(dtype).reshape(arrays[0].shape))
        first += number
    return results


def run(statement, registers):
    """Changes registers by one instruction."""
    name, operands = statement.split(None, 1)
    target, *rest = re.findall(r"\{[^}]*\}|[^,\s]+", operands)
    values = [number(x) if x[0].isdigit() else registers[x] for x in rest]
    if target[0] == "{":  # halves
        assert name == "mov.b32"
        low, high = target.strip("{}").replace(" ", "").split(",")
        registers[low], registers[high] = (values[0] & 0xFFFF).astype(np.uint16), (values[0] >> 16).astype(np.uint16)
    else:
        registers[target] = INSTRUCTIONS[name](*values)


def number(text):
    """A constant: 0x1F, or 0f3F800000 for the bits of a float."""
    return np.uint32(int(text.replace("0f", "0x"), 16))


def permute(a, b, selector):
    """prmt: each nibble of the selector picks one of the eight bytes of b and a."""
    both = np.asarray(a, np.uint64) | (np.asarray(b, np.uint64) << np.uint64(32))
    picked = [
        (both >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & np.uint64(255)) << np.uint64(8 * i) for i in range(4)
    ]
    return np.bitwise_or.reduce(picked).astype(np.uint32)


def look_up(a, b, c, table):
    """lop3: any function of three bits."""
    terms = [
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if int(table) >> i & 1
    ]
    return np.bitwise_or.reduce(terms)


def subtract(dtype):
    def function(a, b):
        a, b = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b))
        return (np.ascontiguousarray(a).view(dtype) - np.ascontiguousarray(b).view(dtype)).view(np.uint32)

    return function


def float8_to_float16(x):
    return x.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32)


INSTRUCTIONS = {
    "mov.b32": lambda x: x,
    "prmt.b32": permute,
    "lop3.b32": look_up,
    "xor.b32": np.bitwise_xor,
    "sub.f16x2": subtract(np.float16),
    "sub.f32": subtract(np.float32),
    "cvt.rn.f16x2.e4m3x2": float8_to_float16,
}
