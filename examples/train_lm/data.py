"""Bytes to learn: where they come from, how they are split, and which of them a step sees."""

import array
import dataclasses
import errno
import fnmatch
import functools
import gzip
import hashlib
import itertools
import math
import os
import pathlib
import queue
import re
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from .config import Refusal

T = TypeVar("T")

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_CHUNK = 1 << 20  # bytes read at once
# An open map holds a file descriptor, and a process may have as few as 256 of them.
_OPEN_MAPS = 32
_ROUNDS = 6  # of the network that permutes; four are the least that hide all order


class Part(NamedTuple):
    """A stretch of ``length`` bytes of a file, from ``offset`` on."""

    path: str
    offset: int
    length: int


class Text:
    """Bytes spread over files, which are mapped, a few at a time, and must not change from now on.

    No byte is kept: what a process monitor counts of the maps is the system's page cache, which it takes back at need.

    Args:
      parts: the stretches of files that make up the text, in order. Empty ones are left out.
      document_starts: int64 [documents], the sorted positions at which a document begins. By default each part is one.

    Example:
      >>> text = Text([Part(__file__, 3, 5), Part(__file__, 9, 2)])
      >>> text.size, text.read(3, 4).tobytes(), text.document_starts
      (7, b'esto', array([0, 5]))
    """

    def __init__(self, parts: Sequence[Part], document_starts: np.ndarray | None = None):
        self.parts = tuple(part for part in parts if part.length)
        ends = np.cumsum([0, *(part.length for part in self.parts)], dtype=np.int64)
        self.size = int(ends[-1])
        self._begins = ends[:-1]
        self.document_starts = self._begins if document_starts is None else document_starts
        self._stamps = tuple(_stamp(part.path) for part in self.parts)
        self._map = functools.lru_cache(_OPEN_MAPS)(functools.partial(_mapped, self.parts))

    def read(self, start: int, count: int) -> np.ndarray:
        """A copy of ``count`` bytes from ``start`` on, across the borders of files: uint8 [count].

        Raises:
          IndexError: the text does not reach that far.
          Refusal: a file has gone or changed since it was loaded.
        """
        if not 0 <= start <= start + count <= self.size:
            raise IndexError(f"bytes {start} to {start + count} of a text of {self.size}")
        out, filled = np.empty(count, np.uint8), 0
        index = int(np.searchsorted(self._begins, start, "right")) - 1
        while filled < count:
            within = start + filled - int(self._begins[index])
            # Also for a map that is open: where its file has shrunk, reading it would end the process.
            if _stamp(self.parts[index].path) != self._stamps[index]:
                raise Refusal(f"--data {self.parts[index].path} changed while it was being learnt")
            piece = self._map(index)[within : within + count - filled]
            out[filled : filled + piece.size] = piece
            filled, index = filled + piece.size, index + 1
        return out


