"""The GPU backend where there is no GPU: its settings, and ways to call it; `test_gpu_lists.py` has its block lists.

`test_attention.py` holds its values to float64, with interpreted kernels; `test_triton_gpu_aot.py` compiles them.
"""

import ctypes
import dataclasses
import functools
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.gpu.hardware import local_device as true_device  # before a fixture replaces it
from sparse_layers.ops.kernels.gpu.splits import (
    MAX_SPLITS,
)
from sparse_layers.ops.kernels.gpu_attention import run
from sparse_layers.ops.kernels.triton_gpu import settings
from tests.ops import cases
from tests.ops.cases import SMALL, candidates

DEFAULTS = sl.FwdParams(), sl.BwdParams()


# --- settings --------------------------------------------------------------------------------------------------------

H200 = hardware.Device(90, 232448, 132)
KERNELS = ["forward", "dq", "dkv"]
SINKS = sl.Causal() & (sl.Window(20) | sl.Prefix(4))


def chosen(kernel="forward", itemsize=2, sizes=(128, 128), blocks=(128, 128), params=None, device=H200):
    inputs = settings.KernelInputs(itemsize, sizes)
    return settings.choose_settings(kernel, inputs, blocks, params or sl.FwdParams(), device)


@pytest.mark.parametrize("kernel", KERNELS)
def test_explicit_settings_win(kernel):
    default, tight = chosen(kernel), H200._replace(shared_memory=1)
    every = sl.FwdParams(blocksize_m=256, blocksize_n=128, num_warps=16, num_stages=7)
    for device in (H200, tight):
        assert chosen(kernel, params=every, device=device) == settings.Settings(256, 128, 16, 7)
    for name, value, field in (
        ("blocksize_m", 16, "outer"),
        ("blocksize_n", 32, "inner"),
        ("num_warps", 1, "num_warps"),
    ):
        wanted = dataclasses.replace(default, **{field: value})
        assert chosen(kernel, params=sl.FwdParams(**{name: value})) == wanted


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_forward_kernel_with_a_table_has_registers_for_it(kernel):
    inputs = settings.KernelInputs(2, (128, 128), has_table=True)
    for params, num_warps in ((sl.FwdParams(), 8 if kernel == "forward" else 4), (sl.FwdParams(num_warps=2), 2)):
        assert settings.choose_settings(kernel, inputs, (128, 128), params, H200).num_warps == num_warps


