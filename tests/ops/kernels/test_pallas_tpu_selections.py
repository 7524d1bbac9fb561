"""Selections in the TPU kernels, interpreted: blocks of several groups of queries. `test_selections.py` has more."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.kernels.pallas_tpu import schedule
from sparse_layers.ops.kernels.pallas_tpu.schedule import Steps
from tests.ops.cases import check
from tests.ops.test_selections import Case

T = 75
IDS = np.repeat([[0, 0, 1, 1, -1], [0, 1, 2, 2, 2]], 15, axis=1)
TABLE = np.random.default_rng(0).random((T, T)) < 0.5
# Query blocks of several groups that select on their own, of 16 queries each.
SEVERAL = {"granularity": 16, "block": 16, "fwd": (32, 16), "bwd": (64, 16)}


@pytest.mark.parametrize(
    "case",
    [
        Case("several groups", sl.Causal(), T, scope="1", sinks=True, **SEVERAL),
        Case("one group", sl.Causal(), T, segments=(IDS, IDS), soft_cap=3.0, **SEVERAL | {"fwd": (16, 16)}),
        Case("masks in turn", (sl.Causal(), sl.Array(TABLE)), T, heads=(4, 2), batch=1, **SEVERAL),
    ],
    ids=str,
)
def test_blocks_of_query_groups(case):
    check(case, case.call("pallas_tpu"))


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        (Case("by entry", sl.Causal(), T, scope="1", segments=(IDS, IDS), **SEVERAL | {"fwd": (64, 16)}), 80),
        (Case("by entry and key head", sl.Causal(), T, scope="N", sinks=True, **SEVERAL | {"fwd": (64, 16)}), 160),
    ],
    ids=str,
)
def test_lists_beyond_scalar_memory_are_split(case, fits, monkeypatch):
    sizes, of = [], Steps.of

    def recorded(*args):
        steps = of(*args)
        sizes.append(sum(x.size * 4 for x in steps.scalars))
        return steps

    monkeypatch.setattr(Steps, "of", recorded)
    monkeypatch.setattr(schedule, "SMEM_BYTES", fits)
    check(case, case.call("pallas_tpu"))
    assert set(sizes) == {fits}
    monkeypatch.setattr(schedule, "SMEM_BYTES", fits - 1)
    with pytest.raises(ValueError, match=r"lists of 10 steps, which take \d+ bytes of scalar memory, and \d+ are"):
        dataclasses.replace(case, scale=0.5).call("pallas_tpu")  # another call, for this one is compiled


def test_selections_of_single_queries_are_refused():
    chosen = sl.Selection(np.zeros((1, 64, 1, 1), np.int32), block=32)
    q = jnp.zeros((1, 64, 2, 16))
    with pytest.raises(NotImplementedError, match=r"granularity 1, only of at least 16"):
        sl.block_sparse_attention(q, q, q, "causal", selection=chosen, implementation="pallas_tpu")
