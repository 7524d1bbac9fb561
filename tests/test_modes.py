"""JAX's configuration modes: a table of small programs by a table of modes, in which all of them run and agree.

Where a mode cannot hold, `LIMITS` names a line of JAX's or Flax's own that raises the same error in that mode.
"""

import contextlib
import functools
import itertools
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
import sparse_layers.haiku as slhk
import sparse_layers.linen as slln
from tests.arrays import inputs, perturbed, strict_promotion
from tests.programs import sampled

FIXTURES = pathlib.Path(__file__).parent / "modules" / "loading" / "fixtures"
B, T, N, K, H, F = 2, 40, 4, 2, 8, 16
NEAR, STRIDED = sl.Causal() & sl.Window(7), sl.Causal() & (sl.Window(3) | sl.Strided(4))
RINGS = {
    "a ring": NEAR,
    "a ring for each residue": STRIDED,
    "gathered columns": sl.Causal() & sl.Columns(8, 6),
    "masks by head": (NEAR, sl.Causal()),
}
TABLES = {
    "blocks": sl.Causal() & sl.Blocks(sl.Window(0) | sl.Random(1, seed=3), 4),
    "tiles": sl.Array(np.tril(np.random.default_rng(0).random((T, T)) < 0.4)) | sl.Window(0),
}
WINDOWS = {"block": 16, "count": 2, "local": 1, "pool_size": 8, "pool_stride": 4}
SCORERS = {
    "moba": sl.MoBA(block=16, count=2),
    "infllm": sl.InfLLM(**WINDOWS, dense_below=16),
    "msa": sl.MSA(block=16, count=2, index_size=8),
}
MSA, NATIVE = SCORERS["msa"], sl.NSA(**WINDOWS, sliding=16)
ROPES = (
    (sl.Rope(), 8),
    (sl.Rope(100.0, shape=(4, 4), offset=2, sizes=(4, 2)), 6),
    (sl.Rope(rotary_dim=4, scaling=sl.LinearScaling(8.0)), 8),
    (sl.Rope(scaling=sl.Llama3Scaling(8.0)), 8),
    (sl.Rope(scaling=sl.YarnScaling(4.0, original_length=16)), 8),
)


def array(*shape, seed=0):
    return jnp.asarray(inputs(*shape, seed=seed))


def documents(length=T):
    """Of a batch: ids computed by the program, which are int64 under x64 until they are made int32."""
    return jnp.broadcast_to(jnp.arange(length) // (length // 2), (B, length)).astype(jnp.int32)


def attended(implementation=None, mask=STRIDED, chosen=False, **options):
    """Attention with its gradients."""
    if chosen:  # ids of JAX's own index type
        options["selection"] = sl.Selection(jnp.argsort(-array(B, T, 1, 3), axis=-1)[..., :2], block=16)

    def loss(q, k, v):
        out, lse = sl.block_sparse_attention(q, k, v, mask, return_lse=True, implementation=implementation, **options)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*(array(B, T, n, H, seed=n) for n in (N, K, K)))


def attended_with_options(implementation=None):
    return attended(implementation, segment_ids=documents(), sinks=array(N), logits_soft_cap=5.0)


def select_blocks():
    chosen = sl.top_k_blocks(array(B, 8, K, 5), 3, block=16, granularity=16, forced=sl.Window(0))
    start = jnp.arange(9)[3] * 16
    later = sl.top_k_blocks(array(B, 2, K, 5), 3, block=16, granularity=16, forced=sl.Window(0), start=start)
    return chosen, later, sl.mean_pool_blocks(array(B, T, K, H), 16)


def scored():
    q, k = array(B, 64, N, H), array(B, 64, K, H, seed=1)
    return [SCORERS[name].select(q, k, segment_ids=ids) for name in ("moba", "infllm") for ids in (None, documents(64))]


def turned():
    at = jnp.full((1, 20), 3, jnp.int16)
    return [
        (rope(x), rope(x, jnp.arange(20)), rope(x.astype(jnp.bfloat16), at))
        for rope, size in ROPES
        for x in [array(1, 20, 2, size)]
    ]


def with_parameters(model):
    """An NNX model with parameters by numpy: random numbers of JAX's differ under x64."""
    state = nnx.state(model, nnx.Param)
    nnx.update(model, perturbed(jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), state)))
    return model


def trained(layer, *args, **options):
    """Output and gradients of a layer of NNX; ``layer`` makes it of ``rngs``."""

    def loss(model):
        out = model(*args, **options)
        return (out**2).sum(), out

    (_, out), slopes = nnx.value_and_grad(loss, has_aux=True)(with_parameters(layer(rngs=nnx.Rngs(0))))
    return out, nnx.to_pure_dict(slopes)


