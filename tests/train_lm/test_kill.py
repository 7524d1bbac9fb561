"""Training processes that are killed at any moment, and go on."""

import os
import pathlib
import random
import subprocess
import sys
import time

from examples.training import checkpoint

from .conftest import TINY, flags, losses

ROOT = pathlib.Path(__file__).parents[2]
KILLS = int(os.environ.get("TRAIN_LM_KILLS", "3"))


def test_killed_at_any_moment(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    options = {**TINY, "steps": 40, "eval_every": 5}
    alone, out, draw = tmp_path / "alone", tmp_path / "run", random.Random(0)

    def command(folder):
        began = checkpoint.has_any(folder / "checkpoints")
        arguments = ["--out", str(folder), "--resume"] if began else flags(**options, data=corpus, out=folder)
        return [sys.executable, "-m", "examples.train_lm.train", *arguments]

    began = time.monotonic()
    subprocess.run(command(alone), cwd=ROOT, capture_output=True, check=True)
    whole = time.monotonic() - began
    for kill in range(KILLS):
        # In turn: some time after the start, which is mostly importing and compiling, and no later than the next new
        # row, lest the run end too soon; or soon after a row, a later one each time, up to the last, after which only
        # a checkpoint and the report are left.
        early, before = kill % 2 == 0, len(losses(out))
        awaited = before + 1 if early else options["steps"] * kill // (KILLS - 1)
        # Unlike the first process, which filled it, these find their programs in a cache.
        until = time.monotonic() + (draw.uniform(0, whole / 2) if early else 120)
        with subprocess.Popen(command(out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and len(losses(out)) < awaited and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, whole / 40))
            process.kill()
        print(f"kill {kill}: exit {process.returncode}, {len(losses(out))} rows, {sorted(left(out))}")
        # One that was quicker than its kill has done its work.
        assert process.returncode in (-9, 0)
    done = subprocess.run(command(out), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(alone) and len(losses(out)) == options["steps"]
    assert (out / "sample.txt").read_bytes() == (alone / "sample.txt").read_bytes()


def left(out):
    """What lies in the folders of a run."""
    return [path.name for folder in (out, out / "checkpoints") if folder.exists() for path in folder.iterdir()]
