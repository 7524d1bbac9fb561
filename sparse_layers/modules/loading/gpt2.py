"""`from_gpt2`: GPT-2 as Hugging Face stores it, as a sparse language model."""

import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, PathParts

from ...masks.options import Positive, checked, refuse_unknown
from ..attention_fn import Patterns
from ..settings import LoadedModelOptions, check_settings, check_stream
from ..transformer import SparseTransformer
from .dense import fill, refuse_fixed, refuse_names, refuse_shapes, some


def from_gpt2(
    path: str | os.PathLike[str],
    *,
    patterns: Patterns = "all",
    seq_len: int | None = None,
    num_heads: int | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    rngs: nnx.Rngs | None = None,
    **options: Unpack[LoadedModelOptions],
) -> SparseTransformer:
    """The sparse language model with the weights of a GPT-2 that Hugging Face's ``save_pretrained`` wrote.

    Needs the package ``safetensors``; nothing is downloaded. With ``patterns="all"`` the logits are GPT-2's.

    Args:
      path: a ``.safetensors`` file in float32, float16 or bfloat16, or a folder with a ``model.safetensors``. A
        ``config.json`` beside the file is read for the number of heads, the norms' epsilon (without it 1e-5, as in all
        released sizes), whether the head is tied, and what a model of another kind or size would say there.
      patterns: see `SparseTransformer`; a tuple is cycled over the layers.
      seq_len: the longest input, in tokens; defaults to the file's positions, of which a smaller one keeps the first.
      num_heads: number of heads; defaults to the configuration's, or to one for each 64 features, as in all released
        sizes.
      dtype: of the computation; None: that of the parameters.
      param_dtype: of the parameters.
      rngs: random number generators for dropout: with a dropout_rate, one key of the stream ``dropout`` (or
        ``default``) is drawn, otherwise none; None for ``nnx.Rngs(0)``.
      **options: all other arguments of `SparseTransformer` that the file does not fix: ``dropout_rate``, ``remat``,
        ``scan_layers``, ``implementation``, ``use_sinks`` (sinks start at zero), ...

    Returns:
      A `SparseTransformer` with learned positions. Its head is a parameter of its own where the file has an
      ``lm_head.weight`` that differs from the token embedding, or any where the configuration says
      ``tie_word_embeddings: false``. Otherwise, and so without a configuration if the two are equal or there is only
      the one, the head is the token embedding.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: path is no path, rngs are no ``nnx.Rngs``, an unknown option, patterns that are none.
      ImportError: the package ``safetensors`` is missing.
      ValueError: the file or its configuration cannot be read, or path is the index of several files; unknown or
        missing tensors, dtypes or shapes that do not fit, by name; a configuration of another kind (another activation,
        logits scaled by layer, ...) or one that contradicts the file (sizes, ``tie_word_embeddings: true`` with an
        ``lm_head.weight`` that differs); seq_len beyond the file's positions; a number of heads that does not divide
        the features; seq_len or num_heads that are no integers >= 1; a param_dtype that is no float; rngs without a
        stream for the dropout asked for; an option that the file fixes; and what `SparseTransformer` refuses.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, numpy as np, sparse_layers as sl
      >>> from safetensors.numpy import save_file
      >>> from sparse_layers.modules.loading.gpt2 import from_gpt2
      >>> shapes = {"wte.weight": [50, 8], "wpe.weight": [16, 8], "ln_f.weight": [8], "h.0.ln_1.weight": [8]}
      >>> shapes |= {"h.0.ln_2.weight": [8], "h.0.attn.c_attn.weight": [8, 24], "h.0.attn.c_proj.weight": [8, 8]}
      >>> shapes |= {"h.0.mlp.c_fc.weight": [8, 32], "h.0.mlp.c_proj.weight": [32, 8]}
      >>> shapes |= {f"{name[:-7]}.bias": shape[-1:] for name, shape in shapes.items() if name[0] in "lh"}
      >>> with tempfile.TemporaryDirectory() as folder:  # a real one: "model.safetensors" of openai-community/gpt2
      ...     file = pathlib.Path(folder, "model.safetensors")
      ...     save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, file)
      ...     model = from_gpt2(file, patterns="local:local_attn_ctx=4", num_heads=2)
      >>> model(jnp.zeros((1, 16), int)).shape
      (1, 16, 50)

    References:
      Radford et al.: Language Models are Unsupervised Multitask Learners, 2019. Names and layout: GPT2LMHeadModel of
      Hugging Face's transformers, whose Conv1D keeps its weights [in, out].
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("from_gpt2 needs the package safetensors: pip install safetensors") from error

    refuse_fixed(options, _FIXED_BY_GPT2, "the file")
    refuse_unknown(from_gpt2, options)
    given = {"seq_len": seq_len, "num_heads": num_heads, "rngs": rngs}
    check_settings(dtype=dtype, param_dtype=param_dtype, **{n: x for n, x in given.items() if x is not None}, **options)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be that of a file or a folder, got {type(path).__name__}: {path!r}")
    streams = _streams(rngs, options.get("dropout_rate"))
    file, config = _gpt2_file(path)
    try:
        with safe_open(file, framework="numpy") as handle:
            stored = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in stored.items()}
            dtypes = {name: tensor.get_dtype() for name, tensor in stored.items()}
            names = _gpt2_names(file, shapes, dtypes, config)
            (vocab_size, features), positions = shapes[names["wte.weight"]], shapes[names["wpe.weight"]][0]
            num_heads = _gpt2_heads(file, features, config, num_heads)
            seq_len = positions if seq_len is None else seq_len
            if seq_len > positions:
                raise ValueError(
                    f"seq_len={seq_len}: {file} has {positions} positions, and no more can be made of them"
                )

            def tensor(name: str, dtype: Dtype = param_dtype) -> np.ndarray:
                return np.asarray(handle.get_tensor(names[name]), jnp.dtype(dtype))

            own_head = _gpt2_own_head(file, tensor, names, config)
            values = _gpt2_values(tensor, names, num_heads, seq_len, own_head)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cannot be read as a safetensors file: {error}") from error

    layers = sum(name.endswith(".ln_1.bias") for name in names)

    @nnx.jit  # the compiler leaves out the initial values that the file's replace
    def build(rngs: nnx.Rngs, values: dict[PathParts, Any]) -> SparseTransformer:
        model = SparseTransformer(
            vocab_size,
            num_heads,
            features,
            layers,
            patterns=patterns,
            seq_len=seq_len,
            positions="learned",
            tie_embeddings=not own_head,
            norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
            mlp="gelu_tanh",
            mlp_features=values["blocks", 0, "mlp_in", "kernel"].shape[1],
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
            **options,
        )
        fill(model, _scanned(values, layers, len(model.blocks)) if model.scan_layers else values, str(file))
        return model

    return build(streams, values)


# --- the files -------------------------------------------------------------------------------------------------------

_FIXED_BY_GPT2 = ("vocab_size", "features", "num_layers", "positions", "tie_embeddings", "norm", "norm_epsilon", "mlp")
_FIXED_BY_GPT2 += ("mlp_features", "use_bias", "num_kv_heads", "normalize_qk", "position_stride", "rope_theta")
_FIXED_BY_GPT2 += ("rope", "in_features", "head_dim", "qkv_features", "out_features", "in_kv_features", "attention_fn")

# A block's layers, ours and theirs; all have a weight and a bias. Attention's input projections are in one there.
_BLOCK = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
# What the model does unless its configuration says otherwise, and all that SparseTransformer can do.
_CONFIG = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (None, True, False),
}


def _gpt2_file(path: str | os.PathLike[str]) -> tuple[pathlib.Path, dict[str, Any]]:
    """The file with the tensors, and the configuration beside it: {} without one."""
    file = pathlib.Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    if file.name.endswith(".index.json"):
        raise ValueError(f"{file}: says that the model is in several files: write it as one first, and pass that one")
    if not file.is_file():
        several = list(file.parent.glob("*.safetensors.index.json"))
        hint = f"; {several[0].name} says that the model is in several files: write it as one first" if several else ""
        raise FileNotFoundError(f"{file}: no such file{hint}")
    beside = file.with_name("config.json")
    if not beside.is_file():
        return file, {}
    try:
        config = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{beside}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{beside}: must hold an object, got {type(config).__name__}")
    for name, served in _CONFIG.items():
        if config.get(name, served[0]) not in served:
            raise ValueError(f"{beside}: {name}={config[name]!r} is not served, only {' or '.join(map(repr, served))}")
    for name in ("n_layer", "n_head"):
        checked(f"{beside}: {name}", config.get(name, 1), Positive)
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise ValueError(f"{beside}: layer_norm_epsilon must be a number > 0, got {epsilon!r}")
    return file, config


def _gpt2_names(
    file: pathlib.Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str], config: dict[str, Any]
) -> dict[str, str]:
    """Tensors by their short names -> their names in the file, whose names, shapes and dtypes are checked."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in shapes) else ""
    # Older files hold the causal mask and its fill value among the weights.
    buffers = re.compile(re.escape(prefix) + r"h\.\d+\.attn\.(bias|masked_bias)")
    names = {n.removeprefix(prefix): n for n in shapes if n.startswith(prefix) and not buffers.fullmatch(n)}
    others = [n for n in shapes if not n.startswith(prefix)]
    names |= {n if n == "lm_head.weight" else f"{n} (without {prefix})": n for n in others}
    numbers = [int(match[1]) for name in names if (match := re.match(r"h\.(\d+)\.", name))]
    layers = config.get("n_layer", 1 + max(numbers, default=0))
    theirs = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    pairs = ["ln_f", *(f"h.{i}.{name}" for i in range(layers) for name in theirs)]
    wanted = ["wte.weight", "wpe.weight", *(f"{name}.{part}" for name in pairs for part in ("weight", "bias"))]
    own_head = "lm_head.weight" in names or config.get("tie_word_embeddings") is False
    refuse_names(names, wanted + ["lm_head.weight"] * own_head, str(file))
    odd = [f"{name} ({dtypes[n]})" for name, n in names.items() if dtypes[n] not in ("F32", "F16", "BF16")]
    if odd:
        raise ValueError(f"{file}: tensors must be float32, float16 or bfloat16, got {some(odd)}")
    found = {name: shapes[n] for name, n in names.items()}
    for name in ("wte.weight", "wpe.weight", "h.0.mlp.c_fc.weight"):
        if len(found[name]) != 2:
            raise ValueError(f"{file}: {name} must have two axes, got shape {found[name]}")
    (vocab, features), hidden = found["wte.weight"], found["h.0.mlp.c_fc.weight"][1]
    fitting = {"wpe.weight": (found["wpe.weight"][0], features), "lm_head.weight": (vocab, features)}
    sizes = {"attn.c_attn": (features, 3 * features), "attn.c_proj": (features, features)}
    sizes |= {"mlp.c_fc": (features, hidden), "mlp.c_proj": (hidden, features)}
    for name in pairs:
        shape = next((size for layer, size in sizes.items() if name.endswith(layer)), (features,))
        fitting |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    refuse_shapes(found, fitting, str(file))
    stored = {"vocab_size": vocab, "n_embd": features, "n_positions": found["wpe.weight"][0], "n_inner": hidden}
    for name, size in stored.items():
        said = config.get(name, size)
        if said != size and not (name == "n_inner" and said is None):  # null for that of the released sizes
            raise ValueError(f"{file}: {name}={said!r} in config.json, but the tensors have {size}")
    return names


