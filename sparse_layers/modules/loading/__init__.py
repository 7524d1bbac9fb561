"""Weights of dense models in sparse layers: one file for each kind of source."""
