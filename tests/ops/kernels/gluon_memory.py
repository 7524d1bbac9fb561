"""Tiles and scalars, global and shared memory, barriers and products of interpreted Gluon kernels."""

import functools
import math
import operator
import types
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl

from tests.ops.kernels.gluon_partitions import MACHINE, bug
from tests.ops.kernels.numpy_types import NUMPY_TYPES, TRITON_TYPES

# --- tiles and scalars ------------------------------------------------------------------------------------------------


def raw(value):
    return value.data if isinstance(value, Tensor) else value.array if isinstance(value, Shared) else value


class Tensor:
    """A tile in registers, or a scalar, whose array has no axes. Nothing ever writes to the array."""

    data: Any

    def __init__(self, data):
        # Where numpy makes float64 of integers and numbers, Triton makes float32.
        self.data = data.astype(np.float32) if data.dtype == np.float64 else data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: TRITON_TYPES[self.data.dtype])
    type = property(lambda self: types.SimpleNamespace(layout=gl.AutoLayout(), shape=self.shape))

    def number(self):
        if self.shape:
            raise bug(f"takes a tile of shape {self.shape} for one number")
        return self.data.item()

    __index__ = number

    def __bool__(self):
        return bool(self.number())

    def __getitem__(self, key):
        return Tensor(self.data[key])

    def to(self, dtype, bitcast=False):
        """The same numbers, or the same bits, as another type."""
        return Tensor(self.data.view(NUMPY_TYPES[dtype]) if bitcast else self.data.astype(NUMPY_TYPES[dtype]))


OPERATORS = {
    # C's division rounds towards zero.
    "floordiv": lambda a, b: (a - np.fmod(a, b)) // b,
    "mod": np.fmod,
    # numpy shifts by more bits than there are as a GPU does.
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "xor", "invert")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "neg")},
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: getattr(operator, name + "_") for name in ("and", "or")},
}
for name, function in OPERATORS.items():
    method = lambda *x, of=function: NotImplemented if isinstance(x[-1], Pointer) else Tensor(of(*map(raw, x)))  # noqa: E731
    setattr(Tensor, f"__{name}__", method)
    setattr(Tensor, f"__r{name}__", lambda self, other, of=function: Tensor(of(other, self.data)))


def to_tensor(value):
    """A number as a scalar of its type on a GPU."""
    if value is None or isinstance(value, Tensor):
        return value
    return Tensor(np.asarray(value, {int: np.int32, float: np.float32}.get(type(value))))


def elementwise(ufunc):
    return lambda *values: Tensor(ufunc(*map(raw, values)))


def reduction(ufunc):
    """Extremes ignore NaN, as on a GPU."""
    return lambda x, axis=None, keep_dims=False: Tensor(ufunc.reduce(x.data, axis, x.data.dtype, keepdims=keep_dims))


# --- global memory ----------------------------------------------------------------------------------------------------


class Pointer(NamedTuple):
    """One pointer, or a tile of them: indices of elements of a buffer."""

    name: str
    elements: Any
    at: Any

    dtype = property(lambda self: tl.pointer_type(TRITON_TYPES[self.elements.dtype]))

    def __add__(self, offset):
        return self._replace(at=self.at + np.asarray(raw(offset), np.int64))

    __radd__ = __add__

    def to(self, dtype):
        """As a number it is no other."""
        return self

    def __getitem__(self, key):
        return self._replace(at=self.at[key])

    def lanes(self, verb, mask):
        """(indices, mask) of all lanes; without mask, an index is 0."""
        mask = np.asarray(True if mask is None else raw(mask))
        at, mask = np.broadcast_arrays(np.where(mask, self.at, 0), mask)
        wrong = at[mask & ((at < 0) | (at >= self.elements.size))]
        if wrong.size:
            raise bug(f"out of bounds: {verb} {self.name}, element {wrong[0]} of {self.elements.size}")
        if verb != "loads" and not self.elements.flags.writeable:
            raise bug(f"{verb} its input {self.name}")
        return at, mask


