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
import math
import operator
import textwrap
import threading
import types
from typing import ClassVar

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

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
}
PLAIN = {"int1", "int32", "int64", "fp32"}  # names of types of which an operation on two of a kind is one, too
TRITON_TYPES = {dtype: name for name, dtype in NUMPY_TYPES.items()}


class KernelBug(AssertionError):
    """A kernel did what a GPU would not forbid but nobody can want."""


def call(kernel, grid, arrays, outputs, constants, num_warps, num_stages, in_place=()):
    """Launches a kernel as `bridge.call_triton` of `triton_gpu` does, but interprets it, wherever JAX computes.

    The kernel's parameters are pointers to ``arrays``, then to arrays like ``outputs``, then the ``constants``.
    """
    del num_warps, num_stages  # they change how fast a GPU is, not what it computes
    outputs = tuple(jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs)
    changed = tuple(jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in in_place)
    launch = functools.partial(run, kernel, tuple(grid), outputs, constants, in_place=tuple(in_place))
    return tuple(jax.pure_callback(launch, outputs + changed, *arrays, vmap_method="sequential"))


def run(kernel, grid, outputs, constants, *arrays, in_place=()):
    """The outputs of a kernel as numpy arrays, and copies of the arrays that it changes."""
    function, names = interpreted(kernel), kernel.arg_names
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
            for program, grid_idx in enumerate(itertools.product(*map(range, MACHINE.grid_dim))):
                MACHINE.program, MACHINE.grid_idx = program, grid_idx
                function(**pointers, **constants)
        finally:
            MACHINE.buffers = []  # they may be large
    return *results, *(inputs[i] for i in in_place)


def poison(dtype):
    """What memory holds before anyone writes there."""
    dtype = np.dtype(dtype)
    return np.iinfo(dtype).max if dtype.kind == "i" else True if dtype.kind == "b" else np.nan


# ----------------------------------------------------------------------------------------------------------------------
# Memory: every argument has a range of made-up addresses of its own, far from the others, so that an address alone
# tells which argument it was computed from. numpy reads and writes the elements; no address is ever followed.
# ----------------------------------------------------------------------------------------------------------------------

SLOT_BITS = 41


class Buffer:
    """An argument of the kernel: its elements, and which program wrote each of them, if any did."""

    def __init__(self, name, array, place, writable, given=False):
        self.name, self.shape, self.given = name, array.shape, given
        # Triton reads booleans as bytes.
        self.elements = array.reshape(-1).view(np.int8 if array.dtype == bool else array.dtype)
        self.shift = int(math.log2(array.itemsize))
        self.base = (2 * place + 1) << (SLOT_BITS - 1)  # half a slot below it and above it lead nowhere
        self.owner = np.full(array.size, -1, np.int32) if writable else None
        pointer = tl.pointer_type(TRITON_TYPES[array.dtype])
        self.pointer = Tensor(Handle(np.array([self.base]), pointer), pointer)

    def element(self, index):
        """The name of an element for error messages."""
        if not 0 <= index < self.elements.size:
            return f"{self.name}, element {index} of {self.elements.size}"
        return f"{self.name}[{', '.join(map(str, np.unravel_index(index, self.shape)))}]"


# ----------------------------------------------------------------------------------------------------------------------
# Operations
# ----------------------------------------------------------------------------------------------------------------------


class Handle(stock.TensorHandle):
    """An array of a Triton type. Scalars have the shape (1,)."""

    def __init__(self, data, dtype):  # the base class checks sizes, at a cost that counts here
        self.data, self.dtype = data, dtype


def numpy_type(dtype):
    """The numpy dtype of (blocks of) a Triton type."""
    return np.dtype(np.int64) if dtype.scalar.is_ptr() else NUMPY_TYPES[dtype.scalar]


