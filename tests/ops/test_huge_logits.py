"""Logits and sinks near the ends of float32: answers stay finite, and as right as logits are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from tests.ops.cases import IMPLEMENTATIONS
from tests.ops.huge_logits import BASE_2, CASES, check
from tests.programs import sampled

LARGEST_SINK = {"pallas_tpu": 2.3e38, "triton": 2.3e38}  # of kernels that compute to base 2
CALLS = [(name, case) for name in IMPLEMENTATIONS for case in (BASE_2 if name in LARGEST_SINK else CASES)]


@pytest.mark.parametrize(("implementation", "case"), sampled(CALLS, 0.6), ids=str)
def test_values_and_gradients(implementation, case):
    check(case, case.call(implementation), LARGEST_SINK.get(implementation, np.inf))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [1e6, 1e8])
def test_scores_of_both_passes_are_rounded_alike(scale, packed):
    shape = 2, 96, 8, 64
    q, k, v = jax.random.normal(jax.random.key(0), (3, *shape))
    ids = jnp.broadcast_to(jnp.arange(96) // 32, (2, 96)) if packed else None
    options = {"scale": scale, "segment_ids": ids, "implementation": "xla"}
    dv = jax.grad(lambda v: sl.block_sparse_attention(q, k, v, sl.Causal(), **options).sum())(v)
    np.testing.assert_allclose(dv.sum((0, 1, 2)), 2 * 96 * 8, rtol=1e-6)
