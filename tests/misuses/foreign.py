"""Calls in the words of other libraries: PyTorch, FlexAttention, flash-attn, xformers, Hugging Face, Flax, JAX."""

import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from sparse_layers import haiku, linen
from tests.misuse import Misuse

CAUSAL = sl.Causal()


def names():
    x, key = jnp.ones((2, 32, 16)), jax.random.key(0)
    settings = {"pattern": CAUSAL, "seq_len": 32}
    with_rngs = settings | {"rngs": nnx.Rngs(0)}

    def of_haiku(**call):
        return hk.transform(lambda: haiku.SparseSelfAttention(4, 4, **settings)(x, **call)).init(key)

    def dense(attention_fn):
        return nnx.MultiHeadAttention(4, 16, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))(x)

    return {
        "linen": linen,
        "haiku": haiku,
        "op": sl.block_sparse_attention,
        "causal": CAUSAL,
        "x": x,
        "valid": jnp.ones((2, 32), bool),
        "lengths": jnp.array([20, 32]),
        "rngs": nnx.Rngs(0),
        "make": lambda *sizes, **options: sl.SparseSelfAttention(*(sizes or (4, 16)), **with_rngs | options),
        "make_block": lambda *sizes, **options: sl.SparseTransformerBlock(4, 16, **with_rngs | options),
        "make_model": lambda **options: sl.SparseTransformer(
            32, 4, 16, 2, patterns=CAUSAL, seq_len=32, rngs=nnx.Rngs(0), **options
        ),
        "make_linen": lambda *sizes, **options: linen.SparseSelfAttention(*(sizes or (4,)), **settings | options),
        "layer": sl.SparseSelfAttention(4, 16, **with_rngs),
        "across": sl.SparseCrossAttention(4, 16, pattern=CAUSAL, q_len=32, kv_len=32, rngs=nnx.Rngs(0)),
        "native": sl.NativeSparseAttention(4, 16, seq_len=32, rngs=nnx.Rngs(0)),
        "a_block": sl.SparseTransformerBlock(4, 16, **with_rngs),
        "of_linen": lambda *args, **call: linen.SparseSelfAttention(4, **settings).init(key, *args, **call),
        "of_haiku": of_haiku,
        "fn": sl.make_attention_fn(CAUSAL, 32),
        "dense": dense,
        "dense_linen": lambda fn: nn.MultiHeadDotProductAttention(4, attention_fn=fn).init(key, x),
        "make_haiku": lambda **options: hk.transform(
            lambda: haiku.SparseSelfAttention(4, 4, **settings, **options)(x)
        ).init(key),
        "model": sl.SparseTransformer(32, 4, 16, 2, patterns=CAUSAL, seq_len=32, rngs=nnx.Rngs(0)),
        "cache": sl.KVCache.empty(CAUSAL, 32, batch=2, num_heads=4, head_size=16),
        "tool": lambda function: lambda **options: function(CAUSAL, 32, **options),
        "jvp": lambda f: jax.jvp(f, (x[..., None],), (x[..., None],)),
    }


CAUSALITY = "causality is a mask: write sl.Causal()"
AS_ARGUMENT = "as plan_or_mask="
OF_LAYER = "as the pattern= of the layer or of make_attention_fn"
IDS = "segment_ids=jnp.where(valid, 0, -1)"
WINDOW = "window_size=(255, 0) is sl.Window(255), and so is sliding_window=256"
NEVER = "attention weights are never formed"
PACKED = "segment_ids=jnp.searchsorted(cu_seqlens, jnp.arange(T), side='right')"
PADDED = "segment_ids=jnp.where(jnp.arange(T) < lengths[:, None], 0, -1)"
ONE_INPUT = "projections of one input"
FLAX = "attention_fn= of a Flax layer is sl.make_attention_fn(pattern, seq_len)"
SELECT = "sl.block_sparse_attention(q, k, v, sl.Causal(), selection=sl.MoBA().select(q, k))"
FEATURES = "features are those of the arrays: leave it out"


