"""Rotary position embeddings by a ``config.json``: their base, the part of a head that rotates, and their scaling."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ...arguments.checks import Positive, as_float, checked, suggest
from ..rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from .config import FULL, SLIDING, Config
from .dense import abbreviate

# The scalings by Hugging Face's names, and its names of their fields that differ.
SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling, "longrope": LongRopeScaling}
SCALING_KEYS = {"original_length": "original_max_position_embeddings", "fast": "beta_fast", "slow": "beta_slow"}
SCALING_KEYS |= {"low": "low_freq_factor", "high": "high_freq_factor", "rounded": "truncate"}
SCALING_KEYS |= {"short_factors": "short_factor", "long_factors": "long_factor"}
_ORIGINAL = SCALING_KEYS["original_length"]
# The parameters that a scaling must have.
_NEEDED = {name: {"factor"} for name in SCALINGS} | {"longrope": {"short_factor", "long_factor"}}
_NEEDED["llama3"] = {"factor", "low_freq_factor", "high_freq_factor"}
# Parameters without a meaning for most scalings, as those of another scaling.
_IGNORED = {"finetuned", "mscale", "mscale_all_dim"}


def make_rope(
    config: Config, layer_type: str, thetas: tuple[float, ...], head_dim: int, *, partial: bool, seq_len: int | None
) -> Rope:
    """Makes the rotary position embeddings of layers of one type.

    Args:
      config: the configuration.
      layer_type: FULL or SLIDING.
      thetas: default bases, see `Family`.
      head_dim: features of a head.
      partial: True if the family may rotate a part of a head.
      seq_len: the longest input, or None for the configuration's.

    Raises:
      ValueError: an unknown or wrong setting, with the file's name.
    """
    parameters, theta = _rotary_parameters(config, layer_type, thetas)
    share = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    is_valid = share == 1 or (partial and 0 < (as_float(share) or 0) < 1)
    config.require(is_valid, "partial_rotary_factor", "be a number in (0, 1]" if partial else "be 1", share)
    rotary_dim = int(head_dim * share)
    default_type = parameters.pop("type", "default")
    name = str(parameters.pop("rope_type", default_type))
    name = {"su": "longrope"}.get(name, name)  # Phi 3's earlier word
    try:
        scaling = None if name == "default" else _make_scaling(config, name, parameters, seq_len)
        rope = Rope(theta, rotary_dim=None if share == 1 else rotary_dim, scaling=scaling)
        rope.frequencies(rotary_dim // 2)  # refuses another number of factors
        return rope
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config.file}: rotary embeddings: {error}") from error


def _rotary_parameters(config: Config, layer_type: str, thetas: tuple[float, ...]) -> tuple[dict[str, Any], Any]:
    """Returns the parameters of layers of one type, without nulls, and their base.

    Raises:
      ValueError: parameters that are no objects, or contradict each other.
    """
    parameters, older_scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    local = layer_type == SLIDING and len(thetas) > 1
    theta = config.get("rope_local_base_freq" if local and len({*thetas}) > 1 else "rope_theta", thetas[-local])
    by_layer_type = isinstance(parameters, dict) and not {FULL, SLIDING}.isdisjoint(parameters)
    is_valid = isinstance(parameters.get(layer_type), dict) if by_layer_type else not parameters or len(thetas) == 1
    config.require(is_valid, "rope_parameters", f"be of {FULL!r} and of {SLIDING!r}", parameters)
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
    return parameters, parameters.pop("rope_theta", theta)


def _without_theta(rope: Any) -> Any:
    return {name: x for name, x in rope.items() if name != "rope_theta"} if isinstance(rope, dict) else rope


def _length_ratio(config: Config, parameters: Mapping[str, Any]) -> float:
    """Returns the ratio of a model's longest sequence to that of its original training, which a null factor means."""
    return config.size("max_position_embeddings") / config.size(_ORIGINAL, parameters.get(_ORIGINAL))


def _make_scaling(config: Config, name: str, parameters: dict[str, Any], seq_len: int | None) -> Any:
    """Makes the scaling of rotary position embeddings with this name, None if it changes nothing up to seq_len tokens.

    Raises:
      ValueError, TypeError: an unknown name, or an unknown, missing or wrong parameter.
    """
    longest = config.size("max_position_embeddings")
    if name == "dynamic":
        if seq_len is not None and seq_len > longest:
            raise ValueError(f"'dynamic' changes beyond max_position_embeddings={longest}, got seq_len={seq_len}")
        return None
    if name not in SCALINGS:
        raise ValueError(f"rope_type: {suggest(name, ['default', 'dynamic', *SCALINGS])}")
    scaling: Any = SCALINGS[name]
    known = _parameter_names(scaling)
    missing = sorted(_NEEDED[name] - {*parameters})
    if missing:
        raise ValueError(f"{name!r} needs {abbreviate(missing)}")
    if _ORIGINAL in known:
        parameters |= {_ORIGINAL: config.get(_ORIGINAL, parameters.get(_ORIGINAL, longest))}
    if name == "yarn" and parameters.get("mscale") and parameters.get("mscale_all_dim"):
        parameters.setdefault("attention_factor", _yarn_attention_factor(parameters))
    if name == "longrope":
        parameters = _longrope_parameters(parameters, longest, seq_len)
    ignored = _IGNORED.union(*map(_parameter_names, SCALINGS.values())) - {*known}
    parameters = {key: value for key, value in parameters.items() if key not in ignored}
    unknown = [x for x in parameters if x not in known]
    if unknown:
        raise ValueError(f"{name!r} has no {abbreviate(unknown)}")
    return scaling(**{known[key]: value for key, value in parameters.items()})


def _parameter_names(scaling: type) -> dict[str, str]:
    """Returns the names of a scaling's fields by Hugging Face's names."""
    return {SCALING_KEYS.get(field.name, field.name): field.name for field in dataclasses.fields(scaling)}


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """Returns YaRN's attention factor by DeepSeek's two scales, 1 where both are equal."""
    names = ("mscale", "mscale_all_dim")
    wrong = [name for name in names if (as_float(parameters[name]) or 0) <= 0]
    if wrong:
        raise ValueError(f"{wrong[0]} must be a number > 0, got {parameters[wrong[0]]!r}")
    log = 0.1 * math.log(max(1.0, as_float(parameters["factor"]) or 1.0))
    mscale, mscale_all_dim = ((parameters[name] * log + 1) for name in names)
    return mscale / mscale_all_dim


def _longrope_parameters(parameters: Mapping[str, Any], longest: int, seq_len: int | None) -> dict[str, Any]:
    """Returns the parameters of LongRoPE for inputs of seq_len tokens, which decide on its factors.

    Raises:
      ValueError: seq_len is None, and inputs up to the longest one would have different factors.
    """
    original = checked(_ORIGINAL, parameters[_ORIGINAL], Positive)
    if seq_len is None and longest > original:
        raise ValueError(
            f"'longrope' has factors for inputs up to {original} tokens and others for longer ones: pass "
            f"seq_len={original} or seq_len={longest}"
        )
    ratio = as_float(parameters.get("factor")) or longest / original
    factor = math.sqrt(1 + math.log(max(1.0, ratio)) / math.log(max(2, original)))
    return {"attention_factor": factor} | dict(parameters) | {"length": seq_len or longest}
