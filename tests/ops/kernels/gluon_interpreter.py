"""Runs Gluon kernels for Hopper without a GPU: their own Python source, on numpy, with checks.

A kernel of Gluon is plain Python over some thirty names. Here it runs as a copy whose globals name stand-ins for them;
nothing of Triton, nor of a kernel's module, is changed. Tiles and scalars are numpy arrays, layouts mean nothing.

What the hardware does meanwhile is done as late as a kernel allows, so that nothing is there by luck:

* a load by the copy engine fills its buffer when someone waits for its barrier; until then the buffer holds poison;
* a store by the copy engine reads its buffer when the kernel waits for it;
* a product reads its operands in shared memory when the kernel waits for it, and its result is refused before.

The partitions of `gl.warp_specialize` are threads of which one runs at a time: the first, in an order that ``seed``
chooses, that waits for nothing. So every run can be repeated, partitions get as far apart as barriers allow, and if
all of them wait it is known.

What a GPU would leave to chance is an error, a `KernelBug`, or poison (NaN; the largest integer), never a lucky zero.
Of division: numbers that begin as literals stay Python's, and so round down, where those of a GPU round towards zero.
"""

import dataclasses
import functools
import itertools
import linecache
import math
import operator
import re
import sys
import threading
import types

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from tests.ops.kernels import triton_interpreter
from tests.ops.kernels.triton_interpreter import KernelBug, poison

NUMPY_TYPES = {
    **triton_interpreter.NUMPY_TYPES,
    **{getattr(gl, name): np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
}
TRITON_TYPES = {dtype: name for name, dtype in NUMPY_TYPES.items()}


def call(kernel, grid, inputs, outputs, scalars, constants, aliases=None, seed=0):
    """Interprets a kernel wherever JAX computes; returns the outputs, a tuple.

    The kernel's parameters are the ``inputs`` (arrays, or a `Descriptor` of one), the ``outputs`` (a
    `jax.ShapeDtypeStruct`, or a `Descriptor` of one), the ``scalars`` and the ``constants``, a dict. ``aliases`` maps
    an input to the output that begins with its values and shares its memory.
    """
    aliases = aliases or {}
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in map(array_of, outputs)]

    def launch(*arrays):
        arrays = [np.ascontiguousarray(array) for array in arrays]
        results = [np.full(shape.shape, poison(shape.dtype), shape.dtype) for shape in shapes]
        for array in arrays:
            array.flags.writeable = False
        for source, target in aliases.items():
            results[target][...] = arrays[source]
            arrays[source] = results[target]
        run(kernel, grid, [*map(with_array, [*inputs, *outputs], arrays + results), *scalars], constants, seed)
        return tuple(results)

    return tuple(jax.pure_callback(launch, tuple(shapes), *map(array_of, inputs), vmap_method="sequential"))


def run(kernel, grid, arguments, constants, seed=0, replacements=None):
    """Runs all programs of a grid, one after the other, and changes output arrays in place.

    ``arguments`` are the kernel's first parameters: numpy arrays, each a `Descriptor` of one, numbers, or tuples of
    these. ``constants`` are the others, by name. ``replacements`` maps functions that kernels call, or their names, to
    other functions: those whose assembly `INSTRUCTIONS` does not know.
    """
    global MACHINE
    with LOCK, np.errstate(all="ignore"):  # infinities and NaNs are as welcome as on a GPU
        MACHINE = Machine(kernel, tuple(grid) + (1,) * (3 - len(grid)), seed, replacements or {})
        function = MACHINE.interpreted(kernel)
        parameters = map(parameter, kernel.arg_names, arguments)
        try:
            parameters = tuple(parameters)
            for program in itertools.product(*map(range, MACHINE.grid)):
                MACHINE.begin(program)
                function(*parameters, **constants)
                MACHINE.current.leave()
        finally:
            MACHINE = None


def parameter(name, value):
    """What a kernel is given for an argument."""
    if isinstance(value, tuple):
        return tuple(parameter(f"{name}[{place}]", each) for place, each in enumerate(value))
    if isinstance(value, np.ndarray):
        return Pointer(Buffer(name, value), np.int64(0))
    return value if isinstance(value, Descriptor) else to_tensor(value)


def bug(text):
    return KernelBug(f"{MACHINE.kernel}, program {MACHINE.program}, {MACHINE.current.name}: {text}")


