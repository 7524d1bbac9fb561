"""Misuses of the Haiku layers."""

import haiku as hk
import jax
import jax.numpy as jnp

from sparse_layers.haiku import SparseSelfAttention, SparseTransformerBlock
from tests.misuse import Misuse


def names():
    ones = jnp.ones((2, 32, 16))

    def user(layer):
        """The layer as a user makes and calls it: of some settings, on an array x, with more arguments of the call."""

        def run(num_heads=4, size=16, x=ones, call=None, **options):
            options = {"pattern": "local:local_attn_ctx=4", "seq_len": 32} | options
            model = hk.transform(lambda: layer(num_heads, size, **options)(x, **call or {}))
            return jax.eval_shape(model.init, jax.random.key(0))

        return run

    return {"hk": hk, "attend": user(SparseSelfAttention), "haiku_block": user(SparseTransformerBlock)}


MISUSES = [
    Misuse("attend(patern=mask)", TypeError, "SparseSelfAttention", "patern", "did you mean 'pattern'"),
    Misuse("attend(dropout_rate=0.1)", TypeError, "SparseSelfAttention", "dropout_rate", "Known: "),
    Misuse("attend(pattern='stridde')", ValueError, "pattern", "stridde", "did you mean 'strided'"),
    Misuse(
        "attend(pattern=np.ones((32, 31), bool))",
        ValueError,
        "pattern",
        "(32, 31)",
        "must be seq_len=32 (queries, keys)",
    ),
    Misuse("attend(pattern=(mask, sl.Causal(), sl.Full()))", ValueError, "pattern", "3 entries", "divide num_heads=4"),
    Misuse("attend(seq_len=0)", ValueError, "seq_len", "got 0", "an integer >= 1"),
    Misuse("attend(4.0)", ValueError, "num_heads", "got 4.0", "an integer >= 1"),
    Misuse("attend(4, 0)", ValueError, "key_size", "got 0", "an integer >= 1"),
    Misuse("attend(value_size=0)", ValueError, "value_size", "got 0", "an integer >= 1"),
    Misuse("attend(model_size=True)", ValueError, "model_size", "got True", "an integer >= 1"),
    Misuse("attend(num_kv_heads=3)", ValueError, "num_kv_heads", "=3", "must divide num_heads=4"),
    Misuse("attend(4, 5, rope_theta=1e4)", ValueError, "rope", "got 5", "2 must divide key_size"),
    Misuse("attend(logits_soft_cap=0)", ValueError, "logits_soft_cap", "got 0", "> 0"),
    Misuse("attend(w_init='normal')", TypeError, "w_init", "'normal'", "an initializer, called with (shape, dtype)"),
    Misuse("attend(w_init_scale='a')", ValueError, "w_init_scale", "got 'a'", "a number > 0"),
    Misuse("attend(name=3)", TypeError, "name", "got 3", "a string"),
    Misuse("haiku_block(name=3)", TypeError, "name", "got 3", "a string"),
    Misuse("attend(with_bias=1)", ValueError, "with_bias", "got 1", "true or false"),
    Misuse("attend(x=jnp.ones((2, 33, 16)))", ValueError, "query", "33 tokens", "seq_len=32"),
    Misuse("attend(x=jnp.ones(16))", ValueError, "query", "got (16,)", "shape [..., T, "),
    Misuse("attend(x=jnp.ones((2, 32, 16), int))", ValueError, "query", "int32", "floats"),
    Misuse("attend(call={'key': jnp.ones((2, 30, 16))})", ValueError, "key", "(2, 30, 16)", "no cross-attention"),
    Misuse("attend(call={'value': jnp.ones((3, 32, 16))})", ValueError, "value", "(3, 32, 16)", "no cross-attention"),
    Misuse("attend(call={'key': [[1.0]]})", TypeError, "key", "list", "an array"),
    Misuse(
        "attend(call={'mask': jnp.tril(jnp.ones((1, 1, 32, 32), bool))})",
        ValueError,
        "mask",
        "(1, 1, 32, 32)",
        "the pattern masks pairs of tokens",
    ),
    Misuse("attend(call={'mask': jnp.ones((2, 32), bool)})", ValueError, "mask", "got (2, 32)", "[..., 1, 1, T]"),
    Misuse(
        "attend(call={'segment_ids': jnp.zeros((2, 30), int)})", ValueError, "segment_ids", "(2, 30)", "one id a token"
    ),
    Misuse("attend(call={'segment_ids': jnp.zeros((2, 32))})", ValueError, "segment_ids", "float32", "integers"),
    Misuse("attend(call={'selection': 1})", TypeError, "selection", "got int", "must be a Selection or None"),
    Misuse("attend(call={'is_training': True})", TypeError, "__call__", "is_training", "nothing is dropped here"),
    Misuse("haiku_block(rope_thta=3)", TypeError, "SparseTransformerBlock", "rope_thta", "did you mean 'rope_theta'"),
    Misuse(
        "haiku_block(out_w_init=hk.initializers.Constant(0))",
        TypeError,
        "SparseTransformerBlock",
        "out_w_init",
        "Known: ",
    ),
    Misuse("haiku_block(16, 4)", ValueError, "num_heads=16", "features=4", "their order is (num_heads, features)"),
    Misuse("haiku_block(4, 18)", ValueError, "features", "18", "num_heads=4 must divide"),
    Misuse("haiku_block(mlp='tanh')", ValueError, "mlp", "tanh", "'swiglu'"),
    Misuse("haiku_block(mlp=sl.MixtureOfExperts(4, 2))", NotImplementedError, "mlp", "num_experts=4", "NNX or Linen"),
    Misuse("haiku_block(norm='batch')", ValueError, "norm", "batch", "'rms'"),
    Misuse("haiku_block(num_layers=0)", ValueError, "num_layers", "got 0", ">= 1"),
    Misuse("haiku_block(remat='full')", ValueError, "remat", "full", "true or false"),
    Misuse("haiku_block(dropout_rate=1.0)", ValueError, "dropout_rate", "1.0", "[0, 1)"),
    Misuse("haiku_block(dropout_rate=0.1)", ValueError, "deterministic", "None", "True or False"),
    Misuse("haiku_block(x=jnp.ones((2, 32, 12)))", ValueError, "x must", "(2, 32, 12)", "[..., T, 16]"),
    Misuse(
        "haiku_block(call={'segment_ids': jnp.zeros((2, 1), int)})",
        ValueError,
        "segment_ids",
        "(2, 1)",
        "one id a token",
    ),
]
