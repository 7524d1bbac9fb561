"""Scores of key blocks for single queries, and selection of the best, in Triton; see `score.py` and `choose.py`."""
