"""Families of decoders: tables that translate the ``config.json`` of a checkpoint into settings of a model."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...arguments.checks import Natural, Positive, as_float, checked, suggest
from ...masks.primitives import Causal, Window
from ..rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from .dense import abbreviate
from .safetensors import read_json


class Config:
    """A config.json, or its part for text, completed by the defaults of the family. A null counts as missing.

    Attributes:
      file: the file, for errors.
      values: the settings.
      is_multimodal: True for the configuration of a model of text and images.
    """

    def __init__(self, file: pathlib.Path, values: Mapping[str, Any] | None = None):
        outer = read_json(file) if values is None else dict(values)
        text = outer.get("text_config")
        self.file, self.is_multimodal = file, isinstance(text, dict)
        if isinstance(text, dict):
            shared = {name: outer[name] for name in ("tie_word_embeddings", "quantization_config") if name in outer}
            outer = {"model_type": f"{outer.get('model_type')}_text"} | text | shared
        family = FAMILIES.get(str(outer.get("model_type")))
        self.values: dict[str, Any] = dict(family.defaults if family else {}) | outer

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting, or the default."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a setting that is an integer >= 1."""
        return checked(f"{self.file}: {name}", self.get(name, default), Positive)

    def number(self, name: str) -> float:
        """Returns a setting that is a number > 0."""
        number = as_float(self.get(name))
        return self.one_of(name, () if number is None or number <= 0 else (number,), "a number > 0")

    def divisible_sizes(self, name: str, by: str, default: int | None = None) -> tuple[int, int]:
        """Returns two settings, integers >= 1, the second of which divides the first."""
        size, divisor = self.size(name), self.size(by, default)
        if size % divisor:
            raise ValueError(f"{self.file}: {by} must divide {name}={size}, got {divisor}")
        return size, divisor

    def one_of(self, name: str, allowed: Collection[Any], rule: str = "", default: Any = None) -> Any:
        """Returns a setting that has one of the allowed values."""
        value = self.get(name, default)
        if not any(value is x if isinstance(value, bool) or isinstance(x, bool) else value == x for x in allowed):
            rule = rule or " or ".join(map(repr, allowed))
            raise ValueError(f"{self.file}: {name} must be {rule}, got {value!r}")
        return value


FULL, SLIDING = "full_attention", "sliding_attention"
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
    "partial_rotary_factor": (1,),
}
# Activations by Hugging Face's names: of GPT-2's MLP, and of gated ones.
MLPS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_exact", "relu": "relu"}
GATED_MLPS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "swish": "swiglu", "gelu_new": "geglu"}
# Parameters of rotary position embeddings without a meaning, as those of another scaling.
_IGNORED = {"finetuned", "mscale", "mscale_all_dim"}
# The scalings of rotary position embeddings by Hugging Face's names, and its names of their fields that differ.
SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
SCALING_KEYS = {"original_length": "original_max_position_embeddings", "fast": "beta_fast", "slow": "beta_slow"}
SCALING_KEYS |= {"low": "low_freq_factor", "high": "high_freq_factor", "rounded": "truncate"}


