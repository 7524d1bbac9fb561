"""`SparseAttention`: Flax's multi-head attention layer whose attention step follows a pattern."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib
from flax.typing import Dtype

from ..masks.algebra import Mask
from ..ops.planning.plan import Plan
from ..scorers import Scorer, scorer_of
from .attention_fn import Pattern
from .core import AttentionCore
from .options import CrossOptions, KernelOptions
from .relative_bias import RelativeBias
from .rope import Rope, resolve_rope
from .settings import (
    PROJECTIONS,
    check_stream,
    gate_features,
    projections_with_bias,
    query_features,
    with_checked_settings,
)
from .step import attention_step, refuse_dropout


class JointRMSNorm(nnx.RMSNorm):
    """RMS norm of heads [..., N, H] over all features of a token together, N * H of them."""

    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns normalized heads, an array like x."""
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def make_zeros(shape: tuple[int, ...] | None, dtype: Dtype) -> Any:
    """Returns a parameter of zeros, or None as data of a module."""
    return nnx.data(None) if shape is None else nnx.Param(jnp.zeros(shape, dtype))


class SparseAttention(nnx.MultiHeadAttention):
    """The common base of `SparseSelfAttention` and `SparseCrossAttention`: parameters, pattern and attention step.

    Args:
      lengths: see `attention_step`.
      rope, rope_theta, relative_bias, cache_dtype: see `SparseSelfAttention`.
      **options: see `SparseCrossAttention`, which documents all other arguments.

    Raises:
      ValueError, TypeError, NotImplementedError: see `SparseSelfAttention`.
    """

    _limits: ClassVar[tuple[str, ...]]  # names of the arguments that limit lengths

    @with_checked_settings("dropout_rate")
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None,
        out_features: int | None,
        num_kv_heads: int | None,
        in_kv_features: int | None = None,
        *,
        lengths: Mapping[str, int],
        head_dim: int | None,
        pattern: Pattern,
        dropout_rate: float,
        rope: Rope | None = None,
        rope_theta: float | None = None,
        relative_bias: RelativeBias | None = None,
        cache_dtype: str | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[CrossOptions],
    ):
        check_stream(rngs, "params", "the parameters")
        refuse_dropout(dropout_rate)
        qkv_features = query_features(num_heads, in_features, qkv_features, head_dim)
        flax_options: dict[str, Any] = dict(options)
        use_sinks, epsilon = flax_options.pop("use_sinks", False), flax_options.pop("norm_epsilon", 1e-6)
        biases = projections_with_bias(flax_options.pop("use_bias", True))
        norm, gate = flax_options.pop("normalize_qk", False), flax_options.pop("gate_output", False)
        kernel_options = {name: flax_options.pop(name) for name in options.keys() & KernelOptions.__optional_keys__}
        heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads, qkv_features // num_heads
        kernel_options |= {"rope": resolve_rope(rope, rope_theta), "relative_bias": relative_bias}
        step = attention_step(pattern, lengths, *heads, options.get("dtype"), **kernel_options)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=step,
            decode=False,
            use_bias=bool(biases),
            normalize_qk=bool(norm),
            rngs=rngs,
            **flax_options,
        )
        for name in set(PROJECTIONS) - biases if biases else ():
            projection = getattr(self, name)
            projection.use_bias, projection.bias = False, nnx.data(None)
        if norm:
            metadata = {name: flax_options.get(f"{name}_scale_metadata", {}) for name in ("query_ln", "key_ln")}
            self._set_qk_norms(norm, epsilon, metadata, rngs)
        # Arrays are kept as masks: NNX would take an array for state, not for part of the layer's definition.
        self.pattern = pattern if isinstance(pattern, str | Mask | Scorer) else step.fn.masks
        self.cache_dtype = cache_dtype
        for name, length in lengths.items():
            setattr(self, name, length)
        self.sinks = make_zeros((num_heads,) if use_sinks else None, self.param_dtype)
        self.bias_table = make_zeros(step.table_shape(num_heads), self.param_dtype)
        self.out_gate = self._make_gate(gate, "query" in biases, flax_options, rngs)

    def _make_gate(self, gate: bool | str, use_bias: bool, options: Mapping[str, Any], rngs: nnx.Rngs) -> Any:
        """Returns the projection to the gates of heads, with Flax's options of the query projection, or None."""
        gates = gate_features(gate, self.head_dim)
        if not gates:
            return nnx.data(None)
        shared = {"dtype", "param_dtype", "kernel_init", "bias_init", "precision", "kernel_metadata", "bias_metadata"}
        settings = {name: options[name] for name in shared & options.keys()}
        for name in ("promote_dtype", "dot_general", "dot_general_cls"):
            settings[name] = getattr(self, f"qkv_{name}")
        return nnx.LinearGeneral(self.in_features, (self.num_heads, gates), use_bias=use_bias, rngs=rngs, **settings)

    def _set_qk_norms(self, norm: bool | str, epsilon: float, metadata: Mapping[str, Any], rngs: nnx.Rngs) -> None:
        """Sets the epsilon of the norms of q and k, and replaces Flax's layer norms unless ``norm`` says "layer"."""
        for name, heads in (("query_ln", self.num_heads), ("key_ln", self.num_kv_heads)):
            if norm in ("rms", "rms_joint"):
                make_norm, size = (nnx.RMSNorm, 1) if norm == "rms" else (JointRMSNorm, heads)
                options: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
                options |= {"promote_dtype": self.ln_promote_dtype, "scale_metadata": metadata[name]}
                setattr(self, name, make_norm(size * self.head_dim, epsilon=epsilon, **options))
            else:
                getattr(self, name).epsilon = epsilon

    def __nnx_repr__(self) -> Iterator[reprlib.Object | reprlib.Attr]:
        yield reprlib.Object(type(self), same_line=True)
        for name in ("num_heads", "num_kv_heads", "head_dim", "in_features", "pattern"):
            yield reprlib.Attr(name, getattr(self, name))
        scorer = self.attention_fn.fn.selection
        if scorer is not None and scorer_of(self.pattern) is None:
            yield reprlib.Attr("selection", scorer)
        if self.relative_bias is not None:
            yield reprlib.Attr("relative_bias", self.relative_bias)
        for name, length in self.lengths.items():
            yield reprlib.Attr(name, length)

    @property
    def lengths(self) -> dict[str, int]:
        """The longest length of each input, by the name of its argument."""
        return {name: getattr(self, name) for name in self._limits}

    @property
    def plan(self) -> Plan:
        """The plan of the pattern for the longest inputs (cached)."""
        return self.attention_fn.fn.plan(*self.lengths.values())

    @property
    def relative_bias(self) -> RelativeBias | None:
        """The bias of logits, whose table is ``bias_table``."""
        return self.attention_fn.relative_bias

    @property
    def _core(self) -> AttentionCore:
        values: dict[str, Any] = {"step": self.attention_fn}
        for name, param in (("sinks", self.sinks), ("bias_table", self.bias_table)):
            values[name] = None if param is None else param[...]
        names = {field.name for field in dataclasses.fields(AttentionCore)} - values.keys()
        # Cross-attention has no projections of an index.
        return AttentionCore(**{name: getattr(self, name) for name in names if hasattr(self, name)}, **values)
