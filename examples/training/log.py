"""The log of a run: one row a step, to metrics.jsonl, the progress line, and TensorBoard if asked."""

import contextlib
import json
import math
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from .config import Config, Refusal
from .data import bits
from .model import step_flops
from .processes import is_first

METRICS = "metrics.jsonl"

# Dense bfloat16 products of one device with float32 sums, in TFLOP/s, from the makers' data sheets.
_PEAK_TFLOPS = {
    "NVIDIA H200": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100": 312,
    "NVIDIA L40S": 362,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
}


class Log(contextlib.ExitStack):
    """The rows of a run, as a context manager that closes what they are written to.

    A row has step, loss (nats a byte), grad_norm, seconds (of training so far: no compiling, evaluating or saving),
    step_ms, input_ms (waiting for data), tokens_per_second, memory_gb (peak of one device since the process
    began; of the process on a CPU), mfu (where the device's peak is known); where it was evaluated heldout_bpb, and
    of data with answers accuracy, the share of the held-out ones that are predicted exactly.

    Args:
      folder: where metrics.jsonl lies.
      config: of the run.
      rows: those of the steps that were done before.
      devices: `jax.Device`s that the run computes on.

    Raises:
      Refusal: TensorBoard files are asked for, and tensorboardX is not installed.
    """

    def __init__(self, folder: pathlib.Path, config: Config, rows: list[dict[str, Any]], devices: list[Any]):
        super().__init__()
        self.rows = rows
        self._device = next(device for device in devices if device.process_index == jax.process_index())
        self._tokens = config.batch_size * config.seq_len
        self._flops = step_flops(config)
        self._peak = len(devices) * (config.peak_tflops or _peak(devices[0])) * 1e12
        self._newest = {name: value for row in rows for name, value in row.items()}
        self._write = self._tensorboard(folder, len(rows)) if config.tensorboard else lambda row: None
        self._file = self.enter_context((folder / METRICS).open("a", buffering=1))
        steps = {"initial": len(rows), "total": config.steps, "unit": "step", "desc": config.pattern}
        self._bar = self.enter_context(tqdm(**steps, dynamic_ncols=True, disable=not is_first()))
        self.start_clock()

    def start_clock(self) -> None:
        """To be called when training goes on after something that is no training."""
        self._clock = time.perf_counter()

    def read(self, number: int, seen: dict[str, jax.Array], waited: float) -> dict[str, Any]:
        """The row of a step, when the device has done it.

        Args:
          number: of the step.
          seen: what the step returned.
          waited: seconds that it waited for its data.
        """
        values = jax.device_get(seen)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        row: dict[str, Any] = {"step": number, **{name: float(value) for name, value in values.items()}}
        row["seconds"] = seconds + (self.rows[-1]["seconds"] if self.rows else 0.0)
        row["step_ms"], row["input_ms"] = 1e3 * seconds, 1e3 * waited
        row["tokens_per_second"] = self._tokens / seconds
        row["memory_gb"] = memory(self._device) / 1e9
        if self._peak:
            row["mfu"] = self._flops / seconds / self._peak
        return row

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row wherever it belongs."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._write(row)
        self._newest |= row
        self._bar.set_postfix_str(_line(self._newest), refresh=False)
        self._bar.update()

    def sync(self) -> None:
        """Puts the rows on disk: none of them may be younger than the checkpoint that is saved next."""
        os.fsync(self._file.fileno())

    def _tensorboard(self, folder: pathlib.Path, done: int) -> Callable[[dict[str, Any]], None]:
        # What was written of steps that a resumed run does again is left out by TensorBoard.
        writer = self.enter_context(summary_writer()(str(folder / "tensorboard"), purge_step=done + 1))

        def write(row):
            for name in row.keys() - {"step"}:
                writer.add_scalar(name, row[name], row["step"])

        return write


def _line(newest: dict[str, Any]) -> str:
    """The progress line: of each column the newest value."""
    heldout = f"held-out {newest['heldout_bpb']:.3f} bpb, " if "heldout_bpb" in newest else ""
    accuracy = f"accuracy {newest['accuracy']:.1%}, " if "accuracy" in newest else ""
    mfu = f", MFU {newest['mfu']:.1%}" if "mfu" in newest else ""
    return (
        f"loss {bits(newest['loss']):.3f} bpb, {heldout}{accuracy}{newest['tokens_per_second']:,.0f} tokens/s, "
        f"{newest['step_ms']:.0f} ms{mfu}, {newest['memory_gb']:.1f} GB"
    )


def summary_writer() -> Any:
    """The class that writes TensorBoard files.

    Raises:
      Refusal: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports] (an option)
    except ImportError as error:
        raise Refusal("--tensorboard needs the package tensorboardX, which is not installed") from error
    return SummaryWriter


def read_rows(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The rows of the steps up to ``step``; later ones, of steps that were not saved, are dropped from the file too.

    Raises:
      Refusal: rows are missing.
    """
    try:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines[:step]]
        if [row["step"] for row in rows] != list(range(1, step + 1)):
            raise ValueError("steps are missing")
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{path} is damaged: {error}") from error
    if len(lines) > step and is_first():
        shorter = path.with_suffix(".tmp")
        shorter.write_text("".join(lines[:step]))
        shorter.replace(path)
    return rows


def memory(device: Any) -> int:
    """Peak bytes in use: of the device, or where it does not say (CPUs), of this process."""
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _peak(device: Any) -> float:
    """TFLOP/s of a device; 0 if it is not in the table."""
    return next((peak for name, peak in _PEAK_TFLOPS.items() if device.device_kind.startswith(name)), 0)


def median(rows: list[dict[str, Any]], name: str) -> float:
    """The median of a column, without the first step, which warms up; NaN where no row has it.

    Example:
      >>> median([{"step_ms": 90.0}, {"step_ms": 3.0}, {"step_ms": 1.0}, {"step_ms": 2.0}], "step_ms")
      2.0
    """
    values = [row[name] for row in rows[1:] or rows if name in row]
    return float(np.median(values)) if values else math.nan
