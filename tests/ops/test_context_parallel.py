"""The op with context parallelism: values, gradients, and every byte that devices exchange.

The number of devices is fixed when JAX starts, so what needs eight has a process of its own: this file as a program.
"""

import collections
import contextlib
import dataclasses
import functools
import re
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_layers as sl
from sparse_layers import linen
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.planning import context_parallel, costs
from sparse_layers.ops.planning.context_parallel import count_remote_keys, padded_length, plan_exchanges
from sparse_layers.ops.planning.exchanges import TokenBytes
from sparse_layers.ops.planning.platforms import TUNING
from sparse_layers.ops.select import select_blocks
from sparse_layers.tools.oracle import DenseAttention, in_order, same_segment
from tests.arrays import strict_promotion
from tests.ops.cases import COMPILER, TINY
from tests.ops.kernels import triton_interpreter
from tests.programs import ALL_CASES, on_devices

H = 8
STRIDED = sl.preset("sparse_transformer_strided", stride=16)
FIXED = sl.preset("sparse_transformer_fixed", stride=16, summary=4)
STREAMING = sl.preset("streaming", window=16, sinks=4)
DILATED = sl.Causal() & ((sl.Window(31) & sl.Strided(6)) | sl.Columns(16, 14) | sl.Prefix(2))
STRIDES = (sl.Causal() & sl.Strided(8), sl.Causal() & (sl.Strided(16) | sl.Window(3)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, over how many devices along the sequence, batch and heads, and what it must not cost less than to try."""

    mask: Any
    length: int = 64
    devices: int = 4
    heads: tuple[int, int] = (4, 2)
    batch: int = 1
    tensor: int = 1
    kind: AxisType = AxisType.Auto
    extras: bool = False  # sinks, segment ids and a soft cap
    order: bool = False  # order ids
    bias: bool = False  # a table and slopes
    implementation: str = "xla"
    kv_len: int | None = None
    by: str = ""  # words of the exchanges, which are then chosen as if only pairs cost anything
    chosen: int = 0  # granularity of the selection, or 0 for none
    entries: int = 1  # of the batch, on each device


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# A program has a branch for each device, so few devices compile soonest.
CASES = {
    "causal": Case(sl.Causal(), extras=True),
    "causal, zigzag": Case(sl.Causal(), 128, 2, extras=True, order=True, by="zigzag"),
    "zigzag over three devices": Case(sl.Causal(), 96, 3, by="zigzag"),
    "a window over several devices, ragged": Case(sl.Causal() & sl.Window(30), 77, 8, (4, 1), extras=True),
    "a window to both sides": Case(sl.Window(9, 20), 60, kind=AUTO, batch=2, bias=True),
    "fewer tokens than devices": Case(sl.Causal(), 5, 8),
    "documents that cross": Case(sl.Causal() & sl.BlockDiagonal(25), 128, kind=EXPLICIT, extras=True),
    "strided, by batch and heads": Case(STRIDED, 128, 2, (8, 4), 2, 2, EXPLICIT, by="queries and keys, by residue"),
    "strided, padded": Case(STRIDED, 250, extras=True, order=True, by="queries and keys, by residue"),
    "strided, padded on explicit axes": Case(
        STRIDED, 112, 4, (8, 4), 2, kind=EXPLICIT, bias=True, by="queries and keys, by residue"
    ),
    "strided, keys of all, zigzag": Case(
        STRIDED, 280, 3, (4, 1), batch=2, by="all keys, by residue of 16; queries in zigzag order"
    ),
    "zigzag, padded": Case(sl.Causal(), 61, 4, by="zigzag", bias=True),
    "strided, one residue each": Case(sl.preset("strided", local_attn_ctx=8), 64, 8, by="queries and keys, by residue"),
    "a dilated window": Case(DILATED, 128, 2, extras=True, by="36 before, by residue of 6.*gathered.*tokens 0 to 1 "),
    "a dilated window to both sides, ragged": Case(
        sl.Strided(4) & sl.Window(9, 14), 77, 4, by="12 before and 14 behind"
    ),
    "halos of two strides, merged for a third": Case(
        (sl.Causal() & (sl.Strided(9) & sl.Window(36) | sl.Strided(10) & sl.Window(40)), sl.Causal() & sl.Window(90)),
        *(480, 4),
        by="^keys of neighbors, 90 before, by residue of 90$",
    ),
    "two strides, keys of all": Case(
        STRIDES, 144, 3, extras=True, by="^((?!all).)*all keys, by residue of 16((?!all).)*$"
    ),
    "two strides, padded": Case(
        sl.Causal() & (sl.Strided(6) | sl.Strided(8)), 110, 5, by="^all keys, by residue of 24[^,]*$"
    ),
    # Gathered keys have no bias in the parts of the others.
    "fixed, zigzag": Case(FIXED, 128, 2, extras=True, bias=True, by="own keys only.*gathered.*zigzag"),
    "fixed, periods cut": Case(FIXED, 100, 3, by="gathered"),
    "fixed, the last period cut": Case(sl.preset("sparse_transformer_fixed", stride=32, summary=6), 78, 3, (2, 1)),
    "sinks": Case(STREAMING, 128, 8, (8, 1), kind=EXPLICIT),
    "masks differ by head": Case((STRIDED, sl.Full()), 128, 4, (4, 2), tensor=2, by="queries and keys, by residue"),
    # Answered by JAX, though all that is asked there is traced, on a mesh.
    "jax.numpy": Case(sl.from_mask_mod(lambda b, h, q, k: (jnp.abs(q - k) < 9) & (q >= k)), 64, 4, tensor=2),
    "jax.numpy, reference": Case(
        sl.from_mask_mod(lambda b, h, q, k: jnp.abs(q - k) < 9), 40, 2, implementation="reference", kind=EXPLICIT
    ),
    "a table": Case(np.random.default_rng(0).random((40, 40)) < 0.2, 40, batch=2),
    "a mask known at run time": Case(jnp.asarray(np.random.default_rng(0).random((4, 40, 40)) < 0.3), 40, bias=True),
    "nothing": Case(sl.Empty(), 40),
    "other keys": Case(sl.Window(12, 6), 40, kv_len=56, bias=True),
    "chosen": Case(sl.Causal(), 128, chosen=16),
    "chosen, ragged": Case(sl.Causal(), 61, chosen=1),
    "TPU kernels": Case(STREAMING, 64, 2, implementation="pallas_tpu"),
    "order ids": Case(sl.Full(), 77, 3, order=True),
    "GPU kernels": Case(STREAMING, 64, 2, implementation="triton", extras=True, order=True),
    "GPU kernels, zigzag": Case(sl.Causal(), 512, 2, (2, 1), implementation="triton", by="zigzag"),
}
# Each second preset over 2 or 4 devices in turn; in every second group of three, exchanges cost nothing. The others are
# divided by the same rules, which `test_devices_share_a_mask` holds for all.
PRESETS = {
    name: Case(
        # Behind a grid there are other tokens.
        sl.preset(name, **TINY.get(name, {}), **{"offset": 0} if "offset" in sl.preset_options(name) else {}),
        length=(77, 64)[i % 2],  # devices have to divide it on Explicit axes
        devices=(2, 4, 2)[i % 3],
        entries=2,
        kind=(AUTO, EXPLICIT)[i % 2],
        by=".*" * (i // 3 % 2),
    )
    for i, name in enumerate(list(sl.presets())[::2])
}
# Every byte of these is counted.
COUNTED = {
    "window over several devices": Case(sl.Causal() & sl.Window(100), 256, 8),
    "window to both sides": Case(sl.Window(9, 5), 256, 4),
    "documents": Case(sl.BlockDiagonal(100), 512, 4),
    "strided, padded": Case(STRIDED, 4000, 8),
    "fixed": Case(FIXED, 1024, 4),
    "global columns": Case(STREAMING, 1024, 4),
    "zigzag": Case(sl.Causal(), 128, 4, by="zigzag"),
    "nothing": Case(sl.Empty(), 64, 8),
}


def arrays(case):
    draw, (n, k), b = np.random.default_rng(1).standard_normal, case.heads, case.batch * case.entries
    t, s = case.length, case.kv_len or case.length
    shapes = [(b, t, n, H), (b, s, k, H), (b, s, k, H), (b, t, n, H), (b, t, n)]
    return [jnp.asarray(draw(shape).astype(np.float32)) for shape in shapes]


def mesh_of(case):
    shape = case.batch, case.devices, case.tensor
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, ("data", "context", "heads"), axis_types=(case.kind,) * 3, devices=devices)


SPEC = P("data", "context", "heads")


def attend(case, ids=None, mask=None, chosen=None, spec=None, order=None):
    options: dict[str, Any] = {"segment_ids": ids, "order_ids": order, "return_lse": True}
    options["implementation"] = case.implementation
    if case.extras:
        options["logits_soft_cap"] = 3.0
    if chosen is not None:
        options["selection"] = sl.Selection(chosen, block=16, granularity=case.chosen)
    if case.kind == AUTO:
        options["query_sharding"] = SPEC if spec is None else spec
    mask = case.mask if mask is None else mask

    def call(q, k, v, sinks, table=None):
        bias = None if table is None else sl.DistanceBias(table, 9, sl.alibi(case.heads[0]).slopes)
        return sl.block_sparse_attention(q, k, v, mask, sinks=sinks, bias=bias, **options)

    return call


def check_case(case):
    args, (t, s), n = arrays(case), (case.length, case.kv_len or case.length), case.heads[0]
    rng = np.random.default_rng(0)
    sinks = jnp.linspace(-1, 1, n) if case.extras else None
    ids = np.sort(rng.integers(-1, 3, (len(args[0]), t)), axis=1).astype(np.int32) if case.extras else None
    mask = case.mask if isinstance(case.mask, jax.Array) else None
    allowed = np.asarray(mask) if mask is not None else np.stack([m.dense(t, s) for m in sl.as_masks(case.mask)])
    allowed = np.tile(allowed, (n // len(allowed), 1, 1))[None]
    if ids is not None:
        allowed = allowed & same_segment(ids, ids)
    order = rng.integers(0, 9, (len(args[0]), t), np.int32) if case.order else None
    if order is not None:
        allowed = allowed & in_order(order, order)
    chosen = None
    if case.chosen:
        blocks = -(-s // 16)
        chosen = rng.integers(-1, blocks, (len(args[0]), t // case.chosen, 1, 3)).astype(np.int32)
        pairs = (chosen[:, :, 0, :, None] == np.arange(blocks)).any(2).repeat(case.chosen, 1).repeat(16, 2)[..., :s]
        allowed = allowed & pairs[:, None]
    *qkv, dout, dlse = args
    table = jnp.asarray(rng.standard_normal((n, 14)), jnp.float32) if case.bias else None
    bias = {"table": table, "center": 9, "slopes": sl.alibi(n).slopes} if case.bias else {}
    options = bias | {"soft_cap": 3.0 if case.extras else None, "sinks": sinks}
    right = DenseAttention(*qkv, allowed, dout, dlse, **options).answers
    names = ["out", "lse", "dq", "dk", "dv", *["dsinks"] * case.extras, *["dtable"] * case.bias]

    def program(q, k, v, sinks, table, ids, order, mask, chosen, dout, dlse):
        results, pullback = jax.vjp(attend(case, ids, mask, chosen, order=order), q, k, v, sinks, table)
        return [*results, *jax.tree.leaves(pullback((dout, dlse)))]

    mesh = mesh_of(case)
    placed = [*qkv, sinks, table, ids, order, mask, chosen, dout, dlse]
    if case.kind == EXPLICIT or not (t % case.devices or case.kv_len):
        by_token = dict.fromkeys((0, 1, 2, 9, 10), SPEC)
        placed = [
            x if x is None else jax.device_put(x, NamedSharding(mesh, by_token.get(i, P())))
            for i, x in enumerate(placed)
        ]
    # Triton's interpreter promotes.
    strict = contextlib.nullcontext() if case.implementation == "triton" else strict_promotion()
    with jax.set_mesh(mesh), strict:
        actual = jax.jit(program, compiler_options=COMPILER)(*placed)
    for name, ours in zip(names, actual, strict=True):
        np.testing.assert_allclose(ours, right[name], atol=3e-5, rtol=1e-4, err_msg=name)


# --- every byte ------------------------------------------------------------------------------------------------------

BYTES = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1}
KINDS = r"(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter|collective-broadcast)"


def received(text, devices):
    """The numbers of collectives in forward and backward of a compiled program, and the bytes that devices receive."""
    counts, total = (collections.Counter(), collections.Counter()), np.zeros((2, devices))
    for line in text.splitlines():
        found = re.search(rf"= (.*?) {KINDS}(-start)?\(", line)
        if found is None:
            continue
        types, kind, begun = found.groups()
        arrays = [x for x in re.findall(r"(\w+)\[([\d,]*)\]", types) if not (begun and x == ("u32", ""))]
        arrays = arrays[len(arrays) // 2 :] if begun else arrays  # before what comes out stands what goes in
        size = sum(BYTES[dtype] * int(np.prod([int(n) for n in shape.split(",") if n])) for dtype, shape in arrays)
        back = int("transpose(" in line or "reduce" in kind)  # what is summed are gradients
        counts[back][kind] += 1
        if kind == "collective-permute":
            for source, target in re.findall(r"\{(\d+),(\d+)\}", line[line.index("source_target_pairs") :]):
                total[back, int(target)] += size * (source != target)
        else:  # of what comes out, all but a device's own; of a sum that is scattered, one from each other device
            shares = {"all-gather": 1 - 1 / devices, "all-to-all": 1 - 1 / devices, "reduce-scatter": devices - 1}
            shares["all-reduce"] = 2 * (1 - 1 / devices)  # scattered, and then gathered
            total[back] += round(size * shares[kind])
    return counts, total


def planned(case, size, itemsize):
    """The bytes that devices receive forward and backward, by the plan: those that `received` must find."""
    n, k = case.heads
    token, total = TokenBytes.of(n, k, size, itemsize), np.zeros((2, case.devices))
    for exchange, _ in plan_exchanges(sl.as_masks(case.mask), case.length, case.devices, case.implementation, n // k):
        total += np.transpose([exchange.received(rank).nbytes(token) for rank in range(case.devices)])
    return total


def results_and_gradients(case, spec, q, k, v, *pull):
    results, pullback = jax.vjp(lambda *x: attend(case, spec=spec)(*x, None), q, k, v)
    return results, pullback(pull)


def check_bytes(case):
    mesh = mesh_of(case)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in arrays(case)]
        program = jax.jit(functools.partial(results_and_gradients, case, None), compiler_options=COMPILER)
        text = program.lower(*placed).compile().as_text()
    found, (n, k) = received(text, case.devices)[1], case.heads
    length = padded_length(sl.as_masks(case.mask), case.length, case.devices, "xla", n // k)
    surplus, token = (
        found - planned(dataclasses.replace(case, length=length), H, 4),
        TokenBytes.of(n, k, H, 4),
    )
    # Tokens that make room for others before the end go to the next device, and back: all arrays of some of them.
    most = (length - case.length) * (token.keys + 2 * token.query + 2 * token.lse)
    assert (surplus >= 0).all() and (surplus <= most).all(), surplus


def check_without_batch():
    """The axes of [T, N, H] are those of the sequence and of the heads."""
    case = Case(sl.Causal() & sl.Window(9), 128, 4, tensor=2)
    placed, mesh = [x[0] for x in arrays(case)], mesh_of(case)
    with jax.set_mesh(mesh):
        text = (
            jax.jit(functools.partial(results_and_gradients, case, P("context", "heads")))
            .lower(*placed)
            .compile()
            .as_text()
        )
    np.testing.assert_array_equal(received(text, 8)[1].reshape(2, 4, 2).sum(2), planned(case, H, 4))


def check_no_entries():
    """A batch may be empty."""
    for mask in (STREAMING, STRIDED, FIXED, sl.Causal()):
        case = Case(mask, entries=0)
        with jax.set_mesh(mesh_of(case)):
            results, gradients = jax.jit(functools.partial(results_and_gradients, case, None))(*arrays(case))
        assert [x.shape[0] for x in (*results, *gradients)] == [0] * 5


def check_refusals():
    case = Case(sl.Causal(), 120, chosen=16)  # of 30 queries on a device
    chosen = jnp.zeros((1, 8, 1, 3), jnp.int32)
    with (
        jax.set_mesh(mesh_of(case)),
        pytest.raises(ValueError, match="granularity must divide the 30 queries of a device"),
    ):
        attend(case, chosen=chosen)(*arrays(case)[:3], None)
    grid = Case(sl.Causal(), 60)
    with jax.set_mesh(mesh_of(grid)), pytest.raises(NotImplementedError, match="distances on a grid need whole seq"):
        bias = sl.grid_bias((6, 10), jnp.zeros((1, 3, 3)))
        sl.block_sparse_attention(*arrays(grid)[:3], sl.Causal(), bias=bias, query_sharding=SPEC)
    across, order = P(None, ("context", "data")), "axes of a sequence must be in the order of the mesh"
    with jax.set_mesh(mesh_of(case)), pytest.raises(ValueError, match=f"query_sharding: {order}"):
        attend(case, spec=across)(*arrays(case)[:3], None)
    typed = dataclasses.replace(case, kind=EXPLICIT)
    with jax.set_mesh(mesh_of(typed)), pytest.raises(ValueError, match=f"the sharding of query: {order}"):
        attend(typed)(*(jax.device_put(x, across) for x in arrays(typed)[:3]), None)


def check_choices():
    """Scorers select the blocks of one device, for documents and lengths that devices do not divide."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AUTO, AUTO))
    scorer = sl.InfLLM(block=32, count=3, local=1, dense_below=0, pool_size=16, pool_stride=8)
    q, k, *_ = arrays(Case(sl.Causal(), 197, batch=2))
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 197)), axis=1).astype(np.int32)
    want = select_blocks(scorer, q, k, ids).ids
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda q, k: select_blocks(scorer, q, k, ids, query_sharding=P("data", "context")).ids)(q, k)
    np.testing.assert_array_equal(np.sort(actual, -1), np.sort(want, -1))


