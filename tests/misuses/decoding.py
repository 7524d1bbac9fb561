"""Misuses of KVCache."""

import jax.numpy as jnp

import sparse_layers as sl
from tests.misuse import Misuse


def names():
    """A cache, one token of each sequence, and positions."""
    mask = sl.Causal() & sl.Window(7)
    return {
        "empty": sl.KVCache.empty,
        "whole": sl.KVCache.empty(sl.Causal(), 32, batch=2, num_heads=4, head_size=16),
        "choose": lambda *shape: sl.Selection(jnp.ones(shape, int), block=16),
        "cache": sl.KVCache.empty(mask, 32, batch=2, num_heads=4, head_size=16),
        "few": sl.KVCache.empty(mask, 32, batch=2, num_heads=4, head_size=16, max_step=3),
        "x": jnp.ones((2, 4, 16)),
        "at": jnp.zeros(2, int),
        "sizes": {"batch": 2, "num_heads": 4, "head_size": 16},
    }


ARRAY = "must be a JAX or numpy array"
SIZE = "must be an integer >= 1"
FLOATS = "must be floats of shape (2, 4, 16)"
INTEGERS = "must be integers of shape (2,)"
PLACE = "must lie in 0..seq_len - 1 = 31"
NUMBER = "must be a finite Python number"
CHOSEN = "must have shape [2, 1, G, k], one row for each 1 of T = 1 queries, with G one of [1, 4]"
WHOLE = "where the cache keeps all keys in a row, as that of Causal() does, and masks are computed from positions"

