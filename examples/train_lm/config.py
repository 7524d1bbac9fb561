"""The settings of a language model, and the configs that have a name."""

import dataclasses
import pathlib
import types
from typing import Any

import numpy as np

from ..training import config as shared
from ..training.config import Refusal, flag, option, with_default
from ..training.data import Batch, Source
from . import recall
from .data import Corpus, load, prefix_order
from .sample import sample

_CONFIGS = types.MappingProxyType(
    {
        "cpu": {},
        # For one GPU: 12,000 steps of 60 ms on an H200.
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

    data: str = option(
        "",
        "file or folder to learn; recall: keys whose values were told long before, made up; "
        "default: this Python's standard library (.py files)",
    )
    glob: str = option("", "which files of the folder, as in *.py; default: all")
    packed: bool = option(False, "keep documents apart: attention stays within one, and no first byte is predicted")
    separator: str = option("", "text that begins a document (\\n for a line's end), beside the beginning of a file")
    objective: str = option(
        "causal",
        "causal: predict each byte from those before it; prefix: a random prefix of each sequence sees itself whole, "
        "and the bytes behind it are predicted; suffix: predict the same bytes, and see only earlier ones",
        ("causal", "prefix", "suffix"),
    )
    pairs: int = option(8, "of --data recall: keys and values told in a sequence")
    queries: int = option(0, "of --data recall: keys asked for in a sequence; 0: each once", least=0)
    parts: int = option(
        1,
        "of --data recall: cut the sequences of a step, in turn, into 1, 4, 16, ... up to so many parts that do not "
        "see each other; short ones are learnt first",
    )
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
        if not self.recalls:
            for name in ("pairs", "queries", "parts"):
                if getattr(self, name) != getattr(Config, name):
                    raise Refusal(f"{flag(name)} is of --data recall, got {getattr(self, name)} without it")
            if self.packed and self.objective != "causal":
                raise Refusal(f"--objective {self.objective} has one prefix a sequence, which --packed cuts")
            return
        for name in ("glob", "packed", "objective"):
            if getattr(self, name) != getattr(Config, name):
                raise Refusal(f"{flag(name)} is of files, --data recall has none")
        most = min(len(recall.KEYS), self.seq_len // 8)
        if self.pairs > most:
            raise Refusal(
                f"--pairs must be at most {most} with --seq-len {self.seq_len}, got {self.pairs}: there are "
                f"{len(recall.KEYS)} keys, and a pair needs 8 bytes"
            )
        if self.queries > self.pairs:
            raise Refusal(f"--queries must be at most --pairs, got {self.queries} and {self.pairs}")
        # Where a power of 4 divides the length, so do the smaller ones.
        if self.parts not in (4**i for i in range(16)) or self.seq_len % self.parts or self.seq_len < 8 * self.parts:
            raise Refusal(
                f"--parts must be 1, 4, 16, ..., and cut --seq-len {self.seq_len} into equal ones of 8 bytes or more, "
                f"got {self.parts}"
            )

    @property
    def recalls(self) -> bool:
        """True if sequences are made up, to be recalled from, and no text is learnt."""
        return self.data == "recall"

    @property
    def looks_ahead(self) -> bool:
        return self.objective == "prefix"

    @property
    def length(self) -> str:
        return f"--seq-len {self.seq_len}"

    def corpus(self) -> Corpus:
        """The text that is learnt.

        Raises:
          Refusal: there is none, or see `data.load`.
        """
        if self.recalls:
            raise Refusal("--data recall is no text")
        separator = self.separator.replace("\\n", "\n")
        return load(self.data, self.seq_len, glob=self.glob, separator=separator)

    def source(self) -> Source:
        if self.recalls:
            queries = self.queries or self.pairs
            return recall.source(self.seed, self.seq_len, self.batch_size, self.pairs, queries, self.parts)
        corpus = self.corpus()

        def batch(step: int) -> Batch:
            windows = corpus.batch(self.seed, step, self.batch_size, self.seq_len, self.packed)
            return self._with_prefixes(windows, [self.seed, step])

        def heldout(count: int) -> Batch:
            return self._with_prefixes(corpus.heldout_windows(count, self.seq_len, self.packed), [0])

        return Source(corpus.digest, corpus.heldout.size // self.seq_len, batch, heldout)

    def _with_prefixes(self, batch: Batch, seed: list[int]) -> Batch:
        """The batch, with a prefix of 0 to T - 1 bytes in each sequence, drawn from a seed; not for "causal"."""
        if self.objective == "causal":
            return batch
        # As the order of the data, the same in every version of NumPy.
        drawn = np.random.SeedSequence(seed).generate_state(len(batch.tokens), np.uint64)
        prefixes = (drawn % np.uint64(self.seq_len)).astype(np.int32)
        order = prefix_order(prefixes, self.seq_len) if self.looks_ahead else None
        return batch._replace(answers=np.arange(1, self.seq_len + 1) >= prefixes[:, None], order_ids=order)

    def write_sample(self, model: Any, heldout: Batch, out: pathlib.Path) -> None:
        if self.sample_tokens and not self.recalls:
            prompt = self.prompt.encode("utf-8", "surrogateescape")
            text = sample(model, prompt, self.sample_tokens, 0.8, seed=self.seed, is_prefix=self.looks_ahead)
            (out / "sample.txt").write_bytes(text)
