"""Linen layers have the parameters, values and gradients of the NNX ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import sparse_layers as sl
from sparse_layers import linen
from tests.arrays import inputs
from tests.modules.linen_layers import (
    ARRAY,
    BF16,
    IDS,
    NSA,
    F,
    N,
    T,
    apply_of,
    apply_of_nnx,
    assert_close,
    attention,
    block,
    native,
    nnx_attention,
    nnx_block,
    nnx_native,
    once,
    perturbed_params,
    pure,
    specs,
    value_and_grads,
)

SELECTION = sl.Selection(np.random.default_rng(0).integers(-1, 2, (2, 2, N, 1)), block=16, granularity=16)
# An option that one of the two ignored would show, so that a case may set several.
CASES = {
    "attention, many options": (
        attention,
        nnx_attention,
        {
            "num_kv_heads": 2,
            "rope_theta": 100.0,
            "normalize_qk": True,
            "logits_soft_cap": 0.5,
            "scale": 0.9,
            "use_bias": False,
            "relative_bias": sl.T5Bias(bidirectional=False, num_buckets=6, max_distance=12),
        },
    ),
    "attention, sizes, segments": (
        attention,
        nnx_attention,
        {
            "qkv_features": 24,
            "out_features": 10,
            "pattern": (sl.Window(4), "all"),
            "use_sinks": True,
            "gate_output": "headwise",
            "use_bias": ("query", "out"),
        },
    ),
    "attention, array": (
        attention,
        nnx_attention,
        {"pattern": ARRAY, "param_dtype": jnp.float16, "use_sinks": True, "implementation": "reference"},
    ),
    "attention, bfloat16": (attention, nnx_attention, {**BF16, "use_sinks": True, "rope_theta": 100.0}),
    "block, segments, selection": (block, nnx_block, {"remat": True}),
    "block, swiglu": (
        block,
        nnx_block,
        {
            "mlp": "swiglu",
            "norm": "rms",
            "use_bias": False,
            "mlp_features": 24,
            "num_kv_heads": 2,
            "rope": sl.Rope(100.0, (4, 6)),
            "normalize_qk": True,
            "use_sinks": True,
            "gate_output": True,
            "scale": 0.9,
        },
    ),
    "block, gelu_tanh": (
        block,
        nnx_block,
        {"mlp": "gelu_tanh", "norm_epsilon": 0.3, "qkv_features": 24, "logits_soft_cap": 0.5}
        | {"relative_bias": sl.GridBias((4, 6), (4, 3))},
    ),
    "native, segments": (
        native,
        nnx_native,
        {"num_kv_heads": 2, "rope_theta": 100.0, "scale": 0.9, "out_features": 10, "use_bias": ("gate", "out")},
    ),
    "block, native": (block, nnx_block, {"pattern": NSA, "fwd_params": None, "norm": "rms", "norm_epsilon": 0.3}),
    "block, rms": (block, nnx_block, {"norm": "rms", "norm_epsilon": 0.3, "pattern": (sl.Window(4), ARRAY)}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_parameters_and_the_same_values_and_gradients_as_nnx(name):
    make, reference, options = CASES[name]
    module, other = make(**options), reference(**options)
    params = perturbed_params(module)
    assert specs(params) == specs(pure(other))
    chosen = {"selection": SELECTION} if "selection" in name else {}
    run = value_and_grads(apply_of(module, **chosen), apply_of_nnx(other, **chosen))
    actual, expected = run(params, inputs(2, T, F), IDS if "segments" in name else None)
    assert_close(actual, expected, 2e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(actual))


def test_block_in_half_precision():
    # Flax's norms of NNX round their inputs and parameters to the dtype of the computation, those of Linen do not. With
    # numbers that need no rounding there is no difference left, but that NNX rounds the norms' gradients.
    module, other = block(**BF16, mlp="swiglu"), nnx_block(**BF16, mlp="swiglu")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), perturbed_params(module))
    x = inputs(2, T, F).astype(jnp.bfloat16)
    actual, expected = value_and_grads(apply_of(module), apply_of_nnx(other))(params, x)
    assert actual[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual[0], expected[0])
    assert_close(actual, expected, 0.01)


@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_initialisers_go_where_those_of_nnx_go(make, reference):
    names = ["kernel_init", "bias_init", "out_bias_init"] + ["out_kernel_init"] * (make is attention)
    options = {name: nn.initializers.constant(i + 1.0) for i, name in enumerate(names)}
    options |= {"use_sinks": True, "normalize_qk": True, "param_dtype": jnp.float16}
    actual, expected = make(**options).init(jax.random.key(0), inputs(1, T, F))["params"], pure(reference(**options))
    if make is block:  # drawn at random, see the next test
        actual, expected = actual["attention"], expected["attention"]
        del actual["out"]["kernel"], expected["out"]["kernel"]
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert specs(actual) == specs(expected)


@pytest.mark.parametrize("num_layers", [1, 8])
def test_output_projections_start_smaller_by_the_root_of_twice_the_depth(num_layers):
    module = linen.SparseTransformerBlock(N, 128, pattern="all", seq_len=T, num_layers=num_layers)
    params = once(module.init)(jax.random.key(0), inputs(1, T, 128))["params"]
    for out, fan_in in ((params["attention"]["out"], 128), (params["mlp_out"], 512)):
        assert float(jnp.std(out["kernel"])) == pytest.approx((2 * num_layers * fan_in) ** -0.5, rel=0.03)
    for name in (params["attention"]["query"], params["mlp_in"]):
        assert float(jnp.std(name["kernel"])) == pytest.approx(128**-0.5, rel=0.03)


@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_precision_is_that_of_the_four_projections(make, reference):
    def count(apply):
        program = str(jax.make_jaxpr(apply)(params, inputs(1, T, F)))
        return len(re.findall("Precision.HIGHEST, Precision.HIGHEST", program))

    params = perturbed_params(make())
    kernels = count(apply_of(make()))  # attention's own
    assert count(apply_of(make(precision="highest"))) == kernels + 4
    assert count(apply_of_nnx(reference(precision="highest"))) == kernels + 4
