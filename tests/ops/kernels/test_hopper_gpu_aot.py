"""The Hopper kernels, lowered by JAX and compiled by Triton and ptxas for compute capability 9.0. No GPU is needed.

This catches what interpreted kernels cannot show: too much shared memory, registers that are spilled, products that
wait for each other, and registers that are used for something else while a product reads them.
"""

import dataclasses
import functools
import re
import urllib.parse
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_layers as sl
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.hopper_gpu import settings
from sparse_layers.ops.planning import platforms

pytest.importorskip("triton", reason="needs triton: pip install triton")
import triton

from benchmarks.gluon_resources import hazards, overlap, resources


class Recorded:
    """A stand-in for ``jaxlib.gpu_triton``, whose functions come with the CUDA plugin: says what it was asked for.

    Calls are described by the code of their kernel.
    """

    def __init__(self):
        self.asked: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = []

    def __getattr__(self, name):
        def record(*args, **options):
            self.asked.append((name, options, args))
            return self if name == "TritonKernelCall" else name

        return record

    def to_proto(self, name, metadata):
        _, _, (kernel, _, _, _, code, *_) = self.asked[-2]  # the kernel that was made for the call
        assert kernel == name
        return code.encode() + metadata


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call, both of whose passes are compiled; ``spills`` is how many bytes a thread may keep in local memory.

    Where single queries choose blocks of ``chosen`` keys, the forward pass is plain Triton's; where ``chosen_by`` is
    64, the backward pass is.
    """

    name: str
    mask: Any
    size: int = 128
    value_size: int | None = None  # of v; None for that of q and k
    heads: tuple[int, int] = (4, 4)
    dtype: str = "bfloat16"
    spills: int = 0
    segments: bool = False
    order_ids: bool = False
    chosen: int = 0
    chosen_by: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    table: bool = False  # True for a bias with a table, whose gradient is plain Triton's

    def __str__(self):
        return self.name


OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)  # keeps a little more in local memory
STRIDED = sl.Causal() & (sl.Window(128) | sl.Strided(16))
LONG = {"fwd_params": sl.FwdParams(128, 1024), "bwd_params": sl.BwdParams(1024, 128)}  # as of very long sequences
CASES = [
    Case("causal", sl.Causal()),
    # The backward kernel holds scores of 128 queries there, beside which registers do not hold segments.
    Case("causal-64", sl.Causal(), 64, dtype="float16"),
    Case("segments-64", sl.Causal(), 64, segments=True, spills=300),
    Case("negative-64", sl.Causal(), 64, options={"scale": -0.3}),
    Case("order", sl.Full(), order_ids=True),
    Case("order-64", sl.Full(), 64, order_ids=True, spills=40 * OLD),
    Case("groups-order", sl.Causal(), heads=(4, 2), segments=True, order_ids=True),
    Case("groups-segments", sl.Causal(), heads=(4, 2), segments=True, spills=32),
    Case("pieces", sl.Causal() & (sl.Window(200) | sl.Prefix(9)), heads=(8, 1), spills=8 * OLD),
    Case(
        "pieces-64",
        sl.preset("sparse_transformer_fixed", stride=128, summary=8),
        64,
        heads=(8, 2),
        dtype="float16",
        spills=140,
    ),
    Case("chain-sinks", STRIDED, options={"sinks": True}),
    # The hyperbolic tangent takes more registers than there are.
    Case("soft-cap", sl.preset("sliding_window", window=512), spills=510, options={"logits_soft_cap": 30.0}),
    Case("long-blocks", sl.Causal(), heads=(4, 2), options=LONG),
    Case("long-blocks-64", sl.Causal(), 64, options=LONG),
    # Spills of wide heads are outside of loops, or of masks that evaluate ids.
    Case("causal-256", sl.Causal(), 256, heads=(4, 2), spills=20),
    Case("segments-256", sl.Causal(), 256, heads=(4, 2), segments=True, spills=120),
    Case("order-256", sl.Full(), 256, order_ids=True, spills=120),
    Case("chain-sinks-256", STRIDED, 256, heads=(4, 2), spills=60, options={"sinks": True}),
    Case("pieces-256", sl.Causal() & (sl.Window(200) | sl.Prefix(9)), 256, heads=(8, 1), spills=64),
    Case(
        "soft-cap-256",
        sl.preset("sliding_window", window=512),
        256,
        spills=80 if OLD else 20,
        options={"logits_soft_cap": 30.0},
    ),
    Case("alibi", sl.Causal(), heads=(4, 2), options={"bias": sl.alibi(4)}),
    Case("table", sl.Window(511, 0), heads=(4, 2), table=True),
    Case("table-64", sl.Window(511, 0), 64, table=True),
    Case("table-256", sl.Window(511, 0), 256, heads=(4, 2), spills=4 * OLD, table=True),
    Case("table-strided", STRIDED, heads=(4, 2), table=True, options={"sinks": True}),
    Case("latent", sl.Causal(), 192, 128),  # the heads of DeepSeek's latent attention
    Case("chosen-128", sl.Causal(), heads=(4, 2), chosen=128, spills=16 * OLD),
    Case("chosen-64", sl.Causal(), heads=(4, 2), chosen=64, dtype="float16", spills=16 if OLD else 4),
    Case("chosen-128-64", sl.Causal(), 64, heads=(4, 2), chosen=128),
    Case("chosen-64-64", sl.Causal(), 64, chosen=64),
    Case("chosen-soft-cap", sl.Causal(), chosen=128, spills=700, options={"logits_soft_cap": 30.0}),
    Case("chosen-by-64", sl.Causal(), heads=(4, 2), chosen=64, chosen_by=64, segments=True, options={"sinks": True}),
    Case("chosen-by-64-64", sl.Causal(), 64, chosen=128, chosen_by=64, dtype="float16"),
]
T = 4096
GPU = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
# JAX exports no calls that later versions may not know, but for those that it is told.
UNPROMISED = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")


@functools.cache
def exported(case, devices):
    """(the program for GPUs, what jaxlib was asked for, the compiled kernels by name); a GPU has two batch entries."""
    (n, k), recorded, found, by_triton = case.heads, Recorded(), {}, case.table or case.chosen_by > 1

    def compiled(kernel, *args):
        made = whole(kernel, *args)
        found.setdefault(kernel.fn.__name__, {})[made.ptx] = made
        return made

    def zero_outputs(kernel, grid, arrays, outputs, *_):  # plain Triton makes lists of what is known at run time
        assert kernel.fn.__name__ in (
            "compact_kernel",
            *(("dq_kernel", "dkv_kernel") if by_triton else ("kv_outer_kernel", "triton_forward_kernel")),
        )
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    def loss(q, k, v, ids):
        options = dict(case.options)
        if options.get("sinks"):
            options["sinks"] = jnp.zeros(n)
        if case.table:
            options["bias"] = sl.DistanceBias(jnp.zeros((n, 1025)))
        if case.segments:
            options["segment_ids"] = ids
        if case.order_ids:
            options["order_ids"] = ids
        if case.chosen:
            ids = ids[:, :: case.chosen_by, None, None] % 8 + np.arange(8)
            options["selection"] = sl.Selection(ids, block=case.chosen, granularity=case.chosen_by)
        return sl.block_sparse_attention(q, k, v, case.mask, implementation="hopper", **options).astype("float32").sum()

    whole = bridge.compiled
    mesh = AbstractMesh((devices,), ("batch",), (AxisType.Explicit,), abstract_device=GPU)
    sizes = (n, case.size), (k, case.size), (k, case.value_size or case.size)
    shapes = [((2 * devices, T, *heads), case.dtype) for heads in sizes] + [((2 * devices, T), "int32")]
    arrays = [jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, P("batch"))) for x in shapes]
    with pytest.MonkeyPatch.context() as patch, jax.sharding.use_abstract_mesh(mesh):
        patch.setattr(jaxlib, "gpu_triton", recorded, raising=False)
        patch.setattr(bridge, "compiled", compiled)
        patch.setattr(bridge, "gluon_unsupported", lambda: None)
        patch.setattr(bridge, "call_triton", zero_outputs)
        patch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 132))
        patch.setitem(platforms.TUNING, "hopper", platforms.Tuning(block_shapes=((128, 128),)))
        program = jax.jit(jax.grad(loss, (0, 1, 2)))
        program = jax.export.export(program, platforms=["cuda"], disabled_checks=[UNPROMISED])(*arrays)
    return program, recorded.asked, {name: list(kernels.values()) for name, kernels in found.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_without_spills_or_hazards(case):
    _, _, kernels = exported(case, 1)
    sizes = settings.padded_head_sizes(case.size, case.value_size or case.size)
    backward = "hopper_wide_backward_kernel" if settings.is_wide(sizes) else "hopper_backward_kernel"
    one_group = case.chosen_by == settings.GROUP_ROWS
    chosen = {"hopper_forward_kernel"} if one_group else {"query_gather_kernel"}
    kernels_with_gradients = {"hopper_forward_kernel"} if case.table else {"hopper_forward_kernel", backward}
    assert kernels.keys() == (chosen if case.chosen else kernels_with_gradients)
    for name, made in kernels.items():
        for kernel in made:
            found = resources(kernel.ptx)
            assert max(found.spill_stores, found.spill_loads) <= case.spills, name
            assert not found.warnings and not hazards(found.sass)
            part = name.removeprefix("hopper_").removeprefix("wide_").removesuffix("_kernel")
            larger = part == "backward" and not case.options.get("scale")
            queries = settings.STEP_QUERIES[sizes.query_key] if larger else settings.GROUP_ROWS
            of = sizes, settings.tile_keys(case.chosen or 128, sizes.query_key, one_group), queries
            layout, available = part + "_one_group" * one_group, settings.SHARED_MEMORY
            if one_group:
                available = settings.HALF_SHARED_MEMORY
                assert found.registers == settings.ONE_GROUP_REGISTERS
            least = settings.shared_memory_bytes(layout, settings.num_stages(layout, *of), *of)
            assert least <= kernel.shared <= least + 1024 <= available
            assert kernel.num_warps == (8 if one_group else 12)
            if name == "hopper_wide_backward_kernel":  # dv or dk, and half of dq
                assert {loop[-3:] for loop in overlap(found.sass)} == {("4 rs", "4 ss", "wait 0")}
            else:  # Scores and the product before are in flight together, in all loops, of both groups.
                scores = ("8 ss", "4 ss") if sizes.depth == 192 else (f"{case.size // 16} ss",)
                second = f"{of[1] // 16} rs" if part == "forward" else f"{case.size // 16} ss"
                loops = {loop[: len(scores) + 2] for loop in overlap(found.sass)}
                assert loops == {(*scores, second, "wait 1")}
            if case.table and "strided" not in case.name:  # in three places, two groups load each diagonal once
                assert found.sass.count("LDG.E.CONSTANT") == 6 * (of[1] // 8 + 1) * 2
            if name == "hopper_backward_kernel":  # dv, then dq and dk: while the last one runs, the other one is stored
                sides = ("rs", "ss", "rs") if sizes.query_key > 64 else ("rs", "rs", "ss")
                assert {tuple(x.split()[-1] for x in loop[-5:-2]) for loop in overlap(found.sass)} == {sides}
            if name == "query_gather_kernel":
                # 128 threads copy q and dout, 16 bytes each at a time, and all add four numbers to dq.
                assert found.sass.count("LDGSTS.E.BYPASS.128 ") >= 2 * settings.GROUP_ROWS * case.size * 2 // (128 * 16)
                assert {*re.findall(r"REDG\.E\.(\w+\.\w+)", found.sass)} == {"ADD.F32x4"}


def code(call):
    """The code of the kernel that a call in MLIR carries to whoever loads the program."""
    (opaque,) = re.findall(r'opaque = "(.*?)"', call)
    escaped = opaque.replace("%", "%25").replace(r"\\", "%5C").replace("\\", "%")
    return zlib.decompress(urllib.parse.unquote_to_bytes(escaped)).decode()


@pytest.mark.parametrize("devices", [1, 2])
def test_kernel_calls_of_the_exported_program(devices):
    program, asked, kernels = exported(next(case for case in CASES if case.name == "chain-sinks"), devices)
    text = jax.export.deserialize(program.serialize()).mlir_module()
    calls = [line for line in text.splitlines() if "@triton_kernel_call_ffi" in line]
    assert len(calls) == sum(map(len, kernels.values())) == 4  # two passes, forward and backward
    # dq is added to zeros; the second backward pass goes on from dq, dk and dv of the first. All in place.
    assert [line.count("#stablehlo.output_operand_alias<") for line in calls] == [0, 0, 1, 3]
    assert sorted(map(code, calls)) == sorted(kernel.ptx for each in kernels.values() for kernel in each)
    by_name = {name: [(options, args) for asked_for, options, args in asked if asked_for == name] for name, *_ in asked}
    # Forward, a program for each multiprocessor; backward, one for each head and block of both batch entries.
    launches = {args[1:4] for _, args in by_name["TritonKernelCall"]}
    assert launches == {(132, 1, 1), (2 * 4 * (T // 128), 1, 1)}
    assert {args for _, args in by_name["create_array_parameter"]} == {(0, 16)}
    descriptors = [options for options, _ in by_name["create_tma_descriptor_parameter"]]
    vector = 4 * 128
    natural = {"shape": (2, T, 4, 128), "strides": (T * vector, vector, 128, 1)}
    strided = {"shape": (2, T // 16, 16, 4, 128), "strides": (T * vector, 16 * vector, vector, 128, 1)}
    views = [{name: x[name] for name in ("shape", "strides")} for x in descriptors]
    assert natural in views and strided in views and {x["oob_fill"] for x in descriptors} == {0}
