import hashlib
import json
import pathlib
import signal

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from examples.train_lm import train

# A run of seconds: six steps of a model with a few thousand weights.
TINY = {
    "layers": 1,
    "features": 16,
    "heads": 2,
    "seq_len": 32,
    "batch_size": 2,
    "steps": 6,
    "warmup": 2,
    "eval_every": 3,
    "eval_batches": 2,
    "save_every": 2,
    "sample_tokens": 8,
    "pattern": "strided:local_attn_ctx=8",
}


def flags(**options):
    """The settings as command line arguments."""
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="package", autouse=True)
def compiled_once(tmp_path_factory):
    """The tests run the same few programs.

    Processes that the tests start have no part in the cache: JAX writes into it in place, and complains of an entry
    that a kill or a full disk has cut.
    """
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX asks only once whether there is one.
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, and does so in processes started meanwhile.

    What shells start in the background ignores it, and hands that on.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of 60 small files that all differ."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"part{i % 3}").mkdir(exist_ok=True)
        (folder / f"part{i % 3}" / f"file{i}.txt").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 4)
    return folder


@pytest.fixture(scope="package")
def finished(compiled_once, corpus, tmp_path_factory):
    """The folder of a run of six steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train.main(flags(**TINY, data=corpus, out=out)) == 0
    return out


def snapshot(folder: pathlib.Path):
    """Every file below a folder with a hash of its content."""
    return {
        path.relative_to(folder): path.is_file() and hashlib.sha256(path.read_bytes()).digest()
        for path in folder.rglob("*")
    }


def rows(out: pathlib.Path):
    """The rows of a run; a process that is writing may not have ended its last line."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(out: pathlib.Path):
    return [(row["step"], row["loss"], row.get("heldout_bpb")) for row in rows(out)]
