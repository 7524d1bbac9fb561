"""Bytes to learn: where they come from, how they are split, and which of them a step sees."""

import dataclasses
import gzip
import hashlib
import math
import pathlib
import sysconfig

import numpy as np

from .config import Refusal

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out bytes.

    Attributes:
      train: uint8 array [bytes].
      heldout: uint8 array [bytes], from files (or a stretch of the file) that ``train`` has nothing of.
      digest: hex SHA-256 of both, which a resumed run must find again.
    """

    train: np.ndarray
    heldout: np.ndarray

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.train.tobytes() + b"|" + self.heldout.tobytes()).hexdigest()

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> np.ndarray:
        """Random training windows, int32 [batch_size, seq_len + 1]: a pure function of the arguments.

        No state to save: a run that stopped sees, from any step on, what it would have seen.
        """
        starts = np.random.default_rng([seed, step]).integers(0, self.train.size - seq_len, batch_size)
        return _windows(self.train, starts, seq_len)

    def heldout_windows(self, count: int, seq_len: int) -> np.ndarray:
        """Fixed windows spread evenly over the held-out bytes, int32 [count, seq_len + 1]."""
        starts = np.linspace(0, self.heldout.size - seq_len - 1, count).astype(np.int64)
        return _windows(self.heldout, starts, seq_len)


def _windows(data: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)


def load(path: str, seq_len: int) -> Corpus:
    """Reads and splits a corpus.

    Args:
      path: a file: its first 90 % are for training and the next 5 % held out (the last 5 % stay unseen, for a test:
        the usual split of enwik8). A folder: every twentieth file or so is held out, chosen by a hash of its relative
        path. Empty: the .py files of this Python's standard library, without tests, split like any folder.
      seq_len: both parts must hold at least one window of ``seq_len + 1`` bytes.

    Raises:
      Refusal: the path is missing, unreadable or empty, or a part is too short.
    """
    root = pathlib.Path(path or sysconfig.get_path("stdlib"))
    try:
        if root.is_dir():
            train, heldout = (
                b"".join((root / name).read_bytes() for name in part) for part in split_files(_names(root, path))
            )
        else:
            whole = root.read_bytes()
            train, heldout = whole[: len(whole) * 90 // 100], whole[len(whole) * 90 // 100 : len(whole) * 95 // 100]
    except OSError as error:
        raise Refusal(f"--data {root}: {error.strerror or error}") from error
    for name, part in (("training", train), ("held-out", heldout)):
        if len(part) <= seq_len:
            raise Refusal(
                f"--data {root}: {len(part)} {name} bytes are too few, --seq-len {seq_len} needs {seq_len + 1}"
            )
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(heldout, np.uint8))


def _names(root: pathlib.Path, path: str) -> list[str]:
    pattern = "*" if path else "*.py"
    files = [file.relative_to(root) for file in root.rglob(pattern) if file.is_file()]
    return [file.as_posix() for file in files if path or not _NOT_SOURCE & set(file.parts)]


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
