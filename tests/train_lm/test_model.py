import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from examples.train_lm import train
from examples.train_lm.config import Config, Refusal
from examples.train_lm.model import _causal, build, sample

from .conftest import TINY


@pytest.mark.parametrize(
    "pattern", [sl.Full(), sl.Window(3, 1), sl.Blocks(sl.Causal(), 150), sl.preset("strided", local_attn_ctx=8)]
)
def test_patterns_lose_the_future_only(pattern):
    np.testing.assert_array_equal(_causal(pattern).dense(200), np.tril(pattern.dense(200)))


def test_no_pattern_sees_the_future():
    model = build(Config(**{**TINY, "pattern": "dense+strided:local_attn_ctx=8", "layers": 2}))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 32)))
    changed = tokens.at[0, 20].add(1)
    before, after = model(tokens), model(changed)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.array_equal(before[:, 20:], after[:, 20:])


def test_patterns_are_taken_by_the_layers_in_turn():
    model = build(Config(**{**TINY, "pattern": "local:local_attn_ctx=4+strided:local_attn_ctx=8", "layers": 3}))
    masks = [block.attention.pattern for block in model.blocks]
    assert masks[0] == masks[2] != masks[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pattern": "stridde"}, "did you mean 'strided'"),
        ({"pattern": "strided:local_attn_ctx=0"}, "local_attn_ctx"),
        ({"pattern": "fixed:num_verts=4"}, "heads"),
        ({"pattern": "all+all"}, "num_layers"),
        ({"positions": "row_column", "position_stride": 64}, "position_stride"),
    ],
)
def test_what_the_library_refuses_is_one_line(options, message):
    with pytest.raises(Refusal, match=message) as caught:
        build(Config(**{**TINY, **options}))
    assert "\n" not in str(caught.value) and "--seq-len 32" in str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"lr": -1.0}, "--lr must be at least 0"),
        ({"lr": float("nan")}, "--lr must be at least 0"),
        ({"heads": 3}, "--heads must divide --features"),
        ({"positions": "sine"}, "--positions must be"),
        ({"prompt": ""}, "--prompt"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(Refusal, match=message):
        Config(**{**TINY, **options})


def test_weights_learn_the_period():
    """A word with two continuations after 'a' needs more context than one byte: order 1 leaves 0.5 bits a byte.

    Within a window all but the first half period is determined, so a model that looks back two bytes comes to about
    1/32 of that; half of what order 1 allows proves that it looks further than one.
    """
    config = Config(**{**TINY, "pattern": "local:local_attn_ctx=8", "steps": 150, "lr": 1e-2})
    run = train.Run(config)
    state, step = run.init(), jax.jit(run.step)
    word = np.tile(np.frombuffer(b"abac", np.uint8), 20).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, 40, (config.steps, 4))
    for start in starts:
        state, loss = step(state, word[start[:, None] + np.arange(33)])
    assert loss / np.log(2) < 0.25

    # Greedy samples then go on with the period, also past the window of 32.
    assert sample(run.model(state), 32, b"abacabac", 60, 0.0) == b"abac" * 17
