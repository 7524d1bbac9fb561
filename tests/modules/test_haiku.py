"""Haiku layers: Haiku's parameters, dense Haiku's and NNX's numbers, under Haiku's and JAX's transformations."""

import functools
import importlib
import inspect
import re
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers.haiku import SparseSelfAttention, SparseTransformerBlock
from sparse_layers.modules.options import ComputeOptions
from tests.arrays import inputs, perturbed

T, F, N, H = 24, 16, 4, 6
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 24 tokens are several blocks
UNION = sl.Causal() & (sl.Window(3) | sl.Strided(5))
IDS = jnp.asarray([[0] * 9 + [1] * 8 + [2] * 7, [3] * 20 + [4] * 4])
PADDED = jnp.where(IDS == 2, -1, IDS)
SETTINGS = {"pattern": UNION, "seq_len": T, "fwd_params": BLOCKS}
# Each program runs once, so most of the time goes to compiling: without optimisation, to about half as much.
once = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def attention(**options):
    options = {"name": "multi_head_attention"} | SETTINGS | options
    return hk.without_apply_rng(hk.transform(lambda *x, **more: SparseSelfAttention(N, H, **options)(*x, **more)))


def plain(**options):
    options["w_init"] = hk.initializers.VarianceScaling(1.0)
    return hk.without_apply_rng(hk.transform(lambda *x, **more: hk.MultiHeadAttention(N, H, **options)(*x, **more)))


def block(**options):
    options = SETTINGS | options
    return hk.transform(lambda x, **more: SparseTransformerBlock(N, F, **options)(x, **more))


def perturbed_params(model, *arguments, seed=1):
    """Parameters away from their initial zeros and ones, without the program that would initialise them."""
    return perturbed(jax.eval_shape(model.init, jax.random.key(0), *(arguments or [inputs(2, T, F)])), seed)


def specs(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def value_and_grads(*functions):
    """Of each function: the output, and the gradients of its arguments; all in one program."""

    @once
    def run(*arguments):
        results = []
        for function in functions:
            out, pull = jax.vjp(function, *arguments)
            results.append((out, pull(inputs(*out.shape, seed=3).astype(out.dtype))))
        return results

    return run


def assert_close(actual, expected, tolerance=3e-6):
    """Equal to rounding, which is relative to the largest number of all: some gradients are sums that cancel to 0."""
    scale = max(1.0, *(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected)))

    def compare(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)

    jax.tree.map(compare, actual, expected)


# --- dense Haiku's parameters and numbers ----------------------------------------------------------------------------


def grouped(params):
    """Parameters of two key and value heads as those of four: each serves two query heads."""

    def repeated(x):
        return jnp.repeat(x.reshape(*x.shape[:-1], 2, H), 2, axis=-2).reshape(*x.shape[:-1], N * H)

    return {k: jax.tree.map(repeated, v) if k.endswith(("/key", "/value")) else v for k, v in params.items()}


