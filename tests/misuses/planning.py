"""Misuses of plans, block lists and pictures."""

import jax
import jax.numpy as jnp
import numpy as np

import sparse_layers as sl
from tests.misuse import Misuse

COUNT, FLAG = "must be an integer >= 1", "must be true or false"
PAIR = "must be a pair (queries, keys)"
LENGTHS = "bind(mask, heads, q_len, kv_len) gives them"


def names():
    return {
        "bound": sl.bind(sl.Causal(), 4, 32, 32),
        "table": np.tri(32, dtype=bool),
        "traced": lambda function: jax.jit(lambda x: function(x) and 0)(jnp.ones((32, 32), bool)),
    }


MISUSES = [
    Misuse("sl.make_plan(mask, None)", ValueError, "q_len", "None", COUNT),
    Misuse("sl.make_plan(mask, 2**31)", ValueError, "q_len", str(2**31), "at most 2147483646"),
    Misuse("sl.make_plan(mask, 32, -1)", ValueError, "kv_len", "-1", COUNT),
    Misuse("sl.make_plan(mask, 32, 2**40)", ValueError, "kv_len", str(2**40), "at most 2147483646"),
    Misuse("sl.make_plan('dense', 32)", ValueError, "unknown name", "'dense'", "'causal'"),
    Misuse("sl.make_plan(table, 16)", ValueError, "mask", "(32, 32)", "(q_len, kv_len) = (16, 16)"),
    Misuse("sl.make_plan([table, table[:8, :8]], 32)", ValueError, "mask", "(8, 8)", "(q_len, kv_len) = (32, 32)"),
    Misuse("sl.make_plan(sl.Array(table), 64)", ValueError, "mask", "(32, 32)", "must cover (64, 64)"),
    Misuse("sl.make_plan(table.astype(int), 32)", ValueError, "Array", "int64", "2-dimensional bool array"),
    Misuse("sl.make_plan(None, 32)", TypeError, "mask must be", "None", "a preset's name"),
    Misuse("traced(lambda x: sl.make_plan(x, 32))", TypeError, "mask", "bool[32,32]", "known at run time only"),
    Misuse("sl.make_plan(mask, 32, fwd_params=128)", ValueError, "fwd_params", "128", "must be FwdParams or None"),
    Misuse(
        "sl.make_plan(mask, 32, fwd_params=sl.BwdParams())", ValueError, "fwd_params", "BwdParams(", "must be FwdParams"
    ),
    Misuse("sl.make_plan(mask, 32, implementation='tpu')", ValueError, "implementation", "'tpu'", "None or one of"),
    Misuse("sl.bind(mask, '4', 32, 32)", ValueError, "bind: heads", "'4'", COUNT),
    Misuse("sl.bind(mask, True, 32, 32)", ValueError, "bind: heads", "True", COUNT),
    Misuse("sl.bind(mask, 4, 32.0, 32)", ValueError, "bind: q_len", "32.0", COUNT),
    Misuse("sl.bind(mask, 4, 32, 2**31)", ValueError, "bind: kv_len", str(2**31), "at most 2147483646"),
    Misuse("sl.bind(table, 4, 16, 16)", ValueError, "mask", "(32, 32)", "(q_len, kv_len) = (16, 16)"),
    Misuse("sl.bind((mask, 'causal'), 1, 32, 32)", ValueError, "bind", "2 masks for heads=1", "one mask a head"),
    Misuse("sl.process_mask(bound, 128)", ValueError, "block_shape", "128", PAIR),
    Misuse("sl.process_mask(bound, (16, 16, 16))", ValueError, "block_shape", "(16, 16, 16)", PAIR),
    Misuse("sl.process_mask(bound, ('16', 16))", ValueError, "block_shape", "'16'", "must be an integer"),
    Misuse("sl.process_mask(bound, (True, 16))", ValueError, "block_shape", "True", "must be an integer"),
    Misuse("sl.process_mask(bound, (0, 16))", ValueError, "q_block_size", "=0", "should divide q_seq_len=32"),
    Misuse("sl.process_mask(mask, 128)", TypeError, "mask: expected lengths", "Causal()", LENGTHS),
    Misuse("sl.process_mask('strided', (16, 16))", TypeError, "mask: expected lengths", "'strided'", LENGTHS),
    Misuse("sl.process_mask([[[True]]], (1, 1))", TypeError, "mask: expected lengths", "[[[True]]]", LENGTHS),
    Misuse("sl.process_mask(table, (16, 16))", ValueError, "mask.shape", "(32, 32)", "Expected a 3-dim mask"),
    Misuse("sl.process_mask(table[None] * 1, (16, 16))", ValueError, "mask.dtype", "int64", "Expected a bool mask"),
    Misuse(
        "sl.process_mask(table[None, :0], (1, 1))",
        ValueError,
        "mask.shape",
        "(1, 0, 32)",
        "queries and keys",
    ),
    Misuse(
        "traced(lambda x: sl.process_mask(x[None], (8, 8)))",
        TypeError,
        "mask",
        "bool[1,32,32]",
        "process_dynamic_mask",
    ),
    Misuse("sl.process_mask(bound, (16, 16), head_shards='2')", ValueError, "head_shards", "'2'", "must be an integer"),
    Misuse("sl.process_mask(bound, (16, 16), head_shards=3)", ValueError, "head_shards", "=3", "should divide"),
    Misuse("sl.process_mask(bound, (16, 16), q_seq_shards=True)", ValueError, "q_seq_shards", "True", "an integer"),
    Misuse("sl.process_mask(bound, (16, 16), is_dkv='no')", ValueError, "is_dkv", "'no'", FLAG),
    Misuse("sl.process_mask_dkv(bound, (16, 16), shrink_grid=None)", ValueError, "shrink_grid", "None", FLAG),
    Misuse("sl.process_mask_dkv(bound, (16, 16), downcast_smem_data=2)", ValueError, "downcast_smem_data", "2", FLAG),
    Misuse("sl.process_dynamic_mask(bound, (16, 16))", TypeError, "mask", "HeadMasks(", "a bool array [H, Q, K]"),
    Misuse("sl.process_dynamic_mask('causal', (16, 16))", TypeError, "mask", "'causal'", "a bool array [H, Q, K]"),
    Misuse("sl.process_dynamic_mask(jnp.ones((1, 8, 8)), (8, 8))", ValueError, "mask.dtype", "float32", "a bool mask"),
    Misuse("sl.process_dynamic_mask(jnp.ones((1, 8, 8), bool), 8)", ValueError, "block_shape", "got 8", PAIR),
    Misuse("sl.process_dynamic_mask_dkv(mask, (8, 8))", TypeError, "mask", "Causal()", "a bool array [H, Q, K]"),
    Misuse("sl.BwdParams(deterministic=1)", ValueError, "BwdParams: deterministic", "got 1", "must be true or false"),
    Misuse("sl.BwdParams(kv_blocksize=True)", ValueError, "BwdParams: kv_blocksize", "True", "a multiple of 8"),
    Misuse("sl.picture(mask, True)", ValueError, "q_len", "True", COUNT),
    Misuse("sl.picture(mask, 32, 0)", ValueError, "kv_len", "got 0", COUNT),
    Misuse("sl.picture(mask, 32, size=0)", ValueError, "size", "got 0", COUNT),
]
