"""Functions that the kernels of the interpreter's tests share, and `run`, which interprets one."""

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tests.ops.kernels import gluon_interpreter

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
SLOTS = gl.constexpr(2)


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run(kernel, grid, *arguments, seed=0, replacements=None, **constants):
    gluon_interpreter.run(kernel, grid, arguments, constants, seed, replacements)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """This and the next are replaced by name: Triton has had others for them."""
    raise AssertionError


@builtin
def add_tile(desc, coord, source, _semantic=None):
    raise AssertionError


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found
