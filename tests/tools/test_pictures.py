import dataclasses
import functools
import operator
import sys

import matplotlib
import numpy as np
import pytest
from flax import nnx
from matplotlib import image
from matplotlib.figure import Figure

import sparse_layers as sl
from tests.tools.cases import MASKS, expected_cells

SIGNS = {"·": 0, "▪": 1, "■": 2}


def read(text):
    return np.array([[SIGNS[sign] for sign in line.split(" ")] for line in text.split("\n")])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "q_len, kv_len, size, cell", [(5, 5, 5, 1), (33, 48, 48, 1), (150, 150, 12, 16), (150, 90, 48, 4), (90, 7, 12, 8)]
)
def test_pictures_show_the_mask(name, q_len, kv_len, size, cell):
    cells = read(sl.picture(MASKS[name], q_len, kv_len, size=size))
    np.testing.assert_array_equal(cells, expected_cells(MASKS[name], q_len, kv_len, cell))


def test_large_pictures_are_sound_and_mostly_exact():
    mask, true = sl.preset("bigbird", block=32), sl.preset("bigbird", block=1)
    cells = read(sl.picture(mask, 32 * 512, size=32))
    expected = expected_cells(true, 512, 512, 16)
    assert np.all(cells[expected == 1] == 1)
    assert np.all((cells == expected) | (cells == 1))
    assert np.mean(cells == expected) > 0.95


def test_pictures_by_head():
    text = sl.picture((sl.Causal(), sl.Full(), sl.Window(0)), 2)
    assert text == "heads 0, 3, ...:\n■ ·\n■ ■\nheads 1, 4, ...:\n■ ■\n■ ■\nheads 2, 5, ...:\n■ ·\n· ■"
    assert sl.picture((sl.Full(), sl.Full()), 1) == "■"


def test_pictures_of_arrays():
    assert sl.picture(np.eye(2, dtype=bool), 2) == "■ ·\n· ■"


def test_pictures_of_any_length():
    # Without looking at pairs one by one: a million million million of them.
    assert sl.picture(sl.Causal() & sl.Window(1 << 20), 10**9, size=4) == "▪ · · ·\n▪ ▪ · ·\n· ▪ ▪ ·\n· · ▪ ▪"
    assert "T = 1000000000, " in sl.draw(sl.Causal() & sl.Window(3), 10**9, size=64).axes[0].get_title()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(q_len=0), "q_len must be an integer >= 1, got 0"),
        (dict(q_len=4, kv_len=-1), "kv_len must be an integer >= 1, got -1"),
        (dict(q_len=4, size=0), "size must be an integer >= 1, got 0"),
        (dict(q_len=4.0), "q_len must be an integer >= 1, got 4.0"),
    ],
)
def test_picture_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        sl.picture(sl.Causal(), **arguments)


def test_pictures_on_a_grid():
    mask, seen = (
        sl.Grid((3, 2, 4), (sl.Causal(), sl.Full(), sl.Window(1, 1)), offset=5),
        {"■": 1, "●": 1, "·": 0, "○": 0},
    )
    text = sl.grid_picture(mask, (3, 2, 4), query=(1, 0, 2), offset=5)
    frames = [[line.split("   ")[f] for line in text.splitlines()] for f in range(3)]
    values = [[[seen[sign] for sign in row.split(" ")] for row in frame] for frame in frames]
    np.testing.assert_array_equal(values, mask.dense(29)[5 + 10, 5:].reshape(3, 2, 4))
    assert frames[1][0][2 * 2] == "●" and text.count("●") == 1
    assert sl.grid_picture(sl.Strided(2), (7,), query=(2,)) == "■ · ● · ■ · ■"
    assert sl.grid_picture("causal", np.array([1, 2]), query=[0, 0]) == "● ·"
    assert sl.grid_picture((~sl.Window(0), sl.Full()), (2, 1), (0, 0)) == (
        "heads 0, 2, ...:\n○\n■\nheads 1, 3, ...:\n●\n■"
    )


