"""Attributes of Linen layers: the names and defaults of the NNX ones, values that compare equal."""

import dataclasses
import functools
import inspect
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from sparse_layers.modules.options import SelfAttentionOptions
from tests.arrays import inputs
from tests.modules.linen_layers import ARRAY, BLOCKS, UNION, F, N, T, attention, block, nnx_attention, nnx_block, pure


@pytest.mark.parametrize("name", ["SparseSelfAttention", "SparseTransformerBlock"])
def test_attributes_and_their_defaults_are_those_of_nnx(name):
    fields = {f.name: f for f in dataclasses.fields(getattr(linen, name)) if f.name not in ("parent", "name")}
    options = inspect.signature(getattr(sl, name).__init__).parameters
    options = {n: p for n, p in options.items() if n != "self" and p.kind is not p.VAR_KEYWORD}
    # In Linen, an input brings its features, and keys are given to init and apply.
    assert options.keys() - fields.keys() == {"rngs"} | ({"in_features"} if name == "SparseSelfAttention" else set())
    for option in options.keys() & fields.keys():
        default = options[option].default
        assert fields[option].default == (dataclasses.MISSING if default is inspect.Parameter.empty else default)
    more = inspect.signature(nnx.MultiHeadAttention.__init__).parameters.keys() & fields.keys() - options.keys()
    assert more >= {"precision", "out_bias_init"}
    attention_options = inspect.signature(sl.SparseSelfAttention.__init__).parameters.keys()
    attention_options |= SelfAttentionOptions.__optional_keys__
    assert fields.keys() - options.keys() - more <= attention_options
    documentation = getattr(linen, name).__doc__
    for field in fields:
        assert re.search(rf"^\s+(\w+, )*{field}(,\s+\w+)*: |^ .*\b{field}\b.*,$", documentation, re.M), field


def test_all_settings_of_the_block_reach_its_attention():
    options = {
        "pattern": (sl.Causal(), sl.Window(2)),
        "seq_len": T + 1,
        "qkv_features": 8,
        "num_kv_heads": 1,
        "head_dim": 2,
        "rope": sl.Rope(9.0),
        "rope_theta": 9.0,
        "relative_bias": sl.LearnedBias(3),
        "use_sinks": True,
        "gate_output": "headwise",
        "cache_dtype": "int8",
        "scale": 0.7,
        "logits_soft_cap": 3.0,
        "implementation": "reference",
        "fwd_params": BLOCKS,
        "bwd_params": sl.BwdParams(num_warps=2),
        "query_sharding": jax.sharding.PartitionSpec("data"),
        "selection": sl.MoBA(block=16, count=1),
        "normalize_qk": "rms",
        "norm_epsilon": 1e-3,
        "use_bias": ("query", "out"),
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.float16,
        "precision": "highest",
        "kernel_init": nn.initializers.ones,
        "bias_init": nn.initializers.ones,
        "out_kernel_init": nn.initializers.ones,
        "out_bias_init": nn.initializers.ones,
    }
    shared = {f.name for c in (attention, block) for f in dataclasses.fields(c())} - {"parent", "name"}
    shared &= {f.name for f in dataclasses.fields(attention())} & {f.name for f in dataclasses.fields(block())}
    assert options.keys() == shared - {"num_heads", "dropout_rate"}
    inner = block(**options).bind({}).attention
    assert {name: getattr(inner, name) for name in options} == options
    assert inner.num_heads == N and inner.dropout_rate == 0


@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_head_dim_is_that_of_the_nnx_layer(make, reference):
    shapes = jax.eval_shape(make(head_dim=6).init, jax.random.key(0), inputs(1, T, F))["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, pure(reference(head_dim=6)))


PATTERNS = {
    "name": "local:local_attn_ctx=4",
    "mask": UNION,
    "list": ["all", sl.Window(3)],
    "array": ARRAY,
    "array of heads": np.stack([ARRAY, ARRAY.T]),
    "list with an array": [ARRAY, "all"],
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("make, reference", [(attention, nnx_attention), (block, nnx_block)])
def test_modules_are_values_with_any_pattern(name, make, reference):
    pattern = PATTERNS[name]
    module, equal = make(pattern=pattern), make(pattern=pattern.copy() if hasattr(pattern, "copy") else pattern)
    assert module == equal and hash(module) == hash(equal) and module == module.clone()
    assert module != make(pattern=sl.Causal() & sl.Strided(2))
    other = reference(pattern=pattern)
    assert module.pattern == (other if make is attention else other.attention).pattern
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def shapes(module, x):
        traces.append(1)
        return jnp.zeros(jax.tree.leaves(jax.eval_shape(module.init, jax.random.key(0), x))[0].shape)

    shapes(module, inputs(1, T, F)), shapes(equal, inputs(1, T, F))
    assert len(traces) == 1


def test_the_plan_is_that_of_nnx():
    pattern = ("all", "local:local_attn_ctx=4")
    assert attention(pattern=pattern).plan is nnx_attention(pattern=pattern).plan


def test_importing_the_package_does_not_import_the_linen_layers():
    code = "import sys, sparse_layers; print('sparse_layers.linen' in sys.modules, 'flax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