VALID = jnp.arange(T) < jnp.asarray([[17], [24]])
CAUSAL = np.tril(np.ones((T, T), bool))
# Options, other inputs of the call, dense Haiku's mask, how it reads the parameters.
CHOSEN = sl.Selection(np.array([[[[0, -1]], [[1, 1]]], [[[-1, 0]], [[0, 1]]]]), block=16, granularity=16)
HIDDEN = np.kron([[[1, 0], [0, 1]], [[1, 0], [1, 1]]], np.ones((16, 16), bool))[:, None, :T, :T]
DENSE = {
    "causal": ({"pattern": sl.Causal()}, {}, CAUSAL, dict),
    "segments": ({}, {"segment_ids": IDS}, UNION.dense(T) & (IDS[:, None, :, None] == IDS[:, None, None]), dict),
    "selection": ({"pattern": sl.Causal()}, {"selection": CHOSEN}, CAUSAL & (HIDDEN == 1), dict),
    "padding, sizes, key and value of their own": (
        {"value_size": 5, "model_size": 10, "with_bias": False, "pattern": sl.Causal()},
        {"mask": VALID[:, None, None]},
        CAUSAL & VALID[:, None, None],
        dict,
    ),
    "grouped heads that differ": (
        {"num_kv_heads": 2, "pattern": (UNION, sl.Causal())},
        {},
        np.stack([UNION.dense(T), CAUSAL] * 2),
        grouped,
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_parameters_of_dense_haiku_give_its_values_and_gradients(name):
    options, more, mask, read = DENSE[name]
    sizes = {k: v for k, v in options.items() if k in ("value_size", "model_size", "with_bias")}
    features = (F, 12, 10) if "of their own" in name else (F, F, F)
    arrays = [inputs(2, T, f, seed=i) for i, f in enumerate(features)]
    sparse, full = attention(**options), plain(**sizes)
    params = perturbed_params(sparse, *arrays)
    assert specs(read(params)) == specs(jax.eval_shape(full.init, jax.random.key(0), *arrays))
    mask = jnp.broadcast_to(mask, (2, N, T, T))
    actual, expected = value_and_grads(
        lambda params, *arrays: sparse.apply(params, *arrays, **more),
        lambda params, *arrays: full.apply(read(params), *arrays, mask),
    )(params, *arrays)
    assert_close(actual, expected)


def test_arguments_are_those_of_dense_haiku_and_more_by_keyword_only():
    ours, theirs = (
        list(inspect.signature(c).parameters.values()) for c in (SparseSelfAttention, hk.MultiHeadAttention)
    )
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(theirs) :])
    assert issubclass(SparseSelfAttention, hk.MultiHeadAttention)


# --- NNX's block -----------------------------------------------------------------------------------------------------


def as_nnx(params):
    """The block's parameters as those of the NNX block, a tree of dicts."""
    tree = {}
    for path, leaves in params.items():
        *above, last = path.split("/")[2:]
        place = functools.reduce(lambda node, name: node.setdefault(name, {}), above, tree)
        names = {"w": "kernel", "b": "bias", "offset": "bias"}
        leaves = {names.get(name, name): leaf for name, leaf in leaves.items()}
        if above and last in ("query", "key", "value", "out_gate"):
            leaves = {name: leaf.reshape(*leaf.shape[:-1], -1, H) for name, leaf in leaves.items()}
        if last == "linear":
            last, leaves["kernel"] = "out", leaves["kernel"].reshape(N, H, F)
        place.setdefault(last, {}).update(leaves)
    return tree


BLOCK = {
    "layer norm, segments": ({"norm_epsilon": 0.3, "num_layers": 2}, PADDED),
    "rms norm, swiglu, all options": (
        {
            "mlp": "swiglu",
            "norm": "rms",
            "remat": True,
            "mlp_features": 20,
            "num_kv_heads": 2,
            "rope": sl.Rope(100.0, (4, 6), sizes=(2, 4)),
            "normalize_qk": True,
            "use_sinks": True,
            "gate_output": True,
            "scale": 0.9,
            "logits_soft_cap": 0.5,
        },
        None,
    ),
    "gelu_tanh, no biases": ({"mlp": "gelu_tanh", "with_bias": False, "pattern": (sl.Window(4), UNION)}, None),
}


@pytest.mark.parametrize("name", BLOCK)
def test_the_block_gives_the_values_and_gradients_of_nnx(name):
    options, ids = BLOCK[name]
    ours = block(key_size=H, **options)
    renamed = {("use_bias" if key == "with_bias" else key): value for key, value in (SETTINGS | options).items()}
    theirs = sl.SparseTransformerBlock(num_heads=N, features=F, qkv_features=N * H, **renamed, rngs=nnx.Rngs(0))
    graph, state = nnx.split(theirs, nnx.Param)

    def apply_nnx(params, x):
        new = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(new, as_nnx(params))
        return nnx.merge(graph, new)(x, segment_ids=ids)

    params, x = perturbed_params(ours), inputs(2, T, F)
    assert specs(as_nnx(params)) == specs(nnx.to_pure_dict(state))
    apply = functools.partial(ours.apply, rng=None, segment_ids=ids)
    actual, expected = value_and_grads(lambda params, x: apply(params, x=x), apply_nnx)(params, x)
    assert_close(actual, expected)
    # Dead rows and zero weights would hide a wrong one; a bias of keys moves no softmax, so its gradient is rounding.
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(actual))


