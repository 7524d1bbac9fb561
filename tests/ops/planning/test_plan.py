import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.states import FULL
from sparse_layers.ops.planning import costs, planner
from sparse_layers.ops.planning.block_lists import planned_block_pairs, unpack_tiles
from sparse_layers.ops.planning.platforms import TUNING
from sparse_layers.ops.planning.row_orders import Reordered, RowOrder
from sparse_layers.ops.planning.terms import decompositions
from sparse_layers.tools.oracle import DenseAttention
from tests.ops.cases import BOTH_WAYS, NEEDED, SMALL, candidates, compiled

table = sl.Array(np.random.default_rng(0).random((150, 150)) < 0.4)


def unions_of(sizes):
    """Masks of what the planner looks at, and of some that it must leave alone."""
    primitives = st.one_of(
        st.builds(sl.Strided, sizes),
        st.tuples(sizes, sizes, sizes).map(lambda t: sl.Columns(sum(t), t[0], t[0] + t[1])),
        st.builds(sl.Prefix, sizes),
        st.builds(sl.Global, sizes),
        st.builds(sl.Window, st.none() | sizes, st.none() | sizes),
        st.builds(sl.BlockDiagonal, sizes),
        st.builds(sl.Random, st.integers(1, 3), st.integers(0, 9)),
        st.sampled_from([sl.Full(), sl.Empty(), sl.Prefix(0), sl.Causal(), sl.LogSparse(), table]),
        st.just(sl.MaskMod(lambda b, h, q, k: (q + 2 * k) % 3 == 0)),
    )
    terms = st.recursive(
        primitives,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            inner.map(lambda m: ~m),
            inner.map(lambda m: m.T),
            st.builds(sl.Blocks, inner, st.integers(1, 5)),
            st.builds(sl.Shifted, inner, st.integers(0, 9)),
            st.builds(sl.Rectangle, inner, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(1, 40)),
        ),
        max_leaves=3,
    )
    return st.one_of(
        st.lists(terms, min_size=1, max_size=3).map(lambda parts: functools.reduce(sl.Or, parts)),
        st.builds(lambda a, b, c: a & (b | c), terms, primitives, primitives),
    )


unions = unions_of(st.integers(1, 30))


def reproducible(examples):
    return hypothesis.settings(derandomize=True, deadline=None, database=None, max_examples=examples)


# --- exactness -------------------------------------------------------------------------------------------------------


def rebuilt(block_pass, shape):
    """What one pass allows, in token space, as a kernel finds it in blocks of a shape, and the number of these."""
    bq, bkv = shape
    rows, columns = block_pass.padded(shape)
    in_rows = np.zeros((rows, columns), bool)
    found, tiles = planned_block_pairs([block_pass.mask], shape, not block_pass.mask.computable)
    blocks = [x[0, 0].tolist() for x in (found.q_block, found.kv_block, found.state, found.mask_tile)]
    for i, j, kind, number in zip(*blocks, strict=True):
        q, k = np.arange(i * bq, (i + 1) * bq), np.arange(j * bkv, (j + 1) * bkv)
        if kind == FULL:
            tile = np.ones((bq, bkv), bool)
        elif tiles is None:
            tile = block_pass.mask(q[:, None], k[None, :])
        else:
            (tile,) = unpack_tiles(tiles[[number]], bkv)
        assert tile.any(), "an active block allows something"
        assert not in_rows[np.ix_(q, k)].any(), "a block is listed once"
        in_rows[np.ix_(q, k)] = tile
    t, s = block_pass.q_order.length, block_pass.kv_order.length
    q, k = block_pass.q_order.token(np.arange(rows)), block_pass.kv_order.token(np.arange(columns))
    assert not in_rows[q >= t].any() and not in_rows[:, k >= s].any(), "padding is not allowed"
    in_tokens = np.zeros((t, s), bool)
    in_tokens[np.ix_(q[q < t], k[k < s])] = in_rows[np.ix_(q < t, k < s)]
    return in_tokens, len(blocks[0])


def assert_exact(plan):
    for mask, chain in zip(plan.masks, plan.chains, strict=True):
        fwd, bwd = np.zeros((2, plan.q_len, plan.kv_len), int)
        for block_pass in chain:
            for total, shape, number in (
                (fwd, block_pass.fwd_shape, block_pass.fwd_blocks),
                (bwd, block_pass.bwd_shape, block_pass.bwd_blocks),
            ):
                part, found = rebuilt(block_pass, shape)
                assert found == number
                total += part
        for total in (fwd, bwd):
            np.testing.assert_array_equal(total, mask.dense(plan.q_len, plan.kv_len))


