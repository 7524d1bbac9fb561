"""Biases by distance: what they cost the Triton kernels, and FlexAttention.

    python -m benchmarks.biases --record biases.json

``alibi`` has slopes, ``table`` learned entries for distances up to 1024, whose gradient the backward pass computes.
FlexAttention has them in a score_mod, which captures the table and its gradient. Results and the gradient of the table
are checked and timed as in `benchmarks.gpu`.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

from . import contenders, gpu
from .record import add_option

REACH = 1024  # distances with an entry of their own, on each side
KINDS = "none", "alibi", "table"


def bias_of(kind: str, heads: int) -> sl.DistanceBias | None:
    """The bias of a kind; that of tables is random."""
    if kind == "none":
        return None
    return sl.alibi(heads) if kind == "alibi" else sl.DistanceBias(_table(heads))


def _table(heads: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (heads, 2 * REACH + 1))


# --- what is right ---------------------------------------------------------------------------------------------------


def _sum_diagonals(x: jax.Array) -> jax.Array:
    """Sums [n, t, s] over pairs of one distance: [n, t + s - 1], from distance 1 - t on."""
    n, t, s = x.shape
    x = jnp.pad(x[:, ::-1], ((0, 0), (0, 0), (0, t)))  # rows one longer than diagonals, so that each moves by one
    return x.reshape(n, -1)[:, : t * (s + t - 1)].reshape(n, t, s + t - 1).sum(1)


@functools.partial(jax.jit, static_argnames="dtype")
def _attention_of_rows(q, k, v, dout, allowed, bias, dtype) -> tuple[jax.Array, ...]:
    """Dense attention of some queries with a bias by distance [n, t + s - 1]: out, dq, and sums for dk, dv and bias."""
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    (t, s), scale, total = allowed.shape, q.shape[-1] ** -0.5, jnp.promote_types(dtype, jnp.float32)
    by_pair = bias[:, np.arange(s) - np.arange(t)[:, None] + t - 1]
    scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=total) * scale + by_pair.astype(total)
    p = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)).astype(dtype)
    out = jnp.einsum("nts,snh->tnh", p, v)
    dscores = p * (jnp.einsum("tnh,snh->nts", dout, v) - (out * dout).sum(-1).T[..., None])
    dq = jnp.einsum("nts,snh->tnh", dscores, k) * scale
    dk = jnp.einsum("nts,tnh->snh", dscores, q, preferred_element_type=total) * scale
    dv = jnp.einsum("nts,tnh->snh", p, dout, preferred_element_type=total)
    return out, dq, dk, dv, _sum_diagonals(dscores.astype(total))


class Exact(gpu.Exact):
    """Attention and gradients in float64 as in `gpu.Exact`, and the gradient of the table if there is one."""

    def __init__(self, bias: sl.DistanceBias | None, pattern: contenders.Pattern, arrays: list[jax.Array]):
        self.first, dtype = 0, arrays[0].dtype.name
        right, rough = (self._answers(x, bias, pattern, arrays) for x in ("float64", dtype))
        self._set_budgets(right, rough, dtype)
        self.budgets = [np.maximum(x, np.finfo(float).tiny) for x in self.budgets]  # of distances that no pair has: 0

    def _answers(self, dtype: str, bias: Any, pattern: contenders.Pattern, arrays: list[jax.Array]) -> list[np.ndarray]:
        seq_len = arrays[0].shape[1]
        positions, chunk = jnp.arange(seq_len), min(seq_len, gpu.CHUNK)
        distances = np.arange(1 - seq_len, seq_len)
        by_distance, index = np.zeros((2, len(distances))), None
        if bias is not None and bias.slopes is not None:
            by_distance = -np.array(bias.slopes)[[0, -1], None] * abs(distances)
        elif bias is not None:
            index = np.clip(distances + bias.center, 0, 2 * REACH)
            by_distance = np.asarray(bias.table).astype(np.float64)[[0, -1]][:, index]
        dbias, answers = np.zeros_like(by_distance), []
        for entry in range(len(arrays[0])):  # those of the last entry are compared, and the sum over all for the table
            sample, chunks = [x[entry][:, np.array([0, -1])] for x in arrays], []
            with jax.enable_x64(True):
                dk = dv = jnp.zeros((), "float64")
                for start in range(0, seq_len, chunk):
                    rows = slice(start, start + chunk)
                    allowed = pattern.rule(positions[rows, None], positions[None], None)
                    span = slice(seq_len - start - chunk, 2 * seq_len - start - 1)
                    q, dout = sample[0][rows], sample[3][rows]
                    one = _attention_of_rows(q, *sample[1:3], dout, allowed, by_distance[:, span], dtype)
                    chunks.append(one[:2])
                    dk, dv = dk + one[2], dv + one[3]
                    dbias[:, span] += np.asarray(one[4])
                out, dq = (jnp.concatenate(x) for x in zip(*chunks, strict=True))
                answers = [np.asarray(x.astype(dtype)).astype(np.float64) for x in (out, dq, dk, dv)]
        if index is not None:
            dtable = np.zeros((2 * REACH + 1, 2))
            np.add.at(dtable, index, dbias.T)
            answers.append(dtable[..., None])
        return answers


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
    def forward_backward(bias, dout, *x):
        out, pullback = jax.vjp(forward, bias, *x)
        dbias, *gradients = pullback(dout)
        return out, *gradients, *jax.tree.leaves(dbias)

    def fetch(x):
        x = x if x.ndim == 4 else x.T[None, ..., None]  # a table [N, L]
        return np.asarray(x[-1][:, np.array([0, -1])]).astype(np.float64)

    calls = {"fwd": lambda: forward(bias, *x), "fwd+bwd": lambda: forward_backward(bias, dout, *x)}
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
    parser.add_argument("--implementation", default="triton", choices=sl.implementations())
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--patterns", nargs="+", default=["causal", "window"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--warps", type=int, nargs=2, help="num_warps, forward and backward")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention")
    parser.add_argument("--seconds", type=int, default=400, help="time limit")
    add_option(parser)
    options = parser.parse_args()
    options.groups, options.calls = 5, 10
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
