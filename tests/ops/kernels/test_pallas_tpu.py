"""The TPU kernels where there is no TPU: their schedules, their transfers, and JAX's own kernels beside them.

`test_attention.py` holds their values to float64, `test_pallas_tpu_aot.py` compiles them.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention as splash

import sparse_layers as sl
from sparse_layers.masks.states import EMPTY, FULL, PARTIAL
from sparse_layers.ops.kernels.pallas_tpu import kernel_masks
from sparse_layers.ops.kernels.pallas_tpu.schedule import LIMITED, Steps
from sparse_layers.ops.planning.block_lists import BlockPairs, planned_block_pairs
from sparse_layers.ops.planning.row_orders import Reordered, RowOrder
from tests.ops.cases import SMALL, Case, candidates, check, compiled

HOLES = sl.Causal() & sl.Columns(64, 40)  # queries 0 to 39 and keys 0 to 39 have no partner


# --- schedules -------------------------------------------------------------------------------------------------------


def unpacked(steps):
    """The steps of each list, as tuples (outer, inner, kind, first, last)."""
    scalars = [np.asarray(x) for x in steps.scalars]
    batches, classes, length = steps.words.shape
    return [
        [[tuple(map(int, steps.read(scalars, b, c, s))) for s in range(length)] for c in range(classes)]
        for b in range(batches)
    ]


def with_ends(blocks):
    """Blocks (outer, inner, kind), with the flags of a list: whether each is the first, the last of its outer block."""
    outers = [None, *(outer for outer, *_ in blocks), None]
    return [
        (*block, int(block[0] != a), int(block[0] != b))
        for block, a, b in zip(blocks, outers, outers[2:], strict=False)
    ]


def entries(lists):
    """The lists as (inner block, kind) by (list batch, list head, outer block), read one by one."""
    found = {}
    for place in np.ndindex(lists.spans.shape[:3]):
        start, masked, end = map(int, lists.spans[place])
        kinds = [FULL if i < masked else LIMITED if lists.mask_tile[i] < 0 else PARTIAL for i in range(start, end)]
        found[place] = [*zip(map(int, lists.inner_block[start:end]), kinds, strict=True)]
    return found


def as_steps(lists):
    """What `Steps` must hold, by list: an outer block without entries keeps one empty step to write its zeros."""
    batches, heads, outers, _ = lists.spans.shape
    found = entries(lists)
    return [
        [with_ends([(m, *x) for m in range(outers) for x in found[b, h, m] or [(0, EMPTY)]]) for h in range(heads)]
        for b in range(batches)
    ]


def passes(mask, shape, length=192):
    return planned_block_pairs([Reordered(mask, RowOrder(length), RowOrder(length))], shape, False)[0]


@pytest.mark.parametrize("mask", [*(sl.preset(name, **SMALL[name]) for name in SMALL), HOLES, sl.Empty()], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_steps_are_the_active_blocks_in_order(mask, transposed):
    for one in sl.as_masks(mask):
        lists = passes(one, (16, 32)).lists(transposed)
        steps, wanted = Steps.of(lists, False, "a pass"), as_steps(lists)
        assert unpacked(steps) == wanted
        assert steps.count == len(wanted[0][0])
        some = one.dense(192).reshape(12, 16, 6, 32).any((1, 3)).any(0 if transposed else 1)
        assert any(step[2] == EMPTY for step in wanted[0][0]) == (not some.all())


def test_a_word_holds_the_largest_blocks_that_its_bits_allow():
    most = (1 << 14) - 1

    def steps(inners):
        one = BlockPairs(*np.array([most, inners - 1, FULL, -1]).reshape(4, 1, 1, 1), None, (most + 1, inners))
        return Steps.of(one.lists(False), False, "a pass")

    last = unpacked(steps(most + 1))[0][0][-1]
    assert last == (most, most, FULL, 1, 1)
    with pytest.raises(
        ValueError, match=r"a pass has 16384 x 16385 blocks, more than a 32-bit word can number.*larger"
    ):
        steps(most + 2)


def test_lists_that_exceed_scalar_memory_are_refused():
    q = jax.ShapeDtypeStruct((1, 131072, 1, 128), jnp.bfloat16)
    call = functools.partial(sl.block_sparse_attention, plan_or_mask=sl.Causal(), implementation="pallas_tpu")
    with pytest.raises(
        ValueError, match=r"1024 x 1024 blocks of 128 x 128 has 1 lists of 524800 steps, which take 2099200 bytes"
    ):
        jax.eval_shape(functools.partial(call, fwd_params=sl.FwdParams(q_blocksize=128, kv_blocksize=128)), q, q, q)
    jax.eval_shape(functools.partial(call, fwd_params=sl.FwdParams(q_blocksize=256, kv_blocksize=256)), q, q, q)


@pytest.mark.parametrize("transposed", [False, True])
def test_steps_made_at_run_time(transposed):
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(-1, 6, (4, 12)), axis=1).repeat(8, axis=1))
    ids = ids.at[0].set(5).at[1].set(-1)
    candidates = passes(sl.Causal(), (16, 16), 96)

    @jax.jit
    def made(ids):
        lists = candidates.limit_by_ids((ids, ids), None, (RowOrder(96),) * 2, (16, 16)).lists(transposed)
        steps = Steps.of(lists, True, "a pass")
        return lists, steps.words, steps.tiles, steps.count

    lists, words, tiles, count = made(ids)
    wanted = [one[0] for one in as_steps(lists)]
    assert count == max(map(len, wanted)) and {step[2] for one in wanted for step in one} == {
        EMPTY,
        PARTIAL,
        FULL,
        LIMITED,
    }
    steps = Steps(words, None, None, count, 3, 1)
    for one, [found] in zip(wanted, unpacked(steps), strict=True):
        assert found[: len(one)] == one
        # The rest repeats the last blocks, so nothing moves, and ends no row again.
        assert set(found[len(one) :]) <= {(*one[-1][:2], EMPTY, 0, 0)}
    # A step without a mask tile keeps the one before, so nothing moves either.
    kinds = np.asarray(words) & 3
    assert (tiles >= 0).all() and (np.diff(tiles, axis=-1)[kinds[..., 1:] != PARTIAL] == 0).all()


# --- transfers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated_tpu(capsys):
    """Kernels run with a TPU's memories and transfers: races are errors, out of bounds, too; what is unset is NaN."""
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # it would go on failing
    assert "RACE" not in capsys.readouterr().out  # jax 0.10 prints what later versions raise


