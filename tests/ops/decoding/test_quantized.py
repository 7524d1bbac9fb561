"""Caches with keys and values in 8 bits: what they hold, what steps compute from it, by XLA and by the kernel."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
import sparse_layers.haiku
from sparse_layers import linen
from sparse_layers.ops.decoding import fused
from sparse_layers.ops.kernels.decode_gpu import decode
from sparse_layers.ops.kernels.quantized import QuantizedRows, dequantize, quantize
from tests.arrays import inputs, perturbed

B, T, N, K, H = 2, 48, 4, 2, 16
DTYPES = ["int8", "float8_e4m3fn"]
OPTIONS = {"sinks": jnp.linspace(-1, 1, N), "logits_soft_cap": 5.0, "scale": 0.7}
MASKS = {
    "causal": sl.Causal(),
    "strided": sl.Causal() & sl.Strided(4),
    "array": np.tril(np.random.default_rng(3).random((T, T)) < 0.4) | np.eye(T, dtype=bool),
    "heads": (sl.Causal(), sl.Causal() & ~sl.Window(3)),
}


def exact(mask, q, k, v):
    """Attention of all tokens in float64, [B, T, N, H]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    masks = sl.as_masks(mask)
    allowed = np.stack([masks[h % len(masks)].dense(T) for h in range(N)], axis=1)[None]
    cap = OPTIONS["logits_soft_cap"]
    logits = cap * np.tanh(OPTIONS["scale"] / cap * np.einsum("btnh,bsnh->btns", q, k))
    weights = np.where(allowed, np.exp(logits), 0)
    total = weights.sum(-1) + np.exp(np.asarray(OPTIONS["sinks"], np.float64))
    return np.einsum("btns,bsnh->btnh", weights, v) / total[..., None]


