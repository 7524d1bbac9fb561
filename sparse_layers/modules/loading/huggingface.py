"""`from_huggingface`: decoders as Hugging Face stores them, as sparse language models; each family is a table."""

import dataclasses
import errno
import functools
import math
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

from ...masks.options import Natural, Positive, checked, near, real, refuse_unknown
from ...masks.primitives import Causal, Window
from ..attention_fn import Pattern
from ..rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from ..settings import LoadedModelOptions, check_settings, check_stream
from ..transformer import SparseTransformer
from .dense import refuse_fixed, refuse_names, refuse_shapes, some
from .safetensors import Stored, read_json, stored, tensors_of


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
    by one: loading needs the memory of the model and twice that of its largest tensor, which with ``scan_layers`` is a
    matrix of all layers.

    Args:
      folder: with a ``config.json``, of any generation of transformers, and a ``model.safetensors``, or several files
        with a ``model.safetensors.index.json``; in float32, float16 or bfloat16.
      patterns: see `SparseTransformer`; None for the configuration's: causal, in some layers within a window. With
        these the logits are the model's own.
      seq_len: the longest input, in tokens; None for the configuration's number of positions. Of GPT-2's learned
        positions, a smaller one keeps the first.
      dtype: of the computation; None: that of the parameters.
      param_dtype: of the parameters; None for that of the file's token embedding.
      rngs: random number generators for dropout: with a dropout_rate, one key of the stream ``dropout`` (or
        ``default``) is drawn, otherwise none; None for ``nnx.Rngs(0)``.
      **options: all other arguments of `SparseTransformer` that the files do not fix: ``dropout_rate``, ``remat``,
        ``scan_layers``, ``implementation``, ``selection``, ``use_sinks`` (sinks start at zero), ...

    Returns:
      A `SparseTransformer`. Gemma's norm scales, stored as differences from 1, are the sums, rounded to param_dtype.

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
    refuse_unknown(from_huggingface, options)
    path = _path("folder", folder)
    given = {"seq_len": seq_len, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    _check(given, options)
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "folder must be on this machine, nothing is downloaded", str(path))
    return _loaded(path, Config(path / "config.json"), lambda: stored(path), patterns, options=options, **given)


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
    refuse_unknown(from_gpt2, options)
    place = _path("path", path)
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


def _path(name: str, path: Any) -> pathlib.Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be that of a model, got {type(path).__name__}: {path!r}")
    return pathlib.Path(path)


