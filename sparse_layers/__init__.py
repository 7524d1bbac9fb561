"""Flax layers for sparse attention in JAX: the pattern is a value, the computation skips what it forbids."""

import typing

from .masks import (
    And,
    Array,
    BlockDiagonal,
    Blocks,
    Causal,
    Columns,
    Empty,
    Full,
    Global,
    LogSparse,
    Mask,
    MaskMod,
    Not,
    Or,
    Prefix,
    Random,
    Strided,
    Transposed,
    Window,
    as_masks,
    from_deepspeed,
    from_mask_mod,
    preset,
    preset_options,
    presets,
)
from .ops.attention import block_sparse_attention, implementations
from .ops.decoding.cache import KVCache
from .ops.planning.mask_info import (
    MaskInfo,
    bind,
    process_dynamic_mask,
    process_dynamic_mask_dkv,
    process_mask,
    process_mask_dkv,
)
from .ops.planning.params import BwdParams, FwdParams
from .ops.planning.plan import Plan, make_plan
from .tools.describe import describe
from .tools.pictures import draw, picture
from .tools.tuning import Tuned, load_tuned, tune

if typing.TYPE_CHECKING:
    from .modules import (
        AttentionFn,
        Decoder,
        SparseSelfAttention,
        SparseTransformer,
        SparseTransformerBlock,
        from_gpt2,
        from_linen,
        from_nnx,
        generate,
        make_attention_fn,
    )

__all__ = [
    "And",
    "Array",
    "AttentionFn",
    "BlockDiagonal",
    "Blocks",
    "BwdParams",
    "Causal",
    "Columns",
    "Decoder",
    "Empty",
    "Full",
    "FwdParams",
    "Global",
    "KVCache",
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
    "Tuned",
    "Window",
    "as_masks",
    "bind",
    "block_sparse_attention",
    "describe",
    "draw",
    "from_deepspeed",
    "from_gpt2",
    "from_linen",
    "from_mask_mod",
    "from_nnx",
    "generate",
    "implementations",
    "load_tuned",
    "make_attention_fn",
    "make_plan",
    "picture",
    "preset",
    "preset_options",
    "presets",
    "process_dynamic_mask",
    "process_dynamic_mask_dkv",
    "process_mask",
    "process_mask_dkv",
    "tune",
]


_LAYERS = (
    "AttentionFn",
    "Decoder",
    "SparseSelfAttention",
    "SparseTransformer",
    "SparseTransformerBlock",
    "from_gpt2",
    "from_linen",
    "from_nnx",
    "generate",
    "make_attention_fn",
)


if not typing.TYPE_CHECKING:  # to a type checker, the names above are all there are

    def __getattr__(name):
        # The layers come at their first use: flax.nnx takes several times as long to import as all the rest.
        if name in _LAYERS:
            from . import modules

            return getattr(modules, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
