"""Implementations under strict promotion of dtypes and ranks: forward and backward passes are traced.

Not cudnn, which JAX traces only where cuDNN is installed.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.planning import platforms
from tests.arrays import strict_promotion

B, T, N, K, H = 2, 512, 8, 4, 128
IDS = np.zeros((B, T), np.int32)
SLOPES = tuple(2.0**-n for n in range(N))
H200 = hardware.DEVICES["h200"]
GRID = sl.preset("windows", shape=(16, 32), size=8)


def selection(granularity, block):
    blocks = np.arange(T // granularity)[:, None, None] % 3 + np.arange(2)
    ids = jnp.broadcast_to(jnp.asarray(blocks), (B, T // granularity, 1, 2))
    return sl.Selection(ids, block=block, granularity=granularity)


CASES = {
    "causal": (sl.Causal(), {}),
    "chain": (sl.preset("sparse_transformer_strided"), {}),
    "heads": ((sl.Causal(), sl.preset("strided")), {"return_lse": True}),
    "soft cap": (sl.Causal() & sl.Window(99), {"logits_soft_cap": 5.0}),
    "documents": (sl.Causal(), {"segment_ids": IDS, "return_lse": True}),
    "order": (sl.Full(), {"order_ids": IDS}),
    "run time": (jnp.ones((T, T), bool), {}),
    "blocks": (sl.Causal(), {"selection": selection(128, 128)}),
    "queries": (sl.Causal(), {"selection": selection(1, 64)}),
    "table": (sl.Causal(), {"bias": lambda table: sl.DistanceBias(table)}),
    "table, deterministic": (
        sl.Causal(),
        {"bias": lambda table: sl.DistanceBias(table), "bwd_params": sl.BwdParams(deterministic=True)},
    ),
    "slopes": (sl.Causal(), {"bias": lambda table: sl.DistanceBias(table, slopes=SLOPES)}),
    "alibi": (sl.Causal() & sl.Window(99), {"bias": lambda table: sl.alibi(N)}),
    "grid": (GRID, {"bias": lambda table: sl.grid_bias((16, 32), table.reshape(N, 9, 15))}),
}
UNSUPPORTED = {("pallas_tpu", "queries"), ("pallas_tpu", "grid")}
IMPLEMENTATIONS = "pallas_tpu", "hopper", "triton", "xla", "reference"
PAIRS = [(name, case) for name in IMPLEMENTATIONS for case in CASES if (name, case) not in UNSUPPORTED]


@pytest.mark.parametrize(("implementation", "case"), PAIRS)
def test_gradients_are_traced(implementation, case):
    if implementation in ("triton", "hopper"):
        pytest.importorskip("triton", reason="needs triton: pip install triton")
    mask, options = CASES[case]

    def loss(q, k, v, table, sinks):
        given = {name: x(table) if name == "bias" else x for name, x in options.items()}
        results = sl.block_sparse_attention(q, k, v, mask, implementation=implementation, sinks=sinks, **given)
        return sum(x.astype("float32").sum() for x in jax.tree.leaves(results))

    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    arrays = [jnp.zeros(x, "bfloat16") for x in shapes] + [jnp.zeros((N, 135))]
    gpu = platforms.assume_gpu(H200) if implementation in ("triton", "hopper") else contextlib.nullcontext()
    with gpu, bridge.record_launches(), strict_promotion():
        for sinks in (None, jnp.zeros(N)):
            gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2, 3)), *arrays, sinks)
            assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in arrays]