def test_grid_pictures_begin_at_the_offset_of_the_grid():
    near = sl.Grid((3, 4), sl.Window(1, 1), offset=2)
    alone = sl.grid_picture(sl.Grid((3, 4), sl.Window(1, 1)), (3, 4), (1, 2))
    for mask in (near, near | sl.Global(2), sl.Causal().T & near | near, sl.Shifted(near, 1), near.T):
        assert sl.grid_picture(mask, (3, 4), (1, 2)) == alone
    assert sl.grid_picture(near, (3, 4), (1, 2), offset=2) == alone
    two = near | sl.Grid((1, 4), sl.Full(), offset=20)
    assert sl.grid_picture(two, (3, 4), (1, 2), offset=2) == alone
    for mask, offset, message in (
        (near, 0, "offset must be where a grid of the mask begins, 2, got 0"),
        (two, None, "offset must be where a grid of the mask begins, 2 or 20, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            sl.grid_picture(mask, (3, 4), (1, 2), offset=offset)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(shape=(), query=()), r"shape must be lengths of axes, of 65536 tokens at most, got \(\)"),
        (dict(shape=(300, 300), query=(0, 0)), r"of 65536 tokens at most, got \(300, 300\)"),
        (dict(shape=(4, 0), query=(0, 0)), r"shape\[1\] must be an integer >= 1, got 0"),
        (dict(shape=(4, 4), query=(0, -1)), r"query\[1\] must be an integer >= 0, got -1"),
        (
            dict(shape=(4, 4), query=(0, 4)),
            r"one coordinate for each axis of shape=\(4, 4\), less than it, got \(0, 4\)",
        ),
        (dict(shape=(4, 4), query=3), r"one coordinate for each axis of shape=\(4, 4\), less than it, got \(3,\)"),
        (dict(shape=(4, 4), query=(0, 0), offset=-1), "offset must be an integer >= 0, got -1"),
    ],
)
def test_grid_picture_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        sl.grid_picture(sl.Causal(), **arguments)


def test_draw_writes_and_replaces_a_png(tmp_path):
    path = tmp_path / "mask.png"
    path.write_text("old")
    sl.draw((sl.Causal(), sl.Full()), 100, path, kv_len=50)
    both = image.imread(path, format="png")
    sl.draw(sl.Empty(), 100, str(path))
    empty = image.imread(path, format="png")
    assert both.shape[1] > 1.5 * empty.shape[1]
    # The colour of 'allowed' covers much of the first picture, and nothing of the second.
    dark = [np.mean(np.abs(x[..., :3] - np.array([0x1F, 0x4E, 0x8C]) / 255).max(-1) < 0.02) for x in (both, empty)]
    assert dark[0] > 0.3 and dark[1] == 0


def test_draw_leaves_pyplot_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it fails
    settings = matplotlib.rcParams.keys() - {"backend"}  # which pyplot sets, and asks pyplot for
    before = {name: matplotlib.rcParams[name] for name in settings}
    figure = sl.draw((sl.Causal(), sl.Window(3)), 40, tmp_path / "MASK.SVG", 30)
    assert {name: matplotlib.rcParams[name] for name in settings} == before
    assert b"<svg" in (tmp_path / "MASK.SVG").read_bytes()
    titles = [axes.get_title().split("\n") for axes in figure.axes]
    share = sl.Causal().dense(40, 30).mean()
    assert titles[0] == ["Causal()", f"T = 40, S = 30, {share:.4%} of the pairs allowed, heads 0, 2, ..."]
    assert titles[1][0] == "Window(left=3, right=0)" and titles[1][1].endswith("heads 1, 3, ...")


