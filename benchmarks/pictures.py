"""The pictures of the documentation, drawn from masks and records of measurements: no GPU is needed to draw them.

    python -m benchmarks.pictures

writes docs/pictures/NAME.svg. To add a picture, write a function that returns a figure, and name it in `PICTURES`.
"""

import argparse
import functools
import json
import pathlib
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import sparse_layers as sl

RECORDS = pathlib.Path(__file__).parent / "records"
RUNS = pathlib.Path(__file__).parents[1] / "examples" / "train_lm" / "records"
FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
STYLE = FOLDER / "style.mplstyle"
SHADES = {
    "left out": "#f4f4f2",
    "computed and masked": "#cfe3f0",
    "allowed": "#0072B2",
    "allowed, in a block\nwithout a mask": "#004a75",
}
DENSE = "#6b6b68"  # whatever attends to everything; patterns have the style's colours
TOKENS = 32
WIDTH = 5.4  # inches: what a phone shows is large enough to be read
# Of each pattern of a record: what it is called, and a small one of its kind to look at.
SHOWN: dict[str, tuple[str, sl.Mask]] = {
    "causal": ("causal", sl.Causal()),
    "window": ("window of 1024", sl.Causal() & sl.Window(7)),
    "strided": ("strided by 128", sl.Causal() & (sl.Window(4) | sl.Strided(5))),
    "fixed": ("fixed groups of 128", sl.Causal() & (sl.BlockDiagonal(8) | sl.Columns(8, 7))),
}


def overview() -> Figure:
    """Draws small masks, and beside each the time that its pattern takes."""
    rows = results("speed_flex_128_h200", D=128, who="hopper", direction="fwd+bwd")
    ms = {name: next(row["ms"] for row in rows if row["pattern"] == name) for name in SHOWN}
    figure = Figure(figsize=(WIDTH, 5.2))
    figure.suptitle("Attention costs what its pattern costs,\nand the result is exact", x=0.01, ha="left")
    grid: Any = figure.add_gridspec(len(SHOWN), 2, width_ratios=[1, 3])
    for row, (name, (label, mask)) in enumerate(SHOWN.items()):
        colour = DENSE if name == "causal" else "C0"
        axes, bar = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        axes.imshow(mask.dense(TOKENS, TOKENS), cmap=ListedColormap(["#f4f4f2", colour]))
        axes.set(xticks=[], yticks=[])
        bar.barh(0, ms[name], height=0.7, color=colour)
        gain = "" if name == "causal" else f": {ms['causal'] / ms[name]:.1f} times as fast as causal"
        bar.set_title(f"{label}, {ms[name]:.3g} ms{gain}", fontsize="medium")
        bar.set(xticks=[], yticks=[], xlim=(0, max(ms.values())), ylim=(-0.6, 0.6))
        bar.spines[:].set_visible(False)
    shape = "2 sequences of 16 heads of 128, bfloat16, one NVIDIA H200"
    figure.supxlabel(f"milliseconds, forward and backward of 16,384 tokens,\n{shape}", fontsize="medium")
    return figure


def beside(card: str) -> Figure:
    """Time of each pattern on a card, beside cuDNN and FlexAttention in the same run."""
    rows = results(f"speed_flex_128_{card}", D=128, direction="fwd+bwd")
    contenders = {"this package": "hopper", "FlexAttention": "FlexAttention", "cuDNN": "cuDNN"}
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    figure = Figure(figsize=(WIDTH, 5.6))
    axes: Any = figure.subplots()
    for number, (label, who) in enumerate(contenders.items()):
        ms = {row["pattern"]: row["ms"] for row in rows if row["who"] == who}
        places = [patterns.index(pattern) + (number - 1) * 0.27 for pattern in ms]
        axes.barh(places, [*ms.values()], height=0.25, color=DENSE if who == "cuDNN" else f"C{number}", label=label)
        for place, time in zip(places, ms.values(), strict=True):
            axes.text(time * 1.04, place, f"{time:#.3g}", va="center", fontsize="x-small")
    axes.set_title("Every pattern beside cuDNN and FlexAttention")
    axes.set(xscale="log", yticks=range(len(patterns)), yticklabels=patterns, xlim=(1, 40))
    axes.set_xticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    shape = f"2 sequences of 16,384 tokens, 16 heads of 128, bfloat16,\none NVIDIA {card.upper()}"
    axes.set_xlabel(f"milliseconds, forward and backward (logarithmic);\n{shape}")
    return figure


def cpu() -> Figure:
    """How many times as fast each pattern is as dense attention of XLA, on a CPU."""
    rows = quoted("attention_cpu", r"^(\w[\w /+]*?)  +[\d.]+%  +[\d.]+ ms +([\d.]+)x.* ms +([\d.]+)x +[\d.]+x")
    figure = Figure(figsize=(WIDTH, 3.6))
    axes: Any = figure.subplots()
    for number, label in enumerate(("forward", "forward and backward")):
        places = [place + (number - 0.5) * 0.38 for place in range(len(rows))]
        axes.barh(places, [float(row[number + 1]) for row in rows], height=0.36, label=label)
    axes.axvline(1, color=DENSE, linestyle="--", label="dense attention of XLA")
    axes.set(
        yticks=range(len(rows)), yticklabels=[row[0] for row in rows], title="Sparse attention beside dense attention"
    )
    axes.invert_yaxis()
    figure.legend(loc="outside lower left", ncols=3)
    axes.set_xlabel("times as fast; 8,192 tokens, 2 heads of 64, float32,\ntwo cores of an x86-64 CPU")
    return figure


