"""`from_huggingface`: sparse language models from checkpoints of Hugging Face's decoders."""

import dataclasses
import errno
import functools
import itertools
import math
import mmap
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, PathParts
from jax.sharding import NamedSharding, PartitionSpec

from ...arguments.checks import F, keywords, strict_kwargs
from ...arguments.foreign import one_line
from ...ops.kernels.numerics import accumulator_dtype
from ...scorers import as_nsa
from ..attention_fn import Pattern
from ..mixer import Mixer
from ..mixture import MixtureOfExperts
from ..options import LoadedModelOptions
from ..settings import check_settings, check_stream
from ..transformer import SparseTransformer
from .config import Config
from .dense import abbreviate, refuse_fixed, refuse_names, refuse_shapes
from .families import Family, check_count, family_of, is_mxfp4, read_settings
from .safetensors import TensorInfo, find_tensors, join_mxfp4, read_header, refuse_other_formats

_HEAD = "lm_head.weight"
# Older files also hold frequencies, and GPT-2's causal mask and its fill value.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")
# Prefixes of the text model in one of text and images: of transformers 5, and an earlier one. A head may have none.
_TEXT = re.compile(r"(model\.)?language_model\.|(?=lm_head\.weight$)")
# Endings of parameters of projections, norms and embeddings; a family names others in full.
_ENDINGS = dict.fromkeys(("kernel", "scale", "embedding"), ".weight") | {"bias": ".bias"}
# Options that make parameters without a name, by a substring of their paths.
_UNNAMED = {".index_": "a scorer's index", ".sinks": "use_sinks", ".out_gate.": "gate_output"}


