"""Families of decoders: tables that translate the ``config.json`` of a checkpoint into settings of a model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ...arguments.checks import Natural, checked, suggest
from ...masks.primitives import Causal, Window
from ..mixture import MixtureOfExperts
from .config import FULL, SLIDING, Config
from .rotary import make_rope

# Settings that must have one of these values. The first is the default.
_SUPPORTED = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False,),
    "tie_word_embeddings": (None, True, False),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "use_sliding_window": (False, True),
}
# Activations by Hugging Face's names: of GPT-2's MLP, and of gated ones.
MLPS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_exact", "relu": "relu"}
GATED_MLPS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "swish": "swiglu", "gelu_new": "geglu"}


def family_of(config: Config) -> "Family":
    """Returns the family of a configuration, and completes it by the family's defaults.

    Raises:
      ValueError: an unknown family.
    """
    name = str(config.get("model_type"))
    # Mistral's newer models have windows by layer; Hugging Face's library renames them as well.
    family = FAMILIES.get("ministral" if name == "mistral" and config.get("layer_types") else name)
    if family is None:
        known = suggest(config.get("model_type"), FAMILIES)
        raise ValueError(f"{config.file}: model_type: {known}")
    config.complete(family.defaults)
    return family


def read_settings(config: Config, num_layers: int, seq_len: int | None = None) -> dict[str, Any]:
    """Returns the arguments of `SparseTransformer` by a configuration, which must have ``num_layers`` layers.

    Scalings of rotary position embeddings depend on seq_len, by default the configuration's.
    """
    family = family_of(config)
    for name, allowed in _SUPPORTED.items():
        if name != "quantization_config" or not family.reads_mxfp4 or not is_mxfp4(config):
            config.one_of(name, allowed, default=allowed[0])
    settings = family.settings(config)
    count = settings["num_layers"]
    if count != num_layers:  # before anything is made for each layer
        name = "n_layer" if family.conv1d else "num_hidden_layers"
        raise ValueError(f"{config.file}: {name} must be {num_layers}, as the tensors have so many layers, got {count}")
    default_types = [SLIDING if family.is_sliding(config, i) else FULL for i in range(count)]
    layer_types = config.get("layer_types") or default_types
    is_known = isinstance(layer_types, list) and all(layer_type in (FULL, SLIDING) for layer_type in layer_types)
    if not is_known or len(layer_types) != count:
        raise ValueError(f"{config.file}: layer_types must be {count} times {FULL!r} or {SLIDING!r}, got {layer_types}")
    if layer_types != default_types and not family.mixed_layers:
        raise ValueError(
            f"{config.file}: layer_types must be those that this architecture has, {default_types}, got {layer_types}"
        )
    if SLIDING in layer_types and "use_sliding_window" in family.defaults and not config.get("use_sliding_window"):
        raise ValueError(f"{config.file}: use_sliding_window must be True where layer_types has {SLIDING!r}, got False")
    if "experts" in settings:
        experts, dense = settings.pop("experts"), settings["mlp"]
        settings["mlp"] = tuple(_cycle([experts if family.has_experts(config, i) else dense for i in range(count)]))
    cycle = _cycle([(x, family.rotates(config, i, x == SLIDING)) for i, x in enumerate(layer_types)])
    windows = {SLIDING: config.size("sliding_window") - 1} if SLIDING in layer_types else {}
    settings["patterns"] = tuple(Causal() & Window(windows[x]) if x in windows else Causal() for x, _ in cycle)
    if settings["positions"] == "rope":
        sizes = {"head_dim": settings["head_dim"], "partial": family.partial_rotary, "seq_len": seq_len}
        ropes = {x: make_rope(config, x, family.thetas, **sizes) for x, rotates in cycle if rotates}
        settings["rope"] = tuple(ropes[x] if rotates else None for x, rotates in cycle)
    return settings


def _cycle(layers: list[Any]) -> list[Any]:
    """Returns the shortest list that gives these values of layers by repetition."""
    count = len(layers)
    return layers[: next(n for n in range(1, count + 1) if layers == (layers[:n] * count)[:count])]


def is_mxfp4(config: Config) -> bool:
    """True if a configuration says that experts are quantized in MXFP4."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _llama(
    config: Config, *, activation: str = "hidden_act", epsilon: str = "rms_norm_eps", **overrides: Any
) -> dict[str, Any]:
    """Returns the settings that all families except GPT-2 share.

    Args:
      config: the configuration.
      activation, epsilon: the entries of the MLP's activation, and of the norms' epsilon.
      **overrides: settings of one family.
    """
    features = config.size("hidden_size")
    heads, kv_heads = config.divisible_sizes(
        "num_attention_heads", "num_key_value_heads", config.size("num_attention_heads")
    )
    head_dim = config.size("head_dim", features // heads)
    if head_dim % 2:
        raise ValueError(f"{config.file}: head_dim must be even, for pairs of features turn, got {head_dim}")
    biases = ("query", "key", "value", "out") if config.get("attention_bias", False) else ()
    return {
        "vocab_size": config.size("vocab_size"),
        "num_heads": heads,
        "features": features,
        "num_layers": config.size("num_hidden_layers"),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp": GATED_MLPS[config.one_of(activation, GATED_MLPS)],
        "mlp_features": config.size("intermediate_size"),
        "norm": "rms",
        "norm_epsilon": config.number(epsilon),
        "use_bias": (*biases, "mlp") if config.get("mlp_bias", False) else biases,
        "positions": "rope",
        "seq_len": config.size("max_position_embeddings"),
    } | overrides


def _gemma(config: Config, **overrides: Any) -> dict[str, Any]:
    overrides |= {"norm_placement": "sandwich", "embedding_scale": config.size("hidden_size") ** 0.5}
    overrides["scale"] = config.number("query_pre_attn_scalar") ** -0.5
    caps = {"logits_soft_cap": "attn_logit_softcapping", "final_soft_cap": "final_logit_softcapping"}
    overrides |= {cap: config.number(entry) for cap, entry in caps.items() if config.get(entry) is not None}
    return _llama(config, activation="hidden_activation", **overrides)


def _gpt2(config: Config) -> dict[str, Any]:
    features, heads = config.divisible_sizes("n_embd", "n_head")
    return {
        "vocab_size": config.size("vocab_size"),
        "num_heads": heads,
        "features": features,
        "num_layers": config.size("n_layer"),
        "mlp": MLPS[config.one_of("activation_function", MLPS)],
        "mlp_features": config.size("n_inner", 4 * features),
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "positions": "learned",
        "seq_len": config.size("n_positions"),
    }


@dataclasses.dataclass(frozen=True)
class Family:
    """A model architecture of Hugging Face: names of its parameters, and arguments of `SparseTransformer`.

    Attributes:
      names: module names here -> in the files, with {} for the layer's number; a pair (name, i) is part i of a tensor
        that holds the outputs of several modules side by side.
      settings: a function from a configuration to the arguments of `SparseTransformer`.
      is_sliding: a function, True if layer i has a window where the configuration has no layer_types.
      prefix: an optional prefix of all names except the head's.
      conv1d: True if kernels are [in, out], not [out, in].
      zero_centered_norms: True if scales of norms are stored as differences from 1.
      mixed_layers: True if layer_types may mix layers with and without a window.
      defaults: settings that a configuration may leave out; in one of text and images, all that equal these.
      interleaved_rope: True if files pair neighbouring features for rotary position embeddings.
      rotates: a function, True if layer i has rotary position embeddings; with True for its window.
      partial_rotary: True if rotary position embeddings may rotate a part of a head.
      has_experts: a function, True if layer i has experts; settings then contain the mixture as "experts".
      reads_mxfp4: True if experts may be quantized in MXFP4.
      thetas: default thetas of layers without a window and of layers with one; one number if they are equal. With two,
        only the first are scaled.
    """

    names: Mapping[str, str | tuple[str, int]]
    settings: Callable[[Config], dict[str, Any]]
    defaults: Mapping[str, Any]
    is_sliding: Callable[[Config, int], bool] = lambda config, i: False
    prefix: str = "model."
    conv1d: bool = False
    zero_centered_norms: bool = False
    mixed_layers: bool = False
    interleaved_rope: bool = False
    rotates: Callable[[Config, int, bool], bool] = lambda config, i, is_sliding: True
    partial_rotary: bool = False
    has_experts: Callable[[Config, int], bool] = lambda config, i: True
    reads_mxfp4: bool = False
    thetas: tuple[float, ...] = (10000.0,)


_LLAMA = {
    "token_embedding": "embed_tokens",
    "final_norm": "norm",
    "head": "lm_head",
    "blocks.attention_norm": "layers.{}.input_layernorm",
    "blocks.attention.query": "layers.{}.self_attn.q_proj",
    "blocks.attention.key": "layers.{}.self_attn.k_proj",
    "blocks.attention.value": "layers.{}.self_attn.v_proj",
    "blocks.attention.out": "layers.{}.self_attn.o_proj",
    "blocks.attention.query_ln": "layers.{}.self_attn.q_norm",
    "blocks.attention.key_ln": "layers.{}.self_attn.k_norm",
    "blocks.mlp_norm": "layers.{}.post_attention_layernorm",
    "blocks.mlp_gate": "layers.{}.mlp.gate_proj",
    "blocks.mlp_in": "layers.{}.mlp.up_proj",
    "blocks.mlp_out": "layers.{}.mlp.down_proj",
}
_POST = {
    "blocks.attention_out_norm": "layers.{}.post_attention_layernorm",
    "blocks.mlp_out_norm": "layers.{}.post_feedforward_layernorm",
}
_OLMO2 = _LLAMA | _POST
_GEMMA = _OLMO2 | {"blocks.mlp_norm": "layers.{}.pre_feedforward_layernorm"}
_PHI3 = _LLAMA | {
    **{f"blocks.attention.{x}": ("layers.{}.self_attn.qkv_proj", i) for i, x in enumerate(("query", "key", "value"))},
    **{f"blocks.{x}": ("layers.{}.mlp.gate_up_proj", i) for i, x in enumerate(("mlp_gate", "mlp_in"))},
}
_GPT2 = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "final_norm": "ln_f",
    "head": "lm_head",
    "blocks.attention_norm": "h.{}.ln_1",
    "blocks.attention.query": ("h.{}.attn.c_attn", 0),
    "blocks.attention.key": ("h.{}.attn.c_attn", 1),
    "blocks.attention.value": ("h.{}.attn.c_attn", 2),
    "blocks.attention.out": "h.{}.attn.c_proj",
    "blocks.mlp_norm": "h.{}.ln_2",
    "blocks.mlp_in": "h.{}.mlp.c_fc",
    "blocks.mlp_out": "h.{}.mlp.c_proj",
}


