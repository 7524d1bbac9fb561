"""Misuses of what reads and writes the weights of dense models."""

from flax import nnx

import sparse_layers as sl
from tests.misuse import FLOAT, INTEGER, Misuse


def names():
    return {
        "__file__": __file__,
        "dense": nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0)),
        "model": sl.SparseTransformer(32, 4, 16, 2, patterns="causal", seq_len=8, rngs=nnx.Rngs(0)),
    }


ROWS = [
    (
        "sl.from_nnx(dense, pattern=mask, seq_len=8, num_experts=3)",
        TypeError,
        "from_nnx: unknown argument",
        "'num_experts'",
        "Known: ",
    ),
    (
        "sl.from_nnx(dense, pattern=mask, seq_len=8, num_heads=3)",
        ValueError,
        "num_heads",
        "the dense layer",
        "cannot be changed",
    ),
    ("sl.from_nnx(3, pattern=mask, seq_len=8)", TypeError, "dense", "got int", "must be a flax.nnx.MultiHeadAttention"),
    ("sl.from_nnx(dense, pattern=mask, seq_len=8, dtype='x')", ValueError, "dtype", "got 'x'", FLOAT),
    ("sl.from_linen(3, pattern=mask, seq_len=8)", TypeError, "params", "got int", "must be a mapping"),
    ("sl.from_linen({}, pattern=mask, seq_len=8)", ValueError, "params", "query.kernel", "missing"),
    (
        "sl.from_linen({}, pattern=mask, seq_len=8, use_sink=1)",
        TypeError,
        "from_linen: unknown",
        "'use_sink'",
        "use_sinks",
    ),
    ("sl.from_huggingface(3)", TypeError, "folder", "got int: 3", "must be that of a model"),
    (
        "sl.from_huggingface('/nowhere', pattern=mask)",
        TypeError,
        "from_huggingface: unknown argument",
        "'pattern'",
        "called patterns= here",
    ),
    ("sl.from_huggingface('/nowhere', mlps='gelu')", TypeError, "unknown argument", "'mlps'", "Known: "),
    ("sl.from_huggingface('/nowhere', num_heads=4)", ValueError, "num_heads", "the files' architecture", "be changed"),
    ("sl.from_gpt2('/nowhere', gate_output=True)", ValueError, "gate_output", "the files' architecture", "be changed"),
    ("sl.from_huggingface(__file__)", FileNotFoundError, "folder", ".py", "must be that of config.json, not a file"),
    ("sl.from_huggingface('/nowhere', seq_len=2.0)", ValueError, "seq_len", "got 2.0", INTEGER),
    ("sl.from_huggingface('/nowhere', param_dtype=jnp.int8)", ValueError, "param_dtype", "int8", FLOAT),
    ("sl.to_huggingface(3, '/nowhere')", TypeError, "model", "got int", "must be a SparseTransformer"),
    ("sl.to_huggingface(model, 3)", TypeError, "folder", "got int: 3", "must be that of a model"),
    ("sl.to_huggingface(model, '/nowhere', config='a')", TypeError, "config", "got str: 'a'", "must be a mapping"),
    ("sl.to_huggingface(model, '/')", FileExistsError, "folder", "'/'", "must be new or empty"),
    ("sl.to_huggingface(model, '/nowhere')", ValueError, "model", "'row_column' in the model", "must be like one of"),
    (
        "sl.to_huggingface(model, '/nowhere', config={'model_type': 'gpt'})",
        ValueError,
        "model_type",
        "'gpt'",
        "must be one of bloom, ",
    ),
    (
        "sl.from_huggingface('/nowhere', patterns=('causal', sl.Mixer(lambda rngs: jnp.sin)))",
        ValueError,
        "patterns",
        "got Mixer(",
        "without a Mixer and NSA",
    ),
    (
        "sl.from_gpt2('/nowhere', patterns='nsa')",
        ValueError,
        "patterns",
        "got 'nsa'",
        "make a SparseTransformer and copy",
    ),
    ("sl.from_huggingface('/nowhere', rngs=0)", TypeError, "rngs", "got 0", "must be a flax.nnx.Rngs"),
]
MISUSES = [Misuse(*row) for row in ROWS]
