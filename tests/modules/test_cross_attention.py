"""SparseCrossAttention, NNX and Linen: Flax's parameters and numbers, float64's, lengths, segments and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from tests.arrays import inputs, perturbed

T, S, F, G, N = 20, 28, 16, 12, 4
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 20 and 28 tokens are several blocks
SETTINGS = {"q_len": T, "kv_len": S, "fwd_params": BLOCKS}
MASKS = {
    "window": sl.Window(3, 5) | sl.Global(1),
    "per head": (sl.Window(None, 8), sl.Full(), sl.Columns(7, 3), ~sl.Causal()),
    "array": np.random.default_rng(5).random((T, S)) < 0.4,
    "transposed": sl.Window(2, 4).T,
}


def make(pattern, **options):
    options = SETTINGS | {"in_kv_features": G} | options
    layer = sl.SparseCrossAttention(N, F, pattern=pattern, rngs=nnx.Rngs(0), **options)
    nnx.update(layer, perturbed(nnx.state(layer, nnx.Param)))
    return layer


def dense_mask(pattern, q_len=T, kv_len=S):
    masks = sl.as_masks(pattern)
    return np.stack([masks[head % len(masks)].dense(q_len, kv_len) for head in range(N)])


def dense(params, x, y, mask):
    """The layer in float64 numpy: [B, T, F], [B, S, G] -> [B, T, F]; mask is bool [..., N, T, S]."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    q, k, v = (
        np.einsum("btf,fnh->bnth", np.asarray(of, np.float64), p[name]["kernel"]) + p[name]["bias"][:, None]
        for name, of in (("query", x), ("key", y), ("value", y))
    )
    k, v = (np.repeat(array, N // k.shape[1], 1) for array in (k, v))
    weights = np.where(mask, np.exp(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5), 0)
    total = weights.sum(-1, keepdims=True) + (np.exp(p["sinks"])[:, None, None] if "sinks" in p else 0)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    heads = weights @ v
    if "out_gate" in p:
        gate = np.einsum("btf,fnh->bnth", np.asarray(x, np.float64), p["out_gate"]["kernel"])
        heads = heads / (1 + np.exp(-gate - p["out_gate"]["bias"][:, None]))
    return np.einsum("bnth,nhf->btf", heads, p["out"]["kernel"]) + p["out"]["bias"]


def value_and_grads(apply, params, *arrays):
    """What apply(params, *arrays) is, and the gradients of a weighted sum of it for all its arguments."""

    @jax.jit
    def run(params, *arrays):
        out, pull = jax.vjp(apply, params, *arrays)
        return out, pull(jnp.asarray(inputs(*out.shape, seed=3)).astype(out.dtype))

    return run(params, *arrays)


def apply_of(layer, **options):
    graphdef, state = nnx.split(layer)

    def apply(params, *arrays):
        new = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(new, params)
        return nnx.merge(graphdef, new)(*arrays, **options)

    return apply


def pure(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2, "normalize_qk": True, "qkv_features": 24, "out_features": 10}, {"in_kv_features": F}],
    ids=str,
)
def test_state_of_a_dense_flax_layer_gives_its_values_and_gradients(options):
    pattern = (MASKS["window"], sl.Full())
    sizes = {"in_kv_features": G} | options
    full = nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(3), **sizes)
    sparse = make(pattern, **options)
    assert jax.tree.structure(nnx.state(sparse)) == jax.tree.structure(nnx.state(full))
    fresh = sl.SparseCrossAttention(N, F, pattern=pattern, rngs=nnx.Rngs(3), **SETTINGS, **sizes)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(fresh), nnx.state(full))
    nnx.update(full, nnx.state(sparse))
    # Flax gives a query without keys the mean of all values, so each query here has some.
    mask = dense_mask(pattern)
    assert mask.any(-1).all() and not mask.all()
    arrays = inputs(2, T, F), inputs(2, S, sizes["in_kv_features"], seed=1)
    actual = value_and_grads(apply_of(sparse), pure(sparse), *arrays)
    expected = value_and_grads(apply_of(full, mask=jnp.asarray(mask)), pure(sparse), *arrays)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-4, rtol=1e-5), actual, expected)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(actual[1][1:]))


@pytest.mark.parametrize("name", MASKS)
def test_equals_float64_in_values_and_slope_at_any_lengths(name):
    pattern = MASKS[name]
    layer = make(pattern, num_kv_heads=2, use_sinks=name == "array", gate_output=name == "window")
    params = pure(layer)
    for q_len, kv_len in ((T, S), (13, 27), (1, 5)):
        arrays = inputs(2, q_len, F), inputs(2, kv_len, G, seed=1)
        mask = dense_mask(pattern)[:, :q_len, :kv_len]
        out, grads = value_and_grads(apply_of(layer), params, *arrays)
        np.testing.assert_allclose(out, dense(params, *arrays, mask), atol=1e-5)
        moves = jax.tree.map(lambda g: inputs(*g.shape, seed=g.size).astype(np.float64), grads)

        def loss(step, arrays=arrays, moves=moves, mask=mask):
            moved = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + step * d, (params, *arrays), moves)
            out = dense(*moved, mask)
            return float((out * inputs(*out.shape, seed=3)).sum())

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        found = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), grads, moves)))
        assert found == pytest.approx(slope, rel=2e-4, abs=2e-3)