_QWEN3_MOE = _LLAMA | {
    "blocks.experts.router": "layers.{}.mlp.gate",
    "blocks.experts.experts_gate": "layers.{}.mlp.experts.{}.gate_proj",
    "blocks.experts.experts_in": "layers.{}.mlp.experts.{}.up_proj",
    "blocks.experts.experts_out": "layers.{}.mlp.experts.{}.down_proj",
}
_MIXTRAL = _LLAMA | {
    "blocks.experts.router": "layers.{}.block_sparse_moe.gate",
    "blocks.experts.experts_gate": "layers.{}.block_sparse_moe.experts.{}.w1",
    "blocks.experts.experts_in": "layers.{}.block_sparse_moe.experts.{}.w3",
    "blocks.experts.experts_out": "layers.{}.block_sparse_moe.experts.{}.w2",
}
_GPT_OSS = _LLAMA | {
    "blocks.attention.sinks": "layers.{}.self_attn.sinks",
    "blocks.experts.router": "layers.{}.mlp.router",
    "blocks.experts.experts_gate": ("layers.{}.mlp.experts.gate_up_proj", 0),
    "blocks.experts.experts_in": ("layers.{}.mlp.experts.gate_up_proj", 1),
    "blocks.experts.experts_out": "layers.{}.mlp.experts.down_proj",
}


