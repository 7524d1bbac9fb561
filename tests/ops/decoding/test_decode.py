"""Decoding steps equal the full forward in their row, for every causal pattern, and read that row only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.decoding import cache_parts
from sparse_layers.ops.decoding.cache_parts import plan_cache_parts
from tests.arrays import inputs, strict_promotion
from tests.ops.cases import BOTH_WAYS, TINY
from tests.programs import USUAL, on_devices

T, N, K, H, HV, B = 70, 12, 6, 8, 4, 3
RNG = np.random.default_rng(0)
BIAS = sl.DistanceBias(np.sin(np.arange(21.0 * N, dtype=np.float32)).reshape(N, 21), 18, sl.alibi(N).slopes)
CASES = {name: sl.preset(name, **TINY[name]) for name in sl.presets() if name not in BOTH_WAYS}
CASES |= {
    "array": sl.Array(np.tril(RNG.random((T, T)) < 0.2)),
    "array and stride": sl.Causal() & sl.Strided(5) & sl.Array(RNG.random((T, T)) < 0.5),
    "array of full blocks": sl.Array(np.kron(np.eye(5, k=-1), np.ones((16, 16))).astype(bool)[:T, :T]),
    "mask_mod": sl.from_mask_mod(lambda b, h, q, k: (q >= k) & ((q - k) % 7 < 2)),
    "differs by head": (sl.Window(4), sl.Causal() & sl.Strided(6), sl.Causal() & sl.Random(2)),
    "heads without keys": (
        sl.Empty(),
        sl.Window(3),
        sl.Array(np.zeros((T, T), bool)),
        sl.from_mask_mod(lambda b, h, q, k: (q < 0) & (k < 0)),
    ),
    # Queries without keys meet each kind of store: gathered rows, a ring, residues, a table with tiles.
    "empty rows": (
        sl.Causal() & sl.Columns(9, 4, 6),
        sl.Window(3) & ~sl.Columns(9, 4, 9).T,
        sl.Causal() & sl.Strided(5) & ~sl.Window(4),
        sl.Array(np.tril(RNG.random((T, T)) < 0.02)),
    ),
    "four parts": sl.Causal() & (sl.Window(5) | sl.Strided(9) | sl.Columns(8, 6) | sl.Global(3)),
    "rows of a prefix": sl.Causal() & sl.Prefix(9).T,
    "two strides": sl.Causal() & (sl.Strided(4) | sl.Strided(6)),
    "every second key": sl.Causal() & sl.Window(13) & sl.Strided(2),
    "blocks of random keys": sl.Causal() & sl.Blocks(sl.Window(0) | sl.Random(1, seed=3), 4),
}


def arrays(dtype=jnp.float32, heads=(N, K, K)):
    shapes = [(B, T, n, h) for n, h in zip(heads, (H, H, HV), strict=True)]
    return [jnp.asarray(inputs(*shape, seed=seed).astype(dtype)) for seed, shape in enumerate(shapes)]


def compared(mask, arrays, start, prompt=None, exactly=False, chosen=None, **options):
    """(steps, reference), both [T, B, N, Hv]: each sequence goes from its start to the end, and stays there.

    With ``exactly``, the reference computes in float32, whatever the arrays are. Of the selection ``chosen``, a step
    takes its own row.
    """

    @jax.jit
    def run(q, k, v, start, prompt):
        batch, position = jnp.arange(B), jnp.minimum(start[None] + jnp.arange(T)[:, None], T - 1)
        cache = empty(mask, q.dtype, k.shape[2])
        cache = cache if prompt is None else cache.filled(*prompt, start)

        def step(cache, at):
            own = jax.tree.map(lambda ids: ids[batch, at // chosen.granularity][:, None], chosen)
            out, cache = cache.step(q[batch, at], k[batch, at], v[batch, at], at, selection=own, **options)
            return cache, out

        exact = [x.astype(jnp.float32 if exactly else x.dtype) for x in (q, k, v)]
        want = reference(*exact, mask, selection=chosen, **options)
        return jax.lax.scan(step, cache, position)[1], want[batch, position]

    with strict_promotion():
        return run(*arrays, start, prompt)


def empty(mask, dtype=jnp.float32, num_kv_heads=K, max_step=1):
    sizes = {"batch": B, "num_heads": N, "num_kv_heads": num_kv_heads, "head_size": H, "value_size": HV}
    return sl.KVCache.empty(mask, T, **sizes, dtype=dtype, max_step=max_step)


def reference(q, k, v, mask, **options):
    return sl.block_sparse_attention(q, k, v, mask, implementation="reference", **options)


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_the_full_forward(name):
    """Unequal prompts, one of them empty: a filled cache and a stepped one give the same rows."""
    mask, (q, k, v) = CASES[name], arrays()
    options = {"sinks": jnp.linspace(-1, 1, N), "logits_soft_cap": 5.0, "scale": 0.7, "bias": BIAS}
    start = np.array([0, T // 3, T - 2])
    # Keys behind a prompt must not count: they are poisoned, with finite numbers.
    padding = np.arange(T)[None, :] >= start[:, None]
    poisoned = [np.where(padding[..., None, None], np.float32(1e6), x) for x in (k, v)]
    out, want = compared(mask, (q, k, v), start, poisoned, **options)
    np.testing.assert_allclose(out, want, atol=2e-6)


WHOLE = {  # mask, key heads, heads that choose, block, granularity; of 12 query heads and 70 tokens
    "one choice": (sl.Causal(), K, 1, 16, 1),
    "by key head": (sl.Causal() & ~sl.Window(3), 4, 4, 32, 16),
    "by query head": (sl.Causal() & ~sl.Columns(9, 4, 6), 4, N, 48, 1),
    "one block": (sl.Causal(), 1, N, 128, 64),
    "heads in turn": ((sl.Causal(), sl.Causal() & ~sl.Window(3), sl.Causal() & ~sl.Columns(9, 4, 6)), 4, 4, 16, 1),
}


@pytest.mark.parametrize("name", WHOLE)
def test_steps_that_choose_blocks_equal_the_full_forward(name):
    """Random selections: some ids are repeated, some are -1, some lie in the future."""
    mask, kv_heads, choosing, block, granularity = WHOLE[name]
    shape = B, -(-T // granularity), choosing, 4
    ids = np.random.default_rng(1).integers(-1, -(-T // block), shape)
    chosen = sl.Selection(ids, block=block, granularity=granularity)
    q, k, v = arrays(heads=(N, kv_heads, kv_heads))
    options = {"sinks": jnp.linspace(-1, 1, N), "logits_soft_cap": 5.0, "scale": 0.7, "bias": BIAS}
    out, want = compared(mask, (q, k, v), jnp.array([0, T // 3, T - 2]), (k, v), chosen=chosen, **options)
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_a_choice_is_a_set_of_blocks_and_nothing_else_is_read():
    q, k, v = arrays()
    ids = np.array([[2, -1, 0, 2], [4, 1, -1, -1], [3, -1, 3, 3]], np.int32)[:, None, None]
    used = (ids[:, 0, 0, :, None] == np.arange(T) // 16).any(1)[..., None, None]
    clean, poisoned = (empty(sl.Causal()).filled(k * x, v * x) for x in (1.0, jnp.where(used, 1, jnp.nan)))

    @jax.jit
    def attend(cache, ids):
        return cache.attend(q[:, -1], jnp.full(B, T - 1), selection=sl.Selection(ids, block=16))

    want = attend(clean, ids)
    np.testing.assert_array_equal(attend(poisoned, ids), want)
    np.testing.assert_array_equal(
        attend(clean, np.where(np.array([0, 0, 0, 1]) > 0, np.sort(ids)[..., -1:], ids)), want
    )
    for number in (5, 2**31 - 1, -2, -(2**31)):  # nobody can see these inside jit
        np.testing.assert_array_equal(attend(clean, np.where(ids < 0, np.int32(number), ids)), want)
    mapped = jax.vmap(attend, (None, 0))(clean, np.stack([ids, ids[::-1]]))
    np.testing.assert_allclose(mapped, [want, attend(clean, ids[::-1])], atol=1e-6)
    np.testing.assert_array_equal(attend(clean, ids[..., :0]), 0)


SEVERAL = ["sliding_window", "sparse_transformer_fixed", "bigbird", "array of full blocks", "differs by head"]
SEVERAL += ["empty rows", "four parts", "every second key"]


@pytest.mark.parametrize("name", [*SEVERAL, "one choice", "by query head", "heads in turn"])
def test_steps_of_several_tokens_and_rollback(name):
    """Steps of 5 drafts, of which 0 to 5 are accepted; the others are rolled back and overwritten."""
    mask, kv_heads, choosing, block, _ = WHOLE.get(name, (CASES.get(name), 4, 0, 16, 1))
    q, k, v = arrays(heads=(N, kv_heads, kv_heads))
    ids = np.random.default_rng(1).integers(-1, -(-T // block), (B, T, choosing, 4))
    actual, want = by_several(mask, (q, k, v), 5, sl.Selection(ids, block=block) if choosing else None)
    np.testing.assert_allclose(actual, want, atol=2e-6)


def test_tokens_are_taken_back_where_a_reach_is_known_roughly(monkeypatch):
    monkeypatch.setattr(cache_parts, "_REACH_ELEMENTS", 0)
    mask = sl.Causal() & sl.Window(21) & ~sl.Window(18)
    assert plan_cache_parts(mask, T, 5)[0].store.rows_per_residue == 48 + 4
    np.testing.assert_allclose(*by_several(mask, arrays(), 5), atol=2e-6)


def by_several(mask, arrays, count, chosen=None):
    """(steps, reference): the accepted results of steps of ``count`` tokens and of one token, in turn."""
    start = np.array([0, T // 3, T - 9])
    right = jnp.asarray(np.random.default_rng(2).integers(0, count + 1, (20, B)))
    options = {"sinks": jnp.linspace(-1, 1, N), "logits_soft_cap": 5.0, "scale": 0.7, "bias": BIAS}

    @jax.jit
    def run(q, k, v):
        batch, want = jnp.arange(B), reference(q, k, v, mask, selection=chosen, **options)
        rows = batch[:, None]
        cache = empty(mask, num_kv_heads=k.shape[2], max_step=count).filled(k, v, start)

        def step(carry, right):
            cache, position = carry
            tokens = jnp.minimum(position, T - count)[:, None] + jnp.arange(count)
            wrong = (jnp.arange(count) >= right[:, None])[..., None, None]
            guesses = (jnp.where(wrong, 1e3, x[rows, tokens]) for x in (k, v))
            own = jax.tree.map(lambda ids: ids[rows, tokens], chosen)
            several, cache = cache.step(q[rows, tokens], *guesses, tokens[:, 0], selection=own, **options)
            at = jnp.minimum(tokens[:, 0] + right, T - 1)
            own = jax.tree.map(lambda ids: ids[batch, at][:, None], chosen)
            one, cache = cache.step(q[batch, at], k[batch, at], v[batch, at], at, selection=own, **options)
            several, expected = (jnp.where(wrong, 0, x) for x in (several, want[rows, tokens]))
            return (cache, at + 1), ((several, one), (expected, want[batch, at]))

        results = jax.lax.scan(step, (cache, jnp.asarray(start)), right)[1]
        return [jnp.concatenate([x.ravel() for x in each]) for each in results]

    return run(*arrays)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", ["differs by head", "fixed", "sparse_transformer_strided"])
def test_grouped_heads(name, kv_heads):
    out, want = compared(CASES[name], arrays(heads=(N, kv_heads, kv_heads)), jnp.zeros(B, jnp.int32))
    np.testing.assert_allclose(out, want, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
    low = arrays(dtype)
    out, want = compared(CASES["sparse_transformer_fixed"], low, jnp.zeros(B, jnp.int32), exactly=True)
    assert out.dtype == dtype
    # Logits are sums of H rounded products, weights and the result are rounded once, all relative to the largest value.
    budget = 4 * float(jnp.finfo(dtype).eps) * np.abs(low[2].astype(jnp.float32)).max()
    assert np.abs(out.astype(jnp.float32) - want).max() < budget


@pytest.mark.parametrize("name", ["sliding_window", "four parts", "array", "bigbird"])
def test_filled_is_what_steps_make(name):
    """Every row with a token is the same in a filled cache and in a stepped one."""
    mask, (_, k, v) = CASES[name], arrays()
    lengths = jnp.array([1, 33, T])

    @jax.jit
    def filled_and_written(k, v):
        def step(cache, position):
            at = jnp.full(B, position)
            new, live = cache.written(k[:, position], v[:, position], at), position < lengths

            def keep_live(new, old):
                return jnp.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            return jax.tree.map(keep_live, new, cache), None

        return empty(mask).filled(k, v, lengths), jax.lax.scan(step, empty(mask), jnp.arange(T))[0]

    filled, cache = filled_and_written(k, v)
    for ours, theirs in zip(filled.keys + filled.values, cache.keys + cache.values, strict=True):
        held = np.asarray(theirs) != 0
        assert held.any()
        np.testing.assert_array_equal(np.asarray(ours)[held], np.asarray(theirs)[held])


READS = {  # keys a step, at 4096 tokens; and rows that are kept
    "all": (4096, 4096),
    "sliding_window:window=512": (512, 512),
    "chunked:chunk=256": (256, 256),
    "sparse_transformer_strided:stride=64": (65 + 64, 65 + 4096),
    "sparse_transformer_fixed:stride=64,summary=4": (64 + 256, 64 + 256),
    "streaming:window=128,sinks=4": (132, 132),
    "longformer:window=128,global_tokens=16": (144, 144),
    "dilated:window=64,dilation=4": (64, 256),
    "strided:local_attn_ctx=64": (64, 4096),
}


@pytest.mark.parametrize("name", READS)
def test_a_step_reads_the_patterns_row(name):
    found = plan_cache_parts(sl.preset(name), 4096)
    reads = sum(part.num_reads for part in found), sum(part.store.num_pages * part.store.page_size for part in found)
    assert reads == READS[name]
    row = int(sl.preset(name).dense(4096).sum(1).max())
    assert reads[0] >= row


@pytest.mark.parametrize("name", ["bigbird:block=64", "logsparse"])
def test_listed_rows_are_few(name):
    """A table lists at most the blocks of 16 keys that one of 16 neighbouring queries sees."""
    allowed = sl.preset(name).dense(4096).reshape(256, 16, 256, 16).any((1, 3)).sum(1).max() * 16
    assert sum(part.num_reads for part in plan_cache_parts(sl.preset(name), 4096)) <= allowed + 128
    assert allowed < 1024


def test_bytes_of_a_step():
    """The compiler's bytes follow the pattern's row, not the length."""

    def bytes_read(name, length):
        cache = jax.eval_shape(lambda: sl.KVCache.empty(sl.preset(name), length, batch=1, num_heads=2, head_size=64))
        token, position = jax.ShapeDtypeStruct((1, 2, 64), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
        # Before fusion: XLA counts the whole operand of a fused gather.
        return jax.jit(sl.KVCache.attend).lower(cache, token, position).cost_analysis()["bytes accessed"]

    window = [bytes_read("sliding_window:window=512", length) for length in (2048, 16384)]
    assert window[1] < 1.01 * window[0]
    assert 30 * bytes_read("sparse_transformer_strided:stride=128", 16384) < bytes_read("all", 16384)
    assert 20 * bytes_read("bigbird", 16384) < bytes_read("all", 16384)


def test_bytes_of_a_step_that_chooses():
    """The compiler's bytes and temporary memory follow the blocks, not the length: the cache is not copied."""
    x, chosen = jnp.ones((1, 2, 64)), sl.Selection(jnp.zeros((1, 1, 2, 4), int), block=64)

    def lowered(method, length, *tokens, **options):
        cache = jax.eval_shape(lambda: sl.KVCache.empty(sl.Causal(), length, batch=1, num_heads=2, head_size=64))
        return jax.jit(method, **options).lower(cache, *tokens, jnp.zeros(1, int), selection=chosen)

    few, many = (lowered(sl.KVCache.attend, length, x).cost_analysis() for length in (2048, 16384))
    assert few["bytes accessed"] == many["bytes accessed"]
    memory = lowered(sl.KVCache.step, 16384, x, x, x, donate_argnums=0).compile(USUAL).memory_analysis()
    read = 2 * 2 * 4 * 64 * x[0, 0].nbytes  # keys and values, heads, blocks, keys of a block
    assert memory.temp_size_in_bytes < 1.1 * read


