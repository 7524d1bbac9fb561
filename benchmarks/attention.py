"""Attention: time against dense XLA attention on this machine's device, share of blocks kept, memory of a long layer.

    python -m benchmarks.attention --heads 2

Both sides run in one process, in turns: in each round each function is called for at least 50 ms, after two calls that
are not counted; the least of all rounds counts, for other work on the machine only ever adds. On a CPU that alone is
not enough: dense attention keeps all cores busy, a loop over blocks does not, so their ratio by the clock depends on
how many cores other work leaves to them. Hence two ratios: ``faster`` by the clock, ``by CPU`` by the seconds of all
threads. The load before the run stands in the first line; where it is not small, only the second says anything.
``relative`` is time / (dense time x share of blocks kept): 1 means that a kept block costs what it costs in dense
attention. Results are checked against attention in float64 on a sample of rows.
"""

import argparse
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

from .record import Record, add_option

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


def seconds_in_turns(functions: list, args: tuple, rounds: int) -> list[list[tuple[float, float]]]:
    """Returns the seconds of a call for each function and round, by the clock and of the processor."""
    calls = []
    for function in functions:
        jax.block_until_ready(function(*args))
        calls.append(max(1, math.ceil(0.05 / seconds_of(function, args, 1)[0])))
    turns = [[seconds_of(f, args, n) for f, n in zip(functions, calls, strict=True)] for _ in range(rounds)]
    return [list(of_one) for of_one in zip(*turns, strict=True)]


def seconds_of(function, args: tuple, calls: int) -> tuple[float, float]:
    """Seconds of one call, averaged over some, by the clock and of all threads of the process."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        result = function(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - clock) / calls, (time.process_time() - processor) / calls


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


def compare(record: Record, seq_len: int, heads: int, size: int, rounds: int) -> None:
    """Prints the table of times."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.standard_normal((1, seq_len, heads, size)), jnp.float32) for _ in range(4))

    def compiled_pair(attention):
        return jax.jit(attention), jax.jit(jax.grad(lambda q, k, v: (attention(q, k, v) * weight).sum(), (0, 1, 2)))

    dense = compiled_pair(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"))
    record.say(
        f"B=1 T={seq_len} N={heads} H={size} float32; dense is jax.nn.dot_product_attention(implementation='xla')\n"
        f"{'pattern':20}{'kept':>7}"
        + "".join(f"  {name:>10}{'faster':>8}{'by CPU':>8}{'relative':>10}" for name in ("forward", "fwd + bwd"))
        + f"  {'error':>8}"
    )
    for name, mask in PATTERNS.items():
        plan = sl.make_plan(mask, seq_len)
        kept = sum(p.fwd_blocks * p.fwd_shape[0] * p.fwd_shape[1] for p in plan.chains[0]) / seq_len**2
        sparse = compiled_pair(functools.partial(attend, plan))
        line, seconds = f"{name:20}{kept:7.1%}", {}
        for direction, *pair in zip(("forward", "both"), sparse, dense, strict=True):
            times = dict(zip(("ours", "dense"), seconds_in_turns(pair, (q, k, v), rounds), strict=True))
            mine, dense_time = (np.min(times[side], axis=0) for side in ("ours", "dense"))
            faster, by_cpu = dense_time / mine
            line += f"  {mine[0] * 1e3:7.1f} ms{faster:7.3g}x{by_cpu:7.3g}x{1 / faster / kept:10.2f}"
            seconds[direction] = times
        deviation = error(mask, q, k, v, sparse[0](q, k, v), rng.integers(0, seq_len, 8))
        record.add(pattern=name, kept=kept, clock_and_cpu_seconds=seconds, error=deviation)
        record.say(f"{line}  {deviation:8.1e}")


def memory(record: Record, seq_len: int, heads: int, size: int) -> None:
    """Prints the memory that the compiled forward and backward of one layer takes."""
    array = jax.ShapeDtypeStruct((1, seq_len, heads, size), jnp.float32)
    unit = 4 * np.prod(array.shape) * 4  # bytes of q, k, v and out
    record.say(
        f"\nmemory of forward + backward, B=1 T={seq_len} N={heads} H={size} float32, in units of q, k, v and out"
    )
    for name, mask in PATTERNS.items():
        plan = sl.make_plan(mask, seq_len)
        gradient = jax.grad(lambda q, k, v, plan=plan: attend(plan, q, k, v).sum(), argnums=(0, 1, 2))
        used: Any = jax.jit(gradient).lower(array, array, array).compile().memory_analysis()
        total = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        record.add(pattern=name, memory_bytes=int(total), unit_bytes=int(unit))
        record.say(f"{name:20}{total / unit:6.2f} x {unit / 2**20:.0f} MiB")


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-seq-len", type=int, default=131072)
    parser.add_argument(
        "--only", choices=["time", "memory"], help="one table; memory is the compiler's, whatever else runs"
    )
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(record.heading)
    if options.only != "memory":
        compare(record, options.seq_len, options.heads, options.size, options.rounds)
    if options.only != "time":
        memory(record, options.memory_seq_len, 8, 64)
    record.write()


if __name__ == "__main__":
    main()
