"""Attention on a graph: the nodes of an icosahedral mesh of the sphere, each of which sees the nodes near it.

    python -m benchmarks.graphs --record graphs.json

Weather models attend on such meshes. 6 subdivisions have 40,962 nodes; those within 32 edges of a node are 7.7 % of
all. Nodes are numbered by `sl.spatial_order`, or with ``--order rcm`` by SciPy's reverse Cuthill-McKee algorithm.
Results of some queries are compared with float64 before anything is timed. "Dense" is attention to all nodes: cuDNN's
on a GPU.
"""

import argparse
import time
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import reverse_cuthill_mckee

import sparse_layers as sl

from .record import Record, add_option

CHECKED = 32  # queries


def icosahedron() -> tuple[np.ndarray, np.ndarray]:
    """Returns the 12 vertices [12, 3] and the 20 faces [20, 3]."""
    golden = (1 + 5**0.5) / 2
    corners = [np.roll([0, a, b * golden], axis) for axis in range(3) for a in (-1, 1) for b in (-1, 1)]
    vertices = np.array(corners) / np.linalg.norm(corners[0])
    near = vertices @ vertices.T > 0.4  # neighbours, and itself
    faces = [
        (a, b, c)
        for a in range(12)
        for b in range(a + 1, 12)
        for c in range(b + 1, 12)
        if near[a, b] and near[b, c] and near[a, c]
    ]
    return vertices, np.array(faces)


def mesh(subdivisions: int, by: str) -> tuple[Any, np.ndarray]:
    """Returns the edges of the mesh, each both ways, and its vertices; a subdivision cuts each face in four.

    Nodes are in the order "rcm" or "spatial".
    """
    vertices, faces = icosahedron()
    for _ in range(subdivisions):
        sides = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1)
        edges, side = np.unique(sides, axis=0, return_inverse=True)
        middles = vertices[edges].sum(1)
        middle = (len(vertices) + side).reshape(-1, 3)
        vertices = np.concatenate([vertices, middles / np.linalg.norm(middles, axis=1, keepdims=True)])
        (a, b, c), (ab, bc, ca) = faces.T, middle.T
        corners = [(a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca)]
        faces = np.concatenate([np.stack(corner, axis=1) for corner in corners])
    row, column = faces[:, [0, 1, 2]].ravel(), faces[:, [1, 2, 0]].ravel()
    both = np.r_[row, column], np.r_[column, row]
    edges: Any = scipy.sparse.csr_array((np.ones(len(both[0]), bool), both), shape=(len(vertices),) * 2)
    if by == "rcm":
        order = reverse_cuthill_mckee(scipy.sparse.csr_matrix(edges), symmetric_mode=True)
    else:
        order = sl.spatial_order(vertices)
    return edges[order][:, order], vertices[order]


