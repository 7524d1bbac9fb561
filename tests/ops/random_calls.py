"""Calls at random: any mask, lengths, heads, options and biases. `RANDOM_CALLS` in the environment says how many."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

import sparse_layers as sl
from tests.ops import test_selections as chosen
from tests.ops.cases import Case

KINDS = "none", "slopes", "table", "both", "grid"  # of biases


def random_case(
    seed: int,
    head_sizes: Sequence[int],
    lengths: Sequence[int],
    dtypes: Sequence[str] = ("bfloat16", "float16"),
    biases: bool = False,
    kinds: Sequence[str] = KINDS,
) -> Case:
    """Any mask and options, one of the head sizes, lengths, dtypes and kinds of bias; a selection in one of four."""
    draw, longest = np.random.default_rng(seed), max(lengths)

    def one_of(*choices):
        return choices[draw.integers(len(choices))]

    def maybe(share):
        return draw.random() < share

    def term(length):
        left, right, few = (int(x) for x in draw.integers(0, (longest // 4, longest // 4, longest // 10)))
        period = one_of(2, 4, 16, 32, 64, 100, 128)
        start = int(draw.integers(period))
        blocks = draw.random((length // 64 + 1, length // 64 + 1)) < 0.2
        near = sl.Window(left, right), sl.Window(left), sl.BlockDiagonal(period), sl.Full()
        far = sl.Strided(period), sl.Columns(period, start), sl.Prefix(few), sl.Prefix(few).T, sl.Global(few)
        return one_of(*near, *far, sl.Blocks(sl.Array(blocks), 64), ~sl.Window(left, right), sl.Compressed(32, 16))

    q_len = one_of(*lengths)
    kv_len = q_len if maybe(0.7) else one_of(*lengths[::2])
    masks = []
    for _ in range(one_of(1, 1, 1, 2)):
        terms = [term(max(q_len, kv_len)) for _ in range(one_of(1, 2, 2, 3))]
        mask = functools.reduce(operator.or_, terms)
        masks.append(sl.Causal() & mask if maybe(0.6) else mask)
    batch, heads = one_of(1, 2), one_of((2, 2), (4, 2), (8, 1), (6, 2))
    options: dict[str, Any] = {
        "heads": heads,
        "sizes": (size := one_of(*head_sizes), one_of(size, size, 72 if size <= 128 else 128)),
        "batch": batch,
        "dtype": one_of(*dtypes),
        "sinks": maybe(0.3),
        "soft_cap": 2.0 if maybe(0.15) else None,
        "scale": one_of(0.3, -0.2, 0.01) if maybe(0.15) else None,
    }
    if biases:
        options |= _bias(one_of(*kinds), heads[0], (q_len, kv_len), draw) | {"return_lse": seed % 2 == 0}
    if maybe(0.3):
        ids = [np.sort(draw.integers(-1, 4, (batch, n)), axis=1).astype(np.int32) for n in (q_len, kv_len)]
        options["segments"] = (ids[0], ids[0] if q_len == kv_len else ids[1])
    if maybe(0.25):
        options |= {"granularity": one_of(16, 64, 128), "block": one_of(64, 128), "k": one_of(1, 3)}
        return chosen.Case(str(seed), tuple(masks), q_len, kv_len, scope=one_of("1", "K", "N"), **options)
    if maybe(0.2):  # blocks of several tiles, as very long sequences have them
        options |= {"fwd": (128, walked := one_of(256, 512, 1024)), "bwd": (walked, 128)}
    return Case(str(seed), tuple(masks), q_len, kv_len, **options)


def _bias(kind: str, num_heads: int, lengths: tuple[int, int], draw: np.random.Generator) -> dict[str, Any]:
    """Returns the options of a bias, of any reach and center; one on a grid if there are as many queries as keys."""
    options: dict[str, Any] = {}
    table_heads = (1, num_heads)[draw.integers(2)]
    if kind == "grid" and lengths[0] == lengths[1]:
        divisors = [n for n in range(1, lengths[0] + 1) if lengths[0] % n == 0]
        rows = int(draw.choice(divisors))
        shape = rows, lengths[0] // rows
        reaches = (int(draw.integers(min(n + 2, 20))) for n in shape)
        options["grid_table"] = table_heads, tuple(2 * reach + 1 for reach in reaches), shape
    if kind in ("table", "both"):
        entries = int(draw.choice([1, 2, 9, 65, 300, sum(lengths) - 1]))
        options["table"] = table_heads, entries, int(draw.integers(entries))
    if kind in ("slopes", "both"):
        options["slopes"] = tuple(float(x) for x in draw.normal(size=num_heads) / 8)
    return options
