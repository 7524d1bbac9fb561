"""Kernels that choose key blocks: the sets that XLA's way chooses, and what they take of a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

import sparse_layers as sl
from benchmarks.triton_resources import TARGETS, Launch, compiled, resources
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.select_gpu import choose
from sparse_layers.scorers import base

BLOCK = 16


class QueriesAsScores(sl.Scorer):
    """Queries that are their own scores."""

    def scores(self, query, pooled, seen, scale):
        return query.astype(jnp.float32)


def kinds(draw, shape):
    """Scores by what is hard about them."""
    normal = draw.standard_normal(shape)
    yield "numbers", normal
    yield "ties", draw.integers(-1, 3, shape) * np.where(draw.random(shape) < 0.5, 1.0, -1.0)  # zeros of both signs
    yield "magnitudes", normal * 10.0 ** draw.integers(-37, 38, shape)
    rare = draw.random(shape)
    yield "no numbers", np.select([rare < 0.2, rare < 0.3, rare < 0.6], [np.nan, np.inf, -np.inf], normal)
    yield "neighbours", np.repeat(normal, 2, axis=-1)[..., : shape[-1]]  # as of a window that two blocks share
    yield "equal", np.ones(shape)


def same(actual, right):
    """Asserts that rows are the same sets, with what is none at the end."""
    actual, right = np.asarray(actual), np.asarray(right)
    assert actual.shape == right.shape and actual.dtype == np.int32
    assert (np.diff((actual < 0).astype(int), axis=-1) >= 0).all()
    np.testing.assert_array_equal(np.sort(actual, -1), np.sort(right, -1))


@pytest.mark.parametrize(
    ("count", "first", "local", "blocks"),
    [(1, 0, 1, 5), (3, 1, 2, 40), (16, 0, 1, 130), (64, 2, 30, 150), (40, 1, 1, 20), (4, 2, 2, 70)],
)
def test_by_scores(count, first, local, blocks):
    scorer = QueriesAsScores(BLOCK, count, first=first, local=local)
    draw = np.random.default_rng(count)
    rows, length = 37, blocks * BLOCK - 3
    at = np.sort(draw.integers(0, length, (2, rows)))
    at[:, -1] = length - 1
    start = np.minimum(at, np.array([[0], [length // 4]]))  # a document, and two
    at, start, pooled = jnp.asarray(at), jnp.asarray(start), jnp.zeros((2, scorer.windows(length), 1, blocks))
    choice = [jax.jit(lambda *x, fused=fused: scorer.select_rows(*x, length, None, fused)) for fused in (False, True)]
    for kind, scores in kinds(draw, (2, rows, 1, blocks)):
        query = jnp.asarray(scores, jnp.float32)
        actual, right = (choice[fused](query, pooled, at, start) for fused in (True, False))
        try:
            same(actual, right)
        except AssertionError as error:
            raise AssertionError(kind) from error


@pytest.mark.parametrize("blocks", [300, 1000, 2048])
def test_long_rows(blocks):
    scorer, rows = QueriesAsScores(BLOCK, 32), 5
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((1, rows, 1, blocks)), jnp.float32)
    at = jnp.arange(rows)[None] + blocks * BLOCK - rows
    given, length = (scores, jnp.zeros((1, blocks, 1, blocks)), at, at * 0), blocks * BLOCK
    actual, right = (
        jax.jit(lambda *x, fused=fused: scorer.select_rows(*x, length, None, fused)) for fused in (True, False)
    )
    same(actual(*given), right(*given))


CASES = [
    (sl.MoBA(BLOCK, 3), 100, (4, 4), 16, "float32", False),
    (sl.MoBA(BLOCK, 6, first=1, local=2), 300, (4, 1), 24, "bfloat16", True),
    (sl.MoBA(BLOCK, 8), 1100, (1, 1), 64, "float16", False),  # in two launches
    (sl.MoBA(32, 2), 170, (8, 1), 40, "float32", True),
    (sl.InfLLM(BLOCK, 4, local=2, dense_below=0, pool_size=16, pool_stride=8), 300, (4, 2), 16, "float32", True),
    (sl.InfLLM(BLOCK, 4, local=1, dense_below=0, pool_size=16, pool_stride=8), 300, (4, 2), 16, "bfloat16", False),
    (sl.NSA(32, 4, local=1), 250, (4, 1), 16, "float16", True),
    (sl.MSA(32, 3), 250, (4, 1), 16, "bfloat16", True),
]


@pytest.mark.parametrize(("scorer", "length", "heads", "size", "dtype", "packed"), CASES)
def test_scorers(scorer, length, heads, size, dtype, packed, monkeypatch):
    """With whole numbers, so that sums are exact in any order, and many are equal; but not where there are weights."""
    monkeypatch.setattr(choose, "MIN_LAUNCH_BLOCKS", 64)
    monkeypatch.setattr(base, "_SCORE_BYTES", 1 << 16)
    draw = np.random.default_rng(length)
    numbers = (lambda shape: draw.integers(-2, 3, shape)) if scorer.per_query_head else draw.standard_normal
    q = jnp.asarray(numbers((2, length, heads[0], size)), dtype)
    k = jnp.asarray(np.repeat(numbers((2, length // 8 + 1, heads[1], size)), 8, 1)[:, :length], dtype)
    ids = jnp.asarray(np.sort(draw.integers(-1, 3, (2, length)), 1)) if packed else None
    monkeypatch.setattr(base, "platform", lambda: "cpu")
    right = jax.jit(lambda q, k: scorer.select(q, k, ids).ids)(q, k)
    ran = []

    def watched(kernel, *rest, call=bridge.call_triton, **options):
        ran.append(kernel)
        return call(kernel, *rest, **options)

    monkeypatch.setattr(bridge, "call_triton", watched)
    monkeypatch.setattr(base, "platform", lambda: "gpu")
    actual = jax.jit(lambda q, k: scorer.select(q, k, ids).ids)(q, k)
    same(actual, right)
    kernels = ["choose_kernel"]
    if dtype != "float32":
        moba = ["choose_products_kernel"] * (1 + (length > 64 * BLOCK))
        kernels = moba if isinstance(scorer, sl.MoBA) else ["score_kernel", *kernels]
    assert ran and [x.fn.__name__ for x in ran] == kernels * (len(ran) // len(kernels))


def test_platforms_that_have_kernels(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(base, "platform", lambda: "cpu")
    assert not base._has_kernels(1, 4)
    monkeypatch.setattr(base, "platform", lambda: "gpu")
    assert base._has_kernels(1, choose.MAX_BLOCKS) and not base._has_kernels(1, choose.MAX_BLOCKS + 1)
    assert not base._has_kernels(1 << 16, 4)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not base._has_kernels(1, 4)
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert base._has_kernels(1, 4)
    monkeypatch.setattr(hardware, "local_device", lambda: "none")
    assert choose.unsupported(4, 1) == "none"


def test_compiles_and_fits(monkeypatch):
    """The largest tile of 131072 tokens: what there are no registers for is next to nothing."""
    found = []

    def call(kernel, grid, arrays, outputs, constants, num_warps, num_stages):
        dtypes = tuple(x.dtype.name for x in (*arrays, *outputs))
        found.append(Launch(kernel, dtypes, constants, num_warps, num_stages, TARGETS[90]))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    monkeypatch.setattr(bridge, "call_triton", call)
    rule, rows = choose.SelectionRule(128, 16, 0, 1), 131072
    q, pooled = (jax.ShapeDtypeStruct((1, n, 8, 128), "bfloat16") for n in (rows, rows // 128))
    jax.eval_shape(lambda *x: choose.select_by_products(rule, *x), q, pooled, jax.ShapeDtypeStruct((1, rows), "int32"))
    assert [one.constants["C"].SPAN for one in found] == [256, 512, 1024]
    used = resources(compiled(found[-1]))
    assert used.shared <= TARGETS[90].shared_memory and used.stack <= 128
    assert used.at_once(found[-1]) >= 2 and "mma.sync" in used.products and used.copies
