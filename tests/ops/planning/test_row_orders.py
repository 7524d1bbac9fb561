import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.states import EMPTY, FULL, PARTIAL, UNSURE
from sparse_layers.ops.planning.row_orders import Reordered, RowOrder
from tests.ops.cases import compiled

ORDERS = [
    *(RowOrder(length) for length in (1, 7, 64)),
    *(RowOrder.residue_major(length, stride) for length in (1, 7, 8, 29, 64) for stride in (2, 3, 8, 11)),
    *(
        RowOrder.periodic(length, 8, *ends)
        for length in (9, 16, 21, 24, 30)
        for ends in ((0, 3), (6, 8), (2, 5), (7, 8))
    ),
    *(RowOrder.periodic(length, length, *ends) for length in (9, 30) for ends in ((0, 5), (3, 7), (8, 9))),
    RowOrder.periodic(5, 8, 0, 3),  # the only period is not whole
    RowOrder.periodic(5, 8, 4, 8),
    RowOrder(48, (6, 8), (2, 4)),
    RowOrder(48, (6, 8), (6, 2)),
    RowOrder(48, (6, 8), (1, 8)),  # as natural order, by another name
    RowOrder(35, (5, 7), (2, 4)),  # tiles do not divide the grid,
    RowOrder(29, (5, 7), (4, 2)),  # and the sequence ends within it,
    RowOrder(50, (5, 7), (2, 2), offset=3),  # or goes on after it, and begins before
    RowOrder(20, (5, 7), (2, 2), offset=4),
    RowOrder(60, (3, 4, 5), (2, 2, 2)),
    RowOrder(70, (3, 4, 5), (1, 4, 3), offset=10),
    RowOrder(60, (3, 4, 5), (2, 2, 2), (3, 2, 3)),
    RowOrder(7, (1, 7), (1, 2)),
    RowOrder(48, (6, 8), (4, 4), phase=(2, 1)),
    RowOrder(30, (5, 7), (3, 2), offset=2, phase=(1, 1)),
    RowOrder(40, (3, 13), (2, 8), phase=(0, 5)),
    RowOrder(20, (20,), (8,), phase=(3,)),
    RowOrder(9, (3, 3), (3, 3), (1, 1), offset=4),  # a single row
    RowOrder(40, (2, 8), (2, 1), offset=24),  # the last tokens, residue-major
    RowOrder(37, (3, 8), (3, 1), offset=16),
]


def order_id(order):
    return f"{order.length}: {order} {order.shape} {order.kept} {order.offset} {order.phase}"


each_order = pytest.mark.parametrize("order", ORDERS, ids=order_id)


def ordered_tokens(order):
    """The tokens that an order holds, in its order, by definition."""
    found = []
    for token in range(order.offset, order.length):
        coordinates, rest = [], token - order.offset
        for n in reversed(order.shape[1:]):
            coordinates.insert(0, rest % n)
            rest //= n
        coordinates.insert(0, rest)
        if all(c < n for c, n in zip(coordinates, order.kept, strict=True)):
            ends = [divmod(c + p, tile) for c, p, tile in zip(coordinates, order.phase, order.tile, strict=True)]
            found.append(([tile for tile, _ in ends], [inside for _, inside in ends], token))
    return [token for *_, token in sorted(found)]


# --- rows and tokens -------------------------------------------------------------------------------------------------


def test_orders_by_name():
    for length, stride in ((1, 2), (7, 3), (64, 8)):
        order = RowOrder.residue_major(length, stride)
        assert ordered_tokens(order) == sorted(range(length), key=lambda x: (x % stride, x)) and order.covers_all_tokens
    for length, period, start, stop in ((30, 8, 2, 5), (5, 8, 4, 8), (9, 9, 3, 7), (16, 8, 6, 8)):
        order = RowOrder.periodic(length, period, start, stop)
        assert (
            ordered_tokens(order) == [x for x in range(length) if start <= x % period < stop]
            and not order.covers_all_tokens
        )


@each_order
def test_complete_says_whether_all_tokens_have_rows(order):
    assert order.covers_all_tokens == (set(ordered_tokens(order)) == set(range(order.length)))


@each_order
def test_rows_hold_the_tokens_in_order(order):
    tokens = order.token(np.arange(order.rows))
    assert tokens[tokens < order.length].tolist() == ordered_tokens(order)
    assert order.natural == (order.axes == ()) == (order == RowOrder(order.length))


@each_order
def test_rows_of_tokens_are_the_inverse(order):
    rows = np.asarray(compiled(order.row)(np.arange(order.length)))
    held = np.isin(np.arange(order.length), ordered_tokens(order))
    np.testing.assert_array_equal(order.token(rows)[held], np.arange(order.length)[held])
    assert (rows[~held] >= order.rows).all() and (rows[held] < order.rows).all()


@each_order
def test_rows_beyond_the_last_hold_none(order):
    assert np.all(order.token(np.arange(order.rows, order.rows + 200)) >= order.length)


