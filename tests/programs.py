"""What a program is made of, as JAX wrote it down."""

from collections.abc import Iterator
from typing import Any

import jax


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    """A jaxpr and all that its equations hold, each as often as it is run by one of them."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from jaxprs(inner)


def count(jaxpr: Any, primitive: str) -> int:
    """Equations of a primitive, those of inner programs included."""
    return sum(equation.primitive.name == primitive for inner in jaxprs(jaxpr) for equation in inner.eqns)
