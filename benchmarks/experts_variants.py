"""One layer of experts with the sizes of Qwen3-30B-A3B, computed in several ways: milliseconds a layer.

    PYTHONPATH=$PWD python -u benchmarks/experts_variants.py

Decoding chains 16 layers of 4 sets of weights in one program. A prompt is one layer, forward, and with its gradients.
``least`` is the greater of the times to read the selected experts once and to multiply.
"""

import argparse
import contextlib
import functools
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from sparse_layers.modules import experts_core
from sparse_layers.modules.activations import activate
from sparse_layers.modules.experts_core import ExpertParams
from sparse_layers.ops.kernels.experts_gpu import grouped_matmul as grouped

E, K, F, H = 128, 8, 2048, 768
BANDWIDTH, FLOPS = 4.8e12, 7.9e14
MIXTURE = sl.MixtureOfExperts(E, K, features=H)
BF16 = jnp.bfloat16
START, SECONDS = time.perf_counter(), 100  # no way begins later


def make_params(seed: int) -> ExpertParams:
    @jax.jit
    def make(key):
        keys = jax.random.split(key, 3)
        shapes = (E, F, H), (E, F, H), (E, H, F)
        return ExpertParams(*((0.03 * jax.random.normal(k, s, jnp.float32)).astype(BF16) for k, s in zip(keys, shapes, strict=True)))

    return make(jax.random.key(seed))


# --- ways: each replaces attributes of the package while a program is traced -----------------------------------------

XLA = (grouped, "unsupported", lambda *_: "another way is measured")


def tilings(**attributes):
    """Replaces FEW_ROWS, GRADIENT, or with ``many`` all of MANY_ROWS."""
    if "many" in attributes:
        attributes["MANY_ROWS"] = dict.fromkeys((16, 32, 64, 128), attributes.pop("many"))
    return [(grouped, name, value) for name, value in attributes.items()]


def gathered_with(matmul):
    return [XLA, (experts_core, "_gathered_matmul", matmul)]


