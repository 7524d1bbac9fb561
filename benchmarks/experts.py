"""Decoding of a mixture of experts with the sizes of Qwen3-30B-A3B and random weights, beside the bytes of a step.

    python -m benchmarks.experts --layers 48 --batch 1 4 16 --bandwidth 4800 --record experts.json

A step reads the weights of attention, of the head and of the selected experts, and the keys and values of the cache.
``GB`` counts them: up to num_experts selections, those of each selection; above, all experts. Their quotient with
``--bandwidth``, that of the card in GB/s, is the least time of a step. ``prompt`` is the time to read a prompt, and its
memory plan says whether `jax.lax.ragged_dot` expands the tokens by the number of experts.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import sparse_layers as sl

from .record import Record, add_option


def make_model(options: argparse.Namespace) -> sl.SparseTransformer:
    """Makes the model; weights are drawn by one compiled program, in bfloat16."""
    mixture = sl.MixtureOfExperts(options.experts, options.top_k, features=options.expert_features)
    sizes = {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
    settings = {"positions": "rope", "norm": "rms", "normalize_qk": True, "use_bias": False, "mlp": mixture}
    settings |= {"seq_len": options.prompt + 2 * options.steps, "param_dtype": jnp.bfloat16, "rope_theta": 1e6}

    @nnx.jit
    def make() -> sl.SparseTransformer:
        init = nnx.initializers.normal(0.02)
        return sl.SparseTransformer(
            options.vocab,
            features=options.features,
            num_layers=options.layers,
            patterns="causal",
            head_init=init,
            rngs=nnx.Rngs(0),
            **sizes,
            **settings,
        )

    return make()


def bytes_of_step(model: sl.SparseTransformer, caches: Any, batch: int, options: argparse.Namespace) -> int:
    """Counts the bytes that a step must read: no embedding, and kernels of the selected experts."""
    total = sum(x.nbytes for x in jax.tree.leaves(caches))
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        share = 1.0
        if path[0] == "token_embedding":
            share = 0.0
        elif str(path[-2]).startswith("experts_"):
            share = min(batch * options.top_k, options.experts) / options.experts
        total += int(share * param.get_value().nbytes)
    return total


def seconds(function: Any, *arguments: Any) -> float:
    """Returns the median time of a compiled function."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(model: sl.SparseTransformer, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of a prompt and of a step, and the bytes of a step, for one size of batch."""
    graph, state = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(0), (batch, options.prompt), 0, options.vocab)

    def prefill(state: Any, tokens: jax.Array) -> Any:
        return nnx.merge(graph, state).prefill(tokens)

    def decode(state: Any, token: jax.Array, caches: Any) -> Any:
        def step(carry: Any, position: jax.Array) -> Any:
            token, caches = carry
            logits, caches = nnx.merge(graph, state).decode_step(token, caches, jnp.full(batch, position))
            return (logits.argmax(-1).astype(jnp.int32), caches), None

        return jax.lax.scan(step, (token, caches), options.prompt + jnp.arange(options.steps))[0][0]

    compiled = jax.jit(prefill).lower(state, tokens).compile()
    plan: Any = compiled.memory_analysis()
    logits, caches = compiled(state, tokens)
    first = logits.argmax(-1).astype(jnp.int32)
    step_s = seconds(jax.jit(decode).lower(state, first, caches).compile(), state, first, caches) / options.steps
    size = bytes_of_step(model, caches, batch, options)
    prompt = {"prompt_ms": 1e3 * seconds(compiled, state, tokens), "prompt_gb": plan.temp_size_in_bytes / 1e9}
    return {"batch": batch, "step_ms": 1e3 * step_s, "gb": size / 1e9} | prompt


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 48, "features": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "top_k": 8}
    sizes |= {"expert_features": 768, "vocab": 151936, "prompt": 512, "steps": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--bandwidth", type=float, default=4800.0, help="of the card, in GB/s; default: an H200's")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    model = make_model(options)
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param))) / 1e9
    record.say(record.heading + "\n")
    record.say(f"{options.layers} layers of {options.experts} experts, {size:.2f} GB in bfloat16\n")
    record.say("| batch | tokens/s | ms a step | GB a step | least ms | prompt, ms | prompt, GB of temporaries |")
    record.say("| --- | --- | --- | --- | --- | --- | --- |")
    for batch in options.batch:
        row = measure(model, batch, options)
        least = 1e3 * row["gb"] / options.bandwidth
        record.add(**row, least_ms=least)
        cells = [f"{1e3 * batch / row['step_ms']:.0f}", f"{row['step_ms']:.3g}", f"{row['gb']:.3g}", f"{least:.3g}"]
        cells += [f"{row['prompt_ms']:.3g}", f"{row['prompt_gb']:.3g}"]
        record.say(f"| {batch} | {' | '.join(cells)} |")
    record.write()


if __name__ == "__main__":
    main()
