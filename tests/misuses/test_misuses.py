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
ROWS = [(name, row) for name in TABLES for row in importlib.import_module(f"tests.misuses.{name}").MISUSES]


@functools.cache
def names(table):
    """What the calls of a table may mention; it adds names of its own by a function ``names()``."""
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
    own = getattr(importlib.import_module(f"tests.misuses.{table}"), "names", dict)
    return shared | own()


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[row.call for _, row in ROWS])
def test_the_error_names_argument_value_and_rule(table, row):
    with pytest.raises(row.error) as caught:
        eval(row.call, dict(names(table)))
    assert type(caught.value) is row.error
    message = str(caught.value)
    for part in (row.argument, row.value, row.rule):
        assert part and part in message


def test_calls_are_distinct():
    calls = [row.call for _, row in ROWS]
    assert len(set(calls)) == len(calls)
