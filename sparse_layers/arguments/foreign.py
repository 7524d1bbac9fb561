"""Arguments, call orders and pattern names of other libraries, and what to write here instead of them.

`tests/misuses/foreign.py` holds a wrong call for each kind; `tests/test_foreign.py` compares what the messages advise
with the results of those libraries.
"""

import inspect
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, get_args, get_type_hints

# Hints for an argument of another library: pairs (an argument here, the hint for functions that have it), the first
# that fits; None fits all functions. ``{pattern}`` stands for the argument by which the function takes its pattern.
Hints: TypeAlias = tuple[tuple[str | None, str], ...]


def _say(hint: str) -> Hints:
    return ((None, hint),)


def _rename(*names: str) -> Hints:
    """Returns hints for an argument with another name here: the first of these names that a function has."""
    return tuple((name, f"it is called {name}= here") for name in names)


_FLAX = "the attention_fn= of a Flax layer is sl.make_attention_fn(pattern, seq_len)"
_CAUSAL = _say("causality is a mask: write sl.Causal(), or add `& sl.Causal()` to another mask, {pattern}")
_PADDING = "segment_ids= of the call, as segment_ids=jnp.where(valid, 0, -1) with valid [B, T]"
# Padding of functions that take it other than by one array of segment_ids.
_PADDED = (
    ("lengths", "padding of prompts is lengths=, int [B], the tokens of each prompt"),
    ("position", "a step has no padding: leave it out; that of prompts is lengths= of prefill"),
    (
        "inputs_kv",
        "padding is a pair of segment_ids=, of queries and keys: segment_ids=(jnp.zeros(inputs_q.shape[:-1], int), "
        "jnp.where(valid, 0, -1)) with valid [B, S]",
    ),
)
_MASK = (
    *_PADDED,
    *_say(
        "a mask is sl.Causal(), sl.Window(255), ..., a preset's name or a bool array [T, T], {pattern}; padding is "
        + _PADDING
    ),
)
_OF_MODEL = tuple(
    (name, "a model gets its bias when it is made: SparseTransformer(..., relative_bias=sl.AlibiBias())")
    for name in ("tokens", "prompts")
)
_LOGITS_BIAS = (
    (
        "bias",
        "a bias by head and distance is bias=sl.DistanceBias(table), sl.alibi(num_heads) or sl.t5_bias(buckets); one "
        "of 0 and -inf is a mask, {pattern}",
    ),
    *_OF_MODEL,
    *_say(
        "a bias by head and distance is bias=sl.DistanceBias(table) of sl.block_sparse_attention; one of 0 and -inf is "
        "a mask, {pattern}"
    ),
)
_BIAS = (
    (
        "relative_bias",
        "for projections it is called use_bias= here (Haiku: with_bias=); for logits, relative_bias=sl.AlibiBias()",
    ),
    *_rename("use_bias", "with_bias"),
    (
        "recompute",
        "it is an argument of the function's call: attention_fn(query, key, value, bias=sl.alibi(num_heads))",
    ),
    *_LOGITS_BIAS,
)
_RELATIVE = (
    (
        "relative_bias",
        "relative_bias= is sl.AlibiBias(), sl.T5Bias(bidirectional=True), sl.LearnedBias(64) or sl.GridBias(shape)",
    ),
    *_LOGITS_BIAS,
)
_SIDES = (
    "sl.Window(left, right) counts tokens on each side beside the query, None for no limit; window_size=(255, 0) is "
    "sl.Window(255), and so is sliding_window=256"
)
_WINDOW = (*_rename("sliding"), ("left", _SIDES), *_say("a window is a mask, {pattern}: " + _SIDES))
_PACKED = (
    (
        "inputs_kv",
        "documents are a pair of segment_ids=, of queries and keys, each jnp.searchsorted(cu_seqlens, jnp.arange(T), "
        "side='right') for arrays of T tokens without a batch",
    ),
    *_say(
        "documents are segment_ids= of the call: segment_ids=jnp.searchsorted(cu_seqlens, jnp.arange(T), side='right') "
        "for arrays of T tokens without a batch"
    ),
)
_LENGTHS = _say(
    "padding is segment_ids= of the call: segment_ids=jnp.where(jnp.arange(T) < lengths[:, None], 0, -1), or a pair of "
    "these for queries and keys"
)
_DROPOUT = _say(
    "attention weights are never formed, so none can be dropped: leave it out; dropout_rate= of SparseTransformerBlock "
    "drops values of the residual stream"
)
_WEIGHTS = _say("attention weights are never formed: leave it out; sl.picture draws a pattern")
_LSE = (*_rename("return_lse"), *_say("the log-sum-exp is sl.block_sparse_attention(..., return_lse=True)"))
_FEATURES = (
    *_rename("in_features", "features"),
    *_say("features are those of the arrays: leave it out"),
)
_HEADS = (*_rename("num_heads", "heads"), *_say("heads are an axis of the arrays, query [B, T, N, H]: leave it out"))
_KV_HEADS = (
    *_rename("num_kv_heads", "kv_heads"),
    *_say("grouped heads need no argument: key and value are [B, S, K, H], and K divides N"),
)
_HEAD_SIZE = (
    *_rename("head_dim", "head_size", "key_size"),
    *_say("the size of heads is that of the arrays: leave it out"),
)
_LENGTH = (*_rename("seq_len", "q_len"), *_say("lengths are those of the arrays: leave it out"))
_POSITIONS = (
    *_rename("positions", "position"),
    *_say("query t is at position t: rotate query and key beforehand, by sl.Rope()(x, positions)"),
)
_CACHE = (
    *_rename("cache", "caches"),
    ("num_tokens", "caches are made and kept here: leave it out"),
    *_say("decoding has functions of its own: prefill and decode_step of layers and models, or sl.KVCache"),
)
_KEYS = (
    *_rename("inputs_kv"),
    (
        "pooled",
        "a value goes to attention alone: sl.block_sparse_attention(q, k, v, mask, selection=scorer.select(q, k))",
    ),
    *_say("queries, keys and values are projections of one input, the first argument: leave it out"),
)
_BY_INIT = "layers of Linen and Haiku get a key by init: leave it out"
_RNGS = (
    *_rename("rngs"),
    ("num_tokens", "sampling draws by key=jax.random.key(0), with a temperature= above 0"),
    *(("parent", _BY_INIT), ("w_init", _BY_INIT)),  # arguments of Linen's layers alone, and of Haiku's
    *_say("nothing here is drawn by a key: leave it out; dropout draws from the rngs= of its layer"),
)
_DETERMINISTIC = (
    (
        "bwd_params",
        "reproducible gradients are bwd_params=sl.BwdParams(deterministic=True); for dropout, blocks take "
        "deterministic=True or False in each call",
    ),
    *_say(
        "nothing is dropped here: leave it out; blocks with dropout take deterministic=True or False in each call, and "
        "reproducible gradients are bwd_params=sl.BwdParams(deterministic=True) of the layer"
    ),
)

