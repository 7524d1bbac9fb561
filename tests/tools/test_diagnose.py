"""`diagnose`: what it finds in models of users' own, and what it must not take for dense attention."""

import functools
import re
import runpy

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Primitive

import sparse_layers as sl
import sparse_layers.haiku
from sparse_layers import linen
from tests.programs import on_devices
from tests.tools.diagnosed_models import (
    ARRAYS,
    ATTENTION,
    NO_ATTENTION,
    TOKENS,
    WEIGHTS,
    B,
    D,
    T,
    X,
    dense,
    local_blocks,
)

SHAPED = jax.ShapeDtypeStruct
WINDOW = sl.Causal() & sl.Window(63)
HEADS = SHAPED((B, T, 4, 16), "float32")  # query, key and value by themselves


def kinds(diagnosis):
    return [(finding.kind, finding.times) for finding in diagnosis.findings]


def only(diagnosis, kind):
    (finding,) = [finding for finding in diagnosis.findings if finding.kind == kind]
    return finding


# --- plain JAX -------------------------------------------------------------------------------------------------------

# How a user calls a model: with its weights as an input or closed over; the gradient; nested in transformations.
CALLS = {
    "weights": (lambda f: f, True),
    "closed over": (lambda f: functools.partial(f, ARRAYS), False),
    "gradient": (lambda f: jax.grad(lambda w, x: f(w, x).sum()), True),
    "gradient of inputs": (lambda f: jax.grad(lambda x: f(ARRAYS, x).sum()), False),
    "nested": (
        lambda f: jax.jit(jax.grad(lambda w, x: jax.checkpoint(jax.vmap(f, (None, 0)))(w, x[None]).sum())),
        True,
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("function", ATTENTION, ids=lambda f: f.__name__)
def test_attention_is_found_however_it_is_called(function, call):
    transform, takes_weights = CALLS[call]
    diagnosis = sl.diagnose(transform(function), *([WEIGHTS] if takes_weights else []), X)
    finding = only(diagnosis, "dense attention")
    blocks = 4 if function.__name__ == "query_blocks" else 1
    assert (finding.times, kinds(diagnosis)) == (blocks, [("dense attention", blocks)])
    assert f"of {T // blocks} queries and {T} keys" in finding.what
    assert re.search(r"diagnosed_models.py:\d+ in ", finding.where)
    options = ", sinks=sinks" if function.__name__ in ("by_hand", "with_sinks") else ""
    code = f"write sl.block_sparse_attention(query, key, value, pattern{options}, scale=1) in place of the two products"
    assert code in finding.advice
    assert ("stays dense, because its heads mix" in finding.advice) == (function.__name__ == "talking_heads")
    assert diagnosis.summary.split("\n")[0] == "sparse attention: no calls"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("function", NO_ATTENTION, ids=lambda f: f.__name__)
def test_nothing_else_is_taken_for_attention(function, call):
    transform, takes_weights = CALLS[call]
    diagnosis = sl.diagnose(transform(function), *([WEIGHTS] if takes_weights else []), X)
    assert diagnosis.findings == ()
    assert str(diagnosis).startswith("nothing to change\n\nsparse attention: no calls")


def test_blocks_with_a_bias_are_no_dense_attention():
    bias = SHAPED((128, 256), "float32")
    assert sl.diagnose(local_blocks, WEIGHTS, X, bias).findings == ()


def test_layers_of_a_scan_count_as_often_as_they_run():
    def model(weights, x):
        def layer(x, w):
            x = x + dense(w, x)
            return x + sl.block_sparse_attention(*(x[:, :, None] @ w[n] for n in "qkv"), WINDOW)[:, :, 0], None

        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0]

    stacked = {name: SHAPED((5, *array.shape), array.dtype) for name, array in WEIGHTS.items()}
    for function in (model, jax.grad(lambda w, x: model(w, x).sum())):
        diagnosis = sl.diagnose(function, stacked, X)
        assert only(diagnosis, "dense attention").times == 5
        assert diagnosis.summary.startswith(f"sparse attention: 5 calls of 'xla' on {jax.default_backend()}")


def test_loops_and_branches_are_read():
    def model(w, x, n):
        x = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + dense(w, c[1])), (0, x))[1]
        return jax.lax.cond(n > 2, lambda x: dense(w, x), lambda x: x, x)

    assert kinds(sl.diagnose(model, WEIGHTS, X, SHAPED((), "int32"))) == [("dense attention", 2)]


