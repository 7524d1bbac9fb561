"""The core of residual blocks, without a framework: NNX, Linen and Haiku make its layers, and call it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from ..ops.decoding.cache import KVCache
from .activations import activate
from .core import Projection
from .mixture import MixtureOfExperts, Mlp
from .options import PrefillOptions, StepOptions
from .settings import SHARED_NORM, check_features, check_ids, check_settings


@dataclasses.dataclass(frozen=True)
class BlockCore:
    """A residual block as its layers.

    Attributes:
      features: features F of the residual stream.
      mlp: the activation, see `activate`.
      parallel: True if the MLP reads the block's input, and not its sum with attention's output; "shared_norm" if it
        reads attention's norm of the input.
      residual_scale: factor of the outputs of attention and MLP, or None for 1.
      attention: the attention layer, with a call, ``prefill`` and ``decode_step``.
      attention_norm, mlp_norm: norms of branch inputs, or None.
      attention_out_norm, mlp_out_norm: norms of branch outputs, or None.
      mlp_in, mlp_gate, mlp_out: projections of the MLP; mlp_gate is None without a gated activation.
      mlp_module: another MLP instead of these, or None.
      experts: a mixture of experts instead of these, called with ``deterministic``, or None.
      dropout: a function of an array and ``deterministic``.
    """

    features: int
    mlp: Mlp
    parallel: bool | str
    residual_scale: float | None
    attention: Any
    attention_norm: Projection | None
    attention_out_norm: Projection | None
    mlp_norm: Projection | None
    mlp_out_norm: Projection | None
    mlp_in: Projection | None
    mlp_gate: Projection | None
    mlp_out: Projection | None
    mlp_module: Projection | None
    experts: Callable[..., jax.Array] | None
    dropout: Callable[..., jax.Array]

    @classmethod
    def of(cls, block: Any) -> "BlockCore":
        """Returns the core of a block of NNX, Linen or Haiku, whose attributes have the names of these fields."""
        return cls(**{field.name: getattr(block, field.name) for field in dataclasses.fields(cls)})

    def prefill(
        self, x: jax.Array, lengths: jax.Array | None = None, **options: Unpack[PrefillOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies the block to prompts [B, T, F], without dropout."""
        check_block_input(self.features, x)
        attended, cache = self.attention.prefill(_apply_norm(self.attention_norm, x), lengths, **options)
        return self.add_branches(x, attended, True), cache

    def decode_step(
        self, x: jax.Array, cache: KVCache, position: jax.Array, **options: Unpack[StepOptions]
    ) -> tuple[jax.Array, KVCache]:
        """Applies the block to new tokens [B, F] or [B, S, F], without dropout."""
        check_block_input(self.features, x, shape="[B, {}]")
        attended, cache = self.attention.decode_step(_apply_norm(self.attention_norm, x), cache, position, **options)
        return self.add_branches(x, attended, True), cache

    def add_branches(self, x: jax.Array, attended: jax.Array, deterministic: bool | None) -> jax.Array:
        """Returns x plus the output of attention and that of the MLP, token by token."""
        added = x + self._end_branch(self.attention_out_norm, attended, deterministic)
        # A shared norm is computed twice here; the compiler keeps one.
        norm = self.attention_norm if self.parallel == SHARED_NORM else self.mlp_norm
        normed = _apply_norm(norm, x if self.parallel else added)
        return added + self._end_branch(self.mlp_out_norm, self._apply_mlp(normed, deterministic), deterministic)

    def _end_branch(self, norm: Projection | None, x: jax.Array, deterministic: bool | None) -> jax.Array:
        """Normalizes the output of a branch if it has a norm there, drops some of it and scales it."""
        x = self.dropout(_apply_norm(norm, x), deterministic=deterministic)
        return x if self.residual_scale is None else x * jnp.asarray(self.residual_scale, x.dtype)

    def _apply_mlp(self, x: jax.Array, deterministic: bool | None) -> jax.Array:
        if self.experts is not None:
            return self.experts(x, deterministic=deterministic)
        if self.mlp_in is None or self.mlp_out is None:
            assert self.mlp_module is not None
            return self.mlp_module(x)
        assert not isinstance(self.mlp, MixtureOfExperts)
        hidden = self.mlp_in(x)
        return self.mlp_out(activate(self.mlp, hidden, None if self.mlp_gate is None else self.mlp_gate(x)))


def apply_block(block: Any, x: jax.Array, deterministic: bool | None, call_options: dict[str, Any]) -> jax.Array:
    """Applies a block of NNX, Linen or Haiku; ``call_options`` are those of its attention layer's call."""
    core = BlockCore.of(block)
    # Layers other than `SparseSelfAttention` have no argument for a bias.
    options = {name: value for name, value in call_options.items() if name != "bias" or value is not None}
    attended = core.attention(_apply_norm(core.attention_norm, x), **options)
    return core.add_branches(x, attended, deterministic)


def check_block_input(
    features: int,
    x: jax.Array,
    deterministic: bool | None = None,
    shape: str = "[..., T, {}]",
    ids: Mapping[str, Any] | None = None,
) -> None:
    """Refuses wrong inputs of a block before its norm fails on them, or `jax.checkpoint` cuts 64-bit ids off."""
    check_features("x", x, shape.format(features), features)
    check_settings(deterministic=deterministic)
    for name, array in (ids or {}).items():
        if array is not None:
            check_ids(name, array, [x.shape[:-1]])


def norm_positions(norm_placement: str, parallel: bool | str) -> tuple[bool, bool, bool]:
    """Returns True for each norm that a block has: of attention's input, of the MLP's input, of branch outputs."""
    pre = norm_placement in ("pre", "sandwich")
    return pre, pre and parallel != SHARED_NORM, norm_placement in ("post", "sandwich")


def _apply_norm(norm: Projection | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
