import collections
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from typing import ClassVar

import jax
import matplotlib.figure
import matplotlib.text
import numpy as np
import pytest

from examples.train_lm import evaluate, generate, train
from examples.train_lm.config import Config
from examples.train_lm.data import load
from examples.training import checkpoint, report
from examples.training.config import Refusal
from examples.training.data import gzip_bits, order0_bits
from examples.training.log import Log
from examples.training.run import Run

from .conftest import TINY, flags, losses, rows, snapshot

PNG = b"\x89PNG\r\n"


def test_a_run_writes_what_it_says(finished, corpus, capsys):
    assert (finished / "loss.png").read_bytes().startswith(PNG)
    assert len((finished / "sample.txt").read_bytes()) == len("def ") + TINY["sample_tokens"]
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["4", "6"]
    assert [row["step"] for row in rows(finished)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(finished) if "heldout_bpb" in row] == [3, 6]

    # A finished run that is resumed trains no further and reports the same.
    before = losses(finished)
    assert train.main(["--out", str(finished), "--resume"]) == 0
    assert losses(finished) == before
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ["pattern", "params", "steps"]
    windows = load(str(corpus), 32).heldout_windows(4, 32).tokens[:, 1:].astype(np.uint8)
    actual = before[-1][2], gzip_bits(windows.reshape(-1)), order0_bits(windows.reshape(-1))
    expected = [f"{bits:.3f}" for bits in actual]
    expected.insert(1, "-")  # text has no accuracy
    assert table[2].split()[0] == TINY["pattern"] and table[2].split()[-4:] == expected


def after_row(monkeypatch, number, action):
    """Calls ``action`` when the row of step ``number`` has been written."""
    write = Log.write

    def hooked(log, row):
        write(log, row)
        if row["step"] == number:
            action()

    monkeypatch.setattr(Log, "write", hooked)


# The row of step 1 is written when step 2 has begun, which is then saved; that of step 4, itself saved, before step 5.
@pytest.mark.parametrize(("step", "saved"), [(1, 2), (4, 4)])
@pytest.mark.usefixtures("interruptible")
def test_interrupted_and_resumed_equals_uninterrupted(finished, corpus, tmp_path, monkeypatch, capsys, step, saved):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_row(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        assert train.main(flags(**TINY, data=corpus, out=out)) == 130
    assert f"saved in {out}; go on with: make train ARGS='--resume --out {out}'" in capsys.readouterr().err
    assert checkpoint.latest(out / "checkpoints")[0] == len(rows(out)) == saved
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train.main(["--out", str(out), "--resume"]) == 0
    assert losses(out) == losses(finished)
    assert (out / "sample.txt").read_bytes() == (finished / "sample.txt").read_bytes()


def test_crashed_and_resumed_equals_uninterrupted(finished, corpus, tmp_path, monkeypatch):
    class Crash(Exception):
        pass

    def crash():
        raise Crash

    with monkeypatch.context() as patch:
        after_row(patch, 3, crash)
        with pytest.raises(Crash):
            train.main(flags(**TINY, data=corpus, out=tmp_path / "run"))
    # Step 3 was done but not saved: it is done again.
    assert len(rows(tmp_path / "run")) == 3 and checkpoint.latest(tmp_path / "run" / "checkpoints")[0] == 2
    assert train.main(["--out", str(tmp_path / "run"), "--resume"]) == 0
    assert losses(tmp_path / "run") == losses(finished)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_of_a_process(corpus, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "examples.train_lm.train"]
    options = flags(**{**TINY, "steps": 1_000_000, "eval_every": 1_000_000, "save_every": 1_000_000})
    root = pathlib.Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, *options, *flags(data=corpus, out=out)], cwd=root, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").stat().st_size == 0:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        message = process.communicate(timeout=60)[1]
    # Before training, JAX may complain of its plugins.
    message = message[message.index("compiling ") :]
    assert process.returncode == 130 and "go on with: make train" in message and "Traceback" not in message
    assert checkpoint.latest(out / "checkpoints")[0] == len(rows(out)) > 0