# ----------------------------------------------------------------------------------------------------------------------
# Partitions and the scheduler
# ----------------------------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """Ends a partition because another has failed."""


class Partition:
    """A group of warps with a program of its own, and what it has begun and not waited for."""

    def __init__(self, name):
        self.name, self.thread, self.turn = name, threading.current_thread(), threading.Semaphore(0)
        self.ready, self.missing = None, None  # what it waits for: whether that has come, and what has not
        self.ended, self.result = False, None
        self.products, self.stores, self.unfenced = [], [], {}
        self.seen = {}  # the last phase of each barrier that it has waited for

    def wait(self, ready, missing):
        """Goes on when ``ready()``; ``missing()`` says in words what lacks."""
        self.ready, self.missing = ready, missing
        MACHINE.hand_on()

    def leave(self):
        if self.stores:
            raise bug("ends while the copy engine may still read what it is to store: tma.store_wait(0) is missing")
        self.ended = True

    def line(self):
        """The kernel's line at which it is."""
        frame = sys._current_frames()[self.thread.ident]
        while frame.f_code.co_filename in (__file__, threading.__file__):
            frame = frame.f_back
        code = frame.f_code
        text = linecache.getline(code.co_filename, frame.f_lineno).strip()
        return f"{self.name} at line {frame.f_lineno} of {code.co_name}, {text!r}, {self.missing()}"


class Machine:
    """What all partitions share in a launch."""

    def __init__(self, kernel, grid, seed, replacements):
        self.kernel, self.grid, self.seed, self.replacements = kernel.fn.__name__, grid, seed, replacements
        self.scopes, self.functions = {}, {}
        self.begin((0, 0, 0))

    def begin(self, program):
        self.program, self.barriers, self.meetings, self.failure = program, {}, {}, None
        self.current = Partition("the kernel")
        self.partitions = [self.current]

    def hand_on(self):
        """Lets the first partition run that can; returns when that is this one."""
        me = self.current
        running = [each for each in self.partitions if not each.ended]
        following = next((each for each in running if each.ready is None or each.ready()), None)
        if following is None:
            raise bug("deadlock: " + "; ".join(each.line() for each in running))
        if following is not me:
            self.current = following
            following.turn.release()
            if me.ended:
                return
            me.turn.acquire()
            if self.failure:
                raise Stopped
        me.ready = None

    def specialize(self, functions):
        """Runs partitions to their ends; returns what the first returns."""
        before = self.current
        partitions = [Partition(f"partition {i} ({function.__name__})") for i, (function, _) in enumerate(functions)]
        for each, (function, arguments) in zip(partitions, functions, strict=True):
            each.unfenced = dict(before.unfenced)
            each.thread = threading.Thread(target=self.live, args=(each, function, arguments), daemon=True)
            each.thread.start()
        # The last one first, for that is where producers stand: they use what is free as soon as it is said to be.
        orders = itertools.permutations(reversed(partitions))
        self.partitions = next(itertools.islice(orders, self.seed % math.factorial(len(partitions)), None))
        self.current = self.partitions[0]
        self.current.turn.release()
        for each in partitions:
            each.thread.join()
        if self.failure:
            raise self.failure
        self.current, self.partitions = before, [before]
        return partitions[0].result

    def live(self, partition, function, arguments):
        """The thread of a partition."""
        partition.turn.acquire()
        try:
            if not self.failure:
                with np.errstate(all="ignore"):
                    partition.result = function(*arguments)
                    partition.leave()
                    if not all(each.ended for each in self.partitions):
                        self.hand_on()
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
            for each in self.partitions:
                each.turn.release()

    def barrier(self, shared):
        if shared.address not in self.barriers:
            raise bug("uses a barrier before mbarrier.init")
        return self.barriers[shared.address]

    # Functions: copies of those of kernels, with other globals.

    def interpreted(self, kernel):
        """The function of a `gluon.jit`, as a copy that computes."""
        fn = kernel.fn
        if fn not in self.functions:
            if fn.__module__ not in self.scopes:
                scope = self.scopes[fn.__module__] = {}
                scope.update({name: self.translated(value) for name, value in list(fn.__globals__.items())})
            copy = types.FunctionType(
                fn.__code__, self.scopes[fn.__module__], fn.__name__, fn.__defaults__, fn.__closure__
            )
            copy.__kwdefaults__ = fn.__kwdefaults__
            self.functions[fn] = copy
        return self.functions[fn]

    def translated(self, value):
        """What a global of a kernel, or an attribute of a module that it uses, is when the kernel is interpreted."""
        if isinstance(value, gl.constexpr):
            return value.value
        if isinstance(value, types.ModuleType):
            return Namespace(self, value)
        function = value.fn if isinstance(value, JITFunction) else value
        name = getattr(function, "__name__", None)
        if not callable(function) or name is None:
            return value
        for key in (value, function, name):
            if key in self.replacements:
                return self.replacements[key]
        if name in LANGUAGE and (function.__module__.startswith("triton.") or tl.core.is_builtin(function)):
            return LANGUAGE[name]
        if isinstance(value, JITFunction):
            return Lazy(self, value)
        return functools.partial(unknown, name) if tl.core.is_builtin(function) else value


