"""Linen layers decode: token by token as in one forward pass, by `generate`, and as the NNX layers do."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from tests.arrays import inputs
from tests.modules.linen_layers import NSA, F, N, T, attention, block, native, nnx_native, once, perturbed_params

DECODING = {
    "attention, many options": (
        attention,
        {
            "pattern": (sl.Causal() & sl.Window(4), "strided:local_attn_ctx=5"),
            "num_kv_heads": 2,
            "rope_theta": 100.0,
            "normalize_qk": "rms_joint",
            "use_sinks": True,
            "gate_output": True,
            "logits_soft_cap": 0.5,
            "scale": 0.9,
            "out_features": 10,
        },
    ),
    "attention, index": (attention, {"pattern": "msa:block=16,count=1", "num_kv_heads": 1, "rope_theta": 100.0}),
    "block, selection": (block, {"pattern": "all"}),
    "block": (block, {"norm_placement": "sandwich", "normalize_qk": True, "mlp": "geglu", "dropout_rate": 0.5}),
}


@pytest.mark.parametrize("name", DECODING)
def test_decoding_equals_the_forward_pass_token_by_token(name):
    make, options = DECODING[name]
    module, x = make(**{"fwd_params": None} | options), inputs(2, T, F)
    params, lengths, rows = perturbed_params(make(**options | {"dropout_rate": 0.0})), np.array([3, 14]), np.arange(2)
    prompts = np.where(np.arange(16)[:, None] < lengths[:, None, None], x[:, :16], np.nan)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, T, N, 1)))

    @once
    def run(params, x):
        def selection_of(ids):
            return sl.Selection(ids, block=16) if "selection" in name else None

        def apply(*arguments, ids, **more):
            return module.apply({"params": params}, *arguments, selection=selection_of(ids), **more)

        def step(cache, position):
            own = ids[rows, position][:, None]
            out, cache = apply(x[rows, position], cache, position, ids=own, method="decode_step")
            return cache, out

        off = {"deterministic": True} if make is block else {}
        first, cache = apply(prompts, lengths, ids=ids[:, :16], method="prefill")
        return apply(x, ids=ids, **off), first, jax.lax.scan(step, cache, lengths + np.arange(10)[:, None])[1]

    want, first, later = map(np.asarray, run(params, x))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(first[row, :length], want[row, :length], atol=1e-5)
        np.testing.assert_allclose(later[:, row], want[row, length : length + 10], atol=1e-5)


def test_prefill_initialises_the_parameters():
    module, arguments = attention(use_sinks=True), (jax.random.key(0), inputs(1, 5, F))
    by_prefill, by_call = (once(functools.partial(module.init, method=m))(*arguments) for m in ("prefill", None))
    jax.tree.map(np.testing.assert_array_equal, by_prefill, by_call)


class LM(nn.Module):
    """A language model of a user's own."""

    seq_len: int = T

    def setup(self):
        self.embed = nn.Embed(32, F)
        self.blocks = [block(seq_len=self.seq_len, num_layers=2) for _ in range(2)]

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.blocks:
            x = layer(x)
        return self.embed.attend(x)

    def prefill(self, tokens, lengths, chunk=T):
        caches, last = [None] * len(self.blocks), 0.0
        for start in range(0, tokens.shape[1], chunk):
            x = self.embed(tokens[:, start : start + chunk])
            so_far = jnp.minimum(lengths, start + x.shape[1])
            for i, layer in enumerate(self.blocks):
                x, caches[i] = layer.prefill(x, so_far, cache=caches[i], start=start)
            row = (so_far - 1 - start)[:, None, None]
            picked = jnp.take_along_axis(x, jnp.maximum(row, 0), axis=1)[:, 0]
            last = jnp.where(row[:, 0] < 0, last, picked)
        return self.embed.attend(last), caches

    def decode_step(self, tokens, caches, position):
        x, new = self.embed(tokens), []
        for layer, cache in zip(self.blocks, caches, strict=True):
            x, cache = layer.decode_step(x, cache, position)
            new.append(cache)
        return self.embed.attend(x), new


@dataclasses.dataclass(eq=False)
class ModuleWithVariables:
    """A module beside its variables, as others hold it."""

    module: nn.Module
    variables: dict

    def prefill(self, *arguments):
        return self.module.apply(self.variables, *arguments, method="prefill")

    def decode_step(self, *arguments):
        return self.module.apply(self.variables, *arguments, method="decode_step")


def test_models_of_linen_are_sampled_from_and_compiled_once():
    from sparse_layers.modules.generate import _generate

    params, programs = perturbed_params(LM(), jnp.ones((1, 4), int)), []
    for scale in (1, -0.5):
        variables = {"params": jax.tree.map(lambda leaf, scale=scale: scale * leaf, params)}
        text = sl.generate(LM().bind(variables), [[1, 2, 3], [5]], 6)
        held = sl.generate(ModuleWithVariables(LM(), variables), [[1, 2, 3], [5]], 6)
        np.testing.assert_array_equal(held, text)
        np.testing.assert_array_equal(sl.generate(LM().bind(variables), [[1, 2, 3], [5]], 6, chunk=2), text)
        whole = jnp.array([[1, 2, 3, *text[0].tolist()]])
        logits = once(LM().apply)(variables, whole)
        np.testing.assert_array_equal(logits[0, 2:-1].argmax(-1), text[0])
        programs.append(_generate._cache_size())
    assert programs[0] == programs[1]
    with pytest.raises(ValueError, match=f"num_tokens={T} exceed the model's seq_len={T}"):
        sl.generate(LM().bind(variables), [[1]], T)


def test_native_sparse_attention_decodes_as_that_of_nnx():
    options = {"num_kv_heads": 2, "rope_theta": 100.0}
    module, other, x = native(**options), nnx_native(**options), inputs(2, 80, F)
    params = perturbed_params(module, x)
    nnx.update(other, params)

    def decoded(prefill, step):
        out, cache = prefill(x[:, :70], np.array([3, 70]))
        return out, step(x[:, 70], cache, np.array([3, 70]))

    def method(name):
        return functools.partial(module.apply, {"params": params}, method=name)

    expected = nnx.jit(lambda layer: decoded(layer.prefill, layer.decode_step))(other)
    actual = jax.jit(lambda: decoded(method("prefill"), method("decode_step")))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), actual, expected)


def test_native_sparse_attention_has_the_attributes_of_nnx():
    fields = {f.name: f.default for f in dataclasses.fields(linen.NativeSparseAttention)}
    options = inspect.signature(sl.NativeSparseAttention.__init__).parameters
    assert fields.keys() - {"parent", "name"} == options.keys() - {"self", "in_features", "rngs"}
    same = fields.keys() & options.keys() - {"num_heads", "seq_len"}
    assert {name: fields[name] for name in same} == {name: options[name].default for name in same}
    assert native().plans == nnx_native().plans and native(pattern="nsa") == native(pattern=sl.NSA())
    with pytest.raises(TypeError, match="NativeSparseAttention: unknown argument 'use_sinks'"):
        block(pattern=NSA, use_sinks=True).init(jax.random.key(0), inputs(1, T, F))
