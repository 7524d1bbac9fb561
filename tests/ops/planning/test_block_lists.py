import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.states import EMPTY, FULL, PARTIAL
from sparse_layers.ops.planning import block_lists as lists
from sparse_layers.ops.planning.row_orders import Reordered, RowOrder

CAUSAL, NEAR, NONE = sl.Causal(), sl.Causal() & sl.Window(20), sl.Empty()


def natural(masks, t, s):
    return [Reordered(mask, RowOrder(t), RowOrder(s)) for mask in masks]


def decoded(found, transposed, shape, lengths, tiles, granularity=1, batch=0, head=0):
    """How often the list of a batch entry and head visits each pair: int [T, S]."""
    blocks = [-(-length // side) for length, side in zip(lengths, shape, strict=True)]
    spans, block, tile = (np.asarray(x) for x in (found.spans, found.inner_block, found.mask_tile))
    assert spans.dtype == block.dtype == tile.dtype == np.int32
    assert spans.shape[2] == blocks[transposed] and found.num_inner_blocks == blocks[not transposed]
    pairs = np.zeros([n * side for n, side in zip(blocks, shape, strict=True)], int)
    for outer, (first, masked, end) in enumerate(
        spans[batch % len(spans), head // found.heads_per_list % spans.shape[1]]
    ):
        assert 0 <= first <= masked <= end <= len(block)
        for entry in range(first, end):
            may = np.ones(shape, bool)
            if entry >= masked and tile[entry] >= 0:
                may = may & tiles[tile[entry]]
            if entry >= masked and found.active_query_groups is not None:
                word = int(np.asarray(found.active_query_groups)[entry])
                may = may & np.array([word >> part // granularity & 1 for part in range(shape[0])], bool)[:, None]
            row, column = (block[entry], outer) if transposed else (outer, block[entry])
            pairs[row * shape[0] : (row + 1) * shape[0], column * shape[1] : (column + 1) * shape[1]] += may
    return pairs[: lengths[0], : lengths[1]]


def unpacked(tiles, columns):
    return None if tiles is None else lists.unpack_tiles(tiles, columns)


@pytest.mark.parametrize(
    ("masks", "shape"),
    [
        ([CAUSAL], (32, 32)),
        ([CAUSAL, sl.Window(5, 9), sl.Full(), NONE], (16, 24)),
        ([sl.Array(np.random.default_rng(0).random((150, 170)) < 0.1)], (32, 16)),
    ],
    ids=["causal", "several", "array"],
)
def test_both_builders_make_the_same_lists_and_these_are_the_mask(masks, shape):
    t, s = 150, 170
    candidates, tiles = lists.planned_block_pairs(natural(masks, t, s), shape, True)
    assert candidates.state.shape[:2] == (1, len(masks))
    arrays = ("q_block", "kv_block", "state", "mask_tile")

    @functools.partial(jax.jit, static_argnums=1)
    def by_xla(found, transposed):
        return dataclasses.replace(candidates, **dict(zip(arrays, found, strict=True))).lists(transposed)

    for transposed in (False, True):
        planned = candidates.lists(transposed)
        found = by_xla([getattr(candidates, name) for name in arrays], transposed)
        assert planned.static and not isinstance(found.inner_block, np.ndarray)
        np.testing.assert_array_equal(found.spans, planned.spans)
        np.testing.assert_array_equal(planned.counts, planned.spans[..., 1:] - planned.spans[..., :1])
        entries = len(planned.inner_block)  # XLA's arrays are as long as there are candidates
        for name in ("inner_block", "mask_tile"):
            np.testing.assert_array_equal(getattr(found, name)[:entries], getattr(planned, name))
        check_sorted(candidates, planned, transposed)
        for head, mask in enumerate(masks):
            pairs = decoded(planned, transposed, shape, (t, s), unpacked(tiles, shape[1]), head=head)
            np.testing.assert_array_equal(pairs, mask.dense(t, s))


def check_sorted(candidates, wanted, transposed):
    """In the order of their outer blocks, candidates make the same lists, and it is known where each begins.

    Those of key blocks go from the last query on.
    """
    ordered = candidates.sorted(transposed)
    found, starts = ordered.lists(transposed), ordered.starts(transposed)
    np.testing.assert_array_equal(found.spans, wanted.spans)
    for name in ("inner_block", "mask_tile"):
        entries = getattr(found, name).copy()
        for first, masked, end in found.spans.reshape(-1, 3) if transposed else ():
            entries[first:masked], entries[masked:end] = entries[first:masked][::-1], entries[masked:end][::-1]
        np.testing.assert_array_equal(entries, getattr(wanted, name))
    assert starts.dtype == np.int32 and starts.shape == (
        candidates.state.shape[1],
        candidates.num_blocks[transposed] + 1,
    )
    assert (candidates.starts(True) is None) == (np.diff(candidates.kv_block[0]) < 0).any()
    outer, longest = (ordered.kv_block if transposed else ordered.q_block)[0], 0
    for own, bounds, kind in zip(outer, starts, ordered.state[0], strict=True):
        assert bounds[0] == 0 and bounds[-1] == len(own)
        np.testing.assert_array_equal(own, np.arange(len(bounds) - 1).repeat(np.diff(bounds)))
        longest = max(longest, np.bincount(own[kind != EMPTY], minlength=1).max())
    assert ordered.longest(transposed) >= longest


def test_lists_in_row_orders_of_a_pass():
    t, shape = 150, (16, 32)
    for mask, orders in {
        CAUSAL & sl.Strided(7): (RowOrder.residue_major(t, 7), RowOrder.residue_major(t, 7)),
        CAUSAL & sl.Columns(12, 8, 12): (RowOrder(t), RowOrder.periodic(t, 12, 8, 12)),
    }.items():
        moved = Reordered(mask, *orders)
        candidates, tiles = lists.planned_block_pairs([moved], shape, True)
        lengths = tuple(order.rows for order in orders)
        for transposed in (False, True):
            pairs = decoded(candidates.lists(transposed), transposed, shape, lengths, unpacked(tiles, shape[1]))
            np.testing.assert_array_equal(pairs, moved.dense(*lengths))


def test_tiles_are_kept_once_and_rules_need_none():
    masks = natural([CAUSAL, NEAR], 1024, 1024)
    candidates, tiles = lists.planned_block_pairs(masks, (64, 64), True)
    assert tiles.shape == (3, 64, 8) and tiles.dtype == np.uint8  # each one's diagonal, and the window's end
    np.testing.assert_array_equal(lists.pack_tiles(lists.unpack_tiles(tiles, 64)), tiles)
    assert lists.planned_block_pairs(masks, (64, 64), True)[0] is candidates, "made once"
    assert lists.planned_block_pairs(masks, (64, 64), False)[1] is None


@pytest.mark.parametrize("shape", [(32, 48), (48, 16)])
@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        sl.Shifted(sl.BlockDiagonal(36), 5),
        sl.Window(40, 9).T,
        CAUSAL & (sl.Window(50) | sl.Columns(24, 20)),
        ~sl.Strided(6),
    ],
)
def test_tiles_of_masks_that_repeat_are_made_once(monkeypatch, mask, shape):
    """Blocks that are as far from the diagonal, at the same place of the period; not those at the ends."""
    t, s, made = 610, 590, []
    masked_tiles = lists.masked_tiles

    def record(mask, rows, *more):
        made.extend(rows)
        return masked_tiles(mask, rows, *more)

    monkeypatch.setattr(lists, "masked_tiles", record)
    found, tiles = lists.planned_block_pairs(natural([mask], t, s), shape, True)
    assert len(made) < (found.state == PARTIAL).sum()
    for transposed in (False, True):
        pairs = decoded(found.lists(transposed), transposed, shape, (t, s), unpacked(tiles, shape[1]))
        np.testing.assert_array_equal(pairs, mask.dense(t, s))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("masks", [[CAUSAL], [CAUSAL, sl.Window(5, 9), sl.Full(), NONE], [sl.Full()]], ids=len)
def test_blocks_that_are_cut_make_the_lists_of_smaller_ones(masks, transposed):
    """Those of keys, or, for lists of key blocks, of queries; of the last block not all parts exist."""
    lengths, shape, parts = (150, 170), (16, 8), 4
    coarse = (64, 8) if transposed else (16, 32)
    whole, tiles = lists.planned_block_pairs(natural(masks, *lengths), coarse, True)
    tiles = np.concatenate([np.ones((1, *coarse), bool), unpacked(tiles, coarse[1])])
    tiles = tiles.reshape(-1, parts, *shape) if transposed else tiles.reshape(-1, 16, parts, 8).swapaxes(1, 2)
    states = np.where(tiles.all((2, 3)), FULL, np.where(tiles.any((2, 3)), PARTIAL, EMPTY))
    whole = whole.sorted(transposed)
    cut = whole.cut_inner_blocks(parts, transposed, states, -(-lengths[not transposed] // shape[not transposed]))
    found = cut.lists(transposed)
    wanted, _ = lists.planned_block_pairs(natural(masks, *lengths), shape, True)
    wanted = wanted.sorted(transposed).lists(transposed)
    np.testing.assert_array_equal(found.counts, wanted.counts)
    np.testing.assert_array_equal(
        found.inner_block[: len(wanted.inner_block)], wanted.inner_block
    )  # in the same order, too
    for head, mask in enumerate(masks):
        pairs = decoded(found, transposed, shape, lengths, tiles[1:].reshape(-1, *shape), head=head)
        np.testing.assert_array_equal(pairs, mask.dense(*lengths))
    outer = np.asarray(cut.kv_block if transposed else cut.q_block)[0]
    for own, bounds in zip(outer, whole.starts(transposed) * parts, strict=True):
        np.testing.assert_array_equal(own, np.arange(len(bounds) - 1).repeat(np.diff(bounds)))


def test_segments_drop_what_cannot_meet_and_free_what_lies_in_one():
    t, s, shape = 96, 128, (16, 16)
    rng = np.random.default_rng(0)
    q_ids = np.stack([np.repeat([3, 0, -1], 32), np.sort(rng.integers(-1, 4, t)), np.full(t, -1)]).astype(np.int32)
    kv_ids = np.stack([np.repeat([3, 0, 7, -1], 32), np.sort(rng.integers(-1, 4, s)), np.full(s, -1)]).astype(np.int32)
    orders = RowOrder(t), RowOrder(s)
    candidates, tiles = lists.planned_block_pairs(natural([sl.Full()], t, s), shape, True)

    @jax.jit
    def both(*ids):
        found = candidates.limit_by_ids(ids, None, orders, shape)
        return found.lists(False), found.lists(True)

    for transposed, found in enumerate(both(q_ids, kv_ids)):
        for batch in range(3):
            may = (q_ids[batch, :, None] == kv_ids[batch]) & (q_ids[batch, :, None] >= 0)
            pairs = decoded(found, transposed, shape, (t, s), unpacked(tiles, 16), batch=batch)
            assert (pairs[may] == 1).all(), "no pair that may attend is left out, none comes twice"
            exact = [batch != 1, True][batch == 2]
            assert not exact or (pairs == may).all()
        counts = np.asarray(found.counts)[:, 0].sum(1)
        assert counts[0].tolist() == [8, 8] and counts[2].tolist() == [0, 0]
        assert 0 < counts[1, 0] < counts[1, 1] < 48
    assert candidates.limit_by_ids(None, None, orders, shape) is candidates


@pytest.mark.parametrize("by_order", [False, True])
def test_pairs_in_which_ids_exclude_keys_are_marked(by_order):
    """A document ends within a block. The causal mask alone cuts the diagonal blocks of others."""
    t, shape, orders = 96, (16, 16), (RowOrder(96), RowOrder(96))
    ids = np.repeat([0, 1], [40, 56]).astype(np.int32)
    candidates, _ = lists.planned_block_pairs(natural([sl.Causal()], t, t), shape, True)

    @jax.jit
    def mask_tiles(ids):
        segments, order_ids = ((ids * 0,) * 2, (ids, ids)) if by_order else ((ids, ids), None)
        return candidates.limit_by_ids(segments, order_ids, orders, shape, 1000).mask_tile

    allowed = ids <= ids[:, None] if by_order else ids == ids[:, None]
    whole = allowed.reshape(6, 16, 6, 16).all((1, 3))[candidates.q_block, candidates.kv_block]
    assert whole.any() and not whole.all()
    np.testing.assert_array_equal(mask_tiles(ids[None]), candidates.mask_tile + np.where(whole, 0, 1000))


def test_order_drops_what_no_query_sees_and_frees_what_all_see():
    t, s, shape = 96, 120, (16, 16)
    rng, orders = np.random.default_rng(0), (RowOrder(t), RowOrder(s))
    most = np.iinfo(np.int32).max
    q_ids = np.stack([np.arange(t), rng.integers(-9, 9, t), np.full(t, -most - 1), np.full(t, most)]).astype(np.int32)
    kv_ids = np.stack([np.arange(s), rng.integers(-9, 9, s), np.full(s, most), np.full(s, most)]).astype(np.int32)
    candidates, _ = lists.planned_block_pairs(natural([sl.Full()], t, s), shape, True)
    segments = np.zeros((4, t), np.int32), np.zeros((4, s), np.int32)
    states = jax.jit(lambda *ids: candidates.limit_by_ids(segments, ids, orders, shape).state)(q_ids, kv_ids)
    seen = np.pad(kv_ids[:, None, :] <= q_ids[:, :, None], [(0, 0), (0, 0), (0, -s % 16)]).reshape(4, 6, 16, 8, 16)
    real = np.pad(np.ones((t, s), bool), [(0, 0), (0, -s % 16)]).reshape(6, 16, 8, 16)
    some, every = seen.any((2, 4)), (seen | ~real).all((2, 4)) & real.all((1, 3))
    states = np.asarray(states)[:, 0].reshape(4, 6, 8)
    exact = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
    np.testing.assert_array_equal(states, exact)  # sorted or not, as one query sees all that a lesser one sees


def test_run_time_masks():
    mask = np.random.default_rng(0).random((2, 70, 90)) < 0.02
    mask[0, :32], mask[1, :, 32:48] = True, False
    for transposed in (False, True):
        found, tiles = jax.jit(lambda mask, transposed=transposed: _listed(mask, transposed))(mask)
        for head in range(4):
            pairs = decoded(found, transposed, (16, 16), (70, 90), np.asarray(tiles), head=head)
            np.testing.assert_array_equal(pairs, mask[head % 2])
        assert found.counts[0, 0, :, 0].sum() == 2 * 5  # a ragged block is none where every pair may attend


def _listed(mask, transposed):
    candidates, tiles = lists.run_time_block_pairs(mask, (16, 16))
    return candidates.lists(transposed), tiles


# --- blocks chosen at run time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "granularity", "shape", "groups", "heads", "k"),
    [
        ((150, 150), 16, (32, 32), 2, 4, 3),
        ((150, 170), 1, (32, 16), 1, 4, 3),  # 32 parts, one word's bits
        ((150, 170), 1, (16, 16), 4, 4, 5),
        ((130, 130), 64, (16, 32), 2, 4, 2),  # a choice for several blocks of queries
        ((64, 64), 16, (16, 16), 4, 4, 9),
        ((40, 40), 16, (16, 16), 1, 1, 0),
        ((200, 100), 128, (128, 48), 2, 2, 40),  # more than there are
    ],
)
def test_chosen_blocks(lengths, granularity, shape, groups, heads, k):
    """Numbers that come twice, that are none or out of range; masks of one or two kinds of heads, free or not."""
    t, s = lengths
    columns = -(-s // shape[1])
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, columns + 2, (2, -(-t // granularity), groups, k)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = np.iinfo(np.int32).max
    for masks in ([CAUSAL], [CAUSAL, sl.Window(20, 20)], [sl.Full()], [NONE]):
        if heads % len(masks):
            continue
        table, tiles = lists.state_table(natural(masks, t, s), shape, True)

        @jax.jit
        def both(ids, table=table):
            candidates = lists.selected_block_pairs(ids, granularity, shape, table, heads)
            return candidates.lists(False), candidates.lists(True)

        found = both(ids)
        for b, h in np.ndindex(2, heads):
            right = np.zeros((t, columns * shape[1]), bool)
            for row, j in ((row, j) for row, js in enumerate(ids[b, :, h * groups // heads]) for j in js):
                if 0 <= j < columns:
                    right[row * granularity : (row + 1) * granularity, j * shape[1] : (j + 1) * shape[1]] = True
            right = right[:, :s] & masks[h % len(masks)].dense(t, s)
            for transposed in (False, True):
                pairs = decoded(
                    found[transposed], transposed, shape, lengths, unpacked(tiles, shape[1]), granularity, b, h
                )
                np.testing.assert_array_equal(pairs, right)


@pytest.mark.parametrize("k", [1, lists.MAX_COMPARED, lists.MAX_COMPARED + 1])
@pytest.mark.parametrize(("granularity", "rows"), [(1, 1), (16, 8), (1, 4)])
def test_chosen_blocks_in_any_order(granularity, rows, k):
    """They are those that there are in order, each of them once; few blocks of queries that choose alike stay put."""
    t, s, masks = 70, 900, [CAUSAL | sl.Window(0, 400), sl.Full()]
    ids = np.random.default_rng(k).integers(-2, 60, (2, -(-t // granularity), 1, k)).astype(np.int32)
    ids[:, 1, :, k // 2 :] = 3
    table, _ = lists.state_table(natural(masks, t, s), (rows, 16), True)

    @functools.partial(jax.jit, static_argnums=1)
    def live(ids, ordered):
        found = lists.selected_block_pairs(ids, granularity, (rows, 16), table, 2, ordered=ordered)
        return found.state != EMPTY, (found.q_block, found.kv_block, found.state, found.mask_tile)

    def chosen(ordered):
        """Batch entry, head, row, column, kind and tile of each."""
        some, names = live(ids, ordered)
        names = (np.asarray(x)[some] for x in jnp.broadcast_arrays(*names))
        return np.stack([*np.nonzero(some)[:2], *names], axis=-1)

    found, wanted = chosen(False), chosen(True)
    assert np.array_equal(found, wanted) == (rows == 4 or k != lists.MAX_COMPARED)
    np.testing.assert_array_equal(found[np.lexsort(found.T[::-1])], wanted[np.lexsort(wanted.T[::-1])])
    assert len(np.unique(found, axis=0)) == len(found) > 0


def test_chosen_blocks_are_free_where_all_parts_chose_what_the_mask_leaves_whole():
    table, _ = lists.state_table(natural([CAUSAL], 96, 96), (32, 32), True)
    ids = np.array([[0, 2], [2, 0], [0, 1], [0, -1], [1, 0], [0, 1]], np.int32)[None, :, None]
    found = jax.jit(lambda ids: lists.selected_block_pairs(ids, 16, (32, 32), table, 1).lists(False))(ids)
    assert found.counts[0, 0].tolist() == [[0, 1], [1, 2], [2, 2]]
    assert found.active_query_groups[found.spans[0, 0, 1, 0] : found.spans[0, 0, 1, 2]].tolist() == [0b11, 0b01]


def test_a_large_table_has_cells_of_several_blocks(monkeypatch):
    monkeypatch.setattr(lists, "_TABLE_CELLS", 30)
    t, shape = 200, (16, 32)
    mask = CAUSAL & (sl.Window(37) | sl.Strided(5))
    table, tiles = lists.state_table(natural([mask], t, t), shape, True)
    assert table.blocks_per_row == 4 and table.states.size <= 30
    ids = np.broadcast_to(np.arange(7, dtype=np.int32), (1, 13, 1, 7))

    @jax.jit
    def both(ids):
        found = lists.selected_block_pairs(ids, 16, shape, table, 1)
        return found.lists(False), found.lists(True)

    for transposed, found in enumerate(both(ids)):
        pairs = decoded(found, transposed, shape, (t, t), unpacked(tiles, shape[1]), 16)
        np.testing.assert_array_equal(pairs, mask.dense(t))


def test_chosen_blocks_of_a_run_time_mask():
    t, shape = 80, (16, 16)
    mask = np.random.default_rng(0).random((2, t, t)) < 0.5
    mask[:, :40, :16] = True
    ids = np.random.default_rng(1).integers(-1, 5, (1, 5, 1, 3)).astype(np.int32)

    @jax.jit
    def both(mask, ids):
        table, tiles = lists.run_time_state_table(mask, shape)
        found = lists.selected_block_pairs(ids, 16, shape, table, 4)
        return found.lists(False), found.lists(True), tiles

    *found, tiles = both(mask, ids)
    chosen = (ids[0, :, 0, :, None] == np.arange(5)).any(1).repeat(16, axis=0).repeat(16, axis=1)
    for head in range(4):
        for transposed in (False, True):
            pairs = decoded(found[transposed], transposed, shape, (t, t), np.asarray(tiles), 16, head=head)
            np.testing.assert_array_equal(pairs, chosen & mask[head % 2])
