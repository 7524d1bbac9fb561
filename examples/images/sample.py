"""Crops sampled from a model, and pictures of them."""

import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

import sparse_layers as sl

_ZOOM = 3  # pixels of a picture, up and across, for one of a crop
_GAP = 4  # pixels between crops


def complete(
    model: sl.SparseTransformer, first_bytes: np.ndarray, temperature: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Crops that begin with given bytes and go on with sampled ones.

    Args:
      model: of a `Config` of this example.
      first_bytes: uint8 [B, P], the first bytes of crops; P is at most two less than the T bytes of a crop.
      temperature: 0 takes the likeliest byte each time, 1 samples from the model as it is.
      seed: of the samples.

    Returns:
      uint8 [B, T].
    """
    keys = jax.random.split(jax.random.key(seed))
    read = np.concatenate([np.zeros((len(first_bytes), 1), np.int32), first_bytes], axis=1)
    sampled = sl.generate(model, read, model.seq_len - read.shape[1], temperature=temperature, key=keys[0])
    # The last byte is never read, so it has no position of its own, for which `generate` would ask.
    read = jnp.concatenate([read, sampled], axis=1)
    logits = _after(model, read)
    last = jax.random.categorical(keys[1], logits / temperature) if temperature else logits.argmax(-1)
    return np.concatenate([read[:, 1:], last[:, None]], axis=1).astype(np.uint8)


@nnx.jit
def _after(model: sl.SparseTransformer, tokens: jax.Array) -> jax.Array:
    """The logits of the byte after ``tokens``, int [B, T]."""
    return model.prefill(tokens)[0]


def pictures(
    models: Sequence[sl.SparseTransformer], crops: np.ndarray, temperature: float = 1.0, seed: int = 0
) -> list[np.ndarray]:
    """Rows for `write_grid`: crops, their upper halves, what each model makes of these, and what each makes of nothing.

    Args:
      models: of configs with crops of one size.
      crops: uint8 [B, rows, columns, channels].
      temperature: see `complete`.
      seed: of the samples.

    Returns:
      Arrays like ``crops``.
    """
    flat = crops.reshape(len(crops), -1)
    upper = crops[:, : crops.shape[1] // 2].reshape(len(crops), -1)
    shown = np.full_like(flat, 255)
    shown[:, : upper.shape[1]] = upper
    completed = [
        complete(model, first_bytes, temperature, seed) for first_bytes in (upper, upper[:, :0]) for model in models
    ]
    return [row.reshape(crops.shape) for row in (flat, shown, *completed)]


def write_grid(rows: Sequence[np.ndarray], path: pathlib.Path) -> None:
    """Draws crops, uint8 [B, rows, columns, 1 or 3] for each row of the picture, as a PNG."""
    cells = np.stack(rows).repeat(_ZOOM, axis=2).repeat(_ZOOM, axis=3)
    cells = np.pad(cells, ((0, 0), (0, 0), (0, _GAP), (0, _GAP), (0, 0)), constant_values=255)
    down, across, height, width, channels = cells.shape
    picture = cells.transpose(0, 2, 1, 3, 4).reshape(down * height, across * width, channels)
    Image.fromarray(picture[:-_GAP, :-_GAP].squeeze(2) if channels == 1 else picture[:-_GAP, :-_GAP]).save(path, "PNG")
