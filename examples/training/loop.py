"""Training, by the command line of an example: begin or resume, the loop, comparisons."""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import math
import operator
import os
import pathlib
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from sparse_layers.ops.planning.platforms import platform

from . import checkpoint, data, report
from .config import Config, Refusal, add_options, settings
from .log import METRICS, Log, read_rows, summary_writer
from .model import build, counted
from .processes import is_first, join, own_folder
from .run import CHECKPOINTS, Run, State, fitting, reading, used


class Interrupted(Exception):
    """Ctrl-C was pressed; what was done so far is saved."""


def train(config: Config, resume: bool) -> report.Result:
    """Trains to ``config.steps`` and writes checkpoints, metrics, curve and sample into ``config.out``.

    Args:
      config: all settings; those of the saved run if ``resume``.
      resume: go on from the newest checkpoint in ``config.out``, which otherwise must be new or empty.

    Raises:
      Refusal: the corpus, the pattern, the folder, the checkpoint or the devices cannot serve: nothing has been written
        then; or the loss is no number any more, or the disk is full: the message names the checkpoint that is left.
      Interrupted: Ctrl-C.
    """
    out = pathlib.Path(config.out)
    if not resume:
        _require_new(out)
    if config.tensorboard:
        summary_writer()  # Missing, it must be missed before anything is written.
    source = config.source()  # Too short for the length, it must be missed before that is planned, which may take long.
    run = Run(config)
    config = run.config
    with fitting(config), _locked(out):
        # As many windows as do not overlap, but one batch at least.
        batches = min(config.eval_batches, max(1, source.distinct // config.batch_size))
        heldout = source.heldout(batches * config.batch_size)
        state, start, rows = _begin(run, source, resume)
        state, memory = _steps(run, source, heldout, state, start, rows)

        # The bytes that gzip and the byte frequencies are measured on are those that the model was asked for.
        asked = heldout.tokens[:, 1:][counted(heldout)].astype(np.uint8)
        tokens, gzip, order0 = config.batch_size * config.seq_len, data.gzip_bits(asked), data.order0_bits(asked)
        result = report.Result(config.pattern, run.num_params, rows, tokens, memory, gzip, order0)
        with _writing(out), own_folder(out) as folder:
            report.draw_run(result, folder / "loss.png")
            config.write_sample(run.model(state), heldout, folder)
    return result


def _begin(run: Run, source: data.Source, resume: bool) -> tuple[State, int, list[dict[str, Any]]]:
    """The state to go on from, the steps that were done, and their rows."""
    out = pathlib.Path(run.config.out)
    folder = out / CHECKPOINTS
    if not resume:
        _require_new(out)  # Once more, now that no other process can begin a run here.
        state = run.init()
        checkpoint.save(folder, 0, state, _facts(run.config, source))
        return state, 0, []
    start, facts = checkpoint.latest(folder)
    check_corpus(run.config, source.digest, facts)
    with _writing(out):
        rows = read_rows(out / METRICS, start)
    return checkpoint.restore(folder, start, facts, run.like), start, rows


def check_corpus(config: Config, digest: str, facts: dict[str, Any]) -> None:
    """Raises Refusal if the corpus is not the one that a saved run has learnt."""
    if facts["corpus"] != digest:
        raise Refusal(f"--data {config.data or '(the default)'} is no longer the corpus of the run in {config.out}")


def _facts(config: Config, source: data.Source) -> dict[str, Any]:
    return {"config": dataclasses.asdict(config), "corpus": source.digest}


def _steps(
    run: Run, source: data.Source, heldout: data.Batch, state: State, start: int, rows: list[dict[str, Any]]
) -> tuple[State, int]:
    """Does the steps after ``start`` and adds to ``rows``; the last state, and the bytes that a step takes."""
    config, out = run.config, pathlib.Path(run.config.out)
    starts = range(0, len(heldout.tokens), config.batch_size)
    windows = [operator.itemgetter(slice(i, i + config.batch_size)) for i in starts]
    batches_on_devices = [run.shard(jax.tree.map(window, heldout)) for window in windows]

    make = functools.partial(run.batch, source)
    # Compiled ahead of the clock, so that the seconds of a run are seconds of training.
    print(f"compiling {config.pattern} ({run.num_params:,} weights, {run.mesh.size} devices)", file=sys.stderr)
    step, evaluate, finite = run.compiled(make(1))
    devices, numbers = list(run.mesh.devices.flat), range(start + 1, config.steps + 1)
    with (
        _noted_interrupt() as pressed,
        _writing(out),
        own_folder(out) as folder,
        Log(folder, config, rows, devices) as log,
        data.Prefetch(make, numbers) as batches,
    ):
        ahead, waited = None, 0.0
        for number, batch in zip(numbers, batches, strict=True):
            state, seen = step(state, batch, np.int32(number))
            # The step before is read while the device computes this one: it is never left without work.
            if ahead:
                log.write(_checked(log.read(*ahead), out))
            ahead, waited = (number, seen, batches.waited - waited), batches.waited
            evaluates, saves = (number % every == 0 for every in (config.eval_every, config.save_every))
            if not (evaluates or saves or pressed or number == config.steps):
                continue
            row, ahead = _checked(log.read(*ahead), out), None
            if evaluates or number == config.steps:
                scores_of_batches = jax.device_get([evaluate(state, window) for window in batches_on_devices])
                means = {
                    name: np.mean([scores[name] for scores in scores_of_batches]).item()
                    for name in scores_of_batches[0]
                }
                row |= {"heldout_bpb": data.bits(means.pop("loss")), **means}
            log.write(row)
            if saves or pressed or number == config.steps:
                if not finite(state):
                    raise Refusal(_diverged("a weight or moment", number, out))
                log.sync()
                checkpoint.save(out / CHECKPOINTS, number, state, _facts(config, source))
            if pressed and number < config.steps:
                raise Interrupted(f"stopped after step {number}, saved in {out}")
            log.start_clock()
    return state, used(step)


def _checked(row: dict[str, Any], out: pathlib.Path) -> dict[str, Any]:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(row[name]):
            raise Refusal(_diverged(f"{name}, {row[name]},", row["step"], out))
    return row


def _diverged(what: str, number: int, out: pathlib.Path) -> str:
    last = checkpoint.latest(out / CHECKPOINTS)[0]
    return (
        f"{what} is no finite number at step {number}; the last good checkpoint is {out / CHECKPOINTS / str(last)}: "
        "start a new run with a smaller --lr"
    )


@contextlib.contextmanager
def _locked(out: pathlib.Path):
    """Keeps other processes from training in the same folder, which is made if it is not there.

    Raises:
      Refusal: one does.
    """
    if not is_first():
        yield
        return
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise Refusal(f"--out {out}: another process is training there") from error
    finally:
        os.close(folder)  # and with it the lock


@contextlib.contextmanager
def _writing(out: pathlib.Path):
    """Says in one line that something could not be written.

    Raises:
      Refusal: that line.
    """
    try:
        yield
    except OSError as error:
        folder = out / CHECKPOINTS
        left = f"the checkpoint of step {checkpoint.latest(folder)[0]} is intact" if checkpoint.has_any(folder) else ""
        left = left or "nothing has been saved yet"
        raise Refusal(
            f"cannot write {error.filename or 'into ' + str(out)}: {error.strerror or error}; {left}"
        ) from error


def _require_new(out: pathlib.Path, runs: Sequence[str] = ()) -> None:
    """Refuses a folder that holds anything, but for what a run, or one of ``runs`` in it, leaves that hardly began."""
    if out.exists() and not out.is_dir():
        raise Refusal(f"--out {out} is a file")
    if checkpoint.has_any(out / CHECKPOINTS):
        raise Refusal(f"--out {out} holds a run already: go on with --resume, or name another folder")
    for path in out.iterdir() if out.exists() else ():
        if path.name in runs:
            _require_new(path)
        elif path.name != CHECKPOINTS:
            raise Refusal(f"--out {out} is not empty: name another folder")


@contextlib.contextmanager
def _noted_interrupt():
    """Yields a list that Ctrl-C makes non-empty, so that a step is never cut in two; a second Ctrl-C acts at once.

    So does the first where several processes train together, which would have to agree on a step.
    """
    pressed: list[int] = []
    if jax.process_count() > 1:
        yield pressed
        return
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
      >>> split_patterns("causal,fixed:local_attn_ctx=64,num_verts=2,longformer")
      ['causal', 'fixed:local_attn_ctx=64,num_verts=2', 'longformer']
    """
    return re.split(r",(?!\w+=)", text)


def compare(kind: type[Config], patterns: list[str], flags: dict[str, Any], resume: bool) -> list[report.Result]:
    """Trains one run a pattern, each in a folder of its own below ``out``, and draws them in one figure.

    Args:
      kind: of config, that of the example.
      patterns: as the field ``pattern`` of `Config`.
      flags: the other fields of `Config`, where they differ from its defaults.
      resume: go on with those that have begun, and give the others the settings of the first.

    Raises:
      Refusal: as `train`; every pattern is tried on the length before the first one is trained.
      Interrupted: Ctrl-C.
    """
    out = pathlib.Path(flags.get("out", kind.out))
    names = [f"{number}_{re.sub('[^A-Za-z0-9=_.-]+', '_', pattern)}" for number, pattern in enumerate(patterns, 1)]
    settings_of_runs: list[dict[str, Any]] = [
        {"pattern": pattern, "out": str(out / name)} for pattern, name in zip(patterns, names, strict=True)
    ]
    if resume:
        base = _saved_config(kind, {**flags, **settings_of_runs[0]})
    else:
        _require_new(out, names)
        base = kind(**flags)
    configs = [dataclasses.replace(base, **fields) for fields in settings_of_runs]
    base.source()
    for config in configs:
        nnx.eval_shape(functools.partial(build, config))
    results = []
    for config in configs:
        has_begun = resume and checkpoint.has_any(pathlib.Path(config.out) / CHECKPOINTS)
        results.append(train(_saved_config(kind, dataclasses.asdict(config)) if has_begun else config, has_begun))
    with _writing(out), own_folder(out) as folder:
        report.save(results, folder / "compare.json", jax.devices(platform())[0].device_kind)
        report.draw_comparison(results, folder / "compare.png")
    return results


def _saved_config(kind: type[Config], flags: dict[str, Any]) -> Config:
    out = flags.get("out", kind.out)
    with reading(out):
        if not checkpoint.has_any(pathlib.Path(out) / CHECKPOINTS):
            raise Refusal(f"{out} holds no checkpoint of this example: start the run without --resume")
        return kind.load(checkpoint.latest(pathlib.Path(out) / CHECKPOINTS)[1]["config"], flags)


def main(kind: type[Config], prog: str, description: str, argv: list[str] | None = None) -> int:
    """Command line of training. Returns the exit code: 0, 2 with one line on stderr, or 130 after Ctrl-C.

    Args:
      kind: of config, that of the example.
      prog: how one calls it.
      description: what it does.
      argv: the arguments; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="Ctrl-C saves; --resume goes on, with the same losses as if it had not stopped.",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, with its own settings")
    most = f" [{kind.compared}]" if kind.compared else ""
    parser.add_argument(
        "--compare",
        metavar="P,Q,...",
        nargs="?" if kind.compared else None,
        const=kind.compared or None,
        help=f"train each of these patterns and draw them in one figure{most}",
    )
    parser.add_argument(
        "--processes",
        nargs="*",
        metavar="HOST:PORT COUNT NUMBER",
        help="train together with other processes, started with the same flags: where the first one listens, how many "
        "there are, and which of them this is, from 0 on; nothing after it where JAX can ask the cluster (Slurm, Open "
        "MPI, Kubernetes, Cloud TPUs); all see one --out",
    )
    add_options(parser, kind)
    flags = vars(parser.parse_args(argv))
    resume, patterns, processes = (flags.pop(name) for name in ("resume", "compare", "processes"))
    name = flags.get("config")
    out = pathlib.Path(flags.get("out", kind.out))
    try:
        if processes is not None:
            join(processes)
        if patterns is not None and ("pattern" in flags or not patterns):
            raise Refusal("--compare names the patterns, one at least: leave out --pattern")
        flags = settings(kind, flags)
        if name not in (None, "cpu") and not resume and not flags.get("data"):
            raise Refusal(f"--config {name} needs --data: what it is to learn")
        if patterns:
            results = compare(kind, split_patterns(patterns), flags, resume)
        else:
            results = [train(_saved_config(kind, flags) if resume else kind(**flags), resume)]
    except (Refusal, PermissionError) as refusal:
        print(f"train: {refusal}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = str(error).splitlines()[0]
        print(f"train: has another process ended? start them all again with --resume: {reason}", file=sys.stderr)
        return 2
    except Interrupted as interrupted:
        again = f" --compare {patterns}" if patterns else ""
        command = kind.command.format(f"--resume --out {out}{again}")
        print(f"train: {interrupted}; go on with: {command}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("train: interrupted", file=sys.stderr)
        return 130
    if not is_first():
        return 0
    print(report.table(results))
    print(f"\nwritten to {out}: " + ", ".join(sorted(file.name for file in out.iterdir())))
    if not patterns and (out / "sample.txt").exists():
        print(f"\nsample.txt:\n{(out / 'sample.txt').read_text(errors='replace')}")
    return 0
