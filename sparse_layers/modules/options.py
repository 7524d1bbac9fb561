"""Options that a model passes to its blocks, a block to its attention layer, and a layer to the op, as types."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict

import jax
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.selection import Selection
from ..scorers import Scorer
from .relative_bias import RelativeBias
from .rope import Rope


class KernelOptions(TypedDict, total=False):
    """Options of `block_sparse_attention`, which documents them."""

    scale: float | None
    logits_soft_cap: float | None
    implementation: str | None
    fwd_params: FwdParams | None
    bwd_params: BwdParams | None
    query_sharding: jax.sharding.PartitionSpec | None
    selection: Scorer | str | None


class ComputeOptions(KernelOptions, total=False):
    """Options of a layer that choose how it computes a pattern; `SparseSelfAttention` documents them."""

    use_sinks: bool


class GatedOptions(ComputeOptions, total=False):
    """Options of a layer that may gate its heads; `SparseSelfAttention` documents them."""

    gate_output: bool | str


class FnOptions(KernelOptions, total=False):
    """Options of `make_attention_fn`, which documents them."""

    recompute: bool


class FlaxOptions(TypedDict, total=False):
    """Options of ``flax.nnx.MultiHeadAttention``, passed to it unchanged.

    ``precision`` is that of the four projections. ``deterministic``, ``broadcast_dropout`` and ``keep_rngs`` have no
    effect, as the attention weights are never dropped.
    """

    precision: PrecisionLike
    out_bias_init: Initializer | None
    qkv_promote_dtype: PromoteDtypeFn
    out_promote_dtype: PromoteDtypeFn
    ln_promote_dtype: PromoteDtypeFn
    qkv_dot_general: Callable[..., jax.Array] | None
    out_dot_general: Callable[..., jax.Array] | None
    qkv_dot_general_cls: Any
    out_dot_general_cls: Any
    kernel_metadata: Mapping[str, Any]
    out_kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]
    out_bias_metadata: Mapping[str, Any]
    query_ln_scale_metadata: Mapping[str, Any]
    key_ln_scale_metadata: Mapping[str, Any]
    deterministic: bool | None
    broadcast_dropout: bool
    keep_rngs: bool


class InitializerOptions(TypedDict, total=False):
    """Initializers of projections; `SparseTransformerBlock` documents them."""

    kernel_init: Initializer
    bias_init: Initializer
    out_kernel_init: Initializer | None


class LayerOptions(FlaxOptions, InitializerOptions, total=False):
    """Options that `SparseSelfAttention` passes to ``flax.nnx.MultiHeadAttention``."""

    dtype: Dtype | None
    param_dtype: Dtype


class SelfAttentionOptions(LayerOptions, total=False):
    """Options of `SparseSelfAttention` besides its own."""

    cache_dtype: str | None


class CrossOptions(GatedOptions, LayerOptions, total=False):
    """Options of `SparseCrossAttention` besides sizes, pattern and lengths."""

    normalize_qk: bool | str
    norm_epsilon: float
    use_bias: bool | Collection[str]


class AttentionOptions(GatedOptions, FlaxOptions, total=False):
    """Options that `SparseTransformerBlock` passes to `SparseSelfAttention`."""

    num_kv_heads: int | None
    qkv_features: int | None
    head_dim: int | None
    cache_dtype: str | None


class BlockOptions(AttentionOptions, InitializerOptions, total=False):
    """Options that `SparseTransformer` passes to `SparseTransformerBlock`."""

    normalize_qk: bool | str

    mlp_features: int | None
    make_mlp: Callable[[nnx.Rngs], Callable[[jax.Array], jax.Array]] | None
    norm_placement: str
    parallel: bool | str
    residual_scale: float | None
    dropout_rate: float
    use_bias: bool | Collection[str]
    remat: bool


class LoadedLayerOptions(ComputeOptions, SelfAttentionOptions, total=False):
    """Options that `from_nnx` and `from_linen` pass to `SparseSelfAttention`."""

    rope: Rope | None
    rope_theta: float | None
    relative_bias: RelativeBias | None
    normalize_qk: bool | str
    norm_epsilon: float


class LoadedModelOptions(ComputeOptions, FlaxOptions, total=False):
    """Options that `from_huggingface` passes to `SparseTransformer`."""

    causal: bool
    cache_dtype: str | None
    dropout_rate: float
    remat: bool
    scan_layers: bool
    residual_sharding: jax.sharding.PartitionSpec | None


class StepOptions(TypedDict, total=False):
    """Options of decoding steps; `SparseSelfAttention.decode_step` documents them."""

    selection: Selection | None
    positions: jax.Array | None
    bias: DistanceBias | None


class PrefillOptions(StepOptions, total=False):
    """Options of ``prefill``; `SparseSelfAttention.prefill` documents them."""

    max_step: int
    cache: Any
    start: int
    total: int | None
    order_ids: jax.Array | None
