"""The GPU backend where there is no GPU: its block lists, its settings, and ways to call it.

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
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.kernels.triton_gpu import chain, launch, settings
from sparse_layers.ops.kernels.triton_gpu.launch import device as true_device  # before a fixture replaces it
from sparse_layers.ops.kernels.triton_gpu.lists import (
    Lists,
    Side,
    begin_order,
    run_time_lists,
    static_lists,
    with_segments,
)
from sparse_layers.ops.planning.views import RowOrder
from tests.ops.cases import CHAINS, SMALL, candidates

# --- lists -----------------------------------------------------------------------------------------------------------


def decoded(lists, major, minor, batch=0, head=0, may_meet=True):
    """How often each pair of rows is computed by a kernel that follows the lists: int [major rows, minor rows].

    Args:
      lists: of all batch entries and heads.
      major, minor: how rows are cut.
      batch, head: whose list.
      may_meet: bool [major rows, minor rows], which pairs of masked blocks segments allow.
    """
    entries, words = np.asarray(lists.entries), np.asarray(lists.bits)
    assert entries.dtype == words.dtype == np.int32
    assert words.shape[1:] == (major.parts * major.tile, minor.parts * minor.tile // 32)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(*words.shape[:2], -1)
    free_blocks, may_meet = 0, np.broadcast_to(may_meet, (major.blocks * major.block, minor.blocks * minor.block))
    found = np.zeros(may_meet.shape, int)
    for number, (free, count, *pairs) in enumerate(entries[batch % len(entries), head % entries.shape[1]]):
        assert 0 <= free <= count <= len(pairs) // 2
        free_blocks += free
        # The others are looked at, too, by programs that load ahead.
        assert all(0 <= x < minor.blocks for x in pairs[::2]) and all(0 <= x < len(words) for x in pairs[1::2])
        for slot, (index, tile) in enumerate(zip(pairs[: 2 * count : 2], pairs[1 : 2 * count : 2], strict=True)):
            block = slice(number * major.block, (number + 1) * major.block), slice(index * minor.block, None)
            block = block[0], slice(index * minor.block, (index + 1) * minor.block)
            if slot < free:
                assert minor.exact
                found[block] += 1
            else:
                found[block] += bits[tile, : major.block, : minor.block] * may_meet[block]
                assert not bits[tile, major.block :].any() and not bits[tile, :, minor.block :].any()
    assert lists.any_free or not free_blocks
    return found


def padded_rows(side):
    """The rows of all blocks of a side."""
    return np.arange(side.blocks * side.block)


def sides(one, shape, tiles, dkv):
    """(major, minor) of a pass."""
    q, kv = (Side(*x) for x in zip((one.q_order, one.kv_order), shape, tiles, strict=True))
    return (kv, q) if dkv else (q, kv)


def dense(mask, major, minor, dkv):
    """What a mask on rows allows: bool [major rows, minor rows]."""
    rows = padded_rows(major)[:, None], padded_rows(minor)
    return np.asarray(mask(*rows[:: -1 if dkv else 1])) & np.ones((rows[0].size, rows[1].size), bool)


# Blocks and tiles of (queries, keys): alike, several tiles in a block, tiles larger than blocks, and inexact ones.
CUTS = [((16, 32), (16, 32)), ((64, 32), (32, 32)), ((32, 64), (32, 32)), ((24, 40), (16, 32)), ((8, 8), (32, 32))]


@pytest.mark.parametrize("dkv", [False, True])
@pytest.mark.parametrize(("shape", "tiles"), CUTS, ids=str)
@pytest.mark.parametrize("name", [*CHAINS, "bigbird", "logsparse", "bidirectional"])
def test_lists_are_the_mask(name, shape, tiles, dkv):
    tiles = (max(tiles), tiles[1])  # either side may be the minor one, whose words have 32 bits
    for one in candidates(sl.preset(name, **SMALL[name]), 150, 170)[-1].chains[0]:
        major, minor = sides(one, shape, tiles, dkv)
        lists, wanted = static_lists((one,), major, minor, dkv), dense(one.mask, major, minor, dkv)
        found = decoded(lists, major, minor)
        np.testing.assert_array_equal(found, wanted)  # no pair twice, and none that is forbidden
        blocks = wanted.reshape(major.blocks, major.block, minor.blocks, minor.block).swapaxes(1, 2)
        active, whole = blocks.any((2, 3)), blocks.all((2, 3))
        counts = np.stack([(whole & minor.exact).sum(1), active.sum(1)], axis=-1)
        np.testing.assert_array_equal(lists.counts[0, 0], counts)  # every block that can be free is
        np.testing.assert_array_equal(lists.most, counts[:, 1])
        assert lists.any_free == counts[:, 0].any() and lists.any_masked == (counts[:, 0] < counts[:, 1]).any()
        assert lists.single == bool((active.sum(0) == 1).all())


@pytest.mark.parametrize("dkv", [False, True])
def test_lists_of_heads_that_differ(dkv):
    table = np.random.default_rng(0).random((150, 150)) < 0.1
    table[:70] = table[:, 90:] = False
    masks = sl.Causal(), sl.Causal() & sl.Window(40), sl.Array(table.T), sl.Array(table)
    passes = tuple(sl.make_plan(mask, 150).chains[0][0] for mask in masks)
    major, minor = sides(passes[0], (32, 32), (32, 32), dkv)
    lists = static_lists(passes, major, minor, dkv)
    for head in range(8):
        wanted = dense(passes[head % 4].mask, major, minor, dkv)
        np.testing.assert_array_equal(decoded(lists, major, minor, head=head), wanted)
    np.testing.assert_array_equal(lists.most, np.asarray(lists.counts)[0, :, :, 1].max(0))
    assert lists.any_free and lists.any_masked and not lists.single


def test_tiles_are_kept_once():
    (one,) = sl.make_plan(sl.Causal() & sl.Window(64), 4096).chains[0]
    major, minor = sides(one, (64, 64), (64, 64), False)
    assert len(static_lists((one, one), major, minor, False).bits) == 3  # everything, and the two edges of the band


@pytest.mark.parametrize("dkv", [False, True])
@pytest.mark.parametrize("name", ["sparse_transformer_fixed", "strided"])
def test_segments_drop_and_mask_blocks(name, dkv):
    q_ids, kv_ids = (np.repeat(np.random.default_rng(0).integers(-1, 5, (3, 5)), 32, axis=1) for _ in range(2))
    q_ids[1], kv_ids[2] = 3, -1
    q_ids, kv_ids = np.where(q_ids < 0, -2, q_ids)[:, :150], kv_ids
    for one in candidates(sl.preset(name, **SMALL[name]), 150, 160)[-1].chains[0]:
        major, minor = sides(one, (16, 32), (32, 32), dkv)
        ids = (kv_ids, q_ids) if dkv else (q_ids, kv_ids)
        rows = [
            np.stack([np.append(x, -1)[np.minimum(side.order.token(padded_rows(side)), x.size)] for x in side_ids])
            for side, side_ids in zip((major, minor), ids, strict=True)
        ]
        lists = static_lists((one,), major, minor, dkv)
        entries = jax.jit(lambda *x: with_segments(lists, major, minor, *x).entries)(*ids)  # noqa: B023
        cut = dataclasses.replace(lists, entries=entries, any_masked=True)
        allowed, blocks = dense(one.mask, major, minor, dkv), (major.blocks, major.block, minor.blocks, minor.block)
        for batch, (a, b) in enumerate(zip(*rows, strict=True)):
            may_meet = a[:, None] == b
            np.testing.assert_array_equal(decoded(cut, major, minor, batch, may_meet=may_meet), allowed & may_meet)
            # Blocks are compared by the ranges of their ids.
            a, b = a.reshape(major.blocks, major.block), b.reshape(minor.blocks, minor.block)
            low, high = ([np.where(x < 0, sign * 99, x) for x in (a, b)] for sign in (1, -1))
            overlap = (low[0].min(1)[:, None] <= high[1].max(1)) & (low[1].min(1) <= high[0].max(1)[:, None])
            alike = (may_meet & (rows[0][batch] >= 0)[:, None]).reshape(blocks).all((1, 3))
            active, whole = (getattr(allowed.reshape(blocks), which)((1, 3)) for which in ("any", "all"))
            counts = np.stack([(whole & alike & minor.exact).sum(1), (active & overlap).sum(1)], axis=-1)
            np.testing.assert_array_equal(cut.counts[batch, 0], counts)
    cut = with_segments(lists, major, minor, *map(jnp.asarray, ids))
    assert cut.any_masked and not cut.single


@pytest.mark.parametrize("dkv", [False, True])
@pytest.mark.parametrize(("shape", "tiles"), CUTS[1:4], ids=str)
def test_lists_of_run_time_masks(shape, tiles, dkv):
    table = np.random.default_rng(0).random((2, 10, 12)) < 0.5
    mask = np.kron(table, np.ones((16, 16), bool))[:, :150, :170]
    mask[0, :64, :64], mask[1, ::7, ::5] = True, False
    q, kv = (Side(RowOrder(n), block, max(tiles)) for n, block in zip((150, 170), shape, strict=True))
    major, minor = (kv, q) if dkv else (q, kv)
    arrays = jax.jit(lambda x: dataclasses.astuple(run_time_lists(x, major, minor, dkv))[:2])(mask)
    lists = Lists(*arrays, np.full(major.blocks, minor.blocks), minor.exact, True, False)
    for head in range(4):
        one = mask[head % 2].T if dkv else mask[head % 2]
        wanted = np.pad(
            one, [(0, side.blocks * side.block - n) for side, n in zip((major, minor), one.shape, strict=True)]
        )
        np.testing.assert_array_equal(decoded(lists, major, minor, head=head), wanted)
    assert (lists.counts[..., 0] > 0).any() == minor.exact


@pytest.mark.parametrize("few", [0, 10**6])
@pytest.mark.parametrize(
    "work", [[1, 1, 1, 9], [100, *[1] * 63], [*range(64)], [0] * 7 + [5], [1, 1, 40, 1, 1, 30, 1] * 9]
)
def test_long_lists_begin_first(work, few):
    work, heads = np.array(work), 3
    order = begin_order(work, heads, few)
    if order is None:
        assert work.max() <= 2 * work.mean()
        return
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(heads * len(work)))
    begun = work[order % len(work)]
    if few:
        assert (np.diff(begun) <= 0).all()
    long = begun > 4 * work.mean()
    assert (np.diff(long.astype(int)) <= 0).all()  # no long one after a short one
    for head in range(heads):
        assert (np.diff(begun[order // len(work) == head]) <= 0).all()


def test_blocks_that_take_as_long_need_no_order():
    assert begin_order(np.full(9, 5), 4, 10**6) is None
    assert begin_order(np.zeros(5, int), 4, 0) is None


# --- settings --------------------------------------------------------------------------------------------------------

H200 = launch.Device(90, 232448, 132)
DEFAULTS = sl.FwdParams(), sl.BwdParams()
KERNELS = ["forward", "dq", "dkv"]


def chosen(kernel="forward", itemsize=2, sizes=(128, 128), blocks=(128, 128), params=None, device=H200):
    return settings.choose(kernel, itemsize, sizes, blocks, params or sl.FwdParams(), device)


@pytest.mark.parametrize("kernel", KERNELS)
def test_explicit_settings_win(kernel):
    default, tight = chosen(kernel), H200._replace(shared_memory=1)
    every = sl.FwdParams(blocksize_m=256, blocksize_n=128, num_warps=16, num_stages=7)
    for device in (H200, tight):
        assert chosen(kernel, params=every, device=device) == settings.Settings(256, 128, 16, 7)
    for name, value, field in (
        ("blocksize_m", 16, "major"),
        ("blocksize_n", 32, "minor"),
        ("num_warps", 1, "num_warps"),
    ):
        wanted = dataclasses.replace(default, **{field: value})
        assert chosen(kernel, params=sl.FwdParams(**{name: value})) == wanted


@pytest.mark.parametrize("limit", [48 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize(("itemsize", "kernel"), [*itertools.product((2, 4), KERNELS), (2, "fused")])
def test_settings_fit_the_device(kernel, itemsize, limit):
    sizes = [
        x
        for x in itertools.product((16, 64, 128, 256), repeat=2)
        if kernel != "fused" or settings.rows_of("fused", 2, x)
    ]
    for size, blocks in itertools.product(sizes, [(16, 32), (64, 64), (128, 128), (512, 512)]):
        found = chosen(kernel, itemsize, size, blocks, device=H200._replace(shared_memory=limit))
        wide = chosen(kernel, itemsize, size, blocks, device=H200._replace(shared_memory=1 << 30))
        assert all(a <= b for a, b in zip(dataclasses.astuple(found), dataclasses.astuple(wide), strict=True))
        smallest = (found.major, found.minor, found.num_stages) == (16, 32, 1)
        assert settings.shared_memory(kernel, found, itemsize, size, H200.capability) <= limit or smallest
        assert found.major & (found.major - 1) == found.minor & (found.minor - 1) == 0
        assert found.major >= 16 and found.minor >= 32


def test_head_sizes_that_do_not_fit_are_refused(monkeypatch):
    small = launch.Device(86, 101376, 84)
    assert settings.misfit(2, (256, 256), DEFAULTS, small) is None
    assert settings.misfit(4, (256, 256), DEFAULTS, H200) is None
    assert "shared memory, and this GPU has 101376" in settings.misfit(4, (256, 256), DEFAULTS, small)
    large = sl.FwdParams(), sl.BwdParams(blocksize_m=256)
    assert "blocksize_m=256" in settings.misfit(2, (256, 256), large, small)
    monkeypatch.setattr(launch, "device", lambda: small)
    q = jnp.zeros((1, 16, 2, 256))
    with pytest.raises(NotImplementedError, match="triton: head sizes of 256 with 4 bytes an element need about"):
        sl.block_sparse_attention(q, q, q, sl.Causal(), implementation="triton")


def test_tiles_are_no_larger_than_blocks_need():
    for blocks, most in (((8, 8), (16, 32)), ((24, 40), (32, 64)), ((64, 8), (64, 32))):
        found = chosen(blocks=blocks)
        assert found.major <= most[0] and found.minor <= most[1]


def test_splits():
    side, params = Side(RowOrder(1000), 128, 64), sl.FwdParams()
    assert settings.splits(sl.FwdParams(num_key_splits=5), side, 1, 10**6, H200) == 5
    assert settings.splits(sl.FwdParams(blocksize_keys=256), side, 1, 10**6, H200) == 4
    assert settings.splits(params, side, 10**6, 2 * H200.processors, H200) == 1  # the device is full
    assert settings.splits(params, side, 7, 1, H200) == 1  # not worth it
    most = [settings.splits(params, side, steps, 1, H200) for steps in (16, 160, 10**6)]
    assert 1 < most[0] <= most[1] <= most[2] <= 2 * H200.processors


# --- ways to call ----------------------------------------------------------------------------------------------------

T, WINDOW = 130, sl.Causal() & sl.Window(50)
FIXED = candidates(sl.preset("sparse_transformer_fixed", **SMALL["sparse_transformer_fixed"]), T)[-1]


def arrays(*lead, t=T, s=None, heads=(2, 1), h=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(*(lead or (1,)), *x, h) for x in ((t, heads[0]), (s or t, heads[1]), (s or t, heads[1]))]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


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
    monkeypatch.setattr(chain, "MOST_BATCH_ENTRIES", 3)
    q, k, v = (jnp.stack([x, -x, 2 * x]) for x in arrays())
    mapped = jax.vmap(functools.partial(answers, plan=WINDOW))(q, k, v)
    for i in range(3):
        close(jax.tree.map(lambda x: x[i], mapped), answers(q[i], k[i], v[i], WINDOW))  # noqa: B023
    nothing = jax.vmap(functools.partial(answers, plan=WINDOW))(q[:0], k[:0], v[:0])
    assert nothing[0].shape == (0, *q.shape[1:])


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


def test_chains_may_be_split():
    (q, k, v), sinks = arrays(), jnp.asarray([0.5, -1.0])
    params = both(num_key_splits=3)
    plan = dataclasses.replace(FIXED, **params)
    close(answers(q, k, v, plan, sinks), answers(q, k, v, plan, sinks, "reference"))


def test_a_single_long_row(monkeypatch):
    q, k, v = arrays(t=1, s=1500)
    grids = []

    def counting(kernel, grid, *args, call=launch.call):
        grids.append((kernel.fn.__name__, grid[0]))
        return call(kernel, grid, *args)

    monkeypatch.setattr(launch, "call", counting)
    close(answers(q, k, v, sl.Full()), answers(q, k, v, sl.Full(), implementation="reference"))
    programs = dict(grids)
    assert programs["forward_kernel"] > 2 and programs["dq_kernel"] > 2  # heads x splits: one row fills the device


def test_runs_are_equal_to_the_bit():
    q, k, v = arrays(dtype="bfloat16")
    plan = dataclasses.replace(FIXED, **both(num_key_splits=2))
    first, second = (jax.jit(lambda *x: answers(*x, plan))(q, k, v) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


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
    monkeypatch.setattr(launch, "device", true_device)
    served = "; implementation=None or 'xla' serves this call"
    refused(f"triton: it needs an NVIDIA GPU, and JAX computes on cpu{served}", *arrays(t=8))


@pytest.mark.parametrize("capability", ["gfx942", None])
def test_another_makers_gpu(monkeypatch, capability):
    gpu = types.SimpleNamespace(device_kind="MI300X", local_hardware_id=0, compute_capability=capability)
    monkeypatch.setattr(launch, "platform", lambda: "gpu")
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


@pytest.mark.parametrize(
    ("capability", "number", "driver", "module", "answer"),
    [
        (90, 0, Driver(), types.ModuleType("jax_triton"), launch.Device(90, 232448, 132)),
        (75, 0, Driver(), types.ModuleType("jax_triton"), "it needs compute capability 8.0, and this GPU has 7.5"),
        (90, 0, Driver(), None, "it needs jax-triton and triton, the extra 'gpu' installs them"),
        (90, 0, None, types.ModuleType("jax_triton"), "it needs the CUDA driver library"),
        (90, 0, Driver(3), types.ModuleType("jax_triton"), "the CUDA driver answered with error 3"),
        (90, 1, Driver(), types.ModuleType("jax_triton"), "error 101 when asked for attribute 97 of GPU 1"),
    ],
    ids=["works", "old", "no jax-triton", "no driver", "failing driver", "no such GPU"],
)
def test_what_the_device_is(monkeypatch, capability, number, driver, module, answer):
    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setitem(sys.modules, "jax_triton", module)
    monkeypatch.setattr(ctypes, "CDLL", load)
    found = launch._device.__wrapped__(capability, number)
    assert found == answer if isinstance(answer, launch.Device) else answer in found