blocks = st.none() | st.tuples(*[st.sampled_from([8, 16, 24, 64])] * 2)


def params(kind, blocks):
    return blocks and kind(q_blocksize=blocks[0], kv_blocksize=blocks[1])


@reproducible(500)
@hypothesis.given(unions, st.integers(1, 150), st.none() | st.integers(1, 150), blocks, blocks)
def test_every_candidate_rebuilds_the_mask(mask, q_len, kv_len, fwd, bwd):
    both = params(sl.FwdParams, fwd), params(sl.BwdParams, bwd)
    for plan in candidates(mask, q_len, kv_len, *both):
        assert_exact(plan)


def kind(order):
    return str(order).split()[0]


def test_the_strategy_reaches_every_order_and_long_chains():
    seen, longest = set(), 0

    @reproducible(250)
    @hypothesis.given(unions)
    def collect(mask):
        nonlocal longest
        for plan in candidates(mask, 90, 70):
            longest = max(longest, len(plan.chains[0]))
            for block_pass in plan.chains[0]:
                seen.update([("q", kind(block_pass.q_order)), ("k", kind(block_pass.kv_order))])

    collect()
    assert seen == {(side, order) for side in "qk" for order in ("natural", "residue-major", "gathered", "tokens")}
    assert longest >= 3


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_every_candidate_of_a_preset_rebuilds_it(name, length):
    mask = sl.preset(name, **SMALL[name])
    for plan in candidates(mask, length, fwd_params=params(sl.FwdParams, (32, 64) if length == 129 else None)):
        assert_exact(plan)


@pytest.mark.parametrize("name", SMALL)
def test_the_chosen_plan_is_a_candidate_and_exact(name):
    plan = sl.make_plan(sl.preset(name, **NEEDED[name]), 300, 270)
    assert_exact(plan)
    for mask, weighed in zip(plan.masks, plan.candidates, strict=True):
        assert {name for name, _ in weighed} == {name for name, _ in decompositions(mask, 300, 270, TUNING["xla"])}
        assert [cost for _, cost in weighed] == sorted(cost for _, cost in weighed)


@reproducible(10)
@hypothesis.example(sl.Causal() & (sl.Window(3) | sl.Strided(7)) | sl.Columns(7, 4).T & sl.Prefix(30))
@hypothesis.given(unions_of(st.sampled_from([1, 4, 7])))
def test_every_candidate_equals_the_oracle(mask):
    t, s = 40, 56
    rng = np.random.default_rng(0)
    q, k, v, do, dl = (
        jnp.asarray(rng.normal(size=shape).astype(np.float32))
        for shape in ((1, t, 2, 4), (1, s, 1, 4), (1, s, 1, 4), (1, t, 2, 4), (1, t, 2))
    )
    right = DenseAttention(q, k, v, mask.dense(t, s)[None, None], do, dl, scale=0.5).answers
    for plan in candidates(mask, t, s, params(sl.FwdParams, (16, 16))):

        @compiled
        def answers(q, k, v):
            call = functools.partial(sl.block_sparse_attention, plan_or_mask=plan, implementation="xla")  # noqa: B023
            answers, pullback = jax.vjp(functools.partial(call, return_lse=True), q, k, v)
            return *answers, *pullback((do, dl))

        for (name, wanted), answer in zip(right.items(), answers(q, k, v), strict=True):
            np.testing.assert_allclose(answer, wanted, rtol=2e-5, atol=2e-5, err_msg=f"{name} of {plan}")


# --- what it costs ---------------------------------------------------------------------------------------------------


def blocks_of(plan):
    return [sum(block_pass.fwd_blocks for block_pass in chain) for chain in plan.chains]


@pytest.mark.parametrize(
    ("mask", "length", "at_most"),
    [
        (sl.preset("sliding_window", window=512), 8192, 2.06),
        (sl.preset("chunked", chunk=512), 8192, 2.0),
        (sl.preset("strided"), 8192, 2.0),
        (sl.preset("sparse_transformer_strided"), 8192, 2.01),
        (sl.preset("dilated"), 8192, 2.07),
        (sl.preset("streaming", window=256), 8192, 2.06),
        (sl.Causal(), 8192, 4.0),
    ],
    ids=repr,
)
def test_blocks_grow_with_the_pattern(mask, length, at_most):
    (one,), (two,) = blocks_of(sl.make_plan(mask, length)), blocks_of(sl.make_plan(mask, 2 * length))
    assert 1.9 < two / one <= at_most


