"""Which inputs reach which outputs, measured by gradients through the whole layer, equals the mask."""

import jax
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from tests.ops.cases import BOTH_WAYS, TINY

T = 40
CASES = [(name, TINY[name]) for name in sl.presets()]
CASES += [("longformer", TINY["longformer"] | {"causal": False}), ("bigbird", TINY["bigbird"] | {"causal": False})]


def influence(pattern):
    """Bool [T, T]: whether input k has any effect on output q, one layer with 4 heads and blocks of 8 tokens."""
    params = sl.FwdParams(q_blocksize=8, kv_blocksize=8)
    layer = sl.SparseSelfAttention(4, 8, pattern=pattern, seq_len=T, fwd_params=params, rngs=nnx.Rngs(0))
    x, weights = jax.random.normal(jax.random.key(1), (T, 8)), jax.random.normal(jax.random.key(2), (8,))
    return np.abs(jax.jit(jax.jacobian(lambda x: layer(x) @ weights))(x)).sum(-1) > 0


@pytest.mark.parametrize(
    "name, options", CASES, ids=[f"{name}{'' if o.get('causal', True) else ' both ways'}" for name, o in CASES]
)
def test_reach_of_every_preset(name, options):
    pattern = sl.preset(name, **options)
    allowed = np.any([mask.dense(T) for mask in sl.as_masks(pattern)], axis=0)
    assert allowed.diagonal().all() or name == "draft_blocks"
    allowed = allowed | (np.eye(T, dtype=bool) & allowed.any(axis=1))  # a token's own projection is its query
    reached = influence(pattern)
    np.testing.assert_array_equal(reached, allowed)
    if name not in BOTH_WAYS and options.get("causal", True):
        assert not np.triu(reached, 1).any()


def test_a_leak_would_be_seen():
    leaky = sl.Causal() | sl.MaskMod(lambda b, h, q, k: (q == 20) & (k == 21))
    assert np.argwhere(np.triu(influence(leaky), 1)).tolist() == [[20, 21]]
