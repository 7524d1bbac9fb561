"""Measurement of kernel parameters: results are checked against those of the default parameters, then times taken."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.attention import block_sparse_attention
from ..ops.planning.params import BwdParams, FwdParams
from .oracle import largest_by_rows, neighbour
from .tuned import Measured

Params = tuple[FwdParams, BwdParams]

# A candidate has to save more than this share of the time: less is within what two measurements of one program differ.
GAIN = 0.02


@dataclasses.dataclass(frozen=True)
class TunedCall:
    """The call of the op that is tuned, without its parameters."""

    options: dict[str, Any]  # arguments that are no arrays
    arrays: dict[str, Any]  # arguments without gradients: segment ids and a run-time mask
    shapes: dict[str, jax.ShapeDtypeStruct]  # of the arguments with gradients: query, key, value and perhaps sinks
    gradients: bool  # True if the backward is tuned, too

    def compiled(self, fwd_params: FwdParams, bwd_params: BwdParams, **options: Any) -> tuple[Callable, Callable]:
        """Returns the functions for out and for the gradients, which compile at their first call."""
        options = {**self.options, "fwd_params": fwd_params, "bwd_params": bwd_params, **options}

        def forward(inputs, arrays):
            return block_sparse_attention(**inputs, **arrays, **options)

        def forward_backward(inputs, arrays, dout):
            return jax.vjp(lambda x: forward(x, arrays), inputs)[1](dout)[0]

        return jax.jit(forward), jax.jit(forward_backward)


def measure(
    call: TunedCall, candidates: Sequence[FwdParams | BwdParams], repeats: int
) -> tuple[list[Measured], Params]:
    """Checks and measures candidates, those for the forward first: returns the table, and the best parameters in it."""
    bench, best, table = _Bench(call), (FwdParams(), BwdParams()), []
    for kind in (FwdParams, BwdParams):
        mine = [candidate for candidate in candidates if isinstance(candidate, kind)]
        pairs = [(x, BwdParams()) if isinstance(x, FwdParams) else (best[0], x) for x in mine]
        pairs = list(dict.fromkeys((best, *pairs)))
        if kind is FwdParams or len(pairs) > 1:
            rows = bench.rows(pairs, repeats)
            row = rows[_fastest([row.both_ms if call.gradients else row.forward_ms for row in rows])]
            best = row.fwd_params, row.bwd_params
            table += rows
    return table, best


def _random_inputs(shapes: dict[str, jax.ShapeDtypeStruct]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns arrays of these shapes and a gradient of out: standard normal, and the same at every call."""
    *keys, last = jax.random.split(jax.random.key(0), len(shapes) + 1)
    pairs = zip(keys, shapes.items(), strict=True)
    inputs = {name: jax.random.normal(key, like.shape, like.dtype) for key, (name, like) in pairs}
    dout_shape = *shapes["query"].shape[:3], shapes["value"].shape[3]
    return inputs, jax.random.normal(last, dout_shape, shapes["query"].dtype)


class _Bench:
    """A call with random inputs, the results of its default parameters, and the error budgets of other parameters."""

    def __init__(self, call: TunedCall):
        self.call, self.compiled = call, functools.cache(call.compiled)
        self.inputs, self.dout = _random_inputs(call.shapes)
        default = FwdParams(), BwdParams()
        self.right = self.results(default, self.inputs, self.dout)
        *keys, last = jax.random.split(jax.random.key(1), len(self.inputs) + 1)
        moved = {name: neighbour(key, x) for key, (name, x) in zip(keys, self.inputs.items(), strict=True)}
        results = self.results(default, moved, neighbour(last, self.dout))
        self.budgets = {name: self._budget(name, results[name]) for name in self.right}

    def results(self, params: Params, inputs: dict[str, jax.Array], dout: jax.Array) -> dict[str, jax.Array]:
        """Returns out, and the gradients if they are tuned, by name."""
        forward, forward_backward = self.compiled(*params)
        results = {"out": forward(inputs, self.call.arrays)}
        if self.call.gradients:
            gradients = forward_backward(inputs, self.call.arrays, dout)
            results |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        return results

    def rows(self, pairs: Sequence[Params], repeats: int) -> list[Measured]:
        """Returns a row for each pair of parameters, the first of which is known to work."""
        reasons, functions = [None, *map(self._failure, pairs[1:])], []
        for params in (params for params, reason in zip(pairs, reasons, strict=True) if reason is None):
            forward, forward_backward = self.compiled(*params)
            functions.append(functools.partial(forward, self.inputs, self.call.arrays))
            if self.call.gradients:
                functions.append(functools.partial(forward_backward, self.inputs, self.call.arrays, self.dout))
        times, rows = iter(_milliseconds(functions, repeats)), []
        for params, reason in zip(pairs, reasons, strict=True):
            forward_ms = None if reason else next(times)
            both_ms = None if reason or not self.call.gradients else next(times)
            rows.append(Measured(*params, forward_ms, both_ms, reason))
        return rows

    def _failure(self, params: Params) -> str | None:
        """Returns the error that the parameters raise, or says which result is wrong; None if all is right."""
        try:
            # The one place where anything may go wrong that is the candidate's fault; the table shows what it was.
            results = jax.block_until_ready(self.results(params, self.inputs, self.dout))
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        for name, right in self.right.items():
            errors, budgets = np.asarray(largest_by_rows(results[name], right)), self.budgets[name]
            wrong = ~(errors <= budgets)  # also where an error is NaN
            if wrong.any():
                worst = np.unravel_index(np.argmax(np.where(wrong, errors, -1)), errors.shape)
                error, budget = errors[worst], budgets[worst]
                return f"wrong result: {name} is {error:.2g} off the default's where {budget:.2g} is allowed"
        return None

    def _budget(self, name: str, moved: jax.Array) -> np.ndarray:
        """Returns the largest rounding error of each group of rows by ``moved``, the result of neighbouring inputs."""
        right = self.right[name]
        size = np.asarray(largest_by_rows(right, jnp.zeros_like(right)))
        if not np.isfinite(size).all():
            raise ArithmeticError(f"{name} of the default parameters is not finite")
        budget = np.asarray(largest_by_rows(moved, right)) + float(jnp.finfo(right.dtype).eps) * size
        if name in ("gradient of query", "gradient of key"):
            # Differences of dot products of dout and v: what should cancel leaves the rounding of these.
            acc_dtype = jnp.promote_types(right.dtype, jnp.float32)
            budget = budget + float(jnp.finfo(acc_dtype).eps) * self.dout.shape[-1] ** 0.5
        return 4 * budget


def _fastest(times: Sequence[float | None]) -> int:
    """Returns the index of the least time, or 0 unless that saves more than `GAIN`; None is no time."""
    default = times[0]
    assert default is not None
    least, index = min((ms, i) for i, ms in enumerate(times) if ms is not None)
    return index if least < (1 - GAIN) * default else 0


def _milliseconds(
    functions: Sequence[Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Returns the median time of one call of each function, over groups of calls; the functions take turns."""

    def seconds_of(function, calls):
        start = clock()
        # Calls follow each other without waiting: what counts is the device's time, not that of reaching it.
        jax.block_until_ready([function() for _ in range(calls)][-1])
        return (clock() - start) / calls

    calls = []
    for function in functions:
        jax.block_until_ready(function())
        calls.append(max(1, min(10, int(0.5 / max(seconds_of(function, 1), 1e-9)))))
    groups = [[1e3 * seconds_of(*pair) for pair in zip(functions, calls, strict=True)] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*groups, strict=True)]
