import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_lm import evaluate, profile
from examples.train_lm.config import Config
from examples.train_lm.data import FileSlice, Text
from examples.training.config import Refusal
from examples.training.run import Run

from .conftest import TINY


def by_hand(run, state, text, context, stretches):
    """Bits per byte, each byte of stretches (first, end) scored by itself from the window that is its own."""
    length = run.config.seq_len
    model = jax.jit(lambda state, tokens, seen: run.model(state)(tokens, segment_ids=seen))
    content, total = text.read(0, text.size).astype(np.int32), 0.0
    # The first byte of a document that is kept apart is nobody's next byte.
    skipped = set(text.document_starts) if run.config.packed else set()
    scored_bytes = [(at, first) for first, end in stretches for at in range(first, end) if at not in skipped]
    for at, first in scored_bytes:
        # Stretches are cut into pieces; the window that predicts one begins `context` bytes before it, or earlier
        # where it would pass the text's end.
        piece = (at - first) // (length - context + 1)
        start = min(first + piece * (length - context + 1) - context, text.size - length - 1)
        assert context <= at - start <= length
        inputs = range(start, start + length)
        seen = [sum(start < begin <= i for begin in text.document_starts) for i in inputs]
        seen = jnp.array([seen]) if run.config.packed else None
        logits = model(state, content[None, start : start + length], seen)[0, at - 1 - start]
        total -= float(jax.nn.log_softmax(logits)[content[at]])
    return total / len(scored_bytes) / np.log(2)


@pytest.mark.parametrize(
    ("batch_size", "count", "packed", "stretches"),
    [(2, 10**6, False, [(32, 64), (64, 97)]), (5, 50, True, [(32, 82)]), (5, 64, True, [(32, 64), (65, 97)])],
    ids=["to the end", "a part, packed", "spread, packed"],
)
def test_each_byte_has_its_context(tmp_path, batch_size, count, packed, stretches):
    content = np.random.default_rng(0).integers(0, 256, 97, np.uint8)
    (tmp_path / "text").write_bytes(content.tobytes())
    text = Text([FileSlice(str(tmp_path / "text"), 0, 97)], np.array([0, 20, 40]))
    run = Run(Config(**{**TINY, "pattern": "causal", "batch_size": batch_size, "packed": packed}))
    # Weights so large that each byte before matters.
    state = run.init()
    state["params"] = jax.tree.map(lambda leaf: 2 * leaf, state["params"])
    contexts = [1, 16, 31, 32]
    actual = list(evaluate.by_context(run, state, text, contexts, count))
    assert [row.context for row in actual] == contexts
    pieces = [sum(-(-(end - first) // (33 - context)) for first, end in stretches) for context in contexts]
    assert [row.windows for row in actual] == pieces
    expected = [by_hand(run, state, text, context, stretches) for context in contexts]
    np.testing.assert_allclose([row.bits_per_byte for row in actual], expected, rtol=1e-5)
    # Far enough apart to tell one context from the next.
    assert np.min(np.abs(np.diff(sorted(expected)))) > 2e-5 * expected[0]


def test_command_prints_a_row_for_each_context(finished, capsys):
    assert evaluate.main(["--out", str(finished), "--contexts", "32,1,16", "--bytes", "40"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "16", "32"]
    assert [line.split()[2] for line in lines] == ["2", "3", "40"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "0,8"], "--contexts must lie in 1..seq_len=32, got 0"),
        (["--contexts", "8,33"], "--contexts must lie in 1..seq_len=32, got 33"),
        (["--contexts", "8,half"], "--contexts must be whole numbers between commas, got '8,half'"),
        (["--part", "test"], "--part test: a folder has none"),
        (["--bytes", "0"], "--bytes 0: of "),
    ],
)
def test_command_refuses(finished, capsys, arguments, message):
    assert evaluate.main(["--out", str(finished), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"evaluate: {message}") and err.count("\n") == 1


def event(name, start, duration):
    return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration)


def test_profile_is_that_of_one_device(tmp_path, monkeypatch):
    """Two steps, in which kernels of two streams overlap for 1 ms, and nothing is done for 1 ms between them."""
    lines = {
        "Stream #1": [event("nvjet_hsh", 0, 4e6), event("fwd_kernel", 5e6, 2e6), event("nvjet_hsh", 7e6, 1e6)],
        "Stream #2(MemcpyH2D)": [event("MemcpyH2D", 3e6, 1e6), event("ncclDevKernel", 8e6, 1e6)],
        "XLA Modules": [event("jit_step", 0, 9e6)],
        "Stream #3": [event("loop_fusion", 9e6, 1e6)],
    }
    plane = types.SimpleNamespace(
        name="/device:GPU:0", lines=[types.SimpleNamespace(name=name, events=them) for name, them in lines.items()]
    )
    host = types.SimpleNamespace(name="/host:CPU", lines=plane.lines[:1])
    second = types.SimpleNamespace(name="/device:GPU:1", lines=plane.lines)
    planes = [host, plane, second]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "host.xplane.pb").touch()
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: types.SimpleNamespace(planes=planes))
    found = profile._read(tmp_path, 2, seconds=0.012, waited=0.001)
    kinds = {"matmul": 2.5, "attention": 1.0, "input": 0.5, "collective": 0.5, "other": 0.5}
    assert found.by_kind == pytest.approx(kinds)
    assert found.by_name["nvjet_hsh"] == 2.5 and next(iter(found.by_name)) == "nvjet_hsh"
    # Of 6 ms a step 4.5 are busy, though the kernels take 5 together.
    assert (found.step, found.kernels, found.idle, found.waited) == pytest.approx((6, 5, 1.5, 0.5))

    planes[1:] = []
    with pytest.raises(Refusal, match=r"shows no kernels, it has \['/host:CPU'\]: this needs a GPU"):
        profile._read(tmp_path, 2, seconds=0.012, waited=0.001)


def test_profile_without_a_gpu_is_refused_at_once(monkeypatch, capsys):
    def train(*args):
        raise AssertionError("trained")

    monkeypatch.setattr(profile, "resolved", lambda config: dataclasses.replace(config, device="cpu"))
    monkeypatch.setattr(profile, "Run", train)
    monkeypatch.setattr(profile.Config, "source", train)
    assert profile.main([]) == 2
    assert capsys.readouterr().err == "profile: --device cpu: a profile is of the kernels of an NVIDIA GPU\n"