def test_draw_one_head_into_given_axes():
    own, named = Figure(), "a $ and a mask with a very long name " * 3
    left, right = own.subplots(1, 2)
    mask = dataclasses.make_dataclass("Named", [], bases=(sl.Window,), frozen=True, eq=False, repr=False)
    mask.__repr__ = lambda self: named
    assert sl.draw((sl.Full(), mask(3)), 64, ax=right, head=3) is own
    *lines, numbers = right.get_title().split("\n")
    assert not left.images and numbers == "T = 64, 6.1035% of the pairs allowed, head 3"
    assert " ".join(lines) == named.strip() and max(map(len, lines)) <= 56
    np.testing.assert_array_equal(right.images[0].get_array(), 2 * sl.Window(3).dense(64))
    own.canvas.draw()  # and a $ means nothing


def test_draw_wraps_long_formulas_in_the_title():
    mask = sl.Causal() & (sl.Window(1023) | sl.Global(64) | sl.Strided(128))
    figure = sl.draw(mask, 256)
    *lines, numbers = figure.axes[0].get_title().split("\n")
    assert " ".join(lines) == repr(mask) and len(lines) > 1 and numbers.startswith("T = 256, ")
    figure.canvas.draw()
    title, page = figure.axes[0].title.get_window_extent(), figure.bbox
    assert page.x0 <= title.x0 and title.x1 <= page.x1 and title.y1 <= page.y1
    *lines, _ = sl.draw(functools.reduce(operator.or_, map(sl.Window, range(50))), 64).axes[0].get_title().split("\n")
    assert len(lines) <= 5 and lines[-1].endswith("...") and max(map(len, lines)) <= 56


def test_draw_outlines_the_blocks_of_each_pass():
    mask, params = sl.preset("sparse_transformer_strided", stride=16), sl.FwdParams(q_blocksize=32, kv_blocksize=32)
    plan = sl.make_plan(mask, 500, fwd_params=params, implementation="pallas_tpu")
    (chain,) = plan.chains
    assert len(chain) == 2 and not chain[1].kv_order.natural
    figure = sl.draw(plan, blocks=True)
    assert [axes.get_title().split("\n")[-1].partition(":")[0] for axes in figure.axes] == [
        "pass 1 of 2",
        "pass 2 of 2",
    ]
    for axes, block_pass in zip(figure.axes, chain, strict=True):
        rows, columns = block_pass.q_order.rows, block_pass.kv_order.rows
        dense = block_pass.mask.dense(rows, columns)
        np.testing.assert_array_equal(axes.images[0].get_array(), 2 * dense)
        assert f"{block_pass.fwd_blocks} of " in axes.get_title() and axes.get_xlabel() == f"key, {block_pass.kv_order}"
        corners = [path.get_extents().bounds for path in axes.collections[0].get_paths()]
        tiles = {
            (x, y) for y in range(0, rows, 32) for x in range(0, columns, 32) if dense[y : y + 32, x : x + 32].any()
        }
        assert {bounds[:2] for bounds in corners} == tiles and {bounds[2:] for bounds in corners} == {(32, 32)}
    assert not sl.draw(plan).axes[0].collections[0].get_paths()


def test_draw_subjects_that_have_plans():
    patterns = (sl.Window(3), (sl.Causal(), sl.Full()))
    options = {"patterns": patterns, "causal": False, "seq_len": 16}
    model = nnx.eval_shape(lambda: sl.SparseTransformer(8, 2, 4, 3, **options, rngs=nnx.Rngs(0)))
    figure, layer = sl.draw(model), sl.draw(model.blocks[1])
    titles = [axes.get_title().split("\n") for axes in (*figure.axes, *layer.axes)]
    assert [" of ".join(title[:-1]) for title in titles[:3]] == [
        "layers 0, 2 of 3 of Window(left=3, right=0)",
        "layers 1 of 3 of Causal()",
        "layers 1 of 3 of Full()",
    ]
    assert [title[1:] for title in titles[1:3]] == titles[3:]
    attention = model.blocks[0].attention
    outlined = sl.draw(attention, blocks=True).axes[0].collections[0].get_paths()
    assert len(outlined) == attention.plan.chains[0][0].fwd_blocks


def test_draw_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'sparse-layers\[examples\]'"):
        sl.draw(sl.Causal(), 4, tmp_path / "x.png")
