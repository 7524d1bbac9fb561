"""Flax NNX layers, and sparse attention for layers of others."""

from .attention import SparseSelfAttention as SparseSelfAttention
from .attention_fn import AttentionFn as AttentionFn
from .attention_fn import make_attention_fn as make_attention_fn
from .block import SparseTransformerBlock as SparseTransformerBlock
from .generate import generate as generate
from .transformer import SparseTransformer as SparseTransformer
