"""Decoding through the layers equals the full forward token by token; `generate`, its samples and its refusals."""

import dataclasses
import functools
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules.generate import sample
from tests.programs import USUAL

T, F, V, N, B = 40, 16, 32, 4, 3
MODELS = {
    "interleaved": {
        "patterns": ("local:local_attn_ctx=6", "strided:local_attn_ctx=5"),
        "relative_bias": (sl.LearnedBias(7), None),
    },
    "merged, rope, grouped": {
        "patterns": "sparse_transformer_fixed:stride=8,summary=2",
        "positions": "rope",
        "num_kv_heads": 2,
        "normalize_qk": True,
    },
    "image behind a prompt, axial rope": {
        "patterns": sl.Causal() & (sl.Grid((6, 6), sl.Window(2, 2), offset=3) | sl.Global(3)),
        "positions": "rope",
        "rope": sl.Rope(100.0, (6, 6), offset=3),
    },
    "per head, sinks, soft cap": {
        "patterns": (("local:local_attn_ctx=4", "strided:local_attn_ctx=6"),),
        "positions": "learned",
        "use_sinks": True,
        "gate_output": True,
        "logits_soft_cap": 3.0,
        "scale": 0.5,
        "relative_bias": sl.AlibiBias(),
        "mlp": "swiglu",
        "tie_embeddings": True,
    },
    "scanned": {"patterns": ("local:local_attn_ctx=6", "all"), "scan_layers": True, "num_layers": 4, "remat": True}
    | {"relative_bias": sl.T5Bias(False, num_buckets=6, max_distance=20), "share_relative_bias": True},
    "dropout": {"patterns": "all", "dropout_rate": 0.5, "positions": "none"},
    "no biases": {
        "patterns": "longformer:window=5,global_tokens=2",
        "use_bias": False,
        "norm": "rms",
        "mlp": "gelu_tanh",
    },
}


def make(num_layers=2, seed=0, seq_len=T, **options):
    model = sl.SparseTransformer(V, N, F, num_layers, seq_len=seq_len, rngs=nnx.Rngs(seed), **options)
    rng = np.random.default_rng(seed)  # away from zeros, such as those of the head
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p: jnp.asarray(p + np.float32(0.2 * rng.normal(size=p.shape))), state))
    return model


# Everybody generates as many tokens after as many prompts, and so by one program.
PROMPTS, COUNT = [[1, 2, 3], [7], list(range(12))], 12
LENGTHS = np.array([len(prompt) for prompt in PROMPTS])


def padded(pad):
    return np.stack([np.pad(prompt, (0, LENGTHS.max() - len(prompt)), constant_values=pad) for prompt in PROMPTS])


@nnx.jit
def forward(model, text):
    return model(text, deterministic=True)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_the_full_forward(name):
    model, text, lengths = make(**MODELS[name]), np.random.default_rng(0).integers(0, V, (B, T)), np.array([1, 9, 20])
    full = np.asarray(forward(model, text))
    model.eval()
    graph, state = nnx.split(model)
    prompts = np.where(np.arange(20) < lengths[:, None], text[:, :20], (text[:, :20] + 7) % V)  # other text, not read
    rows = np.arange(B)

    @jax.jit
    def decoded(state):
        model = nnx.merge(graph, state)
        logits, caches = model.prefill(prompts, lengths)

        def step(caches, each):
            token, position = each
            logits, caches = model.decode_step(token, caches, position)
            return caches, logits

        return logits, jax.lax.scan(step, caches, (text[rows, positions], positions))[1]

    positions = np.minimum(lengths + np.arange(T)[:, None], T - 1)
    first, later = decoded(state)
    np.testing.assert_allclose(first, full[rows, lengths - 1], atol=2e-5)
    np.testing.assert_allclose(later, full[rows, positions], atol=2e-5)


