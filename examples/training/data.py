"""Data of a run: batches, their order and split, batches made ahead of their use, and what to compare losses with."""

import dataclasses
import fnmatch
import gzip
import hashlib
import math
import os
import pathlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple, Self, TypeVar

import numpy as np

T = TypeVar("T")

ROUNDS = 6  # of the network that permutes; four are the least that hide all order


class Batch(NamedTuple):
    """Sequences, each with the byte after it.

    Attributes:
      tokens: int32 [B, T + 1], the bytes.
      segments: int32 [B, T + 1], the number of the byte's document within its window, from 0 on. None: documents are
        not kept apart.
      answers: bool [B, T], which of the next bytes are asked for. None: all are.
      order_ids: int32 [B, T], the order in which bytes see each other. None: a byte sees those before it.
    """

    tokens: np.ndarray
    segments: np.ndarray | None
    answers: np.ndarray | None = None
    order_ids: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """The data that a run learns from, for one config.

    Attributes:
      digest: hex SHA-256 of all of it, which a resumed run must find again.
      distinct: how many held-out sequences there are that share no byte.
      batch: what a step learns, from step 0 on, which its result depends on alone.
      heldout: so many sequences, always the same, of which training sees no byte.
    """

    digest: str
    distinct: int
    batch: Callable[[int], Batch]
    heldout: Callable[[int], Batch]


def permuted(indices: np.ndarray, size: int, keys: Sequence[int]) -> np.ndarray:
    """Where a pseudo-random permutation of ``range(size)`` sends each of ``indices`` (int64 [B], all below ``size``).

    A Feistel network with a round for each of ``keys`` (below 2**64) computes it, so that an epoch of billions of
    windows begins at once and takes no memory. The network permutes a power of four; what it sends beyond ``size``
    is sent on until it falls below.

    Example:
      >>> sorted(permuted(np.arange(6), 6, [1, 2, 3]).tolist())
      [0, 1, 2, 3, 4, 5]
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)

    def network(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & ((1 << half) - 1)
        for key in keys:
            mixed = (right ^ key) * 0xFF51AFD7ED558CCD
            mixed = (mixed ^ (mixed >> 32)) * 0xC4CEB9FE1A85EC53
            left, right = right, left ^ (mixed >> (64 - half))
        return left << half | right

    values = network(indices.astype(np.uint64))
    while (beyond := values >= size).any():
        values[beyond] = network(values[beyond])
    return values.astype(np.int64)


def file_names(root: pathlib.Path, glob: str = "*", skipped: Set[str] = frozenset()) -> list[str]:
    """The paths, from ``root`` on, of the files that ``glob`` matches; folders named in ``skipped`` are left out."""
    names = []

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave out what it cannot read

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = set(subfolders) - skipped
        paths = [pathlib.Path(folder, name) for name in fnmatch.filter(files, glob)]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return names


def split_files(names: list[str]) -> tuple[list[str], list[str]]:
    """Splits file names into training and held-out ones, by a hash of the name alone.

    A file stays on its side whatever files come or go. If no hash falls into the held-out twentieth, the file with the
    smallest one is held out.

    Example:
      >>> split_files(["a.py", "b.py", "c.py"])
      (['a.py', 'c.py'], ['b.py'])
    """
    hashes = {name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in sorted(names)}
    limit = max(bytes([256 // 20]), min(hashes.values(), default=b""))
    return [n for n in hashes if hashes[n] > limit], [n for n in hashes if hashes[n] <= limit]


class Prefetch(Iterator[T]):
    """Makes an item for each step ahead of its use, in one thread and in order.

    Args:
      make: called with each step, in the thread. What it raises is raised where its item would have been.
      steps: what to make items for.
      depth: at most so many items wait to be used, at least 1.

    Attributes:
      waited: seconds in which the user of the items had to wait for one.

    As a context manager it ends its thread on exit, whether or not all items were used.

    Example:
      >>> with Prefetch(lambda step: step * step, range(1, 4)) as squares:
      ...     print(list(squares))
      [1, 4, 9]
    """

    def __init__(self, make: Callable[[int], T], steps: Iterable[int], depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.waited = 0.0
        self._ready = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._ended = threading.Event()
        # The thread does not hold this object, so that it ends with one that was dropped, too.
        work = (make, steps, self._ready, self._room, self._ended)
        self._thread = threading.Thread(target=_make_ahead, args=work, name="prefetch", daemon=True)
        self._end = weakref.finalize(self, _end, self._room, self._ended)
        self._thread.start()

    def __next__(self) -> T:
        if self._ended.is_set():
            raise StopIteration
        began = time.perf_counter()
        value, error = self._ready.get()
        self.waited += time.perf_counter() - began
        self._room.release()
        if error is not None:
            self.close()
            raise error
        return value

    def close(self) -> None:
        """Ends the thread; an item that is being made is waited for, but not for long."""
        self._end()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _make_ahead(make, steps, ready: queue.SimpleQueue, room: threading.Semaphore, ended: threading.Event) -> None:
    def values():
        for step in steps:
            room.acquire()
            if ended.is_set():
                return
            # In a generator, so that a StopIteration of `make` is an error and not the end of the items.
            yield make(step)

    try:
        for value in values():
            ready.put((value, None))
        ready.put((None, StopIteration()))
    except BaseException as error:
        ready.put((None, error))


def _end(room: threading.Semaphore, ended: threading.Event) -> None:
    ended.set()
    room.release()


def order0_bits(data: np.ndarray) -> float:
    """Entropy of the byte frequencies of ``data`` (uint8), in bits per byte: what a model without context can reach.

    Example:
      >>> order0_bits(np.array([1, 2, 3, 4], np.uint8))
      2.0
    """
    counts = np.bincount(data, minlength=256)
    shares = counts[counts > 0] / data.size
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def gzip_bits(data: np.ndarray) -> float:
    """Size of ``data`` (uint8) after ``gzip -9``, in bits per byte."""
    return 8 * len(gzip.compress(data.tobytes(), 9, mtime=0)) / data.size


def bits(nats: float) -> float:
    """Nats (a cross-entropy loss) as bits."""
    return nats / math.log(2)
