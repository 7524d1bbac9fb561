"""What `describe` advises: why nothing is saved, what saves, and which masks a function or an array equals."""

import re

import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.tools.recognition import recognize


def advice(*args, **options):
    lines = sl.describe(*args, size=2, **options).split("\n")
    return [line[2:] for line in lines if line.startswith(("  nothing is saved: ", "  try "))]


def saving(mask, length, **options):
    cost, dense = (sl.make_plan(m, length, **options).candidates[0][0][1] for m in (mask, "causal"))
    return f"{dense / cost:.1f} times less"


RANDOM = sl.Random(4)
LARGE = sl.FwdParams(q_blocksize=4096, kv_blocksize=4096)


@pytest.mark.parametrize(
    "mask, length, options, reason, change, better",
    [
        (
            sl.Window(1023),
            1024,
            {},
            "allows all 524800 pairs of causal attention",
            "longer sequences: 4096 tokens",
            (sl.Window(1023), 4096),
        ),
        (
            sl.Causal() & sl.Strided(128),
            100,
            {},
            "100 tokens are one block of 128 x 128",
            "longer sequences: 1600 tokens",
            ("strided", 1600),
        ),
        (
            sl.Causal() & (sl.Window(100) | RANDOM),
            8192,
            {},
            "all 2080 blocks of causal attention hold allowed pairs, 2.54% of its pairs",
            f"{sl.Blocks(RANDOM, 128)!r} for {RANDOM!r}",
            (sl.Causal() & (sl.Window(100) | sl.Blocks(RANDOM, 128)), 8192),
        ),
        (
            sl.preset("sparse_transformer_strided"),
            1024,
            {},
            "hold allowed pairs, 24.11% of its pairs; 1 other row order costs no less at this length",
            "longer sequences: 4096 tokens",
            ("sparse_transformer_strided", 4096),
        ),
        (
            sl.Window(99),
            8192,
            {"fwd_params": LARGE},
            "all 3 blocks of causal",
            "other block sizes",
            (sl.Window(99), 8192),
        ),
    ],
)
def test_why_nothing_is_saved_and_what_saves(mask, length, options, reason, change, better):
    """Changes are named with the saving of their own plans."""
    lines = advice(mask, length, **options)
    assert reason in lines[0] and lines[0].startswith("nothing is saved: ")
    (line,) = [line for line in lines if line.startswith(f"try {change}")]
    assert saving(*better) in line


@pytest.mark.parametrize(
    "mask, length, why, rule",
    [
        ("causal", 512, "allows all 131328 pairs of causal attention", "allows fewer pairs"),
        ("bidirectional", 512, "allows all 262144 pairs of full attention", "allows fewer pairs"),
        ("windows:shape=16x16", 256, "all 4 blocks of full attention hold allowed pairs", "lets neighbouring queries"),
    ],
)
def test_patterns_that_cannot_save(mask, length, why, rule):
    first, second = advice(mask, length)
    assert why in first and second.startswith(f"try a pattern that {rule}") and "presets()" in second


def test_no_advice_for_a_pattern_that_saves():
    for mask, length in (("sliding_window:window=256", 4096), ("strided", 4096), (sl.Empty(), 64)):
        assert advice(mask, length) == []
    layer = sl.make_attention_fn("moba:block=16,count=4", 256)  # which chooses what its pattern leaves
    assert advice(layer) == []


# --- masks that are functions or arrays ------------------------------------------------------------------------------

EQUAL = {
    "causal": lambda q, k: q >= k,
    "full": lambda q, k: q == q,
    "window": lambda q, k: (q >= k) & (q - k < 100),
    "two-sided window": lambda q, k: abs(q - k) <= 7,
    "strided": lambda q, k: (q >= k) & ((q - k) % 64 == 0),
    "window or strided": lambda q, k: (q >= k) & ((q - k <= 64) | ((q - k) % 128 == 0)),
    "dilated": lambda q, k: (q >= k) & ((q - k) % 4 == 0) & (q - k < 128),
    "sinks": lambda q, k: (q >= k) & ((q - k < 100) | (k < 4)),
    "sinks and stride": lambda q, k: (q >= k) & ((q - k < 50) | (k < 3) | ((q - k) % 128 == 0)),
    "prefix": lambda q, k: (q >= k) | (k < 77),
    "chunked": lambda q, k: (q >= k) & (q // 96 == k // 96),
    "blocks": lambda q, k: q // 96 == k // 96,
    "fixed": lambda q, k: (q >= k) & ((q // 128 == k // 128) | (k % 128 >= 120)),
    "global": lambda q, k: (abs(q - k) <= 5) | (q < 3) | (k < 3),
    "logarithmic": lambda q, k: sl.LogSparse()(q, k),
}
LENGTH = 1500


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("as_array", [False, True])
def test_functions_and_arrays_are_recognized(name, as_array):
    rule = EQUAL[name]
    mask = sl.from_mask_mod(lambda b, h, q, k: rule(q, k))
    assert isinstance(mask, sl.Mask)
    dense = mask.dense(LENGTH)
    recognized = recognize(sl.Array(dense) if as_array else mask, LENGTH)
    assert recognized is not None
    np.testing.assert_array_equal(recognized[0].dense(LENGTH), dense)


def test_rules_that_equal_no_expression_are_not_recognized():
    for rule in (
        lambda q, k: (q >= k) & (q * k % 7 == 0),
        lambda q, k: (q - k < 100) & (q >= k) & (q != 1000),
        lambda q, k: q < 0,
    ):
        assert recognize(sl.from_mask_mod(lambda b, h, q, k, rule=rule: rule(q, k)), LENGTH) is None


def test_describe_names_the_cheaper_expression():
    mod = sl.from_mask_mod(lambda b, h, q, k: EQUAL["window or strided"](q, k))
    for mask in (mod, sl.Causal() & mod, sl.Array(mod.dense(8192))):
        first, second = advice(mask, 8192)
        assert "no row order is known for" in first
        expression = sl.Causal() & (sl.Window(64) | sl.Strided(128))
        (times,) = re.findall(r"and costs ([\d.]+) times less$", second)
        costs = [sl.make_plan(m, 8192).candidates[0][0][1] for m in (mask, expression)]
        assert f"try {expression!r}: it answers the same for " in second and times == f"{costs[0] / costs[1]:.1f}"
        assert float(times) > 2.5
    (line,) = advice(sl.from_mask_mod(lambda b, h, q, k: EQUAL["window"](q, k)), 4096)
    assert line.startswith("try Window(left=99, right=0): ") and "costs the same and is planned faster" in line


def test_describe_advises_masks_for_a_function_that_equals_no_expression():
    mod = sl.from_mask_mod(lambda b, h, q, k: (q >= k) & (q * k % 7 == 0))
    lines = advice(mod, 1024)
    assert [line.partition(":")[0] for line in lines] == [
        "nothing is saved",
        "try Causal, Window, Strided, ... with &, | and ~ for mask_mod <lambda>",
        "try a pattern that lets neighbouring queries see the same blocks of keys",
    ]
    array = sl.Array(np.tril(np.random.default_rng(0).random((512, 512)) < 0.1))
    assert [line.partition(":")[0] for line in advice(array, 512)] == [
        lines[0].partition(":")[0],
        lines[2].partition(":")[0],
    ]
