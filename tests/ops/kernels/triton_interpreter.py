"""Runs Triton kernels without a GPU: the very functions that are compiled for one, interpreted with numpy, and checked.

Triton's front end works on any builder of operations. Here it is given one that computes with numpy instead of writing
a program down. Triton brings such an interpreter, of which this takes the table of operations and the rewriting of
kernels' source. It does the rest itself, because Triton's

* reads and writes at raw addresses, so a kernel's mistake reads anything, or breaks the process, rather than a test;
* computes on the bits of bfloat16 as if they were integers, and rounds towards zero when it converts to bfloat16;
* has to be chosen for a whole process, or swaps functions of `triton.language` for others, again in every call of one.

Nothing of Triton, nor of a kernel's module, is changed here: interpreted functions are copies whose globals name
interpreted functions, so that kernels can be compiled in the same process, before, after and meanwhile.

What a GPU would leave to chance is an error, a `KernelBug`, or poison (NaN; the largest integer), never a lucky zero.
"""

import ast
import functools
import inspect
import itertools
import operator
import textwrap
import types
from typing import ClassVar

import jax
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from sparse_layers.ops.sharding import match_varying
from tests.ops.kernels import triton_asm
from tests.ops.kernels.numpy_types import NUMPY_TYPES, poison
from tests.ops.kernels.triton_machine import LOCK, MACHINE, Buffer, Handle, Tensor, block_type

PLAIN = {"int1", "int32", "int64", "fp32"}  # names of types of which an operation on two of a kind is one, too
common_shape = functools.cache(np.broadcast_shapes)  # Triton's rules are numpy's


def call(kernel, grid, arrays, outputs, constants, num_warps, num_stages, in_place=()):
    """Launches a kernel as `bridge.call_triton` of `triton_gpu` does, but interprets it, wherever JAX computes.

    The kernel's parameters are pointers to ``arrays``, then to arrays like ``outputs``, then the ``constants``.
    """
    del num_warps, num_stages  # they change how fast a GPU is, not what it computes
    outputs = tuple(jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs)
    changed = tuple(jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in in_place)
    launch = functools.partial(run, kernel, tuple(grid), outputs, constants, in_place=tuple(in_place))
    return match_varying(tuple(jax.pure_callback(launch, outputs + changed, *arrays, vmap_method="sequential")), arrays)


def run(kernel, grid, outputs, constants, *arrays, in_place=()):
    """The outputs of a kernel as numpy arrays, and copies of the arrays that it changes."""
    function, names = interpreted(kernel), [name for name in kernel.arg_names if name not in constants]
    with LOCK, np.errstate(all="ignore"):  # infinities and NaNs are as welcome as on a GPU
        inputs = [np.array(x) if i in in_place else np.ascontiguousarray(x) for i, x in enumerate(arrays)]
        results = [np.full(output.shape, poison(output.dtype), output.dtype) for output in outputs]
        MACHINE.kernel, MACHINE.grid_dim = kernel.fn.__name__, grid + (1,) * (3 - len(grid))
        MACHINE.buffers = [
            Buffer(name, array, place, writable=place >= len(inputs) or place in in_place, given=place in in_place)
            for place, (name, array) in enumerate(zip(names, inputs + results, strict=False))
        ]
        pointers = {buffer.name: buffer.pointer for buffer in MACHINE.buffers}
        try:
            for program, grid_idx in programs(MACHINE.grid_dim):
                MACHINE.program, MACHINE.grid_idx = program, grid_idx
                function(**pointers, **constants)
        finally:
            MACHINE.buffers = []  # they may be large
    return *results, *(inputs[i] for i in in_place)


def programs(grid_dim):
    """The numbers and indices of programs, in the order in which they run. A GPU promises none."""
    return [*enumerate(itertools.product(*map(range, grid_dim)))]