class Machine(stock.InterpreterBuilder):
    """Triton's table of operations, with memory that is checked and types that are exact."""

    def __init__(self):
        super().__init__()
        # Overflow checks compute everything again in int64, but a launch without debug=True has none.
        self.options = stock.InterpreterOptions(sanitize_overflow=False)
        self.codegen_fns["min_dot_size"] = lambda lhs, rhs: (1, 1, 8 if lhs.scalar.primitive_bitwidth == 32 else 16)
        self.kernel, self.buffers, self.program, self.grid_idx = "", [], 0, (0, 0, 0)

    def bug(self, text):
        return KernelBug(f"{self.kernel}, program {self.grid_idx}: {text}")

    def refuse_bfloat16(self, *handles):
        """bfloat16 is for loads, stores, conversions and dots."""
        for handle in handles:
            if handle.dtype is tl.bfloat16:
                raise self.bug("arithmetic on bfloat16, which kernels should convert to float32 first")

    # Memory

    def locate(self, verb, pointers, mask):
        """(buffer, index of the element for each lane), of which the lanes without mask have some valid index."""
        address = pointers.data
        some = int(address.flat[0 if mask is None else mask.argmax()])
        slot = some >> SLOT_BITS
        if not 0 <= slot < len(self.buffers):
            raise self.bug(f"out of bounds: {verb} the address {some}, far from every argument")
        buffer = self.buffers[slot]
        if numpy_type(pointers.dtype.element_ty) != buffer.elements.dtype:
            raise self.bug(f"{verb} {buffer.name} through a pointer to {pointers.dtype.element_ty}")
        index = (address - buffer.base) >> buffer.shift
        if mask is not None:
            index = np.where(mask, index, 0)
        if index.view(np.uint64).max() >= buffer.elements.size:  # negative ones are large, too
            outside = index[(index < 0) | (index >= buffer.elements.size)]
            raise self.bug(f"out of bounds: {verb} {buffer.element(outside[0])} ({outside.size} such lanes)")
        return buffer, index

    def create_load(self, ptr, *_):
        return self.load(ptr, None, None)

    def create_masked_load(self, ptrs, mask, other, *_):
        return self.load(ptrs, mask.data, other)

    def load(self, pointers, mask, other):
        element = pointers.dtype.element_ty
        if mask is not None:
            if mask.all():
                mask = None
            else:
                other = np.array(poison(NUMPY_TYPES[element]), NUMPY_TYPES[element]) if other is None else other.data
                if not mask.any():
                    return Handle(np.broadcast_to(other, mask.shape), element)
        buffer, index = self.locate("loads", pointers, mask)
        if buffer.owner is not None:
            wanted = index if mask is None else index[mask]
            owner = buffer.owner[wanted]
            wrong = (owner != self.program) & ~(buffer.given & (owner < 0))  # what is changed in place held something
            if wrong.any():
                at = wrong.argmax()
                writer = f"program number {owner.flat[at]} wrote" if owner.flat[at] >= 0 else "nobody has written"
                raise self.bug(f"conflict: loads {buffer.element(wanted.flat[at])}, which {writer}")
        values = buffer.elements.take(index, mode="clip")  # "clip" is the fast way; the indices have been checked
        return Handle(values if mask is None else np.where(mask, values, other), element)

    def create_store(self, ptr, val, *_):
        self.store(ptr, val, None)

    def create_masked_store(self, ptrs, value, mask, *_):
        if mask.data.any():
            self.store(ptrs, value, mask.data)

    def store(self, pointers, value, mask):
        buffer, index = self.locate("stores to", pointers, mask)
        if buffer.owner is None:
            raise self.bug(f"stores to its input {buffer.element(index.flat[0 if mask is None else mask.argmax()])}")
        values = np.broadcast_to(value.data, index.shape)
        if mask is not None:
            index, values = index[mask], values[mask]
        owner = buffer.owner[index]
        taken = (owner >= 0) & (owner != self.program)
        if taken.any():
            at = taken.argmax()
            raise self.bug(
                f"conflict: stores to {buffer.element(index.flat[at])}, "
                f"where program number {owner.flat[at]} has stored before"
            )
        buffer.owner[index] = self.program
        buffer.elements[index] = values
        kept = buffer.elements[index]
        lost = (kept != values) & ((kept == kept) | (values == values))  # two NaNs are the same here
        if lost.any():
            where = buffer.element(index.flat[lost.argmax()])
            raise self.bug(f"conflict: two lanes of a store disagree about {where}")

    def refuse_atomic(self, *_):
        raise self.bug("atomic operations: their order is not fixed, so neither is a sum's rounding")

    create_atomic_rmw = create_atomic_cas = create_atomic_load = create_atomic_store = refuse_atomic

    # Types

    def get_block_ty(self, elt_ty, shape):
        return block_type(elt_ty, tuple(shape))

    def get_null_value(self, type):
        return Handle(np.zeros(1, numpy_type(type)), type.scalar)

    def cast_impl(self, src, dst_type):
        return Handle(src.data.astype(numpy_type(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if rounding_mode not in (None, stock._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"rounding mode {rounding_mode}")
        return self.cast_impl(src, dst_type)

    def create_bitcast(self, src, dst_type):
        return Handle(src.data.view(numpy_type(dst_type)), dst_type.scalar)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # Arithmetic

    def unary_op(self, arg, op):
        self.refuse_bfloat16(arg)
        return Handle(op(arg.data), arg.dtype)

    def binary_op(self, lhs, rhs, op):
        self.refuse_bfloat16(lhs, rhs)
        data = op(lhs.data, rhs.data)
        if data.dtype == bool:
            if lhs.data.dtype == bool and op in (np.add, np.multiply):
                raise NotImplementedError("sums and products of booleans")
            return Handle(data, tl.int1)
        dtype = lhs.dtype.scalar
        return Handle(data.astype(numpy_type(dtype), copy=False), dtype)

    def create_select(self, condition, lhs, rhs):
        return Handle(np.where(condition.data, lhs.data, rhs.data), rhs.dtype)

    def create_fabs(self, arg):
        return self.unary_op(arg, np.abs)

    def create_idiv(self, lhs, rhs):
        # C's division rounds towards zero.
        return self.binary_op(lhs, rhs, lambda a, b: (a - np.fmod(a, b)) // b)

    def create_ashr(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.right_shift)

    def create_fma(self, x, y, z):
        self.refuse_bfloat16(x, y, z)
        return super().create_fma(x, y, z)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype is tl.float32 and input_precision != stock._ir.INPUT_PRECISION.IEEE:
            raise NotImplementedError(f"products of float32 in {input_precision}: only 'ieee' is exact")
        (m, k), n, wide = a.data.shape, b.data.shape[1], d.data.dtype
        # A few rows at a time, as OpenBLAS starts threads above 2**18 multiplications, and on busy cores they cost more
        # than they bring.
        rows = min(m, max(1, 2**18 // (k * n)))
        product = np.matmul(a.data.astype(wide).reshape(m // rows, rows, k), b.data.astype(wide, copy=False))
        return Handle(product.reshape(m, n) + d.data, d.dtype)

    # Shapes

    def create_addptr(self, ptr, offset):
        bytes_each = np.int64(numpy_type(ptr.dtype.element_ty).itemsize)
        return Handle(ptr.data + offset.data * bytes_each, ptr.dtype)

    def create_splat(self, ret_ty, arg):
        return Handle(np.broadcast_to(arg.data, ret_ty.shape), arg.dtype)

    def create_unsplat(self, arg):
        return Handle(arg.data.reshape(-1)[:1], arg.dtype)


LOCK = threading.RLock()  # there is one machine, and JAX calls back from several threads
MACHINE = Machine()


class Tensor(tl.tensor):
    """A tensor whose value is known, so that Python can count with it."""

    def __init__(self, handle, type):  # the base class makes a tuple of constants of every tensor's shape
        self.handle, self.type, self.dtype = handle, type, type.scalar

    @property
    def shape(self):
        return constants(self.handle.data.shape if self.type.is_block() else ())

    @property
    def numel(self):
        return tl.constexpr(math.prod(self.handle.data.shape))

    def __index__(self):
        return int(self.handle.data.item())

    def __repr__(self):
        return repr(self.handle.data)

    __str__ = __repr__

    @property
    def T(self):
        return self.trans()


@functools.cache
def constants(shape):
    return tl.tuple([tl.constexpr(size) for size in shape])


common_shape = functools.cache(np.broadcast_shapes)  # Triton's rules are numpy's
BLOCK_TYPES = {}


def block_type(dtype, shape):
    key = dtype.name, shape
    if key not in BLOCK_TYPES:
        BLOCK_TYPES[key] = tl.block_type(dtype, list(shape))
    return BLOCK_TYPES[key]


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
        if self.alike(lhs, rhs):
            return self.broadcast_impl_value(lhs, rhs if isinstance(rhs, Tensor) else self.number(rhs, lhs))
        if self.alike(rhs, lhs):
            return self.broadcast_impl_value(self.number(lhs, rhs), rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)

    @staticmethod
    def alike(tensor, other):
        """Whether an operation on both is one in the dtype of the first, for it takes numbers to its own."""
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
