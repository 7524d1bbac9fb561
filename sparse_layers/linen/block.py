"""`SparseTransformerBlock` for Linen."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from ..arguments.checks import strict_kwargs
from ..modules.block import IN_BLOCK, check_input, forward
from ..modules.block import SparseTransformerBlock as NNXBlock
from ..modules.settings import GATED, PROJECTIONS, biased, check_order
from ..ops.decoding.cache import KVCache
from ..ops.planning.selection import Selection
from ..scorers import as_nsa
from .attention import SparseSelfAttention
from .native_sparse_attention import NativeSparseAttention
from .settings import OfOneSequence, OverPattern


@strict_kwargs
class SparseTransformerBlock(OfOneSequence, OverPattern):
    """The residual block, for Linen; parameters are those of `sparse_layers.SparseTransformerBlock`.

    ``x + dropout(attention(norm(x)))``, then ``+ dropout(mlp(norm(.)))``. The last projections of both branches start
    1/sqrt(2 * num_layers) times smaller than Flax's default. Names, shapes and numbers are those of the NNX block, but
    for the roundings of Flax's norms in half precision.

    Args:
      num_heads: number of query heads.
      features: features F of the residual stream.
      num_layers: blocks in the whole stack (scales the initial output projections).
      mlp_features: hidden features of the MLP; defaults to 4 * features.
      mlp: the function between the MLP's matrices, or the name of one, see `sparse_layers.SparseTransformerBlock`.
      make_mlp: makes another MLP, ``lambda: Experts(...)``: a Linen module that maps [..., F] to [..., F].
      norm: "layer" or "rms".
      norm_epsilon: added to the variance in all norms.
      norm_placement: "pre", "post" or "sandwich", see there.
      parallel: whether the MLP reads what attention reads.
      dropout_rate: share of values dropped at the branches' ends; uses the ``"dropout"`` rng collection.
      deterministic: True switches dropout off, False on; here or in the call. Needed with a dropout_rate only. The
        call takes it by keyword only, so a ``flax.linen.remat`` of your own would trace it, and dropout cannot be
        switched by a traced value: set the attribute there, or use remat=True, which takes both.
      remat: recompute the block in the backward pass instead of keeping its activations: same numbers, less memory.
      use_bias: whether the projections of attention and MLP have biases, or the names of those that do: "query", "key",
        "value", "out" and "mlp".
      kernel_init, bias_init: initializers of all projections but the last ones of both branches.
      out_kernel_init: that of the last ones; None for the scaled default.
      normalize_qk: see `SparseSelfAttention`; True stands for norms as the block's own, "layer" or "rms".
      pattern, seq_len: see `SparseSelfAttention`; `NSA`, or its name, makes the attention `NativeSparseAttention`.
      qkv_features, num_kv_heads, head_dim, rope, rope_theta: see `SparseSelfAttention`.
      use_sinks, scale, logits_soft_cap, selection, query_sharding: see there.
      implementation, fwd_params, bwd_params: see there.
      dtype, param_dtype: see there, those of the whole block.
      precision, out_bias_init: see there, attention's alone.

    Raises:
      ValueError: at construction: an unknown mlp or norm, sizes that are no integers >= 1, flags that are no bools,
        dropout_rate outside [0, 1), more heads than features without head_dim, a bad pattern; at ``init`` and
        ``apply``: `SparseSelfAttention`'s.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import linen as nn
      >>> from sparse_layers import linen
      >>> class Stack(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         block = linen.SparseTransformerBlock(2, 8, pattern=sl.Causal(), seq_len=16, num_layers=3)
      ...         step = lambda block, x, _: (block(x), None)
      ...         names = {nn.PARTITION_NAME: None}  # of the layers' axis, where initializers are partitioned
      ...         scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "metadata_params": names}
      ...         stack = nn.scan(step, length=3, **scan)
      ...         return stack(block, x, None)[0]
      >>> x = jnp.ones((1, 16, 8))
      >>> variables = Stack().init(jax.random.key(0), x)
      >>> variables["params"]["SparseTransformerBlock_0"]["mlp_in"]["kernel"].shape
      (3, 8, 32)
      >>> Stack().apply(variables, x).shape
      (1, 16, 8)

    References:
      Child, Gray, Radford, Sutskever: Generating Long Sequences with Sparse Transformers, 2019.
    """

    num_heads: int
    features: int
    num_layers: int = dataclasses.field(default=1, kw_only=True)
    mlp_features: int | None = dataclasses.field(default=None, kw_only=True)
    mlp: str | Callable[[jax.Array], jax.Array] = dataclasses.field(default="gelu", kw_only=True)
    make_mlp: Callable[[], Callable[[jax.Array], jax.Array]] | None = dataclasses.field(default=None, kw_only=True)
    norm: str = dataclasses.field(default="layer", kw_only=True)
    norm_placement: str = dataclasses.field(default="pre", kw_only=True)
    parallel: bool = dataclasses.field(default=False, kw_only=True)
    dropout_rate: float = dataclasses.field(default=0.0, kw_only=True)
    deterministic: bool | None = dataclasses.field(default=None, kw_only=True)
    remat: bool = dataclasses.field(default=False, kw_only=True)

    _with_biases = IN_BLOCK

    @nn.nowrap
    def _resolve_pattern(self) -> None:
        if as_nsa(self.pattern) is None:
            super()._resolve_pattern()

    def __post_init__(self):
        super().__post_init__()
        check_order(self.num_heads, self.features, self.head_dim)

    def setup(self):
        shared = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = functools.partial(
            nn.LayerNorm if self.norm == "layer" else nn.RMSNorm, epsilon=self.norm_epsilon, **shared
        )
        out_init = self.out_kernel_init
        if out_init is None:
            out_init = nn.initializers.variance_scaling(1 / (2 * self.num_layers), "fan_in", "truncated_normal")
        biases = biased(self.use_bias, IN_BLOCK)
        fields = {field.name: field for kind in (OfOneSequence, OverPattern) for field in dataclasses.fields(kind)}
        settings: dict[str, Any] = {name: getattr(self, name) for name in fields.keys() - {"parent", "name"}}
        layer: Any = SparseSelfAttention
        if as_nsa(self.pattern) is not None:
            layer = NativeSparseAttention
            # What it has no use for, it is given to refuse, unless nobody said so or it is for the block's own norms.
            known = {field.name for field in dataclasses.fields(layer)}
            unsaid = {name for name, value in settings.items() if value == fields[name].default} | {"norm_epsilon"}
            settings = {name: settings[name] for name in settings.keys() - (unsaid - known)}
        settings["out_kernel_init"] = out_init
        if not isinstance(self.use_bias, bool):
            settings["use_bias"] = tuple(name for name in PROJECTIONS if name in biases)
        if self.normalize_qk is True:
            settings["normalize_qk"] = self.norm
        pre, post = (self.norm_placement in (name, "sandwich") for name in ("pre", "post"))
        # The names are those of the NNX block: its forward function, which both share, and its parameters go by them.
        self.attention_norm, self.attention_out_norm = norm() if pre else None, norm() if post else None
        self.attention = layer(self.num_heads, **settings)
        self.mlp_norm, self.mlp_out_norm = norm() if pre else None, norm() if post else None
        own = self.make_mlp is None
        hidden = 4 * self.features if self.mlp_features is None else self.mlp_features
        dense = functools.partial(nn.Dense, use_bias="mlp" in biases, bias_init=self.bias_init, **shared)
        self.mlp_in = dense(hidden, kernel_init=self.kernel_init) if own else None
        self.mlp_gate = dense(hidden, kernel_init=self.kernel_init) if own and self.mlp in GATED else None
        self.mlp_out = dense(self.features, kernel_init=out_init) if own else None
        self.mlp_module = None if self.make_mlp is None else self.make_mlp()
        self.dropout = nn.Dropout(self.dropout_rate)

    @strict_kwargs
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        selection: Selection | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Applies the block.

        Args:
          x: [..., T, features] with T <= seq_len.
          segment_ids: int [..., T], see `SparseSelfAttention`.
          selection: a `Selection`, see `SparseSelfAttention`.
          positions: int [..., T] or [T], see `SparseSelfAttention`.
          deterministic: True switches dropout off, False on; None: as the module's attribute says.

        Returns:
          [..., T, features].

        Raises:
          TypeError: what is no array.
          ValueError: x of other features, or dropout that is neither switched on nor off; `SparseSelfAttention`'s.
        """
        check_input(self.features, x, deterministic)
        # Without dropout there is nothing to switch, and Flax's layer would ask all the same.
        off = not self.dropout_rate or nn.merge_param("deterministic", self.deterministic, deterministic)
        return (_rematerialized if self.remat else forward)(self, x, segment_ids, off, selection, positions)

    def prefill(self, x: jax.Array, lengths: jax.Array | None = None, **options: Any) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.prefill` for the block: [B, T, features] -> the same and the cache; no dropout."""
        return _NNX_BLOCK.prefill(self, x, lengths, **options)

    def decode_step(
        self, x: jax.Array, cache: KVCache, position: jax.Array, **options: Any
    ) -> tuple[jax.Array, KVCache]:
        """`SparseSelfAttention.decode_step` for the block: [B, features] -> the same and the cache; no dropout."""
        return _NNX_BLOCK.decode_step(self, x, cache, position, **options)


_NNX_BLOCK: Any = NNXBlock  # its methods need no more of a block than its layers, which have the same names
_rematerialized: Any = nn.remat(forward, static_argnums=(3,))
