"""The interpreter of Gluon kernels computes what a GPU would, and refuses what has no meaning there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from tests.ops.kernels import gluon_interpreter
from tests.ops.kernels.gluon_interpreter import Tiles
from tests.ops.kernels.gluon_kernels import add_tile, barriers, load_tile, numbers, run, store_tile
from tests.ops.kernels.numpy_types import KernelBug

# --- what has no meaning ----------------------------------------------------------------------------------------------


@gluon.jit
def mistake(x, y, BUG: gl.constexpr):
    buffer = gl.allocate_shared_memory(gl.float32, [2, 4, 8], x.layout)
    full = barriers(1, 1)
    load_tile(x, [0, 0], full.index(0), buffer.index(0), pred=False)
    if BUG == "tile":
        load_tile(x, [0, 0], full.index(0), buffer)
    elif BUG == "axes":
        load_tile(x, [0], full.index(0), buffer.index(0))
    elif BUG == "slot":
        buffer.index(2).load(gl.AutoLayout())
    elif BUG == "flat":
        buffer.permute((0, 2, 1)).reshape([64])
    elif BUG == "input":
        store_tile(x, [0, 0], buffer.reshape([8, 8]).slice(4, 4))
    elif BUG == "product":
        warpgroup_mma(buffer.index(0), buffer.index(1), gl.zeros([4, 8], gl.float32, gl.AutoLayout()))
    elif BUG == "rows":  # half of what a group of warps has
        left = gl.allocate_shared_memory(gl.float32, [32, 8], x.layout)
        warpgroup_mma(left, left.permute((1, 0)), gl.zeros([32, 32], gl.float32, gl.AutoLayout()))
    elif BUG == "truth" and gl.load((y + gl.arange(0, 8))[None, :]) > 0:
        pass


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("tile", r"moves fp32\[4, 8\] of x at \[0, 0\], and fp32\[2, 4, 8\] of shared memory"),
        ("axes", r"of x at \[0\]"),
        ("slot", r"out of bounds: 2 to 3 of axis 0 of shared memory of \[2, 4, 8\]"),
        ("flat", "not contiguous"),
        ("input", "stores to its input x"),
        ("product", r"multiplies fp32\[4, 8\] by fp32\[4, 8\]"),
        ("rows", r"multiplies \[32, 8\] by \[8, 32\]; a product has 64 n rows"),
        ("truth", r"takes a tile of shape \[1, 8\] for one number"),
    ],
)
def test_mistakes_are_refused(bug, message):
    x, y = numbers(0, 4, 8), np.zeros(8, np.float32)
    x.flags.writeable = False
    with pytest.raises(KernelBug, match=message):
        run(mistake, (1,), Tiles(x, x.shape, (4, 8)), y, BUG=bug)


# --- global memory, arithmetic, assembly ------------------------------------------------------------------------------


@gluon.jit
def gather(x, y, START: gl.constexpr, MASKED: gl.constexpr):
    at = gl.program_id(0) * 8 + gl.arange(0, 8)
    mask = at + START < 20 if MASKED else at >= 0
    gl.store(y + at, gl.load(x + START + at, mask=mask, other=-1.0), mask=at < 24)


def test_global_memory_has_bounds():
    x, y = numbers(0, 20), np.full(24, np.nan, np.float32)
    run(gather, (3,), x, y, START=2, MASKED=True)
    np.testing.assert_array_equal(y, np.append(x[2:], np.full(6, -1, np.float32)))
    with pytest.raises(KernelBug, match=r"gather, program \(2, 0, 0\), .*: out of bounds: loads x, element 20 of 20"):
        run(gather, (3,), x, y, START=2, MASKED=False)
    with pytest.raises(KernelBug, match="element -1 of 20"):
        run(gather, (1,), x, y, START=-1, MASKED=True)
    x.flags.writeable = False
    with pytest.raises(KernelBug, match="stores to its input y"):
        run(gather, (3,), y, x, START=0, MASKED=True)


@gluon.jit
def pack(x, dtype: gl.constexpr):
    low, high = gl.split(gl.reshape(x, [4, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)


@gluon.jit
def round_trip(x, y, dtype: gl.constexpr):
    packed = pack(gl.load(x + gl.arange(0, 8)), dtype)
    low = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    gl.store(y + gl.arange(0, 8), gl.reshape(gl.join(low, high), [8]).to(gl.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_packed_numbers(dtype):
    x, y = numbers(0, 8), np.empty(8, np.float32)
    run(round_trip, (1,), x, y, dtype=getattr(gl, dtype))
    np.testing.assert_array_equal(y, x.astype(dtype).astype(np.float32))


@gluon.jit
def arithmetic(x, floats, ints, count):
    a = gl.load(x + gl.arange(0, 4))
    at = gl.arange(0, 4)
    gl.store(ints + at, a // 3)
    gl.store(ints + 4 + at, a % 3)
    gl.store(ints + 8 + at, a << 31)
    gl.store(ints + 12 + at, a >> 40)
    gl.store(floats + at, a / 2 + 0.5)
    gl.store(floats + 4 + at, gl.where(a > 0, 1.0, float("-inf")))
    gl.store(floats + 8, gl.max(a * 1.5, 0) + gl.to_tensor(count) / 2)
    gl.store(ints + 16, gl.sum(a, 0))
    if gl.load(ints + 16) == -8 and not count > 3:
        gl.store(floats + 9, gl.log2(gl.exp2(a * 1.0)[:, None])[:, 0].to(gl.bfloat16).to(gl.float32).shape[0])


def test_arithmetic_is_that_of_a_gpu():
    x, ints, floats = np.array([-7, -2, 1, 0], np.int32), np.zeros(17, np.int32), np.zeros(10, np.float32)
    run(arithmetic, (1,), x, floats, ints, 3)
    lowest = -(2**31)
    assert ints.tolist() == [-2, 0, 0, 0, -1, -2, 1, 0, lowest, 0, lowest, 0, -1, -1, 0, 0, -8]
    assert floats.tolist() == [-3, -0.5, 1, 0.5, -np.inf, -np.inf, 1, -np.inf, 3, 4]


@gluon.jit
def reversed_bits(x):
    return gl.inline_asm_elementwise("brev.b32 $0, $1;", "=r,r", [x], gl.int32, True, 1)


@gluon.jit
def use_assembly(x):
    gl.store(x, reversed_bits(gl.load(x)))


def test_assembly_that_is_not_known_needs_a_replacement():
    x = np.array([1], np.int32)
    with pytest.raises(NotImplementedError, match="brev"):
        run(use_assembly, (1,), x)
    for key in ("reversed_bits", reversed_bits, reversed_bits.fn):
        run(use_assembly, (1,), x, replacements={key: lambda x: x + 1})
    assert x == 4


@gluon.jit
def add_rows(x, total, _, rest):
    buffer = gl.allocate_shared_memory(gl.float32, x.block_shape, x.layout)
    full = barriers(1, 1)
    mbarrier.expect(full.index(0), x.block_type.nbytes)
    load_tile(x, [gl.program_id(0), 0], full.index(0), buffer)
    mbarrier.wait(full.index(0), 0)
    add_tile(total, [0, 0], buffer)
    tma.store_wait(0)
    if gl.program_id(0) == 1:
        gl.store(rest + gl.arange(0, 2), gl.load(rest + gl.arange(0, 2)))


def test_call_from_jax():
    x, start = jnp.asarray(numbers(0, 3, 4)), jnp.asarray(numbers(1, 1, 4))

    @jax.jit
    def sums(x, start):
        inputs = [Tiles(x, x.shape, (1, 4)), Tiles(start, start.shape, (1, 4))]
        outputs = [jax.ShapeDtypeStruct(start.shape, start.dtype), jax.ShapeDtypeStruct((4,), jnp.float32)]
        return gluon_interpreter.call(add_rows, 3, inputs, outputs, {}, aliases={1: 0})

    total, other = sums(x, start)
    np.testing.assert_allclose(total, x.sum(0, keepdims=True) + start, rtol=1e-6)
    assert np.isnan(other).all()