def _make_experts(config: Config, count: str, **settings: Any) -> MixtureOfExperts:
    """Makes the mixture of a configuration whose entry ``count`` is the number of experts."""
    try:
        return MixtureOfExperts(config.size(count), config.size("num_experts_per_tok"), **settings)
    except ValueError as error:
        raise ValueError(f"{config.file}: {error}") from error


def _qwen3_moe(config: Config) -> dict[str, Any]:
    config.one_of("mlp_bias", (False,), default=False)  # the files have no biases of experts
    settings = _llama(config, normalize_qk=True)
    normalize = config.one_of("norm_topk_prob", (False, True))
    options = {"features": config.size("moe_intermediate_size"), "activation": settings["mlp"], "normalize": normalize}
    count = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return settings | {"experts": _make_experts(config, count, **options)}


def _qwen3_moe_has_experts(config: Config, i: int) -> bool:
    """True if layer i of Qwen3-MoE has experts."""
    dense_layers = config.get("mlp_only_layers", [])
    if not isinstance(dense_layers, list):
        raise ValueError(f"{config.file}: mlp_only_layers must be a list of layers, got {dense_layers!r}")
    return i not in dense_layers and (i + 1) % config.size("decoder_sparse_step") == 0


def _mixtral(config: Config) -> dict[str, Any]:
    config.one_of("mlp_bias", (False,), default=False)
    settings = _llama(config)
    return settings | {"experts": _make_experts(config, "num_local_experts", activation=settings["mlp"])}


