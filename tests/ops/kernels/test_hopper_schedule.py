"""Who does what, and when: the schedules of the Hopper kernels, and where lists are cut for them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.kernels.hopper_gpu import schedule
from sparse_layers.ops.kernels.hopper_gpu.schedule import (
    LONG_FACTOR,
    LONG_SHARE,
    NUM_WAVES,
    OVERHEAD_STEPS,
    assign_greedily,
    build_schedule,
    finish_time,
    has_overlapping_neighbors,
    makespan,
    order_work_tiles,
    split_by_query_ranges,
    split_into_waves,
    split_long_lists,
)
from sparse_layers.ops.planning.block_lists import BlockLists, planned_block_pairs


@pytest.mark.parametrize(("batch", "shape", "programs"), [(2, (1, 3, 17), 5), (4, (2, 2, 9), 7), (1, (1, 1, 3), 132)])
@pytest.mark.parametrize("known", [True, False])
def test_schedules(batch, shape, programs, known):
    steps = np.random.default_rng(0).integers(0, 60, shape).astype(np.int32)
    steps[:, 0, 1] = 9000  # much more than what is left for each of the other programs
    schedule = np.asarray(build_schedule(steps if known else jnp.asarray(steps), batch, programs))
    items = batch * shape[1] * shape[2]
    assert schedule.dtype == np.int32 and schedule.shape[1] == min(programs, items)
    assert sorted(schedule[schedule >= 0]) == list(range(items))
    assert np.all((schedule[1:] < 0) | (schedule[:-1] >= 0))  # nothing comes after an end
    costs = steps[np.arange(batch) % len(steps)].ravel()
    longest = 9000 * -(-int((costs == 9000).sum()) // programs)
    # Known lists have what is long first, and nothing else for those who have it.
    most = longest + (60 if known else 2 * costs[costs < 9000].sum() / programs + 60)
    assert makespan(schedule, costs) <= most
    for as_numbered in (False, True):
        order = np.asarray(order_work_tiles(steps if known else jnp.asarray(steps), batch, programs, as_numbered))
        assert order.dtype == np.int32 and sorted(order) == list(range(items))
        assert finish_time(order, costs, programs) <= most


@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.parametrize("blocks", [64, 66, 128, 132, 264])
@pytest.mark.parametrize("known", [True, False])
def test_schedules_are_balanced_and_keep_heads_together(known, blocks, heads):
    """Documents, of one length and not, a causal mask, and a global column, on 132 multiprocessors."""
    block = np.arange(blocks)
    borders = np.sort(np.random.default_rng(blocks).choice(block[1:], 7, replace=False))
    several = block - np.append(0, borders)[np.searchsorted(borders, block, side="right")] + 1
    for number, one in enumerate((block % 16 + 1, several, block + 1, np.where(block == 0, 8 * blocks, 16))):
        steps = np.tile(one.astype(np.int32), (1, heads, 1))
        given, orders = steps if known else jnp.asarray(steps), []
        schedule = np.asarray(build_schedule(given, 1, 132))
        costs, own = steps.ravel(), steps.ravel() + OVERHEAD_STEPS
        # Of few items, and of long ones, the last may come late.
        best = max(own.sum() / 132, own.max())
        uneven = 1.04 if known else 1.6 if number == 3 else 1.25
        assert makespan(schedule, costs) <= uneven * best + (1 if known else 16), number
        together = 1 if known else -(-251 // blocks)
        last = blocks * heads - (4 * 132 if known else 0)  # or later
        far = known & (costs > LONG_FACTOR * costs.mean()) & (costs > LONG_SHARE * costs.sum() / 132)
        for as_numbered in (False, True):
            order = np.asarray(order_work_tiles(given, 1, 132, as_numbered))
            assert finish_time(order, costs, 132) <= uneven * best + 1, number
            assert np.all(far[order[: far.sum()]])  # what takes far longer comes first, then one head after the other
            orders.append(order[far.sum() :][: max(last - far.sum(), 0)])
        by_length, by_number = orders
        for order in orders[: 1 + known]:
            assert np.all(np.diff(order // blocks // together) >= 0)
        if known:
            assert np.all(np.diff(by_number) >= 0)
        place = np.argsort(order_work_tiles(given, 1, 132, False))  # of each item
        for items in (by_length, *(column[column >= 0] for column in schedule.T)):  # of a region the longest first
            assert np.all(np.diff(place[items]) > 0)
            late = known and (block * one).sum() > block.mean() * one.sum()
            region = (blocks - 1 - block if late else block)[items % blocks] // 132 if known else 0
            region = np.where((place[items] >= last) | far[items], -heads, items // blocks // together * 4 + region)
            assert all(np.all(np.diff(costs[items[region == x]]) <= 0) for x in {*region.tolist()} - {-heads})
            assert np.all(np.diff(region[region != -heads]) >= 0)


@pytest.mark.parametrize("blocks", [502, 755, 4096])
def test_of_heads_with_many_blocks_parts_come_one_after_the_other(blocks):
    """Backward, of lists that are known at run time only; of each part the longest come first."""
    borders = np.sort(np.random.default_rng(blocks).choice(np.arange(1, blocks), blocks // 60, replace=False))
    block = np.arange(blocks)
    one = block - np.append(0, borders)[np.searchsorted(borders, block, side="right")] + 1
    steps = np.tile(one.astype(np.int32), (1, 8, 1))
    size = {502: 251, 755: 252, 4096: 256}[blocks]
    order, costs = np.asarray(order_work_tiles(jnp.asarray(steps), 1, 132, False)), steps.ravel()
    part = order // size
    assert np.all(np.diff(part) >= 0)
    assert np.all((np.diff(costs[order]) <= 0) | (np.diff(part) > 0))
    assert finish_time(order, costs, 132) <= 1.05 * (costs + OVERHEAD_STEPS).sum() / 132


@pytest.mark.parametrize(("heads", "blocks"), [(8, 1024), (4, 1024), (8, 2048)])
def test_sweeps_are_even_where_long_lists_end(heads, blocks):
    """One document over a third of the tokens, and then short ones."""
    one = np.where(np.arange(blocks) < blocks // 3, np.arange(blocks), np.arange(blocks) % 16) + 1
    costs = np.tile(one.astype(np.int32), (1, heads, 1))
    planned = np.asarray(build_schedule(jnp.asarray(costs), 1, 132))
    assert makespan(planned, costs.ravel()) <= 1.06 * (costs + OVERHEAD_STEPS).sum() / 132


def test_items_of_several_heads_end_a_schedule_only_where_that_is_sooner():
    """Where one head is even enough, nothing of the others is taken out of turn, long as it may be for its head."""
    draw, head = np.random.default_rng(0), np.repeat(np.arange(32), 128)
    causal = 4 * (128 - np.arange(128))  # of four query heads
    for one, heads in ((np.full(128, 9), 32), (draw.poisson(13, 128), 32), (causal, 8)):
        order = order_work_tiles(np.tile(one, (1, heads, 1)), 1, 132, False)
        assert np.all(np.diff(head[order][:-132]) >= 0)
    borders = np.sort(draw.choice(np.arange(1, 128), 7, replace=False))
    documents = np.arange(128) - np.append(0, borders)[np.searchsorted(borders, np.arange(128), side="right")]
    assert np.any(np.diff(head[order_work_tiles(np.tile(documents, (1, 5, 1)), 1, 132, False)][:-132]) < 0)


def test_neighbours_share():
    """Blocks that see the blocks before them, of every second row of blocks, and rows of another head."""
    spans = np.zeros((1, 2, 9, 3), np.int32)
    near = [[max(0, i - 3 + j) for j in range(4)] for i in range(9)]
    for lists, shared in ((near, True), ([[j + 4 * (i % 2) for j in range(4)] for i in range(9)], False)):
        spans[..., 2] = 4 * np.arange(1, 19).reshape(2, 9)
        spans[..., :2] = spans[..., 2:] - 4
        assert has_overlapping_neighbors(spans, np.tile(np.ravel(lists), 2).astype(np.int32), 20) == shared


@pytest.mark.parametrize("rounds", [1, 7, 8, 19])
@pytest.mark.parametrize("known", [True, False])
def test_waves(rounds, known):
    """Each program's items, in their order, are those of several that begin one after the other."""
    schedule = np.pad(np.arange(5 * rounds, dtype=np.int32).reshape(rounds, 5), [(0, 1), (0, 0)], constant_values=-1)
    schedule[rounds - 1, 3:] = -1
    found = np.asarray(split_into_waves(schedule if known else jnp.asarray(schedule)))
    assert found.dtype == np.int32 and found.shape == (-(-rounds // NUM_WAVES) + 1, NUM_WAVES * 5)
    assert np.all((found[1:] < 0) | (found[:-1] >= 0)) and np.all(found[-1] < 0)
    for program, line in enumerate(schedule.T):
        own = found[:, program::5].T.ravel()
        np.testing.assert_array_equal(own[own >= 0], line[line >= 0])


@pytest.mark.parametrize(("items", "programs"), [(200, 5), (512, 132), (3, 132), (35, 7)])
def test_dealt(items, programs):
    """Items go in their order, each to a program that has least until then."""
    draw = np.random.default_rng(items)
    order, costs = draw.permutation(items).astype(np.int32), draw.integers(0, 60, items)
    found = assign_greedily(order, costs, programs)
    assert found.dtype == np.int32 and found.shape[1] == min(items, programs)
    by_item = np.empty(items, int)
    by_item[order] = costs
    assert makespan(found, by_item) == max(sum(by_item[x] + OVERHEAD_STEPS for x in line if x >= 0) for line in found.T)
    had, counts = np.zeros((2, found.shape[1]), int)
    for item, cost in zip(order, costs, strict=True):
        ((number, program),) = np.argwhere(found == item)
        assert had[program] == had.min() and number == counts[program]
        had[program] += cost + OVERHEAD_STEPS
        counts[program] += 1
    assert np.ptp(had) <= 60


@pytest.mark.parametrize("lost", [0, 1e6])
def test_pieces(lost):
    """Lists of two key heads, of which the second one has more query heads, and some of these no entries."""
    counts = np.random.default_rng(0).integers(0, 30, (7, 6))
    counts[3] = 0
    counts[2:, 1] += 9000 * (counts[2:, 1] > 0)
    key_heads, programs, batch = np.array([0, 0, 1, 1, 1, 1, 1]), 5, 3
    own = key_heads == np.arange(2)[:, None]
    steps = own @ counts
    before = np.concatenate([(counts[x].cumsum(0) - counts[x]) for x in own])
    order, pieces = split_long_lists(steps, before, key_heads, batch, programs, lost)
    costs = np.tile(steps.ravel(), batch)
    if lost:
        assert pieces is None and order is None
        return
    assert pieces is not None and order is not None and order.dtype == np.int32
    assert sorted(order) == list(range(batch * len(pieces)))
    assert np.all(np.diff(pieces[:, 1]) >= 0)  # one query head after the other, and one batch entry
    heads = order[: -2 * programs] // len(pieces) * len(key_heads) + pieces[order[: -2 * programs] % len(pieces), 1]
    assert np.all(np.diff(heads) >= 0)
    walked, found = [np.zeros(n, int) for n in counts.ravel()], []
    for block, first, end, skipped, stop in pieces:
        assert len({*key_heads[first:end]}) == 1
        parts = [walked[head * 6 + block] for head in range(first, end)]
        parts[-1] = parts[-1][:stop]
        parts[0] = parts[0][skipped:]
        for part in parts:
            part += 1
        found.append(sum(map(len, parts)))
    assert all(np.all(x == 1) for x in walked)
    whole = finish_time(order_work_tiles(steps[None], batch, programs, False), costs, programs)
    assert finish_time(order, np.tile(found, batch), programs) < 1.1 * costs.sum() / programs < whole


@pytest.mark.parametrize(("group", "longest", "cut"), [(8, 128, True), (4, 128, False), (8, 32, False)])
def test_long_lists_of_many_query_heads_are_cut_by_head(group, longest, cut):
    """A causal mask, whose whole items would be done as early."""
    counts, head = longest - np.arange(longest), np.arange(4 * group)
    steps, before = np.tile(group * counts, (4, 1)), (head % group)[:, None] * counts
    _, pieces = split_long_lists(steps, before, head // group, 4, 132, 20)
    assert (pieces is not None) == cut
    if pieces is not None:
        block, first, end, skipped, stop = pieces.T
        assert np.max((end - 1 - first) * counts[block] + stop - skipped) <= longest


def lists_of(masks, length, queries=128):
    """The lists of the key blocks of the last pass of some masks."""
    chains = [sl.make_plan(mask, length, implementation="triton").chains[0] for mask in masks]
    return planned_block_pairs([chain[-1].mask for chain in chains], (queries, 128), False)[0].sorted(True).lists(True)


@pytest.mark.parametrize(("length", "programs", "alike"), [(8192, 5, False), (9000, 132, False), (9000, 132, True)])
def test_pieces_of_ranges(monkeypatch, length, programs, alike):
    """Each entry of each query head is in one piece, with entries of its range only, and later ranges come first."""
    monkeypatch.setattr(schedule, "CACHED_BYTES", 0)
    monkeypatch.setattr(schedule, "MIN_RANGE", 5 * 128)
    lists = lists_of([sl.Causal(), sl.Causal() & (sl.Window(64) | sl.Columns(128, 120))], length)
    kinds, key_heads, batch = np.full(6, 1) if alike else np.arange(6) % 2, np.arange(6) // 3, 2
    order, pieces = split_by_query_ranges(lists, kinds, key_heads, batch, programs, 128, 1)
    assert order is not None and pieces is not None and order.dtype == pieces.dtype == np.int32
    np.testing.assert_array_equal(order, np.arange(batch * len(pieces) * (6 if alike else 1)))
    if alike:  # those of head 0
        pieces = np.concatenate([pieces + np.array([0, head, head, 0, 0]) for head in range(6)])
    walked = np.zeros((6, len(lists.inner_block)), int)
    ranges = []
    for block, head, end, skipped, stop in pieces.tolist():
        assert end == head + 1 and stop > skipped
        first, _, last = lists.spans[0, kinds[head], block]
        assert first + stop <= last
        walked[head, first + skipped : first + stop] += 1
        (number,) = {*(lists.inner_block[first + skipped : first + stop] // 5).tolist()}
        ranges.append((head, -number, skipped - stop))
    for head, own in enumerate(walked):
        here = np.zeros(len(own), int)
        for first, _, last in lists.spans[0, kinds[head]]:
            here[first:last] = 1
        np.testing.assert_array_equal(own, here)
    assert ranges == sorted(ranges)
    nothing = dataclasses.replace(lists, spans=np.zeros_like(lists.spans), inner_block=lists.inner_block[:0])
    assert split_by_query_ranges(nothing, kinds, key_heads, batch, programs, 128, 1) == (None, None)


FIXED = sl.preset("sparse_transformer_fixed", stride=128, summary=8)


@pytest.mark.parametrize(
    ("mask", "length", "heads", "is_cut"),
    [
        (FIXED, 16384, 32, True),
        (FIXED, 32768, 16, True),
        (FIXED, 32768, 8, False),  # all lists begin together
        (sl.Causal(), 65536, 16, False),
        (sl.Full(), 32768, 16, False),
        (sl.Causal() & sl.Window(1023), 65536, 16, False),
        (sl.Causal() & sl.BlockDiagonal(20000), 65536, 16, False),
        (sl.preset("longformer", window=512, global_tokens=64), 32768, 16, False),
    ],
)
def test_lists_are_cut_where_programs_drift_apart(mask, length, heads, is_cut):
    """With one mask of all heads of one batch entry, on 132 multiprocessors, in bfloat16 and with heads of 128."""
    head = np.arange(heads)
    _, pieces = split_by_query_ranges(lists_of([mask], length), 0 * head, head, 1, 132, 128, 128 * 8)
    assert (pieces is not None) == is_cut


@pytest.mark.parametrize(
    ("length", "queries", "group", "is_cut"),
    [(131072, 128, 4, False), (262144, 512, 1, False), (262144, 512, 4, True), (524288, 2048, 1, True)],
)
def test_lists_are_cut_where_programs_stray_apart(length, queries, group, is_cut):
    """Causal lists are nearly of one length; where they are long, programs are soon at different queries."""
    head = np.arange(4 * group)
    lists = lists_of([sl.Causal()], length, queries)
    order, pieces = split_by_query_ranges(lists, 0 * head, head // group, 1, 132, queries, 128 * 8)
    assert (pieces is not None) == is_cut
    if order is not None and pieces is not None:  # of one head, whatever their number
        assert len(order) == len(head) * len(pieces) < len(head) * (length // 128) * (length // 16384 + 1) / 2 * 1.2
        assert np.all((pieces[:, 4] - pieces[:, 3]) * queries <= 16384)


def made(blocks, step=1):
    """Lists of key blocks, of which each sees every ``step``-th block of 1024 behind its own."""
    rows = [np.arange(1023, first - 1, -step) for first in np.linspace(0, 1000, blocks).astype(int)]
    ends = np.cumsum([len(x) for x in rows])
    spans = np.stack([ends - [len(x) for x in rows], ends, ends], axis=1)[None, None].astype(np.int32)
    block = np.concatenate(rows).astype(np.int32)
    return BlockLists(spans, block, 0 * block - 1, None, 1024)


@pytest.mark.parametrize(
    ("blocks", "step", "held", "is_cut"),
    [
        (64, 1, 1024, True),
        (64, 40, 1024, False),  # 13 entries in the mean would be cut into pieces of few
        (64, 1, 64, False),  # all fits
        (1000, 1, 1024, False),  # lists of programs that run together are about as long
    ],
)
def test_what_lists_are_cut_by(blocks, step, held, is_cut):
    head = np.arange(8)
    _, pieces = split_by_query_ranges(made(blocks, step), 0 * head, head, 1, 132, 128, held)
    assert (pieces is not None) == is_cut
