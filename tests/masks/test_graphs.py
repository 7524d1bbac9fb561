"""Masks from graphs: exact, planned by their edges, and made of SciPy's matrices and of lazy masks."""

import tracemalloc

import numpy as np
import pytest
import scipy.sparse

import sparse_layers as sl
from sparse_layers.masks import graphs
from sparse_layers.ops.planning.blocks import active_blocks
from tests.masks.test_masks import exact_states

RNG = np.random.default_rng(0)


def random_graph(queries, keys, density):
    dense = RNG.random((queries, keys)) < density
    dense[4 : queries // 2, 6 : keys // 2] = True
    return dense, sl.from_csr(scipy.sparse.csr_array(dense))


def neighbours(tokens, edges, reach):
    """A graph whose edges lead to tokens near their own."""
    indices = np.arange(tokens)[:, None] + RNG.integers(-reach, reach, (tokens, edges))
    return np.arange(0, tokens * edges + 1, edges), np.clip(indices, 0, tokens - 1).ravel()


@pytest.mark.parametrize(("queries", "keys", "density"), [(70, 70, 0.05), (33, 90, 0.3), (90, 33, 0.0), (5, 5, 1.0)])
def test_a_graph_allows_its_edges(queries, keys, density):
    dense, graph = random_graph(queries, keys, density)
    assert graph.shape == dense.shape and not graph.computable
    np.testing.assert_array_equal(graph.dense(queries, keys), dense)
    larger = graph.dense(queries + 9, keys + 4)
    np.testing.assert_array_equal(larger, np.pad(dense, ((0, 9), (0, 4))))
    assert not graph(np.array([-1, 0]), np.array([0, -1])).any()


@pytest.mark.parametrize("block", [(8, 8), (16, 4), (7, 10), (128, 128)])
def test_blocks_of_a_graph_are_exact(block):
    dense, graph = random_graph(101, 75, 0.02)
    rows, columns = -(-101 // block[0]), -(-75 // block[1])
    padded = np.pad(dense, ((0, rows * block[0] - 101), (0, columns * block[1] - 75)))
    q, k = np.repeat(np.arange(rows), columns) * block[0], np.tile(np.arange(columns), rows) * block[1]
    expected = exact_states(padded, (q, q + block[0] - 1, k, k + block[1] - 1))
    grid = active_blocks(graph, rows, columns, *block)
    actual = np.zeros((rows, columns), np.int8)
    actual[grid.rows, grid.columns] = grid.states
    np.testing.assert_array_equal(actual.ravel(), expected)


def test_tiles_are_those_of_single_pairs():
    dense, graph = random_graph(64, 64, 0.1)
    q, k = (
        np.array([0, 8, 40])[:, None, None] + np.arange(16)[:, None],
        np.array([3, 50, 40])[:, None, None] + np.arange(9),
    )
    edge = np.minimum(q + 12, 63), np.minimum(k + 9, 63)  # positions that repeat at the end of a sequence
    for tile_q, tile_k in ((q, k), edge, (edge[0], k)):
        np.testing.assert_array_equal(graph(tile_q, tile_k), dense[tile_q, tile_k])
    np.testing.assert_array_equal(graph(q[:, ::-1], k), dense[q[:, ::-1], k])


def test_keys_are_sorted_and_distinct():
    graph = sl.from_csr(np.array([0, 4, 4, 6]), np.array([2, 0, 2, 0, 1, 1]), 3)
    assert graph.indptr.tolist() == [0, 2, 2, 3] and graph.indices.tolist() == [0, 2, 1]
    assert graph == sl.from_csr([0, 2, 2, 3], [2, 0, 1], 3) and hash(graph) == hash(
        sl.Graph([0, 2, 2, 3], [0, 2, 1], 3)
    )
    assert graph != sl.from_csr([0, 2, 2, 3], [2, 0, 1], 4) and graph != sl.from_csr([0, 2, 3, 3], [2, 0, 1], 3)
    with pytest.raises(ValueError, match="ascend"):
        sl.Graph([0, 2], [1, 0], 2)
    with pytest.raises(ValueError, match="read-only"):
        graph.indices[0] = 1


def test_a_plan_takes_no_memory_of_all_pairs():
    tokens = 60_000  # as bools, all pairs take 3.6 GB
    indptr, indices = neighbours(tokens, 8, 300)
    tracemalloc.start()
    plan = sl.make_plan(sl.from_csr(indptr, indices), tokens)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300e6
    assert 0.005 < plan.density(0) < 0.03


def test_large_graphs_are_read_in_chunks(monkeypatch):
    indptr, indices = neighbours(500, 6, 40)
    whole = sl.from_csr(indptr, indices)
    monkeypatch.setattr(graphs, "_CHUNK", 50)
    chunked = sl.from_csr(indptr, indices)
    assert chunked == whole
    corners = [x.ravel() for x in np.broadcast_arrays(*np.ogrid[0:500:7, 0:500:9])]
    for part in (chunked, whole):
        np.testing.assert_array_equal(
            part.block_state(corners[0], corners[0] + 6, corners[1], corners[1] + 8),
            exact_states(
                np.pad(whole.dense(500), 9), [corners[0] + 9, corners[0] + 15, corners[1] + 9, corners[1] + 17]
            ),
        )


class Lazy:
    """A lazy mask as splash attention takes them, which counts how many pairs are read at a time."""

    def __init__(self, matrix):
        self.matrix, self.shape, self.most = matrix, matrix.shape, 0

    def __getitem__(self, index):
        part = self.matrix[index].toarray()
        self.most = max(self.most, part.size)
        return part


def test_a_large_lazy_mask_is_read_in_stripes(monkeypatch):
    monkeypatch.setattr(graphs, "_SMALL", 1000)
    monkeypatch.setattr(graphs, "_CHUNK", 5000)
    matrix = scipy.sparse.random_array((300, 200), density=0.05, rng=RNG, format="csr").astype(bool)
    lazy = Lazy(matrix)
    (graph,) = sl.as_masks(lazy)
    assert isinstance(graph, sl.Graph) and lazy.most <= 5000
    np.testing.assert_array_equal(graph.dense(300, 200), matrix.toarray())
    (array,) = sl.as_masks(Lazy(scipy.sparse.csr_array(np.ones((300, 200), bool))))
    assert isinstance(array, sl.Array)


def test_a_matrix_that_is_not_csr_is_refused():
    with pytest.raises(TypeError, match=r"tocsr\(\)"):
        sl.from_csr(scipy.sparse.coo_array(np.eye(3)))


@pytest.mark.parametrize(("nodes", "block"), [(1, 128), (129, 128), (1000, 64), (700, 1)])
def test_a_spatial_order_is_a_permutation_of_compact_blocks(nodes, block):
    points = RNG.random((nodes, 3))
    order = sl.spatial_order(points, block)
    assert sorted(order) == list(range(nodes))
    whole = [order[i : i + block] for i in range(0, nodes - block + 1, block)]
    extents = [np.ptp(points[cell], axis=0).prod() for cell in whole]
    assert np.sum(extents) <= 1.01  # boxes of blocks do not overlap


def test_points_without_coordinates_keep_their_order():
    assert sl.spatial_order(np.zeros((300, 0))).tolist() == list(range(300))
