"""Biases by distance in the Hopper kernels, interpreted where there is no GPU, held to float64."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

import sparse_layers as sl
from tests.ops import cases
from tests.ops.kernels.test_hopper_gpu import (
    DOCUMENTS,
    FEW,
    FIXED_32,
    LONGER,
    PADDED,
    STRIDED_4,
    Case,
    check_values_and_gradients,
    launches,
)
from tests.ops.test_selections import Case as SelectionCase

launched = pytest.fixture(launches)
TABLE = {"shared": True, "forward_only": True}
CASES = [
    # Biases by slopes, one of them negative.
    Case("alibi", sl.Causal(), 300, heads=(4, 2), batch=1, sinks=True, slopes=(0.7, 0.05, 0.2, -0.01)),
    Case("alibi-documents", sl.Causal(), 256, sizes=(128, 128), segments=(DOCUMENTS, PADDED), slopes=(0.5, 0.01)),
    Case("alibi-strided", STRIDED_4, 512, heads=(4, 2), batch=1, split=True, slopes=(0.1, 0.003, 0.2, 0.05)),
    Case("alibi-fixed", FIXED_32, 512, batch=1, split=True, shared=True, slopes=(0.1, 0.003)),
    # Tables. Hopper kernels compute gradients of far keys only.
    Case("table", sl.Causal(), 300, batch=1, sinks=True, shared=True, return_lse=False, table=(2, 9, 8)),
    Case(
        "table-documents",
        sl.Causal(),
        330,
        heads=(4, 2),
        batch=1,
        segments=(LONGER[:, :330],) * 2,
        shared=True,
        return_lse=False,
        table=(1, 20, 6),
        slopes=(0.7, 0.05, 0.2, -0.01),
    ),
    Case("256-alibi", sl.Window(70), 200, sizes=(256, 256), heads=(2, 1), batch=1, slopes=(0.5, 0.01)),
    # Near keys of a table, and slopes with later keys: the forward kernel looks entries up.
    Case("near", sl.Window(150, 80), 300, 330, heads=(4, 2), batch=1, table=(4, 90, 40), sinks=True, **TABLE),
    Case("near-lse", sl.Causal(), 300, table=(2, 9, 8), **TABLE),
    Case("near-slopes", sl.Causal(), 200, sizes=(128, 128), table=(1, 129, 64), slopes=(0.7, -0.01), **TABLE),
    Case("near-float16", sl.Window(70), 200, dtype="float16", table=(2, 90, 80), scale=3.0, **TABLE),
    Case("near-256", sl.Window(70), 200, sizes=(256, 256), heads=(2, 1), batch=1, table=(2, 90, 80), **TABLE),
    Case("near-documents", sl.Causal(), 256, segments=(DOCUMENTS, PADDED), heads=(4, 2), table=(4, 90, 80), **TABLE),
    Case("near-run-time", FEW, 256, 200, table=(2, 90, 80), slopes=(0.1, 0.01), **TABLE),
    Case("near-strided", STRIDED_4, 512, batch=1, split=True, table=(2, 200, 100), sinks=True, **TABLE),
    Case("near-fixed", FIXED_32, 512, batch=1, split=True, table=(2, 99, 70), slopes=(0.1, 0.003), **TABLE),
    Case("near-fixed-ragged", FIXED_32, 480, batch=1, split=True, table=(2, 99, 70), **TABLE),
    Case("near-columns", sl.Window(3, 3) | sl.Columns(32, 24), 480, batch=1, split=True, table=(2, 999, 500), **TABLE),
    Case("slopes-cross", sl.Causal(), 200, 300, batch=1, slopes=(0.7, 0.05), **TABLE),
    Case("near-tiles", sl.Grid((32, 16), sl.BlockDiagonal(16)), 512, split=True, batch=1, table=(2, 90, 40), **TABLE),
    Case("both-ways", sl.Window(90, 60), 200, 300, heads=(4, 2), batch=1, slopes=(0.7, 0.05, 0.2, -0.01), **TABLE),
    Case("near-long-blocks", sl.Causal(), 400, batch=1, fwd=(128, 256), table=(2, 900, 450), **TABLE),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(launched, monkeypatch, case):
    check_values_and_gradients(launched, monkeypatch, case)


@pytest.mark.parametrize(("granularity", "block"), [(16, 128), (64, 64), (128, 128)])
def test_selections(launched, granularity, block):
    options = {"granularity": granularity, "block": block, "table": (4, 90, 40), "slopes": (0.7, 0.05, 0.2, -0.01)}
    case = SelectionCase("chosen", sl.Window(200, 100), 270, 300, (4, 2), (64, 64), dtype="bfloat16", **options)
    cases.check(case, case.call("hopper"))
    assert {*launched} == {"hopper_forward_kernel"}


class HidingCase(Case):
    """Entries of keys 8 or more before are -inf."""

    def arrays(self):
        _, entries, center = self.table
        is_near = np.arange(entries) > center - 8
        return (arrays := super().arrays()) | {"table": np.where(is_near, arrays["table"], np.float32(-np.inf))}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("keys", "passes"), [(sl.Window(20) | sl.Strided(8), 2), (~sl.Window(150), 1)], ids=str)
def test_far_entries_of_minus_infinity_hide_their_keys(launched, keys, passes, sinks):
    mask, length = sl.Causal() & keys, 2048
    options = {"heads": (1, 1), "batch": 1, "shared": True, "return_lse": False, "sinks": sinks, "table": (1, 9, 8)}
    answers = HidingCase("hiding", mask, length, **options).call("hopper")
    assert launched.count("hopper_backward_kernel") == passes
    cases.check(Case("window", mask & sl.Window(7), length, **options), answers)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("keys", [sl.Window(300), ~sl.Window(7)], ids=str)
def test_near_entries_of_minus_infinity_hide_their_keys(launched, keys, sinks):
    mask, options = sl.Causal() & keys, {"table": (2, 310, 305), "sinks": sinks}
    answers = HidingCase("hiding", mask, 600, **options).call("hopper")
    assert {*launched} == {"hopper_forward_kernel"}
    cases.check(Case("window", mask & sl.Window(7), 600, **options), answers)


class LowestCase(Case):
    """The entry of distance 0 is the lowest finite number."""

    def arrays(self):
        _, entries, center = self.table
        lowest = np.finfo(np.float32).min
        return (x := super().arrays()) | {"table": np.where(np.arange(entries) == center, lowest, x["table"])}


def test_forward_and_backward_limit_entries_alike(launched):
    """Query 0 sees key 0 alone, so gradients of key 0 have all of its weight."""
    case = LowestCase("lowest", sl.Causal(), 140, batch=1, table=(2, 50, 40), return_lse=False)
    answers, exact = (case.call(name) for name in ("hopper", "reference"))
    assert {*launched} == {"hopper_forward_kernel"}
    for name in ("out", "dq", "dk", "dv", "dtable"):
        error = np.linalg.norm(np.float64(answers[name]) - np.float64(exact[name]))
        assert error < 1e-2 * np.linalg.norm(np.float64(exact[name])), name
