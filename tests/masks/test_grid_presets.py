"""Presets of images and videos against their systems' definitions, pair by pair."""

import itertools
import math

import numpy as np
import pytest

import sparse_layers as sl
from tests.ops.cases import NEEDED, SMALL

NAMES = sorted(name for name in SMALL if "shape" in NEEDED[name])


def pairs(shape, sees):
    """Bool [tokens, tokens]: what ``sees`` says of the coordinates of a query and a key."""
    places = list(itertools.product(*map(range, shape)))
    return np.array([[bool(sees(q, k)) for k in places] for q in places])


def check(name, shape, sees, **options):
    np.testing.assert_array_equal(sl.preset(name, shape=shape, **options).dense(math.prod(shape)), pairs(shape, sees))


# --- by axis ---------------------------------------------------------------------------------------------------------


def natten(i, n, kernel, dilation, causal):
    """The keys of one query on one axis: of its reference kernels, with a stride of 1, in its dilation group."""
    group = list(range(i % dilation, n, dilation))
    index, length, left, right = i // dilation, len(group), kernel // 2, kernel // 2 + kernel % 2 - 1
    if causal:
        return group[max(index - left - right, 0) : min(index + 1, length)]
    start = max(index - left, 0) + (index + right >= length) * (length - right - index - 1)
    return group[start : start + kernel]


@pytest.mark.parametrize(
    ("shape", "kernel", "dilation", "causal"),
    [
        ((9, 11), 5, 1, False),
        ((9, 11), (4, 3), (2, 3), (False, True)),
        ((13,), 6, 2, True),
        ((5, 7, 6), (3, 2, 6), (1, 3, 1), (True, False, False)),
        ((4, 4), 4, 1, False),
    ],
)
def test_neighborhood(shape, kernel, dilation, causal):
    each = [x if isinstance(x, tuple) else (x,) * len(shape) for x in (kernel, dilation, causal)]

    def sees(q, k):
        return all(j in natten(i, *axis) for i, j, *axis in zip(q, k, shape, *each, strict=True))

    check("neighborhood", shape, sees, kernel=kernel, dilation=dilation, causal=causal)


