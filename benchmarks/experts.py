"""Mixtures of experts with the sizes of Qwen3-30B-A3B and random weights in bfloat16: a layer, or a whole model.

    python -m benchmarks.experts layer --record experts_layer.json
    python -m benchmarks.experts model --layers 16 --batch 1 4 --record experts_model.json

``layer`` first compares each case with float64, in values and gradients. The budget of an error is twice that of dense
products in bfloat16, plus the rounding of the largest number; ``error`` is the largest share of it. Decoding is then
measured in a program of 16 layers with 4 sets of weights, normalized between layers; a prompt is one layer. Its name
has the number of rows, tokens times ``--top-k``. ``least`` is the greater of two times: to read the selected experts
once, with gradients twice and written once, and to multiply. ``without`` is a layer without its kernel for GPUs.

``model`` measures decoding and prompts. A step reads the weights of attention, of the head and of the selected experts,
and the keys and values of the cache. ``GB`` counts them: up to num_experts selections, those of each selection; above,
all experts. Their quotient with ``--bandwidth``, that of the card in GB/s, is the least time of a step.
"""

import argparse
import functools
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules.activations import activate
from sparse_layers.modules.experts_core import ExpertParams, apply_experts
from sparse_layers.ops.kernels.experts_gpu import grouped_matmul

from .models import random_weights
from .record import Record, add_option

DTYPE = jnp.bfloat16
SETS, PASSES = 4, 4  # sets of weights, which a GPU's cache does not hold, and passes over them
# Tokens of each case, and whether gradients are computed, too.
CASES = [(1, False), (4, False), (512, False), (2048, False), (512, True), (2048, True)]
CHAINED = 8  # up to this number of tokens, layers are measured in one program


def seconds(function: Any, *arguments: Any, calls: int = 1) -> float:
    """Returns the median time of a call of a compiled function."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        results = [function(*arguments) for _ in range(calls)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / calls)
        del results
    return statistics.median(times)


# --- a layer ---------------------------------------------------------------------------------------------------------


def make_params(options: argparse.Namespace, seed: int) -> ExpertParams:
    """Draws the kernels of a layer."""
    experts, features, hidden = options.experts, options.features, options.expert_features
    shapes = (experts, features, hidden), (experts, features, hidden), (experts, hidden, features)

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * shape[1] ** -0.5).astype(DTYPE)

    return ExpertParams(*map(draw, jax.random.split(jax.random.key(seed), 3), shapes))


def make_inputs(options: argparse.Namespace, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws tokens, the router's logits for each layer of a chain, and the gradient of the output."""
    keys = jax.random.split(jax.random.key(tokens), 3)
    x, dout = (jax.random.normal(key, (tokens, options.features), jnp.float32).astype(DTYPE) for key in keys[:2])
    return x, jax.random.normal(keys[2], (PASSES, SETS, tokens, options.experts), jnp.float32), dout


def dense_experts(
    mixture: sl.MixtureOfExperts, params: ExpertParams, x: jax.Array, weights: jax.Array, ids: jax.Array, dtype: Any
) -> jax.Array:
    """Computes all experts for all tokens in the dtype of x, and sums those that are selected."""
    del dtype

    @jax.checkpoint
    def step(out: jax.Array, expert: Any) -> tuple[jax.Array, None]:
        index, *kernels = expert
        in_kernel, gate_kernel, out_kernel = (kernel.astype(x.dtype) for kernel in kernels)
        y = activate(mixture.activation, x @ in_kernel, x @ gate_kernel) @ out_kernel
        return out + y * jnp.where(ids == index, weights, 0).sum(-1, keepdims=True).astype(x.dtype), None

    return jax.lax.scan(step, jnp.zeros_like(x), (jnp.arange(mixture.num_experts), *params[:3]))[0]


def value_and_grads(experts: Any, mixture: sl.MixtureOfExperts, ids: jax.Array, *operands: jax.Array) -> Any:
    """Returns the output of a layer and the gradients of its kernels, tokens and weights."""
    params, x, weights, dout = operands
    out, vjp = jax.vjp(lambda *arrays: experts(mixture, *arrays, ids, x.dtype), params, x, weights)
    return out, vjp(dout)


