"""Decoders of Hugging Face's library in this one: logits and greedy tokens are its own, by fixtures it has made."""

import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules.loading.config import Config
from sparse_layers.modules.loading.families import read_settings
from sparse_layers.modules.loading.safetensors import find_tensors
from tests.programs import on_devices, sampled

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
WINDOWS = {"mistral": [10] * 3, "qwen2": [None, 9, 9], "gemma2": [8, None, 8], "gemma3_text": [8, 8, None]}
WINDOWS |= {"olmo3": [9, 9, None], "exaone4": [9, 9, None], "smollm3": [None, 9, None], "phi3": [10] * 3}
WINDOWS |= {"gpt_oss": [10, None, 10], "cohere2": [9, 9, None]}
ROPES = {
    "llama": sl.Rope(5e5, scaling=sl.Llama3Scaling(8.0, 32)),
    "qwen2": sl.Rope(1e6, scaling=sl.YarnScaling(4.0, 32)),
    "qwen3": sl.Rope(1e6),
    "olmo2": sl.Rope(5e5),
    "mistral": sl.Rope(1e4),
    "gemma2": sl.Rope(1e4),
    "mixtral": sl.Rope(1e6),
    "qwen3_moe": sl.Rope(1e6),
    "gpt_oss": sl.Rope(150000.0, scaling=sl.YarnScaling(4.0, 32, rounded=False)),
    "phi3": sl.Rope(1e4, rotary_dim=6),
    "granite": sl.Rope(1e4),
    "cohere": sl.Rope(1e3),
}
ROPES_BY_LAYER = {
    "gemma3_text": (sl.Rope(1e4),) * 2 + (sl.Rope(1e6, scaling=sl.LinearScaling(8.0)),),
    "olmo3": (sl.Rope(5e5),) * 2 + (sl.Rope(5e5, scaling=sl.YarnScaling(4.0, 32)),),
    "exaone4": (sl.Rope(1e6, scaling=sl.Llama3Scaling(8.0, 32)),) * 2 + (None,),
    "smollm3": (sl.Rope(1e6), None),
    "cohere2": (sl.Rope(1e3), sl.Rope(1e3), None),
}
run = nnx.jit(lambda model, tokens: model(tokens))


def expected(name):
    with np.load(FIXTURES / name / "expected.npz") as found:
        return {key: found[key] for key in found.files}


def tensors(name):
    files = sorted((FIXTURES / name).glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in safetensors.numpy.load_file(file).items()}


def write(folder, name, change=None, extra=None, **config):
    """A fixture in another folder and in one file, with tensors or settings changed; None takes one away."""
    folder.mkdir(exist_ok=True)
    found = json.loads((FIXTURES / name / "config.json").read_text()) | config
    found = {key: value for key, value in found.items() if key not in config or value is not ...}
    (folder / "config.json").write_text(json.dumps(found))
    arrays = {key: tensor for key, tensor in (tensors(name) | (change or {})).items() if tensor is not None}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_hugging_face(name):
    known = expected(name)
    # The implementations agree, which other tests see to; this one compiles soonest.
    model = sl.from_huggingface(FIXTURES / name, param_dtype=jnp.float32, implementation="reference")
    logits = run(model, known["tokens"])
    assert known["logits"].std() > 0.5, "logits that are nearly nothing would prove nothing"
    np.testing.assert_allclose(logits, known["logits"], atol=2e-5)
    steps = len(known["greedy"])
    assert steps == 100
    chunk = (5, 4, None, 7, 5, 4, 3, 6)[NAMES.index(name) % 8]  # the prompt in pieces, or whole
    found = sl.generate(model, known["tokens"][None, :12], steps, chunk=chunk)[0]
    np.testing.assert_array_equal(found, known["greedy"])


