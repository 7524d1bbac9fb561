"""`from_huggingface`: decoders as Hugging Face stores them, as sparse language models."""

import dataclasses
import errno
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, PathParts

from ...arguments.checks import strict_kwargs
from ...ops.kernels.numerics import accumulator_dtype
from ..attention_fn import Pattern
from ..settings import LoadedModelOptions, check_settings, check_stream
from ..transformer import SparseTransformer
from .dense import refuse_fixed, refuse_names, refuse_shapes, some
from .families import Config, Family, described
from .safetensors import Stored, stored, tensors_of

_HEAD = "lm_head.weight"
# What older files hold beside the weights: frequencies, and GPT-2's causal mask and its fill value.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")


@strict_kwargs
def from_huggingface(
    folder: str | os.PathLike[str],
    patterns: Pattern | Sequence[Pattern] | None = None,
    *,
    seq_len: int | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    rngs: nnx.Rngs | None = None,
    **options: Unpack[LoadedModelOptions],
) -> SparseTransformer:
    """The sparse language model with the weights of a decoder that Hugging Face's ``save_pretrained`` wrote.

    Of GPT-2, Llama (to 3.x), Mistral, Qwen 2, 2.5 and 3, Gemma 2, Gemma 3 (text) and OLMo 2; models of experts and of
    latent attention are not among them. Nothing is downloaded, and nothing in a file is executed. Tensors are read one
    by one: loading needs the memory of the model and twice that of the largest tensor in the files.

    Args:
      folder: with a ``config.json``, of any generation of transformers, and a ``model.safetensors``, or several files
        with a ``model.safetensors.index.json``; in float32, float16 or bfloat16.
      patterns: see `SparseTransformer`; None for the configuration's: causal, in some layers within a window. With
        these the logits are the model's own.
      seq_len: the longest input, in tokens; None for the configuration's number of positions. Of GPT-2's learned
        positions, a smaller one keeps the first.
      dtype: of the computation; None: that of the parameters. Of Gemma in bfloat16, float32 alone gives the logits to
        all digits, for norms multiply by their scales in this dtype.
      param_dtype: of the parameters; None for that of the file's token embedding.
      rngs: random number generators for dropout: with a dropout_rate, one key of the stream ``dropout`` (or
        ``default``) is drawn, otherwise none; None for ``nnx.Rngs(0)``.
      **options: all other arguments of `SparseTransformer` that the files do not fix: ``causal`` (False for patterns
        that look ahead), ``dropout_rate``, ``remat``, ``scan_layers``, ``implementation``, ``selection``, ``use_sinks``
        (sinks start at zero), ...

    Returns:
      A `SparseTransformer`. Gemma's norm scales, stored as differences from 1, are the sums, in float32.

    Raises:
      FileNotFoundError: config.json or the tensors are missing.
      TypeError: folder is no path, rngs are no ``nnx.Rngs``, an unknown option or one that the files fix, patterns that
        are none.
      ValueError: a file that cannot be read; a configuration of an unknown architecture, activation, kind of layer or
        of rotary embeddings, of quantized tensors, or without a setting that it must have; missing or left-over
        tensors, shapes or dtypes that do not fit, by name; a head that differs from the embedding that it is said to
        be; more positions than were learned; an option that the configuration fixes (Gemma's scale and soft caps); and
        what `SparseTransformer` refuses.

    Example:
      >>> import json, pathlib, tempfile, jax.numpy as jnp, numpy as np, sparse_layers as sl
      >>> from safetensors.numpy import save_file
      >>> config = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 2}
      >>> config |= {"n_positions": 16, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
      >>> shapes = {"wte.weight": [50, 8], "wpe.weight": [16, 8], "ln_f.weight": [8], "h.0.ln_1.weight": [8]}
      >>> shapes |= {"h.0.ln_2.weight": [8], "h.0.attn.c_attn.weight": [8, 24], "h.0.attn.c_proj.weight": [8, 8]}
      >>> shapes |= {"h.0.mlp.c_fc.weight": [8, 32], "h.0.mlp.c_proj.weight": [32, 8]}
      >>> shapes |= {f"{name[:-7]}.bias": shape[-1:] for name, shape in shapes.items() if name[0] in "lh"}
      >>> with tempfile.TemporaryDirectory() as folder:  # a real one: a clone of Qwen/Qwen3-8B, say
      ...     _ = pathlib.Path(folder, "config.json").write_text(json.dumps(config))
      ...     tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
      ...     save_file(tensors, pathlib.Path(folder, "model.safetensors"))
      ...     model = sl.from_huggingface(folder, "local:local_attn_ctx=4")
      >>> model(jnp.zeros((1, 16), int)).shape
      (1, 16, 50)

    References:
      Names, layouts and meanings of settings: the models of Hugging Face's transformers. Formats: safetensors.
    """
    path = path_of("folder", folder)
    given = {"seq_len": seq_len, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    _check(given, options)
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "folder must be on this machine, nothing is downloaded", str(path))
    return _loaded(path, Config(path / "config.json"), lambda: stored(path), patterns, options=options, **given)


