"""The gradients of selections of single queries on Hopper, interpreted where there is no GPU, held to float64.

`test_hopper_gpu_aot.py` compiles the kernel.
"""

import dataclasses
import functools
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton", reason="needs triton")

import sparse_layers as sl
from sparse_layers.ops.kernels.call import Call
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.gpu_attention import hopper, kv_outer
from sparse_layers.ops.kernels.gpu_attention.route import query_gather_unsupported
from sparse_layers.ops.kernels.hopper_gpu import query_gather, settings
from sparse_layers.ops.kernels.operands import Operands
from sparse_layers.ops.planning import platforms
from tests.ops import cases, huge_logits, test_selections
from tests.ops.kernels import gluon_interpreter

ON_GPU = jax.default_backend() == "gpu"


@pytest.fixture
def launched(monkeypatch, request):
    """The name and the constants of each kernel that was launched, also in plain Triton.

    Unless there is a GPU they are interpreted as on one, in an order of partitions that is each test's own.
    """
    found, call_gluon, call_triton = [], bridge.call_gluon, bridge.call_triton

    def gluon(kernel, programs, inputs, outputs, constants, *aliases):
        found.append((kernel.fn.__name__, constants))
        if ON_GPU:
            return call_gluon(kernel, programs, inputs, outputs, constants, *aliases)
        seed = zlib.crc32(request.node.name.encode())
        return gluon_interpreter.call(kernel, programs, inputs, outputs, constants, *aliases, seed=seed)

    def triton(kernel, grid, arrays, outputs, constants, *more):
        found.append((kernel.fn.__name__, constants))
        return call_triton(kernel, grid, arrays, outputs, constants, *more)

    monkeypatch.setattr(bridge, "call_gluon", gluon)
    monkeypatch.setattr(bridge, "call_triton", triton)
    # As for other tests of these kernels: plans are kept, and those of a length are for all.
    monkeypatch.setitem(platforms.TUNING, "hopper", platforms.Tuning(block_shapes=((128, 128),)))
    if not ON_GPU:
        monkeypatch.setattr(bridge, "gluon_unsupported", lambda: None)
        monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, 5))
    return found


def tile_sizes(launched):
    """Queries in a turn, pieces of a batch entry, and keys of a tile; no other kernel had a part in the gradients."""
    assert not {"hopper_backward_kernel", "dq_kernel", "dkv_kernel"} & {name for name, _ in launched}
    (found,) = {
        (of["F"].T, of["L"].NUM_SPLITS, of["KV"].BLOCK) for name, of in launched if name == "query_gather_kernel"
    }
    return found


