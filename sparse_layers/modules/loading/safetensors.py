"""Tensors of a checkpoint in ``.safetensors`` files, one or several with an index; each is read on demand."""

import errno
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": jnp.dtype(jnp.bfloat16)}

# Endings of weights in the formats of PyTorch, llama.cpp, Flax and TensorFlow, and of safetensors under other names.
_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".safetensors"}


class TensorInfo(NamedTuple):
    """The location of a tensor in a file; dtype is None unless it is float32, float16 or bfloat16."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: Any
    offset: int

    def read(self, row: int | None = None) -> np.ndarray:
        """Maps the values, or those at ``row`` of the first axis; no page of a file stays mapped without the array."""
        shape = self.shape if row is None else self.shape[1:]
        count = math.prod(shape) * self.dtype.itemsize
        offset = self.offset + (row or 0) * count
        return np.memmap(self.file, np.uint8, "r", offset, count).view(self.dtype).reshape(shape)


class Mxfp4Tensor(NamedTuple):
    """A tensor [E, in, out] in MXFP4, whose values are read in bfloat16: blocks of 32 numbers that share a power of 2.

    Attributes:
      blocks: uint8 [E, out, in / 32, 16], two numbers in a byte, the first in its lower half.
      scales: uint8 [E, out, in / 32], exponents plus 127.
    """

    blocks: TensorInfo
    scales: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        count, out, groups, size = self.blocks.shape
        return count, groups * size * 2, out

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return jnp.dtype(jnp.bfloat16)

    def read(self, row: int | None = None) -> np.ndarray:
        """Returns the values in bfloat16, or those at ``row`` of the first axis."""
        if row is None:
            return np.stack([self.read(i) for i in range(self.shape[0])])
        blocks, scales = self.blocks.read(row), self.scales.read(row)
        numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).view(jnp.float4_e2m1fn).astype(np.float32)
        values = numbers.reshape(*scales.shape, 32) * scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
        return values.reshape(len(values), -1).T.astype(self.dtype)


def join_mxfp4(files: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Replaces each pair of tensors NAME_blocks and NAME_scales by a tensor NAME that dequantizes them."""
    tensors: dict[str, Any] = dict(files)
    for name in files:
        blocks, scales = files[name], files.get(f"{name.removesuffix('_blocks')}_scales")
        if name.endswith("_blocks") and scales is not None and blocks.shape == (*scales.shape, 16):
            pair = (x._replace(dtype=np.dtype(np.uint8)) for x in (blocks, scales))
            tensors[name.removesuffix("_blocks")] = Mxfp4Tensor(*pair)
            del tensors[name], tensors[f"{name.removesuffix('_blocks')}_scales"]
    return tensors


def find_tensors(folder: pathlib.Path) -> dict[str, TensorInfo]:
    """Lists the tensors in ``model.safetensors``, or in the files that ``model.safetensors.index.json`` names.

    Raises:
      FileNotFoundError: neither exists, or a file of the index is missing.
      ValueError: a file has another format or is truncated; an index names files elsewhere, or tensors they lack.
    """
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if file.is_file() or not index.is_file():
        return read_header(file)
    weight_map: Any = read_json(index).get("weight_map")
    names: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(isinstance(n, str) and pathlib.Path(n).name == n and n not in ("", "..") for n in names):
        raise ValueError(f"{index}: weight_map must name files beside it")
    by_file = {n: read_header(folder / n) for n in sorted({*names})}
    missing = [name for name, n in weight_map.items() if name not in by_file[n]]
    if missing:
        raise ValueError(f"{index}: {missing[0]} is not in {weight_map[missing[0]]}")
    return {name: by_file[n][name] for name, n in weight_map.items()}


def refuse_other_formats(folder: pathlib.Path) -> None:
    """Raises FileNotFoundError for a folder without the files that `find_tensors` reads."""
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_dir() and not files & {"model.safetensors", "model.safetensors.index.json"}:
        weights = sorted(name for name in files if pathlib.Path(name).suffix in _WEIGHTS)
        rule = "weights must be in model.safetensors beside config.json, or where model.safetensors.index.json says"
        others = f"{', '.join(weights)}; {_advice(weights[0])}" if weights else "none"
        raise FileNotFoundError(errno.ENOENT, f"{rule}; the folder has {others}", str(folder))


def _advice(file: str) -> str:
    """Returns the way from a file of weights to ``model.safetensors``."""
    name = pathlib.Path(file)
    if name.stem == "adapter_model":
        return "load the base model and this adapter with peft, and save the result of merge_and_unload()"
    if name.suffix == ".safetensors":
        return "they must be named as Hugging Face's library names them"
    argument = {".gguf": f", gguf_file={file!r}", ".msgpack": ", from_flax=True", ".h5": ", from_tf=True"}
    read = f"from_pretrained(folder{argument.get(name.suffix, '')})"
    return f"transformers' {read} reads this one, and its save_pretrained writes them"


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file holds no object.
    """
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold an object, got {type(content).__name__}")
    return content


def read_header(file: pathlib.Path) -> dict[str, TensorInfo]:
    """Lists the tensors of one file: 8 bytes for the header's length, the header in JSON, then the tensors in order."""
    tensors = {}
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size
        try:
            header = json.loads(opened.read(start - 8) if start <= size else b"")
            header.pop("__metadata__", None)
            for name in header:
                (begin, end), shape = header[name]["data_offsets"], tuple(map(int, header[name]["shape"]))
                tensors[name] = TensorInfo(file, shape, _DTYPES.get(header[name]["dtype"]), start + begin)
                count = end - begin if tensors[name].dtype is None else math.prod(shape) * tensors[name].dtype.itemsize
                if not 0 <= begin <= end <= size - start or count != end - begin:
                    raise ValueError(f"{name} does not lie in it")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            opened.seek(0)
            hint = " (a pointer of Git LFS: run git lfs pull)" if opened.read(20) == b"version https://git-" else ""
            raise ValueError(f"{file}: cannot be read as a safetensors file{hint}: {error}") from error
    return tensors
