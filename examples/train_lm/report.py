"""Prints and draws comparisons again: ``python -m examples.train_lm.report compare.json --picture compare.png``."""

import sys

from ..training.report import main

if __name__ == "__main__":
    sys.exit(main())