@pytest.mark.usefixtures("interruptible")
def test_compare_draws_one_figure(corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "both"
    options = {name: value for name, value in TINY.items() if name != "pattern"} | {"sample_tokens": 0}
    patterns = "sparse_transformer_fixed:stride=16,summary=4,causal"
    with monkeypatch.context() as patch:
        # Stopped in the second run, whose settings must come from the first: --resume repeats none.
        calls = []
        after_row(patch, 4, lambda: calls.append(4) or (len(calls) == 2 and signal.raise_signal(signal.SIGINT)))
        assert train.main([*flags(**options, data=corpus, out=out), "--compare", patterns]) == 130
    assert not (out / "compare.png").exists()
    assert train.main(["--out", str(out), "--resume", "--compare", patterns]) == 0
    assert (out / "compare.png").read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    table = [line.split() for line in printed.splitlines() if line]
    assert [line[0] for line in table[2:4]] == ["sparse_transformer_fixed:stride=16,summary=4", "causal"]
    assert {line[2] for line in table[2:4]} == {"6"}
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    assert [len(rows(folder)) for folder in folders] == [6, 6]
    # The same from what was recorded, without the runs.
    picture = (out / "compare.png").read_bytes()
    assert report.main([str(out / "compare.json"), "--picture", str(out / "again.png")]) == 0
    assert printed.startswith(capsys.readouterr().out) and (out / "again.png").read_bytes() == picture


def refused(capsys, folder, arguments, main=train.main):
    """The line on stderr of a command that must exit with 2 and leave ``folder`` as it was."""
    capsys.readouterr()
    before = snapshot(folder)
    assert main(arguments) == 2
    assert snapshot(folder) == before
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pattern": "stridde"}, "did you mean 'strided'"),
        ({"pattern": "strided:local_attn=8"}, "local_attn_ctx"),
        ({"pattern": "fixed:num_verts=4"}, "heads"),
        ({"positions": "row_column", "seq_len": 8}, "position_stride"),
        ({"data": "empty"}, "too few"),
        ({"data": "short"}, "too few"),
        ({"data": "nowhere"}, "No such file"),
        ({"seq_len": 10**8}, "too few"),  # said before 10**8 tokens are planned
        ({"out": "short"}, "is a file"),
        ({"out": "full"}, "is not empty"),
        ({"out": "nowhere", "steps": -1}, "--steps"),
        ({"device": "tpu" if jax.default_backend() == "gpu" else "gpu"}, "JAX sees none here"),
    ],
)
def test_wrong_requests_write_nothing(corpus, tmp_path, capsys, change, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "short").write_text("short")
    paths = {name: str(tmp_path / value) for name, value in change.items() if name in ("data", "out")}
    options = {**TINY, "data": corpus, "out": tmp_path / "run", **change, **paths}
    assert message in refused(capsys, tmp_path, flags(**options))


def test_wrong_comparison_is_refused_before_the_first_run(corpus, tmp_path, capsys):
    options = {name: value for name, value in TINY.items() if name != "pattern"}
    arguments = [*flags(**options, data=corpus, out=tmp_path / "run"), "--compare", "causal,stridde"]
    assert "stridde" in refused(capsys, tmp_path, arguments)


def test_a_run_is_not_overwritten(finished, corpus, capsys):
    arguments = flags(**TINY, data=corpus, out=finished)
    assert "holds a run already: go on with --resume" in refused(capsys, finished, arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [(["--layers", "2"], "--layers 2 contradicts the run to resume, which has 1"), (["--seed", "0"], None)],
)
def test_resume_with_other_flags(finished, tmp_path, capsys, arguments, message):
    out = shutil.copytree(finished, tmp_path / "run")
    arguments = ["--out", str(out), "--resume", *arguments]
    if message:
        assert message in refused(capsys, out, arguments)
    else:
        assert train.main(arguments) == 0