@pytest.mark.parametrize("num_layers", [1, 8])
def test_output_maps_start_smaller_by_the_root_of_twice_the_depth(num_layers):
    options = {"pattern": "all", "seq_len": T, "num_layers": num_layers}
    model = hk.transform(lambda x: SparseTransformerBlock(N, 128, **options)(x))
    params = once(model.init)(jax.random.key(0), inputs(1, T, 128))
    for name, fan_in, scale in (
        ("attention/linear", 128, 2 * num_layers),
        ("mlp_out", 512, 2 * num_layers),
        ("attention/query", 128, 1),
        ("mlp_in", 128, 1),
    ):
        weights = params[f"sparse_transformer_block/~/{name}"]["w"]
        assert float(jnp.std(weights)) == pytest.approx((scale * fan_in) ** -0.5, rel=0.03)


# --- transformations -------------------------------------------------------------------------------------------------


def test_any_leading_batch_dimensions_vmap_and_shorter_inputs():
    model = hk.transform_with_state(lambda x, ids: SparseTransformerBlock(N, F, **SETTINGS)(x, segment_ids=ids))
    x, ids = inputs(2, 3, T, F), jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 3, T)))

    def apply(params, x, ids):
        return model.apply(params, {}, None, x, ids)[0]

    @once
    def run(params, x, ids):
        mapped = jax.vmap(apply, in_axes=(None, 0, 0))(params, x[1], ids[1])
        return (
            apply(params, x, ids),
            apply(params, x[1, 2], ids[1, 2]),
            mapped,
            apply(params, x[:, :, :17], ids[..., :17]),
        )

    params, state = jax.eval_shape(model.init, jax.random.key(0), x, ids)
    assert not state
    params = jax.tree.map(lambda p: inputs(*p.shape) * 0.3, params)
    out, one, mapped, shorter = run(params, x, ids)
    assert out.shape == x.shape
    np.testing.assert_allclose(out[1, 2], one, atol=1e-5)
    np.testing.assert_allclose(out[1], mapped, atol=1e-5)
    np.testing.assert_allclose(out[:, :, :17], shorter, atol=1e-5)


def test_layer_stack_of_remat_blocks_gives_the_values_and_gradients_of_the_loop():
    options = SETTINGS | {"pattern": sl.Causal(), "remat": True}
    stacked = hk.transform(hk.layer_stack(2, name="stack")(lambda x: SparseTransformerBlock(N, F, **options)(x)))
    one = block(**options | {"remat": False})

    def loop(params, x):
        for i in range(2):
            layer = {name.removeprefix("stack/"): {k: v[i] for k, v in maps.items()} for name, maps in params.items()}
            x = one.apply(layer, None, x)
        return x

    params, x = perturbed_params(stacked), inputs(1, T, F)
    assert "remat" in str(jax.make_jaxpr(lambda params: stacked.apply(params, None, x))(params))
    actual, expected = value_and_grads(lambda params, x: stacked.apply(params, None, x), loop)(params, x)
    assert_close(actual, expected, 1e-5)


