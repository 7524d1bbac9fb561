"""Text becomes windows of tokens, by the model's tokenizer or as bytes."""

import json
import pathlib
import sys
import types

import numpy as np
import pytest

from examples.training.config import Refusal
from examples.your_model.text import Windows, load


def folder(path, vocab_size, tokenizer=False):
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    return path


def text(path):
    file = path / "text.txt"
    file.write_text("".join(f"{i} größer\n" for i in range(200)), encoding="utf-8")
    return str(file)


def test_windows():
    windows = Windows(np.arange(100), 10, (7,))
    for found in (windows.spread(3), windows.batch(0, 5)):
        assert found[:, 0].tolist() == [7] * len(found), "the prefix takes the place of the first token"
        np.testing.assert_array_equal(np.diff(found[:, 1:]), 1)
    assert windows.spread(3)[[0, -1], -1].tolist() == [10, 99]
    np.testing.assert_array_equal(windows.batch(3, 5), windows.batch(3, 5))
    assert (windows.batch(3, 5) != windows.batch(4, 5)).any()
    assert {Windows(np.arange(11), 10).batch(step, 1)[0, 0].item() for step in range(9)} == {0}
    with pytest.raises(Refusal, match="10 tokens are too few, --length 10 needs 11"):
        Windows(np.arange(10), 10)


def test_bytes_without_a_tokenizer(tmp_path):
    learnt, heldout = load(folder(tmp_path, 256), text(tmp_path), 8)
    whole = (tmp_path / "text.txt").read_bytes()
    assert learnt.ids.astype(np.uint8).tobytes() == whole[: len(whole) * 90 // 100]
    assert heldout.ids.astype(np.uint8).tobytes() in whole[len(whole) * 90 // 100 :]
    with pytest.raises(Refusal, match=r"no tokenizer\.json, and a vocabulary of 151936 tokens is not bytes"):
        load(folder(tmp_path, 151936), text(tmp_path), 8)


class Tokenizer:
    """Words as tokens, in the manner of the package tokenizers; the file cuts, pads on the left and adds two tokens."""

    def __init__(self):
        self.truncation, self.padding = 16, 4096

    @classmethod
    def from_file(cls, path):
        assert pathlib.Path(path).name == "tokenizer.json"
        return cls()

    def no_truncation(self):
        self.truncation = None

    def no_padding(self):
        self.padding = 0

    def encode(self, text):
        ids = [int(word) if word.isdigit() else 999 for word in text.split()]
        ids = ids[: self.truncation and self.truncation - 2]
        pad = max(0, self.padding - len(ids) - 2)
        mask = [1] * pad + [1, *[0] * len(ids), 1]
        return types.SimpleNamespace(ids=[1002] * pad + [1000, *ids, 1001], special_tokens_mask=mask)


def test_the_models_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Tokenizer))
    learnt, heldout = load(folder(tmp_path, 2000, tokenizer=True), text(tmp_path), 8)
    number, word = learnt.ids[::2], learnt.ids[1::2]
    assert len(learnt.ids) > 300 and len(heldout.ids) > 16, "a text is read to its end"
    np.testing.assert_array_equal(number, np.arange(len(number)))
    np.testing.assert_array_equal(word, 999)
    assert {*heldout.ids.tolist()} <= {999, *range(200)}, "neither end tokens nor padding"
    assert heldout.spread(2)[:, 0].tolist() == [1000, 1000] and 1001 not in heldout.spread(2)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it was not installed
    with pytest.raises(Refusal, match=r"tokenizer\.json: to read it, pip install tokenizers"):
        load(tmp_path, text(tmp_path), 8)
