"""Bits per byte by minimum context: ``python -m examples.train_lm.evaluate --out DIR``.

As in Child et al. 2019, table 3: each byte is predicted from at least so many bytes before it, by windows that overlap.
The longer the context that a model can use, the better it gets down the table.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from ..training.config import Refusal
from ..training.data import Batch, bits
from ..training.loop import check_corpus
from ..training.model import counted, mean_loss
from ..training.run import Run, State, fitting, open_run
from .config import Config
from .data import Text, prefix_order, text_windows


@dataclasses.dataclass(frozen=True)
class Row:
    """Bits per byte of the bytes that have at least ``context`` bytes before them in their window.

    Attributes:
      context: in bytes.
      bits_per_byte: mean over the bytes scored.
      windows: how many the model read.
      seconds: that it took, with compiling.
    """

    context: int
    bits_per_byte: float
    windows: int
    seconds: float


def default_contexts(seq_len: int) -> list[int]:
    """1 and those of the paper's table, as shares of the length: 1/2, 3/4, 7/8, 31/32, 63/64, 95/96.

    Example:
      >>> default_contexts(12288)
      [1, 6144, 9216, 10752, 11904, 12096, 12160]
    """
    return sorted({1, *(max(1, seq_len - seq_len // divisor) for divisor in (2, 4, 8, 32, 64, 96))})


def by_context(run: Run[Config], state: State, text: Text, contexts: Sequence[int], count: int) -> Iterator[Row]:
    """One `Row` for each minimum context, all scored on the same bytes.

    Args:
      run: whose model reads.
      state: of the run.
      text: what is read; the first max(contexts) bytes are context only.
      contexts: each in 1..seq_len.
      count: bytes to score, in stretches of about seq_len bytes that are spread over the text; fewer if it is shorter.

    Raises:
      Refusal: a context out of range, or a text without bytes to score.
    """
    length, first = run.config.seq_len, max(contexts)
    for context in contexts:
        if not 1 <= context <= length:
            raise Refusal(f"--contexts must lie in 1..seq_len={length}, got {context}")
    scored = min(count, text.size - first)
    if scored < 1:
        raise Refusal(f"--bytes {count}: of {text.size} bytes, none has {first} before it")
    step = jax.jit(lambda state, batch: mean_loss(run.model(state), batch))
    number = max(1, scored // length)
    edges = first + scored * np.arange(number + 1) // number
    # What is left out lies between the stretches, in equal parts.
    left_out = (text.size - first - scored) * np.arange(number) // max(1, number - 1)
    stretches = np.stack([edges[:-1] + left_out, edges[1:] + left_out], axis=1)
    for context in contexts:
        began, total, bytes_scored, windows = time.perf_counter(), 0.0, 0, 0
        # A window of T inputs predicts T bytes; with c or more before them are the last T - c + 1.
        fresh = length - context + 1
        asked = [
            (position, min(position + fresh, end)) for begin, end in stretches for position in range(begin, end, fresh)
        ]
        for rows in np.array_split(asked, -(-len(asked) // run.config.batch_size)):
            batch = _windows(text, rows[:, 0] - context, rows, run.config)
            counted_bytes = int(counted(batch).sum())
            total += counted_bytes * float(step(state, run.shard(batch)))
            windows, bytes_scored = windows + len(rows), bytes_scored + counted_bytes
        yield Row(context, bits(total / max(bytes_scored, 1)), windows, time.perf_counter() - began)


def _windows(text: Text, starts: np.ndarray, asked: np.ndarray, config: Config) -> Batch:
    """Windows that begin at ``starts`` and are asked for some of their bytes each, int [windows, 2]: first and end."""
    # A last batch is filled up with windows that count for nothing, and those that pass the end are moved back.
    missing = config.batch_size - len(starts)
    starts, asked = np.pad(starts, (0, missing)), np.pad(asked, ((0, missing), (0, 0)))
    moved = np.minimum(starts, text.size - config.seq_len - 1)
    target = moved[:, None] + 1 + np.arange(config.seq_len)
    answers = (target >= asked[:, :1]) & (target < asked[:, 1:])
    # What a prefix LM has before the first byte that it is asked for is its prefix.
    order = prefix_order(asked[:, 0] - moved, config.seq_len) if config.looks_ahead else None
    return text_windows(text, moved, config.seq_len, config.packed)._replace(answers=answers, order_ids=order)


def main(argv: list[str] | None = None) -> int:
    """Command line of the evaluation. Returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm.evaluate", description="Bits per byte of a trained run by minimum context."
    )
    parser.add_argument("--out", default=Config.out, help=f"folder of the run [{Config.out}]")
    parser.add_argument("--part", choices=("heldout", "test"), default="heldout", help="bytes to read [heldout]")
    parser.add_argument("--contexts", help="minimum contexts in bytes, as in 1,128,256 [1, T/2, 3T/4, ... of T]")
    parser.add_argument("--bytes", type=int, default=1 << 17, help="bytes to score [131072]")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu", "tpu"), default="auto", help="where [auto]")
    args = parser.parse_args(argv)
    try:
        run, state, facts = open_run(Config, args.out, args.device)
        corpus = run.config.corpus()
        check_corpus(run.config, corpus.digest, facts)
        text = corpus.heldout if args.part == "heldout" else corpus.test
        if text is None:
            raise Refusal("--part test: a folder has none, only a file is split into three")
        contexts = _numbers(args.contexts) if args.contexts else default_contexts(run.config.seq_len)
        heading = "minimum context  bits per byte  windows  seconds\n"
        with fitting(run.config), jax.set_mesh(run.mesh):
            for row in by_context(run, state, text, contexts, args.bytes):
                line = f"{row.context:15,}  {row.bits_per_byte:13.4f}  {row.windows:7,}  {row.seconds:7.1f}"
                print(f"{heading}{line}", flush=True)
                heading = ""
    except Refusal as refusal:
        print(f"evaluate: {refusal}", file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise Refusal(f"--contexts must be whole numbers between commas, got {text!r}") from error


if __name__ == "__main__":
    sys.exit(main())
