"""Linen versions of the attention layers and of `SparseTransformerBlock`: same attributes, parameters and numbers."""

# Classes of their own, not `flax.nnx.bridge.to_linen` of the NNX ones: the bridge's module lacks the attributes that
# were not given, wants in_features, cannot be hashed or compared when the pattern is an array, wants a dropout key even
# to initialise a deterministic block, and draws new parameters at every apply only to replace them.

from .attention import SparseCrossAttention as SparseCrossAttention
from .attention import SparseSelfAttention as SparseSelfAttention
from .block import SparseTransformerBlock as SparseTransformerBlock
from .native_sparse_attention import NativeSparseAttention as NativeSparseAttention
