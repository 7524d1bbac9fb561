import math
import pathlib
import sysconfig

import numpy as np
import pytest

from examples.train_lm import data
from examples.train_lm.config import Refusal


def test_files_are_on_one_side_only_and_stay_there():
    names = [f"folder/file{i}.py" for i in range(1000)]
    train, heldout = data.split_files(names)
    assert set(train) | set(heldout) == set(names) and not set(train) & set(heldout)
    assert 20 <= len(heldout) <= 90  # a twentieth; four standard deviations are 28
    assert data.split_files(names[::-1]) == (train, heldout)
    fewer = data.split_files(names[:300])
    assert set(fewer[0]) <= set(train) and set(fewer[1]) <= set(heldout)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_few_files_still_give_both_sides(count):
    train, heldout = data.split_files([f"{i}" for i in range(count)])
    assert train and heldout


def test_folder_is_read_by_file(corpus):
    loaded = data.load(str(corpus), 32)
    names = [path.relative_to(corpus).as_posix() for path in corpus.rglob("*.txt")]
    train, heldout = ("".join((corpus / name).read_text() for name in part) for part in data.split_files(names))
    assert loaded.train.tobytes() == train.encode() and loaded.heldout.tobytes() == heldout.encode()
    assert data.load(str(corpus), 32).digest == loaded.digest


def test_file_is_split_90_5_5(tmp_path):
    whole = np.random.default_rng(0).integers(0, 256, 2000, np.uint8)
    (tmp_path / "whole").write_bytes(whole.tobytes())
    loaded = data.load(str(tmp_path / "whole"), 32)
    np.testing.assert_array_equal(loaded.train, whole[:1800])
    np.testing.assert_array_equal(loaded.heldout, whole[1800:1900])


def test_standard_library_without_its_tests():
    loaded = data.load("", 256)
    assert loaded.train.size > 5_000_000 and loaded.heldout.size > 100_000
    names = data._names(pathlib.Path(sysconfig.get_path("stdlib")), "")
    assert "dataclasses.py" in names and not [name for name in names if "/tests/" in name or "site-packages" in name]


def test_batches_depend_on_seed_and_step_alone(corpus):
    loaded = data.load(str(corpus), 32)
    batch = loaded.batch(1, 5, 3, 32)
    assert batch.shape == (3, 33) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch, loaded.batch(1, 5, 3, 32))
    assert not np.array_equal(batch, loaded.batch(1, 6, 3, 32))
    assert not np.array_equal(batch, loaded.batch(2, 5, 3, 32))
    assert all(bytes(row.astype(np.uint8)) in loaded.train.tobytes() for row in batch)


def test_windows_reach_both_ends():
    loaded = data.Corpus(np.arange(40, dtype=np.uint8), np.arange(100, dtype=np.uint8))
    windows = loaded.heldout_windows(5, 32)
    assert windows[0, 0] == 0 and windows[-1, -1] == 99
    np.testing.assert_array_equal(windows, windows[:, :1] + np.arange(33))
    # The shortest training part that is accepted has exactly one window.
    np.testing.assert_array_equal(loaded.batch(0, 0, 4, 39), np.tile(np.arange(40), (4, 1)))


@pytest.mark.parametrize(
    "counts, bits",
    [([8], 0.0), ([4, 4], 1.0), ([1] * 256, 8.0), ([3, 1], 2 - 0.75 * math.log2(3)), ([2, 1, 1], 1.5)],
)
def test_order0_entropy(counts, bits):
    values = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    assert data.order0_bits(values) == pytest.approx(bits, abs=1e-12)


def test_gzip_bits():
    noise = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    assert 8 <= data.gzip_bits(noise) < 8.1
    assert data.gzip_bits(np.zeros(10_000, np.uint8)) < 0.1


@pytest.mark.parametrize("content", [b"", b"x" * 36])
def test_empty_and_short_files_are_refused(tmp_path, content):
    (tmp_path / "short").write_bytes(content)
    with pytest.raises(Refusal, match="training bytes are too few, --seq-len 32 needs 33"):
        data.load(str(tmp_path / "short"), 32)


def test_short_heldout_part_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 600)
    with pytest.raises(Refusal, match="30 held-out bytes are too few"):
        data.load(str(tmp_path / "short"), 32)


def test_empty_folder_and_missing_path_are_refused(tmp_path):
    with pytest.raises(Refusal, match="0 training bytes"):
        data.load(str(tmp_path), 32)
    with pytest.raises(Refusal, match="No such file"):
        data.load(str(tmp_path / "missing"), 32)
