"""Recomputing the attention, or whole layers, in the backward pass: the memory it saves, the time it costs.

    python -m benchmarks.recompute --layers 1 12

The same pre-activation layers (`flax.nnx.MultiHeadAttention` with another ``attention_fn``, and an MLP) in a scan, once
with dense causal attention of `jax.nn.dot_product_attention` and once with a sparse pattern. ``temporaries`` is what
the compiled gradient step holds besides parameters, input and gradients, by XLA's own account (its peak, not a sum);
it needs no execution. Times are medians of as many steps as --seconds allow, after one that is not counted.

What is recomputed: "nothing"; "attention" (sparse: ``make_attention_fn(recompute=True)``, dense: `jax.checkpoint`
around it); "layer" (`jax.checkpoint` around each layer); "layer, out and lse kept" (the same under a policy that saves
what the sparse attention names, so that its forward pass is not run again; dense attention of `jax.nn` names nothing).
"""

import argparse
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import sparse_layers as sl

from .record import Record, add_option

KEEP = jax.checkpoint_policies.save_only_these_names("sparse_attention_out", "sparse_attention_lse")
RECOMPUTED = ("nothing", "attention", "layer", "layer, out and lse kept")


class Layer(nnx.Module):
    """Attention and an MLP with residuals, the norms in front."""

    def __init__(self, features: int, heads: int, attention_fn, dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.norms = nnx.List([nnx.LayerNorm(features, **options) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(heads, features, attention_fn=attention_fn, decode=False, **options)
        self.inner = nnx.Linear(features, 4 * features, **options)
        self.outer = nnx.Linear(4 * features, features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.outer(jax.nn.gelu(self.inner(self.norms[1](x))))


def dense_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Causal attention by JAX: cuDNN's kernel on GPUs, else einsums with all T x T weights."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)


def recomputed_dense_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """The same under `jax.checkpoint`, which takes arrays only, and so none of Flax's other arguments."""
    return jax.checkpoint(dense_attention)(query, key, value)


def attention_of(pattern: str | None, seq_len: int, recompute: bool) -> Any:
    """The ``attention_fn`` of one row; None stands for dense attention."""
    if pattern is not None:
        return sl.make_attention_fn(pattern, seq_len, recompute=recompute)
    return recomputed_dense_attention if recompute else dense_attention


def compiled_step(attention_fn, recomputed: str, options: argparse.Namespace, layers: int, params, x) -> Any:
    """The compiled loss and gradient of a stack of layers."""
    graphdef = nnx.graphdef(Layer(options.features, options.heads, attention_fn, x.dtype, nnx.Rngs(0)))

    def layer(x, params):
        return nnx.merge(graphdef, params)(x), None

    if recomputed.startswith("layer"):
        # Inside a scan nothing merges the second forward pass with the first, so no barrier is needed.
        policy = KEEP if "kept" in recomputed else None
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=layers == 1)

    def loss(params, x):
        return jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)).mean()

    return jax.jit(jax.value_and_grad(loss)).lower(params, x).compile()


def median_seconds(step, args: tuple, budget: float) -> tuple[float, int, float]:
    """Median seconds of a step, the number of steps measured, and the loss."""
    times = []
    start = time.perf_counter()
    while not times or (time.perf_counter() - start < budget and len(times) < 21):
        before = time.perf_counter()
        loss, _ = jax.block_until_ready(step(*args))
        times.append(time.perf_counter() - before)
    times = times[1:] or times
    return statistics.median(times), len(times), float(loss)


def measured(name: str, pattern: str | None, layers: int, recomputed: str, options: argparse.Namespace) -> dict:
    """One row of the table."""
    dtype = jnp.dtype(options.dtype)
    x = jax.random.normal(jax.random.key(0), (options.batch, options.seq_len, options.features), dtype)
    make = functools.partial(Layer, options.features, options.heads, dense_attention, dtype)
    states = [nnx.state(make(nnx.Rngs(seed)), nnx.Param) for seed in range(layers)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    row: dict[str, Any] = {"attention": name, "layers": layers, "recomputed": recomputed}
    fn = attention_of(pattern, options.seq_len, recomputed == "attention")
    try:
        step = compiled_step(fn, recomputed, options, layers, params, x)
        row["temporaries_bytes"] = int(step.memory_analysis().temp_size_in_bytes)
        if options.no_time:
            row["skipped"] = "--no-time"
        elif row["temporaries_bytes"] > options.max_gib * 2**30:
            row["skipped"] = f"more than --max-gib {options.max_gib:g}"
        else:
            row["seconds"], row["steps"], row["loss"] = median_seconds(step, (params, x), options.seconds)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        row["skipped"] = "out of memory"
    return row


def check(rows: list[dict]) -> None:
    """Recomputing changes no result: all rows of one attention and depth have the same loss.

    Raises:
      AssertionError: they differ by more than rounding.
    """
    for key in {(row["attention"], row["layers"]) for row in rows}:
        losses = [row["loss"] for row in rows if (row["attention"], row["layers"]) == key and "loss" in row]
        assert not losses or max(losses) - min(losses) <= 1e-3 * max(losses), (key, losses)


def table_line(rows: list[dict]) -> str:
    """Rows of one attention, a number of layers each, as a row in Markdown."""
    memory = [f"{row['temporaries_bytes'] / 2**20:,.0f}" if "temporaries_bytes" in row else "-" for row in rows]
    times = [f"{row['seconds'] * 1e3:,.1f}" if "seconds" in row else "-" for row in rows]
    return f"| {rows[0]['attention']} | {rows[0]['recomputed']} | {' / '.join(memory)} | {' / '.join(times)} |"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 12])
    parser.add_argument("--pattern", default="sparse_transformer_strided:stride=128")
    parser.add_argument("--only", choices=["dense", "sparse"], help="one side only")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs, else float32")
    parser.add_argument("--no-time", action="store_true", help="compile only")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing for each row; one step at least")
    parser.add_argument("--max-gib", type=float, default=8.0, help="do not run what needs more temporaries")
    add_option(parser)
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(
        f"{record.heading}\n"
        f"B={options.batch} T={options.seq_len} F={options.features} N={options.heads} {options.dtype}, "
        f"sparse is {options.pattern}\n\n"
        f"| {' / '.join(map(str, options.layers))} layers | recomputed | temporaries, MiB | gradient step, ms |\n"
        "| --- | --- | --- | --- |"
    )
    rows = []
    for name, pattern in (("dense", None), ("sparse", options.pattern)):
        if options.only in (None, name):
            # The dense attention names nothing that a policy could keep.
            for recomputed in RECOMPUTED if name == "sparse" else RECOMPUTED[:3]:
                results = [measured(name, pattern, layers, recomputed, options) for layers in options.layers]
                for row in results:
                    record.add(**row)
                record.say(table_line(results))
                rows += results
    skipped = [f"{r['attention']}, {r['layers']}, {r['recomputed']} ({r['skipped']})" for r in rows if "skipped" in r]
    record.say(f"\nnot run: {'; '.join(skipped) or 'none'}")
    record.write()
    check(rows)


if __name__ == "__main__":
    main()