def test_refusals():
    with pytest.raises(ValueError, match=r"pattern: decoding needs a causal one.*Window\(left=2, right=1\)"):
        sl.KVCache.empty(sl.Window(2, 1), 64, batch=1, num_heads=2, head_size=8)
    make = functools.partial(sl.KVCache.empty, sl.Causal(), batch=2, num_heads=4, head_size=8)
    for name, options in (("seq_len", {"seq_len": 0}), ("batch", {"seq_len": 8, "batch": 0})):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
            make(**options)
    with pytest.raises(ValueError, match=r"num_kv_heads=3 .* must divide num_heads=4"):
        make(8, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"the number of masks, 3, must divide num_heads=4"):
        sl.KVCache.empty([sl.Window(i) for i in range(3)], 8, batch=2, num_heads=4, head_size=8)
    cache, x = make(8), jnp.ones((2, 4, 8))
    with pytest.raises(
        ValueError, match=r"key must be floats of shape \(2, 4, 8\) for this cache, got float32 of \(2, 2, 8\)"
    ):
        cache.step(x, x[:, :2], x, jnp.zeros(2, int))
    with pytest.raises(ValueError, match=r"position must be integers of shape \(2,\)"):
        cache.step(x, x, x, jnp.zeros((), int))
    for position in (-1, 8):
        with pytest.raises(ValueError, match=rf"position must lie in 0..seq_len - 1 = 7, got \[ ?0 +{position}\]"):
            cache.step(x, x, x, jnp.array([0, position]))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lengths": [11, 3]}, ["lengths", "0..10", "11"]),
        ({"lengths": [-1, 3]}, ["lengths", "0..10", "-1"]),
        ({"lengths": [3]}, ["lengths", "(2,)", "(1,)"]),
        ({"lengths": [True, False]}, ["lengths", "integers", "bool"]),
        ({"key": (2, 13, 4, 8)}, ["key", "1..12", "(2, 13, 4, 8)"]),
        ({"key": (2, 10, 3, 8)}, ["key", "(2, 10, 4, 8)", "(2, 10, 3, 8)"]),
        ({"value": (2, 9, 4, 8)}, ["value", "(2, 10, 4, 8)", "(2, 9, 4, 8)"]),
    ],
)
def test_what_does_not_fit_is_not_filled_in(arguments, words):
    cache = sl.KVCache.empty(sl.Causal(), 12, batch=2, num_heads=4, head_size=8)
    shapes = {"key": (2, 10, 4, 8), "value": (2, 10, 4, 8), "lengths": None} | arguments
    with pytest.raises(ValueError) as error:
        cache.filled(jnp.ones(shapes["key"]), jnp.ones(shapes["value"]), shapes["lengths"])
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "options", [{"sinks": jnp.zeros(2)}, {"bias": sl.alibi(2)}, {"logits_soft_cap": -1.0}, {"scale": float("nan")}]
)
def test_options_are_those_of_the_op(options):
    cache, x = sl.KVCache.empty(sl.Causal(), 12, batch=1, num_heads=4, head_size=8), jnp.ones((1, 4, 8))
    with pytest.raises(ValueError, match=next(iter(options))):
        cache.attend(x, jnp.zeros(1, int), **options)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32])
