import dataclasses
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops import implementations
from sparse_layers.ops.kernels import reference
from sparse_layers.ops.kernels.operands import Gradients
from sparse_layers.ops.planning import platforms
from sparse_layers.tools import measuring, oracle, tuned, tuning

SMALL, LARGE = sl.FwdParams(q_blocksize=32, kv_blocksize=32), sl.FwdParams(q_blocksize=64, kv_blocksize=64)
BACK = sl.BwdParams(q_blocksize=32, kv_blocksize=64)
SIZES = {"heads": 2, "head_size": 8}


@pytest.fixture
def times(monkeypatch):
    """A list for the test to fill with the times that each call of `_milliseconds` returns."""
    queued = []

    def milliseconds(functions, repeats):
        next_times = queued.pop(0)
        assert len(next_times) == len(functions)
        return next_times

    monkeypatch.setattr(measuring, "_milliseconds", milliseconds)
    return queued


@pytest.fixture
def fake(monkeypatch):
    """Registers an implementation "fake": the reference, whose results pass through two functions.

    Each gets (params, results); calls are counted.
    """

    def register(forward=lambda params, results: results, backward=lambda params, results: results):
        calls = []

        def run(call, operands):
            calls.append(call.params)
            return forward(call.params, reference.forward(call, operands))

        def run_backward(call, *args):
            return Gradients(*backward(call.params, reference.backward(call, *args)[:3]))

        # A name for each, since compiled calls are kept by name.
        name = f"fake{len(register.names)}"
        register.names.append(name)
        module = types.SimpleNamespace(unsupported=lambda call, operands: None, forward=run, backward=run_backward)
        monkeypatch.setitem(implementations.IMPLEMENTATIONS, name, module)
        monkeypatch.setitem(platforms.TUNING, name, platforms.TUNING["xla"])
        return name, calls

    register.names = NAMES
    return register


NAMES = []  # of all tests


# --- choice ----------------------------------------------------------------------------------------------------------


def test_the_least_time_is_picked_forward_first(fake, times):
    name, _ = fake()
    # Each stage: forwards and backwards in turns, the parameters to beat first.
    times += [[4.0, 9.0, 5.0, 7.0, 3.0, 8.0], [5.5, 7.5, 5.6, 6.0]]
    result = sl.tune(sl.Causal(), 64, **SIZES, implementation=name, candidates=[SMALL, BACK, LARGE])
    assert (result.fwd_params, result.bwd_params) == (SMALL, BACK)
    assert [dataclasses.astuple(row)[2:] for row in result.table] == [
        (4.0, 9.0, None),
        (5.0, 7.0, None),
        (3.0, 8.0, None),
        (5.5, 7.5, None),
        (5.6, 6.0, None),
    ]
    assert [(row.fwd_params, row.bwd_params) for row in result.table] == [
        (sl.FwdParams(), sl.BwdParams()),
        (SMALL, sl.BwdParams()),
        (LARGE, sl.BwdParams()),
        (SMALL, sl.BwdParams()),
        (SMALL, BACK),
    ]
    assert not times


def test_without_gradients_the_forward_alone_counts(fake, times):
    name, _ = fake()
    times += [[4.0, 5.0, 3.0]]
    result = sl.tune(sl.Causal(), 64, **SIZES, implementation=name, candidates=[SMALL, LARGE], gradients=False)
    assert (result.fwd_params, result.bwd_params) == (LARGE, sl.BwdParams())
    assert all(row.both_ms is None for row in result.table)


@pytest.mark.parametrize(
    "measured, index",
    [
        ([100.0], 0),
        ([100.0, 100.0], 0),
        ([100.0, 98.0], 0),
        ([100.0, 97.9], 1),
        ([100.0, 98.5, 99.0], 0),
        ([100.0, 50.0, 49.9], 2),
        ([100.0, 50.0, 50.0], 1),
        ([100.0, None, 90.0, None], 2),
        ([100.0, None], 0),
    ],
)
def test_the_default_wins_ties(measured, index):
    assert measuring._fastest(measured) == index


