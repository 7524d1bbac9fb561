"""Block lists and work tiles of the GPU kernels, where there is no GPU: against dense masks."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.states import EMPTY, FULL, PARTIAL
from sparse_layers.ops.kernels.call import Call
from sparse_layers.ops.kernels.gpu import hardware
from sparse_layers.ops.kernels.gpu.lists import RowTiling, _compact_lists, build_pass_lists
from sparse_layers.ops.kernels.gpu.splits import (
    MAX_SPLITS,
    MIN_STEPS,
    count_splits,
    longest_first_order,
    split_work_tiles,
)
from sparse_layers.ops.kernels.gpu_attention.route import route
from sparse_layers.ops.kernels.operands import Operands
from sparse_layers.ops.kernels.triton_gpu import launch
from sparse_layers.ops.planning.block_lists import BlockPairs
from sparse_layers.ops.planning.row_orders import RowOrder
from tests.ops import cases
from tests.ops.cases import CHAINS, SMALL, candidates

DEFAULTS = sl.FwdParams(), sl.BwdParams()


def called(plan=None, shape=(64, 64), params=DEFAULTS):
    """The static part of a call."""
    return Call(plan, shape, shape, params, 1.0, None)


def given(t, s, heads=(1, 1), **arrays):
    """Operands of which only shapes are known but for ``arrays``."""
    q, kv = (jax.ShapeDtypeStruct((2, n, h, 16), jnp.float32) for n, h in zip((t, s), heads, strict=True))
    return Operands(q, kv, kv, **arrays)


# --- lists -----------------------------------------------------------------------------------------------------------


def decoded(found, outer, inner, dkv, batch=0, head=0, may_meet=True):
    """How often each pair of rows is computed by a kernel that follows the lists: int [outer rows, inner rows].

    Args:
      found: lists of all batch entries and heads.
      outer, inner: how rows are cut.
      dkv: whether the outer side is that of keys.
      batch, head: whose list.
      may_meet: bool [outer rows, inner rows], which pairs of masked blocks segments allow.
    """
    lists = found.block_lists
    spans, block, tile, words = (
        np.asarray(x) for x in (lists.spans, lists.inner_block, lists.mask_tile, found.mask_bits)
    )
    assert {x.dtype for x in (spans, block, tile, words)} == {np.dtype(np.int32)}
    # Heads that are packed have a bit in common, and a block of queries one word.
    wide = inner.tiles_per_block * inner.tile // 32 if inner.pack == 1 else 1
    assert words.shape[1:] == (outer.tiles_per_block * outer.tile // outer.pack, wide)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(*words.shape[:2], -1)
    assert bits[0].sum() == outer.block * inner.block, "the first lets everything pass"
    assert not bits[:, outer.block :].any() and not bits[:, :, inner.block :].any()
    may_meet = np.broadcast_to(may_meet, (outer.num_blocks * outer.block, inner.num_blocks * inner.block))
    pairs = np.zeros(may_meet.shape, int)
    for number, (first, masked, end) in enumerate(
        spans[batch % len(spans), head // lists.heads_per_list % spans.shape[1]]
    ):
        assert first <= masked <= end <= first + found.longest
        assert (found.any_full or first == masked) and (found.any_partial or masked == end)
        for entry in range(first, end):
            at = tuple(slice(i * x.block, (i + 1) * x.block) for i, x in ((number, outer), (block[entry], inner)))
            if entry < masked:
                assert inner.tiles_fill_block
                pairs[at] += 1
                continue
            may = bits[tile[entry] + 1, : outer.block, : inner.block] & may_meet[at]
            if found.granularity:
                part = np.arange((inner if dkv else outer).block) // found.granularity
                chose = int(np.asarray(lists.active_query_groups)[entry]) >> part & 1
                may = may & (chose if dkv else chose[:, None])
            pairs[at] += may
    return pairs


def lists_at_run_time(call, operands, *rest):
    """`build_pass_lists`, compiled as a whole: operation by operation, each would be a program of its own."""
    found, names = [], ("spans", "inner_block", "mask_tile", "active_query_groups")

    def arrays(segments, mask, selection):
        found.append(
            build_pass_lists(call, operands._replace(segments=segments, mask=mask, selection=selection), *rest)
        )
        return found[0].mask_bits, {name: getattr(found[0].block_lists, name) for name in names}

    mask_bits, made = cases.compiled(arrays)(operands.segments, operands.mask, operands.selection)
    block_lists = dataclasses.replace(found[0].block_lists, **made)
    return dataclasses.replace(found[0], mask_bits=mask_bits, block_lists=block_lists)


def padded_rows(side):
    """The rows of all blocks of a side."""
    return np.arange(side.num_blocks * side.block)


def sides(orders, shape, tiles, dkv):
    """(outer, inner) of a pass whose queries and keys have these orders, or lengths."""
    orders = (x if isinstance(x, RowOrder) else RowOrder(x) for x in orders)
    q, kv = (RowTiling(*x) for x in zip(orders, shape, tiles, strict=True))
    return (kv, q) if dkv else (q, kv)


def dense(mask, outer, inner, dkv):
    """What a mask on rows, or a table of pairs, allows: bool [outer rows, inner rows]."""
    rows = padded_rows(outer), padded_rows(inner)
    if isinstance(mask, np.ndarray):
        table = mask.T if dkv else mask
        return np.pad(table, [(0, len(x) - n) for x, n in zip(rows, table.shape, strict=True)])
    both = rows[0][:, None], rows[1]
    return np.asarray(mask(*both[:: -1 if dkv else 1])) & np.ones((both[0].size, both[1].size), bool)


# Blocks and tiles of (queries, keys): alike, several tiles in a block, tiles larger than blocks, and inexact ones.
CUTS = [((16, 32), (16, 32)), ((64, 32), (32, 32)), ((32, 64), (32, 32)), ((24, 40), (16, 32)), ((8, 8), (32, 32))]


@pytest.mark.parametrize("dkv", [False, True])
@pytest.mark.parametrize(("shape", "tiles"), CUTS, ids=str)
@pytest.mark.parametrize("name", [*CHAINS, "bigbird"])
def test_lists_are_the_mask(name, shape, tiles, dkv):
    tiles = (max(tiles), tiles[1])  # either side may be the inner one, whose words have 32 bits
    for one in candidates(sl.preset(name, **SMALL[name]), 150, 170)[-1].chains[0]:
        outer, inner = sides((one.q_order, one.kv_order), shape, tiles, dkv)
        found, wanted = (
            build_pass_lists(called(), given(150, 170), (one,), outer, inner, dkv),
            dense(one.mask, outer, inner, dkv),
        )
        np.testing.assert_array_equal(decoded(found, outer, inner, dkv), wanted)  # none twice, none that is forbidden
        blocks = wanted.reshape(outer.num_blocks, outer.block, inner.num_blocks, inner.block).swapaxes(1, 2)
        active, whole = blocks.any((2, 3)), blocks.all((2, 3))
        counts = np.stack([(whole & inner.tiles_fill_block).sum(1), active.sum(1)], axis=-1)
        np.testing.assert_array_equal(found.block_lists.counts[0, 0], counts)  # every block that can be free is
        assert found.block_lists.static and found.longest == counts[:, 1].max()
        assert found.any_full == counts[:, 0].any() and found.any_partial == (counts[:, 0] < counts[:, 1]).any()
        assert found.is_partition == bool((active.sum(0) == 1).all())


@pytest.mark.parametrize("dkv", [False, True])
def test_lists_of_heads_that_differ(dkv):
    table = np.random.default_rng(0).random((150, 150)) < 0.1
    table[:70] = table[:, 90:] = False
    masks = sl.Causal(), sl.Causal() & sl.Window(40), sl.Array(table.T), sl.Array(table)
    passes = tuple(sl.make_plan(mask, 150).chains[0][0] for mask in masks)
    outer, inner = sides((150, 150), (32, 32), (32, 32), dkv)
    found = build_pass_lists(called(), given(150, 150), passes, outer, inner, dkv)
    for head in range(8):
        wanted = dense(passes[head % 4].mask, outer, inner, dkv)
        np.testing.assert_array_equal(decoded(found, outer, inner, dkv, head=head), wanted)
    assert found.any_full and found.any_partial and not found.is_partition
    # Each key block once, but only if heads are looked at one by one.
    passes = tuple(sl.make_plan(mask, 150).chains[0][0] for mask in (sl.BlockDiagonal(32), sl.BlockDiagonal(32)))
    assert build_pass_lists(called(), given(150, 150), passes, outer, inner, dkv).is_partition


@pytest.mark.parametrize("dkv", [False, True])
@pytest.mark.parametrize("name", ["sparse_transformer_fixed", "strided"])
def test_segments_drop_and_mask_blocks(name, dkv):
    q_ids, kv_ids = (np.repeat(np.random.default_rng(0).integers(-1, 5, (2, 5)), 32, axis=1) for _ in range(2))
    q_ids[1] = 3
    q_ids = np.where(q_ids < 0, -2, q_ids)[:, :150]
    for one in candidates(sl.preset(name, **SMALL[name]), 150, 160)[-1].chains[0]:
        outer, inner = sides((one.q_order, one.kv_order), (16, 32), (32, 32), dkv)

        operands = given(150, 160, segments=(jnp.asarray(q_ids), jnp.asarray(kv_ids)))
        found = lists_at_run_time(called(), operands, (one,), outer, inner, dkv)
        assert found.any_partial and not found.is_partition
        rows = [
            np.stack([np.append(x, -1)[np.minimum(side.order.token(padded_rows(side)), x.size)] for x in side_ids])
            for side, side_ids in zip((outer, inner), (kv_ids, q_ids) if dkv else (q_ids, kv_ids), strict=True)
        ]
        allowed, blocks = (
            dense(one.mask, outer, inner, dkv),
            (outer.num_blocks, outer.block, inner.num_blocks, inner.block),
        )
        for batch, (a, b) in enumerate(zip(*rows, strict=True)):
            may_meet = a[:, None] == b
            pairs = decoded(found, outer, inner, dkv, batch, may_meet=may_meet)
            np.testing.assert_array_equal(pairs, allowed & may_meet)
            # Blocks are compared by the ranges of their ids.
            a, b = a.reshape(outer.num_blocks, outer.block), b.reshape(inner.num_blocks, inner.block)
            low, high = ([np.where(x < 0, sign * 99, x) for x in (a, b)] for sign in (1, -1))
            overlap = (low[0].min(1)[:, None] <= high[1].max(1)) & (low[1].min(1) <= high[0].max(1)[:, None])
            alike = (may_meet & (rows[0][batch] >= 0)[:, None]).reshape(blocks).all((1, 3))
            active, whole = (getattr(allowed.reshape(blocks), which)((1, 3)) for which in ("any", "all"))
            counts = np.stack([(whole & alike & inner.tiles_fill_block).sum(1), (active & overlap).sum(1)], axis=-1)
            np.testing.assert_array_equal(found.block_lists.counts[batch, 0], counts)


@pytest.mark.parametrize("dkv", [False, True])
@pytest.mark.parametrize(("shape", "tiles"), CUTS[1:4], ids=str)
def test_lists_of_run_time_masks(shape, tiles, dkv):
    table = np.random.default_rng(0).random((2, 10, 12)) < 0.5
    mask = np.kron(table, np.ones((16, 16), bool))[:, :150, :170]
    mask[0, :64, :64], mask[1, ::7, ::5] = True, False
    outer, inner = sides((150, 170), shape, (max(tiles),) * 2, dkv)
    q, kv = (inner, outer) if dkv else (outer, inner)
    found = lists_at_run_time(called(), given(150, 170, mask=jnp.asarray(mask)), (), outer, inner, dkv)
    for head in range(4):
        wanted = dense(mask[head % 2], outer, inner, dkv)
        np.testing.assert_array_equal(decoded(found, outer, inner, dkv, head=head), wanted)
    assert (found.block_lists.counts[..., 0] > 0).any() == inner.tiles_fill_block
    assert found.longest == (q.num_blocks if dkv else kv.num_blocks)


@pytest.mark.parametrize("dkv", [False, True])
@pytest.mark.parametrize(
    ("granularity", "block", "tiles", "pack"),
    [(1, 64, (32, 32), 1), (16, 48, (64, 32), 1), (1, 32, (64, 32), 2), (1, 32, (128, 32), 2), (16, 48, (32, 32), 2)],
)
def test_lists_of_selections(granularity, block, tiles, pack, dkv):
    """Bits of masks and of parts together, in both directions; heads of one tile share them."""
    t, s, bq = 150, 170, 32 if granularity == 1 or pack > 1 else 64
    ids = np.random.default_rng(0).integers(-1, -(-s // block), (2, -(-t // granularity), 2, 2)).astype(np.int32)
    chosen = sl.Selection(ids, block=block, granularity=granularity)
    plan = sl.make_plan(sl.Window(100, 20), t, s)
    q, kv = RowTiling(RowOrder(t), bq, tiles[0], pack), RowTiling(RowOrder(s), block, tiles[1])
    outer, inner = (kv, q) if dkv else (q, kv)
    found = lists_at_run_time(called(plan), given(t, s, (4, 2), selection=chosen), (), outer, inner, dkv)
    assert found.granularity == granularity and not found.is_partition
    by_block = (ids[..., None] == np.arange(-(-s // block))).any(-2)  # [B, rows, G, blocks]
    pairs = by_block.repeat(granularity, axis=1)[:, :t].repeat(block, axis=3)[..., :s]
    for batch, head in itertools.product(range(2), range(4)):
        wanted = dense(pairs[batch, :, head // 2] & sl.Window(100, 20).dense(t, s), outer, inner, dkv)
        np.testing.assert_array_equal(decoded(found, outer, inner, dkv, batch, head), wanted)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_makes_the_same_lists_as_a_sort(transposed, chosen):
    """Of more candidates than it looks at in one go; of blocks that have none; of kinds that batch entries share."""
    rng, heads, n = np.random.default_rng(0), 2, 220
    blocks = (90, 4) if transposed else (4, 90)
    pairs = [np.divmod(np.sort(rng.choice(3 * 90, n, replace=False)), 90) for _ in range(heads)]
    outer = np.array([0, 1, 3], np.int32)[None, [x for x, _ in pairs]]  # nobody is in one of the four
    inner = np.array([x for _, x in pairs], np.int32)[None]
    kind = rng.choice([EMPTY, PARTIAL, FULL], (3, heads, n)).astype(np.int32)
    tile = rng.integers(-1, 9, (1, heads, n)).astype(np.int32)
    by = rng.integers(0, 99, kind.shape).astype(np.int32) if chosen else None
    row, column = (inner, outer) if transposed else (outer, inner)
    found = BlockPairs(row, column, kind, tile, by, blocks, heads_per_list=2)
    starts = found.starts(transposed)
    assert (np.diff(starts, axis=1) > 64).any() and (np.diff(starts, axis=1) == 0).any()
    wanted, lists = found.lists(transposed), _compact_lists(found, starts, transposed)
    np.testing.assert_array_equal(lists.counts, wanted.counts)
    assert (lists.num_inner_blocks, lists.heads_per_list) == (90, 2) and (lists.active_query_groups is None) == (
        not chosen
    )
    for ours, theirs in zip(np.reshape(lists.spans, (-1, 3)), wanted.spans.reshape(-1, 3), strict=True):
        for name in ("inner_block", "mask_tile") + (("active_query_groups",) if chosen else ()):
            own, right = (np.asarray(getattr(x, name)) for x in (lists, wanted))
            np.testing.assert_array_equal(own[ours[0] : ours[2]], right[theirs[0] : theirs[2]])


def test_tiles_are_kept_once():
    (one,) = sl.make_plan(sl.Causal() & sl.Window(64), 4096).chains[0]
    outer, inner = sides((4096, 4096), (64, 64), (64, 64), False)
    found = build_pass_lists(called(), given(4096, 4096), (one, one), outer, inner, False)
    assert len(found.mask_bits) == 3  # everything, and the two edges of the band


# --- work ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [0, 10**6])
@pytest.mark.parametrize(
    "steps", [[1, 1, 1, 9], [100, *[1] * 63], [*range(64)], [0] * 7 + [5], [1, 1, 40, 1, 1, 30, 1] * 9]
)
def test_long_lists_begin_first(steps, few):
    steps = np.stack([np.tile(steps, (3, 1)), np.tile(steps[::-1], (3, 1))])  # [LB, heads, blocks]
    blocks = steps.shape[-1]
    for run_time in (False, True):
        order = longest_first_order(jnp.asarray(steps) if run_time else steps, few)
        assert order.dtype == np.int32 and order.shape == (3 * blocks, 2)
        for own, job in zip(steps, np.asarray(order).T, strict=True):
            np.testing.assert_array_equal(np.sort(job), np.arange(3 * blocks))  # each once
            begun, long = own.ravel()[job], own.ravel()[job] > 4 * own.mean()
            for head in range(3):
                assert (np.diff(begun[job // blocks == head]) <= 0).all()
            if run_time:
                assert (np.diff(job // blocks) >= 0).all()
            else:
                assert (np.diff(begun) <= 0).all() or not few
                assert (np.diff(long.astype(int)) <= 0).all()  # no long one after a short one


def test_blocks_that_take_as_long_need_no_order():
    assert longest_first_order(np.full((1, 4, 9), 5), 10**6) is None
    assert longest_first_order(np.zeros((2, 4, 5), int), 0) is None


def check_cut(found, steps, number):
    """Each step of each job that is cut is in one of its pieces, in order; the others have none."""
    group_pass, pieces = np.asarray(found.steps), np.asarray(found.ranges)
    assert group_pass.dtype == pieces.dtype == np.int32
    assert group_pass.shape == (len(group_pass), len(steps), 3) and pieces.shape == (*steps.shape, 2)
    used = np.zeros(group_pass.shape[:2], bool)
    for batch, job in np.ndindex(*steps.shape):
        first, end = pieces[batch, job]
        assert end - first == number[batch, job] and 0 <= first <= end <= len(group_pass)
        assert not used[first:end, batch].any()
        used[first:end, batch] = True
        at = 0
        for own, begin, stop in group_pass[first:end, batch]:
            assert own == job and begin == at <= stop
            at = stop
        assert at == (steps[batch, job] if end > first else 0)
    assert not group_pass[~used].any(), "what is none walks nowhere"


def test_pieces_are_all_of_a_long_list():
    rng = np.random.default_rng(0)
    for slots, size in itertools.product((1, 8, 264), (1, 30, 3000)):
        steps = np.where(rng.random((2, 40)) < 0.9, rng.integers(0, 12, (2, 40)), rng.integers(0, size, (2, 40)))
        number = count_splits(steps, 3, slots)
        limit = max(MIN_STEPS, steps.sum() * 3 / slots)
        assert ((number > 0) == (steps > limit)).all()
        assert (steps[number > 1] / number[number > 1] > MIN_STEPS / 2).all()
        own = np.where(rng.random(steps.shape) < 0.3, rng.integers(0, 9, steps.shape), number)  # also more than steps
        for asked in (number, own):
            found = split_work_tiles(steps, asked)
            assert (found is None) == (not asked.any())
            if found is not None:
                check_cut(found, steps, asked)
        later = split_work_tiles(jnp.asarray(steps), jnp.asarray(own), 1000)
        check_cut(later, steps, own)
        np.testing.assert_array_equal(later.ranges, found.ranges)
        np.testing.assert_array_equal(later.steps[: len(found.steps)], found.steps)
    assert count_splits(np.full((1, 1), 10**6), 1, 10**6).tolist() == [[MAX_SPLITS]]


CUT_T, CUT_HEADS = 300, (8, 2)
SINKS = sl.Causal() & (sl.Window(20) | sl.Prefix(4))
# Each 16 queries look at up to 13 blocks, and at the first.
POPULAR = np.random.default_rng(0).integers(1, 19, (2, 19, 1, 14)).astype(np.int32)
POPULAR[..., 0] = 0
WORKS = {
    "sinks": SINKS,
    "heads": (sl.Causal() & sl.Prefix(40), SINKS, sl.Empty(), sl.Full()),
    "chain": sl.preset("sparse_transformer_fixed", **SMALL["sparse_transformer_fixed"]),
    "chains": (sl.preset("strided", **SMALL["strided"]), sl.Causal()),
    "mask": np.random.default_rng(0).random((2, CUT_T, CUT_T)) < 0.01,
    "selection": sl.Selection(POPULAR, block=16, granularity=16),
}


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
@pytest.mark.parametrize("name", WORKS)
def test_every_step_is_in_one_job(name, kernel, monkeypatch):
    """However lists are cut: on a device of some multiprocessors, or as settings ask for."""
    group_pass, sizes = WORKS[name], {"q_blocksize": 16, "kv_blocksize": 16}
    found = []
    for multiprocessors, asked in ((1, {}), (10**4, {}), (1, {"num_key_splits": 3}), (1, {"blocksize_keys": 64})):
        monkeypatch.setattr(hardware, "local_device", lambda: hardware.Device(90, 232448, multiprocessors))  # noqa: B023
        params = sl.FwdParams(**sizes, **asked), sl.BwdParams(**sizes, **asked)
        plan, chosen, mask = None, None, None
        if isinstance(group_pass, np.ndarray):
            mask = jnp.asarray(group_pass)
        elif isinstance(group_pass, sl.Selection):
            plan, chosen = sl.make_plan(sl.Causal(), CUT_T), group_pass
        else:
            plan = candidates(group_pass, CUT_T, None, *params)[-1]
        call = called(plan, (16, 16), params)
        operands = given(CUT_T, CUT_T, CUT_HEADS, mask=mask, selection=chosen)
        planned = route("triton", call, operands)
        group_passes = [
            x.group_pass for x in (planned.forward if kernel == "forward" else planned.backward) if x.kernel != "dkv"
        ]
        group_passes = [
            one for group_pass in group_passes for one in (group_pass.unfused() if kernel == "dkv" else [group_pass])
        ]
        prepared = [launch._prepare(group_pass.bind(operands), kernel) for group_pass in group_passes]
        found.append([check_work(one, kernel == "dkv") for one in prepared])
    cuts = [np.concatenate([number.ravel() for number in numbers]) for numbers in found]
    assert not cuts[0].any(), "one processor is busy with whole lists"
    assert cuts[1].any() or (kernel != "dkv" and name in ("sinks", "chain"))  # whose queries have few keys
    assert (cuts[2] == 3).all() and (cuts[3] > 1).any()


def check_work(prepared, dkv):
    """Into how many pieces each job is cut, int [LB, jobs], after a look at all that says what programs do."""
    heads = range(prepared.group_pass.first, CUT_HEADS[0], prepared.group_pass.step * prepared.group_pass.pack)
    batches = max(len(lists.block_lists.spans) for _, lists in prepared.walked_lists)
    steps = np.zeros((batches, CUT_HEADS[1] if dkv else len(heads), prepared.outer.num_blocks), int)
    passed = np.zeros((batches, len(heads), prepared.outer.num_blocks), int)
    for batch, (i, head) in itertools.product(range(batches), enumerate(heads)):
        job = head // (CUT_HEADS[0] // CUT_HEADS[1]) if dkv else i
        passed[batch, i] = steps[batch, job]
        for side, lists in prepared.walked_lists:
            counts = np.asarray(lists.block_lists.counts)[..., 1]
            steps[batch, job] += (
                counts[batch % len(counts), head // lists.block_lists.heads_per_list % counts.shape[1]]
                * side.tiles_per_block
            )
    if dkv:
        np.testing.assert_array_equal(prepared.steps_before, passed)
    steps = steps.reshape(batches, -1)
    assert prepared.work_tiles == steps.shape[1]
    number = np.zeros_like(steps)
    if prepared.splits is not None:
        number = np.diff(prepared.splits.ranges)[..., 0]
        check_cut(prepared.splits, steps, number)
    if prepared.order is not None:
        every = np.broadcast_to(np.arange(prepared.work_tiles)[:, None], (prepared.work_tiles, batches))
        np.testing.assert_array_equal(np.sort(prepared.order, axis=0), every)
    return number
