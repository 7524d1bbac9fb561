"""Attention: time against dense XLA attention on this machine's device, share of blocks kept, memory of a long layer.

    python benchmarks/attention.py --heads 2

Both sides run in one process, in turns; times are medians of 5 groups of
up to 10 calls, after two warm-up calls. Results are checked against dense
attention in float64 on a sample of rows. ``relative`` is time / (dense time x share of blocks kept): 1 means that a
kept block costs what it costs in dense attention.
"""

import argparse
import functools
import os
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

PATTERNS: dict[str, Any] = {
    "causal": sl.Causal(),
    "window 1024": sl.preset("sliding_window", window=1024),
    "strided 128": sl.preset("sparse_transformer_strided", stride=128),
    "fixed 128/8": sl.preset("sparse_transformer_fixed", stride=128, summary=8),
    "longformer 1024+64": sl.preset("longformer", window=1024, global_tokens=64),
    "bigbird": sl.preset("bigbird"),
}


def attend(plan: sl.Plan, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The op under a plan."""
    return sl.block_sparse_attention(q, k, v, plan)


def median_seconds(functions: list, args: tuple, groups: int) -> list[float]:
    """Median over groups of the time of a call of each function; groups of up to 10 calls take turns."""
    calls = []
    for function in functions:
        jax.block_until_ready(function(*args))
        calls.append(max(1, min(10, int(0.5 / seconds_of(function, args, 1)))))
    seconds = [[] for _ in functions]
    for _ in range(groups):
        for function, number, times in zip(functions, calls, seconds, strict=True):
            times.append(seconds_of(function, args, number))
    return [statistics.median(times) for times in seconds]


def seconds_of(function, args: tuple, calls: int) -> float:
    """Seconds of one call, averaged over some."""
    start = time.perf_counter()
    for _ in range(calls):
        result = function(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def error(mask: sl.Mask, q, k, v, out, rows: np.ndarray) -> float:
    """Largest deviation of some rows from softmax attention in float64."""
    q, k, v = (np.asarray(x, np.float64)[0] for x in (q, k, v))
    worst = 0.0
    for row in rows:
        allowed = np.broadcast_to(mask(np.array(row), np.arange(len(k))), len(k))
        scores = np.where(allowed, np.einsum("nh,snh->ns", q[row], k) / np.sqrt(q.shape[-1]), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        exact = np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), v)
        worst = max(worst, float(np.abs(exact - np.asarray(out, np.float64)[0, row]).max()))
    return worst


def compare(seq_len: int, heads: int, size: int, groups: int) -> None:
    """Prints the table of times."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.standard_normal((1, seq_len, heads, size)), jnp.float32) for _ in range(4))

    def both(attention):
        return jax.jit(attention), jax.jit(jax.grad(lambda q, k, v: (attention(q, k, v) * weight).sum(), (0, 1, 2)))

    dense = both(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"))
    print(f"B=1 T={seq_len} N={heads} H={size} float32; dense is jax.nn.dot_product_attention(implementation='xla')")
    print(f"{'pattern':20}{'kept':>7}  {'forward':>10}{'faster':>8}{'relative':>10}  "
          f"{'fwd + bwd':>10}{'faster':>8}{'relative':>10}  {'error':>8}")  # fmt: skip
    for name, mask in PATTERNS.items():
        plan = sl.make_plan(mask, seq_len)
        kept = sum(p.fwd_blocks * p.fwd_shape[0] * p.fwd_shape[1] for p in plan.chains[0]) / seq_len**2
        sparse = both(functools.partial(attend, plan))
        line = f"{name:20}{kept:7.1%}"
        for ours, theirs in zip(sparse, dense, strict=True):
            mine, other = median_seconds([ours, theirs], (q, k, v), groups)
            line += f"  {mine * 1e3:7.1f} ms{other / mine:7.1f}x{mine / other / kept:10.2f}"
        deviation = error(mask, q, k, v, sparse[0](q, k, v), rng.integers(0, seq_len, 8))
        print(f"{line}  {deviation:8.1e}", flush=True)


def memory(seq_len: int, heads: int, size: int) -> None:
    """Prints the memory that the compiled forward and backward of one layer takes."""
    array = jax.ShapeDtypeStruct((1, seq_len, heads, size), jnp.float32)
    unit = 4 * np.prod(array.shape) * 4  # bytes of q, k, v and out
    print(f"\nmemory of forward + backward, B=1 T={seq_len} N={heads} H={size} float32, in units of q, k, v and out")
    for name, mask in PATTERNS.items():
        plan = sl.make_plan(mask, seq_len)
        gradient = jax.grad(lambda q, k, v, plan=plan: attend(plan, q, k, v).sum(), argnums=(0, 1, 2))
        used: Any = jax.jit(gradient).lower(array, array, array).compile().memory_analysis()
        total = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        print(f"{name:20}{total / unit:6.2f} x {unit / 2**20:.0f} MiB", flush=True)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--memory-seq-len", type=int, default=131072)
    options = parser.parse_args()
    device, python = jax.devices()[0].device_kind, platform.python_version()
    print(f"{device}, {os.cpu_count()} host cores, Python {python}, jax {jax.__version__}")
    compare(options.seq_len, options.heads, options.size, options.groups)
    memory(options.memory_seq_len, 8, 64)


if __name__ == "__main__":
    main()
