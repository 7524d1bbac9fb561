"""Calls whose logits float32 hardly tells apart, and how far answers may be off, element by element.

Weights are ``exp(logit - lse)``. Both are rounded, so a weight lies between two numbers, and so do sums of weights.
Where one logit stands out by more than its rounding, which is nearly everywhere, both numbers are 0 or 1.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from sparse_layers.tools.oracle import DenseAttention
from tests.ops import cases

IDS = np.repeat([[4, 4, 0, 0, 2, -1], [1, 1, 1, 3, 3, 3]], 20, axis=1)
HOLES = (sl.Causal() & sl.Columns(50, 20)) | sl.Prefix(70).T & sl.Empty()  # queries 0 to 19 see nothing
EPS = float(jnp.finfo(jnp.float32).eps)
ROUNDINGS = 4  # of a logit and of lse, from the forward pass, which computes lse, to the backward pass


@dataclasses.dataclass(frozen=True, eq=False)
class Case(cases.Case):
    """A call with huge logits, or with huge sinks."""

    scale: float = 3e7
    heads: tuple[int, int] = (4, 2)
    sink_values: tuple[float, ...] = ()

    def arrays(self):
        return super().arrays() | {"sinks": np.array(self.sink_values, np.float32) if self.sink_values else None}


SINKS = 3e38, -3e38, 2.4e38, 0.0
FIXED = sl.preset("sparse_transformer_fixed", stride=24, summary=4)
CASES = [
    *(Case(f"window-{scale:g}", sl.Causal() & sl.Window(40), 120, scale=scale) for scale in (3e7, 1e9, 1e12)),
    Case("window-1e6", sl.Causal() & sl.Window(40), 120, scale=1e6, core=False),
    Case("blocks-differ", sl.Causal(), 120, fwd=(32, 32), bwd=(16, 64), scale=-3e7),
    Case("chain", FIXED, 120, split=True, sink_values=SINKS),
    Case("documents", sl.Causal(), 120, segments=(IDS, IDS)),
    Case("no-keys", HOLES, 120, heads=(4, 1), scale=1e7, sink_values=(3e38, 2.4e38, 0.0, -1e9)),
    Case("sinks", sl.Window(9), 120, scale=1.0, core=False, sink_values=SINKS),
    Case("soft-cap", sl.Causal(), 120, soft_cap=30.0, sink_values=SINKS),
    Case("soft-cap-huge", sl.Causal(), 120, soft_cap=1e9),
    Case("run-time", jnp.tri(120, dtype=bool), 120, sizes=(32, 8), core=False),
]
# A kernel that multiplies and subtracts at once, to base 2, rounds a maximum of 2 ** 31 by more than exp2 can take.
BASE_2 = [case for case in CASES if case.core and abs(case.scale) < 1e8]


def check(case: cases.Case, answers: dict[str, np.ndarray], most: float = np.inf) -> None:
    """Asserts that answers are finite and as near to those in float64 as the rounding of logits allows.

    Args:
      case: the call.
      answers: by `cases.NAMES`.
      most: the largest sink that an implementation knows.
    """
    right, budgets = expected(case)
    assert answers.keys() == right.keys()
    for name, answer in answers.items():
        answer, no_keys = np.asarray(answer).astype(np.float64), np.isneginf(right[name])
        np.testing.assert_array_equal(np.isneginf(answer), no_keys, name)
        answer, wanted, budget = (x[~no_keys] for x in (answer, right[name], budgets[name]))
        off = abs(answer - np.clip(wanted, -most, most)) - budget
        assert np.isfinite(answer).all() and off.max() <= 0, f"{name}: beyond its budget by {off.max():.3g}"


def expected(case: cases.Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The answers in float64 and how far others may be off, by `cases.NAMES`."""
    arrays, allowed = case.arrays(), case.allowed()
    assert case.scale is not None
    right = DenseAttention(**arrays, allowed=allowed, scale=case.scale, soft_cap=case.soft_cap).answers
    arrays = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items() if x is not None}
    groups, eps = case.heads[0] // case.heads[1], float(jnp.finfo(case.dtype).eps)
    q, k, v, dout = (arrays[name] for name in ("query", "key", "value", "dout"))
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    logits, size = case.scale * _pairs(q, k), abs(case.scale) * _pairs(abs(q), abs(k))
    slope, slope_off = np.ones(()), np.zeros(())
    if case.soft_cap is not None:
        squashed = np.tanh(logits / case.soft_cap)
        slope, logits = 1 - squashed**2, case.soft_cap * squashed
        slope_off = np.minimum(1, ROUNDINGS * EPS * (2 * slope * size / case.soft_cap + 4))
        size = slope * size + ROUNDINGS * abs(logits)
    lse = np.where(np.isneginf(right["lse"]), 0, right["lse"])
    by_row = lse.swapaxes(1, 2)[..., None]
    rounding = ROUNDINGS * EPS * (size + abs(by_row))
    lowered = np.maximum(16 * EPS * abs(by_row) - 2, 0)  # see `sparse_layers.ops.kernels.numerics.reduced_lse`

    logs = np.where(allowed, logits - by_row, -np.inf)
    p, forward_off = _weights(logs, rounding, 0)
    _, p_off = _weights(logs, rounding, lowered)
    delta = (right["out"] * dout).sum(-1) - arrays["dlse"]
    out_off = _by_query(forward_off + 2 * eps * p, abs(v))
    delta_off = ((out_off + eps * abs(right["out"])) * abs(dout)).sum(-1) + ROUNDINGS * EPS * abs(arrays["dlse"])
    gap = abs(_pairs(dout, v) - delta.swapaxes(1, 2)[..., None])
    gap_off = ROUNDINGS * EPS * _pairs(abs(dout), abs(v)) + delta_off.swapaxes(1, 2)[..., None]
    dlogits_off = p_off * slope * gap + (p + p_off) * (
        slope * gap_off + (slope_off + 2 * eps * slope) * (gap + gap_off)
    )

    def by_kv_head(x, y):
        x = _by_query(x.swapaxes(2, 3), y)
        return x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)

    budgets = {
        "out": out_off,
        "lse": np.where(allowed, rounding, 0).max(-1).swapaxes(1, 2) + ROUNDINGS * EPS * abs(lse),
        "dq": abs(case.scale) * _by_query(dlogits_off, abs(k)),
        "dk": abs(case.scale) * by_kv_head(dlogits_off, abs(q)),
        "dv": by_kv_head(p_off + 2 * eps * (p + p_off), abs(dout)),
    }
    if "sinks" in arrays:
        logs = np.where(np.isneginf(right["lse"]), -np.inf, arrays["sinks"] - lse)[..., None].swapaxes(1, 2)
        p, p_off = (x[..., 0].swapaxes(1, 2) for x in _weights(logs, ROUNDINGS * EPS * abs(by_row), lowered))
        budgets["dsinks"] = (p_off * abs(delta) + (p + p_off) * (delta_off + EPS * abs(delta))).sum((0, 1))
    return right, {name: off + 2 * eps * abs(right[name]) for name, off in budgets.items()}


def _weights(logs, rounding, lowered):
    """(exp(logs), how far that may be off where logs are rounded and lse is lowered)."""
    weights = np.exp(logs)
    ends = (np.exp(np.minimum(0, logs + lowered + end)) for end in (-rounding, rounding))
    return weights, np.maximum(*(abs(weights - end) for end in ends))


def _pairs(x, y):
    return np.einsum("btnh,bsnh->bnts", x, y, optimize=True)


def _by_query(x, y):
    return np.einsum("bnts,bsnh->btnh", x, y, optimize=True)
