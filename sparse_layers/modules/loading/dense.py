"""`from_nnx` and `from_linen`: sparse layers with the parameters of Flax's dense attention layers."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from flax.typing import PathParts

from ...arguments.checks import refuse_unknown
from ..attention import SparseSelfAttention
from ..attention_fn import Pattern
from ..options import LoadedLayerOptions
from ..settings import check_settings

_FIXED_BY_LAYER = ("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads", "in_kv_features")
_FIXED_BY_LAYER += ("head_dim", "use_bias", "rngs")
_OPTIONAL = "sinks", "bias_table"  # parameters that a dense layer does not have
_NORMS = {nnx.LayerNorm: "layer", nnx.RMSNorm: "rms"}


def from_nnx(
    dense: nnx.MultiHeadAttention, *, pattern: Pattern, seq_len: int, **options: Unpack[LoadedLayerOptions]
) -> SparseSelfAttention:
    """Makes the sparse layer with the settings and copies of the parameters of a dense NNX layer.

    Heads, key and value heads, features, biases, QK norm, dtypes, precision and the parameters' metadata are those of
    the dense layer, which does not change. With ``pattern="all"`` the outputs are those of the dense layer under a
    causal mask.

    Args:
      dense: a ``flax.nnx.MultiHeadAttention`` for self-attention.
      pattern, seq_len: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention` that the dense layer does not fix: ``rope``,
        ``use_sinks``, ``implementation``, ...; and ``dtype``, ``param_dtype``, ``precision`` to change them.

    Returns:
      A `SparseSelfAttention`; its sinks and bias_table, if any, start at zero.

    Raises:
      TypeError: a dense that is not a ``flax.nnx.MultiHeadAttention``, or is a `SparseSelfAttention` already; an
        unknown option.
      ValueError: settings that no sparse layer has: dropout of the weights, keys and queries of different features, an
        attention function other than Flax's own, parameters that such a layer does not have (an adapter's, for
        example); an option that the dense layer fixes; a param_dtype that is not floating; and errors of
        `SparseSelfAttention`.

    Example:
      >>> import jax.numpy as jnp, sparse_layers as sl
      >>> from flax import nnx
      >>> dense = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> sparse = sl.from_nnx(dense, pattern="local:local_attn_ctx=4", seq_len=16)
      >>> sparse(jnp.ones((1, 16, 8))).shape
      (1, 16, 8)
    """
    if not isinstance(dense, nnx.MultiHeadAttention):
        raise TypeError(f"dense must be a flax.nnx.MultiHeadAttention, got {type(dense).__name__}")
    if isinstance(dense, SparseSelfAttention):
        raise TypeError(
            "dense is a SparseSelfAttention already; for another pattern, make a layer with it and the same settings "
            "and copy the parameters: nnx.update(layer, nnx.state(dense, nnx.Param))"
        )
    refuse_fixed(options, (*_FIXED_BY_LAYER, "normalize_qk", "norm_epsilon"), "the dense layer")
    refuse_unknown(from_nnx, options)
    check_settings(**options)
    if dense.dropout_rate:
        raise ValueError(
            f"dropout_rate: the dense layer drops attention weights (rate {dense.dropout_rate}), which block-sparse "
            "attention never forms; set dense.dropout_rate = 0.0 first and apply dropout to the layer's output (the "
            "residual) instead"
        )
    if dense.in_kv_features != dense.in_features:
        raise ValueError(
            f"in_kv_features={dense.in_kv_features} differs from in_features={dense.in_features}: the layer takes its "
            "keys from another input, and SparseSelfAttention is self-attention; make a SparseCrossAttention and copy "
            "the parameters: nnx.update(layer, nnx.state(dense, nnx.Param))"
        )
    if dense.attention_fn is not nnx.dot_product_attention:
        raise ValueError(
            f"attention_fn: the dense layer has one of its own, {dense.attention_fn!r}; what it does besides dense "
            "attention (rotary embeddings, caps, ...) cannot be seen from here. Set dense.attention_fn = "
            "flax.nnx.dot_product_attention first, and pass the rest as options (rope, logits_soft_cap, scale)"
        )
    sizes = ("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads")
    copied = ("use_bias", "dtype", "param_dtype", "precision", "qkv_promote_dtype", "out_promote_dtype")
    copied += ("ln_promote_dtype", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls")
    settings = {name: getattr(dense, name) for name in sizes + copied} | _qk_norm(dense) | options
    layer = _make_layer(pattern=pattern, seq_len=seq_len, **settings)
    # A dense layer may have been cast after its construction: without a param_dtype, its arrays keep their dtypes.
    convert = jnp.copy if "param_dtype" not in options else lambda x: jnp.array(x, options["param_dtype"])
    state = jax.tree.map(convert, nnx.state(dense, nnx.Param))
    load_params(layer, dict(nnx.to_flat_state(state)), "the dense layer")
    return layer


def _qk_norm(dense: nnx.MultiHeadAttention) -> dict[str, Any]:
    """Returns the current norms of q and k, which may have changed since the dense layer was made.

    Raises:
      ValueError: they have another type, or differ.
    """
    if not dense.normalize_qk:
        return {}
    norms: list[Any] = [dense.query_ln, dense.key_ln]
    settings = {(type(norm), norm.epsilon) for norm in norms}
    (norm_type, epsilon), *different = settings
    if different or norm_type not in _NORMS:
        raise ValueError(f"normalize_qk: norms of q and k must be alike, LayerNorm or RMSNorm of Flax, got {settings}")
    return {"normalize_qk": _NORMS[norm_type], "norm_epsilon": epsilon}


def from_linen(
    params: Mapping[str, Any], *, pattern: Pattern, seq_len: int, **options: Unpack[LoadedLayerOptions]
) -> SparseSelfAttention:
    """Makes the sparse layer with copies of the parameters of a dense Linen layer.

    With ``pattern="all"`` the outputs are those of the dense layer under a causal mask.

    Args:
      params: the ``"params"`` of ``flax.linen.MultiHeadDotProductAttention``, ``MultiHeadAttention`` or
        ``SelfAttention``: a mapping with the entries query, key and value {kernel [F, heads, H], bias [heads, H]}, out
        {kernel [N, H, F'], bias [F']} and, with QK norm, query_ln and key_ln {scale [H]}; either all biases or none.
        Sizes follow from the shapes. `sparse_layers.linen.SparseSelfAttention` has the same layout; its sinks [N] are
        loaded with use_sinks=True, and its bias_table with relative_bias.
      pattern, seq_len: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention` that the parameters do not fix: ``dtype``, ``rope``,
        ``use_sinks``, ``implementation``, ...; ``normalize_qk="rms"`` and ``norm_epsilon`` for norms of q and k other
        than Flax's layer norms, whose parameters have the same names; ``param_dtype`` for all parameters, without
        which each array keeps its own.

    Returns:
      A `SparseSelfAttention`; its sinks and bias_table, if any, start at zero unless params has them.

    Raises:
      ValueError: unknown or missing names, shapes that do not fit, by name; an option that the parameters fix; a
        param_dtype that is not floating; and errors of `SparseSelfAttention`.
      TypeError: params that are not a mapping; an unknown option.

    Example:
      >>> import jax, jax.numpy as jnp, sparse_layers as sl
      >>> from flax import linen
      >>> x = jnp.ones((1, 16, 8))
      >>> variables = linen.MultiHeadDotProductAttention(num_heads=2).init(jax.random.key(0), x)
      >>> sl.from_linen(variables["params"], pattern="local:local_attn_ctx=4", seq_len=16)(x).shape
      (1, 16, 8)
    """
    refuse_fixed(options, _FIXED_BY_LAYER, "the parameters")
    refuse_unknown(from_linen, options)
    check_settings(**options)
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a mapping of a Linen layer's parameters, got {type(params).__name__}")
    if isinstance(params.get("params"), Mapping):
        raise ValueError("params: got a layer's variables; pass variables['params']")
    values = _flat_params(params)
    shapes = {".".join(path): jnp.shape(array) for path, array in values.items()}
    if "sinks" in shapes and not options.get("use_sinks"):
        raise ValueError("params: has sinks, which need use_sinks=True")
    if "bias_table" in shapes and options.get("relative_bias") is None:
        raise ValueError("params: has a bias_table, which needs relative_bias=, as sl.LearnedBias(64)")
    normalize_qk = any(path[0] in ("query_ln", "key_ln") for path in values)
    requested_norm = options.get("normalize_qk", normalize_qk)
    if bool(requested_norm) != normalize_qk:
        raise ValueError(
            f"normalize_qk: params have {'' if normalize_qk else 'no '}norms of q and k, got {requested_norm!r}"
        )
    sizes = _linen_sizes(shapes)
    layer_options: dict[str, Any] = dict(options)
    dtype = layer_options.pop("param_dtype", None)
    arrays: dict[PathParts, jax.Array] = {path: jnp.array(array, dtype) for path, array in values.items()}
    settings = sizes | {"param_dtype": arrays["query", "kernel"].dtype, "normalize_qk": normalize_qk} | layer_options
    layer = _make_layer(pattern=pattern, seq_len=seq_len, **settings)
    load_params(layer, arrays, "params")
    return layer


def _flat_params(params: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Returns the arrays of a Linen layer's parameters by path; a leaf of params may be an array."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, leaves in meta.unbox(dict(params)).items():
        named = leaves.items() if isinstance(leaves, Mapping) else [(None, leaves)]
        flat |= {(name,) if leaf is None else (name, leaf): array for leaf, array in named}
    return flat


def _linen_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the sizes and use_bias of a layer whose parameters have these shapes, as far as three kernels say.

    Raises:
      ValueError: kernels that are missing, or whose shapes do not fit.
    """
    kernels = ("query.kernel", "key.kernel", "out.kernel")
    refuse_names([name for name in kernels if name in shapes], kernels, "params")
    for name in kernels:
        if len(shapes[name]) != 3:
            raise ValueError(f"params: {name} must have three axes, got shape {shapes[name]}")
    features, heads, size = shapes["query.kernel"]
    kv_heads, out_features = shapes["key.kernel"][1], shapes["out.kernel"][2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"params: the {kv_heads} heads of key.kernel must divide the {heads} of query.kernel")
    return {
        "num_heads": heads,
        "in_features": features,
        "qkv_features": heads * size,
        "out_features": out_features,
        "num_kv_heads": kv_heads,
        "use_bias": any(name.endswith(".bias") for name in shapes),
    }


