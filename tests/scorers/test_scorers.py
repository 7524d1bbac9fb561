"""Scorers select the blocks of their papers' formulas, in layers, in models and in decoding."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from sparse_layers.scorers import base
from sparse_layers.scorers.methods import MSA, InfLLM, MoBA
from tests.arrays import inputs
from tests.modules.test_loading import gpt2, gpt2_file, write
from tests.ops.cases import compiled

# Operation by operation, each is a program of its own to compile.
select = compiled(lambda scorer, *operands: scorer.select(*operands), static_argnums=0)
apply = nnx.jit(lambda made, *operands: made(*operands))

# --- the formulas once more, query by query, in float64 --------------------------------------------------------------


def moba(scorer, q, k, t, head, blocks):
    """{block: score} of the blocks that lie in the past as a whole."""
    size, kv = scorer.block, head // (q.shape[1] // k.shape[1])
    found = {}
    for b in (b for b in blocks if (b + 1) * size <= t + 1):
        own = np.arange(b * size, (b + 1) * size)
        if blocks.ids is not None:  # those of the last document, the query's unless documents lie in several pieces
            own = own[blocks.ids[own] == blocks.ids[own[blocks.ids[own] >= 0][-1]]]
        found[b] = q[t, head] @ k[own, kv].mean(0)
    return found


def infllm(scorer, q, k, t, head, blocks):
    """The same of a key head, here ``head``, from what its query heads would attend to."""
    group, size = q.shape[1] // k.shape[1], scorer.block
    starts = range(0, t + 2 - scorer.pool_size, scorer.pool_stride)
    starts = [s for s in starts if s >= blocks.first]
    if not starts:
        return {}
    pooled = np.stack([k[s : s + scorer.pool_size, head].mean(0) for s in starts])
    logits = q[t, head * group : (head + 1) * group] @ pooled.T / np.sqrt(q.shape[2])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights = (weights / weights.sum(1, keepdims=True)).sum(0)
    found = {}
    for s, weight in zip(starts, weights, strict=True):
        for b in {s // size, (s + scorer.pool_size - 1) // size}:  # the blocks that the window meets
            found[b] = max(weight, found.get(b, 0))
    return found


def msa(scorer, q, k, t, head, blocks):
    """The same of an index query, with the index key."""
    size = scorer.block
    past = {b: k[max(b * size, blocks.first) : (b + 1) * size, 0] for b in blocks if (b + 1) * size <= t + 1}
    return {b: (keys @ q[t, head]).max() for b, keys in past.items()}


class DocumentBlocks(list):
    """Blocks from the query's document's first on, the document's first token, and the documents of all."""

    first, ids = 0, None


def selected_blocks(scorer, q, k, t, head, ids=None):
    """The set of blocks that query t chooses by the formulas."""
    first = 0 if ids is None else int(np.argmax(ids == ids[t]))
    own, lowest = t // scorer.block, first // scorer.block
    blocks = DocumentBlocks(range(lowest, own + 1))
    blocks.first, blocks.ids = first, ids
    forced = {b for b in blocks if b < lowest + scorer.first or b > own - scorer.local}
    formula = {MoBA: moba, InfLLM: infllm, MSA: msa}[type(scorer)]
    found = formula(scorer, q, k, t, head, blocks)
    rest = sorted((-found.get(b, 0.0), b) for b in set(blocks) - forced)
    return forced | {b for _, b in rest[: scorer.count - len(forced)]}


