"""`Decoder`: the interface of a model that `generate` decodes with, and how it is passed to compiled programs."""

import types
from collections.abc import Hashable, Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import linen, nnx

from ..arguments.foreign import one_line


@runtime_checkable
class Decoder(Protocol):
    """A model that `generate` can sample from: any object with these two methods, whose arguments are positional.

    The object is an NNX module, a Linen module bound to its variables (``module.bind(variables)``), a pytree (an
    Equinox module, a registered dataclass) or an instance of a plain class. `jax.jit` traces both methods. Arrays are
    arguments of the compiled program and may change from call to call. They are found in the model and its attributes,
    in pytrees (lists, tuples, dicts) and in instances of plain classes, those that define neither ``__new__`` nor a
    hash that succeeds. Everything else is static, whatever it contains: functions with their closures, partial
    functions, objects with a hash, sets, and instances of subclasses of list and dict. A static value is compared by
    value, or by identity if it has no hash. Do not change one, or arrays in it, between calls. Caches are any pytree.

    A model may also have ``seq_len``, the longest sequence in tokens, and ``unrolled()``, which returns a model with
    faster decoding steps. Its ``prefill`` may have the arguments ``chunk``, the number of tokens to read at a time, and
    ``order_ids``.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> class Successor:  # the likeliest token is always the next one
      ...     def prefill(self, tokens, lengths):
      ...         last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
      ...         return self.decode_step(last, (), lengths)
      ...     def decode_step(self, tokens, caches, position):
      ...         return jax.nn.one_hot(tokens + 1, 10), caches
      >>> isinstance(Successor(), sl.Decoder)
      True
      >>> sl.generate(Successor(), [[1, 2], [5]], 3).tolist()
      [[3, 4, 5], [6, 7, 8]]
    """

    def prefill(self, tokens: jax.Array, lengths: jax.Array, /) -> tuple[jax.Array, Any]:
        """Reads prompts.

        Args:
          tokens: int [B, P].
          lengths: int32 [B] in 1..P, tokens of each prompt, followed by padding.

        Returns:
          (logits [B, V] of the token after each prompt; the caches).
        """
        ...

    def decode_step(self, tokens: jax.Array, caches: Any, position: jax.Array, /) -> tuple[jax.Array, Any]:
        """Reads one more token of each sequence.

        Args:
          tokens: int32 [B].
          caches: the caches of `prefill` or of the previous step.
          position: int32 [B], the number of tokens before it.

        Returns:
          (logits [B, V] of the next token; caches of the same structure, shapes and dtypes).
        """
        ...


class _Static:
    """A static value of a program: equal by type and value, or by identity if it has no hash."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self.hash, self.by_value = hash((type(value), value)), True
        except TypeError:
            self.hash, self.by_value = id(value), False

    def __hash__(self):
        return self.hash

    def __eq__(self, other):
        if not isinstance(other, _Static) or self.hash != other.hash:
            return False
        if self.value is other.value:
            return True
        return self.by_value and type(self.value) is type(other.value) and bool(self.value == other.value)


def split(model: Any) -> tuple[Hashable, list[Any]]:
    """Splits a model into (its static part, hashable; its arrays), as ``nnx.split`` does for modules.

    Raises:
      ValueError: a module of Linen that is not bound to variables.

    Example:
      >>> import types, jax.numpy as jnp
      >>> static, arrays = split(types.SimpleNamespace(kernels=[jnp.ones(3)], size=3))
      >>> merge(static, [2 * array for array in arrays])
      namespace(kernels=[Array([2., 2., 2.], dtype=float32)], size=3)
    """
    arrays: list[Any] = []

    def tree(value: Any, ancestors: frozenset[int]) -> tuple[Hashable, ...]:
        leaves, structure = jax.tree.flatten(value)
        return structure, *(leaf(x, ancestors) for x in leaves)

    def leaf(x: Any, ancestors: frozenset[int]) -> Hashable:
        if isinstance(x, jax.Array | np.ndarray):
            arrays.append(x)
            return None
        if id(x) not in ancestors and _is_plain(x):
            return type(x), *tree(vars(x), ancestors | {id(x)})
        return _Static(x)

    graph = None
    if isinstance(model, nnx.Module):
        graph, model = nnx.split(model)
    elif isinstance(model, linen.Module):
        if model.scope is None:
            raise ValueError(f"model: a module of Linen must be bound, model.bind(variables), got {one_line(model)}")
        module, model = model.unbind()
        graph = _Static(module)
    return (graph, *tree(model, frozenset())), arrays


def merge(static: Any, arrays: Iterable[Any]) -> Any:
    """Returns the model with these arrays; undoes `split`."""
    arrays = iter(arrays)

    def tree(structure: Any, *leaves: Any) -> Any:
        return jax.tree.unflatten(structure, [leaf(x) for x in leaves])

    def leaf(x: Any) -> Any:
        if x is None:
            return next(arrays)
        if isinstance(x, _Static):
            return x.value
        cls, *attributes = x
        instance = cls.__new__(cls)
        vars(instance).update(tree(*attributes))
        return instance

    graph, *model = static
    if isinstance(graph, _Static):
        return graph.value.bind(tree(*model))
    return tree(*model) if graph is None else nnx.merge(graph, tree(*model))


def _is_plain(x: Any) -> bool:
    """True if an object consists of its attributes: an instance of a plain class without a hash of its own."""
    if type(x).__new__ not in (object.__new__, types.SimpleNamespace.__new__) or not hasattr(x, "__dict__"):
        return False
    return type(x).__hash__ in (None, object.__hash__) or not _Static(x).by_value