def _stamp(path: str) -> tuple[int, int]:
    """What changes with a file's content: its size and its time; of one that is gone, -1."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _mapped(parts: tuple[Part, ...], index: int) -> np.ndarray:
    path, offset, length = parts[index]
    return np.memmap(path, np.uint8, "r", offset, (length,)).view(np.ndarray)


class Batch(NamedTuple):
    """Windows of a text.

    Attributes:
      tokens: int32 [B, T + 1], the bytes.
      segments: int32 [B, T + 1], the number of the byte's document within its window, from 0 on. None: documents are
        not kept apart.
    """

    tokens: np.ndarray
    segments: np.ndarray | None


def text_windows(text: Text, starts: np.ndarray, seq_len: int, packed: bool) -> Batch:
    """The windows of ``seq_len + 1`` bytes that begin at ``starts`` (integers [B]); with segments if ``packed``.

    Raises:
      IndexError: a window ends after the text.
    """
    tokens = np.empty((len(starts), seq_len + 1), np.int32)
    segments = np.zeros_like(tokens) if packed else None
    for row, start in enumerate(starts.tolist()):
        tokens[row] = text.read(start, seq_len + 1)
        if segments is not None:
            # A document that begins with the window is number 0, like one that began before it.
            first, last = np.searchsorted(text.document_starts, [start, start + seq_len], "right")
            segments[row, text.document_starts[first:last] - start] = 1
            np.cumsum(segments[row], out=segments[row])
    return Batch(tokens, segments)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out bytes.

    Attributes:
      train: what the steps see.
      heldout: from files (or a stretch of the file) that ``train`` has nothing of.
      digest: hex SHA-256 of all bytes and of the borders of documents, which a resumed run must find again.
      test: the last stretch of a file, which neither training nor choices between runs should see. None for a folder.
    """

    train: Text
    heldout: Text
    digest: str
    test: Text | None = None

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int, packed: bool = False) -> Batch:
        """The training windows of a step, from 0 on: a pure function of the arguments.

        ``seq_len`` is at most the one that `load` made sure of.

        An epoch cuts the bytes into windows that predict each byte at most once (neighbours share a byte: the last
        target of one is the first input of the other), from a phase drawn for the epoch on, and visits them in an
        order drawn for the epoch. It leaves out fewer than ``2 * seq_len`` bytes at the ends. There is no state to
        save: a run that stopped in the middle of an epoch goes on with the windows that it would have seen.
        """
        # As many as fit at every phase, so that all epochs are equally long.
        windows = max(1, self.train.size // seq_len - 1)
        phases = min(seq_len, self.train.size - windows * seq_len)
        epochs, indices = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64), windows)
        starts = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            # Unlike the streams of a Generator, those of a SeedSequence are the same in every version of NumPy.
            phase, *keys = np.random.SeedSequence([seed, epoch]).generate_state(1 + _ROUNDS, np.uint64).tolist()
            here = epochs == epoch
            starts[here] = phase % phases + seq_len * permuted(indices[here], windows, keys)
        return text_windows(self.train, starts, seq_len, packed)

    def heldout_windows(self, count: int, seq_len: int, packed: bool = False) -> Batch:
        """Fixed windows spread evenly over the held-out bytes; they overlap if ``count * seq_len`` exceeds these."""
        starts = np.linspace(0, self.heldout.size - seq_len - 1, count).astype(np.int64)
        return text_windows(self.heldout, starts, seq_len, packed)


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


def load(path: str, seq_len: int, *, glob: str = "", separator: str = "") -> Corpus:
    r"""Finds and splits a corpus, and reads it once, for its digest and its documents; it does not stay in memory.

    Args:
      path: a file: its first 90 % are for training, the next 5 % held out and the last 5 % for a test (the usual split
        of enwik8). A folder: every twentieth file or so is held out, chosen by a hash of its relative path; each file
        is a document. Empty: the .py files of this Python's standard library, without tests, split like any folder.
      seq_len: both parts must hold at least one window of ``seq_len + 1`` bytes.
      glob: the files of a folder to take, by their names without the folders: ``*.py``. Empty: all.
      separator: text at which another document begins, wherever it occurs within a file: ``<|endoftext|>``.

    Raises:
      Refusal: the path is missing, unreadable or empty, ``glob`` chooses nothing or not from a folder, or a part is
        too short.
    """
    root = pathlib.Path(path or sysconfig.get_path("stdlib"))
    try:
        texts = [Text(parts) for parts in _split(root, glob or ("" if path else "*.py"), library=not path)]
        for name, text in zip(("training", "held-out"), texts, strict=False):
            if text.size <= seq_len:
                raise Refusal(
                    f"--data {root}: {text.size} {name} bytes are too few, --seq-len {seq_len} needs {seq_len + 1}"
                )
        # A command line passes bytes that are not UTF-8 on as surrogates.
        scanned = [_scan(text, separator.encode("utf-8", "surrogateescape")) for text in texts]
    except OSError as error:
        raise Refusal(f"--data {error.filename or root}: {error.strerror or error}") from error
    (train, heldout, *test), digests = zip(*scanned, strict=True)
    return Corpus(train, heldout, hashlib.sha256(b"".join(digests)).hexdigest(), *test)


