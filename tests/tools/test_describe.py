import numpy as np
import pytest
from matplotlib import image

import sparse_layers as sl

SIGNS = {"·": 0, "▪": 1, "■": 2}


def read(text):
    return np.array([[SIGNS[sign] for sign in line.split(" ")] for line in text.split("\n")])


def expected_cells(mask, q_len, kv_len, cell):
    dense = mask.dense(q_len, kv_len)
    return np.array(
        [
            [
                2 if tile.all() else int(tile.any())
                for tile in (dense[a : a + cell, b : b + cell] for b in range(0, kv_len, cell))
            ]
            for a in range(0, q_len, cell)
        ]
    )


MASKS = {
    "causal": sl.Causal(),
    "strided": sl.preset("strided", local_attn_ctx=7),
    "window | strided": sl.Causal() & (sl.Window(20) | sl.Strided(40)),
    "fixed": sl.preset("sparse_transformer_fixed", stride=25, summary=6),
    "bigbird": sl.preset("bigbird", block=8),
    "mask_mod": sl.MaskMod(lambda b, h, q, k: (q + k) % 50 < 13),
    "array": sl.Array(np.random.default_rng(0).random((150, 150)) < 0.002),
    "nothing": sl.Causal() & ~sl.Causal(),
    "everything": sl.Causal() | ~sl.Causal(),
}


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


def test_draw_writes_and_replaces_a_png(tmp_path):
    path = tmp_path / "mask"
    path.write_text("old")
    sl.draw((sl.Causal(), sl.Full()), 100, path, kv_len=50)
    both = image.imread(path, format="png")
    sl.draw(sl.Empty(), 100, str(path))
    empty = image.imread(path, format="png")
    assert both.shape[1] > 1.5 * empty.shape[1]
    # The colour of 'allowed' covers much of the first picture, and nothing of the second.
    dark = [np.mean(np.abs(x[..., :3] - np.array([0x1F, 0x4E, 0x8C]) / 255).max(-1) < 0.02) for x in (both, empty)]
    assert dark[0] > 0.3 and dark[1] == 0
    with pytest.raises(FileNotFoundError):
        sl.draw(sl.Causal(), 4, tmp_path / "no folder" / "x.png")


def test_draw_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'sparse-layers\[examples\]'"):
        sl.draw(sl.Causal(), 4, tmp_path / "x.png")


@pytest.mark.parametrize("name", MASKS)
def test_describe_counts_pairs_and_blocks(name):
    mask, length = MASKS[name], 150
    dense = mask.dense(length)
    lines = sl.describe(mask, length, block=16).split("\n")
    pairs = next(line for line in lines if line.startswith("allowed pairs"))
    assert pairs.startswith(f"allowed pairs: {dense.sum()} of {length**2} ({dense.mean():.4%})")
    assert ("of the causal pairs" in pairs) == (not np.any(np.triu(dense, 1)))
    kept = np.count_nonzero(expected_cells(mask, length, length, 16))
    assert any(line.startswith(f"blocks of 16 x 16 kept: {kept} of 100 ") for line in lines)
    assert sl.picture(mask, length) in "\n".join(lines)


def test_describe_reports_the_plan():
    mask = sl.preset("sparse_transformer_strided")
    plan = sl.make_plan(mask, 4096)
    text = sl.describe(mask, 4096)
    assert "plan: 2 passes" in text and len(plan.chains[0]) == 2
    for link in plan.chains[0]:
        assert f"{link.q_order}; {link.fwd_blocks} of 1024 blocks of 128 x 128" in text
    (chosen, cost), *others = plan.candidates[0]
    assert f"chosen: {chosen}, cost {cost:.3g} pairs" in text
    assert all(f"not taken: {name}" in text for name, _ in others)
    causal = sl.make_plan(sl.Causal(), 4096).candidates[0][0][1]
    assert f"expected saving: {causal / cost:.1f} times less work than causal attention" in text
    assert "1.0 times less work than causal attention" in sl.describe(sl.Causal(), 500)
    assert "1.0 times less work than full attention" in sl.describe(sl.Full(), 500)
    other = sl.describe(mask, 4096, fwd_params=sl.FwdParams(q_blocksize=64, kv_blocksize=64))
    assert "blocks of 64 x 64" in other and "blocks of 128 x 128 kept" in other


def test_describe_estimates_long_sequences():
    # Whole rows are counted, so a window's estimate misses only the few rows at the start.
    line = next(x for x in sl.describe(sl.Window(99), 20000).split("\n") if x.startswith("allowed pairs"))
    assert line.endswith("(estimated from 1024 rows)") and "of the causal pairs" in line
    true = 20000 * 100 - 99 * 100 // 2
    assert abs(int(line.split()[2]) / true - 1) < 0.001


def test_describe_by_head_and_of_nothing():
    text = sl.describe((sl.Causal(), sl.Empty()), 64)
    assert text.startswith("heads 0, 2, ...:\nCausal()\n") and "\n\nheads 1, 3, ...:\nEmpty()\n" in text
    assert "plan: 0 passes" in text and "expected saving: nothing to compute (cost 0 against " in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(seq_len=0), "q_len must be an integer >= 1, got 0"),
        (dict(seq_len=4, block=0), "block must be an integer >= 1, got 0"),
        (dict(seq_len=4, size=0), "size must be an integer >= 1, got 0"),
    ],
)
def test_describe_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        sl.describe(sl.Causal(), **arguments)
