"""The picture of README.md: what a pattern is, and what it saves; drawn from a recorded measurement.

    python -m benchmarks.overview docs/overview.png

Needs no GPU: the times are those of benchmarks/records/speed_hopper_h200.json.
"""

import argparse
import json
import pathlib
from typing import Any

import sparse_layers as sl

RECORD = pathlib.Path(__file__).parent / "records" / "speed_hopper_h200.json"
TOKENS = 32
# Of each pattern of the record: what it is called, and a small one of its kind to look at.
SHOWN: dict[str, tuple[str, sl.Mask]] = {
    "causal": ("causal", sl.Causal()),
    "window": ("window of 1024", sl.Causal() & sl.Window(7)),
    "strided": ("strided by 128", sl.Causal() & (sl.Window(4) | sl.Strided(5))),
    "fixed": ("fixed groups of 128", sl.Causal() & (sl.BlockDiagonal(8) | sl.Columns(8, 7))),
}
DENSE, SPARSE = "#8a8a86", "#1f4e8c"


def times(path: pathlib.Path) -> dict[str, float]:
    """Milliseconds of forward and backward with heads of 128, by pattern."""
    found = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["results"]:
        if (row.get("D"), row.get("who"), row.get("direction")) == (128, "hopper", "fwd+bwd"):
            found[row["pattern"]] = row["ms"]
    return {name: found[name] for name in SHOWN}


def draw(ms: dict[str, float], path: pathlib.Path) -> None:
    """The masks, and below each how long it takes."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    figure.suptitle("Attention costs what its pattern costs, and the result is exact", fontsize=13)
    grid: Any = figure.add_gridspec(2, len(SHOWN), height_ratios=[3, 1.7])
    for column, (name, (label, mask)) in enumerate(SHOWN.items()):
        colour = DENSE if name == "causal" else SPARSE
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(mask.dense(TOKENS, TOKENS), cmap=ListedColormap(["#f4f4f2", colour]))
        axes.set(xticks=[], yticks=[], title=label)
        if not column:
            axes.set(xlabel="keys", ylabel="queries")
    bars = figure.add_subplot(grid[1, :])
    drawn = bars.bar(range(len(ms)), list(ms.values()), width=0.5, color=[DENSE, *[SPARSE] * (len(ms) - 1)])
    gains = ["", *(f": {ms['causal'] / x:.1f} times as fast" for x in list(ms.values())[1:])]
    labels = [f"{x:.3g} ms{gain}" for x, gain in zip(ms.values(), gains, strict=True)]
    bars.bar_label(drawn, labels, padding=2)
    bars.set(xticks=[], xlim=(-0.5, len(ms) - 0.5), ylim=(0, 1.25 * max(ms.values())), ylabel="milliseconds")
    bars.set_xlabel("forward and backward of 16,384 tokens, 2 sequences of 16 heads of 128, bfloat16, one NVIDIA H200")
    bars.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path, metavar="FILE.png")
    draw(times(RECORD), parser.parse_args().path)


if __name__ == "__main__":
    main()