@pytest.mark.parametrize(
    ("shape", "kernel", "tile"),
    [
        ((4, 8, 6), (1, 3, 2), (2, 2, 3)),  # 2 of 2 tiles: all
        ((10, 12), 3, 2),
        ((12,), 5, 1),
        ((11, 13), (3, 4), (3, 4)),  # the last tiles are smaller
    ],
)
def test_sliding_tile(shape, kernel, tile):
    each = [x if isinstance(x, tuple) else (x,) * len(shape) for x in (kernel, tile)]

    def in_window(i, j, n, kernel, tile):
        """Its window has a centre, which stays away from the edges by half of it."""
        tiles, reach = -(-n // tile), kernel // 2
        centre = min(max(i // tile, reach), tiles - 1 - reach)
        return abs(centre - j // tile) <= reach

    check(
        "sliding_tile",
        shape,
        lambda q, k: all(in_window(*axis) for axis in zip(q, k, shape, *each, strict=True)),
        kernel=kernel,
        tile=tile,
    )


@pytest.mark.parametrize(
    ("shape", "size", "shift"), [((8, 12), 4, 2), ((8, 12), 4, 0), ((14, 7), 7, 3), ((4, 6, 6), (2, 3, 6), (1, 2, 0))]
)
def test_windows_are_those_of_the_cyclic_shift_and_its_mask(shape, size, shift):
    sizes, shifts = (x if isinstance(x, tuple) else (x,) * len(shape) for x in (size, shift))
    moved = np.arange(math.prod(shape)).reshape(shape)
    moved = np.roll(moved, [-x for x in shifts], axis=range(len(shape)))
    window, region = {}, {}
    for at in itertools.product(*map(range, shape)):
        token = moved[at]
        window[token] = [x // side for x, side in zip(at, sizes, strict=True)]
        edges = [(n - side, n - first) for n, side, first in zip(shape, sizes, shifts, strict=True)]
        # Three stretches an axis: the last window is of what was there, and of what came around.
        region[token] = [(x >= low) + (x >= high) for x, (low, high) in zip(at, edges, strict=True)]
    wanted = [[window[q] == window[k] and region[q] == region[k] for k in sorted(window)] for q in sorted(window)]
    mask = sl.preset("windows", shape=shape, size=size, shift=shift)
    np.testing.assert_array_equal(mask.dense(len(window)), wanted)


def test_windows_that_do_not_divide_an_axis():
    parts = [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9], [10]]
    check("windows", (11, 2), lambda q, k: any({q[0], k[0]} <= set(part) for part in parts), size=(4, 2), shift=(2, 0))


@pytest.mark.parametrize(
    ("shape", "axes", "free"),
    [
        ((5, 7), (-2, -1), {0, 1}),
        ((5, 7), 1, {1}),
        ((5, 7), -2, {0}),
        ((3, 4, 5), (-2, -1), {1, 2}),
        ((3, 4, 5), (0, 1, 2, 0), {0, 1, 2}),
        ((9,), 0, {0}),
    ],
)
def test_axial(shape, axes, free):
    check(
        "axial",
        shape,
        lambda q, k: {a for a, (i, j) in enumerate(zip(q, k, strict=True)) if i != j} in [set(), *({a} for a in free)],
        axes=axes,
    )


# --- images, token by token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 3), (3, 1), (1, 7)])
def test_image_strided(shape):
    n, row = math.prod(shape), math.prod(shape[1:])
    wanted = np.zeros((n, n), bool)
    for i in range(n):
        wanted[i, max(0, i - row) : i + 1] = True  # A1
        wanted[i, [j for j in range(i + 1) if (i - j) % row == 0]] = True  # A2
    mask = sl.preset("image_strided", shape=shape)
    np.testing.assert_array_equal(mask.dense(n), wanted)
    np.testing.assert_array_equal(wanted, sl.preset("sparse_transformer_strided", stride=row).dense(n))


@pytest.mark.parametrize(("shape", "summary"), [((6, 5), 2), ((4, 3, 3), 1), ((3, 2), 2)])
def test_image_fixed(shape, summary):
    n, row = math.prod(shape), math.prod(shape[1:])
    wanted = np.zeros((n, n), bool)
    for i, j in itertools.product(range(n), repeat=2):
        wanted[i, j] = j <= i and (j // row == i // row or j % row in range(row - summary, row))
    np.testing.assert_array_equal(sl.preset("image_fixed", shape=shape, summary=summary).dense(n), wanted)


# --- videos ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "multiplier", "block"),
    [((5, 3, 4), 1, 1), ((5, 3, 4), 2, 5), ((3, 5, 5), 1, 8), ((7, 4), 1, 4), ((2, 8, 16), 1, 128), ((9, 2, 1), 1, 1)],
)
def test_spatial_temporal(shape, multiplier, block):
    """Sparse VideoGen's one window, over tokens as they are, and over tokens sorted by place."""
    frames, places = shape[0], math.prod(shape[1:])
    reach = math.floor(multiplier * places / block) * block
    distance = np.arange(frames * places)[:, None] - np.arange(frames * places)
    window = np.abs(distance) < reach
    by_place = np.arange(frames * places).reshape(frames, places).T.ravel()  # tokens in the order of temporal heads
    temporal = np.zeros_like(window)
    temporal[np.ix_(by_place, by_place)] = window
    masks = sl.preset("spatial_temporal", shape=shape, multiplier=multiplier, block=block)
    for mask, wanted in zip(sl.as_masks(masks), (window, temporal), strict=True):
        np.testing.assert_array_equal(mask.dense(frames * places), wanted)


@pytest.mark.parametrize("shape", [(9, 3, 4), (12, 11), (5, 4, 4), (20, 3), (17, 1, 2), (1, 4, 3), (2, 3)])
def test_radial(shape):
    frames, places = shape[0], math.prod(shape[1:])

    def sees(q, k):
        (i, x), (j, y) = q, k
        m = 2 ** math.floor(math.log2(max(abs(i - j), 1)))
        if m <= places and abs(x - y) + 1 <= places / m:
            return True
        return x == y and abs(i - j) % math.ceil(m / places) == 0

    np.testing.assert_array_equal(
        sl.preset("radial", shape=shape).dense(frames * places), pairs((frames, places), sees)
    )


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_tokens_before_and_beyond_the_grid_are_in_no_pair(name):
    options = SMALL[name] | {"offset": 0}
    size = math.prod(options["shape"])
    for mask, moved in zip(*(sl.as_masks(sl.preset(name, **options | {"offset": x})) for x in (0, 13)), strict=True):
        wanted = np.zeros((size + 20, size + 20), bool)
        wanted[13 : size + 13, 13 : size + 13] = mask.dense(size)
        np.testing.assert_array_equal(moved.dense(size + 20), wanted)
        wanted[:13] = wanted[:, :13] = True
        np.testing.assert_array_equal((moved | sl.Global(13)).dense(size + 20), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_block_states_are_right(name):
    for mask in sl.as_masks(sl.preset(name, **SMALL[name])):
        tiles = mask.dense(240).reshape(30, 8, 20, 12).swapaxes(1, 2)
        q, k = 8 * np.arange(30)[:, None], 12 * np.arange(20)
        states = mask.block_state(q, q + 7, k, k + 11)
        wanted = tiles.any((2, 3)).astype(int) + tiles.all((2, 3))
        np.testing.assert_array_equal(states[states != 3], wanted[states != 3])
        assert np.mean(states == 3) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_long_videos_are_planned_in_closed_form(monkeypatch, name):
    looked_at = 0
    for kind in (sl.Grid, sl.ColumnMajor, sl.Radial):

        def counted(self, q, k, call=kind.__call__):
            nonlocal looked_at
            looked_at += np.broadcast(q, k).size
            return call(self, q, k)

        monkeypatch.setattr(kind, "__call__", counted)
    plan = sl.make_plan(sl.preset(name, shape=(31, 65, 64), offset=0), 2**17, implementation="xla")
    # Parts of tiles are not always decided: a few are looked at pair by pair, of all 2**34 pairs.
    assert all(chain for chain in plan.chains) and looked_at < 2**22


def test_options_in_the_name():
    assert sl.preset("neighborhood:shape=9x12,kernel=3x5,causal=truexFalse") == sl.preset(
        "neighborhood", shape=(9, 12), kernel=(3, 5), causal=(True, False)
    )
    assert sl.preset("axial:shape=4x5x6,axes=-3x-1") == sl.preset("axial", shape=[4, 5, 6], axes=(0, 2))
    assert sl.preset("windows:shape=64", size=np.array([8])) == sl.preset("windows", shape=np.array([64]), size=8)
    assert sl.preset("radial:offset=3", shape=(4, 5)) == sl.preset("radial: shape=4x5 , offset=3")
    assert sl.as_masks("axial:shape=8x8,axes=1") == (sl.preset("axial", shape=(8, 8), axes=-1),)


def test_they_are_described_and_drawn():
    for name in NAMES:
        mask = sl.preset(name, **{"offset": 0} | SMALL[name])
        assert "allowed pairs" in sl.describe(mask, 300)
        assert len(sl.draw(mask, 300).axes) == len(sl.as_masks(mask))
        assert all("<svg" in one._repr_html_() for one in sl.as_masks(mask))
