"""Grids and lengths: a grid fills the sequence, or says where in it its tokens are."""

import jax
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from sparse_layers.masks.lengths import check_lengths
from sparse_layers.ops.planning.context_parallel import plan_exchanges

NEAR = sl.Window(1, 1)
GRID = sl.Grid((8, 8), NEAR)
SHORT = {  # a mask, and lengths of which one exceeds it by 1
    "class token": (GRID | sl.Global(1), 65, 65),
    "alone": (GRID, 65, 65),
    "and": (sl.Causal() & GRID, 65, 65),
    "not": (~(sl.Causal() & ~GRID), 65, 65),
    "transposed": (sl.Prefix(1) | GRID.T, 65, 65),
    "lifted": (sl.Blocks(GRID, 4), 257, 257),
    "shifted": (sl.Shifted(GRID | sl.Global(1), 3), 62, 62),
    "queries": (GRID, 65, 64),
    "keys": (GRID.T, 64, 65),
    "video": (sl.Radial(4, 16), 65, 65),
    "columns": (sl.ColumnMajor(4, 16, NEAR), 65, 65),
    "one axis": (sl.Neighborhood(64, 7) | sl.Prefix(1), 65, 65),
    "graph": (sl.Global(1) | sl.from_csr(np.arange(65), np.arange(64)), 65, 65),
    "array in blocks": (sl.Blocks(sl.Array(np.eye(4, dtype=bool)), 16), 65, 65),
}

DOORS = {
    "plan": lambda mask: sl.make_plan(mask, 65),
    "per head": lambda mask: sl.make_plan([sl.Full(), mask], 65),
    "bound": lambda mask: sl.bind(mask, 2, 65, 65),
    "picture": lambda mask: sl.picture(mask, 65),
    "describe": lambda mask: sl.describe(mask, 65),
    "draw": lambda mask: sl.draw(mask, 65),
    "op": lambda mask: sl.block_sparse_attention(*np.zeros((3, 1, 65, 2, 8), np.float32), mask),
    "fn": lambda mask: sl.make_attention_fn(mask, 65),
    "layer": lambda mask: sl.SparseSelfAttention(2, 8, pattern=mask, seq_len=65, rngs=nnx.Rngs(0)),
    "block": lambda mask: sl.SparseTransformerBlock(2, 8, pattern=mask, seq_len=65, rngs=nnx.Rngs(0)),
    "model": lambda mask: sl.SparseTransformer(9, 2, 8, 1, patterns=mask, causal=False, seq_len=65, rngs=nnx.Rngs(0)),
    "cross": lambda mask: sl.SparseCrossAttention(2, 8, pattern=mask, q_len=4, kv_len=65, rngs=nnx.Rngs(0)),
    "linen": lambda mask: linen.SparseSelfAttention(2, pattern=mask, seq_len=65).init(
        jax.random.key(0), np.zeros((1, 65, 8))
    ),
    "cache": lambda mask: sl.KVCache.empty(mask & sl.Causal(), 65, batch=1, num_heads=2, head_size=8),
}


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), SHORT.values(), ids=SHORT.keys())
def test_a_grid_that_is_too_short_is_refused(mask, q_len, kv_len):
    longest = max(q_len, kv_len)
    check_lengths(mask, *(n - (n == longest) for n in (q_len, kv_len)))
    with pytest.raises(ValueError, match=r"positions, got|has 64 tokens"):
        check_lengths(mask, q_len, kv_len)


@pytest.mark.parametrize("door", DOORS)
def test_every_door_names_both_ways_out(door):
    with pytest.raises(ValueError) as error:
        DOORS[door](GRID | sl.Global(1))
    message = str(error.value)
    for words in ("Grid of shape (8, 8) has 64 tokens, a sequence of 65 has 1 more", "offset=1", "offset=0", "padding"):
        assert words in message, message
    for offset in (0, 1):
        DOORS[door](sl.Grid((8, 8), NEAR, offset=offset) | sl.Global(1))


@pytest.mark.parametrize("name", ["neighborhood", "sliding_tile", "windows", "axial", "image_strided", "image_fixed"])
def test_presets_of_grids(name):
    with pytest.raises(ValueError, match=r"sequence of 105 has 9 more.*offset=9.*offset=0"):
        sl.make_plan(f"{name}:shape=8x12" + ",tile=2" * (name == "sliding_tile"), 105)
    options = {"shape": (8, 12)} | ({"tile": 2} if name == "sliding_tile" else {})
    for offset in (0, 9):
        assert sl.make_plan(sl.preset(name, offset=offset, **options), 105).chains[0]
    assert sl.preset(name, offset=None, **options) == sl.preset(name, **options)


@pytest.mark.parametrize("name", ["spatial_temporal", "radial"])
def test_presets_of_videos(name):
    with pytest.raises(ValueError, match=r"sequence of 400 has 16 more.*offset=16.*offset=0"):
        sl.make_plan(f"{name}:shape=6x8x8", 400)
    assert sl.make_plan(f"{name}:shape=6x8x8,offset=16", 400).chains[0]


def test_a_class_token_shifts_no_neighbourhood():
    """Pixel by pixel: token 1 + p sees the 3 x 3 pixels around p, and token 0."""
    mask = sl.Grid((8, 8), NEAR, offset=1) | sl.Global(1)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 65, 2, 8))
    row, column = np.divmod(np.arange(64), 8)
    allowed = np.ones((65, 65), bool)
    allowed[1:, 1:] = (abs(row[:, None] - row) <= 1) & (abs(column[:, None] - column) <= 1)
    scores = np.where(allowed, np.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5, -np.inf)
    right = np.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    np.testing.assert_allclose(sl.block_sparse_attention(q, k, v, mask), right, atol=1e-5)


def test_shorter_sequences_end_within_the_grid():
    """Inputs, prompts and steps of decoding are shorter than seq_len, which the grid fills."""
    mask = sl.Causal() & sl.Grid((6, 6), sl.Window(2, 2))
    model = sl.SparseTransformer(9, 2, 8, 1, patterns=mask, seq_len=36, rngs=nnx.Rngs(0))
    tokens = np.arange(20)[None] % 9
    logits, caches = model.prefill(tokens[:, :-1], chunk=7)
    whole = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(logits, whole[:, -2], atol=1e-5)
    np.testing.assert_allclose(model.decode_step(tokens[:, -1], caches, np.array([19]))[0], whole[:, -1], atol=1e-5)
    assert sl.generate(model, [[1, 2, 3]], 33).shape == (1, 33)


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_devices_may_have_rows_beyond_the_grid(devices):
    """Each has as many rows as the others, so that some lie behind the last token."""
    allowed = GRID.dense(64)
    pairs = 0
    for exchange, masks in plan_exchanges((GRID,), 64, devices, "xla"):
        for rank in range(devices):
            plan = exchange.local_plan(masks, rank)
            pairs += int(plan.masks[0].dense(plan.q_len, plan.kv_len).sum())
    assert pairs == allowed.sum()
