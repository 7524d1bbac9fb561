"""Linen layers of the tests beside the NNX ones: their parameters, outputs and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from tests.arrays import inputs, perturbed

T, F, N = 24, 16, 4
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 24 tokens are several blocks
UNION = sl.Causal() & (sl.Window(3) | sl.Strided(5))
ARRAY = np.tril(np.random.default_rng(7).random((T, T)) < 0.5)
NSA = sl.NSA(block=16, count=3, pool_size=8, pool_stride=4, sliding=9)
IDS = jnp.asarray([[0] * 9 + [1] * 8 + [-1] * 7] * 2)
BF16 = {"dtype": jnp.bfloat16}
# Each program runs once, so most of the time goes to compiling: without optimisation, to about half as much.
once = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def attention(**options):
    return linen.SparseSelfAttention(N, **{"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options)


def block(**options):
    return linen.SparseTransformerBlock(N, F, **{"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options)


def nnx_attention(**options):
    options = {"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options
    return sl.SparseSelfAttention(N, F, rngs=nnx.Rngs(0), **options)


def nnx_block(**options):
    options = {"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS} | options
    return sl.SparseTransformerBlock(N, F, rngs=nnx.Rngs(0), **options)


def native(**options):
    return linen.NativeSparseAttention(N, **{"pattern": NSA, "seq_len": 80} | options)


def nnx_native(**options):
    return sl.NativeSparseAttention(N, F, **{"pattern": NSA, "seq_len": 80, "rngs": nnx.Rngs(0)} | options)


def pure(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def perturbed_params(module, *arguments):
    """Parameters away from their initial zeros and ones, without the program that would initialise them."""
    key = jax.random.key(0)
    shapes = jax.eval_shape(module.init, {"params": key, "dropout": key}, *(arguments or [inputs(2, T, F)]))
    assert list(shapes) == ["params"]
    return perturbed(shapes["params"])


def specs(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def value_and_grads(*functions):
    """Of each function of (params, x, ids): the output, and the gradients of params and x; all in one program."""

    @once
    def run(params, x, ids=None):
        results = []
        for function in functions:
            out, pull = jax.vjp(functools.partial(function, ids=ids), params, x)
            results.append((out, *pull(inputs(*out.shape, seed=3).astype(out.dtype))))
        return results

    return run


def apply_of(module, **options):
    return lambda params, x, ids=None: module.apply({"params": params}, x, segment_ids=ids, **options)


def apply_of_nnx(module, **options):
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(pure_params, x, ids=None):
        state = jax.tree.map(lambda leaf: leaf, params)  # a copy
        nnx.replace_by_pure_dict(state, pure_params)
        return nnx.merge(graphdef, state, rest, copy=True)(x, segment_ids=ids, **options)

    return apply


def assert_close(actual, expected, tolerance):
    """Equal to ``tolerance`` times the greatest entry of each leaf, or 1."""

    def compare(a, b):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()))

    jax.tree.map(compare, actual, expected)
