"""Masks to be looked at, and what their pictures show."""

import numpy as np

import sparse_layers as sl


def expected_cells(mask, q_len, kv_len, cell):
    dense = mask.dense(q_len, kv_len)
    return np.array(
        [
            [
                2 if tile.all() else int(tile.any())
                for tile in (dense[a : a + cell, b : b + cell] for b in range(0, kv_len, cell))
            ]
            for a in range(0, q_len, cell)
        ]
    )


MASKS = {
    "causal": sl.Causal(),
    "strided": sl.preset("strided", local_attn_ctx=7),
    "window | strided": sl.Causal() & (sl.Window(20) | sl.Strided(40)),
    "fixed": sl.preset("sparse_transformer_fixed", stride=25, summary=6),
    "bigbird": sl.preset("bigbird", block=8),
    "mask_mod": sl.MaskMod(lambda b, h, q, k: (q + k) % 50 < 13),
    "array": sl.Array(np.random.default_rng(0).random((150, 150)) < 0.002),
    "nothing": sl.Causal() & ~sl.Causal(),
    "everything": sl.Causal() | ~sl.Causal(),
}
