"""The bridge from JAX to kernels: the assembler that is found, what jaxlib is given, and JAX's transformations of it.

No GPU is needed: programs are lowered for one. `test_gpu.py` runs them.
"""

import functools
import stat
import threading
import types

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.kernels.gpu import assembler, bridge, hardware
from sparse_layers.ops.kernels.gpu.bridge import call_triton  # before a fixture replaces it
from tests.ops import test_selections as selections
from tests.ops.cases import CASES
from tests.programs import sampled

pytest.importorskip("triton", reason="needs triton: pip install triton")
import triton
import triton.language as tl

# --- the assembler ---------------------------------------------------------------------------------------------------


def ptxas(folder, version, code=0):
    """Writes a ptxas that answers with a version, and an exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release x, V{version}'\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def search(monkeypatch, tmp_path):
    """Returns what finds the assembler on a PATH of these folders, beside a plugin in ``site/jax_cuda13_plugin``."""
    assembler._first_assembler.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(assembler, "_plugin", lambda: str(tmp_path / "site" / "jax_cuda13_plugin"))
    isfile = assembler.os.path.isfile
    # Whatever CUDA this machine has stays out of the test.
    monkeypatch.setattr(assembler.os.path, "isfile", lambda x: isfile(x) and not x.startswith(("/usr/", "/opt/")))

    def find(*folders):
        monkeypatch.setenv("PATH", ":".join(map(str, folders)))
        return assembler.find_assembler()

    return find


def test_the_first_ptxas_on_path_is_taken(search, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    ptxas(old, "13.0.88"), ptxas(new, "13.4.59")
    assert search(tmp_path / "none", old, new) == (str(old / "ptxas"), (13, 0, 88))
    assert search(new, old).cuda == (13, 4, 59)


def test_a_ptxas_that_xla_passes_by_is_passed_by(search, tmp_path):
    folders = [tmp_path / name for name in "abcd"]
    ptxas(folders[0], "11.7.99"), ptxas(folders[1], "12.3.103"), ptxas(folders[2], "13.1.1", code=1)
    expected = ptxas(folders[3], "12.9.86")
    assert search(*folders).path == expected


def test_the_wheel_beside_the_plugin_comes_last(search, tmp_path):
    assert search(tmp_path) is None
    assembler._first_assembler.cache_clear()
    wheel = tmp_path / "site" / "nvidia" / "cu13" / "bin"
    assembler._first_assembler.cache_clear()
    expected = ptxas(wheel, "13.5.37")
    assert search(tmp_path).path == expected
    ptxas(tmp_path / "old", "12.8.1")
    assert search(tmp_path / "old").cuda == (12, 8, 1)


@pytest.mark.parametrize(
    ("cuda", "version"), [((11, 8), 78), ((12, 0), 80), ((12, 5), 85), ((12, 6), 85), ((12, 9), 88), ((13, 4), 94)]
)
def test_ptx_version_of_a_release(cuda, version):
    assert assembler.Assembler("ptxas", (*cuda, 0)).ptx_version == version


def test_kernels_are_written_in_the_older_version(search, tmp_path):
    ptxas(tmp_path / "old", "13.0.88"), ptxas(tmp_path / "new", "99.0.1")
    search(tmp_path / "new")
    newest = assembler.ptx_version(90)  # Triton's own
    search(tmp_path / "old")
    assert assembler.ptx_version(90) == min(newest, 90)
    kernel = bridge.compiled(_copy, ("*fp32", "*fp32"), (("N", 16),), 90, (("num_warps", 1), ("ptx_version", 83)))
    assert ".version 8.3" in kernel.ptx


@pytest.mark.parametrize(("capability", "release", "required"), [(90, "12.0.1", "8.1"), (120, "12.6.85", "8.7")])
def test_too_old_an_assembler_is_refused(search, tmp_path, capability, release, required):
    path = ptxas(tmp_path, release)
    search(tmp_path)
    reason = assembler.ptx_version(capability)
    assert f"it needs PTX {required} or newer" in reason and f"{path} (CUDA {release[:4]}, PTX" in reason
    assert "nvidia-cuda-nvcc" in reason


def test_no_assembler_is_refused(search, tmp_path):
    search(tmp_path)
    assert "XLA finds none: install a newer nvidia-cuda-nvcc" in assembler.ptx_version(90)


# --- what jaxlib is given --------------------------------------------------------------------------------------------


class Plugin:
    """A stand-in for ``jaxlib.gpu_triton``, whose functions come with the CUDA plugin: keeps what it was asked for."""

    def __init__(self):
        self.kernels = []

    def TritonKernel(self, *args):
        self.kernels.append(args)

    def TritonKernelCall(self, kernel, *args):
        return types.SimpleNamespace(to_proto=lambda name, metadata: name.encode() + repr(args).encode() + metadata)

    def create_array_parameter(self, *args):
        return ("array", *args)

    def create_scalar_parameter(self, *args):
        return ("scalar", *args)

    def create_tma_descriptor_parameter(self, **options):
        return ("descriptor", *options.values())


@triton.jit
def _copy(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def _needs_scratch(x, out, N: tl.constexpr):
    tiles = tl.make_tensor_descriptor(x, shape=[N, N], strides=[N, 1], block_shape=[16, 16])
    at = tl.arange(0, 16)
    tl.store(out + at[:, None] * 16 + at[None, :], tiles.load([0, 0]))


@pytest.fixture
def plugin(monkeypatch):
    """Lets programs be lowered for an H200 that is not there."""
    stand_in = Plugin()
    monkeypatch.setattr(jaxlib, "gpu_triton", stand_in, raising=False)
    monkeypatch.setattr(bridge, "call_triton", call_triton)
    monkeypatch.setattr(bridge, "gluon_unsupported", lambda: None)
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 132))
    return stand_in


def lowered(function, *args):
    """Returns the text of a program for CUDA."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_scratch_memory_is_asked_for(plugin):
    x = jnp.zeros((64, 64))
    (out,) = [jax.ShapeDtypeStruct((16, 16), "float32")]
    lowered(lambda x: bridge.call_triton(_needs_scratch, (1,), [x], [out], {"N": 64}, 4, 1)[0], x)
    lowered(lambda x: bridge.call_triton(_copy, (1,), [x], [x], {"N": 64}, 4, 1)[0], x[0])
    (*_, size, align), without = plugin.kernels
    assert size > 0 and align >= 64 and len(without) == 7


