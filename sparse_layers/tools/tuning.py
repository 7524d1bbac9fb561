"""Tuning: measures settings of the kernels for one call's shapes on this machine, when asked to, and only then."""

import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments.checks import Positive, checked, strict_kwargs
from ..masks.adapters import MaskLike, as_masks
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.planner import make_plan
from ..ops.planning.platforms import check_implementation, implementation_order, platform
from .files import check_writable, checked_path
from .measuring import TunedCall, measure
from .tuned import SIZES, Tuned, save_tuned

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
        may differ: on GPUs, cuDNN computes some calls as long as they have no settings.
      candidates: `FwdParams` and `BwdParams` to try beside the defaults; None takes a list made for the implementation.
      repeats: number of groups of calls, >= 1.
      path: where to write the result as JSON, for `load_tuned`; None writes nothing. The file must not exist. It
        appears when all is measured.

    Returns:
      `Tuned`, with ``fwd_params``, ``bwd_params`` and the ``table`` of what was measured.

    Raises:
      ValueError: an argument is out of its range, or the call would be wrong; says which and why.
      TypeError: ``mask`` describes no mask, or another argument is of a wrong type.
      NotImplementedError: the named implementation does not support the call.
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
    call = TunedCall(options, arrays, _shapes(sizes, dtype, sinks), gradients)
    tunable = _tunable_implementation(call)
    if candidates is None:
        candidates = _default_candidates(tunable, sizes["q_len"], sizes["kv_len"])
    about = {"mask": text, **sizes, "dtype": dtype.name, "segment_ids": segment_ids is not None}
    about["logits_soft_cap"] = None if logits_soft_cap is None else float(logits_soft_cap)
    about |= {"sinks": sinks, "gradients": gradients, "repeats": repeats}
    device = next(iter(jnp.zeros(()).devices())).device_kind
    about |= {"implementation": implementation, "tunable": tunable, "device": device, "versions": _versions()}

    table, (fwd_params, bwd_params) = measure(call, candidates, repeats)
    result = Tuned(fwd_params, bwd_params, about, tuple(table))
    if file is not None:
        save_tuned(result, file)
    return result


# --- the call --------------------------------------------------------------------------------------------------------


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


def _tunable_implementation(call: TunedCall) -> str | None:
    """Returns the implementation that supports the call with settings, or None; raises what is wrong with the call."""
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
