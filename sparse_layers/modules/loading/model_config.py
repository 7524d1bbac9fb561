"""The config.json of a model: its family and settings under Hugging Face's names, for a checkpoint."""

import dataclasses
import math
import operator
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ...masks import And
from ...masks.primitives import Causal, Window
from ..attention import SparseSelfAttention
from ..block import SparseTransformerBlock
from ..mixture import MixtureOfExperts
from ..rope import LongRopeScaling, Rope
from ..settings import BLOCK_PROJECTIONS, PROJECTIONS, projections_with_bias, resolve_qk_norm
from ..sparse_attention import JointRMSNorm
from ..transformer import SparseTransformer
from .config import FULL, SLIDING, Config
from .families import FAMILIES, Family, read_settings
from .rotary import SCALING_KEYS, SCALINGS

# Names in transformers other than XyzForCausalLM.
_CLASSES = {"gpt2": "GPT2LMHeadModel", "smollm3": "SmolLM3ForCausalLM"}
# Settings that are attributes of a model, and the defaults of others.
_ATTRIBUTES = ("num_layers", "seq_len", "embedding_scale", "logits_scale", "final_soft_cap")
_DEFAULTS = {"norm_placement": "pre", "norm": "layer", "normalize_qk": False, "use_bias": True, "parallel": False}
_DEFAULTS |= dict.fromkeys(("embedding_scale", "final_soft_cap", "logits_soft_cap", "scale", "rope"))
_DEFAULTS |= dict.fromkeys(("residual_scale", "logits_scale", "relative_bias"))
_DEFAULTS["embedding_norm"] = False


def config_of(
    model: SparseTransformer, file: pathlib.Path, entries: Mapping[str, Any]
) -> tuple[Family, dict[str, Any]]:
    """Returns the family and the config.json of a model, where ``entries`` override its own; errors name ``file``.

    Raises:
      ValueError: no family, or not that of the entries, has the model's architecture; errors of `read_settings`.
    """
    if "text_config" in entries:
        raise ValueError("config must be that of a text model, got one with text_config: pass config['text_config']")
    settings = settings_of(model)
    names = [str(entries["model_type"])] if "model_type" in entries else list(FAMILIES)
    reasons, matching = [], []
    for name in names:
        values = _config_entries(name, model, settings) if name in FAMILIES else {}
        if "rope_parameters" in entries:  # the newer generation's entry for both of these
            values = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling")}
        values |= entries
        try:
            config_settings = read_settings(Config(file, values), model.num_layers, model.seq_len)
        except ValueError as error:
            if "model_type" in entries:
                raise
            reasons.append(f"{name}: {error}")
            continue
        # Null follows the tensors.
        tied = Config(file, values).get("tie_word_embeddings", settings["tie_embeddings"])
        difference = _difference(settings, _completed(config_settings) | {"tie_embeddings": tied})
        if difference:
            reasons.append(f"{name}: {difference}")
        else:
            matching.append((len(layers_with_other_patterns(model, config_settings)), FAMILIES[name], values))
    if not matching:
        subject = "config must be the model's" if entries else "model must be like one of Hugging Face's"
        raise ValueError(f"{subject}, but differs in {'; '.join(reasons)}")
    return min(matching, key=operator.itemgetter(0))[1:]  # the first of those with the most patterns