def _split(root: pathlib.Path, glob: str, library: bool) -> list[list[Part]]:
    """Training and held-out parts of a folder; those and a test part of a file."""
    if root.is_dir():
        sides = split_files(_names(root, glob or "*", _NOT_SOURCE if library else set()))
        if glob and not any(sides):
            raise Refusal(f"--glob {glob}: no file in {root} has such a name")
        return [[Part(str(root / name), 0, (root / name).stat().st_size) for name in side] for side in sides]
    size = root.stat().st_size
    if glob:
        raise Refusal(f"--glob {glob} chooses files of a folder, --data {root} is a file")
    borders = [0, size * 90 // 100, size * 95 // 100, size]
    return [[Part(str(root), start, end - start)] for start, end in itertools.pairwise(borders)]


def _names(root: pathlib.Path, glob: str, skipped: set[str]) -> list[str]:
    """The paths, from ``root`` on, of the files that ``glob`` matches; folders named in ``skipped`` are left out."""
    names = []

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave out what it cannot read

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = set(subfolders) - skipped
        paths = [pathlib.Path(folder, name) for name in fnmatch.filter(files, glob)]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return names


def _scan(text: Text, separator: bytes) -> tuple[Text, bytes]:
    """Reads ``text`` once: it with its documents, and a digest of both."""
    content, starts, size = hashlib.sha256(), array.array("q"), 0
    for part in text.parts:
        starts.append(size)
        starts.extend(size + at for at in _occurrences(_chunks(part, content), separator) if at)
        size += part.length
    return Text(text.parts, np.array(starts, np.int64)), hashlib.sha256(content.digest() + starts.tobytes()).digest()


def _chunks(part: Part, content: Any) -> Iterator[bytes]:
    """The bytes of ``part``, of which the hash ``content`` is updated."""
    # Read, not mapped: a disk that fails is then an OSError and not the end of the process.
    with open(part.path, "rb") as file:
        file.seek(part.offset)
        left = part.length
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise OSError(errno.EIO, "shrank while it was read", part.path)
            content.update(chunk)
            left -= len(chunk)
            yield chunk


def _occurrences(chunks: Iterable[bytes], word: bytes) -> Iterator[int]:
    """Where ``word`` begins in the joined chunks, all of which are consumed. None overlaps the one before it.

    Example:
      >>> list(_occurrences([b"a-", b"-b---", b"-"], b"--"))
      [1, 4, 6]
    """
    pattern = re.compile(re.escape(word))
    tail, begin = b"", 0
    for chunk in chunks:
        if not word:
            continue
        tail, end = tail + chunk, 0
        for match in pattern.finditer(tail):
            yield begin + match.start()
            end = match.end()
        # What the next chunk may complete: less than a word, and nothing of one that was found.
        end = max(end, len(tail) - len(word) + 1)
        tail, begin = tail[end:], begin + end


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
        self._made = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._ended = threading.Event()
        # The thread does not hold this object, so that it ends with one that was dropped, too.
        work = (make, steps, self._made, self._room, self._ended)
        self._thread = threading.Thread(target=_make_ahead, args=work, name="prefetch", daemon=True)
        self._end = weakref.finalize(self, _end, self._room, self._ended)
        self._thread.start()

    def __next__(self) -> T:
        if self._ended.is_set():
            raise StopIteration
        began = time.perf_counter()
        item, error = self._made.get()
        self.waited += time.perf_counter() - began
        self._room.release()
        if error is not None:
            self.close()
            raise error
        return item

    def close(self) -> None:
        """Ends the thread; an item that is being made is waited for, but not for long."""
        self._end()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _make_ahead(make, steps, made: queue.SimpleQueue, room: threading.Semaphore, ended: threading.Event) -> None:
    def items():
        for step in steps:
            room.acquire()
            if ended.is_set():
                return
            # In a generator, so that a StopIteration of `make` is an error and not the end of the items.
            yield make(step)

    try:
        for item in items():
            made.put((item, None))
        made.put((None, StopIteration()))
    except BaseException as error:
        made.put((None, error))


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
