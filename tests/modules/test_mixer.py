"""Mixer: a user's layer in the place of attention, in blocks and models, with decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs, perturbed

V, T, F, N = 11, 24, 16, 2


class LinearAttention(nnx.Module):
    """Causal attention with the feature map exp and no norm: state [B, F, F] is the sum of keys times values."""

    def __init__(self, rngs):
        self.query, self.key, self.value = (nnx.Linear(F, F, use_bias=False, rngs=rngs) for _ in range(3))

    def features(self, x):
        return jnp.exp(0.1 * self.query(x)), jnp.exp(0.1 * self.key(x)), self.value(x)

    def __call__(self, x, *, segment_ids=None):
        query, key, value = self.features(x)
        scores = jnp.tril(jnp.einsum("...tf,...sf->...ts", query, key)) / T
        if segment_ids is not None:
            scores = jnp.where(segment_ids[..., :, None] == segment_ids[..., None, :], scores, 0)
        return scores @ value

    def prefill(self, x, lengths, *, cache=0.0, start=0):
        query, key, value = self.features(x)
        key = jnp.where(start + jnp.arange(x.shape[1])[:, None] < lengths[:, None, None], key, 0)
        out = jnp.tril(jnp.einsum("btf,bsf->bts", query, key)) @ value
        out = out + (0 if start == 0 else jnp.einsum("btf,bfg->btg", query, cache))
        return out / T, cache + jnp.einsum("btf,btg->bfg", key, value)

    def decode_step(self, x, cache, position):
        query, key, value = self.features(x)
        cache = cache + key[:, :, None] * value[:, None]
        return jnp.einsum("bf,bfg->bg", query, cache) / T, cache


MIXER = sl.Mixer(lambda rngs: LinearAttention(rngs))


def varied(module):
    nnx.update(module, perturbed(nnx.state(module, nnx.Param)))
    return module


def model(**options):
    options = {"num_layers": 4, "patterns": (MIXER, sl.Causal() & sl.Window(5)), "positions": "rope"} | options
    return varied(sl.SparseTransformer(V, N, F, seq_len=T, rngs=nnx.Rngs(0), **options))


@functools.partial(nnx.jit, static_argnames="method")
def call(module, *args, method="__call__", **options):
    return getattr(module, method)(*args, **options)


@pytest.mark.parametrize("remat", [False, True])
def test_a_block_adds_the_layer_and_the_mlp(remat):
    block = varied(sl.SparseTransformerBlock(N, F, pattern=MIXER, seq_len=T, remat=remat, rngs=nnx.Rngs(0)))
    x, ids = inputs(2, T, F), jnp.repeat(jnp.arange(2), T // 2)[None].repeat(2, 0)

    def by_hand(block, x):
        x = x + block.attention.module(block.attention_norm(x), segment_ids=ids)
        hidden = block.mlp_in(block.mlp_norm(x))
        return x + block.mlp_out(hidden * jax.nn.sigmoid(1.702 * hidden))

    def loss(apply, block, x):
        out = apply(block, x)
        return (out**2).sum(), out

    (_, actual), gradients = nnx.jit(
        nnx.value_and_grad(functools.partial(loss, lambda block, x: block(x, segment_ids=ids)), has_aux=True)
    )(block, x)
    (_, expected), wanted = nnx.jit(nnx.value_and_grad(functools.partial(loss, by_hand), has_aux=True))(block, x)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), gradients, wanted)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients["attention"]))


def test_only_layers_of_the_mixer_are_the_users():
    kinds = [type(block.attention).__name__ for block in model().layers]
    assert kinds == ["MixerLayer", "SparseSelfAttention"] * 2
    assert isinstance(model().layers[0].attention.module, LinearAttention)
    # Each layer has weights of its own.
    kernels = [block.attention.module.query.kernel[...] for block in model().layers[::2]]
    assert not jnp.array_equal(*kernels)


def test_scanned_layers_are_the_unrolled_ones():
    scanned, tokens = model(scan_layers=True), jnp.arange(T)[None] % V
    np.testing.assert_allclose(call(scanned, tokens), call(scanned.unrolled(), tokens), atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 5])
def test_decoding_equals_the_forward_pass_token_by_token(chunk):
    hybrid, tokens = model(), jnp.asarray(np.random.default_rng(0).integers(0, V, (2, T)))
    lengths, prompt = np.array([3, 12]), 12
    expected = call(hybrid, tokens)
    # Padding that a cache must not contain.
    prompts = jnp.where(jnp.arange(prompt) < lengths[:, None], tokens[:, :prompt], V - 1)
    logits, caches = nnx.jit(lambda model: model.prefill(prompts, jnp.asarray(lengths), chunk=chunk))(hybrid)
    rows = np.arange(2)
    np.testing.assert_allclose(logits, expected[rows, lengths - 1], atol=1e-5)
    for step in range(6):
        position = lengths + step
        logits, caches = call(hybrid, tokens[rows, position], caches, jnp.asarray(position), method="decode_step")
        np.testing.assert_allclose(logits, expected[rows, position], atol=1e-5)


def test_generates_what_the_forward_pass_says():
    hybrid, prompts = model(), [[1, 2, 3], [4]]
    out = np.asarray(sl.generate(hybrid, prompts, 5))
    for prompt, new in zip(prompts, out, strict=True):
        tokens = list(prompt)
        for token in new:
            assert token == int(
                call(hybrid, jnp.asarray([tokens + [0] * (T - len(tokens))]))[0, len(tokens) - 1].argmax()
            )
            tokens.append(int(token))


def test_files_have_no_names_for_it(tmp_path):
    with pytest.raises(ValueError, match="layer 0 has MixerLayer"):
        sl.to_huggingface(model(), tmp_path / "new")
