"""The report of a run: curves and the closing table.

``python -m examples.training.report compare.json --picture compare.png`` prints and draws a recorded comparison again,
or several of them, of other seeds, together.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .data import bits
from .log import median

STYLE = pathlib.Path(__file__).parents[2] / "docs" / "pictures" / "style.mplstyle"
# Of a row, what table and figures are made from.
_COLUMNS = ("step", "loss", "seconds", "step_ms", "mfu", "heldout_bpb", "accuracy")
# Whose versions are recorded.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
      pattern: as given.
      params: number of weights.
      rows: one dict a step, see `examples.training.log.Log`.
      tokens_per_step: bytes seen in a step.
      memory: bytes that a step takes of one device's memory.
      gzip: bits per byte of gzip on the held-out windows.
      order0: order-0 entropy of the held-out windows, bits per byte.
    """

    pattern: str
    params: int
    rows: list[dict[str, Any]]
    tokens_per_step: int
    memory: int
    gzip: float
    order0: float

    @property
    def tokens_per_second(self) -> float:
        """By the median step."""
        return 1e3 * self.tokens_per_step / median(self.rows, "step_ms")


def table(results: Sequence[Result]) -> str:
    """The closing table, one line a run; times are those of the median step."""
    head = (
        "pattern",
        "params",
        "steps",
        "ms/step",
        "tokens/s",
        "MFU",
        "memory/step",
        "held-out bpb",
        "accuracy",
        "gzip",
        "order 0",
    )
    lines: list[tuple[str, ...]] = [head]
    for r in results:
        mfu, last = median(r.rows, "mfu"), r.rows[-1]
        numbers = (
            f"{r.params:,}",
            f"{last['step']:,}",
            f"{median(r.rows, 'step_ms'):.1f}",
            f"{r.tokens_per_second:,.0f}",
            "-" if np.isnan(mfu) else f"{mfu:.1%}",
            f"{r.memory / 1e9:.2f} GB",
            f"{last['heldout_bpb']:.3f}",
            f"{last['accuracy']:.1%}" if "accuracy" in last else "-",
        )
        lines.append((r.pattern, *numbers, f"{r.gzip:.3f}", f"{r.order0:.3f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def save(results: Sequence[Result], path: pathlib.Path, device: str) -> None:
    """Writes what `table` and `draw_comparison` are made from, with the command, the machine and the versions.

    An older record stays until the new one is whole: a comparison that is resumed is recorded again, from the same rows
    and newer ones.
    """
    record = {
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {x: importlib.metadata.version(x) for x in _PACKAGES},
        "device": device,
        "lines": table(results).splitlines(),
        "results": [
            {**dataclasses.asdict(r), "rows": {name: [row.get(name) for row in r.rows] for name in _COLUMNS}}
            for r in results
        ],
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def load(path: pathlib.Path) -> list[Result]:
    """The results that `save` has written."""
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    for result in results:
        columns = result["rows"]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        result["rows"] = [{name: value for name, value in row.items() if value is not None} for row in rows]
    return [Result(**result) for result in results]


@matplotlib.rc_context(fname=STYLE)
def draw_run(result: Result, path: pathlib.Path) -> None:
    """Loss and held-out bits per byte against steps, gzip and order 0 as lines to beat; below, accuracy and speed."""
    figure = Figure(figsize=(7, 6))
    accuracy = _evaluated(result, "step", "accuracy")
    heights = (3, 1, 1) if accuracy[0] else (3, 1)
    axes, *below, speed = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for panel in below:
        panel.plot(*accuracy, "o-")
        panel.set(ylabel="accuracy", ylim=(0, 1))
    axes.plot(*_curve(result, "step"), lw=1, label="training (running mean)")
    evaluated = _evaluated(result, "step")
    axes.plot(*evaluated, "o-", label=f"held-out: {evaluated[1][-1]:.3f} at the end")
    axes.axhline(result.gzip, color="gray", ls="--", lw=1, label=f"gzip, held-out: {result.gzip:.3f}")
    axes.axhline(result.order0, color="gray", ls=":", lw=1, label=f"order 0, held-out: {result.order0:.3f}")
    axes.set_ylabel("bits per byte")
    axes.set_title(_in_lines(result.pattern), fontsize="small")
    axes.legend()
    speed.plot(*([row[name] for row in result.rows[1:] or result.rows] for name in ("step", "tokens_per_second")), lw=1)
    speed.set(xlabel="steps", ylabel="tokens/s", ylim=(0, None))
    if "mfu" in result.rows[-1]:
        share = result.rows[-1]["mfu"] / result.rows[-1]["tokens_per_second"]
        right = speed.secondary_yaxis("right", functions=(lambda x: 100 * share * x, lambda x: x / (100 * share)))
        right.set_ylabel("MFU, %")
    figure.savefig(path)


@matplotlib.rc_context(fname=STYLE)
def draw_comparison(results: Sequence[Result], path: pathlib.Path) -> None:
    """Training loss (lines) and held-out bits per byte (dots) of several runs, against steps and against seconds.

    Where a run has accuracies, they lie below. Runs of one pattern, of several seeds, have one colour.
    """
    groups = _by_pattern(results)
    labels = [f"{_in_lines(x)} ({runs[0].tokens_per_second:,.0f} tokens/s)" for x, runs in groups.items()]
    figure = Figure(figsize=(11, 4.7 + 0.22 * len("\n".join(labels).splitlines())))
    accurate = any("accuracy" in row for r in results for row in r.rows)
    panels = figure.subplots(1 + accurate, 2, sharex="col", sharey="row", squeeze=False)
    left, right = panels[0]
    for number, (runs, label) in enumerate(zip(groups.values(), labels, strict=True)):
        for r in runs:
            _draw(left, r, "step", f"C{number}", label if r is runs[0] else None)
            _draw(right, r, "seconds", f"C{number}", None)
            for axes, key in zip(panels[1:].flat, ("step", "seconds"), strict=False):
                axes.plot(*_evaluated(r, key, "accuracy"), "o-", color=f"C{number}")
                axes.set(ylabel="accuracy", ylim=(0, 1))
    left.set_ylabel("bits per byte")
    panels[-1, 0].set_xlabel("steps")
    panels[-1, 1].set_xlabel("seconds of training (without compiling and evaluating)")
    # The first steps, from 8 bits on, would press all that follows to the ground.
    lowest = min(min(_curve(r, "step")[1]) for r in results)
    middle = max(np.median(_curve(r, "step")[1]) for r in results)
    left.set_ylim(lowest - 0.1 * (middle - lowest) - 0.02, middle + 2 * (middle - lowest) + 0.05)
    figure.suptitle(_finding(results), x=0.01, ha="left", fontsize="medium")
    figure.legend(loc="outside lower center", title="lines: training (running mean); dots: held-out")
    figure.savefig(path)


def _by_pattern(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each pattern, of which there are several if they had several seeds."""
    return {x.pattern: [r for r in results if r.pattern == x.pattern] for x in results}


def _finding(results: Sequence[Result]) -> str:
    """Returns which patterns predict best, and which is fastest."""
    groups = list(_by_pattern(results).values())

    def at_end(runs: list[Result], name: str = "heldout_bpb") -> float:
        return float(np.mean([_evaluated(r, "step", name)[1][-1] for r in runs]))

    best = min(groups, key=at_end)
    lines = [f"Fewest bits per byte: {best[0].pattern} ({at_end(best):.3f})"]
    if all("accuracy" in r.rows[-1] for r in results):
        shares = sorted(((at_end(runs, "accuracy"), runs[0].pattern) for runs in groups), reverse=True)
        lines = ["Answers that are right: " + ", ".join(f"{pattern} {share:.0%}" for share, pattern in shares)]
    slowest, fastest = (which(results, key=lambda r: r.tokens_per_second) for which in (min, max))
    times = fastest.tokens_per_second / slowest.tokens_per_second
    lines.append(f"Fastest: {fastest.pattern}, {times:.1f} times the tokens a second of {slowest.pattern}")
    return "\n".join(textwrap.fill(line, 130) for line in lines)


def _in_lines(pattern: str) -> str:
    """A pattern with a line for each that the layers take in turn, so that it fits a figure's width."""
    return pattern.replace("+", "\n+ ")


def _draw(axes: Axes, result: Result, key: str, color: str, label: str | None) -> None:
    axes.plot(*_curve(result, key), lw=1, color=color, label=label)
    axes.plot(*_evaluated(result, key), "o", color=color)


def _evaluated(result: Result, key: str, name: str = "heldout_bpb") -> tuple[list[float], list[float]]:
    """``key`` and what is measured on held-out bytes, where it was."""
    rows = [row for row in result.rows if name in row]
    return [row[key] for row in rows], [row[name] for row in rows]


def _curve(result: Result, key: str) -> tuple[np.ndarray, np.ndarray]:
    """``key`` and the loss in bits per byte, both averaged over a fiftieth of the run."""
    width = max(1, len(result.rows) // 50)
    mean = np.ones(width) / width
    x, loss = ([row[name] for row in result.rows] for name in (key, "loss"))
    return np.convolve(x, mean, "valid"), np.convolve([bits(value) for value in loss], mean, "valid")


def main(argv: list[str] | None = None) -> int:
    """Command line of the report. Returns the exit code 0."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.training.report", description="Print and draw a recorded comparison again."
    )
    parser.add_argument("records", type=pathlib.Path, nargs="+", help="compare.json of train --compare, one a seed")
    parser.add_argument("--picture", type=pathlib.Path, help="PNG to draw [none]")
    args = parser.parse_args(argv)
    results = [result for record in args.records for result in load(record)]
    print(table(results))
    if args.picture:
        draw_comparison(results, args.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
