"""Flax layers for sparse attention in JAX: the pattern is a value, the computation skips what it forbids."""

import importlib
import typing

from .masks import And as And
from .masks import Array as Array
from .masks import BlockDiagonal as BlockDiagonal
from .masks import Blocks as Blocks
from .masks import Causal as Causal
from .masks import ColumnMajor as ColumnMajor
from .masks import Columns as Columns
from .masks import Compressed as Compressed
from .masks import Empty as Empty
from .masks import Full as Full
from .masks import Global as Global
from .masks import Graph as Graph
from .masks import Grid as Grid
from .masks import LogSparse as LogSparse
from .masks import Mask as Mask
from .masks import MaskMod as MaskMod
from .masks import Neighborhood as Neighborhood
from .masks import Not as Not
from .masks import Or as Or
from .masks import Prefix as Prefix
from .masks import Radial as Radial
from .masks import Random as Random
from .masks import Rectangle as Rectangle
from .masks import Shifted as Shifted
from .masks import Strided as Strided
from .masks import Transposed as Transposed
from .masks import Window as Window
from .masks import as_masks as as_masks
from .masks import from_csr as from_csr
from .masks import from_deepspeed as from_deepspeed
from .masks import from_mask_mod as from_mask_mod
from .masks import preset as preset
from .masks import preset_options as preset_options
from .masks import presets as presets
from .masks import spatial_order as spatial_order

__version__ = "0.3.0"  # the one place: what is built and the command line read it here

if typing.TYPE_CHECKING:  # what `__getattr__` does when they are used
    from .modules import AlibiBias as AlibiBias
    from .modules import AttentionFn as AttentionFn
    from .modules import Decoder as Decoder
    from .modules import GridBias as GridBias
    from .modules import IndexLoss as IndexLoss
    from .modules import LearnedBias as LearnedBias
    from .modules import LinearScaling as LinearScaling
    from .modules import Llama3Scaling as Llama3Scaling
    from .modules import LoadBalancingLoss as LoadBalancingLoss
    from .modules import LongRopeScaling as LongRopeScaling
    from .modules import Mixer as Mixer
    from .modules import MixtureOfExperts as MixtureOfExperts
    from .modules import NativeSparseAttention as NativeSparseAttention
    from .modules import RelativeBias as RelativeBias
    from .modules import Rope as Rope
    from .modules import SparseCrossAttention as SparseCrossAttention
    from .modules import SparseSelfAttention as SparseSelfAttention
    from .modules import SparseTransformer as SparseTransformer
    from .modules import SparseTransformerBlock as SparseTransformerBlock
    from .modules import T5Bias as T5Bias
    from .modules import YarnScaling as YarnScaling
    from .modules import make_attention_fn as make_attention_fn
    from .modules.generate import generate as generate
    from .modules.loading.dense import from_linen as from_linen
    from .modules.loading.dense import from_nnx as from_nnx
    from .modules.loading.huggingface import from_gpt2 as from_gpt2
    from .modules.loading.huggingface import from_huggingface as from_huggingface
    from .modules.loading.saving import to_huggingface as to_huggingface
    from .ops.attention import block_sparse_attention as block_sparse_attention
    from .ops.decoding.cache import KVCache as KVCache
    from .ops.implementations import implementations as implementations
    from .ops.kernels.distance_bias import DistanceBias as DistanceBias
    from .ops.kernels.distance_bias import alibi as alibi
    from .ops.kernels.distance_bias import grid_bias as grid_bias
    from .ops.kernels.distance_bias import t5_bias as t5_bias
    from .ops.order import block_order as block_order
    from .ops.order import prefix_order as prefix_order
    from .ops.order import segment_ids_from_lengths as segment_ids_from_lengths
    from .ops.order import span_order as span_order
    from .ops.planning.binding import bind as bind
    from .ops.planning.mask_info import MaskInfo as MaskInfo
    from .ops.planning.mask_info import process_dynamic_mask as process_dynamic_mask
    from .ops.planning.mask_info import process_dynamic_mask_dkv as process_dynamic_mask_dkv
    from .ops.planning.mask_info import process_mask as process_mask
    from .ops.planning.mask_info import process_mask_dkv as process_mask_dkv
    from .ops.planning.params import BwdParams as BwdParams
    from .ops.planning.params import FwdParams as FwdParams
    from .ops.planning.plan import Plan as Plan
    from .ops.planning.planner import make_plan as make_plan
    from .ops.planning.selection import Selection as Selection
    from .ops.planning.selection import mean_pool_blocks as mean_pool_blocks
    from .ops.planning.selection import top_k_blocks as top_k_blocks
    from .scorers import MSA as MSA
    from .scorers import NSA as NSA
    from .scorers import InfLLM as InfLLM
    from .scorers import MoBA as MoBA
    from .scorers import Scorer as Scorer
    from .tools.describe import describe as describe
    from .tools.diagnose import diagnose as diagnose
    from .tools.pictures import draw as draw
    from .tools.pictures import grid_picture as grid_picture
    from .tools.pictures import picture as picture
    from .tools.tuned import Tuned as Tuned
    from .tools.tuned import load_tuned as load_tuned
    from .tools.tuning import tune as tune


