"""Families of decoders: tables that translate the ``config.json`` of a checkpoint into settings of a model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ...arguments.checks import Natural
from ...masks.primitives import Causal, Window
from ..mixture import MixtureOfExperts
from ..relative_bias import AlibiBias
from ..settings import PROJECTIONS
from .config import FULL, SLIDING, Config
from .entries import MLPS, Entry, choice, factor, gpt_entries, llama_entries, number, optional, size, size_up_to
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
# Architectures that are none of `FAMILIES`, and what the layers here lack for them.
_REFUSED: dict[str, str] = dict.fromkeys(("deepseek_v2", "deepseek_v3"), "no layer here has latent attention")
_REFUSED |= dict.fromkeys(("t5", "mt5", "umt5"), "models here end in logits, and none reads an encoder")


def family_of(config: Config) -> "Family":
    """Returns the family of a configuration, and completes it by the family's defaults.

    Raises:
      ValueError: an unknown family.
    """
    reason = _REFUSED.get(str(config.get("model_type")), "other architectures have other layers")
    name = config.one_of("model_type", FAMILIES, f"one of {', '.join(sorted(FAMILIES))}, as {reason}")
    # Mistral's newer models have windows by layer; Hugging Face's library renames them as well.
    family = FAMILIES["ministral" if name == "mistral" and config.get("layer_types") else name]
    config.complete(family.defaults, family.aliases)
    return family


def read_settings(config: Config, num_layers: int, seq_len: int | None = None) -> dict[str, Any]:
    """Returns the arguments of `SparseTransformer` by a configuration, which must have ``num_layers`` layers.

    Scalings of rotary position embeddings depend on seq_len, by default the configuration's.
    """
    family = family_of(config)
    for name, allowed in (_SUPPORTED | dict(family.supported)).items():
        if name != "quantization_config" or not family.reads_mxfp4 or not is_mxfp4(config):
            config.one_of(name, allowed, default=allowed[0])
    biases = (*PROJECTIONS,) if config.get("attention_bias") else ()
    settings = {"norm": "rms", "positions": "rope", "use_bias": (*biases, "mlp") if config.get("mlp_bias") else biases}
    settings |= _read_entries(family.entries, config) | dict(family.settings) | family.derive(config)
    count = settings["num_layers"]
    check_count(config, family.entries, "num_layers", count, num_layers)  # before anything is made for each layer
    if family.experts:
        dense, mixture = settings["mlp"], _read_entries(family.experts, config) | dict(family.mixture)
        experts = MixtureOfExperts(**{"activation": dense} | mixture)
        settings["mlp"] = tuple(_cycle([experts if family.has_experts(config, i) else dense for i in range(count)]))
    layer_types = _layer_types(family, config, count)
    cycle = _cycle([(x, family.rotates(config, i, x == SLIDING)) for i, x in enumerate(layer_types)])
    windows = {SLIDING: config.size("sliding_window") - 1} if SLIDING in layer_types else {}
    settings["patterns"] = tuple(Causal() & Window(windows[x]) if x in windows else Causal() for x, _ in cycle)
    if settings["positions"] == "rope":
        sizes = {"head_dim": settings["head_dim"], "partial": family.partial_rotary, "seq_len": seq_len}
        ropes = {x: make_rope(config, x, family.thetas, **sizes) for x, rotates in cycle if rotates}
        settings["rope"] = tuple(ropes[x] if rotates else None for x, rotates in cycle)
    return settings


def _read_entries(entries: tuple[Entry, ...], config: Config) -> dict[str, Any]:
    """Returns the arguments that a configuration's entries mean, without those that they leave at their defaults."""
    values = [(entry.setting, entry.read(config)) for entry in entries]
    return {setting: value for setting, value in values if value is not None}


