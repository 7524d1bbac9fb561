import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from examples.train_lm import checkpoint, data, generate, report, train
from examples.train_lm.config import Config, Refusal
from examples.train_lm.log import Log
from examples.train_lm.run import Run

from .conftest import TINY, flags, snapshot

PNG = b"\x89PNG\r\n"


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return [(row["step"], row["loss"], row.get("heldout_bpb")) for row in rows(out)]


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
    windows = data.load(str(corpus), 32).heldout_windows(4, 32).tokens[:, 1:].astype(np.uint8)
    expected = [before[-1][2], data.gzip_bits(windows.reshape(-1)), data.order0_bits(windows.reshape(-1))]
    assert table[2].split()[0] == TINY["pattern"] and table[2].split()[-3:] == [f"{bits:.3f}" for bits in expected]


def at_row(monkeypatch, number, action):
    """Calls ``action`` when the row of step ``number`` has been written."""
    write = Log.write

    def hooked(log, row):
        write(log, row)
        if row["step"] == number:
            action()

    monkeypatch.setattr(Log, "write", hooked)


# The row of step 1 is written when step 2 has begun, which is then saved; that of step 4, itself saved, before step 5.
@pytest.mark.parametrize(("step", "saved"), [(1, 2), (4, 4)])
def test_interrupted_and_resumed_equals_uninterrupted(finished, corpus, tmp_path, monkeypatch, capsys, step, saved):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_row(patch, step, lambda: signal.raise_signal(signal.SIGINT))
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
        at_row(patch, 3, crash)
        with pytest.raises(Crash):
            train.main(flags(**TINY, data=corpus, out=tmp_path / "run"))
    # Step 3 was done but not saved: it is done again.
    assert len(rows(tmp_path / "run")) == 3 and checkpoint.latest(tmp_path / "run" / "checkpoints")[0] == 2
    assert train.main(["--out", str(tmp_path / "run"), "--resume"]) == 0
    assert losses(tmp_path / "run") == losses(finished)


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
    assert process.returncode == 130 and "go on with: make train" in message and "Traceback" not in message
    assert checkpoint.latest(out / "checkpoints")[0] == len(rows(out)) > 0


def test_compare_draws_one_figure(corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "both"
    options = {name: value for name, value in TINY.items() if name != "pattern"}
    patterns = "sparse_transformer_fixed:stride=16,summary=4,dense"
    with monkeypatch.context() as patch:
        # Stopped in the second run, whose settings must come from the first: --resume repeats none.
        calls = []
        at_row(patch, 4, lambda: calls.append(4) or (len(calls) == 2 and signal.raise_signal(signal.SIGINT)))
        assert train.main([*flags(**options, data=corpus, out=out), "--compare", patterns]) == 130
    assert not (out / "compare.png").exists()
    assert train.main(["--out", str(out), "--resume", "--compare", patterns]) == 0
    assert (out / "compare.png").read_bytes().startswith(PNG)
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert [line[0] for line in table[2:4]] == ["sparse_transformer_fixed:stride=16,summary=4", "dense"]
    assert {line[2] for line in table[2:4]} == {"6"}
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    assert [len(rows(folder)) for folder in folders] == [6, 6]


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
        ({"out": "short"}, "is a file"),
        ({"out": "full"}, "is not empty"),
        ({"out": "nowhere", "steps": -1}, "--steps"),
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
    arguments = [*flags(**options, data=corpus, out=tmp_path / "run"), "--compare", "dense,stridde"]
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
    assert train.main(flags(**{**TINY, "steps": 1}, data=tmp_path / "corpus", out=out)) == 0
    (tmp_path / "corpus" / "part0" / "file0.txt").write_text("changed")
    assert "no longer the corpus" in refused(capsys, out, ["--out", str(out), "--resume"])


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


def test_table_is_aligned():
    row = {"step": 10, "loss": 1.0, "seconds": 2.0, "step_ms": 200.0, "heldout_bpb": 1.5}
    results = [
        report.Result(name, 1234, [{**row, **mfu}], 8, 1_250_000_000, 2.0, 4.0)
        for name, mfu in (("a", {}), ("bb", {"mfu": 0.5}))
    ]
    lines = report.table(results).splitlines()
    assert len({len(line) for line in lines}) == 1
    numbers = ["1,234", "10", "200.0", "40", "-", "1.25", "GB", "1.500", "2.000", "4.000"]
    assert lines[2].split() == ["a", *numbers]
    assert lines[3].split() == ["bb", *["50.0%" if number == "-" else number for number in numbers]]