def family_of(config: Config) -> "Family":
    """Returns the family of a configuration; raises ValueError if it is unknown."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = suggest(config.get("model_type"), FAMILIES)
        raise ValueError(f"{config.file}: model_type: {known}; models of experts are not served")
    return family


def read_settings(config: Config, num_layers: int, seq_len: int | None = None) -> dict[str, Any]:
    """Returns the arguments of `SparseTransformer` by a configuration, which must have ``num_layers`` layers.

    Scalings of rotary position embeddings depend on seq_len, by default the configuration's.
    """
    family = family_of(config)
    for name, allowed in _SUPPORTED.items():
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
    cycle_length = next(n for n in range(1, count + 1) if layer_types == (layer_types[:n] * count)[:count])
    cycle = layer_types[:cycle_length]
    windows = {SLIDING: config.size("sliding_window") - 1} if SLIDING in layer_types else {}
    settings["patterns"] = tuple(Causal() & Window(windows[x]) if x in windows else Causal() for x in cycle)
    if settings["positions"] == "rope":
        settings["rope"] = tuple(_make_rope(config, family, layer_type, seq_len) for layer_type in cycle)
    return settings


def _make_rope(config: Config, family: "Family", layer_type: str, seq_len: int | None) -> Rope:
    """Makes the rotary position embeddings of layers of one type.

    Raises:
      ValueError: an unknown or wrong setting, with the file's name.
    """
    parameters, older_scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    local = layer_type == SLIDING and len(family.thetas) > 1
    theta = config.get("rope_local_base_freq" if local else "rope_theta", family.thetas[-1 if local else 0])
    by_layer_type = isinstance(parameters, dict) and not {FULL, SLIDING}.isdisjoint(parameters)
    is_valid = (
        isinstance(parameters.get(layer_type), dict) if by_layer_type else not parameters or len(family.thetas) == 1
    )
    if not is_valid:
        raise ValueError(f"{config.file}: rope_parameters must be of {FULL!r} and of {SLIDING!r}, got {parameters!r}")
    newer = parameters.get(FULL) if by_layer_type else parameters
    if newer and older_scaling and _without_theta(newer) != _without_theta(older_scaling):
        raise ValueError(
            f"{config.file}: rope_parameters and rope_scaling must agree, got {parameters!r} and {older_scaling!r}"
        )
    if by_layer_type:
        parameters = parameters[layer_type]
    elif not parameters:
        parameters = {} if local else older_scaling
    if not isinstance(parameters, dict):
        raise ValueError(f"{config.file}: rotary embeddings must be an object, got {parameters!r}")
    if parameters.get("factor", 0) is None:
        parameters = parameters | {"factor": _length_ratio(config, parameters)}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    theta, share = parameters.pop("rope_theta", theta), parameters.pop("partial_rotary_factor", 1)
    if share != 1:
        raise ValueError(f"{config.file}: partial_rotary_factor must be 1, got {share!r}")
    default_type = parameters.pop("type", "default")
    name, scaling = parameters.pop("rope_type", default_type), None
    try:
        if name != "default":
            scaling = _make_scaling(config, str(name), parameters, seq_len)
        return Rope(theta, scaling=scaling)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config.file}: rotary embeddings: {error}") from error


def _without_theta(rope: Any) -> Any:
    return {name: x for name, x in rope.items() if name != "rope_theta"} if isinstance(rope, dict) else rope


def _length_ratio(config: Config, parameters: Mapping[str, Any]) -> float:
    """Returns the ratio of a model's longest sequence to that of its original training, which a null factor means."""
    name = SCALING_KEYS["original_length"]
    original = checked(f"{config.file}: {name}", config.get(name, parameters.get(name)), Positive)
    return config.size("max_position_embeddings") / original


def _attention_factor(factor: Any, **scales: Any) -> float:
    """Returns YaRN's attention factor by DeepSeek's settings, 1 where both are equal."""
    log = 0.1 * math.log(max(1.0, as_float(factor) or 1.0))
    wrong = [f"{name} must be a number > 0, got {x!r}" for name, x in scales.items() if (as_float(x) or 0) <= 0]
    if wrong:
        raise ValueError(wrong[0])
    return (scales["mscale"] * log + 1) / (scales["mscale_all_dim"] * log + 1)


def _parameter_names(scaling: type) -> dict[str, str]:
    """Returns the names of a scaling's fields by Hugging Face's names."""
    return {SCALING_KEYS.get(field.name, field.name): field.name for field in dataclasses.fields(scaling)}