_BLOCKS = (
    "blocks of kernels are fwd_params=sl.FwdParams(q_blocksize=128, kv_blocksize=128) and bwd_params=; a pattern of "
    "blocks is sl.Blocks(mask, 64); the longest input, nanoGPT's block_size, is seq_len="
)
_BLOCK = (
    *_rename("block"),
    ("q_blocksize", "blocks are q_blocksize= for queries and kv_blocksize= for keys"),
    ("q_len", _BLOCKS),
    ("size", "a pattern of blocks is sl.Blocks(mask, 64), and their diagonal sl.BlockDiagonal(64)"),
    *_say(_BLOCKS),
)


def _of_layer(name: str) -> Hints:
    return (*_rename(name), *_say(f"it is {name}= of the layer or of make_attention_fn"))


# Arguments that a layer of Flax hands to its attention_fn: their hint goes before all others.
_OF_FLAX = ("dropout_rng", "broadcast_dropout")

HINTS: dict[str, Hints] = {
    # masks
    **dict.fromkeys(("is_causal", "causal", "use_causal_mask", "unidirectional"), _CAUSAL),
    **dict.fromkeys(("mask", "attn_mask", "attention_mask", "padding_mask", "token_mask"), _MASK),
    "mask_mod": _say("a mask_mod is sl.from_mask_mod(mask_mod), {pattern}"),
    "block_mask": _say("for create_block_mask(mask_mod, ...), write sl.from_mask_mod(mask_mod), {pattern}"),
    **dict.fromkeys(
        ("pattern", "masks"),
        (
            *_rename("plan_or_mask", "patterns", "pattern", "subject"),
            ("query", "the pattern is that of make_attention_fn"),
            *_rename("mask"),
        ),
    ),
    **dict.fromkeys(
        ("B", "Q_LEN", "KV_LEN"), (("mask_mod", "a mask has no batch, and lengths of the arrays: leave it out"),)
    ),
    "H": _rename("heads"),
    "sparsity_config": _say("a configuration of DeepSpeed is sl.from_deepspeed(config), {pattern}"),
    **dict.fromkeys(("window_size", "sliding_window", "local_window_size", "window", "attention_window"), _WINDOW),
    **dict.fromkeys(
        ("key_padding_mask", "src_key_padding_mask"),
        (*_PADDED, *_say("padding is segment_ids= of the call, as segment_ids=jnp.where(key_padding_mask, -1, 0)")),
    ),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), _PACKED),
    **dict.fromkeys(("document_ids", "sequence_ids"), _rename("segment_ids")),
    **dict.fromkeys(
        ("prefix_len", "prefix_length", "prefix_lengths"),
        _say("prefixes that see themselves whole are order_ids=sl.prefix_order(prefix_lengths, T)"),
    ),
    **dict.fromkeys(
        ("bidirectional_mask", "token_type_ids", "image_mask"),
        _say("spans that see themselves whole are order_ids=sl.span_order(spans), with spans a bool array [B, T]"),
    ),
    "order_ids": (
        ("recompute", "it is an argument of the function's call: functools.partial(attention_fn, order_ids=ids)"),
        ("position", "a step sees all tokens before it that the pattern allows: order_ids= is an argument of prefill"),
        *_say("order_ids= is an argument of the call of layers, models, attention functions and the op"),
    ),
    "mask_ar": _say("it is order_ids=jnp.cumsum(mask_ar, axis=1)"),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "seqused_k"), _LENGTHS),
    **dict.fromkeys(
        ("q_segment_ids", "kv_segment_ids"), _say("it is a pair here: segment_ids=(q_segment_ids, kv_segment_ids)")
    ),
    # logits and their softmax
    "score_mod": _say(
        "kernels call no function of scores: one that hides pairs is sl.from_mask_mod(mask_mod), {pattern}; a tanh is "
        "logits_soft_cap=; distances are sl.Rope, or a bias, sl.DistanceBias(table)"
    ),
    **dict.fromkeys(("bias", "attn_bias", "ab"), _BIAS),
    "relative_bias": (
        ("bias", "a call takes bias=sl.alibi(num_heads), sl.DistanceBias(table) or sl.t5_bias(buckets)"),
        *_OF_MODEL,
        *_say("it is an option of SparseSelfAttention and SparseTransformerBlock; NativeSparseAttention has no bias"),
    ),
    **dict.fromkeys(("alibi", "use_alibi", "alibi_slopes", "position_bias", "relative_attention_bias"), _RELATIVE),
    **dict.fromkeys(("scale", "softmax_scale", "sm_scale", "scaling", "qk_scale"), _of_layer("scale")),
    **dict.fromkeys(
        ("logits_soft_cap", "softcap", "soft_cap", "attn_logits_soft_cap", "logit_softcapping"),
        _of_layer("logits_soft_cap"),
    ),
    **dict.fromkeys(("s_aux", "attention_sinks"), _rename("sinks", "use_sinks")),
    **dict.fromkeys(("dropout_p", "dropout", "attn_drop", "attention_dropout", "attn_pdrop"), _DROPOUT),
    **dict.fromkeys(
        ("training", "train", "is_training"),
        _say("nothing is dropped here; blocks with dropout take deterministic=True or False in each call"),
    ),
    "deterministic": _DETERMINISTIC,
    **dict.fromkeys(("need_weights", "average_attn_weights", "output_attentions", "return_attn_probs"), _WEIGHTS),
    **dict.fromkeys(("return_weights", "return_attention_scores"), _WEIGHTS),
    **dict.fromkeys(("save_residuals", "return_residual", "return_residuals", "return_softmax_lse"), _LSE),
    # sizes
    **dict.fromkeys(("embed_dim", "hidden_size", "d_model", "n_embd", "model_dim", "in_features"), _FEATURES),
    "dim": (*_rename("rotary_dim"), *_FEATURES),
    **dict.fromkeys(
        ("kdim", "vdim"), (*_rename("in_kv_features"), *_say("keys and values are projections of the one input"))
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "nhead", "heads", "num_q_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "kv_heads", "num_kv_heads", "num_query_groups"), _KV_HEADS),
    "enable_gqa": _KV_HEADS,
    **dict.fromkeys(("dim_head", "d_head", "key_dim", "head_size", "head_dim"), _HEAD_SIZE),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions", "context_length"), _LENGTH),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), _LENGTH),
    **dict.fromkeys(("block_size", "block_sizes", "BLOCK_SIZE", "chunk_size", "moba_chunk_size"), _BLOCK),
    **dict.fromkeys(("block_q", "BLOCK_M", "block_m"), (*_rename("q_blocksize"), *_say(_BLOCKS))),
    **dict.fromkeys(("block_kv", "BLOCK_N", "block_n"), (*_rename("kv_blocksize"), *_say(_BLOCKS))),
    **dict.fromkeys(("topk", "top_k", "moba_topk"), (*_rename("count", "top_k"), ("forced", "it is called k= here"))),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "depth"), _rename("num_layers")),
    **dict.fromkeys(("n_vocab", "num_embeddings"), _rename("vocab_size")),
    **dict.fromkeys(("intermediate_size", "d_ff", "dim_feedforward", "mlp_dim", "ffn_dim"), _rename("mlp_features")),
    # what layers compute
    **dict.fromkeys(("activation", "hidden_act", "activation_function"), _rename("mlp")),
    **dict.fromkeys(("norm_eps", "layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon"), _rename("norm_epsilon")),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm"), _rename("normalize_qk")),
    **dict.fromkeys(("qkv_bias", "attention_bias"), _rename("use_bias", "with_bias")),
    **dict.fromkeys(("rope_base", "rotary_base", "rope_theta", "base"), _rename("rope_theta", "theta")),
    "tie_word_embeddings": _rename("tie_embeddings"),
    "gradient_checkpointing": _rename("remat"),
    "attention_fn": _say("layers of this package bring their own attention: leave it out; " + _FLAX),
    "batch_first": _say("inputs are [..., T, features]: leave it out; swapaxes(0, 1) turns [T, B, features] into that"),
    **dict.fromkeys(("attn_implementation", "backend"), _rename("implementation")),
    "device": (*_rename("devices"), *_say("arrays stay on their devices: leave it out; jax.device_put moves them")),
    "dtype": _say("numbers have the dtype of the arrays: leave it out; x.astype changes it"),
    "precision": _say("logits and sums are float32 at least: leave it out"),
    **dict.fromkeys(("rngs", "rng", "seed"), _RNGS),
    # calls
    **dict.fromkeys(("query", "inputs_q", "q"), _rename("inputs", "inputs_q", "query", "x")),
    **dict.fromkeys(
        ("hidden_states", "input_ids", "input", "x"), _rename("inputs", "inputs_q", "x", "tokens", "prompts", "query")
    ),
    "k": (("query", "it is called key= here"), *_rename("top_k"), *_KEYS),
    "v": (("query", "it is called value= here"), *_KEYS),
    "key": (*_rename("rngs"), *_KEYS),
    **dict.fromkeys(("value", "inputs_k", "inputs_v", "inputs_kv", "encoder_hidden_states"), _KEYS),
    **dict.fromkeys(("position_ids", "input_positions"), _POSITIONS),
    "cache_position": _rename("position", "start"),
    **dict.fromkeys(("cache", "caches", "past_key_value", "past_key_values", "use_cache"), _CACHE),
    **dict.fromkeys(("kv_cache", "block_table"), _CACHE),
    **dict.fromkeys(_OF_FLAX, _say(_FLAX)),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), _rename("num_tokens")),
    **dict.fromkeys(("eos_token_id", "stop_tokens"), _rename("stop_token")),
    "pad_token_id": _say("no token is padding: prompts are a list of lists, or an array with lengths=, int [B]"),
    "num_beams": _say("beams are not searched: leave it out"),
    **dict.fromkeys(("pretrained_model_name_or_path", "save_directory"), _rename("folder")),
    "do_sample": _say("temperature=0 takes the likeliest token; above 0 it samples, by key="),
}