@pytest.mark.parametrize("waits", [True, False])
def test_the_simulation_finds_races(capsys, waits):
    def kernel(x, out, buffer, arrived):
        copy = pltpu.make_async_copy(x, buffer, arrived)
        copy.start()
        if waits:
            copy.wait()
        out[...] = buffer[...]
        if not waits:
            copy.wait()

    x = jnp.ones((8, 128))
    with contextlib.nullcontext() if waits else pytest.raises((AssertionError, RuntimeError)), simulated_tpu(capsys):
        copied = pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        )(x)
        copied.block_until_ready()


def _tiny(name, mask, q_len, kv_len=None, **options):
    return Case(name, mask, q_len, kv_len, **{"fwd": (16, 16), "sizes": (8, 8), "heads": (2, 1), "batch": 1} | options)


IDS = np.repeat([[0, 0, 1, 1], [0, 1, -1, -1]], 12, axis=1)
TABLE = np.random.default_rng(0).random((2, 32, 32)) < 0.2


@pytest.mark.parametrize(
    "case",
    [
        _tiny("GQA, table", sl.Causal(), 48, table=(2, 9, 6)),
        _tiny("one block of queries", sl.Full(), 16, 48),
        _tiny("two blocks in turn", sl.Full(), 32, 48, heads=(1, 1), bwd=(16, 32)),
        _tiny("holes", HOLES, 64),
        _tiny("segments", sl.Causal(), 48, segments=(IDS, IDS), batch=2, heads=(1, 1)),
        _tiny("tiles", sl.Array(TABLE[0]), 32),
        _tiny("run-time mask", jnp.asarray(TABLE), 32),
        _tiny("start state", sl.preset("sparse_transformer_fixed", stride=12, summary=4), 32, split=True, sinks=True),
        _tiny("heads differ", (sl.Causal(), sl.Window(8)), 32, heads=(4, 1)),
    ],
    ids=str,
)
def test_transfers_do_not_race(case, capsys):
    with simulated_tpu(capsys):
        check(case, case.call("pallas_tpu"))


# --- splash attention ------------------------------------------------------------------------------------------------

CAUSAL, WINDOW = splash.CausalMask((256, 256)), splash.LocalMask((256, 256), (60, 10), 0)
DOCUMENTS = np.repeat([0, 1, 2], [100, 30, 126])


@pytest.mark.parametrize(
    ("mask", "theirs", "heads", "options"),
    [
        pytest.param(sl.Causal() & sl.Window(60, 10), CAUSAL & WINDOW, (4, 2), {}, id="causal window, GQA"),
        pytest.param(sl.Full(), splash.FullMask((256, 256)), (4, 1), {}, id="full, MQA"),
        pytest.param(sl.Causal(), CAUSAL, (2, 1), {"segment_ids": DOCUMENTS}, id="causal, segments"),
        pytest.param(sl.Window(60, 10), WINDOW, (1, 1), {"logits_soft_cap": 3.0}, id="window, soft cap"),
    ],
)
def test_splash_attention_agrees(mask, theirs, heads, options):
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(256, n, 128)), jnp.float32) for n in (*heads, heads[1], heads[0]))
    ids, cap = options.get("segment_ids"), options.get("logits_soft_cap")

    def ours(q, k, v):
        blocks = sl.FwdParams(q_blocksize=128, kv_blocksize=128)
        call = functools.partial(sl.block_sparse_attention, implementation="pallas_tpu", fwd_params=blocks, **options)
        return call(q, k, v, mask, return_lse=True)

    def splash_attention(q, k, v, lse):
        # Heads come first there, and q is scaled by the caller.
        q, k, v = (x.swapaxes(0, 1) for x in (q / 128**0.5, k, v))
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([theirs] * heads[0]),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=cap,
            save_residuals=lse,
            interpret=True,
        )
        found = kernel(q, k, v, None if ids is None else splash.SegmentIds(jnp.asarray(ids), jnp.asarray(ids)))
        return (found[0].swapaxes(0, 1), found[1][0].T) if lse else found.swapaxes(0, 1)

    @compiled
    def our_answers(q, k, v):
        (out, lse), pullback = jax.vjp(ours, q, k, v)
        return out, lse, *pullback((dout, jnp.zeros_like(lse)))

    @compiled
    def their_answers(q, k, v):
        _, pullback = jax.vjp(functools.partial(splash_attention, lse=False), q, k, v)
        return *splash_attention(q, k, v, True), *pullback(dout)

    close(our_answers(q, k, v), their_answers(q, k, v), 3e-6)