def settings_of(model: SparseTransformer) -> dict[str, Any]:
    """Returns the arguments of `SparseTransformer`, except patterns, that make a model.

    Raises:
      ValueError: layers of kinds that `FAMILIES` lack, or that differ.
    """
    blocks = _blocks(model)
    layers = [_layer_settings(number, block) for number, block in enumerate(blocks)]
    mlps = tuple(layer.pop("mlp") for layer in layers)
    differing = [i for i, layer in enumerate(layers) if layer != layers[0]]
    if differing:
        raise ValueError(
            f"model: layers must be equal except for patterns, rope and mlp, layer {differing[0]} differs from layer 0"
        )
    ropes = tuple(block.attention.attention_fn.rope for block in blocks)
    positions = {"learned": model.position_embedding, "row_column": model.row_embedding}
    positions |= {"rope": next(filter(None, ropes), None)}
    norms = [norm for norm in (model.embedding_norm, model.final_norm) if norm is not None]
    epsilons = {*layers[0].pop("norm_epsilon"), *(norm.epsilon for norm in norms)}
    return {
        "positions": next((name for name, value in positions.items() if value is not None), "none"),
        **layers[0],
        "vocab_size": model.token_embedding.num_embeddings,
        "features": model.token_embedding.features,
        "norm": _norm_name(model.final_norm),
        "norm_epsilon": epsilons.pop() if len(epsilons) == 1 else tuple(sorted(epsilons)),
        "rope": ropes,
        "relative_bias": model.shared_relative_bias or layers[0]["relative_bias"],
        "mlp": mlps,
        "embedding_norm": model.embedding_norm is not None,
        "tie_embeddings": model.head is None,
        **{name: getattr(model, name) for name in _ATTRIBUTES},
    }


def _blocks(model: SparseTransformer) -> list[SparseTransformerBlock]:
    """Returns a block for each layer; scanned blocks have stacked parameters."""
    return [model.blocks[layer % len(model.blocks)] for layer in range(model.num_layers)]


def _layer_settings(number: int, block: SparseTransformerBlock) -> dict[str, Any]:
    attention: Any = block.attention
    mlp_in: Any = block.mlp_in if block.experts is None else block.experts.experts_in
    if not isinstance(attention, SparseSelfAttention) or mlp_in is None:
        module = type(attention).__name__ if mlp_in is not None else "an MLP of make_mlp"
        raise ValueError(f"model: layer {number} has {module}, which Hugging Face's files have no names for")
    norms = [block.attention_norm, block.attention_out_norm, block.mlp_norm, block.mlp_out_norm]
    norms += [attention.query_ln, attention.key_ln]
    before, after = block.attention_norm is not None, block.attention_out_norm is not None
    projections = {name: getattr(attention, name) for name in PROJECTIONS} | {"mlp": mlp_in}
    return {
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "scale": attention.attention_fn.fn.scale or attention.head_dim**-0.5,
        "logits_soft_cap": attention.attention_fn.fn.logits_soft_cap,
        "normalize_qk": resolve_qk_norm(True, _norm_name(attention.query_ln)) if attention.normalize_qk else False,
        "use_bias": frozenset(name for name, linear in projections.items() if linear.bias is not None),
        "mlp": _sized_mlp(block.mlp, mlp_in.kernel.shape[-1]),
        "relative_bias": attention.relative_bias,
        "use_sinks": attention.sinks is not None,
        "norm_placement": "sandwich" if before and after else "pre" if before else "post",
        "norm_epsilon": frozenset(norm.epsilon for norm in norms if norm is not None),
        "parallel": block.parallel,
        "residual_scale": block.residual_scale,
    }


def _sized_mlp(mlp: Any, features: int) -> Any:
    """Returns an MLP with its hidden features: (activation, features), or a mixture without mesh axes."""
    if not isinstance(mlp, MixtureOfExperts):
        return mlp, features
    return dataclasses.replace(mlp, features=mlp.features or features, expert_axis=None, token_axes=())


def _norm_name(norm: Any) -> str:
    """Returns the name of a norm's kind."""
    if isinstance(norm, nnx.LayerNorm):
        return "layer" if norm.bias is not None else "layer_no_bias"
    return "rms_joint" if isinstance(norm, JointRMSNorm) else "rms"


