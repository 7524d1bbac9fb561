"""Dense weights in sparse layers: equal to the dense model where the pattern is dense, to the formula where not."""

import json
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen, nnx
from flax.nnx.nn import dtypes

import sparse_layers as sl
import sparse_layers.linen
from sparse_layers.modules.loading.dense import from_linen, from_nnx
from sparse_layers.modules.loading.huggingface import from_gpt2, from_huggingface
from tests.arrays import inputs, perturbed

T, F, N, V = 24, 16, 4, 40
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 24 tokens are several blocks
BACK = np.arange(T)[:, None] - np.arange(T)  # how far the key lies before the query
CAUSAL = BACK >= 0
# The pattern's name, and the pairs that it allows by a formula of its own.
PATTERNS = {
    "window": ("sliding_window:window=7", CAUSAL & (BACK < 7)),
    "strided": ("sparse_transformer_strided:stride=5", CAUSAL & ((BACK < 5) | (BACK % 5 == 0))),
}


@nnx.jit
def run(layer, x):
    return layer(x)


def attention(x, p, mask):
    """Multi-head attention in float64 numpy: x [B, T, F], Flax's parameters as nested dicts, mask bool [T, T]."""
    x, p = np.asarray(x, np.float64), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    q, k, v = (
        np.einsum("btf,fnh->bnth", x, p[name]["kernel"]) + p[name].get("bias", np.zeros((1, 1)))[:, None, :]
        for name in ("query", "key", "value")
    )
    if "query_ln" in p:
        q, k = (
            (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6) * p[name]["scale"]
            for y, name in ((q, "query_ln"), (k, "key_ln"))
        )
    k, v = (np.repeat(y, q.shape[1] // y.shape[1], 1) for y in (k, v))
    weights = np.where(mask, np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])), 0)
    out = weights / weights.sum(-1, keepdims=True) @ v
    return np.einsum("bnth,nhf->btf", out, p["out"]["kernel"]) + p["out"].get("bias", 0)


# --- Flax NNX --------------------------------------------------------------------------------------------------------

NNX = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one key head, QK norm": {"num_kv_heads": 1, "normalize_qk": True},
    "no bias": {"use_bias": False},
    "sizes": {"qkv_features": 8, "out_features": 12},
}


def nnx_layer(seed=3, **options):
    dense = nnx.MultiHeadAttention(N, F, **{"decode": False, "rngs": nnx.Rngs(seed)} | options)
    nnx.update(dense, perturbed(nnx.state(dense, nnx.Param)))
    return dense


@nnx.jit
def run_dense(layer, x):
    return layer(x, mask=nnx.make_causal_mask(x[..., 0]))


def out_and_grads(function, layer, x):
    """What function(layer, x) gives, and the gradients of the layer's parameters, by one program."""

    def loss(layer):
        out = function(layer, x)
        return (out * inputs(*out.shape, seed=7)).sum(), out

    kind = (nnx.jit, nnx.value_and_grad) if isinstance(layer, nnx.Module) else (jax.jit, jax.value_and_grad)
    (_, out), grads = kind[0](kind[1](loss, has_aux=True))(layer)
    return out, nnx.to_pure_dict(grads) if isinstance(layer, nnx.Module) else grads


def pure(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


@pytest.mark.parametrize("name", NNX)
def test_nnx_outputs_and_gradients_are_the_dense_layers(name):
    dense, x = nnx_layer(**NNX[name]), inputs(2, T, F)
    layer = from_nnx(dense, pattern="all", seq_len=T, fwd_params=BLOCKS)
    (ours, grads), (theirs, wanted) = out_and_grads(run, layer, x), out_and_grads(run_dense, dense, x)
    np.testing.assert_allclose(ours, theirs, atol=5e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), grads, wanted)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", PATTERNS)
def test_nnx_under_a_sparse_pattern(name):
    pattern, mask = PATTERNS[name]
    dense, x = nnx_layer(num_kv_heads=2, normalize_qk=True), inputs(2, T, F)
    layer = from_nnx(dense, pattern=pattern, seq_len=T, fwd_params=BLOCKS)
    np.testing.assert_allclose(run(layer, x), attention(x, pure(dense), mask), atol=1e-5)
    assert np.abs(run(layer, x) - run_dense(dense, x)).max() > 0.01