@pytest.mark.parametrize("limit", [48 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize(("itemsize", "kernel"), [*itertools.product((2, 4), KERNELS), (2, "dq_with_dkv")])
def test_settings_fit_the_device(kernel, itemsize, limit):
    sizes = [
        x
        for x in itertools.product((16, 64, 128, 256), repeat=2)
        if kernel != "dq_with_dkv" or settings.outer_rows("dq_with_dkv", settings.KernelInputs(2, x))
    ]
    for size, blocks in itertools.product(sizes, [(16, 32), (64, 64), (128, 128), (512, 512)]):
        found = chosen(kernel, itemsize, size, blocks, device=H200._replace(shared_memory=limit))
        wide = chosen(kernel, itemsize, size, blocks, device=H200._replace(shared_memory=1 << 30))
        assert all(a <= b for a, b in zip(dataclasses.astuple(found), dataclasses.astuple(wide), strict=True))
        smallest = (found.outer, found.inner, found.num_stages) == (16, 32, 1)
        assert (
            settings.shared_memory(kernel, found, settings.KernelInputs(itemsize, size), H200.capability) <= limit
            or smallest
        )
        assert found.outer & (found.outer - 1) == found.inner & (found.inner - 1) == 0
        assert found.outer >= 16 and found.inner >= 32


def test_head_sizes_that_do_not_fit_are_refused(monkeypatch):
    small = hardware.Device(86, 101376, 84)
    half, single = (settings.KernelInputs(itemsize, (256, 256)) for itemsize in (2, 4))
    assert settings.unsupported(half, DEFAULTS, small) is None
    assert settings.unsupported(single, DEFAULTS, H200) is None
    assert "shared memory, and this GPU has 101376" in settings.unsupported(single, DEFAULTS, small)
    large = sl.FwdParams(), sl.BwdParams(blocksize_m=256)
    assert "blocksize_m=256" in settings.unsupported(half, large, small)
    monkeypatch.setattr(hardware, "local_device", lambda: small)
    q = jnp.zeros((1, 16, 2, 256))
    with pytest.raises(NotImplementedError, match="triton: head sizes of 256 with 4 bytes an element need about"):
        sl.block_sparse_attention(q, q, q, sl.Causal(), implementation="triton")


def test_tiles_are_no_larger_than_blocks_need():
    for blocks, most in (((8, 8), (16, 32)), ((24, 40), (32, 64)), ((64, 8), (64, 32))):
        found = chosen(blocks=blocks)
        assert found.outer <= most[0] and found.inner <= most[1]


def test_settings_say_how_often_to_cut():
    for number, rows, given in (
        (None, 1000, {}),
        (0, 1000, {"num_key_splits": 1}),
        (5, 1000, {"num_key_splits": 5}),
        (4, 1000, {"blocksize_keys": 256}),
        (2, 1000, {"blocksize_keys": 256, "num_key_splits": 2}),
        (MAX_SPLITS, 10**6, {"blocksize_keys": 16}),
    ):
        assert settings.requested_splits(sl.FwdParams(**given), rows) == number


# --- ways to call ----------------------------------------------------------------------------------------------------

T, WINDOW = 130, sl.Causal() & sl.Window(50)
FIXED = candidates(sl.preset("sparse_transformer_fixed", **SMALL["sparse_transformer_fixed"]), T)[-1]


def arrays(*lead, t=T, s=None, heads=(2, 1), h=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(*(lead or (1,)), *x, h) for x in ((t, heads[0]), (s or t, heads[1]), (s or t, heads[1]))]
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def answers(q, k, v, plan, sinks=None, implementation="triton", **options):
    """out, lse and the gradients of a sum of both."""

    def call(q, k, v, sinks):
        return sl.block_sparse_attention(
            q, k, v, plan, sinks=sinks, implementation=implementation, return_lse=True, **options
        )

    (out, lse), pullback = jax.vjp(call, q, k, v, sinks)
    return out, lse, *pullback((jnp.sin(out), jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0)))


def close(actual, wanted):
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, w, rtol=2e-5, atol=2e-5)


def both(**values):
    names = {f.name for f in dataclasses.fields(sl.FwdParams)}
    assert names >= values.keys()
    return {"fwd_params": sl.FwdParams(**values), "bwd_params": sl.BwdParams(**values)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sinks_of_any_float_are_computed_with_in_float32(dtype):
    sinks = jnp.asarray([1.2345, -3.21], dtype)
    wanted = answers(*arrays(), WINDOW, sinks.astype(jnp.float32))
    found = answers(*arrays(), WINDOW, sinks)
    close(found[:5], wanted[:5])
    assert found[5].dtype == dtype


def test_masks_in_jax_numpy():
    traceable = sl.MaskMod(lambda b, h, q, k: jnp.abs(q - k) < 7, traceable=True)
    for mask in (traceable, sl.MaskMod(lambda b, h, q, k: jnp.abs(q - k) < 7)):
        close(jax.jit(functools.partial(answers, plan=mask))(*arrays()), answers(*arrays(), sl.Window(6, 6)))


@pytest.mark.parametrize("options", [{"scale": 1e-46}, {"scale": 0.0}, {"scale": -0.4}, {"logits_soft_cap": 1e30}])
def test_extreme_scalars(options):
    close(answers(*arrays(), WINDOW, **options), answers(*arrays(), WINDOW, implementation="reference", **options))


def test_vmap_beyond_the_grid_and_over_nothing(monkeypatch):
    monkeypatch.setattr(run, "MAX_BATCH_ENTRIES", 3)
    q, k, v = (jnp.stack([x, -x, 2 * x]) for x in arrays())
    mapped = jax.vmap(functools.partial(answers, plan=WINDOW))(q, k, v)
    for i in range(3):
        close(jax.tree.map(lambda x: x[i], mapped), answers(q[i], k[i], v[i], WINDOW))  # noqa: B023
    nothing = jax.vmap(functools.partial(answers, plan=WINDOW))(q[:0], k[:0], v[:0])
    assert nothing[0].shape == (0, *q.shape[1:])


def test_dk_and_dv_go_on_from_few_keys():
    """Of all keys, by the kernel of dq, after a pass of some keys only."""
    corner = sl.BlockDiagonal(32) | (sl.Prefix(70) & sl.Prefix(70).T)
    options = {"dtype": "bfloat16", "split": True, "fwd": (32, 32), "scale": 0.02, "heads": (2, 2), "batch": 1}
    case = cases.Case("corner", corner, 150, sizes=(128, 72), **options)
    cases.check(case, case.call("triton"))


def test_many_chains_round_once():
    """Gradients of one key head from eight chains keep float32 between the passes."""
    masks = tuple(sl.Causal() & sl.Strided(stride) for stride in range(2, 10))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 100, heads, 16)), "bfloat16") for heads in (8, 1, 1))
    plan = candidates(masks, 100)[-1]
    exact = answers(*(x.astype(jnp.float32) for x in (q, k, v)), masks, implementation="reference")
    for found, right in zip(answers(q, k, v, plan)[3:5], exact[3:5], strict=True):
        error = jnp.linalg.norm(found.astype(jnp.float32) - right) / jnp.linalg.norm(right)
        assert error < 4e-3


