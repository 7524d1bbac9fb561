"""Misuses of selections and of what makes them."""

import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from tests.misuse import Misuse


def names():
    """Selections for 32 queries and keys, two batch entries and four heads; ids are [2, 32, 1, 3]."""
    ids = np.zeros((2, 32, 1, 3), np.int32)
    return {
        "op": sl.block_sparse_attention,
        "ids": ids,
        "choose": lambda ids=ids, block=16, **options: sl.Selection(ids, block=block, **options),
        "scores": jnp.ones((2, 2, 1, 4)),
        "top": lambda scores, k=2, block=16, granularity=16, **options: sl.top_k_blocks(
            scores, k, block=block, granularity=granularity, **options
        ),
        "select": sl.MoBA(block=16, count=1).select,
        "documents": jnp.zeros((2, 32), int),
    }


ARRAY = "must be a JAX or numpy array"
BLOCK = "must be a multiple of 16 from 16 to 512"
IDS = "must be integers of shape [..., ceil(T / granularity), G, k]"
NUMBERS = "must be numbers of blocks, or -1 for none"
SHAPE = "ids must have shape [2, 32, G, k], one row for each 1 of T = 32 queries, with G one of [1, 4]"
FLOATS = "must be floats of shape"
DOCUMENTS = "must be integers of shape (2, 32)"

