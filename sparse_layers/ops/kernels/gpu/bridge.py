"""The bridge from JAX to a kernel: Triton compiles it to PTX, jaxlib assembles and launches that.

Kernels compile in threads from the moment that JAX traces their calls. JAX waits for them when it lowers the program.
Triton keeps the PTX on disk for later processes.

The bridge stands on `triton.compile`, on the kernel calls of ``jaxlib.gpu_triton``, and on `jax.ffi.ffi_call`. No GPU
is needed to compile. JAX prunes, copies and orders the calls as it does those of any other foreign function.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...planning.platforms import assumed_gpu
from . import hardware

# Arrays begin at multiples of this number of bytes.
_ALIGNMENT = 16
# Triton's names of JAX's dtypes.
TYPES = {
    "bool": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
}
# TMA swizzles rows of this number of bytes, so that tensor cores read a tile without bank conflicts.
_SWIZZLE = 128
# The kernels of this name in jaxlib are called by `jax.ffi`.
TARGET = "triton_kernel_call_ffi"


class TensorDescriptor(NamedTuple):
    """An array that a kernel reads or writes in tiles, by a TMA descriptor; as Triton's class of this name."""

    array: Any  # the array, or the shape and dtype of an output
    shape: tuple[int, ...]  # lengths of the axes
    strides: tuple[int, ...]  # elements between neighbours on each axis
    block_shape: tuple[int, ...]  # lengths of a tile

    @classmethod
    def of(cls, array: Any, block_shape: tuple[int, ...]) -> "TensorDescriptor":
        """Returns the descriptor of a contiguous array, by its own axes."""
        return cls(array, array.shape, tuple(math.prod(array.shape[i + 1 :]) for i in range(array.ndim)), block_shape)


class Compiled(NamedTuple):
    """A kernel in PTX."""

    name: str
    ptx: str
    num_warps: int  # warps of a program, with those of all partitions
    shared: int  # bytes of shared memory of a program
    scratch: tuple[int, ...]  # bytes of global memory that each program needs besides, and their alignment; () for none
    # Element type, swizzle and box of each TMA descriptor, as Triton chose them.
    descriptors: tuple[dict[str, Any], ...]


class RecordedLaunch(NamedTuple):
    """A launch of a kernel, as `record_launches` records it."""

    kernel: Any  # a `triton.jit` or `gluon.jit` function
    dtypes: tuple[str, ...]  # names of the dtypes of its pointers and descriptors, in their order
    constants: Mapping[str, Any]  # its compile-time constants, by name
    options: Mapping[str, Any]  # the compiler's: num_warps, and num_stages of Triton's kernels
    condition: str | None = None  # "if ..." where the program decides at run time whether to launch it; else None

    @property
    def engine(self) -> str:
        """The engine of the kernel: "hopper" for Gluon kernels, else "triton"."""
        return "hopper" if self.kernel.is_gluon() else "triton"

    def __str__(self) -> str:
        """The engine, the kernel, and in brackets what this launch adds to the common case."""
        second, work, lists = (self.constants.get(name) for name in ("KV2", "W", "L"))
        remarks = {
            "two passes": second is not None and second.ROWS > 0,
            "split lists": getattr(work, "SPLITS", False) or getattr(lists, "NUM_SPLITS", 0) > 0,
            "merges splits": getattr(work, "MERGED", False),
            "with dk and dv": self.constants.get("WITH_DKV", False),
            "with dq": self.constants.get("WITH_DQ", False),
        }
        notes = [remark for remark, applies in remarks.items() if applies]
        notes += [] if self.condition is None else [self.condition]
        name = self.kernel.fn.__name__.removeprefix(f"{self.engine}_")
        return f"{self.engine} {name}" + (f" ({', '.join(notes)})" if notes else "")


# The list that launches are appended to, None where they are made, and the condition that is recorded with them.
_RECORD: contextvars.ContextVar[list[RecordedLaunch] | None] = contextvars.ContextVar("record", default=None)
_CONDITION: contextvars.ContextVar[str | None] = contextvars.ContextVar("condition", default=None)


@contextlib.contextmanager
def record_launches() -> Iterator[list[RecordedLaunch]]:
    """Appends launches to the list that it yields, in place of making them. Calls of kernels return zeros.

    Nothing is compiled, and no GPU is needed; see `platforms.assume_gpu`.
    """
    launches: list[RecordedLaunch] = []
    token = _RECORD.set(launches)
    try:
        yield launches
    finally:
        _RECORD.reset(token)


def record_condition(condition: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a branch of `jax.lax.cond`: the function, whose launches are recorded with the condition."""

    def branch(*args):
        token = _CONDITION.set(condition)
        try:
            return function(*args)
        finally:
            _CONDITION.reset(token)

    return branch


def check_triton() -> None:
    """Checks that Triton is installed, whose kernels are traced."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            f"device: triton, which traces the kernels of a GPU, is not installed ({error}): install this package with "
            "its extra 'gpu', on Linux"
        ) from error


