"""What a user installs: what is in it, that it runs alone, what type checkers see, and what it says of itself."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import sparse_layers as sl

ROOT = Path(__file__).parents[1]
PACKAGE = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sparse_layers").rglob("*") if path.is_file()}
PACKAGE = {name for name in PACKAGE if "__pycache__" not in name}

SNIPPET = """
from typing import assert_type

import jax
import jax.numpy as jnp
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen

mask = sl.Causal() & (sl.Window(63) | sl.Global(4))
by_head: sl.Mask | tuple[sl.Mask, ...] = sl.preset("strided", local_attn_ctx=8)
assert_type(sl.presets(), dict[str, str])
assert_type(sl.as_masks(mask), tuple[sl.Mask, ...])
plan = sl.make_plan(mask, 128)
assert_type(plan, sl.Plan)

x = jax.random.normal(jax.random.key(0), (1, 128, 32))
tokens = jax.random.randint(jax.random.key(0), (1, 128), 0, 2)
sizes, rngs = sl.FwdParams(q_blocksize=64), nnx.Rngs(0)
layer = sl.SparseSelfAttention(
    4, 32, pattern=mask, seq_len=128, head_dim=16, use_bias=False, dtype=jnp.bfloat16, fwd_params=sizes, rngs=rngs
)
assert_type(layer, sl.SparseSelfAttention)
assert_type(layer(x, segment_ids=tokens), jax.Array)
assert_type(layer.plan, sl.Plan)
assert_type(layer.prefill(x), tuple[jax.Array, sl.KVCache])

reader = sl.SparseCrossAttention(4, 32, pattern=mask, q_len=128, kv_len=64, use_sinks=True, use_bias=False, rngs=rngs)
assert_type(reader(x, x[:, :64], segment_ids=(tokens, tokens[:, :64])), jax.Array)

rope = sl.Rope(theta=100.0, shape=(16, 8))
assert_type(rope(x.reshape(1, 128, 4, 8)), jax.Array)
block = sl.SparseTransformerBlock(4, 32, pattern="strided", seq_len=128, rope=rope, remat=True, rngs=nnx.Rngs(0))
assert_type(block(x, deterministic=True), jax.Array)

patterns = ("local", (sl.Window(3), "strided"))
model = sl.SparseTransformer(
    256, 4, 32, 2, patterns=patterns, seq_len=128, mlp="swiglu", dropout_rate=0.1, use_sinks=True, rngs=nnx.Rngs(0)
)
assert_type(model(tokens), jax.Array)
decoder: sl.Decoder = model
assert_type(sl.generate(model, [[1, 2], list(b"x")], 4, temperature=1.0, key=jax.random.key(0)), jax.Array)

query = x.reshape(1, 128, 4, 8)
assert_type(sl.block_sparse_attention(query, query, query, mask), jax.Array)
assert_type(sl.block_sparse_attention(query, query, query, plan, return_lse=True), tuple[jax.Array, jax.Array])

attention = sl.make_attention_fn("longformer", 128, implementation="xla")
assert_type(attention, sl.AttentionFn)
assert_type(attention(query, query, query), jax.Array)
of_batch = sl.make_attention_fn(mask, 128, segment_ids=tokens)
assert_type(of_batch(query, query, query), jax.Array)
dense = nnx.MultiHeadAttention(4, 32, decode=False, attention_fn=attention, rngs=nnx.Rngs(0))
assert_type(sl.from_nnx(dense, pattern=mask, seq_len=128, rope_theta=100.0), sl.SparseSelfAttention)

module = linen.SparseTransformerBlock(4, 32, pattern=mask, seq_len=128, head_dim=8)
assert_type(module.remat, bool)

