"""The page examples/make_it_sparse/README.md: its Python, its commands, and what it says of itself."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from examples.make_it_sparse import __main__ as script
from examples.make_it_sparse import training

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "make_it_sparse" / "README.md").read_text(encoding="utf-8")
SMALL = 64  # tokens, where the page has 1024
PNG = b"\x89PNG\r\n"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def commands():
    return [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture(scope="module")
def names():
    """What the page's Python leaves behind, run as one script with fewer tokens."""
    found = {}
    text = "\n".join(blocks("python"))
    assert "T = 1024\n" in text
    text = text.replace("T = 1024\n", f"T = {SMALL}\n").replace("T - 100", "T - 20").replace("stride=64", "stride=8")
    exec(compile(text, "README.md", "exec"), found)
    return found


def test_the_pages_python_runs(names):
    # Its own assertions have held; these are of what it prints.
    assert list(names["runs"]) == ["dense", "sparse"]
    for run in names["runs"].values():
        assert len(run.losses) == len(run.seconds) == 5 and run.losses[-1] < run.losses[0]
    assert names["runs"]["dense"].losses[0] == pytest.approx(names["runs"]["sparse"].losses[0], rel=0.02)


def test_the_pages_models_see_what_it_says(names):
    params, tokens = names["params"], names["tokens"][:1]
    mask = np.tril(np.ones((SMALL, SMALL), bool))
    back = np.arange(SMALL)[:, None] - np.arange(SMALL)
    patterns = {"dense": mask, "every_pair": mask, "sparse": mask & ((back < 8) | (back % 8 == 0))}
    one_layer = {name: value for name, value in params.items() if name != "block_1"}
    for name, pattern in patterns.items():
        model = names[name].clone(config=type(names["config"])(**vars(names[name].config) | {"num_layers": 1}))

        def last(positions, model=model):  # the last token's logits, by the embeddings of the positions
            tree = one_layer | {"positions": {"embedding": positions}}
            return model.apply({"params": tree}, tokens)[0, -1]

        seen = np.abs(jax.jit(jax.jacrev(last))(params["positions"]["embedding"])).max((0, 2)) > 0
        np.testing.assert_array_equal(seen, pattern[-1], err_msg=name)


def sides(diff):
    """The text before and after."""
    lines = diff.splitlines()
    return ["\n".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+"]


def layer(text):
    """A module whose call is the text, lines indented by four, on x, tokens and padding."""
    found = {"nn": nn, "sl": sl, "jnp": jnp, "jax": jax, "T": SMALL, "num_heads": 2, "pattern": pattern(SMALL)}
    body = "def call(self, x, tokens, padding):\n    query, key, value = projections()\n    norm = nn.LayerNorm()\n"
    found["projections"] = lambda: [nn.DenseGeneral((2, 8), name=name) for name in ("query", "key", "value")]
    end = f"\n    return {'out' if 'out =' in text else 'x'}"
    exec(compile(body + text.replace("stride=64", "stride=8") + end, "diff", "exec"), found)
    return type("Layer", (nn.Module,), {"__call__": nn.compact(found["call"])})()


def pattern(length, stride=8):
    back = np.arange(length)[:, None] - np.arange(length)
    return (back >= 0) & ((back < stride) | (back % stride == 0))


@pytest.mark.parametrize("number", [0, 1])
def test_the_changes_do_what_the_page_says(number):
    assert len(blocks("diff")) == 2
    before, after = sides(blocks("diff")[number])
    masks = ["nn.make_causal_mask(tokens)", "jnp.tril(jnp.ones((T, T), bool))"]
    assert masks[number] in before and masks[number] not in after
    expected, actual = layer(before.replace(masks[number], ("pattern[None, None]", "pattern")[number])), layer(after)
    tokens = jnp.zeros((2, SMALL), int)
    valid = jnp.arange(SMALL) < jnp.array([[SMALL], [SMALL - 20]])
    arguments = jax.random.normal(jax.random.key(0), (2, SMALL, 16)), tokens, valid[:, None, None, :]
    params = jax.jit(actual.init)(jax.random.key(1), *arguments)
    out, wanted, dense = (jax.jit(m.apply)(params, *arguments)[valid] for m in (actual, expected, layer(before)))
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert np.abs(out - dense).max() > 0.01


def test_what_describe_says():
    for length, saving in ((1024, "1.0"), (4096, "1.9"), (16384, "6.0")):
        assert f"{saving} times" in PAGE.replace("\n", " ")
        said = sl.describe(sl.preset("sparse_transformer_strided", stride=64), length)
        assert f"expected saving: {saving} times less work than causal attention" in said


def test_padding_is_not_seen(names):
    params, tokens, valid = names["params"], names["tokens"], names["valid"]
    apply = jax.jit(lambda tokens, valid: names["sparse"].apply({"params": params}, tokens, valid))
    front = valid[:, ::-1]  # padding at the start, where causal tokens would see it
    other = jnp.where(front, tokens, (tokens + 1) % 256)
    np.testing.assert_array_equal(apply(tokens, front)[front], apply(other, front)[front])
    assert np.abs(apply(tokens, None) - apply(other, None))[front].max() > 1e-3


def test_the_pages_commands(tmp_path, monkeypatch, capsys):
    installs = [command for command in commands() if command[0] == "pip"]
    assert installs == [["pip", "install", ".[examples]"]]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"matplotlib", "optax"} <= {re.split(r"\W", package)[0] for package in extras["examples"]}

    runs = [command for command in commands() if command[0] != "pip"]
    assert len(runs) == 2
    monkeypatch.chdir(tmp_path)
    # Longer than the stride and the window, so that neither pattern is plain causal attention.
    small, causal = ["--seq-len", "192", "--steps", "2", "--lengths", "192"], 192 * 193 / 2
    back = np.tril(np.arange(1, 193)[:, None] - np.arange(192))  # the distance and one; 0 for the future
    kept = [(back > 0) & ((back <= 64) | (back % 64 == 1)), (back > 0) & (back <= 128)]
    shares = [pairs.sum() / causal for pairs in kept]
    assert max(shares) < 0.9
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    for number, (python, flag, module, *arguments) in enumerate(runs):
        assert (python, flag, module) == ("python", "-m", "examples.make_it_sparse")
        if number == 0:  # as it stands there; the other in this process, which has imported everything
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", module, *arguments, *small]
            printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        else:
            assert script.main([*arguments, *small]) == 0
            printed = capsys.readouterr().out
        picture = arguments[arguments.index("--out") + 1]
        assert pathlib.Path(picture).read_bytes().startswith(PNG)
        assert printed.splitlines()[-1] == picture
        assert f"{pathlib.Path(picture).parts[0]}/" in ignored, "following the page leaves nothing for git"
        rows = re.findall(r"^(dense|all|sparse|192) +(.*)$", printed, re.M)
        assert [name for name, _ in rows] == ["dense", "all", "sparse", "192"]
        assert all(float(number) > 0 for _, row in rows for number in re.findall(r"[\d.]+", row))
        assert [row.split()[-1] for _, row in rows] == ["100.0%", "100.0%", *[f"{shares[number]:.1%}"] * 2]
        dense, every, sparse, faster, pattern_only, _ = (float(x.strip("x%")) for x in rows[-1][1].split())
        assert [faster, pattern_only] == pytest.approx([dense / sparse, every / sparse], abs=0.06)


