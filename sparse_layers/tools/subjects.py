"""The subjects of `describe` and `draw`: a mask with lengths, or plans found in a layer or a model."""

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arguments.checks import Length, checked
from ..masks.adapters import as_masks
from ..masks.algebra import Mask
from ..ops.planning.exchanges import TokenBytes
from ..ops.planning.plan import Plan
from ..scorers import Scorer, as_scorer, scorer_of

LONGEST = 1 << 20  # tokens that are planned in seconds, whatever the pattern
_PACKAGE = __name__.partition(".")[0]
_PATHS = 8  # most paths in a heading or an error
_MASK_TYPES = Mask, Scorer
# What holds no layers.
_LEAVES = (str, bytes, int, float, complex, range, type, type(None), types.ModuleType, types.FunctionType)


class Planned(NamedTuple):
    """A layer's plan, and what is known of the layer."""

    plan: Plan
    scorer: Scorer | None = None  # that chooses blocks within it, if one does
    heads: tuple[int, int] | None = None  # query heads and key heads, if they are known
    token: TokenBytes | None = None  # bytes of one token, if heads and their size are known
    dtype: str | None = None  # the name of the dtype that it computes in, if it is known
    head_size: int | None = None  # features of a head, if they are known
    sinks: bool = False  # whether heads have sinks
    # logits_soft_cap, scale, implementation: those of the layer's calls of the op.
    logits_soft_cap: float | None = None
    scale: float | None = None
    implementation: str | None = None
    recompute: bool = False  # True if the backward pass computes the forward pass again
    relative_bias: Any = None  # a `RelativeBias` of the layer
    segment_ids: bool = False  # True if calls have segment ids
    fixed: bool = False  # True if calls use this very plan, on each device

    @property
    def groups(self) -> int:
        """Query heads that share a key head; 1 if heads are not known."""
        return 1 if self.heads is None else self.heads[0] // self.heads[1]


def plans_of(subject: Any) -> dict[str, Planned] | None:
    """Returns the plans of a subject by their headings: '', layers, branches or paths; None if it has no plans.

    A model of a user's own is searched: layers of this package and plans are found in fields, lists and dicts. The
    ``setup`` of a Linen module runs abstractly.
    """
    if isinstance(subject, (*_MASK_TYPES, str)):
        return None
    plans = _plans_of_library_object(_unbound(subject))
    return plans if plans is not None else _plans_by_path(subject)


def _plans_of_library_object(subject: Any) -> dict[str, Planned] | None:
    """Returns the plans of a plan, attention function, layer, residual block or `SparseTransformer`; else None."""
    if isinstance(subject, functools.partial):  # of `make_attention_fn`, with segment ids
        plans, segmented = _plans_of_library_object(subject.func) or {}, "segment_ids" in subject.keywords
        return {name: planned._replace(segment_ids=segmented) for name, planned in plans.items()} or None
    if isinstance(subject, Plan):
        return {"": Planned(subject, fixed=True)}
    if not any(cls.__module__.partition(".")[0] == _PACKAGE for cls in type(subject).__mro__):
        return None
    if hasattr(subject, "blocks") and hasattr(subject, "num_layers"):
        blocks = [
            _plans_of_library_object(subject.blocks[layer % len(subject.blocks)]) for layer in range(subject.num_layers)
        ]
        if (bias := subject.shared_relative_bias) is not None:
            blocks = [
                plans and {name: planned._replace(relative_bias=bias) for name, planned in plans.items()}
                for plans in blocks
            ]
        return None if None in blocks else _grouped(dict(enumerate(blocks)), subject.num_layers)
    attention = dict(_members(subject)).get("attention")  # that of a block
    if attention is None:
        return _planned(subject)
    plans = _planned(_unbound(attention), subject.features) or {}
    recompute = getattr(subject, "remat", False)
    return {name: x._replace(recompute=x.recompute or recompute) for name, x in plans.items()} or None


def _grouped(layers: dict[int, Any], total: int) -> dict[str, Planned]:
    """Returns plans by the layers that have them, equal ones once."""
    keys_by_plans = _by_plans(layers)
    plans = {}
    for branches, numbers in keys_by_plans.items():
        heading = f"all {total} layers"
        if len(keys_by_plans) > 1:
            heading = f"layers {', '.join(map(str, numbers))} of {total}"
        plans |= {", ".join(filter(None, (heading, branch))): planned for branch, planned in branches}
    return plans