def test_the_default_is_all_that_is_measured_without_candidates(fake, times):
    name, _ = fake()
    times += [[1.0, 2.0]]
    result = sl.tune(sl.Causal(), 64, **SIZES, implementation=name, candidates=())
    assert (result.fwd_params, result.bwd_params) == (sl.FwdParams(), sl.BwdParams())
    assert len(result.table) == 1


def test_the_same_parameters_are_measured_once(fake, times):
    name, _ = fake()
    times += [[1.0, 2.0, 3.0, 4.0]]
    candidates = [SMALL, sl.FwdParams(), SMALL, sl.BwdParams()]
    assert len(sl.tune(sl.Causal(), 64, **SIZES, implementation=name, candidates=candidates).table) == 2


def test_the_median_of_groups_in_turns():
    now, ran = [0.0], []

    def function(name, seconds):
        def run():
            ran.append(name)
            now[0] += seconds.pop(0) if len(seconds) > 1 else seconds[0]
            return jnp.zeros(())

        return run

    # Two calls of each to warm up, one of which is timed to see how many make a group; then one a group, in turns.
    functions = [function("a", [9.0, 9.0, 1.0, 5.0, 2.0]), function("b", [9.0, 9.0, 7.0])]
    assert measuring._milliseconds(functions, 3, lambda: now[0]) == [2000.0, 7000.0]
    assert ran == ["a", "a", "b", "b"] + ["a", "b"] * 3
    ran.clear()
    assert measuring._milliseconds([function("c", [0.25])], 1, lambda: now[0]) == [250.0]
    assert ran == ["c"] * 4


# --- candidates that fail --------------------------------------------------------------------------------------------


def test_a_candidate_that_fails_is_listed_with_its_reason(fake, times):
    def forward(params, results):
        if params[0] == SMALL:
            raise RuntimeError("shared memory:\n  300 of 228 KiB")
        return results

    def backward(params, results):
        if params[1] == BACK:
            raise MemoryError("none left")
        return results

    name, _ = fake(forward, backward)
    times += [[4.0, 9.0, 3.0, 8.0], [3.0, 8.0]]
    result = sl.tune(sl.Causal(), 64, **SIZES, implementation=name, candidates=[SMALL, LARGE, BACK])
    assert (result.fwd_params, result.bwd_params) == (LARGE, sl.BwdParams())
    rows = {(row.fwd_params, row.bwd_params): row for row in result.table}
    assert rows[SMALL, sl.BwdParams()].reason == "RuntimeError: shared memory: 300 of 228 KiB"
    assert rows[LARGE, BACK].reason == "MemoryError: none left"
    assert rows[LARGE, BACK].forward_ms is rows[LARGE, BACK].both_ms is None
    assert "left out" in str(result) and "300 of 228 KiB" in str(result)


def only(which, change):
    """Applies a change to the results of these parameters."""
    return lambda params, results: change(*results) if which in params else results


