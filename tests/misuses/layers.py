"""Misuses of layers, blocks and models, of `generate` and `make_attention_fn`."""

import types

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from tests.misuse import Misuse

T, N, F, V = 8, 4, 16, 32
MASK = sl.Causal() & sl.Window(3)


def attention(*sizes, **options):
    return sl.SparseSelfAttention(*(sizes or (N, F)), **{"pattern": MASK, "seq_len": T, "rngs": nnx.Rngs(0)} | options)


def cross(*sizes, **options):
    settings = {"pattern": MASK, "q_len": T, "kv_len": 12, "rngs": nnx.Rngs(0)} | options
    return sl.SparseCrossAttention(*(sizes or (N, F)), **settings)


def native(*sizes, **options):
    return sl.NativeSparseAttention(*(sizes or (N, F)), **{"seq_len": T, "rngs": nnx.Rngs(0)} | options)


def block(*sizes, **options):
    return sl.SparseTransformerBlock(
        *(sizes or (N, F)), **{"pattern": MASK, "seq_len": T, "rngs": nnx.Rngs(0)} | options
    )


def model(*sizes, **options):
    return sl.SparseTransformer(
        *(sizes or (V, N, F, 2)), **{"patterns": MASK, "seq_len": T, "rngs": nnx.Rngs(0)} | options
    )


def linen_attention(*sizes, **options):
    return linen.SparseSelfAttention(*(sizes or (N,)), **{"pattern": MASK, "seq_len": T} | options)


def linen_cross(*sizes, **options):
    return linen.SparseCrossAttention(*(sizes or (N,)), **{"pattern": MASK, "q_len": T, "kv_len": 12} | options)


def linen_block(*sizes, **options):
    return linen.SparseTransformerBlock(*(sizes or (N, F)), **{"pattern": MASK, "seq_len": T} | options)


class LM(nn.Module):
    """A model of Linen."""

    def prefill(self, tokens, lengths):
        return jnp.zeros((len(tokens), V)), ()

    def decode_step(self, tokens, caches, position):
        return jnp.zeros((len(tokens), V)), caches


def foreign(**methods):
    """A model that `generate` can sample from, but for the methods that are given."""

    def prefill(tokens, lengths):
        return jnp.zeros((len(tokens), V)), {"k": jnp.zeros(3)}

    named = {"prefill": prefill, "decode_step": methods.pop("step", lambda *x: prefill(x[0], x[2]))} | methods
    return types.SimpleNamespace(**named)


def step_of(*sizes, dtype=float, caches=None):
    """A model whose steps return logits [B, *sizes]."""
    return foreign(step=lambda *x: (jnp.zeros((len(x[0]), *sizes), dtype), x[1] if caches is None else caches))


