"""Photographs to learn: found, decoded, split, and cut into crops."""

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

from ..training.config import Refusal
from ..training.data import ROUNDS, Batch, Source, file_names, permuted, split_files

# Photographs in colour that are part of scikit-image itself. The right one of the stereo pair would be a copy.
_SHIPPED: tuple[str, ...] = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
_SUFFIXES = {".png", ".jpg", ".jpeg"}
_MODES = {1: "L", 3: "RGB"}


@dataclasses.dataclass(frozen=True, eq=False)
class Crops:
    """The crops of some photographs, numbered photograph by photograph and row by row.

    Args:
      photographs: uint8 [height, width, channels] each, no side shorter than ``size``.
      size: rows and columns of a crop.
      stride: rows and columns from a crop to the next.

    Example:
      >>> photograph = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
      >>> crops = Crops([photograph], size=2, stride=1)
      >>> crops.count, crops.take([0, 5]).tokens.tolist()
      (6, [[0, 0, 1, 4, 5], [0, 6, 7, 10, 11]])
    """

    photographs: Sequence[np.ndarray]
    size: int
    stride: int

    @functools.cached_property
    def _grids(self) -> np.ndarray:
        """Rows and columns of crops of each photograph."""
        shapes = np.array([photograph.shape[:2] for photograph in self.photographs], np.int64)
        return (shapes - self.size) // self.stride + 1

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self._grids.prod(1))

    @property
    def count(self) -> int:
        return int(self._ends[-1])

    def take(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """Crops as sequences: a byte 0, at which each begins, then bytes row by row, pixel by pixel, channels last."""
        sequences = []
        for number in np.asarray(numbers).tolist():
            index = int(np.searchsorted(self._ends, number, "right"))
            rows, columns = self._grids[index].tolist()
            crop_id = number - int(self._ends[index]) + rows * columns  # in its photograph
            top, left = (self.stride * step for step in divmod(crop_id, columns))
            crop = self.photographs[index][top : top + self.size, left : left + self.size]
            sequences.append(np.concatenate([[0], crop.reshape(-1)]))
        return Batch(np.stack(sequences).astype(np.int32), None)


def load(path: str, size: int, channels: int, shrink: int) -> tuple[Crops, Crops, str]:
    """Training and held-out crops, of different photographs, and the hex SHA-256 of both.

    Training has every crop; held-out ones lie side by side. All photographs are decoded now and stay in memory.

    Args:
      path: a folder of PNG and JPEG files, with those in its folders; every twentieth or so is held out, by a hash of
        its name. Empty: photographs that are part of scikit-image.
      size: rows and columns of a crop.
      channels: 1 (grey) or 3 (red, green, blue).
      shrink: side of the squares of pixels whose mean becomes a pixel first.

    Raises:
      Refusal: the folder is missing or has none for one side, one cannot be read or is smaller than a crop, or
        scikit-image is not installed.
    """
    try:
        root = pathlib.Path(path) if path else _shipped()
        names = file_names(root) if path else _SHIPPED
        learnt, heldout = split_files([name for name in names if pathlib.Path(name).suffix.lower() in _SUFFIXES])
        if not learnt or not heldout:
            raise Refusal(
                f"--data {path}: of its PNG and JPEG files, {len(learnt)} are learnt and {len(heldout)} held out, but "
                "both must be one at least"
            )
        sides = [[_decoded(root / name, size, channels, shrink) for name in side] for side in (learnt, heldout)]
    except OSError as error:
        raise Refusal(f"--data {error.filename or path}: {error.strerror or error}") from error
    digest = hashlib.sha256()
    for photograph in itertools.chain(*sides):
        digest.update(f"{photograph.shape}".encode() + photograph.tobytes())
    return Crops(sides[0], size, 1), Crops(sides[1], size, size), digest.hexdigest()


def _shipped() -> pathlib.Path:
    """The folder of scikit-image's data, which need not be imported."""
    package = importlib.util.find_spec("skimage")
    if package is None or not package.submodule_search_locations:
        raise Refusal(
            "without --data, photographs of scikit-image are learnt, which is not installed: "
            "pip install '.[images]', or name a folder of PNG and JPEG files"
        )
    return pathlib.Path(package.submodule_search_locations[0], "data")


def _decoded(path: pathlib.Path, size: int, channels: int, shrink: int) -> np.ndarray:
    """A photograph, uint8 [height, width, channels], turned as its camera was held."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(ImageOps.exif_transpose(image).convert(_MODES[channels]).reduce(shrink))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise Refusal(f"--data {path}: {error}") from error
    if min(pixels.shape[:2]) < size:
        height, width = pixels.shape[:2]
        raise Refusal(
            f"--data {path}: {height} x {width} pixels (after --shrink {shrink}) hold no crop of --size {size}"
        )
    return pixels.reshape(*pixels.shape[:2], channels)


def source(path: str, size: int, channels: int, shrink: int, seed: int, batch_size: int) -> Source:
    """Returns the data of a run: each crop once, in an order drawn from the seed, and then again.

    Raises:
      Refusal: as `load`.
    """
    train, heldout, digest = load(path, size, channels, shrink)
    # Unlike the streams of a Generator, those of a SeedSequence are the same in every version of NumPy.
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64).tolist()

    def batch(step: int) -> Batch:
        numbers = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64) % train.count
        return train.take(permuted(numbers, train.count, keys))

    def spread(count: int) -> Batch:
        return heldout.take(np.linspace(0, heldout.count - 1, count).astype(np.int64))

    return Source(digest, heldout.count, batch, spread)
