"""Order ids in the layers of NNX, Linen and Haiku, in blocks and models, in prompts and the steps after them."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import haiku, linen

T, F, N = 24, 16, 2
X = np.random.default_rng(0).standard_normal((2, T, F)).astype(np.float32)
PREFIXES = np.array([13, 5])
ORDER = np.asarray(sl.prefix_order(PREFIXES, T))
ALLOWED = ORDER[:, None, :] <= ORDER[:, :, None]


def by_row(layer_of_mask, x=X):
    """A layer with the pairs of each batch entry as its mask."""
    return np.concatenate([layer_of_mask(allowed)(x[i : i + 1]) for i, allowed in enumerate(ALLOWED)])


def close(ours, wanted):
    np.testing.assert_allclose(ours, wanted, atol=2e-5)


def nnx_layer(pattern=None, **options):
    pattern = sl.Full() if pattern is None else pattern
    return sl.SparseSelfAttention(N, F, pattern=pattern, seq_len=T, rope_theta=1e4, rngs=nnx.Rngs(0), **options)


def block(pattern=None, **options):
    pattern = sl.Full() if pattern is None else pattern
    options = {"num_heads": N, "seq_len": T, "rngs": nnx.Rngs(0)} | options
    return sl.SparseTransformerBlock(features=F, pattern=pattern, **options)


def model(pattern=None, **options):
    pattern = sl.Full() if pattern is None else pattern
    options = {
        "num_layers": 2,
        "num_heads": N,
        "seq_len": T,
        "features": F,
        "causal": False,
        "rngs": nnx.Rngs(0),
    } | options
    return sl.SparseTransformer(vocab_size=11, patterns=pattern, **options)


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [nnx_layer, block, functools.partial(block, remat=True)])
def test_nnx(make):
    close(make()(X, order_ids=ORDER), by_row(make))


def test_linen():
    def layer(pattern):
        return linen.SparseSelfAttention(N, pattern=pattern, seq_len=T)

    def linen_block(pattern):
        return linen.SparseTransformerBlock(features=F, num_heads=N, pattern=pattern, seq_len=T)

    for make in (layer, linen_block):
        variables = make(sl.Full()).init(jax.random.key(0), X)
        by_order = make(sl.Full()).apply(variables, X, order_ids=ORDER)
        close(by_order, by_row(lambda mask, make=make, v=variables: functools.partial(make(mask).apply, v)))


def test_haiku():
    def layer(pattern):
        return haiku.SparseSelfAttention(N, F // N, pattern=pattern, seq_len=T)

    def haiku_block(pattern):
        return haiku.SparseTransformerBlock(features=F, num_heads=N, pattern=pattern, seq_len=T)

    for make in (layer, haiku_block):
        call = hk.without_apply_rng(hk.transform(lambda x, ids, make=make: make(sl.Full())(x, order_ids=ids)))
        params = call.init(jax.random.key(0), X, ORDER)

        def of_mask(mask, make=make, params=params):
            return functools.partial(hk.without_apply_rng(hk.transform(lambda x: make(mask)(x))).apply, params)

        close(call.apply(params, X, ORDER), by_row(of_mask))


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_cross_attention(library):
    rng = np.random.default_rng(1)
    y, ids = X[:, :17], (rng.integers(0, 5, (2, T)), rng.integers(0, 5, (2, 17)))
    allowed = ids[1][:, None, :] <= ids[0][:, :, None]

    def make(pattern):
        if library == "nnx":
            return sl.SparseCrossAttention(N, F, pattern=pattern, q_len=T, kv_len=17, rngs=nnx.Rngs(0))
        layer = linen.SparseCrossAttention(N, pattern=pattern, q_len=T, kv_len=17)
        return functools.partial(layer.apply, layer.init(jax.random.key(0), X, y))

    rows = [make(allowed[i])(X[i : i + 1], y[i : i + 1]) for i in range(2)]
    close(make(sl.Full())(X, y, order_ids=ids), np.concatenate(rows))


@pytest.mark.parametrize("recompute", [False, True])
def test_attention_fn(recompute):
    q, k, v = (np.random.default_rng(i).standard_normal((2, T, N, 8)).astype(np.float32) for i in range(3))
    fn = sl.make_attention_fn(sl.Full(), T, recompute=recompute)
    close(fn(q, k, v, order_ids=ORDER), sl.block_sparse_attention(q, k, v, sl.Full(), order_ids=ORDER))
    layer = nnx.MultiHeadAttention(
        N, F, attention_fn=functools.partial(fn, order_ids=ORDER), decode=False, rngs=nnx.Rngs(0)
    )
    dense = nnx.MultiHeadAttention(N, F, decode=False, rngs=nnx.Rngs(0))
    close(layer(X), dense(X, mask=ALLOWED[:, None]))
    valid = np.arange(T) < 20
    padded = fn(q, k, v, mask=np.broadcast_to(valid, (2, 1, 1, T)), order_ids=ORDER)
    ids = np.zeros((2, T), int), np.where(valid, 0, -1)[None].repeat(2, 0)
    close(padded, sl.block_sparse_attention(q, k, v, sl.Full(), order_ids=ORDER, segment_ids=ids))


@pytest.mark.parametrize("options", [{}, {"scan_layers": True}, {"remat": True}])
def test_model_and_its_gradients(options):
    tokens = np.random.default_rng(2).integers(0, 11, (2, T))
    net, dense = model(**options), [model(mask, **options) for mask in ALLOWED]

    @nnx.jit
    def loss(net, tokens, ids):
        return (net(tokens, order_ids=ids) ** 2).sum()

    @nnx.jit
    def loss_of_mask(net, tokens):
        return (net(tokens) ** 2).sum()

    (value, gradient), wanted = nnx.value_and_grad(loss)(net, tokens, ORDER), []
    wanted = [nnx.value_and_grad(loss_of_mask)(net, tokens[i : i + 1]) for i, net in enumerate(dense)]
    np.testing.assert_allclose(value, sum(x for x, _ in wanted), rtol=1e-5)
    sums = jax.tree.map(lambda *x: sum(x), *(nnx.to_pure_dict(x) for _, x in wanted))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), nnx.to_pure_dict(gradient), sums)


def test_native_sparse_attention_refuses_them():
    layer = sl.NativeSparseAttention(N, F, pattern=sl.NSA(), seq_len=T, rngs=nnx.Rngs(0))
    for call in (layer, layer.prefill):
        with pytest.raises(NotImplementedError, match=r"order_ids must be left out; SparseSelfAttention takes them"):
            call(X, order_ids=ORDER)


# --- scorers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["moba", "msa", "infllm", "nsa"])
def test_scorers_select_no_block_that_no_query_may_see(name):
    """Ids that fall hide all earlier tokens; ids that rise hide none."""
    scorer = {
        "moba": sl.MoBA(block=16, count=2),
        "msa": sl.MSA(block=16, count=2),
        "infllm": sl.InfLLM(block=16, pool_size=16, pool_stride=8, count=4, local=2, dense_below=0),
        "nsa": sl.NSA(block=16, pool_size=16, pool_stride=8, count=4, dense_below=0),
    }[name]
    q, k = (np.random.default_rng(i).standard_normal((1, 160, N, 8)).astype(np.float32) for i in range(2))
    blocks = 160 // scorer.block
    rising, falling = np.arange(160)[None], -np.arange(160)[None]
    np.testing.assert_array_equal(scorer.select(q, k, order_ids=rising).ids, scorer.select(q, k).ids)
    ids = np.asarray(scorer.select(q, k, order_ids=falling).ids)
    own = np.arange(160)[None, :, None, None] // scorer.block
    assert ((ids == own) | (ids == -1) | (ids == blocks)).all()
    order = np.random.default_rng(3).integers(0, 40, (1, 160))
    ids = np.asarray(scorer.select(q, k, order_ids=order).ids)
    least = order.reshape(blocks, scorer.block).min(1)
    chosen = (ids >= 0) & (ids < blocks)
    assert (least[np.where(chosen, ids, 0)] <= order[0][None, :, None, None])[chosen].all()


def test_a_hidden_key_does_not_count_in_a_selection():
    q, k, v = (np.random.default_rng(i).standard_normal((1, 128, 2, 16)).astype(np.float32) for i in range(3))
    order, changed = np.arange(128)[None], k.copy()
    order[0, 5], changed[:, 5] = 10**6, 1000 * changed[:, 5]
    fn = sl.make_attention_fn(sl.MoBA(block=16, count=2), 128)
    ours, theirs = fn(q, k, v, order_ids=order), fn(q, changed, v, order_ids=order)
    np.testing.assert_array_equal(np.delete(ours, 5, axis=1), np.delete(theirs, 5, axis=1))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.int64])
def test_selections_do_not_depend_on_the_dtype_of_ids(dtype):
    q, k, v = (np.random.default_rng(i).standard_normal((1, 128, 2, 16)).astype(np.float32) for i in range(3))
    segments, order = np.where((np.arange(128) >= 16) & (np.arange(128) < 64), -1, 0)[None], np.full((1, 128), 5)
    fn = sl.make_attention_fn(sl.MoBA(block=16, count=3), 128)
    results = [fn(q, k, v, segment_ids=segments, order_ids=order.astype(x)) for x in (dtype, np.int32)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("largest", [5, 2**31 - 1])
def test_scorers_leave_out_padding_and_other_documents(largest):
    q, k = (np.random.default_rng(i).standard_normal((1, 96, 1, 8)).astype(np.float32) for i in range(2))
    scorer, position = sl.MoBA(block=16, count=3), np.arange(96)
    padded = np.where((position >= 16) & (position < 64), -1, 0)[None]
    ids = scorer.select(q, k, padded, order_ids=np.full((1, 96), largest)).ids
    assert not np.isin(ids[0, 64:], [1, 2, 3]).any() and (np.isin(ids[0, 80:], [0, 4, 5])).all()
    # Of the block with two documents, later queries see keys of the second alone, which have ids that are too large.
    segments, order = (
        (position >= 24).astype(int)[None],
        np.where(position < 24, 0, np.where(position < 32, 9, 5))[None],
    )
    ids = scorer.select(q, k, segments, order_ids=order).ids
    assert not (np.asarray(ids[0, 32:]) == 1).any()


def test_scorers_take_an_empty_batch():
    x = np.zeros((0, 128, 2, 16), np.float32)
    fn = sl.make_attention_fn(sl.MoBA(block=16, count=2), 128)
    assert fn(x, x, x, order_ids=np.zeros((0, 128), int)).shape == x.shape


@pytest.mark.parametrize("name", ["order_ids", "segment_ids"])
@pytest.mark.parametrize("make", [block, functools.partial(block, remat=True), nnx_layer])
def test_ids_of_64_bits_are_not_cut_off(make, name):
    ids = np.where(np.arange(T) < 9, 0, 2**32)[None].repeat(2, 0)
    with pytest.raises(ValueError, match=f"{name} must fit into int32, got 0 to 4294967296"):
        make()(X, **{name: ids})
    np.testing.assert_array_equal(make()(X, **{name: ids >> 32}), make()(X, **{name: (ids >> 32).astype(np.int8)}))


def test_a_layer_with_a_scorer():
    """Attention to the selected blocks, within the order of ids."""
    layer = sl.SparseSelfAttention(
        N, F, pattern=sl.Causal(), selection=sl.MoBA(block=16, count=2), seq_len=96, rngs=nnx.Rngs(0)
    )
    x = np.random.default_rng(4).standard_normal((1, 96, F)).astype(np.float32)
    order = np.where(np.arange(96) < 64, 100 - np.arange(96), 200)[None]  # a prefix that sees nothing before it
    out = layer(x, order_ids=order)
    np.testing.assert_allclose(out[:, :64], layer.out(layer.value(x[:, :64])), atol=1e-5)
    assert not np.allclose(out[:, 64:], layer(x)[:, :32])


# --- prompts and steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [sl.Full(), sl.Window(6, 20), sl.Causal()])
def test_steps_after_prompts_see_all_before(pattern):
    layer, lengths = nnx_layer(pattern), np.array([15, 9])
    dense = np.stack([pattern.dense(T)] * 2)
    order = np.asarray(sl.prefix_order(lengths, T))
    whole = np.concatenate(
        [nnx_layer(dense[i] & (order[i][None] <= order[i][:, None]))(X[i : i + 1]) for i in range(2)]
    )
    out, cache = layer.prefill(X[:, :15], lengths, order_ids=order[:, :15])
    for i, length in enumerate(lengths):
        close(out[i, :length], whole[i, :length])
    for step in range(5):
        position = lengths + step
        out, cache = layer.decode_step(X[np.arange(2), position], cache, position)
        close(out, whole[np.arange(2), position])


def test_models_read_prompts_by_order():
    net, tokens = model(), np.random.default_rng(3).integers(0, 11, (2, T))
    order = np.asarray(sl.prefix_order(np.array([15, 15]), T))
    wanted = net(tokens, order_ids=order)
    logits, caches = net.prefill(tokens[:, :15], order_ids=order[:, :15])
    close(logits, wanted[:, 14])
    for position in range(15, 20):
        logits, caches = net.decode_step(tokens[:, position], caches, np.full(2, position))
        close(logits, wanted[:, position])


def test_prompts_need_ids_or_a_causal_pattern():
    with pytest.raises(ValueError, match="causal"):
        nnx_layer().prefill(X)
    with pytest.raises(NotImplementedError, match="order_ids need whole prompts in one call of prefill, got a chunk"):
        nnx_layer().prefill(X[:, :8], order_ids=ORDER[:, :8], total=T)
    with pytest.raises(NotImplementedError, match="leave start, total and chunk out"):
        model().prefill(np.zeros((2, T), int), chunk=8, order_ids=ORDER)
    with pytest.raises(ValueError, match=r"order_ids must have one id a token, \(2, 24\), got shape \(2, 8\)"):
        model().prefill(np.zeros((2, T), int), order_ids=ORDER[:, :8])


def test_linen_reads_prompts():
    layer = linen.SparseSelfAttention(N, pattern=sl.Full(), seq_len=T)
    variables = layer.init(jax.random.key(0), X)
    out, cache = layer.apply(variables, X[:, :15], order_ids=ORDER[:, :15], method="prefill")
    wanted = layer.apply(variables, X, order_ids=ORDER)
    close(out, wanted[:, :15])
    out, _ = layer.apply(variables, X[:, 15], cache, jnp.full(2, 15), method="decode_step")
    close(out, wanted[:, 15])


def test_generate():
    """Prompts that see themselves whole, padded on either side, against steps of one token by the whole model."""
    net, lengths = model(), np.array([9, 4])
    tokens = np.random.default_rng(3).integers(1, 11, (2, 9))
    order = np.asarray(sl.prefix_order(lengths, T))
    result = sl.generate(net, tokens, 5, lengths=lengths, order_ids=order[:, :9])
    texts = np.zeros((2, T), int)
    texts[:, :9] = np.where(np.arange(9) < lengths[:, None], tokens, 0)
    for count in range(5):
        logits = np.asarray(net(texts, order_ids=order))
        position = lengths + count
        texts[np.arange(2), position] = logits[np.arange(2), position - 1].argmax(-1)
        np.testing.assert_array_equal(result[:, count], texts[np.arange(2), position])
    padded = [np.stack([np.roll(x[i, :9], 9 - n) for i, n in enumerate(lengths)]) for x in (tokens, order)]
    left = sl.generate(net, padded[0], 5, lengths=lengths, padding_side="left", order_ids=padded[1])
    np.testing.assert_array_equal(left, result)
    assert sl.generate(net, tokens[:1], 2, order_ids=order[:1, :9], on_tokens=lambda _: None).shape == (1, 2)


def test_generate_refuses_ids_of_another_shape_or_model():
    prompts = np.zeros((1, 9), int)
    with pytest.raises(ValueError, match=r"order_ids must have one id a token, \(1, 9\), got shape \(1, 8\)"):
        sl.generate(model(), prompts, 2, order_ids=np.zeros((1, 8), int))

    with pytest.raises(ValueError, match="order_ids must fit into int32, got 4294967296 to 4294967296"):
        sl.generate(model(), prompts, 2, order_ids=np.full((1, 9), 2**32))

    class ModelWithoutOrderIds:
        def prefill(self, tokens, lengths): ...

        def decode_step(self, tokens, caches, position): ...

    with pytest.raises(ValueError, match="order_ids must be None for a model whose prefill has no argument order_ids"):
        sl.generate(ModelWithoutOrderIds(), prompts, 2, order_ids=prompts)
