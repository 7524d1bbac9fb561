"""make_attention_fn in Flax's own layers, NNX and Linen: dense to sparse, and everything that is refused."""

import functools
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs, perturbed
from tests.programs import USUAL, count

T, F, N, B = 24, 16, 4, 2
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 24 tokens are several blocks
UNION = sl.Causal() & (sl.Window(3) | sl.Strided(5))
ARRAY = np.tril(np.random.default_rng(7).random((T, T)) < 0.4) | np.eye(T, dtype=bool)
PATTERNS = {
    "window": sl.Window(4),
    "union": UNION,
    "name": "local:local_attn_ctx=5",
    "per head": (UNION, "all"),
    "both ways": sl.Window(2, 2) | sl.Global(2),
    "array": ARRAY,
    "array per head": np.stack([ARRAY, ARRAY.T]),
}
NAMES = ("sparse_attention_out", "sparse_attention_lse")
KEEP = jax.checkpoint_policies.save_only_these_names(*NAMES)
KINDS = ["nnx", "linen"]


def sparse(pattern, seq_len=T, **options):
    return sl.make_attention_fn(pattern, seq_len, **{"fwd_params": BLOCKS} | options)


def allowed(pattern, length=T):
    """bool [N, T, T]."""
    entries = pattern if isinstance(pattern, tuple) else [pattern]
    masks = [m for p in entries for m in sl.as_masks(sl.preset(p) if isinstance(p, str) else p)]
    return np.stack([masks[h % len(masks)].dense(length) for h in range(N)])


@functools.cache
def flax_layer(kind, attention_fn=None, **options):
    """(parameters, apply) of Flax's layer; its parameters do not depend on the attention function."""
    functions = {} if attention_fn is None else {"attention_fn": attention_fn}
    if kind == "nnx":
        layer = nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(0), **options, **functions)
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
        return perturbed(params), lambda params, x, **call: nnx.merge(graphdef, params, rest)(x, **call)
    params = nn.MultiHeadDotProductAttention(num_heads=N, **options).init(jax.random.key(0), jnp.ones((1, T, F)))
    return perturbed(params), nn.MultiHeadDotProductAttention(num_heads=N, **options, **functions).apply


# Compiled without optimisations, which is faster.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def out_and_grads(apply, params, x, weights, call):
    """The output of a layer, and the gradients of a loss that is not linear in it."""

    def loss(params, x):
        out = apply(params, x, **call)
        return (weights * out.astype(jnp.float32) ** 2).sum(), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return out, grads


def assert_close(actual, expected, rtol=3e-6):
    """Equal to rounding, which is relative to the largest number of all: some gradients are sums that cancel to 0."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert scale > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=rtol * scale), actual, expected)


def compare(kind, pattern, x, mask, *, call=None, settings=None, **options):
    """The layer with our function equals the layer with Flax's own under a dense mask: outputs and all gradients."""
    params, ours = flax_layer(kind, sparse(pattern, **settings or {}), **options)
    weights = inputs(*x.shape, seed=9)
    actual = out_and_grads(functools.partial(ours, **call or {}), params, x, weights, {})
    dense = flax_layer(kind, **options)[1]
    expected = out_and_grads(dense, params, x, weights, {"mask": jnp.asarray(mask)})
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted)


# --- equal to Flax's own attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, recompute", [("nnx", False), ("linen", True)])
def test_equals_the_dense_layer_where_the_pattern_is_dense_causal(kind, recompute):
    x = inputs(B, T, F)
    mask = jnp.broadcast_to(nn.make_causal_mask(x[:1, :, 0]) > 0, (1, N, T, T))
    compare(kind, "all", x, mask, settings={"recompute": recompute})


@pytest.mark.parametrize(
    "kind, name",
    [(kind, name) for i, name in enumerate(PATTERNS) for kind in (KINDS if name == "union" else [KINDS[i % 2]])],
)
def test_equals_the_same_layer_under_the_dense_mask(kind, name):
    compare(kind, PATTERNS[name], inputs(B, T, F), allowed(PATTERNS[name])[None])


