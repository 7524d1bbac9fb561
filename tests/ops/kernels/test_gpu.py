"""Presets and selections at real sizes on a GPU: ``pytest -n 8 tests/ops/kernels/test_gpu.py`` where there is one."""

import contextlib
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.decoding import fused
from tests.ops import test_selections as chosen
from tests.ops.cases import NEEDED, SMALL, Case, check
from tests.ops.kernels import sharing
from tests.ops.random_calls import random_case

if jax.default_backend() != "gpu":
    pytest.skip("needs an NVIDIA GPU; tests/ops/test_attention.py has the kernels interpreted", allow_module_level=True)

# Options where the default ones would see all of so short a sequence.
OPTIONS = {"sliding_window": {"window": 300}, "streaming": {"window": 256}, "chunked": {"chunk": 300}}


DTYPES = {"triton": ["bfloat16", "float16", "float32"]}
if jax.devices()[0].compute_capability == "9.0":
    DTYPES["hopper"] = ["bfloat16", "float16"]


@pytest.mark.parametrize(("implementation", "dtype"), [(name, dtype) for name in DTYPES for dtype in DTYPES[name]])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("name", SMALL)
def test_presets(name, size, implementation, dtype):
    mask = sl.preset(name, **OPTIONS.get(name, NEEDED[name]))
    # Strides divide the latter: kernels for Hopper read rows in other orders as views of the tokens.
    length = 1000 if implementation == "triton" else 1024
    check_twice(Case(name, mask, length, heads=(4, 2), sizes=(size, size), batch=1, dtype=dtype), implementation)


def check_twice(case, implementation="triton"):
    """Asserts that answers are right, and the same to the bit in a second run; but for sums that have no order."""
    call = case.compiled(implementation)
    answers, again = call(), call()
    check(case, answers)
    for key, value in answers.items():
        if key not in (("dtable",) if implementation == "triton" else ("dq", "dk", "dv", "dtable")):
            np.testing.assert_array_equal(np.asarray(value), np.asarray(again[key]))


@pytest.mark.parametrize("implementation", DTYPES)
def test_processes_that_share_the_gpu(implementation):
    """The driver stops each in the middle of kernels for the others to have the GPU."""
    calls = [(pattern, str(size)) for pattern in sharing.PATTERNS for size in (64, 128)]
    command = [sys.executable, "-m", "tests.ops.kernels.sharing", implementation]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with contextlib.ExitStack() as ended:
        runs = []
        for call in calls:
            run = subprocess.Popen([*command, *call], env=environment, stdout=subprocess.PIPE, text=True)
            ended.callback(run.kill)  # where it hangs, or another one does
            runs.append(run)
        assert [run.communicate(timeout=300)[0] for run in runs] == ["0\n"] * len(calls)


HEAD_SIZES = {"narrow": (64, 128, 128, 40, 96, 8), "wide": (256, 192, 256, 160)}
LENGTHS = 1, 97, 128, 300, 512, 640, 777, 1024, 1280


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_CALLS", "50"))))
@pytest.mark.parametrize("heads", HEAD_SIZES)
@pytest.mark.parametrize("implementation", DTYPES)
def test_random_calls(implementation, heads, seed):
    """``RANDOM_CALLS=1000`` makes as many; passes that these kernels do not do are the others' part of the call."""
    check_twice(random_case(seed, HEAD_SIZES[heads], LENGTHS, biases=True), implementation)


@pytest.mark.parametrize("name", ["causal", "sparse_transformer_strided:stride=64", "windows"])
def test_deterministic_gradients_of_bias_tables_have_the_same_bits(name):
    """Programs add to the table in any order: sums of floats would differ."""
    mask = sl.preset(name, shape=(56, 56), size=7) if name == "windows" else sl.preset(name)
    draw = np.random.default_rng(0)
    bias = sl.DistanceBias(draw.normal(size=(4, 513)).astype(np.float32))
    if name == "windows":
        bias = sl.grid_bias((56, 56), draw.normal(size=(4, 13, 13)).astype(np.float32))
    *x, dout = (jax.random.normal(i, (2, 3136, 4, 64), jnp.bfloat16) for i in jax.random.split(jax.random.key(0), 4))

    def run(deterministic):
        options = {"implementation": "triton", "bwd_params": sl.BwdParams(deterministic=deterministic)}

        @jax.jit
        def gradients(q, k, v, bias):
            return jax.vjp(lambda *x: sl.block_sparse_attention(*x[:3], mask, bias=x[3], **options), q, k, v, bias)[1](
                dout
            )

        return [jax.tree.leaves(gradients(*x, bias)) for _ in range(4)]

    first, *repeats = run(deterministic=True)
    for repeat in repeats:
        jax.tree.map(np.testing.assert_array_equal, repeat, first)
    by_floats = run(deterministic=False)[0][-1]
    np.testing.assert_allclose(first[-1], by_floats, atol=1e-5 * np.abs(by_floats).max())


