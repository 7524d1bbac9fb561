"""The Hopper kernels, interpreted where there is no GPU, held to float64; and who takes them.

`test_hopper_schedule.py` has their schedules, `test_hopper_views.py` their boxes of tokens, and
`test_hopper_gpu_aot.py` compiles them.
"""

import dataclasses
import functools
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops import attention, implementations, traced_call
from sparse_layers.ops.kernels import cudnn
from sparse_layers.ops.kernels.call import Call
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.gpu.passes import GroupPass
from sparse_layers.ops.kernels.gpu_attention import far_keys, hopper
from sparse_layers.ops.kernels.gpu_attention.route import route
from sparse_layers.ops.kernels.hopper_gpu import launch, schedule, settings
from sparse_layers.ops.kernels.hopper_gpu.backward_kernel import swapped_layout
from sparse_layers.ops.kernels.hopper_gpu.schedule import NUM_WAVES, order_work_tiles
from sparse_layers.ops.kernels.operands import Operands
from sparse_layers.ops.planning import platforms
from tests.ops import cases
from tests.ops.huge_logits import SINKS, check
from tests.ops.huge_logits import Case as HugeCase
from tests.ops.kernels import gluon_interpreter, gluon_memory
from tests.ops.test_selections import Case as SelectionCase

TUNING = platforms.Tuning(block_shapes=((128, 128),))
ON_GPU = jax.default_backend() == "gpu"


def launches(monkeypatch):
    """Has the kernels interpreted as on a GPU of 5 multiprocessors, unless there is one; what was launched."""
    found, launch_kernel = [], bridge.call_gluon

    def call(kernel, *args, **options):
        long = max(side.BLOCK for side in (args[3]["Q"], args[3]["KV"])) > settings.TILE_ROWS
        of = (" of pieces" if args[3]["L"].NUM_SPLITS else "") + (" of long blocks" if long else "")
        found.append(kernel.fn.__name__ + of)
        if ON_GPU:
            return launch_kernel(kernel, *args, **options)
        return gluon_interpreter.call(kernel, *args, seed=len(found), **options)

    def candidates(*args, made=cases.candidates, **options):
        # Settings that only tell plans apart are no wish of the user's.
        return [dataclasses.replace(plan, fwd_params=sl.FwdParams()) for plan in made(*args, **options)]

    monkeypatch.setattr(cases, "candidates", candidates)
    monkeypatch.setattr(cases, "_SMALL_TILES", TUNING)
    monkeypatch.setattr(bridge, "call_gluon", call)
    monkeypatch.setitem(platforms.TUNING, "hopper", TUNING)
    monkeypatch.setattr(far_keys, "MIN_FAR_KEYS", 0)  # sequences are short
    if not ON_GPU:
        monkeypatch.setattr(bridge, "gluon_unsupported", lambda: None)
        monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 5))
    return found


launched = pytest.fixture(launches)


# --- values and gradients --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Case(cases.Case):
    """A call that these kernels serve, all of it unless it is ``shared`` with those in plain Triton."""

    dtype: str = "bfloat16"
    sizes: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 2)
    shared: bool = False
    forward_only: bool = False  # True if plain Triton computes all gradients


def _segments(*lengths):
    ids = np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)
    return np.concatenate([ids, ids[:, ::-1]])