GEMMA = {"positions": "rope", "rope": (sl.Rope(50.0), sl.Rope(2000.0)), "normalize_qk": "rms", "norm": "rms"}
GEMMA |= {"patterns": ("sliding_window:window=6", "all"), "norm_placement": "sandwich", "num_kv_heads": 2}
GEMMA |= {"relative_bias": sl.LearnedBias(7), "share_relative_bias": True}


@pytest.mark.parametrize("options", [GEMMA, MODELS["per head, sinks, soft cap"]], ids=["Gemma", "learned positions"])
def test_prompts_in_chunks_and_several_tokens_at_positions_of_ones_own(options):
    """Chunks of 8 of 20 tokens, also in two calls, then steps of 3 of which the last is rejected.

    No position is the token's place.
    """
    model, rng, lengths = make(**options), np.random.default_rng(0), np.array([1, 9, 20])
    text, positions, rows = rng.integers(0, V, (B, T)), rng.integers(0, T, (B, T)), np.arange(B)[:, None]
    full = np.asarray(nnx.jit(lambda model, text: model(text, positions=positions))(model, text))
    assert np.abs(full - forward(model, text)).max() > 1e-2

    def prefill(model, chunk, end=20, start=0, **options):
        options |= {"positions": positions[:, start:end], "max_step": 3, "chunk": chunk, "start": start}
        return model.prefill(text[:, start:end], np.minimum(lengths, end), **options)

    @nnx.jit
    def prefills(model):
        _, caches = prefill(model, None, end=8, total=20)
        return prefill(model, None), prefill(model, 8), prefill(model, 8, start=8, caches=caches)

    whole, chunks, (later, caches) = prefills(model)
    np.testing.assert_allclose(chunks[0], full[rows[:, 0], lengths - 1], atol=2e-5)
    np.testing.assert_allclose(later[lengths > 8], whole[0][lengths > 8], atol=2e-5)
    for found in (chunks[1], caches):
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(whole[1]), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
    step = nnx.jit(lambda model, tokens, *x, **named: model.decode_step(tokens, *x, **named))
    caches, position = chunks[1], lengths
    for _ in range(4):
        at = position[:, None] + np.arange(3)
        guesses = np.where(np.arange(3) < 2, text[rows, at], 3)
        logits, caches = step(model, guesses, caches, position, positions=positions[rows, at])
        np.testing.assert_allclose(logits[:, :2], full[rows, at[:, :2]], atol=2e-5)
        position = position + 2
    logits, _ = step(model, text[rows[:, 0], position], caches, position, positions=positions[rows[:, 0], position])
    np.testing.assert_allclose(logits, full[rows[:, 0], position], atol=2e-5)


def test_outside_of_jit_chunks_without_tokens_are_skipped():
    model, text, lengths = make(num_layers=1, patterns="all"), np.arange(24)[None] % V, np.array([9])
    read = []

    class Seen(type(model.layers[0])):
        def prefill(self, x, *args, start=0, **options):
            read.append(start)
            return super().prefill(x, *args, start=start, **options)

    model.layers[0].__class__ = Seen
    actual, _ = model.prefill(text, lengths, chunk=8)
    assert read == [0, 8]
    right, _ = nnx.jit(lambda model: model.prefill(text, lengths))(model)
    np.testing.assert_allclose(actual, right, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"on_tokens": lambda tokens: None}], ids=["compiled", "streamed"])
def test_generate_reads_prompts_in_chunks(options):
    model, given = make(num_layers=1, patterns="all"), []

    def prefill(*prompts, **options):
        given.append(options)
        return model.prefill(*prompts, **options)

    seen = types.SimpleNamespace(prefill=prefill, decode_step=model.decode_step)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
    found = sl.generate(seen, prompts, 4, chunk=3, **options)
    np.testing.assert_array_equal(found, sl.generate(model, prompts, 4))
    assert given == [{"chunk": 3}], "traced once"