# --- ways to call ----------------------------------------------------------------------------------------------------

T = 40
CHAIN = candidates(
    sl.preset("sparse_transformer_fixed", stride=12, summary=4),
    T,
    fwd_params=sl.FwdParams(q_blocksize=16, kv_blocksize=16),
)[-1]


def arrays(*lead, heads=2):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(*lead, T, n, 8)).astype(np.float32)) for n in (heads, 1, 1)]


def gradients(implementation, q, k, v, mask=CHAIN, ids=None):
    """out, lse and the gradients of a sum over them."""

    def loss(q, k, v):
        out, lse = sl.block_sparse_attention(
            q, k, v, mask, segment_ids=ids, implementation=implementation, return_lse=True
        )
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def close(actual, wanted, tolerance=1e-5):
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, w, rtol=tolerance, atol=tolerance)


def test_vmap_over_operands_and_segments():
    q, k, v = arrays(3, 2)
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (3, 2, T)))
    both = (
        compiled(jax.vmap(functools.partial(gradients, name, mask=CHAIN)))(q, k, v, ids=ids)
        for name in ("pallas_tpu", "reference")
    )
    close(*both)


def test_vmap_over_run_time_masks():
    q, k, v = arrays(3, 1)
    masks = jnp.asarray(np.random.default_rng(0).random((3, T, T)) < 0.3)
    close(
        *(
            compiled(jax.vmap(functools.partial(gradients, name)))(q, k, v, masks)
            for name in ("pallas_tpu", "reference")
        )
    )


def test_checkpoint_and_scan():
    q, k, v = arrays(1)

    def total(implementation, q, k, v):
        def layer(x, _):
            return x + sl.block_sparse_attention(x, k, v, CHAIN, implementation=implementation), None

        return jnp.sin(jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0]).sum()

    close(
        *(
            compiled(jax.grad(functools.partial(total, name), (0, 1, 2)))(q, k, v)
            for name in ("pallas_tpu", "reference")
        )
    )


def test_shard_map_with_replicated_keys():
    q, k, v = arrays(2)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, same = jax.P("batch"), jax.P()

    def total(implementation, q, k, v):
        k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
        out, lse = sl.block_sparse_attention(q, k, v, CHAIN, implementation=implementation, return_lse=True)
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    def summed(*operands):
        return jax.lax.psum(total("pallas_tpu", *operands), "batch")

    mapped = jax.shard_map(summed, mesh=mesh, in_specs=(spread, same, same), out_specs=same)
    found, wanted = (
        compiled(jax.grad(f, (0, 1, 2)))(q, k[:1], v[:1]) for f in (mapped, functools.partial(total, "reference"))
    )
    close(found, wanted)


def test_no_batch_entries():
    empty = arrays(0)
    for mask, ids in itertools.product((CHAIN, jnp.ones((T, T), bool)), (None, jnp.zeros((0, T), int))):
        found = gradients("pallas_tpu", *empty, mask, ids)
        assert [x.shape for x in jax.tree.leaves(found)] == [*(x.shape for x in empty), empty[0].shape, (0, T, 2)]


# --- masks inside kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SMALL))
def test_masks_are_the_same_along_lanes(name, monkeypatch):
    (starts, shape), mask = ((32, 24), (40, 16)), sl.preset(name, **SMALL[name])

    def pairs(mask, least, transposed):
        monkeypatch.setattr(kernel_masks, "MIN_COLUMN_OPERATIONS", least)
        found = kernel_masks.allowed_pairs(mask, starts, shape, transposed)
        return found.T if transposed else found

    for one in sl.as_masks(mask):
        (one_pass,) = candidates(one, 100)[0].chains[0]
        wanted = one_pass.mask.dense(100, 100)[32:72, 24:40]
        ways = itertools.product([one_pass.mask], (0, 10**6), (False, True))
        for found in compiled(lambda: list(itertools.starmap(pairs, ways)))():  # noqa: B023
            np.testing.assert_array_equal(found, wanted)
