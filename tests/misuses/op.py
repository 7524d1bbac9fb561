"""Misuses of the op, of plans and of kernel settings."""

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from tests.misuse import Misuse


def names():
    """Plans and arrays for wrong calls of the op."""
    return {
        "op": sl.block_sparse_attention,
        "plan": sl.make_plan(sl.Causal() & sl.Window(7), 32),
        "bias": sl.DistanceBias,
        "table": jnp.zeros((4, 5)),
        "tri": np.tri(32, dtype=bool),
        "ids": jnp.zeros((2, 32), int),
        "documents": lambda size: (lambda table: sl.from_mask_mod(lambda b, h, q, k: table[q] == table[k]))(
            np.zeros(size)
        ),
        "P": jax.P,
        "swapped": lambda *arrays: [x.swapaxes(-3, -2) for x in arrays],
    }


SWAPPED = "heads come after tokens"
ARRAY = "must be a JAX or numpy array"
NUMBER = "must be a finite Python number"
NAMES = "must be None or one of implementations()"
IDS = "must be integers of shape (2, 32)"
MASK_ARRAY = "must be a bool array [T, S], [1, T, S] or [N, T, S]"
LENGTH = "must be an integer >= 1"

MISUSES = [
    # Heads before tokens, where anything shows it.
    Misuse("op(*swapped(q, k, v), plan)", ValueError, "plan is for q_len 32", "T = 4", SWAPPED),
    Misuse("op(*swapped(q[0], k[0], v[0]), plan)", ValueError, "plan is for q_len 32", "T = 4", SWAPPED),
    Misuse("op(*swapped(q, k, v), tri)", ValueError, "mask", "shape (32, 32)", SWAPPED),
    Misuse("op(*swapped(q, k, v), jnp.asarray(tri))", ValueError, "mask", "shape (32, 32)", SWAPPED),
    Misuse("op(*swapped(q, k, v), mask, segment_ids=ids)", ValueError, "segment_ids", "shape (2, 32)", SWAPPED),
    # Arrays.
    Misuse("op(q.tolist(), k, v, mask)", TypeError, "query", "list: [[[[", ARRAY),
    Misuse("op(q, [1, 2], v, mask)", TypeError, "key", "list: [1, 2]", ARRAY),
    Misuse("op(q, k, None, mask)", TypeError, "value", "NoneType: None", ARRAY),
    Misuse("op('q', k, v, mask)", TypeError, "query", "'q'", ARRAY),
    Misuse("op(mask, q, k, v)", TypeError, "query", "Causal()", ARRAY),
    Misuse("op(q[None], k, v, mask)", ValueError, "query", "(1, 2, 32, 4, 16)", "[B, T, N, H] or [T, N, H]"),
    Misuse("op(q[0, 0], k, v, mask)", ValueError, "query", "(4, 16)", "[B, T, N, H] or [T, N, H]"),
    Misuse("op(q[0], k, v, mask)", ValueError, "key", "(2, 32, 4, 16)", "as many axes as query, 3"),
    Misuse("op(q, k[:1], v[:1], mask)", ValueError, "batch sizes", "(1, 32, 4, 16)", "must agree"),
    Misuse("op(q, k[:, :20], v, mask)", ValueError, "key and value", "(2, 20, 4, 16)", "agree in length and heads"),
    Misuse("op(q, k[..., :8], v, mask)", ValueError, "query and key", "(2, 32, 4, 8)", "agree in size H"),
    Misuse("op(q, k[:, :, :3], v[:, :, :3], mask)", ValueError, "key heads", "got 3 and 4", "must divide"),
    Misuse("op(q[:, :0], k[:, :0], v[:, :0], mask)", ValueError, "query", "(2, 0, 4, 16)", "must not be empty"),
    Misuse("op(q > 0, k, v, mask)", ValueError, "query", "bool", "float32, bfloat16, float16 or float64"),
    Misuse("op(q.astype(complex), k, v, mask)", ValueError, "query", "complex64", "float32, bfloat16"),
    Misuse("op(q, k.astype(jnp.bfloat16), v, mask)", ValueError, "key", "bfloat16", "dtype of query, float32"),
    # What describes no mask, or not one of this call.
    Misuse("op(q, k, v, True)", TypeError, "mask", "bool: True", "must be a Mask"),
    Misuse("op(q, k, v, 128)", TypeError, "mask", "int: 128", "must be a Mask"),
    Misuse("op(q, k, v, {'a': mask})", TypeError, "mask", "dict", "must be a Mask"),
    Misuse("op(q, k, v, [[True] * 32] * 32)", TypeError, "mask", "bool: True", "must be a Mask"),
    Misuse("op(q, k, v, [mask, None])", TypeError, "mask", "NoneType", "must be a Mask"),
    Misuse("op(q, k, v, (mask, mask, sl.Causal()))", ValueError, "number of masks", "3 masks", "must divide"),
    Misuse("op(q, k, v, tri.astype(float))", ValueError, "mask", "float64", MASK_ARRAY),
    Misuse("op(q, k, v, jnp.asarray(tri, int))", ValueError, "mask", "int32", MASK_ARRAY),
    Misuse("op(q, k, v, tri[:31])", ValueError, "mask", "(31, 32)", MASK_ARRAY),
    Misuse("op(q, k, v, tri[0])", ValueError, "mask", "(32,)", MASK_ARRAY),
    Misuse("op(q, k, v, np.ones((2, 4, 32, 32), bool))", ValueError, "mask", "(2, 4, 32, 32)", MASK_ARRAY),
    Misuse("op(q[:, :9], k, v, plan)", ValueError, "plan", "T = 9", "is for q_len 32"),
    # Options.
    Misuse("op(q, k, v, mask, scale=True)", ValueError, "scale", "True", NUMBER),
    Misuse("op(q, k, v, mask, scale=np.True_)", ValueError, "scale", "True", NUMBER),
    Misuse("op(q, k, v, mask, scale='1')", ValueError, "scale", "'1'", NUMBER),
    Misuse("op(q, k, v, mask, scale=1j)", ValueError, "scale", "1j", NUMBER),
    Misuse("op(q, k, v, mask, scale=[1.0])", ValueError, "scale", "[1.0]", NUMBER),
    Misuse("op(q, k, v, mask, scale=10**400)", ValueError, "scale", "1000", NUMBER),
    Misuse("op(q, k, v, mask, scale=jnp.ones(()))", ValueError, "scale", "Array(1", NUMBER),
    Misuse("op(q, k, v, mask, logits_soft_cap=True)", ValueError, "logits_soft_cap", "True", NUMBER),
    Misuse("op(q, k, v, mask, logits_soft_cap=0)", ValueError, "logits_soft_cap", "0", "must be > 0 or None"),
    Misuse("op(q, k, v, mask, logits_soft_cap='30')", ValueError, "logits_soft_cap", "'30'", NUMBER),
    Misuse("op(q, k, v, mask, sinks=True)", ValueError, "sinks", "bool", "floats of shape [N] = (4,)"),
    Misuse("op(q, k, v, mask, sinks='a')", ValueError, "sinks", "'a'", "floats of shape [N] = (4,)"),
    Misuse("op(q, k, v, mask, sinks=jnp.zeros(2))", ValueError, "sinks", "(2,)", "floats of shape [N] = (4,)"),
    Misuse("op(q, k, v, mask, sinks=jnp.zeros(4, int))", ValueError, "sinks", "int32", "floats of shape [N] = (4,)"),
    Misuse("op(q, k, v, mask, bias=q)", TypeError, "bias", "float32 of shape (2, 32, 4, 16)", "must be a DistanceBias"),
    Misuse("op(q, k, v, mask, bias=sl.alibi(8))", ValueError, "bias: slopes", "got 8", "must be N = 4 numbers"),
    Misuse("op(q, k, v, mask, bias=bias(table[:2]))", ValueError, "bias: table", "(2, 5)", "[1, L] with N = 4"),
    Misuse("bias()", ValueError, "DistanceBias", "None for both", "must have a table or slopes"),
    Misuse("bias(table[0])", ValueError, "table", "float32 of shape (5,)", "for all heads write table[None]"),
    Misuse("bias(table.astype(int))", ValueError, "table", "int32 of shape (4, 5)", "must be floats of shape [N, L]"),
    Misuse("bias(table[:, :0])", ValueError, "table", "(4, 0)", "must not be empty"),
    Misuse("bias(table[:, 1:])", ValueError, "table", "got 4", "odd number of entries"),
    Misuse("bias(table, 5)", ValueError, "center", "got 5", "must be an integer from 0 to 4"),
    Misuse("bias(table, True)", ValueError, "center", "got True", "must be an integer from 0 to 4"),
    Misuse("bias(center=0, slopes=[1])", ValueError, "center", "got 0", "must be None without"),
    Misuse("bias(slopes=table[0])", ValueError, "slopes", "float32 of shape (5,)", "learned ones go into"),
    Misuse("bias(slopes=[1, np.inf])", ValueError, "slopes", "inf]", "must be numbers of at most 1e30"),
    Misuse("bias(slopes=2.0)", ValueError, "slopes", "2.0", "must be numbers of at most 1e30"),
    Misuse("bias(tables=table)", TypeError, "unknown argument", "'tables'", "mean 'table'?"),
    Misuse("op(q, k, v, mask, bias=sl.grid_bias((4, 4), table[:, None]))", ValueError, "bias", "16 key", "(32, 32)"),
    Misuse("sl.grid_bias((4, 0), table)", ValueError, "grid_bias: shape", "got (4, 0)", "must be integers >= 1"),
    Misuse("sl.grid_bias(16, table)", TypeError, "grid_bias: shape", "got 16", "must be a sequence of lengths"),
    Misuse("sl.grid_bias((4, 8), [table, table[:3]])", ValueError, "tables", "[3, 4]", "must have the same N"),
    Misuse("sl.grid_bias((4, 8), [table, table[:, 1:]])", ValueError, "tables[1]", "(4, 4)", "must have odd lengths"),
    Misuse("sl.grid_bias((4, 8), table)", ValueError, "tables", "(4, 5)", "must be floats of shape [N, L1, L2]"),
    Misuse("sl.grid_bias((4, 8), [table])", ValueError, "tables", "got 1", "one for each axis of shape (4, 8)"),
    Misuse("sl.grid_bias((8,), table[:, 1:])", ValueError, "tables", "(4, 4)", "must have odd lengths"),
    Misuse("sl.alibi(0)", ValueError, "num_heads", "got 0", LENGTH),
    Misuse("sl.t5_bias(table)", ValueError, "buckets", "got 5", "must be an even number >= 4"),
    Misuse("sl.t5_bias(table[:, :4], max_distance=1)", ValueError, "max_distance", "got 1", "must be above 1"),
    Misuse("sl.t5_bias(table[0])", ValueError, "buckets", "(5,)", "must be floats of shape [N, num_buckets]"),
    Misuse("op(q, k, v, mask, segment_ids=ids * 1.0)", ValueError, "segment_ids of queries", "float32", IDS),
    Misuse("op(q, k, v, mask, segment_ids=ids > 0)", ValueError, "segment_ids of queries", "bool", IDS),
    Misuse("op(q, k, v, mask, segment_ids=ids[0])", ValueError, "segment_ids of queries", "(32,)", IDS),
    Misuse("op(q, k, v, mask, segment_ids=0)", ValueError, "segment_ids of queries", "shape ()", IDS),
    Misuse("op(q, k, v, mask, segment_ids='a')", ValueError, "segment_ids of queries", "'a'", IDS),
    Misuse("op(q, k, v, mask, segment_ids=[[0], [0, 1]])", ValueError, "segment_ids", "[[0], [0, 1]]", IDS),
    Misuse("op(q, k, v, mask, segment_ids=(ids, None))", ValueError, "segment_ids of keys", "None", IDS),
    Misuse("op(q, k, v, mask, order_ids=ids * 1.0)", ValueError, "order_ids of queries", "order_ids.astype(", IDS),
    Misuse("op(q, k, v, mask, order_ids=ids > 0)", ValueError, "order_ids of queries", "bool", "sl.span_order(spans)"),
    Misuse(
        "op(q, k, v, mask, order_ids=ids[0])", ValueError, "order_ids of queries", "(32,)", "broadcast_to(x, (2, 32))"
    ),
    Misuse("op(q, k, v, mask, order_ids=[ids, ids])", ValueError, "order_ids", "a list of two", "a pair is a tuple"),
    Misuse("op(q, k, v, mask, order_ids=ids.T)", ValueError, "order_ids of queries", "(32, 2)", "write x.T"),
    Misuse("op(q, k, v, mask, order_ids=[[0], [0, 1]])", ValueError, "order_ids", "[[0], [0, 1]]", IDS),
    Misuse("op(q, k, v, mask, order_ids=(ids, ids[:, :9]))", ValueError, "order_ids of keys", "(2, 9)", IDS),
    Misuse("op(q, k, v, mask, order_ids=(ids, ids, ids))", ValueError, "order_ids", "3 entries", "or a pair"),
    Misuse("op(q[:, :9], k, v, mask, order_ids=ids)", ValueError, "order_ids", "T = 9, S = 32", "when T != S"),
    Misuse("op(q, k, v, mask, order_id=ids)", TypeError, "unknown argument", "'order_id'", "mean 'order_ids'?"),
    Misuse("op(q, k, v, mask, segment_ids=(ids,))", ValueError, "segment_ids", "1 entries", "or a pair"),
    Misuse(
        "op(q, k, v, mask, implementation='XLA')", ValueError, "implementation", "'XLA', did you mean 'xla'?", NAMES
    ),
    Misuse("op(q, k, v, mask, implementation='tritn')", ValueError, "implementation", "mean 'triton'?", NAMES),
    Misuse("op(q, k, v, mask, implementation='pallas')", ValueError, "implementation", "mean 'pallas_tpu'?", NAMES),
    Misuse("op(q, k, v, mask, implementation=True)", ValueError, "implementation", "got True", NAMES),
    Misuse("op(q, k, v, mask, implementation=['xla'])", ValueError, "implementation", "got ['xla']", NAMES),
    Misuse("op(q, k, v, mask, implementation='PALLAS')", ValueError, "implementation", "mean 'pallas_tpu'?", "Known: "),
    Misuse("op(q, k, v, mask, segment_id=ids)", TypeError, "unknown argument", "'segment_id'", "mean 'segment_ids'?"),
    Misuse("op(q, k, v, mask, return_lse='yes')", ValueError, "return_lse", "'yes'", "must be true or false"),
    Misuse("op(q, k, v, mask, return_lse=1)", ValueError, "return_lse", "got 1", "must be true or false"),
    Misuse("op(q, k, v, mask, query_sharding='data')", ValueError, "query_sharding", "'data'", "PartitionSpec or None"),
    Misuse(
        "op(q, k, v, mask, query_sharding=P('data', None, None, 'x'))",
        ValueError,
        "query_sharding",
        "'data', None, None, 'x'",
        "(axes of the batch, axes of the sequence, axes of the heads)",
    ),
    Misuse(
        "op(q, k, v, mask, query_sharding=P(P.UNCONSTRAINED))",
        ValueError,
        "query_sharding",
        "UNCONSTRAINED",
        "(axes of the batch, axes of the sequence, axes of the heads)",
    ),
    Misuse(
        "op(q[0], k[0], v[0], mask, query_sharding=P('data', 'context', 'heads'))",
        ValueError,
        "query_sharding",
        "'data', 'context', 'heads'",
        "(axes of the sequence, axes of the heads)",
    ),
    Misuse("op(q, k, v, mask, fwd_params=128)", ValueError, "fwd_params", "got 128", "must be FwdParams or None"),
    Misuse(
        "op(q, k, v, mask, fwd_params=sl.FwdParams)", ValueError, "fwd_params", "class", "must be FwdParams or None"
    ),
    Misuse(
        "op(q, k, v, mask, bwd_params=sl.FwdParams())", ValueError, "bwd_params", "FwdParams()", "BwdParams or None"
    ),
    Misuse(
        "op(q, k, v, plan, fwd_params=sl.FwdParams())", ValueError, "fwd_params", "FwdParams()", "belong to make_plan"
    ),
    # Settings and plans.
    Misuse(
        "sl.FwdParams(q_blocksize=0)", ValueError, "FwdParams: q_blocksize", "got 0", "a multiple of 8 from 8 to 8192"
    ),
    Misuse("sl.FwdParams(q_blocksize=True)", ValueError, "FwdParams: q_blocksize", "True", "a multiple of 8"),
    Misuse("sl.FwdParams(q_blocksize='128')", ValueError, "FwdParams: q_blocksize", "'128'", "a multiple of 8"),
    Misuse("sl.FwdParams(kv_blocksize=128.0)", ValueError, "FwdParams: kv_blocksize", "128.0", "a multiple of 8"),
    Misuse("sl.FwdParams(num_warps=3)", ValueError, "FwdParams: num_warps", "got 3", "a power of two from 1 to 16"),
    Misuse("sl.BwdParams(num_stages=99)", ValueError, "BwdParams: num_stages", "99", "an integer from 1 to 8"),
    Misuse("sl.FwdParams(q_block_size=64)", TypeError, "FwdParams: unknown", "'q_block_size'", "mean 'q_blocksize'"),
    Misuse("sl.BwdParams(nwarps=4)", TypeError, "BwdParams: unknown argument", "'nwarps'", "mean 'num_warps'"),
    Misuse("sl.FwdParams(num_warps=np.True_)", ValueError, "FwdParams: num_warps", "True", "a power of two"),
    Misuse("sl.make_plan(mask, q_length=32)", TypeError, "make_plan: unknown argument", "'q_length'", "mean 'q_len'?"),
    Misuse("sl.make_plan(mask, 0)", ValueError, "q_len", "got 0", LENGTH),
    Misuse("sl.make_plan(mask, -1)", ValueError, "q_len", "-1", LENGTH),
    Misuse("sl.make_plan(mask, 32.0)", ValueError, "q_len", "32.0", LENGTH),
    Misuse("sl.make_plan(mask, '32')", ValueError, "q_len", "'32'", LENGTH),
    Misuse("sl.make_plan(mask, True)", ValueError, "q_len", "True", LENGTH),
    Misuse("sl.make_plan(mask, (32, 32))", ValueError, "q_len", "(32, 32)", LENGTH),
    Misuse("sl.make_plan(mask, 32, 0)", ValueError, "kv_len", "got 0", LENGTH),
    Misuse("sl.make_plan(32, mask)", ValueError, "q_len", "Causal()", LENGTH),
    Misuse("sl.make_plan(plan, 64)", TypeError, "mask", "Plan", "must be a Mask"),
    Misuse("sl.make_plan(tri, 31)", ValueError, "mask", "(32, 32)", "(q_len, kv_len) = (31, 31)"),
    Misuse("sl.make_plan(mask, 32, implementation='pallas')", ValueError, "implementation", "'pallas_tpu'?", NAMES),
    Misuse("sl.make_plan(mask, 32, implementation=['xla'])", ValueError, "implementation", "['xla']", NAMES),
    Misuse("sl.make_plan(mask, 32, fwd_params=8)", ValueError, "fwd_params", "got 8", "must be FwdParams or None"),
    Misuse("op(q, k, v, documents(31))", ValueError, "mask_mod <lambda>: a table", "size 31", "for each position"),
    Misuse(
        "op(q, k, v, sl.Causal() & ~documents(20))", ValueError, "mask_mod <lambda>", "size 20", "for each position"
    ),
    Misuse("documents(0)", ValueError, "mask_mod <lambda>: a table", "size 0", "for each position"),
    Misuse(
        "jax.export.export(jax.jit(lambda q: op(q, k, v, mask)), platforms=('cpu', 'tpu'))(q)",
        ValueError,
        "implementation",
        "('cpu', 'tpu')",
        "implementation='xla', or export for each by itself",
    ),
    Misuse("op(q, k, v, mask & tri[:5, :5])", ValueError, "mask: an Array", "(5, 5)", "must cover (32, 32)"),
    Misuse(
        "jax.jit(lambda x: op(q, k, v, sl.from_mask_mod(lambda b, h, q, k: x[q] == x[k])))(ids[0])",
        TypeError,
        "mask: its rule",
        "traced",
        "segment_ids",
    ),
]
