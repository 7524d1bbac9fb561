"""GenCast's processor on a GPU: a transformer on an icosahedral mesh whose nodes attend to nodes within 32 edges.

    python -m benchmarks.weather --record weather.json

The shape is that of the 0.25 degree model: 6 subdivisions (40,962 nodes), 16 layers of width 512, 4 heads of 128, 2,048
hidden features, bfloat16, one sample. Weights are random. A layer normalizes without parameters, scales and shifts by
a projection of 16 features of the noise level, attends, and does the same before two dense layers with GELU.

Contenders have the same weights and compute the same function:

- "graph": `sl.block_sparse_attention` with `sl.from_csr` of the mask, nodes in the host's order, which is SciPy's
  reverse Cuthill-McKee order;
- "graph, sorted": the same, and each layer sorts q, k and v by `sl.spatial_order` and its result back;
- "three diagonals": dense products of blocks as large as the band with themselves and their two neighbours, as the
  host's `triblockdiag_mha` has them. Here the mask is bool and an argument; the host's is int32 and a constant.
- "dense": `jax.nn.dot_product_attention` with cuDNN and without a mask. It computes another function, all nodes.

"recomputed" means `jax.checkpoint` around each layer. Attention is checked against float64 on a small mesh first, with
gradients; on the large mesh, some queries of both graphs. GB are those of the compiled program's memory plan.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl

from .graphs import CHECKED, largest_error, mesh, within
from .record import Record, add_option
from .steps import check_attention, forward_backward, measure, reserve_memory

Attention = Callable[..., jax.Array]
NOISE_FEATURES = 16  # of the encoded noise level


# --- attention -------------------------------------------------------------------------------------------------------


def graph_attention(graph: sl.Graph, order: np.ndarray | None = None) -> Attention:
    """Returns attention over a graph, for arrays in its order, or in an order of which ``order`` sorts nodes."""
    if order is None:
        plan = sl.make_plan(graph, graph.shape[0])
        return lambda q, k, v: sl.block_sparse_attention(q, k, v, plan)
    plan, back = sl.make_plan(permuted(graph, order), graph.shape[0]), np.argsort(order)
    return lambda q, k, v: sl.block_sparse_attention(q[:, order], k[:, order], v[:, order], plan)[:, back]


def permuted(graph: sl.Graph, order: np.ndarray) -> sl.Graph:
    """Returns the graph with nodes in another order: node i is node ``order[i]`` of the argument."""
    counts = np.diff(graph.indptr)[order]
    starts = np.r_[0, np.cumsum(counts)]
    edges = np.arange(starts[-1]) + np.repeat(graph.indptr[order] - starts[:-1], counts)
    return sl.from_csr(starts, np.argsort(order).astype(np.int32)[graph.indices[edges]])


def band(graph: sl.Graph) -> int:
    """Returns the largest distance of two neighbours in the order of the nodes, plus one: the size of a block."""
    rows = np.arange(graph.shape[0])[np.diff(graph.indptr) > 0]
    first, last = graph.indices[graph.indptr[rows]], graph.indices[graph.indptr[rows + 1] - 1]
    return int(max((rows - first).max(), (last - rows).max())) + 1


def diagonals(graph: sl.Graph, size: int) -> np.ndarray:
    """Returns the blocks on three diagonals, bool [blocks, 3, size, size]: itself, the next and the previous one."""
    blocks = -(-graph.shape[0] // size)
    masks = np.zeros((blocks, 3, size, size), bool)
    for block in range(blocks):
        begin, end = block * size, min((block + 1) * size, graph.shape[0])
        for row in range(begin, end):
            keys = graph.indices[graph.indptr[row] : graph.indptr[row + 1]]
            masks[block, (keys // size - block) % 3, row - begin, keys % size] = True
    return masks


def three_diagonals(q: jax.Array, k: jax.Array, v: jax.Array, masks: jax.Array) -> jax.Array:
    """Attention [B, T, N, H] within a band by dense products of blocks; softmax in float32."""
    (batch, nodes, heads, features), (blocks, _, size, _) = q.shape, masks.shape

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, blocks * size - nodes), (0, 0), (0, 0))).reshape(batch, blocks, size, heads, -1)

    def neighbours(x: jax.Array) -> list[jax.Array]:  # itself, the next and the previous block of each
        x = jnp.pad(split(x), ((0, 0), (1, 1), (0, 0), (0, 0), (0, 0)))
        return [x[:, 1:-1], x[:, 2:], x[:, :-2]]

    logits = []
    for i, keys in enumerate(neighbours(k)):
        products = jnp.einsum("bcqnh,bcknh->bcnqk", split(q), keys) * features**-0.5
        logits.append(jnp.where(masks[None, :, i, None], products, -1e30).astype(jnp.float32))
    highest = functools.reduce(jnp.maximum, [jax.lax.stop_gradient(x.max(-1, keepdims=True)) for x in logits])
    weights = [jnp.exp(x - highest) for x in logits]
    total = sum(x.sum(-1, keepdims=True) for x in weights)
    products = [
        jnp.einsum("bcnqk,bcknh->bcqnh", (p / total).astype(v.dtype), values)
        for p, values in zip(weights, neighbours(v), strict=True)
    ]
    return sum(products[1:], products[0]).reshape(batch, blocks * size, heads, -1)[:, :nodes]


def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention to all nodes: cuDNN's on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation)


# --- the processor ---------------------------------------------------------------------------------------------------


def random_weights(options: argparse.Namespace) -> dict[str, jax.Array]:
    """Returns the weights of all layers, stacked on their first axis."""
    width, hidden = options.width, options.hidden
    shapes = {
        "q": (width, width),
        "k": (width, width),
        "v": (width, width),
        "out": (width, width),
        "out_bias": (width,),
        "condition_attention": (NOISE_FEATURES, 2 * width),
        "condition_mlp": (NOISE_FEATURES, 2 * width),
        "up": (width, hidden),
        "up_bias": (hidden,),
        "down": (hidden, width),
        "down_bias": (width,),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (options.layers, *shape), options.dtype) * (shape[0] ** -0.5)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def conditioned(x: jax.Array, noise: jax.Array, kernel: jax.Array) -> jax.Array:
    """Normalizes features, then scales and shifts them by a projection of the noise level."""
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    scale, shift = jnp.split((noise @ kernel)[:, None], 2, axis=-1)
    return wide.astype(x.dtype) * (1 + scale) + shift


def processor(attend: Callable[..., jax.Array], options: argparse.Namespace, recompute: bool) -> Callable[..., Any]:
    """Returns a function of weights, nodes [B, T, width], noise [B, 16] and what attention takes beside q, k and v."""

    def layer(x: jax.Array, weights: dict[str, jax.Array], noise: jax.Array, *extra: jax.Array) -> jax.Array:
        normalized = conditioned(x, noise, weights["condition_attention"])
        heads = (*x.shape[:2], options.heads, -1)
        q, k, v = ((normalized @ weights[name]).reshape(heads) for name in "qkv")
        x = x + attend(q, k, v, *extra).reshape(x.shape) @ weights["out"] + weights["out_bias"]
        hidden = jax.nn.gelu(conditioned(x, noise, weights["condition_mlp"]) @ weights["up"] + weights["up_bias"])
        return x + hidden @ weights["down"] + weights["down_bias"]

    step = jax.checkpoint(layer) if recompute else layer

    def apply_layers(weights: Any, x: jax.Array, noise: jax.Array, *extra: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (step(x, layer, noise, *extra), None), x, weights)[0]

    return apply_layers


# --- checks ----------------------------------------------------------------------------------------------------------


def check_small(record: Record, options: argparse.Namespace) -> None:
    """Compares every attention with float64 on a mesh of 642 nodes, or of 162 on small command lines."""
    edges, vertices = mesh(min(3, options.subdivisions), "rcm")
    graph = sl.from_csr(*within(edges, min(4, options.hops)))
    nodes = graph.shape[0]
    keys = jax.random.split(jax.random.key(1), 4)
    arrays = [jax.random.normal(x, (1, nodes, 2, options.width // options.heads), options.dtype) for x in keys]
    allowed = np.zeros((nodes, nodes), bool)
    allowed[np.repeat(np.arange(nodes), np.diff(graph.indptr)), graph.indices] = True
    masks = jnp.asarray(diagonals(graph, band(graph)))
    contenders: dict[str, tuple[Attention, np.ndarray]] = {
        "graph": (graph_attention(graph), allowed),
        "graph, sorted": (graph_attention(graph, sl.spatial_order(vertices)), allowed),
        "three diagonals": (lambda q, k, v: three_diagonals(q, k, v, masks), allowed),
        "dense": (dense, np.ones((1, 1), bool)),
    }
    for name, (attend, pairs) in contenders.items():
        share = check_attention(attend, arrays, pairs)
        record.say(f"{name}: values and gradients on {nodes} nodes within {share:.2f} of the budget")
        record.add(check=name, nodes=nodes, share_of_budget=share)


# --- measurements ----------------------------------------------------------------------------------------------------

STEPS = {"forward": (False, False), "both": (True, False), "both_recomputed": (True, True)}  # backward, recompute


def row(record: Record, options: argparse.Namespace, name: str, attend: Attention, *extra: jax.Array) -> None:
    """Measures the processor with one attention, which takes ``extra`` arrays beside q, k and v."""
    keys = jax.random.split(jax.random.key(2), 3)
    x, dout = (jax.random.normal(key, (1, options.nodes, options.width), options.dtype) for key in keys[:2])
    noise = jax.random.normal(keys[2], (1, NOISE_FEATURES), options.dtype)
    weights, cells = random_weights(options), list[str]()
    for step, (backward, recompute) in STEPS.items():
        if time.monotonic() > options.deadline:
            cells += ["no time left", "-"]
            continue
        apply = processor(attend, options, recompute)

        def both(weights, x, noise, dout, *extra, apply=apply):
            return forward_backward(lambda weights, x: apply(weights, x, noise, *extra), 2)(weights, x, dout)

        measured = (
            measure(both, weights, x, noise, dout, *extra) if backward else measure(apply, weights, x, noise, *extra)
        )
        cells += measured.cells()
        record.add(attention=name, step=step, **measured._asdict())
    record.say(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subdivisions", type=int, default=6)
    parser.add_argument("--hops", type=int, default=32)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=int, default=420, help="after which no measurement begins")
    add_option(parser)
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds
    reserve_memory()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(record.heading + "\n")
    check_small(record, options)
    edges, vertices = mesh(options.subdivisions, "rcm")
    graph = sl.from_csr(*within(edges, options.hops))
    options.nodes, pairs, size = graph.shape[0], graph.indices.size, band(graph)
    order = sl.spatial_order(vertices)
    attentions: dict[str, Attention] = {"graph": graph_attention(graph), "graph, sorted": graph_attention(graph, order)}
    shape: Any = (1, options.nodes, options.heads, options.width // options.heads)
    x = jax.random.normal(jax.random.key(0), shape, options.dtype)
    for name, attend in attentions.items():
        error = largest_error(graph, x, jax.jit(attend)(x, x, x))
        record.say(
            f"{name}: {CHECKED} queries of {options.nodes} differ from float64 by {error:.1e} of the largest output"
        )
        assert error < (2e-2 if x.dtype == jnp.bfloat16 else 1e-4), error
    record.say(
        f"\n{options.nodes} nodes within {options.hops} edges: {100 * pairs / options.nodes**2:.2f} % of all pairs"
    )
    record.say(f"three diagonals: {-(-options.nodes // size)} blocks of {size} nodes")
    sizes = f"{options.layers} layers of width {options.width}, {options.heads} heads, {options.hidden} hidden features"
    record.say(f"{sizes}, {options.dtype}, one sample\n")
    record.add(nodes=options.nodes, pairs=pairs / options.nodes**2, block=size)
    columns = ["forward, ms", "GB", "forward + backward, ms", "GB", "recomputed, ms", "GB"]
    record.say(f"| attention | {' | '.join(columns)} |\n| {' | '.join(['---'] * 7)} |")
    for name, attend in attentions.items():
        row(record, options, name, attend)
    row(record, options, "dense", dense)
    row(record, options, "three diagonals", three_diagonals, jnp.asarray(diagonals(graph, size)))
    record.write()


if __name__ == "__main__":
    main()
