"""The op inside an Equinox module: dense Equinox's numbers from its own weights, under Equinox's transformations."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

T, F, N = 24, 16, 4


class SparseAttention(eqx.Module):
    """Equinox's attention over a mask; one sequence [T, F] at a time, as everywhere in Equinox."""

    dense: eqx.nn.MultiheadAttention
    mask: sl.Mask = eqx.field(static=True)

    def __call__(self, x):
        linears = self.dense.query_proj, self.dense.key_proj, self.dense.value_proj
        q, k, v = (jax.vmap(linear)(x).reshape(1, len(x), self.dense.num_heads, -1) for linear in linears)
        out = sl.block_sparse_attention(q, k, v, self.mask)
        return jax.vmap(self.dense.output_proj)(out.reshape(len(x), -1))


def test_dense_equinox_and_the_op_agree_under_filter_jit_filter_grad_and_vmap():
    mask = sl.Causal() & (sl.Window(3) | sl.Strided(5))
    dense = eqx.nn.MultiheadAttention(N, F, use_query_bias=True, use_output_bias=True, key=jax.random.key(0))
    sparse = SparseAttention(dense, mask)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, F)).astype(np.float32))
    traces = []

    def loss(layer, x):
        traces.append(layer)
        apply = layer if isinstance(layer, SparseAttention) else lambda x: layer(x, x, x, mask.dense(T))
        out = jax.vmap(apply)(x)
        return jnp.sum(out**2), out

    step = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
    (_, actual), gradients = step(sparse, x)
    step(SparseAttention(dense, sl.Causal() & (sl.Window(3) | sl.Strided(5))), x)
    assert len(traces) == 1, "equal masks share one trace"
    (_, expected), expected_gradients = step(dense, x)
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), gradients.dense, expected_gradients)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients))