def error_of(mixture: sl.MixtureOfExperts, params: ExpertParams, options: argparse.Namespace, tokens: int) -> float:
    """Returns the largest error of a layer, in values and gradients, as a share of its budget."""
    x, logits, dout = make_inputs(options, tokens)
    weights, ids = mixture.route(logits[0, 0])
    operands = (params, x, weights, dout)

    def computed(experts: Any, operands: Any) -> Any:
        return jax.jit(functools.partial(value_and_grads, experts, mixture))(ids, *operands)

    results = jax.tree.leaves(computed(apply_experts, operands))
    rounded = jax.tree.leaves(computed(dense_experts, operands))
    with jax.enable_x64(True):

        @jax.jit
        def differences(known: jax.Array, *others: jax.Array) -> list[jax.Array]:
            return [jnp.abs(known).max(), *(jnp.abs(x.astype(known.dtype) - known).max() for x in others)]

        wide = jax.tree.map(lambda x: x.astype(jnp.float64), operands)
        exact = jax.tree.leaves(computed(dense_experts, wide))
        shares = []
        for arrays in zip(exact, results, rounded, strict=True):
            largest, error, rounding = map(float, differences(*arrays))
            shares.append(error / (2 * rounding + 2 * float(jnp.finfo(DTYPE).eps) * largest))
    return max(shares)


def run_layer(record: Record, options: argparse.Namespace) -> None:
    """Compares the layer with float64, and measures it with and without its kernel."""
    mixture = sl.MixtureOfExperts(options.experts, options.top_k, features=options.expert_features)
    sets = [make_params(options, seed) for seed in range(SETS)]
    reason = grouped_matmul.unsupported(jnp.zeros(1, DTYPE), jnp.zeros(1, DTYPE))
    record.say(f"the kernel runs: {reason is None}" + (f" ({reason})" if reason else ""))
    record.say("\n| case | ms | without | least | GB of temporaries | without | error |")
    record.say("| --- | --- | --- | --- | --- | --- | --- |")
    errors = {tokens: error_of(mixture, sets[0], options, tokens) for tokens in sorted({tokens for tokens, _ in CASES})}
    for tokens, with_gradients in CASES:
        case = [f"decode {tokens}", f"prompt {tokens * options.top_k}", f"gradients {tokens * options.top_k}"]
        name = case[with_gradients + (tokens > CHAINED)]
        ms, gb = measure_layer(mixture, sets, options, tokens, with_gradients)
        with mock.patch.object(grouped_matmul, "unsupported", lambda *_: "this is measured without it"):
            ms_without, gb_without = measure_layer(mixture, sets, options, tokens, with_gradients)
        least = least_ms(mixture, options, tokens, with_gradients)
        figures = {"ms": ms, "ms_without": ms_without, "least_ms": least, "gb": gb, "gb_without": gb_without}
        record.add(case=name, **figures, error=errors[tokens])
        cells = " | ".join(f"{x:.3g}" for x in figures.values())
        record.say(f"| {name} | {cells} | {errors[tokens]:.2f} |")
    if max(errors.values()) > 1:
        raise SystemExit(f"errors exceed their budgets, as shares by number of tokens: {errors}")