def test_nnx_dtypes_and_metadata_are_kept():
    metadata = {"out_sharding": None, "kind": "mine"}
    dense = nnx_layer(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, precision="highest", kernel_metadata=metadata)
    layer = from_nnx(dense, pattern="all", seq_len=T, use_sinks=True)
    assert layer.precision == "highest" and layer.query.kernel.get_metadata()["kind"] == "mine"
    x = inputs(1, T, F).astype(jnp.bfloat16)
    assert run(layer, x).dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))} == {"bfloat16"}
    np.testing.assert_array_equal(layer.sinks[...], 0)
    without = from_nnx(dense, pattern="all", seq_len=T)
    expected = np.asarray(run_dense(dense, x), np.float32)
    error = np.abs(np.asarray(run(without, x), np.float32) - expected).max()
    assert error < 0.02 * np.abs(expected).max()
    wide = from_nnx(dense, pattern="all", seq_len=T, dtype=jnp.float32, param_dtype=jnp.float32)
    np.testing.assert_allclose(run(wide, x), attention(x, pure(dense), CAUSAL), atol=5e-6)


def calls_of(name, function, seen):
    def called(*args, **options):
        seen.add(name)
        return function(*args, **options)

    return called


@pytest.mark.parametrize("kind", ["functions", "classes"])
def test_nnx_keeps_functions_of_projections_and_norms(kind):
    seen = set()
    norms = {"ln_promote_dtype": dtypes.promote_dtype}
    if kind == "functions":
        products = {"qkv_dot_general": jax.lax.dot_general, "out_dot_general": jax.lax.dot_general}
        products |= {"qkv_promote_dtype": dtypes.promote_dtype, "out_promote_dtype": dtypes.promote_dtype}
        options = {name: calls_of(name, function, seen) for name, function in (products | norms).items()}
    else:  # Flax makes one object of these for each call
        names = ("qkv_dot_general_cls", "out_dot_general_cls")
        options = {name: lambda name=name: calls_of(name, jax.lax.dot_general, seen) for name in names}
        options |= {name: calls_of(name, function, seen) for name, function in norms.items()}
    dense, x = nnx_layer(normalize_qk=True, **options), inputs(1, T, F)
    expected = run_dense(dense, x)
    assert seen == set(options)
    seen.clear()
    layer = from_nnx(dense, pattern="all", seq_len=T)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), expected, atol=5e-6)
    assert seen == set(options)


def test_nnx_parameters_are_copies():
    dense = nnx_layer()
    before = jax.tree.map(np.array, pure(dense))
    layer = from_nnx(dense, pattern="all", seq_len=T)
    pointers = [{leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pure(m))} for m in (dense, layer)]
    assert not pointers[0] & pointers[1], "a buffer that one of them donates must not be the other's"
    layer.query.kernel[...] = layer.query.kernel[...] + 1
    jax.tree.map(np.testing.assert_array_equal, pure(dense), before)


def with_adapter():
    dense = nnx_layer()
    dense.query = nnx.LoRALinear(F, F, lora_rank=2, rngs=nnx.Rngs(0))
    return dense


@pytest.mark.parametrize(
    "dense, options, error, reason",
    [
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {}, TypeError, "MultiHeadAttention, got Linear"),
        (lambda: nnx_layer(dropout_rate=0.1), {}, ValueError, "drops attention weights.*the residual"),
        (lambda: nnx_layer(in_kv_features=8), {}, ValueError, "in_kv_features=8 differs from in_features=16"),
        (lambda: nnx_layer(attention_fn=print), {}, ValueError, "attention_fn: .*print.*rope, "),
        (with_adapter, {}, ValueError, "dense layer: unknown .*query.lora.lora_a"),
        (lambda: from_nnx(nnx_layer(), pattern="all", seq_len=T), {}, TypeError, "is a SparseSelfAttention already"),
        (nnx_layer, {"use_bias": False}, ValueError, "use_bias: comes from the dense layer"),
        (nnx_layer, {"param_dtype": jnp.int32}, ValueError, "param_dtype must be a floating-point dtype"),
        (nnx_layer, {"pattern": "strieded"}, ValueError, "strieded"),
    ],
)
def test_nnx_refusals(dense, options, error, reason):
    with pytest.raises(error, match=reason):
        from_nnx(dense(), **{"pattern": "all", "seq_len": T} | options)


# --- Linen -----------------------------------------------------------------------------------------------------------

