"""Text becomes windows of tokens, by the model's tokenizer or as bytes."""

import json
import shutil
import sys

import numpy as np
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
import tokenizers.trainers
from flax import nnx

import sparse_layers as sl
from examples.training.config import Refusal
from examples.your_model.text import Windows, load


def folder(path, vocab_size):
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
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


def train_tokenizer(path):
    """Trains a byte-level BPE on a few sentences, and saves it as it was used last: cut, padded, with end tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["1 größer", "2 größer als 1", "sind 10 und 100 größer?"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(direction="left", pad_id=2, pad_token="<pad>", length=4096)
    tokenizer.save(str(path / "tokenizer.json"))
    return plain


def test_the_models_tokenizer(tmp_path, monkeypatch):
    plain = train_tokenizer(folder(tmp_path, 300))
    learnt, heldout = load(tmp_path, text(tmp_path), 8)
    whole = (tmp_path / "text.txt").read_bytes()
    begin, end = whole[: len(whole) * 90 // 100], whole[len(whole) * 90 // 100 :]
    assert plain.decode(learnt.ids) == begin.decode(errors="replace"), "a text is read to its end"
    assert len(heldout.ids) > 16 and plain.decode(heldout.ids) in end.decode(errors="replace")
    for windows in (learnt, heldout):
        expected = plain.encode(plain.decode(windows.ids), add_special_tokens=False).ids
        assert windows.ids.tolist() == expected and min(expected) > 2, "neither end tokens nor padding"
        assert windows.prefix == (0,), "the token that begins a text"
    assert len(learnt.ids) < 0.7 * len(begin), "merged bytes"
    assert heldout.spread(2)[:, 0].tolist() == [0, 0] and heldout.spread(2)[:, 1:].min() > 2
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it was not installed
    with pytest.raises(Refusal, match=r"tokenizer\.json: to read it, pip install tokenizers"):
        load(tmp_path, text(tmp_path), 8)


def test_a_saved_model_with_its_tokenizer(tmp_path):
    """The folder that the page's last step makes: a model with windows, and the tokenizer's file beside it."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    source.mkdir()
    plain = train_tokenizer(source)
    llama = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "use_bias": False, "seq_len": 32}
    window = sl.preset("sliding_window", window=4)
    model = sl.SparseTransformer(plain.get_vocab_size(), 2, 8, 1, patterns=window, **llama, rngs=nnx.Rngs(0))
    sl.to_huggingface(model, saved, config={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    shutil.copy(source / "tokenizer.json", saved)
    _, heldout = load(saved, text(tmp_path), 8)
    config = json.loads((saved / "config.json").read_text())
    reloaded = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    names = [reloaded.id_to_token(config[f"{name}_token_id"]) for name in ("bos", "eos", "pad")]
    assert names == ["<s>", "</s>", "<pad>"] and config["vocab_size"] == reloaded.get_vocab_size()
    tokens = heldout.spread(2)
    np.testing.assert_array_equal(sl.from_huggingface(saved)(tokens), model(tokens))
