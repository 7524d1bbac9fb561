"""The tests' own interpreter of Triton kernels: it computes what a GPU would, and it sees what kernels do wrong."""

import concurrent.futures
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.semantic import TritonSemantic

from tests.ops.kernels import triton_interpreter, triton_machine
from tests.ops.kernels.numpy_types import TRITON_TYPES


@triton.jit
def block_of(pointer, row, column, STRIDE: tl.constexpr):
    return pointer + row.to(tl.int64)[:, None] * STRIDE + column[None, :]


@triton.jit
def matmul(
    a,
    b,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr = 16,
    STRIDE: tl.constexpr = None,
    MASK_K: tl.constexpr = True,
    MASK_STORE: tl.constexpr = True,
    OTHER: tl.constexpr = 0.0,
    SHIFT: tl.constexpr = 0,
):
    """c = a @ b, with an option for every mistake."""
    stride: tl.constexpr = K if STRIDE is None else STRIDE
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.maximum(tl.program_id(1) - SHIFT, 0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < K if MASK_K else k >= 0
        x = tl.load(block_of(a, row, k, stride), mask=(row < M)[:, None] & inside[None, :], other=OTHER)
        y = tl.load(block_of(b, k, column, N), mask=inside[:, None] & (column < N)[None, :], other=OTHER)
        total = tl.dot(x, y, total, input_precision="ieee")
    mask = (row < M)[:, None] & (column < N)[None, :] if MASK_STORE else None
    tl.store(block_of(c, row, column, N), total.to(c.dtype.element_ty), mask=mask)


@triton.jit
def softmax(x, lengths, y, top, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Softmax over the first elements of each row, by base-2 exponentials; and the largest element."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    length = tl.load(lengths + row)
    value = tl.load(x + row * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    value = tl.where(column < length, value, float("-inf"))
    largest = tl.max(value, 0)
    weight = tl.exp2((value - largest) * 1.4426950408889634)
    weight = weight / tl.sum(weight, 0)
    if length == 0:
        weight = tl.zeros((WIDTH,), tl.float32)
    tl.store(y + row * COLUMNS + column, weight.to(y.dtype.element_ty), mask=column < COLUMNS)
    tl.store(top + row, largest)


@triton.jit
def integers(x, y, out, wide, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    a, b = tl.load(x + index), tl.load(y + index)
    tl.store(out + index, a // b)
    tl.store(out + SIZE + index, a % b)
    tl.store(out + 2 * SIZE + index, (a >> 1) & 5)
    tl.store(out + 3 * SIZE + index, tl.cdiv(a, 3) | (b << 2))
    steps = 0
    for _ in tl.range(tl.load(y), tl.load(x)):
        steps += 1
    for step in tl.static_range(2):
        steps += step
    tl.store(wide, tl.full((), 2147483647, tl.int32) + steps)
    tl.store(wide + 1, (steps + tl.full((), 2147483647, tl.int64) - 2147483647).to(tl.int32))


@triton.jit
def transposed(x, y, z, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    value = tl.load(x + row[:, None] * COLUMNS + column)
    place = column[:, None] * ROWS + row[None, :]
    tl.store(y + place, tl.trans(value))
    tl.store(z + place, value.T - tl.min(value, 1, keep_dims=True).T + tl.sum(value, 0)[:, None])


@triton.jit
def double(x, y, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y + index, (tl.load(x + index).to(tl.float32) * 2).to(y.dtype.element_ty))


@triton.jit
def double_as_it_is(x, y, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    value = tl.load(x + index)
    tl.store(y + index, value + value)


@triton.jit
def store_to_input(x, y, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 0.0)


@triton.jit
def step_outside(x, y, OFFSET: tl.constexpr):
    tl.store(y, tl.load(x + OFFSET))


@triton.jit
def store_and_reload(x, y, SIZE: tl.constexpr, SHIFT: tl.constexpr):
    """Stores x, loads it back (or what lies beside it), and stores that again, doubled."""
    mine = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + mine, tl.load(x + mine))
    last = tl.num_programs(0) * SIZE - 1
    tl.store(y + mine, 2 * tl.load(y + tl.minimum(tl.maximum(mine + SHIFT, 0), last)))


@triton.jit
def store_twice_at_once(x, y, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y + index // 2, tl.load(x + index))


@triton.jit
def write_half(x, y, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y + index, tl.load(x + index), mask=index < SIZE // 2)


@triton.jit
def add_atomically(x, y, SIZE: tl.constexpr):
    tl.atomic_add(y + tl.arange(0, SIZE), 1.0)


@triton.jit
def branch_on_a_block(x, y, SIZE: tl.constexpr):
    value = tl.load(x + tl.arange(0, SIZE))
    if value > 0:
        tl.store(y + tl.arange(0, SIZE), value)


def launch(kernel, grid, arrays, outputs, **constants):
    outputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    return triton_interpreter.call(kernel, grid, arrays, outputs, constants, num_warps=4, num_stages=2)


def random(shape, dtype="float32", seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def product(a, b, **constants):
    (m, k), n = a.shape, b.shape[1]
    grid = (-(-m // 16), -(-n // 16))
    return launch(matmul, grid, [a, b], [((m, n), a.dtype)], M=m, N=n, K=k, **constants)[0]


def doubled(x, kernel=double, **constants):
    return launch(kernel, (1,), [x], [(x.shape, x.dtype)], SIZE=x.size, **constants)[0]


def caught(message):
    """A context in which JAX reports a KernelBug with this text."""
    return pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)KernelBug: .*{message}")


A, B = random((20, 40)), random((40, 24), seed=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_and_conversions(dtype):
    a, b = A.astype(dtype), B.astype(dtype)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    result = product(a, b)
    assert result.dtype == dtype
    # Half a unit in the last place of the result, and the roundings of a float32 sum of 40 products.
    error = jnp.finfo(dtype).eps / 2 * np.abs(exact) + 1e-5
    assert (np.abs(np.asarray(result, np.float64) - exact) <= error).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masked_rows(dtype):
    x, lengths = random((4, 13), dtype), jnp.array([13, 5, 0, 1], jnp.int32)
    y, top = launch(softmax, (4,), [x, lengths], [(x.shape, dtype), ((4,), "float32")], COLUMNS=13, WIDTH=16)
    allowed = np.arange(13) < np.asarray(lengths)[:, None]
    value = np.where(allowed, np.asarray(x, np.float64), -np.inf)
    np.testing.assert_array_equal(top, value.max(1))
    weight = np.where(allowed, np.exp(value - np.where(np.isinf(top), 0, top)[:, None]), 0)
    expected = weight / np.maximum(weight.sum(1, keepdims=True), 1e-30)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=2 * jnp.finfo(dtype).eps)


def test_integers_as_in_c():
    x, y = jnp.array([7, -7, 7, -9], jnp.int32), jnp.array([2, 2, -2, 4], jnp.int32)
    out, wide = launch(integers, (1,), [x, y], [((4, 4), "int32"), ((2,), "int32")], SIZE=4)
    quotient, remainder, bits, rest = np.asarray(out)
    assert quotient.tolist() == [3, -3, -3, -2]
    assert remainder.tolist() == [1, -1, 1, -1]
    assert bits.tolist() == ((np.asarray(x) >> 1) & 5).tolist()
    assert rest.tolist() == [3 | 8, -1 | 8, 3 | -8, -2 | 16]
    assert wide.tolist() == [-(2**31) + 5, 6]  # 5 steps and 1; int32 wraps, int64 does not


def test_inside_transformations():
    expected = product(A, B)
    np.testing.assert_array_equal(jax.jit(product)(A, B), expected)
    batch = jnp.stack([A, 2 * A, -A])
    several = jnp.stack([expected, 2 * expected, -expected])
    np.testing.assert_array_equal(jax.vmap(product, in_axes=(0, None))(batch, B), several)
    np.testing.assert_array_equal(jax.jit(functools.partial(jax.lax.map, lambda a: product(a, B)))(batch), several)

    @jax.custom_vjp
    def differentiable(a, b):
        return product(a, b)

    differentiable.defvjp(
        lambda a, b: (product(a, b), (a, b)), lambda kept, ct: (product(ct, kept[1].T), product(kept[0].T, ct))
    )
    da, db = jax.jit(jax.grad(lambda a, b: differentiable(a, b).sum(), (0, 1)))(A, B)
    ones = np.ones(expected.shape, np.float32)
    np.testing.assert_allclose(da, ones @ np.asarray(B).T, atol=1e-5)
    np.testing.assert_allclose(db, np.asarray(A).T @ ones, atol=1e-5)


def test_launches_from_several_threads():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda factor: product(factor * A, B), range(8)))
    for factor, result in enumerate(results):
        np.testing.assert_allclose(result, factor * A @ B, atol=1e-4)


def test_large_arrays_do_not_block_callbacks():
    x = random((1 << 21,))
    y = jax.jit(lambda x: launch(step_outside, (1,), [x * 2], [((1,), x.dtype)], OFFSET=x.size - 1)[0])(x)
    assert y[0] == x[-1] * 2


def test_axes():
    x = random((4, 8))
    y, z = launch(transposed, (1,), [x], [((8, 4), x.dtype)] * 2, ROWS=4, COLUMNS=8)
    np.testing.assert_array_equal(y, x.T)
    np.testing.assert_allclose(z, x.T - x.min(1) + x.sum(0)[:, None], atol=1e-5)


class FrontEnd(TritonSemantic):
    """Triton's own, without the short cuts."""

    tensor = triton_machine.Tensor


def tensor(array, scalar=False):
    """A tensor outside of any kernel."""
    dtype = TRITON_TYPES[array.dtype]
    block = dtype if scalar else triton_machine.block_type(dtype, array.shape)
    return triton_machine.Tensor(triton_machine.Handle(array, dtype), block)


OPERANDS = [
    *(tensor(np.array([[3], [-5], [7], [2]], dtype)) for dtype in ("int32", "int64", "float32", "float16", "bool")),
    *(tensor(np.array([3, -5, 0, 2], dtype)) for dtype in ("int32", "float32", "bool", "bfloat16")),
    *(tensor(np.array([3], dtype), scalar=True) for dtype in ("int32", "float32", "bool")),
    *(3, -1, 0, 2**40, 0.5, -0.0, float("inf"), True),
]
OPERATORS = (
    "add sub mul truediv floordiv mod and or xor lshift rshift lt le gt ge eq ne radd rsub rmul rtruediv rfloordiv"
)


def outcome(front_end, operation, *operands):
    """(type, array) of a result, or the fact that it is refused."""
    try:
        with np.errstate(all="ignore"):
            result = operation(*operands, _semantic=front_end)
    except Exception:
        return "refused", None
    return str(result.type), result.handle.data


@pytest.mark.parametrize("operator", [*OPERATORS.split(), "maximum", "where"])
def test_short_cuts_lead_where_the_front_end_does(operator):
    functions = {"maximum": tl.maximum, "where": functools.partial(tl.where, tensor(np.array([[True], [False]] * 2)))}
    operation = functions.get(operator) or getattr(tl.tensor, f"__{operator}__")
    front_end, computed = FrontEnd(triton_machine.MACHINE), 0
    for operands in itertools.product(OPERANDS[:12], OPERANDS):
        kind, array = outcome(triton_interpreter.SEMANTIC, operation, *operands)
        expected_kind, expected = outcome(front_end, operation, *operands)
        assert kind == expected_kind, operands
        if kind != "refused":
            assert array.dtype == expected.dtype, operands
            np.testing.assert_array_equal(array, expected)
            computed += 1
    assert computed > 20


def test_runs_are_equal():
    np.testing.assert_array_equal(product(A, B), product(A, B))


def test_a_program_may_read_and_rewrite_what_it_wrote():
    x = random((32,))
    np.testing.assert_array_equal(launch(store_and_reload, (2,), [x], [((32,), x.dtype)], SIZE=16, SHIFT=0)[0], 2 * x)


def test_what_nobody_writes_is_poisoned():
    x = random((8,))
    y = doubled(x, write_half)
    np.testing.assert_array_equal(y, np.where(np.arange(8) < 4, x, np.nan))
    whole = launch(write_half, (1,), [jnp.zeros(8, jnp.int32)], [((8,), "int32")], SIZE=8)[0]
    assert whole.tolist() == [0] * 4 + [2**31 - 1] * 4


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"MASK_K": False}, r"out of bounds: loads b, element 960 of 960"),
        ({"STRIDE": 48}, r"out of bounds: loads a, element 816 of 800"),
        ({"MASK_STORE": False}, r"matmul, program \(0, 1, 0\): conflict: stores to c\[1, 0\], where program number 0"),
        ({"SHIFT": 1}, r"matmul, program \(0, 1, 0\): conflict: stores to c\[0, 0\], where program number 0"),
    ],
    ids=str,
)
def test_mistakes_with_memory_are_caught(mistake, message):
    with caught(message):
        jax.block_until_ready(jax.jit(functools.partial(product, **mistake))(A, B))


def test_a_masked_load_without_other_poisons_the_result():
    assert np.isnan(product(A, B, OTHER=None)).all()
    assert np.isfinite(product(A[:16, :32], B[:32, :16], OTHER=None)).all()  # nothing masked


@pytest.mark.parametrize("offset", [-1, 8, 1 << 35, -(1 << 35), 1 << 60])
def test_addresses_belong_to_one_array(offset):
    with caught(r"step_outside, program \(0, 0, 0\): out of bounds: loads"):
        jax.block_until_ready(launch(step_outside, (1,), [random((8,))], [((8,), "float32")], OFFSET=offset))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (store_to_input, r"stores to its input x\[0\]"),
        (store_twice_at_once, r"two lanes of a store disagree about y\[0\]"),
        (add_atomically, "atomic"),
        (branch_on_a_block, "truth value of a block"),
    ],
)
def test_other_mistakes_are_caught(kernel, message):
    with caught(message):
        jax.block_until_ready(doubled(random((8,)), kernel))


@pytest.mark.parametrize(("shift", "message"), [(-16, "program number 0 wrote"), (16, "nobody has written")])
def test_outputs_are_for_their_own_program_to_read(shift, message):
    with caught(message):
        arguments = [random((32,))], [((32,), "float32")]
        jax.block_until_ready(launch(store_and_reload, (2,), *arguments, SIZE=16, SHIFT=shift))


def test_bfloat16_is_computed_with_in_float32_only():
    x = random((8,), "bfloat16")
    np.testing.assert_array_equal(doubled(x), x * 2)
    with caught("arithmetic on bfloat16"):
        jax.block_until_ready(doubled(x, double_as_it_is))
    np.testing.assert_array_equal(doubled(x.astype("float16"), double_as_it_is), x.astype("float16") * 2)


def test_errors_do_not_outlive_their_launch():
    with caught("out of bounds"):
        jax.block_until_ready(product(A, B, STRIDE=48))
    np.testing.assert_allclose(product(A, B), A @ B, atol=1e-5)


def test_kernels_still_compile(tmp_path):
    modules = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, triton.runtime.interpreter.InterpreterBuilder]
    before = [dict(vars(module)) for module in modules]
    names = dict(globals())
    product(A, B)
    assert before == [dict(vars(module)) for module in modules]
    assert names == globals()

    sizes = {"M": 32, "N": 32, "K": 32}
    constants = {(3 + place,): value for place, value in enumerate(sizes.values())}
    signature = {**dict.fromkeys("abc", "*bf16"), **dict.fromkeys(matmul.arg_names[3:], "constexpr")}
    defaults = {(i,): matmul.params[i].default for i in range(6, len(matmul.arg_names))}
    source = ASTSource(matmul, signature, {**constants, **defaults})
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)  # an empty one, so that there is something to compile
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert "mma" in compiled.asm["ptx"]