LINEN = {
    "plain": (linen.MultiHeadDotProductAttention, {}),
    "QK norm": (linen.MultiHeadDotProductAttention, {"normalize_qk": True}),
    "no bias": (linen.MultiHeadAttention, {"use_bias": False}),
    "sizes": (linen.MultiHeadDotProductAttention, {"qkv_features": 8, "out_features": 12}),
}


def linen_layer(kind=linen.MultiHeadDotProductAttention, **options):
    layer = kind(num_heads=N, **options)
    return layer, perturbed(layer.init(jax.random.key(0), jnp.ones((1, T, F)))["params"])


@pytest.mark.parametrize("name", LINEN)
def test_linen_outputs_and_gradients_are_the_dense_layers(name):
    kind, options = LINEN[name]
    (dense, params), x = linen_layer(kind, **options), inputs(2, T, F)
    layer = from_linen(params, pattern="all", seq_len=T, fwd_params=BLOCKS)

    def apply(params, x):
        return dense.apply({"params": params}, x, mask=linen.make_causal_mask(x[..., 0]))

    (ours, grads), (theirs, wanted) = out_and_grads(run, layer, x), out_and_grads(apply, params, x)
    np.testing.assert_allclose(ours, theirs, atol=5e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), grads, wanted)


@pytest.mark.parametrize("name", PATTERNS)
def test_linen_under_a_sparse_pattern(name):
    pattern, mask = PATTERNS[name]
    (_, params), x = linen_layer(), inputs(2, T, F)
    layer = from_linen(params, pattern=pattern, seq_len=T, fwd_params=BLOCKS)
    np.testing.assert_allclose(run(layer, x), attention(x, params, mask), atol=1e-5)


def test_linen_dtypes():
    _, params = linen_layer(param_dtype=jnp.bfloat16)
    x = inputs(1, T, F)
    kept = from_linen(params, pattern="all", seq_len=T, dtype=jnp.bfloat16)
    assert kept.query.kernel[...].dtype == jnp.bfloat16 == run(kept, x).dtype
    wide = from_linen(flax.core.freeze(params), pattern="all", seq_len=T, param_dtype=jnp.float32)
    np.testing.assert_allclose(run(wide, x), attention(x, params, CAUSAL), atol=5e-6)


def test_linen_arrays_keep_their_dtypes():
    _, params = linen_layer(normalize_qk=True)
    mixed = {name: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params[name]) for name in ("query", "key_ln")}
    layer = from_linen(params | mixed, pattern="all", seq_len=T)
    for path, leaf in flax.traverse_util.flatten_dict(pure(layer)).items():
        expected = (params | mixed)[path[0]][path[1]]
        assert leaf.dtype == expected.dtype, path
        np.testing.assert_array_equal(leaf, expected)
    wide = from_linen(params | mixed, pattern="all", seq_len=T, param_dtype=jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(pure(wide))} == {"float32"}


def test_linen_sinks_of_the_sparse_layer():
    settings = {"pattern": "sliding_window:window=7", "seq_len": T, "use_sinks": True}
    sparse = sparse_layers.linen.SparseSelfAttention(N, **settings)
    x = inputs(1, T, F)
    params = perturbed(jax.jit(sparse.init)(jax.random.key(0), x)["params"])
    layer = from_linen(params, **settings)
    assert np.abs(layer.sinks[...]).max() > 0.1
    np.testing.assert_allclose(run(layer, x), jax.jit(sparse.apply)({"params": params}, x), atol=5e-6)
    with pytest.raises(ValueError, match="sinks, which need use_sinks=True"):
        from_linen(params, **settings | {"use_sinks": False})
    with pytest.raises(ValueError, match=re.escape("sinks (3,), not (4,)")):
        from_linen(params | {"sinks": jnp.zeros(3)}, **settings)


