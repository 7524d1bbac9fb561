"""Masks of grids against their definitions, written out pair by pair."""

import itertools

import jax
import numpy as np
import pytest

import sparse_layers as sl


def by_coordinates(shape, rules, length, offset=0):
    """Bool [length, length]: coordinates by counting, and a rule on each axis."""
    places = dict(enumerate(itertools.product(*map(range, shape)), start=offset))
    found = np.zeros((length, length), bool)
    for (q, at), (k, other) in itertools.product(places.items(), repeat=2):
        if max(q, k) < length:
            found[q, k] = all(rule(a, b) for rule, a, b in zip(rules, at, other, strict=True))
    return found


@pytest.mark.parametrize(
    ("shape", "axes", "rules"),
    [
        ((7, 9), (sl.Window(1, 1), sl.Window(2)), (lambda a, b: abs(a - b) < 2, lambda a, b: 0 <= a - b <= 2)),
        (
            (3, 4, 5),
            (sl.Causal(), sl.Full(), sl.Strided(2)),
            (lambda a, b: b <= a, lambda a, b: True, lambda a, b: (a - b) % 2 == 0),
        ),
        ((61,), (sl.BlockDiagonal(8),), (lambda a, b: a // 8 == b // 8,)),
        ((2, 3, 2, 4), (sl.Window(0),) * 3 + (sl.Full(),), (lambda a, b: a == b,) * 3 + (lambda a, b: True,)),
    ],
    ids=["2-D", "3-D", "1-D", "4-D"],
)
@pytest.mark.parametrize("offset", [0, 5])
def test_a_grid_asks_each_axis(shape, axes, rules, offset):
    size = int(np.prod(shape))
    for length in (size + offset, size // 2, size + offset + 9):
        wanted = by_coordinates(shape, rules, length, offset)
        np.testing.assert_array_equal(sl.Grid(shape, axes, offset).dense(length), wanted)
    grid = sl.Grid(shape, axes, offset=offset) & sl.Causal()  # raster order
    np.testing.assert_array_equal(grid.dense(size), np.tril(by_coordinates(shape, rules, size, offset)))


def natten(index, length, kernel, dilation, causal):
    """The keys of one query, by the words of its authors."""
    group = list(range(index % dilation, length, dilation))
    place = group.index(index)
    if causal:
        return group[max(0, place - kernel + 1) : place + 1]
    begin = min(max(place - kernel // 2, 0), len(group) - kernel)
    return group[begin : begin + kernel]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "kernel", "dilation"), [(20, 5, 1), (17, 4, 1), (23, 3, 5), (30, 7, 4), (8, 8, 1), (5, 1, 2)]
)
def test_neighborhood(length, kernel, dilation, causal):
    wanted = np.zeros((length + 3, length + 3), bool)
    for index in range(length):
        keys = natten(index, length, kernel, dilation, causal)
        assert causal or len(keys) == kernel
        wanted[index, keys] = True
    mask = sl.Neighborhood(length, kernel, dilation, causal)
    np.testing.assert_array_equal(mask.dense(length + 3), wanted)


def test_neighborhood_of_an_image():
    shape, options = (9, 12), ((9, 3, 2, False), (12, 5, 1, True))
    grid = sl.Grid(shape, [sl.Neighborhood(*x) for x in options])
    rules = [lambda a, b, x=x: b in natten(a, *x) for x in options]
    np.testing.assert_array_equal(grid.dense(108), by_coordinates(shape, rules, 108))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sl.Grid((), sl.Full()), ValueError, r"Grid: shape must be integers >= 1, one for each axis, got \(\)"),
        (lambda: sl.Grid((4, 0), sl.Full()), ValueError, r"shape must be integers >= 1.*got \(4, 0\)"),
        (lambda: sl.Grid((4, True), sl.Full()), ValueError, "shape must be integers >= 1"),
        (lambda: sl.Grid((2**16, 2**15), sl.Full()), ValueError, r"at most 2147483646 tokens, got \(65536, 32768\)"),
        (lambda: sl.Grid(16, sl.Full()), TypeError, "shape must be a sequence of lengths, got 16"),
        (lambda: sl.Grid("4x4", sl.Full()), TypeError, "shape must be a sequence of lengths, got '4x4'"),
        (lambda: sl.Grid((4, 4), (sl.Full(),)), ValueError, "axes must be one mask for each of the 2 axes, got 1"),
        (lambda: sl.Grid((4, 4), "causal"), TypeError, "axes must be masks.*got 'causal'"),
        (
            lambda: sl.Grid((4, 4), sl.Full(), offset=-1),
            ValueError,
            "Grid: offset must be an integer >= 0 or None, got -1",
        ),
        (lambda: sl.Grid(np.array(4), sl.Full()), TypeError, "shape must be a sequence of lengths, got array"),
        (
            lambda: sl.Grid((4, 6), sl.Neighborhood(6, 3)),
            ValueError,
            r"axes\[0\] must have the length of its axis, 4, got",
        ),
        (
            lambda: sl.Grid((4,), [sl.Array(np.eye(3) > 0)]),
            ValueError,
            r"axes\[0\] must cover its axis of 4, got shape",
        ),
        (lambda: sl.Neighborhood(10, 4, 3), ValueError, r"kernel \* dilation must be at most length, got 4 \* 3 > 10"),
        (lambda: sl.Neighborhood(10, 0), ValueError, "Neighborhood: kernel must be an integer >= 1, got 0"),
        (lambda: sl.Neighborhood(10, 2, causal=1), ValueError, "Neighborhood: causal must be true or false, got 1"),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_long_grids_are_planned_in_closed_form(monkeypatch):
    """Also where blocks are not whole rows: few pairs are looked at."""
    looked_at = 0

    def counted(self, q, k, call=sl.Grid.__call__):
        nonlocal looked_at
        looked_at += np.broadcast(q, k).size
        return call(self, q, k)

    monkeypatch.setattr(sl.Grid, "__call__", counted)
    mask = sl.Grid((31, 63, 131), [sl.Neighborhood(31, 5), sl.Neighborhood(63, 15), sl.Neighborhood(131, 15)])
    (passes,) = sl.make_plan(mask, mask.size, implementation="triton").chains
    assert sum(one.fwd_blocks for one in passes) < 2**19 and looked_at < 2**25 < mask.size**2 // 2**10


def test_block_states_of_any_dilation():
    """In a few steps: a million positions in thousands of residues."""
    for length, dilation, causal in itertools.product((22, 30, 47), (2, 3, 5, 7), (False, True)):
        mask = sl.Neighborhood(length, 3, dilation, causal)
        dense = mask.dense(60)
        q0, q1, k0, k1 = np.random.default_rng(length).integers(0, 60, (4, 300))
        for q, p, k, j in zip(*np.sort([q0, q1], axis=0), *np.sort([k0, k1], axis=0), strict=True):
            tile = dense[q : p + 1, k : j + 1]
            assert mask.block_state(q, p, k, j) == int(tile.any()) + int(tile.all())
    (passes,) = sl.make_plan(sl.Neighborhood(2**20, 5, 4096), 2**20, implementation="xla").chains
    assert 2**15 < sum(one.fwd_blocks for one in passes) < 2**17


def test_an_axis_is_not_asked_beyond_its_length():
    table = np.arange(5) % 2

    class Looked(sl.Mask):
        computable = False

        def __call__(self, q, k):
            return table[q] == table[k]

        def block_state(self, q0, q1, k0, k1):
            return np.where((q0 == q1) & (k0 == k1), 2 * (table[q0] == table[k0]), 1)

    for grid in (sl.Grid((5,), Looked(), offset=0), sl.Grid((5, 1), (Looked(), sl.Full()), offset=0)):
        assert grid.block_state([0, 3, 9], [0, 4, 20], [2, 2, 0], [2, 3, 4]).tolist() == [2, 1, 0]
        assert sl.make_plan(grid, 300).chains


def test_notebooks_show_the_whole_grid():
    assert "4096 queries, 4096 keys" in sl.Grid((64, 64), sl.Window(3, 3))._repr_html_()
    assert "4176 queries" in (sl.Grid((64, 64), sl.Window(3, 3), offset=77) & sl.Causal())._repr_html_()
    assert "100 queries" in sl.Neighborhood(100, 7)._repr_html_()


def test_attention_on_a_grid():
    """A prompt that all see and that sees all, then an image: as dense attention with the same mask."""
    mask = sl.Grid((6, 7), sl.Window(1, 1), offset=5) | sl.Global(5)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 47, 2, 16))
    actual, right = (sl.block_sparse_attention(q, k, v, mask, implementation=name) for name in ("xla", "reference"))
    np.testing.assert_allclose(actual, right, atol=1e-5)
