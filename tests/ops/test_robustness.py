"""Calls that are unusual and right: each was once answered wrongly, or with an error that said nothing."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from tests.ops.cases import IMPLEMENTATIONS, compiled

Q = jax.random.normal(jax.random.key(0), (2, 40, 2, 8))


def attend(q, mask, **options):
    return sl.block_sparse_attention(q, q, q, mask, **options)


@pytest.mark.parametrize("array", [np.ones((40, 40), bool), np.kron(np.eye(2), np.ones((20, 20))) > 0])
def test_tables_without_partial_blocks(array):
    params = sl.FwdParams(q_blocksize=40, kv_blocksize=40)
    for options in ({}, {"fwd_params": params}):
        value, slope = jax.value_and_grad(lambda q, o=options: attend(q, array, **o).sum())(Q)
        right, slope_right = jax.value_and_grad(lambda q: attend(q, array, implementation="reference").sum())(Q)
        np.testing.assert_allclose(value, right, rtol=1e-5)
        np.testing.assert_allclose(slope, slope_right, atol=1e-5)


class Reach(sl.Mask):
    """A user's mask that is no dataclass."""

    def __init__(self, reach):
        self.reach = reach

    def __call__(self, q, k):
        return (k <= q) & (q - k <= self.reach)


def test_masks_of_users_are_distinct():
    near, far = Reach(1), Reach(30)
    assert near != far and near == near
    for mask in (near, far):
        right = attend(Q, sl.Causal() & sl.Window(mask.reach))
        np.testing.assert_allclose(attend(Q, mask), right, atol=1e-6)


def test_block_states_of_users_make_their_plans():
    class Halves(sl.Mask):
        def __call__(self, q, k):
            return (q < 256) & (k < 256)

        def block_state(self, q0, q1, k0, k1):
            assert np.all(q1 - q0 >= 15), "asked about blocks, never about pairs"
            return np.where((q0 >= 256) | (k0 >= 256), 0, np.where((q1 < 256) & (k1 < 256), 2, 1)).astype(np.int8)

    assert sl.make_plan(Halves(), 512).chains[0][0].fwd_blocks == 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_comes_of_rows_that_attend_to_nothing(implementation):
    ids = jnp.array([[0] * 30 + [-1] * 10] * 2)

    def loss(q):
        out, lse = attend(q, sl.Causal(), segment_ids=ids, return_lse=True, implementation=implementation)
        norms = jnp.where(ids[..., None] >= 0, jnp.linalg.norm(out, axis=-1), 0)  # NaN cotangents at out = 0
        return jnp.where(lse > -jnp.inf, lse**2, 0).sum() + norms.sum()  # NaN cotangents at lse = -inf

    slope = jax.grad(loss)(Q)
    assert np.all(np.isfinite(slope)) and np.any(slope[:, :30] != 0) and np.all(slope[:, 30:] == 0)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [*((name, "float16") for name in IMPLEMENTATIONS), ("xla", "float32"), ("xla", "bfloat16")],
)
def test_strict_promotion_of_dtypes_and_ranks(implementation, dtype):
    options = {"segment_ids": jnp.zeros((2, 40), int), "sinks": jnp.zeros(2, dtype), "logits_soft_cap": 5.0}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise" if implementation == "xla" else "allow"):
        slope = compiled(jax.grad(lambda q: attend(q, sl.Causal(), implementation=implementation, **options).sum()))(
            Q.astype(dtype)
        )
    assert slope.dtype == dtype and np.all(np.isfinite(slope))


def test_empty_batches():
    assert attend(Q[:0], sl.Causal()).shape == (0, 40, 2, 8)
    assert jax.grad(lambda q: attend(q, (sl.Causal(), sl.Full())).sum())(Q[:0]).shape == (0, 40, 2, 8)


def test_mask_mods_in_jax_numpy_are_planned_inside_jit():
    mask = sl.from_mask_mod(lambda b, h, q, k: jnp.where(q >= k, True, False))
    np.testing.assert_allclose(jax.jit(lambda q: attend(q, mask))(Q), attend(Q, sl.Causal()), atol=1e-6)


def test_blocks_of_the_backward_serve_run_time_masks():
    mask = jnp.tril(jnp.ones((40, 40), bool))
    slopes = [
        jax.grad(lambda q, b=b: (attend(q, mask, bwd_params=b) * Q).sum())(Q)
        for b in (None, sl.BwdParams(q_blocksize=16, kv_blocksize=8))
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-5, atol=1e-5)
    text = str(jax.make_jaxpr(jax.grad(lambda q: attend(q, mask, bwd_params=sl.BwdParams(kv_blocksize=8)).sum()))(Q))
    assert "[5,2,2,8,8]" in text  # five key blocks of 8 rows in the backward, where the default has one of 128


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.full((2, 40), 2**31 + 1, np.uint32), "must fit into int32"),
        (np.full((2, 40), -(2**40)), "must fit into int32"),
        (np.zeros((2, 40)), "must be integers"),
    ],
)
def test_segment_ids_are_not_cut_off(ids, message):
    with pytest.raises(ValueError, match=message):
        attend(Q, sl.Causal(), segment_ids=ids)


def test_segment_ids_of_numpy_and_lists():
    ids = np.repeat([[1, 7]], 20, axis=1).repeat(2, axis=0)
    right = attend(Q, sl.Causal(), segment_ids=jnp.asarray(ids, jnp.int32))
    for form in (ids, ids.astype(np.uint8), ids.tolist()):
        np.testing.assert_array_equal(attend(Q, sl.Causal(), segment_ids=form), right)


def test_lengths_of_arrays_are_checked_wherever_they_stand():
    small = np.tri(8, dtype=bool)
    for mask in ([small, ~small], sl.Array(small), (sl.Causal(), sl.Array(small))):
        with pytest.raises(ValueError, match=r"mask: .*\(40, 40\)"):
            attend(Q, mask)


def test_a_refused_plan_leaves_no_trace():
    params = sl.FwdParams(q_blocksize=8, kv_blocksize=8)
    for length, options in ((72.0, {"fwd_params": params}), (72, {"fwd_params": {}}), (72, {"bwd_params": params})):
        with pytest.raises(ValueError, match="must be"):
            sl.make_plan(sl.Causal(), length, **options)
    assert sl.make_plan(sl.Causal(), 72, fwd_params=params).q_len == 72


def test_numpy_integers_do_not_wrap_around():
    assert sl.Window(0, np.uint8(2)).block_state(0, 0, 0, 0) == 2
    assert sl.Blocks(sl.Causal(), np.uint8(20))(300, 20)
    assert sl.Random(np.uint8(20), 3) == sl.Random(20, 3)
    edge = np.int32(2**31 - 1)
    assert sl.Columns(4, 3).block_state(edge, edge, edge, edge) == 2


def test_random_draws_agree_on_far_rows():
    # One draw from each 3000th of the keys; row times number passes 2**31 in the last of them, which are looked at.
    row, keys = 800_000, np.arange(700_000, 800_000)
    mask = sl.Random(3000, 1)
    hits = np.flatnonzero(mask(np.array([row]), keys))
    assert len(hits) == 3000 // 8
    np.testing.assert_array_equal(hits, np.flatnonzero(mask(jnp.array([row]), jnp.asarray(keys))))


def test_bound_masks_are_what_they_were():
    masks = (sl.Causal(), sl.Window(3))
    assert sl.as_masks(sl.bind(masks, 4, 4096, 4096)) == masks


def test_arrays_survive_copies():
    mask = sl.Array(np.tri(5, dtype=bool))
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert twin == mask and hash(twin) == hash(mask) and not twin.array.flags.writeable
