"""Selections of single queries on GPUs by key block: when this is done, and what it takes.

That it computes what the other way does is in `tests.ops.test_selections`, whose "scattered" cases go this way.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

import sparse_layers as sl
from sparse_layers.ops.kernels.call import Call
from sparse_layers.ops.kernels.gpu import bridge, hardware
from sparse_layers.ops.kernels.gpu_attention import kv_outer
from sparse_layers.ops.kernels.operands import Operands
from sparse_layers.ops.kernels.triton_gpu.kv_outer import unsupported
from tests.ops.cases import compiled
from tests.ops.kernels import triton_interpreter
from tests.programs import largest

T, S, BLOCK, K = 200, 640, 16, 4
FEW = 99  # queries where interpreted kernels take long, in equal turns by threes
SCATTERED = np.random.default_rng(0).permuted(np.tile(np.arange(S // BLOCK), (1, T, 2, 1)), axis=-1)[..., :K]
AGREEING = np.broadcast_to(SCATTERED[:, :1], SCATTERED.shape)


def call_of(ids, heads=(4, 2), granularity=1, length=T, size=16, dtype=jnp.float32):
    """(call, operands) as backends get them."""
    chosen = sl.Selection(ids, block=BLOCK, granularity=granularity)
    q, kv = (jax.ShapeDtypeStruct((1, n, h, size), dtype) for n, h in zip((length, S), heads, strict=True))
    plan = sl.make_plan(sl.Full(), length, S)
    call = Call(plan, (64, 64), (64, 64), (sl.FwdParams(), sl.BwdParams()), 1.0, None)
    return call, Operands(q, kv, kv, selection=chosen)


def arrays(heads=(4, 2)):
    draw = np.random.default_rng(0).standard_normal
    shapes = [(1, T, heads[0], 16), (1, S, heads[1], 16), (1, S, heads[1], 16)]
    return [jnp.asarray(draw(shape), jnp.float32) for shape in shapes]


def loss(q, k, v, ids, implementation):
    chosen = sl.Selection(ids, block=BLOCK)
    out, lse = sl.block_sparse_attention(
        q, k, v, sl.Full(), selection=chosen, implementation=implementation, return_lse=True
    )
    return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_selections_disagree(direction):
    def disagree(ids, **options):
        return kv_outer.selections_disagree(*call_of(ids, **options), direction)

    assert disagree(SCATTERED)
    assert not disagree(AGREEING)
    for few, right in ((3, False), (8, True)):  # of 32 neighbours choose for themselves, and the others alike
        some = np.where(np.arange(T)[:, None, None] % 32 < few, SCATTERED, AGREEING)[:, :, :1]
        assert disagree(some, heads=(1, 1)) == (right or direction == "forward")  # a tile of 32 rows is half empty
        assert disagree(some, heads=(2, 1)) == right
    # What is no block is nobody's, and what comes twice counts once.
    ids = SCATTERED.copy()
    ids[..., 1:] = np.array([-1, S // BLOCK, 2**31 - 1])
    assert disagree(ids) == disagree(ids[..., :1]) == disagree(ids[..., [0, 0, 0, 1]])
    assert not disagree(np.full_like(ids, -1))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("agree", [True, False])
def test_agreement_is_sampled_all_over_a_sequence(direction, agree):
    """As many sequences as tiles that are looked at: each sixth tile, for one, is the first of its sequence."""
    first, others = (AGREEING, SCATTERED) if agree else (SCATTERED, AGREEING)
    ids = np.where(np.arange(T)[:, None, None] < 32, first, others)
    ids = np.repeat(ids, kv_outer.SAMPLE // ids.shape[2], axis=0)
    assert kv_outer.selections_disagree(*call_of(ids), direction) == agree


def test_counts_of_many_queries_do_not_wrap_around(monkeypatch):
    monkeypatch.setattr(kv_outer, "FULL_TILE", 1 << 24)  # in the place of thousands of tiles
    assert kv_outer.selections_disagree(*call_of(SCATTERED), "forward")


def test_unsupported_calls(monkeypatch):
    assert unsupported(*call_of(SCATTERED)) is None
    assert unsupported(*call_of(SCATTERED, heads=(2, 2), size=256)) is None
    assert unsupported(*call_of(SCATTERED[:, :13], granularity=16))
    assert unsupported(*call_of(SCATTERED[:, :, :1], heads=(64, 1)))  # a tile of one query, with 64 heads
    assert unsupported(*call_of(np.repeat(SCATTERED, 32, axis=2), heads=(64, 1))) is None  # but 32 where heads differ
    assert unsupported(*call_of(SCATTERED[:, :20], length=20))
    assert unsupported(*call_of(SCATTERED[..., :0]))
    call, operands = call_of(SCATTERED)
    for fwd, bwd, served in (
        ({}, {"num_warps": 8}, False),
        ({"num_key_splits": 1}, {}, False),
        ({"q_blocksize": 8}, {}, True),
    ):
        params = sl.FwdParams(**fwd), sl.BwdParams(**bwd)  # explicit values win: kernels of this way have none
        assert (unsupported(dataclasses.replace(call, params=params), operands) is None) == served
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(80, 166912, 108))  # an A100
    assert unsupported(*call_of(SCATTERED, size=128)) is None
    assert unsupported(*call_of(SCATTERED, size=256))  # tiles of 16 keys are half a word of the mask


def test_the_kernel_is_picked_at_run_time(monkeypatch):
    """By the same program, for ids of either kind; a device without room for its tiles goes the other way."""
    ran = []

    def run(kernel, *args, run=triton_interpreter.run, **options):
        ran.append(kernel.fn.__name__)
        return run(kernel, *args, **options)

    monkeypatch.setattr(triton_interpreter, "run", run)
    step = compiled(jax.value_and_grad(functools.partial(loss, implementation="triton"), (0, 1, 2), has_aux=True))
    for ids, kernels in (
        (SCATTERED, {"kv_outer_kernel", "dkv_kernel"}),
        (AGREEING, {"triton_forward_kernel", "dq_kernel"}),
    ):
        ran.clear()
        jax.block_until_ready(step(*arrays(), ids))
        assert kernels <= set(ran) and len({"kv_outer_kernel", "triton_forward_kernel"} & set(ran)) == 1
    monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 9000, 132))
    assert unsupported(*call_of(SCATTERED))


@pytest.mark.parametrize(("turns", "k"), [(1, 10), (3, 8)])  # JAX keeps programs, by their shapes
def test_popular_blocks_are_shared_out(turns, k, monkeypatch):
    """All chose one block: pieces of its list, and the same to the bit in every run; also in turns of queries."""
    if turns > 1:
        monkeypatch.setattr(kv_outer, "MIN_WORKSPACE_BYTES", 0)
    pieces, rows = set(), set()

    def watched(kernel, grid, arrays, outputs, constants, *rest, call=bridge.call_triton):
        if "W" in constants and constants["Q"].GATHERED:
            rows.add(constants["Q"].ROWS)
            if constants["W"].SPLITS:
                pieces.add(kernel.fn.__name__)
        return call(kernel, grid, arrays, outputs, constants, *rest)

    monkeypatch.setattr(bridge, "call_triton", watched)
    ids = np.tile(SCATTERED, (1, 1, 1, 3))[:, :FEW, :1, :k] + np.arange(k) // K * 7
    ids = np.where(np.arange(k) == 0, 0, ids % (S // BLOCK))
    step, other = (
        compiled(jax.value_and_grad(functools.partial(loss, implementation=name), (0, 1, 2), has_aux=True))
        for name in ("triton", "reference")
    )
    q, *rest = arrays(heads=(8, 1))
    given = q[:, :FEW], *rest, ids
    first, second, right = step(*given), step(*given), other(*given)
    assert pieces == {"kv_outer_kernel", "dkv_kernel"} and rows == {FEW // turns * k}
    for ours, again, theirs in zip(*map(jax.tree.leaves, (first, second, right)), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(again).tobytes()
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_large_numbers_without_a_block_stay_none():
    """Also where blocks are cut, here into 8 parts: 8 times 2**30 is 0 in 32 bits."""
    call, _ = call_of(SCATTERED)
    operands = Operands(*arrays())
    ids = jnp.asarray(SCATTERED[..., :1] % 2)
    forward = compiled(functools.partial(kv_outer.forward, call))
    actual, wanted = (
        forward(operands._replace(selection=sl.Selection(jnp.concatenate([ids, other], axis=-1), block=512)))
        for other in (ids * 0 + 2**30, ids * 0 - 1)
    )
    for ours, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [4, 32])
def test_results_of_choices_take_no_more_than_the_operands(k, monkeypatch):
    """Queries are taken in turns: however many blocks each of them chose, no array grows with their number but ids."""
    monkeypatch.setattr(kv_outer, "MIN_WORKSPACE_BYTES", 0)
    length, heads, size = 32768, 4, 64
    x = jax.ShapeDtypeStruct((1, length, heads, size), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, length, heads, k), jnp.int32)

    def step(q, k, v, ids):
        return jax.grad(lambda *x: loss(*x, ids, "triton")[0], (0, 1, 2))(q, k, v)

    assert largest(step, x, x, x, ids) <= 5 * length * heads * size