def _make_scaling(config: Config, name: str, parameters: dict[str, Any], seq_len: int | None) -> Any:
    """Makes the scaling of rotary position embeddings with this name, None if it changes nothing up to seq_len tokens.

    Raises:
      ValueError, TypeError: an unknown name, or an unknown, missing or wrong parameter.
    """
    if name == "dynamic":
        longest = config.size("max_position_embeddings")
        if seq_len is not None and seq_len > longest:
            raise ValueError(f"'dynamic' changes beyond max_position_embeddings={longest}, got seq_len={seq_len}")
        return None
    if name not in SCALINGS:
        raise ValueError(f"rope_type: {suggest(name, ['default', 'dynamic', *SCALINGS])}")
    known = _parameter_names(SCALINGS[name])
    needed, original = {"factor"}, SCALING_KEYS["original_length"]
    if original in known:
        length = parameters.get(original, config.get("max_position_embeddings"))
        parameters = parameters | {original: config.get(original, length)}
    if name == "yarn":
        scales = {key: parameters.pop(key, None) for key in ("mscale", "mscale_all_dim")}
        if all(scales.values()):
            parameters.setdefault("attention_factor", _attention_factor(parameters.get("factor"), **scales))
    if name == "llama3":
        needed |= {"low_freq_factor", "high_freq_factor"}
    ignored = _IGNORED.union(*map(_parameter_names, SCALINGS.values())) - {*known}
    parameters = {key: value for key, value in parameters.items() if key not in ignored}
    unknown, missing = [x for x in parameters if x not in known], sorted(needed - {*parameters})
    if unknown or missing:
        raise ValueError(f"{name!r} {f'has no {abbreviate(unknown)}' if unknown else f'needs {abbreviate(missing)}'}")
    make: Any = SCALINGS[name]
    return make(**{known[key]: value for key, value in parameters.items()})


def _llama(config: Config, *, activation: str = "hidden_act", **overrides: Any) -> dict[str, Any]:
    """Returns the settings that all families except GPT-2 share.

    Args:
      config: the configuration.
      activation: the entry of the MLP's activation.
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
        "norm_epsilon": config.number("rms_norm_eps"),
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
        with queries, keys and values side by side.
      settings: a function from a configuration to the arguments of `SparseTransformer`.
      is_sliding: a function, True if layer i has a window where the configuration has no layer_types.
      prefix: an optional prefix of all names except the head's.
      conv1d: True if kernels are [in, out], not [out, in].
      zero_centered_norms: True if scales of norms are stored as differences from 1.
      mixed_layers: True if layer_types may mix layers with and without a window.
      defaults: settings that a configuration may leave out; in one of text and images, all that equal these.
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


def _qwen_is_sliding(config: Config, i: int) -> bool:
    """True if layer i of Qwen has a window."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return False
    return i >= checked(f"{config.file}: max_window_layers", config.get("max_window_layers"), Natural)


def _gemma3(config: Config) -> dict[str, Any]:
    config.one_of("attn_logit_softcapping", (None,))
    return _gemma(config, normalize_qk=True)


# The defaults of transformers' classes, in this order; those of vocab_size follow from the tensors.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES += ("max_position_embeddings", "rms_norm_eps")


def _defaults(*sizes: float | None, **settings: Any) -> dict[str, Any]:
    return {"hidden_act": "silu"} | dict(zip(_SIZES, sizes, strict=True)) | settings


_LLAMA_SIZES = _defaults(4096, 11008, 32, 32, None, 2048, 1e-6)
_QWEN = _defaults(4096, 22016, 32, 32, 32, 32768, 1e-6, sliding_window=4096, max_window_layers=28)
_QWEN["use_sliding_window"] = False
_GEMMA_SETTINGS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_GPT2_SIZES = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5}
_GPT2_SIZES["activation_function"] = "gelu_new"
FAMILIES = {
    "gpt2": Family(_GPT2, _gpt2, _GPT2_SIZES, prefix="transformer.", conv1d=True),
    "llama": Family(_LLAMA, _llama, _LLAMA_SIZES),
    "mistral": Family(
        _LLAMA,
        _llama,
        _defaults(4096, 14336, 32, 32, 8, 131072, 1e-6, sliding_window=4096),
        lambda config, i: config.get("sliding_window") is not None,
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
}
