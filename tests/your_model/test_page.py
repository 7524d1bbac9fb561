"""The page examples/your_model/README.md: its Python, its commands, and what it says of patterns and caches."""

import math
import pathlib
import re
import shlex
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from flax import nnx

import sparse_layers as sl
from examples.your_model import __main__ as script
from examples.your_model import make
from examples.your_model.text import Windows, load_bytes
from examples.your_model.training import losses, train

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "your_model" / "README.md").read_text(encoding="utf-8")
SMALL = {"features": 16, "mlp_features": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "seq_len": 32}
LESS = {"512": "32", "window=64": "window=4", "near, near, near, near, near, sl": "near, sl"}
LESS |= {'"runs/qwen"': '"two"'}  # fewer layers compile sooner
LESS |= {"STEPS, trained = 200": "STEPS, trained = 4", "[prompt], 60": "[prompt], 8"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def commands():
    return [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text in the place of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    for name in "abcdefgh":
        (folder / f"{name}.py").write_text(f"def {name}():\n    return {name!r}\n" * 40)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory, corpus):
    """A folder in which the page's command has made a smaller model, and one of fewer layers; neither is trained."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(make, "load_bytes", lambda _, length: load_bytes(str(corpus), length))
        patch.setattr(make, "train", lambda model, windows, steps, rate, optimizer: (math.nan, math.nan))
        (command,) = [command for command in commands() if command[2:3] == ["examples.your_model.make"]]
        for layers, arguments in ((6, command[3:]), (2, ["two"])):
            patch.setattr(make, "SETTINGS", make.SETTINGS | SMALL | {"num_layers": layers})
            assert make.main(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def names(small, corpus):
    """What the page's Python leaves behind, run as one script on the model of fewer layers."""
    found = {}
    text = "\n".join(blocks("python"))
    for before, after in LESS.items():
        assert before in text
        text = text.replace(before, after)
    text = text.replace('load(FOLDER, "", T)', f"load(FOLDER, {str(corpus)!r}, T)")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(small)
        exec(compile(text, "README.md", "exec"), found)
    return found


def test_the_pages_python_runs(names, small, capsys):
    assert np.isfinite(names["loss"]) and names["number"] == 3
    model, again = names["model"], names["again"]
    masks = [layer.attention.pattern for layer in again.layers]
    assert masks == [sl.Causal() & sl.Window(3), sl.Causal()], "the windows are in what was saved"
    before, after = (nnx.to_pure_dict(nnx.state(each, nnx.Param)) for each in (model, again))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    untrained = nnx.to_pure_dict(nnx.state(sl.from_huggingface(small / names["FOLDER"]), nnx.Param))
    changed = jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before, untrained))
    assert all(changed), "all weights were trained"


def test_attention_alone(names):
    assert '# or nnx.All(nnx.Param, nnx.PathContains("attention"))' in PAGE
    some = nnx.to_flat_state(nnx.state(names["model"], nnx.All(nnx.Param, nnx.PathContains("attention"))))
    assert {path[2:4] for path, _ in some} >= {("attention", "query"), ("attention", "out")}
    assert {path[2] for path, _ in some} == {"attention"}


def test_the_printed_tables_are_of_the_command():
    (printed,) = [block for block in blocks("text") if "pairs kept" in block]
    kept = (5 * (64 * 65 / 2 + (512 - 64) * 64) / (512 * 513 / 2) + 1) / 6
    caches = [6 * 512, 5 * 64 + 512]  # tokens of all layers; each has two key heads of 32, and as many values
    table = rows(printed.replace("200", "2"))
    for row, tokens, share in zip(table[:4], np.repeat(caches, 2), [1, 1, kept, kept], strict=True):
        assert row[1:3] == [f"{share:.1%}", f"{tokens * 2 * 2 * 32 * 4 / 1024:,.0f}"]
        assert float(row[-1]) == pytest.approx(np.log2(float(row[-2])), abs=0.002)
    (twelve,) = [block for block in blocks("text") if block.startswith("perplexity 6.0") and block.count("\n") == 2]
    assert twelve.split()[1::2] == [row[-2] for row in table[:4:2]]


def test_what_the_page_says_of_caches_and_of_work(names, capsys):
    (printed,) = [block for block in blocks("text") if "GiB" in block]
    (code,) = [block for block in blocks("python") if "def cache" in block]
    exec(code[code.index("for tokens") :], names)
    assert capsys.readouterr().out == printed
    for length, saving, six in ((32768, 10.3, 4.0), (131072, 39.9, 5.3)):
        said = sl.describe(sl.preset("sliding_window", window=1024), length)
        assert f"expected saving: {saving} times less work than causal attention" in said
        assert round(6 / (5 / saving + 1), 1) == six
        assert f"{saving} times" in PAGE and f"{six} times" in PAGE.replace("makes 5.3", "makes 5.3 times")


