"""Every setting of the example, and the command line made from it."""

import argparse
import dataclasses
from typing import Any, Self


class Refusal(ValueError):
    """A request that cannot be served. The message is one line for the person who made it; the exit code is 2."""


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one run. A field's text is its comment here and its help on the command line.

    Raises:
      Refusal: a number is out of range, or a choice is unknown.

    Example:
      >>> Config(steps=10).features
      128
      >>> Config(steps=0)
      Traceback (most recent call last):
      ...
      examples.train_lm.config.Refusal: --steps must be at least 1, got 0
    """

    # What is learnt.
    data: str = _option("", "file or folder to learn; default: this Python's standard library (.py files)")
    out: str = _option("runs/train_lm", "new folder for checkpoint, curve, sample and metrics")
    seed: int = _option(0, "seed of weights and of the order of the data")

    # The model.
    pattern: str = _option(
        "sparse_transformer_strided:stride=16",
        "PRESET[:key=value,...], several joined by '+' are taken by the layers in turn; made causal if it is not",
    )
    seq_len: int = _option(256, "tokens (bytes) in a sequence")
    layers: int = _option(4, "transformer blocks")
    features: int = _option(128, "width of the residual stream")
    heads: int = _option(4, "attention heads; must divide features")
    positions: str = _option("rope", "rope: rotary; row_column: two learned tables, as in Child et al.; none")
    position_stride: int = _option(16, "columns of the two tables of row_column, normally the pattern's stride")

    # Where and how it is computed.
    device: str = _option("auto", "cpu, gpu, tpu, or auto: the fastest that JAX finds")
    dtype: str = _option("auto", "of the computation: float32, bfloat16, or auto: bfloat16 unless on a CPU")

    # The optimiser: AdamW, linear warm-up, then a cosine to a tenth of the peak; gradients clipped to norm 1.
    steps: int = _option(2000, "optimiser steps")
    batch_size: int = _option(4, "sequences in a step")
    lr: float = _option(3e-3, "peak learning rate")
    warmup: int = _option(50, "steps of linear warm-up")
    weight_decay: float = _option(0.1, "decoupled weight decay of the matrices (biases and scales have none)")

    # What is reported and kept.
    eval_every: int = _option(250, "steps between two evaluations on held-out bytes")
    eval_batches: int = _option(64, "held-out batches (of batch_size fixed windows) in an evaluation")
    save_every: int = _option(250, "steps between two checkpoints; the last two are kept")
    prompt: str = _option("def ", "text that the sample goes on from")
    sample_tokens: int = _option(400, "bytes in the sample written at the end; 0: none")

    def __post_init__(self):
        least = {"lr": 0.0, "weight_decay": 0.0, "warmup": 0, "sample_tokens": 0, "seed": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is not str and not value >= least.get(field.name, 1):
                raise Refusal(f"{_flag(field.name)} must be at least {least.get(field.name, 1)}, got {value}")
        if self.features % self.heads:
            raise Refusal(f"--heads must divide --features, got {self.heads} and {self.features}")
        if self.positions not in ("row_column", "rope", "none"):
            raise Refusal(f"--positions must be row_column, rope or none, got {self.positions!r}")
        for name, choices in (("device", ("auto", "cpu", "gpu", "tpu")), ("dtype", ("auto", "float32", "bfloat16"))):
            if getattr(self, name) not in choices:
                raise Refusal(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not self.prompt:
            raise Refusal("--prompt must have at least one character")

    @classmethod
    def load(cls, saved: dict[str, Any], given: dict[str, Any]) -> Self:
        """The config of a saved run, where the flags ``given`` now may repeat it but not change it (but for --out).

        Raises:
          Refusal: a flag contradicts the saved run, or the saved run has other fields.
        """
        if set(saved) != {field.name for field in dataclasses.fields(cls)}:
            raise Refusal("the checkpoint was not written by this version of the example")
        changed = [name for name in given if name != "out" and given[name] != saved[name]]
        if changed:
            now, then = given[changed[0]], saved[changed[0]]
            raise Refusal(
                f"{_flag(changed[0])} {now} contradicts the run to resume, which has {then}: leave the flag out"
            )
        return cls(**{**saved, **given})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds one flag a field; a flag that is not given is absent from the result, so that a resumed run can tell."""
    for field in dataclasses.fields(Config):
        text = field.metadata["help"] + (f" [{field.default}]" if field.default != "" else "")
        parser.add_argument(_flag(field.name), type=field.type, default=argparse.SUPPRESS, help=text.replace("%", "%%"))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
