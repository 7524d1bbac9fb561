"""The way to the device: what it is, and how a kernel is called there."""

import ctypes
import functools
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...planning.platforms import gpu, platform


class Device(NamedTuple):
    """What kernels have to know of a GPU.

    Attributes:
      capability: compute capability times 10, 90 for Hopper.
      shared_memory: bytes of shared memory that one program can have.
      processors: number of multiprocessors.
    """

    capability: int
    shared_memory: int
    processors: int


def device() -> Device | str:
    """The NVIDIA GPU that JAX computes on, or the reason why there is none to be used."""
    if platform() != "gpu":
        return f"it needs an NVIDIA GPU, and JAX computes on {platform()}"
    found = gpu()
    if found is None:
        return "it needs an NVIDIA GPU at hand, whose kernels it compiles, and JAX finds none"
    capability = getattr(found, "compute_capability", None)
    if capability is None or "." not in str(capability):
        return f"it needs an NVIDIA GPU, and JAX computes on {found.device_kind}"
    return _device(int(str(capability).replace(".", "")), found.local_hardware_id or 0)


@functools.cache
def _device(capability: int, number: int) -> Device | str:
    if capability < 80:
        return f"it needs compute capability 8.0, and this GPU has {capability / 10}"
    try:
        import jax_triton  # noqa: F401  # pyright: ignore[reportMissingImports]
        import triton  # noqa: F401
    except ImportError as error:
        return f"it needs jax-triton and triton, the extra 'gpu' installs them ({error})"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"it needs the CUDA driver library ({error})"
    values = []
    for attribute in (_SHARED_MEMORY_PER_BLOCK_OPTIN, _MULTIPROCESSOR_COUNT):
        handle, value = ctypes.c_int(), ctypes.c_int()
        status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), number)
        status = status or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        if status:
            return f"the CUDA driver answered with error {status} when asked for attribute {attribute} of GPU {number}"
        values.append(value.value)
    return Device(capability, *values)


# What the second axis of a grid can count to.
MOST_BATCH_ENTRIES = 65535
# Values of CUdevice_attribute in the CUDA driver's interface.
_SHARED_MEMORY_PER_BLOCK_OPTIN, _MULTIPROCESSOR_COUNT = 97, 16


def call(
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

    Those of the arrays that are changed ``in_place``, by their index, follow the outputs in what is returned; JAX
    copies them first if someone else needs them as they were. See `changes_in_place`.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"grid": tuple(grid), "num_warps": num_warps, "num_stages": num_stages}
    if in_place:
        options["input_output_aliases"] = {index: len(outputs) + i for i, index in enumerate(in_place)}
        outputs = [*outputs, *(jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in in_place)]
    # jax-triton renamed arguments in 0.4. Fused multiply-add is asked for: Triton is about to change its default.
    if _since_0_4():
        options |= {"out_type": tuple(outputs), "backend_options": {"enable_fp_fusion": True}}
    else:
        options |= {"out_shape": tuple(outputs), "enable_fp_fusion": True}
    with warnings.catch_warnings():
        # References are to take the place of aliases, but JAX 0.11 does not know them under derivatives of one's own.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return jax_triton.triton_call(*arrays, kernel=kernel, **options, **constants)


def changes_in_place() -> bool:
    """Whether kernels can change arrays in place: before jax-triton 0.4, they would have to take these twice."""
    return _since_0_4()


def _since_0_4() -> bool:
    """Whether jax-triton is 0.4 or later."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    return "out_type" in inspect.signature(jax_triton.triton_call).parameters


def places(at: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions of queries and the first tokens of their documents, int [B or 1, R], as kernels take them: alike."""
    at, start = jnp.broadcast_arrays(at.astype(jnp.int32), start.astype(jnp.int32))
    return at, start


def padded(size: int) -> int:
    """The tile that holds a head size: a power of two, at least 16."""
    return max(16, 1 << math.ceil(math.log2(size)))
