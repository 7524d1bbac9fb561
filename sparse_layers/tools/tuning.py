"""Tuning: measures settings of the kernels for one call's shapes on this machine, when asked to, and only then."""

import dataclasses
import functools
import html
import importlib.metadata
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Positive, checked, strict_kwargs
from ..masks.adapters import MaskLike, as_masks
from ..masks.pictures import shortened
from ..ops.attention import block_sparse_attention
from ..ops.planning.params import BwdParams, FwdParams, KernelParams
from ..ops.planning.plan import Plan, make_plan
from ..ops.planning.platforms import candidates as in_order
from ..ops.planning.platforms import checked_implementation, platform

# A candidate has to save more than this share of the time: less is within what two measurements of one program differ.
GAIN = 0.02
# Rows judged together: enough for the largest error among them to be typical, few enough to be of similar size.
ROWS = 32
# Of a result in a notebook: most rows, and most characters of a line.
_SHOWN, _LINE = 40, 300
FORMAT = "sparse_layers.tuned 1"
_PACKAGES = ("sparse-layers", "jax", "jaxlib", "triton", "libtpu")
# Sizes of a call, and their letters.
_SIZES = {
    "batch": "B",
    "q_len": "T",
    "kv_len": "S",
    "heads": "N",
    "kv_heads": "K",
    "head_size": "H",
    "value_size": "Hv",
}
_FIELDS = tuple(field.name for field in dataclasses.fields(KernelParams))


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row of the table of `Tuned`: what was tried, and its times in milliseconds or the reason why it has none."""

    fwd_params: FwdParams
    bwd_params: BwdParams
    forward_ms: float | None = None
    both_ms: float | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`: parameters to pass on, and what they were chosen from. ``print`` shows the table.

    Attributes:
      fwd_params: the chosen parameters of the forward pass.
      bwd_params: those of the backward pass.
      about: what was tuned and where: the mask's text, lengths, sizes, dtype, implementation, device, package versions.
      table: one `Measured` for each candidate: fwd_params, bwd_params, forward_ms, both_ms (forward and backward, None
        for ``gradients=False``), and reason, None unless the candidate failed. Forward candidates come first, then
        those for the backward, either after the parameters that they had to beat.

    Example:
      >>> import sparse_layers as sl
      >>> result = sl.tune(sl.Causal(), 64, heads=1, head_size=8, implementation="xla", candidates=())
      >>> result.fwd_params == sl.FwdParams(), result.about["q_len"], len(result.table)
      (True, 64, 1)
    """

    fwd_params: FwdParams
    bwd_params: BwdParams
    about: dict[str, Any] = dataclasses.field(hash=False)
    table: tuple[Measured, ...]

    def __str__(self):
        rows = (f"{mark} {forward:>10}  {both:>10}  {what}" for mark, forward, both, what in self._rows())
        return "\n".join((*self._heading(), f"  {'forward':>10}  {'fwd + bwd':>10}", *rows))

    def _repr_html_(self) -> str:
        heading = "<br>".join(html.escape(shortened(line, _LINE)) for line in self._heading())
        rows = [("", "forward", "fwd + bwd", ""), *self._rows()]
        shown = (
            f"<tr>{''.join(f'<td>{html.escape(shortened(x, _LINE))}</td>' for x in row)}</tr>"
            for row in rows[: _SHOWN + 1]
        )
        more = f'<tr><td colspan="4">and {len(rows) - 1 - _SHOWN} rows more</td></tr>' * (len(rows) - 1 > _SHOWN)
        return f"<table><caption>{heading}</caption>{''.join(shown)}{more}</table>"

    def _heading(self) -> tuple[str, str]:
        about = self.about
        sizes = " ".join(f"{letter}={about[name]}" for name, letter in _SIZES.items())
        runs = about["implementation"] or f"the library's choice, with settings {about['tunable']},"
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        return f"{sizes} {about['dtype']}; {runs} on {about['device']}", f"{about['mask']}; {versions}"

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """The table in words: * for the chosen row, the times, the parameters and why they have none."""
        chosen = (self.fwd_params, self.bwd_params)
        last = max((i for i, row in enumerate(self.table) if (row.fwd_params, row.bwd_params) == chosen), default=None)
        for i, row in enumerate(self.table):
            forward, both = ("" if ms is None else f"{ms:.3f} ms" for ms in (row.forward_ms, row.both_ms))
            if row.reason is not None:
                forward, both = "left out", ""
            params = f"{_text(row.fwd_params)} {_text(row.bwd_params)}" + (f": {row.reason}" if row.reason else "")
            yield "*" if i == last else " ", forward, both, params


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
    tried with the backward's default, then backward candidates with the forward that was chosen. The time that counts
    is that of forward and backward together (of the forward alone for ``gradients=False``). The default is always
    among the candidates, and stays unless another saves more than 2 % of its time.

    A candidate that cannot be compiled or run is listed with the reason, and so is one with a wrong result: its out and
    gradients are compared with the default's on the same random inputs. In every 32 rows of a head they may differ by
    four times (the change that moving every input to a neighbouring number of its dtype causes, plus the dtype's
    epsilon times the largest value there): rounding of that size is in the inputs already. What should cancel
    in gradients of query and key may leave the rounding of the accumulator.

    Times are medians over groups of up to 10 calls, after two warm-up calls; the candidates take turns, group by group.
    Twenty candidates mean forty compilations: expect minutes, and use a machine that does nothing else.

    Args:
      mask: whatever `block_sparse_attention` takes in its place, except for a `Plan`.
      q_len: number of queries T.
      kv_len: number of keys S; defaults to q_len.
      batch: batch size B.
      heads: number of query heads N.
      kv_heads: number of key heads K, which divides N; defaults to heads.
      head_size: size H of queries and keys.
      value_size: size Hv of values; defaults to head_size.
      dtype: that of query, key and value.
      segment_ids: as in the call.
      logits_soft_cap: as in the call.
      sinks: whether the call has sinks.
      gradients: whether the backward is run, too, as in training.
      implementation: one of `implementations()`; None leaves each candidate to the one that the call would take, which
        may differ: on GPUs, cuDNN serves some calls as long as they have no settings.
      candidates: `FwdParams` and `BwdParams` to try beside the defaults; None takes a list made for the implementation.
      repeats: number of groups of calls, >= 1.
      path: where to write the result as JSON, for `load_tuned`; None writes nothing. The file must not exist: it is
        created at once, empty, filled when all is done, and removed again should that fail.

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
    kv_heads = heads if kv_heads is None else kv_heads
    value_size = head_size if value_size is None else value_size
    numbers = (batch, q_len, kv_len, heads, kv_heads, head_size, value_size)
    sizes = {name: checked(name, number, Positive) for name, number in zip(_SIZES, numbers, strict=True)}
    repeats = checked("repeats", repeats, Positive)
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
    dtype = _dtype(dtype)
    checked_implementation(implementation)
    for name, flag in (("sinks", sinks), ("gradients", gradients)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
    if candidates is not None:
        if isinstance(candidates, str) or not isinstance(candidates, Iterable):
            raise TypeError(f"candidates must be a sequence of FwdParams and BwdParams, or None, got {candidates!r}")
        candidates = list(candidates)
        kinds = (FwdParams, BwdParams) if gradients else (FwdParams,)
        for candidate in candidates:
            if not isinstance(candidate, kinds):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"candidates must be {names} for gradients={gradients}, got {candidate!r}")

    if isinstance(mask, Plan):
        raise TypeError("mask must be a mask, got the Plan of one: tuning makes plans of its own")
    constants: dict[str, Any] = {"logits_soft_cap": logits_soft_cap}
    if segment_ids is not None:
        segment_ids = tuple(map(np.asarray, segment_ids)) if isinstance(segment_ids, tuple) else np.asarray(segment_ids)
        for ids in segment_ids if isinstance(segment_ids, tuple) else (segment_ids,):
            if ids.dtype.kind not in "iu":
                raise ValueError(f"segment_ids must be integers, got {ids.dtype} of shape {ids.shape}")
    others: dict[str, Any] = {"segment_ids": segment_ids}
    if isinstance(mask, jax.Array):
        others["plan_or_mask"], text = mask, "a run-time mask"
    else:
        make_plan(mask, sizes["q_len"], sizes["kv_len"])
        masks = as_masks(mask)
        constants["plan_or_mask"], text = mask, ", ".join(" ".join(repr(entry).split()) for entry in masks)
    shapes = _shapes(sizes, dtype, sinks)
    constants["implementation"] = implementation
    tunable = _tunable(implementation, shapes, others, constants)
    if candidates is None:
        candidates = _default_candidates(tunable, sizes["q_len"], sizes["kv_len"])
    about = {"mask": text, **sizes, "dtype": dtype.name, "segment_ids": segment_ids is not None}
    about |= {
        "logits_soft_cap": None if logits_soft_cap is None else float(logits_soft_cap),
        "sinks": sinks,
        "gradients": gradients,
        "repeats": repeats,
    }
    device = next(iter(jnp.zeros(()).devices())).device_kind
    about |= {"implementation": implementation, "tunable": tunable, "device": device, "versions": _versions()}

    file = None if path is None else _path(path)
    if file is not None:
        _reserve(file)
    try:
        inputs = _Inputs(*_random(shapes, sizes, dtype), others)
        result = _tuned(inputs, constants, gradients, candidates, repeats, about)
        if file is not None:
            _write(result, file)
    except BaseException:
        if file is not None:
            file.unlink(missing_ok=True)
        raise
    return result


