"""Instructions of Hopper that Gluon lacks, and names that differ between versions of Triton.

Gluon is Triton's lower level: its kernels assign work to warps, lay out tiles, and wait for barriers themselves.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportOptionalMemberAccess=false

import math
from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Names of Triton 3.8 and later, else the earlier ones.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Threads copy from pointers to shared memory, up to 16 bytes at a time; `arrive_when_copied` signals the arrival.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@builtin
def add_tile(desc, coord, source, _semantic=None):
    """Adds a tile of shared memory to global memory through TMA."""
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add(desc, coord, source, _semantic=_semantic)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD  # Triton 3.6 and 3.7 have no public name for it
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    return _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Reinterprets shared memory, or the first bytes of it, as a tile of another dtype, shape and layout."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    element, rows = (x.value if isinstance(x, gl.constexpr) else x for x in (dtype, shape))
    rows = [x.value if isinstance(x, gl.constexpr) else x for x in rows]
    bits = math.prod(buffer.shape) * buffer.dtype.primitive_bitwidth
    number = bits // (math.prod(rows) * element.primitive_bitwidth)
    if number == 1:
        return method(dtype, shape, layout, _semantic=_semantic)
    # Triton 3.8 asks for as many bytes as there are.
    return method(dtype, [number, *rows], layout, _semantic=_semantic).index(0, _semantic=_semantic)


@gluon.jit
def named_barrier_sync(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Synchronizes THREADS threads of the consumers, 128 a group, at the named barrier NUMBER."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;",
        "=r,n,n",
        [gl.to_tensor(NUMBER), gl.to_tensor(THREADS)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def arrive_when_copied(barrier):
    """Arrives at a barrier, once for each thread, when all that it copies by `copy_async` has arrived."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


def _vec4_layout(rows: int, columns: int) -> Any:
    """Layout of a product's rows in which a thread has four neighbouring columns, one shuffle from the product's."""
    registers = [[0, 1], [0, 2], [8, 0], *([0, 16 << i] for i in range(columns.bit_length() - 5))]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


vec4_layout = gluon.constexpr_function(_vec4_layout)


@gluon.jit
def add_rows(base, rows, STRIDE: gl.constexpr, x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Adds a product in float32 to rows of an array, STRIDE numbers apart, four numbers at a time.

    With two numbers at a time, whole passes took 7 to 20 % longer on an H100.
    """
    x = gl.convert_layout(x, vec4_layout(ROWS, COLUMNS))
    even, odd = gl.split(gl.reshape(x, [ROWS, COLUMNS // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    LAYOUT: gl.constexpr = first.type.layout
    column = 4 * gl.arange(0, COLUMNS // 4, layout=gl.SliceLayout(0, LAYOUT))
    rows = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    addresses = base + rows.to(gl.int64)[:, None] * STRIDE + column[None, :]
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [addresses.to(gl.int64), first, second, third, fourth],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prevent_hoisting(x):
    """Returns x behind a barrier to the compiler, which else hoists and spills the addresses that follow from x."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def prevent_sinking(x):
    """Returns float32 x behind a barrier to the compiler, which else computes x later, and spills all that x needs."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, is_pure=False, pack=1)


@gluon.jit
def exp2(x):
    """Computes 2 ** x to about two roundings; subnormal results are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_elements(pointers):
    """Loads float32 that nobody writes meanwhile; of equal addresses of a thread, the compiler loads one."""
    return gl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], gl.float32, is_pure=True, pack=1)


@gluon.jit
def mask_by_bits(x, words, bit):
    """Selects float32 x where ``words & bit`` is not 0, else -inf.

    In assembly, as the compiler would hoist all tests of a tile, and pack and unpack their results in registers: nearly
    three times the instructions.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 found; .reg .pred p; and.b32 found, $2, $3; setp.ne.b32 p, found, 0; "
        "selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r",
        [x, words, bit],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pack(x, dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Packs float32 [ROWS, COLUMNS] into int32 [ROWS, COLUMNS / 2], two numbers in bfloat16 or float16 each.

    A loop then carries half as many registers, and need not repack them at its edge.
    """
    low, high = gl.split(gl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpack(x, dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Unpacks [ROWS, COLUMNS / 2] of `pack` to [ROWS, COLUMNS]."""
    low = (x & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
