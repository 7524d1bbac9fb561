"""Triton's operations on numpy arrays: memory that is checked, types that are exact, and tensors with values."""

import functools
import math
import threading

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from tests.ops.kernels.numpy_types import NUMPY_TYPES, TRITON_TYPES, KernelBug, poison

# Every argument has a range of made-up addresses of its own, far from the others, so that an address alone
# tells which argument it was computed from. numpy reads and writes the elements; no address is ever followed.
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

    @functools.cached_property
    def as_pairs(self):
        """The elements two at a time: of 8 bits to read, of 32 bits to add to."""
        wide = {1: np.int16, 4: np.int64}[self.elements.itemsize]
        pairs = Buffer(self.name, self.elements.view(wide), 0, writable=False, given=self.given)
        pairs.base, pairs.owner = self.base, None if self.owner is None else self.owner[::2]
        return pairs

    def element(self, index):
        """The name of an element for error messages."""
        if not 0 <= index < self.elements.size:
            return f"{self.name}, element {index} of {self.elements.size}"
        return f"{self.name}[{', '.join(map(str, np.unravel_index(index, self.shape)))}]"


class Handle(stock.TensorHandle):
    """An array of a Triton type. Scalars have the shape (1,)."""

    def __init__(self, data, dtype):  # the base class checks sizes, at a cost that counts here
        self.data, self.dtype = data, dtype


def numpy_type(dtype):
    """The numpy dtype of (blocks of) a Triton type."""
    return np.dtype(np.int64) if dtype.scalar.is_ptr() else NUMPY_TYPES[dtype.scalar]


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


BLOCK_TYPES = {}


def block_type(dtype, shape):
    key = dtype.name, shape
    if key not in BLOCK_TYPES:
        BLOCK_TYPES[key] = tl.block_type(dtype, list(shape))
    return BLOCK_TYPES[key]


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
        element = numpy_type(pointers.dtype.element_ty)
        if (verb, element.name, buffer.elements.itemsize) in (("loads", "int16", 1), ("adds to", "int64", 4)):
            buffer = buffer.as_pairs
        elif element != buffer.elements.dtype:
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

    def create_atomic_rmw(self, operation, pointers, value, mask, *_):
        """Adds in place. What was there before depends on the order of programs: it is poison."""
        buffer, index = self.locate("adds to", pointers, mask.data)
        if operation not in (stock._ir.ATOMIC_OP.FADD, stock._ir.ATOMIC_OP.ADD) or not buffer.given:
            self.refuse_atomic()
        np.add.at(buffer.elements, index, np.where(mask.data, value.data, 0))
        element = pointers.dtype.element_ty
        return Handle(np.full(index.shape, poison(NUMPY_TYPES[element]), NUMPY_TYPES[element]), element)

    def refuse_atomic(self, *_):
        raise self.bug("atomic operations: their order is not fixed, so neither is a sum's rounding")

    create_atomic_cas = create_atomic_load = create_atomic_store = refuse_atomic

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