def launch_both(x):
    """Returns a sum of launches of two kernels, one of them twice."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return sum(bridge.call_triton(_copy, (1,), [x], [shape], {"N": n}, 4, 1)[0] for n in (16, 32, 16))


def test_kernels_of_a_program_compile_at_the_same_time(plugin, monkeypatch):
    both = threading.Barrier(2)

    @functools.cache
    def compile_slowly(*args):
        both.wait(timeout=60)
        return fake_compiled(*args)

    monkeypatch.setattr(bridge, "compiled", compile_slowly)
    calls = jax.make_jaxpr(launch_both)(jnp.zeros(64)).eqns
    first, second, third = [x.params["attributes"] for x in calls if x.primitive.name == "ffi_call"]
    assert first == third != second and hash(first) == hash(third)  # JAX finds programs of equal launches
    assert lowered(launch_both, jnp.zeros(64)).count(f"custom_call @{bridge.TARGET}(") == 3
    assert compile_slowly.cache_info().misses == 2


def test_a_kernel_that_fails_to_compile_is_tried_again(plugin, monkeypatch):
    def compile_wrongly(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(bridge, "compiled", compile_wrongly)
    traced = jax.jit(launch_both).trace(jnp.zeros(32))
    with pytest.raises(OSError, match="no space left"):
        traced.lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(bridge, "compiled", fake_compiled)
    assert bridge.TARGET in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_only_other_kernels_are_assembled_by_triton(monkeypatch):
    binaries, compile_kernel = [], bridge.compile_kernel

    def record(*args):
        kernel = compile_kernel(*args)
        binaries.append(kernel.asm["cubin"])
        return kernel

    monkeypatch.setattr(bridge, "compile_kernel", record)
    arguments = _copy, ("*fp32", "*fp32"), (("N", 128),), 90, (("num_warps", 1),)
    assert ".target sm_90" in bridge.compiled(*arguments).ptx and binaries == [b""]
    kernel, types, constants, capability, options = arguments
    assert compile_kernel(kernel, types, dict(constants), capability, dict(options)).asm["cubin"]


@pytest.mark.parametrize("dtype", bridge.TYPES)
def test_every_dtype_has_a_type_of_triton(dtype):
    x = jax.ShapeDtypeStruct((16,), np.dtype(dtype))
    kernel = bridge.compiled(_copy, (bridge._type(x),) * 2, (("N", 16),), 90, (("num_warps", 1),))
    assert kernel.name == "_copy" and kernel.scratch == ()


# --- JAX's transformations -------------------------------------------------------------------------------------------


def fake_compiled(kernel, types, constants, capability, options):
    """Compiles nothing, for what JAX does to a program does not depend on its kernels."""
    descriptor = {"elem_type": 0, "swizzle": 3, "block_size": [1]}
    return bridge.Compiled(kernel.fn.__name__, "", 4, 0, (), (descriptor,) * len(types))


def program(case, implementation):
    """Returns a function of (query, key, value, sinks, run-time mask, selection) that differentiates by query only.

    The op is mapped, rematerialised and scanned; gradients of key and value and the lse are there to be pruned.
    """
    op = case.op(implementation)

    def loss(query, key, value, sinks, mask, selection):
        @jax.checkpoint
        def layer(query, key, value):
            out, _ = op(query, key, value, sinks, mask, selection)
            return out

        def step(query, _):
            out = jax.vmap(layer)(*(x[None] for x in (query, key, value)))[0]
            return query + out.mean().astype(query.dtype), None

        return jax.lax.scan(step, query, length=2)[0].astype(jnp.float32).sum()

    return jax.grad(loss)


# Presets that one backend leaves to another differ in their lists alone, which JAX does not look into.
CORE = [case for case in (*CASES, *selections.CASES) if case.core and not case.left_out]


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("case", sampled(CORE, 0.5), ids=str)
def test_programs_are_transformed_and_lowered(case, implementation, plugin, monkeypatch):
    monkeypatch.setattr(bridge, "compiled", fake_compiled)
    arrays = case.arrays()
    dtype = "bfloat16" if implementation == "hopper" else case.dtype
    operands = [jax.ShapeDtypeStruct(arrays[name].shape, dtype) for name in ("query", "key", "value")]
    mask = case.mask if isinstance(case.mask, jax.Array) else None
    text = lowered(program(case, implementation), *operands, arrays["sinks"], mask, case.selection())
    # Where it is known beforehand that nobody attends to anything, there is nothing to launch.
    assert (f"custom_call @{bridge.TARGET}(" in text) == (case.mask != sl.Empty())
