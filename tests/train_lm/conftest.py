import hashlib
import pathlib

import pytest

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