def test_half_precision_by_the_input_and_by_a_policy():
    model = hk.without_apply_rng(block(use_sinks=True, rope_theta=100.0, normalize_qk=True))
    x = inputs(1, T, F)
    halved = perturbed_params(model, x.astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(halved)} == {jnp.dtype(jnp.bfloat16)}
    params = jax.tree.map(lambda p: p.astype(jnp.float32), halved)
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    @once
    def run(params, halved):
        with hk.mixed_precision.push_policy(SparseTransformerBlock, policy):
            assert specs(perturbed_params(model, x)) == specs(params)
            mixed = model.apply(params, x)
        return model.apply(params, x), mixed, model.apply(halved, x.astype(jnp.bfloat16))

    exact, mixed, half = run(params, halved)
    assert (mixed.dtype, half.dtype) == (jnp.float32, jnp.bfloat16)
    for found in (mixed, half):
        error = float(jnp.abs(found - exact).max())
        assert 0 < error < 0.02 * float(jnp.abs(exact).max())


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_acts_at_the_ends_of_both_branches_when_switched_on():
    model, x, key = block(dropout_rate=0.5, remat=True), inputs(1, T, F), jax.random.key(5)
    params = perturbed_params(block())
    # With a silent MLP the branch's end is seen by itself: each value is either dropped or doubled.
    silent = params | {name: jax.tree.map(jnp.zeros_like, params[name]) for name in params if name.endswith("mlp_out")}

    @once
    def run(params, silent):
        plain = block().apply
        return {
            "none": (plain(params, None, x), model.apply(params, None, x, deterministic=True)),
            "attention": (model.apply(silent, key, x, deterministic=False) - x, plain(silent, None, x) - x),
            "mlp": (model.apply(params, key, x, deterministic=False), model.apply(silent, key, x, deterministic=False)),
        }

    out = run(params, silent)
    np.testing.assert_allclose(*out["none"], atol=1e-6)
    dropped, kept = out["attention"]
    share = np.asarray(dropped / kept)
    np.testing.assert_allclose(np.where(share > 1, share - 2, share), 0, atol=1e-3)
    assert 0.4 < (share > 1).mean() < 0.6
    assert 0.4 < np.mean(np.abs(out["mlp"][0] - out["mlp"][1]) < 1e-6) < 0.6
    with pytest.raises(ValueError, match="PRNGKey"):
        jax.eval_shape(functools.partial(model.apply, deterministic=False), params, None, x)


# --- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [SparseSelfAttention, SparseTransformerBlock], ids=lambda layer: layer.__name__)
def test_documentation(layer):
    for function, text in ((layer.__init__, layer.__doc__), (layer.__call__, layer.__call__.__doc__)):
        assert "Raises:" in text
        for name in set(inspect.signature(function).parameters) - {"self"}:
            assert re.search(rf"^\s+(\w+, )*\**{name}(, \w+)*: ", text, re.M), f"{name} is not documented"
    for name in ComputeOptions.__optional_keys__:
        assert name in str(SparseSelfAttention.__doc__)


def test_the_pattern_and_its_plan_can_be_asked_for():
    seen = []

    def ask(x):
        layer = SparseTransformerBlock(N, F, **SETTINGS | {"pattern": UNION.dense(T)}).attention
        seen.append((layer.pattern, layer.plan))
        return layer(x)

    jax.eval_shape(hk.transform(ask).init, jax.random.key(0), inputs(1, T, F))
    masks = sl.as_masks(UNION.dense(T))
    assert seen[0][0] == masks
    assert seen[0][1] is sl.make_plan(masks, T, fwd_params=BLOCKS)


def test_import_error_without_haiku_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "haiku", None)
    monkeypatch.delitem(sys.modules, "sparse_layers.haiku")
    with pytest.raises(ImportError, match=re.escape("pip install 'sparse-layers[haiku]'")):
        importlib.import_module("sparse_layers.haiku")


# --- decoding --------------------------------------------------------------------------------------------------------


