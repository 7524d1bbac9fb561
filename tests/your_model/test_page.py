"""The page examples/your_model/README.md: its Python, its commands, and what it says of patterns and caches."""

import json
import pathlib
import re
import shlex
import tomllib

import jax
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from examples.your_model import __main__ as script
from examples.your_model import make
from examples.your_model.training import losses

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "your_model" / "README.md").read_text(encoding="utf-8")
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"head_dim": 8, "max_position_embeddings": 32}
LESS = {"512": "32", "window=64": "window=4", '"sliding_window": 64': '"sliding_window": 4', "STEPS, trained = 100": "STEPS, trained = 4"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def commands():
    return [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text in the place of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    for name in "abcdefgh":
        (folder / f"{name}.py").write_text(f"def {name}():\n    return {name!r}\n" * 40)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory, corpus):
    """A folder in which the page's first command has made a smaller model of a shorter text."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(make, "CONFIG", make.CONFIG | SMALL)
        patch.setattr(make, "load", lambda where, _, length: load(where, str(corpus), length))
        (command,) = [command for command in commands() if command[2:3] == ["examples.your_model.make"]]
        assert make.main([*command[3:], "--steps", "4"]) == 0
    return folder


@pytest.fixture(scope="module")
def names(small, corpus):
    """What the page's Python leaves behind, run as one script in that folder."""
    found = {}
    text = "\n".join(blocks("python"))
    for before, after in LESS.items():
        assert before in text
        text = text.replace(before, after)
    text = text.replace('load(FOLDER, "", T)', f"load(FOLDER, {str(corpus)!r}, T)")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(small)
        exec(compile(text, "README.md", "exec"), found)
    return found