def _completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of a configuration completed by the defaults of `SparseTransformer`."""
    completed = _DEFAULTS | dict(settings)
    completed.setdefault("num_kv_heads", completed["num_heads"])
    completed.setdefault("head_dim", completed["features"] // completed["num_heads"])
    completed["scale"] = completed["scale"] or completed["head_dim"] ** -0.5
    completed["use_bias"] = projections_with_bias(completed["use_bias"], BLOCK_PROJECTIONS)
    completed["normalize_qk"] = resolve_qk_norm(completed["normalize_qk"], completed["norm"])
    ropes = completed["rope"] or (None,)
    mlps = completed["mlp"] if isinstance(completed["mlp"], tuple) else (completed["mlp"],)
    for name, cycle in (("rope", ropes), ("mlp", [_sized_mlp(mlp, completed["mlp_features"]) for mlp in mlps])):
        completed[name] = tuple(cycle[layer % len(cycle)] for layer in range(completed["num_layers"]))
    return completed


def _difference(settings: Mapping[str, Any], config_settings: Mapping[str, Any]) -> str:
    """Describes the first setting that differs; with rotary position embeddings, seq_len may."""
    for name, value in settings.items():
        config_value = config_settings.get(name, value)  # use_sinks is a setting of one family only
        if name == "mlp" and value != config_value:  # of the first layer that differs
            value, config_value = next(pair for pair in zip(value, config_value, strict=True) if pair[0] != pair[1])
        are_floats = isinstance(value, float) and isinstance(config_value, float)
        is_close = are_floats and math.isclose(value, config_value)
        if value != config_value and not is_close and not (name == "seq_len" and settings["positions"] == "rope"):
            shown = [sorted(x) if isinstance(x, frozenset) else x for x in (value, config_value)]
            return f"{name}, {shown[0]!r} in the model and {shown[1]!r} in config.json"
    return ""


# --- patterns --------------------------------------------------------------------------------------------------------


def layers_with_other_patterns(model: SparseTransformer, settings: Mapping[str, Any]) -> list[int]:
    """Returns the layers whose patterns are not those of a configuration."""
    patterns = settings["patterns"]
    in_config = [_window_size(patterns[layer % len(patterns)]) for layer in range(model.num_layers)]
    return [layer for layer, size in enumerate(_window_sizes(model)) if size != in_config[layer]]


def _window_sizes(model: SparseTransformer) -> list[float | None]:
    """Returns the windows of layers in tokens, including the query: infinite for causal, None for other patterns."""
    steps = [block.attention.attention_fn.fn for block in _blocks(model)]
    return [None if fn.selection is not None or len({*fn.masks}) > 1 else _window_size(fn.masks[0]) for fn in steps]


def _window_size(mask: Any) -> float | None:
    """Returns the window of one mask, see `_window_sizes`."""
    terms = [mask.left, mask.right] if isinstance(mask, And) else [mask]
    windows = [term for term in terms if isinstance(term, Window)]
    rest = [term for term in terms if not isinstance(term, Window)]
    if any(term != Causal() for term in rest) or len(windows) > 1:
        return None
    if not windows:
        return math.inf
    (window,) = windows
    size = math.inf if window.left is None else window.left + 1
    return size if rest or window.right == 0 else None


# --- entries of config.json ------------------------------------------------------------------------------------------


def _config_entries(name: str, model: SparseTransformer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a model as entries of config.json, as far as its family has such."""
    family, mlps = FAMILIES[name], settings["mlp"]
    mixture = next((mlp for mlp in mlps if isinstance(mlp, MixtureOfExperts)), None)
    dense_layers = [layer for layer, mlp in enumerate(mlps) if not isinstance(mlp, MixtureOfExperts)]
    mlp = mlps[dense_layers[0]] if dense_layers else (mlps[0].activation, mlps[0].features)
    values = dict(settings) | dict(zip(("mlp", "mlp_features"), mlp, strict=True))
    entries = {
        "model_type": name,
        "architectures": [_CLASSES.get(name, f"{name.removesuffix('_text').title().replace('_', '')}ForCausalLM")],
        "tie_word_embeddings": settings["tie_embeddings"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # transformers has defaults for these
        "dtype": jnp.dtype(model.token_embedding.embedding.dtype).name,
        **{entry: allowed[0] for entry, allowed in family.supported.items()},
        **{entry.name: entry.write(values[entry.setting]) for entry in family.entries},
    }
    if mixture is not None:
        entries |= {entry.name: entry.write(getattr(mixture, entry.setting)) for entry in family.experts}
    optional_entries = {
        "attention_bias": "out" in settings["use_bias"],
        "mlp_bias": "mlp" in settings["use_bias"],
        "mlp_only_layers": dense_layers,
        "decoder_sparse_step": 1,
        "use_qk_norm": False,
    }
    optional_entries |= _layer_entries(name, model, settings)
    entries |= {entry: value for entry, value in optional_entries.items() if entry in family.defaults}
    aliases = {alias: entries[entry] for alias, entry in family.aliases.items() if entry in entries}
    return _nested(entries | aliases)


def _nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns entries with those named ``"outer.inner"`` in objects ``outer``."""
    nested: dict[str, Any] = {}
    for name, value in entries.items():
        outer, _, inner = name.rpartition(".")
        (nested.setdefault(outer, {}) if outer else nested)[inner] = value
    return nested


def _layer_entries(name: str, model: SparseTransformer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns windows and rotary position embeddings under names that all generations of transformers read."""
    family = FAMILIES[name]
    first_rope = next(filter(None, settings["rope"]), Rope())
    window_sizes, ropes = _window_sizes(model), [rope or first_rope for rope in settings["rope"]]
    is_sliding = [size is not None and size < math.inf for size in window_sizes]
    if len(family.thetas) > 1 and len({*ropes}) > 1:  # two kinds of layers differ by their rope
        local_rope = min(ropes, key=lambda rope: (rope.scaling is not None, rope.theta))
        is_sliding = [rope == local_rope for rope in ropes]
    sliding_sizes = {size for size, sliding in zip(window_sizes, is_sliding, strict=True) if sliding}
    (size,) = sliding_sizes if len(sliding_sizes) == 1 else (None,)
    size = int(size) if size is not None and size < math.inf else settings["seq_len"]
    has_size = all(is_sliding) or "layer_types" in family.defaults
    if name == "exaone4":  # null if all of its layers have rotary embeddings
        has_size = any(is_sliding)
    full_rope = ropes[is_sliding.index(False)] if False in is_sliding else ropes[0]
    local_theta = ropes[is_sliding.index(True)].theta if True in is_sliding else [*family.thetas][-1]
    original_length = family.defaults.get("original_max_position_embeddings")
    if isinstance(first_rope.scaling, LongRopeScaling):  # this entry outweighs that of rope_scaling
        original_length = first_rope.scaling.original_length
    return {
        "layer_types": [SLIDING if sliding else FULL for sliding in is_sliding],
        "sliding_window": size if has_size else None,
        "use_sliding_window": any(is_sliding),
        "max_window_layers": is_sliding.index(True) if any(is_sliding) else 0,
        "no_rope_layers": [int(rope is not None) for rope in settings["rope"]],
        "partial_rotary_factor": (first_rope.rotary_dim or settings["head_dim"]) / settings["head_dim"],
        "original_max_position_embeddings": original_length,
        "rope_theta": full_rope.theta,
        "rope_scaling": _scaling_entries(full_rope),
        "rope_local_base_freq": local_theta,
    }


def _scaling_entries(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling is None:
        return None
    (name,) = (name for name, scaling in SCALINGS.items() if type(rope.scaling) is scaling)
    numbers = {SCALING_KEYS.get(key, key): value for key, value in dataclasses.asdict(rope.scaling).items()}
    numbers.pop("length", None)  # that of the model
    return {"rope_type": name} | numbers