def temporary(patterns, length, num_layers):
    """Bytes that a prompt in chunks of 128 takes beside the model and the caches."""
    options = {"patterns": patterns, "implementation": "reference", "seq_len": 1024, "num_layers": num_layers}
    graph, state = nnx.split(nnx.eval_shape(lambda: make(**options)))

    def prefill(state, tokens):
        return nnx.merge(graph, state).prefill(tokens, chunk=128)

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(prefill).lower(state, tokens).compile(USUAL).memory_analysis().temp_size_in_bytes


def test_chunks_bound_the_memory_of_a_prompt():
    few, many = (temporary("sliding_window:window=16", length, 2) for length in (512, 1024))
    assert many < 1.05 * few


def test_no_chunk_copies_the_caches():
    """Of 128 KiB for each of two more layers."""
    few, many = (temporary("all", 1024, num_layers) for num_layers in (2, 4))
    assert many - few < 2**16


@pytest.mark.parametrize("choosing", [False, True])
def test_a_layer_and_a_block_decode_as_they_compute(choosing):
    pattern = "all" if choosing else "local:local_attn_ctx=5"
    block = sl.SparseTransformerBlock(N, F, pattern=pattern, seq_len=T, rngs=nnx.Rngs(0))
    ids = np.random.default_rng(2).integers(-1, 3, (B, T, N, 1))

    x = np.random.default_rng(1).normal(size=(B, T, F)).astype(np.float32)
    positions = np.arange(33, 36)

    @nnx.jit
    def decoded(layer, x, ids):
        def selection_of(ids):
            return sl.Selection(ids, block=16) if choosing else None

        out, cache = layer.prefill(x[:, :33], selection=selection_of(ids[:, :33]))

        def step(cache, position):
            own = selection_of(ids[:, position][:, None])
            out, cache = layer.decode_step(x[:, position], cache, jnp.full(B, position), selection=own)
            return cache, out

        return layer(x, selection=selection_of(ids)), out, jax.lax.scan(step, cache, positions)[1]

    for layer in (block, block.attention):
        want, first, later = map(np.asarray, decoded(layer, x, ids))
        np.testing.assert_allclose(first, want[:, :33], atol=2e-6)
        np.testing.assert_allclose(later, want[:, positions].swapaxes(0, 1), atol=2e-6)


@pytest.mark.parametrize("name", ["interleaved", "scanned"])
def test_greedy_generation_is_the_full_forwards_argmax(name):
    model, text = make(**MODELS[name]), np.zeros((B, T), int)
    made = np.asarray(sl.generate(model, PROMPTS, COUNT))
    for row, prompt, new in zip(text, PROMPTS, made, strict=True):
        row[: len(prompt) + COUNT] = [*prompt, *new]
    likeliest = np.asarray(forward(model, text)).argmax(-1)
    np.testing.assert_array_equal(likeliest[np.arange(B)[:, None], LENGTHS[:, None] - 1 + np.arange(COUNT)], made)
    stream = []
    np.testing.assert_array_equal(sl.generate(model, PROMPTS, COUNT, on_tokens=stream.append), made)
    np.testing.assert_array_equal(np.stack(stream, axis=1), made)


def test_padded_prompts_are_sequences_of_prompts():
    model, key = make(**MODELS["interleaved"]), jax.random.key(3)
    ragged = sl.generate(model, PROMPTS, COUNT, temperature=1.0, key=key)
    array = sl.generate(model, padded(9), COUNT, lengths=LENGTHS, temperature=1.0, key=key)
    np.testing.assert_array_equal(ragged, array)
    assert ragged.shape == (B, COUNT) and ragged.dtype == jnp.int32
    again = sl.generate(model, PROMPTS, COUNT, temperature=1.0, key=jax.random.key(4))
    assert (np.asarray(again) != ragged).any()
    stream = sl.generate(model, PROMPTS, COUNT, temperature=1.0, key=key, on_tokens=lambda tokens: None)
    np.testing.assert_array_equal(stream, ragged)