def test_grouped_query_heads_of_nnx():
    compare("nnx", PATTERNS["per head"], inputs(B, T, F), allowed(PATTERNS["per head"])[None], num_kv_heads=2)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("nnx", {"normalize_qk": True, "use_bias": False, "qkv_features": 32}),
        ("linen", {"normalize_qk": True, "force_fp32_for_softmax": True, "precision": jax.lax.Precision.HIGHEST}),
    ],
)
def test_options_of_flax_layers_are_served(kind, options):
    compare(kind, UNION, inputs(B, T, F), allowed(UNION)[None], **options)


def test_scale_and_soft_cap():
    q, k, v = inputs(3, B, T, N, 8)
    out = sparse("all", scale=0.9, logits_soft_cap=0.5)(q, k, v)
    logits = 0.5 * jnp.tanh(0.9 * jnp.einsum("btnh,bsnh->bnts", q, k) / 0.5)
    weights = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), logits, -jnp.inf))
    assert_close(out, jnp.einsum("bnts,bsnh->btnh", weights, v))


def test_bfloat16_computes_in_bfloat16_with_float32_parameters():
    kind = "nnx"
    x, weights = inputs(B, T, F), jnp.ones((B, T, F))
    params, half = flax_layer(kind, sparse(UNION), dtype=jnp.bfloat16)
    out, grads = out_and_grads(half, params, x, weights, {})
    expected, exact = out_and_grads(flax_layer(kind, sparse(UNION))[1], params, x, weights, {})
    assert out.dtype == jnp.bfloat16 and {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    # Flax rounds x, the parameters and each projection to bfloat16; so much for its own attention as well.
    assert_close(out.astype(jnp.float32), expected, 8 * float(jnp.finfo(jnp.bfloat16).eps))
    assert_close(grads, exact, 8 * float(jnp.finfo(jnp.bfloat16).eps))


def test_dtype_defaults_to_the_result_type_of_the_arrays():
    q = inputs(1, T, N, 8)
    fn = sparse(UNION)
    assert jax.eval_shape(lambda q: fn(q.astype(jnp.bfloat16), q, q), q).dtype == jnp.float32
    assert jax.eval_shape(lambda q: fn(q, q, q, dtype=jnp.float16), q).dtype == jnp.float16


@pytest.mark.parametrize("kind", KINDS)
def test_any_leading_axes_and_shorter_inputs(kind):
    params, apply = flax_layer(kind, sparse(UNION))
    run = jax.jit(apply)
    x = inputs(2, 3, T, F)
    out = run(params, x)
    assert out.shape == x.shape
    assert_close(out[1, 2, :13], run(params, x[1, 2, :13]))  # causal: the pattern's upper left corner
    assert run(params, x[:0]).shape == (0, 3, T, F)


def test_vmap_over_layers_and_over_the_batch():
    kind = "linen"
    params, apply = flax_layer(kind, sparse(UNION, recompute=True))
    both = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    x, padding = inputs(2, 3, T, F), jnp.arange(T) < jnp.array([20, 9, 24])[:, None]

    def run(params, x, padding):
        return apply(params, x, mask=padding[None, None])

    out = jax.jit(jax.vmap(jax.vmap(run, (None, 0, 0)), (0, 0, None)))(both, x, padding)
    last = jax.tree.map(lambda p: 2 * p, params)
    assert_close(out[1], jax.jit(apply)(last, x[1], mask=padding[:, None, None]))


# --- under remat and scan --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A Linen layer for `nn.scan`."""

    attention_fn: object

    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=self.attention_fn)(nn.LayerNorm()(x), mask=mask)
        return x + y, None


def linen_stack(attention_fn, depth, **remat):
    block = nn.remat(Block, prevent_cse=False, **remat)
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
    return nn.scan(block, length=depth, **axes)(attention_fn)