# Hints for calls with more arguments by position than these.
_BY_POSITION = {
    ("inputs",): "queries, keys and values are projections of one input, layer(x); SparseCrossAttention reads two",
    ("inputs_q", "inputs_kv"): "keys and values are projections of one input, layer(x, y)",
    ("num_heads",): "features are those of the inputs",
    ("name",): "options have names, as sl.preset('sliding_window', window=256)",
    ("query", "key", "value", "plan_or_mask"): "causality is a mask, sl.Causal(), and no weight is dropped",
}
# Hints for missing arguments.
_REQUIRED = {
    "plan_or_mask": "plan_or_mask says who attends to whom, as sl.Causal() & sl.Window(255), or sl.Full() for all; "
    + _FLAX,
    "pattern": "pattern says who attends to whom, as 'sliding_window:window=256' or sl.Causal()",
    "patterns": "patterns says who attends to whom, as 'sliding_window:window=256' or sl.Causal()",
    "seq_len": "seq_len is the longest input in tokens",
    "rngs": "rngs is nnx.Rngs(0), say",
    "inputs_kv": "keys of the same sequence are those of SparseSelfAttention",
}

SCORER = (
    "a scorer chooses blocks beside a mask: layers take it as pattern=sl.MoBA(), and for the op write "
    "sl.block_sparse_attention(q, k, v, sl.Causal(), selection=sl.MoBA().select(q, k))"
)
BY_ENTRY = (
    "jax.vmap(sl.block_sparse_attention)(query, key, value, mask) with mask [B, T, S] or [B, N, T, S]; documents and "
    "padding are segment_ids=, prefixes and spans order_ids="
)
BOOL_ORDER = "of bools that are True in spans that see themselves whole, write sl.span_order(spans)"
BOOL_IDS = "of bools that are True for tokens and False for padding, write jnp.where(valid, 0, -1)"
REVERSE_ONLY = (
    "block_sparse_attention has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize): use jax.grad, jax.vjp "
    "or jax.jacrev; the product of a Hessian and v is jax.vjp(jax.grad(f), x)[1](v), by implementation='xla'"
)