def tpu() -> Figure:
    """Estimated cycles of each pattern on TPU v6e, as a share of those of splash attention."""
    rows = quoted("tpu_estimates", r"^\| ([\w /]+?), (\d+), \S+ \| \d+ / \d+ \(([\d.]+) / ([\d.]+)\)")
    figure = Figure(figsize=(WIDTH, 4.2))
    axes: Any = figure.subplots()
    for number, label in enumerate(("forward", "backward")):
        places = [place + (number - 0.5) * 0.38 for place in range(len(rows))]
        axes.barh(places, [float(row[number + 2]) for row in rows], height=0.36, label=label)
    axes.axvline(1, color=DENSE, linestyle="--", label="splash attention")
    axes.set(yticks=range(len(rows)), yticklabels=[f"{name}, {int(tokens) // 1024}k" for name, tokens, *_ in rows])
    axes.set_title("Estimated cycles beside splash attention")
    axes.invert_yaxis()
    figure.legend(loc="outside lower left", ncols=3)
    axes.set_xlabel("share of splash attention's cycles on TPU v6e,\nby the compiler's model; no TPU was measured")
    return figure


def lengths() -> Figure:
    """Time of forward and backward against the length, by the kernels for Hopper and those that other GPUs run."""
    dense, ours, others = (
        curves(results("lengths_hopper_h200", direction="fwd+bwd", who=contender), "ms")
        for contender in ("cuDNN", "ours", "triton")
    )
    labels = {name: label for name, (label, _) in SHOWN.items()} | {"causal": "causal, by cuDNN", "bigbird": "BigBird"}
    longest = max(dense["causal"])
    times = dense["causal"][longest] / ours["window"][longest]
    figure = Figure(figsize=(WIDTH, 4.6))
    axes: Any = figure.subplots()
    axes.set_title(f"At {longest:,} tokens a window of 1024\nis {times:.0f} times as fast as dense attention")
    lines(axes, {labels[name]: points for name, points in {**dense, **ours}.items()})
    for number, name in enumerate(ours):
        if name in others:
            axes.plot([*others[name]], [*others[name].values()], color=f"C{number}", linestyle=":")
    axes.plot([], [], color=DENSE, linestyle=":", label="dotted: the kernels for all GPUs")
    axes.legend()
    axes.set_ylabel("milliseconds, forward and backward")
    axes.set_xlabel("tokens (k is 1,024); one sequence of 8 heads of 64,\nbfloat16, one NVIDIA H200")
    return figure


def decoding() -> Figure:
    """Time of a decoding step against the length, of many sequences and of one."""
    many, one = (curves(results(name), "us") for name in ("decode_16_h200", "decode_h200"))
    longest = max(many["causal"])
    ratio = many["causal"][longest] / many["window"][longest]
    figure = Figure(figsize=(WIDTH, 6.6))
    finding = f"{ratio:.0f} times less with a window, after {longest:,} tokens"
    figure.suptitle(f"A decoding step costs the keys that it reads:\n{finding}", x=0.01, ha="left")
    titles = "16 sequences of 16 heads", "one sequence of 8 heads"
    for axes, points, title in zip(figure.subplots(2, 1, sharex=True, sharey=True), (many, one), titles, strict=True):
        lines(axes, points)
        axes.set(title=title, ylabel="microseconds a step and layer")
    figure.axes[0].legend()
    figure.axes[1].set_xlabel("tokens in the cache (k is 1,024);\nheads of 64, bfloat16, one NVIDIA H200")
    return figure