def test_prompts_padded_at_their_beginning_are_those_padded_at_their_end():
    model, options = make(**MODELS["interleaved"]), {"temperature": 1.0, "key": jax.random.key(3)}
    left = np.stack([np.pad(prompt, (LENGTHS.max() - len(prompt), 0), constant_values=V + 7) for prompt in PROMPTS])
    options |= {"lengths": LENGTHS, "padding_side": "left"}
    want = np.asarray(sl.generate(model, PROMPTS, COUNT, temperature=1.0, key=options["key"]))
    np.testing.assert_array_equal(sl.generate(model, left, COUNT, **options), want)
    np.testing.assert_array_equal(sl.generate(model, PROMPTS, COUNT, **options | {"lengths": None}), want)
    with pytest.raises(ValueError, match=f"prompts must hold tokens in 0..{V - 1}, got 0 to {V + 7}"):
        sl.generate(model, left, COUNT, **options | {"lengths": LENGTHS.max() + 0 * LENGTHS})


def frequencies(logits, **options):
    options = {"temperature": 1.0} | options
    drawn = jax.vmap(lambda key: sample(logits, key, **options))(jax.random.split(jax.random.key(0), 4000))
    return np.bincount(np.asarray(drawn), minlength=len(logits)) / 4000


def test_samples_follow_the_distribution():
    logits = jnp.log(jnp.array([0.1, 0.4, 0.05, 0.3, 0.15]))
    np.testing.assert_allclose(frequencies(logits), [0.1, 0.4, 0.05, 0.3, 0.15], atol=0.03)
    hot = np.array([0.1, 0.4, 0.05, 0.3, 0.15]) ** 0.5
    np.testing.assert_allclose(frequencies(logits, temperature=2.0), hot / hot.sum(), atol=0.03)
    np.testing.assert_allclose(frequencies(logits, top_k=2), [0, 4 / 7, 0, 3 / 7, 0], atol=0.03)
    # 0.4 + 0.3 do not reach 0.75, with 0.15 they do; the nucleus is counted among what top_k left.
    np.testing.assert_allclose(frequencies(logits, top_p=0.75), np.array([0, 40, 0, 30, 15]) / 85, atol=0.03)
    np.testing.assert_allclose(frequencies(logits, top_k=3, top_p=0.4), [0, 1, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(frequencies(logits, top_p=1e-6), [0, 1, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(frequencies(logits, temperature=1e-40), [0, 1, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(frequencies(jnp.zeros(4), top_k=2), [0.5, 0.5, 0, 0], atol=0.03)


def test_generation_is_compiled_once():
    from sparse_layers.modules.generate import _generate

    model = make(**MODELS["interleaved"])
    sl.generate(model, PROMPTS, COUNT, stop_token=0)
    sl.generate(model, PROMPTS, COUNT)
    before = _generate._cache_size()
    sl.generate(model, PROMPTS[::-1], COUNT)
    sl.generate(make(seed=1, **MODELS["interleaved"]), PROMPTS, COUNT, stop_token=1)
    assert _generate._cache_size() == before


def test_padding_is_not_read():
    """Not even where it is no token: an embedding of those is NaN."""
    model = make(**MODELS["interleaved"])
    want, *others = [sl.generate(model, padded(pad), COUNT, lengths=LENGTHS) for pad in (0, V, -100)]
    for other in others:
        np.testing.assert_array_equal(other, want)
    told = jax.jit(lambda lengths: sl.generate(model, padded(-100), COUNT, lengths=lengths))(LENGTHS)
    np.testing.assert_array_equal(told, want)
    assert np.isfinite(nnx.jit(type(model).prefill)(model, padded(V), LENGTHS)[0]).all()


def test_caches_of_other_layers_are_refused():
    model, tokens = make(**MODELS["interleaved"]), np.array([1, 2])
    _, caches = nnx.jit(type(model).prefill)(model, np.ones((2, 4), int))
    with pytest.raises(ValueError, match="cache is that of another layer: masks is"):
        model.decode_step(tokens, caches[::-1], np.array([4, 4]))
    with pytest.raises(ValueError, match="caches one a layer, 2, got 1"):
        model.decode_step(tokens, caches[:1], np.array([4, 4]))
    with pytest.raises(ValueError, match=r"position must be integers of shape \(2,\)"):
        model.decode_step(tokens, caches, 4)
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\]"):
        model.prefill(jnp.ones(5, int))
    with pytest.raises(TypeError, match=r"caches must be those of the previous chunk .* got None, start=3"):
        model.prefill(jnp.ones((2, 4), int), start=3)


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        (([[1]], 0), {}, ["num_tokens", "0"]),
        (([], 3), {}, ["prompts", "one or more"]),
        (([[1], []], 3), {}, ["prompts", "(0,)"]),
        ((np.ones((2, 3)), 3), {}, ["prompts", "integers", "float"]),
        ((np.ones(3, int), 3), {}, ["prompts", "[B, P]", "(3,)"]),
        ((np.ones((2, 3), int), 3), {"lengths": [3, 4]}, ["lengths", "0..3", "4"]),
        ((np.ones((2, 3), int), 3), {"lengths": [3, 0]}, ["lengths", ">= 1"]),
        ((np.ones((2, 3), int), 3), {"lengths": [3]}, ["lengths", "(2,)", "(1,)"]),
        (([[1]], 3), {"temperature": -1.0}, ["temperature", "-1.0"]),
        (([[1]], 3), {"temperature": None}, ["temperature", "None"]),
        (([[1]], 3), {"top_k": 33}, ["top_k", "32", "33"]),
        (([[1]], 3), {"top_p": 0.0}, ["top_p", "(0, 1]", "0.0"]),
        (([[1]], 3), {"stop_token": 32}, ["stop_token", "31", "32"]),
        (([[1]], 3), {"stop_token": [4, 32]}, ["stop_token", "31", "32"]),
    ],
)
def test_refusals(refusing, arguments, options, words):
    with pytest.raises(ValueError) as error:
        sl.generate(refusing, *arguments, **options)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.fixture(scope="module")
def refusing():
    return make(patterns="all")


def test_a_pattern_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match=r"decoding needs a causal one.*Prefix\(size=9\)"):
        sl.generate(make(patterns="prefix_lm:prefix=9", causal=False), [[1]], 3)


@pytest.mark.parametrize("method", ["prefill", "decode_step"])
def test_layers_refuse_other_shapes(method):
    layer = sl.SparseSelfAttention(N, F, pattern="all", seq_len=T, rngs=nnx.Rngs(0))
    _, cache = layer.prefill(jnp.ones((B, 4, F)))
    wrong = {"prefill": (jnp.ones((4, F)),), "decode_step": (jnp.ones((B, 2, F)), cache, jnp.zeros(B, int))}[method]
    with pytest.raises(ValueError, match="inputs must have shape"):
        getattr(layer, method)(*wrong)
    with pytest.raises(ValueError, match=f"seq_len={T}"):
        layer.prefill(jnp.ones((B, T + 1, F)))
    with pytest.raises(ValueError, match=f"position must lie in 0..seq_len - 1 = {T - 1}"):
        layer.decode_step(jnp.ones((B, F)), cache, jnp.full(B, T))


# --- models of others ------------------------------------------------------------------------------------------------


class Shift:
    def __init__(self, by):
        self.by = by

    def __call__(self, logits):
        return jnp.roll(logits, self.by, axis=-1)


class Plain:
    """Neither an NNX module nor a pytree: the logits after a token are a table's row, shifted, whatever came before."""

    traces = 0

    def __init__(self, table, by):
        self.table, self.after = table, [Shift(by)]

    def prefill(self, tokens, lengths):
        return self.decode_step(jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0], (), lengths)

    def decode_step(self, tokens, caches, position):
        type(self).traces += 1
        return self.after[0](self.table[tokens]), caches


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["by"])
@dataclasses.dataclass(frozen=True)
class Tree:
    table: jax.Array
    by: int

    def prefill(self, tokens, lengths):
        return Plain(self.table, self.by).prefill(tokens, lengths)

    def decode_step(self, tokens, caches, position):
        return Plain(self.table, self.by).decode_step(tokens, caches, position)


