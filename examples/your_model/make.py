"""Makes a small Qwen 3 of bytes, in a folder as Hugging Face's library writes them, for who has no real one at hand."""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import optax.contrib
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules.loading.families import Config, described

from .saving import save
from .text import load
from .training import train

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,  # bytes
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 6,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains a model with plain causal attention and writes it; arguments as on the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.your_model.make", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="where the model is written")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of one window of 512 bytes [1000]")
    options = parser.parse_args(arguments)

    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "config.json"
    file.write_text(json.dumps(CONFIG))
    _, settings = described(Config(file))
    model = sl.SparseTransformer(**settings, tie_embeddings=True, rngs=nnx.Rngs(0))
    windows, _ = load(options.folder, "", settings["seq_len"])
    loss, seconds = train(model, windows, options.steps, 1e-2, optimizer=optax.contrib.muon)
    save(model, options.folder, CONFIG)
    print(f"{options.folder}: {options.steps} steps of {seconds:.3f} s, loss {loss:.3f} nats a byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
