"""JAX's transformations of a backend: `jax.vmap` adds batch entries to a kernel, a second derivative is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .operands import OPERANDS, differentiated


def vmap_as_batch(function: Callable[..., Any], max_batch: float, *args: Any) -> Any:
    """Computes function(*args), under `jax.vmap` with the mapped axis as part of the batch: kernels have no batch rule.

    ``args`` are an `Operands` and arrays by query; the function takes up to ``max_batch`` batch entries of them.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def rule(size, is_mapped, operands, *by_query):
        args, flags = (operands, *by_query), (is_mapped[0], *is_mapped[1:])
        batch = operands.query.shape[1 if flags[0].query else 0]
        unbatched = [name for name in operands._fields if not OPERANDS[name].batched]
        backward = differentiated(operands) if by_query else ()
        if size * batch > max_batch or any(getattr(flags[0], name) or name in backward for name in unbatched):
            # Arrays without a batch axis, and their gradients, cannot join the mapped one. A grid has a largest size.
            def entry(i):
                one = jax.tree.map(lambda x, is_mapped: x[i] if is_mapped else x, args, flags)
                return vmap_as_batch(function, max_batch, *one)

            results = jax.lax.map(entry, jnp.arange(size))
        else:
            absent, shared = dict.fromkeys(unbatched), {name: getattr(operands, name) for name in unbatched}
            batched, batched_flags = ((x._replace(**absent), *rest) for x, *rest in (args, flags))

            def join(x, is_mapped):
                x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(size * x.shape[1], *x.shape[2:])

            first, *rest = jax.tree.map(join, batched, batched_flags)
            results = vmap_as_batch(function, max_batch, first._replace(**shared), *rest)
            results = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped(*args)


def differentiable_once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for the forward and the backward of implementation ``name``: a derivative of them is refused.

    Both take a call first. Together they are the first derivative of the op, so theirs would be its second.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        once = jax.custom_jvp(function, nondiff_argnums=(0,))

        @once.defjvp
        def refuse(call, primals, tangents):
            raise NotImplementedError(
                f'{name} has first derivatives only; for second ones name implementation="xla" or "reference", '
                "which have them"
            )

        return once

    return decorate