DOCUMENTS = _segments(100, 130, 26)
PADDED = np.where(np.arange(256) < 240, DOCUMENTS, -1).astype(np.int32)
PREFIXES, LEVELS = cases._prefixes(256, 0, 150), cases._levels(2, 200, 256)
LONGER = _segments(90, 250, 360)[:1]
RNG = np.random.default_rng(0)
FEW = jnp.asarray(RNG.random((2, 256, 200)) < 0.02)
STRIDED_4 = sl.preset("sparse_transformer_strided", stride=4)
FIXED_32 = sl.preset("sparse_transformer_fixed", stride=32, summary=8)
CASES = [
    Case("causal-ragged", sl.Causal(), 200),
    Case("causal-128", sl.Causal(), 256, sizes=(128, 128), heads=(2, 1), batch=1),
    Case("causal-float16", sl.Causal(), 300, dtype="float16", heads=(4, 2)),
    Case("window-cross", sl.Window(70, 20), 130, 300, heads=(3, 1), batch=1),
    Case("head-sizes", sl.Causal(), 140, sizes=(40, 24)),
    Case("wide-value", sl.Window(50), 200, sizes=(24, 72), batch=1),
    Case("no-keys-at-first", np.tri(256, dtype=bool) & (np.arange(256) >= 140), 256),
    Case("nothing", sl.Causal() & sl.Columns(500, 400), 256),
    Case("documents", sl.Causal(), 256, segments=(DOCUMENTS, DOCUMENTS)),
    Case("padding", sl.Full(), 256, segments=(PADDED, PADDED), heads=(4, 2)),
    Case("order-prefixes", sl.Full(), 256, order_ids=(PREFIXES, PREFIXES)),
    Case("order-levels", sl.Window(90, 40), 200, 256, order_ids=LEVELS, sizes=(128, 128), heads=(2, 1), sinks=True),
    Case("order-documents", sl.Full(), 256, segments=(DOCUMENTS, PADDED), order_ids=(PREFIXES,) * 2, heads=(4, 2)),
    Case("sinks", sl.Window(40), 200, sinks=True, heads=(4, 2)),
    Case("soft-cap", sl.Causal(), 200, soft_cap=1.5, sinks=True),
    Case("scale-tiny", sl.Causal(), 140, scale=1e-31),
    Case("scale-negative", sl.Causal(), 140, scale=-0.3),
    Case("strided", sl.preset("sparse_transformer_strided", stride=2), 256, sinks=True, split=True, shared=True),
    Case("strided-groups", sl.preset("sparse_transformer_strided", stride=4), 512, heads=(4, 2), batch=1, split=True),
    # 64 queries of a residue are a box of tokens, and 128 are none.
    Case("strided-cross", sl.Strided(4), 768, 512, batch=1),
    Case("fixed", FIXED_32, 512, split=True, batch=1, shared=True),
    Case("fixed-long", sl.preset("sparse_transformer_fixed", stride=16, summary=16), 400),
    Case("tiles", sl.Grid((32, 16), sl.BlockDiagonal(16)), 512, split=True, batch=1),
    Case("tiles-cut", sl.Grid((20, 16), sl.Window(3, 3)), 304, split=True, batch=1),
    Case("video", sl.Grid((4, 8, 16), sl.Window(2, 2)), 512, split=True, batch=1),
    Case("heads-differ", (sl.Causal(), sl.Window(60)), 256, heads=(4, 2), batch=1),
    Case("chains-differ", (sl.Causal(), sl.preset("sparse_transformer_strided", stride=2)), 256, batch=1, split=True),
    # An earlier pass has begun the first queries with their sinks, and the others begin here.
    Case("sinks-once", sl.Window(3, 3) | sl.Prefix(20).T & sl.Prefix(9), 200, sinks=True, split=True, shared=True),
    Case("run-time", FEW, 256, 200),
    # Lists of the first keys, much longer than others, are cut; the last two add to what earlier passes left.
    Case("cut", sl.Causal() & (sl.Window(9) | sl.Prefix(9)), 900, heads=(8, 1), sizes=(40, 24), batch=1),
    Case("cut-gathered", FIXED_32, 768, heads=(8, 1), split=True),
    Case("cut-residues", sl.Window(30, 30) | sl.Strided(2) & sl.Prefix(99), 1024, heads=(8, 1), batch=1, split=True),
    # Blocks of which a kernel walks over several tiles.
    Case("long-blocks", sl.Causal(), 700, heads=(4, 2), sizes=(128, 128), batch=1, fwd=(128, 256), bwd=(512, 128)),
    Case("long-blocks-run-time", FEW, 256, 200, sinks=True, fwd=(128, 256), bwd=(256, 128)),
    Case("long-blocks-tiles", sl.Grid((40, 16), sl.Window(9, 9)), 640, split=True, fwd=(128, 512), bwd=(256, 128)),
    # With segment ids they are cut into tiles.
    Case("padded-tiles", sl.Window(90, 40), 256, segments=(DOCUMENTS, PADDED), fwd=(128, 384), bwd=(768, 128)),
    Case(
        "documents-tiles",
        (sl.Causal(), sl.Window(60)),
        700,
        batch=1,
        segments=(LONGER,) * 2,
        order_ids=(cases._prefixes(700, 300),) * 2,
        fwd=(128, 512),
        bwd=(512, 128),
    ),
    Case("256-causal", sl.Causal(), 200, sizes=(256, 256), heads=(2, 1), batch=1),
    Case("256-documents", sl.Causal(), 256, sizes=(256, 256), batch=1, segments=(DOCUMENTS[:1],) * 2),
    Case("256-order", sl.Full(), 256, sizes=(256, 256), batch=1, order_ids=(PREFIXES[:1],) * 2, dtype="float16"),
    Case("256-window", sl.Window(70, 20), 130, 300, sizes=(256, 256), heads=(2, 1), batch=1, sinks=True),
    Case("256-soft-cap", sl.Causal(), 140, sizes=(256, 256), batch=1, soft_cap=1.5, heads=(2, 1)),
    Case("256-scale-negative", sl.Causal(), 140, sizes=(256, 256), scale=-0.1, batch=1, heads=(1, 1)),
    Case("256-strided", STRIDED_4, 512, sizes=(256, 256), heads=(2, 1), batch=1, split=True, sinks=True),
    Case("256-tiles", sl.Grid((32, 16), sl.BlockDiagonal(16)), 512, sizes=(256, 256), batch=1, split=True),
    Case("256-run-time", FEW[:1], 256, 200, sizes=(256, 256), batch=1, heads=(2, 1)),
    Case("cut-256", FIXED_32, 768, sizes=(256, 256), heads=(8, 1), batch=1, split=True),
    Case("256-long-blocks", sl.Causal(), 400, sizes=(256, 256), batch=1, fwd=(128, 256), bwd=(256, 128)),
    Case("192-128", sl.Causal(), 200, sizes=(192, 128), heads=(2, 1), batch=1),  # DeepSeek's latent attention
    Case("192-128-strided", STRIDED_4, 512, sizes=(192, 128), batch=1, split=True, sinks=True),
    Case("cut-192-128", FIXED_32, 768, sizes=(192, 128), heads=(8, 1), batch=1, split=True),
    Case("192", sl.Window(90, 30), 200, sizes=(192, 192), heads=(2, 1), batch=1),
    Case("136-72", sl.Causal(), 140, sizes=(136, 72), batch=1),
    Case("72-200", sl.Causal(), 140, sizes=(72, 200), batch=1, heads=(2, 1)),
    Case("cut-long-blocks", FIXED_32, 800, heads=(8, 1), batch=1, split=True, fwd=(128, 256), bwd=(256, 128)),
]


