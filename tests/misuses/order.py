"""Misuses of what makes order ids and segment ids."""

import jax
import jax.numpy as jnp

import sparse_layers as sl
from tests.misuse import Misuse


def names():
    """Segment ids of three documents in the first row and one in the second."""
    return {
        "jit": jax.jit,
        "ids": jnp.array([[0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 0, 0]]),
        "segment_ids": sl.segment_ids_from_lengths,
        "prefix": sl.prefix_order,
        "spans": sl.span_order,
        "blocks": sl.block_order,
    }


LENGTH = "must be an integer >= 1"
LENGTHS = "must be integers of shape [..., D], one for each document"
PREFIX = "must be integers, one for each row"
PREFIXES = "must be integers of shape [2, D], one for each document of segment_ids, or [2, 1] for one in each row"
IDS = "must be integers of shape [..., 6]"
SPANS = "must be bools or integers of shape [..., T]"

MISUSES = [
    # Lengths of documents.
    Misuse("segment_ids(3, 6)", ValueError, "lengths", "shape ()", LENGTHS),
    Misuse("segment_ids([3.0, 2.0], 6)", ValueError, "lengths", "float64", LENGTHS),
    Misuse("segment_ids(jnp.ones(2), 6)", ValueError, "lengths", "float32", "write lengths.astype(jnp.int32)"),
    Misuse("segment_ids([True, False], 6)", ValueError, "lengths", "bool", LENGTHS),
    Misuse("segment_ids([[3], [2, 1]], 6)", ValueError, "lengths", "[[3], [2, 1]]", LENGTHS),
    Misuse("segment_ids('3', 6)", ValueError, "lengths", "'3'", LENGTHS),
    Misuse("segment_ids(None, 6)", ValueError, "lengths", "None", LENGTHS),
    Misuse("segment_ids([3, -1], 6)", ValueError, "lengths", "got -1", "must be >= 0"),
    Misuse("segment_ids([[3, 3], [3, 4]], 6)", ValueError, "lengths", "got 7", "at most num_tokens = 6"),
    Misuse("segment_ids([0, 3, 6], 6)", ValueError, "lengths", "got 9", "write jnp.diff(cu_seqlens)"),
    Misuse("segment_ids([3, 2], 0)", ValueError, "num_tokens", "got 0", LENGTH),
    Misuse("segment_ids([3, 2], 6.0)", ValueError, "num_tokens", "got 6.0", LENGTH),
    Misuse("segment_ids([3, 2], True)", ValueError, "num_tokens", "got True", LENGTH),
    Misuse("segment_ids([3, 2], 2**31)", ValueError, "num_tokens", "got 2147483648", "must be at most"),
    Misuse("jit(segment_ids)(jnp.array([3, 2]), 6)", ValueError, "num_tokens", "int32[]", LENGTH),
    Misuse("segment_ids([3, 2])", TypeError, "segment_ids_from_lengths", "got lengths=[3, 2]", "num_tokens= must be"),
    Misuse("segment_ids([3, 2], num_token=6)", TypeError, "unknown argument", "'num_token'", "mean 'num_tokens'?"),
    # Lengths of prefixes.
    Misuse("prefix(2.0, 6)", ValueError, "prefix_lengths", "float64", PREFIX),
    Misuse("prefix(jnp.ones(2), 6)", ValueError, "prefix_lengths", "float32", "prefix_lengths.astype(jnp.int32)"),
    Misuse("prefix(True, 6)", ValueError, "prefix_lengths", "bool", PREFIX),
    Misuse("prefix(ids > 0, 6)", ValueError, "prefix_lengths", "bool of shape (2, 6)", "write prefix_lengths.sum(-1)"),
    Misuse("prefix(None, 6)", ValueError, "prefix_lengths", "None", PREFIX),
    Misuse("prefix(2, -1)", ValueError, "num_tokens", "got -1", LENGTH),
    Misuse("prefix(2, jnp.float32(6))", ValueError, "num_tokens", "Array(6.", LENGTH),
    Misuse("prefix([[1, 1, 1]] * 2, 6, ids * 1.0)", ValueError, "segment_ids", "float32", "segment_ids.astype"),
    Misuse("prefix([[1, 1, 1]] * 2, 6, ids > 0)", ValueError, "segment_ids", "bool", "write jnp.where(valid, 0, -1)"),
    Misuse("prefix([[1, 1, 1]] * 2, 6, ids[:, :5])", ValueError, "segment_ids", "(2, 5)", IDS),
    Misuse("prefix([1, 1, 1], 6, 0)", ValueError, "segment_ids", "shape ()", IDS),
    Misuse("prefix([3, 1], 6, ids)", ValueError, "prefix_lengths", "shape (2,)", PREFIXES),
    Misuse("prefix([[1, 1, 1]], 6, ids)", ValueError, "prefix_lengths", "shape (1, 3)", PREFIXES),
    Misuse("prefix([[1.0]] * 2, 6, ids)", ValueError, "prefix_lengths", "float64", PREFIXES),
    Misuse("prefix([[3], [1]], 6, ids)", ValueError, "prefix_lengths", "got 1 in a row with 3", "one entry for each"),
    Misuse("prefix(2, 6, segments=ids)", TypeError, "unknown argument", "'segments'", "mean 'segment_ids'?"),
    # Spans and blocks.
    Misuse("spans(ids * 1.0)", ValueError, "spans", "float32 of shape (2, 6)", SPANS),
    Misuse("spans(jnp.ones(3))", ValueError, "spans", "float32", "write spans.astype(jnp.int32)"),
    Misuse("spans(True)", ValueError, "spans", "shape ()", SPANS),
    Misuse("spans([(0, 2), (4,)])", ValueError, "spans", "[(0, 2), (4,)]", SPANS),
    Misuse("spans(None)", ValueError, "spans", "None", SPANS),
    Misuse("blocks(0, 6)", ValueError, "block", "got 0", LENGTH),
    Misuse("blocks(2.0, 6)", ValueError, "block", "got 2.0", LENGTH),
    Misuse("blocks(True, 6)", ValueError, "block", "got True", LENGTH),
    Misuse("jit(blocks)(2, 6)", ValueError, "block", "int32[]", LENGTH),
    Misuse("blocks(2, 0)", ValueError, "num_tokens", "got 0", LENGTH),
    Misuse("blocks(2, num_tokens=None)", ValueError, "num_tokens", "got None", LENGTH),
    Misuse("blocks(block_size=2, num_tokens=6)", TypeError, "'block_size'", "got 2", "it is called block= here"),
]