def attention(q, k, v, selection_ids, block, group, segments=None):
    """Causal attention over the chosen blocks within segments [B, T], dense, in the dtype of q: [B, T, N, H]."""
    batch, length, heads, size = q.shape
    ids = np.repeat(selection_ids, heads // selection_ids.shape[2], axis=2)
    blocks = np.zeros((batch, length, heads, -(-length // block)), bool)
    for b, t, h in itertools.product(*map(range, (batch, length, heads))):
        blocks[b, t, h, ids[b, t, h][ids[b, t, h] >= 0]] = True
    allowed = np.repeat(blocks, block, axis=3)[..., :length] & np.tri(length, dtype=bool)[None, :, None]
    if segments is not None:
        allowed &= (segments[:, :, None] == segments[:, None])[:, :, None]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->btns", q, k) / np.sqrt(size)
    return jnp.einsum("btns,bsnh->btnh", jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf), -1), v)


def arrays(length, heads, size=16, batch=1, seed=0):
    numbers = heads[0], heads[1], heads[1]
    return [jnp.asarray(inputs(batch, length, n, size, seed=3 * seed + i)) for i, n in enumerate(numbers)]


CASES = {
    "moba": (sl.MoBA(block=32, count=3), 331, (4, 4)),
    "moba, 4 to a key head, first and local": (sl.MoBA(block=16, count=6, first=1, local=2), 200, (4, 1)),
    "moba, 16 to a key head": (sl.MoBA(block=128, count=2), 450, (16, 1)),
    "moba, large blocks, 8 to a key head": (sl.MoBA(block=512, count=2), 1100, (8, 1)),
    "infllm": (sl.InfLLM(count=4, local=2, dense_below=0), 500, (8, 2)),
    "infllm, one local block": (sl.InfLLM(block=32, count=3, local=1, dense_below=0), 331, (4, 4)),
    "infllm, 16 to a key head": (sl.InfLLM(block=128, count=3, local=1, dense_below=0), 700, (16, 1)),
    "msa": (sl.MSA(block=32, count=4), 331, (4, 1)),
    "msa, first and local": (sl.MSA(block=16, count=6, first=1, local=2), 200, (2, 1)),
    "infllm, other windows": (sl.InfLLM(32, 4, local=2, dense_below=0, pool_size=24, pool_stride=8), 260, (8, 1)),
}


def documents(length):
    """Ids of three documents and padding; the second is not where its number says, and goes on behind the third."""
    ids = np.full((1, length), -1, np.int32)
    ids[0, : length // 5], ids[0, length // 5 : length // 2], ids[0, length // 2 : -3] = 4, 9, 2
    ids[0, length * 3 // 4 : -3] = 9
    return ids


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("name", CASES)
def test_selections_equal_the_formulas(name, packed):
    scorer, length, heads = CASES[name]
    q, k, _ = arrays(length, heads)
    ids = documents(length) if packed else None
    found = np.asarray(select(scorer, q, k, None if ids is None else jnp.asarray(ids)).ids)
    assert found.shape == (1, length, heads[0] if scorer.per_query_head else heads[1], scorer.count)
    q, k = (np.asarray(x[0], np.float64) for x in (q, k))
    for t in np.unique(np.r_[np.arange(0, length, 7), np.arange(length - 40, length)]):
        if ids is not None and ids[0, t] < 0:
            continue
        for head in range(found.shape[2]):
            row = found[0, t, head]
            assert {*row[row >= 0]} == selected_blocks(scorer, q, k, t, head, None if ids is None else ids[0]), (
                t,
                head,
            )
            assert len({*row[row >= 0]}) == (row >= 0).sum(), "each once"


@pytest.mark.parametrize("name", ["moba", "infllm", "msa"])
def test_selections_of_documents_are_independent(name):
    """Whatever else is in the blocks that they share."""
    scorer, length, heads = CASES[name]
    ids = np.repeat(np.array([[5, 0, -1, 3]]), [45, 150, 20, length - 215], axis=1).astype(np.int32)
    (q, k, _), (_, others, _) = arrays(length, heads), arrays(length, heads, seed=1)
    first = np.asarray(select(scorer, q, k, ids).ids)
    for document in (5, 0, 3):
        own = ids == document
        again = np.asarray(select(scorer, q, jnp.where(own[..., None, None], k, 9 * others), ids).ids)
        np.testing.assert_array_equal(first[own], again[own])


@pytest.mark.parametrize(
    "name, packed",
    [
        ("moba", False),
        ("moba, 4 to a key head, first and local", True),
        ("moba, large blocks, 8 to a key head", False),
        ("infllm", True),
        ("infllm, 16 to a key head", False),
    ],
)
def test_attention_and_gradients_equal_dense_attention_to_the_selection(name, packed):
    """Also of a document in two parts, between which blocks of another are chosen in vain."""
    scorer, length, heads = CASES[name]
    q, k, v = arrays(length, heads)
    dout = inputs(*q.shape, seed=9)
    segments = np.maximum(documents(length), 0) if packed else None
    fn = sl.make_attention_fn(scorer, length, segment_ids=segments)

    def answers(fn, dout, *operands):
        out, pull = jax.vjp(fn, *operands)
        return out, *pull(dout)

    answers, ids = compiled(answers, static_argnums=0), np.asarray(select(scorer, q, k, segments).ids)
    if segments is not None:
        whole = [{*segments[0, b : b + scorer.block]} == {2} for b in range(0, length, scorer.block)]
        assert np.array(whole)[ids[segments == 9]].any(), "some blocks are chosen in vain"
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (dout, q, k, v)]
        exact = answers(lambda *x: attention(*x, ids, scorer.block, heads[0] // heads[1], segments), *wide)
        exact = [np.asarray(x) for x in exact]
    for actual, right in zip(answers(fn, dout, q, k, v), exact, strict=True):
        np.testing.assert_allclose(actual, right, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize("scorer", [sl.MoBA(32, 4), sl.InfLLM(32, 4, local=2, dense_below=0)], ids=["moba", "infllm"])
def test_a_budget_that_covers_everything_is_dense_attention(scorer):
    q, k, v = arrays(128, (4, 2))
    dense = sl.block_sparse_attention(q, k, v, "causal")
    np.testing.assert_array_equal(sl.make_attention_fn(scorer, 128)(q, k, v), dense)
    everything = select(scorer, q, k)  # which layers do not even ask for
    assert (np.sort(everything.ids[0, -1], axis=-1) == np.arange(4)).all()
    chosen = sl.block_sparse_attention(q, k, v, "causal", selection=everything)
    np.testing.assert_allclose(chosen, dense, atol=1e-6)


@pytest.mark.parametrize("name", ["moba", "infllm", "msa"])
def test_nothing_of_later_tokens_matters(name):
    scorer, length, heads = CASES[name]
    (q, k, _), t = arrays(length, heads), 200
    later = (jnp.where(np.arange(length)[:, None, None] < t, x, jnp.nan) for x in (q, k))
    np.testing.assert_array_equal(select(scorer, *later).ids[:, :t], select(scorer, q, k).ids[:, :t])
    made, x, t = layer(selection=SCORERS[name]), inputs(1, T, 32), 70
    made.eval()

    @compiled
    def answers(x):
        out, pull = jax.vjp(lambda x: made(x)[:, :t], x)
        return out, *pull(jnp.ones_like(out))

    out, gradient = answers(x)
    assert (gradient[:, t:] == 0).all() and (gradient[:, :t] != 0).any(-1).all()
    other = np.where(np.arange(T)[:, None] < t, x, 5 * inputs(1, T, 32, seed=1))
    np.testing.assert_array_equal(answers(other)[0], out)


@pytest.mark.parametrize("name", ["moba", "infllm"])
def test_queries_take_turns_where_scores_were_too_large(name, monkeypatch):
    scorer, length, heads = CASES[name]
    q, k, _ = arrays(length, heads, batch=2)
    ids = jnp.tile(jnp.asarray(documents(length)), (2, 1))
    whole = select(scorer, q, k, ids)
    monkeypatch.setattr(base, "_SCORE_BYTES", 100_000)
    in_turn = str(jax.make_jaxpr(scorer.select)(q, k))
    assert "while" in in_turn or "scan" in in_turn
    np.testing.assert_array_equal(compiled(scorer.select)(q, k, ids).ids, whole.ids)


def test_ties_go_to_the_first_and_padding_may_hold_anything():
    q, k = jnp.ones((1, 128, 2, 8)), jnp.ones((1, 128, 1, 8))
    # In any order: kernels of GPUs have another one.
    assert {*select(sl.MoBA(16, 3), q, k).ids[0, 127, 0].tolist()} == {0, 1, 7}
    ids = jnp.where(jnp.arange(128) < 100, 0, -1)[None]
    poisoned = k.at[:, 100:].set(jnp.nan)
    np.testing.assert_array_equal(
        select(sl.MoBA(16, 3), q, poisoned, ids).ids[:, :100], select(sl.MoBA(16, 3), q, k, ids).ids[:, :100]
    )


@pytest.mark.parametrize("name", ["moba", "infllm"])
def test_arrays_without_a_batch_select_as_a_batch_of_one(name):
    """All arguments, and the op takes the selection with arrays of these axes."""
    scorer, length, heads = CASES[name]
    (q, k, v), ids = arrays(length, heads), jnp.asarray(documents(length))
    right = scorer.select(q, k, ids)
    actual = scorer.select(q[0], k[0], ids[0])
    np.testing.assert_array_equal(actual.ids, right.ids[0])
    out = sl.block_sparse_attention(q[0], k[0], v[0], sl.Causal(), selection=actual)
    whole = sl.block_sparse_attention(q, k, v, sl.Causal(), selection=right)
    np.testing.assert_allclose(out, whole[0], atol=1e-6)
    own = scorer.select(q[0, 100:140], k[0], (ids[0], ids[0]), pooled=scorer.pool(k)[0], first=100)
    np.testing.assert_array_equal(own.ids, scorer.select(q, k, ids, pooled=scorer.pool(k)).ids[0, 100:140])


def test_padding_on_the_left_is_not_selected():
    q, k, v = arrays(256, (2, 2))
    fn, mask = compiled(sl.make_attention_fn(sl.MoBA(32, 2, first=1), 256)), jnp.arange(256) >= 128
    found = fn(q, k, v, mask=mask[None, None, None])
    np.testing.assert_allclose(found[:, 128:], fn(q[:, 128:], k[:, 128:], v[:, 128:]), atol=1e-6)


# --- layers and models -----------------------------------------------------------------------------------------------

T = 120
SCORERS = {
    "moba": sl.MoBA(block=16, count=3),
    "infllm": sl.InfLLM(block=16, count=4, local=2, dense_below=0, pool_size=8, pool_stride=4),
    "msa": sl.MSA(block=16, count=3, index_size=6),
}


def layer(**options):
    settings = {"pattern": "causal", "seq_len": T, "num_kv_heads": 2, "rope_theta": 1e4, "rngs": nnx.Rngs(0)}
    return sl.SparseSelfAttention(4, 32, **settings | options)


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_is_an_option_a_pattern_or_a_name(name):
    scorer, x = SCORERS[name], inputs(2, T, 32)
    settings = ",".join(f"{field.name}={getattr(scorer, field.name)}" for field in dataclasses.fields(scorer))
    made = layer(selection=scorer)
    right = apply(made, x)
    assert jnp.abs(right - apply(layer(), x)).max() > 1e-3
    np.testing.assert_array_equal(apply(layer(pattern=f"{name}:{settings}"), x), right)
    for options in ({"pattern": scorer}, {"selection": f"{name}:{settings}"}):
        same = layer(**options)
        assert same.attention_fn == made.attention_fn
        assert jax.tree.structure(nnx.state(same)) == jax.tree.structure(nnx.state(made))
    of_linen = linen.SparseSelfAttention(4, pattern=scorer, seq_len=T, num_kv_heads=2, rope_theta=1e4)
    parameters = nnx.to_pure_dict(nnx.state(made, nnx.Param))
    np.testing.assert_allclose(compiled(of_linen.apply)({"params": parameters}, x), right, atol=1e-6)
    few = x[:, : scorer.count * scorer.block]
    np.testing.assert_array_equal(apply(layer(selection=scorer), few), apply(layer(), few))


def test_a_pattern_limits_the_selection():
    q, k, v = arrays(T, (2, 2))
    fn = sl.make_attention_fn(sl.Causal() & sl.Window(40), T, selection=SCORERS["moba"])
    selection = select(SCORERS["moba"], q, k)
    right = compiled(sl.block_sparse_attention, static_argnums=3)(q, k, v, fn.masks[0], selection=selection)
    np.testing.assert_allclose(compiled(fn)(q, k, v), right, atol=1e-6)
    assert compiled(fn)(q[:0], k[:0], v[:0]).shape == (0, T, 2, 16)


def model(layers=4, **options):
    patterns = "sliding_window:window=20", *SCORERS.values()
    settings = {"patterns": patterns, "seq_len": T, "num_kv_heads": 2, "positions": "rope", "rngs": nnx.Rngs(0)}
    return sl.SparseTransformer(40, 4, 32, layers, tie_embeddings=True, **settings | options)


def index_loss(made):
    return sum(x.sum() for x in jax.tree.leaves(nnx.state(made, sl.IndexLoss)))


TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 40, (2, T)))


def test_a_model_mixes_them_with_masks_rematerialises_and_scans():
    mixed = {"layers": 3, "patterns": ("sliding_window:window=20", SCORERS["moba"], SCORERS["msa"])}

    def loss(made):
        return (made(TOKENS) ** 2).sum() + index_loss(made)

    differentiated = nnx.jit(nnx.value_and_grad(loss))
    (right, gradients), (again, others) = (differentiated(model(remat=remat, **mixed)) for remat in (False, True))
    np.testing.assert_allclose(again, right, rtol=1e-5)
    for a, b in zip(*(map(np.asarray, jax.tree.leaves(x)) for x in (gradients, others)), strict=True):
        assert np.isfinite(a).all() and a.any()
        np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(a).max())
    scanned = model(2, scan_layers=True, patterns=(SCORERS["msa"],))
    one_by_one = scanned.unrolled()
    np.testing.assert_allclose(apply(scanned, TOKENS), apply(one_by_one, TOKENS), atol=1e-5)
    np.testing.assert_allclose(index_loss(scanned), index_loss(one_by_one), rtol=1e-5)


step = nnx.jit(lambda made, *operands: made.decode_step(*operands))


@pytest.mark.parametrize("prompt", [1, 70])
def test_decoding_is_the_forward_pass_token_by_token(prompt):
    made = model()
    right = np.asarray(apply(made, TOKENS))
    lengths = jnp.array([prompt, max(1, prompt - 9)])
    poison = jnp.where(jnp.arange(prompt) < lengths[:, None], TOKENS[:, :prompt], 0)
    logits, caches = nnx.jit(lambda m, *x: m.prefill(*x))(made, poison, lengths)
    tokens, position = np.asarray(TOKENS), np.asarray(lengths)
    for _ in range(T - prompt):
        np.testing.assert_allclose(logits, right[np.arange(2), position - 1], atol=1e-4)
        logits, caches = step(made, tokens[np.arange(2), position], caches, position)
        position = position + 1
    np.testing.assert_allclose(logits, right[np.arange(2), position - 1], atol=1e-4)


def test_prompts_in_chunks_and_several_tokens_a_step():
    """Chunks divide neither blocks nor windows, and all choose by the length of the whole; guesses are taken back."""
    infllm = dataclasses.replace(SCORERS["infllm"], dense_below=80)
    options = {"implementation": "reference"}  # the kernels are tested elsewhere
    made = model(patterns=("sliding_window:window=20", *(SCORERS | {"infllm": infllm}).values()), **options)
    right, tokens, rows = np.asarray(apply(made, TOKENS)), np.asarray(TOKENS), np.arange(2)[:, None]
    position = np.array([90, 82])
    whole, chunks = (
        nnx.jit(lambda m, x, n, chunk=chunk: m.prefill(x, n, chunk=chunk, max_step=3))(made, tokens[:, :90], position)
        for chunk in (None, 37)
    )
    np.testing.assert_allclose(chunks[0], right[np.arange(2), position - 1], atol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(chunks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    caches = chunks[1]
    for count in (0, 2, 3, 1, 3):
        at = position[:, None] + np.arange(3)
        guesses = np.where(np.arange(3) < count, tokens[rows, at], 7)
        logits, caches = step(made, guesses, caches, position)
        np.testing.assert_allclose(logits[:, :count], right[rows, at[:, :count]], atol=1e-4)
        position = position + count


def test_a_step_reads_the_selected_blocks_only():
    scorer = SCORERS["moba"]
    q, k, v = arrays(T, (4, 2))
    unread = ~np.isin(np.arange(T) // 16, np.asarray(select(scorer, q, k).ids[:, -1]))
    assert unread.any()

    @compiled
    def attended(q, hidden, k, v):
        empty = sl.KVCache.empty(scorer, T, batch=1, num_heads=4, num_kv_heads=2, head_size=16)
        cache, at = empty.filled(k, v), jnp.array([T - 1])
        rows = (jnp.where(hidden[:, None, None], jnp.nan, x) for x in (k, v))
        return dataclasses.replace(empty.filled(*rows), pooled=cache.pooled).attend(q, at), cache.attend(q, at)

    np.testing.assert_allclose(*attended(q[:, -1], unread, k, v), atol=1e-6)


def test_infllm_decodes_densely_up_to_a_length():
    scorer = dataclasses.replace(SCORERS["infllm"], dense_below=100)
    x = inputs(2, T, 32)
    dense, sparse, both = layer(), layer(selection=SCORERS["infllm"]), layer(selection=scorer)
    _, cache = nnx.jit(lambda m, x: m.prefill(x))(both, x[:, :99])
    for t in (99, 100):
        out, cache = step(both, x[:, t], cache, np.array([t, t]))
        right = apply(dense if t < 100 else sparse, x[:, : t + 1])[:, -1]
        np.testing.assert_allclose(out, right, atol=1e-5)


def test_gpt2_takes_infllm_with_its_weights(tmp_path):
    """Up to a length it is the dense model, and beyond that the one with the pairs of the formulas, in float64."""
    scorer, tensors = dataclasses.replace(SCORERS["infllm"], dense_below=80), gpt2_file(length=T)
    made = sl.from_gpt2(write(tmp_path, tensors), patterns=scorer)

    def pairs(q, k):
        blocks = np.zeros((*q.shape[:3], -(-T // scorer.block)), bool)
        for b, head, t in np.ndindex(*q.shape[:3]):
            blocks[b, head, t, [*selected_blocks(scorer, q[b].swapaxes(0, 1), k[b].swapaxes(0, 1), t, head)]] = True
        return blocks.repeat(scorer.block, axis=3)[..., :T] & np.tri(T, dtype=bool)

    few, dense = TOKENS[:, :80], np.tri(T, dtype=bool)
    np.testing.assert_allclose(apply(made, few), gpt2(tensors, few, [dense[:80, :80]] * 2), atol=5e-5)
    right = gpt2(tensors, TOKENS, [pairs] * 2)
    np.testing.assert_allclose(apply(made, TOKENS), right, atol=5e-5)
    assert np.abs(right - gpt2(tensors, TOKENS, [dense] * 2)).max() > 0.1


@pytest.mark.parametrize("name", SCORERS)
def test_bfloat16_selects_by_rounded_means_and_attends_as_float32_does(name):
    """What rounding may change, of tokens that choose, is twice what it changes of dense attention."""
    scorer, x = SCORERS[name], jnp.asarray(inputs(2, T, 32), jnp.bfloat16)
    narrow, wide = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rope_theta": None}, {"rope_theta": None}
    made, half, whole = layer(selection=scorer, **narrow), layer(**narrow), layer(**wide)
    made.eval()
    nnx.update(half, {of: nnx.state(getattr(made, of)) for of in ("query", "key", "value", "out")})
    nnx.update(whole, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(half)))
    asking, asked = (made.index_query, made.index_key) if name == "msa" else (made.query, made.key)
    q, k = asking(x), asked(x)
    picked, (q, k) = select(scorer, q, k), (y.astype(jnp.float32) for y in (q, k))
    means = scorer.pool(k).astype(jnp.bfloat16).astype(jnp.float32)
    right = compiled(lambda *x: scorer.select(*x[:2], pooled=x[2]))(q, k, means)
    np.testing.assert_array_equal(np.sort(picked.ids, axis=-1), np.sort(right.ids, axis=-1))

    def rounding(actual, right):
        assert actual.dtype == jnp.bfloat16
        actual, right = (y.astype(jnp.float32)[:, scorer.count * scorer.block :] for y in (actual, right))
        return jnp.abs(actual - right).max() / jnp.abs(right).max()

    attended = nnx.jit(lambda made, x, picked: made(x, selection=picked))(whole, x.astype(jnp.float32), picked)
    assert rounding(apply(made, x), attended) < 2 * rounding(apply(half, x), apply(whole, x.astype(jnp.float32)))


# --- what MSA's index learns -----------------------------------------------------------------------------------------


def turned(x, theta=100.0):
    """Rotary embeddings of [B, T, heads, H], by complex numbers."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], -1)


def exact_msa(kernels, parameters, x, allowed):
    """(Loss of the index, output) of MSA by its formulas, dense: kernels are the index's, allowed is [B, T, K, S]."""

    def projected(kernel, bias=0.0):
        return jnp.einsum("btf,fnh->btnh", x, kernel) + bias

    q, k, v = (projected(**parameters[name]) for name in ("query", "key", "value"))
    (q, k), groups = map(turned, (q, k)), k.shape[2]
    logits = jnp.einsum("btngh,bsnh->btngs", q.reshape(*q.shape[:2], groups, -1, q.shape[3]), k) / np.sqrt(q.shape[3])
    weights = jax.nn.softmax(jnp.where(allowed[:, :, :, None], logits, -jnp.inf), -1)
    attended = jnp.einsum("btngs,bsnh->btngh", weights, v).reshape(q.shape)
    out = jnp.einsum("btnh,nhf->btf", attended, parameters["out"]["kernel"]) + parameters["out"]["bias"]
    index_query, index_key = (turned(projected(kernel)) for kernel in kernels)
    scores = jnp.einsum("btnh,bsh->btns", index_query, index_key[:, :, 0]) / np.sqrt(index_query.shape[3])
    log_q = jax.nn.log_softmax(jnp.where(allowed, scores, -jnp.inf), -1)
    return -(weights.mean(3) * jnp.where(allowed, log_q, 0)).sum(-1).mean(), out


@pytest.mark.parametrize(
    ("options", "kv_heads"),
    [({}, 2), ({"dense_below": 500}, 1), ({"block": 32, "count": 2}, 4)],
    ids=["sparse", "dense warm-up, of one key head", "larger blocks, as many key heads"],
)
def test_the_output_the_loss_of_the_index_and_its_gradient_are_those_of_the_formulas(options, kv_heads):
    scorer = dataclasses.replace(SCORERS["msa"], index_size=8, **options)
    made, x = layer(selection=scorer, rope_theta=100.0, num_kv_heads=kv_heads), inputs(2, T, 32)
    segments = np.tile(np.arange(T) // 70, (2, 1))

    def loss(made):
        out = made(x, segment_ids=jnp.asarray(segments))
        return index_loss(made) + 0 * out.sum(), out

    (actual, out), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(made)
    with jax.enable_x64(True):
        parameters = nnx.to_pure_dict(nnx.state(made, nnx.Param))
        x, parameters = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, parameters))
        kernels = [parameters[name]["kernel"] for name in ("index_query", "index_key")]
        i, j = (np.asarray(turned(np.einsum("btf,fnh->btnh", x, kernel))) for kernel in kernels)
        allowed = np.zeros((2, T, kv_heads, T), bool)
        for b, t, head in np.ndindex(2, T, kv_heads):
            blocks = range(T) if scorer.dense_below else selected_blocks(scorer, i[b], j[b], t, head, segments[b])
            allowed[b, t, head, : t + 1] = np.isin(np.arange(t + 1) // scorer.block, [*blocks])
        allowed &= (segments[:, :, None] == segments[:, None])[:, :, None]
        formula = compiled(jax.value_and_grad(lambda *p: exact_msa(*p, x, allowed), has_aux=True))
        (right, attended), exact = jax.tree.map(np.asarray, formula(kernels, parameters))
    assert abs(float(actual) - right) < 1e-5 * right
    np.testing.assert_allclose(out, attended, atol=2e-5 * np.abs(attended).max())
    for name, g in zip(("index_query", "index_key"), exact, strict=True):
        np.testing.assert_allclose(gradients[name]["kernel"][...], g, atol=2e-5 * np.abs(g).max())
    others = [x for path, x in nnx.to_flat_state(gradients) if not path[0].startswith("index")]
    assert len(others) == 8 and all((x[...] == 0).all() for x in others), "nothing else learns from it"


def test_the_loss_of_the_index_is_computed_in_training_only():
    made, x = layer(selection=SCORERS["msa"]), jnp.ones((1, T, 32))
    made.eval()
    apply(made, x)
    assert index_loss(made) == 0
    made.train()
    apply(made, x)
    assert index_loss(made) > 0
    of_linen = linen.SparseSelfAttention(4, pattern=SCORERS["msa"], seq_len=T, num_kv_heads=2, rope_theta=1e4)
    params = {"params": nnx.to_pure_dict(nnx.state(made, nnx.Param))}
    _, state = compiled(functools.partial(of_linen.apply, mutable=["losses"]))(params, x)
    np.testing.assert_allclose(state["losses"]["index"][0], index_loss(made), rtol=1e-5)
    assert jax.eval_shape(of_linen.apply, params, x).shape == x.shape
