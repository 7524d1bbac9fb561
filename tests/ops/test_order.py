"""Order ids and segment ids against loops over tokens, and the dense rule that order ids stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl

RNG = np.random.default_rng(0)
INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


# --- loops -----------------------------------------------------------------------------------------------------------


def segment_ids(lengths, num_tokens):
    ids = [n for n, length in enumerate(lengths) for _ in range(length)]
    return ids + [-1] * (num_tokens - len(ids))


def prefix_order(prefix_lengths, ids):
    order, document = [], -1
    for t, segment in enumerate(ids):
        if t == 0 or segment != ids[t - 1]:
            begin, document = t, document + (segment >= 0)
        p = min(max(int(prefix_lengths[document]), 0), len(ids)) if segment >= 0 else 0
        order.append(max(t, min(begin + p, len(ids)) - 1))
    return order


def span_order(spans):
    order = []
    for t, span in enumerate(spans):
        end = t
        while span > 0 and end + 1 < len(spans) and spans[end + 1] == span:
            end += 1
        order.append(end)
    return order


def rows(function, *arrays):
    """A loop's results for all batch entries, in int32."""
    shape = arrays[0].shape[:-1]
    flat = [x.reshape(int(np.prod(shape)), x.shape[-1]).tolist() for x in arrays]
    return np.array([function(*row) for row in zip(*flat, strict=True)], np.int32).reshape(*shape, -1)


def packed(batch, documents, num_tokens):
    """Lengths [*batch, documents] of which some are 0 and which leave a row's end to padding, or fill it."""
    cuts = np.sort(RNG.integers(0, num_tokens + 1, (*batch, documents)), axis=-1)
    return np.diff(cuts, axis=-1, prepend=0)


def agree(function, wanted, *arrays):
    """Compares a helper outside and inside jit, there under vmap if there are batch axes, with a loop's results."""
    batched = jax.vmap(function) if all(x.ndim > 1 for x in arrays) else function
    for call in (function, jax.jit(batched)):
        result = call(*arrays)
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, wanted)


def visible(order, ids=None):
    """The dense rule [T, T] without a mask, of one row."""
    order = np.asarray(order)
    same = True if ids is None else np.asarray(ids)[:, None] == np.asarray(ids)
    return (order <= order[:, None]) & same


# --- helpers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize(("documents", "num_tokens"), [(1, 1), (5, 12), (9, 4), (0, 3)])
def test_segment_ids_from_lengths(batch, documents, num_tokens):
    lengths = packed(batch, documents, num_tokens)
    wanted = rows(lambda row: segment_ids(row, num_tokens), lengths)
    agree(lambda x: sl.segment_ids_from_lengths(x, num_tokens), wanted, lengths)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_prefix_order(batch):
    prefix = RNG.integers(-2, 12, batch)
    wanted = rows(lambda p: prefix_order(p, [0] * 9), prefix[..., None])
    agree(lambda x: sl.prefix_order(x, 9), wanted, prefix)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("num_ids", [2, 5])
def test_prefix_order_of_documents(batch, num_ids):
    ids = np.repeat(RNG.integers(-1, num_ids, (*batch, 8)), 3, axis=-1)  # in any order, padding between documents
    prefix = RNG.integers(-2, 30, (*batch, 8))
    agree(lambda x, y: sl.prefix_order(x, 24, y), rows(prefix_order, prefix, ids), prefix, ids)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_span_order(batch, num_tokens):
    bools = RNG.random((*batch, num_tokens)) < 0.6
    agree(sl.span_order, rows(span_order, bools), bools)
    ids = np.repeat(RNG.integers(-1, 3, (*batch, num_tokens)), 2, axis=-1)
    agree(sl.span_order, rows(span_order, ids), ids)


