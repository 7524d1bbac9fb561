"""The config.json of a model of ours: the family that computes the same, and its settings in Hugging Face's words."""

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
from ..attention import JointRMSNorm, SparseSelfAttention
from ..block import IN_BLOCK, SparseTransformerBlock
from ..rope import Rope
from ..settings import biased
from ..transformer import SparseTransformer
from .families import FAMILIES, FULL, NUMBERS, SCALINGS, SLIDING, Config, Family, described

_CLASSES = {"gpt2": "GPT2LMHeadModel"}  # of transformers, where they are not Xyz of xyz
_BIASES = {"llama": ("attention_bias", "mlp_bias")}
_BIASES |= dict.fromkeys(("qwen3", "gemma2", "gemma3_text", "olmo2"), ("attention_bias",))
_UNSAID = {"norm_placement": "pre", "norm": "layer", "normalize_qk": False, "use_bias": True, "parallel": False}
_UNSAID |= dict.fromkeys(("embedding_scale", "final_soft_cap", "logits_soft_cap", "scale", "rope"))


def config_of(model: SparseTransformer, file: pathlib.Path, words: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family and the config.json of a model; ``words`` are added, and win.

    Raises:
      ValueError: no family computes what the model does, or not the one that the words say; what `described` refuses.
    """
    ours = settings_of(model)
    names = [str(words["model_type"])] if "model_type" in words else list(FAMILIES)
    reasons, fitting = [], []
    for name in names:
        values = _words(name, model, ours) if name in FAMILIES else {}
        if "rope_parameters" in words:  # the newer generation's word for both of these
            values = {word: value for word, value in values.items() if word not in ("rope_theta", "rope_scaling")}
        values |= words
        try:
            family, theirs = described(Config(file, values))
        except ValueError as error:
            if "model_type" in words:
                raise
            reasons.append(f"{name}: {error}")
            continue
        tied = Config(file, values).get("tie_word_embeddings", ours["tie_embeddings"])  # null: as the tensors have it
        difference = _difference(ours, _completed(theirs) | {"tie_embeddings": tied})
        if difference:
            reasons.append(f"{name}: {difference}")
        else:
            fitting.append((len(unwritten(model, theirs)), family, values))
    if not fitting:
        subject = "config must be the model's" if words else "model must be like one of Hugging Face's"
        raise ValueError(f"{subject}, but differs in {'; '.join(reasons)}")
    return min(fitting, key=operator.itemgetter(0))[1:]  # the first of those that say the most patterns


def settings_of(model: SparseTransformer) -> dict[str, Any]:
    """The arguments of `SparseTransformer`, read from a model, but for patterns.

    Raises:
      ValueError: layers of other kinds than `FAMILIES` have, or that differ.
    """
    blocks = _blocks(model)
    layers = [_layer_settings(number, block) for number, block in enumerate(blocks)]
    differing = [i for i, layer in enumerate(layers) if layer != layers[0]]
    if differing:
        raise ValueError(
            f"model: layers must be alike but for patterns and rope, layer {differing[0]} is not as layer 0"
        )
    ropes = tuple(block.attention.attention_fn.rope for block in blocks)
    tables = (("learned", model.position_embedding), ("row_column", model.row_embedding), ("rope", ropes[0]))
    epsilons = {*layers[0].pop("norm_epsilon"), model.final_norm.epsilon}
    return (
        {"positions": next((name for name, table in tables if table is not None), "none")}
        | layers[0]
        | {
            "vocab_size": model.token_embedding.num_embeddings,
            "features": model.token_embedding.features,
            "num_layers": model.num_layers,
            "norm": "rms" if isinstance(model.final_norm, nnx.RMSNorm) else "layer",
            "norm_epsilon": epsilons.pop() if len(epsilons) == 1 else tuple(sorted(epsilons)),
            "seq_len": model.seq_len,
            "rope": ropes,
            "embedding_scale": model.embedding_scale,
            "final_soft_cap": model.final_soft_cap,
            "tie_embeddings": model.head is None,
        }
    )


def _blocks(model: SparseTransformer) -> list[SparseTransformerBlock]:
    """A block for each layer; scanned ones have the settings of their layers, and stacked parameters."""
    return [model.blocks[layer % len(model.blocks)] for layer in range(model.num_layers)]


def _layer_settings(number: int, block: SparseTransformerBlock) -> dict[str, Any]:
    attention: Any = block.attention
    if not isinstance(attention, SparseSelfAttention) or block.mlp_in is None:
        kind = type(attention).__name__ if block.mlp_in is not None else "an MLP of make_mlp"
        raise ValueError(f"model: layer {number} has {kind}, which Hugging Face's files have no names for")
    norms = [block.attention_norm, block.attention_out_norm, block.mlp_norm, block.mlp_out_norm]
    norms += [attention.query_ln, attention.key_ln]
    kinds = {nnx.LayerNorm: "layer", nnx.RMSNorm: "rms", JointRMSNorm: "rms_joint"}
    before, after = block.attention_norm is not None, block.attention_out_norm is not None
    maps = {name: getattr(attention, name) for name in IN_BLOCK if name != "mlp"} | {"mlp": block.mlp_in}
    return {
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "scale": attention.attention_fn.fn.scale or attention.head_dim**-0.5,
        "logits_soft_cap": attention.attention_fn.fn.logits_soft_cap,
        "normalize_qk": kinds[type(attention.query_ln)] if attention.normalize_qk else False,
        "use_bias": frozenset(name for name, linear in maps.items() if linear.bias is not None),
        "mlp": block.mlp,
        "mlp_features": block.mlp_in.out_features,
        "norm_placement": "sandwich" if before and after else "pre" if before else "post",
        "norm_epsilon": frozenset(norm.epsilon for norm in norms if norm is not None),
        "parallel": block.parallel,
    }


def _completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a configuration with what `SparseTransformer` takes where they say nothing."""
    full = _UNSAID | dict(settings)
    full.setdefault("num_kv_heads", full["num_heads"])
    full.setdefault("head_dim", full["features"] // full["num_heads"])
    full["scale"] = full["scale"] or full["head_dim"] ** -0.5
    full["use_bias"] = biased(full["use_bias"], IN_BLOCK)
    full["normalize_qk"] = full["norm"] if full["normalize_qk"] is True else full["normalize_qk"]
    ropes = full["rope"] or (None,)
    full["rope"] = tuple(ropes[layer % len(ropes)] for layer in range(full["num_layers"]))
    return full


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first setting that differs, in words; rotary embeddings have no longest input."""
    for name, value in ours.items():
        config_value = theirs[name]
        floats = isinstance(value, float) and isinstance(config_value, float)
        is_close = floats and math.isclose(value, config_value)
        if value != config_value and not is_close and not (name == "seq_len" and ours["positions"] == "rope"):
            shown = [sorted(x) if isinstance(x, frozenset) else x for x in (value, config_value)]
            return f"{name}, {shown[0]!r} in the model and {shown[1]!r} in config.json"
    return ""


# --- patterns --------------------------------------------------------------------------------------------------------


def unwritten(model: SparseTransformer, settings: Mapping[str, Any]) -> list[int]:
    """The layers whose patterns are not those of a configuration."""
    patterns = settings["patterns"]
    in_config = [_width(patterns[layer % len(patterns)]) for layer in range(model.num_layers)]
    return [layer for layer, width in enumerate(_widths(model)) if width != in_config[layer]]


def _widths(model: SparseTransformer) -> list[float | None]:
    """The windows of layers in tokens, the query included; infinite for all of the past, None for other patterns."""
    steps = [block.attention.attention_fn.fn for block in _blocks(model)]
    return [None if fn.selection is not None or len({*fn.masks}) > 1 else _width(fn.masks[0]) for fn in steps]


def _width(mask: Any) -> float | None:
    """The window of one mask, see `_widths`."""
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


# --- words -----------------------------------------------------------------------------------------------------------


def _words(name: str, model: SparseTransformer, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model in the words of a family, as far as it has words."""
    family = FAMILIES[name]
    common = {
        "model_type": name,
        "architectures": [_CLASSES.get(name, f"{name.removesuffix('_text').capitalize()}ForCausalLM")],
        "vocab_size": ours["vocab_size"],
        "tie_word_embeddings": ours["tie_embeddings"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # otherwise their library has some
        "dtype": jnp.dtype(model.token_embedding.embedding.dtype).name,
    }
    if family.conv1d:
        return common | {
            "n_embd": ours["features"],
            "n_layer": ours["num_layers"],
            "n_head": ours["num_heads"],
            "n_positions": ours["seq_len"],
            "n_inner": ours["mlp_features"],
            "activation_function": "gelu_new",
            "layer_norm_epsilon": ours["norm_epsilon"],
        }
    biases = {"attention_bias": "out" in ours["use_bias"], "mlp_bias": "mlp" in ours["use_bias"]}
    words = common | {
        "hidden_size": ours["features"],
        "intermediate_size": ours["mlp_features"],
        "num_hidden_layers": ours["num_layers"],
        "num_attention_heads": ours["num_heads"],
        "num_key_value_heads": ours["num_kv_heads"],
        "head_dim": ours["head_dim"],
        "max_position_embeddings": ours["seq_len"],
        "rms_norm_eps": ours["norm_epsilon"],
        "hidden_activation" if family.from_one else "hidden_act": "gelu_pytorch_tanh" if family.from_one else "silu",
        **{word: biases[word] for word in _BIASES.get(name, ())},
    }
    if family.from_one:
        scalar = ours["scale"] ** -2
        words["query_pre_attn_scalar"] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
        words["attn_logit_softcapping"] = ours["logits_soft_cap"]
        words["final_logit_softcapping"] = ours["final_soft_cap"]
    return words | _words_of_layers(name, family, model, ours)


def _words_of_layers(name: str, family: Family, model: SparseTransformer, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Windows and rotary embeddings, in words that all generations of transformers read."""
    widths, ropes = _widths(model), [rope or Rope() for rope in ours["rope"]]
    slides = [width is not None and width < math.inf for width in widths]
    if len(family.thetas) > 1 and len({*ropes}) > 1:  # where layers turn in two ways, this says their kind
        local = min(ropes, key=lambda rope: (rope.scaling is not None, rope.theta))
        slides = [rope == local for rope in ropes]
    sizes = {width for width, slide in zip(widths, slides, strict=True) if slide}
    (size,) = sizes if len(sizes) == 1 else (None,)
    size = int(size) if size is not None and size < math.inf else ours["seq_len"]
    words: dict[str, Any] = {}
    if family.mixes:
        words |= {"layer_types": [SLIDING if slide else FULL for slide in slides], "sliding_window": size}
    if name.startswith("qwen"):
        words |= {"use_sliding_window": any(slides), "max_window_layers": slides.index(True) if any(slides) else 0}
    if name == "mistral":
        words["sliding_window"] = size if all(slides) else None
    full = ropes[slides.index(False)] if False in slides else ropes[0]
    words |= {"rope_theta": full.theta, "rope_scaling": _scaling_words(full)}
    if len(family.thetas) > 1:
        words["rope_local_base_freq"] = ropes[slides.index(True)].theta if True in slides else family.thetas[-1]
    return words


def _scaling_words(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling is None:
        return None
    (name,) = (name for name, kind in SCALINGS.items() if type(rope.scaling) is kind)
    numbers = {NUMBERS.get(word, word): value for word, value in dataclasses.asdict(rope.scaling).items()}
    return {"rope_type": name} | numbers
