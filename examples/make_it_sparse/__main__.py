"""Dense and sparse training of the same decoder, as a table and a picture: see README.md."""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

import sparse_layers as sl

from .decoder import Decoder, DecoderConfig
from .training import Run, train


def models(pattern: str, seq_len: int) -> dict[str, Decoder]:
    """The decoder as it is, with plain causal attention by this library ("all"), and with the pattern."""
    found = {"dense": DecoderConfig(max_len=seq_len)}
    for name, of in (("all", "all"), ("sparse", pattern)):
        attention_fn = sl.make_attention_fn(of, seq_len)
        found[name] = dataclasses.replace(found["dense"], attention_fn=attention_fn, causal_mask=False)
    return {name: Decoder(config) for name, config in found.items()}


def kept(pattern: str, seq_len: int) -> float:
    """The share of the causal pairs (query, key) that the pattern keeps, over all heads."""
    pairs = np.mean([mask.dense(seq_len).sum() for mask in sl.as_masks(sl.preset(pattern))])
    return float(pairs) / (seq_len * (seq_len + 1) / 2)


def draw(runs: dict[str, Run], times: dict[int, dict[str, float]], title: str, path: pathlib.Path) -> None:
    """Loss against seconds of training, and seconds a step against the length, dense and sparse."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, run in runs.items():
        width = min(10, len(run.losses))
        mean = np.convolve(run.losses, np.ones(width) / width, "valid")
        left.plot(np.cumsum(run.seconds)[width - 1 :], mean, lw=1.2, label=f"{name}, {len(run.losses)} steps")
        right.plot(list(times), [seconds[name] for seconds in times.values()], "o-", ms=4, label=name)
    left.set(xlabel="seconds of training", ylabel="loss, nats per byte (mean of 10 steps)", ylim=(None, 4), title=title)
    right.set(xlabel="tokens T", ylabel="seconds a step", xscale="log", yscale="log", title="one training step")
    right.set_xticks(list(times), map(str, times), minor=False)
    right.set_xticks([], minor=True)
    for axes in (left, right):
        axes.legend()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, times, prints and draws; arguments as on the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.make_it_sparse", description=__doc__)
    parser.add_argument("--pattern", default="sparse_transformer_strided:stride=64", help="a preset")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence in training")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="lengths to time a step at")
    parser.add_argument("--repeats", type=int, default=3, help="steps at each of these; the median counts")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/before_after.png"), help="the picture")
    options = parser.parse_args(arguments)

    runs = train(models(options.pattern, options.seq_len), options.seq_len, options.steps)
    share = kept(options.pattern, options.seq_len)
    print(f"{options.pattern}, T={options.seq_len}, {options.steps} steps")
    print(f"{'':8}{'s/step':>10}{'loss':>8}{'pairs kept':>12}")
    for name, run in runs.items():
        loss = np.mean(run.losses[-10:])
        print(f"{name:8}{run.step_seconds:10.4f}{loss:8.3f}{share if name == 'sparse' else 1:12.1%}")

    times = {}
    print(f"\n{'T':8}{'dense':>10}{'all':>10}{'sparse':>10}{'faster':>9}{'all / sparse':>14}{'pairs kept':>12}")
    for length in map(int, options.lengths.split(",")):
        again = length != options.seq_len  # that one was timed in training
        timed = train(models(options.pattern, length), length, options.repeats) if again else runs
        times[length] = {name: run.step_seconds for name, run in timed.items()}
        dense, every, sparse = times[length].values()
        share = kept(options.pattern, length)
        seconds = f"{dense:10.4f}{every:10.4f}{sparse:10.4f}"
        print(f"{length:<8}{seconds}{dense / sparse:8.1f}x{every / sparse:13.1f}x{share:12.1%}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, times, options.pattern, options.out)
    print(f"\n{options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