def test_functions_that_jax_has_traced_are_read_again():
    @jax.jit
    def attend(x):
        return sl.block_sparse_attention(x, x, x, WINDOW, implementation="reference")

    jax.eval_shape(attend, HEADS)
    for _ in range(2):
        finding = only(sl.diagnose(lambda x: attend(attend(x)), HEADS), "slow implementation")
        assert finding.times == 2 and "in test_functions_that_jax_has_traced_are_read_again.<locals>" in finding.where


def test_what_jax_has_traced_stays():
    """The op and a diagnosis leave it. A process of its own, in which nothing is diagnosed before."""
    code = """
import jax, jax.numpy as jnp
import jax.experimental.pallas  # of JAX 0.12, its import makes JAX trace earlier functions again
traced = []
function = jax.jit(lambda x: traced.append(1) or x + 1)
function(1.0)
import sparse_layers as sl
q = jnp.ones((1, 8, 1, 4))
sl.block_sparse_attention(q, q, q, sl.Causal())
function(1.0)
for _ in range(2):
    assert sl.diagnose(lambda q: sl.block_sparse_attention(q, q, q, sl.Causal()), q).findings == ()
function(1.0)
assert len(traced) == 1
"""
    on_devices(1, "-c", code)


# --- masks -----------------------------------------------------------------------------------------------------------

BELOW = np.tril(np.ones((T, T), bool))
NEAR = BELOW & ~np.tril(BELOW, -64)


def lower():
    return jnp.tril(jnp.ones((T, T), bool))


@pytest.mark.parametrize(
    ("bias", "advice"),
    [
        (lambda: jnp.where(lower(), 0, -1e9), "the pattern sl.Causal() allows the same pairs"),
        (lambda: jnp.where(jnp.triu(lower().T, 1), -jnp.inf, 0)[None, None], "the pattern sl.Causal() allows"),
        (lambda: jnp.where(NEAR, 0, -1e9), "the pattern sl.Window(left=63, right=0) allows the same pairs"),
        (
            lambda: jnp.where(np.eye(T) + np.random.default_rng(0).random((T, T)) > 0.5, 0, -1e9),
            "numpy bool array [T, S]",
        ),
        (
            lambda: -abs(jnp.arange(T)[:, None] - jnp.arange(T)).astype(float),
            "as relative_bias= of layers or bias= of the op",
        ),
    ],
    ids=["lower", "upper", "numpy", "random", "alibi"],
)
def test_masks_that_are_added_to_scores(bias, advice):
    diagnosis = sl.diagnose(lambda w, x: dense(w, x, bias()), WEIGHTS, X)
    assert kinds(diagnosis) == [("dense attention", 1), ("dense mask", 1)]
    assert advice in only(diagnosis, "dense mask").advice
    attention = only(diagnosis, "dense attention").advice
    assert attention.startswith("this attention stays dense with its bias") == ("relative_bias" in advice)
    if "Window" in advice:
        assert "(query, key, value, sl.Window(left=63, right=0), scale=1)" in only(diagnosis, "dense attention").advice


def test_a_bias_or_mask_of_inputs():
    bias = sl.diagnose(dense, WEIGHTS, X, SHAPED((4, T, T), "float32"))
    finding = only(bias, "dense mask")
    assert finding.where == "an input" and finding.what.startswith(f"float32 [4, {T}, {T}], 4.0 MiB")
    mask = SHAPED((B, 1, T, T), "bool")
    finding = only(
        sl.diagnose(lambda q, mask: jax.nn.dot_product_attention(q, q, q, mask=mask), HEADS, mask), "dense mask"
    )
    assert finding.what.startswith(f"bool [{B}, {T}, {T}], 0.5 MiB")
    assert "documents and padding are segment_ids" in finding.advice


def test_a_mask_that_is_too_large_to_compute():
    long = SHAPED((1, 16384, 1, 8), "float32")
    diagnosis = sl.diagnose(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), long)
    assert only(diagnosis, "dense mask").advice.startswith("it is too large to compare with patterns: diagnose a short")


