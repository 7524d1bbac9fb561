import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from sparse_layers.ops.planning.communication import parts_of
from tests.tools.cases import MASKS, expected_cells

SMALL = sl.FwdParams(q_blocksize=16, kv_blocksize=16)


@pytest.mark.parametrize("name", MASKS)
def test_describe_counts_pairs_and_blocks(name):
    mask, length = MASKS[name], 150
    dense = mask.dense(length)
    lines = sl.describe(mask, length, block=16).split("\n")
    pairs = next(line for line in lines if line.startswith("allowed pairs"))
    assert pairs.startswith(f"allowed pairs: {dense.sum()} of {length**2} ({dense.mean():.4%})")
    assert ("of the causal pairs" in pairs) == (not np.any(np.triu(dense, 1)))
    kept = np.count_nonzero(expected_cells(mask, length, length, 16))
    assert any(line.startswith(f"blocks of 16 x 16 kept: {kept} of 100 ") for line in lines)
    assert sl.picture(mask, length) in "\n".join(lines)


@pytest.mark.parametrize("length", [100, 300])
def test_describe_says_what_a_scorer_chooses(length):
    """What it leaves is counted once more, query by query."""
    scorer = sl.MoBA(block=16, count=8)
    whole = {t: range(t + 1) for t in range(length)}
    left = sum(len([k for k in keys if k // 16 == t // 16 or k // 16 < 7]) for t, keys in whole.items())
    layers = [
        sl.SparseSelfAttention(2, 8, pattern="moba:block=16,count=8", seq_len=length, rngs=nnx.Rngs(0)),
        linen.SparseSelfAttention(2, pattern="causal", selection=scorer, seq_len=length),
        sl.make_attention_fn(scorer, length),
    ]
    texts = {sl.describe(layer, size=4) for layer in layers} | {sl.describe(scorer, length, size=4)}
    assert len(texts) == 1
    text = texts.pop()
    assert f"chosen at run time: {scorer!r}" in text
    if length == 100:
        assert "100 tokens: every query looks at all blocks" in text and scorer.pairs(100) == 5050
        return
    assert f"chosen pairs: {left} of {length * (length + 1) // 2} causal ones" in text
    assert "each query looks at 8 of up to 19 blocks of 16" in text
    patterns = "causal", scorer
    model = sl.SparseTransformer(8, 2, 8, 2, patterns=patterns, seq_len=length, rngs=nnx.Rngs(0))
    first, second = sl.describe(model, size=4).split("layers 1 of 2:")
    assert "chosen" in second and "chosen pairs" not in first
    nsa = sl.NSA(block=16, count=4, pool_size=8, pool_stride=4)
    model = sl.SparseTransformer(8, 2, 8, 2, patterns=(nsa, "causal"), seq_len=length, rngs=nnx.Rngs(0))
    parts = [part.split("\n") for part in sl.describe(model, size=4).split("layers ")[1:]]
    assert [part[0] for part in parts] == [f"0 of 2, {x}:" for x in ("compressed", "selected", "sliding")] + ["1 of 2:"]
    assert [any(f"{nsa!r}" in line for line in part) for part in parts] == [False, True, False, False]


def test_describe_reports_the_plan():
    mask = sl.preset("sparse_transformer_strided")
    plan = sl.make_plan(mask, 4096)
    text = sl.describe(mask, 4096)
    assert "plan: 2 passes" in text and len(plan.chains[0]) == 2
    for link in plan.chains[0]:
        assert f"{link.q_order}; {link.fwd_blocks} of 1024 blocks of 128 x 128" in text
    (chosen, cost), *others = plan.candidates[0]
    assert f"chosen: {chosen}, cost {cost:.3g} pairs" in text
    assert all(f"not taken: {name}" in text for name, _ in others)
    causal = sl.make_plan(sl.Causal(), 4096).candidates[0][0][1]
    assert f"expected saving: {causal / cost:.1f} times less work than causal attention" in text
    assert "1.0 times less work than causal attention" in sl.describe(sl.Causal(), 500)
    assert "1.0 times less work than full attention" in sl.describe(sl.Full(), 500)
    other = sl.describe(mask, 4096, fwd_params=sl.FwdParams(q_blocksize=64, kv_blocksize=64))
    assert "blocks of 64 x 64" in other and "blocks of 128 x 128 kept" in other


def test_describe_estimates_what_it_cannot_count():
    mask, length = sl.Causal() & sl.Strided(100), 24000
    line = next(x for x in sl.describe(mask, length).split("\n") if x.startswith("allowed pairs"))
    assert line.endswith(" pairs)") and " (estimated from " in line and "of the causal pairs" in line
    true = sum(q // 100 + 1 for q in range(length))
    assert abs(int(line.split()[2]) / true - 1) < 0.03


def test_describe_of_other_keys_than_queries():
    text = sl.describe(sl.Causal(), 100, 300, block=50)
    assert "allowed pairs: 5050 of 30000 (16.8333%), 100.0000% of the causal pairs" in text
    assert "blocks of 50 x 50 kept: 3 of 12 (25.00%)" in text and "1.0 times less work than causal" in text
    assert sl.picture(sl.Causal(), 100, 300) in text


def test_describe_of_layers():
    sparse = sl.make_attention_fn(("local:local_attn_ctx=8", sl.Causal()), 64, fwd_params=SMALL)
    text = sl.describe((sl.preset("local", local_attn_ctx=8), sl.Causal()), 64, fwd_params=SMALL)
    assert "blocks of 16 x 16" in text
    ids = np.zeros((1, 64), int)
    for same in (sparse, sparse.plan(64), sl.make_attention_fn(sparse.masks, 64, fwd_params=SMALL, segment_ids=ids)):
        assert sl.describe(same) == text
    own = sl.describe(sl.Causal(), 64)
    layer = linen.SparseSelfAttention(2, pattern="causal", seq_len=64)
    block = linen.SparseTransformerBlock(2, 8, pattern="causal", seq_len=64)
    assert sl.describe(layer) == sl.describe(block) == own
    assert sl.describe(layer, size=4, block=16) == sl.describe(sl.Causal(), 64, size=4, block=16)


def test_describe_reckons_with_the_grouped_heads_of_a_layer():
    """Keys of one head are cheap to send, so all of them are; those of eight go to where they are asked for."""
    told = {}
    for kv_heads in (8, 1):
        layer = sl.SparseSelfAttention(8, 64, num_kv_heads=kv_heads, pattern="strided", seq_len=2048, rngs=nnx.Rngs(0))
        _, told[kv_heads] = sl.describe(layer, devices=4, size=4).split("512 tokens each:")
        assert isinstance(layer.plan, sl.Plan)
        routes = [str(part.route) for part in parts_of(layer.plan.masks, 2048, 4, "xla", 8 // kv_heads)]
        assert [line.strip() for line in told[kv_heads].splitlines()[1:-1:2]] == routes
    assert "all keys" in told[1] and "by residue" in told[8]


def test_describe_of_models():
    patterns = (sl.Window(3), sl.Causal() & sl.Strided(4))
    texts = [sl.describe(pattern, 16) for pattern in patterns]

    def model(*layers, **options):
        return nnx.eval_shape(lambda: sl.SparseTransformer(8, 2, 4, *layers, seq_len=16, rngs=nnx.Rngs(0), **options))

    turns = model(3, patterns=patterns)
    assert sl.describe(turns) == f"layers 0, 2 of 3:\n{texts[0]}\n\nlayers 1 of 3:\n{texts[1]}"
    assert sl.describe(turns.blocks[1]) == sl.describe(turns.blocks[1].attention) == texts[1]
    assert sl.describe(model(2, patterns=patterns[0], scan_layers=True)) == f"all 2 layers:\n{texts[0]}"


def test_describe_by_head_and_of_nothing():
    text = sl.describe((sl.Causal(), sl.Empty()), 64)
    assert text.startswith("heads 0, 2, ...:\nCausal()\n") and "\n\nheads 1, 3, ...:\nEmpty()\n" in text
    assert "plan: 0 passes" in text and "expected saving: nothing to compute (cost 0 against " in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(q_len=0), "q_len must be an integer >= 1, got 0"),
        (dict(q_len=4, block=0), "block must be an integer >= 1, got 0"),
        (dict(q_len=4, size=0), "size must be an integer >= 1, got 0"),
    ],
)
def test_describe_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        sl.describe(sl.Causal(), **arguments)
