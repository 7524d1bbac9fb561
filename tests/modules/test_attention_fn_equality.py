"""make_attention_fn returns one function, one plan and one trace for equal settings."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs
from tests.modules.flax_attention import ARRAY, BLOCKS, UNION, B, F, N, T, assert_close, sparse


def test_equal_arguments_give_the_same_function():
    make = sl.make_attention_fn
    assert make(ARRAY, T) is make(ARRAY.copy(), T)
    assert make("all", T) is make(sl.Causal(), T) is make(["all"], T) is make(sl.preset("all"), np.int64(T))
    assert make("local:local_attn_ctx=5", T) is make(sl.preset("local", local_attn_ctx=5), T)
    assert make("all", T, fwd_params=BLOCKS) is make("all", T, fwd_params=sl.FwdParams(q_blocksize=8, kv_blocksize=8))
    different = [
        make("all", T),
        make("all", T + 1),
        make("all", T, recompute=True),
        make("all", T, implementation="xla"),
        make("all", T, scale=0.5),
        make("all", T, logits_soft_cap=0.5),
        make("all", T, fwd_params=BLOCKS),
        make("all", T, bwd_params=sl.BwdParams(q_blocksize=8)),
        make("local", T),
        make(ARRAY, T),
        make(np.tri(T, dtype=bool), T),  # the same pairs as "all", but not the same value
    ]
    assert len(set(different)) == len(different)
    assert pickle.loads(pickle.dumps(make(ARRAY, T))) == make(ARRAY, T)


def test_settings_reach_the_plan_and_the_plan_is_built_once():
    bwd = sl.BwdParams(q_blocksize=16, kv_blocksize=8)
    fn = sparse(UNION, bwd_params=bwd, implementation="reference")
    expected = sl.make_plan(UNION, T, fwd_params=BLOCKS, bwd_params=bwd, implementation="reference")
    assert fn.plan(T) is expected is sparse(UNION, bwd_params=bwd, implementation="reference").plan(T)
    asked = []

    class Counting(sl.Window):
        def __call__(self, q, k):
            asked.append(np.broadcast_shapes(np.shape(q), np.shape(k)))
            return super().__call__(q, k)

    q = inputs(1, T, N, 8)
    fn = sl.make_attention_fn(Counting(4), T, implementation="xla", fwd_params=BLOCKS)
    before = len(asked)
    outs = [jax.jit(lambda q: fn(q, q, q))(q), jax.jit(lambda q: 2 * fn(q, q, q))(q) / 2]
    assert_close(*outs)
    planned = len(asked)
    sl.make_attention_fn(Counting(4), T, implementation="xla", fwd_params=BLOCKS).plan(T)
    assert len(asked) == planned and before > 0


def test_equal_settings_share_one_trace():
    make = functools.partial(nnx.MultiHeadAttention, N, F, decode=False)
    layers = [
        make(attention_fn=sparse(sl.Causal() & (sl.Window(3) | sl.Strided(5))), rngs=nnx.Rngs(seed)) for seed in (0, 1)
    ]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])
    assert hash(nnx.graphdef(layers[0])) == hash(nnx.graphdef(layers[1]))
    traces = []

    @nnx.jit
    def counted(layer, x):
        traces.append(x.shape)
        return layer(x)

    for layer in layers * 2:
        counted(layer, inputs(B, T, F))
    assert len(traces) == 1


@pytest.mark.parametrize("theirs", [nn.dot_product_attention, nnx.dot_product_attention])
def test_parameters_are_named_as_flax_names_them(theirs):
    """Linen hands over what the signature names and drops the rest: a parameter missing here would be ignored."""
    ours = inspect.signature(sparse("all")).parameters
    named = inspect.signature(theirs).parameters
    # The layers pass neither: Linen's einsums have their own names, NNX promotes by its default.
    assert set(named) - set(ours) == {"einsum_dot_general", "promote_dtype"} & set(named)
    assert list(ours)[:8] == list(named)[:8]  # up to dropout_rate, also by position
    for name, parameter in ours.items():
        assert name not in named or parameter.default == named[name].default, name
    assert set(inspect.signature(sparse("all", segment_ids=jnp.zeros((B, T), int))).parameters) == set(ours)
