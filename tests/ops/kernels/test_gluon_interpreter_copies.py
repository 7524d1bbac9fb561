"""The interpreter of Gluon kernels copies as late as they allow, by TMA and by threads, and sees wrong copies."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from sparse_layers.ops.kernels.hopper_gpu import primitives
from tests.ops.kernels.gluon_interpreter import Tiles
from tests.ops.kernels.gluon_kernels import SLOTS, barriers, load_tile, numbers, reinterpret, run, store_tile
from tests.ops.kernels.numpy_types import KernelBug

# --- a copy: one partition --------------------------------------------------------------------------------------------


@gluon.jit
def copy(x, y, rows, TILE: gl.constexpr, FROM: gl.constexpr, BUG: gl.constexpr = ""):
    """Rows of x, from a coordinate that may be negative, to those of y; each program takes every other tile."""
    buffer = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    staged = gl.allocate_shared_memory(x.dtype, [SLOTS, *x.block_shape], x.layout)
    full = barriers(1, 1)
    if BUG == "shape":
        staged = gl.allocate_shared_memory(x.dtype, [SLOTS, 2 * TILE, x.block_shape[1]], x.layout)
    for turn in range(gl.cdiv(rows - gl.program_id(0) * TILE, TILE * gl.num_programs(0))):
        tile = gl.program_id(0) + turn * gl.num_programs(0)
        if BUG != "expect":
            mbarrier.expect(full.index(0), x.block_type.nbytes - (4 if BUG == "bytes" else 0))
        load_tile(x, [FROM + tile * TILE, 0], full.index(0), buffer)
        if BUG == "late":
            values = buffer.load(gl.AutoLayout())
        if BUG != "wait":
            mbarrier.wait(full.index(0), (turn + (BUG == "parity")) & 1)
        if BUG != "late":
            values = buffer.load(gl.AutoLayout())
        out = staged.index(0 if BUG == "reuse" else turn % SLOTS)
        tma.store_wait(1)
        out.store(values + values)
        if BUG != "fence":
            fence_async_shared()
        store_tile(y, [tile * TILE, 0], out)
    if BUG != "end":
        tma.store_wait(0)


def copied(start=-4, bug="", programs=2):
    x, y = numbers(0, 37, 8), np.full((41, 8), np.nan, np.float32)
    tiles = Tiles(x, x.shape, (4, 8)), Tiles(y, y.shape, (4, 8))
    run(copy, (programs,), *tiles, 41, TILE=4, FROM=start, BUG=bug)
    return y, np.stack([2 * x[i] if 0 <= i < 37 else np.zeros(8, np.float32) for i in range(start, start + 41)])


@pytest.mark.parametrize("start", [-50, -6, -4, 0, 3, 40])
def test_the_copy_engine_clips(start):
    got, wanted = copied(start)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("wait", "1 arrivals at a barrier that expects 0 more"),
        ("expect", "loads 128 bytes for a barrier that expects 0 more"),
        ("bytes", "loads 128 bytes for a barrier that expects 124 more"),
        ("parity", "1 arrivals at a barrier that expects 0 more"),
        ("fence", "reads shared memory that the kernel stored to, without fence_async_shared"),
        ("end", "may still read what it stores"),
        ("shape", r"stores fp32\[4, 8\] to shared memory of fp32\[8, 8\]"),
    ],
)
def test_a_copy_with_a_bug_is_refused(bug, message):
    with pytest.raises(KernelBug, match=message):
        copied(bug=bug)


def test_all_that_is_loaded_must_arrive():
    with pytest.raises(KernelBug, match="ends before all that it loads has arrived"):
        copied(bug="wait", programs=11)


def test_what_was_not_waited_for_is_poison():
    got, _ = copied(bug="late")
    assert np.isnan(got).all()


def test_a_buffer_that_is_stored_from_must_not_change():
    got, wanted = copied(bug="reuse")
    assert (got[:4] != wanted[:4]).any() or (got[8:12] != wanted[8:12]).any()


@gluon.jit
def halves(x, y, INIT: gl.constexpr = True):
    """Bits of float32 as pairs of int16, through one tile of shared memory."""
    buffer = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if INIT:
        mbarrier.init(full, count=1)
    mbarrier.expect(full, x.block_type.nbytes)
    load_tile(x, [0, gl.program_id(0), 0], full, buffer)
    mbarrier.wait(full, 0)
    words = reinterpret(buffer, gl.int16, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).load(gl.AutoLayout())
    at = gl.program_id(0) * 32 + gl.arange(0, 2)[:, None] * 16 + gl.arange(0, 16)[None, :]
    gl.store(y + at, words)


def test_views_of_arrays_and_of_shared_memory():
    x, y = numbers(0, 6, 8), np.empty((3, 2, 16), np.int16)
    every_third = Tiles(x, (2, 3, 8), (2, 1, 8), (24, 8, 1))
    run(halves, (3,), every_third, y)
    np.testing.assert_array_equal(y.view(np.float32), x.reshape(2, 3, 8).swapaxes(0, 1))
    with pytest.raises(ValueError, match="a view of x has an element 55, and x has 48"):
        run(halves, (3,), every_third._replace(strides=(32, 8, 1)), y)
    with pytest.raises(ValueError, match="argument y must be contiguous"):
        run(halves, (3,), every_third, y.swapaxes(0, 1))
    with pytest.raises(KernelBug, match=r"uses a barrier before mbarrier\.init"):
        run(halves, (3,), every_third, y, INIT=False)


@gluon.jit
def store_with_layout(x, y, LAYOUT: gl.constexpr, LOADS: gl.constexpr = False):
    """x, whose rows lie in lines of TMA, and its second half once more, transposed."""
    buffer = gl.allocate_shared_memory(gl.float32, [8, 32], gl.NVMMASharedLayout(128, 32, 2))
    at = gl.arange(0, 8)[:, None] * 32 + gl.arange(0, 32)[None, :]
    placed = reinterpret(buffer, gl.float32, [8, 32], LAYOUT)
    placed.store(gl.load(x + at))
    if LOADS:
        placed.load(gl.AutoLayout())
    half = gl.arange(0, 16)[:, None] + gl.arange(0, 8)[None, :] * 32
    buffer.slice(16, 16, 1).permute((1, 0)).store(gl.load(x + 16 + half))
    gl.store(y + at, buffer.load(gl.AutoLayout()))


def test_stores_to_slices_and_in_linear_layouts():
    x, y = numbers(0, 8, 32), np.zeros((8, 32), np.float32)
    # 16 bytes of row r at place i ^ r of the line are four columns; odd rows have the halves of a line swapped.
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 20], [2, 8], [4, 16]]
    layout = gl.SharedLinearLayout(bases, [], 1024)
    run(store_with_layout, (1,), x, y, LAYOUT=layout)
    found = np.where(np.arange(8)[:, None] % 2 == 0, x, np.roll(x, 16, axis=1))
    np.testing.assert_array_equal(y, np.concatenate([found[:, :16], x[:, 16:]], axis=1))
    with pytest.raises(KernelBug, match="in a layout of its own can only be stored to"):
        run(store_with_layout, (1,), x, y, LAYOUT=layout, LOADS=True)


# --- copies by threads ------------------------------------------------------------------------------------------------


@gluon.jit
def gather_rows(x, rows, y, BUG: gl.constexpr):
    """Rows of x that a list names, to y."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = gl.int32 if BUG == "dtype" else gl.float32
    buffer = gl.allocate_shared_memory(dtype, [4, 8], plain)
    full = barriers(1, 1 if BUG == "counted" else 128).index(0)
    if BUG == "late":
        buffer.store(gl.zeros([4, 8], gl.float32, gl.AutoLayout()))
    row, column = gl.load(rows + gl.arange(0, 1 if BUG == "shape" else 4)), gl.arange(0, 8)
    primitives.copy_async(buffer, x + row[:, None] * 8 + column[None, :])
    if BUG == "counted":  # by whoever arrives
        async_copy.mbarrier_arrive(full)
        mbarrier.arrive(full, count=1)
    elif BUG != "untold":
        primitives.arrive_when_copied(full)
    if BUG == "late":
        values = buffer.load(gl.AutoLayout())
    if BUG not in ("untold", "unwaited"):
        mbarrier.wait(full, 0)
    if BUG != "late":
        values = buffer.load(gl.AutoLayout())
    gl.store(y + gl.arange(0, 4)[:, None] * 8 + column[None, :], values)


