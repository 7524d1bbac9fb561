"""SparseTransformer: layers' patterns, positions, head, reach, traces and a few steps of learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl

T, F, N, V = 20, 16, 2, 11
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, T)))


def make(num_layers=2, patterns="all", seed=0, **options):
    options = {"seq_len": T} | options
    return sl.SparseTransformer(V, N, F, num_layers, patterns=patterns, rngs=nnx.Rngs(seed), **options)


def with_head(model, seed=1):
    """The model with an output head away from its initial zeros."""
    model.head.kernel[...] = jax.random.normal(jax.random.key(seed), (F, V))
    return model


@nnx.jit
def run(model, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


@nnx.jit
def run_without_head(model, tokens):
    seen = {}
    norm, model.final_norm = model.final_norm, lambda x: seen.setdefault("x", norm(x))
    model(tokens)
    model.final_norm = norm
    return seen["x"]


def influence(model):
    """Bool [T, T]: whether the embedding of token k has any effect on the logits at q."""
    graphdef, state = nnx.split(model)

    def logits(embedded):
        copy = nnx.merge(graphdef, state)
        copy.token_embedding = lambda tokens: embedded
        return copy(TOKENS[0]) @ jnp.arange(1.0, V + 1)

    return np.abs(jax.jit(jax.jacobian(logits))(model.token_embedding(TOKENS[0]))).sum(-1) > 0


def test_patterns_cycle_over_the_layers_and_entries_over_the_heads():
    window, strided = sl.Window(2), sl.Causal() & sl.Strided(3)
    interleaved = make(5, (window, strided, "all"))
    assert [b.attention.pattern for b in interleaved.blocks] == [window, strided, "all", window, strided]
    merged = make(2, window | strided)
    assert [b.attention.pattern for b in merged.blocks] == [window | strided] * 2
    per_head = make(2, ((window, strided), "all"))
    assert [b.attention.pattern for b in per_head.blocks] == [(window, strided), "all"]


def test_reach_is_the_product_of_the_layers_masks():
    window, strided = sl.Window(2), sl.Causal() & sl.Strided(3)
    reached = influence(with_head(make(2, (window, strided))))
    np.testing.assert_array_equal(reached, (strided.dense(T).astype(int) @ window.dense(T)) > 0)
    assert not np.triu(reached, 1).any()


def test_first_logits_are_zero_and_float32():
    logits = run(make(1, dtype=jnp.bfloat16), TOKENS)
    assert logits.shape == (2, T, V) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, 0)


def test_tied_head_is_the_embedding():
    model = make(1, tie_embeddings=True)
    assert model.head is None
    logits, features = run(model, TOKENS), run_without_head(model, TOKENS)
    np.testing.assert_allclose(logits, features @ model.token_embedding.embedding[...].T, atol=1e-5)


def test_row_and_column_tables_give_each_token_its_place():
    model = make(1, position_stride=6)
    assert model.row_embedding.embedding.shape == (4, F) and model.column_embedding.embedding.shape == (6, F)
    model.blocks = nnx.List([])
    model.final_norm = lambda x: x
    model.head = None  # logits = x @ embedding.T, from which x follows
    model.token_embedding.embedding[...] = jnp.eye(V, F)
    logits = model(jnp.zeros(T, int))
    rows, columns = model.row_embedding.embedding[...], model.column_embedding.embedding[...]
    for t in (0, 5, 6, 13, 19):
        expected = jnp.eye(V, F)[0] + rows[t // 6] + columns[t % 6]
        np.testing.assert_allclose(logits[t], expected[:V], atol=1e-6)


@pytest.mark.parametrize(
    "positions, knows_order", [("row_column", True), ("learned", True), ("rope", True), ("none", False)]
)
def test_positions_break_the_symmetry_of_the_tokens(positions, knows_order):
    model = with_head(make(2, sl.Full(), positions=positions, causal=False))
    order = np.random.default_rng(1).permutation(T)
    difference = np.abs(run(model, TOKENS)[:, order] - run(model, TOKENS[:, order])).max()
    assert (difference > 1e-2) if knows_order else (difference < 1e-4)


@pytest.mark.parametrize("positions", ["row_column", "learned"])
def test_tables_have_no_other_positions(positions):
    model = with_head(make(1, positions=positions, **({"position_stride": 6} if positions == "row_column" else {})))
    at = np.array([-1, 0, T - 1, T, T + 1, T + 100])
    logits = nnx.jit(lambda model, at: model(jnp.zeros_like(at), positions=at))(model, at[:, None])
    np.testing.assert_array_equal(np.isnan(logits), np.broadcast_to(((at < 0) | (at >= T))[:, None, None], (6, 1, V)))


def test_segments_are_isolated_and_options_reach_the_blocks():
    model = with_head(make(1, num_kv_heads=1, use_sinks=True, mlp="swiglu", norm="rms", positions="rope", remat=True))
    ids = jnp.asarray([[0] * 9 + [1] * 11] * 2)
    changed = TOKENS.at[:, :9].set((TOKENS[:, :9] + 1) % V)
    before, after = run(model, TOKENS, ids), run(model, changed, ids)
    np.testing.assert_array_equal(before[:, 9:], after[:, 9:])
    assert np.abs(before[:, :9] - after[:, :9]).max() > 0.1
    assert np.abs(run(model, TOKENS)[:, 9:] - run(model, changed)[:, 9:]).max() > 1e-3
    assert model.blocks[0].attention.sinks.shape == (N,)
    assert model.blocks[0].attention.key.kernel.shape == (F, 1, F // N)
    assert isinstance(model.final_norm, nnx.RMSNorm) and model.blocks[0].remat


def test_shorter_inputs_are_the_prefix_of_longer_ones():
    model = with_head(make(2, "strided:local_attn_ctx=4"))
    np.testing.assert_allclose(run(model, TOKENS[:, :7]), run(model, TOKENS)[:, :7], atol=1e-5)


def unscanned(model, **options):
    """A model without a scan, with the parameters of one that has it."""
    plain = make(**options)
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state["blocks"] = dict(enumerate(nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in model.layers))
    flat = nnx.to_flat_state(nnx.state(plain, nnx.Param))
    new = nnx.traversals.flatten_mapping(state)
    nnx.update(plain, nnx.from_flat_state([(path, leaf.replace(new[path])) for path, leaf in flat]))
    return plain


def test_a_scan_over_layers_is_the_same_model():
    options = {"num_layers": 4, "patterns": ("local:local_attn_ctx=3", "strided:local_attn_ctx=4"), "remat": True}
    scanned = with_head(make(scan_layers=True, **options))
    plain = unscanned(scanned, **options)
    assert [layer.attention.pattern for layer in scanned.layers] == [layer.attention.pattern for layer in plain.layers]
    first, second = (scanned.layers[i].mlp_in.kernel[...] for i in (0, 2))
    assert (first != second).any(), "each layer starts with parameters of its own"

    def loss(model):
        return (model(TOKENS, segment_ids=(jnp.arange(T) // 9)[None].repeat(2, 0)) ** 2).mean()

    (ours, gradients), (theirs, wanted) = (nnx.jit(nnx.value_and_grad(loss))(model) for model in (scanned, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    nnx.update(scanned, gradients)  # so that `layers` takes the gradients apart
    for layer, like in enumerate(unscanned(scanned, **options).blocks):
        got, want = (
            jax.tree.leaves(nnx.to_pure_dict(nnx.state(x, nnx.Param))) for x in (like, wanted["blocks"][layer])
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))


def test_scanned_layers_draw_dropout_of_their_own():
    model = with_head(make(3, "all", scan_layers=True, dropout_rate=0.5))
    first, second = run(model, TOKENS), run(model, TOKENS)
    assert (first != second).any(), "the random state goes on"
    counts = jax.tree.leaves(nnx.state(model.blocks, nnx.RngCount))
    keys = [np.asarray(jax.random.key_data(k)) for k in jax.tree.leaves(nnx.state(model.blocks, nnx.RngKey))]
    assert counts and all((count == count[0]).all() and count[0] > 0 for count in counts)
    assert all(len(np.unique(key, axis=0)) == 3 for key in keys)


def test_equal_models_share_one_trace_and_learn():
    traces = []

    @nnx.jit
    def step(model, tokens):
        traces.append(tokens.shape)

        def loss(model):
            logits = jax.nn.log_softmax(model(tokens[:, :-1]))
            return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.3 * g, nnx.state(model, nnx.Param), grads))
        return value

    options = {"patterns": (sl.Window(3), sl.Causal() & sl.Strided(4)), "dropout_rate": 0.0, "remat": True}
    model, twin = make(**options), make(seed=1, **options)
    losses = [float(step(model, TOKENS)) for _ in range(30)]
    step(twin, TOKENS)
    assert len(traces) == 1
    assert losses[0] == pytest.approx(np.log(V), abs=1e-5)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"patterns": ()}, ["patterns", "got 0"]),
        ({"patterns": ("all",) * 3}, ["patterns", "num_layers=2", "got 3", "nest"]),
        ({"patterns": (("all", "local", "strided"),)}, ["3 entries", "num_heads=2"]),
        ({"patterns": sl.Window(7) | sl.Global(2)}, ["patterns: a language", "query 0 sees the later key 1"]),
        (
            {"patterns": ("local", "prefix_lm:prefix=3")},
            ["patterns[1]", "query 0 sees the later key 1", "causal=False"],
        ),
        ({"patterns": (("local", "bidirectional"),)}, ["patterns", "write sl.Causal() & sl.Full(), or causal=False"]),
        (
            {"patterns": np.ones((20, 20), bool), "seq_len": 20},
            ["patterns", "Array(array=bool[20, 20])", "the later key 1: write sl.Causal() & ..., or"],
        ),
        ({"patterns": sl.Window(3, 1), "selection": "moba:block=16,count=2", "causal": False}, ["must be causal"]),
        ({"causal": "no"}, ["causal", "'no'", "must be true or false"]),
        ({"positions": "sine"}, ["positions", "sine"]),
        ({"positions": "rope", "position_stride": 4}, ["position_stride=4", "row_column", "rope"]),
        ({"position_stride": 0}, ["position_stride", ">= 1", "got 0"]),
        ({"position_stride": 21}, ["position_stride", "1..seq_len=20", "got 21"]),
        (
            {"num_layers": 3, "patterns": ("all", "local"), "scan_layers": True},
            ["scan_layers", "num_layers=3", "2 patt"],
        ),
        ({"num_layers": 0}, ["num_layers", "0"]),
    ],
)
def test_wrong_settings_are_refused_at_construction(options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_wrong_calls_are_refused():
    model = make(1)
    with pytest.raises(ValueError, match=f"{T + 1} tokens.*seq_len={T}"):
        run(model, jnp.zeros((1, T + 1), int))
    with pytest.raises(ValueError, match="integer"):
        run(model, jnp.zeros((1, T)))
    with pytest.raises(ValueError, match="segment_ids"):
        run(model, TOKENS, jnp.zeros(T, int))