def check_values_and_gradients(launched, monkeypatch, case):
    """Holds a case to float64, and its launches to what the case says."""
    call = bridge.call_triton

    def only_lists(kernel, *args, **options):
        assert case.shared or kernel.fn.__name__ == "compact_kernel"
        return call(kernel, *args, **options)

    monkeypatch.setattr(bridge, "call_triton", only_lists)
    cases.check(case, case.call("hopper"))
    assert any("backward_kernel of pieces" in name for name in launched) == case.name.startswith("cut")
    assert all(("long blocks" in name) == ("long-blocks" in case.name) for name in launched)
    backward = "hopper_wide_backward_kernel" if max(case.sizes) > 128 else "hopper_backward_kernel"
    kernels = {"hopper_forward_kernel"} if case.forward_only else {"hopper_forward_kernel", backward}
    assert {name.split()[0] for name in launched} == (kernels if np.any(case.allowed()) else set())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(launched, monkeypatch, case):
    check_values_and_gradients(launched, monkeypatch, case)


HUGE = [
    HugeCase("huge", sl.Causal(), 200, dtype="bfloat16", sizes=(64, 64), heads=(4, 2)),
    HugeCase("huge-sinks", sl.Window(40), 200, dtype="bfloat16", sizes=(64, 64), heads=(4, 2), sink_values=SINKS),
    HugeCase("huge-soft-cap", sl.Causal(), 140, dtype="bfloat16", sizes=(64, 64), soft_cap=1e9, batch=1),
    HugeCase("huge-documents", sl.Causal(), 256, dtype="bfloat16", sizes=(64, 64), segments=(DOCUMENTS, PADDED)),
]


