"""Prints and draws a recorded comparison again: ``python -m examples.train_lm.report compare.json compare.png``."""

import sys

from ..training.report import main

if __name__ == "__main__":
    sys.exit(main())
