"""Linen layers under vmap, remat and scan, and dropout in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors
from flax import linen as nn

from sparse_layers import linen
from tests.arrays import inputs
from tests.modules.linen_layers import (
    ARRAY,
    BLOCKS,
    IDS,
    F,
    N,
    T,
    apply_of,
    assert_close,
    block,
    nnx_block,
    once,
    perturbed_params,
    pure,
    specs,
    value_and_grads,
)
from tests.programs import count

# --- transformations -------------------------------------------------------------------------------------------------


def test_any_leading_batch_dimensions_vmap_and_shorter_inputs():
    module, x = block(), inputs(2, 3, T, F)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 3, T)))

    @once
    def run(params, x, ids):
        apply = apply_of(module)
        one = apply(params, x[1, 2], ids[1, 2])
        mapped = jax.vmap(apply, in_axes=(None, 0, 0))(params, x[1], ids[1])
        return apply(params, x, ids), one, mapped, apply(params, x[1, 2, :17], ids[1, 2, :17])

    out, one, mapped, shorter = run(perturbed_params(module), x, ids)
    assert out.shape == x.shape
    np.testing.assert_allclose(out[1, 2], one, atol=1e-5)
    np.testing.assert_allclose(out[1], mapped, atol=1e-5)
    np.testing.assert_allclose(out[1, 2, :17], shorter, atol=1e-5)


def test_remat_of_linen_with_a_policy_keeps_what_attention_names():
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names("sparse_attention_out", "sparse_attention_lse")
    options = {"pattern": [ARRAY, "all"], "seq_len": T, "fwd_params": BLOCKS, "use_sinks": True}
    kinds = [
        linen.SparseSelfAttention,
        nn.remat(linen.SparseSelfAttention, policy=policies.nothing_saveable),
        nn.remat(linen.SparseSelfAttention, policy=kept),
    ]
    applies, x = [apply_of(kind(N, **options)) for kind in kinds], inputs(2, T, F)
    params = perturbed_params(kinds[0](N, **options))
    gradients = [jax.grad(lambda p, apply=apply: apply(p, x, IDS).sum()) for apply in applies]
    programs = [jax.make_jaxpr(gradient)(params).jaxpr for gradient in gradients]
    assert [count(program, "remat2") for program in programs] == [0, 1, 1]
    plain, nothing, named = (count(program, "dot_general") for program in programs)
    assert plain < named < nothing
    first, *others = value_and_grads(*applies)(params, x, IDS)
    for other in others:
        assert_close(other, first, 1e-6)


def test_remat_of_the_block_changes_neither_values_nor_gradients():
    x = inputs(1, T, F)
    options = {"deterministic": False, "rngs": {"dropout": jax.random.key(5)}}
    applies = [apply_of(block(remat=remat, dropout_rate=0.3), **options) for remat in (False, True)]
    params = perturbed_params(block())
    assert ["remat" in str(jax.make_jaxpr(apply)(params, x)) for apply in applies] == [False, True]
    plain, remat = value_and_grads(*applies)(params, x)
    assert_close(remat, plain, 2e-6)


class Stack(nn.Module):
    """Three blocks as one, in a scan."""

    block: nn.Module
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, segment_ids=None):
        scanned = nn.scan(
            lambda layer, x, ids: (layer(x, segment_ids=ids, deterministic=self.deterministic), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast,),
            length=3,
        )
        return scanned(self.block, x, segment_ids)[0]


def test_scan_over_stacked_blocks_equals_the_loop():
    module = block(num_layers=3, pattern=[ARRAY, "all"], remat=True)
    params = perturbed_params(Stack(module))
    assert specs(params["block"]) == jax.tree.map(lambda leaf: ((3, *leaf.shape), str(leaf.dtype)), pure(nnx_block()))

    def loop(params, x, ids):
        for i in range(3):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["block"])
            x = module.apply({"params": layer}, x, segment_ids=ids)
        return x

    scanned, expected = value_and_grads(apply_of(Stack(module)), loop)(params, inputs(2, T, F), IDS)
    assert_close(scanned, expected, 5e-6)


def test_scan_gives_each_block_parameters_and_dropout_of_its_own():
    module, x = Stack(block(num_layers=3, dropout_rate=0.3), deterministic=False), inputs(1, T, F)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = once(module.init)(keys, x)["params"]
    kernel = params["block"]["mlp_in"]["kernel"]
    assert float(jnp.abs(kernel[0] - kernel[1]).max()) > 0.1

    # With weights of zero, the blocks add their last biases of one, dropped (0) or kept (1 / 0.7).
    params = jax.tree.map(jnp.zeros_like, params)
    params["block"]["mlp_out"]["bias"] += 1
    out = once(apply_of(module, rngs={"dropout": keys["dropout"]}))(params, x) - x
    kept = np.asarray(out * 0.7)
    np.testing.assert_allclose(kept, kept.round(), atol=1e-5)
    assert set(kept.round().ravel()) == {0, 1, 2, 3}  # one mask for all blocks would give 0 and 3 only


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_acts_at_the_ends_of_both_branches_only():
    module, x = block(dropout_rate=0.5), inputs(1, T, F)
    params = perturbed_params(block())
    assert specs(perturbed_params(module.clone(deterministic=True))) == specs(params)
    # With a silent MLP the branch's end is seen by itself: each value is either dropped or doubled.
    silent = params | {"mlp_out": jax.tree.map(jnp.zeros_like, params["mlp_out"])}
    keys = [{"dropout": jax.random.key(seed)} for seed in (0, 1)]

    @once
    def run(params, silent):
        return {
            "none": apply_of(block())(params, x),
            "nothing to switch": apply_of(block(), deterministic=False)(params, x),
            "off": apply_of(module, deterministic=True)(params, x),
            "off by attribute": apply_of(module.clone(deterministic=True))(params, x),
            "on": apply_of(module, deterministic=False, rngs=keys[0])(params, x),
            "on by attribute": apply_of(module.clone(deterministic=False), rngs=keys[0])(params, x),
            "another key": apply_of(module, deterministic=False, rngs=keys[1])(params, x),
            "silent": apply_of(module, deterministic=False, rngs=keys[0])(silent, x) - x,
            "silent, none": apply_of(block())(silent, x) - x,
        }

    out = run(params, silent)
    for name in ("nothing to switch", "off", "off by attribute"):
        np.testing.assert_allclose(out[name], out["none"], atol=1e-6)
    np.testing.assert_allclose(out["on by attribute"], out["on"], atol=1e-6)
    assert float(jnp.abs(out["on"] - out["another key"]).max()) > 0.1
    kept = np.asarray(out["silent"] / out["silent, none"])
    np.testing.assert_allclose(np.where(kept > 1, kept - 2, kept), 0, atol=1e-3)
    assert 0.4 < (kept > 1).mean() < 0.6


def test_dropout_must_be_switched_and_needs_a_key():
    params, x = perturbed_params(block()), inputs(1, T, F)
    with pytest.raises(ValueError, match="deterministic"):
        jax.eval_shape(apply_of(block(dropout_rate=0.5)), params, x)
    with pytest.raises(errors.InvalidRngError, match="dropout"):
        jax.eval_shape(apply_of(block(dropout_rate=0.5), deterministic=False), params, x)
