"""What the kernels say beside Gluon's own names: instructions of Hopper, and what versions of Triton call otherwise.

Gluon is Triton's lower level: its kernels say themselves which warps do what, where a tile lies, and when it is there.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportOptionalMemberAccess=false

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Names of Triton 3.8 and later, and those before.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Threads copy what pointers say to shared memory, 16 bytes at a time at most, and a barrier is told when it is there.
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@builtin
def add_tile(desc, coord, source, _semantic=None):
    """Has the copy engine add a tile of shared memory to one of global memory."""
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add(desc, coord, source, _semantic=_semantic)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD  # Triton 3.6 and 3.7 have it without a name
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    return _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """The same shared memory as another tile."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def together(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """So many threads of consumers, 128 a group, wait for each other at a named barrier."""
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
    """Arrives at a barrier, once for each thread, when all is there that it has begun to `copy`."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


def _layout_of_fours(rows: int, columns: int) -> Any:
    """A product's layout, but that threads have four neighbouring columns, which they get by a shuffle."""
    registers = [[0, 1], [0, 2], [8, 0], *([0, 16 << i] for i in range(columns.bit_length() - 5))]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


layout_of_fours = gluon.constexpr_function(_layout_of_fours)


@gluon.jit
def add_rows(base, rows, STRIDE: gl.constexpr, x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Adds a product in float32 to rows of an array, STRIDE numbers apart, four numbers at a time.

    Two at a time took 7 to 20 % longer in all on an H100.
    """
    x = gl.convert_layout(x, layout_of_fours(ROWS, COLUMNS))
    even, odd = gl.split(gl.reshape(x, [ROWS, COLUMNS // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    LAYOUT: gl.constexpr = first.type.layout
    column = 4 * gl.arange(0, COLUMNS // 4, layout=gl.SliceLayout(0, LAYOUT))
    rows = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    to = base + rows.to(gl.int64)[:, None] * STRIDE + column[None, :]
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [to.to(gl.int64), first, second, third, fourth],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def late(x):
    """x once more, computed here: addresses that follow from it are not computed earlier, and kept, and spilled."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def exp2(x):
    """2 ** x, to about two roundings; 0 where a result is too small for a normal number."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def kept(x, words, bit):
    """float32 x where words have a bit, and -inf elsewhere.

    Of tests that it knows, the compiler makes all of a tile's early, and keeps what they came to in bits of registers,
    which it takes apart again: nearly three times the instructions.
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
    """float32 [ROWS, COLUMNS] as int32 [ROWS, COLUMNS / 2], two of bfloat16 or float16 in each.

    Registers that go around a loop so are half as many, and are not taken apart and put together again at its edge.
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
    """The inverse of `pack`."""
    low = (x & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
