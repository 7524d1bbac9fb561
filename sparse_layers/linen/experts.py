"""`Experts` for Linen: the MLPs of a `MixtureOfExperts` in a residual block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.typing import Dtype, Initializer

from ..modules.experts_core import ExpertParams, apply_mixture
from ..modules.mixture import MixtureOfExperts


class StackedLinear(nn.Module):
    """The parameters of all experts' projections: kernel [E, in, out] and, with use_bias, bias [E, out].

    Each expert draws its parameters by the initializers of one projection.
    """

    shape: tuple[int, int, int]
    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer
    param_dtype: Dtype
    axis_name: str | None

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns kernels and biases."""
        count, _, out_features = self.shape
        kernel = self.param("kernel", self._stacked(self.kernel_init), self.shape, self.param_dtype)
        bias_init = self._stacked(self.bias_init)
        bias = self.param("bias", bias_init, (count, out_features), self.param_dtype) if self.use_bias else None
        return kernel, bias

    def _stacked(self, init: Initializer) -> Initializer:
        def init_experts(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> Any:
            values = jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))
            return meta.add_axis(values, 0, {nn.PARTITION_NAME: self.axis_name})

        return init_experts


class Experts(nn.Module):
    """The MLPs of a `MixtureOfExperts`: maps [..., F] to [..., F], and sows ``load_balancing_loss`` in "losses".

    Attributes are the arguments of `sparse_layers.modules.experts.Experts`.
    """

    mixture: MixtureOfExperts
    in_features: int
    features: int
    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer
    out_kernel_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype

    def setup(self):
        mixture, sizes = self.mixture, (self.in_features, self.features)
        inits: dict[str, Any] = {"bias_init": self.bias_init, "param_dtype": self.param_dtype}
        stacked = functools.partial(StackedLinear, use_bias=self.use_bias, axis_name=mixture.expert_axis, **inits)
        dense: Any = functools.partial(nn.Dense, dtype=self.dtype, **inits)
        router_dtype = jnp.promote_types(jnp.float32, self.param_dtype)
        router = {"use_bias": mixture.router_bias, "kernel_init": self.kernel_init, "dtype": router_dtype}
        self.router = dense(mixture.num_experts, **router)
        self.experts_in = stacked((mixture.num_experts, *sizes), kernel_init=self.kernel_init)
        self.experts_gate = self.shared_in = self.shared_gate = self.shared_out = None
        if mixture.is_gated:
            self.experts_gate = stacked((mixture.num_experts, *sizes), kernel_init=self.kernel_init)
        self.experts_out = stacked((mixture.num_experts, *sizes[::-1]), kernel_init=self.out_kernel_init)
        if mixture.shared_features is not None:
            shared = functools.partial(dense, use_bias=self.use_bias)
            self.shared_in = shared(mixture.shared_features, kernel_init=self.kernel_init)
            if mixture.is_gated:
                self.shared_gate = shared(mixture.shared_features, kernel_init=self.kernel_init)
            self.shared_out = shared(self.in_features, kernel_init=self.out_kernel_init)

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Applies the experts to x [..., F]; sows the loss."""
        stacks: list[Any] = [self.experts_in, self.experts_gate, self.experts_out]
        kernels, biases = zip(*((None, None) if stack is None else stack() for stack in stacks), strict=True)
        params = ExpertParams(*kernels, *biases)
        shared = self.shared_in, self.shared_gate, self.shared_out
        out, loss = apply_mixture(self.mixture, self.router, params, shared, x, self.dtype)
        self.sow("losses", "load_balancing_loss", loss)
        return out