WRONG = {
    "out": only(SMALL, lambda out, lse: (1.1 * out, lse)),
    "a row of out": only(SMALL, lambda out, lse: (out.at[0, 40, 1].multiply(1.5), lse)),
    "NaN": only(SMALL, lambda out, lse: (out.at[0, 7, 1, 3].set(jnp.nan), lse)),
}
WRONG_BACK = {
    "query": only(BACK, lambda dq, dk, dv: (-dq, dk, dv)),
    "key": only(BACK, lambda dq, dk, dv: (dq, 1.1 * dk, dv)),
    "value": only(BACK, lambda dq, dk, dv: (dq, dk, jnp.roll(dv, 1, 1))),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("case", [*WRONG, *WRONG_BACK])
def test_a_wrong_result_is_never_picked(fake, times, case, dtype):
    if case in WRONG:
        name, _ = fake(forward=WRONG[case])
        times += [[4.0, 9.0]]
    else:
        name, _ = fake(backward=WRONG_BACK[case])
        times += [[4.0, 9.0], [4.0, 9.0]]
    candidates = [SMALL if case in WRONG else BACK]
    result = sl.tune(sl.Causal(), 64, **SIZES, dtype=dtype, implementation=name, candidates=candidates)
    assert (result.fwd_params, result.bwd_params) == (sl.FwdParams(), sl.BwdParams())
    reason = result.table[-1].reason
    assert reason and reason.startswith("wrong result: ")
    assert case in ("NaN", "a row of out") or case in reason.partition(" is ")[0]


def test_a_default_that_fails_raises(fake, times):
    def forward(params, results):
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        sl.tune(sl.Causal(), 64, **SIZES, implementation=fake(forward)[0], candidates=[])
    name, _ = fake(lambda params, results: (results[0] / 0.0, results[1]))
    with pytest.raises(ArithmeticError, match="out of the default parameters is not finite"):
        sl.tune(sl.Causal(), 64, **SIZES, implementation=name, candidates=[])


def test_inputs_are_random():
    shapes = tuning._shapes(dict(zip(tuned.SIZES, (2, 5, 7, 4, 2, 8, 6), strict=True)), jnp.dtype("bfloat16"), True)
    arrays, dout = measuring._random_inputs(shapes)
    shapes = [arrays[name].shape for name in ("query", "key", "value", "sinks")]
    assert shapes == [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), (4,)] and dout.shape == (2, 5, 4, 6)
    for x in (*arrays.values(), dout):
        values = np.asarray(x, np.float64)
        assert len(np.unique(values)) > 0.3 * values.size
    for x in (arrays["query"], arrays["sinks"]):
        values = np.asarray(x, np.float64)
        moved = np.asarray(oracle.neighbour(jax.random.key(3), x), np.float64)
        assert ((moved != values) & (abs(moved - values) <= 2 * float(jnp.finfo(x.dtype).eps) * abs(values))).all()


# --- implementations -------------------------------------------------------------------------------------------------


