"""The tests' own interpreter of Gluon kernels: it computes what a GPU would, and it sees what kernels do wrong."""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparse_layers.ops.kernels.hopper_gpu import primitives
from tests.ops.kernels import gluon_interpreter
from tests.ops.kernels.gluon_interpreter import Tiles
from tests.ops.kernels.triton_interpreter import KernelBug

SEEDS = range(6)  # all orders of three partitions
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
SLOTS = gl.constexpr(2)


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run(kernel, grid, *arguments, seed=0, replacements=None, **constants):
    gluon_interpreter.run(kernel, grid, arguments, constants, seed, replacements)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """This and the next are replaced by name: Triton has had others for them."""
    raise AssertionError


@builtin
def add_tile(desc, coord, source, _semantic=None):
    raise AssertionError


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


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
def parts(x, y, LAYOUT: gl.constexpr, LOADS: gl.constexpr = False):
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


def test_stores_to_parts_and_in_other_layouts():
    x, y = numbers(0, 8, 32), np.zeros((8, 32), np.float32)
    # 16 bytes of row r at place i ^ r of the line are four columns; odd rows have the halves of a line swapped.
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 20], [2, 8], [4, 16]]
    layout = gl.SharedLinearLayout(bases, [], 1024)
    run(parts, (1,), x, y, LAYOUT=layout)
    found = np.where(np.arange(8)[:, None] % 2 == 0, x, np.roll(x, 16, axis=1))
    np.testing.assert_array_equal(y, np.concatenate([found[:, :16], x[:, 16:]], axis=1))
    with pytest.raises(KernelBug, match="in a layout of its own can only be stored to"):
        run(parts, (1,), x, y, LAYOUT=layout, LOADS=True)


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


def gathered(bug="", rows=(5, 0, 0, 2)):
    x, y = numbers(0, 6, 8), np.zeros((4, 8), np.float32)
    run(gather_rows, (1,), x, np.array(rows, np.int32), y, BUG=bug)
    return y, x[list(rows)]


@pytest.mark.parametrize("bug", ["", "counted"])
def test_threads_copy_what_pointers_say(bug):
    got, wanted = gathered(bug)
    np.testing.assert_array_equal(got, wanted)


def test_what_threads_copy_is_poison_until_it_is_waited_for():
    got, _ = gathered("late")
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
        gathered(bug, rows)


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


# --- a product: a producer and two consumers --------------------------------------------------------------------------


@gluon.jit
def produce(a, b, a_buffer, b_buffer, full, empty, steps, TILE: gl.constexpr, BUG: gl.constexpr):
    for i in range(steps):
        slot = i % SLOTS
        if BUG != "ahead":
            mbarrier.wait(empty.index(slot), (i // SLOTS & 1) ^ 1)
        mbarrier.expect(full.index(slot), a.block_type.nbytes + b.block_type.nbytes)
        load_tile(a, [gl.program_id(0) * 2 * TILE, i * TILE], full.index(slot), a_buffer.index(slot))
        load_tile(b, [i * TILE, 0], full.index(slot), b_buffer.index(slot))


@gluon.jit
def consume(GROUP: gl.constexpr, out, a_buffer, b_buffer, full, empty, steps, TILE: gl.constexpr, BUG: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    total = gl.zeros([TILE, TILE], gl.float32, layout)
    for i in range(steps):
        slot = i % SLOTS
        if BUG != "unwaited" or GROUP == 0:
            mbarrier.wait(full.index(slot), i // SLOTS & 1)
        left = a_buffer.index(slot).slice(GROUP * TILE, TILE)
        total = warpgroup_mma(left, b_buffer.index(slot).permute((1, 0)), total, is_async=True)
        if BUG == "early":
            mbarrier.arrive(empty.index(slot))
        if BUG == "unfinished":
            total = warpgroup_mma_wait(1, deps=[total])
        elif BUG != "result":
            total = warpgroup_mma_wait(0, deps=[total])
        if BUG == "twice":
            mbarrier.arrive(empty.index(slot), count=2)
        elif BUG != "early" and (BUG != "arrive" or GROUP == 0):
            mbarrier.arrive(empty.index(slot), count=1)
    row = (gl.program_id(0) * 2 + GROUP) * TILE + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * TILE + column[None, :], total * 1.0)


@gluon.jit
def matmul(a, b, out, steps, TILE: gl.constexpr, BUG: gl.constexpr = ""):
    """out = a @ b.T for b in tiles, each of them transposed."""
    a_buffer = gl.allocate_shared_memory(a.dtype, [SLOTS, *a.block_shape], a.layout)
    b_buffer = gl.allocate_shared_memory(b.dtype, [SLOTS, *b.block_shape], b.layout)
    full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 2)
    gl.warp_specialize(
        [
            (consume, (0, out, a_buffer, b_buffer, full, empty, steps, TILE, BUG)),
            (consume, (1, out, a_buffer, b_buffer, full, empty, steps, TILE, BUG)),
            (produce, (a, b, a_buffer, b_buffer, full, empty, steps, TILE, BUG)),
        ],
        [4, 1],
        [240, 24],
    )


def multiplied(seed=0, bug="", steps=5, tile=64):
    a, b = (
        numbers(i, *shape, dtype=ml_dtypes.bfloat16)
        for i, shape in enumerate([(4 * tile, steps * tile), (steps * tile, tile)])
    )
    out = np.full((4 * tile, tile), np.nan, np.float32)
    tiles = Tiles(a, a.shape, (2 * tile, tile)), Tiles(b, b.shape, (tile, tile))
    run(matmul, (2,), *tiles, out, steps, seed=seed, TILE=tile, BUG=bug)
    left, right = a.astype(float).reshape(4 * tile, steps, tile), b.astype(float).reshape(steps, tile, tile)
    return out, np.einsum("mik,ink->mn", left, right)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipelined_product_is_the_same_in_every_order(seed):
    got, wanted = multiplied(seed)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("arrive", r"deadlock: .*1 arrivals and 0 bytes in produce, line \d+: mbarrier.wait\(empty"),
        ("result", "result of a product"),
        ("unfinished", "result of a product"),
        ("twice", "overrun: waits for phase"),
        ("ahead", "1 arrivals at a barrier that expects 0 more"),
    ],
)
def test_a_product_with_a_bug_is_refused(bug, message, seed):
    with pytest.raises(KernelBug, match=message):
        multiplied(seed, bug)


