"""SparseTransformerBlock: the residual block's arithmetic, initial scale, dropout, remat and stacking."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs

T, F, N = 20, 16, 2
PATTERN = sl.Causal() & (sl.Window(3) | sl.Strided(5))


def make(features=F, seed=0, **options):
    options = {"pattern": PATTERN, "seq_len": T} | options
    return sl.SparseTransformerBlock(N, features, rngs=nnx.Rngs(seed), **options)


@nnx.jit(static_argnames="deterministic")
def run(block, x, deterministic=None):
    return block(x, deterministic=deterministic)


def test_is_the_pre_activation_residual_block_of_the_paper():
    block, x = make(), inputs(1, T, F)
    p = nnx.to_pure_dict(nnx.state(block, nnx.Param))

    def norm(y):  # scales start at 1, offsets and biases at 0
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)

    y = x + nnx.jit(lambda layer, x: layer(x))(block.attention, norm(x))
    hidden = norm(y) @ p["mlp_in"]["kernel"]
    expected = y + (hidden / (1 + np.exp(-1.702 * hidden))) @ p["mlp_out"]["kernel"]
    np.testing.assert_allclose(run(block, x), expected, atol=2e-5)


def test_rms_norm_swiglu_rope_and_no_bias():
    block, x = make(norm="rms", mlp="swiglu", mlp_features=24, rope_theta=100.0, use_bias=False), inputs(1, T, F)
    p = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    assert "bias" not in str(jax.tree_util.tree_flatten_with_path(p)[0])
    assert p["mlp_gate"]["kernel"].shape == (F, 24)

    def norm(y):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)

    y = x + nnx.jit(lambda layer, x: layer(x))(block.attention, norm(x))
    gate, hidden = norm(y) @ p["mlp_gate"]["kernel"], norm(y) @ p["mlp_in"]["kernel"]
    expected = y + (gate / (1 + np.exp(-gate)) * hidden) @ p["mlp_out"]["kernel"]
    np.testing.assert_allclose(run(block, x), expected, atol=2e-5)
    assert block.attention.attention_fn.rope == sl.Rope(100.0)


@pytest.mark.parametrize("num_layers", [1, 8])
def test_output_projections_start_smaller_by_the_root_of_twice_the_depth(num_layers):
    block = make(features=128, num_layers=num_layers)
    for out, fan_in in ((block.attention.out, 128), (block.mlp_out, 512)):
        assert float(jnp.std(out.kernel[...])) == pytest.approx((2 * num_layers * fan_in) ** -0.5, rel=0.03)
    for kernel in (block.attention.query.kernel, block.mlp_in.kernel):
        assert float(jnp.std(kernel[...])) == pytest.approx(128**-0.5, rel=0.03)


def test_dropout_acts_at_the_ends_of_both_branches_only():
    block, x = make(dropout_rate=0.5), inputs(1, T, F)
    still = run(make(), x)
    np.testing.assert_allclose(run(block, x, deterministic=True), still, atol=1e-6)
    first, second = run(block, x), run(block, x)
    assert np.abs(first - second).max() > 0.1
    block.eval()
    np.testing.assert_allclose(run(block, x), still, atol=1e-6)
    np.testing.assert_array_equal(run(block, x), run(block, x))
    block.train()
    # With a silent MLP the branch's end is seen by itself: each value is either dropped or doubled.
    block.mlp_out.kernel[...] *= 0
    kept = np.asarray((run(block, x) - x) / (run(block, x, deterministic=True) - x))
    np.testing.assert_allclose(np.where(kept > 1, kept - 2, kept), 0, atol=1e-3)
    assert 0.4 < (kept > 1).mean() < 0.6
    assert not jax.tree.leaves(nnx.state(make(), nnx.RngState))


@pytest.mark.parametrize("dropout_rate", [0.0, 0.3])
def test_remat_changes_neither_values_nor_gradients(dropout_rate):
    x, results, programs = inputs(1, T, F), [], []
    for remat in (False, True):
        block = make(dropout_rate=dropout_rate, remat=remat)
        graphdef, params, rest = nnx.split(block, nnx.Param, ...)

        def loss(params, x, graphdef=graphdef, rest=rest):
            return (nnx.merge(graphdef, params, rest, copy=True)(x) ** 2).sum()

        programs.append(str(jax.make_jaxpr(loss)(params, x)))
        results.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x))
    assert "remat" not in programs[0] and "remat" in programs[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *results)


def test_segments_are_isolated():
    block, ids = make(), jnp.asarray([0] * 9 + [1] * 11)
    jacobian = jax.jit(jax.jacobian(lambda x: block(x, segment_ids=ids) @ inputs(F, seed=1)))(inputs(T, F))
    reached = np.abs(jacobian).sum(-1) > 0
    same = np.asarray(ids)[:, None] == np.asarray(ids)
    np.testing.assert_array_equal(reached, PATTERN.dense(T) & same)


@pytest.mark.parametrize("remat", [False, True])
def test_a_selection_is_handed_on(remat):
    block, x = make(remat=remat), inputs(1, T, F)
    chosen = sl.Selection(np.array([[[[0]], [[1]]]]), block=16, granularity=16)
    alone = block(x, segment_ids=jnp.arange(T)[None] // 16)
    np.testing.assert_allclose(block(x, selection=chosen), alone, atol=1e-6)


def test_scan_over_stacked_blocks_equals_the_loop():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def create(rngs):
        return sl.SparseTransformerBlock(N, F, pattern=PATTERN, seq_len=T, num_layers=3, remat=True, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def scanned(x, block):
        return block(x)

    def loss(blocks, x):
        return (scanned(x, blocks) ** 2).mean()

    blocks, x = create(nnx.Rngs(0)), inputs(1, T, F)
    graphdef, state = nnx.split(blocks)
    expected = x
    for i in range(3):
        expected = run(nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state)), expected)
    np.testing.assert_allclose(nnx.jit(scanned)(x, blocks), expected, atol=2e-5)
    grads = nnx.jit(nnx.grad(loss))(blocks, x)
    assert all(np.isfinite(g).all() and g.shape[0] == 3 for g in jax.tree.leaves(grads))
    assert float(jnp.abs(grads["attention"]["query"]["kernel"][...]).min(axis=(1, 2, 3)).max()) > 0


def test_bfloat16_compute_keeps_float32_parameters():
    block, x = make(dtype=jnp.bfloat16), inputs(1, T, F)
    out = run(block, x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert {p.dtype for p in jax.tree.leaves(nnx.state(block))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(out.astype(jnp.float32), run(make(), x), atol=0.1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mlp": "tanh"}, ["mlp", "tanh", "swiglu"]),
        ({"norm": "batch"}, ["norm", "batch", "rms"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"dropout_rate": 1.0}, ["dropout_rate", "1.0"]),
        ({"pattern": "stridde"}, ["stridde"]),
    ],
)
def test_wrong_settings_are_refused_at_construction(options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert all(word in str(error.value) for word in words), str(error.value)