def check_count(config: Config, entries: tuple[Entry, ...], setting: str, value: int, count: int) -> None:
    """Refuses a number of layers or experts that is not that of the tensors; ``setting`` is its argument."""
    name = next(entry.name for entry in entries if entry.setting == setting)
    rule = f"be {count}, as the tensors have so many {setting.removeprefix('num_')}"
    config.require(value == count, name, rule, value)


def _layer_types(family: "Family", config: Config, count: int) -> list[str]:
    """Returns the types of layers, FULL or SLIDING, by a configuration's layer_types or by the family's rule.

    Raises:
      ValueError: types that are unknown, too few, or not those of the architecture.
    """
    default_types = [SLIDING if family.is_sliding(config, i) else FULL for i in range(count)]
    layer_types = config.get("layer_types") or default_types
    is_known = isinstance(layer_types, list) and all(layer_type in (FULL, SLIDING) for layer_type in layer_types)
    rule = f"be {count} times {FULL!r} or {SLIDING!r}"
    config.require(is_known and len(layer_types) == count, "layer_types", rule)
    is_possible = layer_types == default_types or "layer_types" in family.defaults
    config.require(is_possible, "layer_types", f"be those that this architecture has, {default_types}")
    has_windows = "use_sliding_window" not in family.defaults or config.get("use_sliding_window")
    rule = f"be True where layer_types has {SLIDING!r}"
    config.require(has_windows or SLIDING not in layer_types, "use_sliding_window", rule)
    return layer_types


def _cycle(layers: list[Any]) -> list[Any]:
    """Returns the shortest list that gives these values of layers by repetition."""
    count = len(layers)
    return layers[: next(n for n in range(1, count + 1) if layers == (layers[:n] * count)[:count])]


