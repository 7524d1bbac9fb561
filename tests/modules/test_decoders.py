"""What today's decoders are made of: blocks of their shapes against formulas in float64, NNX, Linen and Haiku."""

import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax import traverse_util as flat

import sparse_layers as sl
import sparse_layers.haiku
import sparse_layers.linen
from sparse_layers.modules.activations import ACTIVATIONS, GATED_ACTIVATIONS
from tests.arrays import inputs, perturbed

T, F, N, K, H = 12, 16, 4, 2, 6
PATTERN = sl.Causal() & sl.Window(6)
BACK = np.arange(T)[:, None] - np.arange(T)
MASK = (BACK >= 0) & (BACK <= 6)
ROPE = sl.Rope(50.0, rotary_dim=4)

erf = np.vectorize(math.erf)
FUNCTIONS = {
    "gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "gelu_exact": lambda x: x / 2 * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "swiglu": lambda x: x / (1 + np.exp(-x)),
    jnp.tanh: np.tanh,
}
FUNCTIONS["geglu"] = FUNCTIONS["gelu_tanh"]
# The kernels are tested elsewhere, and this one compiles soonest.
SIZES = {"num_kv_heads": K, "rope": ROPE, "mlp_features": 20, "implementation": "reference"}
BLOCKS = {
    "Qwen 2.5": {"norm": "rms", "mlp": "swiglu", "use_bias": ("query", "key", "value")},
    "Qwen 3": {"norm": "rms", "mlp": "swiglu", "use_bias": False, "normalize_qk": True, "norm_epsilon": 1e-2},
    "Gemma": {"norm": "rms", "mlp": "geglu", "use_bias": False, "norm_placement": "sandwich", "normalize_qk": "rms"},
    "OLMo 2": {"norm": "rms", "mlp": "swiglu", "use_bias": False, "norm_placement": "post"}
    | {"normalize_qk": "rms_joint"},
    "GPT-NeoX": {"mlp": "gelu_exact", "parallel": True, "normalize_qk": True},
    "Nemotron": {"mlp": "relu2", "use_bias": ("value", "out", "mlp"), "normalize_qk": "layer", "norm_epsilon": 1e-2},
    "OPT": {"mlp": "relu"},
    "Granite": {"norm": "rms", "mlp": "swiglu", "use_bias": False, "residual_scale": 0.3},
    "a learned bias": {"mlp": "relu", "relative_bias": sl.LearnedBias(3, 1), "residual_scale": 0.5},
    "scaled, parallel": {"mlp": "gelu_tanh", "parallel": True, "norm_placement": "sandwich", "residual_scale": -2.0},
    "a function": {"mlp": jnp.tanh},
    "Command R": {"norm": "layer_no_bias", "mlp": "swiglu", "use_bias": False, "parallel": "shared_norm"}
    | {"normalize_qk": True},
}


def turned(x, positions):
    """Partial rotary embeddings in float64: x [T, N, H], of which the first four features turn."""
    angles = np.asarray(positions)[:, None, None] * ROPE.theta ** -(np.arange(2) / 2)
    a, b, rest = x[..., :2], x[..., 2:4], x[..., 4:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles), rest], axis=-1
    )