def test_norms_of_q_and_k_are_kept():
    """Parameters of an RMS norm look like those of a layer norm: NNX layers know, of Linen's the caller does."""
    x, settings = inputs(1, T, F), {"pattern": "all", "seq_len": T}
    sparse = sparse_layers.linen.SparseSelfAttention(N, normalize_qk="rms", norm_epsilon=0.1, **settings)
    params = perturbed(jax.jit(sparse.init)(jax.random.key(0), x)["params"])
    layer = from_linen(params, normalize_qk="rms", norm_epsilon=0.1, **settings)
    np.testing.assert_allclose(run(layer, x), jax.jit(sparse.apply)({"params": params}, x), atol=5e-6)
    with pytest.raises(ValueError, match="normalize_qk: params have norms of q and k, got False"):
        from_linen(params, normalize_qk=False, **settings)

    dense = nnx_layer(normalize_qk=True)
    size = dense.query_ln.num_features
    for name, seed in (("query_ln", 1), ("key_ln", 2)):
        norm = nnx.RMSNorm(size, epsilon=0.1, rngs=nnx.Rngs(0))
        norm.scale[...] = jax.random.normal(jax.random.key(seed), (size,))
        setattr(dense, name, norm)
    mask = nnx.make_causal_mask(x[..., 0])
    np.testing.assert_allclose(run(from_nnx(dense, **settings), x), dense(x, mask=mask, decode=False), atol=1e-5)
    dense.key_ln = nnx.RMSNorm(size, epsilon=0.2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="norms of q and k must be alike"):
        from_nnx(dense, **settings)


def test_linen_grouped_heads_and_boxes():
    # Linen has no grouped heads, but the layout says it all; boxes carry the axes' names.
    params = pure(nnx_layer(num_kv_heads=2))
    boxed = jax.tree.map(lambda leaf: linen.Partitioned(leaf, names=(None,) * leaf.ndim), params)
    x = inputs(1, T, F)
    layer = from_linen(boxed, pattern="all", seq_len=T)
    np.testing.assert_allclose(run(layer, x), attention(x, params, CAUSAL), atol=5e-6)


def changed(tree, path, value):
    """The nested dict with another leaf at path, or without it where value is None."""
    head, *rest = path.split(".", 1)
    tree = dict(tree)
    tree[head] = changed(tree.get(head, {}), rest[0], value) if rest else value
    return {name: leaf for name, leaf in tree.items() if leaf is not None}


@pytest.mark.parametrize(
    "path, shape, reason",
    [
        ("query.kernel", None, "missing query.kernel"),
        ("key.bias", None, "missing key.bias"),
        ("query_ln.scale", (4,), "missing key_ln.scale"),
        ("gate.kernel", (16, 4), "unknown gate.kernel"),
        ("extra", (16, 4), "unknown extra"),
        ("query.kernel", (16, 16), "query.kernel must have three axes"),
        ("key.kernel", (16, 3, 4), "the 3 heads of key.kernel must divide the 4"),
        ("key.kernel", (8, 4, 4), re.escape("key.kernel (8, 4, 4), not (16, 4, 4)")),
        ("value.kernel", (16, 4, 5), re.escape("value.kernel (16, 4, 5), not (16, 4, 4)")),
        ("query.bias", (16,), re.escape("query.bias (16,), not (4, 4)")),
        ("out.kernel", (2, 4, 16), re.escape("out.kernel (2, 4, 16), not (4, 4, 16)")),
        ("out.bias", (3,), re.escape("out.bias (3,), not (16,)")),
    ],
)
def test_linen_refusals(path, shape, reason):
    _, params = linen_layer()
    params = changed(params, path, None if shape is None else jnp.ones(shape))
    with pytest.raises(ValueError, match=reason):
        from_linen(params, pattern="all", seq_len=T)


def test_linen_refuses_variables_and_fixed_options():
    _, params = linen_layer()
    for variables in ({"params": params}, flax.core.freeze({"params": params, "intermediates": {"x": jnp.ones(3)}})):
        with pytest.raises(ValueError, match=r"pass variables\['params'\]"):
            from_linen(variables, pattern="all", seq_len=T)
    with pytest.raises(ValueError, match="param_dtype must be a floating-point dtype, got 'int8'"):
        from_linen(params, pattern="all", seq_len=T, param_dtype="int8")
    with pytest.raises(ValueError, match="num_heads: comes from the parameters"):
        from_linen(params, pattern="all", seq_len=T, num_heads=2)


# --- GPT-2 -----------------------------------------------------------------------------------------------------------

G, LAYERS = 32, 2  # features of the stream


