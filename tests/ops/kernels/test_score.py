"""The kernel that scores key blocks: the formulas in float64, what goes without it, and what it takes of a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

import sparse_layers as sl
from benchmarks.triton_resources import TARGETS, Launch, compiled, resources
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.select_gpu import score
from tests.arrays import inputs

SIZES = {"local": 2, "dense_below": 0}
# (scorer, tokens, query and key heads, head size, dtype)
CASES = {
    "infllm": (sl.InfLLM(64, 6, **SIZES), 411, (4, 1), 32, "bfloat16"),
    "infllm, 16 to a key head": (sl.InfLLM(48, 6, **SIZES, pool_size=16, pool_stride=8), 200, (16, 1), 24, "float16"),
    "infllm, one window": (sl.InfLLM(512, 3, **SIZES, pool_size=512, pool_stride=512), 2200, (3, 1), 16, "bfloat16"),
    "nsa": (sl.NSA(32, 6, pool_size=24, pool_stride=8), 260, (8, 2), 32, "bfloat16"),
    "nsa, 1 to a key head": (sl.NSA(256, 4, pool_size=64, pool_stride=32), 1300, (2, 2), 16, "float16"),
    "msa": (sl.MSA(32, 4), 331, (16, 1), 40, "bfloat16"),
    "msa, large blocks": (sl.MSA(512, 2), 1100, (1, 1), 16, "float16"),
}


def exact(scorer, blocks, q, pooled, at, start, scale):
    """Scores [R, heads or 1, blocks] of queries [R, heads, H] by windows [W, H] of their key head, in float64."""
    (size, stride), keys = scorer.window, np.arange(blocks * scorer.block)
    begin = np.arange(len(pooled)) * stride
    seen = ((begin >= start[:, None]) & (begin + size <= at[:, None] + 1))[:, None]
    products = np.where(seen, q @ pooled.T, -np.inf)
    holds = (begin[:, None] <= keys) & (keys < begin[:, None] + size)  # windows, and their keys
    share = holds.reshape(len(begin), -1, scorer.block).sum(2) / stride  # of a window in a block
    if scorer.per_query_head:
        return np.where(share.T > 0, products[:, :, None], -np.inf).max(3)
    highest = products.max(2, keepdims=True, initial=-1e9)
    weights = np.where(seen, np.exp(scale * (products - highest)), 0)
    weights = (weights / np.maximum(weights.sum(2, keepdims=True), 1e-300)).sum(1, keepdims=True)
    return weights @ share if isinstance(scorer, sl.NSA) else ((share.T > 0) * weights[:, :, None]).max(3)


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_the_formulas(name, monkeypatch):
    """Of one document, and of several that begin within a block; tokens to come are no numbers."""
    if jax.default_backend() != "gpu":  # small tiles, of which there are several
        monkeypatch.setattr(score, "COLUMNS", 32)
        monkeypatch.setattr(score, "STEP", 16)
    (scorer, length, heads, size, dtype), scale = CASES[name], 0.3
    q, k = (inputs(2, length, n, size, seed=i).astype(np.dtype(dtype)) for i, n in enumerate(heads))
    start = np.zeros((2, length), np.int32)
    for begin in (length // 5, length // 5 + 3, length // 2):
        start[1, begin:] = begin
    at = np.unique(np.r_[np.arange(3, length - 40, length // 9), np.arange(length - 43, length - 40)])
    k[:, at[-1] + 1 :] = np.nan
    q, start, blocks = q[:, at], start[:, at], -(-length // scorer.block)

    @jax.jit
    def scored(q, k, at, start):
        pooled = scorer.pool(k)
        return pooled, score.score_windows(scorer._scored, blocks, q, pooled, at, start, scale)

    pooled, actual = scored(q, k, at[None], start)
    q, pooled = (np.asarray(x, np.float64) for x in (q, pooled))
    group, past = q.shape[2] // pooled.shape[2], np.arange(blocks) < at[:, None, None] // scorer.block
    for b, head in np.ndindex(len(q), pooled.shape[2]):
        right = exact(scorer, blocks, q[b, :, head * group :][:, :group], pooled[b, :, head], at, start[b], scale)
        each = right.shape[1]
        wanted = past & (np.arange(blocks) >= start[b][:, None, None] // scorer.block)
        ours = np.where(wanted, np.asarray(actual[b, :, head * each :][:, :each]), 0)
        np.testing.assert_allclose(ours, np.where(wanted, right, 0), rtol=2e-5, atol=5e-5)
        assert np.isfinite(ours[ours != 0]).any()


def test_huge_logits():
    """The weights of a head are 1 at most, however the logits are rounded that they come from."""
    scorer, heads = sl.InfLLM(48, 6, **SIZES, pool_size=16, pool_stride=8), 4
    q, k = (inputs(1, 331, n, 40, seed=n).astype("bfloat16") for n in (heads, 1))
    at, start = np.arange(331)[None], np.zeros((1, 331), np.int32)
    found = score.score_windows(scorer._scored, 7, q, scorer.pool(k), at, start, 1e7)
    seen = np.arange(7) < at[0, :, None] // 48
    ours = np.where(seen, np.asarray(found[0, :, 0]), 0)
    assert np.isfinite(ours).all() and 1 <= ours.max() <= heads


@dataclasses.dataclass(frozen=True)
class NegatedMSA(sl.MSA):
    """A method of one's own, derived from one that a kernel computes."""

    def scores(self, query, pooled, seen, scale):
        return -super().scores(query, pooled, seen, scale)


