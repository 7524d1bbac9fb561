"""Models are written as Hugging Face writes them: tensor by tensor what its own library wrote."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import sparse_layers as sl
from examples.your_model.saving import save

FIXTURES = pathlib.Path(__file__).parents[1] / "modules" / "loading" / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())


def config(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def tensors(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in safetensors.numpy.load_file(file).items()}


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_what_those_of_hugging_face_held(name, tmp_path):
    model = sl.from_huggingface(FIXTURES / name)
    save(model, tmp_path / "new", config(name))
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == config(name)
    before, after = tensors(FIXTURES / name), tensors(tmp_path / "new")
    assert after.keys() == before.keys() - ({"lm_head.weight"} if model.head is None else set())
    for key, tensor in after.items():
        assert tensor.dtype == before[key].dtype
        np.testing.assert_array_equal(tensor.astype(np.float32), before[key].astype(np.float32), err_msg=key)
    with (tmp_path / "new" / "model.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0
    with safetensors.safe_open(tmp_path / "new" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}, "transformers asks for it"


def test_scanned_layers_and_other_dtypes(tmp_path):
    model = sl.from_huggingface(FIXTURES / "qwen3", param_dtype=jnp.float32, scan_layers=True)
    save(model, tmp_path, config("qwen3"))
    before, after = tensors(FIXTURES / "qwen3"), tensors(tmp_path)
    assert {x.dtype for x in after.values()} == {np.dtype(np.float32)}
    for key, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[key].astype(np.float32))


def test_windows_in_the_configuration_are_the_pattern(tmp_path):
    near = sl.preset("sliding_window", window=8)
    how = {"implementation": "reference", "param_dtype": jnp.float32}
    sparse = sl.from_huggingface(FIXTURES / "qwen3", (near, near, sl.Causal()), **how)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    words = {"layer_types": kinds, "sliding_window": 8, "use_sliding_window": True}
    save(sparse, tmp_path, config("qwen3") | words)
    again = sl.from_huggingface(tmp_path, **how)
    run = nnx.jit(lambda model: model(jnp.arange(60)[None]))
    np.testing.assert_array_equal(run(again), run(sparse))
    assert np.abs(run(sl.from_huggingface(FIXTURES / "qwen3", **how)) - run(sparse)).max() > 0.1


def test_what_is_refused(tmp_path):
    model = sl.from_huggingface(FIXTURES / "qwen3")
    for change in ({"intermediate_size": 40}, {"num_key_value_heads": 1}, {"tie_word_embeddings": False}):
        with pytest.raises(ValueError, match="config must be the model's, but differs from it in"):
            save(model, tmp_path / "new", config("qwen3") | change)
    with pytest.raises(ValueError, match="model_type: 'qwen4'"):
        save(model, tmp_path / "new", config("qwen3") | {"model_type": "qwen4"})
    with pytest.raises(ValueError, match=r"such files hold no blocks\.0\.attention\.sinks"):
        save(sl.from_huggingface(FIXTURES / "qwen3", use_sinks=True), tmp_path / "new", config("qwen3"))
    with pytest.raises(ValueError, match=r"differs from it in transformer\.wpe\.weight"):
        save(sl.from_huggingface(FIXTURES / "gpt2", seq_len=64), tmp_path / "new", config("gpt2"))
    assert not (tmp_path / "new").exists()
