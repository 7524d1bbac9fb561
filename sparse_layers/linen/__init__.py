"""Attention layers and the residual block for Linen, with the parameters and numbers of those for NNX."""

# These classes do not use `flax.nnx.bridge.to_linen`. The bridge's module lacks attributes that were not given, needs
# in_features, cannot be hashed or compared with an array as pattern, needs a dropout key even to initialize a
# deterministic block, and initializes new parameters at every apply only to replace them.

from .attention import SparseCrossAttention as SparseCrossAttention
from .attention import SparseSelfAttention as SparseSelfAttention
from .block import SparseTransformerBlock as SparseTransformerBlock
from .native_sparse_attention import NativeSparseAttention as NativeSparseAttention