class Semantic(TritonSemantic):
    """The front end's rules for types and shapes, with short cuts through those that take most of its time."""

    tensor = Tensor
    numbers: ClassVar = {}
    ranges: ClassVar = {}

    def cast(self, input, dst_ty, *args):
        if input.dtype is dst_ty.scalar:
            return input
        if dst_ty.scalar.name.startswith("uint"):
            raise NotImplementedError("unsigned integers")
        return super().cast(input, dst_ty, *args)

    def binary_op_type_checking_impl(self, lhs, rhs, *args, **kwargs):
        if self.keeps_dtype(lhs, rhs):
            return self.broadcast_impl_value(lhs, rhs if isinstance(rhs, Tensor) else self.number(rhs, lhs))
        if self.keeps_dtype(rhs, lhs):
            return self.broadcast_impl_value(self.number(lhs, rhs), rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)

    @staticmethod
    def keeps_dtype(tensor, other):
        """True if an operation on both is one in the dtype of the first, to which numbers are converted."""
        if not isinstance(tensor, Tensor) or tensor.dtype.name not in PLAIN:
            return False
        if isinstance(other, Tensor):
            return other.dtype is tensor.dtype
        if type(other) is int:
            return tensor.dtype is not tl.int1
        return type(other) is float and tensor.dtype is tl.float32

    def number(self, value, tensor):
        """A constant of the dtype and shape of a tensor."""
        shape = tensor.handle.data.shape if tensor.type.is_block() else None
        key = repr(value), tensor.dtype.name, shape  # by repr, as 0.0 == -0.0
        if key not in self.numbers:
            scalar = self.scalar_constant(value, tensor.dtype)
            self.numbers[key] = scalar if shape is None else self.stretched(scalar, shape)
        return self.numbers[key]

    def arange(self, start, end, *, ret_ty=None):
        key = start, end, str(ret_ty)
        if key not in self.ranges:
            self.ranges[key] = super().arange(start, end, ret_ty=ret_ty)
        return self.ranges[key]

    def expand_dims(self, input, axis):
        data = input.handle.data
        if not input.type.is_block() or not 0 <= axis <= data.ndim:
            return super().expand_dims(input, axis)
        data = data[(slice(None),) * axis + (None,)]
        return Tensor(Handle(data, input.dtype), block_type(input.dtype, data.shape))

    def _bool_like(self, v):
        return block_type(tl.int1, v.handle.data.shape) if v.type.is_block() else tl.int1

    def broadcast_impl_value(self, lhs, rhs):
        left, right = lhs.type.is_block(), rhs.type.is_block()
        if not (left or right):
            return lhs, rhs
        a, b = lhs.handle.data, rhs.handle.data
        if left and right and a.shape == b.shape:
            return lhs, rhs
        shape = common_shape(a.shape, b.shape)
        return self.stretched(lhs, shape), self.stretched(rhs, shape)

    def stretched(self, tensor, shape):
        data = tensor.handle.data
        if data.shape == shape and tensor.type.is_block():
            return tensor
        return Tensor(Handle(np.broadcast_to(data, shape), tensor.dtype), block_type(tensor.dtype, shape))


SEMANTIC = Semantic(MACHINE)


# ----------------------------------------------------------------------------------------------------------------------
# Functions: those of triton.language are bound to the front end above, and kernels and their helpers are rewritten.
# ----------------------------------------------------------------------------------------------------------------------


