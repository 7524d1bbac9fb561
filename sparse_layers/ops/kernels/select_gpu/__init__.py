"""Scores of blocks for single queries, and the selection of the best, in Triton; see `score.py` and `choose.py`."""