def _check(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises what `from_huggingface` does for arguments that are wrong whatever is in the files."""
    check_settings(**{name: x for name, x in given.items() if x is not None or name == "dtype"}, **options)


def _loaded(
    path: pathlib.Path,
    config: "Config",
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
    if settings["tie_embeddings"] and _HEAD in files:
        head, tied = files.pop(_HEAD), files.get(embedding)
        if tied is not None and not np.array_equal(head.read(), tied.read()):
            raise ValueError(f"{path}: {_HEAD} differs from {embedding}, but config.json says tie_word_embeddings=true")
    odd = [name for name, x in files.items() if x.dtype is None]
    if odd:
        raise ValueError(f"{path}: tensors must be float32, float16 or bfloat16, not so: {some(odd)}")
    if param_dtype is None:
        param_dtype = files[embedding].dtype if embedding in files else jnp.float32
    param_dtype = jnp.dtype(param_dtype)

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
        value = _read(several, files, param_dtype).reshape(params[at].shape)
        # Waited for, or the host would hold several twice while they are on their way.
        nnx.update(model, nnx.from_flat_state([(at, params[at].replace(jnp.asarray(value).block_until_ready()))]))
        del value
    return model


# --- configurations --------------------------------------------------------------------------------------------------


class Config:
    """A config.json. What is null there counts as left out, but for `need`."""

    def __init__(self, file: pathlib.Path, values: dict[str, Any] | None = None):
        self.file, self.values = file, read_json(file) if values is None else values

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or the default."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """A setting that must be there, maybe null: what is meant without it is not said."""
        if name not in self.values:
            raise ValueError(f"{self.file}: {name} is missing")
        return self.values[name]

    def size(self, name: str, default: int | None = None) -> int:
        """An integer >= 1."""
        return checked(f"{self.file}: {name}", self.get(name, default), Positive)

    def number(self, name: str) -> float:
        """A number > 0."""
        number = real(self.get(name))
        return self.one_of(name, () if number is None or number <= 0 else (number,), "a number > 0")

    def divided(self, name: str, by: str, default: int | None = None) -> tuple[int, int]:
        """Two integers >= 1, of which the second divides the first."""
        whole, part = self.size(name), self.size(by, default)
        if whole % part:
            raise ValueError(f"{self.file}: {by} must divide {name}={whole}, got {part}")
        return whole, part

    def one_of(self, name: str, served: Collection[Any], rule: str = "", default: Any = None) -> Any:
        """A setting that is one of some values."""
        value = self.get(name, default)
        if not any(value is x if isinstance(value, bool) or isinstance(x, bool) else value == x for x in served):
            rule = rule or " or ".join(map(repr, served))
            raise ValueError(f"{self.file}: {name} must be {rule}, got {value!r}")
        return value


# Settings that must have one of these values, of which the first is meant where they are left out.
_SERVED = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False,),
    "tie_word_embeddings": (None, True, False),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "use_sliding_window": (False, True),
    "partial_rotary_factor": (1,),
}
# The scalings of rotary embeddings by Hugging Face's names, and its names of their numbers.
_SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
_NUMBERS = {"original_max_position_embeddings": "original_length", "beta_fast": "fast", "beta_slow": "slow"}
_NUMBERS |= {"low_freq_factor": "low", "high_freq_factor": "high", "truncate": "rounded"}


def described(config: Config) -> tuple["Family", dict[str, Any]]:
    """The architecture, and the arguments of `SparseTransformer`.

    Raises:
      ValueError: see `from_huggingface`.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = near(config.get("model_type"), _FAMILIES)
        raise ValueError(f"{config.file}: model_type: {known}; models of experts or of images are not served")
    for name, served in _SERVED.items():
        config.one_of(name, served, default=served[0])
    settings = family.settings(config)
    count = settings["num_layers"]
    own = [_SLIDING if family.slides(config, i) else _FULL for i in range(count)]
    kinds = config.get("layer_types") or own
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise ValueError(f"{config.file}: layer_types must be {count} times {_FULL!r} or {_SLIDING!r}, got {kinds}")
    if kinds != own and not family.mixes:
        raise ValueError(f"{config.file}: layer_types must be those that this architecture has, {own}, got {kinds}")
    # What layers take in turn, once.
    turn = next(n for n in range(1, count + 1) if kinds == (kinds[:n] * count)[:count])
    windows = {_SLIDING: config.size("sliding_window") - 1} if _SLIDING in kinds else {}
    masks = (Causal() & Window(windows[kind]) if kind in windows else Causal() for kind in kinds[:turn])
    settings["patterns"] = tuple(masks)
    if settings["positions"] == "rope":
        settings["rope"] = tuple(_rope(config, family, kind) for kind in kinds[:turn])
    return family, settings


def _rope(config: Config, family: "Family", kind: str) -> Rope:
    """The rotary embeddings of a kind of layer.

    Raises:
      ValueError: names the file.
    """
    given, older = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    local = kind == _SLIDING and len(family.thetas) > 1
    theta = config.get("rope_local_base_freq" if local else "rope_theta", family.thetas[-1 if local else 0])
    if isinstance(given, dict) and {_FULL, _SLIDING} & {*given}:
        given = given.get(kind)
    elif given and len(family.thetas) > 1:
        raise ValueError(f"{config.file}: rope_parameters must be of {_FULL!r} and of {_SLIDING!r}, got {given!r}")
    elif given and older and given != older:
        raise ValueError(f"{config.file}: rope_parameters and rope_scaling must agree, got {given!r} and {older!r}")
    elif not given:
        given = {} if local else older
    if not isinstance(given, dict):
        raise ValueError(f"{config.file}: rotary embeddings must be an object, got {given!r}")
    given = {word: value for word, value in given.items() if value is not None}
    theta, share = given.pop("rope_theta", theta), given.pop("partial_rotary_factor", 1)
    if share != 1:
        raise ValueError(f"{config.file}: partial_rotary_factor must be 1, got {share!r}")
    kind_of_scaling = given.pop("type", "default")
    name, scaling = given.pop("rope_type", kind_of_scaling), None
    try:
        if name != "default":
            scaling = _scaling(config, str(name), given)
        return Rope(theta, scaling=scaling)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config.file}: rotary embeddings: {error}") from error