def rows_by_threads(bug="", rows=(5, 0, 0, 2)):
    x, y = numbers(0, 6, 8), np.zeros((4, 8), np.float32)
    run(gather_rows, (1,), x, np.array(rows, np.int32), y, BUG=bug)
    return y, x[list(rows)]


@pytest.mark.parametrize("bug", ["", "counted"])
def test_threads_copy_what_pointers_say(bug):
    got, wanted = rows_by_threads(bug)
    np.testing.assert_array_equal(got, wanted)


def test_what_threads_copy_is_poison_until_it_is_waited_for():
    got, _ = rows_by_threads("late")
    assert np.isnan(got).all()


@pytest.mark.parametrize(
    ("bug", "rows", "message"),
    [
        ("untold", (5, 0, 0, 2), "ends without a word to anybody about what it copies"),
        ("unwaited", (5, 0, 0, 2), "ends before all that it loads has arrived"),
        ("shape", (5, 0, 0, 2), r"copies float32\(1, 8\) to fp32\[4, 8\]"),
        ("dtype", (5, 0, 0, 2), r"copies float32\(4, 8\) to int32\[4, 8\]"),
        ("", (5, 0, 6, 2), "out of bounds: loads x, element 48 of 48"),
    ],
)
def test_copies_by_threads_with_a_bug_are_refused(bug, rows, message):
    with pytest.raises(KernelBug, match=message):
        rows_by_threads(bug, rows)


