"""Makes sweep.json: mutated configurations of the fixtures, and what Hugging Face's library does with each of them.

That in this folder: transformers 5.24.0 with torch 2.13.0 on a CPU.

    python tests/modules/loading/make_sweep.py   # in an environment with transformers and torch

Each case drops, nulls or changes settings of a fixture's config.json. The library loads the fixture's weights with it.
"same": it computes the fixture's logits. A list of numbers: the first logits of the last token, which differ from those
of the fixture. "fails": it refuses the configuration, or weights are missing or left over.
"""

import contextlib
import io
import itertools
import json
import pathlib
import shutil
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
DROPPED = "(dropped)"
# Settings without a meaning for the logits.
IGNORED = {"architectures", "model_type", "transformers_version", "use_cache", "initializer_range", "pretraining_tp"}
IGNORED |= {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "attention_dropout", "vocab_size"}
IGNORED |= {"attn_pdrop", "embd_pdrop", "resid_pdrop"}
ADDED = {"attention_bias": [True], "mlp_bias": [True], "sliding_window": [8], "use_sliding_window": [True]}
ADDED |= {"head_dim": [None], "partial_rotary_factor": [0.5, 1.0], "rope_theta": [2e4], "torch_dtype": ["float16"]}
ADDED |= {"sliding_window_pattern": [2], "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3]}
ADDED |= {"no_rope_layers": [[1, 1, 1], [0, 1]]}
ADDED |= {"max_window_layers": [1], "query_pre_attn_scalar": [32], "hidden_activation": ["gelu_pytorch_tanh", None]}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = [None, LINEAR, YARN, YARN | {"truncate": False}, {"rope_type": "dynamic", "factor": 2.0}]
SCALINGS += [LLAMA3, LLAMA3 | {"original_max_position_embeddings": 32}, {"rope_type": "default"}, {}]
SCALINGS += [YARN | {"factor": None}, YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}, YARN | {"mscale": 2.0}]
SCALINGS += [LINEAR | {"finetuned": True}, LINEAR | {"original_max_position_embeddings": 32}]
SCALINGS += [YARN | {"finetuned": True}, YARN | {"beta_fast": 8, "beta_slow": None}]
WINDOWS = {"use_sliding_window": [True, False, DROPPED], "sliding_window": [8, None, DROPPED]}
WINDOWS |= {"max_window_layers": [1, DROPPED], "layer_types": [DROPPED, None, ["full_attention"] * 2]}


def values(name, value):
    """Returns other values of a setting."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [2 * value, str(value)]
    if isinstance(value, int):
        return [value * 2, float(value)]
    if name in ("hidden_act", "hidden_activation", "activation_function"):
        return ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish"]
    if name == "layer_types":
        return [value[::-1], ["full_attention"] * 3, ["sliding_attention"] * 3, value[:2]]
    return []


def mutations(name, config):
    """Returns changes of a configuration, each a dict of settings."""
    changes = [{}]
    for name, value in config.items():
        if name not in IGNORED and not name.startswith("summary_"):
            changes += [{name: x} for x in [DROPPED, None, *values(name, value)]]
    changes += [{name: x} for name, others in ADDED.items() if name not in config for x in others]
    if "sliding_window" in config:
        names = [name for name in WINDOWS if name in config]
        changes += [dict(zip(names, x, strict=True)) for x in itertools.product(*(WINDOWS[name] for name in names))]
    rope = config.get("rope_parameters")
    if not rope:
        return changes
    theta = {"rope_theta": rope.get("full_attention", rope)["rope_theta"]}
    # With Gemma 3, transformers 5 reads no "type" as earlier generations do.
    older = [{"type": "linear", "factor": 2.0}] if "rope_theta" in rope else []
    for scaling in SCALINGS + older if name in ("llama", "qwen2", "gemma3_text") else SCALINGS[:4]:
        changes += [{"rope_parameters": DROPPED, "rope_scaling": scaling} | theta]
        if "rope_theta" in rope:
            changes += [{"rope_parameters": theta | (scaling or {})}]
        else:
            full = rope["full_attention"] | {"rope_type": "default"} | (scaling or {})
            changes += [{"rope_parameters": rope | {"full_attention": full}}]
    return changes


def mutated(config, change):
    return {name: x for name, x in (config | change).items() if x != DROPPED}


def logits(folder, tokens):
    """Returns the logits of the last token, or None where the library fails."""
    import torch
    import transformers

    try:
        with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
                return None
            return model.eval()(tokens).logits[0, -1].numpy()
    except Exception:  # whatever it is, the library cannot use such a folder
        return None


def main():
    import numpy as np
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    record = {}
    names = sorted(path.name for path in (FOLDER / "fixtures").iterdir())
    for name in sys.argv[2:] or names:
        source = FOLDER / "fixtures" / name
        config = json.loads((source / "config.json").read_text())
        tokens = torch.from_numpy(np.load(source / "expected.npz")["tokens"])[None]
        with tempfile.TemporaryDirectory() as parent:
            folder = pathlib.Path(shutil.copytree(source, pathlib.Path(parent, name)))
            expected, record[name] = logits(folder, tokens), []
            for change in mutations(name, config):
                (folder / "config.json").write_text(json.dumps(mutated(config, change)))
                actual = logits(folder, tokens)
                is_same = actual is not None and np.abs(actual - expected).max() < 1e-4
                shown = "fails" if actual is None else "same" if is_same else actual[:4].round(5).tolist()
                record[name].append([change, shown])
        counts = {kind: sum(shown == kind for _, shown in record[name]) for kind in ("same", "fails")}
        print(name, len(record[name]), counts)
    lines = ",\n".join(
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "]" for name, rows in record.items()
    )
    pathlib.Path(sys.argv[1] if sys.argv[1:] else FOLDER / "sweep.json").write_text(f"{{{lines}}}\n")


if __name__ == "__main__":
    main()
