import errno
import itertools
import math
import os
import pathlib
import resource
import signal
import sysconfig
import threading
import time

import numpy as np
import pytest

from examples.train_lm import data
from examples.training.config import Refusal
from examples.training.data import Prefetch, gzip_bits, order0_bits, permuted, split_files


def everything(text):
    return text.read(0, text.size)


@pytest.fixture
def saved(tmp_path):
    """Makes a text of the pieces of bytes, each in a file of its own."""
    numbers = itertools.count()

    def save(*pieces, **options):
        parts = []
        for piece in pieces:
            path = tmp_path / f"piece{next(numbers)}"
            # Something that does not belong to the text on both sides.
            path.write_bytes(b"??" + bytes(piece) + b"?")
            parts.append(data.FileSlice(str(path), 2, len(piece)))
        return data.Text(parts, **options)

    return save


@pytest.fixture
def noise(saved):
    """A corpus whose windows tell where they are from."""
    content = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    pieces = np.split(content, [100, 130, 131, 2000])
    return data.Corpus(saved(*pieces), saved(content[::-1]), "")


def positions(corpus, batch):
    """Where the windows of a batch begin in the training bytes."""
    whole = everything(corpus.train).tobytes()
    return [whole.index(row.astype(np.uint8).tobytes()) for row in batch.tokens]


def test_files_are_on_one_side_only_and_stay_there():
    names = [f"folder/file{i}.py" for i in range(1000)]
    train, heldout = split_files(names)
    assert set(train) | set(heldout) == set(names) and not set(train) & set(heldout)
    assert 20 <= len(heldout) <= 90  # a twentieth; four standard deviations are 28
    assert split_files(names[::-1]) == (train, heldout)
    fewer = split_files(names[:300])
    assert set(fewer[0]) <= set(train) and set(fewer[1]) <= set(heldout)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_few_files_still_give_both_sides(count):
    train, heldout = split_files([f"{i}" for i in range(count)])
    assert train and heldout


def test_folder_is_read_by_file(corpus):
    loaded = data.load(str(corpus), 32)
    names = [path.relative_to(corpus).as_posix() for path in corpus.rglob("*.txt")]
    for text, part in zip((loaded.train, loaded.heldout), split_files(names), strict=True):
        files = [(corpus / name).read_bytes() for name in part]
        assert everything(text).tobytes() == b"".join(files)
        assert text.document_starts.tolist() == [len(b"".join(files[:i])) for i in range(len(files))]
    assert loaded.test is None


def test_file_is_split_90_5_5(tmp_path):
    whole = np.random.default_rng(0).integers(0, 256, 2000, np.uint8)
    (tmp_path / "whole").write_bytes(whole.tobytes())
    loaded = data.load(str(tmp_path / "whole"), 32)
    assert loaded.test is not None
    np.testing.assert_array_equal(everything(loaded.train), whole[:1800])
    np.testing.assert_array_equal(everything(loaded.heldout), whole[1800:1900])
    np.testing.assert_array_equal(everything(loaded.test), whole[1900:])


def test_standard_library_without_its_tests():
    loaded = data.load("", 256)
    assert loaded.train.size > 5_000_000 and loaded.heldout.size > 100_000
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    names = [pathlib.Path(part.path).relative_to(stdlib).as_posix() for part in loaded.train.slices]
    assert "dataclasses.py" in names and all(name.endswith(".py") for name in names)
    assert not [name for name in names if "/tests/" in name or "site-packages" in name]


def test_glob_chooses_files_by_name(tmp_path):
    (tmp_path / "below.md").mkdir()
    for i in range(40):
        (tmp_path / "below.md" / f"{i}.txt").write_text("no" * 20)
        (tmp_path / "below.md" / f"{i}.md").write_text("yes" * 20)
    loaded = data.load(str(tmp_path), 32, glob="*.md")
    assert loaded.train.size + loaded.heldout.size == 40 * 60
    assert set(everything(loaded.train)) == set(b"yes")