def names():
    makers = (attention, cross, native, block, model, linen_attention, linen_cross, linen_block, foreign, step_of)
    cache = sl.KVCache.empty(MASK, T, batch=2, num_heads=N, head_size=F // N)
    return {maker.__name__: maker for maker in makers} | {
        "layer": attention(),
        "crossing": cross(),
        "y": jnp.ones((2, 12, F)),
        "a_native": native(),
        "a_block": block(),
        "a_model": model(),
        "linen": linen,
        "linen_lm": LM(),
        "N": N,
        "fn": sl.make_attention_fn(MASK, 512),
        "x": jnp.ones((2, T, F)),
        "chosen": [sl.Selection(jnp.zeros(shape, int), block=16) for shape in ((8, 1, 1), (2, 3, 1, 1))],
        "heads": jnp.ones((2, T, N, 4)),
        "tokens": jnp.ones((2, 4), jnp.int32),
        "V": V,
        "cache": cache,
        "caches": (cache, cache),
        "position": jnp.array([4, 4]),
    }


INTEGER = "must be an integer >= 1"
FLAG = "must be true or false"
ORDER = "their order is (num_heads, features)"
FLOAT = "must be a floating-point dtype"
NEVER = "block-sparse attention never forms"
SETTINGS = [
    # the order of arguments, and sizes
    ("block(64, 4)", ValueError, "num_heads=64", "features=4", ORDER),
    ("model(256, 64, 4, 2)", ValueError, "num_heads=64", "features=4", ORDER),
    ("linen_block(64, 4)", ValueError, "num_heads=64", "features=4", ORDER),
    ("attention(4.0, 16)", ValueError, "num_heads", "got 4.0", INTEGER),
    ("attention('4', 16)", ValueError, "num_heads", "got '4'", INTEGER),
    ("attention(True, 16)", ValueError, "num_heads", "got True", INTEGER),
    ("attention(-4, 16)", ValueError, "num_heads", "got -4", INTEGER),
    ("attention(4, 16.0)", ValueError, "in_features", "got 16.0", INTEGER),
    ("attention(4, 0)", ValueError, "in_features", "got 0", INTEGER),
    ("attention(3, 16)", ValueError, "num_heads=3", "features=16", "must divide"),
    ("attention(qkv_features=18)", ValueError, "num_heads=4", "qkv_features=18", "must divide"),
    ("attention(head_dim=0)", ValueError, "head_dim", "got 0", INTEGER),
    (
        "attention(head_dim=8, qkv_features=16)",
        ValueError,
        "head_dim=8",
        "qkv_features=16",
        "num_heads * head_dim = 32",
    ),
    ("block(head_dim=2.0)", ValueError, "head_dim", "got 2.0", INTEGER),
    ("attention(num_kv_heads=0)", ValueError, "num_kv_heads", "got 0", INTEGER),
    ("attention(num_kv_heads=3)", ValueError, "num_kv_heads=3", "num_heads=4", "must divide"),
    ("attention(out_features=-1)", ValueError, "out_features", "got -1", INTEGER),
    ("attention(seq_len=0)", ValueError, "seq_len", "got 0", INTEGER),
    ("attention(seq_len=2**40)", ValueError, "seq_len", "got 1099511627776", "must be at most 2147483646"),
    ("attention(seq_len=8.0)", ValueError, "seq_len", "got 8.0", INTEGER),
    ("block(4, 0)", ValueError, "features", "got 0", INTEGER),
    ("block(mlp_features=-1)", ValueError, "mlp_features", "got -1", INTEGER),
    ("block(num_layers=True)", ValueError, "num_layers", "got True", INTEGER),
    ("model('256', 4, 16, 2)", ValueError, "vocab_size", "got '256'", INTEGER),
    ("model(32, 4, 16, 2.0)", ValueError, "num_layers", "got 2.0", INTEGER),
    ("model(position_stride=0)", ValueError, "position_stride", "got 0", INTEGER),
    ("model(position_stride=9)", ValueError, "position_stride", "got 9", "1..seq_len=8"),
    ("linen_attention(0)", ValueError, "num_heads", "got 0", INTEGER),
    ("linen_attention(head_dim=-1)", ValueError, "head_dim", "got -1", INTEGER),
    ("linen_block(mlp_features=0)", ValueError, "mlp_features", "got 0", INTEGER),
    # scorers
    ("attention(selection='mobba')", ValueError, "selection", "'mobba'", "did you mean 'moba'"),
    ("attention(selection=3)", TypeError, "selection", "got 3", "must be a scorer"),
    ("attention(pattern='moba:blok=16')", ValueError, "scorer 'moba'", "'blok'", "did you mean 'block'"),
    ("attention(pattern='moba:block=17')", ValueError, "block", "got 17", "must be a multiple of 16 from 16 to 512"),
    ("attention(pattern='moba', selection='moba')", ValueError, "selection", "got 'moba'", "must be None"),
    ("attention(pattern=sl.Full(), selection='moba')", ValueError, "pattern", "got Full()", "must be causal"),
    ("cross(selection='moba')", ValueError, "selection", "MoBA", "must be None where queries and keys are of two"),
    ("attention(pattern=('all', 'local'), selection='msa')", ValueError, "pattern", "('all'", "one for all heads"),
    ("type('S', (sl.Scorer,), {}, name='causal')", ValueError, "name", "'causal'", "that of no preset"),
    ("type('S', (sl.Scorer,), {}, name='a:b')", ValueError, "name", "'a:b'", "must be a word"),
    ("type('MoBA', (sl.Scorer,), {}, name='moba')", ValueError, "name", "'moba'", "no other scorer has"),
    ("linen_attention(pattern='moba:count=0')", ValueError, "MoBA: count", "got 0", INTEGER),
    ("model(patterns='infllm:count=9')", ValueError, "InfLLM: count", "got count=9", "must be at least first + local"),
    ("sl.MSA(index_size=-1)", ValueError, "MSA: index_size", "got -1", "must be an integer >= 0"),
    ("attention(selection='msa:index_size=3', rope_theta=9.0)", ValueError, "rope", "got 3", "must divide index_size"),
    ("sl.make_attention_fn('msa', 4096)", ValueError, "selection", "MSA(", "must be given to one of these"),
    ("sl.MoBA(local=0)", ValueError, "MoBA: local", "got 0", INTEGER),
    ("sl.MoBA(dense_below=-1)", ValueError, "MoBA: dense_below", "got -1", "must be an integer >= 0"),
    ("sl.InfLLM(pool_stride=24)", ValueError, "pool_stride", "got 24", "must divide pool_size=32"),
    ("sl.InfLLM(pool_size=0)", ValueError, "InfLLM: pool_size", "got 0", INTEGER),
    ("sl.InfLLM(16, 1, 0, 1)", ValueError, "pool_size", "got 32", "must be at most block=16"),
    ("attention(selection='moba')(x, selection=chosen[1])", ValueError, "selection", "MoBA", "must be None"),
    (
        "attention(seq_len=64, selection='moba:block=16,count=2').prefill(jnp.ones((2, 64, 16)))",
        NotImplementedError,
        "selection",
        "Window(left=3",
        "keeps all keys in a row",
    ),
    # flags, numbers, dtypes, names, functions
    ("attention(use_sinks='yes')", ValueError, "use_sinks", "got 'yes'", FLAG),
    ("attention(normalize_qk=1)", ValueError, "normalize_qk", "got 1", FLAG),
    ("block(remat='full')", ValueError, "remat", "got 'full'", FLAG),
    ("block(use_bias='no')", ValueError, "use_bias", "got 'no'", FLAG),
    ("model(scan_layers='yes')", ValueError, "scan_layers", "got 'yes'", FLAG),
    ("model(tie_embeddings=1)", ValueError, "tie_embeddings", "got 1", FLAG),
    ("linen_block(remat='full')", ValueError, "remat", "got 'full'", FLAG),
    ("linen_block(deterministic='yes')", ValueError, "deterministic", "got 'yes'", FLAG),
    ("attention(rope_theta='x')", ValueError, "rope_theta", "got 'x'", "must be a number > 0"),
    ("attention(4, 12, rope_theta=100.0)", ValueError, "rope=Rope(theta=100.0", "got 3", "2 must divide head_dim"),
    ("attention(rope=100.0)", TypeError, "rope", "got 100.0", "must be a Rope"),
    ("linen_attention(rope=(4, 2))", TypeError, "rope", "got (4, 2)", "must be a Rope"),
    ("block(rope=sl.Rope(), rope_theta=9.0)", ValueError, "rope_theta=9.0", "Rope(theta=10000.0", "must be None"),
    ("model(rope=sl.Rope(), rope_theta=9.0, positions='rope')", ValueError, "rope_theta=9.0", "Rope(", "must be None"),
    (
        "linen_block(rope=sl.Rope(), rope_theta=9.0).init(jax.random.key(0), x)",
        ValueError,
        "rope_theta=9.0",
        "Rope(theta=10000.0",
        "must be None",
    ),
    ("model(rope=sl.Rope(9.0))", ValueError, "rope=Rope(theta=9.0", "got positions='row_column'", "positions='rope'"),
    ("block(head_dim=6, rope=sl.Rope(shape=(2, 4)))", ValueError, "rope=Rope", "got 6", "4 must divide head_dim"),
    ("block(rope=sl.Rope(shape=(8,), sizes=(6,)))", ValueError, "sizes", "got 6", "must add up to head_dim=4"),
    ("sl.Rope(scaling=8.0)", TypeError, "Rope: scaling", "got 8.0", "as sl.LinearScaling(8.0)"),
    ("sl.Rope(rotary_dim=0)", ValueError, "Rope: rotary_dim", "got 0", INTEGER),
    ("attention(rope=sl.Rope(rotary_dim=6))", ValueError, "rotary_dim", "got 6", "at most head_dim=4"),
    ("attention(rope=sl.Rope(rotary_dim=3))", ValueError, "rope=Rope", "got 3", "2 must divide rotary_dim"),
    ("sl.LinearScaling('8')", ValueError, "LinearScaling: factor", "got '8'", "must be a number > 0"),
    ("sl.Llama3Scaling(8.0, low=4.0)", ValueError, "Llama3Scaling: low", "got 4.0", "less than high=4.0"),
    ("sl.YarnScaling(4.0, 0)", ValueError, "YarnScaling: original_length", "got 0", INTEGER),
    ("sl.YarnScaling(4.0, 64, slow=32.0)", ValueError, "YarnScaling: slow", "got 32.0", "less than fast=32.0"),
    ("sl.YarnScaling(4.0, 64, attention_factor=0)", ValueError, "attention_factor", "got 0", "a number > 0"),
    ("model(positions='rope', rope=(sl.Rope(), 3))", TypeError, "rope", "got 3", "must be a Rope"),
    ("model(positions='rope', rope=(None,) * 3)", ValueError, "rope", "got 3", "1 to num_layers=2 entries"),
    ("model(positions='rope', rope=(None,), rope_theta=1.0)", ValueError, "rope_theta=1.0", "(None,)", "must be None"),
    ("attention(normalize_qk='batch')", ValueError, "normalize_qk", "got 'batch'", "or 'layer', 'rms' or 'rms_joint'"),
    ("attention(norm_epsilon=-1.0)", ValueError, "norm_epsilon", "got -1.0", "must be a number >= 0"),
    ("attention(use_bias=('query', 'mlp'))", ValueError, "use_bias", "got ('query', 'mlp')", "out of 'query', 'key'"),
    ("native(use_bias=('mlp',))", ValueError, "use_bias", "got ('mlp',)", "'out', 'gate'"),
    ("linen_block(use_bias=('q',))", ValueError, "use_bias", "got ('q',)", "'out', 'mlp'"),
    ("block(norm_placement='after')", ValueError, "norm_placement", "got 'after'", "'pre', 'post' or 'sandwich'"),
    ("block(parallel=1)", ValueError, "parallel", "got 1", FLAG),
    ("block(make_mlp=3)", TypeError, "make_mlp", "got 3", "a function that makes the MLP"),
    ("block(make_mlp=lambda rngs: 3)", TypeError, "make_mlp", "got 3", "a module that maps [..., F]"),
    ("model(embedding_scale='x')", ValueError, "embedding_scale", "got 'x'", "must be a number"),
    ("model(final_soft_cap=0)", ValueError, "final_soft_cap", "got 0", "must be a number > 0"),
    ("model(head_init=0)", TypeError, "head_init", "got 0", "must be an initializer"),
    ("sl.Rope(0)", ValueError, "Rope: theta", "got 0", "must be a number > 0"),
    ("sl.Rope(shape=8)", TypeError, "Rope: shape", "got 8", "must be a sequence of lengths"),
    ("sl.Rope(shape=(4, 0))", ValueError, "Rope: shape", "got (4, 0)", "must be integers >= 1"),
    ("sl.Rope(shape=(2**20, 2**20))", ValueError, "Rope: shape", "got (1048576, 1048576)", "at most 2147483646"),
    ("sl.Rope(shape=(4,), offset=-1)", ValueError, "Rope: offset", "got -1", "an integer >= 0"),
    ("sl.Rope(offset=3)", ValueError, "Rope: offset", "got offset=3", "need a shape"),
    ("sl.Rope(sizes=(8,))", ValueError, "sizes", "sizes=(8,)", "need a shape"),
    ("sl.Rope(shape=(4, 4), sizes=(3, 5))", ValueError, "Rope: sizes", "got (3, 5)", "even integers >= 2"),
    ("sl.Rope(shape=(4, 4), sizes=(4,))", ValueError, "Rope: sizes", "got (4,)", "one for each of the 2 axes"),
    ("sl.Rope(shape=(4, 4), sizes='44')", TypeError, "Rope: sizes", "got '44'", "a sequence of features"),
    ("sl.Rope(shape=(4, 4))(q[..., :6])", ValueError, "rope=Rope", "got 6", "4 must divide head size"),
    # cross-attention
    ("cross(q_len=0)", ValueError, "q_len", "got 0", INTEGER),
    ("linen_cross(kv_len='a')", ValueError, "kv_len", "got 'a'", INTEGER),
    ("cross(in_kv_features=0)", ValueError, "in_kv_features", "got 0", INTEGER),
    (
        "cross(pattern=np.ones((8, 8), bool))",
        ValueError,
        "pattern: its last two axes",
        "got (8, 8)",
        "must be (q_len, kv_len) = (8, 12)",
    ),
    (
        "linen_cross(pattern=np.ones((12, 8), bool))",
        ValueError,
        "pattern: its last two axes",
        "got (12, 8)",
        "(q_len, kv_len)",
    ),
    ("cross(dropout_rate=0.1)", ValueError, "dropout_rate must be 0", "got 0.1", NEVER),
    ("cross(rope_theta=9.0)", TypeError, "SparseCrossAttention: unknown argument", "'rope_theta'", "Known: "),
    ("cross(decode=True)", TypeError, "SparseCrossAttention: unknown argument", "'decode'", "Known: "),
    ("linen_cross(seq_len=8)", TypeError, "SparseCrossAttention: unknown argument", "'seq_len'", "Known: "),
    ("attention(scale=True)", ValueError, "scale", "got True", "must be a number"),
    ("attention(scale=jnp.array(1.0))", ValueError, "scale", "got Array(1.", "must be a number"),
    ("attention(logits_soft_cap=True)", ValueError, "logits_soft_cap", "got True", "must be a number > 0"),
    ("attention(dropout_rate=0.1)", ValueError, "dropout_rate must be 0", "got 0.1", NEVER),
    ("attention(dropout_rate='a')", ValueError, "dropout_rate must be 0", "got 'a'", NEVER),
    ("attention(dropout_rate=None)", ValueError, "dropout_rate must be 0", "got None", NEVER),
    ("block(dropout_rate=1.5)", ValueError, "dropout_rate", "got 1.5", "must be a number in [0, 1)"),
    ("block(dropout_rate=True)", ValueError, "dropout_rate", "got True", "must be a number in [0, 1)"),
    ("block(norm_epsilon=-1)", ValueError, "norm_epsilon", "got -1", "must be a number >= 0"),
    ("linen_block(norm_epsilon='x')", ValueError, "norm_epsilon", "got 'x'", "must be a number >= 0"),
    ("attention(dtype='float33')", ValueError, "dtype", "got 'float33'", FLOAT),
    ("attention(dtype=int)", ValueError, "dtype", "got <class 'int'>", FLOAT),
    ("block(param_dtype=None)", ValueError, "param_dtype", "got None", FLOAT),
    ("linen_attention(dtype=jnp.complex64)", ValueError, "dtype", "complex64", FLOAT),
    ("block(mlp=None)", ValueError, "mlp", "got None", "'geglu' or 'swiglu'"),
    ("block(norm=nnx.LayerNorm)", ValueError, "norm", "LayerNorm", "must be 'layer' or 'rms'"),
    ("model(positions=None)", ValueError, "positions", "got None", "must be 'row_column', 'learned', 'rope' or 'none'"),
    ("model(rope_theta=100.0)", ValueError, "rope_theta=100.0", "got positions='row_column'", "needs positions='rope'"),
    ("attention(precision='best')", ValueError, "precision", "got 'best'", "must be a jax.lax.Precision"),
    ("attention(kernel_init=0.02)", TypeError, "kernel_init", "got 0.02", "must be an initializer"),
    ("attention(kernel_metadata=3)", TypeError, "kernel_metadata", "got 3", "must be a mapping"),
    ("attention(key_ln_scale_metadata=None)", TypeError, "key_ln_scale_metadata", "got None", "must be a mapping"),
    (
        "attention(qkv_dot_general=3)",
        TypeError,
        "qkv_dot_general",
        "got 3",
        "must be a function like jax.lax.dot_general",
    ),
    ("block(out_dot_general_cls='a')", TypeError, "out_dot_general_cls", "got 'a'", "must be a function like"),
    ("model(keep_rngs='a')", ValueError, "keep_rngs", "got 'a'", FLAG),
    ("linen_attention(name=3)", TypeError, "name", "got 3", "must be a string"),
    ("attention(rngs=0)", TypeError, "rngs", "got 0", "must be a flax.nnx.Rngs"),
    ("attention(rngs=nnx.Rngs(dropout=0))", ValueError, "rngs", "['dropout']", "a stream 'params' or 'default'"),
    ("block(dropout_rate=0.1, rngs=nnx.Rngs(params=0))", ValueError, "rngs", "['params']", "a stream 'dropout'"),
    # keywords
    ("attention(num_experts=4)", TypeError, "SparseSelfAttention: unknown argument", "'num_experts'", "'num_heads'"),
    ("attention(patterns=mask)", TypeError, "SparseSelfAttention: unknown argument", "'patterns'", "mean 'pattern'?"),
    ("attention(attention_fn=fn)", TypeError, "SparseSelfAttention: unknown", "'attention_fn'", "leave it out"),
    ("block(num_experts=4)", TypeError, "SparseTransformerBlock: unknown argument", "'num_experts'", "'num_heads'?"),
    ("block(decode=True)", TypeError, "SparseTransformerBlock: unknown argument", "'decode'", "Known: "),
    ("model(num_experts=4)", TypeError, "SparseTransformer: unknown argument", "'num_experts'", "'num_heads'?"),
    ("model(pattern=mask)", TypeError, "SparseTransformer: unknown argument", "'pattern'", "called patterns= here"),
    (
        "sl.SparseTransformer(32, 4, 16, 2, pattern=mask, seq_len=8, rngs=nnx.Rngs(0))",
        TypeError,
        "SparseTransformer: unknown argument",
        "'pattern'",
        "called patterns= here",
    ),
    ("linen_attention(num_experts=4)", TypeError, "SparseSelfAttention: unknown", "'num_experts'", "mean 'num_heads'?"),
    ("linen_attention(in_features=16)", TypeError, "SparseSelfAttention: unknown", "'in_features'", "leave it out"),
    ("linen_block(patterns=mask)", TypeError, "SparseTransformerBlock: unknown", "'patterns'", "mean 'pattern'?"),
    # native sparse attention
    ("native('4', 16)", ValueError, "num_heads", "got '4'", INTEGER),
    ("native(num_kv_heads=3)", ValueError, "num_kv_heads=3", "num_heads=4", "must divide"),
    ("native(seq_len=0)", ValueError, "seq_len", "got 0", INTEGER),
    ("native(pattern=mask)", ValueError, "pattern", "got Causal()", "must be NSA"),
    ("native(pattern='moba')", ValueError, "pattern", "got 'moba'", "must be NSA"),
    ("native(pattern='nsa:cont=8')", ValueError, "scorer 'nsa'", "'cont'", "did you mean 'count'?"),
    ("native(pattern='nsa:count=2')", ValueError, "NSA: count", "got count=2", "at least first + local"),
    ("native(head_dim=3, rope_theta=9.0)", ValueError, "rope=Rope(theta=9.0", "got 3", "2 must divide head_dim"),
    ("native(rope=sl.Rope(), rope_theta=9.0)", ValueError, "rope_theta=9.0", "Rope(theta=10000.0", "must be None"),
    ("native(implementation='fast')", ValueError, "implementation", "'fast'", "Known: "),
    ("native(use_sinks=True)", TypeError, "NativeSparseAttention: unknown argument", "'use_sinks'", "Known: "),
    ("native(rngs=0)", TypeError, "rngs", "got 0", "must be a flax.nnx.Rngs"),
    ("sl.NSA(sliding=0)", ValueError, "NSA: sliding", "got 0", INTEGER),
    ("sl.NSA(pool_stride=24)", ValueError, "NSA: pool_stride", "got 24", "must divide pool_size=32"),
    ("attention(pattern=sl.NSA())", ValueError, "pattern", "NSA(block=64", "give it to NativeSparseAttention"),
    ("attention(selection='nsa')", ValueError, "selection", "NSA(block=64", "give it to NativeSparseAttention"),
    ("linen_attention(pattern='nsa')", ValueError, "pattern", "NSA(block=64", "give it to NativeSparseAttention"),
    ("block(pattern='nsa', use_sinks=True)", TypeError, "NativeSparseAttention", "'use_sinks'", "Known: "),
    ("model(patterns=('nsa:cont=8', mask))", ValueError, "scorer 'nsa'", "'cont'", "did you mean 'count'?"),
    # patterns
    ("attention(pattern=None)", TypeError, "pattern", "None", "must be a Mask"),
    ("attention(pattern='stridde')", ValueError, "pattern", "'stridde'", "did you mean 'strided'"),
    ("attention(pattern='mobba:block=16')", ValueError, "pattern", "'mobba'", "did you mean 'moba'"),
    ("attention(pattern=('all', 'moba'))", ValueError, "pattern", "('all', 'moba')", "must be masks"),
    ("attention(pattern=[])", ValueError, "pattern", "sequence", "must not be empty"),
    ("attention(pattern=np.ones((9, 9), bool))", ValueError, "pattern", "(9, 9)", "must be seq_len=8 (queries, keys)"),
    ("attention(pattern=('all', 'local', mask))", ValueError, "pattern", "3 entries", "must divide num_heads=4"),
    ("model(patterns=3)", TypeError, "patterns", "3", "must be a Mask"),
    ("model(patterns=b'local')", TypeError, "patterns", "bytes: b'local'", "must be a Mask"),
    (
        "attention(pattern=[np.ones((7, 7), bool)])",
        ValueError,
        "pattern",
        "(7, 7)",
        "must be seq_len=8 (queries, keys)",
    ),
    ("model(patterns=())", ValueError, "patterns", "got 0", "1 to num_layers=2 entries"),
    ("linen_attention(pattern=None)", TypeError, "pattern", "None", "must be a Mask"),
]
CALLS = [
    ("layer([[1.0]])", TypeError, "inputs", "got list: [[1.0]]", "must be an array [..., T, 16]"),
    ("layer(x.astype(int))", ValueError, "inputs", "got int32", "must be floats"),
    ("layer(jnp.ones((2, 4, 8, 4)))", ValueError, "inputs", "got (2, 4, 8, 4)", "must have shape [..., T, 16]"),
    ("layer(jnp.ones((2, 9, 16)))", ValueError, "inputs", "9 tokens", "seq_len=8"),
    ("layer(x, segment_ids=[0] * 8)", TypeError, "segment_ids", "got list: [0, 0", "must be an array [..., T]"),
    ("layer(x, order_ids=[0] * 8)", TypeError, "order_ids", "got list: [0, 0", "must be an array [..., T]"),
    ("layer(x, order_ids=jnp.zeros((2, 1), int))", ValueError, "order_ids", "got shape (2, 1)", "one id a token"),
    ("layer(x, order_ids=jnp.zeros(8, int))", ValueError, "order_ids", "got shape (8,)", "broadcast_to(x, (2, 8))"),
    ("sl.make_attention_fn(mask, 512, order_ids=1)", TypeError, "order_ids", "got 1", "of the function's call"),
    ("layer(x, order_ids=jnp.zeros((2, 8)))", ValueError, "order_ids of queries", "float32", "order_ids.astype("),
    ("layer(x, segment_ids=jnp.zeros((2, 1), int))", ValueError, "segment_ids", "got shape (2, 1)", "one id a token"),
    ("layer(x, positions=[0])", TypeError, "positions", "got list: [0]", "must be an array [..., T] or [T]"),
    ("layer(x, positions=x[..., 0])", ValueError, "positions", "got float32", "must be integers"),
    ("layer(x, positions=tokens[0])", ValueError, "positions", "got (4,)", "must have shape (2, 8) or (8,)"),
    ("a_model(tokens, positions=tokens[:1])", ValueError, "positions", "got (1, 4)", "must have shape (2, 4) or (4,)"),
    ("layer(x, selection=jnp.zeros((2, 1, 1, 1), int))", TypeError, "selection", "ArrayImpl", "must be a Selection"),
    ("layer(x, selection=chosen[0])", ValueError, "selection", "shape (8, 1, 1)", "leading axes of inputs, (2,)"),
    ("layer(x, selection=chosen[1])", ValueError, "selection", "shape (2, 3, 1, 1)", "must have shape [2, 8, G, k]"),
    ("a_native(tokens)", ValueError, "inputs", "got int32", "must be floats"),
    ("a_native(jnp.ones((2, 9, 16)))", ValueError, "inputs", "9 tokens", "seq_len=8"),
    ("a_native(x, segment_ids=tokens)", ValueError, "segment_ids", "got shape (2, 4)", "one id a token"),
    ("a_native(x, selection=chosen[0])", ValueError, "selection", "shape (8, 1, 1)", "leading axes of inputs, (2,)"),
    ("a_native.prefill(x[0])", ValueError, "inputs", "got (8, 16)", "must have shape [B, T, 16]"),
    ("a_native.decode_step(x[:, 0], cache, position)", TypeError, "cache", "got KVCache", "the NSACache of prefill"),
    ("a_native.prefill(x, start=3)", NotImplementedError, "start=3", "3", "reads prompts as a whole"),
    ("a_native.prefill(x, total=8, max_step=2)", NotImplementedError, "max_step=2", "2", "and then a token a step"),
    ("a_native.prefill(x, total=16)", NotImplementedError, "chunk", "a chunk of 8 of total=16", "prompts as a whole"),
    ("a_native.prefill(x, positions=jnp.arange(8))", NotImplementedError, "positions", "[0, 1, 2", "their places"),
    ("crossing(x, y[..., :8])", ValueError, "inputs_kv", "got (2, 12, 8)", "must have shape [..., S, 16]"),
    ("crossing(y, y)", ValueError, "inputs_q", "got 12 tokens", "q_len=8"),
    ("crossing(x, y[0])", ValueError, "inputs_kv", "got shape (12, 16)", "leading axes of inputs_q, (2,)"),
    ("crossing(x, [[1.0]])", TypeError, "inputs_kv", "got list: [[1.0]]", "must be an array [..., S, 16]"),
    ("crossing(x, y, sow_weights=True)", ValueError, "sow_weights", "True", NEVER),
    ("crossing(x, y, order_ids=tokens)", TypeError, "order_ids", "Array([[1, 1", "must be a pair"),
    ("crossing(x, y, segment_ids=tokens)", TypeError, "segment_ids", "Array([[1, 1", "must be a pair"),
    (
        "crossing(x, y, segment_ids=(jnp.zeros((2, 8), int), tokens))",
        ValueError,
        "segment_ids of keys",
        "got shape (2, 4)",
        "one id a token, (2, 12)",
    ),
    ("linen_cross().init(jax.random.key(0), x, None)", TypeError, "inputs_kv", "got NoneType: None", "an array"),
    ("layer(x, decode=True)", NotImplementedError, "decode", "True", "call prefill(prompt, lengths)"),
    ("layer.prefill(x[0])", ValueError, "inputs", "got (8, 16)", "must have shape [B, T, 16]"),
    ("layer.prefill(x, 3)", ValueError, "lengths", "of shape ()", "must be integers of shape (2,)"),
    ("layer.prefill(x, selection=chosen[1])", ValueError, "selection", "(2, 3, 1, 1)", "must have shape [2, 8, G, k]"),
    (
        "layer.decode_step(x[:, 0], cache, position, selection=sl.Selection(jnp.zeros((2, 1, 1, 1), int), block=16))",
        NotImplementedError,
        "selection",
        "left=3",
        "keeps all keys in a row",
    ),
    ("layer.decode_step(x[:, 0], None, position)", TypeError, "cache", "got NoneType: None", "the KVCache of prefill"),
    ("layer.decode_step(x, cache, position)", ValueError, "inputs", "got (2, 8, 16)", "shape [B, 16], one token"),
    ("layer.decode_step(x[:1, 0], cache, position)", ValueError, "inputs", "got (1, 16)", "of the cache's 2"),
    ("layer.decode_step(x[:, 0].astype(int), cache, position)", ValueError, "inputs", "got int32", "must be floats"),
    ("layer.decode_step(x[:, 0], cache, 4)", ValueError, "position", "of shape ()", "must be integers of shape (2,)"),
    ("layer.prefill(x, max_step=0)", ValueError, "max_step", "got 0", "must be an integer >= 1"),
    ("layer.prefill(x, positions=position)", ValueError, "positions", "(2,)", "must have shape (2, 8) or (8,)"),
    ("layer.prefill(x, start=2)", ValueError, "start=2", "T=8", "must end by total=10, and that by seq_len=8"),
    ("layer.prefill(x[:, :4], total=3)", ValueError, "total=3", "T=4", "must end by total=3"),
    ("layer.prefill(x[:, :4], start=4)", TypeError, "cache", "NoneType", "must be the KVCache of prefill"),
    ("layer.prefill(x, cache=cache)", ValueError, "start", "got 0", "must be the number of tokens before the chunk"),
    ("layer.prefill(x[:1, :4], cache=cache, start=4)", ValueError, "cache", "batch is 2", "not 1"),
    ("layer.prefill(x[:, :4], cache=cache, start=4, max_step=3)", ValueError, "max_step", "got 3", "of the cache, 1"),
    (
        "layer.decode_step(x[:, 0], cache, position, positions=tokens)",
        ValueError,
        "positions",
        "got (2, 4)",
        "must have shape (2,), got",
    ),
    ("a_block([[1.0]])", TypeError, "x must be", "got list: [[1.0]]", "must be an array [..., T, 16]"),
    ("a_block(tokens)", ValueError, "x must be", "got int32", "tokens are embedded first"),
    ("a_block(x[..., :8])", ValueError, "x must have", "got (2, 8, 8)", "must have shape [..., T, 16]"),
    ("a_block(x, deterministic='yes')", ValueError, "deterministic", "got 'yes'", FLAG),
    ("a_block.prefill(tokens)", ValueError, "x must be", "got int32", "tokens are embedded first"),
    (
        "a_block.decode_step(x[:, 0], None, position)",
        TypeError,
        "cache",
        "got NoneType: None",
        "the KVCache of prefill",
    ),
    ("a_model([[1, 2]])", TypeError, "tokens", "got list: [[1, 2]]", "must be an array [..., T]"),
    ("a_model(x)", ValueError, "tokens", "got float32", "must be integers [..., T]"),
    ("a_model(jnp.array(3))", ValueError, "tokens", "got ()", "must have shape [..., T]"),
    ("a_model(jnp.ones((2, 9), int))", ValueError, "tokens", "got 9 tokens", "1..seq_len=8"),
    ("a_model(np.array([[2**32 + 3]]))", ValueError, "tokens", "4294967299", "must fit into int32"),
    ("a_model.prefill(np.array([[2**63 + 3]], np.uint64))", ValueError, "tokens", "9223372036854775811", "into uint32"),
    (
        "a_model.decode_step(np.array([-(2**32), 1]), caches, position)",
        ValueError,
        "tokens",
        "-4294967296",
        "into int32",
    ),
    ("a_model.prefill(tokens, chunk=0)", ValueError, "chunk", "got 0", "must be an integer >= 1"),
    ("a_model.prefill(tokens, chunk=2.0)", ValueError, "chunk", "got 2.0", "must be an integer >= 1"),
    ("a_model.prefill(tokens, positions=position)", ValueError, "positions", "got (2,)", "shape (2, 4) or (4,)"),
    ("a_model.prefill(tokens, start=6)", ValueError, "start=6", "T=4", "must end by total=10, and that by seq_len=8"),
    ("a_model.prefill(tokens, start=3, caches=())", ValueError, "caches", "got 0", "one a layer, 2"),
    ("a_model.prefill(tokens[0])", ValueError, "tokens", "got (4,)", "must have shape [B, T]"),
    ("a_model.decode_step(tokens[:, 0], None, position)", TypeError, "caches", "got NoneType", "those of prefill"),
    ("a_model.decode_step(tokens[:, 0], (None, None), position)", TypeError, "cache", "None", "the KVCache of prefill"),
    ("a_model.decode_step(tokens, caches, position)", ValueError, "tokens", "got (2, 4)", "shape [B], one a sequence"),
    (
        "a_model.decode_step(tokens, a_native.prefill(x)[1:] * 2, position)",
        ValueError,
        "tokens",
        "got (2, 4)",
        "[B], one a sequence: NativeSparseAttention reads one a step",
    ),
    ("a_model.decode_step([1, 2], caches, position)", TypeError, "tokens", "got list: [1, 2]", "must be an array [B]"),
    ("linen_attention(3).init(jax.random.key(0), x)", ValueError, "num_heads=3", "features=16", "must divide"),
    ("linen_attention().init(jax.random.key(0), [1.0])", TypeError, "inputs", "got list: [1.0]", "must be an array"),
    ("linen_attention().init(jax.random.key(0), tokens)", ValueError, "inputs", "got int32", "must be floats"),
    (
        "linen_attention().init(jax.random.key(0), tokens, method='prefill')",
        ValueError,
        "inputs",
        "got int32",
        "must be floats",
    ),
    ("linen.NativeSparseAttention(N, pattern=mask, seq_len=8)", ValueError, "pattern", "got Causal()", "must be NSA"),
    ("linen_block().init(jax.random.key(0), tokens)", ValueError, "x must be", "got int32", "must be floats"),
    ("linen_block().init(jax.random.key(0), None)", TypeError, "x must be", "got NoneType: None", "must be an array"),
]
ENCODE = "encode it"
GENERATE = [
    ("sl.generate(a_model, [[2**32 + 3]], 3)", ValueError, "prompts", "4294967299", "tokens in 0.."),
    ("sl.generate(a_model, 'hello', 3)", TypeError, "prompts", "'hello'", "[list(b'hello')]"),
    ("sl.generate(a_model, ['hello'], 3)", TypeError, "prompts", "['hello']", ENCODE),
    ("sl.generate(a_model, b'hello', 3)", TypeError, "prompts", "b'hello'", ENCODE),
    ("sl.generate(a_model, [1, 2, 3], 3)", ValueError, "prompts", "[(), (), ()]", "a sequence in a sequence"),
    ("sl.generate(a_model, [[1.5]], 3)", ValueError, "prompts", "got float64", "must be integers of shape [B, P]"),
    (
        "sl.generate(a_model, None, 3)",
        TypeError,
        "prompts",
        "NoneType: None",
        "an array [B, P] of integers, or a sequence",
    ),
    ("sl.generate(a_model, [[1]], 3, temprature=1)", TypeError, "generate", "'temprature'", "mean 'temperature'?"),
    (
        "sl.generate(foreign(prefill=3), [[1]], 3)",
        TypeError,
        "model",
        "got namespace",
        "must have prefill and decode_step",
    ),
    ("sl.generate(foreign(step=lambda *x: x[1]), [[1]], 3)", TypeError, "decode_step", "got dict", "(logits, caches)"),
    ("sl.generate(step_of(V + 1), [[1]], 3)", ValueError, "decode_step", "(1, 33)", "must return logits [1, 32]"),
    ("sl.generate(step_of(V, 1), [[1]], 3)", ValueError, "decode_step", "(1, 32, 1)", "must return logits [1, 32]"),
    ("sl.generate(step_of(V, dtype=int), [[1]], 3)", ValueError, "decode_step", "int32", "floats"),
    (
        "sl.generate(step_of(V, caches=()), [[1]], 3)",
        ValueError,
        "decode_step",
        "got PyTreeDef(())",
        "caches like those",
    ),
    (
        "sl.generate(step_of(V, caches={'k': jnp.zeros(4)}), [[1]], 3)",
        ValueError,
        "decode_step",
        "got caches['k']: float32[4]",
        "caches like those it takes, caches['k']: float32[3]",
    ),
    ("sl.generate(a_model, [[1]], '3')", ValueError, "num_tokens", "got '3'", INTEGER),
    ("sl.generate(a_model, [[1]], 3, chunk=0)", ValueError, "chunk", "got 0", INTEGER),
    ("sl.generate(foreign(), [[1]], 3, chunk=2)", ValueError, "chunk", "got 2", "no argument chunk"),
    ("sl.generate(a_model, [[1]], True)", ValueError, "num_tokens", "got True", INTEGER),
    (
        "sl.generate(a_model, [[1]] * 2, 3, lengths=[1, 1])",
        ValueError,
        "lengths",
        "sequence of prompts",
        "must be None",
    ),
    ("sl.generate(a_model, tokens, 9)", ValueError, "num_tokens=9", "4 tokens", "seq_len=8"),
    ("sl.generate(a_model, [[99]], 3)", ValueError, "prompts", "got 99 to 99", "tokens in 0..31"),
    ("sl.generate(a_model, [[1]], 3, temperature=True)", ValueError, "temperature", "got True", "a number >= 0"),
    (
        "sl.generate(a_model, [[1]], 3, temperature=jnp.ones(()))",
        ValueError,
        "temperature",
        "Array(1.",
        "a number >= 0",
    ),
    ("sl.generate(a_model, [[1]], 3, temperature=1.0)", ValueError, "key", "got None", "must be a jax.random.key"),
    ("sl.generate(a_model, [[1]], 3, temperature=1.0, key=0)", ValueError, "key", "got 0", "one jax.random.key"),
    (
        "sl.generate(a_model, [[1]], 3, temperature=1.0, key=jax.random.split(jax.random.key(0)))",
        ValueError,
        "key",
        "got Array((2,)",
        "one jax.random.key",
    ),
    ("sl.generate(a_model, [[1]], 3, top_k=2.0)", ValueError, "top_k", "got 2.0", INTEGER),
    ("sl.generate(a_model, [[1]], 3, top_p=True)", ValueError, "top_p", "got True", "in (0, 1]"),
    ("sl.generate(a_model, [[1]], 3, stop_token='x')", ValueError, "stop_token", "got 'x'", "must be an integer >= 0"),
    ("sl.generate(a_model, [[1]], 3, stop_token=[1, -1])", ValueError, "stop_token", "got -1", "an integer >= 0"),
    ("sl.generate(a_model, [[1]], 3, on_tokens=3)", TypeError, "on_tokens", "got 3", "a function of the tokens"),
    (
        "sl.generate(a_model, tokens, 3, padding_side='start')",
        ValueError,
        "padding_side",
        "got 'start'",
        "'right' or 'left'",
    ),
    (
        "sl.generate(a_model, tokens, 3, padding_side='left')",
        ValueError,
        "lengths",
        "got None",
        "how many tokens each prompt has where padding_side='left'",
    ),
    ("sl.generate(linen_lm, [[1]], 3)", ValueError, "model", "LM", "must be bound, model.bind(variables)"),
    ("sl.generate(None, [[1]], 3)", TypeError, "model", "got None", "must have prefill and decode_step"),
    ("sl.generate(sl.SparseTransformer, [[1]], 3)", TypeError, "model", "got <class", "prefill and decode_step"),
]
FN = [
    ("sl.make_attention_fn(512, mask)", ValueError, "seq_len", "got Causal()", INTEGER),
    ("sl.make_attention_fn(mask, 512.0)", ValueError, "seq_len", "got 512.0", INTEGER),
    (
        "sl.make_attention_fn(mask, 512, recomput=True)",
        TypeError,
        "make_attention_fn",
        "'recomput'",
        "mean 'recompute'?",
    ),
    ("sl.make_attention_fn(None, 512)", TypeError, "pattern", "None", "must be a Mask"),
    ("sl.make_attention_fn(mask, 512, recompute='yes')", ValueError, "recompute", "got 'yes'", FLAG),
    ("sl.make_attention_fn(mask, 512, scale=jnp.array(1.0))", ValueError, "scale", "got Array(1.", "must be a number"),
    ("sl.make_attention_fn(mask, 512, segment_ids=[0, 1])", TypeError, "segment_ids", "[0, 1]", "must be an array"),
    ("fn([[1.0]], heads, heads)", TypeError, "query", "got list: [[1.0]]", "must be an array [..., T, heads, size]"),
    ("fn(heads, heads[:, :4], heads)", ValueError, "key", "(2, 4, 4, 4)", "with equal T"),
    ("fn(*[jnp.ones((2, 4, 512, 4))] * 3)", ValueError, "query", "got (2, 4, 512, 4)", "look swapped"),
    ("fn(heads, heads, heads, dtype='float33')", ValueError, "dtype", "got 'float33'", FLOAT),
    ("fn(heads, heads, heads, is_causal='yes')", ValueError, "is_causal", "got 'yes'", FLAG),
    (
        "fn(heads, heads, heads, bias=heads)",
        ValueError,
        "bias must be None",
        "(2, 8, 4, 4)",
        "kernels add none to logits",
    ),
    ("sl.make_attention_fn('causal', 16, scale=10**400)", ValueError, "scale", "1000", "must be a number"),
]
MISUSES = [Misuse(*row) for row in SETTINGS + CALLS + GENERATE + FN]