# Wrong: each checker must have something to forgive.
sl.SparseTransformerBlock(4, 32, pattern=mask, seq_len=128, num_experts=2, rngs=nnx.Rngs(0))  # {call}
sl.SparseTransformer(256, 4, 32, 2, patterns=mask, seq_len=128, mlp_features="64", rngs=nnx.Rngs(0))  # {argument}
sl.generate(layer.plan, [[1]], 4)  # {argument}
sl.sparse_attention  # {attribute}
"""
MYPY = {
    "call": "type: ignore[call-arg]",
    "argument": "type: ignore[arg-type]",
    "attribute": "type: ignore[attr-defined]",
}
PYRIGHT = {
    "call": "pyright: ignore[reportCallIssue]",
    "argument": "pyright: ignore[reportArgumentType]",
    "attribute": "pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]",
}


def run(*command, cwd, **environment):
    """What a module of this Python prints."""
    command, environment = [sys.executable, *map(str, command)], os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("built")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return {"sdist": folder / f"sparse_layers-{sl.__version__}.tar.gz", "wheel": next(folder.glob("*.whl"))}


# --- what is built ---------------------------------------------------------------------------------------------------


def test_twine_accepts_sdist_and_wheel(built):
    said = run("-m", "twine", "--no-color", "check", "--strict", *built.values(), cwd=ROOT)
    assert said.count("PASSED") == 2, said


def test_the_wheel_has_the_package_and_no_more(built):
    assert built["wheel"].name == f"sparse_layers-{sl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built["wheel"]) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == PACKAGE
    assert "sparse_layers/py.typed" in inside


def test_the_sdist_has_what_its_tests_need(built):
    with tarfile.open(built["sdist"]) as archive:
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in inside if name.startswith("sparse_layers/")} == PACKAGE
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert {name for name in inside if name.startswith("tests/") and name.endswith(".py")} == tests
    files = "CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE Makefile PKG-INFO README.md conftest.py pyproject.toml"
    # hatchling leaves out what git ignores, and says what that is.
    assert {name for name in inside if "/" not in name} == {*files.split(), ".gitignore"}
    folders = {".github", "benchmarks", "docs", "examples", "sparse_layers", "tests"}
    assert {name.partition("/")[0] for name in inside if "/" in name} == folders


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_alone_and_runs(kind, built, tmp_path):
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    run(*pip, "--no-compile", "--target", tmp_path, built[kind], cwd=tmp_path)
    here = {"PYTHONPATH": str(tmp_path)}
    code = "import sparse_layers as sl; print(sl.__version__, sl.__file__)"
    where = tmp_path / "sparse_layers" / "__init__.py"
    assert run("-c", code, cwd=tmp_path, **here).split() == [sl.__version__, str(where)]
    for command in (["-m", "sparse_layers"], ["bin/sparse-layers"]):
        assert run(*command, "--version", cwd=tmp_path, **here) == f"sparse-layers {sl.__version__}\n"


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The Python of an environment with the wheel in it, and beside it what this one has."""
    folder = tmp_path_factory.mktemp("installed")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(built["wheel"]) as archive:
        archive.extractall(site)
    # Their own .pth files are not read: the checkout is not in sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def test_mypy_sees_the_types_of_an_installed_wheel(installed, tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET.format(**MYPY), encoding="utf-8")
    options = ["--strict", "--python-executable", installed, "--cache-dir", os.devnull]
    run("-m", "mypy", *options, "snippet.py", cwd=tmp_path)


def test_pyright_has_no_complaint_about_what_users_write(installed, tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET.format(**PYRIGHT), encoding="utf-8")
    settings = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    run("-m", "pyright", "--pythonpath", installed, cwd=tmp_path)


# --- what it says of itself ------------------------------------------------------------------------------------------


def test_the_changelog_and_the_citation_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    first, second = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[:2]
    assert first == ("Unreleased", "")
    assert second == (sl.__version__, f" - {citation['date-released']}")
    assert citation["version"] == sl.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "what the format asks for"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_what_github_takes(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "title", "labels"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"checkboxes", "dropdown", "input", "textarea"}
    assert len({field["id"] for field in fields}) == len({field["attributes"]["label"] for field in fields}) > 0
