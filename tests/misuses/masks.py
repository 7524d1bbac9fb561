"""Misuses of masks and presets."""

from tests.misuse import Misuse

MISUSES = [
    Misuse("sl.Window(-1)", ValueError, "Window: left", "-1", "must be an integer >= 0"),
    Misuse("sl.Strided(0)", ValueError, "Strided: stride", "got 0", "must be an integer >= 1"),
]