@gluon.jit
def multiply_copied(x, y, FENCED: gl.constexpr):
    """x times its transpose."""
    buffer = gl.allocate_shared_memory(gl.float16, [64, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = barriers(1, 128).index(0)
    row, column = gl.arange(0, 64), gl.arange(0, 64)
    primitives.copy_async(buffer, x + row[:, None] * 16 + gl.arange(0, 16)[None, :])
    primitives.arrive_when_copied(full)
    mbarrier.wait(full, 0)
    if FENCED:
        fence_async_shared()
    product = warpgroup_mma(buffer, buffer.permute((1, 0)), gl.zeros([64, 64], gl.float32, gl.AutoLayout()))
    gl.store(y + row[:, None] * 64 + column[None, :], product)


def test_what_threads_copy_is_not_yet_for_the_tensor_cores():
    x, y = numbers(0, 64, 16).astype(np.float16), np.zeros((64, 64), np.float32)
    run(multiply_copied, (1,), x, y, FENCED=True)
    np.testing.assert_allclose(y, x.astype(np.float32) @ x.T.astype(np.float32), rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelBug, match="stored to, without fence_async_shared"):
        run(multiply_copied, (1,), x, y, FENCED=False)


@gluon.jit
def scatter_rows(x, rows, total):
    row, column = gl.arange(0, 64), gl.arange(0, 32)
    values = gl.load(x + row[:, None] * 32 + column[None, :])
    primitives.add_rows(total + 4, gl.load(rows + row), 40, values, 64, 32)


def test_rows_that_are_added_may_be_the_same():
    x, rows = numbers(0, 64, 32), np.arange(64, dtype=np.int32) ** 2 % 7  # 0, 1, 2 and 4: several times each
    total = numbers(1, 7, 40)
    wanted = total.copy()
    np.add.at(wanted[:, 4:36], rows, x)
    run(scatter_rows, (1,), x, rows, total)
    np.testing.assert_allclose(total, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelBug, match="out of bounds: adds to total, element 284 of 280"):
        run(scatter_rows, (1,), x, rows + np.int32(3), total)
    total.flags.writeable = False
    with pytest.raises(KernelBug, match="adds to its input total"):
        run(scatter_rows, (1,), x, rows, total)
