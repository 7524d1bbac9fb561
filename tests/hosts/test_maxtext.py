"""The adapter of MaxText, by a stub of its `AttentionOp`."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from examples.hosts.maxtext.adapter import attend
from sparse_layers.tools.oracle import DenseAttention, budgets, in_order, largest_error, same_segment

TOKENS, HEADS, KV_HEADS, SIZE = 64, 4, 2, 16
IDS = np.repeat([[1, 2, 0], [3, 0, 0]], [20, 30, 14], axis=1)


def op_of(kind="global", config=None, axes=(), mesh_shape=(), **options):
    """MaxText's `AttentionOp`, with what the adapter reads of it."""
    settings = {"moba": False, "moba_chunk_size": 16, "moba_topk": 2, "using_pipeline_parallelism": False}
    settings |= {"context_parallel_load_balance": True, "context_sharding": "context"} | (config or {})
    defaults = {"sliding_window_size": None, "chunk_attn_window_size": None, "attn_logits_soft_cap": None}
    defaults |= {"causal_block_size": None, "dropout_rate": 0.0, "flash_axis_names_q": ("b", "h", "t", "d")}
    return types.SimpleNamespace(
        attention_type=types.SimpleNamespace(value=kind),
        config=types.SimpleNamespace(**settings),
        mesh=types.SimpleNamespace(shape=dict(mesh_shape)),
        _logical_to_mesh_axes=lambda names: jax.sharding.PartitionSpec(*axes),
        **defaults | options,
    )


def arrays():
    """q, k, v and a gradient of the result."""
    random = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, TOKENS, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jax.random.normal(key, shape) for key, shape in zip(random, shapes, strict=True)]


def check(op, allowed, soft_cap=None, sinks=None, **options):
    """Compares a call with dense attention in float64, values and gradients."""
    *qkv, dout = arrays()
    inputs = qkv if sinks is None else [*qkv, sinks]
    out, pullback = jax.vjp(
        lambda q, k, v, sinks=None: attend(op, q, k, v, options.get("ids"), sinks=sinks, **options.get("others", {})),
        *inputs,
    )
    exact, rough = (
        DenseAttention(*qkv, allowed, dout, scale=1.0, soft_cap=soft_cap, sinks=sinks, dtype=dtype)
        for dtype in (np.float64, np.float32)
    )
    limits = budgets(exact.answers, rough.answers, exact.absolute_sums(), np.float32)
    names = ("out", "dq", "dk", "dv", "dsinks")[: len(inputs) + 1]
    for name, x in zip(names, (out, *pullback(dout)), strict=True):
        assert largest_error(x, exact.answers[name]) <= limits[name], name


