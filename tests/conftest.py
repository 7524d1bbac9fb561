"""Settings of the environment that libtpu reads once, when JAX first looks for devices."""

import glob
import os

# Without a TPU, libtpu is but a compiler: any number of processes may use it, and there is nothing for it to look for,
# nor to complain of.
if not glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def triton_kernels_anywhere():
    """Without an NVIDIA GPU, the Triton kernels are interpreted, as if on an H200."""
    if jax.default_backend() == "gpu":
        yield
        return
    from sparse_layers.ops.kernels.triton_gpu import launch
    from tests.ops.kernels import triton_interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "call", triton_interpreter.call)
        patch.setattr(launch, "device", lambda: launch.Device(90, 232448, 132))
        yield
