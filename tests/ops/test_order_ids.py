"""Order ids of the op: what they must equal to the bit, random calls, transformations, memory.

The table of `tests/ops/cases.py` has their values and gradients for every implementation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.tools import oracle
from tests.ops.cases import COMPILER, IMPLEMENTATIONS, compiled

T = 70
POSITIONS = np.arange(T, dtype=np.int32)


def arrays(batch=2, lengths=(T, T), heads=(4, 2), size=16, seed=0):
    draw, (t, s), (n, k) = np.random.default_rng(seed).standard_normal, lengths, heads
    shapes = (batch, t, n, size), (batch, s, k, size), (batch, s, k, size), (batch, t, n, size), (batch, t, n)
    return [draw(shape).astype(np.float32) for shape in shapes]


def answers(q, k, v, dout, dlse, mask, **options):
    """out, lse and the gradients of query, key and value, compiled."""

    @compiled
    def run(q, k, v, dout, dlse, ids):
        def op(q, k, v):
            return sl.block_sparse_attention(q, k, v, mask, return_lse=True, **ids, **options)

        results, pull = jax.vjp(op, q, k, v)
        return *results, *pull((dout, dlse))

    ids = {name: options.pop(name) for name in ("order_ids", "segment_ids") if name in options}
    return run(q, k, v, dout, dlse, ids)


def same(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(x, y)


# --- properties ------------------------------------------------------------------------------------------------------

BLOCKS = {"fwd_params": sl.FwdParams(q_blocksize=16, kv_blocksize=16)}
BLOCKS |= {"bwd_params": sl.BwdParams(q_blocksize=16, kv_blocksize=16)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_positions_are_causal_to_the_bit(implementation):
    options = BLOCKS | {"implementation": implementation}
    by_order = answers(*arrays(), sl.Full(), order_ids=np.tile(POSITIONS, (2, 1)), **options)
    # The same ids of documents, as the mask alone may have fewer kernels.
    same(by_order, answers(*arrays(), sl.Causal(), segment_ids=np.zeros((2, T), int), **options))


@pytest.mark.parametrize("mask", [sl.Full(), sl.Causal() & sl.Window(20), sl.preset("strided", local_attn_ctx=8)])
def test_equal_ids_limit_nothing(mask):
    options = BLOCKS | {"implementation": "xla"}
    ids = np.full((2, T), 7, np.int8)
    same(answers(*arrays(), mask, order_ids=ids, **options), answers(*arrays(), mask, **options))


def test_only_the_order_of_ids_counts():
    ids = np.random.default_rng(1).integers(0, 9, (2, T), np.int32)
    steps = np.sort(np.random.default_rng(2).integers(-(2**31), 2**31 - 1, 9)).astype(np.int32)
    call = functools.partial(answers, *arrays(), sl.Causal() & sl.Window(40), implementation="xla", **BLOCKS)
    same(call(order_ids=ids), call(order_ids=steps[ids]))


def test_a_pair_of_equal_ids_is_one_array():
    ids = sl.prefix_order([30, 1], T)
    call = functools.partial(answers, *arrays(), sl.Full(), implementation="xla")
    same(call(order_ids=ids), call(order_ids=(ids, ids)))


def test_helpers_are_their_patterns():
    """Prefixes, spans and blocks by their rules on positions."""
    q, k = POSITIONS[:, None], POSITIONS[None]
    spans = (POSITIONS >= 12) & (POSITIONS < 30)
    patterns = {
        "prefix": (sl.prefix_order(np.array([25]), T), (k <= q) | (k < 25)),
        "span": (sl.span_order(spans[None]), (k <= q) | (spans[:, None] & spans[None])),
        "block": (sl.block_order(16, T)[None], k // 16 <= q // 16),
    }
    for ids, allowed in patterns.values():
        result = answers(*arrays(batch=1), sl.Full(), order_ids=ids, implementation="xla")
        for ours, wanted in zip(result, answers(*arrays(batch=1), allowed, implementation="xla"), strict=True):
            np.testing.assert_allclose(ours, wanted, atol=2e-5)


def test_visibility_of_paligemma():
    """The rule that big_vision and openpi have for PaliGemma: keys whose cumulative sum of ``mask_ar`` is no larger."""
    rng = np.random.default_rng(5)
    mask_ar, valid = rng.integers(0, 2, (2, T)), np.arange(T) < np.array([[70], [55]])
    sums = np.cumsum(mask_ar, axis=1)
    allowed = (sums[:, None, :] <= sums[:, :, None]) & valid[:, None, :] & valid[:, :, None]
    q, k, v, dout, dlse = arrays()
    ids = {"order_ids": sums, "segment_ids": np.where(valid, 0, -1)}
    result = answers(q, k, v, dout, dlse, sl.Full(), implementation="xla", **ids)
    exact = oracle.DenseAttention(q, k, v, allowed[:, None], dout, dlse).answers
    for ours, name in zip(result, oracle.NAMES, strict=False):
        np.testing.assert_allclose(ours, exact[name], atol=3e-5, err_msg=name)


# --- random calls ----------------------------------------------------------------------------------------------------


def random_call(seed):
    """Arrays, ids and the allowed pairs of a call with any lengths, heads, mask and ids."""
    rng = np.random.default_rng(seed)
    t, s = (int(x) for x in rng.integers(1, 80, 2))
    heads = [(1, 1), (2, 1), (4, 2), (3, 3)][rng.integers(4)]
    masks = sl.Full(), sl.Causal(), sl.Window(int(rng.integers(40)), int(rng.integers(9))), sl.Causal() | sl.Prefix(9)
    mask, most = masks[rng.integers(4)], int(rng.choice([1, 4, 1000]))
    pair = tuple(rng.integers(-most, most, (2, n)).astype(np.int32) for n in (t, s))
    if rng.integers(2):  # sorted, as positions are
        pair = tuple(np.sort(x, axis=1) for x in pair)
    options, allowed = {"order_ids": pair}, mask.dense(t, s)[None, None] & oracle.in_order(*pair)
    if rng.integers(2):
        segments = tuple(np.sort(rng.integers(-1, 3, (2, n)), axis=1).astype(np.int32) for n in (t, s))
        options["segment_ids"], allowed = segments, allowed & oracle.same_segment(*segments)
    if rng.integers(2):
        sizes = [int(2 ** rng.integers(3, 6)) for _ in range(4)]
        options["fwd_params"] = sl.FwdParams(q_blocksize=sizes[0], kv_blocksize=sizes[1])
        options["bwd_params"] = sl.BwdParams(q_blocksize=sizes[2], kv_blocksize=sizes[3])
    return arrays(lengths=(t, s), heads=heads, size=8, seed=seed), mask, options, allowed


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed):
    args, mask, options, allowed = random_call(seed)
    result = answers(*args, mask, implementation="xla", **options)
    exact = oracle.DenseAttention(*args[:3], allowed, *args[3:])
    rough = oracle.DenseAttention(*args[:3], allowed, *args[3:], dtype=np.float32).answers
    budgets = oracle.budgets(exact.answers, rough, exact.absolute_sums(), np.float32)
    for ours, name in zip(result, oracle.NAMES, strict=False):
        assert oracle.largest_error(ours, exact.answers[name]) <= budgets[name], name


# --- transformations and memory --------------------------------------------------------------------------------------


def test_vmap_maps_ids():
    q, k, v, *_ = arrays(batch=3)
    ids = np.random.default_rng(4).integers(0, 5, (3, T), np.int32)
    call = functools.partial(sl.block_sparse_attention, implementation="xla")
    mapped = jax.vmap(lambda q, k, v, ids: call(q, k, v, sl.Full(), order_ids=ids))(q, k, v, ids)
    np.testing.assert_allclose(mapped, call(q, k, v, sl.Full(), order_ids=ids), atol=1e-6)


def test_selections_stay_within_the_order():
    q, k, v, dout, dlse = arrays()
    ids = np.random.default_rng(6).integers(0, 9, (2, T), np.int32)
    blocks = np.random.default_rng(7).integers(-1, 5, (2, T, 1, 3)).astype(np.int32)
    chosen = (blocks[:, :, 0, :, None] == np.arange(5)).any(2).repeat(16, 2)[..., :T]
    selection = sl.Selection(blocks, block=16)
    result = answers(q, k, v, dout, dlse, sl.Causal(), order_ids=ids, selection=selection, implementation="xla")
    allowed = np.tri(T, dtype=bool) & chosen[:, None] & oracle.in_order(ids, ids)
    exact = oracle.DenseAttention(q, k, v, allowed, dout, dlse).answers
    for ours, name in zip(result, oracle.NAMES, strict=False):
        np.testing.assert_allclose(ours, exact[name], atol=3e-5, err_msg=name)


def test_second_derivatives():
    q, k, v, *_ = (x[:, :12] for x in arrays(heads=(2, 2)))
    ids = np.arange(12)[None].repeat(2, 0) // 4

    def loss(mask, **options):
        return lambda q: (sl.block_sparse_attention(q, k, v, mask, implementation="xla", **options) ** 2).sum()

    hessians = [
        jax.grad(lambda q, f=f: jnp.vdot(jax.grad(f)(q), v))(jnp.asarray(q))
        for f in (loss(sl.Full(), order_ids=ids), loss(ids[0, None, :] <= ids[0, :, None]))
    ]
    np.testing.assert_allclose(*hessians, atol=1e-5)


def test_no_array_of_all_pairs():
    length = 8192
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q, k, v, ids):
        return sl.block_sparse_attention(q, k, v, sl.Full(), order_ids=ids, implementation="xla").sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=COMPILER).lower(x, x, x, ids)
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < length**2 / 8  # not even one bit a pair


def test_exports():
    q, k, v, *_ = map(jnp.asarray, arrays())
    ids = sl.prefix_order([30, 1], T)
    call = jax.jit(lambda *x: sl.block_sparse_attention(*x[:3], sl.Full(), order_ids=x[3], implementation="xla"))
    exported = jax.export.deserialize(jax.export.export(call)(q, k, v, ids).serialize())
    np.testing.assert_array_equal(exported.call(q, k, v, ids), call(q, k, v, ids))


def test_an_empty_batch():
    q, k, v, *_ = arrays(batch=0)
    assert sl.block_sparse_attention(q, k, v, sl.Full(), order_ids=np.zeros((0, T), int)).shape == (0, T, 4, 16)
