"""The activations of the MLP of a residual block, by name."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

# The functions f of an MLP ``out(f(in(x)))``.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def _clamped_swiglu(gate: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns SwiGLU as in gpt-oss: both inputs are clamped to 7, and the linear one is counted from -1."""
    gate, hidden = jnp.minimum(gate, 7), jnp.clip(hidden, -7, 7)
    return gate * jax.nn.sigmoid(1.702 * gate) * (hidden + 1)


# The functions f of a gated MLP ``out(f(gate(x), in(x)))``.
GATED_ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "clamped_swiglu": _clamped_swiglu,
    "geglu": lambda gate, hidden: ACTIVATIONS["gelu_tanh"](gate) * hidden,
    "swiglu": lambda gate, hidden: jax.nn.silu(gate) * hidden,
}


def activate(
    mlp: str | Callable[[jax.Array], jax.Array], hidden: jax.Array, gate: jax.Array | None = None
) -> jax.Array:
    """Applies the activation of an MLP to its hidden layer.

    Args:
      mlp: a name of `ACTIVATIONS` or `GATED_ACTIVATIONS`, or a function.
      hidden: [..., hidden features].
      gate: an array like hidden, for a gated activation.

    Example:
      >>> import jax.numpy as jnp
      >>> activate("gelu", jnp.zeros(2)).tolist()
      [0.0, 0.0]
    """
    if isinstance(mlp, str):
        return ACTIVATIONS[mlp](hidden) if gate is None else GATED_ACTIVATIONS[mlp](gate, hidden)
    return mlp(hidden)
