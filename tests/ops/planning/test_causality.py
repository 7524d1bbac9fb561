"""Causality of masks against their dense form, and the error that names a pair."""

import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.planning.causality import check_causal, is_causal, look_ahead
from tests.ops.cases import TINY

T = 40
LATE = sl.MaskMod(lambda b, h, q, k: (q >= k) | ((q == 21) & (k == 30)))
MASKS = {
    "window and global tokens": sl.Window(7) | sl.Global(2),
    "one pair": LATE,
    "array": sl.Array(np.tri(T, k=1, dtype=bool)),
    "causal blocks": sl.Blocks(sl.Causal(), 8),
    "strictly causal": ~sl.Causal().T,
    "nothing": sl.Empty() | (sl.Strided(3) & ~sl.Strided(3)),
    "the future hidden twice": (sl.Causal() & sl.Full()) | sl.Window(3),
    "draws from all": sl.Random(2, seed=1, size=T),
    "stride both ways": sl.Strided(7),
    "image in raster order": sl.Grid((5, 8), sl.Window(1, 1)) & sl.Causal(),
    "image": sl.Grid((5, 8), sl.Window(1, 1)),
}
MASKS |= {f"{name} {i}": m for name in TINY for i, m in enumerate(sl.as_masks(sl.preset(name, **TINY[name])))}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_a_pair_exactly_where_some_query_sees_a_later_key(mask):
    future = np.triu(mask.dense(T), 1)
    pair = look_ahead(mask, T)
    assert (pair is None) == is_causal(mask, T) == (not future.any())
    assert pair is None or future[pair]


def test_long_sequences_are_judged_in_closed_form(monkeypatch):
    looked_at = 0

    def counted(self, q, k, call=sl.Strided.__call__):
        nonlocal looked_at
        looked_at += np.broadcast(q, k).size
        return call(self, q, k)

    monkeypatch.setattr(sl.Strided, "__call__", counted)
    strided = sl.Window(128, 128) & sl.Strided(64)
    query, key = look_ahead(strided, 2**17) or (0, 0)
    assert 0 < key - query <= 128 and (key - query) % 64 == 0
    assert look_ahead(sl.Blocks(sl.Causal() & sl.Strided(64), 1), 2**17) is None  # no formula, its blocks show it
    assert looked_at < 2**26, "of 2**34 pairs"


def test_the_error_says_what_to_write():
    with pytest.raises(ValueError) as error:
        check_causal(LATE | sl.Prefix(0), T, "patterns[1]", "a rule", ", or this")
    message = str(error.value)
    assert message.startswith("patterns[1]: a rule, got MaskMod(")
    assert message.endswith("query 21 sees the later key 30: write sl.Causal() & ..., or this")
