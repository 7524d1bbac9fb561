"""Misuses of `make_attention_fn`, and of the functions that it returns."""

import jax.numpy as jnp

import sparse_layers as sl
from tests.misuse import FLAG, FLOAT, INTEGER, Misuse
from tests.misuses.layers import MASK, N, T


def names():
    return {"fn": sl.make_attention_fn(MASK, 512), "heads": jnp.ones((2, T, N, 4))}


ROWS = [
    ("sl.make_attention_fn(512, mask)", ValueError, "seq_len", "got Causal()", INTEGER),
    ("sl.make_attention_fn(mask, 512.0)", ValueError, "seq_len", "got 512.0", INTEGER),
    (
        "sl.make_attention_fn(mask, 512, recomput=True)",
        TypeError,
        "make_attention_fn",
        "'recomput'",
        "mean 'recompute'?",
    ),
    ("sl.make_attention_fn(None, 512)", TypeError, "pattern", "None", "must be a Mask"),
    ("sl.make_attention_fn(mask, 512, recompute='yes')", ValueError, "recompute", "got 'yes'", FLAG),
    ("sl.make_attention_fn(mask, 512, scale=jnp.array(1.0))", ValueError, "scale", "got Array(1.", "must be a number"),
    ("sl.make_attention_fn(mask, 512, segment_ids=[0, 1])", TypeError, "segment_ids", "[0, 1]", "must be an array"),
    ("fn([[1.0]], heads, heads)", TypeError, "query", "got list: [[1.0]]", "must be an array [..., T, heads, size]"),
    ("fn(heads, heads[:, :4], heads)", ValueError, "key", "(2, 4, 4, 4)", "with equal T"),
    ("fn(*[jnp.ones((2, 4, 512, 4))] * 3)", ValueError, "query", "got (2, 4, 512, 4)", "look swapped"),
    ("fn(heads, heads, heads, dtype='float33')", ValueError, "dtype", "got 'float33'", FLOAT),
    ("fn(heads, heads, heads, is_causal='yes')", ValueError, "is_causal", "got 'yes'", FLAG),
    (
        "fn(heads, heads, heads, bias=heads)",
        ValueError,
        "bias must be a DistanceBias or None",
        "(2, 8, 4, 4)",
        "and not by pair",
    ),
    ("sl.make_attention_fn('causal', 16, scale=10**400)", ValueError, "scale", "1000", "must be a number"),
]
MISUSES = [Misuse(*row) for row in ROWS]
