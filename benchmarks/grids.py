"""Images and video on a GPU: masks on grids beside FlexAttention and cuDNN's dense attention.

    python -m benchmarks.grids --record grids.json

The image has 128 x 128 tokens, B=2, 16 query and 4 key heads of 128; the video 16 x 48 x 80 tokens, B=1, 24 heads of
128. "Pairs" is the share of all (query, key) pairs that a pattern allows; "of dense" is our time as a share of cuDNN's
without a mask. Results are checked in the run that times them, and timed, as `benchmarks.gpu` says; with grouped heads
out and dq only, and of the video those of the last 512 queries.
"""

import argparse
import sys
from typing import Any

import jax
import numpy as np

import sparse_layers as sl

from . import contenders, gpu
from .record import Record, add_option
from .selections import Timing, times

IMAGE, VIDEO, SIZE = (128, 128), (16, 48, 80), 128


def starts(length: int, kernel: int, tile: int = 1) -> np.ndarray:
    """The first key of each position of an axis: neighbourhoods of NATTEN, or of tiles as STA has them."""
    tiles = np.arange(length) // tile
    return np.clip(tiles - kernel // 2, 0, length // tile - kernel).astype(np.int32) * tile


def neighbourhood(shape: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...]) -> contenders.Pattern:
    """A window of ``kernel`` tiles on each axis; a tile may be one token."""
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    reach = [k * t for k, t in zip(kernel, tile, strict=True)]
    tables = [starts(*axis) for axis in zip(shape, kernel, tile, strict=True)]
    begins = np.cumsum([0, *shape[:-1]]).tolist()

    def rule(q, k, table):
        allowed = q == q
        for length, stride, size, begin in zip(shape, strides, reach, begins, strict=True):
            first, j = table[q // stride % length + begin], k // stride % length
            allowed = allowed & (first <= j) & (j < first + size)
        return allowed

    axes = [sl.Blocks(sl.Neighborhood(n // t, k), t) for n, k, t in zip(shape, kernel, tile, strict=True)]
    # "causal" has the reference take the last queries of a long sequence only; of all it would take a minute.
    return contenders.Pattern(sl.Grid(shape, axes), rule, np.concatenate(tables), causal=shape == VIDEO)


def patterns(shape: tuple[int, ...]) -> dict[str, contenders.Pattern]:
    """Returns the patterns that are measured on a grid."""
    if shape == VIDEO:
        return {
            "window of 6 x 18 x 24 tokens": neighbourhood(VIDEO, (6, 18, 24), (1, 1, 1)),
            "3 x 3 x 3 tiles of 4 x 6 x 8": neighbourhood(VIDEO, (3, 3, 3), (4, 6, 8)),
            "1 x 3 x 3 tiles of 4 x 6 x 8": neighbourhood(VIDEO, (1, 3, 3), (4, 6, 8)),
        }
    width, line = IMAGE[1], sl.Window(0)
    axial = sl.Causal() & (sl.Grid(IMAGE, (line, sl.Full())) | sl.Grid(IMAGE, (sl.Full(), line)))
    swin = sl.Grid(IMAGE, sl.BlockDiagonal(8))
    return {
        "neighbourhood 13 x 13": neighbourhood(IMAGE, (13, 13), (1, 1)),
        "windows 8 x 8": contenders.Pattern(
            swin,
            lambda q, k, _: (q // width // 8 == k // width // 8) & (q % width // 8 == k % width // 8),
            causal=False,
        ),
        "axial, causal": contenders.Pattern(
            axial, lambda q, k, _: (k <= q) & ((q // width == k // width) | (q % width == k % width))
        ),
    }


def of_grid(record: Record, options: argparse.Namespace, shape: tuple[int, ...], batch: int, heads: tuple[int, int]):
    """One table."""
    seq_len = int(np.prod(shape))
    full = gpu.inputs(seq_len, batch, heads[0], SIZE)
    arrays = [full[0], *(x[:, :, : heads[1]] for x in full[1:3]), full[3]]
    dense = contenders.cudnn(contenders.Pattern(sl.Full(), lambda q, k, _: q == q), arrays)
    dense_ms_by_direction = {x: gpu.median_ms(call, dense.wait, Timing) for x, call in dense.calls.items()}
    size = " x ".join(map(str, shape))
    record.add(shape=size, pattern="dense", who="cuDNN", **dense_ms_by_direction)
    columns = [
        "pairs",
        *(f"{contender} {x}" for x in gpu.DIRECTIONS for contender in ("ours", "of dense", "Flex", "cuDNN, dense")),
    ]
    record.say(f"B={batch}, {size} tokens, {heads[0]} query and {heads[1]} key heads of {SIZE}, bfloat16; ms (TFLOP/s)")
    record.say(f"\n| {' | '.join(['', *columns])} |\n| {' | '.join(['---'] * (len(columns) + 1))} |")
    for name, pattern in patterns(shape).items():
        pairs = gpu.pairs_of(pattern, seq_len)
        exact, scale = gpu.Exact(pattern, arrays), 4 * SIZE * batch * heads[0] * pairs / 1e9
        builds = {"ours": lambda p: contenders.ours(p, arrays, options.implementation)}
        if not options.no_flex:
            builds["Flex"] = lambda p: contenders.flex(p, arrays)
        times_by_contender: dict[str, dict[str, float]] = {}
        for contender, build in builds.items():
            labels: dict[str, Any] = {"shape": size, "pattern": name, "who": contender}
            times_by_contender[contender] = times(record, f"{name}, {contender}", exact, build(pattern), True, **labels)
        cells = [name, f"{100 * pairs / seq_len**2:.2f} %"]
        for direction, factor in gpu.DIRECTIONS.items():
            ms, dense_ms = times_by_contender["ours"][direction], dense_ms_by_direction[direction]
            cells += [f"{gpu.digits(ms)} ({factor * scale / ms:.0f})", f"{100 * ms / dense_ms:.1f} %"]
            cells += [gpu.digits(times_by_contender.get("Flex", {}).get(direction)), gpu.digits(dense_ms)]
        record.say(f"| {' | '.join(cells)} |")
    record.say()


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton", choices=sl.implementations())
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out")
    parser.add_argument("--grids", nargs="+", default=["image", "video"], choices=["image", "video"])
    add_option(parser)
    options = parser.parse_args()
    record = Record(options.record, jax.devices()[0].device_kind)
    record.say(record.heading + "\n")
    if "image" in options.grids:
        of_grid(record, options, IMAGE, 2, (16, 4))
    if "video" in options.grids:
        of_grid(record, options, VIDEO, 1, (24, 24))
    record.write()


if __name__ == "__main__":
    sys.exit(main())