def is_mxfp4(config: Config) -> bool:
    """True if a configuration says that experts are quantized in MXFP4."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


@dataclasses.dataclass(frozen=True)
class Family:
    """A model architecture of Hugging Face: names of its parameters, and arguments of `SparseTransformer`.

    Attributes:
      names: module names here -> in the files, with {} for the layer's number; a pair (name, i) is part i of a tensor
        that holds the outputs of several modules side by side.
      defaults: entries that a configuration may leave out; in one of text and images, all that equal these. Entries of
        biases, of windows and of rotary position embeddings are written if they are among these; with layer_types,
        layers with and without a window may be mixed.
      entries: the entries of a configuration that are arguments of `SparseTransformer`.
      aliases: other names of entries -> their names above; the other name takes precedence.
      settings: the other arguments.
      derive: a function from a configuration to arguments that depend on it otherwise; it may refuse entries.
      supported: entries that must have one of these values, the first of which is the default, and is written.
      is_sliding: a function, True if layer i has a window where the configuration has no layer_types.
      rotates: a function, True if layer i has rotary position embeddings; with True for its window.
      partial_rotary: True if rotary position embeddings may rotate a part of a head.
      interleaved_rope: True if files pair neighbouring features for rotary position embeddings.
      interleaved_heads: True if a tensor of several modules has its outputs by head, then by module.
      thetas: default thetas of layers without a window and of layers with one; one number if they are equal. With two,
        only the first are scaled.
      experts: the entries that are arguments of `MixtureOfExperts`; none without experts.
      mixture: the other arguments.
      has_experts: a function, True if layer i has experts.
      reads_mxfp4: True if experts may be quantized in MXFP4.
      prefix: an optional prefix of all names except the head's.
      conv1d: True if kernels are [in, out], not [out, in].
      zero_centered_norms: True if scales of norms are stored as differences from 1.
    """

    names: Mapping[str, str | tuple[str, int]]
    defaults: Mapping[str, Any]
    entries: tuple[Entry, ...] = llama_entries()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derive: Callable[[Config], dict[str, Any]] = lambda config: {}
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    supported: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    is_sliding: Callable[[Config, int], bool] = lambda config, i: False
    rotates: Callable[[Config, int, bool], bool] = lambda config, i, is_sliding: True
    partial_rotary: bool = False
    interleaved_rope: bool = False
    interleaved_heads: bool = False
    thetas: tuple[float, ...] = (10000.0,)
    experts: tuple[Entry, ...] = ()
    mixture: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_experts: Callable[[Config, int], bool] = lambda config, i: True
    reads_mxfp4: bool = False
    prefix: str = "model."
    conv1d: bool = False
    zero_centered_norms: bool = False


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
_MPT = {
    "token_embedding": "wte",
    "final_norm": "norm_f",
    "head": "lm_head",
    "blocks.attention_norm": "blocks.{}.norm_1",
    **{f"blocks.attention.{x}": ("blocks.{}.attn.Wqkv", i) for i, x in enumerate(("query", "key", "value"))},
    "blocks.attention.out": "blocks.{}.attn.out_proj",
    "blocks.mlp_norm": "blocks.{}.norm_2",
    "blocks.mlp_in": "blocks.{}.ffn.up_proj",
    "blocks.mlp_out": "blocks.{}.ffn.down_proj",
}
_BLOOM = {
    "token_embedding": "word_embeddings",
    "embedding_norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
    "head": "lm_head",
    "blocks.attention_norm": "h.{}.input_layernorm",
    **{
        f"blocks.attention.{x}": ("h.{}.self_attention.query_key_value", i)
        for i, x in enumerate(("query", "key", "value"))
    },
    "blocks.attention.out": "h.{}.self_attention.dense",
    "blocks.mlp_norm": "h.{}.post_attention_layernorm",
    "blocks.mlp_in": "h.{}.mlp.dense_h_to_4h",
    "blocks.mlp_out": "h.{}.mlp.dense_4h_to_h",
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


def _gemma(config: Config) -> dict[str, Any]:
    return {"norm_placement": "sandwich", "embedding_scale": config.size("hidden_size") ** 0.5}


def _mpt(config: Config) -> dict[str, Any]:
    """Returns MPT's MLP and slopes, which it orders in its own way unless the number of heads is a power of two."""
    heads = config.size("n_heads")
    count = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-8 * i / count) for i in range(1, count + 1)]
    bias = AlibiBias(None if count == heads else (slopes[1::2] + slopes[::2])[:heads])
    mlp = {"mlp": "gelu_exact", "mlp_features": 4 * config.size("d_model"), "use_bias": False}
    return {"norm": "layer_no_bias", "positions": "none", "relative_bias": bias} | mlp


def _bloom(config: Config) -> dict[str, Any]:
    mlp = {"mlp": "gelu_tanh", "mlp_features": 4 * config.size("hidden_size"), "use_bias": True}
    return {"norm": "layer", "embedding_norm": True, "positions": "none", "relative_bias": AlibiBias()} | mlp


def _gpt_oss(config: Config) -> dict[str, Any]:
    if config.get("rope_parameters", config.get("rope_scaling")) is None:
        raise ValueError(f"{config.file}: rope_scaling is missing")
    return {}


def _cohere(config: Config) -> dict[str, Any]:
    reason = "False, as these norms would have scales of their own for each head"
    config.one_of("use_qk_norm", (False,), reason, default=False)
    return {}


def _qwen3_moe_has_experts(config: Config, i: int) -> bool:
    """True if layer i of Qwen3-MoE has experts."""
    dense_layers = config.get("mlp_only_layers", [])
    config.require(isinstance(dense_layers, list), "mlp_only_layers", "be a list of layers")
    return i not in dense_layers and (i + 1) % config.size("decoder_sparse_step") == 0


def _has_window(config: Config, i: int) -> bool:
    """True if the configuration has a window, for all layers."""
    return config.get("sliding_window") is not None and config.get("use_sliding_window", True)


