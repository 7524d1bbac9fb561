"""The common attributes of attention layers for Linen, and their checks."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from ..masks.algebra import Mask
from ..modules.attention_fn import AttentionFn, Pattern
from ..modules.relative_bias import RelativeBias
from ..modules.rope import Rope
from ..modules.settings import PROJECTIONS, check_settings, projections_with_bias
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..scorers import Scorer, masks_and_scorer


class LayerSettings(nn.Module, kw_only=True):
    """Attributes of all layers; `SparseSelfAttention` documents them."""

    pattern: Pattern
    qkv_features: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    scale: float | None = None
    implementation: str | None = None
    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    query_sharding: jax.sharding.PartitionSpec | None = None
    use_bias: bool | Collection[str] = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = nn.initializers.zeros
    out_kernel_init: Initializer | None = None

    def __post_init__(self):
        if isinstance(self.parent, int | str | Mask):
            raise TypeError(
                f"{type(self).__name__}: parent must be a module of Linen, got {self.parent!r}: pattern=, seq_len= and "
                "further sizes are given by name; attention takes its features from its inputs"
            )
        check_settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        biases = projections_with_bias(self.use_bias, self._bias_names)
        if not isinstance(self.use_bias, bool):  # hashable, in one order
            self.use_bias = tuple(name for name in self._bias_names if name in biases)
        self._resolve_pattern()
        super().__post_init__()

    _bias_names = PROJECTIONS

    @property
    def lengths(self) -> dict[str, int]:
        """The longest length of each input, by the name of its attribute."""
        raise NotImplementedError

    @nn.nowrap
    def _resolve_pattern(self) -> None:
        """Refuses a pattern of another type, and replaces an array or a sequence by masks."""
        raise NotImplementedError


class SelfAttentionSettings(LayerSettings, kw_only=True):
    """Attributes of self-attention layers and of the residual block."""

    seq_len: int
    rope: Rope | None = None
    rope_theta: float | None = None

    @property
    def lengths(self) -> dict[str, int]:
        return {"seq_len": self.seq_len}


class PatternSettings(LayerSettings, kw_only=True):
    """Attributes of attention layers with one pattern."""

    relative_bias: RelativeBias | None = None
    use_sinks: bool = False
    gate_output: bool | str = False
    logits_soft_cap: float | None = None
    selection: Scorer | str | None = None
    normalize_qk: bool | str = False
    norm_epsilon: float = 1e-6
    out_bias_init: Initializer | None = None

    @nn.nowrap
    def _resolve_pattern(self) -> None:
        masks, _ = masks_and_scorer(self.pattern, self.selection, list(self.lengths.values()))
        # Arrays are kept as masks: a module with an array could be neither hashed nor compared.
        if not isinstance(self.pattern, str | Mask | Scorer):
            self.pattern = masks

    @property
    def plan(self) -> Plan:
        """The plan of the pattern for the longest inputs (cached)."""
        settings = {"fwd_params": self.fwd_params, "bwd_params": self.bwd_params, "implementation": self.implementation}
        lengths = list(self.lengths.values())
        return AttentionFn(masks_and_scorer(self.pattern, None, lengths)[0], lengths[0], **settings).plan(*lengths)