def decoded(module, params, x, prompt, max_step=1):
    """Outputs of a prompt and of steps of ``max_step`` tokens, by the parameters of a call; and the names of theirs."""
    prefill = hk.without_apply_rng(hk.transform(lambda *args: module().prefill(*args, max_step=max_step)))
    step = hk.without_apply_rng(hk.transform(lambda *args: module().decode_step(*args)))
    out, cache = once(prefill.apply)(params, x[:, :prompt])
    outs, run = [out], once(step.apply)
    for start in range(prompt, x.shape[1], max_step):
        tokens = x[:, start] if max_step == 1 else x[:, start : start + max_step]
        out, cache = run(params, tokens, cache, jnp.full(len(x), start))
        outs.append(out[:, None] if max_step == 1 else out)
    names = jax.eval_shape(prefill.init, jax.random.key(0), x[:, :prompt])
    return jnp.concatenate(outs, axis=1), names


DECODED = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "use_sinks": True, "normalize_qk": True, "gate_output": "headwise"},
    "rope": {"rope_theta": 100.0, "normalize_qk": "rms", "logits_soft_cap": 5.0},
    "joint": {"normalize_qk": "rms_joint", "with_bias": False},
    "scorer": {"pattern": "moba:block=16,count=1"},
}


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("max_step", [1, 2])
def test_decoding_is_the_call(name, max_step):
    options = SETTINGS | DECODED[name]
    if name == "scorer":
        del options["fwd_params"]
    x, call = inputs(2, T, F), attention(**options)
    params = perturbed_params(call, x)
    out, names = decoded(
        lambda: SparseSelfAttention(N, H, name="multi_head_attention", **options), params, x, 16, max_step
    )
    assert_close(out, call.apply(params, x))
    assert specs(names) == specs(params)


def test_a_block_decodes():
    options = {"norm": "rms", "norm_placement": "sandwich", "mlp": "swiglu", "normalize_qk": True} | SETTINGS
    x, call = inputs(2, T, F), hk.without_apply_rng(block(**options))
    params = perturbed_params(call, x)
    out, names = decoded(lambda: SparseTransformerBlock(N, F, **options), params, x, 20)
    assert_close(out, call.apply(params, x))
    assert specs(names) == specs(params)


def test_prompts_of_different_lengths_and_chunks():
    x, call = inputs(2, T, F), attention()
    params, lengths = perturbed_params(call, x), jnp.array([5, 16])

    def unchunked(x):
        return SparseSelfAttention(N, H, name="multi_head_attention", **SETTINGS).prefill(x, lengths)

    def chunks(x):
        layer, cache, outs = SparseSelfAttention(N, H, name="multi_head_attention", **SETTINGS), None, []
        for start in (0, 8):
            chunk = x[:, start : start + 8]
            out, cache = layer.prefill(chunk, jnp.minimum(lengths, start + 8), cache=cache, start=start, total=16)
            outs.append(out)
        return jnp.concatenate(outs, axis=1), cache

    (out, cache), (chunked, chunked_cache) = (
        once(hk.without_apply_rng(hk.transform(function)).apply)(params, x[:, :16]) for function in (unchunked, chunks)
    )
    assert_close(chunked[1], out[1])
    assert_close(chunked[0, :5], out[0, :5])
    assert jax.tree.structure(cache) == jax.tree.structure(chunked_cache)


def test_decoding_refuses():
    x, cache = inputs(2, T, F), sl.KVCache.empty(sl.Causal(), T, batch=2, num_heads=N, head_size=H)

    def run(function, **options):
        return hk.testing.transform_and_run(lambda: function(SparseSelfAttention(N, H, **SETTINGS | options)))()

    with pytest.raises(NotImplementedError, match=r"prefill: a cache has keys and values of one size, .* value_size=3"):
        run(lambda layer: layer.prefill(x), value_size=3)
    with pytest.raises(ValueError, match="cache is that of another layer: masks"):
        run(lambda layer: layer.decode_step(x[:, 0], cache, jnp.zeros(2, int)))
    with pytest.raises(TypeError, match="segment_ids"):
        run(lambda layer: layer.prefill(x, segment_ids=IDS))
    with pytest.raises(ValueError, match="pattern: decoding needs a causal one"):
        run(lambda layer: layer.prefill(x), pattern=sl.Window(3, 3))
