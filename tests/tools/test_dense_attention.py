"""Dense attention that `diagnose` finds by its rule: queries, keys and values as inputs, queries that are weights, and
softmaxes over weights, which are none. Then its masks, soft caps and sinks.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from tests.tools.diagnosed_models import (
    ARRAYS,
    NO_ATTENTION,
    SHAPES,
    WEIGHTS,
    WEIGHTS_AS_QUERIES,
    B,
    D,
    T,
    X,
    codebook_of_heads,
    dense,
    projected_codebook,
)


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def lengths(diagnosis):
    """Returns the numbers of queries and keys of all findings, which must be dense attention."""
    assert {finding.kind for finding in diagnosis.findings} <= {"dense attention"}
    texts = [re.search(r"of (\d+) queries and (\d+) keys", finding.what) for finding in diagnosis.findings]
    return [(int(text[1]), int(text[2])) for text in texts if text]


# --- query, key and value by themselves ------------------------------------------------------------------------------


def softmax_by_groups(q, k, v):
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    weights = jax.nn.softmax(jnp.einsum("btkgh,bskh->bkgts", groups, k))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)


def softmax_of_repeated_heads(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)), v)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "function",
    [jax.nn.dot_product_attention, softmax_by_groups, softmax_of_repeated_heads],
    ids=["jax.nn", "groups", "repeated"],
)
def test_query_key_and_value_are_inputs(function, kv_heads, batch):
    inputs = shaped(batch, T, 4, 16), *[shaped(batch, 300, kv_heads, 16)] * 2
    assert lengths(sl.diagnose(function, *inputs)) == [(T, 300)]
    gradient = jax.grad(lambda inputs: function(*inputs).sum())
    assert lengths(sl.diagnose(gradient, inputs)) == [(T, 300)]


@pytest.mark.parametrize(
    ("equations", "q_shape", "kv_shape"),
    [
        (("btnh,bsh->bnts", "bnts,bsh->btnh"), (B, T, 4, 16), (B, 300, 16)),
        (("tnh,sh->nts", "nts,sh->tnh"), (T, 4, 16), (300, 16)),
        (("tnh,snh->nts", "nts,snh->tnh"), (T, 4, 16), (300, 4, 16)),
        (("bth,bsh->bts", "bts,bsh->bth"), (B, T, 16), (B, 300, 16)),
        (("th,sh->ts", "ts,sh->th"), (T, 16), (300, 16)),
    ],
    ids=["one key head", "one key head, no batch", "no batch", "one head", "one head, no batch"],
)
def test_keys_have_fewer_axes_than_queries(equations, q_shape, kv_shape):
    def attend(q, k, v):
        return jnp.einsum(equations[1], jax.nn.softmax(jnp.einsum(equations[0], q, k)), v)

    diagnosis = sl.diagnose(attend, shaped(*q_shape), *[shaped(*kv_shape)] * 2)
    assert lengths(diagnosis) == [(T, 300)]


def test_queries_and_keys_of_two_axes_count_both():
    def attend(q, k, v):
        weights = jnp.exp(jnp.einsum("hwd,yxd->hwyx", q, k))
        weights = weights / weights.sum((2, 3), keepdims=True)
        return jnp.einsum("hwyx,yxd->hwd", weights, v)

    assert lengths(sl.diagnose(attend, *[shaped(16, 32, 8)] * 3)) == [(512, 512)]


def test_a_projected_query_meets_a_cache():
    """Keys and values are inputs without projections, and the query has one."""

    def step(w, x, k, v):
        return softmax_of_repeated_heads((x @ w["q"]).reshape(B, T, 4, -1), k, v)

    assert lengths(sl.diagnose(step, WEIGHTS, X, *[shaped(B, 300, 2, 8)] * 2)) == [(T, 300)]


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", WEIGHTS_AS_QUERIES, ids=lambda f: f.__name__)
def test_queries_may_be_weights(function):
    expected = {"perceiver": (200, T), "object_queries": (200, T), "latents_after_tokens": (200, 200)}
    for model in (function, jax.grad(lambda w, x: function(w, x).sum())):
        assert lengths(sl.diagnose(model, WEIGHTS, X)) == [expected.get(function.__name__, (T, T))]
    alone = sl.diagnose(functools.partial(function, WEIGHTS), X)
    assert lengths(alone) == [expected.get(function.__name__, (T, T))]


class Latents(nnx.Module):
    def __init__(self, rngs):
        self.latents = nnx.Param(rngs.normal((200, D)))
        self.attention = nnx.MultiHeadAttention(4, D, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(jnp.broadcast_to(self.latents[...], (len(x), 200, D)), x)


class LinenLatents(nn.Module):
    @nn.compact
    def __call__(self, x):
        latents = self.param("latents", nn.initializers.normal(), (200, D))
        return nn.MultiHeadDotProductAttention(4)(jnp.broadcast_to(latents, (len(x), 200, D)), x)


def test_layers_of_flax_whose_queries_are_weights():
    assert lengths(sl.diagnose(Latents(nnx.Rngs(0)), X)) == [(200, T)]
    module = LinenLatents()
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    assert lengths(sl.diagnose(module.apply, variables, X)) == [(200, T)]


def test_few_queries_are_left_out():
    def pool(w, x):
        q, k, v = w["latents"][:8] @ w["q"], x @ w["k"], x @ w["v"]
        return jax.nn.softmax(jnp.einsum("ld,bsd->bls", q, k)) @ v

    diagnosis = sl.diagnose(pool, WEIGHTS, X)
    assert diagnosis.findings == ()
    assert "1 call of dense attention with fewer than 16 queries or 128 keys" in diagnosis.summary


# Nothing tells a codebook with heads that is an input by itself from a sequence that is one.
@pytest.mark.parametrize("function", [f for f in NO_ATTENTION if f is not codebook_of_heads], ids=lambda f: f.__name__)
def test_weights_that_are_inputs_by_themselves(function):
    def model(x, *weights):
        return function(dict(zip(SHAPES, weights, strict=True)), x)

    assert sl.diagnose(model, X, *WEIGHTS.values()).findings == ()
    assert lengths(sl.diagnose(lambda x, *w: dense(dict(zip(SHAPES, w, strict=True)), x), X, *WEIGHTS.values()))


def test_a_table_is_an_input_or_in_a_model():
    def read(x, table):
        return jax.nn.softmax(x @ table.T) @ table

    class Codes(nnx.Module):
        def __init__(self, rngs):
            self.codes, self.projection = nnx.Embed(300, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

        def __call__(self, x):
            return read(x, self.projection(self.codes.embedding[...]))

    for x in (X, shaped(T, D)):
        assert sl.diagnose(read, x, shaped(300, D)).findings == ()
    model = Codes(nnx.Rngs(0))
    assert sl.diagnose(model, X).findings == ()
    assert sl.diagnose(lambda model, x: model(x), model, X).findings == ()


KEY = jax.ShapeDtypeStruct((2,), "uint32")
STACKED = {name: shaped(5, *shape) for name, shape in SHAPES.items()}
BATCH = {"x": X, "mask": shaped(B, T), "positions": shaped(1, T)}


POSITIONS, SQUARE, CLASSES = jax.ShapeDtypeStruct((T,), "int32"), jax.ShapeDtypeStruct((T, T), "bool"), shaped(10)
AVERAGES = {"mean": WEIGHTS, "variance": WEIGHTS, "count": jax.ShapeDtypeStruct((), "int32")}
SCALARS = {"rate": jax.ShapeDtypeStruct((), "float32"), "step": jnp.int32(3)}


def batch_and(*more, first=(WEIGHTS,)):
    """Inputs whose first one is the weights, and the last but ``more`` a batch."""
    position = len(first)
    return lambda *inputs: (inputs[0], inputs[position]["x"]), (*first, BATCH, *more)


@pytest.mark.parametrize(
    ("arguments", "inputs"),
    [
        (lambda w, x: (w, x), (WEIGHTS, X)),
        (lambda x, w: (w, x), (X, WEIGHTS)),
        (lambda w, batch: (w, batch["x"]), (WEIGHTS, BATCH)),
        (lambda w, key, batch: (w, batch["x"]), (WEIGHTS, KEY, BATCH)),
        (lambda w, x: ({name: array[0] for name, array in w.items()}, x), (STACKED, X)),
        (lambda w, x: ({name: array[0] for name, array in w.items()}, x), (STACKED, shaped(5, T, D))),
        batch_and(jax.random.key(0)),
        batch_and(jax.random.PRNGKey(0)),
        batch_and(nnx.Rngs(0)),
        batch_and(jnp.int32(3)),
        batch_and(POSITIONS),
        batch_and(SQUARE),
        batch_and(CLASSES),
        batch_and(SCALARS),
        batch_and(KEY, first=(WEIGHTS, AVERAGES)),
        batch_and(first=(WEIGHTS, WEIGHTS)),
    ],
    ids=[
        *("weights first", "weights last", "a batch", "a key", "stacked layers", "as many layers as entries"),
        *("batch, key", "batch, PRNGKey", "batch, Rngs", "batch, step", "batch, positions", "batch, mask"),
        *("batch, classes", "batch, scalars", "an optimizer", "averages"),
    ],
)
def test_which_inputs_are_weights(arguments, inputs):
    """A table of weights has no dense attention, and data has. So it is inside `jit`."""
    assert sl.diagnose(lambda *inputs: projected_codebook(*arguments(*inputs)), *inputs).findings == ()
    for transform in (lambda f: f, jax.jit):
        attend = transform(lambda *inputs: dense(*arguments(*inputs)))
        assert lengths(sl.diagnose(attend, *inputs)) == [(T, T)]


class Reader(nnx.Module):
    def __init__(self):
        self.attention = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0))

    def read(self, batch, _):
        return self.attention(batch["x"])


@pytest.mark.parametrize("extra", [jax.random.key(0), POSITIONS, SQUARE, SCALARS], ids=lambda x: type(x).__name__)
def test_a_batch_is_data_where_the_model_has_the_weights(extra):
    model = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0))
    inputs = {"x": X}, extra
    alone = sl.diagnose(lambda model, batch, _: model(batch["x"]), model, *inputs)
    bound = sl.diagnose(functools.partial(lambda w, batch, _: dense(w, batch["x"]), WEIGHTS), *inputs)
    for diagnosis in (alone, bound):
        assert lengths(diagnosis) == [(T, T)] and "taken for" not in diagnosis.summary
    for closure in (lambda batch, _: model(batch["x"]), lambda batch, _: dense(ARRAYS, batch["x"]), Reader().read):
        assert lengths(sl.diagnose(closure, *inputs)) == [(T, T)]


def test_the_summary_says_which_inputs_are_data():
    summary = sl.diagnose(lambda w, batch, key: dense(w, batch["x"]), WEIGHTS, BATCH, KEY).summary
    assert "taken for data: inputs[1]; taken for weights: inputs[0] (bind weights by functools.partial" in summary


# --- masks, soft caps and sinks --------------------------------------------------------------------------------------

LONG = 4096
LEFT_OUT = "leave this array out of the call"
ALL_HEADS = (2, 4, LONG, LONG)


def window():
    q, k = np.arange(LONG)[:, None], np.arange(LONG)
    return (q >= k) & (q - k < 64)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: jnp.asarray(window())[None, None],
        lambda: jnp.broadcast_to(jnp.asarray(window()), ALL_HEADS),
        lambda: jnp.broadcast_to(jnp.tril(jnp.ones((LONG, LONG), bool)) & window(), ALL_HEADS),
    ],
    ids=["one head", "repeated", "computed"],
)
def test_a_mask_is_compared_before_it_is_repeated(mask):
    def attend(q):
        return jax.nn.dot_product_attention(q, q, q, mask=mask(), local_window_size=(63, 0))

    attention, dense_mask = sl.diagnose(attend, shaped(2, LONG, 4, 16)).findings
    assert dense_mask.what.startswith(f"bool [{LONG}, {LONG}], 16.0 MiB")
    assert dense_mask.advice == f"the pattern sl.Window(left=63, right=0) allows the same pairs; {LEFT_OUT}"
    assert "value, sl.Window(left=63, right=0))" in attention.advice


def test_a_mask_that_the_model_holds_is_a_constant():
    mask = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, 4, T, T))
    q = shaped(B, T, 4, 16)
    finding = sl.diagnose(lambda q: jax.nn.dot_product_attention(q, q, q, mask=mask), q).findings[1]
    assert finding.where == "a constant"
    assert finding.advice == f"the pattern sl.Causal() allows the same pairs; {LEFT_OUT}"
    by_head = np.stack([np.tri(T, dtype=bool), np.ones((T, T), bool)] * 2)[None]
    finding = sl.diagnose(lambda q: jax.nn.dot_product_attention(q, q, q, mask=by_head), q).findings[1]
    assert finding.advice.startswith("if it differs by head, write a tuple of masks, one for each head; documents and")
    bias = {"bias": shaped(4, T, T)}
    finding = sl.diagnose(lambda w, q: jax.nn.dot_product_attention(q, q, q, bias=w["bias"][None]), bias, q).findings[1]
    assert finding.where == "a parameter"


def test_masks_are_compared_on_all_pairs():
    """One pair in 16 million differs, far from the diagonal and from the corners."""
    mask = np.tri(LONG, dtype=bool)
    mask[2741, 1063] = False
    q = shaped(1, LONG, 1, 16)
    finding = sl.diagnose(lambda q: jax.nn.dot_product_attention(q, q, q, mask=mask), q).findings[1]
    assert finding.advice.startswith("it depends on no input: write it as a numpy bool array [T, S]")


def test_masks_that_cumulative_sums_and_scatters_build():
    def blocks():
        return jnp.cumsum(jnp.ones(T, int))[:, None] > jnp.arange(T)

    def first_keys():
        return jnp.zeros((T, T), bool).at[:, :4].set(True)

    for mask, expected in ((blocks, "sl.Causal()"), (first_keys, "sl.Prefix(size=4)")):
        diagnosis = sl.diagnose(lambda q, mask=mask: jax.nn.dot_product_attention(q, q, q, mask=mask()[None, None]), X4)
        assert expected in str(diagnosis), diagnosis


X4 = shaped(B, T, 4, 16)


def with_cap_and_sinks(q, cap, sink):
    scores = jnp.einsum("btnh,bsnh->bnts", q, q)
    if cap:
        scores = 50 * jnp.tanh(scores / 50)
    if sink in ("column", "pad"):
        column = jnp.zeros((*scores.shape[:-1], 1))
        padded = jnp.pad(scores, [(0, 0)] * 3 + [(0, 1)])
        weights = jax.nn.softmax(jnp.concatenate([column, scores], -1) if sink == "column" else padded)
        weights = weights[..., 1:] if sink == "column" else weights[..., :-1]
    else:
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True) + {"term": 1.0, "epsilon": 1e-9}[sink]
    return jnp.einsum("bnts,bsnh->btnh", weights, q)


@pytest.mark.parametrize("sink", ["column", "pad", "term", "epsilon"])
@pytest.mark.parametrize("cap", [True, False], ids=["cap", "no cap"])
def test_soft_caps_and_sinks_have_arguments(cap, sink):
    (finding,) = sl.diagnose(functools.partial(with_cap_and_sinks, cap=cap, sink=sink), X4).findings
    options = ", logits_soft_cap=cap" * cap + ", sinks=sinks" * (sink != "epsilon")
    assert f"sl.block_sparse_attention(query, key, value, pattern{options}, scale=1)" in finding.advice
    assert ("cap * tanh(scores / cap)" in finding.advice) == cap
    assert ("sinks [N] are the logits" in finding.advice) == (sink != "epsilon")


def scaled(q, factor, transform=jax.nn.softmax):
    return jnp.einsum("bnts,bsnh->btnh", transform(factor(jnp.einsum("btnh,bsnh->bnts", q, q))), q)


def base_2(scores):
    weights = jnp.exp2(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("attend", "scale"),
    [
        (lambda q: jax.nn.dot_product_attention(q, q, q), None),
        (lambda q: jax.nn.dot_product_attention(q, q, q, scale=1.0, local_window_size=(63, 0)), "1"),
        (lambda q: scaled(q, lambda s: s * 0.25), None),
        (lambda q: scaled(q, lambda s: s / jnp.sqrt(16)), None),
        (lambda q: scaled(q.astype(jnp.bfloat16), lambda s: s * jnp.bfloat16(0.251)), None),
        (lambda q: scaled(q, lambda s: s / 64), "0.015625"),
        (lambda q: scaled(q * 0.25, lambda s: s), "1"),
        (lambda q: scaled(q, lambda s: 30 * jnp.tanh(s / 4 / 30)), None),
        (lambda q: scaled(q, lambda s: s / 4 * np.log2(np.e), base_2), None),
        (lambda q: scaled(q, lambda s: jnp.where(window()[:T, :T], s / 8, -1e9)), "0.125"),
    ],
    ids=["jax", "jax, 1", "default", "root", "bfloat16", "muP", "scaled query", "cap", "exp2", "masked"],
)
def test_the_scale_is_named_unless_it_is_the_default(attend, scale):
    """The factor of the scores, which are products of heads of 16; `block_sparse_attention` multiplies by 1 / 4."""
    advice = sl.diagnose(attend, X4).findings[0].advice
    assert re.findall(r"scale=([\d.]+)\)", advice) == ([] if scale is None else [scale])


@pytest.mark.parametrize("shape", [(), (4, 1, 1)], ids=["one", "by head"])
def test_a_factor_that_is_no_constant(shape):
    weights = {"temperature": shaped(*shape)}
    text = str(sl.diagnose(lambda w, q: scaled(q, lambda s: s * w["temperature"]), weights, X4))
    assert "pattern, scale=1)" in text and "multiply query by the factor of the scores, which is no constant" in text


def test_top_k_stays_dense():
    def keep_8(scores):
        return jnp.where(scores >= jax.lax.top_k(scores, 8)[0][..., -1:], scores, -jnp.inf)

    def keep_finite(scores):
        return jnp.where(scores > -1e30, scores, -jnp.inf)

    text = "this attention stays dense, because a threshold of the scores decides its pairs (top-k)"
    for transform, stays_dense in ((keep_8, True), (keep_finite, False)):
        advice = sl.diagnose(lambda q, f=transform: scaled(q, f), X4).findings[0].advice
        assert advice.startswith(text) == stays_dense and "write sl.block_sparse_attention" in advice
