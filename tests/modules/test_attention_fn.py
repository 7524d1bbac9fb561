"""make_attention_fn in Flax's own layers, NNX and Linen: dense to sparse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.arrays import inputs
from tests.modules.flax_attention import (
    KINDS,
    PATTERNS,
    UNION,
    B,
    F,
    N,
    T,
    allowed,
    assert_close,
    compare,
    flax_layer,
    out_and_grads,
    sparse,
)


@pytest.mark.parametrize("kind, recompute", [("nnx", False), ("linen", True)])
def test_equals_the_dense_layer_where_the_pattern_is_dense_causal(kind, recompute):
    x = inputs(B, T, F)
    mask = jnp.broadcast_to(nn.make_causal_mask(x[:1, :, 0]) > 0, (1, N, T, T))
    compare(kind, "all", x, mask, settings={"recompute": recompute})


@pytest.mark.parametrize(
    "kind, name",
    [(kind, name) for i, name in enumerate(PATTERNS) for kind in (KINDS if name == "union" else [KINDS[i % 2]])],
)
def test_equals_the_same_layer_under_the_dense_mask(kind, name):
    compare(kind, PATTERNS[name], inputs(B, T, F), allowed(PATTERNS[name])[None])


def test_grouped_query_heads_of_nnx():
    compare("nnx", PATTERNS["per head"], inputs(B, T, F), allowed(PATTERNS["per head"])[None], num_kv_heads=2)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("nnx", {"normalize_qk": True, "use_bias": False, "qkv_features": 32}),
        ("linen", {"normalize_qk": True, "force_fp32_for_softmax": True, "precision": jax.lax.Precision.HIGHEST}),
    ],
)
def test_options_of_flax_layers_are_served(kind, options):
    compare(kind, UNION, inputs(B, T, F), allowed(UNION)[None], **options)


def test_scale_and_soft_cap():
    q, k, v = inputs(3, B, T, N, 8)
    out = sparse("all", scale=0.9, logits_soft_cap=0.5)(q, k, v)
    logits = 0.5 * jnp.tanh(0.9 * jnp.einsum("btnh,bsnh->bnts", q, k) / 0.5)
    weights = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), logits, -jnp.inf))
    assert_close(out, jnp.einsum("bnts,bsnh->btnh", weights, v))


def test_bfloat16_computes_in_bfloat16_with_float32_parameters():
    kind = "nnx"
    x, weights = inputs(B, T, F), jnp.ones((B, T, F))
    params, half = flax_layer(kind, sparse(UNION), dtype=jnp.bfloat16)
    out, grads = out_and_grads(half, params, x, weights, {})
    expected, exact = out_and_grads(flax_layer(kind, sparse(UNION))[1], params, x, weights, {})
    assert out.dtype == jnp.bfloat16 and {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    # Flax rounds x, the parameters and each projection to bfloat16; so much for its own attention as well.
    assert_close(out.astype(jnp.float32), expected, 8 * float(jnp.finfo(jnp.bfloat16).eps))
    assert_close(grads, exact, 8 * float(jnp.finfo(jnp.bfloat16).eps))


def test_dtype_defaults_to_the_result_type_of_the_arrays():
    q = inputs(1, T, N, 8)
    fn = sparse(UNION)
    assert jax.eval_shape(lambda q: fn(q.astype(jnp.bfloat16), q, q), q).dtype == jnp.float32
    assert jax.eval_shape(lambda q: fn(q, q, q, dtype=jnp.float16), q).dtype == jnp.float16


@pytest.mark.parametrize("kind", KINDS)
def test_any_leading_axes_and_shorter_inputs(kind):
    params, apply = flax_layer(kind, sparse(UNION))
    run = jax.jit(apply)
    x = inputs(2, 3, T, F)
    out = run(params, x)
    assert out.shape == x.shape
    assert_close(out[1, 2, :13], run(params, x[1, 2, :13]))  # causal: the pattern's upper left corner
    assert run(params, x[:0]).shape == (0, 3, T, F)


def test_vmap_over_layers_and_over_the_batch():
    kind = "linen"
    params, apply = flax_layer(kind, sparse(UNION, recompute=True))
    both = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    x, padding = inputs(2, 3, T, F), jnp.arange(T) < jnp.array([20, 9, 24])[:, None]

    def run(params, x, padding):
        return apply(params, x, mask=padding[None, None])

    out = jax.jit(jax.vmap(jax.vmap(run, (None, 0, 0)), (0, 0, None)))(both, x, padding)
    last = jax.tree.map(lambda p: 2 * p, params)
    assert_close(out[1], jax.jit(apply)(last, x[1], mask=padding[:, None, None]))