MISUSES = [
    # The value.
    Misuse("choose(None)", TypeError, "ids", "NoneType: None", ARRAY),
    Misuse("choose([[[0]]])", TypeError, "ids", "list: [[[0]]]", ARRAY),
    Misuse("choose(ids * 1.0)", ValueError, "ids", "float64 of shape (2, 32, 1, 3)", IDS),
    Misuse("choose(ids > 0)", ValueError, "ids", "bool", IDS),
    Misuse("choose(ids[0, 0])", ValueError, "ids", "(1, 3)", IDS),
    Misuse("choose(ids - 2)", ValueError, "ids", "got -2 to -2", NUMBERS),
    Misuse("choose(ids + np.int64(2**31))", ValueError, "ids", "2147483648", NUMBERS),
    Misuse("choose(block=0)", ValueError, "block", "got 0", BLOCK),
    Misuse("choose(block=24)", ValueError, "block", "got 24", BLOCK),
    Misuse("choose(block=1024)", ValueError, "block", "got 1024", BLOCK),
    Misuse("choose(block=64.0)", ValueError, "block", "got 64.0", BLOCK),
    Misuse("choose(block=True)", ValueError, "block", "got True", BLOCK),
    Misuse("choose(granularity=32)", ValueError, "granularity", "got 32", "must be one of (1, 16, 64, 128)"),
    Misuse("choose(granularity=True)", ValueError, "granularity", "got True", "must be one of (1, 16, 64, 128)"),
    Misuse("sl.Selection(ids)", TypeError, "Selection", "got ids=int32", "block= must be given"),
    Misuse("choose(granularty=16)", TypeError, "Selection: unknown argument", "'granularty'", "mean 'granularity'?"),
    # In a call of the op.
    Misuse("op(q, k, v, mask, selection=ids)", TypeError, "selection", "int32 of", "must be a Selection or None"),
    Misuse("op(q, k, v, mask, selection=(ids, 16))", TypeError, "selection", "tuple", "must be a Selection or None"),
    Misuse("op(q, k, v, mask, selection=choose(ids[:1]))", ValueError, "selection", "(1, 32, 1, 3)", SHAPE),
    Misuse("op(q, k, v, mask, selection=choose(ids[0]))", ValueError, "selection", "(32, 1, 3)", SHAPE),
    Misuse("op(q, k, v, mask, selection=choose(ids[:, :31]))", ValueError, "selection", "(2, 31, 1, 3)", SHAPE),
    Misuse("op(q, k, v, mask, selection=choose(ids.repeat(2, 2)))", ValueError, "selection", "(2, 32, 2, 3)", SHAPE),
    Misuse("op(q, k, v, mask, selection=choose(ids[:, :, :0]))", ValueError, "selection", "(2, 32, 0, 3)", SHAPE),
    Misuse(
        "op(q, k, v, mask, selection=choose(granularity=16))", ValueError, "(2, 32, 1, 3)", "each 16", "[2, 2, G, k]"
    ),
    Misuse("op(q[0], k[0], v[0], mask, selection=choose())", ValueError, "selection", "(2, 32, 1, 3)", "[32, G, k]"),
    Misuse(
        "op(q, k, v, mask, selection=choose(ids + 2))",
        ValueError,
        "ids",
        "got 2",
        "below 2, the number of blocks of 16",
    ),
    Misuse(
        "op(q, k, v, mask, selection=jax.tree.map(lambda _: 0, choose()))", ValueError, "ids", "int: 0", "[2, 32, G, k]"
    ),
    # Scorers' helpers.
    Misuse("top([1.0])", TypeError, "scores", "list: [1.0]", ARRAY),
    Misuse("top(scores.astype(int))", ValueError, "scores", "int32 of shape (2, 2, 1, 4)", FLOATS),
    Misuse("top(scores[0, 0])", ValueError, "scores", "(1, 4)", FLOATS),
    Misuse("top(scores, -1)", ValueError, "k", "got -1", "must be an integer >= 0"),
    Misuse("top(scores, 2.0)", ValueError, "k", "got 2.0", "must be an integer >= 0"),
    Misuse("top(scores, 1, forced=sl.Window(1))", ValueError, "k", "got 1", "at least the number of forced blocks"),
    Misuse("top(scores, forced='own')", TypeError, "forced", "str: 'own'", "must be a mask in units of blocks"),
    Misuse("top(scores, causal=None)", ValueError, "causal", "got None", "must be true or false"),
    Misuse("top(scores, return_scores=1)", ValueError, "return_scores", "got 1", "must be true or false"),
    Misuse("top(scores, start=-1)", ValueError, "start", "got -1", "must be an integer >= 0"),
    Misuse("top(scores, start=1.5)", ValueError, "start", "got 1.5", "must be an integer >= 0"),
    Misuse("top(scores, start=jnp.arange(2))", ValueError, "start", "int32 of shape (2,)", "must be an integer >= 0"),
    Misuse("top(scores, start=jnp.float32(1))", ValueError, "start", "float32 of shape ()", "must be an integer >= 0"),
    Misuse("top(scores, force=1)", TypeError, "top_k_blocks: unknown argument", "'force'", "did you mean 'forced'?"),
    Misuse("top(scores, block=8)", ValueError, "block", "got 8", BLOCK),
    Misuse("top(scores, granularity=2)", ValueError, "granularity", "got 2", "must be one of"),
    Misuse("sl.mean_pool_blocks(k, 0)", ValueError, "block", "got 0", "must be an integer >= 1"),
    Misuse("sl.mean_pool_blocks(k.astype(int), 16)", ValueError, "x", "int32", FLOATS),
    Misuse("sl.mean_pool_blocks(3, 16)", TypeError, "x", "int: 3", ARRAY),
    # A scorer that is asked: its arrays are those of the op.
    Misuse("select(q, q[:1])", ValueError, "batch sizes of query, key", "(1, 32, 4, 16)", "must agree"),
    Misuse("select(q, q[0])", ValueError, "key", "(32, 4, 16)", "as many axes as query, 4"),
    Misuse("select(q[0, 0], q[0, 0])", ValueError, "query", "(4, 16)", "[B, T, N, H] or [T, N, H]"),
    Misuse("select(q, q[..., :8])", ValueError, "query and key", "(2, 32, 4, 8)", "agree in size H"),
    Misuse("select(q, q[:, :, :3])", ValueError, "key heads", "got 3 and 4", "must divide"),
    Misuse(
        "select(q, q[:, :20])", ValueError, "query and key", "T = 32 queries and 20 keys", "must be of one sequence"
    ),
    Misuse("select(q[:, :9], q)", ValueError, "query and key", "T = 9 queries and 32 keys", "first= says where"),
    Misuse("select(q[:, :0], q[:, :0])", ValueError, "query", "(2, 0, 4, 16)", "must not be empty"),
    Misuse("select(q.astype(int), q)", ValueError, "query", "int32", "float32, bfloat16, float16 or float64"),
    Misuse("select(q, q.astype(jnp.float16))", ValueError, "key", "float16", "dtype of query, float32"),
    Misuse("select(q, None)", TypeError, "key", "NoneType: None", ARRAY),
    Misuse("select(q.tolist(), k)", TypeError, "query", "list: [[[[", ARRAY),
    Misuse("select(q)", TypeError, "Scorer.select", "float32[2, 32, 4, 16]", "key= must be given"),
    Misuse("select(q, k, v)", ValueError, "segment_ids", "float32 of shape (2, 32, 4, 16)", "v, mask, selection="),
    Misuse("select(q[0], k[0], v[0])", ValueError, "segment_ids", "float32 of shape (32, 4, 16)", "selection="),
    Misuse("select(q, k, value=v)", TypeError, "Scorer.select: unknown argument", "'value'", "selection="),
    Misuse("select(q, k, documents > 0)", ValueError, "segment_ids of queries", "bool", "jnp.where(valid, 0, -1)"),
    Misuse("select(q, k, documents * 1.0)", ValueError, "segment_ids of queries", "float32", DOCUMENTS),
    Misuse("select(q, k, np.ones(32, int))", ValueError, "segment_ids of queries", "(32,)", DOCUMENTS),
    Misuse("select(q, k, documents.T)", ValueError, "segment_ids of queries", "(32, 2)", "write x.T"),
    Misuse("select(q, k, [[0], [0, 1]])", ValueError, "segment_ids of queries", "[[0], [0, 1]]", DOCUMENTS),
    Misuse("select(q, k, (documents,))", ValueError, "segment_ids", "1 entries", "or a pair"),
    Misuse("select(q, k, (documents, None))", ValueError, "segment_ids of keys", "None", DOCUMENTS),
    Misuse("select(q, k, np.full((2, 32), 2**32))", ValueError, "segment_ids", "4294967296", "must fit into int32"),
    Misuse("select(q[0], k[0], documents)", ValueError, "segment_ids", "(2, 32)", "integers of shape (32,)"),
    Misuse("select(q[:, :9], k, documents[:, :9], first=3)", ValueError, "segment_ids", "(2, 9)", DOCUMENTS),
    Misuse("select(q, k, scale='1')", ValueError, "scale", "'1'", "must be a finite Python number"),
    Misuse("select(q[:, :9], k, first=-1)", ValueError, "first", "got -1", "must be an integer >= 0"),
    Misuse("select(q[:, :9], k, first=jnp.arange(2))", ValueError, "first", "shape (2,)", "must be an integer >= 0"),
    Misuse("select(q, k, pooled=k)", ValueError, "pooled", "(2, 32, 4, 16)", "floats of shape (2, 2, 4, 16)"),
    Misuse("select(q, k, first=jnp.float32(1))", ValueError, "first", "float32 of shape ()", "an array [] of one"),
]