@pytest.mark.parametrize("case", HUGE, ids=str)
def test_huge_logits(launched, case):
    check(case, case.call("hopper"), most=2.3e38)
    assert {*launched} == {"hopper_forward_kernel", "hopper_backward_kernel"}


def test_few_tiles_are_listed_one_by_one(launched, monkeypatch):
    """Of more, blocks are cut into larger parts, over which kernels walk: here into halves."""
    options = {"batch": 1, "segments": (LONGER[:, :690],) * 2, "fwd": (128, 512), "bwd": (512, 128)}
    case = Case("few-tiles", (sl.Causal(), sl.Window(60)), 690, **options)
    monkeypatch.setattr(settings, "MAX_LIST_BYTES", 28 * 50)
    cases.check(case, case.call("hopper"))
    assert all("long blocks" in name for name in launched)


def test_longer_lists_compile_nothing_anew(monkeypatch, launched):
    call, found = bridge.call_gluon, []

    def record(kernel, programs, inputs, outputs, constants, *options):
        found.append((kernel, constants))
        return call(kernel, programs, inputs, outputs, constants, *options)

    monkeypatch.setattr(bridge, "call_gluon", record)
    op = functools.partial(sl.block_sparse_attention, implementation="hopper")
    few = np.abs(np.arange(10)[:, None] - np.arange(10)) <= 1
    many = few | (np.arange(10) == 3)[:, None]  # then one program has that block, and another one of the others more
    for mask in (sl.Blocks(sl.Array(few), 128), sl.Blocks(sl.Array(many | many.T), 128)):
        shape = jax.ShapeDtypeStruct((1, 1280, 2, 64), jnp.bfloat16)
        jax.eval_shape(jax.grad(lambda q, mask=mask: op(q, q, q, mask).astype(jnp.float32).sum()), shape)
    assert len(found) == 6 and found[:3] == found[3:]


def test_passes_that_plain_triton_fuses(launched):
    """Each key is in one list of the first pass, the second one has few keys: neither is for the backward kernel."""
    case = Case("few-keys", sl.preset("sparse_transformer_fixed", stride=128, summary=8), 256, batch=1, split=True)
    cases.check(case, case.call("hopper"))
    assert {*launched} == {"hopper_forward_kernel"}


@pytest.mark.parametrize(
    ("mask", "heads", "as_numbered"),
    [
        (sl.Causal() & sl.Window(300), (2, 2), True),
        (sl.Causal() & sl.Window(300), (4, 2), False),  # neighbours would soon be at different query heads
        (
            sl.Blocks(sl.Array(np.eye(10, dtype=bool)[[3, 1, 4, 8, 5, 9, 2, 6, 0, 7]] | np.eye(10, dtype=bool)), 128),
            (2, 2),
            False,
        ),
    ],
)
def test_blocks_come_as_they_are_numbered_where_neighbours_read_the_same(
    launched, monkeypatch, mask, heads, as_numbered
):
    asked = []

    def record(steps, batch, programs, as_numbered):
        asked.append(as_numbered)
        return order_work_tiles(steps, batch, programs, as_numbered)

    monkeypatch.setattr(launch, "order_work_tiles", record)
    q, k = (jax.ShapeDtypeStruct((1, 1280, n, 64), jnp.bfloat16) for n in heads)
    op = functools.partial(sl.block_sparse_attention, implementation="hopper")
    jax.eval_shape(jax.grad(lambda q, k: op(q, k, k, mask).astype(jnp.float32).sum()), q, k)
    assert asked == [as_numbered]


