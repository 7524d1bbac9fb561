"""Decoding: keys, bytes and time of one step from the cache, against the length.

    python -m benchmarks.decode --record decode.json

A step adds a token to each sequence and attends from it, at the end of a full cache. ``keys`` are those that a query
head reads; ``bytes`` what XLA counts for the attention of the step on a CPU (as written: it counts intermediate arrays,
too, and of a fused gather all that could have been gathered, so it is counted before it is fused); ``cache`` the bytes
that are kept. Times are those of steps in one compiled loop, the median of some loops, divided by ``--layers``. A step
adds its token to so many caches, as that of a model does: layers of one pattern share the lists of what they read. Each
result is first checked against float64 in its last row.
"""

import argparse
import itertools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from sparse_layers.ops.kernels.quantized import QuantizedRows, dequantize, quantize

from .record import Record, add_option

PATTERNS = {
    "causal": "causal",
    "window": "sliding_window:window=1024",
    "strided": "sparse_transformer_strided:stride=128",
    "fixed": "sparse_transformer_fixed:stride=128,summary=8",
    "bigbird": "bigbird",
}


def loop(caches: list[sl.KVCache], tokens: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], list[sl.KVCache]]:
    """Steps over the last positions: queries [n, B, N, H], keys and values -> out [n, B, N, H] of each layer."""
    count, batch = tokens[0].shape[:2]

    def step(caches, token):
        position, (query, key, value) = token
        outs, caches = zip(*(x.step(query, key, value, jnp.full(batch, position)) for x in caches), strict=True)
        return list(caches), outs

    caches, outs = jax.lax.scan(step, caches, (caches[0].seq_len - count + jnp.arange(count), tokens))
    return outs, caches


def measured(name: str, seq_len: int, cache_dtype: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """One cell of the table.

    Raises:
      AssertionError: the last step's result is not the pattern's row, computed in float64.
    """
    shape = options.batch, seq_len, options.kv_heads, options.head_size
    (mask,), dtype = sl.as_masks(sl.preset(PATTERNS[name])), jnp.dtype(options.dtype)
    keys, values = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed in (0, 1))
    sizes = {"batch": shape[0], "num_heads": options.heads, "num_kv_heads": shape[2], "head_size": shape[3]}
    sizes |= {"dtype": dtype, "implementation": options.implementation, "cache_dtype": cache_dtype}
    empty = sl.KVCache.empty(mask, seq_len, **sizes)
    cache = jax.jit(sl.KVCache.filled)(empty, keys, values, jnp.full(shape[0], seq_len - options.steps))
    queries = jax.random.normal(jax.random.key(2), (options.steps, shape[0], options.heads, shape[3]), dtype)
    tokens = queries, *(jnp.swapaxes(x[:, seq_len - options.steps :], 0, 1) for x in (keys, values))
    caches = [cache] + [jax.tree.map(jnp.copy, cache) for _ in range(options.layers - 1)]
    run = jax.jit(loop, donate_argnums=0).lower(caches, tokens).compile()
    shapes = jax.eval_shape(lambda *x: x, cache, queries[0], jnp.full(shape[0], 0))
    with jax.default_device(jax.devices("cpu")[0]):  # on GPUs, a kernel does not tell what it reads
        analysis: Any = jax.jit(sl.KVCache.attend).lower(*shapes).cost_analysis()
    facts = {"keys": cache.num_reads, "bytes": int(analysis["bytes accessed"]), "cache": cache.nbytes}
    outs, caches = jax.block_until_ready(run(caches, tokens))
    last_outs, k, v = [out[-1, 0] for out in outs], keys[0], values[0]
    if cache_dtype is not None and isinstance(cache.keys[0], QuantizedRows):
        facts["error"] = check(last_outs, queries[-1, 0], k, v, mask, dtype, None)
        k, v = (dequantize(quantize(x, cache_dtype), jnp.float32) for x in (k, v))
    check(last_outs, queries[-1, 0], k, v, mask, dtype)
    times, start = [], time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - start < options.seconds and len(times) < 25):
        before = time.perf_counter()
        _, caches = jax.block_until_ready(run(caches, tokens))
        times.append(time.perf_counter() - before)
    us = statistics.median(times) / options.steps / options.layers * 1e6
    return {"pattern": name, "T": seq_len, "cache_dtype": cache_dtype, **facts, "us": us}


def check(
    outs: list[jax.Array],
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: sl.Mask,
    dtype: Any,
    factor: float | None = 4,
) -> float:
    """Compares the last row [N, H] of each layer with float64; returns the error relative to the largest value.

    Keys and values are [T, K, H].

    Raises:
      AssertionError: the error is above ``factor`` times the epsilon of the dtype, unless factor is None.
    """
    length = len(keys)
    allowed = np.flatnonzero(mask(np.array(length - 1), np.arange(length)))
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, keys[allowed], values[allowed]))
    k, v = (np.repeat(x, len(q) // x.shape[1], axis=1) for x in (k, v))
    logits = np.einsum("nh,snh->ns", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    want = np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), v)
    error = max(np.abs(np.asarray(out.astype(jnp.float32)) - want).max() for out in outs)
    # Rounding of weights and result to the dtype, relative to the largest value.
    largest, epsilon = float(np.abs(v).max()), float(jnp.finfo(dtype).eps)
    if factor is not None:
        budget = factor * epsilon * largest
        assert error <= budget, f"error {error:.1e} of a budget of {budget:.1e}"
    return float(error) / largest


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=256, help="in one compiled loop")
    parser.add_argument("--layers", type=int, default=8, help="caches that a step adds its token to")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each cell; three loops at least")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs, else float32")
    dtypes = {"nargs": "+", "default": ["dtype"], "choices": ["dtype", "int8", "float8_e4m3fn"]}
    parser.add_argument("--cache-dtype", **dtypes, help="of caches that keep all keys; 'dtype' is that of --dtype")
    parser.add_argument("--implementation", choices=["triton", "xla"], help="who attends; default: that of KVCache")
    add_option(parser)
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    options.kv_heads = options.kv_heads or options.heads
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(
        f"{record.heading}\n"
        f"B={options.batch} N={options.heads} K={options.kv_heads} H={options.head_size} {options.dtype}, "
        f"{options.layers} layers\n\n"
        f"| T = {', '.join(map(str, options.lengths))} | keys | MiB | MiB of cache | µs a layer |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for name, kept in itertools.product(options.patterns, options.cache_dtype):
        cache_dtype = None if kept == "dtype" else kept
        rows = [measured(name, seq_len, cache_dtype, options) for seq_len in options.lengths]
        for row in rows:
            record.add(**row)
        sizes = [[f"{row[what] / 2**20:.1f}" for row in rows] for what in ("bytes", "cache")]
        cells = [[str(row["keys"]) for row in rows], *sizes, [f"{row['us']:.0f}" for row in rows]]
        record.say(f"| {' | '.join([name if cache_dtype is None else f'{name}, {kept}', *map(', '.join, cells)])} |")
    record.write()


if __name__ == "__main__":
    main()
