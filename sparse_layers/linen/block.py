"""`SparseTransformerBlock` for Linen: a residual block of attention and an MLP."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
from flax import linen as nn

from ..arguments.checks import strict_kwargs
from ..modules.activations import GATED_ACTIVATIONS
from ..modules.block_core import BlockCore, apply_block, check_block_input, norm_positions
from ..modules.mixture import MixtureOfExperts, Mlp
from ..modules.options import PrefillOptions, StepOptions
from ..modules.settings import BLOCK_PROJECTIONS, PROJECTIONS, check_order, projections_with_bias, resolve_qk_norm
from ..ops.decoding.cache import KVCache
from ..ops.kernels.distance_bias import DistanceBias
from ..ops.planning.selection import Selection
from ..scorers import as_nsa
from .attention import SparseSelfAttention
from .experts import Experts
from .native_sparse_attention import NativeSparseAttention
from .settings import PatternSettings, SelfAttentionSettings


@strict_kwargs
class SparseTransformerBlock(SelfAttentionSettings, PatternSettings):
    """The residual block, for Linen; parameters are those of `sparse_layers.SparseTransformerBlock`.

    ``x + dropout(attention(norm(x)))``, then ``+ dropout(mlp(norm(.)))``. The last projections of both branches start
    1/sqrt(2 * num_layers) times smaller than Flax's default. Names, shapes and numbers are those of the NNX block,
    except that Flax's norms round differently in half precision.

    Args:
      num_heads: number of query heads.
      features: features F of the residual stream.
      num_layers, mlp_features, mlp, norm, norm_epsilon: see `sparse_layers.SparseTransformerBlock`. A
        `MixtureOfExperts` sows its loss as ``load_balancing_loss`` in the collection "losses".
      norm_placement, parallel, residual_scale, remat, use_bias, normalize_qk: see there.
      kernel_init, bias_init, out_kernel_init: see there.
      make_mlp: a function that makes another MLP, ``lambda: Experts(...)``, a Linen module that maps [..., F] to
        [..., F].
      dropout_rate: share of values to drop at the ends of the branches, with the ``"dropout"`` rng collection.
      deterministic: True switches dropout off, False on; here or in the call. Needed with a dropout_rate only. The
        call has it as a keyword, which a ``flax.linen.remat`` around the block traces, and a traced value cannot switch
        dropout. Set the attribute there, or use remat=True, which accepts both.
      pattern, seq_len: see `SparseSelfAttention`; `NSA`, or its name, selects `NativeSparseAttention`.
      qkv_features, num_kv_heads, head_dim, rope, rope_theta, relative_bias: see `SparseSelfAttention`.
      use_sinks, gate_output, scale, logits_soft_cap, selection, query_sharding, cache_dtype: see there.
      implementation, fwd_params, bwd_params: see there.
      dtype, param_dtype: see there; for the whole block.
      precision, out_bias_init: see there; for attention only.

    Raises:
      ValueError: at construction: an unknown mlp or norm, sizes that are not integers >= 1, flags that are not bools,
        dropout_rate outside [0, 1), more heads than features without head_dim, a bad pattern; at ``init`` and
        ``apply``: errors of `SparseSelfAttention`.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import linen as nn
      >>> from sparse_layers import linen
      >>> class Stack(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         block = linen.SparseTransformerBlock(2, 8, pattern=sl.Causal(), seq_len=16, num_layers=3)
      ...         step = lambda block, x, _: (block(x), None)
      ...         names = {nn.PARTITION_NAME: None}  # the name of the layer axis, for partitioned initializers
      ...         scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "metadata_params": names}
      ...         stack = nn.scan(step, length=3, **scan)
      ...         return stack(block, x, None)[0]
      >>> x = jnp.ones((1, 16, 8))
      >>> variables = Stack().init(jax.random.key(0), x)
      >>> variables["params"]["SparseTransformerBlock_0"]["mlp_in"]["kernel"].shape
      (3, 8, 32)
      >>> Stack().apply(variables, x).shape
      (1, 16, 8)
    """

    num_heads: int
    features: int
    num_layers: int = dataclasses.field(default=1, kw_only=True)
    mlp_features: int | None = dataclasses.field(default=None, kw_only=True)
    mlp: Mlp = dataclasses.field(default="gelu", kw_only=True)
    make_mlp: Callable[[], Callable[[jax.Array], jax.Array]] | None = dataclasses.field(default=None, kw_only=True)
    norm: str = dataclasses.field(default="layer", kw_only=True)
    norm_placement: str = dataclasses.field(default="pre", kw_only=True)
    parallel: bool | str = dataclasses.field(default=False, kw_only=True)
    residual_scale: float | None = dataclasses.field(default=None, kw_only=True)
    cache_dtype: str | None = dataclasses.field(default=None, kw_only=True)
    dropout_rate: float = dataclasses.field(default=0.0, kw_only=True)
    deterministic: bool | None = dataclasses.field(default=None, kw_only=True)
    remat: bool = dataclasses.field(default=False, kw_only=True)

    _bias_names = BLOCK_PROJECTIONS

    @nn.nowrap
    def _resolve_pattern(self) -> None:
        if as_nsa(self.pattern) is None:
            super()._resolve_pattern()

    def __post_init__(self):
        super().__post_init__()
        check_order(self.num_heads, self.features, self.head_dim)

    def setup(self):
        shared = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm: Any = functools.partial(nn.RMSNorm, epsilon=self.norm_epsilon, **shared)
        if self.norm != "rms":
            norm = functools.partial(nn.LayerNorm, **norm.keywords, use_bias=self.norm == "layer")
        out_init = self.out_kernel_init
        if out_init is None:
            out_init = nn.initializers.variance_scaling(1 / (2 * self.num_layers), "fan_in", "truncated_normal")
        biases = projections_with_bias(self.use_bias, BLOCK_PROJECTIONS)
        fields = {x.name: x for cls in (SelfAttentionSettings, PatternSettings) for x in dataclasses.fields(cls)}
        settings: dict[str, Any] = {name: getattr(self, name) for name in fields.keys() - {"parent", "name"}}
        layer: Any = SparseSelfAttention
        if as_nsa(self.pattern) is not None:
            layer = NativeSparseAttention
            # It refuses settings that it lacks, so those left at their defaults, and the epsilon of norms, are dropped.
            layer_fields = {field.name for field in dataclasses.fields(layer)}
            unset = {name for name, value in settings.items() if value == fields[name].default} | {"norm_epsilon"}
            settings = {name: settings[name] for name in settings.keys() - (unset - layer_fields)}
        settings["out_kernel_init"] = out_init
        if self.cache_dtype is not None:
            settings["cache_dtype"] = self.cache_dtype
        if not isinstance(self.use_bias, bool):
            settings["use_bias"] = tuple(name for name in PROJECTIONS if name in biases)
        if self.normalize_qk:
            settings["normalize_qk"] = resolve_qk_norm(self.normalize_qk, self.norm)
        attention, mlp_input, post = norm_positions(self.norm_placement, self.parallel)
        self.attention_norm, self.attention_out_norm = norm() if attention else None, norm() if post else None
        self.attention = layer(self.num_heads, **settings)
        self.mlp_norm, self.mlp_out_norm = norm() if mlp_input else None, norm() if post else None
        self.mlp_in = self.mlp_gate = self.mlp_out = self.mlp_module = self.experts = None
        hidden = self.mlp_features or 4 * self.features
        mlp_options: dict[str, Any] = {"use_bias": "mlp" in biases, "bias_init": self.bias_init, **shared}
        if self.make_mlp is None and isinstance(self.mlp, MixtureOfExperts):
            inits = {"kernel_init": self.kernel_init, "out_kernel_init": out_init}
            self.experts = Experts(self.mlp, self.features, self.mlp.features or hidden, **inits, **mlp_options)
        elif self.make_mlp is None:
            dense = functools.partial(nn.Dense, **mlp_options)
            self.mlp_in = dense(hidden, kernel_init=self.kernel_init)
            if self.mlp in GATED_ACTIVATIONS:
                self.mlp_gate = dense(hidden, kernel_init=self.kernel_init)
            self.mlp_out = dense(self.features, kernel_init=out_init)
        else:
            self.mlp_module = self.make_mlp()
        self.dropout = nn.Dropout(self.dropout_rate)

    @strict_kwargs
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        order_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        bias: DistanceBias | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Applies the block to x [..., T, features], and returns an array like x.

        Args:
          x, segment_ids, order_ids, selection, positions, bias: see a call of `sparse_layers.SparseTransformerBlock`.
          deterministic: True switches dropout off, False on; None for the module's attribute.

        Raises:
          ValueError, TypeError: see there; dropout that is neither switched on nor off.
        """
        ids = {"segment_ids": segment_ids, "order_ids": order_ids}
        check_block_input(self.features, x, deterministic, ids=ids)
        # Flax's layer needs the flag even without dropout.
        deterministic = not self.dropout_rate or nn.merge_param("deterministic", self.deterministic, deterministic)
        options = {**ids, "selection": selection, "positions": positions, "bias": bias}
        return (_apply_with_remat if self.remat else apply_block)(self, x, deterministic, options)

    @strict_kwargs
    def prefill(
        self, x: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies `SparseSelfAttention.prefill` and the MLP to [B, T, features]; returns (out, cache). No dropout."""
        return BlockCore.of(self).prefill(x, lengths, **options)

    @strict_kwargs
    def decode_step(
        self, x: jax.Array, cache: KVCache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies `SparseSelfAttention.decode_step` and the MLP to [B, features]; returns (out, cache). No dropout."""
        return BlockCore.of(self).decode_step(x, cache, position, **options)


_apply_with_remat: Any = nn.remat(apply_block, static_argnums=(2,))
