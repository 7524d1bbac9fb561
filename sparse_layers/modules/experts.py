"""`Experts`: the MLPs of a `MixtureOfExperts` in the residual blocks of NNX, and the loss that balances them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from .experts_core import ExpertParams, apply_mixture
from .mixture import MixtureOfExperts


class LoadBalancingLoss(nnx.Variable):
    """The loss that balances the experts of a `MixtureOfExperts`, a float32 scalar that each call of a block sets.

    It is ``E * sum(f[e] * p[e])``, where f is the share of expert e among all selections, and p its mean probability:
    1 if all experts are selected equally often, E / top_k at most. Calls with ``deterministic=True`` or after
    ``eval()`` leave it unset, as do `prefill` and `decode_step`. Others need NNX's transforms, as `IndexLoss` does.

    Args:
      *args: the scalar.
      **kwargs: see ``nnx.Variable``.

    Raises:
      TypeError: as ``nnx.Variable``.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> options = {"pattern": "causal", "seq_len": 16, "mlp": sl.MixtureOfExperts(num_experts=4, top_k=2)}
      >>> block = sl.SparseTransformerBlock(2, 8, **options, rngs=nnx.Rngs(0))
      >>> def total_loss(block, x):
      ...     loss = (block(x) ** 2).mean()
      ...     return loss + 0.01 * sum(jax.tree.leaves(nnx.state(block, sl.LoadBalancingLoss)))
      >>> gradients = nnx.jit(nnx.grad(total_loss))(block, jax.random.normal(jax.random.key(0), (1, 16, 8)))
      >>> bool((gradients["experts"]["router"]["kernel"][...] != 0).any())
      True

    References:
      Fedus, Zoph, Shazeer: Switch Transformers, 2021, section 2.2.
    """


class Experts(nnx.Module):
    """The MLPs of a `MixtureOfExperts`: maps [..., F] to [..., F].

    Args:
      mixture: the settings.
      in_features: features F.
      features: hidden features of an expert.
      use_bias: True if the experts have biases.
      kernel_init, bias_init, out_kernel_init: initializers of the projections; out_kernel_init of the last ones.
      dtype: dtype of the computation; None for that of inputs and parameters.
      param_dtype: dtype of the parameters.
      rngs: random number generators of the parameters.
    """

    def __init__(
        self,
        mixture: MixtureOfExperts,
        in_features: int,
        features: int,
        *,
        use_bias: bool,
        kernel_init: Initializer,
        bias_init: Initializer,
        out_kernel_init: Initializer,
        dtype: Dtype | None,
        param_dtype: Dtype,
        rngs: nnx.Rngs,
    ):
        self.mixture, self.dtype, self.deterministic = mixture, dtype, False
        linear: Any = functools.partial(nnx.Linear, bias_init=bias_init, dtype=dtype, param_dtype=param_dtype)

        def make_mlp(hidden: int, rngs: nnx.Rngs) -> list[nnx.Linear | None]:
            project = functools.partial(linear, in_features, hidden, use_bias=use_bias, kernel_init=kernel_init)
            gate = project(rngs=rngs) if mixture.is_gated else None
            out = linear(hidden, in_features, use_bias=use_bias, kernel_init=out_kernel_init, rngs=rngs)
            return [project(rngs=rngs), gate, out]

        router_dtype = jnp.promote_types(jnp.float32, param_dtype)  # near logits decide between experts
        router = {"use_bias": mixture.router_bias, "kernel_init": kernel_init, "dtype": router_dtype}
        self.router = linear(in_features, mixture.num_experts, **router, rngs=rngs)
        # Experts are stacked as scanned layers are: the axis goes before all axis names of a partitioned initializer.
        stacked = nnx.vmap(
            functools.partial(make_mlp, features), transform_metadata={nnx.PARTITION_NAME: mixture.expert_axis}
        )(rngs.split(mixture.num_experts))
        self.experts_in, self.experts_gate, self.experts_out = (nnx.data(x) for x in stacked)
        shared = [None] * 3 if mixture.shared_features is None else make_mlp(mixture.shared_features, rngs)
        self.shared_in, self.shared_gate, self.shared_out = (nnx.data(x) for x in shared)
        self.load_balancing_loss = LoadBalancingLoss(jnp.zeros((), jnp.float32))

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Applies the experts to x [..., F]; sets the loss unless ``deterministic``, or ``eval()`` if that is None."""
        projections: list[Any] = [self.experts_in, self.experts_gate, self.experts_out]
        kernels: list[Any] = [None if p is None else p.kernel[...] for p in projections]
        biases = [None if p is None or p.bias is None else p.bias[...] for p in projections]
        params = ExpertParams(*kernels, *biases)
        shared = self.shared_in, self.shared_gate, self.shared_out
        out, loss = apply_mixture(self.mixture, self.router, params, shared, x, self.dtype)
        if not (self.deterministic if deterministic is None else deterministic):
            self.load_balancing_loss[...] = loss
        return out