def test_blocks_kept_are_near_the_pairs_allowed():
    # Pairs allowed at T = 8192 are nearly all that the chain's blocks hold, where natural order keeps every block.
    length, mask = 8192, sl.preset("sparse_transformer_fixed")
    pairs = sum((q % 128) + 1 + 32 * (q // 128) for q in range(length))
    chain, natural = (candidates(mask, length)[i] for i in (-1, 0))
    assert pairs <= blocks_of(chain)[0] * 128**2 < 1.25 * pairs
    assert blocks_of(natural)[0] == 64 * 65 // 2


def test_blocks_are_counted():
    (block_pass,) = sl.make_plan(sl.Causal(), 300, bwd_params=sl.BwdParams(q_blocksize=64, kv_blocksize=128)).chains[0]
    assert (block_pass.fwd_shape, block_pass.bwd_shape) == ((128, 128), (64, 128))
    assert block_pass.fwd_blocks == 1 + 2 + 3
    assert block_pass.bwd_blocks == 1 + 1 + 2 + 2 + 3
    assert block_pass.padded(block_pass.fwd_shape) == (384, 384) and block_pass.padded(block_pass.bwd_shape) == (
        320,
        384,
    )


@pytest.mark.parametrize(("length", "size"), [(1, 16), (16, 16), (17, 32), (65, 128), (128, 128), (5000, 128)])
def test_blocks_are_no_larger_than_the_rows_need(length, size):
    (block_pass,) = sl.make_plan(sl.Full(), length, 1000).chains[0]
    assert block_pass.fwd_shape == block_pass.bwd_shape == (size, 128)


def test_explicit_block_sizes_win():
    fwd = sl.FwdParams(q_blocksize=8, kv_blocksize=256)
    (block_pass,) = sl.make_plan(sl.Causal(), 30, fwd_params=fwd).chains[0]
    assert block_pass.fwd_shape == block_pass.bwd_shape == (8, 256)
    (block_pass,) = sl.make_plan(sl.Causal(), 300, fwd_params=fwd, bwd_params=sl.BwdParams()).chains[0]
    assert (block_pass.fwd_shape, block_pass.bwd_shape) == ((8, 256), (8, 256))
    (block_pass,) = sl.make_plan(sl.Causal(), 300, fwd_params=sl.FwdParams(q_blocksize=8)).chains[0]
    assert block_pass.fwd_shape == (8, 128)


def draft(mask, length, name="xla", **sizes):
    mask = Reordered(mask, RowOrder(length), RowOrder(length))
    return costs.PassCandidate(mask, sl.FwdParams(**sizes), TUNING[name])


def test_a_dense_mask_gets_larger_blocks_instead_of_endless_lists(monkeypatch):
    monkeypatch.setattr(costs, "MAX_CELLS", 1000)
    dense = draft(sl.Full(), 128 * 64)
    assert dense.shape == (512, 512) and dense.blocks == 256  # 2 lists of 16 x 16 cells; of 32 x 32 there were 2048
    assert draft(sl.Window(100), 128 * 64).shape == (128, 128)
    assert draft(sl.Full(), 8192, q_blocksize=128).shape == (128, 128)


def test_blocks_for_hopper_grow_along_the_side_that_is_walked(monkeypatch):
    monkeypatch.setattr(costs, "MAX_CELLS", 1000)
    dense, plain = draft(sl.Full(), 128 * 64, "hopper"), sl.BwdParams()
    assert dense.shape == (128, 2048) and dense.bwd_shape(plain) == (2048, 128)
    assert dense.bwd_shape(sl.BwdParams(deterministic=True)) == (256, 256)  # by plain Triton, blocks of 64
    assert dense.bwd_shape(sl.BwdParams(q_blocksize=64)) == (64, 64)
    assert draft(sl.Window(100), 128 * 64, "hopper").bwd_shape(plain) == (128, 128)
    chosen = draft(sl.Full(), 128 * 64, "hopper", q_blocksize=256, kv_blocksize=128)
    assert chosen.shape == chosen.bwd_shape(plain) == (256, 128)
    (few,) = sl.make_plan(sl.Full(), 60, 1000, implementation="hopper").chains[0]
    assert few.fwd_shape == few.bwd_shape == (64, 128)
    monkeypatch.setattr(costs, "MAX_CELLS", 100)  # more rows than that
    assert draft(sl.Full(), 128 * 65, "hopper").shape == (256, 16384)


def test_blocks_for_tpus_follow_the_density():
    size = {width: draft(sl.Causal() & sl.Window(width), 8192, "pallas_tpu").shape[0] for width in (1, 500, 4000)}
    assert size[1] < size[4000] == draft(sl.Causal(), 8192, "pallas_tpu").shape[0] == 1024
    cost_by_edge = {
        edge: costs.pass_cost(draft(sl.Window(1), 8192).mask, (edge, edge), TUNING["pallas_tpu"]) for edge in (256, 512)
    }
    assert size[1] == min(cost_by_edge, key=cost_by_edge.__getitem__)
    assert draft(sl.Causal(), 100, "pallas_tpu").shape == (128, 128)
    # Of a window of 1024, blocks of 1024 are all partial, blocks of 512 are not: masks cost, too.
    tuning, window = TUNING["pallas_tpu"], draft(sl.preset("sliding_window"), 8192).mask
    unmasked = dataclasses.replace(tuning, partial_cost=1.0)
    assert costs.cheapest_shape(window, tuning) == (512, 512) and costs.cheapest_shape(window, unmasked) == (1024, 1024)


def test_tpus_read_masks_of_many_operations_as_tiles():
    tuning = TUNING["pallas_tpu"]
    found = {}
    for name in ("causal", "sliding_window", "bigbird"):
        mask = draft(sl.preset(name), 8192).mask
        found[name] = costs.count_operations(mask), costs.uses_mask_tiles(mask, (1024, 1024), tuning)
    assert found["causal"] == (3, False) and found["sliding_window"] == (5, True)
    assert found["bigbird"][0] > 15 and found["bigbird"][1]
    # Where tiles would take too long to make, blocks are chosen that leave less to be masked, or the rule is computed.
    long = draft(sl.preset("bigbird"), 131072, "pallas_tpu")
    assert not costs.uses_mask_tiles(long.mask, (1024, 1024), tuning)
    assert long.shape == (256, 256) and costs.uses_mask_tiles(long.mask, long.shape, tuning)
    assert costs.pass_cost(long.mask, (1024, 1024), tuning) > 2 * long.cost
    # Other implementations compute what they can.
    assert not costs.uses_mask_tiles(long.mask, (256, 256), TUNING["xla"])


@pytest.mark.parametrize("name", sorted((SMALL.keys() - BOTH_WAYS) | {"prefix_lm"}))
def test_no_pattern_costs_tpus_more_than_causal_attention_with_masks(name):
    causal, found = (
        sl.make_plan(one, 8192, implementation="pallas_tpu").candidates[0][0][1]
        for one in ("causal", sl.preset(name, **NEEDED[name]))
    )
    assert found <= TUNING["pallas_tpu"].partial_cost * causal


def test_lists_for_tpus_fit_scalar_memory():
    tuning = TUNING["pallas_tpu"]
    for length in (131_072, 1_048_576):
        dense = draft(sl.Causal(), length, "pallas_tpu")
        assert 4 * (dense.blocks + length // dense.shape[0]) <= tuning.max_list_bytes
    assert dense.shape == (2048, 2048) and 4 * (length // 1024) ** 2 // 2 > tuning.max_list_bytes
    tiled = draft(sl.from_mask_mod(lambda b, h, q, k: q >= k), 1 << 13, "pallas_tpu")
    assert tiled.shape == (1024, 1024)
    with_half = dataclasses.replace(tuning, max_list_bytes=4 * (36 + 8))  # just enough at 4 bytes a step
    assert costs.cheapest_shape(draft(sl.Causal(), 1 << 13).mask, with_half) == (1024, 1024)
    assert costs.cheapest_shape(tiled.mask, with_half) == (2048, 2048)
    nowhere = dataclasses.replace(tuning, max_list_bytes=1)
    assert costs.cheapest_shape(tiled.mask, nowhere) == (tuning.max_block,) * 2


def test_plans_know_for_whom_they_were_made():
    xla, tpu = (sl.make_plan(sl.Causal(), 8192, implementation=name) for name in ("xla", "pallas_tpu"))
    assert (xla.chains[0][0].fwd_shape, tpu.chains[0][0].fwd_shape) == ((128, 128), (1024, 1024))
    assert xla != tpu and hash(xla) != hash(tpu)
    explicit = sl.FwdParams(q_blocksize=64, kv_blocksize=32)
    for name in sl.implementations():
        (block_pass,) = sl.make_plan(sl.Causal(), 300, fwd_params=explicit, implementation=name).chains[0]
        assert block_pass.fwd_shape == block_pass.bwd_shape == (64, 32)


# --- what is weighed -------------------------------------------------------------------------------------------------


def names(mask, q_len=4096, kv_len=None):
    return [name for name, _ in decompositions(mask, q_len, kv_len or q_len)]


def test_blocks_for_gpus_are_fine_where_little_is_kept():
    def shapes(mask, **options):
        plan = sl.make_plan(mask, 16384, implementation="triton", **options)
        return [(block_pass.fwd_shape, block_pass.bwd_shape) for block_pass in plan.chains[0]]

    assert shapes(sl.Causal()) == [((128, 64), (64, 64))]
    assert shapes(sl.preset("sparse_transformer_strided")) == [((64, 64), (64, 64))] * 2
    assert shapes(sl.Causal(), fwd_params=sl.FwdParams(kv_blocksize=32)) == [((64, 32), (64, 32))]
    assert sl.make_plan(sl.Causal(), 16384, implementation="cudnn") != sl.make_plan(
        sl.Causal(), 16384, implementation="triton"
    )


def test_a_pass_in_other_blocks_than_planned():
    mask = sl.Causal() & sl.Window(100)
    (block_pass,) = sl.make_plan(mask, 500, implementation="xla").chains[0]
    allowed, blocks = rebuilt(block_pass, (32, 64))
    np.testing.assert_array_equal(allowed, mask.dense(500))
    assert blocks == np.pad(mask.dense(500), [(0, 12), (0, 12)]).reshape(16, 32, 8, 64).any((1, 3)).sum()


@pytest.mark.parametrize(
    "mask",
    [
        sl.preset("sparse_transformer_strided", stride=7),
        table,
        sl.MaskMod(lambda b, h, q, k: jnp.equal(q // 9, k // 9)),
    ],
    ids=["chain", "array", "function"],
)
def test_a_pass_as_mask_info(mask):
    fwd, bwd = sl.FwdParams(q_blocksize=16, kv_blocksize=24), sl.BwdParams(q_blocksize=32, kv_blocksize=8)

    @jax.jit  # where jax.numpy computes nothing by itself
    def check():
        for block_pass in sl.make_plan(mask, 150, fwd_params=fwd, bwd_params=bwd).chains[0]:
            for info, shape, transposed in (
                (block_pass.fwd, block_pass.fwd_shape, False),
                (block_pass.dkv, block_pass.bwd_shape, True),
            ):
                steps = np.nonzero(info.block_mask[0])
                read = info.data_next[0][steps]
                found = np.stack([*((read, steps[1]) if transposed else (steps[0], read)), info.block_mask[0][steps]])
                wanted = planned_block_pairs([block_pass.mask], shape, False)[0]
                wanted = np.concatenate([wanted.q_block[0], wanted.kv_block[0], wanted.state[0]])
                np.testing.assert_array_equal(found[:, np.lexsort(found[1::-1])], wanted)
                assert (info.q_sequence is not None) == block_pass.mask.computable

    check()


def test_which_plans_have_no_empty_row_for_certain():
    assert sl.make_plan(sl.Causal(), 70).allows_diagonal
    assert sl.make_plan(sl.preset("strided"), 70, 90).allows_diagonal
    assert sl.make_plan((sl.Causal(), sl.Window(3)), 70).allows_diagonal
    assert not sl.make_plan((sl.Causal(), sl.Causal() & ~sl.Window(0)), 70).allows_diagonal
    assert not sl.make_plan(sl.Full(), 90, 70).allows_diagonal  # not known: queries 70 to 89 have no key of their own
    array = np.eye(70, dtype=bool)
    array[3] = False
    assert not sl.make_plan(array, 70).allows_diagonal


def test_candidates():
    natural, c = "natural order", sl.Causal()
    assert names(c & sl.Window(9)) == [natural]
    assert names(sl.Strided(8)) == [natural, "residue-major order, stride 8"]
    assert names(c & (sl.Window(9) | sl.Strided(8)))[1:] == [f"{natural} + residue-major order, stride 8"]
    assert names(sl.Columns(8, 6))[1:] == ["keys: gathered tokens 6 to 7 of every 8"]
    assert names(sl.Columns(8, 6).T)[1:] == ["queries: gathered tokens 6 to 7 of every 8"]
    assert names(sl.Window(2) | sl.Prefix(3))[1:] == [f"{natural} + keys: tokens 0 to 2 only"]
    assert names(sl.Blocks(sl.Window(2) | sl.Prefix(3), 4))[1:] == [f"{natural} + keys: tokens 0 to 11 only"]
    assert names(sl.Blocks(sl.Columns(4, 3).T, 2))[1:] == ["queries: gathered tokens 6 to 7 of every 8"]
    keys, queries = "keys: tokens 0 to 2 only", "queries: tokens 0 to 2 only"
    both = [f"{natural} + {keys}", f"{natural} + {queries}", f"{natural} + {keys} + {queries}"]
    assert names(sl.Window(2) | sl.Global(3))[1:] == both
    assert names(~(sl.Window(2) & ~sl.Strided(8)))[1:] == [f"{natural} + residue-major order, stride 8"]
    for useless in (sl.Strided(1), sl.Strided(4096), sl.Columns(8, 0), sl.Prefix(0), sl.Prefix(4096), ~sl.Strided(8)):
        assert names(useless | sl.Window(2)) == [natural]
    assert names(sl.Columns(5000, 4500) | c) == [natural]
    assert names(sl.Strided(9), 20, 9) == [natural]


def test_the_cheapest_is_taken():
    plan = sl.make_plan(sl.preset("sparse_transformer_strided"), 4096)
    assert [name for name, _ in plan.candidates[0]] == [
        "natural order + residue-major order, stride 128",
        "natural order",
    ]
    assert [kind(block_pass.q_order) for block_pass in plan.chains[0]] == ["natural", "residue-major"]
    plan = sl.make_plan(sl.preset("sparse_transformer_strided"), 500)
    assert [kind(block_pass.q_order) for block_pass in plan.chains[0]] == ["natural"]


def test_grids_are_cut_into_the_cheapest_tiles():
    def chosen(grid, implementation="triton"):
        plan = sl.make_plan(grid, grid.size, implementation=implementation)
        return [(str(block_pass.q_order), block_pass.fwd_blocks, block_pass.fwd_shape) for block_pass in plan.chains[0]]

    side = 128
    # A tile of 8 x 8 sees 3 x 3 tiles, fewer at the edges: (3 * 16 - 2) ** 2 pairs.
    near = sl.Grid((side, side), sl.Neighborhood(side, 13))
    assert chosen(near) == [("tiles of 8 x 8", 46**2, (64, 64))]
    # Windows are tiles, also where blocks do not fit them, and columns of an image are one after the other.
    assert chosen(sl.Grid((side, side), sl.BlockDiagonal(8))) == [("tiles of 8 x 8", 256, (64, 64))]
    assert chosen(sl.Grid((56, 56), sl.BlockDiagonal(7)))[0][0] == "tiles of 7 x 7"
    shifted = sl.preset("windows", shape=(side, side), size=8, shift=4)
    assert chosen(shifted) == [("tiles of 8 x 8, begun 4 x 4 before the grid", 17**2, (64, 64))]
    columns = sl.Grid((2 * side, side), (sl.Causal(), sl.Window(0)))
    assert chosen(columns)[0][0] == "tiles of 64 x 1"
    assert chosen(columns, "xla")[0][0] == "tiles of 128 x 1"
    # A sequence that ends within its grid is one of a smaller grid.
    cut = sl.make_plan(sl.Grid((1 << 20, side), sl.Window(6, 6)), 64 * side, implementation="triton")
    small = sl.make_plan(sl.Grid((64, side), sl.Window(6, 6)), 64 * side, implementation="triton")
    assert cut.chains[0][0].fwd_blocks == small.chains[0][0].fwd_blocks and not cut.chains[0][0].q_order.natural
    # Rows of an image are natural order.
    assert chosen(sl.Grid((side, side), (sl.Window(0), sl.Full())))[0][0] == "natural order"


@pytest.mark.parametrize("by", [0, 1, 5, 7, 12])
def test_columns_that_are_shifted_are_gathered(by):
    mask = sl.Causal() & (sl.Window(9) | sl.Shifted(sl.Columns(8, 5, 7), by))
    names = [name for name, _ in decompositions(mask, 300, 300)]
    assert any("keys: gathered tokens" in name for name in names)
    for plan in candidates(mask, 300):
        assert_exact(plan)


def test_an_empty_mask_has_no_pass():
    assert sl.make_plan(sl.Empty(), 100).chains == ((),)
    assert sl.make_plan(sl.Causal() & ~sl.Causal(), 100).chains == ((),)


# --- values ----------------------------------------------------------------------------------------------------------


def test_equal_content_makes_equal_plans():
    def make(window=5, length=64, **options):
        return sl.make_plan(sl.Causal() & (sl.Window(window) | sl.Strided(8)), length, **options)

    plan = make()
    assert make() is plan and make(kv_len=64) is plan and make(fwd_params=sl.FwdParams()) is plan
    planner._make_plan.cache_clear()
    again = make()
    assert again is not plan and again == plan and hash(again) == hash(plan)
    others = [make(6), make(length=65), make(kv_len=65), make(fwd_params=sl.FwdParams(q_blocksize=64))]
    others.append(make(bwd_params=sl.BwdParams(q_blocksize=64)))
    assert len({plan, *others}) == 6


def test_masks_of_all_kinds():
    causal = sl.Causal()
    assert sl.make_plan([causal, causal], 8) == sl.make_plan(causal, 8)
    assert sl.make_plan((causal, sl.Full()), 8).masks == (causal, sl.Full())
    array = causal.dense(8)
    for same in (array, array[None], jnp.asarray(array), sl.Array(array)):
        assert sl.make_plan(same, 8) == sl.make_plan(sl.Array(array), 8)
    assert_exact(sl.make_plan(np.stack([array, ~array]), 8))


@pytest.mark.parametrize(
    ("mask", "lengths", "error", "words"),
    [
        (sl.Causal(), (0,), ValueError, "q_len must be an integer >= 1, got 0"),
        (sl.Causal(), (-3, 4), ValueError, "q_len must be an integer >= 1, got -3"),
        (sl.Causal(), (4, 0), ValueError, "kv_len must be an integer >= 1, got 0"),
        (sl.Causal(), (4.0,), ValueError, "q_len must be an integer >= 1, got 4.0"),
        (sl.Array(np.ones((4, 5), bool)) | sl.Causal(), (4, 0), ValueError, "kv_len must be"),
        (sl.Array(np.ones((4, 5), bool)), (5, 5), ValueError, "an Array must cover (5, 5) positions, got (4, 5)"),
        (np.ones((4, 5), bool), (4,), ValueError, "(q_len, kv_len) = (4, 4), got (4, 5)"),
        (np.ones((2, 5, 4), bool), (4, 5), ValueError, "(q_len, kv_len) = (4, 5), got (2, 5, 4)"),
        (np.ones((4, 4)), (4,), ValueError, "bool array, got float64"),
        ((), (4,), ValueError, "must not be empty"),
        (None, (4,), TypeError, "mask must be a Mask"),
        ("stridde", (4,), ValueError, "unknown name 'stridde', did you mean 'strided'"),
    ],
)
def test_make_plan_refuses(mask, lengths, error, words):
    with pytest.raises(error) as raised:
        sl.make_plan(mask, *lengths)
    assert words in str(raised.value)


def test_a_plan_shows_its_passes_and_what_they_keep():
    assert repr(sl.make_plan(sl.Causal() & (sl.Window(128) | sl.Strided(128)), 4096, implementation="xla")) == (
        "Plan of 4096 queries x 4096 keys for 'xla'\n"
        "Causal() & (Window(left=128, right=0) | Strided(stride=128)): 9.3% of what dense attention computes\n"
        "  natural order: 63 of 1024 blocks of 128 x 128\n"
        "  residue-major order, stride 128: 32 of 1024 blocks of 128 x 128"
    )
    assert repr(sl.make_plan((sl.Empty(), sl.Causal()), 200)).count(": ") == 3
    assert "0.0% of what" in repr(sl.make_plan(sl.Empty(), 200, 100))
