"""Presets of block diffusion against their rules, written out pair by pair, and rectangles, of which they are made."""

import jax
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.states import EMPTY, FULL, PARTIAL
from sparse_layers.ops.planning.blocks import active_blocks
from tests.masks.test_masks import exact_states, rectangles


def matrix(rule, q_len, kv_len):
    return np.array([[rule(q, k) for k in range(kv_len)] for q in range(q_len)])


def block_diffusion(n, size):
    """Returns the rule of the paper's three masks: block-diagonal, offset block-causal and block-causal."""

    def rule(q, k):
        q_clean, k_clean = q >= n, k >= n
        q_block, k_block = (q - n * q_clean) // size, (k - n * k_clean) // size
        diagonal = q_block == k_block and q_clean == k_clean
        offset_block_causal = q_block > k_block and k_clean and not q_clean
        block_causal = q_block >= k_block and k_clean and q_clean
        return diagonal or offset_block_causal or block_causal

    return rule


@pytest.mark.parametrize("n", [1, 2, 7, 24, 31])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 40])
def test_block_diffusion(n, size):
    mask = sl.preset("block_diffusion", n=n, block_size=size)
    for length in (n, 2 * n, 2 * n + 5):
        np.testing.assert_array_equal(mask.dense(length), matrix(block_diffusion(n, size), length, length))


def draft_blocks(anchors, context, size):
    """Returns the rule for anchors at any positions of the context."""

    def rule(q, k):
        j = q // size
        return k < anchors[j] if k < context else (k - context) // size == j

    return rule


@pytest.mark.parametrize("context", [1, 16, 30, 33])
@pytest.mark.parametrize(("size", "stride"), [(1, 1), (4, 4), (2, 5), (5, 3), (8, 16), (40, 7)])
def test_draft_blocks(context, size, stride):
    anchors = [*range(0, context, stride)]
    q_len = len(anchors) * size
    mask = sl.preset("draft_blocks", total_seq_len=context, block_size=size, stride=stride)
    rule = draft_blocks(anchors, context, size)
    np.testing.assert_array_equal(mask.dense(q_len, context + q_len), matrix(rule, q_len, context + q_len))


def test_draft_blocks_with_anchors_as_order_ids():
    """The mask and the ids that the docstring names allow the same pairs as anchors that are known beforehand."""
    context, size, anchors = 20, 3, np.array([4, 9, 9, 15])
    q_len = len(anchors) * size
    mask = sl.Prefix(context) | sl.Rectangle(sl.BlockDiagonal(size), kv_start=context)
    q_order, k_order = np.repeat(anchors, size), np.r_[np.arange(context) + 1, np.zeros(q_len, int)]
    allowed = mask.dense(q_len, context + q_len) & (k_order <= q_order[:, None])
    np.testing.assert_array_equal(allowed, matrix(draft_blocks(anchors, context, size), q_len, context + q_len))


PRESETS = {
    "block_diffusion": (sl.preset("block_diffusion", n=64, block_size=8), 128, 128),
    "block_diffusion, ragged": (sl.preset("block_diffusion", n=37, block_size=5), 74, 74),
    "draft_blocks": (sl.preset("draft_blocks", total_seq_len=64, block_size=8, stride=16), 32, 96),
    "draft_blocks, ragged": (sl.preset("draft_blocks", total_seq_len=53, block_size=3, stride=7), 24, 77),
}


@pytest.mark.parametrize("name", PRESETS)
def test_block_states(name):
    mask, q_len, kv_len = PRESETS[name]
    q0, q1, k0, k1 = rectangles(np.random.default_rng(2), 600, min(q_len, kv_len))
    shift = kv_len - min(q_len, kv_len)
    corners = q0, q1, k0 + shift, k1 + shift
    true, states = exact_states(mask.dense(q_len, kv_len), corners), mask.block_state(*corners)
    sure = states < 3
    np.testing.assert_array_equal(states[sure], true[sure])
    # Only rectangles that reach into two parts may be unsure, where several masks allow some pairs.
    part = next(x for x in (64, 37, 53) if repr(x) in repr(mask))
    one_part = (corners[2] >= part) | (corners[3] < part)
    one_part &= (q0 >= part) | (q1 < part) | name.startswith("draft")
    assert sure[one_part].all() and one_part.sum() > 50


def test_long_plans_count_blocks_in_closed_form():
    """At 2 n = 131,072 tokens, the 128 x 128 blocks of each quadrant: the diagonal, and two triangles with it."""
    half = 65_536 // 128
    active = active_blocks(sl.preset("block_diffusion", n=65_536), 2 * half, 2 * half, 128, 128)
    triangle = half * (half + 1) // 2
    assert len(active.rows) == half + 2 * triangle
    # Clean blocks of 128 x 128 before the diagonal are full. On it, blocks of 16 tokens are smaller.
    assert np.count_nonzero(active.states == FULL) == 2 * (triangle - half)
    drafts = sl.preset("draft_blocks", total_seq_len=131_072, block_size=8, stride=32)
    queries = 131_072 // 32 * 8 // 128  # blocks of queries, each of 16 anchors that are 512 tokens apart in all
    active = active_blocks(drafts, queries, 131_072 // 128 + queries, 128, 128)
    assert len(active.rows) == sum(4 * i + 4 for i in range(queries)) + queries


@pytest.mark.parametrize("name", PRESETS)
def test_attention_of_two_parts(name):
    mask, q_len, kv_len = PRESETS[name]
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, length, 2, 8)).astype(np.float32) for length in (q_len, kv_len, kv_len))
    scores = np.where(mask.dense(q_len, kv_len), np.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5, -np.inf)
    expected = np.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    params = sl.FwdParams(q_blocksize=16, kv_blocksize=16)
    out = sl.block_sparse_attention(q, k, v, mask, implementation="xla", fwd_params=params)
    np.testing.assert_allclose(out, expected, atol=1e-5)