class Lazy:
    """A function of a kernel's module, interpreted once it is called."""

    def __init__(self, machine, kernel):
        self.machine, self.kernel, self.__name__ = machine, kernel, kernel.fn.__name__

    def __call__(self, *args, **kwargs):
        return self.machine.interpreted(self.kernel)(*args, **kwargs)


class Namespace:
    """A module as interpreted functions see it."""

    def __init__(self, machine, module):
        self._machine, self._module = machine, module

    def __getattr__(self, name):
        value = self._machine.translated(getattr(self._module, name))
        setattr(self, name, value)
        return value


def unknown(name, *_, **__):
    raise NotImplementedError(f"{name} of Gluon: neither LANGUAGE nor the argument replacements has it")


LOCK = threading.RLock()  # there is one machine, and JAX calls back from several threads
MACHINE: Machine = None  # type: ignore


# ----------------------------------------------------------------------------------------------------------------------
# Tiles and scalars
# ----------------------------------------------------------------------------------------------------------------------


class Tensor:
    """A tile in registers, or a scalar, whose array has no axes. Nothing ever writes to the array."""

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: TRITON_TYPES[self.data.dtype])
    type = property(lambda self: types.SimpleNamespace(layout=LAYOUT, shape=self.shape, element_ty=self.dtype))

    def __index__(self):
        return int(self.scalar())

    __int__ = __index__

    def __float__(self):
        return float(self.scalar())

    def __bool__(self):
        return bool(self.scalar())

    def scalar(self):
        if self.data.ndim:
            raise bug(f"takes a tile of shape {self.shape} for one number")
        return self.data

    def __repr__(self):
        return repr(self.data)

    def __getitem__(self, key):
        return Tensor(self.data[key])

    def to(self, dtype, bitcast=False):
        """The same numbers, or the same bits, of another type."""
        dtype = NUMPY_TYPES[dtype]
        return Tensor(self.data.view(dtype) if bitcast else self.data.astype(dtype))

    cast = to


LAYOUT = gl.AutoLayout()  # of every tile


def to_tensor(value):
    """A number as a scalar of its type on a GPU."""
    if isinstance(value, Tensor):
        return value
    return Tensor(np.asarray(value, NUMPY_TYPES[gl.int1 if isinstance(value, bool | np.bool_) else
                                                gl.float32 if isinstance(value, float) else gl.int32]))  # fmt: skip


def floating(value):
    return isinstance(value, float) or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fV")


def alike(*values):
    """Arrays, and numbers, for which numpy's common type is Triton's: integers become float32 beside those."""
    data = [value.data if isinstance(value, Tensor) else value for value in values]
    if any(map(floating, data)) and not all(map(floating, data)):
        wide = next((each.dtype for each in data if floating(each) and not isinstance(each, float)), np.float32)
        data = [each if floating(each) else np.asarray(each, wide) for each in data]
    return data


def elementwise(function):
    """A function of tiles and numbers that computes by one of arrays."""
    return lambda *values: Tensor(function(*alike(*map(to_tensor, values))))


def divided(a, b):
    a, b = (np.asarray(x, np.float32) if not floating(x) else x for x in (a, b))
    return np.true_divide(a, b)


def operators():
    def method(function, *order):
        def apply(*values):
            values = [values[place] for place in order]
            if any(isinstance(value, Pointer) for value in values):
                return NotImplemented
            return Tensor(function(*alike(*values)))

        return apply

    binary = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": divided, "mod": np.fmod,
        # C's division rounds towards zero.
        "floordiv": lambda a, b: (a - np.fmod(a, b)) // b,
        # Both of numpy shift by more bits than there are as a GPU does.
        "lshift": np.left_shift, "rshift": np.right_shift,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    for name, function in binary.items():
        setattr(Tensor, f"__{name}__", method(function, 0, 1))
        setattr(Tensor, f"__r{name}__", method(function, 1, 0))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tensor, f"__{name}__", method(getattr(operator, name), 0, 1))
    for name, function in {"neg": np.negative, "invert": np.invert}.items():
        setattr(Tensor, f"__{name}__", method(function, 0))


