"""What a program is made of, as JAX wrote it down, and how XLA compiles it for users."""

import os
from collections.abc import Iterator
from typing import Any

import jax

# The settings of the environment by which tests/conftest.py has programs compiled quickly.
QUICK = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
# For ``compile``: XLA's usual way of fusing, in tests of what it keeps and of how much memory it takes.
USUAL = {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in os.environ.get("XLA_FLAGS", "") else None


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


def largest(function: Any, *operands: Any) -> int:
    """Elements of the largest array that a function reads, makes or holds."""
    inner = list(jaxprs(jax.make_jaxpr(function)(*operands).jaxpr))
    variables = [x for j in inner for x in (*j.invars, *j.constvars, *(v for e in j.eqns for v in e.outvars))]
    assert len(inner) > 1
    return max(x.aval.size for x in variables if hasattr(x.aval, "size"))
