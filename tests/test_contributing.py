"""The templates of CONTRIBUTING.md run: each in the file that its first line names, beside what is there."""

import doctest
import importlib
import pathlib
import re
import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import sparse_layers as sl
from sparse_layers.masks.presets import _PRESETS
from sparse_layers.modules.loading.families import FAMILIES
from sparse_layers.ops import attention, implementations
from tests.masks.test_masks import exact_states, rectangles
from tests.modules.loading.test_huggingface import expected, run, tensors, write
from tests.ops.cases import IMPLEMENTATIONS, Case, check
from tests.scorers.test_scorers import select

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEMPLATES = dict(re.findall(r"^```python\n# (\S+)\.py\n(.*?)^```", TEXT, re.M | re.S))


@pytest.fixture
def templates():
    """What the template of a file defines, by name; tables are as before at the end."""

    def definitions(file):
        package, _, module = file.replace("/", ".").rpartition(".")
        found = vars(importlib.import_module(f"{package}.{module}")) if (ROOT / f"{file}.py").exists() else {}
        names = {**found, "__name__": f"{package}.{module}", "__package__": package}
        exec(compile(TEMPLATES[file], f"CONTRIBUTING.md: {file}", "exec"), names)
        return {name: value for name, value in names.items() if found.get(name) is not value}

    with mock.patch.dict(_PRESETS), mock.patch.dict(FAMILIES), mock.patch.dict(sl.Scorer._named):
        yield definitions


def run_examples(thing):
    """Runs the example in a docstring."""
    runner = doctest.DocTestRunner()
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs={})
    assert test.examples and not runner.run(test).failed


def test_there_is_one_for_each_common_addition():
    rooms = ["masks/presets", "masks/primitives", "ops/kernels/dense", "scorers/methods"]
    assert [*TEMPLATES] == [f"sparse_layers/{x}" for x in (*rooms, "modules/loading/families")]


def test_the_makefile_names_tests_that_exist():
    named = re.findall(r"(tests/[\w/.*]*\w)(?:::(\w+))?", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(named) > 20
    for path, function in named:
        assert [*ROOT.glob(path)], path
        assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), function
    kernels = re.search(r"foreach kernel,([\w ]+),--deselect '\$\(op\)::(\w+)", (ROOT / "Makefile").read_text("utf-8"))
    assert kernels and {*kernels[1].split(), "xla", "reference"} == {*IMPLEMENTATIONS}
    assert f"def {kernels[2]}(" in (ROOT / "tests" / "ops" / "test_attention.py").read_text(encoding="utf-8")


def test_a_preset(templates):
    make = templates("sparse_layers/masks/presets")["own_and_last_block"]
    run_examples(make)
    q, k = np.arange(40)[:, None], np.arange(40)
    np.testing.assert_array_equal(sl.preset("own_and_last_block:block=6").dense(40), (k <= q) & (q // 6 - k // 6 <= 1))


def test_a_mask(templates, monkeypatch):
    lag = templates("sparse_layers/masks/primitives")["Lag"]
    monkeypatch.setattr(sl, "Lag", lag, raising=False)
    run_examples(lag)
    corners = rectangles(np.random.default_rng(0), 400, 32)
    for made in (lag(0), lag(5)):
        np.testing.assert_array_equal(made.block_state(*corners), exact_states(made.dense(32), corners))
    with pytest.raises(ValueError, match="Lag: distance must be an integer >= 0, got -1"):
        lag(-1)


def test_an_implementation(templates, monkeypatch):
    made = types.SimpleNamespace(**templates("sparse_layers/ops/kernels/dense"))
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "dense", made)
    monkeypatch.setitem(attention.TUNING, "dense", attention.TUNING["reference"])
    heads = sl.Window(8), sl.Causal() & sl.Columns(7, 5)  # of the second, the first queries see nothing
    case = Case("heads differ", heads, 41, 37, sizes=(16, 8))
    check(case, case.call("dense"))
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(NotImplementedError, match="dense: it does not know a soft cap and sinks; implementation=None"):
        sl.block_sparse_attention(q, q, q, "causal", logits_soft_cap=1.0, sinks=jnp.zeros(2), implementation="dense")


def test_a_scorer(templates, monkeypatch):
    together = templates("sparse_layers/scorers/methods")["Together"]
    monkeypatch.setattr(sl, "Together", together, raising=False)
    run_examples(together)
    scorer = sl.Scorer.named("together:block=16,count=2")
    assert scorer == together(block=16, count=2)
    q, k = (np.random.default_rng(n).normal(size=(1, 96, n, 8)).astype(np.float32) for n in (4, 2))
    ids = np.asarray(select(scorer, q, k).ids)
    means = k[0].reshape(6, 16, 2, 8).mean(1)
    for t, head in np.ndindex(96, 2):
        scores = means[: t // 16, head] @ q[0, t, 2 * head : 2 * head + 2].sum(0)
        right = {t // 16, *np.argsort(-scores)[:1]}
        assert {*ids[0, t, head]} - {-1} == right


def test_a_family_of_decoders(templates, tmp_path):
    templates("sparse_layers/modules/loading/families")
    # Qwen 3 with another name of a norm.
    old, new = "post_attention_layernorm", "ffn_norm"
    folder = write(tmp_path / "mine", "qwen3", model_type="mine")
    renamed = {name.replace(old, new): tensor for name, tensor in tensors("qwen3").items()}
    assert renamed.keys() != tensors("qwen3").keys()
    safetensors.numpy.save_file(renamed, folder / "model.safetensors")
    model = sl.from_huggingface(folder, param_dtype=jnp.float32, implementation="reference")
    np.testing.assert_allclose(run(model, expected("qwen3")["tokens"]), expected("qwen3")["logits"], atol=2e-5)
    write(folder, "qwen3", model_type="mine", logit_scale=0.5)
    with pytest.raises(ValueError, match=r"logit_scale must be None or 1\.0, got 0\.5"):
        sl.from_huggingface(folder)
