"""The types of Triton as numpy has them, poison, and `KernelBug`, for the interpreters of Triton and Gluon."""

import ml_dtypes
import numpy as np
import triton.language as tl

# What numpy computes with for each of Triton's types. There are no unsigned ones: Triton's front end does not tell
# builders the sign of a type, so that shifts, divisions and comparisons would be those of signed integers.
NUMPY_TYPES = {
    tl.int1: np.dtype(bool),
    tl.int8: np.dtype(np.int8),
    tl.int16: np.dtype(np.int16),
    tl.int32: np.dtype(np.int32),
    tl.int64: np.dtype(np.int64),
    tl.float16: np.dtype(np.float16),
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
}
TRITON_TYPES = {dtype: name for name, dtype in NUMPY_TYPES.items()}


class KernelBug(AssertionError):
    """A kernel did what a GPU would not forbid but nobody can want."""


def poison(dtype):
    """What memory holds before anyone writes there."""
    dtype = np.dtype(dtype)
    return np.iinfo(dtype).max if dtype.kind == "i" else True if dtype.kind == "b" else np.nan
