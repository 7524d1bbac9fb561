"""Advice for words of other libraries runs, and gives what these words give there."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import haiku, linen
from sparse_layers.arguments import foreign
from sparse_layers.arguments.checks import keywords

OP, DENSE = sl.block_sparse_attention, jax.nn.dot_product_attention
Q, K, V = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
VALID = jnp.arange(32) < jnp.array([[20], [32]])
LENGTHS = jnp.array([20, 32])
CU_SEQLENS = jnp.array([0, 5, 18, 32])
DOCUMENT = np.repeat([0, 1, 2], [5, 13, 14])

# (the call that a message advises, the call of JAX that the foreign word stands for)
ADVISED = {
    "is_causal": (lambda: OP(Q, K, V, sl.Causal()), lambda: DENSE(Q, K, V, is_causal=True)),
    "causal beside a mask": (
        lambda: OP(Q, K, V, sl.Window(7, 7) & sl.Causal()),
        lambda: DENSE(Q, K, V, is_causal=True, local_window_size=7),
    ),
    "no mask": (lambda: OP(Q, K, V, sl.Full()), lambda: DENSE(Q, K, V)),
    "mask": (
        lambda: OP(Q, K, V, np.tri(32, dtype=bool)),
        lambda: DENSE(Q, K, V, mask=jnp.tri(32, dtype=bool)[None, None]),
    ),
    "window_size=(7, 0)": (lambda: OP(Q, K, V, sl.Window(7)), lambda: DENSE(Q, K, V, local_window_size=(7, 0))),
    "window_size=(-1, 3)": (
        lambda: OP(Q, K, V, sl.Window(None, 3)),
        lambda: DENSE(Q, K, V, local_window_size=(32, 3)),
    ),
    "sliding_window=8": (
        lambda: OP(Q, K, V, "sliding_window:window=8"),
        lambda: DENSE(Q, K, V, local_window_size=(7, 0)),
    ),
    "key_padding_mask": (
        lambda: OP(Q, K, V, sl.Full(), segment_ids=jnp.where(~VALID, -1, 0)) * VALID[..., None, None],
        lambda: DENSE(Q, K, V, mask=VALID[:, None, None]) * VALID[..., None, None],
    ),
    "key_padding_mask of two sequences": (
        lambda: OP(Q, K, V, sl.Full(), segment_ids=(jnp.zeros(Q.shape[:-2], int), jnp.where(VALID, 0, -1))),
        lambda: DENSE(Q, K, V, mask=VALID[:, None, None]),
    ),
    "query_seq_lengths": (
        lambda: OP(Q, K, V, sl.Full(), segment_ids=jnp.where(jnp.arange(32) < LENGTHS[:, None], 0, -1)),
        lambda: DENSE(Q, K, V, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS) * VALID[..., None, None],
    ),
    "cu_seqlens": (
        lambda: OP(
            *(x[0] for x in (Q, K, V)),
            sl.Full(),
            segment_ids=jnp.searchsorted(CU_SEQLENS, jnp.arange(32), side="right"),
        )[None],
        lambda: DENSE(Q[:1], K[:1], V[:1], mask=jnp.asarray(DOCUMENT[:, None] == DOCUMENT)[None, None]),
    ),
    "enable_gqa": (
        lambda: OP(Q, K[:, :, :2], V[:, :, :2], sl.Full()),
        lambda: DENSE(Q, K[:, :, :2], V[:, :, :2]),
    ),
    "masks by batch entry": (
        lambda: jax.vmap(OP)(Q, K, V, jnp.stack([jnp.tri(32), jnp.eye(32)]) > 0),
        lambda: DENSE(Q, K, V, mask=jnp.stack([jnp.tri(32), jnp.eye(32)])[:, None] > 0),
    ),
    "masks by batch entry and head": (
        lambda: jax.vmap(OP)(Q, K, V, jnp.stack([jnp.tri(32)] * 8).reshape(2, 4, 32, 32) > 0),
        lambda: DENSE(Q, K, V, is_causal=True),
    ),
    "[B, N, T, H]": (
        lambda: OP(*(x.swapaxes(1, 2) for x in (Q.swapaxes(1, 2), K.swapaxes(1, 2), V.swapaxes(1, 2))), sl.Full()),
        lambda: DENSE(Q, K, V),
    ),
    "attention_fn": (lambda: sl.make_attention_fn(sl.Causal(), 32)(Q, K, V), lambda: DENSE(Q, K, V, is_causal=True)),
    "a scorer": (
        lambda: OP(Q, K, V, sl.Causal(), selection=sl.MoBA(block=16, count=1).select(Q, K)),
        lambda: sl.make_attention_fn(sl.MoBA(block=16, count=1), 32)(Q, K, V),
    ),
}


@pytest.mark.parametrize("word", ADVISED)
def test_what_is_advised_gives_what_the_foreign_call_gives(word):
    advised, dense = ADVISED[word]
    np.testing.assert_allclose(advised(), dense(), atol=2e-6)


def test_a_product_with_the_hessian_is_as_advised():
    def f(x):
        return (OP(x, K, V, sl.Causal(), implementation="xla") ** 2).sum()

    product = jax.vjp(jax.grad(f), Q)[1](K)[0]
    step = 1e-2
    expected = (jax.grad(f)(Q + step * K) - jax.grad(f)(Q - step * K)) / (2 * step)
    np.testing.assert_allclose(product, expected, atol=2e-2 * float(jnp.abs(expected).max()))


def test_patterns_that_messages_name_are_known():
    texts = " ".join((*foreign.PRESETS.values(), *foreign._REQUIRED.values()))
    names = re.findall(r"'([a-z_]+(?::[^']+)?)'", texts.replace("{'mode': 'variable'}", ""))
    assert len(names) > 10
    for name in names:
        sl.as_masks(name)
    for expression in re.findall(
        r"sl\.(?:Window|Full|Causal|BlockDiagonal)\([^)]*\)(?: [|&] sl\.\w+\([^)]*\))?", texts
    ):
        assert isinstance(eval(expression), sl.Mask)


def test_foreign_words_are_not_our_own():
    assert not foreign.PRESETS.keys() & sl.presets().keys()
    assert all(name == name.lower() for name in foreign.PRESETS), "names are looked up in lower case"


@pytest.mark.parametrize("word", foreign.HINTS)
def test_every_word_has_an_answer_somewhere(word):
    rules = dict(foreign.HINTS[word])
    assert len(rules) == len(foreign.HINTS[word]), "a second hint for a door is never reached"
    assert all(words and "{" not in words.replace("{pattern}", "") for words in rules.values())
    for door in rules:
        said = foreign.advice({word: 1}, () if door is None else (door,))
        assert said is not None and said.startswith(f"'{word}', got 1: ")
    assert None in rules or foreign.advice({word: 1}, ()) is None


SETTINGS = {"pattern": sl.Causal(), "seq_len": 32, "rngs": nnx.Rngs(0)}
ONE_LINE = {
    "op": lambda x: OP(x, K, V, sl.Causal()),
    "plan_or_mask": lambda x: OP(Q, K, V, [x]),
    "return_lse": lambda x: OP(Q, K, V, sl.Causal(), return_lse=x),
    "scale": lambda x: OP(Q, K, V, sl.Causal(), scale=x),
    "unknown": lambda x: OP(Q, K, V, sl.Causal(), seed=x),
    "num_heads": lambda x: sl.SparseSelfAttention(x, 16, **SETTINGS),
    "rngs": lambda x: sl.SparseSelfAttention(4, 16, **SETTINGS | {"rngs": [x]}),
    "use_bias": lambda x: sl.SparseSelfAttention(4, 16, **SETTINGS, use_bias=x),
    "param_dtype": lambda x: sl.SparseSelfAttention(4, 16, **SETTINGS, param_dtype=x),
    "rope": lambda x: sl.SparseSelfAttention(4, 16, **SETTINGS, rope=x),
    "dropout_rate": lambda x: sl.SparseSelfAttention(4, 16, **SETTINGS, dropout_rate=x),
    "make_mlp": lambda x: sl.SparseTransformerBlock(4, 16, **SETTINGS, make_mlp=lambda _: [x]),
    "inputs": lambda x: sl.SparseTransformerBlock(4, 16, **SETTINGS)([x]),
    "model": lambda x: sl.generate(x, [[1]], num_tokens=1),
}


@pytest.mark.parametrize("door", ONE_LINE)
def test_values_in_messages_are_on_one_line(door):
    for value in (nnx.Rngs(0), np.zeros((9, 9))):
        assert "\n" in repr(value)
        with pytest.raises((TypeError, ValueError)) as caught:
            ONE_LINE[door](value)
        assert "\n" not in str(caught.value)


def test_arguments_that_messages_name_are_those_of_a_door():
    layers = sl.SparseSelfAttention, sl.SparseCrossAttention, sl.SparseTransformerBlock, sl.SparseTransformer
    doors = (
        *(
            sl.block_sparse_attention,
            sl.make_attention_fn,
            sl.describe,
            sl.KVCache.empty,
            sl.generate,
            sl.Scorer.select,
            *(
                sl.KVCache.step,
                sl.SparseTransformer.decode_step,
                sl.SparseSelfAttention.prefill,
                sl.top_k_blocks,
                sl.tune,
                sl.make_plan,
            ),
            *(sl.from_huggingface, sl.from_mask_mod),
            *(made.__init__ for made in (sl.FwdParams, sl.Rope, sl.Window, sl.Global, sl.MoBA, sl.NSA)),
        ),
        *(method for layer in (*layers, haiku.SparseSelfAttention) for method in (layer.__init__, layer.__call__)),
        linen.SparseSelfAttention.__init__,
    )
    known = frozenset().union(*(keywords(getattr(door, "__wrapped__", door)) for door in doors))
    named = {other for rules in foreign.HINTS.values() for other, _ in rules} - {None}
    assert named <= known, named - known


def test_an_error_inside_stays_what_it_is():
    def broken(b, h, q, k):
        raise TypeError("of the user")

    with pytest.raises(TypeError, match="of the user"):
        sl.from_mask_mod(broken)
    layer = sl.SparseSelfAttention(4, 16, pattern=sl.Causal(), seq_len=32, rngs=nnx.Rngs(0))
    layer.out = lambda x: x + "1"
    with pytest.raises(TypeError) as caught:
        layer(jnp.ones((1, 32, 16)))
    assert "must be given" not in str(caught.value) and "by position" not in str(caught.value)
    assert caught.traceback[-1].name != "call", "the line that failed is shown"


@pytest.mark.parametrize(
    "door", [sl.SparseSelfAttention, sl.SparseTransformer, sl.AttentionFn, haiku.SparseSelfAttention]
)
def test_signatures_of_calls_stay_what_they_are(door):
    kinds = {parameter.kind for parameter in inspect.signature(door.__call__).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_hints_of_axes_are_for_arrays_with_as_many_axes():
    with pytest.raises(ValueError) as caught:
        OP(*(jnp.ones((2, 32, 2, 16)) for _ in "qkv"), sl.Causal(), segment_ids=jnp.zeros(2, int))
    assert "got int32 of shape (2,)" in str(caught.value) and "swapaxes" not in str(caught.value)
