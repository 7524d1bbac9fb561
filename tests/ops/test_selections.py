"""Attention to blocks chosen at run time: one table of calls, and what is particular to selections.

An implementation that takes selections is one more name in `IMPLEMENTATIONS`; interpreted kernels answer to the core.
"""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.tools.oracle import DenseAttention
from tests.ops import cases
from tests.ops.cases import SMALL, compiled
from tests.programs import USUAL, largest, sampled

IMPLEMENTATIONS = ["pallas_tpu", "triton", "xla", "reference"]
# What computes blocks, and so must not read others.
BY_BLOCKS = [name for name in IMPLEMENTATIONS if name != "reference"]


def calls(names, *granularities):
    """Who answers for which granularity: TPU kernels want queries that choose together."""
    return [(name, each) for name in names for each in granularities if each >= 16 or name != "pallas_tpu"]


@dataclasses.dataclass(frozen=True, eq=False)
class Case(cases.Case):
    """A call with a random selection of k blocks, among them some twice and some that are none."""

    granularity: int = 1
    heads: tuple[int, int] = (4, 2)  # which may choose apart from each other
    scope: str = "K"  # who chooses: all heads together ("1"), each key head, or each query head
    block: int = 32
    k: int = 3
    tile: int | None = None  # rows of q that a step of the kernel of dk and dv loads

    def params(self):
        tile = {} if self.tile is None else {"bwd_params": sl.BwdParams(blocksize_n=self.tile)}
        return super().params() | tile

    def ids(self, seed=0):
        rows, columns = -(-self.shape[0] // self.granularity), -(-self.shape[1] // self.block)
        heads = {"1": 1, "K": self.heads[1], "N": self.heads[0]}[self.scope]
        return np.random.default_rng(seed).integers(-1, columns, (self.batch, rows, heads, self.k)).astype(np.int32)

    def selection(self):
        return sl.Selection(self.ids(), block=self.block, granularity=self.granularity)

    def allowed(self):
        return super().allowed() & selected_pairs(self.ids(), self.granularity, self.block, self.heads[0], self.shape)


def selected_pairs(ids, granularity, block, heads, shape):
    """Bool [B, N, T, S], one id after the other."""
    pairs = np.zeros((len(ids), heads, *shape), bool)
    for b, row, head, slot in np.ndindex(*ids.shape):
        j, group = ids[b, row, head, slot], heads // ids.shape[2]
        if j >= 0:
            queries, keys = (slice(i * n, (i + 1) * n) for i, n in ((row, granularity), (j, block)))
            pairs[b, head * group : (head + 1) * group, queries, keys] = True
    return pairs


def _table():
    # An orthogonal array: any two of granularity, scope and block meet; so do any of these and the grouping of heads.
    causal = sl.Causal()
    for i, granularity in enumerate((1, 16, 64)):
        for j, scope in enumerate("1KN"):
            block, heads = (16, 32, 64)[(i + j) % 3], (2, 2) if i == j else (8, 2)
            name, core = f"{granularity}-{scope}-{block}-{heads[0]}:{heads[1]}", i != j
            yield Case(name, causal, 100, heads=heads, granularity=granularity, scope=scope, block=block, core=core)
    window, array = sl.Window(20, 40), sl.Array(np.random.default_rng(1).random((75, 130)) < 0.7)
    holes = jnp.asarray(np.random.default_rng(2).random((4, 75, 130)) < 0.7)
    rare = jnp.asarray(np.random.default_rng(3).random((2, 70, 750)) < 0.3)
    strided = sl.preset("strided", **SMALL["strided"])
    ids = cases._documents(2, 75, 130)
    large = {"heads": (8, 2), "dtype": "bfloat16"}
    yield Case("128", causal, 300, granularity=128, block=64, batch=1)
    yield Case("bfloat16", causal, 150, granularity=16, block=32, **large)
    yield Case("bfloat16-tokens", causal, 100, block=16, k=5, **large, core=False)
    yield Case("full", sl.Full(), 96, granularity=16, scope="N", sinks=True)  # free but for the parts that chose
    yield Case("documents", window, 75, 130, segments=ids, granularity=16, soft_cap=2.0, sinks=True, scale=0.5)
    yield Case("documents-tokens", sl.Full(), 75, 130, segments=ids, scope="N", block=16)
    order = cases._levels(2, 75, 130)
    yield Case("order", window, 75, 130, order_ids=order, granularity=16, sinks=True)
    yield Case("order-tokens", sl.Full(), 75, 130, segments=ids, order_ids=order, scope="N", block=16)
    yield Case("heads-in-turn", (causal, sl.Window(50)), 100, granularity=16, scope="1", block=16)
    yield Case("tables", (array, causal), 75, 130, scope="K", block=16, heads=(4, 1))
    yield Case("table", array, 75, 130, granularity=64, block=16, core=False)
    yield Case("run-time", holes[:1], 75, 130, granularity=16, block=48, heads=(4, 4), segments=ids)
    yield Case("run-time-heads", holes, 75, 130, block=16, scope="1")
    yield Case("chain", strided, 100, granularity=64, split=True)
    yield Case("long-tiles", causal, 100, tile=128)
    yield Case("many", causal, 100, granularity=16, block=16, k=40, scope="1", core=False)
    yield Case("none", causal, 40, granularity=16, k=0)
    yield Case("none-sinks", causal, 40, k=0, sinks=True, core=False)
    yield Case("none-two-queries", sl.Full(), 2, 155, heads=(4, 1), k=0, sinks=True)
    # Queries that hardly agree, over many blocks: on GPUs by key block.
    many = {"k": 2, "block": 16, "batch": 1}
    yield Case("scattered", causal, 300, heads=(4, 2), sinks=True, **many)
    yield Case("scattered-heads", (sl.Full(), sl.Window(300)), 70, 500, heads=(4, 2), scope="1", soft_cap=2.0, **many)
    yield Case("scattered-documents", sl.Full(), 75, 700, segments=cases._documents(1, 75, 700), scope="N", **many)
    levels = {"order_ids": cases._levels(1, 75, 700), "segments": cases._documents(1, 75, 700)}
    yield Case("scattered-order", sl.Full(), 75, 700, scope="N", **many, **levels)
    yield Case("scattered-many", sl.Full(), 70, 900, heads=(8, 2), k=9, block=48, batch=2, sizes=(16, 24))
    yield Case("scattered-run-time", rare, 70, 750, heads=(2, 2), scope="1", k=3, block=32)
    yield Case("scattered-bfloat16", sl.Window(300), 70, 900, k=4, block=144, **large | {"heads": (4, 2)})
    yield Case("one-query", sl.Full(), 1, 130, block=16, sizes=(16, 24))


CASES = list(_table())
COMPILED = {"xla", *cases.COMPILED}
CALLS = [
    (name, case)
    for case in CASES
    for name, _ in calls(IMPLEMENTATIONS, case.granularity)
    if case.core or name in COMPILED
]


@pytest.mark.parametrize(("implementation", "case"), sampled(CALLS, 0.6), ids=str)
def test_values_and_gradients(implementation, case):
    cases.check(case, case.call(implementation))


# --- many selections, few programs -----------------------------------------------------------------------------------

B, T, S, N, K, H = 2, 70, 90, 4, 2, 8
BLOCK = 16
COLUMNS = -(-S // BLOCK)
WINDOW = sl.Causal() & sl.Window(60)


def arrays(seed=0):
    """Query, key, value and the cotangents of out and lse."""
    draw = np.random.default_rng(seed).standard_normal
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H), (B, T, N)
    return [jnp.asarray(draw(shape).astype(np.float32)) for shape in shapes]


@functools.partial(compiled, static_argnames=("granularity", "implementation", "mask"))
def answers(q, k, v, dout, dlse, ids, *, granularity, implementation, mask=WINDOW):
    """Out, lse and gradients, one program for all ids of one shape."""
    chosen = sl.Selection(ids, block=BLOCK, granularity=granularity)

    def op(q, k, v):
        return sl.block_sparse_attention(
            q, k, v, mask, selection=chosen, implementation=implementation, return_lse=True
        )

    results, pullback = jax.vjp(op, q, k, v)
    return *results, *pullback((dout, dlse))


def ids_of(granularity, heads=K, k=4, seed=0, least=-1, columns=COLUMNS):
    shape = B, -(-T // granularity), heads, k
    return np.random.default_rng(seed).integers(least, columns, shape).astype(np.int32)


def same(actual, wanted):
    for ours, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("implementation", "granularity"), calls(BY_BLOCKS, 1, 16, 64))
def test_random_selections(granularity, implementation):
    """Ten each: sparse and crowded ones, agreeing and independent neighbours, rows without a block.

    Interpreted kernels take the first four.
    """
    rng = np.random.default_rng(granularity)
    q, k, v, dout, dlse = arrays()
    for seed in range(10 if implementation in COMPILED else 4):
        ids = ids_of(granularity, seed=seed, least=-1 - 2 * int(rng.integers(3)))
        ids = np.where(rng.random(ids.shape) < rng.random(), ids, ids[:, :1])
        ids = np.where(rng.random(ids.shape[:3])[..., None] < 0.1, -1, np.maximum(ids, -1)).astype(np.int32)
        allowed = WINDOW.dense(T, S) & selected_pairs(ids, granularity, BLOCK, N, (T, S))
        exact = DenseAttention(q, k, v, allowed, dout, dlse)
        right, sizes = exact.answers, exact.absolute_sums()
        actual = answers(q, k, v, dout, dlse, ids, granularity=granularity, implementation=implementation)
        for name, ours in zip(("out", "lse", "dq", "dk", "dv"), actual, strict=True):
            np.testing.assert_allclose(ours, right[name], atol=2e-5, rtol=2e-5)
            nothing = (sizes[name] == 0) & np.isfinite(right[name])
            assert not np.asarray(ours)[nothing].any()


@pytest.mark.parametrize(("implementation", "granularity"), calls(IMPLEMENTATIONS, 1, 16))
def test_duplicates_order_and_numbers_without_a_block(granularity, implementation):
    """None of these changes a bit: kernels see sets."""
    call = functools.partial(answers, *arrays(), granularity=granularity, implementation=implementation)
    rng, every = (
        np.random.default_rng(0),
        np.zeros_like(ids_of(granularity, k=COLUMNS)) + np.arange(COLUMNS, dtype=np.int32),
    )
    ids = rng.permuted(every, axis=-1)[..., :4]
    ids[..., 0], ids[..., 3] = -1, ids[..., 2]
    wanted = call(np.where(np.arange(4) == 3, -1, ids))
    same(call(ids), wanted)
    same(call(rng.permuted(ids, axis=-1)), wanted)
    none = np.array([COLUMNS, COLUMNS + 1, 2**31 - 1, -2, -(2**31)], np.int32)  # nobody can see these inside jit
    same(call(np.where(ids < 0, rng.choice(none, ids.shape), ids)), wanted)


@pytest.mark.parametrize(("implementation", "granularity"), calls(BY_BLOCKS, 1, 16))
def test_poisoned_tails(granularity, implementation):
    """What nobody chose is never read."""
    q, k, v, dout, dlse = arrays()
    ids = ids_of(granularity, columns=3)
    for heads in (K, 1):  # also where blocks are chosen for one batch entry or head only
        own = ids[:, :, :heads].copy()
        own[1, :, :1] = np.minimum(own[1, :, :1], 1)
        used = np.stack([[np.isin(np.arange(COLUMNS), own[b, :, h % heads]) for h in range(K)] for b in range(B)])
        read = np.repeat(used, BLOCK, axis=2)[:, :, :S].swapaxes(1, 2)[..., None]
        assert 0 < read.mean() < 0.6
        call = functools.partial(answers, granularity=granularity, implementation=implementation)
        poisoned = (jnp.where(read, x, jnp.nan) for x in (k, v))
        same(call(q, *poisoned, dout, dlse, own), call(q, k, v, dout, dlse, own))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dead_rows(implementation):
    """Queries without a key give 0 and -inf, and nothing comes of their cotangents, also NaN."""
    q, k, v, dout, dlse = arrays()
    ids = ids_of(16)
    ids[:, 2] = -1
    ids[:, 3] = COLUMNS - 1  # in the future of all
    dead = (np.arange(T) // 16 == 2) | (np.arange(T) // 16 == 3)
    call = functools.partial(answers, q, k, v, granularity=16, implementation=implementation)
    wild = [jnp.where(dead.reshape(T, *[1] * (x.ndim - 2)), jnp.nan, x) for x in (dout, dlse)]
    out, lse, dq, *rest = call(*wild, ids)
    same((out, lse, dq, *rest), call(dout, dlse, ids))
    assert not out[:, dead].any() and not dq[:, dead].any() and bool((lse[:, dead] == -jnp.inf).all())
    assert all(jnp.isfinite(x).all() for x in (dq, *rest))


# --- transformations -------------------------------------------------------------------------------------------------


def loss(q, k, v, chosen, **options):
    out, lse = sl.block_sparse_attention(q, k, v, WINDOW, selection=chosen, return_lse=True, **options)
    return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


def close(actual, wanted):
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", BY_BLOCKS)
def test_vmap_equals_a_loop(implementation):
    q, k, v, *_ = arrays()
    several = [jnp.stack([x, x * 0.7]) for x in (q, k, v)]
    chosen = sl.Selection(ids_of(16), block=BLOCK, granularity=16)
    many = jax.tree.map(lambda x: jnp.stack([x, (x[:, ::-1] + 1) % COLUMNS]), chosen)
    gradients = jax.value_and_grad(functools.partial(loss, implementation=implementation), (0, 1, 2))
    one = compiled(gradients)
    every = compiled(lambda *x: (jax.vmap(gradients)(*x), jax.vmap(gradients, (None, None, None, 0))(q, k, v, x[3])))
    for mapped, operands in zip(every(*several, many), (several, [[x] * 2 for x in (q, k, v)]), strict=True):
        for i in range(2):
            own, found = (jax.tree.map(lambda x: x[i], x) for x in (many, mapped))  # noqa: B023
            close(found, one(*(x[i] for x in operands), own))


def test_layers_share_one_under_scan_and_remat():
    q = arrays()[0]
    k, v = (x[:, :T, :1] for x in arrays()[1:3])
    chosen = sl.Selection(ids_of(16, heads=1, columns=5), block=BLOCK, granularity=16)

    def layer(x, chosen):
        return x + sl.block_sparse_attention(x, k, v, sl.Causal(), selection=chosen)

    def looped(q, chosen):
        return jnp.sin(layer(layer(q, chosen), chosen)).sum()

    def scanned(q, chosen):
        step = jax.checkpoint(lambda x, _: (layer(x, chosen), None))
        return jnp.sin(jax.lax.scan(step, q, None, length=2)[0]).sum()

    close(*(compiled(jax.value_and_grad(f))(q, chosen) for f in (scanned, looped)))


def test_shard_map_with_what_all_devices_share():
    q, k, v, *_ = arrays()
    chosen = sl.Selection(ids_of(16)[:1], block=BLOCK, granularity=16)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, same = jax.P("batch"), jax.P()

    def total(q, k, v, chosen):
        ids = jnp.broadcast_to(chosen.ids, (B, *chosen.ids.shape[1:]))
        own = sl.Selection(ids, block=BLOCK, granularity=16)
        return jax.lax.psum(loss(q, k, v, own), "batch")

    mapped = jax.shard_map(total, mesh=mesh, in_specs=(spread, spread, same, same), out_specs=same)
    everywhere = sl.Selection(jnp.broadcast_to(chosen.ids, (B, *chosen.ids.shape[1:])), block=BLOCK, granularity=16)
    found = compiled(jax.grad(mapped, (0, 1, 2)))(q, k, v, chosen)
    close(found, compiled(jax.grad(loss, (0, 1, 2)))(q, k, v, everywhere))


def test_without_a_batch_and_without_jit():
    q, k, v, *_ = (x[:1] for x in arrays())
    ids = ids_of(16)[:1]
    want = sl.block_sparse_attention(q, k, v, WINDOW, selection=sl.Selection(ids, block=BLOCK, granularity=16))
    chosen = sl.Selection(ids[0], block=BLOCK, granularity=16)
    close(sl.block_sparse_attention(q[0], k[0], v[0], WINDOW, selection=chosen), want[0])
    empty = sl.Selection(ids[:0], block=BLOCK, granularity=16)
    assert sl.block_sparse_attention(q[:0], k[:0], v[:0], WINDOW, selection=empty).shape == (0, T, N, H)
    total = functools.partial(loss, chosen=empty)
    assert [g.shape[0] for g in jax.grad(total, (0, 1, 2))(q[:0], k[:0], v[:0])] == [0, 0, 0]


def test_numbers_without_a_block_are_refused_where_they_are_seen():
    q, k, v, *_ = arrays()
    chosen = sl.Selection(ids_of(16, columns=COLUMNS + 1), block=BLOCK, granularity=16)
    with pytest.raises(ValueError, match=f"ids must be below {COLUMNS}, the number of blocks of 16 in S = {S} keys"):
        sl.block_sparse_attention(q, k, v, WINDOW, selection=chosen)
    with pytest.raises(ValueError, match="ids must be below"):
        jax.eval_shape(functools.partial(loss, chosen=chosen), q, k, v)  # a constant of what is traced


def test_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        for mask in (WINDOW, sl.Full(), (sl.Causal(), WINDOW), jnp.ones((T, S), bool)):
            for name, granularity in calls(IMPLEMENTATIONS, 1, 16):
                chosen = sl.Selection(jnp.asarray(ids_of(granularity), jnp.int8), block=BLOCK, granularity=granularity)
                q, k, v = (x.astype(jnp.bfloat16) for x in arrays()[:3])
                segments = jnp.zeros((B, T), jnp.int8), jnp.zeros((B, S), jnp.int8)
                call = functools.partial(
                    sl.block_sparse_attention,
                    plan_or_mask=mask,
                    segment_ids=segments,
                    selection=chosen,
                    implementation=name,
                )
                found = jax.eval_shape(lambda *x: jax.vjp(call, *x)[1](call(*x)), q, k, v)  # noqa: B023
                assert [x.dtype for x in found] == ["bfloat16"] * 3


# --- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [1, 64])
def test_no_array_is_of_size_t_by_s_nor_gathered(granularity):
    length, k, block = 4096, 8, 32
    q, kv = (jax.ShapeDtypeStruct((1, length, n, H), jnp.float32) for n in (4, 2))
    chosen = jax.eval_shape(
        lambda ids: sl.Selection(ids, block=block, granularity=granularity),
        jax.ShapeDtypeStruct((1, length // granularity, 2, k), jnp.int32),
    )
    slopes = jax.grad(functools.partial(loss_of, implementation="xla"), (0, 1, 2))
    rows = max(granularity, 16)
    lists = 2 * length // granularity * k  # as many as there are ids
    table = -(-length // rows) * -(-length // block)  # what the mask says of each block
    most = max(q.size, 4 * lists, table)  # three numbers for each entry say where it is in the table
    assert largest(slopes, q, kv, kv, chosen) <= most <= length * length // 64
    used = jax.jit(slopes).lower(q, kv, kv, chosen).compile(USUAL).memory_analysis().temp_size_in_bytes
    assert used < 4 * 10 * q.size + 4 * 24 * lists  # float32: a few arrays like q; a few numbers for each entry
    assert used < 4 * 4 * length * k * block  # one head's keys, gathered for each query, without their size


def loss_of(q, k, v, chosen, **options):
    return (sl.block_sparse_attention(q, k, v, sl.Causal(), selection=chosen, **options) ** 2).sum()


# --- the value -------------------------------------------------------------------------------------------------------


def test_a_selection_is_an_immutable_pytree_of_its_ids():
    chosen = sl.Selection(np.zeros((2, 5, 1, 3), np.int8), block=32, granularity=16)
    assert repr(chosen) == "Selection(int32[2, 5, 1, 3], block=32, granularity=16)"
    assert [x.dtype for x in jax.tree.leaves(chosen)] == [jnp.int32]
    assert str(jax.tree_util.tree_flatten_with_path(chosen)[0][0][0]) == "(GetAttrKey(name='ids'),)"
    again = pickle.loads(pickle.dumps(chosen))
    assert (again.block, again.granularity) == (32, 16) and np.array_equal(again.ids, chosen.ids)
    for change in (lambda: setattr(chosen, "block", 16), lambda: delattr(chosen, "ids")):
        with pytest.raises(AttributeError, match="immutable"):
            change()
    seen = []
    jax.jit(lambda x: seen.append(repr(x)))(chosen)
    assert seen == ["Selection(int32[2, 5, 1, 3], block=32, granularity=16)"]
    assert repr(jax.tree.map(lambda _: 0, chosen)) == "Selection(0, block=32, granularity=16)"
    assert jax.jit(lambda x: x)(chosen).granularity == 16


def brute_force(scores, k, block, granularity, causal, forced, start):
    """The k blocks of each row, one row after the other."""
    rows, heads, blocks = scores.shape
    ids = np.full((rows, heads, k), -1)
    for row, head in np.ndindex(rows, heads):
        own = min((start + (row + 1) * granularity - 1) // block, blocks - 1)
        may = [j for j in range(blocks) if j <= own or not causal]
        must = [j for j in may if forced is not None and forced(np.array(own), np.array(j))]
        rest = [j for j in may if j not in must and scores[row, head, j] > -np.inf]
        best = [*must, *sorted(rest, key=lambda j: (-scores[row, head, j], j))][:k]
        ids[row, head, : len(best)] = best
    return ids


@pytest.mark.parametrize(
    ("k", "block", "granularity", "causal", "forced", "start"),
    [
        (3, 64, 16, True, None, 0),
        (3, 16, 16, True, sl.Window(0), 0),  # MoBA, MSA
        (4, 64, 1, True, sl.Prefix(1) | sl.Window(1), 0),  # NSA
        (5, 32, 64, True, sl.Prefix(1) | sl.Window(2), 100),  # InfLLM-v2, the last queries of many keys
        (2, 32, 16, False, None, 0),
        (12, 32, 16, False, sl.Prefix(2), 0),  # more than there are
        (0, 32, 16, True, None, 0),
    ],
)
def test_top_k_blocks(k, block, granularity, causal, forced, start):
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 3, (2, 20, 2, 7)).astype(np.float32)  # full of ties
    scores[rng.random(scores.shape) < 0.2] *= -1  # among them -0, which equals 0
    scores[rng.random(scores.shape) < 0.1] = np.inf
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    options = {"block": block, "granularity": granularity, "causal": causal, "forced": forced, "return_scores": True}
    found, best = sl.top_k_blocks(jnp.asarray(scores), k, start=start, **options)
    assert (found.block, found.granularity) == (block, granularity) and found.ids.shape == (2, 20, 2, k)
    for ids, row in zip(found.ids, scores, strict=True):
        np.testing.assert_array_equal(ids, brute_force(row, k, block, granularity, causal, forced, start))
    padded = np.concatenate([scores, np.full((*scores.shape[:3], 1), -np.inf)], axis=-1)
    np.testing.assert_array_equal(best, np.take_along_axis(padded, np.asarray(found.ids), axis=-1))
    traced, _ = jax.jit(lambda scores, start: sl.top_k_blocks(scores, k, start=start, **options))(scores[0], start)
    np.testing.assert_array_equal(traced.ids, found.ids[0])


def test_scores_of_minus_infinity_or_nan_are_never_selected():
    scores = jnp.array([jnp.nan, 1.0, -jnp.inf, 0.0]) * jnp.ones((1, 1, 1))
    assert sl.top_k_blocks(scores, 4, block=16, causal=False).ids.tolist() == [[[1, 3, -1, -1]]]


def test_gradients_flow_through_scores_and_pools_not_through_the_choice():
    q, k, v, *_ = arrays()
    pooled = sl.mean_pool_blocks(k, BLOCK)
    want = np.stack([np.asarray(k[:, j * BLOCK : (j + 1) * BLOCK]).mean(1) for j in range(COLUMNS)], axis=1)
    np.testing.assert_allclose(pooled, want, rtol=1e-5, atol=1e-6)
    ends = jax.grad(lambda k: sl.mean_pool_blocks(k, BLOCK)[:, -1].sum())(k)
    np.testing.assert_allclose(ends[:, -(S % BLOCK) :], 1 / (S % BLOCK), rtol=1e-6)
    assert not ends[:, : -(S % BLOCK)].any()
    assert sl.mean_pool_blocks(k.astype(jnp.bfloat16), BLOCK).dtype == jnp.bfloat16

    def choose(q, k):
        scores = jnp.einsum("btkgh,bjkh->btkj", q.reshape(B, T, K, N // K, H), sl.mean_pool_blocks(k, BLOCK))
        return sl.top_k_blocks(scores, 2, block=BLOCK, forced=sl.Window(0), return_scores=True)

    def total(q, k, scorer_q, scorer_k):
        return loss(q, k, v, choose(scorer_q, scorer_k)[0])

    by_choice = compiled(jax.grad(total, (0, 2, 3)))(q, k, q, k)
    assert by_choice[0].any() and not by_choice[1].any() and not by_choice[2].any()
    gates = jax.grad(lambda q, k: jax.nn.logsumexp(choose(q, k)[1]), (0, 1))(q, k)
    assert all(jnp.isfinite(x).all() and x.any() for x in gates)