def test_segments_of_both_sides_and_padding():
    q_ids = np.array([[0] * 9 + [1] * 8 + [-1] * 3, [2] * T])
    kv_ids = np.array([[1] * 10 + [0] * 12 + [-1] * 6, [2] * 5 + [3] * 23])
    layer, x, y = make(MASKS["window"]), inputs(2, T, F), inputs(2, S, G, seed=1)
    same = (q_ids[:, :, None] == kv_ids[:, None]) & (q_ids >= 0)[:, :, None]
    apply = apply_of(layer, segment_ids=(jnp.asarray(q_ids), jnp.asarray(kv_ids)))
    out, (grads, dx, dy) = value_and_grads(apply, pure(layer), x, y)
    mask = dense_mask(MASKS["window"]) & same[:, None]
    np.testing.assert_allclose(out, dense(pure(layer), x, y, mask), atol=1e-5)
    np.testing.assert_array_equal(np.asarray(dx)[~mask.any((1, 3))], 0)
    np.testing.assert_array_equal(np.asarray(dy)[~mask.any((1, 2))], 0)
    assert (~mask.any((1, 3))).sum() > 3 and float(np.abs(grads["key"]["kernel"]).max()) > 0.01


def test_keys_outside_a_selection_are_hidden_with_any_batch_axes():
    ids = np.random.default_rng(0).integers(-1, 2, (2, 3, 2, 2, 1))  # of blocks of 16, by key head
    chosen = sl.Selection(ids, block=16, granularity=16)
    layer, x, y = make(sl.Full(), num_kv_heads=2), inputs(2, 3, T, F), inputs(2, 3, S, G, seed=1)
    out = nnx.jit(lambda layer, x, y, chosen: layer(x, y, selection=chosen))(layer, x, y, chosen)
    for i in ((0, 0), (1, 2)):
        pairs = (ids[i].swapaxes(0, 1) == np.arange(2)).repeat(16, 1).repeat(16, 2)[:, :T, :S].repeat(2, 0)
        np.testing.assert_allclose(out[i], dense(pure(layer), x[i][None], y[i][None], pairs)[0], atol=1e-5)
    np.testing.assert_allclose(layer(x[1, 2], y[1, 2]), layer(x, y)[1, 2], atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": MASKS["per head"], "num_kv_heads": 2, "normalize_qk": True, "out_features": 10, "scale": 0.9},
        {"pattern": MASKS["array"], "use_sinks": True, "use_bias": False, "head_dim": 6, "logits_soft_cap": 0.7},
    ],
    ids=["per head", "array"],
)
def test_linen_has_the_parameters_values_and_gradients_of_nnx(options):
    ours, theirs = linen.SparseCrossAttention(N, **SETTINGS, **options), make(**options)
    arrays = inputs(2, T, F), inputs(2, S, G, seed=1)
    ids = jnp.asarray([[0] * 15 + [1] * 5] * 2), jnp.asarray([[0] * 18 + [1] * 5 + [-1] * 5] * 2)
    shapes = jax.eval_shape(ours.init, jax.random.key(0), *arrays)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, pure(theirs))

    def apply(params, *arrays):
        return ours.apply({"params": params}, *arrays, segment_ids=ids)

    actual = value_and_grads(apply, pure(theirs), *arrays)
    expected = value_and_grads(apply_of(theirs, segment_ids=ids), pure(theirs), *arrays)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5), actual, expected)
    assert ours.plan is theirs.plan and ours.pattern == theirs.pattern
    assert ours == ours.clone() and hash(ours) == hash(ours.clone())


def test_the_layer_shows_its_plan_and_its_lengths():
    layer = make(sl.Window(3, 5))
    assert layer.plan is sl.make_plan(sl.Window(3, 5), T, S, fwd_params=BLOCKS)
    setting = "in float32, 4 heads of 4, assuming 1"
    assert sl.describe(layer) == sl.describe(layer.plan).replace("assuming bfloat16, 32 heads of 128, 1", setting)
    line = "SparseCrossAttention(num_heads=4, num_kv_heads=4, head_dim=4, in_features=16, pattern=Window("
    assert repr(layer).startswith(line) and repr(layer).endswith("q_len=20, kv_len=28)")


def test_half_precision_compute_with_float32_parameters():
    layer, arrays = make(MASKS["window"], dtype=jnp.bfloat16), (inputs(1, T, F), inputs(1, S, G, seed=1))
    out = layer(*arrays)
    assert out.dtype == jnp.bfloat16
    exact = dense(pure(layer), *arrays, dense_mask(MASKS["window"]))
    np.testing.assert_allclose(out.astype(np.float32), exact, atol=64 * jnp.finfo(jnp.bfloat16).eps)


def test_a_layer_for_one_sequence_refuses_the_weights_of_two():
    full = nnx.MultiHeadAttention(N, F, in_kv_features=G, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"in_kv_features=12 differs.*make a SparseCrossAttention"):
        sl.from_nnx(full, pattern="all", seq_len=T)