@pytest.mark.parametrize("bug", ["early", "unwaited"])
def test_a_race_shows_in_some_order(bug):
    def wrong(seed):
        try:
            got, wanted = multiplied(seed, bug)
        except KernelBug:
            return True
        return not np.allclose(got, wanted, rtol=1e-5, atol=1e-4)

    assert any(map(wrong, SEEDS))


def test_no_thread_outlives_a_deadlock():
    before = threading.active_count()
    with pytest.raises(KernelBug, match="deadlock"):
        multiplied(bug="arrive")
    assert threading.active_count() == before


# --- a phase that is overrun, named barriers --------------------------------------------------------------------------


@gluon.jit
def ahead(flags, COUNT: gl.constexpr):
    for _ in range(COUNT):
        mbarrier.arrive(flags.index(0), count=1)


@gluon.jit
def behind(flags, COUNT: gl.constexpr):
    for i in range(COUNT):
        mbarrier.wait(flags.index(0), i & 1)


@gluon.jit
def race(x, COUNT: gl.constexpr):
    flags = barriers(1, 1)
    gl.warp_specialize([(behind, (flags, COUNT)), (ahead, (flags, COUNT))], [4], [24])


def test_an_overrun_phase_is_refused():
    run(race, (1,), np.zeros(1), COUNT=1)
    run(race, (1,), np.zeros(1), COUNT=3, seed=1)  # here the one that waits is always in time
    with pytest.raises(KernelBug, match="overrun: waits for phase 0 of a barrier when phase 2 is over"):
        run(race, (1,), np.zeros(1), COUNT=3)


@gluon.jit
def together(NUMBER: gl.constexpr):
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, 0;", "=r,n", [gl.to_tensor(NUMBER)], gl.int32, False, 1)


@gluon.jit
def swap_half(GROUP: gl.constexpr, x, y, buffer, TURNS: gl.constexpr, SIZE: gl.constexpr, SYNC: gl.constexpr):
    at = gl.arange(0, SIZE)
    for turn in range(TURNS):
        buffer.index(turn % 2).slice(GROUP * SIZE, SIZE).store(gl.load(x + turn * 2 * SIZE + GROUP * SIZE + at))
        if SYNC == "assembly":
            together(8)
        if SYNC == "arguments":
            primitives.named_barrier_sync(8, 256)
        other = buffer.index(turn % 2).slice((1 - GROUP) * SIZE, SIZE).load()
        gl.store(y + turn * 2 * SIZE + GROUP * SIZE + at, other)


@gluon.jit
def swap(x, y, TURNS: gl.constexpr, SIZE: gl.constexpr, SYNC: gl.constexpr):
    buffer = gl.allocate_shared_memory(gl.float32, [2, 2 * SIZE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rest = x, y, buffer, TURNS, SIZE, SYNC
    gl.warp_specialize([(swap_half, (0, *rest)), (swap_half, (1, *rest))], [4], [24])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("number_of_threads", ["assembly", "arguments"])
def test_a_named_barrier_keeps_groups_together(seed, number_of_threads):
    x, y = numbers(0, 6, 2, 4), np.empty((6, 2, 4), np.float32)
    run(swap, (1,), x, y, seed=seed, TURNS=6, SIZE=4, SYNC=number_of_threads)
    np.testing.assert_array_equal(y, x[:, ::-1])
    run(swap, (1,), x, y, seed=seed, TURNS=6, SIZE=4, SYNC="")
    assert np.isnan(y[0, seed ^ 1]).all()


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