# Only masks come with the package: the rest takes several times as long to import, and the layers bring flax.nnx.
_AT_FIRST_USE = {
    "modules": (
        "AlibiBias",
        "AttentionFn",
        "Decoder",
        "GridBias",
        "IndexLoss",
        "LearnedBias",
        "LinearScaling",
        "Llama3Scaling",
        "LoadBalancingLoss",
        "LongRopeScaling",
        "Mixer",
        "MixtureOfExperts",
        "NativeSparseAttention",
        "RelativeBias",
        "Rope",
        "SparseCrossAttention",
        "SparseSelfAttention",
        "SparseTransformer",
        "SparseTransformerBlock",
        "T5Bias",
        "YarnScaling",
        "make_attention_fn",
    ),
    "modules.generate": ("generate",),  # from `modules`, type checkers take it for the module
    "modules.loading.dense": ("from_linen", "from_nnx"),
    "modules.loading.huggingface": ("from_gpt2", "from_huggingface"),
    "modules.loading.saving": ("to_huggingface",),
    "ops.attention": ("block_sparse_attention",),
    "ops.decoding.cache": ("KVCache",),
    "ops.implementations": ("implementations",),
    "ops.kernels.distance_bias": ("DistanceBias", "alibi", "grid_bias", "t5_bias"),
    "ops.order": ("block_order", "prefix_order", "segment_ids_from_lengths", "span_order"),
    "ops.planning.binding": ("bind",),
    "ops.planning.mask_info": (
        "MaskInfo",
        "process_dynamic_mask",
        "process_dynamic_mask_dkv",
        "process_mask",
        "process_mask_dkv",
    ),
    "ops.planning.params": ("BwdParams", "FwdParams"),
    "ops.planning.plan": ("Plan",),
    "ops.planning.planner": ("make_plan",),
    "ops.planning.selection": ("Selection", "mean_pool_blocks", "top_k_blocks"),
    "scorers": ("MSA", "NSA", "InfLLM", "MoBA", "Scorer"),
    "tools.describe": ("describe",),
    "tools.diagnose": ("diagnose",),
    "tools.pictures": ("draw", "grid_picture", "picture"),
    "tools.tuned": ("Tuned", "load_tuned"),
    "tools.tuning": ("tune",),
}

if not typing.TYPE_CHECKING:  # type checkers go by the imports, and would take every name for one of the package
    __all__ = sorted(name for name, value in globals().items() if callable(value) and not name.startswith("_"))
    __all__ += [name for names in _AT_FIRST_USE.values() for name in names]

    def __getattr__(name: str) -> typing.Any:
        for module, names in _AT_FIRST_USE.items():
            if name in names:
                value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
                globals()[name] = value  # so that this function is asked once
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