def native():
    layer = functools.partial(sl.NativeSparseAttention, N, F, pattern=NATIVE, seq_len=64, num_kv_heads=K)
    return trained(functools.partial(layer, rope=sl.Rope()), array(B, 64, F), segment_ids=documents(64))


def scanned():
    options = {"patterns": NEAR, "seq_len": T, "positions": "learned", "scan_layers": True}
    tokens, at = jnp.arange(B * T).reshape(B, T) % 32, jnp.arange(T)[::-1]
    return trained(functools.partial(sl.SparseTransformer, 32, N, F, 3, **options), tokens, positions=at)


def linen(module, *args, **options):
    """Output of a layer of Linen with its gradients; ``module`` makes it."""
    params = perturbed(jax.eval_shape(lambda: module().init(jax.random.key(0), *args, **options)))
    return jax.value_and_grad(lambda params: (module().apply(params, *args, **options) ** 2).sum())(params)


HAIKU = {"pattern": NEAR, "seq_len": T, "rope": sl.Rope(), "use_sinks": True}


def haiku(module, *args, **options):
    """The same of Haiku."""
    net = hk.transform(lambda: module()(*args, **options))
    params = perturbed(jax.eval_shape(net.init, jax.random.key(0)))
    return jax.value_and_grad(lambda params: (net.apply(params, None) ** 2).sum())(params)


def decoded(patterns):
    """A prompt in two pieces, a step, and one of two tokens, of a cache for each pattern."""
    q, k, v = (array(B, T, n, H, seed=n) for n in (N, K, K))
    lengths, found = jnp.array([20, 17]), []
    for pattern in patterns:
        size = {"index_size": H} if pattern == MSA else {}
        cache = sl.KVCache.empty(
            pattern, T, batch=B, num_heads=N, num_kv_heads=K, head_size=H, max_step=2, implementation="xla", **size
        )

        def index(places, cache=cache):
            return {} if cache.selection != MSA else {"index": (q[:, places, :K], k[:, places, :1])}

        for start in (0, 10):
            keys = {} if pattern != MSA else {"index_key": k[:, start : start + 10, :1]}
            piece = slice(start, start + 10)
            cache = cache.filled(k[:, piece], v[:, piece], jnp.minimum(lengths, start + 10), start=start, **keys)
        one, cache = cache.step(q[:, 20], k[:, 20], v[:, 20], lengths, **index(20))
        several = slice(21, 23)
        options = {"sinks": array(N), "logits_soft_cap": 4.0} | index(several)
        two, cache = cache.step(q[:, several], k[:, several], v[:, several], lengths + 1, **options)
        found.append((one, two, cache.keys))
    return found


def decoded_by_selection():
    cache = sl.KVCache.empty("causal", T, batch=B, num_heads=N, num_kv_heads=K, head_size=H)
    cache = cache.filled(array(B, T, K, H), array(B, T, K, H, seed=1))
    ids = jnp.argsort(array(B, 1, 1, 3), axis=-1)[..., :2]
    return cache.attend(array(B, N, H), jnp.array([30, 39]), selection=sl.Selection(ids, block=16))


def attention_of_flax():
    x, options = array(B, T, F), {"decode": False, "rngs": nnx.Rngs(0)}
    dense = with_parameters(nnx.MultiHeadAttention(N, F, **options))
    function = with_parameters(nnx.MultiHeadAttention(N, F, attention_fn=sl.make_attention_fn(NEAR, T), **options))
    return sl.from_nnx(dense, pattern=NEAR, seq_len=T, rope_theta=100.0)(x), function(x)


def dynamic_mask_info():
    mask = jnp.tril(jnp.ones((2, 32, 32), bool))
    return sl.process_dynamic_mask(mask, (8, 8))[0], sl.process_dynamic_mask_dkv(mask, (8, 8))[0]


def layer_options():
    return {"segment_ids": documents(), "positions": jnp.arange(T)[::-1]}


