"""Every setting of the example, the configs that have a name, and the command line made from them."""

import argparse
import dataclasses
import types
from typing import Any, Self


class Refusal(ValueError):
    """A request that cannot be served. The message is one line for the person who made it; the exit code is 2."""


def _option(default: Any, text: str, choices: tuple[str, ...] = (), least: float = 1) -> Any:
    """A field: its default, its help, and either its choices or, for a number, the least value."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "least": least})


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
    glob: str = _option("", "which files of the folder, as in *.py; default: all")
    packed: bool = _option(False, "keep documents apart: attention stays within one, and no first byte is predicted")
    separator: str = _option("", "text that begins a document (\\n for a line's end), beside the beginning of a file")
    out: str = _option("runs/train_lm", "new folder for checkpoints, curve, sample and metrics")
    seed: int = _option(0, "seed of weights, dropout and the order of the data, below 2**32", least=0)

    # The model.
    pattern: str = _option(
        "sparse_transformer_strided:stride=16",
        "PRESET[:key=value,...], several joined by '+' are taken by the layers in turn; made causal if it is not",
    )
    seq_len: int = _option(256, "tokens (bytes) in a sequence")
    layers: int = _option(4, "transformer blocks")
    features: int = _option(128, "width of the residual stream")
    heads: int = _option(4, "attention heads; must divide features")
    positions: str = _option(
        "rope",
        "rope: rotary; row_column: two learned tables, as in Child et al.; none",
        ("rope", "row_column", "none"),
    )
    position_stride: int = _option(16, "columns of the two tables of row_column, normally the pattern's stride")
    # Measured on two million bytes: SwiGLU, RMS norm and a tied head are 0.3 bits per byte better than the paper's.
    mlp: str = _option("swiglu", "hidden layers: swiglu (8/3 features wide), or gelu (4 features)", ("swiglu", "gelu"))
    norm: str = _option("rms", "rms or layer", ("rms", "layer"))
    tied: bool = _option(True, "use the byte embedding as the output head, too")
    dropout: float = _option(0.0, "share of values dropped at the ends of the residual branches, below 1", least=0)

    # Where and how it is computed.
    device: str = _option("auto", "cpu, gpu, tpu, or auto: the fastest that JAX finds", ("auto", "cpu", "gpu", "tpu"))
    dtype: str = _option(
        "auto",
        "of the computation: float32, bfloat16, or auto: bfloat16 unless on a CPU; weights are float32 in any case",
        ("auto", "float32", "bfloat16"),
    )
    data_parallel: int = _option(
        0, "devices that split the sequences; 0: as many as there are and divide them", least=0
    )
    fsdp: int = _option(1, "devices that split the sequences, and weights and optimiser state along features")
    tensor_parallel: int = _option(1, "devices that split the heads and the hidden layers; must divide heads")
    recompute: bool = _option(False, "keep only each layer's input, compute the rest again in the backward pass")
    scan: bool = _option(False, "compile one layer and loop over it: deep models compile in the time of shallow ones")
    peak_tflops: float = _option(0.0, "of one device, for the MFU; 0: from a table, if the device is in it", least=0)

    # The optimiser: AdamW, linear warm-up, then a cosine.
    steps: int = _option(2000, "optimiser steps")
    batch_size: int = _option(4, "sequences in a step")
    lr: float = _option(3e-3, "peak learning rate", least=0)
    lr_end: float = _option(0.1, "share of the peak that the cosine ends at", least=0)
    warmup: int = _option(50, "steps of linear warm-up", least=0)
    weight_decay: float = _option(0.1, "decoupled weight decay of the matrices (biases and scales have none)", least=0)
    beta2: float = _option(0.95, "decay of Adam's second moment", least=0)
    clip: float = _option(1.0, "largest norm of the gradients; 0: any", least=0)

    # What is reported and kept.
    eval_every: int = _option(250, "steps between two evaluations on held-out bytes")
    eval_batches: int = _option(
        64, "held-out batches (of batch_size fixed windows) in an evaluation, if there are so many"
    )
    save_every: int = _option(250, "steps between two checkpoints; the last two are kept")
    tensorboard: bool = _option(False, "also write TensorBoard files (needs the package tensorboardX)")
    prompt: str = _option("def ", "text that the sample goes on from")
    sample_tokens: int = _option(400, "bytes in the sample written at the end; 0: none", least=0)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value, least = flag(field.name), getattr(self, field.name), field.metadata["least"]
            choices = field.metadata["choices"]
            if field.type in (int, float) and not least <= value < float("inf"):
                raise Refusal(f"{name} must be at least {least}{'' if value < least else ' and finite'}, got {value}")
            if choices and value not in choices:
                raise Refusal(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("dropout", "beta2"):
            if getattr(self, name) >= 1:
                raise Refusal(f"{flag(name)} must be below 1, got {getattr(self, name)}")
        if self.features % self.heads:
            raise Refusal(f"--heads must divide --features, got {self.heads} and {self.features}")
        if self.heads % self.tensor_parallel:
            raise Refusal(f"--tensor-parallel must divide --heads, got {self.tensor_parallel} and {self.heads}")
        if self.batch_size % (max(self.data_parallel, 1) * self.fsdp):
            raise Refusal(
                f"--batch-size must be a multiple of --data-parallel times --fsdp, got {self.batch_size}, "
                f"{self.data_parallel} and {self.fsdp}"
            )
        if not self.prompt:
            raise Refusal("--prompt must have at least one character")
        if self.seed >= 2**32:
            raise Refusal(f"--seed must be below 2**32, got {self.seed}")
        if self.sample_tokens and self.seq_len < 2:
            raise Refusal("--seq-len 1 has no room for a sample: take --sample-tokens 0")
        if self.separator and not self.packed:
            raise Refusal("--separator begins a document, which only --packed keeps apart")

    @classmethod
    def load(cls, saved: dict[str, Any], given: dict[str, Any]) -> Self:
        """The config of a saved run, where the flags ``given`` now may repeat it, but change no more than `MOVABLE`.

        Raises:
          Refusal: a flag contradicts the saved run, or the saved run has other fields.
        """
        if set(saved) != {field.name for field in dataclasses.fields(cls)}:
            raise Refusal("the checkpoint was not written by this version of the example")
        # What this example called "dense" was made causal, as any pattern is here, and has that name now.
        parts = ["causal" if part == "dense" else part for part in saved["pattern"].split("+")]
        saved = {**saved, "pattern": "+".join(parts)}
        changed = [name for name in given if name not in MOVABLE and given[name] != saved[name]]
        if changed:
            now, then = given[changed[0]], saved[changed[0]]
            raise Refusal(
                f"{flag(changed[0])} {now} contradicts the run to resume, which has {then}: leave the flag out"
            )
        return cls(**{**saved, **given})


# What may differ when a run goes on: where it lies and which devices compute it, not what it computes.
MOVABLE = {"out", "data_parallel", "fsdp", "tensor_parallel", "peak_tflops", "tensorboard"}

# The settings in which each named config differs from the defaults above.
CONFIGS = types.MappingProxyType(
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


def settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a command line: those of the config that its flag "config" names, changed by its other flags.

    Raises:
      Refusal: there is no such config.

    Example:
      >>> settings({"config": "enwik8_paper", "layers": 2})["seq_len"]
      12288
    """
    name = given.get("config", "cpu")
    if name not in CONFIGS:
        raise Refusal(f"--config must be one of {', '.join(CONFIGS)}, got {name!r}")
    return {**CONFIGS[name], **{flag: value for flag, value in given.items() if flag != "config"}}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --config and a flag a field; what is not given is absent from the result, so that a resumed run can tell."""
    names = ", ".join(CONFIGS)
    parser.add_argument("--config", metavar="NAME", default=argparse.SUPPRESS, help=f"start from one of {names} [cpu]")
    for field in dataclasses.fields(Config):
        text = field.metadata["help"] + (f" [{field.default}]" if field.default != "" else "")
        kind: Any = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument(flag(field.name), default=argparse.SUPPRESS, help=text.replace("%", "%%"), **kind)


def flag(name: str) -> str:
    """The flag of a field.

    Example:
      >>> flag("seq_len")
      '--seq-len'
    """
    return "--" + name.replace("_", "-")
