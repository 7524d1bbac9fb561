"""`Config`: the ``config.json`` of a checkpoint, whose settings are checked where they are read."""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from ...arguments.checks import Positive, as_float, checked
from .safetensors import read_json

FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers


class Config:
    """A config.json, or its part for text. A null counts as missing.

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
        self.values: dict[str, Any] = outer

    def complete(self, defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        """Takes settings from their aliases, and those that are missing, and not null, from defaults."""
        renamed = {name: self.values[alias] for alias, name in aliases.items() if self.get(alias) is not None}
        self.values = dict(defaults) | self.values | renamed

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting, or the default; the name ``"outer.inner"`` is that of an entry in the object ``outer``."""
        value: Any = self.values
        for key in name.split("."):
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{self.file}: {name.rpartition('.')[0]} must be an object or null, got {value!r}")
            value = None if value is None else value.get(key)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a setting that is an integer >= 1."""
        return checked(f"{self.file}: {name}", self.get(name, default), Positive)

    def number(self, name: str) -> float:
        """Returns a setting that is a number > 0."""
        number = as_float(self.get(name))
        return self.one_of(name, () if number is None or number <= 0 else (number,), "a number > 0")

    def one_of(self, name: str, allowed: Collection[Any], rule: str = "", default: Any = None) -> Any:
        """Returns a setting that has one of the allowed values."""
        value = self.get(name, default)
        if not any(value is x if isinstance(value, bool) or isinstance(x, bool) else value == x for x in allowed):
            rule = rule or " or ".join(map(repr, allowed))
            raise ValueError(f"{self.file}: {name} must be {rule}, got {value!r}")
        return value
