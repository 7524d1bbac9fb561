"""The rules that settings of layers must follow, in NNX, Linen and Haiku alike."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..arguments.checks import Length, Positive, as_float, checked
from ..arguments.foreign import one_line
from ..ops.kernels.quantized import check_cache_dtype
from ..ops.kernels.validation import check_int32, is_floating, shared_hint, transposed_hint
from .activations import ACTIVATIONS, GATED_ACTIVATIONS
from .mixture import MixtureOfExperts
from .options import FlaxOptions
from .relative_bias import RelativeBias
from .rope import Rope

PROJECTIONS = "query", "key", "value", "out"  # of an attention layer, by their parameter names
SHARED_NORM = "shared_norm"  # the value of parallel= for one norm of both branches
BLOCK_PROJECTIONS = (*PROJECTIONS, "mlp")  # the projections of a residual block that may have biases

F = TypeVar("F", bound=Callable[..., Any])


def check_settings(**settings: Any) -> None:
    """Refuses settings that break the rule of their name. Names without a rule pass.

    Raises:
      ValueError: a value of another type or range.
      TypeError: rngs that are not ``nnx.Rngs``, an initializer that is not callable.

    Example:
      >>> check_settings(num_heads=4, dropout_rate=1)
      Traceback (most recent call last):
      ValueError: dropout_rate must be a number in [0, 1), got 1
    """
    for name, value in settings.items():
        if name in _RULES:
            _RULES[name](name, value)


def with_checked_settings(*unchecked: str) -> Callable[[F], F]:
    """Decorates a constructor so that `check_settings` first checks its arguments, except those named ``unchecked``.

    Example:
      >>> @with_checked_settings()
      ... def make_layer(num_heads, *, dropout_rate=0.0): ...
      >>> make_layer(0)
      Traceback (most recent call last):
      ValueError: num_heads must be an integer >= 1, got 0
    """

    def decorate(constructor: F) -> F:
        names = list(inspect.signature(constructor).parameters)

        @functools.wraps(constructor)
        def checked_constructor(*args: Any, **kwargs: Any) -> Any:
            settings = dict(zip(names, args, strict=False)) | kwargs
            check_settings(**{name: value for name, value in settings.items() if name not in unchecked})
            return constructor(*args, **kwargs)

        return checked_constructor  # pyright: ignore[reportReturnType] (it has the constructor's signature)

    return decorate


def check_array(name: str, value: Any, shape: str) -> None:
    """Raises TypeError unless the value is an array of JAX or numpy."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} must be an array {shape}, got {type(value).__name__}: {one_line(value)}")


def check_ids(name: str, ids: Any, tokens: list[tuple[int, ...]]) -> None:
    """Refuses ids that are not one for each of the tokens, of queries alone or of queries and keys."""
    names, arrays = [name], [ids]
    if len(tokens) > 1:
        if not (isinstance(ids, tuple) and len(ids) == 2):
            raise TypeError(f"{name} must be a pair (of queries, of keys) of arrays, got {one_line(ids)}")
        names, arrays = [f"{name} of queries", f"{name} of keys"], list(ids)
    for name, array, shape in zip(names, arrays, tokens, strict=True):
        check_array(name, array, "[..., T]")
        if array.shape != shape:
            hint = transposed_hint(array.shape, shape) or shared_hint(array.shape, shape)
            raise ValueError(f"{name} must have one id a token, {shape}, got shape {array.shape}{hint}")
        if isinstance(array, np.ndarray) and array.dtype.kind in "iu":  # `jax.checkpoint` would cut 64 bits off
            check_int32(name, array)


def check_features(name: str, value: Any, shape: str, features: int) -> None:
    """Refuses a value that is not an array of floats with ``features`` features on its last axis.

    ``shape`` is the shape to name in errors.
    """
    check_array(name, value, shape)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{name} must be floats {shape}, got {value.dtype}: tokens are embedded first")
    if value.shape[-1:] != (features,):
        raise ValueError(f"{name} must have shape {shape}, got {value.shape}")


def check_order(num_heads: int, features: int, head_dim: int | None = None) -> None:
    """Refuses more heads than features without a head_dim, as the two were probably swapped."""
    if features < num_heads and head_dim is None:
        raise ValueError(
            f"num_heads={num_heads} must not exceed features={features}: their order is (num_heads, features)"
        )


def check_stream(rngs: nnx.Rngs, stream: str, use: str) -> None:
    """Refuses rngs without the stream that ``use`` needs."""
    if stream not in rngs and "default" not in rngs:
        raise ValueError(f"rngs must have a stream {stream!r} or 'default' for {use}, got those of {list(rngs)}")