@pytest.mark.parametrize("remat", [{}, {"policy": KEEP}])
def test_linen_scan_over_layers(remat):
    depth, x, weights = 3, inputs(B, T, F), inputs(B, T, F, seed=9)
    dense = linen_stack(nn.dot_product_attention, depth)
    params = perturbed(dense.init(jax.random.key(0), x, None))

    def apply(stack, params, x, mask=None):
        return stack.apply(params, x, mask)[0]

    ours = linen_stack(sparse(UNION, recompute="policy" in remat), depth, **remat)
    actual = out_and_grads(functools.partial(apply, ours), params, x, weights, {})
    mask = jnp.asarray(allowed(UNION)[None])
    expected = out_and_grads(functools.partial(apply, dense), params, x, weights, {"mask": mask})
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted)


def test_nnx_scan_and_remat_over_layers():
    depth, x, weights = 3, inputs(B, T, F), inputs(B, T, F, seed=9)

    def stacked(attention_fn=None):
        options = {} if attention_fn is None else {"attention_fn": attention_fn}

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return nnx.MultiHeadAttention(N, F, decode=False, rngs=rngs, **options)

        return nnx.split(create(nnx.Rngs(0)))

    graphdef, params = stacked(sparse(UNION))
    params = perturbed(params)

    def apply(params, x):
        @nnx.remat(policy=KEEP)
        def layer(x, layer):
            return x + layer(x)

        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, nnx.merge(graphdef, params))

    def looped(params, x, mask):
        for i in range(depth):
            layer = nnx.merge(stacked()[0], jax.tree.map(lambda p, i=i: p[i], params))
            x = x + layer(x, mask=mask)
        return x

    actual = out_and_grads(apply, params, x, weights, {})
    expected = out_and_grads(looped, params, x, weights, {"mask": jnp.asarray(allowed(UNION)[None])})
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted, 3e-5)  # without a norm, numbers grow from layer to layer


# --- padding, documents, causality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, form", [("nnx", "bool"), ("linen", "float"), ("linen", "one for all")])
def test_key_padding_mask(kind, form):
    valid = jnp.arange(T) < (jnp.array([17, T]) if form != "one for all" else jnp.array([17]))[:, None]
    mask = nn.make_attention_mask(jnp.ones((len(valid), 1)), valid, dtype=jnp.bool if form == "bool" else jnp.float32)
    assert mask.shape == (len(valid), 1, 1, T) and mask.dtype == (bool if form == "bool" else jnp.float32)
    mask = mask if form == "bool" else 0.5 * mask  # whatever is not 0 counts, as in Flax
    both = allowed(UNION)[None] & np.asarray(valid)[:, None, None]
    seeing = jnp.asarray(both.any(-1).all(1))  # a query without keys gets 0 here, and the mean of all in Flax
    x = inputs(B, T, F)
    actual, expected = (
        out_and_grads(apply, params, x, seeing[..., None] * inputs(B, T, F, seed=9), {"mask": given})
        for (params, apply), given in (
            (flax_layer(kind, sparse(UNION)), mask),
            (flax_layer(kind), jnp.asarray(both)),
        )
    )
    assert_close(actual[1], expected[1])
    assert_close(jnp.where(seeing[..., None], actual[0], 0), jnp.where(seeing[..., None], expected[0], 0))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_with_padding(kind):
    ids = jnp.asarray(np.array([[0] * 9 + [1] * 15, [5] * 20 + [-1] * 4]), jnp.int32)
    valid = jnp.ones((B, T), bool).at[0, 2].set(False).at[1, 7:9].set(False)
    x, weights = inputs(B, T, F), inputs(B, T, F, seed=9)
    same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    both = jnp.asarray(allowed(UNION)[None]) & same[:, None] & valid[:, None, None]
    seeing = both.any(-1).all(1)[..., None]
    mask = valid[:, None, None]

    params, dense = flax_layer(kind)
    if kind == "nnx":
        graphdef = nnx.graphdef(nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(0)))

        def apply(params, x, ids, mask):
            # As the docstring advises: a copy, for the layer would keep the traced ids.
            copy = nnx.clone(nnx.merge(graphdef, params))
            copy.attention_fn = sparse(UNION, segment_ids=ids)
            return copy(x, mask=mask)
    else:

        def apply(params, x, ids, mask):
            layer = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION, segment_ids=ids))
            return layer.apply(params, x, mask=mask)

    actual = out_and_grads(apply, params, x, weights * seeing, {"ids": ids, "mask": mask})
    expected = out_and_grads(dense, params, x, weights * seeing, {"mask": both})
    assert_close(actual[1], expected[1])
    assert_close(jnp.where(seeing, actual[0], 0), jnp.where(seeing, expected[0], 0))
    assert not seeing[1, 20:].any() and seeing.sum() > 30


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int64])
def test_ids_of_any_integer_type_meet_a_padding_mask(dtype):
    q, k, v = inputs(3, 1, T, N, 8)
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    ids, mask = np.array([[3] * 9 + [largest] * 15]).astype(dtype), np.ones((1, 1, 1, T), bool)
    mask[..., [2, 11]] = False
    both = allowed(UNION)[0] & (ids[0][:, None] == ids[0]) & mask[0, 0]
    expected = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(both)[None, None])
    fn = sparse(UNION, implementation="reference")
    out = fn(q, k, v, mask=mask, segment_ids=ids)
    rows = both.any(-1)
    assert rows.sum() > 20
    assert_close(out[:, rows], expected[:, rows])
    assert_close(fn(q, k, v, mask=mask, segment_ids=jnp.asarray(ids)), out)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_ids_that_32_bits_would_merge_are_refused(recompute, padding):
    q, ids = inputs(1, T, N, 8), np.array([[0] * 9 + [2**32] * 15])
    mask = np.ones((1, 1, 1, T), bool) if padding else None
    with pytest.raises(ValueError, match="segment_ids of queries must fit into int32"):
        sparse(UNION, recompute=recompute)(q, q, q, mask=mask, segment_ids=ids)