def chain(table, by, token, count):
    """The likeliest tokens one after the other."""
    found = []
    for _ in range(count):
        token = int(np.roll(table[token], by).argmax())
        found.append(token)
    return found


@pytest.mark.parametrize("kind", [Plain, Tree])
def test_any_object_with_the_two_methods_is_sampled_from_and_its_arrays_may_change(kind):
    first, second = np.random.default_rng(0).normal(size=(2, 9, 9)).astype(np.float32)
    Plain.traces = 0
    for table in (first, second):
        model = kind(jnp.asarray(table), 0)
        assert isinstance(model, sl.Decoder)
        made = sl.generate(model, [[1, 2], [5]], 4)
        assert made.tolist() == [chain(table, 0, 2, 4), chain(table, 0, 5, 4)]
    traces = Plain.traces
    model = kind(jnp.asarray(first), 0)
    sl.generate(model, [[3, 1], [2]], 4)
    assert Plain.traces == traces == 2, "compiled once: prefill's and a step's trace"
    assert sl.generate(kind(jnp.asarray(first), 1), [[1, 2], [5]], 4).tolist()[1] == chain(first, 1, 5, 4)


def test_changes_inside_a_plain_model_take_effect():
    table = np.random.default_rng(0).normal(size=(9, 9)).astype(np.float32)
    model = Plain(table, 0)
    assert sl.generate(model, [[1]], 3).tolist() == [chain(table, 0, 1, 3)]
    model.after[0].by = 2
    assert sl.generate(model, [[1]], 3).tolist() == [chain(table, 2, 1, 3)]
    model.table = -table
    assert sl.generate(model, [[1]], 3).tolist() == [chain(-table, 2, 1, 3)]
    model.after.append(model)  # in a circle: what is compiled in then, is compiled in by identity
    assert sl.generate(model, [[1]], 3).tolist() == [chain(-table, 2, 1, 3)]


