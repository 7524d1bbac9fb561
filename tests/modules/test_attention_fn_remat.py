"""make_attention_fn under remat and scan, and what is kept for the backward pass."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from tests.arrays import inputs, perturbed
from tests.modules.flax_attention import UNION, B, F, N, T, allowed, assert_close, out_and_grads, sparse
from tests.programs import USUAL, count

NAMES = ("sparse_attention_out", "sparse_attention_lse")
KEEP = jax.checkpoint_policies.save_only_these_names(*NAMES)


# --- under remat and scan --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A Linen layer for `nn.scan`."""

    attention_fn: object

    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=self.attention_fn)(nn.LayerNorm()(x), mask=mask)
        return x + y, None


def linen_stack(attention_fn, depth, **remat):
    block = nn.remat(Block, prevent_cse=False, **remat)
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
    return nn.scan(block, length=depth, **axes)(attention_fn)


@pytest.mark.parametrize("remat", [{}, {"policy": KEEP}])
def test_linen_scan_over_layers(remat):
    depth, x, weights = 3, inputs(B, T, F), inputs(B, T, F, seed=9)
    dense = linen_stack(nn.dot_product_attention, depth)
    params = perturbed(dense.init(jax.random.key(0), x, None))

    def apply(stack, params, x, mask=None):
        return stack.apply(params, x, mask)[0]

    ours = linen_stack(sparse(UNION, recompute="policy" in remat), depth, **remat)
    actual = out_and_grads(functools.partial(apply, ours), params, x, weights, {})
    mask = jnp.asarray(allowed(UNION)[None])
    expected = out_and_grads(functools.partial(apply, dense), params, x, weights, {"mask": mask})
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted)


def test_nnx_scan_and_remat_over_layers():
    depth, x, weights = 3, inputs(B, T, F), inputs(B, T, F, seed=9)

    def stacked(attention_fn=None):
        options = {} if attention_fn is None else {"attention_fn": attention_fn}

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return nnx.MultiHeadAttention(N, F, decode=False, rngs=rngs, **options)

        return nnx.split(create(nnx.Rngs(0)))

    graphdef, params = stacked(sparse(UNION))
    params = perturbed(params)

    def apply(params, x):
        @nnx.remat(policy=KEEP)
        def layer(x, layer):
            return x + layer(x)

        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, nnx.merge(graphdef, params))

    def looped(params, x, mask):
        for i in range(depth):
            layer = nnx.merge(stacked()[0], jax.tree.map(lambda p, i=i: p[i], params))
            x = x + layer(x, mask=mask)
        return x

    actual = out_and_grads(apply, params, x, weights, {})
    expected = out_and_grads(looped, params, x, weights, {"mask": jnp.asarray(allowed(UNION)[None])})
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted, 3e-5)  # without a norm, numbers grow from layer to layer


# --- what is kept for the backward pass ------------------------------------------------------------------------------


def layer_of(recompute, **remat):
    fn = sparse(UNION, recompute=recompute)

    def layer(q, k, v):
        return jnp.sin(fn(jnp.sin(q), k, v))

    return jax.checkpoint(layer, **remat) if remat else layer


QKV = inputs(3, 1, T, N, 8)
ALONE: dict = {"policy": None}
RUNS = [  # recompute, remat of the layer around it, forward passes of the attention in the gradient's program
    (False, {}, 1),
    (False, ALONE, 2),
    (False, {"policy": KEEP}, 1),
    (True, {}, 2),
    (True, ALONE, 3),
    (True, {"policy": KEEP}, 1),
]


def gradients_of(recompute, **remat):
    """The gradient's program, and the gradients."""
    layer = layer_of(recompute, **remat)
    traced = jax.jit(jax.value_and_grad(lambda *arrays: (layer(*arrays) ** 2).sum(), (0, 1, 2))).trace(*QKV)
    return traced.jaxpr.jaxpr, traced.lower().compile(USUAL)(*QKV)[1]


@functools.cache
def plain_gradients():
    return gradients_of(False)[1]


@pytest.mark.parametrize("recompute, remat, runs", RUNS)
def test_how_often_the_attention_is_computed_and_that_its_gradients_stay(recompute, remat, runs):
    # The logarithm of a sum of weights: the forward pass has one, the backward pass none.
    unit = count(jax.make_jaxpr(layer_of(False))(*QKV).jaxpr, "log")
    # XLA is free to merge forward passes of one scope that it sees to be the same; across a scan it is not.
    written, gradients = gradients_of(recompute, **remat)
    assert count(written, "log") == runs * unit > 0
    assert_close(gradients, plain_gradients(), 1e-6)


@pytest.mark.parametrize("recompute, remat, runs", RUNS)
def test_residuals_of_the_backward_pass(recompute, remat, runs):
    q, k, v = inputs(1, T, N, 8), inputs(1, T, 1, 8, seed=1), inputs(1, T, 1, 5, seed=2)
    kept = [x.shape for x in jax.tree.leaves(jax.vjp(layer_of(recompute, **remat), q, k, v)[1])]
    assert (1, T, 1, 5) in kept  # the values, in any case
    assert ((1, T, N) in kept) == (runs == 1)  # lse
    derivative = not remat  # that of the sine outside, as large as out
    twice = recompute and runs == 1  # JAX keeps a nested remat's output once for each of the two
    assert kept.count((1, T, N, 5)) == (runs == 1) + derivative + twice