@strict_kwargs
def from_gpt2(
    path: str | os.PathLike[str],
    *,
    patterns: Pattern | Sequence[Pattern] = "all",
    num_heads: int | None = None,
    seq_len: int | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = jnp.float32,
    rngs: nnx.Rngs | None = None,
    **options: Unpack[LoadedModelOptions],
) -> SparseTransformer:
    """`from_huggingface` for a GPT-2 that may come as a file alone, whose sizes then say what a configuration would.

    Args:
      path: a ``.safetensors`` file, or a folder with a ``model.safetensors``; a ``config.json`` beside it is read.
      patterns: see `SparseTransformer`; with "all" the logits are GPT-2's.
      num_heads: None for the configuration's, or for one for each 64 features, as in all released sizes.
      seq_len, dtype, param_dtype, rngs: see `from_huggingface`.
      **options: see `from_huggingface`.

    Returns:
      A `SparseTransformer` with learned positions.

    Raises:
      FileNotFoundError, TypeError, ValueError: see `from_huggingface`; num_heads that do not divide the features.

    Example:
      >>> import sparse_layers as sl
      >>> sl.from_gpt2("/nowhere/gpt2.safetensors")
      Traceback (most recent call last):
      FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/gpt2.safetensors'

    References:
      Radford et al.: Language Models are Unsupervised Multitask Learners, 2019.
    """
    place = path_of("path", path)
    given = {"seq_len": seq_len, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    _check(given | {"num_heads": num_heads}, options)
    folder = place if place.is_dir() else place.parent
    files = stored(place) if place.is_dir() else tensors_of(place)
    file = folder / "config.json"
    config = Config(file) if file.exists() else Config(place, _gpt2_of(place, files))
    config.one_of("model_type", ("gpt2",))
    if num_heads is not None:
        config.values["n_head"] = num_heads
        if (features := config.size("n_embd")) % num_heads:  # the argument's fault, not the file's
            raise ValueError(f"num_heads={num_heads} must divide features={features}")
    return _loaded(place, config, lambda: files, patterns, options=options, **given)


def path_of(name: str, path: Any) -> pathlib.Path:
    """The path of a model; raises TypeError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be that of a model, got {type(path).__name__}: {path!r}")
    return pathlib.Path(path)


def _check(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises what `from_huggingface` does for arguments that are wrong whatever is in the files."""
    check_settings(**{name: x for name, x in given.items() if x is not None or name == "dtype"}, **options)


def _loaded(
    path: pathlib.Path,
    config: Config,
    tensors: Callable[[], dict[str, Stored]],
    patterns: Pattern | Sequence[Pattern] | None,
    *,
    seq_len: int | None,
    dtype: Dtype | None,
    param_dtype: Dtype | None,
    rngs: nnx.Rngs | None,
    options: Mapping[str, Any],
) -> SparseTransformer:
    """The model of a configuration with tensors of files; arguments as of `from_huggingface`."""
    family, settings = described(config)
    refuse_fixed(options, settings, str(config.file))
    positions = settings.pop("seq_len")
    if seq_len is not None and seq_len > positions and settings["positions"] == "learned":
        raise ValueError(f"seq_len={seq_len}: {path} has {positions} positions, and no more can be made of them")
    settings |= {"seq_len": seq_len or positions, "dtype": dtype}
    settings["patterns"] = settings["patterns"] if patterns is None else patterns

    files = {name: tensor for name, tensor in tensors().items() if not _BUFFERS.fullmatch(name)}
    prefix = family.prefix if any(name.startswith(family.prefix) for name in files) else ""
    embedding = f"{prefix}{family.names['token_embedding']}.weight"
    settings["tie_embeddings"] = config.get("tie_word_embeddings", _HEAD not in files)
    odd = [name for name, x in files.items() if x.dtype is None]
    if odd:
        raise ValueError(f"{path}: tensors must be float32, float16 or bfloat16, not so: {some(odd)}")
    if settings["tie_embeddings"] and _HEAD in files:
        head, tied = files.pop(_HEAD), files.get(embedding)
        if tied is not None and not np.array_equal(head.read(), tied.read()):
            raise ValueError(f"{path}: {_HEAD} differs from {embedding}, but config.json says tie_word_embeddings=true")
    if param_dtype is None:
        param_dtype = files[embedding].dtype if embedding in files else jnp.float32
    param_dtype = jnp.dtype(param_dtype)
    if family.from_one and dtype is None:  # scales of norms have another dtype than all else
        settings["dtype"] = param_dtype

    # Initial values are replaced, so only dropout's key is the caller's.
    seeds: dict[str, Any] = {"params": 0}
    if options.get("dropout_rate"):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        check_stream(rngs, "dropout", f"dropout_rate={options.get('dropout_rate')}")
        seeds["dropout"] = rngs.dropout()

    def make(rngs: nnx.Rngs) -> SparseTransformer:
        return SparseTransformer(**settings, param_dtype=param_dtype, rngs=rngs, **options)

    model = nnx.eval_shape(make, nnx.Rngs(**seeds))
    places = places_of(model, family, prefix, positions)
    wanted = {place.name: place.stored for several in places.values() for place in several}
    refuse_names(files, wanted, str(path))
    refuse_shapes({name: x.shape for name, x in files.items()}, wanted, str(path))

    def others(model: SparseTransformer) -> Any:  # what the files do not have
        return nnx.state(model, lambda at, _: at not in places)

    if jax.tree.leaves(others(model)):  # the compiler leaves out all but these
        nnx.update(model, nnx.jit(lambda rngs: others(make(rngs)))(nnx.Rngs(**seeds)))
    params: Any = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for at, several in places.items():
        # 1 and a small difference have more digits together than half precision holds.
        own_dtype = accumulator_dtype(param_dtype) if several[0].offset else param_dtype
        value = _read(several, files, params[at].shape, own_dtype)
        nnx.update(model, nnx.from_flat_state([(at, params[at].replace(value))]))
    return model


def _gpt2_of(path: pathlib.Path, files: Mapping[str, Stored]) -> dict[str, Any]:
    """The configuration of a GPT-2 by its tensors alone, as in all released sizes."""
    shapes = {name.removeprefix("transformer."): x.shape for name, x in files.items()}
    for name in ("wte.weight", "wpe.weight"):
        if len(shapes.get(name, ())) != 2:
            raise ValueError(f"{path}: tensors of a GPT-2 must have a matrix {name}, got {some(sorted(shapes))}")
    (vocab, features), positions = shapes["wte.weight"], shapes["wpe.weight"]
    return {
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_embd": features,
        "n_layer": sum(name.endswith(".ln_1.bias") for name in shapes),
        "n_head": max(1, features // 64),
        "n_positions": positions[0],
        "n_inner": shapes.get("h.0.mlp.c_fc.weight", (0, 4 * features))[1],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter in the files: the name and shape of its tensor, and what it takes to be ours."""

    name: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    part: int | None
    turned: bool
    offset: int

    def read(self, tensor: Stored, into: np.ndarray) -> None:
        """Writes the parameter into an array of its shape, without a copy between."""
        x = tensor.read()
        x = x if self.part is None else np.split(x, 3, axis=-1)[self.part]
        x = x.T if self.turned else x
        x = x.astype(np.float32) + self.offset if self.offset else x
        rows = into.size // math.prod(x.shape[1:])  # of learned positions, the first ones
        into.reshape(rows, *x.shape[1:])[...] = x[:rows]


def _read(places: list[Place], files: Mapping[str, Stored], shape: tuple[int, ...], dtype: Dtype) -> jax.Array:
    """A parameter of one layer, or of all that are scanned over; the host holds a tensor of the files at a time."""

    def of_layer(place: Place) -> jax.Array:
        value = np.empty(place.shape, dtype)
        place.read(files[place.name], value)
        # Waited for, or the host would hold several twice while they are on their way.
        return jnp.asarray(value).block_until_ready()

    if len(shape) == len(places[0].shape):
        return of_layer(places[0])
    layers = jnp.zeros(shape, dtype)
    for number, place in enumerate(places):
        layers = _put(layers, number, of_layer(place)).block_until_ready()
    return layers


@functools.partial(jax.jit, donate_argnums=0)
def _put(layers: jax.Array, index: int, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(layers, layer, index, 0)


def places_of(model: SparseTransformer, family: Family, prefix: str, positions: int) -> dict[PathParts, list[Place]]:
    """Where each parameter lies, those of scanned layers at several places; not those that no file has."""
    places = {}
    for at, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        layers, shape = [0], param.shape
        if at[0] == "blocks":
            layers = range(int(str(at[1])), model.num_layers, len(model.blocks))
            shape = shape[1:] if model.scan_layers else shape
        if at[-1] != "sinks" and not str(at[-2]).startswith("index_"):
            places[at] = [_place(family, prefix, at, layer, shape, positions) for layer in layers]
    return places


def _place(family: Family, prefix: str, at: PathParts, layer: int, shape: tuple[int, ...], positions: int) -> Place:
    module, leaf = ".".join(part for part in at[:-1] if isinstance(part, str)), at[-1]
    theirs = family.names.get(module, module)
    name, part = theirs if isinstance(theirs, tuple) else (theirs, None)
    held = (positions if module == "position_embedding" else shape[0], *shape[1:])
    if leaf != "embedding":  # a matrix or a vector
        inputs = 2 if module == "blocks.attention.out" else 1
        held = (math.prod(shape[:inputs]), math.prod(shape[inputs:])) if leaf == "kernel" else (math.prod(shape),)
    turned = leaf == "kernel" and not (family.conv1d and module != "head")
    held = held[::-1] if turned else held if part is None else (*held[:-1], 3 * held[-1])
    name = f"{'' if module == 'head' else prefix}{name.format(layer)}.{'bias' if leaf == 'bias' else 'weight'}"
    return Place(name, held, shape, part, turned, int(family.from_one and leaf == "scale"))