def query_features(num_heads: int, features: int, qkv_features: int | None, head_dim: int | None) -> int:
    """Returns the features of all query heads together, a multiple of num_heads.

    Raises:
      ValueError: num_heads does not divide them, or qkv_features and head_dim contradict each other.

    Example:
      >>> query_features(4, 64, None, None), query_features(4, 64, None, 8)
      (64, 32)
    """
    if head_dim is not None:
        if qkv_features not in (None, num_heads * head_dim):
            raise ValueError(
                f"qkv_features={qkv_features} contradicts head_dim={head_dim}: it must be num_heads * head_dim = "
                f"{num_heads * head_dim}; leave out one of the two"
            )
        return num_heads * head_dim
    name, size = ("features", features) if qkv_features is None else ("qkv_features", qkv_features)
    if size % num_heads:
        swapped = f"; num_heads comes before the features: {size}, {num_heads}" if num_heads % size == 0 else ""
        raise ValueError(f"num_heads={num_heads} must divide {name}={size}, or say head_dim{swapped}")
    return size


def projections_with_bias(use_bias: bool | Collection[str], names: Collection[str] = PROJECTIONS) -> frozenset[str]:
    """Returns the projections among ``names`` that have biases.

    Raises:
      ValueError: use_bias is neither a bool nor a collection of these names.

    Example:
      >>> sorted(projections_with_bias(("query", "key", "value")))  # Qwen 2.5
      ['key', 'query', 'value']
    """
    if isinstance(use_bias, bool):
        return frozenset(names if use_bias else ())
    if isinstance(use_bias, str) or not isinstance(use_bias, Collection) or not set(use_bias) <= set(names):
        known = ", ".join(map(repr, names))
        raise ValueError(f"use_bias must be true or false, or names out of {known}, got {one_line(use_bias)}")
    return frozenset(use_bias)


def resolve_qk_norm(normalize_qk: bool | str, norm: str) -> bool | str:
    """Returns the kind of norms of q and k, which True derives from that of a block's norms; they have no biases."""
    return norm.removesuffix("_no_bias") if normalize_qk is True else normalize_qk


def gate_features(gate_output: bool | str, value_size: int) -> int:
    """Returns the number of gates of a head whose values have this size: 0 without gates."""
    return 1 if gate_output == "headwise" else value_size if gate_output else 0


Rule = Callable[[str, Any], object]


def _type_rule(hint: Any) -> Rule:
    return lambda name, value: checked(name, value, hint)


def _optional(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


def _number_rule(rule: str, holds: Callable[[float], bool]) -> Rule:
    def check(name: str, value: Any) -> None:
        number = as_float(value)
        if number is None or not holds(number):
            raise ValueError(f"{name} must be a number{rule}, got {one_line(value)}")

    return check


def _one_of_rule(*names: str) -> Rule:
    rule = " or ".join([", ".join(map(repr, names[:-1])), repr(names[-1])])

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{name} must be {rule}, got {one_line(value)}")

    return check


def _check_qk_norm(name: str, value: Any) -> None:
    if not isinstance(value, bool) and value not in ("layer", "rms", "rms_joint"):
        raise ValueError(f"{name} must be true or false, or 'layer', 'rms' or 'rms_joint', got {one_line(value)}")


def _check_gate(name: str, value: Any) -> None:
    if not isinstance(value, bool) and value not in ("elementwise", "headwise"):
        raise ValueError(f"{name} must be true or false, or 'elementwise' or 'headwise', got {one_line(value)}")


def _check_parallel(name: str, value: Any) -> None:
    if not isinstance(value, bool) and value != SHARED_NORM:
        raise ValueError(f"{name} must be true or false, or {SHARED_NORM!r}, got {one_line(value)}")


def _check_mlp(name: str, value: Any) -> None:
    if not callable(value) and not isinstance(value, MixtureOfExperts):
        _one_of_rule(*ACTIVATIONS, *GATED_ACTIVATIONS)(name, value)


def _check_dtype(name: str, value: Any) -> None:
    if not is_floating(value):
        raise ValueError(f"{name} must be a floating-point dtype, got {one_line(value)}")


def _check_precision(name: str, value: Any) -> None:
    matrix = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda x: jnp.matmul(x, x, precision=value), matrix)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} must be a jax.lax.Precision or the name of one, got {one_line(value)}: {error}"
        ) from error


def _callable_rule(rule: str) -> Rule:
    def check(name: str, value: Any) -> None:
        if not callable(value):
            raise TypeError(f"{name} must be {rule}, got {one_line(value)}")

    return check


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, as {{'sharding': ('model', None)}}, got {one_line(value)}")