def check_layers():
    """Residual blocks give the results of one device, and the same gradients of weights."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AUTO, AUTO))
    x, dout = np.random.default_rng(0).standard_normal((2, 2, 61, 32)).astype(np.float32)
    options = {"num_heads": 4, "num_kv_heads": 2, "features": 32, "seq_len": 61, "use_sinks": True}
    options |= {"pattern": sl.Causal() & sl.Window(20), "relative_bias": sl.LearnedBias(5)}

    def blocks(sharding):
        block = linen.SparseTransformerBlock(**options, query_sharding=sharding)
        yield block.init(jax.random.key(0), x), block.apply
        graph, weights = nnx.split(sl.SparseTransformerBlock(**options, query_sharding=sharding, rngs=nnx.Rngs(0)))
        yield weights, lambda weights, x: nnx.merge(graph, weights)(x)

    for (weights, alone), (_, spread) in zip(blocks(None), blocks(P("data", "context")), strict=True):
        want, pullback = jax.vjp(alone, weights, x)
        with jax.set_mesh(mesh):
            program = jax.jit(lambda *args, spread=spread: jax.vjp(spread, *args), compiler_options=COMPILER)
            actual, back = program(weights, x)
            gradients = jax.jit(back, compiler_options=COMPILER)(dout)
        for one, other in zip(*map(jax.tree.leaves, ((actual, gradients), (want, pullback(dout)))), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-4)


def check_dead_rows():
    """Cotangents of queries that see no key are dropped, also NaN; here only the last device has no such query."""
    mask = sl.Causal() & ~sl.Window(7)
    q, k, v, *_ = arrays(Case(mask, 24, kv_len=16))

    def loss(q, k, v, spec=None):
        _, lse = sl.block_sparse_attention(q, k, v, mask, return_lse=True, query_sharding=spec)
        return jnp.where(jnp.isfinite(lse), jnp.logaddexp(lse, 0 * lse), 0).sum()

    want = jax.grad(loss, (0, 1, 2))(q, k, v)
    with jax.set_mesh(jax.make_mesh((2,), ("context",), axis_types=(AUTO,))):
        actual = jax.jit(jax.grad(functools.partial(loss, spec=P(None, "context")), (0, 1, 2)))(q, k, v)
    for one, other in zip(actual, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
        assert np.isfinite(other).all()


def check_order(case, barriers):
    """Chunks in zigzag order are computed one after the other, before other parts. XLA orders these."""
    with jax.set_mesh(mesh_of(case)):
        traced = jax.make_jaxpr(functools.partial(results_and_gradients, case, None))(*arrays(case))
    assert str(traced).count("optimization_barrier") == 2 * barriers  # forward and backward


def main(which):
    """Prints what fails on eight devices."""
    bridge.call_triton, hardware.local_device = triton_interpreter.call, lambda: hardware.Device(90, 232448, 132)
    checks = {name: functools.partial(check_case, case) for name, case in globals()[which].items()}
    if which == "CASES":
        checks |= {f"bytes, {name}": functools.partial(check_bytes, case) for name, case in COUNTED.items()}
        barriers = {"fixed, zigzag": 2, "causal, zigzag": 1, "strided, padded": 0}
        checks |= {f"order, {x}": functools.partial(check_order, CASES[x], n) for x, n in barriers.items()}
        alone = check_without_batch, check_no_entries, check_refusals, check_choices, check_layers, check_dead_rows
        checks |= {check.__name__: check for check in alone}
    prices = context_parallel.RECEIVED_ROW, costs.PAIRS_PER_ROW, costs.PAIRS_PER_CELL
    tuned = TUNING["xla"]
    for name, check in checks.items():
        case = next(iter(getattr(check, "args", ())), None)
        free = case is not None and case.by
        context_parallel.RECEIVED_ROW, costs.PAIRS_PER_ROW, costs.PAIRS_PER_CELL = (0, 0, 0) if free else prices
        TUNING["xla"] = dataclasses.replace(tuned, block_shapes=((8, 8),), step_cost=0) if free else tuned
        plan_exchanges.cache_clear()
        padded_length.cache_clear()
        try:
            if free:
                options = case.devices, case.implementation, case.heads[0] // case.heads[1]
                length = padded_length(sl.as_masks(case.mask), case.length, *options)
                found = plan_exchanges(sl.as_masks(case.mask), length, *options)
                assert re.search(case.by, ", ".join(str(part.exchange) for part in found)), found
            check()
        except Exception:
            print(f"--- {name}\n{traceback.format_exc()}")


@pytest.mark.parametrize("name", sl.presets())
def test_devices_share_a_mask(monkeypatch, name):
    """All devices together compute each allowed pair once, over all exchanges."""
    masks = sl.as_masks(sl.preset(name, **TINY.get(name, {})))
    for devices, length, price in ((2, 64, 0), (3, 48, 0), (4, 61, 4), (8, 64, 0), (8, 5, 4)):
        monkeypatch.setattr(context_parallel, "RECEIVED_ROW", price)
        plan_exchanges.cache_clear()
        found = np.zeros((len(masks), length, length), int)
        found_parts = plan_exchanges(masks, length, devices, "xla")
        for exchange, parts in ((chunk, part.masks) for part in found_parts for chunk in part.exchange.chunks):
            for rank in range(devices):
                orders, sizes = exchange.row_orders(rank), (exchange.q_rows, exchange.kv_rows)
                q, k = (order.token(np.arange(size)) for order, size in zip(orders, sizes, strict=True))
                (q_there, q), (k_there, k) = (((x >= 0) & (x < length), x) for x in (q, k))
                for head, part in enumerate(parts):
                    pairs = exchange.local_mask(part, rank).dense(*sizes)[q_there]
                    assert not pairs[:, ~k_there].any()
                    np.add.at(found[head], np.ix_(q[q_there], k[k_there]), pairs[:, k_there])
        np.testing.assert_array_equal(found, [mask.dense(length) for mask in masks])
    plan_exchanges.cache_clear()


def test_what_is_received_is_little_more_than_what_is_needed():
    """The busiest receiver's keys, against their bounds; queries in zigzag order move besides."""
    length, own = 131072, 131072 // 8
    bounds = {
        "sliding_window": 1023,
        "chunked": 0,
        "sparse_transformer_fixed": (length - own) // 4,
        "streaming": 1023 + 4,
        "longformer": 511 + 64,
    }
    for name, bound in bounds.items():
        masks = sl.as_masks(name)
        exchanges = [exchange for exchange, _ in plan_exchanges(masks, length, 8, "xla")]
        assert max(sum(exchange.received(rank).keys for exchange in exchanges) for rank in range(8)) == bound
        assert bound <= max(count_remote_keys(masks, length, 8)) <= bound + 32
    halo, residues = (
        exchange for exchange, _ in plan_exchanges(sl.as_masks("sparse_transformer_strided"), length, 8, "xla")
    )
    assert halo.received(7).keys == 128 and set(residues.received(7)) == {own * 7 // 8}
    documents = sl.Causal() & sl.BlockDiagonal(5000)
    ((crossing, _),) = plan_exchanges((documents,), length, 8, "xla")
    assert crossing.received(7).keys == max(count_remote_keys((documents,), length, 8)) == 7 * own % 5000


FAR = sl.Causal() & sl.Strided(96) & ~sl.Window(100)


@pytest.mark.parametrize(
    ("mask", "devices", "words", "stride"),
    [
        (FAR, 5, "all keys, by residue of 96", 96),
        (FAR & ~sl.Strided(64), 8, "queries and keys, by residue of 96", 12),
        (sl.Strided(96) & sl.Window(959, 500), 9, "keys of neighbors, 960 before and 500 behind, by residue of 96", 96),
    ],
)
def test_queries_meet_keys_of_their_own_residue_alone(monkeypatch, mask, devices, words, stride):
    """The planner uses that: it evaluates few pairs one by one, those at the edges of the mask."""
    length, looked_at, strided = 96 * 5 * 16, [0], sl.Strided.__call__

    def counted(self, q, k):
        looked_at[0] += np.broadcast(q, k).size
        return strided(self, q, k)

    monkeypatch.setattr(sl.Strided, "__call__", counted)
    ((exchange, masks),) = plan_exchanges((mask,), length, devices, "xla")
    assert str(exchange) == words
    looked_at[0] = 0
    for rank in range(devices):
        found = exchange.local_plan(masks, rank, implementation="xla")
        assert all(
            f"residue-major order, stride {stride}" in block_pass.order_text for block_pass in found.chains[0]
        ), found
    assert 0 < looked_at[0] < 1024 * length


def test_devices_compute_no_longer_rules_than_one():
    """A part excludes the pairs of other parts once, not in each of its terms."""
    terms = sl.Window(64), sl.BlockDiagonal(128), sl.Window(300) & sl.BlockDiagonal(500), sl.Strided(96)
    mask = sl.Causal() & functools.reduce(lambda x, y: x | y, terms)
    alone = max(
        costs.count_operations(block_pass.mask)
        for block_pass in sl.make_plan(mask, 7680, implementation="triton").chains[0]
    )
    for exchange, masks in plan_exchanges((mask,), 7680, 5, "triton"):
        (chain,) = exchange.local_plan(masks, 4, implementation="triton").chains
        assert max(costs.count_operations(block_pass.mask) for block_pass in chain) <= alone + 4, exchange


def test_halos_merge_if_rows_keep_their_residues():
    near, far = (sl.Causal() & sl.Strided(n) & sl.Window(5 * n) for n in (96, 100))
    length = 96 * 100 * 8
    (both,) = plan_exchanges((near, sl.Causal() & sl.Window(470)), length, 8, "triton")
    assert str(both.exchange) == "keys of neighbors, 480 before, by residue of 96"
    apart = [str(exchange) for exchange, _ in plan_exchanges((near, far), length, 8, "triton")]
    assert apart == [f"keys of neighbors, {5 * n} before, by residue of {n}" for n in (96, 100)]


@pytest.mark.parametrize("which", ["PRESETS", "CASES"])
def test_on_eight_devices(which):
    assert on_devices(8, __file__, which) == ""


# On TPUs, by exchange, with the collectives of forward and backward.
PERMUTE, GATHER, SCATTER, TO_ALL = "collective-permute", "all-gather", "reduce-scatter", "all-to-all"
TPU = functools.partial(Case, devices=8, heads=(2, 1), implementation="pallas_tpu")
ON_TPUS = {
    "halo, tokens broadcast": (
        TPU(sl.preset("streaming", window=128, sinks=4), 4096),
        ({PERMUTE: 2 + 6}, {PERMUTE: 2 + 6}),
    ),
    "all-to-all": (
        TPU(sl.preset("sparse_transformer_strided", stride=128), 8192),
        ({PERMUTE: 2, TO_ALL: 5}, {PERMUTE: 2, TO_ALL: 6}),
    ),
    "columns": (TPU(sl.preset("sparse_transformer_fixed"), 4096), ({GATHER: 2}, {SCATTER: 2})),
    "zigzag": (TPU(sl.Causal(), 16384), ({PERMUTE: 6, GATHER: 2}, {PERMUTE: 8, SCATTER: 2})),
    # Eight of these are a cube, over all of which their compiler sums all gradients on all devices.
    "all keys, on v5p": (TPU(sl.Full(), 4096), ({GATHER: 2}, {"all-reduce": 1})),
}


def beside_kernels(text):
    """The permutes of a compiled program that begin before a kernel, or a switch of kernels, and end after it."""
    travelling, found = set(), set()
    for line in text[text.index("\nENTRY") :].splitlines():  # in the order in which it is run
        if begun := re.search(r"%(\S+) = .* collective-permute-start\(", line):
            travelling.add(begun[1])
        elif ended := re.search(r" collective-permute-done\(%?([\w.-]+)", line):
            travelling.remove(ended[1])
        elif "tpu_custom_call" in line or " conditional(" in line:
            found |= travelling
    return len(found)


@pytest.mark.usefixtures("all_passes")
@pytest.mark.parametrize("name", [name for name in ON_TPUS if ALL_CASES or name != "zigzag"])  # it takes a minute
def test_compiles_for_tpus(name):
    """Programs for eight described TPUs exchange the plan's bytes exactly, in separate collectives."""
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'sparse-layers[tpu-aot]'")
    case, collectives = ON_TPUS[name]
    topology = "v5p:2x2x2" if "v5p" in name else "v5e:2x4"
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.reshape(devices, (1, 8, 1)), ("data", "context", "heads"), axis_types=(AUTO,) * 3)
    shapes = [(2, case.length, heads, 128) for heads in (2, 1, 1, 2)] + [(2, case.length, 2)]
    args = [
        jax.ShapeDtypeStruct(shape, "bfloat16" if len(shape) == 4 else "float32", sharding=NamedSharding(mesh, SPEC))
        for shape in shapes
    ]
    with jax.set_mesh(mesh):
        lowered = (
            jax.jit(functools.partial(results_and_gradients, case, None))
            .trace(*args)
            .lower(lowering_platforms=("tpu",))
        )
    text = lowered.compile().as_text()
    counts, total = received(text, 8)
    assert counts == collectives and "tpu_custom_call" in text
    assert (beside_kernels(text) > 0) == (PERMUTE in counts[0])
    expected = 2 * planned(case, 128, 2)  # of two batch entries
    expected[1] *= 2 if "all-reduce" in counts[1] else 1
    np.testing.assert_array_equal(total, expected)


if __name__ == "__main__":
    main(sys.argv[1])
