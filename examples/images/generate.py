"""Draws samples of trained runs: ``python -m examples.images.generate --out DIR [DIR ...] --picture samples.png``."""

import argparse
import pathlib
import sys

import jax

from ..training.config import Refusal
from ..training.loop import check_corpus
from ..training.run import fitting, open_run
from .config import Config
from .sample import pictures, write_grid


def main(argv: list[str] | None = None) -> int:
    """Command line of generation. Returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.images.generate",
        description="Draw held-out crops, their upper halves, what each run makes of these, and what of nothing.",
    )
    parser.add_argument("--out", nargs="+", default=[Config.out], help=f"folders of runs [{Config.out}]")
    parser.add_argument("--picture", required=True, type=pathlib.Path, help="PNG to draw")
    parser.add_argument("--samples", type=int, default=Config.samples, help=f"crops in each row [{Config.samples}]")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: likeliest byte; 1: as the model is [1]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples [0]")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu", "tpu"), default="auto", help="where [auto]")
    args = parser.parse_args(argv)
    try:
        _draw(args)
    except Refusal as refusal:
        print(f"generate: {refusal}", file=sys.stderr)
        return 2
    print(args.picture)
    return 0


def _draw(args: argparse.Namespace) -> None:
    if not 0 <= args.seed < 2**32:
        raise Refusal(f"--seed must be in 0..2**32 - 1, got {args.seed}")
    if not 0 <= args.temperature < float("inf"):
        raise Refusal(f"--temperature must be at least 0 and finite, got {args.temperature}")
    if args.samples < 1:
        raise Refusal(f"--samples must be at least 1, got {args.samples}")
    runs = [open_run(Config, out, args.device) for out in args.out]
    first = runs[0][0].config
    for run, _, _ in runs:
        if run.config.length != first.length:
            raise Refusal(f"--out {run.config.out} has crops of {run.config.length}, {first.out} of {first.length}")
    source = first.source()
    check_corpus(first, source.digest, runs[0][2])
    with fitting(first), jax.set_mesh(runs[0][0].mesh):
        models = [run.model(state) for run, state, _ in runs]
        rows = pictures(models, first.crops(source.heldout(args.samples)), args.temperature, args.seed)
    try:
        write_grid(rows, args.picture)
    except OSError as error:
        raise Refusal(f"--picture {args.picture}: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