@pytest.mark.parametrize(
    "values",
    [
        {"num_key_splits": 3},
        {"num_key_splits": 20},  # more than there are steps
        {"blocksize_keys": 32},
        {"blocksize_m": 16, "blocksize_n": 32},
        {"blocksize_m": 64, "blocksize_n": 128, "num_key_splits": 2, "num_warps": 8, "num_stages": 1},
    ],
    ids=str,
)
def test_settings_do_not_change_results(values):
    q, k, v = arrays(t=70, heads=(1, 1))
    params = both(q_blocksize=32, kv_blocksize=32, **values)
    wanted = answers(q, k, v, WINDOW, implementation="reference")
    close(answers(q, k, v, WINDOW, **params), wanted)


@pytest.fixture
def cut_kernels(monkeypatch):
    """The kernels that are launched for pieces, from now on."""
    found = set()

    def watched(kernel, grid, arrays, outputs, constants, *rest, call=bridge.call_triton):
        if "W" in constants and constants["W"].SPLITS:
            found.add(kernel.fn.__name__.removeprefix("triton_").removesuffix("_kernel"))
        return call(kernel, grid, arrays, outputs, constants, *rest)

    monkeypatch.setattr(bridge, "call_triton", watched)
    return found


def test_a_single_long_row(cut_kernels):
    q, k, v = arrays(t=1, s=1500)
    close(answers(q, k, v, sl.Full()), answers(q, k, v, sl.Full(), implementation="reference"))
    assert cut_kernels == {"forward", "dq"}  # one row fills the device


LONG_T, LONG = 300, {"q_blocksize": 32, "kv_blocksize": 32}


@pytest.mark.parametrize(
    "masks",
    # Lists differ within the group of a key head, and some are empty.
    [SINKS, (sl.Empty(), SINKS, sl.Causal() & sl.Window(30), sl.Full())],
    ids=["sinks", "heads"],
)
def test_long_lists_are_cut(masks, cut_kernels):
    (q, k, v), sinks = arrays(t=LONG_T, heads=(4, 1)), jnp.linspace(-1.0, 1.0, 4)
    whole = answers(q, k, v, masks, sinks, **both(**LONG, num_key_splits=1))
    assert not cut_kernels
    by_itself = answers(q, k, v, masks, sinks, **both(**LONG))
    assert cut_kernels == ({"dkv"} if masks is SINKS else {"forward", "dq", "dkv"})
    close(by_itself, whole)
    close(whole, answers(q, k, v, masks, sinks, "reference"))


def test_two_passes_in_one_kernel_are_cut_together(cut_kernels):
    """Neither is long by itself: one piece begins in the first and ends in the second."""
    masks = sl.Causal() & (sl.Window(150) | sl.Columns(32, 16, 32))
    plan = candidates(masks, LONG_T, None, *both(**LONG).values())[-1]
    plan = dataclasses.replace(plan, fwd_params=sl.FwdParams())  # `candidates` asks for splits
    (q, k, v), sinks = arrays(t=LONG_T), jnp.asarray([0.5, -1.0])
    close(answers(q, k, v, plan, sinks), answers(q, k, v, masks, sinks, "reference"))
    assert cut_kernels >= {"forward", "dq"}


