"""Dense weights into sparse layers: Flax's multi-head attention, NNX or Linen."""

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
from ..settings import LoadedLayerOptions, check_settings

_FIXED_BY_LAYER = ("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads", "in_kv_features")
_FIXED_BY_LAYER += ("head_dim", "use_bias", "rngs")
_NORMS = {nnx.LayerNorm: "layer", nnx.RMSNorm: "rms"}


def from_nnx(
    dense: nnx.MultiHeadAttention, *, pattern: Pattern, seq_len: int, **options: Unpack[LoadedLayerOptions]
) -> SparseSelfAttention:
    """The sparse layer with the settings and copies of the parameters of a dense NNX layer.

    Heads, key and value heads, features, biases, QK norm, dtypes, precision and the parameters' metadata are those of
    the dense layer, which is left as it is. With ``pattern="all"`` the outputs are those of the dense layer under a
    causal mask.

    Args:
      dense: a ``flax.nnx.MultiHeadAttention`` for self-attention.
      pattern, seq_len: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention` that the dense layer does not fix: ``rope``,
        ``use_sinks``, ``implementation``, ...; and ``dtype``, ``param_dtype``, ``precision`` to change them.

    Returns:
      A `SparseSelfAttention`; its sinks, if any, start at zero.

    Raises:
      TypeError: dense is no ``flax.nnx.MultiHeadAttention``, or a `SparseSelfAttention` already; an unknown option.
      ValueError: what cannot be taken over: dropout of the weights, keys of other features than the queries', an
        attention function other than Flax's own, parameters that such a layer does not have (of an adapter, say);
        an option that the dense layer fixes; a param_dtype that is no float; and what `SparseSelfAttention` refuses.

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
            "flax.nnx.dot_product_attention first, and say the rest by options (rope, logits_soft_cap, scale)"
        )
    sizes = ("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads")
    kept = ("use_bias", "dtype", "param_dtype", "precision", "qkv_promote_dtype", "out_promote_dtype")
    kept += ("ln_promote_dtype", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls")
    settings = {name: getattr(dense, name) for name in sizes + kept} | _qk_norm(dense) | options
    layer = _layer(pattern=pattern, seq_len=seq_len, **settings)
    # A dense layer may have been cast after its construction: without a wish, its arrays are taken as they are.
    convert = jnp.copy if "param_dtype" not in options else lambda x: jnp.array(x, options["param_dtype"])
    state = jax.tree.map(convert, nnx.state(dense, nnx.Param))
    fill(layer, dict(nnx.to_flat_state(state)), "the dense layer")
    return layer


def _qk_norm(dense: nnx.MultiHeadAttention) -> dict[str, Any]:
    """The norms of q and k, as they are: they may have been changed after the dense layer was made.

    Raises:
      ValueError: they are of another kind, or of two.
    """
    if not dense.normalize_qk:
        return {}
    norms: list[Any] = [dense.query_ln, dense.key_ln]
    kinds = {(type(norm), norm.epsilon) for norm in norms}
    (kind, epsilon), *more = kinds
    if more or kind not in _NORMS:
        raise ValueError(f"normalize_qk: norms of q and k must be alike, LayerNorm or RMSNorm of Flax, got {kinds}")
    return {"normalize_qk": _NORMS[kind], "norm_epsilon": epsilon}


def from_linen(
    params: Mapping[str, Any], *, pattern: Pattern, seq_len: int, **options: Unpack[LoadedLayerOptions]
) -> SparseSelfAttention:
    """The sparse layer with copies of the parameters of a dense Linen layer.

    With ``pattern="all"`` the outputs are those of the dense layer under a causal mask.

    Args:
      params: of ``flax.linen.MultiHeadDotProductAttention``, ``MultiHeadAttention`` or ``SelfAttention``, the
        ``"params"`` of its variables: a mapping with the entries query, key and value {kernel [F, heads, H], bias
        [heads, H]}, out {kernel [N, H, F'], bias [F']} and, of a layer with QK norm, query_ln and key_ln {scale [H]};
        either all biases or none. Sizes are those of the shapes. Those of `sparse_layers.linen.SparseSelfAttention`
        are laid out alike; its sinks [N] are taken with use_sinks=True.
      pattern, seq_len: see `SparseSelfAttention`.
      **options: all other arguments of `SparseSelfAttention` that the parameters do not fix: ``dtype`` (parameters do
        not tell it), ``rope``, ``use_sinks``, ``implementation``, ...; ``normalize_qk="rms"`` and ``norm_epsilon``
        for norms of q and k that are not Flax's layer norms, whose parameters look alike; ``param_dtype``: of all
        parameters, where otherwise each array keeps its own.

    Returns:
      A `SparseSelfAttention`; its sinks, if any, start at zero unless params has them.

    Raises:
      ValueError: unknown or missing names, shapes that do not fit, by name; an option that the parameters fix; a
        param_dtype that is no float; and what `SparseSelfAttention` refuses.
      TypeError: params is no mapping; an unknown option.

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
    values = {
        path: array
        for name, leaves in meta.unbox(dict(params)).items()
        for path, array in (
            [((name, leaf), array) for leaf, array in leaves.items()]
            if isinstance(leaves, Mapping)
            else [((name,), leaves)]
        )
    }
    names = {".".join(path): jnp.shape(array) for path, array in values.items()}
    if "sinks" in names and not options.get("use_sinks"):
        raise ValueError("params: has sinks, which need use_sinks=True")
    projections, norms = ("query", "key", "value", "out"), ("query_ln", "key_ln")
    use_bias = any(name.endswith(".bias") for name in names)
    normalize_qk = any(name.partition(".")[0] in norms for name in names)
    wish = options.get("normalize_qk", normalize_qk)
    if bool(wish) != normalize_qk:
        raise ValueError(f"normalize_qk: params have {'' if normalize_qk else 'no '}norms of q and k, got {wish!r}")
    wanted = [f"{name}.kernel" for name in projections]
    wanted += [f"{name}.bias" for name in projections if use_bias]
    wanted += [f"{name}.scale" for name in norms if normalize_qk]
    wanted += ["sinks"] * ("sinks" in names)
    refuse_names(names, wanted, "params")
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
    fitting |= {"sinks": (heads,)}
    refuse_shapes(names, fitting, "params")
    rest: dict[str, Any] = dict(options)
    dtype = rest.pop("param_dtype", None)
    arrays: dict[PathParts, jax.Array] = {path: jnp.array(array, dtype) for path, array in values.items()}
    layer = _layer(
        num_heads=heads,
        in_features=features,
        qkv_features=heads * size,
        out_features=out,
        num_kv_heads=kv_heads,
        pattern=pattern,
        seq_len=seq_len,
        use_bias=use_bias,
        param_dtype=arrays["query", "kernel"].dtype,
        **{"normalize_qk": normalize_qk} | rest,
    )
    fill(layer, arrays, "params")
    return layer