def _by_plans(entries: dict[Any, dict[str, Planned]]) -> dict[tuple[tuple[str, Planned], ...], list[Any]]:
    """Returns the keys of entries by their plans: equal plans have one list."""
    keys_by_plans: dict[tuple[tuple[str, Planned], ...], list[Any]] = {}
    for key, plans in entries.items():
        keys_by_plans.setdefault(tuple(plans.items()), []).append(key)
    return keys_by_plans


def _planned(subject: Any, features: int | None = None) -> dict[str, Planned] | None:
    """Returns the plans of a layer by branch, '' if it has one, or of an attention function; else None.

    ``features`` are those of its inputs, if they are known.
    """
    pattern, heads, dtype = getattr(subject, "pattern", None), _heads(subject), _dtype(subject)
    head_size = _head_size(subject, features)
    settings = heads, _token(heads, dtype, head_size), dtype, head_size, *_options(subject)
    if hasattr(subject, "plans"):  # a `NativeSparseAttention`
        scorers = {"selected": pattern}
        return {name: Planned(plan, scorers.get(name), *settings) for name, plan in subject.plans.items()}
    plan = getattr(subject, "plan", None)
    if callable(plan) and hasattr(subject, "seq_len"):  # an `AttentionFn`
        plan = plan(subject.seq_len)
    # A layer's function knows its scorer; of a Linen layer, the attributes say it.
    fn = getattr(getattr(subject, "attention_fn", None), "fn", subject)
    scorer = as_scorer(getattr(fn, "selection", None)) or scorer_of(pattern)
    return {"": Planned(plan, scorer, *settings)} if isinstance(plan, Plan) else None


def _heads(layer: Any) -> tuple[int, int] | None:
    """Query heads and key heads of a layer; None of an attention function."""
    heads = getattr(layer, "num_heads", None)
    return None if heads is None else (heads, getattr(layer, "num_kv_heads", None) or heads)


def _options(layer: Any) -> tuple[bool, float | None, float | None, str | None, bool, Any]:
    """The options of a layer's calls of the op, the fields of `Planned` from ``sinks`` to ``relative_bias``.

    A layer of Linen has attributes of these names. One of NNX or Haiku has a function that does, or three of them.
    """
    step = getattr(layer, "attention_fn", None) or getattr(layer, "attention_step", None)
    fn = getattr(step, "fn", None) or getattr(layer, "selected", None) or layer
    sinks = getattr(layer, "use_sinks", False) or getattr(layer, "sinks", None) is not None
    cap, scale, implementation = (getattr(fn, name, None) for name in ("logits_soft_cap", "scale", "implementation"))
    return sinks, cap, scale, implementation, getattr(fn, "recompute", False), getattr(layer, "relative_bias", None)


def _dtype(layer: Any) -> str | None:
    """The dtype that a layer computes in; None of what has no parameters, and computes in that of its inputs."""
    for module in (layer, getattr(layer, "query", None)):  # a `NativeSparseAttention` of NNX keeps it in projections
        dtype, param_dtype = getattr(module, "dtype", None), getattr(module, "param_dtype", None)
        if dtype is None and param_dtype is not None and jnp.dtype(param_dtype).itemsize >= 4:
            dtype = param_dtype  # inputs of half precision are promoted to it
        if dtype is not None:
            return jax.dtypes.canonicalize_dtype(dtype).name
    return None


