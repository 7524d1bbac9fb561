"""Associative recall over bytes: its sequences, what counts of them, and what a window cannot learn of them."""

import re
import shutil

import jax
import matplotlib.figure
import numpy as np
import pytest
from flax import nnx

from examples.train_lm import evaluate, generate, train
from examples.train_lm.config import Config
from examples.train_lm.recall import FILLER, KEYS, VALUES, sequences, source
from examples.training import report
from examples.training.config import Refusal
from examples.training.model import scores
from examples.training.run import Run

from .conftest import TINY, flags, losses, rows

# Of test runs: TINY with what is recalled.
RECALL = {**TINY, "data": "recall", "pairs": 4}


def recall_sequences(seq_len, pairs, queries, count=50):
    return sequences([[7, i] for i in range(count)], seq_len, pairs, queries)


@pytest.mark.parametrize(("seq_len", "pairs", "queries"), [(8, 1, 1), (256, 8, 8), (256, 32, 5), (4096, 64, 64)])
def test_what_a_query_needs_is_in_its_pair_alone(seq_len, pairs, queries):
    tokens, segments, answers, _ = recall_sequences(seq_len, pairs, queries)
    assert tokens.shape == (50, seq_len + 1) and tokens.dtype == np.int32 and segments is None
    assert answers is not None and answers.shape == (50, seq_len) and (answers.sum(1) == queries).all()
    distances = []
    for row, asked in zip(tokens, answers, strict=True):
        keys, values = (np.flatnonzero(np.isin(row, kind)) for kind in (KEYS, VALUES))
        # A value follows each key, and all else is filler.
        np.testing.assert_array_equal(keys + 1, values)
        assert np.isin(np.delete(row, [*keys, *values]), FILLER).all() and keys.size == pairs + queries
        told = dict(zip(row[keys[:pairs]], keys[:pairs], strict=True))
        assert len(told) == pairs and max(told.values()) + 1 < seq_len // 4
        # The bytes that count are those after the queries' keys: the target at t is the byte t + 1.
        np.testing.assert_array_equal(np.flatnonzero(asked), keys[pairs:])
        assert len(set(row[keys[pairs:]])) == queries
        for query in keys[pairs:]:
            assert row[query + 1] == row[told[row[query]] + 1]
            distances.append(query - told[row[query]])
    assert seq_len / 2 < min(distances) and max(distances) < seq_len
    # They are spread, not at one distance.
    assert seq_len == 8 or np.ptp(distances) > seq_len / 5
    # Of this many sequences each range is seen whole.
    assert pairs < 64 or set(np.unique(tokens)) == {*KEYS, *VALUES, *FILLER}


def test_steps_are_a_function_of_seed_and_step():
    one, other = (source(seed, 64, 4, 4, 2) for seed in (0, 1))
    steps = [one.batch(step) for step in range(20)]
    np.testing.assert_array_equal(one.batch(7).tokens, steps[7].tokens)
    # In batches of another size the sequences are the same.
    np.testing.assert_array_equal(source(0, 64, 8, 4, 2).batch(3).tokens[4:], steps[7].tokens)
    # Held-out sequences are the same for all seeds, the first of them also when there are more, and never learnt.
    heldout = one.heldout(80)
    np.testing.assert_array_equal(other.heldout(90).tokens[:80], heldout.tokens)
    learnt = [each.batch(step).tokens for each in (one, other) for step in range(20)]
    assert len(np.unique(np.concatenate([*learnt, heldout.tokens]), axis=0)) == 2 * 80 + 80
    assert one.digest != other.digest and one.digest == source(0, 64, 4, 4, 2).digest


