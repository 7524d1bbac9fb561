"""NativeSparseAttention: its paper's formulas, dense and in float64; causality, documents, lengths and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs, perturbed

F, H = 8, 4
# Seven blocks in 101 tokens, of which a query chooses four.
SIZES = {"block": 16, "pool_size": 8, "pool_stride": 4, "sliding": 13}
NSA = sl.NSA(count=4, **SIZES)
LARGE = sl.NSA(block=64, count=3, local=1, sliding=13)


@nnx.jit
def run(layer, x, segment_ids=None, selection=None):
    return layer(x, segment_ids=segment_ids, selection=selection)


def make(heads=4, kv_heads=2, pattern=NSA, seq_len=128, **options):
    options = {"head_dim": H, "num_kv_heads": kv_heads, "pattern": pattern, "seq_len": seq_len} | options
    layer = nnx.eval_shape(lambda: sl.NativeSparseAttention(heads, F, rngs=nnx.Rngs(0), **options))
    nnx.update(layer, perturbed(nnx.to_pure_dict(nnx.state(layer))))
    return layer


# --- the paper -------------------------------------------------------------------------------------------------------


def softmax_where(xp, allowed, logits):
    """0 in rows where nothing is allowed."""
    weights = xp.where(allowed, xp.exp(logits - logits.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / xp.where(total == 0, 1, total)


def turned(xp, x, positions, theta):
    """Rotary embeddings: a pair of features is a complex number, and a position a rotation."""
    half = x.shape[-1] // 2
    turn = xp.exp(1j * positions[:, None, None] * theta ** (-xp.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return xp.concatenate([z.real, z.imag], -1)


def phi(xp, p, x, begins, size):
    """[T, K, H] -> [W, K, H]."""
    u, b, v, c = p["inner"]["kernel"], p["inner"]["bias"], p["outer"]["kernel"], p["outer"]["bias"]
    found = xp.einsum("wskf,sfh->wkh", x[begins[:, None] + np.arange(size)], u) + b
    return (found * (1 + xp.tanh((2 / np.pi) ** 0.5 * (found + 0.044715 * found**3))) / 2) @ v + c


def paper_choice(nsa, p, start):
    """The blocks that a query chooses by equation 9, of attention probabilities p[t, w]; start is that of documents."""
    scale, ratio, ids = nsa.block // nsa.pool_stride, nsa.pool_size // nsa.pool_stride, []
    blocks = -(-len(p) // nsa.block)
    for t, row in enumerate(p):
        score = np.zeros(blocks)
        for j, m, n in np.ndindex(blocks, scale, ratio):
            w = scale * (j + 1) - m - n  # counted from 1, as in the paper
            score[j] += row[w - 1] if 1 <= w <= len(row) else 0
        own, lowest = t // nsa.block, start[t] // nsa.block
        forced = [j for j in range(lowest, own + 1) if j < lowest + nsa.first or j > own - nsa.local]
        rest = sorted(set(range(lowest, own + 1)) - set(forced), key=lambda j: (-score[j], j))
        ids.append([*forced, *rest][: nsa.count])
    return [[j in chosen for j in range(blocks)] for chosen in ids]


def paper(xp, nsa, theta, p, x, ids, chosen=None):
    """One sequence [T, F] -> [T, F], and the choices, bool [K, T, blocks]: those given, or equation 9's.

    By numpy or JAX's: xp.
    """
    t, w = np.arange(len(x)), np.arange(max(0, (len(x) - nsa.pool_size) // nsa.pool_stride + 1))
    begins = w * nsa.pool_stride
    q, k, v, g = (xp.tensordot(x, p[name]["kernel"], 1) + p[name]["bias"] for name in ("query", "key", "value", "gate"))
    ck, cv = (
        phi(xp, p["compress_key"], k[:, 0], begins, nsa.pool_size),
        phi(xp, p["compress_value"], v[:, 0], begins, nsa.pool_size),
    )
    k, near = k[:, 1], k[:, 2]
    if theta is not None:
        q, k, near, ck = (
            turned(xp, q, t, theta),
            turned(xp, k, t, theta),
            turned(xp, near, t, theta),
            turned(xp, ck, begins, theta),
        )
    same = (ids[:, None] == ids) & (ids >= 0)
    start = [int(np.argmax(row)) if row.any() else 0 for row in same]
    whole = np.array([len({*ids[i : i + nsa.pool_size]}) == 1 for i in begins], bool)
    past, group = (t[:, None] >= t) & same, q.shape[1] // k.shape[1]
    windows = (t[:, None] >= begins + nsa.pool_size - 1) & same[:, begins] & whole
    out, choices = 0, []
    for head in range(k.shape[1]):
        own = slice(head * group, (head + 1) * group)
        queries, gates = q[:, own].swapaxes(0, 1), 1 / (1 + xp.exp(-g[:, :, own]))
        shared = np.zeros((group, len(x), 0))
        if len(w):
            shared = softmax_where(xp, windows, queries @ ck[:, head].T * H**-0.5)
        if chosen is None:
            choices.append(paper_choice(nsa, shared.sum(0), start))
        blocks = np.array(choices[-1] if chosen is None else chosen[head])[:, t // nsa.block]
        picked = softmax_where(xp, past & blocks, queries @ k[:, head].T * H**-0.5)
        close = softmax_where(xp, past & (t[:, None] - t < nsa.sliding), queries @ near[:, head].T * H**-0.5)
        branches = shared @ cv[:, head], picked @ v[:, 1, head], close @ v[:, 2, head]
        merged = sum(gates[:, c].T[..., None] * branch for c, branch in enumerate(branches))
        out += xp.einsum("nth,nhf->tf", merged, p["out"]["kernel"][own])
    return out + p["out"]["bias"], choices


# The longest lies in six blocks.
PACKED = np.repeat([7, 0, 3, -1], [9, 6, 76, 10]).astype(np.int32)
CASES = {
    "MHA, the paper's windows and blocks": ({"heads": 2, "pattern": LARGE, "seq_len": 230}, 230, None),
    "4, rotary, documents": ({"heads": 4, "kv_heads": 1, "rope_theta": 100.0}, 101, PACKED),
    "8, rotary": ({"heads": 16, "rope_theta": 100.0}, 70, None),
    "16, documents": ({"heads": 16, "kv_heads": 1}, 101, PACKED[::-1]),
    "all blocks": ({"pattern": sl.NSA(count=7, **SIZES)}, 101, None),
    "no window": ({}, 7, np.repeat([0, 1], [4, 3]).astype(np.int32)),
    "one token": ({}, 1, None),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_paper(name):
    options, length, ids = CASES[name]
    with jax.enable_x64(True):
        layer = make(param_dtype=jnp.float64, **options)
        graph, params = nnx.split(layer)
        x, weights = (inputs(1, length, F, seed=seed).astype(np.float64) for seed in (1, 2))
        segments = None if ids is None else ids[None]

        def ours(params, x):
            out = nnx.merge(graph, params)(x, segment_ids=segments)
            return (out * weights).sum(), out

        sizes = layer.pattern, options.get("rope_theta")
        documents = np.zeros(length, int) if ids is None else ids
        want, choices = paper(np, *sizes, jax.tree.map(np.asarray, nnx.to_pure_dict(params)), x[0], documents)

        def theirs(params, x):
            return (paper(jnp, *sizes, params, x[0], documents, choices)[0] * weights[0]).sum()

        actual, out = jax.jit(jax.grad(ours, (0, 1), has_aux=True))(params, x)
        np.testing.assert_allclose(out[0], want, atol=1e-10)
        want = jax.jit(jax.grad(theirs, (0, 1)))(nnx.to_pure_dict(params), x)
        for a, b in zip(jax.tree.leaves((nnx.to_pure_dict(actual[0]), actual[1])), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)
        if layer.pattern.selects(length):
            assert np.sum(choices, -1).max() == layer.pattern.count < np.shape(choices)[-1]
            # A bias of compressed keys alone changes nothing: it adds the same to all logits of a query.
            assert sum(np.abs(leaf).max() < 1e-3 for leaf in jax.tree.leaves(want)) <= (sizes[1] is None)


# --- what must not matter --------------------------------------------------------------------------------------------


def test_no_later_token_matters_and_all_earlier_ones_do():
    layer, x, weights = make(seq_len=48, pattern=sl.NSA(count=3, **SIZES)), inputs(48, F), inputs(F, seed=2)
    reached = np.abs(jax.jit(jax.jacobian(lambda x: layer(x) @ weights))(x)).sum(-1) > 0
    assert not np.triu(reached, 1).any()
    # The compressed branch ends with the last full window, whatever the others have chosen.
    assert all(reached[t, : (t + 1) // 4 * 4].all() and reached[t, max(0, t - 12) : t + 1].all() for t in range(48))


def test_of_packed_documents_each_is_as_if_alone():
    layer, x, lengths = make(rope_theta=100.0), inputs(1, 128, F), [32, 80, 16]
    ids = np.repeat([5, 2, 9], lengths).astype(np.int32)[None]
    parts = np.split(np.asarray(run(layer, x, ids)), np.cumsum(lengths)[:-1], axis=1)
    for part, alone in zip(parts, np.split(x, np.cumsum(lengths)[:-1], axis=1), strict=True):
        np.testing.assert_allclose(part, run(layer, alone), atol=1e-5)


def test_nothing_of_another_document_matters_wherever_it_ends():
    layer, x, ids = make(), inputs(1, 101, F), PACKED[None]
    out = run(layer, x, ids)
    for document in (7, 0, 3, -1):
        other = np.where(ids[..., None] == document, x, 5 * inputs(1, 101, F, seed=3))
        own = ids == document
        np.testing.assert_array_equal(run(layer, other, ids)[own], out[own])
    np.testing.assert_allclose(
        out[0, -10:], np.tile(nnx.to_pure_dict(nnx.state(layer.out))["bias"], (10, 1)), atol=1e-6
    )


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_selected_branch_alone_is_dense_attention_if_all_blocks_are_selected():
    layer, x = make(pattern=sl.NSA(count=7, **SIZES), rope_theta=100.0), inputs(1, 101, F)
    dense = sl.SparseSelfAttention(
        4, F, num_kv_heads=2, head_dim=H, pattern="causal", seq_len=101, rope_theta=100.0, rngs=nnx.Rngs(0)
    )
    nnx.update(
        layer,
        {
            "gate": {
                "kernel": jnp.zeros((F, 3, 4)),
                "bias": jnp.array([[-jnp.inf], [jnp.inf], [-jnp.inf]]) + jnp.zeros(4),
            }
        },
    )
    params = nnx.to_pure_dict(nnx.state(layer))
    second = {name: {leaf: x[..., 1, :, :] for leaf, x in params[name].items()} for name in ("key", "value")}
    nnx.update(dense, second | {name: params[name] for name in ("query", "out")})
    np.testing.assert_allclose(run(layer, x), run_dense(dense, x), atol=1e-5)
    some = sl.Selection(jnp.arange(7)[None, None, None] * jnp.ones((1, 101, 1, 1), int), block=16)
    few = make(pattern=NSA, rope_theta=100.0)
    nnx.update(few, nnx.state(layer))
    np.testing.assert_allclose(run(few, x, selection=some), run_dense(dense, x), atol=1e-5)
    assert np.abs(run(few, x) - run_dense(dense, x)).max() > 1e-2


@nnx.jit
def run_dense(layer, x):
    return layer(x)


def test_bfloat16():
    layer, x = make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), inputs(2, 101, F).astype(jnp.bfloat16)
    wide, state = make(), nnx.state(layer)
    nnx.update(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state))
    chosen = sl.Selection(np.random.default_rng(0).integers(0, 7, (2, 101, 2, 4)), block=16)
    actual, want = run(layer, x, selection=chosen), run(wide, x.astype(jnp.float32), selection=chosen)
    assert actual.dtype == jnp.bfloat16
    # Products are summed in float32; what is rounded are projections, windows, branches and gates.
    np.testing.assert_allclose(actual.astype(jnp.float32), want, atol=16 * 2**-8 * np.abs(want).max() / 4)
    slopes = nnx.jit(nnx.grad(lambda layer, x: (layer(x) ** 2).sum()))(layer, x)
    assert all(leaf.dtype == jnp.bfloat16 and jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_leading_axes_and_other_sizes():
    layer = make(out_features=6, use_bias=False)
    assert "bias" not in nnx.to_pure_dict(nnx.state(layer.query))
    x = inputs(2, 3, 70, F)
    out = run(layer, x)
    assert out.shape == (2, 3, 70, 6)
    np.testing.assert_allclose(run(layer, x[1, 2]), out[1, 2], atol=1e-5)
    assert run(layer, x[:0]).shape == (0, 3, 70, 6)
    assert layer.pattern == sl.NSA(count=4, **SIZES)


def test_in_a_model_with_other_patterns_scanned_over():
    patterns = ("sliding_window:window=8", "nsa:block=16,count=4,pool_size=8,pool_stride=4,sliding=13")
    options = {"patterns": patterns, "seq_len": 96, "num_kv_heads": 2, "remat": True, "scan_layers": True}
    model = nnx.eval_shape(lambda: sl.SparseTransformer(11, 4, F, 2, rngs=nnx.Rngs(0), **options))
    nnx.update(model, perturbed(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    first, second = (block.attention for block in model.layers)
    assert type(first) is sl.SparseSelfAttention and type(second) is sl.NativeSparseAttention
    assert second.pattern == NSA
    slopes = nnx.jit(nnx.grad(lambda model, tokens: model(tokens).var()))(model, np.arange(96)[None] % 11)
    inner = [x for path, x in jax.tree_util.tree_leaves_with_path(slopes) if "compress_value" in str(path)]
    assert inner and all(jnp.abs(leaf).max() > 0 for leaf in inner)


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense_below", [0, 80])
def test_decoding_equals_the_forward_pass_token_by_token(dense_below):
    pattern = sl.NSA(count=3, dense_below=dense_below, **SIZES)
    layer, x = make(pattern=pattern, seq_len=96, rope_theta=100.0), inputs(3, 96, F)
    step = nnx.jit(lambda layer, x, cache, position: layer.decode_step(x, cache, position))
    first = np.array([0, 5, 66])  # prompts: none, shorter than a window, and of more blocks than are chosen
    padded = np.where(np.arange(70)[:, None] < first[:, None, None], x[:, :70], np.nan)
    out, cache = nnx.jit(lambda layer, x, lengths: layer.prefill(x, lengths))(layer, padded, first)
    want, dense = run(layer, x), run(make(pattern=sl.NSA(count=6, **SIZES), seq_len=96, rope_theta=100.0), x)
    np.testing.assert_allclose(out[2, :66], (dense if dense_below else want)[2, :66], atol=1e-5)
    assert np.abs(want[2, 66:] - dense[2, 66:]).max() > 1e-2
    for token in range(30):
        position = first + token
        out, cache = step(layer, x[np.arange(3), position], cache, position)
        for i, at in enumerate(position):
            np.testing.assert_allclose(out[i], (dense if at < dense_below else want)[i, at], atol=1e-5)


@pytest.mark.parametrize(("implementation", "steps"), [(None, "triton"), ("xla", "xla"), ("reference", "xla")])
def test_steps_are_of_the_layer_s_implementation(implementation, steps):
    layer = make(seq_len=96, implementation=implementation)
    _, cache = jax.eval_shape(layer.prefill, inputs(1, 8, F))
    assert {x.implementation for x in (cache.windows, cache.blocks, cache.sliding)} == {steps}