def test_positions_of_any_integer_dtype(dtype):
    mask, (q, k, v) = sl.Causal() & sl.Window(5), arrays()
    cache, at = empty(mask).filled(k[:, :60], v[:, :60], jnp.full(B, 60, dtype)), jnp.full(B, 60, dtype)
    out, _ = cache.step(q[:, 60], k[:, 60], v[:, 60], at)
    np.testing.assert_allclose(out, reference(q, k, v, mask)[:, 60], atol=2e-6)


@pytest.mark.parametrize("name", ["sparse_transformer_fixed", "bigbird", "array"])
def test_nothing_of_the_padding_counts(name):
    mask, (q, k, v) = CASES[name], arrays()
    padding = (np.arange(T) >= 20)[:, None, None]

    @jax.jit
    def run(q, k, v):
        cache = empty(mask).filled(*(jnp.where(padding, jnp.nan, x) for x in (k, v)), jnp.full(B, 20))
        out, _ = cache.step(q[:, 20], k[:, 20], v[:, 20], jnp.full(B, 20))
        return out, reference(q, k, v, mask)[:, 20]

    out, want = run(q, k, v)
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_long_sequences_read_their_row_too():
    """Blocks grow with the length where there are too many; rings and tables still follow the pattern."""
    for mask, most in ((sl.Window(127), 128), (sl.Causal() & (sl.Window(31) | sl.Strided(512)), 32 + 512)):
        assert sum(part.num_reads for part in plan_cache_parts(mask, 1 << 18)) == most
    assert sum(part.num_reads for part in plan_cache_parts(sl.LogSparse(), 1 << 17)) < 400


