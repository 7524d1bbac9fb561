"""Masks from graphs: each query lists the keys that it sees, in compressed sparse rows (CSR).

A plan of a graph takes O(edges) host work. No array of queries x keys exists: states of blocks are counts of edges, and
tiles of partial blocks are filled edge by edge.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arguments.checks import LONGEST, Positive, as_int, checked, strict_kwargs
from ..arguments.foreign import one_line
from .algebra import Array, Mask
from .states import EMPTY, UNSURE, to_state

_CHUNK = 1 << 22  # edges, counters or rows that are looked at together
_TABLES = 8  # sizes of blocks whose counts are kept
_SMALL, _DENSE = 1 << 24, 4  # pairs of a small array; a graph with a 4th of all pairs takes as many bytes as bools
_ROWS = 1 << 25  # rows of unaligned rectangles that are searched before these are UNSURE


class _Tiles(NamedTuple):
    """Positions [n, height, 1] and [n, 1, width] as tiles, and where each position lies in its tile."""

    q0: np.ndarray  # [n]
    k0: np.ndarray  # [n]
    row: np.ndarray  # [n, height]
    column: np.ndarray  # [n, width]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Graph(Mask):
    """A directed graph as a mask: query i sees the keys ``indices[indptr[i]:indptr[i + 1]]``. `from_csr` makes it.

    It equals graphs with the same edges. It allows no pair outside of its queries and keys.

    Args:
      indptr: int [queries + 1], the start of each query's keys, and the end of the last.
      indices: int32 [edges], the keys of one query after the other, ascending and distinct within each query.
      num_keys: number of keys.

    Raises:
      ValueError: as `from_csr`.

    Example:
      >>> import sparse_layers as sl
      >>> print(sl.picture(sl.Graph([0, 1, 3, 5], [0, 0, 2, 1, 2], 3), 3))
      ■ · ·
      ■ · ■
      · ■ ■
    """

    indptr: Any
    indices: Any
    num_keys: int

    def __post_init__(self):
        indptr, indices = _checked_rows(self.indptr, self.indices, self.num_keys)
        for name, value in {"indptr": indptr, "indices": indices, "num_keys": int(self.num_keys)}.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, name, value)

    def __reduce__(self):
        return Graph, (self.indptr, self.indices, self.num_keys)

    def __repr__(self) -> str:
        queries, keys = self.shape
        return f"Graph({queries} queries, {keys} keys, {self.indices.size} edges)"

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self.indptr.size - 1, self.num_keys

    @property
    def computable(self) -> bool:
        return False

    @functools.cached_property
    def _digest(self) -> tuple[int, bytes]:
        content = hashlib.sha256(self.indptr.tobytes())
        content.update(self.indices.tobytes())
        return self.num_keys, content.digest()

    def __eq__(self, other):
        return isinstance(other, Graph) and self._digest == other._digest

    def __hash__(self):
        return hash(self._digest)

    def _picture_lengths(self) -> tuple[int, int]:
        return self.shape

    def __call__(self, q, k):
        q, k = np.asarray(q), np.asarray(k)
        if (positions := _as_tiles(q, k)) is not None:
            return self._tiles(positions)
        q, k = np.broadcast_arrays(q, k)
        inside = (q >= 0) & (q < self.shape[0]) & (k >= 0)
        if not self.indices.size:
            return inside & False
        q = np.where(inside, q, 0)
        edge = self._first_edge(q, k)
        exists = inside & (edge < self.indptr[q + 1])
        return exists & (self.indices[np.where(exists, edge, 0)] == k)

    def block_state(self, q0, q1, k0, k1):
        q0, q1, k0, k1 = np.broadcast_arrays(q0, q1, k0, k1)
        if not q0.size:
            return np.full(q0.shape, EMPTY, np.int8)
        height, width = int((q1 - q0).max()) + 1, int((k1 - k0).max()) + 1
        area = (q1 - q0 + 1) * (k1 - k0 + 1)
        if (q0 % height).any() or (k0 % width).any():
            if q0.size * height > _ROWS:
                return np.full(q0.shape, UNSURE, np.int8)
            count = self._count(q0.ravel(), q1.ravel(), k0.ravel(), k1.ravel()).reshape(q0.shape)
            return to_state(count > 0, count == area)
        count = self._look_up_edge_counts(height, width, q0 // height, k0 // width)
        states = to_state(count > 0, count == area)
        # Of a shorter rectangle, its whole block was counted: more edges than it has, unless the graph ends there.
        is_cut = ((q1 - q0 + 1 < height) & (q1 < self.shape[0] - 1)) | (
            (k1 - k0 + 1 < width) & (k1 < self.num_keys - 1)
        )
        return np.where(is_cut & (count > 0), UNSURE, states).astype(np.int8) if is_cut.any() else states

    # --- edges of rectangles -----------------------------------------------------------------------------------------

    def _first_edge(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Returns the index of the first edge of query q to a key >= k, or the end of its edges; a binary search."""
        low, high = self.indptr[q], self.indptr[q + 1]
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            is_open = low < high
            is_below = is_open & (self.indices[np.where(is_open, middle, 0)] < k)
            low, high = np.where(is_below, middle + 1, low), np.where(is_open & ~is_below, middle, high)
        return low

    def _count(self, q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray) -> np.ndarray:
        """Returns the number of edges in each rectangle, int64 [n]."""
        counts = np.zeros(q0.size, np.int64)
        q1 = np.minimum(q1, self.shape[0] - 1)
        rows = np.arange(max(0, int((q1 - q0).max(initial=-1))) + 1)
        step = max(1, _CHUNK // rows.size)
        for start in range(0, q0.size, step):
            chunk = slice(start, start + step)
            q = q0[chunk, None] + rows
            exists = q <= q1[chunk, None]
            q = np.where(exists, q, 0) if self.shape[0] else q * 0
            first, end = (self._first_edge(q, np.broadcast_to(k[chunk, None], q.shape)) for k in (k0, k1 + 1))
            counts[chunk] = np.where(exists, end - first, 0).sum(1)
        return counts

    def _look_up_edge_counts(self, height: int, width: int, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Returns the number of edges in blocks of height x width, at rows and columns of their grid."""
        ids_with_edges, counts = self._cached_edge_counts(height, width)
        columns = -(-self.num_keys // width)
        if not ids_with_edges.size:
            return np.zeros(row.shape, np.int64)
        block_ids = row.astype(np.int64) * columns + column
        index = np.minimum(np.searchsorted(ids_with_edges, block_ids), ids_with_edges.size - 1)
        return np.where((ids_with_edges[index] == block_ids) & (column < columns), counts[index], 0)

    @functools.cached_property
    def _edge_counts(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        return {}

    def _cached_edge_counts(self, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks with edges, ascending, int64 [n], and their numbers of edges; kept for some sizes."""
        if (height, width) not in self._edge_counts:
            if len(self._edge_counts) == _TABLES:
                self._edge_counts.pop(next(iter(self._edge_counts)))
            self._edge_counts[height, width] = self._count_edges_by_block(height, width)
        return self._edge_counts[height, width]

    def _count_edges_by_block(self, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Counts edges by block, in O(edges): ids ``row * columns + column`` of blocks with edges, and their counts."""
        columns, row_bounds = -(-self.num_keys // width), self.indptr[::height]
        # The first edge of each row of blocks, and the end of the last.
        row_bounds = row_bounds if self.shape[0] % height == 0 else np.append(row_bounds, self.indptr[-1])
        blocks, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for first, end in _row_chunks(row_bounds):
            for row in range(first, end, step := max(1, _CHUNK // max(columns, 1))):
                last = min(row + step, end)
                starts = self.indptr[row * height : last * height + 1]
                block_row = np.repeat(np.arange(starts.size - 1) // height, np.diff(starts))
                edges = np.bincount(block_row * columns + self.indices[starts[0] : starts[-1]] // width)
                nonempty = np.flatnonzero(edges)
                blocks.append(nonempty + row * columns)
                counts.append(edges[nonempty])
        return np.concatenate(blocks), np.concatenate(counts)

    def _tiles(self, positions: _Tiles) -> np.ndarray:
        """Returns tiles of the mask, bool [n, height, width], filled edge by edge."""
        (n, height), width = positions.row.shape, positions.column.shape[1]
        tiles = np.zeros((n * height, width), bool)
        q = (positions.q0[:, None] + np.arange(height)).ravel()
        exists = (q >= 0) & (q < self.shape[0])
        q, first_key = np.where(exists, q, 0), np.repeat(positions.k0, height)
        if self.indices.size:
            first, end = self._first_edge(q, first_key), self._first_edge(q, first_key + width)
            size = np.where(exists, end - first, 0)
            row = np.repeat(np.arange(q.size), size)
            edge = np.arange(row.size) + np.repeat(first - (np.cumsum(size) - size), size)
            tiles[row, self.indices[edge] - first_key[row]] = True
        tiles = tiles.reshape(n, height, width)
        if (positions.row == np.arange(height)).all() and (positions.column == np.arange(width)).all():
            return tiles
        return tiles[np.arange(n)[:, None, None], positions.row[:, :, None], positions.column[:, None]]


def _as_tiles(q: np.ndarray, k: np.ndarray) -> _Tiles | None:
    """Returns the tiles that positions lie in, or None if they lie in none; the last ones may repeat at an edge."""
    if q.ndim != 3 or k.ndim != 3 or q.shape[2] != 1 or k.shape[1] != 1 or len(q) != len(k) or not (q.size and k.size):
        return None
    q, k = q[:, :, 0], k[:, 0]
    row, column = q - q[:, :1], k - k[:, :1]
    if row.min() < 0 or row.max() >= q.shape[1] or column.min() < 0 or column.max() >= k.shape[1]:
        return None
    return _Tiles(q[:, 0], k[:, 0], row, column)


@strict_kwargs
def from_csr(indptr: Any, indices: Any = None, num_keys: int | None = None) -> Graph:
    """Makes a mask from a graph in compressed sparse rows: query i sees the keys ``indices[indptr[i]:indptr[i + 1]]``.

    Plans take O(edges) time and memory, and attention costs the blocks that hold edges. So the order of the tokens
    matters: number neighbours near each other. `spatial_order` does so for nodes with coordinates.

    Args:
      indptr: integers [queries + 1], numpy; or a SciPy matrix or array in CSR format, alone. Stored zeros of a matrix
        count as edges.
      indices: integers [edges], numpy; the keys of a query in any order, duplicates allowed.
      num_keys: number of keys; None for that of the matrix, or of queries.

    Returns:
      A `Graph`, which combines with all masks.

    Raises:
      TypeError: not numpy arrays of integers, or a SciPy matrix in another format.
      ValueError: an indptr that does not begin with 0, decreases, or does not end with the number of edges; a key that
        is negative or not below num_keys.

    Example:
      >>> import numpy as np, sparse_layers as sl
      >>> ring = sl.from_csr(np.arange(0, 13, 2), np.stack([np.arange(6), np.roll(np.arange(6), 1)], 1).ravel())
      >>> ring
      Graph(6 queries, 6 keys, 12 edges)
      >>> print(sl.picture(ring, 6))
      ■ · · · · ■
      ■ ■ · · · ·
      · ■ ■ · · ·
      · · ■ ■ · ·
      · · · ■ ■ ·
      · · · · ■ ■
    """
    if indices is None:
        matrix: Any = indptr
        if getattr(matrix, "format", None) != "csr" or not all(hasattr(matrix, x) for x in ("indptr", "indices")):
            raise TypeError(
                "from_csr: indptr alone must be a SciPy matrix in CSR format (matrix.tocsr()), else give indices, too; "
                f"got {type(matrix).__name__}: {one_line(matrix)}"
            )
        num_keys = matrix.shape[1] if num_keys is None else num_keys
        indptr, indices = matrix.indptr, matrix.indices
    indptr, indices = _integers("indptr", indptr), _integers("indices", indices)
    keys = max(indptr.size - 1, 0) if num_keys is None else as_int(num_keys)
    if keys is None or not 0 <= keys <= LONGEST:
        raise ValueError(f"from_csr: num_keys must be an integer from 0 to {LONGEST} or None, got {num_keys!r}")
    _check_rows(indptr, indices, keys, " (num_keys=None: as many as queries)" * (num_keys is None))
    return Graph(*_sorted_rows(indptr, indices), keys)


def from_slices(array: Any) -> Mask:
    """Makes a mask of an object with a shape (T, S) whose slices are bools, such as a lazy mask of splash attention.

    Large ones are read in stripes, and become a `Graph` if few pairs are allowed: no array of T x S is made.
    """
    queries, keys = map(int, array.shape)
    if queries * keys <= _SMALL:
        return Array(array[:, :])
    counts, indices, edges = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)], 0
    step = max(1, _CHUNK // keys)
    for first in range(0, queries, step):
        rows, columns = np.nonzero(np.asarray(array[first : min(first + step, queries), :], bool))
        counts.append(np.bincount(rows, minlength=min(step, queries - first)))
        indices.append(columns.astype(np.int32))
        edges += columns.size
        if edges * _DENSE > queries * keys:
            return Array(array[:, :])
    return Graph(np.cumsum(np.concatenate(counts)), np.concatenate(indices), keys)


def _integers(name: str, x: Any) -> np.ndarray:
    """Returns an argument of `from_csr` as a vector of integers."""
    array: Any = np.asarray(x) if isinstance(x, list | tuple) else x
    if not isinstance(array, np.ndarray) or array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        got = (
            f"{array.dtype} of shape {array.shape}" if hasattr(array, "dtype") else f"{type(x).__name__}: {one_line(x)}"
        )
        raise TypeError(f"from_csr: {name} must be a numpy vector of integers, got {got}")
    return array


def _check_rows(indptr: np.ndarray, indices: np.ndarray, num_keys: int, which: str = "") -> None:
    """Checks that rows lie one after the other and that keys exist."""
    if not indptr.size or indptr[0] != 0:
        raise ValueError(f"from_csr: indptr must begin with 0, got {indptr[:1].tolist()}")
    steps = np.diff(indptr.astype(np.int64))
    if (steps < 0).any():
        row = int(np.argmax(steps < 0))
        raise ValueError(
            f"from_csr: indptr must not decrease, got {indptr[row]} and then {indptr[row + 1]} at query {row}"
        )
    if indptr[-1] != indices.size:
        raise ValueError(f"from_csr: indptr must end with the number of indices, {indices.size}, got {indptr[-1]}")
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < num_keys:
        raise ValueError(
            f"from_csr: indices must be from 0 to {num_keys - 1}, for {num_keys} keys{which}, got "
            f"{indices.min()} to {indices.max()}"
        )


def _sorted_rows(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows with ascending, distinct keys."""
    counts, sorted_indices = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)]
    for first, end in _row_chunks(indptr):
        starts = indptr[first : end + 1].astype(np.int64)
        keys = indices[starts[0] : starts[-1]]
        row = np.repeat(np.arange(end - first, dtype=np.int64), np.diff(starts))
        edges = row << 32 | keys.astype(np.int64)
        if not (np.diff(edges) > 0).all():
            edges.sort()
            edges = edges[np.concatenate([[True], np.diff(edges) > 0])]
        counts.append(np.bincount(edges >> 32, minlength=end - first))
        sorted_indices.append((edges & (2**32 - 1)).astype(np.int32))
    return np.cumsum(np.concatenate(counts)), np.concatenate(sorted_indices)


def _row_chunks(indptr: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the first and the end of rows that have some `_CHUNK` edges together."""
    first, rows = 0, indptr.size - 1
    while first < rows:
        end = int(np.searchsorted(indptr, int(indptr[first]) + _CHUNK, side="right")) - 1
        end = min(max(end, first + 1), first + _CHUNK, rows)
        yield first, end
        first = end


def _is_sorted(indptr: np.ndarray, indices: np.ndarray) -> bool:
    """True if the keys of each query ascend and are distinct."""
    rises = indices[1:] > indices[:-1]
    begins = indptr[1:-1]
    rises[begins[(begins > 0) & (begins < indices.size)] - 1] = True  # from one row to the next
    return bool(rises.all())


def _checked_rows(indptr: Any, indices: Any, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns copies of a graph's rows, int64 and int32; raises ValueError unless they are CSR with ascending keys."""
    indptr, indices = np.array(indptr, np.int64), np.array(indices, np.int32)
    _check_rows(indptr, indices, num_keys)
    if not _is_sorted(indptr, indices):
        raise ValueError("Graph: the keys of a query must ascend and be distinct; from_csr sorts them")
    return indptr, indices


@strict_kwargs
def spatial_order(points: Any, block: int = 128) -> np.ndarray:
    """Orders the nodes of a graph so that blocks of neighbouring numbers are near each other in space.

    Points are halved at the median of their widest axis, again and again, until ``block`` are left. Edges between near
    points then lie in few blocks: on a mesh of the sphere in less than half as many as in the reverse Cuthill-McKee
    order.

    Args:
      points: floats [nodes, axes], numpy.
      block: nodes that stay together; the size of a kernel's blocks, 64 or 128 on GPUs.

    Returns:
      A permutation, int64 [nodes]: ``points[order]`` are the points in the order. Permute the rows of arrays by it
      before attention, and back by ``np.argsort(order)``.

    Raises:
      ValueError: not a matrix of finite numbers, or a block that is not an integer >= 1.

    Example:
      >>> import numpy as np, scipy.sparse, scipy.spatial, sparse_layers as sl
      >>> points = np.random.default_rng(0).random((5000, 2))
      >>> pairs = scipy.spatial.cKDTree(points).query_pairs(0.02, output_type="ndarray")
      >>> edges = scipy.sparse.csr_array((np.ones(len(pairs)), pairs.T), shape=(5000, 5000))
      >>> order = sl.spatial_order(points)
      >>> graphs = sl.from_csr(edges), sl.from_csr(edges[order][:, order])
      >>> [f"{sl.make_plan(graph, 5000).density(0):.0%}" for graph in graphs]
      ['51%', '13%']
    """
    array = np.asarray(points)
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise ValueError(
            f"spatial_order: points must be finite numbers [nodes, axes], got {array.dtype} of shape {array.shape}"
        )
    block = checked("spatial_order: block", block, Positive)
    cells, rest = [np.zeros(0, np.int64)], [np.arange(len(array))]
    while rest:
        cell = rest.pop()
        if cell.size <= block:
            cells.append(cell)
            continue
        widest = np.ptp(array[cell], axis=0).argmax() if array.shape[1] else 0
        cell = cell[array[cell, widest].argsort(kind="stable")] if array.shape[1] else cell
        half = -(-cell.size // (2 * block)) * block  # whole blocks on one side
        rest += [cell[half:], cell[:half]]
    return np.concatenate(cells)
