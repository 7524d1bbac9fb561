"""Flax NNX layers, and sparse attention for layers of others."""

from .attention import SparseSelfAttention as SparseSelfAttention
from .attention_fn import AttentionFn as AttentionFn
from .attention_fn import make_attention_fn as make_attention_fn
from .block import SparseTransformerBlock as SparseTransformerBlock
from .cross_attention import SparseCrossAttention as SparseCrossAttention
from .decoder import Decoder as Decoder
from .experts import LoadBalancingLoss as LoadBalancingLoss
from .generate import generate as generate
from .index import IndexLoss as IndexLoss
from .mixer import Mixer as Mixer
from .mixture import MixtureOfExperts as MixtureOfExperts
from .native_sparse_attention import NativeSparseAttention as NativeSparseAttention
from .relative_bias import AlibiBias as AlibiBias
from .relative_bias import GridBias as GridBias
from .relative_bias import LearnedBias as LearnedBias
from .relative_bias import RelativeBias as RelativeBias
from .relative_bias import T5Bias as T5Bias
from .rope import LinearScaling as LinearScaling
from .rope import Llama3Scaling as Llama3Scaling
from .rope import LongRopeScaling as LongRopeScaling
from .rope import Rope as Rope
from .rope import YarnScaling as YarnScaling
from .transformer import SparseTransformer as SparseTransformer