# By tokens in a piece of the prompt, or 0 for no decoding. Together they have what sharding meets in any family: biases
# and learned positions; soft caps and norms behind layers; norms of each head with two ropes; norms over all heads,
# which devices share; parts of fused tensors and of heads; scales; experts; sinks; permuted heads; ALiBi. Programs for
# eight devices compile for seconds, and decoding has two more.
# In this order, a sample has experts, and most of it decodes.
SPREAD = {"gemma2": 0, "gemma3_text": 7, "granite": 0, "phi3": 4, "gpt_oss": 5, "exaone4": 0, "cohere2": 6, "gpt2": 5}
SPREAD |= {"bloom": 0}


def test_spread_over_eight_devices():
    """Sequences and the parameters' heads and features are split; prompts in pieces of several sizes."""
    code = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
import sparse_layers as sl

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def placed(x):
    axis = next((i for i in reversed(range(x.ndim)) if x.shape[i] % 2 == 0), None)
    return jax.device_put(x, NamedSharding(mesh, P(*("model" if i == axis else None for i in range(x.ndim)))))

for folder, chunk in zip(sys.argv[1::2], map(int, sys.argv[2::2]), strict=True):
    known = np.load(folder + "/expected.npz")
    model = sl.from_huggingface(folder, param_dtype=jnp.float32, implementation="xla")
    graph, weights = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(placed, weights))
    tokens = jax.device_put(np.tile(known["tokens"], (8, 1)), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        logits = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
        assert len(logits.sharding.device_set) == 8
        np.testing.assert_allclose(logits, np.tile(known["logits"], (8, 1, 1)), atol=2e-5, err_msg=folder)
        if chunk:
            found = sl.generate(model, tokens[:, :12], 30, chunk=chunk)
            np.testing.assert_array_equal(found, np.tile(known["greedy"][:30], (8, 1)), err_msg=folder)
"""
    on_devices(
        8, "-c", code, *(word for name in sampled(SPREAD, 0.6) for word in (str(FIXTURES / name), str(SPREAD[name])))
    )


def test_windows_by_block_lists():
    known = expected("gemma3_text")
    blocks = sl.FwdParams(q_blocksize=16, kv_blocksize=16)
    model = sl.from_huggingface(FIXTURES / "gemma3_text", param_dtype=jnp.float32, fwd_params=blocks)
    np.testing.assert_allclose(run(model, known["tokens"]), known["logits"], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_both_generations_of_configurations_say_the_same(name):
    new, old = (read_settings(Config(FIXTURES / name / file), 3) for file in ("config.json", "config_4.json"))
    assert new == old
    windows = WINDOWS.get(name, [None] * 3)
    masks = [sl.Causal() if width is None else sl.Causal() & sl.Window(width - 1) for width in windows]
    turn = len(new["patterns"])
    assert [new["patterns"][i % turn] for i in range(3)] == masks
    assert turn == (3 if name in ("qwen2", "gemma3_text", "olmo3", "exaone4", "cohere2") else len(set(windows)))
    if name in ROPES_BY_LAYER:
        assert new["rope"] == ROPES_BY_LAYER[name]
    elif name not in ("gpt2", "mpt", "bloom"):
        assert set(new["rope"]) == {ROPES[name]}


def test_norms_of_queries_in_command_r_plus_are_refused(tmp_path):
    reason = r"config\.json: use_qk_norm must be False, as these norms .* for each head, got True"
    with pytest.raises(ValueError, match=reason):
        settings(tmp_path, "cohere", use_qk_norm=True)


REFUSED_WITH_ALIBI = [
    ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "attn_config.clip_qkv must be None, got 6.0"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi must be True, got False"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln must be False, got True"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale must be None, got 'inv_sqrt_d_model'"),
    ("bloom", {"n_head": 5}, "n_head must divide hidden_size=24, got 5"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm must be False, got True"),
]


def test_models_with_alibi(tmp_path):
    """Slopes of MPT are BLOOM's only if the number of heads is a power of two; earlier files have other names."""
    slopes = {heads: settings(tmp_path, "mpt", n_heads=heads)["relative_bias"].slopes for heads in (3, 4)}
    assert slopes == {3: (2.0**-4, 2.0**-8, 2.0**-2), 4: None}
    assert settings(tmp_path, "mpt")["scale"] == 0.4 and "scale" not in settings(tmp_path, "mpt", attn_config=None)
    names = {"n_embed": 24, "num_attention_heads": 6, "seq_length": 128}
    found = settings(tmp_path, "bloom", drop=("hidden_size", "n_head"), **names)
    assert found == settings(tmp_path, "bloom") | {"seq_len": 128}
    for name, config, reason in REFUSED_WITH_ALIBI:
        with pytest.raises(ValueError, match=re.escape(reason)):
            settings(tmp_path, name, **config)


def settings(folder, name, drop=(), **config):
    file = folder / "config.json"
    found = json.loads((FIXTURES / name / "config_4.json").read_text())
    file.write_text(json.dumps({key: value for key, value in (found | config).items() if key not in drop}))
    return read_settings(Config(file), 3)


def test_configurations_without_layer_types(tmp_path):
    for name in ("qwen2", "gemma2"):
        known = read_settings(Config(FIXTURES / name / "config.json"), 3)
        assert settings(tmp_path, name, drop=("layer_types",)) == known
    known = settings(tmp_path, "gemma3_text", drop=("layer_types",), sliding_window_pattern=3)
    assert known == read_settings(Config(FIXTURES / "gemma3_text" / "config.json"), 3)
    assert settings(tmp_path, "qwen2", drop=("layer_types",), use_sliding_window=False)["patterns"] == (sl.Causal(),)
    assert settings(tmp_path, "mistral", sliding_window=None)["patterns"] == (sl.Causal(),)


def test_additional_settings_of_configurations(tmp_path):
    found = settings(tmp_path, "llama", attention_bias=True, mlp_bias=True, partial_rotary_factor=1.0)
    assert found["use_bias"] == ("query", "key", "value", "out", "mlp")
    found = settings(tmp_path, "llama", drop=("rope_theta", "num_key_value_heads", "head_dim"), rope_scaling=None)
    assert (found["rope"], found["num_kv_heads"], found["head_dim"]) == ((sl.Rope(1e4),), 4, 8)
    named = {"type": "yarn", "factor": 2.0, "beta_fast": 16, "attention_factor": 1.5, "truncate": False}
    found = settings(tmp_path, "qwen3", rope_scaling=named)["rope"][0].scaling
    assert found == sl.YarnScaling(2.0, 128, fast=16, attention_factor=1.5, rounded=False)
    # What stands outside counts more than what stands inside.
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for inside in ({}, {"original_max_position_embeddings": 1024}):
        outside = {"original_max_position_embeddings": 64, "rope_scaling": llama3 | inside}
        assert (
            settings(tmp_path, "llama", drop=("rope_parameters",), **outside)["rope"][0].scaling.original_length == 64
        )


def test_defaults_of_configurations(tmp_path):
    """Layers with a window turn slowly and are never scaled, whatever is said of the others."""
    silent = dict.fromkeys(("rope_parameters", "rope_theta", "rope_local_base_freq", "rope_scaling"))
    linear = {"rope_type": "linear", "factor": 8.0}
    for said, full in (({}, sl.Rope(1e6)), ({"rope_scaling": linear}, sl.Rope(1e6, scaling=sl.LinearScaling(8.0)))):
        assert {*settings(tmp_path, "gemma3_text", **silent | said)["rope"]} == {sl.Rope(1e4), full}
    nested = {"full_attention": linear, "sliding_attention": {"rope_type": "default"}}
    found = settings(tmp_path, "gemma3_text", **silent | {"rope_parameters": nested})["rope"]
    assert {*found} == {sl.Rope(1e4), sl.Rope(1e6, scaling=sl.LinearScaling(8.0))}
    for wrong, reason in (
        ({"rope_parameters": linear}, "rope_parameters must be of 'full_attention' and of"),
        ({"rope_parameters": nested | {"sliding_attention": None}}, "must be of 'full_attention' and of 'sliding_att"),
        (
            {"rope_parameters": nested, "rope_scaling": linear | {"factor": 2.0}},
            "rope_parameters and rope_scaling must",
        ),
        ({"attn_logit_softcapping": 2.0}, "attn_logit_softcapping must be None, got 2.0"),
    ):
        with pytest.raises(ValueError, match=reason):
            settings(tmp_path, "gemma3_text", **silent | wrong)
    assert settings(tmp_path, "qwen2", drop=("layer_types",), use_sliding_window=True, sliding_window=None)
    every = settings(
        tmp_path, "qwen2", drop=("layer_types",), use_sliding_window=True, sliding_window=8, max_window_layers=0
    )
    assert every["patterns"] == (sl.Causal() & sl.Window(7),)
    for name, function in (("llama", "swiglu"), ("gemma3_text", "geglu"), ("gpt2", "gelu_tanh")):
        unsaid = ("hidden_act", "hidden_activation", "activation_function")
        assert settings(tmp_path, name, drop=unsaid)["mlp"] == function


REFUSED = [
    ({"model_type": "gemma"}, "smollm3, as other architectures have other layers, got 'gemma'"),
    ({"model_type": "t5"}, "smollm3, as models here end in logits, and none reads an encoder, got 't5'"),
    ({"model_type": "deepseek_v3"}, "smollm3, as no layer here has latent attention, got 'deepseek_v3'"),
    ({"model_type": None}, "model_type must be one of bloom, "),
    ({"hidden_act": "relu"}, "hidden_act must be 'silu' or 'gelu_pytorch_tanh' or 'swish' or 'gelu_new', got"),
    ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types must be 3 times"),
    ({"layer_types": ["full_attention"]}, "layer_types must be 3 times 'full_attention' or 'sliding_attention'"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types must be those that this architecture has"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ({"attention_bias": "no"}, "attention_bias must be False or True, got 'no'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling must agree"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' needs long_factor, short_factor"),
    ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type: 'ntk'. Known: default, dynamic, linear, "),
    ({"rope_parameters": {"rope_type": "linear"}}, "rotary embeddings: 'linear' needs factor"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "fast": 2}}, "rotary embeddings: 'yarn' has no fast"),
    ({"rope_parameters": [1]}, "rotary embeddings must be an object, got [1]"),
    ({"quantization_config": {"bits": 4}}, "quantization_config must be None, got {'bits': 4}"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be None or True or False, got 'no'"),
    ({"hidden_size": 32.5}, "hidden_size must be an integer >= 1, got 32.5"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0, got 0"),
    ({"vocab_size": 0}, "vocab_size must be an integer >= 1, got 0"),
    ({"num_hidden_layers": 4}, "num_hidden_layers must be 3, as the tensors have so many layers, got 4"),
    (
        {"num_hidden_layers": 10**12},
        "num_hidden_layers must be 3, as the tensors have so many layers, got 1000000000000",
    ),
    ({"intermediate_size": 40}, "gate_proj.weight (48, 32), not (40, 32)"),
    ({"num_key_value_heads": 4}, "self_attn.k_proj.weight (24, 32), not (48, 32)"),
    ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=4, got 3"),
    ({"head_dim": 7}, "head_dim must be even, for pairs of features turn, got 7"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}}, "theta must be > 1 with YarnScaling"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[str(config) for config, _ in REFUSED])
