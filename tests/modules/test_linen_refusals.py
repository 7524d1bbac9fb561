"""Wrong settings and wrong calls of Linen layers raise errors that name the argument and its value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors

import sparse_layers as sl
from sparse_layers import linen
from tests.arrays import inputs
from tests.modules.linen_layers import F, N, T, apply_of, attention, block, nnx_block, perturbed_params


@pytest.mark.parametrize("make", [attention, block])
@pytest.mark.parametrize(
    "options, words",
    [
        ({"pattern": "stridde"}, ["stridde", "strided"]),
        ({"pattern": np.ones((T, T + 1), bool)}, [f"seq_len={T}", str((T, T + 1))]),
        ({"pattern": np.ones((T, T), np.float32)}, ["bool", "float32"]),
        ({"seq_len": 0}, ["seq_len", "0"]),
        ({"seq_len": True}, ["seq_len", "True"]),
        ({"rope_theta": 0.0}, ["rope_theta", "> 0", "0.0"]),
        ({"logits_soft_cap": -1.0}, ["logits_soft_cap", "> 0", "-1.0"]),
    ],
)
def test_a_bad_pattern_or_number_is_refused_at_construction(make, options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mlp": "tanh"}, ["mlp", "tanh", "swiglu"]),
        ({"norm": "batch"}, ["norm", "batch", "rms"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"dropout_rate": 1.0}, ["dropout_rate", "1.0"]),
    ],
)
def test_settings_of_the_block_are_refused_at_construction_as_in_nnx(options, words):
    messages = []
    for make in (block, nnx_block):
        with pytest.raises(ValueError) as error:
            make(**options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert all(word in messages[0] for word in words)


NEEDS_FEATURES = [
    ({"pattern": ("all", "local", sl.Window(2))}, ["3 entries", "num_heads=4", "divide"]),
    ({"pattern": np.ones((3, T, T), bool) & (np.arange(3)[:, None, None] > 1)}, ["3 entries", "num_heads=4"]),
    ({"rope_theta": 1e4, "qkv_features": 12}, ["rope", "2 must divide head_dim", "3"]),
    ({"num_kv_heads": 3}, ["num_heads", "3"]),
    ({"qkv_features": 18}, ["num_heads=4", "divide", "18"]),
    ({"head_dim": 3, "qkv_features": 8}, ["qkv_features=8", "head_dim=3", "12"]),
    ({"implementation": "cuda"}, ["implementation", "cuda", "xla"]),
]


@pytest.mark.parametrize("make", [attention, block])
@pytest.mark.parametrize("options, words", NEEDS_FEATURES)
def test_wrong_settings_are_refused_before_any_work(make, options, words):
    def work(*_):
        pytest.fail("a parameter was made")

    module = make().clone(**{"kernel_init": work} | options)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(module.init, jax.random.key(0), inputs(2, T, F))
    assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(ValueError) as again:
        jax.eval_shape(apply_of(module), perturbed_params(make()), inputs(2, T, F))
    assert str(again.value) == str(error.value)


def test_unsupported_attention_options_are_refused():
    x = inputs(2, T, F)
    with pytest.raises(ValueError, match=r"dropout_rate.*0\.1.*residual"):
        attention(dropout_rate=0.1).init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match=r"decode=True.*prefill"):
        attention(decode=True).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="sow_weights must be False"):
        attention().init(jax.random.key(0), x, sow_weights=True)
    with pytest.raises(TypeError, match="seq_len"):
        linen.SparseSelfAttention(N, pattern="all")


@pytest.mark.parametrize("make", [attention, block])
def test_wrong_calls_are_refused(make):
    params, x = perturbed_params(make()), inputs(2, T + 1, F)

    def apply(x, segment_ids=None):
        return jax.eval_shape(apply_of(make()), params, x, segment_ids)

    with pytest.raises(ValueError, match=f"{T + 1} tokens.*seq_len={T}"):
        apply(x)
    x = x[:, :T]
    with pytest.raises(ValueError, match=r"segment_ids .*\(2, 24\), got shape \(2, 1\)"):
        apply(x, segment_ids=jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"segment_ids.*integers.*float32"):
        apply(x, segment_ids=jnp.zeros((2, T)))
    with pytest.raises(ValueError, match=r"\[\.\.\., T, 16\], got \(16,\)"):
        apply(x[0, 0])
    with pytest.raises(ValueError, match=r"\[\.\.\., T, .*got \(\)"):
        apply(x[0, 0, 0])
    with pytest.raises((ValueError, errors.ScopeParamShapeError), match="16"):
        apply(x[..., :12])


def test_the_block_refuses_other_features_than_its_own():
    with pytest.raises(ValueError, match=r"\[\.\.\., T, 16\], got \(2, 24, 12\)"):
        block().init(jax.random.key(0), inputs(2, T, 12))