def _gpt2_heads(file: pathlib.Path, features: int, config: dict[str, Any], num_heads: int | None) -> int:
    if num_heads is None and "n_head" not in config and features % 64:
        raise ValueError(
            f"num_heads: {file} does not tell, and its {features} features are no multiple of 64; pass num_heads"
        )
    heads = config.get("n_head", features // 64) if num_heads is None else num_heads
    if heads < 1 or features % heads:
        raise ValueError(f"num_heads={heads} must divide the {features} features of {file}")
    return heads


def _gpt2_own_head(
    file: pathlib.Path, tensor: Callable[..., np.ndarray], names: Collection[str], config: Mapping[str, Any]
) -> bool:
    """Whether the head is a parameter of its own; read in float32, which holds every value of the files exactly."""
    if "lm_head.weight" not in names:
        return False
    tied = config.get("tie_word_embeddings")
    differs = not np.array_equal(tensor("lm_head.weight", np.float32), tensor("wte.weight", np.float32))
    if tied and differs:
        raise ValueError(
            f"{file}: lm_head.weight differs from wte.weight, but config.json says tie_word_embeddings=true; leave out "
            "one of the two"
        )
    return differs or tied is False


def _gpt2_values(
    tensor: Callable[[str], np.ndarray], names: Collection[str], heads: int, seq_len: int, own_head: bool
) -> dict[PathParts, np.ndarray]:
    """The parameters of a `SparseTransformer` by their paths; tensor(name) reads one of the file."""
    values: dict[PathParts, np.ndarray] = {
        ("token_embedding", "embedding"): tensor("wte.weight"),
        ("position_embedding", "embedding"): tensor("wpe.weight")[:seq_len],
        ("final_norm", "scale"): tensor("ln_f.weight"),
        ("final_norm", "bias"): tensor("ln_f.bias"),
    }
    features = values["final_norm", "bias"].size
    size = features // heads
    if own_head:
        values["head", "kernel"] = tensor("lm_head.weight").T
    for i in range(sum(name.endswith("ln_1.bias") for name in names)):
        for ours, theirs in _BLOCK.items():
            weight = tensor(f"h.{i}.{theirs}.weight")
            if ours == "attention.out":
                weight = weight.reshape(heads, size, features)
            at: PathParts = ("blocks", i, *ours.split("."))
            values[*at, "scale" if ours.endswith("norm") else "kernel"] = weight
            values[*at, "bias"] = tensor(f"h.{i}.{theirs}.bias")
        kernels = tensor(f"h.{i}.attn.c_attn.weight").reshape(features, 3, heads, size)
        biases = tensor(f"h.{i}.attn.c_attn.bias").reshape(3, heads, size)
        for part, name in enumerate(("query", "key", "value")):
            values["blocks", i, "attention", name, "kernel"] = kernels[:, part]
            values["blocks", i, "attention", name, "bias"] = biases[part]
    return values


def _scanned(values: Mapping[PathParts, Any], layers: int, blocks: int) -> dict[PathParts, Any]:
    """The values for ``scan_layers``: layer i is turn i // blocks of block i % blocks, along a new first axis."""
    found = {path: value for path, value in values.items() if path[0] != "blocks"}
    for rest in [path[2:] for path in values if path[:2] == ("blocks", 0)]:
        for block in range(blocks):
            found["blocks", block, *rest] = jnp.stack(
                [values["blocks", i, *rest] for i in range(block, layers, blocks)]
            )
    return found


def _streams(rngs: nnx.Rngs | None, dropout_rate: Any) -> nnx.Rngs:
    """What a model is built with: initial values are replaced, so only dropout's key is the caller's."""
    if not dropout_rate:
        return nnx.Rngs(0)
    rngs = nnx.Rngs(0) if rngs is None else rngs
    check_stream(rngs, "dropout", f"dropout_rate={dropout_rate}")
    return nnx.Rngs(params=0, dropout=rngs.dropout())