def formula(p, x, positions, options):
    """The block in float64: x [T, F]."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    epsilon = options.get("norm_epsilon", 1e-6)

    def normed(y, kind, name, p=p):
        if name not in p:
            return y
        y = y - y.mean(-1, keepdims=True) if kind.startswith("layer") else y
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + epsilon) * p[name]["scale"] + p[name].get("bias", 0)

    def linear(y, name, p=p):
        return np.tensordot(y, p[name]["kernel"], 1) + p[name].get("bias", 0)

    norm = options.get("norm", "layer")
    of_qk = options.get("normalize_qk")
    of_qk = norm.removesuffix("_no_bias") if of_qk is True else of_qk
    read, p_attention = normed(x, norm, "attention_norm"), p["attention"]
    q, k, v = (linear(read, name, p_attention) for name in ("query", "key", "value"))
    for name in ("query_ln", "key_ln") if of_qk else ():
        y = {"query_ln": q, "key_ln": k}[name]
        together = y.reshape(T, -1) if of_qk == "rms_joint" else y
        y = normed(together, "layer" if of_qk == "layer" else "rms", name, p_attention).reshape(y.shape)
        q, k = (y, k) if name == "query_ln" else (q, y)
    q, k = turned(q, positions), turned(k, positions)
    k, v = np.repeat(k, N // K, 1), np.repeat(v, N // K, 1)
    logits = np.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
    if "bias_table" in p_attention:
        logits = logits + p_attention["bias_table"][:, np.clip(3 - BACK, 0, 4)]
    weights = np.where(MASK, np.exp(logits), 0)
    out = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
    out = np.tensordot(out, p_attention["out"]["kernel"], 2) + p_attention["out"].get("bias", 0)
    scale = options.get("residual_scale", 1.0)
    y = x + scale * normed(out, norm, "attention_out_norm")
    mlp_norm = "attention_norm" if options.get("parallel") == "shared_norm" else "mlp_norm"
    read = normed(x if options.get("parallel") else y, norm, mlp_norm)
    mlp = FUNCTIONS[options["mlp"]]
    hidden = linear(read, "mlp_in")
    hidden = mlp(linear(read, "mlp_gate")) * hidden if "mlp_gate" in p else mlp(hidden)
    return y + scale * normed(linear(hidden, "mlp_out"), norm, "mlp_out_norm")


def perturbed_block(**options):
    options = SIZES | {"pattern": PATTERN, "seq_len": T, "head_dim": H, "rngs": nnx.Rngs(0)} | options
    block = sl.SparseTransformerBlock(N, F, **options)
    nnx.update(block, perturbed(nnx.state(block, nnx.Param)))
    return block


def pure(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


run = nnx.jit(lambda block, x, **given: block(x, **given))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_their_formulas(name):
    options, x = BLOCKS[name], inputs(T, F)
    block = perturbed_block(**options)
    params = pure(block)
    positions = np.array([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 9, 7])
    expected = formula(params, x, positions, options)
    np.testing.assert_allclose(run(block, x, positions=positions), expected, atol=2e-5)
    np.testing.assert_allclose(run(block, x), formula(params, x, np.arange(T), options), atol=2e-5)
    assert np.abs(expected - formula(params, x, np.arange(T), options)).max() > 1e-3

    # Linen has the same parameters, Haiku other names for them.
    settings = SIZES | options | {"pattern": PATTERN, "seq_len": T}
    linen = sl.linen.SparseTransformerBlock(N, F, head_dim=H, **settings)
    actual = jax.jit(linen.apply)({"params": params}, x, positions=jnp.asarray(positions))
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    shapes = jax.eval_shape(linen.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    if isinstance(options.get("use_bias", True), bool):
        settings["with_bias"] = settings.pop("use_bias", True)
        haiku = hk.without_apply_rng(
            hk.transform(lambda x, p: sl.haiku.SparseTransformerBlock(N, F, key_size=H, **settings)(x, positions=p))
        )
        shapes = jax.eval_shape(haiku.init, jax.random.key(0), x, positions)
        theirs = {path: of_haiku(params, path, shapes[path]) for path in shapes}
        np.testing.assert_allclose(jax.jit(haiku.apply)(theirs, x, positions), expected, atol=2e-5)


def of_haiku(params, path, shapes):
    """The parameters of a Haiku module, of the NNX module that it stands for."""
    own = params
    for part in path.replace("/~/", "/").split("/")[1:]:
        own = own["out" if part == "linear" else part]
    names = {"w": "kernel", "b": "bias", "scale": "scale", "offset": "bias", "bias_table": "bias_table"}
    return {name: own[names[name]].reshape(like.shape) for name, like in shapes.items()}


@pytest.mark.parametrize("name", ["Gemma", "OLMo 2", "Command R"])
def test_blocks_decode_as_they_compute(name):
    block, x = perturbed_block(**BLOCKS[name]), inputs(2, T, F)
    expected = run(block, x)
    lengths = np.array([5, 7])
    out, cache = nnx.jit(lambda block, x: block.prefill(x, lengths))(block, x)
    np.testing.assert_allclose(out[0, :5], expected[0, :5], atol=2e-5)
    step = nnx.jit(lambda block, x, cache, at: block.decode_step(x, cache, at))
    for i in range(3):
        at = lengths + i
        out, cache = step(block, x[np.arange(2), at], cache, at)
        np.testing.assert_allclose(out, expected[np.arange(2), at], atol=2e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_definitions(name):
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), FUNCTIONS[name](x), atol=1e-6)


@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
def test_gated_activations_are_their_definitions(name):
    gate, hidden = (x.ravel() for x in np.meshgrid(np.linspace(-9, 9, 31), np.linspace(-9, 9, 29)))
    actual = GATED_ACTIVATIONS[name](jnp.asarray(gate, jnp.float32), jnp.asarray(hidden, jnp.float32))
    if name == "clamped_swiglu":  # gpt-oss
        gate, hidden = np.minimum(gate, 7), np.clip(hidden, -7, 7)
        expected = gate / (1 + np.exp(-1.702 * gate)) * (hidden + 1)
    else:
        expected = FUNCTIONS[name](gate) * hidden
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_positions_of_packed_documents_and_of_left_padding():
    block, x = perturbed_block(norm="rms", mlp="swiglu"), inputs(T, F)
    ids, positions = np.array([0] * 5 + [1] * 7), np.array([*range(5), *range(7)])
    packed = run(block, x, segment_ids=ids, positions=positions)
    np.testing.assert_allclose(packed[5:], run(block, x[5:]), atol=1e-5)
    left = np.array([-1] * 3 + [0] * 9)
    padded = run(block, x, segment_ids=left, positions=np.maximum(np.arange(T) - 3, 0))
    np.testing.assert_allclose(padded[3:], run(block, x[3:]), atol=1e-5)


def test_the_native_sparse_block_takes_positions():
    pattern = "nsa:block=16,count=3,pool_size=8,pool_stride=8,sliding=8"
    options = {"pattern": pattern, "seq_len": 64, "use_bias": ("query", "out", "mlp"), "rngs": nnx.Rngs(0)}
    layer = sl.SparseTransformerBlock(2, F, rope=sl.Rope(), implementation="reference", **options).attention
    assert [name for name in ("query", "key", "value", "gate", "out") if "bias" in pure(layer)[name]] == [
        "query",
        "out",
    ]
    x = inputs(1, 64, F)
    plain = run(layer, x)
    np.testing.assert_allclose(run(layer, x, positions=7 + np.arange(64)), plain, atol=1e-4)
    assert np.abs(run(layer, x, positions=3 * np.arange(64)) - plain).max() > 1e-4


def test_any_module_as_mlp():
    def experts(rngs):
        return nnx.Sequential(nnx.Linear(F, 3, rngs=rngs), nnx.tanh, nnx.Linear(3, F, rngs=rngs))

    block, x = perturbed_block(make_mlp=experts), inputs(T, F)
    assert block.mlp_in is block.mlp_gate is block.mlp_out is None
    y = x + run_attention(block, x)
    added = nnx.jit(lambda block, y: block.mlp_module(block.mlp_norm(y)))(block, y)
    np.testing.assert_allclose(run(block, x), y + added, atol=1e-5)
    scanned = nnx.eval_shape(lambda: model(make_mlp=experts, scan_layers=True, changed=False))
    assert pure(scanned)["blocks"][0]["mlp_module"]["layers"][0]["kernel"].shape == (4, F, 3)

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(F)(x)

    linen = sl.linen.SparseTransformerBlock(N, F, pattern=PATTERN, seq_len=T, make_mlp=Mlp)
    params = jax.eval_shape(linen.init, jax.random.key(0), x)["params"]
    assert params["mlp_module"]["Dense_0"]["kernel"].shape == (F, F) and "mlp_in" not in params


def run_attention(block, x):
    return nnx.jit(lambda block, x: block.attention(block.attention_norm(x)))(block, x)


def test_initializers_of_all_matrices():
    def constant(value):
        return nnx.initializers.constant(value)

    model = sl.SparseTransformer(
        9,
        N,
        F,
        1,
        patterns="msa:block=16,count=2",
        seq_len=T,
        mlp="swiglu",
        positions="learned",
        kernel_init=constant(1),
        bias_init=constant(2),
        out_kernel_init=constant(3),
        embedding_init=constant(4),
        head_init=constant(5),
        rngs=nnx.Rngs(0),
    )
    out = {("attention", "out", "kernel"), ("mlp_out", "kernel")}
    for path, value in flat.flatten_dict(pure(model)).items():
        where = path[2:] if path[0] == "blocks" else path
        if "norm" in "".join(map(str, path)):
            continue
        wanted = {"kernel": 1, "bias": 2, "embedding": 4}[path[-1]]
        wanted = 3 if where in out else 5 if path[0] == "head" else wanted
        np.testing.assert_array_equal(value, wanted, err_msg=str(path))


# --- the model -------------------------------------------------------------------------------------------------------

V = 20
ROPES = (sl.Rope(50.0), None, sl.Rope(2000.0, scaling=sl.LinearScaling(4.0)))


def model(layers=4, changed=True, **options):
    options = {"patterns": PATTERN, "seq_len": T, "positions": "rope", "implementation": "reference"} | options
    made = sl.SparseTransformer(V, N, F, layers, head_dim=H, rngs=nnx.Rngs(0), **options)
    if changed:
        nnx.update(made, perturbed(nnx.state(made, nnx.Param)))
    return made


def test_embedding_scale_and_soft_cap():
    tokens = np.arange(T) % V
    plain = model(1, tie_embeddings=True)
    gemma = model(1, tie_embeddings=True, embedding_scale=F**0.5, final_soft_cap=1.5)
    scaled = pure(plain)
    scaled["token_embedding"]["embedding"] = scaled["token_embedding"]["embedding"] * F**0.5
    nnx.update(plain, scaled)
    logits = np.asarray(run(plain, tokens)) / F**0.5  # the head is not scaled
    np.testing.assert_allclose(run(gemma, tokens), 1.5 * np.tanh(logits / 1.5), atol=1e-5)
    assert np.abs(logits).max() > 1


def test_scales_of_granite():
    """The scale of logits comes before their soft cap; that of branches also holds while decoding."""
    tokens = np.arange(T) % V
    scaled = model(1, logits_scale=0.25, final_soft_cap=1.5)
    logits = np.asarray(run(model(1), tokens))
    np.testing.assert_allclose(run(scaled, tokens), 1.5 * np.tanh(logits / 4 / 1.5), atol=1e-5)
    granite = model(2, residual_scale=0.3, logits_scale=4.0)
    assert np.abs(run(granite, tokens) - 4 * run(model(2), tokens)).max() > 0.1
    expected = run(granite, tokens)
    last, caches = granite.prefill(jnp.asarray(tokens[None, :-1]))
    np.testing.assert_allclose(last[0], expected[-2], atol=1e-4)
    step, _ = granite.decode_step(jnp.asarray(tokens[-1:]), caches, jnp.array([T - 1]))
    np.testing.assert_allclose(step[0], expected[-1], atol=1e-4)


def test_ropes_and_patterns_cycle_over_layers():
    def ropes_of(**options):
        made = nnx.eval_shape(lambda: model(changed=False, **options))
        return [block.attention.attention_fn.rope for block in made.blocks]

    assert ropes_of(layers=5, rope=ROPES) == [*ROPES, *ROPES[:2]]
    assert ropes_of(rope=(None,)) == [None] * 4
    assert ropes_of(layers=6, rope=ROPES, scan_layers=True) == list(ROPES)
    assert ropes_of(layers=6, rope=ROPES, patterns=(PATTERN, "all"), scan_layers=True) == [*ROPES, *ROPES]

    scanned = model(2, rope=ROPES[:2], scan_layers=True)
    one = scanned.unrolled()
    tokens, positions = np.arange(2 * T).reshape(2, T) % V, np.array([*range(5), *range(7)])
    found = run(scanned, tokens, positions=positions)
    np.testing.assert_allclose(found, run(one, tokens, positions=positions), atol=1e-4)
    assert np.abs(found - run(scanned, tokens)).max() > 1e-2


def test_a_bidirectional_model_reads_what_follows():
    encoder, tokens = model(2, patterns=sl.Window(2, 2), causal=False, rope=sl.Rope()), np.arange(T) % V
    changed = tokens.copy()
    changed[T - 1] = 7
    assert np.abs(run(encoder, tokens) - run(encoder, changed))[: T - 1].max() > 1e-3, (
        "and layers reach two tokens each"
    )
    with pytest.raises(ValueError, match="causal"):
        encoder.prefill(tokens[None])