def test_a_query_without_keys_gets_zero_and_finite_gradients():
    q, k, v = inputs(3, 1, T, N, 8)
    mask = (jnp.arange(T) >= 6)[None, None, None]  # under a causal pattern, queries 0 to 5 are left without keys

    @jax.jit
    def run(q, k, v, mask):
        def loss(q, k, v):
            out = sparse(UNION, recompute=True)(q, k, v, mask=mask)
            return (out**2).sum(), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    out, *gradients = run(q, k, v, mask)
    assert float(jnp.abs(out[:, 6:]).max(-1).min()) > 0
    for leaf in (out, *gradients):
        np.testing.assert_array_equal(leaf[:, :6], 0)
        assert bool(jnp.isfinite(leaf).all()) and float(jnp.abs(leaf).max()) > 1e-3
    for leaf in run(q, k, v, jnp.zeros_like(mask)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("name", ["both ways", "array per head"])
def test_is_causal_hides_the_future(name):
    causal = allowed(PATTERNS[name]) & np.tri(T, dtype=bool)
    compare("nnx", PATTERNS[name], inputs(B, T, F), causal[None], call={"is_causal": True})


def test_is_causal_changes_nothing_where_the_pattern_is_causal():
    for pattern in ("all", UNION, (UNION, "all"), ARRAY):
        assert sparse(pattern).plan(T, causal=True) is sparse(pattern).plan(T)
    mixed = sparse((UNION, sl.Window(2, 2)))
    assert mixed.plan(T, causal=True) is not mixed.plan(T)
    assert mixed.plan(T, causal=True).masks[0] is mixed.plan(T).masks[0]  # head by head


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_while_training_is_refused(kind):
    x, options = inputs(B, T, F), {"dropout_rate": 0.25}
    if kind == "nnx":
        layer = nnx.MultiHeadAttention(
            N, F, attention_fn=sparse(UNION), decode=False, rngs=nnx.Rngs(0, dropout=1), **options
        )
        call = layer
    else:
        module = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION), **options)
        params = module.init(jax.random.key(0), x, deterministic=True)
        call = functools.partial(module.apply, params, rngs={"dropout": jax.random.key(1)})
    with pytest.raises(ValueError, match=r"dropout_rate must be 0 while training, got 0\.25.*residual"):
        call(x, deterministic=False)
    assert call(x, deterministic=True).shape == x.shape


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_not_sown(kind):
    params, apply = flax_layer(kind, sparse(UNION))
    with pytest.raises(ValueError, match=r"sow_weights must be False: .*never forms"):
        apply(params, inputs(B, T, F), sow_weights=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(B, 1, T, T), (1, N, T, T), (T, T), (B, N, 1, T), (B, 1, 1, 1), (B + 1, 1, 1, T), (1, B, 1, 1, T), ()]
)
def test_masks_that_are_not_key_padding_are_refused(kind, shape):
    params, apply = flax_layer(kind, sparse(UNION))
    with pytest.raises(ValueError, match=r"mask must be key padding.*\(2, 1, 1, 24\).*got " + re.escape(str(shape))):
        apply(params, inputs(B, T, F), mask=jnp.ones(shape, bool))


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_at_a_time_from_a_flax_cache_is_refused(kind):
    x = inputs(B, T, F)
    if kind == "nnx":
        layer = nnx.MultiHeadAttention(N, F, attention_fn=sparse(UNION), decode=True, rngs=nnx.Rngs(0))
        layer.init_cache(x.shape)
        call = layer
    else:
        module = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION), decode=True)
        variables = module.init(jax.random.key(0), x)
        call = functools.partial(module.apply, variables, mutable=["cache"])
    with pytest.raises(ValueError, match=r"decode=True.*position"):
        call(x[:, :1])


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_do_not_fit_are_refused(kind):
    params, apply = flax_layer(kind, sparse(UNION))
    with pytest.raises(ValueError, match=r"25 tokens, more than seq_len=24"):
        apply(params, inputs(B, T + 1, F))
    with pytest.raises(ValueError, match=r"equal T \(self-attention\).*\(2, 24, 4, 4\), \(2, 12, 4, 4\)"):
        apply(params, inputs(B, T, F), inputs_k=inputs(B, T // 2, F))
    with pytest.raises(ValueError, match="must be an integer >= 1, got 0"):
        apply(params, inputs(B, 0, F))


class Einsum(nn.Module):
    """Stands for a quantised einsum."""

    def __call__(self, *args):
        return jnp.einsum(*args)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_einsums_of_linen_are_refused(name):
    layer = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=sparse(UNION), **{f"{name}_cls": Einsum})
    with pytest.raises(ValueError, match=f"^{name} must be None"):
        layer.init(jax.random.key(0), inputs(B, T, F))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"bias": np.zeros((1, N, T, T))}, "bias must be None, got shape (1, 4, 24, 24)"),
        ({"dropout_rate": 0.5}, "dropout_rate must be 0 while training, got 0.5"),
        ({"input_positions": np.arange(T)}, "input_positions must be None"),
        (
            {"segment_ids": np.zeros((B, T), np.int32)},
            "segment_ids must have one id a token, (1, 24), got shape (2, 24)",
        ),
        ({"segment_ids": np.zeros((1, T))}, "segment_ids of queries must be integers"),
        ({"segment_ids": np.zeros((1, T), bool), "mask": np.ones((1, 1, 1, T))}, "must be integers"),
    ],
)
def test_calls_that_cannot_be_honoured_are_refused(options, words):
    q = inputs(1, T, N, 8)
    with pytest.raises(ValueError, match=re.escape(words)):
        sparse(UNION)(q, q, q, **options)