def _check_name(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {one_line(value)}")


def _check_key(name: str, value: Any) -> None:
    is_array = isinstance(value, jax.Array)
    is_key = is_array and jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and value.ndim == 0
    is_raw_key = is_array and value.dtype == jnp.uint32 and value.ndim == 1
    if not (is_key or is_raw_key):
        raise ValueError(f"{name} must be one jax.random.key, got {one_line(value)}")


def _check_rope(name: str, value: Any) -> None:
    if not isinstance(value, Rope):
        raise TypeError(f"{name} must be a Rope, as sl.Rope(shape=(16, 16)), or None, got {one_line(value)}")


def _check_relative_bias(name: str, value: Any) -> None:
    if not isinstance(value, RelativeBias):
        raise TypeError(
            f"{name} must be a RelativeBias, as sl.AlibiBias(), or None, got {one_line(value)}; "
            "a DistanceBias is bias= of a call"
        )


def _rngs(name: str, value: Any) -> None:
    if not isinstance(value, nnx.Rngs):
        raise TypeError(f"{name} must be a flax.nnx.Rngs, as nnx.Rngs(0), got {one_line(value)}")


_INITIALIZER = _callable_rule("an initializer, called with (key, shape, dtype)")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("num_heads", "features", "in_features", "num_layers", "vocab_size", "num_tokens"), _type_rule(Positive)
    ),
    **dict.fromkeys(
        (
            *("qkv_features", "out_features", "num_kv_heads", "in_kv_features", "head_dim"),
            *("mlp_features", "position_stride"),
        ),
        _optional(_type_rule(Positive)),
    ),
    **dict.fromkeys(
        (
            *("use_sinks", "remat", "tie_embeddings", "scan_layers", "share_relative_bias", "embedding_norm"),
            *("recompute", "causal", "is_causal", "broadcast_dropout", "keep_rngs"),
        ),
        _type_rule(bool),
    ),
    **dict.fromkeys(("seq_len", "q_len", "kv_len"), _type_rule(Length)),
    "deterministic": _optional(_type_rule(bool)),
    "dropout_rate": _number_rule(" in [0, 1)", lambda x: 0 <= x < 1),
    "norm_epsilon": _number_rule(" >= 0", lambda x: x >= 0),
    "cache_dtype": check_cache_dtype,
    "norm_placement": _one_of_rule("pre", "post", "sandwich"),
    "normalize_qk": _check_qk_norm,
    "gate_output": _check_gate,
    "parallel": _check_parallel,
    **dict.fromkeys(("embedding_scale", "residual_scale", "logits_scale"), _optional(_number_rule("", lambda x: True))),
    "final_soft_cap": _optional(_number_rule(" > 0", lambda x: x > 0)),
    "rope": _optional(_check_rope),
    "relative_bias": _optional(_check_relative_bias),
    "rope_theta": _optional(_number_rule(" > 0", lambda x: x > 0)),
    "scale": _optional(_number_rule("", lambda x: True)),
    "logits_soft_cap": _optional(_number_rule(" > 0", lambda x: x > 0)),
    "temperature": _number_rule(" >= 0", lambda x: x >= 0),
    "top_p": _optional(_number_rule(" in (0, 1]", lambda x: 0 < x <= 1)),
    "padding_side": _one_of_rule("right", "left"),
    "on_tokens": _optional(_callable_rule("a function of the tokens [B] of a step")),
    "mlp": _check_mlp,
    "make_mlp": _optional(_callable_rule("a function that makes the MLP")),
    "norm": _one_of_rule("layer", "layer_no_bias", "rms"),
    "positions": _one_of_rule("row_column", "learned", "rope", "none"),
    "dtype": _optional(_check_dtype),
    "param_dtype": _check_dtype,
    "precision": _optional(_check_precision),
    **dict.fromkeys(("kernel_init", "bias_init"), _INITIALIZER),
    **dict.fromkeys(("out_kernel_init", "out_bias_init", "embedding_init", "head_init"), _optional(_INITIALIZER)),
    **dict.fromkeys(("qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"), _callable_rule("a function")),
    **dict.fromkeys(
        ("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls"),
        _optional(_callable_rule("a function like jax.lax.dot_general, or a class of such")),
    ),
    **dict.fromkeys((name for name in FlaxOptions.__optional_keys__ if name.endswith("_metadata")), _check_mapping),
    "key": _check_key,
    "rngs": _rngs,
    # Names of Haiku.
    "key_size": _type_rule(Positive),
    **dict.fromkeys(("value_size", "model_size"), _optional(_type_rule(Positive))),
    "with_bias": _type_rule(bool),
    "w_init_scale": _optional(_number_rule(" > 0", lambda x: x > 0)),
    "name": _optional(_check_name),
    **dict.fromkeys(
        ("w_init", "b_init", "out_w_init"), _optional(_callable_rule("an initializer, called with (shape, dtype)"))
    ),
}
