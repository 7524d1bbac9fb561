"""Makes the fixtures of test_huggingface.py: tiny models by Hugging Face's own library, and what they compute.

Those in this folder: transformers 5.23.0 with torch 2.13.0 on a CPU (Command R, MPT and BLOOM: 5.24.0 with 2.14.1),
and config_4.json by transformers 4.57.6.

    python tests/modules/loading/make_fixtures.py   # in an environment with transformers >= 5 and torch
    python tests/modules/loading/make_fixtures.py   # in one with transformers 4: configurations of that generation

Names of cases as arguments make these alone. Weights are random and kept in bfloat16; logits and greedy tokens are
those of these weights in float32.
"""

import pathlib
import shutil
import sys

FOLDER = pathlib.Path(__file__).parent / "fixtures"
TOKENS, PROMPT, STEPS = 64, 12, 100

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
# The class, its settings, and rotary embeddings as (theta, scaling), by the kind of layer where they differ.
CASES = {
    "gpt2": (
        "GPT2",
        {"vocab_size": 64, "n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}
        | {"bos_token_id": None, "eos_token_id": None},
        None,
    ),
    "llama": ("Llama", SIZES | {"head_dim": 12, "rms_norm_eps": 1e-5}, (500000.0, LLAMA3)),
    "mistral": ("Mistral", SIZES | {"sliding_window": 10, "rms_norm_eps": 1e-5}, (1e4, None)),
    "qwen2": (
        "Qwen2",
        SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        (1e6, YARN),
    ),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 8, "tie_word_embeddings": True}, (1e6, None)),
    "gemma2": (
        "Gemma2",
        SIZES
        | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 11}
        # So low that they show.
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
        (1e4, None),
    ),
    "gemma3_text": (
        "Gemma3",
        SIZES | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 11, "layer_types": KINDS},
        {"sliding_attention": (1e4, None), "full_attention": (1e6, {"rope_type": "linear", "factor": 8.0})},
    ),
    "olmo2": ("Olmo2", SIZES, (500000.0, None)),
    "olmo3": (
        "Olmo3",
        SIZES | {"sliding_window": 9, "layer_types": KINDS},
        {"sliding_attention": (500000.0, None), "full_attention": (500000.0, YARN)},
    ),
    "exaone4": (
        "Exaone4",
        SIZES | {"head_dim": 8, "sliding_window": 9, "layer_types": KINDS, "tie_word_embeddings": True},
        (1e6, LLAMA3),
    ),
    "smollm3": (
        "SmolLM3",
        SIZES | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9, "mlp_bias": True},
        (1e6, None),
    ),
    "phi3": ("Phi3", SIZES | {"sliding_window": 10, "partial_rotary_factor": 0.75}, (1e4, None)),
    "granite": (
        "Granite",
        SIZES
        | {"attention_bias": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.6}
        | {"attention_multiplier": 0.2, "logits_scaling": 0.5},
        (1e4, None),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        SIZES
        | {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
        (1e6, None),
    ),
    "mixtral": (
        "Mixtral",
        SIZES | {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        (1e6, None),
    ),
    "gpt_oss": (
        "GptOss",
        SIZES
        | {"head_dim": 8, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 10},
        (150000.0, YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
    ),
    # A theta that turns the pairs so fast that their order shows.
    "cohere": ("Cohere", SIZES | {"logit_scale": 5.0}, (1e3, None)),
    "cohere2": (
        "Cohere2",
        SIZES
        | {"sliding_window": 9, "layer_types": KINDS, "logit_scale": 4.0, "layer_norm_eps": 1e-3}
        | {"attention_bias": True},
        (1e3, None),
    ),
    # Six heads, whose slopes differ from those of eight, and between the two.
    "mpt": (
        "Mpt",
        {"vocab_size": 64, "d_model": 24, "n_heads": 6, "n_layers": 3, "max_seq_len": 128}
        | {"attn_config": {"softmax_scale": 0.4}},
        None,
    ),
    "bloom": (
        "Bloom",
        {"vocab_size": 64, "hidden_size": 24, "n_head": 6, "n_layer": 3, "layer_norm_epsilon": 1e-3}
        | {"bos_token_id": None, "eos_token_id": None},
        None,
    ),
}
# Phi 3 with LongRoPE: the same weights with a factor for each of the 3 pairs that rotate.
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0]}
LONGROPE |= {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONGROPE = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}


