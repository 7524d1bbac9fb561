"""Text to learn: where its bytes come from, how they are split, and which of them a step sees."""

import array
import dataclasses
import errno
import functools
import hashlib
import itertools
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..training.config import Refusal
from ..training.data import ROUNDS, Batch, file_names, permuted, split_files

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_CHUNK = 1 << 20  # bytes read at once
# An open map holds a file descriptor, and a process may have as few as 256 of them.
_OPEN_MAPS = 32


class FileSlice(NamedTuple):
    """A stretch of ``length`` bytes of a file, from ``offset`` on."""

    path: str
    offset: int
    length: int


class Text:
    """Bytes spread over files, which are mapped, a few at a time, and must not change from now on.

    No byte is kept: what a process monitor counts of the maps is the system's page cache, which it takes back at need.

    Args:
      slices: the slices of files that make up the text, in order. Empty ones are left out.
      document_starts: int64 [documents], the sorted positions at which a document begins. By default each slice is one.

    Example:
      >>> text = Text([FileSlice(__file__, 3, 5), FileSlice(__file__, 9, 2)])
      >>> text.size, text.read(3, 4).tobytes(), text.document_starts
      (7, b't o ', array([0, 5]))
    """

    def __init__(self, slices: Sequence[FileSlice], document_starts: np.ndarray | None = None):
        self.slices = tuple(file_slice for file_slice in slices if file_slice.length)
        ends = np.cumsum([0, *(file_slice.length for file_slice in self.slices)], dtype=np.int64)
        self.size = int(ends[-1])
        self._begins = ends[:-1]
        self.document_starts = self._begins if document_starts is None else document_starts
        self._stamps = tuple(_stamp(file_slice.path) for file_slice in self.slices)
        self._map = functools.lru_cache(_OPEN_MAPS)(functools.partial(_mapped, self.slices))

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
            offset = start + filled - int(self._begins[index])
            # Also for a map that is open: where its file has shrunk, reading it would end the process.
            if _stamp(self.slices[index].path) != self._stamps[index]:
                raise Refusal(f"--data {self.slices[index].path} changed while it was being learnt")
            chunk = self._map(index)[offset : offset + count - filled]
            out[filled : filled + chunk.size] = chunk
            filled, index = filled + chunk.size, index + 1
        return out


def _stamp(path: str) -> tuple[int, int]:
    """Returns the size and time of a file, which change with its content; -1 for a file that is gone."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _mapped(slices: tuple[FileSlice, ...], index: int) -> np.ndarray:
    path, offset, length = slices[index]
    return np.memmap(path, np.uint8, "r", offset, (length,)).view(np.ndarray)


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


def prefix_order(prefixes: np.ndarray, seq_len: int) -> np.ndarray:
    """`sl.prefix_order` in numpy, for the thread that makes batches: int32 [B, T] for prefixes [B].

    Example:
      >>> prefix_order(np.array([0, 3]), 5).tolist()
      [[0, 1, 2, 3, 4], [2, 2, 2, 3, 4]]
    """
    return np.maximum(np.arange(seq_len), prefixes[:, None] - 1).astype(np.int32)


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
            phase, *keys = np.random.SeedSequence([seed, epoch]).generate_state(1 + ROUNDS, np.uint64).tolist()
            in_epoch = epochs == epoch
            starts[in_epoch] = phase % phases + seq_len * permuted(indices[in_epoch], windows, keys)
        return text_windows(self.train, starts, seq_len, packed)

    def heldout_windows(self, count: int, seq_len: int, packed: bool = False) -> Batch:
        """Fixed windows spread evenly over the held-out bytes; they overlap if ``count * seq_len`` exceeds these."""
        starts = np.linspace(0, self.heldout.size - seq_len - 1, count).astype(np.int64)
        return text_windows(self.heldout, starts, seq_len, packed)


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
        texts = [Text(slices) for slices in _split(root, glob or ("" if path else "*.py"), library=not path)]
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


def _split(root: pathlib.Path, glob: str, library: bool) -> list[list[FileSlice]]:
    """Training and held-out parts of a folder; those and a test part of a file."""
    if root.is_dir():
        sides = split_files(file_names(root, glob or "*", _NOT_SOURCE if library else set()))
        if glob and not any(sides):
            raise Refusal(f"--glob {glob}: no file in {root} has such a name")
        return [[FileSlice(str(root / name), 0, (root / name).stat().st_size) for name in side] for side in sides]
    size = root.stat().st_size
    if glob:
        raise Refusal(f"--glob {glob} chooses files of a folder, --data {root} is a file")
    borders = [0, size * 90 // 100, size * 95 // 100, size]
    return [[FileSlice(str(root), start, end - start)] for start, end in itertools.pairwise(borders)]


def _scan(text: Text, separator: bytes) -> tuple[Text, bytes]:
    """Reads ``text`` once: it with its documents, and a digest of both."""
    content, starts, size = hashlib.sha256(), array.array("q"), 0
    for file_slice in text.slices:
        starts.append(size)
        starts.extend(size + position for position in _occurrences(_chunks(file_slice, content), separator) if position)
        size += file_slice.length
    return Text(text.slices, np.array(starts, np.int64)), hashlib.sha256(content.digest() + starts.tobytes()).digest()


def _chunks(file_slice: FileSlice, content: Any) -> Iterator[bytes]:
    """Yields the bytes of ``file_slice``, of which the hash ``content`` is updated."""
    # Read, not mapped: a disk that fails is then an OSError and not the end of the process.
    with open(file_slice.path, "rb") as file:
        file.seek(file_slice.offset)
        left = file_slice.length
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise OSError(errno.EIO, "shrank while it was read", file_slice.path)
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