def _make_layer(**settings: Any) -> SparseSelfAttention:
    """Makes a layer with zero kernels, as its parameters are replaced next."""
    settings = {"kernel_init": nnx.initializers.zeros} | settings
    return SparseSelfAttention(rngs=nnx.Rngs(0), **settings)


def load_params(module: nnx.Module, values: Mapping[PathParts, Any], source: str) -> None:
    """Replaces the parameters of a module by values, arrays or variables; only sinks and bias tables may be missing.

    Raises:
      ValueError: the names or shapes of values are not those of the parameters.
    """
    params: dict[PathParts, Any] = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    params = {path: param for path, param in params.items() if path in values or path[-1] not in _OPTIONAL}
    dotted = {path: ".".join(map(str, path)) for path in (*params, *values)}
    refuse_names([dotted[path] for path in values], [dotted[path] for path in params], source)
    shapes, expected = ({dotted[path]: jnp.shape(x) for path, x in arrays.items()} for arrays in (values, params))
    refuse_shapes(shapes, expected, source)
    filled = [(path, x if isinstance(x, nnx.Variable) else params[path].replace(x)) for path, x in values.items()]
    nnx.update(module, nnx.from_flat_state(filled))


def refuse_fixed(options: Iterable[str], fixed: Collection[str], source: str) -> None:
    """Raises ValueError for an option that the source fixes."""
    overridden = [name for name in options if name in fixed]
    if overridden:
        raise ValueError(f"{overridden[0]}: comes from {source} and cannot be changed")


def refuse_names(names: Collection[str], expected: Collection[str], source: str) -> None:
    """Raises ValueError unless names are those expected."""
    unknown, missing = ([n for n in a if n not in set(b)] for a, b in ((names, expected), (expected, names)))
    wrong = [f"{fault} {abbreviate(x)}" for fault, x in (("unknown", unknown), ("missing", missing)) if x]
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")


def refuse_shapes(shapes: Mapping[str, tuple], expected: Mapping[str, tuple], source: str) -> None:
    """Raises ValueError unless each shape is that expected of its name."""
    wrong = [f"{n} {shape}, not {expected[n]}" for n, shape in shapes.items() if n in expected and shape != expected[n]]
    if wrong:
        raise ValueError(f"{source}: shapes that do not fit: {abbreviate(wrong)}")


def abbreviate(names: Collection[str]) -> str:
    """Returns the first six names, and the number of the others."""
    return ", ".join(list(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