def arrays(dtype=jnp.float32):
    # Rows of very different sizes, a row of zeros, a large element.
    rng = np.random.default_rng(0)
    q, k, v = (inputs(B, T, n, H, seed=n + i) for i, n in enumerate((N, K, K)))
    k, v = k * rng.lognormal(0, 1, (B, T, K, 1)), v * rng.lognormal(0, 3, (B, T, K, 1))
    v[0, 3] = 0
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def empty(mask, cache_dtype, dtype=jnp.float32, **options):
    sizes = {"batch": B, "num_heads": N, "num_kv_heads": K, "head_size": H}
    return sl.KVCache.empty(mask, T, cache_dtype=cache_dtype, dtype=dtype, **sizes, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_as_near_as_their_dtype_allows(dtype):
    rows = np.concatenate([inputs(500, H) * 10.0 ** np.linspace(-30, 30, 500)[:, None], np.zeros((1, H))])
    near = np.asarray(dequantize(quantize(jnp.asarray(rows, jnp.float32), dtype), jnp.float32), np.float64)
    largest = np.abs(rows).max(-1, keepdims=True)
    error = np.abs(near - rows)
    if dtype == "int8":
        assert (error <= largest / 254 * (1 + 1e-5)).all() and error.max() > 0
    else:  # three bits of mantissa; below 2 ** -6 of 448 the steps are 2 ** -9 of it
        assert (error <= np.maximum(np.abs(rows) / 16, largest / 448 / 1024) * (1 + 1e-5)).all()
    np.testing.assert_allclose(np.abs(near).max(-1, keepdims=True), largest, rtol=1e-6)


def test_what_is_not_finite_stays_so():
    rows = dequantize(quantize(jnp.array([[1.0, jnp.nan], [jnp.inf, 1.0]]), "int8"), jnp.float32)
    assert not jnp.isfinite(rows).any()


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_steps_attend_to_the_rows_of_8_bits(name, dtype, kernel, monkeypatch):
    if kernel:
        pytest.importorskip("triton", reason="needs triton: pip install triton")
        monkeypatch.setattr(fused, "implementation_order", lambda _: ("triton",))
        monkeypatch.setattr(fused, "has_local_arrays", lambda: True)
        monkeypatch.setattr(decode, "number_of_splits", lambda *_: 2)
    q, k, v = arrays()
    start = np.array([0, T - 4])

    @jax.jit
    def run(q, k, v):
        cache = empty(MASKS[name], dtype).filled(k, v, start)
        outs = []
        for i in range(4):
            position = jnp.asarray(start + i)
            token = (x[np.arange(B), position] for x in (q, k, v))
            out, cache = cache.step(*token, position, **OPTIONS)
            outs.append(out)
        return jnp.stack(outs, axis=1)

    near = (np.asarray(dequantize(quantize(x, dtype), jnp.float32), np.float64) for x in (k, v))
    expected = exact(MASKS[name], q, *near)[np.arange(B)[:, None], start[:, None] + np.arange(4)]
    np.testing.assert_allclose(run(q, k, v), expected, atol=2e-5 * np.abs(expected).max(), rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_is_what_steps_make(dtype):
    _, k, v = arrays(jnp.bfloat16)

    @jax.jit
    def run(k, v):
        filled = empty(sl.Causal(), dtype, jnp.bfloat16).filled(k[:, :20], v[:, :20])
        chunks = empty(sl.Causal(), dtype, jnp.bfloat16).filled(k[:, :8], v[:, :8])
        chunks = chunks.filled(k[:, 8:20], v[:, 8:20], start=8)
        steps = empty(sl.Causal(), dtype, jnp.bfloat16)
        for i in range(20):
            steps = steps.written(k[:, i], v[:, i], jnp.full(B, i))
        return filled, chunks, steps

    filled, *others = run(k, v)
    assert isinstance(filled.keys[0], QuantizedRows) and filled.keys[0].dtype == dtype
    for cache in others:
        jax.tree.map(np.testing.assert_array_equal, cache, filled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scorers_pool_keys_of_8_bits(dtype):
    """As they pool keys of a plain cache with the same rows, so that both select the same blocks."""
    q, k, v = arrays()
    k, v = (dequantize(quantize(x, dtype), jnp.float32) for x in (k, v))

    @jax.jit
    def run(cache):
        cache = cache.filled(k[:, :20], v[:, :20]).filled(k[:, 20:35], v[:, 20:35], start=20)  # inside of a block
        outs = []
        for i in range(35, T):
            out, cache = cache.step(q[:, i], k[:, i], v[:, i], jnp.full(B, i))
            outs.append(out)
        return jnp.stack(outs), cache.pooled

    small, plain = (run(empty(sl.MoBA(block=16, count=2), cache_dtype)) for cache_dtype in (dtype, None))
    for actual, expected in zip(small, plain, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_bytes():
    plain, small = empty(sl.Causal(), None, jnp.bfloat16), empty(sl.Causal(), "int8", jnp.bfloat16)
    assert plain.nbytes == 2 * B * K * T * H * 2 and small.nbytes == 2 * B * K * T * (H + 4)
    # Ring buffers and summary columns keep their dtype.
    for mask in (sl.Causal() & sl.Window(5), sl.Causal() & sl.Columns(8, 6)):
        jax.tree.map(np.testing.assert_array_equal, empty(mask, "int8").keys, empty(mask, None).keys)


LAYER = {"num_kv_heads": K, "rope_theta": 100.0, "seq_len": T}


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_read_chunks_and_steps_from_8_bits(dtype):
    layer = sl.SparseSelfAttention(N, 32, pattern="causal", cache_dtype=dtype, **LAYER, rngs=nnx.Rngs(0))
    nnx.update(layer, perturbed(nnx.state(layer, nnx.Param)))
    x = jnp.asarray(inputs(B, T, 32))

    @nnx.jit
    def run(layer, x):
        whole, cache = layer.prefill(x[:, :40])
        chunked, chunk_cache = None, None
        for start in range(0, 40, 10):
            chunked, chunk_cache = layer.prefill(x[:, start : start + 10], cache=chunk_cache, start=start)
        outs = []
        for i in range(40, T):
            out, cache = layer.decode_step(x[:, i], cache, jnp.full(B, i))
            outs.append(out)
        return layer(x), whole, chunked, jnp.stack(outs, axis=1), chunk_cache

    out, whole, chunked, steps, cache = run(layer, x)
    assert isinstance(cache.values[0], QuantizedRows)
    np.testing.assert_allclose(whole, out[:, :40], atol=1e-5)  # prompts read their own keys
    # Each weight and value changes by the error of a row at most, here a few percent of the largest output.
    limit = (0.02 if dtype == "int8" else 0.12) * float(jnp.abs(out).max())
    for near, exactly in ((chunked, out[:, 30:40]), (steps, out[:, 40:])):
        assert 0 < float(jnp.abs(near - exactly).max()) < limit


def test_native_sparse_attention_reads_selected_blocks_from_8_bits():
    """Windows, by whose keys blocks are selected, and the sliding window keep their dtype."""
    nsa = sl.NSA(block=16, count=2, local=1, pool_size=8, pool_stride=4, sliding=8)
    layer = sl.NativeSparseAttention(N, 32, pattern=nsa, cache_dtype="int8", **LAYER, rngs=nnx.Rngs(0))
    nnx.update(layer, perturbed(nnx.state(layer, nnx.Param)))
    x = jnp.asarray(inputs(B, T, 32))

    @nnx.jit
    def run(layer, x):
        _, cache = layer.prefill(x[:, : T - 2])
        outs = []
        for i in range(T - 2, T):
            out, cache = layer.decode_step(x[:, i], cache, jnp.full(B, i))
            outs.append(out)
        return layer(x)[:, -2:], jnp.stack(outs, axis=1), cache

    out, steps, cache = run(layer, x)
    stores = [type(part.keys[0]).__name__ for part in (cache.windows, cache.blocks, cache.sliding)]
    assert stores == ["ArrayImpl", "QuantizedRows", "ArrayImpl"]
    assert 0 < float(jnp.abs(steps - out).max()) < 0.02 * float(jnp.abs(out).max())


def test_a_model_generates_and_its_caches_are_small():
    model = sl.SparseTransformer(
        11, N, 32, 2, patterns=("causal", "sliding_window:window=8"), seq_len=T, cache_dtype="int8", rngs=nnx.Rngs(0)
    )
    _, caches = nnx.jit(lambda model: model.prefill(jnp.zeros((1, 8), int)))(model)
    assert [type(cache.keys[0]).__name__ for cache in caches] == ["QuantizedRows", "ArrayImpl"]
    assert sl.generate(model, [[1, 2]], 4).shape == (1, 4)


def test_caches_are_exported(tmp_path):
    cache = empty(sl.Causal(), "int8")
    exported = jax.export.export(jax.jit(lambda cache: cache.nbytes + cache.keys[0].scale.sum()))(cache)
    again = jax.export.deserialize(exported.serialize())
    assert float(again.call(cache)) == cache.nbytes


def test_linen_and_haiku_have_it_too():
    x = jnp.asarray(inputs(B, 8, 32))
    shared = {"pattern": "causal", "seq_len": T, "cache_dtype": "int8"}
    modules = [linen.SparseSelfAttention(N, **shared), linen.SparseTransformerBlock(N, 32, **shared)]
    for module in modules:
        (_, cache), _ = jax.jit(lambda key, module=module: module.init_with_output(key, x, method="prefill"))(
            jax.random.key(0)
        )
        assert isinstance(cache.keys[0], QuantizedRows)
    for make in (
        lambda: sparse_layers.haiku.SparseSelfAttention(N, 8, **shared),
        lambda: sparse_layers.haiku.SparseTransformerBlock(N, 32, **shared),
    ):
        transformed = hk.transform(lambda x, make=make: make().prefill(x))
        params = jax.jit(transformed.init)(jax.random.key(0), x)
        _, cache = jax.jit(transformed.apply)(params, None, x)
        assert isinstance(cache.keys[0], QuantizedRows)
