"""Shared by benchmarks of a layer or a step of a model: checks against float64, milliseconds and memory.

A function that needs more memory than the device has gets words in place of numbers.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_layers.tools.oracle import DenseAttention, budgets, largest_error


class Measured(NamedTuple):
    """Milliseconds of a compiled function, and the GB that its program holds at once; None where it does not fit."""

    ms: float | None
    gb: float | None
    failed: str | None = None

    def cells(self) -> list[str]:
        """Returns the cells of a table."""
        return [self.failed or f"{self.ms:.4g}", "-" if self.gb is None else f"{self.gb:.2f}"]


def reserve_memory() -> None:
    """Lets JAX take nearly all memory of the GPU; to be called before the first use of a device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def measure(function: Callable[..., Any], *args: Any, seconds: float = 8.0) -> Measured:
    """Returns the median time of up to seven calls after the first, within about so many seconds.

    Raises:
      jax.errors.JaxRuntimeError: any failure but a lack of memory.
    """
    gb = None
    try:
        compiled = jax.jit(function).lower(*args).compile()
        plan: Any = compiled.memory_analysis()
        gb = (plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes) / 1e9
        jax.block_until_ready(compiled(*args))
        times = []
        while len(times) < 7 and (len(times) < 3 or sum(times) < seconds):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            times.append(time.perf_counter() - start)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Measured(None, gb, "out of memory")
    return Measured(1e3 * statistics.median(times), gb)


def forward_backward(forward: Callable[..., jax.Array], count: int) -> Callable[..., Any]:
    """Returns a function of ``count`` arguments and a gradient of the result: the result, and all their gradients."""

    def both(*args: Any) -> Any:
        out, pullback = jax.vjp(forward, *args[:count])
        return out, pullback(args[count])

    return both


def check_attention(attend: Callable[..., jax.Array], arrays: list[jax.Array], allowed: np.ndarray) -> float:
    """Returns the largest error of attention and its gradients, as a share of what rounding explains.

    Args:
      attend: takes q, k and v [B, T, N, H] and returns [B, T, N, H].
      arrays: q, k, v and a gradient of the result.
      allowed: bool, the pairs that may attend; broadcasts against [B, N, T, T].

    Raises:
      ArithmeticError: an error is larger.
    """
    out, gradients = jax.jit(forward_backward(attend, 3))(*arrays)
    q, k, v, dout = arrays
    exact, rough = (DenseAttention(q, k, v, allowed, dout, dtype=x) for x in (np.float64, q.dtype))
    limits = budgets(exact.answers, rough.answers, exact.root_sum_squares(), q.dtype)
    answers = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    shares = {name: largest_error(x, exact.answers[name]) / limits[name] for name, x in answers.items()}
    if not max(shares.values()) <= 1:
        raise ArithmeticError(f"errors exceed rounding, as shares of it: {shares}")
    return max(shares.values())
