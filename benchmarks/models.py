"""A whole model of random weights, by default of the shape of Llama 3 8B: tokens a second of decoding, or of a prompt.

    python -m benchmarks.models --batch 8 --seq-len 65536 --record models.json
    python -m benchmarks.models --prompt 16384 --batch 1 --seq-len 131072 --patterns causal --record prompts.json

The shape of Gemma 3 12B is::

    --layers 48 --features 3840 --heads 16 --key-heads 8 --head-dim 256 --mlp-features 15360 --vocabulary 262208 \
        --tie-embeddings --patterns "5 windows, 1 causal"

A step adds a token to each sequence at the end of full caches, and takes the likeliest next token. ``read`` is what
it must read: all weights, and of each cache the rows that the pattern looks at, for each head that chooses its own;
``floor`` the time that this takes at ``--bandwidth``. Times are those of steps in one compiled loop, the median of five
loops.

With ``--prompt`` sequences are read in pieces of so many tokens, by a program for each piece, which changes the caches
in place. ``beside`` is the most memory that one of these programs takes beside weights and caches, by the compiler;
the time is that of all pieces, the median of three readings.
"""

import argparse
import concurrent.futures
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import sparse_layers as sl

from .record import Record, add_option

PATTERNS = {
    "causal": ("causal",),
    "5 windows, 1 causal": ("sliding_window:window=1024",) * 5 + ("causal",),
    "moba": ("moba:block=128,count=16",),
}


def decoder(patterns: tuple[str, ...], options: argparse.Namespace) -> sl.SparseTransformer:
    """A decoder in bfloat16: RMS norms, SwiGLU, rotary positions, grouped heads."""
    return sl.SparseTransformer(
        options.vocabulary,
        options.heads,
        options.features,
        options.layers,
        patterns=patterns,
        seq_len=options.seq_len,
        num_kv_heads=options.key_heads,
        head_dim=options.head_dim,
        mlp="swiglu",
        mlp_features=options.mlp_features,
        norm="rms",
        use_bias=False,
        positions="rope",
        tie_embeddings=options.tie_embeddings,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )


def random_weights(make: Callable[[], Any]) -> tuple[Any, Any]:
    """The graph of a model and its weights, drawn by one program a shape: all at once take long to compile."""
    graph, shapes = nnx.split(nnx.eval_shape(make))
    draw = jax.jit(lambda key, shape, dtype: jax.random.normal(key, shape, dtype) / 64, static_argnums=(1, 2))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = [draw(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return graph, jax.tree.unflatten(tree, weights)


def caches_of(model: sl.SparseTransformer, options: argparse.Namespace) -> tuple[sl.KVCache, ...]:
    """An empty cache for each layer."""
    caches = []
    for block in model.layers:
        attention: Any = block.attention
        sizes = {"num_heads": options.heads, "num_kv_heads": options.key_heads, "head_size": attention.head_dim}
        fn = attention.attention_fn.fn
        options_of_cache = {"selection": fn.selection, "batch": options.batch, "dtype": jnp.bfloat16}
        caches.append(sl.KVCache.empty(fn.masks, options.seq_len, **options_of_cache, **sizes))
    return tuple(caches)


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    graph, weights = random_weights(lambda: decoder(PATTERNS[name], options))
    caches = jax.jit(lambda: caches_of(nnx.merge(graph, weights), options))()

    def loop(weights: Any, caches: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        def step(carry, position):
            caches, tokens = carry
            logits, caches = nnx.merge(graph, weights).decode_step(tokens, caches, jnp.full(options.batch, position))
            return (caches, jnp.argmax(logits, -1).astype(tokens.dtype)), None

        positions = options.seq_len - options.steps + jnp.arange(options.steps)
        return jax.lax.scan(step, (caches, tokens), positions)[0]

    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (weights, caches)]
    read = bytes_of[0] + sum(bytes_read(cache, options) for cache in caches)
    tokens = jnp.zeros(options.batch, jnp.int32)
    run = jax.jit(loop, donate_argnums=1).lower(weights, caches, tokens).compile()
    times = []
    for _ in range(6):  # the first is not counted
        before = time.perf_counter()
        caches, tokens = jax.block_until_ready(run(weights, caches, tokens))
        times.append((time.perf_counter() - before) / options.steps)
    ms = statistics.median(times[1:]) * 1e3
    floor = read / options.bandwidth / 1e9
    return {"pattern": name, "ms": ms, "weights": bytes_of[0], "caches": bytes_of[1], "read": read, "floor_ms": floor}


def bytes_read(cache: sl.KVCache, options: argparse.Namespace) -> int:
    """Returns the bytes of a cache that a step must read: the rows it attends to, and its scorer's pooled keys."""
    row = 2 * 2 * (options.head_dim or options.features // options.heads)  # bytes of a key and a value
    rows = options.batch * cache.num_reads
    if cache.selection is None or cache.pooled is None:
        return rows * options.key_heads * row
    heads = options.heads if cache.selection.per_query_head else options.key_heads
    return rows * heads * row + cache.pooled.nbytes


def read(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table of prompts."""
    graph, weights = random_weights(lambda: decoder(PATTERNS[name], options))

    def prefill(weights: Any, caches: Any, tokens: jax.Array, start: int) -> tuple[Any, jax.Array]:
        logits, caches = nnx.merge(graph, weights).prefill(tokens, caches=caches, start=start, total=options.seq_len)
        return caches, logits

    jitted = jax.jit(prefill, static_argnames="start", donate_argnames="caches")
    tokens = jax.random.randint(jax.random.key(0), (options.batch, options.seq_len), 0, options.vocabulary)
    prompts = [(x, tokens[:, x : x + options.prompt]) for x in range(0, options.seq_len, options.prompt)]
    lowered, caches = [], None
    for start, prompt in prompts:
        lowered.append(jitted.lower(weights, caches, prompt, start=start))
        caches, _ = jax.eval_shape(functools.partial(prefill, start=start), weights, caches, prompt)
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda x: x.compile(), lowered))
    compiling = time.perf_counter() - began
    times = []
    for _ in range(4):  # the first is not counted
        caches, began = None, time.perf_counter()
        for program, (_, prompt) in zip(programs, prompts, strict=True):
            caches, logits = program(weights, caches, prompt)
        jax.block_until_ready(logits)
        times.append(time.perf_counter() - began)
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (weights, caches)]
    beside = max(x.memory_analysis().temp_size_in_bytes for x in programs)
    seconds = statistics.median(times[1:])
    row = {"pattern": name, "seconds": seconds, "weights": bytes_of[0], "caches": bytes_of[1], "beside": beside}
    return row | {"programs": len(programs), "compiling_s": compiling}


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=16, help="in one compiled loop")
    parser.add_argument("--prompt", type=int, default=0, help="read prompts in pieces of so many tokens, do not decode")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, help="of each head; default: features / heads")
    parser.add_argument("--tie-embeddings", action="store_true", help="the token embedding is the head, too")
    parser.add_argument("--mlp-features", type=int, default=14336)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--bandwidth", type=float, default=4.1, help="of the device's memory, TB/s")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(
        f"{record.heading}\n"
        f"{options.layers} layers of {options.features}, heads {options.heads}:{options.key_heads}, "
        f"{options.batch} sequences, T={options.seq_len}, bfloat16\n"
    )
    try:
        (of_prompts if options.prompt else of_steps)(record, options)
    finally:  # what was found before a Ctrl-C, too
        record.write()


def of_steps(record: Record, options: argparse.Namespace) -> None:
    """The table of decoding."""
    record.say(
        "| pattern | ms a step | tokens a second | GiB of weights | of caches | read | floor, ms | times the floor |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in options.patterns:
        row = measured(name, options)
        record.add(**row)
        sizes = " | ".join(f"{row[what] / 2**30:.1f}" for what in ("weights", "caches", "read"))
        speed, floor = options.batch / row["ms"] * 1e3, row["floor_ms"]
        record.say(f"| {name} | {row['ms']:.2f} | {speed:.0f} | {sizes} | {floor:.2f} | {row['ms'] / floor:.2f} |")


def of_prompts(record: Record, options: argparse.Namespace) -> None:
    """The table of prompts in pieces."""
    record.say(
        f"| pieces of {options.prompt} tokens | seconds | tokens a second | GiB of weights | of caches | beside |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for name in options.patterns:
        row = read(name, options)
        record.add(**row)
        sizes = " | ".join(f"{row[what] / 2**30:.2f}" for what in ("weights", "caches", "beside"))
        speed = options.batch * options.seq_len / row["seconds"]
        record.say(f"| {name} | {row['seconds']:.2f} | {speed:.0f} | {sizes} |")


if __name__ == "__main__":
    main()
