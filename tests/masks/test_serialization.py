"""Masks and scorers as JSON and back: equal values, of classes that are defined, and no code but their constructors."""

import dataclasses
import json

import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.masks.serialization import read_static, write_static
from tests.ops.cases import TINY


@dataclasses.dataclass(frozen=True)
class Lag(sl.Mask):
    """A mask of a user's."""

    distance: int

    def __call__(self, q, k):
        return q - k == self.distance


class Nameless(sl.Mask):
    """One that is equal to itself only."""

    def __call__(self, q, k):
        return q >= k


CASES = {name: sl.preset(name, **TINY[name]) for name in sl.presets()} | {
    "an array": sl.Array(np.random.default_rng(0).random((9, 14)) < 0.5) & ~sl.Window(3).T,
    "a graph": sl.from_csr(np.array([0, 2, 2, 5]), np.array([7, 1, 0, 3, 3])[[1, 0, 2, 3, 4]], 9) | sl.Global(1),
    "an empty array": sl.Array(np.zeros((0, 4), bool)),
    "a user's": sl.Shifted(Lag(3) | sl.Causal(), by=2),
    "no limit": sl.Window(None, None),
    "a rectangle": sl.Rectangle(sl.Blocks(sl.Causal(), (4, 6)), kv_start=9, q_len=20),
    "a grid": sl.Grid((2, 3, 4), (sl.Causal(), sl.Neighborhood(3, 3), sl.Window(1, 1)), offset=1) | sl.Global(1),
    "columns": sl.ColumnMajor(3, 4, sl.Causal()) | sl.Radial(2, 6) | sl.LogSparse() | sl.Compressed(4, 2),
    "sizes": (sl.MoBA(block=np.int64(16), count=2), sl.NSA(count=8), 4096, None, "triton", 0.5, True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_equals_what_was_written(name):
    data = write_static("KVCache", CASES[name])
    assert read_static(data) == CASES[name]
    assert hash(read_static(data)) == hash(CASES[name])
    json.loads(data)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (sl.MaskMod(lambda b, h, q, k: q >= k), r"KVCache: MaskMod\.function: .*function.* cannot hold|lambda"),
        (Nameless(), "not equal to what its fields make"),
        ((sl.Causal(), object()), "builtins.object, is no dataclass"),
        ((3, [4]), "builtins.list, is no dataclass"),
    ],
)
def test_what_cannot_be_read_back_is_refused(value, message):
    with pytest.raises(TypeError, match=message) as error:
        write_static("KVCache", value)
    assert "jax.tree.unflatten" in str(error.value) and "sl.Array(mask.dense(T))" in str(error.value)


def test_classes_that_are_not_defined_are_named():
    data = write_static("KVCache", Lag(3)).replace(b"Lag", b"Lead")
    with pytest.raises(ValueError, match=rf"{__name__}\.Lead, which is not defined here: import the module"):
        read_static(data)
