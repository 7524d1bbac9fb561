import hashlib
import pathlib

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


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A folder of compiled programs: most tests, and the processes that they start, run the same few."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(compiled):
    """Programs are compiled once for all tests, and without XLA's slower passes, which would gain nothing here."""
    settings = {
        "jax_compilation_cache_dir": str(compiled),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()  # Whether there is one is asked once.
        yield
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of 60 small files that all differ."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"part{i % 3}").mkdir(exist_ok=True)
        (folder / f"part{i % 3}" / f"file{i}.txt").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 4)
    return folder


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
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
