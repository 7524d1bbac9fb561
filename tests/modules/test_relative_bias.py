"""Relative biases of layers: those of Hugging Face's library, shared tables, calls with a bias, and their values."""

import functools
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs
from tests.ops.cases import compiled

FILE = pathlib.Path(__file__).parent / "fixtures" / "relative_bias.npz"
T, F, N = 12, 8, 2
T5 = sl.T5Bias(bidirectional=True, num_buckets=8, max_distance=16)
SIZES = {"seq_len": T, "implementation": "reference"}  # which compiles soonest


# --- layers of Hugging Face's library, see make_bias_fixtures.py ---------------------------------------------------


def fixture(name):
    with np.load(FILE) as arrays:
        return {key.removeprefix(f"{name}."): x for key, x in arrays.items() if key.startswith(f"{name}.")}


def linear(arrays, name, shape=None):
    kernel = arrays[f"{name}.weight"].T
    bias = {"bias": arrays[f"{name}.bias"]} if f"{name}.bias" in arrays else {}
    if shape is None or len(shape) == 3:  # an output
        return {"kernel": kernel if shape is None else kernel.reshape(shape)} | bias
    return {"kernel": kernel.reshape(-1, *shape)} | {key: x.reshape(shape) for key, x in bias.items()}


def norm(arrays, name):
    return {"scale": arrays[f"{name}.weight"]} | {
        key: arrays[f"{name}.{key}"] for key in ("bias",) if f"{name}.{key}" in arrays
    }


def agree(module, params, arrays, gradient=None):
    """The module's outputs are those of the fixture, and so is the gradient of ``bias_table`` in params."""
    nnx.update(module, params)
    graph, state = nnx.split(module)

    @compiled
    def run(state, x):
        out, pullback = jax.vjp(lambda state: nnx.merge(graph, state)(x), state)
        return out, pullback(3 * out**2)[0]

    out, gradients = run(state, arrays["x"])
    np.testing.assert_allclose(out, arrays["out"], atol=2e-5)
    if gradient is not None:
        (ours,) = (x for path, x in nnx.to_flat_state(gradients) if path[-1] == "bias_table")
        np.testing.assert_allclose(ours[...], gradient, atol=1e-4 * abs(gradient).max())


def t5_attention(arrays, prefix):
    names = {"query": "q", "key": "k", "value": "v"}
    heads = {ours: linear(arrays, f"{prefix}{name}", (4, 6)) for ours, name in names.items()}
    return heads | {"out": linear(arrays, f"{prefix}o", (4, 6, 16))}