def test_each_part_of_a_row_is_a_sequence():
    """Sequences are cut into 1, 4 and 16 parts in turn; those held out never are."""
    data = source(0, 256, 6, 8, 6, num_documents=16)
    tokens, segments, answers, _ = data.batch(0)
    assert segments is not None and segments.shape == tokens.shape and answers is not None
    assert [row.max() + 1 for row in segments] == [1, 4, 16] * 2
    for row, part, asked, count in zip(tokens, segments, answers, [1, 4, 16] * 2, strict=True):
        np.testing.assert_array_equal(part[:-1], np.repeat(np.arange(count), 256 // count))
        assert part[-1] == part[-2]
        pairs = min(8, 256 // count // 8)
        # A key that ends a part has no answer: what comes next is another part's.
        border = np.append(np.diff(part) > 0, False)[:-1] & np.isin(row[:-1], KEYS)
        asked_of = np.bincount(part[:-1][asked | border], minlength=count)
        np.testing.assert_array_equal(asked_of, [min(6, pairs)] * count)
        assert not (asked & border).any()
        for key in np.flatnonzero(asked):
            told = np.flatnonzero((row[:key] == row[key]) & (part[:key] == part[key]))
            assert len(told) == 1 and row[told + 1] == row[key + 1] and part[key + 1] == part[key]
    heldout = data.heldout(5)
    assert heldout.segments is not None and not heldout.segments.any()
    np.testing.assert_array_equal(heldout.tokens, source(0, 256, 6, 8, 6).heldout(5).tokens)
    # The first sequence is whole and as it would be without parts.
    np.testing.assert_array_equal(tokens[0], source(0, 256, 6, 8, 6).batch(0).tokens[0])


class Oracle(nnx.Module):
    """Looks the value up that followed a key, no more than ``reach`` bytes before; where there is none, says 64."""

    def __init__(self, reach):
        self.reach = reach

    def __call__(self, tokens, segment_ids, deterministic):
        guesses = np.full(tokens.shape, VALUES[0])
        for row, guess in zip(np.asarray(tokens), guesses, strict=True):
            for at, key in enumerate(row):
                first = max(0, at - self.reach)
                found = np.flatnonzero(row[first:at] == key)
                if key in KEYS and found.size:
                    guess[at] = row[first + found[0] + 1]
        return 20 * jax.nn.one_hot(guesses, 256)


def test_accuracy_is_that_of_the_answers():
    batch = recall_sequences(256, 8, 6)
    assert scores(Oracle(256), batch)["accuracy"] == 1 and scores(Oracle(256), batch)["loss"] < 1e-6
    # All distances are beyond half the sequence; the deviation of chance is 0.007.
    assert scores(Oracle(128), batch)["accuracy"] == pytest.approx(1 / len(VALUES), abs=0.03)
    # What is no answer counts for nothing, whatever is said there.
    assert batch.answers is not None
    wrong = batch._replace(answers=~batch.answers)
    assert scores(Oracle(256), wrong)["loss"] > 10


def test_a_run_recalls_and_goes_on(tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(flags(**RECALL, out=out)) == 0
    # What is printed, written and drawn has the accuracy; there is no text to write a sample of.
    accuracy = rows(out)[-1]["accuracy"]
    assert [row["step"] for row in rows(out) if "accuracy" in row] == [3, 6] and 0 <= accuracy <= 1
    printed = capsys.readouterr()
    head, _, line = printed.out.splitlines()[:3]
    assert head.split()[-4] == "accuracy" and line.split()[-3] == f"{accuracy:.1%}"
    assert f"bpb, accuracy {accuracy:.1%}, " in printed.err
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "loss.png", "metrics.jsonl"]

    before = [*losses(out), accuracy]
    shutil.rmtree(out / "checkpoints" / "6")
    assert train.main(["--out", str(out), "--resume"]) == 0
    assert [*losses(out), rows(out)[-1]["accuracy"]] == before

    for command, message in ((generate, "--data recall: "), (evaluate, "--data recall is no text")):
        capsys.readouterr()
        assert command.main(["--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 5}, "--pairs must be at most 4 with --seq-len 32, got 5"),
        ({"pairs": 65, "seq_len": 4096}, "--pairs must be at most 64 with --seq-len 4096, got 65"),
        ({"queries": 5}, "--queries must be at most --pairs, got 5 and 4"),
        ({"queries": -1}, "--queries must be at least 0, got -1"),
        ({"parts": 2}, "--parts must be 1, 4, 16, ..., and cut --seq-len 32 into equal ones of 8 bytes or more, got 2"),
        ({"parts": 16}, "into equal ones of 8 bytes or more, got 16"),
        ({"parts": 4, "seq_len": 34}, "--parts must be 1, 4, 16, ..., and cut --seq-len 34 into equal ones"),
        ({"parts": 0}, "--parts must be at least 1, got 0"),
        ({"glob": "*.py"}, "--glob is of files, --data recall has none"),
        ({"packed": True}, "--packed is of files, --data recall has none"),
        ({"data": ""}, "--pairs is of --data recall, got 4 without it"),
        ({"data": "", "pairs": 8, "parts": 4}, "--parts is of --data recall, got 4 without it"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(Refusal, match=re.escape(message)):
        Config(**{**RECALL, **options})


def test_a_comparison_has_accuracies(tmp_path, monkeypatch):
    row = {"step": 1, "loss": 1.0, "seconds": 2.0, "step_ms": 9.0, "tokens_per_second": 1.0}
    evaluated = [row | {"step": i, "heldout_bpb": 1.0, "accuracy": i / 4} for i in (1, 2, 3)]
    results = [report.Result(name, 1, evaluated, 1, 1, 2.0, 4.0) for name in ("a", "b")]
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path: figures.append(figure))
    report.draw_run(results[0], tmp_path)
    report.save(results, tmp_path / "compare.json", "cpu")
    report.draw_comparison(report.load(tmp_path / "compare.json"), tmp_path)
    assert "Answers that are right: b 75%, a 75%" in figures[-1].get_suptitle()
    # A run of another seed has its pattern's colour, and no label of its own.
    again = [str(tmp_path / "compare.json")] * 2
    assert report.main([*again, "--picture", str(tmp_path / "both.png")]) == 0
    colours = [[line.get_color() for line in figure.axes[0].lines] for figure in figures[1:]]
    assert len(colours[1]) == 2 * len(colours[0]) and set(colours[1]) == set(colours[0])
    labels = [[text.get_text() for text in figure.legends[0].texts] for figure in figures[1:]]
    assert labels[0] == labels[1] and len(labels[0]) == 2
    for figure, count in zip(figures, (1, 4, 8), strict=True):
        panels = [axes for axes in figure.axes if axes.get_ylabel() == "accuracy"]
        curves = [curve for axes in panels for curve in axes.lines]
        assert len(curves) == count and all(list(curve.get_ydata()) == [0.25, 0.5, 0.75] for curve in curves)


def test_full_attention_learns_what_a_window_cannot():
    """Two layers with a window of 8 reach 14 bytes back, and a value lies 16 back at least."""

    def learnt(pattern, steps):
        """The accuracy after each 50 steps, until it is high."""
        model = {"pattern": pattern, "layers": 2, "features": 32, "heads": 1, "batch_size": 16}
        rates = {"steps": 500, "warmup": 50, "lr": 3e-3, "lr_end": 1.0, "weight_decay": 0.0}
        config = Config(**{**RECALL, **model, **rates})
        run, data = Run(config), config.source()
        state, step, evaluate, found = run.init(), jax.jit(run.step, donate_argnums=0), jax.jit(run.scores), []
        for number in range(1, steps + 1):
            state, _ = step(state, data.batch(number - 1), np.int32(number))
            if number % 50 == 0:
                found.append(evaluate(state, data.heldout(128))["accuracy"])
                if found[-1] > 0.9:
                    break
        return found

    causal = learnt("causal", 500)
    assert causal[-1] > 0.9
    window = learnt("sliding_window:window=8", 50 * len(causal))
    assert window[-1] == pytest.approx(1 / len(VALUES), abs=0.03)
