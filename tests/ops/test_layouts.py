"""Arrays that fit a call in another order of axes: one warning a process says how they are read, and what to write."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import haiku, linen
from sparse_layers.ops import layouts

OP = sl.block_sparse_attention


@pytest.fixture(autouse=True)
def a_new_process(monkeypatch):
    monkeypatch.setattr(layouts, "_warned", set())


def ones(*shape):
    return jnp.ones(shape)


def heads_first(*shape, kv_heads=None):
    batch, heads, length, size = shape
    return ones(*shape), *(ones(batch, kv_heads or heads, length, size) for _ in "kv")


FN = sl.make_attention_fn(sl.Causal(), 64)
LAYER = {"pattern": sl.Causal(), "seq_len": 64}
NNX = sl.SparseSelfAttention(4, 16, **LAYER, rngs=nnx.Rngs(0))
BATCH_LAST = "If axes are [T, B, F], as in PyTorch without batch_first, write x.swapaxes(0, 1)"
SWAP = "If axes are [B, N, T, H], as in PyTorch, write x.swapaxes(1, 2)"
BY_ENTRY = "If it differs by batch entry, write jax.vmap(sl.block_sparse_attention)(query, key, value, mask)"

ARRAYS = "A pattern of 2 arrays is read by heads, head h takes entry h % 2"
MASKS = np.stack([np.tri(64, dtype=bool), np.eye(64, dtype=bool)])
KEY = jax.random.key(0)

# (call, how the axes are read, what to write instead)
TRAPS = {
    "[B, N, T, H]": (
        lambda: OP(*heads_first(2, 8, 128, 16), sl.Causal()),
        "block_sparse_attention reads query of shape (2, 8, 128, 16) as [B, T, N, H], T = 8 tokens and N = 128 heads",
        SWAP,
    ),
    "[B, N, T, H], grouped": (lambda: OP(*heads_first(2, 8, 128, 16, kv_heads=2), "local"), "N = 128 heads", SWAP),
    "[B, N, T, H], cross": (
        lambda: OP(ones(2, 8, 64, 16), ones(2, 8, 32, 16), ones(2, 8, 32, 16), sl.Full()),
        "T = 8 tokens and N = 64 heads",
        SWAP,
    ),
    "[B, N, T, H], jitted": (
        lambda: jax.jit(lambda *x: OP(*x, sl.Causal()))(*heads_first(1, 4, 32, 16)),
        "T = 4 tokens and N = 32 heads",
        SWAP,
    ),
    "[B, 1, T, H]": (lambda: OP(*heads_first(2, 1, 256, 16), sl.Causal()), "T = 1 tokens and N = 256 heads", SWAP),
    "[B, T, F]": (
        lambda: OP(*[ones(2, 128, 64)] * 3, sl.Causal()),
        "(2, 128, 64) as [T, N, H], T = 2 tokens and N = 128 heads, without a batch",
        "If axes are [B, T, F], split the features into heads, x.reshape(2, 128, N, 64 // N)",
    ),
    "[B, T, F] of one": (lambda: OP(*[ones(1, 256, 64)] * 3, sl.Causal()), "T = 1 tokens", "x.reshape(1, 256, N,"),
    "[N, T, H]": (lambda: OP(*[ones(4, 64, 16)] * 3, sl.Causal()), "T = 4 tokens", "If [N, T, H], write x.swapaxes(0"),
    "attention_fn, seq_len": (lambda: FN(*heads_first(2, 8, 64, 16)), "attention_fn reads query of shape (2, 8", SWAP),
    "attention_fn, shorter": (
        lambda: sl.make_attention_fn(sl.Causal(), 512)(*heads_first(2, 8, 256, 16)),
        "T = 8 tokens and N = 256 heads",
        SWAP,
    ),
    "Rope": (lambda: sl.Rope()(ones(2, 8, 256, 16)), "Rope reads query of shape (2, 8, 256, 16)", SWAP),
    "mask [B, T, T]": (
        lambda: OP(*[ones(4, 32, 4, 16)] * 3, np.tri(32, dtype=bool)[None].repeat(4, 0)),
        "block_sparse_attention reads mask of shape (4, 32, 32) as [N, T, S], one for each of 4 heads",
        BY_ENTRY,
    ),
    "run-time mask [B, T, T]": (
        lambda: OP(*[ones(2, 32, 2, 16)] * 3, jnp.ones((2, 32, 32), bool)),
        "reads mask of shape (2, 32, 32) as [N, T, S], one for each of 2 heads",
        BY_ENTRY,
    ),
    "plan of masks [B, T, T]": (lambda: OP(*[ones(2, 64, 4, 16)] * 3, sl.make_plan(MASKS, 64)), ARRAYS, BY_ENTRY),
    "masks [B, T, T], attention_fn": (
        lambda: sl.make_attention_fn(MASKS, 64)(*[ones(2, 64, 4, 16)] * 3),
        ARRAYS,
        BY_ENTRY,
    ),
    "masks [B, T, T], NNX": (
        lambda: sl.SparseSelfAttention(4, 16, **LAYER | {"pattern": MASKS}, rngs=nnx.Rngs(0))(ones(2, 64, 16)),
        ARRAYS,
        BY_ENTRY,
    ),
    "masks [B, T, T], Linen": (
        lambda: linen.SparseSelfAttention(4, **LAYER | {"pattern": MASKS}).init(KEY, ones(2, 64, 16)),
        ARRAYS,
        BY_ENTRY,
    ),
    "masks [B, T, T], model": (
        lambda: sl.SparseTransformer(9, 4, 16, 1, patterns=MASKS, seq_len=64, rngs=nnx.Rngs(0))(
            jnp.zeros((2, 64), int)
        ),
        ARRAYS,
        BY_ENTRY,
    ),
    "[T, B, F], NNX": (lambda: NNX(ones(64, 2, 16)), "inputs are read as 64 sequences of 2 tokens", BATCH_LAST),
    "[T, B, F], Linen": (
        lambda: linen.SparseSelfAttention(4, **LAYER).init(jax.random.key(0), ones(64, 2, 16)),
        "inputs are read as 64 sequences of 2 tokens, shape (64, 2, 16), by a layer that is made for 64 tokens",
        BATCH_LAST,
    ),
    "[T, B, F], block": (
        lambda: sl.SparseTransformerBlock(4, 16, **LAYER, rngs=nnx.Rngs(0))(ones(64, 2, 16)),
        "64 sequences of 2 tokens",
        BATCH_LAST,
    ),
    "[T, B], model": (
        lambda: sl.SparseTransformer(9, 4, 16, 1, patterns="causal", seq_len=64, rngs=nnx.Rngs(0))(
            jnp.zeros((64, 2), int)
        ),
        "64 sequences of 2 tokens",
        BATCH_LAST,
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_likely_mistake_warns_once(trap):
    call, reading, cure = TRAPS[trap]
    with pytest.warns(UserWarning) as caught:
        call()
    (warning,) = caught
    message = str(warning.message)
    assert reading in message and cure in message
    call()  # pytest makes warnings errors: there is none any more

    layouts._warned.clear()
    (silence,) = re.findall(r"warnings.filterwarnings\('ignore', '(.*)'\)", message)
    with warnings.catch_warnings(record=True) as rest:
        warnings.filterwarnings("ignore", silence)
        call()
    assert not rest


@pytest.mark.parametrize("trap", ["[B, N, T, H]", "mask [B, T, T]", "attention_fn, seq_len", "[T, B, F], NNX"])
def test_the_warning_points_to_the_call(trap):
    with pytest.warns(UserWarning) as caught:
        TRAPS[trap][0]()
    assert [warning.filename for warning in caught] == [__file__]


# Calls that are right, of shapes near those of mistakes.
RIGHT = {
    "a short prompt": lambda: OP(*[ones(1, 5, 12, 16)] * 3, sl.Causal()),
    "a short prompt of many key heads, by a plan": lambda: OP(*[ones(1, 5, 40, 16)] * 3, sl.make_plan(sl.Causal(), 5)),
    "a step of decoding": lambda: OP(ones(1, 1, 32, 16), *[ones(1, 7, 32, 16)] * 2, sl.Full()),
    "a single token": lambda: OP(*[ones(4, 1, 32, 16)] * 3, sl.Causal()),
    "few queries": lambda: OP(ones(2, 3, 32, 16), *[ones(2, 64, 32, 16)] * 2, sl.Full()),
    "grouped heads": lambda: OP(ones(2, 9, 64, 16), *[ones(2, 9, 8, 16)] * 2, sl.Causal()),
    "ids say the length": lambda: OP(*[ones(1, 5, 32, 16)] * 3, sl.Causal(), segment_ids=jnp.zeros((1, 5), int)),
    "an array says the length": lambda: OP(*[ones(1, 5, 32, 16)] * 3, np.tri(5, dtype=bool)),
    "a layer of many heads": lambda: sl.SparseSelfAttention(32, 64, **LAYER, rngs=nnx.Rngs(0))(ones(1, 5, 64)),
    "a dense layer of many heads": lambda: nnx.MultiHeadAttention(
        32, 64, attention_fn=FN, decode=False, rngs=nnx.Rngs(0)
    )(ones(1, 5, 64)),
    "a mask by head": lambda: OP(*[ones(3, 32, 4, 16)] * 3, np.ones((4, 32, 32), bool)),
    "one head, one entry": lambda: OP(*[ones(1, 32, 1, 16)] * 3, np.ones((1, 32, 32), bool)),
    "a pattern of arrays by head": lambda: OP(*[ones(3, 64, 4, 16)] * 3, [*MASKS]),
    "presets by head": lambda: OP(*[ones(2, 64, 4, 16)] * 3, ["causal", "local"]),
    "a large batch": lambda: NNX(ones(100, 64, 16)),
    "as many sequences as tokens": lambda: NNX(ones(64, 64, 16)),
    "shorter inputs": lambda: NNX(ones(32, 20, 16)),
}


@pytest.mark.parametrize("call", RIGHT)
def test_nothing_is_said_of_what_is_right(call):
    RIGHT[call]()


def test_a_mask_for_each_batch_entry_is_refused_with_the_way_out():
    arrays = [ones(3, 32, 4, 16)] * 3
    for shape in ((3, 32, 32), (3, 1, 32, 32), (3, 4, 32, 32)):
        for mask in (np.ones(shape, bool), jnp.ones(shape, bool)):
            with pytest.raises(
                ValueError, match=re.escape("jax.vmap(sl.block_sparse_attention)(query, key, value, mask)")
            ):
                OP(*arrays, mask)


@pytest.mark.parametrize("door", ["op", "layer", "cache"])
def test_arrays_that_do_not_divide_the_heads_are_refused_with_the_way_out(door):
    masks = np.stack([np.tri(64, k=-k, dtype=bool) for k in range(3)])
    calls = {
        "op": lambda: OP(*[ones(3, 64, 4, 16)] * 3, sl.make_plan(masks, 64)),
        "layer": lambda: sl.SparseSelfAttention(4, 16, **LAYER | {"pattern": masks}, rngs=nnx.Rngs(0)),
        "cache": lambda: sl.KVCache.empty(masks, 64, batch=3, num_heads=4, head_size=16),
    }
    with pytest.raises(ValueError, match=re.escape(BY_ENTRY.partition("write ")[2])):
        calls[door]()


def test_describe_says_which_heads_take_which_array():
    assert "note: head h takes entry h % 2; masks that differ by batch entry are jax.vmap(" in sl.describe(MASKS, 64)
    assert "note: head h" not in sl.describe(["causal", "local"], 64)


def test_arrays_by_token_and_batch_entry_are_refused_with_the_way_out():
    ids, x, turned = jnp.zeros((64, 2), int), ones(2, 64, 16), "its axes come in the other order: write x.T"
    model = haiku.hk.transform(lambda: haiku.SparseSelfAttention(4, 4, **LAYER)(x, segment_ids=ids))
    for call in (
        lambda: NNX(x, segment_ids=ids),
        lambda: NNX(x, positions=ids),
        lambda: OP(*[ones(2, 64, 4, 16)] * 3, sl.Causal(), segment_ids=ids),
        lambda: model.init(jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match=turned):
            call()
