"""The settings of an image model, and the configs that have a name."""

import dataclasses
import pathlib
import types
from typing import Any

import numpy as np

import sparse_layers as sl

from ..training import config as shared
from ..training.config import option, with_default
from ..training.data import Batch, Source
from .photographs import source
from .sample import pictures, write_grid

_CONFIGS = types.MappingProxyType(
    {
        "cpu": {},
        # Child et al. 2019 for CIFAR-10: 120 epochs of 48,000 pictures. The batch size is ours; queries, keys and
        # hidden layers are twice as wide as theirs.
        "cifar10_paper": {
            "channels": 3,
            "layers": 128,
            "features": 256,
            "mlp": "gelu",
            "norm": "layer",
            "tied": False,
            "dropout": 0.25,
            "recompute": True,
            "scan": True,
            "dtype": "bfloat16",
            "steps": 180000,
            "batch_size": 32,
            "lr": 3.5e-4,
            "lr_end": 0.0,
            "warmup": 5000,
            "weight_decay": 0.01,
            "beta2": 0.999,
            "eval_every": 1500,
            "save_every": 1500,
        },
    }
)


@dataclasses.dataclass(frozen=True)
class Config(shared.Config):
    """Settings of one run, see `examples.training.config.Config`.

    Raises:
      Refusal: a number is out of range, or a choice is unknown.

    Example:
      >>> Config(size=32, channels=3).seq_len
      3072
    """

    configs = _CONFIGS
    command = "python -m examples.images.train {}"
    compared = "causal,image_strided,neighborhood,axial"

    data: str = option("", "folder of PNG and JPEG files to learn; default: photographs of scikit-image")
    out: str = with_default("out", "runs/images")
    size: int = option(32, "rows and columns of a crop, in pixels", least=2)
    channels: int = option(1, "1: grey; 3: red, green and blue", (1, 3))
    shrink: int = option(1, "side of the squares of pixels whose mean becomes a pixel, before crops are cut")
    pattern: str = option(
        "image_strided",
        "PRESET[:key=value,...], several joined by '+' are taken by the layers in turn; made causal if it is not; the "
        "shape of one for images is that of a crop",
    )
    positions: str = with_default("positions", "row_column")
    features: int = with_default("features", 64)
    heads: int = with_default("heads", 2)
    steps: int = with_default("steps", 600)
    batch_size: int = with_default("batch_size", 2)
    eval_every: int = with_default("eval_every", 150)
    eval_batches: int = with_default("eval_batches", 32)
    save_every: int = with_default("save_every", 150)
    samples: int = option(8, "crops in each row of the picture drawn at the end; 0: none", least=0)

    def __post_init__(self):
        object.__setattr__(self, "seq_len", self.size * self.row)
        object.__setattr__(self, "position_stride", self.row)
        super().__post_init__()

    @property
    def row(self) -> int:
        """Bytes in a row of a crop."""
        return self.size * self.channels

    @property
    def length(self) -> str:
        return f"--size {self.size} --channels {self.channels}"

    def mask(self, name: str) -> Any:
        scorer = sl.Scorer.named(name)
        if scorer is not None:
            return scorer
        # As in the paper, a crop is a grid of rows of bytes: what is at hand of a pixel's neighbours are their bytes.
        has_shape = "shape" in sl.preset_options(name.partition(":")[0])
        return sl.preset(name, **({"shape": (self.size, self.row)} if has_shape else {}))

    def source(self) -> Source:
        return source(self.data, self.size, self.channels, self.shrink, self.seed, self.batch_size)

    def crops(self, batch: Batch) -> np.ndarray:
        """A batch as pictures: uint8 [B, rows, columns, channels]."""
        return batch.tokens[:, 1:].astype(np.uint8).reshape(-1, self.size, self.size, self.channels)

    def write_sample(self, model: Any, heldout: Batch, out: pathlib.Path) -> None:
        if self.samples:
            crops = self.crops(heldout)
            crop_ids = np.linspace(0, len(crops) - 1, self.samples).astype(int)
            write_grid(pictures([model], crops[crop_ids], seed=self.seed), out / "samples.png")