def test_xla(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mask, options = sl.Causal() & sl.Window(20), {"heads": 2, "kv_heads": 1, "head_size": 8, "value_size": 4}
    segments = (np.arange(40)[None] // 30, np.arange(50)[None] // 30)
    more = {"segment_ids": segments, "sinks": True, "logits_soft_cap": 20, "candidates": [SMALL], "repeats": 1}
    result = sl.tune(mask, 40, 50, **options, **more, implementation="xla")
    assert [row.reason for row in result.table] == [None, None]
    assert all(row.forward_ms and row.both_ms for row in result.table)
    assert not list(tmp_path.iterdir()), "nothing is written without a path"
    q, k, v = jnp.ones((1, 40, 2, 8)), jnp.ones((1, 50, 1, 8)), jnp.ones((1, 50, 1, 4))
    params = {"fwd_params": result.fwd_params, "bwd_params": result.bwd_params}
    assert sl.block_sparse_attention(q, k, v, mask, implementation="xla", **params).shape == (1, 40, 2, 4)


def test_each_candidate_runs_on_the_implementation_that_the_call_would_take(fake, times, monkeypatch):
    (first, ran_first), (second, ran_second), (third, _) = fake(), fake(), fake()

    def no_settings(call, operands):
        return "it takes no settings" if call.params != (sl.FwdParams(), sl.BwdParams()) else None

    monkeypatch.setattr(implementations.IMPLEMENTATIONS[first], "unsupported", no_settings)
    monkeypatch.setitem(platforms.PREFERRED, platforms.platform(), (first, second, third))
    monkeypatch.setattr(tuning, "_default_candidates", lambda name, *lengths: [SMALL] if name == second else [])
    times += [[3.0, 4.0, 1.0, 2.0]]
    result = sl.tune(sl.Causal(), 64, **SIZES)
    assert (result.fwd_params, result.about["implementation"], result.about["tunable"]) == (SMALL, None, second)
    assert {params[0] for params in ran_first} == {sl.FwdParams()} and SMALL in {params[0] for params in ran_second}
    assert f"the library's choice, with settings {second}, on" in str(result)


def test_an_implementation_without_settings(fake, times, monkeypatch):
    name, _ = fake()

    def unsupported(call, operands):
        return "it takes no settings" if call.params != (sl.FwdParams(), sl.BwdParams()) else None

    monkeypatch.setattr(implementations.IMPLEMENTATIONS[name], "unsupported", unsupported)
    times += [[3.0, 4.0], [3.0, 4.0]]
    assert len(sl.tune(sl.Causal(), 64, **SIZES, implementation=name).table) == 1
    result = sl.tune(sl.Causal(), 64, **SIZES, implementation=name, candidates=[SMALL])
    assert "it takes no settings" in (result.table[1].reason or "")


# Noise where the right answer is 0, and rows without keys.
@pytest.mark.parametrize("mask", [sl.Window(0), sl.Causal() & ~sl.Window(5)])
def test_right_candidates_are_within_the_budget(times, mask):
    times += [[4.0, 9.0, 3.0, 8.0]]
    result = sl.tune(mask, 70, **SIZES, dtype=jnp.float32, implementation="xla", candidates=[SMALL])
    assert result.table[1].reason is None


def test_triton(times):
    times += [[4.0, 9.0, 3.0, 8.0]]
    candidate = sl.FwdParams(q_blocksize=16, kv_blocksize=32, blocksize_m=16, blocksize_n=32, num_warps=4, num_stages=1)
    result = sl.tune(sl.Causal(), 40, heads=1, head_size=16, implementation="triton", candidates=[candidate])
    assert result.table[1].reason is None
    assert result.fwd_params == candidate


def test_a_run_time_mask(fake, times):
    times += [[4.0, 9.0, 3.0, 8.0]]
    mask = jnp.tril(jnp.ones((40, 40), bool))
    result = sl.tune(mask, 40, **SIZES, implementation=fake()[0], candidates=[SMALL])
    assert result.table[1].reason is None and result.about["mask"] == "a run-time mask"


@pytest.mark.parametrize("name", sl.implementations())
def test_default_candidates(name):
    candidates = tuning._default_candidates(name, 16384, 16384)
    for kind in (sl.FwdParams, sl.BwdParams):
        mine = [candidate for candidate in candidates if isinstance(candidate, kind)]
        assert len(set(mine)) == len(mine) <= 12
        assert bool(mine) == (name in ("xla", "pallas_tpu", "triton"))
    for lengths in ((1, 1), (100, 4000)):
        for candidate in tuning._default_candidates(name, *lengths):
            blocks = (candidate.q_blocksize, candidate.kv_blocksize)
            assert all((b or 0) <= max(64, 2 * t) for b, t in zip(blocks, lengths, strict=True))


def test_default_candidates_are_measured(fake, monkeypatch, times):
    name, _ = fake()
    monkeypatch.setattr(tuning, "_default_candidates", lambda *args: [SMALL] if args == (name, 64, 32) else [])
    times += [[4.0, 9.0, 3.0, 8.0]]
    assert len(sl.tune(sl.Full(), 64, 32, **SIZES, implementation=name).table) == 2


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def result(tmp_path):
    """A result and its file."""
    about = {
        **dict.fromkeys(tuned.SIZES, 8),
        "mask": "Causal()",
        "dtype": "bfloat16",
        "implementation": "fake",
        "tunable": "fake",
    }
    about |= {"device": "abacus", "versions": {"python": "3"}}
    table = [
        tuned.Measured(sl.FwdParams(), sl.BwdParams(), 4.0, 9.0),
        tuned.Measured(SMALL, sl.BwdParams(), reason="RuntimeError: ü"),
        tuned.Measured(LARGE, sl.BwdParams(), 3.0, 8.1),
        tuned.Measured(LARGE, sl.BwdParams(), 3.1, 8.2),
        tuned.Measured(LARGE, BACK, 3.1, 1 / 3),
    ]
    result, path = tuned.Tuned(LARGE, BACK, about, tuple(table)), tmp_path / "tuned.json"
    tuned.save_tuned(result, path)
    return result, path


def test_load_reads_a_written_result(result):
    written, path = result
    assert sl.load_tuned(path) == sl.load_tuned(str(path)) == written
    assert hash(sl.load_tuned(path)) == hash(written)
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"]
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["bwd_params"] == {"q_blocksize": 32, "kv_blocksize": 64}


def test_tune_writes_its_result(fake, times, tmp_path):
    times += [[4.0, 9.0]]
    path, cap = tmp_path / "tuned.json", np.float32(20)
    result = sl.tune("causal", 64, **SIZES, implementation=fake()[0], candidates=(), logits_soft_cap=cap, path=path)
    assert sl.load_tuned(path) == result
    about = result.about
    assert about["versions"]["jax"] == jax.__version__ and about["device"] == jax.devices()[0].device_kind
    assert (about["mask"], about["q_len"], about["dtype"]) == ("Causal()", 64, "bfloat16")
    assert (about["logits_soft_cap"], about["sinks"], about["gradients"]) == (20.0, False, True)


def test_printed_table(result):
    lines = str(result[0]).splitlines()
    assert lines[:2] == ["B=8 T=8 S=8 N=8 K=8 H=8 Hv=8 bfloat16; fake on abacus", "Causal(); python 3"]
    assert lines[2].split() == ["forward", "fwd", "+", "bwd"]
    assert [line[0] for line in lines[3:]] == [" ", " ", " ", " ", "*"]
    assert lines[-1].split()[1:6] == ["3.100", "ms", "0.333", "ms", "FwdParams(q_blocksize=64,"]


def test_tune_overwrites_nothing(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda *args: pytest.fail("work has begun"))
    name, _ = fake()
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        sl.tune(sl.Causal(), 64, **SIZES, implementation=name, path=path)
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        sl.tune(sl.Causal(), 64, **SIZES, implementation=name, path=tmp_path / "nowhere" / "tuned.json")
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("stage", ["measuring", "writing"])
def test_a_failed_run_leaves_no_file(fake, times, tmp_path, monkeypatch, stage):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    if stage == "measuring":
        monkeypatch.setattr(measuring, "_milliseconds", interrupt)
    else:
        times += [[1.0, 2.0]]
        monkeypatch.setattr(tuned.json, "dumps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sl.tune(sl.Causal(), 64, **SIZES, implementation=fake()[0], candidates=(), path=tmp_path / "tuned.json")
    assert not list(tmp_path.iterdir())


def test_a_file_that_appears_during_a_run_is_kept_as_is_the_result(fake, monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"

    def milliseconds(functions, repeats):
        path.write_text("theirs")
        return [4.0, 9.0]

    monkeypatch.setattr(measuring, "_milliseconds", milliseconds)
    with pytest.raises(FileExistsError, match=r"must be a new file, .*tuned\.json': the result is in ") as error:
        sl.tune(sl.Causal(), 64, **SIZES, implementation=fake()[0], candidates=(), path=path)
    assert path.read_text() == "theirs"
    (kept,) = (file for file in tmp_path.iterdir() if file != path)
    assert repr(str(kept)) in str(error.value) and sl.load_tuned(kept).table[0].both_ms == 9.0


FILE_OF_AN_EARLIER_VERSION = """{
 "format": "sparse_layers.tuned 1",
 "fwd_params": {"q_blocksize": 32, "kv_blocksize": 32},
 "bwd_params": {},
 "about": {
  "mask": "Causal()", "batch": 1, "q_len": 64, "kv_len": 64, "heads": 2, "kv_heads": 2, "head_size": 8,
  "value_size": 8, "dtype": "bfloat16", "segment_ids": false, "logits_soft_cap": null, "sinks": false,
  "gradients": true, "repeats": 5, "implementation": "xla", "tunable": "xla", "device": "cpu",
  "versions": {"python": "3.11.9", "sparse-layers": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}
 },
 "table": [
  {"fwd_params": {}, "bwd_params": {}, "forward_ms": 4.0, "both_ms": 9.0, "reason": null},
  {
   "fwd_params": {"q_blocksize": 32, "kv_blocksize": 32}, "bwd_params": {},
   "forward_ms": 3.0, "both_ms": 8.0, "reason": null
  }
 ]
}
"""


def test_files_of_earlier_versions(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(FILE_OF_AN_EARLIER_VERSION)
    assert sl.load_tuned(path).fwd_params == SMALL


def changed(**values):
    return lambda content: {**content, **values}


def without(name):
    return lambda content: {key: value for key, value in content.items() if key != name}


def row(**values):
    return lambda content: {**content, "table": [{**content["table"][0], **values}, *content["table"][1:]]}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: [], "'format' must be 'sparse_layers.tuned 1', got None"),
        (changed(format="sparse_layers.tuned 9"), "got 'sparse_layers.tuned 9'"),
        (changed(fwd_params={"q_blocksize": 12}), "q_blocksize must be a multiple of 8"),
        (changed(fwd_params={"blocks": 16}), "blocks"),
        (changed(fwd_params={"q_blocksize": 8}), "must be in the table"),
        (changed(fwd_params=3), "TypeError"),
        (changed(more=3), "more"),
        (changed(table=3), "TypeError"),
        (changed(table=[]), "must be in the table"),
        (changed(about={}), "'about' must name batch, device, dtype"),
        (changed(about=[]), "keys"),
        (without("table"), "table"),
        (without("bwd_params"), "bwd_params"),
        (row(forward_ms="3"), "times must be numbers >= 0 or null"),
        (row(forward_ms=-1.0), "times must be numbers >= 0 or null"),
        (row(forward_ms=None), "a row must have a time or a reason"),
        (row(reason="slow"), "a row must have a time or a reason"),
    ],
)
def test_load_refuses_other_content(result, change, message):
    path = result[1]
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))))
    with pytest.raises(ValueError) as error:
        sl.load_tuned(path)
    assert str(error.value).startswith(f"{path} must be a file that tune wrote") and message in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_load_refuses_other_files(tmp_path, content):
    path = pathlib.Path(tmp_path, "x")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="it is no JSON"):
        sl.load_tuned(path)


