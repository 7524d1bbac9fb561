"""SparseSelfAttention: Flax's parameters, the mask's mathematics, and refusals at construction."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules import options as layer_options
from tests.arrays import inputs, perturbed

T, F, N = 24, 16, 4
BLOCKS = sl.FwdParams(q_blocksize=8, kv_blocksize=8)  # so that 24 tokens are several blocks
MASKS = {
    "causal": sl.Causal(),
    "union": sl.Causal() & (sl.Window(3) | sl.Strided(5)),
    "per head": (sl.Window(4), sl.Causal() & sl.Strided(4)),
    "both ways": sl.Window(2, 2) | sl.Global(2),
    "empty rows": sl.Causal() & sl.Columns(6, 3),
}


@nnx.jit
def run(layer, x, segment_ids=None):
    return layer(x, segment_ids=segment_ids)


def make(pattern="all", seq_len=T, num_heads=N, seed=0, **options):
    options = {"fwd_params": BLOCKS} | options
    return sl.SparseSelfAttention(num_heads, F, pattern=pattern, seq_len=seq_len, rngs=nnx.Rngs(seed), **options)


def varied(layer):
    """The layer with parameters away from their initial zeros and ones."""
    nnx.update(layer, perturbed(nnx.state(layer, nnx.Param)))
    return layer


def dense(layer, x, mask, segment_ids=None, cap=None, scale=None, theta=None, shape=(T,), distances=None):
    """The layer in float64 numpy, one head at a time: [B, T, F] -> [B, T, F]; mask is bool [N, T, T].

    ``distances`` are indices of the bias table [T, T], or a bias [N, T, T] of a layer without one.
    """
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    x = np.asarray(x, np.float64)
    q, k, v = (
        np.einsum("btf,fnh->bnth", x, p[name]["kernel"]) + p[name]["bias"][:, None, :]
        for name in ("query", "key", "value")
    )
    if "query_ln" in p:

        def norm(y, weight):
            centred = y - y.mean(-1, keepdims=True)
            return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight

        q, k = norm(q, p["query_ln"]["scale"]), norm(k, p["key_ln"]["scale"])
    size, group = q.shape[-1], q.shape[1] // k.shape[1]
    if theta is not None:  # a pair of features is a complex number, and a position a rotation
        pairs = size // 2 // len(shape)
        places = np.stack(np.unravel_index(np.arange(x.shape[1]), shape), -1)[:, :, None]
        turn = np.exp(1j * (places * theta ** (-np.arange(pairs) / pairs)).reshape(-1, size // 2))

        def rotate(y):
            z = (y[..., : size // 2] + 1j * y[..., size // 2 :]) * turn
            return np.concatenate([z.real, z.imag], -1)

        q, k = rotate(q), rotate(k)
    out = np.zeros(x.shape)
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head // group].swapaxes(-1, -2) * (size**-0.5 if scale is None else scale)
        if distances is not None:
            logits = logits + (
                p["bias_table"].reshape(N, -1)[head, distances] if "bias_table" in p else distances[head]
            )
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        allowed = np.broadcast_to(mask[head], logits.shape)
        if segment_ids is not None:
            same = segment_ids[:, :, None] == segment_ids[:, None, :]
            allowed = allowed & same & (segment_ids >= 0)[:, :, None]
        weights = np.where(allowed, np.exp(logits), 0)
        total = weights.sum(-1, keepdims=True) + (np.exp(p["sinks"][head]) if "sinks" in p else 0)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        attended = weights @ v[:, head // group]
        if "out_gate" in p:
            attended = attended / (1 + np.exp(-x @ p["out_gate"]["kernel"][:, head] - p["out_gate"]["bias"][head]))
        out += attended @ p["out"]["kernel"][head]
    return out + p["out"]["bias"]


def stacked(mask, length=T):
    masks = sl.as_masks(mask)
    return np.stack([masks[h % len(masks)].dense(length) for h in range(N)])


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
@pytest.mark.parametrize("normalize_qk", [False, True])
def test_state_of_a_dense_flax_layer_loads_unchanged(num_kv_heads, normalize_qk):
    options = {"num_kv_heads": num_kv_heads, "normalize_qk": normalize_qk}
    flax_layer = varied(nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(3), **options))
    layer = make(sl.Causal(), **options)
    x = inputs(2, T, F)
    expected = nnx.jit(lambda layer, x: layer(x, mask=nnx.make_causal_mask(x[..., 0])))(flax_layer, x)
    assert np.abs(run(layer, x) - expected).max() > 0.1
    assert jax.tree.structure(nnx.state(layer)) == jax.tree.structure(nnx.state(flax_layer))
    nnx.update(layer, nnx.state(flax_layer))
    np.testing.assert_allclose(run(layer, x), expected, atol=3e-6)


def test_initial_parameters_equal_those_of_flax():
    options = {"kernel_init": nnx.initializers.normal(0.1), "use_bias": False}
    ours, theirs = make(**options), nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(0), **options)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs))


@pytest.mark.parametrize("name", MASKS)
def test_equals_dense_attention_under_the_mask(name):
    layer, x = varied(make(MASKS[name], num_kv_heads=2)), inputs(2, T, F)
    np.testing.assert_allclose(run(layer, x), dense(layer, x, stacked(MASKS[name])), atol=1e-5)


BACK = np.arange(T)[:, None] - np.arange(T)
ROWS, COLUMNS = (np.clip(x - x[:, None] + 2, 0, 4) for x in np.divmod(np.arange(T), 6))  # of a grid of 4 x 6


@pytest.mark.parametrize(
    "options, facts",
    [
        ({"relative_bias": sl.AlibiBias()}, {"distances": -BACK * 4.0 ** -np.arange(1, N + 1)[:, None, None]}),
        (
            {"relative_bias": sl.T5Bias(False, num_buckets=4, max_distance=9), "scale": 1.0, "logits_soft_cap": 0.5},
            {"distances": np.digitize(BACK, [1, 2, 5]), "scale": 1.0, "cap": 0.5},
        ),
        ({"relative_bias": sl.LearnedBias(4, 2)}, {"distances": np.clip(4 - BACK, 0, 6)}),
        ({"relative_bias": sl.GridBias((4, 6), size=3)}, {"distances": 5 * ROWS + COLUMNS}),
        ({"rope_theta": 100.0, "normalize_qk": True}, {"theta": 100.0}),
        ({"rope": sl.Rope(100.0, (4, 6))}, {"theta": 100.0, "shape": (4, 6)}),
        ({"use_sinks": True}, {}),
        ({"gate_output": True}, {}),
        ({"gate_output": "headwise", "num_kv_heads": 2}, {}),
        ({"logits_soft_cap": 0.5}, {"cap": 0.5}),
        ({"scale": 0.9}, {"scale": 0.9}),
        ({"implementation": "reference"}, {}),
    ],
)
def test_options_do_what_they_say(options, facts):
    mask = MASKS["union"]
    layer, x = varied(make(mask, **options)), inputs(1, T, F)
    np.testing.assert_allclose(run(layer, x), dense(layer, x, stacked(mask), **facts), atol=1e-5)


def test_a_gate_has_the_sizes_and_the_bias_that_it_needs():
    def shapes(**options):
        gate = make(param_dtype=jnp.bfloat16, **options).out_gate
        return {name: (leaf.shape, leaf.dtype) for name, leaf in nnx.to_pure_dict(nnx.state(gate)).items()}

    assert make().out_gate is None
    assert shapes(gate_output="elementwise") == {"kernel": ((F, N, 4), "bfloat16"), "bias": ((N, 4), "bfloat16")}
    assert shapes(gate_output="headwise", use_bias=("key", "out")) == {"kernel": ((F, N, 1), "bfloat16")}
    # A new option draws its numbers last: the other parameters are those of a layer without it.
    plain, gated = (nnx.to_pure_dict(nnx.state(make(**options))) for options in ({}, {"gate_output": True}))
    del gated["out_gate"]
    jax.tree.map(np.testing.assert_array_equal, plain, gated)


def test_gradient_reaches_every_parameter_and_equals_finite_differences():
    options = {"use_sinks": True, "gate_output": True, "normalize_qk": True, "rope": sl.Rope(50.0, (6, 4))}
    options["relative_bias"] = sl.LearnedBias(4)
    layer, x = varied(make(MASKS["union"], **options)), inputs(1, T, F)
    graphdef, params = nnx.split(layer)
    weights = inputs(1, T, F, seed=5)

    def loss(params):
        return (nnx.merge(graphdef, params)(x) * weights).sum()

    grads = jax.jit(jax.grad(loss))(params)
    direction = jax.tree.map(lambda g: inputs(*g.shape, seed=g.size), grads)

    def dense_loss(step):
        moved = jax.tree.map(lambda p, d: np.asarray(p, np.float64) + step * np.asarray(d), params, direction)
        distances = np.clip(4 - BACK, 0, 4)
        out = dense(moved, x, stacked(MASKS["union"]), theta=50.0, shape=(6, 4), distances=distances)
        return float((out * np.asarray(weights)).sum())

    slope = (dense_loss(1e-5) - dense_loss(-1e-5)) / 2e-5
    found = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), grads, direction)))
    assert found == pytest.approx(slope, rel=1e-4)
    # A bias of the keys moves all logits of a query alike, but QK norm and RoPE follow it: nothing is without effect.
    assert all(float(jnp.abs(g).max()) > 1e-4 for g in jax.tree.leaves(grads))


def test_any_leading_batch_dimensions():
    layer, x = make(MASKS["union"]), inputs(2, 3, T, F)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 3, T)))
    out = run(layer, x, ids)
    assert out.shape == x.shape
    np.testing.assert_allclose(out[1, 2], run(layer, x[1, 2], ids[1, 2]), atol=1e-6)


def test_keys_outside_a_selection_are_hidden():
    layer, x = varied(make(MASKS["union"], num_kv_heads=2)), inputs(2, 3, T, F)
    ids = np.random.default_rng(0).integers(-1, 2, (2, 3, 2, 2, 1))  # of blocks of 16, by key head
    chosen = sl.Selection(ids, block=16, granularity=16)
    out = nnx.jit(lambda layer, x, chosen: layer(x, selection=chosen))(layer, x, chosen)
    for i in ((0, 0), (1, 2)):
        pairs = (ids[i].swapaxes(0, 1) == np.arange(2)).repeat(16, 1).repeat(16, 2)[:, :T, :T].repeat(2, 0)
        np.testing.assert_allclose(out[i], dense(layer, x[i][None], pairs & stacked(MASKS["union"]))[0], atol=1e-5)


@pytest.mark.parametrize("pattern", ["union", "per head", "array"])
def test_shorter_inputs_see_the_upper_left_corner(pattern):
    mask = np.tril(np.random.default_rng(0).random((T, T)) < 0.5) if pattern == "array" else MASKS[pattern]
    layer = varied(make(mask))
    for length in (1, 17):
        x = inputs(1, length, F)
        expected = dense(layer, x, stacked(mask)[:, :length, :length])
        np.testing.assert_allclose(run(layer, x), expected, atol=1e-5)


def test_segments_are_isolated_and_padding_is_inert():
    ids = np.array([[0] * 9 + [1] * 8 + [-1] * 7])
    layer, x = varied(make(MASKS["union"])), inputs(1, T, F)
    expected = dense(layer, x, stacked(MASKS["union"]), segment_ids=ids)
    np.testing.assert_allclose(run(layer, x, jnp.asarray(ids)), expected, atol=1e-5)
    weights = inputs(F, seed=2)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x, segment_ids=jnp.asarray(ids))[0] @ weights))(x)
    influence = np.abs(jacobian[:, 0]).sum(-1) > 0
    np.testing.assert_array_equal(influence[:, ids[0] == -1], False)
    np.testing.assert_array_equal(influence[ids[0] == -1], False)
    np.testing.assert_array_equal(influence[9:17, :9], False)
    assert influence[16, 9:17].any() and influence[8, :9].any()


def test_pattern_and_plan_are_attributes_and_not_state():
    array = np.tril(np.ones((T, T), bool))
    assert make("sliding_window:window=4").pattern == "sliding_window:window=4"
    assert make(array).pattern == sl.as_masks(array)
    assert make(("all", sl.Window(3))).pattern == (sl.Causal(), sl.Window(3))
    layer = make(("all", "local:local_attn_ctx=4"))
    assert layer.plan is sl.make_plan((sl.Causal(), sl.Window(3)), T, T, fwd_params=BLOCKS)
    assert not [path for path, _ in nnx.to_flat_state(nnx.state(make(array))) if "pattern" in path]


def taken(function, *options):
    """The names that a class or function takes, those that it hands on included."""
    parameters = inspect.signature(getattr(function, "__init__", function)).parameters.keys() - {"self", "options"}
    return parameters.union(*(kind.__optional_keys__ for kind in options))


def test_options_that_are_handed_on_are_taken_where_they_go():
    flax, layer = taken(nnx.MultiHeadAttention), taken(sl.SparseSelfAttention, layer_options.SelfAttentionOptions)
    assert flax - layer == {"in_kv_features", "attention_fn"}
    assert layer_options.LayerOptions.__optional_keys__ <= flax - taken(sl.SparseSelfAttention)
    block = taken(sl.SparseTransformerBlock, layer_options.AttentionOptions)
    model = taken(sl.SparseTransformer, layer_options.BlockOptions)
    assert layer_options.AttentionOptions.__optional_keys__ <= layer - taken(sl.SparseTransformerBlock)
    assert layer_options.BlockOptions.__optional_keys__ <= block - taken(sl.SparseTransformer)
    assert layer_options.LoadedLayerOptions.__optional_keys__ <= layer
    assert layer_options.LoadedModelOptions.__optional_keys__ <= model
    # What a block does not let through it sets itself.
    assert layer - block == {"in_features", "out_features", "decode"}
    assert block - model == {"pattern"}


def test_head_dim_is_qkv_features_said_directly():
    sizes = {"pattern": "all", "seq_len": T, "rngs": nnx.Rngs(0)}
    block = sl.SparseTransformerBlock(N, F, head_dim=6, **sizes)
    model = sl.SparseTransformer(8, N, F, 1, patterns="all", seq_len=T, head_dim=6, rngs=nnx.Rngs(0))
    agreeing = make(head_dim=6, qkv_features=6 * N)
    for layer in (make(head_dim=6), make(qkv_features=6 * N), agreeing, block.attention, model.blocks[0].attention):
        assert layer.head_dim == 6 and layer.qkv_features == 6 * N
        assert layer.query.kernel.shape == (F, N, 6) and layer.out.kernel.shape == (N, 6, F)


def test_a_layer_shows_its_pattern_in_one_line():
    layer = make("strided:local_attn_ctx=4")
    line = (
        "SparseSelfAttention(num_heads=4, num_kv_heads=4, head_dim=4, in_features=16, "
        "pattern='strided:local_attn_ctx=4', seq_len=24)"
    )
    assert repr(layer) == line
    selecting = repr(make("causal", selection="moba:block=16,count=3"))
    assert "pattern='causal', selection=MoBA(block=16, count=3, " in selecting and selecting.endswith(", seq_len=24)")
    wide = np.tril(np.ones((T, T), bool))
    assert len(repr(make(wide))) < 200, "an array does not flood it"
    assert "relative_bias=LearnedBias(left=3, right=0), seq_len=24)" in repr(make(relative_bias=sl.LearnedBias(3)))
    block = sl.SparseTransformerBlock(N, F, pattern="all", seq_len=T, rngs=nnx.Rngs(0))
    assert "\n  attention=SparseSelfAttention(num_heads=4, " in repr(block) and "pattern='all', seq_len=24)" in repr(
        block
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_compute_with_float32_parameters(dtype):
    layer, x = varied(make(MASKS["union"], dtype=dtype, normalize_qk=True, rope_theta=100.0)), inputs(1, T, F)
    out = run(layer, x)
    assert out.dtype == dtype
    assert {p.dtype for p in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(
        out.astype(jnp.float32), dense(layer, x, stacked(MASKS["union"]), theta=100.0), atol=64 * jnp.finfo(dtype).eps
    )


def test_equal_settings_share_one_trace():
    options = {"rope_theta": 100.0, "use_sinks": True}
    layers = [make(sl.Causal() & (sl.Window(3) | sl.Strided(5)), seed=seed, **options) for seed in (0, 1)]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])
    assert hash(nnx.graphdef(layers[0])) == hash(nnx.graphdef(layers[1]))
    assert nnx.graphdef(layers[0]) != nnx.graphdef(make(sl.Window(3), **options))
    traces = []

    @nnx.jit
    def counted(layer, x):
        traces.append(x.shape)
        return layer(x)

    x = inputs(1, T, F)
    outs = [counted(layer, x) for layer in layers * 2]
    assert len(traces) == 1
    np.testing.assert_array_equal(outs[0], outs[2])
    assert np.abs(outs[0] - outs[1]).max() > 0.1


def test_vmap_over_stacked_layers_and_over_the_batch():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return sl.SparseSelfAttention(N, F, pattern=MASKS["union"], seq_len=T, use_sinks=True, rngs=rngs)

    layers, x = create(nnx.Rngs(0)), inputs(3, 2, T, F)
    out = nnx.jit(nnx.vmap(lambda layer, x: layer(x)))(layers, x)
    graphdef, state = nnx.split(layers)
    for i in range(3):
        layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        np.testing.assert_allclose(out[i], run(layer, x[i]), atol=1e-5)
    np.testing.assert_allclose(out[2], jax.jit(jax.vmap(layer))(x[2]), atol=1e-5)


def test_rotary_depends_on_distance_only():
    q, k = inputs(1, 1, 8), inputs(1, 1, 8, seed=1)
    product = jnp.einsum("tnh,snh->ts", *(sl.Rope(100.0)(jnp.repeat(x, 12, 0)) for x in (q, k)))
    for distance in (0, 1, 5):
        np.testing.assert_allclose(np.diagonal(product, distance), product[0, distance], atol=1e-5)
    assert abs(float(product[0, 1] - product[1, 0])) > 1e-3
    assert sl.Rope()(q.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "options, words",
    [
        ({"pattern": "stridde"}, ["stridde", "strided"]),
        ({"pattern": ("all", "local", sl.Window(2))}, ["3 entries", "num_heads=4", "divide"]),
        ({"pattern": np.ones((T, T + 1), bool)}, [f"seq_len={T}", str((T, T + 1))]),
        ({"pattern": np.ones((3, T, T), bool) & (np.arange(3)[:, None, None] > 1)}, ["3 entries", "num_heads=4"]),
        ({"pattern": np.ones((T, T), np.float32)}, ["bool", "float32"]),
        ({"seq_len": 0}, ["seq_len", "0"]),
        ({"dropout_rate": 0.1}, ["dropout_rate", "0.1", "residual"]),
        ({"rope_theta": 1e4, "qkv_features": 12}, ["rope", "2 must divide head_dim", "3"]),
        ({"rope_theta": 0.0}, ["rope_theta", "> 0", "0.0"]),
        ({"num_kv_heads": 3}, ["num_heads", "3"]),
        ({"logits_soft_cap": -1.0}, ["logits_soft_cap", "-1.0"]),
        ({"implementation": "cuda"}, ["implementation", "cuda", "xla"]),
    ],
)
def test_wrong_settings_are_refused_at_construction(options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_wrong_calls_are_refused():
    layer, x = make(), inputs(2, T + 1, F)
    with pytest.raises(ValueError, match=f"{T + 1} tokens.*seq_len={T}"):
        layer(x)
    x = x[:, :T]
    with pytest.raises(ValueError, match=r"segment_ids .*\(2, 24\), got shape \(2, 1\)"):
        layer(x, segment_ids=jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"segment_ids.*integers.*float32"):
        layer(x, segment_ids=jnp.zeros((2, T)))
    with pytest.raises(ValueError, match="sow_weights must be False, got True"):
        layer(x, sow_weights=True)
    with pytest.raises(ValueError, match=r"\[\.\.\., T, 16\], got \(16,\)"):
        layer(x[0, 0])
    with pytest.raises(NotImplementedError, match="decode=True"):
        layer(x, decode=True)
    with pytest.raises(NotImplementedError, match="decode=True"):
        make(decode=True)
