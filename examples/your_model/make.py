"""Makes a small Qwen 3 of bytes, in a folder as Hugging Face's library writes them, for who has no real one at hand."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import optax.contrib
from flax import nnx

import sparse_layers as sl

from .text import load_bytes
from .training import train

# As of Qwen 3; ids of bytes are the vocabulary.
SETTINGS: dict[str, Any] = {
    "vocab_size": 256,
    "num_heads": 4,
    "features": 128,
    "num_layers": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "mlp": "swiglu",
    "mlp_features": 384,
    "norm": "rms",
    "norm_epsilon": 1e-6,
    "normalize_qk": True,
    "use_bias": False,
    "positions": "rope",
    "rope_theta": 1000000.0,
    "seq_len": 512,
    "tie_embeddings": True,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains a model with plain causal attention and writes it; arguments as on the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.your_model.make", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a new one, where the model is written")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of one window of 512 bytes [1000]")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        parser.error(f"folder must be new, and {options.folder} exists")

    model = sl.SparseTransformer(**SETTINGS, patterns="causal", rngs=nnx.Rngs(0))
    windows, _ = load_bytes("", model.seq_len)
    loss, seconds = train(model, windows, options.steps, 1e-2, optimizer=optax.contrib.muon)
    sl.to_huggingface(model, options.folder)
    print(f"{options.folder}: {options.steps} steps of {seconds:.3f} s, loss {loss:.3f} nats a byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