def rows(printed):
    return [re.split(r"  +", line) for line in printed.splitlines() if re.match("(dense|sparse)(, . steps)?  ", line)]


def test_the_pages_commands(small, corpus, monkeypatch, capsys):
    installs, runs = ([c for c in commands() if (c[0] == "pip") == wanted] for wanted in (True, False))
    assert installs == [["pip", "install", ".[examples]"]]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert "optax" in {re.split(r"\W", package)[0] for package in extras["examples"]}
    assert [command[:3] for command in runs] == [
        ["python", "-m", "examples.your_model.make"],
        ["python", "-m", "examples.your_model"],
    ]
    monkeypatch.chdir(small)
    arguments = [*runs[1][3:], "--text", str(corpus), "--length", "32", "--windows", "2", "--steps"]
    assert script.main([*arguments, "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "sparse, in turn: 5 x sliding_window:window=4, 1 x causal\n2 held-out windows of 32 tokens\n"
    )
    back = np.tril(np.arange(1, 33)[:, None] - np.arange(32))
    near, every = ((back > 0) & (back <= 4)).sum(), (back > 0).sum()
    assert [row[1] for row in rows(printed)[:2]] == ["100.0%", f"{(5 * near / every + 1) / 6:.1%}"]

    # Fewer layers and another pattern are compiled sooner.
    assert script.main(["two", *arguments[1:], "2", "--pattern", "sliding_window:window=4+causal"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("sparse, in turn: 1 x sliding_window:window=4, 1 x causal\n")
    first, second = rows(printed)[:4], rows(printed)[4:]
    names = ["dense", "dense, 2 steps", "sparse", "sparse, 2 steps"]
    assert [row[0] for row in first] == [row[0] for row in second] == names
    assert [row[1] for row in first] == ["100.0%"] * 2 + [f"{(near / every + 1) / 2:.1%}"] * 2
    size = 2 * 8 * 4 / 1024  # of a token in a layer: a key and a value of eight float32
    assert [float(row[2]) for row in first] == pytest.approx([2 * 32 * size] * 2 + [36 * size] * 2, abs=0.5)
    for row in first:
        assert float(row[-1]) == pytest.approx(np.log2(float(row[-2])), abs=0.002)
    for row, parts in zip(first, second, strict=True):  # tokens 1-2, 3-4, 5-8, 9-16, 17-32
        mean = np.exp(np.dot([2, 2, 4, 8, 16], np.log([float(x) for x in parts[1:]])) / 32)
        assert mean == pytest.approx(float(row[-2]), rel=1e-3)
    assert len({row[-2] for row in first}) == 4, "each is another model"


def test_what_the_command_refuses(small, corpus, monkeypatch, capsys):
    monkeypatch.chdir(small)
    for arguments, reason in (
        (["/nowhere"], "No such file or directory: '/nowhere/config.json'"),
        (["runs/qwen", "--length", "0"], "--length must be at least 1, got 0"),
        (["runs/qwen", "--pattern", "causal+windw"], "unknown name 'windw'"),
        (["runs/qwen", "--text", "/nowhere.txt"], "--data /nowhere.txt: No such file or directory"),
    ):
        given = arguments if "--text" in arguments else [*arguments, "--text", str(corpus)]
        assert script.main([*given, *([] if "--length" in given else ["--length", "8"])]) == 2
        said = capsys.readouterr().err
        assert said.startswith("your_model: ") and reason in said and said.count("\n") == 1


class Follower(nnx.Module):
    """A language model that looks at one token only."""

    def __init__(self):
        self.table = nnx.Embed(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        return self.table(tokens)


def test_losses_by_place_and_training():
    model = Follower()
    model.table.embedding[...] = 5 * jnp.eye(4)  # the same token again
    right, wrong = np.log(np.exp(5) + 3) - 5, np.log(np.exp(5) + 3)
    tokens = np.array([[0, 0, 1], [2, 2, 2]])
    np.testing.assert_allclose(losses(model, tokens), [right, (right + wrong) / 2], rtol=1e-5)
    windows = Windows(np.arange(40, dtype=np.int32) % 4, 7)
    for optimizer in (optax.adamw, optax.contrib.muon):
        model = Follower()
        before = losses(model, windows.spread(2)).mean()
        last, seconds = train(model, windows, 20, 0.5, batch_size=2, optimizer=optimizer)
        assert losses(model, windows.spread(2)).mean() < last < 0.5 < before and seconds > 0
