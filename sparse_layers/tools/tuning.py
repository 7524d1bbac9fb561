"""Tuning: measures settings of the kernels for one call's shapes on this machine, when asked to, and only then."""

import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Positive, checked, strict_kwargs
from ..masks.adapters import MaskLike, as_masks
from ..ops.attention import block_sparse_attention
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.planner import make_plan
from ..ops.planning.platforms import check_implementation, implementation_order, platform
from .files import check_writable, checked_path
from .oracle import largest_by_rows, neighbour
from .tuned import SIZES, Measured, Tuned, save_tuned

Params = tuple[FwdParams, BwdParams]

# A candidate has to save more than this share of the time: less is within what two measurements of one program differ.
GAIN = 0.02
_PACKAGES = ("sparse-layers", "jax", "jaxlib", "triton", "libtpu")
# Candidates for queries and keys in a block of the plan, forward and backward.
_BLOCKS = {
    "xla": [(64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (256, 256), (512, 512)],
    "pallas_tpu": [(256, 256), (256, 512), (512, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024)],
}
# Candidates for Triton: (q_blocksize, kv_blocksize, blocksize_m, blocksize_n), each with (num_warps, num_stages).
# Where there are no block sizes, the planner may choose others for each pass.
_TRITON_FORWARD = {
    (None, None, None, None): [(8, None), (None, 3)],
    (64, 64, 64, 64): [(4, 2), (4, 3)],
    (64, 64, 64, 32): [(4, 2), (4, 3)],
    (128, 64, 128, 64): [(4, 2), (8, 2), (8, 3)],
    (128, 64, 128, 32): [(8, 3)],
    (128, 128, 128, 64): [(8, 3)],
    (128, 128, 128, 128): [(8, 2)],
}
_TRITON_BACKWARD = {
    (None, None, 64, 32): [(4, 2), (4, 3)],
    (None, None, 64, 64): [(4, 1), (4, 2), (4, 3), (8, 2)],
    (None, None, 128, 32): [(8, 2)],
    (None, None, 128, 64): [(8, 1), (8, 2)],
    (64, 64, 64, 64): [(4, 2)],
    (64, 128, 64, 64): [(4, 2)],
    (128, 128, 64, 64): [(4, 2)],
}


@strict_kwargs
def tune(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int,
    kv_heads: int | None = None,
    head_size: int,
    value_size: int | None = None,
    dtype: Any = jnp.bfloat16,
    segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: bool = False,
    gradients: bool = True,
    implementation: str | None = None,
    candidates: Sequence[FwdParams | BwdParams] | None = None,
    repeats: int = 5,
    path: str | os.PathLike[str] | None = None,
) -> Tuned:
    """Measures settings of the kernels for one call of `block_sparse_attention` on this machine, and returns the best.

    Nothing else changes: no later call looks at the result, pass its parameters on yourself. Forward candidates are
    tried with the backward's default, then backward candidates with the best forward. The time that counts is that of
    forward and backward together (of the forward alone for ``gradients=False``). The default is always among the
    candidates, and stays unless another saves more than 2 % of its time.

    A candidate that cannot be compiled or run is listed with the reason, and so is one with a wrong result: its out and
    gradients are compared with the default's on the same random inputs. In every 32 rows of a head they may differ by
    four times (the change that moving every input to a neighbouring number of its dtype causes, plus the dtype's
    epsilon times the largest value there): rounding of that size is in the inputs already. What should cancel
    in gradients of query and key may leave the rounding of the accumulator.

    Times are medians over groups of up to 10 calls, after two warm-up calls; the candidates take turns, group by group.
    Twenty candidates mean forty compilations: expect minutes, and use a machine that does nothing else.

    Args:
      mask: any mask that `block_sparse_attention` takes, but no `Plan`.
      q_len: number of queries T.
      kv_len: number of keys S; defaults to q_len.
      batch: batch size B.
      heads: number of query heads N.
      kv_heads: number of key heads K, which divides N; defaults to heads.
      head_size: size H of queries and keys.
      value_size: size Hv of values; defaults to head_size.
      dtype: dtype of query, key and value.
      segment_ids: as in the call.
      logits_soft_cap: as in the call.
      sinks: True if the call has sinks.
      gradients: True to run the backward, too, as in training.
      implementation: one of `implementations()`; None leaves each candidate to the one that the call would take, which
        may differ: on GPUs, cuDNN serves some calls as long as they have no settings.
      candidates: `FwdParams` and `BwdParams` to try beside the defaults; None takes a list made for the implementation.
      repeats: number of groups of calls, >= 1.
      path: where to write the result as JSON, for `load_tuned`; None writes nothing. The file must not exist. It
        appears when all is measured.

    Returns:
      `Tuned`, with ``fwd_params``, ``bwd_params`` and the ``table`` of what was measured.

    Raises:
      ValueError: an argument is out of its range, or the call would be wrong; says which and why.
      TypeError: ``mask`` describes no mask, or another argument is of a wrong type.
      NotImplementedError: the named implementation cannot serve the call.
      OSError: the file cannot be written; FileExistsError: it is there already.
      ArithmeticError: the default's own result is not finite.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> small = sl.FwdParams(q_blocksize=32, kv_blocksize=32)
      >>> result = sl.tune(sl.Causal(), 64, heads=2, head_size=8, dtype=jnp.float32, implementation="xla",
      ...                  candidates=[small], repeats=1)
      >>> [row.reason for row in result.table]
      [None, None]
      >>> q = jnp.ones((1, 64, 2, 8))
      >>> params = {"fwd_params": result.fwd_params, "bwd_params": result.bwd_params}
      >>> sl.block_sparse_attention(q, q, q, sl.Causal(), **params).shape
      (1, 64, 2, 8)
    """
    kv_len = q_len if kv_len is None else kv_len
    numbers = batch, q_len, kv_len, heads, heads if kv_heads is None else kv_heads
    numbers += head_size, head_size if value_size is None else value_size
    sizes = {name: checked(name, number, Positive) for name, number in zip(SIZES, numbers, strict=True)}
    repeats = checked("repeats", repeats, Positive)
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
    dtype = _checked_dtype(dtype)
    check_implementation(implementation)
    for name, flag in (("sinks", sinks), ("gradients", gradients)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
    if candidates is not None:
        candidates = _checked_candidates(candidates, gradients)
    if isinstance(mask, Plan):
        raise TypeError("mask must be a mask, got the Plan of one: tuning makes plans of its own")
    file = None if path is None else _new_file(path)

    arrays: dict[str, Any] = {"segment_ids": None if segment_ids is None else _checked_segment_ids(segment_ids)}
    options: dict[str, Any] = {"logits_soft_cap": logits_soft_cap, "implementation": implementation}
    if isinstance(mask, jax.Array):
        arrays["plan_or_mask"], text = mask, "a run-time mask"
    else:
        make_plan(mask, sizes["q_len"], sizes["kv_len"])
        options["plan_or_mask"], text = mask, ", ".join(" ".join(repr(entry).split()) for entry in as_masks(mask))
    call = _Call(options, arrays, _shapes(sizes, dtype, sinks), gradients)
    tunable = _tunable(call)
    if candidates is None:
        candidates = _default_candidates(tunable, sizes["q_len"], sizes["kv_len"])
    about = {"mask": text, **sizes, "dtype": dtype.name, "segment_ids": segment_ids is not None}
    about["logits_soft_cap"] = None if logits_soft_cap is None else float(logits_soft_cap)
    about |= {"sinks": sinks, "gradients": gradients, "repeats": repeats}
    device = next(iter(jnp.zeros(()).devices())).device_kind
    about |= {"implementation": implementation, "tunable": tunable, "device": device, "versions": _versions()}

    table, (fwd_params, bwd_params) = _measure(call, candidates, repeats)
    result = Tuned(fwd_params, bwd_params, about, tuple(table))
    if file is not None:
        save_tuned(result, file)
    return result


# --- the call --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """The call of the op that is tuned, without its parameters.

    Attributes:
      options: arguments that are no arrays.
      arrays: arguments without gradients: segment ids and a run-time mask.
      shapes: of the arguments with gradients: query, key, value and perhaps sinks.
      gradients: True if the backward is tuned, too.
    """

    options: dict[str, Any]
    arrays: dict[str, Any]
    shapes: dict[str, jax.ShapeDtypeStruct]
    gradients: bool

    def compiled(self, fwd_params: FwdParams, bwd_params: BwdParams, **options: Any) -> tuple[Callable, Callable]:
        """Returns the functions for out and for the gradients, which compile at their first call."""
        options = {**self.options, "fwd_params": fwd_params, "bwd_params": bwd_params, **options}

        def forward(inputs, arrays):
            return block_sparse_attention(**inputs, **arrays, **options)

        def forward_backward(inputs, arrays, dout):
            return jax.vjp(lambda x: forward(x, arrays), inputs)[1](dout)[0]

        return jax.jit(forward), jax.jit(forward_backward)


def _checked_dtype(dtype: Any) -> np.dtype:
    try:
        checked_dtype = jnp.dtype(dtype)
    except TypeError:
        checked_dtype = None
    names = ["float32", "bfloat16", "float16"] + ["float64"] * (jnp.result_type(float) == jnp.float64)
    if checked_dtype is None or checked_dtype.name not in names:
        raise ValueError(f"dtype must be one of {', '.join(names)}, got {dtype!r}")
    return checked_dtype


def _checked_candidates(candidates: Any, gradients: bool) -> list[FwdParams | BwdParams]:
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise TypeError(f"candidates must be a sequence of FwdParams and BwdParams, or None, got {candidates!r}")
    candidates, kinds = list(candidates), (FwdParams, BwdParams) if gradients else (FwdParams,)
    for candidate in candidates:
        if not isinstance(candidate, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"candidates must be {names} for gradients={gradients}, got {candidate!r}")
    return candidates


def _checked_segment_ids(segment_ids: Any) -> Any:
    """Returns segment ids, of both sides or of each, as integer arrays."""
    if isinstance(segment_ids, tuple):
        return tuple(_checked_segment_ids(ids) for ids in segment_ids)
    ids = np.asarray(segment_ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"segment_ids must be integers, got {ids.dtype} of shape {ids.shape}")
    return ids


def _new_file(path: Any) -> pathlib.Path:
    file = checked_path(path)
    if os.path.lexists(file):
        raise FileExistsError(f"path must be a new file, nothing is overwritten, got {str(file)!r}")
    check_writable(file)
    return file


def _shapes(sizes: dict[str, int], dtype: np.dtype, sinks: bool) -> dict[str, jax.ShapeDtypeStruct]:
    b, t, s, n, k, h, hv = (sizes[name] for name in SIZES)
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, hv)}
    structs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return structs | ({"sinks": jax.ShapeDtypeStruct((n,), jnp.float32)} if sinks else {})


def _random_inputs(shapes: dict[str, jax.ShapeDtypeStruct]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns arrays of these shapes and a gradient of out: standard normal, and the same at every call."""
    *keys, last = jax.random.split(jax.random.key(0), len(shapes) + 1)
    pairs = zip(keys, shapes.items(), strict=True)
    inputs = {name: jax.random.normal(key, like.shape, like.dtype) for key, (name, like) in pairs}
    dout_shape = *shapes["query"].shape[:3], shapes["value"].shape[3]
    return inputs, jax.random.normal(last, dout_shape, shapes["query"].dtype)


def _tunable(call: _Call) -> str | None:
    """Returns the implementation that serves the call with settings, if any; raises whatever is wrong with the call."""
    jax.eval_shape(call.compiled(FwdParams(), BwdParams())[0], call.shapes, call.arrays)
    name = call.options["implementation"]
    for implementation in implementation_order(platform()) if name is None else (name,):
        # Any setting but a block size: a plan of small blocks may not fit into memory.
        forward, _ = call.compiled(FwdParams(num_warps=4), BwdParams(), implementation=implementation)
        try:
            jax.eval_shape(forward, call.shapes, call.arrays)
        except NotImplementedError:
            continue
        return implementation
    return None


def _versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _default_candidates(implementation: str | None, q_len: int, kv_len: int) -> list[FwdParams | BwdParams]:
    """Returns the candidates of an implementation, without blocks that are larger than the sequence needs."""
    names = ("q_blocksize", "kv_blocksize", "blocksize_m", "blocksize_n", "num_warps", "num_stages")
    largest = [max(64, 1 << (length - 1).bit_length()) for length in (q_len, kv_len)]
    candidates = []
    for kind, blocks in ((FwdParams, _TRITON_FORWARD), (BwdParams, _TRITON_BACKWARD)):
        rows = _BLOCKS.get(implementation or "", [])
        if implementation == "triton":
            rows = [(*sizes, *launch) for sizes, launches in blocks.items() for launch in launches]
        for row in rows:
            if all((size or 0) <= most for size, most in zip(row[:2], largest, strict=True)):
                candidates.append(kind(**dict(zip(names, row, strict=False))))
    return candidates


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(call: _Call, candidates: Sequence[FwdParams | BwdParams], repeats: int) -> tuple[list[Measured], Params]:
    """Checks and measures the candidates, forward ones first, and returns the table and the best parameters."""
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


class _Bench:
    """A call with random inputs, the results of its default parameters, and the error budgets of other parameters."""

    def __init__(self, call: _Call):
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
        """Returns the largest difference from the default's result that is rounding, for each group of rows.

        Args:
          name: of the result.
          moved: the same result for neighbouring inputs.
        """
        right = self.right[name]
        size = np.asarray(largest_by_rows(right, jnp.zeros_like(right)))
        if not np.isfinite(size).all():
            raise ArithmeticError(f"{name} of the default parameters is not finite")
        budget = np.asarray(largest_by_rows(moved, right)) + float(jnp.finfo(right.dtype).eps) * size
        if name in ("gradient of query", "gradient of key"):
            # Differences of dot products of dout and v: what should cancel leaves the rounding of these.
            wide = jnp.promote_types(right.dtype, jnp.float32)
            budget = budget + float(jnp.finfo(wide).eps) * self.dout.shape[-1] ** 0.5
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
