"""Presets against their definitions, written out pair by pair."""

import inspect
import itertools
import json
import random

import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.presets import _PRESETS
from tests.ops.cases import BOTH_WAYS, NEEDED, candidates

NAMES = sorted(sl.presets())
LENGTHS = (1, 7, 32, 61)


def matrix(rule, length):
    return np.array([[bool(rule(q, k)) for k in range(length)] for q in range(length)])


def check(mask, rule):
    for length in LENGTHS:
        np.testing.assert_array_equal(mask.dense(length), matrix(rule, length))


# --- by formula ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 100])
def test_presets_of_one_size(n):
    check(sl.preset("sliding_window", window=n), lambda q, k: k <= q and q - k < n)
    check(sl.preset("chunked", chunk=n), lambda q, k: k <= q and q // n == k // n)
    check(sl.preset("prefix_lm", prefix=n), lambda q, k: k <= q or k < n)
    check(
        sl.preset("sparse_transformer_strided", stride=n),
        lambda q, k: k <= q and (q - k <= n or (q - k) % n == 0),
    )


@pytest.mark.parametrize("a, b", [(1, 1), (2, 3), (8, 1), (5, 4), (64, 16)])
def test_presets_of_two_sizes(a, b):
    check(sl.preset("dilated", window=a, dilation=b), lambda q, k: k <= q and (q - k) % b == 0 and q - k < a * b)
    check(sl.preset("streaming", window=a, sinks=b), lambda q, k: k <= q and (q - k < a or k < b))
    check(
        sl.preset("longformer", window=a, global_tokens=b),
        lambda q, k: k <= q and (q - k < a or k < b or q < b),
    )
    check(
        sl.preset("longformer", window=a, global_tokens=b, causal=False),
        lambda q, k: abs(q - k) <= a // 2 or k < b or q < b,
    )


@pytest.mark.parametrize("stride, summary", [(1, 1), (8, 1), (8, 8), (16, 5)])
def test_sparse_transformer_fixed(stride, summary):
    check(
        sl.preset("sparse_transformer_fixed", stride=stride, summary=summary),
        lambda q, k: k <= q and (q // stride == k // stride or k % stride >= stride - summary),
    )


def test_presets_without_options():
    check(sl.preset("logsparse"), lambda q, k: q - k in (0, 1, 2, 4, 8, 16, 32, 64))
    check(sl.preset("causal"), lambda q, k: k <= q)
    check(sl.preset("bidirectional"), lambda q, k: True)


@pytest.mark.parametrize("block, window, globals_, draws, seed", [(1, 3, 1, 2, 0), (4, 5, 0, 1, 3), (3, 1, 2, 0, 1)])
def test_bigbird(block, window, globals_, draws, seed):
    options = dict(block=block, window_blocks=window, global_blocks=globals_, random_blocks=draws, seed=seed)
    both, past = sl.preset("bigbird", **options, causal=False), sl.preset("bigbird", **options)
    blocks = 30
    layout = both.dense(blocks * block)[::block, ::block]
    np.testing.assert_array_equal(both.dense(blocks * block), np.kron(layout, np.ones((block, block), bool)))
    np.testing.assert_array_equal(past.dense(blocks * block), np.tril(both.dense(blocks * block)))
    np.testing.assert_array_equal(layout, layout.T)
    fixed = matrix(lambda a, b: abs(a - b) <= window // 2 or a < globals_ or b < globals_, blocks)
    assert np.all(layout[fixed])
    # Some draws fall on the window or a global block, so the rest of a row holds at most `draws`, and not much less.
    rest = np.tril(layout & ~fixed).sum(axis=1)
    assert rest.max() == draws and rest.sum() >= draws * blocks // 2


def hugging_face_bigbird(n):
    """The blocks that Hugging Face's block-sparse BigBird multiplies, without the random ones: bool [n, n]."""
    grid = np.zeros((n, n), bool)
    grid[0], grid[n - 1] = True, True  # the first and the last row see all
    grid[1, [0, 1, 2, n - 1]] = True
    for row in range(2, n - 2):
        grid[row, [0, row - 1, row, row + 1, n - 1]] = True
    grid[n - 2, [0, n - 3, n - 2, n - 1]] = True
    return grid


@pytest.mark.parametrize("n, block", [(8, 1), (12, 1), (9, 4)])
def test_bigbird_of_a_length_is_hugging_faces(n, block):
    options = {"block": block, "seq_len": n * block, "causal": False}
    expected = hugging_face_bigbird(n)
    mask = sl.preset("bigbird", **options, random_blocks=0)
    np.testing.assert_array_equal(mask.dense(n * block), np.kron(expected, np.ones((block, block), bool)))
    past = sl.preset("bigbird", **options | {"causal": True}, random_blocks=0)
    np.testing.assert_array_equal(past.dense(n * block), np.tril(mask.dense(n * block)))
    # Three random blocks a row at most, before and after it, drawn by that row alone.
    drawn = sl.preset("bigbird", **options, seed=3).dense(n * block)[::block, ::block] & ~expected
    assert drawn.sum(axis=1).max() <= 3 and np.triu(drawn).any() and np.tril(drawn).any()
    # The planner takes the last block's keys and queries out of natural order, as it does the first one's.
    orders = {str(block_pass.kv_order) for block_pass in candidates(mask, n * block)[-1].chains[0]}
    assert f"tokens {(n - 1) * block} to {n * block - 1} only" in orders


# --- openai/sparse_attention -----------------------------------------------------------------------------------------


def openai_dense_mask(mode, length, ctx):
    """What its dense implementation lets through, pair by pair."""
    rules = {
        "all": lambda q, k: k <= q,
        "local": lambda q, k: k <= q and q - k <= min(length - 1, ctx - 1),
        "strided": lambda q, k: q >= k and (q - k) % ctx == 0,
    }
    return matrix(rules[mode], length)


def openai_blocks(mode, length, ctx, blocksize, heads, num_verts, vertsize):
    """What its block-sparse implementation lets through: [heads, length, length], enabled blocks x rule inside one."""
    n = length // blocksize
    result = np.zeros((heads, length, length), bool)
    for head, a, b in itertools.product(range(heads), range(n), range(n)):
        if mode == "all":
            enabled = b <= a
        elif mode == "local":
            enabled = b <= a <= b + ctx // blocksize
        elif mode == "strided":  # on the sequence sorted by residue: chunks of one residue class each
            chunk = length // ctx // blocksize
            enabled = b <= a and b + a % chunk >= a
        else:
            s = ctx // blocksize
            rows = [list(range(s - 1, -1, -1))[i : i + vertsize] for i in range(0, s, vertsize)]
            enabled = b <= a and (a // s == b // s or b % s in rows[head % num_verts])
        if not enabled:
            continue
        for i, j in itertools.product(range(blocksize), range(blocksize)):
            q, k = a * blocksize + i, b * blocksize + j
            if (a == b and j > i) or (mode == "local" and (k > q or k + ctx <= q)):
                continue
            result[head, q, k] = True
    if mode == "strided":  # back to the natural order
        token = np.arange(length).reshape(length // ctx, ctx).T.reshape(-1)
        natural = np.zeros_like(result)
        natural[:, token[:, None], token[None, :]] = result
        return natural
    return result


@pytest.mark.parametrize("mode", ["all", "local", "strided"])
@pytest.mark.parametrize("length", [1, 8, 33, 64])
@pytest.mark.parametrize("ctx", [1, 3, 8, 32, 128])
def test_openai_dense_masks(mode, length, ctx):
    mask = sl.preset(mode) if mode == "all" else sl.preset(mode, local_attn_ctx=ctx)
    np.testing.assert_array_equal(mask.dense(length), openai_dense_mask(mode, length, ctx))


@pytest.mark.parametrize("mode", ["all", "local", "strided"])
@pytest.mark.parametrize("length, ctx, blocksize", [(32, 8, 4), (64, 16, 2), (48, 4, 4), (64, 32, 1)])
def test_openai_blocks(mode, length, ctx, blocksize):
    mask = sl.preset(mode) if mode == "all" else sl.preset(mode, local_attn_ctx=ctx)
    expected = openai_blocks(mode, length, ctx, blocksize, 1, 1, 1)[0]
    np.testing.assert_array_equal(mask.dense(length), expected)


@pytest.mark.parametrize("length", [16, 64, 72])
@pytest.mark.parametrize(
    "ctx, blocksize, num_verts, vertsize",
    [
        (16, 4, 1, 1),
        (16, 4, 4, 1),
        (16, 4, 2, 2),
        (8, 2, 3, 1),
        (32, 4, 2, 4),
        (8, 8, 1, 1),
        (8, 1, 4, 2),
        (16, 4, 1, 4),
    ],
)
def test_openai_fixed(length, ctx, blocksize, num_verts, vertsize):
    heads = 2 * num_verts
    mask = sl.preset("fixed", local_attn_ctx=ctx, blocksize=blocksize, num_verts=num_verts, vertsize=vertsize)
    masks = mask if isinstance(mask, tuple) else (mask,)
    assert len(masks) == num_verts
    expected = openai_blocks("fixed", length, ctx, blocksize, heads, num_verts, vertsize)
    for head in range(heads):
        np.testing.assert_array_equal(masks[head % len(masks)].dense(length), expected[head])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(blocksize=48), "blocksize=48 must divide local_attn_ctx=128"),
        (dict(vertsize=3), "vertsize=3 must divide"),
        (dict(num_verts=5), "num_verts * vertsize = 5 must not exceed"),
        (dict(num_verts=3, vertsize=2), "num_verts * vertsize = 6 must not exceed"),
    ],
)
def test_fixed_refuses(options, message):
    with pytest.raises(ValueError) as error:
        sl.preset("fixed", **options)
    assert message in str(error.value)


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def deepspeed_layouts(config, heads, n):
    """The six layouts from their definition: bool [heads, n, n]; random blocks drawn by Python's generator."""
    draw = random.Random(0).sample
    c = {
        "different_layout_per_head": False,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "num_sliding_window_blocks": 3,
        "attention": "unidirectional" if config["mode"] == "local_sliding_window" else "bidirectional",
    } | config
    one_way = c["attention"] == "unidirectional"
    reach = c["num_sliding_window_blocks"] // 2
    result = []
    for h in range(heads):
        grid = np.zeros((n, n), bool)

        def window(start, stop, grid=grid):
            for row in range(start, min(stop, n)):
                grid[row, start : row + 1 if one_way else min(stop, n)] = True

        def stretches():
            ends = c["global_block_end_indices"] or [i + 1 for i in c["global_block_indices"]]
            return [(s, min(e, n)) for s, e in zip(c["global_block_indices"], ends, strict=True) if s < n]

        if c["mode"] == "dense":
            grid[:] = True
        elif c["mode"] == "fixed":
            size, width = c["num_local_blocks"], c["num_global_blocks"]
            for start in range(0, n, size):
                window(start, start + size)
            offset = size - (1 + h % c["num_different_global_patterns"]) * width
            whole = n // size * size
            starts = [i for i in range(whole) if i % size == offset]
            if n > whole:
                starts.append(min(whole + offset, n - width))
            for i in starts:
                grid[i if one_way else 0 :, i : i + width] = True
                if c["horizontal_global_attention"]:
                    grid[i : i + width, :] = True
        elif c["mode"] == "variable":
            for row in range(n):
                grid[row, draw(range(n), c["num_random_blocks"])] = True
            start = 0
            for size in itertools.chain(c["local_window_blocks"], itertools.repeat(c["local_window_blocks"][-1])):
                if start >= n:
                    break
                window(start, start + size)
                start += size
            for s, e in stretches():
                grid[s if one_way else 0 :, s:e] = True
                if c["horizontal_global_attention"]:
                    grid[s:e, :] = True
        else:
            for row in range(n):
                if c["mode"] == "bigbird":
                    pool = range(row + 1) if one_way else range(n)
                    grid[row, draw(pool, c["num_random_blocks"])] = True
                grid[row, max(0, row - reach) : row + reach + 1] = True
            marked = [(0, c["num_global_blocks"])] if c["mode"] == "bigbird" else []
            for s, e in stretches() if c["mode"] == "bslongformer" else marked:
                grid[s:e, :] = True
                grid[:, s:e] = True
            if one_way:
                grid = np.tril(grid)
        result.append(result[0] if h and not c["different_layout_per_head"] else grid)
    return np.stack(result)


def our_layouts(config, heads, n, **options):
    block = config.get("block", 16)
    masks = sl.as_masks(sl.from_deepspeed(config, num_heads=heads, **options))
    layouts = []
    for h in range(heads):
        dense = masks[h % len(masks)].dense(n * block)
        layouts.append(dense[::block, ::block])
        np.testing.assert_array_equal(dense, np.kron(layouts[-1], np.ones((block, block), bool)))
    return np.stack(layouts)


ATTENTION = [{"attention": "unidirectional"}, {"attention": "bidirectional"}]
HORIZONTAL = [*ATTENTION, {"attention": "bidirectional", "horizontal_global_attention": True}]
GLOBALS = [
    {},
    {"global_block_indices": []},
    {"global_block_indices": [1, 5]},
    {"global_block_indices": [0, 2, 9], "global_block_end_indices": [1, 5, 40]},
]
CASES = [{"mode": "dense"}]
CASES += [
    {"mode": "fixed"} | sizes | attention
    for attention in HORIZONTAL
    for sizes in [
        {},
        {"num_local_blocks": 3},
        {"num_local_blocks": 4, "num_global_blocks": 2},
        {"num_local_blocks": 6, "num_global_blocks": 3},
        {"num_different_global_patterns": 4, "different_layout_per_head": True},
        {
            "num_local_blocks": 6,
            "num_global_blocks": 2,
            "num_different_global_patterns": 3,
            "different_layout_per_head": True,
        },
    ]
]
CASES += [
    {"mode": "variable", "local_window_blocks": windows} | globals_ | attention
    for attention in HORIZONTAL
    for globals_ in GLOBALS
    for windows in ([4], [1, 2, 3], [5, 2], [3, 3], [2, 9])
]
CASES += [
    {"mode": "bigbird", "num_sliding_window_blocks": w, "num_global_blocks": g} | attention
    for attention in ATTENTION
    for w, g in [(3, 1), (1, 2), (4, 3), (5, 1)]
]
CASES += [
    {"mode": "bslongformer", "num_sliding_window_blocks": w} | globals_ | attention
    for attention in ATTENTION
    for globals_ in GLOBALS
    for w in (1, 3, 4)
]
CASES += [
    {"mode": "local_sliding_window", "num_sliding_window_blocks": w} | attention
    for attention in [{}, *ATTENTION]
    for w in (1, 3, 6)
]


@pytest.mark.parametrize("config", CASES, ids=json.dumps)
def test_deepspeed_layouts(config):
    for n in (6, 12, 13, 16, 23):
        np.testing.assert_array_equal(
            our_layouts(config | {"block": 2}, 4, n, seq_len=2 * n), deepspeed_layouts(config, 4, n)
        )
        # The length matters in the short last window of mode 'fixed' alone.
        if config["mode"] != "fixed" or n % config.get("num_local_blocks", 4) == 0:
            np.testing.assert_array_equal(our_layouts(config | {"block": 2}, 4, n), deepspeed_layouts(config, 4, n))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("attention", HORIZONTAL, ids=json.dumps)
def test_deepspeed_fixed_on_fewer_blocks_than_a_summary_has(n, attention):
    config = {"mode": "fixed", "num_local_blocks": 8, "num_global_blocks": 4, "block": 1} | attention
    expected = deepspeed_layouts(config, 1, n)
    np.testing.assert_array_equal(our_layouts(config, 1, n, seq_len=n), expected)


@pytest.mark.parametrize("block", [1, 16, 64])
def test_deepspeed_block_size(block):
    config = {"mode": "fixed", "block": block}
    np.testing.assert_array_equal(our_layouts(config, 1, 8), deepspeed_layouts(config, 1, 8))


RANDOM = [{"mode": "variable", "local_window_blocks": [2]} | attention for attention in ATTENTION] + [
    {"mode": "bigbird"} | attention for attention in ATTENTION
]


@pytest.mark.parametrize("config", RANDOM, ids=json.dumps)
def test_deepspeed_random_blocks_follow_its_rules(config):
    n, draws, heads = 40, 1 if config["attention"] == "unidirectional" else 3, 3
    config = config | {"num_random_blocks": draws, "block": 1}
    base = deepspeed_layouts(config | {"num_random_blocks": 0}, 1, n)[0]
    ahead = ~np.tri(n, dtype=bool)
    for per_head in (False, True):
        layouts = our_layouts(config | {"different_layout_per_head": per_head}, heads, n, seq_len=n)
        theirs = deepspeed_layouts(config | {"different_layout_per_head": per_head}, heads, n)
        assert len({layout.tobytes() for layout in layouts}) == (heads if per_head else 1)
        for layout, their in zip(layouts, theirs, strict=True):
            assert np.all(layout[base])
            # Draws on top of other blocks vanish: at most `draws` more a row, and about as many as theirs in all.
            more, their_more = ((x & ~base).sum(axis=1) for x in (layout, their))
            assert 0 < more.max() <= draws and their_more.max() <= draws
            assert more.sum() > 0.6 * draws * n
            # Whether any block lies in the future is the same, but for bigbird only in both directions.
            assert np.any((layout & ~base)[ahead]) == np.any((their & ~base)[ahead])
    other = our_layouts(config | {"seed": 1}, 1, n, seq_len=n)
    assert np.any(other != our_layouts(config, 1, n, seq_len=n))


def test_deepspeed_random_blocks_without_a_length_lie_before_the_row():
    config = {"mode": "bigbird", "num_random_blocks": 2, "num_global_blocks": 1, "block": 1}
    more = our_layouts(config, 1, 40)[0] & ~deepspeed_layouts(config | {"num_random_blocks": 0}, 1, 40)[0]
    assert not np.any(np.triu(more)) and more.sum(axis=1).max() == 2


def test_deepspeed_heads():
    config = {"mode": "fixed", "num_different_global_patterns": 4, "different_layout_per_head": True}
    assert len(sl.as_masks(sl.from_deepspeed(config))) == 4
    assert len(sl.as_masks(sl.from_deepspeed(config, num_heads=6))) == 6
    assert isinstance(sl.from_deepspeed(config, num_heads=1), sl.Mask)
    assert isinstance(sl.from_deepspeed({"mode": "bslongformer", "different_layout_per_head": True}), sl.Mask)


def test_deepspeed_takes_json_whole_configurations_and_every_key():
    every = {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": True,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 4,
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "num_sliding_window_blocks": 3,
    }
    expected = sl.from_deepspeed(every)
    assert sl.from_deepspeed(json.dumps(every)) == expected
    assert sl.from_deepspeed({"train_batch_size": 8, "sparse_attention": every}) == expected
    assert sl.from_deepspeed({}) == sl.from_deepspeed({"mode": "fixed"})


@pytest.mark.parametrize(
    "config, options, message",
    [
        ("{", {}, "config is no JSON"),
        ("[1]", {}, "config must be a dict or a JSON object, got [1]"),
        (3, {}, "config must be a dict or a JSON object, got 3"),
        ({"mode": "fixde"}, {}, "unknown mode 'fixde', did you mean 'fixed'?"),
        ({"num_local_block": 3}, {}, "unknown key 'num_local_block', did you mean 'num_local_blocks'"),
        ({"block": 0}, {}, "block must be an integer >= 1, got 0"),
        ({"block": 16.0}, {}, "block must be an integer >= 1, got 16.0"),
        ({"num_local_blocks": True}, {}, "num_local_blocks must be an integer >= 1, got True"),
        ({"horizontal_global_attention": 1}, {}, "horizontal_global_attention must be true or false, got 1"),
        ({"attention": "both"}, {}, "attention must be 'unidirectional' or 'bidirectional', got 'both'"),
        ({"local_window_blocks": []}, {}, "local_window_blocks must be a list of integers, got []"),
        ({"local_window_blocks": 4}, {}, "local_window_blocks must be a list of integers, got 4"),
        ({"local_window_blocks": [4, 0]}, {}, "local_window_blocks must be an integer >= 1, got 0"),
        ({"global_block_indices": [-1]}, {}, "global_block_indices must be an integer >= 0, got -1"),
        ({"global_block_end_indices": [1, 2]}, {}, "one entry for each of global_block_indices"),
        ({"global_block_indices": [3], "global_block_end_indices": [3]}, {}, "greater than it; got [3] and [3]"),
        ({"num_local_blocks": 4, "num_global_blocks": 3}, {}, "num_global_blocks=3 must divide num_local_blocks=4"),
        ({"num_different_global_patterns": 2}, {}, "needs different_layout_per_head=true"),
        (
            {"num_different_global_patterns": 5, "different_layout_per_head": True},
            {},
            "num_different_global_patterns=5 must not exceed",
        ),
        (
            {"attention": "unidirectional", "horizontal_global_attention": True},
            {},
            "horizontal_global_attention=true needs attention='bidirectional'",
        ),
        ({"mode": "bigbird", "num_random_blocks": 1, "different_layout_per_head": True}, {}, "need num_heads"),
        ({}, {"num_heads": 0}, "num_heads must be an integer >= 1, got 0"),
        ({}, {"seq_len": 40}, "block=16 must divide seq_len=40"),
        ({"mode": "bigbird", "num_random_blocks": 3}, {"seq_len": 32}, "num_random_blocks=3 must not exceed the 2"),
        ({"mode": "bslongformer"}, {"seq_len": 32}, "num_sliding_window_blocks=3 must not exceed the 2 blocks"),
        ({"mode": "bigbird", "num_global_blocks": 4}, {"seq_len": 48}, "num_global_blocks=4 must not exceed the 3"),
    ],
)
def test_deepspeed_refuses(config, options, message):
    with pytest.raises(ValueError) as error:
        sl.from_deepspeed(config, **options)
    assert message in str(error.value)


# --- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_defaults_a_summary_and_a_picture(name):
    masks = sl.as_masks(sl.preset(name, **NEEDED[name]))
    assert sl.as_masks(sl.preset(name, **sl.preset_options(name) | NEEDED[name])) == masks
    assert all(mask.computable for mask in masks)
    documentation = inspect.getdoc(_PRESETS[name]) or ""
    assert documentation.replace("``", "").startswith(sl.presets()[name]) and len(sl.presets()[name]) > 20
    assert f'sl.preset("{name}"' in documentation
    assert "■" in documentation
    assert all(option in documentation for option in sl.preset_options(name))


@pytest.mark.parametrize("name", ["local", "strided"])
def test_half_of_a_pattern_says_so_at_once(name):
    """In `presets`, which the gallery and the command line print, and in `describe`; the merged preset does not."""
    assert "one of two masks that the Sparse Transformer combines" in sl.presets()[name]
    assert "`sparse_transformer_strided` is both, merged" in (inspect.getdoc(_PRESETS[name]) or "").split("\n\nArgs")[0]
    note = f"note: {name!r} is one of two masks"
    assert sl.describe(f"{name}:local_attn_ctx=4", 32).count(note) == 1
    assert "note:" not in sl.describe("sparse_transformer_strided:stride=4", 32) + sl.describe("sliding_window", 32)


def test_the_mask_of_a_stride_alone_says_so_wherever_it_is():
    mask = sl.preset("strided", local_attn_ctx=4)
    fn = sl.make_attention_fn((mask, "causal"), 32)
    for text in (sl.describe(mask, 32), sl.describe(fn), sl.describe(fn.plan(32))):
        assert text.count("note: 'strided' is one of two masks") == 1
    both = sl.preset("strided", local_attn_ctx=4) | sl.preset("local", local_attn_ctx=4)
    assert "note:" not in sl.describe(both, 32)
    assert "note:" not in sl.describe(("local", "strided"), 32)


def test_all_presets_are_there():
    documented = {
        "causal, all, local, strided, fixed",
        "sparse_transformer_strided, sparse_transformer_fixed",
        "sliding_window, chunked, dilated, longformer, bigbird, streaming, logsparse, prefix_lm",
        "bidirectional",
        "block_diffusion, draft_blocks",
        "neighborhood, sliding_tile, windows, axial, image_strided, image_fixed, spatial_temporal, radial",
    }
    assert sorted(name for row in documented for name in row.split(", ")) == NAMES


@pytest.mark.parametrize("name", sorted(set(NAMES) - BOTH_WAYS))
def test_presets_are_causal(name):
    for mask in sl.as_masks(sl.preset(name, **NEEDED[name])):
        assert not np.any(np.triu(mask.dense(300), 1))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"draft_blocks"}))  # its keys begin with another sequence