def test_arrays_that_do_not_fit_are_refused():
    q = inputs(2, T, N, 8)
    for arrays in ((q[0, 0], q[0, 0], q[0, 0]), (q, q[:1], q[:1]), (q, q, q[:, :12]), (q, q[0], q[0])):
        with pytest.raises(ValueError, match=r"query, key and value must have shapes \[\.\.\., T, heads, size\]"):
            sparse(UNION)(*arrays)
    with pytest.raises(ValueError, match="number of masks must divide the query heads, got 3 masks and N = 4"):
        sparse((UNION, "all", sl.Window(2)))(q, q, q)


@pytest.mark.parametrize(
    "pattern, options, error, words",
    [
        ("stridde", {}, ValueError, "stridde"),
        ("all", {"seq_len": 0}, ValueError, "seq_len must be an integer >= 1, got 0"),
        ("all", {"seq_len": True}, ValueError, "seq_len must be an integer >= 1, got True"),
        ("all", {"seq_len": 24.0}, ValueError, "seq_len must be an integer >= 1, got 24.0"),
        (np.ones((T, T + 1), bool), {}, ValueError, "seq_len=24"),
        (None, {}, TypeError, "NoneType"),
        ("all", {"implementation": "cuda"}, ValueError, "implementation must be None or one of"),
        ("all", {"implementation": "cudnn", "logits_soft_cap": 1.0}, NotImplementedError, "cudnn: it"),
        ("all", {"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap must be a number > 0"),
        ("all", {"scale": float("nan")}, ValueError, "scale must be a number"),
        ("all", {"scale": jnp.float32(1)}, ValueError, "scale must be a number"),
        ("all", {"fwd_params": (8, 8)}, ValueError, "fwd_params must be FwdParams or None"),
    ],
)
def test_wrong_settings_are_refused_when_the_function_is_made(pattern, options, error, words):
    with pytest.raises(error, match=words):
        sl.make_attention_fn(pattern, **{"seq_len": T} | options)


# --- one function for equal settings ---------------------------------------------------------------------------------


def test_equal_arguments_give_the_same_function():
    make = sl.make_attention_fn
    assert make(ARRAY, T) is make(ARRAY.copy(), T)
    assert make("all", T) is make(sl.Causal(), T) is make(["all"], T) is make(sl.preset("all"), np.int64(T))
    assert make("local:local_attn_ctx=5", T) is make(sl.preset("local", local_attn_ctx=5), T)
    assert make("all", T, fwd_params=BLOCKS) is make("all", T, fwd_params=sl.FwdParams(q_blocksize=8, kv_blocksize=8))
    different = [
        make("all", T),
        make("all", T + 1),
        make("all", T, recompute=True),
        make("all", T, implementation="xla"),
        make("all", T, scale=0.5),
        make("all", T, logits_soft_cap=0.5),
        make("all", T, fwd_params=BLOCKS),
        make("all", T, bwd_params=sl.BwdParams(q_blocksize=8)),
        make("local", T),
        make(ARRAY, T),
        make(np.tri(T, dtype=bool), T),  # the same pairs as "all", but not the same value
    ]
    assert len(set(different)) == len(different)
    assert pickle.loads(pickle.dumps(make(ARRAY, T))) == make(ARRAY, T)


def test_settings_reach_the_plan_and_the_plan_is_built_once():
    bwd = sl.BwdParams(q_blocksize=16, kv_blocksize=8)
    fn = sparse(UNION, bwd_params=bwd, implementation="reference")
    expected = sl.make_plan(UNION, T, fwd_params=BLOCKS, bwd_params=bwd, implementation="reference")
    assert fn.plan(T) is expected is sparse(UNION, bwd_params=bwd, implementation="reference").plan(T)
    asked = []

    class Counting(sl.Window):
        def __call__(self, q, k):
            asked.append(np.broadcast_shapes(np.shape(q), np.shape(k)))
            return super().__call__(q, k)

    q = inputs(1, T, N, 8)
    fn = sl.make_attention_fn(Counting(4), T, implementation="xla", fwd_params=BLOCKS)
    before = len(asked)
    outs = [jax.jit(lambda q: fn(q, q, q))(q), jax.jit(lambda q: 2 * fn(q, q, q))(q) / 2]
    assert_close(*outs)
    planned = len(asked)
    sl.make_attention_fn(Counting(4), T, implementation="xla", fwd_params=BLOCKS).plan(T)
    assert len(asked) == planned and before > 0


def test_equal_settings_share_one_trace():
    make = functools.partial(nnx.MultiHeadAttention, N, F, decode=False)
    layers = [
        make(attention_fn=sparse(sl.Causal() & (sl.Window(3) | sl.Strided(5))), rngs=nnx.Rngs(seed)) for seed in (0, 1)
    ]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])
    assert hash(nnx.graphdef(layers[0])) == hash(nnx.graphdef(layers[1]))
    traces = []

    @nnx.jit
    def counted(layer, x):
        traces.append(x.shape)
        return layer(x)

    for layer in layers * 2:
        counted(layer, inputs(B, T, F))
    assert len(traces) == 1