@pytest.mark.parametrize("padding", ["keys", "pairs"])
def test_causality_and_padding_together(padding):
    layer = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0))

    def model(layer, x, valid):
        hidden = valid[:, None, None] if padding == "keys" else nnx.make_attention_mask(valid, valid)
        return layer(x, mask=nnx.combine_masks(nnx.make_causal_mask(valid), hidden))

    advice = only(sl.diagnose(model, layer, X, SHAPED((B, T), "bool")), "dense mask").advice
    assert advice.startswith(
        "the pattern sl.Causal() allows the same pairs, except pairs that an input hides: documents and"
    )
    alone = sl.diagnose(lambda layer, x, valid: layer(x, mask=valid[:, None, None]), layer, X, SHAPED((B, T), "bool"))
    assert kinds(alone) == [("dense attention", 1)]


def test_a_run_time_mask_of_the_op():
    diagnosis = sl.diagnose(lambda q: sl.block_sparse_attention(q, q, q, lower()), HEADS)
    assert only(diagnosis, "dense mask").what == f"bool [1, {T}, {T}], a run-time mask of the op"


# --- libraries -------------------------------------------------------------------------------------------------------


def test_jax_and_equinox():
    found = sl.diagnose(lambda q: jax.nn.dot_product_attention(q, q, q, local_window_size=(63, 0)), HEADS)
    assert "(query, key, value, sl.Window(left=63, right=0)), which takes the same arrays" in found.findings[0].advice
    layer = eqx.nn.MultiheadAttention(4, D, key=jax.random.key(0))
    assert kinds(sl.diagnose(lambda layer, x: jax.vmap(layer)(x, x, x), layer, X)) == [("dense attention", 1)]


def test_cudnn():
    """A primitive with the name and operands of JAX's: to trace that, a GPU must be there."""
    fused = Primitive("dot_product_attention_fwd_wrapper")
    fused.multiple_results = True
    fused.def_abstract_eval(lambda q, k, v: [q])
    diagnosis = sl.diagnose(lambda q: fused.bind(q, q, q)[0], HEADS)
    assert only(diagnosis, "dense attention").what.startswith(f"float32 scores [{B}, 4, {T}, {T}] of {T} queries")


class Block(nnx.Module):
    def __init__(self, is_sparse, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        if is_sparse:
            self.attention = sl.SparseSelfAttention(4, D, pattern=WINDOW, seq_len=2 * T, rngs=rngs)
        else:
            self.attention = nnx.MultiHeadAttention(4, D, decode=False, dropout_rate=0.1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.attention(self.norm(x)))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(100, D, rngs=rngs)
        self.blocks = nnx.List([Block(i % 2 == 0, rngs) for i in range(4)])

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("takes_gradient", [True, False])
def test_nnx(is_training, takes_gradient):
    """State, as of dropout, is that of a copy. Parameters need not be there."""
    model = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0)))
    model.train() if is_training else model.eval()
    if takes_gradient:
        diagnosis = sl.diagnose(nnx.grad(lambda model, tokens: model(tokens).sum()), model, TOKENS)
    else:
        diagnosis = sl.diagnose(model, TOKENS)
    expected = [("dense attention", 2), ("weight dropout", 2), ("sequence length", 2)]
    assert kinds(diagnosis) == expected
    attention, dropout, length = diagnosis.findings
    assert attention.where.endswith("Block.__call__ (blocks[1].attention, blocks[3].attention)")
    assert f"pass attention_fn=sl.make_attention_fn(pattern, {T}) to nnx.MultiHeadAttention" in attention.advice
    assert dropout.where == "the model (blocks[1].attention, blocks[3].attention)"
    assert dropout.what == "the layer has dropout_rate=0.1" and "set dropout_rate=0" in dropout.advice
    assert f"seq_len={2 * T}; {T} tokens see its upper left corner" in length.what
    assert diagnosis.summary == f"sparse attention: 2 calls of 'xla' on {jax.default_backend()}"
    text = str(diagnosis)
    assert text.startswith(f"1. dense attention, 2 times: {attention.where}\n   {attention.what}\n   -> ")
    assert text.endswith(f"\n\n{diagnosis.summary}")