# --- stop tokens and streams -----------------------------------------------------------------------------------------


class Counted(Plain):
    """Each step that is computed tells so; caches hold their number, and an array of the model itself, twice."""

    steps: ClassVar[list] = []

    def __init__(self, table):
        super().__init__(table, 0)
        self.steps.clear()

    def prefill(self, tokens, lengths):
        logits, _ = super().prefill(tokens, lengths)
        return logits, (jnp.zeros((), int), self.table, self.table)

    def decode_step(self, tokens, caches, position):
        if caches:
            jax.debug.callback(self.steps.append, caches[0])
            caches = caches[0] + 1, *caches[1:]
        return self.after[0](self.table[tokens]), caches


# From each token to one other: 0 1 2 3 4 5 ..., and 8 8 8.
CHAIN = jnp.asarray(np.eye(9, dtype=np.float32)[[1, 2, 3, 4, 5, 6, 7, 0, 8]])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "stop, rows, steps",
    [
        (None, [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2]], 6),
        ([], [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2]], 6),
        (7, [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 7, 7, 7]], 6),
        (np.array(7), [[1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 7, 7, 7]], 6),
        ((5, 2, 8), [[1, 2, 2, 2, 2, 2, 2], [4, 5, 5, 5, 5, 5, 5]], 1),
        (np.array([1, 4]), [[1] * 7, [4] * 7], 0),
    ],
)
def test_stop_tokens_end_sequences_and_all_of_them_end_the_steps(stop, rows, steps, streams):
    model, seen = Counted(CHAIN), []
    options = {"on_tokens": seen.append} if streams else {}
    made = sl.generate(model, [[5, 0], [3]], 7, stop_token=stop, **options)
    assert made.tolist() == rows and made.dtype == jnp.int32
    jax.effects_barrier()
    # A stream has its next step under way when it sees that it was not needed.
    assert len(model.steps) == min(steps + streams, 6)
    if streams:
        assert np.stack(seen, axis=1).tolist() == [row[: steps + 1] for row in rows]
        assert {(type(tokens), tokens.dtype) for tokens in seen} == {(np.ndarray, np.dtype("int32"))}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_exceptions_of_on_tokens_propagate(error):
    raised, seen = error(), []

    def show(tokens):
        seen.append(tokens.tolist())
        if len(seen) == 3:
            raise raised

    model = Counted(CHAIN)
    with pytest.raises(error) as caught:
        sl.generate(model, [[0], [3]], 7, on_tokens=show)
    assert caught.value is raised and seen == [[1, 4], [2, 5], [3, 6]]
    jax.effects_barrier()
    assert len(model.steps) <= 3
    # Neither are the model's arrays gone, nor is anything compiled for another function.
    traces = []
    model.after[0] = lambda logits: traces.append(1) or logits
    for _ in range(2):
        assert sl.generate(model, [[0], [3]], 3, on_tokens=lambda tokens: None).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert len(traces) == 2, "prefill's and a step's"