GRANULARITIES = {1: 331, 16: 257, 64: 500, 128: 389}  # and lengths that are no multiples of anything
EVERY = itertools.product(GRANULARITIES, "1KN", (32, 64, 128), (1, 4, 8, 16), ("bfloat16", "float32"))
EVERY = [(f"{i}-" + "-".join(map(str, x)), *x) for i, x in enumerate(EVERY)]


@pytest.mark.parametrize(("name", "granularity", "scope", "block", "group", "dtype"), EVERY, ids=[x[0] for x in EVERY])
def test_selections(name, granularity, scope, block, group, dtype):
    """Choices are independent: where there are many blocks, single queries are taken to them by key.

    What comes with them changes from one to the next.
    """
    number, length = int(name.split("-")[0]), GRANULARITIES[granularity]
    masks = sl.Causal(), sl.Full(), sl.Causal() & sl.Window(100), sl.Strided(7) | sl.Window(9)
    segments = np.sort(np.random.default_rng(number).integers(-1, 3, (1, length)), axis=1).astype(np.int32)
    case = chosen.Case(
        name,
        masks[number % 4],
        length,
        heads=(16, 16 // group),
        sizes=((64, 64), (128, 128), (96, 32))[number % 3],
        batch=1,
        dtype=dtype,
        sinks=number % 5 == 0,
        soft_cap=3.0 if number % 7 == 0 else None,
        segments=(segments, segments) if number % 3 == 0 else None,
        granularity=granularity,
        scope=scope,
        block=block,
        k=2 + number % 3,
    )
    check_twice(case)


GATHERED = itertools.product("1KN", (64, 128, 256), (1, 4, 16), (64, 128), ("bfloat16", "float16"))
GATHERED = [(f"{i}-" + "-".join(map(str, x)), *x) for i, x in enumerate(GATHERED)]


@pytest.mark.skipif("hopper" not in DTYPES, reason="needs compute capability 9.0")
@pytest.mark.parametrize(("name", "scope", "block", "group", "size", "dtype"), GATHERED, ids=[x[0] for x in GATHERED])
def test_gradients_by_query_gather(name, scope, block, group, size, dtype):
    """Of single queries' choices; some blocks are everybody's, and their lists are cut."""
    number = int(name.split("-")[0])
    masks = sl.Causal(), sl.Full(), sl.Causal() & sl.Window(400), sl.Strided(7) | sl.Window(9)
    case = chosen.Case(
        name,
        masks[number % 4],
        (531, 1531)[number % 5 == 0],
        heads=(16, 16 // group),
        sizes=(size, size),
        batch=1 + number % 2,
        dtype=dtype,
        sinks=number % 5 == 0,
        soft_cap=3.0 if number % 7 == 0 else None,
        scope=scope,
        block=block,
        k=1 + number % 5,
    )
    check_twice(case, "hopper")


PATTERNS = ["causal", "sliding_window", "sparse_transformer_strided", "sparse_transformer_fixed", "bigbird"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("batch", "heads"), [(16, (16, 16)), (1, (8, 8)), (2, (16, 2))])
@pytest.mark.parametrize("name", PATTERNS)
def test_steps_of_decoding(name, batch, heads, dtype, monkeypatch):
    """What the kernel computes and writes, in a loop, is what XLA does, after prompts of unequal lengths."""
    length, steps, size = 4096, 4, 96
    keys = jax.random.split(jax.random.key(0), 3)
    each = zip(keys, (*heads, heads[1]), strict=True)
    q, k, v = (jax.random.normal(x, (batch, length, n, size), dtype) for x, n in each)
    start = jnp.where(jnp.arange(batch) % 2, length // 2, length - steps)
    sizes = {"batch": batch, "num_heads": heads[0], "num_kv_heads": heads[1], "head_size": size, "dtype": dtype}
    cache = sl.KVCache.empty(name, length, implementation="triton", **sizes)

    def run(cache, q, k, v):
        def step(cache, offset):
            at = start + offset
            out, cache = cache.step(*(x[jnp.arange(batch), at] for x in (q, k, v)), at)
            return cache, out

        return jax.lax.scan(step, cache.filled(k, v, start), jnp.arange(steps))

    assert fused.can_step(cache.layout, (cache.keys, cache.values), q[:, 0])
    after, out = jax.jit(run)(cache, q, k, v)
    monkeypatch.setattr(fused, "implementation_order", lambda _: ())
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (cache, q, k, v))
    with jax.default_matmul_precision("highest"):
        _, right = jax.jit(lambda *args: run(*args))(*wide)
    budget = 8 * max(float(jnp.finfo(dtype).eps), 2e-6) * float(jnp.abs(v.astype(jnp.float32)).max())
    assert jnp.abs(out.astype(jnp.float32) - right).max() <= budget
    kept = jax.jit(lambda: cache.filled(k, v, start + steps))()
    for ours, theirs in zip(after.keys + after.values, kept.keys + kept.values, strict=True):
        held = theirs != 0
        assert bool(held.any()) and bool(jnp.where(held, ours == theirs, True).all())