@pytest.mark.parametrize("axes", ["None, 'x'", "'x'"])
def test_heads_or_sequences_may_lie_on_several_devices(axes):
    """Sharded steps need no collectives: an array's axes stay separate, so each can be sharded."""
    code = f"""
import jax, jax.numpy as jnp, sparse_layers as sl
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec({axes}))
masks = sl.Causal() & sl.Window(63), sl.Causal() & (sl.Window(7) | sl.Strided(16)), sl.Causal()
for mask, chosen in zip(masks, (None, None, sl.Selection(jnp.zeros((4, 1, 4, 2), int), block=16))):
    cache, x = sl.KVCache.empty(mask, 1024, batch=4, num_heads=4, head_size=8), jnp.ones((4, 4, 8))
    cache, x = (jax.tree.map(lambda leaf: jax.device_put(leaf, split), tree) for tree in (cache, x))
    compiled = jax.jit(sl.KVCache.step).lower(cache, x, x, x, jnp.zeros(4, int), selection=chosen).compile()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in compiled.as_text(), collective
"""
    on_devices(4, "-c", code)


def test_a_query_without_keys_gets_0():
    cache, x = (
        sl.KVCache.empty(sl.Causal() & sl.Columns(4, 2), 8, batch=1, num_heads=1, head_size=8),
        jnp.ones((1, 1, 8)),
    )
    out, _ = cache.step(x, x, x, jnp.zeros(1, int))
    np.testing.assert_array_equal(out, 0)


def test_a_cache_shows_its_pattern_and_shapes_whatever_its_leaves():
    cache = sl.KVCache.empty(sl.Causal() & sl.Window(7), 64, batch=2, num_heads=4, num_kv_heads=2, head_size=8)
    start = "KVCache(Causal() & Window(left=7, right=0), 64 tokens, 4 heads on 2 key heads, keys: "
    assert repr(cache) == f"{start}float32[2, 2, 1, 8, 8], values: float32[2, 2, 1, 8, 8])"
    assert repr(jax.tree.map(lambda x: x.ndim, cache)) == f"{start}5, values: 5)"