@pytest.mark.parametrize(("block", "num_tokens"), [(1, 5), (3, 7), (4, 8), (9, 5), (2**40, 3)])
def test_block_order(block, num_tokens):
    order = jax.jit(lambda: sl.block_order(block, num_tokens))()
    assert order.dtype == jnp.int32
    assert order.tolist() == [t // block for t in range(num_tokens)]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_any_dtype(dtype):
    """One more token than uint8 counts."""
    with jax.enable_x64(True):
        lengths, most = np.array([100, 100, 57], dtype), np.array([np.iinfo(dtype).max], dtype)
        agree(lambda x: sl.segment_ids_from_lengths(x, 257), segment_ids([100, 100, 57], 257), lengths)
        agree(lambda x: sl.prefix_order(x, 257), [prefix_order(most, [0] * 257)], most)
        agree(lambda x, ids: sl.prefix_order(x, 3, ids), [2, 2, 2], most, np.zeros(3, dtype))
        agree(sl.span_order, [1, 1, 2], np.array([1, 1, 0], dtype))


def test_ids_beyond_int32_stay_apart():
    ids = np.array([1, 2**32 + 1, 2**32 + 1])
    assert sl.span_order(ids).tolist() == [0, 2, 2]
    assert sl.prefix_order(np.array([1, 2**32]), 3, ids).tolist() == [0, 2, 2]


def test_lists_and_numbers():
    assert sl.segment_ids_from_lengths([[2, 0, 1], [0, 0, 3]], 4).tolist() == [[0, 0, 2, -1], [2, 2, 2, -1]]
    assert sl.prefix_order(2, 3).tolist() == [1, 1, 2]
    assert sl.prefix_order([2, 1], 3, [4, 4, 5]).tolist() == [1, 1, 2]
    assert sl.span_order([True, True, False]).tolist() == [1, 1, 2]


def test_arrays_without_entries():
    assert sl.segment_ids_from_lengths(np.zeros((0, 2), int), 4).shape == (0, 4)
    assert sl.prefix_order(np.zeros((2, 0), int), 3, np.full((2, 3), -1)).tolist() == [[0, 1, 2]] * 2
    assert sl.prefix_order(np.zeros((0, 2), int), 3, np.zeros((0, 3), int)).shape == (0, 3)
    assert sl.span_order(np.zeros((2, 0), bool)).shape == (2, 0)


def test_inside_jit_wrong_values_have_results():
    """Nobody sees the values there: documents are cut at T, and those without an entry are causal."""
    ids = jax.jit(lambda x: sl.segment_ids_from_lengths(x, 5))
    assert ids(jnp.array([3, 9, 2])).tolist() == [0, 0, 0, 1, 1]
    assert ids(jnp.array([-4, 2, 1])).tolist() == [1, 1, 2, -1, -1]
    assert ids(jnp.full(9, 2**30)).tolist() == [0] * 5  # whose sum is beyond int32
    order = jax.jit(lambda x, ids: sl.prefix_order(x, 5, ids))
    assert order(jnp.array([2]), jnp.array([0, 0, 1, 1, 1])).tolist() == [1, 1, 2, 3, 4]


# --- the rule: a key is visible if it is in the query's segment and order[key] <= order[query] -----------------------


def test_order_of_positions_is_causal():
    causal = sl.Causal().dense(9, 9)
    np.testing.assert_array_equal(visible(sl.prefix_order(0, 9)), causal)
    np.testing.assert_array_equal(visible(sl.prefix_order(1, 9)), causal)
    np.testing.assert_array_equal(visible(sl.block_order(1, 9)), causal)
    np.testing.assert_array_equal(visible(sl.span_order(np.zeros(9, bool))), causal)


def test_order_of_one_value_sees_all():
    for order in (sl.prefix_order(9, 9), sl.block_order(9, 9), sl.span_order(np.ones(9, bool))):
        assert visible(order).all()


def test_order_of_prefixes_is_the_preset():
    for p in range(11):
        np.testing.assert_array_equal(visible(sl.prefix_order(p, 9)), sl.preset("prefix_lm", prefix=p).dense(9, 9))


def test_packed_prefixes_are_those_of_documents_alone():
    for _ in range(10):
        lengths, p = packed((), 5, 20), RNG.integers(0, 25, 5)
        lengths[-1] = 0  # documents without tokens come last
        lengths = np.concatenate([lengths[lengths > 0], lengths[lengths == 0]])
        ids = sl.segment_ids_from_lengths(lengths, 20)
        result, begin = visible(sl.prefix_order(p, 20, ids), ids), 0
        for length, prefix in zip(lengths.tolist(), p.tolist(), strict=True):
            if length:
                alone = sl.preset("prefix_lm", prefix=prefix).dense(length, length)
                np.testing.assert_array_equal(result[begin : begin + length, begin : begin + length], alone)
                assert result[begin : begin + length].sum() == alone.sum()
            begin += length


def test_order_of_spans_is_causal_or_of_one_span():
    for _ in range(10):
        ids = np.repeat(RNG.integers(0, 3, 12), 2)
        run = np.cumsum(np.diff(ids, prepend=ids[0]) != 0)
        same_span = (run[:, None] == run) & (ids > 0)
        np.testing.assert_array_equal(visible(sl.span_order(ids)), sl.Causal().dense(24, 24) | same_span)


def test_order_of_blocks_is_causal_or_of_one_block():
    wanted = (sl.Causal() | sl.BlockDiagonal(4)).dense(10, 10)
    np.testing.assert_array_equal(visible(sl.block_order(4, 10)), wanted)
