"""make_attention_fn refuses calls and settings that it cannot honour."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs
from tests.modules.flax_attention import KINDS, UNION, B, F, N, T, flax_layer, sparse


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_while_training_is_refused(kind):
    x, options = inputs(B, T, F), {"dropout_rate": 0.25}
    if kind == "nnx":
        layer = nnx.MultiHeadAttention(
            N, F, attention_fn=sparse(UNION), decode=False, rngs=nnx.Rngs(0, dropout=1), **options
        )
        call = layer
    else:
        module = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION), **options)
        params = module.init(jax.random.key(0), x, deterministic=True)
        call = functools.partial(module.apply, params, rngs={"dropout": jax.random.key(1)})
    with pytest.raises(ValueError, match=r"dropout_rate must be 0 while training, got 0\.25.*residual"):
        call(x, deterministic=False)
    assert call(x, deterministic=True).shape == x.shape


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_not_sown(kind):
    params, apply = flax_layer(kind, sparse(UNION))
    with pytest.raises(ValueError, match=r"sow_weights must be False: .*never forms"):
        apply(params, inputs(B, T, F), sow_weights=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(B, 1, T, T), (1, N, T, T), (T, T), (B, N, 1, T), (B, 1, 1, 1), (B + 1, 1, 1, T), (1, B, 1, 1, T), ()]
)
def test_masks_that_are_not_key_padding_are_refused(kind, shape):
    params, apply = flax_layer(kind, sparse(UNION))
    with pytest.raises(ValueError, match=r"mask must be key padding.*\(2, 1, 1, 24\).*got " + re.escape(str(shape))):
        apply(params, inputs(B, T, F), mask=jnp.ones(shape, bool))


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_at_a_time_from_a_flax_cache_is_refused(kind):
    x = inputs(B, T, F)
    if kind == "nnx":
        layer = nnx.MultiHeadAttention(N, F, attention_fn=sparse(UNION), decode=True, rngs=nnx.Rngs(0))
        layer.init_cache(x.shape)
        call = layer
    else:
        module = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION), decode=True)
        variables = module.init(jax.random.key(0), x)
        call = functools.partial(module.apply, variables, mutable=["cache"])
    with pytest.raises(ValueError, match=r"decode=True.*position"):
        call(x[:, :1])


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_do_not_fit_are_refused(kind):
    params, apply = flax_layer(kind, sparse(UNION))
    with pytest.raises(ValueError, match=r"25 tokens, more than seq_len=24"):
        apply(params, inputs(B, T + 1, F))
    with pytest.raises(ValueError, match=r"equal T \(self-attention\).*\(2, 24, 4, 4\), \(2, 12, 4, 4\)"):
        apply(params, inputs(B, T, F), inputs_k=inputs(B, T // 2, F))
    with pytest.raises(ValueError, match="must be an integer >= 1, got 0"):
        apply(params, inputs(B, 0, F))


class Einsum(nn.Module):
    """Stands for a quantised einsum."""

    def __call__(self, *args):
        return jnp.einsum(*args)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_einsums_of_linen_are_refused(name):
    layer = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION), **{f"{name}_cls": Einsum})
    with pytest.raises(ValueError, match=f"^{name} must be None"):
        layer.init(jax.random.key(0), inputs(B, T, F))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"bias": np.zeros((1, N, T, T))}, "bias must be a DistanceBias or None, got shape (1, 4, 24, 24)"),
        ({"dropout_rate": 0.5}, "dropout_rate must be 0 while training, got 0.5"),
        ({"input_positions": np.arange(T)}, "input_positions must be None"),
        (
            {"segment_ids": np.zeros((B, T), np.int32)},
            "segment_ids must have one id a token, (1, 24), got shape (2, 24)",
        ),
        ({"segment_ids": np.zeros((1, T))}, "segment_ids of queries must be integers"),
        ({"segment_ids": np.zeros((1, T), bool), "mask": np.ones((1, 1, 1, T))}, "must be integers"),
    ],
)
def test_calls_that_cannot_be_honoured_are_refused(options, words):
    q = inputs(1, T, N, 8)
    with pytest.raises(ValueError, match=re.escape(words)):
        sparse(UNION)(q, q, q, **options)


def test_arrays_that_do_not_fit_are_refused():
    q = inputs(2, T, N, 8)
    for arrays in ((q[0, 0], q[0, 0], q[0, 0]), (q, q[:1], q[:1]), (q, q, q[:, :12]), (q, q[0], q[0])):
        with pytest.raises(ValueError, match=r"query, key and value must have shapes \[\.\.\., T, heads, size\]"):
            sparse(UNION)(*arrays)
    with pytest.raises(ValueError, match="number of masks must divide the query heads, got 3 masks and N = 4"):
        sparse((UNION, "all", sl.Window(2)))(q, q, q)


@pytest.mark.parametrize(
    "pattern, options, error, words",
    [
        ("stridde", {}, ValueError, "stridde"),
        ("all", {"seq_len": 0}, ValueError, "seq_len must be an integer >= 1, got 0"),
        ("all", {"seq_len": True}, ValueError, "seq_len must be an integer >= 1, got True"),
        ("all", {"seq_len": 24.0}, ValueError, "seq_len must be an integer >= 1, got 24.0"),
        (np.ones((T, T + 1), bool), {}, ValueError, "seq_len=24"),
        (None, {}, TypeError, "NoneType"),
        ("all", {"implementation": "cuda"}, ValueError, "implementation must be None or one of"),
        ("all", {"implementation": "cudnn", "logits_soft_cap": 1.0}, NotImplementedError, "cudnn: it"),
        ("all", {"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap must be a number > 0"),
        ("all", {"scale": float("nan")}, ValueError, "scale must be a number"),
        ("all", {"scale": jnp.float32(1)}, ValueError, "scale must be a number"),
        ("all", {"fwd_params": (8, 8)}, ValueError, "fwd_params must be FwdParams or None"),
    ],
)
def test_wrong_settings_are_refused_by_make_attention_fn(pattern, options, error, words):
    with pytest.raises(error, match=words):
        sl.make_attention_fn(pattern, **{"seq_len": T} | options)