@pytest.mark.parametrize("theirs", [nn.dot_product_attention, nnx.dot_product_attention])
def test_parameters_are_named_as_flax_names_them(theirs):
    """Linen hands over what the signature names and drops the rest: a parameter missing here would be ignored."""
    ours = inspect.signature(sparse("all")).parameters
    named = inspect.signature(theirs).parameters
    # The layers pass neither: Linen's einsums have their own names, NNX promotes by its default.
    assert set(named) - set(ours) == {"einsum_dot_general", "promote_dtype"} & set(named)
    assert list(ours)[:8] == list(named)[:8]  # up to dropout_rate, also by position
    for name, parameter in ours.items():
        assert name not in named or parameter.default == named[name].default, name
    assert set(inspect.signature(sparse("all", segment_ids=jnp.zeros((B, T), int))).parameters) == set(ours)


# --- what is kept for the backward pass ------------------------------------------------------------------------------


def layer_of(recompute, **remat):
    fn = sparse(UNION, recompute=recompute)

    def layer(q, k, v):
        return jnp.sin(fn(jnp.sin(q), k, v))

    return jax.checkpoint(layer, **remat) if remat else layer


QKV = inputs(3, 1, T, N, 8)
ALONE: dict = {"policy": None}
RUNS = [  # recompute, remat of the layer around it, forward passes of the attention in the gradient's program
    (False, {}, 1),
    (False, ALONE, 2),
    (False, {"policy": KEEP}, 1),
    (True, {}, 2),
    (True, ALONE, 3),
    (True, {"policy": KEEP}, 1),
]