def rope(given, new):
    """The settings of rotary embeddings, in the words of the new or the old generation."""
    if given is None:
        return {}
    if isinstance(given, dict):
        if new:
            return {"rope_parameters": {kind: rope(each, new)["rope_parameters"] for kind, each in given.items()}}
        (local, _), (theta, scaling) = given["sliding_attention"], given["full_attention"]
        local = {} if local == theta else {"rope_local_base_freq": local}
        return {"rope_theta": theta, "rope_scaling": scaling} | local
    theta, scaling = given
    if new:
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"} | (scaling or {})}
    return {"rope_theta": theta, "rope_scaling": scaling}


def main():
    import transformers

    new = int(transformers.__version__.partition(".")[0]) >= 5
    for seed, (name, (kind, settings, given)) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = FOLDER / name
        of_text = "TextConfig" if kind == "Gemma3" else "Config"
        config = getattr(transformers, f"{kind}{of_text}")(**settings, **rope(given, new))
        if new:
            shutil.rmtree(folder, ignore_errors=True)
            make(folder, kind, config, seed, sharded=name == "llama")
            if name == "phi3":
                make_longrope(folder)
        else:
            config.architectures = [f"{kind}ForCausalLM"]
            config.to_json_file(folder / "config_4.json")


def make(folder, kind, config, seed, sharded):
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(1)  # such small products are slower by several
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    of_kind = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    model = of_kind(config)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            tensor.normal_()
            if "norm" in path or ".ln_" in path or path.endswith("bias"):
                tensor.mul_(0.3)
                if path.endswith("weight") and not kind.startswith("Gemma"):  # its scales are 1 + weight
                    # BLOOM's tied head would repeat each token, unless the norm of its embedding turns signs.
                    tensor.mul_(3) if "word_embeddings" in path else tensor.add_(1)
                elif "post_" in path:
                    tensor.add_(2)  # or the token's own embedding wins, which a tied head repeats
            elif not ("embed" in path or ".wte" in path or ".wpe" in path):
                tensor.mul_(min(tensor.shape[-2:]) ** -0.5)
                if kind == "GptOss" and path.endswith("gate_up_proj"):
                    tensor.mul_(3)  # so that its activation clamps
            else:
                # Gemma's are scaled. Cohere's head is tied, and would repeat each token.
                tensor.mul_(0.15 if kind.startswith("Gemma") else 0.1 if kind.startswith("Cohere") else 0.3)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="30KB" if sharded else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Read anew: the conversion has rounded what is not among the weights, too.
    model = of_kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(64, (1, TOKENS))
    with torch.no_grad():
        logits = model(tokens).logits[0]
        row = tokens[:, :PROMPT]
        for _ in range(STEPS):
            row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    np.savez_compressed(
        folder / "expected.npz", tokens=tokens[0].numpy(), logits=logits.numpy(), greedy=row[0, PROMPT:].numpy()
    )
    print(folder.name, "logits of", float(logits.std()), "tokens", row[0, PROMPT:].tolist()[:20])


def make_longrope(folder):
    """Writes the logits of Phi 3 with LongRoPE, of as many tokens as its original length and of all."""
    import json

    import numpy as np
    import torch
    import transformers

    with np.load(folder / "expected.npz") as expected:
        tokens = torch.from_numpy(expected["tokens"])[None]
    config = transformers.Phi3Config.from_dict(json.loads((folder / "config.json").read_text()) | LONGROPE)
    model = transformers.Phi3ForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    config.to_json_file(folder / "config_longrope.json")
    with torch.no_grad():
        short, long = (model.eval()(tokens[:, :count]).logits[0].numpy() for count in (16, TOKENS))
    np.savez_compressed(folder / "expected_longrope.npz", short=short, long=long)


if __name__ == "__main__":
    main()
