"""Wrong calls, and what the error must say: each names the argument, its value and the rule.

The tables are the other files of this folder, one for each part of the package. A row is a `Misuse`.
"""

import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl

TABLES = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("*.py") if not path.stem.startswith("test_"))
ROWS = [row for name in TABLES for row in importlib.import_module(f"tests.misuses.{name}").MISUSES]


@functools.cache
def names():
    """What a call may mention; tables add names of their own by a function ``names()``."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
    shared = {
        "sl": sl,
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "nn": nn,
        "nnx": nnx,
        "q": q,
        "k": k,
        "v": v,
        "mask": sl.Causal() & sl.Window(7),
    }
    for name in TABLES:
        table = importlib.import_module(f"tests.misuses.{name}")
        if hasattr(table, "names"):
            shared |= table.names()
    return shared


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.call)
def test_the_error_names_argument_value_and_rule(row):
    with pytest.raises(row.error) as caught:
        eval(row.call, dict(names()))
    assert type(caught.value) is row.error
    message = str(caught.value)
    for part in (row.argument, row.value, row.rule):
        assert part and part in message


def test_calls_are_told_apart():
    calls = [row.call for row in ROWS]
    assert len(set(calls)) == len(calls)