def test_presets_let_every_query_see_itself(name):
    for mask in sl.as_masks(sl.preset(name, **NEEDED[name])):
        assert np.all(np.diagonal(mask.dense(300)))


def test_options_in_the_name():
    assert sl.preset("local:local_attn_ctx=9") == sl.preset("local", local_attn_ctx=9)
    assert sl.preset("longformer: window=9 , causal=False") == sl.preset("longformer", window=9, causal=False)
    assert sl.preset("bigbird:seed=-3,causal=true") == sl.preset("bigbird", seed=-3)
    assert sl.preset("bigbird:seed=3", causal=False) == sl.preset("bigbird", seed=3, causal=False)
    assert sl.preset("local:") == sl.preset("local")
    assert sl.preset("local", local_attn_ctx=np.int64(9)) == sl.preset("local", local_attn_ctx=9)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("slidingwindow", {}, "unknown name 'slidingwindow', did you mean 'sliding_window'"),
        ("xyzzy", {}, "unknown name 'xyzzy'. Known: all, axial, bidirectional, bigbird, block_diffusion, causal"),
        ("", {}, "unknown name ''. Known: all"),
        ("dense", {}, "unknown name 'dense': it is 'causal' to some and 'bidirectional' to others"),
        ("bigbird", {"seq_len": 100}, "bigbird: block=64 must divide seq_len=100"),
        (None, {}, "name must be a string, got None"),
        ("strided", {"stride": 3}, "unknown option 'stride'. Known: local_attn_ctx"),
        ("streaming", {"windows": 3}, "unknown option 'windows', did you mean 'window'? Known: sinks, window"),
        ("all", {"window": 3}, "preset 'all': unknown option 'window'. Known: none"),
        ("strided:stride=3", {}, "unknown option 'stride'"),
        ("strided:local_attn_ctx", {}, "options must be option=value,..., each once, got 'local_attn_ctx'"),
        ("dilated:window=1,window=2", {}, "each once, got 'window=1,window=2'"),
        ("local:local_attn_ctx=1.5", {}, "local_attn_ctx must be an integer >= 1, got '1.5'"),
        ("local:local_attn_ctx=true", {}, "local_attn_ctx must be an integer >= 1, got True"),
        ("longformer:causal=1", {}, "causal must be true or false, got 1"),
        ("longformer:causal=no", {}, "causal must be true or false, got 'no'"),
        ("local", {"local_attn_ctx": 0}, "preset 'local': local_attn_ctx must be an integer >= 1, got 0"),
        ("local", {"local_attn_ctx": 2.0}, "local_attn_ctx must be an integer >= 1, got 2.0"),
        ("local", {"local_attn_ctx": None}, "local_attn_ctx must be an integer >= 1, got None"),
        ("streaming", {"sinks": -1}, "sinks must be an integer >= 0, got -1"),
        ("bigbird", {"seed": "a"}, "seed must be an integer, got 'a'"),
        ("sparse_transformer_fixed", {"summary": 129}, "summary=129 must not exceed stride=128"),
    ],
)
def test_preset_refuses(name, options, message):
    with pytest.raises(ValueError) as error:
        sl.preset(name, **options)
    assert message in str(error.value)


def test_preset_options_refuses():
    with pytest.raises(ValueError, match="unknown name 'loca', did you mean 'local'"):
        sl.preset_options("loca")
