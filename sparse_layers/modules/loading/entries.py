"""Entries of a checkpoint's config.json and the arguments that they mean: one table reads and writes them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .config import Config

# Activations by Hugging Face's names: of GPT-2's MLP, and of gated ones.
MLPS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_exact", "relu": "relu"}
GATED_MLPS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "swish": "swiglu", "gelu_new": "geglu"}


class Entry(NamedTuple):
    """An entry of config.json and the argument of `SparseTransformer` or `MixtureOfExperts` that it means.

    Attributes:
      name: the entry.
      setting: the argument.
      read: a function from a configuration to the argument; None leaves it at its default.
      write: a function from the argument to the entry.
    """

    name: str
    setting: str
    read: Callable[[Config], Any]
    write: Callable[[Any], Any] = lambda value: value


def size(name: str, setting: str, default: Callable[[Config], int | None] = lambda config: None) -> Entry:
    """Makes the entry of an integer >= 1."""
    return Entry(name, setting, lambda config: config.size(name, default(config)))


def size_up_to(name: str, setting: str, limit: str, *, divides: bool = True, is_optional: bool = False) -> Entry:
    """Makes the entry of a size that must not exceed the entry ``limit``, by default its divisor.

    An optional one has the limit as its default.
    """

    def read(config: Config) -> int:
        most = config.size(limit)
        value = config.size(name, most if is_optional else None)
        holds, rule = (most % value == 0, "divide") if divides else (value <= most, "not exceed")
        config.require(holds, name, f"{rule} {config.name_in_file(limit)}={most}", value)
        return value

    return Entry(name, setting, read)


def number(name: str, setting: str, power: float = 1) -> Entry:
    """Makes the entry of a number > 0, whose ``power`` is the argument."""
    return Entry(name, setting, lambda config: config.number(name) ** power, lambda value: _power(value, 1 / power))


def factor(name: str, setting: str, power: float = 1) -> Entry:
    """Makes the entry of a number > 0, whose ``power`` is a factor. The argument None means 1."""
    entry = number(name, setting, power)

    def read(config: Config) -> float | None:
        value = entry.read(config)
        return None if value == 1 else value

    return entry._replace(read=read, write=lambda value: entry.write(value or 1.0))


def optional(entry: Entry) -> Entry:
    """Makes an entry that may be null or missing, which leaves the argument at its default."""
    return entry._replace(read=lambda config: None if config.get(entry.name) is None else entry.read(config))


def choice(name: str, setting: str, values: Mapping[Any, Any]) -> Entry:
    """Makes the entry of a key of ``values``, whose value is the argument; writes the first key for other values."""

    def write(value: Any) -> Any:
        return next((key for key, x in values.items() if x == value), next(iter(values)))

    return Entry(name, setting, lambda config: values[config.one_of(name, values)], write)


def _power(value: Any, power: float) -> Any:
    """Returns a power of a value, the integer that it is close to if there is one; nothing changes with power 1."""
    if power == 1:
        return value
    result = value**power
    return round(result) if math.isclose(result, round(result)) else result


def _read_head_dim(config: Config) -> int:
    head_dim = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
    config.require(head_dim % 2 == 0, "head_dim", "be even, for pairs of features turn", head_dim)
    return head_dim


def llama_entries(*entries: Entry, activation: str = "hidden_act", epsilon: str = "rms_norm_eps") -> tuple[Entry, ...]:
    """Returns the entries that all families with rotary position embeddings share, and ``entries``.

    Args:
      *entries: those of one family.
      activation, epsilon: the names of the MLP's activation and of the norms' epsilon.
    """
    return (
        size("vocab_size", "vocab_size"),
        size("hidden_size", "features"),
        size("num_hidden_layers", "num_layers"),
        size("num_attention_heads", "num_heads"),
        size_up_to("num_key_value_heads", "num_kv_heads", "num_attention_heads", is_optional=True),
        Entry("head_dim", "head_dim", _read_head_dim),
        size("intermediate_size", "mlp_features"),
        choice(activation, "mlp", GATED_MLPS),
        number(epsilon, "norm_epsilon"),
        size("max_position_embeddings", "seq_len"),
        *entries,
    )


def gpt_entries(features: str, num_heads: str, num_layers: str, seq_len: str, *entries: Entry) -> tuple[Entry, ...]:
    """Returns the entries of a family without rotary position embeddings: ``entries``, and sizes under their names."""
    return (
        size("vocab_size", "vocab_size"),
        size(features, "features"),
        size(num_layers, "num_layers"),
        size_up_to(num_heads, "num_heads", features),
        size(seq_len, "seq_len"),
        number("layer_norm_epsilon", "norm_epsilon"),
        *entries,
    )