# Traced as a whole, by name.
PROGRAMS = {
    **{f"op, {name}": functools.partial(attended_with_options, name) for name in (None, "xla", "reference")},
    **{f"op, selection, {name}": functools.partial(attended, name, chosen=True) for name in ("xla", "reference")},
    "op, table": lambda: attended(mask=TABLES["tiles"]),
    "op, run-time mask": lambda: attended(mask=jnp.tril(jnp.ones((T, T), bool))),
    "chosen blocks": select_blocks,
    "scorers": scored,
    "rope": turned,
    "NNX attention": lambda: trained(
        functools.partial(sl.SparseSelfAttention, N, F, pattern=NEAR, seq_len=T, rope=sl.Rope(), use_sinks=True),
        array(B, T, F),
        **layer_options(),
    ),
    "NNX msa": lambda: trained(
        functools.partial(sl.SparseSelfAttention, N, F, pattern=MSA, seq_len=T, num_kv_heads=K), array(B, T, F)
    ),
    "NNX cross-attention": lambda: trained(
        functools.partial(sl.SparseCrossAttention, N, F, pattern=sl.Window(7, 7), q_len=T, kv_len=30),
        array(B, T, F),
        array(B, 30, F),
    ),
    "NNX native sparse attention": native,
    "NNX block": lambda: trained(
        functools.partial(sl.SparseTransformerBlock, N, F, pattern=NEAR, seq_len=T, mlp="swiglu", remat=True),
        array(B, T, F),
    ),
    "NNX model": lambda: trained(
        functools.partial(sl.SparseTransformer, 32, N, F, 1, patterns=NEAR, seq_len=T), jnp.zeros((B, T), int)
    ),
    "NNX model, scanned": scanned,
    "Linen attention": lambda: linen(
        lambda: slln.SparseSelfAttention(N, pattern=NEAR, seq_len=T, rope=sl.Rope(), use_sinks=True),
        array(B, T, F),
        **layer_options(),
    ),
    "Linen block": lambda: linen(lambda: slln.SparseTransformerBlock(N, F, pattern=NEAR, seq_len=T), array(B, T, F)),
    "Haiku attention": lambda: haiku(
        lambda: slhk.SparseSelfAttention(N, H, w_init=hk.initializers.Constant(0.1), **HAIKU),
        array(B, T, F),
        **layer_options(),
    ),
    "Haiku block": lambda: haiku(lambda: slhk.SparseTransformerBlock(N, F, pattern=NEAR, seq_len=T), array(B, T, F)),
    "caches, rings": lambda: decoded(RINGS.values()),
    "caches, tables": lambda: decoded(TABLES.values()),
    "caches, scorers": lambda: decoded(SCORERS.values()),
    "cache, selection": decoded_by_selection,
    "attention of Flax": attention_of_flax,
    "dynamic MaskInfo": dynamic_mask_info,
}


@functools.cache
def model(positions, *patterns):
    """One that is made outside of all modes."""
    options = {"positions": positions, "patterns": patterns, "seq_len": 64, "rngs": nnx.Rngs(0)}
    return with_parameters(sl.SparseTransformer(32, N, F, len(patterns), **options))


@functools.cache
def key():
    return jax.random.key(0)


def generated(positions, *patterns, length=5, **options):
    prompts = [[(7 * i) % 32 for i in range(n)] for n in (length, length - 2)]
    return sl.generate(model(positions, *patterns), prompts, 3, **options)


# Called as they are: what runs before, between and after compiled programs is in the mode, too.
CALLS = {
    "generate": lambda: generated("row_column", NEAR, "causal", stop_token=[3, 4]),
    "generate, sampling in chunks": lambda: generated(
        "rope", NEAR, chunk=2, temperature=0.7, top_k=8, top_p=0.9, key=key()
    ),
    "generate, streaming": lambda: generated("learned", NEAR, on_tokens=lambda tokens: None),
    "generate, native": lambda: generated("rope", NATIVE, length=35),
    "loader": lambda: sl.from_huggingface(
        FIXTURES / "gemma3_text", param_dtype=jnp.float32, implementation="reference"
    ).final_norm.scale[...],
}


def error():
    """What a mask says of a rule for single positions, which JAX's own error is translated to."""
    mask = sl.MaskMod(lambda b, h, q, k: q >= k, traceable=True)
    object.__setattr__(mask, "function", lambda b, h, q, k: q >= k and q < 9)
    with pytest.raises(TypeError, match="write & for 'and'") as raised:
        jax.make_jaxpr(mask)(jnp.arange(8), jnp.arange(8))
    return str(raised.value)


@contextlib.contextmanager
def all_tracebacks():
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


