"""What a person looks at afterwards: curves and the closing table."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .data import bits


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run came to.

    Attributes:
      pattern: as given.
      params: number of weights.
      rows: one dict a step: step, loss (nats), seconds (of training so far), and at evaluations heldout_bpb.
      tokens_per_step: bytes seen in a step.
      gzip: bits per byte of gzip on the held-out windows.
      order0: order-0 entropy of the held-out windows, bits per byte.
    """

    pattern: str
    params: int
    rows: list[dict[str, Any]]
    tokens_per_step: int
    gzip: float
    order0: float

    @property
    def steps_per_second(self) -> float:
        return self.rows[-1]["step"] / self.rows[-1]["seconds"]


def table(results: Sequence[Result]) -> str:
    """The closing table, one line a run."""
    head = ("pattern", "params", "steps", "steps/s", "tokens/s", "held-out bpb", "gzip bpb", "order-0 bpb")
    lines: list[tuple[str, ...]] = [head]
    for r in results:
        speed = r.steps_per_second
        bpb = f"{r.rows[-1]['heldout_bpb']:.3f}"
        numbers = (f"{r.params:,}", f"{r.rows[-1]['step']:,}", f"{speed:.2f}", f"{speed * r.tokens_per_step:,.0f}")
        lines.append((r.pattern, *numbers, bpb, f"{r.gzip:.3f}", f"{r.order0:.3f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def draw_loss(result: Result, path: pathlib.Path) -> None:
    """Training loss and held-out bits per byte against steps, with gzip and order 0 as lines to beat."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    steps, losses = _curve(result, "step")
    axes.plot(steps, losses, lw=1, label="training (running mean)")
    evaluated = [(row["step"], row["heldout_bpb"]) for row in result.rows if "heldout_bpb" in row]
    axes.plot(*zip(*evaluated, strict=True), "o-", ms=3, label=f"held-out: {evaluated[-1][1]:.3f} at the end")
    axes.axhline(result.gzip, color="gray", ls="--", lw=1, label=f"gzip, held-out: {result.gzip:.3f}")
    axes.axhline(result.order0, color="gray", ls=":", lw=1, label=f"order 0, held-out: {result.order0:.3f}")
    axes.set(xlabel="steps", ylabel="bits per byte", title=result.pattern)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_comparison(results: Sequence[Result], path: pathlib.Path) -> None:
    """Training loss of several runs, against steps and against seconds, side by side."""
    figure = Figure(figsize=(11, 4.2 + 0.25 * len(results)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for r in results:
        left.plot(*_curve(r, "step"), lw=1, label=f"{r.pattern} ({r.steps_per_second:.2f} steps/s)")
        right.plot(*_curve(r, "seconds"), lw=1)
    left.set(xlabel="steps", ylabel="training loss, bits per byte (running mean)")
    right.set(xlabel="seconds of training (without compiling and evaluating)")
    figure.legend(loc="outside lower center")
    figure.savefig(path, dpi=120)


def _curve(result: Result, key: str) -> tuple[np.ndarray, np.ndarray]:
    """``key`` and the loss in bits per byte, both averaged over a fiftieth of the run."""
    width = max(1, len(result.rows) // 50)
    mean = np.ones(width) / width
    x, loss = ([row[name] for row in result.rows] for name in (key, "loss"))
    return np.convolve(x, mean, "valid"), np.convolve([bits(value) for value in loss], mean, "valid")
