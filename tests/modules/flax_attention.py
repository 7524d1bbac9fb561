"""Flax's own attention layers with `make_attention_fn`, compared with the same layers under a dense mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs, perturbed

T, F, N, B = 24, 16, 4, 2
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 24 tokens are several blocks
UNION = sl.Causal() & (sl.Window(3) | sl.Strided(5))
ARRAY = np.tril(np.random.default_rng(7).random((T, T)) < 0.4) | np.eye(T, dtype=bool)
PATTERNS = {
    "window": sl.Window(4),
    "union": UNION,
    "name": "local:local_attn_ctx=5",
    "per head": (UNION, "all"),
    "both ways": sl.Window(2, 2) | sl.Global(2),
    "array": ARRAY,
    "array per head": np.stack([ARRAY, ARRAY.T]),
}
KINDS = ["nnx", "linen"]


def sparse(pattern, seq_len=T, **options):
    return sl.make_attention_fn(pattern, seq_len, **{"fwd_params": BLOCKS} | options)


def allowed(pattern, length=T):
    """bool [N, T, T]."""
    entries = pattern if isinstance(pattern, tuple) else [pattern]
    masks = [m for p in entries for m in sl.as_masks(sl.preset(p) if isinstance(p, str) else p)]
    return np.stack([masks[h % len(masks)].dense(length) for h in range(N)])


@functools.cache
def flax_layer(kind, attention_fn=None, **options):
    """(parameters, apply) of Flax's layer; its parameters do not depend on the attention function."""
    functions = {} if attention_fn is None else {"attention_fn": attention_fn}
    if kind == "nnx":
        layer = nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(0), **options, **functions)
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
        return perturbed(params), lambda params, x, **call: nnx.merge(graphdef, params, rest)(x, **call)
    params = nn.MultiHeadDotProductAttention(num_heads=N, **options).init(jax.random.key(0), jnp.ones((1, T, F)))
    return perturbed(params), nn.MultiHeadDotProductAttention(num_heads=N, **options, **functions).apply


# Compiled without optimisations, which is faster.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def out_and_grads(apply, params, x, weights, call):
    """The output of a layer, and the gradients of a loss that is not linear in it."""

    def loss(params, x):
        out = apply(params, x, **call)
        return (weights * out.astype(jnp.float32) ** 2).sum(), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return out, grads


def assert_close(actual, expected, rtol=3e-6):
    """Equal to rounding, which is relative to the largest number of all: some gradients are sums that cancel to 0."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert scale > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=rtol * scale), actual, expected)


def compare(kind, pattern, x, mask, *, call=None, settings=None, **options):
    """The layer with our function equals the layer with Flax's own under a dense mask: outputs and all gradients."""
    params, ours = flax_layer(kind, sparse(pattern, **settings or {}), **options)
    weights = inputs(*x.shape, seed=9)
    actual = out_and_grads(functools.partial(ours, **call or {}), params, x, weights, {})
    dense = flax_layer(kind, **options)[1]
    expected = out_and_grads(dense, params, x, weights, {"mask": jnp.asarray(mask)})
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted)
