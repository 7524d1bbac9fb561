import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.counting import count
from tests.tools.cases import MASKS


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("q_len, kv_len", [(5, 9), (150, 90), (90, 150)])
def test_small_counts_are_exact(name, q_len, kv_len):
    dense = MASKS[name].dense(q_len, kv_len)
    assert count(MASKS[name], q_len, kv_len) == (dense.sum(), not np.triu(dense, 1).any(), None)


@pytest.mark.parametrize("mask", [sl.Causal() & sl.Strided(7), sl.Window(300, 40), sl.Prefix(1).T, ~sl.Causal()])
@pytest.mark.parametrize("q_len, kv_len", [(1500, 1100), (1030, 2055)])
def test_counts_of_larger_squares(mask, q_len, kv_len):
    dense = mask.dense(q_len, kv_len)
    causal = not np.triu(dense, 1).any()
    assert count(mask, q_len, kv_len) == (dense.sum(), causal, None)
    estimate = count(mask, q_len, kv_len, 1 << 19)
    assert abs(estimate.pairs / dense.sum() - 1) < 0.02 and estimate.causal == causal


def test_a_table_is_never_asked_beyond_the_lengths():
    table = np.random.default_rng(0).random(1030) < 0.5
    mask = sl.MaskMod(lambda b, h, q, k: table[q] == table[k])
    true = (table[:, None] == table).sum()
    assert count(mask, 1030, 1030) == (true, False, None)
    estimate = count(mask, 1030, 1030, 1 << 18)
    assert estimate.looked_at and estimate.looked_at <= 1 << 18 and abs(estimate.pairs / true - 1) < 0.02


def test_a_count_of_any_length_looks_at_as_many_pairs():
    estimate = count(sl.Causal() & sl.Window(9), 10**9, 10**9, 1 << 20)
    assert estimate.causal and estimate.looked_at <= 1 << 20
