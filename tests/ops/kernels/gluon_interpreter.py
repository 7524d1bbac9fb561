"""Runs Gluon kernels for Hopper without a GPU: their own Python source, on numpy, with checks.

A kernel of Gluon is plain Python over some thirty names. It runs here as a copy whose globals have stand-ins for them:
nothing of Triton, nor of a kernel's module, is changed. Layouts mean nothing, but for a linear one of shared memory,
see `Placed`. All that the hardware does by itself is done as late as a kernel allows, so that nothing is there by luck:

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
import linecache
import math
import operator
import re
import sys
import threading
import types
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import JITFunction

from tests.ops.kernels.triton_interpreter import NUMPY_TYPES, TRITON_TYPES, KernelBug, poison


class Tiles(NamedTuple):
    """An array that a kernel has a TMA descriptor of: seen as ``shape``, and cut into tiles like ``block_shape``."""

    array: Any
    shape: tuple
    block_shape: tuple
    strides: Any = None  # in elements, by default row-major


def call(kernel, programs, inputs, outputs, constants, aliases=None, seed=0):
    """Interprets a kernel wherever JAX computes: its parameters are the inputs, the outputs, and the constants.

    Args:
      inputs: arrays, or what has the attributes of `Tiles`.
      outputs: `jax.ShapeDtypeStruct`, or the same of such.
      aliases: of inputs that become outputs: number of the input to number of the output.
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
      arguments: the kernel's first parameters: numpy arrays, `Tiles` of such, and numbers.
      constants: the others, by name.
      seed: which partition goes first, of all orders there are.
      replacements: other functions for those that kernels call, by function or by name.
    """
    global MACHINE
    with LOCK, np.errstate(all="ignore"):  # infinities and NaNs are as welcome as on a GPU
        MACHINE = Machine(kernel.fn.__name__, (*grid, 1, 1)[:3], seed, replacements or {})
        function = MACHINE.interpreted(kernel)
        parameters = [parameter(name, value) for name, value in zip(kernel.arg_names, arguments, strict=False)]
        for program in itertools.product(*map(range, MACHINE.grid)):
            MACHINE.begin(program)
            function(*parameters, **constants)
            MACHINE.current.leave()
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


def bug(text):
    return KernelBug(f"{MACHINE.kernel}, program {MACHINE.program}, {MACHINE.current.name}: {text}")


# --- partitions, their turns, and functions ---------------------------------------------------------------------------


class Stopped(BaseException):
    """Ends a partition because another has failed."""


class Partition:
    """A group of warps with a program of its own, and what it has begun and not waited for."""

    def __init__(self, name, unfenced=()):
        self.name, self.thread, self.turn = name, threading.current_thread(), threading.Semaphore(0)
        self.ready, self.lacks = lambda: True, str  # whether what it waits for has come; and what that is, in words
        self.ended, self.result = False, None
        self.products, self.stores, self.unfenced = [], [], dict(unfenced)
        self.copies = []  # whose barrier it has not named yet
        self.seen = {}  # of each barrier the last phase that it has waited for

    def wait(self, ready, lacks=str):
        self.ready, self.lacks = ready, lacks
        MACHINE.hand_on()

    def leave(self):
        if self.copies:
            raise bug("ends without a word to anybody about what it copies: mbarrier_arrive is missing")
        if self.stores:
            raise bug("ends while TMA may still read what it stores: tma.store_wait(0) is missing")
        self.ended = True

    def __str__(self):
        frame: Any = sys._current_frames()[self.thread.ident or 0]
        while frame.f_code.co_filename in (__file__, threading.__file__):
            frame = frame.f_back
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return f"{self.name} waits for {self.lacks()} in {frame.f_code.co_name}, line {frame.f_lineno}: {line}"


class Machine:
    """What all partitions of a launch share."""

    def __init__(self, kernel, grid, seed, replacements):
        self.kernel, self.grid, self.seed, self.replacements, self.scopes = kernel, grid, seed, replacements, {}
        self.begin((0, 0, 0))

    def begin(self, program):
        self.program, self.barriers, self.meetings, self.failure = program, {}, {}, None
        self.current = Partition("the kernel")
        self.partitions = [self.current]

    def hand_on(self):
        """Lets the first partition run that can; returns when that is this one."""
        me, alive = self.current, [each for each in self.partitions if not each.ended]
        following = next((each for each in alive if each.ready()), None)
        if alive and not following:
            raise bug("deadlock: " + "; ".join(map(str, alive)))
        if following and following is not me:
            self.current = following
            following.turn.release()
            if not me.ended:
                me.turn.acquire()
            if self.failure:
                raise Stopped
        me.ready = lambda: True

    def specialize(self, functions):
        """Runs partitions to their ends; returns what the first one returns."""
        me = self.current
        all_of = [Partition(f"partition {i} ({each.__name__})", me.unfenced) for i, (each, _) in enumerate(functions)]
        for each, (function, arguments) in zip(all_of, functions, strict=True):
            each.thread = threading.Thread(target=self.live, args=(each, function, arguments), daemon=True)
            each.thread.start()
        # First the last one, for that is where producers stand: they use what is free as soon as they are told.
        orders = list(itertools.permutations(reversed(all_of)))
        self.partitions = orders[self.seed % len(orders)]
        self.current = self.partitions[0]
        self.current.turn.release()
        for each in all_of:
            each.thread.join()
        if self.failure:
            raise self.failure
        self.current, self.partitions = me, [me]
        return all_of[0].result

    def live(self, partition, function, arguments):
        partition.turn.acquire()
        try:
            if not self.failure:
                with np.errstate(all="ignore"):
                    partition.result = function(*arguments)
                partition.leave()
                self.hand_on()
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
            for each in self.partitions:
                each.turn.release()

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

    def __init__(self, machine, module):
        self._machine, self._module = machine, module

    def __getattr__(self, name):
        value = self._machine.translated(getattr(self._module, name))
        setattr(self, name, value)
        return value


def unknown(name, *_, **__):
    raise NotImplementedError(f"{name}: neither Gluon's stand-ins nor the argument replacements has it")


LOCK = threading.RLock()  # there is one machine, and JAX calls back from several threads
MACHINE: Any = None


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
        return Placed(found, layout) if isinstance(layout, gl.SharedLinearLayout) else Shared(found)

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


class Placed(Shared):
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


# --- what kernels call ------------------------------------------------------------------------------------------------


def packed(dtype):
    """Two tiles of float32 as one of int32, the first in the upper halves."""
    return lambda _, *parts: Tensor(np.stack([x.data.astype(dtype) for x in parts[::-1]], -1).view(np.int32)[..., 0])


def named_barrier(assembly, number, *threads):
    """Counts a group of 128 threads at a named barrier; `bar.sync` waits until all have come."""
    verb, _, given = assembly.split(";")[0].split()
    place, groups = int(number), int(threads[0] if threads else given) // 128
    met = MACHINE.meetings[place] = MACHINE.meetings.get(place, 0) + 1
    last = -(-met // groups) * groups if verb == "bar.sync" else 0
    MACHINE.current.wait(lambda: MACHINE.meetings[place] >= last, lambda: f"others at the named barrier {place}")


def add_vectors(_, pointer, *parts):
    """Adds to neighbouring numbers."""
    for i, part in enumerate(parts):
        at, _ = (pointer + i).lanes("adds to", None)
        np.add.at(pointer.elements, at, part.data)


# By the first instruction.
ASSEMBLY = {
    "mov.b32": lambda _, x: x,
    "ex2.approx.ftz.f32": lambda _, x: Tensor(np.exp2(x.data)),
    "cvt.rn.bf16x2.f32": packed(ml_dtypes.bfloat16),
    "cvt.rn.f16x2.f32": packed(np.float16),
    "and.b32": lambda _, x, words, bit: Tensor(np.where((words & bit).data != 0, x.data, np.float32(-np.inf))),
    "red.global.add.v4.f32": add_vectors,
    "bar.sync": named_barrier,
    "bar.arrive": named_barrier,
}


class Language:
    """The names of Gluon, and two of this package's own: `add_tile` and `reinterpret`."""

    constexpr = staticmethod(lambda value: value)
    static_range = range
    to_tensor = staticmethod(to_tensor)
    program_id = staticmethod(lambda axis=0: to_tensor(MACHINE.program[axis]))
    num_programs = staticmethod(lambda axis=0: to_tensor(MACHINE.grid[axis]))
    warp_specialize = staticmethod(lambda functions, *_: MACHINE.specialize(functions))

    arange = staticmethod(lambda start, end, layout=None: Tensor(np.arange(start, end, dtype=np.int32)))
    full = staticmethod(lambda shape, value, dtype, *_, **__: Tensor(np.full(shape, raw(value), NUMPY_TYPES[dtype])))
    zeros = staticmethod(lambda shape, dtype, layout=None: Tensor(np.zeros(shape, NUMPY_TYPES[dtype])))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    reshape = staticmethod(lambda x, shape: Tensor(x.data.reshape(shape)))
    permute = staticmethod(lambda x, order: Tensor(x.data.transpose(order)))
    expand_dims = staticmethod(lambda x, axis: Tensor(np.expand_dims(x.data, axis)))
    broadcast = staticmethod(lambda a, b: tuple(map(Tensor, np.broadcast_arrays(a.data, b.data))))
    split = staticmethod(lambda x: (Tensor(x.data[..., 0]), Tensor(x.data[..., 1])))
    join = staticmethod(lambda a, b: Tensor(np.stack([a.data, b.data], -1)))
    where = staticmethod(elementwise(np.where))
    maximum, minimum = staticmethod(elementwise(np.fmax)), staticmethod(elementwise(np.fmin))
    max, min, sum = (staticmethod(reduction(ufunc)) for ufunc in (np.fmax, np.fmin, np.add))
    exp, exp2, log, log2 = (staticmethod(elementwise(ufunc)) for ufunc in (np.exp, np.exp2, np.log, np.log2))
    abs, sqrt = staticmethod(elementwise(np.abs)), staticmethod(elementwise(np.sqrt))
    cdiv = staticmethod(lambda a, b: (a + (b - 1)) // b)

    @staticmethod
    def inline_asm_elementwise(asm, constraints, args, *_, **__):
        first = re.sub(r"^{|\s*\.reg[^;]*;\s*", "", asm).split()[0]  # behind registers that are declared
        return ASSEMBLY.get(first, functools.partial(unknown, repr(asm)))(asm, *args)

    @staticmethod
    def load(pointer, mask=None, other=None, **_):
        at, mask = pointer.lanes("loads", mask)
        values = pointer.elements.take(at, mode="clip")
        other = poison(values.dtype) if other is None else raw(other)
        return Tensor(values if mask.all() else np.where(mask, values, other).astype(values.dtype))

    @staticmethod
    def store(pointer, value, mask=None, **_):
        at, mask = pointer.lanes("stores to", mask)
        pointer.elements[at[mask]] = np.broadcast_to(raw(value), at.shape)[mask]

    # Barriers

    init = staticmethod(lambda barrier, count: MACHINE.barriers.update({barrier.address: Barrier(count)}))

    @staticmethod
    def expect(barrier, bytes_per_cta=0, pred=True, **old):
        """Arrives, and announces bytes, in Triton 3.6 by the name `bytes`."""
        if pred:
            barrier_of(barrier).announced += old.get("bytes", bytes_per_cta)
            barrier_of(barrier).arrive(1)

    @staticmethod
    def arrive(barrier, *, count=1, pred=True):
        if pred:
            barrier_of(barrier).arrive(count)
            MACHINE.hand_on()

    @staticmethod
    def wait(barrier, phase, pred=True, deps=()):
        """Waits for a phase of this parity: the one that this partition waited for last, or the one after it."""
        if pred:
            me, barrier = MACHINE.current, barrier_of(barrier)
            wanted = me.seen.get(barrier, -1)
            wanted += (wanted ^ operator.index(phase)) & 1
            me.wait(lambda: barrier.passed(wanted), lambda: f"{barrier.pending} arrivals and {barrier.announced} bytes")
            if me.seen.get(barrier) != wanted:  # what threads wrote is not yet for the tensor cores
                me.unfenced.update({(each.address, *each.shape): each.array for each in barrier.copied})
            me.seen[barrier] = wanted
            if barrier.completed > wanted + 1:
                raise bug(f"overrun: waits for phase {wanted} of a barrier when phase {barrier.completed - 1} is over")

    # TMA

    @staticmethod
    def async_load(desc, coord, barrier, result, pred=True, **_):
        if not pred:
            return
        source, target = desc.tile(coord, result)
        barrier, size = barrier_of(barrier), desc.block_type.nbytes
        if size > barrier.announced:
            raise bug(f"loads {size} bytes for a barrier that expects {barrier.announced} more")
        result.array[...] = poison(result.array.dtype)
        barrier.announced -= size
        barrier.loads.append((result.array, target, source))

    @staticmethod
    def async_store(desc, coord, src, add=False, **_):
        target, source = desc.tile(coord, src)
        src.show("TMA")
        if not target.flags.writeable:
            raise bug(f"stores to its input {desc.name}")
        MACHINE.current.stores.append((target, source, add))

    @staticmethod
    def store_wait(pendings, **_):
        while len(MACHINE.current.stores) > pendings:
            target, source, add = MACHINE.current.stores.pop(0)
            target[...] = target + source if add else source

    async_copy_global_to_shared, async_copy_shared_to_global = async_load, async_store
    async_atomic_add = add_tile = staticmethod(functools.partial(async_store, add=True))

    # Copies by threads, of which four warps take part

    @staticmethod
    def copy(smem, pointer, **_):
        if list(pointer.at.shape) != smem.shape or pointer.elements.dtype != smem.array.dtype:
            raise bug(f"copies {pointer.elements.dtype}{pointer.at.shape} to {smem.dtype}{smem.shape}")
        at, _ = pointer.lanes("loads", None)
        smem.array[...] = poison(smem.array.dtype)
        MACHINE.current.copies.append((smem.array, smem.array, pointer.elements[at]))

    @staticmethod
    def mbarrier_arrive(barrier, increment_count=True):
        barrier_of(barrier).loads += MACHINE.current.copies
        barrier_of(barrier).copied = [Shared(array) for array, _, _ in MACHINE.current.copies]
        MACHINE.current.copies = []
        if not increment_count:
            Language.arrive(barrier, count=128)

    # Shared memory and the tensor cores

    fence_async_shared = staticmethod(lambda *_: MACHINE.current.unfenced.clear())
    reinterpret = staticmethod(Shared.reinterpret)

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout=None):
        return Shared(np.full(shape, poison(NUMPY_TYPES[dtype]), NUMPY_TYPES[dtype]))

    @staticmethod
    def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False, **_):
        if a.dtype != b.dtype or a.shape[1] != b.shape[0]:
            raise bug(f"multiplies {a.dtype}{a.shape} by {b.dtype}{b.shape}")
        # Of a group of four warps, each has 16 rows of a product.
        if a.shape[0] % 64 or b.shape[1] % 8 or b.shape[1] > 256 or a.shape[1] * a.dtype.primitive_bitwidth % 256:
            raise bug(f"multiplies {a.shape} by {b.shape}; a product has 64 n rows, 8 n <= 256 columns, and 32 n bytes")
        for each in (a, b):
            if isinstance(each, Shared):
                each.show("a product")
        result = Accumulator(a, b, acc if use_acc else 0)
        MACHINE.current.products.append(result)
        return result if is_async else Language.warpgroup_mma_wait(0, [result])

    @staticmethod
    def warpgroup_mma_wait(num_outstanding=0, deps=()):
        products = MACHINE.current.products
        while len(products) > num_outstanding:
            products.pop(0).finish()
        found = tuple(each if getattr(each, "value", None) is None else Tensor(each.value) for each in deps)
        return found[0] if len(found) == 1 else found
