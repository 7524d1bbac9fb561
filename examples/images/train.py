"""Trains an autoregressive model of photographs: ``python -m examples.images.train --help``."""

import sys

from ..training import loop
from .config import Config


def main(argv: list[str] | None = None) -> int:
    """Command line of training. Returns the exit code: 0, 2 with one line on stderr, or 130 after Ctrl-C."""
    text = "Train a byte-level model of photographs with a sparse attention pattern."
    return loop.main(Config, "python -m examples.images.train", text, argv)


if __name__ == "__main__":
    sys.exit(main())