@pytest.mark.parametrize("transform", [nnx.jit, lambda f: f, nnx.grad], ids=["jit", "none", "grad"])
def test_a_module_that_a_function_closes_over_survives_the_error(transform):
    model = Decoder(nnx.Rngs(0))
    model.train()
    call = transform(lambda model, tokens: model(tokens).sum())
    with pytest.raises(TypeError, match="make the module its first input"):
        sl.diagnose(lambda tokens: call(model, tokens), TOKENS)
    assert model(jnp.zeros((1, T), int)).shape == (1, T, D)
    assert kinds(sl.diagnose(call, model, TOKENS))[0] == ("dense attention", 2)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        fn = sl.make_attention_fn(WINDOW, T)
        x = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=True, attention_fn=fn)(x)
        x = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False, name="dense")(x)
        return x + linen.SparseSelfAttention(4, pattern=WINDOW, seq_len=T)(x), None


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(100, D)(tokens)
        rngs = {"params": True, "dropout": True}
        return nn.scan(nn.remat(LinenBlock), {"params": 0}, split_rngs=rngs, length=3)(name="blocks")(x, None)[0]


def test_linen():
    model, key = LinenDecoder(), jax.random.key(0)
    variables = jax.eval_shape(model.init, {"params": key, "dropout": key}, TOKENS)
    apply = functools.partial(model.apply, rngs={"dropout": key})
    for function in (apply, jax.grad(lambda variables, tokens: apply(variables, tokens).sum())):
        diagnosis = sl.diagnose(function, variables, TOKENS)
        assert kinds(diagnosis) == [("dense attention", 3), ("weight dropout", 3), ("weight dropout", 3)]
        attention, of_dense, of_sparse = diagnosis.findings
        assert attention.where.endswith("LinenBlock.__call__ (LinenDecoder/blocks/dense)")
        assert "to nn.MultiHeadDotProductAttention, or write sparse_layers.linen.SparseSelf" in attention.advice
        assert of_dense.what == "the weights of dense attention are dropped"
        assert of_sparse.what == "the layer has dropout_rate=0.1, which this call does not use"
        assert diagnosis.summary.startswith("sparse attention: 6 calls of 'xla'")


def test_bound_linen_modules_and_partial_calls():
    layer = nn.MultiHeadDotProductAttention(4)
    variables = layer.init(jax.random.key(0), jnp.zeros((1, 8, D)))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), X)
    partial = functools.partial
    for model in (layer.bind(variables), partial(layer.apply, variables), partial(layer.apply, shapes)):
        assert only(sl.diagnose(model, X), "dense attention").where == "the model (MultiHeadDotProductAttention)"


def test_haiku():
    def model(x):
        settings = {"w_init": hk.initializers.Constant(0.1)}
        layer = sparse_layers.haiku.SparseSelfAttention(4, 8, pattern=WINDOW, seq_len=T, **settings)
        return hk.MultiHeadAttention(4, 8, **settings)(*[layer(x)] * 3)

    transformed = hk.transform(model)
    params = jax.eval_shape(transformed.init, jax.random.key(0), X)
    diagnosis = sl.diagnose(functools.partial(transformed.apply, params, None), X)
    assert diagnosis.findings == sl.diagnose(transformed.apply, params, None, X).findings
    finding = only(diagnosis, "dense attention")
    assert finding.where.endswith("test_haiku.<locals>.model (multi_head_attention)")
    assert finding.advice.startswith("write sparse_layers.haiku.SparseSelfAttention(..., pattern=pattern, seq_len=512)")
    assert diagnosis.summary.startswith("sparse attention: 1 call of 'xla'")


def test_cross_attention():
    keys = SHAPED((B, 300, D), "float32")
    nnx_layer, linen_layer = (
        nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0)),
        nn.MultiHeadDotProductAttention(4),
    )
    finding = only(sl.diagnose(lambda layer, x, y: layer(x, y), nnx_layer, X, keys), "dense attention")
    assert f"write sl.SparseCrossAttention(..., pattern=pattern, q_len={T}, kv_len=300)" in finding.advice
    variables = jax.eval_shape(linen_layer.init, jax.random.key(0), X, keys)
    finding = only(sl.diagnose(linen_layer.apply, variables, X, keys), "dense attention")
    assert f"linen.SparseCrossAttention(..., pattern=pattern, q_len={T}, kv_len=300)" in finding.advice


# --- sparse attention ------------------------------------------------------------------------------------------------


def attend(pattern, **options):
    return lambda q: sl.block_sparse_attention(q, q, q, pattern, **options)