def gluon_unsupported() -> str | None:
    """Returns why Gluon kernels cannot be launched with what is installed, None if they can.

    They are taken to launch on a GPU that `platforms.assume_gpu` names.
    """
    if assumed_gpu() is not None:
        return None
    try:
        from jaxlib import gpu_triton
    except ImportError as error:
        return f"it needs jaxlib's gpu_triton ({error})"
    if not hasattr(gpu_triton, "create_tma_descriptor_parameter"):
        return f"it needs TMA descriptors in jaxlib's CUDA plugin, from 0.11.1 on, and jax is {jax.__version__}"
    try:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # noqa: F401
        from triton.experimental.gluon._runtime import GluonASTSource  # noqa: F401
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
    except ImportError as error:
        return f"it needs Gluon, which comes with triton from 3.6 on ({error})"
    return None


def call_triton(
    kernel: Any,
    grid: Sequence[int],
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
    in_place: Sequence[int] = (),
) -> Sequence[jax.Array]:
    """Runs a Triton kernel whose parameters are pointers to the arrays, pointers to the outputs, and the constants.

    Inputs ``in_place``, by index, have no second pointer: the kernel changes them. They are returned after the outputs.
    JAX copies them first if they are needed as they were.
    """
    results = [*outputs, *(jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in in_place)]
    aliases = {index: len(outputs) + i for i, index in enumerate(in_place)}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return _launch(kernel, grid, arrays, [*arrays, *outputs], results, constants, options, aliases)


def call_gluon(
    kernel: Any,
    programs: int,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
    max_registers: int | None = None,
) -> Sequence[jax.Array]:
    """Runs a Gluon kernel whose parameters are the inputs, the outputs, and the constants.

    Inputs and outputs are arrays, or each a `TensorDescriptor` of one. ``aliases`` maps an input to the output that
    takes its memory, both by index; the kernel gets both pointers. Threads start with at most ``max_registers``
    registers, so that several programs fit a multiprocessor; None lets one program have all.
    """
    arrays, results = ([x.array if isinstance(x, TensorDescriptor) else x for x in xs] for xs in (inputs, outputs))
    parameters = [*inputs, *outputs]
    options = {"num_warps": 4} | ({} if max_registers is None else {"maxnreg": max_registers})
    return _launch(kernel, (programs,), arrays, parameters, results, constants, options, aliases or {})


