"""Runs Gluon kernels for Hopper without a GPU: their own Python source, on numpy, with checks.

A kernel of Gluon is plain Python over some thirty names. It runs here as a copy whose globals have stand-ins for them:
nothing of Triton, nor of a kernel's module, is changed. Layouts mean nothing, but for a linear one of shared memory,
see `LinearTile` of `gluon_memory.py`. All that the hardware does by itself is done as late as a kernel allows, so that
nothing is there by luck:

* a load of TMA, or of threads by `copy_async`, arrives when someone waits for its barrier, and its buffer
  holds poison before;
* a store of TMA reads its buffer when the kernel waits for it;
* a product reads its operands in shared memory when the kernel waits for it, and its result is refused before.

The partitions of `gl.warp_specialize` are threads of which one runs at a time: of those that wait for nothing the
first, in an order that ``seed`` chooses. So they get as far apart as barriers allow, a run can be repeated, and a
deadlock is seen. What a GPU would leave to chance is an error, a `KernelBug`, or poison (NaN; the largest integer).

It does not see what compilers do with registers. Numbers that begin as literals stay Python's: // and % round down.
"""

import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import JITFunction

from tests.ops.kernels.gluon_language import Language, unknown
from tests.ops.kernels.gluon_memory import Descriptor, Pointer, to_tensor
from tests.ops.kernels.gluon_partitions import LOCK, MACHINE, bug
from tests.ops.kernels.numpy_types import poison


class Tiles(NamedTuple):
    """An array that a kernel has a TMA descriptor of: seen as ``shape``, and cut into tiles like ``block_shape``."""

    array: Any
    shape: tuple
    block_shape: tuple
    strides: Any = None  # in elements, by default row-major


def call(kernel, programs, inputs, outputs, constants, aliases=None, max_registers=None, seed=0):
    """Interprets a kernel wherever JAX computes: its parameters are the inputs, the outputs, and the constants.

    Args:
      inputs: arrays, or what has the attributes of `Tiles`.
      outputs: `jax.ShapeDtypeStruct`, or the same of such.
      aliases: of inputs that become outputs: number of the input to number of the output.
      max_registers: not interpreted.
    """
    everything = [*inputs, *outputs]
    arrays = [value.array if hasattr(value, "block_shape") else value for value in everything]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays[len(inputs) :]]

    def launch(*given):
        given = [np.ascontiguousarray(array) for array in given]
        results = [np.full(x.shape, poison(x.dtype), x.dtype) for x in shapes]
        for array in given:
            array.flags.writeable = False
        for source, target in (aliases or {}).items():
            results[target][...] = given[source]
            given[source] = results[target]
        pairs = zip(everything, given + results, strict=True)
        run(
            kernel,
            (programs,),
            [x._replace(array=a) if hasattr(x, "block_shape") else a for x, a in pairs],
            constants,
            seed,
        )
        return tuple(results)

    return jax.pure_callback(launch, tuple(shapes), *arrays[: len(inputs)], vmap_method="sequential")


def run(kernel, grid, arguments, constants, seed=0, replacements=None):
    """Runs the programs of a grid, one after the other, and changes output arrays in place.

    Args:
      arguments: the kernel's other parameters, in their order: numpy arrays, `Tiles` of such, and numbers.
      constants: compile-time constants, and None for arrays that there are not, by name.
      seed: which partition goes first, of all orders there are.
      replacements: other functions for those that kernels call, by function or by name.
    """
    with LOCK, np.errstate(all="ignore"):  # infinities and NaNs are as welcome as on a GPU
        MACHINE.launch(kernel.fn.__name__, (*grid, 1, 1)[:3], seed)
        function = Functions(replacements or {}).interpreted(kernel)
        names = [name for name in kernel.arg_names if name not in constants]
        parameters = {name: parameter(name, value) for name, value in zip(names, arguments, strict=False)}
        for program in itertools.product(*map(range, MACHINE.grid)):
            MACHINE.begin(program)
            function(**parameters, **constants)
            MACHINE.current.end()
            if any(barrier.loads for barrier in MACHINE.barriers.values()):
                raise bug("ends before all that it loads has arrived")


def parameter(name, value):
    """What a kernel is given for an argument."""
    array = getattr(value, "array", value)
    if not isinstance(array, np.ndarray):
        return to_tensor(value)
    if not array.flags.c_contiguous:
        raise ValueError(f"argument {name} must be contiguous, of strides {array.strides} and shape {array.shape}")
    return Pointer(name, array.reshape(-1), np.int64(0)) if array is value else Descriptor(name, value)


class Functions:
    """The functions of a launch, as copies that compute when called."""

    def __init__(self, replacements):
        self.replacements, self.scopes = replacements, {}

    def interpreted(self, kernel):
        """A copy of the function of a `gluon.jit` that computes when called."""
        fn = kernel.fn
        if id(fn.__globals__) not in self.scopes:
            scope = self.scopes[id(fn.__globals__)] = {}
            scope.update({name: self.translated(value) for name, value in list(fn.__globals__.items())})
        scope = self.scopes[id(fn.__globals__)]
        copy = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
        copy.__kwdefaults__ = fn.__kwdefaults__
        return copy

    def translated(self, value):
        """What a global of a kernel, or an attribute of a module that it uses, is when it is interpreted."""
        if isinstance(value, gl.constexpr):
            return value.value
        if isinstance(value, types.ModuleType):
            return Namespace(self, value)
        function = value.fn if isinstance(value, JITFunction) else value
        if not isinstance(function, types.FunctionType | type):
            return value
        name = function.__name__
        given = [self.replacements[key] for key in (value, function, name) if key in self.replacements]
        builtin = tl.core.is_builtin(function)
        if function.__module__ == async_copy.__name__:  # names that TMA has, too
            name = OF_THREADS.get(name, name)
        if given:
            return given[0]
        if name in vars(Language) and (builtin or function.__module__.startswith("triton.")):
            return getattr(Language, name)
        if isinstance(value, JITFunction):
            return self.interpreted(value)
        return functools.partial(unknown, name) if builtin else value


OF_THREADS = {"async_load": "copy", "async_copy_global_to_shared": "copy"}


class Namespace:
    """A module as interpreted functions see it."""

    def __init__(self, functions, module):
        self._functions, self._module = functions, module

    def __getattr__(self, name):
        value = self._functions.translated(getattr(self._module, name))
        setattr(self, name, value)
        return value