def test_the_printed_table_is_the_scripts():
    (printed,) = [block for block in blocks("text") if "pairs kept" in block]
    title, head, *_ = printed.splitlines()
    pattern = sl.preset("sparse_transformer_strided", stride=64)
    assert title == "sparse_transformer_strided:stride=64, T=1024, 60 steps" and head.split()[-2:] == ["pairs", "kept"]
    shares = re.findall(r"^(\d+) .* ([\d.]+)%$", printed, re.M)
    for row in re.findall(r"^\d+ .*$", printed, re.M):
        _, dense, every, sparse, faster, pattern_only, _ = (float(x.strip("x%")) for x in row.split())
        assert [faster, pattern_only] == pytest.approx([dense / sparse, every / sparse], abs=0.06)
    assert [int(length) for length, _ in shares] == [512, 1024, 2048, 4096]
    for length, share in shares[:2]:
        length = int(length)
        pairs = np.asarray(pattern.dense(length)).sum() / (length * (length + 1) / 2)
        assert float(share) == pytest.approx(100 * pairs, abs=0.06)
    assert f"{shares[1][1]} % of those pairs" in PAGE
    assert script.kept("sparse_transformer_strided:stride=64", 1024) == pytest.approx(
        float(shares[1][1]) / 100, abs=1e-3
    )


def test_the_picture_is_of_the_printed_numbers(tmp_path):
    folder = ROOT / "examples" / "make_it_sparse"
    assert (folder / "before_after.png").read_bytes().startswith(PNG) and "](before_after.png)" in PAGE
    numbers = json.loads((folder / "before_after.json").read_text(encoding="utf-8"))
    for length, times in numbers["times"].items():
        assert re.search(rf"^{length} +" + " +".join(f"{x:.4f}" for x in times.values()), PAGE, re.M)
    assert script.main(["--of", str(folder / "before_after.json"), "--out", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").read_bytes().startswith(PNG)
    for name in re.findall(r"\]\((\w+\.py)\)", PAGE):
        assert (ROOT / "examples" / "make_it_sparse" / name).is_file()


def test_both_models_train_from_the_same_point_on_the_same_bytes():
    models = script.models("all", 32)
    runs = training.train(models, 32, 4)
    np.testing.assert_allclose(runs["dense"].losses, runs["sparse"].losses, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2), runs["dense"].params, runs["sparse"].params)
    assert sl.make_attention_fn("all", 32) == models["sparse"].config.attention_fn
