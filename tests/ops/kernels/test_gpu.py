"""Every preset at a real size on a GPU: ``pytest -n 8 tests/ops/kernels/test_gpu.py`` on a machine that has one."""

import jax
import numpy as np
import pytest

import sparse_layers as sl
from tests.ops.cases import SMALL, Case, check

if jax.default_backend() != "gpu":
    pytest.skip("needs an NVIDIA GPU; tests/ops/test_attention.py has the kernels interpreted", allow_module_level=True)

# Options where the default ones would see all of so short a sequence.
OPTIONS = {"sliding_window": {"window": 300}, "streaming": {"window": 256}, "chunked": {"chunk": 300}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("name", SMALL)
def test_presets_are_right_and_the_same_twice(name, size, dtype):
    mask = sl.preset(name, **OPTIONS.get(name, {}))
    case = Case(name, mask, 1000, heads=(4, 2), sizes=(size, size), batch=1, dtype=dtype)
    answers = case.call("triton")
    check(case, answers)
    again = case.call("triton")
    for key, value in answers.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(again[key]))
