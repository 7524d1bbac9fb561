"""Misuses of biases by distance."""

import jax
import jax.numpy as jnp

import sparse_layers as sl
from tests.misuse import Misuse


def names():
    """Biases, arrays, and functions under jit."""
    return {
        "op": sl.block_sparse_attention,
        "bias": sl.DistanceBias,
        "grid": sl.grid_bias,
        "table": jnp.zeros((4, 5)),
        "ints": jnp.zeros((4, 8), int),
        "traced": lambda function: jax.jit(function)(jnp.ones(3, int)),
        "shapes": jax.ShapeDtypeStruct((4, 5), jnp.float32),
    }


TABLE = "must be floats of shape [N, L]"
SLOPES = "must be numbers of at most 1e30 in absolute value, one for each head"
JNP = "; it has traced numbers: write jnp.array"

ROWS = [
    # Tables.
    ("bias([[0.0, 1.0, 2.0], [1.0]])", "table", "got list: [[0.0, 1.0, 2.0], [1.0]]", TABLE),
    ("bias([0.0, 1.0, 2.0])", "table", "(3,)", "for all heads write [table]"),
    ("bias([[0, 1, 2]])", "table", "int64 of shape (1, 3)", "write jnp.array(table, jnp.float32)"),
    ("bias(ints)", "table", "int32 of shape (4, 8)", "write table.astype(jnp.float32)"),
    ("bias(shapes)", "table", "float32[4, 5]", "inside jax.eval_shape"),
    ("traced(lambda x: bias([[x[0], 1.0, 2.0]]))", "table", "got list: [[JitTracer", JNP + "(table)"),
    ("traced(lambda x: bias(table, x[0]))", "center", "JitTracer", "write a Python int, static under jit"),
    ("sl.t5_bias(ints)", "buckets", "int32 of shape (4, 8)", "write buckets.astype(jnp.float32)"),
    ("sl.t5_bias(table[0, :4])", "buckets", "(4,)", "for all heads write buckets[None]"),
    ("sl.t5_bias(table[:0])", "buckets", "got shape (0, 5)", "must not be empty"),
    ("traced(lambda x: sl.t5_bias([[x[0]] * 4]))", "buckets", "got list: [[JitTracer", JNP + "(buckets)"),
    ("grid((4, 4), jnp.zeros((0, 3, 3)))", "tables", "got shape (0, 3, 3)", "must not be empty"),
    ("grid((4, 4), [table, table[:0]])", "tables[1]", "got shape (0, 5)", "must not be empty"),
    ("grid((4, 4), [[0.0], [0.0]])", "tables[0]", "(1,)", "for all heads write [tables[0]]"),
    ("op(q, k, v, mask, bias=bias(table.T, 0))", "bias: table", "got (5, 4)", "write x.T"),
    ("op(q, k, v, mask, bias=sl.t5_bias(jnp.ones((8, 4))))", "bias: table", "(8, 257)", "buckets [N, num_buckets]"),
    # Slopes.
    ("bias(slopes=[1e39, 0.1])", "slopes", "got list: [1e+39, 0.1]", SLOPES),
    ("bias(slopes=[1.0, [2.0]])", "slopes", "got list: [1.0, [2.0]]", SLOPES),
    ("bias(slopes=np.ones((2, 1)))", "slopes", "float64 of shape (2, 1)", SLOPES),
    ("bias(slopes=np.float64([2, -1e31]))", "slopes", "float64 of shape (2,)", SLOPES),
    ("bias(slopes=[jnp.float32(1)])", "slopes", "got list: [Array(1.", "write Python numbers or a numpy array"),
    ("traced(lambda x: bias(slopes=[x[0]]))", "slopes", "JitTracer", "write Python numbers or a numpy array"),
    ("sl.AlibiBias([1e39, 0.1])", "slopes", "got list: [1e+39, 0.1]", SLOPES),
    ("sl.AlibiBias([1.0, [2.0]])", "slopes", "got list: [1.0, [2.0]]", SLOPES),
]
MISUSES = [Misuse(call, ValueError, *parts) for call, *parts in ROWS]
