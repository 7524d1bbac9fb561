"""The names of Gluon that interpreted kernels call, and the assembly that they contain."""

import functools
import operator
import re

import ml_dtypes
import numpy as np

from tests.ops.kernels.gluon_memory import (
    Accumulator,
    Barrier,
    Shared,
    Tensor,
    barrier_of,
    elementwise,
    raw,
    reduction,
    to_tensor,
)
from tests.ops.kernels.gluon_partitions import MACHINE, bug
from tests.ops.kernels.numpy_types import NUMPY_TYPES, poison


def unknown(name, *_, **__):
    raise NotImplementedError(f"{name}: neither Gluon's stand-ins nor the argument replacements has it")


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
    "ld.global.nc.f32": lambda _, pointer: Language.load(pointer),
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