# --- wrong calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"heads": 0}, "heads must be an integer >= 1, got 0"),
        ({"batch": 1.5}, "batch must be an integer >= 1, got 1.5"),
        ({"q_len": True}, "q_len must be an integer >= 1, got True"),
        ({"kv_len": -1}, "kv_len must be an integer >= 1, got -1"),
        ({"head_size": None}, "head_size must be an integer >= 1, got None"),
        ({"value_size": "8"}, "value_size must be an integer >= 1, got '8'"),
        ({"kv_heads": 3}, "kv_heads must divide heads, got 3 and 2"),
        ({"repeats": 0}, "repeats must be an integer >= 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, got 'float64'"),
        ({"dtype": "nonsense"}, "got 'nonsense'"),
        (
            {"implementation": "cuda"},
            "implementation must be None or one of implementations(), got 'cuda', did you mean 'cudnn'?",
        ),
        ({"sinks": 1}, "sinks must be True or False, got 1"),
        ({"gradients": None}, "gradients must be True or False, got None"),
        ({"candidates": [{"num_warps": 4}]}, "candidates must be FwdParams or BwdParams for gradients=True"),
        ({"candidates": [BACK], "gradients": False}, "candidates must be FwdParams for gradients=False"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap must be > 0"),
        ({"segment_ids": np.zeros((1, 7), int)}, "segment_ids of queries must be integers of shape (1, 64)"),
        ({"mask": (sl.Causal(), sl.Full(), sl.Window(3))}, "the number of masks must divide the query heads"),
        ({"mask": np.ones((8, 8), bool)}, "mask: its last two axes must be (q_len, kv_len) = (64, 64), got (8, 8)"),
        ({"mask": jnp.ones((8, 8), bool)}, "mask must be a bool array"),
    ],
)
def test_wrong_calls(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(tuning, "measure", lambda *args: pytest.fail("work has begun"))
    arguments = {"mask": sl.Causal(), "q_len": 64, **SIZES, "path": tmp_path / "tuned.json", **arguments}
    with pytest.raises(ValueError) as error:
        sl.tune(arguments.pop("mask"), arguments.pop("q_len"), **arguments)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_subjects_and_implementations_that_cannot_be_tuned():
    for nothing in (3, sl.make_plan(sl.Causal(), 64)):
        with pytest.raises(TypeError):
            sl.tune(nothing, 64, **SIZES)
    with pytest.raises(NotImplementedError, match="score matrix"):
        sl.tune(sl.Causal(), 1 << 17, **SIZES, implementation="reference")