def test_read_crosses_files(saved):
    content = np.arange(60, dtype=np.uint8)
    text = saved(content[:7], b"", content[7:8], content[8:50], content[50:], b"")
    assert text.size == 60 and text.document_starts.tolist() == [0, 7, 8, 50]
    for start in range(61):
        for count in range(61 - start):
            np.testing.assert_array_equal(text.read(start, count), content[start : start + count])
    for start, count in ((-1, 5), (56, 5), (0, 61), (5, -1)):
        with pytest.raises(IndexError):
            text.read(start, count)


def test_folder_of_more_files_than_may_be_open(tmp_path):
    for i in range(3000):
        (tmp_path / str(i)).write_bytes(b"%04d" % i)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 100, limits[1]))
    try:
        loaded = data.load(str(tmp_path), 32)
        content = [everything(text).tobytes() for text in (loaded.train, loaded.heldout)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sorted(np.frombuffer(b"".join(content), "S4").astype(int)) == list(range(3000))


@pytest.mark.parametrize("change", ["shrunk", "gone", "overwritten"])
def test_a_file_that_changed_since_is_refused(saved, change):
    text = saved(b"abcdef")
    path = pathlib.Path(text.slices[0].path)
    text.read(0, 2)  # it stays mapped: where it has shrunk, the system would end a process that reads it
    if change == "overwritten":
        path.write_bytes(path.read_bytes().upper())
        os.utime(path, ns=(0, 0))  # another time, however coarse the clock of the file system
    else:
        path.unlink() if change == "gone" else path.write_bytes(b"??abc")
    with pytest.raises(Refusal, match=f"--data {path} changed while it was being learnt"):
        text.read(0, 2)


def test_an_unreadable_folder_is_not_left_out(corpus, monkeypatch):
    def walk(root, onerror):
        onerror(PermissionError(errno.EACCES, "Permission denied", f"{root}/locked"))
        return []

    monkeypatch.setattr(os, "walk", walk)  # root may read everything
    with pytest.raises(Refusal, match="/locked: Permission denied"):
        data.load(str(corpus), 32)


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 4097])
def test_permutation_is_one_to_one(size):
    orders = [permuted(np.arange(size), size, [i, 2**64 - 1, 3, 4]) for i in range(2)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    assert size < 1000 or np.mean(orders[0] == orders[1]) < 0.02


def test_permutation_leaves_no_order():
    few = permuted(np.arange(10_000), 10**12, [1, 2, 3, 4, 5, 6])
    # Neighbours are a third of the range apart on average, as independent draws are; the deviation is 0.0025.
    assert np.abs(np.diff(few)).mean() / 10**12 == pytest.approx(1 / 3, abs=0.01)
    assert few.mean() / 10**12 == pytest.approx(1 / 2, abs=0.015)


@pytest.mark.parametrize("seq_len", [7, 33, 100, 2499, 2500, 4999])
def test_epoch_predicts_each_byte_at_most_once(noise, seq_len):
    count = max(1, noise.train.size // seq_len - 1)
    epochs = [sorted(positions(noise, noise.batch(3, epoch, count, seq_len))) for epoch in range(8)]
    for starts in epochs:
        assert set(np.diff(starts)) <= {seq_len}
        # What no window predicts.
        assert noise.train.size - 1 - count * seq_len < 2 * seq_len
    assert len({starts[0] for starts in epochs}) > (1 if seq_len < 4999 else 0)
    assert all(0 <= starts[0] < seq_len for starts in epochs)


def test_steps_go_through_epochs_in_changing_orders(noise):
    seq_len, batch_size = 100, 6
    assert noise.train.size // seq_len - 1 == 49  # no multiple of the batch: a step has windows of two epochs
    steps = [noise.batch(1, step, batch_size, seq_len) for step in range(25)]
    starts = [start for batch in steps for start in positions(noise, batch)]
    epochs = [starts[i : i + 49] for i in (0, 49, 98)]
    assert all(len(set(epoch)) == 49 and len({start % 100 for start in epoch}) == 1 for epoch in epochs)
    orders = [np.argsort(epoch).tolist() for epoch in epochs]
    assert orders[0] != orders[1] != orders[2] and list(range(49)) not in orders
    # Whatever was asked before, and in other batches: a run goes on in the middle of an epoch.
    np.testing.assert_array_equal(noise.batch(1, 9, batch_size, seq_len).tokens, steps[9].tokens)
    np.testing.assert_array_equal(noise.batch(1, 4, 2 * batch_size, seq_len).tokens[6:], steps[9].tokens)
    assert positions(noise, noise.batch(2, 9, batch_size, seq_len)) != positions(noise, steps[9])


def test_shortest_training_part_is_one_window(saved):
    loaded = data.Corpus(saved(range(40)), saved(range(100)), "")
    batch = loaded.batch(0, 0, 4, 39)
    np.testing.assert_array_equal(batch.tokens, np.tile(np.arange(40), (4, 1)))
    assert batch.tokens.dtype == np.int32 and batch.segments is None


def test_heldout_windows_reach_both_ends(saved):
    loaded = data.Corpus(saved(range(40)), saved(range(50), range(50, 100)), "")
    windows, segments, *_ = loaded.heldout_windows(5, 32, packed=True)
    assert windows[0, 0] == 0 and windows[-1, -1] == 99
    np.testing.assert_array_equal(windows, windows[:, :1] + np.arange(33))
    np.testing.assert_array_equal(segments, (windows >= 50) & (windows[:, :1] < 50))


def test_segments_count_documents_begun(saved):
    random = np.random.default_rng(0)
    begun = np.flatnonzero(random.random(400) < 0.2)
    text = saved(bytes(150), bytes(250), document_starts=np.union1d([0], begun))
    starts = np.arange(400 - 32)
    batch = data.text_windows(text, starts, 32, packed=True)
    assert batch.segments is not None and batch.segments.dtype == np.int32
    documents = text.document_starts.tolist()
    expected = [[sum(start < d <= start + t for d in documents) for t in range(33)] for start in starts.tolist()]
    np.testing.assert_array_equal(batch.segments, expected)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("separator", ["x", "xy", "xyxy", "xxx", "é", "xyxyxyxyxyxyxyxyxy"])
def test_separators_begin_documents(tmp_path, monkeypatch, chunk, separator):
    monkeypatch.setattr(data, "_CHUNK", chunk)
    content = "".join(np.random.default_rng(0).choice(["x", "y", "xy", "xxx", "é", "xyxyxyxyxyxyxyxyxy"], 400))
    files = {f"{i}": content[i:200:3].encode() + content[i:].encode() for i in range(2)}
    for name, written in files.items():
        (tmp_path / name).write_bytes(written)
    loaded = data.load(str(tmp_path), 32, separator=separator)
    for text, [name] in zip((loaded.train, loaded.heldout), split_files(list(files)), strict=True):
        lengths = [len(piece) for piece in files[name].split(separator.encode())]
        starts = np.cumsum(lengths[:-1]) + len(separator.encode()) * np.arange(len(lengths) - 1)
        np.testing.assert_array_equal(text.document_starts, np.union1d([0], starts))


def test_digest_is_of_content_and_borders(tmp_path):
    def digest(a="alpha" * 20, b="beta" * 20, c="gamma" * 20, **options):
        for name, content in (("a.py", a), ("b.py", b), ("c.py", c)):  # b.py is held out
            (tmp_path / name).write_text(content)
        return data.load(str(tmp_path), 32, **options).digest

    changed = [
        digest(),
        digest(b="BETA" * 20),
        digest(c="gamma" * 19 + "gammb"),
        digest(a="alpha" * 20 + "g", c=("gamma" * 20)[1:]),
        digest(separator="eta"),
        digest(separator="mm"),
    ]
    assert len(set(changed)) == len(changed) and digest() == changed[0] == digest(separator="absent")


def test_prefetch_keeps_order_and_runs_ahead():
    made = []
    with Prefetch(lambda step: made.append(step) or step, itertools.count(5), depth=3) as items:
        assert next(items) == 5
        deadline = time.monotonic() + 5
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert made == [5, 6, 7, 8]  # one taken, three that wait
        assert list(itertools.islice(items, 20)) == list(range(6, 26))


def test_prefetch_counts_only_waiting():
    with Prefetch(lambda step: time.sleep(0.1), range(2)) as slow:
        assert list(slow) == [None] * 2 and slow.waited >= 0.1
    with Prefetch(int, range(2)) as quick:
        time.sleep(0.3)
        assert list(quick) == [0, 1] and quick.waited < 0.15


@pytest.mark.parametrize("error", [ValueError("step 2"), KeyboardInterrupt("step 2"), StopIteration("step 2")])
def test_prefetch_raises_where_the_item_would_have_been(error):
    def make(step):
        if step == 2:
            raise error
        return step

    items = Prefetch(make, range(5))
    assert next(items) == 0 and next(items) == 1
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
        next(items)
    assert caught.value is error or caught.value.__cause__ is error
    assert list(items) == [] and not prefetching()


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetch_ends_its_thread_when_left_early():
    with pytest.raises(InterruptedError), Prefetch(int, itertools.count()) as items:
        assert next(items) == 0 and prefetching()
        raise InterruptedError
    assert not prefetching() and list(items) == []
    with Prefetch(int, itertools.count(), depth=1):
        pass
    assert not prefetching()


def test_prefetch_that_is_dropped_ends_its_thread():
    for item in Prefetch(int, itertools.count()):
        if item == 3:
            break
    deadline = time.monotonic() + 5
    while prefetching() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not prefetching()


@pytest.mark.usefixtures("interruptible")
def test_prefetch_can_be_interrupted_while_it_is_waited_for():
    waiting = threading.Event()

    def make(step):
        waiting.wait()
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt), Prefetch(make, [0]) as items:
        waiting.set()
        next(items)
        pytest.fail("the item came before Ctrl-C")
    assert not prefetching()


@pytest.mark.parametrize(
    "counts, bits",
    [([8], 0.0), ([4, 4], 1.0), ([1] * 256, 8.0), ([3, 1], 2 - 0.75 * math.log2(3)), ([2, 1, 1], 1.5)],
)
def test_order0_entropy(counts, bits):
    values = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    assert order0_bits(values) == pytest.approx(bits, abs=1e-12)


def test_gzip_bits():
    noise = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    assert 8 <= gzip_bits(noise) < 8.1
    assert gzip_bits(np.zeros(10_000, np.uint8)) < 0.1


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
    with pytest.raises(Refusal, match=f"--data {tmp_path / 'missing'}: No such file"):
        data.load(str(tmp_path / "missing"), 32)


def test_glob_that_chooses_nothing_is_refused(tmp_path):
    (tmp_path / "file.txt").write_bytes(b"x" * 1000)
    with pytest.raises(Refusal, match=r"--glob \*.md: no file in .* has such a name"):
        data.load(str(tmp_path), 32, glob="*.md")
    with pytest.raises(Refusal, match=r"--glob \*.txt chooses files of a folder, --data .* is a file"):
        data.load(str(tmp_path / "file.txt"), 32, glob="*.txt")


def test_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x" * 1000)
    split = data._split

    def shrink(*args, **options):
        parts = split(*args, **options)
        (tmp_path / "file").write_bytes(b"x" * 990)
        return parts

    monkeypatch.setattr(data, "_split", shrink)
    with pytest.raises(Refusal, match="file: shrank while it was read"):
        data.load(str(tmp_path / "file"), 32)
