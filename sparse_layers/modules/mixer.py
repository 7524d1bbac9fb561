"""`Mixer`: a layer of the user's own in the place of attention, for hybrids with linear attention for example."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..arguments.checks import strict_kwargs
from ..arguments.foreign import one_line


@strict_kwargs
@dataclasses.dataclass(frozen=True)
class Mixer:
    """A pattern that stands for a layer of your own in the place of attention, in a block or in a layer of a model.

    The block keeps its norms, MLP and dropout. Options of attention, such as ``rope`` and ``num_kv_heads``, have no
    effect on this layer. A model is causal only if the layer is.

    The layer maps [..., T, F] to an array of the same shape. For `generate`, it also has these methods:

    * ``prefill(x, lengths)`` of x [B, T, F] and int32 lengths [B] returns (out [B, T, F], cache). The cache is any
      pytree. Tokens from ``lengths`` on are padding, which the cache must not contain. A layer that reads prompts in
      chunks has arguments ``cache``, that of the chunk before, and ``start``, the number of tokens before the chunk.
    * ``decode_step(x, cache, position)`` of x [B, F] and position [B] returns (out [B, F], cache).

    A call passes ``segment_ids``, ``order_ids``, ``selection``, ``positions`` and, of a block, ``bias`` on if the
    caller gives them. A model's ``relative_bias`` does not reach the layer, nor does one that layers share.

    Args:
      make: a function that makes the layer from rngs, ``lambda rngs: MyLayer(64, rngs=rngs)``.

    Raises:
      TypeError: a make that is not callable, or makes something that is not; at a call, an argument or a method that
        the layer lacks.
      ValueError: at a call, an output of another shape than the input.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> class MeanSoFar(nnx.Module):  # the mean of all tokens so far, with their sum as the cache
      ...     def __call__(self, x):
      ...         return jnp.cumsum(x, axis=-2) / jnp.arange(1, x.shape[-2] + 1)[:, None]
      ...     def prefill(self, x, lengths):
      ...         is_token = jnp.arange(x.shape[1])[:, None] < lengths[:, None, None]
      ...         return self(x), jnp.where(is_token, x, 0).sum(axis=1)
      ...     def decode_step(self, x, cache, position):
      ...         return (cache + x) / (position + 1)[:, None], cache + x
      >>> sizes = {"vocab_size": 50, "num_heads": 2, "features": 8, "num_layers": 4, "seq_len": 32}
      >>> patterns = (sl.Mixer(lambda rngs: MeanSoFar()), "causal")  # layers take them in turn
      >>> model = sl.SparseTransformer(**sizes, patterns=patterns, rngs=nnx.Rngs(0))
      >>> sl.generate(model, [[1, 2, 3], [4]], 5).shape
      (2, 5)
    """

    make: Callable[[nnx.Rngs], Callable[..., Any]]

    def __post_init__(self):
        if not callable(self.make):
            raise TypeError(
                f"Mixer: make must be a function that makes a layer, lambda rngs: MyLayer(rngs=rngs), got "
                f"{one_line(self.make)}"
            )


class MixerLayer(nnx.Module):
    """The layer of a `Mixer`, with the calls of `SparseSelfAttention`.

    Attributes:
      module: the user's layer.
    """

    def __init__(self, mixer: Mixer, rngs: nnx.Rngs):
        module = mixer.make(rngs)
        if not callable(module):
            raise TypeError(
                f"Mixer: make must make a layer that maps [..., T, F] to the same, got {one_line(module)} of it"
            )
        self.module = nnx.data(module) if isinstance(module, nnx.Module) else module

    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        """Applies the layer to x [..., T, F]."""
        return _same_shape(x, _call(self.module, "__call__", x, **options))

    def prefill(
        self,
        x: jax.Array,
        lengths: jax.Array | None = None,
        *,
        max_step: int = 1,
        cache: Any = None,
        start: int = 0,
        total: int | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        """Applies the layer to prompts [B, T, F], or to a chunk of them; returns (out, cache)."""
        del total  # only scorers read it
        lengths = jnp.full(len(x), start + x.shape[1], jnp.int32) if lengths is None else lengths
        options |= {"cache": cache, "start": start} if start or cache is not None else {}
        options |= {} if max_step == 1 else {"max_step": max_step}
        out, cache = _call(self.module, "prefill", x, lengths, **options)
        return _same_shape(x, out), cache

    def decode_step(self, x: jax.Array, cache: Any, position: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
        """Applies the layer to new tokens [B, F]; returns (out, cache)."""
        out, cache = _call(self.module, "decode_step", x, cache, position, **options)
        return _same_shape(x, out), cache


def _call(module: Any, method: str, *args: Any, **options: Any) -> Any:
    """Calls a method of a user's layer with the options that are not None, which it must have."""
    options = {name: value for name, value in options.items() if value is not None}
    name, function = type(module).__name__, module if method == "__call__" else getattr(module, method, None)
    if function is None:
        raise TypeError(f"Mixer: {name} has no method {method}, which decoding calls; sl.Mixer documents it")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        missing = sorted(options.keys() - {parameter.name for parameter in parameters})
        if missing:
            raise TypeError(
                f"Mixer: {name}.{method} has no argument {missing[0]}, which this call passes on; leave {missing[0]} "
                "out of the call, or add it to the layer"
            )
    return function(*args, **options)


def _same_shape(x: jax.Array, out: Any) -> jax.Array:
    shape = getattr(out, "shape", None)
    if shape != x.shape:
        raise ValueError(f"Mixer: the layer must return an array of its input's shape, {x.shape}, got {one_line(out)}")
    return out
