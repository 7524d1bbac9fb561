"""Masks, scorers and sizes as JSON and back: the static data of pytrees in programs of `jax.export`.

The JSON holds names of classes and their fields, never pickles: reading it calls constructors of classes that are
defined already, and imports nothing.
"""

import base64
import dataclasses
import functools
import json
import math
import zlib
from typing import Any, TypeVar

import jax.export
import numpy as np

_PACKAGE = f"{__name__.partition('.')[0]}."
_CLASSES: dict[str, type] = {}

T = TypeVar("T", bound=type)


def register_value(cls: type) -> None:
    """Registers a frozen dataclass, by name, so that its instances can be written and read."""
    _CLASSES[_class_name(cls)] = cls


def register_node(cls: T) -> T:
    """Decorates a pytree class of this package so that `jax.export` writes and reads it with its static data."""
    name = f"{_PACKAGE}{cls.__name__}"
    write = functools.partial(write_static, cls.__name__)
    jax.export.register_pytree_node_serialization(
        cls, serialized_name=name, serialize_auxdata=write, deserialize_auxdata=read_static
    )
    return cls


def register_mask(cls: type) -> None:
    """Registers a mask's class for JSON, and one of this package as an argument of exported programs."""
    register_value(cls)
    if cls.__module__.startswith(_PACKAGE):  # JAX never forgets a name, and users may define a class again
        register_node(cls)


def write_static(owner: str, value: Any) -> bytes:
    """Returns the static data of a pytree of class ``owner`` as JSON.

    Example:
      >>> import sparse_layers as sl
      >>> write_static("KVCache", (sl.Window(3), 40))
      b'[{"class": "Window", "fields": {"left": 3, "right": 0}}, 40]'
      >>> read_static(write_static("KVCache", (sl.Window(3), 40)))
      (Window(left=3, right=0), 40)
    """
    data = json.dumps(_plain(owner, value)).encode()
    if read_static(data) != value:
        raise _unwritable(owner, value, "it is not equal to what its fields make")
    return data


def read_static(data: bytes) -> Any:
    """Reads the result of `write_static`."""
    return _value(json.loads(data))


def _class_name(cls: type) -> str:
    name = cls.__qualname__
    return name if cls.__module__.startswith(_PACKAGE) else f"{cls.__module__}.{name}"


def _plain(owner: str, value: Any) -> Any:
    """Converts a value to JSON: a tuple to a list, an array or an instance to an object."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if isinstance(value, tuple):
        return [_plain(owner, entry) for entry in value]
    if isinstance(value, np.ndarray) and value.dtype == bool:
        bits = zlib.compress(np.packbits(value).tobytes())
        return {"shape": list(value.shape), "bits": base64.b64encode(bits).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        numbers = zlib.compress(value.tobytes())
        return {"shape": list(value.shape), "dtype": value.dtype.str, "numbers": base64.b64encode(numbers).decode()}
    name = _class_name(type(value))
    if _CLASSES.get(name) is not type(value) or not dataclasses.is_dataclass(value):
        raise _unwritable(owner, value, f"its class, {name}, is no dataclass of masks or scorers")
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {"class": name, "fields": {n: _plain(f"{owner}: {name}.{n}", entry) for n, entry in fields.items()}}


def _value(plain: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(plain, list):
        return tuple(map(_value, plain))
    if not isinstance(plain, dict):
        return plain
    if "bits" in plain:
        bits = np.frombuffer(zlib.decompress(base64.b64decode(plain["bits"])), np.uint8)
        return np.unpackbits(bits, count=math.prod(plain["shape"])).astype(bool).reshape(plain["shape"])
    if "numbers" in plain:
        numbers = zlib.decompress(base64.b64decode(plain["numbers"]))
        return np.frombuffer(numbers, np.dtype(plain["dtype"])).reshape(plain["shape"])
    if plain["class"] not in _CLASSES:
        raise ValueError(
            f"the exported program names {plain['class']}, which is not defined here: import the module that defines "
            "it before jax.export.deserialize"
        )
    return _CLASSES[plain["class"]](**{field: _value(entry) for field, entry in plain["fields"].items()})


def _unwritable(owner: str, value: Any, reason: str) -> TypeError:
    return TypeError(
        f"{owner}: an exported program cannot hold {value!r}, for {reason}; export a function of jax.tree.leaves(x), "
        "which makes x of them inside by jax.tree.unflatten(jax.tree.structure(x), leaves), or take a mask that is "
        "made of those of sparse_layers, as sl.Array(mask.dense(T))"
    )