def _qwen_is_sliding(config: Config, i: int) -> bool:
    """True if layer i of Qwen has a window."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return False
    return i >= config.size("max_window_layers", kind=Natural)


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
    is_valid = isinstance(layers, list) and len(layers) == count and all(x in (0, 1) for x in layers)
    config.require(is_valid, "no_rope_layers", f"be {count} times 0 or 1")
    return bool(layers[i])


def _smollm3_is_sliding(config: Config, i: int) -> bool:
    """True if layer i of SmolLM 3 has a window."""
    return bool(config.get("use_sliding_window") and config.get("sliding_window") and not _smollm3_rotates(config, i))


def _all_but_every(n: int, entry: str = "") -> Callable[[Config, int], bool]:
    """Returns the rule that every n-th layer has no window; a configuration's ``entry`` may be another number."""
    return lambda config, i: bool((i + 1) % (config.size(entry, n) if entry else n))


# The defaults of transformers' classes, in this order; those of vocab_size follow from the tensors.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES += ("max_position_embeddings", "rms_norm_eps")


def _defaults(*sizes: float | None, **entries: Any) -> dict[str, Any]:
    entries = {"hidden_act": "silu", "rope_theta": None, "rope_scaling": None} | entries
    return entries | dict(zip(_SIZES, sizes, strict=True))


_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOWS = {"sliding_window": 4096, "layer_types": None}
_LLAMA_SIZES = _defaults(4096, 11008, 32, 32, None, 2048, 1e-6, attention_bias=False)
_OLMO_SIZES = _LLAMA_SIZES | {"rms_norm_eps": 1e-5}
_MISTRAL_SIZES = _defaults(4096, 14336, 32, 32, 8, 131072, 1e-6, sliding_window=4096)
_QWEN_SIZES = _defaults(
    4096, 22016, 32, 32, 32, 32768, 1e-6, use_sliding_window=False, max_window_layers=28, **_WINDOWS
)
_GEMMA_SIZES = _defaults(2304, 9216, 26, 8, 4, 8192, 1e-6, attention_bias=False, head_dim=256, **_WINDOWS)
_GEMMA_SIZES |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
_GEMMA_ENTRIES = llama_entries(
    number("query_pre_attn_scalar", "scale", -0.5),
    optional(number("final_logit_softcapping", "final_soft_cap")),
    activation="hidden_activation",
)
_EXAONE_SIZES = _defaults(4096, 16384, 32, 32, 32, 2048, 1e-5, sliding_window_pattern=4, **_WINDOWS)
_SMOLLM_SIZES = _defaults(2048, 11008, 36, 16, 4, 32768, 1e-6, use_sliding_window=False, **_BIASES)
_SMOLLM_SIZES |= {"sliding_window": None, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 4}
_PHI_SIZES = _defaults(3072, 8192, 32, 32, None, 4096, 1e-5, sliding_window=None, partial_rotary_factor=None)
_PHI_SIZES["original_max_position_embeddings"] = 4096
_COHERE_SIZES = _defaults(8192, 22528, 40, 64, None, 8192, None, layer_norm_eps=1e-5, logit_scale=0.0625)
_COHERE_SIZES |= {"attention_bias": False, "use_qk_norm": False}
_COHERE_ENTRIES = llama_entries(factor("logit_scale", "logits_scale"), epsilon="layer_norm_eps")
_COHERE_SETTINGS = {"norm": "layer_no_bias", "parallel": "shared_norm"}
_GRANITE_SCALES = (
    factor("embedding_multiplier", "embedding_scale"),
    factor("residual_multiplier", "residual_scale"),
    number("attention_multiplier", "scale"),
    factor("logits_scaling", "logits_scale", -1),
)
_GRANITE_SIZES = _LLAMA_SIZES | _BIASES | {entry.name: 1.0 for entry in _GRANITE_SCALES}
_GPT2_SIZES = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5}
_GPT2_SIZES["activation_function"] = "gelu_new"
_GPT2_ENTRIES = gpt_entries(
    "n_embd",
    "n_head",
    "n_layer",
    "n_positions",
    size("n_inner", "mlp_features", lambda config: 4 * config.size("n_embd")),
    choice("activation_function", "mlp", MLPS),
)
_GPT2_SETTINGS = {"norm": "layer", "positions": "learned", "use_bias": True}

