"""Trains a byte-level language model: ``python -m examples.train_lm.train --help``."""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from . import checkpoint, data, report
from .config import Config, Refusal, add_options
from .model import build, mean_loss, sample

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"


class Run:
    """A model and its optimiser as pure functions of a state ``{"params": ..., "optimizer": ...}``.

    Args:
      config: its settings.

    Raises:
      Refusal: the pattern cannot serve the length.
    """

    def __init__(self, config: Config):
        self.config = config
        # `rest` is what is not learnt (counters of random streams); it stays as it is.
        self._graph, self._params, self._rest = nnx.split(build(config), nnx.Param, ...)
        # A cosine that warms up needs at least one step on each side of the peak, even in a run of two steps.
        warmup = min(config.warmup, config.steps - 1)
        schedule = optax.warmup_cosine_decay_schedule(0.0, config.lr, warmup, config.steps, config.lr / 10)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(
                # The count starts at 0, where a warm-up would waste a step on a rate of 0.
                lambda count: schedule(count + 1),
                b2=0.95,
                weight_decay=config.weight_decay,
                mask=functools.partial(jax.tree.map, lambda p: p.ndim > 1),
            ),
        )

    @property
    def num_params(self) -> int:
        return sum(p.size for p in jax.tree.leaves(self._params))

    def init(self) -> dict[str, Any]:
        """The state before the first step."""
        return {"params": self._params, "optimizer": self._optimizer.init(self._params)}

    def model(self, state: dict[str, Any]) -> nnx.Module:
        """The model with the weights of ``state``."""
        return nnx.merge(self._graph, state["params"], self._rest)

    def loss(self, state: dict[str, Any], windows: jax.Array) -> jax.Array:
        """Mean nats a byte on windows int32 [B, T + 1]."""
        return mean_loss(self.model(state), windows)

    def step(self, state: dict[str, Any], windows: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        """One optimiser step on windows int32 [B, T + 1]: the new state, and the loss before it."""
        loss, grads = jax.value_and_grad(lambda params: self.loss({"params": params}, windows))(state["params"])
        updates, optimizer = self._optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


class Interrupted(Exception):
    """Ctrl-C was pressed; what was done so far is saved."""


def train(config: Config, resume: bool) -> report.Result:
    """Trains to ``config.steps`` and writes checkpoint, metrics, curve and sample into ``config.out``.

    Args:
      config: all settings; those of the saved run if ``resume``.
      resume: go on from the newest checkpoint in ``config.out``, which otherwise must be new or empty.

    Raises:
      Refusal: the corpus, the pattern, the folder or the checkpoint cannot serve. Nothing has been written then.
      Interrupted: Ctrl-C.
    """
    out = pathlib.Path(config.out)
    _require_device(config.device)
    if not resume:
        _require_new(out)
    corpus = data.load(config.data, config.seq_len)
    run = Run(config)
    state, start, rows = run.init(), 0, []
    facts = {"config": dataclasses.asdict(config), "corpus": corpus.digest}
    if resume:
        start, saved = checkpoint.latest(out / CHECKPOINTS)
        if saved["corpus"] != corpus.digest:
            raise Refusal(f"--data {config.data or '(standard library)'} is no longer the corpus of the run in {out}")
        state = checkpoint.restore(out / CHECKPOINTS, start, saved, state)
        rows = _read_rows(out / METRICS, start)
    else:
        out.mkdir(parents=True, exist_ok=True)
        checkpoint.save(out / CHECKPOINTS, 0, state, facts)

    windows = corpus.heldout_windows(config.eval_batches * config.batch_size, config.seq_len)
    batches = windows.reshape(config.eval_batches, config.batch_size, -1)
    batch = functools.partial(corpus.batch, config.seed, batch_size=config.batch_size, seq_len=config.seq_len)
    tokens = config.batch_size * config.seq_len
    # Compiled ahead of the clock, so that the seconds of a run are seconds of training.
    print(f"compiling {config.pattern} ({run.num_params:,} weights)", file=sys.stderr)
    step = jax.jit(run.step, donate_argnums=0).lower(state, batch(0)).compile()
    evaluate = jax.jit(run.loss).lower(state, batches[0]).compile()

    seconds, heldout = (rows[-1]["seconds"] if rows else 0.0), math.nan
    with _noted_interrupt() as pressed, (out / METRICS).open("a", buffering=1) as metrics:
        bar = tqdm(
            range(start + 1, config.steps + 1), initial=start, total=config.steps, desc=config.pattern, unit="step"
        )
        for number in bar:
            began = time.perf_counter()
            state, loss = step(state, batch(number))
            row = {"step": number, "loss": float(loss)}
            seconds += time.perf_counter() - began
            row["seconds"] = seconds
            if not math.isfinite(row["loss"]):
                raise Refusal(f"the loss became {row['loss']} at step {number}: try a smaller --lr than {config.lr}")
            if number % config.eval_every == 0 or number == config.steps:
                heldout = data.bits(np.mean([evaluate(state, part) for part in batches]).item())
                row["heldout_bpb"] = heldout
            rows.append(row)
            metrics.write(json.dumps(row) + "\n")
            heard = f"held-out {heldout:.3f} bpb" if math.isfinite(heldout) else "held-out not asked yet"
            bar.set_postfix_str(f"loss {row['loss']:.3f}, {heard}, {number * tokens / seconds:,.0f} tokens/s")
            if number % config.save_every == 0 or number == config.steps or pressed:
                checkpoint.save(out / CHECKPOINTS, number, state, facts)
            if pressed and number < config.steps:
                raise Interrupted(f"stopped after step {number}, saved in {out}")

    # The bytes that gzip and the byte frequencies are measured on are those that the model was asked for.
    asked = windows[:, 1:].astype(np.uint8).reshape(-1)
    result = report.Result(config.pattern, run.num_params, rows, tokens, data.gzip_bits(asked), data.order0_bits(asked))
    report.draw_loss(result, out / "loss.png")
    if config.sample_tokens:
        text = sample(run.model(state), config.seq_len, config.prompt.encode(), config.sample_tokens, 0.8, config.seed)
        (out / "sample.txt").write_bytes(text)
    return result


def _require_device(name: str) -> None:
    """Makes JAX compute on a kind of device, or refuses."""
    if name == "auto":
        return
    try:
        device = jax.devices(name)[0]
    except RuntimeError as error:
        raise Refusal(f"--device {name}: JAX sees none here, it computes on {jax.default_backend()}") from error
    if device.platform != jax.default_backend():
        jax.config.update("jax_default_device", device)


def _require_new(out: pathlib.Path) -> None:
    if out.exists() and not out.is_dir():
        raise Refusal(f"--out {out} is a file")
    if (out / CHECKPOINTS).exists():
        raise Refusal(f"--out {out} holds a run already: go on with --resume, or name another folder")
    if out.exists() and any(out.iterdir()):
        raise Refusal(f"--out {out} is not empty: name another folder")


def _read_rows(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The rows of the steps up to ``step``; later ones, of steps that were not saved, are dropped from the file too."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        rows = [json.loads(line) for line in lines[:step]]
        if [row["step"] for row in rows] != list(range(1, step + 1)):
            raise ValueError("steps are missing")
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{path} is damaged: {error}") from error
    if len(lines) > step:
        shorter = path.with_suffix(".tmp")
        shorter.write_text("".join(lines[:step]))
        shorter.replace(path)
    return rows


@contextlib.contextmanager
def _noted_interrupt():
    """Yields a list that Ctrl-C makes non-empty, so that a step is never cut in two; a second Ctrl-C acts at once."""
    pressed: list[int] = []
    usual = signal.getsignal(signal.SIGINT)

    def note(number, frame):
        pressed.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, usual)


def split_patterns(text: str) -> list[str]:
    """Patterns between commas; a comma before ``key=`` goes on with the options of the pattern before it.

    Example:
      >>> split_patterns("dense,fixed:local_attn_ctx=64,num_verts=2,strided")
      ['dense', 'fixed:local_attn_ctx=64,num_verts=2', 'strided']
    """
    return re.split(r",(?!\w+=)", text)


def compare(patterns: list[str], given: dict[str, Any], resume: bool) -> list[report.Result]:
    """Trains one run a pattern, each in a folder of its own below ``out``, and draws them in one figure.

    Args:
      patterns: as the field ``pattern`` of `Config`.
      given: the other fields of `Config`, where they differ from its defaults.
      resume: go on with those that have begun, and give the others the settings of the first.

    Raises:
      Refusal: as `train`; every pattern is tried on the length before the first one is trained.
      Interrupted: Ctrl-C.
    """
    out = pathlib.Path(given.get("out", Config.out))
    names = [f"{number}_{re.sub('[^A-Za-z0-9=_.-]+', '_', pattern)}" for number, pattern in enumerate(patterns, 1)]
    own = [{"pattern": pattern, "out": str(out / name)} for pattern, name in zip(patterns, names, strict=True)]
    if resume:
        base = _saved_config({**given, **own[0]})
    else:
        _require_new(out)
        base = Config(**given)
    configs = [dataclasses.replace(base, **fields) for fields in own]
    for config in configs:
        build(config)
    results = []
    for config in configs:
        begun = resume and (pathlib.Path(config.out) / CHECKPOINTS).exists()
        results.append(train(_saved_config(dataclasses.asdict(config)) if begun else config, begun))
    report.draw_comparison(results, out / "compare.png")
    return results


def _saved_config(given: dict[str, Any]) -> Config:
    facts = checkpoint.latest(pathlib.Path(given.get("out", Config.out)) / CHECKPOINTS)[1]
    return Config.load(facts["config"], given)


def main(argv: list[str] | None = None) -> int:
    """Command line of training. Returns the exit code: 0, 2 with one line on stderr, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm.train",
        description="Train a byte-level language model with a sparse attention pattern.",
        epilog="Ctrl-C saves; --resume goes on, with the same losses as if it had not stopped.",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, with its own settings")
    parser.add_argument("--compare", metavar="P,Q,...", help="train each of these patterns and draw them in one figure")
    add_options(parser)
    given = vars(parser.parse_args(argv))
    resume, patterns = given.pop("resume"), given.pop("compare")
    out = pathlib.Path(given.get("out", Config.out))
    try:
        if patterns and "pattern" in given:
            raise Refusal("--compare names the patterns: leave out --pattern")
        if patterns:
            results = compare(split_patterns(patterns), given, resume)
        else:
            results = [train(_saved_config(given) if resume else Config(**given), resume)]
    except Refusal as refusal:
        print(f"train: {refusal}", file=sys.stderr)
        return 2
    except Interrupted as interrupted:
        again = f" --compare {patterns}" if patterns else ""
        print(f"train: {interrupted}; go on with: make train ARGS='--resume --out {out}{again}'", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("train: interrupted", file=sys.stderr)
        return 130
    print(report.table(results))
    print(f"\nwritten to {out}: " + ", ".join(sorted(file.name for file in out.iterdir())))
    if not patterns and (out / "sample.txt").exists():
        print(f"\nsample.txt:\n{(out / 'sample.txt').read_text(errors='replace')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
