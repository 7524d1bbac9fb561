"""Dense and sparse training of the same decoder, as a table and a picture: see README.md."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import sparse_layers as sl
from examples.training.report import STYLE

from .decoder import Decoder, DecoderConfig
from .training import train


def models(pattern: str, seq_len: int) -> dict[str, Decoder]:
    """The decoder as it is, with plain causal attention by this library ("all"), and with the pattern."""
    configs = {"dense": DecoderConfig(max_len=seq_len)}
    for name, of in (("all", "all"), ("sparse", pattern)):
        attention_fn = sl.make_attention_fn(of, seq_len)
        configs[name] = dataclasses.replace(configs["dense"], attention_fn=attention_fn, causal_mask=False)
    return {name: Decoder(config) for name, config in configs.items()}


def kept(pattern: str, seq_len: int) -> float:
    """The share of the causal pairs (query, key) that the pattern keeps, over all heads."""
    pairs = np.mean([mask.dense(seq_len).sum() for mask in sl.as_masks(sl.preset(pattern))])
    return float(pairs) / (seq_len * (seq_len + 1) / 2)


@matplotlib.rc_context(fname=STYLE)
def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    """Loss against seconds of training, and seconds a step against the length, dense and sparse."""
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    times, totals = results["times"], {}
    for name, losses in results["losses"].items():
        width, seconds = min(10, len(losses)), np.cumsum(results["seconds"][name])
        mean = np.convolve(losses, np.ones(width) / width, "valid")
        totals[name] = seconds[-1]
        left.plot(seconds[width - 1 :], mean, label=name)
        right.plot([int(n) for n in times], [seconds_of[name] for seconds_of in times.values()], "o-", label=name)
    steps = len(results["losses"]["dense"])
    left.set_title(f"{steps} steps take {totals['sparse']:.1f} s with the pattern, {totals['dense']:.1f} s without")
    left.set(xlabel="seconds of training", ylabel="loss, nats per byte (mean of 10 steps)", ylim=(None, 4))
    longest, last = list(times.items())[-1]
    right.set_title(f"At {int(longest):,} tokens a step is {last['dense'] / last['sparse']:.1f} times as fast")
    right.set(xlabel="tokens", ylabel="seconds a step", xscale="log", yscale="log")
    right.set_xticks([int(n) for n in times], [f"{int(n):,}" for n in times])
    right.minorticks_off()
    left.legend(title=results["pattern"])
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, times, prints and draws; arguments as on the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.make_it_sparse", description=__doc__)
    parser.add_argument("--pattern", default="sparse_transformer_strided:stride=64", help="a preset")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence in training")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="lengths to time a step at")
    parser.add_argument("--repeats", type=int, default=3, help="steps at each of these; the median counts")
    picture = pathlib.Path("runs/before_after.png")
    parser.add_argument("--out", type=pathlib.Path, default=picture, help="the picture; its numbers lie beside it")
    parser.add_argument("--of", type=pathlib.Path, metavar="FILE.json", help="only draw such numbers again")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.of:
        draw(json.loads(options.of.read_text(encoding="utf-8")), options.out)
        return 0

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
    curves = {what: {name: getattr(run, what) for name, run in runs.items()} for what in ("losses", "seconds")}
    results = {"pattern": options.pattern, "times": times} | curves
    options.out.with_suffix(".json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    draw(results, options.out)
    print(f"\n{options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