@pytest.mark.parametrize("order", ORDERS[1::4], ids=order_id)
def test_tokens_are_the_same_by_numpy_jax_and_integers(order):
    rows = np.arange(order.rows + 20, dtype=np.int32)
    tokens = order.token(rows)
    np.testing.assert_array_equal(jax.jit(order.token)(jnp.asarray(rows)), tokens)
    assert [int(order.token(int(row))) for row in rows] == tokens.tolist()


@each_order
def test_boxes_hold_the_tokens_of_rows(order):
    first, last = (x[::3] for x in np.triu_indices(order.rows + 3))
    box = order.box(first, last)
    held = set(ordered_tokens(order))
    for i, (a, b) in enumerate(zip(first, last, strict=True)):
        tokens = {x for x in order.token(np.arange(a, b + 1)).tolist() if x < order.length}
        exists = FULL if len(tokens) == b - a + 1 else PARTIAL if tokens else EMPTY
        assert box.exists[i] in (UNSURE, exists), (a, b)
        if not tokens:
            continue
        axes = [range(low[i], high[i] + 1) for low, high in zip(box.low, box.high, strict=True)]
        inside = {order.offset + np.ravel_multi_index(c, order.shape, mode="wrap") for c in itertools.product(*axes)}
        assert tokens <= inside and box.first[i] <= min(tokens) and max(tokens) <= box.last[i], (a, b)
        if box.exact[i]:
            assert inside & held == tokens, (a, b)
        if box.contiguous[i] and exists == FULL:
            assert tokens == set(range(box.first[i], box.last[i] + 1)), (a, b)


