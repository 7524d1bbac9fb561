"""`to_huggingface`: writes a model as a checkpoint of Hugging Face's library; undoes `from_huggingface`."""

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
import numpy as np
from flax import nnx
from flax.typing import PathParts

from ...arguments.checks import strict_kwargs
from ..experts import LoadBalancingLoss
from ..index import IndexLoss
from ..transformer import SparseTransformer
from .config import Config
from .families import read_settings
from .huggingface import TensorMapping, map_tensors, path_of, refuse_unnamed
from .model_config import config_of, layers_with_other_patterns

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Users freeze parameters by variables of a type of their own, so what is no state is a parameter.
_STATE = nnx.Any(nnx.RngState, nnx.Intermediate, nnx.Cache, IndexLoss, LoadBalancingLoss)
_PARAMS = nnx.All(nnx.Variable, nnx.Not(_STATE))


@strict_kwargs
def to_huggingface(
    model: SparseTransformer, folder: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None
) -> None:
    """Writes a model as a checkpoint of Hugging Face's library, ``config.json`` and ``model.safetensors``.

    `from_huggingface` loads the same model from the folder, and transformers a dense one with its weights. Tensors are
    written one by one, in the dtypes of the parameters; Gemma's norm scales, stored as differences from 1, in that of
    the embedding. Copy the files of the tokenizer yourself.

    The format has settings for causal layers and, in most families, for windows. Other patterns (strides,
    scorers, ...) are not written, with a warning: pass them to `from_huggingface`,
    ``sl.from_huggingface(folder, patterns)``.

    Args:
      model: a `SparseTransformer` with the architecture, except for patterns, of a family of `from_huggingface`.
        Scanned layers are written one by one.
      folder: a new or an empty folder. Its parents are made too. A write that fails leaves none of them.
      config: settings that config.json gets in addition, or instead of the model's own, such as
        ``{"eos_token_id": 2}``; a whole config.json too. "model_type" selects the family, by default the first with
        the model's architecture. Ids of special tokens are null unless given here.

    Raises:
      TypeError: a model that is not a `SparseTransformer`, or whose parameters have no values, as inside of ``nnx.jit``
        or ``nnx.eval_shape``; a folder that is not a path, a config that is not a mapping.
      FileExistsError: folder is a file, or has files: nothing is overwritten.
      ValueError: no family, or not that of config, has the model's architecture; `from_huggingface` would refuse
        config; parameters without a name in such files (sinks, gates, a scorer's index), or of another dtype.

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
    params: dict[Any, Any] = dict(nnx.to_flat_state(nnx.state(model, _PARAMS)))
    _check_values(params)
    family, entries = config_of(model, path / "config.json", config or {})
    settings = read_settings(Config(path / "config.json", entries), model.num_layers, model.seq_len)
    mappings = map_tensors(params, model, family, family.prefix, settings["seq_len"])
    refuse_unnamed(params, mappings, allowed=())
    layers = layers_with_other_patterns(model, settings)
    if layers:
        pattern = model.blocks[layers[0] % len(model.blocks)].attention.pattern
        warnings.warn(
            f"config.json does not say the patterns of {len(layers)} layers, first of layer {layers[0]}: {pattern!r}; "
            "hand them to from_huggingface(folder, patterns)",
            stacklevel=2,
        )

    _write_folder(path, entries, model, mappings, params)


def _check_values(params: Mapping[Any, Any]) -> None:
    """Refuses parameters that are tracers, shapes without values, or of a dtype that files do not have."""
    for name, value in ((".".join(map(str, path)), param.get_value()) for path, param in params.items()):
        if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"model: parameters must have values to be written, got {type(value).__name__} for {name}: call "
                "to_huggingface outside of jit, with a model that nnx.eval_shape did not make"
            )
        if value.dtype.name not in _DTYPES:
            raise ValueError(f"model: parameters must be {', '.join(_DTYPES)}, got {value.dtype} for {name}")


def _write_folder(path: pathlib.Path, config: Mapping[str, Any], model: Any, mappings: Any, params: Any) -> None:
    """Writes both files, or leaves nothing: a new folder gets its name when it is complete.

    An existing empty folder is filled in place: it may be a mount, or its parent may be read-only.
    """
    empty = path.exists()
    folder = path if empty else path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    parents = [parent for parent in path.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=empty)
        _write_tensors(folder / "model.safetensors", model, mappings, params)
        # config.json comes last, so that a folder that has it is complete.
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if not empty:
            folder.rename(path)
    except BaseException:
        if empty:
            for name in ("model.safetensors", "config.json"):
                (path / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            with contextlib.suppress(OSError):  # another process has written files into it
                parent.rmdir()
        raise


def _write_tensors(
    path: pathlib.Path,
    model: SparseTransformer,
    mappings: Mapping[PathParts, list[TensorMapping]],
    params: Mapping[Any, Any],
) -> None:
    """Writes the file: 8 bytes for the header's length, the header in JSON, then the tensors in order."""

    def dtype_of(mapping: TensorMapping, param: Any) -> Any:
        return model.token_embedding.embedding.dtype if mapping.offset else param.dtype

    tensors: dict[str, list[tuple[TensorMapping, Any, int]]] = {}
    for param_path, param_mappings in mappings.items():
        for index, mapping in enumerate(param_mappings):
            tensors.setdefault(mapping.name, []).append((mapping, params[param_path], index))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, ((mapping, param, _), *_) in tensors.items():
        dtype = dtype_of(mapping, param)
        begin, end = end, end + math.prod(mapping.tensor_shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": mapping.tensor_shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors must begin at multiples of their item size
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slices in tensors.values():
            file.write(_tensor(slices, dtype_of(*slices[0][:2])).tobytes())


def _tensor(slices: list[tuple[TensorMapping, Any, int]], dtype: Any) -> np.ndarray:
    """Returns a tensor of the file, from one parameter or several side by side; undoes `TensorMapping.read`."""
    tensor = np.empty(slices[0][0].tensor_shape, dtype)
    for mapping, param, index in slices:
        stack = param.shape[: len(param.shape) - len(mapping.shape)]  # layers, experts, or both
        x = np.asarray(param[np.unravel_index(index, stack)])
        x = x.astype(np.float32) - mapping.offset if mapping.offset else x
        target = tensor if mapping.row is None else tensor[mapping.row]
        target = target.T if mapping.transposed else target
        target[..., mapping.outputs] = x.reshape(*target.shape[:-1], -1)
    return tensor
