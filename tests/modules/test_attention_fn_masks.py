"""make_attention_fn with padding masks, documents and `is_causal`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs
from tests.modules.flax_attention import (
    ARRAY,
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


@pytest.mark.parametrize("kind, form", [("nnx", "bool"), ("linen", "float"), ("linen", "one for all")])
def test_key_padding_mask(kind, form):
    valid = jnp.arange(T) < (jnp.array([17, T]) if form != "one for all" else jnp.array([17]))[:, None]
    mask = nn.make_attention_mask(jnp.ones((len(valid), 1)), valid, dtype=jnp.bool if form == "bool" else jnp.float32)
    assert mask.shape == (len(valid), 1, 1, T) and mask.dtype == (bool if form == "bool" else jnp.float32)
    mask = mask if form == "bool" else 0.5 * mask  # whatever is not 0 counts, as in Flax
    both = allowed(UNION)[None] & np.asarray(valid)[:, None, None]
    seeing = jnp.asarray(both.any(-1).all(1))  # a query without keys gets 0 here, and the mean of all in Flax
    x = inputs(B, T, F)
    actual, expected = (
        out_and_grads(apply, params, x, seeing[..., None] * inputs(B, T, F, seed=9), {"mask": given})
        for (params, apply), given in (
            (flax_layer(kind, sparse(UNION)), mask),
            (flax_layer(kind), jnp.asarray(both)),
        )
    )
    assert_close(actual[1], expected[1])
    assert_close(jnp.where(seeing[..., None], actual[0], 0), jnp.where(seeing[..., None], expected[0], 0))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_with_padding(kind):
    ids = jnp.asarray(np.array([[0] * 9 + [1] * 15, [5] * 20 + [-1] * 4]), jnp.int32)
    valid = jnp.ones((B, T), bool).at[0, 2].set(False).at[1, 7:9].set(False)
    x, weights = inputs(B, T, F), inputs(B, T, F, seed=9)
    same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    both = jnp.asarray(allowed(UNION)[None]) & same[:, None] & valid[:, None, None]
    seeing = both.any(-1).all(1)[..., None]
    mask = valid[:, None, None]

    params, dense = flax_layer(kind)
    if kind == "nnx":
        graphdef = nnx.graphdef(nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(0)))

        def apply(params, x, ids, mask):
            # As the docstring advises: a copy, for the layer would keep the traced ids.
            copy = nnx.clone(nnx.merge(graphdef, params))
            copy.attention_fn = sparse(UNION, segment_ids=ids)
            return copy(x, mask=mask)
    else:

        def apply(params, x, ids, mask):
            layer = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION, segment_ids=ids))
            return layer.apply(params, x, mask=mask)

    actual = out_and_grads(apply, params, x, weights * seeing, {"ids": ids, "mask": mask})
    expected = out_and_grads(dense, params, x, weights * seeing, {"mask": both})
    assert_close(actual[1], expected[1])
    assert_close(jnp.where(seeing, actual[0], 0), jnp.where(seeing, expected[0], 0))
    assert not seeing[1, 20:].any() and seeing.sum() > 30


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int64])
def test_ids_of_any_integer_type_meet_a_padding_mask(dtype):
    q, k, v = inputs(3, 1, T, N, 8)
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    ids, mask = np.array([[3] * 9 + [largest] * 15]).astype(dtype), np.ones((1, 1, 1, T), bool)
    mask[..., [2, 11]] = False
    both = allowed(UNION)[0] & (ids[0][:, None] == ids[0]) & mask[0, 0]
    expected = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(both)[None, None])
    fn = sparse(UNION, implementation="reference")
    out = fn(q, k, v, mask=mask, segment_ids=ids)
    rows = both.any(-1)
    assert rows.sum() > 20
    assert_close(out[:, rows], expected[:, rows])
    assert_close(fn(q, k, v, mask=mask, segment_ids=jnp.asarray(ids)), out)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_ids_that_32_bits_would_merge_are_refused(recompute, padding):
    q, ids = inputs(1, T, N, 8), np.array([[0] * 9 + [2**32] * 15])
    mask = np.ones((1, 1, 1, T), bool) if padding else None
    with pytest.raises(ValueError, match="segment_ids must fit into int32"):
        sparse(UNION, recompute=recompute)(q, q, q, mask=mask, segment_ids=ids)


def test_a_query_without_keys_gets_zero_and_finite_gradients():
    q, k, v = inputs(3, 1, T, N, 8)
    mask = (jnp.arange(T) >= 6)[None, None, None]  # under a causal pattern, queries 0 to 5 are left without keys

    @jax.jit
    def run(q, k, v, mask):
        def loss(q, k, v):
            out = sparse(UNION, recompute=True)(q, k, v, mask=mask)
            return (out**2).sum(), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    out, *gradients = run(q, k, v, mask)
    assert float(jnp.abs(out[:, 6:]).max(-1).min()) > 0
    for leaf in (out, *gradients):
        np.testing.assert_array_equal(leaf[:, :6], 0)
        assert bool(jnp.isfinite(leaf).all()) and float(jnp.abs(leaf).max()) > 1e-3
    for leaf in run(q, k, v, jnp.zeros_like(mask)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("name", ["both ways", "array per head"])
def test_is_causal_hides_the_future(name):
    causal = allowed(PATTERNS[name]) & np.tri(T, dtype=bool)
    compare("nnx", PATTERNS[name], inputs(B, T, F), causal[None], call={"is_causal": True})


def test_is_causal_changes_nothing_where_the_pattern_is_causal():
    for pattern in ("all", UNION, (UNION, "all"), ARRAY):
        assert sparse(pattern).plan(T, causal=True) is sparse(pattern).plan(T)
    mixed = sparse((UNION, sl.Window(2, 2)))
    assert mixed.plan(T, causal=True) is not mixed.plan(T)
    assert mixed.plan(T, causal=True).masks[0] is mixed.plan(T).masks[0]  # head by head
