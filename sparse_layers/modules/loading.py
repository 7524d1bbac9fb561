"""Dense weights into sparse layers: Flax's multi-head attention, NNX or Linen, and GPT-2 as Hugging Face stores it."""

import json
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.typing import Dtype, PathParts

from .attention import Pattern, SparseSelfAttention
from .transformer import SparseTransformer


def from_nnx(dense: nnx.MultiHeadAttention, *, pattern: Pattern, seq_len: int, **options: Any) -> SparseSelfAttention:
    """The sparse layer with the settings and copies of the parameters of a dense NNX layer.

    Heads, key and value heads, features, biases, QK norm, dtypes, precision and the parameters' metadata are those of
    the dense layer, which is left as it is. With ``pattern="all"`` the outputs are those of the dense layer under a
    causal mask.

    Args:
      dense: a ``flax.nnx.MultiHeadAttention`` for self-attention.
      pattern, seq_len: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention` that the dense layer does not fix: ``rope_theta``,
        ``use_sinks``, ``implementation``, ...; and ``dtype``, ``param_dtype``, ``precision`` to change them.

    Returns:
      A `SparseSelfAttention`; its sinks, if any, start at zero.

    Raises:
      TypeError: dense is no ``flax.nnx.MultiHeadAttention``.
      ValueError: what cannot be taken over: dropout of the weights, keys of other features than the queries', an
        attention function other than Flax's own, parameters that such a layer does not have (of an adapter, say);
        an option that the dense layer fixes; and what `SparseSelfAttention` refuses.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> from sparse_layers.modules.loading import from_nnx
      >>> dense = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> sparse = from_nnx(dense, pattern="local:local_attn_ctx=4", seq_len=16)
      >>> sparse(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
    """
    if not isinstance(dense, nnx.MultiHeadAttention):
        raise TypeError(f"dense must be a flax.nnx.MultiHeadAttention, got {type(dense).__name__}")
    _refuse_fixed(options, _FIXED_BY_LAYER, "the dense layer")
    if dense.dropout_rate:
        raise ValueError(
            f"dropout_rate: the dense layer drops attention weights (rate {dense.dropout_rate}), which block-sparse "
            "attention never forms; set dense.dropout_rate = 0.0 first and apply dropout to the layer's output (the "
            "residual) instead"
        )
    if dense.in_kv_features != dense.in_features:
        raise ValueError(
            f"in_kv_features={dense.in_kv_features} differs from in_features={dense.in_features}: the layer takes its "
            "keys from another input, and SparseSelfAttention is self-attention; use make_attention_fn or the op"
        )
    if dense.attention_fn is not nnx.dot_product_attention:
        raise ValueError(
            f"attention_fn: the dense layer has one of its own, {dense.attention_fn!r}; what it does besides dense "
            "attention (rotary embeddings, caps, ...) cannot be seen from here. Set dense.attention_fn = "
            "flax.nnx.dot_product_attention first, and say the rest by options (rope_theta, logits_soft_cap, scale)"
        )
    sizes = ("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads")
    kept = ("use_bias", "normalize_qk", "dtype", "param_dtype", "precision", "qkv_promote_dtype", "out_promote_dtype")
    kept += ("ln_promote_dtype", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls")
    settings = {name: getattr(dense, name) for name in sizes + kept} | options
    layer = _layer(pattern=pattern, seq_len=seq_len, **settings)
    # A dense layer may have been cast after its construction: without a wish, its arrays are taken as they are.
    convert = jnp.copy if "param_dtype" not in options else lambda x: jnp.array(x, options["param_dtype"])
    state = jax.tree.map(convert, nnx.state(dense, nnx.Param))
    _fill(layer, dict(nnx.to_flat_state(state)), "the dense layer")
    return layer


def from_linen(params: Mapping[str, Any], *, pattern: Pattern, seq_len: int, **options: Any) -> SparseSelfAttention:
    """The sparse layer with copies of the parameters of a dense Linen layer.

    With ``pattern="all"`` the outputs are those of the dense layer under a causal mask.

    Args:
      params: of ``flax.linen.MultiHeadDotProductAttention``, ``MultiHeadAttention`` or ``SelfAttention``, the
        ``"params"`` of its variables: a mapping with the entries query, key and value {kernel [F, heads, H], bias
        [heads, H]}, out {kernel [N, H, F'], bias [F']} and, of a layer with QK norm, query_ln and key_ln {scale [H]};
        either all biases or none. Sizes are those of the shapes.
      pattern, seq_len: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention` that the parameters do not fix: ``dtype`` (parameters do
        not tell it), ``rope_theta``, ``use_sinks``, ``implementation``, ...; ``param_dtype`` to change it.

    Returns:
      A `SparseSelfAttention`; its sinks, if any, start at zero.

    Raises:
      ValueError: unknown or missing names, shapes that do not fit, by name; an option that the parameters fix; and what
        `SparseSelfAttention` refuses.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import linen
      >>> from sparse_layers.modules.loading import from_linen
      >>> x = jnp.ones((1, 16, 8))
      >>> variables = linen.MultiHeadDotProductAttention(num_heads=2).init(jax.random.key(0), x)
      >>> from_linen(variables["params"], pattern="local:local_attn_ctx=4", seq_len=16)(x).shape
      (1, 16, 8)
    """
    _refuse_fixed(options, _FIXED_BY_LAYER, "the parameters")
    if set(params) == {"params"}:
        raise ValueError("params: got a layer's variables; pass variables['params']")
    values = {
        (name, leaf): array
        for name, leaves in meta.unbox(dict(params)).items()
        for leaf, array in (leaves.items() if isinstance(leaves, Mapping) else [("", leaves)])
    }
    names = {".".join(path).rstrip("."): jnp.shape(array) for path, array in values.items()}
    projections, norms = ("query", "key", "value", "out"), ("query_ln", "key_ln")
    use_bias = any(name.endswith(".bias") for name in names)
    normalize_qk = any(name.partition(".")[0] in norms for name in names)
    wanted = [f"{name}.kernel" for name in projections]
    wanted += [f"{name}.bias" for name in projections if use_bias]
    wanted += [f"{name}.scale" for name in norms if normalize_qk]
    _refuse_names(names, wanted, "params")
    for name in ("query.kernel", "key.kernel", "out.kernel"):
        if len(names[name]) != 3:
            raise ValueError(f"params: {name} must have three axes, got shape {names[name]}")
    features, heads, size = names["query.kernel"]
    kv_heads, out = names["key.kernel"][1], names["out.kernel"][2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"params: the {kv_heads} heads of key.kernel must divide the {heads} of query.kernel")
    shapes = {name: (features, n, size) for name, n in (("query", heads), ("key", kv_heads), ("value", kv_heads))}
    fitting = {f"{name}.kernel": shape for name, shape in shapes.items()}
    fitting |= {f"{name}.bias": shape[1:] for name, shape in shapes.items()}
    fitting |= {"out.kernel": (heads, size, out), "out.bias": (out,)} | {f"{name}.scale": (size,) for name in norms}
    _refuse_shapes(names, fitting, "params")
    param_dtype = options.pop("param_dtype", values["query", "kernel"].dtype)
    layer = _layer(
        num_heads=heads,
        in_features=features,
        qkv_features=heads * size,
        out_features=out,
        num_kv_heads=kv_heads,
        pattern=pattern,
        seq_len=seq_len,
        use_bias=use_bias,
        normalize_qk=normalize_qk,
        param_dtype=param_dtype,
        **options,
    )
    _fill(layer, {path: jnp.array(array, param_dtype) for path, array in values.items()}, "params")
    return layer


def from_gpt2(
    path: str | os.PathLike[str],
    *,
    patterns: Pattern = "all",
    seq_len: int | None = None,
    num_heads: int | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> SparseTransformer:
    """The sparse language model with the weights of a GPT-2 that Hugging Face's ``save_pretrained`` wrote.

    Needs the package ``safetensors``; nothing is downloaded. With ``patterns="all"`` the logits are GPT-2's.

    Args:
      path: a ``.safetensors`` file in float32, float16 or bfloat16, or a folder with a ``model.safetensors``. A
        ``config.json`` beside the file is read for the number of heads, the norms' epsilon (without it 1e-5, as in all
        released sizes) and what a model of another kind would say there.
      patterns: see `SparseTransformer`; a tuple is cycled over the layers.
      seq_len: the longest input, in tokens; defaults to the file's positions, of which a smaller one keeps the first.
      num_heads: number of heads; defaults to the configuration's, or to one for each 64 features, as in all released
        sizes.
      dtype: of the computation; None: that of the parameters.
      param_dtype: of the parameters.
      rngs: random number generators for dropout, if options ask for it; None for ``nnx.Rngs(0)``.
      **options: all other arguments of `SparseTransformer` that the file does not fix: ``dropout_rate``, ``remat``,
        ``implementation``, ``use_sinks`` (sinks start at zero), ...

    Returns:
      A `SparseTransformer` with learned positions. Its head is the token embedding, unless the file has an
      ``lm_head.weight`` of its own.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the package ``safetensors`` is missing.
      ValueError: the file or its configuration cannot be read; unknown or missing tensors, dtypes or shapes that do not
        fit, by name; a configuration of another kind (another activation, logits scaled by layer, ...); seq_len beyond
        the file's positions; a number of heads that does not divide the features; an option that the file fixes;
        and what `SparseTransformer` refuses.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, numpy as np, sparse_layers as sl
      >>> from safetensors.numpy import save_file
      >>> from sparse_layers.modules.loading import from_gpt2
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

    _refuse_fixed(options, _FIXED_BY_GPT2, "the file")
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

            def tensor(name: str) -> np.ndarray:
                return np.asarray(handle.get_tensor(names[name]), jnp.dtype(param_dtype))

            values = _gpt2_values(tensor, names, num_heads, seq_len)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cannot be read as a safetensors file: {error}") from error

    layers = sum(name.endswith(".ln_1.bias") for name in names)

    @nnx.jit  # the compiler leaves out the initial values that the file's replace
    def build(rngs: nnx.Rngs, values: dict[PathParts, Any]) -> SparseTransformer:
        model = SparseTransformer(
            vocab_size,
            features,
            num_heads,
            layers,
            patterns=patterns,
            seq_len=seq_len,
            positions="learned",
            tie_embeddings=("head", "kernel") not in values,
            norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
            mlp="gelu_tanh",
            mlp_features=values["blocks", 0, "mlp_in", "kernel"].shape[1],
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
            **options,
        )
        _fill(model, values, str(file))
        return model

    return build(nnx.Rngs(0) if rngs is None else rngs, values)


# --- GPT-2's files ---------------------------------------------------------------------------------------------------

_FIXED_BY_LAYER = ("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads", "in_kv_features")
_FIXED_BY_LAYER += ("use_bias", "normalize_qk", "rngs")
_FIXED_BY_GPT2 = ("vocab_size", "features", "num_layers", "positions", "tie_embeddings", "norm", "norm_epsilon", "mlp")
_FIXED_BY_GPT2 += ("mlp_features", "use_bias", "num_kv_heads", "normalize_qk")

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
}


def _gpt2_file(path: str | os.PathLike[str]) -> tuple[pathlib.Path, dict[str, Any]]:
    """The file with the tensors, and the configuration beside it: {} without one."""
    file = pathlib.Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
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
        if not isinstance(config.get(name, 1), int) or config.get(name, 1) < 1:
            raise ValueError(f"{beside}: {name} must be an integer >= 1, got {config[name]!r}")
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
    _refuse_names(names, wanted + ["lm_head.weight"] * own_head, str(file))
    odd = [f"{name} ({dtypes[n]})" for name, n in names.items() if dtypes[n] not in ("F32", "F16", "BF16")]
    if odd:
        raise ValueError(f"{file}: tensors must be float32, float16 or bfloat16, got {_some(odd)}")
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
    _refuse_shapes(found, fitting, str(file))
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


def _gpt2_values(tensor: Any, names: Collection[str], heads: int, seq_len: int) -> dict[PathParts, np.ndarray]:
    """The parameters of a `SparseTransformer` by their paths; tensor(name) reads one of the file."""
    values: dict[PathParts, np.ndarray] = {
        ("token_embedding", "embedding"): tensor("wte.weight"),
        ("position_embedding", "embedding"): tensor("wpe.weight")[:seq_len],
        ("final_norm", "scale"): tensor("ln_f.weight"),
        ("final_norm", "bias"): tensor("ln_f.bias"),
    }
    features = values["final_norm", "bias"].size
    size = features // heads
    if "lm_head.weight" in names:
        head = tensor("lm_head.weight")
        if not np.array_equal(head, values["token_embedding", "embedding"]):
            values["head", "kernel"] = head.T
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


# --- shared ----------------------------------------------------------------------------------------------------------


def _layer(**settings: Any) -> SparseSelfAttention:
    """A layer whose parameters are to be replaced: drawing them would be for nothing."""
    return SparseSelfAttention(**{"kernel_init": nnx.initializers.zeros, **settings, "rngs": nnx.Rngs(0)})


def _fill(module: nnx.Module, values: Mapping[PathParts, Any], source: str) -> None:
    """Puts values, arrays or variables, in the place of the module's parameters; only sinks may stay as they are.

    Raises:
      ValueError: other parameters are there than the module has, or of other shapes.
    """
    params: dict[PathParts, Any] = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    params = {path: param for path, param in params.items() if path in values or path[-1] != "sinks"}
    dotted = {path: ".".join(map(str, path)) for path in (*params, *values)}
    _refuse_names([dotted[path] for path in values], [dotted[path] for path in params], source)
    given, wanted = ({dotted[path]: jnp.shape(x) for path, x in side.items()} for side in (values, params))
    _refuse_shapes(given, wanted, source)
    filled = [(path, x if isinstance(x, nnx.Variable) else params[path].replace(x)) for path, x in values.items()]
    nnx.update(module, nnx.from_flat_state(filled))


def _refuse_fixed(options: Iterable[str], fixed: Collection[str], source: str) -> None:
    given = [name for name in options if name in fixed]
    if given:
        raise ValueError(f"{given[0]}: comes from {source} and cannot be changed")


def _refuse_names(given: Collection[str], wanted: Collection[str], source: str) -> None:
    unknown, missing = ([n for n in a if n not in set(b)] for a, b in ((given, wanted), (wanted, given)))
    wrong = [f"{kind} {_some(names)}" for kind, names in (("unknown", unknown), ("missing", missing)) if names]
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")


def _refuse_shapes(given: Mapping[str, tuple], wanted: Mapping[str, tuple], source: str) -> None:
    wrong = [f"{n} {shape}, not {wanted[n]}" for n, shape in given.items() if n in wanted and shape != wanted[n]]
    if wrong:
        raise ValueError(f"{source}: shapes that do not fit: {_some(wrong)}")


def _some(names: Collection[str]) -> str:
    """The first few, and how many more."""
    return ", ".join(list(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