def compile_kernel(
    kernel: Any, types: Sequence[str], constants: Mapping[str, Any], capability: int, options: Mapping[str, Any]
) -> Any:
    """Compiles a kernel to Triton's `CompiledKernel`, which Triton keeps on disk, too.

    ``types`` are Triton's, of the parameters that are not ``constants``; ``capability`` is 90 for Hopper; ``options``
    are those of Triton's CUDA compiler, such as num_warps and ptx_version.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source

    remaining, names = iter(types), kernel.arg_names
    signature = {name: "constexpr" if name in constants else next(remaining) for name in names}
    constexprs = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    aligned = {(i,): [["tt.divisibility", _ALIGNMENT]] for i, name in enumerate(names) if signature[name][0] == "*"}
    source: Any = Source(kernel, signature, constexprs, aligned)
    trace = source.make_ir

    def trace_alone(*args: Any) -> Any:
        with _PARSING:
            return trace(*args)

    source.make_ir = trace_alone
    # Triton is about to change its default for fused multiply-add.
    target, enabled = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": True}
    return triton.compile(source, target=target, options=enabled | dict(options))


# Held by the thread that parses the source of kernels. CPython before 3.11.9 and 3.12.3 fails in two threads at a time
# ("AST constructor recursion depth mismatch"); Triton's passes and LLVM run without this lock, and without the GIL.
_PARSING = threading.Lock()
# True in the context of `compiled`.
_PTX_ONLY: contextvars.ContextVar[bool] = contextvars.ContextVar("PTX only", default=False)


def _skip_ptxas(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
    """A hook of Triton's compiler: removes ptxas in the context of `compiled`, and changes nothing elsewhere.

    jaxlib assembles PTX itself. Without arguments, returns what Triton adds to the keys of its caches.
    """
    if not _PTX_ONLY.get():
        return "", ""
    if stages is not None:
        stages["cubin"] = lambda *_: b""
    return "PTX only", "PTX only"


@functools.lru_cache(maxsize=512)
def compiled(
    kernel: Any,
    types: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    capability: int,
    options: tuple[tuple[str, Any], ...],
) -> Compiled:
    """Compiles a kernel by `compile_kernel` to PTX, once; constants and options are items of its mappings."""
    from triton import knobs

    settings: Any = knobs.runtime
    if settings.add_stages_inspection_hook is None:  # else the user's hook decides
        settings.add_stages_inspection_hook = _skip_ptxas
    token = _PTX_ONLY.set(True)
    try:
        result = compile_kernel(kernel, types, dict(constants), capability, dict(options))
    finally:
        _PTX_ONLY.reset(token)
    data = result.metadata
    return Compiled(
        data.name,
        result.asm["ptx"],
        data.num_warps,
        data.shared,
        (data.global_scratch_size, data.global_scratch_align) if data.global_scratch_size else (),
        tuple(dict(x) for x in data.tensordesc_meta or ()),
    )


@functools.cache
def _compiler_threads() -> ThreadPoolExecutor:
    """Returns the threads that compile kernels; Python limits them by the number of cores."""
    return ThreadPoolExecutor(thread_name_prefix="sparse_layers compiler")


# Kernels that are compiling, by the arguments of `compiled`.
_COMPILING: dict[tuple[Any, ...], Future[Compiled]] = {}


def _compile_in_background(arguments: tuple[Any, ...]) -> Future[Compiled]:
    """Returns the future of `compiled`, one for all calls while a kernel compiles."""
    with _PARSING:  # the hash of a kernel is that of its source
        future = _COMPILING.get(arguments)
        if future is None:
            future = _COMPILING[arguments] = _compiler_threads().submit(compiled, *arguments)
            future.add_done_callback(lambda _: _COMPILING.pop(arguments, None))
    return future


@dataclasses.dataclass(frozen=True)
class _LaunchMessage:
    """The message by which jaxlib launches a kernel. JAX asks for it when it lowers the program.

    Messages of equal launches are equal, so that JAX compiles one program for them.
    """

    code: tuple[Any, ...]  # the arguments of `compiled`
    grid: tuple[int, ...]
    # Of each parameter: its TMA descriptor without the array, None for a pointer.
    parameters: tuple[TensorDescriptor | None, ...]

    def __jax_array__(self) -> bytes:
        """Waits for the kernel and returns the message. JAX calls this of attributes that it does not know."""
        from jaxlib import gpu_triton

        code, capability = _compile_in_background(self.code).result(), self.code[3]
        values, descriptors = [], iter(code.descriptors)
        for x in self.parameters:
            values += (
                [gpu_triton.create_array_parameter(0, _ALIGNMENT)]
                if x is None
                else _descriptor_parameters(x, next(descriptors))
            )
        binary = gpu_triton.TritonKernel(
            code.name, code.num_warps, 1, code.shared, code.ptx, "", capability, *code.scratch
        )
        sizes = (*self.grid, 1, 1)[:3]
        return zlib.compress(gpu_triton.TritonKernelCall(binary, *sizes, values).to_proto(code.name, b""))


def _launch(kernel, grid, arrays, parameters, results, constants, options, aliases) -> Sequence[jax.Array]:
    """Launches a kernel, or records that. ``parameters`` are arrays, shapes or descriptors, in the kernel's order."""
    launches = _RECORD.get()
    if launches is not None:
        dtypes = tuple((x.array if isinstance(x, TensorDescriptor) else x).dtype.name for x in parameters)
        launches.append(RecordedLaunch(kernel, dtypes, dict(constants), dict(options), _CONDITION.get()))
        return [jnp.zeros(x.shape, x.dtype) for x in results]
    device = hardware.local_device()
    assert isinstance(device, hardware.Device), device
    options = options | {"ptx_version": device.ptx_version}
    types = tuple(map(_type, parameters))
    code = (kernel, types, tuple(constants.items()), device.capability, tuple(options.items()))
    _compile_in_background(code)
    descriptors = (x._replace(array=None) if isinstance(x, TensorDescriptor) else None for x in parameters)
    message = _LaunchMessage(code, tuple(grid), tuple(descriptors))
    run = jax.ffi.ffi_call(TARGET, tuple(results), input_output_aliases=dict(aliases))
    return run(*arrays, opaque=message)


def _type(x: Any) -> str:
    """Returns Triton's type of a parameter: a pointer, or a descriptor with its layout in shared memory."""
    if not isinstance(x, TensorDescriptor):
        return f"*{TYPES[x.dtype.name]}"
    from triton.experimental.gluon import language as gl

    dtype = x.array.dtype
    swizzle = _SWIZZLE if x.block_shape[-1] * dtype.itemsize >= _SWIZZLE and math.prod(x.block_shape[:-1]) > 1 else 0
    layout = gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, len(x.block_shape))
    return f"tensordesc<{TYPES[dtype.name]}[{', '.join(map(str, x.block_shape))}],{layout!r}>"


def _descriptor_parameters(descriptor: TensorDescriptor, metadata: Mapping[str, Any]) -> list[Any]:
    """Returns the launch parameters of a TMA descriptor; ``metadata`` is an entry of `Compiled.descriptors`."""
    from jaxlib import gpu_triton
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    encoded = gpu_triton.create_tma_descriptor_parameter(  # pyright: ignore[reportAttributeAccessIssue]
        elem_type=TMA_DTYPE_DEVICE_TO_HOST.get(metadata["elem_type"], metadata["elem_type"]),
        swizzle=metadata["swizzle"],
        shape=descriptor.shape,
        strides=descriptor.strides,
        block_shape=metadata["block_size"],
        oob_fill=0,
    )
    shape = [gpu_triton.create_scalar_parameter(size, "i32") for size in descriptor.shape]
    strides = [gpu_triton.create_scalar_parameter(stride, "i64") for stride in descriptor.strides]
    return [encoded, *shape, *strides]