# Names of patterns in other libraries, and what to write.
PRESETS = {
    "dense": "it is 'causal' to some and 'bidirectional' to others",
    **dict.fromkeys(("full", "none", "encoder", "bert", "non_causal"), "all keys are 'bidirectional', or sl.Full()"),
    **dict.fromkeys(("gpt", "gpt2", "llama", "autoregressive", "decoder"), "all keys of the past are 'causal'"),
    **dict.fromkeys(
        ("mistral", "gemma", "swa", "window", "sliding", "local_attention"),
        "a window is 'sliding_window:window=4096', which counts the query",
    ),
    **dict.fromkeys(
        ("swin", "shifted_window", "shifted_windows"),
        "Swin's windows are 'windows:shape=56x56,size=7', and those of every second layer have ',shift=3'",
    ),
    **dict.fromkeys(
        ("natten", "na1d", "na2d", "na3d", "neighborhood_attention"), "NATTEN's is 'neighborhood:shape=56x56,kernel=7'"
    ),
    **dict.fromkeys(("streaming_llm", "streamingllm", "sinks", "attention_sinks"), "window and sinks: 'streaming'"),
    **dict.fromkeys(
        ("sparse_transformer", "openai", "gpt3"),
        "the two patterns are 'sparse_transformer_strided' and 'sparse_transformer_fixed'",
    ),
    **dict.fromkeys(("longnet", "dilated_window"), "a dilated window is 'dilated:window=256,dilation=4'"),
    **dict.fromkeys(("llama4", "chunked_attention", "block_local"), "causal chunks are 'chunked:chunk=8192'"),
    **dict.fromkeys(("block_diagonal", "blockdiag"), "it is a mask, sl.BlockDiagonal(64)"),
    **dict.fromkeys(("prefix", "prefixlm", "t5", "glm"), "a prefix that all see is 'prefix_lm:prefix=128'"),
    "global": "it is a mask beside another, sl.Window(255, 255) | sl.Global(4)",
    **dict.fromkeys(("document", "documents", "packed", "padding"), "documents are segment_ids= of the call"),
    **dict.fromkeys(
        ("sta", "sliding_tile_attention"), "sliding tiles are 'sliding_tile:shape=24x48x48,kernel=3,tile=8'"
    ),
    **dict.fromkeys(("variable", "bslongformer"), "DeepSpeed's modes are sl.from_deepspeed({'mode': 'variable'})"),
    **dict.fromkeys(
        ("flash", "flash_attention", "sdpa", "splash"), "it is a kernel, not a pattern: 'causal' or 'bidirectional'"
    ),
    **dict.fromkeys(
        ("bd3lm", "bd3lms", "block_diff", "block_diff_mask"),
        "noisy and clean halves of n tokens are 'block_diffusion:n=1024,block_size=16'",
    ),
    **dict.fromkeys(
        ("dflash", "dspark", "speculators"),
        "draft blocks of anchors are 'draft_blocks:total_seq_len=8192,block_size=16,stride=16'",
    ),
    **dict.fromkeys(("moba", "msa", "nsa", "infllm"), SCORER),
    **dict.fromkeys(
        ("performer", "linformer", "nystromformer", "linear_attention"),
        "it approximates attention to all keys, and a mask hides keys",
    ),
}


