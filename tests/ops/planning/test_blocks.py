import numpy as np
import pytest

from sparse_layers.masks.adapters import MaskMod
from sparse_layers.masks.algebra import And, Array, Blocks, Mask
from sparse_layers.masks.primitives import (
    BlockDiagonal,
    Causal,
    Columns,
    Empty,
    Full,
    Global,
    LogSparse,
    Prefix,
    Random,
    Strided,
    Window,
)
from sparse_layers.masks.states import EMPTY, UNSURE
from sparse_layers.ops.planning import blocks
from sparse_layers.ops.planning.blocks import active_blocks, masked_tiles

CAUSAL = Causal()
CASES = [
    Full(),
    Empty(),
    CAUSAL,
    ~CAUSAL,
    CAUSAL.T,
    Window(7),
    Window(0, 9),
    Window(None, 3),
    Strided(1),
    Strided(6),
    CAUSAL & (Window(5) | Strided(8)),
    CAUSAL & (BlockDiagonal(8) | Columns(8, 6)),
    BlockDiagonal(12) & ~Window(2, 2),
    Prefix(5) | Global(3),
    Window(6) & ~Window(6),  # empty, but not to closed-form grades
    Window(6) | ~Window(6),  # full, likewise
    LogSparse(),
    Random(3, seed=2),
    Blocks(CAUSAL & (Window(1) | Random(1)), 8),
    Blocks(LogSparse(), 3) & CAUSAL,
    Array(np.random.default_rng(0).random((48, 40)) < 0.1),
    MaskMod(lambda b, h, q, k: (q * k) % 7 == h, head=3),
]
GRIDS = [(6, 6, 8, 8), (3, 7, 16, 8), (8, 3, 4, 16), (1, 1, 48, 40), (12, 48, 1, 1)]


def dense_states(mask, num_rows, num_columns, block_q, block_kv):
    dense = mask.dense(num_rows * block_q, num_columns * block_kv)
    tiles = dense.reshape(num_rows, block_q, num_columns, block_kv)
    return tiles.any((1, 3)).astype(int) + tiles.all((1, 3))


def check(mask, grid_shape):
    grid = active_blocks(mask, *grid_shape)
    states = dense_states(mask, *grid_shape)
    rows, columns = np.nonzero(states)
    np.testing.assert_array_equal(grid.rows, rows)
    np.testing.assert_array_equal(grid.columns, columns)
    np.testing.assert_array_equal(grid.states, states[rows, columns])
    assert (grid.num_rows, grid.num_columns) == grid_shape[:2]
    assert [x.dtype for x in grid[:3]] == [np.int32, np.int32, np.int8]


@pytest.mark.parametrize("grid_shape", GRIDS, ids=str)
@pytest.mark.parametrize("mask", CASES, ids=lambda mask: type(mask).__name__)
def test_lists_exactly_the_non_empty_blocks(mask, grid_shape):
    check(mask, grid_shape)


@pytest.mark.parametrize("grid_shape", [(50, 50, 2, 3), (33, 70, 3, 1), (21, 17, 5, 7)], ids=str)
@pytest.mark.parametrize("mask", CASES, ids=lambda mask: type(mask).__name__)
def test_coarse_cells_parts_and_small_chunks_change_nothing(mask, grid_shape, monkeypatch):
    monkeypatch.setattr(blocks, "_CELLS", 64)
    monkeypatch.setattr(blocks, "_ELEMENTS", 16)
    monkeypatch.setattr(blocks, "_PART", 2)
    active_blocks.cache_clear()
    check(mask, grid_shape)
    active_blocks.cache_clear()


def test_a_mask_is_never_asked_beyond_the_grid(monkeypatch):
    class CausalInGrid(Mask):
        def __call__(self, q, k):
            assert q.min() >= 0 and q.max() < 100 and k.min() >= 0 and k.max() < 102
            return CAUSAL(q, k)

        def block_state(self, q0, q1, k0, k1):
            assert np.min(q0) >= 0 and np.max(q1) < 100 and np.min(k0) >= 0 and np.max(k1) < 102
            assert np.all(q0 <= q1) and np.all(k0 <= k1)
            return np.where(CAUSAL.block_state(q0, q1, k0, k1) == EMPTY, np.int8(EMPTY), np.int8(UNSURE))

    monkeypatch.setattr(blocks, "_CELLS", 64)
    active_blocks.cache_clear()
    check(CausalInGrid(), (50, 34, 2, 3))
    active_blocks.cache_clear()


