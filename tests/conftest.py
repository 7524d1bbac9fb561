"""Settings of the environment that JAX, XLA and libtpu read once, and processes that tests start inherit."""

import gc
import glob
import importlib.metadata
import os

# Without a TPU, libtpu is but a compiler: any number of processes may use it, and there is nothing for it to look for,
# nor to complain of.
if not glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

# Programs run once here, to compare numbers: most of the time is XLA's, which on CPUs goes without its slower passes.
if not any(map(glob.glob, ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/kfd"))):
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # Programs are small: parts that could be compiled side by side cost more to separate, loops more to unroll.
    quick = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling,xla_cpu_disable_slp_vectorizer"
    # By way of MLIR, fusions take twice as long to compile. Later versions know no other way.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        quick += " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"
    # Threads of numpy's products spin while they wait for each other, on cores that others use.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
else:
    # Float32 is to mean float32 here: accelerators multiply fewer digits unless told otherwise.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import jax
import pytest

collect_ignore_glob = ["**/make_*.py"]  # programs that make fixtures, in environments with torch


def pytest_collection_modifyitems(items):
    """What trains takes longest, and shares a few runs: it comes first, lest one process end with it alone."""
    items.sort(key=lambda item: not {"train_lm", "images"} & {*item.path.parts})


def pytest_collection_finish():
    """What has been imported stays, and traces leave few cycles: looking for garbage would take a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_runtest_teardown(item, nextitem):
    """Compiled programs are let go before a process has as many pieces of memory as Linux allows, which is 65,530.

    XLA takes several for each program, and ends the process where it gets none. To count them takes a while.
    """
    if nextitem is None or nextitem.path == item.path or not os.path.exists("/proc/self/maps"):
        return
    with open("/proc/self/maps", "rb") as maps:
        pieces = sum(1 for _ in maps)
    if pieces > 20_000:
        jax.clear_caches()
        gc.collect()


def pytest_sessionfinish():
    gc.unfreeze()  # or bindings complain of leaks at the end


@pytest.fixture(scope="session", autouse=True)
def triton_kernels_anywhere():
    """Without an NVIDIA GPU, the Triton kernels are interpreted, as if on an H200."""
    if jax.default_backend() == "gpu":
        yield
        return
    from sparse_layers.ops.kernels.gpu import bridge, hardware
    from sparse_layers.ops.planning import platforms
    from tests.ops.kernels import triton_interpreter

    def call(*args, launch=bridge.call_triton, **options):  # calls for a GPU that is assumed are only recorded
        return (launch if platforms.assumed_gpu() else triton_interpreter.call)(*args, **options)

    def device():
        return platforms.assumed_gpu() or hardware.DEVICES["h200"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridge, "call_triton", call)
        patch.setattr(hardware, "local_device", device)
        yield


@pytest.fixture(autouse=True)
def no_tables_of_other_tests(monkeypatch):
    """The hint that masks change from call to call counts those of one test."""
    monkeypatch.setattr("sparse_layers.ops.planning.changing_masks._recent", {})


@pytest.fixture(scope="session", autouse=True)
def masks_by_head():
    """Masks of tests may have as many heads as batch entries: nothing is said of it; `test_layouts.py` asks for it."""
    from sparse_layers.ops import layouts

    layouts._warned.add("mask")


@pytest.fixture
def all_passes():
    """For tests of what a compiler makes of a program, not of its numbers."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
