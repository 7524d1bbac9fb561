"""`MixtureOfExperts`: the settings of a mixture of experts, as the ``mlp=`` of a block or model."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..arguments.checks import Positive, checked, strict_kwargs
from ..arguments.foreign import one_line
from .activations import ACTIVATIONS, GATED_ACTIVATIONS


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """A mixture of experts, as the ``mlp=`` of a block or model: a router sends each token to ``top_k`` of the MLPs.

    ``y = sum(w[e] * expert_e(x) for e in top_k(x @ router))``. No token is dropped. Each expert is an MLP like the
    block's, with the block's dtypes, initializers and biases. The NNX block has the parameters ``experts.router``,
    ``experts.experts_in``, ``experts_gate`` and ``experts_out``, whose kernels are stacked: [num_experts, F, features].

    Args:
      num_experts: number of experts E.
      top_k: number of experts that each token selects, at most num_experts.
      features: hidden features of each expert; None for the block's mlp_features.
      activation: the activation of the experts, a name as of the block's ``mlp``, or a function of an array.
      normalize: True if the weights of the selected experts sum to 1: a softmax over the selected logits, which is the
        softmax over all logits, divided by its sum over the selected experts (Mixtral, gpt-oss, and Qwen3-MoE with
        ``norm_topk_prob``). False for the softmax over all.
      router_bias: True if the router has a bias (gpt-oss).
      shared_features: hidden features of an expert that all tokens use, with weight 1; None for none. Several shared
        experts are one with all their features.
      expert_axis: axis of the current mesh over which the experts are divided. Each device computes its experts for all
        tokens, and the results are summed. None, or no current mesh, leaves the layout to the compiler.
      token_axes: other mesh axes, over which the first axis of the input is divided. They count with expert_axis only.

    Raises:
      ValueError: sizes that are not integers >= 1, a top_k above num_experts, an unknown activation, flags that are not
        bools, axes that are not strings, token_axes without or with expert_axis.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> mixture = sl.MixtureOfExperts(num_experts=4, top_k=2, features=16)
      >>> sizes = {"pattern": sl.Causal(), "seq_len": 16}
      >>> block = sl.SparseTransformerBlock(2, 8, mlp=mixture, **sizes, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
      >>> jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(block.experts, nnx.Param)))["experts_in"]["kernel"]
      (4, 8, 16)

    References:
      Shazeer et al.: Outrageously Large Neural Networks, 2017. Fedus, Zoph, Shazeer: Switch Transformers, 2021.
      Gale et al.: MegaBlocks, 2022.
    """

    num_experts: int
    top_k: int
    features: int | None = dataclasses.field(default=None, kw_only=True)
    activation: str | Callable[[jax.Array], jax.Array] = dataclasses.field(default="swiglu", kw_only=True)
    normalize: bool = dataclasses.field(default=True, kw_only=True)
    router_bias: bool = dataclasses.field(default=False, kw_only=True)
    shared_features: int | None = dataclasses.field(default=None, kw_only=True)
    expert_axis: str | None = dataclasses.field(default=None, kw_only=True)
    token_axes: str | tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self):
        for name in ("num_experts", "top_k"):
            checked(name, getattr(self, name), Positive)
        for name in ("features", "shared_features"):
            if getattr(self, name) is not None:
                checked(name, getattr(self, name), Positive)
        for name in ("normalize", "router_bias"):
            checked(name, getattr(self, name), bool)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must not exceed num_experts={self.num_experts}")
        names = (*ACTIVATIONS, *GATED_ACTIVATIONS)
        if not callable(self.activation) and self.activation not in names:
            known = ", ".join(map(repr, names))
            raise ValueError(f"activation must be a function or one of {known}, got {one_line(self.activation)}")
        axes = (self.token_axes,) if isinstance(self.token_axes, str) else self.token_axes
        if not isinstance(self.expert_axis, str | None):
            raise ValueError(f"expert_axis must be the name of a mesh axis, got {one_line(self.expert_axis)}")
        if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
            raise ValueError(
                f"token_axes must be the name of a mesh axis or a tuple of names, got {one_line(self.token_axes)}"
            )
        if axes and (self.expert_axis is None or self.expert_axis in axes):
            raise ValueError(f"token_axes={axes} must differ from expert_axis, which must be set, got {self}")
        object.__setattr__(self, "token_axes", axes)

    @property
    def is_gated(self) -> bool:
        """True if the experts have a gate."""
        return isinstance(self.activation, str) and self.activation in GATED_ACTIVATIONS

    def route(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Selects experts: logits [..., E] -> (weights [..., top_k] float32, ids [..., top_k] int32)."""
        logits = logits.astype(jnp.float32)
        if self.normalize:
            top_logits, ids = jax.lax.top_k(logits, self.top_k)
            return jax.nn.softmax(top_logits, axis=-1), ids
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        return weights, ids


Mlp = str | Callable[[jax.Array], jax.Array] | MixtureOfExperts  # the setting ``mlp=`` of a block