def test_what_is_cut_at_run_time(cut_kernels):
    """A block that everybody chose, and queries that chose many: the same to the bit in every run."""
    q, k, v = arrays(t=LONG_T, heads=(4, 1))
    ids = np.random.default_rng(0).integers(1, 19, (1, 19, 1, 12)).astype(np.int32)
    ids[..., 0] = 0
    chosen = sl.Selection(ids, block=16, granularity=16)
    run = jax.jit(lambda *x: answers(*x, sl.Causal(), selection=chosen))
    first, second = run(q, k, v), run(q, k, v)
    assert cut_kernels == {"forward", "dq", "dkv"}
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    close(first, answers(q, k, v, sl.Causal(), implementation="reference", selection=chosen))


def test_heads_of_one_tile_in_tiles_of_any_size():
    """In the kernel of dk and dv, tiles may be longer than all that a block of queries has."""
    q, k, v = arrays(t=70)
    chosen = sl.Selection(np.random.default_rng(0).integers(0, 5, (1, 70, 1, 2)).astype(np.int32), block=16)
    wanted = answers(q, k, v, sl.Causal(), implementation="reference", selection=chosen)
    for rows in (16, 128):
        params = {"fwd_params": sl.FwdParams(blocksize_m=rows), "bwd_params": sl.BwdParams(blocksize_n=max(32, rows))}
        close(answers(q, k, v, sl.Causal(), selection=chosen, **params), wanted)


def equals_a_loop(function, *args, levels=1):
    mapped = function
    for _ in range(levels):
        mapped = jax.vmap(mapped)
    found = jax.jit(mapped)(*args)
    for index in itertools.product(*map(range, args[0].shape[:levels])):
        one = function(*(x[index] for x in args), implementation="reference")
        close(jax.tree.map(lambda x: x[index], found), one)  # noqa: B023


SMALL_T = 40


@pytest.mark.parametrize(
    ("what", "lead"),
    [("arrays", (2, 2, 1)), ("masks", (3, 1)), ("sinks", (2, 2, 1)), ("masks and sinks", (2, 2, 1))],
)
def test_vmap(what, lead):
    rng, levels = np.random.default_rng(0), len(lead) - 1
    q, k, v = arrays(*lead, t=SMALL_T)
    masks = jnp.asarray(rng.random((*lead[:-1], SMALL_T, SMALL_T)) < 0.4)
    sinks = jnp.asarray(rng.normal(size=(*lead[:-1], 2)), jnp.float32)

    def function(q, k, v, *more, implementation="triton"):
        rest = list(more)
        mask = rest.pop(0) if "masks" in what else sl.Causal()
        return answers(q, k, v, mask, rest.pop(0) if rest else None, implementation)

    more = ([masks] if "masks" in what else []) + ([sinks] if "sinks" in what else [])
    equals_a_loop(function, q, k, v, *more, levels=levels)


def test_vmap_of_one_operand():
    q, k, v = arrays(t=SMALL_T)
    masks = jnp.asarray(np.random.default_rng(0).random((3, SMALL_T, SMALL_T)) < 0.4)
    found = jax.vmap(lambda mask: answers(q, k, v, mask))(masks)
    values = jnp.stack([v, 2 * v])
    found_values = jax.vmap(lambda v: answers(q, k, v, sl.Causal()))(values)
    for i in range(3):
        close(jax.tree.map(lambda x: x[i], found), answers(q, k, v, masks[i], implementation="reference"))  # noqa: B023
    for i in range(2):
        wanted = answers(q, k, values[i], sl.Causal(), implementation="reference")
        close(jax.tree.map(lambda x: x[i], found_values), wanted)  # noqa: B023


def test_no_batch_entries():
    ids = jnp.zeros((0, T), jnp.int32)
    for plan, options in ((FIXED, {}), (WINDOW, {"segment_ids": ids}), (jnp.ones((T, T), bool), {})):
        q, k, v = (x[:0] for x in arrays())
        out, lse, *gradients = answers(q, k, v, plan, **options)
        assert out.shape == q.shape and lse.shape == q.shape[:-1]
        assert [x.shape for x in gradients[:3]] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize(("name", "length"), [("sliding_window", 1 << 20), ("sparse_transformer_strided", 1 << 17)])
