"""The GPU that JAX computes on: its limits, and why kernels cannot run there."""

import ctypes
import functools
import math
import re
from typing import Any, NamedTuple

from ....arguments.checks import suggest
from ...planning.platforms import assumed_gpu, gpu, platform
from . import assembler

# The second axis of a launch grid counts up to this number.
MAX_BATCH_ENTRIES = 65535
# Values of CUdevice_attribute in the CUDA driver's interface.
_SHARED_MEMORY_PER_BLOCK_OPTIN, _MULTIPROCESSOR_COUNT = 97, 16


class Device(NamedTuple):
    """A GPU."""

    capability: int  # compute capability times 10, 90 for Hopper
    shared_memory: int  # bytes of shared memory that one program can have
    multiprocessors: int
    # Version times 10 of the PTX that kernels are written in; None for the newest that Triton writes.
    ptx_version: int | None = None

    @property
    def compute_capability(self) -> str:
        """The compute capability as JAX writes it, "9.0"."""
        return f"{self.capability // 10}.{self.capability % 10}"


# GPUs that calls can be traced for without one. `device_named` reads JAX's ``device_kind`` as one of these names.
DEVICES = {
    "a100": Device(80, 166912, 108),
    "h100": Device(90, 232448, 132),
    "h100pcie": Device(90, 232448, 114),
    "h200": Device(90, 232448, 132),
    "b200": Device(100, 232448, 148),
    "b300": Device(103, 232448, 148),
    "rtx3090": Device(86, 101376, 82),
    "rtx4090": Device(89, 101376, 128),
    "rtx5090": Device(120, 101376, 170),
}


# Words of a ``device_kind`` that change neither the kernels nor the number of multiprocessors.
_MODEL_WORDS = re.compile(r"nvidia|geforce|sxm\d?|hbm\d\w?|nvl|\d+gb")


def device_named(name: Any) -> Device:
    """Returns the GPU of `DEVICES` that a name stands for.

    Args:
      name: a name in `DEVICES`; a compute capability, "9.0" or (9, 0), for the first GPU that has it; or JAX's
        ``device_kind``, "NVIDIA H100 80GB HBM3".
    """
    by_name = {device.compute_capability: device for device in reversed(DEVICES.values())} | DEVICES
    if isinstance(name, tuple) and len(name) == 2 and all(type(number) is int for number in name):
        spellings = [f"{name[0]}.{name[1]}"]
    else:
        spellings = _spellings(name) if isinstance(name, str) else []
    for spelling in spellings:
        if spelling in by_name:
            return by_name[spelling]
    raise ValueError(f"device must be the name of a GPU or its compute capability, got {suggest(name, by_name)}")


def _spellings(name: str) -> list[str]:
    """Returns the names in `DEVICES` that a name or a ``device_kind`` may mean, the most exact one first."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if not _MODEL_WORDS.fullmatch(word)]
    return [name.lower(), "".join(words), "".join(word for word in words if word != "pcie")]


def padded_size(size: int) -> int:
    """Returns the width of the tile that holds a head size: a power of two, at least 16."""
    return max(16, 1 << math.ceil(math.log2(size)))


def local_device() -> Device | str:
    """Returns the NVIDIA GPU that JAX computes on, or the reason why kernels cannot run there."""
    if assumed_gpu() is not None:
        return assumed_gpu()
    if platform() != "gpu":
        return f"it needs an NVIDIA GPU, and JAX computes on {platform()}"
    device = gpu()
    if device is None:
        return "it needs an NVIDIA GPU at hand, whose kernels it compiles, and JAX finds none"
    capability = getattr(device, "compute_capability", None)
    if capability is None or "." not in str(capability):
        return f"it needs an NVIDIA GPU, and JAX computes on {device.device_kind}"
    properties = _properties(int(str(capability).replace(".", "")), device.local_hardware_id or 0)
    if isinstance(properties, str):
        return properties
    version = assembler.ptx_version(properties.capability)
    return version if isinstance(version, str) else properties._replace(ptx_version=version)


def local_gpu() -> Device:
    """Returns the NVIDIA GPU that JAX computes on; `local_device` has said before that there is one."""
    device = local_device()
    assert isinstance(device, Device), device
    return device


def driver_release() -> str | None:
    """Returns the CUDA release that the driver knows, None if there is no driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if status else f"{version.value // 1000}.{version.value % 1000 // 10}"


@functools.cache
def _properties(capability: int, number: int) -> Device | str:
    """Returns the properties of a GPU by the CUDA driver, or the reason why kernels cannot be launched there."""
    if capability < 80:
        return f"it needs compute capability 8.0, and this GPU has {capability / 10}"
    try:
        import triton
        from jaxlib import gpu_triton
    except ImportError as error:
        return f"it needs triton, which the extra 'gpu' installs ({error})"
    if 100 <= capability < 120 and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        # A backward kernel of heads of 256 comes out as an empty program from 3.6 and 3.7.
        return f"it needs triton 3.8 or newer on compute capability {capability / 10}, and this is {triton.__version__}"
    if not hasattr(gpu_triton, "TritonKernelCall"):
        return "it needs JAX's CUDA plugin, which the extra 'gpu' installs"
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