def test_configurations_that_are_refused(config, reason, tmp_path):
    shutil.copytree(FIXTURES / "llama", tmp_path / "model")
    found = json.loads((FIXTURES / "llama" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(found | config))
    with pytest.raises(ValueError) as caught:
        sl.from_huggingface(tmp_path / "model")
    assert reason in str(caught.value) and str(tmp_path / "model") in str(caught.value)


Q = "model.layers.1.self_attn.q_proj.weight"
TENSORS = [
    ({Q: None}, f"missing {Q}"),
    ({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}, "unknown model.layers.0.self_attn.q_proj.bias"),
    ({Q: np.ones((32, 31), np.float32)}, f"{Q} (32, 31), not (32, 32)"),
    ({Q: np.ones((32, 32), np.int8)}, f"must be float32, float16 or bfloat16, not so: {Q}"),
    ({"lm_head.weight": np.ones((64, 32), np.int8)}, "must be float32, float16 or bfloat16, not so: lm_head.weight"),
    ({"lm_head.weight": np.ones((64, 32), np.float32)}, "lm_head.weight differs from model.embed_tokens.weight"),
]


@pytest.mark.parametrize(("change", "reason"), TENSORS, ids=[reason for _, reason in TENSORS])
def test_tensors_that_are_refused(change, reason, tmp_path):
    with pytest.raises(ValueError) as caught:
        sl.from_huggingface(write(tmp_path / "model", "qwen3", change))
    assert reason in str(caught.value)


def test_files_that_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing is downloaded: 'Qwen/Qwen3-8B'"):
        sl.from_huggingface("Qwen/Qwen3-8B")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        sl.from_huggingface(tmp_path)
    folder = write(tmp_path / "model", "qwen3")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    nested, endless = b"[" * 100_000, b'{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 0]}}'
    headers = (len(header).to_bytes(8, "little") + header for header in (nested, endless))
    for cut in (whole[:-1], whole[:100], whole[:4], b"", whole[:8] + b"[" + whole[9:], *headers):
        file.write_bytes(cut)
        with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read as a safetensors file"):
            sl.from_huggingface(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(ValueError, match=r"a pointer of Git LFS: run git lfs pull"):
        sl.from_huggingface(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        sl.from_huggingface(folder)
    index = folder / "model.safetensors.index.json"
    for where, reason in (
        ({"x": "../model.safetensors"}, "files beside it"),
        ({"x": ".."}, "files beside it"),
        ({}, r"tensors of layers must begin with model\.layers\.0\., got none"),
        ([], "files beside it"),
    ):
        index.write_text(json.dumps({"weight_map": where}))
        with pytest.raises(ValueError, match=reason):
            sl.from_huggingface(folder)
    file.with_name("a.safetensors").write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r"x is not in a\.safetensors"):
        sl.from_huggingface(folder)
    # Of a tensor in two files, the one counts that the index names.
    other = {"model.norm.weight": np.zeros(3, np.float32), "y": np.ones(2, np.float32)}
    safetensors.numpy.save_file(other, folder / "b.safetensors")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors", "y": "b.safetensors"}}))
    np.testing.assert_array_equal(
        find_tensors(folder)["model.norm.weight"].read(), tensors("qwen3")["model.norm.weight"]
    )
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON"):
        sl.from_huggingface(folder)


def test_heads_that_do_not_divide_the_features_of_a_gpt2(tmp_path):
    with pytest.raises(ValueError, match=r"^num_heads=5 must divide features=32"):
        sl.from_gpt2(FIXTURES / "gpt2", num_heads=5)
    with pytest.raises(ValueError, match=r"config\.json: n_head must divide n_embd=32, got 5"):
        sl.from_huggingface(write(tmp_path / "model", "gpt2", n_head=5))


def pure(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_prefix_buffers_and_a_head_that_is_the_embedding_change_nothing(tmp_path):
    plain = tensors("gpt2")
    more = {key.removeprefix("transformer."): tensor for key, tensor in plain.items()}
    more |= {"h.0.attn.bias": np.ones((1, 1, 9, 9), bool), "h.0.attn.masked_bias": np.ones((), np.int32)}
    more |= {"lm_head.weight": more["wte.weight"]} | dict.fromkeys(plain)
    found = sl.from_huggingface(write(tmp_path / "model", "gpt2", more))
    assert found.head is None
    jax.tree.map(np.testing.assert_array_equal, pure(found), pure(sl.from_huggingface(FIXTURES / "gpt2")))
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    sl.from_huggingface(write(tmp_path / "qwen3", "qwen3", buffer))


def test_a_configuration_that_does_not_say_whether_the_head_is_tied(tmp_path):
    for name, own in (("qwen3", False), ("olmo2", True)):
        assert (sl.from_huggingface(write(tmp_path / name, name, tie_word_embeddings=...)).head is not None) == own


def test_dtypes_are_those_of_the_files_or_as_asked(tmp_path):
    def dtypes(model):
        return {leaf.dtype.name for leaf in jax.tree.leaves(pure(model))}

    model = sl.from_huggingface(FIXTURES / "gemma2")
    assert dtypes(model) == {"bfloat16", "float32"} and run(model, np.arange(9)[None]).dtype == jnp.float32
    assert model.blocks[0].mlp_in.kernel.dtype == model.blocks[0].mlp_in.dtype == jnp.bfloat16
    # 1 and what is stored have more digits together than bfloat16.
    stored = np.asarray(tensors("gemma2")["model.norm.weight"], np.float32)
    np.testing.assert_array_equal(model.final_norm.scale[...], 1 + stored)
    assert dtypes(sl.from_huggingface(FIXTURES / "gemma2", param_dtype="float16")) == {"float16", "float32"}
    known = expected("gemma2")
    exact = sl.from_huggingface(FIXTURES / "gemma2", dtype=jnp.float32, implementation="reference")
    np.testing.assert_allclose(run(exact, known["tokens"]), known["logits"], atol=2e-5)
    half = {key: tensor.astype(np.float16) for key, tensor in tensors("qwen3").items()}
    model = sl.from_huggingface(write(tmp_path / "model", "qwen3", half), dtype=jnp.float32)
    assert dtypes(model) == {"float16"} and model.blocks[0].mlp_in.dtype == jnp.float32


def test_patterns_of_the_user_and_the_shape_of_the_model():
    patterns = ("sliding_window:window=7", "causal", "moba:block=16,count=2")
    options = {"use_sinks": True, "dropout_rate": 0.5, "seq_len": 64, "rngs": nnx.Rngs(3)}
    options["implementation"] = "reference"
    model = sl.from_huggingface(FIXTURES / "qwen3", patterns, **options)
    assert [block.attention.pattern for block in model.blocks] == list(patterns)
    np.testing.assert_array_equal(model.blocks[0].attention.sinks[...], np.zeros(4))
    first, second = run(model, np.arange(9)[None]), run(model, np.arange(9)[None])
    assert np.abs(first - second).max() > 0, "dropout is on and draws anew"
    model = sl.from_huggingface(FIXTURES / "qwen3", "msa:block=16,count=2", seq_len=64)
    assert np.asarray(model.blocks[2].attention.index_key.kernel[...], np.float32).std() > 0, "drawn: no file has it"
    assert sl.from_huggingface(FIXTURES / "gpt2", seq_len=10).position_embedding.embedding.shape == (10, 32)
    with pytest.raises(ValueError, match=r"seq_len=129: .* has 128 positions"):
        sl.from_huggingface(FIXTURES / "gpt2", seq_len=129)
    with pytest.raises(ValueError, match="scale: comes from"):
        sl.from_huggingface(FIXTURES / "gemma2", scale=1.0)
    assert sl.from_huggingface(FIXTURES / "llama", seq_len=500).seq_len == 500


def test_a_decoder_becomes_an_encoder_only_where_that_is_said():
    both_ways = ("sliding_window:window=7", "bidirectional", "causal")
    with pytest.raises(
        ValueError, match=r"patterns\[1\]: a language model.*query 0 sees the later key 1.*causal=False"
    ):
        sl.from_huggingface(FIXTURES / "qwen3", both_ways)
    with pytest.raises(ValueError, match=r"patterns: a language model"):
        sl.from_gpt2(FIXTURES / "gpt2", patterns="bidirectional")
    encoder, tokens = sl.from_huggingface(FIXTURES / "qwen3", both_ways, causal=False), np.arange(9)[None]
    assert np.abs(run(encoder, tokens) - run(encoder, tokens[:, ::-1])[:, ::-1]).max() > 0
    changed = np.where(tokens == 8, 20, tokens)
    assert np.abs(run(encoder, tokens) - run(encoder, changed))[:, 0].max() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text"])
def test_scanned_layers(name):
    plain = sl.from_huggingface(FIXTURES / name)
    scanned = sl.from_huggingface(FIXTURES / name, scan_layers=True)
    assert len(scanned.blocks) == {"gpt2": 1, "gemma3_text": 3}[name]
    for layer, block in zip(scanned.layers, plain.blocks, strict=True):
        jax.tree.map(np.testing.assert_array_equal, pure(layer), pure(block))
