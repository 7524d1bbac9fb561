import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as splash

import sparse_layers as m
from sparse_layers.masks.adapters import MaskMod
from sparse_layers.masks.algebra import Array
from sparse_layers.ops.planning import mask_info
from sparse_layers.ops.planning.binding import HeadMasks, bind
from sparse_layers.ops.planning.mask_info import (
    process_dynamic_mask,
    process_dynamic_mask_dkv,
    process_mask,
    process_mask_dkv,
)
from tests.ops.cases import compiled

FIELDS = ["data_next", "mask_next", "block_mask", "partial_mask_blocks", "q_sequence"]
STATIC = [(process_mask, splash.process_mask), (process_mask_dkv, splash.process_mask_dkv)]
DYNAMIC = [
    (process_dynamic_mask, splash.process_dynamic_mask),
    (process_dynamic_mask_dkv, splash.process_dynamic_mask_dkv),
]
ALL = [process_mask, process_mask_dkv, process_dynamic_mask, process_dynamic_mask_dkv]
STATIC_NAMES = ["fwd", "dkv"]


def assert_same(info, expected):
    for name in FIELDS:
        ours, theirs = getattr(info, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert info.is_dynamic_mask == expected.is_dynamic_mask


def random_options(rng):
    """Block shape and options with the lengths and heads that they divide."""
    q_shards, head_shards = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 2]))
    block_q, block_kv = (int(x) for x in rng.choice([1, 2, 3, 4], 2))
    heads = head_shards * int(rng.integers(1, 4))
    q_len, kv_len = block_q * q_shards * int(rng.integers(1, 5)), block_kv * int(rng.integers(1, 7))
    options = {
        "downcast_smem_data": bool(rng.random() < 0.7),
        "head_shards": head_shards,
        "q_seq_shards": q_shards,
        "shrink_grid": bool(rng.random() < 0.7),
    }
    return (heads, q_len, kv_len), (block_q, block_kv), options