@each_order
def test_gather_then_scatter(order):
    x = np.random.default_rng(0).normal(size=(2, order.length, 3)).astype(np.float32)
    padded = -(-order.rows // 8) * 8 + 8
    tokens = order.token(np.arange(padded))
    exists, held = tokens < order.length, np.isin(np.arange(order.length), tokens)
    rows = np.array(compiled(order.gather, static_argnums=1)(x, padded))
    assert rows.shape == (2, padded, 3)
    np.testing.assert_array_equal(rows[:, exists], x[:, tokens[exists]])
    assert not rows[:, ~exists].any()
    # Padding rows are dropped, whatever they hold; tokens without a row are filled.
    rows[:, ~exists] = np.nan
    back = np.asarray(compiled(order.scatter, static_argnums=1)(rows, -np.inf))
    np.testing.assert_array_equal(back, np.where(held[:, None], x, -np.inf))


@pytest.mark.parametrize("order", ORDERS[1::9], ids=order_id)
def test_scatter_of_integers(order):
    rows = np.arange(1, order.rows + 1, dtype=np.int32)[None]  # without a trailing axis, as segment ids
    tokens = order.token(np.arange(order.rows))
    back = np.asarray(compiled(order.scatter)(rows))[0]
    expected = np.zeros(order.length, np.int32)
    expected[tokens[tokens < order.length]] = rows[0, tokens < order.length]
    np.testing.assert_array_equal(back, expected)
    assert back.dtype == np.int32


def test_orders_are_values_with_names():
    assert RowOrder.residue_major(8, 2) == RowOrder.residue_major(8, 2) != RowOrder.residue_major(8, 4)
    assert RowOrder(8) == RowOrder(8, (8,)) and len({*ORDERS, *ORDERS}) == len(ORDERS)
    gathered = RowOrder.periodic(8, 4, 1, 3), RowOrder.periodic(8, 8, 0, 3)
    texts = [
        str(order) for order in (RowOrder(8), RowOrder(64, (8, 8), (2, 4)), RowOrder.residue_major(8, 2), *gathered)
    ]
    assert texts == [
        "natural order",
        "tiles of 2 x 4",
        "residue-major order, stride 2",
        "gathered tokens 1 to 2 of every 4",
        "tokens 0 to 2 only",
    ]


def test_a_stride_is_block_diagonal_and_columns_are_contiguous():
    order = RowOrder.residue_major(12, 4)
    rows = Reordered(sl.Causal() & sl.Strided(4), order, order).dense(12)
    np.testing.assert_array_equal(rows, np.kron(np.eye(4), np.tri(3)).astype(bool))
    columns = Reordered(sl.Columns(4, 3), RowOrder(12), RowOrder.periodic(12, 4, 3, 4))
    assert columns.dense(12, 3).all() and not columns.dense(12, 5)[:, 3:].any()


# --- the mask in row space -------------------------------------------------------------------------------------------

sizes = st.integers(1, 9)
masks = st.recursive(
    st.one_of(
        st.sampled_from([sl.Full(), sl.Empty(), sl.Causal(), sl.LogSparse(), sl.Columns(8, 6), sl.Strided(3)]),
        st.builds(sl.Window, st.none() | sizes, st.none() | sizes),
        st.builds(sl.Strided, sizes),
        st.builds(sl.BlockDiagonal, sizes),
        st.builds(sl.Prefix, sizes),
        st.builds(sl.Global, sizes),
        st.builds(sl.Random, st.integers(1, 2)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        inner.map(lambda m: ~m),
        inner.map(lambda m: m.T),
        st.builds(sl.Blocks, inner, st.integers(1, 3)),
    ),
    max_leaves=4,
)
orders = st.sampled_from(ORDERS)


def by_tokens(mask, q_order, kv_order, rows, columns):
    """The mask in row space by its definition."""
    q, k = q_order.token(np.arange(rows)), kv_order.token(np.arange(columns))
    dense = mask.dense(q_order.length, kv_order.length)
    result = np.zeros((rows, columns), bool)
    inside = np.ix_(q < q_order.length, k < kv_order.length)
    result[inside] = dense[np.ix_(q[q < q_order.length], k[k < kv_order.length])]
    return result


def assert_grades_are_exact(mask, dense, seed):
    """Wherever the grade is not UNSURE it is exact; returns the share that it was sure of."""
    rng = np.random.default_rng(seed)
    (rows, columns), number = dense.shape, 60
    q, k = rng.integers(0, rows, (2, number)), rng.integers(0, columns, (2, number))
    extents = rng.integers(0, rng.choice([1, 3, 9, 100], (2, number)))
    corners = q[0], np.minimum(q[0] + extents[0], rows - 1), k[0], np.minimum(k[0] + extents[1], columns - 1)
    grades = np.broadcast_to(mask.block_state(*corners), number)
    for grade, q0, q1, k0, k1 in zip(grades, *corners, strict=True):
        tile = dense[q0 : q1 + 1, k0 : k1 + 1]
        assert grade in (UNSURE, FULL if tile.all() else PARTIAL if tile.any() else EMPTY), (q0, q1, k0, k1)
    return np.mean(grades != UNSURE)


@hypothesis.settings(derandomize=True, deadline=None, database=None, max_examples=500)
@hypothesis.given(masks, orders, orders, st.integers(0, 2**32 - 1))
def test_grades_in_row_space_are_exact(mask, q_order, kv_order, seed):
    rows, columns = q_order.rows + 9, kv_order.rows + 5
    dense = by_tokens(mask, q_order, kv_order, rows, columns)
    reordered = Reordered(mask, q_order, kv_order)
    np.testing.assert_array_equal(reordered.dense(rows, columns), dense)
    assert_grades_are_exact(reordered, dense, seed)


@pytest.mark.parametrize(
    ("mask", "q_order", "kv_order"),
    [
        (sl.Strided(8), RowOrder.residue_major(64, 8), RowOrder.residue_major(64, 8)),
        (sl.Strided(8), RowOrder(40, (2, 8), (2, 1), offset=24), RowOrder(40, (4, 8), (4, 1), offset=8)),
        (sl.Columns(8, 6), RowOrder(64), RowOrder.periodic(64, 8, 6, 8)),
        (sl.Window(9), RowOrder(64), RowOrder(50)),
        (sl.Prefix(5), RowOrder(64), RowOrder.periodic(64, 64, 0, 5)),
    ],
    ids=repr,
)
def test_grades_are_sure_of_what_an_order_is_made_for(mask, q_order, kv_order):
    dense = by_tokens(mask, q_order, kv_order, q_order.rows, kv_order.rows)
    assert assert_grades_are_exact(Reordered(mask, q_order, kv_order), dense, 0) == 1


@pytest.mark.parametrize(
    ("mask", "q_order", "kv_order"),
    [
        (
            sl.Strided(8),
            RowOrder.residue_major(61, 8),
            RowOrder.residue_major(50, 8),
        ),  # T != S: classes differ in length
        (sl.Strided(4), RowOrder.residue_major(64, 8), RowOrder.residue_major(64, 8)),
        (sl.Strided(8), RowOrder(40, (2, 8), (2, 1), offset=24), RowOrder(40, (4, 8), (4, 1), offset=5)),
        (sl.Columns(8, 7), RowOrder(64), RowOrder.periodic(64, 8, 6, 8)),
        (sl.Columns(8, 6, 7), RowOrder(64), RowOrder.periodic(64, 8, 6, 8)),
        (sl.Columns(16, 6, 8), RowOrder(64), RowOrder.periodic(64, 8, 6, 8)),
        (sl.Columns(8, 6), RowOrder.periodic(64, 8, 6, 8), RowOrder(64)),
        (sl.Columns(8, 6).T, RowOrder.periodic(64, 8, 6, 8), RowOrder(64)),
    ],
    ids=repr,
)
def test_grades_of_what_only_looks_made_for_an_order(mask, q_order, kv_order):
    for seed in range(5):
        dense = by_tokens(mask, q_order, kv_order, q_order.rows + 5, kv_order.rows + 5)
        assert_grades_are_exact(Reordered(mask, q_order, kv_order), dense, seed)


def test_reordered_is_computable_iff_its_mask_is():
    order = RowOrder(4)
    assert Reordered(sl.Causal(), order, order).computable
    assert not Reordered(sl.Array(np.ones((4, 4), bool)), order, order).computable