def damage(out, kind):
    """Damages the run in ``out``; returns what the message must say."""
    newest = out / "checkpoints" / "6"
    arrays = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    if kind == "flipped bit":
        content = bytearray(arrays.read_bytes())
        content[len(content) // 2] ^= 1
        arrays.write_bytes(content)
    elif kind == "truncated":
        arrays.write_bytes(arrays.read_bytes()[:-1])
    elif kind == "lost file":
        arrays.unlink()
    elif kind == "other facts":
        (newest / "facts" / "metadata").write_text("{}")
    elif kind == "foreign":
        (newest / "SHA256").unlink()
    elif kind == "none":
        shutil.rmtree(out / "checkpoints")
        return "holds no checkpoint of this example"
    elif kind == "metrics":
        (out / "metrics.jsonl").write_text("{}\n")
        return "metrics.jsonl is damaged"
    return "checkpoints/6 is damaged or not of this example"


@pytest.mark.parametrize("kind", ["flipped bit", "truncated", "lost file", "other facts", "foreign", "none", "metrics"])
def test_damaged_runs_are_refused(finished, tmp_path, capsys, kind):
    out = shutil.copytree(finished, tmp_path / "run")
    message = damage(out, kind)
    assert message in refused(capsys, out, ["--out", str(out), "--resume"])
    if kind != "metrics":
        assert message in refused(capsys, out, ["--out", str(out)], generate.main)


def test_an_older_checkpoint_serves_when_the_newest_is_removed(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "6")
    assert train.main(["--out", str(out), "--resume"]) == 0
    assert losses(out) == losses(finished)


def test_another_corpus_is_refused(corpus, tmp_path, capsys):
    shutil.copytree(corpus, tmp_path / "corpus")
    out = tmp_path / "run"
    assert (
        train.main(flags(**{**TINY, "steps": 2, "warmup": 1, "sample_tokens": 0}, data=tmp_path / "corpus", out=out))
        == 0
    )
    (tmp_path / "corpus" / "part0" / "file0.txt").write_text("changed")
    assert "no longer the corpus" in refused(capsys, out, ["--out", str(out), "--resume"])
    assert "no longer the corpus" in refused(capsys, out, ["--out", str(out)], evaluate.main)


def test_two_processes_do_not_train_in_one_folder(finished, capsys):
    folder = os.open(finished, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as the other process does
    try:
        assert "another process is training there" in refused(capsys, finished, ["--out", str(finished), "--resume"])
    finally:
        os.close(folder)


def test_what_auto_stands_for_is_saved(finished):
    saved = checkpoint.latest(finished / "checkpoints")[1]["config"]
    assert (saved["device"], saved["dtype"]) == ("cpu", "float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "enwik9"], "--config must be one of cpu, small, enwik8_paper, got 'enwik9'"),
        (["--config", "small"], "--config small needs --data"),
        (["--compare", ""], "--compare names the patterns, one at least"),
        (["--compare", "causal", "--pattern", "causal"], "leave out --pattern"),
        (["--resume"], "holds no checkpoint of this example: start the run without --resume"),
        (["--separator", "x"], "--separator begins a document, which only --packed keeps apart"),
        (["--objective", "prefix", "--packed"], "--objective prefix has one prefix a sequence, which --packed cuts"),
        (["--objective", "prefix", "--pattern", "moba:block=16,count=1"], "a scorer selects earlier blocks alone"),
        (["--seed", str(10**30)], "--seed must be below"),
        (["--seq-len", "1"], "--sample-tokens 0"),
    ],
)
def test_more_wrong_requests(tmp_path, capsys, arguments, message):
    assert message in refused(capsys, tmp_path, [*arguments, "--out", str(tmp_path / "run")])


def test_runs_of_the_old_name_go_on(finished):
    saved = checkpoint.latest(finished / "checkpoints")[1]["config"] | {"pattern": "dense+local:local_attn_ctx=8"}
    assert Config.load(saved, {}).pattern == "causal+local:local_attn_ctx=8"
    with pytest.raises(Refusal, match="contradicts the run to resume, which has causal"):
        Config.load(saved, {"pattern": "local"})


def test_state_of_another_model_is_refused(finished):
    facts = checkpoint.latest(finished / "checkpoints")[1]
    other = Run(Config(**{**TINY, "features": 32}))
    with pytest.raises(Refusal, match="does not hold the weights of this model"):
        checkpoint.restore(finished / "checkpoints", 6, facts, other.like)


def test_generate(finished, capsys):
    arguments = ["--out", str(finished), "--prompt", "def f", "--tokens", "40", "--temperature"]
    texts = []
    for temperature in ("0", "0", "1"):
        assert generate.main([*arguments, temperature]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and all(text.startswith("def f") for text in texts)


@pytest.mark.parametrize("arguments", [["--prompt", ""], ["--tokens", "-1"], ["--temperature", "-1"]])
def test_generate_refuses(finished, capsys, arguments):
    assert arguments[0] in refused(capsys, finished, ["--out", str(finished), *arguments], generate.main)


def test_a_loss_that_is_no_number_ends_the_run(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(flags(**{**TINY, "lr": 1e30, "save_every": 1}, data=corpus, out=out)) == 2
    last = checkpoint.latest(out / "checkpoints")[0]
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"the last good checkpoint is {out}/checkpoints/{last}: start a new run with a smaller --lr" in message
    assert last < TINY["steps"]
    weights = checkpoint.restore(
        out / "checkpoints", last, checkpoint.latest(out / "checkpoints")[1], Run(Config(**TINY)).like
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights["params"]))


def stopped(capsys):
    """The one line on stderr, after that of compiling and the progress bar, of a run that a Refusal ended."""
    *before, message, end = capsys.readouterr().err.split("\n")
    assert not end and len(before) <= 2 and not [line for line in before if line.startswith("train: ")]
    return message


@contextlib.contextmanager
def growing_to(size):
    """No file may grow beyond ``size`` bytes: writing fails then as on a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.parametrize(
    ("file", "message", "left"),
    [
        ("metrics.jsonl", "cannot write into {out}", 2),
        ("checkpoint", "{out}/checkpoints/4 could not be written", 2),
        ("loss.png", "cannot write into {out}", 6),
    ],
)
def test_a_full_disk_is_one_line_and_the_run_goes_on(
    finished, corpus, tmp_path, monkeypatch, capsys, file, message, left
):
    out = tmp_path / "run"
    message = f"{message.format(out=out)}: File too large; the checkpoint of step {left} is intact"
    with monkeypatch.context() as patch, contextlib.ExitStack() as full:

        def fill():
            # Room for all rows, or none; in no case for a checkpoint or a picture.
            full.enter_context(growing_to(1 if file == "metrics.jsonl" else 5000))

        if file == "loss.png":
            draw = report.draw_run
            patch.setattr(report, "draw_run", lambda *args: fill() or draw(*args))
        else:
            after_row(patch, 3, fill)
        assert train.main(flags(**TINY, data=corpus, out=out)) == 2
        assert stopped(capsys) == f"train: {message}"
    with growing_to(100):
        # Rows of steps that were not saved are dropped first, for which there is no room either.
        assert train.main(["--out", str(out), "--resume"]) == 2
    assert f"File too large; the checkpoint of step {left} is intact" in stopped(capsys)
    assert train.main(["--out", str(out), "--resume"]) == 0
    assert losses(out) == losses(finished)
    assert (out / "loss.png").read_bytes().startswith(PNG)


def test_too_little_memory_is_one_line(corpus, tmp_path, monkeypatch, capsys):
    compiled = Run.compiled

    def small(run, batch):
        def step(*args):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

        return (step, *compiled(run, batch)[1:])

    monkeypatch.setattr(Run, "compiled", small)
    assert train.main(flags(**TINY, data=corpus, out=tmp_path / "run")) == 2
    assert stopped(capsys).startswith("train: --batch-size 2 --seq-len 32 does not fit the memory of the ")


class Writer(contextlib.AbstractContextManager):
    """Records what tensorboardX's class of the same methods would write, by folder."""

    told: ClassVar = collections.defaultdict(list)

    def __init__(self, folder, purge_step):
        self._told = self.told[pathlib.Path(folder)]
        self._told.append(purge_step)

    def add_scalar(self, name, value, step):
        self._told.append((step, name, value))

    def __exit__(self, *exception):
        self._told.append("closed")


@pytest.mark.usefixtures("interruptible")
def test_tensorboard_gets_every_number(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_row(patch, 1, lambda: signal.raise_signal(signal.SIGINT))
        options = {**TINY, "sample_tokens": 0}
        assert train.main([*flags(**options, data=corpus, out=out), "--tensorboard"]) == 130
    assert train.main(["--out", str(out), "--resume"]) == 0
    told = Writer.told[out / "tensorboard"]
    first, second = told.index("closed"), len(told) - 1
    # Without the steps from 3 on, should a process that was killed have written them.
    assert told[0] == 1 and told[first + 1] == 3 and told[second] == "closed"
    expected = [(row["step"], name, value) for row in rows(out) for name, value in row.items() if name != "step"]
    assert sorted(told[1:first] + told[first + 2 : second]) == sorted(expected)


@pytest.mark.parametrize("resume", [False, True])
def test_tensorboard_that_is_missing(finished, corpus, tmp_path, monkeypatch, capsys, resume):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    arguments = ["--out", str(finished), "--resume"] if resume else flags(**TINY, data=corpus, out=tmp_path / "run")
    message = refused(capsys, finished if resume else tmp_path, [*arguments, "--tensorboard"])
    assert "--tensorboard needs the package tensorboardX" in message


def test_table_is_aligned():
    row = {"step": 10, "loss": 1.0, "seconds": 2.0, "step_ms": 200.0, "heldout_bpb": 1.5}
    results = [
        report.Result(name, 1234, [{**row, **more}], 8, 1_250_000_000, 2.0, 4.0)
        for name, more in (("a", {}), ("bb", {"mfu": 0.5, "accuracy": 0.25}))
    ]
    lines = report.table(results).splitlines()
    assert len({len(line) for line in lines}) == 1
    numbers = ["1,234", "10", "200.0", "40", "-", "1.25", "GB", "1.500", "-", "2.000", "4.000"]
    assert lines[2].split() == ["a", *numbers]
    assert lines[3].split() == ["bb", *numbers[:4], "50.0%", *numbers[5:8], "25.0%", *numbers[9:]]


def test_a_record_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    row = {"step": 1, "loss": 1.0, "seconds": 2.0, "step_ms": 200.0, "mfu": 0.5, "heldout_bpb": 1.5}
    old = report.Result("old", 1, [row, row | {"step": 2}], 1, 1, 2.0, 4.0)
    path, write = tmp_path / "compare.json", pathlib.Path.write_text
    report.save([old], path, "cpu")

    def full(self, text, **options):
        write(self, text[:100], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report.save([dataclasses.replace(old, pattern="new")], path, "cpu")
    assert report.load(path) == [old]


def test_nothing_of_a_figure_is_cut_off(tmp_path, monkeypatch):
    patterns = [
        "bigbird:block=64,window_blocks=3,global_blocks=2,random_blocks=3,seed=0,causal=True",
        "sliding_window:window=128+strided:local_attn_ctx=128+sparse_transformer_fixed:stride=128,summary=32+bigbird",
        *(f"local:local_attn_ctx={i}" for i in range(5)),
    ]
    rows = [
        {"step": i, "seconds": 1e3 * i, "loss": 5 / i, "step_ms": 1.0, "tokens_per_second": 1e6, "mfu": 0.3}
        for i in range(1, 9)
    ]
    rows[-1] |= {"heldout_bpb": 1.0, "accuracy": 0.5}
    results = [report.Result(pattern, 1, rows, 1, 1, 2.0, 4.0) for pattern in patterns]
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path: figures.append(figure))
    report.draw_comparison(results, tmp_path)
    for result in results[:2]:
        report.draw_run(result, tmp_path)
    for figure in figures:
        figure.draw_without_rendering()
        assert len([text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]) >= 8
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height
