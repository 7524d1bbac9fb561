"""Tensors of ``.safetensors`` files, one or several with an index: what is in them, each read when it is asked for."""

import json
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": jnp.dtype(jnp.bfloat16)}


class Stored(NamedTuple):
    """A tensor in a file; ``dtype`` is None for one that is not float32, float16 or bfloat16."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: Any
    offset: int

    def read(self) -> np.ndarray:
        """Its values: nothing else of the file is read, and no page of it stays mapped."""
        count = math.prod(self.shape) * self.dtype.itemsize
        return np.fromfile(self.file, np.uint8, count, offset=self.offset).view(self.dtype).reshape(self.shape)


def stored(folder: pathlib.Path) -> dict[str, Stored]:
    """The tensors in ``model.safetensors``, or in the files that ``model.safetensors.index.json`` names.

    Raises:
      FileNotFoundError: there is neither, or a file of the index is missing.
      ValueError: a file is none of this format, or cut off; an index names files elsewhere, or tensors they lack.
    """
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if file.is_file() or not index.is_file():
        return tensors_of(file)
    where: Any = read_json(index).get("weight_map")
    names: list[Any] = list(where.values()) if isinstance(where, dict) else [None]
    if not all(isinstance(n, str) and pathlib.Path(n).name == n and n not in ("", "..") for n in names):
        raise ValueError(f"{index}: weight_map must name files beside it")
    found = {n: tensors_of(folder / n) for n in sorted({*names})}
    missing = [name for name, n in where.items() if name not in found[n]]
    if missing:
        raise ValueError(f"{index}: {missing[0]} is not in {where[missing[0]]}")
    everything = {name: x for tensors in found.values() for name, x in tensors.items()}
    return everything | {name: found[n][name] for name, n in where.items()}


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there is no object in it.
    """
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must hold an object, got {type(found).__name__}")
    return found


def tensors_of(file: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one file: 8 bytes, the length of the header; the header, JSON; the tensors one after the other."""
    found = {}
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size
        try:
            header = json.loads(opened.read(start - 8) if start <= size else b"")
            header.pop("__metadata__", None)
            for name in header:
                (begin, end), shape = header[name]["data_offsets"], tuple(map(int, header[name]["shape"]))
                found[name] = Stored(file, shape, _DTYPES.get(header[name]["dtype"]), start + begin)
                count = end - begin if found[name].dtype is None else math.prod(shape) * found[name].dtype.itemsize
                if not 0 <= begin <= end <= size - start or count != end - begin:
                    raise ValueError(f"{name} does not lie in it")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            opened.seek(0)
            hint = " (a pointer of Git LFS: run git lfs pull)" if opened.read(20) == b"version https://git-" else ""
            raise ValueError(f"{file}: cannot be read as a safetensors file{hint}: {error}") from error
    return found