def test_a_model_without_attention():
    diagnosis = sl.diagnose(nnx.Linear(D, D, rngs=nnx.Rngs(0)), X)
    assert str(diagnosis).startswith("nothing to change\n\nsparse attention: no calls")


@pytest.mark.parametrize("make", [sl.SparseTransformerBlock, sl.NativeSparseAttention], ids=lambda x: x.__name__)
def test_layers_of_this_package_have_no_dense_attention(make):
    pattern = {} if make is sl.NativeSparseAttention else {"pattern": sl.NSA()}
    layer = make(4, 64, seq_len=4096, rngs=nnx.Rngs(0), **pattern)
    diagnosis = sl.diagnose(layer, SHAPED((1, 4096, 64), "float32"))
    assert "dense attention" not in str(diagnosis) and "no calls" not in diagnosis.summary


def test_steps_of_decoding():
    layer = sl.SparseSelfAttention(4, 64, pattern=sl.Causal(), seq_len=512, rngs=nnx.Rngs(0))
    cache = jax.eval_shape(lambda x: layer.prefill(x)[1], SHAPED((1, 512, 64), "float32"))

    def step(x, cache):
        return layer.decode_step(x, cache, jnp.array([7]))

    assert sl.diagnose(step, SHAPED((1, 64), "float32"), cache).findings == ()


def test_slow_implementations_and_their_reasons():
    named = only(sl.diagnose(attend(WINDOW, implementation="reference"), HEADS), "slow implementation")
    assert "as implementation='reference' names it" in named.what and named.advice == "leave implementation out"
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    large = SHAPED((1, 4096, 2, 640), "bfloat16")
    with pytest.warns(UserWarning, match="runs 'xla', which is slow on gpu"):
        finding = only(sl.diagnose(attend("sliding_window:window=600"), large, device="h100"), "slow implementation")
    assert finding.what.startswith("'xla' computes it on gpu, not 'hopper': its tiles hold head sizes up to 256")
    small = sl.diagnose(attend("sliding_window:window=600"), SHAPED((1, 4096, 2, 64), "bfloat16"), device="h100")
    assert str(small) == "nothing to change\n\nsparse attention: 1 call of 'hopper' on gpu"
    out = attend("sliding_window:window=600")(jnp.ones((1, 256, 2, 64), jnp.bfloat16))
    assert bool((out == 1).all()), "what was traced for another device is not run here"


def test_patterns_that_save_nothing():
    scattered = sl.Causal() & sl.Random(4)
    diagnosis = sl.diagnose(lambda q: attend(scattered)(attend(scattered)(q)), SHAPED((1, 4096, 2, 64), "float32"))
    finding = only(diagnosis, "no saving")
    assert finding.times == 2
    assert "nothing is saved: all " in finding.what and "try Blocks(" in finding.advice
    assert sl.diagnose(attend(sl.Causal()), HEADS).findings == (), "dense attention by choice"


def test_it_says_what_is_wrong_with_a_call_of_the_model():
    layer = nnx.MultiHeadAttention(4, D, attention_fn=sl.make_attention_fn(WINDOW, T), decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="mask must be key padding"):
        sl.diagnose(lambda layer, x: layer(x, mask=nnx.make_causal_mask(x[..., 0])), layer, X)
    with pytest.raises(ValueError, match="512 tokens, more than seq_len=256"):
        sl.diagnose(lambda x: sl.make_attention_fn(WINDOW, 256)(x, x, x), HEADS)


def test_what_is_no_array_is_passed_on():
    def model(x, options, name, scale=1.0):
        assert options == {"heads": 4, "dtype": jnp.float32} and name == "dense"
        return {"out": dense(ARRAYS, x) * scale, "name": name}

    assert kinds(sl.diagnose(model, X, {"heads": 4, "dtype": jnp.float32}, "dense", 2.0)) == [("dense attention", 1)]


def test_lines_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(
        "import jax\n\ndef model(q):\n    return jax.nn.dot_product_attention(q, q, q)\n"
    )
    model = runpy.run_path(str(tmp_path / "model.py"))["model"]
    assert only(sl.diagnose(model, HEADS), "dense attention").where == f"{tmp_path}/model.py:4 in model"
    monkeypatch.chdir(tmp_path)
    assert only(sl.diagnose(model, HEADS), "dense attention").where == "model.py:4 in model"