def measure_layer(
    mixture: sl.MixtureOfExperts, sets: list[ExpertParams], options: argparse.Namespace, tokens: int, gradients: bool
) -> tuple[float, float]:
    """Returns the milliseconds of a layer and the GB of temporaries of its program."""
    x, logits, dout = make_inputs(options, tokens)

    def apply(params: ExpertParams, x: jax.Array, logits: jax.Array) -> jax.Array:
        return apply_experts(mixture, params, x, *mixture.route(logits), DTYPE)

    def chain(sets: list[ExpertParams], x: jax.Array, logits: jax.Array) -> jax.Array:
        def one_pass(x: jax.Array, logits: jax.Array) -> tuple[jax.Array, None]:
            for params, layer_logits in zip(sets, logits, strict=True):
                y = apply(params, x, layer_logits).astype(jnp.float32)
                x = (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(DTYPE)
            return x, None

        return jax.lax.scan(one_pass, x, logits)[0]

    def with_gradients(params: ExpertParams, x: jax.Array, logits: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(apply, params, x, logits)
        return out, vjp(dout)

    function, arguments, layers, calls = apply, (sets[0], x, logits[0, 0]), 1, 10
    if tokens <= CHAINED:
        function, arguments, layers = chain, (sets, x, logits), SETS * PASSES
    elif gradients:
        function, arguments = with_gradients, (*arguments, dout)
    compiled = jax.jit(function).lower(*arguments).compile()
    plan: Any = compiled.memory_analysis()
    return 1e3 * seconds(compiled, *arguments, calls=calls) / layers, plan.temp_size_in_bytes / 1e9


def least_ms(mixture: sl.MixtureOfExperts, options: argparse.Namespace, tokens: int, gradients: bool) -> float:
    """Returns the time that a layer takes at least, by the bytes of the selected experts and by products."""
    logits = make_inputs(options, tokens)[1].reshape(-1, tokens, options.experts)
    selected = statistics.mean(len(np.unique(mixture.route(layer)[1])) for layer in logits)
    size, passes = 3 * options.features * options.expert_features, 3 if gradients else 1
    read_ms = 1e-6 * passes * selected * size * jnp.dtype(DTYPE).itemsize / options.bandwidth
    return max(read_ms, 1e-9 * passes * 2 * tokens * options.top_k * size / options.tflops)


# --- a model ---------------------------------------------------------------------------------------------------------


def make_model(options: argparse.Namespace) -> sl.SparseTransformer:
    """Makes the model in bfloat16."""
    mixture = sl.MixtureOfExperts(options.experts, options.top_k, features=options.expert_features)
    sizes = {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
    settings = {"positions": "rope", "norm": "rms", "normalize_qk": True, "use_bias": False, "mlp": mixture}
    settings |= {"seq_len": options.prompt + 2 * options.steps, "param_dtype": DTYPE, "dtype": DTYPE, "rope_theta": 1e6}
    layers = {"features": options.features, "num_layers": options.layers, "patterns": "causal"}
    return sl.SparseTransformer(options.vocab, **layers, **sizes, **settings, rngs=nnx.Rngs(0))


def bytes_of_step(state: Any, caches: Any, batch: int, options: argparse.Namespace) -> int:
    """Counts the bytes that a step must read: no embedding, and kernels of the selected experts."""
    total = sum(x.nbytes for x in jax.tree.leaves(caches))
    for path, param in nnx.to_flat_state(state):
        share = 1.0
        if path[0] == "token_embedding":
            share = 0.0
        elif str(path[-2]).startswith("experts_"):
            share = min(batch * options.top_k, options.experts) / options.experts
        total += int(share * param.get_value().nbytes)
    return total


def measure_model(graph: Any, state: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of a prompt and of a step, and the bytes of a step, for one size of batch."""
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
    size = bytes_of_step(state, caches, batch, options)
    prompt = {"prompt_ms": 1e3 * seconds(compiled, state, tokens), "prompt_gb": plan.temp_size_in_bytes / 1e9}
    return {"batch": batch, "step_ms": 1e3 * step_s, "gb": size / 1e9} | prompt


def run_model(record: Record, options: argparse.Namespace) -> None:
    """Measures decoding and prompts of the model."""
    graph, state = random_weights(lambda: make_model(options))
    size = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e9
    record.say(f"{options.layers} layers of {options.experts} experts, {size:.2f} GB in bfloat16\n")
    record.say("| batch | tokens/s | ms a step | GB a step | least ms | prompt, tokens/s | prompt, GB of temporaries |")
    record.say("| --- | --- | --- | --- | --- | --- | --- |")
    for batch in options.batch:
        row = measure_model(graph, state, batch, options)
        least = 1e3 * row["gb"] / options.bandwidth
        record.add(**row, least_ms=least)
        cells = [f"{1e3 * batch / row['step_ms']:.0f}", f"{row['step_ms']:.3g}", f"{row['gb']:.3g}", f"{least:.3g}"]
        cells += [f"{1e3 * batch * options.prompt / row['prompt_ms']:.0f}", f"{row['prompt_gb']:.3g}"]
        record.say(f"| {batch} | {' | '.join(cells)} |")


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=["layer", "model"])
    sizes = {"layers": 48, "features": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "top_k": 8}
    sizes |= {"expert_features": 768, "vocab": 151936, "prompt": 2048, "steps": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--bandwidth", type=float, default=4800.0, help="of the card, in GB/s; default: an H200's")
    parser.add_argument("--tflops", type=float, default=989.0, help="of the card in bfloat16; default: an H200's")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(record.heading + "\n")
    try:
        (run_layer if options.subject == "layer" else run_model)(record, options)
    finally:  # what was measured before an error, too
        record.write()


if __name__ == "__main__":
    main()
