"""The settings that examples share, what an example adds to them, and the command line made from both."""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import sparse_layers as sl

from .data import Batch, Source


class Refusal(ValueError):
    """A request that cannot be served. The message is one line for the person who made it; the exit code is 2."""


def option(default: Any, text: str, choices: tuple[Any, ...] = (), least: float = 1) -> Any:
    """A field: its default, its help, and either its choices or, for a number, the least value."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "least": least})


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one run. A field's text is its comment here and its help on the command line.

    An example is a class derived from this one: it adds fields, gives some of these others defaults, says how long a
    sequence is, and what a run learns and writes at its end.

    Attributes:
      seq_len: tokens (bytes) in a sequence.
      position_stride: columns of the two tables of positions="row_column".
      configs: the settings in which each config with a name differs from the defaults.
      command: how one calls the example's training.
      compared: the patterns of a --compare that names none; "": it must name them.

    Raises:
      Refusal: a number is out of range, or a choice is unknown.
    """

    configs: ClassVar[Mapping[str, Mapping[str, Any]]]
    command: ClassVar[str]
    compared: ClassVar[str] = ""

    # What is learnt.
    data: str = option("", "file or folder to learn")
    out: str = option("runs", "new folder for checkpoints, curve, sample and metrics")
    seed: int = option(0, "seed of weights, dropout and the order of the data, below 2**32", least=0)

    # The model.
    pattern: str = option(
        "sparse_transformer_strided:stride=16",
        "PRESET[:key=value,...] or a scorer's name, as moba:block=64; several joined by '+' are taken by the layers in "
        "turn; made causal if it is not",
    )
    seq_len: int = dataclasses.field(init=False)
    layers: int = option(4, "transformer blocks")
    features: int = option(128, "width of the residual stream")
    heads: int = option(4, "attention heads; must divide features")
    positions: str = option(
        "rope",
        "rope: rotary; row_column: two learned tables, as in Child et al.; none",
        ("rope", "row_column", "none"),
    )
    position_stride: int = dataclasses.field(init=False)
    # Measured on two million bytes: SwiGLU, RMS norm and a tied head are 0.3 bits per byte better than the paper's.
    mlp: str = option("swiglu", "hidden layers: swiglu (8/3 features wide), or gelu (4 features)", ("swiglu", "gelu"))
    norm: str = option("rms", "rms or layer", ("rms", "layer"))
    tied: bool = option(True, "use the byte embedding as the output head, too")
    dropout: float = option(0.0, "share of values dropped at the ends of the residual branches, below 1", least=0)

    # Where and how it is computed.
    device: str = option("auto", "cpu, gpu, tpu, or auto: the fastest that JAX finds", ("auto", "cpu", "gpu", "tpu"))
    dtype: str = option(
        "auto",
        "of the computation: float32, bfloat16, or auto: bfloat16 unless on a CPU; weights are float32 in any case",
        ("auto", "float32", "bfloat16"),
    )
    data_parallel: int = option(0, "devices that split the sequences; 0: as many as there are and divide them", least=0)
    fsdp: int = option(1, "devices that split the sequences, and weights and optimiser state along features")
    context_parallel: int = option(1, "devices that split each sequence; must divide its length")
    tensor_parallel: int = option(1, "devices that split the heads and the hidden layers; must divide heads")
    recompute: bool = option(False, "keep only each layer's input, compute the rest again in the backward pass")
    scan: bool = option(False, "compile one layer and loop over it: deep models compile in the time of shallow ones")
    peak_tflops: float = option(0.0, "of one device, for the MFU; 0: from a table, if the device is in it", least=0)

    # The optimiser: AdamW, linear warm-up, then a cosine.
    steps: int = option(2000, "optimiser steps")
    batch_size: int = option(4, "sequences in a step")
    lr: float = option(3e-3, "peak learning rate", least=0)
    lr_end: float = option(0.1, "share of the peak that the cosine ends at", least=0)
    warmup: int = option(50, "steps of linear warm-up", least=0)
    weight_decay: float = option(0.1, "decoupled weight decay of the matrices (biases and scales have none)", least=0)
    beta2: float = option(0.95, "decay of Adam's second moment", least=0)
    clip: float = option(1.0, "largest norm of the gradients; 0: any", least=0)

    # What is reported and kept.
    eval_every: int = option(250, "steps between two evaluations on held-out bytes")
    eval_batches: int = option(
        64, "held-out batches (of batch_size fixed windows) in an evaluation, if there are so many"
    )
    save_every: int = option(250, "steps between two checkpoints; the last two are kept")
    tensorboard: bool = option(False, "also write TensorBoard files (needs the package tensorboardX)")

    def __post_init__(self):
        for field in options(type(self)):
            name, value, least = flag(field.name), getattr(self, field.name), field.metadata["least"]
            choices = field.metadata["choices"]
            if field.type in (int, float) and not least <= value < float("inf"):
                raise Refusal(f"{name} must be at least {least}{'' if value < least else ' and finite'}, got {value}")
            if choices and value not in choices:
                raise Refusal(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        for name in ("dropout", "beta2"):
            if getattr(self, name) >= 1:
                raise Refusal(f"{flag(name)} must be below 1, got {getattr(self, name)}")
        if self.features % self.heads:
            raise Refusal(f"--heads must divide --features, got {self.heads} and {self.features}")
        if self.seq_len % self.context_parallel:
            raise Refusal(f"--context-parallel must divide the length, got {self.context_parallel} and {self.length}")
        if self.heads % self.tensor_parallel:
            raise Refusal(f"--tensor-parallel must divide --heads, got {self.tensor_parallel} and {self.heads}")
        if self.batch_size % (max(self.data_parallel, 1) * self.fsdp):
            raise Refusal(
                f"--batch-size must be a multiple of --data-parallel times --fsdp, got {self.batch_size}, "
                f"{self.data_parallel} and {self.fsdp}"
            )
        if self.seed >= 2**32:
            raise Refusal(f"--seed must be below 2**32, got {self.seed}")

    @property
    def length(self) -> str:
        """The flags that make a sequence's length."""
        raise NotImplementedError

    @property
    def looks_ahead(self) -> bool:
        """True if patterns look both ways, and the order ids of a batch say what a byte sees."""
        return False

    def mask(self, name: str) -> Any:
        """The mask, the masks that the heads take in turn, or the scorer, of one of the parts of ``pattern``.

        Raises:
          ValueError: as `sparse_layers.preset` and `sparse_layers.Scorer.named`.
        """
        return sl.Scorer.named(name) or sl.preset(name)

    def source(self) -> Source:
        """Returns the data of a run.

        Raises:
          Refusal: it is not there, cannot be read, or is too little.
        """
        raise NotImplementedError

    def write_sample(self, model: Any, heldout: Batch, out: pathlib.Path) -> None:
        """Writes what the trained ``model`` makes, and what becomes of the sequences ``heldout``, into a folder."""
        raise NotImplementedError

    @classmethod
    def load(cls, saved: dict[str, Any], flags: dict[str, Any]) -> Self:
        """The config of a saved run, where ``flags`` may repeat it, but change no more than `MOVABLE`.

        Raises:
          Refusal: a flag contradicts the saved run, or the saved run has other fields.
        """
        if set(saved) | MOVABLE != {field.name for field in dataclasses.fields(cls)}:
            raise Refusal("the checkpoint was not written by this version of the example")
        # What this example called "dense" was made causal, as any pattern is here, and has that name now.
        patterns = ["causal" if name == "dense" else name for name in saved["pattern"].split("+")]
        saved = {**saved, "pattern": "+".join(patterns)}
        changed = [name for name in flags if name not in MOVABLE and flags[name] != saved[name]]
        if changed:
            now, then = flags[changed[0]], saved[changed[0]]
            raise Refusal(
                f"{flag(changed[0])} {now} contradicts the run to resume, which has {then}: leave the flag out"
            )
        # What says where it is computed may have been added since then.
        return cls(**{field.name: {**saved, **flags}.get(field.name, field.default) for field in options(cls)})


# What may differ when a run goes on: where it lies and which devices compute it, not what it computes.
MOVABLE = {"out", "data_parallel", "fsdp", "context_parallel", "tensor_parallel", "peak_tflops", "tensorboard"}


def with_default(name: str, default: Any) -> Any:
    """A field of `Config` once more, with another default."""
    return dataclasses.field(default=default, metadata=Config.__dataclass_fields__[name].metadata)


def options(kind: type[Config]) -> list[dataclasses.Field]:
    """The fields that have a flag."""
    return [field for field in dataclasses.fields(kind) if field.init]


def settings(kind: type[Config], flags: dict[str, Any]) -> dict[str, Any]:
    """The settings of a command line: those of the config that its flag "config" names, changed by its other flags.

    Raises:
      Refusal: there is no such config.

    Example:
      >>> from examples.train_lm.config import Config
      >>> settings(Config, {"config": "enwik8_paper", "layers": 2})["seq_len"]
      12288
    """
    name = flags.get("config", "cpu")
    if name not in kind.configs:
        raise Refusal(f"--config must be one of {', '.join(kind.configs)}, got {name!r}")
    return {**kind.configs[name], **{flag: value for flag, value in flags.items() if flag != "config"}}


def add_options(parser: argparse.ArgumentParser, kind: type[Config]) -> None:
    """Adds --config and a flag a field; what is not given is absent from the result, so that a resumed run can tell."""
    names = ", ".join(kind.configs)
    parser.add_argument("--config", metavar="NAME", default=argparse.SUPPRESS, help=f"start from one of {names} [cpu]")
    for field in options(kind):
        text = field.metadata["help"] + (f" [{field.default}]" if field.default != "" else "")
        how: Any = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument(flag(field.name), default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)


def flag(name: str) -> str:
    """The flag of a field.

    Example:
      >>> flag("seq_len")
      '--seq-len'
    """
    return "--" + name.replace("_", "-")