def test_the_encoder_of_t5():
    """Two layers with one table."""
    arrays = fixture("t5_encoder")
    options = {"head_dim": 6, "mlp_features": 24, "mlp": "relu", "norm": "rms", "use_bias": False, "scale": 1.0}
    options |= {"patterns": sl.Full(), "causal": False, "seq_len": 24, "positions": "none", "rngs": nnx.Rngs(0)}
    model = sl.SparseTransformer(16, 4, 16, 2, relative_bias=T5, share_relative_bias=True, **options)

    def block(layer):
        attention, mlp = (f"encoder.block.{layer}.layer.{i}." for i in (0, 1))
        return {
            "attention": t5_attention(arrays, f"{attention}SelfAttention."),
            "attention_norm": norm(arrays, f"{attention}layer_norm"),
            "mlp_norm": norm(arrays, f"{mlp}layer_norm"),
            "mlp_in": linear(arrays, f"{mlp}DenseReluDense.wi"),
            "mlp_out": linear(arrays, f"{mlp}DenseReluDense.wo"),
        }

    params = {"blocks": {layer: block(layer) for layer in range(2)}}
    params["token_embedding"] = {"embedding": arrays["shared.weight"]}
    params["bias_table"] = arrays["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].T
    params |= {"final_norm": norm(arrays, "encoder.final_layer_norm"), "head": {"kernel": np.eye(16)}}
    agree(model, params, arrays, arrays["gradient"].T)


def test_the_decoder_of_t5():
    arrays = fixture("t5_decoder")
    bias = sl.T5Bias(bidirectional=False, num_buckets=8, max_distance=16)
    options = {"head_dim": 6, "use_bias": False, "scale": 1.0, "relative_bias": bias, "seq_len": 24}
    layer = sl.SparseSelfAttention(4, 16, pattern="causal", **options, rngs=nnx.Rngs(0))
    params = t5_attention(arrays, "") | {"bias_table": arrays["relative_attention_bias.weight"].T}
    agree(layer, params, arrays, arrays["gradient"].T)


def test_a_block_of_bloom():
    """Six heads: no power of two."""
    arrays = fixture("bloom")
    options = {"mlp": "gelu_tanh", "norm_epsilon": 1e-5, "relative_bias": sl.AlibiBias(), "seq_len": 24}
    block = sl.SparseTransformerBlock(6, 24, pattern="causal", **options, rngs=nnx.Rngs(0))
    weight, bias = (arrays[f"self_attention.query_key_value.{name}"] for name in ("weight", "bias"))
    attention = {"out": linear(arrays, "self_attention.dense", (6, 4, 24))}
    for i, name in enumerate(("query", "key", "value")):
        kernel = weight.reshape(6, 3, 4, 24)[:, i].transpose(2, 0, 1)
        attention[name] = {"kernel": kernel, "bias": bias.reshape(6, 3, 4)[:, i]}
    params = {
        "attention": attention,
        "attention_norm": norm(arrays, "input_layernorm"),
        "mlp_norm": norm(arrays, "post_attention_layernorm"),
        "mlp_in": linear(arrays, "mlp.dense_h_to_4h"),
        "mlp_out": linear(arrays, "mlp.dense_4h_to_h"),
    }
    agree(block, params, arrays)


def test_a_layer_of_swin():
    """Shifted windows; Swin's table counts distances from key to query, so it is read backwards."""
    arrays, shape = fixture("swin"), (8, 12)
    options = {"mlp": "gelu_exact", "norm_epsilon": 1e-5, "relative_bias": sl.GridBias(shape, size=4), "seq_len": 96}
    windows = sl.preset("windows", shape=shape, size=4, shift=2)
    block = sl.SparseTransformerBlock(2, 16, pattern=windows, **options, rngs=nnx.Rngs(0))

    def table(x):
        return x[::-1].T.reshape(2, 7, 7)

    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    attention = {ours: linear(arrays, f"attention.{name}", (2, 8)) for ours, name in names.items()}
    attention["out"] = linear(arrays, "attention.o_proj", (2, 8, 16))
    attention["bias_table"] = table(arrays["attention.relative_position_bias.relative_position_bias_table"])
    params = {
        "attention": attention,
        "attention_norm": norm(arrays, "layernorm_before"),
        "mlp_norm": norm(arrays, "layernorm_after"),
        "mlp_in": linear(arrays, "mlp.fc1"),
        "mlp_out": linear(arrays, "mlp.fc2"),
    }
    agree(block, params, arrays, table(arrays["gradient"]))


# --- tables that layers share --------------------------------------------------------------------------------------


def test_a_shared_table_gets_the_sum_of_the_layers_gradients():
    options = {"patterns": "causal", "positions": "none", "relative_bias": sl.LearnedBias(4), **SIZES}
    tokens, rng, values = jnp.arange(T) % 5, np.random.default_rng(0), {}

    def gradients(**more):
        """Returns the gradients of the tables of a model, whose parameters have the same values by path."""
        model = nnx.eval_shape(lambda: sl.SparseTransformer(5, N, F, 2, **options, **more, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model, nnx.Param)

        def value(path, shape):
            path = "bias_table" if path[-1] == "bias_table" else path
            return values.setdefault(path, rng.normal(size=shape).astype(np.float32))

        def stacked(path, shape):
            if path[0] != "blocks" or not model.scan_layers:
                return value(path, shape)
            return np.stack([value(("blocks", layer, *path[2:]), shape[1:]) for layer in range(2)])

        flat = [(path, param.replace(stacked(path, param.shape))) for path, param in nnx.to_flat_state(params)]
        answer = jax.grad(lambda params: (nnx.merge(graph, params)(tokens) ** 2).sum())(nnx.from_flat_state(flat))
        return [x[...] for path, x in nnx.to_flat_state(answer) if path[-1] == "bias_table"]

    def all_gradients():
        shared = {"share_relative_bias": True}
        return gradients(), gradients(**shared), gradients(**shared, scan_layers=True, remat=True)

    (first, second), *shared = compiled(all_gradients)()
    for (gradient,) in shared:
        np.testing.assert_allclose(gradient, first + second, rtol=1e-4, atol=1e-4 * abs(first + second).max())
    assert min(abs(first).max(), abs(second).max()) > 1e-2


def test_layers_of_a_mixer_get_no_shared_bias():
    patterns = ("causal", sl.Mixer(lambda rngs: nnx.Linear(F, F, rngs=rngs)))
    options = {"relative_bias": T5, "share_relative_bias": True, "positions": "none", **SIZES}
    model = sl.SparseTransformer(5, N, F, 2, patterns=patterns, **options, rngs=nnx.Rngs(0))
    assert jax.eval_shape(nnx.jit(lambda model: model(jnp.arange(T) % 5)), model).shape == (T, 5)


# --- calls, and values ---------------------------------------------------------------------------------------------


def test_cross_attention_and_functions_add_the_bias_of_the_op():
    options = {"pattern": sl.Window(5, 5), "q_len": T, "kv_len": T + 3, "implementation": "reference"}
    layer = sl.SparseCrossAttention(N, F, relative_bias=sl.LearnedBias(2, 3), **options, rngs=nnx.Rngs(0))
    plain = sl.SparseCrossAttention(N, F, **options, rngs=nnx.Rngs(0))
    x, y, table = inputs(1, T, F), inputs(1, T + 3, F, seed=1), inputs(N, 6, seed=2)
    layer.bias_table[...] = table
    function = sl.make_attention_fn(options["pattern"], T, recompute=True, implementation="reference")

    @compiled
    def answers(table):
        bias = sl.DistanceBias(table, 2)
        q, k, v = plain.query(x), plain.key(y), plain.value(y)
        heads = sl.block_sparse_attention(q, k, v, options["pattern"], bias=bias, implementation="reference")
        k, v = k[:, :T], v[:, :T]

        def value_and_gradient(attend):
            return jax.value_and_grad(lambda table: (attend(sl.DistanceBias(table, 2)) ** 3).sum())(table)

        by_function = value_and_gradient(lambda bias: function(q, k, v, bias=bias))
        by_op = value_and_gradient(
            lambda bias: sl.block_sparse_attention(q, k, v, options["pattern"], bias=bias, implementation="reference")
        )
        return layer(x, y), plain(x, y, bias=bias), plain.out(heads), by_function, by_op

    by_layer, by_call, right, by_function, by_op = answers(table)
    for ours in (by_layer, by_call):
        np.testing.assert_allclose(ours, right, atol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), by_function, by_op)
    assert np.abs(right - plain(x, y)).max() > 1e-2


def test_biases_are_values():
    for bias, equal in (
        (sl.AlibiBias((0.5, 0.25)), sl.AlibiBias(np.array([0.5, 0.25]))),
        (T5, sl.T5Bias(True, np.int64(8), 16)),
        (sl.LearnedBias(3), sl.LearnedBias(left=3, right=0)),
        (sl.GridBias((4, 6), size=3), sl.GridBias([4, 6], (3, 3))),
    ):
        assert bias == equal == pickle.loads(pickle.dumps(bias)) and hash(bias) == hash(equal)
        assert eval(f"sl.{bias}") == bias
    assert sl.alibi(4) == sl.alibi(4) != sl.alibi(2) and hash(sl.alibi(4)) == hash(sl.alibi(4))
    table = np.ones((1, 3), np.float32)
    assert sl.DistanceBias(table) != sl.DistanceBias(table), "tables are not compared"


@pytest.mark.parametrize("share", [False, True])
def test_descriptions_say_the_bias(share):
    options = {"relative_bias": sl.LearnedBias(4), "share_relative_bias": share, **SIZES}
    model = sl.SparseTransformer(5, N, F, 2, patterns="causal", **options, rngs=nnx.Rngs(0))
    assert ", LearnedBias(left=4, right=0), assuming 1 batch entry: 'reference'" in sl.describe(model)