def _gpt_oss(config: Config) -> dict[str, Any]:
    config.one_of("hidden_act", ("silu",))
    config.one_of("swiglu_alpha", (1.702,))
    config.one_of("swiglu_limit", (7.0,))
    if config.get("rope_parameters", config.get("rope_scaling")) is None:
        raise ValueError(f"{config.file}: rope_scaling is missing")
    settings = _llama(config, use_sinks=True)
    settings["use_bias"] = (*(x for x in settings["use_bias"] if x != "mlp"), "mlp")
    options = {"activation": "clamped_swiglu", "router_bias": True}
    return settings | {"experts": _make_experts(config, "num_local_experts", **options)}


def _has_window(config: Config, i: int) -> bool:
    """True if the configuration has a window, for all layers."""
    return config.get("sliding_window") is not None and config.get("use_sliding_window", True)


def _qwen_is_sliding(config: Config, i: int) -> bool:
    """True if layer i of Qwen has a window."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return False
    return i >= checked(f"{config.file}: max_window_layers", config.get("max_window_layers"), Natural)


def _gemma3(config: Config) -> dict[str, Any]:
    config.one_of("attn_logit_softcapping", (None,))
    return _gemma(config, normalize_qk=True)


def _exaone4_is_sliding(config: Config, i: int) -> bool:
    """True if layer i of Exaone 4 has a window: a number n leaves each n-th one without, "LLLG" the layers of G."""
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None or pattern is None:
        return False
    if isinstance(pattern, str):
        return pattern[i % len(pattern)] == "L" and i + 1 < config.size("num_hidden_layers")
    return bool((i + 1) % config.size("sliding_window_pattern"))


def _smollm3_rotates(config: Config, i: int, is_sliding: bool = False) -> bool:
    """True if layer i of SmolLM 3 has rotary position embeddings."""
    count, layers = config.size("num_hidden_layers"), config.get("no_rope_layers")
    if layers is None:
        return bool((i + 1) % config.size("no_rope_layer_interval"))
    if not isinstance(layers, list) or len(layers) != count or any(x not in (0, 1) for x in layers):
        raise ValueError(f"{config.file}: no_rope_layers must be {count} times 0 or 1, got {layers!r}")
    return bool(layers[i])


def _smollm3_is_sliding(config: Config, i: int) -> bool:
    """True if layer i of SmolLM 3 has a window."""
    return bool(config.get("use_sliding_window") and config.get("sliding_window") and not _smollm3_rotates(config, i))


def _granite(config: Config) -> dict[str, Any]:
    scales: dict[str, Any] = {"embedding_scale": config.number("embedding_multiplier")}
    scales |= {"residual_scale": config.number("residual_multiplier")}
    scales |= {"logits_scale": 1 / config.number("logits_scaling")}
    scales = {name: None if x == 1 else x for name, x in scales.items()}
    return _llama(config) | scales | {"scale": config.number("attention_multiplier")}


def _cohere(config: Config) -> dict[str, Any]:
    reason = "False, as these norms would have scales of their own for each head"
    config.one_of("use_qk_norm", (False,), reason, default=False)
    scale = config.number("logit_scale")
    overrides: dict[str, Any] = {"parallel": "shared_norm", "logits_scale": None if scale == 1 else scale}
    return _llama(config, epsilon="layer_norm_eps", norm="layer_no_bias", **overrides)


# The defaults of transformers' classes, in this order; those of vocab_size follow from the tensors.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES += ("max_position_embeddings", "rms_norm_eps")


def _defaults(*sizes: float | None, **settings: Any) -> dict[str, Any]:
    return {"hidden_act": "silu"} | dict(zip(_SIZES, sizes, strict=True)) | settings


_LLAMA_SIZES = _defaults(4096, 11008, 32, 32, None, 2048, 1e-6)
_MISTRAL = _defaults(4096, 14336, 32, 32, 8, 131072, 1e-6, sliding_window=4096)
_QWEN = _defaults(4096, 22016, 32, 32, 32, 32768, 1e-6, sliding_window=4096, max_window_layers=28)
_QWEN["use_sliding_window"] = False
_GEMMA_SETTINGS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_COHERE_SIZES = _defaults(8192, 22528, 40, 64, None, 8192, None, layer_norm_eps=1e-5, logit_scale=0.0625)
_GRANITE_SCALES = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GPT2_SIZES = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5}
_GPT2_SIZES["activation_function"] = "gelu_new"
FAMILIES = {
    "gpt2": Family(_GPT2, _gpt2, _GPT2_SIZES, prefix="transformer.", conv1d=True),
    "llama": Family(_LLAMA, _llama, _LLAMA_SIZES),
    "mistral": Family(_LLAMA, _llama, _MISTRAL, _has_window),
    "ministral": Family(_LLAMA, _llama, _MISTRAL, _has_window, mixed_layers=True),
    "mixtral": Family(
        _MIXTRAL,
        _mixtral,
        _defaults(4096, 14336, 32, 32, 8, 131072, 1e-5, num_local_experts=8, num_experts_per_tok=2),
        _has_window,
        thetas=(1000000.0,),
    ),
    "qwen3_moe": Family(
        _QWEN3_MOE,
        _qwen3_moe,
        _defaults(2048, 6144, 24, 32, 4, 32768, 1e-6, sliding_window=4096, use_sliding_window=False)
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": False, "decoder_sparse_step": 1},
        _has_window,
        has_experts=_qwen3_moe_has_experts,
    ),
    "gpt_oss": Family(
        _GPT_OSS,
        _gpt_oss,
        _defaults(2880, 2880, 36, 64, 8, 131072, 1e-5, head_dim=64, sliding_window=128, attention_bias=True)
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        lambda config, i: i % 2 == 0,
        mixed_layers=True,
        reads_mxfp4=True,
        thetas=(150000.0,),
    ),
    "qwen2": Family(
        _LLAMA,
        functools.partial(_llama, use_bias=("query", "key", "value")),
        _QWEN,
        _qwen_is_sliding,
        mixed_layers=True,
    ),
    "qwen3": Family(
        _LLAMA,
        functools.partial(_llama, normalize_qk=True),
        _QWEN | {"head_dim": 128},
        _qwen_is_sliding,
        mixed_layers=True,
    ),
    "gemma2": Family(
        _GEMMA,
        _gemma,
        _defaults(2304, 9216, 26, 8, 4, 8192, 1e-6, **_GEMMA_SETTINGS)
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        lambda config, i: i % 2 == 0,
        zero_centered_norms=True,
        mixed_layers=True,
    ),
    "gemma3_text": Family(
        _GEMMA,
        _gemma3,
        _defaults(2304, 9216, 26, 8, 4, 131072, 1e-6, **_GEMMA_SETTINGS),
        lambda config, i: bool((i + 1) % config.size("sliding_window_pattern", 6)),
        zero_centered_norms=True,
        mixed_layers=True,
        thetas=(1000000.0, 10000.0),
    ),
    "olmo2": Family(
        _OLMO2,
        functools.partial(_llama, norm_placement="post", normalize_qk="rms_joint"),
        _LLAMA_SIZES | {"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        _OLMO2,
        functools.partial(_llama, norm_placement="post", normalize_qk="rms_joint"),
        _LLAMA_SIZES | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        lambda config, i: bool((i + 1) % 4),
        mixed_layers=True,
        thetas=(500000.0, 500000.0),
    ),
    "exaone4": Family(
        _OLMO2,
        functools.partial(_llama, norm_placement="post", normalize_qk=True),
        _defaults(4096, 16384, 32, 32, 32, 2048, 1e-5, sliding_window=4096, sliding_window_pattern=4),
        _exaone4_is_sliding,
        mixed_layers=True,
        rotates=lambda config, i, is_sliding: is_sliding or config.get("sliding_window") is None,
    ),
    "smollm3": Family(
        _LLAMA,
        _llama,
        _defaults(2048, 11008, 36, 16, 4, 32768, 1e-6, use_sliding_window=False, no_rope_layer_interval=4),
        _smollm3_is_sliding,
        mixed_layers=True,
        rotates=_smollm3_rotates,
        thetas=(2000000.0,),
    ),
    "phi3": Family(
        _PHI3,
        _llama,
        _defaults(3072, 8192, 32, 32, None, 4096, 1e-5, original_max_position_embeddings=4096),
        lambda config, i: config.get("sliding_window") is not None,
        partial_rotary=True,
    ),
    "cohere": Family(_LLAMA, _cohere, _COHERE_SIZES, interleaved_rope=True, thetas=(500000.0,)),
    "cohere2": Family(
        _LLAMA,
        _cohere,
        _COHERE_SIZES | {"sliding_window": 4096},
        lambda config, i: bool((i + 1) % config.size("sliding_window_pattern", 4)),
        mixed_layers=True,
        interleaved_rope=True,
        rotates=lambda config, i, is_sliding: is_sliding,
    ),
    "granite": Family(_LLAMA, _granite, _LLAMA_SIZES | dict.fromkeys(_GRANITE_SCALES, 1.0)),
}