def unrolled_sum(x, kernel, expert, unroll, splits):
    """Several loads of a thread are in flight, and a sum has several blocks of threads."""
    rows, (_, features, columns) = len(x), kernel.shape
    kernel = kernel.reshape(E, splits, unroll, features // unroll // splits, columns)
    x = x.astype(jnp.float32).reshape(rows, splits, unroll, -1)
    split = jnp.arange(splits)[None, :]
    terms = [x[:, :, i, :, None] * kernel.at[expert[:, None], split, i].get(mode="clip").astype(jnp.float32) for i in range(unroll)]
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    partial = terms[0].sum(2)  # [M, splits, columns]
    if splits > 1:
        partial = jax.lax.optimization_barrier(partial)
    return partial.sum(1).astype(BF16)


def stored(x, kernel, expert):
    """A batched product with gathered kernels, which are stored."""
    kernels = jax.lax.optimization_barrier(kernel.at[expert].get(mode="clip"))
    return jnp.einsum("mf,mfh->mh", x, kernels, preferred_element_type=jnp.float32).astype(x.dtype)


def rounds(capacity):
    """Batched products of the next ``capacity`` rows of each expert, until none are left; no kernel is copied."""

    def way(mixture, params, x, weights, ids, dtype):
        del mixture, dtype
        rows, size = ids.size, capacity(ids.size)
        expert = ids.reshape(-1)
        order = jnp.argsort(expert)
        inverse = jnp.argsort(order)
        ends = (expert[:, None] <= jnp.arange(E)).sum(0, dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        count = (ends - starts).max()

        def slots(i):
            slot = starts[:, None] + i * size + jnp.arange(size)
            return jnp.where(slot < ends[:, None], slot, rows)

        def mlp(params, x):  # [E, C, F]
            product = functools.partial(jnp.einsum, preferred_element_type=BF16)
            hidden = product("ecf,efh->ech", x, params.in_kernel)
            gate = product("ecf,efh->ech", x, params.gate_kernel)
            return product("ech,ehf->ecf", activate("swiglu", hidden, gate), params.out_kernel)

        def load(x, slot):
            return x.at[slot].get(mode="fill", fill_value=0)

        @jax.custom_vjp
        def compute(params, x, starts_):
            def body(i, out):
                slot = slots(i)
                return out.at[slot].set(mlp(params, load(x, slot)), mode="drop")

            return jax.lax.fori_loop(0, -(-count // size), body, jnp.zeros_like(x))

        def forward(params, x, starts_):
            return compute(params, x, starts_), (params, x)

        def backward(residuals, dy):
            params, x = residuals

            def body(i, carry):
                dparams, dx = carry
                slot = slots(i)
                dp, dx_tile = jax.vjp(mlp, params, load(x, slot))[1](load(dy, slot))
                dparams = jax.tree.map(jnp.add, dparams, dp)
                return dparams, dx.at[slot].set(dx_tile, mode="drop")

            zeros = jax.tree.map(jnp.zeros_like, (params, x))
            return *jax.lax.fori_loop(0, -(-count // size), body, zeros), None

        compute.defvjp(forward, backward)
        repeated = jnp.repeat(x, K, axis=0)
        y = compute(params, repeated.at[order].get(unique_indices=True), starts.astype(jnp.float32))
        y = y.at[inverse].get(unique_indices=True).astype(jnp.float32) * weights.reshape(-1, 1)
        return y.reshape(-1, K, F).sum(1).astype(BF16)

    return [(experts_core, "apply_experts", way)]


# --- measurement -----------------------------------------------------------------------------------------------------


def milliseconds(function: Any, *arguments: Any, calls: int = 10) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        results = [function(*arguments) for _ in range(calls)]
        jax.block_until_ready(results[-1])
        times.append((time.perf_counter() - start) / calls)
        del results
    return 1e3 * statistics.median(times)


def apply(params, x, logits):
    return experts_core.apply_experts(MIXTURE, params, x, *MIXTURE.route(logits), BF16)


def report(case: str, ways: dict[str, Any], function: Any, arguments: Any, layers: int, least: float) -> None:
    known = None
    for name, patches in ways.items():
        begin = time.perf_counter()
        line = f"{case:20} {name:24}"
        if begin - START > SECONDS:
            print(line, "not run: out of time", flush=True)
            continue
        try:
            with contextlib.ExitStack() as stack:
                for owner, attribute, value in patches:
                    stack.enter_context(mock.patch.object(owner, attribute, value))
                compiled = jax.jit(functools.partial(function)).lower(*arguments).compile()
            temporaries = compiled.memory_analysis().temp_size_in_bytes / 1e9
            if temporaries > 60:
                print(line, f"{temporaries:.1f} GB of temporaries: not run", flush=True)
                continue
            result = jax.block_until_ready(compiled(*arguments))
            compiled_s = time.perf_counter() - begin
            ms = milliseconds(compiled, *arguments) / layers
        except Exception as error:  # the other ways are worth their measurement
            print(line, f"failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue

        def difference(a, b):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            return float(jnp.abs(a - b).max() / jnp.abs(b).max())

        known = result if known is None else known
        differs = " ".join(f"{x:.0e}" for x in jax.tree.leaves(jax.tree.map(difference, result, known)))
        print(
            f"{line} {ms:8.4f} ms, least {least:.4f}, {temporaries:8.4f} GB, differs {differs} "
            f"({compiled_s:.1f} s, at {time.perf_counter() - START:.0f} s)",
            flush=True,
        )


def decode(sets: list[ExpertParams], batch: int, ways: dict[str, Any]) -> None:
    x = jax.random.normal(jax.random.key(9), (batch, F), jnp.float32).astype(BF16)
    logits = jax.random.normal(jax.random.key(8), (16, batch, E), jnp.float32)

    def chain(sets, x, logits):
        def step(x, logits):
            for params, layer_logits in zip(sets, logits, strict=True):
                y = apply(params, x, layer_logits)
                x = (y / jnp.maximum(jnp.abs(y).max(), 1e-3).astype(y.dtype)).astype(BF16)
            return x, None

        return jax.lax.scan(step, x, logits.reshape(4, 4, batch, E))[0]

    selected = [len({*np.asarray(jax.lax.top_k(x, K)[1]).ravel()}) for x in logits]
    least = 1e3 * statistics.mean(selected) * 3 * F * H * 2 / BANDWIDTH
    report(f"decode {batch}", ways, chain, (sets, x, logits), 16, least)


def prompt(params: ExpertParams, rows: int, ways: dict[str, Any], backward: bool = False, skew: float = 0) -> None:
    keys = jax.random.split(jax.random.key(7), 4)
    x = jax.random.normal(keys[0], (rows // K, F), jnp.float32).astype(BF16)
    logits = jax.random.normal(keys[1], (rows // K, E)) + skew * jax.random.normal(keys[3], (E,))
    dout = jax.random.normal(keys[2], x.shape, jnp.float32).astype(BF16)

    def gradients(params, x, logits, dout):
        out, vjp = jax.vjp(apply, params, x, logits)
        return out, vjp(dout)

    reads = 3 * E * F * H * 2 / BANDWIDTH
    least = 1e3 * max(reads * (4 if backward else 1), 6 * rows * F * H * (3 if backward else 1) / FLOPS)
    case = f"{'gradients' if backward else 'prompt'} {rows}{' skewed' if skew else ''}"
    arguments = (params, x, logits, dout) if backward else (params, x, logits)
    report(case, ways, gradients if backward else apply, arguments, 1, least)


def main() -> None:
    """Measures all cases."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(jax.__version__, jax.devices()[0].device_kind, "'differs': from the first way of a case", flush=True)
    print("kernels unsupported:", grouped.unsupported(jnp.zeros(1, BF16)), flush=True)
    sets = [make_params(seed) for seed in range(4)]
    split_sum = gathered_with(functools.partial(unrolled_sum, unroll=8, splits=8))
    today, triton = [XLA], []
    few = {"today": today, "sum, 8 loads, 8 splits": split_sum, "triton": triton}
    few |= {"triton 128x64 s5": tilings(FEW_ROWS=(16, 128, 64, 4, 5))}
    few |= {"triton 64x256 s3": tilings(FEW_ROWS=(16, 64, 256, 4, 3))}
    decode(sets, 1, few)
    decode(sets, 4, few)
    params = sets[0]
    mean, two = rounds(lambda rows: max(16, rows // E)), rounds(lambda rows: max(16, 2 * rows // E))
    many = {"today": today, "rounds of mean": mean, "triton": triton}
    tile = {"triton 64x128x64 w4 s4": tilings(many=(64, 128, 64, 4, 4))}
    wide = {"triton 128x256x64 w8 s3": tilings(many=(128, 256, 64, 8, 3))}
    prompt(params, 4096, many | tile)
    prompt(params, 16384, many | {"rounds of two means": two} | tile | wide)
    prompt(params, 4096, many, backward=True)
    without_today = {name: way for name, way in many.items() if name != "today"}
    prompt(params, 16384, without_today, backward=True)
    prompt(params, 131072, without_today | wide)
    prompt(params, 131072, without_today, backward=True)
    prompt(params, 16384, without_today, skew=1.0)
    extra = {"triton": triton, "no splits": [(grouped, "_splits", lambda *_: 1)]}
    extra |= {"sum, 8 loads": gathered_with(functools.partial(unrolled_sum, unroll=8, splits=1))}
    decode(sets, 1, extra | {"stored gather, dot": gathered_with(stored)})
    dkernel = {"triton": triton, "dkernel s4": tilings(GRADIENT=(64, 128, 128, 8, 4))}
    prompt(params, 131072, dkernel | {"dkernel 64x256": tilings(GRADIENT=(64, 256, 128, 8, 3))}, backward=True)
    print(f"done at {time.perf_counter() - START:.0f} s", flush=True)


if __name__ == "__main__":
    main()
