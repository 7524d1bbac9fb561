"""Chunked prefill gives the results and the cache of a prompt that is read at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops.chunked_prefill import attend_chunk
from tests.ops.decoding.test_decode import BIAS, CASES, HV, WHOLE, B, N, T, arrays, empty, reference

# Tokens of a chunk: they divide 70 or not, are a whole number of strides or not, more than a ring holds or fewer.
CHUNKS = {
    "sliding_window": 35,
    "sparse_transformer_fixed": 26,
    "bigbird": 26,
    "array": 35,
    "mask_mod": 26,
    "differs by head": 35,
    "empty rows": 26,
    "heads without keys": 35,
    "four parts": 26,
    "every second key": 9,
    "one choice": 35,
    "by query head": 26,
    "heads in turn": 26,
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_equal_the_whole_prompt(name):
    """Sequences end before, in and behind chunks; one is empty."""
    mask, kv_heads, choosing, block, _ = WHOLE.get(name, (CASES.get(name), 4, 0, 16, 1))
    ids = np.random.default_rng(1).integers(-1, -(-T // block), (B, T, choosing, 4))
    lengths, size = jnp.array([0, 37, T]), CHUNKS[name]
    options = {"sinks": jnp.linspace(-1, 1, N), "logits_soft_cap": 5.0, "scale": 0.7, "bias": BIAS}

    def selection_of(start, end):  # of blocks that have begun, which are all that these queries may see
        own = ids[:, start:end]
        return sl.Selection(np.where(own * block < end, own, -1), block=block) if choosing else None

    @jax.jit
    def run(q, k, v):
        fresh, outs = empty(mask, num_kv_heads=kv_heads, max_step=3), []
        cache = fresh
        for start in range(0, T, size):
            end = min(T, start + size)
            own = [x[:, start:end] for x in (q, k, v)]
            before, cache = cache, cache.filled(*own[1:], jnp.minimum(lengths, end), start=start)
            given = options | {"selection": selection_of(start, end), "implementation": "reference"}
            outs.append(attend_chunk(before, cache, *own, start, **given))
        want = reference(q, k, v, mask, selection=selection_of(0, T), **options)
        return jnp.concatenate(outs, axis=1), want, cache, fresh.filled(k, v, lengths)

    out, want, cache, whole = run(*arrays(heads=(N, kv_heads, kv_heads)))
    assert out.shape == (B, T, N, HV)
    valid = (np.arange(T) < lengths[:, None])[..., None, None]
    np.testing.assert_allclose(np.where(valid, out, 0), np.where(valid, want, 0), atol=2e-6)
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
