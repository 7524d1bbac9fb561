"""The pictures of the documentation, drawn from masks and records of measurements: no GPU is needed to draw them.

    python -m benchmarks.pictures

writes docs/pictures/NAME.svg. To add a picture, write a function that returns a figure, and name it in `PICTURES`.
"""

import argparse
import json
import pathlib
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import sparse_layers as sl

RECORDS = pathlib.Path(__file__).parent / "records"
FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
STYLE = FOLDER / "style.mplstyle"
# What is left out, computed in vain, allowed in a block that has a mask, and in one that has none.
SHADES = ["#f4f4f2", "#cfe3f0", "#0072B2", "#004a75"]
DENSE = "#6b6b68"  # whatever attends to everything; patterns have the style's colours
TOKENS = 32
# Of each pattern of a record: what it is called, and a small one of its kind to look at.
SHOWN: dict[str, tuple[str, sl.Mask]] = {
    "causal": ("causal", sl.Causal()),
    "window": ("window of 1024", sl.Causal() & sl.Window(7)),
    "strided": ("strided by 128", sl.Causal() & (sl.Window(4) | sl.Strided(5))),
    "fixed": ("fixed groups of 128", sl.Causal() & (sl.BlockDiagonal(8) | sl.Columns(8, 7))),
}


def overview() -> Figure:
    """What a pattern is, and what it saves: small masks, and below each how long it takes."""
    rows = results("speed_hopper_h200", D=128, who="hopper", direction="fwd+bwd")
    ms = {name: next(row["ms"] for row in rows if row["pattern"] == name) for name in SHOWN}
    figure = Figure(figsize=(9.6, 4.6))
    figure.suptitle("Attention costs what its pattern costs, and the result is exact", x=0.01, ha="left")
    grid: Any = figure.add_gridspec(2, len(SHOWN), height_ratios=[3, 1.7])
    colours = [DENSE, *["C0"] * (len(SHOWN) - 1)]
    for column, ((label, mask), colour) in enumerate(zip(SHOWN.values(), colours, strict=True)):
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(mask.dense(TOKENS, TOKENS), cmap=ListedColormap(["#f4f4f2", colour]))
        axes.grid(visible=False)
        axes.set(xticks=[], yticks=[])
        axes.set_title(label, loc="center")
        if not column:
            axes.set(xlabel="keys", ylabel="queries")
    bars = figure.add_subplot(grid[1, :])
    drawn = bars.bar(range(len(ms)), list(ms.values()), width=0.5, color=colours)
    gains = ["", *(f": {ms['causal'] / x:.1f} times as fast" for x in list(ms.values())[1:])]
    labels = [f"{x:.3g} ms{gain}" for x, gain in zip(ms.values(), gains, strict=True)]
    bars.bar_label(drawn, labels, padding=2)
    bars.set(xticks=[], xlim=(-0.5, len(ms) - 0.5), ylim=(0, 1.25 * max(ms.values())), ylabel="milliseconds")
    bars.set_xlabel("forward and backward of 16,384 tokens, 2 sequences of 16 heads of 128, bfloat16, one NVIDIA H200")
    return figure


def lengths() -> Figure:
    """Time of forward and backward against the length."""
    found = curves(results("lengths_hopper_h200", direction="fwd+bwd"), "ms")
    labels = {name: label for name, (label, _) in SHOWN.items()} | {"causal": "causal, by cuDNN"}
    longest = max(found["causal"])
    times = found["causal"][longest] / found["window"][longest]
    figure = Figure(figsize=(7.2, 4.2))
    axes: Any = figure.subplots()
    axes.set_title(f"At {longest:,} tokens a window of 1024 is {times:.0f} times as fast as dense attention")
    lines(axes, {labels[name]: points for name, points in found.items()})
    axes.legend()
    axes.set_ylabel("milliseconds, forward and backward")
    axes.set_xlabel("tokens (one sequence of 8 heads of 64, bfloat16, one NVIDIA H200)")
    return figure


def decoding() -> Figure:
    """Time of a decoding step against the length, of many sequences and of one."""
    many, one = (curves(results(name), "us") for name in ("decode_16_h200", "decode_h200"))
    longest = max(many["causal"])
    ratio = many["causal"][longest] / many["window"][longest]
    figure = Figure(figsize=(9.6, 4.2))
    figure.suptitle(
        f"A decoding step costs the keys that it reads: {ratio:.0f} times less with a window, after {longest:,} tokens",
        x=0.01,
        ha="left",
    )
    titles = "16 sequences of 16 heads", "one sequence of 8 heads"
    for axes, found, title in zip(figure.subplots(1, 2, sharey=True), (many, one), titles, strict=True):
        lines(axes, found)
        axes.set(title=title, xlabel="tokens in the cache (heads of 64, bfloat16, one NVIDIA H200)")
    figure.axes[0].set_ylabel("microseconds a step of one layer")
    figure.axes[0].legend()
    return figure


def chain() -> Figure:
    """Which blocks a stride and a window touch, in one pass and in two."""
    tokens, block, stride = 256, 16, 16
    near = (sl.Causal() & sl.Window(31)).dense(tokens)
    mask = (sl.Causal() & (sl.Window(31) | sl.Strided(stride))).dense(tokens)
    order = np.argsort(np.arange(tokens) % stride, kind="stable")
    panels = {
        "one pass, in natural order": mask,
        "two passes: first the window, ...": near,
        f"... then the rest, sorted by t mod {stride}": (mask & ~near)[np.ix_(order, order)],
    }
    figure = Figure(figsize=(9.6, 3.9))
    kept = []
    for axes, (title, allowed) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        blocks = allowed.reshape(tokens // block, block, -1, block).swapaxes(1, 2)
        some, every = blocks.any((2, 3)), blocks.all((2, 3))
        computed, free = (np.kron(x, np.ones((block, block), int)) for x in (some, every))
        axes.imshow(computed + allowed + free, cmap=ListedColormap(SHADES), vmin=0, vmax=3)
        axes.set_xticks(np.arange(0, tokens, block) - 0.5, [])
        axes.set_yticks(np.arange(0, tokens, block) - 0.5, [])
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel(f"{some.sum()} blocks, {every.sum()} of them without a mask")
        kept.append(some.sum())
    figure.suptitle(f"{kept[0]} blocks in one order of the tokens are {sum(kept[1:])} in two", x=0.01, ha="left")
    return figure


PICTURES = {"chain": chain, "overview": overview, "lengths": lengths, "decoding": decoding}


def results(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """The results of a record that have these values."""
    found = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))["results"]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def curves(rows: list[dict[str, Any]], what: str) -> dict[str, dict[int, float]]:
    """What was measured, by pattern and length."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["pattern"], {})[row["T"]] = row[what]
    return found


def lines(axes: Axes, found: dict[str, dict[int, float]]) -> None:
    """A line for each pattern against the length, both in powers."""
    for name, points in found.items():
        dense = name.startswith("causal")
        style: dict[str, Any] = {"color": DENSE, "linestyle": "--", "marker": "^"} if dense else {"marker": "o"}
        axes.plot([*points], [*points.values()], label=name, **style)
    axes.set(xscale="log", yscale="log")
    ticks = sorted({length for points in found.values() for length in points})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()


def main() -> None:
    """Draws the pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with matplotlib.rc_context(fname=STYLE):
        for name, draw in PICTURES.items():
            draw().savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