def random_array(rng, q_len, kv_len, block_shape):
    """A bool array with empty, partial and full blocks, repeated tiles among them."""
    grid = (q_len // block_shape[0], kv_len // block_shape[1])
    tiles = rng.random((3, *block_shape)) < 0.5
    tiles = np.concatenate([np.zeros((1, *block_shape), bool), np.ones((1, *block_shape), bool), tiles])
    share = rng.dirichlet(np.full(5, 0.5))
    return tiles[rng.choice(5, grid, p=share)].swapaxes(1, 2).reshape(q_len, kv_len)


def random_splash_mask(rng, q_len, kv_len, block_shape):
    shape = (q_len, kv_len)
    array = splash_mask.NumpyMask(random_array(rng, q_len, kv_len, block_shape))
    causal = splash_mask.CausalMask(shape, offset=int(rng.integers(-1, 3)))
    match int(rng.integers(8)):
        case 0:
            return causal
        case 1:
            return splash_mask.LocalMask(shape, (int(rng.integers(4)), int(rng.integers(4))), offset=0)
        case 2:
            return splash_mask.ChunkedCausalMask(shape, int(rng.integers(1, 6)))
        case 3:
            return splash_mask.FullMask(shape)
        case 4:
            return array & causal
        case _:
            return array


def dense(mask):
    heads, q_len, kv_len = mask.shape
    return np.stack([np.broadcast_to(mask[h, 0:q_len, 0:kv_len], (q_len, kv_len)) for h in range(heads)])


def crashes_upstream(mask, block_shape, options):
    """An empty query shard and, with several of them, a mask without partial blocks (both only if it shrinks)."""
    array = dense(mask)
    heads, q_len, kv_len = array.shape
    tiles = array.reshape(heads, q_len // block_shape[0], block_shape[0], kv_len // block_shape[1], block_shape[1])
    partial = (tiles.any((2, 4)) & ~tiles.all((2, 4))).any()
    shards = array.reshape(heads, options["q_seq_shards"], -1)
    return not shards.any((0, 2)).all() or (options["q_seq_shards"] > 1 and not partial)


def rebuild(info, function, shape, block_shape, *, is_dkv=False, head_shards=1, q_seq_shards=1):
    """The dense mask, by walking the grid as a kernel does."""
    heads, q_len, kv_len = shape
    block_q, block_kv = block_shape
    shard_rows = q_len // block_q // q_seq_shards
    result = np.zeros(shape, bool)
    for h in range(heads):
        r = h if info.block_mask.shape[0] == heads else h // (heads // head_shards)
        for step in np.ndindex(info.block_mask.shape[1:]):
            state = info.block_mask[r][step]
            if not state:
                continue
            i, j = step[0], int(info.data_next[r][step])
            if is_dkv:
                shard = step[0] // (info.block_mask.shape[1] // q_seq_shards)
                i, j = int(info.data_next[r][step]) + shard * shard_rows, step[1]
            rows, columns = slice(i * block_q, (i + 1) * block_q), slice(j * block_kv, (j + 1) * block_kv)
            if state == 2:
                tile = True
            elif function is None:
                tile = info.partial_mask_blocks[info.mask_next[r][step]]
                tile = tile.T if is_dkv else tile
            elif is_dkv:
                tile = function(info.q_sequence[rows][None, :], np.arange(kv_len, dtype=np.int32)[columns, None]).T
            else:
                tile = function(info.q_sequence[rows][:, None], np.arange(kv_len, dtype=np.int32)[None, columns])
            assert not result[h, rows, columns].any()
            result[h, rows, columns] = tile
    return result


# --- against splash attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ours", "theirs"), STATIC, ids=STATIC_NAMES)
def test_static_equals_splash(ours, theirs, seed):
    rng = np.random.default_rng(seed)
    compared = 0
    for _ in range(12):
        shape, block_shape, options = random_options(rng)
        different = [random_splash_mask(rng, *shape[1:], block_shape) for _ in range(int(rng.integers(1, 4)))]
        # Heads take masks singly or by shard, so that every rule for the leading dimension occurs.
        by_shard = rng.random() < 0.5
        shard_heads = shape[0] // options["head_shards"]
        order = [h // shard_heads if by_shard else int(rng.integers(len(different))) for h in range(shape[0])]
        mask = splash_mask.MultiHeadMask([different[i % len(different)] for i in order])
        info, function = ours(mask, block_shape, **options)
        if not crashes_upstream(mask, block_shape, options):
            expected, expected_function = theirs(mask, block_shape, **options)
            assert_same(info, expected)
            assert function is expected_function
            compared += 1
        is_dkv = ours is process_mask_dkv
        shards = {k: options[k] for k in ("head_shards", "q_seq_shards")}
        rebuilt = rebuild(info, function, shape, block_shape, is_dkv=is_dkv, **shards)
        np.testing.assert_array_equal(rebuilt, dense(mask))
    assert compared >= 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ours", "theirs"), DYNAMIC, ids=STATIC_NAMES)
def test_dynamic_equals_splash_and_traces(ours, theirs, seed):
    rng = np.random.default_rng(seed)
    for i in range(4):
        shape, block_shape, options = random_options(rng)
        mask = jnp.asarray(np.stack([random_array(rng, *shape[1:], block_shape) for _ in range(shape[0])]))
        # Operation by operation only once: each is a program of its own to compile.
        traced, expected = (compiled(lambda x, f=f: f(x, block_shape, **options))(mask)[0] for f in (ours, theirs))  # noqa: B023
        assert_same(traced, expected)
        if seed == i == 0:
            info, function = ours(mask, block_shape, **options)
            assert function is None and info.is_dynamic_mask is True
            assert_same(info, expected)


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [((1, 2, 127), (np.int8, np.int16)), ((1, 2, 128), (np.int16, np.int16)), ((3, 200, 100), (np.int8, np.int32))],
)
def test_dynamic_downcast_follows_the_bound(shape, dtypes):
    info, _ = process_dynamic_mask(jnp.zeros(shape, bool), (1, 1))
    assert (info.data_next.dtype, info.mask_next.dtype, info.block_mask.dtype) == (*dtypes, np.int8)
    transposed, _ = process_dynamic_mask_dkv(jnp.zeros((shape[0], shape[2], shape[1]), bool), (1, 1))
    assert (transposed.data_next.dtype, transposed.mask_next.dtype, transposed.block_mask.dtype) == (*dtypes, np.int8)
    info, _ = process_dynamic_mask(jnp.zeros(shape, bool), (1, 1), downcast_smem_data=False)
    assert {x.dtype for x in info[:3]} == {np.dtype(np.int32)}


@pytest.mark.parametrize(("columns", "dtype"), [(128, np.int8), (129, np.int16), (32769, np.int32)])
def test_static_downcast_follows_the_content(columns, dtype):
    mask = np.zeros((1, 1, columns), bool)
    mask[..., -1] = True
    info, _ = process_mask(mask, (1, 1))
    assert info.data_next.tolist() == [[[columns - 1]]]
    assert (info.data_next.dtype, info.block_mask.dtype) == (dtype, np.int8)
    info, _ = process_mask(mask, (1, 1), downcast_smem_data=False)
    assert (info.data_next.dtype, info.block_mask.dtype) == (np.int32, np.int32)


# --- examples by hand ------------------------------------------------------------------------------------------------


def test_worked_example_causal():
    info, function = process_mask(bind(m.Causal(), 2, 8, 8), (2, 2))
    assert info.block_mask.tolist() == [[[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]]
    assert info.data_next.tolist() == [[[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 1, 2, 3]]]
    assert info.mask_next is None and info.partial_mask_blocks is None and info.is_dynamic_mask is None
    assert info.q_sequence.tolist() == list(range(8)) and info.q_sequence.dtype == np.int32
    assert function == m.Causal()


def test_worked_example_window_shrinks():
    mask = (m.Causal() & m.Window(2)).dense(8)[None]
    info, function = process_mask(mask, (2, 2))
    assert function is None and info.q_sequence is None
    assert info.block_mask.tolist() == [[[1, 0], [1, 1], [1, 1], [1, 1]]]
    assert info.data_next.tolist() == [[[0, 0], [0, 1], [1, 2], [2, 3]]]
    # The diagonal's tile is seen first, the tile beside it second.
    assert info.partial_mask_blocks.tolist() == [[[1, 0], [1, 1]], [[1, 1], [0, 1]]]
    assert info.mask_next.tolist() == [[[0, 0], [1, 0], [1, 0], [1, 0]]]

    whole, _ = process_mask(mask, (2, 2), shrink_grid=False)
    assert whole.block_mask.tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]]
    assert whole.data_next.tolist() == [[[0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 2, 2], [2, 2, 2, 3]]]

    dkv, _ = process_mask_dkv(mask, (2, 2))
    assert dkv.block_mask.tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert dkv.data_next.tolist() == [[[0, 1, 2, 0], [1, 2, 3, 3]]]
    assert dkv.partial_mask_blocks.tolist() == [[[1, 1], [0, 1]], [[1, 0], [1, 1]]]


# --- where splash attention crashes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shrink", [True, False])
@pytest.mark.parametrize("process", [process_mask, process_mask_dkv], ids=STATIC_NAMES)
def test_an_empty_mask_has_dead_steps_only(process, shrink):
    info, function = process(np.zeros((2, 4, 6), bool), (2, 2), shrink_grid=shrink, q_seq_shards=2)
    assert function is None and info.mask_next is None and info.partial_mask_blocks is None
    shape = (1, 2, 3) if not shrink or process is process_mask_dkv else (1, 2, 1)
    assert info.block_mask.shape == info.data_next.shape == shape
    assert not info.block_mask.any() and not info.data_next.any()
    info, function = process(bind(m.Empty(), 2, 4, 6), (2, 2), shrink_grid=shrink, q_seq_shards=2)
    assert not info.block_mask.any() and function == m.Empty()


def test_an_empty_query_shard():
    mask = np.zeros((1, 8, 4), bool)
    mask[:, 4:] = np.tril(np.ones((4, 4), bool))
    info, _ = process_mask(mask, (2, 2), q_seq_shards=2)
    assert info.block_mask.tolist() == [[[0, 0], [0, 0], [1, 0], [2, 1]]]
    assert info.data_next.tolist() == [[[0, 0], [0, 0], [0, 0], [0, 1]]]
    dkv, _ = process_mask_dkv(mask, (2, 2), q_seq_shards=2)
    assert dkv.block_mask.tolist() == [[[0, 0], [0, 0], [1, 0], [2, 1]]]
    assert dkv.data_next.tolist() == [[[0, 0], [0, 0], [0, 0], [1, 1]]]


def test_query_shards_without_a_partial_block():
    mask = np.kron([[[1, 0], [1, 1]]], np.ones((2, 2))).astype(bool)
    info, _ = process_mask(mask, (2, 2), q_seq_shards=2)
    assert info.block_mask.tolist() == [[[2, 0], [2, 2]]]
    assert info.data_next.tolist() == [[[0, 0], [0, 1]]]
    assert info.mask_next is None and info.partial_mask_blocks is None


# --- masks of this package -------------------------------------------------------------------------------------------

OURS = {
    "window and stride": m.Causal() & (m.Window(5) | m.Strided(8)),
    "block diagonal": m.BlockDiagonal(8) & m.Causal(),
    "complement": m.Window(3, 6) & ~m.BlockDiagonal(4),
    "global": m.Global(3) | m.Window(1),
    "logsparse": m.LogSparse(),
    "empty": m.Empty(),
    "mask_mod": MaskMod(lambda b, h, q, k: (q >= k) & ((q - k) % 3 == h), head=0),
    "array": Array(np.random.default_rng(1).random((24, 24)) < 0.3),
    "two heads": (m.Causal(), m.Window(4)),
    "three heads": (m.Causal() & m.Random(2), m.Causal() & m.Random(2, seed=1), m.Causal() & m.Random(2)),
}


# Pairwise: masks take the options in turn, those of each direction others.
OPTIONS = [{}, {"q_seq_shards": 2}, {"head_shards": 3}, {"shrink_grid": False}]


@pytest.mark.parametrize("process", [process_mask, process_mask_dkv], ids=STATIC_NAMES)
@pytest.mark.parametrize("name", OURS)
def test_ours_equal_the_same_mask_as_array(name, process):
    mask = OURS[name]
    options = OPTIONS[([*OURS].index(name) + (process is process_mask_dkv)) % len(OPTIONS)]
    bound = bind(mask, 6, 24, 24)
    array = np.stack([bound[h, :, :] for h in range(6)])
    info, function = process(bound, (4, 3), **options)
    expected, _ = process(array, (4, 3), **options)
    np.testing.assert_array_equal(info.block_mask, expected.block_mask)
    np.testing.assert_array_equal(info.data_next, expected.data_next)
    computable = isinstance(mask, m.Mask) and mask.computable
    assert (function is mask) == computable
    if not computable:
        assert_same(info, expected)
    shards = {k: v for k, v in options.items() if k != "shrink_grid"}
    for i, f in ((info, function), (expected, None)):
        rebuilt = rebuild(i, f, (6, 24, 24), (4, 3), is_dkv=process is process_mask_dkv, **shards)
        np.testing.assert_array_equal(rebuilt, array)


def test_a_sliceable_object_equals_its_array():
    class Sliceable:
        def __init__(self, array):
            self.array, self.shape = array, array.shape

        def __getitem__(self, index):
            head, q, k = index
            assert isinstance(q, slice) and isinstance(k, slice)
            return self.array[head, q, k]

    rng = np.random.default_rng(3)
    array = np.stack([random_array(rng, 12, 12, (3, 4))] * 2 + [random_array(rng, 12, 12, (3, 4))])
    for heads in (array, array[:2]):
        for process in (process_mask, process_mask_dkv):
            assert_same(process(Sliceable(heads), (3, 4))[0], process(heads, (3, 4))[0])
            assert_same(process(jnp.asarray(heads), (3, 4))[0], process(heads, (3, 4))[0])


def test_a_million_tokens_take_little_memory():
    mask_info.active_blocks.cache_clear()
    mask_info._compile.cache_clear()
    length = 1 << 20
    tracemalloc.start()
    for process in (process_mask, process_mask_dkv):
        info, _ = process(bind(m.Window(127), 8, length, length), (128, 128))
        assert sorted(info.block_mask.shape) == [1, 2, 8192]
        assert np.count_nonzero(info.block_mask) == 2 * 8192 - 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * 2**20


@pytest.mark.parametrize("process", [process_mask, process_mask_dkv], ids=STATIC_NAMES)
def test_cached_by_content(process):
    first = process(bind(m.Causal() & m.Window(3), 2, 8, 8), (2, 2))
    assert process(bind(m.Causal() & m.Window(3), 2, 8, 8), (2, 2)) is first
    assert process(bind(m.Causal() & m.Window(4), 2, 8, 8), (2, 2)) is not first
    assert process(bind(m.Causal() & m.Window(3), 2, 8, 8), [2, 2], shrink_grid=False) is not first
    splashed = [process(splash_mask.MultiHeadMask([splash_mask.CausalMask((8, 8))]), (2, 2)) for _ in range(2)]
    assert splashed[0] is splashed[1]


def test_an_array_changed_in_place_is_compiled_anew():
    array = np.ones((1, 4, 4), bool)
    assert process_mask(array, (2, 2))[0].block_mask.tolist() == [[[2, 2], [2, 2]]]
    array[0, 0, 0] = False
    assert process_mask(array, (2, 2))[0].block_mask.tolist() == [[[1, 2], [2, 2]]]


@pytest.mark.parametrize("process", [process_mask, process_mask_dkv], ids=STATIC_NAMES)
def test_results_are_read_only(process):
    for mask in (bind(m.Causal(), 1, 4, 4), np.tril(np.ones((2, 4, 4), bool))):
        arrays = [x for x in process(mask, (2, 2))[0] if x is not None]
        assert len(arrays) >= 3
        for array in arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_the_caller_keeps_its_q_sequence():
    mask = splash_mask.CausalMask((4, 4))
    info, _ = process_mask(splash_mask.MultiHeadMask([mask]), (2, 2))
    np.testing.assert_array_equal(info.q_sequence, mask.q_sequence)
    assert mask.q_sequence.flags.writeable


def test_head_masks_slice_like_an_array():
    bound = bind((m.Causal(), m.Full()), 3, 6, 8)
    assert bound == HeadMasks((m.Causal(), m.Full()), (3, 6, 8))
    causal = m.Causal().dense(6, 8)
    for head, expected in enumerate([causal, np.ones((6, 8), bool), causal]):
        np.testing.assert_array_equal(bound[head, :, :], expected)
        np.testing.assert_array_equal(bound[head, 2:4, 3:20], expected[2:4, 3:20])
    assert bound[1, 0:2, 0:3].dtype == np.bool_


# --- errors ----------------------------------------------------------------------------------------------------------


def test_bind_errors():
    with pytest.raises(ValueError, match=r"heads must be an integer >= 1, got 0"):
        bind(m.Causal(), 0, 4, 4)
    with pytest.raises(ValueError, match=r"got 3 masks for heads=2"):
        bind((m.Causal(), m.Full(), m.Window(2)), 2, 4, 4)
    with pytest.raises(TypeError, match=r"bind\(mask, heads, q_len, kv_len\).*got Causal\(\)"):
        process_mask(m.Causal(), (2, 2))


# Each case breaks one rule and all later ones; the first is reported.
ERRORS = [
    ((6, 9), (4, 2), 5, 5, r"Expected a 3-dim mask, instead got: .*\(6, 9\)"),
    ((3, 6, 9), (4, 2), 5, 5, r"q_block_size=4 should divide q_seq_len=6"),
    ((3, 6, 9), (0, 2), 5, 5, r"q_block_size=0 should divide q_seq_len=6"),
    ((3, 8, 9), (4, 2), 5, 5, r"kv_block_size=2 should divide kv_seq_len=9"),
    ((3, 8, 8), (4, 2), 3, 5, r"q_seq_shards=3 should divide q_seq_len=8"),
    ((3, 8, 8), (4, 2), 0, 5, r"q_seq_shards=0 should divide q_seq_len=8"),
    ((3, 8, 8), (4, 2), 4, 2, r"q_block_size=4 should divide q_seq_len_per_shard=2"),
    ((3, 8, 8), (4, 2), 2, 2, r"head_shards=2 should divide head_count=3"),
]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case[-1])
def test_value_errors_in_order(case):
    shape, block_shape, q_seq_shards, head_shards, message = case
    for process in ALL:
        with pytest.raises(ValueError, match=message):
            process(np.ones(shape, bool), block_shape, q_seq_shards=q_seq_shards, head_shards=head_shards)


@pytest.mark.parametrize("process", ALL[2:], ids=STATIC_NAMES)
def test_dynamic_masks_must_be_bool(process):
    with pytest.raises(ValueError, match="Expected a 3-dim mask"):
        process(jnp.ones((4, 4)), (3, 3))
    with pytest.raises(ValueError, match=r"Expected a bool mask, instead got: .*float32"):
        process(jnp.ones((1, 4, 4)), (3, 3))


def test_a_mask_info_shows_shapes_and_no_numbers():
    info, _ = process_mask(np.tri(64, dtype=bool)[None], (16, 16))
    lists = ", ".join(f"{name}=int8[1, 4, 4]" for name in ("data_next", "mask_next", "block_mask"))
    others = "partial_mask_blocks=bool[1, 16, 16], q_sequence=None, is_dynamic_mask=None"
    assert repr(info) == f"MaskInfo({lists}, {others})"