PAIRS = {
    "global": ({}, lambda q, k: k <= q),
    "mla": ({}, lambda q, k: k <= q),
    "full": ({}, lambda q, k: k == k + 0 * q),
    "local_sliding": ({"sliding_window_size": 9}, lambda q, k: (k <= q) & (q - k < 9)),
    "chunk": ({"chunk_attn_window_size": 24}, lambda q, k: (k <= q) & (q // 24 == k // 24)),
    "block_diffusion": ({"causal_block_size": 8}, lambda q, k: k // 8 <= q // 8),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_attention_types_with_documents_and_padding(kind):
    options, rule = PAIRS[kind]
    pairs = rule(np.arange(TOKENS)[:, None], np.arange(TOKENS))
    ids = np.where(IDS == 0, -1, IDS)
    check(op_of(kind, **options), pairs[None, None] & same_segment(ids, ids), ids=jnp.asarray(IDS))


def test_soft_cap_and_sinks():
    sinks = jnp.linspace(-1, 1, HEADS)
    check(op_of(attn_logits_soft_cap=2.0), np.tri(TOKENS, dtype=bool), soft_cap=2.0, sinks=sinks)


@pytest.mark.parametrize("window", [None, 12])
def test_spans_see_themselves(window):
    spans = np.zeros((2, TOKENS), bool)
    spans[0, 20:30] = spans[1, 5:17] = True
    order, distance = np.asarray(sl.span_order(spans)), np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    pairs = in_order(order, order) & (distance < (window or TOKENS))
    options = {} if window is None else {"longest_span": 12}
    kind = "global" if window is None else "local_sliding"
    check(op_of(kind, sliding_window_size=window), pairs, others=options | {"bidirectional_mask": jnp.asarray(spans)})


def test_moba_selects_as_the_scorer_does():
    q, k, v, _ = arrays()
    out = attend(op_of(config={"moba": True}), q, k, v, None)
    selection = sl.MoBA(block=16, count=2).select(q, k)
    assert np.array_equal(out, sl.block_sparse_attention(q, k, v, sl.Causal(), selection=selection, scale=1.0))
    assert not np.array_equal(out, attend(op_of(), q, k, v, None))


def test_moba_in_bfloat16_selects_by_float32_means():
    """Means in bfloat16 select other chunks for some of these queries."""
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays()[:3])
    scorer = sl.MoBA(block=16, count=2)
    right, rounded = scorer.select(q.astype(jnp.float32), k.astype(jnp.float32)), scorer.select(q, k)
    assert not np.array_equal(right.ids, rounded.ids)
    out = attend(op_of(config={"moba": True}), q, k, v, None)
    assert np.array_equal(out, sl.block_sparse_attention(q, k, v, sl.Causal(), selection=right, scale=1.0))


def test_moba_takes_quantized_keys():
    q, k, v, _ = arrays()
    quantized = types.SimpleNamespace(dequant=lambda: k)
    moba = op_of(config={"moba": True})
    assert np.array_equal(attend(moba, q, quantized, v, None), attend(moba, q, k, v, None))


def test_it_hands_over_the_sharding(monkeypatch):
    seen = []
    monkeypatch.setattr(sl, "block_sparse_attention", lambda *arrays, **options: seen.append(options["query_sharding"]))
    for axes in ((("data", "fsdp"), "tensor", "context", None), ("data",), ()):
        attend(op_of(axes=axes), *arrays()[:3], None)
    spec = jax.sharding.PartitionSpec
    assert seen == [spec(("data", "fsdp"), "context", "tensor"), spec("data", None, None), spec(None, None, None)]


SPANS = jnp.zeros((2, TOKENS), bool)


@pytest.mark.parametrize(
    ("op", "options", "words"),
    [
        (op_of(), {"indexer_mask": SPANS}, r"indexer_mask must be None, 0 or False, got an array \(2, 64\)"),
        (op_of(), {"record_max_logits": True}, "record_max_logits must be None, 0 or False, got True"),
        (op_of(dropout_rate=0.1), {}, "dropout_rate must be None, 0 or False, got 0.1"),
        (op_of(config={"using_pipeline_parallelism": True}), {}, "using_pipeline_parallelism must be"),
        (op_of("compressed"), {}, "attention_type must be one of global, .*, got 'compressed'"),
        (op_of("chunk", chunk_attn_window_size=8), {"bidirectional_mask": SPANS}, "bidirectional_mask must be None"),
        (op_of("full", config={"moba": True}), {}, "moba needs attention_type global"),
    ],
)
def test_what_it_does_not_serve(op, options, words):
    with pytest.raises(NotImplementedError, match=words + ".*write attention=dot_product"):
        attend(op, *arrays()[:3], None, **options)


@pytest.mark.parametrize(
    ("op", "words", "instead"),
    [
        (op_of(attn_logits_soft_cap=-2), "must be None, 0 or positive, got -2", "attn_logits_soft_cap=0"),
        (op_of("chunk"), "must be an integer >= 1, got None", "chunk_attn_window_size=256"),
        (op_of("chunk", chunk_attn_window_size=0), "must be an integer >= 1, got 0", "chunk_attn_window_size=256"),
        (op_of("local_sliding"), "must be an integer >= 1, got None", "sliding_window_size=256"),
        (op_of("local_sliding", sliding_window_size=-4), "an integer >= 1, got -4", "sliding_window_size=256"),
        (
            op_of(config={"moba": True, "moba_chunk_size": 1024}),
            "must be a multiple of 16 from 16 to 512, got 1024",
            "moba_chunk_size=512",
        ),
        (op_of(config={"moba": True, "moba_chunk_size": 24}), "from 16 to 512, got 24", "moba_chunk_size=512"),
        (op_of(config={"moba": True, "moba_topk": 0}), "must be an integer >= 1, got 0", "moba_topk=8"),
        (op_of(mesh_shape={"context": 2}), "must be False .*, got True", "context_parallel_load_balance=false"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_to_write(op, words, instead):
    name = instead.partition("=")[0]
    with pytest.raises(NotImplementedError, match=f"attention=sparse: {name} .*{words}; write {instead}"):
        attend(op, *arrays()[:3], None)


@pytest.mark.parametrize("longest", [None, 0, 9, 2.0])
def test_a_window_beside_images_needs_their_length(longest):
    op, options = op_of("local_sliding", sliding_window_size=8), {"bidirectional_mask": SPANS, "longest_span": longest}
    with pytest.raises(NotImplementedError, match=r"longest_span must be from 1 to .*8, got .*write longest_span=8 in"):
        attend(op, *arrays()[:3], None, **options)
