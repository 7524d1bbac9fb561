"""Folders as users have them: indexes, models of text and images, other formats, settings that a file leaves out."""

import json
import math
import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from safetensors.numpy import load_file

import sparse_layers as sl
from sparse_layers.modules.loading.config import Config
from sparse_layers.modules.loading.families import read_settings

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def tensors(name):
    return load_file(FIXTURES / name / "model.safetensors")


def config(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def write(folder, settings, arrays):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_equal(model, expected):
    states = (nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (model, expected))
    jax.tree.map(np.testing.assert_array_equal, *states)


# --- indexes ---------------------------------------------------------------------------------------------------------


def test_an_index_lists_the_tensors_of_the_model(tmp_path):
    """Tensors of a shard that the index does not name belong to something else, and may have any dtype."""
    folder = write(tmp_path / "model", config("qwen3"), tensors("qwen3") | {"optimizer.step": np.ones(3, np.int64)})
    with pytest.raises(ValueError, match=r"not so: optimizer\.step"):
        sl.from_huggingface(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(tensors("qwen3"), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(sl.from_huggingface(folder), sl.from_huggingface(FIXTURES / "qwen3"))


# --- models of text and images ---------------------------------------------------------------------------------------

IMAGES = {"vision_tower.embeddings.weight": np.ones((2, 3), np.int8), "multi_modal_projector.weight": np.ones(3)}
PREFIXES = {
    "2025": lambda name: f"language_model.{name}",
    "transformers 5": lambda name: name.replace("model.", "model.language_model.", 1),
}


@pytest.mark.parametrize("generation", PREFIXES)
def test_the_text_model_of_a_folder_with_images(generation, tmp_path):
    """Tensors of images are left out; the vocabulary is that of the embedding, which the configuration may not say."""
    text = {name: value for name, value in config("gemma3_text").items() if name != "vocab_size"}
    outer = {"model_type": "gemma3", "vision_config": {"hidden_size": 3}, "text_config": text}
    prefix = "" if generation == "2025" else "model."
    arrays = {PREFIXES[generation](name): x for name, x in tensors("gemma3_text").items()}
    arrays |= {prefix + name: x for name, x in IMAGES.items()}
    model = sl.from_huggingface(write(tmp_path / "model", outer, arrays))
    assert_equal(model, sl.from_huggingface(FIXTURES / "gemma3_text"))
    assert model.token_embedding.num_embeddings == 64


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_head_beside_images(head, tmp_path):
    outer = {"model_type": "llava", "text_config": config("mistral"), "tie_word_embeddings": False}
    arrays = {f"language_model.{name}": x for name, x in tensors("mistral").items() if name != "lm_head.weight"}
    arrays |= {head: tensors("mistral")["lm_head.weight"]}
    assert_equal(sl.from_huggingface(write(tmp_path / "a", outer, arrays)), sl.from_huggingface(FIXTURES / "mistral"))
    for text, rule in (
        ({}, "model_type must .*, got None"),
        (config("mistral") | {"head_dim": 7}, "head_dim must .* 7"),
    ):
        with pytest.raises(ValueError, match=rf"config\.json: text_config\.{rule}"):
            sl.from_huggingface(write(tmp_path / "b", outer | {"text_config": text}, arrays))
    with pytest.raises(ValueError, match="quantization_config must be None"):
        sl.from_huggingface(write(tmp_path / "c", outer | {"quantization_config": {"bits": 4}}, arrays))


@pytest.mark.parametrize("prefix", ["transformer.", "model.text.", ""])
def test_names_of_tensors_that_do_not_fit_the_configuration(prefix, tmp_path):
    """Other prefixes of a Qwen 3; with none, the names of a text model beside a configuration of images."""
    settings = config("qwen3") if prefix else {"model_type": "llava", "text_config": config("qwen3")}
    arrays = {name.replace("model.", prefix, 1) if prefix else name: x for name, x in tensors("qwen3").items()}
    rule = "tensors of layers must begin with " + (
        "model.layers.0." if prefix else "model.language_model.layers.0. or language_model.model.layers.0."
    )
    with pytest.raises(ValueError) as caught:
        sl.from_huggingface(write(tmp_path, settings, arrays))
    assert f"{rule}, got {prefix or 'model.'}" in str(caught.value)


# The text_config of the released models, which say what differs from transformers' defaults.
GEMMA3 = {
    34: {"hidden_size": 2560, "intermediate_size": 10240},
    48: {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8},
    62: {"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16}
    | {"head_dim": 128, "query_pre_attn_scalar": 168},
}
HEADS = {34: (8, 4, 256, 256), 48: (16, 8, 256, 256), 62: (32, 16, 128, 168)}


@pytest.mark.parametrize("num_layers", GEMMA3)
def test_settings_of_gemma3_4b_12b_and_27b(num_layers):
    text = GEMMA3[num_layers] | {"model_type": "gemma3_text", "num_hidden_layers": num_layers, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 262208}
    outer = Config(pathlib.Path("config.json"), {"model_type": "gemma3", "text_config": text})
    settings = read_settings(outer, num_layers)
    heads, kv_heads, head_dim, scalar = HEADS[num_layers]
    assert (settings["num_heads"], settings["num_kv_heads"], settings["head_dim"]) == (heads, kv_heads, head_dim)
    assert settings["scale"] == scalar**-0.5 and settings["seq_len"] == 131072 and settings["norm_epsilon"] == 1e-6
    assert settings["patterns"] == (sl.Causal() & sl.Window(1023),) * 5 + (sl.Causal(),)
    assert settings["rope"] == (sl.Rope(1e4),) * 5 + (sl.Rope(1e6, scaling=sl.LinearScaling(8.0)),)


def test_a_configuration_of_images_is_not_written(tmp_path):
    model = sl.from_huggingface(FIXTURES / "gemma3_text")
    with pytest.raises(ValueError, match=r"config must be that of a text model.*pass config\['text_config'\]"):
        sl.to_huggingface(model, tmp_path / "new", config={"text_config": config("gemma3_text")})


# --- other formats ---------------------------------------------------------------------------------------------------

FORMATS = [
    ("pytorch_model.bin", r"from_pretrained\(folder\) reads this one, and its save_pretrained writes them"),
    ("pytorch_model-00001-of-00002.bin", r"from_pretrained\(folder\)"),
    ("model-q4.gguf", r"from_pretrained\(folder, gguf_file='model-q4\.gguf'\)"),
    ("flax_model.msgpack", r"from_pretrained\(folder, from_flax=True\)"),
    ("tf_model.h5", r"from_pretrained\(folder, from_tf=True\)"),
    ("adapter_model.safetensors", r"merge_and_unload\(\)"),
    ("consolidated.safetensors", "named as Hugging Face's library names them"),
]


@pytest.mark.parametrize("load", [sl.from_huggingface, sl.from_gpt2])
@pytest.mark.parametrize(("name", "advice"), FORMATS)
def test_folders_with_other_formats_alone(name, advice, load, tmp_path):
    """Such folders often have no config.json either."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=rf"weights must be in model\.safetensors.*has {name}.*{advice}"):
        load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"weights must be in model\.safetensors .* folder has none"):
        load(tmp_path)
    write(tmp_path, config("gpt2"), tensors("gpt2"))
    assert load(tmp_path).num_layers == 3, "other formats beside it change nothing"


# --- settings --------------------------------------------------------------------------------------------------------


def settings(name, **changes):
    return read_settings(Config(pathlib.Path("config.json"), config(name) | changes), 3)


def test_yarn_with_a_null_factor_and_deepseeks_scales():
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 32}

    def scaling(**changes):
        return settings("qwen2", rope_parameters=yarn | changes)["rope"][0].scaling

    assert scaling(factor=None) == scaling(factor=4.0) == sl.YarnScaling(4.0, 32)
    log = 0.1 * math.log(4)
    expected = (2.0 * log + 1) / (0.5 * log + 1)
    assert scaling(factor=4.0, mscale=2.0, mscale_all_dim=0.5).attention_factor == pytest.approx(expected)
    assert scaling(factor=4.0, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.0
    assert scaling(factor=4.0, mscale=2.0, mscale_all_dim=0.5, attention_factor=3.0).attention_factor == 3.0
    for alone in ({"mscale": 2.0}, {"mscale_all_dim": 2.0}, {"mscale": 2.0, "mscale_all_dim": 0}):
        assert scaling(factor=4.0, **alone) == sl.YarnScaling(4.0, 32), "one of the two has no meaning"
    for changes, reason in (
        ({"factor": 4.0, "mscale": "a", "mscale_all_dim": 1.0}, "mscale must be a number > 0, got 'a'"),
        ({"factor": None, "original_max_position_embeddings": 0}, "original_max_position_embeddings must be an int"),
    ):
        with pytest.raises(ValueError, match=reason):
            scaling(**changes)


def test_windows_of_qwen_that_contradict_each_other():
    """What is left out has the library's defaults: no windows, and windows of 4,096 tokens from layer 28 on."""
    left_out = dict.fromkeys(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"))
    words = {key: value for key, value in config("qwen3").items() if key not in left_out}

    def patterns(**changes):
        return read_settings(Config(pathlib.Path("config.json"), words | changes), 3)["patterns"]

    window = sl.Causal() & sl.Window(4095)
    assert patterns() == patterns(use_sliding_window=True) == (sl.Causal(),)
    assert patterns(use_sliding_window=True, max_window_layers=1) == (sl.Causal(), window, window)
    types = ["full_attention", "full_attention", "sliding_attention"]
    assert patterns(use_sliding_window=True, layer_types=types) == (sl.Causal(), sl.Causal(), window)
    for off in ({}, {"use_sliding_window": False}):
        with pytest.raises(ValueError, match="use_sliding_window must be True where layer_types has 'sliding_att"):
            patterns(layer_types=types, **off)


def test_dynamic_scaling_changes_nothing_up_to_the_longest_input(tmp_path):
    rope = {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 2.0}
    folder = write(tmp_path / "model", config("qwen3") | {"rope_parameters": rope}, tensors("qwen3"))
    assert sl.from_huggingface(folder, seq_len=128).blocks[0].attention.attention_fn.rope == sl.Rope(1e6)
    with pytest.raises(ValueError, match="'dynamic' changes beyond max_position_embeddings=128, got seq_len=129"):
        sl.from_huggingface(folder, seq_len=129)


def test_longrope_has_factors_for_the_longest_input(tmp_path):
    """Logits of 16 tokens, the original length, and of all 64; it decides by the input, here the model does."""
    folder = write(tmp_path / "model", config("phi3"), tensors("phi3"))
    shutil.copy(FIXTURES / "phi3" / "config_longrope.json", folder / "config.json")
    with (
        np.load(FIXTURES / "phi3" / "expected.npz") as known,
        np.load(FIXTURES / "phi3" / "expected_longrope.npz") as x,
    ):
        tokens, expected = known["tokens"], {16: x["short"], 128: x["long"]}
    for seq_len, logits in expected.items():
        model = sl.from_huggingface(folder, seq_len=seq_len, param_dtype=jnp.float32, implementation="reference")
        np.testing.assert_allclose(model(tokens[: len(logits)]), logits, atol=2e-5)
        sl.to_huggingface(model, tmp_path / str(seq_len))
        again = sl.from_huggingface(tmp_path / str(seq_len), seq_len=seq_len)
        assert again.blocks[0].attention.attention_fn.rope == model.blocks[0].attention.attention_fn.rope
    with pytest.raises(ValueError, match=r"'longrope' has factors for .* pass seq_len=16 or seq_len=128"):
        sl.from_huggingface(folder)
    longrope = json.loads((folder / "config.json").read_text())
    longrope["rope_parameters"]["partial_rotary_factor"] = 1.0
    with pytest.raises(ValueError, match="short_factors must be one for each of the 4 pairs, got 3"):
        sl.from_huggingface(write(folder, longrope, tensors("phi3")), seq_len=16)


def test_layers_without_rotary_embeddings():
    """A list of ones and zeros or an interval in SmolLM 3; the layers without a window in Exaone 4."""

    def rotates(name, **changes):
        found = settings(name, **changes)
        return [found["rope"][i % len(found["rope"])] is not None for i in range(3)]

    assert rotates("smollm3") == rotates("smollm3", no_rope_layers=[1, 0, 1]) == [True, False, True]
    assert rotates("smollm3", no_rope_layers=[1, 1, 1]) == [True] * 3
    assert rotates("smollm3", no_rope_layers=None, no_rope_layer_interval=3) == [True, True, False]
    assert rotates("exaone4") == [True, True, False]
    no_windows = {"sliding_window": None, "layer_types": None}
    assert rotates("exaone4", **no_windows) == [True] * 3
    assert settings("exaone4", **no_windows)["patterns"] == (sl.Causal(),)
    for pattern, expected in (("LLG", [True, True, False]), ("LGL", [True, False, False]), (2, [True, False, True])):
        assert rotates("exaone4", layer_types=None, sliding_window_pattern=pattern) == expected
    for wrong in ([1, 0], [1, 0, 2], 3):
        with pytest.raises(ValueError, match="no_rope_layers must be 3 times 0 or 1"):
            settings("smollm3", no_rope_layers=wrong)
    with pytest.raises(ValueError, match=r"partial_rotary_factor must be a number in \(0, 1\], got 0"):
        settings("phi3", rope_parameters=None, partial_rotary_factor=0)


def test_activations_are_written_by_their_names(tmp_path):
    for name, entry, activation in (
        ("llama", "hidden_act", "gelu_pytorch_tanh"),
        ("gemma2", "hidden_activation", "silu"),
        ("gpt2", "activation_function", "gelu"),
    ):
        arrays = {key: x for file in (FIXTURES / name).glob("*.safetensors") for key, x in load_file(file).items()}
        model = sl.from_huggingface(write(tmp_path / name, config(name) | {entry: activation}, arrays))
        sl.to_huggingface(model, tmp_path / f"{name}-new")
        assert json.loads((tmp_path / f"{name}-new" / "config.json").read_text())[entry] == activation


@pytest.mark.parametrize("num_layers", [1000, 10**12])
def test_a_wrong_number_of_layers_is_refused_before_anything_is_built(num_layers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3") | {"num_hidden_layers": num_layers}))
    (tmp_path / "model.safetensors").symlink_to(FIXTURES / "qwen3" / "model.safetensors")
    start = time.perf_counter()
    with pytest.raises(ValueError, match=rf"num_hidden_layers must be 3, as the .* so many layers, got {num_layers}"):
        sl.from_huggingface(tmp_path)
    assert time.perf_counter() - start < 1
    model = sl.from_huggingface(FIXTURES / "qwen3")
    with pytest.raises(ValueError, match=rf"num_hidden_layers must be 3, .* got {num_layers}"):
        sl.to_huggingface(model, tmp_path / "new", config={"model_type": "qwen3", "num_hidden_layers": num_layers})