operators()


def reduction(ufunc):
    """A reduction of a tile, which ignores NaN where it asks for extremes, as a GPU does."""

    def reduced(x, axis=None, keep_dims=False):
        data = x.data.astype(np.int32) if x.data.dtype == bool else x.data
        return Tensor(ufunc.reduce(data, axis=axis, keepdims=keep_dims, dtype=data.dtype))

    return reduced


def full(shape, value, dtype, layout=None):
    value = value.scalar() if isinstance(value, Tensor) else value
    return Tensor(np.full([operator.index(size) for size in shape], value, NUMPY_TYPES[dtype]))


def broadcast(a, b):
    return tuple(map(Tensor, np.broadcast_arrays(*alike(a, b))))


# ----------------------------------------------------------------------------------------------------------------------
# Global memory
# ----------------------------------------------------------------------------------------------------------------------


class Buffer:
    """An array that a kernel was given."""

    def __init__(self, name, array):
        if not array.flags.c_contiguous:
            raise ValueError(f"argument {name} must be contiguous, of strides {array.strides} and shape {array.shape}")
        # Triton reads booleans as bytes.
        self.name, self.elements = name, array.reshape(-1).view(np.int8 if array.dtype == bool else array.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """One pointer, or a tile of them, into a buffer."""

    buffer: Buffer
    index: np.ndarray | np.int64  # in elements

    dtype = property(lambda self: tl.pointer_type(TRITON_TYPES[self.buffer.elements.dtype]))
    shape = property(lambda self: list(self.index.shape))

    def __add__(self, offset):
        return Pointer(self.buffer, self.index + np.asarray(to_tensor(offset).data, np.int64))

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset

    def __getitem__(self, key):
        return Pointer(self.buffer, self.index[key])

    def lanes(self, verb, mask):
        """(indices, mask) of all lanes, where those without mask have the index 0."""
        mask = np.asarray(True if mask is None else to_tensor(mask).data)
        index, mask = np.broadcast_arrays(np.where(mask, self.index, 0), mask)
        size = self.buffer.elements.size
        wrong = index[mask & ((index < 0) | (index >= size))]
        if wrong.size:
            text = f"{self.buffer.name}, element {wrong[0]} of {size} ({wrong.size} such lanes)"
            raise bug(f"out of bounds: {verb} {text}")
        return index, mask


def load(pointer, mask=None, other=None, **_):
    index, mask = pointer.lanes("loads", mask)
    elements = pointer.buffer.elements
    if mask.all():
        return Tensor(elements[index])
    other = to_tensor(poison(elements.dtype) if other is None else other).data.astype(elements.dtype)
    values = elements[index] if mask.any() else other
    return Tensor(np.where(mask, values, other))


def store(pointer, value, mask=None, **_):
    index, mask = pointer.lanes("stores to", mask)
    if not pointer.buffer.elements.flags.writeable:
        raise bug(f"stores to its input {pointer.buffer.name}")
    pointer.buffer.elements[index[mask]] = np.broadcast_to(to_tensor(value).data, index.shape)[mask]


def atomic_add(pointer, value, mask=None, **_):
    index, mask = pointer.lanes("adds to", mask)
    before = pointer.buffer.elements[index]
    np.add.at(pointer.buffer.elements, index[mask], np.broadcast_to(to_tensor(value).data, index.shape)[mask])
    return Tensor(before)


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """An array as the copy engine sees it: cut into tiles of ``block_shape``.

    ``shape`` and ``strides``, in elements, may look at it in another way than its own.
    """

    array: np.ndarray
    block_shape: list
    layout: object = None
    shape: tuple = None  # type: ignore
    strides: tuple = None  # type: ignore

    def __post_init__(self):
        shape = tuple(self.shape or self.array.shape)
        object.__setattr__(self, "shape", shape)
        strides = self.strides or [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        object.__setattr__(self, "strides", tuple(strides))
        object.__setattr__(self, "block_shape", list(self.block_shape))
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if last >= math.prod(self.array.shape):
            raise ValueError(f"shape {shape} with strides {self.strides} leaves an array of shape {self.array.shape}")

    dtype = property(lambda self: TRITON_TYPES[np.dtype(self.array.dtype)])
    block_type = property(lambda self: gl.block_type(self.dtype, self.block_shape))

    @functools.cached_property
    def view(self):
        strides = [stride * self.array.itemsize for stride in self.strides]
        if not self.array.flags.c_contiguous:
            raise ValueError(f"a descriptor's array must be contiguous, of strides {self.array.strides}")
        return np.lib.stride_tricks.as_strided(self.array, self.shape, strides, writeable=self.array.flags.writeable)

    def tile(self, corner, shared):
        """The parts of the array and of a buffer that belong together if a tile begins at the corner."""
        corner = [operator.index(place) for place in corner]
        if shared.shape != self.block_shape or shared.dtype != self.dtype or len(corner) != len(self.shape):
            raise bug(
                f"copies a tile of {self.dtype}{self.block_shape} at {corner}, from or to {shared.dtype}{shared.shape}"
            )
        first = [min(max(place, 0), size) for place, size in zip(corner, self.shape, strict=True)]
        end = [
            min(max(place + length, 0), size)
            for place, length, size in zip(corner, self.block_shape, self.shape, strict=True)
        ]
        inside = tuple(slice(a - c, b - c) for a, b, c in zip(first, end, corner, strict=True))
        return self.view[tuple(map(slice, first, end))], shared.array[inside]


def array_of(value):
    return value.array if isinstance(value, Descriptor) else value


def with_array(value, array):
    return dataclasses.replace(value, array=array) if isinstance(value, Descriptor) else array


# ----------------------------------------------------------------------------------------------------------------------
# Shared memory, barriers, the copy engine and the tensor cores
# ----------------------------------------------------------------------------------------------------------------------


class Shared:
    """Shared memory: a numpy array that is written to."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    shape = property(lambda self: list(self.array.shape))
    address = property(lambda self: self.array.__array_interface__["data"][0])
    layout = LAYOUT
    type = Tensor.type

    def part(self, array):
        return Shared(array, self.dtype)

    def index(self, index):
        return self.slice(index, 1).part(self.array[operator.index(index)])

    def slice(self, start, length, dim=0):
        start = operator.index(start)
        if not 0 <= start <= start + length <= self.array.shape[dim]:
            raise bug(f"out of bounds: {start} to {start + length} of axis {dim} of shared memory of {self.shape}")
        return self.part(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order):
        return self.part(self.array.transpose(order))

    def reshape(self, shape):
        return self.reinterpret(self.dtype, shape)

    def reinterpret(self, dtype, shape, layout=None):
        """The same bytes, which must be one after the other, as another tile."""
        if not self.array.flags.c_contiguous:
            raise bug(f"another view of shared memory of {self.shape} that is not contiguous")
        values = self.array.reshape(-1).view(NUMPY_TYPES[dtype])
        return Shared(values[: math.prod(shape)].reshape(shape), dtype)

    _reinterpret = reinterpret

    def load(self, layout=None):
        return Tensor(self.array.copy())

    def store(self, value):
        if value.shape != self.shape or value.dtype != self.dtype:
            raise bug(f"stores {value.dtype}{value.shape} to shared memory of {self.dtype}{self.shape}")
        self.array[...] = value.data
        MACHINE.current.unfenced[self.address, self.array.shape] = self.array

    def show(self, reader):
        """Refuses to let the copy engine, or the tensor cores, read what they may not see yet."""
        for each in MACHINE.partitions:
            if any(np.shares_memory(array, self.array) for array in each.unfenced.values()):
                raise bug(f"{reader} reads shared memory that {each.name} stored to, without fence_async_shared")


def allocate_shared_memory(dtype, shape, layout=None, value=None):
    shared = Shared(np.full(shape, poison(NUMPY_TYPES[dtype]), NUMPY_TYPES[dtype]), dtype)
    if value is not None:
        shared.store(value)
    return shared


class Barrier:
    """An mbarrier: a phase ends once all have arrived, and all bytes that they announced."""

    def __init__(self, count):
        self.count = self.pending = count
        self.announced, self.loads, self.completed = 0, [], 0

    def arrive(self, count):
        if count > self.pending:
            raise bug(f"{count} arrivals at a barrier that expects {self.pending} more in this phase")
        self.pending -= count
        self.end_phase()

    def end_phase(self):
        if not (self.pending or self.announced or self.loads):
            self.completed, self.pending = self.completed + 1, self.count

    def passed(self, phase):
        """Whether a phase has ended. What is loaded arrives now, and no earlier."""
        if self.completed <= phase and self.loads:
            for deliver in self.loads:
                deliver()
            self.loads = []
            self.end_phase()
        return self.completed > phase

    def missing(self):
        return f"for a barrier that lacks {self.pending} arrivals and {self.announced} bytes"


def mbarrier_init(shared, count):
    MACHINE.barriers[shared.address] = Barrier(count)


def expect(shared, bytes_per_cta=0, pred=True, **other):
    """Arrives, and announces bytes; Triton 3.6 calls them `bytes`."""
    if pred:
        barrier = MACHINE.barrier(shared)
        barrier.announced += other.get("bytes", bytes_per_cta)
        barrier.arrive(1)


def arrive(shared, *, count=1, pred=True):
    if pred:
        MACHINE.barrier(shared).arrive(count)
        MACHINE.hand_on()


def wait(shared, phase, pred=True, deps=()):
    """Waits for a phase of this parity: the one that this partition waited for last, or the next."""
    if not pred:
        return
    me, barrier = MACHINE.current, MACHINE.barrier(shared)
    wanted = me.seen.get(barrier, -1)
    wanted += (wanted ^ operator.index(phase)) & 1
    me.wait(lambda: barrier.passed(wanted), barrier.missing)
    me.seen[barrier] = wanted
    if barrier.completed > wanted + 1:
        raise bug(f"overrun: waits for phase {wanted} of a barrier, whose phase {barrier.completed - 1} is over as well")


def async_load(desc, coord, barrier, result, pred=True, **_):
    if not pred:
        return
    source, target = desc.tile(coord, result)
    barrier, size = MACHINE.barrier(barrier), desc.block_type.nbytes
    if size > barrier.announced:
        raise bug(f"loads {size} bytes for a barrier that was told to expect {barrier.announced} more")
    result.array[...] = poison(result.array.dtype)

    def deliver():
        result.array[...] = 0  # what lies outside of the array
        target[...] = source

    barrier.announced -= size
    barrier.loads.append(deliver)


def async_store(desc, coord, src, add=False, **_):
    target, source = desc.tile(coord, src)
    src.show("the copy engine")
    if not target.flags.writeable:
        raise bug(f"stores to an input of shape {desc.shape}")
    MACHINE.current.stores.append((target, source, add))


def store_wait(pendings, **_):
    stores = MACHINE.current.stores
    while len(stores) > pendings:
        target, source, add = stores.pop(0)
        target[...] = target + source if add else source


def fence_async_shared(cluster=False):
    MACHINE.current.unfenced.clear()


class Accumulator(Tensor):
    """What a product in flight will be."""

    def __init__(self, a, b, start):
        self.a, self.b, self.start, self.value = a, b, start, None

    @property
    def data(self):
        raise bug("reads the result of a product that warpgroup_mma_wait has not returned")

    def finish(self):
        a, b = (each.array if isinstance(each, Shared) else each.data for each in (self.a, self.b))
        value = product(a.astype(np.float32), b.astype(np.float32))
        if self.start is not None:
            value += self.start.value if isinstance(self.start, Accumulator) else self.start.data
        self.value = value


def product(a, b):
    # A few rows at a time, as OpenBLAS starts threads above 2**18 multiplications, and on busy cores they cost more than
    # they bring.
    (m, k), n = a.shape, b.shape[1]
    rows = math.gcd(m, max(1, 2**18 // (k * n)))
    return np.matmul(a.reshape(m // rows, rows, k), b).reshape(m, n)


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False, **_):
    if a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        raise bug(f"multiplies {a.dtype}{a.shape} and {b.dtype}{b.shape}")
    for each in (a, b):
        if isinstance(each, Shared):
            each.show("a product")
    result = Accumulator(a, b, acc if use_acc else None)
    MACHINE.current.products.append(result)
    return result if is_async else warpgroup_mma_wait(0, [result])


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    products = MACHINE.current.products
    while len(products) > num_outstanding:
        products.pop(0).finish()
    results = [Tensor(each.value) if isinstance(each, Accumulator) and each.value is not None else each
               for each in deps]  # fmt: skip
    return results[0] if len(results) == 1 else tuple(results)


# ----------------------------------------------------------------------------------------------------------------------
# Assembly, known by its first instruction
# ----------------------------------------------------------------------------------------------------------------------


def packed(dtype):
    """Two tiles of float32 as one of int32, the first in the upper halves."""

    def pack(assembly, high, low):
        high, low = (each.data.astype(dtype).view(np.uint16).astype(np.uint32) for each in (high, low))
        return Tensor((high << 16 | low).view(np.int32))

    return pack


def named_barrier(assembly, number):
    """Counts a group of 128 threads at a named barrier; `bar.sync` waits until all have come."""
    place, groups = int(number), int(re.findall(r"\d+", assembly.split(";")[0])[-1]) // 128
    arrived = MACHINE.meetings[place] = MACHINE.meetings.get(place, 0) + 1
    needed = -(-arrived // groups) * groups
    if assembly.startswith("bar.sync"):
        lacking = lambda: needed - MACHINE.meetings[place]  # noqa: E731
        MACHINE.current.wait(lambda: lacking() <= 0, lambda: f"for {lacking()} more at the named barrier {place}")
    else:
        MACHINE.hand_on()


INSTRUCTIONS = {
    "ex2.approx.ftz.f32": lambda assembly, x: Tensor(np.exp2(x.data)),
    "cvt.rn.bf16x2.f32": packed(ml_dtypes.bfloat16),
    "cvt.rn.f16x2.f32": packed(np.float16),
    "bar.sync": named_barrier,
    "bar.arrive": named_barrier,
}


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    instruction = asm.split()[0]
    if instruction not in INSTRUCTIONS:
        raise NotImplementedError(f"assembly {asm!r}: the argument replacements lacks the function that uses it")
    return INSTRUCTIONS[instruction](asm, *args)


# ----------------------------------------------------------------------------------------------------------------------
# What kernels call, by name
# ----------------------------------------------------------------------------------------------------------------------

LANGUAGE = {
    "constexpr": lambda value: value,
    "static_range": range,
    "to_tensor": to_tensor,
    "program_id": lambda axis=0: to_tensor(MACHINE.program[axis]),
    "num_programs": lambda axis=0: to_tensor(MACHINE.grid[axis]),
    "warp_specialize": lambda functions, *_: MACHINE.specialize(functions),
    "thread_barrier": lambda: None,
    "inline_asm_elementwise": inline_asm_elementwise,
    # Tiles
    "arange": lambda start, end, layout=None: Tensor(np.arange(start, end, dtype=np.int32)),
    "full": full,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "reshape": lambda x, shape: Tensor(x.data.reshape(shape)),
    "permute": lambda x, order: Tensor(x.data.transpose(order)),
    "expand_dims": lambda x, axis: Tensor(np.expand_dims(x.data, axis)),
    "broadcast": broadcast,
    "split": lambda x: (Tensor(x.data[..., 0]), Tensor(x.data[..., 1])),
    "join": lambda a, b: Tensor(np.stack([each.data for each in broadcast(a, b)], -1)),
    "where": lambda condition, a, b: Tensor(np.where(to_tensor(condition).data, *alike(a, b))),
    "maximum": elementwise(np.fmax),
    "minimum": elementwise(np.fmin),
    "max": reduction(np.fmax),
    "min": reduction(np.fmin),
    "sum": reduction(np.add),
    "cdiv": lambda a, b: (a + (b - 1)) // b,
    "exp": elementwise(np.exp),
    "exp2": elementwise(np.exp2),
    "log": elementwise(np.log),
    "log2": elementwise(np.log2),
    "sqrt": elementwise(np.sqrt),
    "abs": elementwise(np.abs),
    # Global memory
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
    # mbarrier; `init` and `wait` are of no other module that kernels use
    "init": mbarrier_init,
    "expect": expect,
    "arrive": arrive,
    "wait": wait,
    "invalidate": lambda shared: MACHINE.barriers.pop(shared.address),
    # The copy engine, and two names of the package's own
    "async_load": async_load,
    "async_copy_global_to_shared": async_load,
    "async_store": async_store,
    "async_copy_shared_to_global": async_store,
    "async_atomic_add": functools.partial(async_store, add=True),
    "add_tile": functools.partial(async_store, add=True),
    "store_wait": store_wait,
    # Shared memory and products
    "allocate_shared_memory": allocate_shared_memory,
    "reinterpret": Shared.reinterpret,
    "fence_async_shared": fence_async_shared,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
}
