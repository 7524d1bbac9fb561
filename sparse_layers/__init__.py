"""Flax layers for sparse attention in JAX: the pattern is a value, the computation skips what it forbids."""

import importlib
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

if typing.TYPE_CHECKING:  # what `__getattr__` does when they are used
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
    from .ops.planning.selection import Selection, mean_pool_blocks, top_k_blocks
    from .tools.describe import describe
    from .tools.pictures import draw, picture
    from .tools.tuning import Tuned, load_tuned, tune

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
    "Selection",
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
    "mean_pool_blocks",
    "picture",
    "preset",
    "preset_options",
    "presets",
    "process_dynamic_mask",
    "process_dynamic_mask_dkv",
    "process_mask",
    "process_mask_dkv",
    "top_k_blocks",
    "tune",
]


# Only masks come with the package: the rest takes several times as long to import, and the layers bring flax.nnx.
_AT_FIRST_USE = {
    "modules": (
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
    ),
    "ops.attention": ("block_sparse_attention", "implementations"),
    "ops.decoding.cache": ("KVCache",),
    "ops.planning.mask_info": (
        "MaskInfo",
        "bind",
        "process_dynamic_mask",
        "process_dynamic_mask_dkv",
        "process_mask",
        "process_mask_dkv",
    ),
    "ops.planning.params": ("BwdParams", "FwdParams"),
    "ops.planning.plan": ("Plan", "make_plan"),
    "ops.planning.selection": ("Selection", "mean_pool_blocks", "top_k_blocks"),
    "tools.describe": ("describe",),
    "tools.pictures": ("draw", "picture"),
    "tools.tuning": ("Tuned", "load_tuned", "tune"),
}

if not typing.TYPE_CHECKING:  # type checkers would take every name for one of the package

    def __getattr__(name: str) -> typing.Any:
        for module, names in _AT_FIRST_USE.items():
            if name in names:
                value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
                globals()[name] = value  # so that this function is asked once
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