# --- values and gradients --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Case(test_selections.Case):
    """A call whose gradients are gathered.

    Nobody chose the second block, and all the first one, but for each seventh query, which chose none, unless k is 1;
    there are numbers that come twice, that are none, and out of range. What nobody asked for may be ``poisoned``.
    """

    dtype: str = "bfloat16"
    sizes: tuple[int, int] = (64, 64)
    batch: int = 1
    block: int = 64
    k: int = 4
    poisoned: bool = False

    def ids(self, seed=0):
        ids, columns = super().ids(seed), -(-self.shape[1] // self.block)
        ids[ids == 1] = -1
        ids[:, ::3, :, -1], ids[:, 1::3, :, -1] = columns, 1 << 20
        ids[..., 0] = 0
        if self.k > 1:
            ids[:, 2::7] = -1
        return ids

    def arrays(self):
        arrays = super().arrays()
        if self.poisoned:
            for name in ("key", "value"):
                arrays[name][:, self.block : 2 * self.block] = np.nan
            for name in ("dout", "dlse"):
                arrays[name][:, 2::7] = np.nan
        return arrays


def check(case, answers):
    """To the budgets of single numbers, which the largest summand sets; and all together to a rounding of the norm."""
    cases.check(case, answers)
    right, _, _ = cases.expected(case)
    for name in ("dq", "dk", "dv"):
        error = np.linalg.norm(np.asarray(answers[name], np.float64) - right[name]) / np.linalg.norm(right[name])
        assert error <= float(jnp.finfo(case.dtype).eps) / 2, f"{name}: off by {error:.3g} of its norm"


HOLES = jnp.asarray(np.random.default_rng(0).random((4, 140, 300)) < 0.3)
TABLE = sl.Array(np.random.default_rng(0).random((130, 520)) < 0.3)
WIDE = (128, 128)
CASES = [
    # The first of these lists goes around all that is held more than twice.
    Case("blocks-of-64", sl.Causal(), 700, heads=(2, 1)),
    Case("blocks-of-128", sl.Causal(), 400, block=128, dtype="float16", scope="N"),
    Case("wide-64", sl.Window(250, 100), 330, 250, sizes=WIDE, heads=(2, 1), scope="N", sinks=True),
    Case("wide-128", sl.Causal(), 300, sizes=WIDE, block=128, scope="1", dtype="float16"),
    Case("blocks-of-256", sl.Window(500), 130, 700, block=256, heads=(2, 1), scope="N"),
    Case("all-may", sl.Full(), 70, 260, heads=(4, 1), batch=2),
    Case("scale-negative", sl.Causal(), 200, heads=(2, 2), scale=-0.3, batch=2),
    Case("soft-cap", (sl.Causal(), sl.Window(60)), 200, soft_cap=1.5, scope="1", sinks=True),
    Case("soft-cap-128", sl.Causal(), 200, block=128, heads=(2, 1), soft_cap=1.5, scale=-0.3),
    Case("table", TABLE, 130, 520, block=256, heads=(2, 2)),
    Case("run-time", HOLES, 140, 300, block=128, batch=2),
    Case("run-time-64", HOLES[:1], 140, 300, scope="1", k=9),
    Case("one", sl.Full(), 70, 130, scope="1", k=1),  # whose list ends with the entries
    Case("many", sl.Causal(), 100, heads=(2, 1), k=40),  # so many that they are sorted
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(launched, case):
    check(case, case.call("hopper"))
    _, _, keys = tile_sizes(launched)
    assert keys == min(case.block, 128)


def test_huge_logits(launched):
    case = Case("huge", sl.Causal(), 200, scale=3e7, heads=(2, 1))
    huge_logits.check(case, case.call("hopper"))
    assert tile_sizes(launched)


@pytest.mark.skipif(ON_GPU, reason="there, partitions take no turns")
@pytest.mark.parametrize("block", [64, 128])
def test_every_order_of_partitions(launched, monkeypatch, block):
    """Nobody is so late, or so early, that what others still read is overwritten."""
    case, run = Case("orders", sl.Causal(), 420, block=block, heads=(1, 1)), gluon_interpreter.run
    call = case.compiled("hopper")
    for seed in range(6):
        monkeypatch.setattr(gluon_interpreter, "run", lambda a, b, c, d, _, seed=seed: run(a, b, c, d, seed))
        check(case, call())
    assert tile_sizes(launched)[2] == block


@pytest.mark.parametrize("block", [64, 128])
def test_poison_that_nobody_asked_for(launched, block):
    """Of blocks that nobody chose, and in what comes back for queries without one."""
    case = Case("clean", sl.Causal(), 200, block=block, heads=(2, 1))
    check(case, dataclasses.replace(case, poisoned=True).call("hopper"))
    assert tile_sizes(launched)[2] == block


@pytest.mark.parametrize(("limit", "k"), [(2, 3), (3, 4)])  # JAX keeps programs, by their shapes
@pytest.mark.parametrize(("block", "heads"), [(64, (2, 1)), (128, (4, 2))])
def test_long_lists_are_cut(launched, monkeypatch, block, heads, limit, k):
    """Into pieces that begin with a step of either group, of which some have free entries only, or none."""
    monkeypatch.setattr(query_gather, "MAX_STEPS", limit)
    case = Case("cut", sl.Causal(), 530, block=block, heads=heads, k=k)
    check(case, case.call("hopper"))
    _, pieces, _ = tile_sizes(launched)
    assert pieces > 2 * heads[0] * -(-530 // block)


@pytest.mark.parametrize(("length", "each"), [(210, 70), (211, 71)])
def test_queries_are_taken_in_turns(launched, monkeypatch, length, each):
    """The last of 211 are filled up; masks go by the place of a query among all, and dk and dv are sums over turns."""
    monkeypatch.setattr(kv_outer, "MIN_WORKSPACE_BYTES", 0)
    monkeypatch.setattr(query_gather, "LIST_BYTES", 500)
    case = Case("turns", sl.Causal() & sl.Window(150), length, sinks=True)
    check(case, case.call("hopper"))
    queries, _, _ = tile_sizes(launched)
    assert queries == each


# --- under JAX's transformations -------------------------------------------------------------------------------------


def gradients(implementation, block=64):
    """dq, dk and dv, of attention twice over, computed again in the backward pass."""

    def loss(q, k, v, ids):
        chosen, options = sl.Selection(ids, block=block), {"implementation": implementation}
        attend = jax.checkpoint(lambda q: sl.block_sparse_attention(q, k, v, sl.Causal(), selection=chosen, **options))
        out, _ = jax.lax.scan(lambda q, _: (attend(q), None), q, None, length=2)
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))


def arguments(number, length):
    """Query, key, value and ids of so many batch entries; JAX keeps programs, by their shapes."""
    draw = np.random.default_rng(0)
    shapes = [(number, length, heads, 64) for heads in (4, 2, 2)]
    q, k, v = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    return q, k, v, jnp.asarray(draw.integers(-1, 3, (number, length, 2, 3)), jnp.int32)


@pytest.mark.parametrize(("how", "length"), [("scan", 140), ("vmap", 141), ("vmap-ids", 142), ("x64", 143)])
def test_transformations(launched, how, length):
    q, k, v, ids = arguments(2, length)
    call, given = (lambda f: f), (q, k, v, ids)
    if how == "vmap":
        call, given = jax.vmap, [x[:, None] for x in given]
    if how == "vmap-ids":
        call, given = (lambda f: jax.vmap(f, (None, None, None, 0))), (q[:1], k[:1], v[:1], ids[:, None])
    with jax.enable_x64(how == "x64"):
        actual, wanted = (call(gradients(name))(*given) for name in ("hopper", "xla"))
    for ours, right in zip(actual, wanted, strict=True):
        ours, right = np.asarray(ours, np.float64), np.asarray(right, np.float64)
        # Of two calls in half precision, one after the other.
        assert np.linalg.norm(ours - right) <= 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.linalg.norm(right)
    assert tile_sizes(launched)[2] == 64


@pytest.mark.parametrize("shared", [False, True])
def test_shard_map(launched, shared):
    """Keys of each device, or the same for all: JAX knows what differs by device."""
    mesh = jax.sharding.AbstractMesh((2,), ("batch",), (jax.sharding.AxisType.Auto,))
    own, keys = P("batch"), P() if shared else P("batch")
    function = jax.shard_map(
        gradients("hopper"), mesh=mesh, in_specs=(own, keys, keys, own), out_specs=(own, keys, keys)
    )
    q, k, v, ids = arguments(2, 150 + shared)
    found = jax.eval_shape(function, q, *((x[:1] for x in (k, v)) if shared else (k, v)), ids)
    assert [x.shape[0] for x in found] == ([2, 1, 1] if shared else [2, 2, 2])
    assert tile_sizes(launched)[2] == 64


# --- who is served, and what others do -------------------------------------------------------------------------------


def call_of(sizes=(64, 64), block=64, granularity=1, documents=False, deterministic=False):
    """(call, operands) as backends get them."""
    t = 512
    plan = sl.make_plan(sl.Causal(), t, implementation="hopper", bwd_params=sl.BwdParams(deterministic=deterministic))
    params = plan.fwd_params, plan.bwd_params
    call = Call(plan, (128, 128), (128, 128), params, 1.0, None)
    q, v = (jax.ShapeDtypeStruct((1, t, 2, size), jnp.bfloat16) for size in sizes)
    selected, ids = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, t // granularity, 2, 4), (1, t)))
    selection = jax.eval_shape(functools.partial(sl.Selection, block=block, granularity=granularity), selected)
    arrays: Any = {
        "query": q,
        "key": q,
        "value": v,
        "selection": selection,
        "segments": (ids, ids) if documents else None,
    }
    return call, Operands(**arrays)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"sizes": (128, 128), "block": 128}, None),
        ({"block": 512}, None),  # cut, see `kv_outer.subblocks_per_block`
        ({"sizes": (96, 96)}, "heads of 64 or 128, got 96$"),
        ({"sizes": (128, 64)}, "got 128 of q and k, 64 of v$"),
        ({"block": 32}, "blocks of 64, 128, 256, 384 or 512 keys, got 32$"),
        ({"block": 192}, "keys, got 192$"),
        ({"documents": True}, "takes no segment ids"),
        ({"deterministic": True}, "dq in any order"),
        ({"granularity": 16}, "need single queries that select"),
    ],
)
def test_unsupported_calls(launched, options, reason):
    """Then Hopper is preferred, and what is said to be left to plain Triton is the forward pass at most."""
    call, operands = call_of(**options)
    found, not_preferred = query_gather_unsupported(call, operands), hopper.not_preferred(call, operands)
    notes = hopper.notes(call, operands)
    backward = [note for note in notes if re.search(r"\bbackward\b.*, because", note)]
    if reason is None:
        assert found is None and not_preferred is None and not backward
    elif "granularity" in options:
        assert re.search(reason, found or "") and (not_preferred or "").endswith("computes the blocks of all")
        assert len(backward) == 1
    else:  # the reason against gathering is that against the implementation, and that of the launches of others
        assert re.search(reason, found or "") and (not_preferred or "").endswith(f"computes the blocks of all; {found}")
        gathered = "Triton runs backward if neighbouring queries disagree"
        assert [note for note in notes if note.startswith(gathered)] == [f"{gathered}, because {found}"]
        assert any("backward if neighbouring queries agree" in note for note in backward)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "query_gather_kernel"),
        ({"bwd_params": sl.BwdParams(deterministic=True)}, "dkv_kernel"),
        ({"segment_ids": np.zeros((1, 256), np.int32)}, "dkv_kernel"),
    ],
)
def test_what_it_does_not_is_done_by_others(launched, options: dict[str, Any], kernel):
    q, ids = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16), np.zeros((1, 256, 1, 3), np.int32)

    def loss(q):
        chosen = sl.Selection(ids, block=64)
        out = sl.block_sparse_attention(q, q, q, sl.Causal(), selection=chosen, implementation="hopper", **options)
        return out.sum()

    jax.eval_shape(jax.grad(loss), q)
    assert {"query_gather_kernel", "dkv_kernel"} & {name for name, _ in launched} == {kernel}


@pytest.mark.parametrize("size", settings.GATHER_HEAD_SIZES)
@pytest.mark.parametrize("block", settings.STEP_KEYS)
def test_settings_fit(size, block):
    sizes = settings.PaddedSizes(size, size, size)
    stages = settings.num_stages("query_gather", sizes, block)
    step = 2 if block == settings.GROUP_ROWS else 1  # each of two groups has its own
    assert 2 <= stages <= settings.MAX_STAGES and stages % step == 0
    assert settings.shared_memory_bytes("query_gather", stages, sizes, block) + 1024 <= settings.SHARED_MEMORY
    fits = settings.shared_memory_bytes("query_gather", stages + step, sizes, block) + 1024 <= settings.SHARED_MEMORY
    assert stages + step > settings.MAX_STAGES or not fits
    computing, fetching = settings.GATHER_REGISTERS
    assert 128 * (2 * computing + fetching) <= 65536 and computing % 8 == fetching % 8 == 0