def within(edges: Any, hops: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns indptr and indices of the nodes within ``hops`` edges of each node, itself among them.

    A node's set is one bit for each node; a hop joins the sets of neighbours.
    """
    nodes = edges.shape[0]
    degree = int(np.diff(edges.indptr).max())
    neighbours = np.tile(np.arange(nodes)[:, None], degree)
    slot = np.arange(edges.indices.size) - np.repeat(edges.indptr[:-1], np.diff(edges.indptr))
    neighbours[np.repeat(np.arange(nodes), np.diff(edges.indptr)), slot] = edges.indices
    node = np.arange(nodes)
    sets = np.zeros((nodes, -(-nodes // 8)), np.uint8)
    sets[node, node // 8] = 1 << (node % 8)
    for _ in range(hops):
        joined = sets.copy()
        for column in neighbours.T:
            np.bitwise_or(joined, sets[column], out=joined)
        sets = joined
    counts, indices = [np.zeros(1, np.int64)], []
    for first in range(0, nodes, 1024):
        rows, keys = np.nonzero(np.unpackbits(sets[first : first + 1024], axis=1, count=nodes, bitorder="little"))
        counts.append(np.bincount(rows, minlength=min(1024, nodes - first)))
        indices.append(keys.astype(np.int32))
    return np.cumsum(np.concatenate(counts)), np.concatenate(indices)


def million() -> tuple[float, float]:
    """Returns the seconds to read and plan a graph of a million nodes with 30 neighbours each, and the peak GB."""
    nodes, rng = 10**6, np.random.default_rng(0)
    near = np.arange(nodes, dtype=np.int32)[:, None] + rng.integers(-2000, 2000, (nodes, 30), np.int32)
    indptr, indices = np.arange(0, 30 * nodes + 1, 30), np.clip(near, 0, nodes - 1, out=near).ravel()
    start = time.perf_counter()
    sl.make_plan(sl.from_csr(indptr, indices), nodes)
    seconds = time.perf_counter() - start
    tracemalloc.start()
    sl.make_plan(sl.from_csr(indptr, indices[::-1].copy()), nodes)  # another graph, as plans are cached
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 1e9


def layers(attend: Any, count: int) -> Any:
    """Returns a function of ``count`` attention steps with residual connections, and its gradient."""

    def forward(x):
        for _ in range(count):
            x = x + attend(x, x, x)
        return x

    def gradient(x):
        return jax.grad(lambda x: (forward(x).astype(jnp.float32) ** 2).sum())(x)

    return forward, gradient


def milliseconds(function: Any, x: jax.Array) -> tuple[float, float]:
    """Returns the median time of a compiled function, in ms, and the GB of its memory plan."""
    compiled = jax.jit(function).lower(x).compile()
    plan: Any = compiled.memory_analysis()
    size = plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes
    jax.block_until_ready(compiled(x))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times)), size / 1e9


def largest_error(graph: sl.Graph, x: jax.Array, out: jax.Array) -> float:
    """Returns the largest difference from float64 among some queries, as a share of the largest output."""
    queries = np.linspace(0, x.shape[1] - 1, CHECKED).astype(int)
    wide, errors, most = np.asarray(x[0], np.float64), [], 0.0
    for q in queries:
        keys = graph.indices[graph.indptr[q] : graph.indptr[q + 1]]
        logits = np.einsum("nh,snh->ns", wide[q], wide[keys]) / np.sqrt(x.shape[-1])
        weights = np.exp(logits - logits.max(1, keepdims=True))
        expected = np.einsum("ns,snh->nh", weights / weights.sum(1, keepdims=True), wide[keys])
        errors.append(np.abs(np.asarray(out[0, q], np.float64) - expected).max())
        most = max(most, np.abs(expected).max())
    return float(max(errors) / most)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subdivisions", type=int, default=6)
    parser.add_argument("--hops", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--order", default="spatial", choices=["spatial", "rcm"])
    parser.add_argument("--dtype", default="bfloat16")
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(record.heading + "\n")
    seconds, peak = million()
    record.say(f"10^6 nodes with 30 neighbours each: read and planned in {seconds:.1f} s, {peak:.2f} GB\n")
    edges, _ = mesh(options.subdivisions, options.order)
    start = time.perf_counter()
    indptr, indices = within(edges, options.hops)
    made = time.perf_counter()
    graph = sl.from_csr(indptr, indices)
    nodes, pairs = edges.shape[0], indices.size
    plan = sl.make_plan(graph, nodes)
    planned = time.perf_counter()
    record.say(f"{nodes} nodes within {options.hops} edges: {pairs} pairs, {100 * pairs / nodes**2:.1f} % of all")
    record.say(f"neighbours in {made - start:.1f} s, graph and plan in {planned - made:.1f} s")
    record.say(f"blocks in {options.order} order: {100 * plan.density(0):.1f} % of all")
    record.add(pairs=pairs / nodes**2, blocks=plan.density(0), order=options.order, plan_s=planned - made)
    record.say(f"{options.layers} layers of {options.heads} heads of {options.head_size}, {options.dtype}\n")
    shape: Any = (1, nodes, options.heads, options.head_size)
    x = jax.random.normal(jax.random.key(0), shape, jnp.dtype(options.dtype))
    error = largest_error(graph, x, jax.jit(lambda x: sl.block_sparse_attention(x, x, x, plan))(x))
    record.say(f"largest difference from float64: {error:.1e} of the largest output\n")
    assert error < (2e-2 if x.dtype == jnp.bfloat16 else 1e-4), error
    record.say("| | forward, ms | GB | forward + backward, ms | GB |\n| --- | --- | --- | --- | --- |")
    contenders = {"graph": plan, "dense": "bidirectional"}
    for name, mask in contenders.items():
        functions = layers(lambda q, k, v, mask=mask: sl.block_sparse_attention(q, k, v, mask), options.layers)
        (forward, forward_gb), (both, both_gb) = (milliseconds(function, x) for function in functions)
        record.add(pattern=name, forward_ms=forward, forward_gb=forward_gb, both_ms=both, both_gb=both_gb)
        record.say(f"| {name} | {forward:.3g} | {forward_gb:.2f} | {both:.3g} | {both_gb:.2f} |")
    record.write()


if __name__ == "__main__":
    main()
