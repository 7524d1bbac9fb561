"""The settings of a language model, and the configs that have a name."""

import dataclasses
import pathlib
import types
from typing import Any

from ..training import config as shared
from ..training.config import Refusal, option, with_default
from ..training.data import Batch, Source
from .data import Corpus, load
from .sample import sample

_CONFIGS = types.MappingProxyType(
    {
        "cpu": {},
        # For one GPU: 12,000 steps of some 70 ms on an H200, not run to the end.
        "small": {
            "pattern": "sparse_transformer_fixed:stride=128,summary=32",
            "seq_len": 8192,
            "layers": 12,
            "features": 512,
            "heads": 8,
            "dropout": 0.1,
            "steps": 12000,
            "batch_size": 8,
            "lr": 1e-3,
            "warmup": 500,
            "eval_every": 500,
            "eval_batches": 8,
            "save_every": 500,
            "prompt": "The ",
        },
        # Child et al. 2019 for enwik8: 80 epochs. Batch size (0.4 million bytes) and peak learning rate are ours.
        "enwik8_paper": {
            "pattern": "sparse_transformer_fixed:stride=128,summary=32",
            "seq_len": 12288,
            "layers": 30,
            "features": 512,
            "heads": 8,
            "positions": "row_column",
            "position_stride": 128,
            "mlp": "gelu",
            "norm": "layer",
            "tied": False,
            "dropout": 0.40,
            "recompute": True,
            "scan": True,
            "dtype": "bfloat16",
            "steps": 18300,
            "batch_size": 32,
            "lr": 3.5e-4,
            "lr_end": 0.0,
            "warmup": 5000,
            "weight_decay": 0.01,
            "beta2": 0.999,
            "clip": 1.0,
            "eval_every": 500,
            "eval_batches": 4,
            "save_every": 500,
            "prompt": "The ",
        },
    }
)


@dataclasses.dataclass(frozen=True)
class Config(shared.Config):
    """Settings of one run, see `examples.training.config.Config`.

    Raises:
      Refusal: a number is out of range, or a choice is unknown.

    Example:
      >>> Config(steps=10).features
      128
      >>> Config(steps=0)
      Traceback (most recent call last):
      ...
      examples.training.config.Refusal: --steps must be at least 1, got 0
    """

    configs = _CONFIGS
    command = "make train ARGS='{}'"

    data: str = option("", "file or folder to learn; default: this Python's standard library (.py files)")
    glob: str = option("", "which files of the folder, as in *.py; default: all")
    packed: bool = option(False, "keep documents apart: attention stays within one, and no first byte is predicted")
    separator: str = option("", "text that begins a document (\\n for a line's end), beside the beginning of a file")
    out: str = with_default("out", "runs/train_lm")
    seq_len: int = option(256, "tokens (bytes) in a sequence")
    position_stride: int = option(16, "columns of the two tables of row_column, normally the pattern's stride")
    prompt: str = option("def ", "text that the sample goes on from")
    sample_tokens: int = option(400, "bytes in the sample written at the end; 0: none", least=0)

    def __post_init__(self):
        super().__post_init__()
        if not self.prompt:
            raise Refusal("--prompt must have at least one character")
        if self.sample_tokens and self.seq_len < 2:
            raise Refusal("--seq-len 1 has no room for a sample: take --sample-tokens 0")
        if self.separator and not self.packed:
            raise Refusal("--separator begins a document, which only --packed keeps apart")

    @property
    def length(self) -> str:
        return f"--seq-len {self.seq_len}"

    def corpus(self) -> Corpus:
        """The text that is learnt.

        Raises:
          Refusal: see `data.load`.
        """
        separator = self.separator.replace("\\n", "\n")
        return load(self.data, self.seq_len, glob=self.glob, separator=separator)

    def source(self) -> Source:
        corpus = self.corpus()
        return Source(
            corpus.digest,
            corpus.heldout.size // self.seq_len,
            lambda step: corpus.batch(self.seed, step, self.batch_size, self.seq_len, self.packed),
            lambda count: corpus.heldout_windows(count, self.seq_len, self.packed),
        )

    def write_sample(self, model: Any, heldout: Batch, out: pathlib.Path) -> None:
        if self.sample_tokens:
            prompt = self.prompt.encode("utf-8", "surrogateescape")
            text = sample(model, prompt, self.sample_tokens, 0.8, seed=self.seed)
            (out / "sample.txt").write_bytes(text)
