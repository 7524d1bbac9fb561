"""Loaders of dense checkpoints into sparse layers, one file for each kind of source."""