def gradients_of(recompute, **remat):
    """The gradient's program, and the gradients."""
    layer = layer_of(recompute, **remat)
    traced = jax.jit(jax.value_and_grad(lambda *arrays: (layer(*arrays) ** 2).sum(), (0, 1, 2))).trace(*QKV)
    return traced.jaxpr.jaxpr, traced.lower().compile(USUAL)(*QKV)[1]


@functools.cache
def plain_gradients():
    return gradients_of(False)[1]


@pytest.mark.parametrize("recompute, remat, runs", RUNS)
def test_how_often_the_attention_is_computed_and_that_its_gradients_stay(recompute, remat, runs):
    # The logarithm of a sum of weights: the forward pass has one, the backward pass none.
    unit = count(jax.make_jaxpr(layer_of(False))(*QKV).jaxpr, "log")
    # XLA is free to merge forward passes of one scope that it sees to be the same; across a scan it is not.
    written, gradients = gradients_of(recompute, **remat)
    assert count(written, "log") == runs * unit > 0
    assert_close(gradients, plain_gradients(), 1e-6)


@pytest.mark.parametrize("recompute, remat, runs", RUNS)
def test_residuals_of_the_backward_pass(recompute, remat, runs):
    q, k, v = inputs(1, T, N, 8), inputs(1, T, 1, 8, seed=1), inputs(1, T, 1, 5, seed=2)
    kept = [x.shape for x in jax.tree.leaves(jax.vjp(layer_of(recompute, **remat), q, k, v)[1])]
    assert (1, T, 1, 5) in kept  # the values, in any case
    assert ((1, T, N) in kept) == (runs == 1)  # lse
    derivative = not remat  # that of the sine outside, as large as out
    twice = recompute and runs == 1  # JAX keeps a nested remat's output once for each of the two
    assert kept.count((1, T, N, 5)) == (runs == 1) + derivative + twice