MISUSES = [
    # KVCache.empty, and what it is mistaken for.
    Misuse("sl.KVCache()", TypeError, "arguments", "none", "made by KVCache.empty(pattern, seq_len"),
    Misuse("sl.KVCache(mask, 32)", TypeError, "arguments", "32", "made by KVCache.empty(pattern, seq_len"),
    Misuse(
        "sl.KVCache(mask, 32, **sizes)", TypeError, "KVCache", "num_heads", "made by KVCache.empty(pattern, seq_len"
    ),
    Misuse("sl.KVCache(pattern=mask, seq_len=32)", TypeError, "KVCache", "pattern", "made by KVCache.empty"),
    Misuse("sl.KVCache((), (), (mask,), 32, 4, 4)", TypeError, "KVCache", "(), (), (Causal()", "made by KVCache.empty"),
    Misuse("empty(None, 32, **sizes)", TypeError, "mask", "NoneType", "must be a Mask"),
    Misuse("empty(sl.make_plan(mask, 32), 32, **sizes)", TypeError, "mask", "Plan", "must be a Mask"),
    Misuse("empty(sl.Full(), 32, **sizes)", ValueError, "pattern", "Full()", "needs a causal one"),
    Misuse("empty(jnp.ones((32, 32), bool), 32, **sizes)", ValueError, "pattern", "Array", "needs a causal one"),
    Misuse("empty(mask, 0, **sizes)", ValueError, "seq_len", "got 0", SIZE),
    Misuse("empty(mask, 32.0, **sizes)", ValueError, "seq_len", "32.0", SIZE),
    Misuse("empty(mask, '32', **sizes)", ValueError, "seq_len", "'32'", SIZE),
    Misuse("empty(mask, True, **sizes)", ValueError, "seq_len", "True", SIZE),
    Misuse("empty(mask, 32, **sizes | {'batch': -1})", ValueError, "batch", "-1", SIZE),
    Misuse("empty(mask, 32, **sizes | {'batch': 2.0})", ValueError, "batch", "2.0", SIZE),
    Misuse("empty(mask, 32, **sizes | {'num_heads': 0})", ValueError, "num_heads", "got 0", SIZE),
    Misuse("empty(mask, 32, **sizes | {'num_heads': '4'})", ValueError, "num_heads", "'4'", SIZE),
    Misuse("empty(mask, 32, **sizes | {'head_size': None})", ValueError, "head_size", "None", SIZE),
    Misuse("empty(mask, 32, **sizes, value_size=-1)", ValueError, "value_size", "-1", SIZE),
    Misuse("empty(mask, 32, **sizes, num_kv_heads=0)", ValueError, "num_kv_heads", "got 0", SIZE),
    Misuse("empty(mask, 32, **sizes, num_kv_heads=3)", ValueError, "num_kv_heads=3", "num_heads=4", "must divide"),
    Misuse("empty((mask, mask, sl.Causal()), 32, **sizes)", ValueError, "number of masks", "3", "must divide"),
    Misuse("empty(mask, 32, **sizes, cache_dtype='int4')", ValueError, "cache_dtype", "'int4'", "Known: float8_e4m3fn"),
    Misuse("empty(mask, 32, **sizes, cache_dtype=jnp.int8)", ValueError, "cache_dtype", "int8", "the name of an 8-bit"),
    Misuse("empty(mask, 32, **sizes, dtype=int)", ValueError, "dtype", "<class 'int'>", "a floating one"),
    Misuse("empty(mask, 32, **sizes, dtype='floaty')", ValueError, "dtype", "'floaty'", "a floating one"),
    Misuse("empty(mask, 32, **sizes, dtype=None)", ValueError, "dtype", "None", "a floating one"),
    Misuse("empty(mask, 2**31, **sizes)", ValueError, "seq_len", str(2**31), "at most 2147483646"),
    Misuse(
        "empty(mask, 32, batch=2, num_heads=4, head_dim=16)",
        TypeError,
        "KVCache.empty",
        "'head_dim'",
        "called head_size=",
    ),
    Misuse("empty(mask, 32, **sizes, max_step=0)", ValueError, "max_step", "got 0", SIZE),
    Misuse("empty(mask, 32, **sizes, max_step=33)", ValueError, "max_step", "got 33", "at most seq_len=32"),
    Misuse(
        "empty(mask, 32, **sizes, implementation='hopper')",
        ValueError,
        "implementation",
        "'hopper'",
        "'xla' or 'triton'",
    ),
    # One token, or some.
    Misuse("cache.step(q, k, v, at)", ValueError, "key", "(2, 32, 4, 16)", "or [B, S, K, H] with S in 1..max_step = 1"),
    Misuse("cache.step(x, k[:, :0], v[:, :0], at)", ValueError, "key", "(2, 0, 4, 16)", "in 1..max_step = 1"),
    Misuse("few.written(k[:, :4], v[:, :4], at)", ValueError, "key", "(2, 4, 4, 16)", "in 1..max_step = 3"),
    Misuse("few.written(k[:, :3], v[:, :2], at)", ValueError, "value", "(2, 2, 4, 16)", "axes are [B, S, K, Hv]"),
    Misuse("few.attend(q, at)", ValueError, "query", "(2, 32, 4, 16)", "or [B, S, N, H] with S in 1..max_step = 3"),
    Misuse("few.step(x, k[:, :2], v[:, :2], at)", ValueError, "query", "(2, 4, 16)", "as many tokens as key, (2, 2"),
    Misuse("few.step(q[:, :3], k[:, :3], v[:, :3], at + 30)", ValueError, "position", "30", "0..seq_len - 3 = 29"),
    Misuse("cache.step(x, x[:, :2], x, at)", ValueError, "key", "(2, 2, 16)", "axes are [B, K, H]"),
    Misuse("cache.step(x, x, x[:1], at)", ValueError, "value", "(1, 4, 16)", "axes are [B, K, Hv]"),
    Misuse("cache.step(x, x, x.astype(int), at)", ValueError, "value", "int32", FLOATS),
    Misuse("cache.step(x, None, x, at)", TypeError, "key", "None", ARRAY),
    Misuse("cache.step(x, [1, 2], x, at)", TypeError, "key", "[1, 2]", ARRAY),
    Misuse("cache.step('a', x, x, at)", TypeError, "query", "'a'", ARRAY),
    Misuse("cache.step(x, x, x, 0)", ValueError, "position", "shape ()", INTEGERS),
    Misuse("cache.step(x, x, x, None)", ValueError, "position", "None", INTEGERS),
    Misuse("cache.step(x, x, x, 'a')", ValueError, "position", "'a'", INTEGERS),
    Misuse("cache.step(x, x, x, at * 1.0)", ValueError, "position", "float32", INTEGERS),
    Misuse("cache.step(x, x, x, [0, 32])", ValueError, "position", "32", PLACE),
    Misuse("cache.step(x, x, x, [-1, 0])", ValueError, "position", "-1", PLACE),
    Misuse("cache.step(x, x, x, at, scale=True)", ValueError, "scale", "True", NUMBER),
    Misuse("cache.step(x, x, x, at, scale='a')", ValueError, "scale", "'a'", NUMBER),
    Misuse("cache.step(x, x, x, at, logits_soft_cap=0)", ValueError, "logits_soft_cap", "0", "must be > 0 or None"),
    Misuse("cache.step(x, x, x, at, sinks=jnp.zeros(3))", ValueError, "sinks", "(3,)", "shape [N] = (4,)"),
    Misuse(
        "cache.step(x, x, x, at, order_ids=at)",
        TypeError,
        "order_ids",
        "KVCache.step: unknown",
        "is an argument of prefill",
    ),
    Misuse(
        "cache.step(x, x, x, at, segment_ids=at)",
        TypeError,
        "segment_ids",
        "KVCache.step: unknown",
        "Known: bias, index",
    ),
    Misuse("cache.written(x, x, at > 0)", ValueError, "position", "bool", INTEGERS),
    Misuse("cache.attend(x.swapaxes(0, 1), at)", ValueError, "query", "(4, 2, 16)", "axes are [B, N, H]"),
    # A selection.
    Misuse("whole.step(x, x, x, at, selection=at)", TypeError, "selection", "int32 of", "must be a Selection or None"),
    Misuse("whole.attend(x, at, selection=choose(2, 32, 1, 3))", ValueError, "ids", "(2, 32, 1, 3)", CHOSEN),
    Misuse("whole.attend(x, at, selection=choose(2, 1, 2, 3))", ValueError, "ids", "(2, 1, 2, 3)", CHOSEN),
    Misuse(
        "empty(sl.Causal(), 16, **sizes).attend(x, at, selection=choose(2, 1, 1, 3))",
        ValueError,
        "selection: ids",
        "got 1",
        "below 1, the number of blocks of 16 in S = 16 keys",
    ),
    Misuse("cache.step(x, x, x, at, selection=choose(2, 1, 1, 3))", NotImplementedError, "selection", "left=7", WHOLE),
    Misuse(
        "empty(jnp.tri(32, dtype=bool), 32, **sizes).attend(x, at, selection=choose(2, 1, 1, 3))",
        NotImplementedError,
        "selection",
        "Array",
        WHOLE,
    ),
    # A prompt.
    Misuse("cache.filled(k.swapaxes(1, 2), v)", ValueError, "key", "(2, 4, 32, 16)", "axes are [B, P, K, H]"),
    Misuse("cache.filled(k[0], v[0])", ValueError, "key", "(32, 4, 16)", "axes are [B, P, K, H]"),
    Misuse("cache.filled(None, v)", TypeError, "key", "None", ARRAY),
    Misuse("cache.filled(k, v.tolist())", TypeError, "value", "list", ARRAY),
    Misuse("cache.filled(k, v[:, :10])", ValueError, "value", "(2, 10, 4, 16)", "(2, 32, 4, 16)"),
    Misuse("cache.filled(k[:, :0], v[:, :0])", ValueError, "key", "(2, 0, 4, 16)", "P in 1..32"),
    Misuse("cache.filled(jnp.tile(k, (1, 2, 1, 1)), v)", ValueError, "key", "(2, 64, 4, 16)", "P in 1..32"),
    Misuse("cache.filled(k, v, 5)", ValueError, "lengths", "shape ()", INTEGERS),
    Misuse("cache.filled(k, v, [33, 1])", ValueError, "lengths", "33", "must lie in 0..32"),
    Misuse("cache.filled(k, v, start=3)", ValueError, "key", "(2, 32, 4, 16)", "in 1..29, from start=3 on"),
    Misuse("cache.filled(k[:, :4], v[:, :4], [9, 3], start=4)", ValueError, "lengths", "9", "must lie in 0..8"),
    Misuse("cache.filled(k, v, start=-1)", ValueError, "start", "-1", "must be an integer >= 0"),
    Misuse("cache.filled(k, v, [1.0, 2.0])", ValueError, "lengths", "float64", INTEGERS),
    Misuse("cache.filled(k, v, 'all')", ValueError, "lengths", "'all'", INTEGERS),
]
