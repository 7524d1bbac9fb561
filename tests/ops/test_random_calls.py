"""Calls at random on any machine; `kernels/test_gpu.py` has longer ones on GPUs."""

import os

import pytest

from tests.ops.cases import check
from tests.ops.random_calls import random_case


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_CALLS", "2"))))
@pytest.mark.parametrize("implementation", ["xla", "triton", "pallas_tpu"])
def test_random_calls(implementation, seed):
    """``RANDOM_CALLS=300`` makes as many."""
    options = {"kinds": ("table", "both", "slopes")} if implementation == "pallas_tpu" else {}  # it knows no grid
    case = random_case(seed, (16, 8, 5), (1, 33, 64, 97, 128, 150), ("float32", "bfloat16"), biases=True, **options)
    check(case, case.call(implementation))