def test_what_goes_without_the_kernel(monkeypatch):
    query, pooled = (jax.ShapeDtypeStruct((1, 64, n, 64), "bfloat16") for n in (16, 1))
    scored = sl.InfLLM()._scored
    assert score.unsupported(scored, query, pooled, None) is None
    assert NegatedMSA().formula is None and NegatedMSA()._scored.formula is None
    assert "of windows" in str(score.unsupported(NegatedMSA()._scored, query, pooled, None))
    assert "of windows" in str(score.unsupported(sl.MoBA()._scored, query, pooled, None))
    assert "float32" in str(score.unsupported(scored, query.update(dtype="float32"), pooled, None))
    assert "scale=0" in str(score.unsupported(scored, query, pooled, 0))
    assert "fit" in str(score.unsupported(scored._replace(stride=12), query, pooled, None))
    assert "fit" in str(score.unsupported(scored._replace(size=80), query, pooled, None))
    assert "129" in str(score.unsupported(scored, query.update(shape=(1, 64, 129, 64)), pooled, None))
    assert "257" in str(score.unsupported(scored, query.update(shape=(1, 64, 16, 257)), pooled, None))
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 1 << 14, 1))
    assert "shared memory" in str(score.unsupported(scored, query, pooled, None))
    monkeypatch.setattr(hardware, "local_device", lambda: "no GPU")
    assert score.unsupported(scored, query, pooled, None) == "no GPU"


# (scorer, query and key heads, programs of a multiprocessor at a time)
COMPILED = {"nsa": (sl.NSA(), (32, 8), 3), "msa": (sl.MSA(), (8, 1), 2)}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_and_fits(name, monkeypatch):
    """As for queries of 131072 tokens; what there are no registers for is next to nothing."""
    (scorer, heads, at_once), target, found = COMPILED[name], TARGETS[90], []

    def call(kernel, grid, arrays, outputs, constants, num_warps, num_stages):
        dtypes = tuple(x.dtype.name for x in (*arrays, *outputs))
        found.append(Launch(kernel, dtypes, constants, num_warps, num_stages, target))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    monkeypatch.setattr(bridge, "call_triton", call)
    monkeypatch.setattr(hardware, "local_device", lambda: target)
    rows, length = 4096, 131072
    q = jax.ShapeDtypeStruct((1, rows, heads[0], 128), "bfloat16")
    pooled = jax.ShapeDtypeStruct((1, scorer.windows(length), heads[1], 128), "bfloat16")
    at = jax.ShapeDtypeStruct((1, rows), "int32")
    assert score.unsupported(scorer._scored, q, pooled, 1.0) is None
    blocks = length // scorer.block
    jax.eval_shape(lambda *x: score.score_windows(scorer._scored, blocks, *x, 1.0), q, pooled, at, at)
    (one,) = found
    used = resources(compiled(one))
    assert used.shared <= score.shared_memory(one.constants["C"].D, one.num_stages) <= one.device.shared_memory
    assert used.stack <= 128 and used.copies and used.at_once(one) >= at_once
    assert {*used.products} == {"wgmma.mma_async"}