# --- rectangles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [sl.Full(), sl.Causal(), sl.Random(2), sl.LogSparse().T, sl.Columns(5, 3)], ids=repr)
@pytest.mark.parametrize("bounds", [(0, 0, None, None), (3, 8, None, 9), (11, 2, 4, None), (50, 0, 3, 3)])
def test_a_rectangle_is_a_part_of_a_larger_array(inner, bounds):
    q_start, kv_start, q_len, kv_len = bounds
    expected = np.zeros((40, 50), bool)
    rows, columns = slice(q_start, q_len and q_start + q_len), slice(kv_start, kv_len and kv_start + kv_len)
    region = expected[rows, columns]
    if region.size:
        region[:] = inner.dense(*region.shape)
    mask = sl.Rectangle(inner, q_start, kv_start, q_len, kv_len)
    np.testing.assert_array_equal(mask.dense(40, 50), expected)


def test_block_states_of_rectangles():
    mask = sl.Rectangle(sl.Full(), q_start=4, kv_start=8, q_len=4, kv_len=8)
    starts = np.array([0, 4, 8, 12, 16])
    states = mask.block_state(starts[:, None], starts[:, None] + 3, starts, starts + 3)
    np.testing.assert_array_equal(states, FULL * matrix(lambda i, j: i == 1 and j in (2, 3), 5, 5))
    assert mask.block_state(3, 4, 8, 8) == PARTIAL and mask.block_state(5, 5, 15, 16) == PARTIAL
    assert mask.block_state(8, 9, 8, 9) == EMPTY


def test_tables_are_looked_up_inside_of_rectangles_only():
    table = np.random.default_rng(0).random((6, 7)) < 0.5

    def mask_mod(b, h, q, k):
        assert np.min(q) >= 0 and np.min(k) >= 0
        return table[q, k]

    expected = np.zeros((16, 30), bool)
    expected[10:, 20:27] = table
    mask = sl.Rectangle(sl.MaskMod(mask_mod), q_start=10, kv_start=20, q_len=6, kv_len=7)
    np.testing.assert_array_equal(mask.dense(16, 30), expected)
    assert not mask.computable and sl.Rectangle(sl.Causal(), q_start=1).computable
    for inner in (sl.Array(table), sl.from_csr(np.r_[0, np.cumsum(table.sum(1))], np.nonzero(table)[1], 7)):
        rectangle = sl.Rectangle(inner, q_start=10, kv_start=20, q_len=6, kv_len=7)
        np.testing.assert_array_equal(rectangle.dense(16, 30), expected)
        assert sl.make_plan(rectangle, 16, 30).chains[0]
        with pytest.raises(ValueError, match=r"must cover \(7, 7\) positions, got \(6, 7\)"):
            sl.make_plan(sl.Rectangle(inner, q_start=10, kv_start=20, kv_len=7), 17, 30)


def test_grids_in_rectangles():
    """A grid after a prompt of 9 tokens, which only queries of the grid see."""
    mask = sl.Rectangle(sl.Grid((3, 4), sl.Window(1, 1)), q_start=9, kv_start=9, q_len=12, kv_len=12)
    np.testing.assert_array_equal(mask.dense(25)[9:21, 9:21], sl.Grid((3, 4), sl.Window(1, 1)).dense(12))
    assert mask.dense(25).sum() == sl.Grid((3, 4), sl.Window(1, 1)).dense(12).sum()
    assert sl.make_plan(mask, 25).chains[0]
    assert sl.grid_picture(mask, (3, 4), query=(1, 1)).splitlines()[1] == "■ ● ■ ·"


@pytest.mark.parametrize(("block", "same"), [((4, 4), 4), ((3, 5), None)])
def test_blocks_of_unequal_sides(block, same):
    inner = sl.Causal() & sl.Columns(3, 1)
    mask = sl.Blocks(inner, block)
    np.testing.assert_array_equal(mask.dense(6 * block[0], 6 * block[1]), np.kron(inner.dense(6), np.ones(block, bool)))
    assert mask.block == (same or block) and mask.sizes == block
    assert same is None or mask == sl.Blocks(inner, same)
    plan = sl.make_plan(mask | sl.Blocks(sl.Prefix(1) | sl.Prefix(1).T, block), 60, 50)
    total = sum(
        np.count_nonzero(block_pass.mask.dense(block_pass.q_order.rows, block_pass.kv_order.rows))
        for block_pass in plan.chains[0]
    )
    assert total == (mask | sl.Blocks(sl.Global(1), block)).dense(60, 50).sum()