def test_a_million_tokens_evaluate_no_element_and_grade_few_cells():
    graded = []

    class Counting(Mask):
        def __call__(self, q, k):
            raise AssertionError("closed-form grades suffice")

        def block_state(self, q0, q1, k0, k1):
            graded.append(np.broadcast(q0, q1, k0, k1).size)
            return Window(1000).block_state(q0, q1, k0, k1)

    grid = active_blocks(Counting(), 8192, 8192, 128, 128)
    # Row i holds blocks i-8 .. i: the window of 1000 keys reaches 7 whole blocks back and into the eighth.
    assert len(grid.rows) == 9 * 8192 - 36
    assert max(graded) <= 1 << 20 and sum(graded) < 8192 * 8192 // 50


def test_parts_decide_what_whole_blocks_leave_open():
    class Graded(Mask):
        mask = CAUSAL & (Window(5) | Strided(8)) | Blocks(Random(2), 16)

        def __call__(self, q, k):
            assert np.broadcast(q, k).shape[1:] == (16, 16), "grades of parts suffice where samples do not"
            return self.mask(q, k)

        def block_state(self, q0, q1, k0, k1):
            return self.mask.block_state(q0, q1, k0, k1)

    np.testing.assert_array_equal(
        active_blocks(Graded(), 8, 8, 64, 64).states, active_blocks(Graded.mask, 8, 8, 64, 64).states
    )
    check(Graded.mask, (8, 8, 64, 64))


def test_positions_beyond_int32():
    grid = active_blocks(Window(0), 2**16, 1, 2**16, 2**16)  # 2**32 queries
    assert grid.rows.tolist() == [0] and grid.states.tolist() == [1]
    grid = active_blocks(And(Window(None), ~Prefix(2**16)), 2**16, 2, 2**16, 2**16)
    assert len(grid.rows) == 2**16 - 1 and (grid.columns == 1).all() and (grid.states == 2)[1:].all()
    far = np.array([2**30], np.int32)
    assert next(masked_tiles(Global(2**32), far, far, 4, 4)).tolist() == [[[False] * 4] * 4]


def test_cached_by_content_and_read_only():
    grid = active_blocks(CAUSAL & Window(3), 4, 4, 8, 8)
    assert active_blocks(Causal() & Window(3), 4, 4, 8, 8) is grid
    for array in grid[:3]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_masked_tiles_come_in_order_and_bounded_chunks(monkeypatch):
    monkeypatch.setattr(blocks, "_ELEMENTS", 100)
    rows, columns = np.array([3, 0, 2, 2, 1]), np.array([1, 1, 0, 2, 0])
    chunks = list(masked_tiles(LogSparse(), rows, columns, 6, 8))
    assert [c.shape for c in chunks] == [(2, 6, 8), (2, 6, 8), (1, 6, 8)]
    dense = LogSparse().dense(24, 24)
    for tile, row, column in zip(np.concatenate(chunks), rows, columns, strict=True):
        np.testing.assert_array_equal(tile, dense[row * 6 : row * 6 + 6, column * 8 : column * 8 + 8])


def test_the_work_follows_the_pattern():
    graded, evaluated = [], []

    class Counting(Mask):
        mask = CAUSAL & Blocks(Window(1) | Random(3), 64)

        def __call__(self, q, k):
            evaluated.append(np.broadcast(q, k).size)
            return self.mask(q, k)

        def block_state(self, q0, q1, k0, k1):
            graded.append(np.broadcast(q0, q1, k0, k1).size)
            return self.mask.block_state(q0, q1, k0, k1)

    # Where draws are everywhere, coarse cells leave much open, and finer ones little of that.
    grid = active_blocks(Counting(), 2048, 2048, 128, 128)
    assert sum(graded) < 2048 * 2048 // 8 and sum(evaluated) < 16 * 16 * len(grid.rows) // 4
    assert len(grid.rows) > 12000
    # Parts of a large block are many, of which a few elements leave few to be graded.
    graded.clear()
    evaluated.clear()
    active_blocks(Counting(), 64, 64, 1024, 1024)
    assert sum(graded) + sum(evaluated) < 50_000