_MPT_SIZES = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048, "layer_norm_epsilon": 1e-5}
_MPT_SIZES["tie_word_embeddings"] = True
_MPT_ENTRIES = gpt_entries(
    "d_model", "n_heads", "n_layers", "max_seq_len", optional(number("attn_config.softmax_scale", "scale"))
)
_MPT_ALIASES = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
_MPT_SUPPORTED = {
    "no_bias": (True,),
    "expansion_ratio": (4,),
    "logit_scale": (None,),
    "attn_config.attn_type": ("multihead_attention",),
    "attn_config.alibi": (True,),
    "attn_config.alibi_bias_max": (8,),
    "attn_config.clip_qkv": (None,),
    "attn_config.qk_ln": (False,),
    "attn_config.prefix_lm": (False,),
}
_BLOOM_SIZES = {"hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5, "seq_length": 2048}
_BLOOM_SIZES["tie_word_embeddings"] = True
_BLOOM_ENTRIES = gpt_entries("hidden_size", "n_head", "n_layer", "seq_length")
_BLOOM_ALIASES = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}

_EXPERTS = (
    size("num_local_experts", "num_experts"),
    size_up_to("num_experts_per_tok", "top_k", "num_local_experts", divides=False),
)
_MIXTRAL_SIZES = _defaults(4096, 14336, 32, 32, 8, 131072, 1e-5, sliding_window=None, num_local_experts=8)
_MIXTRAL_SIZES["num_experts_per_tok"] = 2
_QWEN3_MOE_SIZES = _defaults(2048, 6144, 24, 32, 4, 32768, 1e-6, moe_intermediate_size=768, num_experts_per_tok=8)
_QWEN3_MOE_SIZES |= {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False}
_QWEN3_MOE_SIZES |= {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_QWEN3_MOE_EXPERTS = (
    *_EXPERTS,
    size("moe_intermediate_size", "features"),
    choice("norm_topk_prob", "normalize", {False: False, True: True}),
)
_GPT_OSS_SIZES = _defaults(2880, 2880, 36, 64, 8, 131072, 1e-5, head_dim=64, attention_bias=True, mlp_bias=True)
_GPT_OSS_SIZES |= {"sliding_window": 128, "layer_types": None, "num_local_experts": 128, "num_experts_per_tok": 4}

FAMILIES = {
    "gpt2": Family(_GPT2, _GPT2_SIZES, _GPT2_ENTRIES, _GPT2_SETTINGS, prefix="transformer.", conv1d=True),
    "llama": Family(_LLAMA, _LLAMA_SIZES | _BIASES),
    "mistral": Family(_LLAMA, _MISTRAL_SIZES, is_sliding=_has_window),
    "ministral": Family(_LLAMA, _MISTRAL_SIZES | _WINDOWS, is_sliding=_has_window),
    "mixtral": Family(
        _MIXTRAL,
        _MIXTRAL_SIZES,
        supported={"mlp_bias": (False,)},
        is_sliding=_has_window,
        thetas=(1000000.0,),
        experts=_EXPERTS,
    ),
    "qwen3_moe": Family(
        _QWEN3_MOE,
        _QWEN3_MOE_SIZES,
        settings={"normalize_qk": True},
        aliases={"num_experts": "num_local_experts"},  # the name in transformers 4
        supported={"mlp_bias": (False,)},  # the files have no biases of experts
        is_sliding=_has_window,
        experts=_QWEN3_MOE_EXPERTS,
        has_experts=_qwen3_moe_has_experts,
    ),
    "gpt_oss": Family(
        _GPT_OSS,
        _GPT_OSS_SIZES,
        settings={"use_sinks": True},
        derive=_gpt_oss,
        supported={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,), "mlp_bias": (True,)},
        is_sliding=_all_but_every(2),
        thetas=(150000.0,),
        experts=_EXPERTS,
        mixture={"activation": "clamped_swiglu", "router_bias": True},
        reads_mxfp4=True,
    ),
    "qwen2": Family(_LLAMA, _QWEN_SIZES, settings={"use_bias": ("query", "key", "value")}, is_sliding=_qwen_is_sliding),
    "qwen3": Family(
        _LLAMA,
        _QWEN_SIZES | {"head_dim": 128, "attention_bias": False},
        settings={"normalize_qk": True},
        is_sliding=_qwen_is_sliding,
    ),
    "gemma2": Family(
        _GEMMA,
        _GEMMA_SIZES | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        (*_GEMMA_ENTRIES, optional(number("attn_logit_softcapping", "logits_soft_cap"))),
        derive=_gemma,
        is_sliding=_all_but_every(2),
        zero_centered_norms=True,
    ),
    "gemma3_text": Family(
        _GEMMA,
        _GEMMA_SIZES | {"max_position_embeddings": 131072, "rope_local_base_freq": None},
        _GEMMA_ENTRIES,
        {"normalize_qk": True},
        _gemma,
        supported={"attn_logit_softcapping": (None,)},
        is_sliding=_all_but_every(6, "sliding_window_pattern"),
        thetas=(1000000.0, 10000.0),
        zero_centered_norms=True,
    ),
    "olmo2": Family(_OLMO2, _OLMO_SIZES, settings={"norm_placement": "post", "normalize_qk": "rms_joint"}),
    "olmo3": Family(
        _OLMO2,
        _OLMO_SIZES | _WINDOWS,
        settings={"norm_placement": "post", "normalize_qk": "rms_joint"},
        is_sliding=_all_but_every(4),
        thetas=(500000.0, 500000.0),
    ),
    "exaone4": Family(
        _OLMO2,
        _EXAONE_SIZES,
        settings={"norm_placement": "post", "normalize_qk": True},
        is_sliding=_exaone4_is_sliding,
        rotates=lambda config, i, is_sliding: is_sliding or config.get("sliding_window") is None,
    ),
    "smollm3": Family(
        _LLAMA, _SMOLLM_SIZES, is_sliding=_smollm3_is_sliding, rotates=_smollm3_rotates, thetas=(2000000.0,)
    ),
    "phi3": Family(
        _PHI3, _PHI_SIZES, is_sliding=lambda config, i: config.get("sliding_window") is not None, partial_rotary=True
    ),
    "cohere": Family(
        _LLAMA, _COHERE_SIZES, _COHERE_ENTRIES, _COHERE_SETTINGS, _cohere, interleaved_rope=True, thetas=(500000.0,)
    ),
    "cohere2": Family(
        _LLAMA,
        _COHERE_SIZES | _WINDOWS,
        _COHERE_ENTRIES,
        _COHERE_SETTINGS,
        _cohere,
        is_sliding=_all_but_every(4, "sliding_window_pattern"),
        rotates=lambda config, i, is_sliding: is_sliding,
        interleaved_rope=True,
    ),
    "mpt": Family(
        _MPT,
        _MPT_SIZES,
        _MPT_ENTRIES,
        derive=_mpt,
        aliases=_MPT_ALIASES,
        supported=_MPT_SUPPORTED,
        prefix="transformer.",
    ),
    "bloom": Family(
        _BLOOM,
        _BLOOM_SIZES,
        _BLOOM_ENTRIES,
        derive=_bloom,
        aliases=_BLOOM_ALIASES,
        supported={"apply_residual_connection_post_layernorm": (False,)},
        interleaved_heads=True,
        prefix="transformer.",
    ),
    "granite": Family(_LLAMA, _GRANITE_SIZES, llama_entries(*_GRANITE_SCALES)),
}
