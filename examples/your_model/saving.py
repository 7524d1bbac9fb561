"""Models written as Hugging Face's library writes them: what `sparse_layers.from_huggingface` does, the other way."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import sparse_layers as sl
from sparse_layers.modules.loading.families import Config, described
from sparse_layers.modules.loading.huggingface import Place, places_of

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def save(model: sl.SparseTransformer, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
    """Writes ``config.json`` and ``model.safetensors``, of which `sparse_layers.from_huggingface` makes the same model.

    The tensors are made and written one by one. The files of a tokenizer are not written: copy them.

    Args:
      model: of a family that `sparse_layers.from_huggingface` knows; the tensors get the dtypes of its parameters, and
        Gemma's differences from 1 that of its embedding.
      folder: a new one, or one whose two files are written anew.
      config: what config.json shall hold: that of the folder which the model was loaded from, or one with changes. It
        has no words for patterns but windows, and these in some families only: ``layer_types``, ``sliding_window``.

    Raises:
      ValueError: config is of a model with other tensors, or `sparse_layers.from_huggingface` refuses it; the model has
        parameters (sinks, a scorer's index) or a dtype that such files have no names for.

    References:
      Formats: safetensors, and the models of Hugging Face's transformers.
    """
    file = pathlib.Path(folder) / "config.json"
    family, settings = described(Config(file, dict(config)))
    params: dict[Any, Any] = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))

    def places(model: sl.SparseTransformer) -> list[tuple[Place, Any, int]]:
        found = places_of(model, family, family.prefix, settings["seq_len"])
        return [(place, at, layer) for at, several in found.items() for layer, place in enumerate(several)]

    tied = bool(config.get("tie_word_embeddings", model.head is None))
    like = nnx.eval_shape(lambda: sl.SparseTransformer(**settings, tie_embeddings=tied, rngs=nnx.Rngs(0)))
    here = places(model)
    differing = {place for place, *_ in here} ^ {place for place, *_ in places(like)}
    if differing:
        raise ValueError(f"config must be the model's, but differs from it in {min(x.name for x in differing)}")
    odd = [at for at in params if at not in {at for _, at, _ in here} or params[at].dtype.name not in _DTYPES]
    if odd:
        raise ValueError(f"model: such files hold no {'.'.join(map(str, odd[0]))} of {params[odd[0]].dtype}")

    def dtype_of(place: Place, param: Any) -> Any:
        return model.token_embedding.embedding[...].dtype if place.offset else param.dtype

    tensors: dict[str, list[tuple[Place, Any, int]]] = {}
    for place, at, layer in here:
        tensors.setdefault(place.name, []).append((place, params[at], layer))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, ((place, param, _), *_) in tensors.items():
        dtype = dtype_of(place, param)
        begin, end = end, end + math.prod(place.stored) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": place.stored, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at multiples of their items
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name("model.safetensors").open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for parts in tensors.values():
            opened.write(_tensor(parts, dtype_of(*parts[0][:2])).tobytes())
    file.write_text(json.dumps(dict(config), indent=2) + "\n")


def _tensor(parts: list[tuple[Place, Any, int]], dtype: Any) -> np.ndarray:
    """A tensor of the file, out of one parameter or of those that lie side by side in it: undoes `Place.read`."""
    tensor = np.empty(parts[0][0].stored, dtype)
    for place, param, layer in parts:
        x = np.asarray(jnp.reshape(param[...], (-1, *place.shape))[layer])  # of scanned layers, one
        into = tensor if place.part is None else np.split(tensor, 3, axis=-1)[place.part]
        into = into.T if place.turned else into
        into[...] = (x.astype(np.float32) - place.offset if place.offset else x).reshape(into.shape)
    return tensor