def _with_fixed_architecture(load: F) -> F:
    """Decorates a loader so that it refuses the arguments of `SparseTransformer` that the files fix."""

    @functools.wraps(load)
    def call(*args: Any, **kwargs: Any) -> Any:
        names = [name for name in kwargs if name not in keywords(load)]
        refuse_fixed(names, keywords(SparseTransformer.__init__), "the files' architecture")
        return load(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType] (it has the function's signature)


@_with_fixed_architecture
@strict_kwargs
def from_huggingface(
    folder: str | os.PathLike[str],
    patterns: Pattern | Sequence[Pattern] | None = None,
    *,
    seq_len: int | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    rngs: nnx.Rngs | None = None,
    expert_axis: str | None = None,
    token_axes: str | tuple[str, ...] = (),
    **options: Unpack[LoadedModelOptions],
) -> SparseTransformer:
    """Loads a checkpoint of Hugging Face's ``save_pretrained`` as a sparse language model.

    It supports GPT-2, Llama (to 3.x), Mistral, Qwen 2, 2.5 and 3, Gemma 2 and 3 (text), OLMo 2 and 3, Exaone 4,
    SmolLM 3, Phi 3 and 4, Granite 3, Command R, R7B and A, MPT, BLOOM, and with experts Mixtral, Qwen3-MoE and
    gpt-oss, but not latent attention. From a model of text and images it takes the text model, as from Gemma 3 4B
    to 27B. Experts in MXFP4 (gpt-oss) become bfloat16. Nothing is downloaded, and nothing in a file is executed.
    Tensors are read one by one: loading needs the memory of the model and twice that of the files' largest tensor.

    Args:
      folder: a folder with a ``config.json``, of any generation of transformers, and a ``model.safetensors``, or files
        with a ``model.safetensors.index.json``; in float32, float16 or bfloat16.
      patterns: see `SparseTransformer`; None for the configuration's, causal and in some layers within a window, which
        give the model's own logits.
      seq_len: the longest input, in tokens; None for the configuration's number of positions. A smaller one keeps the
        first of GPT-2's learned positions. Phi's longrope needs one, which selects the short or the long factors.
      dtype: dtype of the computation; None for that of the parameters. Gemma in bfloat16 gives its exact logits with
        float32 only, as norms multiply by their scales in this dtype.
      param_dtype: dtype of the parameters; None for that of the file's token embedding.
      rngs: random number generators for dropout; None for ``nnx.Rngs(0)``. With a dropout_rate, loading draws one key
        of the stream ``dropout`` (or ``default``), otherwise none.
      expert_axis, token_axes: see `MixtureOfExperts`. Under ``jax.set_mesh``, each device gets its experts only, and
        all other parameters.
      **options: all other arguments of `SparseTransformer` that the files do not fix: ``causal`` (False for patterns
        that look ahead), ``dropout_rate``, ``remat``, ``scan_layers``, ``implementation``, ``selection``, ``use_sinks``
        (sinks start at zero), ...

    Returns:
      A `SparseTransformer`. Gemma's norm scales, stored as differences from 1, become their sums with 1, in float32.

    Raises:
      FileNotFoundError: a folder, config.json or tensors that are missing, or tensors in another format.
      TypeError: a folder that is not a path, rngs or patterns of another type, an unknown option.
      ValueError: a file that cannot be read; a configuration with another number of layers or experts than the tensors,
        with an unknown architecture, activation, kind of layer or of rotary position embeddings, or with quantized
        tensors; missing or additional tensors, shapes or dtypes that do not fit, by name; a head that differs from the
        embedding it is tied to; more positions than were learned; an option that the files fix, such as num_heads;
        patterns with a `Mixer` or `NSA`; an expert_axis of a model without experts; and errors of `SparseTransformer`.

    Example:
      >>> import json, pathlib, tempfile, jax.numpy as jnp, numpy as np, sparse_layers as sl
      >>> from safetensors.numpy import save_file
      >>> config = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 2}
      >>> config |= {"n_positions": 16, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
      >>> shapes = {"wte.weight": [50, 8], "wpe.weight": [16, 8], "ln_f.weight": [8], "h.0.ln_1.weight": [8]}
      >>> shapes |= {"h.0.ln_2.weight": [8], "h.0.attn.c_attn.weight": [8, 24], "h.0.attn.c_proj.weight": [8, 8]}
      >>> shapes |= {"h.0.mlp.c_fc.weight": [8, 32], "h.0.mlp.c_proj.weight": [32, 8]}
      >>> shapes |= {f"{name[:-7]}.bias": shape[-1:] for name, shape in shapes.items() if name[0] in "lh"}
      >>> with tempfile.TemporaryDirectory() as folder:  # in practice a clone of Qwen/Qwen3-8B, for example
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
    arguments = {"seq_len": seq_len, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    _check_arguments(arguments, options, patterns)
    arguments |= {"expert_axis": expert_axis, "token_axes": token_axes}
    if not path.is_dir():
        rule = "on this machine, nothing is downloaded" if not path.exists() else "that of config.json, not a file"
        raise FileNotFoundError(errno.ENOENT, f"folder must be {rule}", str(path))
    refuse_other_formats(path)
    return _load(path, Config(path / "config.json"), lambda: find_tensors(path), patterns, arguments, options)


@_with_fixed_architecture
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
    """Loads a checkpoint of GPT-2 as `from_huggingface` does, also from a single file without a configuration.

    Args:
      path: a ``.safetensors`` file, or a folder with a ``model.safetensors``; a ``config.json`` beside it is read.
      patterns: see `SparseTransformer`; "all" gives GPT-2's own logits.
      num_heads: number of heads; None for the configuration's, or one for each 64 features, as in all released sizes.
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
    model_path = path_of("path", path)
    arguments = {"seq_len": seq_len, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    _check_arguments(arguments | {"num_heads": num_heads}, options, patterns)
    folder = model_path if model_path.is_dir() else model_path.parent
    refuse_other_formats(model_path)
    files = find_tensors(model_path) if model_path.is_dir() else read_header(model_path)
    file = folder / "config.json"
    config = Config(file) if file.exists() else Config(model_path, _gpt2_config(model_path, files))
    config.one_of("model_type", ("gpt2",))
    family_of(config)
    if num_heads is not None:
        config.values["n_head"] = num_heads
        if (features := config.size("n_embd")) % num_heads:  # an error of the argument, not of the file
            raise ValueError(f"num_heads={num_heads} must divide features={features}")
    return _load(model_path, config, lambda: files, patterns, arguments, options)


def path_of(name: str, path: Any) -> pathlib.Path:
    """Returns the path of a model; raises TypeError if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be that of a model, got {type(path).__name__}: {path!r}")
    return pathlib.Path(path)


def _check_arguments(arguments: Mapping[str, Any], options: Mapping[str, Any], patterns: Any) -> None:
    """Refuses arguments of `from_huggingface` that are wrong for all files."""
    for pattern in patterns if isinstance(patterns, Sequence) and not isinstance(patterns, str) else (patterns,):
        if isinstance(pattern, Mixer) or as_nsa(pattern) is not None:
            raise ValueError(
                f"patterns must be without a Mixer and NSA, which files have no tensors for, got {one_line(pattern)}: "
                "make a SparseTransformer and copy the other layers' parameters"
            )
    check_settings(**{name: x for name, x in arguments.items() if x is not None or name == "dtype"}, **options)


def _load(
    path: pathlib.Path,
    config: Config,
    tensors: Callable[[], dict[str, TensorInfo]],
    patterns: Pattern | Sequence[Pattern] | None,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
) -> SparseTransformer:
    """Makes the model of a configuration and loads its tensors.

    `from_huggingface` documents patterns, ``arguments`` (all other named ones) and options.
    """
    seq_len, dtype, param_dtype, rngs = (arguments[name] for name in ("seq_len", "dtype", "param_dtype", "rngs"))
    family = family_of(config)
    files, prefix, num_layers = _decoder_tensors(path, config, family, tensors())
    embedding = f"{prefix}{family.names['token_embedding']}.weight"
    refuse_names(files.keys() & {embedding}, [embedding], str(path))
    if config.get("vocab_size") is None:
        config.values["vocab_size"] = files[embedding].shape[0]
    settings = read_settings(config, num_layers, seq_len)
    _check_experts(path, config, family, files, prefix, settings["mlp"])
    refuse_fixed(options, settings, str(config.file))
    positions = settings.pop("seq_len")
    if seq_len is not None and seq_len > positions and settings["positions"] == "learned":
        raise ValueError(f"seq_len={seq_len}: {path} has {positions} positions, and no more can be made of them")
    settings |= {"seq_len": seq_len or positions, "dtype": dtype}
    settings["patterns"] = settings["patterns"] if patterns is None else patterns
    if arguments.get("expert_axis") or arguments.get("token_axes"):
        settings["mlp"] = _divide_experts(settings["mlp"], arguments, str(config.file))
    settings["tie_embeddings"] = config.get("tie_word_embeddings", _HEAD not in files)
    _check_tensors(path, files, embedding, settings["tie_embeddings"])
    if settings["tie_embeddings"]:
        files.pop(_HEAD, None)
    param_dtype = jnp.dtype(files[embedding].dtype if param_dtype is None else param_dtype)
    if family.zero_centered_norms and dtype is None:  # scales of norms have another dtype than all else
        settings["dtype"] = param_dtype

    seeds = _rng_seeds(rngs, options.get("dropout_rate"))

    def make(rngs: nnx.Rngs) -> SparseTransformer:
        return SparseTransformer(**settings, param_dtype=param_dtype, rngs=rngs, **options)

    model = nnx.eval_shape(make, nnx.Rngs(**seeds))
    params: Any = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    mappings = map_tensors(params, model, family, prefix, positions)
    refuse_unnamed(params, mappings, allowed=("a scorer's index", "use_sinks"))
    expected = {mapping.name: mapping.tensor_shape for mapping in itertools.chain.from_iterable(mappings.values())}
    refuse_names(files, expected, str(path))
    refuse_shapes({name: x.shape for name, x in files.items()}, expected, str(path))

    def unloaded_state(model: SparseTransformer) -> Any:  # parameters and variables that the files lack
        return nnx.state(model, lambda param_path, _: param_path not in mappings)

    if jax.tree.leaves(unloaded_state(model)):  # the compiler drops all others
        nnx.update(model, nnx.jit(lambda rngs: unloaded_state(make(rngs)))(nnx.Rngs(**seeds)))
    for param_path, param_mappings in mappings.items():
        # The sum of 1 and a small difference has more digits than half precision holds.
        value_dtype = accumulator_dtype(param_dtype) if param_mappings[0].offset else param_dtype
        sharding = _param_sharding(param_path, model.scan_layers, arguments.get("expert_axis"))
        value = _read(param_mappings, files, params[param_path].shape, value_dtype, sharding)
        nnx.update(model, nnx.from_flat_state([(param_path, params[param_path].replace(value))]))
    return model


def _check_experts(
    path: pathlib.Path, config: Config, family: Family, files: Mapping[str, TensorInfo], prefix: str, mlps: Any
) -> None:
    """Refuses another number of experts than a router has outputs, before anything is made for each expert."""
    for layer, mlp in enumerate(mlps):
        if isinstance(mlp, MixtureOfExperts):
            router = f"{prefix}{family.names['blocks.experts.router']}.weight".format(layer)
            refuse_names(files.keys() & {router}, [router], str(path))
            check_count(config, family.experts, "num_experts", mlp.num_experts, [*files[router].shape, 0][0])


def _divide_experts(mlps: Sequence[Any], axes: Mapping[str, Any], file: str) -> tuple[Any, ...]:
    """Returns the MLPs of layers, whose mixtures get the ``expert_axis`` and ``token_axes`` of ``axes``."""
    if not any(isinstance(mlp, MixtureOfExperts) for mlp in mlps):
        name, default = ("expert_axis", None) if axes["expert_axis"] else ("token_axes", ())
        raise ValueError(f"{name} must be {default}, as {file} has no experts, got {axes[name]!r}")
    names = {name: axes[name] for name in ("expert_axis", "token_axes")}
    return tuple(dataclasses.replace(mlp, **names) if isinstance(mlp, MixtureOfExperts) else mlp for mlp in mlps)


def _param_sharding(param_path: PathParts, scan_layers: bool, expert_axis: str | None) -> NamedSharding | None:
    """Returns the sharding of a parameter over the mesh in force, None without a mesh or an expert_axis."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or expert_axis is None:
        return None
    is_expert = str(param_path[-2]).startswith("experts_")
    return NamedSharding(mesh, PartitionSpec(*[None] * scan_layers, expert_axis) if is_expert else PartitionSpec())


def _rng_seeds(rngs: nnx.Rngs | None, dropout_rate: float | None) -> dict[str, Any]:
    """Returns the seeds of a model's rngs. Its parameters are replaced, so only dropout needs the caller's rngs."""
    seeds: dict[str, Any] = {"params": 0}
    if dropout_rate:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        check_stream(rngs, "dropout", f"dropout_rate={dropout_rate}")
        seeds["dropout"] = rngs.dropout()
    return seeds


def _decoder_tensors(
    path: pathlib.Path, config: Config, family: Family, files: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], str, int]:
    """Returns the tensors of a decoder, the prefix of their names and the number of layers, which is not 0."""
    tensors = {name: tensor for name, tensor in files.items() if not _BUFFERS.fullmatch(name)}
    if config.is_multimodal:
        tensors = {_TEXT.sub(r"\1", name, count=1): x for name, x in tensors.items() if _TEXT.match(name)}
    tensors = join_mxfp4(tensors) if family.reads_mxfp4 and is_mxfp4(config) else tensors
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    layers = str(family.names["blocks.attention.out"]).partition("{}")[0]
    matches = map(re.compile(re.escape(prefix + layers) + r"(\d+)\.").match, tensors)
    num_layers = len({match[1] for match in matches if match})
    if not num_layers:
        expected = f"{family.prefix}{layers}0."
        if config.is_multimodal:  # the names of transformers 5, and the earlier ones
            expected = f"model.language_model.{layers}0. or language_model.{expected}"
        raise ValueError(f"{path}: tensors of layers must begin with {expected}, got {abbreviate(files) or 'none'}")
    return tensors, prefix, num_layers


def _check_tensors(path: pathlib.Path, files: Mapping[str, TensorInfo], embedding: str, is_tied: bool) -> None:
    """Raises ValueError for a tensor of another dtype, or a head that differs from the embedding it is tied to."""
    unsupported = [name for name, x in files.items() if x.dtype is None]
    if unsupported:
        raise ValueError(f"{path}: tensors must be float32, float16 or bfloat16, not so: {abbreviate(unsupported)}")
    if is_tied and _HEAD in files and not np.array_equal(files[_HEAD].read(), files[embedding].read()):
        raise ValueError(f"{path}: {_HEAD} differs from {embedding}, but config.json says tie_word_embeddings=true")


def _gpt2_config(path: pathlib.Path, files: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Returns the configuration of a GPT-2 that follows from its tensors, as in all released sizes."""
    shapes = {name.removeprefix("transformer."): x.shape for name, x in files.items()}
    for name in ("wte.weight", "wpe.weight"):
        if len(shapes.get(name, ())) != 2:
            raise ValueError(f"{path}: tensors of a GPT-2 must have a matrix {name}, got {abbreviate(sorted(shapes))}")
    features = shapes["wte.weight"][1]
    return {
        "model_type": "gpt2",
        "n_embd": features,
        "n_layer": sum(name.endswith(".ln_1.bias") for name in shapes),
        "n_head": max(1, features // 64),
        "n_positions": shapes["wpe.weight"][0],
        "n_inner": shapes.get("h.0.mlp.c_fc.weight", (None, None))[1],
    }


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """The tensor of a checkpoint that holds a parameter, and how their layouts differ.

    Attributes:
      name, tensor_shape: those of the tensor in the files.
      shape: the parameter's shape.
      transposed: True if the tensor is the transpose of the parameter's matrix.
      outputs: those of the tensor that belong to the parameter, in its order, on the last axis once it is transposed.
      offset: a number to add to the tensor.
      row: the entry of the tensor's first axis that holds the parameter, or None for all of it.
    """

    name: str
    tensor_shape: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool
    outputs: slice | np.ndarray
    offset: int
    row: int | None = None

    def read(self, tensor: TensorInfo, target: np.ndarray) -> None:
        """Reads the tensor into an array of the parameter's shape, without another copy."""
        x = tensor.read(self.row)
        x = (x.T if self.transposed else x)[..., self.outputs]
        x = x.astype(np.float32) + self.offset if self.offset else x
        rows = target.size // math.prod(x.shape[1:])  # a shorter seq_len reads the first learned positions
        target.reshape(rows, *x.shape[1:])[...] = x[:rows]


def _read(
    mappings: list[TensorMapping],
    files: Mapping[str, TensorInfo],
    shape: tuple[int, ...],
    dtype: Dtype,
    sharding: NamedSharding | None,
) -> jax.Array:
    """Reads a parameter: of one layer or all scanned layers, of all experts; the host holds one tensor at a time."""

    def read_layer(mapping: TensorMapping) -> jax.Array:
        # On a CPU, JAX takes whole pages as an array without a copy, and they leave no holes in the heap: on the heap,
        # the peak was 1.4 times the model, and 1.9 times with scanned layers.
        pages = mmap.mmap(-1, math.prod(mapping.shape) * jnp.dtype(dtype).itemsize)
        value = np.frombuffer(pages, dtype).reshape(mapping.shape)
        mapping.read(files[mapping.name], value)
        # Without this wait the host would hold several tensors twice during their transfer.
        return jax.device_put(value).block_until_ready()

    if len(shape) == len(mappings[0].shape):
        return jax.device_put(read_layer(mappings[0]), sharding)
    layers = jnp.zeros(shape, dtype, device=sharding)
    stack = shape[: len(shape) - len(mappings[0].shape)]  # layers, experts, or both
    for index, mapping in zip(np.ndindex(*stack), mappings, strict=True):
        layers = _set_layer(layers, index, read_layer(mapping)).block_until_ready()
    return layers


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(layers: jax.Array, index: tuple[int, ...], layer: jax.Array) -> jax.Array:
    layer = jnp.expand_dims(layer, tuple(range(len(index))))
    return jax.lax.dynamic_update_slice(layers, layer, (*index, *[0] * (layers.ndim - len(index))))


def map_tensors(
    params: Mapping[PathParts, Any], model: SparseTransformer, family: Family, prefix: str, positions: int
) -> dict[PathParts, list[TensorMapping]]:
    """Maps each parameter that files can have to its tensors: one, or one for each scanned layer and expert."""
    mappings = {}
    first_output = 2 if model.scan_layers else 1  # axes before it are those of layers and inputs
    outputs = {
        _module(path): math.prod(param.shape[first_output:]) for path, param in params.items() if path[-1] == "kernel"
    }
    for param_path, param in params.items():
        module, leaf = _module(param_path), str(param_path[-1])
        module = module if leaf in _ENDINGS else f"{module}.{leaf}"
        if module not in family.names:
            continue  # files cannot have it
        layers, shape = [0], param.shape
        if param_path[0] == "blocks":
            layers = range(int(str(param_path[1])), model.num_layers, len(model.blocks))
            shape = shape[1:] if model.scan_layers else shape
        if ".experts_" not in module:
            tensors = [_map_tensor(family, module, leaf, (x,), shape, outputs) for x in layers]
        elif str(family.names[module]).count("{}") == 2:  # a tensor for each expert
            numbers = itertools.product(layers, range(shape[0]))
            tensors = [_map_tensor(family, module, leaf, x, shape[1:], outputs) for x in numbers]
        else:
            tensors = [x for layer in layers for x in _map_stacked_experts(family, module, leaf, layer, shape)]
        if module == "position_embedding":  # the model may have fewer positions than the files
            tensors = [dataclasses.replace(x, tensor_shape=(positions, *shape[1:])) for x in tensors]
        if module != "head":
            tensors = [dataclasses.replace(x, name=prefix + x.name) for x in tensors]
        mappings[param_path] = tensors
    return mappings


def refuse_unnamed(params: Collection[PathParts], mappings: Collection[PathParts], allowed: Collection[str]) -> None:
    """Raises ValueError for a parameter that files cannot have, except those of the ``allowed`` options."""
    for name in (".".join(map(str, path)) for path in params if path not in mappings):
        option = next((option for text, option in _UNNAMED.items() if text in f"{name}."), "this module")
        if option not in allowed:
            raise ValueError(f"model: such files have no name for {name}: only models without {option} are written")


def _module(param_path: PathParts) -> str:
    """Returns the name of a parameter's module, without the numbers of layers."""
    return ".".join(name for name in param_path[:-1] if isinstance(name, str))


def _map_stacked_experts(
    family: Family, module: str, leaf: str, layer: int, shape: tuple[int, ...]
) -> list[TensorMapping]:
    """Maps a parameter of all experts to one tensor [E, in, out] or [E, out], an entry for each expert."""
    name = family.names[module]
    # Gates and inputs take turns on the last axis.
    (name, index), step = (name, 2) if isinstance(name, tuple) else ((name, 0), 1)
    name = f"{name.format(layer)}{'_bias' if leaf == 'bias' else ''}"
    tensor_shape, outputs = (*shape[:-1], step * shape[-1]), slice(index, None, step)
    return [TensorMapping(name, tensor_shape, shape[1:], False, outputs, 0, row) for row in range(shape[0])]


def _map_tensor(
    family: Family,
    module: str,
    leaf: str,
    numbers: tuple[int, ...],
    shape: tuple[int, ...],
    outputs: Mapping[str, int],
) -> TensorMapping:
    """Maps a parameter to its tensor; ``numbers`` are those of the layer and expert, ``outputs`` those of modules."""
    name, sizes, columns = family.names[module], [], slice(None)
    if isinstance(name, tuple):  # a part of a tensor
        name, index = name
        sizes = [outputs[key] for key, x in family.names.items() if isinstance(x, tuple) and x[0] == name]
        columns = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        if family.interleaved_heads:
            heads, head_dim = shape[-2:]
            columns = np.arange(sum(sizes)).reshape(heads, len(sizes), head_dim)[:, index].ravel()
    name = name.format(*numbers) + _ENDINGS.get(leaf, "")
    transposed = leaf == "kernel" and not (family.conv1d and module != "head")
    if leaf == "embedding":
        tensor_shape = shape
    elif leaf == "kernel":
        inputs = 2 if module == "blocks.attention.out" else 1
        tensor_shape = math.prod(shape[:inputs]), sum(sizes) or math.prod(shape[inputs:])
    else:
        tensor_shape = (sum(sizes) or math.prod(shape),)
    tensor_shape = tensor_shape[::-1] if transposed else tensor_shape
    if family.interleaved_rope and module in ("blocks.attention.query", "blocks.attention.key"):
        # Here the first features of all pairs come before their second ones.
        columns = np.arange(outputs[module]).reshape(-1, shape[-1] // 2, 2).swapaxes(1, 2).ravel()
    offset = int(family.zero_centered_norms and leaf == "scale")
    return TensorMapping(name, tensor_shape, shape, transposed, columns, offset)