def gpt2_file(features=G, seed=0, layers=LAYERS, hidden=None, length=T):
    """Random weights under Hugging Face's names, in its layout, float32."""
    rng, hidden = np.random.default_rng(seed), hidden or 4 * features
    shapes = {"wte.weight": (V, features), "wpe.weight": (length, features), "ln_f": (features,)}
    for i in range(layers):
        shapes |= {f"h.{i}.ln_1": (features,), f"h.{i}.ln_2": (features,)}
        shapes |= {f"h.{i}.attn.c_attn": (features, 3 * features), f"h.{i}.attn.c_proj": (features, features)}
        shapes |= {f"h.{i}.mlp.c_fc": (features, hidden), f"h.{i}.mlp.c_proj": (hidden, features)}
    tensors = {}
    for name, shape in shapes.items():
        size = 1.0 if name.endswith("weight") else 1.5 * shape[0] ** -0.5
        if len(shape) == 1:
            tensors[f"{name}.weight"] = 1 + 0.3 * rng.normal(size=shape)
        else:
            tensors[name if name.endswith("weight") else f"{name}.weight"] = size * rng.normal(size=shape)
        if not name.endswith("weight"):
            tensors[f"{name}.bias"] = 0.3 * rng.normal(size=shape[-1:])
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def gpt2(p, tokens, masks, heads=2, epsilon=1e-5, xp=np):
    """GPT-2 from its description: p holds the file's tensors, masks one bool [T, T] or [heads, T, T] a layer.

    What may be a function of queries and keys [B, heads, T, H], too.
    """

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred / xp.sqrt(variance + epsilon) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def conv1d(x, name):  # Hugging Face's name of a linear layer with weights [in, out]
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["wte.weight"][tokens] + p["wpe.weight"][: tokens.shape[1]]
    for i, mask in enumerate(masks):
        qkv = xp.split(conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2) for y in qkv)
        logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        mask = mask(q, k) if callable(mask) else mask
        weights = xp.where(mask, xp.exp(logits - logits.max(-1, keepdims=True)), 0)
        out = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + conv1d(out.swapaxes(1, 2).reshape(x.shape), f"h.{i}.attn.c_proj")
        y = conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + xp.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + conv1d(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ p.get("lm_head.weight", p["wte.weight"]).T


def oracle(tensors, tokens, masks=(CAUSAL,) * LAYERS, **options):
    return gpt2({name: tensor.astype(np.float64) for name, tensor in tensors.items()}, tokens, masks, **options)


def tokens(length=T):
    return np.random.default_rng(5).integers(0, V, (2, length))


def write(folder, tensors):
    layers, sizes = (
        sum(name.endswith("ln_1.bias") for name in tensors),
        {"vocab_size": V, "n_positions": len(tensors["wpe.weight"]), "n_embd": G},
    )
    config = sizes | {"n_layer": layers, "n_head": 2, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"} | config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(path, patterns="all", **options):
    return from_huggingface(path, patterns, **{"fwd_params": BLOCKS} | options)


def test_gpt2_logits_are_the_dense_models(tmp_path):
    tensors = gpt2_file()
    model = load(write(tmp_path, tensors))
    expected = oracle(tensors, tokens())
    assert expected.std() > 1, "logits that are nearly nothing would prove nothing"
    np.testing.assert_allclose(run(model, tokens()), expected, atol=5e-5)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {"float32"}


def test_gpt2_as_a_file_alone(tmp_path):
    """Sizes are those of the tensors, heads those of all released sizes; a configuration beside it says otherwise."""
    tensors = gpt2_file(features=128)
    file = tmp_path / "gpt2.safetensors"
    safetensors.numpy.save_file({f"transformer.{name}": x for name, x in tensors.items()}, file)
    model = from_gpt2(file, **{"fwd_params": BLOCKS})
    assert (model.blocks[0].attention.num_heads, model.seq_len) == (2, T)
    np.testing.assert_allclose(run(model, tokens()), oracle(tensors, tokens(), heads=2), atol=1e-4)
    assert from_gpt2(file, num_heads=4, seq_len=8).blocks[0].attention.num_heads == 4
    configured = from_gpt2(write(tmp_path, gpt2_file()) / "model.safetensors")
    assert configured.blocks[0].attention.num_heads == 2  # of 16 features each
    (tmp_path / "config.json").unlink()
    safetensors.numpy.save_file({"other": np.ones(3, np.float32)}, file)
    with pytest.raises(ValueError, match=r"must have a matrix wte\.weight, got other"):
        from_gpt2(file)
    with pytest.raises(TypeError, match="path must be that of a model, got int"):
        from_gpt2(3)


@pytest.mark.parametrize("name", [*PATTERNS, "per layer", "per head"])
def test_gpt2_under_sparse_patterns(name, tmp_path):
    names, pairs = zip(*PATTERNS.values(), strict=True)
    patterns, masks = {
        "per layer": (names, pairs),
        "per head": ((names,), (np.stack(pairs),) * LAYERS),
    }.get(name) or (PATTERNS[name][0], (PATTERNS[name][1],) * LAYERS)
    tensors = gpt2_file()
    model = load(write(tmp_path, tensors), patterns=patterns)
    expected = oracle(tensors, tokens(), masks)
    assert np.abs(expected - oracle(tensors, tokens())).max() > 0.1
    np.testing.assert_allclose(run(model, tokens()), expected, atol=5e-5)


@pytest.mark.parametrize("name", ["all", "strided"])
def test_gpt2_gradients_are_the_dense_models(name, tmp_path):
    pattern, mask = PATTERNS.get(name, (name, CAUSAL))
    tensors, weights = gpt2_file(layers=1), inputs(2, T, V, seed=7)
    model = load(write(tmp_path, tensors), patterns=pattern)
    actual = nnx.jit(nnx.grad(lambda model: (model(tokens()) * weights).mean()))(model)
    expected = jax.jit(jax.grad(lambda p: (gpt2(p, tokens(), (mask,), xp=jnp) * weights).mean()))(tensors)
    # The gradient has the file's names: written as a file and loaded, it has the model's.
    (tmp_path / "gradient").mkdir()
    expected = load(write(tmp_path / "gradient", {name: np.array(g) for name, g in expected.items()}))
    actual, expected = nnx.to_pure_dict(actual), pure(expected)
    assert all(
        np.abs(g).max() > 1e-4 for path, g in nnx.traversals.flatten_mapping(actual).items() if "key" not in path
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


@pytest.mark.parametrize("names", [("window",), ("window", "strided")])
def test_gpt2_scanned_layers(names, tmp_path):
    patterns, masks = zip(*(PATTERNS[name] for name in names), strict=True)
    tensors = gpt2_file(layers=4)
    model = load(write(tmp_path, tensors), patterns=patterns, scan_layers=True, use_sinks=True)
    assert len(model.blocks) == len(names)
    plain = load(tmp_path, patterns=patterns)
    for i, (block, expected) in enumerate(zip(model.layers, plain.blocks, strict=True)):
        actual = pure(block)
        np.testing.assert_array_equal(actual["attention"].pop("sinks"), np.zeros(2), err_msg=str(i))
        jax.tree.map(np.testing.assert_array_equal, actual, pure(expected))
    no_sinks = load(tmp_path, patterns=patterns, scan_layers=True)
    expected = oracle(tensors, tokens(), masks * (4 // len(masks)))
    np.testing.assert_allclose(run(no_sinks, tokens()), expected, atol=1e-4)


def test_gpt2_scanned_layers_that_the_patterns_do_not_divide(tmp_path):
    file = write(tmp_path, gpt2_file(layers=3))
    with pytest.raises(ValueError, match="patterns must divide num_layers=3, got 2"):
        load(file, patterns=("all", "sliding_window:window=7"), scan_layers=True)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_gpt2_draws_from_rngs_for_dropout_only(scan_layers, tmp_path):
    file, options = write(tmp_path, gpt2_file()), {"scan_layers": scan_layers}

    def counts(rngs):
        return {name: int(stream.count[...]) for name, stream in rngs.items()}

    rngs = nnx.Rngs(3, params=1, dropout=2)
    load(file, rngs=rngs, **options)
    assert counts(rngs) == {"default": 0, "params": 0, "dropout": 0}
    load(file, rngs=rngs, dropout_rate=0.5, **options)
    assert counts(rngs) == {"default": 0, "params": 0, "dropout": 1}
    first, again, other = (
        run(load(file, rngs=nnx.Rngs(dropout=seed), dropout_rate=0.5, **options), tokens()) for seed in (2, 2, 3)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
    load(file, rngs=nnx.Rngs(dropout=2), **options)
    load(file, rngs=nnx.Rngs(params=2), **options)
    with pytest.raises(ValueError, match="rngs must have a stream 'dropout'"):
        load(file, rngs=nnx.Rngs(params=2), dropout_rate=0.5, **options)