def _head_size(layer: Any, features: int | None) -> int | None:
    """Features of a layer's heads; None where these are not known before it has seen inputs."""
    heads, size, projected = (getattr(layer, name, None) for name in ("num_heads", "head_dim", "qkv_features"))
    size, features = size or getattr(layer, "key_size", None), projected or features  # key_size: a layer of Haiku
    return size or (features // heads if heads and features else None)


def _token(heads: tuple[int, int] | None, dtype: str | None, size: int | None) -> TokenBytes | None:
    """Bytes of one token of a layer's heads of a size, if both are known."""
    if heads is None or not size:
        return None
    return TokenBytes.of(*heads, size, jnp.dtype(dtype or "float32").itemsize)


# --- models of users' own --------------------------------------------------------------------------------------------


def _plans_by_path(subject: Any) -> dict[str, Planned] | None:
    """The plans in a model's fields by their paths, equal ones once; None if there are none."""
    layers = {path: plans for path, _, plans in walk(subject) if plans is not None}
    plans = {}
    for branches, paths in _by_plans(layers).items():
        heading = ", ".join(paths[:_PATHS]) + f" and {len(paths) - _PATHS} more" * (len(paths) > _PATHS)
        plans |= {", ".join(filter(None, (heading, branch))): planned for branch, planned in branches}
    return plans or None


def walk(subject: Any) -> Iterator[tuple[str, Any, dict[str, Planned] | None]]:
    """Visits an object and all in its fields, lists and dicts, but for what lies within layers of this package.

    Yields:
      (path, object, its plans if it is of this package), objects once.
    """
    visited, stack = {}, [("", subject)]
    while stack:
        path, value = stack.pop()
        if _is_array(type(value)) or isinstance(value, _LEAVES) or id(value) in visited:
            continue
        visited[id(value)] = value  # kept, so that no other object gets its id
        value = _unbound(value)
        plans = None if isinstance(value, _MASK_TYPES) else _plans_of_library_object(value)
        yield path, value, plans
        if plans is None and not isinstance(value, _MASK_TYPES):
            members = [
                (f"{path}.{name}" if path and name[0] != "[" else path + name, member)
                for name, member in _members(value)
            ]
            stack += reversed(members)


def _is_array(kind: type) -> bool:
    """True for arrays, and for variables of NNX around them; asks no property of an object."""
    return hasattr(kind, "shape") and (hasattr(kind, "dtype") or hasattr(kind, "get_raw_value"))


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Returns the entries or fields of an object, by the path from it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, Sequence):
        yield from ((f"[{i}]", member) for i, member in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    else:
        fields = dict(vars(_set_up(value))) if hasattr(value, "__dict__") else {}
        slots = (name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ()))
        fields |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
        hidden = ("_", "scope") if is_linen(value) else ("__", "_pytree__")  # how Flax keeps its books
        yield from ((name, member) for name, member in fields.items() if not name.startswith(hidden))


def is_linen(value: Any) -> bool:
    """True for modules of Linen."""
    return all(hasattr(type(value), name) for name in ("setup", "bind", "clone", "apply"))


def is_nnx(value: Any) -> bool:
    """True for modules, states, optimizers and random streams of NNX."""
    return any(cls.__module__.startswith("flax.nnx") for cls in type(value).__mro__)


def _unbound(value: Any) -> Any:
    """A module of Linen without the call that made it; all else as it is."""
    return value.clone(parent=None) if is_linen(value) else value


def _set_up(value: Any) -> Any:
    """A module of Linen with the modules that its ``setup`` makes; all else as it is."""
    if not is_linen(value):
        return value
    modules = []

    def set_up():
        modules.append(_unbound(value).bind({}, rngs={"params": jax.random.key(0)}, mutable=True))
        hasattr(modules[0], "_")  # Linen calls setup where an attribute is missing

    jax.eval_shape(set_up)  # parameters are not made
    return modules[0]


def _looked_at(subject: Any) -> str:
    """Lists the paths and types of what `walk` visits, for an error."""
    visited = [(path, value) for path, value, _ in walk(subject) if path]
    names = [f"{path} ({type(value).__name__})" for path, value in visited[:_PATHS]]
    rest = f" and {len(visited) - _PATHS} more" * (len(visited) > _PATHS)
    text = f"; looked at {', '.join(names)}{rest}" if names else "; it has no fields to look at"
    if any(isinstance(value, Mask) for _, value in visited):
        text += "; a mask needs a length, describe(mask, q_len)"
    if any(is_linen(value) for value in (subject, *(value for _, value in visited))):
        text += "; layers that a Linen module makes in @nn.compact exist in calls only: describe one by itself"
    return text


# --- lengths ---------------------------------------------------------------------------------------------------------


def lengths_of(mask: Any, q_len: Any, kv_len: Any, limit: int | None = None) -> tuple[int, int]:
    """Returns the lengths for which a mask is described."""
    if q_len is None:
        try:
            as_masks(mask)
        except TypeError:
            raise TypeError(
                "subject must be a mask, or a Plan, layer or model, or hold such in fields, lists or dicts, got "
                f"{type(mask).__name__}{_looked_at(mask)}"
            ) from None
        raise ValueError("q_len must be an integer >= 1 with a mask, which has no length of its own, got None")
    lengths = {"q_len": q_len, "kv_len": q_len if kv_len is None else kv_len}
    for name, length in lengths.items():
        lengths[name] = checked(name, length, Length)
        if limit is not None and lengths[name] > limit:
            raise ValueError(
                f"{name} must be at most {limit}, got {length}: to plan more may take minutes; `picture`, and `draw` "
                "without blocks, show any length, and fewer tokens the same pattern"
            )
    return lengths["q_len"], lengths["kv_len"]


def check_is_none(subject: Any, values: dict[str, Any]) -> None:
    """Raises ValueError for what may be given with a mask only."""
    for name, value in values.items():
        if value is not None:
            kind = type(subject).__name__
            raise ValueError(f"{name} must be None where a plan says it, as that of this {kind} does, got {value!r}")
