"""What a user writes against the installed package: type checkers know each type, and tell a wrong keyword."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SNIPPET = """
from typing import assert_type

import jax
import jax.numpy as jnp
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen

mask = sl.Causal() & (sl.Window(63) | sl.Global(4))
assert_type(sl.preset("strided", local_attn_ctx=8), sl.Mask | tuple[sl.Mask, ...])
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


def run(*command, cwd):
    done = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment with the wheel in it, and beside it what this one has."""
    folder = tmp_path_factory.mktemp("installed")
    run("hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Their own .pth files are not read: the checkout is not in sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def test_mypy_sees_the_types_of_an_installed_wheel(installed, tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET.format(**MYPY), encoding="utf-8")
    run("mypy", "--strict", "--python-executable", installed, "--cache-dir", os.devnull, "snippet.py", cwd=tmp_path)


def test_pyright_has_no_complaint_about_what_users_write(installed, tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET.format(**PYRIGHT), encoding="utf-8")
    settings = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    run("pyright", "--pythonpath", installed, cwd=tmp_path)