class Namespace:
    """A module as interpreted functions see it."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        value = translated(getattr(self._module, name))
        setattr(self, name, value)
        return value


def bound(builtin):
    """A function or method of triton.language that kernels call without its argument `_semantic`."""

    @functools.wraps(builtin)
    def function(*args, **kwargs):
        result = builtin(*args, _semantic=SEMANTIC, **kwargs)
        # The functions of triton.language.math do not ask the front end for its kind of tensor.
        return Tensor(result.handle, result.type) if type(result) is tl.tensor else result

    return function


def counted(start, stop=None, step=1, **hints):
    """`range` in a kernel: its index is a scalar, also where its bounds are constants."""
    start, stop = (0, start) if stop is None else (start, stop)
    wide = any(isinstance(bound, tl.tensor) and bound.dtype is tl.int64 for bound in (start, stop, step))
    dtype = tl.int64 if wide else tl.int32
    for index in range(*map(operator.index, (start, stop, step))):
        yield Tensor(Handle(np.array([index], NUMPY_TYPES[dtype]), dtype), dtype)


def unrolled(start, stop=None, step=1):
    """`tl.static_range`: its index is a constant."""
    return range(start, *[] if stop is None else [stop, step])


def reduced(tensor, axis, combine_fn, keep_dims=False):
    """`tl.reduce` by the functions of sums and extremes, which ignore NaN as on a GPU."""
    ufunc = REDUCTIONS.get(getattr(combine_fn, "__wrapped__", None))
    if ufunc is None:
        raise NotImplementedError(f"tl.reduce by {combine_fn}")
    MACHINE.refuse_bfloat16(tensor.handle)
    dtype, data = tensor.dtype, tensor.handle.data
    data = ufunc.reduce(data, axis=None if axis is None else operator.index(axis), keepdims=keep_dims, dtype=data.dtype)
    if data.ndim == 0:
        return Tensor(Handle(data.reshape(1), dtype), dtype)
    return Tensor(Handle(data, dtype), block_type(dtype, data.shape))


def scanned(tensor, axis, combine_fn, reverse=False):
    """`tl.associative_scan` by the functions of sums and extremes."""
    ufunc = REDUCTIONS.get(getattr(combine_fn, "__wrapped__", None))
    if ufunc is None or reverse:
        raise NotImplementedError(f"tl.associative_scan by {combine_fn}, reverse={reverse}")
    MACHINE.refuse_bfloat16(tensor.handle)
    data = ufunc.accumulate(tensor.handle.data, axis=operator.index(axis), dtype=tensor.handle.data.dtype)
    return Tensor(Handle(data, tensor.dtype), tensor.type)


def assembled(asm, constraints, args, dtype, is_pure, pack):
    """`tl.inline_asm_elementwise`."""
    several = isinstance(dtype, tuple | tl.tuple)
    dtypes = tuple(dtype) if several else (dtype,)
    asm = asm.value if isinstance(asm, tl.constexpr) else asm
    if asm == "ld.global.nc.f32 $0, [$1];":
        return Tensor(MACHINE.create_load(args[0].handle), block_type(dtype, args[0].handle.data.shape))
    data = triton_asm.elementwise(asm, [x.handle.data for x in args], [NUMPY_TYPES[x] for x in dtypes], pack)
    results = [Tensor(Handle(x, dtype), block_type(dtype, x.shape)) for x, dtype in zip(data, dtypes, strict=True)]
    return tuple(results) if several else results[0]


def asserted(condition, message=""):
    assert condition, message


REDUCTIONS = {
    tl.standard._sum_combine.fn: np.add,
    tl.standard._elementwise_max.fn: np.fmax,
    tl.standard._elementwise_min.fn: np.fmin,
}
REPLACEMENTS = {
    tl.range: counted,
    tl.static_range: unrolled,
    tl.reduce: reduced,
    tl.associative_scan: scanned,
    tl.inline_asm_elementwise: assembled,
    tl.static_assert: asserted,
    tl.static_print: print,
    # Promises to the compiler
    tl.multiple_of: lambda tensor, values: tensor,
    tl.max_contiguous: lambda tensor, values: tensor,
    tl.max_constancy: lambda tensor, values: tensor,
}


def translated(value):
    """What a global of a kernel, or an attribute of a module that it uses, is when the kernel is interpreted."""
    if isinstance(value, JITFunction):
        return interpreted(value)
    if isinstance(value, types.ModuleType):
        return namespace(value)
    if isinstance(value, types.FunctionType | type) and value in REPLACEMENTS:
        return REPLACEMENTS[value]
    if isinstance(value, types.FunctionType) and tl.core.is_builtin(value):
        return bound(value)
    return value


namespace = functools.cache(Namespace)
BUILTINS = {"range": counted, "min": bound(tl.core.builtin_min), "max": bound(tl.core.builtin_max)}
FUNCTIONS = {}


def interpreted(kernel):
    """The function of a `triton.jit`, rewritten to compute when called."""
    with LOCK:
        if kernel.fn not in FUNCTIONS:
            FUNCTIONS[kernel.fn] = rewritten(kernel.fn)
            # Only now, for functions may name each other.
            scope = FUNCTIONS[kernel.fn].__globals__
            for name in inspect.getclosurevars(kernel.fn).globals:
                scope[name] = translated(scope[name])
        return FUNCTIONS[kernel.fn]


class Transformer(stock.ASTTransformer):
    """Lets assignments turn numbers into scalars, as when compiling, and branches depend on scalars.

    A tensor's own truth value is no help, as Triton's front end uses it to ask whether an optional tensor was given.
    """

    def visit(self, node):
        node = super().visit(node)
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            node.test = self.truth(node.test)
        elif isinstance(node, ast.BoolOp):
            node.values = [self.truth(value) for value in node.values]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self.truth(node.operand)
        return node

    @staticmethod
    def truth(node):
        return ast.Call(ast.Name("_truth", ast.Load()), [node], [])


def truth(value):
    """What Python shall branch on."""
    if not isinstance(value, tl.tensor):
        return value
    if value.type.is_block():
        raise MACHINE.bug("the truth value of a block")
    return bool(value.handle.data)


def rewritten(fn):
    """A copy of a function that computes."""
    lines, first_line = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    definition.decorator_list, definition.returns = [], None
    for node in ast.walk(definition.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    tree = ast.fix_missing_locations(Transformer().visit(tree))
    ast.increment_lineno(tree, first_line - 1)  # tracebacks show the kernel's own lines
    # What the rewritten code names, beside the names of its module.
    scope = {**vars(stock), **BUILTINS, **fn.__globals__, "interpreter_semantic": SEMANTIC, "_truth": truth}
    exec(compile(tree, fn.__code__.co_filename, "exec"), scope)
    function = scope[fn.__name__]
    function.__wrapped__ = fn
    return function


for name, member in vars(tl.tensor).items():
    if isinstance(member, JITFunction) or tl.core.is_builtin(member):
        setattr(Tensor, name, translated(member))