def test_long_sequences_are_planned_and_traced(name, length):
    q = jax.ShapeDtypeStruct((1, length, 16, 128), jnp.bfloat16)
    out, lse, *gradients = jax.eval_shape(functools.partial(answers, plan=sl.preset(name)), q, q, q)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    assert all(x.shape == q.shape and x.dtype == q.dtype for x in gradients[:3])


# --- what it refuses -------------------------------------------------------------------------------------------------


def refused(match, q, k, v):
    with pytest.raises(NotImplementedError, match=match):
        sl.block_sparse_attention(q, k, v, sl.Causal(), implementation="triton")


def test_calls_that_it_cannot_serve():
    refused(r"triton: its tiles hold head sizes up to 256, got 300 for query and key, 300", *arrays(t=8, h=300))
    q, k, _ = arrays(t=8)
    refused(r"up to 256, got 16 for query and key, 257 for value", q, k, jnp.zeros((1, 8, 1, 257)))
    refused("at most 65535 batch entries, got 65536", *(jnp.zeros((1 << 16, 1, 1, 1)) for _ in range(3)))
    with jax.enable_x64(True):
        refused("float32 at most, and query is float64", *(x.astype(jnp.float64) for x in arrays(t=8)))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="is about machines without one")
def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "local_device", true_device)
    served = "; implementation=None or 'xla' supports this call"
    refused(f"triton: it needs an NVIDIA GPU, and JAX computes on cpu{served}", *arrays(t=8))


@pytest.mark.parametrize("capability", ["gfx942", None])
def test_another_makers_gpu(monkeypatch, capability):
    gpu = types.SimpleNamespace(device_kind="MI300X", local_hardware_id=0, compute_capability=capability)
    monkeypatch.setattr(hardware, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu])
    assert true_device() == "it needs an NVIDIA GPU, and JAX computes on MI300X"


class Driver:
    """A CUDA driver with one GPU, 0, or one that fails."""

    def __init__(self, error=0):
        self.error = error

    def cuInit(self, flags):
        return self.error

    def cuDeviceGet(self, handle, number):
        handle._obj.value = 70 + number
        return 0 if number == 0 else 101

    def cuDeviceGetAttribute(self, value, attribute, handle):
        assert handle.value == 70
        value._obj.value = {97: 232448, 16: 132}[attribute]
        return 0


PLUGIN = types.SimpleNamespace(TritonKernelCall=None)


@pytest.mark.parametrize(
    ("capability", "number", "driver", "plugin", "answer"),
    [
        (90, 0, Driver(), PLUGIN, hardware.Device(90, 232448, 132)),
        (75, 0, Driver(), PLUGIN, "it needs compute capability 8.0, and this GPU has 7.5"),
        (90, 0, Driver(), types.SimpleNamespace(), "it needs JAX's CUDA plugin, which the extra 'gpu' installs"),
        (90, 0, Driver(), None, "it needs triton, which the extra 'gpu' installs"),
        (90, 0, None, PLUGIN, "it needs the CUDA driver library"),
        (90, 0, Driver(3), PLUGIN, "the CUDA driver answered with error 3"),
        (90, 1, Driver(), PLUGIN, "error 101 when asked for attribute 97 of GPU 1"),
    ],
    ids=["works", "old", "no plugin", "no triton", "no driver", "failing driver", "no such GPU"],
)
def test_what_the_device_is(monkeypatch, capability, number, driver, plugin, answer):
    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    if plugin is None:
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(jaxlib, "gpu_triton", plugin, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    found = hardware._properties.__wrapped__(capability, number)
    assert found == answer if isinstance(answer, hardware.Device) else answer in found


@pytest.mark.parametrize(("version", "works"), [("3.6.0", False), ("3.7.1", False), ("3.8.0", True), ("3.10.0", True)])
def test_blackwell_needs_a_newer_triton(monkeypatch, version, works):
    triton = pytest.importorskip("triton", reason="needs triton: pip install triton")
    monkeypatch.setattr(jaxlib, "gpu_triton", PLUGIN, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setattr(triton, "__version__", version)
    for capability in (80, 90, 120):
        assert hardware._properties.__wrapped__(capability, 0) == hardware.Device(capability, 232448, 132)
    reason = f"it needs triton 3.8 or newer on compute capability 10.0, and this is {version}"
    assert hardware._properties.__wrapped__(100, 0) == (hardware.Device(100, 232448, 132) if works else reason)