def _scaling(config: Config, name: str, given: dict[str, Any]) -> Any:
    """The scaling of a name with the numbers given.

    Raises:
      ValueError, TypeError: an unknown name or number, or a missing or wrong one.
    """
    if name not in _SCALINGS:
        raise ValueError(f"rope_type: {near(name, ['default', *_SCALINGS])}")
    known, needed = {field.name for field in dataclasses.fields(_SCALINGS[name])}, {"factor"}
    if "original_length" in known:
        original = "original_max_position_embeddings"
        length = given.get(original, config.get("max_position_embeddings"))
        given = given | {original: config.get(original, length)}
    if name == "llama3":
        needed |= {"low_freq_factor", "high_freq_factor"}
    unknown, missing = [x for x in given if _NUMBERS.get(x, x) not in known], sorted(needed - {*given})
    if unknown or missing:
        raise ValueError(f"{name!r} {f'has no {some(unknown)}' if unknown else f'needs {some(missing)}'}")
    make: Any = _SCALINGS[name]
    return make(**{str(_NUMBERS.get(word, word)): value for word, value in given.items()})


def _llama(config: Config, *, function: str = "silu", **more: Any) -> dict[str, Any]:
    """What all families share but GPT-2; the MLP's function if none is said, and more are a family's own."""
    features = config.size("hidden_size")
    heads, kv_heads = config.divided("num_attention_heads", "num_key_value_heads", config.size("num_attention_heads"))
    head_dim = config.size("head_dim", features // heads)
    if head_dim % 2:
        raise ValueError(f"{config.file}: head_dim must be even, for pairs of features turn, got {head_dim}")
    biases = ("query", "key", "value", "out") if config.get("attention_bias", False) else ()
    activation = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    mlps = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
    return {
        "vocab_size": config.size("vocab_size"),
        "num_heads": heads,
        "features": features,
        "num_layers": config.size("num_hidden_layers"),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp": mlps[config.one_of(activation, tuple(mlps), default=function)],
        "mlp_features": config.size("intermediate_size"),
        "norm": "rms",
        "norm_epsilon": config.number("rms_norm_eps"),
        "use_bias": (*biases, "mlp") if config.get("mlp_bias", False) else biases,
        "positions": "rope",
        "seq_len": config.size("max_position_embeddings"),
    } | more


def _gemma(config: Config, **more: Any) -> dict[str, Any]:
    more |= {"norm_placement": "sandwich", "embedding_scale": config.size("hidden_size") ** 0.5}
    more["scale"] = config.number("query_pre_attn_scalar") ** -0.5
    caps = {"logits_soft_cap": "attn_logit_softcapping", "final_soft_cap": "final_logit_softcapping"}
    more |= {ours: config.number(theirs) for ours, theirs in caps.items() if config.need(theirs) is not None}
    return _llama(config, function="gelu_pytorch_tanh", **more)


def _gpt2(config: Config) -> dict[str, Any]:
    features, heads = config.divided("n_embd", "n_head")
    config.one_of("activation_function", ("gelu_new", "gelu_pytorch_tanh"), default="gelu_new")
    return {
        "vocab_size": config.size("vocab_size"),
        "num_heads": heads,
        "features": features,
        "num_layers": config.size("n_layer"),
        "mlp": "gelu_tanh",
        "mlp_features": config.size("n_inner", 4 * features),
        "norm_epsilon": config.number("layer_norm_epsilon"),
        "positions": "learned",
        "seq_len": config.size("n_positions"),
    }


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


# --- families --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture: where its parameters are, and what `SparseTransformer` is told.

    Attributes:
      names: modules of ours -> those of the files, {} for the number of the layer; a pair for the second's part of
        queries, keys and values side by side.
      settings: the arguments of `SparseTransformer`, of a configuration.
      slides: whether layer i has a window, where the configuration has no layer_types.
      prefix: what names may begin with, but for that of the head.
      conv1d: whether kernels are [in, out], and not [out, in].
      from_one: whether scales of norms are stored as differences from 1.
      mixes: whether layer_types may mix layers with and without a window.
      thetas: of the rotary embeddings of layers without a window and of those with one, where the configuration has
        none; two where they differ, and then only the first are scaled.
    """

    names: Mapping[str, str | tuple[str, int]]
    settings: Callable[[Config], dict[str, Any]]
    slides: Callable[[Config, int], bool] = lambda config, i: False
    prefix: str = "model."
    conv1d: bool = False
    from_one: bool = False
    mixes: bool = False
    thetas: tuple[float, ...] = (10000.0,)


_LLAMA = {
    "token_embedding": "embed_tokens",
    "final_norm": "norm",
    "head": "lm_head",
    "blocks.attention_norm": "layers.{}.input_layernorm",
    "blocks.attention.query": "layers.{}.self_attn.q_proj",
    "blocks.attention.key": "layers.{}.self_attn.k_proj",
    "blocks.attention.value": "layers.{}.self_attn.v_proj",
    "blocks.attention.out": "layers.{}.self_attn.o_proj",
    "blocks.attention.query_ln": "layers.{}.self_attn.q_norm",
    "blocks.attention.key_ln": "layers.{}.self_attn.k_norm",
    "blocks.mlp_norm": "layers.{}.post_attention_layernorm",
    "blocks.mlp_gate": "layers.{}.mlp.gate_proj",
    "blocks.mlp_in": "layers.{}.mlp.up_proj",
    "blocks.mlp_out": "layers.{}.mlp.down_proj",
}
_POST = {
    "blocks.attention_out_norm": "layers.{}.post_attention_layernorm",
    "blocks.mlp_out_norm": "layers.{}.post_feedforward_layernorm",
}
_OLMO2 = _LLAMA | _POST
_GEMMA = _OLMO2 | {"blocks.mlp_norm": "layers.{}.pre_feedforward_layernorm"}
_GPT2 = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "final_norm": "ln_f",
    "head": "lm_head",
    "blocks.attention_norm": "h.{}.ln_1",
    "blocks.attention.query": ("h.{}.attn.c_attn", 0),
    "blocks.attention.key": ("h.{}.attn.c_attn", 1),
    "blocks.attention.value": ("h.{}.attn.c_attn", 2),
    "blocks.attention.out": "h.{}.attn.c_proj",
    "blocks.mlp_norm": "h.{}.ln_2",
    "blocks.mlp_in": "h.{}.mlp.c_fc",
    "blocks.mlp_out": "h.{}.mlp.c_proj",
}


def _slides_from(config: Config, i: int) -> bool:
    """Whether layer i of Qwen has a window."""
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return False
    return i >= checked(f"{config.file}: max_window_layers", config.get("max_window_layers"), Natural)


def _gemma3(config: Config) -> dict[str, Any]:
    config.one_of("attn_logit_softcapping", (None,))
    return _gemma(config, normalize_qk=True)


_FAMILIES = {
    "gpt2": Family(_GPT2, _gpt2, prefix="transformer.", conv1d=True),
    "llama": Family(_LLAMA, _llama),
    "mistral": Family(_LLAMA, _llama, lambda config, i: config.need("sliding_window") is not None),
    "qwen2": Family(_LLAMA, functools.partial(_llama, use_bias=("query", "key", "value")), _slides_from, mixes=True),
    "qwen3": Family(_LLAMA, functools.partial(_llama, normalize_qk=True), _slides_from, mixes=True),
    "gemma2": Family(_GEMMA, _gemma, lambda config, i: i % 2 == 0, from_one=True, mixes=True),
    "gemma3_text": Family(
        _GEMMA,
        _gemma3,
        lambda config, i: bool((i + 1) % config.size("sliding_window_pattern", 6)),
        from_one=True,
        mixes=True,
        thetas=(1000000.0, 10000.0),
    ),
    "olmo2": Family(_OLMO2, functools.partial(_llama, norm_placement="post", normalize_qk="rms_joint")),
}
_FULL, _SLIDING, _HEAD = "full_attention", "sliding_attention", "lm_head.weight"
# What older files hold beside the weights: frequencies, and GPT-2's causal mask and its fill value.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")


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


def _read(places: list[Place], files: Mapping[str, Stored], dtype: Dtype) -> np.ndarray:
    """A parameter of one layer, or of all that are scanned over."""
    value = np.empty((len(places), *places[0].shape), dtype)
    for layer, place in zip(value, places, strict=True):
        place.read(files[place.name], layer)
    return value


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
