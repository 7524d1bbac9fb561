"""Misuses of biases by distance, of `RelativeBias` and of the parameter ``bias_table``."""

import jax
import jax.numpy as jnp
from flax import nnx

import sparse_layers as sl
from tests.misuse import Misuse


class OfShape(sl.RelativeBias):
    """A bias whose table has any shape."""

    def __init__(self, *shape):
        self.shape = shape

    def table_shape(self, num_heads):
        return self.shape

    def make_bias(self, table, num_heads):
        return sl.DistanceBias(table)


def layer(relative_bias):
    return sl.SparseSelfAttention(2, 16, pattern="causal", seq_len=8, relative_bias=relative_bias, rngs=nnx.Rngs(0))


def model(relative_bias):
    options = {"seq_len": 8, "positions": "none", "relative_bias": relative_bias, "share_relative_bias": True}
    return sl.SparseTransformer(20, 2, 16, 1, patterns="causal", **options, rngs=nnx.Rngs(0))


def call_replaced(make, relative_bias, inputs, table):
    """Calls a layer or model under jit after ``bias_table`` was replaced."""
    module = make(relative_bias)
    module.bias_table = nnx.Param(table)
    return nnx.jit(lambda module: module(inputs))(module)


def names():
    """Layers with a table of another shape, and functions under jit."""
    return {
        "op": sl.block_sparse_attention,
        "bias": sl.DistanceBias,
        "grid": sl.grid_bias,
        "table": jnp.zeros((4, 5)),
        "ints": jnp.zeros((4, 8), int),
        "traced": lambda function: jax.jit(function)(jnp.ones(3, int)),
        "shapes": jax.ShapeDtypeStruct((4, 5), jnp.float32),
        "layer": layer,
        "OfShape": OfShape,
        "in_layer": lambda bias, *shape: call_replaced(layer, bias, jnp.ones((1, 8, 16)), jnp.zeros(shape)),
        "in_model": lambda bias, *shape: call_replaced(model, bias, jnp.zeros((1, 8), int), jnp.zeros(shape)),
    }


TABLE = "must be floats of shape [N, L]"
SLOPES = "must be numbers of at most 1e30 in absolute value, one for each head"
LEARNED = "(2, 6), that of relative_bias=LearnedBias(left=5"
JNP = "; it has traced numbers: write jnp.array"

ROWS = [
    # Parameters of another relative_bias.
    ("in_layer(sl.LearnedBias(5), 2, 9)", "bias_table", "got (2, 9)", LEARNED),
    ("in_layer(sl.T5Bias(False), 2, 8)", "bias_table", "got (2, 8)", "(2, 32), that of relative_bias=T5Bias("),
    ("in_layer(sl.T5Bias(False), 32, 2)", "bias_table must have shape (2, 32)", "got (32, 2)", "write x.T"),
    ("in_model(sl.LearnedBias(5), 2, 9)", "bias_table", "got (2, 9)", LEARNED),
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
MISUSES = [
    *(Misuse(call, ValueError, *parts) for call, *parts in ROWS),
    Misuse("layer(OfShape(2, -3))", TypeError, "OfShape.table_shape", "got (2, -3)", "a tuple of integers >= 1"),
    Misuse("OfShape(2, 0).abstract_bias(2)", TypeError, "OfShape.table_shape", "got (2, 0)", "integers >= 1 or None"),
]
