"""Flax layers for sparse attention in JAX: the pattern is a value, the computation skips what it forbids."""

from .adapters import Array, MaskMod, as_masks, from_mask_mod
from .describe import describe, draw, picture
from .masks import (
    And,
    BlockDiagonal,
    Blocks,
    Causal,
    Columns,
    Empty,
    Full,
    Global,
    LogSparse,
    Mask,
    Not,
    Or,
    Prefix,
    Random,
    Strided,
    Transposed,
    Window,
)
from .modules import SparseSelfAttention, SparseTransformer, SparseTransformerBlock
from .ops.attention import block_sparse_attention, implementations
from .ops.mask_info import (
    MaskInfo,
    bind,
    process_dynamic_mask,
    process_dynamic_mask_dkv,
    process_mask,
    process_mask_dkv,
)
from .ops.params import BwdParams, FwdParams
from .ops.plan import Plan, make_plan
from .presets import from_deepspeed, preset, preset_options, presets

__all__ = [
    "And",
    "Array",
    "BlockDiagonal",
    "Blocks",
    "BwdParams",
    "Causal",
    "Columns",
    "Empty",
    "Full",
    "FwdParams",
    "Global",
    "LogSparse",
    "Mask",
    "MaskInfo",
    "MaskMod",
    "Not",
    "Or",
    "Plan",
    "Prefix",
    "Random",
    "SparseSelfAttention",
    "SparseTransformer",
    "SparseTransformerBlock",
    "Strided",
    "Transposed",
    "Window",
    "as_masks",
    "bind",
    "block_sparse_attention",
    "describe",
    "draw",
    "from_deepspeed",
    "from_mask_mod",
    "implementations",
    "make_plan",
    "picture",
    "preset",
    "preset_options",
    "presets",
    "process_dynamic_mask",
    "process_dynamic_mask_dkv",
    "process_mask",
    "process_mask_dkv",
]
