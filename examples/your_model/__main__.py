"""The perplexity of a Hugging Face model before and after its layers become sparse, and after fine-tuning."""

import argparse
import itertools
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import sparse_layers as sl

from ..training.config import Refusal
from ..training.data import bits
from ..training.model import allowed_pairs, without_future
from .text import load
from .training import losses, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Loads, measures, trains and prints; arguments as on the command line. Exit code 2 and a line for wrong ones."""
    parser = argparse.ArgumentParser(prog="python -m examples.your_model", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="with config.json, tensors, and tokenizer.json if it has one")
    parser.add_argument("--text", default="", help="a file or folder; default: this Python's standard library")
    parser.add_argument(
        "--pattern",
        help="patterns that the layers take in turn, joined by '+' [five windows of length / 8, then causal]",
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a window [512]")
    parser.add_argument("--windows", type=int, default=32, help="held-out windows to measure on [32]")
    parser.add_argument("--steps", type=int, default=0, help="steps of fine-tuning, of the dense model too [0]")
    parser.add_argument("--batch-size", type=int, default=1, help="windows a step [1]")
    parser.add_argument("--rate", type=float, default=2e-5, help="peak of the learning rate [2e-5]")
    parser.add_argument("--dtype", help="of the computation, as in bfloat16 [float32, as the weights]")
    options = parser.parse_args(arguments)
    try:
        for name, least in (("length", 1), ("windows", 1), ("steps", 0), ("batch_size", 1)):
            if getattr(options, name) < least:
                raise Refusal(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
        compare(options)
    except (ValueError, TypeError, OSError) as error:
        print(f"your_model: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def compare(options: argparse.Namespace) -> None:
    """Prints rows for the model as its files have it ("dense") and with the patterns, before and after fine-tuning.

    Raises:
      ValueError, OSError: the files, the text or the patterns cannot be taken.
    """
    learnt, heldout = load(options.folder, options.text, options.length)
    window = f"sliding_window:window={max(1, options.length // 8)}"
    names = options.pattern or "+".join([*[window] * 5, "causal"])
    patterns = tuple(without_future(sl.Scorer.named(name) or sl.preset(name)) for name in names.split("+"))
    tokens = heldout.spread(options.windows)
    of_bytes = not (options.folder / "tokenizer.json").is_file()
    repeats = [f"{len([*same])} x {name}" for name, same in itertools.groupby(names.split("+"))]
    print(f"sparse, in turn: {', '.join(repeats)}\n{options.windows} held-out windows of {options.length} tokens\n")
    print(f"{'':24}{'pairs kept':>12}{'KiB of cache':>14}{'s/step':>9}{'perplexity':>12}{'bits a byte':>13}")
    places = {}
    for name, pattern in (("dense", None), ("sparse", patterns)):  # one at a time in memory
        model = sl.from_huggingface(
            options.folder,
            pattern,
            seq_len=options.length,
            param_dtype=jnp.float32,
            dtype=options.dtype and jnp.dtype(options.dtype),
        )
        losses_by_name, seconds = {name: losses(model, tokens)}, math.nan
        if options.steps:
            _, seconds = train(model, learnt, options.steps, options.rate, batch_size=options.batch_size)
            losses_by_name[f"{name}, {options.steps} steps"] = losses(model, tokens)
        sizes = f"{pairs_kept(model):12.1%}{cache_bytes(model) / 1024:14,.0f}"
        for row, nats in losses_by_name.items():
            mean = nats.mean()
            step = f"{seconds:9.3f}" if row != name else f"{'':9}"
            byte = f"{bits(mean):13.3f}" if of_bytes else ""
            print(f"{row:24}{sizes}{step}{np.exp(mean):12.3f}{byte}", flush=True)
        places |= losses_by_name

    ends = [0, *(options.length >> i for i in range(4, -1, -1) if options.length >> i)]
    ranges = list(itertools.pairwise(ends))
    heads = [f"{begin + 1}-{end}" for begin, end in ranges]
    print(f"\n{'perplexity of tokens':24}{''.join(f'{head:>12}' for head in heads)}")
    for row, nats in places.items():
        print(f"{row:24}{''.join(f'{np.exp(nats[begin:end].mean()):12.3f}' for begin, end in ranges)}")


def pairs_kept(model: sl.SparseTransformer) -> float:
    """The share of the causal pairs (query, key) that is attended to, over all layers, in ``model.seq_len`` tokens."""
    length = model.seq_len
    pairs: Any = [allowed_pairs(layer.attention.pattern, length) for layer in model.layers]
    return float(np.mean(pairs)) / (length * (length + 1) / 2)


def cache_bytes(model: sl.SparseTransformer) -> int:
    """Bytes of keys and values, of all layers, that one sequence of ``model.seq_len`` tokens is decoded with."""
    _, caches = nnx.eval_shape(lambda model: model.prefill(jnp.zeros((1, 1), int)), model)
    return sum(cache.nbytes for cache in caches)


if __name__ == "__main__":
    sys.exit(main())