class Descriptor:
    """A TMA descriptor."""

    def __init__(self, name, tiles):
        self.name, self.shape, self.block_shape, self.layout = (
            name,
            list(tiles.shape),
            list(tiles.block_shape),
            gl.AutoLayout(),
        )
        self.strides = tiles.strides or [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        array, last = tiles.array, np.dot(np.subtract(self.shape, 1), self.strides)
        if last >= array.size:
            raise ValueError(f"a view of {name} has an element {last}, and {name} has {array.size}")
        strides = [stride * array.itemsize for stride in self.strides]
        self.view = np.lib.stride_tricks.as_strided(array, self.shape, strides, writeable=array.flags.writeable)
        self.dtype = TRITON_TYPES[array.dtype]
        self.block_type = gl.block_type(self.dtype, self.block_shape)

    def tile(self, corner, shared):
        """The parts of the array, and of a buffer, that belong together when a tile begins at the corner."""
        corner, own = [operator.index(place) for place in corner], f"{self.dtype}{self.block_shape}"
        if own != f"{shared.dtype}{shared.shape}" or len(corner) != len(self.shape):
            raise bug(f"moves {own} of {self.name} at {corner}, and {shared.dtype}{shared.shape} of shared memory")
        first = np.clip(corner, 0, self.shape)
        end = np.clip(np.add(corner, self.block_shape), 0, self.shape)
        inside = tuple(map(slice, first - corner, end - corner))
        return self.view[tuple(map(slice, first, end))], shared.array[inside]


# --- shared memory, barriers and products -----------------------------------------------------------------------------


def elements_of(bases, columns):
    """Which element of a tile of so many columns lies at each offset, by the bases of a linear layout."""
    offset = np.arange(1 << len(bases))
    return functools.reduce(np.bitwise_xor, [(offset >> i & 1) * (r * columns + c) for i, (r, c) in enumerate(bases)])


def places_of(layout, rows, columns, itemsize):
    """Of each element of a tile in some layout its place in an array that stands for one in TMA's layout.

    That is in parts of 128 bytes a row, in which 16 bytes are at the place ``place ^ (row % 8)``.
    """
    offset = np.arange(rows * columns)
    part, inside = np.divmod(offset * itemsize, 128 * rows)
    row, byte = np.divmod(inside, 128)
    column = 128 * part + (byte // 16 ^ row % 8) * 16 + byte % 16
    places = np.empty_like(offset)
    places[elements_of(layout.offset_bases, columns)] = row * columns + column // itemsize
    return places


class Shared:
    """Shared memory: a numpy array that is written to."""

    arranged = staticmethod(lambda data: data)

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, TRITON_TYPES[array.dtype], list(array.shape)
        self.address = array.__array_interface__["data"][0]

    def index(self, index):
        return Shared(self.slice(index, 1).array[0])

    def slice(self, start, length, dim=0):
        start = operator.index(start)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise bug(f"out of bounds: {start} to {start + length} of axis {dim} of shared memory of {self.shape}")
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def reshape(self, shape):
        return self.reinterpret(self.dtype, shape)

    def reinterpret(self, dtype, shape, layout=None):
        """The same bytes, or the first of them, as another tile."""
        if not self.array.flags.c_contiguous:
            raise bug(f"another view of a part of shared memory of {self.shape} that is not contiguous")
        found = self.array.reshape(-1).view(NUMPY_TYPES[dtype])[: math.prod(shape)].reshape(shape)
        return LinearTile(found, layout) if isinstance(layout, gl.SharedLinearLayout) else Shared(found)

    _reinterpret = reinterpret

    def load(self, layout=None):
        return Tensor(self.array.copy())

    def store(self, value):
        if value.shape != self.shape or value.dtype != self.dtype:
            raise bug(f"stores {value.dtype}{value.shape} to shared memory of {self.dtype}{self.shape}")
        self.array[...] = self.arranged(value.data)
        MACHINE.current.unfenced[self.address, *self.shape] = self.array

    def show(self, reader):
        """Lets TMA, or the tensor cores, read it."""
        for each in MACHINE.partitions:
            if any(np.shares_memory(array, self.array) for array in each.unfenced.values()):
                raise bug(f"{reader} reads shared memory that {each.name} stored to, without fence_async_shared")


class LinearTile(Shared):
    """A tile in a layout of its own, of a buffer in TMA's layout: here it is only stored to."""

    def __init__(self, array, layout):
        super().__init__(array)
        self.places = places_of(layout, *self.shape, array.itemsize)

    def arranged(self, data):
        found = np.empty_like(self.array)
        found.reshape(-1)[self.places] = data.reshape(-1)
        return found

    def refuse(self, *_, **__):
        raise bug("a tile in a layout of its own can only be stored to")

    load = index = slice = permute = reshape = reinterpret = _reinterpret = refuse


class Barrier:
    """An mbarrier: a phase ends once so many have arrived, and all bytes that they announced."""

    def __init__(self, count):
        self.count, self.pending, self.announced, self.loads, self.completed = count, count, 0, [], 0
        self.copied = []  # what threads copied in the last phase

    def arrive(self, count):
        if count > self.pending:
            raise bug(f"{count} arrivals at a barrier that expects {self.pending} more in this phase")
        self.pending -= count
        self.end_phase()

    def end_phase(self):
        if not (self.pending or self.announced or self.loads):
            self.completed, self.pending = self.completed + 1, self.count

    def passed(self, phase):
        """Whether a phase is over. What is loaded arrives now, and no earlier."""
        if self.completed <= phase and self.loads:
            for buffer, target, source in self.loads:
                buffer[...] = 0  # what lies outside of the array
                target[...] = source
            self.loads = []
            self.end_phase()
        return self.completed > phase


def barrier_of(shared):
    if shared.address not in MACHINE.barriers:
        raise bug("uses a barrier before mbarrier.init")
    return MACHINE.barriers[shared.address]


class Accumulator(Tensor):
    """What a product in flight will be."""

    def __init__(self, a, b, start):
        self.a, self.b, self.start, self.value = a, b, start, None

    @property
    def data(self):
        raise bug("reads the result of a product that warpgroup_mma_wait has not returned")

    def finish(self):
        a, b = (np.asarray(raw(operand), np.float32) for operand in (self.a, self.b))
        # A few rows at a time, as OpenBLAS starts threads above 2**18 multiplications, which cost more than they bring.
        rows = math.gcd(len(a), max(1, 2**18 // b.size))
        value = np.matmul(a.reshape(-1, rows, len(b)), b).reshape(len(a), -1)
        self.value = value + (self.start.value if isinstance(self.start, Accumulator) else raw(self.start))