# --- the call that is tuned ------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    """What a call is run on: query, key, value and perhaps sinks; the gradient of out; arrays without gradients."""

    arrays: dict[str, jax.Array]
    dout: jax.Array
    others: dict[str, Any]


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    names = ["float32", "bfloat16", "float16"] + ["float64"] * (jnp.result_type(float) == jnp.float64)
    if found is None or found.name not in names:
        raise ValueError(f"dtype must be one of {', '.join(names)}, got {dtype!r}")
    return found


def _shapes(sizes: dict[str, int], dtype: np.dtype, sinks: bool) -> dict[str, jax.ShapeDtypeStruct]:
    b, t, s, n, k, h, hv = (sizes[name] for name in _SIZES)
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, hv)}
    structs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return structs | ({"sinks": jax.ShapeDtypeStruct((n,), jnp.float32)} if sinks else {})


def _random(shapes: dict[str, jax.ShapeDtypeStruct], sizes: dict[str, int], dtype: np.dtype):
    """Arrays of these shapes, and a gradient of out; standard normal, and the same at every call."""
    *keys, last = jax.random.split(jax.random.key(0), len(shapes) + 1)
    pairs = zip(keys, shapes.items(), strict=True)
    arrays = {name: jax.random.normal(key, like.shape, like.dtype) for key, (name, like) in pairs}
    shape = [sizes[name] for name in ("batch", "q_len", "heads", "value_size")]
    return arrays, jax.random.normal(last, shape, dtype)