PAIR = "segment_ids=(jnp.zeros(inputs_q.shape[:-1], int), jnp.where(valid, 0, -1)) with valid [B, S]"
LEFT = "sl.Window(left, right) counts tokens on each side"
OF_FN = "of the layer or of make_attention_fn"
KEY = "sampling draws by key=jax.random.key(0), with a temperature= above 0"
UNDRAWN = "nothing here is drawn by a key: leave it out"
NOT_DROPPED = "nothing is dropped here: leave it out; blocks with dropout take deterministic=True or False"
REPRODUCIBLE = "gradients are bwd_params=sl.BwdParams(deterministic=True)"


def unknown(door, call, value, rule):
    return Misuse(call, TypeError, f"{door}: unknown argument", value, rule)


OP = [
    ("op(q, k, v, is_causal=True)", "'is_causal', got True", CAUSALITY),
    ("op(q, k, v, causal, causal=True)", "'causal', got True", AS_ARGUMENT),
    ("op(q, k, v, attn_mask=None)", "'attn_mask', got None", AS_ARGUMENT),
    ("op(q, k, v, mask=causal)", "'mask', got Causal()", AS_ARGUMENT),
    ("op(q, k, v, pattern=causal)", "'pattern', got Causal()", "it is called plan_or_mask= here"),
    ("op(q, k, v, causal, attention_mask=valid)", "'attention_mask', got bool[2, 32]", IDS),
    ("op(q, k, v, causal, key_padding_mask=~valid)", "got bool[2, 32]", "jnp.where(key_padding_mask, -1, 0)"),
    ("op(q, k, v, causal, dropout_p=0.1)", "'dropout_p', got 0.1", NEVER),
    (
        "op(q, k, v, causal, score_mod=max)",
        "got <built-in function max>",
        "sl.from_mask_mod(mask_mod), as plan_or_mask=",
    ),
    ("op(q, k, v, block_mask=causal)", "'block_mask', got Causal()", "write sl.from_mask_mod(mask_mod)"),
    ("op(q, k, v, causal, attn_bias=x)", "'attn_bias', got float32[2, 32, 16]", "one of 0 and -inf is a mask"),
    ("op(q, k, v, causal, alibi_slopes=x[0, 0])", "'alibi_slopes', got float32[16]", "sl.alibi(num_heads)"),
    ("op(q, k, v, causal, cu_seqlens=lengths)", "'cu_seqlens', got int32[2]", PACKED),
    ("op(q, k, v, causal, max_seqlen_q=32)", "'max_seqlen_q', got 32", "lengths are those of the arrays"),
    ("op(q, k, v, causal, query_seq_lengths=lengths)", "got int32[2]", PADDED),
    ("op(q, k, v, window_size=(255, 0))", "'window_size', got (255, 0)", WINDOW),
    ("op(q, k, v, local_window_size=7)", "'local_window_size', got 7", "sl.Window(left, right)"),
    ("op(q, k, v, causal, sm_scale=0.5)", "'sm_scale', got 0.5", "it is called scale= here"),
    ("op(q, k, v, causal, softcap=30.0)", "'softcap', got 30.0", "it is called logits_soft_cap= here"),
    ("op(q, k, v, causal, s_aux=x[0, 0])", "'s_aux', got float32[16]", "it is called sinks= here"),
    ("op(q, k, v, causal, enable_gqa=True)", "'enable_gqa', got True", "K divides N"),
    ("op(q, k, v, causal, return_residual=True)", "got True", "it is called return_lse= here"),
    ("op(q, k, v, causal, return_attn_probs=True)", "got True", NEVER),
    ("op(q, k, v, causal, block_size=128)", "'block_size', got 128", "sl.FwdParams(q_blocksize=128, kv_blocksize=128)"),
    ("op(q, k, v, causal, deterministic=True)", "got True", "bwd_params=sl.BwdParams(deterministic=True);"),
    ("op(q, k, v, causal, seed=0)", "'seed', got 0", UNDRAWN),
    ("op(q, k, v, causal, rng=rngs)", "'rng', got Rngs(", UNDRAWN),
    ("op(q, k, v, causal, rngs=rngs)", "'rngs', got Rngs(", UNDRAWN),
    ("op(q, k, v, causal, position_ids=lengths)", "got int32[2]", "by sl.Rope()(x, positions)"),
    ("op(q, k, v, causal, backend='cudnn')", "'backend', got 'cudnn'", "it is called implementation= here"),
    ("op(q, k, v, causal, precision='highest')", "got 'highest'", "float32 at least"),
    ("op(q, k, v, causal, q_segment_ids=lengths)", "got int32[2]", "segment_ids=(q_segment_ids, kv_segment_ids)"),
    ("dense(op)", "'dropout_rng', got None", FLAX),
]
DOORS = [
    ("SparseSelfAttention", "make(embed_dim=16)", "'embed_dim', got 16", "it is called in_features= here"),
    ("SparseSelfAttention", "make(num_key_value_heads=2)", "got 2", "it is called num_kv_heads= here"),
    ("SparseSelfAttention", "make(bias=False)", "'bias', got False", "it is called use_bias= here"),
    ("SparseSelfAttention", "make(use_alibi=True)", "'use_alibi', got True", "relative_bias= is sl.AlibiBias()"),
    ("SparseTransformer", "make_model(position_bias=1)", "'position_bias', got 1", "relative_bias= is sl.AlibiBias()"),
    (
        "SparseTransformer.__call__",
        "model(x, bias=x)",
        "'bias', got float32[2, 32, 16]",
        "relative_bias=sl.AlibiBias()",
    ),
    ("make_attention_fn", "sl.make_attention_fn('causal', 32, bias=0)", "'bias', got 0", "of the function's call"),
    ("generate", "sl.generate(model, [[1]], 1, relative_bias=0)", "'relative_bias', got 0", "when it is made"),
    (
        "NativeSparseAttention",
        "sl.NativeSparseAttention(4, 16, seq_len=32, rngs=rngs, alibi=1)",
        "'alibi', got 1",
        "of sl.block_sparse_attention",
    ),
    ("SparseSelfAttention", "make(dropout=0.1)", "'dropout', got 0.1", "dropout_rate= of SparseTransformerBlock"),
    ("SparseSelfAttention", "make(batch_first=True)", "got True", "swapaxes(0, 1)"),
    ("SparseSelfAttention", "make(is_causal=True)", "'is_causal', got True", "as pattern="),
    ("SparseSelfAttention", "make(qk_norm=True)", "'qk_norm', got True", "it is called normalize_qk= here"),
    ("SparseSelfAttention", "make(device='cpu')", "got 'cpu'", "jax.device_put moves them"),
    ("SparseSelfAttention", "make(key=lengths)", "got int32[2]", "it is called rngs= here"),
    ("SparseSelfAttention", "make_linen(embed_dim=16)", "'embed_dim', got 16", FEATURES),
    ("SparseSelfAttention", "make_linen(rngs=rngs)", "'rngs', got Rngs", "get a key by init"),
    ("SparseSelfAttention", "make_linen(seed=0)", "'seed', got 0", "get a key by init"),
    ("SparseSelfAttention", "make_haiku(rng=0)", "'rng', got 0", "get a key by init"),
    ("SparseSelfAttention", "make_linen(deterministic=True)", "'deterministic', got True", REPRODUCIBLE),
    ("SparseSelfAttention.__call__", "layer(x, deterministic=True)", "'deterministic', got True", NOT_DROPPED),
    ("SparseSelfAttention.__call__", "of_linen(x, deterministic=True)", "got True", f"{REPRODUCIBLE} of the layer"),
    ("SparseSelfAttention.__call__", "of_haiku(deterministic=True)", "'deterministic', got True", NOT_DROPPED),
    ("NativeSparseAttention.__call__", "native(x, deterministic=False)", "got False", NOT_DROPPED),
    ("SparseCrossAttention.__call__", "across(x, x, deterministic=True)", "got True", NOT_DROPPED),
    ("make_attention_fn", "sl.make_attention_fn(causal, 32, deterministic=True)", "got True", REPRODUCIBLE),
    ("SparseSelfAttention.__call__", "layer(x, rngs=rngs)", "got Rngs(", UNDRAWN),
    ("SparseTransformerBlock.__call__", "a_block(x, rngs=rngs)", "got Rngs(", "from the rngs= of its layer"),
    ("SparseSelfAttention.__call__", "layer(x, mask=valid)", "'mask', got bool[2, 32]", IDS),
    ("SparseSelfAttention.__call__", "layer(x, is_causal=True)", "'is_causal', got True", OF_LAYER),
    ("SparseSelfAttention.__call__", "layer(x, key=x)", "'key', got float32[2, 32, 16]", ONE_INPUT),
    ("SparseSelfAttention.__call__", "layer(hidden_states=x)", "got float32", "it is called inputs= here"),
    ("SparseSelfAttention.__call__", "layer(x, need_weights=False)", "got False", NEVER),
    ("SparseSelfAttention.__call__", "layer(x, position_ids=lengths)", "got int32", "it is called positions= here"),
    ("SparseSelfAttention.__call__", "layer(x, past_key_values=())", "got ()", "prefill and decode_step"),
    ("SparseSelfAttention.__call__", "of_linen(x, mask=valid)", "'mask', got bool[2, 32]", OF_LAYER),
    ("SparseSelfAttention.__call__", "of_haiku(is_causal=True)", "'is_causal', got True", OF_LAYER),
    (
        "SparseSelfAttention.prefill",
        "layer.prefill(x, attention_mask=valid)",
        "got bool[2, 32]",
        "padding of prompts is",
    ),
    ("SparseCrossAttention.__call__", "across(x, encoder_hidden_states=x)", "got float32", "called inputs_kv="),
    ("NativeSparseAttention.__call__", "native(x, attn_mask=valid)", "got bool[2, 32]", IDS),
    ("SparseTransformerBlock", "make_block(d_ff=64)", "'d_ff', got 64", "it is called mlp_features= here"),
    ("SparseTransformerBlock", "make_block(sliding_window=256)", "'sliding_window', got 256", WINDOW),
    ("SparseTransformerBlock.__call__", "a_block(x, key_padding_mask=valid)", "got bool[2, 32]", "segment_ids="),
    ("SparseTransformer", "make_model(rms_norm_eps=1e-5)", "got 1e-05", "it is called norm_epsilon= here"),
    ("SparseTransformer", "make_model(tie_word_embeddings=True)", "got True", "it is called tie_embeddings= here"),
    ("SparseTransformer.__call__", "make_model()(x, attention_mask=valid)", "got bool[2, 32]", "segment_ids="),
    ("make_attention_fn", "sl.make_attention_fn(causal, 32, window_size=(7, 0))", "got (7, 0)", WINDOW),
    ("AttentionFn.__call__", "fn(q, k, v, attn_mask=None)", "'attn_mask', got None", OF_LAYER),
    ("describe", "sl.describe(causal, 32, causal=True)", "'causal', got True", "as subject="),
    ("KVCache.empty", "sl.KVCache.empty(causal, 32, batch=1, n_heads=2, head_size=8)", "got 2", "called num_heads="),
    ("generate", "sl.generate(None, [[1]], max_new_tokens=3)", "got 3", "it is called num_tokens= here"),
    ("SparseCrossAttention.__call__", "across(x, x, attention_mask=valid)", "got bool[2, 32]", PAIR),
    ("SparseCrossAttention.__call__", "across(x, x, key_padding_mask=~valid)", "got bool[2, 32]", PAIR),
    ("SparseCrossAttention.__call__", "across(x, x, cu_seqlens=lengths)", "got int32[2]", "a pair of segment_ids="),
    ("make_plan", "sl.make_plan(causal, 32, is_causal=True)", "'is_causal', got True", "another mask, as mask="),
    ("make_plan", "sl.make_plan(32, pattern=causal)", "got Causal()", "it is called mask= here"),
    ("picture", "sl.picture(causal, 32, window_size=4)", "got 4", "a window is a mask, as mask="),
    ("top_k_blocks", "sl.top_k_blocks(x, 2, block_size=16)", "got 16", "it is called block= here"),
    ("top_k_blocks", "sl.top_k_blocks(x, topk=2)", "'topk', got 2", "it is called k= here"),
    ("FwdParams", "sl.FwdParams(block_size=64)", "got 64", "q_blocksize= for queries and kv_blocksize= for keys"),
    ("BwdParams", "sl.BwdParams(BLOCK_N=64)", "'BLOCK_N', got 64", "it is called kv_blocksize= here"),
    ("block_sparse_attention", "op(q, k=k, v=v, plan_or_mask=causal)", "'k', got float32", "called key= here"),
    ("block_sparse_attention", "op(q, key=k, v=v, plan_or_mask=causal)", "'v', got float32", "called value= here"),
    ("SparseSelfAttention.__call__", "layer(x, k=x, v=x)", "'k', got float32[2, 32, 16]", ONE_INPUT),
    ("SparseSelfAttention.__call__", "layer(x=x)", "'x', got float32[2, 32, 16]", "it is called inputs= here"),
    ("SparseSelfAttention.__call__", "layer(x, cache=None)", "'cache', got None", "prefill and decode_step"),
    ("SparseTransformer", "make_model(pattern=causal)", "got Causal()", "it is called patterns= here"),
    ("SparseTransformer.__call__", "model(x=lengths)", "'x', got int32[2]", "it is called tokens= here"),
    ("AttentionFn.__call__", "fn(q, k, v, scale=1.0)", "'scale', got 1.0", f"it is scale= {OF_FN}"),
    ("AttentionFn.__call__", "fn(q, k, v, softcap=9.0)", "got 9.0", f"it is logits_soft_cap= {OF_FN}"),
    ("AttentionFn.__call__", "fn(q, k, v, pattern=causal)", "got Causal()", "is that of make_attention_fn"),
    ("generate", "sl.generate(None, [[1]], num_tokens=2, pad_token_id=0)", "got 0", "no token is padding"),
    ("generate", "sl.generate(None, [[1]], num_tokens=2, use_cache=True)", "got True", "made and kept here"),
    ("KVCache.step", "cache.step(q, k, v, mask=valid)", "'mask', got bool[2, 32]", "a step has no padding"),
    ("KVCache.step", "cache.step(q, k, v, is_causal=True)", "got True", "pattern= of the layer or of KVCache.empty"),
    ("KVCache.step", "cache.step(q, k, v, cache_position=3)", "got 3", "it is called position= here"),
    ("SparseTransformer.decode_step", "model.decode_step(x, attention_mask=valid)", "got bool", "lengths= of prefill"),
    ("SparseTransformerBlock.decode_step", "a_block.decode_step(x, kv_cache=())", "got ()", "called cache= here"),
    ("NativeSparseAttention.decode_step", "native.decode_step(hidden_states=x)", "got float32", "called inputs="),
    ("from_linen", "sl.from_linen({}, pattern=causal, seq_len=32, window_size=4)", "got 4", "as pattern="),
    ("from_huggingface", "sl.from_huggingface(pretrained_model_name_or_path='x')", "got 'x'", "called folder= here"),
    ("to_huggingface", "sl.to_huggingface(None, save_directory='x')", "got 'x'", "it is called folder= here"),
    ("from_mask_mod", "sl.from_mask_mod(max, H=4)", "'H', got 4", "it is called heads= here"),
    ("from_mask_mod", "sl.from_mask_mod(max, B=None, Q_LEN=32)", "'B', got None", "a mask has no batch"),
    ("Window", "sl.Window(window_size=(255, 0))", "got (255, 0)", LEFT),
    ("BlockDiagonal", "sl.BlockDiagonal(block_size=64)", "got 64", "their diagonal sl.BlockDiagonal(64)"),
    ("Blocks", "sl.Blocks(causal, block_size=64)", "got 64", "it is called block= here"),
    ("Rope", "sl.Rope(base=10000.0)", "'base', got 10000.0", "it is called theta= here"),
    ("Rope", "sl.Rope(dim=32)", "'dim', got 32", "it is called rotary_dim= here"),
    ("Rope.__call__", "sl.Rope()(x, position_ids=lengths)", "got int32[2]", "it is called positions= here"),
    ("MoBA", "sl.MoBA(topk=3)", "'topk', got 3", "it is called count= here"),
    ("MoBA", "sl.MoBA(block_size=64)", "'block_size', got 64", "it is called block= here"),
    ("NSA", "sl.NSA(window_size=512)", "got 512", "it is called sliding= here"),
    ("tune", "sl.tune(causal, 32, num_heads=4)", "'num_heads', got 4", "it is called heads= here"),
    *(
        ("generate", f"sl.generate(None, [[1]], num_tokens=2, {word})", f"'{word[:-2]}', got 0", KEY)
        for word in ("seed=0", "rng=0", "rngs=0")
    ),
    *(
        (door, f"tool(sl.{door})({word})", f"'{word[:-2]}', got 0", UNDRAWN)
        for door in ("tune", "make_plan", "describe")
        for word in ("seed=0", "rngs=0")
    ),
]
POSITIONS = [
    ("op(q, k, v)", "block_sparse_attention", "value=float32[2, 32, 4, 16]", "sl.Full() for all"),
    ("sl.preset('sliding_window', 4)", "preset", "got 'sliding_window', 4", "sl.preset('sliding_window', window=256)"),
    ("sl.Window(4, 4, 4)", "Window", "got 4, 4, 4", "takes left, right by position"),
    ("cache.step(q, k)", "KVCache.step: value=, position= must be given", "query=float32", "key=float32"),
    ("op(q, k, v, causal, 0.0, True)", "block_sparse_attention", "0.0, True", "causality is a mask"),
    ("dense_linen(op)", "block_sparse_attention", "query=float32[2, 32, 4, 4]", FLAX),
    ("layer(x, x, x)", "SparseSelfAttention.__call__", "takes inputs by position", ONE_INPUT),
    (
        "layer.prefill(x, x, x)",
        "SparseSelfAttention.prefill: takes inputs, lengths by position",
        "got float32[2, 32, 16]",
        "by name: selection=, positions=, bias=, max_step=, cache=, start=, total=",
    ),
    ("of_linen(x, x)", "SparseSelfAttention.__call__", "got float32[2, 32, 16], float32[2, 32, 16]", ONE_INPUT),
    ("across(x, x, x)", "SparseCrossAttention.__call__", "takes inputs_q, inputs_kv by position", ONE_INPUT),
    ("across(x)", "SparseCrossAttention.__call__", "inputs_q=float32[2, 32, 16]", "inputs_kv= must be given"),
    (
        "sl.SparseSelfAttention(4, 64, 'causal', 128)",
        "SparseSelfAttention: pattern=, seq_len=, rngs= must be given",
        "qkv_features='causal', out_features=128",
        "'sliding_window:window=256' or sl.Causal()",
    ),
    (
        "sl.SparseSelfAttention(4, 64, 'causal', 128, rngs=rngs)",
        "SparseSelfAttention: pattern=, seq_len= must be given",
        "out_features=128, rngs=Rngs(",
        "seq_len is the longest input in tokens",
    ),
    ("make_linen(4, 16)", "SparseSelfAttention: parent", "got 16", "takes its features from its inputs"),
    (
        "linen.SparseTransformerBlock(4, 16, causal, pattern=causal, seq_len=32)",
        "Block: parent",
        "got Causal()",
        "are given by name",
    ),
    ("sl.make_attention_fn(causal)", "make_attention_fn: seq_len=", "pattern=Causal()", "the longest input in tokens"),
    ("op(q, k, v, sl.MoBA())", "plan_or_mask must be a Mask", "got MoBA", SELECT),
    ("op(q, k, v, sl.MoBA)", "plan_or_mask must be a Mask", "methods.MoBA'>", SELECT),
    ("op(q, k, v, None)", "plan_or_mask must be a Mask", "got NoneType: None", "write sl.Full()"),
    ("op(q, k, v, sl.Causal)", "plan_or_mask must be a Mask", "primitives.Causal'>", "write sl.Causal()"),
    ("op(q, k, v, [causal, sl.Window])", "plan_or_mask must be a Mask", "Window'>", "write sl.Window(...)"),
    ("op(q, k, v, lambda b, h, i, j: i >= j)", "plan_or_mask must be a Mask", "function: ", "sl.from_mask_mod(f)"),
    ("make(pattern=None)", "pattern must be a Mask", "got NoneType: None", "write sl.Full()"),
    ("make(pattern=sl.Causal)", "pattern must be a Mask", "primitives.Causal'>", "write sl.Causal()"),
    ("sl.describe(sl.Causal, 32)", "mask must be a Mask", "primitives.Causal'>", "write sl.Causal()"),
    ("sl.make_attention_fn(max, 32)", "pattern must be a Mask", "<built-in function max>", "sl.from_mask_mod(f)"),
    ("op(q, k, v, causal, selection=sl.MoBA())", "selection must be a Selection", "got MoBA", SELECT),
    ("jvp(lambda x: op(x, x, x, causal))", "block_sparse_attention", "forward-mode", "jax.vjp(jax.grad(f), x)[1](v)"),
]
VALUES = [
    ("op(q, k, v, causal, segment_ids=valid)", "segment_ids of queries", "bool of shape (2, 32)", IDS[12:]),
    ("layer(x, segment_ids=valid)", "segment_ids of queries", "bool of shape (2, 32)", IDS[12:]),
    ("make(pattern=sl.Grid((4, 4), causal))", "pattern: Grid of shape (4, 4)", "16 tokens", "write offset=16"),
    ("op(q, k, v, causal, segment_ids=lengths * 1.0)", "segment_ids of queries", "got float32", ".astype(jnp.int32)"),
    ("cache.filled(k, v, valid)", "lengths", "got bool of shape (2, 32)", "write mask.sum(-1)"),
    ("make(16, 4)", "num_heads=16", "features=4", "num_heads comes before the features: 4, 16"),
    (
        "sl.SparseTransformer(9, 4, 16, 1, patterns=sl.Window(7, 3), seq_len=32, rngs=rngs)",
        "patterns",
        "key 1",
        "write sl.Causal() & sl.Window(left=7, right=3), or",
    ),
    ("sl.preset('full')", "preset", "'full'", "'bidirectional', or sl.Full()"),
    ("sl.preset('Swin')", "preset", "'Swin'", "'windows:shape=56x56,size=7'"),
    ("sl.preset('mistral')", "preset", "'mistral'", "'sliding_window:window=4096'"),
    ("sl.preset('bd3lm')", "preset", "'bd3lm'", "'block_diffusion:n=1024,block_size=16'"),
    ("sl.preset('dflash')", "preset", "'dflash'", "'draft_blocks:total_seq_len=8192,block_size=16,stride=16'"),
    ("sl.preset('natten')", "preset", "'natten'", "'neighborhood:shape=56x56,kernel=7'"),
    ("sl.preset('performer')", "preset", "'performer'", "approximates attention to all keys"),
    ("sl.preset('global')", "preset", "'global'", "sl.Window(255, 255) | sl.Global(4)"),
    ("make(pattern='llama')", "pattern", "'llama'", "'causal'"),
    ("op(q, k, v, 'moba')", "preset", "'moba'", SELECT),
    ("sl.describe('flash', 32)", "unknown name", "'flash'", "it is a kernel, not a pattern"),
]
MISUSES = [
    *(unknown("block_sparse_attention", *row) for row in OP),
    *(unknown(*row) for row in DOORS),
    *(Misuse(call, TypeError, *parts) for call, *parts in POSITIONS),
    *(Misuse(call, ValueError, *parts) for call, *parts in VALUES),
]