def advice(kwargs: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Returns the hint for one of some unknown arguments, None if no other library has them.

    Example:
      >>> advice({"n_heads": 8}, ("num_heads", "pattern"))
      "'n_heads', got 8: it is called num_heads= here"
    """
    names = ("plan_or_mask", "patterns", "pattern", "subject", *(() if "query" in known else ("mask",)))
    argument = next((f"as {x}=" for x in names if x in known), None)
    source = "KVCache.empty" if "position" in known else "make_attention_fn"
    where = argument or f"as the pattern= of the layer or of {source}"
    for name in sorted(kwargs, key=lambda name: name not in _OF_FLAX):
        for argument_here, hint in HINTS.get(name, ()):
            if argument_here is None or argument_here in known:
                return f"{name!r}, got {shown(kwargs[name])}: {hint.replace('{pattern}', where)}"
    return None


def signature_error(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Returns the error about arguments that do not fit a function's signature, None if they fit."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    else:
        return None
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if parameters and parameters[0].name in ("self", "cls"):
        parameters, args = parameters[1:], args[1:]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_position):
        names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] or _option_names(signature)
        by_name = f"; by name: {', '.join(f'{name}=' for name in names)}" if names else ""
        hint = _BY_POSITION.get(tuple(by_position), "the others have names" if names else "no more")
        got = ", ".join(map(shown, args))
        return f"takes {', '.join(by_position) or 'nothing'} by position, got {got}: {hint}{by_name}"
    bound = dict(zip(by_position, args, strict=False)) | dict(kwargs)
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in bound]
    if not missing:
        return reason
    names = ", ".join(f"{name}=" for name in missing)
    got = ", ".join(f"{name}={shown(value)}" for name, value in bound.items()) or "nothing"
    return "; ".join([f"{names} must be given, got {got}", *(_REQUIRED[x] for x in missing if x in _REQUIRED)])


def _option_names(signature: inspect.Signature) -> list[str]:
    """Returns the keys of the TypedDict of ``**options``, if a signature has such."""
    kinds = [get_args(p.annotation) for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return list(get_type_hints(kinds[0][0])) if any(kinds) else []


def scorer_hint(value: Any) -> str:
    """Returns the end of an error about a mask or a selection, empty unless ``value`` is a scorer."""
    return f"; {SCORER}" if hasattr(value if isinstance(value, type) else type(value), "select") else ""


def shown(value: Any) -> str:
    """Returns a value for an error: arrays by dtype and shape, all others by the beginning of their repr."""
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"{value.dtype}{[*value.shape]}"
    return f"{_joined(reprlib.repr(value)):.60}"


def one_line(value: Any) -> str:
    """Returns the repr of a value in one line; a repr of several lines, as of ``nnx.Rngs``, is joined and cut."""
    text = repr(value)
    return f"{_joined(text):.200}" if "\n" in text else text


def _joined(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)