def chain() -> Figure:
    """Draws the blocks that a stride and a window touch, in one pass and in two."""
    tokens, block, stride = 256, 16, 16
    window = (sl.Causal() & sl.Window(31)).dense(tokens)
    mask = (sl.Causal() & (sl.Window(31) | sl.Strided(stride))).dense(tokens)
    order = np.argsort(np.arange(tokens) % stride, kind="stable")
    panels = {
        "one": ("one pass, in natural order", mask),
        "first": ("two passes: first the window, ...", window),
        "second": (f"... then the rest, by t mod {stride}", (mask & ~window)[np.ix_(order, order)]),
    }
    figure, kept = Figure(figsize=(WIDTH, 6)), []
    all_axes = figure.subplot_mosaic([["one", "legend"], ["first", "second"]])
    for panel, (title, allowed) in panels.items():
        axes, blocks = all_axes[panel], allowed.reshape(tokens // block, block, -1, block).swapaxes(1, 2)
        some, every = blocks.any((2, 3)), blocks.all((2, 3))
        computed, free = (np.kron(x, np.ones((block, block), int)) for x in (some, every))
        axes.imshow(computed + allowed + free, cmap=ListedColormap([*SHADES.values()]), vmin=0, vmax=3)
        axes.set_xticks(np.arange(0, tokens, block) - 0.5, [])
        axes.set_yticks(np.arange(0, tokens, block) - 0.5, [])
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel(f"{some.sum()} blocks")
        kept.append(some.sum())
    all_axes["legend"].axis("off")
    all_axes["legend"].legend(
        handles=[Patch(color=colour, label=what) for what, colour in SHADES.items()], loc="center"
    )
    figure.suptitle(f"{kept[0]} blocks in one order of the tokens\nare {sum(kept[1:])} in two", x=0.01, ha="left")
    return figure


def recall() -> Figure:
    """Accuracy against steps of models that must recall from far, three seeds of each pattern."""
    runs = [json.loads(path.read_text(encoding="utf-8"))["results"] for path in sorted(RUNS.glob("recall_4096_*.json"))]
    figure = Figure(figsize=(WIDTH, 4.6))
    axes: Any = figure.subplots()
    axes.set_title("Learned sparsity recalls what a window cannot reach")
    for number, same in enumerate(zip(*runs, strict=True)):
        name = same[0]["pattern"].partition(":")[0]
        style: dict[str, Any] = {"color": DENSE, "linestyle": "--"} if name == "causal" else {"color": f"C{number - 1}"}
        for seed, run in enumerate(same):
            axes.plot(run["rows"]["step"], run["rows"]["accuracy"], label=None if seed else name, **style)
    axes.set(ylim=(0, 1.02), ylabel="share of answers that are right")
    axes.set_xlabel("steps; three seeds of each; 4,096 tokens, two layers,\n512 keys a query but for causal and fixed")
    axes.legend()
    return figure


def small() -> Figure:
    """Held-out bits per byte of the example's config ``small`` against steps."""
    (run,) = json.loads((RUNS / "small.json").read_text(encoding="utf-8"))["results"]
    figure = Figure(figsize=(WIDTH, 3.6))
    axes: Any = figure.subplots()
    axes.plot(run["training"]["step"], run["training"]["mean_bpb_of_100"], linewidth=1, color=DENSE, label="training")
    axes.plot(run["rows"]["step"], run["rows"]["heldout_bpb"], "o", label="held out")
    axes.set_title(f"{run['rows']['heldout_bpb'][-1]:.3f} bits per byte of Python, gzip {run['gzip']:.2f}")
    axes.set(ylim=(0.6, 2), xlabel="steps of 65,536 bytes", ylabel="bits per byte")
    axes.legend()
    return figure


def prefix() -> Figure:
    """Held-out bits per byte behind random prefixes, which see themselves whole, or are causal."""
    runs = json.loads((RUNS / "prefix.json").read_text(encoding="utf-8"))["results"]
    labels = {"prefix": "prefixes see themselves whole", "suffix": "causal"}
    figure = Figure(figsize=(WIDTH, 3.2))
    axes: Any = figure.subplots()
    for run in runs:
        style: dict[str, Any] = {"color": DENSE, "linestyle": "--"} if run["objective"] == "suffix" else {"color": "C0"}
        axes.plot(run["rows"]["step"], run["rows"]["heldout_bpb"], label=labels[run["objective"]], **style)
    axes.set(
        ylim=(2, 3.4), xlabel="steps of 1,024 bytes; bytes behind the prefixes count", ylabel="held-out bits per byte"
    )
    axes.legend()
    return figure


PICTURES = {
    "h200": functools.partial(beside, "h200"),
    "h100": functools.partial(beside, "h100"),
    "cpu": cpu,
    "tpu": tpu,
    "recall": recall,
    "small": small,
    "prefix": prefix,
    "chain": chain,
    "overview": overview,
    "lengths": lengths,
    "decoding": decoding,
}


def results(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """The results of a record that have these values."""
    rows = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))["results"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def quoted(name: str, pattern: str) -> list[tuple[str, ...]]:
    """The groups of a regular expression in the lines of a record that match it."""
    lines = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))["lines"]
    return [found.groups() for found in map(re.compile(pattern).match, lines) if found]


def curves(rows: list[dict[str, Any]], what: str) -> dict[str, dict[int, float]]:
    """Returns the measured numbers by pattern and length."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        points.setdefault(row["pattern"], {})[row["T"]] = row[what]
    return points


def lines(axes: Axes, curves_by_name: dict[str, dict[int, float]]) -> None:
    """Draws a line for each pattern against the length, on logarithmic axes."""
    for name, points in curves_by_name.items():
        dense = name.startswith("causal")
        style: dict[str, Any] = {"color": DENSE, "linestyle": "--", "marker": "^"} if dense else {"marker": "o"}
        axes.plot([*points], [*points.values()], label=name, **style)
    axes.set(xscale="log", yscale="log")
    ticks = sorted({length for points in curves_by_name.values() for length in points})
    axes.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def main() -> None:
    """Draws the pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with matplotlib.rc_context(fname=STYLE):
        for name, draw in PICTURES.items():
            draw().savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
