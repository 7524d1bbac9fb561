"""`to_huggingface`: models of ours in the files of Hugging Face's library, what `from_huggingface` does backwards."""

import contextlib
import errno
import json
import math
import os
import pathlib
import secrets
import shutil
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import PathParts

from ...arguments.checks import strict_kwargs
from ..transformer import SparseTransformer
from .families import Config, described
from .huggingface import Place, path_of, places_of
from .model_config import config_of, unwritten

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@strict_kwargs
def to_huggingface(
    model: SparseTransformer, folder: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None
) -> None:
    """Writes a model as Hugging Face's ``save_pretrained`` does: ``config.json`` and ``model.safetensors``.

    `from_huggingface` makes the same model of the folder, and transformers a dense one with its weights. Tensors are
    written one by one, in the dtypes of the parameters; Gemma's norm scales, differences from 1 there, get the
    embedding's. A tokenizer's files are not written: copy them.

    The format has words for causal layers, and in Qwen, Gemma and Mistral for windows. Other patterns (strided, blocks
    that a scorer chooses, ...) are not written, and a warning says so: hand them to `from_huggingface` again,
    ``sl.from_huggingface(folder, patterns)``.

    Args:
      model: a `SparseTransformer` that computes, but for its patterns, what a family of `from_huggingface` does.
        Scanned layers are written one by one.
      folder: a new or an empty one. Its parents are made, too. A write that fails midway leaves none of them.
      config: words of config.json that the model does not know, or that shall stand there instead, as
        ``{"eos_token_id": 2}``; also a whole config.json. With a "model_type" the model is written as of that family,
        otherwise as of the first that computes the same. Ids of special tokens are null unless they are said here.

    Raises:
      TypeError: model is no `SparseTransformer`, or its parameters have no values, as inside of ``nnx.jit`` or of
        ``nnx.eval_shape``; folder is no path, config is no mapping.
      FileExistsError: folder is a file, or has files: nothing is overwritten.
      ValueError: no family computes what the model does, or not the one that config says; `from_huggingface` would
        refuse config; parameters (sinks, a scorer's index) or a dtype that such files have no names for.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> llama = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "use_bias": False, "seq_len": 16}
      >>> model = sl.SparseTransformer(50, 2, 8, 1, patterns="causal", **llama, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     folder = pathlib.Path(parent, "model")
      ...     sl.to_huggingface(model, folder, config={"eos_token_id": 2})
      ...     print(*sorted(path.name for path in folder.iterdir()))
      ...     again = sl.from_huggingface(folder)
      config.json model.safetensors
      >>> bool((again(jnp.arange(16)) == model(jnp.arange(16))).all())
      True

    References:
      Formats: safetensors, and the models of Hugging Face's transformers.
    """
    if not isinstance(model, SparseTransformer):
        raise TypeError(f"model must be a SparseTransformer, got {type(model).__name__}")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping of words of config.json, got {type(config).__name__}: {config!r}")
    path = path_of("folder", folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        rule = "folder must be new or empty, nothing is overwritten: name another one, or remove this one first"
        raise FileExistsError(errno.EEXIST, rule, str(path))
    params: dict[Any, Any] = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    _check_values(params)
    family, words = config_of(model, path / "config.json", config or {})
    _, settings = described(Config(path / "config.json", words))
    places = places_of(model, family, family.prefix, settings["seq_len"])
    unnamed = [at for at in params if at not in places or params[at].dtype.name not in _DTYPES]
    if unnamed:
        raise ValueError(f"model: such files hold no {'.'.join(map(str, unnamed[0]))} of {params[unnamed[0]].dtype}")
    layers = unwritten(model, settings)
    if layers:
        pattern = model.blocks[layers[0] % len(model.blocks)].attention.pattern
        warnings.warn(
            f"config.json does not say the patterns of {len(layers)} layers, first of layer {layers[0]}: {pattern!r}; "
            "hand them to from_huggingface(folder, patterns)",
            stacklevel=2,
        )

    _write_folder(path, words, model, places, params)


def _check_values(params: Mapping[Any, Any]) -> None:
    """Refuses parameters that are tracers or shapes alone.

    Raises:
      TypeError: names the first of them.
    """
    for at, param in params.items():
        value = param.get_value()
        if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"model: parameters must have values to be written, got {type(value).__name__} for "
                f"{'.'.join(map(str, at))}: call to_huggingface outside of jit, with a model that nnx.eval_shape did "
                "not make"
            )


def _write_folder(path: pathlib.Path, words: Mapping[str, Any], *tensors: Any) -> None:
    """Writes both files, or leaves nothing: a new folder gets its name when it is complete.

    An empty folder is filled where it is: it may be a mount, or its parent may be read-only.
    """
    empty = path.exists()
    folder = path if empty else path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    parents = [parent for parent in path.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=empty)
        _write_tensors(folder / "model.safetensors", *tensors)
        # Last, so that a folder with it is complete.
        (folder / "config.json").write_text(json.dumps(words, indent=2) + "\n")
        if not empty:
            folder.rename(path)
    except BaseException:
        if empty:
            for name in ("model.safetensors", "config.json"):
                (path / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            with contextlib.suppress(OSError):  # somebody else's files are in it by now
                parent.rmdir()
        raise


def _write_tensors(
    path: pathlib.Path, model: SparseTransformer, places: Mapping[PathParts, list[Place]], params: Mapping[Any, Any]
) -> None:
    """Writes the file: 8 bytes, the length of the header; the header, JSON; the tensors one after the other."""

    def dtype_of(place: Place, param: Any) -> Any:
        return model.token_embedding.embedding.dtype if place.offset else param.dtype

    tensors: dict[str, list[tuple[Place, Any, int]]] = {}
    for at, of_layers in places.items():
        for layer, place in enumerate(of_layers):
            tensors.setdefault(place.name, []).append((place, params[at], layer))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, ((place, param, _), *_) in tensors.items():
        dtype = dtype_of(place, param)
        begin, end = end, end + math.prod(place.stored) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": place.stored, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at multiples of their items
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slices in tensors.values():
            file.write(_tensor(slices, dtype_of(*slices[0][:2])).tobytes())


def _tensor(slices: list[tuple[Place, Any, int]], dtype: Any) -> np.ndarray:
    """A tensor of the file, out of one parameter or of those side by side in it: undoes `Place.read`."""
    tensor = np.empty(slices[0][0].stored, dtype)
    for place, param, layer in slices:
        x = np.asarray(jnp.reshape(param[...], (-1, *place.shape))[layer])  # of scanned layers, one
        into = tensor if place.part is None else np.split(tensor, 3, axis=-1)[place.part]
        into = into.T if place.turned else into
        into[...] = (x.astype(np.float32) - place.offset if place.offset else x).reshape(into.shape)
    return tensor
