"""Families with experts: which layers have them, MXFP4, memory, scanned layers, and what is refused."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules.loading.config import Config
from sparse_layers.modules.loading.families import read_settings
from tests.programs import on_devices

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = ["gpt_oss", "mixtral", "qwen3_moe"]


def pure(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def settings(folder, name, **config):
    values = json.loads((FIXTURES / name / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: x for key, x in values.items() if x is not ...}))
    return read_settings(Config(folder / "config.json"), values["num_hidden_layers"])


def test_layers_with_experts(tmp_path):
    def has_experts(**config):
        mlp = settings(tmp_path, "qwen3_moe", num_hidden_layers=6, **config)["mlp"]
        return [isinstance(mlp[i % len(mlp)], sl.MixtureOfExperts) for i in range(6)]

    assert has_experts(mlp_only_layers=[]) == has_experts(mlp_only_layers=None) == [True] * 6
    assert has_experts(mlp_only_layers=[0, 4]) == [False, True, True, True, False, True]
    assert has_experts(mlp_only_layers=[3], decoder_sparse_step=2) == [False, True, False, False, False, True]
    (mixture,) = settings(tmp_path, "qwen3_moe", mlp_only_layers=[])["mlp"]
    assert mixture == sl.MixtureOfExperts(6, 3, features=12)
    (mixture,) = settings(tmp_path, "qwen3_moe", mlp_only_layers=[], norm_topk_prob=...)["mlp"]
    assert not mixture.normalize, "the default of transformers"
    assert settings(tmp_path, "mixtral")["mlp"] == (sl.MixtureOfExperts(4, 2),)
    mixture = sl.MixtureOfExperts(4, 2, activation="clamped_swiglu", router_bias=True)
    gpt_oss = settings(tmp_path, "gpt_oss")
    assert gpt_oss["mlp"] == (mixture,) and gpt_oss["use_sinks"]
    assert gpt_oss["use_bias"] == ("query", "key", "value", "out", "mlp")
    without_types = settings(tmp_path, "gpt_oss", layer_types=..., sliding_window=...)
    assert without_types["patterns"] == (sl.Causal() & sl.Window(127), sl.Causal())
    windows = {"use_sliding_window": True, "sliding_window": 8}
    assert settings(tmp_path, "qwen3_moe", **windows)["patterns"] == (sl.Causal() & sl.Window(7),)
    assert settings(tmp_path, "mixtral", sliding_window=8)["patterns"] == (sl.Causal() & sl.Window(7),)


REFUSED = [
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok must not exceed num_local_experts=4, got 5"),
    ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 3}, "per_tok must not exceed num_experts=2, got 3"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "config.json: mlp_only_layers must be a list of layers, got 1"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "config.json: decoder_sparse_step must be an integer >= 1, got 0"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "config.json: norm_topk_prob must be False or True, got 'yes'"),
    ("mixtral", {"num_local_experts": ...}, None),
    ("mixtral", {"mlp_bias": True}, "config.json: mlp_bias must be False, got True"),
    ("qwen3_moe", {"mlp_bias": True}, "config.json: mlp_bias must be False, got True"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "config.json: swiglu_limit must be 7.0, got 5.0"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "config.json: swiglu_alpha must be 1.702, got 1.0"),
    ("gpt_oss", {"hidden_act": "gelu"}, "config.json: hidden_act must be 'silu', got 'gelu'"),
    ("gpt_oss", {"rope_parameters": ...}, "config.json: rope_scaling is missing"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be None"),
    ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config must be None"),
]


@pytest.mark.parametrize(("name", "config", "reason"), REFUSED)
def test_configurations_that_are_refused(name, config, reason, tmp_path):
    if reason is None:  # the default of transformers
        assert settings(tmp_path, name, **config)["mlp"][0].num_experts == 8
    else:
        with pytest.raises(ValueError, match=re.escape(reason)):
            settings(tmp_path, name, **config)


@pytest.mark.parametrize("name", NAMES)
def test_scanned_layers_have_the_parameters_of_single_ones(name, tmp_path):
    """Of two layers, which a cycle of two divides."""
    config = json.loads((FIXTURES / name / "config.json").read_text()) | {"num_hidden_layers": 2}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = safetensors.numpy.load_file(FIXTURES / name / "model.safetensors")
    tensors = {key: x for key, x in tensors.items() if "layers.2." not in key}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    plain, scanned = sl.from_huggingface(tmp_path), sl.from_huggingface(tmp_path, scan_layers=True)
    assert len(scanned.blocks) == (1 if name == "mixtral" else 2)
    for layer, block in zip(scanned.layers, plain.blocks, strict=True):
        jax.tree.map(np.testing.assert_array_equal, pure(layer), pure(block))


def test_mxfp4_becomes_bfloat16(tmp_path):
    """The fixture's experts are rounded to MXFP4 by ml_dtypes, and loaded from both formats."""
    features, hidden, rng = 32, 32, np.random.default_rng(0)
    tensors = safetensors.numpy.load_file(FIXTURES / "gpt_oss" / "model.safetensors")
    quantized = {}
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts."
        for name, shape in (("gate_up_proj", (4, 2 * hidden, features)), ("down_proj", (4, features, hidden))):
            numbers = rng.normal(size=(*shape[:2], shape[2] // 32, 32)).astype(ml_dtypes.float4_e2m1fn)
            scales = rng.integers(122, 129, numbers.shape[:3], np.uint8)
            values = numbers.astype(np.float32) * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
            tensors[stem + name] = values.reshape(shape).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
            codes = numbers.view(np.uint8)
            quantized |= {f"{stem}{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4}
            quantized |= {f"{stem}{name}_scales": scales}
        tensors[f"{stem}gate_up_proj_bias"] = rng.normal(size=(4, 2 * hidden)).astype(ml_dtypes.bfloat16)
    config = json.loads((FIXTURES / "gpt_oss" / "config.json").read_text()) | {"intermediate_size": hidden}
    for name, change in (("plain", {}), ("mxfp4", {"quantization_config": {"quant_method": "mxfp4"}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | change))
        rest = {key: x for key, x in tensors.items() if f"{key}_blocks" not in quantized}
        contents = rest | quantized if change else tensors
        contents = {key: np.ascontiguousarray(x) for key, x in contents.items()}
        safetensors.numpy.save_file(contents, tmp_path / name / "model.safetensors")
    plain, loaded = (sl.from_huggingface(tmp_path / name) for name in ("plain", "mxfp4"))
    jax.tree.map(np.testing.assert_array_equal, pure(loaded), pure(plain))
    assert loaded.blocks[0].experts.experts_in.kernel.dtype == jnp.bfloat16
    assert np.abs(np.asarray(loaded.blocks[0].experts.experts_in.kernel[...], np.float32)).max() > 1


def test_experts_that_no_family_has_are_not_saved(tmp_path):
    mixture = sl.MixtureOfExperts(4, 2, features=8, shared_features=8)
    options = {"positions": "rope", "norm": "rms", "use_bias": False, "seq_len": 16, "mlp": mixture}
    model = sl.SparseTransformer(11, 2, 8, 1, patterns="causal", **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"mixtral: mlp, MixtureOfExperts\(.* shared_features=8, .* in the model and"):
        sl.to_huggingface(model, tmp_path / "new")


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import sparse_layers as sl

tokens = jnp.arange(40).reshape(2, 20)
run = nnx.jit(lambda model, tokens: model(tokens, deterministic=True))
mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
for name, shape, scan_layers in (("qwen3_moe", (3, 12, 32), False), ("mixtral", (3, 2, 24, 32), True)):
    options = {"param_dtype": jnp.float32, "implementation": "reference", "scan_layers": scan_layers}
    known = run(sl.from_huggingface(f"{sys.argv[1]}/{name}", **options), tokens)
    with jax.set_mesh(mesh):
        axes = {"expert_axis": "expert", "token_axes": "data"}
        model = sl.from_huggingface(f"{sys.argv[1]}/{name}", **axes, **options)
        kernel = model.blocks[0].experts.experts_out.kernel
        assert kernel.sharding.shard_shape(kernel.shape) == shape
        np.testing.assert_allclose(run(model, tokens), known, atol=1e-4)
print("fine")
"""


def test_experts_are_loaded_onto_their_devices():
    """Logits are those of one device; one of the models has scanned layers."""
    assert on_devices(4, "-c", PROGRAM, str(FIXTURES)) == "fine\n"


@pytest.mark.parametrize(("name", "entry"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_a_wrong_number_of_experts_is_refused_before_anything_is_built(name, entry, tmp_path):
    """The error names the entry that the file has: transformers 4 and 5 differ."""
    settings(tmp_path, name, **{entry: 10**6})
    (tmp_path / "model.safetensors").symlink_to(FIXTURES / name / "model.safetensors")
    with pytest.raises(ValueError, match=rf"config.json: {entry} must be \d, as the .* so many experts, got 1000000"):
        sl.from_huggingface(tmp_path)


def test_an_expert_axis_needs_experts():
    with pytest.raises(ValueError, match=r"expert_axis must be None, as .*config.json has no experts, got 'expert'"):
        sl.from_huggingface(FIXTURES / "qwen3", expert_axis="expert")
    with pytest.raises(ValueError, match=r"token_axes must be \(\), as .*config.json has no experts, got 'data'"):
        sl.from_huggingface(FIXTURES / "qwen3", token_axes="data")
    with pytest.raises(ValueError, match=r"token_axes=\('data',\) must differ from expert_axis, which must be set"):
        sl.from_huggingface(FIXTURES / "mixtral", token_axes="data")
