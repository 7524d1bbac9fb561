"""Misuses of layers, blocks and models, of `generate` and of the loaders."""

from sparse_layers import linen
from tests.misuse import Misuse

ORDER = "the order is Flax's, (num_heads, features)"


def names():
    return {"linen": linen}


MISUSES = [
    Misuse(
        "sl.SparseTransformerBlock(64, 4, pattern=mask, seq_len=8, rngs=nnx.Rngs(0))",
        ValueError,
        "num_heads=64",
        "features=4",
        ORDER,
    ),
    Misuse(
        "sl.SparseTransformer(256, 64, 4, 2, patterns=mask, seq_len=8, rngs=nnx.Rngs(0))",
        ValueError,
        "num_heads=64",
        "features=4",
        ORDER,
    ),
    Misuse(
        "linen.SparseTransformerBlock(64, 4, pattern=mask, seq_len=8)", ValueError, "num_heads=64", "features=4", ORDER
    ),
]
