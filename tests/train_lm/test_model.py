import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from examples.train_lm.config import Config
from examples.train_lm.sample import sample
from examples.training.config import Refusal
from examples.training.data import Batch
from examples.training.model import build, mean_loss, step_flops, without_future
from examples.training.run import Run

from .conftest import TINY


@pytest.mark.parametrize(
    "pattern", [sl.Full(), sl.Window(3, 1), sl.Blocks(sl.Causal(), 150), sl.preset("strided", local_attn_ctx=8)]
)
def test_patterns_lose_the_future_only(pattern):
    np.testing.assert_array_equal(without_future(pattern).dense(200), np.tril(pattern.dense(200)))


def test_no_pattern_sees_the_future():
    model = build(Config(**{**TINY, "pattern": "causal+strided:local_attn_ctx=8", "layers": 2}))
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
        ({"positions": "sine"}, "--positions must be one of"),
        ({"dropout": 1.0}, "--dropout must be below 1"),
        ({"lr": float("inf")}, "--lr must be at least 0 and finite"),
        ({"tensor_parallel": 4}, "--tensor-parallel must divide --heads"),
        ({"fsdp": 3}, "--batch-size must be a multiple"),
        ({"context_parallel": 3}, "--context-parallel must divide the length, got 3 and --seq-len 32"),
        ({"device": "abacus"}, "--device must be one of"),
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
    run = Run(config)
    state, step = run.init(), jax.jit(run.step)
    word = np.tile(np.frombuffer(b"abac", np.uint8), 20).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, 40, (config.steps, 4))
    for number, start in enumerate(starts, 1):
        state, seen = step(state, Batch(word[start[:, None] + np.arange(33)], None), np.int32(number))
    assert seen["loss"] / np.log(2) < 0.25

    # Greedy samples then go on with the period, also past the window of 32.
    assert sample(run.model(state), b"abacabac", 60, 0.0) == b"abac" * 17


def test_an_index_is_learnt_with_the_model_and_the_loss_is_that_of_the_model():
    run = Run(Config(**{**TINY, "pattern": "moba:block=16,count=1+msa:block=16,count=1", "layers": 2}))
    state, batch = run.init(), Batch(np.random.default_rng(0).integers(0, 256, (2, 33)), None)
    new, seen = jax.jit(run.step)(state, batch, np.int32(1))
    np.testing.assert_allclose(seen["loss"], jax.jit(lambda x: mean_loss(run.model(x), batch))(state), rtol=1e-5)
    before, after = (run.model(x).blocks[1].attention for x in (state, new))
    for name in ("index_query", "index_key"):
        # Not by weight decay alone, which takes the same share of each weight.
        ratio = np.asarray(getattr(after, name).kernel[...] / getattr(before, name).kernel[...])
        assert np.ptp(ratio) > 1e-3


def test_packed_documents_do_not_see_each_other():
    model = build(Config(**TINY))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (1, 33))
    segments = (np.arange(33) >= 20).astype(np.int32)[None]
    loss = mean_loss(model, Batch(tokens, segments))
    nats = [mean_loss(model, Batch(part, None)) for part in (tokens[:, :20],)]
    # 19 bytes are predicted of the first document, and 12 of the second, whose first byte is nobody's.
    other = tokens.copy()
    other[:, :20] = rng.integers(0, 256, (1, 20))
    second = 31 * loss - 19 * nats[0]
    np.testing.assert_allclose(
        31 * mean_loss(model, Batch(other, segments)) - 19 * mean_loss(model, Batch(other[:, :20], None)),
        second,
        rtol=1e-5,
    )
    assert abs(mean_loss(model, Batch(tokens, None)) - loss) > 1e-4


def test_a_prefix_sees_itself_and_the_suffix_is_predicted():
    config = Config(**{**TINY, "objective": "prefix", "pattern": "bidirectional"})
    rng, prefix = np.random.default_rng(0), 12
    tokens = rng.integers(0, 256, (1, 33)).astype(np.int32)
    answers = np.arange(1, 33)[None] >= prefix
    order = np.asarray(sl.prefix_order(np.array([prefix]), 32))

    def loss(model, tokens):
        return mean_loss(model, Batch(tokens, None, answers, order))

    model, other = build(config), tokens.copy()
    other[0, 1:prefix] = other[0, 1:prefix][::-1]
    assert abs(loss(model, other) - loss(model, tokens)) > 1e-4  # it sees the prefix, and does not predict it
    logits = [model(x[:, :-1], order_ids=order) for x in (tokens, np.where(np.arange(33) == 31, 0, tokens))]
    np.testing.assert_allclose(logits[0][:, :31], logits[1][:, :31], atol=1e-5)  # none sees a later byte
    causal = build(Config(**{**TINY, "objective": "suffix", "pattern": "all"}))
    np.testing.assert_allclose(
        mean_loss(causal, Batch(tokens, None, answers)),
        mean_loss(model, Batch(tokens, None, answers, np.arange(32)[None])),
        rtol=1e-5,
    )


def test_prefixes_of_a_run():
    """They are drawn for each step, and cover all lengths."""
    source = Config(**{**TINY, "objective": "prefix", "pattern": "bidirectional", "batch_size": 64}).source()
    batches = [source.batch(0), source.batch(1), source.heldout(64)]
    prefixes = [(batch.order_ids == batch.order_ids[:, :1]).sum(1) for batch in batches]  # 1 stands for 0 and 1
    for batch, lengths in zip(batches, prefixes, strict=True):
        assert batch.order_ids.shape == (64, 32) and batch.order_ids.dtype == np.int32
        np.testing.assert_array_equal(batch.order_ids, np.maximum(np.arange(32), lengths[:, None] - 1))
        shorter = np.arange(1, 33) >= lengths[:, None]
        assert (batch.answers == shorter)[lengths > 1].all() and batch.answers[lengths <= 1].all()
        assert lengths.min() <= 3 and lengths.max() >= 29
    assert not np.array_equal(prefixes[0], prefixes[1])
    np.testing.assert_array_equal(source.batch(1).order_ids, batches[1].order_ids)
    suffix = Config(**{**TINY, "objective": "suffix", "batch_size": 64}).source().batch(0)
    assert suffix.order_ids is None
    np.testing.assert_array_equal(suffix.answers, batches[0].answers)


def test_dropout_is_that_of_the_step():
    run = Run(Config(**{**TINY, "dropout": 0.5}))
    state, batch = run.init(), Batch(np.zeros((2, 33), np.int32), None)
    loss = jax.jit(lambda number: mean_loss(run.model(state, number), batch, deterministic=False))
    assert loss(1) == loss(1) != loss(2)
    np.testing.assert_allclose(run.scores(state, batch)["loss"], mean_loss(run.model(state, 3), batch), rtol=1e-6)


def test_flops_of_a_step():
    """Counted by hand: one layer, 16 features, 32 bytes, two sequences; 528 causal pairs, 228 in a window of 8."""
    weights = 16 * 4 * 16 + 3 * 16 * 40 + 256 * 16
    for pattern, pairs in (("causal", 528), ("local:local_attn_ctx=8", 228)):
        config = Config(**{**TINY, "pattern": pattern})
        assert step_flops(config) == 3 * 2 * (2 * weights * 32 + 4 * 16 * pairs)
