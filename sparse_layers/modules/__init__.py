"""Flax NNX layers that hold their sparsity pattern as an attribute."""

from .attention import SparseSelfAttention as SparseSelfAttention
from .block import SparseTransformerBlock as SparseTransformerBlock
from .transformer import SparseTransformer as SparseTransformer
