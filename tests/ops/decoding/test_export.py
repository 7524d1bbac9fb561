"""Programs of `jax.export` with caches, selections and masks: written here, read and run in a new process."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from tests.arrays import inputs
from tests.programs import on_devices

T, N, K, H = 48, 4, 2, 8
RNG = np.random.default_rng(0)
# One pattern for each store of keys, and for selections.
PATTERNS = {
    "all keys": sl.Causal(),
    "a ring": sl.Causal() & sl.Window(7),
    "a ring for each residue": sl.Causal() & sl.Strided(4),
    "gathered columns and a ring": sl.Causal() & (sl.Window(3) | sl.Columns(8, 6)),
    "a table of blocks": sl.Causal() & sl.Blocks(sl.Window(0) | sl.Random(1, seed=3), 4),
    "a table of tiles": sl.Array(np.tril(RNG.random((T, T)) < 0.4)) | sl.Window(0),
    "a grid": sl.Grid((6, 8), (sl.Causal(), sl.Window(2))),
    "masks by head": (sl.Causal(), sl.Causal() & sl.Window(3)),
    "MoBA": sl.MoBA(block=16, count=2),
    "InfLLM": sl.InfLLM(block=16, count=2, local=1, pool_size=8, pool_stride=4, dense_below=16),
    "MSA": sl.MSA(block=16, count=2, index_size=8),
}
# Runs each program of a file on arrays of the same file, with nothing of this process but the names of classes.
READER = """
import pickle, sys
import jax, numpy as np
import sparse_layers as sl
sl.KVCache, sl.NativeSparseAttention  # whose classes the programs name

for name, (program, arrays, expected) in pickle.load(open(sys.argv[1], "rb")).items():
    program = jax.export.deserialize(program)
    args, kwargs = jax.tree.unflatten(program.in_tree, arrays)
    out = program.call(*args, **kwargs)
    assert jax.tree.structure(out) == program.out_tree, name
    for a, b in zip(jax.tree.leaves(out), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
print("all equal")
"""


def empty(pattern, **options):
    index = {"index_size": 8} if isinstance(pattern, sl.MSA) else {}
    return sl.KVCache.empty(
        pattern, T, batch=2, num_heads=N, num_kv_heads=K, head_size=H, implementation="xla", **index, **options
    )


def prefill(caches, k, v, lengths):
    """Caches by name, after a prompt."""
    index = k[:, :, :1]
    return {
        name: cache.filled(k, v, lengths, **({"index_key": index} if isinstance(cache.selection, sl.MSA) else {}))
        for name, cache in caches.items()
    }


def step(caches, q, k, v, position):
    """The outputs of a step for each cache, and the caches after it."""
    index = {"index": (q[:, :K], k[:, :1])}
    return {
        name: cache.step(q, k, v, position, **(index if isinstance(cache.selection, sl.MSA) else {}))
        for name, cache in caches.items()
    }


def test_programs_run_in_a_new_process(tmp_path):
    arrays = [jnp.asarray(inputs(2, T, n, H, seed=n)) for n in (N, K, K)]
    (q, k, v), lengths = arrays, jnp.array([20, 17])
    caches = {name: empty(pattern) for name, pattern in PATTERNS.items()}
    filled = jax.jit(prefill)(caches, k[:, :20], v[:, :20], lengths)
    layer = sl.NSA(block=16, count=2, local=1, pool_size=8, pool_stride=4, sliding=16)
    nsa = sl.NativeSparseAttention(N, 16, pattern=layer, seq_len=T, num_kv_heads=K, rngs=nnx.Rngs(0))
    x = jnp.asarray(inputs(2, 20, 16))
    _, nsa_cache = jax.jit(lambda x, lengths: nsa.prefill(x, lengths))(x, lengths)
    assert not isinstance(nsa_cache, sl.KVCache)
    ids = jnp.array([[[[0, 1]]], [[[1, -1]]]])
    programs = {
        "prefill": (prefill, (caches, k[:, :20], v[:, :20], lengths)),
        "step": (step, (filled, q[:, 20], k[:, 20], v[:, 20], lengths)),
        "prefill of NSA": (lambda x, lengths: nsa.prefill(x, lengths), (x, lengths)),
        "step of NSA": (lambda x, cache, at: nsa.decode_step(x, cache, at), (x[:, 0], nsa_cache, lengths)),
        "selection": (
            lambda cache, q, at, selection: (cache.attend(q, at, selection=selection), selection),
            (filled["all keys"], q[:, 19], lengths - 1, sl.Selection(ids, block=16)),
        ),
        "mask": (lambda mask, q: sl.block_sparse_attention(q, q, q, mask), (PATTERNS["a grid"], q)),
        "mask info": (lambda info: info, (sl.process_mask(sl.bind(sl.Window(9), N, T, T), (16, 16))[0],)),
    }
    file = {}
    for name, (function, args) in programs.items():
        program = jax.jit(function)
        expected = list(map(np.asarray, jax.tree.leaves(program(*args))))
        file[name] = bytes(jax.export.export(program)(*args).serialize()), jax.tree.leaves((args, {})), expected
    path = tmp_path / "programs"
    path.write_bytes(pickle.dumps(jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, file)))
    assert on_devices(1, "-c", READER, str(path)) == "all equal\n"


def test_a_cache_of_a_function_is_refused_and_its_arrays_are_not():
    cache = empty(sl.from_mask_mod(lambda b, h, q, k: q >= k))
    x, structure = jnp.ones((2, K, H)), jax.tree.structure(cache)

    def stepped(cache, x):
        return cache.step(jnp.ones((2, N, H)), x, x, jnp.array([3, 4]))

    exported = jax.export.export(jax.jit(stepped))(cache, x)
    with pytest.raises(TypeError, match=r"KVCache: MaskMod.function: .* cannot hold <function .*jax.tree.unflatten"):
        exported.serialize()

    def of_leaves(leaves, x):
        out, new = stepped(jax.tree.unflatten(structure, leaves), x)
        return out, jax.tree.leaves(new)

    exported = jax.export.export(jax.jit(of_leaves))(jax.tree.leaves(cache), x)
    out, leaves = jax.export.deserialize(exported.serialize()).call(jax.tree.leaves(cache), x)
    want = jax.jit(stepped)(cache, x)
    for a, b in zip((out, *leaves), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