def _tunable(name: str | None, shapes: dict, others: dict, constants: dict) -> str | None:
    """The implementation that serves the call with settings, if any; raises whatever is wrong with the call."""
    jax.eval_shape(_programs(constants, FwdParams(), BwdParams())[0], shapes, others)
    for one in in_order(platform()) if name is None else (name,):
        # Any setting but a block size: a plan of small blocks may not fit into memory.
        attend = _programs(constants | {"implementation": one}, FwdParams(num_warps=4), BwdParams())[0]
        try:
            jax.eval_shape(attend, shapes, others)
        except NotImplementedError:
            continue
        return one
    return None


def _versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _programs(constants: dict[str, Any], fwd_params: FwdParams, bwd_params: BwdParams) -> tuple[Callable, Callable]:
    """(out of arrays and others, gradients of the arrays), each compiled at its first call."""

    def attend(arrays, others):
        return block_sparse_attention(**arrays, **others, **constants, fwd_params=fwd_params, bwd_params=bwd_params)

    def gradients(arrays, others, dout):
        return jax.vjp(lambda x: attend(x, others), arrays)[1](dout)[0]

    return jax.jit(attend), jax.jit(gradients)


# --- candidates ------------------------------------------------------------------------------------------------------


def _default_candidates(implementation: str | None, q_len: int, kv_len: int) -> list[FwdParams | BwdParams]:
    """What is tried if the user names nothing, without blocks that are larger than the sequence needs."""
    shapes, forward, backward = [], [], []
    if implementation == "xla":
        shapes = [(64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (256, 256), (512, 512)]
    elif implementation == "pallas_tpu":
        shapes = [(256, 256), (256, 512), (512, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024)]
    elif implementation == "triton":
        # Rows without block sizes leave them to the planner, which may choose others for each pass.
        forward = [
            (None, None, None, None, 8, None),
            (None, None, None, None, None, 3),
            (64, 64, 64, 64, 4, 2),
            (64, 64, 64, 64, 4, 3),
            (64, 64, 64, 32, 4, 2),
            (64, 64, 64, 32, 4, 3),
            (128, 64, 128, 64, 4, 2),
            (128, 64, 128, 64, 8, 2),
            (128, 64, 128, 64, 8, 3),
            (128, 64, 128, 32, 8, 3),
            (128, 128, 128, 64, 8, 3),
            (128, 128, 128, 128, 8, 2),
        ]
        backward = [
            (None, None, 64, 32, 4, 2),
            (None, None, 64, 32, 4, 3),
            (None, None, 64, 64, 4, 1),
            (None, None, 64, 64, 4, 2),
            (None, None, 64, 64, 4, 3),
            (None, None, 64, 64, 8, 2),
            (None, None, 128, 32, 8, 2),
            (None, None, 128, 64, 8, 1),
            (None, None, 128, 64, 8, 2),
            (64, 64, 64, 64, 4, 2),
            (64, 128, 64, 64, 4, 2),
            (128, 128, 64, 64, 4, 2),
        ]
    names = ("q_blocksize", "kv_blocksize", "blocksize_m", "blocksize_n", "num_warps", "num_stages")
    enough = [max(64, 1 << (length - 1).bit_length()) for length in (q_len, kv_len)]
    listed = []
    for kind, rows in ((FwdParams, shapes + forward), (BwdParams, shapes + backward)):
        for row in rows:
            if all((block or 0) <= most for block, most in zip(row[:2], enough, strict=True)):
                listed.append(kind(**dict(zip(names, row, strict=False))))
    return listed


# --- measuring -------------------------------------------------------------------------------------------------------


def _tuned(inputs: _Inputs, constants: dict, gradients: bool, candidates: Sequence, repeats: int, about: dict) -> Tuned:
    """Checks and measures the candidates, forward ones first, and chooses."""
    best = FwdParams(), BwdParams()
    programs = functools.cache(functools.partial(_programs, constants))
    standard = _answers(programs(*best), inputs, gradients)
    budgets = _budgets(programs(*best), inputs, standard)
    table = []
    for kind in (FwdParams, BwdParams):
        mine = [candidate for candidate in candidates if isinstance(candidate, kind)]
        pairs = [(one, BwdParams()) if isinstance(one, FwdParams) else (best[0], one) for one in mine]
        pairs = list(dict.fromkeys((best, *pairs)))
        if kind is FwdParams or len(pairs) > 1:
            rows = _measured(pairs, programs, inputs, gradients, repeats, standard, budgets)
            chosen = rows[_choice([row.both_ms if gradients else row.forward_ms for row in rows])]
            best = chosen.fwd_params, chosen.bwd_params
            table += rows
    return Tuned(*best, about, tuple(table))


def _measured(pairs, programs, inputs: _Inputs, gradients, repeats, standard, budgets) -> list[Measured]:
    """A row for each pair of parameters, the first of which works."""
    reasons, calls = [], []
    for number, pair in enumerate(pairs):
        reason, answers = None, {}
        try:
            # The one place where anything may go wrong that is the candidate's fault; the table shows what it was.
            answers = jax.block_until_ready(_answers(programs(*pair), inputs, gradients))
        except Exception as error:
            if number == 0:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        reason = reason or _difference(answers, standard, budgets)
        reasons.append(reason)
        if reason is None:
            attend, both = programs(*pair)
            calls.append(functools.partial(attend, inputs.arrays, inputs.others))
            if gradients:
                calls.append(functools.partial(both, inputs.arrays, inputs.others, inputs.dout))
    times = iter(_milliseconds(calls, repeats))
    rows = []
    for (fwd_params, bwd_params), reason in zip(pairs, reasons, strict=True):
        forward_ms = None if reason else next(times)
        both_ms = None if reason or not gradients else next(times)
        rows.append(Measured(fwd_params, bwd_params, forward_ms, both_ms, reason))
    return rows


def _choice(times: Sequence[float | None]) -> int:
    """The index of the least time, or 0 unless that saves more than `GAIN`; None is no time."""
    first = times[0]
    assert first is not None
    least, index = min((ms, i) for i, ms in enumerate(times) if ms is not None)
    return index if least < (1 - GAIN) * first else 0


def _milliseconds(
    functions: Sequence[Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median over groups of calls of the time of one call of each function; the functions take turns."""

    def seconds_of(function, calls):
        start = clock()
        # Calls follow each other without waiting: what counts is the device's time, not that of reaching it.
        jax.block_until_ready([function() for _ in range(calls)][-1])
        return (clock() - start) / calls

    calls = []
    for function in functions:
        jax.block_until_ready(function())
        calls.append(max(1, min(10, int(0.5 / max(seconds_of(function, 1), 1e-9)))))
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, number, mine in zip(functions, calls, times, strict=True):
            mine.append(1e3 * seconds_of(function, number))
    return [statistics.median(mine) for mine in times]


# --- what is right ---------------------------------------------------------------------------------------------------


def _answers(programs: tuple[Callable, Callable], inputs: _Inputs, gradients: bool) -> dict[str, jax.Array]:
    answers = {"out": programs[0](inputs.arrays, inputs.others)}
    if gradients:
        grads = programs[1](inputs.arrays, inputs.others, inputs.dout)
        answers |= {f"gradient of {name}": grad for name, grad in grads.items()}
    return answers


def _budgets(programs: tuple[Callable, Callable], inputs: _Inputs, standard: dict[str, jax.Array]) -> dict:
    """How far answers may be from the standard ones, for every `ROWS` rows of a head."""
    *keys, last = jax.random.split(jax.random.key(1), len(inputs.arrays) + 1)
    pairs = zip(keys, inputs.arrays.items(), strict=True)
    moved = {name: _neighbours(key, x) for key, (name, x) in pairs}
    answers = _answers(programs, _Inputs(moved, _neighbours(last, inputs.dout), inputs.others), len(standard) > 1)
    budgets = {}
    for name, right in standard.items():
        size = np.asarray(_largest(right, jnp.zeros_like(right)))
        if not np.isfinite(size).all():
            raise ArithmeticError(f"{name} of the default parameters is not finite")
        budget = np.asarray(_largest(answers[name], right)) + float(jnp.finfo(right.dtype).eps) * size
        if name in ("gradient of query", "gradient of key"):
            # Differences of dot products of dout and v: what should cancel leaves the rounding of these.
            wide = jnp.promote_types(right.dtype, jnp.float32)
            budget = budget + float(jnp.finfo(wide).eps) * inputs.dout.shape[-1] ** 0.5
        budgets[name] = 4 * budget
    return budgets


def _difference(answers: dict[str, jax.Array], standard: dict[str, jax.Array], budgets: dict) -> str | None:
    """What is wrong with the answers, or None."""
    for name, right in standard.items():
        errors = np.asarray(_largest(answers[name], right))
        wrong = ~(errors <= budgets[name])  # also where an error is NaN
        if wrong.any():
            worst = np.unravel_index(np.argmax(np.where(wrong, errors, -1)), errors.shape)
            error, budget = errors[worst], budgets[name][worst]
            return f"wrong result: {name} is {error:.2g} off the default's where {budget:.2g} is allowed"
    return None


@jax.jit
def _neighbours(key: jax.Array, x: jax.Array) -> jax.Array:
    """Each number changed by the dtype's epsilon, up or down: by one or two of its last places."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * (1 + float(jnp.finfo(x.dtype).eps) * jax.random.rademacher(key, x.shape, wide))).astype(
        x.dtype
    )


@jax.jit
def _largest(a: jax.Array, b: jax.Array) -> jax.Array:
    """The largest difference in every `ROWS` rows of [B, rows, heads, size]: [B, groups, heads]; or of a vector: []."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    difference = jnp.abs(a.astype(wide) - b.astype(wide))
    if difference.ndim == 1:
        return difference.max()
    rows = difference.max(-1)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % ROWS), (0, 0)))
    return rows.reshape(rows.shape[0], -1, ROWS, rows.shape[2]).max(2)


# --- files -----------------------------------------------------------------------------------------------------------


def _path(path: Any) -> pathlib.Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or PathLike, got {path!r}")
    return pathlib.Path(path)


def _reserve(file: pathlib.Path) -> None:
    """Makes an empty file of a name that is free."""
    try:
        file.open("x").close()
    except FileExistsError:
        raise FileExistsError(f"path must be a new file, nothing is overwritten, got {str(file)!r}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"path must lie in a folder that is there, got {str(file)!r}") from None


def load_tuned(path: str | os.PathLike[str]) -> Tuned:
    """Reads the file that `tune` wrote. Whether it fits the machine at hand is for you to judge: see ``about``.

    Args:
      path: the file.

    Returns:
      The `Tuned` that `tune` returned.

    Raises:
      OSError: the file cannot be read.
      TypeError: path is no str or PathLike.
      ValueError: it is no such file, or a value in it breaks a rule; says which.

    Example:
      >>> import pathlib, tempfile, sparse_layers as sl
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "tuned.json")
      ...     result = sl.tune(sl.Causal(), 64, heads=1, head_size=8, implementation="xla", candidates=(), path=path)
      ...     sl.load_tuned(path) == result
      True
    """
    file = _path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a file that tune wrote, got {str(file)!r}, which is none")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # that of JSON, and of UTF-8
        raise ValueError(f"{path} must be a file that tune wrote; it is no JSON: {error}") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} must be a file that tune wrote: its 'format' must be {FORMAT!r}, got {found!r}")
    try:
        rows = [_read(Measured, row) for row in content["table"]]
        result = _read(Tuned, {**content, "table": rows}, "format")
        for row in result.table:
            times = (row.forward_ms, row.both_ms)
            if not all(ms is None or (isinstance(ms, int | float) and ms >= 0) for ms in times):
                raise ValueError(f"times must be numbers >= 0 or null, got {times}")
            if not isinstance(row.reason, str | None) or (row.reason is None) == (row.forward_ms is None):
                raise ValueError(f"a row must have a time or a reason, got {row.forward_ms!r} and {row.reason!r}")
        if (result.fwd_params, result.bwd_params) not in [
            (row.fwd_params, row.bwd_params) for row in result.table if row.reason is None
        ]:
            raise ValueError("the chosen parameters must be in the table, with a time")
        missing = {"mask", *_SIZES, "dtype", "implementation", "tunable", "device", "versions"} - result.about.keys()
        if missing:
            raise ValueError(f"'about' must name {', '.join(sorted(missing))}")
        str(result)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} must be a file that tune wrote: {type(error).__name__}: {error}") from None
    return result


def _read(kind: Any, values: dict[str, Any], *ignored: str) -> Any:
    values = {name: value for name, value in values.items() if name not in ignored}
    for name, params in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
        values[name] = params(**values[name])
    if "table" in values:
        values["table"] = tuple(values["table"])
    return kind(**values)


def _write(result: Tuned, file: pathlib.Path) -> None:
    """Puts the result in the place of the empty file, all at once."""
    content = {"format": FORMAT, **dataclasses.asdict(result)}
    for place in (content, *content["table"]):
        for name in ("fwd_params", "bwd_params"):
            place[name] = {field: value for field, value in place[name].items() if value}
    beside = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with beside.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _text(params: KernelParams) -> str:
    values = ((name, getattr(params, name)) for name in _FIELDS)
    return f"{type(params).__name__}({', '.join(f'{name}={value}' for name, value in values if value is not None)})"
