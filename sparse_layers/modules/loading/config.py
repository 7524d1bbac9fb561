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
        self._names: dict[str, str] = {}
        if isinstance(text, dict):
            shared = {name: outer[name] for name in ("tie_word_embeddings", "quantization_config") if name in outer}
            default = {"model_type": "gemma3_text"} if outer.get("model_type") == "gemma3" else {}
            outer = default | text | shared
            self._names = {name: f"text_config.{name}" for name in ("model_type", *text) if name not in shared}
        self.values: dict[str, Any] = outer

    def complete(self, defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        """Takes settings from their aliases, and those that are missing, and not null, from defaults."""
        renamed = {name: alias for alias, name in aliases.items() if self.get(alias) is not None}
        self._names |= {name: self._names.get(alias, alias) for name, alias in renamed.items()}
        self.values = dict(defaults) | self.values | {name: self.values[alias] for name, alias in renamed.items()}

    def name_in_file(self, name: str) -> str:
        """Returns the name that the file has for a setting."""
        return self._names.get(name, name)

    def require(self, holds: bool, name: str, rule: str, value: Any = None) -> None:
        """Raises ValueError about a setting, or about what it means, if its rule ("be ...") does not hold."""
        if not holds:
            value = self.get(name) if value is None else value
            raise ValueError(f"{self.file}: {self.name_in_file(name)} must {rule}, got {value!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting, or the default; the name ``"outer.inner"`` is that of an entry in the object ``outer``."""
        value: Any = self.values
        for key in name.split("."):
            is_object = value is None or isinstance(value, dict)
            self.require(is_object, name.rpartition(".")[0], "be an object or null", value)
            value = None if value is None else value.get(key)
        return default if value is None else value

    def size(self, name: str, default: int | None = None, kind: Any = Positive) -> int:
        """Returns a setting that is an integer >= 1, or of another ``kind``."""
        return checked(f"{self.file}: {self.name_in_file(name)}", self.get(name, default), kind)

    def number(self, name: str) -> float:
        """Returns a setting that is a number > 0."""
        number = as_float(self.get(name))
        self.require(number is not None and number > 0, name, "be a number > 0")
        return self.get(name)

    def one_of(self, name: str, allowed: Collection[Any], rule: str = "", default: Any = None) -> Any:
        """Returns a setting that has one of the allowed values."""
        value = self.get(name, default)
        holds = any(value is x if isinstance(value, bool) or isinstance(x, bool) else value == x for x in allowed)
        self.require(holds, name, f"be {rule or ' or '.join(map(repr, allowed))}", value)
        return value
