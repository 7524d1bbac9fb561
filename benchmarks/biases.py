"""Biases by distance: what they cost the Triton kernels, and FlexAttention.

    python -m benchmarks.biases --record biases.json

``alibi`` has slopes, ``table`` learned entries for distances up to 1024, whose gradient the backward pass computes.
FlexAttention has them in a score_mod, which captures the table and its gradient. Results and the gradient of the table
are timed as in `benchmarks.gpu`. In the check, the gradient of out is 0 except for 64 queries from the first to the
last, and float64 computes these alone.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

from . import contenders, gpu

REACH = 1024  # distances with an entry of their own, on each side
ROWS = 64  # queries that are checked
KINDS = "none", "alibi", "table"


def bias_of(kind: str, heads: int) -> sl.DistanceBias | None:
    """The bias of a kind; that of tables is random."""
    if kind == "none":
        return None
    return sl.alibi(heads) if kind == "alibi" else sl.DistanceBias(_table(heads))


def _table(heads: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (heads, 2 * REACH + 1))


# --- what is right ---------------------------------------------------------------------------------------------------


class Exact(gpu.Exact):
    """Attention and gradients in float64 of `ROWS` queries, and the gradient of the table if there is one."""

    def __init__(self, bias: sl.DistanceBias | None, pattern: contenders.Pattern, arrays: list[jax.Array]):
        self.first, dtype = 0, arrays[0].dtype.name
        self.rows = np.linspace(0, arrays[0].shape[1] - 1, ROWS).astype(int)
        right, rough = (self._answers(x, bias, pattern, arrays) for x in ("float64", dtype))
        self._set_budgets(right, rough, dtype)
        self.budgets = [np.maximum(x, np.finfo(float).tiny) for x in self.budgets]  # of distances that no pair has: 0

    def check(self, answers: Iterable[np.ndarray]) -> str:
        """Returns the errors in words as `gpu.Exact.check`, those of out and dq in the queries alone."""
        return super().check(x[self.rows] if i < 2 else x for i, x in enumerate(answers))

    def _answers(self, dtype: str, bias: Any, pattern: contenders.Pattern, arrays: list[jax.Array]) -> list[np.ndarray]:
        keys = np.arange(arrays[0].shape[1])
        distances, heads = keys - self.rows[:, None], np.array([0, -1])
        by_pair, index, answers = np.zeros((2, *distances.shape)), None, list[Any]()
        if bias is not None and bias.slopes is not None:
            by_pair = -np.array(bias.slopes)[heads, None, None] * abs(distances)
        elif bias is not None:
            index = np.clip(distances + bias.center, 0, 2 * REACH)
            by_pair = np.asarray(bias.table).astype(np.float64)[heads][:, index]
        allowed, dbias = pattern.rule(self.rows[:, None], keys, pattern.table), np.zeros_like(by_pair)
        for entry in range(len(arrays[0])):  # those of the last entry are compared, and the sum over all for the table
            q, k, v, dout = (x[entry][:, heads] for x in arrays)
            with jax.enable_x64(True):
                *results, one = gpu.attention_of_rows(q[self.rows], k, v, dout[self.rows], allowed, dtype, by_pair)
                answers = [np.asarray(x.astype(dtype)).astype(np.float64) for x in results]
                dbias += np.asarray(one).astype(np.float64)
        if index is None:
            return answers
        sums = [np.bincount(index.ravel(), x.ravel(), 2 * REACH + 1) for x in dbias]
        return [*answers, np.stack(sums, axis=1)[..., None]]


# --- who computes it -------------------------------------------------------------------------------------------------


def ours(
    pattern: contenders.Pattern, arrays: list[jax.Array], bias: sl.DistanceBias | None, options: dict[str, Any]
) -> contenders.Contender:
    """Our op and its gradients, that of the table among them."""
    plan = sl.make_plan(pattern.mask, arrays[0].shape[1], **options)
    *x, dout = arrays

    @jax.jit
    def forward(bias, q, k, v):
        return sl.block_sparse_attention(q, k, v, plan, bias=bias, implementation=options["implementation"])

    @jax.jit
    def forward_backward(dout, bias, *x):
        out, pullback = jax.vjp(forward, bias, *x)
        dbias, *gradients = pullback(dout)
        return out, *gradients, *jax.tree.leaves(dbias)

    def fetch(x):
        x = x if x.ndim == 4 else x.T[None, ..., None]  # a table [N, L]
        return np.asarray(x[-1][:, np.array([0, -1])]).astype(np.float64)

    def call_both(rows=None):
        pulled = dout if rows is None else jnp.zeros_like(dout).at[:, rows].set(dout[:, rows])
        return forward_backward(pulled, bias, *x)

    calls = {"fwd": lambda: forward(bias, *x), "fwd+bwd": call_both}
    return contenders.Contender(calls, jax.block_until_ready, fetch)


def score_mod_of(bias: sl.DistanceBias, device: str) -> tuple[Callable, tuple[Any, ...]]:
    """Returns FlexAttention's score_mod for a bias, and the tensors that it learns."""
    torch: Any = importlib.import_module("torch")
    if bias.slopes is not None:
        slopes = torch.tensor(bias.slopes, device=device)
        return lambda score, batch, head, q, k: score - slopes[head] * torch.abs(k - q), ()
    table = torch.from_numpy(np.array(bias.table)).to(device)

    def add_entry(score, batch, head, q, k):
        return score + table[head, torch.clamp(k - q + bias.center, 0, 2 * REACH)]

    return add_entry, (table,)


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--patterns", nargs="+", default=["causal", "window"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--warps", type=int, nargs=2, help="num_warps, forward and backward")
    gpu.add_options(parser, "triton", 400)
    options = parser.parse_args()
    report = gpu.Report(options)
    report.begin("biases")
    settings: dict[str, Any] = {"implementation": options.implementation}
    if options.warps:
        forward, backward = options.warps
        settings |= {"fwd_params": sl.FwdParams(num_warps=forward), "bwd_params": sl.BwdParams(num_warps=backward)}
    arrays, rows = gpu.inputs(options.seq_len, options.batch, options.heads, options.head_size), []
    for name in options.patterns:
        pattern, plain = contenders.patterns(options.seq_len)[name], dict[str, dict[str, float]]()
        for kind in options.kinds:
            bias = bias_of(kind, options.heads)
            labels = {"pattern": name, "bias": kind}
            case = gpu.Case(report, pattern, arrays, labels, functools.partial(Exact, bias))
            times = {options.implementation: case.run(options.implementation, ours, bias, settings)}
            if not options.no_flex:
                make_bias = None if bias is None else functools.partial(score_mod_of, bias)
                times["FlexAttention"] = case.run("FlexAttention", contenders.flex, False, make_bias)
            for who, ms in times.items():
                plain.setdefault(who, ms)
                ratios = [gpu.ratio(ms.get(x), plain[who].get(x)) for x in gpu.DIRECTIONS]
                rows.append([name, kind, who, *(gpu.digits(ms.get(x)) for x in gpu.DIRECTIONS), *ratios])
    shape = f"B={options.batch}, T={options.seq_len}, H={options.heads}, D={options.head_size}, bfloat16"
    ratio = [f"{x} / without" for x in gpu.DIRECTIONS]
    report.table(f"{shape}; ms", ["pattern", "bias", "by", *gpu.DIRECTIONS, *ratio], rows)
    report.record.write()
    return report.failures > 0


if __name__ == "__main__":
    sys.exit(main())