def test_a_stream_cannot_be_compiled():
    model = Plain(CHAIN, 0)
    with pytest.raises(ValueError, match="on_tokens must be None inside of jit"):
        jax.jit(lambda prompts: sl.generate(model, prompts, 3, on_tokens=print))(jnp.ones((1, 2), int))
    assert jax.jit(lambda x, n: sl.generate(model, x, 3, lengths=n, padding_side="left"))(
        jnp.array([[-1, 1, 2], [3, 4, 5]]), jnp.array([2, 3])
    ).tolist() == [[3, 4, 5], [6, 7, 0]]


# --- layers in models of others --------------------------------------------------------------------------------------


class Stack(nnx.Module):
    """A model of a user's own around the blocks, without seq_len."""

    def __init__(self, rngs):
        options = {"pattern": "local:local_attn_ctx=3", "seq_len": 12, "rngs": rngs, "head_dim": 8}
        self.embed = nnx.Embed(V, F, rngs=rngs)
        self.blocks = nnx.List([sl.SparseTransformerBlock(2, F, **options) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)

    def prefill(self, tokens, lengths):
        x, caches = self.embed(tokens), []
        for block in self.blocks:
            x, cache = block.prefill(x, lengths)
            caches.append(cache)
        return self.embed.attend(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]), caches

    def decode_step(self, tokens, caches, position):
        x, new = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.decode_step(x, cache, position)
            new.append(cache)
        return self.embed.attend(x), new


def test_an_nnx_model_of_blocks_is_sampled_from():
    model = Stack(nnx.Rngs(0))
    text = sl.generate(model, [[1, 2, 3]], 6)[0]
    logits = nnx.jit(lambda model, text: model(text))(model, jnp.array([[1, 2, 3, *text[:-1].tolist()]]))
    np.testing.assert_array_equal(logits[0, 2:].argmax(-1), text)
    # Inside of an object of a plain class, too.
    wrapped = types.SimpleNamespace(prefill=model.prefill, decode_step=model.decode_step)
    np.testing.assert_array_equal(sl.generate(wrapped, [[1, 2, 3]], 6)[0], text)


@pytest.mark.parametrize(
    "result, error, words",
    [
        (jnp.zeros((1, 9)), TypeError, ["prefill must return (logits, caches)"]),
        ((jnp.zeros(9), ()), ValueError, ["logits [1, V]", "(9,)"]),
        ((jnp.zeros((1, 9), int), ()), ValueError, ["floats", "int32"]),
    ],
)
def test_wrong_results_of_a_decoder_are_refused(result, error, words):
    model = types.SimpleNamespace(prefill=lambda *_: result, decode_step=lambda *_: result)
    with pytest.raises(error) as caught:
        sl.generate(model, [[1]], 2)
    assert all(word in str(caught.value) for word in words), str(caught.value)
