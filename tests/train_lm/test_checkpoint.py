import errno
import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.training import checkpoint
from examples.training.config import Refusal

ROOT = pathlib.Path(__file__).parents[2]


def state_of(step):
    """A state in which every number is its step, but in layers, the tenth of which comes before the second as text."""
    return {
        "params": [jnp.full((3, 5), step, jnp.bfloat16), jnp.full(70_000, step, jnp.float32)],
        "layers": [jnp.full(3, step + layer) for layer in range(12)],
        "count": jnp.int32(step),
    }


def save(folder, step, **options):
    checkpoint.save(folder, step, state_of(step), {"made": f"at {step}"}, **options)


def check(folder):
    """The step of the newest checkpoint, whose facts and state must be its own."""
    step, facts = checkpoint.latest(folder)
    assert facts["made"] == f"at {step}"
    state = checkpoint.restore(folder, step, facts, state_of(0))
    for saved, expected in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(step)), strict=True):
        assert saved.dtype == expected.dtype and saved.sharding == expected.sharding
        np.testing.assert_array_equal(np.asarray(saved), np.asarray(expected))
    return step


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else None


def start(script, *arguments, **options):
    """A process that runs ``script`` with the names of this file."""
    script = f"from tests.train_lm.test_checkpoint import *\n{textwrap.dedent(script)}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **options}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def test_newest_are_kept_and_a_step_is_saved_again(tmp_path):
    folder = tmp_path / "checkpoints"
    assert not checkpoint.has_any(folder)
    for step in (0, 9, 10, 11):
        save(folder, step, keep=3)
    assert checkpoint.has_any(folder) and names(folder) == ["10", "11", "9"]
    # Saved again with another content, and with newer ones there: those are not this save's to remove.
    checkpoint.save(folder, 10, state_of(12), {"made": "again"}, keep=1)
    assert names(folder) == ["10", "11"] and check(folder) == 11
    shutil.rmtree(folder / "11")
    step, facts = checkpoint.latest(folder)
    assert (step, facts["made"]) == (10, "again")
    assert int(checkpoint.restore(folder, step, facts, state_of(0))["count"]) == 12


class Killed(BaseException):
    pass


def test_killed_at_every_change_of_names(tmp_path, monkeypatch):
    """Nothing is run after `Killed`, as after a kill: `save` and those that it calls handle other exceptions only."""
    for step in (6, 7):
        save(tmp_path / "before", step)
    for last in itertools.count():
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(last))
        calls = itertools.count()

        def dying(function, calls=calls, last=last):
            def call(*arguments, **options):
                if next(calls) == last:
                    raise Killed
                return function(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "rmdir"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                # Replaces one and removes the other.
                save(folder, 7, keep=1)
                break
            except Killed:
                pass
        assert check(folder) == 7
        save(folder, 9)
        assert check(folder) == 9 and names(folder) == ["7", "9"]
    assert last > 10 and names(folder) == ["7"]


def test_killed_while_saving(tmp_path):
    # The saver goes on from the newest step, which it saves again. It is forked from a process that has imported JAX
    # and not used it yet, and tells what has been saved in a file: a pipe could be cut.
    saver = """
    folder, told = pathlib.Path(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
    while sys.stdin.readline():
        if child := os.fork():
            print(child, flush=True)
            os.waitpid(child, 0)
            print("gone", flush=True)
            continue
        first = checkpoint.latest(folder)[0] if checkpoint.has_any(folder) else 0
        for step in itertools.count(first):
            save(folder, step)
            told.write(f"{step}\\n")
    """
    folder, told, draw = tmp_path / "checkpoints", tmp_path / "told", random.Random(0)
    told.touch()
    with start(saver, folder, told) as process:
        for _ in range(20):
            before = told.stat().st_size
            process.stdin.write("go\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            deadline = time.monotonic() + 60
            while told.stat().st_size == before:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.2))
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "gone\n"
            assert check(folder) - int(told.read_text().split()[-1]) in (0, 1)
        process.communicate()
    save(folder, 10**6)
    assert len(names(folder)) == 2 and check(folder) == 10**6


@pytest.mark.parametrize("name", ["mkdir", "posix_fallocate", "fsync", "rename"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_failure_is_one_line_and_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, name, earlier):
    folder = tmp_path / "checkpoints"
    if earlier:
        save(folder, 3)

    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(Refusal) as refusal:
            save(folder, 4)
    rest = "the checkpoint of step 3 is intact" if earlier else "nothing has been saved yet"
    assert str(refusal.value) == f"{folder / '4'} could not be written: No space left on device; {rest}"
    assert names(folder) == (["3"] if earlier else None)
    save(folder, 4)
    assert check(folder) == 4


@pytest.mark.parametrize("room", ["missing", "lost"])
def test_files_that_may_not_grow(tmp_path, room):
    # CI may not mount a small disk. With RLIMIT_FSIZE, writes fail with EFBIG where they fail with ENOSPC on a full
    # disk, and take the same path. Room that is there when it is asked for may be lost to others: orbax's threads are
    # the ones to find out then.
    script = """
    import resource
    folder, room = pathlib.Path(sys.argv[1]), sys.argv[2]
    save(folder, 1)
    if room == "lost":
        os.posix_fallocate = lambda *arguments: None
    for step, limit in enumerate((0, 100, 1_000, 100_000), 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            checkpoint.save(folder, step, {"noise": jax.random.normal(jax.random.key(0), (9, 10_000))}, {})
        except Refusal as refusal:
            print(refusal)
    print(names(folder))
    """
    folder = tmp_path / "checkpoints"
    with start(script, folder, room) as process:
        lines, errors = process.communicate()
    *lines, left = lines.splitlines()
    reason = "could not be written: File too large; the checkpoint of step 1 is intact"
    assert lines == [f"{folder / str(step)} {reason}" for step in (2, 3, 4, 5)] and check(folder) == 1
    assert room == "lost" or (left == "['1']" and "Traceback" not in errors)
    save(folder, 2)
    assert names(folder) == ["1", "2"] and check(folder) == 2


def test_one_device_to_eight_and_back(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, (64, 96), np.uint32)
    state = {"f": jnp.asarray(bits.view(np.float32)), "b": jnp.asarray(bits.view(jnp.bfloat16)), "u": jnp.asarray(bits)}
    checkpoint.save(tmp_path, 1, state, {})
    script = """
    folder = pathlib.Path(sys.argv[1])
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("x", "y"))
    specs = {"f": ("x", "y"), "b": ("y",), "u": (None, ("x", "y"))}
    step, facts = checkpoint.latest(folder)
    like = {
        name: jax.ShapeDtypeStruct(
            (64, 96 * (1 + (name == "b"))),
            {"f": jnp.float32, "b": jnp.bfloat16, "u": jnp.uint32}[name],
            sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)),
        )
        for name, spec in specs.items()
    }
    state = checkpoint.restore(folder, step, facts, like)
    for name, array in state.items():
        assert array.sharding == like[name].sharding and len(array.sharding.device_set) == 8
        np.testing.assert_array_equal(np.asarray(array).view(np.uint32), np.asarray(state["u"]))
    checkpoint.save(folder, 2, state, {})
    """
    # Without the flags of tests/conftest.py, under which programs that move bfloat16 change the bits of NaNs.
    with start(script, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8") as process:
        errors = process.communicate()[1]
    assert process.returncode == 0, errors
    restored = checkpoint.restore(tmp_path, 2, checkpoint.latest(tmp_path)[1], state)
    for name, array in restored.items():
        assert array.sharding == state[name].sharding
        np.testing.assert_array_equal(np.asarray(array).view(np.uint32), bits)
