"""Models are written as Hugging Face writes them: tensor by tensor what its own library wrote."""

import errno
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import sparse_layers as sl
from tests.programs import sampled

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
# Words of theirs that only mean something beside a tokenizer, in training or in their library.
LEFT_OUT = {"attention_dropout", "initializer_range", "transformers_version", "use_cache", "pretraining_tp"}
LEFT_OUT |= {"attn_pdrop", "embd_pdrop", "resid_pdrop", "use_bidirectional_attention", "_sliding_window_pattern"}
LEFT_OUT |= {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
LEFT_OUT |= {"add_cross_attention", "reorder_and_upcast_attn", "scale_attn_weights"}
LEFT_OUT |= {"scale_attn_by_inverse_layer_idx", "rope_parameters"}
# Lists of layers say the same, and without LongRoPE there is no original length.
LEFT_OUT |= {"sliding_window_pattern", "no_rope_layer_interval", "original_max_position_embeddings"}
LEFT_OUT |= {"attn_config", "emb_pdrop", "embedding_fraction", "init_device", "learned_pos_emb", "norm_type"}
LEFT_OUT |= {"hidden_dropout", "slow_but_exact"}
FLOAT32 = {"param_dtype": jnp.float32}
EAGER = FLOAT32 | {"implementation": "reference"}  # nothing compiles for seconds
TOKENS = jnp.arange(60)[None]


def config(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def tensors(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in safetensors.numpy.load_file(file).items()}


@pytest.mark.parametrize("name", NAMES)
def test_files_equal_those_of_hugging_face(name, tmp_path):
    model = sl.from_huggingface(FIXTURES / name)
    sl.to_huggingface(model, tmp_path / "new")
    written, known = json.loads((tmp_path / "new" / "config.json").read_text()), config(name)
    words = [word for word in known if word not in LEFT_OUT and not word.startswith("summary_")]
    if known.get("head_dim", 0) is None:  # its default is a quotient
        words.remove("head_dim")
    if not known.get("use_sliding_window", True):
        words = [word for word in words if word not in ("sliding_window", "max_window_layers")]
    assert {word: written[word] for word in words} == {word: known[word] for word in words}
    before, after = tensors(FIXTURES / name), tensors(tmp_path / "new")
    assert after.keys() == before.keys() - ({"lm_head.weight"} if model.head is None else set())
    for key, tensor in after.items():
        assert tensor.dtype == before[key].dtype
        np.testing.assert_array_equal(tensor.astype(np.float32), before[key].astype(np.float32), err_msg=key)
    with (tmp_path / "new" / "model.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0
    with safetensors.safe_open(tmp_path / "new" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}, "transformers asks for it"


def assert_equal_models(one, other):
    """Settings and weights are equal, so logits are: nothing has to be compiled to see that."""
    (settings, weights), (other_settings, other_weights) = map(nnx.split, (one, other))
    assert settings == other_settings
    jax.tree.map(np.testing.assert_array_equal, weights, other_weights)


@pytest.mark.parametrize("name", sampled(NAMES, 0.5))
def test_reloaded_models_are_the_same(name, tmp_path):
    model = sl.from_huggingface(FIXTURES / name, **FLOAT32)
    sl.to_huggingface(model, tmp_path)
    assert_equal_models(sl.from_huggingface(tmp_path, **FLOAT32), model)


@pytest.mark.parametrize("name", sampled(NAMES, 0.5))
def test_a_whole_configuration_is_kept(name, tmp_path):
    sl.to_huggingface(sl.from_huggingface(FIXTURES / name), tmp_path, config=config(name))
    assert config(name).items() <= json.loads((tmp_path / "config.json").read_text()).items()


def test_scanned_layers_and_other_dtypes(tmp_path):
    model = sl.from_huggingface(FIXTURES / "qwen3", param_dtype=jnp.float32, scan_layers=True)
    sl.to_huggingface(model, tmp_path, config={"eos_token_id": 3})
    before, after = tensors(FIXTURES / "qwen3"), tensors(tmp_path)
    assert {x.dtype for x in after.values()} == {np.dtype(np.float32)}
    for key, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[key].astype(np.float32))
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["eos_token_id"], written["dtype"]) == (3, "float32")


WINDOW_OF_8 = sl.preset("sliding_window", window=8)


WINDOWS = [
    ("qwen2", (WINDOW_OF_8, WINDOW_OF_8, "causal")),
    ("qwen3", (sl.Causal(), WINDOW_OF_8)),
    ("gemma2", "causal"),
    ("gemma3_text", (sl.Window(3), "sliding_window:window=4", "all")),
    ("mistral", "causal"),
    ("mistral", sl.Causal() & sl.Window(6, 3)),
    ("llama", WINDOW_OF_8),  # written as a Mistral
    ("llama", (WINDOW_OF_8, WINDOW_OF_8, "causal")),  # written as a Ministral
]


@pytest.mark.parametrize(("name", "patterns"), sampled(WINDOWS, 0.6))
def test_windows_are_in_the_configuration(name, patterns, tmp_path):
    sparse = sl.from_huggingface(FIXTURES / name, patterns, **EAGER)
    with warnings.catch_warnings(action="error"):
        sl.to_huggingface(sparse, tmp_path)
    logits, dense = sparse(TOKENS), sl.from_huggingface(FIXTURES / name, **EAGER)
    np.testing.assert_array_equal(sl.from_huggingface(tmp_path, **EAGER)(TOKENS), logits)
    assert np.abs(dense(TOKENS) - logits).max() > 0.01


UNWRITTEN = [
    ("granite", (WINDOW_OF_8, "causal"), 2),
    ("qwen3", ("causal", "strided:local_attn_ctx=8"), 1),
    ("gemma3_text", "strided:local_attn_ctx=8", 3),
    ("olmo2", ("all", "moba:block=16,count=2"), 1),
    ("gpt2", (("causal", WINDOW_OF_8),), 3),
    ("qwen2", (WINDOW_OF_8, "sliding_window:window=4", "causal"), 2),
]


@pytest.mark.parametrize(("name", "patterns", "count"), sampled(UNWRITTEN, 0.6))
def test_patterns_that_files_cannot_hold_are_passed_again(name, patterns, count, tmp_path):
    sparse = sl.from_huggingface(FIXTURES / name, patterns, **FLOAT32)
    with pytest.warns(UserWarning, match=rf"the patterns of {count} layers, first of layer \d: .*from_huggingface"):
        sl.to_huggingface(sparse, tmp_path)
    assert_equal_models(sl.from_huggingface(tmp_path, patterns, **FLOAT32), sparse)


def test_models_that_were_not_loaded(tmp_path):
    rope = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "use_bias": False, "seq_len": 60, "num_kv_heads": 2}
    rope["head_init"] = nnx.initializers.normal(1)
    gpt2 = {"positions": "learned", "mlp": "gelu_tanh", "seq_len": 60, "tie_embeddings": True}
    cases = {
        "llama": rope | {"rope": sl.Rope(5e4, scaling=sl.Llama3Scaling(4.0, 64)), "use_bias": ("mlp",)},
        "mistral": rope | {"patterns": WINDOW_OF_8},
        "qwen2": rope | {"use_bias": ("query", "key", "value"), "rope": sl.Rope(scaling=sl.YarnScaling(2.0, 32))},
        "qwen3": rope | {"normalize_qk": True, "patterns": (WINDOW_OF_8, "causal")},
        "olmo2": rope | {"normalize_qk": "rms_joint", "norm_placement": "post"},
        "gpt2": gpt2 | {"norm_epsilon": 1e-5},
    }
    for name, options in cases.items():
        options |= {"implementation": "reference", "rngs": nnx.Rngs(0)}
        model = sl.SparseTransformer(64, 4, 32, 2, **{"patterns": "causal"} | options)
        sl.to_huggingface(model, tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == name
        np.testing.assert_allclose(sl.from_huggingface(tmp_path / name, **EAGER)(TOKENS), model(TOKENS), atol=2e-5)


def test_what_is_refused(tmp_path):
    model, new = sl.from_huggingface(FIXTURES / "qwen3"), tmp_path / "new"
    for change, reason in (
        ({"intermediate_size": 40}, r"mlp, \('swiglu', 48\) in the model and \('swiglu', 40\) in config.json"),
        ({"num_key_value_heads": 1}, "num_kv_heads, 2 in the model and 1"),
        ({"rms_norm_eps": 1e-3}, "norm_epsilon, 1e-06 in the model and 0.001"),
        ({"model_type": "llama"}, "normalize_qk, 'rms' in the model and False"),
        ({"tie_word_embeddings": False}, "tie_embeddings, True in the model and False"),
    ):
        words = config("qwen3") | change
        with pytest.raises(
            ValueError, match=f"^config must be the model's, but differs in {words['model_type']}: {reason}"
        ):
            sl.to_huggingface(model, new, config=words)
    with pytest.raises(ValueError, match=r"model_type must be one of .* got 'qwen4'"):
        sl.to_huggingface(model, new, config={"model_type": "qwen4"})
    with pytest.raises(ValueError, match="seq_len, 64 in the model and 128"):
        sl.to_huggingface(sl.from_huggingface(FIXTURES / "gpt2", seq_len=64), new, config=config("gpt2"))
    kind = {"patterns": "causal", "seq_len": 16, "rngs": nnx.Rngs(0)}
    for options, reason in (
        ({}, r"gpt2: positions, 'row_column' in the model.*; olmo2: positions"),
        ({"parallel": True, "positions": "learned", "mlp": "gelu_tanh"}, "gpt2: parallel, True in the model and False"),
        (
            {"positions": "learned", "mlp": "gelu_tanh", "relative_bias": sl.AlibiBias()},
            r"gpt2: relative_bias, AlibiBias",
        ),
        (
            {
                "positions": "learned",
                "mlp": "gelu_tanh",
                "relative_bias": sl.LearnedBias(3),
                "share_relative_bias": True,
            },
            r"gpt2: relative_bias, LearnedBias\(left=3, right=0\) in the model and None",
        ),
        ({"make_mlp": lambda rngs: jnp.tanh}, "layer 0 has an MLP of make_mlp"),
        (
            {"patterns": sl.NSA(block=16, count=4, pool_size=16, pool_stride=16, sliding=16)},
            "layer 0 has NativeSparseAttention",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            sl.to_huggingface(sl.SparseTransformer(11, 2, 16, 2, **kind | options), new)
    assert not new.exists(), "refused before anything is written"


class Frozen(nnx.Variable):
    """Weights that an optimizer of `nnx.Param` leaves alone."""


@pytest.mark.parametrize("scan_layers", [False, True])
def test_frozen_weights_are_written(scan_layers, tmp_path):
    model, copy = (small_model(scan_layers=scan_layers, dropout_rate=0.1, deterministic=True) for _ in range(2))
    attention = model.blocks[0].attention
    for module in (attention.query, model.blocks[0].mlp_gate, model.token_embedding):
        name = "embedding" if module is model.token_embedding else "kernel"
        setattr(module, name, Frozen(getattr(module, name).get_value()))
    sl.to_huggingface(model, tmp_path / "frozen")
    sl.to_huggingface(copy, tmp_path / "copy")
    frozen, expected = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("frozen", "copy"))
    assert frozen == expected


def test_nothing_is_overwritten(tmp_path):
    model = sl.from_huggingface(FIXTURES / "qwen3")
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(FileExistsError, match=r"folder must be new or empty.*name another one, or remove"):
            sl.to_huggingface(model, path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    sl.to_huggingface(model, tmp_path / "empty")


def small_model(patterns="causal", **options):
    rope = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "use_bias": False, "seq_len": 16}
    return sl.SparseTransformer(11, 2, 8, 1, patterns=patterns, rngs=nnx.Rngs(0), **rope | options)


def small_model_with_adapter():
    model = small_model()
    model.blocks[0].mlp_gate = nnx.LoRALinear(8, 32, lora_rank=2, use_bias=False, rngs=nnx.Rngs(0))
    return model


def small_model_with_frozen_scale():
    model = small_model()
    model.blocks[0].layer_scale = Frozen(jnp.ones(8))
    return model


UNNAMED = [
    (lambda: small_model(use_sinks=True), r"attention\.sinks: only models without use_sinks"),
    (lambda: small_model("msa:block=16,count=1"), r"attention\.index_\w+\.\w+: only models without a scorer's index"),
    (lambda: small_model(gate_output=True), r"attention\.out_gate\.kernel: only models without gate_output"),
    (small_model_with_adapter, r"mlp_gate\.lora\.lora_a: only models without this module"),
    (small_model_with_frozen_scale, r"blocks\.0\.layer_scale: only models without this module"),
    (
        lambda: small_model(param_dtype="float8_e4m3fn"),
        "parameters must be float32, float16, bfloat16, got float8",
    ),
]


@pytest.mark.parametrize(("make", "reason"), UNNAMED, ids=[reason for _, reason in UNNAMED])
def test_parameters_without_names_are_refused_before_anything_is_written(make, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        sl.to_huggingface(make(), tmp_path / "new")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["jit", "eval_shape"])
def test_parameters_without_values_are_refused_before_anything_is_written(kind, tmp_path):
    folder = tmp_path / "parent" / "new"
    value = {"jit": ".*Tracer", "eval_shape": "ShapeDtypeStruct"}[kind]
    with pytest.raises(TypeError, match=rf"^model: parameters must have values.*got {value} for .*outside of jit"):
        if kind == "jit":
            nnx.jit(lambda model: sl.to_huggingface(model, folder))(small_model())
        else:
            sl.to_huggingface(nnx.eval_shape(small_model), folder)
    assert not [*tmp_path.iterdir()]
    sl.to_huggingface(small_model(), folder)
    assert not [path for path in folder.parent.iterdir() if path != folder]


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("failing", ["model.safetensors", "config.json"])
def test_a_write_that_fails_midway_leaves_nothing(failing, empty, tmp_path, monkeypatch):
    folder = tmp_path / "parent" / "new"
    if empty:
        folder.mkdir(parents=True)
    before, path_open = [*tmp_path.rglob("*")], pathlib.Path.open

    def full(path, mode="r", *args, **options):
        file = path_open(path, mode, *args, **options)
        if path.name == failing:
            file.write(b"half" if "b" in mode else "half")
            file.close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return file

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", full)
        patch.setattr(pathlib.Path, "write_text", lambda path, text: path.open("w").write(text))
        with pytest.raises(OSError, match="No space left on device"):
            sl.to_huggingface(small_model(), folder)
    assert [*tmp_path.rglob("*")] == before
    sl.to_huggingface(small_model(), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
