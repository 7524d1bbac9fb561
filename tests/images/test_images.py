"""The example of photographs: what is learnt, what is drawn, and that its loop is the one of the language model."""

import importlib.util
import json
import pathlib
import re
import shlex
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import sparse_layers as sl
from examples.images import generate, train
from examples.images.config import Config
from examples.images.photographs import Crops, load, source
from examples.images.sample import complete, pictures, write_grid
from examples.training import loop
from examples.training.config import Refusal, flag, options, settings
from examples.training.data import Batch
from examples.training.model import build

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "images" / "README.md").read_text(encoding="utf-8")
# A run of seconds; crops are wide enough for the default neighbourhood.
TINY = {
    "size": 8,
    "layers": 1,
    "features": 16,
    "heads": 2,
    "batch_size": 4,
    "steps": 30,
    "warmup": 2,
    "lr": 0.03,
    "eval_every": 15,
    "eval_batches": 2,
    "save_every": 15,
    "samples": 0,
}


def flags(**options):
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def smooth(number, height=20, width=24):
    """A photograph of slow waves in three colours, of few values."""
    rows, columns, colours = np.ogrid[:height, :width, :3]
    return (100 + 20 * np.sin(rows / 5 + number) + 20 * np.sin(columns / 7 + colours)).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs as people have them: PNG and JPEG, in folders, among other files."""
    out = tmp_path_factory.mktemp("photographs")
    (out / "more").mkdir()
    for i in range(4):
        Image.fromarray(smooth(i)).save(out / f"{i}.png")
        Image.fromarray(smooth(i + 4)).save(out / "more" / f"{i}.{('jpg', 'JPEG', 'Jpg', 'jpeg')[i]}", "JPEG")
    (out / "notes.txt").write_text("no photograph")
    return out


@pytest.fixture(scope="module")
def compared(folder, tmp_path_factory):
    """The folder of a comparison of the default patterns."""
    out = tmp_path_factory.mktemp("compared") / "runs"
    assert train.main(["--compare", *flags(**TINY, data=folder, out=out)]) == 0
    return out


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_crops_are_numbered_row_by_row_and_photograph_by_photograph(stride):
    rng = np.random.default_rng(0)
    photographs = [rng.integers(0, 256, shape, np.uint8) for shape in ((5, 7, 3), (3, 3, 3), (9, 4, 3))]
    crops = Crops(photographs, 3, stride)
    expected = [
        [0, *photograph[top : top + 3, left : left + 3].reshape(-1)]
        for photograph in photographs
        for top in range(0, photograph.shape[0] - 2, stride)
        for left in range(0, photograph.shape[1] - 2, stride)
    ]
    assert crops.count == len(expected)
    batch = crops.take(range(crops.count))
    assert batch.tokens.dtype == np.int32 and batch.segments is None
    np.testing.assert_array_equal(batch.tokens, expected)


def test_photographs_are_read_from_png_and_jpeg_and_split_by_their_names(folder):
    train_crops, heldout, digest = load(str(folder), 8, 3, 1)
    assert len(train_crops.photographs) + len(heldout.photographs) == 8 and heldout.photographs
    assert (train_crops.stride, heldout.stride) == (1, 8)
    found = [*train_crops.photographs, *heldout.photographs]
    for number in range(8):
        error = min(np.abs(photograph - smooth(number).astype(int)).mean() for photograph in found)
        assert error == 0 if number < 4 else error < 5  # JPEG loses some of the colours
    assert load(str(folder), 8, 3, 1)[2] == digest != load(str(folder), 8, 1, 1)[2]


def test_grey_and_smaller(tmp_path):
    for i in range(2):
        Image.fromarray(smooth(i)).save(tmp_path / f"{i}.png")
    side, _, _ = load(str(tmp_path), 8, 1, 2)
    (number,) = [i for i in range(2) if np.allclose(side.photographs[0], halved(smooth(i)), atol=1)]
    assert side.photographs[0].shape == (10, 12, 1) and number in (0, 1)


def halved(photograph):
    grey = photograph @ [0.299, 0.587, 0.114]
    return grey.reshape(10, 2, 12, 2, 1).mean((1, 3))


def test_each_crop_is_learnt_once_before_any_is_again(folder):
    found = source(str(folder), 16, 1, 1, seed=0, batch_size=9)
    crops, heldout, _ = load(str(folder), 16, 1, 1)
    assert crops.count % 9 == 0 and found.distinct == heldout.count == len(heldout.photographs)
    steps = crops.count // 9
    epoch = np.concatenate([found.batch(step).tokens for step in range(steps)])
    assert not np.array_equal(epoch, crops.take(range(crops.count)).tokens)
    assert sorted(map(tuple, epoch)) == sorted(map(tuple, crops.take(range(crops.count)).tokens))
    np.testing.assert_array_equal(found.batch(steps).tokens, found.batch(0).tokens)
    other = source(str(folder), 16, 1, 1, seed=1, batch_size=9)
    assert not np.array_equal(other.batch(0).tokens, found.batch(0).tokens)
    np.testing.assert_array_equal(found.heldout(found.distinct).tokens, heldout.take(range(heldout.count)).tokens)


def test_photographs_of_scikit_image():
    crops, heldout, _ = load("", 32, 3, 1)
    assert len(crops.photographs) == 4 and len(heldout.photographs) == 1
    for photograph in (*crops.photographs, *heldout.photographs):
        assert min(photograph.shape[:2]) >= 300 and photograph.std(2).max() > 10, "in colour"


def test_without_scikit_image(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match=r"pip install '\.\[images\]', or name a folder of PNG and JPEG files"):
        load("", 32, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "nowhere"}, "nowhere: No such file or directory"),
        ({"data": "empty"}, "of its PNG and JPEG files, 0 are learnt and 0 held out"),
        ({"data": "single"}, "of its PNG and JPEG files, 0 are learnt and 1 held out"),
        ({"data": "broken"}, "1.png: cannot identify image file"),
        ({"size": 21}, "20 x 24 pixels (after --shrink 1) hold no crop of --size 21"),
        ({"shrink": 3}, "7 x 8 pixels (after --shrink 3) hold no crop of --size 8"),
        ({"size": 1}, "--size must be at least 2, got 1"),
        ({"channels": 2}, "--channels must be one of 1, 3, got 2"),
        ({"pattern": "neighbourhood"}, "did you mean 'neighborhood'"),
        ({"pattern": "neighborhood:kernel=9"}, "--size 8 --channels 1: "),
        ({"pattern": "axial:shape=8x8"}, "shape"),
    ],
)
def test_wrong_requests_write_nothing(folder, tmp_path, capsys, change, message):
    for name in ("empty", "single", "broken"):
        (tmp_path / name).mkdir()
    shutil.copy(folder / "0.png", tmp_path / "single")
    shutil.copy(folder / "0.png", tmp_path / "broken")
    (tmp_path / "broken" / "1.png").write_bytes(b"no picture")
    change = {name: tmp_path / value if name == "data" else value for name, value in change.items()}
    assert train.main(flags(**{**TINY, "data": folder, "out": tmp_path / "run", **change})) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("train: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "run").exists()


def test_patterns_have_the_shape_of_a_crop():
    config = Config(size=8, channels=3)
    assert (config.seq_len, config.position_stride) == (192, 24)
    assert config.mask("axial:axes=-1") == sl.preset("axial", shape=(8, 24), axes=-1)
    assert config.mask("strided:local_attn_ctx=8") == sl.preset("strided", local_attn_ctx=8)
    # Of the third byte of the third pixel of the last row, what the default patterns see: bytes of near pixels.
    seen = {name: config.mask(name).dense(192)[7 * 24 + 8, : 7 * 24 + 9].sum() for name in Config.compared.split(",")}
    assert seen == {"causal": 177, "image_strided": 25 + 6, "neighborhood": 6 * 7 + 4, "axial": 7 + 9}


def test_the_papers_model_but_for_its_narrow_layers():
    config = Config(**settings(Config, {"config": "cifar10_paper"}))
    weights = nnx.state(nnx.eval_shape(lambda: build(config)), nnx.Param)
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    # The paper counts 59 million: half of each layer's queries and keys, and of its MLP, are not there.
    narrow = count - 128 * (256 * 256 + 4 * 256 * 256)
    assert config.seq_len == 3072 and round(narrow / 1e6) == 59


def test_every_default_pattern_learns(compared):
    record = json.loads((compared / "compare.json").read_text())
    assert [result["pattern"] for result in record["results"]] == Config.compared.split(",")
    for number, pattern in enumerate(Config.compared.split(","), 1):
        found = rows(compared / f"{number}_{pattern}")
        assert [row["step"] for row in found] == list(range(1, 31))
        # Less than bytes without a model, and than any model of single bytes.
        assert found[-1]["heldout_bpb"] < record["results"][0]["order0"] < 8
    assert (compared / "compare.png").exists()


def test_resumed_equals_uninterrupted(compared, tmp_path):
    before = compared / "2_image_strided"
    out = shutil.copytree(before, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "30")
    assert train.main(["--out", str(out), "--resume"]) == 0
    measured = ("seconds", "step_ms", "input_ms", "tokens_per_second", "memory_gb")
    kept = [[{k: v for k, v in row.items() if k not in measured} for row in rows(at)] for at in (before, out)]
    assert kept[0] == kept[1] and kept[0][15]["loss"] > 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in before.iterdir())


def test_sampling_with_the_cache_equals_the_full_forward():
    patterns = "image_strided+neighborhood:kernel=3x5+axial"
    model = build(Config(**{**TINY, "size": 6, "channels": 3, "layers": 3, "pattern": patterns}))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (2, model.seq_len)).astype(np.int32)
    forward, step = jax.jit(model), jax.jit(model.decode_step)
    full, (logits, caches) = forward(tokens), jax.jit(model.prefill)(tokens[:, :20])
    np.testing.assert_allclose(logits, full[:, 19], atol=1e-5)
    for position in range(20, model.seq_len):
        logits, caches = step(tokens[:, position], caches, np.full(2, position))
        np.testing.assert_allclose(logits, full[:, position], atol=1e-5, err_msg=f"{position}")

    # So the likeliest bytes one by one, the last of them too, are those of one forward over what they make.
    given = rng.integers(0, 256, (2, 30), np.uint8)
    crops = complete(model, given, temperature=0)
    np.testing.assert_array_equal(crops[:, :30], given)
    read = np.concatenate([np.zeros((2, 1), np.int32), crops[:, :-1]], axis=1)
    np.testing.assert_array_equal(crops[:, 30:], forward(read).argmax(-1)[:, 30:])


def test_pictures_keep_what_is_given(tmp_path):
    config = Config(**{**TINY, "channels": 3, "samples": 3})
    crops = np.random.default_rng(0).integers(0, 255, (3, 8, 8, 3), np.uint8)
    model = build(config)
    shown = pictures([model, model], crops)
    np.testing.assert_array_equal(shown[0], crops)
    for row in shown[1:4]:
        np.testing.assert_array_equal(row[:, :4], crops[:, :4])
    assert (shown[1][:, 4:] == 255).all()
    np.testing.assert_array_equal(shown[2], shown[3])  # the same model and seed
    assert len(shown) == 6 and not np.array_equal(shown[4][0], shown[4][1]), "samples differ"
    write_grid(shown, tmp_path / "grid.png")
    drawn = pixels(tmp_path / "grid.png")
    assert drawn.shape == (6 * 24 + 5 * 4, 3 * 24 + 2 * 4, 3)
    np.testing.assert_array_equal(drawn[28 * 2 + 1 : 28 * 2 + 24 : 3, 28 + 1 : 28 + 24 : 3], shown[2][1])
    assert (drawn[24:28] == 255).all() and (drawn[:, 24:28] == 255).all()

    # At the end of a run, some of the held-out crops, from the first to the last.
    five = np.concatenate([crops[:2], 0 * crops, crops[2:]])[[0, 2, 1, 3, 5]].reshape(5, -1)
    config.write_sample(model, Batch(np.pad(five, ((0, 0), (1, 0))).astype(np.int32), None), tmp_path)
    np.testing.assert_array_equal(pixels(tmp_path / "samples.png")[: 3 * 28], drawn[: 3 * 28])


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def test_generate_draws_several_runs(compared, tmp_path, capsys):
    out, picture = str(compared / "4_axial"), tmp_path / "both.png"
    arguments = ["--out", out, out, "--samples", "3", "--temperature", "0"]
    assert generate.main([*arguments, "--picture", str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    drawn = pixels(picture)
    assert drawn.shape == (6 * 28 - 4, 3 * 28 - 4)
    np.testing.assert_array_equal(drawn[2 * 28 : 3 * 28], drawn[3 * 28 : 4 * 28])
    assert generate.main([*arguments, "--picture", str(tmp_path / "nowhere" / "both.png")]) == 2
    assert "nowhere/both.png: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be at least 0 and finite, got -1.0"),
        (["--seed", "-1"], "--seed must be in 0..2**32 - 1, got -1"),
        (
            ["--picture", "nowhere/x.png", "--samples", "1", "--temperature", "0"],
            "--picture nowhere/x.png: No such file",
        ),
    ],
)
def test_generate_refuses(compared, capsys, arguments, message):
    assert generate.main(["--out", str(compared / "1_causal"), "--picture", "x.png", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_pages_commands_are_understood(tmp_path, monkeypatch, capsys):
    def stop(*args):
        raise Refusal("understood")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "train", stop)
    monkeypatch.setattr(loop, "compare", stop)
    mains = {"examples.images.train": train.main, "examples.images.generate": generate.main}
    lines = [
        shlex.split(line)
        for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
        for line in block.splitlines()
    ]
    assert ["pip", "install", ".[images]"] in lines and len(lines) == 6
    for python, _, module, *arguments in (line for line in lines if line[0] != "pip"):
        assert python == "python" and mains[module](arguments) == 2
        message = capsys.readouterr().err
        missing = "--resume" in arguments or module.endswith("generate")
        assert ("holds no checkpoint" if missing else "understood") in message, message


def test_what_the_page_names_is_there():
    folder = ROOT / "examples" / "images"
    for name in re.findall(r"^\| `(\w+\.py)`", PAGE, re.M) + re.findall(r"\]\((\w+\.png)\)", PAGE):
        assert (folder / name).stat().st_size < 200_000
    assert {path.name for path in folder.glob("*.png")} == set(re.findall(r"\]\((\w+\.png)\)", PAGE)) != set()
    known = {flag(field.name) for field in options(Config)} | {"--compare"}
    assert set(re.findall(r"^\| `(--[\w-]+)", PAGE, re.M)) <= known
