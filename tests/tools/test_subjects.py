"""Models of users' own: where `describe` and `draw` look for layers of this package in them."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen

CAUSAL, LOCAL = sl.Causal(), sl.Window(3)
NSA = "nsa:block=16,count=4,pool_size=8,pool_stride=4"


def headings(model):
    """{heading: first line below it} of a description."""
    lines = sl.describe(model, size=2).split("\n")
    return {line[:-1]: lines[i + 1] for i, line in enumerate(lines) if line.endswith(":") and i + 1 < len(lines)}


def layer(pattern, kind=linen.SparseSelfAttention):
    return kind(2, pattern=pattern, seq_len=64)


def nnx_layer(pattern):
    return sl.SparseSelfAttention(2, 8, pattern=pattern, seq_len=64, rngs=nnx.Rngs(0))


class Mixer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Dict(attn=nnx_layer(p), mlp=nnx.Linear(8, 8, rngs=rngs)) for p in (CAUSAL, LOCAL)])
        self.again = self.layers[1]["attn"]
        fn = sl.make_attention_fn(LOCAL, 32, segment_ids=jnp.zeros((1, 32), int))
        self.heads = nnx.MultiHeadAttention(2, 8, attention_fn=fn, rngs=rngs, decode=False)
        self.block = sl.SparseTransformerBlock(2, 8, pattern=CAUSAL, seq_len=64, rngs=rngs)


class SetUp(nn.Module):
    inner: nn.Module

    def setup(self):
        self.scale = self.param("scale", nn.initializers.ones, (3,))
        self.blocks = [linen.SparseTransformerBlock(2, 8, pattern=p, seq_len=64) for p in (LOCAL, NSA)]


@dataclasses.dataclass(slots=True)
class Slots:
    attention: object
    cross: object = None


@dataclasses.dataclass
class Cyclic:
    layers: object
    me: object = None

    def __post_init__(self):
        self.me = self


def small_transformer():
    return sl.SparseTransformer(8, 2, 8, 2, patterns=(CAUSAL, LOCAL), seq_len=16, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "make, expected",
    [
        (
            Mixer,
            {"layers[0]['attn'], block": CAUSAL, "layers[1]['attn']": LOCAL, "heads.attention_fn": LOCAL},
        ),
        (
            lambda: {"model": [small_transformer()]},
            {"['model'][0], layers 0 of 2": CAUSAL, "['model'][0], layers 1 of 2": LOCAL},
        ),
        (lambda: Cyclic(Slots(layer(CAUSAL), layer(LOCAL))), {"layers.attention": CAUSAL, "layers.cross": LOCAL}),
        (lambda: Slots(layer(CAUSAL), layer(LOCAL)), {"attention": CAUSAL, "cross": LOCAL}),
        (lambda: [functools.partial(print, fn=sl.make_plan(LOCAL, 9))], {"[0].keywords['fn']": LOCAL}),
        (
            lambda: Cyclic([layer(CAUSAL) for _ in range(10)]),
            {", ".join(f"layers[{i}]" for i in range(8)) + " and 2 more": CAUSAL},
        ),
    ],
    ids=["nnx", "transformer", "cyclic", "slots", "plan", "many"],
)
def test_layers_are_found_in_models_of_users(make, expected):
    assert headings(make()) == {path: repr(mask) for path, mask in expected.items()}


def test_linen_modules_are_set_up_to_find_their_layers():
    for model in (SetUp(layer(CAUSAL)), SetUp(layer(CAUSAL)).bind({}, mutable=True)):
        paths = headings(model)
        branches = [f"blocks[1], {branch}" for branch in ("compressed", "selected", "sliding")]
        assert list(paths) == ["inner", "blocks[0]", *branches] and paths["blocks[0]"] == repr(LOCAL)
    nsa = linen.SparseTransformerBlock(2, 8, pattern=NSA, seq_len=64)
    assert list(headings(nsa)) == ["compressed", "selected", "sliding"]


def test_no_property_or_method_of_a_user_is_called():
    class Careful:
        seq_len = 8

        def __init__(self):
            self.layers = [layer(CAUSAL)]

        def plan(self, length):
            raise AssertionError

        blocks = num_layers = property(lambda self: 1 / 0)

    assert list(headings(Careful())) == ["layers[0]"]


def test_what_was_looked_at_is_named():
    model = Cyclic({"dense": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 3: [CAUSAL], "x": np.ones(3)})
    with pytest.raises(TypeError, match=r"subject must be a mask.* got Cyclic; looked at layers \(dict\), ") as error:
        sl.describe(model)
    for words in ("layers['dense'] (Linear)", "layers[3][0] (Causal)", "describe(mask, q_len)"):
        assert words in str(error.value)
    assert "['x']" not in str(error.value)
    with pytest.raises(TypeError, match="got object; it has no fields to look at"):
        sl.describe(object())


def test_draw_looks_there_too():
    titles = [axes.get_title() for axes in sl.draw({"a": [layer(CAUSAL)], "b": layer(LOCAL)}).axes]
    assert [title.split("\n")[:2] for title in titles] == [["['a'][0]", repr(CAUSAL)], ["['b']", repr(LOCAL)]]