@pytest.mark.parametrize(
    ("pattern", "kernels", "dq"),
    [
        # What few keys get is kept by row, and the kernel that writes dk and dv of all adds it.
        ("sparse_transformer_fixed:stride=32,summary=8", ["hopper_backward_kernel", "dq_kernel"], "bfloat16"),
        # These kernels add to dq in float32, so the pass before them does not round it.
        ("sparse_transformer_strided:stride=4", ["dq_kernel", "hopper_backward_kernel"], "float32"),
    ],
)
def test_passes_hand_on_gradients_as_the_next_one_takes_them(launched, monkeypatch, pattern, kernels, dq):
    call, found = bridge.call_triton, []

    def record(kernel, grid, arrays, outputs, *more):
        launched.append(kernel.fn.__name__)
        found.append(outputs[0].dtype)
        return call(kernel, grid, arrays, outputs, *more)

    monkeypatch.setattr(bridge, "call_triton", record)
    plan = dataclasses.replace(cases.candidates(sl.preset(pattern), 512)[-1], implementation="hopper")

    def loss(q):
        return sl.block_sparse_attention(q, q, q, plan, implementation="hopper").astype(jnp.float32).sum()

    jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16))
    assert [name for name in launched if name in ("hopper_backward_kernel", "dq_kernel")] == kernels
    assert found == [dq]


