"""The way from JAX to a Gluon kernel: it is compiled by Triton, and launched by jaxlib with descriptors of its arrays.

jax-triton 0.4.1 takes Gluon functions, too, but starts as many warps as it was told of, not as many as the kernel says
that it has. So this goes around it, by what jax-triton itself stands on: `triton.compile`, the kernel calls of
``jaxlib.gpu_triton``, and `jax.ffi.ffi_call`. No GPU is needed to compile.
"""

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

# Bytes that arrays begin at multiples of.
_ALIGNMENT = 16
_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
# Bytes of a row of a tile that the copy engine mixes, so that tensor cores read it without conflicts.
_SWIZZLE = 128


class Tiles(NamedTuple):
    """An array that a kernel reads or writes in tiles, by a TMA descriptor.

    Attributes:
      array: the array, or of an output its shape and dtype.
      shape: the axes that tiles are cut from.
      strides: elements between neighbours on each axis.
      box: how much of each axis a tile has.
    """

    array: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @classmethod
    def of(cls, array: Any, box: tuple[int, ...]) -> "Tiles":
        """Tiles of the array's own axes."""
        return cls(array, array.shape, tuple(math.prod(array.shape[i + 1 :]) for i in range(array.ndim)), box)

    @property
    def kind(self) -> str:
        """The type of the kernel's parameter."""
        from triton.experimental.gluon import language as gl

        dtype = self.array.dtype
        swizzle = _SWIZZLE if self.box[-1] * dtype.itemsize >= _SWIZZLE and math.prod(self.box[:-1]) > 1 else 0
        layout = gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, len(self.box))
        return f"tensordesc<{_POINTERS[dtype.name][1:]}[{', '.join(map(str, self.box))}],{layout!r}>"


class Compiled(NamedTuple):
    """A kernel as a GPU takes it.

    Attributes:
      name: of its entry.
      ptx: its code.
      num_warps: of a program, all kinds together.
      shared: bytes of shared memory.
      descriptors: of each TMA descriptor what Triton found: element type, swizzle, and box.
    """

    name: str
    ptx: str
    num_warps: int
    shared: int
    descriptors: tuple[dict[str, Any], ...]


def missing() -> str | None:
    """Why kernels cannot be launched with what is installed, or None."""
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


@functools.lru_cache(maxsize=256)
def compiled(
    kernel: Any, kinds: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...], maxnreg: int | None = None
) -> Compiled:
    """Compiles a kernel for compute capability 9.0; Triton keeps it on disk, too.

    Args:
      kernel: a `gluon.jit` function.
      kinds: (name, type) of its parameters that are no constants.
      constants: (name, value) of the others.
      maxnreg: the most registers of a thread; None leaves it to the kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    given, of = dict(constants), dict(kinds)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in given else of[name] for name in names}
    values = {(i,): given[name] for i, name in enumerate(names) if name in given}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if of.get(name, "")[:1] == "*"}
    source = GluonASTSource(kernel, signature, values, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True} | ({} if maxnreg is None else {"maxnreg": maxnreg})
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    data = found.metadata
    descriptors = tuple(dict(x) for x in data.tensordesc_meta)
    return Compiled(data.name, found.asm["ptx"], data.num_warps, data.shared, descriptors)


def call(
    kernel: Any,
    programs: int,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Runs a Gluon kernel whose parameters are the inputs, the outputs, and the constants.

    Args:
      kernel: a `gluon.jit` function.
      programs: how many to start.
      inputs: arrays, or `Tiles` of such.
      outputs: `jax.ShapeDtypeStruct`, or `Tiles` of such.
      constants: hashable values.
      aliases: of inputs that become outputs: number of the input to number of the output.
    """
    from jaxlib import gpu_triton
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    everything = [*inputs, *outputs]
    kinds = [x.kind if isinstance(x, Tiles) else _POINTERS[x.dtype.name] for x in everything]
    code = compiled(kernel, tuple(zip(kernel.arg_names, kinds, strict=False)), tuple(constants.items()))
    parameters, found = [], iter(code.descriptors)
    for x in everything:
        if isinstance(x, Tiles):
            own = next(found)
            kind = TMA_DTYPE_DEVICE_TO_HOST.get(own["elem_type"], own["elem_type"])
            parameters.append(
                gpu_triton.create_tma_descriptor_parameter(  # pyright: ignore[reportAttributeAccessIssue]
                    elem_type=kind,
                    swizzle=own["swizzle"],
                    shape=x.shape,
                    strides=x.strides,
                    block_shape=own["block_size"],
                    oob_fill=0,
                )
            )
            parameters += [gpu_triton.create_scalar_parameter(size, "i32") for size in x.shape]
            parameters += [gpu_triton.create_scalar_parameter(stride, "i64") for stride in x.strides]
        else:
            parameters.append(gpu_triton.create_array_parameter(0, _ALIGNMENT))
    launched = gpu_triton.TritonKernel(code.name, code.num_warps, 1, code.shared, code.ptx, "", 90)
    proto = gpu_triton.TritonKernelCall(launched, programs, 1, 1, parameters).to_proto(code.name, b"")
    arrays = [x.array if isinstance(x, Tiles) else x for x in everything]
    run = jax.ffi.ffi_call("triton_kernel_call_ffi", arrays[len(inputs) :], input_output_aliases=dict(aliases or {}))
    return run(*arrays[: len(inputs)], opaque=zlib.compress(proto))
