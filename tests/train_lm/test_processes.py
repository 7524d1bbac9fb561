"""Processes that train together on this machine, each with two simulated devices."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from examples.train_lm import train
from examples.training import checkpoint
from examples.training.config import Refusal
from examples.training.processes import join

from .conftest import TINY, flags, losses

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys
from examples.train_lm import train
from examples.training import checkpoint
write, last = checkpoint._write, sys.argv.pop(1)

def killed(path, state):
    if path.name == last:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, state)

checkpoint._write = killed
sys.exit(train.main(sys.argv[1:]))
"""


def started(arguments, kills=""):
    """Two processes with these flags; the second one is killed while it writes the checkpoint in folder ``kills``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, last, *arguments, "--processes", address, "2", str(number)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for number, last in enumerate(("", kills))
    ]


def same(out, finished):
    """Asserts that a run is that of a process on one device, which nothing disturbed."""
    np.testing.assert_allclose(*(np.asarray(losses(run), float) for run in (out, finished)), rtol=2e-5)
    assert {path.name for path in out.iterdir()} == {path.name for path in finished.iterdir()}


def test_one_goes_on_as_two(finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints" / "6")
    two = started(["--out", str(out), "--resume", "--context-parallel", "2"])
    told = [process.communicate()[1] for process in two]
    assert [process.returncode for process in two] == [0, 0], told
    same(out, finished)
    assert checkpoint.latest(out / "checkpoints")[0] == 6


def test_two_of_which_one_is_killed_go_on_as_one(finished, corpus, tmp_path):
    out = tmp_path / "run"
    first, second = started(flags(**TINY, data=corpus, out=out, fsdp=2, context_parallel=2), kills="4.partial")
    assert second.wait() == -9
    assert first.stderr is not None
    assert any("start them all again with --resume" in line for line in first.stderr)
    first.kill()  # It would wait for the other one some time.
    for process in (first, second):
        process.communicate()
    assert train.main(["--out", str(out), "--resume", "--fsdp", "1", "--context-parallel", "1"]) == 0
    same(out, finished)


@pytest.mark.parametrize("given", [["here:1"], ["here:1", "2", "two"], ["here:1", "2", "2"], ["here:1", "2", "0", "0"]])
def test_refuses_processes(given):
    with pytest.raises(Refusal, match=f"--processes must be HOST:PORT COUNT NUMBER, .* got {' '.join(given)}"):
        join(given)
