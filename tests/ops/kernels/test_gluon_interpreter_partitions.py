"""The interpreter of Gluon kernels runs partitions in every order, and sees deadlocks, races and overrun phases."""

import threading

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_layers.ops.kernels.hopper_gpu import primitives
from tests.ops.kernels.gluon_interpreter import Tiles
from tests.ops.kernels.gluon_kernels import SLOTS, barriers, load_tile, numbers, run
from tests.ops.kernels.numpy_types import KernelBug

SEEDS = range(6)  # all orders of three partitions

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
def sync_by_assembly(NUMBER: gl.constexpr):
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, 0;", "=r,n", [gl.to_tensor(NUMBER)], gl.int32, False, 1)


@gluon.jit
def swap_half(GROUP: gl.constexpr, x, y, buffer, TURNS: gl.constexpr, SIZE: gl.constexpr, SYNC: gl.constexpr):
    at = gl.arange(0, SIZE)
    for turn in range(TURNS):
        buffer.index(turn % 2).slice(GROUP * SIZE, SIZE).store(gl.load(x + turn * 2 * SIZE + GROUP * SIZE + at))
        if SYNC == "assembly":
            sync_by_assembly(8)
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
def test_a_named_barrier_synchronises_groups(seed, number_of_threads):
    x, y = numbers(0, 6, 2, 4), np.empty((6, 2, 4), np.float32)
    run(swap, (1,), x, y, seed=seed, TURNS=6, SIZE=4, SYNC=number_of_threads)
    np.testing.assert_array_equal(y, x[:, ::-1])
    run(swap, (1,), x, y, seed=seed, TURNS=6, SIZE=4, SYNC="")
    assert np.isnan(y[0, seed ^ 1]).all()