def _layer(**settings: Any) -> SparseSelfAttention:
    """A layer whose parameters are to be replaced: drawing them would be for nothing."""
    settings = {"kernel_init": nnx.initializers.zeros} | settings
    return SparseSelfAttention(rngs=nnx.Rngs(0), **settings)


def fill(module: nnx.Module, values: Mapping[PathParts, Any], source: str) -> None:
    """Puts values, arrays or variables, in the place of the module's parameters; only sinks may stay as they are.

    Raises:
      ValueError: other parameters are there than the module has, or of other shapes.
    """
    params: dict[PathParts, Any] = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    params = {path: param for path, param in params.items() if path in values or path[-1] != "sinks"}
    dotted = {path: ".".join(map(str, path)) for path in (*params, *values)}
    refuse_names([dotted[path] for path in values], [dotted[path] for path in params], source)
    given, wanted = ({dotted[path]: jnp.shape(x) for path, x in side.items()} for side in (values, params))
    refuse_shapes(given, wanted, source)
    filled = [(path, x if isinstance(x, nnx.Variable) else params[path].replace(x)) for path, x in values.items()]
    nnx.update(module, nnx.from_flat_state(filled))


def refuse_fixed(options: Iterable[str], fixed: Collection[str], source: str) -> None:
    """Raises ValueError for an option that the source has fixed."""
    given = [name for name in options if name in fixed]
    if given:
        raise ValueError(f"{given[0]}: comes from {source} and cannot be changed")


def refuse_names(given: Collection[str], wanted: Collection[str], source: str) -> None:
    """Raises ValueError unless the names given are those wanted."""
    unknown, missing = ([n for n in a if n not in set(b)] for a, b in ((given, wanted), (wanted, given)))
    wrong = [f"{kind} {some(names)}" for kind, names in (("unknown", unknown), ("missing", missing)) if names]
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")


def refuse_shapes(given: Mapping[str, tuple], wanted: Mapping[str, tuple], source: str) -> None:
    """Raises ValueError where a shape is not the one wanted under its name."""
    wrong = [f"{n} {shape}, not {wanted[n]}" for n, shape in given.items() if n in wanted and shape != wanted[n]]
    if wrong:
        raise ValueError(f"{source}: shapes that do not fit: {some(wrong)}")


def some(names: Collection[str]) -> str:
    """The first few, and how many more."""
    return ", ".join(list(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
