"""Text as windows of a model's tokens: by its tokenizer, or as bytes."""

import pathlib

import numpy as np

from sparse_layers.modules.loading.config import Config

from ..train_lm import data
from ..training.config import Refusal

_LIMIT = 1 << 24  # bytes of a text that become tokens, which are held in memory
_BYTES = range(256, 261)  # sizes of a vocabulary of bytes, with up to four tokens beside them


class Windows:
    """The windows of ``length + 1`` tokens in a text: ``length`` that a model reads, each with the one after it.

    Args:
      ids: int32 [N], the text's tokens.
      length: tokens that the model reads.
      prefix: the special tokens that its tokenizer puts before every text; each window begins with them.

    Raises:
      Refusal: the text has no such window.

    Example:
      >>> Windows(np.arange(10), 3).spread(2)
      array([[0, 1, 2, 3],
             [6, 7, 8, 9]])
    """

    def __init__(self, ids: np.ndarray, length: int, prefix: tuple[int, ...] = ()):
        if len(ids) <= length:
            raise Refusal(f"--text: {len(ids)} tokens are too few, --length {length} needs {length + 1}")
        self.ids, self.length, self.prefix = ids, length, prefix

    def _take(self, starts: np.ndarray) -> np.ndarray:
        tokens = self.ids[starts[:, None] + np.arange(self.length + 1)]
        tokens[:, : len(self.prefix)] = self.prefix
        return tokens

    def spread(self, count: int) -> np.ndarray:
        """Windows spread evenly over the text, always the same: int32 [count, length + 1]."""
        return self._take(np.linspace(0, len(self.ids) - self.length - 1, count).astype(np.int64))

    def batch(self, step: int, size: int) -> np.ndarray:
        """Random windows, others for each step: int32 [size, length + 1]."""
        return self._take(np.random.default_rng(step).integers(len(self.ids) - self.length, size=size))


def load(folder: str | pathlib.Path, path: str, length: int) -> tuple[Windows, Windows]:
    """The windows to train on and the held-out ones, of different files of a folder or parts of a file.

    Args:
      folder: of the model. With a ``tokenizer.json`` tokens are that tokenizer's; without one they are bytes. A text
        is tokenized as a whole, whatever the file says of truncation and padding. Of special tokens that the tokenizer
        adds, those before a text begin each window; those after it are left out.
      path: as of `data.load`: a file or a folder of text in UTF-8, or "" for this Python's standard library. Of each
        side the first 16 MiB are taken.
      length: tokens that the model reads at once.

    Raises:
      Refusal: see `data.load`; too little text; a model without tokenizer.json whose tokens are no bytes; the package
        tokenizers is needed and not there.
      FileNotFoundError, ValueError: there is no config.json, or none of that format.
    """
    folder = pathlib.Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        vocab_size = Config(folder / "config.json").size("vocab_size")
        if vocab_size not in _BYTES:
            raise Refusal(f"{folder}: there is no tokenizer.json, and a vocabulary of {vocab_size} tokens is not bytes")
        return load_bytes(path, length)
    try:
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Refusal(f"{file}: to read it, pip install tokenizers") from error
    tokenizer = Tokenizer.from_file(str(file))
    # Such files keep how their tokenizer was used last: inputs cut to 512 tokens, or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def windows(side: np.ndarray) -> Windows:
        encoded = tokenizer.encode(side.tobytes().decode(errors="replace"))
        ids, added = np.array(encoded.ids, np.int32), np.array(encoded.special_tokens_mask, bool)
        begin = int(added.argmin()) if added.size else 0
        return Windows(ids[~added], length, tuple(ids[:begin].tolist()))

    train, heldout = map(windows, _sides(path, length))
    return train, heldout


def load_bytes(path: str, length: int) -> tuple[Windows, Windows]:
    """The same of a text's bytes, for a model of bytes; path, length and Refusal as of `load`."""
    train, heldout = (Windows(side.astype(np.int32), length) for side in _sides(path, length))
    return train, heldout


def _sides(path: str, length: int) -> list[np.ndarray]:
    """The bytes to train on, and the held-out ones."""
    corpus = data.load(path, length)
    return [text.read(0, min(text.size, _LIMIT)) for text in (corpus.train, corpus.heldout)]
