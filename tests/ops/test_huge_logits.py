"""Logits and sinks near the ends of float32: answers stay finite, and as right as logits are."""

import numpy as np
import pytest

from tests.ops.cases import IMPLEMENTATIONS
from tests.ops.huge_logits import BASE_2, CASES, check

LARGEST_SINK = {"pallas_tpu": 2.3e38, "triton": 2.3e38}  # of kernels that compute to base 2
CALLS = [(name, case) for name in IMPLEMENTATIONS for case in (BASE_2 if name in LARGEST_SINK else CASES)]


@pytest.mark.parametrize(("implementation", "case"), CALLS, ids=str)
def test_values_and_gradients(implementation, case):
    check(case, case.call(implementation), LARGEST_SINK.get(implementation, np.inf))
