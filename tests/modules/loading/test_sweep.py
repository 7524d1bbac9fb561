"""Mutated configurations load as by Hugging Face's library, or are refused; `make_sweep.py` records its logits."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.modules.loading.config import Config
from sparse_layers.modules.loading.families import read_settings
from tests.programs import ALL_CASES

FOLDER = pathlib.Path(__file__).parent
SWEEP = json.loads((FOLDER / "sweep.json").read_text())
EVERY = 1 if ALL_CASES else 8  # all configurations take minutes
# Settings that are refused though the library takes them: activations that no gated MLP has, attention that sees the
# future, a scale by layer; and what the library ignores, though the setting says otherwise.
REFUSED = {"hidden_act", "hidden_activation", "activation_function", "use_bidirectional_attention"}
REFUSED |= {"scale_attn_by_inverse_layer_idx", "scale_attn_weights", "use_sliding_window"}
REFUSED |= {"mlp_bias", "attention_bias", "partial_rotary_factor", "tie_word_embeddings", "layer_types"}

# Constants of the activation of gpt-oss, and its YaRN, which released models state.
REFUSED_BY_FAMILY = {"gpt_oss": {"swiglu_alpha", "swiglu_limit", "rope_parameters"}}
REFUSED_BY_FAMILY |= {"bloom": {"apply_residual_connection_post_layernorm"}, "mpt": {"no_bias", "expansion_ratio"}}


@pytest.mark.parametrize("name", SWEEP)
def test_mutated_configurations_load_as_in_hugging_face(name, tmp_path):
    """Equal settings give equal logits, which are computed once, without jit: programs would compile for minutes."""
    folder = shutil.copytree(FOLDER / "fixtures" / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    with np.load(folder / "expected.npz") as expected:
        tokens, fixture_logits = expected["tokens"], expected["logits"][-1]
    refused = REFUSED | REFUSED_BY_FAMILY.get(name, set())
    changes, last_logits, counts = SWEEP[name][::EVERY], {}, {"equal": 0, "refused": 0, "both refuse": 0}
    for change, outcome in changes:
        settings = {key: x for key, x in (config | change).items() if x != "(dropped)"}
        (folder / "config.json").write_text(json.dumps(settings))
        try:
            key = str(read_settings(Config(folder / "config.json"), 3, 128)), str(settings.get("tie_word_embeddings"))
            if key not in last_logits:
                options = {"param_dtype": jnp.float32, "implementation": "reference", "seq_len": 128}
                model = sl.from_huggingface(folder, **options)
                last_logits[key] = np.asarray(model(tokens))[-1]
        except ValueError as error:
            assert outcome == "fails" or refused & {*change}, f"{change}: {error}"
            counts["both refuse" if outcome == "fails" else "refused"] += 1
            continue
        if outcome != "fails":
            wanted = fixture_logits if outcome == "same" else np.array(outcome)
            np.testing.assert_allclose(last_logits[key][: wanted.size], wanted, atol=1e-4, err_msg=str(change))
            counts["equal"] += 1
    assert counts["equal"] > 0.3 * len(changes) and counts["refused"] < 0.15 * len(changes), counts
