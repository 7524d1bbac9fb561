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
    }


ARRAY = "must be a JAX or numpy array"
BLOCK = "must be a multiple of 16 from 16 to 512"
IDS = "must be integers of shape [..., ceil(T / granularity), G, k]"
NUMBERS = "must be numbers of blocks, or -1 for none"
SHAPE = "ids must have shape [2, 32, G, k], one row for each 1 of T = 32 queries, with G one of [1, 4]"
FLOATS = "must be floats of shape"

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
]
