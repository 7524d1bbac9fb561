"""What a program is made of, as JAX wrote it down, how XLA compiles it for users, and programs of several devices."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from typing import Any

import jax

# The settings of the environment by which tests/conftest.py has programs compiled quickly.
QUICK = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
# `make test` runs a share of the cases of some long tables, and `make test-all` all of them.
ALL_CASES = bool(os.environ.get("ALL_CASES"))
# For ``compile``: XLA's usual way of fusing, in tests of what it keeps and of how much memory it takes.
USUAL = {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in os.environ.get("XLA_FLAGS", "") else None


def sampled(cases: Collection[Any], share: float) -> list[Any]:
    """A share of the cases, or the names of a table's, evenly spread; all of them under ``ALL_CASES=1``.

    A share like 0.6 meets each backend where the cases of several take turns.
    """
    return [case for i, case in enumerate(cases) if ALL_CASES or int(share * (i + 1)) > int(share * i)]


def on_devices(number: int, *arguments: str) -> str:
    """What Python prints with these arguments, in a process of its own in which so many devices are CPUs."""
    root = pathlib.Path(__file__).parents[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={number}"
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


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