def test_programs_without_work(launched, monkeypatch):
    """While devices exchange queries there are more programs, of which some have nothing to do."""
    found, call = [], bridge.call_gluon

    def record(kernel, programs, *more):
        if kernel.fn.__name__ == "hopper_forward_kernel":
            found.append(programs)
        return call(kernel, programs, *more)

    monkeypatch.setattr(bridge, "call_gluon", record)
    case = Case("causal", sl.Causal(), 270)
    for exchanges_queries in (False, True):
        monkeypatch.setattr(attention, "Call", functools.partial(Call, exchanges_queries=exchanges_queries))
        cases.check(case, case.call("hopper"))
    assert found[len(found) // 2 :] == [NUM_WAVES * number for number in found[: len(found) // 2]]


@pytest.mark.parametrize(
    ("granularity", "block", "size"), [(16, 128, 64), (64, 64, 128), (64, 128, 64), (128, 128, 64), (128, 384, 64)]
)
def test_selections(launched, granularity, block, size):
    options = {"heads": (4, 2), "sizes": (size, size), "dtype": "bfloat16", "granularity": granularity, "block": block}
    case = SelectionCase("chosen", sl.Window(200, 100), 270, 300, **options)
    cases.check(case, case.call("hopper"))
    assert (
        {*launched} == {"hopper_forward_kernel", "hopper_backward_kernel"}
        if block == 128 and granularity != 64
        else {"hopper_forward_kernel"}
    )


def test_vmap_and_long_chains(launched):
    """Three passes, whose sums are kept in float32; and a mapped axis."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 1, 256, 2, 64)), jnp.bfloat16) for _ in range(3))
    mask = sl.Window(30, 30) | sl.Strided(2) | sl.Columns(32, 16)
    made = [x for x in cases.candidates(mask, 256) if len(x.chains[0]) == 3][-1]
    plan = dataclasses.replace(made, fwd_params=sl.FwdParams(), bwd_params=sl.BwdParams(), implementation="hopper")

    def loss(q, k, v, implementation):
        op = functools.partial(sl.block_sparse_attention, implementation=implementation)
        out = op(q, k, v, plan if implementation == "hopper" else mask)
        return (out.astype(jnp.float32) ** 2).sum(), out

    def results(implementation, *arrays):
        one = functools.partial(loss, implementation=implementation)
        return jax.vmap(jax.value_and_grad(one, (0, 1, 2), has_aux=True))(*arrays)

    found = results("hopper", q, k, v)
    exact = results("reference", *(x.astype(jnp.float32) for x in (q, k, v)))
    assert {*launched} == {"hopper_forward_kernel", "hopper_backward_kernel"}
    for a, b in zip(jax.tree.leaves(found)[1:], jax.tree.leaves(exact)[1:], strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(b)


BIASED = {"slopes": jax.ShapeDtypeStruct((2,), jnp.float32)}


@pytest.mark.parametrize(
    ("mask", "length", "kernels", "reason", "options"),
    [
        (sl.Causal(), 256, ("forward", "backward"), "head sizes that are multiples of 8, got 20$", {"size": 20}),
        (sl.Causal(), 256, ("forward",), r"no setting .*num_warps=4\)$", {"fwd_params": sl.FwdParams(num_warps=4)}),
        (sl.Causal(), 256, ("backward",), r"no setting .*num_stages=2\)$", {"bwd_params": sl.BwdParams(num_stages=2)}),
        (sl.Causal(), 256, ("backward",), "dq in any order", {"bwd_params": sl.BwdParams(deterministic=True)}),
        (sl.Causal(), 60, ("forward", "backward"), "got 64 queries and 64 keys|each key is in one block list", {}),
        (sl.BlockDiagonal(128), 512, ("backward",), "each key is in one block list", {}),
        (sl.Strided(3), 400, ("forward", "backward"), "cannot address the rows of .*stride 3$", {}),
        (sl.Prefix(128).T, 4096, ("forward",), "passes over all queries, and this one is over some", {}),
        (sl.Causal(), 2048, ("forward",), "splits no lists", {"multiprocessors": 132}),
        (sl.Causal(), 300, (), "", BIASED),
        (sl.Window(90, 1), 300, ("backward",), "static, causal mask", BIASED),
        (sl.Causal(), 300, ("forward", "backward"), "no soft cap", BIASED | {"call": {"soft_cap": 3.0}}),
        (
            sl.Causal(),
            300,
            ("backward",),
            "no table of a bias$",
            BIASED | {"table": jax.ShapeDtypeStruct((2, 9), "float32")},
        ),
        (sl.Causal(), 300, ("forward", "backward"), "by tokens$", BIASED | {"call": {"bias_orders": ()}}),
    ],
)
def test_what_is_left_to_triton(monkeypatch, mask, length, kernels, reason, options):
    options = {"size": 64, "multiprocessors": 5, "slopes": None, "table": None, "call": {}} | options
    names = "size", "multiprocessors", "slopes", "table", "call"
    size, multiprocessors, slopes, table, fields = (options.pop(x) for x in names)
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, multiprocessors))
    monkeypatch.setitem(platforms.TUNING, "hopper", TUNING)
    plan = sl.make_plan(mask, length, implementation="hopper", **options)
    call = Call(plan, (128, 128), (128, 128), (plan.fwd_params, plan.bwd_params), 1.0, None)
    q = jax.ShapeDtypeStruct((1, length, 2, size), jnp.bfloat16)
    planned = route(
        "hopper", dataclasses.replace(call, **fields), Operands(q, q, q, bias_table=table, bias_slopes=slopes)
    )
    for kernel, launches in (("forward", planned.forward), ("backward", planned.backward)):
        reasons = [launch.reason for launch in launches]
        assert [launch.engine for launch in launches] == ["triton" if x else "hopper" for x in reasons]
        if kernel in kernels:
            assert any(re.search(reason, each or "") for each in reasons)
        else:
            assert {*reasons} == {None}


def test_steps_are_counted_in_32_bits(monkeypatch):
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 5))
    monkeypatch.setitem(platforms.TUNING, "hopper", TUNING)
    plan = sl.make_plan(sl.Causal(), 260, implementation="hopper")
    call = Call(plan, (128, 128), (128, 128), (plan.fwd_params, plan.bwd_params), 1.0, None)
    q = jax.ShapeDtypeStruct((1, 260, 2, 64), jnp.bfloat16)
    ((one,),) = plan.chains
    for blocks, reason in (
        (2**30 - 1, None),
        (2**30, "the Hopper kernels count steps in 32 bits, and this pass has more"),
    ):  # two of 64 in each
        many = dataclasses.replace(one, fwd_blocks=blocks, bwd_blocks=blocks)
        work = GroupPass(call, Operands(q, q, q), 0, 1, (many,))
        assert [launch.unsupported(work, kernel) for kernel in ("forward", "backward")] == [reason] * 2


@pytest.mark.parametrize(
    ("mask", "size", "name"),
    [
        (sl.Causal(), 128, "hopper"),
        (sl.Full(), 64, "hopper"),
        (sl.preset("sliding_window", window=512), 80, "hopper"),
        (sl.preset("sparse_transformer_strided"), 64, "hopper"),
        (sl.Causal(), 256, "hopper"),
        (sl.Causal(), 264, "xla"),
        (sl.preset("sliding_window", window=512), 192, "hopper"),
        (sl.Causal() & sl.Window(40), 128, "triton"),  # so little that blocks of 64 are better
    ],
)
def test_the_default_on_hopper_is_the_faster_one(monkeypatch, mask, size, name):
    gpu = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200", local_hardware_id=0)
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [gpu])
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    for module in (attention, implementations, cudnn, platforms):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    monkeypatch.setattr(bridge, "gluon_unsupported", lambda: None)
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 132))
    plan = sl.make_plan(mask, 4096)
    assert plan.implementation == "hopper" and traced_call.trace_call(plan, head_size=size).implementation == name
    left = "Triton runs backward (residue-major order, stride 128), because each key is in one block list"
    assert (left in sl.describe(plan)) == (mask == sl.preset("sparse_transformer_strided"))
    assert (
        attention.default_implementation(jnp.float32) == attention.default_implementation(jnp.bfloat16, 264) == "cudnn"
    )
    assert attention.default_implementation(jnp.float16, 72) == "hopper"
    exact = sl.make_plan(mask, 4096, bwd_params=sl.BwdParams(deterministic=True)).chains[0]
    assert {block_pass.bwd_shape for block_pass in exact} == {(64, 64)}
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version_info__", (0, 10, 2))
        assert attention.default_implementation(jnp.bfloat16) == "cudnn"
    gpu.compute_capability = "8.0"
    assert attention.default_implementation(jnp.bfloat16) == "cudnn"


def refused(dtype):
    """Why a call is refused, or None."""
    call = Call(None, (128, 128), (128, 128), (sl.FwdParams(), sl.BwdParams()), 1.0, None)
    q: Any = jax.ShapeDtypeStruct((1, 256, 2, 64), dtype)
    return hopper.unsupported(call, Operands(q, q, q))


GLUON = "it needs Gluon, which comes with triton from 3.6 on ("


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("", None),
        ("jaxlib.gpu_triton", "it needs jaxlib's gpu_triton ("),
        ("jaxlib.gpu_triton.create_tma_descriptor_parameter", f"from 0.11.1 on, and jax is {jax.__version__}"),
        ("triton.experimental.gluon._runtime", GLUON),
        ("triton.experimental.gluon._runtime.GluonASTSource", GLUON),
        ("triton.experimental.gluon.language.nvidia.hopper", GLUON),
    ],
)
def test_versions_that_do_not_fit(monkeypatch, lost, reason):
    """What jaxlib and Triton have in versions that do, here but for one module or name."""
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 5))
    monkeypatch.setattr(jaxlib, "gpu_triton", types.SimpleNamespace(create_tma_descriptor_parameter=None))
    if lost:
        monkeypatch.delattr(lost)
    if lost in sys.modules:
        monkeypatch.setitem(sys.modules, lost, None)
    found = refused("float16")
    assert found is None if reason is None else reason in (found or "")


def test_gpus_and_dtypes_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(bridge, "gluon_unsupported", lambda: None)
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 5))
    assert refused("float32") == "it computes in bfloat16 and float16, and query is float32"
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(86, 101376, 5))
    assert refused("float16") == "it needs compute capability 9.0, and this GPU has 8.6"


@pytest.mark.parametrize(("granularity", "size"), [(16, 64), (64, 64), (64, 192), (128, 64)])
def test_selections_of_few_queries_are_better_left_to_triton(monkeypatch, granularity, size):
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 5))
    plan = sl.make_plan(sl.Causal(), 512, implementation="hopper")
    params = plan.fwd_params, plan.bwd_params
    call = Call(plan, (128, 128), (128, 128), params, 1.0, None)
    q = jax.ShapeDtypeStruct((1, 512, 2, size), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 512 // granularity, 2, 64), jnp.int32)
    selection = jax.eval_shape(functools.partial(sl.Selection, block=128, granularity=granularity), ids)
    operands = Operands(q, q, q, selection=selection)
    reason = hopper.not_preferred(call, operands)
    one_group = (granularity, size) == (64, 64)
    assert reason is None if one_group or granularity == 128 else "computes the blocks of all" in (reason or "")
    notes = " ".join(hopper.notes(call, operands))
    assert ("Triton runs backward, because 64 queries select together" in notes) == one_group


@pytest.mark.parametrize("columns", [32, 64])
def test_dq_is_stored_without_bank_conflicts(columns):
    """Of what 16 threads store at a time, 8 bytes each, no two go to the same of 16 pairs of banks."""

    def worst(bases):
        place, lane = np.argsort(gluon_memory.elements_of(bases, columns)), np.arange(32)
        at = place.reshape(64, columns)[lane // 4, np.arange(0, columns, 8)[:, None] + 2 * (lane % 4)]
        return max(np.bincount(x).max() for x in (at // 2 % 16).reshape(-1, 16))

    bases = swapped_layout(64, columns).offset_bases
    assert worst(bases) == 1
    assert worst([[1, 4] if basis == [1, 20] else basis for basis in bases]) == 2


@pytest.mark.parametrize(
    ("masks", "length", "split"),
    [
        ((sl.Causal(), sl.Causal() & ~sl.Window(100)), 601, False),  # lists of heads differ
        (sl.preset("sparse_transformer_fixed", stride=32, summary=8), 1152, True),  # some keys only, added to all
    ],
)
def test_ranges_of_queries(launched, monkeypatch, masks, length, split):
    monkeypatch.setattr(schedule, "CACHED_BYTES", 0)
    monkeypatch.setattr(schedule, "MIN_RANGE", 128)
    found, cut = [], schedule.split_by_query_ranges

    def record(*args):
        order, pieces = cut(*args)
        found.append((args[-1], pieces))
        return order, pieces

    monkeypatch.setattr(launch, "split_by_query_ranges", record)
    case = Case("ranges", masks, length, heads=(4, 2), batch=2, split=split)
    cases.check(case, case.call("hopper"))
    assert {held for held, _ in found} == {64 * (2 + 2 + 4)}  # q, dout and dq
    cut_here = sum(pieces is not None for _, pieces in found)
    assert cut_here and launched.count("hopper_backward_kernel of pieces") == cut_here


# --- settings ---------------------------------------------------------------------------------------------------------


def test_head_sizes_are_rounded_up():
    sizes = {(40, 24): (64, 64, 64), (24, 72): (128, 128, 128), (136, 72): (256, 128, 192), (192, 192): (256, 256, 192)}
    sizes |= {(192, 128): (256, 128, 192), (200, 8): (256, 128, 256), (72, 200): (256, 256, 192)}
    assert {pair: settings.padded_head_sizes(*pair) for pair in sizes} == sizes


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("block", settings.STEP_KEYS)
def test_settings_fit(kernel, sizes, block):
    padded = settings.padded_head_sizes(*sizes)
    block = settings.tile_keys(block, padded.query_key)
    for part in {settings.GROUP_ROWS, settings.STEP_QUERIES[padded.query_key]}:
        stages = settings.num_stages(kernel, padded, block, part)
        assert 2 <= stages <= settings.MAX_STAGES and settings.TILE_ROWS % part == 0
        assert settings.shared_memory_bytes(kernel, stages, padded, block, part) + 1024 <= settings.SHARED_MEMORY
        fits = settings.shared_memory_bytes(kernel, stages + 1, padded, block, part) + 1024 <= settings.SHARED_MEMORY
        assert stages == settings.MAX_STAGES or not fits
    # By groups of 128 threads; Triton sets four warps aside for fetching.
    assert (
        128 * (settings.TILE_ROWS // settings.GROUP_ROWS * settings.CONSUMER_REGISTERS + settings.PRODUCER_REGISTERS)
        <= 65536
    )
    assert (
        settings.CONSUMER_REGISTERS % 8 == settings.PRODUCER_REGISTERS % 8 == 0 and settings.CONSUMER_REGISTERS <= 240
    )