MODES = {
    "x64": lambda: jax.enable_x64(True),
    "promotion": strict_promotion,
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "disable_jit": jax.disable_jit,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "tracebacks": all_tracebacks,
}
# Op by op, programs take many times as long: of these, one of each kind.
OP_BY_OP = ("op, xla", "op, selection, reference", "chosen blocks", "rope", "cache, selection", "loader")
# What these modes refuse shows when a program is traced; compiled are those whose numbers may depend on wider indices.
TRACED = {
    "promotion": (),
    "x64": ("op, xla", "op, selection, xla", "op, selection, reference", "scorers", "rope", "caches, scorers"),
}
# Ours, and what raises the same error in this mode with JAX and Flax alone.
LIMITS = {
    # Keys are numbers of the host.
    ("transfer_guard", "loader"): (CALLS["loader"], lambda: nnx.Rngs(0), RuntimeError, "Disallowed host-to-device"),
    # Outside of jit, each number of an expression is one.
    ("transfer_guard", "a step outside of jit"): (
        decoded_by_selection,
        lambda: array(3) + 1,
        RuntimeError,
        "Disallowed host-to-device",
    ),
    # Flax multiplies sums in float32 by scales in bfloat16.
    ("promotion", "norms in bfloat16"): (
        lambda: trained(
            functools.partial(sl.SparseTransformerBlock, N, F, pattern=NEAR, seq_len=T, dtype=jnp.bfloat16),
            array(B, T, F),
        ),
        lambda: nnx.LayerNorm(F, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(jnp.ones((1, F), jnp.bfloat16)),
        ValueError,
        "no available implicit dtype promotion path",
    ),
    # A result of -inf is one: the score of no block, and the log-sum-exp of no key.
    ("debug_infs", "scores of no block"): (
        lambda: jax.jit(lambda x: sl.top_k_blocks(x, 3, block=16, return_scores=True)[1])(array(1, 2, 1, 3)),
        lambda: jax.jit(lambda: jnp.full(3, -jnp.inf))(),
        FloatingPointError,
        "inf",
    ),
    # Outside of jit, each operation is a program with a result, logits that a mask leaves out among them.
    ("debug_infs", "a step outside of jit"): (
        decoded_by_selection,
        lambda: jnp.where(array(3) > 0, 1.0, -jnp.inf),
        FloatingPointError,
        "inf",
    ),
}


@functools.cache
def compiled(name):
    """A program that serves all modes that do not change it."""
    return jax.jit(PROGRAMS[name])


@functools.cache
def usual(name):
    """Its arrays without a mode."""
    return jax.tree.map(np.asarray, CALLS[name]() if name in CALLS else compiled(name)())


@pytest.mark.parametrize(("name", "mode"), sampled([*itertools.product([*PROGRAMS, *CALLS], MODES)], 0.6))
def test_programs_run_in_every_mode(name, mode):
    if (mode, name) in LIMITS or (mode == "disable_jit" and name not in OP_BY_OP):
        return
    if name not in CALLS and name not in TRACED.get(mode, PROGRAMS):
        with MODES[mode]():
            shapes = jax.eval_shape(PROGRAMS[name])
        assert [*map(jnp.shape, jax.tree.leaves(shapes))] == [*map(jnp.shape, jax.tree.leaves(usual(name)))]
        return
    want = jax.tree.leaves(usual(name))
    with MODES[mode]():
        actual = jax.tree.map(np.asarray, CALLS[name]() if name in CALLS else compiled(name)())
    for a, b in zip(jax.tree.leaves(actual), want, strict=True):
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-3, atol=1e-4, equal_nan=False)


@pytest.mark.parametrize("mode", MODES)
def test_errors_say_the_same_in_every_mode(mode):
    want = error()
    with MODES[mode]():
        assert error() == want


@pytest.mark.parametrize(("mode", "name"), LIMITS)
def test_limits_are_those_of_jax_and_flax(mode, name):
    ours, theirs, kind, message = LIMITS[mode, name]
    array(1)
    with MODES[mode](), pytest.raises(kind, match=message):
        theirs()
    with MODES[mode](), pytest.raises(kind, match=message):
        ours()


def test_documents_of_64_bits_inside_jit():
    q, ids = array(1, T, 2, H), np.zeros((1, T), np.int64)
    with jax.enable_x64(True):
        attend = jax.jit(lambda ids: sl.block_sparse_attention(q, q, q, "causal", segment_ids=ids))
        with pytest.raises(ValueError, match=r"must be int32 or smaller inside jit.*\.astype\(jnp\.int32\).*int64"):
            attend(jnp.asarray(ids))
        assert attend(jnp.asarray(ids, jnp.int32)).shape == q.shape


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint32", "uint64"])
def test_block_ids_of_any_integers_inside_jit(dtype):
    q = array(1, T, 2, H)
    choices = jnp.array([[0, 2, 1], [2, 0, 1]])[jnp.arange(T) % 2]

    def attend(ids):
        selection = sl.Selection(ids[None, :, None], block=16)
        return sl.block_sparse_attention(q, q, q, "causal", selection=selection)

    want = attend(choices[:, :2])
    with jax.enable_x64(True):
        ids = np.asarray(choices[:, :2]).astype(dtype)
        beyond = min(np.iinfo(dtype).max, 2**32 + 1)  # cut off to 32 bits, it would be block 1
        actual = jax.jit(attend)(jnp.asarray(np.concatenate([ids, np.full((T, 1), beyond, dtype)], axis=1)))
    np.testing.assert_allclose(actual, want, atol=1e-6)
